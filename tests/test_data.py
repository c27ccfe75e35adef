"""Vocabulary, release layout, features, batches, preparation and check."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from conftest import GRID
from test_features import random_resnet

import data

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
real = pytest.mark.skipif(not SHARED.exists(), reason="the public annotation files are not here")


def test_tokens_and_vocabulary_follow_the_fields_rule():
    assert data.tokenize("A cube, was; it moved? yes.") == [
        "A",
        "cube",
        ",",
        "was",
        ";",
        "it",
        "moved",
        "yes",
    ]
    assert data.tokenize("two  blanks ") == ["two", "", "blanks", ""]
    vocab = data.Vocab.from_captions(["b a", "B, a"])
    assert vocab.words == [*data.SPECIAL, ",", "B", "a", "b"]
    assert vocab.encode("a c b", 7) == [2, 6, 1, 7, 3, 0, 0]
    assert vocab.decode(torch.tensor([[2, 6, 7, 3, 5], [2, 7, 0, 6, 6]])) == ["a b", "b"]
    with pytest.raises(ValueError, match="longer than 4"):
        vocab.encode("a a a", 4)
    assert len(data.Vocab.from_captions(["x x y"], min_count=2)) == 5


@real
def test_real_clevr_change_splits_are_read(tmp_path):
    for file in ("splits.json", "type_mapping.json"):
        shutil.copy(SHARED / "clevr_change" / file, tmp_path)
    splits = json.loads((tmp_path / "splits.json").read_text())
    names = [f"CLEVR_default_{i:06d}.png" for ids in splits.values() for i in ids]
    for file in ("change_captions.json", "no_change_captions.json"):
        (tmp_path / file).write_text(json.dumps({name: ["a caption"] for name in names}))
    release = data.read_clevr_change(tmp_path)
    assert {s: len(v) for s, v in release.scenes.items()} == data.DATASETS["clevr_change"].scenes
    test = {p.id for s in release.scenes["test"] for p in s.pairs}
    assert all(
        len(release.groups[kind] & test) == 797
        for kind in ("color", "material", "add", "drop", "move")
    )


def test_a_scene_is_a_changed_and_a_distractor_pair(release):
    scene = data.read_clevr_change(release).scenes["train"][3]
    (changed, same), (changed_swapped, same_swapped) = scene.pairs, scene.swapped
    assert (changed.id, changed.before) == ("000003.png", "CLEVR_default_000003.png")
    assert changed.after == "CLEVR_semantic_000003.png"
    assert (same.id, same.after) == ("000003.png_n", "CLEVR_nonsemantic_000003.png")
    assert (changed_swapped.before, changed_swapped.after) == (same.after, changed.after)
    assert (same_swapped.before, same_swapped.after) == (same.after, same.before)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda r: (r / "splits.json").unlink(), "No such file.*splits.json"),
        (
            lambda r: (r / "splits.json").write_text("{"),
            r"splits.json cannot be used \(Expecting property name",
        ),
        (lambda r: (r / "splits.json").write_text("[]"), "splits.json cannot be used"),
        (lambda r: (r / "splits.json").write_text('{"train": []}'), "splits.json.*val is missing"),
        (
            lambda r: (r / "change_captions.json").write_text("{}"),
            "captions.json.*CLEVR_default_000000.png is missing",
        ),
    ],
)
def test_bad_release_files_are_named(release, spoil, message):
    spoil(release)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data.read_clevr_change(release)


def test_feature_file_round_trip(tmp_path):
    x = np.random.default_rng(0).random((5, *GRID)).astype(np.float32)
    data.write_features(
        tmp_path / "f.h5", list("abcde"), iter([x[:2], x[2:]]), "resnet101-layer3", "how"
    )
    features = data.Features(tmp_path / "f.h5", "make it")
    assert features.extractor == "resnet101-layer3"
    expected = torch.from_numpy(x[[3, 0]]).half()
    torch.testing.assert_close(features.rows(["d", "a"]), expected)
    features.data = torch.tensor(features.data)  # as on a GPU
    torch.testing.assert_close(features.rows(["d", "a"]), expected)
    with pytest.raises(ValueError, match="4 feature maps for 5 images"):
        data.write_features(tmp_path / "g.h5", list("abcde"), [x[:4]], "e", "p")
    with pytest.raises(ValueError, match="'b'.*not finite"):
        data.write_features(tmp_path / "g.h5", list("abcde"), [x[:1], x[1:] * 1e6], "e", "p")
    with pytest.raises(ValueError, match="'b' have another shape than those before"):
        data.write_features(tmp_path / "g.h5", list("abcde"), [x[:1], x[1:, :, :1, :1]], "e", "p")
    assert [path.name for path in tmp_path.iterdir()] == ["f.h5"]  # never half a file
    with h5py.File(tmp_path / "pieces.h5", "w") as f:  # chunks cannot be mapped
        f["image_ids"] = list("abcde")
        f.create_dataset("features", data=x.astype(np.float16), chunks=(1, *GRID))
        f.attrs.update(extractor="e", preprocessing="p")
    with pytest.raises(ValueError, match="cannot be used.*make it"):
        data.Features(tmp_path / "pieces.h5", "make it")
    with h5py.File(tmp_path / "other.h5", "w") as f:
        f["x"] = 1
    with pytest.raises(ValueError, match="cannot be used.*make it"):
        data.Features(tmp_path / "other.h5", "make it")
    with pytest.raises(FileNotFoundError, match="run: make it"):
        data.Features(tmp_path / "none.h5", "make it")


def test_load_says_what_to_run(release, prepared):
    dataset = data.load("clevr_change", prepared)
    assert dataset.grid == GRID and dataset.max_len == 2 + 9  # "the scene , it seems , is the same"
    with pytest.raises(
        ValueError, match="--dataset else: no such data set; there are mini, clevr_change"
    ):
        data.load("else", prepared)
    (prepared / "vocab.json").unlink()
    with pytest.raises(FileNotFoundError, match="python data.py clevr_change --data_dir"):
        data.load("clevr_change", prepared)


def collect(dataset, *args, **kwargs):
    epoch = dataset.train_batches(*args, **kwargs)
    return [
        tuple((b.pair_ids, b.caption.tolist(), b.before.tolist()) for b in batches)
        for batches in epoch
    ]


def test_batches_are_a_function_of_seed_and_epoch(prepared):
    dataset = data.load("clevr_change", prepared)
    epoch = collect(dataset, 3, seed=5, epoch=2)
    assert len(epoch) == dataset.steps(3) == 3
    assert sorted(i for s in epoch for i in s[0][0]) == sorted(
        p.id for p in dataset.pairs("train") if "_n" not in p.id
    )
    assert all(
        [f"{i}_n" for i in s[0][0]] == s[1][0] for s in epoch
    )  # both pairs of a scene, in the same place
    assert epoch == collect(dataset, 3, seed=5, epoch=2) and epoch[1:] == collect(
        dataset, 3, 5, 2, first=1
    )
    assert epoch != collect(dataset, 3, seed=5, epoch=3) and epoch != collect(
        dataset, 3, seed=6, epoch=2
    )


def test_swap_takes_default_or_distractor_as_before(prepared):
    dataset = data.load("clevr_change", prepared)
    seen = set()
    for epoch in range(8):
        for changed, distractor in dataset.train_batches(8, 0, epoch):
            for i, pair_id in enumerate(changed.pair_ids):
                number = pair_id[:6]
                names = [
                    f"CLEVR_{kind}_{number}.png" for kind in ("default", "semantic", "nonsemantic")
                ]
                default, semantic, other = dataset.features.rows(names)
                assert torch.equal(changed.after[i], semantic) and torch.equal(
                    changed.before[i], distractor.before[i]
                )
                swapped = torch.equal(changed.before[i], other)
                assert torch.equal(distractor.after[i], default if swapped else other)
                seen.add(swapped)
    assert seen == {True, False}
    evaluation = next(dataset.eval_batches("test", 5))
    assert torch.equal(
        evaluation.before[0], dataset.features.rows(["CLEVR_default_000010.png"])[0]
    )  # never at test


def test_swapped_view_brings_its_own_captions(release):
    path = release / "change_captions.json"
    captions = json.loads(path.read_text())
    path.write_text(json.dumps(captions | {"CLEVR_nonsemantic_000000.png": ["seen from there"]}))
    scene = data.read_clevr_change(release).scenes["train"][0]
    assert scene.swapped[0].captions == ["seen from there"] != scene.pairs[0].captions


def test_quarters_of_viewpoint_difficulty(prepared):
    overlap = {str(i): 1 - i / 100 for i in range(10, 15)}
    (prepared / "change_captions_by_IOU.json").write_text(json.dumps(overlap))
    dataset = data.load("clevr_change", prepared)
    groups = data.groups_of(dataset, "test")
    assert (
        groups["view: hardest quarter"] == {"000014.png"}
        and len(groups["view: easiest quarter"]) == 1
    )
    assert not any(name.startswith("view") for name in data.groups_of(dataset, "val"))


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


def test_preparation_from_images_and_from_released_features(release, monkeypatch, capsys):
    original = data.Extractor
    state = random_resnet()
    monkeypatch.setattr(data, "Extractor", lambda name, _, device: original(name, state, device))
    for folder in data.CLEVR_FOLDERS.values():  # three scenes are enough for a ResNet on a CPU
        for path in sorted((release / folder).glob("*.png"))[3:]:
            path.unlink()
    for file in ("change_captions.json", "no_change_captions.json"):
        keep = dict(list(json.loads((release / file).read_text()).items())[:3])
        (release / file).write_text(json.dumps(keep))
    (release / "splits.json").write_text(json.dumps({"train": [0], "val": [1], "test": [2]}))
    data.main(["clevr_change", "--data_dir", str(release), "--device", "cpu"])
    dataset = data.load("clevr_change", release)
    assert dataset.grid == (1024, 14, 14) and "9 images" in capsys.readouterr().out
    for name, path in dataset.paths.items():
        folder = release / path.parent.name.replace("images", "features")
        folder.mkdir(exist_ok=True)
        np.save(folder / f"{name}.npy", np.full((4, 2, 3), float(name[-5]), np.float32))
    data.main(["clevr_change", "--data_dir", str(release), "--device", "cpu"])
    assert "features.h5 is there already" in capsys.readouterr().out
    (release / "features.h5").unlink()
    data.main(["clevr_change", "--data_dir", str(release), "--device", "cpu"])
    packed = data.load("clevr_change", release)
    assert packed.grid == (4, 2, 3)
    assert (packed.features.rows(["CLEVR_semantic_000002.png"]) == 2).all()


def test_check_reports_every_problem(prepared, monkeypatch, capsys):
    source = data.Settings(data.read_clevr_change)
    monkeypatch.setitem(data.DATASETS, "clevr_change", source)
    data.main(["clevr_change", "--data_dir", str(prepared), "--check"])
    assert "train 8, val 2, test 5" in capsys.readouterr().out
    picture = prepared / "sc_images" / "CLEVR_semantic_000004.png"
    picture.unlink()
    captions = json.loads((prepared / "change_captions.json").read_text())
    captions["CLEVR_default_000001.png"].append("a zebra")
    (prepared / "change_captions.json").write_text(json.dumps(captions))
    splits = json.loads((prepared / "splits.json").read_text())
    (prepared / "splits.json").write_text(json.dumps(splits | {"train": [*splits["train"], 0]}))
    published = replace(source, scenes={"train": 8}, types={"drop": 3, "size": 1}, words=5)
    monkeypatch.setitem(data.DATASETS, "clevr_change", published)
    with pytest.raises(SystemExit) as e:
        data.main(["clevr_change", "--data_dir", str(prepared), "--check"])
    assert e.value.code == 2 and capsys.readouterr().err.strip().splitlines() == [
        f"{prepared}: train has 9, published 8",
        f"{prepared}: size has 0, published 1",
        f"{prepared}: words has 23, published 5",
        f"there is no {picture} (1 of 45 missing); complete the release",
        f"{prepared / 'vocab.json'} is not of these captions; run: python data.py clevr_change "
        f"--data_dir {prepared}",
    ]
    for file in (prepared / "features.h5", prepared / "vocab.json"):
        file.unlink()
        assert any(
            f" at {file}; run: python data.py" in line
            for line in data.check("clevr_change", prepared)
        )


class Captioner(torch.nn.Module):
    """Says whether "after" is brighter than "before", and looks at its brightest cell."""

    cfg = SimpleNamespace(device="cpu")

    def generate(self, before, after, more=None):
        brighter = (after - before).mean((1, 2, 3)) > 0
        word = torch.where(brighter, 4, 5) if more is None else more
        return torch.stack(
            [torch.full_like(word, data.START), word, torch.full_like(word, data.END)], 1
        )

    def attention_map(self, before, after, ids, more=None):
        return {"attention": after.mean(1)}


@pytest.fixture
def captioner(tmp_path, monkeypatch):
    """Two pictures, a model and its checkpoint's content, with an extractor that takes the mean."""

    class Mean(data.Extractor):
        def __init__(self, name, state, device):
            self.preprocess = lambda image: data.preprocess_imagenet(image, 64)
            self.device = device
            self.net = lambda x: x.unflatten(2, (8, 8)).unflatten(4, (8, 8)).mean((3, 5))

    monkeypatch.setattr(data, "Extractor", Mean)
    for name in ("dark", "bright"):
        data.Image.new("RGB", (40, 20), {"dark": "black", "bright": "white"}[name]).save(
            tmp_path / f"{name}.png"
        )
    state = {
        "vocab": [*data.SPECIAL, "brighter", "darker"],
        "extractor": {"name": "mean", "state": None},
    }
    return tmp_path / "dark.png", tmp_path / "bright.png", Captioner(), state


def test_two_files_are_captioned(captioner, tmp_path, capsys, monkeypatch):
    dark, bright, *model = captioner
    data.caption_files(data.Captioner(*model), [dark, bright], None)
    data.caption_files(data.Captioner(*model), [bright, dark], str(tmp_path / "out.jpg"))
    assert capsys.readouterr().out == "brighter\ndarker\n"
    with data.Image.open(tmp_path / "out.jpg") as im:
        assert im.format == "JPEG" and im.width > 4 * 200
    there = {*tmp_path.iterdir()}
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.png").symlink_to(bright)
    for out in (
        bright,
        tmp_path / "sub/../dark.png",
        tmp_path / "link.png",
    ):  # a photograph of the user
        with pytest.raises(ValueError, match="is one of the files to read"):
            data.caption_files(data.Captioner(*model), [dark, bright], str(out))
    monkeypatch.setattr(data.Image.Image, "save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        data.caption_files(data.Captioner(*model), [dark, bright], str(tmp_path / "other.png"))
    assert {*tmp_path.iterdir()} == there | {tmp_path / "sub", tmp_path / "link.png"}
    images = tuple(map(data.read_image, (bright, dark)))  # from Python: pictures in memory
    ((caption, maps),) = data.Captioner(*model).pairs([images])
    assert caption == "darker" and maps["attention"].shape == (8, 8)


def test_the_pairs_of_a_file_are_captioned(captioner, tmp_path, capsys):
    *_, model, state = captioner
    rows = ["dark.png,bright.png,", "bright.png,dark.png,x", "dark.png,dark.png,0"]
    (tmp_path / "pairs.csv").write_text("\n".join(["before,after,id", *rows]))
    data.caption_files(
        data.Captioner(model, state), [str(tmp_path / "pairs.csv")], str(tmp_path / "out.json")
    )
    told = {"dark.png bright.png": "brighter", "x": "darker", "0": "darker"}
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: {caption}" for name, caption in told.items()
    ]
    assert data.read_predictions(tmp_path / "out.json") == told
    inputs = lambda model, state, pictures: torch.tensor(
        [4 + (picture.stem == "dark") for picture in pictures[::2]]
    )
    pairs = [captioner[:2], captioner[1::-1], captioner[:2]]
    captions = [
        caption for caption, _ in data.Captioner(model, state, inputs).pairs(pairs, batch=2)
    ]
    assert captions == ["darker", "brighter", "darker"]
    (tmp_path / "pairs.csv").write_text("before\na.png")
    for text, message in (
        ("before\na.png", "pairs.csv cannot be used .line 2 has no after"),
        ("before,after,id\n", "pairs.csv has no rows"),
        ("before,after,id\na,b,1\nc,d,1", "pairs.csv, line 3: id 1 is there already"),
    ):
        (tmp_path / "pairs.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            data.caption_files(data.Captioner(model, state), [str(tmp_path / "pairs.csv")], None)


def test_out_has_a_fitting_name_and_its_folder_is_made(captioner, tmp_path):
    dark, bright, model, state = captioner
    (tmp_path / "pairs.csv").write_text("before,after\ndark.png,bright.png")
    for files, out in (([dark, bright], "x.json"), ([str(tmp_path / "pairs.csv")], "x.png")):
        with pytest.raises(ValueError, match="--out .*expected a name that ends in"):
            data.caption_files(data.Captioner(model, state), files, str(tmp_path / out))
    for files, out in (([dark, bright], "x.png"), ([str(tmp_path / "pairs.csv")], "x.json")):
        path = tmp_path / "new" / "folder" / out
        data.caption_files(data.Captioner(model, state), files, str(path))
        assert path.exists()
