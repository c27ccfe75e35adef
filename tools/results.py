"""Trains the rows of docs/results.md on mini, and fills in the tables of our pages. Not a test.

    python tools/results.py                        run what is missing: nine hours on two cores
    python tools/results.py --only SCORER+CBR GDE  only these rows
    python tools/results.py --table                run nothing, only fill in the tables
    python tools/results.py --assets RUN           run nothing, make weights and pairs in assets/

A row is a command. It is run with one, three or nine seeds, each run on one thread; two runs go on
at a time. A finished run adds its record to tools/results.json: row, seed, commit, machine, minutes
and scores. The commit is the last one that changed the code. To edit the code while runs are under
way, start them in a clone. A run is missing if no record of this commit has it, and the first
record of a row at a new commit replaces the row's older ones. Commits that compute the same count
as one: `python tools/fingerprint.py --against COMMIT` finds out, and notes them in results.json. A
table that would mix commits that compute different things is refused. Runs are kept in
runs/results, and an interrupted one is continued.
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
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cheers
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
from common import InputError
from support import mini
from support.files import load_tensors, run_main, save_tensors, write_text
from support.pictures import sample_sheet

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RECORDS = HERE / "results.json"
RESULTS = ROOT / "docs" / "results.md"
SCORES_PAGE = ROOT / "docs" / "scores.md"
RELEASED_PAGE = ROOT / "docs" / "released.md"
GUIDE = ROOT / "docs" / "own_pictures.md"
README = ROOT / "README.md"
ASSETS = ROOT / "assets"
RUNS = Path("runs/results")
WRITING = Lock()  # held by the thread that writes results.json

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
    "RDD+ACR, no residuals": "rdd_acr.py --no-residual",
    "IDC, masked targets": "idc_pretrain.py --finetune_targets masked",
    "words alone": "scorer_cbr.py --blind",
}
# Four claims that could not be decided at the presets' steps, with models that are trained better.
LONGER = {"SCORER+CBR": 3600, "SCORER": 3600, "DIRL+CCR": 4600, "Transformer": 4600}
LONGER |= {"RDD+ACR": 3800, "RDD+ACR, no losses": 3800, "CHEERS": 3400, "HRD": 3400}
TWICE = []
for row, steps in LONGER.items():
    TWICE.append(f"{row}, twice the steps")
    ROWS[TWICE[-1]] = f"{ROWS[row]} --steps {steps}"
SCRIPTS = list(ROWS.values())[:5]
README_ROWS = list(ROWS)[:6]
# How many pairs one needs: trained on a smaller mini, and scored on the usual one's test split.
FEWER = {f"SCORER+CBR, {scenes:,} scenes": scenes for scenes in (200, 500, 1000, 2000)}
for row, scenes in FEWER.items():
    ROWS[row] = f"scorer_cbr.py --data_dir data/mini-{scenes}"
SEEDS = (1111, 1, 2)
ONE_SEED = {  # rows that no claim needs are run with the first seed only
    "SCORER+CBR, released",
    "DIRL+CCR, released",
    "RDD+ACR, no residuals",
    "IDC, masked targets",
    "words alone",
    *FEWER,
}
# A claim that three seeds nearly decided.
NINE_SEEDS = {"DIRL+CCR, twice the steps", "Transformer, twice the steps"}

# The scores that a record keeps, and where they are found in scores_test.json.
SCORES = {
    "semantic CIDEr": ("scores", "semantic change", "CIDEr"),
    "change type": ("accuracy", "change type"),
    "all four": ("accuracy", "all four"),
    "new value": ("accuracy", "new value"),
    "place": ("accuracy", "place"),
    "distractors": ("accuracy", "distractors"),
    "hardest views": ("scores", "view: hardest quarter", "CIDEr"),
    "total CIDEr": ("scores", "total", "CIDEr"),
    "BLEU-4": ("scores", "total", "BLEU-4"),
    "METEOR": ("scores", "total", "METEOR"),
    "pointing": ("scores", "total", "pointing"),
}
README_COLUMNS = ["semantic CIDEr", "change type", "all four", "new value", "place", "distractors"]
COLUMNS = [*README_COLUMNS, "hardest views", "total CIDEr", "pointing", "minutes"]


# ---- records -------------------------------------------------------------------------------------


def machine() -> str:
    """A description of this machine and of how a run uses it."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = re.search(r"model name\s*: (.*)", cpuinfo.read_text())
        if model:
            processor = model[1]
    return f"{processor}, {os.cpu_count()} cores, torch {torch.__version__}, 1 thread a run"


def commit_of_the_code(at: str = "HEAD") -> str:
    """Hash of the last commit up to `at` that changed what a run computes. InputError if there are
    uncommitted changes."""

    def git(*arguments: str) -> str:
        call = ["git", "-C", str(ROOT), *arguments, "--"]
        call += [":(glob)*.py", ":(glob)support/*.py", "assets/mini_*.pt"]
        return subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    if git("status", "--porcelain"):
        raise InputError("the code has uncommitted changes; commit them, as records name a commit")
    return git("log", "-1", "--abbrev=10", "--format=%h", at)


def read_scores(folder: Path) -> dict[str, float | None]:
    """SCORES of a finished run; None where there is no value (METEOR without Java)."""
    result = json.loads((folder / "scores_test.json").read_text(encoding="utf-8"))
    scores = {}
    for name, path in SCORES.items():
        value = result
        for key in path:
            value = value.get(key) if value else None
        scores[name] = value
    return scores


def read_results() -> dict[str, list]:
    """{"equal": pairs of commits that compute the same (if scripts stand after a pair, in these),
    "records": a record of each run}."""
    return json.loads(RECORDS.read_text(encoding="utf-8"))


def write_results(results: dict[str, list]) -> None:
    """Writes each pair and record on a line of its own, because git compares lines."""
    parts = []
    for name, rows in results.items():
        lines = ",\n".join(json.dumps(row) for row in rows)
        parts.append(f'"{name}": [\n{lines}\n]')
    write_text(RECORDS, "{\n" + ",\n".join(parts) + "\n}\n")


def same_code(commit: str, row: str, equal: list[list[str]]) -> set[str]:
    """This commit and all that compute the same in a row's script, directly or through others."""
    same = {commit}
    for _ in equal:  # a chain has no more links than there are pairs
        for old, new, *scripts in equal:
            counts = not scripts or script_of(row) in scripts
            if counts and same & {old, new}:
                same |= {old, new}
    return same


def script_of(row: str) -> str:
    script, *_ = ROWS[row].split()
    return script


def add_record(record: dict) -> None:
    """Adds a record to results.json, where it replaces those of the same row from other code."""
    with WRITING:
        results = read_results()
        same = same_code(record["commit"], record["row"], results["equal"])
        kept = []
        for other in results["records"]:
            if other["row"] != record["row"] or other["commit"] in same:
                kept.append(other)
        write_results(results | {"records": [*kept, record]})


# ---- running -------------------------------------------------------------------------------------


def seeds_of(row: str) -> tuple[int, ...]:
    if row in ONE_SEED:
        return SEEDS[:1]
    if row in NINE_SEEDS:
        return *SEEDS, *range(3, 9)
    return SEEDS


def missing_runs(rows: list[str], commit: str) -> list[tuple[str, int, str]]:
    """(row, seed, commit) of the runs of which results.json has no record."""
    results = read_results()
    missing = []
    for row in rows:
        same = same_code(commit, row, results["equal"])
        records = [record for record in results["records"] if record["row"] == row]
        done = {record["seed"] for record in records if record["commit"] in same}
        missing += [(row, seed, commit) for seed in seeds_of(row) if seed not in done]
    return missing


def commands(row: str, seed: int, folder: Path, data_dir: str) -> list[list[str]]:
    """What makes or continues a run in a folder: training and, for FEWER, evaluation elsewhere."""
    script, *flags = ROWS[row].split()
    start = [sys.executable, str(ROOT / script), "--device", "cpu", "--data_dir", data_dir]
    # A row's own --data_dir comes later, so it is the one that counts.
    train = [*start, *flags, "--seed", str(seed), "--out_dir", str(folder)]
    if (folder / "last.pt").exists():
        train.append("--resume")
    if row not in FEWER:
        return [train]
    evaluate = [*start, "--eval", str(folder / "best.pt"), "--out_dir", str(folder / "scored")]
    return [train, evaluate]


def folder_name(row: str) -> str:
    """A row's name in those of its runs' folders."""
    return re.sub(r"[^a-z0-9]+", "-", row.lower())


def finished(runs: Path, row: str) -> list[Path]:
    """The folders of a row's finished runs in a folder like RUNS, in the order of SEEDS. InputError
    if there is none."""
    folders = []
    for seed in SEEDS:
        for file in sorted(runs.glob(f"{folder_name(row)}-{seed}-*/scores_test.json")):
            folders.append(file.parent)
    if not folders:
        raise InputError(f"no finished run of {row}: no {runs}/{folder_name(row)}-SEED-COMMIT")
    return folders


def run(row: str, seed: int, commit: str, data_dir: str) -> None:
    """Makes or continues a run, whose output goes to <folder>.txt, and records it. If it fails, it
    is not recorded."""
    folder = RUNS / f"{folder_name(row)}-{seed}-{commit}"
    resumed = (folder / "last.pt").exists()
    print(f"{time.strftime('%H:%M')} {row}, seed {seed}", flush=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with open(f"{folder}.txt", "a") as output:
        for call in commands(row, seed, folder, data_dir):
            done = subprocess.run(call, stdout=output, stderr=output, env=environment)
            if done.returncode:
                print(f"{row}, seed {seed} failed; see {folder}.txt", flush=True)
                return
    minutes = None if resumed else round((time.perf_counter() - began) / 60, 2)
    if row in FEWER:
        folder = folder / "scored" / f"best-{Path(data_dir).name}"  # where --eval writes
    scores = read_scores(folder)
    record = {"row": row, "seed": seed, "commit": commit, "machine": machine()}
    add_record(record | {"minutes": minutes, "scores": scores})


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
    shown = [record for record in records if record["row"] in rows]
    lines = [table_line(["row", "seeds", *columns]), "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        seeds = sum(record["row"] == row for record in shown)
        cells = [cell(values(shown, row, column)) for column in columns]
        lines.append(table_line([row, str(seeds), *cells]))
    commits = ", ".join(sorted({record["commit"] for record in shown}))
    machines = "; ".join(sorted({record["machine"] for record in shown}))
    about = f"{chance(records, TWICE[0] in rows)} Commit: {commits}. Computed on: {machines}."
    lines += ["", textwrap.fill(about, 120)]
    return "\n".join(lines) + "\n"


def chance(records: list[dict], twice: bool) -> str:
    """How far scores differ by chance, in a sentence or, with the rows of twice the steps, two."""
    of_means = noise(records, [row for row in ROWS if row not in TWICE])
    about = f"By chance, two means of three seeds differ by up to {of_means:.0f} in semantic CIDEr"
    if not twice:
        return about + "."
    # The variance of a run is 1, of a mean of three 1/3, and of two such means 2/3.
    mean_and_run = of_means * math.sqrt((1 / 3 + 1) / (2 / 3))
    of_runs = of_means * math.sqrt(2 / (2 / 3))
    about += f", a mean and a single run by {mean_and_run:.0f}, and two runs by {of_runs:.0f}."
    return f"{about} With twice the steps, two means differ by up to {noise(records, TWICE):.0f}."


def scenes_table(records: list[dict]) -> str:
    """Change types against the number of training pairs, two of each scene."""
    scenes_of = FEWER | {"SCORER+CBR": 5000}
    head = [f"{2 * scenes:,}" for scenes in scenes_of.values()]
    shares = [cell(values(records, row, "change type")) for row in scenes_of]
    lines = [table_line(["training pairs", *head]), "|---" * (len(head) + 1) + "|"]
    lines.append(table_line(["type of change named right, in %", *shares]))
    return "\n".join(lines) + "\n"


def noise(records: list[dict], rows: list[str]) -> float:
    """Three standard errors of the difference between two means of three seeds, in semantic CIDEr,
    with the mean variance of those of these rows that have several seeds."""
    scores = [ciders(records, row) for row in rows]
    variances = [statistics.variance(numbers) for numbers in scores if len(numbers) > 1]
    variance = statistics.fmean(variances or [0.0])
    return 3 * math.sqrt(variance / 3 + variance / 3)


def verdict(better: list[float], worse: list[float]) -> tuple[str, str]:
    """-> the difference of two means with its standard error, and the verdict on the claim that the
    first is higher: decided if the difference is larger than three standard errors."""
    if min(len(better), len(worse)) < 2:
        return "", "not run"
    gap = statistics.fmean(better) - statistics.fmean(worse)
    variance = statistics.variance(better) / len(better) + statistics.variance(worse) / len(worse)
    error = math.sqrt(variance)
    answer = "mini cannot tell"
    if abs(gap) > 3 * error:
        answer = "confirmed" if gap > 0 else "contradicted"
    return f"{gap:+.0f} ± {error:.1f}", answer


# The tables below are written by hand in our pages, except for the last cells of each line.


def claim_cells(cells: list[str], records: list[dict]) -> tuple[str, ...]:
    """Cells: table, claim (row > row), published -> difference and verdict, at the presets' steps
    and at twice these steps."""
    better, worse = cells[1].split(" > ")
    assert {better, worse} <= set(ROWS), cells
    at_presets = verdict(ciders(records, better), ciders(records, worse))
    if not {better, worse} <= set(LONGER):
        return *at_presets, "", ""
    longer = [ciders(records, f"{row}, twice the steps") for row in (better, worse)]
    return *at_presets, *verdict(*longer)


PUBLISHED = [method.PUBLISHED for method in (scorer_cbr, dirl_ccr, rdd_acr, cheers, idc_pretrain)]


def published_cells(cells: list[str], records: list[dict]) -> tuple[str, ...]:
    """Cells: data set: group, and what is no method's -> each paper's BLEU-4 / CIDEr."""
    dataset, group = cells[0].split(": ")
    figures = []
    for published in PUBLISHED:
        row = published.get(dataset, {}).get(group)
        figures.append(f"{row['BLEU-4']} / {row['CIDEr']}" if row else "")
    return tuple(figures)


def deviation_cells(cells: list[str], records: list[dict]) -> tuple[str, ...]:
    """Cells: row, other row, what that one does -> CIDEr of both rows."""
    return cell(ciders(records, cells[0])), cell(ciders(records, cells[1]))


def command_of(script: str, flags: str) -> str:
    """A command, from its flags in backticks; all else in their cell is words."""
    return " ".join([script, *re.findall("`([^`]*)`", flags)])


def flag_cells(script: str, cells: list[str], records: list[dict]) -> tuple[str]:
    """Cells: row of the paper, its flags -> CIDEr of the row of ROWS with this command; nothing if
    there is no such row."""
    command = command_of(script, cells[1])
    for row, command_of_row in ROWS.items():
        if command_of_row == command:
            return (cell(ciders(records, row)),)
    return ("",)


def replaced(text: str, name: str, change: Callable[[str], str], tool: str) -> str:
    """A page in which `change` has been applied to the text between the marks of a table."""
    begin = f"<!-- {name}, by tools/{tool} -->\n"
    end = "<!-- end -->\n"
    before, rest = text.split(begin)
    inside, after = rest.split(end, 1)
    return before + begin + change(inside) + end + after


def fill(page: Path, name: str, change: Callable[[str], str], tool: str = "results.py") -> None:
    """Applies `change` to a table of a page, in its file."""
    write_text(page, replaced(page.read_text(encoding="utf-8"), name, change, tool))


def filled(table: str, last_cells: Callable, records: list[dict]) -> str:
    """A table with new last cells in each of its lines: last_cells(cells, records)."""
    head, rule, *lines = table.splitlines()
    new = [head, rule]
    for line in lines:
        cells = [text.strip() for text in line.strip("|").split("|")]
        last = last_cells(cells, records)
        new.append(table_line([*cells[: -len(last)], *last]))
    return "\n".join(new) + "\n"


def write_tables() -> None:
    """Fills in the pages from the records alone. InputError if these are of commits that compute
    different things."""
    results = read_results()
    records = [record for record in results["records"] if record["row"] in ROWS]
    first = {}  # script -> the commit of its first record
    for record in records:
        row = record["row"]
        commit = first.setdefault(script_of(row), record["commit"])
        if record["commit"] not in same_code(commit, row, results["equal"]):
            raise InputError(
                f"records of {script_of(row)} are of {commit} and {record['commit']}; run what is "
                "missing or, if these compute the same, note it by tools/fingerprint.py --against"
            )
    fill(RESULTS, "results", lambda _: results_table(records, list(ROWS), COLUMNS))
    fill(RESULTS, "claims", lambda table: filled(table, claim_cells, records))
    fill(RELEASED_PAGE, "deviations", lambda table: filled(table, deviation_cells, records))
    for script in SCRIPTS:
        cells_of = partial(flag_cells, script)
        fill(RESULTS, f"flags of {script}", partial(filled, last_cells=cells_of, records=records))
    fill(SCORES_PAGE, "published", lambda table: filled(table, published_cells, records))
    fill(README, "results", lambda _: results_table(records, README_ROWS, README_COLUMNS))
    fill(GUIDE, "scenes", lambda _: scenes_table(records))


# ---- assets --------------------------------------------------------------------------------------


def write_assets(run: Path, data_dir: str) -> None:
    """From a run of scorer_cbr.py, writes its weights in float16, a sheet with the first test pair
    of each kind of change, and the pictures of the first of these that it captions correctly. Then
    copy the run's curves.png by hand, and draw attention.png by README's first command."""
    weights = ASSETS / "scorer_cbr-mini.pt"
    write_weights(run / "best.pt", weights)
    dataset = data.load("mini", data_dir)
    pairs = {}
    for kind, ids in dataset.kinds.items():
        if kind != "no change":
            pairs[kind] = next(pair for pair in dataset.pairs("test") if pair.id in ids)
    files = [(dataset.paths[pair.before], dataset.paths[pair.after]) for pair in pairs.values()]
    captions = {}
    maps = {}
    results = scorer_cbr.load(weights, "cpu").pairs(files)
    for pair, (caption, pair_maps) in zip(pairs.values(), results, strict=True):
        captions[pair.id] = caption
        maps[pair.id] = pair_maps
    sample_sheet(dataset, "test", captions, maps, {}, ASSETS / "samples.png")
    for pair in pairs.values():
        verdicts = mini.judge(pair.id, captions[pair.id], mini.truth_of(pair.id, dataset.root))
        if all(verdicts.values()):
            shutil.copyfile(dataset.paths[pair.before], ASSETS / "before.png")
            shutil.copyfile(dataset.paths[pair.after], ASSETS / "after.png")
            print(f"assets/before.png and after.png: {captions[pair.id]!r}")
            break


def write_weights(best: Path, file: Path) -> None:
    """Writes what a captioner needs from a checkpoint, with the model in float16."""
    kept = dict(load_tensors(best))
    kept["config"]["out_dir"] = ""
    kept["config"]["data_dir"] = "data/mini"  # the run's is absolute
    for name, weight in kept["model"].items():
        if weight.is_floating_point():
            kept["model"][name] = weight.half()
    save_tensors(file, kept)


# ---- main ----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rows = list(ROWS)
    text = f"only these rows, of {'; '.join(rows)}"
    parser.add_argument("--only", nargs="+", choices=rows, default=rows, metavar="ROW", help=text)
    parser.add_argument("--data_dir", default="data/mini")
    parser.add_argument("--table", action="store_true", help="only fill in the tables")
    text = "only make the weights and pairs in assets/ from a finished run of scorer_cbr.py"
    parser.add_argument("--assets", type=Path, metavar="RUN", help=text)
    args = parser.parse_args()
    if args.table:
        write_tables()
        return
    if args.assets:
        write_assets(args.assets, args.data_dir)
        return
    commit = commit_of_the_code()
    missing = missing_runs(args.only, commit)
    print(f"{len(missing)} runs are missing", flush=True)
    # mini comes first, so that no run's minutes include its preparation.
    data.main(["mini", "--data_dir", args.data_dir, "--device", "cpu"])
    for scenes in {FEWER[row] for row, _, _ in missing if row in FEWER}:
        root = f"data/mini-{scenes}"
        data.main(["mini", "--data_dir", root, "--scenes", str(scenes), "--device", "cpu"])
    with ThreadPoolExecutor(2) as pool:
        # Ctrl-C in a terminal reaches the runs under way as well: the next call continues them.
        list(pool.map(lambda job: run(*job, args.data_dir), missing))
    if missing_runs(args.only, commit):
        raise InputError("some runs failed, see above")


if __name__ == "__main__":
    run_main(main)
