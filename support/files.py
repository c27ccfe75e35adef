"""Files: written completely or not at all, read with errors that say what to do. Licence: MIT."""

import contextlib
import io
import json
import os
import secrets
import signal
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor
from tqdm import tqdm

from common import InputError

TRAIN_FIRST = "train first, in a new folder, or name another checkpoint"


def progress(items=None, **options) -> tqdm:
    """tqdm for work that takes minutes. Without a terminal, it prints once a minute."""
    pause = 0.1 if sys.stderr.isatty() else 60
    return tqdm(items, mininterval=pause, maxinterval=max(pause, 10), **options)


def print_notes(*notes: str) -> None:
    for note in notes:
        print(f"note: {note}", flush=True)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename that file to `path` at the end. So `path` is
    the old file or a new one, and whole, whenever the process dies or another one writes."""
    path = path.resolve()  # a link stays, and the file where it leads is written
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the process id, which may be 1 in two containers that share a folder.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        try:
            os.replace(partial, path)
        except PermissionError:  # on Windows, while a virus scanner reads the old file
            time.sleep(1)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, completely or not at all."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def save_tensors(path: Path, state: dict) -> None:
    """Write plain dicts and tensors to a file, completely or not at all."""
    # torch.save would hide that the disk is full behind an error of its own.
    content = io.BytesIO()
    torch.save(state, content)
    with atomic_write(path) as partial:
        partial.write_bytes(content.getbuffer())


@contextlib.contextmanager
def file_errors(path: str | Path, remedy: str) -> Iterator[None]:
    """Turn any exception inside the `with` into an InputError with the file's path and a remedy."""
    try:
        yield
    except Exception as e:  # A broken file can raise anything.
        reason = textwrap.shorten(f"{type(e).__name__}: {e}", 120, placeholder=" ...")
        raise InputError(f"{path} cannot be used ({reason}); {remedy}") from e


def require_files(files: list[Path], lines: dict[Path, int] | None = None) -> None:
    """FileNotFoundError if any file is missing. It also says which file has the name in another
    case or Unicode form, and, from `lines`, which line of a table asks for it."""
    absent = [file for file in files if not file.exists()]
    if not absent:
        return
    named = []
    for file in absent[:10]:
        line = f" (line {lines[file]})" if lines else ""
        alike = [f", but {o.name}" for o in file.parent.glob("*") if same_name(o.name, file.name)]
        named.append(f"{file}{line}{''.join(alike)}")
    counts = f"{len(absent)} of {len(files)} missing"
    raise FileNotFoundError(f"there is no {', '.join(named)} ({counts})")


def same_name(one: str, other: str) -> bool:
    """Whether two names differ in case or Unicode form alone: .JPG; an umlaut written by a Mac."""
    forms = [unicodedata.normalize("NFC", name).casefold() for name in (one, other)]
    return forms[0] == forms[1]


def read_json(path: Path):
    """The parsed JSON of a file. InputError names a broken file."""
    content = path.read_bytes()
    with file_errors(path, "correct it, or fetch it again"):
        return json.loads(content)


def load_tensors(path: str | Path, remedy: str = TRAIN_FIRST, device: str = "cpu") -> dict:
    """What save_tensors wrote. InputError with the remedy if the file is missing or broken."""
    with file_errors(path, remedy):  # weights_only: nothing in the file is executed
        return torch.load(path, map_location=device, weights_only=True)


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], path: str | Path, remedy: str = TRAIN_FIRST
) -> nn.Module:
    """The model with these weights of the file `path`. InputError if they do not fit."""
    with file_errors(path, remedy):
        model.load_state_dict(weights)
    return model


def read_log(path: Path) -> list[dict]:
    """The rows of a log.jsonl."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # A killed process may leave half a line.
            rows.append(json.loads(line))
    return rows


# ---- main ----------------------------------------------------------------------------------------

kept: list[str] = []  # how an interrupted run goes on, for run_main to say


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main. Users' mistakes, file errors, a full GPU and infinite losses print one
    line and exit with code 2; Ctrl-C, SIGTERM and a closed terminal with code 130."""
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="replace")  # A terminal may lack characters of a caption.
        os.environ.pop("MPLBACKEND", None)  # A notebook's may name a module that is not installed.
    # Like Ctrl-C, these raise KeyboardInterrupt, so that partial files are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A closed terminal; nohup ignores it, and Windows does not have it.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        main()
        return
    except KeyboardInterrupt:
        code = 130
        message = "interrupted"
    except torch.OutOfMemoryError as e:
        code = 2
        message = f"error: {e}; lower --batch_size or --eval_batch, or give --features file"
    except (InputError, OSError, FloatingPointError) as e:
        code = 2
        message = f"error: {e}"
    print("; ".join([" ".join(message.split()), *kept]), file=sys.stderr)
    sys.exit(code)
