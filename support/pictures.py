"""Pictures of results: attention maps, sheets of samples, curves of a log. Licence: MIT."""

import contextlib
import functools
import math
import textwrap
from pathlib import Path

import numpy as np
from torch import Tensor

from support.files import atomic_write, print_notes, read_log

# ---- pairs, attention maps and captions ----------------------------------------------------------

PANEL = 2.5  # inches of 120 pixels: the longer side of a picture
GAP = 0.06  # inches between panels
SPACE = 0.4  # inches between pairs
LINE = 0.185  # inches: the height of a line of text
TEXT = {"size": 11, "parse_math": False}  # a $ in a caption must not begin a formula
COLOURS = "turbo"  # the colour map
SATURATED = 8  # attention of this many times the uniform weight, or more, has the last colour


@contextlib.contextmanager
def new_figure(path: Path):
    """A matplotlib figure, in the end written to a .png, .jpg or .pdf. It is one inch wide and
    high, so its coordinates are inches, and the file also shows whatever is drawn outside."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: it has global state

    with rc_context({"text.usetex": False}):
        figure = Figure(figsize=(1, 1))
        yield figure
        with atomic_write(path) as partial:
            kind = path.suffix[1:].lower()
            figure.savefig(partial, format=kind, dpi=120, bbox_inches="tight", pad_inches=GAP)


print_once = functools.cache(print_notes)  # curves.png is drawn at each validation


@contextlib.contextmanager
def or_a_note(path: Path):
    """A picture of a run that cannot be drawn or written gives a note, and the run goes on."""
    try:
        yield
    except Exception as e:  # a file that is open elsewhere, a font, a setting of matplotlib ...
        reason = getattr(e, "strerror", None) or e
        print_once(f"there is no new {path} ({type(e).__name__}: {reason})")


def draw_text(figure, left: float, top: float, text: str, panels: int) -> float:
    """Writes lines of text, as wide as this many panels, below `top` -> where they end."""
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, 29 * panels)  # characters fit
    figure.text(left, top, "\n".join(lines), va="top", **TEXT)
    return top - LINE * len(lines)


def attention_panels(pair: tuple, maps: dict) -> list[tuple]:
    """A pair of PIL images and its attention maps (H, W) -> (title, picture, levels or None) of
    both pictures and of each map over both. Levels are multiples of uniform attention, 1 / (H * W).
    IDC's "before" and "after" lie over their own picture only; as both sum to 1, levels double."""
    pictures = dict(zip(("before", "after"), pair, strict=True))
    panels = [(side, picture, None) for side, picture in pictures.items()]
    for name, weight in maps.items():
        levels = weight.float().cpu().numpy() * weight.numel()
        alike = " is even" if levels.max() < 1.5 else ""  # hardly any colour will show
        if name in pictures:
            panels.append((f"attention{alike}, {name}", pictures[name], 2 * levels))
        else:
            for side, picture in pictures.items():
                panels.append((f"{name}{alike}, {side}", picture, levels))
    return panels


def draw_pair(figure, pair: tuple, maps: dict, above: str, below: str, left=0.0, top=0.0) -> float:
    """Draws a pair below `top`: a text, attention_panels, and another text -> where they end."""
    panels = attention_panels(pair, maps)
    top = draw_text(figure, left, top, above, len(panels))
    height = PANEL * min(1, max(picture.height / picture.width for picture in pair))
    bottom = top - LINE - GAP - height  # the line has the titles
    for n, (title, picture, levels) in enumerate(panels):
        place = (left + n * (PANEL + GAP), bottom, PANEL, height)
        draw_panel(figure, place, title, picture, levels)
    return draw_text(figure, left, bottom - GAP, below, len(panels))


def draw_panel(figure, place: tuple, title: str, picture, levels=None):
    """Draws a panel at (left, bottom, width, height) -> its axes, in pixels of the picture."""
    axes = figure.add_axes(place)
    axes.set_axis_off()
    axes.set_title(title, pad=3, **TEXT)
    extent = (0, picture.width, picture.height, 0)
    scale = math.ceil(max(picture.size) / 1200)  # matplotlib is slow with large pictures
    axes.imshow(picture.reduce(scale), extent=extent)
    if levels is not None:  # transparent up to uniform attention, so that the picture shows
        opacity = np.interp(levels, [1, 4], [0, 0.6])
        colours = {"cmap": COLOURS, "vmin": 0, "vmax": SATURATED, "interpolation": "bilinear"}
        axes.imshow(levels, alpha=opacity, extent=extent, **colours)
    return axes


def sample_sheet(dataset, split: str, captions: dict, maps: dict, notes: dict, path: Path) -> None:
    """Draws the first pairs of every kind of change, or the first twelve if kinds are unknown, with
    up to two maps, into a file. captions, maps and notes: see support.report.results."""
    pairs = [pair for pair in dataset.pairs(split) if pair.id in captions]
    kinds = {kind: ids for kind, ids in dataset.kinds.items() if ids & captions.keys()}
    chosen = []
    for kind in sorted(kinds, key=lambda kind: kind != "no change")[:24]:  # which must be there
        members = [pair for pair in pairs if pair.id in kinds[kind]]
        each = min(3, max(1, 24 // len(kinds)))
        chosen += [(f"{kind}: ", pair) for pair in members[:each]]
    if not chosen:
        chosen = [("", pair) for pair in pairs[:12]]
    half = math.ceil(len(chosen) / 2)
    legend = f"{dataset.name}, {split}. Colour: the model looked more there than on average, in "
    legend += f"dark red {SATURATED} times as much. Above each pair: its kind and a reference"
    with or_a_note(path), new_figure(path) as figure:
        start = draw_text(figure, 0, 0, legend, 5) - SPACE
        left = 0
        for column in (chosen[:half], chosen[half:]):
            top = start
            for kind, pair in column:
                above = kind + pair.captions[0]
                caption = dataset.vocab.sentence(captions[pair.id])
                below = "\n".join([f"generated: {caption}", *notes.get(pair.id, [])])
                drawn = dict(list(maps[pair.id].items())[:2])
                end = draw_pair(figure, dataset.pictures(pair), drawn, above, below, left, top)
                top = end - SPACE
            left = max(axes.get_position().x1 for axes in figure.axes) + SPACE


def caption_picture(before, after, maps: dict[str, Tensor], caption: str, path: Path) -> None:
    """Draws a pair of pictures (PIL images), its attention maps, and its caption."""
    with new_figure(Path(path)) as figure:
        draw_pair(figure, (before, after), maps, "", caption)


# ---- curves of a run -----------------------------------------------------------------------------


def draw_curves(log: Path, picture: Path) -> None:
    """Plot a log.jsonl over steps: losses, and the CIDEr of validation."""
    rows = read_log(log)
    steps = [row for row in rows if row["event"] == "train"]
    validations = [row for row in rows if row["event"] == "eval"]
    with or_a_note(picture), new_figure(picture) as figure:
        figure.set(size_inches=(8.3, 3.3), layout_engine="constrained")
        left, right = figure.subplots(1, 2, sharex=True)
        for name in sorted(set().union(*steps) - {"step", "event", "stage", "seconds", "lr"}):
            of_name = [row for row in steps if name in row]
            x = [row["step"] for row in of_name]
            left.plot(x, [row[name] for row in of_name], marker=".", label=name)
        scale = "log" if left.dataLim.y0 >= 0 else "linear"  # the smallest loss
        left.set(xlabel="training step", ylabel="training loss", yscale=scale)
        left.legend()
        x = [row["step"] for row in validations]
        right.plot(x, [row["CIDEr"] for row in validations], marker=".")
        right.set(xlabel="training step", ylabel="validation CIDEr")
