"""Floor and ceiling of a data set's scores, from its annotations alone. Not a test.

  python tools/bounds.py levir_cc --data_dir D     ten minutes; prints, for the test split:

one caption for all                  the best frequent training caption, given to every pair
one caption per kind of change       the best one for each kind, given to that kind's pairs
human (one reference held out)       a random reference of each pair, scored against the others
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data
import scores
from support import report
from support.files import run_main
from support.releases import DATASETS, read_release, vocab_of

CANDIDATES = 200  # the best caption is sought among this many of the most frequent


def best_caption(dataset: data.Dataset, ids: set[str]) -> str:
    """Of the most frequent training captions of the pairs in `ids`, the one with the highest CIDEr
    on their validation pairs. CIDEr is a mean over pairs, so it does not matter what the others
    get; they count for the document frequencies."""
    train = dataset.pairs("train")
    counts = Counter(text for pair in train if pair.id in ids for text in pair.captions)
    ranked = sorted(counts, key=lambda text: (-counts[text], text))
    pairs = dataset.pairs("val")
    references = {pair.id: pair.captions for pair in pairs}
    ciders = {}
    for text in ranked[:CANDIDATES]:
        caption = report.scored_text(dataset, text)
        given = {pair.id: caption if pair.id in ids else "" for pair in pairs}
        of_val = report.protocol_scores(dataset, given, references, quick=True)
        ciders[text] = of_val["total"]["CIDEr"]
    return max(ciders, key=ciders.get, default="")


def bounds(dataset: data.Dataset) -> dict[str, tuple[dict, dict]]:
    """{bound: (captions by pair id, the references to score them against)}."""
    references = {pair.id: pair.captions for pair in dataset.pairs("test")}
    everything = {pair.id for split in ("train", "val") for pair in dataset.pairs(split)}
    caption = best_caption(dataset, everything)
    print(f"chosen for all: {caption}")
    one = dict.fromkeys(references, caption)
    per_kind = {}
    for kind, ids in dataset.kinds.items():
        caption = best_caption(dataset, ids)
        print(f"chosen for {kind!r}: {caption}")
        per_kind |= dict.fromkeys(references.keys() & ids, caption)
    rng = np.random.default_rng(0)
    human = {}
    others = {}
    for i, captions in references.items():
        if len(captions) > 1:
            held_out = int(rng.integers(len(captions)))
            human[i] = captions[held_out]
            others[i] = captions[:held_out] + captions[held_out + 1 :]
    return {
        "one caption for all": (one, references),
        "one caption per kind of change": (per_kind, references),
        "human (one reference held out)": (human, others),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=DATASETS)
    parser.add_argument("--data_dir", type=Path, help="folder of the release (default: data/NAME)")
    args = parser.parse_args()
    root = args.data_dir or Path("data", args.name)
    # Only of Birds-to-Words, whose pairs are left out without them, are the pictures needed.
    release = read_release(args.name, root)
    vocab = vocab_of(args.name, release)
    no_features = SimpleNamespace(data=np.empty((0, 0, 0, 0)), require=lambda paths: None)
    dataset = data.Dataset(args.name, root, release, vocab, no_features)
    groups = report.groups_of(dataset, "test")
    table = {}
    for bound, (captions, references) in bounds(dataset).items():
        if captions:
            texts = {i: report.scored_text(dataset, text) for i, text in captions.items()}
            of_groups = report.protocol_scores(dataset, texts, references, groups)
            for group, row in of_groups.items():
                table[f"{bound}: {group}"] = row
    print(scores.format_scores(table))


if __name__ == "__main__":
    run_main(main)
