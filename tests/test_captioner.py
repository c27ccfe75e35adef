"""Captions of any two pictures, and of a table of pairs."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import colours
from PIL import Image

from common import END, START, InputError
from support.captioner import Captioner, caption_files
from support.extractors import Extractor, preprocess_imagenet, read_image
from support.text import SPECIAL


class Brightness(torch.nn.Module):
    """Says whether "after" is brighter than "before", and looks at its brightest cell."""

    cfg = SimpleNamespace(device="cpu")

    def generate(self, before, after):
        brighter = (after - before).mean((1, 2, 3)) > 0
        word = torch.where(brighter, 4, 5)
        start = torch.full_like(word, START)
        end = torch.full_like(word, END)
        return torch.stack([start, word, end], 1)

    def attention_map(self, before, after, ids):
        return {"attention": after.mean(1)}


@pytest.fixture
def captioner(tmp_path, monkeypatch):
    """dark.png, bright.png, and a Captioner whose extractor takes the mean of each cell."""

    class Mean(Extractor):
        def __init__(self, name, device):
            self.preprocess = lambda image: preprocess_imagenet(image, 64)
            self.device = device
            self.net = lambda x: x.unflatten(2, (8, 8)).unflatten(4, (8, 8)).mean((3, 5))

    monkeypatch.setattr("support.captioner.Extractor", Mean)
    files = []
    for name, color in (("dark", "black"), ("bright", "white")):
        files.append(tmp_path / f"{name}.png")
        Image.new("RGB", (40, 20), color).save(files[-1])
    state = {"vocab": [*SPECIAL, "brighter", "darker ."], "extractor": "mean"}
    return *files, Captioner(Brightness(), state)


def test_two_pictures_are_captioned(captioner, tmp_path, capsys):
    dark, bright, captioner = captioner
    caption_files(captioner, [dark, bright], None)
    caption_files(captioner, [bright, dark], str(tmp_path / "new/folder/out.jpg"))
    assert capsys.readouterr().out == "brighter\ndarker.\n"
    with Image.open(tmp_path / "new/folder/out.jpg") as picture:
        assert picture.format == "JPEG"
    assert colours(tmp_path / "new/folder/out.jpg") > 100
    with pytest.raises(InputError, match="--out"):  # it replaces no picture of the user
        caption_files(captioner, [dark, bright], str(bright))
    with pytest.raises(InputError, match=r"\.csv"):
        caption_files(captioner, [dark], None)
    with pytest.raises(InputError, match=r"x\.csv.*\.png"):
        caption_files(captioner, [dark, bright], str(tmp_path / "none/x.csv"))
    assert not (tmp_path / "none").exists()
    assert capsys.readouterr().out == ""  # all before the first caption
    images = [read_image(bright), read_image(dark)]  # from Python: pictures in memory
    caption, maps = captioner(*images)
    assert caption == "darker." and maps["attention"].shape == (8, 8)
    with Image.open(dark) as opened:  # one picture of several pairs, read by several threads
        results = captioner.pairs([(opened, bright), (bright, opened)] * 10)
        assert [caption for caption, _ in results] == ["brighter", "darker."] * 10


def test_each_pair_gets_its_own_row_of_a_further_input(captioner):
    dark, bright, captioner = captioner
    rows = torch.tensor([[2, 4, 3], [2, 5, 3], [2, 5, 3], [2, 4, 3], [2, 5, 3]])
    captioner.inputs = lambda model, state, pictures: rows
    captioner.model.generate = lambda before, after, rows: rows
    captioner.model.attention_map = lambda before, after, ids, rows: {"rows": rows}
    results = list(captioner.pairs([(dark, bright)] * 5, batch=2))
    expected = ["brighter", "darker.", "darker.", "brighter", "darker."]
    assert [caption for caption, _ in results] == expected
    assert torch.equal(torch.stack([maps["rows"] for _, maps in results]), rows)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("separator", [",", ";"])
def test_the_pairs_of_a_table_are_captioned(separator, mark, captioner, tmp_path, capsys):
    """The table's own columns stay as they are, and so do its separator and byte order mark."""
    captioner = captioner[2]
    table = tmp_path / "pairs.csv"
    text = """Before~ After~Site~~captions
./dark.png~bright.png~7
~~~~
bright.png~dark.png~"a, b; c"~x~nan
dark.png~bright.png~~~
"""
    captioned = """Before~After~Site~~captions~caption
./dark.png~bright.png~7~~~brighter
bright.png~dark.png~"a, b; c"~x~nan~darker.
dark.png~bright.png~~~~brighter
"""
    table.write_text(mark + text.replace("~", separator), encoding="utf-8")
    out = tmp_path / "new/out.csv"
    caption_files(captioner, [str(table)], str(out))
    assert out.read_text(encoding="utf-8") == mark + captioned.replace("~", separator)
    first = "dark.png bright.png: brighter"
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"./{first}", "bright.png dark.png: darker.", first]
    with pytest.raises(InputError, match="column caption"):  # which is not overwritten
        caption_files(captioner, [str(out)], str(tmp_path / "more.csv"))


def test_a_table_has_the_captions_that_were_made_before_an_interruption(tmp_path, capsys):
    """They stay: a table that exists is never replaced."""
    rows = ["before,after,captions"]
    for name in "abcd":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
        rows.append(f"{name}.png,a.png,is {name} gone|{name} left")
    table = tmp_path / "pairs.csv"
    table.write_text("\n".join(rows))
    out = tmp_path / "out.csv"

    def captions(pairs):
        yield "", {}
        yield "gone", {}
        assert len(out.read_text().splitlines()) == 3  # it is there, though the file is open
        raise KeyboardInterrupt

    captioner = Mock(pairs=captions)
    with pytest.raises(KeyboardInterrupt):
        caption_files(captioner, [str(table)], str(out))
    lines = out.read_text().splitlines()
    assert lines == ["before,after,captions,caption", f"{rows[1]},", f"{rows[2]},gone"]
    with pytest.raises(InputError, match="out.csv exists"):
        caption_files(captioner, [str(table)], str(out))
    assert out.read_text().splitlines() == lines
