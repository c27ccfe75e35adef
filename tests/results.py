"""Trains the rows of tests/results.md on mini, and fills in its tables and README's. Not a test.

    python tests/results.py                        run what is missing: six hours on two cores
    python tests/results.py --rows SCORER+CBR GDE  only these rows
    python tests/results.py --table                run nothing, only fill in the tables
    python tests/results.py --assets RUN           run nothing, make assets/ from a run's folder

A row is a command. It is run with three or six seeds, each run on one thread; two runs go on at a
time. A finished run adds its record to tests/results.json, and the tables are made from these
records alone.

A record counts as long as its row has the same fingerprint: a hash of the results of ten steps of
the row's command on a small mini, to the last bit. So the code may be rewritten and the machine may
be another, but both must compute the same. When a run ends, records with other fingerprints are
dropped from results.json (git keeps them), so that a table never mixes versions of the code, or
machines that round differently. Fingerprints are taken once, at the start, so the code must not be
edited while runs are under way.

Runs are kept in runs/results, each in a folder named after row, seed and fingerprint. Interrupted
runs are continued; folders with old fingerprints may be removed.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fingerprint
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data
import scorer_cbr
from common import InputError, load_checkpoint, run_main, save_tensors, write_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RECORDS = HERE / "results.json"
BOUNDS = HERE / "bounds.json"
RESULTS = HERE / "results.md"
README = ROOT / "README.md"
ASSETS = ROOT / "assets"

# ---- rows ----------------------------------------------------------------------------------------

# Row -> script and flags; mini's presets hold the rest. The released variants learn mini more
# slowly and get twice the steps; without pre-training, IDC gets as many steps as with it.
ROWS = {
    "SCORER+CBR": "scorer_cbr.py",
    "DIRL+CCR": "dirl_ccr.py",
    "RDD+ACR": "rdd_acr.py",
    "CHEERS": "cheers.py",
    "IDC": "idc_pretrain.py",
    "Subtraction": "scorer_cbr.py --difference subtract --w_match 0 --w_cbr 0",
    "RR": "scorer_cbr.py --w_match 0 --w_cbr 0",
    "SCORER": "scorer_cbr.py --w_cbr 0",
    "Transformer": "dirl_ccr.py --w_dirl 0 --w_ccr 0",
    "direct-sub": "rdd_acr.py --no-gde --order none --w_n2o 0 --w_v2a 0",
    "GDE": "rdd_acr.py --order none --w_n2o 0 --w_v2a 0",
    "RDD+ACR, no losses": "rdd_acr.py --w_n2o 0 --w_v2a 0",
    "CHEERS, baseline": "cheers.py --layers 0 --k 0 --gate none --w_consistency 0 --w_match 0",
    "HRD": "cheers.py --gate none",
    "IDC, no pre-training": "idc_pretrain.py --pretrain_steps 0 --steps 4200",
    "SCORER+CBR, released": "scorer_cbr.py --variant released --steps 3600",
    "DIRL+CCR, released": "dirl_ccr.py --variant released --steps 4600",
    "RDD+ACR, as printed": "rdd_acr.py --no-residual",
    "IDC, masked targets": "idc_pretrain.py --finetune_targets masked",
    "words alone": "scorer_cbr.py --blind",
}
README_ROWS = list(ROWS)[:6]

SEEDS = (1111, 1, 2)
MORE_SEEDS = (3, 4, 5)  # for the rows of two claims that three seeds cannot decide
ROWS_WITH_MORE = ("RDD+ACR", "RDD+ACR, no losses", "CHEERS", "HRD")

# The scores that a record keeps, and where they are found in scores_test.json.
SCORES = {
    "semantic CIDEr": ("scores", "semantic change", "CIDEr"),
    "change type": ("accuracy", "change type"),
    "all four": ("accuracy", "all four"),
    "new value": ("accuracy", "new value"),
    "place": ("accuracy", "place"),
    "distractors": ("accuracy", "distractors"),
    "hardest views": ("scores", "view: hardest quarter", "CIDEr"),
    "easiest views": ("scores", "view: easiest quarter", "CIDEr"),
    "total CIDEr": ("scores", "total", "CIDEr"),
    "BLEU-4": ("scores", "total", "BLEU-4"),
    "METEOR": ("scores", "total", "METEOR"),
    "color": ("scores", "color", "CIDEr"),
    "material": ("scores", "material", "CIDEr"),
    "add": ("scores", "add", "CIDEr"),
    "drop": ("scores", "drop", "CIDEr"),
    "move": ("scores", "move", "CIDEr"),
    "pointing": ("scores", "total", "pointing"),
}
README_COLUMNS = ["semantic CIDEr", "change type", "all four", "new value", "place", "distractors"]
COLUMNS = [*README_COLUMNS, "hardest views", "total CIDEr", "pointing", "minutes"]
# Names of the floors and the ceiling, see bounds.py.
BOUND_NAMES = (
    "one caption for all",
    "one caption per kind of change",
    "human (one reference held out)",
)


def seeds_of(row: str) -> tuple[int, ...]:
    if row in ROWS_WITH_MORE:
        return SEEDS + MORE_SEEDS
    return SEEDS


# ---- records -------------------------------------------------------------------------------------


def machine() -> dict:
    """A description of this machine and of how a run uses it."""
    about = {"processor": platform.processor() or platform.machine()}
    if Path("/proc/cpuinfo").exists():
        text = Path("/proc/cpuinfo").read_text()
        found = re.search(r"cpu family\s*: (.*)\nmodel\s*: (.*)\nmodel name\s*: (.*)", text)
        if found:
            about["processor"] = f"{found[3]} (family {found[1]}, model {found[2]})"
    return about | {"cores": os.cpu_count(), "torch": torch.__version__, "threads": 1}


def fingerprint_of(row: str, root: Path) -> str:
    """Hash of the results of ten steps of a row, with the present code.

    root: the folder of fingerprint.py's small mini."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        fingerprint.run(ROWS[row], root, out)
        hashes = fingerprint.hashes(out)
        scores = read_scores(out)
    seen = {
        "command": ROWS[row],
        "preset": fingerprint.method_of(ROWS[row]).PRESETS["mini"],  # has more than ten steps
        "losses": hashes["losses"],
        "captions": hashes["captions"],
        "scores": scores,
    }
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:12]


def fingerprints() -> dict[str, str]:
    """Row -> its present fingerprint. Takes some five minutes."""
    print("ten steps of every row, to see which records count", flush=True)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            found[row] = fingerprint_of(row, Path(folder, "mini"))
    return found


def read_scores(folder: Path) -> dict[str, float | None]:
    """SCORES of a finished run; None where there is no value (METEOR without Java)."""
    result = json.loads((folder / "scores_test.json").read_text(encoding="utf-8"))
    return {name: value_at(result, path) for name, path in SCORES.items()}


def value_at(result: dict, path: tuple[str, ...]) -> float | None:
    value = result
    for key in path:
        value = value.get(key)
        if value is None:
            return None
    return None if math.isnan(value) else value


def read_records() -> list[dict]:
    return json.loads(RECORDS.read_text(encoding="utf-8"))


def write_records(records: list[dict]) -> None:
    """Writes each record on a line of its own, because git compares lines."""
    lines = [json.dumps(record) for record in records]
    write_text(RECORDS, "[\n" + ",\n".join(lines) + "\n]\n")


def counting(records: list[dict], today: dict[str, str]) -> list[dict]:
    """The records that have the present fingerprint of their row."""
    found = []
    for record in records:
        row = record["row"]
        if row in today and record.get("fingerprint") == today[row]:
            found.append(record)
    return found


# ---- running -------------------------------------------------------------------------------------


@dataclass
class Job:
    """A run under way."""

    record: dict  # what is known at its start
    folder: Path
    resumed: bool
    began: float
    process: subprocess.Popen


def new_record(row: str, seed: int, today: dict[str, str]) -> dict:
    return {
        "row": row,
        "seed": seed,
        "command": f"python {ROWS[row]} --seed {seed}",
        "fingerprint": today[row],
        "machine": machine(),
    }


def folder_of(record: dict, runs: Path) -> Path:
    row = re.sub(r"[^a-z0-9]+", "-", record["row"].lower())
    return runs / f"{row}-{record['seed']}-{record['fingerprint']}"


def start(record: dict, runs: Path, data_dir: str) -> Job:
    """Starts or continues a run. Its output goes to <folder>.txt."""
    folder = folder_of(record, runs)
    resumed = (folder / "last.pt").exists()
    if folder.exists() and not resumed:
        shutil.rmtree(folder)  # the run was killed before it had saved anything
    _, script, *flags = record["command"].split()
    call = [sys.executable, str(ROOT / script), *flags, "--device", "cpu"]
    call += ["--data_dir", data_dir, "--out_dir", str(folder)]
    if resumed:
        call.append("--resume")
    print(f"{time.strftime('%H:%M')} {record['row']}, seed {record['seed']}", flush=True)
    runs.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.txt", "a") as output:
        process = subprocess.Popen(
            call,
            stdout=output,
            stderr=output,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # shields it from Ctrl-C; run_all ends it by SIGTERM
        )
    return Job(record, folder, resumed, time.perf_counter(), process)


def finish(job: Job, today: dict[str, str]) -> bool:
    """Records a run that has ended -> whether it succeeded."""
    record = job.record
    if job.process.returncode:
        print(f"{record['row']}, seed {record['seed']} failed; see {job.folder}.txt", flush=True)
        return False
    minutes = round((time.perf_counter() - job.began) / 60, 2)
    record["minutes"] = None if job.resumed else minutes
    record["scores"] = read_scores(job.folder)
    write_records([*counting(read_records(), today), record])
    return True


def run_all(waiting: list[dict], today: dict[str, str], args: argparse.Namespace) -> bool:
    """Makes the runs of new records, args.jobs at a time, and fills in the tables after each ->
    whether all succeeded. On Ctrl-C, the runs under way save and end, too."""
    running: list[Job] = []
    succeeded = True
    try:
        while waiting or running:
            while waiting and len(running) < args.jobs:
                running.append(start(waiting.pop(0), args.runs, args.data_dir))
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                if finish(job, today):
                    write_tables()
                else:
                    succeeded = False
            time.sleep(0.2)
    finally:
        for job in running:
            job.process.terminate()
        for job in running:
            job.process.wait()
    return succeeded


# ---- tables --------------------------------------------------------------------------------------


def values(records: list[dict], row: str, column: str) -> list[float]:
    """A column's values in the records of a row, without missing ones."""
    found = []
    for record in records:
        if record["row"] == row:
            value = record["minutes"] if column == "minutes" else record["scores"].get(column)
            if value is not None:
                found.append(value)
    return found


def ciders(records: list[dict], row: str) -> list[float]:
    return values(records, row, "semantic CIDEr")


def cell(found: list[float]) -> str:
    """Mean and, in parentheses, the range: the largest value minus the smallest."""
    if not found:
        return "-"
    mean = f"{statistics.fmean(found):.1f}"
    if len(found) == 1:
        return mean
    return f"{mean} ({max(found) - min(found):.1f})"


def table_line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def results_table(records: list[dict], rows: list[str], columns: list[str]) -> str:
    """A table with a line for each row; below it, what is noise, and the machines."""
    lines = [table_line(["row", "seeds", *columns]), "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        seeds = sum(record["row"] == row for record in records)
        cells = [cell(values(records, row, column)) for column in columns]
        lines.append(table_line([row, str(seeds), *cells]))
    text = "{processor}, {cores} cores, torch {torch}, {threads} thread a run"
    machines = {text.format(**record["machine"]) for record in records}
    if machines:
        lines += ["", f"Noise: differences below {noise(records):.0f} in semantic CIDEr."]
        lines += ["", f"Computed on: {'; '.join(sorted(machines))}."]
    return "\n".join(lines) + "\n"


def noise(records: list[dict]) -> float:
    """Three standard errors of the difference between two means of three seeds, in semantic CIDEr.
    The variance between seeds is pooled over all rows."""
    squares = 0.0
    freedom = 0
    for row in ROWS:
        ciders = values(records, row, "semantic CIDEr")
        if len(ciders) > 1:
            squares += statistics.variance(ciders) * (len(ciders) - 1)
            freedom += len(ciders) - 1
    variance = squares / max(freedom, 1)
    return 3 * math.sqrt(variance / 3 + variance / 3)


def commands() -> str:
    lines = [f"{row:22} python {command}" for row, command in ROWS.items()]
    return "\n".join(["```", *lines, "```"]) + "\n"


def verdict(better: list[float], worse: list[float]) -> tuple[str, str]:
    """-> the difference of two means with its standard error, and the verdict on the claim that the
    first is higher. tests/results.md states the rule in words."""
    if min(len(better), len(worse)) < 2:
        return "", "not run"
    gap = statistics.fmean(better) - statistics.fmean(worse)
    variance = statistics.variance(better) / len(better) + statistics.variance(worse) / len(worse)
    error = math.sqrt(variance)
    if abs(gap) >= max(3 * error, 10):
        answer = "confirmed" if gap > 0 else "contradicted"
    elif abs(gap) + 3 * error <= 25:
        answer = "no difference of 25"
    else:
        answer = "cannot tell"
    return f"{gap:+.0f} ± {error:.1f}", answer


# These tables are written by hand in tests/results.md, except for the last cells of each line.


def claim_cells(cells: list[str], records: list[dict]) -> tuple[str, ...]:
    """Cells: table, claim (row > row), published -> difference, verdict."""
    better, worse = re.split(" >=? ", cells[1])
    return verdict(ciders(records, better), ciders(records, worse))


def deviation_cells(cells: list[str], records: list[dict]) -> tuple[str, ...]:
    """Cells: row, what it does, other row, what that one does -> CIDEr of both rows."""
    return cell(ciders(records, cells[0])), cell(ciders(records, cells[2]))


def bound_cells(cells: list[str], bounds: dict) -> tuple[str, ...]:
    """Cells: "data set: group of pairs", published figures -> BLEU-4 / CIDEr of floors and ceiling;
    "-" if bounds.json lacks the data set, blank if it lacks this bound."""
    dataset, group = cells[0].split(": ")
    found = []
    for name in BOUND_NAMES:
        if dataset in bounds:
            row = bounds[dataset]["scores"].get(f"{name}: {group}")
            found.append(f"{row['BLEU-4']:.1f} / {row['CIDEr']:.1f}" if row else "")
        else:
            found.append("-")
    return tuple(found)


def parts(text: str, name: str) -> tuple[str, str, str]:
    """A page in three parts: up to and with a table's first mark, the table, and from its second
    mark on."""
    begin = f"<!-- {name}, by tests/results.py -->\n"
    end = "<!-- end -->\n"
    before, rest = text.split(begin)
    inside, after = rest.split(end, 1)
    return before + begin, inside, end + after


def replaced(text: str, name: str, new: str) -> str:
    """A page with `new` between the marks of a table."""
    before, _, after = parts(text, name)
    return before + new + after


def filled(text: str, name: str, last_cells: Callable, source) -> str:
    """A page with new last cells in each line of a table: last_cells(cells, source)."""
    _, inside, _ = parts(text, name)
    head, rule, *lines = inside.splitlines()
    new = [head, rule]
    for line in lines:
        cells = [text.strip() for text in line.strip("|").split("|")]
        last = last_cells(cells, source)
        new.append(table_line([*cells[: -len(last)], *last]))
    return replaced(text, name, "\n".join(new) + "\n")


def write_tables() -> None:
    """Fills in tests/results.md and README.md, from the records and the bounds alone."""
    records = read_records()
    bounds = json.loads(BOUNDS.read_text(encoding="utf-8"))
    text = RESULTS.read_text(encoding="utf-8")
    text = replaced(text, "commands", commands())
    text = replaced(text, "results", results_table(records, list(ROWS), COLUMNS))
    text = filled(text, "claims", claim_cells, records)
    text = filled(text, "deviations", deviation_cells, records)
    text = filled(text, "bounds", bound_cells, bounds)
    write_text(RESULTS, text)
    text = README.read_text(encoding="utf-8")
    text = replaced(text, "results", results_table(records, README_ROWS, README_COLUMNS))
    write_text(README, text)


# ---- assets --------------------------------------------------------------------------------------


def write_assets(run: Path, data_dir: str) -> None:
    """From a run of scorer_cbr.py, writes its weights in float16, a pair of pictures that they
    caption correctly, and a sheet with a pair of each kind of change. The sheet shows the first
    pair with a right caption; last, for the kind that is most often wrong, the first with a wrong
    one."""
    weights = ASSETS / "scorer_cbr-mini.pt"
    write_weights(run / "best.pt", weights)
    dataset = data.load("mini", data_dir)
    right, wrong = caption_pairs(weights, dataset)
    counts = {kind: len(results) for kind, results in wrong.items()}
    worst = max(counts, key=counts.get)
    shown = {kind: results[0] for kind, results in right.items() if kind != worst}
    shown[worst] = wrong[worst][0]
    captions = {pair.id: caption for pair, caption, _ in shown.values()}
    maps = {pair.id: pair_maps for pair, _, pair_maps in shown.values()}
    data.sample_sheet(dataset, "test", captions, maps, {}, ASSETS / "samples.png")
    pair, caption, _ = next(iter(shown.values()))
    shutil.copyfile(dataset.paths[pair.before], ASSETS / "before.png")
    shutil.copyfile(dataset.paths[pair.after], ASSETS / "after.png")
    print(f"assets/before.png and after.png: {pair.id}, {caption!r}")


def write_weights(best: Path, file: Path) -> None:
    """Writes what a captioner needs from a checkpoint, with the model in float16."""
    kept = dict(load_checkpoint(best))
    for name in ("optimizer", "random"):  # only training needs them
        del kept[name]
    kept["config"]["out_dir"] = ""
    for name, weight in kept["model"].items():
        if weight.is_floating_point():
            kept["model"][name] = weight.half()
    save_tensors(file, kept)


def caption_pairs(checkpoint: Path, dataset: data.Dataset) -> tuple[dict, dict]:
    """Captions the changed test pairs from their pictures -> those captioned rightly and those
    captioned wrongly: kind of change -> list of (pair, caption, attention maps)."""
    pairs = dataset.pairs("test")
    pictures = [(dataset.paths[pair.before], dataset.paths[pair.after]) for pair in pairs]
    results = scorer_cbr.load(checkpoint, "cpu").pairs(pictures, 64)
    kinds = [kind for kind in dataset.kinds if kind != "no change"]
    right = {kind: [] for kind in kinds}
    wrong = {kind: [] for kind in kinds}
    for pair, (caption, maps) in zip(pairs, results, strict=True):
        found = right if data.is_right(dataset, pair, caption) else wrong
        for kind in kinds:
            if pair.id in dataset.kinds[kind]:
                found[kind].append((pair, caption, maps))
    return right, wrong


# ---- main ----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = f"only these rows, of {'; '.join(ROWS)}"
    rows = list(ROWS)
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, metavar="ROW", help=text)
    text = "only these seeds"
    seeds = SEEDS + MORE_SEEDS
    parser.add_argument("--seeds", nargs="+", type=int, choices=seeds, default=seeds, help=text)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--runs", type=Path, default=Path("runs/results"), help="folder of runs")
    parser.add_argument("--data_dir", default="data/mini")
    parser.add_argument("--table", action="store_true", help="only fill in the tables")
    text = "only make assets/ from a finished run of scorer_cbr.py"
    parser.add_argument("--assets", type=Path, metavar="RUN", help=text)
    args = parser.parse_args()
    if args.table:
        write_tables()
    elif args.assets:
        write_assets(args.assets, args.data_dir)
    else:
        run_missing(args)


def run_missing(args: argparse.Namespace) -> None:
    """Makes the runs for which no record counts."""
    # Prepare mini first, so that no run's minutes include it.
    data.main(["mini", "--data_dir", args.data_dir, "--device", "cpu"])
    today = fingerprints()
    records = read_records()
    done = {(record["row"], record["seed"]) for record in counting(records, today)}
    missing = []
    for row in args.rows:
        for seed in seeds_of(row):
            if seed in args.seeds and (row, seed) not in done:
                missing.append(new_record(row, seed, today))
    print(f"{len(done)} of {len(records)} records still count, {len(missing)} runs are missing")
    if not run_all(missing, today, args):
        raise InputError("some runs failed, see above")


if __name__ == "__main__":
    run_main(main)
