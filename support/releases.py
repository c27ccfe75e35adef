"""Data sets as their authors release them: readers, and the table DATASETS. Licence: MIT."""

import csv
import re
import shlex
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from common import InputError
from support import mini
from support.files import file_errors, read_json
from support.mini.sentences import accuracy
from support.own_pairs import read_pairs, read_table
from support.pairs import SPLITS, Pair, Release, Scene, release_from_pairs
from support.report import ADDED_ROWS
from support.text import Vocab, frequent_words, tokenize, tokenize_lower, tokenize_pairs

# ---- readers, one for each release ---------------------------------------------------------------


def read_lines(path: Path, errors: str = "strict") -> list[str]:
    """The non-empty lines of a text file in UTF-8. errors: as in open()."""
    lines = path.read_text(encoding="utf-8", errors=errors).splitlines()
    return [line for line in lines if line.strip()]


def read_columns(path: Path) -> dict[str, str]:
    """The lines of a text file: first word -> rest of the line."""
    return dict(line.split(maxsplit=1) for line in read_lines(path))


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
        texts = [" ".join(filter(str.strip, s["tokens"])) for s in row["sentences"]]
        captions = [text for text in texts if text]
        pairs[split].append(Pair(name, f"{split}/A/{name}", f"{split}/B/{name}", captions))
        kind = "no change" if set(LEVIR_SAME) & set(captions) else "change"
        if "changeflag" in row:
            kind = "change" if int(row["changeflag"]) else "no change"
        kinds[kind].add(name)
    kinds["change"] -= kinds["no change"]  # one of the rows of this picture says so
    return release_from_pairs(pairs, root / "images", kinds)


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
        if (images / before).exists() and (images / after).exists():
            pairs[split].append(Pair(f"{split}_{before}_{after}", before, after, [caption]))
        else:
            left_out += 1
    note = f"{left_out} captions are left out: {images} lacks a photograph of their pairs"
    return release_from_pairs(pairs, images, notes=[note] if left_out else [])


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


DATASETS = {
    "mini": Settings(
        read_clevr_change, extractor="mini-cnn", templates=True, make=mini.make, judge=accuracy
    ),
    "clevr_change": Settings(
        read_clevr_change,
        authors_features=True,
        templates=True,
        published={"train": 33830, "val": 1988, "test": 3985}
        | {"color": 7958, "material": 7963, "add": 7966, "drop": 7961, "move": 7955, "words": 76},
    ),
    "clevr_dc": Settings(
        read_clevr_dc,
        templates=True,
        published={"train": 40800, "val": 2400, "test": 4800, "words": 87},
    ),
    "spot_the_diff": Settings(
        read_spot_the_diff, published={"train": 8566, "val": 1493, "test": 1270, "words": 2059}
    ),
    "image_editing_request": Settings(
        read_image_editing,
        # This is the authors' vocabulary. Later papers have not published theirs.
        tokenizer=tokenize_lower,
        min_count=3,
        vocab_splits=("train", "val"),
        max_words=78,
        published={"train": 3061, "val": 383, "test": 495, "words": 808},
    ),
    "levir_cc": Settings(
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
    ),
    "birds_to_words": Settings(
        read_birds_to_words,
        # [ours] IDC's authors publish neither how they resized nor how they split captions.
        extractor="resnet101-layer4",
        tokenizer=str.split,
        max_words=77,
        tokens="split",
    ),
    "cub": Settings(
        read_cub,
        extractor="resnet101-layer4",  # [ours] as for Birds-to-Words
        tokenizer=str.split,
        max_words=37,
        tokens="split",
        published={"train": 8855, "val": 2933},
    ),
    "nabirds": Settings(
        read_nabirds,
        extractor="resnet101-layer4",  # [ours] as for Birds-to-Words
        tokenizer=str.splitlines,  # a whole class name is one word
        vocab_splits=SPLITS,
        published={"train": 23929, "test": 24633},
    ),
    "pairs": Settings(
        read_pairs,
        # Most papers' extractor skips most pixels of a photograph, so its features change when the
        # camera moves slightly. This one averages pixels.
        extractor="resnet101-layer3-256",
        tokenizer=tokenize_pairs,
        max_words=60,  # every batch is padded to the longest caption
        tokens="split",  # words as the model learns them: a perfect one loses no points
    ),
}


def all_presets(presets: dict[str, dict]) -> dict[str, dict]:
    """A method's PRESETS, where a data set without an entry gets the one of Settings.preset."""
    borrowed = {name: presets[s.preset] for name, s in DATASETS.items() if s.preset in presets}
    return borrowed | presets


def read_release(name: str, root: Path) -> Release:
    """Reads a data set's folder. An error says which file is missing, or what else is wrong."""
    try:
        release = DATASETS[name].read(root)
    except (FileNotFoundError, NotADirectoryError) as e:
        advice = f"--data_dir must be the folder with the files of {name}"
        if DATASETS[name].make:
            advice = f"python data.py {name} --data_dir {shlex.quote(str(root))} draws it"
        raise FileNotFoundError(f"{e}; {advice}") from e
    check_release(release, root)
    if not release.paths:
        raise InputError("; ".join([f"{root}: there are no pairs", *release.notes]))
    return release


def check_release(release: Release, root: Path) -> None:
    """InputError for a pair without a caption, or a group or kind with a wrong name or id."""
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


def vocab_of(name: str, release: Release) -> Vocab:
    """The vocabulary by the data set's rule; most data sets use the training captions alone."""
    settings = DATASETS[name]
    captions = release.captions(settings.vocab_splits)
    words = frequent_words(captions, settings.tokenizer, settings.min_count)
    return Vocab(words, settings.tokenizer, settings.max_words)
