"""Whatever is wrong with the input, it is one line on stderr and exit code 2."""

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from conftest import GRID, write_features, write_release
from test_readers import (
    RELEASED,
    item,
    levir_image,
    write,
    write_birds,
    write_clevr_dc,
    write_cub,
    write_nabirds,
    write_picture,
    write_repack,
    write_spot,
)

import cheers
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
from common import CHECKPOINT, lock, run_main


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
        data.main, name, "--data_dir", root, "--device", "cpu", *more
    )


@pytest.fixture
def train(refused, tiny, tmp_path):
    return lambda root, *more: refused(scorer_cbr.main, *tiny, "--data_dir", root, "--out_dir", tmp_path / "run", *more)


def problems(capsys, name, root):
    """What --check has to say."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        data.main([name, "--data_dir", str(root), "--check"])
    assert e.value.code == 2
    return capsys.readouterr().err.strip().splitlines()


def write_edits(root):
    for split, uid in (("train", "A"), ("valid", "B"), ("test", "C")):
        write(root / f"{split}.json", [item(uid, f"{uid}.jpg", f"{uid}2.png", "zoom in", "crop it in")])
        for name in (f"{uid}.jpg", f"{uid}2.png"):
            write_picture(root / "images" / name)


def write_levir(root):
    images = [levir_image(split, 1, "a lake by a lake", "no change", changeflag=1) for split in data.SPLITS]
    write(root / "LevirCCcaptions.json", {"images": images})
    for split in data.SPLITS:
        for folder in "AB":
            write_picture(root / "images" / split / folder / f"{split}_000001.png")


def write_own(root):
    rows = [
        {"before": f"{split}.png", "after": "b.png", "captions": ["it is open"], "split": split}
        for split in data.SPLITS
    ]
    write(root / "pairs.json", rows)
    for name in (*data.SPLITS, "b"):
        write_picture(root / f"{name}.png")


WRITERS = {
    "clevr_change": write_release, "clevr_dc": write_clevr_dc, "spot_the_diff": write_spot, "levir_cc": write_levir,
    "image_editing_request": write_edits, "birds_to_words": write_birds, "cub": write_cub, "nabirds": write_nabirds,
    "pairs": write_own,
}  # fmt: skip


# ---- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, flags", [
    (scorer_cbr, """batch_size=0 batch_size=-1 eval_batch=0 log_every=0 eval_every=0 steps=0 scenes=0 dim=0 dim=-1
     dim=100000000000000000000 word_dim=0 heads=0 heads=-1 heads=7 layers=-1 decoder_layers=0 dropout=nan dropout=1
     grad_clip=-1 lr=nan lr=inf lr_drop=-1 warmup=-1 seed=-1 w_match=-1 w_cbr=nan device=meta device=gpu"""),
    (dirl_ccr, "tau=-1 tau=0 alpha=-1 layers=0"), (rdd_acr, "tau=0 object_vectors=0"), (cheers, "k=-1 w_match=-1"),
    (idc_pretrain, """ffn=0 pretrain_batch=0 pretrain_steps=-1 mlm=-1 mlm=100000000000000000000 tau_fda=0 mask_rate=0
     mask_rate=1.1 patience=-1""")])  # fmt: skip
def test_numbers_out_of_range(method, flags, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flag in flags.split():
        line = refused(method.main, f"--{flag}")
        assert f"--{flag.split('=')[0]}" in line.replace("argument ", ""), line
    assert not list(tmp_path.iterdir())


# ---- checkpoints and runs --------------------------------------------------------------------------------------------


@pytest.fixture
def run(prepared, tiny, tmp_path, monkeypatch):
    """The folder of a run that has ended, and calls of its method on it."""
    monkeypatch.setattr(scorer_cbr, "evaluate", lambda *_: {"CIDEr": 1.0})  # is not what this is about
    scorer_cbr.main([*tiny, "--steps", "1", "--data_dir", str(prepared), "--out_dir", str(tmp_path / "run")])
    return tmp_path / "run"


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def changed(state, key, value):
    """A copy of a checkpoint in which one part, "a/b/c", is another."""
    head, _, rest = key.partition("/")
    head = int(head) if head.isdecimal() else head
    return state | {head: changed(state[head], rest, value) if rest else value}


def test_checkpoints_that_are_none(run, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = run / "last.pt"
    whole, state = file.read_bytes(), torch.load(file)
    name, p = next(iter(state["model"].items()))
    wrong = [b"", b"x", b"text", whole[: len(whole) // 2], None, [], 7, Payload(), {"a": Payload()}, {}]
    wrong += [{k: v for k, v in state.items() if k != key} for key in CHECKPOINT]
    wrong += [state | {key: junk} for key in CHECKPOINT for junk in (None, [7])]
    parts = {f"model/{name}": p * np.nan, "model/more": p, "step": -1, "max_len": 0, "grid": (8, 2), "extractor/name": "x",
             "config/dim": "x", "config/batch_size": 0, "config/more": 1}  # fmt: skip
    to_resume = {"random/cpu": p, "optimizer/state/0/exp_avg": torch.ones(1), "optimizer/state/0/exp_avg_sq": p.double(),
                 "optimizer/state/0/step": "x", "optimizer/state/999": {}, "optimizer/state": {0: {}}}  # fmt: skip
    wrong += [changed(state, *part) for part in parts.items()]
    wrong_to_resume = [changed(state, *part) for part in to_resume.items()]
    resume = ["--resume", "--steps", 3, "--out_dir", run]
    for command, contents in ((["--eval", file], wrong), (resume, wrong_to_resume)):
        for content in contents:
            file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
            line = refused(scorer_cbr.main, *command, "--device", "cpu")
            assert "last.pt" in line or "the checkpoint" in line, content
    assert not (tmp_path / "executed").exists()


def test_a_folder_belongs_to_one_process(run, refused):
    ready, done = os.pipe(), os.pipe()
    if not (child := os.fork()):
        with lock(run):
            os.write(ready[1], b"x")
            os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    command = ["--resume", "--out_dir", run, "--steps", 2, "--device", "cpu"]
    assert "another process is at work in" in refused(scorer_cbr.main, *command)
    os.write(done[1], b"x")
    os.waitpid(child, 0)
    scorer_cbr.main([str(x) for x in command])


def test_a_full_disk(run, refused, monkeypatch):
    before = (run / "last.pt").read_bytes()
    command = ["--resume", "--out_dir", run, "--steps", 2, "--device", "cpu"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        line = refused(scorer_cbr.main, *command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "last.pt could not be written" in line or "best.pt could not be written" in line
    assert "it takes 0.1 MB" in line and (run / "last.pt").read_bytes() == before and not list(run.glob("*.partial"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e4))
    assert "checkpoints need 0 MB, the disk has 0 MB left" in refused(scorer_cbr.main, *command)


# ---- folders and files -----------------------------------------------------------------------------------------------


def test_a_script_of_its_own(tmp_path):
    """data.py turns errors into a line itself; the other tests go through common.run_main, as the methods do."""
    call = [sys.executable, data.__file__, "clevr_change", "--data_dir", str(tmp_path / "none")]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
    assert f"No such file or directory: '{tmp_path / 'none' / 'splits.json'}'; --data_dir must be" in done.stderr


def test_unknown_words_of_the_command_line(refused, prepared, train):
    assert "invalid choice: 'clevr'" in refused(data.main, "clevr", "--data_dir", prepared)
    assert "unrecognized arguments: --chekc" in refused(data.main, "clevr_change", "--chekc")
    assert "--extractor vgg: clevr_change can have resnet101-layer3" in train(prepared, "--extractor", "vgg")
    folders = "--data_dir", prepared / "mini", "--out_dir", prepared / "run"
    assert "--extractor resnet101-layer4: mini can have mini-cnn" in refused(
        scorer_cbr.main, "--extractor", "resnet101-layer4", *folders, "--device", "cpu"
    )
    assert "--split: invalid choice: 'dev'" in refused(scorer_cbr.main, "--eval", "x.pt", "--split", "dev")


@pytest.mark.parametrize("file", ["splits", "type_mapping", "change_captions", "no_change_captions"])
def test_truncated_json(release, prepare, file):
    path = release / f"{file}.json"
    path.write_text(path.read_text()[:-7])
    assert f"{file}.json is not valid JSON" in prepare(release)
    path.write_bytes(b"\xff\xfe{}")
    assert f"{file}.json is not valid JSON" in prepare(release)


def test_json_of_another_data_set(release, prepare, tmp_path):
    write_spot(tmp_path / "spot")
    write_clevr_dc(tmp_path / "dc")
    captions = (release / "change_captions.json").read_text()
    write(release / "change_captions.json", (tmp_path / "dc/captions.json").read_text())
    assert "no key 'CLEVR_default_000000.png'; expected CLEVR_" in prepare(release)
    write(release / "change_captions.json", (tmp_path / "spot/annotations/train.json").read_text())
    assert "change_captions.json: expected dict, found list" in prepare(release)
    write(release / "change_captions.json", captions)
    write(release / "splits.json", (release / "type_mapping.json").read_text())
    assert "no key 'train'; expected train, val, test, found color, material" in prepare(release)
    write(tmp_path / "spot/annotations/val.json", captions)
    assert "val.json: expected list, found dict" in prepare(tmp_path / "spot", "spot_the_diff")


@pytest.mark.parametrize("wrong", ["12", 1.5, True, None, [3]])
def test_ids_of_the_wrong_type(release, prepare, wrong):
    splits = json.loads((release / "splits.json").read_text())
    write(release / "splits.json", splits | {"train": [0, wrong, 2]})
    assert "splits.json, 'train', item 1: expected int, found" in prepare(release)


BOX, BOXES, OVERLAP = [1, 2, 3, 4.5], "change_captions_with_bbox.json", "change_captions_by_IOU.json"


@pytest.mark.parametrize("file, key, value", [
    (BOXES, "x", {"bbox_before": BOX, "bbox_after": None}), (BOXES, "3.png", {"bbox_before": None, "bbox_after": BOX}),
    (BOXES, "3", {"bbox_before": BOX}),
    (BOXES, "3", {"bbox_before": ["1", 2, 3, 4], "bbox_after": BOX}), (BOXES, "3", {"bbox_before": BOX, "bbox_after": 7}),
    (BOXES, "3", {"bbox_before": [True, 2, 3, 4], "bbox_after": BOX}), (BOXES, "3", [BOX, BOX]), (BOXES, "3", None),
    (OVERLAP, "x", 0.5), (OVERLAP, "3", "0.5"), (OVERLAP, "3", None), (OVERLAP, "3", [0.5])])  # fmt: skip
def test_boxes_that_are_none(release, prepare, capsys, file, key, value):
    content = {"2": {"bbox_before": None, "bbox_after": BOX}} if file == BOXES else {"2": 1}
    write(release / file, content)
    read = data.read_clevr_change(release)
    assert read.boxes == {"000002.png": (None, BOX)} or read.overlap == {"000002.png": 1.0}
    write(release / file, content | {key: value})
    line = prepare(release)
    assert file in line and (repr(key) in line or "000003.png" in line) and "expected" in line
    assert problems(capsys, "clevr_change", release) == [line.removeprefix("error: ")]


def test_unknown_split(release, prepare):
    splits = json.loads((release / "splits.json").read_text())
    write(release / "splits.json", {{"val": "validation"}.get(k, k): v for k, v in splits.items()})
    assert "no key 'val'; expected train, val, test, found train, validation, test" in prepare(release)


JUNK = [None, 7, "x", [], {}, [7], [None], ["x"], {"x": 7}, {"train": 7}]


def spoilt(content, where=()):
    """Every copy of a JSON content in which one part, down to the third level, is junk."""
    for junk in JUNK:
        yield where, junk
    keys = (
        list(content)[:2]
        if isinstance(content, dict)
        else range(min(2, len(content)))
        if isinstance(content, list)
        else ()
    )
    for key in keys if len(where) < 4 else ():
        yield from spoilt(content[key], (*where, key))


@pytest.mark.parametrize(
    "name", ["clevr_change", "clevr_dc", "spot_the_diff", "levir_cc", "image_editing_request", "pairs"]
)
def test_junk_anywhere_in_the_annotations(name, tmp_path):
    """Some junk is a release all the same (an empty list of a type's images); what is refused is refused in words."""
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


def test_image_missing_for_an_annotated_pair(release, prepared, prepare, capsys):
    (release / "sc_images" / "CLEVR_semantic_000004.png").unlink()
    lines = problems(capsys, "clevr_change", release)
    assert any("CLEVR_semantic_000004.png is not a readable image ([Errno 2]" in line for line in lines)
    (release / "features.h5").unlink()
    assert "CLEVR_semantic_000004.png (1 of 45 missing)" in prepare(release)


def test_caption_of_no_words(prepared, capsys):
    captions = json.loads((prepared / "change_captions.json").read_text())
    captions["CLEVR_default_000003.png"].append("  ")
    write(prepared / "change_captions.json", captions)
    assert any("an empty caption for 000003.png (train)" in line for line in problems(capsys, "clevr_change", prepared))


def test_captions_that_are_none(prepared, prepare):
    captions = json.loads((prepared / "change_captions.json").read_text())
    for wrong in ([], "a red cube", [3], {"a": 1}):
        write(prepared / "change_captions.json", captions | {"CLEVR_default_000003.png": wrong})
        assert "change_captions.json, 'CLEVR_default_000003.png'" in prepare(prepared)


# ---- feature files ---------------------------------------------------------------------------------------------------


def rewrite(root, x=None, ids=None, **about):
    """The feature file with another content: an array, a list of ids, attributes."""
    with h5py.File(root / "features.h5") as f:
        x = f["features"][:] if x is None else x
        ids, attributes = f["image_ids"].asstr()[:] if ids is None else ids, dict(f.attrs) | about
    (root / "features.h5").unlink()  # a refused one may still be open
    with h5py.File(root / "features.h5", "w") as f:
        f["features"], f["image_ids"] = x, list(ids)
        f.attrs.update(attributes)


@pytest.mark.parametrize("shape", [(45, 8, 6), (45, 2, 3, 8), (44, 8, 2, 3), (45,)])
def test_features_of_another_shape(prepared, train, shape):
    rewrite(prepared, np.zeros(shape, np.float16))
    line = train(prepared)
    assert (
        f"found float16 {shape} and 45 ids); remove it and run: python data.py clevr_change --data_dir {prepared}"
        in line
    )


def test_features_that_are_none_of_ours(prepared, train, prepare):
    rewrite(prepared, np.zeros((45, *GRID)))
    assert "found float64" in train(prepared)
    rewrite(prepared, np.zeros((45, *GRID), np.float16), ids=["a"] * 45)
    assert "and 1 ids" in train(prepared)
    (prepared / "features.h5").unlink()
    with h5py.File(prepared / "features.h5", "w") as f:
        f.create_group("features")
        f["image_ids"] = ["a"]
    assert "features.h5 cannot be used" in train(prepared)
    (prepared / "features.h5").unlink()
    (prepared / "features.h5").write_bytes(b"no HDF5 at all")
    assert "features.h5 cannot be used" in train(prepared) and "features.h5" in prepare(prepared)


def test_features_of_another_extractor(prepared, train, prepare):
    rewrite(prepared, extractor="resnet101-layer4")
    for line in (train(prepared), prepare(prepared)):
        assert "for clevr_change by resnet101-layer4 (the authors' released .npy files), not for" in line
    rewrite(prepared, extractor="resnet101-layer3", preprocessing="upside down")
    assert "by resnet101-layer3 (upside down)" in train(prepared)
    line = train(prepared, "--extractor", "resnet101-layer4")
    assert "features-resnet101-layer4.h5; run: python data.py" in line and line.endswith("--extractor resnet101-layer4")


def test_half_written_features(prepared, train):
    whole = (prepared / "features.h5").read_bytes()
    (prepared / "features.h5").write_bytes(whole[:-100])  # a copy that broke off
    assert "features.h5 cannot be used (OSError Unable to" in train(prepared)
    (prepared / "features.h5").write_bytes(whole)
    (prepared / "features.h5").rename(prepared / "features.partial")
    assert "no features at" in train(prepared)


def test_features_of_another_data_set(prepared, train, tmp_path):
    rewrite(prepared, dataset="clevr_dc")
    assert "was made for clevr_dc by" in train(prepared)
    write_clevr_dc(tmp_path / "dc")
    write_features("clevr_dc", tmp_path / "dc")
    (prepared / "features.h5").unlink()
    (prepared / "features.h5").write_bytes((tmp_path / "dc" / "features.h5").read_bytes())
    line = train(prepared)  # a file that does not tell its data set
    assert "no features for CLEVR_default_000000.png and 44 more; remove it" in line


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite(prepared, value, capsys):
    with h5py.File(prepared / "features.h5", "r+") as f:
        f["features"][3, 1, 1, 2] = value  # CLEVR_default_000003.png, for training
    assert any("CLEVR_default_000003.png are not finite" in line for line in problems(capsys, "clevr_change", prepared))


# ---- vocabulary ------------------------------------------------------------------------------------------------------


def test_a_vocabulary_that_is_none(prepared, train):
    ids = json.loads((prepared / "vocab.json").read_text())
    for wrong in ({w: str(i) for w, i in ids.items()}, {w: i + 1 for w, i in ids.items()}, dict.fromkeys(ids, 0), {}):
        write(prepared / "vocab.json", wrong)
        line = train(prepared)
        assert "vocab" in line and ("run: python data.py" in line or "prepare again" in line)
    write(prepared / "vocab.json", {w: i for i, w in enumerate(sorted(ids))})
    assert "vocabulary must begin with <NULL> <UNK> <START> <END>" in train(prepared)
    write(prepared / "vocab.json", json.dumps(ids)[:-9])
    assert "vocab.json is not valid JSON" in train(prepared)


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
    monkeypatch.setattr(scorer_cbr, "evaluate", lambda *_: {"CIDEr": 1.0})  # is not what this is about
    flags = [*tiny, "--steps", 1, "--data_dir", prepared, "--out_dir", tmp_path / "run"]
    scorer_cbr.main([str(a) for a in flags])
    ids = json.loads((prepared / "vocab.json").read_text())
    write(prepared / "vocab.json", {("zebra" if i == 9 else w): i for w, i in ids.items()})
    for command in (
        ["--eval", tmp_path / "run/best.pt", "--device", "cpu"],
        ["--resume", "--out_dir", tmp_path / "run"],
    ):
        assert (
            "the checkpoint was trained with" in (line := refused(scorer_cbr.main, *command)) and "--data_dir" in line
        )
    assert any("vocab.json is not of these captions" in line for line in problems(capsys, "clevr_change", prepared))


# ---- the other data sets ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", WRITERS)
def test_each_data_set_tells_what_is_missing(name, tmp_path, prepare, capsys):
    root = tmp_path / "deep" / "release"
    assert f"--data_dir must be the folder of {name}'s release" in prepare(root, name)
    WRITERS[name](root)
    image = sorted(data.read_release(name, root).paths.values())[0]
    image.write_bytes(image.read_bytes()[:60])
    lines = problems(capsys, name, root)
    assert any(f"{image} is not a readable image" in line for line in lines), lines
    assert any("no features at" in line for line in lines)
    image.unlink()
    # Birds-to-Words' photographs are fetched one by one: pairs that lack one are left out, and told.
    expected = "both photographs" if name == "birds_to_words" else f"there is no {image} (1 of"
    assert expected in prepare(root, name)
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".json", ".txt", ".tsv")):
        content = path.read_bytes()
        path.unlink()
        assert path.stem in prepare(root, name)
        path.write_bytes(content[: len(content) // 2 - 2] if path.suffix == ".json" else b"\n")
        assert str(root) in prepare(root, name)
        path.write_bytes(content)


def test_check_counts_every_data_set(tmp_path, capsys):
    for name, writer in WRITERS.items():
        writer(tmp_path / name)
        published = {k: v for k, v in data.DATASETS[name].scenes.items() if v}
        lines = problems(capsys, name, tmp_path / name)
        assert sum(f"published {count}" in line for line in lines for count in published.values()) >= len(published), (
            lines
        )


def test_a_pair_in_two_splits(release, capsys):
    splits = json.loads((release / "splits.json").read_text())
    write(release / "splits.json", splits | {"val": [3, *splits["val"]]})
    lines = problems(capsys, "clevr_change", release)
    assert any("pair 000003.png is there more than once (train, val)" in line for line in lines), lines


# ---- IDC's repack ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RELEASED)
def test_a_bad_line_of_idcs_repack_is_named(name, tmp_path, prepare, capsys):
    RELEASED[name](tmp_path / "release")
    root = tmp_path / "repack"
    write_repack(name, tmp_path / "release", root)
    lines = (root / "train.json").read_text().splitlines()
    row = json.loads(lines[1])
    key = next(key for key in ("description", "class_id2") if key in row)
    junk = [row | {key: value} for value in (None, "x", [], [7], {"a": 1})]
    junk += [7, [], {}, {"img": 1}, dict(list(row.items())[1:])]
    for line in [json.dumps(value) for value in junk] + [" ", lines[1][:-9], "\xff"]:
        (root / "train.json").write_bytes("\n".join([lines[0], line, *lines[2:]]).encode("latin1"))
        assert f"{root / 'train.json'}, line 2" in prepare(root, name, "--extractor", "resnet101-layer4"), line
    assert "train.json, line 2" in problems(capsys, name, root)[0]


@pytest.mark.parametrize("name", RELEASED)
def test_a_repack_is_checked_by_its_features(name, tmp_path, monkeypatch, capsys):
    RELEASED[name](tmp_path / "release")
    root, call = tmp_path / "repack", [name, "--data_dir", str(tmp_path / "repack"), "--extractor", "resnet101-layer4"]
    write_repack(name, tmp_path / "release", root)
    monkeypatch.setitem(data.DATASETS, name, replace(data.DATASETS[name], scenes={}, words=None))
    with pytest.raises(SystemExit):
        data.main([*call, "--check"])
    lines = capsys.readouterr().err.splitlines()
    assert all("no features at" in line or "no vocabulary at" in line for line in lines) and lines
    data.main(call)
    data.main([*call, "--check"])
    out = capsys.readouterr().out
    assert f"note: {root} has features and no pictures" in out and " 0 problems" in out
    write_picture(next(iter(data.read_release(name, root).paths.values())))  # one: others are missing
    with pytest.raises(SystemExit):
        data.main([*call, "--check"])
    assert "No such file" in capsys.readouterr().err


def test_a_pickle_that_is_none_of_arrays(prepare, tmp_path):
    write_birds(tmp_path / "release")
    write_repack("birds_to_words", tmp_path / "release", tmp_path / "repack")
    (tmp_path / "repack/full_img.pkl").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    line = prepare(tmp_path / "repack", "birds_to_words")
    assert "img.pkl cannot be used (it names posix.system); fetch it again" in line
