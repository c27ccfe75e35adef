"""Tests of README.md and the pages in docs/: links lead somewhere, pages, lines and cells are
short, and what the pages name exists: flags, code, and names in it."""

import importlib
import inspect
import re
import shlex
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import CAPTION, WORDS, C, H, L, W, pictures

import common
import data
import dirl_ccr
from support import extractors, pairs, releases
from support.run import make_parser

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("scorer_cbr", "dirl_ccr", "rdd_acr", "cheers", "idc_pretrain")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXERCISES = (ROOT / "docs/exercises.md").read_text(encoding="utf-8")


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What links to the headings of a page have behind their #, as GitHub makes it."""
    found = set()
    for heading in re.findall(r"^#+ (.*)", text_of(page), re.M):
        found.add(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_and_cells_are_short(page):
    lines = page.read_text(encoding="utf-8").split("<details><summary>BibTeX")[0].splitlines()
    assert len(lines) <= (120 if page.name == "README.md" else 250)
    assert not [line for line in lines if len(line) > 120 and line[0] not in "| "]  # text
    for row in re.findall(r"^\|.*", text_of(page), re.M):
        for cell in row.split("|"):
            assert len(cell.split()) <= 25, cell


def test_commands_have_flags_of_their_methods():
    """Every call of a method on our pages is one that its command line accepts."""
    commands = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for script, flags in re.findall(r"python (\w+)\.py( [^`#\n]*)?", text):
            if script in METHODS:
                commands.append((script, re.sub(r"\$(w|seed)\b", "1", flags)))
    assert len(commands) > 20
    for script, flags in commands:
        method = importlib.import_module(script)
        parser = make_parser(method.Config, method.PRESETS, variants=True)
        parser.parse_args(shlex.split(flags))  # exits on a flag or value that is unknown


# docs/released.md names these modules, or names in them without their module.
METHOD_OF = {"SCORER+CBR": "scorer_cbr", "DIRL+CCR": "dirl_ccr", "IDC": "idc_pretrain"}
ROOMS = (common, data, pairs, extractors, releases)


def names_of_ours() -> list[tuple[str, str]]:
    """(module of the method, name) for each name in the third column of docs/released.md."""
    found = []
    for section in (ROOT / "docs/released.md").read_text(encoding="utf-8").split("<summary>")[1:]:
        method = METHOD_OF[section.partition("</summary>")[0]]
        for row in re.findall(r"^\| .*", section, re.M):
            owner = ""
            for name in row.split("|")[3].split(","):
                name = name.partition("=")[0].strip()  # of x=1, the field x
                if name.startswith("."):  # ".key" behind "BackwardReasoning.query"
                    name = owner + name
                owner = name.partition(".")[0]
                if name != "ours":  # the table's head
                    found.append((method, name))
    return found


def has(owner, name: str) -> bool:
    """Whether a module or class has a name. A class also has what its methods set on self."""
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    field = rf'^    {name}: |self\.{name}\b.* = |register_\w+\("{name}"'
    return re.search(field, inspect.getsource(owner), re.M) is not None


@pytest.mark.parametrize(("method", "name"), sorted(set(names_of_ours())))
def test_released_page_names_what_exists(method, name):
    if "/" in name:
        assert (ROOT / name).exists()
        return
    module = importlib.import_module(method)
    owners = [module, module.Config, *ROOMS]
    *outer, name = name.split(".")
    if outer:
        modules = {room.__name__.rpartition(".")[2]: room for room in ROOMS}
        for other in METHODS:
            modules[other] = importlib.import_module(other)
        if outer[0] in modules:
            owners = [modules[outer[0]]]
        else:
            owners = [getattr(place, outer[0]) for place in owners if hasattr(place, outer[0])]
    assert any(has(owner, name) for owner in owners)


def test_the_answers_of_the_exercises_run(tmp_path, monkeypatch, capsys):
    """Their blocks of code, on a small mini and untrained models."""
    monkeypatch.chdir(tmp_path)
    data.main(["mini", "--scenes", "20", "--device", "cpu"])
    dataset = data.load("mini", "data/mini")
    cfg = dirl_ccr.Config(**dirl_ccr.PRESETS["mini"], data_dir="data/mini")
    model = dirl_ccr.DIRL(cfg, len(dataset.vocab), dataset.grid, dataset.max_len)
    for run in ("decorrelate", "dirl_ccr-mini"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        state = {**dataset.state(), "model": model.state_dict(), "config": vars(cfg)}
        torch.save(state, tmp_path / "runs" / run / "best.pt")
    names = {}
    capsys.readouterr()
    for code in re.findall(r"```python\n(.*?)```", EXERCISES, re.S):
        exec(code, names)
    printed = re.findall(r"tensor\((.*)\)", capsys.readouterr().out)
    variance, *channels, warm, cold = map(float, printed)
    assert variance > 0
    own, strangers = channels[:2]
    assert own > strangers
    assert channels[2:] == [own, strangers]  # exercises 4 and 6 have the same model here
    assert warm > cold


def test_the_exercise_without_positions_runs():
    """Its answer stands in the place of two lines of DIRL.forward."""
    new = re.search(r"^    position = .*\n(    .*\n)+", EXERCISES, re.M)[0]
    new = textwrap.indent(textwrap.dedent(new), " " * 12)
    _, old = new.replace(" - position", "").split("\n", 1)
    source = Path(dirl_ccr.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1
    copy = ModuleType("copy_of_dirl")
    sys.modules[copy.__name__] = copy  # dataclass looks there
    exec(source.replace(old, new), vars(copy))
    cfg = copy.Config(dim=16, heads=2, use_coords=False)
    model = copy.DIRL(cfg, WORDS, (C, H, W), L)
    assert model(*pictures().float(), CAPTION)["dirl"].isfinite()
