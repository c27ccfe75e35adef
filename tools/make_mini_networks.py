"""Trains mini's two networks and writes assets/mini_cnn.pt and assets/mini_clip.pt. Not a test.

    python tools/make_mini_networks.py --data_dir data/mini     some 13 minutes on one CPU core

It was run once, on the pictures that mini draws. It has to be run again only if these change.
Features and every number measured on mini then change, too: raise mini.VERSION, and give the
feature network another name in support/extractors.py. On validation pictures, size, color, material
and shape of .99, .991, .99 and .97 of the objects could be read from the features; .982 of the
pairs of a true and a false name had the true one closer to the picture, by CLIP.

The networks learn from single training pictures of mini and what scenes.json says about their
objects: size, color, material, shape and box. They see no captions and no pairs of pictures.

Both files hold weights in float16; mini_clip.pt also holds the words that its text encoder knows.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import rdd_acr
from support import mini
from support.files import progress, save_tensors
from support.mini.networks import ASSETS, FeatureNet, new_clip
from support.mini.scenes import ATTRIBUTES, VIEWS, phrase
from support.mini.sentences import NO_CHANGE, TEMPLATES

CLIP_BATCH = 64  # pictures per step


def read_pictures(root: Path) -> tuple[Tensor, list[list[dict]]]:
    """The training pictures (M, 3, 64, 64) uint8, and the objects of each as in scenes.json."""
    scenes = json.loads((root / "scenes.json").read_text())
    splits = json.loads((root / "splits.json").read_text())
    images = []
    objects = []
    for i in splits["train"]:
        for view in VIEWS:
            with Image.open(mini.picture_file(root, view, i)) as image:
                images.append(np.array(image))
            objects.append(scenes[str(i)]["objects"][view])
    return torch.from_numpy(np.stack(images)).movedim(-1, 1), objects


def one_cycle(parameters: list, rate: float, steps: int) -> tuple:
    """-> AdamW, and a learning rate that rises for 15 % of the steps, then falls."""
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.15
    )
    return optimizer, schedule


# ---- feature network -----------------------------------------------------------------------------


def cells_of(pictures: list[list[dict]]) -> Tensor:
    """Targets of the feature network (M, 4, 8, 8): indices of size, color, material and shape in
    the cell that holds the centre of an object's box; elsewhere -100, which cross_entropy ignores.
    If two centres share a cell, the nearer object (lower in the picture) is kept."""
    cells = torch.full((len(pictures), len(ATTRIBUTES), 8, 8), -100)
    for n, objects in enumerate(pictures):
        for item in sorted(objects, key=lambda item: item["box"][1] + item["box"][3]):
            x, y, w, h = item["box"]
            row = (2 * y + h) // 16
            column = (2 * x + w) // 16
            indices = [choices.index(item[name]) for name, choices in ATTRIBUTES.items()]
            cells[n, :, row, column] = torch.tensor(indices)
    return cells


def train_feature_net(images: Tensor, pictures: list[list[dict]], steps: int) -> nn.Module:
    """-> the feature network. With a linear layer on top, it learns which cells hold an object's
    centre, and that object's four attributes, so that a captioner can read these from the features,
    too."""
    torch.manual_seed(0)
    cells = cells_of(pictures)
    occupied = (cells[:, 0] >= 0).nonzero()  # (objects, 3): picture, row, column
    # Every window of 4 x 4 cells, which are 32 x 32 pixels.
    images = images.unfold(2, 32, 8).unfold(3, 32, 8)  # (M, 3, 5, 5, 32, 32)
    cells = cells.unfold(2, 4, 1).unfold(3, 4, 1)  # (M, 4, 5, 5, 4, 4)
    sizes = [len(choices) for choices in ATTRIBUTES.values()]
    net = FeatureNet().to(memory_format=torch.channels_last)
    head = nn.Conv2d(128, 1 + sum(sizes), 1)  # logits: is there an object, and its attributes
    optimizer, schedule = one_cycle([*net.parameters(), *head.parameters()], 4e-3, steps)
    for _ in progress(range(steps), desc="feature network", unit="step"):
        # Most of a picture is bare floor, so windows around random objects teach more per step.
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
    return net.eval()


# ---- CLIP ----------------------------------------------------------------------------------------


def words_of_mini() -> list[str]:
    """All words of mini's sentences, and those of the prompts that RDD+ACR adds to phrases."""
    texts = [*NO_CHANGE, rdd_acr.NOUN_PROMPT, rdd_acr.VERB_PROMPT]
    texts += ["that is in the scene", "left of", "right of", "in front of", "behind", "and"]
    for templates in TEMPLATES.values():
        texts += [template.replace("{}", "") for template in templates]
    for choices in ATTRIBUTES.values():
        texts += choices
    words = set()
    for text in texts:
        words.update(text.replace(":", "").split())
    return sorted(words)


def random_names(pictures: list[list[list[str]]]) -> list[str]:
    """A name of a random object of each picture. Half of the names are complete; in the others,
    each attribute except the shape is left out with probability 1/2. pictures: for each picture and
    object, the object's four words."""
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


def is_true(text: str, objects: list[list[str]]) -> bool:
    """Does each name in a phrase fit some object of a picture? It fits if the object has all of its
    words."""
    for name in text.split(" and "):
        if not any(set(name.split()).issubset(words) for words in objects):
            return False
    return True


def train_clip(images: Tensor, pictures: list[list[dict]], words: list[str], steps: int):
    """-> a small open_clip.CLIP that knows which phrases are true of a picture. A phrase is a whole
    or partial name of an object, or two of these joined by "and".

    A sigmoid loss (SigLIP) judges each picture with each phrase; a softmax would treat true phrases
    as negatives. Word vectors keep their random initial values, so that all words, even those in no
    name, stay far apart."""
    torch.manual_seed(0)
    clip, tokenizer = new_clip(words)
    clip.token_embedding.requires_grad_(False)
    clip.visual.to(memory_format=torch.channels_last)
    matrices = [p for p in clip.parameters() if p.ndim > 1]
    vectors = [p for p in clip.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, schedule = one_cycle(groups, 2e-3, steps)
    # The 96 full names: "small gray rubber sphere", ...
    names = [" ".join(name) for name in itertools.product(*ATTRIBUTES.values())]
    # For each picture and object, the words of the object's full name.
    shown_words = []
    for objects in pictures:
        shown_words.append([phrase(item).split() for item in objects])
    for _ in progress(range(steps), desc="CLIP", unit="step"):
        index = torch.randint(len(images), (CLIP_BATCH,))
        shown = [shown_words[i] for i in index.tolist()]
        phrases = list(names)
        first = random_names(shown)
        second = random_names(shown)
        single = torch.rand(CLIP_BATCH) < 0.5
        for a, b, alone in zip(first, second, single.tolist(), strict=True):
            phrases.append(a if alone else f"{a} and {b}")
        rows = [[is_true(text, objects) for text in phrases] for objects in shown]
        target = torch.tensor(rows).float()  # (pictures, phrases)
        text = clip.encode_text(tokenizer(phrases), normalize=True)
        x = images[index].to(memory_format=torch.channels_last)
        picture = clip.encode_image(x.float() / 127.5 - 1, normalize=True)  # as networks.preprocess
        logits = clip.logit_scale.exp() * picture @ text.T + clip.logit_bias
        loss = F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / CLIP_BATCH
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return clip.eval()


# ---- command line --------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", type=Path, required=True, help="folder of a prepared mini")
    parser.add_argument("--cnn_steps", type=int, default=6000)
    parser.add_argument("--clip_steps", type=int, default=2000)
    parser.add_argument("--out_dir", type=Path, default=ASSETS)
    args = parser.parse_args()
    training = read_pictures(args.data_dir)
    net = train_feature_net(*training, args.cnn_steps)
    save_tensors(args.out_dir / "mini_cnn.pt", net.half().state_dict())
    words = words_of_mini()
    weights = train_clip(*training, words, args.clip_steps).half().state_dict()
    save_tensors(args.out_dir / "mini_clip.pt", {"words": words, "weights": weights})


if __name__ == "__main__":
    main()
