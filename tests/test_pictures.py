"""Pictures of results: the sheet of samples and the picture of --caption."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import data
import scorer_cbr

SIDE = data.SIDE
README = Path(data.__file__).with_name("README.md")


class Pictured:
    """A data set of one pair that is shown twice as "drop" and once as "add"."""

    name = "pets"
    kinds = {"drop": {"1"}, "add": {"1"}}
    vocab = data.Vocab.of(["a dog left, it is gone"])
    paths = {"a": SimpleNamespace(exists=lambda: True), "b": SimpleNamespace(exists=lambda: False)}

    def examples(self, split, count):
        captions = ["a dog left", "it is gone."]
        pair = SimpleNamespace(id="1", captions=captions, before="a", after="b")
        return {"drop": [pair, pair], "add": [pair]}

    def images(self, pair):
        return Image.new("RGB", (20, 10), "red"), Image.new("RGB", (20, 10), "blue")


@pytest.fixture
def judged(monkeypatch):
    """A caption is right if it is "it is gone", and nobody can tell about "hm"."""

    def is_right(dataset, pair, caption):
        return None if caption == "hm" else caption == "it is gone"

    monkeypatch.setattr(data, "is_right", is_right)
    monkeypatch.setattr(data, "examples", Pictured.examples)
    monkeypatch.setattr(data, "images_of", Pictured.images)


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def test_levels_are_multiples_of_uniform_attention():
    uniform = torch.full((2, 3), 1 / 6, dtype=torch.bfloat16)
    peaked = torch.zeros(3, 4)
    peaked[1, 2] = 1  # 12 times the uniform weight
    maps = {"decoder": uniform, "objects": peaked, "actions": peaked / 2}
    levels = data.attention_levels(maps)
    assert torch.allclose(levels["decoder"], torch.ones(2, 3), atol=0.01)
    assert levels["objects"][1, 2] == 8 and levels["objects"].sum() == 8  # saturated
    assert levels["actions"][1, 2] == 6
    # IDC's two maps sum to 1 together.
    both = torch.full((2, 3), 1 / 12)
    levels = data.attention_levels({"before": both, "after": both})
    assert torch.allclose(levels["before"], torch.ones(2, 3))
    assert torch.allclose(levels["after"], torch.ones(2, 3))


def test_maps_lie_over_both_pictures_or_over_their_own():
    before, after = Image.new("RGB", (20, 10)), Image.new("RGB", (10, 20))
    heat = torch.ones(2, 3) / 6
    panels = data.pair_panels(before, after, {"decoder": heat, "objects": heat})
    titles = ["before", "after", "decoder, before", "decoder, after"]
    titles += ["objects, before", "objects, after"]
    assert [panel.title for panel in panels] == titles
    assert [panel.picture for panel in panels] == [before, after] * 3
    assert [panel.levels is None for panel in panels] == [True, True] + [False] * 4
    panels = data.pair_panels(before, after, {"after": heat, "before": heat / 2})
    titles = ["before", "after", "attention, after", "attention, before"]
    assert [panel.title for panel in panels] == titles
    assert [panel.picture for panel in panels] == [before, after, after, before]
    assert torch.equal(panels[2].levels, 2 * panels[3].levels)


def test_long_captions_are_shortened():
    lines = data.text_lines("a bird with a long tail " * 20, 500, "red")
    characters = 500 / data.CHARACTER
    assert len(lines) == 2 and lines[1][0].endswith(" ...") and lines[0][1] == "red"
    assert all(0.7 * characters < len(line) <= characters for line, _ in lines)
    assert data.text_lines("", 500, "red") == []


def test_caption_picture_keeps_proportions_and_shows_attention(tmp_path):
    white, wide = Image.new("RGB", (100, 100), "white"), Image.new("RGB", (40, 10), "black")
    heat = torch.zeros(4, 4)
    heat[0, 0] = 1
    path = tmp_path / "out.png"
    data.caption_picture(white, wide, {"attention": heat}, "costs $1 and $2", path)
    page = pixels(path)
    assert 900 < page.shape[1] < 1000 and 300 < page.shape[0] < 400

    def panel(n):
        """The n-th picture's 224 x 224 pixels."""
        top = 2 * data.MARGIN + 4 * data.LINE
        left = data.MARGIN + n * (224 + data.GAP)
        return page[top : top + 224, left : left + 224]

    assert (panel(0) == 255).all()
    black = (panel(1) == 0).all(-1)
    assert black[:56].all() and not black[57:].any()  # 224 x 56
    attended = panel(2)
    red, _, blue = attended[20, 20]
    assert 1.5 * blue < red < 255  # the picture shines through
    assert (attended[120:] == 255).all()  # nothing where the weight is small
    dark = panel(3)[:56]
    assert dark[5, 20, 0] > 100 and (dark[:, 120:] == 0).all()

    uniform = torch.ones(4, 4) / 16
    data.caption_picture(white, wide, {"attention": uniform}, "the same", path)
    page = pixels(path)
    assert (panel(2) == 255).all()  # "no change" does not glow


@pytest.mark.parametrize("ending", ["png", "JPG", "jpeg", "pdf"])
def test_caption_picture_in_every_format(tmp_path, ending):
    maps = {name: torch.ones(2, 3) / 6 for name in ("decoder", "objects", "actions")}
    tall = Image.new("RGB", (10, 30))
    path = tmp_path / f"out.{ending}"
    data.caption_picture(tall, tall, maps, "a caption " * 50, path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    start = path.read_bytes()[:4]
    signatures = {"png": b"\x89PNG", "pdf": b"%PDF"}
    assert start == signatures.get(ending, b"\xff\xd8\xff\xe0")
    if ending != "pdf":
        assert Image.open(path).height > 2 * 224  # eight pictures in two rows


def test_sample_shows_reference_caption_and_verdict(judged):
    dataset = Pictured()
    pair = dataset.examples("test", 3)["add"][0]
    maps = {name: torch.eye(2) / 2 for name in ("decoder", "objects")}
    right = data.sample(dataset, pair, "add", "it is gone", maps, ["entities: dog, cat"])
    assert right.lines == [
        ("reference: it is gone.", "black"),  # the one that the caption equals
        ("✓ generated: it is gone", data.VERDICTS[True][1]),
        ("entities: dog, cat", "grey"),
    ]
    titles = ["add", "", "decoder, before", "decoder, after"]  # only the first map
    assert [panel.title for panel in right.panels] == titles
    wrong = data.sample(dataset, pair, "add", "it is", maps)
    assert wrong.lines == [
        ("reference: a dog left", "black"),
        ("✗ generated: it is", data.VERDICTS[False][1]),
    ]
    unknown = data.sample(dataset, pair, "add", "hm", maps)
    assert unknown.lines[1] == ("generated: hm", "black")


def test_sample_sheet_is_a_readable_page(drawings, judged, tmp_path, capsys):
    path = tmp_path / "samples.png"
    maps = {"1": {"attention": torch.eye(2) / 2}}
    data.sample_sheet(Pictured(), "test", {"1": "it is gone"}, maps, {}, path)
    page = pixels(path)
    height, width = page.shape[:2]
    rows = 2  # three pairs in two columns
    assert 1050 < width < 1150 and rows * SIDE / 2 < height < rows * SIDE + 150
    red, green, blue = page[..., 0], page[..., 1], page[..., 2]
    assert ((green > red + 60) & (green > blue + 60)).sum() > 200  # the caption's colour
    printed = capsys.readouterr().out
    assert "samples on grey: 3 pictures are not there" in printed
    data.sample_sheet(Pictured(), "test", {"1": "it is gone"}, maps, {"1": ["a", "b"]}, path)
    assert pixels(path).shape[0] == height + rows * 2 * data.LINE


def test_without_matplotlib_there_is_a_line(drawings, judged, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = Image.new("RGB", (20, 10))
    maps = {"attention": torch.eye(2) / 2}
    data.caption_picture(picture, picture, maps, "it left", tmp_path / "out.png")
    data.sample_sheet(Pictured(), "test", {"1": "it"}, {"1": maps}, {}, tmp_path / "samples.png")
    printed = capsys.readouterr().out
    assert "out.png is not drawn, as matplotlib is missing" in printed and "samples.png" in printed
    assert not list(tmp_path.iterdir())


def test_samples_without_pictures_are_grey(prepared):
    dataset = data.load("clevr_change", prepared)
    pair, other = dataset.pairs("test")[:2]
    dataset.paths[pair.after].unlink()
    assert pair in data.examples(dataset, "test", 1)["color"]
    before, after = data.images_of(dataset, pair)
    assert np.array_equal(before, data.read_image(dataset.paths[pair.before]))
    assert after.getextrema() == ((128, 128),) * 3
    dataset.paths[other.after].write_bytes(b"no picture")
    with pytest.raises(ValueError, match="is not a readable image"):
        data.images_of(dataset, other)


def test_the_pictures_of_a_run(drawings, prepared, tiny, tmp_path):
    run = tmp_path / "run"
    flags = ["--data_dir", str(prepared), "--out_dir", str(run), "--steps", "4"]
    scorer_cbr.main([*tiny, *flags])
    for name in ("samples.png", "curves.png"):
        assert pixels(run / name).shape[1] >= 1000


def test_the_readmes_ten_seconds(drawings, tmp_path, monkeypatch, capsys):
    """The trained model in assets/ writes what README says of the pair there."""
    text = README.read_text(encoding="utf-8")
    command = r"python scorer_cbr.py (--caption assets.*?)\\\n +(--out \S+) +# (.*)\n +# (.*)"
    command, out, *says = re.search(command, text).groups()
    flags = [str(README.parent / x) if x.startswith("assets") else x for x in command.split()]
    monkeypatch.chdir(tmp_path)
    scorer_cbr.main([*flags, *out.split(), "--device", "cpu"])
    caption = capsys.readouterr().out.strip()
    assert " ".join(says) == f"ten seconds: {caption}"
    assert (tmp_path / "attention.png").stat().st_size > 1000
