"""Whatever is wrong with the input, it is one line on stderr and exit code 2."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from functools import partial

import h5py
import numpy as np
import pytest
import torch
from conftest import GRID, write_features, write_picture, write_release
from test_readers import (
    item,
    levir_image,
    write,
    write_birds,
    write_clevr_dc,
    write_cub,
    write_nabirds,
    write_spot,
)

import cheers
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
from common import run_main


@pytest.fixture
def refused(capsys):
    def of(main, *argv):
        """The one line with which a script's main refuses a command."""
        capsys.readouterr()
        with pytest.raises(SystemExit) as e:
            run_main(lambda: main([str(a) for a in argv]))
        lines = capsys.readouterr().err.strip().splitlines()
        assert e.value.code == 2 and len(lines) == 1, lines
        return lines[0]

    return of


@pytest.fixture
def prepare(refused):
    return lambda root, name="clevr_change", *more: refused(
        data.main, name, "--data_dir", root, *more
    )


@pytest.fixture
def train(refused, tiny, tmp_path):
    return lambda root, *more: refused(
        scorer_cbr.main, *tiny, "--data_dir", root, "--out_dir", tmp_path / "run", *more
    )


def problems(capsys, name, root, *more):
    """What --check has to say."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        run_main(lambda: data.main([name, "--data_dir", str(root), "--check", *more]))
    assert e.value.code == 2
    return capsys.readouterr().err


def write_edits(root):
    for split, uid in (("train", "A"), ("valid", "B"), ("test", "C")):
        write(
            root / f"{split}.json",
            [item(uid, f"{uid}.jpg", f"{uid}2.png", "zoom in", "crop it in")],
        )
        for name in (f"{uid}.jpg", f"{uid}2.png"):
            write_picture(root / "images" / name)


def write_levir(root):
    images = [
        levir_image(split, 1, "a lake by a lake", "no change", changeflag=1)
        for split in data.SPLITS
    ]
    write(root / "LevirCCcaptions.json", {"images": images})
    for split in data.SPLITS:
        for folder in "AB":
            write_picture(root / "images" / split / folder / f"{split}_000001.png")


def write_own(root):
    row = {"after": "b.png", "captions": ["it is open"]}
    write(
        root / "pairs.json",
        [row | {"before": f"{split}.png", "split": split} for split in data.SPLITS],
    )
    for name in (*data.SPLITS, "b"):
        write_picture(root / f"{name}.png")


WRITERS = {
    "clevr_change": write_release,
    "clevr_dc": write_clevr_dc,
    "spot_the_diff": write_spot,
    "levir_cc": write_levir,
    "image_editing_request": write_edits,
    "birds_to_words": write_birds,
    "cub": write_cub,
    "nabirds": write_nabirds,
    "pairs": write_own,
}


# ---- flags ---------------------------------------------------------------------------------------


SCORER_FLAGS = """batch_size=0 batch_size=-1 eval_batch=0 log_every=0 eval_every=0 steps=0 scenes=0
    dim=0 dim=-1 word_dim=0 heads=0 heads=-1 heads=7 layers=-1 decoder_layers=0 lr_drop=-1 warmup=-1
    seed=-1 steps=x lr=y matching=z device=meta device=gpu"""
IDC_FLAGS = "ffn=0 layers=0 pretrain_batch=0 pretrain_steps=-1 mlm=-1 patience=-1"


@pytest.mark.parametrize(
    "method, flags",
    [
        (scorer_cbr, SCORER_FLAGS),
        (dirl_ccr, "layers=-1 heads=3"),
        (rdd_acr, "distil_steps=0 object_vectors=0 action_vectors=0"),
        (cheers, "k=-1"),
        (idc_pretrain, IDC_FLAGS),
    ],
)
def test_numbers_out_of_range(method, flags, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flag in flags.split():
        line = refused(method.main, f"--{flag}")
        assert f"--{flag.split('=')[0]}" in line.replace("argument ", ""), line
    assert not list(tmp_path.iterdir())


# ---- checkpoints and runs ------------------------------------------------------------------------


@pytest.fixture
def run(prepared, tiny, tmp_path, monkeypatch):
    """The folder of a run that has ended, and calls of its method on it."""
    monkeypatch.setattr(scorer_cbr, "evaluate", lambda *_: {"CIDEr": 1.0})  # not what this is about
    scorer_cbr.main(
        [*tiny, "--steps", "1", "--data_dir", str(prepared), "--out_dir", str(tmp_path / "run")]
    )
    return tmp_path / "run"


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_checkpoints_that_are_none(run, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = run / "last.pt"
    content, state = file.read_bytes(), torch.load(file)
    wrong = [
        b"",
        b"text",
        content[: len(content) // 2],
        None,
        [7],
        {},
        Payload(),
        {"model": Payload()},
    ]
    wrong += [
        {k: v for k, v in state.items() if k != "model"},
        state | {"model": {}},
        state | {"vocab": ["a"]},
    ]
    wrong += [state | {"config": state["config"] | {"more": "x"}}]
    for content in wrong:
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
        for command in (["--eval", file], ["--resume", "--out_dir", run]):
            line = refused(scorer_cbr.main, *command, "--device", "cpu")
            assert "last.pt" in line or "the checkpoint" in line, content
    assert not (tmp_path / "executed").exists()


def test_a_full_disk(run, refused):
    before = (run / "last.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        line = refused(
            scorer_cbr.main, "--resume", "--out_dir", run, "--steps", 2, "--device", "cpu"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "last.pt could not be written" in line or "best.pt could not be written" in line
    assert (run / "last.pt").read_bytes() == before and not list(run.glob("*.partial"))


def test_a_disk_full_of_features(release, prepare, monkeypatch):
    monkeypatch.setattr(data, "make_features", features_of_a_megabyte)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, limits[1]))
    try:
        line = prepare(release)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "features.h5 could not be written" in line
    assert not list(release.glob("features*"))


def features_of_a_megabyte(name, root, release, device, extractor):
    names = sorted(release.paths)
    block = np.ones((len(names), 100, 20, 20), np.float32)
    data.write_features(root / "features.h5", names, [block], "resnet101-layer3", "ones")


# ---- folders and files ---------------------------------------------------------------------------


def test_a_script_of_its_own(tmp_path):
    """data.py turns errors into a line itself; the other tests go through common.run_main, as the
    methods do."""
    call = [sys.executable, data.__file__, "clevr_change", "--data_dir", str(tmp_path / "none")]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
    assert f"there is no folder {tmp_path / 'none'}; --data_dir must be" in done.stderr


def test_unknown_words_of_the_command_line(refused, prepared, train):
    assert "invalid choice: 'clevr'" in refused(data.main, "clevr", "--data_dir", prepared)
    assert "unrecognized arguments: --chekc" in refused(data.main, "clevr_change", "--chekc")
    prepare = partial(refused, data.main, "clevr_change", "--data_dir", prepared)
    for place in (prepare, partial(train, prepared)):
        assert "--extractor vgg: clevr_change can have resnet" in place("--extractor", "vgg")
        line = place("--extractor", "timm/no_such_net")
        assert "--extractor timm/no_such_net" in line or "features-timm-no_such_net.h5" in line
    line = train(prepared, "--dataset", "clevr_chance")
    assert "no such data set (did you mean clevr_change?); there are mini, clevr_change," in line
    assert "--extractor vgg: clevr_change can have resnet101-layer3" in train(
        prepared, "--extractor", "vgg"
    )
    assert "--split: invalid choice: 'dev'" in refused(
        scorer_cbr.main, "--eval", "x.pt", "--split", "dev"
    )


@pytest.mark.parametrize(
    "file", ["splits", "type_mapping", "change_captions", "no_change_captions"]
)
def test_broken_json(release, prepare, file):
    path = release / f"{file}.json"
    content = path.read_bytes()
    for broken in (content[:-7], b"\xff\xfe{}", b"[" * 10**5):
        path.write_bytes(broken)
        assert str(path) in prepare(release)


def test_json_of_another_data_set(release, prepare, tmp_path):
    write_spot(tmp_path / "spot")
    write_clevr_dc(tmp_path / "dc")
    path = release / "change_captions.json"
    for other in ("dc/captions.json", "spot/annotations/train.json"):
        path.write_text((tmp_path / other).read_text())
        assert f"{path} cannot be used" in prepare(release)
    path.write_text((release / "no_change_captions.json").read_text())
    (release / "splits.json").write_text((release / "type_mapping.json").read_text())
    assert "splits.json cannot be used (train is missing)" in prepare(release)


BOX, BOXES, OVERLAP = (
    [1, 2, 3, 4.5],
    "change_captions_with_bbox.json",
    "change_captions_by_IOU.json",
)


@pytest.mark.parametrize(
    "file, key, value",
    [
        (BOXES, "x", {"bbox_before": BOX, "bbox_after": None}),
        (BOXES, "3", {"bbox_before": BOX}),
        (BOXES, "3", None),
        (BOXES, "3", {"bbox_before": BOX, "bbox_after": 7}),
        (OVERLAP, "x", 0.5),
        (OVERLAP, "3", None),
    ],
)
def test_boxes_that_are_none(release, prepare, file, key, value):
    content = {"2": {"bbox_before": None, "bbox_after": BOX}} if file == BOXES else {"2": 1}
    write(release / file, content)
    read = data.read_clevr_change(release)
    assert read.boxes == {"000002.png": (None, BOX)} or read.overlap == {"000002.png": 1.0}
    write(release / file, content | {key: value})
    assert file in prepare(release)


JUNK = [None, 7, "x", [], {}, [7], [None], ["x"], {"x": 7}, {"train": 7}]


def spoilt(content, where=()):
    """Every copy of a JSON content in which one part, down to the third level, is junk."""
    yield from ((where, junk) for junk in JUNK)
    if isinstance(content, dict | list) and len(where) < 4:
        for key in list(content if isinstance(content, dict) else range(len(content)))[:2]:
            yield from spoilt(content[key], (*where, key))


@pytest.mark.parametrize(
    "name", [name for name in WRITERS if name not in ("birds_to_words", "cub", "nabirds")]
)
def test_junk_anywhere_in_the_annotations(name, tmp_path):
    """Some junk is a release all the same (an empty list of a type's images); what is refused is
    refused in words."""
    WRITERS[name](tmp_path)
    refusals = 0
    for path in sorted(tmp_path.rglob("*.json")):
        text = path.read_text()
        for where, junk in spoilt(json.loads(text)):
            content = {"": json.loads(text)}
            part, last = content, ""
            for key in where:
                part, last = part[last], key
            part[last] = junk
            write(path, json.dumps(content[""]))
            try:
                data.read_release(name, tmp_path)
            except ValueError as e:
                assert str(tmp_path) in str(e)
                refusals += 1
        write(path, text)
    assert refusals > 50 and data.read_release(name, tmp_path)


def test_a_picture_is_missing(release, prepare, capsys):
    (release / "sc_images" / "CLEVR_semantic_000004.png").unlink()
    assert "CLEVR_semantic_000004.png (1 of 45 missing)" in prepare(release)
    assert "CLEVR_semantic_000004.png" in problems(capsys, "clevr_change", release)


@pytest.mark.parametrize("wrong", [[], "a red cube", [3], {"a": 1}])
def test_captions_that_are_none(prepared, prepare, wrong):
    captions = json.loads((prepared / "change_captions.json").read_text())
    write(prepared / "change_captions.json", captions | {"CLEVR_default_000003.png": wrong})
    expected = (
        "no captions for 000003.png" if wrong == [] else "change_captions.json cannot be used"
    )
    assert expected in prepare(prepared)


# ---- feature files -------------------------------------------------------------------------------


def rewrite(root, x=None, ids=None, **about):
    """The feature file with another content: an array, a list of ids, attributes."""
    with h5py.File(root / "features.h5") as f:
        x = f["features"][:] if x is None else x
        ids, attributes = f["image_ids"].asstr()[:] if ids is None else ids, dict(f.attrs) | about
    (root / "features.h5").unlink()  # a refused one may still be open
    with h5py.File(root / "features.h5", "w") as f:
        f["features"], f["image_ids"] = x, list(ids)
        f.attrs.update(attributes)


HALF = np.zeros((45, *GRID), np.float16)


@pytest.mark.parametrize("x", [HALF[..., 0], HALF[:44], HALF.astype(float), HALF])
def test_features_of_another_shape(prepared, train, x):
    rewrite(prepared, x, ["a"] * 45 if x is HALF else None)
    line = train(prepared)
    assert f"{x.shape}" in line and line.endswith(
        f"run: python data.py clevr_change --data_dir {prepared}"
    )


def test_features_that_are_none(prepared, train, prepare):
    path = prepared / "features.h5"
    content = path.read_bytes()
    for broken in (b"no HDF5 at all", content[:-100]):
        path.unlink()  # a refused one may still be open
        path.write_bytes(broken)
        assert "features.h5 cannot be used" in train(prepared) and "features.h5" in prepare(
            prepared
        )
    path.unlink()
    with h5py.File(path, "w") as f:
        f["image_ids"] = ["a"]
    assert "features.h5 cannot be used" in train(prepared)
    path.unlink()
    assert "no features at" in train(prepared)


def test_features_of_another_extractor(prepared, train, prepare):
    rewrite(prepared, extractor="resnet101-layer4")
    for line in (train(prepared), prepare(prepared)):
        assert (
            "features.h5 was made by resnet101-layer4, not by resnet101-layer3; remove it" in line
        )
    line = train(prepared, "--extractor", "resnet101-layer4")
    assert "features-resnet101-layer4.h5; run: python data.py" in line and line.endswith(
        "--extractor resnet101-layer4"
    )


# ---- vocabulary ----------------------------------------------------------------------------------


def test_a_vocabulary_that_is_none(prepared, train):
    ids = json.loads((prepared / "vocab.json").read_text())
    wrong = [{w: str(i) for w, i in ids.items()}, {}, json.dumps(ids)[:-9]]
    for content in (*wrong, {w: i for i, w in enumerate(sorted(ids))}):
        write(prepared / "vocab.json", content)
        assert "vocab.json" in (line := train(prepared)) and "run: python data.py" in line


def test_a_vocabulary_without_words(tmp_path, prepare, train, monkeypatch):
    write_levir(tmp_path / "levir")
    monkeypatch.setitem(data.DATASETS, "levir_cc", replace(data.DATASETS["levir_cc"], min_count=7))
    assert "the vocabulary has no words" in prepare(tmp_path / "levir", "levir_cc")
    assert not list((tmp_path / "levir").glob("*.*5"))  # refused before the features are made
    monkeypatch.undo()
    write_features("levir_cc", tmp_path / "levir")
    write(tmp_path / "levir/vocab.json", {word: i for i, word in enumerate(data.SPECIAL)})
    assert "the vocabulary has no words" in train(tmp_path / "levir", "--dataset", "levir_cc")


def test_a_vocabulary_that_does_not_fit(prepared, tiny, refused, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        scorer_cbr, "evaluate", lambda *_: {"CIDEr": 1.0}
    )  # is not what this is about
    flags = [*tiny, "--steps", 1, "--data_dir", prepared, "--out_dir", tmp_path / "run"]
    scorer_cbr.main([str(a) for a in flags])
    ids = json.loads((prepared / "vocab.json").read_text())
    write(prepared / "vocab.json", {("zebra" if i == 9 else w): i for w, i in ids.items()})
    for command in (
        ["--eval", tmp_path / "run/best.pt"],
        ["--resume", "--out_dir", tmp_path / "run"],
    ):
        line = refused(scorer_cbr.main, *command)
        assert "the checkpoint was trained with" in line and "--data_dir" in line
    assert "vocab.json is not of these captions" in problems(capsys, "clevr_change", prepared)


# ---- the other data sets -------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_each_data_set_says_what_is_missing(name, tmp_path, prepare, capsys):
    root = tmp_path / "deep" / "release"
    assert f"--data_dir must be the folder of {name}'s release" in prepare(root, name)
    WRITERS[name](root)
    image = sorted(data.read_release(name, root).paths.values())[0]
    lines = problems(capsys, name, root)
    assert "no features at" in lines
    published = data.DATASETS[name].scenes.values()
    assert sum(f"published {count}" in lines for count in published) == len(published)
    image.unlink()
    # Birds-to-Words' photographs are fetched one by one: pairs that lack one are left out, and
    # counted.
    expected = "both photographs" if name == "birds_to_words" else f"there is no {image} (1 of"
    assert expected in prepare(root, name)
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".json", ".txt", ".tsv")):
        content = path.read_bytes()
        path.unlink()
        assert path.stem in prepare(root, name)
        path.write_bytes(content[: len(content) // 2 - 2] if path.suffix == ".json" else b"\n")
        assert str(root) in prepare(root, name)
        path.write_bytes(content)
