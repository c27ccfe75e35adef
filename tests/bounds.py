"""Floor and ceiling of a data set's scores, from its annotations alone. Not a test.

    python tests/bounds.py levir_cc --data_dir D [--out FILE]

Scores on the test split, by the data set's own protocol:
  one caption for all                  the best training caption, given to every pair
  one caption per kind of change       the best one for each kind, given to that kind's pairs
  human (one reference held out)       a random reference of each pair, scored against the others
Prints the scores, and writes them as the data set's entry into a JSON file (default:
tests/bounds.json, which is committed).
"""

import argparse
import functools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import data
import scores
from common import run_main, write_text

ONE_CAPTION = "one caption for all"
ONE_PER_KIND = "one caption per kind of change"
HUMAN = "human (one reference held out)"
CANDIDATES = 200  # the best caption is sought among this many of the most frequent


def ngrams(text: str) -> Counter:
    """Counts of all runs of one to four words in a text."""
    words = text.split()
    counts = Counter()
    for n in range(1, 5):
        for start in range(len(words) - n + 1):
            counts[tuple(words[start : start + n])] += 1
    return counts


def cider_of(references: list[list[str]]) -> Callable[[str, int], float]:
    """-> a function of a caption and the number of a pair: CIDEr (not x 100) against this pair's
    references. Document frequencies are counted over all pairs.

    The values equal pycocoevalcap's, but two texts are compared only once here, because many pairs
    have the same references."""
    frequency = Counter()  # n-gram -> number of pairs whose references contain it
    for texts in references:
        frequency.update(set().union(*map(ngrams, texts)))

    @functools.cache
    def vector(text):
        """tf-idf of every n-gram, and their norm for each n."""
        weights = {}
        for gram, count in ngrams(text).items():
            weights[gram] = count * math.log(len(references) / max(1, frequency[gram]))
        norms = []
        for n in range(1, 5):
            norms.append(math.hypot(*(x for gram, x in weights.items() if len(gram) == n)))
        return weights, norms

    @functools.cache
    def similarity(caption, reference):
        """Mean cosine over n = 1 ... 4, times 10, reduced if the texts differ in length."""
        x, x_norms = vector(caption)
        y, y_norms = vector(reference)
        cosines = 0.0
        for gram in x.keys() & y.keys():
            norms = x_norms[len(gram) - 1] * y_norms[len(gram) - 1]
            if norms:
                cosines += min(x[gram], y[gram]) * y[gram] / norms
        gap = caption.count(" ") - reference.count(" ")
        return 10 * cosines / 4 * math.exp(-(gap**2) / 72)

    def cider(caption, pair):
        texts = references[pair]
        return sum(similarity(caption, text) for text in texts) / len(texts)

    return cider


def best_captions(dataset: data.Dataset, kinds: dict[str, set[str]]) -> dict[str, str]:
    """The best single caption for all pairs, and for the pairs of each kind.

    Each is chosen among the most frequent training captions of these pairs (ties in alphabetical
    order), by CIDEr on their validation pairs. CIDEr is a mean over pairs, so the best caption for
    one kind does not depend on those given to the others.
    """
    train = dataset.pairs("train")
    val = dataset.pairs("val")
    kinds = {ONE_CAPTION: {p.id for p in train + val}} | kinds
    candidates = {}
    for kind, ids in kinds.items():
        counts = Counter(c for p in train if p.id in ids for c in p.captions)
        ranked = sorted(counts, key=lambda caption: (-counts[caption], caption))
        candidates[kind] = ranked[:CANDIDATES]

    texts = sorted(set().union(*candidates.values(), *(p.captions for p in val)))
    as_read = [scores.scored_text(dataset, text) for text in texts]
    tokens = data.DATASETS[dataset.name].tokens
    scored = scores.scored_words(as_read, tokens, dataset.vocab.index, quick=False)
    words = dict(zip(texts, scored, strict=True))
    cider = cider_of([[words[c] for c in pair.captions] for pair in val])

    best = {}
    for kind, captions in candidates.items():
        numbers = [n for n, p in enumerate(val) if p.id in kinds[kind]]
        sums = {c: sum(cider(words[c], n) for n in numbers) for c in captions}
        best[kind] = max(sums, key=sums.get, default="")
    return best


def bounds(name: str, root: Path) -> dict:
    """Floor and ceiling of a data set in the folder root. Only of Birds-to-Words, whose pairs are
    left out without them, are the pictures needed."""
    release = data.read_release(name, root)
    dataset = data.Dataset(name, root, release, data.vocab_of(name, release))
    chosen = best_captions(dataset, release.kinds)

    references = {p.id: p.captions for p in dataset.pairs("test")}
    per_kind = {}
    for kind, ids in release.kinds.items():
        per_kind |= dict.fromkeys(references.keys() & ids, chosen[kind])
    rng = np.random.default_rng(0)
    human = {}
    others = {}
    for i, captions in references.items():
        if len(captions) > 1:
            held_out = int(rng.integers(len(captions)))
            human[i] = captions[held_out]
            others[i] = captions[:held_out] + captions[held_out + 1 :]
    captions_and_references = {
        ONE_CAPTION: (dict.fromkeys(references, chosen[ONE_CAPTION]), references),
        ONE_PER_KIND: (per_kind, references),
        HUMAN: (human, others),
    }
    groups = scores.groups_of(dataset, "test")
    result = {"scores": {}, "pairs": {}, "chosen": chosen}
    for bound, (captions, against) in captions_and_references.items():
        result["pairs"][bound] = len(captions)
        if captions:
            texts = {i: scores.scored_text(dataset, text) for i, text in captions.items()}
            table = scores.protocol_scores(dataset, texts, against, groups)
            for group, row in table.items():
                result["scores"][f"{bound}: {group}"] = row
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=data.DATASETS)
    parser.add_argument("--data_dir", type=Path, help="folder of the release (default: data/NAME)")
    text = "JSON file to add the entry to"
    parser.add_argument("--out", type=Path, default=HERE / "bounds.json", help=text)
    args = parser.parse_args(argv)
    result = bounds(args.name, args.data_dir or Path("data", args.name))
    print(scores.format_scores(result["scores"]))
    for kind, caption in result["chosen"].items():
        print(f"chosen, {kind}: {caption}")
    print(f"pairs: {result['pairs']}; for a human, those with several references")
    entries = json.loads(args.out.read_text()) if args.out.exists() else {}
    entries[args.name] = result  # those of other data sets stay
    write_text(args.out, json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
