"""Tests of the embedded data set: the ray caster, the scenes, the sentences, the files and the feature network."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import data

SCENES = {"train": 20, "val": 5, "test": 10}
NAMES = ("change_captions", "no_change_captions", "splits", "type_mapping", "change_captions_with_bbox",
         "change_captions_by_IOU", "scenes")


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    root = tmp_path_factory.mktemp("mini")
    data.render_mini(root, SCENES, seed=3)
    return root, {name: json.loads((root / f"{name}.json").read_text()) for name in NAMES}


def ball(x, y, **words):
    return {"shape": "sphere", "size": "large", "color": "red", "material": "rubber", "xyz": [x, y, 0.8],
            "turn": 0.3} | words


def inside(shape, x, y, z):
    """Which points of a body's own frame, in units of its half height, lie in it?"""
    return {"sphere": x * x + y * y + z * z <= 1, "cylinder": (x * x + y * y <= 1) & (abs(z) <= 1),
            "cube": (abs(x) <= 1) & (abs(y) <= 1) & (abs(z) <= 1)}[shape]


@pytest.mark.parametrize("shape", data.ATTRIBUTES["shape"])
def test_box_and_area_equal_a_march_along_every_ray(shape):
    (camera,) = data._sample_cameras(np.random.default_rng(0), 1, 1)
    item = ball(0.4, -0.3, shape=shape)
    _, boxes, area, part = data._render([item], camera, side=32)
    eye, right, up, forward = (camera[name].astype(float) for name in ("eye", "right", "up", "forward"))
    cos, sin = np.cos(item["turn"]), np.sin(item["turn"])
    turn = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]]) / 0.8
    hit = np.zeros((64, 64), bool)  # two samples a pixel each way
    for row in range(64):
        for column in range(64):
            u, v = (0.38 * ((2 * i + 1) / 64 - 1) for i in (column, row))
            ray = forward + u * right - v * up
            middle = (np.array(item["xyz"]) - eye) @ ray / (ray @ ray)
            t = np.linspace(middle - 1.2, middle + 1.2, 193)
            points = eye[:, None] + t * ray[:, None] - np.array(item["xyz"])[:, None]
            hit[row, column] = inside(shape, *(turn @ points)).any()
    rows, columns = (np.flatnonzero(hit.any(axis)) // 2 for axis in (1, 0))
    expected = [columns[0], rows[0], columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1]
    assert boxes[0] == expected
    assert area[0] == pytest.approx(hit.sum() / 4, rel=0.02) and part[0] == 1


def test_the_nearer_object_hides_the_other():
    (camera,) = data._sample_cameras(np.random.default_rng(0), 1, 1, 0)  # no jitter: from (7, -7, 6)
    near, far = ball(1.2, -1.2), ball(-0.8, 0.8, color="blue")
    image, boxes, area, part = data._render([far, near], camera)
    _, alone, whole, _ = data._render([far], camera)
    assert part[1] == 1 and part[0] < 1 and area[0] < whole[0]
    assert boxes[0] == alone[0]  # a box is that of the whole object
    x, y, w, h = boxes[1]
    red, _, blue = image[y + h // 2, x + w // 2].astype(int)
    assert red > 2 * blue


def test_an_object_differs_from_the_floor_inside_its_box_only():
    (camera,) = data._sample_cameras(np.random.default_rng(1), 1, 1, 0)
    camera |= {"light": np.float32([0, 0, 1])}  # from above, the soft shadow stays close
    one, _, _, _ = data._render([ball(-1, 1)], camera)
    two, boxes, _, _ = data._render([ball(-1, 1), ball(1.5, 1, color="yellow")], camera)
    rows, columns = (np.abs(one.astype(int) - two).max(2) > 60).nonzero()
    x, y, w, h = boxes[1]
    assert len(rows) > 0.5 * w * h
    assert x <= columns.min() and columns.max() < x + w and y <= rows.min() and rows.max() < y + h


def test_relations_turn_with_the_camera():
    here, there = ball(1.0, 0.2), ball(-1.0, 0.0)
    rights = np.array([[1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]])
    words = [data._relation(here, there, right)[0] for right in rights]
    assert words == ["right of", "left of", "in front of", "behind"]
    _, clarity = data._relation(ball(1, 1), ball(0, 0), np.array([1, 0, 0]))
    assert clarity == pytest.approx(1)  # on the diagonal: as unclear as can be


@pytest.mark.parametrize("objects", [(2, 2), (2, 4), (3, 6)])
def test_captions_are_distinct_and_name_one_object(objects):
    rng, scenes = np.random.default_rng(5), {}
    while len(scenes) < 150:
        kind = data.KINDS[len(scenes) % 5]
        before, after, changed = data._sample_scene(rng, kind, objects)
        for scene in (before, after):
            assert len({tuple(item[name] for name in data.ATTRIBUTES) for item in scene}) == len(scene)
        texts = data._captions(kind, before, after, changed, data._sample_cameras(rng, 1, 1)[0]["right"])
        assert len(set(texts)) == 6 and max(len(text.split()) for text in texts) <= 18
        scenes[str(len(scenes))] = {"type": kind, "changed": changed,
                                    "objects": {"default": before, "semantic": after}}
        for text in texts:
            predictions = {f"{len(scenes) - 1:06d}.png": text}
            scores = data.mini_accuracy(predictions, scenes)
            assert all(score == 100 or np.isnan(score) for score in scores.values())


def test_the_parser_and_the_scores_see_mistakes():
    assert all(data.parse_caption(text)["type"] == "same" for text in data.NO_CHANGE)
    assert data.parse_caption("the red cube that is left of the large sphere became metal") == {
        "type": "material", "size": None, "color": "red", "material": None, "shape": "cube", "value": "metal"}
    scene = [ball(0, 0), ball(2, 0, color="blue")]
    scenes = {"7": {"type": "color", "changed": 0, "objects": {
        "default": scene, "semantic": [scene[0] | {"color": "cyan"}, scene[1]]}}}
    predictions = {"000007.png": "the large sphere became gray", "000007.png_n": "nothing was changed"}
    scores = data.mini_accuracy(predictions, scenes)
    assert scores == {"change type": 100, "distractors": 100, "size": 100, "color": 0, "material": 0, "shape": 100,
                      "all four": 0, "new value": 0}  # "large sphere" could be either


def test_files_follow_the_release(mini):
    root, files = mini
    names = [f"CLEVR_default_{i:06d}.png" for i in range(35)]
    assert list(files["no_change_captions"]) == names
    assert list(files["change_captions"]) == names + [name.replace("default", "nonsemantic") for name in names]
    assert {split: len(ids) for split, ids in files["splits"].items()} == SCENES
    for ids in files["splits"].values():
        assert {len(set(ids) & {int(name[:6]) for name in files["type_mapping"][kind]}) for kind in data.KINDS} == {
            len(ids) // 5}
    for view, folder in data.CLEVR_FOLDERS.items():
        assert Image.open(root / folder / f"CLEVR_{view}_000034.png").size == (64, 64)
    for i, scene in files["scenes"].items():
        boxes = files["change_captions_with_bbox"][i]
        assert (boxes["bbox_before"] is None) == (scene["type"] == "add")
        assert (boxes["bbox_after"] is None) == (scene["type"] == "drop")
        assert 0 <= files["change_captions_by_IOU"][i] <= 1
        for x, y, w, h in (item["box"] for view in scene["objects"].values() for item in view):
            assert w * h > 16 and x >= 0 and y >= 0 and x + w <= 64 and y + h <= 64


def test_mini_is_prepared_and_captioned_right(tmp_path, capsys):
    data.prepare_mini(tmp_path / "mini", 20, "2,3", 0, "cpu")
    dataset = data.load("mini", tmp_path / "mini")
    assert dataset.grid == (128, 8, 8) and len(dataset.pairs("train")) == 40 and len(dataset.pairs("test")) == 20
    captions = {p.id: p.captions[0] for p in dataset.pairs("test")}
    maps = {i: {"attention": torch.rand(8, 8)} for i in captions}
    report = dataset.report("test", captions, maps)
    assert set(report["accuracy"].values()) == {100} and report["pointing"]["boxes"]["total"] == 2 * (1 + 1 + 2 + 2 + 2)
    assert {*data.KINDS, "semantic change", "only distractor"} <= set(dataset.groups("test"))
    groups = set(report["pointing"]["attention"])
    assert groups >= {"color", "drop"} and "no change" not in groups
    texts, images = data.clip_embeddings("mini", dataset.root, ["red cube"], dataset.paths, "cpu")  # its own CLIP
    assert len(texts) == 1 and len(images) == len(dataset.paths) == 3 * (20 + 10 + 10)
    both, _ = data.clip_embeddings("mini", dataset.root, ["red cube", "gray ball"], dataset.paths, "cpu")
    torch.testing.assert_close(both[:1], texts)
    changed = next(p for p in dataset.pairs("test") if p.id in dataset.kinds["color"])
    dataset.paths[changed.after].unlink()  # the other scores are not lost for a picture
    assert "pointing" not in dataset.report("test", captions, maps)
    assert f"such as {dataset.root}" in capsys.readouterr().out


def test_a_scenes_views_are_spread_by_a_factor_of_its_own():
    """Camera of view v = (1 - s) a + s b_v: near s = 0 a scene's views stand together, near 1 as far apart as two
    scenes'."""
    cameras = data._sample_cameras(np.random.default_rng(0), 500, 3)
    eye = np.stack([view["eye"] for view in cameras], 1).reshape(3, 500, 3)
    apart = np.abs(eye[:, :, 0] - eye[:, :, 1]).max(0)  # s |b_0 - b_1|, at most 5 s
    assert apart.min() < 0.05 and 3 < apart.max() < 5
    middle = np.median(apart)
    assert 0.8 < middle < 1.6  # the median of s max_xyz |b_0 - b_1| is about 1.1; with s = 1 it would be 2.6
    assert (np.abs(eye - np.array([7, -7, 6])[:, None, None]) <= 2.5 + 1e-5).all()


def test_a_scene_is_drawn_again_if_an_object_hides(tmp_path, monkeypatch):
    drawn, render = [], data._render

    def hide(scene, camera):
        drawn.append(len(scene))
        image, boxes, area, part = render(scene, camera)
        return image, boxes, area, [0.4 if len(drawn) == 1 else 1] * len(part)

    monkeypatch.setattr(data, "_render", hide)
    data.render_mini(tmp_path, {"train": 5})
    assert len(drawn) >= 1 + 3 * 5  # the first scene's first picture, then three of each scene
    assert all((tmp_path / folder / f"CLEVR_{view}_000000.png").exists() for view, folder in data.CLEVR_FOLDERS.items())


def test_the_seed_decides_every_byte(mini, tmp_path):
    for folder, seed in (("same", 3), ("other", 4)):
        data.render_mini(tmp_path / folder, SCENES, seed=seed)
    contents = [{path.relative_to(root): path.read_bytes() for path in root.rglob("*.*")}
                for root in (mini[0], tmp_path / "same", tmp_path / "other")]
    assert contents[0] == contents[1] != contents[2]


def test_the_feature_network_repeats_itself(mini):
    nets = [data.train_mini_cnn(mini[0], steps=3, seed=1) for _ in range(2)]
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    features = [net(x) for net in nets]
    assert features[0].shape == (2, 128, 8, 8)
    torch.testing.assert_close(features[0].square().mean(1), torch.ones(2, 8, 8), rtol=0, atol=1e-3)
    torch.testing.assert_close(features[0], features[1], rtol=0, atol=0)
    assert sum(p.numel() for p in data.MiniCNN().parameters()) < 2_000_000


def test_interrupted_preparation_is_not_taken_for_complete(tmp_path, monkeypatch):
    root = tmp_path / "mini"

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    def prepare():
        data.prepare_mini(root, 12, "2,3", 0, "cpu")

    for stage in ("_captions", "train_mini_cnn", "write_features", "write_vocab"):
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(data, stage, interrupted)
            prepare()
        with pytest.raises((FileNotFoundError, ValueError)):
            data.load("mini", root)
    prepare()
    assert data.load("mini", root).grid == (128, 8, 8)
    features = (root / "features.h5").read_bytes()
    prepare()  # all is there: nothing is made again
    assert (root / "features.h5").read_bytes() == features
    with pytest.raises(ValueError, match="remove it or choose another"):
        data.prepare_mini(root, 13, "2,3", 0, "cpu")
    with pytest.raises(ValueError, match="remove it or choose another"):  # also while it is unfinished
        (root / "features.h5").unlink()
        data.prepare_mini(root, 12, "2,4", 0, "cpu")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="not empty"):
        data.prepare_mini(tmp_path / "full", 12, "2,3", 0, "cpu")
    for scenes, objects in ((0, "2,4"), (5, "2-4"), (5, "9,9")):
        with pytest.raises(ValueError, match="objects"):
            data.prepare_mini(tmp_path / "odd", scenes, objects, 0, "cpu")
    assert not (tmp_path / "odd").exists()


def test_the_remedy_for_a_broken_file_mends_it(tmp_path):
    """The command that an error names has the flags that the folder was made with."""
    root, flags = tmp_path / "mini", "--scenes 12 --objects 2,3 --data_seed 1"
    data.main(["mini", "--data_dir", str(root), *flags.split(), "--device", "cpu"])
    for name in ("vocab.json", "features.h5", "mini_cnn.pt", "splits.json"):
        (root / name).unlink()
        (root / name).write_bytes(b"x")
        with pytest.raises(ValueError, match=name) as e:
            data.load("mini", root)
        advice, _, command = str(e.value).partition("run: python data.py ")
        assert command == f"mini --data_dir {root} {flags}"
        shutil.rmtree(root) if f"remove {root} and" in advice else (root / name).unlink()
        data.main([*command.split(), "--device", "cpu"])
        assert data.load("mini", root).grid == (128, 8, 8)
    assert "--scenes" not in data.prepare_command("mini", tmp_path)
