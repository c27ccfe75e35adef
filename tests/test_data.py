"""Vocabulary, CLEVR-Change's layout, feature files, batches, captions of any two pictures."""

import itertools
import json
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from conftest import GRID, NoFeatures, colours
from PIL import Image

import data
import scores
from common import END, START, UNK, InputError
from support.captioner import Captioner, caption_files
from support.features import (
    Extractor,
    Features,
    prefetch,
    preprocess_imagenet,
    read_image,
    write_features,
)
from support.releases import Pair, read_clevr_change, release_from_pairs
from support.text import SPECIAL, Vocab, frequent_words, tokenize, tokenize_pairs


def test_tokens_and_vocabulary_follow_the_published_rule():
    words = tokenize("A cube, was; it moved? yes.")
    assert words == ["A", "cube", ",", "was", ";", "it", "moved", "yes"]
    assert tokenize("two  blanks ") == ["two", "", "blanks", ""]
    vocab = Vocab(frequent_words(["b a", "B, a"]))
    assert vocab.words == [*SPECIAL, ",", "B", "a", "b"]
    assert vocab.encode("a c b", 7) == [2, 6, 1, 7, 3, 0, 0]
    ids = torch.tensor([[2, 6, 7, 3, 5], [2, 7, 0, 6, 6]])
    assert vocab.decode(ids) == ["a b", "b"]
    assert vocab.encode("a a a", 4) == [2, 6, 6, 3]
    assert frequent_words(["x x y"], min_count=2) == [*SPECIAL, "x"]
    # Some releases contain <UNK> in their captions. Special words are no words.
    vocab = Vocab(frequent_words(["a <UNK> b", "<NULL>"]))
    assert vocab.words == [*SPECIAL, "a", "b"]
    assert vocab.encode("a <NULL> <UNK> b", 6) == [2, 4, 1, 1, 5, 3]


@pytest.mark.parametrize(
    "caption, words",
    [
        ("A red-brick wall isn't 3.5 m", "a red-brick wall isn't 3.5 m"),
        ('(the "new" gate), 50%!', '( the " new " gate ) , 50 % !'),
        ("Die Tu\u0308r\u3000ist\xa0zu", "die t\xfcr ist zu"),
        ("\ufeffthe\u00ad gate\u200bisn\u2019t o\u00adpen", "the gate isn't open"),
        ("\u200fהשער\u2069 \u202b\u2060נפתח\u202c.\u200e", "השער נפתח ."),
        ("İstanbul, I\u0307STANBUL kapı KAPI", "istanbul , istanbul kapi kapi"),
        (
            "Straße STRASSE STRAẞE; ο δρόμος, Ο ΔΡΌΜΟΣ",
            "strasse strasse strasse ; ο δρόμος , ο δρόμος",
        ),
        ("门开了，BMW走了。", "门 开 了 ， bmw 走 了 。"),
    ],
)
def test_words_of_own_pairs(caption, words):
    assert tokenize_pairs(caption) == words.split()


# ---- CLEVR-Change --------------------------------------------------------------------------------


def test_a_scene_is_a_changed_and_a_distractor_pair(release):
    scene = read_clevr_change(release).scenes["train"][3]
    changed, same = scene.pairs
    changed_swapped, same_swapped = scene.swapped
    assert (changed.id, changed.before) == ("000003.png", "CLEVR_default_000003.png")
    assert changed.after == "CLEVR_semantic_000003.png"
    assert (same.id, same.after) == ("000003.png_n", "CLEVR_nonsemantic_000003.png")
    assert (changed_swapped.before, changed_swapped.after) == (same.after, changed.after)
    assert (same_swapped.before, same_swapped.after) == (same.after, same.before)


def test_optional_files(release):
    """Captions from the distractor's view are those of the swapped pair."""
    captions = json.loads((release / "change_captions.json").read_text())
    own = captions["CLEVR_default_000003.png"]
    captions["CLEVR_nonsemantic_000003.png"] = ["seen from there"]
    boxes = {"bbox_before": [1, 2, 3, 4], "bbox_after": None}
    (release / "change_captions.json").write_text(json.dumps(captions))
    (release / "change_captions_by_IOU.json").write_text('{"3": 0.25}')
    (release / "change_captions_with_bbox.json").write_text(json.dumps({"3": boxes}))
    read = read_clevr_change(release)
    scene = read.scenes["train"][3]
    assert scene.pairs[0].captions == own
    assert scene.swapped[0].captions == ["seen from there"]
    assert read.overlap == {"000003.png": 0.25}
    assert read.boxes == {"000003.png": ([1, 2, 3, 4], None)}


# ---- feature files -------------------------------------------------------------------------------


def write(path, blocks):
    """A feature file of the images "a" to "e"."""
    files = dict.fromkeys("abcde", Path(__file__))  # that they are said to be made from
    write_features(path, files, blocks, "resnet101-layer3", "how")


FEATURES = np.random.default_rng(0).random((5, *GRID)).astype(np.float32)


def test_feature_file_round_trip(tmp_path, monkeypatch):
    write(tmp_path / "f.h5", [FEATURES[:2], FEATURES[2:]])
    read = Features(tmp_path / "f.h5", "make it", "resnet101-layer3")
    expected = torch.from_numpy(FEATURES[[3, 0, 3]]).half()
    torch.testing.assert_close(read.rows(["d", "a", "d"]), expected)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)  # as on macOS and Windows
    torch.testing.assert_close(read.rows(["d", "a", "d"]), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the file would fill the disk")
def test_a_feature_file_may_be_larger_than_memory(tmp_path):
    """As that of CLEVR-Change, 48 GB, often is. Nothing is written but the last row."""
    memory = Path("/proc/meminfo").read_text()
    kilobytes = re.findall(r"^(?:MemTotal|SwapTotal): +(\d+)", memory, re.MULTILINE)
    grid = (2**12, 32, 32)  # 8 MiB
    count = sum(map(int, kilobytes)) * 1024 * 5 // 4 // 2**23
    names = [str(n) for n in range(count)]
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as f:
        f.attrs.update(extractor="resnet101-layer3", preprocessing="how")
        f["image_ids"] = names
        f["stamps"] = np.zeros((count, 3), np.int64)
        f.create_dataset("features", (count, *grid), "float16", fill_time="never")[-1] = 2
    assert path.stat().st_blocks * 512 < 100e6
    features = Features(path, "make it", "resnet101-layer3")
    assert (features.rows(names[-1:]) == 2).all()


@pytest.mark.parametrize("factor", [1e6, np.nan])
def test_features_that_float16_cannot_hold_are_named(factor, tmp_path):
    with pytest.raises(InputError, match="'b'"):
        write(tmp_path / "f.h5", [FEATURES[:1], FEATURES[1:] * factor])
    assert not list(tmp_path.iterdir())  # never half a file


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


# ---- captions of any two pictures ----------------------------------------------------------------


@pytest.mark.parametrize(
    "caption",
    [
        "the car is gone.",
        "هل اختفت السيارة، أم لا؟",
        "a gate (the left-hand one), 3.5 m, isn't [any more] open; 50% of it!",
        "what... no: why?!",
        "门开了，大车走了。",
    ],
)
def test_sentences_have_punctuation_where_people_put_it(caption):
    words = " ".join(tokenize_pairs(caption))
    assert words != caption and Vocab.sentence(words) == caption


class Brightness(torch.nn.Module):
    """Says whether "after" is brighter than "before", and looks at its brightest cell."""

    cfg = SimpleNamespace(device="cpu")

    def generate(self, before, after):
        brighter = (after - before).mean((1, 2, 3)) > 0
        word = torch.where(brighter, 4, 5)
        start = torch.full_like(word, START)
        end = torch.full_like(word, END)
        return torch.stack([start, word, end], 1)

    def attention_map(self, before, after, ids):
        return {"attention": after.mean(1)}


@pytest.fixture
def captioner(tmp_path, monkeypatch):
    """dark.png, bright.png, and a Captioner whose extractor takes the mean of each cell."""

    class Mean(Extractor):
        def __init__(self, name, device):
            self.preprocess = lambda image: preprocess_imagenet(image, 64)
            self.device = device
            self.net = lambda x: x.unflatten(2, (8, 8)).unflatten(4, (8, 8)).mean((3, 5))

    monkeypatch.setattr("support.captioner.Extractor", Mean)
    files = []
    for name, color in (("dark", "black"), ("bright", "white")):
        files.append(tmp_path / f"{name}.png")
        Image.new("RGB", (40, 20), color).save(files[-1])
    state = {"vocab": [*SPECIAL, "brighter", "darker ."], "extractor": "mean"}
    return *files, Captioner(Brightness(), state)


def test_two_pictures_are_captioned(captioner, tmp_path, capsys):
    dark, bright, captioner = captioner
    caption_files(captioner, [dark, bright], None)
    caption_files(captioner, [bright, dark], str(tmp_path / "new/folder/out.jpg"))
    assert capsys.readouterr().out == "brighter\ndarker.\n"
    with Image.open(tmp_path / "new/folder/out.jpg") as picture:
        assert picture.format == "JPEG"
    assert colours(tmp_path / "new/folder/out.jpg") > 100
    with pytest.raises(InputError, match="--out"):  # it replaces no picture of the user
        caption_files(captioner, [dark, bright], str(bright))
    with pytest.raises(InputError, match=r"\.csv"):
        caption_files(captioner, [dark], None)
    with pytest.raises(InputError, match=r"x\.csv.*\.png"):
        caption_files(captioner, [dark, bright], str(tmp_path / "none/x.csv"))
    assert not (tmp_path / "none").exists()
    assert capsys.readouterr().out == ""  # all before the first caption
    images = [read_image(bright), read_image(dark)]  # from Python: pictures in memory
    caption, maps = captioner(*images)
    assert caption == "darker." and maps["attention"].shape == (8, 8)
    with Image.open(dark) as opened:  # one picture of several pairs, read by several threads
        results = captioner.pairs([(opened, bright), (bright, opened)] * 10)
        assert [caption for caption, _ in results] == ["brighter", "darker."] * 10


def test_each_pair_gets_its_own_row_of_a_further_input(captioner):
    dark, bright, captioner = captioner
    rows = torch.tensor([[2, 4, 3], [2, 5, 3], [2, 5, 3], [2, 4, 3], [2, 5, 3]])
    captioner.inputs = lambda model, state, pictures: rows
    captioner.model.generate = lambda before, after, rows: rows
    captioner.model.attention_map = lambda before, after, ids, rows: {"rows": rows}
    results = list(captioner.pairs([(dark, bright)] * 5, batch=2))
    expected = ["brighter", "darker.", "darker.", "brighter", "darker."]
    assert [caption for caption, _ in results] == expected
    assert torch.equal(torch.stack([maps["rows"] for _, maps in results]), rows)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("separator", [",", ";"])
def test_the_pairs_of_a_table_are_captioned(separator, mark, captioner, tmp_path, capsys):
    """The table's own columns stay as they are, and so do its separator and byte order mark."""
    captioner = captioner[2]
    table = tmp_path / "pairs.csv"
    text = """Before~ After~Site~~captions
./dark.png~bright.png~7
~~~~
bright.png~dark.png~"a, b;
c"~x~nan
dark.png~bright.png~~~
"""
    captioned = """Before~After~Site~~captions~caption
./dark.png~bright.png~7~~~brighter
bright.png~dark.png~"a, b;
c"~x~nan~darker.
dark.png~bright.png~~~~brighter
"""
    table.write_text(mark + text.replace("~", separator), encoding="utf-8")
    out = tmp_path / "new/out.csv"
    caption_files(captioner, [str(table)], str(out))
    assert out.read_text(encoding="utf-8") == mark + captioned.replace("~", separator)
    first = "dark.png bright.png: brighter"
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"./{first}", "bright.png dark.png: darker.", first]
    with pytest.raises(InputError, match="column caption"):  # which is not overwritten
        caption_files(captioner, [str(out)], str(tmp_path / "more.csv"))
