"""A small release in every layout, read; the real annotation files, counted."""

import json
import pickle
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from conftest import GRID, write_features, write_picture

import data
import scorer_cbr

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
real = pytest.mark.skipif(not SHARED.exists(), reason="the public annotation files are not here")


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def sizes(release):
    return {split: len(scenes) for split, scenes in release.scenes.items()}


def pairs(release, split):
    return [p for scene in release.scenes[split] for p in scene.pairs]


# ---- CLEVR-DC ------------------------------------------------------------------------------------


def write_clevr_dc(root):
    """Twelve pairs as released: 2 a kind of change, 8 for training, 2 each for validation and
    test."""
    for i in range(12):
        for folder in ("bef", "aft"):
            write_picture(root / folder / f"{i}.png")
    color = ("red", "blue", "green", "gray")
    write(
        root / "captions.json",
        {
            str(i): [f"the {color[i % 4]} cube moved", f"a {color[i % 4]} cube, it moved."]
            for i in range(12)
        },
    )
    write(root / "split.json", {"train": list(range(8)), "val": [8, 9], "test": [10, 11]})


def test_clevr_dc(tmp_path):
    write_clevr_dc(tmp_path)
    release, green = (
        data.read_clevr_dc(tmp_path),
        ["the green cube moved", "a green cube, it moved."],
    )
    assert (
        sizes(release) == {"train": 8, "val": 2, "test": 2}
        and release.scenes["val"][0].swapped is None
    )
    assert pairs(release, "test")[0] == data.Pair("000010.png", "bef/10.png", "aft/10.png", green)
    assert all(path.exists() for path in release.paths.values()) and len(release.paths) == 24
    assert release.kinds["no change"] == {"000010.png", "000011.png"}
    assert release.kinds["add"] == {"000004.png", "000005.png"}
    write(
        tmp_path / "split.json", {"train": [0, 3], "val": [5], "test": [11]}
    )  # a part: nobody knows the kinds
    assert data.read_clevr_dc(tmp_path).kinds == {}
    write(tmp_path / "split.json", {"train": [0, 12], "val": [5], "test": [11]})
    with pytest.raises(ValueError, match=r"captions.json cannot be used \(12 is missing"):
        data.read_clevr_dc(tmp_path)


@real
def test_real_clevr_dc_split(tmp_path):
    splits = json.loads((SHARED / "clevr_dc/split.json").read_text())
    write(tmp_path / "split.json", splits)
    write(
        tmp_path / "captions.json", {str(i): ["a caption"] for ids in splits.values() for i in ids}
    )
    release = data.read_clevr_dc(tmp_path)
    assert sizes(release) == data.DATASETS["clevr_dc"].scenes and not release.notes
    test = {p.id for p in pairs(release, "test")}
    assert all(len(ids & test) == 800 for ids in release.kinds.values())


def test_a_data_set_of_one_pair_a_scene_makes_batches(tmp_path):
    write_clevr_dc(tmp_path)
    write_features("clevr_dc", tmp_path)
    dataset = data.load("clevr_dc", tmp_path)
    assert dataset.grid == GRID and dataset.lengths == [2 + 6] and dataset.steps(3) == 3
    epoch = [batches for batches in dataset.train_batches(3, seed=0, epoch=0)]
    assert [len(batches) for batches in epoch] == [1, 1, 1] and not epoch[0][0].single
    assert sorted(i for (batch,) in epoch for i in batch.pair_ids) == [
        f"{i:06d}.png" for i in range(8)
    ]
    drawn = {
        text
        for e in range(6)
        for (batch,) in dataset.train_batches(3, 0, e)
        for text in batch.texts
    }
    assert drawn == {
        c for p in dataset.pairs("train") for c in p.captions
    }  # every caption has its turn
    assert [p.id for p in dataset.pairs("test")] == ["000010.png", "000011.png"]
    assert data.groups_of(dataset, "test") == dataset.kinds
    assert np.array_equal(
        next(dataset.eval_batches("val", 2)).after[1], dataset.features.rows(["aft/9.png"])[0]
    )


# ---- Spot-the-Diff -------------------------------------------------------------------------------

SPOT = {
    "train": [("7", ["a man left", ""]), ("12", ["the red car is gone"]), ("7", ["no man"])],
    "val": [("3", ["one person " * 40, "x y"])],
    "test": [("100", [""])],
}


def write_spot(root):
    for split, rows in SPOT.items():
        write(
            root / "annotations" / f"{split}.json",
            [{"img_id": i, "sentences": found} for i, found in rows],
        )
        for i, _ in rows:
            for name in (f"{i}.png", f"{i}_2.png"):
                write_picture(root / "resized_images" / name)


def test_spot_the_diff_groups_the_rows_of_an_id(tmp_path):
    write_spot(tmp_path / "official")
    release = data.read_spot_the_diff(tmp_path / "official")
    assert sizes(release) == {"train": 2, "val": 1, "test": 1}
    texts = ["a man left", "", "no man"]
    assert pairs(release, "train")[0] == data.Pair(
        "7", "resized_images/7.png", "resized_images/7_2.png", texts
    )
    assert pairs(release, "test")[0].captions == [""] and all(
        path.exists() for path in release.paths.values()
    )
    write(tmp_path / "official/annotations/test.json", [{"img_id": "1"}])
    with pytest.raises(ValueError, match=r"test.json cannot.*sentences is missing"):
        data.read_spot_the_diff(tmp_path / "official")
    write(tmp_path / "official/annotations/test.json", [{"img_id": "1", "sentences": []}])
    with pytest.raises(ValueError, match=r"official: no captions for 1"):
        data.read_release("spot_the_diff", tmp_path / "official")


@real
def test_real_spot_the_diff(tmp_path):
    """Ids, vocabularies and longest captions as published; the test split, which is not here, is
    one made-up row."""
    for file in ("annotations/train.json", "annotations/val.json"):
        write(tmp_path / file, (SHARED / "spot_the_diff" / file).read_text())
    write(tmp_path / "annotations/test.json", [{"img_id": "99999", "sentences": ["x"]}])
    release = data.read_spot_the_diff(tmp_path)
    assert sizes(release) == {"train": 8566, "val": 1493, "test": 1} and not release.notes
    assert (
        sum(not c for p in pairs(release, "train") + pairs(release, "val") for c in p.captions)
        == 59
    )
    vocab = data.vocab_of("spot_the_diff", release)
    assert len(vocab) == data.DATASETS["spot_the_diff"].words == 2059 and "" in vocab.index
    captions = [c for p in pairs(release, "train") for c in p.captions]
    assert len(data.Vocab.from_captions(captions, min_count=5)) == 743


# ---- Image Editing Request -----------------------------------------------------------------------


def item(uid, before, after, *captions):
    return {"uid": uid, "img0": before, "img1": after, "sents": list(captions)}


def test_image_editing_request_is_keyed_by_uid(tmp_path):
    train = [item("A_1", "a.jpg", "b.jpg", "Zoom in"), item("A_2", "a.jpg", "b.jpg", "crop, so...")]
    write(tmp_path / "train.json", train)
    write(tmp_path / "valid.json", [item("A_3", "a.jpg", "c.gif", "x", "y", "z")])
    write(
        tmp_path / "test.json",
        [item("B_1", "a.jpg", "c.gif", "x"), item("B_2", "d.png", "c.gif", "x")],
    )
    release = data.read_image_editing(tmp_path)
    assert [p.id for p in pairs(release, "train")] == ["A_1", "A_2"] and set(release.paths) == {
        "a.jpg",
        "b.jpg",
        "c.gif",
        "d.png",
    }
    assert release.paths["c.gif"] == tmp_path / "c.gif"
    (tmp_path / "images").mkdir()
    assert data.read_image_editing(tmp_path).paths["c.gif"] == tmp_path / "images" / "c.gif"
    assert (
        data.tokenize_lower(" Crop, PLEASE... it's  50%") == "crop , please ... it ' s 50 %".split()
    )
    write(tmp_path / "test.json", [item("B_1", "a.jpg", "c.gif", 5)])
    with pytest.raises(ValueError, match=r"test.json cannot be used \(expected a list of strings"):
        data.read_image_editing(tmp_path)
    (tmp_path / "test.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"No such file.*test.json"):
        data.read_image_editing(tmp_path)


@real
def test_real_image_editing_request(tmp_path):
    for split in ("train", "valid"):
        write(
            tmp_path / f"{split}.json", (SHARED / f"image_editing_request/{split}.json").read_text()
        )
    write(tmp_path / "test.json", [item("T_1", "a.jpg", "b.jpg", "x")])
    release = data.read_image_editing(tmp_path)
    assert sizes(release) == {"train": 3061, "val": 383, "test": 1}
    assert (
        sum(len(p.captions) for split in ("train", "val") for p in pairs(release, split))
        == 3061 + 1149
    )
    vocab = data.vocab_of("image_editing_request", release)
    assert len(vocab) == data.DATASETS["image_editing_request"].words == 808
    captions = [c for split in ("train", "val") for p in pairs(release, split) for c in p.captions]
    assert 2 + max(len(vocab.split(c)) for c in captions) == 60


# ---- LEVIR-CC ------------------------------------------------------------------------------------


def levir_image(split, number, *captions, **more):
    sentences = [{"raw": f" {c} .", "tokens": c.split(" ")} for c in captions]
    return {"filename": f"{split}_{number:06d}.png", "split": split, "sentences": sentences, **more}


def test_levir_cc(tmp_path):
    same = "the scene is the same as before"
    images = [
        levir_image("train", 1, "a lake appears", "a  lake", changeflag=1),
        levir_image("val", 1, same, "a lake", changeflag=0),
        levir_image("test", 1, "one villa", same),
        levir_image("test", 2, *["a lake appears"] * 5),
    ]
    write(tmp_path / "LevirCCcaptions.json", {"images": images})
    release = data.read_levir_cc(tmp_path)
    name, texts = "train_000001.png", ["a lake appears", "a lake"]
    assert pairs(release, "train") == [data.Pair(name, f"train/A/{name}", f"train/B/{name}", texts)]
    assert release.paths["test/B/test_000002.png"] == tmp_path / "images/test/B/test_000002.png"
    assert release.kinds["no change"] == {
        "val_000001.png",
        "test_000001.png",
    }  # the second by its words
    assert pairs(release, "test")[1].captions == ["a lake appears"] * 5
    vocab = data.vocab_of("levir_cc", release)  # more than five times, in all splits
    assert vocab.words[4:] == ["a", "appears", "lake"] and vocab.encode("a villa", 4) == [
        2,
        4,
        1,
        3,
    ]
    assert vocab.split("a " * 60) == ["a"] * 50
    write(tmp_path / "LevirCCcaptions.json", {"images": [levir_image("restval", 1, "x")]})
    with pytest.raises(ValueError, match=r"expected the splits train, val, test, found 'restval'"):
        data.read_levir_cc(tmp_path)


# ---- birds ---------------------------------------------------------------------------------------


def bird_row(before, after, split, text):
    url = "https://static.inaturalist.org/photos/{}/large.jpg?15"
    row = [
        "obs",
        url.format(before),
        "species",
        "base",
        "obs",
        url.format(after),
        "species",
        "visual",
        split,
        "1",
    ]
    return "\t".join([*row, text])


BIRD_COLUMNS = (
    "img1ObservationURL img1ImgURL img1Species img1Selection "
    "img2ObservationURL img2ImgURL img2Species img2Selection split annN description"
).replace(" ", "\t")


def test_birds_to_words_reads_the_pairs_whose_photographs_are_here(tmp_path):
    rows = [
        bird_row(1, 2, "train", 'Animal 1 is "big". Animal 2'),
        bird_row(1, 2, "train", "Both are red"),
        bird_row(2, 1, "train", '"Animal 1 has no tail'),
        bird_row(1, 2, "val", "x"),
        bird_row(3, 1, "test", "long " * 90),
        bird_row(3, 4, "test", "y"),
    ]
    write(tmp_path / "birds-to-words-v1.0.tsv", "\n".join([BIRD_COLUMNS, *rows]))
    with pytest.raises(
        ValueError, match=r"no pairs in train; 0 of 5 pairs have both .*has their addresses"
    ):
        data.read_release("birds_to_words", tmp_path)
    for photo in (1, 2, 3):
        write_picture(tmp_path / "images" / f"{photo}.jpg")
    release = data.read_birds_to_words(tmp_path)
    assert (
        sizes(release) == {"train": 2, "val": 1, "test": 1} and "4 of 5 pairs" in release.notes[0]
    )
    first, second = pairs(release, "train")  # the order of the images is part of the pair
    assert first == data.Pair(
        "1.jpg_2.jpg", "1.jpg", "2.jpg", ['animal 1 is " big " . animal 2', "both are red"]
    )
    assert (second.before, second.captions) == ("2.jpg", ['" animal 1 has no tail'])
    vocab = data.vocab_of("birds_to_words", release)
    assert (
        len(vocab.encode(pairs(release, "test")[0].captions[0], 79)) == 79
        and "long" not in vocab.index
    )
    assert data.photo_file("https://elsewhere.org/a/b.jpeg") == "https-elsewhere-org-a-b-jpeg.jpg"


def write_cub(root):
    names = ["001.Gull/Gull_0001.jpg", "001.Gull/Gull_0002.jpg", "002.Tern/Tern_0001.jpg"]
    write(root / "images.txt", "".join(f"{n} {name}\n" for n, name in enumerate(names, 1)))
    write(root / "trainvalclasses.txt", "001.Gull\n")
    write(root / "testclasses.txt", "002.Tern\n")
    for name in names:
        write_picture(root / "images" / name)
        write(
            root / "text_c10" / name.replace(".jpg", ".txt"),
            "A white bird.\r\n\nthis bird, it has a red bill\n",
        )
        write(root / "text_c10" / name.replace(".jpg", ".t7"), "not text")


def test_cub_has_single_images(tmp_path):
    write_cub(tmp_path)
    release = data.read_cub(tmp_path)
    assert sizes(release) == {"train": 2, "val": 1, "test": 0}
    assert pairs(release, "val")[0] == data.Pair(
        "002.Tern/Tern_0001.jpg",
        "002.Tern/Tern_0001.jpg",
        None,
        ["a white bird .", "this bird , it has a red bill"],
    )
    write_features("cub", tmp_path)
    dataset = data.load("cub", tmp_path)
    ((batch,),) = dataset.train_batches(4, seed=0, epoch=0)
    assert (
        batch.single
        and batch.before.all()
        and not batch.after.any()
        and batch.after.shape == (2, *GRID)
    )
    write(tmp_path / "testclasses.txt", "003.Auk\n")
    with pytest.raises(
        ValueError,
        match=r"images.txt cannot be used \(002.Tern is missing\); its classes must be in",
    ):
        data.read_cub(tmp_path)


def write_nabirds(root):
    files = {
        f"{n:08d}-aaaa": f"{c:04d}/{n:08d}aaaa.jpg"
        for n, c in enumerate((817, 295, 817, 1010, 295, 817))
    }
    write(root / "images.txt", "".join(f"{i} {name}\n" for i, name in files.items()))
    write(
        root / "image_class_labels.txt",
        "".join(f"{i} {int(name[:4])}\n" for i, name in files.items()),
    )
    write(root / "train_test_split.txt", "".join(f"{i} {int(i[7] != '5')}\n" for i in files))
    write(
        root / "classes.txt",
        "0 Birds\n295 Ross's Goose\n817 House Finch (Adult Male)\n1010 Verdin\n",
    )
    for name in files.values():
        write_picture(root / "images" / name)


def test_nabirds_captions_are_classes(tmp_path):
    write_nabirds(tmp_path)
    release = data.read_nabirds(tmp_path)
    finch, goose = "House Finch (Adult Male)", "Ross's Goose"
    assert [p.captions for p in pairs(release, "train")] == [
        [finch],
        [goose],
        [finch],
        ["Verdin"],
        [goose],
    ]
    name = "0817/00000005aaaa.jpg"
    assert pairs(release, "test") == [data.Pair(name, name, None, [finch])]
    assert all(path.exists() for path in release.paths.values()) and not release.scenes["val"]
    write_features("nabirds", tmp_path)
    dataset = data.load("nabirds", tmp_path)
    assert dataset.vocab.words[4:] == [finch, goose, "Verdin"]
    ((batch,),) = dataset.train_batches(5, seed=0, epoch=0)
    assert batch.single and sorted(batch.caption[:, 1].tolist()) == [4, 4, 5, 5, 6]


def write_birds(root):
    texts = ("it is red .", "no beak")
    rows = [
        bird_row(i, i + 1, split, text) for i, split in enumerate(data.SPLITS) for text in texts
    ]
    write(root / "birds-to-words-v1.0.tsv", "\n".join([BIRD_COLUMNS, *rows]))
    for photo in range(4):
        write_picture(root / "images" / f"{photo}.jpg")


# ---- released features ---------------------------------------------------------------------------


def test_where_released_features_lie(tmp_path):
    places = {
        "images/x.png": "features/x.png.npy",
        "sc_images/x.png": "sc_features/x.png.npy",
        "images/train/A/x.png": "features/train/A/x.png.npy",
        "resized_images/7_2.png": "resized_features/7_2.png.npy",
        "images/001.Gull/images.jpg": "features/001.Gull/images.jpg.npy",
    }
    for picture, features in places.items():
        assert data.authors_features(tmp_path / picture, tmp_path) == tmp_path / features
    assert data.authors_features(tmp_path / "bef" / "images.png", tmp_path) is None
    elsewhere = tmp_path.parent / "images" / "x.png"  # an absolute path in pairs.csv
    assert data.authors_features(elsewhere, tmp_path) is None


@pytest.mark.parametrize("name, writer", [("birds_to_words", write_birds), ("cub", write_cub)])
def test_the_docstrings_lines_turn_a_pickle_into_features(name, writer, tmp_path, monkeypatch):
    writer(tmp_path)
    release = data.read_release(name, tmp_path)
    arrays = {}
    for n, picture in enumerate(sorted(release.paths.values())):
        key = str(picture.relative_to(tmp_path / "images").with_suffix(""))  # without .jpg
        arrays[key] = np.full((4, 49), n, np.float32)
        picture.unlink()
    (tmp_path / "full_img.pkl").write_bytes(pickle.dumps(arrays))
    text = data.read_birds_to_words.__doc__
    lines = textwrap.dedent(text[text.index("        import pickle") :])
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    data.prepare(name, tmp_path, "cpu")  # counts a pair as there by its features
    dataset = data.load(name, tmp_path)
    assert dataset.grid == (4, 7, 7) and dataset.scenes == release.scenes
    for n, image in enumerate(sorted(release.paths)):
        assert (dataset.features.rows([image]) == n).all()


# ---- your own pairs ------------------------------------------------------------------------------


OWN_PAIRS = """before,after,captions,split
a.png,b.png,The gate opened.| it is open,train
a.png,b.png,open now,train
c.png,sub/d.jpg,"red, then blue",val
b.png,d.jpg,same,test
"""


def own_rows(folder):
    """OWN_PAIRS as pairs.json has them."""
    write(folder / "pairs.csv", OWN_PAIRS)
    release = data.read_pairs(folder)
    return [
        {"before": pair.before, "after": pair.after, "captions": pair.captions, "split": split}
        for split in data.SPLITS
        for pair in pairs(release, split)
    ]


def test_your_own_pairs_from_csv_and_json(tmp_path):
    rows = own_rows(tmp_path)
    release = data.read_pairs(tmp_path)
    texts = ["The gate opened.", "it is open", "open now"]
    assert pairs(release, "train") == [data.Pair("a.png b.png", "a.png", "b.png", texts)]
    assert pairs(release, "val")[0].captions == ["red, then blue"]
    assert release.paths["sub/d.jpg"] == tmp_path / "sub/d.jpg"
    write(tmp_path / "pairs.json", rows)
    assert data.read_pairs(tmp_path) == release
    with_mark = json.dumps(rows).encode("utf-8-sig")  # as some editors write it
    (tmp_path / "pairs.json").write_bytes(with_mark)
    assert data.read_pairs(tmp_path) == release
    for given in ("gate", 0):
        write(tmp_path / "pairs.json", [rows[0] | {"id": given, "captions": "opened"}, *rows[1:]])
        expected = data.Pair(str(given), "a.png", "b.png", ["opened"])
        assert pairs(data.read_pairs(tmp_path), "train") == [expected]


def test_a_wrong_item_of_your_own_json_is_named(tmp_path):
    rows = own_rows(tmp_path)
    for row, line in (
        ({"captions": [" "]}, "item 3 .*expected two images and a caption"),
        ({"captions": []}, "item 3 .*expected two images and a caption"),
        ({"before": ""}, "item 3 .*expected two images and a caption"),
        ({"captions": [5]}, "item 3 .*expected a list of strings"),
        ({"after": 7}, "item 3 .*expected a list of strings"),
        ({"split": "val"}, "item 3 .*id a.png b.png is in train, too"),
    ):
        write(tmp_path / "pairs.json", [*rows[:3], rows[0] | row])
        with pytest.raises(ValueError, match=line):
            data.read_pairs(tmp_path)
    write(tmp_path / "pairs.json", [rows[0] | {"id": 5}, rows[0] | {"id": 5, "after": "c.png"}])
    line = r"pairs.json, item 1 cannot be used \(id 5 is already of a.png, b.png\)"
    with pytest.raises(ValueError, match=line):
        data.read_pairs(tmp_path)


def test_a_wrong_line_of_your_own_csv_is_named(tmp_path):
    head = "before,after,captions,split\n"
    kinds = "before,after,captions,kind\n"
    for text, line in (
        ("before,after,split\na,b,train\n", "line 2 has no captions"),
        (head + 'a,b,"c\nd",train\na,b,,train\n', "line 4 .*expected two images and a caption"),
        (head + "a,b,c,train\n\na,b,c\n", "line 4 .*the split train, val, test, found None"),
        (head + "a,b,c,dev\n", "line 2 .*expected the split train, val, test, found 'dev'"),
        (head + "a,b,red left, the van stayed,train\n", "line 2 has more fields .*put quotes"),
        (head + "a,b,c,train\na,b,c,test\n", "line 3 .*id a b is in train, too"),
        (kinds + "a,b,red left, the van stayed\n", "line 2 .*put quotes"),
        (kinds + "a,b,c,gone\na,b,d,moved\n", "line 3 .*two kinds, 'gone' and"),
    ):
        write(tmp_path / "pairs.csv", text)
        with pytest.raises(ValueError, match=rf"pairs.csv.*{line}"):
            data.read_pairs(tmp_path)
    for encoding in ("latin-1", "utf-16"):
        (tmp_path / "pairs.csv").write_text(head + "a,b,caf\xe9,train\n", encoding=encoding)
        with pytest.raises(ValueError, match=r"pairs.csv.*save it as UTF-8"):
            data.read_pairs(tmp_path)
    (tmp_path / "pairs.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"No such file.*pairs.csv"):
        data.read_pairs(tmp_path)


def test_a_kind_that_may_be_the_rest_of_a_caption_gets_a_note(tmp_path):
    """Nobody can tell, but a kind of one pair is odd."""
    text = "before,after,captions,kind\na,b,the red car left,the van stayed\nc,d,e,no change\n"
    write(tmp_path / "pairs.csv", text)
    (note,) = data.read_pairs(tmp_path).notes
    assert "only a b is of the kind 'the van stayed'" in note
    assert "put quotes" in note


def test_your_own_pairs_without_a_split_and_with_kinds(tmp_path):
    lines = [
        "before,after,captions,kind",
        *(f"{n}.png,b.png,text {n},{'added' * (n % 3 == 1)}" for n in range(500) if n != 3),
    ]
    more = [f"3.png,b.png,{text},no change" for text in ("text 3", "once more")]
    write(tmp_path / "pairs.csv", "\n".join([*lines, *more]))
    release = data.read_pairs(tmp_path)
    assert sizes(release) == {"train": 390, "val": 48, "test": 62}  # a function of the names alone
    assert [p.id for p in pairs(release, "val")][:3] == [
        "0.png b.png",
        "14.png b.png",
        "32.png b.png",
    ]
    assert sorted(map(len, release.kinds.values())) == [1, 167] and release.groups == release.kinds
    (more,) = [p for split in data.SPLITS for p in pairs(release, split) if len(p.captions) > 1]
    assert release.kinds["no change"] == {more.id} and more.captions == ["text 3", "once more"]
    rows = [
        {"before": p.before, "after": p.after, "captions": p.captions}
        for p in pairs(release, "val")
    ]
    write(tmp_path / "pairs.json", [*rows, rows[0] | {"id": "x", "split": "train", "kind": 5}])
    release = data.read_pairs(tmp_path)  # some have a split
    assert sizes(release) == {"train": 1, "val": 48, "test": 0} and release.kinds == {"5": {"x"}}


def test_your_own_pairs_may_lack_validation_and_test_but_not_training(tmp_path, tiny, capsys):
    row = {"before": "a.png", "after": "b.png", "captions": "opened", "split": "train"}
    write(tmp_path / "pairs.json", [row])
    write_features("pairs", tmp_path)
    dataset = data.load("pairs", tmp_path)
    assert capsys.readouterr().out.count("has no val pairs") == 1 and dataset.pairs("val") == []
    for split in ("val", "test"):
        assert [*dataset.eval_batches(split, 2)] == [] and not data.groups_of(dataset, split)
        for out_dir in (None, tmp_path / "run"):
            assert dataset.results(split, {}, {}, out_dir) == {}
    assert not (tmp_path / "run").exists()
    scorer_cbr.main(
        [
            *tiny,
            "--dataset",
            "pairs",
            "--data_dir",
            str(tmp_path),
            "--out_dir",
            str(tmp_path / "run"),
        ]
    )
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert written == {"config.json", "log.jsonl", "last.pt", "best.pt", "curves.png"}
    write(tmp_path / "pairs.json", [row | {"split": "test"}])
    for prepared in (data.load, data.prepare, data.check):
        with pytest.raises(
            ValueError, match=f"{tmp_path}: no pairs in train; add pairs, or a column `split`"
        ):
            prepared("pairs", tmp_path, "cpu")


def test_the_readmes_example_of_your_own_pairs(tmp_path):
    readme = Path(data.__file__).with_name("README.md").read_text(encoding="utf-8")
    write(
        tmp_path / "pairs.csv",
        textwrap.dedent(re.search(r"^    before,after,.*?\n\n", readme, re.M | re.S)[0]),
    )
    release = data.read_pairs(tmp_path)
    assert sum(sizes(release).values()) == 3 and set(release.kinds) == {
        "moved",
        "gone",
        "no change",
    }
    (yard,) = (p for split in data.SPLITS for p in pairs(release, split) if "yard" in p.id)
    assert yard.captions == ["a red car left, the van stayed", "the red car is gone"]
