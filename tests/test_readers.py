"""A small release in every layout, read; the real annotation files, counted."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import GRID, write_features, write_picture

import data

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
real = pytest.mark.skipif(not SHARED.exists(), reason="the public annotation files are not here")


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def sizes(release):
    return {split: len(scenes) for split, scenes in release.scenes.items()}


def pairs(release, split):
    return [p for scene in release.scenes[split] for p in scene.pairs]


# ---- CLEVR-DC --------------------------------------------------------------------------------------------------------


def write_clevr_dc(root):
    """Twelve pairs as released: 2 a kind of change, 8 for training, 2 each for validation and test."""
    for i in range(12):
        for folder in ("bef", "aft"):
            write_picture(root / folder / f"{i}.png")
    color = ("red", "blue", "green", "gray")
    write(root / "captions.json", {str(i): [f"the {color[i % 4]} cube moved", f"a {color[i % 4]} cube, it moved."]
                                   for i in range(12)})  # fmt: skip
    write(root / "split.json", {"train": list(range(8)), "val": [8, 9], "test": [10, 11]})


def test_clevr_dc_as_released_and_as_repacked(tmp_path):
    write_clevr_dc(tmp_path)
    release = data.read_clevr_dc(tmp_path)
    assert sizes(release) == {"train": 8, "val": 2, "test": 2} and release.scenes["val"][0].swapped is None
    assert pairs(release, "test")[0] == data.Pair(
        "000010.png", "bef/10.png", "aft/10.png", ["the green cube moved", "a green cube, it moved."]
    )
    assert all(path.exists() for path in release.paths.values()) and len(release.paths) == 24
    assert release.kinds["no change"] == {"000010.png", "000011.png"} and release.kinds["add"] == {"000004.png", "000005.png"}
    for i in range(12):  # as DIRL's authors pad and rename
        for old, new in (("bef", "images"), ("aft", "sc_images")):
            (tmp_path / new).mkdir(exist_ok=True)
            (tmp_path / old / f"{i}.png").rename(tmp_path / new / f"{i:06d}.png")
    (tmp_path / "bef").rmdir()
    captions = json.loads((tmp_path / "captions.json").read_text())
    write(tmp_path / "change_captions.json", {f"{int(i):06d}.png": c for i, c in captions.items()})
    (tmp_path / "captions.json").unlink()
    (tmp_path / "split.json").rename(tmp_path / "splits.json")
    again = data.read_clevr_dc(tmp_path)
    assert pairs(again, "test")[1].before == "images/000011.png" and all(path.exists() for path in again.paths.values())
    assert [p.captions for p in pairs(again, "train")] == [p.captions for p in pairs(release, "train")]
    write(tmp_path / "splits.json", {"train": [0, 3], "val": [5], "test": [11]})  # a part: nobody knows the kinds
    assert data.read_clevr_dc(tmp_path).kinds == {}
    write(tmp_path / "splits.json", {"train": [0, 12], "val": [5], "test": [11]})
    with pytest.raises(ValueError, match=r"change_captions.json: no captions for 12"):
        data.read_clevr_dc(tmp_path)


@real
def test_real_clevr_dc_split(tmp_path):
    splits = json.loads((SHARED / "clevr_dc/split.json").read_text())
    write(tmp_path / "split.json", splits)
    write(tmp_path / "captions.json", {str(i): ["a caption"] for ids in splits.values() for i in ids})
    release = data.read_clevr_dc(tmp_path)
    assert sizes(release) == data.DATASETS["clevr_dc"].scenes and not release.notes
    test = {p.id for p in pairs(release, "test")}
    assert all(len(ids & test) == 800 for ids in release.kinds.values())


def test_a_data_set_of_one_pair_a_scene_makes_batches(tmp_path):
    write_clevr_dc(tmp_path)
    write_features("clevr_dc", tmp_path)
    dataset = data.load("clevr_dc", tmp_path)
    assert dataset.grid == GRID and dataset.lengths == [2 + 6] and dataset.steps(3) == 3
    epoch = [streams for streams in dataset.train_batches(3, seed=0, epoch=0)]
    assert [len(streams) for streams in epoch] == [1, 1, 1] and not epoch[0][0].single
    assert sorted(i for (batch,) in epoch for i in batch.ids) == [f"{i:06d}.png" for i in range(8)]
    drawn = {text for e in range(6) for (batch,) in dataset.train_batches(3, 0, e) for text in batch.texts}
    assert drawn == {c for p in dataset.pairs("train") for c in p.captions}  # every caption has its turn
    assert [p.id for p in dataset.pairs("test")] == ["000010.png", "000011.png"]
    assert set(dataset.examples("test", 5)) == {"no change"} and dataset.groups("test") == dataset.kinds
    assert np.array_equal(next(dataset.eval_batches("val", 2)).after[1], dataset.features.rows(["aft/9.png"])[0])
