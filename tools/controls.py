"""Measures what the mechanism of each method does on mini, beside controls. Not a test.

    python tools/controls.py RUNS             measure all, and fill in docs/controls.md
    python tools/controls.py RUNS --only IDC  measure only the runs of this method
    python tools/controls.py                  measure nothing, only fill in the tables

RUNS has the runs that docs/tour.md names, in folders named as by tools/results.py. The measures are
in tools/measures.py, and the numbers of all seeds are kept in tools/controls.json.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

import torch
from measures import METHODS, Test, untrained
from results import ROOT, fill, finished, read_results, table_line, values

from support.files import load_tensors, read_log, run_main, write_text

PAGE = ROOT / "docs" / "controls.md"
NUMBERS = Path(__file__).with_name("controls.json")
NO_MODEL = "no model"  # the column of chance, and of what needs no model

# Table of the page -> its columns, and the rows of tools/results.py or runs of docs/tour.md there.
COLUMNS = {
    "SCORER+CBR": {
        "trained": "SCORER+CBR",
        "without CBR": "SCORER",
        "without L_cv and CBR": "RR",
    },
    "DIRL+CCR": {
        "trained": "DIRL+CCR",
        "without L_dirl": "CCR",
        "without L_ccr": "DIRL",
        "CLEVR-Change's weights": "DIRL+CCR, weights",
        "Y without positions": "DIRL+CCR, no positions",
    },
    "RDD+ACR": {
        "trained": "RDD+ACR",
        "without L_N2O and L_V2A": "RDD+ACR, no losses",
        "without residuals": "RDD+ACR, no residuals",
    },
    "CHEERS": {"trained": "CHEERS"},
    "IDC": {
        "trained": "IDC",
        "pre-trained": "IDC",
        "by FDA": "IDC, FDA",
        "by FDA, blind": "IDC, FDA, blind",
    },
}
PRE_TRAINED = ("pre-trained", "by FDA", "by FDA, blind")  # these columns are before fine-tuning
# Positions cancel in the first three rows; scores of all rows are in tools/results.json.
POSITIONS = ("Subtraction", "direct-sub", "CHEERS, baseline", "RR", "GDE", *COLUMNS)
STEPS = (300, 600, 900, 1500)  # of the validations in the page's table

# ---- numbers -------------------------------------------------------------------------------------


def note(rows: dict, column: str, measure: str, value=None, no_model=None) -> None:
    """Adds a run's number to a table, and what the same measure is without a model."""
    cells = rows.setdefault(measure, {})
    if value is not None:
        cells.setdefault(column, []).append(round(float(value), 4))
        print(f"{column}, {measure}: {cells[column][-1]}", flush=True)
    if no_model is not None:
        cells[NO_MODEL] = [round(float(no_model), 4)]


def table_of(rows: dict) -> str:
    """A table of the page: measures below each other, and models beside each other. A cell is the
    mean over seeds, with the range in parentheses."""
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    if NO_MODEL in columns:
        columns.remove(NO_MODEL)
        columns.append(NO_MODEL)
    lines = [table_line(["", *columns]), "|---" * (len(columns) + 1) + "|"]
    for measure, cells in rows.items():
        largest = max(max(of_seeds) for of_seeds in cells.values())
        in_percent = any(name.endswith("%") for name in (measure, *cells))
        digits = 1 if in_percent or largest >= 100 else 3
        line = [measure]
        for column in columns:
            of_seeds = cells.get(column, [])
            text = f"{statistics.fmean(of_seeds):.{digits}f}" if of_seeds else ""
            if len(of_seeds) > 1:
                text += f" ({max(of_seeds) - min(of_seeds):.{digits}f})"
            line.append(text)
        lines.append(table_line(line))
    return "\n".join(lines) + "\n"


# ---- main ----------------------------------------------------------------------------------------


def measured(runs: Path, test: Test, table: str) -> dict:
    """The rows of a method's table."""
    method, measure = METHODS[table]
    rows = {}
    for column, row in COLUMNS[table].items():
        file = "pretrained.pt" if column in PRE_TRAINED else "best.pt"
        for folder in finished(runs, row):
            run = method.load(folder / file, "cpu")
            measure(partial(note, rows, column), test, run)
            if column == "trained":
                measure(partial(note, rows, "untrained"), test, untrained(run))
            if column not in PRE_TRAINED:
                _, ciders = validations(folder)
                note(rows, column, "highest validation CIDEr", max(ciders))
    return rows


def learning(runs: Path, table: str) -> dict:
    """Validation CIDEr of a method at some of its steps."""
    columns = {}
    for folder in finished(runs, table):
        steps, ciders = validations(folder)
        for step, cider in zip(steps, ciders, strict=True):
            if step in STEPS:
                columns.setdefault(f"step {step:,}", []).append(cider)
        columns.setdefault("last step", []).append(ciders[-1])
    return columns


def validations(folder: Path) -> tuple[list[int], list[float]]:
    """The steps of a run's validations, of IDC those of fine-tuning, and CIDEr at each."""
    start, *log = read_log(folder / "log.jsonl")
    first = start["config"].get("pretrain_steps", 0)
    lines = [line for line in log if line["event"] == "eval"]
    return [line["step"] - first for line in lines], [line["CIDEr"] for line in lines]


def positions() -> dict:
    """Scores of rows with positions in what the decoder reads, and without, from results.json."""
    rows = {}
    for row in POSITIONS:
        for column in ("place", "change type"):
            for value in values(read_results()["records"], row, column):
                note(rows, f"{column}, %", row, value)
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="?", help="folder of runs; default: only tables")
    text = "measure only these methods anew"
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), help=text)
    args = parser.parse_args()
    numbers = {}
    if NUMBERS.exists():
        numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    if args.runs:
        folder, *_ = finished(args.runs, args.only[0])
        test = Test(load_tensors(folder / "best.pt")["config"]["data_dir"])
        numbers["positions"] = positions()
        for table in args.only:
            numbers.setdefault("learning", {})[table] = learning(args.runs, table)
            numbers[table] = measured(args.runs, test, table)
        write_text(NUMBERS, json.dumps(numbers, indent=1) + "\n")
    for table, rows in numbers.items():
        fill(PAGE, table, lambda _, rows=rows: table_of(rows), "controls.py")


if __name__ == "__main__":
    run_main(main)
