"""What a run says of a split's captions: scores, accuracy, pointing, files. `dataset` is a
data.Dataset; data.py imports this file. Licence: MIT."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from scores import COLUMNS, METRICS, ONE_CAPTION, OTHER_PAIRS, format_scores, score
from support.checks import contents, leaked
from support.files import print_notes, write_text

VIEWS = ("view: hardest quarter", "view: easiest quarter")
# Rows besides a data set's own groups, which check_release refuses if they have these names.
ADDED_ROWS = ("total", ONE_CAPTION, OTHER_PAIRS, "without leaked pairs", *VIEWS)
ENOUGH_PAIRS = 100  # with fewer, a score says little


def results(
    dataset,
    split: str,
    captions: dict,
    maps: dict,
    out_dir: Path | None,
    notes: dict | None = None,
    published: dict | None = None,
    state: dict | None = None,
) -> dict[str, float]:
    """Scores a split's captions -> the scores over all pairs, or {} if the split is empty.
    Without out_dir, only the quick metrics are computed. With it, scores of every group are printed
    and, with BLEU-2 and BLEU-3, written, as are captions, references and a sheet of samples, in
    files whose names end in <split>. By pair id: captions, maps (name -> (H, W)), notes (lines).
    published: the paper's scores, data set -> group -> metric -> number. state: the checkpoint."""
    from support.pictures import sample_sheet

    if not dataset.scenes[split]:
        if out_dir:
            print_notes(f"there are no {split} pairs, so there are no scores")
        return {}
    references = {pair.id: pair.captions for pair in dataset.pairs(split)}
    if out_dir is None:
        total = protocol_scores(dataset, captions, references, quick=True)["total"]
        return {metric: total[metric] for metric in METRICS if metric in total}
    write_captions(dataset, split, captions, references, out_dir)
    count = len(dataset.pairs(*dataset.scenes))
    print(f"scoring {len(captions)} of {count} pairs", flush=True)  # METEOR may take minutes
    constant = one_caption(dataset, state)
    scores = scores_beside_controls(dataset, split, captions, references, maps, constant)
    if published and split == "test":
        for group, row in published.get(dataset.name, {}).items():
            scores[f"paper: {group}"] = row
    for group, row in scores.items():
        scores[group] = {name: row.get(name) for name in COLUMNS}
    facts = {ONE_CAPTION: constant, "different captions": len(set(captions.values()))}
    if dataset.settings.judge:
        accuracy = dataset.settings.judge(captions, dataset.root)
    else:
        accuracy = {}
        for name, answers in claims(dataset, captions).items():
            accuracy[name] = percent(answers)
            facts[name] = f"{sum(answers)} of {len(answers)}"

    print(format_scores(scores))
    for name, fact in facts.items():
        print(f"{name}: {'-' if fact is None else fact}")
    for name, share in accuracy.items():
        print(f"{name}, in %: {'-' if share is None else share}")
    for control in (ONE_CAPTION, OTHER_PAIRS):
        if scores["total"]["CIDEr"] <= (scores[control]["CIDEr"] or 0):
            print_notes(f"the total CIDEr is no better than that of {control}")
    if len(captions) < ENOUGH_PAIRS:
        remedy = "write test into the column split of more rows"
        print_notes(f"scores of fewer than {ENOUGH_PAIRS} pairs say little; {remedy}")

    result = {"data": str(dataset.root.resolve()), "scores": scores, **facts, "accuracy": accuracy}
    result |= {name: (state or {}).get(name) for name in ("step", "code", "config")}
    write_json(out_dir / f"scores_{split}.json", result)
    sample_sheet(dataset, split, captions, maps, notes or {}, out_dir / f"samples_{split}.png")
    print(f"captions, references, scores and samples of {split} are in {out_dir}")
    return scores["total"]


def write_captions(dataset, split: str, captions: dict, references: dict, out_dir: Path) -> None:
    """Writes captions and references as the metrics' usual files, by pair id."""
    predicted = [{"image_id": i, "caption": caption} for i, caption in captions.items()]
    write_json(out_dir / f"captions_{split}.json", predicted)
    annotations = []
    for i, texts in references.items():
        for text in texts:
            row = {"id": len(annotations), "image_id": i, "caption": scored_text(dataset, text)}
            annotations.append(row)
    images = [{"id": i} for i in references]
    write_json(out_dir / f"references_{split}.json", {"images": images, "annotations": annotations})


def scores_beside_controls(
    dataset, split: str, captions: dict, references: dict, maps: dict, constant: str | None
) -> dict[str, dict[str, float]]:
    """The scores of every group, and those of two controls: `constant` as each pair's caption, and
    captions of other pairs. A control that cannot be made has {}."""
    groups = groups_of(dataset, split)
    scores = protocol_scores(dataset, captions, references, groups)
    for group, shares in pointing_scores(dataset, split, maps, groups).items():
        scores[group] |= shares
    scores[ONE_CAPTION] = {}
    if constant is not None:
        constant_captions = dict.fromkeys(captions, scored_text(dataset, constant))
        scores[ONE_CAPTION] = protocol_scores(dataset, constant_captions, references)["total"]
    scores[OTHER_PAIRS] = {}
    others = captions_of_others(dataset, split, captions)
    if others:
        scores[OTHER_PAIRS] = protocol_scores(dataset, others, references, quick=True)["total"]
    return scores


def write_json(path: Path, content) -> None:
    write_text(path, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False))


def protocol_scores(
    dataset, captions: dict, references: dict, groups: dict | None = None, quick: bool = False
) -> dict[str, dict[str, float]]:
    """`score` by the rules of the data set's published tables. captions: words of the vocabulary,
    joined by spaces; references: as they were written."""
    as_read = {}
    for i in captions:
        as_read[i] = [scored_text(dataset, text) for text in references[i]]
    return score(captions, as_read, groups, quick, dataset.settings.tokens, dataset.vocab.index)


def scored_text(dataset, caption: str) -> str:
    """A reference in the form that published scores use: split into words by the vocabulary's rule
    and never shortened, or unchanged if the PTB tokenizer will split it."""
    if dataset.settings.tokens == "ptb":
        return caption
    return " ".join(dataset.vocab.tokenizer(caption))


def groups_of(dataset, split: str) -> dict[str, set[str]]:
    """Pair ids to score separately: the release's groups; the pairs that share no picture with
    another split, if others do; the quarters whose boxes overlap least and most, if known."""
    pairs = dataset.pairs(split)
    groups = dict(dataset.groups)
    known = leaked(dataset, split)
    if known:
        groups["without leaked pairs"] = {pair.id for pair in pairs} - known
    overlap = dataset.overlap
    by_overlap = sorted((pair.id for pair in pairs if pair.id in overlap), key=overlap.get)
    if by_overlap:
        quarter = len(by_overlap) // 4  # rounded down, as in the published scripts
        hardest, easiest = VIEWS
        groups[hardest] = set(by_overlap[:quarter])
        groups[easiest] = set(by_overlap[len(by_overlap) - quarter :])
    return groups


def captions_of_others(dataset, split: str, captions: dict) -> dict[str, str]:
    """Each pair gets the caption of the next pair that has other pictures; {} if one has none."""
    pairs = dataset.pairs(split)
    pictures = [set(contents(dataset, pair)) for pair in pairs]
    others = {}
    for i, pair in enumerate(pairs):
        for j in itertools.chain(range(i + 1, len(pairs)), range(i)):
            if pictures[i].isdisjoint(pictures[j]):
                others[pair.id] = captions[pairs[j].id]
                break
    return others if len(others) == len(pairs) else {}


def frequent_captions(dataset) -> list[str]:
    """The 20 most frequent training captions."""
    counts = Counter(text for pair in dataset.pairs("train") for text in pair.captions)
    return [text for text, _ in counts.most_common(20)]


def one_caption(dataset, state: dict | None = None) -> str | None:
    """The best caption to give to every pair without looking: of the most frequent training
    captions (without training pairs: those in the checkpoint `state`), the one with the highest
    CIDEr on validation pairs or, if there are fewer than ENOUGH_PAIRS, on training pairs or, if
    there are none, on all: on as many as have 600 captions. None if no caption is known."""
    frequent = frequent_captions(dataset) or (state or {}).get("frequent_captions", [])
    pairs = dataset.pairs("val")
    if len(pairs) < ENOUGH_PAIRS:
        pairs = dataset.pairs("train") or dataset.pairs(*dataset.scenes)
    captions = max(1, sum(len(pair.captions) for pair in pairs))
    references = {pair.id: pair.captions for pair in pairs[:: math.ceil(captions / 600)]}
    ciders = {}
    for text in frequent:
        constant_captions = dict.fromkeys(references, scored_text(dataset, text))
        scores = protocol_scores(dataset, constant_captions, references, quick=True)
        ciders[text] = scores["total"]["CIDEr"]
    return max(ciders, key=ciders.get, default=None)


def claims(dataset, captions: dict[str, str]) -> dict[str, list[bool]]:
    """For each changed and each unchanged pair, whether its caption says so, whatever else it says.
    Empty without pairs of both kinds, because one caption for all would then be right."""
    no_change = dataset.no_change  # captions that say so
    unchanged = captions.keys() & dataset.unchanged
    changed = captions.keys() - unchanged
    if not (no_change and unchanged and changed):
        return {}
    return {
        "change claimed": [captions[i] not in no_change for i in changed],
        "no change claimed": [captions[i] in no_change for i in unchanged],
    }


def pointing_hit(heat: Tensor, box: list[int], size: tuple[int, int]) -> bool:
    """Whether the brightest pixel of a map (H, W), resized bilinearly to the picture's size (width,
    height), lies in the box [x, y, w, h] in pixels. As in Park et al. (2019)."""
    x, y, w, h = box
    width, height = size
    heat = heat.float()[None, None]
    heat = F.interpolate(heat, (height, width), mode="bilinear", align_corners=False)
    row, column = divmod(int(heat.argmax()), width)
    return x <= column < x + w and y <= row < y + h


def pointing_scores(dataset, split: str, maps: dict, groups: dict) -> dict[str, dict[str, float]]:
    """The pointing game over all boxes of changed objects and over each group's, in %: {group:
    {"pointing": boxes that are hit, "chance": mean share of the picture that a box covers}}; {} if
    a picture is missing. Both sides of a pair count, with the map of its name or the first."""
    from PIL import Image

    boxes = []  # of all pairs: pair id, whether the box is hit, its share of the picture
    for pair in dataset.pairs(split):
        pair_maps = maps.get(pair.id, {})
        pair_boxes = dataset.boxes.get(pair.id, (None, None))
        for side, box in zip(("before", "after"), pair_boxes, strict=True):
            if not (box and pair_maps):
                continue
            file = dataset.paths[getattr(pair, side)]
            if not file.exists():
                return {}
            with Image.open(file) as picture:
                width, height = picture.size
            heat = pair_maps.get(side, next(iter(pair_maps.values())))
            hit = pointing_hit(heat.cpu(), box, (width, height))
            boxes.append((pair.id, hit, box[2] * box[3] / (width * height)))
    scores = {}
    for group, members in {**groups, "total": maps.keys()}.items():
        chosen = [(hit, share) for i, hit, share in boxes if i in members]
        if chosen:
            hits, shares = zip(*chosen, strict=True)
            scores[group] = {"pointing": percent(hits), "chance": percent(shares)}
    return scores


def percent(values: Sequence[float]) -> float:
    """The mean of numbers between 0 and 1, in %."""
    return round(100 * sum(values) / len(values), 2)
