"""Tests of README.md and the pages in docs/: links lead somewhere, pages and cells are short, and
flags exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from support.run import make_parser

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("scorer_cbr", "dirl_ccr", "rdd_acr", "cheers", "idc_pretrain")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 250
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
