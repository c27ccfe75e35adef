"""Data of change captioning: vocabulary, release layouts, grid features, batches, the embedded data set, scores.

    python data.py mini                               render the embedded data set and make its features
    python data.py clevr_change --data_dir D          extract features, build the vocabulary
    python data.py clevr_change --data_dir D --check  what is there, what is missing
    python data.py score --predictions P --references R
    python data.py bounds clevr_change --data_dir D   scores of captions made without looking, and of a person

A data set is a folder in its authors' release layout; `load` reads it into a Dataset, whose batches feed any method.
The data sets are mini (embedded), clevr_change, clevr_dc, spot_the_diff, image_editing_request, levir_cc,
birds_to_words, cub, nabirds, and pairs (your own); each has a reader and a row in the table DATASETS.
Preparation adds a feature file (features.h5, or features-<extractor>.h5 for another extractor) and a vocabulary
(vocab.json) to the folder. Nothing is downloaded at import.
"""

import contextlib
import csv
import functools
import hashlib
import itertools
import json
import math
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Literal

import h5py
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.models import ResNet101_Weights, resnet101
from torchvision.ops import Conv2dNormActivation, box_convert, box_iou
from tqdm import tqdm

from common import (
    END,
    NULL,
    START,
    UNK,
    Parser,
    RunConfig,
    atomic_write,
    file_errors,
    load_tensors,
    load_weights,
    progress,
    run_main,
    save_tensors,
    usable_device,
)

SPLITS = ("train", "val", "test")
RELEASED_FEATURES = "the authors' released .npy files"  # where features come from, if not from an extractor here
RELEASED_PICKLES = "the released pickles of IDC's authors"

# ---- vocabulary ------------------------------------------------------------------------------------------------------

SPECIAL = ["<NULL>", "<UNK>", "<START>", "<END>"]


def tokenize(caption: str) -> list[str]:
    """The field's vocabulary rule: put a blank before ';' and ',', delete '?' and '.', split at single blanks, keep the
    case. Double or outer blanks give empty words, which stay because published vocabulary sizes count them."""
    for mark in ";,":
        caption = caption.replace(mark, f" {mark}")
    return caption.replace("?", "").replace(".", "").split(" ")


def tokenize_lower(caption: str) -> list[str]:
    """Lower-case words, runs of dots, and every other sign by itself (the rule of Image Editing Request's authors)."""
    return re.findall(r"\w+|\.+|[^\w\s]", caption.lower())


class Vocab:
    """Words <-> ids: the four special ids, then the words of the training captions in codepoint order. `tokenizer` cuts
    captions into words, of which the first `max_words` are read (None: all)."""

    def __init__(self, words: list[str], tokenizer: Callable = tokenize, max_words: int | None = None):
        if words[: len(SPECIAL)] != SPECIAL:
            raise ValueError(f"vocabulary must begin with {' '.join(SPECIAL)}")
        if len(words) == len(SPECIAL):
            raise ValueError("the vocabulary has no words; add captions, or lower the data set's min_count in DATASETS")
        self.words, self.index = words, {w: i for i, w in enumerate(words)}
        self.tokenizer, self.max_words = tokenizer, max_words

    @classmethod
    def of(cls, captions: Iterable[str], min_count: int = 1, tokenizer: Callable = tokenize, max_words=None):
        """The vocabulary of the words that occur in the captions at least `min_count` times."""
        counts = Counter(word for caption in captions for word in tokenizer(caption))
        return cls(SPECIAL + sorted(w for w, n in counts.items() if n >= min_count), tokenizer, max_words)

    def __len__(self) -> int:
        return len(self.words)

    def split(self, caption: str) -> list[str]:
        """A caption's words, up to the first `max_words`."""
        return self.tokenizer(caption)[: self.max_words]

    def encode(self, caption: str, length: int) -> list[int]:
        """START, words, END, then NULL up to `length`; words that are not in the vocabulary become UNK."""
        ids = [START, *(self.index.get(w, UNK) for w in self.split(caption)), END]
        if len(ids) > length:
            raise ValueError(f"caption of {len(ids)} ids (with START and END), longer than {length}: {caption!r}")
        return ids + [NULL] * (length - len(ids))

    def decode(self, ids: Tensor) -> list[str]:
        """(B, V) ids that begin with START -> B captions, each up to its first NULL or END."""
        rows = (itertools.takewhile(lambda w: w not in (NULL, END), row) for row in ids[:, 1:].tolist())
        return [" ".join(self.words[w] for w in row) for row in rows]


# ---- what a reader returns -------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """Two images and their captions. `before` and `after` are image names; `id` is the name in result files. A
    single image with captions (CUB, NABirds) is a pair whose `after` is None."""

    id: str
    before: str
    after: str | None
    captions: list[str]


@dataclass
class Scene:
    """Pairs that always train together: CLEVR-Change's changed pair and distractor pair; elsewhere a single pair.
    `swapped`: these pairs with the default image and the distractor image exchanged."""

    pairs: tuple[Pair, ...]
    swapped: tuple[Pair, ...] | None = None


@dataclass
class Release:
    """What the files of a release say."""

    scenes: dict[str, list[Scene]]  # split -> scenes
    groups: dict[str, set[str]]  # group that is scored separately -> pair ids
    kinds: dict[str, set[str]]  # kind of change -> pair ids
    overlap: dict[str, float]  # pair id -> IoU of object boxes between the two images; empty if not released
    paths: dict[str, Path]  # image name -> file
    # pair id -> the changed object's box [x, y, w, h] in pixels, before and after; None if it is not in the image
    boxes: dict[str, tuple[list | None, list | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what to know about this copy, such as missing pairs


def of_single_pairs(pairs: dict[str, list[Pair]], folder: Path, kinds: dict | None = None, notes=()) -> Release:
    """A release of one pair a scene. pairs: split -> its pairs, whose image names are relative to `folder`. Each kind
    of change is scored separately."""
    if unknown := pairs.keys() - set(SPLITS):
        raise ValueError(f"{folder}: expected the splits {', '.join(SPLITS)}, found {min(unknown)!r}")
    every = [p for split_pairs in pairs.values() for p in split_pairs]
    paths = {name: folder / name for p in every for name in (p.before, p.after) if name}
    scenes = {split: [Scene((p,)) for p in pairs.get(split, ())] for split in SPLITS}
    return Release(scenes, kinds or {}, kinds or {}, {}, paths, notes=[*notes])


LOCK = ".lock"


def lock(folder: Path) -> IO:
    """Makes the folder and keeps other processes out of it until the returned file is closed. ValueError if another
    process holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / LOCK, "w")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise ValueError(f"another process is at work in {folder}; wait for it, or choose another folder") from e
    except (ImportError, OSError) as e:  # Windows, and file systems without locks
        print(f"{folder} cannot be locked ({e}): start no second process there")
    return file


def check_shape(content, shape, where: str = "") -> None:
    """ValueError if parsed JSON does not have this shape: str means a string, (int, str) either type, [str] a list of
    strings, {str: int} a dict of numbers, {"a": int} one with a number under "a". where: its place in the file."""
    types = type(shape) if isinstance(shape, list | dict) else shape
    if isinstance(content, bool) or not isinstance(content, types):
        names = " or ".join(t.__name__ for t in (types if isinstance(types, tuple) else [types]))
        raise ValueError(f"{where}expected {names}, found {content!r:.60}")
    if isinstance(shape, list):
        for n, item in enumerate(content):
            check_shape(item, shape[0], f"{where}item {n}, ")
    elif isinstance(shape, dict):
        for key in content if str in shape else shape:
            if key not in content:
                raise ValueError(f"{where}expected the key {key!r}, found {', '.join(map(str, content)):.60}")
            check_shape(content[key], shape.get(str) or shape[key], f"{where}{key}, ")


def read_json(path: Path, shape=dict):
    """The parsed JSON of a file, which must have this shape (see check_shape)."""
    text = path.read_bytes()  # given bytes, json.loads detects the encoding
    with file_errors(path, "correct it, or fetch it again"):
        content = json.loads(text)
        check_shape(content, shape)
    return content


def read_table(path: Path, columns: Iterable[str], **dialect) -> dict[str, dict[str, str]]:
    """The rows of a CSV file, which must have these columns, keyed by the line on which each ends ("line 2")."""
    with open(path, encoding="utf-8-sig", newline="") as f, file_errors(path, "correct it"):
        rows = csv.DictReader(f, **dialect)
        rows = {f"line {rows.line_num}": row for row in rows}
        check_shape(rows, {str: dict.fromkeys(columns, str)})
    return rows


def read_columns(path: Path) -> dict[str, str]:
    """The lines of a text file: the first word -> the rest."""
    lines = path.read_text(encoding="utf-8").splitlines()
    with file_errors(path, "expected two columns"):
        return dict(line.split(maxsplit=1) for line in lines if line.strip())


SPLIT_IDS = {split: [int] for split in SPLITS}
NUMBER = (int, float)

# ---- readers, one for each release -----------------------------------------------------------------------------------

CLEVR_FOLDERS = {"default": "images", "semantic": "sc_images", "nonsemantic": "nsc_images"}


def read_clevr_change(root: Path) -> Release:
    """CLEVR-Change's layout (Park et al., ICCV 2019): images/, sc_images/, nsc_images/, splits.json, type_mapping.json,
    change_captions.json, no_change_captions.json; optional: change_captions_by_IOU.json (scores by viewpoint) and
    change_captions_with_bbox.json (pointing game). Captions are keyed by the default image. If there are change
    captions for the distractor image, too (in mini), they are written from its view, and swapped pairs use them."""
    splits = read_json(root / "splits.json", SPLIT_IDS)
    captioned = {f"CLEVR_default_{number:06d}.png": [str] for split in SPLITS for number in splits[split]}
    change, same = (read_json(root / f"{name}_captions.json", captioned) for name in ("change", "no_change"))
    kinds = {kind: set(names) for kind, names in read_json(root / "type_mapping.json", {str: [str]}).items()}
    release = Release({}, {"semantic change": set(), "only distractor": set()} | kinds, kinds, {}, {})
    for split in SPLITS:
        release.scenes[split] = []
        for number in splits[split]:
            default, semantic, distractor = (f"CLEVR_{view}_{number:06d}.png" for view in CLEVR_FOLDERS)
            for folder, name in zip(CLEVR_FOLDERS.values(), (default, semantic, distractor), strict=True):
                release.paths[name] = root / folder / name
            changed = Pair(f"{number:06d}.png", default, semantic, change[default])
            unchanged = Pair(f"{number:06d}.png_n", default, distractor, same[default])
            changed_swapped = replace(changed, before=distractor, captions=change.get(distractor, changed.captions))
            unchanged_swapped = replace(unchanged, before=distractor, after=default)
            release.scenes[split].append(Scene((changed, unchanged), (changed_swapped, unchanged_swapped)))
            release.groups["semantic change"].add(changed.id)
            release.groups["only distractor"].add(unchanged.id)
    kinds["no change"] = release.groups["only distractor"]
    release.overlap = read_by_number(root / "change_captions_by_IOU.json", NUMBER)
    box = (list, type(None))
    boxes = read_by_number(root / "change_captions_with_bbox.json", {"bbox_before": box, "bbox_after": box})
    release.boxes = {pair: (both["bbox_before"], both["bbox_after"]) for pair, both in boxes.items()}
    return release


def read_by_number(file: Path, shape) -> dict:
    """A JSON object with its keys, scene numbers ("12"), turned into pair ids ("000012.png"); {} without the file."""
    content = read_json(file, {str: shape}) if file.exists() else {}
    with file_errors(file, "expected numbers of scenes as keys"):
        return {f"{int(number):06d}.png": value for number, value in content.items()}


DC_KINDS = ("color", "texture", "add", "remove", "move", "no change")


def read_clevr_dc(root: Path) -> Release:
    """CLEVR-DC (Kim et al., ICCV 2021): bef/ and aft/<id>.png, captions.json, split.json. No file gives the kind of
    change. The ids form six equal blocks, which we take to be in the order in which the authors list their changes."""
    splits = read_json(root / "split.json", SPLIT_IDS)
    ids = [i for split in SPLITS for i in splits[split]]
    texts, pairs, kinds = read_json(root / "captions.json", {str(i): [str] for i in ids}), {}, {}
    for split in SPLITS:
        pairs[split] = [Pair(f"{i:06d}.png", f"bef/{i}.png", f"aft/{i}.png", texts[str(i)]) for i in splits[split]]
    block, rest = divmod(len(ids), len(DC_KINDS))
    if sorted(ids) == [*range(len(ids))] and not rest:
        kinds = {kind: {f"{n * block + i:06d}.png" for i in range(block)} for n, kind in enumerate(DC_KINDS)}
    return of_single_pairs(pairs, root, kinds)


def read_spot_the_diff(root: Path) -> Release:
    """Spot-the-Diff (Jhamtani and Berg-Kirkpatrick, EMNLP 2018): annotations/<split>.json, resized_images/<id>.png and
    <id>_2.png. All rows of an id (one per annotator) form one pair. Each sentence is a caption, even the 66 empty ones,
    because published vocabularies and scores count them."""
    pairs = {}
    for split in SPLITS:
        texts: dict[str, list[str]] = {}
        for row in read_json(root / f"annotations/{split}.json", [{"img_id": (str, int), "sentences": [str]}]):
            texts.setdefault(str(row["img_id"]), []).extend(row["sentences"])
        pairs[split] = [Pair(i, f"resized_images/{i}.png", f"resized_images/{i}_2.png", c) for i, c in texts.items()]
    return of_single_pairs(pairs, root)


def read_image_editing(root: Path) -> Release:
    """Image Editing Request (Tan et al., ACL 2019): {train,valid,test}.json, and the pictures in images/ or next to
    these files. Items with the same two images stay separate pairs; some are in two splits."""
    pairs, shape = {}, [{"uid": (str, int), "img0": str, "img1": str, "sents": [str]}]
    for split, file in (("train", "train.json"), ("val", "valid.json"), ("test", "test.json")):
        rows = read_json(root / file, shape)
        pairs[split] = [Pair(str(row["uid"]), row["img0"], row["img1"], row["sents"]) for row in rows]
    return of_single_pairs(pairs, root / "images" if (root / "images").exists() else root)


# An unchanged pair of LEVIR-CC has one of these among its captions.
LEVIR_SAME = ("the scene is the same as before", "there is no difference", "the two scenes seem identical",
              "no change has occurred", "almost nothing has changed")  # fmt: skip


def read_levir_cc(root: Path) -> Release:
    """LEVIR-CC (Liu et al., TGRS 2022): LevirCCcaptions.json and images/<split>/A (before) and B (after). Captions are
    the file's own tokens, without empty ones. `changeflag` marks changed pairs. If it is absent, LEVIR_SAME decides."""
    shape = {"filename": str, "split": str, "sentences": [{"tokens": [str]}]}
    pairs, kinds = {split: [] for split in SPLITS}, {"change": set(), "no change": set()}
    for row in read_json(root / "LevirCCcaptions.json", {"images": [shape]})["images"]:
        name, split = row["filename"], row["split"]
        captions = [" ".join(word for word in sentence["tokens"] if word.strip()) for sentence in row["sentences"]]
        captions = [c for c in captions if c]
        pairs.setdefault(split, []).append(Pair(name, f"{split}/A/{name}", f"{split}/B/{name}", captions))
        changed = row["changeflag"] if "changeflag" in row else not set(LEVIR_SAME) & set(captions)
        kinds["change" if changed else "no change"].add(name)
    return of_single_pairs(pairs, root / "images", kinds)


def photo_file(url: str) -> str:
    """<photo id>.jpg for an iNaturalist address (.../photos/<photo id>/large.jpg?...), else a name from the address."""
    number = re.search(r"/photos/(\d+)", url)
    return f"{number[1] if number else re.sub('[^A-Za-z0-9]+', '-', url)}.jpg"


def read_birds_to_words(root: Path, pictures: bool = True) -> Release:
    """Birds-to-Words (Forbes et al., EMNLP 2019): birds-to-words-v1.0.tsv, and images/<photo id>.jpg, which everyone
    has to fetch from the addresses in the table's columns 2 and 6. If `pictures`, pairs that lack a photograph are left
    out. Rows with the same split and addresses form one pair. Captions are turned into lower-case words and signs,
    which is what this data set's metrics compare."""
    file, columns = root / "birds-to-words-v1.0.tsv", ("img1ImgURL", "img2ImgURL", "split", "description")
    texts: dict[tuple, list[str]] = {}
    for row in read_table(file, columns, delimiter="\t", quoting=csv.QUOTE_NONE).values():
        key = (row["split"], photo_file(row["img1ImgURL"]), photo_file(row["img2ImgURL"]))
        texts.setdefault(key, []).append(" ".join(tokenize_lower(row["description"])))
    images, pairs, notes = root / "images", {split: [] for split in SPLITS}, ()
    for (split, before, after), captions in texts.items():
        if not pictures or ((images / before).exists() and (images / after).exists()):
            pairs.setdefault(split, []).append(Pair(f"{before}_{after}", before, after, captions))
    if (here := sum(map(len, pairs.values()))) < len(texts):
        notes = (f"{here} of {len(texts)} pairs have both photographs in {images}; {file.name} has their addresses",)
    return of_single_pairs(pairs, images, notes=notes)


def read_cub(root: Path) -> Release:
    """CUB-200-2011 (images.txt, images/<class>/<name>.jpg) with the ten captions of Reed et al. (CVPR 2016) for each
    image, text_c10/<class>/<name>.txt, and their split by class: trainvalclasses.txt to train, testclasses.txt to
    validate (no test). Single images: `after` is None."""
    pairs, split_of = {"train": [], "val": []}, {}
    for split, file in (("train", "trainvalclasses.txt"), ("val", "testclasses.txt")):
        split_of |= dict.fromkeys((root / file).read_text(encoding="utf-8").split(), split)
    for name in read_columns(root / "images.txt").values():
        text = root / "text_c10" / Path(name).with_suffix(".txt")
        lines = text.read_text(encoding="utf-8", errors="replace").splitlines()
        captions = [" ".join(tokenize_lower(line)) for line in lines if line.strip()]
        with file_errors(root / "images.txt", "its classes must be in trainvalclasses.txt or testclasses.txt"):
            pairs[split_of[name.split("/")[0]]].append(Pair(name, name, None, captions))
    return of_single_pairs(pairs, root / "images")


def read_nabirds(root: Path) -> Release:
    """NABirds' official train and test images: single images whose caption is the name of their class (one of the
    hierarchy's 555 leaves). Image ids are written with dashes, file names without; images.txt has both."""
    files = ("images", "image_class_labels", "train_test_split", "classes")
    images, classes, in_train, names = (read_columns(root / f"{file}.txt") for file in files)
    pairs = {"train": [], "test": []}
    for image, name in images.items():
        with file_errors(root / "image_class_labels.txt", "fetch it again"):
            caption = names.get(classes[image], classes[image])
        pairs["train" if in_train.get(image) == "1" else "test"].append(Pair(name, name, None, [caption]))
    return of_single_pairs(pairs, root / "images")


def read_idc_repack(root: Path) -> Release:
    """Birds-to-Words, CUB or NABirds as IDC's authors repack them (Yao et al., AAAI 2022): pickled features without
    pictures, and {train,val,test}.json of JSON lines. A line has one image or two, and the words of a caption or of
    several captions. A line of NABirds has the classes of two single images."""
    texts: dict[tuple, list[str]] = {}  # (split, before, after) -> captions
    split_of: dict[str, str] = {}  # image with a class -> the first split that has it
    for path in (root / f"{split}.json" for split in SPLITS):
        lines = path.read_bytes().splitlines() if path.exists() else []  # CUB and NABirds have no test.json
        for n, line in enumerate(lines, 1):
            with file_errors(f"{path}, line {n}", "fetch it again"):
                row = json.loads(line)
                images = [row["img"]] if "img" in row else [row["img1"], row["img2"]]
                names = [re.sub(r"\.(jpg|png)$", "", image) + ".jpg" for image in images]
                if "class_id1" in row:
                    for name, number in zip(names, (row["class_id1"], row["class_id2"]), strict=True):
                        texts[split_of.setdefault(name, path.stem), name, None] = [f"{number:d}"]
                else:
                    words = row["description"]
                    captions = words if isinstance(words[0], list) else [words]
                    check_shape(captions, [[str]], "description, ")
                    texts.setdefault((path.stem, *names, None)[:3], []).extend(map(" ".join, captions))
    pairs = {"train": [], "val": []}
    for (split, before, after), captions in texts.items():
        pairs.setdefault(split, []).append(Pair(f"{before}_{after}" if after else before, before, after, captions))
    return of_single_pairs(pairs, root / "images")


def read_rows(file: Path, shape: dict) -> dict[str, dict]:
    """The rows of a JSON list or a CSV file, keyed by their place ("item 0", "line 2"). shape: see check_shape."""
    if file.suffix == ".json":
        return {f"item {n}": row for n, row in enumerate(read_json(file, [shape]))}
    return read_table(file, shape)


def pair_name(row: dict) -> str:
    """The id in a row or, if there is none, its two paths."""
    return f"{row['before']} {row['after']}" if row.get("id") in (None, "") else str(row["id"])


def hashed_split(name: str) -> str:
    """A split for a pair of this name: 80 % train, 10 % val, 10 % test, the same on every machine."""
    tenth = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10
    return {8: "val", 9: "test"}.get(tenth, "train")


def read_pairs(root: Path) -> Release:
    """Your own pairs: pairs.csv with the columns before, after, captions, or pairs.json, a list of objects with these
    keys. Paths are relative to the folder. Several captions of a pair are a list (JSON), or are separated by |, or are
    in several rows. Three columns are optional: `split` (default: hashed_split); `id`, the pair's name in result files;
    `kind`, the kind of change. Each kind is scored separately; for "no change", recognition is reported, too."""
    file = root / "pairs.json" if (root / "pairs.json").exists() else root / "pairs.csv"
    pairs, kinds = {split: {} for split in SPLITS}, {}
    for place, row in read_rows(file, {"before": str, "after": str, "captions": (str, list)}).items():
        before, after, captions, name = row["before"], row["after"], row["captions"], pair_name(row)
        with file_errors(file, "correct it"):
            captions = captions.split("|") if isinstance(captions, str) else captions
            check_shape(captions, [str], f"{place}, captions, ")
            captions = [c.strip() for c in captions if c.strip()]
            if not (before and after and captions):
                raise ValueError(f"{place}: no captions for {before!r}, {after!r}, or no images")
            split = row["split"] if "split" in row else hashed_split(name)
            if split not in SPLITS:
                raise ValueError(f"{place}: expected the split {', '.join(SPLITS)}, found {split!r}")
            pair = pairs[split].setdefault(name, Pair(name, before, after, []))
            if (pair.before, pair.after) != (before, after):
                raise ValueError(f"{place}: id {name} is already of {pair.before}, {pair.after}")
        pair.captions.extend(captions)
        if row.get("kind"):
            kinds.setdefault(str(row["kind"]), set()).add(name)
    return of_single_pairs({split: list(members.values()) for split, members in pairs.items()}, root, kinds)


# ---- the table of data sets ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A row of DATASETS: everything that is special to one data set. A new one needs a row and a reader."""

    read: Callable[[Path], Release]  # folder -> what its files say
    extractor: str = "resnet101-layer3"  # the feature network and its last layer (RESNETS)
    tokenizer: Callable[[str], list[str]] = tokenize  # caption -> words of the vocabulary
    min_count: int = 1  # how often a word must occur to be in the vocabulary
    vocab_splits: tuple[str, ...] = ("train",)  # the splits from which the field takes the words
    max_words: int | None = None  # the length at which the field cuts captions; None: it does not
    # How the metrics get words: from the PTB tokenizer; split at blanks; split at blanks, with all unknown words alike.
    tokens: Literal["ptb", "split", "ids"] = "ptb"
    same: tuple[str, ...] = ()  # the field's "nothing changed" sentences; if empty, those of unchanged training pairs
    # Published counts, for --check: scenes per split, pairs per type of change, words including the four special ids.
    scenes: dict[str, int] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)
    words: int | None = None
    read_annotations: Callable[[Path], Release] | None = None  # like `read`, but keeps pairs without pictures
    closed: bool = False  # the captions come from templates, whose words are all in CLOSED_WORDS
    # Only a data set that is made here has the following; see the end of this file.
    make: Callable | None = None  # folder, scenes, objects, seed, device: makes what the folder lacks
    flags: Callable[[Path], str] = lambda root: ""  # folder -> the flags of the command that made it
    weights: Callable[[Path], dict] | None = None  # folder -> the weights of its extractor (OWN_NETWORKS)
    clip: Callable[[Path, str], dict] | None = None  # folder, device -> its own CLIP: the "config" and "model"
    judge: Callable[[dict, Path], dict] | None = None  # captions, folder -> how often they are right, in %


DATASETS = {
    "clevr_change": Source(read_clevr_change, closed=True, scenes={"train": 33830, "val": 1988, "test": 3985},
                           words=76, types={"color": 7958, "material": 7963, "add": 7966, "drop": 7961, "move": 7955}),
    "clevr_dc": Source(read_clevr_dc, scenes={"train": 40800, "val": 2400, "test": 4800}, words=87),
    "spot_the_diff": Source(read_spot_the_diff, scenes={"train": 8566, "val": 1493, "test": 1270}, words=2059),
    # The authors' vocabulary; that of later papers is not published.
    "image_editing_request": Source(read_image_editing, tokenizer=tokenize_lower, min_count=3, max_words=78, words=808,
                                    vocab_splits=("train", "val"), scenes={"train": 3061, "val": 383, "test": 495}),
    # The authors' vocabulary: words that occur more than five times in all splits together.
    "levir_cc": Source(read_levir_cc, "resnet101-layer3-256", str.split, min_count=6, vocab_splits=SPLITS, max_words=50,
                       tokens="ids", same=LEVIR_SAME, scenes={"train": 6815, "val": 1333, "test": 1929},
                       types={"change": 5038, "no change": 5039}),
    "birds_to_words": Source(read_birds_to_words, "resnet101-layer4", str.split, max_words=77, tokens="split",
                             read_annotations=partial(read_birds_to_words, pictures=False)),
    "cub": Source(read_cub, "resnet101-layer4", str.split, max_words=37, tokens="split",
                  scenes={"train": 8855, "val": 2933}),
    # The name of a class is one word of the vocabulary.
    "nabirds": Source(read_nabirds, "resnet101-layer4", str.splitlines, vocab_splits=SPLITS,
                      scenes={"train": 23929, "test": 24633}),
    "pairs": Source(read_pairs, tokenizer=tokenize_lower),
}  # fmt: skip


def prepare_command(name: str, root: Path, extractor: str = "") -> str:
    command = f"python data.py {name} --data_dir {root}{DATASETS[name].flags(root)}"
    return f"{command} --extractor {extractor}" if extractor else command


def read_release(name: str, root: Path, pictures: bool = True) -> Release:
    """What a data set's reader finds in a folder. Without `pictures`, pairs whose pictures are missing are kept."""
    repacked = name in ("birds_to_words", "cub", "nabirds") and (root / "train.json").exists()
    read = DATASETS[name].read if pictures else DATASETS[name].read_annotations or DATASETS[name].read
    read = read_idc_repack if repacked else read
    try:
        release = read(root)
    except FileNotFoundError as e:
        raise FileNotFoundError(f"{e}; --data_dir must be the folder of {name}'s release, see the README") from e
    if not release.scenes["train"]:
        raise ValueError("; ".join([f"{root}: no pairs in train", *release.notes]))
    if taken := OTHER_ROWS & release.groups.keys():
        raise ValueError(f'{root}: a kind of change cannot be called "{min(taken)}", as a row of scores is')
    for pair in (p for scenes in release.scenes.values() for scene in scenes for p in scene.pairs):
        if not pair.captions:
            raise ValueError(f"{root}: no captions for {pair.id}")
    return release


# ---- pictures and features -------------------------------------------------------------------------------------------

def read_image(path: str | Path | Image.Image) -> Image.Image:
    """An image file (of an animation, the first frame) or a picture in memory -> RGB. The format is recognised by the
    file's contents, not by its name. ValueError that names the file if it is not an image."""
    if isinstance(path, Image.Image):
        return path.convert("RGB")
    Image.MAX_IMAGE_PIXELS = 5 * 10**7  # Pillow refuses pictures of more than twice as many
    try:
        with Image.open(path) as im:
            if im.mode == "F":
                raise ValueError("32-bit floats; expected 8 or 16 bits a channel")
            if im.mode.startswith("I"):  # 16-bit grey, which convert would turn white
                im = Image.fromarray((np.array(im) >> 8).clip(0, 255).astype(np.uint8))
            return im.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
        raise ValueError(f"{path} is not a readable image ({e})") from e


# How each extractor wants its pictures; written into feature files and checked on load.
RESNET_PREPROCESSING = "RGB, 224x224 bicubic without antialiasing, /255, mean .485 .456 .406, std .229 .224 .224"
IMAGENET_PREPROCESSING = "RGB, 224x224 bilinear with antialiasing, /255, mean .485 .456 .406, std .229 .224 .225"
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]


def preprocess_resnet(image: Image.Image) -> Tensor:
    """The field's preprocessing -> (3, 224, 224): aspect ratio not kept, OpenCV's bicubic (a = -0.75, no antialiasing,
    rounded to bytes). The last .224 should be .225; the authors' scripts have .224, so it stays."""
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()[None]
    x = F.interpolate(x, (224, 224), mode="bicubic", align_corners=False).round_().clamp_(0, 255)[0] / 255
    return (x - MEAN) / torch.tensor([0.229, 0.224, 0.224])[:, None, None]


def preprocess_imagenet(image: Image.Image, side: int = 224) -> Tensor:
    """Pillow's bilinear resize, aspect ratio not kept, and ImageNet's mean and deviation -> (3, side, side). As in Tan
    et al. (ACL 2019), with side 224, and Liu et al. (TGRS 2022), whose pictures have side 256."""
    x = torch.from_numpy(np.array(image.resize((side, side), Image.Resampling.BILINEAR))).permute(2, 0, 1).float() / 255
    return (x - MEAN) / torch.tensor([0.229, 0.224, 0.225])[:, None, None]


IMAGENET_256 = IMAGENET_PREPROCESSING.replace("224x224", "256x256")
RESNETS = {  # extractor -> its preprocessing, in words and as a function
    "resnet101-layer3": (RESNET_PREPROCESSING, preprocess_resnet),  # (1024, 14, 14)
    "resnet101-layer3-256": (IMAGENET_256, partial(preprocess_imagenet, side=256)),  # (1024, 14, 14)
    "resnet101-layer4": (IMAGENET_PREPROCESSING, preprocess_imagenet),  # (2048, 7, 7)
}
# The same plus the network, for data sets that train their own. Files add a hash of the weights to its name.
OWN_NETWORKS: dict[str, tuple[str, Callable, Callable[[], nn.Module]]] = {}


class Extractor:
    """Image files -> grid features (n, C, H, W) float16. Feature files hold `name`; checkpoints also hold `state` (the
    weights, if the name alone does not say which), so that a picture is always seen as in training."""

    def __init__(self, name: str, state: dict[str, Tensor] | None = None, device: str = "cpu"):
        self.name, self.state, self.device = name, state, device
        if name in RESNETS:
            (self.preprocessing, self.preprocess), net = RESNETS[name], resnet101_grid(name, pretrained=not state)
        elif state and (own := OWN_NETWORKS.get(name.rpartition("-")[0])):
            self.preprocessing, self.preprocess, net = own[0], own[1], own[2]()
        else:
            raise ValueError(f"unknown feature extractor {name!r}; known: {', '.join(RESNETS)}")
        if state:
            load_weights(net, state, name)
        self.net = net.to(device, memory_format=torch.channels_last).eval()

    def __call__(self, paths: list[str | Path]) -> Tensor:
        return torch.cat(list(self.blocks(paths, len(paths))))

    def blocks(self, paths: list[str | Path], batch: int) -> Iterator[Tensor]:
        """Features of `batch` files at a time; the next files are decoded while the network works."""
        def read(files: list[str | Path]) -> Tensor:
            return torch.stack(list(pool.map(lambda file: self.preprocess(read_image(file)), files)))

        cuda = self.device.startswith("cuda")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for x in prefetch(read(paths[i : i + batch]) for i in range(0, len(paths), batch)):
                with torch.inference_mode(), torch.autocast("cuda", torch.float16, enabled=cuda):
                    x = self.net(x.to(self.device, memory_format=torch.channels_last)).half().cpu().contiguous()
                yield x


def resnet101_grid(name: str, pretrained: bool = True) -> nn.Module:
    """torchvision's ResNet-101 up to the layer in `name`: (n, 3, 224, 224) -> (n, 1024, 14, 14) or (n, 2048, 7, 7); the
    16 x 16 cells that layer 3 makes of 256 x 256 are averaged to 14 x 14. pretrained: with the ImageNet weights that
    the papers used (IMAGENET1K_V1), fetched by torchvision on first use."""
    weights = ResNet101_Weights.IMAGENET1K_V1
    try:
        net = resnet101(weights=weights if pretrained else None)
    except OSError as e:
        raise OSError(f"ImageNet weights of ResNet-101 could not be fetched ({e}); "
                      f"put {weights.url} into {torch.hub.get_dir()}/checkpoints") from e  # fmt: skip
    grid = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2, net.layer3)
    if name == "resnet101-layer4":
        grid.append(net.layer4)
    elif name == "resnet101-layer3-256":
        grid.append(nn.AdaptiveAvgPool2d(14))
    return grid


def write_features(path: Path, names: list[str], blocks: Iterable[np.ndarray], extractor: str, preprocessing: str,
                   dataset: str = "") -> None:  # fmt: skip
    """Writes a feature file: `features` (n, C, H, W) float16, not chunked; `image_ids` (n,); and the attributes
    `extractor`, `preprocessing` and `dataset`. `blocks` yields arrays (b, C, H, W) in the order of names."""
    for left in path.parent.glob(f"{path.name}.*.partial"):  # left by a process that was killed
        left.unlink()
    done, bar = 0, progress(total=len(names), desc="features", unit="image")
    with bar, atomic_write(path) as partial, h5py.File(partial, "w") as f:
        f.attrs.update(extractor=extractor, preprocessing=preprocessing, dataset=dataset)
        f["image_ids"] = names
        for block in blocks:
            if not done:
                f.create_dataset("features", (len(names), *block.shape[1:]), "float16", fill_time="never")
            if block.shape[1:] != f["features"].shape[1:]:
                raise ValueError(f"features of {names[done]!r} have another shape than those before: {block.shape[1:]}")
            if not np.abs(block).max() <= np.finfo(np.float16).max:  # so NaN is refused, too
                raise ValueError(f"features of {names[done]!r} or of an image soon after are not finite in float16")
            f["features"][done : done + len(block)] = block.astype(np.float16)
            done += len(block)
            bar.update(len(block))
        assert done == len(names), f"{path}: {done} feature maps for {len(names)} images"


class Features:
    """A feature file whose rows are read by image name: from the memory-mapped file, of which the system caches what
    fits, or from the GPU, if `load` has copied them there."""

    def __init__(self, path: Path, prepare: str):
        if not path.exists():
            raise FileNotFoundError(f"no features at {path}; run: {prepare}")
        self.path, self.remedy = path, f"remove it and run: {prepare}"
        with file_errors(path, self.remedy), h5py.File(path) as f:
            table, names = f["features"], f["image_ids"].asstr()[:]
            self.extractor, self.preprocessing = f.attrs["extractor"], f.attrs["preprocessing"]
            self.dataset, self.row = f.attrs.get("dataset", ""), {name: i for i, name in enumerate(names)}
            shape, kind, count = table.shape, table.dtype, len(self.row)
            if len(shape) != 4 or kind != np.float16 or count != shape[0]:
                raise ValueError(f"expected float16 (n, C, H, W) and n ids, found {kind} {shape} and {count} ids")
            self.data = np.memmap(path, kind, "r", table.id.get_offset(), shape)

    def rows(self, names: list[str]) -> Tensor:
        """Features of the named images (n, C, H, W) float16, on the GPU or in RAM (page-locked if there is a GPU, which
        makes the copy to it asynchronous)."""
        rows = torch.as_tensor(self.data[[self.row[name] for name in names]])
        return rows.pin_memory() if torch.cuda.is_available() and not rows.is_cuda else rows

    def require(self, names: Iterable[str]) -> None:
        """ValueError if features of any image are missing."""
        if absent := sorted(n for n in names if n not in self.row):
            raise ValueError(f"{self.path}: no features for {absent[0]} and {len(absent) - 1} more; {self.remedy}")

    def doubts(self, pictures: Iterable[Path]) -> list[str]:
        """A note if pictures are newer than their features."""
        made = self.path.stat().st_mtime
        newer = [path for path in pictures if path.exists() and path.stat().st_mtime > made]
        text = "{} is older than {} and {} more pictures; if these were replaced, {}"
        return [text.format(self.path, newer[0], len(newer) - 1, self.remedy)] if newer else []


# ---- batches ---------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """B pairs; in training, one from each scene. Features as stored (float16); `to` makes them float32 on a device."""

    before: Tensor  # (B, C, H, W)
    after: Tensor  # (B, C, H, W); zeros if `single`
    caption: Tensor  # (B, V) ids: START, words, END, NULL ...
    pair_ids: list[str]  # B pair ids
    texts: list[str]  # B captions as they were written
    images: list[tuple[str, str]] = field(default_factory=list)  # B names of "before" and "after"
    single: bool = False  # captions of single images: there is no "after"

    def to(self, device: str) -> "Batch":
        before, after = (x.to(device, non_blocking=True).float() for x in (self.before, self.after))
        return replace(self, before=before, after=after, caption=self.caption.to(device, non_blocking=True))


def prefetch(items: Iterator) -> Iterator:
    """Yields the items; a thread makes each one while the one before it is in use."""
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(next, items, None)
        while (item := made.result()) is not None:
            made = pool.submit(next, items, None)
            yield item


class Dataset:
    """A data set ready for a method: vocabulary, scenes, features. Made by `load`; for `bounds` it has no features."""

    def __init__(self, name: str, root: Path, release: Release, vocab: Vocab, features: Features | None = None):
        self.name, self.root, self.vocab, self.features = name, root, vocab, features
        self.scenes, self.kinds, self.paths, self.release = release.scenes, release.kinds, release.paths, release
        self.grid = tuple(features.data.shape[1:]) if features else None  # C, H, W
        scenes = [s for split_scenes in self.scenes.values() for s in split_scenes]
        scenes = [pairs for s in scenes for pairs in (s.pairs, s.swapped) if pairs]
        # Longest caption with START and END among scenes' first pairs, and among the second (distractors' are shorter).
        longest = [max(len(vocab.split(c)) for p in pairs for c in p.captions) for pairs in zip(*scenes, strict=True)]
        self.lengths = [2 + words for words in longest]
        self.max_len = max(self.lengths)
        if features:
            features.require({name for pairs in scenes for p in pairs for name in (p.before, p.after) if name})

    def steps(self, batch_size: int) -> int:
        """Batches an epoch; the last may be smaller."""
        return -(-len(self.scenes["train"]) // batch_size)

    def train_batches(self, batch_size: int, seed: int, epoch: int, start: int = 0) -> Iterator[tuple[Batch, ...]]:
        """One epoch from batch `start` on: tuples of Batches, one for the scenes' first pairs and one for any second.
        (seed, epoch) alone decide the order, the swaps (half the time, if a scene has one) and each pair's caption."""
        scenes = self.scenes["train"]
        rng = np.random.default_rng([seed, epoch])
        order, swap = rng.permutation(len(scenes)), rng.random(len(scenes)) < 0.5
        draw = rng.random((len(scenes), len(scenes[0].pairs)))

        def make(chosen: np.ndarray) -> tuple[Batch, ...]:
            scene_pairs = [scenes[i].swapped if scenes[i].swapped and swap[i] else scenes[i].pairs for i in chosen]
            batches = []
            for n, length in enumerate(self.lengths):  # the scenes' first pairs, then their second
                pairs = [pairs[n] for pairs in scene_pairs]
                drawn = [p.captions[int(draw[i, n] * len(p.captions))] for p, i in zip(pairs, chosen, strict=True)]
                batches.append(self.batch(pairs, drawn, length))
            return tuple(batches)

        starts = range(start * batch_size, len(scenes), batch_size)
        return prefetch(make(order[i : i + batch_size]) for i in starts)

    def pairs(self, split: str) -> list[Pair]:
        """Every pair of a split: the first pair of every scene, then, if scenes have two, all distractor pairs."""
        return [p for pairs in zip(*(scene.pairs for scene in self.scenes[split]), strict=True) for p in pairs]

    def eval_batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        pairs = self.pairs(split)
        starts = range(0, len(pairs), batch_size)
        batches = prefetch(self.batch(pairs[i : i + batch_size]) for i in starts)
        return iter(tqdm(batches, split, len(starts), disable=None, leave=False))

    def batch(self, pairs: list[Pair], captions: list[str] | None = None, length: int = 0) -> Batch:
        """Pairs with one caption each (default: their first), padded to `length` ids (default: the longest)."""
        captions, single = captions or [p.captions[0] for p in pairs], pairs[0].after is None
        before = self.features.rows([p.before for p in pairs])
        after = torch.zeros_like(before) if single else self.features.rows([p.after for p in pairs])
        ids = torch.tensor([self.vocab.encode(c, length or self.max_len) for c in captions], device=before.device)
        return Batch(before, after, ids, [p.id for p in pairs], captions, [(p.before, p.after) for p in pairs], single)

    def groups(self, split: str) -> dict[str, set[str]]:
        """Pair ids to score separately: the release's groups; the pairs that no other split has (if any are shared);
        quarters of viewpoint difficulty, if box overlaps are known."""
        pairs, overlap, groups = self.pairs(split), self.release.overlap, dict(self.release.groups)
        leaked = {(p.before, p.after) for other in self.scenes if other != split for p in self.pairs(other)}
        clean = {p.id for p in pairs if (p.before, p.after) not in leaked}
        if len(clean) < len(pairs):
            groups["without leaked pairs"] = clean
        by_overlap = sorted((p.id for p in pairs if p.id in overlap), key=overlap.get)
        if n := len(by_overlap):
            ends = (0, n // 4, n // 2, n - n // 4, n)  # the outer two hold int(n / 4) pairs, as in the field's scripts
            for i, name in enumerate(("hardest", "2nd", "3rd", "easiest")):
                groups[f"view: {name} quarter"] = set(by_overlap[ends[i] : ends[i + 1]])
        return groups

    def examples(self, split: str, count: int) -> dict[str, list[Pair]]:
        """The first pairs of every kind of change, and of no change, in a split; if kinds are unknown, of all pairs."""
        pairs = self.pairs(split)
        kinds = self.kinds or {"all": {p.id for p in pairs}}
        examples = {kind: [p for p in pairs if p.id in ids][:count] for kind, ids in kinds.items()}
        names = [name for chosen in examples.values() for p in chosen for name in (p.before, p.after) if name]
        if absent := [self.paths[name] for name in names if not self.paths[name].exists()]:
            print(f"samples on grey: their pictures are not all there, such as {absent[0]}")
        return {kind: chosen for kind, chosen in examples.items() if chosen}

    def images(self, pair: Pair) -> tuple[Image.Image, Image.Image]:
        """A pair's pictures, plain grey if they are not there (released features come without pictures)."""
        paths = [self.paths[name] for name in (pair.before, pair.after) if name]
        pictures = [read_image(path) if path.exists() else Image.new("RGB", (96, 96), "grey") for path in paths]
        return pictures[0], pictures[1] if pair.after else Image.new("RGB", pictures[0].size)

    def scored_text(self, caption: str) -> str:
        """A reference as published scores read it: cut by the vocabulary's rule, unless the PTB tokenizer cuts it."""
        return caption if DATASETS[self.name].tokens == "ptb" else " ".join(self.vocab.tokenizer(caption))

    def scored_words(self, captions: list[str]) -> list[str]:
        """Words of references, joined by spaces, as `score` compares them."""
        return scored_words([*map(self.scored_text, captions)], DATASETS[self.name].tokens, self.vocab.index)[0]

    @functools.cached_property
    def one_caption(self) -> str:
        """The best caption to give every pair without looking (see constant_captions)."""
        return constant_captions(self, {}, 50)[ONE_CAPTION]

    def score(self, split: str, captions: dict[str, str], quick: bool = False, constant: str = "",
              references: dict[str, list[str]] | None = None) -> dict:  # fmt: skip
        """Scores of a split's captions, and of each of its groups, by the rule of the data set's published tables; see
        the function `score`. quick: fewer metrics, no groups. references: used instead of the split's."""
        references = references or {p.id: p.captions for p in self.pairs(split)}
        references = {i: [*map(self.scored_text, texts)] for i, texts in references.items()}
        groups, tokens = {} if quick else self.groups(split), DATASETS[self.name].tokens
        return score(captions, references, groups, quick, tokens, self.vocab.index, self.scored_text(constant))

    def denials(self) -> set[str]:
        """Captions that say that nothing changed: the field's, or else those of unchanged training pairs."""
        unchanged = self.kinds.get("no change", ())
        of_unchanged = [c for p in self.pairs("train") if p.id in unchanged for c in p.captions]
        return {" ".join(self.vocab.split(c)) for c in DATASETS[self.name].same or of_unchanged}

    def right(self, pair: Pair, caption: str) -> bool:
        """Is a caption right for a pair? Yes, if it is a reference word for word, or if the data set's own judge agrees
        or, without a judge, if the pair is unchanged and the caption says that nothing changed."""
        if caption in {" ".join(self.vocab.split(c)) for c in pair.captions}:
            return True
        if judge := DATASETS[self.name].judge:
            shares = judge({pair.id: caption}, self.root)  # in %; NaN if it does not apply
            return not any(shares[name] < 100 for name in ("change type", "distractors", "all four", "new value"))
        return pair.id in self.kinds.get("no change", ()) and caption in self.denials()

    def report(self, split: str, captions: dict[str, str], maps: dict) -> dict:
        """What else captions and attention maps (pair id -> name -> (H, W)) show, in %. "accuracy": what the data set's
        own judge says or, if unchanged pairs are known, how many changed and unchanged ones are recognised (see
        `denials`). "pointing": see pointing_scores."""
        source = DATASETS[self.name]
        report, unchanged, boxed = {}, self.kinds.get("no change"), []
        if source.judge:
            report["accuracy"] = source.judge(captions, self.root)
        elif unchanged:
            right, denials = {"change recognised": [], "no change recognised": []}, self.denials()
            for i, caption in captions.items():
                denied, same = caption in denials, i in unchanged
                right["no change recognised" if same else "change recognised"].append(denied == same)
            report["accuracy"] = {name: round(100 * sum(hits) / len(hits), 2) for name, hits in right.items() if hits}
        for p in (p for p in self.pairs(split) if p.id in maps and p.id in self.release.boxes):
            sides = zip(("before", "after"), self.release.boxes[p.id], (p.before, p.after), strict=True)
            boxed += [(p.id, side, box, self.paths[name]) for side, box, name in sides if box]
        if absent := [path for *_, path in boxed if not path.exists()]:
            print(f"no pointing game: its pictures are not all there, such as {absent[0]}")
        elif boxed:
            report["pointing"] = pointing_scores(maps, boxed, self.groups(split))
        return report

    def results(
        self, split: str, captions: dict[str, str], maps: dict, out_dir: Path | None, notes: dict | None = None
    ) -> dict[str, float]:
        """Scores a split's captions; returns the scores over all pairs, or {} if the split is empty. Without out_dir,
        only the quick metrics. With it, every metric for every group is printed, and three files are written:
        captions_<split>.json, scores_<split>.json, and a sheet of sample pictures with attention maps (pair id -> name
        -> (H, W)) and notes (pair id -> lines)."""
        if not self.scenes[split]:
            return {}
        if out_dir is None:
            return self.score(split, captions, quick=True)["scores"]["total"]
        write_predictions(out_dir / f"captions_{split}.json", captions)
        result = self.score(split, captions, constant=self.one_caption)
        result |= self.report(split, captions, maps)
        write_text(out_dir / f"scores_{split}.json", json.dumps(result, indent=1) + "\n")
        print(format_scores(result))
        picture = "samples.png" if split == "test" else f"samples_{split}.png"
        with atomic_write(out_dir / picture) as path:
            sample_sheet(self, split, captions, maps, notes or {}).save(path, "PNG")
        return result["scores"]["total"]

    def check_state(self, state: dict) -> None:
        """ValueError if a checkpoint was trained on other features or another vocabulary than this data set's."""
        name, grid = state["extractor"]["name"], tuple(state["grid"])
        if (name, grid, state["vocab"]) != (self.features.extractor, self.grid, self.vocab.words):
            raise ValueError(
                f"the checkpoint was trained with {name} {grid} and {len(state['vocab'])} words; {self.root} has "
                f"{self.features.extractor} {self.grid} and {len(self.vocab)}; give its --data_dir"
            )

    def state(self) -> dict:
        """What a checkpoint needs to caption any two pictures without the data set."""
        weights = DATASETS[self.name].weights
        extractor = {"name": self.features.extractor, "state": weights and weights(self.root)}
        return {"vocab": self.vocab.words, "grid": self.grid, "max_len": self.max_len, "extractor": extractor}


def load(name: str, root: str | Path, where: str = "auto", device: str = "cpu", extractor: str = "") -> Dataset:
    """Read a prepared data set; FileNotFoundError or ValueError says what is missing and which command makes it.
    where: where features are read from, "file" or "gpu" ("auto": the GPU if they take less than 60 % of its free
    memory)."""
    if name not in DATASETS:
        raise ValueError(f"no loader for the data set {name}; there are {', '.join(DATASETS)}")
    root, release = Path(root), read_release(name, Path(root))
    features = open_features(name, root, extractor)
    dataset = Dataset(name, root, release, read_vocab(name, root), features)
    size, cuda = features.data.nbytes, device.startswith("cuda")
    if cuda and (where == "gpu" or (where == "auto" and size < 0.6 * torch.cuda.mem_get_info()[0])):
        features.data = torch.tensor(features.data, device=device)
    place = "on the GPU" if isinstance(features.data, Tensor) else "read from the file"
    notes = release.notes + [f"{root} has no {split} pairs" for split in SPLITS if not release.scenes[split]]
    notes += features.doubts(release.paths.values())
    print(*(f"note: {line}" for line in notes), f"features: {size / 1e9:.2f} GB, {place}", sep="\n")
    return dataset


def read_vocab(name: str, root: Path) -> Vocab:
    """The vocabulary that preparation has written; FileNotFoundError or ValueError says which command makes it."""
    path, source, prepare = root / "vocab.json", DATASETS[name], prepare_command(name, root)
    if not path.exists():
        raise FileNotFoundError(f"no vocabulary at {path}; run: {prepare}")
    with file_errors(path, f"remove it and run: {prepare}"):
        index = json.loads(path.read_bytes())
        if sorted(index.values()) != list(range(len(index))):
            raise ValueError(f"expected words and their ids from 0 to {len(index) - 1}")
        return Vocab(sorted(index, key=index.get), source.tokenizer, source.max_words)


def open_features(name: str, root: Path, extractor: str = "") -> Features:
    """The feature file of a data set, for its own extractor or the one named; ValueError if another made it."""
    path, prepare = feature_file(name, root, extractor), prepare_command(name, root, extractor)
    features, source = Features(path, prepare), DATASETS[name]
    wanted = extractor or source.extractor
    known = ((RESNETS | OWN_NETWORKS)[wanted][0], RELEASED_FEATURES, RELEASED_PICKLES)
    wanted = weights_name(wanted, source.weights(root)) if source.weights else wanted
    if features.dataset not in ("", name) or features.extractor != wanted or features.preprocessing not in known:
        made = f"for {features.dataset or name} by {features.extractor} ({features.preprocessing})"
        raise ValueError(f"{path} was made {made}, not for {name} by {wanted}; remove it and run: {prepare}")
    return features


def weights_name(extractor: str, weights: dict[str, Tensor]) -> str:
    """<extractor>-<hash of the weights>, so that features of another network are not mistaken for this one's."""
    digest = hashlib.sha256(b"".join(weights[key].cpu().numpy().tobytes() for key in sorted(weights)))
    return f"{extractor}-{digest.hexdigest()[:12]}"


def feature_file(name: str, root: Path, extractor: str = "") -> Path:
    """features.h5, or features-<extractor>.h5 if the extractor is not the data set's own."""
    own = DATASETS[name].extractor
    if extractor in ("", own):
        return root / "features.h5"
    known = [own] if own in OWN_NETWORKS else RESNETS
    if extractor not in known:
        raise ValueError(f"--extractor {extractor}: {name} can have {', '.join(known)}")
    return root / f"features-{extractor}.h5"


# ---- scores: words ---------------------------------------------------------------------------------------------------

JAVA_TIMEOUT = 60  # seconds in which `java -version` must end


@functools.cache
def java_works() -> bool:
    """Does `java` run? Asked once. Makes Java programs read and write 0.5 even if the system's language has 0,5."""
    options = [os.environ.get("JAVA_TOOL_OPTIONS", ""), "-Dfile.encoding=UTF-8 -Duser.language=en -Duser.country=US"]
    os.environ["JAVA_TOOL_OPTIONS"] = " ".join(options).strip()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)  # a pipe could outlive the time limit
    try:
        return subprocess.call(["java", "-version"], **streams, timeout=JAVA_TIMEOUT) == 0
    except (OSError, subprocess.SubprocessError):
        return False


def ptb_tokenize(texts: list[str]) -> list[str]:
    """The words, joined by spaces, of texts without line breaks, by pycocoevalcap's Stanford tokenizer. The
    package's own class is not used, because it prints to the terminal and writes a file next to itself."""
    from pycocoevalcap.tokenizer import ptbtokenizer

    jar = Path(ptbtokenizer.__file__).with_name(ptbtokenizer.STANFORD_CORENLP_3_4_1_JAR)
    call = ["java", "-cp", jar, "edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase"]
    done = subprocess.run(call, input="".join(f"{text}\n" for text in texts).encode(), capture_output=True, check=True)
    lines = done.stdout.decode().split("\n")[:-1]
    if len(lines) != len(texts):
        raise ValueError(f"{len(lines)} lines of words for {len(texts)} captions")
    return [" ".join(w for w in line.rstrip().split(" ") if w not in ptbtokenizer.PUNCTUATIONS) for line in lines]


def plain_tokenize(text: str) -> str:
    """The substitute if there is no Java: lower case, no punctuation. It gives the Stanford tokenizer's words on mini
    and CLEVR-Change, but leaves "cannot" and "gonna" whole."""
    words = re.sub(r"""[.,:;?!'"`]""", " ", text.lower()).split()
    return " ".join(word for word in words if word.strip("-"))


def scored_words(texts: list[str], tokens: str, index: dict[str, int] | None) -> tuple[list[str], str]:
    """The words of every text as `score` compares them, joined by spaces, and which tokenizer made them."""
    texts = [" ".join(text.split()) for text in texts]  # a line break inside a caption would shift all later ones
    if tokens == "split":
        return texts, "none, words as they are"
    if tokens == "ids":
        return [" ".join(str(index.get(word, UNK)) for word in text.split()) for text in texts], "none, words as ids"
    if java_works():
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            return ptb_tokenize(texts), "PTB (Java)"
    return [plain_tokenize(text) for text in texts], "approximate (PTB needs Java)"


# ---- scores: the metrics ---------------------------------------------------------------------------------------------

METRICS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "CIDEr (one pool)", "SPICE")
SPICE_MODELS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")


def meteor(refs: dict[str, list[str]], rows: dict[str, dict[str, str]]) -> dict[str, float]:
    """METEOR of every row of captions, see `score`."""
    from pycocoevalcap.meteor.meteor import Meteor

    program = Meteor()
    try:
        return {name: program.compute_score({i: refs[i] for i in hyps}, {i: [text] for i, text in hyps.items()})[0]
                for name, hyps in rows.items()}  # fmt: skip
    finally:  # after an error the object still has its lock and unsent lines; its destructor would wait for them
        program.lock = threading.Lock()
        with contextlib.suppress(OSError):
            program.meteor_p.stdin.close()


def spice(refs: dict[str, list[str]], rows: dict[str, dict[str, str]]) -> dict[str, float]:
    """SPICE of every row of captions, see `score`. It is a mean over captions, so one run (minutes) serves all rows."""
    from pycocoevalcap.spice.spice import Spice

    captions = list(dict.fromkeys(caption for hyps in rows.values() for caption in hyps.items()))
    gts, res = {n: refs[i] for n, (i, _) in enumerate(captions)}, {n: [text] for n, (_, text) in enumerate(captions)}
    of_caption = dict(zip(captions, (each["All"]["f"] for each in Spice().compute_score(gts, res)[1]), strict=True))
    return {name: float(np.mean([of_caption[caption] for caption in hyps.items()])) for name, hyps in rows.items()}


def java_metric(metric: str, tokens: str, refs: dict, rows: dict) -> tuple[dict[str, float], str]:
    """METEOR or SPICE of every row, and "" or the reason why there is none."""
    import pycocoevalcap.spice

    models = [Path(folder, "lib", jar) for folder in pycocoevalcap.spice.__path__ for jar in SPICE_MODELS]
    if not java_works():
        return {}, "needs Java; is there one? Try: java -version"
    if metric == "SPICE" and tokens == "ids":
        return {}, "it reads sentences, not ids"
    if metric == "SPICE" and not all(path.exists() for path in models):  # pycocoevalcap would download them
        return {}, "its models are not there; run: python -m pycocoevalcap.spice.get_stanford_models"
    try:
        return {"METEOR": meteor, "SPICE": spice}[metric](refs, rows), ""
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        needs = {"METEOR": "2 GB of memory", "SPICE": "8 GB of memory and usually Java 8"}[metric]
        return {}, f"its Java program failed ({e}); it needs {needs}"


def score(predictions: dict[str, str], references: dict[str, list[str]], groups: dict[str, set[str]] | None = None,
          quick: bool = False, tokens: Literal["ptb", "split", "ids"] = "ptb",
          index: dict[str, int] | None = None, constant: str = "") -> dict:  # fmt: skip
    """Scores (x 100) of the predicted captions, over all of them ("total") and over each group's ids that have a
    prediction: {"scores": {group: {metric: number or None}}, "missing": {metric: reason}, "tokenizer": the one
    used, "captions": how many there are, how many different ones, and the % that are a reference word for word}.

    Every group is its own corpus, as in the field's scripts: CIDEr counts document frequencies in the group's
    references, so the total is not an average of the groups, and a group of one image gets 0. "CIDEr (one pool)" is the
    mean over the group's captions with document frequencies counted over all pairs, as in IDC's Table 3. `quick` leaves
    out this one and, because they run Java programs, METEOR and SPICE.
    tokens: "ptb" is what most data sets use; "split": captions are words already, split at blanks (Birds-to-Words);
    "ids" (LEVIR-CC): words are replaced by their numbers in `index`, and all words that it lacks by UNK's, so that
    these match each other. constant: a caption scored for comparison, as if it were predicted for every id."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    if not predictions:
        raise ValueError("no predictions to score; expected at least one {image id: caption}")
    if absent := [i for i in predictions if not references.get(i)]:
        raise ValueError(f"prediction {absent[0]!r} has no reference; give its split's references, or leave it out")
    if taken := OTHER_ROWS & {*(groups or {})}:
        raise ValueError(f'a group cannot be called "{min(taken)}", as another row is; give it another name')
    texts = [text for i in predictions for text in (predictions[i], *references[i])] + [constant]
    if halves := [text for text in texts if re.search("[\ud800-\udfff]", text)]:
        raise ValueError(f"the caption {halves[0]!r} has half a character (a lone surrogate); correct it")
    words, tokenizer = scored_words(texts, tokens, index)
    word, hyps, refs = iter(words), {}, {}
    for i in predictions:
        hyps[i], refs[i] = next(word), [next(word) for _ in references[i]]
    rows = {"total": hyps, ONE_CAPTION: dict.fromkeys(hyps, next(word)) if constant else {}}
    rows |= {name: {i: hyps[i] for i in hyps if i in members} for name, members in (groups or {}).items()}
    rows = {name: row for name, row in rows.items() if row}

    scores, missing, pool = {name: {} if quick else dict.fromkeys(METRICS) for name in rows}, {}, {}
    for name, row in rows.items():
        gts, res = {i: refs[i] for i in row}, {i: [text] for i, text in row.items()}
        cider, each = 0.0, [0.0] * len(row)
        if any(map(any, gts.values())):  # without a word in the references, Cider fails
            cider, each = Cider().compute_score(gts, res)
        if name in ("total", ONE_CAPTION):  # they come first
            pool |= zip(row.items(), each, strict=True)
        scores[name] |= zip(METRICS, Bleu(4).compute_score(gts, res, verbose=0)[0], strict=False)
        scores[name] |= {"ROUGE-L": Rouge().compute_score(gts, res)[0], "CIDEr": cider}
        if not quick:
            scores[name]["CIDEr (one pool)"] = sum(pool[caption] for caption in row.items()) / len(row)
    for metric in () if quick else ("METEOR", "SPICE"):
        values, reason = java_metric(metric, tokens, refs, rows)
        missing |= {metric: reason} if reason else {}
        for name, value in values.items():
            scores[name][metric] = value
    for row in scores.values():
        row |= {metric: round(100 * float(value), 2) for metric, value in row.items() if value is not None}
    verbatim = round(100 * sum(hyps[i] in refs[i] for i in hyps) / len(hyps), 2)
    captions = {"all": len(hyps), "different": len({*hyps.values()}), "verbatim": verbatim}
    result = {"scores": scores, "missing": missing, "tokenizer": tokenizer, "captions": captions}
    return result | ({ONE_CAPTION: constant} if constant else {})


def format_scores(result: dict) -> str:
    """The result of `score` as text: a table with one row per group, the reasons for missing metrics, and what
    Dataset.report adds."""
    metrics = {metric: metric for metric in METRICS if metric not in ("BLEU-2", "BLEU-3")}
    metrics["CIDEr (one pool)"] = "one pool"
    width = max(map(len, result["scores"]))
    lines = [" " * width + "".join(f"{heading:>9}" for heading in metrics.values())]
    for name, values in result["scores"].items():
        cells = ["-" if values.get(metric) is None else f"{values[metric]:.2f}" for metric in metrics]
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>9}" for cell in cells))
    lines += [f"no {metric}: {reason}" for metric, reason in result["missing"].items()]
    lines.append(f"tokenizer: {result['tokenizer']}")
    if captions := result.get("captions"):
        lines.append(f"{captions['different']} different captions for {captions['all']} pairs; "
                     f"{captions['verbatim']:.1f} % are a reference of their pair word for word")  # fmt: skip
    if ONE_CAPTION in result:
        lines.append(f"{ONE_CAPTION}: {result[ONE_CAPTION]}")
    shares = {"right": result.get("accuracy", {})}
    for name, values in result.get("pointing", {}).items():
        shares |= {f"pointing game, {name}": values} if name != "boxes" else {}
    for name, values in shares.items():
        if values:
            lines.append(f"{name}, in %: " + ", ".join(f"{group} {value:.1f}" for group, value in values.items()))
    return "\n".join(lines)


# ---- scores: floor and ceiling ---------------------------------------------------------------------------------------

ONE_CAPTION, ONE_A_KIND, PERSON = "one caption for all", "one caption a kind", "a person"
OTHER_ROWS = {"total", ONE_CAPTION}  # the rows of a table of scores that are not groups


def cider_against(references: list[list[str]]) -> Callable[[str, int], float]:
    """Returns a function (caption, number of a pair) -> CIDEr of the caption against that pair's references; document
    frequencies are those of all references. Values are pycocoevalcap's, but any two texts are compared only once."""

    def grams(text: str) -> Counter:
        words = text.split()
        return Counter(tuple(words[i : i + n]) for n in range(1, 5) for i in range(len(words) - n + 1))

    frequency = Counter(gram for texts in references for gram in {gram for text in texts for gram in grams(text)})

    @functools.cache
    def vector(text: str) -> tuple[dict[tuple, float], list[float]]:
        """tf-idf of every n-gram; the norm for every n."""
        tfidf = {gram: n * math.log(len(references) / max(1, frequency[gram])) for gram, n in grams(text).items()}
        return tfidf, [math.hypot(*(x for gram, x in tfidf.items() if len(gram) == n)) for n in range(1, 5)]

    @functools.cache
    def likeness(caption: str, reference: str) -> float:
        (x, x_norms), (y, y_norms), dots = vector(caption), vector(reference), [0.0] * 4
        for gram in x.keys() & y.keys():
            dots[len(gram) - 1] += min(x[gram], y[gram]) * y[gram]
        cosines = [dot / (a * b) for dot, a, b in zip(dots, x_norms, y_norms, strict=True) if a * b]
        gap = caption.count(" ") - reference.count(" ")
        return 10 * sum(cosines) / 4 * math.exp(-(gap**2) / 72)

    return lambda caption, n: sum(likeness(caption, text) for text in references[n]) / len(references[n])


def constant_captions(dataset: Dataset, kinds: dict[str, set[str]], count: int) -> dict[str, str]:
    """The best single caption for all pairs (ONE_CAPTION), and for the pairs of each kind: among the `count` most
    frequent captions of their training pairs (ties in alphabetical order), the one with the best CIDEr on validation.
    CIDEr is a mean over pairs, so the best for one kind does not depend on what is said of the others."""
    train, val, frequent, best = dataset.pairs("train"), dataset.pairs("val"), {}, {}
    kinds = {ONE_CAPTION: {p.id for p in train + val}} | kinds
    for kind, ids in kinds.items():
        counts = Counter(c for p in train if p.id in ids for c in p.captions)
        frequent[kind] = [c for c, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:count]]
    texts = list({c for captions in (*frequent.values(), *(p.captions for p in val)) for c in captions})
    words = dict(zip(texts, dataset.scored_words(texts), strict=True))
    cider = cider_against([[words[c] for c in p.captions] for p in val])
    for kind, captions in frequent.items():
        numbers = [n for n, p in enumerate(val) if p.id in kinds[kind]]
        sums = {c: sum(cider(words[c], n) for n in numbers) for c in captions}
        best[kind] = max(sums, key=sums.get, default="")
    return best


def bounds(name: str, root: Path, out: Path | None = None) -> None:
    """Prints, and writes to bounds.json, the test scores of captions made without looking, and those of a person: one
    reference of each pair, drawn at random, against the pair's others. Reads annotations only."""
    release = read_release(name, root, pictures=False)
    if absent := [split for split in SPLITS if not release.scenes[split]]:
        raise ValueError(f"{name} has no {absent[0]}: captions are chosen on train and val, and scored on test")
    dataset, rng = Dataset(name, root, release, vocab_of(name, release)), np.random.default_rng(0)
    chosen = constant_captions(dataset, release.kinds, 200)
    references = {p.id: p.captions for p in dataset.pairs("test")}
    others = {i: [*captions] for i, captions in references.items() if len(captions) > 1}
    said = {
        ONE_CAPTION: dict.fromkeys(references, chosen[ONE_CAPTION]),
        ONE_A_KIND: {i: chosen[kind] for kind, ids in release.kinds.items() for i in references if i in ids},
        PERSON: {i: captions.pop(int(rng.integers(len(captions)))) for i, captions in others.items()},
    }
    result = {"scores": {}, "pairs": {bound: len(captions) for bound, captions in said.items()}, "chosen": chosen}
    for bound, captions in said.items():
        if captions:
            captions = {i: dataset.scored_text(c) for i, c in captions.items()}
            scored = dataset.score("test", captions, references=others if bound == PERSON else references)
            result["scores"] |= {f"{bound}: {group}": row for group, row in scored.pop("scores").items()}
            result |= {"missing": scored["missing"], "tokenizer": scored["tokenizer"]}
    print(format_scores(result), *(f"said of {kind}: {c}" for kind, c in chosen.items()), sep="\n")
    print(f"{PERSON}: of {len(references)} pairs the {len(others)} with several references; one of them, drawn by "
          "chance, against the others, which are one fewer than a system is given")  # fmt: skip
    write_text(out or root / "bounds.json", json.dumps(result, indent=1) + "\n")


# ---- pictures of results ---------------------------------------------------------------------------------------------


def overlay(im: Image.Image, heat: Tensor) -> Image.Image:
    """A picture with an attention map (H, W) laid over it, from blue (none) to red (the map's maximum)."""
    heat = heat.float().cpu() / heat.max().clamp(min=1e-12).item()
    heat = F.interpolate(heat[None, None], im.size[::-1], mode="bilinear", align_corners=False)[0, 0]
    hue, full = Image.fromarray(((1 - heat) * 170).byte().numpy()), Image.new("L", im.size, 255)
    return Image.blend(im, Image.merge("HSV", (hue, full, full)).convert("RGB"), 0.4)


def pair_picture(before: Image.Image, after: Image.Image, maps: dict[str, Tensor], lines: list[str], side: int = 128,
                 right: bool | None = None) -> Image.Image:  # fmt: skip
    """One pair as a strip -> PIL image: before, after, then each attention map (H, W) over both, each with a heading;
    lines of text below; a tick if `right`, a cross if not, no mark if None. The longer side of a picture is `side`.
    Maps named "before" and "after" are drawn only over the picture of that name."""
    font, shown = ImageFont.load_default(11), []
    for title, im in (("before", before), ("after", after)):
        size = [max(1, round(side * length / max(im.size))) for length in im.size]
        shown.append((title, im.convert("RGB").resize(size, Image.Resampling.LANCZOS)))
    for name, heat in maps.items():
        for title, im in [pair for pair in shown[:2] if name not in ("before", "after") or name == pair[0]]:
            shown.append((f"{name}, {title}" if name != title else f"attention, {title}", overlay(im, heat)))
    panels = [Image.new("RGB", (side, im.height + 14), "white") for _, im in shown]
    for panel, (title, im) in zip(panels, shown, strict=True):
        panel.paste(im, (0, 14))
        ImageDraw.Draw(panel).text((1, 1), title, fill="black", font=font)
    page = tiled(panels, 4, 3)
    rows = [row for line in lines for row in textwrap.wrap(line, page.width // 6) or [""]]
    strip = Image.new("RGB", (page.width, page.height + 14 * len(rows) + 3), "white")
    strip.paste(page)
    draw, x = ImageDraw.Draw(strip), strip.width - 12
    for i, row in enumerate(rows):
        draw.text((1, page.height - 1 + 14 * i), row, fill="black", font=font)
    if right:
        draw.line([(x, 7), (x + 3, 11), (x + 10, 2)], fill="green", width=2)
    elif right is not None:
        draw.line([(x + 1, 2), (x + 10, 11)], fill="red", width=2)
        draw.line([(x + 1, 11), (x + 10, 2)], fill="red", width=2)
    return strip


def tiled(pictures: list[Image.Image], columns: int, gap: int) -> Image.Image:
    """Pictures in rows on a white page, all in cells of the same size -> PIL image."""
    width, height = max(im.width for im in pictures) + gap, max(im.height for im in pictures) + gap
    page = Image.new("RGB", (columns * width - gap, -(-len(pictures) // columns) * height), "white")
    for i, im in enumerate(pictures):
        page.paste(im, (i % columns * width, i // columns * height))
    return page


def sample_sheet(dataset: Dataset, split: str, captions: dict[str, str], maps: dict, notes: dict) -> Image.Image:
    """A column for every kind of change, with up to a dozen pairs, their attention, reference and caption -> PIL image.
    A tick marks captions that are right (Dataset.right). The reference shown is the one that the caption equals, if
    any, else the first. Keyed by pair id: captions, maps (name -> (H, W)), notes (lines; pairs may have none)."""
    columns = []
    for kind, pairs in dataset.examples(split, 12).items():
        columns.append([])
        for p in pairs:
            same = [c for c in p.captions if " ".join(dataset.vocab.split(c)) == captions[p.id]]
            reference = f"reference: {(same or p.captions)[0]}"
            lines, right = [kind, reference, f"generated: {captions[p.id]}"], dataset.right(p, captions[p.id])
            lines += notes.get(p.id, [])
            columns[-1].append(pair_picture(*dataset.images(p), maps[p.id], lines, right=right))
    rows = itertools.zip_longest(*columns, fillvalue=Image.new("RGB", (1, 1), "white"))
    return tiled([strip for row in rows for strip in row], len(columns), 12)


# ---- scores: the pointing game ---------------------------------------------------------------------------------------


def pointing_hit(heat: Tensor, box: list[int], size: tuple[int, int]) -> bool:
    """Does the brightest pixel of a map (H, W) lie in the box? The map is resized bilinearly to the picture's size
    (width, height); box [x, y, w, h] in its pixels. As Park et al. (2019) do it."""
    (x, y, w, h), (width, height) = box, size
    heat = F.interpolate(heat.float()[None, None], (height, width), mode="bilinear", align_corners=False)
    row, column = divmod(int(heat.argmax()), width)
    return x <= column < x + w and y <= row < y + h


def pointing_scores(maps: dict, boxed: list[tuple[str, str, list[int], Path]], groups: dict[str, set[str]]) -> dict:
    """The pointing game over all boxes and over each group's: {map's name: {group: hits in %}}, with the share of the
    picture that boxes take ("chance") and their number ("boxes"). maps: pair id -> name -> (H, W). boxed: pair id, side
    ("before" or "after"), box of the changed object, picture. Both sides of a pair count; a map
    named "before" or "after" is used for that side only."""
    rows = []  # pair id, what its box adds to each column
    for i, side, box, path in boxed:
        with Image.open(path) as im:
            size = im.size
        named = {"attention": maps[i][side]} if side in maps[i] else maps[i]
        hits = {name: pointing_hit(heat.cpu(), box, size) for name, heat in named.items()}
        rows.append((i, hits | {"chance": box[2] * box[3] / (size[0] * size[1])}))
    scores = {name: {} for name in (*rows[0][1], "boxes")}
    for group, members in {"total": maps.keys(), **groups}.items():
        if chosen := [row for i, row in rows if i in members]:
            for name in chosen[0]:
                scores[name][group] = round(100 * sum(row[name] for row in chosen) / len(chosen), 2)
            scores["boxes"][group] = len(chosen)
    return scores


# ---- scores: files ---------------------------------------------------------------------------------------------------

CAPTIONED = {"image_id": (int, str), "caption": str}


def read_predictions(path: str | Path) -> dict[str, str]:
    """{image id: caption} of a COCO results file."""
    rows = read_json(Path(path), [CAPTIONED])
    ids = Counter(str(row["image_id"]) for row in rows)
    if again := [i for i, count in ids.items() if count > 1]:
        raise ValueError(f"{path}: image_id {again[0]!r} has two predictions; expected one caption an image")
    return {str(row["image_id"]): row["caption"] for row in rows}


def read_references(path: str | Path) -> dict[str, list[str]]:
    """{image id: captions} of a COCO annotation file."""
    references: dict[str, list[str]] = {}
    for row in read_json(Path(path), {"annotations": [CAPTIONED]})["annotations"]:
        references.setdefault(str(row["image_id"]), []).append(row["caption"])
    return references


def write_predictions(path: Path, predictions: dict[str, str]) -> None:
    """Writes captions (pair id -> caption) as a COCO results file, which the field's scripts read."""
    rows = [{"image_id": i, "caption": caption} for i, caption in predictions.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(rows, indent=1) + "\n")


# ---- phrases of captions ---------------------------------------------------------------------------------------------

# Parts of speech of the words of mini and CLEVR-Change, whose sentences come from templates. Materials are adjectives
# ("became rubber"); words that only say where the changed object stands ("left of", "in front of") are prepositions.
CLOSED_WORDS = {
    "NOUN": "sphere ball cube block cylinder object objects thing scene scenes picture pictures image change "
            "difference location position place color size shape material",
    "PRON": "nothing everything someone something that it",
    "DET": "a an the its all no",
    "NUM": "two",
    "ADJ": "small tiny large big gray red blue green brown purple cyan yellow rubber matte metal metallic shiny new "
           "same different identical missing other",
    "ADV": "now longer newly before there",
    "AUX": "is are was were been be has have can",
    "VERB": "gone added removed moved changed made became turned placed appeared disappeared occurred modified remains "
            "seem show seen",
    "ADP": "of in to on at as after behind left right front side",
    "CCONJ": "and",
}  # fmt: skip
# Words whose part of speech depends on the phrase: the phrase (| separates choices), the word's index, part of speech.
CLOSED_PHRASES = [("no longer", 0, "ADV"), ("there is|are", 0, "PRON"), ("same size|color|shape|material as", 0, "ADP"),
                  ("same size|color|shape|material as", 1, "ADP")]  # fmt: skip
# A caption becomes a line of roles, "DET ADJ NOUN AUX VERB ", and phrases are regular expressions over it. (spaCy's
# Matcher cannot look ahead or behind, so it takes "now white cars" for a noun and "built on bare" for a verb.)
ROLES = {role: role for role in "NOUN ADJ NUM ADV AUX VERB DET ADP".split()} | {"PROPN": "NOUN"}
ROLES_OF_WORDS = {
    "no DET": "NO", "nothing PRON": "NOUN", "everything PRON": "NOUN", "there PRON": "THERE", "to PART": "TO",
    "not PART": "ADV", "n't PART": "ADV", "same ADJ": "SAME", "different ADJ": "SAME",
    "there ADV": "PLACE", "here ADV": "PLACE", "before ADV": "PLACE", "anymore ADV": "PLACE", "away ADV": "PLACE",
}  # fmt: skip
NAMES_NOTHING = {"nothing", "everything"}
# Nouns of closed vocabularies that name no changed object: "the two scenes", "the location" of what has changed.
NO_ENTITIES = {*"objects scene scenes picture pictures image change difference".split(),
               *"location position place color size shape material".split()}  # fmt: skip


def roles_pattern(text: str) -> re.Pattern:
    """A regular expression whose capital words are roles: "ADV* VERB" fits "VERB " and "ADV ADV VERB "."""
    return re.compile(re.sub("[A-Z]+", lambda role: f"(?:{role[0]}[ ])", text), re.VERBOSE)


# The participle of "a parked car" is in effect an adjective.
PARTICIPLE = roles_pattern("( (?:DET|NO) (?:ADJ|NUM)* ) VERB (?= (?:ADJ|SAME)* NOUN )")
# The adverb of "is now large" belongs to the verb, so an adverb that follows AUX, VERB or ADV starts no noun segment.
NOUNS = roles_pattern("NO? (?: (?<!AUX)(?<!VERB)(?<!ADV) ADV+ (?:ADJ|SAME) | ADJ|SAME|NUM|NOUN )* NOUN")
_VERB = "(?: (?:ADV*AUX)* ADV* VERB | (?:ADV*AUX)+ )"
VERBS = roles_pattern(f"""(?: THERE (?= ADV*AUX ) )? {_VERB} (?: ADV* TO {_VERB} )* (?:ADV|PLACE)*
    (?: ADP? DET? SAME NOUN* | ADP? ADV* (?:ADJ|SAME)+ (?! ADJ|SAME|NUM|NOUN ) )?""")


def language(dataset_name: str):
    """The spaCy pipeline that reads a data set's captions: rules if all its words are known, else en_core_web_sm."""
    import spacy

    if not DATASETS[dataset_name].closed:
        try:
            return spacy.load("en_core_web_sm", exclude=["ner", "lemmatizer"])
        except OSError as e:
            raise ValueError(f"the captions of {dataset_name} need spaCy's English model; "
                             "run: python -m spacy download en_core_web_sm") from e  # fmt: skip
    nlp = spacy.blank("en", meta={"name": "closed_captions"})
    ruler = nlp.add_pipe("attribute_ruler")
    for pos, words in CLOSED_WORDS.items():
        ruler.add([[{"LOWER": {"IN": words.split()}}]], {"POS": pos})
    for phrase, index, pos in CLOSED_PHRASES:
        ruler.add([[{"LOWER": {"IN": words.split("|")}} for words in phrase.split()]], {"POS": pos}, index=index)
    return nlp


def segments(doc) -> tuple[list[str], list[str]]:
    """Noun segments and verb segments of one caption, in reading order, lower case; only parts of speech are read.

    Nouns come with adjectives, numbers and their adverbs, and with "no" ("no change"), but without articles. Verbs come
    with auxiliaries, adverbs, a particle, the "there" of "there is", and a complement without a noun ("changed to
    gray"), unless the noun follows "same" or "different" ("is in the same place"). A copula without any of these is
    kept only if the caption has no fuller verb segment."""
    tokens, roles = [token for token in doc if not token.is_space], ""
    for token in tokens:
        role = ROLES_OF_WORDS.get(f"{token.lower_} {token.pos_}", ROLES.get(token.pos_, "OTHER"))
        # Penn tags, if there are any: a particle ("show up") may end a verb segment, as "away" may; "its" is a DET.
        roles += {"RP": "PLACE", "PRP$": "DET"}.get(token.tag_, role) + " "
    roles = PARTICIPLE.sub(r"\1ADJ ", roles)

    def phrases(pattern: re.Pattern) -> list[tuple[str, str]]:
        """(roles, words) of every phrase."""
        ends = [(roles[: m.start()].count(" "), roles[: m.end()].count(" "), m[0]) for m in pattern.finditer(roles)]
        return [(its_roles, " ".join(token.lower_ for token in tokens[start:end])) for start, end, its_roles in ends]

    verbs = phrases(VERBS)
    actions = [words for its_roles, words in verbs if its_roles.replace("AUX ", "")]
    return [words for _, words in phrases(NOUNS)], actions or [words for _, words in verbs]


def subjects(doc) -> list[str]:
    """What a caption says has changed, lower case: the grammatical subject, without articles and a leading "new";
    coordinated subjects count separately.

    With a parse: the subject of the main clause, and of a clause coordinated with it. If that is an expletive or a
    pronoun ("there is a car", "someone added a car") or missing ("remove the car"), the object or, after "there is",
    the noun. Without a parse (closed vocabularies): the first noun segment that names an object. "No change", "nothing"
    and "everything" name no entity."""
    if not doc.has_annotation("DEP"):
        for noun in segments(doc)[0]:
            if noun in NAMES_NOTHING or noun.startswith("no "):
                break
            if noun.split()[-1] not in NO_ENTITIES:
                return [noun.removeprefix("new ")]
        return []

    def children(token, *relations: str) -> list:
        return [child for child in token.children if child.dep_ in relations]

    def heads(clause) -> list:
        """The nouns that a clause is about."""
        subject = children(clause, "nsubj", "nsubjpass")
        named = [t for t in subject if t.pos_ not in ("PRON", "DET")]
        if not named and clause.pos_ in ("NOUN", "PROPN") and not children(clause, "cop", "expl"):
            named = [clause]
        if not named and not any(t.lower_ in NAMES_NOTHING for t in subject):
            named = children(clause, "attr", "dobj", "obj")
            named = named or [t for inner in children(clause, "xcomp", "ccomp") for t in heads(inner)]
        return [t for t in named if t.pos_ not in ("PRON", "DET")]

    clauses = [t for t in doc if t.dep_ == "ROOT"]
    clauses += [t for root in clauses for t in root.conjuncts if children(t, "nsubj", "nsubjpass", "expl")]
    names = []
    for head in (t for clause in clauses for t in heads(clause)):
        if any(t.lower_ in ("no", "not", "neither") for t in head.lefts):
            continue
        for noun in (head, *(t for t in head.conjuncts if t.pos_ in ("NOUN", "PROPN"))):
            before = doc[noun.left_edge.i : noun.i]
            words = [t for t in before if t.pos_ not in ("DET", "PRON", "PUNCT") and t.dep_ != "preconj"]
            names.append(" ".join(t.lower_ for t in (*words, noun)).removeprefix("new "))
    return list(dict.fromkeys(names))


def read_captions(read: Callable, dataset_name: str, captions: Iterable[str]) -> dict[str, list]:
    """What `read` (segments or subjects) finds in every distinct caption; it takes seconds for mini."""
    nlp, captions, readings = language(dataset_name), list(dict.fromkeys(captions)), {}
    for doc in progress(nlp.pipe(captions, batch_size=1000), desc=read.__name__, total=len(captions), unit="caption"):
        if unknown := [t.text for t in doc if not (t.pos or t.is_punct or t.is_space)]:
            raise ValueError(f"{dataset_name}: {unknown[0]!r} in {doc.text!r} has no part of speech; correct the "
                             "caption, or add the word to CLOSED_WORDS in data.py")  # fmt: skip
        readings[doc.text] = read(doc)
    print(f"{read.__name__} of {len(captions)} captions by {nlp.meta['lang']}_{nlp.meta['name']} {nlp.meta['version']}")
    return readings


# ---- CLIP ------------------------------------------------------------------------------------------------------------

def load_clip(name: str, root: Path, device: str = "cpu", saved: dict | None = None) -> tuple:
    """A frozen CLIP in float32, its tokenizer (texts -> ids) and its preprocessing (PIL image -> tensor).

    `name` is MODEL:PRETRAINED in open_clip's names, such as "ViT-L-14:openai" (fetched on first use), or MODEL:FILE, or
    a data set that has its own CLIP. `saved`: what clip_weights returned, for example from a checkpoint."""
    import open_clip

    if saved := saved or clip_weights(name, root, device):
        with file_errors(root / "clip.pt", "remove it: it is made again"):
            clip = open_clip.CLIP(**saved["config"])
            clip.load_state_dict(saved["model"])
        preprocess = OWN_NETWORKS[DATASETS[name].extractor][1]
        tokenizer = open_clip.SimpleTokenizer(context_length=clip.context_length)
        return clip.to(device).eval().requires_grad_(False), tokenizer, preprocess
    model, _, weights = name.partition(":")
    tags = open_clip.list_pretrained_tags_by_model(model)
    if weights not in tags and not Path(weights).is_file():
        known = ", ".join(tags) or "none"
        raise ValueError(f"--clip {name}: open_clip has no such model or weights, and there is no such file; give "
                         f"MODEL:PRETRAINED (known of {model}: {known}) or MODEL:/path/to/file")  # fmt: skip
    # OpenAI's weights need another activation (QuickGELU) than open_clip's model of the same name has.
    quick = bool((open_clip.get_pretrained_cfg(model, weights) or {}).get("quick_gelu"))
    file = f"{model}{'-quickgelu' * quick}:/path/to/file"
    with file_errors(f"--clip {name}", f"load it once with a network, or fetch the weights and give --clip {file}"):
        clip, _, preprocess = open_clip.create_model_and_transforms(model, weights, force_quick_gelu=quick)
    if not isinstance(clip, open_clip.CLIP) or clip.text_pool_type != "argmax":
        raise ValueError(f"--clip {name}: its text encoder takes no learned prompts; choose a model such as ViT-L-14")
    return clip.to(device).eval().requires_grad_(False), open_clip.get_tokenizer(model), preprocess


def clip_weights(name: str, root: Path, device: str = "cpu") -> dict | None:
    """What a checkpoint must hold of a CLIP: all of a data set's own CLIP, which is trained into root/clip.pt on first
    use; nothing (None) of a published one."""
    return DATASETS[name].clip(root, device) if name in DATASETS and DATASETS[name].clip else None


def clip_id(name: str, root: Path) -> str:
    """The name of a CLIP, with a hash of its weights if these are a file, so that no two are taken for each other."""
    file = root / "clip.pt" if name in DATASETS else Path(name.partition(":")[2])
    return f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}" if file.is_file() else name


def encode_images(clip, preprocess, paths: list[str | Path]) -> Tensor:
    """Embeddings of image files (n, E), each of length 1, by a frozen CLIP."""
    with ThreadPoolExecutor(4) as pool:
        x = torch.stack(list(pool.map(lambda p: preprocess(read_image(p)), paths)))
    return clip.encode_image(x.to(next(clip.parameters()).device), normalize=True).cpu()


def clip_embeddings(name: str, root: Path, texts: list[str], paths: dict[str, Path], device: str) -> tuple:
    """A CLIP's embeddings of texts (M, E), and of a data set's images (n, E) in the order of their sorted names, each
    of length 1; kept in root/embeddings.pt."""
    saved, file, images = clip_weights(name, root, device), root / "embeddings.pt", sorted(paths)
    key = {"clip": clip_id(name, root), "texts": texts, "images": images}
    if file.exists():
        made = load_tensors(file, "remove it: it is made again")
        if made["key"] == key and (len(made["texts"]), len(made["images"])) == (len(texts), len(images)):
            return made["texts"], made["images"]
    clip, tokenizer, preprocess = load_clip(name, root, device, saved)
    batches = tokenizer(texts).to(device).split(256)
    of_texts = torch.cat([clip.encode_text(ids, normalize=True).cpu() for ids in batches])
    starts = progress(range(0, len(images), 64), desc=f"CLIP {name}", unit_scale=64, unit="image")
    of_images = torch.cat([encode_images(clip, preprocess, [paths[n] for n in images[i : i + 64]]) for i in starts])
    save_tensors(file, {"key": key, "texts": of_texts, "images": of_images})
    return of_texts, of_images


def encode_prompted(clip, tokens: Tensor, prompt: Tensor | None = None) -> Tensor:
    """CLIP's text encoder with P learned vectors between the start token and the words, as in CoOp. Without a prompt,
    the same as CLIP's encode_text.

    tokens (S, L) ids, prompt (P, W) for all texts or (S, P, W) for each (W: encoder width) -> (S, E). L may stop at the
    longest text's end token, as what follows is never seen. Words that do not fit are cut off; the end token stays."""
    count = 0 if prompt is None else prompt.shape[-2]
    room = clip.context_length - count
    if room < 3:
        raise ValueError(f"a prompt of {count} vectors leaves no room in CLIP's {clip.context_length} tokens")
    if tokens.shape[1] > room:
        end = tokens.max(1, keepdim=True).values  # the end token has the highest id
        fits = (tokens[:, :room] == end).any(1, keepdim=True)
        tokens = torch.where(fits, tokens[:, :room], torch.cat([tokens[:, : room - 1], end], 1))
    x = clip.token_embedding(tokens)  # (S, L, W)
    if prompt is not None:
        x = torch.cat([x[:, :1], prompt.expand(len(x), -1, -1), x[:, 1:]], 1)  # (S, L + P, W)
    size = x.shape[1]
    x = clip.transformer(x + clip.positional_embedding[:size], attn_mask=clip.attn_mask[:size, :size])
    x = clip.ln_final(x)[torch.arange(len(x), device=x.device), tokens.argmax(1) + count]  # (S, W)
    return clip.text_projection(x) if isinstance(clip.text_projection, nn.Linear) else x @ clip.text_projection


# ---- preparation and check -------------------------------------------------------------------------------------------


def vocab_of(name: str, release: Release) -> Vocab:
    """The vocabulary by the data set's rule; for most data sets, of the training captions alone."""
    source = DATASETS[name]
    scenes = (s for split in source.vocab_splits for s in release.scenes[split])
    captions = (c for s in scenes for p in s.pairs + (s.swapped or ()) for c in p.captions)
    return Vocab.of(captions, source.min_count, source.tokenizer, source.max_words)


def write_vocab(root: Path, vocab: Vocab) -> None:
    """vocab.json: word -> id."""
    write_text(root / "vocab.json", json.dumps(vocab.index, indent=0))


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def prepare(name: str, root: Path, device: str, extractor: str = "") -> None:
    """Writes vocab.json and a feature file: from the authors' released .npy folders (layer 3) or IDC's pickle (layer 4)
    if they are there, else from the images. An existing feature file is kept."""
    release, path = read_release(name, root), feature_file(name, root, extractor)
    vocab, names = vocab_of(name, release), sorted(release.paths)  # the vocabulary first, as it may be refused
    extractor, pickled = extractor or DATASETS[name].extractor, root / "full_img.pkl"
    images = [release.paths[n] for n in names]
    npy = [p.parent.parent / p.parent.name.replace("images", "features") / f"{p.name}.npy" for p in images]
    released = extractor == "resnet101-layer3" and any(p.exists() for p in npy)
    with lock(root):
        if path.exists():
            features = open_features(name, root, extractor)
            features.require(names)
            release.notes += [f"{path} is there already", *features.doubts(images)]
        elif extractor == "resnet101-layer4" and pickled.exists():
            blocks = (x[None] for x in read_pickle(pickled, names))
            write_features(path, names, blocks, extractor, RELEASED_PICKLES, name)
        elif absent := [p for p in (npy if released else images) if not p.exists()]:
            count = f"{len(absent)} of {len(names)} missing"
            raise FileNotFoundError(f"there is no {absent[0]} ({count}); complete the release")
        elif released:
            write_features(path, names, (read_npy(p)[None] for p in npy), extractor, RELEASED_FEATURES, name)
        else:
            batch = 64 if device.startswith("cuda") else 16  # 16 images take a CPU seconds: Ctrl-C acts soon
            extract(path, release, Extractor(extractor, device=device), name, batch)
        write_vocab(root, vocab)
    print(*(f"note: {line}" for line in release.notes), f"{root}: {len(names)} images, {len(vocab)} words", sep="\n")


def read_npy(path: Path) -> np.ndarray:
    """A released feature map (C, H, W)."""
    with file_errors(path, "fetch it again"):
        return np.load(path)


class Described:
    """Stands in for whatever a pickle calls: nothing runs, only the arguments and the state to be set are kept."""

    def __init__(self, *args):
        self.args, self.state = args, None

    def __setstate__(self, state):
        self.state = state

    def array(self) -> np.ndarray:
        """The array that numpy would make. Numpy itself would trust a pickle's types: for the type "object" it would
        take the pickle's bytes for memory addresses."""
        if self.state:  # made by numpy's _reconstruct
            _, shape, kind, by_columns, content = self.state
            order = "F" if by_columns else "C"
        else:  # made by numpy's _frombuffer, which pickles of protocol 5 call
            content, kind, shape, order = self.args
        if isinstance(content, Described):  # bytes as _codecs.encode makes them, for protocol 2
            content = content.args[0].encode("latin1")
        kind = np.dtype(str(kind.args[0])).newbyteorder(kind.state[1])
        return np.frombuffer(content, kind).reshape(shape, order=order)


class ArrayUnpickler(pickle.Unpickler):
    """Reads pickled arrays of numpy 1 and 2. Anything else that a pickle names is refused: it could run any program."""

    ALLOWED = {"numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct", "numpy.core.numeric._frombuffer",
               "_codecs.encode"}  # fmt: skip

    def find_class(self, module: str, name: str):
        if f"{module}.{name}".replace("numpy._core.", "numpy.core.") not in self.ALLOWED:
            raise ValueError(f"it names {module}.{name}")
        return Described


def read_pickle(path: Path, names: list[str]) -> Iterator[np.ndarray]:
    """The features (C, H, W) of images, from a pickled dictionary file name -> array, which is read as a whole. Arrays
    have this shape or (C, N) with the N cells of a square grid."""
    print(f"{path}: read as a whole, {path.stat().st_size / 1e9:.2f} GB of memory")
    with file_errors(path, "fetch it again"), open(path, "rb") as f:
        arrays = {Path(name).stem: x.array() for name, x in ArrayUnpickler(f).load().items()}
        for name, x in arrays.items():
            arrays[name] = x if x.ndim == 3 else x.reshape(len(x), math.isqrt(x.shape[1]), -1)
    if absent := [name for name in names if Path(name).stem not in arrays]:
        raise ValueError(f"{path}: no features of {absent[0]} and {len(absent) - 1} more of {len(names)} images")
    yield from (arrays.pop(Path(name).stem) for name in names)


def extract(path: Path, release: Release, extractor: Extractor, name: str, batch: int) -> None:
    """Run an extractor over every image of a release into a feature file."""
    names = sorted(release.paths)
    blocks = prefetch(block.numpy() for block in extractor.blocks([release.paths[n] for n in names], batch))
    write_features(path, names, blocks, extractor.name, extractor.preprocessing, name)


def check(name: str, root: Path, extractor: str = "") -> list[str]:
    """Problems of a folder, one per line: counts that differ from the published ones, missing files, and features or a
    vocabulary that do not belong to these images and captions."""
    source, release = DATASETS[name], read_release(name, root)
    vocab, images = vocab_of(name, release), [*release.paths.values()]
    counts = {part: len(members) for part, members in (release.scenes | release.kinds).items()} | {"words": len(vocab)}
    published = source.scenes | source.types | ({"words": source.words} if source.words else {})
    problems = [f"{root}: {part} has {counts.get(part, 0)}, published {count}"
                for part, count in published.items() if counts.get(part, 0) != count]  # fmt: skip
    absent = [path for path in images if not path.exists()]
    if 0 < len(absent) < len(images):  # released features come without any picture
        problems.append(f"there is no {absent[0]} ({len(absent)} of {len(images)} missing); complete the release")
    try:
        features = open_features(name, root, extractor)
        features.require(release.paths)
        release.notes += features.doubts(images)
    except (OSError, ValueError) as e:
        problems.append(str(e))
    try:
        if read_vocab(name, root).words != vocab.words:
            command = prepare_command(name, root, extractor)
            problems.append(f"{root / 'vocab.json'} is not of these captions; run: {command}")
    except (OSError, ValueError) as e:
        problems.append(str(e))
    counts = ", ".join(f"{part} {count}" for part, count in counts.items())
    print(*(f"note: {line}" for line in release.notes), f"{root}: {counts}; {len(images)} images", sep="\n")
    return problems


# ---- command line ----------------------------------------------------------------------------------------------------


def open_dataset(cfg) -> Dataset:
    """The data set that a run's config names. If it is one that is made here, what is missing is made first."""
    if make := DATASETS[cfg.dataset].make:
        feature_file(cfg.dataset, Path(cfg.data_dir), cfg.extractor)  # refuses a wrong extractor before the work begins
        make(Path(cfg.data_dir), cfg.scenes, cfg.objects, cfg.data_seed, cfg.device)
    dataset = load(cfg.dataset, cfg.data_dir, cfg.features, cfg.device, cfg.extractor)
    if cfg.batch_size > (count := len(dataset.scenes["train"])):
        print(f"--batch_size {cfg.batch_size} is more than there is to train on; it is {count} now")
        cfg.batch_size = count
    return dataset


class Captioner:
    """A trained model that captions any two pictures (files or PIL images): caption, maps = captioner(before, after).
    maps: name -> where the model looked (H, W).

    model, state: from common.load_model. inputs(model, state, pictures) -> what else the model's generate and
    attention_map take, one row for each pair, or None."""

    def __init__(self, model: nn.Module, state: dict, inputs: Callable | None = None):
        self.model, self.state, self.inputs, self.device = model, state, inputs, model.cfg.device
        self.vocab, self.extractor = Vocab(state["vocab"]), Extractor(**state["extractor"], device=self.device)

    def __call__(self, before, after) -> tuple[str, dict[str, Tensor]]:
        return next(self.pairs([(before, after)]))

    def pairs(self, pairs: list[tuple], batch: int = 16) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yields the caption and the maps of every pair in a list."""
        pictures = [picture for pair in pairs for picture in pair]
        rows = self.inputs(self.model, self.state, pictures) if self.inputs else None
        blocks = self.extractor.blocks(pictures, 2 * batch)
        for i, x in zip(range(0, len(pairs), batch), blocks, strict=True):
            before, after = x.to(self.device).float().unflatten(0, (-1, 2)).unbind(1)
            inputs = [] if rows is None else [rows[i : i + batch]]
            ids = self.model.generate(before, after, *inputs)
            maps = self.model.attention_map(before, after, ids, *inputs)
            for n, caption in enumerate(self.vocab.decode(ids)):
                yield caption, {name: m[n] for name, m in maps.items()}


def caption_files(captioner: Captioner, files: list[str], out: str | None) -> None:
    """Prints the caption of two image files, or of every pair of a CSV file with the columns before and after, whose
    paths are relative to it. `out`: where to write the attention picture or, for a CSV file, COCO results."""
    pairs, folder = {"": tuple(map(Path, files))}, Path(files[0]).parent
    if len(files) == 1:
        rows = read_rows(Path(files[0]), {"before": str, "after": str}).values()
        pairs = {pair_name(row): (folder / row["before"], folder / row["after"]) for row in rows}
    if out and Path(out).exists() and any(Path(out).samefile(f) for f in (*files, *itertools.chain(*pairs.values()))):
        raise ValueError(f"--out {out} is one of the files to read; choose another name")
    results = {}
    for name, result in zip(pairs, captioner.pairs([*pairs.values()]), strict=True):
        results[name] = result
        print(f"{name}: {result[0]}" if name else result[0], flush=True)
    if out and len(files) == 1:
        write_predictions(Path(out), {name: caption for name, (caption, _) in results.items()})
    elif out:
        caption, maps = results[""]
        picture = pair_picture(*map(read_image, files), maps, [caption], side=224)
        with atomic_write(Path(out)) as partial:
            picture.save(partial, Image.registered_extensions()[Path(out).suffix.lower()])


def score_files(args) -> None:
    """`python data.py score`: prints the scores of a file of captions."""
    if (args.tokens == "ids") != bool(args.vocab):
        raise ValueError("--tokens ids needs --vocab, the data set's vocab.json, and --vocab needs --tokens ids")
    captions, references = read_predictions(args.predictions), read_references(args.references)
    groups = read_json(args.groups, {str: [(int, str)]}) if args.groups else {}
    groups = {name: set(map(str, among)) for name, among in groups.items()}
    if groups and not any(among & captions.keys() for among in groups.values()):
        raise ValueError(f"{args.groups}: no image_id of the predictions; expected {{group: [image_id, ...]}}")
    ids = read_json(args.vocab, {str: int}) if args.vocab else None
    print(format_scores(score(captions, references, groups, tokens=args.tokens, index=ids)))


def main(argv: list[str] | None = None) -> None:
    """The command line: a parser for data sets that are made here, one for releases, `score` and `bounds`."""
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="NAME", required=True)
    made = [name for name, source in DATASETS.items() if source.make]
    releases = [name for name in DATASETS if name not in made]
    for (first, *others), text in ((made, "make this data set, or check it"), (releases, "prepare or check a release")):
        p = commands.add_parser(first, aliases=others, prog="data.py NAME", help=text)
        p.add_argument("--data_dir", type=Path, help="its folder (default: data/NAME)")
        p.add_argument("--check", action="store_true", help="report what is there and what is missing")
        p.add_argument("--device", default="", help="where features are made (default: cuda if there is one)")
        p.set_defaults(extractor="")
        if first in made:
            for flag, text in (("scenes", "training scenes"), ("objects", "fewest and most objects of a scene"),
                               ("data_seed", "seed of scenes and features")):  # fmt: skip
                default = getattr(RunConfig, flag)
                p.add_argument(f"--{flag}", type=type(default), default=default, help=f"{text} (default: {default})")
        else:
            p.add_argument("--extractor", choices=RESNETS, help="features of another extractor, in a file of their own")
    p = commands.add_parser("score", help="score a file of captions against a file of references")
    p.add_argument("--predictions", required=True, help="COCO results: a list of {image_id, caption}")
    p.add_argument("--references", required=True, help="COCO annotations: {annotations: [{image_id, caption}]}")
    p.add_argument("--groups", type=Path, help="JSON of ids to score by group, such as type_mapping.json")
    p.add_argument("--tokens", choices=["ptb", "split", "ids"], default="ptb", help="PTB, words as they are, or ids")
    p.add_argument("--vocab", type=Path, help="vocab.json, for --tokens ids")
    p = commands.add_parser("bounds", help="score captions that never looked, and a person, on a data set's test split")
    p.add_argument("name", choices=DATASETS)
    p.add_argument("--data_dir", type=Path, help="the release's folder; its annotations are enough")
    p.add_argument("--out", type=Path, help="where to write (default: bounds.json in the folder)")
    args = parser.parse_args(argv)
    if args.command == "score":
        return score_files(args)
    if args.command == "bounds":
        return bounds(args.name, args.data_dir or Path("data", args.name), args.out)
    root, make = args.data_dir or Path("data", args.command), DATASETS[args.command].make
    if args.check:
        if problems := check(args.command, root, args.extractor):
            print("\n".join(problems), file=sys.stderr)
            sys.exit(2)
    elif make:
        make(root, args.scenes, args.objects, args.data_seed, usable_device(args.device))
    else:
        prepare(args.command, root, usable_device(args.device), args.extractor)


# ======================================================================================================================
# Below this line is the embedded data set, mini. The code above reaches it through its row of DATASETS, at the end.
# ======================================================================================================================

# ---- mini: scenes ----------------------------------------------------------------------------------------------------

KINDS = ("color", "material", "add", "drop", "move")
COLORS = {"gray": (87, 87, 87), "red": (173, 35, 35), "blue": (42, 75, 215), "green": (29, 105, 20),
          "brown": (129, 74, 25), "purple": (129, 38, 192), "cyan": (41, 208, 208), "yellow": (255, 238, 51)}
ATTRIBUTES = {"size": ("small", "large"), "color": tuple(COLORS), "material": ("rubber", "metal"),
              "shape": ("sphere", "cube", "cylinder")}  # in the order in which English names them
RADIUS = {"small": 0.45, "large": 0.8}
TAN = 0.38  # tangent of half the field of view


def _free_position(rng: np.random.Generator, radius: float, others: list[dict]) -> list[float] | None:
    """A floor position (x, y) at least .25 clear of all others, or None if 30 tries find none."""
    for position in rng.uniform(-2.4, 2.4, (30, 2)).tolist():
        if all(math.dist(position, o["xyz"][:2]) > radius + RADIUS[o["size"]] + 0.25 for o in others):
            return position
    return None


def _sample_scene(rng: np.random.Generator, kind: str, objects: tuple[int, int]) -> tuple[list, list, int]:
    """Objects before, objects after, and the changed one's index (for add: among those after). No two objects of a
    scene share all attributes. If positions or attributes collide, the scene is drawn again."""
    count = int(rng.integers(objects[0], objects[1] + 1)) + (kind == "add")
    combinations, scene = list(itertools.product(*reversed(ATTRIBUTES.values()))), []
    for number in rng.choice(len(combinations), count, replace=False):
        item = dict(zip(reversed(ATTRIBUTES), combinations[number], strict=True))
        radius = RADIUS[item["size"]]
        if not (position := _free_position(rng, radius, scene)):
            return _sample_scene(rng, kind, objects)
        half = radius * (0.8 if item["shape"] == "cube" else 1)
        scene.append(item | {"xyz": [*position, half], "turn": rng.uniform(0, np.pi / 2)})
    changed = count - 1 if kind == "add" else int(rng.integers(count))
    others, new = scene[:changed] + scene[changed + 1 :], dict(scene[changed])
    if kind == "add":
        return others, scene, changed
    if kind == "drop":
        return scene, others, changed
    if kind == "move":
        position = _free_position(rng, RADIUS[new["size"]], others)
        if not position or math.dist(position, new["xyz"][:2]) < 1.2:
            return _sample_scene(rng, kind, objects)
        new["xyz"] = [*position, new["xyz"][2]]
    else:
        new[kind] = str(rng.choice([word for word in ATTRIBUTES[kind] if word != new[kind]]))
        if _phrase(new) in map(_phrase, others):
            return _sample_scene(rng, kind, objects)
    return scene, [*scene[:changed], new, *scene[changed + 1 :]], changed


def _sample_cameras(rng: np.random.Generator, scenes: int, views: int, jitter: float = 2.5) -> list[dict]:
    """Cameras and lights of all views, scene after scene: eye, right, up, forward, light (unit, towards it), all (3,),
    and gain. A scene has a camera a and a spread s in 0 ... 1, each view has a camera b and uses (1 - s) a + s b."""
    def unit(v: np.ndarray) -> np.ndarray:
        return v / np.linalg.norm(v, axis=0)

    def offsets() -> np.ndarray:  # at most `jitter` in every direction
        of_scene, of_view = rng.uniform(-1, 1, (3, scenes, 1)), rng.uniform(-1, 1, (3, scenes, views))
        return jitter * ((1 - s) * of_scene + s * of_view).reshape(3, -1)

    s, count = rng.uniform(0, 1, (scenes, 1)), scenes * views
    eye = np.array([[7], [-7], [6]]) + offsets()
    forward = unit(np.array([[0], [0], [0.3]]) + [[0.25], [0.25], [0.125]] * offsets() - eye)
    right = unit(np.stack([forward[1], -forward[0], 0 * forward[0]]))  # forward x z
    cameras = {"eye": eye, "right": right, "up": np.cross(right, forward, axis=0), "forward": forward,
               "light": unit(np.array([[-3], [-5], [8]]) + rng.uniform(-1.5, 1.5, (3, count))),
               "gain": rng.uniform(0.85, 1.15, count)}  # fmt: skip
    return [{name: value[..., n].astype(np.float32) for name, value in cameras.items()} for n in range(count)]


# ---- mini: ray caster ------------------------------------------------------------------------------------------------


def _rays(view: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray, count: int) -> np.ndarray:
    """Directions (3, rows, columns) of the rays through columns x and rows y of a grid of count x count rays. They have
    length 1 along the camera's axis, so that the ray parameter is depth."""
    across, down = (TAN * ((2 * index.astype(np.float32) + 1) / count - 1) for index in (x, y[:, None]))
    forward, right, up = (view[name][:, None, None] for name in ("forward", "right", "up"))
    return forward + right * across - up * down


def _depth(shape: str, o: np.ndarray, d: np.ndarray, h: float) -> np.ndarray:
    """Depth (rows, columns) at which rays from the eye o (3,) in directions d (3, rows, columns) meet a body of half
    height h centred at the origin; inf if they miss."""
    o = o[:, None, None]
    if shape == "cube":
        near, far = (-h - o) / d, (h - o) / d
        t, end = np.minimum(near, far).max(0), np.maximum(near, far).min(0)
        return np.where(t < end, t, np.inf)
    axes = 3 if shape == "sphere" else 2
    a, b = (d[:axes] ** 2).sum(0), (o[:axes] * d[:axes]).sum(0)
    root = b * b - a * ((o[:axes] ** 2).sum(0) - h * h)
    hit, root = root > 0, np.sqrt(np.maximum(root, 0))
    t = (-b - root) / a
    if shape == "cylinder":
        t = np.maximum(t, (h - o[2]) / d[2])  # from above, a ray enters the slab between the two ends at the top
        hit &= t < np.minimum((-b + root) / a, (-h - o[2]) / d[2])
    return np.where(hit, t, np.inf)


def _cast(item: dict, camera: dict[str, np.ndarray], count: int) -> tuple:
    """Casts the camera's count x count rays at an object -> the vectors eye, light, ... (3,) in the object's frame,
    which is centred on it and turned with it; the number of rays that hit it, including those outside the picture; and
    columns x, rows y (N,), directions (3, N) and depths (N,) of the N hits inside the picture."""
    fill = camera["eye"] / np.linalg.norm(camera["eye"]) + 0.5 * camera["right"]  # a lamp next to the camera
    world = {name: camera[name] for name in ("right", "up", "forward", "light")}
    world |= {"eye": camera["eye"] - np.array(item["xyz"], np.float32), "fill": fill / np.linalg.norm(fill)}
    cos, sin = np.cos(np.float32(item["turn"])), np.sin(np.float32(item["turn"]))
    body = {name: np.stack([cos * x + sin * y, cos * y - sin * x, z]) for name, (x, y, z) in world.items()}
    # Only the square that the bounding sphere covers is searched.
    half = np.float32(item["xyz"][2])
    radius = half * {"sphere": 1, "cube": 3**0.5, "cylinder": 2**0.5}[item["shape"]]
    right, up, depth = (-body["eye"] @ body[axis] for axis in ("right", "up", "forward"))
    size = int(count * radius / (TAN * max(depth - radius, 0.5))) + 12
    x, y = (int(count / 2 * (1 + offset / (TAN * depth)) - size / 2) + np.arange(size) for offset in (right, -up))
    d = _rays(body, x, y, count)
    t = _depth(item["shape"], body["eye"], d, half)
    hit, columns, rows = np.isfinite(t), (x >= 0) & (x < count), (y >= 0) & (y < count)
    row, column = (hit & rows[:, None] & columns).nonzero()
    return body, hit.sum(), x[column], y[row], d[:, row, column], t[row, column]


def _shade(item: dict, body: dict[str, np.ndarray], gain: float, d: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Light (3, N) that an object sends back along rays d (3, N) of depth t (N,): 0 to 1, but more in highlights."""
    half = np.float32(item["xyz"][2])
    point, d = body["eye"][:, None] + t * d, d / np.sqrt((d * d).sum(0))
    normal = point / half  # right for spheres
    if item["shape"] == "cube":
        face = np.abs(normal).argmax(0) == np.arange(3)[:, None]
        normal = np.sign(normal) * face
    elif item["shape"] == "cylinder":
        normal = np.where(normal[2] > 0.9999, [[0], [0], [1]], normal * [[1], [1], [0]]).astype(np.float32)
    facing = (d * normal).sum(0)
    mirrored = d - 2 * facing * normal
    gleam, height = np.maximum(body["light"] @ mirrored, 0), point[2] + half
    lit, fill = np.maximum(body["light"] @ normal, 0), np.maximum(body["fill"] @ normal, 0)
    albedo = np.array(COLORS[item["color"]], np.float32)[:, None] / 255
    if item["material"] == "metal":
        # Metal mirrors a floor that is dark close by, a bright band above the horizon, and a lamp with a hard edge:
        # without hard edges it looks like rubber at this size.
        rise = mirrored[2]
        floor = 0.5 * (1 - np.exp(height / (0.7 * np.minimum(rise, -1e-3))))
        sky = 0.35 + 0.55 * (rise < 0.45) + 0.5 * ((rise > 0.6) & (gleam > 0.75))
        mirror = np.where(rise < 0, floor, sky) * (0.6 + 0.4 * (1 + facing) ** 3)
        color = albedo * (0.1 + 0.3 * lit) + (0.65 * albedo + 0.25) * mirror + 1.2 * gleam**60
    else:
        color = albedo * (0.25 + 0.8 * lit + 0.25 * fill) + 0.06 * gleam**8
    return color * (0.6 + 0.4 * np.clip(2 * height, 0, 1)) * gain  # darker where it touches the floor


def _floor(scene: list[dict], camera: dict[str, np.ndarray], side: int) -> np.ndarray:
    """The grey floor (side, side), one ray a pixel, with a soft shadow for each object, taken to be a ball."""
    d, eye, light = _rays(camera, np.arange(side), np.arange(side), side), camera["eye"], camera["light"]
    spot = eye[:2, None, None] - eye[2] / np.minimum(d[2], -1e-3) * d[:2]  # at and over the horizon: very far
    shadow = np.ones_like(spot[0])
    for item in scene:
        # Distance of floor points from the axis of the shadow, the line through the ball's centre along the light.
        centre, half = np.array(item["xyz"], np.float32), np.float32(item["xyz"][2])
        x, y = spot - (centre[:2] - half * light[:2] / light[2])[:, None, None]
        distance = np.sqrt(np.maximum(x * x + y * y - (x * light[0] + y * light[1]) ** 2, 0))
        shadow *= 0.45 + 0.55 * np.clip(2.5 * (distance / half - 0.8), 0, 1)
    glow = 0.55 + 0.45 * np.exp(-0.015 * (spot**2).sum(0))
    return (0.2 + 0.4 * max(0.3, light[2]) * shadow) * glow * camera["gain"]


def _render(scene: list[dict], camera: dict[str, np.ndarray], side: int = 64) -> tuple[np.ndarray, list, list, list]:
    """Draws a scene through one of _sample_cameras' views, with 2 x 2 rays a pixel -> the image (side, side, 3) uint8
    and, for each object, the box [x, y, w, h] in pixels of the whole object, cut at the frame; the visible area in
    pixels; and the visible part of the object, 0 to 1. The box of an object beyond the frame means nothing."""
    fine, casts, boxes, area, part = 2 * side, [], [], [], []
    nearest = np.full((fine, fine), np.inf, np.float32)  # the depth buffer
    for item in scene:
        body, rays, x, y, d, t = _cast(item, camera, fine)
        nearest[y, x] = np.minimum(nearest[y, x], t)
        casts.append((item, body, rays, x, y, d, t))
    light = np.zeros((4, fine, fine), np.float32)  # red, green, blue, and 1 where the floor is visible
    light[3] = np.isinf(nearest)
    for item, body, rays, x, y, d, t in casts:
        front = t == nearest[y, x]
        light[:3, y[front], x[front]] = _shade(item, body, camera["gain"], d[:, front], t[front])
        left, top = (int(v.min(initial=fine)) // 2 for v in (x, y))
        right, bottom = (int(v.max(initial=-1)) // 2 + 1 for v in (x, y))
        boxes.append([left, top, right - left, bottom - top])
        area.append(front.sum() / 4)
        part.append(front.sum() / rays)
    *color, floor = (light[:, ::2, ::2] + light[:, ::2, 1::2] + light[:, 1::2, ::2] + light[:, 1::2, 1::2]) / 4
    image = np.stack(color, 2) + (floor * _floor(scene, camera, side))[..., None]
    return (255 * np.clip(image, 0, 1) ** (1 / 1.5) + 0.5).astype(np.uint8), boxes, area, part


# ---- mini: words -----------------------------------------------------------------------------------------------------

TEMPLATES = {
    "color": ("the {} changed to {}", "the {} became {}", "the {} is now {}"),
    "material": ("the {} changed to {}", "the {} became {}", "the {} is now {}"),
    "add": ("a {} has been added", "someone added a {}", "there is a new {}"),
    "drop": ("the {} is missing", "the {} has been removed", "the {} is gone"),
    "move": ("the {} has been moved", "the {} changed its location", "someone moved the {}"),
}
NO_CHANGE = (
    "there is no change", "no change was made", "there is no difference", "no difference can be seen",
    "nothing has changed", "nothing was changed", "nothing has been moved", "the scene is the same as before",
    "the scene remains the same", "the two pictures show the same scene", "all objects are the same",
    "everything is in the same place",
)
NO_CHANGE_WORDS = {"no", "nothing", "same"}  # one is in each of NO_CHANGE; none is in TEMPLATES
SIGNS = {"add": {"added", "new"}, "drop": {"missing", "removed", "gone"}, "move": {"moved", "location"}}
CLEAR = 1.5  # a relation is clear if the distance along its axis is this many times that along the other


def _phrase(item: dict, names: Iterable[str] = ATTRIBUTES) -> str:
    """The named attributes in the usual order: "small red metal cube", "red cube"."""
    return " ".join(item[name] for name in names)


def _short_phrase(item: dict, scene: list[dict]) -> str:
    """Colour and shape, plus material, size or both if another object of the scene has the same colour and shape."""
    for names in (("color", "shape"), ("color", "material", "shape"), ("size", "color", "shape")):
        if [_phrase(other, names) for other in scene].count(_phrase(item, names)) == 1:
            return _phrase(item, names)
    return _phrase(item)


def _relation(item: dict, other: dict, right: np.ndarray) -> tuple[str, float]:
    """Where `item` stands on the floor relative to `other`, for a camera with this right axis, and how clearly."""
    x, y = item["xyz"][0] - other["xyz"][0], item["xyz"][1] - other["xyz"][1]
    sideways, away = x * right[0] + y * right[1], y * right[0] - x * right[1]
    if abs(sideways) > abs(away):
        return "right of" if sideways > 0 else "left of", abs(sideways) / max(abs(away), 1e-6)
    return "behind" if away > 0 else "in front of", abs(away) / max(abs(sideways), 1e-6)


def _captions(kind: str, before: list[dict], after: list[dict], changed: int, right: np.ndarray) -> list[str]:
    """Six different sentences for a change: three verbs times two descriptions of the changed object, by its full name
    and its place relative to the nearest objects whose relation to it is clear to a camera with this `right` axis. If
    none is clear, no place is given. The scene described is the one before (for add, after)."""
    scene = after if kind == "add" else before
    item, others = scene[changed], scene[:changed] + scene[changed + 1 :]
    full, value = _phrase(item), after[changed][kind] if kind in ATTRIBUTES else ""
    places = []
    for other in sorted(others, key=lambda other: math.dist(item["xyz"], other["xyz"])):
        relation, clarity = _relation(item, other, right)
        if clarity >= CLEAR:
            places.append((f"{full} that is {relation} the", other))
    names = [f"{place} {_short_phrase(other, scene)}" for place, other in places]
    names += [f"{place} {_phrase(other)}" for place, other in places]
    names = names or [full, _short_phrase(item, scene)]
    names = list(dict.fromkeys([*names, f"{full} in the scene"]))[:2]  # a short name may be the full one
    return [template.format(name, value) for template in TEMPLATES[kind] for name in names]


def parse_caption(text: str) -> dict[str, str | None]:
    """What a caption of mini says: "type" (one of KINDS, or "same"), the changed object's attributes (words up to
    the first shape word), and the new "value" of a color or material change; None for what it does not say."""
    words = text.split()
    said = dict.fromkeys(("type", *ATTRIBUTES, "value"))
    if NO_CHANGE_WORDS & set(words):
        return said | {"type": "same"}
    end = next((i for i, word in enumerate(words, 1) if word in ATTRIBUTES["shape"]), None)
    if end is None:
        return said
    for word in words[:end]:
        said |= {name: word for name, choices in ATTRIBUTES.items() if word in choices}
    said["type"] = next((kind for kind, signs in SIGNS.items() if signs & set(words)), None)
    if said["type"] is None and {"changed", "became", "now"} & set(words[end:]):
        for kind in ("color", "material"):
            if words[-1] in ATTRIBUTES[kind]:
                said |= {"type": kind, "value": words[-1]}
    return said


@functools.lru_cache(1)
def _scenes(root: Path) -> dict:
    """What scenes.json says, read once."""
    return read_json(root / "scenes.json")


def mini_accuracy(captions: dict[str, str], scenes: dict) -> dict[str, float]:
    """What share of captions (pair id -> caption) is right, in %. scenes: contents of scenes.json.

    For unchanged pairs, "distractors": captioned as unchanged. For changed pairs, "change type"; "all four": the named
    attributes are true of the changed object and of no other; "size", "color", "material", "shape": named and true, or
    not named although "all four" holds; "new value": of changes of color and material."""
    right = {name: [] for name in ("change type", "distractors", *ATTRIBUTES, "all four", "new value")}
    for key, text in captions.items():
        said, truth = parse_caption(text), scenes[str(int(key[:6]))]
        if key.endswith("_n"):
            right["distractors"].append(said["type"] == "same")
            continue
        kind, changed = truth["type"], truth["changed"]
        scene = truth["objects"]["semantic" if kind == "add" else "default"]
        named = {name: said[name] for name in ATTRIBUTES if said[name]}
        exact = bool(named) and [i for i, item in enumerate(scene) if named.items() <= item.items()] == [changed]
        right["change type"].append(said["type"] == kind)
        right["all four"].append(exact)
        for name in ATTRIBUTES:
            right[name].append(said[name] == scene[changed][name] if said[name] else exact)
        if kind in ATTRIBUTES:
            right["new value"].append(said["value"] == truth["objects"]["semantic"][changed][kind])
    return {name: round(100 * float(np.mean(hits)), 2) if hits else math.nan for name, hits in right.items()}


# ---- mini: files -----------------------------------------------------------------------------------------------------


def _picture(root: Path, view: str, scene: int) -> Path:
    return root / CLEVR_FOLDERS[view] / f"CLEVR_{view}_{scene:06d}.png"


def _describe(kind: str, changed: int, scenes: tuple[list, list, list], views: list[dict], boxes: list[list]) -> dict:
    """What the files say about a scene. `scenes`, `views` and `boxes` are the objects, cameras and boxes of its three
    pictures: default, semantic and nonsemantic."""
    objects = {}
    for view, items, of_view in zip(CLEVR_FOLDERS, scenes, boxes, strict=True):
        objects[view] = [{name: o[name] for name in ATTRIBUTES} | {"box": box, "xyz": [round(x, 3) for x in o["xyz"]]}
                         for o, box in zip(items, of_view, strict=True)]  # fmt: skip
    before, after = boxes[0].copy(), boxes[1].copy()
    if kind == "add":
        before.insert(changed, None)
    elif kind == "drop":
        after.insert(changed, None)
    both = torch.tensor([pair for pair in zip(before, after, strict=True) if None not in pair], dtype=torch.float64)
    iou = round(box_iou(*box_convert(both, "xywh", "xyxy").unbind(1)).diagonal().mean().item(), 4)
    # Left and right are those of the default view or, for swapped pairs, the nonsemantic one; for add, of the semantic.
    default, nonsemantic = (
        _captions(kind, *scenes[:2], changed, views[1 if kind == "add" else view]["right"]) for view in (0, 2)
    )
    return {"truth": {"type": kind, "changed": changed, "iou": iou, "objects": objects},
            "boxes": {"bbox_before": before[changed], "bbox_after": after[changed]},
            "default": default, "nonsemantic": nonsemantic}  # fmt: skip


def _render_scenes(root: Path, kinds: dict[int, str], objects: tuple[int, int], rng: np.random.Generator) -> dict:
    """Draws scenes (kinds: number -> kind of change) and returns number -> what _describe says, plus six no-change
    sentences. A scene is redrawn until every object shows more than 16 pixels and 40 % of itself in all pictures."""
    made = {}
    while waiting := [i for i in kinds if i not in made][:12]:
        drafts = [_sample_scene(rng, kinds[i], objects) for i in waiting]
        cameras = iter(_sample_cameras(rng, len(waiting), len(CLEVR_FOLDERS)))
        for i, (before, after, changed) in zip(waiting, drafts, strict=True):
            scenes, views = (before, after, before), [next(cameras) for _ in CLEVR_FOLDERS]
            pictures = map(_render, scenes, views)
            shown = list(itertools.takewhile(lambda picture: min(picture[2]) > 16 and min(picture[3]) > 0.4, pictures))
            if len(shown) == len(views):
                for view, (image, *_) in zip(CLEVR_FOLDERS, shown, strict=True):
                    Image.fromarray(image).save(_picture(root, view, i), compress_level=1)
                made[i] = _describe(kinds[i], changed, scenes, views, [boxes for _, boxes, *_ in shown])
                made[i]["same"] = rng.permutation(NO_CHANGE)[:6].tolist()
    return made


def render_mini(root: Path, scenes: dict[str, int], objects: tuple[int, int] = (2, 4), seed: int = 0) -> None:
    """Draws mini into the folder root in CLEVR-Change's layout, and adds scenes.json, which holds the truth. The files
    depend on the arguments alone.

    scenes: split -> how many. They are numbered consecutively in this order; each split has the five changes equally
    often. objects: the fewest and the most in the "before" picture."""
    for folder in CLEVR_FOLDERS.values():
        (root / folder).mkdir(parents=True, exist_ok=True)
    splits, made = {}, {}
    bar = progress(total=sum(scenes.values()), desc="drawing", unit="scene")
    for number, (split, count) in enumerate(scenes.items()):
        order = np.random.default_rng([seed, number, 1]).permutation(count) % len(KINDS)
        kinds = {i: KINDS[kind] for i, kind in enumerate(order, len(made))}
        splits[split] = list(kinds)
        for start in range(0, count, 100):  # each hundred has its own random stream
            # The last number must not be 0, as numpy ignores zeros at the end of a seed.
            rng = np.random.default_rng([seed, number, 2 + start // 100])
            made |= _render_scenes(root, dict([*kinds.items()][start : start + 100]), objects, rng)
            bar.update(len(made) - bar.n)
    bar.close()
    made = sorted(made.items())
    change = {_picture(root, view, i).name: scene[view] for view in ("default", "nonsemantic") for i, scene in made}
    types = {kind: [f"{i:06d}.png" for i, scene in made if scene["truth"]["type"] == kind] for kind in KINDS}
    files = {"scenes": {i: scene["truth"] for i, scene in made}, "change_captions": change,
             "no_change_captions": {_picture(root, "default", i).name: scene["same"] for i, scene in made},
             "change_captions_with_bbox": {i: scene["boxes"] for i, scene in made},
             "change_captions_by_IOU": {i: scene["truth"]["iou"] for i, scene in made},
             "type_mapping": types, "splits": splits}  # fmt: skip
    for name, content in files.items():  # splits.json comes last: it shows that all files are there
        write_text(root / f"{name}.json", json.dumps(content, separators=(",", ":")))


# ---- mini: feature network -------------------------------------------------------------------------------------------

_conv = partial(Conv2dNormActivation, activation_layer=None)  # a convolution without bias, then batch norm


class _Block(nn.Module):
    """relu(skip(x) + BN(conv(relu(BN(conv(x)))))); (B, C, H, W) -> (B, width, H / stride, W / stride)."""

    def __init__(self, channels: int, width: int, stride: int = 1):
        super().__init__()
        self.first, self.second = _conv(channels, width, 3, stride), _conv(width, width, 3)
        self.skip = nn.Identity() if (channels, stride) == (width, 1) else _conv(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.second(F.relu(self.first(x))))


class MiniCNN(nn.Module):
    """Stands in for ResNet-101 on mini: pictures (B, 3, 64, 64) in [-1, 1] -> features (B, 128, 8, 8). Every cell has
    mean 0 and variance 1 over its channels, so that dot products compare what cells show. The learned pattern that is
    added before this normalisation makes all bare floor look the same."""

    def __init__(self, width: int = 32):
        super().__init__()
        # Folding 2 x 2 pixels into channels lets the first convolution see everything at a quarter of the cost.
        self.stem = nn.Sequential(nn.PixelUnshuffle(2), _conv(12, width, 3), nn.ReLU())
        # At equal time, the extra block reads shapes better at 16 x 16 (.94 of test objects) than at 8 x 8 (.93).
        self.blocks = nn.Sequential(_Block(width, 64, 2), _Block(64, 64), _Block(64, 128, 2))
        self.pattern = nn.Parameter(torch.randn(128))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(self.blocks(self.stem(x)).movedim(1, -1) + self.pattern, (128,)).movedim(-1, 1)


def preprocess_mini(image: Image.Image) -> Tensor:
    """-> (3, 64, 64) in -1 ... 1."""
    x = torch.from_numpy(np.array(image.resize((64, 64), Image.Resampling.BICUBIC)))
    return x.permute(2, 0, 1).float() / 127.5 - 1


OWN_NETWORKS["mini-cnn"] = ("RGB, 64x64 bicubic with antialiasing, /127.5 - 1", preprocess_mini, MiniCNN)


def _training_pictures(root: Path) -> tuple[Tensor, list[list[dict]]]:
    """All training pictures (M, 3, 64, 64) uint8, and the objects of each as in scenes.json."""
    scenes = read_json(root / "scenes.json")
    chosen = [(view, i) for i in read_json(root / "splits.json")["train"] for view in CLEVR_FOLDERS]
    images = np.stack([np.array(read_image(_picture(root, view, i))) for view, i in chosen])
    return torch.from_numpy(images).movedim(-1, 1), [scenes[str(i)]["objects"][view] for view, i in chosen]


def _steps(parameters: list, rate: float, steps: int, name: str) -> Iterator[None]:
    """A training loop: the caller's loop body computes gradients, then AdamW takes a step. One-cycle learning rate."""
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, max(steps, 2), pct_start=0.15)
    for _ in progress(range(steps), desc=name, unit="step"):
        yield
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def train_mini_cnn(root: Path, steps: int = 1000, seed: int = 0, device: str = "cpu") -> MiniCNN:
    """Trains the feature network, with one linear layer on top, to say which cells hold an object's centre and to name
    that object's four attributes, so that a captioner can read them from the features, too. It sees single training
    pictures, no captions and no pairs. On a CPU the result depends on the arguments alone."""
    torch.manual_seed(seed)
    images, pictures = _training_pictures(root)
    # The indices of size, color, material and shape in the cell that holds the centre of an object's box; elsewhere
    # -100, which cross_entropy ignores. If two centres share a cell, the nearer object (lower in the picture) stays.
    cells = torch.full((len(images), len(ATTRIBUTES), 8, 8), -100)
    for n, objects in enumerate(pictures):
        for item in sorted(objects, key=lambda item: item["box"][1] + item["box"][3]):
            x, y, w, h = item["box"]
            attributes = [choices.index(item[name]) for name, choices in ATTRIBUTES.items()]
            cells[n, :, (2 * y + h) // 16, (2 * x + w) // 16] = torch.tensor(attributes)
    occupied = (cells[:, 0] >= 0).nonzero()  # (objects, 3): picture, row, column
    images = images.to(device).unfold(2, 32, 8).unfold(3, 32, 8)  # (M, 3, 5, 5, 32, 32): every window of 4 x 4 cells
    cells = cells.to(device).unfold(2, 4, 1).unfold(3, 4, 1)  # (M, 4, 5, 5, 4, 4)
    sizes = [len(choices) for choices in ATTRIBUTES.values()]
    net = MiniCNN().to(device, memory_format=torch.channels_last)
    head = nn.Conv2d(128, 1 + sum(sizes), 1).to(device)  # is there an object, and its attributes
    for _ in _steps([*net.parameters(), *head.parameters()], 4e-3, steps, "feature network"):
        # Most of a picture is bare floor: windows around random objects teach more in the same time.
        picture, *centre = occupied[torch.randint(len(occupied), (128,))].unbind(1)
        row, column = ((cell - torch.randint(4, (128,))).clamp(0, 4) for cell in centre)
        x, target = images[picture, :, row, column] / 127.5 - 1, cells[picture, :, row, column]
        there, *logits = head(net(x)).split([1, *sizes], 1)
        loss = 4 * F.binary_cross_entropy_with_logits(there[:, 0], (target[:, 0] >= 0).float())
        loss = loss + sum(F.cross_entropy(logit, target[:, i]) for i, logit in enumerate(logits))
        loss.backward()
    return net.cpu().eval()


# ---- mini: its CLIP --------------------------------------------------------------------------------------------------

# At equal time this picture tower ranks names better than a ViT of patch 8, width 128, 3 layers: AUC, averaged over
# pictures, .95 against .88.
MINI_CLIP = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16},
    "text_cfg": {"context_length": 48, "width": 64, "heads": 4, "layers": 2},
    "init_logit_bias": -5.0,  # few of the pairs of a picture and a phrase are true
}


def mini_clip_state(root: Path, device: str = "cpu") -> dict:
    """mini's own CLIP, trained on first use into root/clip.pt."""
    file = root / "clip.pt"
    if not file.exists():
        print(f"training a small CLIP on the pictures of {root}, once")
        steps = min(580, 5 + len(read_json(root / "splits.json")["train"]) // 8)
        save_tensors(file, {"config": MINI_CLIP, "model": train_mini_clip(root, steps, device=device).state_dict()})
    return load_tensors(file, "remove it: it is made again")


def train_mini_clip(root: Path, steps: int = 580, seed: int = 0, device: str = "cpu"):
    """Trains a small open_clip.CLIP to know which names fit an object in a picture, from training pictures and their
    objects, no captions or pairs. A phrase is a whole or partial name, or two joined by "and". A sigmoid loss (SigLIP)
    asks of each picture and phrase whether the phrase is true; a softmax would take true phrases for negatives. Word
    vectors keep their random initial values, which are far apart, even those of words that are in no name."""
    import open_clip

    torch.manual_seed(seed)
    images, pictures = _training_pictures(root)
    images, pictures = images.to(device), [[_phrase(item).split() for item in objects] for objects in pictures]
    clip, size = open_clip.CLIP(**MINI_CLIP), 64
    tokenizer = open_clip.SimpleTokenizer(context_length=clip.context_length)
    clip.token_embedding.requires_grad_(False)
    clip.to(device).visual.to(memory_format=torch.channels_last)
    groups = [{"params": [p for p in clip.parameters() if p.ndim > 1]},
              {"params": [p for p in clip.parameters() if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    whole_names = [" ".join(words) for words in itertools.product(*ATTRIBUTES.values())]

    def draw_names(shown: list[list[list[str]]]) -> list[str]:
        """A name of a random object of each picture; half of the names may lack any attribute but the shape."""
        chosen = (torch.rand(size) * torch.tensor([len(objects) for objects in shown])).long().tolist()
        kept = (torch.rand(size, 4) >= 0.5) | (torch.rand(size, 1) >= 0.5) | (torch.arange(4) == 3)
        drawn = zip(shown, chosen, kept.tolist(), strict=True)
        return [" ".join(itertools.compress(objects[i], row)) for objects, i, row in drawn]

    for _ in _steps(groups, 2e-3, steps, "CLIP"):
        index = torch.randint(len(images), (size,))
        shown = [pictures[i] for i in index.tolist()]
        drawn = zip(draw_names(shown), draw_names(shown), (torch.rand(size) < 0.5).tolist(), strict=True)
        phrases = whole_names + [first if single else f"{first} and {second}" for first, second, single in drawn]
        # A phrase is true of a picture if each of its names fits an object: the object has all of the name's words.
        names = [[set(name.split()) for name in phrase.split(" and ")] for phrase in phrases]
        fits = [[all(any(name.issubset(words) for words in objects) for name in phrase) for phrase in names]
                for objects in shown]  # fmt: skip
        tokens = tokenizer(phrases)
        text = encode_prompted(clip, tokens[:, : 1 + int(tokens.argmax(1).max())].to(device))
        x = images[index.to(device)].to(memory_format=torch.channels_last).float() / 127.5 - 1  # as preprocess_mini
        picture = clip.encode_image(x, normalize=True)  # (B, E)
        logits = clip.logit_scale.exp() * picture @ F.normalize(text, dim=1).T + clip.logit_bias
        target = torch.tensor(fits, device=device).float()
        loss = F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / size
        loss.backward()
    return clip.cpu().eval().requires_grad_(False)


# ---- mini: preparation -----------------------------------------------------------------------------------------------


def prepare_mini(root: Path, scenes: int, objects: str, seed: int, device: str) -> None:
    """Render mini, train its feature network on the training pictures, extract, build the vocabulary; finished
    steps are skipped. ValueError if the folder holds something else, or scenes made with other settings."""
    few, _, many = objects.partition(",")
    if not re.fullmatch("[2-6],[2-6]", objects) or few > many or scenes < 1 or seed < 0:
        raise ValueError(f"--scenes {scenes} --objects {objects} --data_seed {seed}: expected a count, "
                         "the fewest and most objects of a scene (2 to 6) such as 2,4, and a seed from 0")  # fmt: skip
    settings = {"scenes": scenes, "objects": objects, "seed": seed}
    there = {path.name for path in root.iterdir()} - {LOCK} if root.is_dir() else set()
    if there and "mini.json" not in there:
        raise ValueError(f"{root} is not empty and no mini of this project; choose another --data_dir")
    if there and (made := read_json(root / "mini.json")) != settings:
        raise ValueError(f"{root} was made with {made}, not {settings}; remove it or choose another --data_dir")
    if there >= {"mini_cnn.pt", "features.h5", "vocab.json"}:
        return
    with lock(root):
        write_text(root / "mini.json", json.dumps(settings))
        if not (root / "splits.json").exists():
            counts = {"train": scenes, "val": max(10, scenes // 20), "test": max(10, scenes // 10)}
            render_mini(root, counts, (int(few), int(many)), seed)
        if not (root / "mini_cnn.pt").exists():
            net = train_mini_cnn(root, steps=min(1000, 10 + scenes // 5), seed=seed, device=device)
            save_tensors(root / "mini_cnn.pt", net.state_dict())
        release = read_release("mini", root)
        if not (root / "features.h5").exists():
            weights = mini_weights(root)
            extractor = Extractor(weights_name("mini-cnn", weights), weights, device)
            extract(root / "features.h5", release, extractor, "mini", batch=512)
        write_vocab(root, vocab_of("mini", release))


def mini_flags(root: Path) -> str:
    """The flags that made the folder, without those that are the default."""
    made = read_json(root / "mini.json") if (root / "mini.json").exists() else {}
    flags = zip(("scenes", "objects", "data_seed"), made.values(), strict=False)
    return "".join(f" --{flag} {value}" for flag, value in flags if value != getattr(RunConfig, flag))


def mini_weights(root: Path) -> dict[str, Tensor]:
    """The weights of mini's feature network."""
    path, remedy = root / "mini_cnn.pt", f"remove it and run: {prepare_command('mini', root)}"
    weights = load_tensors(path, remedy)
    with file_errors(path, remedy), torch.random.fork_rng([]):  # a run's random numbers stay as they are
        MiniCNN().load_state_dict(weights)
    return weights


def read_mini(root: Path) -> Release:
    """What render_mini has drawn. If a file is broken, the error says how to draw everything again."""
    try:
        return read_clevr_change(root)
    except (OSError, ValueError) as e:
        raise ValueError(f"{e}; remove {root} and run: {prepare_command('mini', root)}") from e


DATASETS["mini"] = Source(
    read_mini, "mini-cnn", closed=True, make=prepare_mini, flags=mini_flags, weights=mini_weights, clip=mini_clip_state,
    judge=lambda captions, root: mini_accuracy(captions, _scenes(root)),
)  # fmt: skip


if __name__ == "__main__":
    run_main(main)
