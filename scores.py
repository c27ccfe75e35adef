"""Scores of captions: words and metrics.

    python scores.py --predictions P --references R

P is a COCO results file, R a COCO annotation file; a run writes both for the split that it
captions, and published scripts read them. From Python, `score` compares dictionaries of captions.
pycocoevalcap computes the metrics; METEOR and SPICE need Java.

To copy: this file, common.py and support/files.py, which need torch, tqdm and pycocoevalcap.
Licence: MIT; contains no code from other repositories.
"""

import argparse
import functools
import math
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Literal

from common import UNK, InputError
from support.files import file_errors, read_json, run_main

# ---- words and metrics ---------------------------------------------------------------------------

METRICS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")
COLUMNS = ("pairs", *METRICS, "pointing", "chance")  # of the table of scores
# Two of its rows are controls: captions by someone who has not looked at the pictures.
ONE_CAPTION = "one caption for all"
OTHER_PAIRS = "captions of other pairs"


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
    """pycocoevalcap's Stanford tokenizer, for texts without line breaks. Its own class writes into
    its package's folder, which may be read-only, so here Java reads and writes pipes."""
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
    """For validation, and if there is no Java: lower case, no punctuation. On mini, it gives the
    Stanford tokenizer's words. Elsewhere it writes "dog s" for "dog 's", and "3 5" for "3.5"."""
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
    words between spaces; "ids" (LEVIR-CC) their ids in `index`: all unknown words match each other.
    quick, or without Java: no METEOR, no SPICE, and plain_tokenize for "ptb".
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
    """Metrics (x 100) of a group. hyps: id -> [caption]. Programs that fail are taken out."""
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
    any value and groups of fewer than ten pairs are left out, and the last line names these."""
    shown = {}
    few = []
    valued = set()
    for name, values in scores.items():
        if name not in ("total", ONE_CAPTION, OTHER_PAIRS) and (values.get("pairs") or 10) < 10:
            few.append(name)
        else:
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
    if few:
        lines.append(f"not shown, as they have fewer than ten pairs: {', '.join(few)}")
    return "\n".join(lines)


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
