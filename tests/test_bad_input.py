"""Whatever is wrong with the input, the user sees one line on stderr, and exit code 2."""

import errno
import json
import os
import resource

import h5py
import numpy as np
import pytest
import torch
from conftest import add_word, write_own_pairs, write_picture, write_release
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
from common import InputError, run_main


@pytest.fixture
def refused(capsys):
    def of(main, *argv):
        """The one-line error with which a script's main refuses a command."""
        capsys.readouterr()
        with pytest.raises(SystemExit) as e:
            run_main(lambda: main([str(a) for a in argv]))
        lines = capsys.readouterr().err.strip().splitlines()
        bars = [line for line in lines if "%|" in line]  # an error may end a progress bar
        assert e.value.code == 2
        assert len(lines) == len(bars) + 1, lines
        return lines[-1]

    return of


@pytest.fixture
def prepare(refused):
    return lambda root, name="clevr_change": refused(data.main, name, "--data_dir", root)


@pytest.fixture
def train(refused, tiny, tmp_path):
    flags = [*tiny, "--out_dir", tmp_path / "run", "--data_dir"]
    return lambda root, *more: refused(scorer_cbr.main, *flags, root, *more)


def write_boxed_release(root):
    write_release(root)
    boxes = {"bbox_before": None, "bbox_after": [1, 2, 3, 4.5]}
    write(root / "change_captions_with_bbox.json", {"2": boxes})
    write(root / "change_captions_by_IOU.json", {"2": 1})
    read = data.read_clevr_change(root)
    assert read.boxes == {"000002.png": (None, [1, 2, 3, 4.5])}
    assert read.overlap == {"000002.png": 1.0}


def write_edits(root):
    for split, uid in (("train", "A"), ("valid", "B"), ("test", "C")):
        row = item(uid, f"{uid}.jpg", f"{uid}2.png", "zoom in", "crop it in")
        write(root / f"{split}.json", [row])
        for name in (f"{uid}.jpg", f"{uid}2.png"):
            write_picture(root / "images" / name)


def write_levir(root):
    images = []
    for split in data.SPLITS:
        images.append(levir_image(split, 1, "a lake by a lake", "no change", changeflag=1))
        for folder in "AB":
            write_picture(root / "images" / split / folder / f"{split}_000001.png")
    write(root / "LevirCCcaptions.json", {"images": images})


WRITERS = {
    "clevr_change": write_boxed_release,
    "clevr_dc": write_clevr_dc,
    "spot_the_diff": write_spot,
    "levir_cc": write_levir,
    "image_editing_request": write_edits,
    "birds_to_words": write_birds,
    "cub": write_cub,
    "nabirds": write_nabirds,
    "pairs": write_own_pairs,
}


# ---- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, flags",
    [
        (scorer_cbr, "batch_size=0 dim=-1 heads=7 lr_drop=-1 seed=-1 steps=x device=meta"),
        (dirl_ccr, "heads=3"),
        (rdd_acr, "object_vectors=0"),
        (cheers, "k=-1"),
        (idc_pretrain, "pretrain_batch=0 mlm=-1"),
    ],
)
def test_numbers_out_of_range(method, flags, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flag in flags.split():
        line = refused(method.main, f"--{flag}")
        assert f"--{flag.split('=')[0]}" in line.replace("argument ", ""), line
    assert not list(tmp_path.iterdir())


def test_unknown_words_of_the_command_line(refused, prepared, train, monkeypatch):
    monkeypatch.setattr(data, "__doc__", None)  # as with python -OO
    assert "clevr" in refused(data.main, "clevr", "--data_dir", prepared)
    assert "--chekc" in refused(data.main, "clevr_change", "--chekc")
    assert "clevr_change" in train(prepared, "--dataset", "clevr_chance")  # which was meant
    assert "--split" in refused(scorer_cbr.main, "--eval", "x.pt", "--split", "dev")
    for extractor in ("vgg", "timm/no_such_net"):
        flags = ("--data_dir", prepared, "--extractor", extractor)
        assert f"--extractor {extractor}" in refused(data.main, "clevr_change", *flags)
        assert f"--extractor {extractor}" in train(prepared, "--extractor", extractor)


# ---- checkpoints and full disks ------------------------------------------------------------------


@pytest.fixture
def run(prepared, tiny, tmp_path, monkeypatch):
    """The folder of a finished run."""
    monkeypatch.setattr(scorer_cbr, "evaluate", lambda *_: {"CIDEr": 1.0})  # not what this is about
    folder = tmp_path / "run"
    folders = ["--data_dir", str(prepared), "--out_dir", str(folder)]
    scorer_cbr.main([*tiny, "--steps", "1", *folders])
    return folder


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_checkpoints_that_are_none(run, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = run / "last.pt"
    content = file.read_bytes()
    state = torch.load(file)
    for broken in (b"text", content[: len(content) // 2]):
        file.write_bytes(broken)
        assert "last.pt" in refused(scorer_cbr.main, "--eval", file, "--device", "cpu")
    without_model = {key: value for key, value in state.items() if key != "model"}
    other_config = state | {"config": state["config"] | {"more": "x"}}
    other_words = state | {"vocab": ["a"]}
    crafted = {"model": Payload()}
    for wrong in ([7], without_model, other_config, other_words, Payload(), crafted):
        torch.save(wrong, file)
        for command in (["--eval", file], ["--resume", "--out_dir", run]):
            line = refused(scorer_cbr.main, *command, "--device", "cpu")
            assert "last.pt" in line or "the checkpoint" in line, wrong
    assert not (tmp_path / "executed").exists()


def test_a_vocabulary_that_does_not_fit(prepared, run, refused):
    add_word(prepared, "zebra")
    for command in (["--eval", run / "best.pt"], ["--resume", "--out_dir", run]):
        assert "--data_dir" in refused(scorer_cbr.main, *command)


@pytest.fixture
def full_disk():
    """A function: after full_disk(size), no file can exceed `size` bytes until the test ends."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk(run, refused, full_disk):
    before = (run / "last.pt").read_bytes()
    full_disk(len(before) // 2)
    line = refused(scorer_cbr.main, "--resume", "--out_dir", run, "--steps", 2, "--device", "cpu")
    assert "last.pt" in line or "best.pt" in line
    assert (run / "last.pt").read_bytes() == before
    assert not list(run.glob("*.partial"))


def test_a_disk_full_of_features(release, prepare, monkeypatch, full_disk):
    def features_of_a_megabyte(name, root, release, device, extractor):
        names = sorted(release.paths)
        files = [release.paths[name] for name in names]
        block = np.ones((len(names), 100, 20, 20), np.float32)
        data.write_features(root / "features.h5", names, files, [block], extractor, "ones")

    monkeypatch.setattr(data, "make_features", features_of_a_megabyte)
    full_disk(10**5)
    assert "features.h5" in prepare(release)
    assert not list(release.glob("features*"))


# ---- annotations ---------------------------------------------------------------------------------


def test_broken_json(release, prepare):
    """Half an emoji is broken, too, however JSON writes it; whole ones are fine."""
    path = release / "change_captions.json"
    content = path.read_bytes()
    for broken in (content[:-7], b"\xff\xfe{}", b"[" * 10**5):
        path.write_bytes(broken)
        assert str(path) in prepare(release)
    for whole in (rb"red \ud83d\ude97", "red \U0001f697".encode()):
        path.write_bytes(content.replace(b"red", whole))
        assert data.read_release("clevr_change", release)
    for half in (rb"red \ud83d", b"red \xed\xa0\xbd"):
        path.write_bytes(content.replace(b"red", half))
        assert str(path) in prepare(release)


JUNK = [None, 7, "x", [], {}, ["x"], {"x": 7}]


def places(content, where=()):
    """The paths of the parts of a JSON content, down to the fourth level; the first two parts of
    each level."""
    yield where
    if isinstance(content, dict | list) and len(where) < 4:
        keys = list(content) if isinstance(content, dict) else range(len(content))
        for key in keys[:2]:
            yield from places(content[key], (*where, key))


def spoilt(text):
    """Copies of a JSON text, each with one part replaced by junk."""
    for where in places(json.loads(text)):
        for junk in JUNK:
            content = {"": json.loads(text)}
            part = content
            last = ""
            for key in where:
                part = part[last]
                last = key
            part[last] = junk
            yield json.dumps(content[""])


def is_refused(name, root):
    """Is a folder refused with a line that names it? Any other kind of error fails the test."""
    try:
        data.read_release(name, root)
    except (InputError, FileNotFoundError) as e:
        assert str(root) in str(e)
        return True
    return False


JSON_RELEASES = ["clevr_change", "clevr_dc", "spot_the_diff", "levir_cc", "image_editing_request"]


@pytest.mark.parametrize("name", JSON_RELEASES)
def test_junk_anywhere_in_the_annotations(name, tmp_path):
    """Some junk still makes a valid release (an empty list of a type's images)."""
    WRITERS[name](tmp_path)
    refusals = 0
    for path in sorted(tmp_path.rglob("*.json")):
        text = path.read_text()
        for junk in spoilt(text):
            path.write_text(junk)
            refusals += is_refused(name, tmp_path)
        path.write_text(text)
    assert refusals > 50
    assert not is_refused(name, tmp_path)


def tables_of(root):
    return sorted(path for path in root.rglob("*") if path.suffix in (".txt", ".tsv", ".csv"))


@pytest.mark.parametrize("name", ["birds_to_words", "cub", "nabirds", "pairs"])
def test_junk_in_tables_and_lists(name, tmp_path):
    WRITERS[name](tmp_path)
    refusals = 0
    for path in tables_of(tmp_path):
        content = path.read_bytes()
        for junk in (b"\n", b"\xff\xfe", b"1 \xe9.jpg\n", b"x", b"\0", b'"', b"1 x\n1 / y\n"):
            path.write_bytes(junk)
            refusals += is_refused(name, tmp_path)
        path.write_bytes(content)
    assert refusals > 5
    assert not is_refused(name, tmp_path)


@pytest.mark.parametrize("name", WRITERS)
def test_each_data_set_says_what_is_missing(name, tmp_path, prepare):
    root = tmp_path / "deep" / "release"
    assert str(root) in prepare(root, name)
    WRITERS[name](root)
    image = min(data.read_release(name, root).paths.values())
    image.unlink()
    # Birds-to-Words' photographs are fetched one by one: pairs that lack one are left out, and
    # counted.
    expected = "both photographs" if name == "birds_to_words" else str(image)
    assert expected in prepare(root, name)
    for path in sorted(root.rglob("*.json")) + tables_of(root):
        if "_by_IOU" in path.name or "_with_bbox" in path.name:
            continue  # may be absent
        content = path.read_bytes()
        path.unlink()
        assert path.stem in prepare(root, name)
        path.write_bytes(content)


def test_names_that_differ_in_case_or_accents(tmp_path, prepare):
    """Files may come from a system that ignores case, or that stores accents as separate
    characters."""
    write_own_pairs(tmp_path)
    table = (tmp_path / "pairs.csv").read_text()
    (tmp_path / "pairs.csv").write_text(table.replace("b.png", "caf\u00e9.png"))
    (tmp_path / "b.png").rename(tmp_path / "cafe\u0301.png")
    assert "cafe\u0301.png is there" in prepare(tmp_path, "pairs")
    (tmp_path / "pairs.csv").write_text(table.replace("b.png", "folder/b.png"))
    assert "is there" not in prepare(tmp_path, "pairs")
    (tmp_path / "Folder").mkdir()
    assert "Folder is there" in prepare(tmp_path, "pairs")
    (tmp_path / "pairs.csv").rename(tmp_path / "Pairs.csv")
    assert "Pairs.csv is there" in prepare(tmp_path, "pairs")
    with pytest.raises(InputError, match="val.png is there"):
        data.read_image(tmp_path / "Val.png")


# ---- feature files -------------------------------------------------------------------------------


def test_features_of_another_shape(prepared, train):
    path = prepared / "features.h5"
    with h5py.File(path, "a") as f:
        table = f["features"][:]
    for x in (table[..., 0], table[:44], table.astype(float)):
        content = path.read_bytes()
        path.unlink()  # a refused one may still be open
        path.write_bytes(content)
        with h5py.File(path, "a") as f:
            del f["features"]
            f["features"] = x
        line = train(prepared)
        assert "features.h5" in line and f"{x.shape}" in line
        assert line.endswith(f"run: python data.py clevr_change --data_dir {prepared}")


def test_features_that_are_none(prepared, train, prepare):
    path = prepared / "features.h5"
    content = path.read_bytes()
    for broken in (b"no HDF5 at all", content[:-100]):
        path.unlink()
        path.write_bytes(broken)
        assert "features.h5" in train(prepared)
        assert "features.h5" in prepare(prepared)
    path.unlink()
    assert "features.h5" in train(prepared)
    path.write_bytes(content)
    with h5py.File(path, "a") as f:
        del f["stamps"]  # as an older version made it
    line = train(prepared)
    assert "features.h5" in line and "remove it and run: python data.py" in line


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EIO])
def test_features_that_are_locked_or_cannot_be_read(prepared, train, monkeypatch, number):
    """They took hours to make and are intact, so no message may advise removing them."""

    def refuse(path):
        raise OSError(number, "no")

    monkeypatch.setattr(h5py, "File", refuse)
    line = train(prepared)
    assert "features.h5" in line
    assert "remove" not in line


def test_features_of_another_extractor(prepared, train, prepare):
    with h5py.File(prepared / "features.h5", "a") as f:
        f.attrs["extractor"] = "resnet101-layer4"
    for line in (train(prepared), prepare(prepared)):
        assert "features.h5" in line
        assert "resnet101-layer4" in line and "resnet101-layer3" in line
    line = train(prepared, "--extractor", "resnet101-layer4")
    assert "features-resnet101-layer4.h5" in line
    assert line.endswith("--extractor resnet101-layer4")
