"""Pictures of results: the sheet of samples, and the picture that --caption draws."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from unittest.mock import Mock

import matplotlib.figure
import numpy as np
import pytest
import torch
from helpers import colours
from PIL import Image

import scorer_cbr
import scores
from common import InputError
from support.captioner import caption_files
from support.pairs import Pair
from support.pictures import draw_curves, draw_pair, print_once, sample_sheet

README = Path(scores.__file__).with_name("README.md")


def test_attention_lies_over_its_pictures_in_multiples_of_uniform_attention():
    before = Image.new("RGB", (20, 10))
    after = Image.new("RGB", (10, 20))
    # Without a name of a picture: over both. IDC's two maps sum to 1 together.
    both = {"decoder": torch.full((2, 3), 1 / 6)}
    own = {side: torch.full((2, 3), 1 / 12, dtype=torch.bfloat16) for side in ("after", "before")}
    for maps, sides in ((both, (before, after)), (own, (after, before))):
        figure = matplotlib.figure.Figure()
        draw_pair(figure, (before, after), maps, "", "a caption")
        for axes, picture in zip(figure.axes[2:], sides, strict=True):
            below, levels = axes.images
            assert below.get_array().shape == (picture.height, picture.width, 3)
            assert np.allclose(levels.get_array(), 1, atol=0.01)
            assert levels.get_extent() == below.get_extent()


def test_the_pictures_of_a_run(drawings, prepared, tiny, tmp_path):
    run = tmp_path / "run"
    flags = ["--data_dir", str(prepared), "--out_dir", str(run), "--steps", "4"]
    scorer_cbr.main([*tiny, *flags])
    assert colours(run / "samples_test.png") > 1000
    assert colours(run / "curves.png") > 100


def test_a_photograph_is_drawn_small():
    photograph = Image.new("RGB", (4000, 3000))
    figure = matplotlib.figure.Figure()
    draw_pair(figure, (photograph, photograph), {"decoder": torch.full((2, 3), 1 / 6)}, "", "")
    for axes in figure.axes:
        height, width, _ = axes.images[0].get_array().shape
        assert (width, height) == (1000, 750)
        assert axes.images[-1].get_extent() == [0, 4000, 3000, 0]


@pytest.fixture
def log(tmp_path):
    """The log of a step and of a validation."""
    rows = [{"step": 1, "event": "train", "total": 2.0}, {"step": 1, "event": "eval", "CIDEr": 3.0}]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    print_once.cache_clear()
    return tmp_path / "log.jsonl"


@pytest.fixture
def locked(monkeypatch):
    """On Windows, no file can be replaced that another program has opened."""
    error = PermissionError(13, "Access is denied")
    monkeypatch.setattr(os, "replace", Mock(side_effect=error))


def test_a_picture_that_cannot_be_written_ends_no_run(drawing_notes, log, locked, capsys):
    curves = log.with_name("curves.png")
    sheet = log.with_name("samples.png")
    for _ in range(3):  # as at three validations
        draw_curves(log, curves)
    pair = Pair("1", "a", "b", ["c"])
    dataset = Mock(kinds={}, pairs=lambda split: [pair], pictures=lambda pair: [None, None])
    sample_sheet(dataset, "test", {"1": "c"}, {"1": {}}, {}, sheet)
    first, second = capsys.readouterr().out.splitlines()
    assert f"{curves} (PermissionError: Access is denied)" in first
    assert f"{sheet} (" in second


def test_a_picture_that_was_asked_for_is_missed(locked, tmp_path, capsys):
    for name in "ab":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    with pytest.raises(InputError, match="out.png .*Access is denied"):
        caption_files(lambda *files: ("it is gone", {}), files, str(tmp_path / "out.png"))
    assert capsys.readouterr().out == "it is gone\n"


def test_curves_need_no_latex(log, capsys):
    with matplotlib.rc_context({"text.usetex": True}):
        draw_curves(log, log.with_name("curves.png"))
    assert capsys.readouterr().out == ""
    assert colours(log.with_name("curves.png")) > 100


def test_the_backend_of_a_notebook_does_not_matter():
    code = "from support.files import run_main; run_main(lambda: __import__('matplotlib'))"
    environment = os.environ | {"MPLBACKEND": "of_a_notebook"}
    subprocess.run([sys.executable, "-c", code], cwd=README.parent, env=environment, check=True)


@pytest.mark.parametrize("count, each", [(2, 3), (12, 2), (30, 1)])
def test_every_kind_has_samples(count, each, drawings, monkeypatch, tmp_path):
    """With many kinds, each has fewer; "no change" is never left out."""
    pairs = [Pair(str(n), "a", "b", ["c"]) for n in range(4 * count)]
    kinds = {f"kind {k}": {pair.id for pair in pairs[k::count]} for k in range(count - 1)}
    kinds["no change"] = {pair.id for pair in pairs[count - 1 :: count]}
    dataset = Mock(kinds=kinds, pairs=lambda split: pairs)
    drawn = Counter()

    def draw_pair(figure, pictures, maps, above, *rest):
        kind, _ = above.split(":")
        drawn[kind] += 1
        figure.add_axes((0, 0, 1, 1))
        return 0

    monkeypatch.setattr("support.pictures.draw_pair", draw_pair)
    anything = defaultdict(dict)
    captions = {pair.id: "c" for pair in pairs}
    sample_sheet(dataset, "test", captions, anything, {}, tmp_path / "sheet.png")
    assert len(drawn) == min(count, 24) and drawn["no change"] == each
    assert set(drawn.values()) == {each}


def test_the_readmes_ten_seconds(drawings, tmp_path, monkeypatch, capsys):
    """The trained model in assets/ gives the caption that README shows for the pair there."""
    text = README.read_text(encoding="utf-8")
    command = r"python scorer_cbr.py (--caption assets.*?)\\\n +(--out \S+) +# (.*)\n +# (.*)"
    command, out, *says = re.search(command, text).groups()
    flags = [str(README.parent / x) if x.startswith("assets") else x for x in command.split()]
    monkeypatch.chdir(tmp_path)
    scorer_cbr.main([*flags, *out.split(), "--device", "cpu"])
    caption = capsys.readouterr().out.strip()
    assert says[1] == caption
    assert colours(tmp_path / "attention.png") > 1000


def test_the_guides_lines_caption_pairs_from_python(tmp_path, monkeypatch):
    run = tmp_path / "runs/scorer_cbr-pairs"
    run.mkdir(parents=True)
    shutil.copyfile(README.with_name("assets") / "scorer_cbr-mini.pt", run / "best.pt")
    for name in ("before", "after"):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{name}.png")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "guide"}
    guide = README.with_name("docs").joinpath("own_pictures.md").read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", guide, re.S):
        exec(code, names)
    assert names["caption"]
    heat = names["maps"]["attention"]
    assert heat.shape == (8, 8)
    assert heat.sum().item() == pytest.approx(1)
    pairs = names["captioner"].pairs([("before.png", "after.png")] * 2)
    assert [caption for caption, _ in pairs] == [names["caption"]] * 2
    assert colours("attention.png") > 100
