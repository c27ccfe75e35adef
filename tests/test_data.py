"""Batches, and what a data set says of its pictures and of a checkpoint."""

import itertools
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import GRID, NoFeatures

import data
import scores
from common import END, START, UNK, InputError
from support.features import (
    prefetch,
)
from support.releases import Pair, release_from_pairs
from support.text import SPECIAL, Vocab, frequent_words, tokenize_pairs

# ---- batches -------------------------------------------------------------------------------------


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


def test_prefetch_passes_items_and_errors():
    assert list(prefetch(iter(range(20)))) == list(range(20))

    def broken():
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(prefetch(broken()))
    early = prefetch(iter(range(1000)))
    assert next(early) == 0
    early.close()  # must not hang


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


def test_pairs_that_a_checkpoint_was_trained_on_are_told(prepared, capsys):
    """The table's splits may have changed since."""
    dataset = data.load("clevr_change", prepared)
    state = dataset.state()
    dataset.adopt(state)
    assert "trained on" not in capsys.readouterr().out
    state["train_pairs"] = torch.tensor([dataset.contents(pair) for pair in dataset.pairs("val")])
    count = len(dataset.pairs("val"))
    dataset.adopt(state)
    assert f"trained on {count} of the {count} val pairs" in capsys.readouterr().out


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
    dataset = data.load("clevr_change", prepared, blind=True)
    batch = next(dataset.eval_batches("val", 2))
    assert batch.before.shape == (2, *dataset.grid)
    assert not batch.before.any() and not batch.after.any()


class Copies(NoFeatures):
    """Pictures of which some are copies of others, by their names."""

    def content(self, name):
        return hash(re.sub("copy . of ", "", name))


def own_pairs(pairs, kinds=None):
    """A Dataset of pairs by split, whose pictures may be copies."""
    release = release_from_pairs(pairs, Path(), kinds)
    vocab = Vocab(frequent_words(release.captions(["train"]), tokenize_pairs), tokenize_pairs)
    return data.Dataset("pairs", Path(), release, vocab, Copies())


def test_a_picture_is_known_by_its_content():
    """Whatever its name, in another split and in the same pair."""
    pairs = {
        "train": [Pair("1", "a", "b", ["c"]), Pair("2", "c", "copy 1 of c", ["c"])],
        "val": [Pair("3", "d", "e", ["c"])],
        "test": [
            Pair("4", "x", "copy 1 of a", ["c"]),
            Pair("5", "y", "copy 2 of d", ["c"]),
            Pair("6", "y", "x", ["c"]),
            Pair("7", "z", "copy 1 of z", ["c"]),
            Pair("8", "b", "x", ["c"]),
        ],
    }
    dataset = own_pairs(pairs, {"no change": {"2"}})
    assert dataset.leaked("test") == {"4", "5", "8"}
    assert scores.groups_of(dataset, "test")["without leaked pairs"] == {"6", "7"}
    val, test, equal = dataset.notes_on_copies()
    assert "1 of 1 val" in val and "3 of 5 test" in test
    assert "1 changed and 1 unchanged" in equal and "7" in equal
    single = own_pairs({"train": [Pair("1", "a", None, ["c"])], "test": [Pair("2", "b", None, [])]})
    assert single.notes_on_copies() == []


def test_what_unchanged_pairs_say_by_mistake_claims_a_change():
    """The sentences that count are those which unchanged training pairs have more often."""
    texts = ["Nothing changed.", "nothing changed .", "the car left", "all as before"]
    pairs = [Pair(f"same {n}", "a", f"{n}", [text]) for n, text in enumerate(texts)]
    texts = ["The car left", "the car left", "nothing changed."]
    pairs += [Pair(f"{n}", "b", f"{n}", [text]) for n, text in enumerate(texts)]
    dataset = own_pairs({"train": pairs}, {"no change": {f"same {n}" for n in range(4)}})
    assert dataset.no_change == {"nothing changed .", "all as before"}


@pytest.mark.parametrize("shared, noted", [(1, False), (2, True)])
def test_pairs_that_share_a_picture_are_told(shared, noted, capsys):
    """They would be negatives of each other in the contrastive losses. A copy of a picture is the
    same picture."""
    pairs = [Pair(f"{n}", f"b{n}", f"a{n}", ["c"]) for n in range(20 - shared)]
    pairs += [Pair(f"r{n}", f"copy {n} of b0", f"r{n}", ["c"]) for n in range(shared)]
    dataset = own_pairs({"train": pairs})
    cfg = SimpleNamespace(w_match=0.5, w_other=0.0)
    data.note_on_negatives(dataset, cfg, "w_match", "w_other")
    told = capsys.readouterr().out
    assert told.endswith(" --w_match 0\n") if noted else told == ""
