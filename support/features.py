"""Pictures -> grid features: pictures, extractors, feature files, CLIP. Licence: MIT."""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from common import InputError
from support import mini
from support.files import atomic_write, file_errors, print_notes, progress

# ---- pictures and extractors ---------------------------------------------------------------------

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# 178 megapixels is Pillow's limit, as a small file could otherwise fill the memory.
PICTURE_REMEDY = f"give {', '.join(FORMATS)} with 8 bits a channel and at most 178 megapixels"


def read_image(picture: str | Path | Image.Image) -> Image.Image:
    """A file or PIL image -> upright RGB on white; of an animation, the first frame. The EXIF
    orientation is applied; published features of photographs were made without it. InputError: see
    PICTURE_REMEDY."""
    if isinstance(picture, Image.Image):
        return upright_rgb(picture)
    with open(picture, "rb") as f, file_errors(picture, PICTURE_REMEDY):
        return upright_rgb(Image.open(f, formats=FORMATS))


def upright_rgb(picture: Image.Image) -> Image.Image:
    """A PIL image -> upright RGB on white. A photograph of 48 megapixels takes 200 MB, so nothing
    is copied that need not be."""
    refuse_16_bits(picture)
    if picture.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        picture = ImageOps.exif_transpose(picture)
    if picture.has_transparency_data:
        rgba = picture.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        picture = Image.alpha_composite(white, rgba)
    if picture.mode != "RGB":
        picture = picture.convert("RGB")
    picture.load()  # the file is closed soon
    return picture


def refuse_16_bits(picture: Image.Image) -> None:
    """InputError if a PIL image does not have 8 bits a channel."""
    # Modes I and F hold integers and floats. Colours of 16 bits have the mode RGB, and only
    # "RGB;16B" in `tile` shows them. Pillow keeps their upper 8 bits, which may all be 0.
    if picture.mode[0] in "IF" or ";16" in str(getattr(picture, "tile", "")):
        raise InputError(f"mode {picture.mode} has more than 8 bits a channel")


def check_pictures(files: list[Path]) -> None:
    """Looks at files before long work with them. FileNotFoundError if any is missing; InputError
    names all that are broken."""
    require_files(files)
    faults = in_threads(picture_fault, files)
    bar = progress(faults, desc="checking", total=len(files), unit="picture")
    broken = [text for text in bar if text]
    if broken:
        these = f"{len(broken)} of {len(files)} pictures cannot be used"
        raise InputError(f"{these}: {', '.join(broken)}; {PICTURE_REMEDY}")


def picture_fault(file: Path) -> str:
    """What is wrong with a picture's file, or ""."""
    try:
        with Image.open(file, formats=FORMATS) as picture:
            refuse_16_bits(picture)
            if picture.format in ("PNG", "WEBP"):
                picture.verify()  # by their checksums and lengths
            else:
                picture.draft("RGB", (1, 1))  # decodes a JPEG at an eighth of its size
                picture.load()
    except Exception as e:  # A broken file can raise anything.
        return f"{file} ({e})"
    return ""


def in_threads(function: Callable, items: list) -> Iterator:
    """map(function, items) for work on pictures. A decoded photograph takes 200 MB, and
    os.cpu_count() counts the CPUs of a container's host, so there are at most 8 threads."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(items), 1024):  # each item that waits takes memory, too
            yield from pool.map(function, items[start : start + 1024])


def prefetch(items: Iterator) -> Iterator:
    """Yields the items of an iterator; a thread makes the next one while the current one is in use.
    Items must not be None, which marks the end."""
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(next, items, None)
        while True:
            item = upcoming.result()
            if item is None:
                return
            upcoming = pool.submit(next, items, None)
            yield item


MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
AUTHORS_STD = torch.tensor([0.229, 0.224, 0.224])[:, None, None]  # as in the authors' scripts


def preprocess_resnet(image: Image.Image) -> Tensor:
    """The preprocessing of most papers -> (3, 224, 224): aspect ratio not kept, OpenCV's bicubic
    without antialiasing. The script behind CLEVR-Change's .npy features antialiases."""
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()  # (3, height, width)
    x = F.interpolate(x[None], (224, 224), mode="bicubic", align_corners=False)[0]
    x = x.round().clamp(0, 255) / 255
    return (x - MEAN) / AUTHORS_STD


def preprocess_imagenet(image: Image.Image, side: int = 224) -> Tensor:
    """Pillow's bilinear resize, aspect ratio not kept, and ImageNet's mean and standard deviation
    -> (3, side, side). As in Tan et al. (ACL 2019) and, with side 256, Liu et al. (TGRS 2022)."""
    resized = np.array(image.resize((side, side), Image.Resampling.BILINEAR))
    x = torch.from_numpy(resized).permute(2, 0, 1).float() / 255
    return (x - MEAN) / STD


# The papers' extractors: name -> preprocessing function
RESNETS = {
    "resnet101-layer3": preprocess_resnet,  # features (1024, 14, 14)
    "resnet101-layer3-256": partial(preprocess_imagenet, side=256),  # (1024, 14, 14)
    "resnet101-layer4": preprocess_imagenet,  # (2048, 7, 7)
}


def resnet101_grid(name: str) -> nn.Module:
    """torchvision's ResNet-101 up to the layer in `name`, with the papers' ImageNet weights, which
    torchvision fetches on first use: (n, 3, H, W) -> (n, *grid)."""
    # Imported here, as it brings PyTorch's compiler, which takes seconds.
    from torchvision.models import ResNet101_Weights, resnet101

    weights = ResNet101_Weights.IMAGENET1K_V1
    file = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
    remedy = "go online once (if it is broken, delete it first), or give --extractor timm/NAME:FILE"
    with file_errors(file, remedy):
        net = resnet101(weights=weights)
    stem = [net.conv1, net.bn1, net.relu, net.maxpool]
    grid = nn.Sequential(*stem, net.layer1, net.layer2, net.layer3)
    if name == "resnet101-layer4":
        grid.append(net.layer4)
    elif name == "resnet101-layer3-256":
        grid.append(nn.AdaptiveAvgPool2d(14))  # of 16 x 16 cells
    return grid


class TimmGrid(nn.Module):
    """The last feature map of a timm model: (n, 3, 224, 224) -> (n, C, H, W). name: timm/MODEL,
    whose weights timm fetches, or timm/MODEL:FILE. MODEL may have a tag, such as
    vit_base_patch16_224.mae. A ViT's map comes before its last LayerNorm, as in timm.
    InputError if there is no such model, or the file does not hold its weights."""

    def __init__(self, name: str):
        super().__init__()
        import timm
        from huggingface_hub.constants import HF_HUB_CACHE

        model, _, file = name.removeprefix("timm/").partition(":")
        with file_errors(f"--extractor {name}", "timm.list_pretrained() lists the names"):
            defaults = timm.get_pretrained_cfg(model, allow_unregistered=False)
        options = {"pretrained": True, "num_classes": 0}
        if defaults.fixed_input_size:  # ViTs, whose own size may be 518; timm resizes positions
            options["img_size"] = 224
        if file:
            with file_errors(file, f"give weights of {model} under timm's names"):
                weights = timm.models.load_state_dict(file)
                classifier = defaults.classifier or ()  # one name, several or none
                weights = {k: w for k, w in weights.items() if not k.startswith(classifier)}
                options["pretrained_cfg_overlay"] = {"state_dict": weights}
                self.net = timm.create_model(model, **options)
                # timm loads what fits and leaves the rest at random: all but positions must fit.
                positions = {k: w for k, w in self.net.state_dict().items() if "pos" in k}
                self.net.load_state_dict(weights | positions)
        else:
            remedy = "go online once (if it is broken, delete it first), or give "
            remedy += f"--extractor {name}:FILE"
            with file_errors(f"{name} in {HF_HUB_CACHE}", remedy):
                self.net = timm.create_model(model, **options)
        data_config = timm.data.resolve_data_config({}, pretrained_cfg=defaults.to_dict())
        # The usual centre crop would hide changes at the border.
        data_config |= {"input_size": (3, 224, 224), "crop_pct": 1.0, "crop_mode": "squash"}
        self.preprocess = timm.data.create_transform(**data_config)

    def forward(self, x: Tensor) -> Tensor:
        (grid,) = self.net.forward_intermediates(x, indices=1, intermediates_only=True)
        return grid


class Extractor:
    """Pictures -> grid features (n, C, H, W) float16. InputError if the name is unknown."""

    def __init__(self, name: str, device: str = "cpu"):
        self.device = device
        if name in RESNETS:
            net = resnet101_grid(name)
            self.preprocess = RESNETS[name]
        elif name.startswith("timm/"):
            net = TimmGrid(name)
            self.preprocess = net.preprocess
        elif name == "mini-cnn":
            net = mini.feature_net()
            self.preprocess = mini.preprocess
        else:
            known = ", ".join(RESNETS)
            raise InputError(f"--extractor {name}: expected {known}, timm/MODEL or timm/MODEL:FILE")
        self.net = net.to(device, memory_format=torch.channels_last).eval()

    def blocks(self, pictures: list, batch: int) -> Iterator[Tensor]:
        """Features of `batch` pictures at a time (anything that read_image takes); the next ones
        are decoded while the network runs."""
        cuda = self.device.startswith("cuda")

        def read(picture) -> Tensor:
            return self.preprocess(read_image(picture))

        def read_block(start: int) -> Tensor:
            return torch.stack(list(in_threads(read, pictures[start : start + batch])))

        for x in prefetch(read_block(start) for start in range(0, len(pictures), batch)):
            x = x.to(self.device, memory_format=torch.channels_last)
            with torch.inference_mode(), torch.autocast("cuda", torch.float16, enabled=cuda):
                grid = self.net(x)
            # The layout is channels-last; the GPU converts it faster than the CPU would.
            yield grid.half().contiguous().cpu()


# ---- feature files -------------------------------------------------------------------------------

AUTHORS_FILES = "the authors' .npy files"  # the attribute `preprocessing` of such feature files


def authors_features(picture: Path) -> Path:
    """The features that a data set's authors publish for a picture:
    sc_images/x.png -> sc_features/x.png.npy"""
    folder = picture.parent.name.replace("images", "features")
    return picture.parent.with_name(folder) / f"{picture.name}.npy"


def write_features(
    path: Path, files: dict[str, Path], blocks: Iterable, extractor: str, preprocessing: str
) -> None:
    """Write a feature file: `features` (n, C, H, W) float16, not chunked; `image_ids` (n,);
    `stamps` (n, 3). files: image name -> the file that its features are made from. `blocks` yields
    arrays (b, C, H, W) in this order. InputError if a feature is NaN or too large for float16."""
    names = list(files)
    done = 0
    stamps = []
    bar = progress(total=len(names), desc="features", unit="image")
    with bar, atomic_write(path) as temporary, h5py.File(temporary, "w") as f:
        f.attrs.update(extractor=extractor, preprocessing=preprocessing)
        f["image_ids"] = names
        for block in blocks:
            if not done:
                shape = (len(names), *block.shape[1:])
                table = f.create_dataset("features", shape, "float16", fill_time="never")
            if not np.abs(block).max() <= np.finfo(np.float16).max:  # phrased to refuse NaN, too
                raise InputError(f"features of {names[done]!r} or soon after are NaN or too large")
            table[done : done + len(block)] = block.astype(np.float16)
            stamps += [stamp(files[name]) for name in names[done : done + len(block)]]
            done += len(block)
            bar.update(len(block))
        assert done == len(names), f"{done} feature maps for {len(names)} images"
        f["stamps"] = np.array(stamps, np.int64)


def stamp(file: Path) -> tuple[int, int, int]:
    """A file's size in bytes, its modification time in ns and a checksum of its content."""
    status = file.stat()
    # Not CRC-32: a PNG holds CRCs of its own.
    checksum = hashlib.blake2b(file.read_bytes(), digest_size=7).digest()  # fits int64
    return status.st_size, status.st_mtime_ns, int.from_bytes(checksum, "big")


READ_AHEAD = 128 * 1024  # bytes; Linux may fetch no more of what one call announces


class Features:
    """A feature file whose rows are read by image name: from the memory-mapped file, which the
    system caches as far as memory allows, or from the GPU, if `load` has copied them there."""

    def __init__(self, path: Path, command: str, extractor: str):
        if not path.exists():
            found = ""
            for other in sorted(path.parent.glob("features*.h5")):
                with file_errors(other, "delete it"), h5py.File(other) as f:
                    model, colon, _ = f.attrs["extractor"].partition(":")
                found += f"; for {other.name}, add --extractor {model}{colon and ':FILE'}"
            raise FileNotFoundError(f"no features at {path}{found}; or run: {command}")
        self.path = path
        self.remedy = f"delete {path.name} and run: {command}"
        with file_errors(path, self.remedy), h5py.File(path) as f:
            table = f["features"]
            names = f["image_ids"].asstr()[:]
            self.stamps = dict(zip(names, f["stamps"][:].tolist(), strict=True))
            self.extractor = f.attrs["extractor"]
            self.preprocessing = f.attrs["preprocessing"]
            self.row_of = {name: i for i, name in enumerate(names)}
            shape = table.shape
            self.offset = table.id.get_offset()
        if self.extractor != extractor:
            raise InputError(f"{path} was made by {self.extractor}, not {extractor}; {self.remedy}")
        self.file = open(path, "rb")  # stays open, for `announce`
        # h5py reads rows in sorted order only. Nothing writes to the map, of which PyTorch warns.
        # One that could be written to would need as much memory as the file is large.
        table = np.memmap(self.file, np.float16, "r", self.offset, shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.data = torch.from_numpy(table)
        self.device = "cpu"  # `load` sets it if batches are sent to a GPU
        self.blind = False  # `load` sets it for the baseline that sees no images

    def announce(self, index: list[int]) -> None:
        """Tells the system which rows of the file are read next, so that it fetches many at once.
        Without that, the map's page faults wait for the disk one by one."""
        if not hasattr(os, "posix_fadvise"):  # macOS, Windows
            return
        size = self.data[0].nbytes
        for i in index:
            end = self.offset + (i + 1) * size
            for start in range(end - size, end, READ_AHEAD):
                length = min(READ_AHEAD, end - start)
                # Unlike mmap's madvise, this lets other threads run while it waits.
                os.posix_fadvise(self.file.fileno(), start, length, os.POSIX_FADV_WILLNEED)

    def rows(self, names: list[str]) -> Tensor:
        """Features of the named images (n, C, H, W) float16, in RAM or on their way to the GPU."""
        index = torch.tensor([self.row_of[name] for name in names])
        shape = (len(index), *self.data.shape[1:])
        if self.blind:
            return torch.zeros(shape, dtype=torch.float16)
        if self.data.is_cuda:
            # Indexing by the list itself would wait for what the GPU has to do before.
            return self.data[index.to(self.data.device, non_blocking=True)]
        self.announce(index.tolist())
        if self.device == "cpu":
            # PyTorch would copy in threads of its own. With more OpenMP threads than cores, threads
            # sleep between operations, and training would run half as fast.
            return torch.from_numpy(self.data.numpy()[index.numpy()])
        rows = torch.empty(shape, dtype=torch.float16, pin_memory=True)
        torch.index_select(self.data, 0, index, out=rows)  # in several threads, unlike NumPy
        return rows.to(self.device, non_blocking=True)

    def content(self, name: str) -> int:
        """The checksum of the file that a row was made from: equal for copies of a picture."""
        _, _, checksum = self.stamps[name]
        return checksum

    def require(self, paths: dict[str, Path]) -> None:
        """InputError if an image has no features, or if its picture (or the authors' .npy file) has
        been replaced since they were made. paths: image name -> picture."""
        touched = {}  # files of another time, by image name
        for name, picture in progress(paths.items(), desc="files", unit="file", delay=1):
            if name not in self.row_of:
                raise InputError(f"{self.path} has no features of {name}; {self.remedy}")
            file = picture
            if self.preprocessing == AUTHORS_FILES:
                file = authors_features(picture)
            if file.exists():  # features may be shared without the files they were made from
                size, time, _ = self.stamps[name]
                status = file.stat()
                if (status.st_size, status.st_mtime_ns) != (size, time):
                    touched[name] = file
        # A copied file may have a new time, so its content decides.
        stamps = in_threads(stamp, list(touched.values()))
        bar = progress(stamps, desc="copied files", total=len(touched), unit="file", delay=1)
        for name, (_, _, checksum) in zip(touched, bar, strict=True):
            if checksum != self.content(name):
                replaced = f"{self.path} was made before {touched[name]} was replaced"
                raise InputError(f"{replaced}; {self.remedy}")


def extractor_name(extractor: str) -> str:
    """The name of an extractor in feature files and checkpoints. In timm/MODEL:FILE, a digest of
    the weights replaces FILE, because the file may be moved or overwritten."""
    model, colon, file = extractor.partition(":")
    if not colon:
        return extractor
    with file_errors(file, f"if it has moved, give --extractor {model}:FILE with its new place"):
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return f"{model}:{digest[:12]}"


def require_files(files: list[Path]) -> None:
    """FileNotFoundError if any of a release's files is missing."""
    absent = [file for file in files if not file.exists()]
    if absent:
        named = ", ".join(map(str, absent[:10]))
        raise FileNotFoundError(f"there is no {named} ({len(absent)} of {len(files)} missing)")


def read_npy(path: Path) -> np.ndarray:
    """A feature map (C, H, W) published by the authors."""
    with file_errors(path, "fetch it again"):
        return np.load(path)  # refuses pickles, which could run arbitrary code


# ---- CLIP ----------------------------------------------------------------------------------------


def load_clip(name: str, device: str = "cpu") -> tuple:
    """A frozen CLIP in float32, its tokenizer (texts -> ids) and its preprocessing (PIL image ->
    tensor). `name` is MODEL:PRETRAINED in open_clip's names, such as "ViT-L-14:openai" (fetched on
    first use), or MODEL:FILE, or mini for mini's own. InputError if there is no such CLIP."""
    import open_clip

    if name == "mini":
        clip, tokenizer = mini.load_clip()
        return clip.to(device).eval().requires_grad_(False), tokenizer, mini.preprocess
    model, _, weights = name.partition(":")
    tags = open_clip.list_pretrained_tags_by_model(model)
    if weights not in tags and not Path(weights).is_file():
        known = ", ".join(tags) or "none (open_clip.list_models() lists the models)"
        raise InputError(f"--clip {name}: expected MODEL:FILE, or of this model one of: {known}")
    if weights not in tags and f"{model}-quickgelu" in open_clip.list_models():
        openai = f"OpenAI's weights need {model}-quickgelu:{weights}"
        print_notes(f"--clip {name} computes with GELU; {openai}")
    # OpenAI's weights need QuickGELU, an activation that open_clip's model of this name lacks.
    quick = bool((open_clip.get_pretrained_cfg(model, weights) or {}).get("quick_gelu"))
    # [ours] CLIP's own transform crops the centre, and would miss changes at the border.
    options = {"force_quick_gelu": quick, "image_resize_mode": "squash"}
    with file_errors(f"--clip {name}", "load it once while online, or give MODEL:FILE"):
        clip, _, preprocess = open_clip.create_model_and_transforms(model, weights, **options)
    clip = clip.to(device).eval().requires_grad_(False)
    return clip, open_clip.get_tokenizer(model), preprocess
