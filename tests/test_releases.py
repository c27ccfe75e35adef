"""Readers: a small release in every layout is read, and the real annotation files are counted."""

import json
from pathlib import Path

import pytest
from helpers import (
    GRID,
    bird_row,
    write,
    write_bird_table,
    write_cub,
    write_features,
    write_nabirds,
    write_own_pairs,
    write_picture,
)

import data
from common import InputError
from support.own_pairs import read_pairs
from support.pairs import Pair
from support.releases import (
    DATASETS,
    Settings,
    read_birds_to_words,
    read_clevr_change,
    read_clevr_dc,
    read_cub,
    read_image_editing,
    read_levir_cc,
    read_nabirds,
    read_release,
    read_spot_the_diff,
    vocab_of,
)
from support.text import tokenize_lower

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


real = pytest.mark.skipif(not SHARED.exists(), reason="the public annotation files are not here")


def sizes(release):
    return {split: len(scenes) for split, scenes in release.scenes.items()}


# ---- CLEVR-DC ------------------------------------------------------------------------------------


def write_clevr_dc(root):
    """Twelve pairs in the released layout: two of each kind of change; eight for training, two each
    for validation and test."""
    numbers = [8000 * kind + i for kind in range(6) for i in range(2)]
    texts = {}
    for n, number in enumerate(numbers):
        write_picture(root / "bef" / f"{number}.png")
        write_picture(root / "aft" / f"{number}.png")
        color = ("red", "blue", "green", "gray")[n % 4]
        texts[str(number)] = [f"the {color} cube moved", f"a {color} cube, it moved."]
    write(root / "captions.json", texts)
    splits = {"train": numbers[:8], "val": numbers[8:10], "test": numbers[10:]}
    write(root / "split.json", splits)


def test_clevr_dc(tmp_path):
    write_clevr_dc(tmp_path)
    release = read_clevr_dc(tmp_path)
    assert sizes(release) == {"train": 8, "val": 2, "test": 2}
    assert release.scenes["val"][0].swapped is None
    green = ["the green cube moved", "a green cube, it moved."]
    same = Pair("040000.png", "bef/40000.png", "aft/40000.png", green)
    assert release.pairs("test")[0] == same
    assert all(path.exists() for path in release.paths.values()) and len(release.paths) == 24
    assert release.kinds["no change"] == {"040000.png", "040001.png"}
    assert release.kinds["add"] == {"016000.png", "016001.png"}


# ---- Spot-the-Diff -------------------------------------------------------------------------------

SPOT = {
    "train": [("7", ["a man left", ""]), ("12", ["the red car is gone"]), ("7", ["no man"])],
    "val": [("3", ["one person " * 40, "x y"])],
    "test": [("100", [""])],
}


def write_spot(root):
    for split, rows in SPOT.items():
        content = [{"img_id": i, "sentences": found} for i, found in rows]
        write(root / "annotations" / f"{split}.json", content)
        for i, _ in rows:
            write_picture(root / "resized_images" / f"{i}.png")
            write_picture(root / "resized_images" / f"{i}_2.png")


def test_spot_the_diff_groups_the_rows_of_an_id(tmp_path):
    write_spot(tmp_path)
    release = read_spot_the_diff(tmp_path)
    assert sizes(release) == {"train": 2, "val": 1, "test": 1}
    names = ("resized_images/7.png", "resized_images/7_2.png")
    assert release.pairs("train")[0] == Pair("7", *names, ["a man left", "", "no man"])
    assert release.pairs("test")[0].captions == [""]
    assert all(path.exists() for path in release.paths.values())


# ---- Image Editing Request -----------------------------------------------------------------------


def item(uid, before, after, *texts):
    return {"uid": uid, "img0": before, "img1": after, "sents": list(texts)}


def test_image_editing_request_is_keyed_by_uid(tmp_path):
    train = [item("A_1", "a.jpg", "b.jpg", "Zoom in"), item("A_2", "a.jpg", "b.jpg", "crop, so...")]
    test = [item("B_1", "a.jpg", "c.gif", "x"), item("B_2", "d.png", "c.gif", "x")]
    write(tmp_path / "train.json", train)
    write(tmp_path / "valid.json", [item("A_3", "a.jpg", "c.gif", "x", "y", "z")])
    write(tmp_path / "test.json", test)
    release = read_image_editing(tmp_path)
    first = Pair("A_1", "a.jpg", "b.jpg", ["Zoom in"])
    second = Pair("A_2", "a.jpg", "b.jpg", ["crop, so..."])
    assert release.pairs("train") == [first, second]
    assert set(release.paths) == {"a.jpg", "b.jpg", "c.gif", "d.png"}
    assert release.paths["c.gif"] == tmp_path / "c.gif"
    (tmp_path / "images").mkdir()
    assert read_image_editing(tmp_path).paths["c.gif"] == tmp_path / "images" / "c.gif"
    words = tokenize_lower(" Crop, PLEASE... it's  50%")
    assert words == "crop , please ... it ' s 50 %".split()
    # Both captions would belong to the first one's pictures.
    write(tmp_path / "train.json", [*train, item("A_1", "a.jpg", "d.png", "Zoom out")])
    with pytest.raises(InputError, match="different pairs have the id A_1"):
        read_release("image_editing_request", tmp_path)


# ---- LEVIR-CC ------------------------------------------------------------------------------------


def levir_image(split, number, *texts, **more):
    sentences = [{"raw": f" {text} .", "tokens": text.split(" ")} for text in texts]
    return {"filename": f"{split}_{number:06d}.png", "split": split, "sentences": sentences, **more}


def test_levir_cc(tmp_path):
    same = "the scene is the same as before"
    images = [
        levir_image("train", 1, "a lake appears", "a  lake", changeflag="1"),
        levir_image("val", 1, same, "a lake", changeflag=False),
        levir_image("test", 1, "one villa", same),
        levir_image("test", 2, *["a lake appears"] * 5),
    ]
    write(tmp_path / "LevirCCcaptions.json", {"images": images})
    release = read_levir_cc(tmp_path)
    name = "train_000001.png"
    texts = ["a lake appears", "a lake"]
    assert release.pairs("train") == [Pair(name, f"train/A/{name}", f"train/B/{name}", texts)]
    assert release.paths["test/B/test_000002.png"] == tmp_path / "images/test/B/test_000002.png"
    # The second one is recognised by its words, because it has no flag.
    assert release.kinds["no change"] == {"val_000001.png", "test_000001.png"}
    assert release.pairs("test")[1].captions == ["a lake appears"] * 5
    vocab = vocab_of("levir_cc", release)  # more than five times, in all splits
    assert vocab.words[4:] == ["a", "appears", "lake"]
    assert vocab.encode("a villa", 4) == [2, 4, 1, 3]
    assert vocab.split("a " * 60) == ["a"] * 50


def test_levir_rows_of_one_picture_form_one_pair(tmp_path):
    """As some data sets in this layout have them. Without a flag, all captions decide the kind."""
    images = [
        levir_image("train", 1, "a lake", changeflag=1),
        levir_image("train", 1, "a villa", changeflag=1),
        levir_image("train", 2, "a road"),
        levir_image("train", 2, "no change has occurred"),
    ]
    file = tmp_path / "LevirCCcaptions.json"
    write(file, {"images": images})
    release = read_levir_cc(tmp_path)
    assert [pair.captions for pair in release.pairs("train")] == [
        ["a lake", "a villa"],
        ["a road", "no change has occurred"],
    ]
    assert release.kinds == {"change": {"train_000001.png"}, "no change": {"train_000002.png"}}
    # Scores by kind would take one picture for the other.
    write(file, {"images": [*images, images[0] | {"split": "val"}]})
    with pytest.raises(InputError, match=r"train_000001\.png.*train.*val"):
        read_levir_cc(tmp_path)


# ---- birds ---------------------------------------------------------------------------------------


def test_birds_to_words_reads_the_pairs_whose_photographs_are_here(tmp_path):
    rows = [
        bird_row(1, 2, "train", 'Animal 1 is "big". Animal 2'),
        bird_row(1, 2, "train", "Both are red"),
        bird_row(2, 1, "train", '"Animal 1 has no tail'),
        bird_row(1, 2, "val", "x"),
        bird_row(3, 1, "test", "long"),
        bird_row(3, 4, "test", "y"),
    ]
    write_bird_table(tmp_path, rows)
    with pytest.raises(InputError, match="6 captions are left out"):
        read_release("birds_to_words", tmp_path)
    for photo in (1, 2, 3):
        write_picture(tmp_path / "images" / f"{photo}.jpg")
    release = read_birds_to_words(tmp_path)
    assert sizes(release) == {"train": 2, "val": 1, "test": 1}
    assert "1 captions are left out" in release.notes[0]
    first, second = release.pairs("train")  # the order of the images is part of the pair
    texts = ['animal 1 is " big " . animal 2', "both are red"]
    assert first == Pair("train_1.jpg_2.jpg", "1.jpg", "2.jpg", texts)
    assert (second.before, second.captions) == ("2.jpg", ['" animal 1 has no tail'])
    vocab = vocab_of("birds_to_words", release)
    assert "red" in vocab.index and "long" not in vocab.index


def test_cub_has_single_images(tmp_path):
    write_cub(tmp_path)
    release = read_cub(tmp_path)
    assert sizes(release) == {"train": 2, "val": 1, "test": 0}
    name = "002.Tern/Tern_0001.jpg"
    texts = ["a white bird .", "this bird , it has a red bill"]
    assert release.pairs("val")[0] == Pair(name, name, None, texts)
    write_features("cub", tmp_path)
    dataset = data.load("cub", tmp_path)
    ((batch,),) = dataset.train_batches(4, seed=0, first=0, last=1)
    assert batch.single and batch.before.all() and not batch.after.any()
    assert batch.after.shape == (2, *GRID)


def test_nabirds_captions_are_classes(tmp_path):
    write_nabirds(tmp_path)
    release = read_nabirds(tmp_path)
    finch = "House Finch (Adult Male)"
    goose = "Ross's Goose"
    assert release.captions(["train"]) == [finch, goose, finch, "Verdin", goose]
    name = "0817/00000005aaaa.jpg"
    assert release.pairs("test") == [Pair(name, name, None, [finch])]
    assert all(path.exists() for path in release.paths.values()) and not release.scenes["val"]
    assert vocab_of("nabirds", release).words[4:] == [finch, goose, "Verdin"]


# ---- every release -------------------------------------------------------------------------------


def test_whatever_a_reader_returns_is_checked(tmp_path, monkeypatch):
    write_own_pairs(tmp_path)

    def with_a_group(release):
        release.groups["indoor"] = {release.pairs("train")[0].id}

    def with_a_row(release):
        release.groups["Total"] = set()

    def with_an_unknown_id(release):
        release.kinds["indoor"] = {"no such pair"}

    def without_captions(release):
        release.pairs("train")[0].captions.clear()

    def read_changed(change):
        """Reads what `change` makes of the reader's release."""

        def read(root):
            release = read_pairs(root)
            change(release)
            return release

        monkeypatch.setitem(DATASETS, "mine", Settings(read))
        return read_release("mine", tmp_path)

    release = read_changed(with_a_group)
    assert "indoor" in release.groups and "indoor" not in release.kinds
    for change, named in (
        (with_a_row, "row 'total'"),
        (with_an_unknown_id, "'indoor' has .*no such pair"),
        (without_captions, "no caption"),
    ):
        with pytest.raises(InputError, match=named):
            read_changed(change)


# ---- the real files ------------------------------------------------------------------------------


@real
@pytest.mark.parametrize(
    "name, file_of_splits, key, of_each_kind",
    [
        ("clevr_change", "splits.json", "CLEVR_default_{:06d}.png", 797),
        ("clevr_dc", "split.json", "{}", 800),
    ],
)
def test_real_splits(name, file_of_splits, key, of_each_kind, tmp_path):
    """The captions are not available here, so they are made up."""
    for file in (SHARED / name).glob("*.json"):
        write(tmp_path / file.name, file.read_text())
    texts = {}
    for numbers in json.loads((tmp_path / file_of_splits).read_text()).values():
        texts |= {key.format(i): ["a caption"] for i in numbers}
    for file in ("captions.json", "change_captions.json", "no_change_captions.json"):
        write(tmp_path / file, texts)
    settings = DATASETS[name]
    release = read_release(name, tmp_path)
    assert sizes(release).items() <= settings.published.items()
    test = {pair.id for pair in release.pairs("test")}
    for kind in settings.published.keys() & release.groups.keys():
        assert len(release.groups[kind] & test) == of_each_kind


@real
@pytest.mark.parametrize("name", ["spot_the_diff", "image_editing_request", "levir_cc"])
def test_real_pairs_and_vocabularies_are_as_many_as_published(name):
    settings = DATASETS[name]
    release = read_release(name, SHARED / name)
    counts = sizes(release) | {"words": len(vocab_of(name, release))}
    for kind, members in release.kinds.items():
        counts[kind] = len(members)
    assert counts.items() >= settings.published.items()


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
