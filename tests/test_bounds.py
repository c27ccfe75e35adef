"""Tests of bounds.py: floor and ceiling of a data set, and the script's own CIDEr."""

import json
import shutil
from collections import Counter
from pathlib import Path

import bounds
import pytest
from conftest import write_release

import data

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
ONE_CAPTION = "one caption for all"
ONE_PER_KIND = "one caption per kind of change"
HUMAN = "human (one reference held out)"


def test_cider_is_pycocoevalcaps():
    references = [
        ["the car is gone", "the car left", ""],
        ["the car is red and the car is red"],
        ["no change"],
        ["a"],
    ]
    captions = ["the car", "the car is red and the car", "no change", "unseen words", "a", ""]
    cider = bounds.Cider(references)
    for caption in captions:
        predictions = dict.fromkeys("0123", caption)
        scores = data.score(predictions, dict(zip("0123", references, strict=True)), quick=True)
        expected = scores["total"]["CIDEr"]
        mean = sum(cider(caption, n) for n in range(4)) / 4
        assert 100 * mean == pytest.approx(expected, abs=0.01)


def pairs_of(release, split):
    return [pair for scene in release.scenes[split] for pair in scene.pairs]


def total_cider(pairs, captions):
    """pycocoevalcap's CIDEr of captions by pair id."""
    scores = data.score(captions, {p.id: p.captions for p in pairs}, quick=True)
    return scores["total"]["CIDEr"]


def best_caption(train, val, others, ids):
    """The best caption for the pairs in ids, if the other pairs get the captions in `others`."""
    counts = Counter(c for p in train if p.id in ids for c in p.captions)
    candidates = sorted(sorted(counts), key=lambda c: -counts[c])[:200]
    of_val = [p.id for p in val if p.id in ids]

    def cider(caption):
        return total_cider(val, others | dict.fromkeys(of_val, caption))

    return max(candidates, key=cider)


def test_bounds_are_a_naive_searchs(tmp_path, capsys):
    write_release(tmp_path, train=20, val=10, test=10)
    release = data.read_clevr_change(tmp_path)
    for folder in data.CLEVR_FOLDERS.values():
        shutil.rmtree(tmp_path / folder)  # the script needs annotations only
    out = tmp_path / "bounds.json"
    bounds.main(["clevr_change", "--data_dir", str(tmp_path), "--out", str(out)])
    table = capsys.readouterr().out
    result = json.loads(out.read_text())["clevr_change"]

    train = pairs_of(release, "train")
    val = pairs_of(release, "val")
    test = pairs_of(release, "test")
    everything = {p.id for p in train + val}
    one = best_caption(train, val, {}, everything)
    others = dict.fromkeys((p.id for p in val), one)
    per_kind = {}
    said = {}
    for kind, ids in release.kinds.items():
        per_kind[kind] = best_caption(train, val, others, ids)
        for pair in test:
            if pair.id in ids:
                said[pair.id] = per_kind[kind]
    assert result["chosen"] == {ONE_CAPTION: one} | per_kind
    assert f"chosen, drop: {per_kind['drop']}" in table

    rows = result["scores"]
    floor = rows[f"{ONE_CAPTION}: total"]["CIDEr"]
    assert floor == total_cider(test, {p.id: one for p in test})
    assert rows[f"{ONE_PER_KIND}: total"]["CIDEr"] == total_cider(test, said) > floor
    assert rows[f"{ONE_PER_KIND}: drop"]["BLEU-1"] > 0
    assert rows[f"{ONE_PER_KIND}: only distractor"]["BLEU-1"] == 100
    assert rows[f"{HUMAN}: only distractor"]["BLEU-1"] < 100
    assert result["pairs"][HUMAN] == 20


@pytest.mark.skipif(not SHARED.exists(), reason="the public annotation files are not here")
def test_committed_bounds_are_those_of_the_real_annotations():
    name = "image_editing_request"
    committed = json.loads(Path(bounds.__file__).with_name("bounds.json").read_text())[name]
    result = bounds.bounds(name, SHARED / name)
    assert result["chosen"] == committed["chosen"]
    assert result["pairs"] == committed["pairs"]
    for row, values in committed["scores"].items():
        # Without Java the words are a little different.
        assert result["scores"][row]["CIDEr"] == pytest.approx(values["CIDEr"], abs=4)
