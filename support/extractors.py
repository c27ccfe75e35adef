"""Pictures -> grid features: reading pictures, the networks, and CLIP. Licence: MIT."""

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from common import InputError
from support.files import file_errors, print_notes, progress, require_files
from support.mini import networks
from support.threads import in_threads, prefetch

# ---- pictures ------------------------------------------------------------------------------------

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# 178 megapixels is Pillow's limit, as a small file could otherwise fill the memory.
PICTURE_REMEDY = f"give {', '.join(FORMATS)} with 8 bits a channel and at most 178 megapixels"


def read_image(picture: str | Path | Image.Image) -> Image.Image:
    """A file or PIL image -> upright RGB on white; of an animation, the first frame. The EXIF
    orientation is applied; published features were made without it. InputError: PICTURE_REMEDY."""
    if isinstance(picture, Image.Image):
        return upright_rgb(picture)
    with open(picture, "rb") as f, file_errors(picture, PICTURE_REMEDY):
        return upright_rgb(Image.open(f, formats=FORMATS))


def upright_rgb(picture: Image.Image) -> Image.Image:
    """A PIL image -> upright RGB on white. One of 200 MB must not be copied in vain."""
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


def check_pictures(files: list[Path], lines: dict[Path, int] | None = None) -> None:
    """Look at files before long work (lines: see require_files). Errors name all unusable ones."""
    require_files(files, lines)
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
            picture.draft("RGB", (1, 1))  # decodes a JPEG at an eighth of its size
            picture.load()
    except Exception as e:  # A broken file can raise anything.
        return f"{file} ({e})"
    return ""


# ---- networks ------------------------------------------------------------------------------------

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

ONLINE = "go online once (if it is broken, delete it first), or give --extractor"


def resnet101_grid(name: str) -> nn.Module:
    """torchvision's ResNet-101 up to the layer in `name`, with the papers' ImageNet weights."""
    # Imported here, as it brings PyTorch's compiler, which takes seconds.
    from torchvision.models import ResNet101_Weights, resnet101

    weights = ResNet101_Weights.IMAGENET1K_V1
    file = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
    with file_errors(file, f"{ONLINE} timm/NAME:FILE"):
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
    vit_base_patch16_224.mae. A ViT's map comes before its last LayerNorm, as in timm."""

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
            with file_errors(f"{name} in {HF_HUB_CACHE}", f"{ONLINE} {name}:FILE"):
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
            net = networks.feature_net()
            self.preprocess = networks.preprocess
        else:
            known = ", ".join(RESNETS)
            raise InputError(f"--extractor {name}: expected {known}, timm/MODEL or timm/MODEL:FILE")
        self.net = net.to(device, memory_format=torch.channels_last).eval()

    def blocks(self, pictures: list, batch: int) -> Iterator[Tensor]:
        """Features of `batch` pictures (see read_image) at a time; the next ones are read ahead."""
        cuda = self.device.startswith("cuda")

        def read(picture) -> Tensor:
            return self.preprocess(read_image(picture))

        starts = range(0, len(pictures), batch)
        read_blocks = (list(in_threads(read, pictures[i : i + batch])) for i in starts)
        for x in prefetch(map(torch.stack, read_blocks)):
            x = x.to(self.device, memory_format=torch.channels_last)
            with torch.inference_mode(), torch.autocast("cuda", torch.float16, enabled=cuda):
                grid = self.net(x)
            # The layout is channels-last; the GPU converts it faster than the CPU would.
            yield grid.half().contiguous().cpu()


def extractor_name(extractor: str) -> str:
    """The name of an extractor in feature files and checkpoints. In timm/MODEL:FILE, a digest of
    the weights replaces FILE, because the file may be moved or overwritten."""
    model, colon, file = extractor.partition(":")
    if not colon:
        return extractor
    with file_errors(file, f"if it has moved, give --extractor {model}:FILE with its new place"):
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return f"{model}:{digest[:12]}"


def load_clip(name: str, device: str = "cpu") -> tuple:
    """A frozen CLIP in float32, its tokenizer (texts -> ids) and its preprocessing (PIL image ->
    tensor). `name` is MODEL:PRETRAINED in open_clip's names, such as "ViT-L-14:openai" (fetched on
    first use), or MODEL:FILE, or mini for mini's own. InputError if there is no such CLIP."""
    import open_clip

    if name == "mini":
        clip, tokenizer = networks.load_clip()
        return clip.to(device).eval().requires_grad_(False), tokenizer, networks.preprocess
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
