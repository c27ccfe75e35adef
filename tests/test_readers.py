"""A small release in every layout, read; the real annotation files, counted."""

import json
import pickle
import re
import shutil
import textwrap
from pathlib import Path

import data

import numpy as np
import pytest
from conftest import GRID, write_features, write_picture, write_release

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
real = pytest.mark.skipif(not SHARED.exists(), reason="the public annotation files are not here")


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def sizes(release):
    return {split: len(scenes) for split, scenes in release.scenes.items()}


def pairs(release, split):
    return [p for scene in release.scenes[split] for p in scene.pairs]


# ---- CLEVR-DC --------------------------------------------------------------------------------------------------------


def write_clevr_dc(root):
    """Twelve pairs as released: 2 a kind of change, 8 for training, 2 each for validation and test."""
    for i in range(12):
        for folder in ("bef", "aft"):
            write_picture(root / folder / f"{i}.png")
    color = ("red", "blue", "green", "gray")
    write(root / "captions.json", {str(i): [f"the {color[i % 4]} cube moved", f"a {color[i % 4]} cube, it moved."]
                                   for i in range(12)})  # fmt: skip
    write(root / "split.json", {"train": list(range(8)), "val": [8, 9], "test": [10, 11]})


def repack_clevr_dc(root):
    """As DIRL's authors pad and rename."""
    for i in range(12):
        for old, new in (("bef", "images"), ("aft", "sc_images")):
            (root / new).mkdir(exist_ok=True)
            (root / old / f"{i}.png").rename(root / new / f"{i:06d}.png")
    (root / "bef").rmdir()
    captions = json.loads((root / "captions.json").read_text())
    write(root / "change_captions.json", {f"{int(i):06d}.png": c for i, c in captions.items()})
    (root / "captions.json").unlink()
    (root / "split.json").rename(root / "splits.json")


def test_clevr_dc_as_released_and_as_repacked(tmp_path):
    write_clevr_dc(tmp_path)
    release = data.read_clevr_dc(tmp_path)
    assert sizes(release) == {"train": 8, "val": 2, "test": 2} and release.scenes["val"][0].swapped is None
    assert pairs(release, "test")[0] == data.Pair(
        "000010.png", "bef/10.png", "aft/10.png", ["the green cube moved", "a green cube, it moved."]
    )
    assert all(path.exists() for path in release.paths.values()) and len(release.paths) == 24
    assert release.kinds["no change"] == {"000010.png", "000011.png"} and release.kinds["add"] == {"000004.png", "000005.png"}
    repack_clevr_dc(tmp_path)
    again = data.read_clevr_dc(tmp_path)
    assert pairs(again, "test")[1].before == "images/000011.png" and all(path.exists() for path in again.paths.values())
    assert [p.captions for p in pairs(again, "train")] == [p.captions for p in pairs(release, "train")]
    write(tmp_path / "splits.json", {"train": [0, 3], "val": [5], "test": [11]})  # a part: nobody knows the kinds
    assert data.read_clevr_dc(tmp_path).kinds == {}
    write(tmp_path / "splits.json", {"train": [0, 12], "val": [5], "test": [11]})
    with pytest.raises(ValueError, match=r"change_captions.json: no captions for 12"):
        data.read_clevr_dc(tmp_path)


def test_clevr_dc_is_prepared_from_released_features(tmp_path, capsys):
    write_clevr_dc(tmp_path)
    repack_clevr_dc(tmp_path)
    for n, path in enumerate(sorted(tmp_path.glob("*images/*.png"))):
        folder = tmp_path / path.parent.name.replace("images", "features")
        folder.mkdir(exist_ok=True)
        np.save(folder / f"{path.name}.npy", np.full(GRID, n, np.float32))
    data.main(["clevr_dc", "--data_dir", str(tmp_path), "--device", "cpu"])
    words = 4 + len("the a red blue green gray cube moved it ,".split())
    assert f"24 images, {words} words" in capsys.readouterr().out
    dataset = data.load("clevr_dc", tmp_path)
    assert dataset.features.rows(["images/000003.png", "sc_images/000003.png"])[:, 0, 0, 0].tolist() == [3, 15]


@real
def test_real_clevr_dc_split(tmp_path):
    splits = json.loads((SHARED / "clevr_dc/split.json").read_text())
    write(tmp_path / "split.json", splits)
    write(tmp_path / "captions.json", {str(i): ["a caption"] for ids in splits.values() for i in ids})
    release = data.read_clevr_dc(tmp_path)
    assert sizes(release) == data.DATASETS["clevr_dc"].scenes and not release.notes
    test = {p.id for p in pairs(release, "test")}
    assert all(len(ids & test) == 800 for ids in release.kinds.values())


def test_a_data_set_of_one_pair_a_scene_makes_batches(tmp_path):
    write_clevr_dc(tmp_path)
    write_features("clevr_dc", tmp_path)
    dataset = data.load("clevr_dc", tmp_path)
    assert dataset.grid == GRID and dataset.lengths == [2 + 6] and dataset.steps(3) == 3
    epoch = [streams for streams in dataset.train_batches(3, seed=0, epoch=0)]
    assert [len(streams) for streams in epoch] == [1, 1, 1] and not epoch[0][0].single
    assert sorted(i for (batch,) in epoch for i in batch.ids) == [f"{i:06d}.png" for i in range(8)]
    drawn = {text for e in range(6) for (batch,) in dataset.train_batches(3, 0, e) for text in batch.texts}
    assert drawn == {c for p in dataset.pairs("train") for c in p.captions}  # every caption has its turn
    assert [p.id for p in dataset.pairs("test")] == ["000010.png", "000011.png"]
    assert set(dataset.examples("test", 5)) == {"no change"} and dataset.groups("test") == dataset.kinds
    assert np.array_equal(next(dataset.eval_batches("val", 2)).after[1], dataset.features.rows(["aft/9.png"])[0])


# ---- Spot-the-Diff ---------------------------------------------------------------------------------------------------

SPOT = {"train": [("7", ["a man left", ""]), ("12", ["the red car is gone"]), ("7", ["no man"])],
        "val": [("3", ["one person " * 40, "x y"])], "test": [("100", [""])]}  # fmt: skip


def write_spot(root, folder="annotations", images="resized_images"):
    for split, rows in SPOT.items():
        write(root / folder / f"{split}.json", [{"img_id": i, "sentences": found} for i, found in rows])
        for i, _ in rows:
            for name in (f"{i}.png", f"{i}_2.png"):
                write_picture(root / images / name)


def test_spot_the_diff_groups_the_rows_of_an_id(tmp_path):
    write_spot(tmp_path / "official")
    release = data.read_spot_the_diff(tmp_path / "official")
    assert sizes(release) == {"train": 2, "val": 1, "test": 1}
    assert pairs(release, "train")[0] == data.Pair(
        "7", "resized_images/7.png", "resized_images/7_2.png", ["a man left", "", "no man"]
    )
    assert pairs(release, "test")[0].captions == [""] and all(path.exists() for path in release.paths.values())
    write_spot(tmp_path / "clip4idc", folder="", images="images")
    other = data.read_spot_the_diff(tmp_path / "clip4idc")
    assert pairs(other, "train")[1].after == "images/12_2.png" and all(path.exists() for path in other.paths.values())
    (tmp_path / "official" / "annotations" / "test.json").write_text('[{"img_id": "1"}]')
    with pytest.raises(ValueError, match=r"test.json: item 0 has no 'sentences'"):
        data.read_spot_the_diff(tmp_path / "official")
    (tmp_path / "official" / "annotations" / "test.json").write_text('[{"img_id": "1", "sentences": []}]')
    with pytest.raises(ValueError, match=r"test.json: no captions for img_id 1; expected a list of strings, found \[\]"):
        data.read_spot_the_diff(tmp_path / "official")


@real
def test_real_spot_the_diff(tmp_path):
    """Ids, vocabularies and longest captions as published; the test split, which is not here, is one made-up row."""
    for split in ("train", "val"):
        write(tmp_path / "annotations" / f"{split}.json", (SHARED / f"spot_the_diff/annotations/{split}.json").read_text())
    write(tmp_path / "annotations/test.json", [{"img_id": "99999", "sentences": ["x"]}])
    release = data.read_spot_the_diff(tmp_path)
    assert sizes(release) == {"train": 8566, "val": 1493, "test": 1} and not release.notes
    assert sum(not c for p in pairs(release, "train") + pairs(release, "val") for c in p.captions) == 59
    vocab = data.build_vocab("spot_the_diff", tmp_path, release)
    assert len(vocab) == data.DATASETS["spot_the_diff"].words == 2059 and "" in vocab.ids
    captions = [c for p in pairs(release, "train") for c in p.captions]
    assert len(data.Vocab.of(captions, min_count=5)) == 743


# ---- Image Editing Request -------------------------------------------------------------------------------------------


def item(uid, before, after, *captions):
    return {"uid": uid, "img0": before, "img1": after, "sents": list(captions)}


def test_image_editing_request_is_keyed_by_uid(tmp_path):
    write(tmp_path / "train.json", [item("A_1", "a.jpg", "b.jpg", "Zoom in"), item("A_2", "a.jpg", "b.jpg", "crop, so...")])
    write(tmp_path / "valid.json", [item("A_3", "a.jpg", "c.gif", "x", "y", "z")])
    write(tmp_path / "test.json", [item("B_1", "a.jpg", "c.gif", "x"), item("B_2", "d.png", "c.gif", "x")])
    release = data.read_image_editing(tmp_path)
    assert [p.id for p in pairs(release, "train")] == ["A_1", "A_2"] and set(release.paths) == {
        "a.jpg", "b.jpg", "c.gif", "d.png"}  # fmt: skip
    assert release.notes == ["1 image pairs are both in val and test (1 items of test)"]
    assert release.paths["c.gif"] == tmp_path / "c.gif"
    (tmp_path / "images").mkdir()
    assert data.read_image_editing(tmp_path).paths["c.gif"] == tmp_path / "images" / "c.gif"
    assert data.tokenize_lower(" Crop, PLEASE... it's  50%") == ["crop", ",", "please", "...", "it", "'", "s", "50", "%"]
    write(tmp_path / "test.json", [item("B_1", "a.jpg", "c.gif", 5)])
    with pytest.raises(ValueError, match=r"test.json: no captions for uid B_1; expected a list of strings, found \[5\]"):
        data.read_image_editing(tmp_path)
    (tmp_path / "test.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"test.json is missing"):
        data.read_image_editing(tmp_path)


@real
def test_real_image_editing_request(tmp_path):
    for split in ("train", "valid"):
        write(tmp_path / f"{split}.json", (SHARED / f"image_editing_request/{split}.json").read_text())
    write(tmp_path / "test.json", [item("T_1", "a.jpg", "b.jpg", "x")])
    release = data.read_image_editing(tmp_path)
    assert sizes(release) == {"train": 3061, "val": 383, "test": 1}
    assert sum(len(p.captions) for split in ("train", "val") for p in pairs(release, split)) == 3061 + 1149
    assert release.notes == ["2 image pairs are both in train and val (2 items of val)"]
    vocab = data.build_vocab("image_editing_request", tmp_path, release)
    assert len(vocab) == data.DATASETS["image_editing_request"].words == 808
    captions = [c for split in ("train", "val") for p in pairs(release, split) for c in p.captions]
    assert 2 + max(len(vocab.split(c)) for c in captions) == 60


# ---- LEVIR-CC --------------------------------------------------------------------------------------------------------


def levir_image(split, number, *captions, **more):
    sentences = [{"raw": f" {c} .", "tokens": c.split(" ")} for c in captions]
    return {"filename": f"{split}_{number:06d}.png", "split": split, "sentences": sentences, **more}


def test_levir_cc(tmp_path):
    same = "the scene is the same as before"
    images = [levir_image("train", 1, "a lake appears", "a  lake", changeflag=1),
              levir_image("val", 1, same, "a lake", changeflag=0), levir_image("test", 1, "one villa", same),
              levir_image("test", 2, *["a lake appears"] * 5)]  # fmt: skip
    for sentence in images[3]["sentences"]:
        del sentence["tokens"]
    write(tmp_path / "LevirCCcaptions.json", {"images": images})
    release = data.read_levir_cc(tmp_path)
    assert pairs(release, "train") == [
        data.Pair("train_000001.png", "train/A/train_000001.png", "train/B/train_000001.png", ["a lake appears", "a lake"])
    ]
    assert release.paths["test/B/test_000002.png"] == tmp_path / "images/test/B/test_000002.png"
    assert release.kinds["no change"] == {"val_000001.png", "test_000001.png"}  # the second by its words
    assert pairs(release, "test")[1].captions == ["a lake appears"] * 5
    vocab = data.build_vocab("levir_cc", tmp_path, release)  # more than five times, in all splits
    assert vocab.words[4:] == ["a", "appears", "lake"] and vocab.encode("a villa", 4) == [2, 4, 1, 3]
    assert vocab.split("a " * 60) == ["a"] * 50
    write(tmp_path / "LevirCCcaptions.json", {"images": [levir_image("restval", 1, "x")]})
    with pytest.raises(ValueError, match=r"restval_000001.png is in split 'restval'"):
        data.read_levir_cc(tmp_path)


# ---- birds -----------------------------------------------------------------------------------------------------------


def bird_row(before, after, split, text):
    url = "https://static.inaturalist.org/photos/{}/large.jpg?15"
    row = ["obs", url.format(before), "species", "base", "obs", url.format(after), "species", "visual", split, "1", text]
    return "\t".join(row)


BIRD_COLUMNS = ("img1ObservationURL img1ImgURL img1Species img1Selection img2ObservationURL img2ImgURL img2Species "
                "img2Selection split annN description").replace(" ", "\t")  # fmt: skip


def test_birds_to_words_reads_the_pairs_whose_photographs_are_here(tmp_path, capsys):
    rows = [bird_row(1, 2, "train", 'Animal 1 is "big". Animal 2'), bird_row(1, 2, "train", "Both are red"),
            bird_row(2, 1, "train", '"Animal 1 has no tail'), bird_row(1, 2, "val", "x"), bird_row(3, 1, "test", "long " * 90),
            bird_row(3, 4, "test", "y")]  # fmt: skip
    write(tmp_path / "birds-to-words-v1.0.tsv", "\n".join([BIRD_COLUMNS, *rows]))
    with pytest.raises(ValueError, match=r"no pairs in train; .*train 0 of 2, val 0 of 1, test 0 of 2.*--manifest"):
        data.read_birds_to_words(tmp_path)
    for photo in (1, 2, 3):
        write_picture(tmp_path / "images" / f"{photo}.jpg")
    release = data.read_birds_to_words(tmp_path)
    assert sizes(release) == {"train": 2, "val": 1, "test": 1} and "test 1 of 2" in release.notes[0]
    assert release.notes[1:] == ["1 image pairs are both in train and val (1 items of val)"]
    first, second = pairs(release, "train")  # the order of the images is part of the pair
    assert first == data.Pair("1.jpg_2.jpg", "1.jpg", "2.jpg", ['animal 1 is " big " . animal 2', "both are red"])
    assert (second.before, second.captions) == ("2.jpg", ['" animal 1 has no tail'])
    vocab = data.build_vocab("birds_to_words", tmp_path, release)
    assert len(vocab.encode(pairs(release, "test")[0].captions[0], 79)) == 79 and "long" not in vocab.ids
    data.main(["birds_to_words", "--data_dir", str(tmp_path), "--manifest"])
    assert "4 photographs, of which 3" in capsys.readouterr().out
    lines = (tmp_path / "expected_images.tsv").read_text().splitlines()
    assert lines[3] == "4.jpg\thttps://static.inaturalist.org/photos/4/large.jpg?15\tmissing" and len(lines) == 4
    assert data.photo_file("https://elsewhere.org/a/b.jpeg") == "https-elsewhere-org-a-b-jpeg.jpg"


def write_cub(root):
    names = ["001.Gull/Gull_0001.jpg", "001.Gull/Gull_0002.jpg", "002.Tern/Tern_0001.jpg"]
    write(root / "images.txt", "".join(f"{n} {name}\n" for n, name in enumerate(names, 1)))
    write(root / "trainvalclasses.txt", "001.Gull\n")
    write(root / "testclasses.txt", "002.Tern\n")
    for name in names:
        write_picture(root / "images" / name)
        write(root / "text_c10" / name.replace(".jpg", ".txt"), "A white bird.\r\n\nthis bird, it has a red bill\n")
        write(root / "text_c10" / name.replace(".jpg", ".t7"), "not text")


def test_cub_has_single_images(tmp_path):
    write_cub(tmp_path)
    release = data.read_cub(tmp_path)
    assert sizes(release) == {"train": 2, "val": 1, "test": 0}
    assert pairs(release, "val")[0] == data.Pair("002.Tern/Tern_0001.jpg", "002.Tern/Tern_0001.jpg", None,
                                                 ["a white bird .", "this bird , it has a red bill"])  # fmt: skip
    write_features("cub", tmp_path)
    dataset = data.load("cub", tmp_path)
    (batch,), = dataset.train_batches(4, seed=0, epoch=0)
    assert batch.single and batch.before.all() and not batch.after.any() and batch.after.shape == (2, *GRID)
    before, after = dataset.images(dataset.pairs("val")[0])
    assert before.size == after.size == (16, 12) and after.getextrema() == ((0, 0),) * 3
    write(tmp_path / "testclasses.txt", "003.Auk\n")
    with pytest.raises(ValueError, match=r"002.Tern of images.txt is neither in trainvalclasses.txt nor"):
        data.read_cub(tmp_path)


def write_nabirds(root):
    files = {f"{n:08d}-aaaa": f"{c:04d}/{n:08d}aaaa.jpg" for n, c in enumerate((817, 295, 817, 1010, 295, 817))}
    write(root / "images.txt", "".join(f"{i} {name}\n" for i, name in files.items()))
    write(root / "image_class_labels.txt", "".join(f"{i} {int(name[:4])}\n" for i, name in files.items()))
    write(root / "train_test_split.txt", "".join(f"{i} {int(i[7] != '5')}\n" for i in files))
    write(root / "classes.txt", "0 Birds\n295 Ross's Goose\n817 House Finch (Adult Male)\n1010 Verdin\n")
    for name in files.values():
        write_picture(root / "images" / name)


def test_nabirds_classes_are_the_leaves(tmp_path):
    write_nabirds(tmp_path)
    release = data.read_nabirds(tmp_path)
    assert release.classes == ["Ross's Goose", "House Finch (Adult Male)", "Verdin"]
    assert [c for _, c in release.images["train"]] == [1, 0, 1, 2, 0]
    assert release.images["test"] == [("0817/00000005aaaa.jpg", 1)]
    assert all(path.exists() for path in release.paths.values())
    with pytest.raises(FileNotFoundError, match=r"run: python data.py nabirds"):
        data.load_classified("nabirds", tmp_path)
    names = sorted(release.paths)
    x = np.random.default_rng(1).random((len(names), *GRID)).astype(np.float32)
    data.write_features(tmp_path / "features.h5", names, [x], "resnet101-layer4", data.IMAGENET_PREPROCESSING)
    again, features = data.load_classified("nabirds", tmp_path)
    assert again == release and features.rows([release.images["train"][3][0]]).shape == (1, *GRID)
    with pytest.raises(ValueError, match=r"nabirds has no captions"):
        data.load("nabirds", tmp_path)


def test_class_pairs_are_half_alike_and_a_function_of_the_seed():
    images = [(f"{i}.jpg", i % 10) for i in range(200)] + [("alone.jpg", 99)]
    made = data.class_pairs(images, seed=3)
    assert made == data.class_pairs(images, seed=3) != data.class_pairs(images, seed=4)
    assert [a for a, _ in made] == images and all(a != b for a, b in made)
    alike = [a[1] == b[1] for a, b in made]
    assert 99 <= sum(alike) <= 100 and not alike[-1]
    with pytest.raises(ValueError, match=r"two classes"):
        data.class_pairs(images[::10][:5], seed=0)


# ---- IDC's repack ----------------------------------------------------------------------------------------------------


def write_repack(name, root, to, protocol=4):
    """A release of `root`, repacked into `to`: lines, and pickles of features, where image n by name holds n, n + 1/16 ..."""
    release, lines, folder = data.DATASETS[name].read(root), {}, "photos/" if name == "birds_to_words" else ""
    bare = lambda image: image.rsplit(".", 1)[0]
    if name == "nabirds":
        for split, images in (("train", release.images["train"]), ("val", release.images["test"])):
            around = zip(images, images[1:] + images[:1], strict=True)
            lines[split] = [{"img1": bare(a), "img2": bare(b), "class_id1": c, "class_id2": d, "label": int(c == d)}
                            for (a, c), (b, d) in around]  # fmt: skip
    for split in release.scenes if name != "nabirds" else ():
        of_split = pairs(release, split)
        if name == "clevr_change":
            lines[split] = [{"img1": bare(p.before), "img2": bare(p.after), "sentences": p.captions} for p in of_split]
            continue
        rows = [({"img1": bare(p.before), "img2": bare(p.after)} if p.after else {"img": bare(p.before)},
                 [c.split(" ") for c in p.captions]) for p in of_split]  # fmt: skip
        if split == "train":  # a line each caption
            lines[split] = [images | {"description": words} for images, told in rows for words in told]
        else:
            lines[split] = [images | {"description": told} for images, told in rows]
    for split, rows in lines.items():
        write(to / f"{split}.json", "".join(json.dumps(row) + "\n" for row in rows))
    kinds = {}
    for n, (image, path) in enumerate(sorted(release.paths.items())):
        file = f"full/{path.parent.name.replace('images', 'img')}.pkl" if name == "clevr_change" else "full_img.pkl"
        x = np.broadcast_to(n + np.arange(9, dtype=np.float32).reshape(3, 3) / 16, (4, 3, 3)).copy()
        kinds.setdefault(file, {})[folder + image if folder else bare(image)] = x.reshape(4, 9) if name == "nabirds" else x
    for file, arrays in kinds.items():
        (to / file).parent.mkdir(exist_ok=True)
        (to / file).write_bytes(pickle.dumps(arrays, protocol=protocol))


def write_birds(root):
    rows = [bird_row(i, i + 1, split, text) for i, split in enumerate(data.SPLITS) for text in ("it is red .", "no beak")]
    write(root / "birds-to-words-v1.0.tsv", "\n".join([BIRD_COLUMNS, *rows]))
    for photo in range(4):
        write_picture(root / "images" / f"{photo}.jpg")


RELEASED = {"clevr_change": write_release, "birds_to_words": write_birds, "cub": write_cub, "nabirds": write_nabirds}


@pytest.mark.parametrize("name", ["clevr_change", "birds_to_words", "cub"])
def test_idcs_repack_reads_as_the_release(name, tmp_path):
    RELEASED[name](tmp_path / "release")
    write_repack(name, tmp_path / "release", tmp_path / "repack")
    if name == "clevr_change":
        shutil.copy(tmp_path / "release" / "type_mapping.json", tmp_path / "repack")
    release, again = (data.read_release(name, tmp_path / kind) for kind in ("release", "repack"))
    assert again.scenes == release.scenes and pairs(again, "train")
    assert (again.groups, again.kinds, again.notes) == (release.groups, release.kinds, release.notes)
    relative = {image: path.relative_to(tmp_path / "release") for image, path in release.paths.items()}
    assert {image: path.relative_to(tmp_path / "repack") for image, path in again.paths.items()} == relative


def test_idcs_clevr_change_without_types(release, tmp_path):
    write_repack("clevr_change", release, tmp_path)
    files, whole = data.read_clevr_change(tmp_path), data.read_clevr_change(release)
    assert files.groups == {name: whole.groups[name] for name in ("semantic change", "only distractor")}
    assert files.kinds == {"change": whole.groups["semantic change"], "no change": whole.groups["only distractor"]}
    text = (tmp_path / "val.json").read_text()
    write(tmp_path / "val.json", text.replace('", "img2', '.png", "img2'))  # a name with its ending
    assert data.read_clevr_change(tmp_path).scenes == files.scenes
    write(tmp_path / "val.json", text.split("\n", 1)[1])
    with pytest.raises(ValueError, match=r"\(semantic pairs\): no captions for CLEVR_default_000008.png"):
        data.read_clevr_change(tmp_path)
    (tmp_path / "val.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"val.json is missing"):
        data.read_clevr_change(tmp_path)


def test_idcs_nabirds_are_the_images_of_its_pairs(tmp_path):
    write_nabirds(tmp_path / "release")
    write_repack("nabirds", tmp_path / "release", tmp_path / "repack")
    release, again = (data.read_nabirds(tmp_path / kind) for kind in ("release", "repack"))
    assert {k: sorted(v) for k, v in again.images.items()} == {"train": sorted(release.images["train"]),
                                                              "val": release.images["test"]}  # fmt: skip
    assert len(again.classes) == 555 and set(again.paths) == set(release.paths)
    rows = (tmp_path / "repack" / "val.json").read_text()
    for old, new in (('"class_id1": 1', '"class_id1": 2'), ('"class_id1": 1', '"class_id1": 555')):
        write(tmp_path / "repack" / "val.json", rows.replace(old, new))
        with pytest.raises(ValueError, match=r"val.json, line 1: 0817/00000005aaaa has the class (1|555)"):
            data.read_nabirds(tmp_path / "repack")


# ---- your own pairs --------------------------------------------------------------------------------------------------


def test_your_own_pairs_from_csv_and_json(tmp_path):
    csv_file = "before,after,captions,split\na.png,b.png,The gate opened.| it is open,train\na.png,b.png,open now,train\n"
    write(tmp_path / "pairs.csv", csv_file + 'c.png,sub/d.jpg,"red, then blue",val\nb.png,d.jpg,same,test\n')
    release = data.read_pairs(tmp_path)
    assert pairs(release, "train") == [
        data.Pair("a.png b.png", "a.png", "b.png", ["The gate opened.", "it is open", "open now"])
    ]
    assert pairs(release, "val")[0].captions == ["red, then blue"]
    assert release.paths["sub/d.jpg"] == tmp_path / "sub/d.jpg"
    rows = [{"before": p.before, "after": p.after, "captions": p.captions, "split": split}
            for split in data.SPLITS for p in pairs(release, split)]  # fmt: skip
    write(tmp_path / "pairs.json", rows)
    assert data.read_pairs(tmp_path) == release
    write(tmp_path / "pairs.json", [rows[0] | {"id": "gate", "captions": "opened"}, *rows[1:]])
    assert pairs(data.read_pairs(tmp_path), "train") == [data.Pair("gate", "a.png", "b.png", ["opened"])]
    write(tmp_path / "pairs.json", rows[:2])
    with pytest.raises(ValueError, match=r"no pairs in test"):
        data.read_pairs(tmp_path)
    for row, line in (
        ({"captions": [" "]}, "no captions for a.png b.png"), ({"captions": []}, "no captions for a.png b.png"),
        ({"before": ""}, "item 3 has the images '' and 'b.png'"), ({"after": 7}, "item 3 has the images 'a.png' and 7"),
    ):  # fmt: skip
        write(tmp_path / "pairs.json", [*rows[:3], rows[0] | row])
        with pytest.raises(ValueError, match=line):
            data.read_pairs(tmp_path)
    write(tmp_path / "pairs.json", [rows[0] | {"id": 5}, rows[0] | {"id": 5, "after": "c.png"}])
    with pytest.raises(ValueError, match=r"id 5 is of a.png, b.png and of a.png, c.png; expected one pair"):
        data.read_pairs(tmp_path)
    write(tmp_path / "pairs.json", [rows[0] | {"captions": [" "]}])
    with pytest.raises(ValueError, match=r"no captions for a.png b.png"):
        data.read_pairs(tmp_path)
    (tmp_path / "pairs.json").unlink()
    write(tmp_path / "pairs.csv", "before,after,split\na,b,train\n")
    with pytest.raises(ValueError, match=r"pairs.csv"):
        data.read_pairs(tmp_path)
    (tmp_path / "pairs.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither pairs.json nor pairs.csv"):
        data.read_pairs(tmp_path)


def blocks(title):
    """The indented or fenced examples of a section of the README."""
    readme = Path(data.__file__).with_name("README.md").read_text(encoding="utf-8")
    section = readme.split(f"### {title}\n")[1].split("\n### ")[0]
    indented = [textwrap.dedent(text) for text in re.findall(r"(?:^    .*\n)+", section.split("```")[0], re.M)]
    return indented, re.findall(r"```python\n(.*?)```", section, re.S)


def test_the_readmes_examples_of_your_own_pairs(tmp_path):
    (csv_file, json_file, _), (reader,) = blocks("Your own pairs")
    write(tmp_path / "pairs.csv", csv_file)
    release = data.read_pairs(tmp_path)
    assert sizes(release) == {"train": 2, "val": 1, "test": 1}
    assert pairs(release, "train")[1].captions == ["a red car left, the van stayed", "the red car is gone"]
    assert pairs(release, "train")[0] in [
        data.Pair(f"{r['before']} {r['after']}", r["before"], r["after"], r["captions"]) for r in json.loads(json_file)
    ]
    namespace = vars(data) | {"DATASETS": {}}
    exec(reader, namespace)
    gates = {split: [["a.png", "b.png", "open"], ["c.png", "d.png", "open"]] for split in data.SPLITS}
    write(tmp_path / "gates.json", gates)
    source = namespace["DATASETS"]["gates"]
    assert pairs(source.read(tmp_path), "val")[1] == data.Pair("c.png d.png", "c.png", "d.png", ["open"])
    assert source.read(tmp_path).notes and source.min_count == 2
