"""Data sets ready for a method: batches of features and captions, preparation.

    python data.py mini                               make the built-in toy data set
    python data.py clevr_change --data_dir D          extract features

A data set is a folder in its authors' release layout. `load` reads it into a Dataset, whose
batches feed any method. Preparation adds a feature file to the folder; the vocabulary is read from
the captions each time.

Readers of releases and the table DATASETS are in support/releases.py, features in
support/features.py, words in support/text.py. To copy: this file, common.py, scores.py and
support/. Licence: MIT.
"""

import argparse
import hashlib
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

import scores
from common import InputError, RunConfig
from support.features import (
    AUTHORS_FILES,
    RESNETS,
    Extractor,
    Features,
    authors_features,
    check_pictures,
    extractor_name,
    prefetch,
    read_image,
    read_npy,
    require_files,
    write_features,
)
from support.files import print_notes, progress, run_main
from support.releases import DATASETS, SPLITS, Pair, Release, read_release, vocab_of
from support.run import usable_device
from support.text import Vocab

# ---- load and batches ----------------------------------------------------------------------------


@dataclass
class Batch:
    """B pairs; in training, one from each scene. Features as stored (float16), where Features.rows
    puts them; `to` makes them float32 on a device."""

    before: Tensor  # (B, C, H, W)
    after: Tensor  # (B, C, H, W); zeros if `single`
    caption: Tensor  # (B, L) ids: START, words, END, NULL ...
    pair_ids: list[str]  # B pair ids
    texts: list[str]  # B captions as they were written
    images: list[tuple[str, str]] = field(default_factory=list)  # B image names (before, after)
    single: bool = False  # captions of single images: there is no "after"

    def to(self, device: str) -> "Batch":
        before = self.before.to(device, non_blocking=True).float()
        after = self.after.to(device, non_blocking=True).float()
        caption = self.caption.to(device, non_blocking=True)
        return replace(self, before=before, after=after, caption=caption)


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
        self.unchanged = self.kinds.get("no change", set())  # pair ids
        self.checkpoint: dict = {}  # what the captions to score come from: config, step, code, ...
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

    def sentences(self, unchanged: bool, *splits: str) -> Counter:
        """How often unchanged (or else changed) pairs have each sentence, as a model outputs it."""
        counts = Counter()
        for pair in self.pairs(*splits):
            if (pair.id in self.unchanged) == unchanged:
                counts.update(" ".join(self.vocab.split(text)) for text in pair.captions)
        return counts

    def no_change_captions(self) -> set[str]:
        """The sentences which say that nothing changed: Settings.no_change, and what unchanged
        training pairs have more often than changed ones, which may have it by mistake."""
        published = {" ".join(self.vocab.split(text)) for text in self.settings.no_change}
        more_often = self.sentences(True, "train") - self.sentences(False, "train")
        return published | more_often.keys()  # of a difference, Counter keeps what is above 0

    def results(self, split, captions, maps, out_dir, notes=None, published=None) -> dict:
        """The scores of a split's captions, see scores.results."""
        return scores.results(self, split, captions, maps, out_dir, notes, published)

    def state(self) -> dict:
        """What a checkpoint keeps, for captioning and for `check_state` and `check_fit`."""
        return {
            "vocab": self.vocab.words,
            "extractor": self.features.extractor,
            "grid": self.grid,
            "max_len": self.max_len,
            "no_change": sorted(self.no_change),
            "train_pairs": torch.tensor([self.contents(pair) for pair in self.pairs("train")]),
            "digest": self.digest,
        }

    def contents(self, pair: Pair) -> list[int]:
        """The checksums of a pair's pictures, before and after. Two pictures are the same if their
        checksums are, whatever their names."""
        names = [pair.before, pair.after] if pair.after else [pair.before]
        return [self.features.content(name) for name in names]

    def leaked(self, split: str) -> set[str]:
        """Ids of a split's pairs that share a picture with another split."""
        others = self.pairs(*{*SPLITS} - {split})
        elsewhere = set().union(*map(self.contents, others))
        return {p.id for p in self.pairs(split) if not elsewhere.isdisjoint(self.contents(p))}

    def notes_on_copies(self) -> list[str]:
        """Remarks on pairs that share a picture with another split, or have two equal pictures."""
        notes = []
        for split in ("val", "test"):
            leaked = self.leaked(split)
            if leaked:
                share = f"{len(leaked)} of {len(self.pairs(split))} {split} pairs share a picture"
                notes.append(f"{share} with another split; scores are also given without them")
        pairs = self.pairs(*SPLITS)
        equal = [p.id for p in pairs if p.after and len(set(self.contents(p))) == 1]
        claimed = [i for i in equal if i not in self.unchanged]
        if equal:
            count = f"{len(claimed)} changed and {len(equal) - len(claimed)} unchanged pairs"
            notes.append(f"{count} have two equal pictures, such as {(claimed + equal)[0]}")
        return notes

    @cached_property  # it takes a second on a large data set, and every checkpoint has it
    def digest(self) -> str:
        """A hash of what a run learns from: pictures and captions of training and validation."""
        parts = []
        for split in ("train", "val"):
            pairs = self.pairs(split)
            parts.append(str([self.contents(pair) for pair in pairs]))
            parts.append(str([pair.captions for pair in pairs]))
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def check_state(self, state: dict) -> None:
        """InputError if a run, whose state this is, learned from other data."""
        self.check_fit(state)
        if state["digest"] != self.digest:
            changed = f"{self.root} has other training or validation pairs than the run"
            raise InputError(f"{changed}; train anew, with another --out_dir")

    def adopt(self, state: dict) -> None:
        """Takes the words and the max_len of a checkpoint, to evaluate it here. Its sentences for
        "no change" count here, too."""
        self.vocab = Vocab(state["vocab"], self.vocab.tokenizer, self.vocab.max_words)
        self.max_len = state["max_len"]
        self.no_change |= set(state["no_change"])
        self.checkpoint = state
        self.check_fit(state)

    def check_fit(self, state: dict) -> None:
        """InputError if a checkpoint has other features or words. Prints a note if it was trained
        on pairs that are now for validation or test."""
        if state["extractor"] != self.features.extractor:
            needed = f"the checkpoint needs features of {state['extractor']}"
            raise InputError(f"{needed}; give the --data_dir and --extractor of its training")
        if state["vocab"] != self.vocab.words:
            remedy = "give its --data_dir (IDC: and --cub); if captions were edited, train anew"
            raise InputError(f"the checkpoint has other words than {self.root}; {remedy}")
        train_pairs = set(map(tuple, state["train_pairs"].tolist()))
        for split in ("val", "test"):
            pairs = self.pairs(split)
            known = sum(tuple(self.contents(pair)) in train_pairs for pair in pairs)
            if known:
                told = f"the checkpoint was trained on {known} of the {len(pairs)} {split} pairs"
                print_notes(f"{told}, so their scores say little; train anew in a new folder")


def load(name: str, root: str | Path, cfg: RunConfig | None = None, **fields) -> Dataset:
    """Read a prepared data set. An error says which command makes what is missing.

    It uses four fields of cfg, which can also be given by name (extractor="timm/resnet18"): device,
    extractor, blind and features. With features="file", features are read from the file, and with
    "gpu" they are kept on the GPU. "auto" keeps them there if they fill less than 60 % of it."""
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
    print_notes(*release.notes, *dataset.notes_on_copies())
    counts = {split: len(dataset.pairs(split)) for split in SPLITS}
    print(f"{root}: {counts['train']} train, {counts['val']} val, {counts['test']} test pairs")
    print(f"features: {size / 1e6:.0f} MB, {place}")
    return dataset


def open_dataset(cfg: RunConfig, make: bool = True) -> Dataset:
    """The data set that a run's config names. With `make`, it is to train on, so mini is made first
    if it is missing; to evaluate a checkpoint, the mini that it was trained on must exist."""
    if cfg.dataset not in DATASETS:
        raise InputError(f"--dataset {cfg.dataset}: expected one of {', '.join(DATASETS)}")
    if DATASETS[cfg.dataset].make and make:
        prepare(cfg.dataset, Path(cfg.data_dir), cfg.device, cfg.extractor)
    dataset = load(cfg.dataset, cfg.data_dir, cfg)
    if make and not dataset.scenes["train"]:
        raise InputError(f"{cfg.data_dir} has no training pairs; it can only be scored, by --eval")
    if dataset.pairs(*SPLITS)[0].after is None:
        raise InputError(f"--dataset {cfg.dataset} has no pairs; IDC reads it by --{cfg.dataset}")
    return dataset


def note_on_negatives(dataset: Dataset, cfg: RunConfig, *weights: str) -> None:
    """Prints a note if more than a tenth of the training scenes share a picture, which losses that
    contrast the images of a batch take for different. weights: their fields of cfg."""
    scenes = [set().union(*map(dataset.contents, s.pairs)) for s in dataset.scenes["train"]]
    scenes_with = Counter(itertools.chain(*scenes))  # a picture's checksum -> number of scenes
    sharing = sum(any(scenes_with[picture] > 1 for picture in scene) for scene in scenes)
    flags = " ".join(f"--{name} 0" for name in weights if getattr(cfg, name))
    if flags and 10 * sharing > len(scenes):
        shares = f"{sharing} of {len(scenes)} training scenes share a picture with another one"
        print_notes(
            f"{shares}; contrastive losses take it for a different one: compare with {flags}"
        )


# ---- feature files of a data set -----------------------------------------------------------------


def feature_file(name: str, root: Path, extractor: str) -> Path:
    """features.h5, or features-<extractor>.h5 if the extractor is not the data set's own."""
    if extractor == DATASETS[name].extractor:
        return root / "features.h5"
    return root / f"features-{re.sub('[/:]', '-', extractor_name(extractor))}.h5"


def open_features(name: str, root: Path, extractor: str) -> Features:
    """Opens the file of a data set's features that this extractor made."""
    command = ["python", "data.py", name, "--data_dir", str(root)]
    if extractor != DATASETS[name].extractor:
        command += ["--extractor", extractor]
    path = feature_file(name, root, extractor)
    return Features(path, shlex.join(command), extractor_name(extractor))


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


# ---- preparation, command line -------------------------------------------------------------------


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
    cut = sum(vocab.split(text) != vocab.tokenizer(text) for text in release.captions(["train"]))
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
    dataset = Dataset(name, root, release, vocab, open_features(name, root, extractor))
    print_notes(*dataset.notes_on_copies())
    said = dataset.sentences(True, *SPLITS)
    if len(said) > 2 and not settings.templates:
        print(f"unchanged pairs have {len(said)} different captions (rare ones may be mistakes):")
        for text, count in said.most_common()[-10:]:
            print(f"{count:9} {text}")
    print(f"{root}: {len(release.paths)} images, {len(vocab)} words")


def main(argv: list[str] | None = None) -> None:
    """The command line: NAME prepares a data set."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="NAME", required=True)
    for name in DATASETS:
        p = commands.add_parser(name, help=f"prepare the data set {name}", allow_abbrev=False)
        folder = f"data/{name}"
        p.add_argument("--data_dir", default=folder, help=f"default: {folder}")
        p.add_argument("--device", default="", help="of the extractor (default: cuda if available)")
        text = f"network that makes the features: {', '.join(RESNETS)}, timm/MODEL, timm/MODEL:FILE"
        text += " (default: the data set's own)"
        p.add_argument("--extractor", default="", help=text)
        if DATASETS[name].make:
            p.add_argument("--scenes", type=int, help="training scenes (default: 5000)")
    args = parser.parse_args(argv)
    device = usable_device(args.device)
    scenes = getattr(args, "scenes", None)
    prepare(args.command, Path(args.data_dir), device, args.extractor, scenes)


if __name__ == "__main__":
    run_main(main)
