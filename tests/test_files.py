"""Files are whole or not there at all; what ends a program."""

import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch

from common import InputError
from support.files import atomic_write, kept, load_tensors, run_main, save_tensors


@pytest.fixture
def small_disk():
    """No file may have more than a megabyte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_is_whole_when_the_disk_is_full(tmp_path, small_disk, capsys):
    path = tmp_path / "deep" / "last.pt"
    save_tensors(path, {"step": 1})  # makes the folder
    with pytest.raises(SystemExit) as e:
        run_main(lambda: save_tensors(path, {"weight": torch.ones(2**20)}))
    assert e.value.code == 2
    assert re.fullmatch(r"error: .*File too large\n", capsys.readouterr().err)
    assert torch.load(path) == {"step": 1}
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_program_removes_partial_files(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kept[:] = ["--resume goes on from step 7"]

    def main():
        with atomic_write(Path("features.h5")) as partial:
            partial.touch()
            signal.raise_signal(number)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    handler = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # else it might end the tests
    try:
        with pytest.raises(SystemExit) as e:
            run_main(main)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert e.value.code == 130
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == "interrupted; --resume goes on from step 7\n"


def test_a_file_stays_whole_when_writing_fails(tmp_path):
    path = tmp_path / "deep" / "last.pt"
    save_tensors(path, {"step": 1})  # makes the folder
    with pytest.raises(AttributeError):
        save_tensors(path, {"weight": torch.ones(2), "function": lambda: None})
    assert torch.load(path) == {"step": 1}
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    path = tmp_path / "last.pt"
    for content in (Payload(), {"config": Payload()}):
        torch.save(content, path)
        with pytest.raises(InputError, match=r"last\.pt"):
            load_tensors(path)
    assert not Path("executed").exists()
