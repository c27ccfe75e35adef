"""mini: the built-in toy data set. Nothing else needs this file, and it needs common.py alone.

    python data.py mini --data_dir data/mini

Published data sets, ImageNet's weights and CLIP's have to be downloaded. mini is made here instead,
in two or three minutes, so that every method can be tried and tested on any computer.

A scene has two to four balls, cubes and cylinders on a grey floor. It is drawn three times, each
time from another camera and under another light: as it is (the "default" picture), with one change
("semantic"), and as it is once more ("nonsemantic", the distractor). Six sentences say what has
changed, six others that nothing has. The folder has the layout of CLEVR-Change's release (Park et
al., ICCV 2019), and four files more:

    mini.json     the settings that the folder was made with
    scenes.json   the truth about each scene, by which `accuracy` judges captions
    mini_cnn.pt   a small network, whose features stand in for those of ResNet-101
    clip.pt       a small CLIP, trained when a method first asks for one

Both networks learn from single training pictures and their objects. They see no captions, no pairs,
and no pictures of validation or test.

An object ("item") is a dict with size, color, material, shape, its centre xyz, and its turn about
the vertical in radians. The world's z axis points up, and the floor is at z = 0. Objects stand on
it, so xyz[2] is also half the height, which the ray caster calls `half`: a ball's and a cylinder's
radius, half a cube's side. In scenes.json items have a box [x, y, w, h] and no turn.
"""

import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from common import (
    InputError,
    file_errors,
    load_tensors,
    load_weights,
    progress,
    save_tensors,
    write_text,
)

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
ATTRIBUTES = {  # in the order in which English names them
    "size": ("small", "large"),
    "color": tuple(COLORS),
    "material": ("rubber", "metal"),
    "shape": ("sphere", "cube", "cylinder"),
}
COMBINATIONS = list(itertools.product(*reversed(ATTRIBUTES.values())))  # (shape, ..., size)
RADIUS = {"small": 0.45, "large": 0.8}
FLOOR = 2.4  # objects stand within this distance of the middle, along x and along y
GAP = 0.25  # between the RADIUS circles of any two objects, at least; cubes' corners stick out
LEAST_MOVE = 1.2  # a moved object's distance from its old place, at least
VIEWS = {"default": "images", "semantic": "sc_images", "nonsemantic": "nsc_images"}  # and folders
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


def sample_scene(
    rng: np.random.Generator, kind: str, objects: tuple[int, int]
) -> tuple[list[dict], list[dict], int]:
    """-> objects before, objects after, and the changed one's index (for add: among those after).
    objects: fewest and most of them before. No two objects of a scene share all attributes."""
    scene = None
    while scene is None:
        scene = try_scene(rng, kind, objects)
    return scene


def try_scene(rng: np.random.Generator, kind: str, objects: tuple[int, int]) -> tuple | None:
    """sample_scene, or None if positions or attributes collide."""
    fewest, most = objects
    count = int(rng.integers(fewest, most + 1))
    if kind == "add":
        count += 1
    scene = []
    for number in rng.choice(len(COMBINATIONS), count, replace=False):
        item = dict(zip(reversed(ATTRIBUTES), COMBINATIONS[number], strict=True))
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


@dataclass
class Camera:
    """A camera and the lights of its picture. Vectors are (3,); all but eye have length 1."""

    eye: np.ndarray  # where it stands
    right: np.ndarray  # its axes: to the right,
    up: np.ndarray  # up,
    forward: np.ndarray  # and ahead
    light: np.ndarray  # towards the lamp
    fill: np.ndarray  # towards a second lamp, next to the camera
    gain: np.float32  # brightness of the picture


def sample_cameras(
    rng: np.random.Generator, scenes: int, views: int, jitter: float = 2.5
) -> list[Camera]:
    """The cameras of all views, scene after scene.

    A scene draws a camera a and a spread s in 0 ... 1, each of its views a camera b, and the view
    uses (1 - s) a + s b: the views of some scenes are alike, those of others far apart."""
    spread = rng.uniform(0, 1, (scenes, 1))

    def unit(v: np.ndarray) -> np.ndarray:
        return v / np.linalg.norm(v, axis=0)

    def offsets() -> np.ndarray:
        """(3, scenes * views), at most `jitter` in every direction."""
        of_scene = rng.uniform(-1, 1, (3, scenes, 1))
        of_view = rng.uniform(-1, 1, (3, scenes, views))
        return jitter * ((1 - spread) * of_scene + spread * of_view).reshape(3, -1)

    count = scenes * views
    eye = np.array([[7], [-7], [6]]) + offsets()
    target = np.array([[0], [0], [0.3]]) + [[0.25], [0.25], [0.125]] * offsets()
    forward = unit(target - eye)
    right = unit(np.stack([forward[1], -forward[0], 0 * forward[0]]))  # forward x z: level
    up = np.cross(right, forward, axis=0)
    light = unit(np.array([[-3], [-5], [8]]) + rng.uniform(-1.5, 1.5, (3, count)))
    gain = rng.uniform(0.85, 1.15, count)
    vectors = np.stack([eye, right, up, forward, light]).astype(np.float32)  # (5, 3, count)
    cameras = []
    for n in range(count):
        eye, right, up, forward, light = vectors[..., n].copy()
        fill = eye / np.linalg.norm(eye) + 0.5 * right
        fill = fill / np.linalg.norm(fill)
        cameras.append(Camera(eye, right, up, forward, light, fill, np.float32(gain[n])))
    return cameras


# ---- ray caster ----------------------------------------------------------------------------------

# Do not reorder the float32 sums of this section: another order changes pictures' bytes, and with
# them the features and every number measured on mini.
TAN = 0.38  # tangent of half the field of view
BOUND = {"sphere": 1, "cube": 3**0.5, "cylinder": 2**0.5}  # bounding ball's radius / half height


@dataclass
class Hits:
    """Where a picture's rays meet one object. N of them lie inside the picture."""

    body: Camera  # the camera in the object's own frame
    total: int  # how many rays meet it, those beyond the picture's edge included
    x: np.ndarray  # (N,) columns
    y: np.ndarray  # (N,) rows
    d: np.ndarray  # (3, N) directions, in the object's frame
    t: np.ndarray  # (N,) depths


@dataclass
class Picture:
    """What `draw` makes of a scene: the image, and a value for each object."""

    image: np.ndarray  # (side, side, 3) uint8
    boxes: list[list[int]]  # [x, y, w, h] in pixels of the whole object, cut at the frame
    areas: list[float]  # visible pixels
    parts: list[float]  # visible part of the object, 0 to 1


def rays(camera: Camera, x: np.ndarray, y: np.ndarray, count: int) -> np.ndarray:
    """Directions (3, rows, columns) of the rays through columns x and rows y of a picture of
    count x count rays. They have length 1 along the camera's axis: the ray parameter is depth."""
    across = TAN * ((2 * x.astype(np.float32) + 1) / count - 1)  # (columns,)
    down = TAN * ((2 * y.astype(np.float32) + 1) / count - 1)[:, None]  # (rows, 1)
    forward = camera.forward[:, None, None]
    right = camera.right[:, None, None]
    up = camera.up[:, None, None]
    return forward + right * across - up * down


def first_hit(shape: str, o: np.ndarray, d: np.ndarray, h: float) -> np.ndarray:
    """Depth (rows, columns) at which rays from o (3,) in directions d (3, rows, columns) meet a
    body of half height h around the origin; inf if they miss."""
    o = o[:, None, None]
    if shape == "cube":
        # A ray is inside the cube while it is between both faces of each of the three axes.
        low = (-h - o) / d
        high = (h - o) / d
        enters = np.minimum(low, high).max(0)
        leaves = np.maximum(low, high).min(0)
        return np.where(enters < leaves, enters, np.inf)
    # |o + t d| = h is a t^2 + 2 b t + c = 0: a sphere in three axes, a cylinder's mantle in two.
    axes = 3 if shape == "sphere" else 2
    a = (d[:axes] ** 2).sum(0)
    b = (o[:axes] * d[:axes]).sum(0)
    c = (o[:axes] ** 2).sum(0) - h * h
    discriminant = b * b - a * c
    hit = discriminant > 0
    root = np.sqrt(np.maximum(discriminant, 0))
    t = (-b - root) / a
    if shape == "cylinder":
        # Cameras look down: a ray comes in through the mantle or the top, whichever is later, and
        # goes out through the mantle or the bottom.
        top = (h - o[2]) / d[2]
        bottom = (-h - o[2]) / d[2]
        t = np.maximum(t, top)
        hit &= t < np.minimum((-b + root) / a, bottom)
    return np.where(hit, t, np.inf)


def in_frame_of(item: dict, camera: Camera) -> Camera:
    """The same camera in the object's own frame, which is centred on it and turned with it."""
    cos = np.cos(np.float32(item["turn"]))
    sin = np.sin(np.float32(item["turn"]))

    def turned(vector: np.ndarray) -> np.ndarray:
        x, y, z = vector
        return np.stack([cos * x + sin * y, cos * y - sin * x, z])

    return Camera(
        eye=turned(camera.eye - np.array(item["xyz"], np.float32)),
        right=turned(camera.right),
        up=turned(camera.up),
        forward=turned(camera.forward),
        light=turned(camera.light),
        fill=turned(camera.fill),
        gain=camera.gain,
    )


def cast(item: dict, camera: Camera, count: int) -> Hits:
    """Casts the rays of a picture of count x count rays at one object."""
    body = in_frame_of(item, camera)
    half = np.float32(item["xyz"][2])
    # Only the square that the bounding ball covers is searched.
    radius = half * BOUND[item["shape"]]
    sideways = -body.eye @ body.right
    upwards = -body.eye @ body.up
    depth = -body.eye @ body.forward
    # At the depth of its nearest point the ball would look largest; 12 rays are a margin.
    size = int(count * radius / (TAN * max(depth - radius, 0.5))) + 12
    left = int(count / 2 * (1 + sideways / (TAN * depth)) - size / 2)
    top = int(count / 2 * (1 + -upwards / (TAN * depth)) - size / 2)
    x = left + np.arange(size)
    y = top + np.arange(size)
    d = rays(body, x, y, count)
    t = first_hit(item["shape"], body.eye, d, half)
    hit = np.isfinite(t)
    columns = (x >= 0) & (x < count)
    rows = (y >= 0) & (y < count)
    row, column = (hit & rows[:, None] & columns).nonzero()
    return Hits(body, hit.sum(), x[column], y[row], d[:, row, column], t[row, column])


def object_light(item: dict, body: Camera, d: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Light (3, N) that an object sends back along rays d (3, N) of depth t (N,), all in its own
    frame: 0 to 1, but more in highlights."""
    half = np.float32(item["xyz"][2])
    point = body.eye[:, None] + t * d
    d = d / np.sqrt((d * d).sum(0))
    normal = point / half  # right for spheres
    if item["shape"] == "cube":
        face = np.abs(normal).argmax(0) == np.arange(3)[:, None]  # (3, N), True once in a column
        normal = np.sign(normal) * face
    elif item["shape"] == "cylinder":
        mantle = normal * [[1], [1], [0]]
        normal = np.where(normal[2] > 0.9999, [[0], [0], [1]], mantle).astype(np.float32)
    facing = (d * normal).sum(0)  # -1 where one looks straight at the surface
    mirrored = d - 2 * facing * normal
    gleam = np.maximum(body.light @ mirrored, 0)
    lit = np.maximum(body.light @ normal, 0)
    fill = np.maximum(body.fill @ normal, 0)
    height = point[2] + half  # above the floor
    albedo = np.array(COLORS[item["color"]], np.float32)[:, None] / 255
    if item["material"] == "metal":
        # Metal mirrors a floor that is dark close by, a bright band above the horizon, and a lamp
        # with a hard edge: without hard edges it looks like rubber at this size.
        rise = mirrored[2]
        floor = 0.5 * (1 - np.exp(height / (0.7 * np.minimum(rise, -1e-3))))
        lamp = (rise > 0.6) & (gleam > 0.75)
        sky = 0.35 + 0.55 * (rise < 0.45) + 0.5 * lamp
        mirror = np.where(rise < 0, floor, sky) * (0.6 + 0.4 * (1 + facing) ** 3)
        diffuse = albedo * (0.1 + 0.3 * lit)
        color = diffuse + (0.65 * albedo + 0.25) * mirror + 1.2 * gleam**60
    else:
        color = albedo * (0.25 + 0.8 * lit + 0.25 * fill) + 0.06 * gleam**8
    contact = 0.6 + 0.4 * np.clip(2 * height, 0, 1)  # darker where it touches the floor
    return color * contact * body.gain


def floor_light(scene: list[dict], camera: Camera, side: int) -> np.ndarray:
    """The grey floor (side, side), one ray a pixel, with a soft shadow for each object, which is
    taken to be a ball."""
    d = rays(camera, np.arange(side), np.arange(side), side)
    eye = camera.eye
    light = camera.light
    down = np.minimum(d[2], -1e-3)  # so that the floor at and over the horizon is very far
    spot = eye[:2, None, None] - eye[2] / down * d[:2]  # (2, side, side): the floor's points
    shadow = np.ones_like(spot[0])
    for item in scene:
        # How far are the floor's points from the line through the ball's centre along the light?
        centre = np.array(item["xyz"], np.float32)
        half = np.float32(item["xyz"][2])
        foot = centre[:2] - half * light[:2] / light[2]  # where that line meets the floor
        x, y = spot - foot[:, None, None]
        along = x * light[0] + y * light[1]
        distance = np.sqrt(np.maximum(x * x + y * y - along**2, 0))
        shadow *= 0.45 + 0.55 * np.clip(2.5 * (distance / half - 0.8), 0, 1)
    glow = 0.55 + 0.45 * np.exp(-0.015 * (spot**2).sum(0))  # brightest in the middle
    return (0.2 + 0.4 * max(0.3, light[2]) * shadow) * glow * camera.gain


def draw(scene: list[dict], camera: Camera, side: int = SIDE) -> Picture:
    """Draws a scene, 2 x 2 rays a pixel. The box of an object beyond the frame means nothing."""
    fine = 2 * side
    nearest = np.full((fine, fine), np.inf, np.float32)  # the depth buffer
    casts = []
    for item in scene:
        hits = cast(item, camera, fine)
        nearest[hits.y, hits.x] = np.minimum(nearest[hits.y, hits.x], hits.t)
        casts.append(hits)
    light = np.zeros((4, fine, fine), np.float32)  # red, green, blue, and 1 where the floor shows
    light[3] = np.isinf(nearest)
    boxes = []
    areas = []
    parts = []
    for item, hits in zip(scene, casts, strict=True):
        front = hits.t == nearest[hits.y, hits.x]  # where no other object is nearer
        shown = object_light(item, hits.body, hits.d[:, front], hits.t[front])
        light[:3, hits.y[front], hits.x[front]] = shown
        left = int(hits.x.min(initial=fine)) // 2
        top = int(hits.y.min(initial=fine)) // 2
        right = int(hits.x.max(initial=-1)) // 2 + 1
        bottom = int(hits.y.max(initial=-1)) // 2 + 1
        boxes.append([left, top, right - left, bottom - top])
        areas.append(front.sum() / 4)
        parts.append(front.sum() / hits.total)
    even = light[:, ::2, ::2] + light[:, ::2, 1::2]
    red, green, blue, bare = (even + light[:, 1::2, ::2] + light[:, 1::2, 1::2]) / 4
    floor = bare * floor_light(scene, camera, side)
    image = np.stack([red, green, blue], 2) + floor[..., None]
    image = 255 * np.clip(image, 0, 1) ** (1 / 1.5) + 0.5  # gamma, and .5 for rounding
    return Picture(image.astype(np.uint8), boxes, areas, parts)


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
CLEAR = 1.5  # a relation is clear if the distance along its axis is this many times the other's


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
    """Where `item` stands on the floor relative to `other`, for a camera with this right axis: the
    longer of the two distances decides, sideways or away. And how clearly: the longer over the
    shorter one."""
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
    """Six different sentences for a change: three verbs times two descriptions of what has changed.

    A description is the full name and the place relative to an object nearby, if there is one whose
    relation is clear to a camera with this `right` axis. The scene described is the one before (for
    add, after)."""
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
    names.append(f"{full} in the scene")  # needed if a short name is the full one
    names = list(dict.fromkeys(names))[:2]
    value = after[changed][kind] if kind in ATTRIBUTES else ""
    captions = []
    for template in TEMPLATES[kind]:
        captions += [template.format(name, value) for name in names]
    return captions


# ---- judging captions ----------------------------------------------------------------------------

NO_CHANGE_WORDS = {"no", "nothing", "same"}  # one is in each of NO_CHANGE; none is in TEMPLATES
SIGNS = {
    "add": {"added", "new"},
    "drop": {"missing", "removed", "gone"},
    "move": {"moved", "location"},
}
# A relation, and all words after it up to the first shape word or, if there is none, to the end.
PLACE = re.compile(r"(left of|right of|in front of|behind)\b(.*?(?:sphere|cube|cylinder|$))")


def parse_caption(text: str) -> dict[str, str | None]:
    """What a caption says: "type" (one of KINDS, or "same"), the changed object's attributes (words
    up to the first shape word), and the new "value" of a color or material change; None for what it
    does not say."""
    words = text.split()
    said = dict.fromkeys(("type", *ATTRIBUTES, "value"))
    if NO_CHANGE_WORDS & set(words):
        said["type"] = "same"
        return said
    shapes = [i for i, word in enumerate(words) if word in ATTRIBUTES["shape"]]
    if not shapes:
        return said
    end = shapes[0] + 1
    said |= named_attributes(words[:end])
    for kind, signs in SIGNS.items():
        if signs & set(words):
            said["type"] = kind
            return said
    if {"changed", "became", "now"} & set(words[end:]):
        for kind in ("color", "material"):
            if words[-1] in ATTRIBUTES[kind]:
                said["type"] = kind
                said["value"] = words[-1]
    return said


def named_attributes(words: Iterable[str]) -> dict[str, str]:
    """The attributes among words: {"color": "red", "shape": "cube"}."""
    named = {}
    for word in words:
        for name, choices in ATTRIBUTES.items():
            if word in choices:
                named[name] = word
    return named


def fitting(named: dict[str, str], scene: list[dict]) -> list[int]:
    """Indices of the objects that have all the named attributes; none if nothing is named."""
    if not named:
        return []
    return [i for i, item in enumerate(scene) if named.items() <= item.items()]


def places_are_true(caption: str, scene: list[dict], changed: int, right: list[float]) -> bool:
    """Does every relation that a caption names hold between the changed object and another object
    that fits the reference? right: the right axis of the camera that captions are written from."""
    for word, reference in PLACE.findall(caption):
        references = fitting(named_attributes(reference.split()), scene)
        others = [scene[i] for i in references if i != changed]
        if word not in [relation(scene[changed], other, right)[0] for other in others]:
            return False
    return True


def judge(pair_id: str, caption: str, truth: dict) -> dict[str, bool]:
    """Which of a caption's statements are true; only those that can be judged. `accuracy` says what
    they are. truth: the scene's entry in scenes.json."""
    said = parse_caption(caption)
    if pair_id.endswith("_n"):
        return {"distractors": said["type"] == "same"}
    kind = truth["type"]
    changed = truth["changed"]
    view = "semantic" if kind == "add" else "default"  # the picture that shows the changed object
    scene = truth["objects"][view]
    named = {name: said[name] for name in ATTRIBUTES if said[name]}
    exact = fitting(named, scene) == [changed]
    verdicts = {"change type": said["type"] == kind}
    for name in ATTRIBUTES:
        true = said[name] == scene[changed][name]
        verdicts[name] = exact if said[name] is None else true
    verdicts["all four"] = exact
    if kind in ATTRIBUTES:
        new = truth["objects"]["semantic"][changed]
        verdicts["new value"] = said["value"] == new[kind]
    if "right_axes" in truth and PLACE.search(caption):
        right = truth["right_axes"][view]
        verdicts["place"] = places_are_true(caption, scene, changed, right)
    return verdicts


def accuracy(captions: dict[str, str], root: Path) -> dict[str, float]:
    """What share of captions (pair id -> caption) is right, in %; NaN where none can be judged.

    "distractors": unchanged pairs that are captioned as unchanged. All others are of changed pairs.
    "change type". "all four": the named attributes are true of the changed object and of no other.
    "size", "color", "material", "shape": named and true, or not named although "all four" holds.
    "new value": of changes of color and material. "place": of captions that say where the object
    stands; in a folder without the cameras' right axes, which was made before scenes.json had
    them, NaN."""
    scenes = read_scenes(root)
    names = ["change type", "distractors", *ATTRIBUTES, "all four", "new value", "place"]
    verdicts = {name: [] for name in names}
    for pair_id, caption in captions.items():
        for name, true in judge(pair_id, caption, truth_of(pair_id, scenes)).items():
            verdicts[name].append(true)
    shares = {}
    for name, hits in verdicts.items():
        shares[name] = round(100 * float(np.mean(hits)), 2) if hits else math.nan
    return shares


def is_right(pair_id: str, caption: str, root: Path) -> bool:
    """Is all true that a caption says: the type of change, the changed object, its new value, its
    place; or, for an unchanged pair, that nothing changed?"""
    verdicts = judge(pair_id, caption, truth_of(pair_id, read_scenes(root)))
    return all(verdicts.values())


def truth_of(pair_id: str, scenes: dict) -> dict:
    return scenes[str(int(pair_id[:6]))]  # 000012.png and 000012.png_n are of scene 12


# ---- files ---------------------------------------------------------------------------------------

# The JSON files that `render` writes, after all pictures. `is_drawn` asks for every one of them.
FILES = (
    "scenes",
    "change_captions",
    "no_change_captions",
    "change_captions_with_bbox",
    "change_captions_by_IOU",
    "type_mapping",
    "splits",
)
VISIBLE_AREA = 16  # every picture shows more pixels than this of each of its objects,
VISIBLE_PART = 0.4  # and a greater part of it than this


def remedy(root: Path) -> str:
    return f"remove it and run: python data.py mini --data_dir {root}"


def read_json(path: Path) -> dict:
    """A JSON object of a mini; InputError that names the file if it is broken or missing."""
    with file_errors(path, remedy(path.parent)):
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise InputError(f"expected an object, found {type(content).__name__}")
    return content


@functools.lru_cache(1)
def read_scenes(root: Path) -> dict:
    """What scenes.json says, read once."""
    return read_json(root / "scenes.json")


def training_scenes(root: Path) -> list[int]:
    file = root / "splits.json"
    with file_errors(file, remedy(root)):
        return json.loads(file.read_bytes())["train"]


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
    """What the files say about a scene. `scenes`, `cameras` and `boxes` are the objects, the camera
    and the objects' boxes of its three pictures, in the order of VIEWS."""
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
    # Left and right are those of the "before" picture, the nonsemantic one in swapped pairs. What
    # was added is seen in the semantic one alone.
    default, semantic, nonsemantic = cameras
    if kind == "add":
        default = semantic
        nonsemantic = semantic
    truth = {"type": kind, "changed": changed, "iou": iou, "objects": objects}
    truth["right_axes"] = right_axes  # by which `accuracy` judges words of place
    return {
        "truth": truth,
        "boxes": {"bbox_before": before[changed], "bbox_after": after[changed]},
        "default": change_captions(kind, *scenes[:2], changed, default.right),
        "nonsemantic": change_captions(kind, *scenes[:2], changed, nonsemantic.right),
    }


def render_scenes(
    root: Path, kinds: dict[int, str], objects: tuple[int, int], rng: np.random.Generator
) -> dict:
    """Draws scenes (kinds: number -> kind of change) and returns number -> what `describe` says,
    plus six no-change sentences. A scene is drawn again until every picture shows enough of all of
    its objects."""
    made = {}
    waiting = list(kinds)
    while waiting:
        batch = waiting[:12]
        drafts = [sample_scene(rng, kinds[i], objects) for i in batch]
        cameras = iter(sample_cameras(rng, len(batch), len(VIEWS)))
        for i, (before, after, changed) in zip(batch, drafts, strict=True):
            scenes = [before, after, before]
            views = [next(cameras) for _ in VIEWS]
            pictures = draw_visible(scenes, views)
            if pictures is None:
                continue
            for view, picture in zip(VIEWS, pictures, strict=True):
                file = picture_file(root, view, i)
                Image.fromarray(picture.image).save(file, compress_level=1)
            boxes = [picture.boxes for picture in pictures]
            made[i] = describe(kinds[i], changed, scenes, views, boxes)
            made[i]["same"] = rng.permutation(NO_CHANGE)[:6].tolist()
        waiting = [i for i in kinds if i not in made]
    return made


def draw_visible(scenes: list[list[dict]], views: list[Camera]) -> list[Picture] | None:
    """A scene's pictures, or None if one of them hides an object."""
    pictures = []
    for items, camera in zip(scenes, views, strict=True):
        picture = draw(items, camera)
        if min(picture.areas) <= VISIBLE_AREA or min(picture.parts) <= VISIBLE_PART:
            return None
        pictures.append(picture)
    return pictures


def render(
    root: Path, scenes: dict[str, int], objects: tuple[int, int] = (2, 4), seed: int = 0
) -> None:
    """Draws mini into the folder root. The files depend on the arguments alone.

    scenes: split -> how many. They are numbered consecutively in this order; each split has the
    five changes equally often. objects: the fewest and the most in the "before" picture."""
    for folder in VIEWS.values():
        (root / folder).mkdir(parents=True, exist_ok=True)
    splits = {}
    made = {}
    bar = progress(total=sum(scenes.values()), desc="drawing", unit="scene")
    for number, (split, count) in enumerate(scenes.items()):
        order = np.random.default_rng([seed, number, 1]).permutation(count) % len(KINDS)
        kinds = {i: KINDS[kind] for i, kind in enumerate(order, len(made))}
        splits[split] = list(kinds)
        for start in range(0, count, 100):  # each hundred has its own random stream
            # The last number must not be 0, as numpy ignores zeros at the end of a seed.
            rng = np.random.default_rng([seed, number, 2 + start // 100])
            hundred = splits[split][start : start + 100]
            made |= render_scenes(root, {i: kinds[i] for i in hundred}, objects, rng)
            bar.update(len(made) - bar.n)
    bar.close()
    files = {name: {} for name in FILES}
    files["splits"] = splits
    files["type_mapping"] = {kind: [] for kind in KINDS}
    for i, scene in sorted(made.items()):
        default = picture_file(root, "default", i).name
        files["scenes"][i] = scene["truth"]
        files["change_captions"][default] = scene["default"]
        files["no_change_captions"][default] = scene["same"]
        files["change_captions_with_bbox"][i] = scene["boxes"]
        files["change_captions_by_IOU"][i] = scene["truth"]["iou"]
        files["type_mapping"][scene["truth"]["type"]].append(f"{i:06d}.png")
    for i, scene in sorted(made.items()):
        nonsemantic = picture_file(root, "nonsemantic", i).name
        files["change_captions"][nonsemantic] = scene["nonsemantic"]
    for name, content in files.items():
        write_text(root / f"{name}.json", json.dumps(content, separators=(",", ":")))


# ---- feature network -----------------------------------------------------------------------------

EXTRACTOR = "mini-cnn"
PREPROCESSING = "RGB, 64x64 bicubic with antialiasing, /127.5 - 1"  # what feature files say


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
    show. The learned pattern that is added before makes all bare floor look the same."""

    def __init__(self, width: int = 32):
        super().__init__()
        # Folding 2 x 2 pixels into channels lets the first convolution see everything at a quarter
        # of the cost.
        self.stem = nn.Sequential(nn.PixelUnshuffle(2), conv(12, width, 3), nn.ReLU())
        # At equal time, the extra block reads shapes better at 16 x 16 (.94 of test objects) than
        # at 8 x 8 (.93).
        self.blocks = nn.Sequential(Block(width, 64, 2), Block(64, 64), Block(64, 128, 2))
        self.pattern = nn.Parameter(torch.randn(128))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        x = x.movedim(1, -1) + self.pattern  # (B, 8, 8, 128)
        return F.layer_norm(x, (128,)).movedim(-1, 1)


def preprocess(image: Image.Image) -> Tensor:
    """RGB -> (3, 64, 64) in -1 ... 1."""
    pixels = np.array(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1


def training_pictures(root: Path) -> tuple[Tensor, list[list[dict]]]:
    """All training pictures (M, 3, 64, 64) uint8, and the objects of each as in scenes.json."""
    scenes = read_json(root / "scenes.json")
    images = []
    objects = []
    for i in training_scenes(root):
        for view in VIEWS:
            file = picture_file(root, view, i)
            with file_errors(file, remedy(root)), Image.open(file) as image:
                images.append(np.array(image.convert("RGB")))
            with file_errors(root / "scenes.json", remedy(root)):
                objects.append(scenes[str(i)]["objects"][view])
    return torch.from_numpy(np.stack(images)).movedim(-1, 1), objects


def one_cycle(parameters: list, rate: float, steps: int) -> tuple:
    """-> AdamW, and a learning rate that rises for 15 % of the steps, then falls."""
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=max(steps, 2), pct_start=0.15
    )
    return optimizer, schedule


def cells_of(pictures: list[list[dict]]) -> Tensor:
    """What the feature network learns to say (M, 4, 8, 8): the indices of size, color, material and
    shape in the cell that holds the centre of an object's box; elsewhere -100, which cross_entropy
    ignores. If two centres share a cell, the nearer object (lower in the picture) stays."""
    cells = torch.full((len(pictures), len(ATTRIBUTES), 8, 8), -100)
    for n, objects in enumerate(pictures):
        for item in sorted(objects, key=lambda item: item["box"][1] + item["box"][3]):
            x, y, w, h = item["box"]
            row = (2 * y + h) // 16
            column = (2 * x + w) // 16
            indices = [choices.index(item[name]) for name, choices in ATTRIBUTES.items()]
            cells[n, :, row, column] = torch.tensor(indices)
    return cells


def train_feature_net(
    root: Path, steps: int = 1000, seed: int = 0, device: str = "cpu"
) -> FeatureNet:
    """Trains the feature network, with one linear layer on top, to say which cells hold an object's
    centre and to name that object's four attributes, so that a captioner can read them from the
    features, too. On one CPU with one number of threads the result depends on the arguments alone;
    elsewhere rounding differs, and with it the name that `extractor` gives."""
    torch.manual_seed(seed)
    images, pictures = training_pictures(root)
    cells = cells_of(pictures)
    occupied = (cells[:, 0] >= 0).nonzero()  # (objects, 3): picture, row, column
    # Every window of 4 x 4 cells, which are 32 x 32 pixels.
    images = images.to(device).unfold(2, 32, 8).unfold(3, 32, 8)  # (M, 3, 5, 5, 32, 32)
    cells = cells.to(device).unfold(2, 4, 1).unfold(3, 4, 1)  # (M, 4, 5, 5, 4, 4)
    sizes = [len(choices) for choices in ATTRIBUTES.values()]
    net = FeatureNet().to(device, memory_format=torch.channels_last)
    head = nn.Conv2d(128, 1 + sum(sizes), 1).to(device)  # is there an object, and its attributes
    parameters = [*net.parameters(), *head.parameters()]
    optimizer, schedule = one_cycle(parameters, 4e-3, steps)
    for _ in progress(range(steps), desc="feature network", unit="step"):
        # Most of a picture is bare floor: windows around random objects teach more in equal time.
        chosen = occupied[torch.randint(len(occupied), (128,))]
        picture, row, column = chosen.unbind(1)
        row = (row - torch.randint(4, (128,))).clamp(0, 4)
        column = (column - torch.randint(4, (128,))).clamp(0, 4)
        x = images[picture, :, row, column] / 127.5 - 1  # (128, 3, 32, 32)
        target = cells[picture, :, row, column]  # (128, 4, 4, 4)
        there, *logits = head(net(x)).split([1, *sizes], 1)
        occupancy = (target[:, 0] >= 0).float()
        attribute_loss = 0
        for i, logit in enumerate(logits):
            attribute_loss = attribute_loss + F.cross_entropy(logit, target[:, i])
        loss = 4 * F.binary_cross_entropy_with_logits(there[:, 0], occupancy) + attribute_loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return net.cpu().eval()


def extractor(root: Path) -> tuple[str, dict[str, Tensor]]:
    """-> the feature network's name with a hash of its weights, so that features of another network
    are not mistaken for this one's; and the weights."""
    file = root / "mini_cnn.pt"
    weights = load_tensors(file, remedy(root))
    with torch.random.fork_rng([]):  # a run's random numbers stay as they are
        load_weights(FeatureNet(), weights, file, remedy(root))
    digest = hashlib.sha256()
    for key in sorted(weights):
        digest.update(weights[key].cpu().numpy().tobytes())
    return f"{EXTRACTOR}-{digest.hexdigest()[:12]}", weights


# ---- CLIP ----------------------------------------------------------------------------------------

CLIP_CONFIG = {
    "embed_dim": 128,
    # At equal time this picture tower ranks names better than a ViT of patch 8, width 128, 3
    # layers: AUC, averaged over pictures, .95 against .88.
    "vision_cfg": {"image_size": SIDE, "layers": [1, 1, 1, 1], "width": 16},
    # The longest sentence of mini has 20 ids; RDD+ACR puts four learned vectors before them.
    "text_cfg": {"context_length": 32, "width": 64, "heads": 4, "layers": 2},
    "init_logit_bias": -5.0,  # few of the pairs of a picture and a phrase are true
}
CLIP_BATCH = 64  # pictures a step


def clip_state(root: Path, device: str = "cpu") -> dict:
    """mini's own CLIP, "config" and "model", trained on first use into root/clip.pt."""
    file = root / "clip.pt"
    if not file.exists():
        print(f"training a small CLIP on the pictures of {root}, once")
        steps = min(580, 5 + len(training_scenes(root)) // 8)
        clip = train_clip(root, steps, device=device)
        save_tensors(file, {"config": CLIP_CONFIG, "model": clip.state_dict()})
    again = "remove it: it is made again"
    state = load_tensors(file, again)
    with file_errors(file, again):
        return {"config": state["config"], "model": state["model"]}


def random_names(pictures: list[list[list[str]]]) -> list[str]:
    """A name of a random object of each picture. Half of the names are whole; in the others, each
    attribute but the shape is left out half of the time. pictures: per object, its four words."""
    size = len(pictures)
    counts = torch.tensor([len(objects) for objects in pictures])
    chosen = (torch.rand(size) * counts).long().tolist()
    kept = torch.rand(size, 4) >= 0.5
    kept |= torch.rand(size, 1) >= 0.5
    kept[:, 3] = True  # the shape
    names = []
    for objects, i, keep in zip(pictures, chosen, kept.tolist(), strict=True):
        names.append(" ".join(itertools.compress(objects[i], keep)))
    return names


def is_true(names: list[set[str]], objects: list[list[str]]) -> bool:
    """Does each name fit an object of a picture, which has all of the name's words?"""
    for name in names:
        if not any(name.issubset(words) for words in objects):
            return False
    return True


def train_clip(root: Path, steps: int = 580, seed: int = 0, device: str = "cpu") -> nn.Module:
    """Trains a small open_clip.CLIP to know which phrases are true of a picture. A phrase is a
    whole or partial name of an object, or two of these joined by "and".

    A sigmoid loss (SigLIP) asks this of each picture and each phrase; a softmax would take true
    phrases for negatives. Word vectors keep their random initial values, which are far apart, even
    those of words that are in no name."""
    import open_clip

    torch.manual_seed(seed)
    images, pictures = training_pictures(root)
    images = images.to(device)
    words = []
    for objects in pictures:
        words.append([phrase(item).split() for item in objects])
    clip = open_clip.CLIP(**CLIP_CONFIG)
    tokenizer = open_clip.SimpleTokenizer(context_length=clip.context_length)
    clip.token_embedding.requires_grad_(False)
    clip.to(device).visual.to(memory_format=torch.channels_last)
    matrices = [p for p in clip.parameters() if p.ndim > 1]
    vectors = [p for p in clip.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, schedule = one_cycle(groups, 2e-3, steps)
    whole_names = [" ".join(name) for name in itertools.product(*ATTRIBUTES.values())]
    for _ in progress(range(steps), desc="CLIP", unit="step"):
        index = torch.randint(len(images), (CLIP_BATCH,))
        shown = [words[i] for i in index.tolist()]
        phrases = list(whole_names)
        first = random_names(shown)
        second = random_names(shown)
        single = torch.rand(CLIP_BATCH) < 0.5
        for a, b, alone in zip(first, second, single.tolist(), strict=True):
            phrases.append(a if alone else f"{a} and {b}")
        names = []
        for text in phrases:
            names.append([set(name.split()) for name in text.split(" and ")])
        rows = []
        for objects in shown:
            rows.append([is_true(of_phrase, objects) for of_phrase in names])
        target = torch.tensor(rows, device=device).float()  # (pictures, phrases)
        text = clip.encode_text(tokenizer(phrases).to(device), normalize=True)
        x = images[index.to(device)].to(memory_format=torch.channels_last)
        picture = clip.encode_image(x.float() / 127.5 - 1, normalize=True)  # as `preprocess` does
        logits = clip.logit_scale.exp() * picture @ text.T + clip.logit_bias
        loss = F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / CLIP_BATCH
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return clip.cpu().eval().requires_grad_(False)


# ---- preparation ---------------------------------------------------------------------------------


def read_objects(text: str) -> tuple[int, int]:
    """The fewest and the most objects of a scene: "2,4" -> (2, 4)."""
    match = re.fullmatch("([2-6]),([2-6])", text)
    if not match or match[1] > match[2]:
        raise InputError(
            f"--objects {text}: expected the fewest and the most objects of a scene (2 to 6), "
            "such as 2,4"
        )
    return int(match[1]), int(match[2])


def check_folder(root: Path, scenes: int, objects: str, seed: int) -> None:
    """InputError if the settings make no sense, or if the folder holds something else, or a mini
    that was made with other settings."""
    read_objects(objects)
    if scenes < 1:
        raise InputError(f"--scenes {scenes}: expected a count")
    if seed < 0:
        raise InputError(f"--data_seed {seed}: expected a whole number from 0")
    file = root / "mini.json"
    if file.exists():
        made = read_json(file)
        if made != {"scenes": scenes, "objects": objects, "seed": seed}:
            with file_errors(file, remedy(root)):
                flags = "--scenes {scenes} --objects {objects} --data_seed {seed}".format(**made)
            raise InputError(
                f"{root} was made with {flags}; give these flags, remove it or choose another "
                "--data_dir"
            )
    elif root.is_dir():
        # A name that begins with a dot is a lock; a partial file is left by a killed process.
        names = [path.name for path in root.iterdir()]
        if any(not name.startswith(".") and not name.endswith(".partial") for name in names):
            raise InputError(
                f"{root} is not empty and no mini of this project; choose another --data_dir"
            )


def is_drawn(root: Path) -> bool:
    """Are all of `render`'s files there? If not, drawing again makes the same ones."""
    files = [root / f"{name}.json" for name in FILES]
    if not all(file.exists() for file in files):
        return False
    scenes = read_json(root / "scenes.json")
    return all(picture_file(root, view, int(i)).exists() for i in scenes for view in VIEWS)


def is_made(root: Path) -> bool:
    """Has `make` nothing left to do?"""
    return (root / "mini.json").exists() and is_drawn(root) and (root / "mini_cnn.pt").exists()


def make(root: Path, scenes: int, objects: str, seed: int, device: str) -> None:
    """Draws mini and trains its feature network on the training pictures. What is there is kept.
    InputError as in check_folder."""
    check_folder(root, scenes, objects, seed)
    root.mkdir(parents=True, exist_ok=True)
    settings = {"scenes": scenes, "objects": objects, "seed": seed}
    if not (root / "mini.json").exists():
        write_text(root / "mini.json", json.dumps(settings))
    if not is_drawn(root):
        counts = {"train": scenes, "val": max(10, scenes // 20), "test": max(10, scenes // 10)}
        render(root, counts, read_objects(objects), seed)
    if not (root / "mini_cnn.pt").exists():
        net = train_feature_net(root, min(1000, 10 + scenes // 5), seed, device)
        save_tensors(root / "mini_cnn.pt", net.state_dict())
