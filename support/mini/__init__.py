"""mini: the built-in toy data set. Published data sets and networks have to be downloaded. mini is
drawn in a minute instead, so that every method can be tried on any computer. Licence: MIT.

A scene has two to four balls, cubes and cylinders on a grey floor. It is drawn three times, each
time with a different camera and light: unchanged (the "default" picture), with one change
("semantic"), and unchanged once more ("nonsemantic", the distractor). Six sentences describe the
change, and six others say that nothing has changed. The folder has the layout of CLEVR-Change's
release (Park et al., ICCV 2019), plus two files:

    mini.json     the number of training scenes and the VERSION below, written when all is done
    scenes.json   the truth about each scene, by which `accuracy` judges captions
"""

import functools
import json
import signal
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from common import InputError
from support.files import progress, write_text
from support.mini.scenes import ATTRIBUTES, KINDS, VIEWS, draw_visible, sample_cameras, sample_scene
from support.mini.sentences import NO_CHANGE, change_captions

SEED = 0  # of all scenes
VERSION = 2  # of the pictures and of everything else in the folder


def picture_file(root: Path, view: str, scene: int) -> Path:
    return root / VIEWS[view] / f"CLEVR_{view}_{scene:06d}.png"


def overlap(a: list[int], b: list[int]) -> float:
    """Intersection over union of two boxes [x, y, w, h]."""
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    both = max(width, 0) * max(height, 0)
    return both / (a[2] * a[3] + b[2] * b[3] - both)


def describe(kind: str, changed: int, scenes: list, cameras: list, boxes: list) -> dict:
    """What the files say about a scene. scenes, cameras, boxes: for each of its three pictures, in
    the order of VIEWS, the objects, the camera, and the objects' boxes."""
    objects = {}
    right_axes = {}
    for view, items, camera, in_view in zip(VIEWS, scenes, cameras, boxes, strict=True):
        objects[view] = []
        for item, box in zip(items, in_view, strict=True):
            shown = {name: item[name] for name in ATTRIBUTES}
            shown["box"] = box
            shown["xyz"] = [round(x, 3) for x in item["xyz"]]
            objects[view].append(shown)
        right_axes[view] = [round(float(x), 4) for x in camera.right[:2]]  # z is 0
    before = boxes[0].copy()
    after = boxes[1].copy()
    if kind == "add":
        before.insert(changed, None)
    elif kind == "drop":
        after.insert(changed, None)
    overlaps = [overlap(a, b) for a, b in zip(before, after, strict=True) if a and b]
    iou = round(sum(overlaps) / len(overlaps), 4)
    # Left and right are as in the picture that captions describe: the "before" picture (default or,
    # in swapped pairs, nonsemantic). Only the semantic picture shows an added object.
    default, semantic, nonsemantic = [camera.right for camera in cameras]
    right = semantic if kind == "add" else default
    right_if_swapped = semantic if kind == "add" else nonsemantic
    truth = {"type": kind, "changed": changed, "iou": iou, "objects": objects}
    truth["right_axes"] = right_axes  # by which `accuracy` judges words of place
    return {
        "truth": truth,
        "boxes": {"bbox_before": before[changed], "bbox_after": after[changed]},
        "default": change_captions(kind, *scenes[:2], changed, right),
        "nonsemantic": change_captions(kind, *scenes[:2], changed, right_if_swapped),
    }


def draw_scene(root: Path, job: tuple[int, int, int]) -> dict:
    """Draws a scene into the folder root -> what `describe` says, and six no-change sentences.
    job: the number of the split, the scene's number in it, and its number in the folder. A scene
    depends on the first two alone, not on how many there are or on which process draws it."""
    split, number, i = job
    rng = np.random.default_rng([SEED, split, number])
    kind = KINDS[number % len(KINDS)]
    pictures = None
    while pictures is None:
        before, after, changed = sample_scene(rng, kind)
        scenes = [before, after, before]
        cameras = sample_cameras(rng)
        pictures = draw_visible(scenes, cameras)
    for view, picture in zip(VIEWS, pictures, strict=True):
        Image.fromarray(picture.image).save(picture_file(root, view, i), compress_level=1)
    made = describe(kind, changed, scenes, cameras, [picture.boxes for picture in pictures])
    made["same"] = rng.permutation(NO_CHANGE)[:6].tolist()
    return made


def render(root: Path, counts: dict[str, int]) -> None:
    """Draws mini into the folder root, with one process for each core. counts: split -> number of
    scenes, in whose order they are numbered; kinds of change take turns within each split."""
    splits = {}
    jobs = []
    for split, (name, count) in enumerate(counts.items()):
        splits[name] = list(range(len(jobs), len(jobs) + count))
        jobs += [(split, number, i) for number, i in enumerate(splits[name])]
    for folder in VIEWS.values():
        (root / folder).mkdir(parents=True)
    # On Ctrl-C, only this process raises KeyboardInterrupt; the others end with the pool.
    # multiprocessing.Pool would end them by SIGTERM, which run_main handles: that may hang.
    ignore_ctrl_c = (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(initializer=signal.signal, initargs=ignore_ctrl_c)
    try:
        drawn = pool.map(functools.partial(draw_scene, root), jobs, chunksize=10)
        scenes = list(progress(drawn, total=len(jobs), desc="drawing mini (once)", unit="scene"))
    finally:
        pool.shutdown(cancel_futures=True)
    files = defaultdict(dict, splits=splits, type_mapping={kind: [] for kind in KINDS})
    for i, scene in enumerate(scenes):
        default = picture_file(root, "default", i).name
        files["scenes"][i] = scene["truth"]
        files["change_captions"][default] = scene["default"]
        files["no_change_captions"][default] = scene["same"]
        files["change_captions_with_bbox"][i] = scene["boxes"]
        files["change_captions_by_IOU"][i] = scene["truth"]["iou"]
        files["type_mapping"][scene["truth"]["type"]].append(f"{i:06d}.png")
    for i, scene in enumerate(scenes):
        nonsemantic = picture_file(root, "nonsemantic", i).name
        files["change_captions"][nonsemantic] = scene["nonsemantic"]
    for name, content in files.items():
        write_text(root / f"{name}.json", json.dumps(content, separators=(",", ":")))


def make(root: Path, scenes: int | None = None) -> None:
    """Draws mini with this number of training scenes, unless it exists. Validation has 5 % as many
    and test 10 %, but at least ten. None: 5,000 or, of a mini that exists, as many as it has.
    InputError if the folder holds anything else, such as a mini of another size or half a mini."""
    complete = root / "mini.json"
    found = json.loads(complete.read_text(encoding="utf-8")) if complete.exists() else {}
    if scenes is None:
        scenes = found.get("scenes", 5000)
    content = {"scenes": scenes, "version": VERSION}
    if found == content:
        return
    names = {file.name for file in root.glob("*")}
    if names:
        remedy = "give another --data_dir, or the --dataset that is there"
        if "pairs.csv" in names:
            remedy = "for the pairs in its pairs.csv, add --dataset pairs"
        elif names <= {*VIEWS.values()}:  # the first files of mini
            remedy = "if it is being drawn, wait; if its drawing was interrupted, delete the folder"
        raise InputError(f"{root} has no complete mini of {scenes} training scenes; {remedy}")
    render(root, {"train": scenes, "val": max(10, scenes // 20), "test": max(10, scenes // 10)})
    write_text(complete, json.dumps(content))  # last
