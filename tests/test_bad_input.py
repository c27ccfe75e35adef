"""A user's likely mistakes: one line on stderr that names the flag or the file, and exit code 2."""

import h5py
import pytest
from conftest import write_own_pairs, write_picture, write_release
from test_readers import item, levir_image, write, write_birds, write_clevr_dc, write_spot

import data
import scorer_cbr
from common import run_main


@pytest.fixture
def refused(capsys):
    def error_of(main, *argv):
        """The last line that a script's main prints when it refuses a command."""
        capsys.readouterr()
        with pytest.raises(SystemExit) as e:
            run_main(lambda: main([str(a) for a in argv]))
        assert e.value.code == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    return error_of


@pytest.fixture
def prepare(refused):
    return lambda root, name="clevr_change": refused(data.main, name, "--data_dir", root)


@pytest.fixture
def train(refused, tiny, tmp_path):
    flags = [*tiny, "--out_dir", tmp_path / "run", "--data_dir"]
    return lambda root, *more: refused(scorer_cbr.main, *flags, root, *more)


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
    "clevr_change": write_release,
    "clevr_dc": write_clevr_dc,
    "spot_the_diff": write_spot,
    "levir_cc": write_levir,
    "image_editing_request": write_edits,
    "birds_to_words": write_birds,
    "pairs": write_own_pairs,
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_data_set_says_what_is_missing(name, tmp_path, prepare):
    root = tmp_path / "release"
    assert str(root) in prepare(root, name)
    WRITERS[name](root)
    image = min(data.read_release(name, root).paths.values())
    image.unlink()
    # Birds-to-Words' photographs are fetched one by one: pairs that lack one are left out, and
    # counted.
    expected = "lacks a photograph" if name == "birds_to_words" else str(image)
    assert expected in prepare(root, name)
    tables = [path for path in root.rglob("*") if path.suffix in (".json", ".tsv", ".csv")]
    for path in tables:
        content = path.read_bytes()
        path.write_bytes(content[:-7])
        if path.suffix == ".json":  # a table without its last characters may be a table
            assert path.name in prepare(root, name)
        path.unlink()
        assert path.stem in prepare(root, name)
        path.write_bytes(content)


def test_unknown_names_of_the_command_line(refused, prepared, train):
    assert "clevr" in refused(data.main, "clevr", "--data_dir", prepared)
    assert "clevr_change" in train(prepared, "--dataset", "clevr_chance")  # the names are listed
    for extractor in ("vgg", "timm/no_such_net"):
        flags = ("--data_dir", prepared, "--extractor", extractor)
        assert f"--extractor {extractor}" in refused(data.main, "clevr_change", *flags)
        assert f"--extractor {extractor}" in train(prepared, "--extractor", extractor)


def test_features_that_do_not_fit(prepared, train, prepare):
    path = prepared / "features.h5"
    with h5py.File(path, "a") as f:
        f.attrs["extractor"] = "resnet101-layer4"
    for line in (train(prepared), prepare(prepared)):
        assert "features.h5" in line
        assert "resnet101-layer4" in line and "resnet101-layer3" in line
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    assert "features.h5" in train(prepared)
    path.unlink()
    assert "features.h5" in train(prepared)
