"""mini's networks, shipped in assets/: one whose features replace ResNet-101's, and a CLIP.
tools/make_mini_networks.py trained them on single training pictures and their objects. They have
seen no captions, no pairs, and no validation or test pictures. Licence: MIT."""

import re
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from common import InputError
from support.files import load_tensors, load_weights
from support.mini.scenes import SIDE

ASSETS = Path(__file__).parents[2] / "assets"
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
    show. A learned pattern, added before, makes all bare floor look the same."""

    def __init__(self):
        super().__init__()
        # 2 x 2 pixels are folded into channels, so the first convolution costs a quarter.
        self.stem = nn.Sequential(nn.PixelUnshuffle(2), conv(12, 32, 3), nn.ReLU())
        # For equal time, the extra block recognises shapes better at 16 x 16 than at 8 x 8.
        self.blocks = nn.Sequential(Block(32, 64, 2), Block(64, 64), Block(64, 128, 2))
        self.pattern = nn.Parameter(torch.randn(128))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        x = x.movedim(1, -1) + self.pattern  # (B, 8, 8, 128)
        return F.layer_norm(x, (128,)).movedim(-1, 1)


def preprocess(image: Image.Image) -> Tensor:
    """RGB of 64x64 pixels -> (3, 64, 64) in -1 ... 1. InputError if it has another size."""
    if image.size != (SIDE, SIDE):
        size = f"{SIDE}x{SIDE} pixels, not {image.width}x{image.height}"
        remedy = "for your own pictures, train with another --extractor: docs/own_pictures.md"
        raise InputError(f"this network knows only mini's drawings of {size}; {remedy}")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def feature_net() -> FeatureNet:
    """The network whose features replace ResNet-101's, as shipped."""
    file = ASSETS / "mini_cnn.pt"
    return load_weights(FeatureNet(), load_tensors(file, SHIPPED), file, SHIPPED)


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
