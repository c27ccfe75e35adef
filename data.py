"""Data sets ready for a method: batches of features and captions, preparation.

    python data.py mini                               make the built-in toy data set
    python data.py clevr_change --data_dir D          extract features

A data set is a folder in its authors' release layout. `load` reads it into a Dataset, whose
batches feed any method. Preparation adds a feature file to the folder; the vocabulary is read from
the captions each time. Readers and the table DATASETS are in support/releases.py.

To copy: this file, common.py, scores.py and support/. Licence: MIT.
"""

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from common import InputError, RunConfig
from support import checks, report
from support.extractors import RESNETS, Extractor, check_pictures, extractor_name, read_image
from support.features import AUTHORS_FILES, Features, authors_features, read_npy, write_features
from support.files import print_notes, progress, require_files, run_main
from support.pairs import SPLITS, Pair, Release
from support.releases import DATASETS, read_release, vocab_of
from support.run import usable_device
from support.text import Vocab
from support.threads import prefetch

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
    """A release with its vocabulary and features. Of it, methods use vocab, grid, max_len,
    train_batches, eval_batches, results, state and check_state; any object with these will do."""

    def __init__(self, name: str, root: Path, release: Release, vocab: Vocab, features: Features):
        super().__init__(
            scenes=release.scenes,
            paths=release.paths,
            groups=release.groups,
            kinds=release.kinds,
            overlap=release.overlap,
            boxes=release.boxes,
            notes=release.notes,
        )
        self.name = name
        self.settings = DATASETS[name]
        self.root = root
        self.vocab = vocab
        self.features = features
        self.unchanged = self.kinds.get("no change", set())  # pair ids
        texts = set(release.captions(SPLITS))  # of all splits, as in the authors' scripts
        # Ids of the longest caption, START and END included. All batches are padded to it, so that
        # torch.compile makes one graph.
        self.max_len = 2 + max(len(vocab.split(text)) for text in texts)
        self.no_change = checks.no_change_captions(self)
        self.grid = tuple(features.data.shape[1:])  # (C, H, W)
        features.require(self.paths)

    def train_batches(
        self, batch_size: int, seed: int, first: int, last: int
    ) -> Iterator[tuple[Batch, ...]]:
        """The batches of steps first ... last - 1, made ahead and with a progress bar: for each
        step, a Batch of some scenes' first pairs and, where scenes have two, one of their second
        ones. Seed and step alone fix the scenes, which of them are swapped, and the captions."""
        batches = prefetch(self.make_batches(batch_size, seed, first, last))
        return iter(tqdm(batches, "train", last, initial=first, disable=None))

    def make_batches(self, batch_size: int, seed: int, first: int, last: int) -> Iterator:
        """The same batches, without prefetching and progress bar."""
        scenes = self.scenes["train"]
        # [ours] Every batch is full, so that torch.compile makes one graph. An epoch leaves out its
        # last scenes: CLEVR-Change has 264 steps. In SCORER's and DIRL's code, they are a 265th.
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
        """Pairs with one caption each (default: their first). before: features already read."""
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

    def results(self, split, captions, maps, out_dir, notes=None, published=None, state=None):
        """The scores of a split's captions, see support.report.results."""
        return report.results(self, split, captions, maps, out_dir, notes, published, state)

    @cached_property
    def digest(self) -> str:
        """See checks.digest. It takes a second on a large data set, and every checkpoint has it."""
        return checks.digest(self)

    def state(self) -> dict:
        """What a checkpoint keeps, for captioning and for `check_state` and `check_fit`."""
        return {
            "vocab": self.vocab.words,
            "extractor": self.features.extractor,
            "grid": self.grid,
            "max_len": self.max_len,
            "no_change": sorted(self.no_change),
            "train_pairs": torch.tensor([checks.contents(self, p) for p in self.pairs("train")]),
            "frequent_captions": report.frequent_captions(self),
            "digest": self.digest,
        }

    def check_state(self, state: dict) -> None:
        """InputError if a run, whose state this is, learned from other data."""
        checks.check_fit(self, state)
        if state["digest"] != self.digest:
            changed = f"{self.root} has other training or validation pairs than the run"
            raise InputError(f"{changed}; train anew, with another --out_dir")

    def adopt(self, state: dict) -> None:
        """Takes the words and max_len of a checkpoint, to evaluate it. It adds its no_change."""
        self.vocab = Vocab(state["vocab"], self.vocab.tokenizer, self.vocab.max_words)
        self.max_len = state["max_len"]
        self.no_change |= set(state["no_change"])
        checks.check_fit(self, state)


def load(name: str, root: str | Path, cfg: RunConfig | None = None) -> Dataset:
    """Read a prepared data set. Of cfg, it uses device, extractor, features and blind."""
    cfg = cfg or RunConfig()
    root = Path(root)
    release = read_release(name, root)
    features = open_features(name, root, cfg)
    dataset = Dataset(name, root, release, vocab_of(name, release), features)
    print_notes(*release.notes, *checks.notes_on_copies(dataset))
    counts = {split: len(dataset.pairs(split)) for split in SPLITS}
    print(f"{root}: {counts['train']} train, {counts['val']} val, {counts['test']} test pairs")
    place = "on the GPU" if features.data.is_cuda else "read from the file"
    print(f"features: {features.data.nbytes / 1e6:.0f} MB, {place}")
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


# ---- feature files of a data set -----------------------------------------------------------------


def feature_file(name: str, root: Path, extractor: str) -> Path:
    """features.h5, or features-<extractor>.h5 if the extractor is not the data set's own."""
    if extractor == DATASETS[name].extractor:
        return root / "features.h5"
    return root / f"features-{re.sub('[/:]', '-', extractor_name(extractor))}.h5"


def open_features(name: str, root: Path, cfg: RunConfig) -> Features:
    """Opens the file of a data set's features that the extractor of cfg made."""
    extractor = cfg.extractor or DATASETS[name].extractor
    command = ["python", "data.py", name, "--data_dir", str(root)]
    if extractor != DATASETS[name].extractor:
        command += ["--extractor", extractor]
    path = feature_file(name, root, extractor)
    made_by = extractor_name(extractor)
    return Features(path, shlex.join(command), made_by, cfg.device, cfg.features, cfg.blind)


def make_features(name: str, path: Path, release: Release, device: str, extractor: str) -> None:
    """Write the feature file of a release, from the authors' .npy files or from the pictures."""
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
    check_pictures(files, release.lines)
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
    features = open_features(name, root, RunConfig(extractor=extractor))
    dataset = Dataset(name, root, release, vocab, features)
    print_notes(*checks.notes_on_copies(dataset))
    said = checks.sentences(dataset, True, *SPLITS)
    if len(said) > 2 and not settings.templates:
        print(f"unchanged pairs have {len(said)} different captions; keep one or two, because")
        print("others score 0, also where validation chooses best.pt (rare ones may be mistakes):")
        for text, count in said.most_common()[-10:]:
            print(f"{count:9} {text}")
    print(f"{root}: {len(release.paths)} images, {len(vocab)} words")


def main(argv: list[str] | None = None) -> None:
    """The command line: NAME prepares a data set."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="NAME", required=True)
    for name in DATASETS:
        p = commands.add_parser(name, help=f"prepare the data set {name}", allow_abbrev=False)
        p.add_argument("--data_dir", default=f"data/{name}", help="default: %(default)s")
        p.add_argument("--device", default="", help="of the extractor (default: cuda if available)")
        text = f"network that makes the features: {', '.join(RESNETS)}, timm/MODEL, timm/MODEL:FILE"
        text += " (default: the data set's own)"
        p.add_argument("--extractor", default="", help=text)
        if DATASETS[name].make:
            p.add_argument("--scenes", type=int, help="training scenes (default: 5000)")
    args = parser.parse_args(argv)
    scenes = getattr(args, "scenes", None)
    prepare(args.command, Path(args.data_dir), usable_device(args.device), args.extractor, scenes)


if __name__ == "__main__":
    run_main(main)
