"""mini's captions, and which of a caption's statements are true. Licence: MIT."""

import functools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from support.mini.scenes import ATTRIBUTES, phrase

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


def short_phrase(item: dict, scene: list[dict]) -> str:
    """Colour and shape, plus material, size or both if another object of the scene shares these."""
    for names in (("color", "shape"), ("color", "material", "shape"), ("size", "color", "shape")):
        name = phrase(item, names)
        if [phrase(other, names) for other in scene].count(name) == 1:
            return name
    return phrase(item)


def relation(item: dict, other: dict, right: np.ndarray) -> tuple[str, float]:
    """-> where `item` stands relative to `other`, and how clearly, for a camera's right axis. The
    longer distance decides, sideways or away; clarity is the longer over the shorter one."""
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
    """Six different sentences for a change: three verbs times two descriptions of its object before
    the change (for add, after it). These give its full name and its place relative to a nearby
    object, if any relation is clear for a camera with this `right` axis."""
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
    names = by_short_name + by_full_name or [full, short_phrase(item, scene)]
    names.append(f"{full} in the scene")  # needed if the two names before are equal
    names = list(dict.fromkeys(names))[:2]
    value = after[changed][kind] if kind in ATTRIBUTES else ""
    return [template.format(name, value) for template in TEMPLATES[kind] for name in names]


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
    """What a caption says: "type" (one of KINDS, or "same"), the changed object's attributes, and
    the new "value" of a color or material change. What the caption leaves out is None."""
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
    return {name: word for word in words for name in ATTRIBUTES if word in ATTRIBUTES[name]}


def fitting(named: dict[str, str], scene: list[dict]) -> list[int]:
    """Indices of the objects that have all the named attributes; [] if nothing is named."""
    return [i for i, item in enumerate(scene) if named and named.items() <= item.items()]


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
    says where the object stands. For an unchanged pair, it is "distractors": does it say so?"""
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
        verdicts["place"] = places_are_true(caption, scene, changed, truth["right_axes"][view])
    return verdicts


@functools.lru_cache(1)
def read_scenes(root: Path) -> dict:
    """The content of scenes.json, cached for the last folder."""
    return json.loads((root / "scenes.json").read_text(encoding="utf-8"))


def truth_of(pair_id: str, root: Path) -> dict:
    return read_scenes(root)[str(int(pair_id[:6]))]  # 000012.png and 000012.png_n: scene 12


def accuracy(captions: dict[str, str], root: Path) -> dict[str, float | None]:
    """The share of true statements of each sort (see `judge`), in %; None if there are none."""
    verdicts = {"change type": [], "all four": [], "new value": [], "place": [], "distractors": []}
    for pair_id, caption in captions.items():
        for name, is_true in judge(pair_id, caption, truth_of(pair_id, root)).items():
            verdicts[name].append(is_true)
    return {name: round(100 * float(np.mean(v)), 2) if v else None for name, v in verdicts.items()}
