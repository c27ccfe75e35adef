"""Fixtures that several test files use. Functions and constants are in helpers.py."""

import contextlib
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from helpers import METHODS, write_features, write_release

import scores


@pytest.fixture(autouse=True)
def without_java(request, monkeypatch):
    """Java takes seconds to start, twice for each evaluation. Tests of test_scores.py that need it
    ask for the fixture `java`."""
    if "java" not in request.fixturenames:
        monkeypatch.setattr(scores, "java_works", lambda: False)


@pytest.fixture
def without_spacy(monkeypatch):
    """Importing spaCy fails, as if it were not installed."""
    for name in ("spacy", *sys.modules):
        if name.split(".")[0] == "spacy":
            monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def drawings():
    """Requested by tests that look at the pictures of a run."""


@pytest.fixture
def drawing_notes():
    """Requested by tests of pictures that cannot be drawn, for which a run prints a note."""


@pytest.fixture(autouse=True)
def without_drawing_notes(request, monkeypatch):
    """Elsewhere, a bug in drawing shows its traceback."""
    if "drawing_notes" not in request.fixturenames:
        monkeypatch.setattr("support.pictures.or_a_note", lambda path: contextlib.nullcontext())


@pytest.fixture(autouse=True)
def without_pictures(request, monkeypatch):
    """Each picture takes seconds to draw, so runs write empty files unless a test requests
    `drawings`."""
    if "drawings" not in request.fixturenames:
        monkeypatch.setattr("support.pictures.sample_sheet", lambda *args: args[-1].touch())
        monkeypatch.setattr("support.run.draw_curves", lambda log, picture: picture.touch())


@pytest.fixture
def release(tmp_path):
    """The folder of a release that is not prepared."""
    write_release(tmp_path / "clevr")
    return tmp_path / "clevr"


@pytest.fixture
def prepared(release):
    """The same folder with random features."""
    write_features("clevr_change", release)
    return release


@pytest.fixture
def tiny():
    """Flags that make any method small and quick on `prepared`."""
    flags = "--dataset clevr_change --device cpu --dim 16 --heads 2 --batch_size 3"
    return [*flags.split(), *"--eval_every 4 --log_every 2 --steps 8".split()]


@pytest.fixture(params=METHODS, ids=lambda method: method.__name__)
def method(request):
    return request.param
