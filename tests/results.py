"""Trains the rows of tests/results.md on mini, and writes that table. Not a test.

    python tests/results.py                        run what is missing: six hours on two cores
    python tests/results.py --rows SCORER+CBR GDE  only these rows
    python tests/results.py --table                run nothing, only write the tables

Each row is run with each of three seeds, on one thread; two runs go on at a time. A run that ends
appends a record to tests/results.json. From these records and tests/bounds.json (see bounds.py),
and from nothing else, come tests/results.md and the table in README.md.

A record counts while the code and the command that made it are today's. The code is the method's
file, common.py, data.py and mini.py; comments, docstrings and layout do not matter. A mean is over
runs of one machine: if the machine changes, a row that is not complete starts again.

The runs stay in runs/results. An interrupted one is continued if code and machine are the same.
From the first run of SCORER+CBR come the weights and pictures in assets/ (see write_assets).
"""

import argparse
import ast
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
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dirl_ccr
import idc_pretrain
import scorer_cbr
from common import atomic_write, load_checkpoint, run_main, save_tensors, write_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RECORDS = HERE / "results.json"
BOUNDS = HERE / "bounds.json"
RESULTS = HERE / "results.md"
README = ROOT / "README.md"
ASSETS = ROOT / "assets"

SEEDS = (1111, 1, 2)
THREADS = 1  # of a run
TEST_FLAGS: list[str] = []  # added to every command; for a short trial of this file

# ---- rows ----------------------------------------------------------------------------------------

# Presets were chosen for the papers' variants. The released ones learn mini more slowly, and get
# twice the steps.
SCORER_STEPS = 2 * scorer_cbr.PRESETS["mini"]["steps"]
DIRL_STEPS = 2 * dirl_ccr.PRESETS["mini"]["steps"]
# Without pre-training, IDC gets as many steps as with it.
IDC_STEPS = idc_pretrain.PRESETS["mini"]["pretrain_steps"] + idc_pretrain.PRESETS["mini"]["steps"]

# Row -> script and flags; mini's presets hold the rest. The main rows come first, the others by
# claim: rows are run in this order.
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
    "IDC, no pre-training": f"idc_pretrain.py --pretrain_steps 0 --steps {IDC_STEPS}",
    "SCORER+CBR, released": f"scorer_cbr.py --variant released --steps {SCORER_STEPS}",
    "DIRL+CCR, released": f"dirl_ccr.py --variant released --steps {DIRL_STEPS}",
    "RDD+ACR, as printed": "rdd_acr.py --no-residual",
    "IDC, masked targets": "idc_pretrain.py --finetune_targets masked",
    "words alone": "scorer_cbr.py --blind",
}
IN_README = ["SCORER+CBR", "DIRL+CCR", "RDD+ACR", "CHEERS", "IDC", "Subtraction"]
ASSETS_ROW = "SCORER+CBR"  # its first run gives the weights and pictures in assets/

# Column -> where scores_test.json has it.
COLUMNS = {
    "semantic CIDEr": ("scores", "semantic change", "CIDEr"),
    "change type": ("accuracy", "change type"),
    "distractors": ("accuracy", "distractors"),
    "all four": ("accuracy", "all four"),
    "place": ("accuracy", "place"),
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
    "pointing": ("pointing", "attention", "total"),
}
README_COLUMNS = list(COLUMNS)[:7]


@dataclass
class Claim:
    """A paper says that row `better` scores higher than row `worse`; its CIDEr figures."""

    table: str
    better: str
    worse: str
    figures: tuple[float, float]
    sign: str = ">"


CLAIMS = [
    Claim("SCORER+CBR, Table 6 (CLEVR-Change)", "RR", "Subtraction", (123.8, 119.7)),
    Claim("SCORER+CBR, Table 6 (CLEVR-Change)", "SCORER", "RR", (126.0, 123.8)),
    Claim("SCORER+CBR, Table 6 (CLEVR-Change)", "SCORER+CBR", "SCORER", (126.8, 126.0), ">="),
    Claim("DIRL+CCR, Table 6 (CLEVR-DC)", "DIRL+CCR", "Transformer", (84.1, 79.6)),
    Claim("RDD+ACR, Table 4 (CLEVR-Change)", "GDE", "direct-sub", (125.2, 120.4)),
    Claim("RDD+ACR, Table 5 (CLEVR-Change)", "RDD+ACR", "RDD+ACR, no losses", (128.1, 127.0)),
    Claim("CHEERS, Table 4 (CLEVR-Change)", "HRD", "CHEERS, baseline", (125.3, 100.1)),
    Claim("CHEERS, Table 4 (CLEVR-Change)", "CHEERS", "HRD", (130.0, 125.3)),
    Claim("IDC, Table 4 (CLEVR-Change)", "IDC", "IDC, no pre-training", (128.9, 89.8)),
]


@dataclass
class Deviation:
    """A choice where a paper is silent or its released code differs, and what it does."""

    row: str
    here: str
    other: str
    other_row: str


def names_of(released: dict[str, dict]) -> str:
    """The fields that a released variant sets on every data set."""
    return ", ".join(f"`{name}`" for name in released["all"])


DEVIATIONS = [
    Deviation(
        "SCORER+CBR",
        "the paper's variant",
        f"the released code's, in twice the steps: {names_of(scorer_cbr.RELEASED)} (`match_layer` "
        "means nothing with mini's one layer)",
        "SCORER+CBR, released",
    ),
    Deviation(
        "DIRL+CCR",
        "the paper's variant",
        f"the released code's, in twice the steps: {names_of(dirl_ccr.RELEASED)}",
        "DIRL+CCR, released",
    ),
    Deviation(
        "RDD+ACR",
        "residuals in Eq. 4, 6 and 7, LayerNorms in Eq. 4 and 6 to 8",
        "as printed: of Eq. 4 to 8, only Eq. 8 has a residual",
        "RDD+ACR, as printed",
    ),
    Deviation(
        "IDC",
        "fine-tuning asks for every word",
        "as in MLM, and in the released code: for 15 % of the words",
        "IDC, masked targets",
    ),
]

# ---- published figures ---------------------------------------------------------------------------

# Names of the bounds in bounds.json.
ONE_CAPTION = "one caption for all"
ONE_PER_KIND = "one caption per kind of change"
HUMAN = "human (one reference held out)"


@dataclass
class Published:
    """BLEU-4 and CIDEr of a data set, or of one of its groups, as the papers have them."""

    title: str
    dataset: str
    group: str
    figures: dict[str, str]  # row -> BLEU-4 / CIDEr


PUBLISHED = [
    Published(
        "CLEVR-Change",
        "clevr_change",
        "total",
        {
            "SCORER+CBR": "56.3 / 126.8",
            "RDD+ACR": "56.1 / 128.1",
            "CHEERS": "57.1 / 130.0",
            "IDC": "51.2 / 128.9",
        },
    ),
    Published(
        "CLEVR-Change, changed",
        "clevr_change",
        "semantic change",
        {"SCORER+CBR": "54.4 / 122.4", "DIRL+CCR": "54.6 / 123.6", "CHEERS": "54.1 / 127.4"},
    ),
    Published(
        "CLEVR-DC",
        "clevr_dc",
        "total",
        {"SCORER+CBR": "49.4 / 83.7", "DIRL+CCR": "51.4 / 84.1", "CHEERS": "51.6 / 86.9"},
    ),
    Published(
        "Spot-the-Diff",
        "spot_the_diff",
        "total",
        {
            "SCORER+CBR": "10.2 / 38.9",
            "DIRL+CCR": "10.3 / 40.9",
            "RDD+ACR": "9.2 / 43.6",
            "CHEERS": "10.5 / 41.0",
        },
    ),
    Published(
        "Image Editing Request",
        "image_editing_request",
        "total",
        {"SCORER+CBR": "10.0 / 33.4", "DIRL+CCR": "10.9 / 34.1"},
    ),
    Published("LEVIR-CC", "levir_cc", "total", {"RDD+ACR": "65.6 / 138.3"}),
    Published("LEVIR-CC, changed", "levir_cc", "change", {}),
    Published("Birds-to-Words", "birds_to_words", "total", {"IDC": "28.0 / 18.6"}),
    Published("mini", "mini", "total", {}),
    Published("mini, changed", "mini", "semantic change", {}),
]

# ---- code and machine ----------------------------------------------------------------------------


def code_of(script: str) -> str:
    """Hash of the code that a row's scores depend on: its method's file and what all share."""
    digest = hashlib.sha256()
    for name in (script, "common.py", "data.py", "mini.py"):
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        digest.update(outline(tree).encode())
    return digest.hexdigest()[:12]


def outline(node) -> str:
    """A syntax tree as text, without comments, layout and docstrings.

    ast.dump would do, were it the same in every version of Python."""
    if isinstance(node, list):
        return "[" + ",".join(outline(x) for x in node if not is_docstring(x)) + "]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if value is not None and value != []:  # newer versions have more optional fields
            parts.append(f"{name}={outline(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def is_docstring(node) -> bool:
    """Is it a statement that is only a string?"""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def commit() -> str:
    """The git commit of this folder, for a reader; it decides nothing."""
    if not shutil.which("git"):
        return ""
    call = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(call, capture_output=True, text=True).stdout.strip()


def machine() -> dict:
    """What a run that starts now runs on."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": THREADS,
    }


def processor() -> str:
    """The processor's name, and its family and model, where names do not tell two apart."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", info.read_text(), re.M))
    name = found.get("model name", platform.machine())
    if "cpu family" not in found:
        return name
    return f"{name} (family {found['cpu family']}, model {found.get('model')})"


def describe(about: dict) -> str:
    """A machine in words."""
    threads = "1 thread" if about["threads"] == 1 else f"{about['threads']} threads"
    return f"{about['processor']}, {about['cores']} cores, torch {about['torch']}, {threads} a run"


# ---- records -------------------------------------------------------------------------------------


def read_records() -> list[dict]:
    """The records of all runs, in the order in which these ended."""
    if not RECORDS.exists():
        return []
    return json.loads(RECORDS.read_text(encoding="utf-8"))


def append_record(record: dict) -> None:
    """Adds a line to results.json."""
    lines = [json.dumps(r) for r in [*read_records(), record]]
    write_text(RECORDS, "[\n" + ",\n".join(lines) + "\n]\n")


def command_of(row: str, seed: int) -> str:
    """What a reader types for a run."""
    return " ".join(["python", ROWS[row], *TEST_FLAGS, f"--seed {seed}"])


def script_of(row: str) -> str:
    return ROWS[row].split()[0]


def records_by_machine(records: list[dict]) -> dict[str, dict[str, dict[int, dict]]]:
    """Row -> machine in words -> seed -> the last record of today's code and command.

    The machine of the latest record comes last."""
    codes = {}
    for row in ROWS:
        script = script_of(row)
        if script not in codes:
            codes[script] = code_of(script)
    found = {row: {} for row in ROWS}
    for record in records:
        row = record["row"]
        seed = record["seed"]
        if row not in ROWS or seed not in SEEDS:
            continue
        same_command = record["command"] == command_of(row, seed)
        if same_command and record["code"] == codes[script_of(row)]:
            name = describe(record["machine"])
            earlier = found[row].pop(name, {})
            found[row][name] = earlier | {seed: record}
    return found


@dataclass
class Results:
    """The runs that make a row of the table, all of one machine."""

    machine: str = ""
    records: tuple = ()

    def values(self, column: str) -> list[float | None]:
        """A score of each run; None where it was not to be had."""
        if column == "minutes":
            return [record["minutes"] for record in self.records]
        return [record["scores"].get(column) for record in self.records]


def results_of_rows(records: list[dict]) -> dict[str, Results]:
    """Row -> its runs on the machine that has most of them; of two such machines, on the later."""
    rows = {}
    for row, by_machine in records_by_machine(records).items():
        rows[row] = Results()
        for name, by_seed in by_machine.items():
            if len(by_seed) >= len(rows[row].records):
                rows[row] = Results(name, tuple(by_seed.values()))
    return rows


def missing_runs(records: list[dict], rows: list[str]) -> list[tuple[str, int]]:
    """(row, seed) of the runs that this machine has to make, in their order.

    A row that any machine has completed needs none."""
    here = describe(machine())
    by_row = records_by_machine(records)
    waiting = []
    for row in ROWS:
        if row not in rows:
            continue
        if any(len(by_seed) == len(SEEDS) for by_seed in by_row[row].values()):
            continue
        done = by_row[row].get(here, {})
        waiting += [(row, seed) for seed in SEEDS if seed not in done]
    return waiting


# ---- running -------------------------------------------------------------------------------------


@dataclass
class Job:
    """A run under way."""

    row: str
    seed: int
    folder: Path
    about: dict  # command, code, machine
    spent: float | None  # minutes of earlier stretches; None: unknown
    began: float
    process: subprocess.Popen

    def minutes(self) -> float | None:
        if self.spent is None:
            return None
        return round(self.spent + (time.perf_counter() - self.began) / 60, 2)


def folder_of(runs: Path, row: str, seed: int) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", row.lower()).strip("-")
    return runs / f"{name}-{seed}"


def notes_of(folder: Path) -> dict:
    """What is known of the run in a folder, from the file <folder>.json beside it."""
    file = Path(f"{folder}.json")
    return json.loads(file.read_text()) if file.exists() else {}


def write_notes(folder: Path, about: dict, minutes: float | None) -> None:
    text = json.dumps(about | {"minutes": minutes}, indent=1) + "\n"
    write_text(Path(f"{folder}.json"), text)


def start(row: str, seed: int, runs: Path, data_dir: str) -> Job:
    """Starts a run, or continues one of the same command, code and machine. Its output goes into
    <folder>.txt."""
    folder = folder_of(runs, row, seed)
    about = {
        "command": command_of(row, seed),
        "code": code_of(script_of(row)),
        "machine": machine(),
    }
    notes = notes_of(folder)
    spent = notes.pop("minutes", None)
    resumes = notes == about and (folder / "last.pt").exists()
    if not resumes:
        spent = 0.0
    write_notes(folder, about, None)  # unknown, if this process is killed
    script, *flags = ROWS[row].split()
    call = [sys.executable, str(ROOT / script), *flags, *TEST_FLAGS, "--seed", str(seed)]
    call += ["--device", "cpu", "--data_dir", data_dir, "--out_dir", str(folder)]
    call += ["--resume" if resumes else "--overwrite"]
    print(f"{time.strftime('%H:%M')} {row}, seed {seed}", flush=True)
    with open(f"{folder}.txt", "a" if resumes else "w") as output:
        process = subprocess.Popen(
            call,
            stdout=output,
            stderr=output,
            env=os.environ | {"OMP_NUM_THREADS": str(THREADS)},
            start_new_session=True,  # Ctrl-C reaches it once, through stop_all
        )
    return Job(row, seed, folder, about, spent, time.perf_counter(), process)


def finish(job: Job) -> bool:
    """Records a run that has ended. Has it succeeded?"""
    minutes = job.minutes()
    write_notes(job.folder, job.about, minutes)
    if job.process.returncode:
        print(f"{job.row}, seed {job.seed} failed; see {job.folder}.txt", file=sys.stderr)
        return False
    scores = json.loads((job.folder / "scores_test.json").read_text())
    record = {
        "row": job.row,
        "command": job.about["command"],
        "seed": job.seed,
        "code": job.about["code"],
        "commit": commit(),
        "machine": job.about["machine"],
        "minutes": minutes,
        "scores": read_scores(scores),
    }
    append_record(record)
    return True


def read_scores(result: dict) -> dict[str, float | None]:
    """Column -> its value in a scores_test.json; None where it has none."""
    return {column: value_at(result, path) for column, path in COLUMNS.items()}


def value_at(result: dict, path: tuple[str, ...]) -> float | None:
    value = result
    for key in path:
        if key == "attention" and key not in value:
            key = "decoder"  # RDD+ACR's name of the map that is compared
        value = value.get(key)
        if value is None:
            return None
    return None if math.isnan(value) else value


def stop_all(jobs: list[Job]) -> None:
    """Lets every run save and end."""
    for job in jobs:
        job.process.terminate()
    for job in jobs:
        job.process.wait()
        write_notes(job.folder, job.about, job.minutes())


def run_missing(rows: list[str], count: int, runs: Path, data_dir: str) -> bool:
    """Makes the missing runs, `count` at a time; writes the tables after each. Did all succeed?"""
    waiting = missing_runs(read_records(), rows)
    running: list[Job] = []
    succeeded = True
    try:
        while waiting or running:
            while waiting and len(running) < count:
                row, seed = waiting.pop(0)
                running.append(start(row, seed, runs, data_dir))
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                succeeded &= finish(job)
                write_tables()
                if assets_are_due(runs):
                    write_assets(folder_of(runs, ASSETS_ROW, SEEDS[0]), data_dir)
            time.sleep(0.2)
    finally:
        stop_all(running)
    return succeeded


def prepare(data_dir: str) -> None:
    """Makes mini and its CLIP, so that no run's minutes have them."""
    import data
    import mini

    root = Path(data_dir)
    data.prepare("mini", root, "cpu")
    mini.clip_state(root)


# ---- tables --------------------------------------------------------------------------------------


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def cell(values: list[float | None]) -> str:
    """Mean and, in parentheses, the range: the largest less the smallest."""
    if not values or None in values:
        return "-"
    mean = f"{statistics.fmean(values):.1f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({max(values) - min(values):.1f})"


def letters_of(results: dict[str, Results]) -> dict[str, str]:
    """Machine in words -> its letter in the tables."""
    names = dict.fromkeys(r.machine for r in results.values() if r.machine)
    return {name: chr(ord("A") + n) for n, name in enumerate(names)}


def legend(letters: dict[str, str]) -> str:
    return " ".join(f"Machine {letter}: {name}." for name, letter in letters.items())


def results_table(
    results: dict[str, Results], rows: list[str], columns: list[str], with_command: bool
) -> str:
    letters = letters_of(results)
    head = ["row", "command", "seeds", "machine", *columns]
    lines = []
    for row in rows:
        of_row = results[row]
        line = [row, f"`python {ROWS[row]}`", str(len(of_row.records))]
        if of_row.records:
            line.append(letters[of_row.machine])
            line += [cell(of_row.values(column)) for column in columns]
        else:
            line += ["not run"] + [""] * len(columns)
        lines.append(line)
    if not with_command:
        for line in [head, *lines]:
            line.pop(1)
    return markdown(head, lines)


def compare(better: list[float], worse: list[float]) -> tuple[float, float]:
    """The difference of two means, and its standard error."""
    gap = statistics.fmean(better) - statistics.fmean(worse)
    variance = statistics.variance(better) / len(better) + statistics.variance(worse) / len(worse)
    return gap, math.sqrt(variance)


def verdict(gap: float, error: float) -> str:
    """Does mini confirm that a row scores higher than another? The text in results_text says how
    this is decided."""
    margin = 3 * error
    if abs(gap) >= max(margin, 10):
        return "confirmed" if gap > 0 else "contradicted"
    if abs(gap) + margin <= 25:
        return "no difference of 25"
    return "cannot tell"


def judge(claim: Claim, results: dict[str, Results]) -> tuple[str, str]:
    """-> the difference on mini with its standard error, and the verdict."""
    rows = (results[claim.better], results[claim.worse])
    values = [row.values("semantic CIDEr") for row in rows]
    if min(len(v) for v in values) < 2 or None in values[0] + values[1]:
        return "", "not run"
    gap, error = compare(*values)
    text = verdict(gap, error)
    if rows[0].machine != rows[1].machine:
        letters = letters_of(results)
        text += f" (machines {letters[rows[0].machine]} and {letters[rows[1].machine]})"
    return f"{gap:+.0f} ± {error:.1f}", text


def claims_table(results: dict[str, Results]) -> str:
    lines = []
    for claim in CLAIMS:
        text = f"{claim.better} {claim.sign} {claim.worse}"
        figures = f"{claim.figures[0]} {claim.sign} {claim.figures[1]}"
        lines.append([claim.table, text, figures, *judge(claim, results)])
    return markdown(["table", "claim", "published", "difference on mini", "verdict"], lines)


def spread(results: dict[str, Results], rows: Iterable[str]) -> float | None:
    """Standard deviation of semantic CIDEr between seeds, pooled over those of `rows` with several.
    None if there are none."""
    variances = []
    for row in rows:
        values = results[row].values("semantic CIDEr")
        if len(values) > 1 and None not in values:
            variances.append(statistics.variance(values))
    return math.sqrt(statistics.fmean(variances)) if variances else None


def deviations_table(results: dict[str, Results]) -> str:
    lines = []
    for d in DEVIATIONS:
        scores = []
        for row in (d.row, d.other_row):
            of_row = results[row]
            text = cell(of_row.values("semantic CIDEr")) if of_row.records else "not run"
            scores.append(text)
        lines.append([d.row, d.here, d.other, *scores])
    return markdown(["method", "here", "otherwise", "CIDEr here", "CIDEr otherwise"], lines)


# ---- floors and ceilings -------------------------------------------------------------------------


def bound_cell(bounds: dict, dataset: str, bound: str, group: str) -> str:
    """BLEU-4 / CIDEr of a bound; "-" without the data set, "" if it has no such bound."""
    if dataset not in bounds:
        return "-"
    row = bounds[dataset]["scores"].get(f"{bound}: {group}")
    return f"{row['BLEU-4']:.1f} / {row['CIDEr']:.1f}" if row else ""


def bounds_table(bounds: dict) -> str:
    methods = IN_README[:5]
    lines = []
    for p in PUBLISHED:
        line = [p.title]
        line += [p.figures.get(method, "") for method in methods]
        for bound in (ONE_CAPTION, ONE_PER_KIND, HUMAN):
            line.append(bound_cell(bounds, p.dataset, bound, p.group))
        lines.append(line)
    head = ["data set, pairs", *methods, ONE_CAPTION, ONE_PER_KIND, HUMAN]
    return markdown(head, lines)


def bounds_notes(bounds: dict) -> list[str]:
    """What the floors mean for the published figures."""
    notes = [
        "IDC's figures are with pre-training; with CUB and NABirds, Birds-to-Words becomes "
        "31.0 / 25.3."
    ]
    if "levir_cc" in bounds:
        scores = bounds["levir_cc"]["scores"]
        one = scores[f"{ONE_CAPTION}: total"]["CIDEr"]
        per_kind = scores[f"{ONE_PER_KIND}: total"]["CIDEr"]
        notes.append(
            f"Read differences, not levels: on LEVIR-CC, one sentence for all pairs has a CIDEr of "
            f"{one:.0f} where 138 is published, and to know only whether anything changed gives "
            f"{per_kind:.0f}. So read the changed pairs by themselves. Of the others, all have "
            "the same five references: by themselves no word of these has weight, and any caption "
            "has 0."
        )
    if "image_editing_request" in bounds:
        one = bounds["image_editing_request"]["scores"][f"{ONE_CAPTION}: total"]["CIDEr"]
        notes.append(
            f"On Image Editing Request, one sentence for all pairs has a CIDEr of {one:.0f} where "
            "33 and 34 are published."
        )
    if "spot_the_diff" in bounds:
        count = bounds["spot_the_diff"]["pairs"][HUMAN]
        notes.append(
            f"On Spot-the-Diff, the human's figure is of the {count} pairs with several references."
        )
    return notes


# ---- the page ------------------------------------------------------------------------------------


def results_text(results: dict[str, Results], bounds: dict) -> str:
    """tests/results.md."""
    seeds = ", ".join(str(seed) for seed in SEEDS)
    parts = [
        "# Results on mini",
        "Written by `python tests/results.py` from tests/results.json and tests/bounds.json. Do "
        "not edit.",
        f"Means over the seeds {seeds}, with the range (the largest less the smallest) in "
        "parentheses. Test split: 500 changed pairs and 500 distractor pairs. CIDEr, BLEU-4 and "
        "METEOR are x 100, the rest is in %. A column named for a kind of change has the CIDEr of "
        "its pairs. Minutes are those of training and evaluation, on one thread, two runs at a "
        "time. README.md explains the other words.",
        "A row counts only runs of today's code (the method's file, common.py, data.py and "
        "mini.py) and of one machine.",
        legend(letters_of(results)),
        results_table(results, list(ROWS), [*COLUMNS, "minutes"], with_command=True),
        "Words alone see no image, so they write one caption for all pairs, and have its scores.",
        "## What the papers claim",
        "Published figures are CIDEr of all pairs, differences on mini are of semantic CIDEr, with "
        "their standard error. A claim is confirmed (or contradicted) if the means differ by at "
        "least three standard errors and by at least 10. If they do not, and the difference with "
        "three standard errors on either side lies within -25 ... 25, there is no difference of "
        "25.",
        precision_text(results),
        claims_table(results),
        "How large a difference is on mini says nothing about its size on another data set. "
        f"{idc_text()}",
        "## Deviations",
        "Where paper and released code disagree, the default is the paper, except where a comment "
        'in the method\'s file says "as released" or [ours]; `RELEASED` there lists what '
        "`--variant released` switches. [ours] also marks choices on which a paper is silent. What "
        "some of them do to semantic CIDEr on mini, whose presets were chosen for the defaults:",
        deviations_table(results),
        dirl_text(),
        "## Published figures, floors and ceilings",
        "BLEU-4 / CIDEr. Blank: not in the paper (without its supplement), or without such a "
        "bound. The last three columns are ours, by `python tests/bounds.py NAME --data_dir D` "
        "from annotations alone (-: these were not at hand). One caption: the best of 200 frequent "
        "training captions, chosen on validation. Human: one reference against the others. None "
        "of the published figures was reproduced here.",
        bounds_table(bounds),
        " ".join(bounds_notes(bounds)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def precision_text(results: dict[str, Results]) -> str:
    """What mini can tell."""
    text = "With three seeds, mini can tell differences of 25 and more where seeds agree."
    rows_of_claims = set()
    for claim in CLAIMS:
        rows_of_claims |= {claim.better, claim.worse}
    deviation = spread(results, rows_of_claims)
    if deviation is not None:
        # The seeds of words alone differ by the one caption that each repeats.
        rows_that_see = [row for row in ROWS if row != "words alone"]
        of_all = spread(results, rows_that_see)
        error = deviation * math.sqrt(2 / len(SEEDS))
        text += (
            f" Between seeds, the standard deviation is {deviation:.0f} (pooled over the rows of "
            f"these claims; {of_all:.0f} over all rows but words alone), and three standard errors "
            f"of a difference of two rows are then {3 * error:.0f}."
        )
    return text


def idc_text() -> str:
    """On IDC's pre-training, of which mini's preset has a part."""
    cfg = idc_pretrain.Config(**idc_pretrain.PRESETS["mini"])
    tasks = [task for task in ("mlm", "mvcl", "fda") if getattr(cfg, task)]
    names = " and ".join(task.upper() for task in tasks)
    return f"On mini, IDC pre-trains with {names}; the published figure is of all three tasks."


def dirl_text() -> str:
    """On DIRL's weights, which are ours for mini."""
    weights = []
    for dataset in ("mini", "clevr_change", "clevr_dc"):
        cfg = dirl_ccr.Config(**dirl_ccr.PRESETS[dataset])
        weights.append(f"{cfg.w_dirl} and {cfg.w_ccr}")
    return (
        f"DIRL's two losses weigh {weights[0]} in mini's preset; in the paper {weights[1]} on "
        f"CLEVR-Change and {weights[2]} on CLEVR-DC."
    )


def write_tables() -> None:
    """tests/results.md, and the table of README.md between its marks, from the records alone."""
    results = results_of_rows(read_records())
    bounds = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
    write_text(RESULTS, results_text(results, bounds))
    in_readme = {row: results[row] for row in IN_README}
    table = results_table(in_readme, IN_README, README_COLUMNS, with_command=False)
    lines = [table]
    if letters_of(in_readme):
        lines += ["", legend(letters_of(in_readme))]
    text = README.read_text(encoding="utf-8")
    begin = "<!-- results, by tests/results.py -->\n"
    end = "<!-- end -->\n"
    if begin in text:
        before, rest = text.split(begin, 1)
        _, after = rest.split(end, 1)
        new = "\n".join(lines) + "\n"
        write_text(README, before + begin + new + end + after)


# ---- assets --------------------------------------------------------------------------------------


def weights_file() -> Path:
    return ASSETS / "scorer_cbr-mini.pt"


def assets_are_due(runs: Path) -> bool:
    """Has the run that gives the assets ended, with today's code, after they were written?"""
    folder = folder_of(runs, ASSETS_ROW, SEEDS[0])
    notes = notes_of(folder)
    scores = folder / "scores_test.json"
    if not scores.exists() or notes["code"] != code_of(script_of(ASSETS_ROW)):
        return False
    written = weights_file()
    return not written.exists() or written.stat().st_mtime < scores.stat().st_mtime


def write_assets(folder: Path, data_dir: str) -> None:
    """Into assets/: the run's weights, a pair of test pictures that these caption rightly, and a
    picture of five pairs with captions."""
    import data
    import mini

    dataset = data.load("mini", data_dir)
    pairs = dataset.pairs("test")
    results = write_weights(folder / "best.pt", dataset, pairs)
    right = {}  # pair id -> is its caption right?
    for pair in pairs:
        caption, _ = results[pair.id]
        right[pair.id] = mini.is_right(pair.id, caption, dataset.root)
    kinds = {}  # kind of change -> its pairs
    for kind, ids in dataset.kinds.items():
        if kind != "no change":
            kinds[kind] = [pair for pair in pairs if pair.id in ids]
    shown = choose_pairs(kinds, right)
    draw_rows(dataset, shown, results, ASSETS / "samples.png")
    for pair in pairs:
        changed = any(pair in members for members in kinds.values())
        if changed and right[pair.id]:
            copy_file(dataset.paths[pair.before], ASSETS / "before.png")
            copy_file(dataset.paths[pair.after], ASSETS / "after.png")
            caption, _ = results[pair.id]
            print(f"assets: {pair.id}, {caption!r}", flush=True)
            break


def write_weights(best: Path, dataset, pairs: list) -> dict:
    """Writes assets/scorer_cbr-mini.pt: what a captioner needs of a checkpoint, in float16 if this
    changes no caption of the pairs. -> pair id -> caption and attention maps."""
    state = load_checkpoint(best)
    kept = {}
    for name in ("model", "vocab", "grid", "max_len", "extractor", "config"):
        kept[name] = state[name]
    kept["config"] = kept["config"] | {"out_dir": ""}
    file = weights_file()
    save_tensors(file, kept)
    exact = caption_pairs(file, dataset, pairs)
    save_tensors(file, halved(kept))
    results = caption_pairs(file, dataset, pairs)
    changed = [i for i in exact if results[i][0] != exact[i][0]]
    if changed:
        save_tensors(file, kept)
        results = exact
    kind = "float32" if changed else "float16"
    size = file.stat().st_size / 1e6
    print(f"{file.name}: {kind}, {size:.1f} MB", flush=True)
    print(f"in float16, {len(changed)} of {len(pairs)} captions change", flush=True)
    return results


def halved(value):
    """The same dicts with every float tensor in float16."""
    if isinstance(value, dict):
        return {name: halved(x) for name, x in value.items()}
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.half()
    return value


def caption_pairs(checkpoint: Path, dataset, pairs: list) -> dict:
    """Pair id -> caption and attention maps."""
    captioner = scorer_cbr.load(checkpoint, "cpu")
    pictures = [(dataset.paths[pair.before], dataset.paths[pair.after]) for pair in pairs]
    results = {}
    for pair, result in zip(pairs, captioner.pairs(pictures, 64), strict=True):
        results[pair.id] = result
    return results


def choose_pairs(kinds: dict[str, list], right: dict[str, bool]) -> list[tuple[str, object]]:
    """A pair of every kind of change, the first of its kind: of all kinds but one the first with a
    right caption; last, of the kind that is most often wrong, the first with a wrong one."""

    def count_wrong(kind: str) -> int:
        return sum(not right[pair.id] for pair in kinds[kind])

    worst = max(kinds, key=count_wrong)
    chosen = []
    for kind in [*(kind for kind in kinds if kind != worst), worst]:
        wanted = kind != worst
        fitting = [pair for pair in kinds[kind] if right[pair.id] == wanted]
        chosen.append((kind, (fitting or kinds[kind])[0]))
    return chosen


def draw_rows(dataset, shown: list[tuple[str, object]], results: dict, path: Path) -> None:
    """A picture with a row for each (kind, pair)."""
    import data

    drawings = []
    for kind, pair in shown:
        caption, maps = results[pair.id]
        drawings.append(data.sample(dataset, pair, kind, caption, maps))
    header = ["before, after, and attention over both"]
    data.draw_page(path, header, drawings, data.SIDE, columns=1)


def copy_file(source: Path, target: Path) -> None:
    with atomic_write(target) as partial:
        shutil.copyfile(source, partial)


# ---- main ----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rows = {"choices": ROWS, "default": list(ROWS), "metavar": "ROW"}
    text = f"only these rows, of {'; '.join(ROWS)}"
    parser.add_argument("--rows", nargs="+", help=text, **rows)
    parser.add_argument("--runs", type=Path, default=Path("runs/results"), help="where runs go")
    parser.add_argument("--data_dir", default="data/mini")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--table", action="store_true", help="run nothing, only write the tables")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: expected 1 or more")
    succeeded = True
    if not args.table:
        args.runs.mkdir(parents=True, exist_ok=True)
        prepare(args.data_dir)
        if assets_are_due(args.runs):
            write_assets(folder_of(args.runs, ASSETS_ROW, SEEDS[0]), args.data_dir)
        succeeded = run_missing(args.rows, args.jobs, args.runs, args.data_dir)
    write_tables()
    if not succeeded:
        raise ValueError("some runs failed, see above")


if __name__ == "__main__":
    run_main(main)
