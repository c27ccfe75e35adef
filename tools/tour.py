"""Draws the pictures of docs/tour.md into assets/: python tools/tour.py RUNS

RUNS is as for tools/controls.py, which measures what the pictures show. They are of the first seed
in results.SEEDS, and of the first test pairs of a kind. Not a test.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from controls import validations
from matplotlib.patches import Rectangle
from measures import (
    CELL,
    GRID,
    METHODS,
    Test,
    gates,
    maps_of,
    matching_of,
    middle,
    slopes_of,
    untrained,
    y_of,
)
from results import finished

import cheers
import dirl_ccr
import idc_pretrain
from assets import ASSETS
from support.captioner import Captioner
from support.files import load_tensors, run_main
from support.mini.scenes import KINDS
from support.mini.sentences import accuracy
from support.pictures import COLOURS, GAP, LINE, attention_panels, draw_panel, draw_text, new_figure

COLOR, MATERIAL, ADD, DROP, MOVE = range(5)  # the first changed pairs; the others take turns
SIDE = 1.5  # inches: a picture
STEP = SIDE + GAP  # from one picture to the next
PAIR = 2 * STEP + 0.15  # from one pair of pictures to the next
ROW = STEP + LINE  # from one row of pictures to the next
N = GRID**2


def draw_matrix(figure, left: float, title: str, matrix, span=(0, 1), rows=(), columns=()) -> None:
    """Draws a matrix, with names of rows and columns. span: values of first and last colour."""
    axes = figure.add_axes((left, 0, 2.9, 2.4), title=title)
    look = {"cmap": COLOURS, "interpolation": "nearest", "aspect": "auto"}
    image = axes.imshow(matrix.numpy(), vmin=span[0], vmax=span[1], **look)
    figure.colorbar(image, ax=axes, pad=0.03, ticks=(span[0], sum(span) / 2, span[1]))
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)


def draw_row(figure, left: float, bottom: float, panels: list[tuple]) -> None:
    """Draws panels beside each other: title, picture, attention to its cells (H, W) in multiples
    of uniform attention or None, and boxes [x, y, w, h] to outline, by colour."""
    for n, (title, picture, levels, outlined) in enumerate(panels):
        place = (left + n * STEP, bottom, SIDE, SIDE)
        axes = draw_panel(figure, place, title, picture, levels)
        for colour, (x, y, w, h) in outlined.items():
            axes.add_patch(Rectangle((x, y), w, h, fill=False, ec=colour, lw=2))


def box_of(cell: int) -> list[int]:
    """The pixels of a cell, [x, y, w, h]."""
    return [cell % GRID * CELL, cell // GRID * CELL, CELL, CELL]


def draw_learning(figure, runs: Path) -> None:
    """Validation CIDEr of each run, thin, and the mean of a method's runs."""
    figure.set(size_inches=(11, 2.8), layout_engine="constrained")
    panels = figure.subplots(1, len(METHODS), sharey=True)
    for axes, row in zip(panels, METHODS, strict=True):
        curves = [validations(folder) for folder in finished(runs, row)]
        for steps, ciders in curves:
            axes.plot(steps, ciders, color="C0", linewidth=0.8, alpha=0.6)
        steps, _ = curves[0]
        mean = np.mean([ciders for _, ciders in curves], 0)
        axes.plot(steps, mean, ".-", color="C0", linewidth=2)
        axes.set(title=row, xlabel="step", xlim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="validation CIDEr", ylim=(0, None))  # of all panels, which share it


def draw_pairs(figure, test: Test, runs: dict[str, Captioner]) -> None:
    """Three pairs. Below, a row for each method: attention, caption, mini's judgement of it. The
    last pair is unchanged; its camera moved far."""
    dataset = test.dataset
    pairs = [test.pairs[MATERIAL], test.pairs[DROP], dataset.scenes["test"][7].pairs[1]]
    pictures = [dataset.pictures(pair) for pair in pairs]
    references = [(f"reference: {pair.captions[0]}", {}) for pair in pairs]
    rows = {"": references} | {name: run.pairs(pictures) for name, run in runs.items()}
    for row, (name, results) in enumerate(rows.items()):
        for column, (caption, maps) in enumerate(results):
            panels = attention_panels(pictures[column], maps)
            if name:
                shares = accuracy({pairs[column].id: caption}, dataset.root).values()
                caption += " (false)" if 0 in shares else " (true)"
                (_, *before), (_, *after) = panels[2:4]  # of RDD+ACR, the decoder's
                panels = [(name, *before), ("", *after)]
            bottom = -row * (SIDE + 5 * LINE)
            draw_row(figure, column * PAIR, bottom, [(*panel, {}) for panel in panels])
            draw_text(figure, column * PAIR, bottom - GAP, caption, 1.25)


def draw_scorer(figure, test: Test, run: Captioner, without: Captioner) -> None:
    """S of Eq. 3, between the least and the largest number of each row. What the cell in the middle
    of a changed object chooses."""
    models = {"before training": untrained(run), "SCORER+CBR": run, "RR, without L_cv": without}
    for n, (name, other) in enumerate(models.items()):
        s, _ = matching_of(other.model, test.before[:16], test.after[:16])
        least = s.min(1, keepdim=True).values
        largest = s.max(1, keepdim=True).values
        draw_matrix(figure, n * PAIR, f"S, {name}", (s - least) / (largest - least))
    _, weight = matching_of(run.model, test.before[:5], test.after[:5])
    for n, kind in enumerate((MATERIAL, MOVE, DROP)):
        asks, _ = test.boxes[kind]
        cell = middle(asks)
        chosen = weight[kind, cell]
        before, after = test.dataset.pictures(test.pairs[kind])
        same_place = {"black": box_of(cell)}
        levels = N * chosen.view(GRID, GRID).numpy()
        panels = [
            (f"{KINDS[kind]}: before", before, None, same_place),
            ("after", after, levels, same_place | {"white": box_of(int(chosen.argmax()))}),
        ]
        draw_row(figure, n * PAIR, -ROW - 0.2, panels)


def draw_dirl(figure, test: Test, run: Captioner, _) -> None:
    """C of Eq. 3, also between strangers; the diagonals, also of X in place of Y."""
    model = run.model
    spans = {"Y": (0.9, 1), "X": (0, 1)}
    layers = {"Y": lambda x: y_of(model, x), "X": model.embed}
    for n, (name, layer) in enumerate(layers.items()):
        before = layer(test.before)
        after = layer(test.after)
        diagonals = {}
        for whose, other in {"own": after, "another pair's": after.roll(1, 0)}.items():
            c = dirl_ccr.channel_correlation(before, other, model.cfg.channel_eps)
            diagonals[f"{whose} after"] = c.diagonal().numpy()
            if name == "Y":
                order = c.diagonal().argsort(descending=True)
                left = PAIR * (len(diagonals) - 1)
                draw_matrix(figure, left, f"C of Y, {whose} after", c[order][:, order], (-1, 1))
        title = f"number of channels by C_ii of {name}"
        axes = figure.add_axes((n * PAIR, -3, 2.6, 2.2), title=title)
        look = {"histtype": "step", "linewidth": 2}
        axes.hist(list(diagonals.values()), 20, range=spans[name], label=list(diagonals), **look)
        axes.legend(loc="upper left")


def draw_rdd(figure, test: Test, run: Captioner, without: Captioner) -> None:
    """Where four object vectors look, and those of a run without L_N2O and L_V2A. Below, which
    cells change four action vectors."""
    images = [test.before[:5], test.after[:5]]
    rows = {}
    for end, model in {"": run.model, ", no losses": without.model}.items():
        _, objects, actions = model.encode(*images)
        rows[f"object %d{end}"] = model.vector_attention(objects, actions)["objects"]
    slopes = slopes_of(run.model, *images)["actions"].sqrt()
    rows["slopes of action %d"] = slopes / slopes.sum(-1, keepdim=True)
    _, after = test.dataset.pictures(test.pairs[MATERIAL])
    _, box = test.boxes[MATERIAL]
    for n, (title, weight) in enumerate(rows.items()):
        levels = N * weight[MATERIAL].unflatten(-1, (GRID, GRID)).numpy()
        panels = [(title % (k + 1), after, levels[k], {"white": box}) for k in range(4)]
        draw_row(figure, 0, -n * ROW, panels)


def draw_cheers(figure, test: Test, run: Captioner, _) -> None:
    """The gates at each word, with the right entities and with others. Below, m of "after",
    from its least to its largest value, and sigmoid(P^) from 0 to 1."""
    entities = cheers.entities_of(test.dataset, run.model.cfg, run.state)
    own = entities(test.images)
    ids = run.model.generate(test.before, test.after, own)
    words = run.vocab.decode(ids)[MATERIAL].split()
    for n, (whose, e) in enumerate({"its": own, "another pair's": own.roll(1, 0)}.items()):
        gate = torch.stack(gates(run.model, test, e, ids), -1)[MATERIAL, : len(words)]
        title = f"{whose} entities"
        left = n * 1.2 * PAIR  # there are words between
        draw_matrix(figure, left, title, gate, (0, 1.5), words, ("alpha", "beta"))
    left = 2.3 * PAIR
    draw_text(figure, left, 2.4, entities.note(test.images[MATERIAL]), 1.25)
    pictures = test.dataset.pictures(test.pairs[MATERIAL])
    panels = [(title, x, None, {}) for title, x in zip(("before", "after"), pictures, strict=True)]
    draw_row(figure, left, 0, panels)
    for n, (name, (m, p)) in enumerate(maps_of(run.model, test, own).items()):
        _, m_of_after = m.chunk(2)
        _, p_of_after = p.sigmoid().mean(-1).chunk(2)
        m_of_after = m_of_after[MATERIAL].view(GRID, GRID)
        least, largest = m_of_after.min().item(), m_of_after.max().item()
        title = f"{name}\nm, {least:.3f} to {largest:.3f}"
        axes = figure.add_axes((n * 1.25 * STEP, -ROW - 1.1, SIDE, SIDE), title=title)
        axes.imshow(m_of_after, cmap=COLOURS, vmin=least, vmax=largest)
        axes.set_axis_off()
        axes = figure.add_axes((n * 1.25 * STEP, -2 * ROW - 1.1, SIDE, SIDE), title="sigmoid(P^)")
        axes.imshow(p_of_after[MATERIAL].view(GRID, GRID), cmap=COLOURS, vmin=0, vmax=1)
        axes.set_axis_off()


def draw_idc(figure, test: Test, run: Captioner, pretrained: Captioner) -> None:
    """The mask of fine-tuning, masked cells and what predictions are like, words' attention."""
    images = [image[DROP : DROP + 1] for image in (test.before, test.after)]
    ids = run.model.generate(*images)
    words = run.vocab.decode(ids)[0].split()[:7]
    names = ["v", "[CLS]", "START", *words[:3], *[f"MASK {word}" for word in words[:4]]]
    mask = idc_pretrain.causal_mask(1, 5, 4, "cpu")
    draw_matrix(figure, 0, "which row sees which column", mask, (0, 1), names, names)
    weight = 2 * N * run.model.word_attention(*images, ids)[0].numpy()
    for side, picture in enumerate(test.dataset.pictures(test.pairs[DROP])):
        panels = [(word, picture, weight[t, side], {}) for t, word in enumerate(words)]
        draw_row(figure, -1, -4.8 - side * ROW, panels)
    torch.manual_seed(0)
    eight = [x[:8] for x in (test.before, test.after, test.caption)]
    predicted, features, masked = pretrained.model.predict_cells(*eight)
    cosines, best = idc_pretrain.cell_cosines(predicted, features, masked).topk(3)
    pictures = [test.dataset.pictures(pair) for pair in test.pairs[:8]]
    for row, n in enumerate(torch.randperm(len(masked))[:3].tolist()):
        titles = ["masked cell", *[f"cosine {cosine:.4f}" for cosine in cosines[n]]]
        panels = []
        for title, place in zip(titles, [int(masked[n]), *best[n].tolist()], strict=True):
            if panels and place == masked[n]:
                title += ", right"
            picture = pictures[place // (2 * N)][place // N % 2]
            panels.append((title, picture, None, {"white": box_of(place % N)}))
        draw_row(figure, PAIR + 0.3, 0.9 - row * ROW, panels)


DRAWINGS = {  # row -> its drawing, and the row of the second run that this needs
    "SCORER+CBR": (draw_scorer, "RR"),
    "DIRL+CCR": (draw_dirl, ""),
    "RDD+ACR": (draw_rdd, "RDD+ACR, no losses"),
    "CHEERS": (draw_cheers, ""),
    "IDC": (draw_idc, ""),
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="folder of runs")
    args = parser.parse_args()
    first, *_ = finished(args.runs, "IDC")
    test = Test(load_tensors(first / "best.pt")["config"]["data_dir"])
    runs = {}
    for row, (draw, extra) in DRAWINGS.items():
        method, _ = METHODS[row]
        folder, *_ = finished(args.runs, row)
        runs[row] = method.load(folder / "best.pt", "cpu")
        other = folder / "pretrained.pt" if row == "IDC" else folder / "best.pt"
        if extra:
            other = finished(args.runs, extra)[0] / "best.pt"
        with new_figure(ASSETS / f"tour_{method.__name__}.png") as figure:
            draw(figure, test, runs[row], method.load(other, "cpu"))
    with new_figure(ASSETS / "tour_pairs.jpg") as figure:
        draw_pairs(figure, test, runs)
    with new_figure(ASSETS / "tour_curves.png") as figure:
        draw_learning(figure, args.runs)


if __name__ == "__main__":
    run_main(main)
