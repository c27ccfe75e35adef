"""Tests of what people copy: each copy runs with the files that README, docs/extending.md and a
file's own docstring name, and with nothing else."""

import ast
import graphlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import METHODS, train_lines

import common

ROOT = Path(common.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXTENDING = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FOR_TRAINING = ("scorer_cbr.py", "matching.py", "common.py", "data.py", "scores.py", "support")
NOT_FOR_A_MODEL = ("data", "scores", "support", "h5py", "spacy", "open_clip", "pycocoevalcap")


def copy_files(folder, *names):
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name == "support":
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)


def python(folder, *call):
    """Runs Python in a folder, which knows no files of ours but those that are there."""
    call = [sys.executable, *map(str, call)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(call, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_method_and_common_are_enough_to_use_its_model(method, tmp_path, monkeypatch):
    """README's loop, with README's changes for the other methods. The method's file is imported
    anew from a folder without the other files, except those that its docstring says to copy."""
    name = method.__name__
    model = METHODS[method].model.__name__
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    loop = next(block for block in blocks if "as Model" in block)
    loop = re.sub(r"from \w+ import \w+ as", f"from {name} import {model} as", loop)
    loop = loop.replace("1024, 14, 14", "8, 2, 3")
    loop = loop.replace('PRESETS["pairs"]', f'PRESETS["pairs"] | {METHODS[method].alone}')
    if not hasattr(METHODS[method].model, "clamp_scales"):
        loop = re.sub(r"    model.clamp_scales\(\).*\n", "", loop)
    assert f"import {model} as" in loop

    copy_files(tmp_path, f"{name}.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    others = [other.__name__ for other in METHODS if other is not method]
    to_copy, _, _ = method.__doc__.partition("To copy: ")[2].partition(";")
    if "matching.py" not in to_copy:
        others.append("matching")
    for missing in (*NOT_FOR_A_MODEL, *others):
        monkeypatch.setitem(sys.modules, missing, None)  # importing it fails
    monkeypatch.delitem(sys.modules, name)
    names = {}
    exec(loop, names)
    assert sys.modules[name].__file__ == str(tmp_path / f"{name}.py")
    assert names["ids"].shape == (4, 24)
    assert names["losses"]["caption"].isfinite()


def test_importing_a_method_loads_neither_data_nor_support(tmp_path):
    copy_files(tmp_path, *FOR_TRAINING)
    code = "import scorer_cbr, sys; print({'data', 'scores', 'support'} & sys.modules.keys())"
    assert python(tmp_path, "-c", code) == "set()\n"


MODULES = {file.stem: file for file in ROOT.glob("*.py")}
for file in (ROOT / "support").rglob("*.py"):
    *folders, stem = file.relative_to(ROOT).with_suffix("").parts
    MODULES[".".join(folders if stem == "__init__" else [*folders, stem])] = file
del MODULES["support"]


def imported_by(file):
    """The modules of ours that a file imports, also inside functions: scores, support.files ..."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & MODULES.keys()


def test_support_stands_on_common_alone():
    """But report needs scores. No two modules need each other, directly or through others."""
    graph = {name: imported_by(file) for name, file in MODULES.items()}
    for name, imported in graph.items():
        may_import = {"common", "scores"} if name == "support.report" else {"common"}
        if name.startswith("support."):
            assert {other for other in imported if "support." not in other} <= may_import, name
    graphlib.TopologicalSorter(graph).prepare()  # CycleError if there is a circle


def test_test_files_import_no_other_test_file():
    """What several of them use stands in conftest.py or helpers.py, so that each runs alone."""
    for file in ROOT.glob("tests/*.py"):
        code = file.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) test_", code, re.M), file.name


@pytest.mark.parametrize("package", [False, True])
def test_a_copy_trains(package, prepared, tmp_path):
    """In a folder of its own, and as a package, for which docs/extending.md has a command."""
    flags = "--dataset clevr_change --device cpu --dim 16 --heads 2 --batch_size 3 --steps 2"
    flags = [*flags.split(), "--data_dir", prepared, "--out_dir", tmp_path / "run"]
    folder = tmp_path / "copies"
    copy_files(folder, *FOR_TRAINING)
    if package:
        (command,) = re.findall(r"^    (perl .*)$", EXTENDING, re.M)
        subprocess.run(command, shell=True, cwd=folder, check=True)
        python(tmp_path, "-m", "copies.scorer_cbr", *flags, "--split", "none", "--log_every", 1)
    else:
        python(folder, "scorer_cbr.py", *flags, "--split", "none", "--log_every", 1)
    assert len(train_lines(tmp_path / "run")) == 2


def test_a_copy_of_three_files_is_a_scorer(tmp_path):
    """By command and from Python, where what only loaders and pictures need is missing."""
    copy_files(tmp_path, "scores.py", "common.py", "support/files.py")
    for name in ("h5py", "torchvision", "PIL", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")  # found first
    rows = [{"image_id": 1, "caption": "a car left"}, {"image_id": 2, "caption": "no change"}]
    (tmp_path / "captions.json").write_text(json.dumps(rows))
    rows[1] = {"image_id": 2, "caption": "no change today"}
    (tmp_path / "references.json").write_text(json.dumps({"annotations": rows}))
    files = "--predictions captions.json --references references.json"
    table = python(tmp_path, "scores.py", *files.split())
    code = "import scores; print(scores.score({'1': 'a'}, {'1': ['a']}, quick=True))"
    assert "'BLEU-1': 100.0" in python(tmp_path, "-c", code)
    # All 5 words match, and the references have 6.
    assert f"{100 * math.exp(1 - 6 / 5):.2f}" in table
