"""Preparation, and feature files."""

import os
import re
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from helpers import GRID, MeanColor, timm_weights, write_own_pairs
from PIL import Image

import data
import scorer_cbr
from common import InputError, RunConfig
from support.extractors import read_image
from support.features import Features, authors_features, write_features
from support.releases import read_clevr_change

# ---- preparation ---------------------------------------------------------------------------------


def test_features_of_the_pictures(release, monkeypatch):
    """Each extractor has a file of its own."""
    monkeypatch.setattr("data.Extractor", MeanColor)
    call = ["clevr_change", "--data_dir", str(release), "--device", "cpu"]
    data.main(call)
    data.main([*call, "--extractor", "resnet101-layer4"])
    files = {path.name for path in release.glob("features*")}
    assert files == {"features.h5", "features-resnet101-layer4.h5"}
    for extractor, channels in (("", 3), ("resnet101-layer4", 4)):
        dataset = data.load("clevr_change", release, RunConfig(extractor=extractor))
        names = list(dataset.paths)
        for name, x in zip(names, dataset.features.rows(names), strict=True):
            mean = np.array(read_image(dataset.paths[name])).mean()
            assert x.shape == (channels, 2, 3)
            assert x.mean().item() == pytest.approx(mean, rel=1e-3)


def test_the_authors_features(release):
    """They take the place of the extractor's. Nothing in a file is executed."""
    for name, picture in read_clevr_change(release).paths.items():
        file = authors_features(picture)
        file.parent.mkdir(exist_ok=True)
        np.save(file, np.full(GRID, float(name[-5]), np.float32))  # its scene's last digit
    right = np.load(file)
    np.save(file, np.array([{}], dtype=object))
    with pytest.raises(InputError, match=file.name):
        data.prepare("clevr_change", release, "cpu")
    assert not list(release.glob("features.h5*"))
    np.save(file, right)
    data.prepare("clevr_change", release, "cpu")
    dataset = data.load("clevr_change", release)
    assert dataset.grid == GRID
    assert (dataset.features.rows(["CLEVR_semantic_000002.png"]) == 2).all()


def test_a_replaced_picture_is_noticed(prepared):
    """A copy of the same picture, which may have another time, is as good."""
    picture = prepared / "sc_images" / "CLEVR_semantic_000004.png"
    content = picture.read_bytes()
    data.load("clevr_change", prepared)
    other_pixels = bytearray(content)
    other_pixels[-30] ^= 1
    picture.write_bytes(other_pixels)
    with pytest.raises(InputError, match="features.h5.*delete features.h5 and run: python data.py"):
        data.load("clevr_change", prepared)
    picture.write_bytes(content)  # with another time
    data.load("clevr_change", prepared)
    picture.unlink()  # features may come without pictures
    data.load("clevr_change", prepared)


def test_preparation_counts_and_notes_what_one_looks_for_first(tmp_path, monkeypatch, capsys):
    """Pairs of each split and kind; words and captions that a model does not see; copies."""
    long = " ".join(["word"] * 61)
    rows = [f"a,b,gone,train,it is gone|{long}", "e,f,gone,val,gone"]
    rows.append("c,d,no change,train,Nothing.|all as before|nothing .|gone")
    (tmp_path / "pairs.csv").write_text("\n".join(["before,after,kind,split,captions", *rows]))
    for n, name in enumerate("abcdef"):
        Image.new("RGB", (8, 8), (n, n, n)).save(tmp_path / name, "PNG")
    (tmp_path / "e").write_bytes((tmp_path / "b").read_bytes())
    monkeypatch.setattr("data.Extractor", MeanColor)
    data.prepare("pairs", tmp_path, "cpu")
    out = capsys.readouterr().out
    for line in (
        "train: 2 pairs, 1 gone, 1 no change",
        "val: 1 pairs, 1 gone, 0 no change",
        "test: 0 pairs, 0 gone, 0 no change",
        "1 training captions are cut to 60 words",
        "1 of 1 val pairs share a picture",
        "3 different captions",
        "2 nothing .\n",
        "1 gone\n",
    ):
        assert line in out
    capsys.readouterr()
    data.load("pairs", tmp_path)
    assert "1 of 1 val pairs share a picture" in capsys.readouterr().out


def test_a_timm_backbone_through_preparation_training_and_captioning(tmp_path, tiny, capsys):
    write_own_pairs(tmp_path)
    timm_weights(tmp_path / "w.pt")
    extractor = f"timm/test_resnet:{tmp_path / 'w.pt'}"
    flags = ["--data_dir", str(tmp_path), "--extractor", extractor]
    data.main(["pairs", *flags, "--device", "cpu"])
    run = str(tmp_path / "run")
    scorer_cbr.main([*tiny, "--dataset", "pairs", *flags, "--out_dir", run, "--steps", "1"])
    pictures = [str(tmp_path / "train.png"), str(tmp_path / "b.png")]
    caption_with = ["--caption", *pictures, "--checkpoint", f"{run}/best.pt", "--device", "cpu"]
    capsys.readouterr()
    scorer_cbr.main(caption_with)
    assert capsys.readouterr().out.count("\n") == 1
    moved = (tmp_path / "w.pt").rename(tmp_path / "moved.pt")
    with pytest.raises(InputError, match=r"w.pt.*--extractor"):
        scorer_cbr.main(caption_with)
    scorer_cbr.main([*caption_with, "--extractor", f"timm/test_resnet:{moved}"])
    caption, _ = scorer_cbr.load(f"{run}/best.pt", "cpu", f"timm/test_resnet:{moved}")(*pictures)
    assert capsys.readouterr().out == f"{caption}\n"
    for other in ("timm/test_resnet", "resnet101-layer3"):
        with pytest.raises(InputError, match=r"best.pt"):
            scorer_cbr.main([*caption_with, "--extractor", other])
    timm_weights(tmp_path / "w.pt", seed=1)
    with pytest.raises(InputError, match=r"w.pt.*best.pt"):  # other weights of the same name
        scorer_cbr.main(caption_with)
    with pytest.raises(FileNotFoundError):
        data.load("pairs", tmp_path, RunConfig(extractor=extractor))


# ---- feature files -------------------------------------------------------------------------------


def write(path, blocks):
    """A feature file of the images "a" to "e"."""
    files = dict.fromkeys("abcde", Path(__file__))  # that they are said to be made from
    write_features(path, files, blocks, "resnet101-layer3", "how")


FEATURES = np.random.default_rng(0).random((5, *GRID)).astype(np.float32)


def test_feature_file_round_trip(tmp_path, monkeypatch):
    write(tmp_path / "f.h5", [FEATURES[:2], FEATURES[2:]])
    read = Features(tmp_path / "f.h5", "make it", "resnet101-layer3")
    expected = torch.from_numpy(FEATURES[[3, 0, 3]]).half()
    torch.testing.assert_close(read.rows(["d", "a", "d"]), expected)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)  # as on macOS and Windows
    torch.testing.assert_close(read.rows(["d", "a", "d"]), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the file would fill the disk")
def test_a_feature_file_may_be_larger_than_memory(tmp_path):
    """As that of CLEVR-Change, 48 GB, often is. Nothing is written but the last row."""
    memory = Path("/proc/meminfo").read_text()
    kilobytes = re.findall(r"^(?:MemTotal|SwapTotal): +(\d+)", memory, re.MULTILINE)
    grid = (2**12, 32, 32)  # 8 MiB
    count = sum(map(int, kilobytes)) * 1024 * 5 // 4 // 2**23
    names = [str(n) for n in range(count)]
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as f:
        f.attrs.update(extractor="resnet101-layer3", preprocessing="how")
        f["image_ids"] = names
        f["stamps"] = np.zeros((count, 3), np.int64)
        f.create_dataset("features", (count, *grid), "float16", fill_time="never")[-1] = 2
    assert path.stat().st_blocks * 512 < 100e6
    features = Features(path, "make it", "resnet101-layer3")
    assert (features.rows(names[-1:]) == 2).all()


@pytest.mark.parametrize("factor", [1e6, np.nan])
def test_features_that_float16_cannot_hold_are_named(factor, tmp_path):
    with pytest.raises(InputError, match="'b'"):
        write(tmp_path / "f.h5", [FEATURES[:1], FEATURES[1:] * factor])
    assert not list(tmp_path.iterdir())  # never half a file
