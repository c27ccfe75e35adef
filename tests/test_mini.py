"""Tests of the built-in data set: drawing, sentences and how they are judged, files, the two
networks, preparation."""

import functools
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import make_mini_networks as training
import numpy as np
import pytest
import torch
from PIL import Image

import cheers
import data
import mini
import rdd_acr

ROOT = Path(__file__).parents[1]
COUNTS = {"train": 20, "val": 5, "test": 10}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A small mini, which tests must not change, and its files' contents."""
    root = tmp_path_factory.mktemp("mini")
    mini.render(root, COUNTS)
    return root, {name: json.loads((root / f"{name}.json").read_text()) for name in mini.FILES}


def ball(x, y, **other):
    item = {"size": "large", "color": "red", "material": "rubber", "shape": "sphere"}
    return item | {"xyz": [x, y, 0.8], "turn": 0.3} | other


def camera_at(number):
    """A random camera; number is the seed."""
    return mini.sample_cameras(np.random.default_rng(number))[0]


# ---- drawing -------------------------------------------------------------------------------------


def is_inside(shape, x, y, z):
    """Which points lie inside an object? They are given in its own frame, in units of half its
    height."""
    if shape == "sphere":
        return x * x + y * y + z * z <= 1
    if shape == "cylinder":
        return (x * x + y * y <= 1) & (abs(z) <= 1)
    return (abs(x) <= 1) & (abs(y) <= 1) & (abs(z) <= 1)


@pytest.mark.parametrize("shape", mini.ATTRIBUTES["shape"])
def test_box_and_area_equal_a_march_along_every_ray(shape):
    camera = camera_at(0)
    item = ball(0.4, -0.3, shape=shape)
    picture = mini.draw([item], camera)
    cos = np.cos(item["turn"])
    sin = np.sin(item["turn"])
    turn = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]]) / 0.8
    centre = np.array(item["xyz"])
    eye = camera.eye.astype(float)
    place = 0.38 * ((2 * np.arange(128) + 1) / 128 - 1)  # two rays a pixel each way
    steps = np.linspace(-1.2, 1.2, 193)
    hit = np.zeros((128, 128), bool)
    for row in range(128):
        rays = camera.forward.astype(float) + place[:, None] * camera.right
        rays -= place[row] * camera.up  # (128, 3)
        middle = rays @ (centre - eye) / np.square(rays).sum(1)
        t = middle[:, None] + steps  # (128, 193)
        points = eye - centre + t[..., None] * rays[:, None]
        own = np.moveaxis(points @ turn.T, -1, 0)
        hit[row] = is_inside(shape, *own).any(1)
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
    both = mini.draw([far, near], camera_at(1))
    alone = mini.draw([far], camera_at(1))
    assert both.parts[1] == 1 and both.parts[0] < 1
    assert both.areas[0] < alone.areas[0]
    assert both.boxes[0] == alone.boxes[0]  # a box is that of the whole object
    x, y, w, h = both.boxes[1]
    red, _, blue = both.image[y + h // 2, x + w // 2].astype(int)
    assert red > 2 * blue


# ---- words and what is true ----------------------------------------------------------------------


def sampled(count):
    """Scenes as the files describe them, but not drawn."""
    rng = np.random.default_rng(5)
    for n in range(count):
        kind = mini.KINDS[n % 5]
        before, after, changed = mini.sample_scene(rng, kind)
        scenes = [before, after, before]
        boxes = [[[0, 0, 9, 9]] * len(scene) for scene in scenes]
        cameras = mini.sample_cameras(rng)
        yield scenes, mini.describe(kind, changed, scenes, cameras, boxes)


def swapped(truth):
    """The truth about a swapped pair, whose "before" is the nonsemantic picture."""
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
    assert clarity == pytest.approx(1)  # on the diagonal: as unclear as possible


def test_captions_are_distinct_and_true():
    places = 0
    wrong_from_there = 0
    for scenes, scene in sampled(300):
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
        if truth["type"] != "add":
            verdicts = judged(nonsemantic, truth)  # as if they were written from the default view
            wrong_from_there += not all(verdict.get("place", True) for verdict in verdicts)
    assert places > 0.8 * 300 * 12
    assert 0 < wrong_from_there < 30


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
        "all four": False,  # "large sphere" could be either
        "new value": False,
    }
    assert mini.judge("000007.png_n", "nothing was changed", truth) == {"distractors": True}
    assert mini.judge("000007.png_n", "the large sphere is gone", truth) == {"distractors": False}


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
    return mini.judge("000000.png", caption, truth).get("place")


@pytest.mark.parametrize(
    "place, expected",
    [
        ("left of the large red sphere", True),
        ("right of the large red sphere", False),
        ("right of the small sphere", True),
        ("left of the red sphere", True),  # true of one red sphere
        ("right of the red sphere", True),  # and of another
        ("behind the red sphere", False),
        ("in front of the gray cube", True),
        ("in front of the yellow cube", False),  # an object is not in front of itself
        ("in front of the cube", True),
        ("in front of the gray sphere", False),  # there is no such object
        ("in front of the", False),
        ("in front of the gray cube that is left of the large sphere", True),
        ("in front of the gray cube that is left of the small sphere", False),
        ("in the scene", None),  # says no place
    ],
)
def test_places_are_judged(place, expected):
    assert place_of(f"the yellow cube that is {place} is gone") is expected
    assert place_of(f"someone moved the yellow cube that is {place}") is expected


def test_accuracy_and_is_right_read_the_truth(drawn):
    root, files = drawn
    captions = {}
    for i, name in enumerate(files["no_change_captions"]):
        captions[f"{i:06d}.png"] = files["change_captions"][name][0]
        captions[f"{i:06d}.png_n"] = files["no_change_captions"][name][0]
    names = ["change type", "all four", "new value", "place", "distractors"]
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


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*.*")}


def test_a_scene_depends_on_its_split_and_number_alone(drawn, tmp_path, monkeypatch):
    """This also holds if processes are spawned, as on macOS and Windows."""
    spawn = multiprocessing.get_context("spawn").Pool
    monkeypatch.setattr(multiprocessing, "Pool", functools.partial(spawn, 1))
    root, files = drawn
    mini.render(tmp_path, {"train": 7, "val": 2})
    for i, same in ((0, 0), (6, 6), (7, 20), (8, 21)):  # 7 and 8 are the first two of val
        for view in mini.VIEWS:
            picture = mini.picture_file(tmp_path, view, i).read_bytes()
            assert picture == mini.picture_file(root, view, same).read_bytes()
    scenes = json.loads((tmp_path / "scenes.json").read_text())
    assert scenes["8"] == files["scenes"]["21"]
    assert len({json.dumps(scene) for scene in files["scenes"].values()}) == 35


def test_drawing_can_be_interrupted_and_goes_on(tmp_path):
    """Interrupts data.py as a script, which turns signals and errors into exit codes."""
    root = tmp_path / "mini"
    flags = ["--data_dir", str(root), "--scenes", "100000", "--device", "cpu"]

    def begin():  # a process group of its own that handles Ctrl-C, as in a terminal
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    call = [sys.executable, str(ROOT / "data.py"), "mini", *flags]
    process = subprocess.Popen(call, stderr=subprocess.PIPE, text=True, preexec_fn=begin)
    for _ in range(600):
        if list(root.glob("images/*.png")):
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches all processes
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # none is left
    mini.check_folder(root, 100000)


# ---- networks ------------------------------------------------------------------------------------


def three_pictures():
    """Pictures as the networks see them (3, 3, 64, 64), and the names of the objects in each."""
    pictures = []
    names = []
    for number in range(3):
        rng = np.random.default_rng(number)
        scene, _, _ = mini.sample_scene(rng, "drop")
        image = mini.draw(scene, mini.sample_cameras(rng)[0]).image
        pictures.append(mini.preprocess(Image.fromarray(image)))
        names.append({mini.phrase(item) for item in scene})
    return torch.stack(pictures), names


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
    x, _ = three_pictures()
    with torch.no_grad():
        features = mini.feature_net().eval()(x)
    assert features.shape == (3, 128, 8, 8)
    torch.testing.assert_close(features.mean(1), torch.zeros(3, 8, 8), rtol=0, atol=1e-3)
    torch.testing.assert_close(features.square().mean(1), torch.ones(3, 8, 8), rtol=0, atol=1e-3)
    torch.testing.assert_close(features[:, ::32, 3:5, 4], RECORDED, rtol=0, atol=0.02)


def test_clip_ranks_the_names_of_what_a_picture_shows():
    clip, tokenizer = mini.load_clip()
    x, shown = three_pictures()
    names = training.whole_names()
    with torch.no_grad():
        pictures = clip.encode_image(x, normalize=True)
    text = cheers.embed_texts(clip, tokenizer, names)
    for scores, true in zip(pictures @ text.T, shown, strict=True):
        best = [names[i] for i in scores.topk(20).indices]
        assert true <= set(best)


def test_clip_reads_all_that_methods_ask_of_it():
    """The text encoding of RDD+ACR and CHEERS equals that of CLIP itself, to the last word."""
    clip, tokenizer = mini.load_clip()
    texts = [*mini.NO_CHANGE, rdd_acr.NOUN_PROMPT + "red cube", rdd_acr.VERB_PROMPT + "is gone"]
    for _, scene in sampled(100):
        texts += scene["default"]
    tokens = tokenizer(texts)
    longest = int(tokens.argmax(1).max()) + 1
    assert longest + 4 <= clip.context_length  # RDD+ACR puts four learned vectors before the words
    expected = clip.encode_text(tokens, normalize=True)
    assert len(expected.unique(dim=0)) == len(set(texts))
    torch.testing.assert_close(cheers.embed_texts(clip, tokenizer, texts), expected)
    prompted = rdd_acr.encode_prompted(clip, tokens[:, :longest])
    torch.testing.assert_close(torch.nn.functional.normalize(prompted, dim=-1), expected)


@pytest.mark.parametrize("text", ["the red pyramid is gone", "the cube " * 20])
def test_clip_refuses_what_it_cannot_read(text):
    _, tokenizer = mini.load_clip()
    with pytest.raises(mini.InputError, match="--clip mini"):
        tokenizer([text])


def test_the_networks_can_be_trained_anew(drawn):
    """Runs the script that made them for a few steps."""
    images, objects = training.read_pictures(drawn[0], "train")
    net, head = training.train_feature_net(images, objects, steps=3)
    accuracy = training.attribute_accuracy(net, head, images, objects)
    assert set(accuracy) == set(mini.ATTRIBUTES)
    words = training.words_of_mini()
    clip = training.train_clip(images, objects, words, steps=2)
    _, tokenizer = mini.load_clip()
    assert list(tokenizer.ids) == words
    assert 0 <= training.name_ranking(clip, tokenizer, images, objects) <= 1


# ---- preparation ---------------------------------------------------------------------------------


def prepare(root, *flags):
    data.main(["mini", "--data_dir", str(root), "--device", "cpu", *flags])


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A complete mini, which tests must not change."""
    root = tmp_path_factory.mktemp("prepared") / "mini"
    prepare(root, "--scenes", "20")
    return root


def test_mini_is_prepared_and_its_references_are_right(prepared):
    dataset = data.load("mini", prepared)
    assert dataset.grid == (128, 8, 8)
    assert dataset.state()["extractor"] == "mini-cnn"
    assert len(dataset.pairs("train")) == 40 and len(dataset.pairs("test")) == 20
    assert len(dataset.paths) == 3 * (20 + 10 + 10)
    assert {*mini.KINDS, "semantic change", "only distractor"} <= set(dataset.release.groups)
    captions = {pair.id: pair.captions[0] for pair in dataset.pairs("test")}
    assert set(mini.accuracy(captions, prepared).values()) == {100}


def test_each_size_has_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = []
    monkeypatch.setattr(mini, "make", lambda root, scenes: made.append((root, scenes)))
    for flags in ([], ["--scenes", "500"], ["--scenes", "500", "--data_dir", "other"]):
        with pytest.raises(FileNotFoundError):
            data.main(["mini", *flags])
    assert made == [(Path("data/mini"), 5000), (Path("data/mini-500"), 500), (Path("other"), 500)]


def test_what_a_folder_holds_already_is_never_mixed(prepared, tmp_path):
    with pytest.raises(mini.InputError, match="--scenes"):
        prepare(tmp_path / "mini", "--scenes", "0")
    with pytest.raises(mini.InputError, match="--scenes 20"):
        prepare(prepared, "--scenes", "21")
    of_others = tmp_path / "thesis"
    of_others.mkdir()
    (of_others / "thesis.txt").write_text("")
    with pytest.raises(mini.InputError, match="--data_dir"):
        prepare(of_others)
    before = tmp_path / "before"
    before.mkdir()
    earlier = '{"scenes": 5000, "objects": "2,4", "seed": 0}'  # as an earlier version made it
    for content in (earlier, "x", "[]"):
        (before / "mini.json").write_text(content)
        with pytest.raises(mini.InputError, match=r"mini\.json|remove it"):
            prepare(before)


def test_interrupted_preparation_is_not_taken_for_complete(tmp_path, monkeypatch):
    """This holds even if the first SIGTERM ends no process, as in training."""
    root = tmp_path / "mini"
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    for module, stage in ((mini, "write_text"), (mini, "progress"), (data, "write_features")):
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(module, stage, interrupted)
            prepare(root, "--scenes", "20")
        with pytest.raises((FileNotFoundError, ValueError)):
            data.load("mini", root)
    prepare(root, "--scenes", "20")
    made = contents(root)
    with monkeypatch.context() as m:
        m.setattr(mini, "render", interrupted)
        m.setattr(data, "write_features", interrupted)
        prepare(root, "--scenes", "20")  # everything exists: nothing is made again
    signal.signal(signal.SIGTERM, before)
    assert contents(root) == made


def test_the_remedy_for_a_broken_file_mends_it(prepared, tmp_path):
    root = tmp_path / "mini"
    shutil.copytree(prepared, root)
    for name in ("features.h5", "splits.json", "scenes.json"):
        (root / name).write_bytes(b"x")
        mini.read_scenes.cache_clear()
        with pytest.raises(ValueError, match=name) as e:
            mini.accuracy({}, data.load("mini", root).root)
        assert f"run: python data.py mini --data_dir {root}" in str(e.value)
        (root / name).unlink()
        prepare(root, "--scenes", "20")
        assert data.load("mini", root).grid == (128, 8, 8)
    mini.read_scenes.cache_clear()
