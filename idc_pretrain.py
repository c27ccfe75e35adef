"""IDC pre-training and fine-tuning: Image Difference Captioning with Pre-training and Contrastive Learning
(Yao, Wang, Jin, AAAI 2022).

Idea. (1) Two images and a caption are one sequence of tokens for one transformer; before it, an encoder sees each image
alone and another both together, so that it can compare. (2) Three tasks pre-train it on the pairs it will caption:
guess masked words (MLM), recognise masked image cells among all others (MVCL), tell the caption from six rewritten ones
(FDA). (3) Fine-tuning keeps the first task, with words that see only earlier ones, so that a caption is written word by
word in the place of a [MASK]; where there are distractor pairs it also learns to judge them.

The paper's equations (1)-(9) in our copy are prose, so their numbers stand for:
Eq. 1-3    Embedding           y = Dropout(LN(x + type + position))
Eq. 4      IDC.visual          E_p([E_s(v_1) ; E_s(v_2)]), the image difference encoder
Eq. 5      IDC.cross           cross-modal transformer over [visual ; text]
Eq. 6      word_loss           MLM, of words masked by mask_words
Eq. 7-8    cell_loss           MVCL, of cells masked by mask_cells
Eq. 9      align_loss          FDA, captions rewritten by Negatives: Retrieve, Replace, Confuse
Sec. 2.3   judge_loss          is the pair a distractor?
Sec. 2.4   class_loss, contrast_loss (TransFG's), match_loss: classes and pairs of birds, for the image difference
encoder
           losses_of           one task a step in pre-training; then L = L_MLM + w_judge L_judge

Row of the paper's tables                      flags
Tables 2, 3  CLEVR-Change                      --dataset clevr_change
Table 4      1 no pre-training                 --pretrain_steps 0
             2 MLM, 3 MLM + MVCL, 4 all three  --mvcl 0 --fda 0; --fda 0; (none)
             5 no difference encoder           --no-difference_encoder
             6 no distractor judging           --w_judge 0
Tables 1, 5  Birds-to-Words; + CUB; + NABirds  --dataset birds_to_words; --cub FOLDER; --nabirds FOLDER

Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, K heads, V words of a caption (START, words, END,
padding), T text tokens, S = 2 (N + 1) visual tokens: [IMG1] v_1 ... v_N [IMG2] v_1 ... v_N.

Where the paper is silent the released code is followed; where both are, the choice is marked [ours]. Where the two
differ there is a config field; --reading released sets them all. Without a field: captions are padded to the longest of
the data set (released: to 40 or 80 ids); LayerNorm is PyTorch's (released: by the unbiased deviation plus an epsilon);
CUB's [IMG2] passes E_s (released: straight to E_p). Both readings have the release's [CLS] and [IMG] without positions,
words times sqrt(D), pre-norm blocks without a LayerNorm after the last, and in fine-tuning images that do not see the
text: the paper allows it, but a word would then learn from later ones through the images. Which words fine-tuning masks
the paper does not say: here each word is asked for from a [MASK] in its place behind the true words before it, as in
decoding [ours] (finetune_targets).

To copy: this file and common.py. Training on a data set of data.py needs that file too.
"""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common import (
    END,
    NULL,
    Attention,
    Run,
    RunConfig,
    decode,
    initialise,
    learning_rate,
    load_model,
    mean_of,
    parse_args,
    run_main,
    sinusoid,
    upcast,
)

# ---- config ----------------------------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """IDC. common.RunConfig has the fields of a run; its steps, lr, warmup and batch_size are those of fine-tuning."""

    RANGES = RunConfig.RANGES | {
        "pretrain_steps": (0, 10**8), "pretrain_warmup": (0, 10**8), "patience": (0, 10**8), "dropout": (0, 0.99),
        "mlm": (0, 1000), "mvcl": (0, 1000), "fda": (0, 1000), "mask_rate": (0.01, 1), "cell_mask_rate": (0.01, 1),
        "tau_mvcl": (0.001, 1000), "tau_fda": (0.001, 1000),
    }  # fmt: skip

    init: str = ""  # checkpoint of another run of the same model, such as pretrained.pt, to start from
    dim: int = 512  # width D
    ffn: int = 2048  # width of the feed-forward layers
    heads: int = 8  # heads of every attention
    layers: int = 3  # layers of the cross-modal transformer
    dropout: float = 0.2  # dropout probability
    difference_encoder: bool = True  # E_s and E_p of Eq. 4; without them images go straight to the cross transformer
    pretrain_steps: int = 250000  # steps of pre-training; 0: none
    pretrain_batch: int = 100  # scenes a step of pre-training
    pretrain_lr: float = 1e-4  # learning rate of pre-training
    pretrain_warmup: int = 8000  # steps of its linear warm-up
    mlm: int = 8  # share of masked language modelling in the steps of pre-training; 0 leaves it out
    mvcl: int = 1  # share of masked visual contrastive learning
    fda: int = 2  # share of fine-grained difference aligning
    cub: str = ""  # CUB's folder: pre-train on its single images and captions first
    nabirds: str = ""  # NABirds' folder: classes and pairs of birds as a fourth task of pre-training, with share 3
    mask_rate: float = 0.15  # share of words that MLM masks, and fine-tuning if its targets are "masked"
    cell_mask_rate: float = 0.15  # share of one image's cells that MVCL masks
    tau_mvcl: float = 1.0  # temperature of MVCL
    tau_fda: float = 1.0  # temperature of FDA
    weight_decay: float = 0.0  # of fine-tuning
    w_judge: float = 1.0  # weight of L_judge in fine-tuning; nothing on data sets without distractor pairs
    patience: int = 0  # validations without a better one that end fine-tuning; 0: never
    # paper | released code
    swap: bool = True  # [ours] default and distractor image change places in half of the scenes, as in the other methods
    finetune_targets: Literal["every", "masked"] = "every"  # [ours] a [MASK] for each word, or for masked words only
    start: Literal["xavier", "pytorch"] = "xavier"  # first weights: [ours] Xavier-uniform, or PyTorch's
    project: Literal["linear", "sigmoid"] = "linear"  # features -> width D: linear, or a sigmoid after it
    exponent: Literal["standard", "doubled"] = "standard"  # of the positions' rates; doubled: most channels hardly vary
    special_tokens: Literal["own", "shared"] = "own"  # [CLS] [IMG1] [IMG2] and three types, or one vector and six types
    mvcl_negatives: Literal["features", "predictions"] = "features"  # unmasked features, or what is predicted there
    see_padding: bool = False  # pre-training attends to padding
    finetune_cls: bool = True  # [CLS] stands before the text in fine-tuning too
    mask_rules: Literal["plain", "released"] = "plain"  # released: END only by [MASK], word 1 if none, any random id
    pretrain_decay: Literal["none", "inverse_sqrt"] = "none"  # learning rate after the warm-up of pre-training
    finetune_decay: Literal["none", "halves"] = "none"  # halves: x1/2 at step 10,000, x1/4 at 20,000
    reduction: Literal["mean", "sum"] = "mean"  # of fine-tuning's losses, over words and over pairs
    # ours
    reading: Literal["paper", "released"] = "paper"  # disputed details as the paper says, or as the released code does
    blind: bool = False  # zero the features: what words alone can score

    def __post_init__(self):
        super().__post_init__()
        if self.pretrain_steps and not (self.mlm or self.mvcl or self.fda or (self.nabirds and not self.cub)):
            raise ValueError("--mlm 0 --mvcl 0 --fda 0 leave nothing to pre-train; give --pretrain_steps 0")


# Table 6 of the paper and section "Implementation Details". A batch there counts pairs, here scenes (CLEVR-Change: two
# pairs).
PRESETS = {
    "clevr_change": dict(seed=1234, extractor="resnet101-layer4", lr=3e-5, batch_size=100, steps=100000, eval_every=400,
                         patience=50),
    "birds_to_words": dict(seed=1234, layers=2, mlm=9, pretrain_steps=50000, pretrain_warmup=4000, pretrain_batch=200, lr=3e-5,
                           weight_decay=1e-4, batch_size=32, steps=20000, eval_every=85, patience=80, select_by="ROUGE-L"),
    "mini": dict(dim=128, ffn=256, heads=4, layers=2, dropout=0.0, pretrain_steps=0, pretrain_batch=16, pretrain_lr=1e-3,
                 pretrain_warmup=50, batch_size=16, lr=1e-3, schedule="cosine",
                 warmup=50, grad_clip=1.0, steps=2600, eval_every=1300, eval_batch=250),
}  # fmt: skip

# --reading released: the released code's side of every disputed detail, on all data sets and on single ones. CLEVR-Change's
# steps and rates agree with the paper.
RELEASED = {
    "all": dict(swap=False, finetune_targets="masked", start="pytorch", project="sigmoid", exponent="doubled",
                special_tokens="shared", mvcl_negatives="predictions", see_padding=True, finetune_cls=False,
                mask_rules="released", pretrain_decay="inverse_sqrt", finetune_decay="halves", reduction="sum"),
    "birds_to_words": dict(pretrain_steps=60000, pretrain_batch=150),
}  # fmt: skip

# ---- modules ---------------------------------------------------------------------------------------------------------


def doubled_sinusoid(length: int, dim: int) -> Tensor:
    """The released positions: 10000^(2i/D) for channel i, where Vaswani et al. have 10000^(i/D) for an even i, and
    another rate for the cosine beside it. Most channels hardly change over a caption. -> (length, dim)."""
    angle = torch.arange(length)[:, None] / 10000 ** (2 * torch.arange(dim) / dim)
    return torch.where(torch.arange(dim) % 2 == 0, angle.sin(), angle.cos())


class Embedding(nn.Module):
    """Eq. 1-3: y = Dropout(LN(x + type + position)) of words, of cells, and of the special tokens, which have no
    position.

    One LayerNorm and one table of types serve all."""

    def __init__(self, cfg: Config, vocab_size: int, channels: int, length: int):
        super().__init__()
        self.own = cfg.special_tokens == "own"
        self.mask = vocab_size  # id of [MASK]; the special tokens follow
        self.table = nn.Embedding(vocab_size + (4 if self.own else 2), cfg.dim)
        # Image 1, image 2, text; released: three for the special tokens, then three for the rest.
        self.types = nn.Embedding(3 if self.own else 6, cfg.dim)
        self.project = nn.Linear(channels, cfg.dim)
        self.norm, self.dropout = nn.LayerNorm(cfg.dim, eps=1e-12), nn.Dropout(cfg.dropout)
        positions = sinusoid if cfg.exponent == "standard" else doubled_sinusoid
        self.register_buffer("position", positions(length, cfg.dim), persistent=False)
        self.squash, self.scale = cfg.project == "sigmoid", cfg.dim**0.5

    def special(self, kind: int, count: int) -> Tensor:
        """[IMG1], [IMG2] or [CLS] (kind 0, 1, 2) -> (count, 1, D)."""
        row = self.table.weight[self.mask + 1 + (kind if self.own else 0)] + self.types.weight[kind]
        return self.dropout(self.norm(row)).expand(count, 1, -1)

    def words(self, ids: Tensor, start: int = 0) -> Tensor:
        """(B, V) ids at positions start, start + 1, ... -> (B, V, D)."""
        position = self.position[start : start + ids.shape[1]]
        return self.dropout(self.norm(self.scale * self.table(ids) + self.types.weight[-1] + position))

    def cells(self, features: Tensor, kind: int) -> Tensor:
        """(B, N, C) of the first or second image (kind 0, 1) -> [IMG] and cells (B, 1 + N, D). Positions restart in
        each."""
        x = self.project(features)
        x = x.sigmoid() if self.squash else x
        x = self.dropout(self.norm(x + self.types.weight[kind - 3] + self.position[: x.shape[1]]))
        return torch.cat([self.special(kind, len(x)), x], 1)


class Block(nn.Module):
    """Pre-norm layer: x + MHA(LN x), then x + W2 ReLU(W1 LN x). x (B, T, D) -> the same of the tokens `rows`, key and
    value of all of x, and the query. past: key and value of tokens before x. mask: bool (B or 1, 1, T or 1, past +
    T)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.hidden, self.output = nn.Linear(cfg.dim, cfg.ffn), nn.Linear(cfg.ffn, cfg.dim)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim), nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None, rows: slice):
        y = self.norm1(x)
        q, k, v = self.attention.project(y[:, rows], y)
        keys, values = (k, v) if past is None else (torch.cat([past[0], k], 1), torch.cat([past[1], v], 1))
        x = x[:, rows] + self.dropout(self.attention.attend(q, keys, values, mask=mask))
        y = self.output(self.dropout(F.relu(self.hidden(self.norm2(x)))))
        return x + self.dropout(y), (k, v), q


class Transformer(nn.Module):
    """LayerNorm, then blocks, and no LayerNorm after them: heads read the residual stream, as released. As Block, but
    `past` and the keys and values that are returned are lists, one item a block; rows and query are the last
    block's."""

    def __init__(self, cfg: Config, layers: int):
        super().__init__()
        self.norm, self.blocks = nn.LayerNorm(cfg.dim), nn.ModuleList(Block(cfg) for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor | None = None, past: list | None = None, rows: slice = slice(None)):
        x, cache, last = self.norm(x), [], self.blocks[-1]
        for block, before in zip(self.blocks, past or [None] * len(self.blocks), strict=True):
            x, key_value, query = block(x, mask, before, rows if block is last else slice(None))
            cache.append(key_value)
        return x, cache, query


# ---- masks -----------------------------------------------------------------------------------------------------------


def mask_words(caption: Tensor, words: int, mask: int, rate: float, rules: str) -> tuple[Tensor, Tensor]:
    """Section "MLM": of `rate` of the words 80 % become [MASK], 10 % another word, 10 % stay. caption (B, V), START
    first, padded with 0 -> ids with masks, and targets: the word that was there, -1 elsewhere.

    END is a word like any other: the model has to learn where a caption ends. The released rules replace it by [MASK]
    only, make the first word a [MASK] where none was drawn, and draw other "words" from all ids."""
    released = rules == "released"
    word = (caption > END) | ((caption == END) & (not released))
    chosen = word & (torch.rand(caption.shape, device=caption.device) < rate)
    kind = torch.rand(caption.shape, device=caption.device)
    if released:
        none = ~chosen.any(1)
        chosen[:, 1] |= none
        kind[:, 1] = kind[:, 1].masked_fill(none, 0)
    other = torch.randint(0 if released else END + 1, words, caption.shape, device=caption.device)
    ids = torch.where(chosen & (kind < 0.8), mask, torch.where(chosen & (kind < 0.9), other, caption))
    if released:
        end = (caption == END) & (torch.rand(caption.shape, device=caption.device) < rate)
        ids, chosen = ids.masked_fill(end, mask), chosen | end
    return ids, caption.masked_fill(~chosen, -1)


def mask_cells(pairs: int, images: int, cells: int, rate: float, device: str) -> Tensor:
    """Section "MVCL": `rate` of the cells of one image of each pair, at least one. -> bool (B, images, N)."""
    draw = torch.rand(pairs, cells, device=device)
    chosen = (draw < rate) | (draw == draw.min(1, keepdim=True).values)
    image = torch.randint(images, (pairs, 1), device=device) == torch.arange(images, device=device)  # (B, images)
    return chosen[:, None] & image[..., None]


# ---- losses ----------------------------------------------------------------------------------------------------------


def word_loss(logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Eq. 6: cross-entropy of masked words. logits (..., vocabulary), target (...) with -1 where nothing is asked."""
    total = F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=-1, reduction="sum")
    return total / (target >= 0).sum().clamp(min=1) if reduction == "mean" else total


def cell_loss(
    predicted: Tensor, features: Tensor, masked: Tensor, rows: int, tau: float, among_targets: bool
) -> Tensor:
    """Eq. 8: InfoNCE of masked cells by cosine, each against all unmasked ones. predicted, features (M, C), masked (M,)
    bool.

    rows: no less than there are masked cells; a fixed number, so that shapes do not depend on the draw. among_targets:
    the negatives are the other masked cells' features and what is predicted at the unmasked ones, as released."""
    p, f = F.normalize(predicted, dim=-1), F.normalize(features, dim=-1)
    weight, row = masked.to(p.dtype).topk(rows)  # the masked cells come first, others have no weight
    s = p[row] @ (torch.where(masked[:, None], f, p) if among_targets else f).T / tau  # (rows, M)
    if not among_targets:
        s = s.masked_fill(masked & (row[:, None] != torch.arange(len(masked), device=row.device)), float("-inf"))
    return (F.cross_entropy(s, row, reduction="none") * weight).sum() / weight.sum()


def align_loss(image: Tensor, text: Tensor, tau: float) -> Tensor:
    """Eq. 9: InfoNCE of the caption (first) among its rewritten ones by cosine. image, text (B, 1 + negatives, D): mean
    of [IMG1] and [IMG2], and [CLS], both as they are when they have seen that caption."""
    s = F.cosine_similarity(image, text, dim=-1) / tau
    return F.cross_entropy(s, torch.zeros(len(s), dtype=torch.long, device=s.device))


def judge_loss(logits: Tensor, changed: bool, reduction: str = "mean") -> Tensor:
    """Section 2.3: are these pairs changed (1) or distractors (0)? logits (B, 2)."""
    target = torch.full((len(logits),), int(changed), device=logits.device)
    return F.cross_entropy(logits, target, reduction=reduction)


def class_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Section 2.4: cross-entropy of every single image's class. logits (2B, classes), classes (2B,)."""
    return F.cross_entropy(logits, classes)


def contrast_loss(x: Tensor, classes: Tensor, margin: float = 0.4) -> Tensor:
    """Section 2.4, after He et al. 2021 (TransFG): cosines of like images to 1, of others below the margin, a mean over
    all ordered pairs, an image with itself included. x (2B, D), classes (2B,)."""
    with torch.autocast(x.device.type, enabled=False):  # bfloat16 has three digits
        x = F.normalize(upcast(x), dim=-1)
        cos, alike = x @ x.T, classes[:, None] == classes
        return torch.where(alike, 1 - cos, (cos - margin).clamp(min=0)).mean()


def match_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Section 2.4: are both images of one class (1) or not (0)? logits (B, 2), classes (B, 2)."""
    return F.cross_entropy(logits, (classes[:, 0] == classes[:, 1]).long())


# ---- method ----------------------------------------------------------------------------------------------------------

BIRDS = 555  # NABirds' classes


class IDC(nn.Module):
    """The model of both stages. grid: (C, H, W) of the features; max_len: ids of the longest caption."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg, self.vocab_size, self.grid, self.max_len = cfg, vocab_size, grid, max_len
        channels, cells = grid[0], grid[1] * grid[2]
        self.embed = Embedding(cfg, vocab_size, channels, max(max_len + 1, cells))
        if cfg.difference_encoder:
            self.single, self.pair = Transformer(cfg, 1), Transformer(cfg, 1)
        self.cross = Transformer(cfg, cfg.layers)
        self.head = nn.Linear(cfg.dim, vocab_size)
        self.cell_head = nn.Sequential(nn.Linear(cfg.dim, cfg.dim), nn.GELU(), nn.LayerNorm(cfg.dim, eps=1e-12))
        self.cell_bias = nn.Parameter(torch.zeros(channels))
        self.judge = nn.Linear(2 * cfg.dim, 2)
        if cfg.nabirds:
            if not cfg.difference_encoder:
                raise ValueError("--nabirds trains the difference encoder; leave --no-difference_encoder out")
            self.classify, self.match = nn.Linear(cfg.dim, BIRDS), nn.Linear(2 * cfg.dim, 2)
        if cfg.start == "xavier":
            initialise(self, xavier=True)

    # -- the sequence

    def visual(self, *images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 4. Cells (B, N, C) of both images, or of one -> E_p's (B, S, D); which tokens are there, bool (1, S): a
        second image that is not there keeps its [IMG2] alone; and E_s's [IMG1] and [IMG2] (2, B, D)."""
        before, after = (*images, torch.zeros_like(images[0]))[:2]
        there = torch.ones(2, 1 + before.shape[1], dtype=torch.bool, device=before.device)
        there[1, 1:] = len(images) == 2
        both = [torch.zeros_like(x) if self.cfg.blind else x for x in (before, after)]
        x = torch.cat([self.embed.cells(features, kind) for kind, features in enumerate(both)])  # (2B, 1 + N, D)
        if self.cfg.difference_encoder:
            x = self.single(x, None if len(images) == 2 else there.repeat_interleave(len(before), 0)[:, None, None])[0]
        alone, x, there = x[:, 0].unflatten(0, (2, -1)), torch.cat(x.chunk(2), 1), there.view(1, -1)
        if self.cfg.difference_encoder:
            x = self.pair(x, None if len(images) == 2 else there[:, None, None])[0]
        return x, there, alone

    def joint(self, visual: Tensor, there: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Eq. 5 as in pre-training: everything sees everything but padding. ids (B, V) -> visual (B, S, D), text (B, 1
        + V, D) with [CLS] first."""
        text = torch.cat([self.embed.special(2, len(ids)), self.embed.words(ids)], 1)
        real = F.pad((ids != NULL) | self.cfg.see_padding, (1, 0), value=True)
        mask = torch.cat([there.expand(len(ids), -1), real], 1)
        x = self.cross(torch.cat([visual, text], 1), mask[:, None, None])[0]
        return x[:, : visual.shape[1]], x[:, visual.shape[1] :]

    # -- pre-training

    def mlm(self, images: list[Tensor], caption: Tensor) -> dict[str, Tensor]:
        """Eq. 6. images: cells (B, N, C) of both, or of one; caption (B, V)."""
        ids, target = mask_words(caption, self.vocab_size, self.embed.mask, self.cfg.mask_rate, self.cfg.mask_rules)
        _, text = self.joint(*self.visual(*images)[:2], ids)
        return {"mlm": word_loss(self.head(text[:, 1:]), target)}

    def mvcl(self, images: list[Tensor], caption: Tensor) -> dict[str, Tensor]:
        """Eq. 7-8: the masked cells of one image of each pair, recognised from the rest and the caption. As mlm."""
        features = torch.stack(images, 1)  # (B, 1 or 2, N, C)
        masked = mask_cells(*features.shape[:3], self.cfg.cell_mask_rate, features.device)
        shown = features.masked_fill(masked[..., None], 0).unbind(1)
        visual, _ = self.joint(*self.visual(*shown)[:2], caption)
        cells = visual.unflatten(1, (2, -1))[:, : len(images), 1:]  # (B, 1 or 2, N, D), without [IMG1] and [IMG2]
        # The projection's own weights, transposed, lead back to features.
        predicted = self.cell_head(cells) @ self.embed.project.weight + self.cell_bias
        most = math.ceil(2 * self.cfg.cell_mask_rate * cells.shape[2] + 1) * len(caption)  # twice what is expected
        x, y, released = predicted.to(features.dtype), features.flatten(0, 2), self.cfg.mvcl_negatives == "predictions"
        with torch.autocast(features.device.type, enabled=False):
            return {
                "mvcl": cell_loss(x.flatten(0, 2), y, masked.flatten(), min(most, len(y)), self.cfg.tau_mvcl, released)
            }

    def fda(self, images: list[Tensor], caption: Tensor, negatives: Tensor) -> dict[str, Tensor]:
        """Eq. 9. negatives (B', 6, V or more): rewritten captions of the first B' pairs, which alone are seen. As
        mlm."""
        caption = F.pad(caption[: len(negatives)], (0, negatives.shape[2] - caption.shape[1]))
        visual, there, _ = self.visual(*(x[: len(negatives)] for x in images))
        ids = torch.cat([caption[:, None], negatives], 1)  # (B, 7, V)
        seen, text = self.joint(visual.repeat_interleave(ids.shape[1], 0), there, ids.flatten(0, 1))
        image = (seen[:, 0] + seen[:, seen.shape[1] // 2]) / 2
        image, text = (x.unflatten(0, ids.shape[:2]) for x in (image, text[:, 0]))
        return {"fda": align_loss(image, text, self.cfg.tau_fda)}

    def birds(self, images: list[Tensor], classes: Tensor) -> dict[str, Tensor]:
        """classes (B, 2) of the two images, of which there is no caption."""
        visual, _, alone = self.visual(*images)
        both = torch.cat([visual[:, 0], visual[:, visual.shape[1] // 2]], -1)
        alone, of = alone.flatten(0, 1), classes.T.flatten()
        return {"class": class_loss(self.classify(alone), of), "contrast": contrast_loss(alone, of),
                "match": match_loss(self.match(both), classes)}  # fmt: skip

    # -- fine-tuning

    def finetune(self, images: list[Tensor], caption: Tensor, changed: bool | None) -> dict[str, Tensor]:
        """L_MLM with words that see earlier words only, and L_judge where it is known whether the pairs are changed."""
        cfg, visual = self.cfg, self.visual(*images)[0]
        if cfg.finetune_targets == "every":
            target = caption[:, 1:].masked_fill(caption[:, 1:] == NULL, -1)
            image, text, _ = self.causal(visual, caption[:, :-1], ask_next=True)
        else:
            ids, target = mask_words(caption, self.vocab_size, self.embed.mask, cfg.mask_rate, cfg.mask_rules)
            image, text, _ = self.causal(visual, ids)
        losses = {"caption": word_loss(self.head(text[:, -target.shape[1] :]), target, cfg.reduction)}
        if changed is not None:
            losses["judge"] = judge_loss(self.judge(image.flatten(1)), changed, cfg.reduction)
        return losses

    def causal(
        self, visual: Tensor, ids: Tensor, ask_next: bool = False
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Eq. 5 as in fine-tuning: a word of ids (B, V) sees the images, earlier words and itself; images see images.
        -> the images' [IMG1] and [IMG2] (B, 2, D); text (B, T, D) with [CLS] first; the last layer's query of the text
        (B, T, D) and key of the images (B, S, D). ask_next: V [MASK]s follow, each in the place of the word after one
        of ids. It sees what that one sees and itself, as in decoding."""
        text, count = self.embed.words(ids), ids.shape[1]
        if self.cfg.finetune_cls:
            text = torch.cat([self.embed.special(2, len(ids)), text], 1)
        order = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool, device=ids.device).tril()
        if ask_next:
            masks, own = (
                self.embed.words(torch.full_like(ids, self.embed.mask), 1),
                torch.eye(count, device=ids.device) > 0,
            )
            text = torch.cat([text, masks], 1)
            order = torch.cat([F.pad(order, (0, count)), torch.cat([order[-count:], own], 1)])
        image, past, _ = self.cross(visual, rows=slice(None, None, visual.shape[1] // 2))
        text, _, query = self.cross(text, F.pad(order, (visual.shape[1], 0), value=True)[None, None], past)
        return image, text, (query, past[-1][0])

    def forward(self, before: Tensor, after: Tensor | None, caption: Tensor, task: str, more=None) -> dict[str, Tensor]:
        """The losses of one task ("mlm", "mvcl", "fda", "birds", "finetune") for pairs of features (B, C, H, W) and
        caption (B, V), for birds classes (B, 2); more: fda's negatives (B, 6, V), or whether finetune's pairs are
        changed."""
        images = [x.flatten(2).transpose(1, 2) for x in (before, after) if x is not None]
        return getattr(self, task)(images, caption, *([more] if task in ("fda", "finetune") else []))

    # -- captions

    def encode(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """visual of features (B, C, H, W)."""
        return self.visual(*(x.flatten(2).transpose(1, 2) for x in (before, after)))

    def stepper(self, visual: Tensor):
        """-> step(words (B,), position) -> logits of the next word, which a [MASK] in its place predicts. Keys and
        values of images and earlier words are kept: nothing that comes later changes them."""
        past = self.cross(visual)[1]
        if self.cfg.finetune_cls:
            past = join(past, self.cross(self.embed.special(2, len(visual)), past=past)[1])
        masks = torch.full((len(visual), 1), self.embed.mask, device=visual.device)

        def step(words: Tensor, t: int) -> Tensor:
            nonlocal past
            x = torch.cat([self.embed.words(words[:, None], t), self.embed.words(masks, t + 1)], 1)
            order = torch.ones(2, past[0][0].shape[1] + 2, dtype=torch.bool, device=x.device).tril(past[0][0].shape[1])
            x, new, _ = self.cross(x, order[None, None], past)
            past = join(past, [(k[:, :1], v[:, :1]) for k, v in new])  # the word stays, the [MASK] goes
            return self.head(x[:, 1])

        return step

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor) -> Tensor:
        """Greedy captions of pairs of features (B, C, H, W): ids (B, max_len)."""
        step = self.stepper(self.encode(before, after)[0])
        return decode(step, len(before), self.max_len, before.device)

    @torch.no_grad()
    def attention_map(self, before: Tensor, after: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Where the [MASK]s looked that became the words of ids (B, V): last layer's attention over the cells of both
        images, mean over heads and words -> "before" and "after" (B, H, W), together of sum 1."""
        query, key = self.causal(self.encode(before, after)[0], ids[:, :-1], ask_next=True)[2]
        scores = self.cross.blocks[-1].attention.scores(query[:, 1 - ids.shape[1] :], key)  # (B, K, V - 1, S)
        cells = scores.unflatten(-1, (2, -1))[..., 1:]  # without [IMG1] and [IMG2]
        weight = cells.flatten(-2).softmax(-1).mean(1)  # (B, V - 1, 2 N)
        before, after = mean_of(weight, ids[:, 1:] > END).unflatten(1, (2, *self.grid[1:])).unbind(1)
        return {"before": before, "after": after}


def join(past: list, new: list) -> list:
    """Keys and values of earlier tokens and of new ones, for every layer."""
    return [tuple(torch.cat(two, 1) for two in zip(a, b, strict=True)) for a, b in zip(past, new, strict=True)]


# ---- rewritten captions ----------------------------------------------------------------------------------------------

COUNT = 6  # rewritten captions of a pair
ANIMAL = re.compile(r"\b(animal ?)([12])\b", re.IGNORECASE)  # Birds-to-Words names its two images so
KINDS = {  # [ours] words that give way to their own kind only, synonyms together; other words to words of the same tag
    "size": ["small tiny", "large big"],
    "color": ["gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow"],
    "material": ["rubber matte", "metal metallic shiny"],
    "shape": ["cube block", "sphere ball", "cylinder"],
}
MEANING = {word: (kind, alike) for kind, meanings in KINDS.items() for alike in meanings for word in alike.split()}


class Negatives:
    """Section "FDA": six rewritten captions of every training pair, from train_neg_tfidf6.json beside the features: one
    JSON object a line, as released, so the authors' own is read too. Where there is none it is made, from the captions
    alone. ValueError where it has no entry for a pair."""

    def __init__(self, dataset):
        import data

        self.max_len = dataset.max_len
        self.vocab = data.Vocab(dataset.vocab.words, dataset.vocab.tokenizer, self.max_len - 2)  # longer ones are cut
        path, pairs = dataset.root / "train_neg_tfidf6.json", dataset.pairs("train")
        if not path.exists():
            texts = rewrite(dataset)
            rows = [
                {"img1": p.before, "img2": p.after, "sentences": p.captions, "neg_samples": texts[p.id]} for p in pairs
            ]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        of = {}  # by the stems of both names: the authors' have no suffix
        try:
            for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
                of[Path(row.get("img1") or row["img"]).stem, Path(row.get("img2") or "").stem] = row["neg_samples"]
            self.of = {p.id: of[Path(p.before).stem, Path(p.after or "").stem] for p in pairs}
        except (json.JSONDecodeError, KeyError) as e:
            raise ValueError(f"{path} has no neg_samples for every pair ({e}); remove the file to make it again") from e

    def __call__(self, ids: list[str]) -> Tensor:
        """B pair ids -> their rewritten captions (B, 6, longest caption)."""
        return torch.tensor([[self.vocab.encode(c, self.max_len) for c in self.of[i]] for i in ids])


def rewrite(dataset) -> dict[str, list[str]]:
    """Training pair's id -> its six negatives, two each by Retrieve, Replace and Confuse; all captions of a pair share
    them.

    [ours] Single images (CUB) have no subjects to confuse; where a strategy finds too few, Retrieve and then Replace
    fill up. A scene's changed and unchanged pair share five rewrites of the change; the sixth is a caption of the other
    pair, so that text alone does not tell which of the pairs a set belongs to. What may be true of the pair is left
    out: its own captions, and what says of the same object nothing that they do not say. ValueError where six cannot be
    made."""
    scenes, unchanged = dataset.scenes["train"], dataset.kinds.get("no change", set())
    captions = list(dict.fromkeys(c for s in scenes for p in s.pairs for c in p.captions))
    changes = list(dict.fromkeys(c for s in scenes for p in s.pairs if p.id not in unchanged for c in p.captions))
    tokens, words, subjects = parts(dataset, captions)
    idf = inverse_frequency(captions)
    pool = pools([words[c] for c in changes], idf)
    others = sorted({s for c in changes for s in subjects[c]})
    nearest = retrieve([" ".join(s.pairs[0].captions) for s in scenes], changes, idf)
    negatives = {}
    for number, (scene, near) in enumerate(zip(scenes, nearest, strict=True)):
        rng, pair, chosen = np.random.default_rng([len(captions), number]), scene.pairs[0], []
        own = {c for pairs in (scene.pairs, scene.swapped or ()) for p in pairs for c in p.captions}
        mentioned = set().union(*map(named, pair.captions))
        originals = rng.permutation(pair.captions * COUNT).tolist()
        retrieved = (changes[i] for i in near)
        replaced = (replace_words(tokens[c], important(words[c], idf), pool, rng) for c in originals)
        confused = (confuse(c, subjects[c], others, rng) for c in originals)
        count = COUNT + 1 - len(scene.pairs)  # the caption of the scene's other pair comes on top
        ends = (3, 6, 6) if pair.after is None else (count - 4, count - 2, count)
        for source, end in zip(
            (retrieved, replaced, confused, retrieved, replaced), (*ends, count, count), strict=True
        ):
            for text in source:
                if len(chosen) >= end:
                    break
                if text not in own and text not in chosen and (not mentioned or named(text) - mentioned):
                    chosen.append(text)
        if len(chosen) < count:
            raise ValueError(f"only {len(chosen)} rewritten captions can be made for {pair.id}, expected {count}: "
                             f"{dataset.root} has too few different captions; set --fda 0")  # fmt: skip
        for p, other in zip(scene.pairs, scene.pairs[::-1], strict=True):
            negatives[p.id] = chosen if p is other else [*chosen, str(rng.choice(other.captions))]
    return negatives


def named(text: str) -> set:
    """What a caption says of the first object that it names by KINDS; an empty set where it names none."""
    properties = set()
    for word in text.lower().split():
        if word in MEANING:
            properties.add(MEANING[word])
        if word in ("thing", "object") or MEANING.get(word, "")[:1] == ("shape",):
            return properties
    return set()


def inverse_frequency(texts: list[str]) -> dict[str, float]:
    """[ours] Smoothed idf of every word: ln((1 + n) / (1 + df)) + 1."""
    df = Counter(word for text in texts for word in set(text.lower().split()))
    return {word: math.log((1 + len(texts)) / (1 + n)) + 1 for word, n in sorted(df.items())}


def tfidf(texts: list[str], idf: dict[str, float]) -> Tensor:
    """TF-IDF, rows of length 1. -> sparse (n, words)."""
    column, places, values = {word: j for j, word in enumerate(idf)}, [], []
    for i, text in enumerate(texts):
        weights = {word: n * idf[word] for word, n in Counter(text.lower().split()).items()}
        places += [(i, column[word]) for word in weights]
        values += [weight / math.hypot(*weights.values()) for weight in weights.values()]
    return torch.sparse_coo_tensor(torch.tensor(places).T, values, (len(texts), len(idf)), check_invariants=True)


def retrieve(queries: list[str], texts: list[str], idf: dict[str, float], count: int = 1000) -> Iterator[list[int]]:
    """Section "Retrieve": for each query the indices of the `count` texts that are most like it, best first."""
    corpus = tfidf(texts, idf)
    for i in tqdm(range(0, len(queries), 64), "rewriting captions", disable=None):
        block = tfidf(queries[i : i + 64], idf).to_dense()
        yield from (corpus @ block.T).T.topk(min(count, len(texts))).indices.tolist()  # (64, count)


def parts(dataset, texts: list[str]) -> tuple[dict, dict, dict]:
    """By text: its tokens, each with the blanks that follow; its nouns and adjectives as (index, word, kind of KINDS or
    else tag); its subjects. CLEVR's pipeline of known words has no tags: there only words of KINDS are rewritten."""
    import data

    tokens, words, subjects = {}, {}, {}
    docs = data.language(dataset.name).pipe(texts, batch_size=1000)
    for text, doc in zip(texts, tqdm(docs, "parts of speech", len(texts), unit="caption", disable=None), strict=True):
        tokens[text], subjects[text] = [t.text_with_ws for t in doc], data.subjects(doc)
        kinds = [(t.i, t.lower_, MEANING.get(t.lower_, [t.tag_])[0]) for t in doc if t.pos_ in ("NOUN", "ADJ")]
        words[text] = [word for word in kinds if word[2]]
    return tokens, words, subjects


def important(words: list[tuple[int, str, str]], idf: dict[str, float]) -> list[tuple[int, str, str]]:
    """The upper half (rounded up) of a caption's nouns and adjectives by TF-IDF."""
    count = Counter(word for _, word, _ in words)
    return sorted(words, key=lambda w: -count[w[1]] * idf.get(w[1], 1.0))[: (len(words) + 1) // 2]


def pools(captions: list[list[tuple[int, str, str]]], idf: dict[str, float]) -> dict[str, list[str]]:
    """Appendix A.2: for each kind or tag the words that are important in some caption and stand in ten captions at
    least."""
    count = Counter(key for words in captions for key in {(kind, word) for _, word, kind in words})
    pool: dict[str, list[str]] = {}
    for kind, word in sorted({(kind, word) for words in captions for _, word, kind in important(words, idf)}):
        if count[kind, word] >= 10:
            pool.setdefault(kind, []).append(word)
    return pool


def replace_words(tokens: list[str], words: list, pool: dict[str, list[str]], rng: np.random.Generator) -> str:
    """Section "Replace": the important words give way to others of the same kind or tag, where there are any."""
    tokens = [*tokens]
    for i, word, kind in words:
        others = [w for w in pool.get(kind, ()) if MEANING.get(w, w) != MEANING.get(word, word)]
        if others:
            tokens[i] = tokens[i].replace(tokens[i].strip(), others[rng.integers(len(others))])
    return "".join(tokens)


def confuse(text: str, own: list[str], others: list[str], rng: np.random.Generator) -> str:
    """Section "Confuse": "animal 1" and "animal 2" change places; without these, the subject gives way to another
    caption's of as many words, where there is one. own: the text's subjects, others: all captions'."""
    if len({number for _, number in ANIMAL.findall(text)}) == 2:
        return ANIMAL.sub(lambda m: m[1] + "21"[int(m[2]) - 1], text)
    subject = next((s for s in own if s in text.lower()), "")
    alike = [s for s in others if s != subject and s.count(" ") == subject.count(" ")]
    if not (subject and alike):
        return text
    at = text.lower().index(subject)
    return text[:at] + alike[rng.integers(len(alike))] + text[at + len(subject) :]


# ---- cross-task data -------------------------------------------------------------------------------------------------


def open_dataset(cfg: Config):
    """The data set of a run; with CUB its words are those of both."""
    import data

    dataset = data.open_dataset(cfg)
    if cfg.cub:
        words = {*dataset.vocab.words, *data.read_json(Path(cfg.cub) / "vocab.json")} - {*data.SPECIAL}
        dataset.vocab = data.Vocab(data.SPECIAL + sorted(words), dataset.vocab.tokenizer, dataset.vocab.max_words)
    if not cfg.swap:
        dataset.scenes["train"] = [dataclasses.replace(scene, swapped=None) for scene in dataset.scenes["train"]]
    return dataset


def open_cub(cfg: Config, dataset):
    """Section 2.4, general image captioning: single images with captions, in the words of `dataset`."""
    import data

    cub = data.load("cub", cfg.cub, cfg.features, cfg.device)
    if cub.grid != dataset.grid:
        raise ValueError(f"features of {cub.root} are of shape {cub.grid}, those of {dataset.root} {dataset.grid}")
    cub.vocab = data.Vocab(dataset.vocab.words, cub.vocab.tokenizer, cub.vocab.max_words)
    return cub


class Birds:
    """Section 2.4, fine-grained classification: pairs of NABirds' images, as many as there are images (48,562)."""

    def __init__(self, cfg: Config):
        import data

        dataset = data.load("nabirds", cfg.nabirds, cfg.features, cfg.device)
        images = [p for split in dataset.scenes for p in dataset.pairs(split)]
        self.names, self.features = [p.before for p in images], dataset.features
        self.classes = np.array([dataset.vocab.index[p.captions[0]] - len(data.SPECIAL) for p in images])
        self.partners, self.size, self.seed = partners(self.classes, cfg.seed), cfg.pretrain_batch, cfg.seed

    def batch(self, step: int):
        """Pairs drawn by (seed, step); in the place of captions are the classes (B, 2)."""
        import data

        first = np.random.default_rng([self.seed, step, 1]).integers(len(self.names), size=self.size)
        pair = np.stack([first, self.partners[first]])  # (2, B)
        before, after = (self.features.rows([self.names[i] for i in images]) for images in pair)
        return data.Batch(before, after, torch.from_numpy(self.classes[pair.T]), [], [])


def partners(classes: np.ndarray, seed: int) -> np.ndarray:
    """For every image the index of another: for half of them, drawn by the seed, one of the same class (where there is
    one), for the others one of another class."""
    rng, places = np.random.default_rng(seed), np.arange(len(classes))
    alike, partner = rng.permutation(len(classes)) < len(classes) // 2, []
    for i, c in enumerate(classes):
        same = (classes == c) & (places != i)
        fit = same if alike[i] and same.any() else classes != c
        partner.append(rng.choice(places[fit]))
    return np.array(partner)


# ---- training --------------------------------------------------------------------------------------------------------


def plan(cfg: Config) -> list[tuple[str, int, int]]:
    """The stages of a run, each with its first step and the one after its last."""
    stages = [("cub", cfg.pretrain_steps)] if cfg.cub else []
    stages += [("pretrain", cfg.pretrain_steps), ("finetune", cfg.steps)]
    ends = [sum(steps for _, steps in stages[: i + 1]) for i in range(len(stages))]
    return [(name, end - steps, end) for (name, steps), end in zip(stages, ends, strict=True) if steps]


def task_of(cfg: Config, stage: str, step: int) -> str:
    """The task of a step, in pre-training drawn by the shares of them; a function of (seed, step) alone."""
    if stage == "finetune":
        return stage
    tasks = ["mlm"] * cfg.mlm + ["mvcl"] * cfg.mvcl + ["fda"] * cfg.fda
    tasks += ["birds"] * 3 if cfg.nabirds and stage == "pretrain" else []  # a fifth of 9 + 1 + 2 + 3, appendix A.3
    return tasks[np.random.default_rng([cfg.seed, step]).integers(len(tasks))]


def pretrain_rate(cfg: Config, step: int) -> float:
    """Learning rate of a step (counted from 0) of pre-training."""
    warm = max(1, cfg.pretrain_warmup)
    decay = (warm / (step + 1)) ** 0.5 if cfg.pretrain_decay == "inverse_sqrt" else 1.0
    return cfg.pretrain_lr * min((step + 1) / warm, 1.0, decay)


def finetune_rate(cfg: Config, step: int) -> float:
    """Learning rate of a step (counted from 0) of fine-tuning."""
    halves = min(step // 10000, 2) if cfg.finetune_decay == "halves" else 0
    return learning_rate(cfg, step) / 2**halves


def losses_of(model: IDC, batches: tuple, cfg: Config, task: str, negatives=None) -> dict[str, Tensor]:
    """The losses of one step, each a mean over the batches (changed pairs, distractor pairs), and their total. The
    batches stay apart: a scene's default image is "before" in both, so its cells would be false negatives in MVCL."""
    losses: dict[str, Tensor] = {}
    for n, batch in enumerate(batches):
        batch = batch.to(cfg.device)
        more = n == 0 if len(batches) == 2 else None  # are the pairs changed? unknown where there is one stream
        if task == "fda":  # a seventh of the pairs, each with its caption and six others
            more = negatives(batch.pair_ids[: max(1, len(batch.pair_ids) // 7)]).to(cfg.device, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.device.startswith("cuda")):
            of_batch = model(batch.before, None if batch.single else batch.after, batch.caption, task, more)
        losses = {name: losses.get(name, 0) + loss / len(batches) for name, loss in of_batch.items()}
    if task == "finetune":
        losses["total"] = losses["caption"] + cfg.w_judge * losses.get("judge", 0)
    elif task == "birds":
        losses["total"] = losses["class"] + losses["contrast"] + losses["match"]
    else:
        losses["total"] = losses[task]
    return losses


def train(cfg: Config, dataset, resume: bool = False) -> IDC:
    """Pre-train, then fine-tune on a data set (data.Dataset) into cfg.out_dir -> the best model by validation.

    The weights at the end of pre-training stay in pretrained.pt, for other runs' --init. Stopped by Ctrl-C or SIGTERM
    it saves last.pt and exits 130 or 143; with `resume` it goes on from there as if nothing had happened.
    FloatingPointError where a loss is not finite."""
    sources = {stage: open_cub(cfg, dataset) if stage == "cub" else dataset for stage, _, _ in plan(cfg)}
    negatives = {stage: Negatives(of) for stage, of in sources.items() if cfg.fda and stage != "finetune"}
    birds = Birds(cfg) if cfg.nabirds and cfg.pretrain_steps else None
    torch.manual_seed(cfg.seed)
    model = IDC(cfg, len(dataset.vocab), dataset.grid, max(of.max_len for of in sources.values())).to(cfg.device)
    model.max_len = dataset.max_len
    if cfg.init and not resume:
        other, state = load_model(IDC, cfg, cfg.init)
        dataset.check_state(state)
        model.load_state_dict(other.state_dict())
    torch._dynamo.config.cache_size_limit = 64  # graphs, one a task and stream: the default of 8 is too few
    with Run(cfg, resume, model, None, dataset) as run:
        for stage, first, last in plan(cfg):
            if run.step >= last or 0 < cfg.patience <= run.worse:
                continue
            finetune = stage == "finetune"
            decay, rate = (cfg.weight_decay, finetune_rate) if finetune else (0.0, pretrain_rate)
            run.optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, weight_decay=decay, fused=True)
            validate = (lambda: evaluate(model, dataset, "val", cfg)) if finetune else None
            batch_size = cfg.batch_size if finetune else cfg.pretrain_batch
            for batches in run.steps(sources[stage], batch_size, first, last, rate, stage):
                task = task_of(cfg, stage, run.step)
                batches = (birds.batch(run.step),) if task == "birds" else batches
                losses = losses_of(model, batches, cfg, task, negatives.get(stage))
                run.optimizer.zero_grad()
                losses["total"].backward()
                if cfg.grad_clip:
                    nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
                run.optimizer.step()
                if stage == "pretrain" and run.step + 1 == last:
                    run.save("pretrained.pt")
                run.end_step(losses, validate)
                if 0 < cfg.patience <= run.worse:
                    break
    return run.best_model()


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(model: IDC, dataset, split: str, cfg: Config, out_dir: Path | None = None) -> dict[str, float]:
    """Caption a split of a data set (data.Dataset) -> the scores of all its pairs together.

    Without out_dir (validation while training) only the quick metrics; with it every metric and every group of pairs,
    printed and written beside captions and sample pictures."""
    model.eval()
    captions, maps = {}, {}  # by pair id
    for batch in dataset.eval_batches(split, cfg.eval_batch):
        batch = batch.to(cfg.device)
        ids = model.generate(batch.before, batch.after)
        captions |= zip(batch.pair_ids, dataset.vocab.decode(ids), strict=True)
        if out_dir:
            seen = model.attention_map(batch.before, batch.after, ids)
            maps |= {i: {name: m[b] for name, m in seen.items()} for b, i in enumerate(batch.pair_ids)}
    model.train()
    return dataset.results(split, captions, maps, out_dir)


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption two image files."""
    import data

    cfg, args = parse_args(Config, PRESETS, Path(__file__).stem, __doc__, argv, RELEASED)
    if args.caption:
        data.caption_files(*load_model(IDC, cfg, args.checkpoint), args.caption, args.out)
        return
    dataset = open_dataset(cfg)
    if args.eval is None:
        model = train(cfg, dataset, args.resume)
    else:
        model, state = load_model(IDC, cfg, args.eval)
        dataset.check_state(state)
    evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir))


if __name__ == "__main__":
    run_main(main)
