"""Makes the weights and pictures in assets/ from a finished run of scorer_cbr.py on mini.

    python tools/assets.py runs/scorer_cbr-mini [--data_dir data/mini]

Then copy the run's curves.png by hand, and draw attention.png by README's first command.
"""

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data
import scorer_cbr
from support.files import load_tensors, run_main, save_tensors
from support.mini.sentences import judge, truth_of
from support.pictures import sample_sheet

ASSETS = Path(__file__).resolve().parents[1] / "assets"


def write_assets(run: Path, data_dir: str) -> None:
    """Writes the run's weights in float16, a sheet with the first test pair of each kind of change,
    and the pictures of the first of these that it captions correctly."""
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
        verdicts = judge(pair.id, captions[pair.id], truth_of(pair.id, dataset.root))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--data_dir", default="data/mini")
    args = parser.parse_args()
    write_assets(args.run, args.data_dir)


if __name__ == "__main__":
    run_main(main)
