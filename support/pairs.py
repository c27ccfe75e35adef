"""Pairs of images with captions, and the contents of a data set's files. Licence: MIT."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from common import InputError

SPLITS = ("train", "val", "test")


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
    # Kind of change -> pair ids. Sample pictures are chosen by kind. Pairs of the kind "no change"
    # are unchanged; scores report the share of them whose caption says that nothing changed.
    kinds: dict[str, set[str]] = field(default_factory=dict)
    overlap: dict[str, float] = field(default_factory=dict)  # pair id -> IoU of the object boxes
    # Pair id -> boxes of the changed object before and after, [x, y, w, h] in pixels, or None.
    boxes: dict[str, tuple[list | None, list | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # remarks on this copy, to be printed
    lines: dict[Path, int] = field(default_factory=dict)  # file -> the line that names it

    def pairs(self, *splits: str) -> list[Pair]:
        """The pairs of these splits: in each, the first one of every scene, then the others."""
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
    to `folder`; pairs of the same id are one, with the captions of all. Each kind is a group."""
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
