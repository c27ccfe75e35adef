"""Data sets as their authors release them: readers, and the table of data sets.

To add a data set, write a reader (folder -> Release; release_from_pairs makes one of plain pairs)
and its row of DATASETS. `python data.py NAME` and `--dataset NAME` then work. A method without an
entry NAME in its PRESETS uses the one that Settings.preset names, or else its defaults.
Licence: MIT.
"""

import csv
import hashlib
import io
import itertools
import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from common import InputError
from scores import ADDED_ROWS
from support import mini
from support.files import file_errors, read_json
from support.text import Vocab, frequent_words, normalised, tokenize, tokenize_lower, tokenize_pairs

SPLITS = ("train", "val", "test")


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

    def pairs(self, *splits: str) -> list[Pair]:
        """Every pair of these splits: of each, the first one of every scene, then all distractor
        pairs."""
        pairs = []
        for split in splits:
            columns = zip(*(scene.pairs for scene in self.scenes[split]), strict=True)
            pairs += itertools.chain(*columns)
        return pairs

    def captions(self, splits: Iterable[str]) -> list[str]:
        """All captions of these splits, also of swapped pairs."""
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
        if split not in SPLITS:
            ids = ", ".join(pair.id for pair in rows[:10])
            raise InputError(f"{folder}: the split of {ids} is {split!r}, not in {SPLITS}")
        for pair in rows:
            first_split, first_pair = first.setdefault(pair.id, (split, pair))
            if split != first_split:
                raise InputError(f"{folder}: {pair.id} is both in {first_split} and in {split}")
            if (pair.before, pair.after) != (first_pair.before, first_pair.after):
                remedy = "give every two pictures an id of their own"
                raise InputError(f"{folder}: different pairs have the id {pair.id}; {remedy}")
            if pair is not first_pair:
                first_pair.captions.extend(pair.captions)
    for split, pair in first.values():
        release.scenes[split].append(Scene((pair,)))
        for name in {pair.before, pair.after} - {None}:
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
    between them. Each of `columns` must be there, with a text in every row. The paths in `before`
    and `after` get "/" for the backslashes of Windows. InputError names the lines with a fault."""
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
    empty = []  # cells
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
        empty += [f"line {number}: {column}" for column in columns if not row[column]]
        for column in {"before", "after"} & row.keys():
            row[column] = row[column].replace("\\", "/")
        table.lines.append(cells)
        table.rows.append(row)
    if empty:
        raise InputError(f"{path}: {len(empty)} cells are empty ({', '.join(empty[:10])})")
    return table


def read_lines(path: Path, errors: str = "strict") -> list[str]:
    """The non-empty lines of a text file in UTF-8. errors: as in open()."""
    lines = path.read_text(encoding="utf-8", errors=errors).splitlines()
    return [line for line in lines if line.strip()]


def read_columns(path: Path) -> dict[str, str]:
    """The lines of a text file: first word -> rest of the line."""
    return dict(line.split(maxsplit=1) for line in read_lines(path))


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
    # What metrics compare: words from the PTB tokenizer, words split at spaces, or their ids.
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
    """A method's PRESETS, where a data set without an entry gets the one of Settings.preset."""
    borrowed = {}
    for name, settings in DATASETS.items():
        if settings.preset in presets:
            borrowed[name] = presets[settings.preset]
    return borrowed | presets


def read_release(name: str, root: Path) -> Release:
    """Reads a data set's folder. FileNotFoundError if a file is missing; InputError if one is
    broken, there are no pairs, or check_release finds a fault."""
    try:
        release = DATASETS[name].read(root)
    except FileNotFoundError as e:
        advice = f"--data_dir must be the folder with the files of {name}"
        if DATASETS[name].make:
            advice = f"python data.py {name} --data_dir {shlex.quote(str(root))} draws it"
        raise FileNotFoundError(f"{e}; {advice}") from e
    check_release(release, root)
    if not release.paths:
        raise InputError("; ".join([f"{root}: there are no pairs", *release.notes]))
    return release


def check_release(release: Release, root: Path) -> None:
    """InputError if a pair has no caption, or if a group or kind has the name of another row of the
    scores, or an id that no pair has."""
    pairs = release.pairs(*SPLITS)
    ids = {pair.id for pair in pairs}
    without = [pair.id for pair in pairs if not pair.captions]
    if without:
        raise InputError(f"{root}: {len(without)} pairs have no caption: {', '.join(without[:10])}")
    for name, members in [*release.groups.items(), *release.kinds.items()]:
        if name.lower() in ADDED_ROWS:
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
    Each sentence is a caption, even the 66 empty ones, which published tables count. Papers count
    13,192 pairs, but the release has 11,329."""
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
    # This is the authors' vocabulary. Later papers have not published theirs.
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
    before = posixpath.normpath(row["before"])
    after = posixpath.normpath(row["after"])
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
    columns = list(table[0]) if table else ["split", "captions"]
    if columns[-1] != "captions":  # there, a comma without quotes makes a cell too many
        raise InputError(f"{file}: the last column is {columns[-1]}; it must be captions")
    pairs = defaultdict(list)
    kinds = defaultdict(set)
    kind_of: dict[str, str] = {}
    no_text = []
    for row in table:
        pair = own_pair(row)
        for caption in pair.captions:
            if caption.lower() in EMPTY_CELLS or PRINTED_LIST.match(caption):
                no_text.append(f"{pair.id} has the caption {caption!r:.60}")
        kind = kind_name(row.get("kind", ""))
        if kind_of.setdefault(pair.id, kind) != kind:
            raise InputError(f"{file}: {pair.id} is both {kind_of[pair.id]!r} and {kind!r}")
        if kind:
            kinds[kind].add(pair.id)
        split = row["split"].lower() if "split" in row else hashed_split(pair)
        pairs[split].append(pair)
    if no_text:
        remedy = "write plain text, with | between captions, or leave it out"
        raise InputError(f"{file}: {', '.join(no_text[:10])}; {remedy}")
    unused = {*columns} - {"before", "after", "captions", "split", "kind"}
    notes = [f"{file}: the column {column!r} is not used" for column in sorted(unused)]
    if "split" not in columns:
        chosen = "has no column split, so a hash of the paths chooses about a tenth of the pairs"
        chosen += " for validation and a tenth for test"
        notes.append(f"{file} {chosen}; to score all pairs by --eval, add it with test in each row")
    if "no change" not in kinds:
        notes.append("no pair has the kind 'no change', so changes claimed wrongly are not counted")
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


def vocab_of(name: str, release: Release) -> Vocab:
    """The vocabulary by the data set's rule; most data sets use the training captions alone."""
    settings = DATASETS[name]
    captions = release.captions(settings.vocab_splits)
    words = frequent_words(captions, settings.tokenizer, settings.min_count)
    return Vocab(words, settings.tokenizer, settings.max_words)
