"""Trains the rows of tests/results.md on mini, and fills in its tables and README's. Not a test.

    python tests/results.py                        run what is missing: six hours on two cores
    python tests/results.py --only SCORER+CBR GDE --seeds 1111       only these
    python tests/results.py --table                run nothing, only fill in the tables
    python tests/results.py --assets RUN           run nothing, make assets/ from a run's folder

A row is a command. It is run with one or three seeds, each run on one thread; two runs go on at a
time. A finished run adds its record to tests/results.json: row, seed, commit, machine, minutes and
scores. The commit is the last one that changed the code, so the records themselves can be committed
between runs; do not edit the code while runs are under way. A run is missing if no record of this
commit has it, and the first record of a row at a new commit replaces the row's older ones (git
keeps them). Tables of several commits are refused, unless --mixed asks for them.

Runs are kept in runs/results, each in a folder named after row, seed and commit. An interrupted run
is continued.
"""

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data
import mini
import scorer_cbr
from common import InputError, load_checkpoint, run_main, save_tensors, write_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RECORDS = HERE / "results.json"
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
    # Four claims that could not be told at the presets' steps, with models that are trained better.
    "SCORER+CBR, twice the steps": "scorer_cbr.py --steps 3600",
    "SCORER, twice the steps": "scorer_cbr.py --w_cbr 0 --steps 3600",
    "DIRL+CCR, twice the steps": "dirl_ccr.py --steps 4600",
    "Transformer, twice the steps": "dirl_ccr.py --w_dirl 0 --w_ccr 0 --steps 4600",
    "RDD+ACR, twice the steps": "rdd_acr.py --steps 3800",
    "RDD+ACR, no losses, twice the steps": "rdd_acr.py --w_n2o 0 --w_v2a 0 --steps 3800",
    "CHEERS, twice the steps": "cheers.py --steps 3400",
    "HRD, twice the steps": "cheers.py --gate none --steps 3400",
}
README_ROWS = list(ROWS)[:6]
SEEDS = (1111, 1, 2)
ONE_SEED = {  # rows that no claim needs are run with the first seed only
    "SCORER+CBR, released",
    "DIRL+CCR, released",
    "RDD+ACR, as printed",
    "IDC, masked targets",
    "words alone",
}

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


def seeds_of(row: str) -> tuple[int, ...]:
    return SEEDS[:1] if row in ONE_SEED else SEEDS


# ---- records -------------------------------------------------------------------------------------


def machine() -> dict:
    """A description of this machine and of how a run uses it."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        text = Path("/proc/cpuinfo").read_text()
        match = re.search(r"cpu family\s*: (.*)\nmodel\s*: (.*)\nmodel name\s*: (.*)", text)
        if match:
            processor = f"{match[3]} (family {match[1]}, model {match[2]})"
    versions = {"torch": torch.__version__, "threads": 1}
    return {"processor": processor, "cores": os.cpu_count()} | versions


def git(*arguments: str) -> str:
    call = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()


def commit_of_the_code() -> str:
    """Hash of the last commit that changed what a run computes."""
    code = [":(glob)*.py", "assets/mini_*.pt"]
    if git("status", "--porcelain", "--", *code):
        raise InputError("the code has uncommitted changes; commit them, as records name a commit")
    return git("log", "-1", "--abbrev=10", "--format=%h", "--", *code)


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


def add_record(record: dict) -> None:
    """Adds a record to results.json, where it replaces those of the same run and those of the same
    row at other commits."""
    kept = []
    for other in read_records():
        same_row = other["row"] == record["row"]
        replaced = other["seed"] == record["seed"] or other["commit"] != record["commit"]
        if not (same_row and replaced):
            kept.append(other)
    write_records([*kept, record])


# ---- running -------------------------------------------------------------------------------------


@dataclass
class Job:
    """A run under way."""

    record: dict  # what is known at its start
    folder: Path
    resumed: bool
    began: float
    process: subprocess.Popen


def new_record(row: str, seed: int, commit: str) -> dict:
    return {"row": row, "seed": seed, "commit": commit, "machine": machine()}


def folder_of(record: dict, runs: Path) -> Path:
    row = re.sub(r"[^a-z0-9]+", "-", record["row"].lower())
    return runs / f"{row}-{record['seed']}-{record['commit']}"


def start(record: dict, runs: Path, data_dir: str) -> Job:
    """Starts or continues a run. Its output goes to <folder>.txt."""
    folder = folder_of(record, runs)
    resumed = (folder / "last.pt").exists()
    if folder.exists() and not resumed:
        shutil.rmtree(folder)  # the run was killed before it had saved anything
    script, *flags = ROWS[record["row"]].split()
    call = [sys.executable, str(ROOT / script), *flags, "--seed", str(record["seed"])]
    call += ["--device", "cpu", "--data_dir", data_dir, "--out_dir", str(folder)]
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


def finish(job: Job) -> bool:
    """Records a run that has ended -> whether it succeeded."""
    record = job.record
    if job.process.returncode:
        print(f"{record['row']}, seed {record['seed']} failed; see {job.folder}.txt", flush=True)
        return False
    minutes = round((time.perf_counter() - job.began) / 60, 2)
    record["minutes"] = None if job.resumed else minutes
    record["scores"] = read_scores(job.folder)
    add_record(record)
    return True


def run_all(waiting: list[dict], args: argparse.Namespace) -> bool:
    """Makes the runs of new records, args.jobs at a time -> whether all succeeded. On Ctrl-C, the
    runs under way save and end, too."""
    running: list[Job] = []
    succeeded = True
    try:
        while waiting or running:
            while waiting and len(running) < args.jobs:
                running.append(start(waiting.pop(0), args.runs, args.data_dir))
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                succeeded &= finish(job)
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
    column_values = []
    for record in records:
        if record["row"] == row:
            value = record["minutes"] if column == "minutes" else record["scores"].get(column)
            if value is not None:
                column_values.append(value)
    return column_values


def ciders(records: list[dict], row: str) -> list[float]:
    return values(records, row, "semantic CIDEr")


def cell(numbers: list[float]) -> str:
    """Mean and, in parentheses, the range: the largest value minus the smallest."""
    if not numbers:
        return "-"
    mean = f"{statistics.fmean(numbers):.1f}"
    if len(numbers) == 1:
        return mean
    return f"{mean} ({max(numbers) - min(numbers):.1f})"


def table_line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def results_table(records: list[dict], rows: list[str], columns: list[str]) -> str:
    """A table with a line for each row; below it, what is noise, the commit and the machines."""
    lines = [table_line(["row", "seeds", *columns]), "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        seeds = sum(record["row"] == row for record in records)
        cells = [cell(values(records, row, column)) for column in columns]
        lines.append(table_line([row, str(seeds), *cells]))
    text = "{processor}, {cores} cores, torch {torch}, {threads} thread a run"
    machines = {text.format(**record["machine"]) for record in records}
    commits = {record["commit"] for record in records}
    lines += ["", f"Noise: differences below {noise(records):.0f} in semantic CIDEr."]
    lines += ["", f"Computed at commit {', '.join(sorted(commits))}."]
    lines += ["", f"Computed on: {'; '.join(sorted(machines))}."]
    return "\n".join(lines) + "\n"


def noise(records: list[dict]) -> float:
    """Three standard errors of the difference between two means of three seeds, in semantic CIDEr.
    The variance between seeds is pooled over all rows."""
    squares = 0.0
    freedom = 0
    for row in ROWS:
        scores = ciders(records, row)
        if len(scores) > 1:
            squares += statistics.variance(scores) * (len(scores) - 1)
            freedom += len(scores) - 1
    variance = squares / max(freedom, 1)
    return 3 * math.sqrt(variance / 3 + variance / 3)


def commands() -> str:
    lines = [f"{row:35} python {command}" for row, command in ROWS.items()]
    return "\n".join(["```", *lines, "```"]) + "\n"


def verdict(better: list[float], worse: list[float]) -> tuple[str, str]:
    """-> the difference of two means with its standard error, and the verdict on the claim that the
    first is higher: told if the difference is larger than three standard errors."""
    if min(len(better), len(worse)) < 2:
        return "", "not run"
    gap = statistics.fmean(better) - statistics.fmean(worse)
    variance = statistics.variance(better) / len(better) + statistics.variance(worse) / len(worse)
    error = math.sqrt(variance)
    answer = "mini cannot tell"
    if abs(gap) > 3 * error:
        answer = "confirmed" if gap > 0 else "contradicted"
    return f"{gap:+.0f} ± {error:.1f}", answer


# These tables are written by hand in tests/results.md, except for the last cells of each line.


def claim_cells(cells: list[str], records: list[dict]) -> tuple[str, ...]:
    """Cells: table, claim (row > row), published -> difference and verdict, at the presets' steps
    and at twice these steps."""
    better, worse = re.split(" >=? ", cells[1])
    at_presets = verdict(ciders(records, better), ciders(records, worse))
    longer = [f"{better}, twice the steps", f"{worse}, twice the steps"]
    if longer[0] not in ROWS or longer[1] not in ROWS:
        return (*at_presets, "", "")
    return *at_presets, *verdict(ciders(records, longer[0]), ciders(records, longer[1]))


def deviation_cells(cells: list[str], records: list[dict]) -> tuple[str, ...]:
    """Cells: row, what it does, other row, what that one does -> CIDEr of both rows."""
    return cell(ciders(records, cells[0])), cell(ciders(records, cells[2]))


def replaced(text: str, name: str, change: Callable[[str], str]) -> str:
    """A page in which `change` has been applied to the text between the marks of a table."""
    begin = f"<!-- {name}, by tests/results.py -->\n"
    end = "<!-- end -->\n"
    before, rest = text.split(begin)
    inside, after = rest.split(end, 1)
    return before + begin + change(inside) + end + after


def filled(table: str, last_cells: Callable, records: list[dict]) -> str:
    """A table with new last cells in each of its lines: last_cells(cells, records)."""
    head, rule, *lines = table.splitlines()
    new = [head, rule]
    for line in lines:
        cells = [text.strip() for text in line.strip("|").split("|")]
        last = last_cells(cells, records)
        new.append(table_line([*cells[: -len(last)], *last]))
    return "\n".join(new) + "\n"


def write_tables(mixed: bool) -> None:
    """Fills in tests/results.md and README.md from the records alone. InputError if these are of
    several commits, unless `mixed`."""
    records = [record for record in read_records() if record["row"] in ROWS]
    commits = {record["commit"] for record in records}
    if len(commits) > 1 and not mixed:
        raise InputError(
            f"the records are of {len(commits)} commits; run what is missing, or add --mixed"
        )
    text = RESULTS.read_text(encoding="utf-8")
    text = replaced(text, "commands", lambda _: commands())
    text = replaced(text, "results", lambda _: results_table(records, list(ROWS), COLUMNS))
    text = replaced(text, "claims", lambda table: filled(table, claim_cells, records))
    text = replaced(text, "deviations", lambda table: filled(table, deviation_cells, records))
    write_text(RESULTS, text)
    text = README.read_text(encoding="utf-8")
    text = replaced(text, "results", lambda _: results_table(records, README_ROWS, README_COLUMNS))
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
    pair, *_ = wrong[worst][0]
    data.sample_sheet(
        dataset, "test", captions, maps, {pair.id: ["(wrong)"]}, ASSETS / "samples.png"
    )
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
        captioned = right if mini.is_right(pair.id, caption, dataset.root) else wrong
        for kind in kinds:
            if pair.id in dataset.kinds[kind]:
                captioned[kind].append((pair, caption, maps))
    return right, wrong


# ---- main ----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = f"only these rows, of {'; '.join(ROWS)}"
    rows = list(ROWS)
    parser.add_argument("--only", nargs="+", choices=rows, default=rows, metavar="ROW", help=text)
    text = "only these seeds"
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS, help=text)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--runs", type=Path, default=Path("runs/results"), help="folder of runs")
    parser.add_argument("--data_dir", default="data/mini")
    parser.add_argument("--table", action="store_true", help="only fill in the tables")
    text = "fill in the tables even if records are of several commits"
    parser.add_argument("--mixed", action="store_true", help=text)
    text = "only make assets/ from a finished run of scorer_cbr.py"
    parser.add_argument("--assets", type=Path, metavar="RUN", help=text)
    args = parser.parse_args()
    if args.table:
        write_tables(args.mixed)
    elif args.assets:
        write_assets(args.assets, args.data_dir)
    else:
        run_missing(args)


def missing_runs(rows: list[str], seeds: list[int], commit: str) -> list[dict]:
    """New records of the runs of which results.json has none at this commit."""
    done = {(record["row"], record["seed"], record["commit"]) for record in read_records()}
    missing = []
    for row in rows:
        for seed in seeds_of(row):
            if seed in seeds and (row, seed, commit) not in done:
                missing.append(new_record(row, seed, commit))
    return missing


def run_missing(args: argparse.Namespace) -> None:
    missing = missing_runs(args.only, args.seeds, commit_of_the_code())
    print(f"{len(missing)} runs are missing", flush=True)
    # mini comes first, so that no run's minutes include its preparation.
    data.main(["mini", "--data_dir", args.data_dir, "--device", "cpu"])
    if not run_all(missing, args):
        raise InputError("some runs failed, see above")


if __name__ == "__main__":
    run_main(main)
