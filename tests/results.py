"""Trains the rows of tests/results.md on the embedded data set and writes that table. Not a test.

    python tests/results.py                                  every run that is missing: many hours
    python tests/results.py --rows SCORER+CBR CHEERS         these rows only
    python tests/results.py --table                          train nothing: only write, from the runs that are there

Each run has one thread; as many run at a time as there are cores. A run that is done is not run again, and one that was
stopped goes on. Every figure and every verdict comes from the runs' scores_test.json, which are not part of the
project. The main rows go into README.md as well, and a few captions of each method into assets/.
"""

import argparse
import itertools
import json
import math
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
SEEDS = (1111, 1, 2, 3, 4)  # all of them for rows of SCORER+CBR and DIRL+CCR, the first three for the others
# Row -> script and flags. Presets hold the rest.
ROWS = {
    "SCORER+CBR": "scorer_cbr.py",
    "DIRL+CCR": "dirl_ccr.py",
    "RDD+ACR": "rdd_acr.py",
    "CHEERS": "cheers.py",
    "IDC": "idc_pretrain.py",
    "Subtraction (SCORER's decoder)": "scorer_cbr.py --difference subtract --w_match 0 --w_cbr 0",
    "RR": "scorer_cbr.py --w_match 0 --w_cbr 0",
    "SCORER": "scorer_cbr.py --w_cbr 0",
    "RR+CBR": "scorer_cbr.py --w_match 0",
    "SCORER+CBR, matching tm": "scorer_cbr.py --matching tm",
    "SCORER+CBR, matching mean": "scorer_cbr.py --matching mean",
    "SCORER+CBR, N(0, .02)": "scorer_cbr.py --no-xavier",
    "SCORER+CBR, released": "scorer_cbr.py --reading released",
    "Subtraction (DIRL's decoder)": "dirl_ccr.py --difference subtract --w_dirl 0 --w_ccr 0",
    "Transformer": "dirl_ccr.py --w_dirl 0 --w_ccr 0",
    "DIRL": "dirl_ccr.py --w_ccr 0",
    "DIRL, non-perturbation": "dirl_ccr.py --w_ccr 0 --alpha 0",
    "DIRL, discrimination": "dirl_ccr.py --w_ccr 0 --no-correlate",
    "CCR": "dirl_ccr.py --w_dirl 0",
    "DIRL+CCR, weights .5 and .3": "dirl_ccr.py --w_dirl 0.5 --w_ccr 0.3",
    "DIRL+CCR, released": "dirl_ccr.py --reading released",
    "direct-sub": "rdd_acr.py --no-gde --order none --w_n2o 0 --w_v2a 0",
    "GDE": "rdd_acr.py --order none --w_n2o 0 --w_v2a 0",
    "GDE+N": "rdd_acr.py --order n --w_v2a 0",
    "GDE+V": "rdd_acr.py --order v --w_n2o 0",
    "GDE+V&N": "rdd_acr.py --order v&n",
    "GDE+V+N": "rdd_acr.py --order v+n",
    "RDD+ACR, no losses": "rdd_acr.py --w_n2o 0 --w_v2a 0",
    "RDD+ACR, L_N2O": "rdd_acr.py --w_v2a 0",
    "RDD+ACR, L_V2A": "rdd_acr.py --w_n2o 0",
    "RDD+ACR, no residual": "rdd_acr.py --no-residual",
    "CHEERS, baseline": "cheers.py --layers 0 --k 0 --gate none --w_consistency 0 --w_match 0",
    "CRE": "cheers.py --no-dre --gate none",
    "DRE": "cheers.py --no-cre --gate none",
    "HRD": "cheers.py --gate none",
    "GATE": "cheers.py --layers 0 --w_consistency 0 --w_match 0",
    "IDC, masked words": "idc_pretrain.py --finetune_targets masked",
    # As many steps in all as the preset has, its mask rates and temperatures. Shares are 1 : 2 : 1, as the paper's
    # 8 : 1 : 2 would leave MVCL a hundred steps.
    "IDC, no pre-training": "idc_pretrain.py --pretrain_steps 0 --steps 4200",
    "IDC, MLM": "idc_pretrain.py --mlm 1 --mvcl 0 --fda 0",
    "IDC, MLM+MVCL": "idc_pretrain.py --mlm 1 --mvcl 2 --fda 0",
    "IDC, all three": "idc_pretrain.py --mlm 1 --mvcl 2 --fda 1",
    # The papers' depth (RDD+ACR's and CHEERS's are our defaults), which the presets of mini do not have.
    "SCORER+CBR, 2 layers": "scorer_cbr.py --layers 2",
    "DIRL+CCR, 2 layers": "dirl_ccr.py --layers 2",
    "RDD+ACR, N = 3": "rdd_acr.py --distil_steps 3",
    "CHEERS, 2 layers": "cheers.py --layers 2",
    "CHEERS, 2 layers, C~ alone": "cheers.py --layers 2 --layer_input attended",
    "IDC, 3 layers": "idc_pretrain.py --layers 3",
    "words alone": "scorer_cbr.py --blind",
}
IN_README = ["SCORER+CBR", "DIRL+CCR", "RDD+ACR", "CHEERS", "IDC", "Subtraction (SCORER's decoder)",
             "Subtraction (DIRL's decoder)"]  # fmt: skip
COLUMNS = {  # column -> where scores_test.json has it
    "semantic CIDEr": ("scores", "semantic change", "CIDEr"),
    "change type": ("accuracy", "change type"),
    "distractors": ("accuracy", "distractors"),
    "all four": ("accuracy", "all four"),
    "hardest views": ("scores", "view: hardest quarter", "CIDEr"),
    "easiest views": ("scores", "view: easiest quarter", "CIDEr"),
    "total CIDEr": ("scores", "total", "CIDEr"),
    "BLEU-4": ("scores", "total", "BLEU-4"),
    "METEOR": ("scores", "total", "METEOR"),
    **{kind: ("scores", kind, "CIDEr") for kind in ("color", "material", "add", "drop", "move")},
    "pointing": ("pointing", ("attention", "decoder"), "total"),
}
README_COLUMNS = list(COLUMNS)[:6]
# The papers' ablation tables: row here -> published CIDEr.
TABLES = {
    "SCORER+CBR, Table 6 (CLEVR-Change)": {
        "Subtraction (SCORER's decoder)": 119.7, "RR": 123.8, "SCORER": 126.0, "RR+CBR": 125.5, "SCORER+CBR": 126.8,
    },
    "DIRL+CCR, Table 6 (CLEVR-DC)": {"Transformer": 79.6, "DIRL": 81.8, "CCR": 82.7, "DIRL+CCR": 84.1},
    "DIRL+CCR, Table 7 (CLEVR-DC)": {
        "Transformer": 79.6, "DIRL, non-perturbation": 79.3, "DIRL, discrimination": 79.5, "DIRL": 81.8,
    },
    "RDD+ACR, Table 4 (CLEVR-Change)": {
        "direct-sub": 120.4, "GDE": 125.2, "GDE+N": 124.8, "GDE+V": 127.5, "GDE+V&N": 126.4, "GDE+V+N": 127.6,
        "RDD+ACR": 128.1,
    },
    "RDD+ACR, Table 5 (CLEVR-Change)": {
        "RDD+ACR, no losses": 127.0, "RDD+ACR, L_N2O": 127.2, "RDD+ACR, L_V2A": 127.5, "RDD+ACR": 128.1,
    },
    "CHEERS, Table 4 (CLEVR-Change)": {
        "CHEERS, baseline": 100.1, "CRE": 128.6, "DRE": 127.7, "HRD": 125.3, "GATE": 104.4, "CHEERS": 130.0,
    },
    "IDC, Table 4 (CLEVR-Change)": {
        "IDC, no pre-training": 89.8, "IDC, MLM": 94.9, "IDC, MLM+MVCL": 119.7, "IDC, all three": 128.9,
    },
}  # fmt: skip
# Pairs of a table's rows, the first of which scores higher than the second in the paper.
CLAIMS = {
    "SCORER+CBR, Table 6 (CLEVR-Change)": [
        ("RR", "Subtraction (SCORER's decoder)"), ("SCORER", "RR"), ("RR+CBR", "RR"), ("SCORER+CBR", "SCORER"),
    ],
    "DIRL+CCR, Table 6 (CLEVR-DC)": [
        ("DIRL", "Transformer"), ("CCR", "Transformer"), ("DIRL+CCR", "DIRL"), ("DIRL+CCR", "CCR"),
    ],
    "DIRL+CCR, Table 7 (CLEVR-DC)": [("DIRL", "DIRL, non-perturbation"), ("DIRL", "DIRL, discrimination")],
    "RDD+ACR, Table 4 (CLEVR-Change)": [
        ("GDE", "direct-sub"), ("GDE", "GDE+N"), ("GDE+V", "GDE"), ("RDD+ACR", "GDE"), ("RDD+ACR", "GDE+V&N"),
        ("RDD+ACR", "GDE+V+N"),
    ],
    "RDD+ACR, Table 5 (CLEVR-Change)": [("RDD+ACR", "RDD+ACR, no losses")],
    "CHEERS, Table 4 (CLEVR-Change)": [
        ("CRE", "CHEERS, baseline"), ("DRE", "CHEERS, baseline"), ("HRD", "CHEERS, baseline"), ("CRE", "HRD"),
        ("GATE", "CHEERS, baseline"), ("CHEERS", "HRD"), ("CHEERS", "GATE"),
    ],
    "IDC, Table 4 (CLEVR-Change)": [
        ("IDC, MLM", "IDC, no pre-training"), ("IDC, MLM+MVCL", "IDC, MLM"), ("IDC, all three", "IDC, MLM+MVCL"),
    ],
}  # fmt: skip

# If papers are silent or the released code differs: a row, what it does here, the other choice, and its row.
DEVIATIONS = [
    ("SCORER+CBR", "Eq. 3: the best match in each head", "released: over all channels", "SCORER+CBR, matching tm"),
    ("SCORER+CBR", "the decoder starts Xavier-uniform", "released: N(0, .02)", "SCORER+CBR, N(0, .02)"),
    ("SCORER+CBR", "the paper's reading", "`--reading released`", "SCORER+CBR, released"),
    ("DIRL+CCR", "the paper's reading", "`--reading released`", "DIRL+CCR, released"),
    ("RDD+ACR", "residuals and LayerNorms in Eq. 4 and 6-8", "printed: Eq. 8's residual alone", "RDD+ACR, no residual"),
    ("CHEERS, 2 layers", "the next layer reads LN(x + C~)", "other reading: C~ alone", "CHEERS, 2 layers, C~ alone"),
    ("IDC", "fine-tuning asks for every word", "as in MLM, and released: for 15 %", "IDC, masked words"),
]


def seeds_of(row: str) -> tuple[int, ...]:
    return SEEDS if ROWS[row].startswith(("scorer_cbr.py", "dirl_ccr.py")) else SEEDS[:3]


def folder_of(runs: Path, row: str, seed: int) -> Path:
    name = row.lower().replace("&", "and")  # else GDE+V&N and GDE+V+N would share a folder
    return runs / f"{re.sub(r'[^a-z0-9]+', '-', name).strip('-')}-{seed}"


def machine() -> str:
    """What a run runs on."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = [re.search(rf"^{name}\s*: (.*)", cpuinfo, re.M) for name in ("model name", "cpu family", "model")]
    cpu = "{} (family {}, model {})".format(*(m[1] for m in found)) if all(found) else platform.processor()
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def train(row: str, seed: int, runs: Path, data_dir: str) -> None:
    """One run, in a process of its own with one thread; its output goes into <folder>.txt, with the machine and the
    minutes of each stretch."""
    folder = folder_of(runs, row, seed)
    if (folder / "scores_test.json").exists():
        return
    script, *flags = ROWS[row].split()
    command = [sys.executable, str(HERE.parent / script), *flags, "--seed", str(seed), "--data_dir", data_dir]
    command += ["--out_dir", str(folder), *(["--resume"] if (folder / "last.pt").exists() else [])]
    print(f"{time.strftime('%H:%M')} {row}, seed {seed}", flush=True)
    began = time.perf_counter()
    with open(f"{folder}.txt", "a") as output:
        code = subprocess.run(
            command, stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"}
        ).returncode
        output.write(f"\nmachine: {machine()}\nminutes: {(time.perf_counter() - began) / 60:.2f}\n")
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


def collect(runs: Path) -> tuple[dict[str, dict[str, list[float]]], set[str], set[str]]:
    """-> row -> column -> a value for each seed that has been run; the code of the runs, and their machines."""
    values, codes, machines = {}, set(), set()
    for row in ROWS:
        folders = [folder_of(runs, row, seed) for seed in seeds_of(row)]
        done = [folder for folder in folders if (folder / "scores_test.json").exists()]
        if not done:
            continue
        results = [json.loads((folder / "scores_test.json").read_text()) for folder in done]
        values[row] = {column: [value_of(result, path) for result in results] for column, path in COLUMNS.items()}
        outputs = [Path(f"{folder}.txt").read_text() for folder in done]
        machines.update(*(re.findall(r"^machine: (.*)$", output, re.M) for output in outputs))
        times = [re.findall(r"^minutes: (.*)$", output, re.M) for output in outputs]
        values[row]["minutes"] = [sum(map(float, minutes)) if minutes else None for minutes in times]
        starts = [json.loads((folder / "log.jsonl").read_text().splitlines()[0]) for folder in done]
        codes |= {f"{start['code']}, torch {start['torch']}, {start['device']}" for start in starts}
    return values, codes, machines


def cell(values: list[float | None]) -> str:
    """Mean and, in parentheses, the range (max - min)."""
    if not values or None in values:
        return "-"
    return f"{statistics.fmean(values):.1f}" + (f" ({max(values) - min(values):.1f})" if len(values) > 1 else "")


def table(values: dict, rows: list[str], columns: list[str], commands: bool) -> str:
    """A Markdown table."""
    head = ["row", *(["command"] if commands else []), "seeds", *columns]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in (row for row in rows if row in values):
        name = [row, f"`python {ROWS[row]}`"] if commands else [row]
        cells = [*name, str(len(values[row]["minutes"])), *(cell(values[row][column]) for column in columns)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(values: dict, better: str, worse: str) -> str:
    """Does mini agree that one row scores higher than another, by semantic CIDEr? Three standard errors of the
    difference of means decide, and a difference below 10 is none."""
    a, b = (values.get(row, {}).get("semantic CIDEr", []) for row in (better, worse))
    if min(len(a), len(b)) < 2:
        return "not run"
    gap = statistics.fmean(a) - statistics.fmean(b)
    margin = 3 * math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
    answer = "cannot tell"
    if abs(gap) >= max(margin, 10):
        answer = "confirmed" if gap > 0 else "contradicted"
    elif abs(gap) + margin <= 25:
        answer = "no difference of 25"
    return f"{answer} ({gap:+.0f}, 3 standard errors {margin:.0f})"


def kendall(values: dict, published: dict[str, float]) -> float | None:
    """Rank correlation (tau) of a table's rows between the paper and mini; None if a row has not been run."""
    if not all(values.get(row, {}).get("semantic CIDEr") for row in published):
        return None
    rows = [(figure, statistics.fmean(values[row]["semantic CIDEr"])) for row, figure in published.items()]
    pairs = [*itertools.combinations(rows, 2)]
    agree = sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs)
    return (2 * agree - len(pairs)) / len(pairs)


def write(values: dict, codes: set[str], machines: set[str]) -> None:
    """tests/results.md, and the tables of README.md between their marks."""

    def figure(row: str) -> str:
        return cell(values.get(row, {}).get("semantic CIDEr", []))

    claims = ["| table | claim | published | on mini |", "|---|---|---|---|"]
    for title, published in TABLES.items():
        for better, worse in CLAIMS[title]:
            figures = f"{published[better]} > {published[worse]}"
            claims.append(f"| {title} | {better} > {worse} | {figures} | {verdict(values, better, worse)} |")
    taus = ["| table | rows | Kendall's tau |", "|---|---|---|"]
    for title, published in TABLES.items():
        tau = kendall(values, published)
        taus.append(f"| {title} | {len(published)} | {'not run' if tau is None else f'{tau:+.2f}'} |")
    text = "\n".join([
        "# Results on mini", "",
        "Written by `python tests/results.py`. Test split, 500 changed and 500 distractor pairs. Means over the first "
        f"seeds of {', '.join(map(str, SEEDS))}, with the range (max - min) in parentheses. CIDEr, BLEU-4 and METEOR "
        "are x 100, the rest is in %. Minutes are of training and evaluation on one thread; as many run at a time as "
        "there are cores.",
        "",
        f"Code: {'; '.join(sorted(codes))}. Machine: {'; or '.join(sorted(machines))}.", "",
        table(values, list(ROWS), [*COLUMNS, "minutes"], commands=True), "",
        "## What the papers claim", "",
        "Each claim names its table and the two published CIDEr figures. It is confirmed (or contradicted) if the "
        "means of semantic CIDEr on mini differ by at least three standard errors and by at least 10. If they do not, "
        "and the difference with its three standard errors lies within -25 ... 25, there is no difference of 25.", "",
        *claims, "",
        "DIRL's two losses weigh .03 and .005 in mini's preset, in the paper .5 and .3 on CLEVR-Change and .03 and .05 "
        f"on CLEVR-DC. With .5 and .3 semantic CIDEr is {figure('DIRL+CCR, weights .5 and .3')}, with the preset's "
        f"{figure('DIRL+CCR')}.", "",
        "How well mini keeps the order of each table's rows (1: the same order, -1: the reverse):", "",
        *taus, "",
    ])  # fmt: skip
    (HERE / "results.md").write_text(text)
    effects = ["| method | default | alternative | CIDEr, default | CIDEr, alternative |", "|---|---|---|---|---|"]
    for row, here, otherwise, other in DEVIATIONS:
        effects.append(f"| {' | '.join([row, here, otherwise, figure(row), figure(other)])} |")
    readme = HERE.parent / "README.md"
    results = table(values, IN_README, README_COLUMNS, commands=False)
    tables = {"results": results, "deviations": "\n".join(effects)}
    for name, new in tables.items():
        old = re.compile(f"(<!-- {name}, by tests/results.py -->\n).*?(<!-- end -->\n)", re.S)
        readme.write_text(old.sub(lambda marks: f"{marks[1]}{new}\n{marks[2]}", readme.read_text()))
    print("wrote tests/results.md and README.md")


def draw(runs: Path, seed: int, data_dir: str) -> None:
    """assets/<script>.png of every method that has a run: its first right captions, and its first wrong ones,
    of changed pairs of every kind in turn. assets/samples.png: a pair of every kind from the first method's sheet."""
    sys.path.insert(0, str(HERE.parent))
    import data

    dataset = data.load("mini", data_dir)
    kinds = [pairs for kind, pairs in dataset.examples("test", 500).items() if kind != "no change"]
    in_turn = [pair for pairs in zip(*kinds, strict=False) for pair in pairs]
    for row in IN_README[:5]:
        folder = folder_of(runs, row, seed)
        if not (folder / "captions_test.json").exists():
            continue
        captions = data.read_predictions(folder / "captions_test.json")
        strips: dict = {"right": [], "wrong": []}
        for pair in in_turn:
            kind = list(strips)[not dataset.right(pair, captions[pair.id])]
            if len(strips[kind]) < 2:
                lines = [kind, f"reference: {pair.captions[0]}", f"generated: {captions[pair.id]}"]
                strips[kind].append(data.pair_picture(*dataset.images(pair), {}, lines, right=kind == "right"))
        page = data.tiled([strip for kind in strips.values() for strip in kind], 2, 12)
        page.save(HERE.parent / "assets" / f"{Path(ROWS[row]).stem}.png")
    samples = folder_of(runs, IN_README[0], seed) / "samples.png"  # a column a kind, twelve pairs each
    if not samples.exists():
        return
    sheet = data.Image.open(samples)
    width, height = (sheet.width + 12) // 6, sheet.height // 12
    pairs = [sheet.crop((i * width, 2 * height, (i + 1) * width - 12, 3 * height)) for i in range(6)]
    data.tiled(pairs, 2, 12).save(HERE.parent / "assets" / "samples.png")


def main() -> None:
    """Train what is missing, then write tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/results"), help="where the runs go")
    parser.add_argument("--data_dir", default="data/mini")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    if not args.table:
        subprocess.run([sys.executable, str(HERE.parent / "data.py"), "mini", "--data_dir", args.data_dir], check=True)
        waiting = [(row, seed) for seed in SEEDS for row in args.rows if seed in seeds_of(row)]
        with ThreadPoolExecutor(args.jobs) as pool:
            for done in [pool.submit(train, row, seed, args.runs, args.data_dir) for row, seed in waiting]:
                done.result()
    write(*collect(args.runs))
    draw(args.runs, SEEDS[0], args.data_dir)


if __name__ == "__main__":
    main()
