"""Batches, and a data set and a checkpoint that meet."""

import itertools
import threading
from pathlib import Path

import pytest
import torch
from helpers import GRID, NoFeatures

import data
from common import END, START, UNK, InputError, RunConfig
from support.pairs import Pair, release_from_pairs
from support.text import SPECIAL, Vocab, frequent_words


def collect(dataset, *args, **kwargs):
    """What the batches of each step hold."""
    steps = []
    for batches in dataset.train_batches(*args, **kwargs):
        steps.append([(b.pair_ids, b.caption.tolist(), b.before.tolist()) for b in batches])
    return steps


def test_a_loop_that_ends_early_leaves_no_thread(prepared):
    dataset = data.load("clevr_change", prepared)
    threads = threading.active_count()
    for _ in dataset.train_batches(3, 0, 0, 100):
        assert threading.active_count() == threads + 1
        break
    assert threading.active_count() == threads


def test_batches_are_a_function_of_seed_and_step(prepared):
    """Wherever a run begins, in an epoch or between two."""
    dataset = data.load("clevr_change", prepared)
    assert dataset.grid == GRID
    assert dataset.max_len == 2 + 9  # "the scene , it seems , is the same"
    steps = collect(dataset, 3, seed=5, first=0, last=7)
    assert len(steps) == 7  # three epochs and a half, of two steps each
    for first in range(8):
        assert steps[first:] == collect(dataset, 3, seed=5, first=first, last=7)
    for i, step in enumerate(steps):
        assert step not in steps[:i]
    assert steps != collect(dataset, 3, seed=6, first=0, last=7)


@pytest.mark.parametrize("batch_size, size, steps", [(3, 3, 2), (4, 4, 2), (8, 8, 1), (9, 8, 1)])
def test_every_batch_is_full(prepared, batch_size, size, steps):
    """In an epoch's steps, every scene is at most once. A batch that is larger than the data set
    has what there is."""
    dataset = data.load("clevr_change", prepared)
    seen = set()
    for epoch in range(8):
        first = epoch * steps
        ids = []
        for changed, distractor in collect(dataset, batch_size, 0, first, first + steps):
            assert [f"{i}_n" for i in changed[0]] == distractor[0]  # of the same scenes, in order
            assert len(changed[0]) == size
            ids += changed[0]
        assert len(set(ids)) == len(ids) == steps * size
        seen.update(ids)
    assert seen == {p.id for p in dataset.pairs("train") if "_n" not in p.id}


def test_half_of_the_scenes_take_the_distractor_as_before(prepared):
    dataset = data.load("clevr_change", prepared)
    swaps = 0
    for epoch in range(8):
        for changed, distractor in dataset.train_batches(8, 0, epoch, epoch + 1):
            for i, pair_id in enumerate(changed.pair_ids):
                views = ("default", "semantic", "nonsemantic")
                names = [f"CLEVR_{view}_{pair_id[:6]}.png" for view in views]
                default, semantic, other = dataset.features.rows(names)
                assert torch.equal(changed.after[i], semantic)
                assert torch.equal(changed.before[i], distractor.before[i])
                swapped = torch.equal(changed.before[i], other)
                assert torch.equal(distractor.after[i], default if swapped else other)
                swaps += swapped
    assert swaps / (8 * 8) == pytest.approx(0.5, abs=0.15)
    evaluation = next(dataset.eval_batches("test", 5))  # swaps nothing
    expected = dataset.features.rows(["CLEVR_default_000010.png"])
    assert torch.equal(evaluation.before[:1], expected)


def test_every_scene_may_be_first_and_every_caption_is_drawn(prepared):
    """A pair's caption does not depend on the caption of the scene's other pair."""
    dataset = data.load("clevr_change", prepared)
    first = set()
    drawn = set()
    for epoch in range(40):
        ((changed, same),) = dataset.train_batches(8, 0, epoch, epoch + 1)
        first.add(changed.pair_ids[0])
        drawn.update(zip(changed.pair_ids, changed.texts, same.texts, strict=True))
    assert len(first) == 8
    expected = set()
    for scene in dataset.scenes["train"]:
        changed, same = scene.pairs
        expected.update(itertools.product([changed.id], changed.captions, same.captions))
    assert drawn == expected


def test_the_longest_caption_may_be_in_any_split():
    train = Pair("1", "a", "b", ["c"])
    test = Pair("2", "d", "e", ["c d e"])
    release = release_from_pairs({"train": [train], "test": [test]}, Path())
    vocab = Vocab(frequent_words(["c"]))
    dataset = data.Dataset("pairs", Path(), release, vocab, NoFeatures())
    assert dataset.max_len == 2 + 3


def test_a_checkpoint_brings_its_words_and_length(prepared):
    """It can be evaluated on a data set with other words and longer captions, but not resumed."""
    dataset = data.load("clevr_change", prepared)
    trained = dataset.state()
    trained["vocab"] = [*SPECIAL, "the", "cube"]
    trained["max_len"] = 4
    with pytest.raises(InputError, match="--data_dir"):
        dataset.check_state(trained)
    dataset.adopt(trained)
    batch = next(dataset.eval_batches("val", 1))
    assert batch.texts == ["the red cube turned gray"]
    assert batch.caption.tolist() == [[START, 4, UNK, END]]
    with pytest.raises(InputError, match="--extractor"):
        dataset.adopt(trained | {"extractor": "resnet101-layer4"})


@pytest.mark.parametrize("split, refused", [("train", True), ("val", True), ("test", False)])
def test_a_run_goes_on_with_its_own_pairs_alone(split, refused, prepared):
    """The words of changed captions and pairs may be the same."""
    dataset = data.load("clevr_change", prepared)
    state = dataset.state()
    dataset.check_state(state)
    dataset = data.load("clevr_change", prepared)
    dataset.pairs(split)[0].captions.reverse()
    dataset.pairs(split)[0].captions.append("the cube")
    if refused:
        with pytest.raises(InputError, match="--out_dir"):
            dataset.check_state(state)
    else:
        dataset.check_state(state)


def test_a_blind_data_set_shows_nothing(prepared):
    dataset = data.load("clevr_change", prepared, RunConfig(blind=True))
    batch = next(dataset.eval_batches("val", 2))
    assert batch.before.shape == (2, *dataset.grid)
    assert not batch.before.any() and not batch.after.any()
