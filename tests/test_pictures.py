"""Pictures of results: the sheet of samples, and the picture that --caption draws."""

import re
from pathlib import Path

import matplotlib.figure
import numpy as np
import torch
from conftest import colours
from PIL import Image

import scorer_cbr
import scores

README = Path(scores.__file__).with_name("README.md")


def test_attention_lies_over_its_pictures_in_multiples_of_uniform_attention():
    before = Image.new("RGB", (20, 10))
    after = Image.new("RGB", (10, 20))
    # Without a name of a picture: over both. IDC's two maps sum to 1 together.
    both = {"decoder": torch.full((2, 3), 1 / 6)}
    own = {side: torch.full((2, 3), 1 / 12, dtype=torch.bfloat16) for side in ("after", "before")}
    for maps, sides in ((both, (before, after)), (own, (after, before))):
        figure = matplotlib.figure.Figure()
        scores.draw_pair(figure, (before, after), maps, "", "a caption")
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
