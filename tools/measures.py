"""What the mechanisms of the five methods do on mini: the measures of tools/controls.py, from which
tools/tour.py draws some. Not a test.

If a measure says nothing else, it is a mean over the changed test pairs, and "another pair" is the
one before it. A measure calls tell(what is measured, value, the same without a model).
"""

import copy
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cheers
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
import scores
from common import END, NULL, START, masked_mean
from matching import token_match
from support import report, rewrites
from support.captioner import Captioner
from support.extractors import load_clip
from support.mini.scenes import ATTRIBUTES, SIDE
from support.mini.sentences import named_attributes, truth_of
from support.text import read_captions, segments

GRID = 8  # cells of mini, from left to right and from top to bottom
CELL = SIDE // GRID  # pixels: the side of a cell

# ---- pairs and models ----------------------------------------------------------------------------


class Inside(NamedTuple):
    """How much of each cell is in a box, (B, N)."""

    changed: Tensor  # in the changed object's
    unchanged: Tensor  # in an unchanged object's, the mean over those of the pair


class Test:
    """The changed test pairs of mini, and what is true of them. Features are (B, C, H, W)."""

    def __init__(self, root: str):
        self.dataset = data.load("mini", root)
        scenes = self.dataset.scenes["test"]
        self.pairs = [scene.pairs[0] for scene in scenes]
        batch = self.dataset.batch(self.pairs).to("cpu")
        self.before = batch.before
        self.after = batch.after
        self.caption = batch.caption
        self.texts = batch.texts
        self.images = batch.images
        self.distractors = [scene.pairs[1] for scene in scenes]
        batch = self.dataset.batch(self.distractors).to("cpu")
        self.unchanged = batch.after  # the unchanged picture of the same scene
        self.unchanged_caption = batch.caption
        self.boxes = [self.dataset.boxes[pair.id] for pair in self.pairs]  # (before, after)
        self.set_inside()

    def set_inside(self) -> None:
        """Where objects are, in "before", in "after" and in either of them."""
        before = covered([before for before, _ in self.boxes])
        after = covered([after for _, after in self.boxes])
        means = {"before": [], "after": [], "either": []}
        for pair in self.pairs:
            both = list(unchanged_objects(truth_of(pair.id, self.dataset.root)))
            old = covered([item["box"] for item, _ in both])  # (objects, N)
            new = covered([item["box"] for _, item in both])
            means["before"].append(old.mean(0))
            means["after"].append(new.mean(0))
            means["either"].append(torch.maximum(old, new).mean(0))
        others = {name: torch.stack(of_pairs) for name, of_pairs in means.items()}
        self.in_before = Inside(before, others["before"])
        self.in_after = Inside(after, others["after"])
        self.in_either = Inside(torch.maximum(before, after), others["either"])

    def objects(self, pairs: int):
        """The objects that both images have, of those of the first pairs whose objects keep their
        number: number of the pair, what happened to the object, its middle cells in both images."""
        for n, pair in enumerate(self.pairs[:pairs]):
            truth = truth_of(pair.id, self.dataset.root)
            if truth["type"] in ("add", "drop"):
                continue
            scenes = truth["objects"]
            both = zip(scenes["default"], scenes["semantic"], strict=True)
            for number, (old, new) in enumerate(both):
                what = truth["type"] if number == truth["changed"] else "unchanged"
                yield n, what, middle(old["box"]), middle(new["box"])


def unchanged_objects(truth: dict):
    """The objects of a scene that did not change, as they are in both images."""
    old = list(truth["objects"]["default"])
    new = list(truth["objects"]["semantic"])
    if truth["type"] != "add":
        del old[truth["changed"]]
    if truth["type"] != "drop":
        del new[truth["changed"]]
    return zip(old, new, strict=True)


def covered(boxes: list) -> Tensor:
    """How much of each cell is in a box [x, y, w, h] of pixels or, without a box, 0 -> (B, N)."""
    area = torch.zeros(len(boxes), 1, SIDE, SIDE)
    for n, box in enumerate(boxes):
        if box:
            x, y, w, h = box
            area[n, :, y : y + h, x : x + w] = 1
    return F.avg_pool2d(area, CELL).flatten(1)


def middle(box: list[int]) -> int:
    """The cell in the middle of a box [x, y, w, h]."""
    x, y, w, h = box
    return (2 * y + h) // (2 * CELL) * GRID + (2 * x + w) // (2 * CELL)


def untrained(run: Captioner) -> Captioner:
    """A run as it was before its first step."""
    new = copy.copy(run)
    torch.manual_seed(run.model.cfg.seed)
    size = len(run.state["vocab"])
    new.model = type(run.model)(run.model.cfg, size, run.model.grid, run.model.max_len).eval()
    return new


def blocks(size: int, *tensors: Tensor):
    """Full batches of tensors that have equally many rows."""
    for start in range(0, len(tensors[0]) - size + 1, size):
        yield [x[start : start + size] for x in tensors]


def share_of_first(batches: list[Tensor]) -> Tensor:
    """How often the largest score of a row (A, A) is in its own column, in %."""
    hits = [s.argmax(1) == torch.arange(len(s)) for s in batches]
    return 100 * torch.cat(hits).float().mean()


# ---- measures ------------------------------------------------------------------------------------


def tell_inside(tell, name: str, weight: Tensor, inside: Inside) -> None:
    """How much of an attention (B, N) is in the box of the changed object, and of the others."""
    weight = weight / weight.sum(1, keepdim=True)
    share = 100 * (weight * inside.changed).sum(1).mean()
    tell(f"{name} in the changed object's box, %", share, 100 * inside.changed.mean())
    share = 100 * (weight * inside.unchanged).sum(1).mean()
    tell(f"{name} in an unchanged object's box, %", share, 100 * inside.unchanged.mean())
    share = 100 * (weight.roll(1, 0) * inside.changed).sum(1).mean()
    tell(f"{name} of another pair in the changed object's box, %", share)


def tell_decoder(tell, test: Test, run: Captioner, *inputs: Tensor) -> None:
    """Where the decoder looks as it reads the reference. IDC has a map of each image."""
    maps = run.model.attention_map(test.before, test.after, test.caption, *inputs)
    weight = next(iter(maps.values())).flatten(1)
    inside = test.in_either
    if "after" in maps:
        weight = torch.cat([maps["before"].flatten(1), maps["after"].flatten(1)], 1)
        both = zip(test.in_before, test.in_after, strict=True)
        inside = Inside(*[torch.cat(sides, 1) for sides in both])
    tell_inside(tell, "the decoder's attention", weight, inside)


def matching_of(model: scorer_cbr.SCORER, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """-> S of Eq. 3 (B, B), without Eq. 4's scale, which row RR has not; the attention of Eq. 5
    (B, N, N), averaged over heads."""
    *_, queries_and_keys = model.encode(before, after)
    q_bef, k_aft, *_ = queries_and_keys[0]
    attention = model.cross_view[0].attention.scores(q_bef, k_aft).softmax(-1)
    return token_match(q_bef, k_aft, model.cfg.heads), attention.mean(1)


def measure_scorer(tell, test: Test, run: Captioner) -> None:
    """Do images find their partners (Eq. 3), cells their objects (Eq. 5), and X_hat its "after"?"""
    model = run.model
    similarities = []
    attention = []
    for before, after in blocks(16, test.before, test.after):
        s, weight = matching_of(model, before, after)
        similarities.append(s)
        attention.append(weight)
    tell('"after" found among 16, by S of Eq. 3, %', share_of_first(similarities), 100 / 16)
    chosen = torch.cat(attention).argmax(-1)  # (B, N)
    finds = {}  # what happened to an object -> whether its middle cell chooses its middle cell
    stays = {}  # whether this is the same cell of the picture
    for n, what, cell, target in test.objects(len(chosen)):
        kinds = [what]
        if cell != target:
            kinds.append(f"{what}, now in another cell")
        for kind in kinds:
            finds.setdefault(kind, []).append(int(chosen[n, cell]) == target)
            stays.setdefault(kind, []).append(cell == target)
    for what in ("unchanged", "color", "material", "move"):
        for kind in (what, f"{what}, now in another cell"):
            if kind in finds:
                measure = f"an object's middle cell chooses the object ({kind}), %"
                tell(measure, report.percent(finds[kind]), report.percent(stays[kind]))
    tell_decoder(tell, test, run)
    if model.cfg.w_cbr:
        difference, x_bef, x_aft, _ = model.encode(test.before, test.after)
        _, _, x_unchanged, _ = model.encode(test.before, test.unchanged)
        hidden, _ = model.decoder(test.caption, difference)
        sentence = masked_mean(hidden, test.caption != NULL)
        tell_cbr(tell, "its sentence", model, x_bef, sentence, x_aft, x_unchanged)
        strangers = sentence.roll(1, 0)
        tell_cbr(tell, "another pair's sentence", model, x_bef, strangers, x_aft, x_unchanged)
        nothing = torch.zeros_like(sentence)
        tell_cbr(tell, "no sentence", model, x_bef, nothing, x_aft, x_unchanged)
        s = [model.reasoning.similarity(x, y) for x, y in blocks(16, x_bef, x_aft)]
        tell('CBR, X_bef in place of X_hat: "after" found among 16, %', share_of_first(s))


def tell_cbr(tell, name: str, model, x_bef, sentence, x_aft, x_unchanged) -> None:
    """Eq. 9-11: which picture is X_hat most like?"""
    found = []
    nearer = []
    for before, s, after, unchanged in blocks(16, x_bef, sentence, x_aft, x_unchanged):
        x_hat = model.reasoning(before, s)
        r = model.reasoning.similarity(x_hat, after)
        found.append(r)
        to_unchanged = model.reasoning.similarity(x_hat, unchanged)
        nearer.append(r.diagonal() > to_unchanged.diagonal())
    tell(f'CBR, {name}: "after" found among 16, %', share_of_first(found), 100 / 16)
    share = 100 * torch.cat(nearer).float().mean()
    tell(f'CBR, {name}: nearer to "after" than to the unchanged picture, %', share, 50)


def measure_dirl(tell, test: Test, run: Captioner) -> None:
    """Do channels of Y and X agree between the images of a pair (Eq. 3), and between strangers?"""
    model = run.model
    if model.cfg.w_dirl:
        tell_channels(tell, "Y", lambda features: y_of(model, features), test)
        tell_loss(tell, model, test)
    tell_channels(tell, "X", model.embed, test)
    tell_words(tell, model, test)
    tell_decoder(tell, test, run)


def y_of(model: dirl_ccr.DIRL, features: Tensor) -> Tensor:
    """Y of Eq. 2. The runs "no positions" have no coordinates and, by a change of the code that
    docs/exercises.md shows, no positions in Y."""
    x = model.embed(features)
    if not model.cfg.use_coords:
        x = x - model.embed.position().flatten(1).T
    return model.mlp(x)


def tell_loss(tell, model: dirl_ccr.DIRL, test: Test) -> None:
    """L_dirl, of Eq. 4."""
    before = y_of(model, test.before)
    after = y_of(model, test.after)
    for whose, other in {"": after, ', "after" of another pair': after.roll(1, 0)}.items():
        c = dirl_ccr.channel_correlation(before, other, 1e-5)
        tell(f"L_dirl{whose}", dirl_ccr.dirl_loss(c, model.cfg.alpha))


def tell_words(tell, model: dirl_ccr.DIRL, test: Test) -> None:
    """Eq. 12-13: do the words of a caption find what they attended to in their pair's difference?
    And what they would attend to in another pair's? And do another pair's words, which in the
    decoder's first layer have seen this difference?"""
    difference, *_ = model.encode(test.before, test.after)

    def read(caption: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        _, words, visual, _ = model.decoder(caption, d)
        valid = caption != NULL
        return masked_mean(words, valid), masked_mean(visual, valid)  # Eq. 12

    words, visual = read(test.caption, difference)
    _, elsewhere = read(test.caption, difference.roll(1, 0))
    strangers, _ = read(test.caption.roll(1, 0), difference)
    both = {
        "words find what they attended to": (words, visual),
        "words find what they attend to in another pair's pictures": (words, elsewhere),
        "another pair's words find it in these pictures": (strangers, visual),
    }
    for name, rows in both.items():
        s = [a @ b.T for a, b in blocks(16, *rows)]  # Eq. 13
        tell(f"{name}, among 16, %", share_of_first(s), 100 / 16)


def tell_channels(tell, name: str, layer, test: Test) -> None:
    """The mean of the diagonal of C, Eq. 3, and what it depends on."""

    def agreement(before: Tensor, after: Tensor) -> Tensor:
        return dirl_ccr.channel_correlation(before, after, 1e-5).diagonal().mean()

    before = layer(test.before)
    after = layer(test.after)
    nothing = layer(torch.zeros_like(test.before))
    tell(f"C_ii of {name}", agreement(before, after))
    tell(f'C_ii of {name}, "after" of another pair', agreement(before, after.roll(1, 0)))
    tell(f"C_ii of {name}, features set to 0", agreement(nothing, nothing))
    in_cell = before.mean(0)  # of each cell, over all pairs
    share = in_cell.var(0, correction=0) / before.flatten(0, 1).var(0, correction=0)
    before = before - in_cell
    after = after - after.mean(0)
    tell(f"C_ii of {name} without cells' means", agreement(before, after))
    strangers = agreement(before, after.roll(1, 0))
    tell(f'C_ii of {name} without cells\' means, "after" of another pair', strangers)
    tell(f"variance of {name} that a cell's place explains, %", 100 * share.mean())


def measure_rdd(tell, test: Test, run: Captioner) -> None:
    """Where do vectors look (Eq. 7), which cells change them, how alike are they, and do phrases
    find them (Eq. 10-12)?"""
    model = run.model
    _, objects, actions = model.encode(test.before, test.after)
    over_cells = model.vector_attention(objects, actions)["objects"]
    tell_inside(tell, "objects' attention", over_cells.mean(1), test.in_either)
    slopes = slopes_of(model, test.before, test.after)
    vectors = {"objects": objects.vectors, "actions": actions.vectors}
    for name, x in vectors.items():
        tell_inside(tell, f"slopes of {name}", slopes[name].mean(1).sqrt(), test.in_either)
        x = F.normalize(x, dim=-1)
        cosines = (x @ x.mT)[:, ~torch.eye(x.shape[1], dtype=torch.bool)]
        tell(f"cosine of two {name} of a pair", cosines.mean())
    tell_decoder(tell, test, run)
    if not model.cfg.w_n2o:  # then there is no adapter
        return
    templates = test.dataset.settings.templates
    readings = read_captions(segments, sorted(set(test.texts)), templates)
    clip, tokenizer, _ = load_clip(model.cfg.clip, "cpu")
    phrases = rdd_acr.Phrases(model.cfg, clip, tokenizer, readings)
    prompts = {"nouns": model.noun_prompt, "verbs": model.verb_prompt}
    own = torch.eye(32, dtype=torch.bool)
    for kind in ("nouns", "verbs"):
        read = phrases.read(kind, test.texts, prompts[kind])
        f_l = F.normalize(model.adapter(read.text), dim=-1)
        rows = torch.tensor([phrases.rows[kind][text] for text in test.texts])
        for name in vectors:
            f_o = F.normalize(vectors[name].mean(1), dim=-1)  # Eq. 10
            found = []
            chances = []
            for phrase, vector, row in blocks(32, f_l, f_o, rows):
                rival = row[:, None] != row  # as in training, pairs with an equal phrase are none
                cosines = phrase @ vector.T
                found.append(cosines.masked_fill(~rival & ~own, -2))
                chances.append(1 / (1 + rival.sum(1)))
            by_chance = 100 * torch.cat(chances).mean()
            tell(f"{kind} find {name} of the pair among 32, %", share_of_first(found), by_chance)


def slopes_of(model: rdd_acr.RDD, before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """How much each cell's features, of both images, change each vector, through every layer: the
    squared norm of the vector's derivative -> "objects", "actions", each (B, K, N). For a
    derivative J and a random u of variance 1, |u J|^2 has the mean |J|^2."""
    torch.manual_seed(0)
    images = [before.clone().requires_grad_(), after.clone().requires_grad_()]
    slopes = {}
    with torch.enable_grad():
        _, objects, actions = model.encode(*images)
        for name, vectors in {"objects": objects.vectors, "actions": actions.vectors}.items():
            maps = []
            for k in range(vectors.shape[1]):
                u = torch.randn_like(vectors[:, k])
                product = (vectors[:, k] * u).sum()
                by_before, by_after = torch.autograd.grad(product, images, retain_graph=True)
                squares = by_before.square() + by_after.square()  # (B, C, H, W)
                maps.append(squares.sum(1).flatten(1))
            slopes[name] = torch.stack(maps, 1)
    return slopes


def measure_cheers(tell, test: Test, run: Captioner) -> None:
    """What do other entities do to captions and gates (Eq. 14), and do maps point (Eq. 2-5)?"""
    model = run.model
    entities = cheers.entities_of(test.dataset, model.cfg, run.state)
    own = entities(test.images)
    notes = [entities.note(names) for names in test.images]
    tell_entities(tell, test, notes)
    conditions = {"its": own, "another pair's": own.roll(1, 0), "no": torch.zeros_like(own)}
    references = {pair.id: pair.captions for pair in test.pairs}
    for name, entities in conditions.items():
        ids = model.generate(test.before, test.after, entities)
        captions = dict(zip(references, run.vocab.decode(ids), strict=True))
        found = scores.score(captions, references, quick=True)["total"]["CIDEr"]
        tell(f"semantic CIDEr with {name} entities", found)
    for name in ("its", "another pair's"):
        alpha, _ = gates(model, test, conditions[name], test.caption)
        at_words = {}  # kind of word -> alpha where it is predicted
        for n, ids in enumerate(test.caption):
            (text,) = run.vocab.decode(ids[None])
            for t, kind in enumerate(word_kinds(text)):
                at_words.setdefault(kind, []).append(alpha[n, t])
        for kind in WORD_KINDS:
            tell(f"alpha at {kind}, {name} entities", torch.stack(at_words[kind]).mean())
    for name, (m, p) in maps_of(model, test, own).items():
        tell(f"m of {name}, mean", m.mean())
        tell(f"m of {name}, spread over cells", m.std(1).mean())
        tell(f"sigmoid(P^) of {name}, spread over cells", p.sigmoid().std(1).mean())
    m, _ = maps_of(model, test, own)["DRE(E, F_i)"]
    _, of_after = m.chunk(2)
    tell_inside(tell, "m of entities", of_after, test.in_after)
    tell_decoder(tell, test, run, own)


def tell_entities(tell, test: Test, notes: list[str]) -> None:
    """Does one of a pair's entities fit its changed object, as it is in one of the images?"""
    hits = []
    by_chance = []
    for n, pair in enumerate(test.pairs):
        truth = truth_of(pair.id, test.dataset.root)
        changed = truth["changed"]
        scenes = []
        if truth["type"] != "add":
            scenes.append(truth["objects"]["default"][changed])
        if truth["type"] != "drop":
            scenes.append(truth["objects"]["semantic"][changed])
        for found, note in ((hits, notes[n]), (by_chance, notes[n - 1])):
            _, _, phrases = note.partition(": ")
            named = [named_attributes(phrase.split()) for phrase in phrases.split(", ")]
            found.append(any(name.items() <= item.items() for name in named for item in scenes))
    share = report.percent(hits)
    tell("an entity fits the changed object, %", share, report.percent(by_chance))


WORD_KINDS = (
    "the changed object's name",
    "the new value",
    "places",
    "another object's name",
    "other words",
)


def word_kinds(caption: str) -> list[str]:
    """Which of WORD_KINDS each word of a caption of mini is. A name ends with a shape, so what
    follows the last shape is the new value."""
    words = caption.split()
    names = {word for of_one in ATTRIBUTES.values() for word in of_one}
    shapes = [n for n, word in enumerate(words) if word in ATTRIBUTES["shape"]]
    kinds = []
    for n, word in enumerate(words):
        kind = "other words"
        if word in ("left", "right", "front", "behind"):
            kind = "places"
        elif word in names and n <= shapes[0]:
            kind = "the changed object's name"
        elif word in names and n > shapes[-1]:
            kind = "the new value"
        elif word in names:
            kind = "another object's name"
        kinds.append(kind)
    return kinds


def gates(model: cheers.CHEERS, test: Test, entities: Tensor, ids: Tensor) -> tuple:
    """Eq. 14-15, means over channels: alpha and beta (B, L) of the last layer at the words of
    ids."""
    f_diff, e, _ = model.encode(test.before, test.after, entities)
    _, words = model.decoder(ids, f_diff, e)
    layer = model.decoder.layers[-1]
    text = layer.text_attention(words, e)
    visual = layer.cross_attention(words, f_diff)
    alpha = layer.alpha(torch.cat([words, text], -1)).mean(-1)
    beta = layer.beta(torch.cat([words, visual], -1)).mean(-1)
    return alpha, beta


def maps_of(model: cheers.CHEERS, test: Test, entities: Tensor) -> dict[str, tuple]:
    """The four maps of the first layer, as in HRD's table: m of Eq. 3 or, in a DRE, 1 - m of Eq. 5
    (2B, N), and P^ (2B, N, D)."""
    _, e, (layer, *_) = model.encode(test.before, test.after, entities)
    e = torch.cat([e, e])
    raw = model.embed(torch.cat([test.before, test.after]))
    rest = raw - layer.shared
    hrd = model.hrd[0]
    maps = {  # the map, its source and its target
        "CRE(F_j, F_i)": (hrd.cre, cheers.other_image(raw), raw),
        "DRE(E, F_i)": (hrd.entity_dre, e, raw),
        "DRE(F_i, F_i - shared)": (hrd.dre, raw, rest),
        "CRE(E, F_i - shared)": (hrd.entity_cre, e, rest),
    }
    both = {}
    for name, (layer, source, target) in maps.items():
        m = cheers.max_probability(source, target, layer.log_scale.exp())
        both[name] = (m, layer(source, target))
    return both


def measure_idc(tell, test: Test, run: Captioner) -> None:
    """Are masked cells recognised (Eq. 7-8), by what, and is the judge right (section 3.1)? Runs
    that were pre-trained by FDA are there for this loss alone."""
    model = run.model
    if model.cfg.fda:
        tell_fda(tell, test, model)
        return
    start_and_end = torch.zeros_like(test.caption)
    start_and_end[:, 0] = START
    start_and_end[:, 1] = END
    captions = {"its": test.caption, "another pair's": test.caption.roll(1, 0), "no": start_and_end}
    for name, caption in captions.items():
        torch.manual_seed(0)  # the same cells are masked
        hits = []
        for before, after, ids in blocks(8, test.before, test.after, caption):
            predicted, features, masked = model.predict_cells(before, after, ids)
            s = idc_pretrain.cell_cosines(predicted, features, masked)
            hits.append(s.argmax(1) == masked)
        share = 100 * torch.cat(hits).float().mean()
        choice = len(features) - len(masked) + 1  # the unmasked cells, and the right one
        tell(f"masked cells found, {name} caption, %", share, 100 / choice)
    share = found_by_place(test, model.cfg.cell_mask_rate)
    tell("masked cells found by the other image's cell in the same place, %", no_model=share)
    answers = []
    for after, changed in ((test.after, True), (test.unchanged, False)):
        visual, *_ = model.causal(model.encode(test.before, after), test.caption[:, :1])
        says_changed = model.judge(model.image_tokens(visual).flatten(1)).argmax(1) == 1
        answers.append(says_changed == changed)
    tell("the judge is right, %", 100 * torch.cat(answers).float().mean(), 50)
    tell_decoder(tell, test, run)


def tell_fda(tell, test: Test, model: idc_pretrain.IDC) -> None:
    """L_FDA, with rewrites that are made of the test captions as in training."""
    dataset = copy.copy(test.dataset)
    dataset.scenes = {"train": test.dataset.scenes["test"]}
    negatives = rewrites.rewrite(dataset)
    before = test.before
    kinds = {
        "changed": (test.pairs, test.after, test.caption),
        "unchanged": (test.distractors, test.unchanged, test.unchanged_caption),
    }
    for kind, (pairs, after, caption) in kinds.items():
        ids = []
        for pair in pairs:
            ids.append([dataset.vocab.encode(text, dataset.max_len) for text in negatives[pair.id]])
        if model.cfg.blind:
            before = torch.zeros_like(before)
            after = torch.zeros_like(after)
        rows = blocks(20, before, after, caption, torch.tensor(ids))
        losses = [model.fda(*row)["fda"] for row in rows]
        guess = math.log(1 + idc_pretrain.REWRITES)
        tell(f"L_FDA (Eq. 9) of {kind} pairs", torch.stack(losses).mean(), guess)


def found_by_place(test: Test, rate: float) -> Tensor:
    """How often a masked cell is the one that is most like the other image's cell in its place, in
    %. The cells are those that measure_idc masks."""
    torch.manual_seed(0)
    hits = []
    for before, after in blocks(8, test.before, test.after):
        masked = idc_pretrain.mask_cells(8, 2, GRID**2, rate, "cpu")
        images = torch.stack([before, after], 1).flatten(3).mT  # (8, 2, N, C)
        features = images.flatten(0, 2)
        others = images.flip(1).flatten(0, 2)
        s = idc_pretrain.cell_cosines(others, features, masked)
        # A cell that stands in for a prediction is no candidate itself.
        place = torch.arange(len(features)).view(8, 2, -1).flip(1).flatten()
        s[torch.arange(len(masked)), place[masked]] = -2
        hits.append(s.argmax(1) == masked)
    return 100 * torch.cat(hits).float().mean()


METHODS = {
    "SCORER+CBR": (scorer_cbr, measure_scorer),
    "DIRL+CCR": (dirl_ccr, measure_dirl),
    "RDD+ACR": (rdd_acr, measure_rdd),
    "CHEERS": (cheers, measure_cheers),
    "IDC": (idc_pretrain, measure_idc),
}
