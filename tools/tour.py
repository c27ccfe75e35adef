"""Draws the pictures of docs/tour.md, and prints its numbers: python tools/tour.py RUNS OUT

RUNS has the five methods' runs on mini, in folders named as by tools/results.py, and the extra runs
of docs/tour.md. Numbers are of every seed, pictures of the first one in results.SEEDS. Not a test.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.patches import Rectangle
from results import finished  # first, because it makes the files of a higher folder importable

import cheers
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
import scores
from support import mini
from support.captioner import Captioner
from support.files import load_tensors, run_main
from support.pictures import COLOURS, GAP, LINE, attention_panels, draw_panel, draw_text, new_figure

COLOR, MATERIAL, ADD, DROP, MOVE = range(5)  # the first changed pairs; the others take turns
SIDE = 1.5  # inches: a picture
STEP = SIDE + GAP  # from one picture to the next
PAIR = 2 * STEP + 0.15  # from one pair of pictures to the next
ROW = STEP + LINE  # from one row of pictures to the next
GRID = 8  # cells of mini, from left to right and from top to bottom
N = GRID**2
CELL = mini.SIDE // GRID  # pixels: the side of a cell


def tell(model, what: str, **numbers) -> None:
    """Prints numbers of a model."""
    text = ", ".join(f"{name} {float(number):.3f}" for name, number in numbers.items())
    print(f"{type(model).__name__}, seed {model.cfg.seed}, {what}: {text}", flush=True)


def untrained(model):
    """A model as it was before its first step."""
    torch.manual_seed(model.cfg.seed)
    vocab_size = model.decoder.head.out_features
    return type(model)(model.cfg, vocab_size, model.grid, model.max_len).eval()


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
    of uniform attention or None, and a cell to outline or None."""
    for n, (title, picture, levels, cell) in enumerate(panels):
        place = (left + n * STEP, bottom, SIDE, SIDE)
        axes = draw_panel(figure, place, title, picture, levels)
        if cell is not None:
            corner = (cell % GRID * CELL, cell // GRID * CELL)
            axes.add_patch(Rectangle(corner, CELL, CELL, fill=False, ec="white", lw=2))


def draw_pairs(figure, dataset, runs: dict[str, Captioner]) -> None:
    """Three pairs. Below, a row for each method: attention, caption, mini's judgement of it. The
    last pair is unchanged; its camera moved far."""
    scenes = dataset.scenes["test"]
    pairs = [scenes[MATERIAL].pairs[0], scenes[DROP].pairs[0], scenes[7].pairs[1]]
    pictures = [dataset.pictures(pair) for pair in pairs]
    references = [(f"reference: {pair.captions[0]}", {}) for pair in pairs]
    rows = {"": references} | {name: run.pairs(pictures) for name, run in runs.items()}
    for row, (name, results) in enumerate(rows.items()):
        for column, (caption, maps) in enumerate(results):
            panels = attention_panels(pictures[column], maps)
            if name:
                shares = mini.accuracy({pairs[column].id: caption}, dataset.root).values()
                caption += " (false)" if 0 in shares else " (true)"
                (_, *before), (_, *after) = panels[2:4]  # of RDD+ACR, the decoder's
                panels = [(name, *before), ("", *after)]
            bottom = -row * (SIDE + 5 * LINE)
            draw_row(figure, column * PAIR, bottom, [(*panel, None) for panel in panels])
            draw_text(figure, column * PAIR, bottom - GAP, caption, 1.25)


def draw_scorer(figure, test, run, early) -> None:
    """S of Eq. 4 at three steps, as shares of a row. What a changed object's cell chooses."""

    def middle(box: list[int]) -> int:  # the cell in the middle of [x, y, w, h]
        x, y, w, h = box
        return (2 * y + h) // (2 * CELL) * GRID + (2 * x + w) // (2 * CELL)

    def matched(model):
        *_, queries_and_keys = model.encode(test.before, test.after)
        q_bef, k_aft, *_ = queries_and_keys[0]
        s = model.match(q_bef[:16], k_aft[:16])
        weight = model.cross_view[0].attention.scores(q_bef, k_aft).softmax(-1).mean(1)
        return s.softmax(1), weight  # (16, 16), (B, N, M)

    stages = {
        0: untrained(run.model),
        early.state["step"]: early.model,
        run.state["step"]: run.model,
    }
    for n, (step, model) in enumerate(stages.items()):
        share, weight = matched(model)
        tell(model, f"step {step}", share_of_the_partner=share.diagonal().mean())
        draw_matrix(figure, n * PAIR, f"step {step:,}", share)
    for kind in (COLOR, MATERIAL, MOVE):
        hits = []
        for w, (before, after) in zip(weight[kind::5], test.boxes[kind::5], strict=True):
            hits.append(int(w[middle(before)].argmax()) == middle(after))
        tell(run.model, f"{mini.KINDS[kind]}, in %", chooses_itself=scores.percent(hits))
    for n, kind in enumerate((MATERIAL, MOVE, DROP)):
        cell = middle(test.boxes[kind][0])
        chosen = weight[kind, cell]
        before, after = test.pictures[kind]
        panels = [(f"{mini.KINDS[kind]}: before", before, None, cell)]
        panels.append(("after", after, N * chosen.view(GRID, GRID).numpy(), int(chosen.argmax())))
        draw_row(figure, n * PAIR, -ROW - 0.2, panels)


def draw_dirl(figure, test, run, without) -> None:
    """C of Eq. 3 before and after training; its diagonal, also of X in place of Y."""

    def correlation(what: str, model):
        layer = torch.nn.Identity() if what.startswith("X") else model.mlp
        y = [layer(model.embed(image)) for image in (test.before, test.after)]
        c = dirl_ccr.channel_correlation(*y, model.cfg.channel_eps)
        others = c[~torch.eye(len(c), dtype=torch.bool)].abs()
        tell(model, f"C of {what}", diagonal=c.diagonal().mean(), others=others.mean())
        order = c.diagonal().argsort(descending=True)
        return c[order][:, order]

    start = correlation("Y, untrained", untrained(run.model))
    end = correlation("Y", run.model)
    parts = {"Y": end, "X": correlation("X", run.model)}
    parts["X, no L_dirl"] = correlation("X, no L_dirl", without.model)
    draw_matrix(figure, 0, "C of Y, before training", start, (-1, 1))
    draw_matrix(figure, PAIR, "C of Y, after", end, (-1, 1))
    axes = figure.add_axes((2 * PAIR + 0.2, 0, 2.6, 2.4), title="number of channels by C_ii")
    axes.hist([c.diagonal().numpy() for c in parts.values()], 20, range=(0, 1), label=list(parts))
    axes.legend(loc="upper left")


def draw_rdd(figure, test, run, bare) -> None:
    """Where four object and four action vectors look in "after"; below, bare, without residuals."""
    _, after = test.pictures[MATERIAL]
    for end, model in {"": run.model, ", bare": bare.model}.items():
        _, objects, actions = model.encode(test.before, test.after)
        vectors = {"objects": objects.vectors, "actions": actions.vectors}
        for name, weight in model.vector_attention(objects, actions).items():
            x = torch.nn.functional.normalize(vectors[name], dim=-1)
            cosines = (x @ x.mT)[:, ~torch.eye(x.shape[1], dtype=torch.bool)]
            tell(model, name + end, cosine=cosines.mean(), most=N * weight.amax(-1).mean())
            heat = N * weight[MATERIAL].unflatten(-1, (GRID, GRID)).numpy()
            panels = [(f"{name[:-1]} {k + 1}{end}", after, heat[k], None) for k in range(4)]
            draw_row(figure, 0, -len(figure.axes) / 4 * ROW, panels)  # below earlier rows


def draw_cheers(figure, test, run, _) -> None:
    """m of Eq. 2-3 for a pair's entities, over F and F - C~. The gates at each word."""
    model = run.model
    entities = cheers.entities_of(test.dataset, model.cfg, run.state)
    embeddings = entities(test.images)
    f_diff, e, (layer, *_) = model.encode(test.before, test.after, embeddings)
    raw = model.embed(torch.cat([test.before, test.after]))
    hrd = model.hrd[0]
    parts = {"F": (hrd.entity_dre, raw), "F - C~": (hrd.entity_cre, raw - layer.shared)}
    for row, (title, (part, target)) in enumerate(parts.items()):
        source = torch.cat([e, e])  # of both images
        m = cheers.max_probability(source, target, part.log_scale.exp())
        spread = part(source, target).sigmoid().std(1).mean()
        tell(model, f"m over {title}", most=N * m.amax(1).mean(), spread_of_sigmoid=spread)
        for side, picture in enumerate(test.pictures[MATERIAL]):
            heat = N * m.chunk(2)[side][MATERIAL].view(GRID, GRID).numpy()
            panel = (f"m over {title}", picture, heat, None)
            draw_row(figure, PAIR + side * STEP, 0.9 - row * ROW, [panel])
    draw_text(figure, PAIR, 0.8 - ROW, entities.note(test.images[MATERIAL]), 1.5)
    ids = model.generate(test.before, test.after, embeddings)
    words = run.vocab.decode(ids)[MATERIAL].split()
    seen = []
    for gate in (model.decoder.layers[-1].alpha, model.decoder.layers[-1].beta):
        gate.register_forward_hook(lambda *call: seen.append(call[-1].mean(-1)))
    model.decoder(ids, f_diff, e)
    later = seen[0][:, 5:-1][ids[:, 6:] > 0].mean()
    tell(model, "alpha", words_2_to_5=seen[0][:, 1:5].mean(), later_words=later)
    gates = torch.stack(seen, -1)[MATERIAL, : len(words)]
    draw_matrix(figure, 0, "gates", gates, (0, 1.5), words, ("alpha", "beta"))


def draw_idc(figure, test, run, pretrained) -> None:
    """The mask of fine-tuning, a masked cell and what its prediction is like, words' attention."""
    images = [image[DROP : DROP + 1] for image in (test.before, test.after)]
    ids = run.model.generate(*images)
    words = run.vocab.decode(ids)[0].split()[:7]
    names = ["[CLS]", "START", *words[:3], *[f"MASK {word}" for word in words[:4]]]
    mask = idc_pretrain.causal_mask(0, 5, 4, "cpu")
    draw_matrix(figure, 0, "which row sees which column", mask, (0, 1), names, names)
    weight = 2 * N * run.model.word_attention(*images, ids)[0].numpy()
    for side, picture in enumerate(test.pictures[DROP]):
        panels = [(word, picture, weight[t, side], None) for t, word in enumerate(words)]
        draw_row(figure, -1, -3.1 - side * ROW, panels)
    torch.manual_seed(run.model.cfg.seed)
    eight = [x[:8] for x in (test.before, test.after, test.caption)]
    predicted, features, masked = pretrained.model.predict_cells(*eight)
    cosines, best = idc_pretrain.cell_cosines(predicted, features, masked).topk(5)
    hits = 100 * (best == masked[:, None]).float()
    tell(run.model, "masked cells, in %", first=hits[:, 0].mean(), in_five=hits.sum(1).mean())
    n = int((features[masked] - features.mean(0)).norm(dim=-1).argmax())  # it shows an object
    titles = ["masked cell", *[f"cosine {cosine:.4f}" for cosine in cosines[n]]]
    for i, place in enumerate([int(masked[n]), *best[n].tolist()]):
        picture = test.pictures[place // (2 * N)][place // N % 2]
        panel = (titles[i], picture, None, place % N)
        draw_row(figure, PAIR + i % 3 * STEP, 0.7 - i // 3 * ROW, [panel])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="folder of runs")
    parser.add_argument("out", type=Path, help="folder for the pictures")
    args = parser.parse_args()
    first = load_tensors(finished(args.runs, "IDC")[0] / "best.pt")
    dataset = data.load("mini", first["config"]["data_dir"])
    changed = [scene.pairs[0] for scene in dataset.scenes["test"]]
    test = dataset.batch(changed).to("cpu")
    test.dataset = dataset
    test.boxes = [dataset.boxes[pair.id] for pair in changed]
    test.pictures = [dataset.pictures(pair) for pair in changed[:8]]
    runs = {}
    for row, method, draw, extra in (
        ("SCORER+CBR", scorer_cbr, draw_scorer, "SCORER+CBR, 100 steps"),
        ("DIRL+CCR", dirl_ccr, draw_dirl, "DIRL+CCR, no L_dirl"),
        ("RDD+ACR", rdd_acr, draw_rdd, "RDD+ACR, no residuals"),
        ("CHEERS", cheers, draw_cheers, "CHEERS"),  # none
        ("IDC", idc_pretrain, draw_idc, ""),  # its own state before fine-tuning
    ):
        for folder in reversed(finished(args.runs, row)):
            other = finished(args.runs, extra)[0] / "best.pt" if extra else folder / "pretrained.pt"
            runs[row] = method.load(folder / "best.pt", "cpu")
            with new_figure(args.out / f"tour_{method.__name__}.png") as figure:
                draw(figure, test, runs[row], method.load(other, "cpu"))
    with new_figure(args.out / "tour_pairs.jpg") as figure:
        draw_pairs(figure, dataset, runs)


if __name__ == "__main__":
    run_main(main)
