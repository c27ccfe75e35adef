"""Tests of bounds.py: floor and ceiling of a data set."""

import json
import shutil
from pathlib import Path

import bounds
import pytest
from bounds import HUMAN, ONE_CAPTION, ONE_PER_KIND
from conftest import write_release

import data
from scores import score

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def test_bounds_are_a_naive_searchs(tmp_path):
    write_release(tmp_path, train=20, val=10, test=10)
    release = data.read_clevr_change(tmp_path)
    pairs = {}
    for split, scenes in release.scenes.items():
        pairs[split] = [pair for scene in scenes for pair in scene.pairs]
    for folder in data.CLEVR_FOLDERS.values():
        shutil.rmtree(tmp_path / folder)  # the script needs annotations only
    result = bounds.bounds("clevr_change", tmp_path)

    def cider(split, captions):
        references = {pair.id: pair.captions for pair in pairs[split]}
        return score(captions, references, quick=True)["total"]["CIDEr"]

    def best(ids, others):  # for the pairs in ids, if the other pairs get the captions in `others`
        candidates = sorted({c for p in pairs["train"] if p.id in ids for c in p.captions})
        of_val = [p.id for p in pairs["val"] if p.id in ids]
        return max(candidates, key=lambda c: cider("val", others | dict.fromkeys(of_val, c)))

    one = best({p.id for p in pairs["train"] + pairs["val"]}, {})
    others = {p.id: one for p in pairs["val"]}
    per_kind = {kind: best(ids, others) for kind, ids in release.kinds.items()}
    assert result["chosen"] == {ONE_CAPTION: one} | per_kind
    given = {}
    for kind, ids in release.kinds.items():
        given |= {p.id: per_kind[kind] for p in pairs["test"] if p.id in ids}
    scores = result["scores"]
    floor = scores[f"{ONE_CAPTION}: total"]["CIDEr"]
    assert floor == cider("test", {p.id: one for p in pairs["test"]})
    assert scores[f"{ONE_PER_KIND}: total"]["CIDEr"] == cider("test", given) > floor
    assert scores[f"{HUMAN}: only distractor"]["BLEU-1"] < 100
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
