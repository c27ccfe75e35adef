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

    def no_change_captions(self) -> set[str]:
        """Captions which say that nothing changed, as a model outputs them: those of unchanged
        training pairs and of Settings.no_change."""
        captions = set(self.settings.no_change)
        unchanged = self.kinds.get("no change", set())
        for pair in self.pairs("train"):
            if pair.id in unchanged:
                captions.update(pair.captions)
        return {" ".join(self.vocab.split(caption)) for caption in captions}

    def results(
        self,
        split: str,
        captions: dict,
        maps: dict,
        out_dir: Path | None,
        notes: dict | None = None,
        published: dict | None = None,
    ) -> dict[str, float]:
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
        self.checkpoint = state
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
