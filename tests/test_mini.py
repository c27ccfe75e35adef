"""Tests of the built-in data set: the ray caster, the scenes, the sentences, what is judged true of
them, the files, the two networks, and the preparation."""

import dataclasses
import json
import math
import shutil

import h5py
import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

import data
import mini

COUNTS = {"train": 20, "val": 5, "test": 10}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A small mini without networks, not to be changed, and its files' contents."""
    root = tmp_path_factory.mktemp("mini")
    mini.render(root, COUNTS, seed=3)
    return root, {name: json.loads((root / f"{name}.json").read_text()) for name in mini.FILES}


def copy_of(drawn, folder):
    shutil.copytree(drawn[0], folder)
    return folder


def ball(x, y, **other):
    item = {"size": "large", "color": "red", "material": "rubber", "shape": "sphere"}
    return item | {"xyz": [x, y, 0.8], "turn": 0.3} | other


def camera_at_rest():
    """From (7, -7, 6), without jitter."""
    (camera,) = mini.sample_cameras(np.random.default_rng(0), 1, 1, jitter=0)
    return camera


# ---- ray caster ----------------------------------------------------------------------------------


def is_inside(shape, x, y, z):
    """Which points of an object's own frame, in units of its half height, lie in it?"""
    if shape == "sphere":
        return x * x + y * y + z * z <= 1
    if shape == "cylinder":
        return (x * x + y * y <= 1) & (abs(z) <= 1)
    return (abs(x) <= 1) & (abs(y) <= 1) & (abs(z) <= 1)


@pytest.mark.parametrize("shape", mini.ATTRIBUTES["shape"])
def test_box_and_area_equal_a_march_along_every_ray(shape):
    (camera,) = mini.sample_cameras(np.random.default_rng(0), 1, 1)
    item = ball(0.4, -0.3, shape=shape)
    picture = mini.draw([item], camera, side=32)
    cos = np.cos(item["turn"])
    sin = np.sin(item["turn"])
    turn = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]]) / 0.8
    centre = np.array(item["xyz"])
    eye = camera.eye.astype(float)
    hit = np.zeros((64, 64), bool)  # two samples a pixel each way
    for row in range(64):
        for column in range(64):
            u = 0.38 * ((2 * column + 1) / 64 - 1)
            v = 0.38 * ((2 * row + 1) / 64 - 1)
            ray = camera.forward.astype(float) + u * camera.right - v * camera.up
            middle = (centre - eye) @ ray / (ray @ ray)
            t = np.linspace(middle - 1.2, middle + 1.2, 193)
            points = (eye - centre)[:, None] + t * ray[:, None]
            hit[row, column] = is_inside(shape, *(turn @ points)).any()
    rows = np.flatnonzero(hit.any(1)) // 2
    columns = np.flatnonzero(hit.any(0)) // 2
    width = columns[-1] - columns[0] + 1
    height = rows[-1] - rows[0] + 1
    assert picture.boxes == [[columns[0], rows[0], width, height]]
    assert picture.areas[0] == pytest.approx(hit.sum() / 4, rel=0.02)
    assert picture.parts == [1]


def test_the_nearer_object_hides_the_other():
    near = ball(1.2, -1.2)
    far = ball(-0.8, 0.8, color="blue")
    both = mini.draw([far, near], camera_at_rest())
    alone = mini.draw([far], camera_at_rest())
    assert both.parts[1] == 1 and both.parts[0] < 1
    assert both.areas[0] < alone.areas[0]
    assert both.boxes[0] == alone.boxes[0]  # a box is that of the whole object
    x, y, w, h = both.boxes[1]
    red, _, blue = both.image[y + h // 2, x + w // 2].astype(int)
    assert red > 2 * blue


def test_an_object_differs_from_the_floor_inside_its_box_only():
    above = np.float32([0, 0, 1])  # the soft shadow stays close
    camera = dataclasses.replace(camera_at_rest(), light=above)
    one = mini.draw([ball(-1, 1)], camera)
    two = mini.draw([ball(-1, 1), ball(1.5, 1, color="yellow")], camera)
    difference = np.abs(one.image.astype(int) - two.image).max(2)
    rows, columns = (difference > 60).nonzero()
    x, y, w, h = two.boxes[1]
    assert len(rows) > 0.5 * w * h
    assert x <= columns.min() and columns.max() < x + w
    assert y <= rows.min() and rows.max() < y + h


def test_a_scenes_views_are_spread_by_a_factor_of_its_own():
    """Camera of a view = (1 - s) a + s b: near s = 0 a scene's views stand together, near 1 as far
    apart as two scenes'."""
    cameras = mini.sample_cameras(np.random.default_rng(0), 500, 3)
    eyes = np.stack([camera.eye for camera in cameras]).reshape(500, 3, 3)  # scene, view, xyz
    apart = np.abs(eyes[:, 0] - eyes[:, 1]).max(1)  # s |b_0 - b_1|, at most 5 s
    assert apart.min() < 0.05 and 3 < apart.max() < 5
    # The median of s max_xyz |b_0 - b_1| is about 1.1; with s = 1 it would be 2.6.
    assert 0.8 < np.median(apart) < 1.6
    assert (np.abs(eyes - np.array([7, -7, 6])) <= 2.5 + 1e-5).all()


# ---- words and what is true ----------------------------------------------------------------------


def sampled(count, objects=(2, 4)):
    """Scenes that are described as in the files, but not drawn."""
    rng = np.random.default_rng(5)
    for n in range(count):
        kind = mini.KINDS[n % 5]
        before, after, changed = mini.sample_scene(rng, kind, objects)
        scenes = [before, after, before]
        boxes = [[[0, 0, 9, 9] for _ in scene] for scene in scenes]
        cameras = mini.sample_cameras(rng, 1, 3)
        yield scenes, mini.describe(kind, changed, scenes, cameras, boxes)


def swapped(truth):
    """The truth about a pair whose "before" is the nonsemantic picture."""
    swapped = dict(truth)
    for name in ("objects", "right_axes"):
        views = dict(truth[name])
        views["default"] = views["nonsemantic"]
        swapped[name] = views
    return swapped


def judged(captions, truth):
    return [mini.judge("000000.png", caption, truth) for caption in captions]


def test_relations_turn_with_the_camera():
    here = ball(1.0, 0.2)
    there = ball(-1.0, 0.0)
    rights = [[1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]]
    words = [mini.relation(here, there, np.array(right))[0] for right in rights]
    assert words == ["right of", "left of", "in front of", "behind"]
    _, clarity = mini.relation(ball(1, 1), ball(0, 0), np.array([1, 0, 0]))
    assert clarity == pytest.approx(1)  # on the diagonal: as unclear as can be


@pytest.mark.parametrize("objects", [(2, 2), (2, 4), (3, 6)])
def test_captions_are_distinct_and_true(objects):
    places = 0
    for scenes, scene in sampled(150, objects):
        for items in scenes:
            names = {mini.phrase(item) for item in items}
            assert len(names) == len(items)
        default = scene["default"]
        nonsemantic = scene["nonsemantic"]
        for captions in (default, nonsemantic):
            assert len(set(captions)) == 6
            assert max(len(caption.split()) for caption in captions) <= 18
        truth = scene["truth"]
        verdicts = judged(default, truth) + judged(nonsemantic, swapped(truth))
        assert all(all(verdict.values()) for verdict in verdicts)
        places += sum("place" in verdict for verdict in verdicts)
    assert places > 0.8 * 150 * 12


def test_captions_of_other_views_can_be_wrong_about_the_place():
    wrong = 0
    for _, scene in sampled(100):
        if scene["truth"]["type"] != "add":
            verdicts = judged(scene["nonsemantic"], scene["truth"])
            wrong += not all(verdict.get("place", True) for verdict in verdicts)
    assert 0 < wrong < 40


def test_the_parser_and_the_scores_see_mistakes():
    for caption in mini.NO_CHANGE:
        assert mini.parse_caption(caption)["type"] == "same"
    assert mini.parse_caption("the red cube that is left of the large sphere became metal") == {
        "type": "material",
        "size": None,
        "color": "red",
        "material": None,
        "shape": "cube",
        "value": "metal",
    }
    before = [ball(0, 0), ball(2, 0, color="blue")]
    after = [before[0] | {"color": "cyan"}, before[1]]
    objects = {"default": before, "semantic": after}
    truth = {"type": "color", "changed": 0, "objects": objects}
    assert mini.judge("000007.png", "the large sphere became gray", truth) == {
        "change type": True,
        "size": True,
        "color": False,  # not named, and needed: "large sphere" could be either
        "material": False,
        "shape": True,
        "all four": False,
        "new value": False,
    }
    assert mini.judge("000007.png_n", "nothing was changed", truth) == {"distractors": True}
    assert mini.judge("000007.png_n", "the large sphere is gone", truth) == {"distractors": False}


def place_of(caption):
    """Is the place true that a caption gives to the yellow cube of a certain scene?"""
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
    return mini.judge("000000.png", caption, truth).get("place")


@pytest.mark.parametrize(
    "place, expected",
    [
        ("left of the large red sphere", True),
        ("right of the large red sphere", False),
        ("right of the small sphere", True),
        ("left of the red sphere", True),  # there is one of which this is true
        ("right of the red sphere", True),  # and another one
        ("behind the red sphere", False),
        ("in front of the gray cube", True),
        ("in front of the yellow cube", False),  # an object is not in front of itself
        ("in front of the cube", True),
        ("in front of the gray sphere", False),  # there is no such object
        ("in front of the", False),
        ("in front of the gray cube that is left of the large sphere", True),
        ("in front of the gray cube that is left of the small sphere", False),
    ],
)
def test_places_are_judged(place, expected):
    assert place_of(f"the yellow cube that is {place} is gone") is expected
    assert place_of(f"someone moved the yellow cube that is {place}") is expected


def test_a_caption_without_a_place_is_not_judged_by_it():
    assert place_of("the yellow cube is gone") is None
    assert place_of("the yellow cube in the scene is gone") is None


def test_accuracy_and_is_right_read_the_truth(drawn):
    root, files = drawn
    captions = {}
    for i, name in enumerate(files["no_change_captions"]):
        captions[f"{i:06d}.png"] = files["change_captions"][name][0]
        captions[f"{i:06d}.png_n"] = files["no_change_captions"][name][0]
    names = ["change type", "distractors", *mini.ATTRIBUTES, "all four", "new value", "place"]
    assert mini.accuracy(captions, root) == dict.fromkeys(names, 100)
    assert all(mini.is_right(pair, caption, root) for pair, caption in captions.items())
    turned = {"left": "right", "right": "left", "front": "back", "behind": "left of"}
    for pair, caption in captions.items():
        words = [turned.get(word, word) for word in caption.split()]
        wrong = " ".join(words).replace("in back of", "behind")
        assert mini.is_right(pair, wrong, root) == (wrong == caption)
    place = mini.accuracy({"000000.png": "the cube that is behind the cow is gone"}, root)["place"]
    assert place == 0
    silent = mini.accuracy({"000000.png": "the cube is gone"}, root)
    assert math.isnan(silent["place"]) and math.isnan(silent["distractors"])


def test_a_folder_without_the_cameras_axes_has_no_place(drawn, tmp_path):
    root = copy_of(drawn, tmp_path / "mini")
    file = root / "scenes.json"
    scenes = json.loads(file.read_text())
    for scene in scenes.values():
        del scene["right_axes"]
    file.write_text(json.dumps(scenes))
    caption = drawn[1]["change_captions"]["CLEVR_default_000000.png"][0]
    shares = mini.accuracy({"000000.png": caption}, root)
    assert math.isnan(shares["place"]) and shares["all four"] == 100
    assert mini.is_right("000000.png", caption, root)


# ---- files ---------------------------------------------------------------------------------------


def test_files_follow_the_release(drawn):
    root, files = drawn
    names = [f"CLEVR_default_{i:06d}.png" for i in range(35)]
    others = [name.replace("default", "nonsemantic") for name in names]
    assert list(files["no_change_captions"]) == names
    assert list(files["change_captions"]) == names + others
    assert {split: len(ids) for split, ids in files["splits"].items()} == COUNTS
    for ids in files["splits"].values():
        for kind in mini.KINDS:
            of_kind = {int(name[:6]) for name in files["type_mapping"][kind]}
            assert len(of_kind & set(ids)) == len(ids) // 5
    for view, folder in mini.VIEWS.items():
        assert Image.open(root / folder / f"CLEVR_{view}_000034.png").size == (64, 64)
    for i, scene in files["scenes"].items():
        boxes = files["change_captions_with_bbox"][i]
        assert (boxes["bbox_before"] is None) == (scene["type"] == "add")
        assert (boxes["bbox_after"] is None) == (scene["type"] == "drop")
        assert 0 <= files["change_captions_by_IOU"][i] <= 1
        for items in scene["objects"].values():
            for x, y, w, h in (item["box"] for item in items):
                assert w * h > 16
                assert x >= 0 and y >= 0 and x + w <= 64 and y + h <= 64
        for right in scene["right_axes"].values():
            assert math.hypot(*right) == pytest.approx(1, abs=1e-3)


def test_overlap_is_that_of_two_boxes():
    assert mini.overlap([0, 0, 4, 2], [0, 0, 4, 2]) == 1
    assert mini.overlap([0, 0, 4, 2], [2, 0, 4, 2]) == pytest.approx(1 / 3)
    assert mini.overlap([0, 0, 4, 2], [5, 5, 4, 2]) == 0


def test_a_scene_is_drawn_again_if_an_object_hides(tmp_path, monkeypatch):
    drawn = []
    draw = mini.draw

    def hide(scene, camera):
        picture = draw(scene, camera)
        if not drawn:
            picture.parts = [0.4] * len(scene)
        drawn.append(picture)
        return picture

    monkeypatch.setattr(mini, "draw", hide)
    mini.render(tmp_path, {"train": 5})
    assert len(drawn) >= 1 + 3 * 5  # the first scene's first picture, then three of each scene
    for view in mini.VIEWS:
        assert mini.picture_file(tmp_path, view, 0).exists()


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*.*")}


def test_the_seed_decides_every_byte(drawn, tmp_path):
    mini.render(tmp_path / "same", COUNTS, seed=3)
    mini.render(tmp_path / "other", COUNTS, seed=4)
    assert contents(tmp_path / "same") == contents(drawn[0])
    assert contents(tmp_path / "other") != contents(drawn[0])


# ---- networks ------------------------------------------------------------------------------------


def test_the_feature_network_repeats_itself(drawn):
    first = mini.train_feature_net(drawn[0], steps=3, seed=1)
    second = mini.train_feature_net(drawn[0], steps=3, seed=1)
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    features = first(x)
    assert features.shape == (2, 128, 8, 8)
    torch.testing.assert_close(features.mean(1), torch.zeros(2, 8, 8), rtol=0, atol=1e-3)
    torch.testing.assert_close(features.square().mean(1), torch.ones(2, 8, 8), rtol=0, atol=1e-3)
    torch.testing.assert_close(second(x), features, rtol=0, atol=0)
    assert sum(p.numel() for p in first.parameters()) < 2_000_000


def test_the_feature_network_learns_from_the_nearer_of_two_objects_in_a_cell():
    far = ball(0, 0, color="red") | {"box": [10, 9, 9, 9]}  # the centre (14.5, 13.5) is in (1, 1)
    near = ball(0, 0, color="blue", shape="cube") | {"box": [10, 10, 9, 9]}
    cells = mini.cells_of([[near, far], [far]])
    assert cells.shape == (2, 4, 8, 8)
    assert cells[0, :, 1, 1].tolist() == [1, 2, 0, 1]  # large, blue, rubber, cube
    assert cells[1, :, 1, 1].tolist() == [1, 1, 0, 0]
    assert (cells >= 0).sum() == 2 * 4


def test_the_extractors_name_tells_weights_apart(tmp_path):
    torch.manual_seed(0)
    weights = mini.FeatureNet().state_dict()
    torch.save(weights, tmp_path / "mini_cnn.pt")
    before = torch.random.get_rng_state()
    name, read = mini.extractor(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert name.startswith("mini-cnn-") and len(name) == len("mini-cnn-") + 12
    assert read.keys() == weights.keys()
    weights["pattern"][0] += 1
    torch.save(weights, tmp_path / "mini_cnn.pt")
    assert mini.extractor(tmp_path)[0] != name


def test_preprocess_gives_the_pictures_of_training(drawn):
    images, objects = mini.training_pictures(drawn[0])
    assert len(images) == len(objects) == 3 * 20
    with Image.open(mini.picture_file(drawn[0], "semantic", 0)) as image:
        x = mini.preprocess(image)
    torch.testing.assert_close(x, images[1].float() / 127.5 - 1)
    assert -1 <= x.min() < x.max() <= 1


def test_clip_is_trained_once_and_read_again(drawn, tmp_path):
    root = copy_of(drawn, tmp_path / "mini")
    state = mini.clip_state(root)
    made = (root / "clip.pt").read_bytes()
    again = mini.clip_state(root)
    assert (root / "clip.pt").read_bytes() == made
    assert state["config"] == again["config"] == mini.CLIP_CONFIG
    clip = open_clip.CLIP(**state["config"])
    clip.load_state_dict(state["model"])
    assert clip.context_length == 32
    torch.manual_seed(5)
    repeated = mini.train_clip(root, steps=5 + 20 // 8)
    for name, weight in repeated.state_dict().items():
        torch.testing.assert_close(weight, state["model"][name], rtol=0, atol=0)


def test_a_clip_made_before_is_read_by_its_own_config(tmp_path):
    """It had a context of 48."""
    text = mini.CLIP_CONFIG["text_cfg"] | {"context_length": 48}
    config = mini.CLIP_CONFIG | {"text_cfg": text}
    clip = open_clip.CLIP(**config)
    torch.save({"config": config, "model": clip.state_dict()}, tmp_path / "clip.pt")
    state = mini.clip_state(tmp_path)
    assert state["config"] == config
    open_clip.CLIP(**state["config"]).load_state_dict(state["model"])


def test_every_sentence_and_four_vectors_fit_clips_context():
    captions = list(mini.NO_CHANGE)
    for _, scene in sampled(100, (3, 6)):
        captions += scene["default"]
    tokens = open_clip.SimpleTokenizer(context_length=77)(captions)
    longest = int(tokens.argmax(1).max()) + 1  # the end token has the highest id
    assert longest + 4 <= mini.CLIP_CONFIG["text_cfg"]["context_length"]


def test_phrases_are_true_if_every_name_fits_an_object():
    objects = ["large red rubber sphere".split(), "small blue metal cube".split()]
    assert mini.is_true([{"sphere"}], objects)
    assert mini.is_true([{"red", "sphere"}, {"metal", "cube"}], objects)
    assert not mini.is_true([{"red", "cube"}], objects)
    assert not mini.is_true([{"sphere"}, {"cylinder"}], objects)


def test_random_names_keep_the_shape():
    torch.manual_seed(0)
    words = "large red rubber sphere".split()
    names = mini.random_names([[words]] * 400)
    assert all(name.endswith("sphere") for name in names)
    whole = names.count("large red rubber sphere")
    assert 190 < whole < 270  # half of them, and an eighth of the others
    assert len(set(names)) == 8


# ---- preparation ---------------------------------------------------------------------------------


def test_the_folder_and_the_settings_are_checked(tmp_path):
    root = tmp_path / "mini"
    for scenes, objects, seed, flag in (
        (0, "2,4", 0, "--scenes 0"),
        (5, "2-4", 0, "--objects 2-4"),
        (5, "9,9", 0, "--objects 9,9"),
        (5, "4,2", 0, "--objects 4,2"),
        (5, "2,4", -1, "--data_seed -1"),
    ):
        with pytest.raises(ValueError, match=flag):
            mini.make(root, scenes, objects, seed, "cpu")
        assert not root.exists()
    root.mkdir()
    mini.check_folder(root, 5, "2,4", 0)  # an empty folder is fine
    (root / ".lock").write_text("")
    (root / "mini.json.partial").write_text("")
    mini.check_folder(root, 5, "2,4", 0)
    (root / "mini.json").write_text('{"scenes": 5, "objects": "2,4", "seed": 0}')
    mini.check_folder(root, 5, "2,4", 0)
    with pytest.raises(ValueError, match="made with --scenes 5 --objects 2,4 --data_seed 0; give"):
        mini.check_folder(root, 6, "2,4", 0)
    for broken in ("x", "[]", "{}"):
        (root / "mini.json").write_text(broken)
        with pytest.raises(ValueError, match="mini.json cannot be used.*remove it and run"):
            mini.check_folder(root, 5, "2,4", 0)
    (root / "mini.json").unlink()
    (root / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="is not empty and no mini"):
        mini.check_folder(root, 5, "2,4", 0)


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_what_is_there_is_kept_and_the_rest_is_made(tmp_path, monkeypatch):
    root = tmp_path / "mini"
    for stage in ("change_captions", "train_feature_net"):
        assert not mini.is_made(root)
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(mini, stage, interrupted)
            mini.make(root, 12, "2,3", 0, "cpu")
    mini.make(root, 12, "2,3", 0, "cpu")
    assert mini.is_made(root)
    made = contents(root)
    with monkeypatch.context() as m:
        m.setattr(mini, "render", interrupted)
        m.setattr(mini, "train_feature_net", interrupted)
        mini.make(root, 12, "2,3", 0, "cpu")
    for name in ("scenes.json", "sc_images/CLEVR_semantic_000003.png", "mini_cnn.pt"):
        (root / name).unlink()  # as the error about a broken file advises
        assert not mini.is_made(root)
        mini.make(root, 12, "2,3", 0, "cpu")
        assert contents(root) == made


def test_broken_files_are_named_with_the_remedy(drawn, tmp_path):
    root = copy_of(drawn, tmp_path / "mini")
    remedy = f"remove it and run: python data.py mini --data_dir {root}"

    def check(name, content, call):
        file = root / name
        before = file.read_bytes() if file.exists() else None
        file.write_bytes(content)
        with pytest.raises(ValueError) as e:
            call()
        file.unlink()
        if before is not None:
            file.write_bytes(before)
        assert str(file) in str(e.value)
        return str(e.value)

    mini.read_scenes.cache_clear()
    assert remedy in check("scenes.json", b"{", lambda: mini.accuracy({}, root))
    for name in ("scenes.json", "splits.json", "sc_images/CLEVR_semantic_000000.png"):
        assert remedy in check(name, b"{}", lambda: mini.training_pictures(root))
    for content in (b"x", b""):
        assert remedy in check("mini_cnn.pt", content, lambda: mini.extractor(root))
        assert "remove it: it is" in check("clip.pt", content, lambda: mini.clip_state(root))
    torch.save({}, tmp_path / "empty.pt")
    empty = (tmp_path / "empty.pt").read_bytes()
    assert remedy in check("mini_cnn.pt", empty, lambda: mini.extractor(root))
    assert "config is missing" in check("clip.pt", empty, lambda: mini.clip_state(root))


# ---- with data.py --------------------------------------------------------------------------------


def prepare(root, *flags):
    data.main(["mini", "--data_dir", str(root), "--device", "cpu", *flags])


FLAGS = ("--scenes", "20", "--objects", "2,3")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A complete mini, not to be changed."""
    root = tmp_path_factory.mktemp("prepared") / "mini"
    prepare(root, *FLAGS)
    return root


def test_mini_is_prepared_and_its_references_are_right(prepared):
    dataset = data.load("mini", prepared)
    assert dataset.grid == (128, 8, 8)
    assert len(dataset.pairs("train")) == 40 and len(dataset.pairs("test")) == 20
    assert len(dataset.paths) == 3 * (20 + 10 + 10)
    assert {*mini.KINDS, "semantic change", "only distractor"} <= set(dataset.release.groups)
    captions = {pair.id: pair.captions[0] for pair in dataset.pairs("test")}
    assert set(mini.accuracy(captions, prepared).values()) == {100}


def test_swapped_pairs_have_captions_of_their_own_view(prepared):
    dataset = data.load("mini", prepared)
    scenes = json.loads((prepared / "scenes.json").read_text())
    for scene in dataset.scenes["train"]:
        pair = scene.pairs[0]
        other = scene.swapped[0]
        truth = scenes[str(int(pair.id[:6]))]
        assert "nonsemantic" in other.before
        assert all(all(verdict.values()) for verdict in judged(pair.captions, truth))
        assert all(all(verdict.values()) for verdict in judged(other.captions, swapped(truth)))


def test_interrupted_preparation_is_not_taken_for_complete(tmp_path, monkeypatch):
    root = tmp_path / "mini"
    stages = [(mini, "change_captions"), (mini, "train_feature_net"), (data, "write_features")]
    for module, stage in stages:
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(module, stage, interrupted)
            prepare(root, *FLAGS)
        with pytest.raises((FileNotFoundError, ValueError)):
            data.load("mini", root)
    prepare(root, *FLAGS)
    assert data.load("mini", root).grid == (128, 8, 8)
    features = (root / "features.h5").read_bytes()
    prepare(root, *FLAGS)  # all is there: nothing is made again
    assert (root / "features.h5").read_bytes() == features
    with pytest.raises((ValueError, SystemExit)):
        prepare(root, "--scenes", "21", "--objects", "2,3")
    (root / "features.h5").unlink()
    with pytest.raises((ValueError, SystemExit)):  # also while it is unfinished
        prepare(root, "--scenes", "20", "--objects", "2,4")


def test_the_remedy_for_a_broken_file_mends_it(prepared, tmp_path):
    """The commands name no flags: a folder that others made says which."""
    root = tmp_path / "mini"
    shutil.copytree(prepared, root)
    for name in ("vocab.json", "features.h5", "mini_cnn.pt", "splits.json", "change_captions.json"):
        (root / name).unlink()
        (root / name).write_bytes(b"x")
        with pytest.raises(ValueError, match=name) as e:
            data.load("mini", root)
        assert f"run: python data.py mini --data_dir {root}" in str(e.value)
        (root / name).unlink()
        prepare(root, *FLAGS)
        assert data.load("mini", root).grid == (128, 8, 8)


def test_a_folder_made_before_is_still_read(drawn, tmp_path):
    """Its scenes.json has no axes, there is a file .lock, and its feature file says just this."""
    root = copy_of(drawn, tmp_path / "mini")
    scenes = drawn[1]["scenes"]
    before = {i: {k: v for k, v in s.items() if k != "right_axes"} for i, s in scenes.items()}
    (root / "scenes.json").write_text(json.dumps(before))
    (root / "mini.json").write_text('{"scenes": 20, "objects": "2,4", "seed": 3}')
    (root / ".lock").write_text("")
    torch.save(mini.FeatureNet().state_dict(), root / "mini_cnn.pt")
    names = sorted(path.name for path in root.glob("*/*.png"))
    with h5py.File(root / "features.h5", "w") as f:
        f.attrs["extractor"] = mini.extractor(root)[0]
        f.attrs["preprocessing"] = "RGB, 64x64 bicubic with antialiasing, /127.5 - 1"
        f.attrs["dataset"] = "mini"
        f["image_ids"] = names
        f["features"] = np.zeros((len(names), 128, 8, 8), np.float16)
    words = set()
    for captions in (*drawn[1]["change_captions"].values(), mini.NO_CHANGE):
        for caption in captions:
            words |= set(caption.split())
    vocab = ["<NULL>", "<UNK>", "<START>", "<END>", *sorted(words)]
    data.write_vocab(root, data.Vocab(vocab))
    made = contents(root)
    dataset = data.load("mini", root)
    assert dataset.grid == (128, 8, 8) and len(dataset.pairs("train")) == 40
    prepare(root, "--scenes", "20", "--data_seed", "3")
    assert contents(root) == made
