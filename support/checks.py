"""What a data set is checked for: copies of pictures, sentences that say "no change", checkpoints
that fit. `dataset` is a data.Dataset; data.py imports this file. Licence: MIT."""

import hashlib
import itertools
from collections import Counter

from common import InputError, RunConfig
from support.files import print_notes


def contents(dataset, pair) -> list[int]:
    """The checksums of a pair's pictures. Two pictures are the same if their checksums are."""
    names = [pair.before, pair.after] if pair.after else [pair.before]
    return [dataset.features.content(name) for name in names]


def contents_of_all(dataset, pairs) -> set[int]:
    """The checksums of the pictures of several pairs."""
    return set(itertools.chain.from_iterable(contents(dataset, pair) for pair in pairs))


def leaked(dataset, split: str) -> set[str]:
    """Ids of a split's pairs that share a picture with another split."""
    others = dataset.pairs(*dataset.scenes.keys() - {split})
    elsewhere = contents_of_all(dataset, others)
    return {p.id for p in dataset.pairs(split) if not elsewhere.isdisjoint(contents(dataset, p))}


def notes_on_copies(dataset) -> list[str]:
    """Remarks on pairs that share a picture with another split, or have two equal pictures."""
    notes = []
    for split in ("val", "test"):
        count = len(leaked(dataset, split))
        if count:
            share = f"{count} of {len(dataset.pairs(split))} {split} pairs share a picture"
            notes.append(f"{share} with another split; scores are also given without them")
    pairs = dataset.pairs(*dataset.scenes)
    equal = [p.id for p in pairs if p.after and len(set(contents(dataset, p))) == 1]
    claimed = [i for i in equal if i not in dataset.unchanged]
    if equal:
        count = f"{len(claimed)} changed and {len(equal) - len(claimed)} unchanged pairs"
        notes.append(f"{count} have two equal pictures, such as {(claimed + equal)[0]}")
    return notes


def note_on_negatives(dataset, cfg: RunConfig, *weights: str) -> None:
    """Prints a note if more than a tenth of the training scenes share a picture, which losses that
    contrast the images of a batch take for different. weights: their fields of cfg."""
    scenes = [contents_of_all(dataset, scene.pairs) for scene in dataset.scenes["train"]]
    scenes_with = Counter(itertools.chain(*scenes))  # a picture's checksum -> number of scenes
    repeated = {picture for picture, count in scenes_with.items() if count > 1}
    sharing = sum(not repeated.isdisjoint(scene) for scene in scenes)
    flags = " ".join(f"--{name} 0" for name in weights if getattr(cfg, name))
    if flags and 10 * sharing > len(scenes):
        shares = f"{sharing} of {len(scenes)} training scenes share a picture with another one"
        remedy = f"contrastive losses take it for a different one: compare with {flags}"
        print_notes(f"{shares}; {remedy} --out_dir OTHER")


def sentences(dataset, unchanged: bool, *splits: str) -> Counter:
    """How often unchanged (or else changed) pairs have each sentence, as a model outputs it."""
    counts = Counter()
    for pair in dataset.pairs(*splits):
        if (pair.id in dataset.unchanged) == unchanged:
            counts.update(" ".join(dataset.vocab.split(text)) for text in pair.captions)
    return counts


def no_change_captions(dataset) -> set[str]:
    """The sentences which say that nothing changed: Settings.no_change, and what unchanged
    training pairs have more often than changed ones, which may have it by mistake."""
    published = {" ".join(dataset.vocab.split(text)) for text in dataset.settings.no_change}
    more_often = sentences(dataset, True, "train") - sentences(dataset, False, "train")
    return published | more_often.keys()  # of a difference, Counter keeps what is above 0


def digest(dataset) -> str:
    """A hash of what a run learns from: pictures and captions of training and validation."""
    parts = []
    for split in ("train", "val"):
        pairs = dataset.pairs(split)
        parts.append(str([contents(dataset, pair) for pair in pairs]))
        parts.append(str([pair.captions for pair in pairs]))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def check_fit(dataset, state: dict) -> None:
    """InputError if a checkpoint has other features or words. Prints a note if it was trained on
    pairs that are now for validation or test."""
    if state["extractor"] != dataset.features.extractor:
        needed = f"the checkpoint needs features of {state['extractor']}"
        raise InputError(f"{needed}; give the --data_dir and --extractor of its training")
    if state["vocab"] != dataset.vocab.words:
        remedy = "give its --data_dir (IDC: and --cub); if captions were edited, train anew"
        raise InputError(f"the checkpoint has other words than {dataset.root}; {remedy}")
    train_pairs = set(map(tuple, state["train_pairs"].tolist()))
    for split in ("val", "test"):
        pairs = dataset.pairs(split)
        known = sum(tuple(contents(dataset, pair)) in train_pairs for pair in pairs)
        if known:
            told = f"the checkpoint was trained on {known} of the {len(pairs)} {split} pairs"
            print_notes(f"{told}, so their scores say little; train anew in a new folder")
