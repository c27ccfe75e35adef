"""Scores of captions: words and metrics, the scores of a data set's split.

    python scores.py --predictions P --references R

P is a COCO results file, R a COCO annotation file; a run writes both for the split that it
captions, and published scripts read them. From Python, `score` compares dictionaries of captions.
The metrics are BLEU, METEOR, ROUGE-L, CIDEr and SPICE, computed by pycocoevalcap. METEOR and SPICE
need Java.

To copy: this file, common.py and support/files.py, which need torch, tqdm and pycocoevalcap.
Licence: MIT; contains no code from other repositories.
"""

import argparse
import functools
import json
import math
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from common import UNK, InputError
from support.files import file_errors, print_notes, read_json, run_main, write_text

# ---- words and metrics ---------------------------------------------------------------------------

METRICS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")
COLUMNS = ("pairs", *METRICS, "pointing", "chance")  # of the table of scores


@functools.cache
def java_works() -> bool:
    """Whether `java` runs. Checked once; if it does not, prints which scores are lost."""
    works = False
    if shutil.which("java"):  # a Mac without Java has a `java` that only says where to get it
        works = subprocess.run(["java", "-version"], capture_output=True).returncode == 0
    if not works:
        print("no Java: no METEOR, no SPICE, and no PTB tokenizer (plain_tokenize replaces it)")
    return works


def ptb_tokenize(texts: list[str]) -> list[str]:
    """The Stanford tokenizer that pycocoevalcap brings: lower case, no punctuation, words joined by
    spaces. No text may have a line break. Java reads and writes pipes: pycocoevalcap's own class
    writes into its package's folder, which may be read-only."""
    from pycocoevalcap.tokenizer import ptbtokenizer

    jar = Path(ptbtokenizer.__file__).with_name(ptbtokenizer.STANFORD_CORENLP_3_4_1_JAR)
    call = ["java", "-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer"]
    call += ["-preserveLines", "-lowerCase"]
    sent = "".join(f"{text}\n" for text in texts)
    done = subprocess.run(call, input=sent.encode(), stdout=subprocess.PIPE)
    *lines, rest = done.stdout.decode().split("\n")
    # After a lost line, captions would be compared with the references of others.
    if len(lines) != len(texts) or rest:
        raise OSError("the PTB tokenizer's Java program failed or lost lines; try again")
    words = []
    for line in lines:
        kept = [word for word in line.rstrip().split(" ") if word not in ptbtokenizer.PUNCTUATIONS]
        words.append(" ".join(kept))
    return words


def plain_tokenize(text: str) -> str:
    """For validation, and if there is no Java: lower case, no punctuation. On mini's templates, it
    gives the same words as the Stanford tokenizer. Elsewhere it writes "dog s" for "dog 's", and
    "3 5" for "3.5"."""
    words = re.sub(r"""[.,:;?!'"`]""", " ", text.lower()).split()
    return " ".join(word for word in words if word.strip("-"))


def scored_words(texts: list[str], tokens: str, index: dict | None, quick: bool) -> list[str]:
    """The words of every text as `score` compares them, joined by spaces."""
    # A line break inside a caption would shift all later ones.
    texts = [" ".join(text.split()) for text in texts]
    if tokens == "split":
        return texts
    if tokens == "ids":
        numbered = []
        for text in texts:
            ids = [str(index.get(word, UNK)) for word in text.split()]
            numbered.append(" ".join(ids))
        return numbered
    if quick or not java_works():
        return [plain_tokenize(text) for text in texts]
    return ptb_tokenize(texts)


def score(
    predictions: dict[str, str],
    references: dict[str, list[str]],
    groups: dict[str, set[str]] | None = None,
    quick: bool = False,
    tokens: Literal["ptb", "split", "ids"] = "ptb",
    index: dict[str, int] | None = None,
) -> dict[str, dict[str, float]]:
    """Scores (x 100) of the predicted captions, over all of them ("total") and over each group's
    ids that have a prediction: {group: {metric: number}}. "pairs" is the number of predictions.

    The metrics are pycocoevalcap's, whose CIDEr is CIDEr-D. Every group is its own corpus, as in
    the published scripts: CIDEr counts document frequencies in the group's references, so the total
    is not an average of the groups, and a group of one image gets 0.
    tokens: "ptb" are the Stanford tokenizer's lower-case words without punctuation; "split" the
    words between spaces; "ids" (LEVIR-CC) the same as ids of `index`, so that all unknown words
    match each other. quick, or without Java: no METEOR, no SPICE, and plain_tokenize for "ptb".
    InputError if an id has no reference, or a bare text instead of a list of them."""
    texts = []
    for i, caption in predictions.items():
        if not references.get(i):
            raise InputError(f"prediction {i!r} has no reference; are the references of its split?")
        if isinstance(references[i], str):  # its letters would be taken for references
            raise InputError(f"the reference of {i!r} is a text; give a list of texts")
        texts += [caption, *references[i]]
    # All texts at once, because the tokenizer takes a second to start.
    words = iter(scored_words(texts, tokens, index, quick))
    hyps = {}
    refs = {}
    for i in predictions:
        hyps[i] = [next(words)]
        refs[i] = [next(words) for _ in references[i]]

    programs = {} if quick else java_programs(tokens)
    scores = {}
    for name, members in {"total": hyps.keys(), **(groups or {})}.items():
        group_hyps = {i: hyps[i] for i in hyps if i in members}
        group_refs = {i: refs[i] for i in group_hyps}
        if group_hyps:
            metrics = metrics_of(group_hyps, group_refs, programs)
            scores[name] = {"pairs": len(group_hyps), **metrics}
    return scores


def java_programs(tokens: str) -> dict:
    """pycocoevalcap's Meteor and Spice, if they work on this computer."""
    from pycocoevalcap.meteor.meteor import Meteor
    from pycocoevalcap.spice import spice

    programs = {}
    if java_works():
        programs["METEOR"] = Meteor()
        # SPICE reads sentences, not ids. Without its models, Spice() would download them.
        models = Path(spice.__file__).with_name("lib").glob("stanford-corenlp-*-models.jar")
        if tokens != "ids" and any(models):
            programs["SPICE"] = spice.Spice()
    return programs


def metrics_of(hyps: dict, refs: dict, programs: dict) -> dict[str, float]:
    """Metrics (x 100) of a group of captions. hyps: id -> [caption]; refs: id -> its references.
    One of the java_programs that fails is taken out of `programs`."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    bleu, _ = Bleu(4).compute_score(refs, hyps, verbose=0)
    metrics = dict(zip(METRICS[:4], bleu, strict=True))
    metrics["ROUGE-L"], _ = Rouge().compute_score(refs, hyps)
    metrics["CIDEr"], _ = Cider().compute_score(refs, hyps)
    for name, program in list(programs.items()):
        try:
            metrics[name], _ = program.compute_score(refs, hyps)
        except (OSError, ValueError, subprocess.SubprocessError) as e:
            remedy = "give it 8 GB, Java 8, and JAVA_TOOL_OPTIONS=-Duser.language=en"
            print(f"no {name}: its Java program failed ({e}); {remedy}")
            del programs[name]
        finally:  # after an error, Meteor still holds its lock, and its destructor would wait
            program.lock = threading.Lock()
    # SPICE is NaN if it finds nothing in a reference.
    return {name: round(100 * float(x), 2) for name, x in metrics.items() if not math.isnan(x)}


def format_scores(scores: dict[str, dict[str, float | None]]) -> str:
    """Scores as a table with one row per group; "-" for no value. BLEU-2, BLEU-3, columns without
    any value and groups of fewer than ten pairs are left out."""
    shown = {}
    valued = set()
    for name, values in scores.items():
        if name in ("total", ONE_CAPTION) or (values.get("pairs") or 10) >= 10:
            shown[name] = values
            valued |= {heading for heading in COLUMNS if values.get(heading) is not None}
    headings = [name for name in COLUMNS if name in valued - {"BLEU-2", "BLEU-3"}]
    width = max(len(name) for name in shown)
    lines = [" " * width + "".join(f"{heading:>9}" for heading in headings)]
    for name, values in shown.items():
        line = f"{name:<{width}}"
        for heading in headings:
            value = values.get(heading)
            if value is None:
                cell = "-"
            elif heading == "pairs":
                cell = str(value)
            else:
                cell = f"{value:.2f}"
            line += f"{cell:>9}"
        lines.append(line)
    return "\n".join(lines)


def percent(values: Iterable[float]) -> float:
    """The mean of numbers between 0 and 1, in %."""
    values = list(values)
    return round(100 * sum(values) / len(values), 2)


# ---- scores of a split ---------------------------------------------------------------------------

# `dataset` is a data.Dataset. What data.py imports needs this file, so it cannot import data.py.

ONE_CAPTION = "one caption for all"
VIEWS = ("view: hardest quarter", "view: easiest quarter")
# Rows besides a data set's own groups, which check_release refuses if they have these names.
ADDED_ROWS = ("total", ONE_CAPTION, "without leaked pairs", *VIEWS)
ENOUGH_PAIRS = 100  # if validation has fewer, one_caption chooses on training pairs


def results(
    dataset,
    split: str,
    captions: dict,
    maps: dict,
    out_dir: Path | None,
    notes: dict | None = None,
    published: dict | None = None,
) -> dict[str, float]:
    """Scores a split's captions -> the scores over all pairs, or {} if the split is empty.

    Without out_dir, only the quick metrics are computed. With it, scores of every group are printed
    and, with BLEU-2 and BLEU-3, written, as are captions, references and a sheet of samples, in
    files whose names end in <split>. By pair id: captions, maps (name -> (H, W)), notes (lines).
    published: the paper's scores of test splits, data set -> group -> metric -> number."""
    from support.pictures import sample_sheet

    if not dataset.scenes[split]:
        if out_dir:
            print_notes(f"there are no {split} pairs, so there are no scores")
        return {}
    references = {pair.id: pair.captions for pair in dataset.pairs(split)}
    if out_dir is None:
        total = protocol_scores(dataset, captions, references, quick=True)["total"]
        return {metric: total[metric] for metric in METRICS if metric in total}
    end = f"{split}.json"
    predicted = [{"image_id": i, "caption": caption} for i, caption in captions.items()]
    write_json(out_dir / f"captions_{end}", predicted)
    annotations = []
    for i, texts in references.items():
        for text in texts:
            row = {"id": len(annotations), "image_id": i, "caption": scored_text(dataset, text)}
            annotations.append(row)
    images = [{"id": i} for i in references]
    write_json(out_dir / f"references_{end}", {"images": images, "annotations": annotations})

    count = len(dataset.pairs(*dataset.scenes))
    print(f"scoring {len(captions)} of {count} pairs", flush=True)  # METEOR may take minutes
    groups = groups_of(dataset, split)
    scores = protocol_scores(dataset, captions, references, groups)
    for group, shares in pointing_scores(dataset, split, maps, groups).items():
        scores[group] |= shares
    constant = one_caption(dataset)
    scores[ONE_CAPTION] = {}
    if constant is not None:
        constant_captions = dict.fromkeys(captions, scored_text(dataset, constant))
        scores[ONE_CAPTION] = protocol_scores(dataset, constant_captions, references)["total"]
    if published and split == "test":
        for group, row in published.get(dataset.name, {}).items():
            scores[f"paper: {group}"] = row
    for group, row in scores.items():
        scores[group] = {name: row.get(name) for name in COLUMNS}
    accuracy = accuracy_of(dataset, captions)
    facts = {ONE_CAPTION: constant, "different captions": len(set(captions.values()))}

    print(format_scores(scores))
    for name, fact in facts.items():
        print(f"{name}: {'-' if fact is None else fact}")
    for name, share in accuracy.items():
        print(f"{name}, in %: {'-' if share is None else share}")
    if constant is not None and scores["total"]["CIDEr"] <= scores[ONE_CAPTION]["CIDEr"]:
        print_notes("the total CIDEr is no better than that of one caption for all")

    result = {"data": str(dataset.root.resolve()), "scores": scores, **facts, "accuracy": accuracy}
    result |= {name: dataset.checkpoint.get(name) for name in ("step", "code", "config")}
    write_json(out_dir / f"scores_{end}", result)
    sample_sheet(dataset, split, captions, maps, notes or {}, out_dir / f"samples_{split}.png")
    print(f"captions, references, scores and samples of {split} are in {out_dir}")
    return scores["total"]


def write_json(path: Path, content) -> None:
    write_text(path, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False))


def protocol_scores(
    dataset, captions: dict, references: dict, groups: dict | None = None, quick: bool = False
) -> dict[str, dict[str, float]]:
    """`score` by the rules of the data set's published tables. captions: words of the vocabulary,
    joined by spaces, as a model outputs them; references: as they were written."""
    as_read = {}
    for i in captions:
        as_read[i] = [scored_text(dataset, text) for text in references[i]]
    tokens = dataset.settings.tokens
    return score(captions, as_read, groups, quick, tokens, dataset.vocab.index)


def scored_text(dataset, caption: str) -> str:
    """A reference in the form that published scores use: split into words by the vocabulary's rule
    and never shortened, or unchanged if the PTB tokenizer will split it."""
    if dataset.settings.tokens == "ptb":
        return caption
    return " ".join(dataset.vocab.tokenizer(caption))


def groups_of(dataset, split: str) -> dict[str, set[str]]:
    """Pair ids to score separately: the release's groups; the pairs that share no picture with
    another split (if any do); the quarters whose boxes overlap least and most, if overlaps are
    known."""
    pairs = dataset.pairs(split)
    groups = dict(dataset.groups)
    leaked = dataset.leaked(split)
    if leaked:
        groups["without leaked pairs"] = {pair.id for pair in pairs} - leaked
    overlap = dataset.overlap
    by_overlap = sorted((pair.id for pair in pairs if pair.id in overlap), key=overlap.get)
    if by_overlap:
        quarter = len(by_overlap) // 4  # rounded down, as in the published scripts
        hardest, easiest = VIEWS
        groups[hardest] = set(by_overlap[:quarter])
        groups[easiest] = set(by_overlap[len(by_overlap) - quarter :])
    return groups


def one_caption(dataset) -> str | None:
    """The best caption to give to every pair without looking: of the 20 most frequent training
    captions, the one with the highest CIDEr on validation pairs or, if there are fewer than
    ENOUGH_PAIRS, training pairs: on as many as have 600 captions. None without training pairs."""
    counts = Counter(text for pair in dataset.pairs("train") for text in pair.captions)
    pairs = dataset.pairs("val")
    if len(pairs) < ENOUGH_PAIRS:
        pairs = dataset.pairs("train")
    captions = max(1, sum(len(pair.captions) for pair in pairs))
    references = {pair.id: pair.captions for pair in pairs[:: math.ceil(captions / 600)]}
    ciders = {}
    for text, _ in counts.most_common(20):
        constant_captions = dict.fromkeys(references, scored_text(dataset, text))
        scores = protocol_scores(dataset, constant_captions, references, quick=True)
        ciders[text] = scores["total"]["CIDEr"]
    return max(ciders, key=ciders.get, default=None)


def accuracy_of(dataset, captions: dict[str, str]) -> dict[str, float | None]:
    """A drawn data set's own judgement of captions, in %. For others, if both kinds are there: the
    % of changed and of unchanged pairs whose caption says so, whatever else it says."""
    if dataset.settings.judge:
        return dataset.settings.judge(captions, dataset.root)
    no_change = dataset.no_change  # captions that say so
    unchanged = captions.keys() & dataset.kinds.get("no change", set())
    changed = captions.keys() - unchanged
    # Without pairs of both kinds, one caption for all pairs would be 100 % right.
    if not (no_change and unchanged and changed):
        return {}
    return {
        "change claimed": percent(captions[i] not in no_change for i in changed),
        "no change claimed": percent(captions[i] in no_change for i in unchanged),
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
    a picture, whose size is needed, is missing. maps: pair id -> name -> (H, W). Both sides of a
    pair count, each with the map named "before" or "after", or else with the first."""
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


# ---- command line --------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Print the scores of a file of captions against a file of references."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--predictions", type=Path, required=True, help="a COCO results file")
    parser.add_argument("--references", type=Path, required=True, help="a COCO annotation file")
    args = parser.parse_args(argv)
    rows = read_json(args.predictions)
    with file_errors(args.predictions, "expected a list of {image_id, caption}, each id once"):
        captions = {str(row["image_id"]): row["caption"] for row in rows}
        if len(captions) < len(rows):
            raise InputError("an image_id has two predictions")
    known: dict[str, list[str]] = {}
    content = read_json(args.references)
    with file_errors(args.references, "expected {annotations: [{image_id, caption}]}"):
        for row in content["annotations"]:
            known.setdefault(str(row["image_id"]), []).append(row["caption"])
    print(format_scores(score(captions, known)))
    print(f"without prediction: {len(known.keys() - captions.keys())}")


if __name__ == "__main__":
    run_main(main)
