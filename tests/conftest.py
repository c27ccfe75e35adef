"""Small generated data: a batch for models, and a release in CLEVR-Change's layout with features on
a 2 x 3 grid."""

import contextlib
import json
import math
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
import torch
from PIL import Image

import scores
from support import features as feature_files
from support.extractors import read_image
from support.files import read_log
from support.pairs import SPLITS
from support.releases import CLEVR_FOLDERS, DATASETS

GRID = (8, 2, 3)  # channels, height, width: all different, so that swapped axes are noticed
COLORS = ("red", "blue", "green", "gray")


# ---- a batch for models --------------------------------------------------------------------------

B = 4  # pairs
C = 5  # channels
H = 2
W = 3
N = H * W  # cells
L = 9  # ids of the longest caption
WORDS = 12  # in the vocabulary
CAPTION = torch.tensor(
    [
        [2, 4, 5, 6, 3, 0, 0, 0, 0],
        [2, 7, 3, 0, 0, 0, 0, 0, 0],
        [2, 8, 9, 10, 11, 4, 5, 3, 0],
        [2, 5, 5, 3, 0, 0, 0, 0, 0],
    ]
)


def pictures():
    """Features before and after, (2, B, C, H, W), in float64."""
    torch.manual_seed(1)
    return torch.rand(2, B, C, H, W, dtype=torch.float64)


def mean(x):
    return sum(x) / len(x)


def cosine(a, b):
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def attention_by_heads(module, query, memory):
    """softmax(q k^T / sqrt(D/h)) v with the weights of an Attention, in a loop over heads."""
    q, k, v = module.project(query, memory)
    width = q.shape[-1] // module.heads
    heads = []
    for h in range(module.heads):
        part = slice(h * width, (h + 1) * width)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(width)
        heads.append(scores.softmax(-1) @ v[..., part])
    return module.out(torch.cat(heads, -1))


def random_clip():
    """A frozen open_clip.CLIP with random weights, and its tokenizer, for 12 tokens."""
    import open_clip

    torch.manual_seed(0)
    vision = {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 16}
    text = {"context_length": 12, "width": 16, "heads": 2, "layers": 2}
    clip = open_clip.CLIP(embed_dim=8, vision_cfg=vision, text_cfg=text)
    for name, p in clip.named_parameters():
        if "bias" in name or "positional" in name:
            torch.nn.init.normal_(p, std=0.3)
    return clip.eval().requires_grad_(False), open_clip.SimpleTokenizer(context_length=12)


def train_lines(folder):
    """The lines of a run's log that hold losses."""
    rows = read_log(folder / "log.jsonl")
    return [row for row in rows if row["event"] == "train"]


def interrupted(compute_losses, at):
    """Like compute_losses, but its call number `at` ends as if by Ctrl-C."""
    calls = []

    def wrapped(*args):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return compute_losses(*args)

    return wrapped


# ---- data sets -----------------------------------------------------------------------------------


def write_release(root, train=8, val=2, test=5):
    """A CLEVR-Change release without features. Scenes are numbered through train, val and test, and
    the five types of change take turns."""
    count = train + val + test
    types = {kind: [] for kind in ("color", "material", "add", "drop", "move")}
    change = {}
    same = {}
    for i in range(count):
        for view, folder in CLEVR_FOLDERS.items():
            write_picture(root / folder / f"CLEVR_{view}_{i:06d}.png")
        kind = list(types)[i % 5]
        types[kind].append(f"{i:06d}.png")
        color = COLORS[i % 4]
        other = COLORS[(i // 4 + i + 1) % 4]
        default = f"CLEVR_default_{i:06d}.png"
        change[default] = [f"the {color} cube turned {other}", f"a {color} thing became {other}."]
        same[default] = ["nothing changed", "the scene, it seems, is the same"]
    splits = {
        "train": list(range(train)),
        "val": list(range(train, train + val)),
        "test": list(range(train + val, count)),
    }
    (root / "splits.json").write_text(json.dumps(splits))
    (root / "type_mapping.json").write_text(json.dumps(types))
    (root / "change_captions.json").write_text(json.dumps(change))
    (root / "no_change_captions.json").write_text(json.dumps(same))


def write_picture(path):
    """A picture of noise, 16 x 12 pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(list(path.name.encode()))
    pixels = rng.integers(0, 255, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def colours(path):
    """How many different colours a picture has; a blank one has 1, text alone some dozens."""
    with Image.open(path) as picture:
        return len(picture.convert("RGB").getcolors(2**24))


def write_own_pairs(root):
    """A table of own pairs, one in each split, and their pictures."""
    for name in (*SPLITS, "b"):
        write_picture(root / f"{name}.png")
    rows = [f"{split}.png,b.png,{split},it is open" for split in SPLITS]
    (root / "pairs.csv").write_text("\n".join(["before,after,split,captions", *rows]))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


BIRD_COLUMNS = (
    "img1ObservationURL img1ImgURL img1Species img1Selection "
    "img2ObservationURL img2ImgURL img2Species img2Selection split annN description"
).replace(" ", "\t")


def bird_row(before, after, split, text):
    url = "https://static.inaturalist.org/photos/{}/large.jpg?15"
    first = ["obs", url.format(before), "species", "base"]
    second = ["obs", url.format(after), "species", "visual"]
    return "\t".join([*first, *second, split, "1", text])


def write_bird_table(root, rows):
    write(root / "birds-to-words-v1.0.tsv", "\n".join([BIRD_COLUMNS, *rows]))


def write_birds(root):
    rows = []
    for i, split in enumerate(SPLITS):
        rows += [bird_row(i, i + 1, split, text) for text in ("it is red .", "no beak")]
    write_bird_table(root, rows)
    for photo in range(4):
        write_picture(root / "images" / f"{photo}.jpg")


def write_cub(root):
    names = ["001.Gull/Gull_0001.jpg", "001.Gull/Gull_0002.jpg", "002.Tern/Tern_0001.jpg"]
    write(root / "images.txt", "".join(f"{n} {name}\n" for n, name in enumerate(names, 1)))
    write(root / "trainvalclasses.txt", "001.Gull\n")
    write(root / "testclasses.txt", "002.Tern\n")
    for name in names:
        write_picture(root / "images" / name)
        text = root / "text_c10" / name.replace(".jpg", ".txt")
        write(text, "A white bird.\r\n\nthis bird, it has a red bill\n")
        write(text.with_suffix(".t7"), "not text")


def write_nabirds(root):
    classes = {"00000000-aaaa": 817, "00000001-aaaa": 295, "00000002-aaaa": 817}
    classes |= {"00000003-aaaa": 1010, "00000004-aaaa": 295, "00000005-aaaa": 817}
    lines = {"images": "", "image_class_labels": "", "train_test_split": ""}
    for image, number in classes.items():
        name = f"{number:04d}/{image.replace('-', '')}.jpg"
        write_picture(root / "images" / name)
        lines["images"] += f"{image} {name}\n"
        lines["image_class_labels"] += f"{image} {number}\n"
        lines["train_test_split"] += f"{image} {int(image != '00000005-aaaa')}\n"
    lines["classes"] = "0 Birds\n295 Ross's Goose\n817 House Finch (Adult Male)\n1010 Verdin\n"
    for file, text in lines.items():
        write(root / f"{file}.txt", text)


def write_features(name, root):
    """Random features on a 2 x 3 grid for a release, in place of those that preparation makes. Each
    picture has values of its own in all cells, so that losses that compare pictures are not at
    chance, where they would hide what is wrong."""
    settings = DATASETS[name]
    release = settings.read(root)
    names = sorted(release.paths)
    rng = np.random.default_rng(1)
    of_pictures = 3 * rng.standard_normal((len(names), GRID[0], 1, 1), np.float32)
    features = of_pictures + rng.standard_normal((len(names), *GRID), np.float32)
    files = {name: release.paths[name] for name in names}
    path = root / "features.h5"
    feature_files.write_features(path, files, [features], settings.extractor, "at random")


class NoFeatures:
    """For a Dataset of which a test needs the words and pairs alone."""

    data = np.empty((0, *GRID))
    extractor = ""

    def content(self, name):
        """A number for each picture."""
        return hash(name)

    def require(self, paths):
        """All is there."""


class MeanColor:
    """An extractor without a network: a picture's mean brightness, on a small grid. For layer4 the
    grid has four channels, otherwise three."""

    def __init__(self, name, device):
        self.grid = (4 if "layer4" in name else 3, 2, 3)

    def blocks(self, paths, batch):
        for path in paths:
            mean = np.array(read_image(path)).mean()
            yield torch.full((1, *self.grid), mean).half()


@pytest.fixture(autouse=True)
def without_java(request, monkeypatch):
    """Java takes seconds to start, twice for each evaluation. Tests of test_scores.py that need it
    ask for the fixture `java`."""
    if "java" not in request.fixturenames:
        monkeypatch.setattr(scores, "java_works", lambda: False)


@pytest.fixture
def without_spacy(monkeypatch):
    """Importing spaCy fails, as if it were not installed."""
    for name in ("spacy", *sys.modules):
        if name.split(".")[0] == "spacy":
            monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def drawings():
    """Requested by tests that look at the pictures of a run."""


@pytest.fixture
def drawing_notes():
    """Requested by tests of pictures that cannot be drawn, for which a run prints a note."""


@pytest.fixture(autouse=True)
def without_drawing_notes(request, monkeypatch):
    """Elsewhere, a bug in drawing shows its traceback."""
    if "drawing_notes" not in request.fixturenames:
        monkeypatch.setattr("support.pictures.or_a_note", lambda path: contextlib.nullcontext())


@pytest.fixture(autouse=True)
def without_pictures(request, monkeypatch):
    """Each picture takes seconds to draw, so runs write empty files unless a test requests
    `drawings`."""
    if "drawings" not in request.fixturenames:
        monkeypatch.setattr("support.pictures.sample_sheet", lambda *args: args[-1].touch())
        monkeypatch.setattr("support.run.draw_curves", lambda log, picture: picture.touch())


@pytest.fixture
def release(tmp_path):
    """The folder of a release that is not prepared."""
    write_release(tmp_path / "clevr")
    return tmp_path / "clevr"


@pytest.fixture
def prepared(release):
    """The same folder with random features."""
    write_features("clevr_change", release)
    return release


@pytest.fixture
def tiny():
    """Flags that make any method small and quick on `prepared`."""
    flags = "--dataset clevr_change --device cpu --dim 16 --heads 2 --batch_size 3"
    return [*flags.split(), *"--eval_every 4 --log_every 2 --steps 8".split()]
