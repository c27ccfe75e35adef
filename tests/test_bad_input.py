"""A user's likely mistakes: one line on stderr that names the flag or the file, and exit code 2."""

import shlex
import subprocess
import sys

import h5py
import pytest
from conftest import write_release

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
    return lambda root: refused(data.main, "clevr_change", "--data_dir", root)


@pytest.fixture
def train(refused, tiny, tmp_path):
    flags = [*tiny, "--out_dir", tmp_path / "run", "--data_dir"]
    return lambda root, *more: refused(scorer_cbr.main, *flags, root, *more)


def test_a_data_set_says_what_is_missing(tmp_path, prepare):
    root = tmp_path / "release"
    assert str(root) in prepare(root)
    write_release(root)
    image = min(data.read_release("clevr_change", root).paths.values())
    image.unlink()
    assert str(image) in prepare(root)
    for table in root.glob("*.json"):
        content = table.read_bytes()
        table.write_bytes(content[:-7])
        assert table.name in prepare(root)
        table.unlink()
        assert table.name in prepare(root)
        table.write_bytes(content)


def test_a_script_starts_and_prints_one_line(tmp_path):
    flags = ["--dataset", "clevr_change", "--data_dir", str(tmp_path / "none")]
    script = [sys.executable, scorer_cbr.__file__]
    done = subprocess.run([*script, *flags], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "splits.json" in done.stderr
    assert not list(tmp_path.iterdir())


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
    spaced = prepared.rename(prepared.with_name("my data"))
    _, command = train(spaced).split("run: ")
    assert shlex.split(command)[-2:] == ["--data_dir", str(spaced)]
