"""Data of change captioning: vocabulary, release layouts, grid features, batches.

    python data.py mini                               make the built-in toy data set
    python data.py clevr_change --data_dir D          extract features

A data set is a folder in its authors' release layout. `load` reads it into a Dataset, whose
batches feed any method. Preparation adds a feature file to the folder; the vocabulary is read from
the captions each time.

To add a data set, write a reader (folder -> Release; release_from_pairs makes one of plain pairs)
and its row of DATASETS. `python data.py NAME` and `--dataset NAME` then work. A method without an
entry NAME in its PRESETS uses that of Settings.preset, or else its defaults. To use this file
elsewhere, take common.py, mini.py and scores.py along. Licence: MIT.
"""

import argparse
import csv
import hashlib
import io
import itertools
import os
import re
import shlex
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from torchvision.models import ResNet101_Weights, resnet101
from tqdm import tqdm

import mini
import scores
from common import (
    END,
    NULL,
    START,
    UNK,
    InputError,
    RunConfig,
    atomic_write,
    file_errors,
    home_expanded,
    load_model,
    print_notes,
    progress,
    read_json,
    run_main,
    saved_config,
    usable_device,
)

SPLITS = ("train", "val", "test")

# ==================================================================================================
# First half: from a folder to batches.
# ==================================================================================================

# ---- vocabulary ----------------------------------------------------------------------------------

SPECIAL = ["<NULL>", "<UNK>", "<START>", "<END>"]


def tokenize(caption: str) -> list[str]:
    """The rule behind most published vocabularies: a space before ';' and ',', no '?' and '.', the
    case is kept. Double, leading or trailing spaces give empty words, which papers count."""
    caption = caption.replace(";", " ;").replace(",", " ,").replace("?", "").replace(".", "")
    return caption.split(" ")


def tokenize_lower(caption: str) -> list[str]:
    """Lower-case words, runs of dots, and every other mark or symbol on its own: the rule of Image
    Editing Request's authors."""
    return re.findall(r"\w+|\.+|[^\w\s]", caption.lower())


# What nobody sees vanishes: soft hyphens, byte order marks, word joiners, marks of direction. The
# zero-width space separates words, as in Khmer. Look-alikes of ' and - on keyboards become these.
DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
TYPED = str.maketrans(dict.fromkeys(f"\u00ad\ufeff\u2060{DIRECTIONS}"))
TYPED |= str.maketrans("\u200b\u2018\u2019\u00b4\u2010\u2011", " '''--")


def normalised(text: str) -> str:
    """A text in which each character is written in one way only (see TYPED, and Unicode's NFC: an
    accented letter may be one character or two)."""
    return unicodedata.normalize("NFC", text.translate(TYPED))


# Chinese and Japanese characters and punctuation, between which no spaces are written.
NO_SPACES = "[\u3001-\u30ff\u3400-\u9fff\uff01-\uffef]"


def tokenize_pairs(caption: str) -> list[str]:
    """The rule for your own pairs: lower-case words, split at whitespace. Marks and symbols at
    either end of a word become words; those inside stay: "red-brick", "isn't", "3.5". Of Chinese
    and Japanese, each character is a word."""
    words = []
    for text in re.sub(f"({NO_SPACES})", r" \1 ", normalised(caption.lower())).split():
        # The Unicode categories of punctuation marks begin with P, those of symbols with S.
        marks = [character for character in text if unicodedata.category(character)[0] in "PS"]
        word = text.strip("".join(marks))
        start = text.index(word)
        words += [*text[:start], word, *text[start + len(word) :]]
    return [word for word in words if word]


def frequent_words(
    captions: Iterable[str], tokenizer: Callable = tokenize, min_count: int = 1
) -> list[str]:
    """The four special words, then those that occur at least `min_count` times, in codepoint
    order."""
    counts = Counter()
    for caption in captions:
        counts.update(tokenizer(caption))
    words = {word for word, count in counts.items() if count >= min_count}
    return SPECIAL + sorted(words - set(SPECIAL))


class Vocab:
    """Words <-> ids, which are places in the list `words`, as made by frequent_words.

    `tokenizer` splits captions into words; only the first `max_words` are used (None: all). A
    special word inside a caption, such as a release's own "<UNK>", is an unknown word."""

    def __init__(
        self, words: list[str], tokenizer: Callable = tokenize, max_words: int | None = None
    ):
        self.words = words
        self.index = {word: i for i, word in enumerate(words) if word not in SPECIAL}
        self.tokenizer = tokenizer
        self.max_words = max_words

    def __len__(self) -> int:
        return len(self.words)

    def split(self, caption: str) -> list[str]:
        """A caption's words, up to the first `max_words`."""
        return self.tokenizer(caption)[: self.max_words]

    def encode(self, caption: str, length: int) -> list[int]:
        """START, words, END, then NULL up to `length`. Words that are not in the vocabulary become
        UNK. Longer captions are cut."""
        words = [self.index.get(word, UNK) for word in self.split(caption)]
        ids = [START, *words[: length - 2], END]
        return ids + [NULL] * (length - len(ids))

    def decode(self, ids: Tensor) -> list[str]:
        """(B, V) ids that begin with START -> B captions, each up to its first NULL or END."""
        captions = []
        for row in ids[:, 1:].tolist():
            words = itertools.takewhile(lambda i: i not in (NULL, END), row)
            captions.append(" ".join(self.words[i] for i in words))
        return captions

    @staticmethod
    def sentence(words: str) -> str:
        """A caption of `decode` as people write it: "it is gone ." -> "it is gone."."""
        text = re.sub(f"(?<={NO_SPACES}) (?={NO_SPACES})", "", words)
        text = re.sub(r" +(?=[.,:;!?%)\]}\u2026\u060c\u061b\u061f\u0964])", "", text)
        return re.sub(r"(?<=[(\[{\u00a1\u00bf]) +", "", text)


# ---- pairs and releases --------------------------------------------------------------------------


@dataclass
class Pair:
    """Two images and at least one caption. `before` and `after` are image names, the keys of
    Release.paths. `id` is unique within its split, and in the data set if groups or kinds refer to
    it. The pairs of CUB and NABirds are single images: `after` is None."""

    id: str
    before: str
    after: str | None
    captions: list[str]


@dataclass
class Scene:
    """Pairs that always train together and share their "before" image: CLEVR-Change's changed pair
    and distractor pair, in this order; in other data sets, a single pair. `swapped`: the same pairs
    with the default and the distractor image exchanged; training uses them half of the time."""

    pairs: tuple[Pair, ...]
    swapped: tuple[Pair, ...] | None = None

    def __post_init__(self):
        assert len({pair.before for pair in self.pairs}) == 1, "training reads it once for all"

    def images(self) -> set[str]:
        """The names of the scene's images."""
        names = set()
        for pair in self.pairs:
            names |= {pair.before, pair.after}
        return names - {None}


@dataclass
class Release:
    """The contents of a data set's files. A reader fills in scenes, paths, and what else it has."""

    # By split; empty for a split that is not released
    scenes: dict[str, list[Scene]] = field(default_factory=lambda: {s: [] for s in SPLITS})
    paths: dict[str, Path] = field(default_factory=dict)  # name of an image of any pair -> file
    groups: dict[str, set[str]] = field(default_factory=dict)  # pair ids to score separately
    # Kind of change -> pair ids. Sample pictures are chosen by kind. The pairs of the kind
    # "no change" are unchanged, and scores say for how many of them the model says so.
    kinds: dict[str, set[str]] = field(default_factory=dict)
    overlap: dict[str, float] = field(default_factory=dict)  # pair id -> IoU of the object boxes
    # Pair id -> boxes of the changed object before and after, [x, y, w, h] in pixels, or None.
    boxes: dict[str, tuple[list | None, list | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # remarks on this copy, to be printed

    def pairs(self, split: str) -> list[Pair]:
        """Every pair of a split: the first one of every scene, then all distractor pairs."""
        columns = zip(*(scene.pairs for scene in self.scenes[split]), strict=True)
        return list(itertools.chain(*columns))

    def images(self, splits: Iterable[str]) -> set[str]:
        """The names of all images of these splits."""
        scenes = itertools.chain(*(self.scenes[split] for split in splits))
        return set().union(*(scene.images() for scene in scenes))

    def leaked(self, split: str) -> set[str]:
        """Ids of a split's pairs that share an image with a pair of another split."""
        elsewhere = self.images({*SPLITS} - {split})
        return {pair.id for pair in self.pairs(split) if {pair.before, pair.after} & elsewhere}

    def captions(self, splits: Iterable[str]) -> list[str]:
        """All captions of these splits, those of swapped pairs included."""
        captions = []
        for split in splits:
            for scene in self.scenes[split]:
                for pair in (*scene.pairs, *(scene.swapped or ())):
                    captions += pair.captions
        return captions


def release_from_pairs(
    pairs: dict[str, list[Pair]], folder: Path, kinds: dict | None = None, notes: Iterable = ()
) -> Release:
    """A release with one pair per scene. pairs: split -> its pairs, whose image names are relative
    to `folder`; pairs of the same id are one, with the captions of all. kinds: kind of change ->
    pair ids; each is scored separately."""
    kinds = kinds or {}
    release = Release(groups=dict(kinds), kinds=dict(kinds), notes=[*notes])
    first: dict[str, tuple[str, Pair]] = {}  # id -> split and pair
    for split, rows in pairs.items():
        for pair in rows:
            if split not in SPLITS:
                raise InputError(f"{folder}: the split of {pair.id} is {split!r}, not in {SPLITS}")
            first_split, first_pair = first.setdefault(pair.id, (split, pair))
            if split != first_split:
                raise InputError(f"{folder}: {pair.id} is both in {first_split} and in {split}")
            if (pair.before, pair.after) != (first_pair.before, first_pair.after):
                remedy = "give every two pictures an id of their own"
                raise InputError(f"{folder}: different pairs have the id {pair.id}; {remedy}")
            if pair is not first_pair:
                first_pair.captions.extend(pair.captions)
    for split, pair in first.values():
        scene = Scene((pair,))
        release.scenes[split].append(scene)
        for name in scene.images():
            release.paths[name] = folder / name
    return release


@dataclass
class Table:
    """A table that people edit, without empty rows."""

    mark: str  # a byte order mark, by which spreadsheets know UTF-8, or nothing
    separator: str
    lines: list[list[str]]  # names of the columns and cells of the rows, as they were written
    rows: list[dict[str, str]]  # the same rows: {column in lower case: cell without outer blanks}


def read_table(path: Path, columns: Iterable[str], quoting: int = csv.QUOTE_MINIMAL) -> Table:
    """Reads a table in UTF-8. Its first line names the columns, with commas, semicolons or tabs
    between them. Each of `columns` must be there, with a text in every row. InputError names the
    line that is wrong."""
    with open(path, encoding="utf-8") as f, file_errors(path, "save it as UTF-8, as a CSV"):
        text = f.read()  # CR, LF or both end a line
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    text = text.removeprefix(mark)
    separator = max(",;\t", key=text.partition("\n")[0].count)
    syntax = {"delimiter": separator, "quoting": quoting, "skipinitialspace": True}
    reader = csv.reader(io.StringIO(text), strict=True, **syntax)
    found = {}  # the number of a row's first line -> its cells
    number = 1
    try:
        for cells in reader:
            found[number] = cells
            number = reader.line_num + 1
    except csv.Error as e:
        remedy = "close every quote, and write a quote inside quotes twice"
        raise InputError(f"{path}, line {number}: {e}; {remedy}") from e
    heads = found.pop(1, [])
    names = [normalised(head).strip().lower() for head in heads]
    for column in columns:
        if names.count(column) != 1:
            place = f"{path}, line 1: found the columns {', '.join(names)!r:.60}"
            raise InputError(f"{place}, expected one that is named {column}")
    table = Table(mark, separator, [heads], [])
    for number, cells in found.items():
        place = f"{path}, line {number}"
        if any(cell.strip() for cell in cells[len(heads) :]):
            counts = f"expected {len(heads)} cells, found {len(cells)}"
            raise InputError(f"{place}: {counts}; put double quotes around one with {separator!r}")
        if any("\0" in cell for cell in cells):
            raise InputError(f"{place}: there is a NUL character; remove it, or save as UTF-8")
        cells = (cells + [""] * len(heads))[: len(heads)]
        row = {name: cell.strip() for name, cell in zip(names, cells, strict=True) if name}
        if not any(row.values()):
            continue
        for column in columns:
            if not row[column]:
                raise InputError(f"{place}: {column} is empty")
        table.lines.append(cells)
        table.rows.append(row)
    return table


def read_lines(path: Path, errors: str = "strict") -> list[str]:
    """The non-empty lines of a text file in UTF-8. errors: as in open()."""
    lines = path.read_text(encoding="utf-8", errors=errors).splitlines()
    return [line for line in lines if line.strip()]


def read_columns(path: Path) -> dict[str, str]:
    """The lines of a text file: first word -> rest of the line."""
    return dict(line.split(maxsplit=1) for line in read_lines(path))


AUTHORS_FILES = "the authors' .npy files"  # the attribute `preprocessing` of such feature files


def authors_features(picture: Path) -> Path:
    """The features that a data set's authors publish for a picture:
    sc_images/x.png -> sc_features/x.png.npy"""
    folder = picture.parent.name.replace("images", "features")
    return picture.parent.with_name(folder) / f"{picture.name}.npy"


# ---- the table of data sets ----------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """A row of DATASETS: the reader of a data set, and everything else specific to it."""

    read: Callable[[Path], Release]  # folder -> its contents
    preset: str = ""  # the data set whose entry of PRESETS is used by a method that has none for it
    extractor: str = "resnet101-layer3"  # the default: a name in RESNETS, timm/MODEL, or mini-cnn
    authors_features: bool = False  # features are published as .npy files, see authors_features()
    tokenizer: Callable[[str], list[str]] = tokenize  # caption -> words of the vocabulary
    min_count: int = 1  # how often a word must occur to be in the vocabulary
    vocab_splits: tuple[str, ...] = ("train",)  # the splits from which papers take the words
    max_words: int | None = None  # papers cut captions after this many words; None: they do not
    # What metrics compare: words from the PTB tokenizer; words split at spaces; ids of the latter.
    tokens: Literal["ptb", "split", "ids"] = "ptb"
    # Captions come from CLEVR-like templates: rules extract their phrases (see template_segments)
    # and reject any other caption. Otherwise, spaCy's English model extracts them.
    templates: bool = False
    no_change: tuple[str, ...] = ()  # published sentences which say that nothing changed
    # For a data set that is drawn. make(folder, number of training scenes or None) draws it unless
    # it exists; judge(captions by pair id, folder) -> the % of true statements of each sort.
    make: Callable[[Path, int | None], None] | None = None
    judge: Callable[[dict[str, str], Path], dict[str, float]] | None = None
    # Published counts: scenes of each split, pairs of each kind of change, and "words" with the
    # four special ids. Preparation prints a note for each count that differs.
    published: dict[str, int] = field(default_factory=dict)


# Name of a data set -> its row. The rows are filled in below, each after its reader.
DATASETS: dict[str, Settings] = {}


def all_presets(presets: dict[str, dict]) -> dict[str, dict]:
    """A method's PRESETS, and for each data set that is not there, those of Settings.preset."""
    borrowed = {}
    for name, settings in DATASETS.items():
        if settings.preset in presets:
            borrowed[name] = presets[settings.preset]
    return borrowed | presets


def read_release(name: str, root: Path) -> Release:
    """Reads a data set's folder. FileNotFoundError if a file is missing; InputError if one is
    broken, train has no pairs, or check_release finds a fault."""
    try:
        release = DATASETS[name].read(root)
    except FileNotFoundError as e:
        advice = f"--data_dir must be the folder of {name}'s files"
        if DATASETS[name].make:
            advice = f"python data.py {name} --data_dir {shlex.quote(str(root))} draws it"
        raise FileNotFoundError(f"{e}; {advice}") from e
    check_release(release, root)
    if not release.scenes["train"]:
        raise InputError("; ".join([f"{root}: no pairs in train", *release.notes]))
    for split in ("val", "test"):
        leaked = release.leaked(split)
        if leaked:
            share = f"{len(leaked)} of {len(release.pairs(split))} {split} pairs share a picture"
            release.notes.append(f"{share} with another split; scores are also given without them")
    return release


def check_release(release: Release, root: Path) -> None:
    """InputError if a pair has no caption, or if a group or kind has the name of another row of the
    scores, or an id that no pair has."""
    ids = set()
    for split in SPLITS:
        for scene in release.scenes[split]:
            for pair in (*scene.pairs, *(scene.swapped or ())):
                if not pair.captions:
                    raise InputError(f"{root}: {pair.id} has no caption")
                ids.add(pair.id)
    for name, members in [*release.groups.items(), *release.kinds.items()]:
        if name.lower() in scores.ADDED_ROWS:
            raise InputError(f"{root}: the scores have a row {name.lower()!r}; rename this group")
        unknown = members - ids
        if unknown:
            found = f"{len(unknown)} ids that no pair has, such as {min(unknown)}"
            raise InputError(f"{root}: the group {name!r} has {found}")


# ---- readers, one for each release ---------------------------------------------------------------

CLEVR_FOLDERS = {"default": "images", "semantic": "sc_images", "nonsemantic": "nsc_images"}


def read_clevr_change(root: Path) -> Release:
    """CLEVR-Change's layout (Park et al., ICCV 2019): images/, sc_images/, nsc_images/, the .json
    files read here; those by IOU (scores by viewpoint) and with bbox (pointing game) are optional.
    Captions are keyed by the default image; mini's change captions also by the distractor image,
    from whose view they tell the change, for swapped pairs. Pair ids are those of the authors'
    scripts: 000012.png for the changed pair of scene 12, 000012.png_n for its distractor pair."""
    splits = read_json(root / "splits.json")
    change = read_json(root / "change_captions.json")
    same = read_json(root / "no_change_captions.json")
    release = Release()
    release.groups = {"semantic change": set(), "only distractor": set()}
    for split in SPLITS:
        for number in splits[split]:
            names = {view: f"CLEVR_{view}_{number:06d}.png" for view in CLEVR_FOLDERS}
            for view, folder in CLEVR_FOLDERS.items():
                release.paths[names[view]] = root / folder / names[view]
            default = names["default"]
            distractor = names["nonsemantic"]
            pair_id = f"{number:06d}.png"
            changed = Pair(pair_id, default, names["semantic"], change[default])
            unchanged = Pair(f"{pair_id}_n", default, distractor, same[default])
            swapped_captions = change.get(distractor, change[default])
            changed_swapped = replace(changed, before=distractor, captions=swapped_captions)
            unchanged_swapped = replace(unchanged, before=distractor, after=default)
            scene = Scene((changed, unchanged), (changed_swapped, unchanged_swapped))
            release.scenes[split].append(scene)
            release.groups["semantic change"].add(changed.id)
            release.groups["only distractor"].add(unchanged.id)
    for kind, ids in read_json(root / "type_mapping.json").items():
        release.kinds[kind] = release.groups["semantic change"].intersection(ids)
    release.groups |= release.kinds
    release.kinds["no change"] = release.groups["only distractor"]
    release.overlap = read_by_pair(root / "change_captions_by_IOU.json")
    for pair_id, sides in read_by_pair(root / "change_captions_with_bbox.json").items():
        release.boxes[pair_id] = (sides["bbox_before"], sides["bbox_after"])
    return release


def read_by_pair(file: Path) -> dict:
    """The parsed JSON of a file {scene's number: ...}, by pair id; {} if it is not released."""
    content = read_json(file) if file.exists() else {}
    return {f"{int(number):06d}.png": value for number, value in content.items()}


DATASETS["mini"] = Settings(
    read_clevr_change,
    extractor="mini-cnn",
    templates=True,
    make=mini.make,
    judge=mini.accuracy,
)
DATASETS["clevr_change"] = Settings(
    read_clevr_change,
    authors_features=True,
    templates=True,
    published={"train": 33830, "val": 1988, "test": 3985}
    | {"color": 7958, "material": 7963, "add": 7966, "drop": 7961, "move": 7955, "words": 76},
)

DC_KINDS = ("color", "texture", "add", "remove", "move", "no change")


def read_clevr_dc(root: Path) -> Release:
    """CLEVR-DC (Kim et al., ICCV 2021): bef/<id>.png, aft/<id>.png, captions.json, split.json.
    No file gives the kind of change. The ids form six blocks of 8,000, and we assume that these
    follow the order in which the authors list the kinds of change."""
    splits = read_json(root / "split.json")
    captions = read_json(root / "captions.json")
    captions = {name.removesuffix(".png"): texts for name, texts in captions.items()}
    pairs = defaultdict(list)
    kinds = defaultdict(set)
    for split in SPLITS:
        for number in splits[split]:
            texts = captions[str(number)]
            pair = Pair(f"{number:06d}.png", f"bef/{number}.png", f"aft/{number}.png", texts)
            pairs[split].append(pair)
            kinds[DC_KINDS[number // 8000]].add(pair.id)
    return release_from_pairs(pairs, root, kinds)


DATASETS["clevr_dc"] = Settings(
    read_clevr_dc,
    templates=True,
    published={"train": 40800, "val": 2400, "test": 4800, "words": 87},
)


def read_spot_the_diff(root: Path) -> Release:
    """Spot-the-Diff (Jhamtani and Berg-Kirkpatrick, EMNLP 2018): annotations/<split>.json,
    resized_images/<id>.png and <id>_2.png. All rows of an id (one per annotator) form one pair.
    Each sentence is a caption, even the 66 empty ones, which published tables count."""
    pairs = defaultdict(list)
    for split in SPLITS:
        for row in read_json(root / f"annotations/{split}.json"):
            i = row["img_id"]
            before = f"resized_images/{i}.png"
            after = f"resized_images/{i}_2.png"
            pairs[split].append(Pair(i, before, after, row["sentences"]))
    return release_from_pairs(pairs, root)


DATASETS["spot_the_diff"] = Settings(
    read_spot_the_diff,
    published={"train": 8566, "val": 1493, "test": 1270, "words": 2059},
)


def read_image_editing(root: Path) -> Release:
    """Image Editing Request (Tan et al., ACL 2019): {train,valid,test}.json, and the pictures in
    images/ or next to these files. Items with the same two images stay separate pairs. Of the 495
    test items, 66 share both images with an item of another split, and 147 at least one."""
    pairs = defaultdict(list)
    for split, file in (("train", "train.json"), ("val", "valid.json"), ("test", "test.json")):
        for row in read_json(root / file):
            pairs[split].append(Pair(row["uid"], row["img0"], row["img1"], row["sents"]))
    folder = root / "images"
    return release_from_pairs(pairs, folder if folder.exists() else root)


DATASETS["image_editing_request"] = Settings(
    read_image_editing,
    # The authors' vocabulary; that of later papers is not published.
    tokenizer=tokenize_lower,
    min_count=3,
    vocab_splits=("train", "val"),
    max_words=78,
    published={"train": 3061, "val": 383, "test": 495, "words": 808},
)


# Every unchanged pair of LEVIR-CC has one of these among its captions.
LEVIR_SAME = (
    "the scene is the same as before",
    "there is no difference",
    "the two scenes seem identical",
    "no change has occurred",
    "almost nothing has changed",
)


def read_levir_cc(root: Path) -> Release:
    """LEVIR-CC (Liu et al., TGRS 2022): LevirCCcaptions.json, and images/<split>/A (before) and B
    (after). Captions are the non-empty tokens in the file. `changeflag`, 0 or 1, marks changed
    pairs; without it, LEVIR_SAME decides. Rows of one picture form one pair."""
    pairs = defaultdict(list)
    kinds = {"change": set(), "no change": set()}
    for row in read_json(root / "LevirCCcaptions.json")["images"]:
        name = row["filename"]
        split = row["split"]
        captions = []
        for sentence in row["sentences"]:
            words = [word for word in sentence["tokens"] if word.strip()]
            if words:
                captions.append(" ".join(words))
        pair = Pair(name, f"{split}/A/{name}", f"{split}/B/{name}", captions)
        pairs[split].append(pair)
        kind = "no change" if set(LEVIR_SAME) & set(captions) else "change"
        if "changeflag" in row:
            kind = "change" if int(row["changeflag"]) else "no change"
        kinds[kind].add(name)
    kinds["change"] -= kinds["no change"]  # one of the rows of this picture says so
    return release_from_pairs(pairs, root / "images", kinds)


DATASETS["levir_cc"] = Settings(
    read_levir_cc,
    extractor="resnet101-layer3-256",
    # The authors' vocabulary: words that occur more than five times in all splits together.
    tokenizer=str.split,
    min_count=6,
    vocab_splits=SPLITS,
    max_words=50,
    tokens="ids",
    no_change=LEVIR_SAME,
    published={"train": 6815, "val": 1333, "test": 1929, "change": 5038, "no change": 5039},
)


def read_birds_to_words(root: Path) -> Release:
    """Birds-to-Words (Forbes et al., EMNLP 2019): birds-to-words-v1.0.tsv, and images/<photo
    id>.jpg, which you have to download from the URLs in columns 2 and 6 of the table. Pairs are
    left out unless both photographs are there. Rows with the same split and URLs form one pair."""
    file = root / "birds-to-words-v1.0.tsv"
    images = root / "images"
    urls = ("img1imgurl", "img2imgurl")
    pairs = defaultdict(list)
    left_out = 0
    for row in read_table(file, (*urls, "split", "description"), csv.QUOTE_NONE).rows:
        # URLs are .../photos/<photo id>/large.jpg?...
        with file_errors(file, f"expected .../photos/<photo id>/... in {' and '.join(urls)}"):
            before, after = [re.search(r"/photos/(\d+)", row[url])[1] + ".jpg" for url in urls]
        split = row["split"]
        caption = " ".join(tokenize_lower(row["description"]))
        pair = Pair(f"{split}_{before}_{after}", before, after, [caption])
        if (images / before).exists() and (images / after).exists():
            pairs[split].append(pair)
        else:
            left_out += 1
    note = f"{left_out} captions are left out: {images} lacks a photograph of their pairs"
    return release_from_pairs(pairs, images, notes=[note] if left_out else [])


DATASETS["birds_to_words"] = Settings(
    read_birds_to_words,
    # [ours] IDC's authors publish neither how they resized nor how they split captions into words.
    extractor="resnet101-layer4",
    tokenizer=str.split,
    max_words=77,
    tokens="split",
)


def read_cub(root: Path) -> Release:
    """CUB-200-2011 (images.txt, images/<class>/<name>.jpg) with ten captions per image by Reed et
    al. (CVPR 2016), text_c10/<class>/<name>.txt, and their split by class: trainvalclasses.txt for
    training, testclasses.txt for validation, none for test. Single images: `after` is None."""
    split_of = {}
    for split, file in (("train", "trainvalclasses.txt"), ("val", "testclasses.txt")):
        for line in read_lines(root / file):
            split_of[line.strip()] = split
    pairs = {"train": [], "val": []}
    for name in read_columns(root / "images.txt").values():
        split = split_of[name.split("/")[0]]
        text = root / "text_c10" / f"{name.removesuffix('.jpg')}.txt"
        lines = read_lines(text, errors="replace")
        captions = [" ".join(tokenize_lower(line)) for line in lines]
        pairs[split].append(Pair(name, name, None, captions))
    return release_from_pairs(pairs, root / "images")


DATASETS["cub"] = Settings(
    read_cub,
    extractor="resnet101-layer4",  # [ours] as for Birds-to-Words
    tokenizer=str.split,
    max_words=37,
    tokens="split",
    published={"train": 8855, "val": 2933},
)


def read_nabirds(root: Path) -> Release:
    """NABirds: images.txt, classes.txt, image_class_labels.txt, train_test_split.txt, images/. The
    caption of each single image is the name of its class (one of the hierarchy's 555 leaves)."""
    class_of = read_columns(root / "image_class_labels.txt")
    in_train = read_columns(root / "train_test_split.txt")
    class_names = read_columns(root / "classes.txt")
    pairs = {"train": [], "test": []}
    for image, name in read_columns(root / "images.txt").items():
        split = "train" if in_train[image] == "1" else "test"
        pairs[split].append(Pair(name, name, None, [class_names[class_of[image]]]))
    return release_from_pairs(pairs, root / "images")


DATASETS["nabirds"] = Settings(
    read_nabirds,
    extractor="resnet101-layer4",  # [ours] as for Birds-to-Words
    tokenizer=str.splitlines,  # a whole class name is one word
    vocab_splits=SPLITS,
    published={"train": 23929, "test": 24633},
)


def own_pair(row: dict[str, str]) -> Pair:
    """The pair in a row of your own table. Its id is made of its two paths, which are normalised
    ("./a.png" is "a.png")."""
    before = os.path.normpath(row["before"]).replace(os.sep, "/")
    after = os.path.normpath(row["after"]).replace(os.sep, "/")
    texts = row["captions"].replace("\uff5c", "|").split("|")  # Chinese keyboards have ｜
    captions = [" ".join(text.split()) for text in texts if re.search(r"\w", text)]
    return Pair(f"{before} {after}", before, after, captions)


def hashed_split(pair: Pair) -> str:
    """A split for a pair: 80 % train, 10 % val, 10 % test, by a hash of the path that is first in
    the alphabet. So a pair and its reverse share a split, and so do all pairs with that path."""
    first = min(pair.before, pair.after)
    tenth = int(hashlib.sha256(first.encode()).hexdigest(), 16) % 10
    return {8: "val", 9: "test"}.get(tenth, "train")


# What programs write into cells without a text: pandas, R, MySQL, spreadsheets.
EMPTY_CELLS = {*r"nan none null na \n <na> n/a #n/a #name? #ref! #value!".split()}
PRINTED_LIST = re.compile(r"""[\[({]["'{\]]""")  # how a list begins that a program has printed


def kind_name(text: str) -> str:
    """A kind of change as it was written, but for blanks and invisible characters. All spellings of
    "no change", such as "No_change", are one."""
    text = " ".join(normalised(text).split())
    if re.fullmatch(r"[\W_]*no[\W_]*change[\W_]*", text, re.IGNORECASE):
        return "no change"
    return text


def read_pairs(root: Path) -> Release:
    """Your own pairs: pairs.csv with the columns before, after and, as the last one, captions.
    Paths are relative to the folder. A | separates captions; a pair may also have several rows.
    Two columns are optional: `split` (train, val or test in every row; without it: hashed_split)
    and `kind`, the kind of change."""
    file = root / "pairs.csv"
    table = read_table(file, ("before", "after", "captions")).rows
    columns = list(table[0]) if table else ["captions"]
    if columns[-1] != "captions":  # there, a comma without quotes makes a cell too many
        raise InputError(f"{file}: the last column is {columns[-1]}; it must be captions")
    pairs = defaultdict(list)
    kinds = defaultdict(set)
    kind_of: dict[str, str] = {}
    for row in table:
        pair = own_pair(row)
        for caption in pair.captions:
            if caption.lower() in EMPTY_CELLS or PRINTED_LIST.match(caption):
                remedy = "write plain text, with | between captions, or leave it out"
                raise InputError(f"{file}: {pair.id} has the caption {caption!r:.60}; {remedy}")
        kind = kind_name(row.get("kind", ""))
        if kind_of.setdefault(pair.id, kind) != kind:
            raise InputError(f"{file}: {pair.id} is both {kind_of[pair.id]!r} and {kind!r}")
        if kind:
            kinds[kind].add(pair.id)
        split = row["split"].lower() if "split" in row else hashed_split(pair)
        pairs[split].append(pair)
    unused = {*columns} - {"before", "after", "captions", "split", "kind"}
    notes = [f"{file}: the column {column!r} is not used" for column in sorted(unused)]
    for split in ("val", "test"):
        if split not in pairs:
            why = "without it, pairs share a split if they share the path that sorts first"
            notes.append(f"there are no {split} pairs: name some in the column split; {why}")
    if "no change" not in kinds:
        notes.append("no pair has the kind 'no change': changes claimed wrongly are not counted")
    return release_from_pairs(pairs, root, kinds, notes)


DATASETS["pairs"] = Settings(
    read_pairs,
    # Most papers' extractor skips most pixels of a photograph, so its features change when the
    # camera moves slightly. This one averages pixels.
    extractor="resnet101-layer3-256",
    tokenizer=tokenize_pairs,
    max_words=60,  # every batch is padded to the longest caption
    tokens="split",  # words as the model learns them, so a perfect one loses no points to splitting
)


# ---- pictures and extractors ---------------------------------------------------------------------

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# 178 megapixels is Pillow's limit, as a small file could otherwise fill the memory.
PICTURE_REMEDY = f"give {', '.join(FORMATS)} with 8 bits a channel and at most 178 megapixels"


def read_image(picture: str | Path | Image.Image) -> Image.Image:
    """A file or PIL image -> upright RGB on white; of an animation, the first frame. The EXIF
    orientation is applied; published features of photographs were made without it. InputError: see
    PICTURE_REMEDY."""
    if isinstance(picture, Image.Image):
        return upright_rgb(picture)
    with open(picture, "rb") as f, file_errors(picture, PICTURE_REMEDY):
        return upright_rgb(Image.open(f, formats=FORMATS))


def upright_rgb(picture: Image.Image) -> Image.Image:
    """A PIL image -> upright RGB on white. A photograph of 48 megapixels takes 200 MB, so nothing
    is copied that need not be."""
    refuse_16_bits(picture)
    if picture.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        picture = ImageOps.exif_transpose(picture)
    if picture.has_transparency_data:
        rgba = picture.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        picture = Image.alpha_composite(white, rgba)
    if picture.mode != "RGB":
        picture = picture.convert("RGB")
    picture.load()  # the file is closed soon
    return picture


def refuse_16_bits(picture: Image.Image) -> None:
    """InputError if a PIL image does not have 8 bits a channel."""
    # Modes I and F hold integers and floats. Colours of 16 bits have the mode RGB, and only
    # "RGB;16B" in `tile` shows them. Pillow keeps their upper 8 bits, which may all be 0.
    if picture.mode[0] in "IF" or ";16" in str(getattr(picture, "tile", "")):
        raise InputError(f"mode {picture.mode}, more than 8 bits a channel")


def check_pictures(files: list[Path]) -> None:
    """Looks at files before long work with them. FileNotFoundError if any is missing; InputError
    names all that are broken."""
    require_files(files)
    faults = in_threads(picture_fault, files)
    bar = progress(faults, desc="checking", total=len(files), unit="picture")
    broken = [text for text in bar if text]
    if broken:
        these = f"{len(broken)} of {len(files)} pictures cannot be used"
        raise InputError(f"{these}: {', '.join(broken)}; {PICTURE_REMEDY}")


def picture_fault(file: Path) -> str:
    """What is wrong with a picture's file, or ""."""
    try:
        with Image.open(file, formats=FORMATS) as picture:
            refuse_16_bits(picture)
            if picture.format in ("PNG", "WEBP"):
                picture.verify()  # by their checksums and lengths
            else:
                picture.draft("RGB", (1, 1))  # of a JPEG, an eighth of the rows and columns
                picture.load()
    except Exception as e:  # A broken file can raise anything.
        return f"{file} ({e})"
    return ""


def in_threads(function: Callable, items: list) -> Iterator:
    """map(function, items) for work on pictures. A decoded photograph takes 200 MB, and
    os.cpu_count() counts the CPUs of a container's host, so there are at most 8 threads."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(items), 1024):  # each item that waits takes memory, too
            yield from pool.map(function, items[start : start + 1024])


MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
AUTHORS_STD = torch.tensor([0.229, 0.224, 0.224])[:, None, None]  # as in the authors' scripts


def preprocess_resnet(image: Image.Image) -> Tensor:
    """The preprocessing of most papers -> (3, 224, 224): aspect ratio not kept, OpenCV's bicubic
    without antialiasing. The script behind CLEVR-Change's .npy features antialiases."""
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()  # (3, height, width)
    x = F.interpolate(x[None], (224, 224), mode="bicubic", align_corners=False)[0]
    x = x.round().clamp(0, 255) / 255
    return (x - MEAN) / AUTHORS_STD


def preprocess_imagenet(image: Image.Image, side: int = 224) -> Tensor:
    """Pillow's bilinear resize, aspect ratio not kept, and ImageNet's mean and standard deviation
    -> (3, side, side). As in Tan et al. (ACL 2019) and, with side 256, Liu et al. (TGRS 2022)."""
    resized = np.array(image.resize((side, side), Image.Resampling.BILINEAR))
    x = torch.from_numpy(resized).permute(2, 0, 1).float() / 255
    return (x - MEAN) / STD


# The papers' extractors: name -> preprocessing function
RESNETS = {
    "resnet101-layer3": preprocess_resnet,  # features (1024, 14, 14)
    "resnet101-layer3-256": partial(preprocess_imagenet, side=256),  # (1024, 14, 14)
    "resnet101-layer4": preprocess_imagenet,  # (2048, 7, 7)
}


def resnet101_grid(name: str) -> nn.Module:
    """torchvision's ResNet-101 up to the layer in `name`, with the papers' ImageNet weights, which
    torchvision fetches on first use: (n, 3, H, W) -> (n, *grid)."""
    with file_errors(name, "make features once online, or give --extractor timm/NAME:FILE"):
        net = resnet101(weights=ResNet101_Weights.IMAGENET1K_V1)
    stem = [net.conv1, net.bn1, net.relu, net.maxpool]
    grid = nn.Sequential(*stem, net.layer1, net.layer2, net.layer3)
    if name == "resnet101-layer4":
        grid.append(net.layer4)
    elif name == "resnet101-layer3-256":
        grid.append(nn.AdaptiveAvgPool2d(14))  # of 16 x 16 cells
    return grid


class TimmGrid(nn.Module):
    """The last feature map of a timm model: (n, 3, 224, 224) -> (n, C, H, W). name: timm/MODEL,
    whose weights timm fetches, or timm/MODEL:FILE. MODEL may have a tag, such as
    vit_base_patch16_224.mae. Of a ViT, the map comes before its last LayerNorm, as from timm.
    InputError if there is no such model, or the file does not hold its weights."""

    def __init__(self, name: str):
        super().__init__()
        import timm

        model, _, file = name.removeprefix("timm/").partition(":")
        with file_errors(f"--extractor {name}", "timm.list_pretrained() lists the names"):
            defaults = timm.get_pretrained_cfg(model, allow_unregistered=False)
        options = {"pretrained": True, "num_classes": 0}
        if defaults.fixed_input_size:  # ViTs, whose own size may be 518; timm resizes positions
            options["img_size"] = 224
        if file:
            with file_errors(file, f"give weights of {model} under timm's names"):
                weights = timm.models.load_state_dict(file)
                classifier = defaults.classifier or ()  # one name, several or none
                weights = {k: w for k, w in weights.items() if not k.startswith(classifier)}
                options["pretrained_cfg_overlay"] = {"state_dict": weights}
                self.net = timm.create_model(model, **options)
                # timm loads what fits and leaves the rest at random: all but positions must fit.
                positions = {k: w for k, w in self.net.state_dict().items() if "pos" in k}
                self.net.load_state_dict(weights | positions)
        else:
            with file_errors(f"--extractor {name}", "load it once online, or give timm/MODEL:FILE"):
                self.net = timm.create_model(model, **options)
        data_config = timm.data.resolve_data_config({}, pretrained_cfg=defaults.to_dict())
        # The usual centre crop would hide changes at the border.
        data_config |= {"input_size": (3, 224, 224), "crop_pct": 1.0, "crop_mode": "squash"}
        self.preprocess = timm.data.create_transform(**data_config)

    def forward(self, x: Tensor) -> Tensor:
        (grid,) = self.net.forward_intermediates(x, indices=1, intermediates_only=True)
        return grid


class Extractor:
    """Pictures -> grid features (n, C, H, W) float16. InputError if the name is unknown."""

    def __init__(self, name: str, device: str = "cpu"):
        self.device = device
        if name in RESNETS:
            net = resnet101_grid(name)
            self.preprocess = RESNETS[name]
        elif name.startswith("timm/"):
            net = TimmGrid(name)
            self.preprocess = net.preprocess
        elif name == "mini-cnn":
            net = mini.feature_net()
            self.preprocess = mini.preprocess
        else:
            known = ", ".join(RESNETS)
            raise InputError(f"--extractor {name}: expected {known}, timm/MODEL or timm/MODEL:FILE")
        self.net = net.to(device, memory_format=torch.channels_last).eval()

    def blocks(self, pictures: list, batch: int) -> Iterator[Tensor]:
        """Features of `batch` pictures at a time (anything that read_image takes); the next ones
        are decoded while the network runs."""
        cuda = self.device.startswith("cuda")

        def read(picture) -> Tensor:
            return self.preprocess(read_image(picture))

        def read_block(start: int) -> Tensor:
            return torch.stack(list(in_threads(read, pictures[start : start + batch])))

        for x in prefetch(read_block(start) for start in range(0, len(pictures), batch)):
            x = x.to(self.device, memory_format=torch.channels_last)
            with torch.inference_mode(), torch.autocast("cuda", torch.float16, enabled=cuda):
                grid = self.net(x)
            # The layout is channels-last; the GPU converts it faster than the CPU would.
            yield grid.half().contiguous().cpu()


# ---- feature files -------------------------------------------------------------------------------


def write_features(
    path: Path, files: dict[str, Path], blocks: Iterable, extractor: str, preprocessing: str
) -> None:
    """Write a feature file: `features` (n, C, H, W) float16, not chunked; `image_ids` (n,);
    `stamps` (n, 3). files: image name -> the file that its features are made from. `blocks` yields
    arrays (b, C, H, W) in this order. InputError if a feature is NaN or too large for float16."""
    names = list(files)
    done = 0
    stamps = []
    bar = progress(total=len(names), desc="features", unit="image")
    with bar, atomic_write(path) as temporary, h5py.File(temporary, "w") as f:
        f.attrs.update(extractor=extractor, preprocessing=preprocessing)
        f["image_ids"] = names
        for block in blocks:
            if not done:
                shape = (len(names), *block.shape[1:])
                table = f.create_dataset("features", shape, "float16", fill_time="never")
            if not np.abs(block).max() <= np.finfo(np.float16).max:  # phrased to refuse NaN, too
                raise InputError(f"features of {names[done]!r} or soon after are NaN or too large")
            table[done : done + len(block)] = block.astype(np.float16)
            stamps += [stamp(files[name]) for name in names[done : done + len(block)]]
            done += len(block)
            bar.update(len(block))
        assert done == len(names), f"{done} feature maps for {len(names)} images"
        f["stamps"] = np.array(stamps, np.int64)


def stamp(file: Path) -> tuple[int, int, int]:
    """A file's size in bytes, its modification time in ns and a checksum of its content."""
    status = file.stat()
    # Not CRC-32: a PNG holds CRCs of its own.
    checksum = hashlib.blake2b(file.read_bytes(), digest_size=7).digest()  # fits int64
    return status.st_size, status.st_mtime_ns, int.from_bytes(checksum, "big")


READ_AHEAD = 128 * 1024  # bytes; Linux may fetch no more of what one call announces


class Features:
    """A feature file whose rows are read by image name: from the memory-mapped file, which the
    system caches as far as memory allows, or from the GPU, if `load` has copied them there."""

    def __init__(self, path: Path, command: str, extractor: str):
        if not path.exists():
            others = ", ".join(file.name for file in path.parent.glob("features*.h5"))
            found = f" ({others}: give the --extractor that made it)" if others else ""
            raise FileNotFoundError(f"no features at {path}{found}; run: {command}")
        self.path = path
        self.remedy = f"remove it and run: {command}"
        with file_errors(path, self.remedy), h5py.File(path) as f:
            table = f["features"]
            names = f["image_ids"].asstr()[:]
            self.stamps = dict(zip(names, f["stamps"][:].tolist(), strict=True))
            self.extractor = f.attrs["extractor"]
            self.preprocessing = f.attrs["preprocessing"]
            self.row_of = {name: i for i, name in enumerate(names)}
            shape = table.shape
            offset = table.id.get_offset()
        if self.extractor != extractor:
            raise InputError(f"{path} was made by {self.extractor}, not {extractor}; {self.remedy}")
        self.file = open(path, "rb")  # stays open, for `announce`
        self.offset = offset
        # h5py reads rows in sorted order only. Nothing writes to the map, of which PyTorch warns.
        # One that could be written to would need as much memory as the file is large.
        table = np.memmap(self.file, np.float16, "r", offset, shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.data = torch.from_numpy(table)
        self.device = "cpu"  # `load` sets it if batches are sent to a GPU
        self.blind = False  # `load` sets it for the baseline that sees no images

    def announce(self, index: list[int]) -> None:
        """Tells the system which rows of the file are read next, so that it fetches many at once.
        Without that, the map's page faults wait for the disk one by one."""
        if not hasattr(os, "posix_fadvise"):  # macOS, Windows
            return
        size = self.data[0].nbytes
        for i in index:
            end = self.offset + (i + 1) * size
            for start in range(end - size, end, READ_AHEAD):
                length = min(READ_AHEAD, end - start)
                # Unlike mmap's madvise, this lets other threads run while it waits.
                os.posix_fadvise(self.file.fileno(), start, length, os.POSIX_FADV_WILLNEED)

    def rows(self, names: list[str]) -> Tensor:
        """Features of the named images (n, C, H, W) float16, in RAM or on their way to the GPU."""
        index = torch.tensor([self.row_of[name] for name in names])
        shape = (len(index), *self.data.shape[1:])
        if self.blind:
            return torch.zeros(shape, dtype=torch.float16)
        if self.data.is_cuda:
            # Indexing by the list itself would wait for what the GPU has to do before.
            return self.data[index.to(self.data.device, non_blocking=True)]
        self.announce(index.tolist())
        if self.device == "cpu":
            # PyTorch would copy in threads of its own, beside which those of training run half as
            # fast: where there are more OpenMP threads than cores, they sleep between operations.
            return torch.from_numpy(self.data.numpy()[index.numpy()])
        rows = torch.empty(shape, dtype=torch.float16, pin_memory=True)
        torch.index_select(self.data, 0, index, out=rows)  # in several threads, unlike NumPy
        return rows.to(self.device, non_blocking=True)

    def content(self, name: str) -> int:
        """The checksum of the file that a row was made from: equal for copies of a picture."""
        _, _, checksum = self.stamps[name]
        return checksum

    def require(self, paths: dict[str, Path]) -> None:
        """InputError if an image has no features, or if its picture (or the authors' .npy file) has
        been replaced since they were made. paths: image name -> picture."""
        touched = {}  # files of another time, by image name
        for name, picture in progress(paths.items(), desc="files", unit="file", delay=1):
            if name not in self.row_of:
                raise InputError(f"{self.path} lacks {name}; {self.remedy}")
            file = picture
            if self.preprocessing == AUTHORS_FILES:
                file = authors_features(picture)
            if file.exists():  # features may be shared without the files they were made from
                size, time, _ = self.stamps[name]
                status = file.stat()
                if (status.st_size, status.st_mtime_ns) != (size, time):
                    touched[name] = file
        # A copied file may have a new time, so its content decides.
        stamps = in_threads(stamp, list(touched.values()))
        bar = progress(stamps, desc="copied files", total=len(touched), unit="file", delay=1)
        for name, (_, _, checksum) in zip(touched, bar, strict=True):
            if checksum != self.content(name):
                replaced = f"{self.path} was made before {touched[name]} was replaced"
                raise InputError(f"{replaced}; {self.remedy}")


def feature_file(name: str, root: Path, extractor: str) -> Path:
    """features.h5, or features-<extractor>.h5 if the extractor is not the data set's own."""
    if extractor == DATASETS[name].extractor:
        return root / "features.h5"
    return root / f"features-{re.sub('[/:]', '-', extractor_name(extractor))}.h5"


def extractor_name(extractor: str) -> str:
    """The name of an extractor in feature files and checkpoints. In timm/MODEL:FILE, a digest of
    the weights replaces FILE, because the file may be moved or overwritten."""
    model, colon, file = extractor.partition(":")
    if not colon:
        return extractor
    with file_errors(file, f"if it has moved, give --extractor {model}:FILE with its new place"):
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return f"{model}:{digest[:12]}"


def open_features(name: str, root: Path, extractor: str) -> Features:
    """Opens the file of a data set's features that this extractor made."""
    command = ["python", "data.py", name, "--data_dir", str(root)]
    if extractor != DATASETS[name].extractor:
        command += ["--extractor", extractor]
    path = feature_file(name, root, extractor)
    return Features(path, shlex.join(command), extractor_name(extractor))


def vocab_of(name: str, release: Release) -> Vocab:
    """The vocabulary by the data set's rule; most data sets use the training captions alone."""
    settings = DATASETS[name]
    captions = release.captions(settings.vocab_splits)
    words = frequent_words(captions, settings.tokenizer, settings.min_count)
    return Vocab(words, settings.tokenizer, settings.max_words)


def prepare(
    name: str, root: Path, device: str, extractor: str = "", scenes: int | None = None
) -> None:
    """Write a data set's feature file; an existing one is kept. mini is drawn first (mini.make)."""
    settings = DATASETS[name]
    extractor = extractor or settings.extractor
    path = feature_file(name, root, extractor)
    if settings.make:
        settings.make(root, scenes)
    release = read_release(name, root)
    vocab = vocab_of(name, release)
    print_notes(*release.notes)
    texts = release.captions(["train"])
    cut = sum(vocab.split(text) != vocab.tokenizer(text) for text in texts)
    if cut:
        print_notes(f"{cut} training captions are cut to {vocab.max_words} words")
    counts = {part: len(members) for part, members in (release.scenes | release.kinds).items()}
    counts["words"] = len(vocab)
    for part, count in settings.published.items():
        if counts.get(part) != count:
            print_notes(f"{part}: found {counts.get(part)}, published {count}")
    for split in SPLITS:
        ids = {pair.id for pair in release.pairs(split)}
        kinds = [f", {len(ids & members)} {kind}" for kind, members in release.kinds.items()]
        print(f"{split}: {len(ids)} pairs{''.join(kinds)}")
    if not path.exists():
        make_features(name, path, release, device, extractor)
    features = open_features(name, root, extractor)
    features.require(release.paths)
    print_notes(*notes_on_copies(release, features))
    print(f"{root}: {len(release.paths)} images, {len(vocab)} words")


def notes_on_copies(release: Release, features: Features) -> list[str]:
    """A remark on pictures of val and test that are in train under another name, if any are."""
    names = release.images(["train"])
    training = {features.content(name) for name in names}
    others = sorted(release.images(["val", "test"]) - names)
    copies = [name for name in others if features.content(name) in training]
    if not copies:
        return []
    count = len(copies)
    return [f"{count} val and test pictures, such as {copies[0]}, are in train under other names"]


def make_features(name: str, path: Path, release: Release, device: str, extractor: str) -> None:
    """Write the feature file of a release: from the authors' .npy files if these exist and the
    extractor is the data set's own; otherwise from the pictures."""
    settings = DATASETS[name]
    pictures = dict(sorted(release.paths.items()))
    if settings.authors_features and extractor == settings.extractor:
        maps = {image: authors_features(picture) for image, picture in pictures.items()}
        if any(file.exists() for file in maps.values()):
            require_files(list(maps.values()))
            blocks = (read_npy(file)[None] for file in maps.values())
            write_features(path, maps, blocks, extractor, AUTHORS_FILES)
            return
    files = list(pictures.values())
    check_pictures(files)
    network = Extractor(extractor, device)
    batch = 64 if device.startswith("cuda") else 16  # a batch of 16 takes seconds on a CPU
    if extractor == "mini-cnn":
        batch = 512  # its pictures are small
    blocks = prefetch(block.numpy() for block in network.blocks(files, batch))
    write_features(path, pictures, blocks, extractor_name(extractor), "the extractor's")


def require_files(files: list[Path]) -> None:
    """FileNotFoundError if any of a release's files is missing."""
    absent = [file for file in files if not file.exists()]
    if absent:
        raise FileNotFoundError(f"there is no {absent[0]} ({len(absent)} of {len(files)} missing)")


def read_npy(path: Path) -> np.ndarray:
    """A feature map (C, H, W) published by the authors."""
    with file_errors(path, "fetch it again"):
        return np.load(path)  # refuses pickles, which could run arbitrary code


# ---- load and batches ----------------------------------------------------------------------------


@dataclass
class Batch:
    """B pairs; in training, one from each scene. Features as stored (float16), where Features.rows
    puts them; `to` makes them float32 on a device."""

    before: Tensor  # (B, C, H, W)
    after: Tensor  # (B, C, H, W); zeros if `single`
    caption: Tensor  # (B, V) ids: START, words, END, NULL ...
    pair_ids: list[str]  # B pair ids
    texts: list[str]  # B captions as they were written
    images: list[tuple[str, str]] = field(default_factory=list)  # B image names (before, after)
    single: bool = False  # captions of single images: there is no "after"

    def to(self, device: str) -> "Batch":
        before = self.before.to(device, non_blocking=True).float()
        after = self.after.to(device, non_blocking=True).float()
        caption = self.caption.to(device, non_blocking=True)
        return replace(self, before=before, after=after, caption=caption)


def prefetch(items: Iterator) -> Iterator:
    """Yields the items of an iterator; a thread makes the next one while the current one is in use.
    Items must not be None, which marks the end."""
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(next, items, None)
        while True:
            item = upcoming.result()
            if item is None:
                return
            upcoming = pool.submit(next, items, None)
            yield item


class Dataset(Release):
    """A release ready for a method, with its vocabulary and features. Made by `load`.

    A method's train and evaluate use vocab, grid, max_len, train_batches, eval_batches, results,
    state and check_state. Any object that has these can replace a Dataset; methods that use more
    say so where they do."""

    def __init__(self, name: str, root: Path, release: Release, vocab: Vocab, features: Features):
        super().__init__(**vars(release))
        self.name = name
        self.settings = DATASETS[name]
        self.root = root
        self.vocab = vocab
        self.features = features
        texts = set(release.captions(SPLITS))  # of all splits, as in the authors' scripts
        # Ids of the longest caption, START and END included; batches are padded to it.
        self.max_len = 2 + max(len(vocab.split(text)) for text in texts)
        self.no_change = self.no_change_captions()
        self.grid = tuple(features.data.shape[1:])  # (C, H, W)
        features.require(self.paths)

    def train_batches(
        self, batch_size: int, seed: int, first: int, last: int
    ) -> Iterator[tuple[Batch, ...]]:
        """The batches of steps first ... last - 1, made ahead and with a progress bar: for each
        step, a Batch of some scenes' first pairs and, where scenes have two, a Batch of their
        second ones. Seed and step alone determine these scenes, which of them are swapped (each
        with probability 1/2) and each pair's caption."""
        batches = prefetch(self.make_batches(batch_size, seed, first, last))
        return iter(tqdm(batches, "train", last, initial=first, disable=None))

    def make_batches(self, batch_size: int, seed: int, first: int, last: int) -> Iterator:
        """What train_batches yields."""
        scenes = self.scenes["train"]
        # [ours] Every batch is full, so that torch.compile makes one graph: an epoch leaves out the
        # scenes at its end, of which SCORER's and DIRL's code makes a small batch. So its epoch of
        # CLEVR-Change has 265 steps, ours has 264.
        size = min(batch_size, len(scenes))
        steps = len(scenes) // size  # of an epoch
        for step in range(first, last):
            epoch, number = divmod(step, steps)
            if number == 0 or step == first:  # otherwise the epoch goes on
                rng = np.random.default_rng([seed, epoch])
                order = rng.permutation(len(scenes))
                swap = rng.random(len(scenes)) < 0.5
                draw = rng.random((len(scenes), len(scenes[0].pairs)))
            chosen = order[number * size : (number + 1) * size]
            batches = []
            before = None  # the same in all pairs of a scene: read, and sent to a GPU, once
            for n in range(len(scenes[0].pairs)):  # first pairs of the scenes, then second ones
                pairs = []
                captions = []
                for i in chosen:
                    scene = scenes[i]
                    pair = scene.swapped[n] if scene.swapped and swap[i] else scene.pairs[n]
                    pairs.append(pair)
                    captions.append(pair.captions[int(draw[i, n] * len(pair.captions))])
                batches.append(self.batch(pairs, captions, before))
                before = batches[0].before
            yield tuple(batches)

    def pictures(self, pair: Pair) -> list[Image.Image]:
        """A pair's pictures, at most 300 pixels wide and high. A grey one stands in for a missing
        file, because features may be shared without pictures."""
        pictures = []
        for name in (pair.before, pair.after):
            picture = Image.new("RGB", (96, 96), "grey")
            if self.paths[name].exists():
                picture = read_image(self.paths[name])
                picture.thumbnail((300, 300))
            pictures.append(picture)
        return pictures

    def eval_batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        """Every pair of a split in order, with its first caption."""
        pairs = self.pairs(split)
        starts = range(0, len(pairs), batch_size)
        batches = prefetch(self.batch(pairs[i : i + batch_size]) for i in starts)
        return iter(progress(batches, desc=split, total=len(starts), leave=False, delay=1))

    def batch(
        self, pairs: list[Pair], captions: list[str] | None = None, before: Tensor | None = None
    ) -> Batch:
        """Pairs with one caption each (default: their first), padded to max_len ids, so that
        torch.compile makes one graph. before: these images' features, if they have been read."""
        captions = captions or [pair.captions[0] for pair in pairs]
        single = pairs[0].after is None
        if before is None:
            before = self.features.rows([pair.before for pair in pairs])
        if single:
            # Not for pairs: this starts OpenMP threads, here in the thread of `prefetch`, and more
            # of them than cores slow down every step on a CPU.
            after = torch.zeros_like(before)
        else:
            after = self.features.rows([pair.after for pair in pairs])
        ids = torch.tensor([self.vocab.encode(caption, self.max_len) for caption in captions])
        ids = ids.to(before.device, non_blocking=True)
        pair_ids = [pair.id for pair in pairs]
        images = [(pair.before, pair.after) for pair in pairs]
        return Batch(before, after, ids, pair_ids, captions, images, single)

    def no_change_captions(self) -> set[str]:
        """Captions which say that nothing changed, as a model outputs them: those of unchanged
        training pairs and of Settings.no_change."""
        captions = set(self.settings.no_change)
        unchanged = self.kinds.get("no change", set())
        for pair in self.pairs("train"):
            if pair.id in unchanged:
                captions.update(pair.captions)
        return {" ".join(self.vocab.split(caption)) for caption in captions}

    results = scores.results  # a method: the scores of a split's captions

    def state(self) -> dict:
        """What a checkpoint keeps, for captioning and for `check_state` and `check_fit`."""
        return {
            "vocab": self.vocab.words,
            "extractor": self.features.extractor,
            "grid": self.grid,
            "max_len": self.max_len,
            "no_change": sorted(self.no_change),
            "train_pairs": self.train_pairs,
            "digest": self.digest,
        }

    def contents(self, split: str) -> Tensor:
        """Checksums of each pair's "before" and "after" (n, 2)."""
        content = self.features.content
        rows = [(content(pair.before), content(pair.after)) for pair in self.pairs(split)]
        return torch.tensor(rows).view(-1, 2)

    # These two take a second on a large data set, and every checkpoint has them.
    @cached_property
    def train_pairs(self) -> Tensor:
        return self.contents("train")

    @cached_property
    def digest(self) -> str:
        """A hash of what a run learns from: pictures and captions of training and validation."""
        parts = []
        for split in ("train", "val"):
            parts.append(str(self.contents(split).tolist()))
            parts.append(str([pair.captions for pair in self.pairs(split)]))
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def check_state(self, state: dict) -> None:
        """InputError if a run, whose state this is, learned from other data."""
        self.check_fit(state)
        if state["digest"] != self.digest:
            changed = f"the training or validation pairs of {self.root} are not those of the run"
            raise InputError(f"{changed}; train anew, with another --out_dir")

    def adopt(self, state: dict) -> None:
        """Takes the words and the max_len of a checkpoint, to evaluate it here. Its sentences for
        "no change" count here, too."""
        self.vocab = Vocab(state["vocab"], self.vocab.tokenizer, self.vocab.max_words)
        self.max_len = state["max_len"]
        self.no_change |= set(state["no_change"])
        self.check_fit(state)

    def check_fit(self, state: dict) -> None:
        """InputError if a checkpoint has other features or words. Prints a note if it was trained
        on pairs that are now for validation or test."""
        trained = (state["extractor"], tuple(state["grid"]))
        own = (self.features.extractor, self.grid)
        if trained != own:
            remedy = "give the --data_dir and --extractor of its training"
            raise InputError(f"the checkpoint's features are {trained}, not {own}; {remedy}")
        if state["vocab"] != self.vocab.words:
            remedy = "give its --data_dir (IDC: and --cub); if captions were edited, train anew"
            raise InputError(f"the checkpoint has other words than {self.root}; {remedy}")
        train_pairs = set(map(tuple, state["train_pairs"].tolist()))
        for split in ("val", "test"):
            pairs = self.contents(split).tolist()
            known = sum(tuple(pair) in train_pairs for pair in pairs)
            if known:
                told = f"the checkpoint was trained on {known} of the {len(pairs)} {split} pairs"
                print_notes(f"{told}, so their scores say little; train anew in a new folder")


def load(name: str, root: str | Path, cfg: RunConfig | None = None, **fields) -> Dataset:
    """Read a prepared data set; an error says which command makes what is missing. Of cfg, or of
    fields such as extractor="timm/resnet18", it uses device, extractor, blind and features: these
    are read from the "file" or kept on the "gpu" ("auto": if they fill less than 60 % of it)."""
    cfg = replace(cfg or RunConfig(), **fields)
    root = Path(root)
    release = read_release(name, root)
    features = open_features(name, root, cfg.extractor or DATASETS[name].extractor)
    features.blind = cfg.blind
    dataset = Dataset(name, root, release, vocab_of(name, release), features)
    size = features.data.nbytes
    place = "read from the file"
    if cfg.on_cuda:
        # This call also initialises CUDA on this GPU. Otherwise its first use could be to pin
        # memory in the thread of `prefetch`, which would pick GPU 0.
        free, _ = torch.cuda.mem_get_info(cfg.device)
        fits = size < 0.6 * free
        if cfg.features == "gpu" or (cfg.features == "auto" and fits):
            features.data = features.data.to(cfg.device)
            place = "on the GPU"
        else:
            features.device = cfg.device
    print_notes(*release.notes, *notes_on_copies(release, dataset.features))
    counts = {split: len(dataset.pairs(split)) for split in SPLITS}
    print(f"{root}: {counts['train']} train, {counts['val']} val, {counts['test']} test pairs")
    print(f"features: {size / 1e6:.0f} MB, {place}")
    return dataset


def open_dataset(cfg: RunConfig, make: bool = True) -> Dataset:
    """The data set that a run's config names. With `make`, mini is made first if it is missing; to
    evaluate a checkpoint, the mini that it was trained on must exist."""
    if cfg.dataset not in DATASETS:
        raise InputError(f"--dataset {cfg.dataset}: expected one of {', '.join(DATASETS)}")
    if DATASETS[cfg.dataset].make and make:
        prepare(cfg.dataset, Path(cfg.data_dir), cfg.device, cfg.extractor)
    dataset = load(cfg.dataset, cfg.data_dir, cfg)
    if dataset.scenes["train"][0].pairs[0].after is None:
        raise InputError(f"--dataset {cfg.dataset} has no pairs; IDC reads it by --{cfg.dataset}")
    return dataset


def note_on_negatives(dataset: Dataset, cfg: RunConfig, *weights: str) -> None:
    """Prints a note if more than a tenth of the training pairs share a picture, which losses that
    contrast the images of a batch take for different. weights: their fields of cfg."""
    content = dataset.features.content
    scenes_with = Counter()  # an image's content -> in how many scenes it occurs
    for scene in dataset.scenes["train"]:
        scenes_with.update({content(name) for name in scene.images()})
    shared = {key for key, count in scenes_with.items() if count > 1}
    pairs = dataset.contents("train").tolist()
    sharing = sum(not shared.isdisjoint(pair) for pair in pairs)
    flags = " ".join(f"--{name} 0" for name in weights if getattr(cfg, name))
    if flags and 10 * sharing > len(pairs):
        shares = f"{sharing} of {len(pairs)} training pairs share a picture with another scene"
        print_notes(f"{shares}; contrastive losses take them for different: compare with {flags}")


# ==================================================================================================
# Second half: what a run needs. A data set of your own can do without it.
# ==================================================================================================

# ---- phrases of captions -------------------------------------------------------------------------

# spaCy's model often misreads the templates of mini, CLEVR-Change and CLEVR-DC, so rules read their
# captions: a pattern of an object, and patterns of two kinds of sentences without an object.
OBJECT = re.compile(
    r"\b(?:(?:small|tiny|large|big"
    r"|gray|red|blue|green|brown|purple|cyan|yellow"
    r"|rubber|matte|metal|metallic|shiny) )*"
    r"(?:sphere|ball|cube|block|cylinder|thing|object)\b"
)
# "there is no change", "no change was made", "nothing has changed"
NOTHING_CHANGED = re.compile(r"(there (?:is|are))? ?\b(no (?!longer)\w+|nothing)\b ?(.*)")
# "the scene is the same as before", "the two pictures show the same scene", "everything is ..."
ALL_SAME = re.compile(
    r"(?:the |all )*((?:two )?(?:scenes?|pictures?|images?|objects)|everything)\W+"
    r"(.*?)(?: as before)?"
)
# A phrase that begins or ends with one of these names no entity.
NO_ENTITY_ENDS = {
    *"scene scenes image images picture pictures pic pics photo photos".split(),
    *"change changes difference differences".split(),
}
NO_ENTITY_STARTS = {"no", "none", "nothing", "everything"}
# A clause with one of these relations is part of its governing clause, or coordinated with it.
INNER_CLAUSES = {*"conj aux auxpass nsubj nsubjpass csubj csubjpass ccomp xcomp".split()}
QUANTITIES = {"NUM", "ADJ", "DET", "PRON"}  # "one of the cars", "most of the cars", "some of ..."


def analysed(dataset_name: str, captions: list[str]) -> Iterable:
    """Each caption as spaCy analyses it (a Doc) or, if they are made from templates, which rules
    read, as it is. InputError if spaCy or its English model is missing."""
    if DATASETS[dataset_name].templates:
        return captions
    try:
        import spacy

        nlp = spacy.load("en_core_web_sm", exclude=["ner", "lemmatizer"])
    except (ImportError, OSError) as e:
        install = "pip install spacy && python -m spacy download en_core_web_sm"
        raise InputError(f"{dataset_name} needs spaCy's English model; run: {install}") from e
    print(f"captions are analysed by {nlp.meta['lang']}_{nlp.meta['name']} {nlp.meta['version']}")
    return nlp.pipe(captions, batch_size=1000)


def template_segments(caption: str) -> tuple[list[str], list[str]]:
    """Noun segments and verb segments of a template caption, in lower case: its objects, and the
    text after the last object, or before the first one if nothing follows."""
    text = " ".join(caption.lower().split()).rstrip(" .")
    no_change = NOTHING_CHANGED.fullmatch(text)
    all_same = ALL_SAME.fullmatch(text)
    objects = list(OBJECT.finditer(text))
    if no_change:
        opening, noun, action = no_change.groups()
        nouns = [noun]
        action = opening or action
    elif all_same:
        noun, action = all_same.groups()
        nouns = [noun, *re.findall(r"same (?!as\b)\w+", action)]
    elif objects:
        nouns = [match[0] for match in objects]
        action = text[objects[-1].end() :].strip(" ,")
        action = re.sub(r"^in the (?:before|after) image ", "", action)  # in CLEVR-DC
        if not action:  # "someone added a red cube", "there is a new red cube"
            action = text[: objects[0].start()].removeprefix("someone ")
            action = re.sub(r"(?:\b(?:a|an|the|new|other) )*$", "", action).strip()
    else:
        remedy = "correct the caption, or add its words to OBJECT in data.py"
        raise InputError(f"{caption!r} names no object and no lack of change; {remedy}")
    verbs = [action] if action else []
    return nouns, verbs


def noun_phrase(chunk) -> str:
    """A noun chunk of spaCy in lower case, without leading articles and pronouns."""
    while chunk and chunk[0].pos_ in ("DET", "PRON") and chunk[0].lower_ not in NO_ENTITY_STARTS:
        chunk = chunk[1:]
    return " ".join(chunk.text.lower().split())


def subjects(doc) -> list[str]:
    """What has changed according to a caption (see `analysed`), in lower case, without articles or
    a leading "new". Of a template caption: its first object. Otherwise: the subjects of the main
    clause and of clauses coordinated with it or, if these have none ("there is a car", "remove the
    car"), their objects. "No change", "nothing" and words for the pictures are not entities."""
    if isinstance(doc, str):  # a template's caption
        nouns, _ = template_segments(doc)
        return [noun for noun in nouns if OBJECT.fullmatch(noun)][:1]
    subject_phrases = []
    object_phrases = []
    for chunk in doc.noun_chunks:
        phrase = noun_phrase(chunk).removeprefix("new ")
        if not phrase or phrase.split()[-1] in NO_ENTITY_ENDS:
            continue
        noun = chunk.root
        while noun.dep_ == "conj":  # in "the car and the van", the van has the role of the car
            noun = noun.head
        if noun.dep_ == "pobj" and noun.head.lower_ == "of" and noun.head.head.pos_ in QUANTITIES:
            noun = noun.head.head
        clause = noun if noun.dep_ == "ROOT" else noun.head
        while clause.dep_ in INNER_CLAUSES:
            clause = clause.head
        if clause.dep_ != "ROOT":
            continue
        if noun.dep_ in ("nsubj", "nsubjpass"):
            subject_phrases.append(phrase)
        elif noun.dep_ in ("attr", "dobj", "ROOT"):
            object_phrases.append(phrase)
    phrases = dict.fromkeys(subject_phrases or object_phrases)
    return [phrase for phrase in phrases if phrase.split()[0] not in NO_ENTITY_STARTS]


def read_captions(read: Callable, dataset_name: str, captions: list[str]) -> dict[str, list]:
    """Each caption -> what `read` makes of it: `subjects`, or RDD's segments."""
    docs = analysed(dataset_name, captions)
    bar = progress(docs, desc=read.__name__, total=len(captions), unit="caption")
    return {caption: read(doc) for caption, doc in zip(captions, bar, strict=True)}


# ---- captions of any two pictures ----------------------------------------------------------------


class Captioner:
    """A trained model that captions any two pictures (see read_image): caption, maps =
    captioner(before, after). caption: see Vocab.sentence; maps: name -> attention map (H, W).

    model, state: from common.load_model; state["extractor"] names the feature network.
    inputs(model, state, pictures) -> a further input of the model's generate and attention_map, one
    row per pair, or None; pictures are in the order before, after, before, after, ..."""

    def __init__(self, model: nn.Module, state: dict, inputs: Callable | None = None):
        self.model = model
        self.state = state
        self.inputs = inputs
        self.device = model.cfg.device
        self.vocab = Vocab(state["vocab"])
        self.extractor = Extractor(state["extractor"], self.device)

    def __call__(self, before, after) -> tuple[str, dict[str, Tensor]]:
        return next(self.pairs([(before, after)]))

    def pairs(self, pairs: list[tuple], batch: int = 16) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yields the caption and the maps of every pair in a list."""
        pictures = [picture for pair in pairs for picture in pair]
        # PIL images are read here, as two threads must not read the same one.
        pictures = [read_image(p) if isinstance(p, Image.Image) else p for p in pictures]
        rows = self.inputs(self.model, self.state, pictures) if self.inputs else None
        starts = range(0, len(pairs), batch)
        blocks = self.extractor.blocks(pictures, 2 * batch)
        for i, x in zip(starts, blocks, strict=True):
            x = x.to(self.device).float().unflatten(0, (-1, 2))  # (B, 2, C, H, W)
            before, after = x.unbind(1)
            inputs = [] if rows is None else [rows[i : i + batch]]
            ids = self.model.generate(before, after, *inputs)
            maps = self.model.attention_map(before, after, ids, *inputs)
            for n, caption in enumerate(self.vocab.decode(ids)):
                yield Vocab.sentence(caption), {name: heat[n] for name, heat in maps.items()}


def load_captioner(
    Model: Callable[..., nn.Module],
    Config: type,
    checkpoint: str | Path,
    device: str = "",
    extractor: str = "",
    inputs: Callable | None = None,
) -> Captioner:
    """A trained model for any two pictures. Model: as in common.load_model, with generate and
    attention_map. extractor: timm/MODEL:FILE says where FILE is now. InputError if it is another
    network or FILE than in training."""
    cfg = saved_config(Config, checkpoint)
    cfg.device = usable_device(device)
    model, state = load_model(Model, cfg, checkpoint)
    trained = state["extractor"]  # for timm/MODEL:FILE, it has a digest of FILE
    extractor = extractor or cfg.extractor or trained
    if extractor_name(extractor) != trained:
        remedy = f"{checkpoint} was trained on {trained}, so give that one"
        raise InputError(f"--extractor {extractor} is another network or FILE; {remedy}")
    state["extractor"] = extractor
    return Captioner(model, state, inputs)


# ---- CLIP ----------------------------------------------------------------------------------------


def load_clip(name: str, device: str = "cpu") -> tuple:
    """A frozen CLIP in float32, its tokenizer (texts -> ids) and its preprocessing (PIL image ->
    tensor). `name` is MODEL:PRETRAINED in open_clip's names, such as "ViT-L-14:openai" (fetched on
    first use), or MODEL:FILE, or mini for mini's own. InputError if there is no such CLIP."""
    import open_clip

    if name == "mini":
        clip, tokenizer = mini.load_clip()
        return clip.to(device).eval().requires_grad_(False), tokenizer, mini.preprocess
    model, _, weights = name.partition(":")
    tags = open_clip.list_pretrained_tags_by_model(model)
    if weights not in tags and not Path(weights).is_file():
        known = ", ".join(tags) or "none (open_clip.list_models() lists the models)"
        raise InputError(f"--clip {name}: expected MODEL:FILE, or of this model one of: {known}")
    if weights not in tags and f"{model}-quickgelu" in open_clip.list_models():
        openai = f"OpenAI's weights need {model}-quickgelu:{weights}"
        print_notes(f"--clip {name} computes with GELU; {openai}")
    # OpenAI's weights need QuickGELU, an activation that open_clip's model of this name lacks.
    quick = bool((open_clip.get_pretrained_cfg(model, weights) or {}).get("quick_gelu"))
    # [ours] CLIP's own transform crops the centre, and would miss changes at the border.
    options = {"force_quick_gelu": quick, "image_resize_mode": "squash"}
    with file_errors(f"--clip {name}", "load it once while online, or give MODEL:FILE"):
        clip, _, preprocess = open_clip.create_model_and_transforms(model, weights, **options)
    clip = clip.to(device).eval().requires_grad_(False)
    return clip, open_clip.get_tokenizer(model), preprocess


# ---- command line --------------------------------------------------------------------------------


def check_out(out: str, endings: tuple[str, ...], files: Iterable[str | Path]) -> None:
    """InputError if `out` has none of the endings or is one of the files to read."""
    path = Path(out)
    if path.suffix.lower() not in endings:
        raise InputError(f"--out {out}: expected a name that ends in {' or '.join(endings)}")
    if path.resolve() in {Path(file).resolve() for file in files}:
        raise InputError(f"--out {out} is one of the files to read; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)


def caption_files(captioner: Captioner, files: list[str], out: str | None) -> None:
    """Prints the caption of two image files, or of every pair of a CSV file. `out`: where to write
    the attention picture, or the table with its captions."""
    if len(files) == 1 and Path(files[0]).suffix.lower() == ".csv":
        caption_table(captioner, Path(files[0]), out)
        return
    if len(files) != 2:
        given = shlex.join(map(str, files))
        raise InputError(f"--caption {given}: expected two pictures or a .csv")
    if out:
        check_out(out, (".png", ".jpg", ".pdf"), files)
    caption, maps = captioner(*files)
    print(caption)
    if out:
        scores.caption_picture(*map(read_image, files), maps, caption, Path(out))


def caption_table(captioner: Captioner, file: Path, out: str | None) -> None:
    """The same for a CSV file with the columns before and after, whose paths are relative to it.
    `out` gets the same table with one more column, "caption"."""
    table = read_table(file, ("before", "after"))
    pairs = [(file.parent / row["before"], file.parent / row["after"]) for row in table.rows]
    pictures = list(dict.fromkeys(itertools.chain(*pairs)))
    if out:
        check_out(out, (".csv",), [file, *pictures])
        if any("caption" in row for row in table.rows):
            raise InputError(f"{file} has a column caption, where --out writes; rename it")
    check_pictures(pictures)  # so that none stops the work halfway
    captions = []
    for row, (caption, _) in zip(table.rows, captioner.pairs(pairs), strict=True):
        captions.append(caption)
        print(f"{row['before']} {row['after']}: {caption}", flush=True)
    if not out:
        return
    with atomic_write(Path(out)) as partial, open(partial, "w", encoding="utf-8", newline="") as f:
        f.write(table.mark)
        writer = csv.writer(f, delimiter=table.separator, lineterminator="\n")
        for cells, caption in zip(table.lines, ["caption", *captions], strict=True):
            writer.writerow([*cells, caption])


def main(argv: list[str] | None = None) -> None:
    """The command line: NAME prepares a data set."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="NAME", required=True)
    for name in DATASETS:
        p = commands.add_parser(name, help=f"prepare the data set {name}", allow_abbrev=False)
        folder = f"data/{name}"
        p.add_argument("--data_dir", type=home_expanded, default=folder, help=f"default: {folder}")
        p.add_argument("--device", default="", help="of the extractor (default: cuda if available)")
        text = f"network that makes the features: {', '.join(RESNETS)}, timm/MODEL, timm/MODEL:FILE"
        text += " (default: the data set's own)"
        p.add_argument("--extractor", type=home_expanded, default="", help=text)
        if DATASETS[name].make:
            p.add_argument("--scenes", type=int, help="training scenes (default: 5000)")
    args = parser.parse_args(argv)
    device = usable_device(args.device)
    scenes = getattr(args, "scenes", None)
    prepare(args.command, Path(args.data_dir), device, args.extractor, scenes)


if __name__ == "__main__":
    run_main(main)
