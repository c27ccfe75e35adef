"""data.py bounds, and what every table of scores says to compare with: floor and ceiling."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import write_release

import data

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def test_cider_of_constant_captions_is_pycocoevalcaps():
    references = [["the car is gone", "the car left", ""], ["the car is red and the car is red"], ["no change"], ["a"]]
    cider = data.cider_against(references)
    for caption in ("the car", "the car is red and the car", "no change", "unseen words", "a", ""):
        score = data.score(dict.fromkeys("0123", caption), dict(zip("0123", references, strict=True)), quick=True)
        expected = pytest.approx(score["scores"]["total"]["CIDEr"], abs=0.01)
        assert 100 * sum(cider(caption, n) for n in range(4)) / 4 == expected


def test_bounds_are_a_naive_searchs(tmp_path, capsys):
    write_release(tmp_path, train=20, val=10, test=10)
    for folder in data.CLEVR_FOLDERS.values():
        shutil.rmtree(tmp_path / folder)  # annotations are enough
    data.main(["bounds", "clevr_change", "--data_dir", str(tmp_path)])
    table, result = capsys.readouterr().out, json.loads((tmp_path / "bounds.json").read_text())
    release = data.read_clevr_change(tmp_path)
    train, val, test = ([p for s in release.scenes[split] for p in s.pairs] for split in data.SPLITS)

    def frequent(ids):
        counts = Counter(c for p in train if p.id in ids for c in p.captions)
        return sorted(sorted(counts), key=lambda c: -counts[c])[:200]

    def cider(pairs, captions):
        return data.score(captions, {p.id: p.captions for p in pairs}, quick=True)["scores"]["total"]["CIDEr"]

    def best(captions, kept, ids):
        return max(captions, key=lambda c: cider(val, kept | dict.fromkeys(ids & {p.id for p in val}, c)))

    everything = {p.id for p in train + val}
    one = best(frequent(everything), {}, everything)
    kept = dict.fromkeys((p.id for p in val), one)
    kinds = {kind: best(frequent(ids), kept, ids) for kind, ids in release.kinds.items()}
    assert result["chosen"] == {"one caption for all": one} | kinds and f"said of drop: {kinds['drop']}" in table
    rows, kind_of = result["scores"], {i: kind for kind, ids in release.kinds.items() for i in ids}
    said = {p.id: kinds[kind_of[p.id]] for p in test}
    assert rows["one caption for all: total"]["CIDEr"] == cider(test, {p.id: one for p in test})
    assert rows["one caption a kind: total"]["CIDEr"] == cider(test, said) > rows["one caption for all: total"]["CIDEr"]
    assert rows["one caption a kind: drop"]["BLEU-1"] > 0 and result["pairs"]["a person"] == 20
    assert rows["a person: only distractor"]["BLEU-1"] < 100 == rows["one caption a kind: only distractor"]["BLEU-1"]
    (tmp_path / "splits.json").write_text('{"train": [0, 1], "val": [], "test": [2]}')
    with pytest.raises(ValueError, match="clevr_change has no val"):
        data.bounds("clevr_change", tmp_path)


def test_bounds_of_birds_need_no_photograph(tmp_path):
    rows = [("img1ImgURL", "img2ImgURL", "split", "description")]
    for n, split in enumerate(("train", "val", "test", "test")):
        rows.append((f"https://x/photos/{n}1/large.jpg", f"https://x/photos/{n}2/large.jpg", split, "Animal1 is red."))
    (tmp_path / "birds-to-words-v1.0.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    data.bounds("birds_to_words", tmp_path, tmp_path / "here.json")
    result = json.loads((tmp_path / "here.json").read_text())
    assert result["pairs"] == {"one caption for all": 2, "one caption a kind": 0, "a person": 0}
    assert result["chosen"] == {"one caption for all": "animal1 is red ."}
    assert result["scores"]["one caption for all: total"]["BLEU-4"] == 100  # words as they are


@pytest.mark.skipif(not SHARED.exists(), reason="the public annotation files are not here")
@pytest.mark.parametrize("name", ["levir_cc", "spot_the_diff", "image_editing_request"])
def test_bounds_of_real_annotations(tmp_path, name):
    one, kinds = {"levir_cc": (110, 134), "spot_the_diff": (14, 0), "image_editing_request": (23, 0)}[name]
    data.bounds(name, SHARED / name, tmp_path / "bounds.json")
    rows = json.loads((tmp_path / "bounds.json").read_text())["scores"]
    assert rows["one caption for all: total"]["CIDEr"] == pytest.approx(one, abs=4)
    assert not kinds or rows["one caption a kind: total"]["CIDEr"] == pytest.approx(kinds, abs=4)


def test_every_table_has_the_row_of_one_caption_and_counts_captions(prepared, tmp_path, capsys):
    dataset = data.load("clevr_change", prepared)
    captions = {p.id: "the gray cube turned red" if "_n" in p.id else p.captions[0] for p in dataset.pairs("test")}
    maps = {i: {"attention": torch.eye(2)} for i in captions}
    total, out = dataset.results("test", captions, maps, tmp_path), capsys.readouterr().out
    scores = json.loads((tmp_path / "scores_test.json").read_text())
    alone = dataset.score("test", dict.fromkeys(captions, dataset.one_caption))["scores"]["total"]
    rows = scores["scores"]
    assert [*rows][:2] == ["total", "one caption for all"] and rows["one caption for all"] == alone
    assert f"one caption for all: {dataset.one_caption}" in out and rows["total"] == total
    dataset.scenes["val"] = []
    assert data.constant_captions(dataset, {}, 50) == {"one caption for all": "nothing changed"}  # the most frequent
    different = len({*captions.values()})
    assert scores["captions"] == {"all": 10, "different": different, "verbatim": 50} and different > 1
    assert f"{different} different captions for 10 pairs; 50.0 % are a reference of their pair word for word" in out


def test_a_kind_is_not_called_as_another_row(tmp_path):
    rows = [{"before": "a", "after": "b", "captions": ["it left"], "split": "train", "kind": "total"}]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match='a kind of change cannot be called "total"'):
        data.read_release("pairs", tmp_path)
