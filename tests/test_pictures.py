"""Pictures of results: the sheet of samples, and the picture that --caption draws."""

import re
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

import data
import scorer_cbr

README = Path(data.__file__).with_name("README.md")
ODD = "it costs $1, $x_1$ and \\frac{1}{2}; a_b & 50% #1\nand a new line\r\n\tand a tab"


@pytest.fixture
def pets(monkeypatch, tmp_path):
    """A data set of one pair, whose second picture is missing. Only the caption "it is gone" is
    right, and "hm" cannot be judged."""

    def is_right(dataset, pair, caption):
        return None if caption == "hm" else caption == "it is gone"

    monkeypatch.setattr(data, "is_right", is_right)
    Image.new("RGB", (20, 10), "red").save(tmp_path / "a.png")
    pair = data.Pair("1", "a", "b", ["a dog left", "it is gone."])
    return SimpleNamespace(
        name="pets",
        kinds={"drop": {"1"}, "$a_1$": {"1"}, "never": {"2"}},
        vocab=data.Vocab.from_captions(["a dog left, it is gone"]),
        paths={"a": tmp_path / "a.png", "b": tmp_path / "b.png"},
        pairs=lambda split: [pair],
    )


def picture_size(path):
    with Image.open(path) as picture:
        return picture.size


def test_levels_are_multiples_of_uniform_attention():
    black = Image.new("RGB", (20, 10))
    white = Image.new("RGB", (10, 20), "white")
    uniform = torch.full((2, 3), 1 / 6, dtype=torch.bfloat16)
    peaked = torch.zeros(3, 4)
    peaked[1, 2] = 1  # 12 times the uniform weight
    maps = {"decoder": uniform, "objects": peaked, "actions": peaked / 2}
    panels = data.pair_panels(black, white, maps)
    assert [panel.picture for panel in panels] == [black, white] * 4
    decoder, _, objects, _, actions, _ = panels[2:]
    assert torch.allclose(decoder.levels, torch.ones(2, 3), atol=0.01)
    assert objects.levels[1, 2] == objects.levels.sum() == data.SATURATED
    assert actions.levels[1, 2] == 6
    # IDC's two maps lie over their own pictures, and sum to 1 together.
    both = torch.full((2, 3), 1 / 12)
    after, before = data.pair_panels(black, white, {"after": both, "before": both})[2:]
    assert (before.picture, after.picture) == (black, white)
    assert torch.allclose(before.levels, torch.ones(2, 3))
    assert torch.allclose(after.levels, torch.ones(2, 3))


@pytest.mark.parametrize("ending", ["png", "JPG", "pdf"])
def test_caption_picture_in_every_format(tmp_path, ending):
    maps = {name: torch.ones(2, 3) / 6 for name in ("decoder", "objects", "actions")}
    tall = Image.new("RGB", (10, 30))
    path = tmp_path / f"out.{ending}"
    data.caption_picture(tall, tall, maps, "a caption", path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    signatures = {"png": b"\x89PNG", "pdf": b"%PDF"}
    assert path.read_bytes()[:4] == signatures.get(ending, b"\xff\xd8\xff\xe0")


@pytest.mark.parametrize("caption", [ODD, "word " * 200, "x" * 1000, ""])
def test_odd_captions_and_pictures_are_drawn(tmp_path, caption):
    before = Image.new("RGB", (8, 800))
    after = Image.new("RGB", (800, 8))
    path = tmp_path / "out.png"
    with matplotlib.rc_context({"text.usetex": True, "font.size": 30}):  # the user's own style
        data.caption_picture(before, after, {"attention": torch.eye(2) / 2}, caption, path)
    width, height = picture_size(path)
    assert height < width < 6 * data.SIDE * data.DOTS


def test_sample_shows_reference_caption_and_verdict(pets):
    (pair,) = pets.pairs("test")
    maps = {name: torch.eye(2) / 2 for name in ("decoder", "objects")}
    for caption, reference, shown, hidden in (
        ("it is gone", "it is gone.", "✓", "✗"),  # the reference that the caption equals
        ("it is", "a dog left", "✗", "✓"),
        ("hm", "a dog left", "hm", "✓"),
    ):
        drawing = data.sample(pets, pair, "drop", caption, maps, ["entities: dog, cat"])
        texts = [text for text, _ in drawing.lines]
        assert reference in texts[0]
        assert shown in texts[1] and hidden not in texts[1]
        assert texts[2] == "entities: dog, cat"


def test_a_sheet_without_kinds_shows_the_first_pairs(drawings, pets, tmp_path):
    pets.kinds = {}
    maps = {"1": {"attention": torch.eye(2) / 2}}
    data.sample_sheet(pets, "test", {"1": ODD}, maps, {"1": ["a", ODD]}, tmp_path / "samples.png")
    assert picture_size(tmp_path / "samples.png")[0] > 500


def test_samples_without_pictures_are_grey(prepared):
    dataset = data.load("clevr_change", prepared)
    pair, other = dataset.pairs("test")[:2]
    dataset.paths[pair.after].unlink()
    before, after = data.images_of(dataset, pair)
    assert np.array_equal(before, data.read_image(dataset.paths[pair.before]))
    assert after.getextrema() == ((128, 128),) * 3
    single = data.Pair("1", pair.before, None, ["a"])
    assert data.images_of(dataset, single)[1].getextrema() == ((128, 128),) * 3
    dataset.paths[other.after].write_bytes(b"no picture")
    with pytest.raises(data.InputError, match=other.after):
        data.images_of(dataset, other)


def test_the_pictures_of_a_run(drawings, prepared, tiny, tmp_path):
    run = tmp_path / "run"
    flags = ["--data_dir", str(prepared), "--out_dir", str(run), "--steps", "4"]
    scorer_cbr.main([*tiny, *flags])
    for name in ("samples.png", "curves.png"):
        assert picture_size(run / name)[0] > 500


def test_the_readmes_ten_seconds(drawings, tmp_path, monkeypatch, capsys):
    """The trained model in assets/ gives the caption that README shows for the pair there."""
    text = README.read_text(encoding="utf-8")
    command = r"python scorer_cbr.py (--caption assets.*?)\\\n +(--out \S+) +# (.*)\n +# (.*)"
    command, out, *says = re.search(command, text).groups()
    flags = [str(README.parent / x) if x.startswith("assets") else x for x in command.split()]
    monkeypatch.chdir(tmp_path)
    scorer_cbr.main([*flags, *out.split(), "--device", "cpu"])
    caption = capsys.readouterr().out.strip()
    assert " ".join(says) == f"ten seconds: {caption}"
    assert (tmp_path / "attention.png").stat().st_size > 1000
