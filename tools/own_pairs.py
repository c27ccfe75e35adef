"""Makes a folder of own pairs from scenes of mini: what do a few hundred pairs give? Not a test.

    python tools/own_pairs.py data/mini 300 data/few    # of a mini that is drawn
    python data.py pairs --data_dir data/few --extractor mini-cnn

The folder gets the changed pair of each scene and, of every second scene, the unchanged pair, with
two captions each: of 300 scenes for training, a fifth as many for validation, and 500 for test.
docs/own_pictures.md has what the five methods made of it.
"""

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.files import run_main
from support.releases import read_release


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mini", type=Path, help="folder of a drawn mini")
    parser.add_argument("scenes", type=int, help="number of training scenes")
    parser.add_argument("folder", type=Path, help="new folder for the pairs")
    args = parser.parse_args()
    release = read_release("mini", args.mini)
    kind_of = {}
    for kind, ids in release.kinds.items():
        kind_of |= dict.fromkeys(ids, kind)
    args.folder.mkdir(parents=True)
    rows = [["before", "after", "kind", "split", "captions"]]
    pictures = set()
    for split, count in {"train": args.scenes, "val": args.scenes // 5, "test": 500}.items():
        for number, scene in enumerate(release.scenes[split][:count]):
            changed, unchanged = scene.pairs
            pairs = [changed, unchanged] if number % 2 else [changed]
            for pair in pairs:
                captions = "|".join(pair.captions[:2])
                rows.append([pair.before, pair.after, kind_of[pair.id], split, captions])
                pictures |= {pair.before, pair.after}
    for name in pictures:
        (args.folder / name).symlink_to(release.paths[name].resolve())
    with open(args.folder / "pairs.csv", "w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows(rows)


if __name__ == "__main__":
    run_main(main)
