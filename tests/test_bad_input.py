"""A user's likely mistakes: one line on stderr that names the flag or the file, and exit code 2."""

import shlex
import subprocess
import sys

import h5py
import pytest

import data
import scorer_cbr
from support.files import run_main


def test_a_script_starts_and_prints_one_line(tmp_path):
    flags = ["--dataset", "clevr_change", "--data_dir", str(tmp_path / "none")]
    script = [sys.executable, scorer_cbr.__file__]
    done = subprocess.run([*script, *flags], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    *_, line = done.stderr.splitlines()  # torch 2.9 prints a warning before
    assert line.startswith("error: ") and "splits.json" in line
    assert not list(tmp_path.iterdir())


def test_features_that_do_not_fit(prepared, tiny, tmp_path, capsys):
    def refused(main, *argv):
        """The last line that a script's main prints when it refuses a command."""
        with pytest.raises(SystemExit) as e:
            run_main(lambda: main([str(a) for a in argv]))
        assert e.value.code == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    path = prepared / "features.h5"
    flags = ["--data_dir", prepared]
    train = [scorer_cbr.main, *tiny, "--out_dir", tmp_path / "run", *flags]
    with h5py.File(path, "a") as f:
        f.attrs["extractor"] = "resnet101-layer4"
    for line in (refused(*train), refused(data.main, "clevr_change", *flags)):
        assert "features.h5" in line
        assert "resnet101-layer4" in line and "resnet101-layer3" in line
    path.write_bytes(path.read_bytes()[:-100])
    assert "features.h5" in refused(*train)
    path.rename(prepared / "features-mini-cnn.h5")
    with h5py.File(prepared / "features-mini-cnn.h5", "w") as f:
        f.attrs["extractor"] = "timm/resnet18:4e0f"
    assert "features-mini-cnn.h5, add --extractor timm/resnet18:FILE" in refused(*train)
    spaced = prepared.rename(prepared.with_name("my data"))
    _, advice = refused(*train[:-1], spaced).split("run: ")
    command, _, _ = advice.partition("; or")
    assert shlex.split(command)[-2:] == ["--data_dir", str(spaced)]
