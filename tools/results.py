"""Trains the rows of docs/results.md on mini, and fills in the tables of our pages. Not a test.

    python tools/results.py                        run what is missing: 14 hours on two cores
    python tools/results.py --only SCORER+CBR GDE  only these rows
    python tools/results.py --authors FOLDER       also the authors' own code, of which FOLDER has
                                                   clones named SCORER and DIRL
    python tools/results.py --table                run nothing, only fill in the tables

A row is a command. It is run with one, three, five or nine seeds, each run on one thread; two runs
go on at a time. A finished run adds its record to tools/results.json: row, seed, commit, machine,
minutes and scores. The commit is the last one that changed the code. To edit the code while runs
are under way, start them in a clone. Runs are kept in runs/results, and an interrupted one is
continued.

A table shows what one version of a script computes, and is refused if its records are of several.
Most commits change how a script looks, not what it computes, so its records stay valid. Under
"same", results.json lists the commits of each script that compute the same, as found and noted by
`python tools/fingerprint.py --against COMMIT`. A run is missing if it has no record of such a
commit. The first record of a row at a commit that computes something else replaces the row's older
ones.
"""

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rows import (
    AT_PRESETS,
    FEWER,
    LONGER,
    OF_PAPERS,
    OWN_CODE,
    README_ROWS,
    ROWS,
    SCRIPTS,
    SEEDS,
    TWICE,
    command_of,
    commands_of,
    folder_name,
    script_of,
    seeds_of,
)

import cheers
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
from common import InputError
from support.files import run_main, write_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RECORDS = HERE / "results.json"
RESULTS = ROOT / "docs" / "results.md"
SCORES_PAGE = ROOT / "docs" / "scores.md"
DEVIATIONS_PAGE = ROOT / "docs" / "deviations.md"
RELEASED_PAGE = ROOT / "docs" / "released.md"
GUIDE = ROOT / "docs" / "own_pictures.md"
README = ROOT / "README.md"
RUNS = Path("runs/results")
WRITING = Lock()  # held by the thread that writes results.json

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
COLUMNS = ["semantic CIDEr", "change type", "all four", "new value", "place", "distractors"]


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
        call += [":(glob)*.py", ":(glob)support/**/*.py", "assets/mini_*.pt"]
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


def read_results() -> dict:
    """{"same": script -> commits that compute the same, "records": a record of each run}."""
    return json.loads(RECORDS.read_text(encoding="utf-8"))


def write_results(results: dict) -> None:
    """Writes each script and record on a line of its own, because git compares lines."""
    same = ",\n".join(f'"{script}": {json.dumps(c)}' for script, c in results["same"].items())
    records = ",\n".join(json.dumps(record) for record in results["records"])
    write_text(RECORDS, f'{{\n"same": {{\n{same}\n}},\n"records": [\n{records}\n]\n}}\n')


def same_code(commit: str, row: str, same: dict[str, list[str]]) -> list[str]:
    """This commit and all that compute the same in a row's script."""
    commits = same.get(script_of(row), [])
    return commits if commit in commits else [commit]


def add_record(record: dict) -> None:
    """Adds a record to results.json, where it replaces those of the same row from other code."""
    with WRITING:
        results = read_results()
        same = same_code(record["commit"], record["row"], results["same"])
        kept = []
        for other in results["records"]:
            if other["row"] != record["row"] or other["commit"] in same:
                kept.append(other)
        write_results(results | {"records": [*kept, record]})


# ---- running -------------------------------------------------------------------------------------


def missing_runs(rows: list[str], commit: str) -> list[tuple[str, int, str]]:
    """(row, seed, commit) of the runs of which results.json has no record."""
    results = read_results()
    missing = []
    for row in rows:
        same = same_code(commit, row, results["same"])
        records = [record for record in results["records"] if record["row"] == row]
        done = {record["seed"] for record in records if record["commit"] in same}
        missing += [(row, seed, commit) for seed in seeds_of(row) if seed not in done]
    return missing


def commands(
    row: str, seed: int, folder: Path, data_dir: str, clones: Path | None = None
) -> list[list[str]]:
    """What makes or continues a run in a folder: training and, for FEWER, evaluation elsewhere.
    clones: the folder with clones of the authors' code."""
    script, *flags = command_of(row).split()
    program = [str(ROOT / script)]
    if row in OWN_CODE:
        method, _, _ = row.partition("'")
        program = [str(HERE / "authors.py"), "train", str(clones / method)]
    start = [sys.executable, *program, "--device", "cpu", "--data_dir", data_dir]
    # A row's own --data_dir comes later, so it is the one that counts.
    train = [*start, *flags, "--seed", str(seed), "--out_dir", str(folder)]
    if (folder / "last.pt").exists():
        train.append("--resume")
    if row not in FEWER:
        return [train]
    evaluate = [*start, "--eval", str(folder / "best.pt"), "--out_dir", str(folder / "scored")]
    return [train, evaluate]


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


def run(row: str, seed: int, commit: str, data_dir: str, clones: Path | None = None) -> None:
    """Makes or continues a run, whose output goes to <folder>.txt, and records it. If it fails, it
    is not recorded."""
    folder = RUNS / f"{folder_name(row)}-{seed}-{commit}"
    resumed = (folder / "last.pt").exists()
    print(f"{time.strftime('%H:%M')} {row}, seed {seed}", flush=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with open(f"{folder}.txt", "a") as output:
        for call in commands(row, seed, folder, data_dir, clones):
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
    """A table with a line for each row; below it, what is noise, and the machines."""
    shown = [record for record in records if record["row"] in rows]
    lines = [table_line(["row", "seeds", *columns]), "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        seeds = sum(record["row"] == row for record in shown)
        cells = [cell(values(shown, row, column)) for column in columns]
        lines.append(table_line([row, str(seeds), *cells]))
    machines = "; ".join(sorted({record["machine"] for record in shown}))
    about = f"{chance(records, TWICE.keys() <= set(rows))} Computed on: {machines}."
    lines += ["", textwrap.fill(about, 120)]
    return "\n".join(lines) + "\n"


def chance(records: list[dict], twice: bool) -> str:
    """How far scores differ by chance, in a sentence or, with the rows of twice the steps, two."""
    variance = pooled_variance(records, AT_PRESETS)
    of_means = 3 * standard_error(variance, 3, 3)
    about = f"By chance, two means of three seeds differ by up to {of_means:.0f} in semantic CIDEr"
    if not twice:
        return about + "."
    mean_and_run = 3 * standard_error(variance, 3, 1)
    of_runs = 3 * standard_error(variance, 1, 1)
    about += f", a mean and a single run by {mean_and_run:.0f}, and two runs by {of_runs:.0f}."
    of_longer = 3 * standard_error(pooled_variance(records, TWICE), 3, 3)
    return f"{about} With twice the steps, two means differ by up to {of_longer:.0f}."


def scenes_table(records: list[dict]) -> str:
    """Change types against the number of training pairs, two of each scene."""
    scenes_of = FEWER | {"SCORER+CBR": 5000}
    head = [f"{2 * scenes:,}" for scenes in scenes_of.values()]
    shares = [cell(values(records, row, "change type")) for row in scenes_of]
    lines = [table_line(["training pairs", *head]), "|---" * (len(head) + 1) + "|"]
    lines.append(table_line(["type of change named right, in %", *shares]))
    return "\n".join(lines) + "\n"


def pooled_variance(records: list[dict], rows: Iterable[str]) -> float:
    """The variance of semantic CIDEr between the seeds of a row, pooled over these rows: squares
    over degrees of freedom."""
    squares = 0.0
    freedom = 0
    for row in rows:
        numbers = ciders(records, row)
        if len(numbers) > 1:
            squares += statistics.variance(numbers) * (len(numbers) - 1)
            freedom += len(numbers) - 1
    return squares / max(1, freedom)


def standard_error(variance: float, seeds: int, other_seeds: int) -> float:
    """Of the difference between two means of so many seeds."""
    return math.sqrt(variance / seeds + variance / other_seeds)


def verdict(better: list[float], worse: list[float], variance: float) -> tuple[str, str]:
    """-> the difference of two means with its standard error, and the verdict on the claim that the
    first is higher: decided if the difference is larger than three standard errors. variance:
    between seeds, pooled over all rows, because three seeds alone do not tell it."""
    if min(len(better), len(worse)) < 2:
        return "", "not run"
    gap = statistics.fmean(better) - statistics.fmean(worse)
    error = standard_error(variance, len(better), len(worse))
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
    variance = pooled_variance(records, AT_PRESETS)
    at_presets = verdict(ciders(records, better), ciders(records, worse), variance)
    if not {better, worse} <= set(LONGER):
        return *at_presets, "", ""
    longer = [ciders(records, f"{row}, twice the steps") for row in (better, worse)]
    return *at_presets, *verdict(*longer, pooled_variance(records, TWICE))


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


def seed_cells(cells: list[str], records: list[dict]) -> list[str]:
    """Cells: row -> CIDEr with each of five seeds, and of all."""
    row = cells[0]
    of_row = [record for record in records if record["row"] == row]
    by_seed = []
    for seed in seeds_of(row):
        of_seed = [record for record in of_row if record["seed"] == seed]
        by_seed.append(cell(ciders(of_seed, row)))
    return [*by_seed, cell(ciders(of_row, row))]


def flag_cells(script: str, cells: list[str], records: list[dict]) -> tuple[str]:
    """Cells: row of the paper, flags of a command or of several -> CIDEr of the rows of ROWS with
    these commands; of several, each behind its flags."""
    commands = commands_of(script, cells[1])
    texts = []
    for row, command in ROWS.items():
        numbers = ciders(records, row)
        if command in commands and numbers:
            name = f"{command.partition(' ')[2]}: " if len(commands) > 1 else ""
            texts.append(name + cell(numbers))
    return (", ".join(texts),)


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
    rows = ROWS | OWN_CODE
    records = [record for record in results["records"] if record["row"] in rows]
    first = {}  # script -> the commit of its first record
    for record in records:
        row = record["row"]
        commit = first.setdefault(script_of(row), record["commit"])
        if record["commit"] not in same_code(commit, row, results["same"]):
            raise InputError(
                f"records of {script_of(row)} are of {commit} and {record['commit']}; run what is "
                "missing or, if these compute the same, note it by tools/fingerprint.py --against"
            )
    shown = [row for row in rows if row not in {*OF_PAPERS, *FEWER}]
    fill(RESULTS, "results", lambda _: results_table(records, shown, COLUMNS))
    fill(RESULTS, "claims", lambda table: filled(table, claim_cells, records))
    fill(DEVIATIONS_PAGE, "deviations", lambda table: filled(table, deviation_cells, records))
    fill(RELEASED_PAGE, "own code", lambda table: filled(table, seed_cells, records))
    for script in SCRIPTS:
        cells_of = partial(flag_cells, script)
        fill(RESULTS, f"flags of {script}", partial(filled, last_cells=cells_of, records=records))
    fill(SCORES_PAGE, "published", lambda table: filled(table, published_cells, records))
    fill(README, "results", lambda _: results_table(records, README_ROWS, COLUMNS))
    fill(GUIDE, "scenes", lambda _: scenes_table(records))


# ---- main ----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rows = [*ROWS, *OWN_CODE]
    text = f"only these rows, of {'; '.join(rows)}"
    parser.add_argument("--only", nargs="+", choices=rows, metavar="ROW", help=text)
    text = "folder with clones of the authors' repositories: run their own code, too"
    parser.add_argument("--authors", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--data_dir", default="data/mini")
    parser.add_argument("--table", action="store_true", help="only fill in the tables")
    args = parser.parse_args()
    if args.table:
        write_tables()
        return
    commit = commit_of_the_code()
    chosen = args.only or (rows if args.authors else list(ROWS))
    if args.authors is None and not OWN_CODE.keys().isdisjoint(chosen):
        raise InputError(f"{' and '.join(OWN_CODE)} need --authors FOLDER")
    missing = missing_runs(chosen, commit)
    print(f"{len(missing)} runs are missing", flush=True)
    # mini comes first, so that no run's minutes include its preparation.
    data.main(["mini", "--data_dir", args.data_dir, "--device", "cpu"])
    for scenes in {FEWER[row] for row, _, _ in missing if row in FEWER}:
        root = f"data/mini-{scenes}"
        data.main(["mini", "--data_dir", root, "--scenes", str(scenes), "--device", "cpu"])
    with ThreadPoolExecutor(2) as pool:
        # Ctrl-C in a terminal reaches the runs under way as well: the next call continues them.
        list(pool.map(lambda job: run(*job, args.data_dir, args.authors), missing))
    if missing_runs(chosen, commit):
        raise InputError("some runs failed, see above")


if __name__ == "__main__":
    run_main(main)
