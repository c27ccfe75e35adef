"""Tests of the built-in data set: drawing, sentences and how they are judged, files, the two
networks."""

import json

import make_mini_networks as training
import numpy as np
import pytest
import torch
from PIL import Image

import data
from support import mini
from support.mini.networks import feature_net, load_clip, preprocess
from support.mini.scenes import KINDS, VIEWS, draw, phrase, sample_cameras, sample_scene
from support.mini.sentences import NO_CHANGE, accuracy, judge, parse_caption

COUNTS = {"train": 20, "val": 5, "test": 10}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A small mini, which tests must not change, and its files' contents."""
    root = tmp_path_factory.mktemp("mini")
    mini.render(root, COUNTS)
    return root, {file.stem: json.loads(file.read_text()) for file in root.glob("*.json")}


def ball(x, y, **other):
    item = {"size": "large", "color": "red", "material": "rubber", "shape": "sphere"}
    return item | {"xyz": [x, y, 0.8], "turn": 0.3} | other


# ---- drawing -------------------------------------------------------------------------------------


def test_the_box_is_that_of_a_projected_sphere():
    camera = sample_cameras(np.random.default_rng(0))[0]
    picture = draw([ball(0.4, -0.3)], camera)
    directions = np.random.default_rng(0).normal(size=(200_000, 3))
    unit = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    rays = np.array([0.4, -0.3, 0.8]) + 0.8 * unit - camera.eye  # to points of the surface
    depth = rays @ camera.forward
    x = (1 + rays @ camera.right / depth / 0.38) * 32  # in pixels
    y = (1 - rays @ camera.up / depth / 0.38) * 32
    ((left, top, width, height),) = picture.boxes
    corners = [left, top, left + width, top + height]
    assert corners == pytest.approx([x.min(), y.min(), x.max(), y.max()], abs=1)
    area = np.pi / 4 * (x.max() - x.min()) * (y.max() - y.min())  # of nearly an ellipse
    assert picture.areas[0] == pytest.approx(area, rel=0.03)
    assert picture.shares == [1]


# ---- words and what is true ----------------------------------------------------------------------


def sampled(count):
    """Scenes as the files describe them, but not drawn."""
    rng = np.random.default_rng(5)
    for n in range(count):
        kind = KINDS[n % 5]
        before, after, changed = sample_scene(rng, kind)
        scenes = [before, after, before]
        boxes = [[[0, 0, 9, 9]] * len(scene) for scene in scenes]
        cameras = sample_cameras(rng)
        yield scenes, mini.describe(kind, changed, scenes, cameras, boxes)


def test_captions_are_distinct_and_true():
    places = 0
    wrong_from_default = 0
    for scenes, scene in sampled(250):
        for items in scenes:
            assert len({phrase(item) for item in items}) == len(items)
        truth = scene["truth"]
        # In a swapped pair, "before" is the nonsemantic picture.
        swapped = dict(truth)
        for name in ("objects", "right_axes"):
            swapped[name] = truth[name] | {"default": truth[name]["nonsemantic"]}
        for captions, seen in ((scene["default"], truth), (scene["nonsemantic"], swapped)):
            assert len(set(captions)) == 6
            assert max(len(caption.split()) for caption in captions) <= 18
            for caption in captions:
                verdict = judge("000000.png", caption, seen)
                assert all(verdict.values())
                places += "place" in verdict
        if truth["type"] != "add":
            verdicts = [judge("000000.png", text, truth) for text in scene["nonsemantic"]]
            wrong_from_default += not all(verdict.get("place", True) for verdict in verdicts)
    assert places > 0.8 * 250 * 12
    assert 0 < wrong_from_default < 25


def test_the_parser_and_the_scores_see_mistakes():
    for caption in NO_CHANGE:
        assert parse_caption(caption)["type"] == "same"
    parsed = parse_caption("the red cube that is left of the large sphere became metal")
    known = {name: value for name, value in parsed.items() if value}
    assert known == {"type": "material", "color": "red", "shape": "cube", "value": "metal"}
    before = [ball(0, 0), ball(2, 0, color="blue")]
    after = [before[0] | {"color": "cyan"}, before[1]]
    objects = {"default": before, "semantic": after}
    truth = {"type": "color", "changed": 0, "objects": objects}
    assert judge("000007.png", "the large sphere became gray", truth) == {
        "change type": True,
        "all four": False,  # "large sphere" could be either
        "new value": False,
    }
    assert judge("000007.png_n", "nothing was changed", truth) == {"distractors": True}
    assert judge("000007.png_n", "the large sphere is gone", truth) == {"distractors": False}


def place_of(caption):
    """Is it true where a caption places the yellow cube of a fixed scene?"""
    cube = {"shape": "cube", "color": "yellow"}
    scene = [
        ball(0, 0, **cube),
        ball(2, 0.1),  # to the right
        ball(-2, 0.1, size="small"),  # to the left
        ball(0.1, 2, color="gray", shape="cube"),  # behind
    ]
    truth = {
        "type": "drop",
        "changed": 0,
        "objects": {"default": scene, "semantic": scene[1:]},
        "right_axes": {"default": [1, 0], "semantic": [-1, 0]},
    }
    return judge("000000.png", caption, truth).get("place")


@pytest.mark.parametrize(
    "place, expected",
    [
        ("left of the large red sphere", True),
        ("right of the large red sphere", False),
        ("left of the red sphere", True),  # true of one red sphere
        ("right of the red sphere", True),  # and of another
        ("in front of the yellow cube", False),  # an object is not in front of itself
        ("in front of the gray cube that is left of the large sphere", True),
        ("in front of the gray cube that is left of the small sphere", False),
        ("in the scene", None),  # says no place
    ],
)
def test_places_are_judged(place, expected):
    assert place_of(f"the yellow cube that is {place} is gone") is expected
    assert place_of(f"someone moved the yellow cube that is {place}") is expected


# ---- files ---------------------------------------------------------------------------------------


def test_files_follow_the_release(drawn):
    root, files = drawn
    names = [f"CLEVR_default_{i:06d}.png" for i in range(35)]
    others = [name.replace("default", "nonsemantic") for name in names]
    assert list(files["no_change_captions"]) == names
    assert list(files["change_captions"]) == names + others
    assert {split: len(ids) for split, ids in files["splits"].items()} == COUNTS
    for ids in files["splits"].values():
        for kind in KINDS:
            of_kind = {int(name[:6]) for name in files["type_mapping"][kind]}
            assert len(of_kind & set(ids)) == len(ids) // 5
    for view, folder in VIEWS.items():
        assert Image.open(root / folder / f"CLEVR_{view}_000034.png").size == (64, 64)
    for i, scene in files["scenes"].items():
        boxes = files["change_captions_with_bbox"][i]
        assert (boxes["bbox_before"] is None) == (scene["type"] == "add")
        assert (boxes["bbox_after"] is None) == (scene["type"] == "drop")
        assert 0 <= files["change_captions_by_IOU"][i] <= 1
        for items in scene["objects"].values():
            for x, y, w, h in (item["box"] for item in items):
                assert x >= 0 and y >= 0 and x + w <= 64 and y + h <= 64


def test_a_scene_depends_on_its_split_and_number_alone(drawn, tmp_path):
    root, files = drawn
    mini.render(tmp_path, {"train": 3, "val": 2})
    for i, same in ((0, 0), (2, 2), (3, 20), (4, 21)):  # 3 and 4 are the first two of val
        for view in VIEWS:
            picture = mini.picture_file(tmp_path, view, i).read_bytes()
            assert picture == mini.picture_file(root, view, same).read_bytes()
    scenes = json.loads((tmp_path / "scenes.json").read_text())
    assert scenes["4"] == files["scenes"]["21"]
    assert len({json.dumps(scene) for scene in files["scenes"].values()}) == 35


def test_half_a_mini_is_refused(tmp_path):
    """Pictures without mini.json, which is written last, are of an interrupted call."""
    mini.render(tmp_path, {"train": 1})
    with pytest.raises(mini.InputError, match="no complete mini"):
        mini.make(tmp_path, 1)


def test_mini_is_prepared_and_its_references_are_right(tmp_path):
    data.main(["mini", "--data_dir", str(tmp_path), "--device", "cpu", "--scenes", "20"])
    dataset = data.load("mini", tmp_path)
    assert dataset.grid == (128, 8, 8)
    assert dataset.state()["extractor"] == "mini-cnn"
    assert len(dataset.pairs("train")) == 40 and len(dataset.pairs("test")) == 20
    assert len(dataset.paths) == 3 * (20 + 10 + 10)
    assert {*KINDS, "semantic change", "only distractor"} <= set(dataset.groups)
    captions = {pair.id: pair.captions[0] for pair in dataset.pairs("test")}
    assert set(accuracy(captions, tmp_path).values()) == {100}


# ---- networks ------------------------------------------------------------------------------------


def test_photographs_are_not_for_minis_network():
    with pytest.raises(mini.InputError, match="80x64"):
        preprocess(Image.new("RGB", (80, 64)))


# Of each picture, two cells in the middle, in every 32nd channel.
RECORDED = torch.tensor(
    [
        [[-0.01, -1.07], [0.82, -0.14], [-0.56, -0.68], [-1.02, -1.02]],
        [[0.02, 2.35], [-0.21, 1.37], [-0.62, -0.88], [-0.14, 1.65]],
        [[-0.93, -1.09], [0.02, -0.06], [-0.53, 1.55], [0.17, -0.8]],
    ]
)


def test_the_shipped_networks_are_those_of_every_number_measured_on_mini():
    """If the networks are retrained or the pictures change, these values must be updated."""
    pictures = []
    for number in range(3):
        rng = np.random.default_rng(number)
        scene, _, _ = sample_scene(rng, "drop")
        image = draw(scene, sample_cameras(rng)[0]).image
        pictures.append(preprocess(Image.fromarray(image)))
    with torch.no_grad():
        features = feature_net().eval()(torch.stack(pictures))
    assert features.shape == (3, 128, 8, 8)
    torch.testing.assert_close(features[:, ::32, 3:5, 4], RECORDED, rtol=0, atol=0.02)
    _, tokenizer = load_clip()
    assert list(tokenizer.ids) == training.words_of_mini()
