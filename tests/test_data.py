"""Vocabulary, CLEVR-Change's layout, feature files, batches, captions of any two pictures."""

import io
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from conftest import GRID

import data
from common import InputError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
real = pytest.mark.skipif(not SHARED.exists(), reason="the public annotation files are not here")


def test_tokens_and_vocabulary_follow_the_published_rule():
    words = data.tokenize("A cube, was; it moved? yes.")
    assert words == ["A", "cube", ",", "was", ";", "it", "moved", "yes"]
    assert data.tokenize("two  blanks ") == ["two", "", "blanks", ""]
    vocab = data.Vocab.from_captions(["b a", "B, a"])
    assert vocab.words == [*data.SPECIAL, ",", "B", "a", "b"]
    assert vocab.encode("a c b", 7) == [2, 6, 1, 7, 3, 0, 0]
    ids = torch.tensor([[2, 6, 7, 3, 5], [2, 7, 0, 6, 6]])
    assert vocab.decode(ids) == ["a b", "b"]
    assert vocab.encode("a a a", 4) == [2, 6, 6, 3]
    assert len(data.Vocab.from_captions(["x x y"], min_count=2)) == 5


def test_special_words_are_no_words_of_captions():
    """Some releases contain <UNK> in their captions."""
    vocab = data.Vocab.from_captions(["a <UNK> b", "<NULL> <START> <END>"])
    assert vocab.words == [*data.SPECIAL, "a", "b"]
    assert data.Vocab(vocab.words).words == vocab.words
    ids = [data.START, 4, data.UNK, data.UNK, data.UNK, data.UNK, 5, data.END]
    assert vocab.encode("a <NULL> <UNK> <START> <END> b", 8) == ids


@pytest.mark.parametrize(
    "caption, words",
    [
        ("A red-brick wall isn't 3.5 m", "a red-brick wall isn't 3.5 m"),
        ('(the "new" gate), 50%!', '( the " new " gate ) , 50 % !'),
        ("Die Tu\u0308r\u3000ist\xa0zu", "die t\xfcr ist zu"),
        ("\u0917\u093e\u0921\u093c\u0940\u0964", "\u0917\u093e\u0921\u093c\u0940 \u0964"),
        (" \n", ""),
    ],
)
def test_words_of_own_pairs(caption, words):
    assert data.tokenize_pairs(caption) == words.split()
    assert data.tokenize_pairs(words) == data.tokenize_pairs(caption)  # words stay words


# ---- CLEVR-Change --------------------------------------------------------------------------------


@real
def test_real_clevr_change_splits_are_read(tmp_path):
    for file in ("splits.json", "type_mapping.json"):
        shutil.copy(SHARED / "clevr_change" / file, tmp_path)
    splits = json.loads((tmp_path / "splits.json").read_text())
    captions = {}
    for numbers in splits.values():
        captions |= {f"CLEVR_default_{i:06d}.png": ["a caption"] for i in numbers}
    for file in ("change_captions.json", "no_change_captions.json"):
        (tmp_path / file).write_text(json.dumps(captions))
    release = data.read_clevr_change(tmp_path)
    sizes = {split: len(scenes) for split, scenes in release.scenes.items()}
    assert sizes.items() <= data.DATASETS["clevr_change"].published.items()
    test = {pair.id for scene in release.scenes["test"] for pair in scene.pairs}
    for kind in ("color", "material", "add", "drop", "move"):
        assert len(release.groups[kind] & test) == 797


def test_a_scene_is_a_changed_and_a_distractor_pair(release):
    path = release / "change_captions.json"
    captions = json.loads(path.read_text())
    captions["CLEVR_nonsemantic_000003.png"] = ["seen from there"]
    path.write_text(json.dumps(captions))
    scene = data.read_clevr_change(release).scenes["train"][3]
    changed, same = scene.pairs
    changed_swapped, same_swapped = scene.swapped
    assert (changed.id, changed.before) == ("000003.png", "CLEVR_default_000003.png")
    assert changed.after == "CLEVR_semantic_000003.png"
    assert (same.id, same.after) == ("000003.png_n", "CLEVR_nonsemantic_000003.png")
    assert (changed_swapped.before, changed_swapped.after) == (same.after, changed.after)
    assert (same_swapped.before, same_swapped.after) == (same.after, same.before)
    assert changed_swapped.captions == ["seen from there"] != changed.captions


# ---- feature files -------------------------------------------------------------------------------


def features():
    """Feature maps of five images."""
    return np.random.default_rng(0).random((5, *GRID)).astype(np.float32)


def write(path, blocks):
    """A feature file of the images "a" to "e"."""
    files = [Path(__file__)] * 5  # the files that they are said to be made from
    data.write_features(path, list("abcde"), files, blocks, "resnet101-layer3", "how")


def test_feature_file_round_trip(tmp_path):
    x = features()
    write(tmp_path / "f.h5", iter([x[:2], x[2:]]))
    read = data.Features(tmp_path / "f.h5", "make it", "resnet101-layer3")
    assert read.extractor == "resnet101-layer3"
    expected = torch.from_numpy(x[[3, 0, 3]]).half()
    torch.testing.assert_close(read.rows(["d", "a", "d"]), expected)
    read.data = torch.tensor(read.data)  # as on a GPU
    torch.testing.assert_close(read.rows(["d", "a", "d"]), expected)


def test_only_the_named_gpu_is_asked_and_gets_page_locked_features(prepared, monkeypatch):
    """A GPU that is not used may be broken or busy. Page-locking memory also uses a GPU."""
    empty = torch.empty
    asked = []

    def free_memory(device):
        asked.append(device)
        return 0, 0

    def unpinned(shape, dtype, pin_memory):  # this computer may have no GPU to page-lock memory for
        asked.append("pinned")
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free_memory)
    monkeypatch.setattr(torch, "empty", unpinned)
    dataset = data.load("clevr_change", prepared, device="cpu")
    names = sorted(dataset.paths)[3::-1]
    rows = dataset.features.rows(names)
    assert asked == []
    dataset = data.load("clevr_change", prepared, device="cuda:1")
    assert torch.equal(dataset.features.rows(names), rows)
    assert asked == ["cuda:1", "pinned"]


def test_features_that_float16_cannot_hold_are_named(tmp_path):
    x = features()
    for bad in (x[1:] * 1e6, x[1:] * np.nan):
        with pytest.raises(InputError, match="'b'"):
            write(tmp_path / "g.h5", [x[:1], bad])
    assert not list(tmp_path.iterdir())  # never half a file


def test_chunked_features_are_refused_with_the_command_that_mends_them(tmp_path):
    """They cannot be mapped into memory; days of work must not be removed."""
    write(tmp_path / "f.h5", [features()])
    with h5py.File(tmp_path / "f.h5", "a") as f:
        table = f["features"][:]
        del f["features"]
        f.create_dataset("features", data=table, compression="gzip")
    with pytest.raises(InputError, match="f.h5.*h5repack -f NONE -l CONTI") as e:
        data.Features(tmp_path / "f.h5", "make it", "resnet101-layer3")
    assert "remove" not in str(e.value)


# ---- batches -------------------------------------------------------------------------------------


def collect(dataset, *args, **kwargs):
    """What an epoch's batches hold."""
    epoch = []
    for batches in dataset.train_batches(*args, **kwargs):
        epoch.append([(b.pair_ids, b.caption.tolist(), b.before.tolist()) for b in batches])
    return epoch


def test_batches_are_a_function_of_seed_and_epoch(prepared):
    dataset = data.load("clevr_change", prepared)
    assert dataset.grid == GRID
    assert dataset.max_len == 2 + 9  # "the scene , it seems , is the same"
    epoch = collect(dataset, 3, seed=5, epoch=2)
    assert len(epoch) == dataset.steps(3) == 3
    seen = []
    for (changed_ids, _, _), (distractor_ids, _, _) in epoch:
        seen += changed_ids
        assert [f"{i}_n" for i in changed_ids] == distractor_ids  # of the same scenes, in order
    assert sorted(seen) == sorted(p.id for p in dataset.pairs("train") if "_n" not in p.id)
    assert epoch == collect(dataset, 3, seed=5, epoch=2)
    assert epoch[1:] == collect(dataset, 3, seed=5, epoch=2, first=1)
    assert epoch != collect(dataset, 3, seed=5, epoch=3)
    assert epoch != collect(dataset, 3, seed=6, epoch=2)


def test_swap_takes_default_or_distractor_as_before(prepared):
    dataset = data.load("clevr_change", prepared)
    seen = set()
    for epoch in range(8):
        for changed, distractor in dataset.train_batches(8, 0, epoch):
            for i, pair_id in enumerate(changed.pair_ids):
                views = ("default", "semantic", "nonsemantic")
                names = [f"CLEVR_{view}_{pair_id[:6]}.png" for view in views]
                default, semantic, other = dataset.features.rows(names)
                assert torch.equal(changed.after[i], semantic)
                assert torch.equal(changed.before[i], distractor.before[i])
                swapped = torch.equal(changed.before[i], other)
                assert torch.equal(distractor.after[i], default if swapped else other)
                seen.add(swapped)
    assert seen == {True, False}
    evaluation = next(dataset.eval_batches("test", 5))  # swaps nothing
    expected = dataset.features.rows(["CLEVR_default_000010.png"])
    assert torch.equal(evaluation.before[:1], expected)


def test_prefetch_passes_items_and_errors():
    assert list(data.prefetch(iter(range(20)))) == list(range(20))

    def broken():
        yield 1
        raise OSError("disk")

    items = data.prefetch(broken())
    assert next(items) == 1
    with pytest.raises(OSError, match="disk"):
        next(items)
    early = data.prefetch(iter(range(1000)))
    assert next(early) == 0
    early.close()  # must not hang


def test_a_checkpoint_brings_its_words_and_length(prepared):
    """It can be evaluated on a data set with other words and longer captions, but not resumed."""
    dataset = data.load("clevr_change", prepared)
    trained = dataset.state()
    trained["vocab"] = [*data.SPECIAL, "the", "cube"]
    trained["max_len"] = 4
    with pytest.raises(InputError, match="--data_dir"):
        dataset.check_state(trained)
    dataset.adopt(trained)
    batch = next(dataset.eval_batches("val", 1))
    assert batch.texts == ["the red cube turned gray"]
    assert batch.caption.tolist() == [[data.START, 4, data.UNK, data.END]]
    with pytest.raises(InputError, match="--extractor"):
        dataset.adopt(trained | {"grid": (8, 3, 2)})


@pytest.mark.parametrize("shared, noted", [(1, False), (2, True)])
def test_pairs_that_share_a_picture_are_told(shared, noted, capsys):
    pairs = [data.Pair(f"{n}", f"b{n}", f"a{n}", ["c"]) for n in range(20 - shared)]
    pairs += [data.Pair(f"r{n}", "b0", f"r{n}", ["c"]) for n in range(shared)]
    release = data.release_from_pairs({"train": pairs}, Path())
    dataset = data.Dataset("pairs", Path(), release, data.Vocab.from_captions(["c"]))
    cfg = SimpleNamespace(batch_size=4, w_match=0.5, w_other=0.0)
    data.note_on_negatives(dataset, cfg, ("w_match", "w_other"))
    told = capsys.readouterr().out
    if noted:
        assert "3 of 20" in told and told.endswith(" --w_match 0\n")
    else:
        assert told == ""
    cfg.batch_size = 1
    data.note_on_negatives(dataset, cfg, ("w_match",))
    assert "one pair a batch" in capsys.readouterr().out
    data.note_on_negatives(dataset, cfg, ("w_other",))
    assert capsys.readouterr().out == ""


def test_a_scenes_own_pairs_share_their_picture(prepared, capsys):
    dataset = data.load("clevr_change", prepared)
    capsys.readouterr()
    data.note_on_negatives(dataset, SimpleNamespace(batch_size=4, w=1.0), ("w",))
    assert capsys.readouterr().out == ""


# ---- captions of any two pictures ----------------------------------------------------------------


class Brightness(torch.nn.Module):
    """Says whether "after" is brighter than "before", and looks at its brightest cell."""

    cfg = SimpleNamespace(device="cpu")

    def generate(self, before, after, more=None):
        brighter = (after - before).mean((1, 2, 3)) > 0
        word = torch.where(brighter, 4, 5) if more is None else more
        start = torch.full_like(word, data.START)
        end = torch.full_like(word, data.END)
        return torch.stack([start, word, end], 1)

    def attention_map(self, before, after, ids, more=None):
        return {"attention": after.mean(1)}


@pytest.fixture
def captioner(tmp_path, monkeypatch):
    """dark.png, bright.png, and a function: `inputs` -> a Captioner whose extractor takes the mean
    of each cell."""

    class Mean(data.Extractor):
        def __init__(self, name, device):
            self.preprocess = lambda image: data.preprocess_imagenet(image, 64)
            self.device = device
            self.net = lambda x: x.unflatten(2, (8, 8)).unflatten(4, (8, 8)).mean((3, 5))

    monkeypatch.setattr(data, "Extractor", Mean)
    data.Image.new("RGB", (40, 20), "black").save(tmp_path / "dark.png")
    data.Image.new("RGB", (40, 20), "white").save(tmp_path / "bright.png")
    state = {
        "vocab": [*data.SPECIAL, "brighter", "darker"],
        "extractor": "mean",
    }

    def make(inputs=None):
        return data.Captioner(Brightness(), state, inputs)

    return tmp_path / "dark.png", tmp_path / "bright.png", make


def test_two_files_are_captioned(captioner, tmp_path, capsys):
    dark, bright, make = captioner
    data.caption_files(make(), [dark, bright], None)
    data.caption_files(make(), [bright, dark], str(tmp_path / "new/folder/out.jpg"))
    assert capsys.readouterr().out == "brighter\ndarker\n"
    with data.Image.open(tmp_path / "new/folder/out.jpg") as picture:
        assert picture.format == "JPEG"
    images = [data.read_image(bright), data.read_image(dark)]  # from Python: pictures in memory
    caption, maps = make()(*images)
    assert caption == "darker" and maps["attention"].shape == (8, 8)


def test_out_replaces_no_file_of_the_user(captioner, tmp_path):
    dark, bright, make = captioner
    photographs = dark.read_bytes(), bright.read_bytes()
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.png").symlink_to(bright)
    for out in ("bright.png", "sub/../dark.png", "link.png"):
        with pytest.raises(InputError, match="--out"):
            data.caption_files(make(), [dark, bright], str(tmp_path / out))
    assert (dark.read_bytes(), bright.read_bytes()) == photographs
    table = tmp_path / "pairs.csv"
    table.write_text("before,after\ndark.png,bright.png")
    with pytest.raises(InputError, match="--out"):
        data.caption_files(make(), [str(table)], str(table))


def test_the_pairs_of_a_table_are_captioned(captioner, tmp_path, capsys):
    *_, make = captioner
    table = tmp_path / "pairs.csv"
    rows = ["./dark.png,bright.png,", "bright.png,dark.png,", "dark.png,dark.png,"]
    table.write_text("\n".join(["Before, After,captions", *rows]))  # as for training
    data.caption_files(make(), [str(table)], str(tmp_path / "out.json"))
    expected = {
        "dark.png bright.png": "brighter",
        "bright.png dark.png": "darker",
        "dark.png dark.png": "darker",
    }
    lines = [f"{name}: {caption}" for name, caption in expected.items()]
    assert capsys.readouterr().out.splitlines() == lines
    written = json.loads((tmp_path / "out.json").read_text())
    assert {row["image_id"]: row["caption"] for row in written} == expected


def test_more_than_two_files_are_refused(captioner, capsys):
    dark, bright, make = captioner
    with pytest.raises(InputError, match="--caption: expected two images or a CSV file"):
        data.caption_files(make(), [dark, bright, dark], None)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("last", ["none.png", "cut.png", "pairs.csv"])
def test_every_file_is_looked_at_before_the_first_is_captioned(captioner, tmp_path, capsys, last):
    _, bright, make = captioner
    (tmp_path / "cut.png").write_bytes(bright.read_bytes()[:-30])
    table = tmp_path / "pairs.csv"
    table.write_text(f"before,after\ndark.png,bright.png\nbright.png,{last}\n")
    with pytest.raises((InputError, FileNotFoundError), match=last):
        data.caption_files(make(), [str(table)], str(tmp_path / "out.json"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_an_open_picture_may_occur_in_several_pairs(captioner, tmp_path, monkeypatch, form):
    """Threads must not read it at the same time."""
    dark, _, make = captioner
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    data.Image.new("RGB", (1600, 1200), "grey").save(tmp_path / "grey.png", form)
    image = data.Image.open(tmp_path / "grey.png")
    file = io.BytesIO((tmp_path / "grey.png").read_bytes())
    for opened in (image, file):
        captions = [caption for caption, _ in make().pairs([(opened, dark), (dark, opened)] * 8)]
        assert captions == ["darker", "brighter"] * 8
