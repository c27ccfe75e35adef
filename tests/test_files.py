"""Files are whole or not there at all; what ends a program."""

import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch

from common import InputError
from support.files import (
    atomic_write,
    kept,
    load_tensors,
    require_files,
    run_main,
    save_tensors,
    write_text,
)


@pytest.fixture
def small_disk():
    """No file may have more than a megabyte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_is_whole_when_the_disk_is_full(tmp_path, small_disk, capsys):
    kept[:] = []
    path = tmp_path / "deep" / "last.pt"
    save_tensors(path, {"step": 1})  # makes the folder
    with pytest.raises(SystemExit) as e:
        run_main(lambda: save_tensors(path, {"weight": torch.ones(2**20)}))
    assert e.value.code == 2
    assert re.fullmatch(r"error: .*File too large\n", capsys.readouterr().err)
    assert torch.load(path) == {"step": 1}
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_program_removes_partial_files(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kept[:] = ["--resume goes on from step 7"]

    def main():
        with atomic_write(Path("features.h5")) as partial:
            partial.touch()
            signal.raise_signal(number)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    for n in handlers:
        signal.signal(n, lambda *_: None)  # else it might end the tests
    try:
        with pytest.raises(SystemExit) as e:
            run_main(main)
    finally:
        for n, handler in handlers.items():
            signal.signal(n, handler)
    assert e.value.code == 130
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == "interrupted; --resume goes on from step 7\n"


def test_a_closed_terminal_does_not_end_a_program_that_ignores_it():
    done = []

    def main():
        signal.raise_signal(signal.SIGHUP)
        done.append("all")

    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        run_main(main)
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert done == ["all"]


def test_a_link_is_followed(tmp_path):
    """Features may be kept on another disk, also before they are made."""
    (tmp_path / "disk").mkdir()
    link = tmp_path / "features.h5"
    link.symlink_to(tmp_path / "disk" / "features.h5")
    write_text(link, "all")
    assert link.is_symlink()
    assert (tmp_path / "disk" / "features.h5").read_text() == "all"


def test_a_file_that_is_in_use_for_a_moment_is_replaced(tmp_path, monkeypatch):
    """On Windows, a virus scanner may have it open."""
    replace = os.replace
    denied = [PermissionError(13, "Access is denied")]

    def busy(*paths):
        if denied:
            raise denied.pop()
        replace(*paths)

    monkeypatch.setattr(os, "replace", busy)
    write_text(tmp_path / "last.pt", "new")
    assert (tmp_path / "last.pt").read_text() == "new"


def test_a_full_gpu_is_one_line(capsys):
    def main():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(SystemExit) as e:
        run_main(main)
    assert e.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "--batch_size" in message


def test_a_missing_file_is_named_with_its_line_and_its_other_spelling(tmp_path):
    mac = "su\u0308d.png"  # u and its dots, as a Mac writes them
    (tmp_path / mac).touch()
    (tmp_path / "roof.JPG").touch()
    south = tmp_path / "s\u00fcd.png"
    files = [south, tmp_path / "roof.jpg", tmp_path / mac]
    lines = dict(zip(files, (3, 5, 7), strict=True))
    with pytest.raises(FileNotFoundError) as e:
        require_files(files, lines)
    assert f"{south} (line 3), but {mac}" in str(e.value)
    assert "roof.jpg (line 5), but roof.JPG (2 of 3 missing)" in str(e.value)


def test_a_file_stays_whole_when_writing_fails(tmp_path):
    kept[:] = []
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
