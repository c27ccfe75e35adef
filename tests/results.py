"""Trains the rows of tests/results.md on the embedded data set and writes that table. Not a test.

    python tests/results.py                                  every row that is missing, with seeds 1111, 1 and 2: many hours
    python tests/results.py --rows SCORER+CBR CHEERS         these rows only
    python tests/results.py --table                          only write the table, from the runs that are there

Each run has one thread; as many run at a time as there are cores. A run that is done is not run again, and one that was
stopped goes on. Every figure comes from the runs' scores_test.json, which are not part of the project.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Row -> script and flags. Presets hold the rest.
ROWS = {
    "SCORER+CBR": "scorer_cbr.py",
    "SCORER+CBR, matching tm": "scorer_cbr.py --matching tm",
    "Subtraction (SCORER's decoder)": "scorer_cbr.py --difference subtract --w_match 0 --w_cbr 0",
    "DIRL+CCR": "dirl_ccr.py",
    "Subtraction (DIRL's decoder)": "dirl_ccr.py --difference subtract --w_dirl 0 --w_ccr 0",
    "RDD+ACR": "rdd_acr.py",
    "CHEERS": "cheers.py",
    "IDC": "idc_pretrain.py",
}
COLUMNS = {  # column -> where scores_test.json has it
    "total CIDEr": ("scores", "total", "CIDEr"),
    "semantic CIDEr": ("scores", "semantic change", "CIDEr"),
    "BLEU-4": ("scores", "total", "BLEU-4"),
    "METEOR": ("scores", "total", "METEOR"),
    "change type": ("accuracy", "change type"),
    "distractors": ("accuracy", "distractors"),
    "all four": ("accuracy", "all four"),
    **{kind: ("scores", kind, "CIDEr") for kind in ("color", "material", "add", "drop", "move")},
    "hardest views": ("scores", "view: hardest quarter", "CIDEr"),
    "easiest views": ("scores", "view: easiest quarter", "CIDEr"),
    "pointing": ("pointing", ("attention", "decoder"), "total"),
}


def folder_of(runs: Path, row: str, seed: int) -> Path:
    return runs / f"{re.sub(r'[^a-z0-9]+', '-', row.lower()).strip('-')}-{seed}"


def train(row: str, seed: int, runs: Path, data_dir: str) -> None:
    """One run, in a process of its own with one thread; its output goes into <folder>.txt, its minutes are added up there."""
    folder = folder_of(runs, row, seed)
    if (folder / "scores_test.json").exists():
        return
    script, *flags = ROWS[row].split()
    command = [sys.executable, str(HERE.parent / script), *flags, "--seed", str(seed), "--data_dir", data_dir]
    command += ["--out_dir", str(folder), *(["--resume"] if (folder / "last.pt").exists() else [])]
    print(f"{time.strftime('%H:%M')} {row}, seed {seed}", flush=True)
    began = time.perf_counter()
    with open(f"{folder}.txt", "a") as output:
        code = subprocess.run(command, stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
        output.write(f"\nminutes: {(time.perf_counter() - began) / 60:.2f}\n")
    if code:
        print(f"{row}, seed {seed} ended with code {code}; see {folder}.txt", file=sys.stderr)


def value_of(result: dict, path: tuple) -> float | None:
    """The value at a path of keys; a tuple among them stands for the first of its keys that is there."""
    for key in path:
        key = next((k for k in key if k in result), key[0]) if isinstance(key, tuple) else key
        if result.get(key) is None:
            return None
        result = result[key]
    return result


def cell(values: list[float | None]) -> str:
    """Mean and, in brackets, the distance between the lowest and the highest."""
    if not values or None in values:
        return "-"
    return f"{statistics.fmean(values):.1f}" + (f" ({max(values) - min(values):.1f})" if len(values) > 1 else "")


def write_table(runs: Path, seeds: list[int], path: Path) -> None:
    """tests/results.md: one line a row, from the runs that are there."""
    lines, about = [], set()
    for row, command in ROWS.items():
        folders = [f for seed in seeds if ((f := folder_of(runs, row, seed)) / "scores_test.json").exists()]
        if not folders:
            continue
        results = [json.loads((f / "scores_test.json").read_text()) for f in folders]
        minutes = [re.findall(r"^minutes: (.*)$", Path(f"{f}.txt").read_text(), re.M) for f in folders]
        cells = [cell([value_of(r, where) for r in results]) for where in COLUMNS.values()]
        cells.append(cell([sum(map(float, m)) if m else None for m in minutes]))
        lines.append(f"| {row} | `python {command}` | {len(folders)} | {' | '.join(cells)} |")
        starts = [json.loads((f / "log.jsonl").read_text().splitlines()[0]) for f in folders]
        about |= {f"code {s['code']}, torch {s['torch']}, {s['device']}" for s in starts}
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    head = ["row", "command", "seeds", *COLUMNS, "minutes"]
    path.write_text("\n".join([
        "# Results on mini", "",
        "Written by `python tests/results.py`. Test split, 500 changed and 500 distractor pairs. Means over the seeds "
        f"{', '.join(map(str, seeds))}; in brackets the distance between the lowest and the highest seed. CIDEr, BLEU-4 and "
        "METEOR x 100, the rest in %. Minutes are of training and evaluation on one thread, beside whatever else ran.", "",
        f"Machine: {cpu[1] if cpu else platform.processor()}, {os.cpu_count()} cores, {platform.system()}, Python "
        f"{platform.python_version()}. Runs: {'; '.join(sorted(about))}.", "",
        f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines, "",
    ]))  # fmt: skip
    print(f"wrote {path}")


def main() -> None:
    """Train what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1111, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/results"), help="where the runs go")
    parser.add_argument("--data_dir", default="data/mini")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    if not args.table:
        subprocess.run([sys.executable, str(HERE.parent / "data.py"), "mini", "--data_dir", args.data_dir], check=True)
        waiting = [(row, seed) for seed in args.seeds for row in args.rows]
        with ThreadPoolExecutor(args.jobs) as pool:
            for done in [pool.submit(train, row, seed, args.runs, args.data_dir) for row, seed in waiting]:
                done.result()
    write_table(args.runs, args.seeds, HERE / "results.md")


if __name__ == "__main__":
    main()
