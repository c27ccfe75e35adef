"""mini: the built-in toy data set. Only this data set needs the file.

    python data.py mini --data_dir data/mini

Published data sets and the weights of ImageNet networks and of CLIP have to be downloaded. mini is
drawn in a minute instead, so that every method can be tried and tested on any computer.

A scene has two to four balls, cubes and cylinders on a grey floor. It is drawn three times, each
time with a different camera and light: unchanged (the "default" picture), with one change
("semantic"), and unchanged once more ("nonsemantic", the distractor). Six sentences describe the
change, and six others say that nothing has changed. The folder has the layout of CLEVR-Change's
release (Park et al., ICCV 2019), plus two files:

    mini.json     the number of training scenes and this file's VERSION, written when all is done
    scenes.json   the truth about each scene, by which `accuracy` judges captions

Two small networks are shipped in assets/: one whose features replace ResNet-101's, and a CLIP.
tools/make_mini_networks.py trained them on single training pictures and their objects. They have
seen no captions, no pairs, and no validation or test pictures.

An object ("item") is a dict with size, color, material, shape, its centre xyz, and its turn, the
rotation about the vertical in radians. The z axis points up, and the floor is at z = 0. An object
stands on the floor, so the height of its centre, xyz[2], is half its own height. The ray caster
calls this number `half`: it is the radius of a ball or cylinder, and half the side of a cube. In
scenes.json, items have a box [x, y, w, h] and no turn. Licence: MIT.
"""

import functools
import itertools
import json
import math
import re
import signal
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from common import InputError
from support.files import load_tensors, load_weights, progress, write_text

# ---- scenes --------------------------------------------------------------------------------------

KINDS = ("color", "material", "add", "drop", "move")
COLORS = {
    "gray": (87, 87, 87),
    "red": (173, 35, 35),
    "blue": (42, 75, 215),
    "green": (29, 105, 20),
    "brown": (129, 74, 25),
    "purple": (129, 38, 192),
    "cyan": (41, 208, 208),
    "yellow": (255, 238, 51),
}
ATTRIBUTES = {  # in the usual order of English adjectives
    "size": ("small", "large"),
    "color": tuple(COLORS),
    "material": ("rubber", "metal"),
    "shape": ("sphere", "cube", "cylinder"),
}
COMBINATIONS = list(itertools.product(*ATTRIBUTES.values()))  # (size, color, material, shape)
OBJECTS = (2, 4)  # fewest and most objects in the "before" picture
RADIUS = {"small": 0.45, "large": 0.8}
FLOOR = 2.4  # objects stand within this distance of the middle, along x and along y
GAP = 0.25  # least gap between the RADIUS circles of any two objects; corners of cubes stick out
LEAST_MOVE = 1.2  # least distance of a moved object from its old place
VIEWS = {"default": "images", "semantic": "sc_images", "nonsemantic": "nsc_images"}  # -> folder
SEED = 0  # of all scenes
VERSION = 2  # of the pictures and of everything else in the folder
SIDE = 64  # of a picture, in pixels


def free_position(
    rng: np.random.Generator, radius: float, others: list[dict]
) -> list[float] | None:
    """A floor position (x, y) that is clear of all others, or None if 30 tries find none."""
    for position in rng.uniform(-FLOOR, FLOOR, (30, 2)).tolist():
        for other in others:
            reach = radius + RADIUS[other["size"]] + GAP
            if math.dist(position, other["xyz"][:2]) <= reach:
                break
        else:
            return position
    return None


def sample_scene(rng: np.random.Generator, kind: str) -> tuple[list, list, int]:
    """-> objects before, objects after, and the index of the changed one (for add: its index
    after). No two objects of a scene share all attributes."""
    scene = None
    while scene is None:
        scene = try_scene(rng, kind)
    return scene


def try_scene(rng: np.random.Generator, kind: str) -> tuple[list, list, int] | None:
    """One attempt of sample_scene; None if objects collide, or one moves too little."""
    fewest, most = OBJECTS
    count = int(rng.integers(fewest, most + 1))
    if kind == "add":
        count += 1
    scene = []
    for number in rng.choice(len(COMBINATIONS), count, replace=False):
        item = dict(zip(ATTRIBUTES, COMBINATIONS[number], strict=True))
        radius = RADIUS[item["size"]]
        position = free_position(rng, radius, scene)
        if position is None:
            return None
        half = 0.8 * radius if item["shape"] == "cube" else radius
        item["xyz"] = [*position, half]
        item["turn"] = rng.uniform(0, np.pi / 2)
        scene.append(item)
    changed = count - 1 if kind == "add" else int(rng.integers(count))
    others = scene[:changed] + scene[changed + 1 :]
    if kind == "add":
        return others, scene, changed
    if kind == "drop":
        return scene, others, changed
    old = scene[changed]
    new = dict(old)
    if kind == "move":
        position = free_position(rng, RADIUS[old["size"]], others)
        if position is None or math.dist(position, old["xyz"][:2]) < LEAST_MOVE:
            return None
        new["xyz"] = [*position, old["xyz"][2]]
    else:
        new[kind] = str(rng.choice([word for word in ATTRIBUTES[kind] if word != old[kind]]))
        if phrase(new) in [phrase(other) for other in others]:
            return None
    return scene, [*scene[:changed], new, *scene[changed + 1 :]], changed


# ---- cameras and drawing -------------------------------------------------------------------------

TAN = 0.38  # tangent of half the field of view
RAYS = 2 * SIDE  # across a picture: four rays make a pixel


@dataclass
class Camera:
    """A camera and the lamp of its picture. Vectors are (3,); all but eye have length 1."""

    eye: np.ndarray  # position
    right: np.ndarray  # axes: to the right,
    up: np.ndarray  # up,
    forward: np.ndarray  # and ahead
    light: np.ndarray  # direction to the lamp
    gain: float  # brightness of the picture


@dataclass
class Picture:
    """What `draw` makes of a scene: the image, and a value for each object."""

    image: np.ndarray  # (SIDE, SIDE, 3) uint8
    boxes: list[list[int]]  # [x, y, w, h] in pixels, also around hidden parts; cut at the frame
    areas: list[float]  # number of visible pixels
    shares: list[float]  # visible share of the object's area inside the frame, 0 to 1


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Dot products over the first axis. (3, N) and (3, N) or (3, 1) -> (N,)"""
    return (a * b).sum(0)


def unit(v: np.ndarray) -> np.ndarray:
    return v / np.sqrt(dot(v, v))


def sample_cameras(rng: np.random.Generator) -> list[Camera]:
    """The cameras of a scene's views, each (1 - s) a + s b. A camera a and a spread s in 0 ... 1
    belong to the scene, b to the view. So some scenes' views are alike, and others' far apart."""
    spread = rng.uniform()
    a = rng.uniform(-2.5, 2.5, (2, 3))  # offsets of the camera's position and of its target
    cameras = []
    for _ in VIEWS:
        b = rng.uniform(-2.5, 2.5, (2, 3))
        offset = (1 - spread) * a + spread * b
        eye = np.array([7, -7, 6]) + offset[0]
        target = np.array([0, 0, 0.3]) + [0.25, 0.25, 0.125] * offset[1]
        forward = unit(target - eye)
        right = unit(np.cross(forward, [0, 0, 1]))  # level
        up = np.cross(right, forward)
        light = unit(np.array([-3, -5, 8]) + rng.uniform(-1.5, 1.5, 3))
        vectors = np.stack([eye, right, up, forward, light]).astype(np.float32)
        cameras.append(Camera(*vectors, gain=rng.uniform(0.85, 1.15)))
    return cameras


def rays(camera: Camera) -> np.ndarray:
    """Directions (3, N) of the picture's N = RAYS * RAYS rays, row by row. Their component along
    the camera's axis is 1, so that t in eye + t d is depth."""
    steps = TAN * ((2 * np.arange(RAYS, dtype=np.float32) + 1) / RAYS - 1)  # -TAN ... TAN
    x, y = np.meshgrid(steps, -steps)  # the first row is the highest
    right = camera.right[:, None]
    up = camera.up[:, None]
    forward = camera.forward[:, None]
    return forward + x.ravel() * right + y.ravel() * up


def turned(v: np.ndarray, angle: float) -> np.ndarray:
    """Vectors (3, N), rotated by an angle about the vertical."""
    cos = math.cos(angle)
    sin = math.sin(angle)
    return np.stack([cos * v[0] - sin * v[1], sin * v[0] + cos * v[1], v[2]])


def from_centre(item: dict, points: np.ndarray) -> np.ndarray:
    """Points (3, N), relative to the centre of an object."""
    return points - np.array(item["xyz"], np.float32)[:, None]


def hit(item: dict, origin: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Where rays origin + t d enter an object: t (N,) > 0, or inf if they miss it.

    origin and d are (3, N), or (3, 1) if all rays share them."""
    half = item["xyz"][2]
    o = from_centre(item, origin)
    with np.errstate(divide="ignore", invalid="ignore"):
        if item["shape"] == "cube":
            o = turned(o, -item["turn"])
            d = turned(d, -item["turn"])
            # A ray is inside the cube while, along each of the axes, it is between the two faces.
            low = (-half - o) / d
            high = (half - o) / d
            enters = np.minimum(low, high).max(0)
            leaves = np.maximum(low, high).min(0)
        else:
            # |o + t d| = half is a t^2 + 2 b t + c = 0: a ball in three axes, a cylinder in two.
            axes = 3 if item["shape"] == "sphere" else 2
            a = dot(d[:axes], d[:axes])
            b = dot(o[:axes], d[:axes])
            c = dot(o[:axes], o[:axes]) - half * half
            root = np.sqrt(b * b - a * c)  # NaN if the ray misses; comparisons below are then False
            enters = (-b - root) / a
            leaves = (-b + root) / a
        if item["shape"] == "cylinder":  # also between bottom and top
            low = (-half - o[2]) / d[2]
            high = (half - o[2]) / d[2]
            enters = np.maximum(enters, np.minimum(low, high))
            leaves = np.minimum(leaves, np.maximum(low, high))
        return np.where((enters > 0) & (enters < leaves), enters, np.inf)


def normals(item: dict, points: np.ndarray) -> np.ndarray:
    """Unit normals (3, N) of an object's surface at some of its points (3, N)."""
    p = from_centre(item, points) / item["xyz"][2]
    if item["shape"] == "cube":
        p = turned(p, -item["turn"])
        size = np.abs(p)
        axis = size == size.max(0)  # points of a face are farthest out along the face's normal
        return turned(np.sign(p) * axis, item["turn"])
    if item["shape"] == "cylinder":
        up = np.array([[0], [0], [1]], np.float32)
        return np.where(p[2] > 0.9999, up, p * (1 - up))  # the top, or else the side
    return p


def surface(item: dict, points: np.ndarray, d: np.ndarray, light: np.ndarray) -> np.ndarray:
    """Colours (3, N) of an object's points, seen along d (3, N): 0 to 1, highlights above 1."""
    normal = normals(item, points)
    d = unit(d)
    facing = -dot(d, normal)  # 1 where the surface faces the camera
    lit = np.maximum(dot(light, normal), 0)
    albedo = np.array(COLORS[item["color"]], np.float32)[:, None] / 255
    if item["material"] == "rubber":
        return albedo * (0.2 + 0.8 * lit + 0.25 * facing)
    # Metal mirrors a dark floor, a bright band above the horizon, and a lamp with a hard edge.
    # Without hard edges, it would look like rubber at this picture size.
    mirrored = d + 2 * facing * normal
    rise = mirrored[2]
    sky = np.where(rise < 0, 0.15, np.where(rise < 0.45, 0.9, 0.35))
    lamp = dot(light, mirrored) > 0.93
    return albedo * (0.1 + 0.3 * lit) + (0.65 * albedo + 0.25) * sky + 1.2 * lamp


def floor_light(scene: list[dict], points: np.ndarray, light: np.ndarray) -> np.ndarray:
    """Brightness (N,) of the grey floor at some of its points (3, N)."""
    lamp = np.full_like(points[2], light[2])  # the floor faces up
    for item in scene:
        in_shadow = np.isfinite(hit(item, points, light))
        lamp[in_shadow] *= 0.5
    glow = 0.55 + 0.45 * np.exp(-0.015 * dot(points, points))  # brightest in the middle
    return (0.2 + 0.4 * lamp) * glow


def box_of(area: np.ndarray) -> list[int]:
    """[x, y, w, h] in pixels of the box around the rays for which `area` (RAYS, RAYS) is True."""
    columns = np.flatnonzero(area.any(0)) // 2
    rows = np.flatnonzero(area.any(1)) // 2
    if not len(rows):
        return [0, 0, 0, 0]
    x = int(columns[0])
    y = int(rows[0])
    return [x, y, int(columns[-1]) + 1 - x, int(rows[-1]) + 1 - y]


def draw(scene: list[dict], camera: Camera) -> Picture:
    """Draws a scene. An object outside the frame gets the box [0, 0, 0, 0]."""
    eye = camera.eye[:, None]
    light = camera.light[:, None]
    d = rays(camera)
    depth = eye[2] / np.maximum(-d[2], 1e-3)  # of the floor; very large at the horizon
    owner = np.full(len(depth), -1)  # the object that a ray meets first; -1 is the floor
    covered = []  # for each object, the rays that meet it, even if another object hides it
    for n, item in enumerate(scene):
        t = hit(item, eye, d)
        covered.append(np.isfinite(t))
        nearer = t < depth
        depth[nearer] = t[nearer]
        owner[nearer] = n
    points = eye + depth * d
    colors = np.tile(floor_light(scene, points, light), (3, 1))  # drawn whole, then covered
    boxes = []
    areas = []
    shares = []
    for n, item in enumerate(scene):
        visible = owner == n
        colors[:, visible] = surface(item, points[:, visible], d[:, visible], light)
        boxes.append(box_of(covered[n].reshape(RAYS, RAYS)))
        areas.append(visible.sum() / 4)
        shares.append(visible.sum() / max(covered[n].sum(), 1))
    image = colors.reshape(3, RAYS, RAYS)
    image = image[:, ::2] + image[:, 1::2]  # a pixel is the mean of 2 x 2 rays
    image = (image[:, :, ::2] + image[:, :, 1::2]) / 4  # (3, SIDE, SIDE)
    image = 255 * (camera.gain * image).clip(0, 1) ** (1 / 1.5) + 0.5  # gamma, and .5 for rounding
    return Picture(image.transpose(1, 2, 0).astype(np.uint8), boxes, areas, shares)


# ---- words ---------------------------------------------------------------------------------------

TEMPLATES = {
    "color": ("the {} changed to {}", "the {} became {}", "the {} is now {}"),
    "material": ("the {} changed to {}", "the {} became {}", "the {} is now {}"),
    "add": ("a {} has been added", "someone added a {}", "there is a new {}"),
    "drop": ("the {} is missing", "the {} has been removed", "the {} is gone"),
    "move": ("the {} has been moved", "the {} changed its location", "someone moved the {}"),
}
NO_CHANGE = (
    "there is no change",
    "no change was made",
    "there is no difference",
    "no difference can be seen",
    "nothing has changed",
    "nothing was changed",
    "nothing has been moved",
    "the scene is the same as before",
    "the scene remains the same",
    "the two pictures show the same scene",
    "all objects are the same",
    "everything is in the same place",
)
CLEAR = 1.5  # a relation is clear if its clarity (see `relation`) is at least this


def phrase(item: dict, names: Iterable[str] = ATTRIBUTES) -> str:
    """The named attributes in the usual order: "small red metal cube", "red cube"."""
    return " ".join(item[name] for name in names)


def short_phrase(item: dict, scene: list[dict]) -> str:
    """Colour and shape, plus material, size or both if another object of the scene shares these."""
    for names in (("color", "shape"), ("color", "material", "shape"), ("size", "color", "shape")):
        name = phrase(item, names)
        if [phrase(other, names) for other in scene].count(name) == 1:
            return name
    return phrase(item)


def relation(item: dict, other: dict, right: np.ndarray) -> tuple[str, float]:
    """-> where `item` stands on the floor relative to `other`, and how clearly, for a camera with
    this right axis. The longer of two distances decides, the one sideways or the one away from the
    camera; clarity is the longer over the shorter one."""
    x = item["xyz"][0] - other["xyz"][0]
    y = item["xyz"][1] - other["xyz"][1]
    sideways = x * right[0] + y * right[1]
    away = y * right[0] - x * right[1]
    if abs(sideways) > abs(away):
        word = "right of" if sideways > 0 else "left of"
        return word, abs(sideways) / max(abs(away), 1e-6)
    word = "behind" if away > 0 else "in front of"
    return word, abs(away) / max(abs(sideways), 1e-6)


def change_captions(
    kind: str, before: list[dict], after: list[dict], changed: int, right: np.ndarray
) -> list[str]:
    """Six different sentences for a change: three verbs times two descriptions of its object.

    A description gives the object's full name and its place relative to a nearby object, if any
    relation is clear for a camera with this `right` axis. It describes the scene before the change
    (for add, after it)."""
    scene = after if kind == "add" else before
    item = scene[changed]
    others = scene[:changed] + scene[changed + 1 :]
    others.sort(key=lambda other: math.dist(item["xyz"], other["xyz"]))
    full = phrase(item)
    by_short_name = []
    by_full_name = []
    for other in others:
        word, clarity = relation(item, other, right)
        if clarity >= CLEAR:
            place = f"{full} that is {word} the"
            by_short_name.append(f"{place} {short_phrase(other, scene)}")
            by_full_name.append(f"{place} {phrase(other)}")
    names = by_short_name + by_full_name
    if not names:
        names = [full, short_phrase(item, scene)]
    names.append(f"{full} in the scene")  # needed if the two names before are equal
    names = list(dict.fromkeys(names))[:2]
    value = after[changed][kind] if kind in ATTRIBUTES else ""
    captions = []
    for template in TEMPLATES[kind]:
        captions += [template.format(name, value) for name in names]
    return captions


# ---- judging captions ----------------------------------------------------------------------------

# At least one of these is in each sentence of NO_CHANGE, and none is in TEMPLATES.
NO_CHANGE_WORDS = {"no", "nothing", "same"}
SIGNS = {
    "add": {"added", "new"},
    "drop": {"missing", "removed", "gone"},
    "move": {"moved", "location"},
}
# A relation, and the words after it up to the first shape word or, without one, to the end.
PLACE = re.compile(r"(left of|right of|in front of|behind)\b(.*?(?:sphere|cube|cylinder|$))")


def parse_caption(text: str) -> dict[str, str | None]:
    """What a caption says: "type" (one of KINDS, or "same"), the changed object's attributes (from
    the words up to the first shape word), and the new "value" of a color or material change. What
    the caption leaves out is None."""
    words = text.split()
    statement = dict.fromkeys(("type", *ATTRIBUTES, "value"))
    if NO_CHANGE_WORDS & set(words):
        statement["type"] = "same"
        return statement
    shapes = [i for i, word in enumerate(words) if word in ATTRIBUTES["shape"]]
    if not shapes:
        return statement
    end = shapes[0] + 1
    statement |= named_attributes(words[:end])
    for kind, signs in SIGNS.items():
        if signs & set(words):
            statement["type"] = kind
            return statement
    if {"changed", "became", "now"} & set(words[end:]):
        for kind in ("color", "material"):
            if words[-1] in ATTRIBUTES[kind]:
                statement["type"] = kind
                statement["value"] = words[-1]
    return statement


def named_attributes(words: Iterable[str]) -> dict[str, str]:
    """The attributes among words: {"color": "red", "shape": "cube"}."""
    named = {}
    for word in words:
        for name, choices in ATTRIBUTES.items():
            if word in choices:
                named[name] = word
    return named


def fitting(named: dict[str, str], scene: list[dict]) -> list[int]:
    """Indices of the objects that have all the named attributes; [] if nothing is named."""
    if not named:
        return []
    return [i for i, item in enumerate(scene) if named.items() <= item.items()]


def places_are_true(caption: str, scene: list[dict], changed: int, right: list[float]) -> bool:
    """Does every relation in a caption hold between the changed object and another object that fits
    the reference? right: the right axis of the camera from whose view captions are written."""
    for word, reference in PLACE.findall(caption):
        references = fitting(named_attributes(reference.split()), scene)
        others = [scene[i] for i in references if i != changed]
        if word not in [relation(scene[changed], other, right)[0] for other in others]:
            return False
    return True


def judge(pair_id: str, caption: str, truth: dict) -> dict[str, bool]:
    """Which of a caption's statements are true, without those that cannot be judged.

    For a changed pair, these are "change type"; "all four", if the named attributes fit the changed
    object and no other; "new value", for changes of color and material; "place", if the caption
    says where the object stands. For an unchanged pair, it is "distractors": is the caption one for
    unchanged pairs?"""
    statement = parse_caption(caption)
    if pair_id.endswith("_n"):
        return {"distractors": statement["type"] == "same"}
    kind = truth["type"]
    changed = truth["changed"]
    view = "semantic" if kind == "add" else "default"  # the picture that shows the changed object
    scene = truth["objects"][view]
    named = {name: statement[name] for name in ATTRIBUTES if statement[name]}
    verdicts = {"change type": statement["type"] == kind}
    verdicts["all four"] = fitting(named, scene) == [changed]
    if kind in ATTRIBUTES:
        new = truth["objects"]["semantic"][changed]
        verdicts["new value"] = statement["value"] == new[kind]
    if PLACE.search(caption):
        right = truth["right_axes"][view]
        verdicts["place"] = places_are_true(caption, scene, changed, right)
    return verdicts


def truth_of(pair_id: str, root: Path) -> dict:
    return read_scenes(root)[str(int(pair_id[:6]))]  # 000012.png and 000012.png_n: scene 12


def accuracy(captions: dict[str, str], root: Path) -> dict[str, float | None]:
    """The share of true statements of each sort (see `judge`), in %; None if there are none.
    captions: pair id -> caption."""
    verdicts = {"change type": [], "all four": [], "new value": [], "place": [], "distractors": []}
    for pair_id, caption in captions.items():
        for name, is_true in judge(pair_id, caption, truth_of(pair_id, root)).items():
            verdicts[name].append(is_true)
    shares = {}
    for name, answers in verdicts.items():
        shares[name] = round(100 * float(np.mean(answers)), 2) if answers else None
    return shares


# ---- files ---------------------------------------------------------------------------------------

VISIBLE_AREA = 16  # every picture shows more pixels than this of each object,
VISIBLE_SHARE = 0.4  # and a larger share of it than this


@functools.lru_cache(1)
def read_scenes(root: Path) -> dict:
    """The content of scenes.json, cached for the last folder."""
    return json.loads((root / "scenes.json").read_text(encoding="utf-8"))


def picture_file(root: Path, view: str, scene: int) -> Path:
    return root / VIEWS[view] / f"CLEVR_{view}_{scene:06d}.png"


def overlap(a: list[int], b: list[int]) -> float:
    """Intersection over union of two boxes [x, y, w, h]."""
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    both = max(width, 0) * max(height, 0)
    return both / (a[2] * a[3] + b[2] * b[3] - both)


def describe(
    kind: str, changed: int, scenes: list[list[dict]], cameras: list[Camera], boxes: list[list]
) -> dict:
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
    pairs = zip(before, after, strict=True)
    overlaps = [overlap(a, b) for a, b in pairs if a is not None and b is not None]
    iou = round(sum(overlaps) / len(overlaps), 4)
    # Left and right are as seen in the picture that captions describe: the "before" picture, which
    # is the default one or, in swapped pairs, the nonsemantic one. Only the semantic picture shows
    # an added object.
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
    boxes = [picture.boxes for picture in pictures]
    made = describe(kind, changed, scenes, cameras, boxes)
    made["same"] = rng.permutation(NO_CHANGE)[:6].tolist()
    return made


def draw_visible(scenes: list[list[dict]], cameras: list[Camera]) -> list[Picture] | None:
    """A scene's pictures, or None if any of them shows too little of an object."""
    pictures = []
    for items, camera in zip(scenes, cameras, strict=True):
        picture = draw(items, camera)
        if min(picture.areas) <= VISIBLE_AREA or min(picture.shares) <= VISIBLE_SHARE:
            return None
        pictures.append(picture)
    return pictures


def render(root: Path, counts: dict[str, int]) -> None:
    """Draws mini into the folder root, with one process for each core.

    counts: split -> number of scenes. Scenes are numbered consecutively in this order; the five
    kinds of change take turns within each split."""
    splits = {}
    jobs = []
    for split, (name, count) in enumerate(counts.items()):
        first = len(jobs)
        splits[name] = list(range(first, first + count))
        for number in range(count):
            jobs.append((split, number, first + number))
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
    files = {"scenes": {}, "change_captions": {}, "no_change_captions": {}}
    files |= {"change_captions_with_bbox": {}, "change_captions_by_IOU": {}}
    files["splits"] = splits
    files["type_mapping"] = {kind: [] for kind in KINDS}
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


# ---- feature network -----------------------------------------------------------------------------

ASSETS = Path(__file__).parents[1] / "assets"
SHIPPED = "it comes with the code: fetch it again"  # the remedy for a broken weight file


def conv(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias, then batch norm."""
    convolution = nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


class Block(nn.Module):
    """relu(skip(x) + BN(conv(relu(BN(conv(x)))))).

    (B, C, H, W) -> (B, width, H / stride, W / stride)."""

    def __init__(self, channels: int, width: int, stride: int = 1):
        super().__init__()
        self.first = conv(channels, width, 3, stride)
        self.second = conv(width, width, 3)
        self.skip = nn.Identity()
        if channels != width or stride != 1:
            self.skip = conv(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.first(x)))
        return F.relu(self.skip(x) + y)


class FeatureNet(nn.Module):
    """Stands in for ResNet-101: pictures (B, 3, 64, 64) in -1 ... 1 -> features (B, 128, 8, 8).

    Every cell has mean 0 and variance 1 over its channels, so that dot products compare what cells
    show. A learned pattern is added before this normalisation, so that all bare floor looks the
    same."""

    def __init__(self, width: int = 32):
        super().__init__()
        # With 2 x 2 pixels folded into channels, the first convolution sees every pixel at a
        # quarter of the cost.
        self.stem = nn.Sequential(nn.PixelUnshuffle(2), conv(12, width, 3), nn.ReLU())
        # For equal time, the extra block recognises shapes better at 16 x 16 than at 8 x 8.
        self.blocks = nn.Sequential(Block(width, 64, 2), Block(64, 64), Block(64, 128, 2))
        self.pattern = nn.Parameter(torch.randn(128))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        x = x.movedim(1, -1) + self.pattern  # (B, 8, 8, 128)
        return F.layer_norm(x, (128,)).movedim(-1, 1)


def preprocess(image: Image.Image) -> Tensor:
    """RGB of 64x64 pixels -> (3, 64, 64) in -1 ... 1. InputError if it has another size."""
    if image.size != (SIDE, SIDE):
        raise InputError(
            f"mini's network knows mini's drawings of {SIDE}x{SIDE} pixels, not {image.width}x"
            f"{image.height}; leave out --extractor mini-cnn, and train on your own pairs"
        )
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def feature_net() -> FeatureNet:
    """The network whose features replace ResNet-101's, as shipped."""
    file = ASSETS / "mini_cnn.pt"
    return load_weights(FeatureNet(), load_tensors(file, SHIPPED), file, SHIPPED)


# ---- CLIP ----------------------------------------------------------------------------------------

CLIP_CONFIG = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": SIDE, "layers": [1, 1, 1, 1], "width": 16},
    # The longest sentence of mini has 20 ids; RDD+ACR puts four learned vectors before them.
    "text_cfg": {"context_length": 32, "width": 64, "heads": 4, "layers": 2},
    "init_logit_bias": -5.0,  # few phrases are true of a given picture
}


class Tokenizer:
    """Texts -> ids (n, 32) for mini's CLIP: start, an id for each word, end, zeros.

    End has the highest id, because open_clip takes a text's embedding at its highest id."""

    def __init__(self, words: list[str]):
        self.ids = {word: i for i, word in enumerate(words, 1)}
        self.start = len(words) + 1
        self.end = len(words) + 2
        self.context = CLIP_CONFIG["text_cfg"]["context_length"]

    def __call__(self, texts: list[str]) -> Tensor:
        """InputError for a word that the CLIP has not learned, or too many words."""
        tokens = torch.zeros(len(texts), self.context, dtype=torch.long)
        for row, text in zip(tokens, texts, strict=True):
            words = re.findall(r"\w+", text)
            if not self.ids.keys() >= set(words) or len(words) > self.context - 2:
                raise InputError(f"--clip mini reads only mini's sentences, not {text!r}")
            ids = [self.start, *[self.ids[word] for word in words], self.end]
            row[: len(ids)] = torch.tensor(ids)
        return tokens


def new_clip(words: list[str]) -> tuple[nn.Module, Tokenizer]:
    """An untrained CLIP with these words as its vocabulary, and its tokenizer."""
    import open_clip

    text = CLIP_CONFIG["text_cfg"] | {"vocab_size": len(words) + 3}
    clip = open_clip.CLIP(**CLIP_CONFIG | {"text_cfg": text})
    return clip, Tokenizer(words)


def load_clip() -> tuple[nn.Module, Tokenizer]:
    """mini's CLIP, as shipped, and its tokenizer."""
    file = ASSETS / "mini_clip.pt"
    state = load_tensors(file, SHIPPED)
    clip, tokenizer = new_clip(state["words"])
    return load_weights(clip, state["weights"], file, SHIPPED).eval(), tokenizer


# ---- preparation ---------------------------------------------------------------------------------


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
    if root.exists() and any(root.iterdir()):
        raise InputError(
            f"{root} is not empty, and holds no complete mini of {scenes} training scenes; if its "
            "drawing was interrupted, delete the folder and repeat the command; otherwise give "
            "another --data_dir, or the --dataset that is there (your own pairs: pairs)"
        )
    render(root, {"train": scenes, "val": max(10, scenes // 20), "test": max(10, scenes // 10)})
    write_text(complete, json.dumps(content))  # last
