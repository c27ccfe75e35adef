"""mini's scenes: objects, cameras, and the ray caster that draws them. Licence: MIT.

An object ("item") is a dict with size, color, material, shape, its centre xyz, and its turn, the
rotation about the vertical in radians. The z axis points up, and the floor is at z = 0. In
scenes.json, items have a box [x, y, w, h] and no turn."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

# ---- objects -------------------------------------------------------------------------------------

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
SIDE = 64  # of a picture, in pixels
VISIBLE_AREA = 16  # every picture shows more pixels than this of each object,
VISIBLE_SHARE = 0.4  # and a larger share of it than this


def phrase(item: dict, names: Iterable[str] = ATTRIBUTES) -> str:
    """The named attributes in the usual order: "small red metal cube", "red cube"."""
    return " ".join(item[name] for name in names)


def half_height(item: dict) -> float:
    """The radius of a ball or cylinder, or half the side of a cube."""
    return item["xyz"][2]  # objects stand on the floor


def free_position(rng: np.random.Generator, radius: float, others: list) -> list[float] | None:
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
    count = int(rng.integers(fewest, most + 1)) + (kind == "add")
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
        new["xyz"] = [*position, half_height(old)]
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
    right, up, forward = [axis[:, None] for axis in (camera.right, camera.up, camera.forward)]
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
    """Where rays origin + t d enter an object: t (N,) > 0, or inf if they miss it. origin and d are
    (3, N), or (3, 1) if all rays share them."""
    half = half_height(item)
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
    p = from_centre(item, points) / half_height(item)
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
        lamp[np.isfinite(hit(item, points, light))] *= 0.5  # its shadow
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


def draw_visible(scenes: list[list[dict]], cameras: list[Camera]) -> list[Picture] | None:
    """A scene's pictures, or None if any of them shows too little of an object."""
    pictures = []
    for items, camera in zip(scenes, cameras, strict=True):
        picture = draw(items, camera)
        if min(picture.areas) <= VISIBLE_AREA or min(picture.shares) <= VISIBLE_SHARE:
            return None
        pictures.append(picture)
    return pictures
