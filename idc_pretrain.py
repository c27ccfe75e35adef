"""IDC pre-training and fine-tuning: Image Difference Captioning with Pre-training and Contrastive Learning
(Yao, Wang, Jin, AAAI 2022).

Idea. (1) Two images and a caption are one sequence of tokens for one transformer. Before that, one encoder sees each
image alone and another compares both. (2) Three tasks pre-train the model on the training pairs: guess masked words
(MLM), recognise masked image cells among all others (MVCL), tell the caption from six rewritten ones (FDA).
(3) Fine-tuning keeps the first task, but lets a word see only earlier words, so that captions can be written word by
word, each in the place of a [MASK]. On data sets with distractor pairs the model also learns to recognise these.

Our copy of the paper has lost equations (1)-(9) and kept their prose, so here their numbers stand for:
Eq. 1-3    Embedding           y = Dropout(LN(x + type + position))
Eq. 4      IDC.visual          E_p([E_s(v_1) ; E_s(v_2)]), the image difference encoder
Eq. 5      IDC.cross           cross-modal transformer over [visual ; text]
Eq. 6      word_loss           MLM, on words masked by mask_words
Eq. 7-8    cell_loss           MVCL, on cells masked by mask_cells
Eq. 9      align_loss          FDA, on captions rewritten by Negatives: Retrieve, Replace, Confuse
Sec. 2.4   class_loss, contrast_loss, same_class_loss: bird classes train the image difference encoder
Sec. 3.1   judge_loss          is the pair a distractor?
           total_loss          pre-training: one task a step; fine-tuning: L = L_MLM + w_judge L_judge

Row of the paper's tables                      flags
Tables 2, 3  CLEVR-Change                      --dataset clevr_change
Table 4      all rows                          --dataset clevr_change, and
             1 no pre-training                 --pretrain_steps 0
             2 MLM, 3 MLM + MVCL, 4 all three  --mvcl 0 --fda 0; --fda 0; (none)
             5 no difference encoder           --no-difference_encoder
             6 no distractor judging           --w_judge 0
Tables 1, 5  Birds-to-Words; + CUB; + NABirds  --dataset birds_to_words; --cub FOLDER; --nabirds FOLDER

Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, K heads, V words of a caption (START, words, END,
padding), T text tokens, S = 2 (N + 1) visual tokens: [IMG1] v_1 ... v_N [IMG2] v_1 ... v_N.

If the paper is silent, we follow the released code; if both are silent, the choice is marked [ours]. If they differ,
RELEASED below has a config field for it, and --reading released sets all of these. Both readings
- follow the release: no positions for [CLS] and [IMG], words times sqrt(D), no LayerNorm after the last block;
- hide the text from the images in fine-tuning, as released; the paper does not, but then a word would learn about later
  words through the images;
- use PyTorch's LayerNorm (the release divides by the unbiased deviation plus an epsilon);
- pad captions to the longest one of their kind of pair, and for FDA of the data set (released: to 40 or 80 ids);
- average the losses of two batches, changed pairs and distractors (released: one mixed batch);
- pass CUB's [IMG2] through E_s (released: straight to E_p);
- have no outputs for [MASK] and [CLS], never write UNK, and end a caption at NULL too (the release writes any id, up to
  END).

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

from common import (
    END,
    NULL,
    UNK,
    Attention,
    Run,
    RunConfig,
    decode,
    file_errors,
    initialise,
    learning_rate,
    load_model,
    mean_of,
    parse_args,
    progress,
    run_main,
    saved_config,
    sinusoid,
    upcast,
    usable_device,
)

# ---- config ----------------------------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """IDC. common.RunConfig has the fields of a run; its steps, lr, warmup and batch_size are those of fine-tuning."""

    RANGES = RunConfig.RANGES | {
        "pretrain_steps": (0, 10**8), "pretrain_warmup": (0, 10**8), "cub_batch": (0, 10**8),
        "mlm": (0, 1000), "mvcl": (0, 1000), "fda": (0, 1000), "mask_rate": (0.01, 1), "cell_mask_rate": (0.01, 1),
        "tau_mvcl": (0.001, 1000), "tau_fda": (0.001, 1000), "dropout": (0, 0.99),
    }  # fmt: skip

    init: str = ""  # checkpoint to start from, such as another run's pretrained.pt
    dim: int = 512  # width D
    ffn: int = 2048  # width of the feed-forward layers
    heads: int = 8  # heads of every attention
    layers: int = 3  # layers of the cross-modal transformer
    dropout: float = 0.2  # dropout probability
    difference_encoder: bool = True  # E_s and E_p of Eq. 4; without them images go straight to the cross transformer
    pretrain_steps: int = 250000  # steps of pre-training; 0: none
    pretrain_batch: int = 100  # scenes a step of pre-training
    pretrain_lr: float = 1e-4  # learning rate of pre-training
    pretrain_warmup: int = 8000  # steps of linear warm-up in pre-training
    mlm: int = 8  # share of masked language modelling in the steps of pre-training; 0 leaves it out
    mvcl: int = 1  # share of masked visual contrastive learning
    fda: int = 2  # share of fine-grained difference aligning
    cub: str = ""  # CUB's folder: pre-train on its single images and captions first
    cub_batch: int = 0  # single images a step of that stage; 0: pretrain_batch
    nabirds: str = ""  # NABirds' folder: its bird classes are a fourth task of pre-training, with share 3
    mask_rate: float = 0.15  # share of words masked in MLM, and in fine-tuning if finetune_targets is masked
    cell_mask_rate: float = 0.15  # share of one image's cells that MVCL masks
    tau_mvcl: float = 1.0  # temperature of MVCL
    tau_fda: float = 1.0  # temperature of FDA
    weight_decay: float = 0.0  # weight decay of fine-tuning
    w_judge: float = 1.0  # weight of L_judge in fine-tuning; unused on data sets without distractor pairs
    # paper | released code
    swap: bool = True  # [ours] half of the scenes swap default and distractor image, as in the other methods
    finetune_targets: Literal["every", "masked"] = "every"  # [ours] a [MASK] for each word; or masked words only
    start: Literal["xavier", "pytorch"] = "xavier"  # initial weights: [ours] Xavier-uniform, or PyTorch's
    project: Literal["linear", "sigmoid"] = "linear"  # features -> width D: linear, or a sigmoid after it
    exponent: Literal["standard", "doubled"] = "standard"  # in the sinusoid's rates; doubled: most channels hardly vary
    special_tokens: Literal["own", "shared"] = "own"  # [CLS] [IMG1] [IMG2] and three types, or one vector and six types
    mvcl_negatives: Literal["features", "predictions"] = "features"  # unmasked cells: features, or predictions
    see_padding: bool = False  # pre-training attends to padding
    finetune_cls: bool = True  # [CLS] stands before the text in fine-tuning too
    mask_rules: Literal["plain", "released"] = "plain"  # see mask_words: END, UNK, captions without a masked word
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


# Table 6 and section "Implementation Details"; fine-tuning's steps, eval_every and patience are the release's. The
# paper's batches count pairs, ours scenes (CLEVR-Change: two pairs each).
PRESETS = {
    "clevr_change": dict(seed=1234, extractor="resnet101-layer4", lr=3e-5, batch_size=100, steps=100000, eval_every=400,
                         patience=50),
    "birds_to_words": dict(seed=1234, layers=2, mlm=9, pretrain_steps=50000, pretrain_warmup=4000, pretrain_batch=200,
                           lr=3e-5, weight_decay=1e-4, batch_size=32, steps=20000, eval_every=85, patience=80,
                           select_by="ROUGE-L"),
    # Your own pairs are few: no pre-training; validation says when to stop [ours].
    "pairs": dict(pretrain_steps=0, dim=256, ffn=1024, layers=2, batch_size=16, lr=5e-4, warmup=50, steps=2000,
                  eval_every=100, patience=10),
    # [ours] MVCL alone: MLM can be learned without the images. Any two cells' features have cosines near 1, hence the
    # low temperature. Unless most cells are masked, a cell can be guessed from its neighbours.
    "mini": dict(dim=128, ffn=256, heads=4, layers=2, dropout=0.0, pretrain_steps=1200, pretrain_batch=16,
                 pretrain_lr=1e-3, pretrain_warmup=50, mlm=0, fda=0, cell_mask_rate=0.7, tau_mvcl=0.02, tau_fda=0.1,
                 batch_size=16, lr=5e-4, schedule="cosine", warmup=100, grad_clip=1.0, steps=3000, eval_every=1000,
                 eval_batch=250),
}  # fmt: skip

# --reading released: the released code's side of every disputed detail. CLEVR-Change keeps the paper's steps and rates.
RELEASED = {
    "all": dict(swap=False, finetune_targets="masked", start="pytorch", project="sigmoid", exponent="doubled",
                special_tokens="shared", mvcl_negatives="predictions", see_padding=True, finetune_cls=False,
                mask_rules="released", pretrain_decay="inverse_sqrt", finetune_decay="halves", reduction="sum"),
    "birds_to_words": dict(pretrain_steps=60000, pretrain_batch=150, cub_batch=350),
}  # fmt: skip

BIRDS = 555  # NABirds' classes
REWRITES = 6  # rewritten captions of a pair

# ---- modules ---------------------------------------------------------------------------------------------------------


def doubled_sinusoid(length: int, dim: int) -> Tensor:
    """The released positions: rate 10000^(-2i/D) in channel i, so that the sine and cosine of a pair differ in rate.
    Most channels hardly vary. -> (length, dim)."""
    angle = torch.arange(length)[:, None] / 10000 ** (2 * torch.arange(dim) / dim)
    return torch.where(torch.arange(dim) % 2 == 0, angle.sin(), angle.cos())


class Embedding(nn.Module):
    """Eq. 1-3: y = Dropout(LN(x + type + position)) for words, cells, and special tokens, which have no position. All
    of them share one LayerNorm and one table of types."""

    def __init__(self, cfg: Config, vocab_size: int, channels: int, length: int):
        super().__init__()
        self.own = cfg.special_tokens == "own"
        self.mask = vocab_size  # id of [MASK]; the special tokens follow
        self.table = nn.Embedding(vocab_size + (4 if self.own else 2), cfg.dim)
        # Image 1, image 2, text; released: three for the special tokens, then these three.
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
        """(B, N, C) of the first or second image (kind 0, 1) -> [IMG] and cells (B, 1 + N, D)."""
        x = self.project(features)
        x = x.sigmoid() if self.squash else x
        x = self.dropout(self.norm(x + self.types.weight[kind - 3] + self.position[: x.shape[1]]))
        return torch.cat([self.special(kind, len(x)), x], 1)


class Block(nn.Module):
    """Pre-norm layer: x + MHA(LN x), then x + W2 ReLU(W1 LN x). x (B, T, D) -> the new x at the tokens `rows`; key and
    value of x; query at `rows`. past: key and value of tokens before x. mask: bool (B or 1, 1, T or 1, past + T)."""

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
    """LayerNorm, then blocks; heads read the residual stream as it is, as released. `past` and the returned keys and
    values are lists with an item for each block. `rows` and the query belong to the last block."""

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


def mask_words(caption: Tensor, words: int, rate: float, rules: str) -> tuple[Tensor, Tensor]:
    """Section "MLM": `rate` of the words are targets; of these, 80 % become [MASK], 10 % a random word, 10 % stay.
    caption (B, V), `words` ids in the vocabulary -> ids with masks; targets, NULL elsewhere.

    END is masked like any word: the model has to learn where a caption ends. UNK is not. The released rules replace END
    by [MASK] only, mask UNK too, make the first word a [MASK] if none was drawn, and draw random words from all ids."""
    released = rules == "released"
    is_word = (caption > END) | (caption == (UNK if released else END))
    chosen = is_word & (torch.rand(caption.shape, device=caption.device) < rate)
    kind = torch.rand(caption.shape, device=caption.device)
    if released:
        none = ~chosen.any(1)
        chosen[:, 1] |= none
        kind[:, 1] = kind[:, 1].masked_fill(none, 0)
    low, high = (NULL, words + 2) if released else (END + 1, words)
    other = torch.randint(low, high, caption.shape, device=caption.device)
    mask = words  # the id after all words; then comes [CLS]
    ids = torch.where(chosen & (kind < 0.8), mask, torch.where(chosen & (kind < 0.9), other, caption))
    if released:
        end = (caption == END) & (torch.rand(caption.shape, device=caption.device) < rate)
        ids, chosen = ids.masked_fill(end, mask), chosen | end
    return ids, caption.masked_fill(~chosen, NULL)


def mask_cells(pairs: int, images: int, cells: int, rate: float, device: str) -> Tensor:
    """Section "MVCL": `rate` of the cells of one image of each pair, at least one. -> bool (B, images, N)."""
    draw = torch.rand(pairs, cells, device=device)
    chosen = (draw < rate) | (draw == draw.min(1, keepdim=True).values)
    image = torch.randint(images, (pairs, 1), device=device) == torch.arange(images, device=device)  # (B, images)
    return chosen[:, None] & image[..., None]


# ---- losses ----------------------------------------------------------------------------------------------------------


def word_loss(logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Eq. 6: cross-entropy of masked words. logits (..., vocabulary), target (...) with NULL at all other words."""
    total = F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=NULL, reduction="sum")
    return total / (target != NULL).sum().clamp(min=1) if reduction == "mean" else total


def cell_loss(predicted: Tensor, features: Tensor, masked: Tensor, rows: int, tau: float, negatives: str) -> Tensor:
    """Eq. 8: InfoNCE of masked cells by cosine. predicted, features (M, C) of all cells, masked (M,) bool; rows: a
    fixed number, at least that of the masked cells, so that shapes do not depend on the draw. negatives: the "features"
    of all unmasked cells; released: their "predictions", and the features of the other masked cells."""
    p, f = F.normalize(predicted, dim=-1), F.normalize(features, dim=-1)
    weight, row = masked.to(p.dtype).topk(rows)  # the masked cells come first; the rest have no weight
    released = negatives == "predictions"
    s = p[row] @ (torch.where(masked[:, None], f, p) if released else f).T / tau  # (rows, M)
    if not released:
        s = s.masked_fill(masked & (row[:, None] != torch.arange(len(masked), device=row.device)), float("-inf"))
    return (F.cross_entropy(s, row, reduction="none") * weight).sum() / weight.sum()


def align_loss(image: Tensor, text: Tensor, tau: float) -> Tensor:
    """Eq. 9: InfoNCE by cosine of the caption (first) against its six rewrites. image (mean of [IMG1] and [IMG2]) and
    text ([CLS]) are (B, 7, D), each of the seven from the sequence with that caption."""
    s = F.cosine_similarity(image, text, dim=-1) / tau
    return F.cross_entropy(s, torch.zeros(len(s), dtype=torch.long, device=s.device))


def judge_loss(logits: Tensor, changed: bool, reduction: str = "mean") -> Tensor:
    """Section 3.1: are these pairs changed (1) or distractors (0)? logits (B, 2)."""
    target = torch.full((len(logits),), int(changed), device=logits.device)
    return F.cross_entropy(logits, target, reduction=reduction)


def class_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Section 2.4: cross-entropy of every single image's class. logits (2B, classes), classes (2B,)."""
    return F.cross_entropy(logits, classes)


def contrast_loss(x: Tensor, classes: Tensor, margin: float = 0.4) -> Tensor:
    """Section 2.4, TransFG's (He et al. 2021): pulls cosines to 1 within a class, and below the margin between
    classes; a mean over all ordered pairs, including an image with itself. x (2B, D), classes (2B,)."""
    with torch.autocast(x.device.type, enabled=False):  # bfloat16 has three digits
        x = F.normalize(upcast(x), dim=-1)
        cos, alike = x @ x.T, classes[:, None] == classes
        return torch.where(alike, 1 - cos, (cos - margin).clamp(min=0)).mean()


def same_class_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Section 2.4: are both images of one class (1) or not (0)? logits (B, 2), classes (B, 2)."""
    return F.cross_entropy(logits, (classes[:, 0] == classes[:, 1]).long())


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Fine-tuning: L = L_MLM + w_judge L_judge (section 3.1). Pre-training: the sum of one task's losses."""
    return sum(cfg.w_judge * loss if name == "judge" else loss for name, loss in losses.items())


# ---- method ----------------------------------------------------------------------------------------------------------


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
            self.classify, self.same_class = nn.Linear(cfg.dim, BIRDS), nn.Linear(2 * cfg.dim, 2)
        if cfg.start == "xavier":
            initialise(self, xavier=True)

    def forward(self, before: Tensor, after: Tensor | None, caption: Tensor, task: str = "finetune",
                changed: bool | None = None, negatives: Tensor | None = None) -> dict[str, Tensor]:  # fmt: skip
        """The losses of one task: "finetune", or in pre-training "mlm", "mvcl", "fda", "birds". Features (B, C, H, W),
        after None for single images; caption (B, V), for birds the classes (B, 2).

        changed, for finetune: are the pairs changed, or distractors? None: not known, so not judged.
        negatives, for fda: rewritten captions (B', 6, V or more) of the first B' pairs; this task drops the rest."""
        images = [x.flatten(2).transpose(1, 2) for x in (before, after) if x is not None]
        if task == "finetune":
            return self.finetune(images, caption, changed)
        if task == "fda":
            if negatives is None:
                raise ValueError("task fda needs negatives: rewritten captions of the pairs, ids (B, 6, V)")
            return self.fda(images, caption, negatives)
        if task not in ("mlm", "mvcl", "birds"):
            raise ValueError(f"task {task}: expected finetune, mlm, mvcl, fda or birds")
        if task == "birds" and not self.cfg.nabirds:
            raise ValueError("task birds needs a model with --nabirds")
        return getattr(self, task)(images, caption)

    # -- the sequence

    def visual(self, *images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 4. Cells (B, N, C) of both images, or of one -> E_p's tokens (B, S, D); which of them are real, bool
        (1, S): of a missing image only [IMG2]; E_s's [IMG1] and [IMG2] (2, B, D)."""
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
        """Eq. 5 as in pre-training: every token sees all others but padding. ids (B, V) -> visual (B, S, D); text
        (B, 1 + V, D) with [CLS] first."""
        text = torch.cat([self.embed.special(2, len(ids)), self.embed.words(ids)], 1)
        real = F.pad((ids != NULL) | self.cfg.see_padding, (1, 0), value=True)
        mask = torch.cat([there.expand(len(ids), -1), real], 1)
        x = self.cross(torch.cat([visual, text], 1), mask[:, None, None])[0]
        return x[:, : visual.shape[1]], x[:, visual.shape[1] :]

    def causal(self, visual: Tensor, ids: Tensor, ask_next: bool = False) -> tuple[Tensor, Tensor, tuple]:
        """Eq. 5 in fine-tuning: a word of ids (B, V) sees the images, earlier words and itself; images see only images.
        ask_next: V [MASK]s follow, one for each word of ids, at the position after it. As in decoding, a [MASK] sees
        itself and what that word sees. -> [IMG1] and [IMG2] (B, 2, D); text (B, T, D), with [CLS] first if it has one;
        the last layer's query of the text (B, T, D) and key of the images (B, S, D)."""
        text, count = self.embed.words(ids), ids.shape[1]
        if self.cfg.finetune_cls:
            text = torch.cat([self.embed.special(2, len(ids)), text], 1)
        order = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool, device=ids.device).tril()
        if ask_next:
            text = torch.cat([text, self.embed.words(torch.full_like(ids, self.embed.mask), 1)], 1)
            itself = torch.eye(count, dtype=torch.bool, device=ids.device)
            order = torch.cat([F.pad(order, (0, count)), torch.cat([order[-count:], itself], 1)])
        image, past, _ = self.cross(visual, rows=slice(None, None, visual.shape[1] // 2))
        text, _, query = self.cross(text, F.pad(order, (visual.shape[1], 0), value=True)[None, None], past)
        return image, text, (query, past[-1][0])

    # -- pre-training

    def mlm(self, images: list[Tensor], caption: Tensor) -> dict[str, Tensor]:
        """Eq. 6. images: cells (B, N, C) of both, or of one; caption (B, V)."""
        ids, target = mask_words(caption, self.vocab_size, self.cfg.mask_rate, self.cfg.mask_rules)
        _, text = self.joint(*self.visual(*images)[:2], ids)
        return {"mlm": word_loss(self.head(text[:, 1:]), target)}

    def mvcl(self, images: list[Tensor], caption: Tensor) -> dict[str, Tensor]:
        """Eq. 7-8: masked cells of one image of each pair, recognised from the rest and the caption. Inputs: as mlm."""
        cfg, features = self.cfg, torch.stack(images, 1)  # (B, 1 or 2, N, C)
        masked = mask_cells(*features.shape[:3], cfg.cell_mask_rate, features.device)
        shown = features.masked_fill(masked[..., None], 0).unbind(1)
        visual, _ = self.joint(*self.visual(*shown)[:2], caption)
        cells = visual.unflatten(1, (2, -1))[:, : len(images), 1:]  # (B, 1 or 2, N, D), without [IMG1] and [IMG2]
        # The projection's weights, transposed, map back to features.
        predicted = (self.cell_head(cells) @ self.embed.project.weight + self.cell_bias).to(features.dtype)
        inputs = predicted.flatten(0, 2), features.flatten(0, 2), masked.flatten()
        rows = math.ceil(2 * cfg.cell_mask_rate * cells.shape[2] + 1) * len(caption)  # twice what is expected
        with torch.autocast(features.device.type, enabled=False):
            return {"mvcl": cell_loss(*inputs, min(rows, masked.numel()), cfg.tau_mvcl, cfg.mvcl_negatives)}

    def fda(self, images: list[Tensor], caption: Tensor, negatives: Tensor) -> dict[str, Tensor]:
        """Eq. 9. negatives (B', 6, V or more): rewritten captions of the first B' pairs. Other inputs: as mlm."""
        caption = F.pad(caption[: len(negatives)], (0, negatives.shape[2] - caption.shape[1]), value=NULL)
        visual, there, _ = self.visual(*(x[: len(negatives)] for x in images))
        ids = torch.cat([caption[:, None], negatives], 1)  # (B', 7, V)
        image, text = self.joint(visual.repeat_interleave(ids.shape[1], 0), there, ids.flatten(0, 1))
        image = (image[:, 0] + image[:, image.shape[1] // 2]) / 2
        image, text = (x.unflatten(0, ids.shape[:2]) for x in (image, text[:, 0]))
        return {"fda": align_loss(image, text, self.cfg.tau_fda)}

    def birds(self, images: list[Tensor], classes: Tensor) -> dict[str, Tensor]:
        """classes (B, 2) of the two images, which have no caption."""
        visual, _, alone = self.visual(*images)
        both = torch.cat([visual[:, 0], visual[:, visual.shape[1] // 2]], -1)  # [IMG1] and [IMG2], (B, 2 D)
        alone, class_of = alone.flatten(0, 1), classes.T.flatten()  # (2B, D), (2B,)
        return {"class": class_loss(self.classify(alone), class_of), "contrast": contrast_loss(alone, class_of),
                "same_class": same_class_loss(self.same_class(both), classes)}  # fmt: skip

    # -- fine-tuning

    def finetune(self, images: list[Tensor], caption: Tensor, changed: bool | None) -> dict[str, Tensor]:
        """L_MLM, each word seeing only earlier words, and L_judge if it is known whether the pairs are changed."""
        cfg, visual = self.cfg, self.visual(*images)[0]
        if cfg.finetune_targets == "every":
            target = caption[:, 1:]
            image, text, _ = self.causal(visual, caption[:, :-1], ask_next=True)
        else:
            ids, target = mask_words(caption, self.vocab_size, cfg.mask_rate, cfg.mask_rules)
            image, text, _ = self.causal(visual, ids)
        losses = {"caption": word_loss(self.head(text[:, -target.shape[1] :]), target, cfg.reduction)}
        if changed is not None:
            losses["judge"] = judge_loss(self.judge(image.flatten(1)), changed, cfg.reduction)
        return losses

    # -- captions

    def encode(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `visual` returns, for features (B, C, H, W) of both images."""
        return self.visual(*(x.flatten(2).transpose(1, 2) for x in (before, after)))

    def stepper(self, visual: Tensor):
        """-> step(words (B,), position) -> logits of the next word, which a [MASK] in its place predicts. Keys and
        values of images and earlier words do not depend on later words, so they are kept."""
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
        """Where the model looked to write ids (B, V): last layer's attention of each word's [MASK] over the cells of
        both images, mean over heads and words -> "before" and "after" (B, H, W), which sum to 1 together."""
        query, key = self.causal(self.encode(before, after)[0], ids[:, :-1], ask_next=True)[2]
        scores = self.cross.blocks[-1].attention.scores(query[:, 1 - ids.shape[1] :], key)  # (B, K, V - 1, S)
        cells = scores.unflatten(-1, (2, -1))[..., 1:]  # without [IMG1] and [IMG2]
        weight = cells.flatten(-2).softmax(-1).mean(1)  # (B, V - 1, 2 N)
        before, after = mean_of(weight, ids[:, 1:] > END).unflatten(1, (2, *self.grid[1:])).unbind(1)
        return {"before": before, "after": after}


def join(past: list, new: list) -> list:
    """Keys and values of earlier tokens and of new ones, for every layer."""
    return [tuple(torch.cat(two, 1) for two in zip(a, b, strict=True)) for a, b in zip(past, new, strict=True)]


# ---- training --------------------------------------------------------------------------------------------------------


def plan(cfg: Config) -> list[tuple[str, int, int]]:
    """The stages of a run, each with its first step and the one after its last."""
    stages = [("cub", cfg.pretrain_steps)] if cfg.cub else []
    stages += [("pretrain", cfg.pretrain_steps), ("finetune", cfg.steps)]
    ends = [sum(steps for _, steps in stages[: i + 1]) for i in range(len(stages))]
    return [(name, end - steps, end) for (name, steps), end in zip(stages, ends, strict=True) if steps]


def task_of(cfg: Config, stage: str, step: int) -> str:
    """The task of a step; in pre-training drawn by the tasks' shares. A function of (seed, step) alone."""
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
    """The losses of one step, each a mean over the batches (changed pairs, distractor pairs), and their total. A
    scene's default image is "before" in both: its cells would be false negatives of one batch in MVCL."""
    losses: dict[str, Tensor] = {}
    for n, batch in enumerate(batches):
        batch, rewritten = batch.to(cfg.device), None
        if task == "fda":  # a seventh of the pairs, each with its caption and six more
            ids = batch.pair_ids[: max(1, len(batch.pair_ids) // (1 + REWRITES))]
            rewritten = negatives(ids).to(cfg.device, non_blocking=True)
        changed = n == 0 if len(batches) == 2 else None
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.device.startswith("cuda")):
            after = None if batch.single else batch.after
            terms = model(batch.before, after, batch.caption, task, changed, rewritten)
        losses = {name: losses.get(name, 0) + term / len(batches) for name, term in terms.items()}
    return losses | {"total": total_loss(losses, cfg)}


def train(cfg: Config, dataset, resume: bool = False) -> IDC:
    """Pre-train, then fine-tune on a data set (data.Dataset) into cfg.out_dir -> the best model by validation.

    The weights at the end of pre-training stay in pretrained.pt, for other runs' --init. Ctrl-C and SIGTERM save
    last.pt and exit 130 or 143; `resume` continues from there as if training had never stopped. FloatingPointError if
    a loss is not finite."""
    sources = {stage: open_cub(cfg, dataset) if stage == "cub" else dataset for stage, _, _ in plan(cfg)}
    negatives = {stage: Negatives(source) for stage, source in sources.items() if cfg.fda and stage != "finetune"}
    birds = Birds(cfg) if cfg.nabirds and cfg.pretrain_steps else None
    torch.manual_seed(cfg.seed)
    longest = max(source.max_len for source in sources.values())
    model = IDC(cfg, len(dataset.vocab), dataset.grid, longest).to(cfg.device)
    model.max_len = dataset.max_len
    if cfg.init and not resume:
        other, state = load_model(IDC, cfg, cfg.init)
        dataset.check_state(state)
        model.load_state_dict(other.state_dict())
    torch._dynamo.config.cache_size_limit = 64  # graphs, one for each task and batch: the default of 8 is too few
    sizes = {"cub": cfg.cub_batch or cfg.pretrain_batch, "pretrain": cfg.pretrain_batch, "finetune": cfg.batch_size}
    with Run(cfg, resume, model, None, dataset) as run:
        for stage, first, last in plan(cfg):
            if run.step >= last:
                continue
            finetune = stage == "finetune"
            decay, rate = (cfg.weight_decay, finetune_rate) if finetune else (0.0, pretrain_rate)
            run.optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, weight_decay=decay, fused=True)
            validate = (lambda: evaluate(model, dataset, "val", cfg)) if finetune else None
            for batches in run.steps(sources[stage], sizes[stage], first, last, rate, stage):
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
    return run.best_model()


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(model: IDC, dataset, split: str, cfg: Config, out_dir: Path | None = None) -> dict[str, float]:
    """Caption a split of a data set (data.Dataset) -> the scores of all its pairs together.

    Without out_dir (validation while training) only the quick metrics; with it every metric and every group of pairs,
    printed and written with captions and sample pictures."""
    model.eval()
    captions, maps = {}, {}  # by pair id
    for batch in dataset.eval_batches(split, cfg.eval_batch):
        batch = batch.to(cfg.device)
        ids = model.generate(batch.before, batch.after)
        captions |= zip(batch.pair_ids, dataset.vocab.decode(ids), strict=True)
        if out_dir:
            batch_maps = model.attention_map(batch.before, batch.after, ids)
            maps |= {i: {name: m[b] for name, m in batch_maps.items()} for b, i in enumerate(batch.pair_ids)}
    model.train()
    return dataset.results(split, captions, maps, out_dir)


def load(checkpoint: str | Path, device: str = ""):
    """A trained model for any two pictures, files or PIL images: caption, maps = load("best.pt")(before, after)."""
    import data

    cfg = dataclasses.replace(saved_config(Config, checkpoint), device=usable_device(device))
    return data.Captioner(*load_model(IDC, cfg, checkpoint))


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption pictures."""
    import data

    cfg, args = parse_args(Config, PRESETS, Path(__file__).stem, __doc__, argv, RELEASED)
    if args.caption:
        return data.caption_files(data.Captioner(*load_model(IDC, cfg, args.checkpoint)), args.caption, args.out)
    dataset = open_dataset(cfg)
    if args.eval is None:
        model = train(cfg, dataset, args.resume)
    else:
        model, state = load_model(IDC, cfg, args.eval)
        dataset.check_state(state)
    evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir))


# ---- rewritten captions ----------------------------------------------------------------------------------------------

ANIMAL = re.compile(r"\b(animal ?)([12])\b", re.IGNORECASE)  # what Birds-to-Words calls its two images
KINDS = {  # [ours] these words are replaced only within their kind, synonyms in one string; others, within their tag
    "size": ["small tiny", "large big"],
    "color": ["gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow"],
    "material": ["rubber matte", "metal metallic shiny"],
    "shape": ["cube block", "sphere ball", "cylinder"],
}
MEANING = {word: (kind, synonyms) for kind, group in KINDS.items() for synonyms in group for word in synonyms.split()}


class Negatives:
    """Section "FDA": six rewritten captions of every training pair, kept in train_neg_tfidf6.json in the released
    layout, one JSON object a line, so that the authors' file can be read too."""

    def __init__(self, dataset):
        import data

        def key(row: dict) -> tuple[str, str]:
            """The stems of both names: the authors' names have no suffix."""
            return Path(row.get("img1") or row["img"]).stem, Path(row.get("img2") or "").stem

        path, self.max_len = dataset.root / "train_neg_tfidf6.json", dataset.max_len
        self.vocab = data.Vocab(dataset.vocab.words, dataset.vocab.tokenizer, self.max_len - 2)  # longer ones are cut
        rows = {p.id: {"img1": p.before, "img2": p.after, "sentences": p.captions} for p in dataset.pairs("train")}
        if not path.exists():
            made = rewrite(dataset)
            lines = (json.dumps(row | {"neg_samples": made[i]}) + "\n" for i, row in rows.items())
            data.write_text(path, "".join(lines))
        with file_errors(path, "every training pair needs its neg_samples; remove the file to make it again"):
            lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            negatives = {key(line): line["neg_samples"] for line in lines}
            self.texts = {i: negatives[key(row)] for i, row in rows.items()}

    def __call__(self, pair_ids: list[str]) -> Tensor:
        """-> the pairs' rewritten captions (B, 6, longest caption)."""
        return torch.tensor([[self.vocab.encode(c, self.max_len) for c in self.texts[i]] for i in pair_ids])


def rewrite(dataset) -> dict[str, list[str]]:
    """Each training pair's id -> its six negatives, two each from Retrieve, Replace and Confuse. [ours]
    - All captions of a pair share its negatives.
    - Single images (CUB) have no subjects to confuse: three come from Retrieve, three from Replace.
    - If a strategy finds too few, Retrieve and then Replace make up for it.
    - A scene's changed and unchanged pair share five rewrites of the change. The sixth, in place of one from Retrieve,
      is a caption of the other pair, so that text alone does not show which of the two pairs a set belongs to.
    - A negative must be false: of the first object it names, it says something that no caption of the pair says."""
    scenes, unchanged = dataset.scenes["train"], dataset.kinds.get("no change", set())
    captions = list(dict.fromkeys(c for s in scenes for p in s.pairs for c in p.captions))
    changes = list(dict.fromkeys(c for s in scenes for p in s.pairs if p.id not in unchanged for c in p.captions))
    (tokens, words, subjects), idf = parse(dataset, captions), inverse_frequency(captions)
    pool, all_subjects = pools([words[c] for c in changes], idf), sorted({s for c in changes for s in subjects[c]})
    nearest = retrieve([" ".join(s.pairs[0].captions) for s in scenes], changes, idf)
    negatives = {}
    for number, (scene, near) in enumerate(zip(scenes, nearest, strict=True)):
        rng, pair = np.random.default_rng([len(captions), number]), scene.pairs[0]
        true = {c for pairs in (scene.pairs, scene.swapped or ()) for p in pairs for c in p.captions}
        mentioned = set().union(*map(named, pair.captions))
        originals = rng.permutation(pair.captions * REWRITES).tolist()
        retrieved = (changes[i] for i in near)
        replaced = (replace_words(tokens[c], important(words[c], idf), pool, rng) for c in originals)
        confused = (confuse(c, subjects[c], all_subjects, rng) for c in originals)
        count = REWRITES + 1 - len(scene.pairs)  # without the caption of the scene's other pair
        sources = [(retrieved, count - 4), (replaced, count - 2), (confused, count)]
        sources = [(retrieved, 3), (replaced, 6)] if pair.after is None else sources
        chosen: list[str] = []
        for source, end in [*sources, (retrieved, count), (replaced, count)]:
            for text in source:
                if len(chosen) >= end:
                    break
                if text not in true and text not in chosen and (not mentioned or named(text) - mentioned):
                    chosen.append(text)
        if len(chosen) < count:
            raise ValueError(f"only {len(chosen)} rewritten captions can be made for {pair.id}, expected {count}: "
                             f"{dataset.root} has too few different captions; set --fda 0")  # fmt: skip
        for p, other in zip(scene.pairs, scene.pairs[::-1], strict=True):
            negatives[p.id] = chosen if p is other else [*chosen, str(rng.choice(other.captions))]
    return negatives


def named(text: str) -> set:
    """What a caption says of the first object that it names by KINDS; an empty set if it names none."""
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
    for i in progress(range(0, len(queries), 64), desc="rewriting captions"):
        block = tfidf(queries[i : i + 64], idf).to_dense()
        yield from (corpus @ block.T).T.topk(min(count, len(texts))).indices.tolist()  # (64, count)


def parse(dataset, texts: list[str]) -> tuple[dict, dict, dict]:
    """For each text: its tokens, with the spaces that follow; its nouns and adjectives, (index, word, kind of KINDS or
    tag); its subjects. CLEVR's pipeline of known words sets no tags, so only words of KINDS are replaced there."""
    import data

    tokens, words, subjects = {}, {}, {}
    for text, doc in zip(texts, data.language(dataset.name).pipe(texts, batch_size=1000), strict=True):
        tokens[text], subjects[text] = [t.text_with_ws for t in doc], data.subjects(doc)
        kinds = [(t.i, t.lower_, MEANING.get(t.lower_, [t.tag_])[0]) for t in doc if t.pos_ in ("NOUN", "ADJ")]
        words[text] = [word for word in kinds if word[2]]
    return tokens, words, subjects


def important(words: list[tuple[int, str, str]], idf: dict[str, float]) -> list[tuple[int, str, str]]:
    """The upper half (rounded up) of a caption's nouns and adjectives by TF-IDF."""
    count = Counter(word for _, word, _ in words)
    return sorted(words, key=lambda w: -count[w[1]] * idf.get(w[1], 1.0))[: (len(words) + 1) // 2]


def pools(captions: list[list[tuple[int, str, str]]], idf: dict[str, float]) -> dict[str, list[str]]:
    """Appendix A.2: for each kind or tag the words that are important in some caption and occur in at least ten."""
    count = Counter(key for words in captions for key in {(kind, word) for _, word, kind in words})
    pool: dict[str, list[str]] = {}
    for kind, word in sorted({(kind, word) for words in captions for _, word, kind in important(words, idf)}):
        if count[kind, word] >= 10:
            pool.setdefault(kind, []).append(word)
    return pool


def replace_words(tokens: list[str], words: list, pool: dict[str, list[str]], rng: np.random.Generator) -> str:
    """Section "Replace": the important words give way to different ones of the same kind or tag, if there are any."""
    tokens = [*tokens]
    for i, word, kind in words:
        choice = [w for w in pool.get(kind, ()) if MEANING.get(w, w) != MEANING.get(word, word)]
        if choice:
            tokens[i] = tokens[i].replace(tokens[i].strip(), choice[rng.integers(len(choice))])
    return "".join(tokens)


def confuse(text: str, own: list[str], subjects: list[str], rng: np.random.Generator) -> str:
    """Section "Confuse": "animal 1" and "animal 2" change places; without both, the subject (the first of `own`) gives
    way to another subject of as many words, if there is one."""
    if len({number for _, number in ANIMAL.findall(text)}) == 2:
        return ANIMAL.sub(lambda m: m[1] + "21"[int(m[2]) - 1], text)
    subject = next((s for s in own if s in text.lower()), "")
    choice = [s for s in subjects if s != subject and s.count(" ") == subject.count(" ")]
    if not (subject and choice):
        return text
    at = text.lower().index(subject)
    return text[:at] + choice[rng.integers(len(choice))] + text[at + len(subject) :]


# ---- cross-task data -------------------------------------------------------------------------------------------------


def open_dataset(cfg: Config):
    """The data set of a run; with --cub, its vocabulary covers both data sets."""
    import data

    dataset = data.open_dataset(cfg)
    if cfg.cub:
        words = {*dataset.vocab.words, *data.read_json(Path(cfg.cub) / "vocab.json")} - {*data.SPECIAL}
        dataset.vocab = data.Vocab(data.SPECIAL + sorted(words), dataset.vocab.tokenizer, dataset.vocab.max_words)
    if not cfg.swap:
        dataset.scenes["train"] = [dataclasses.replace(scene, swapped=None) for scene in dataset.scenes["train"]]
    return dataset


def open_cub(cfg: Config, dataset):
    """Section 2.4, general image captioning: single images with captions, encoded in `dataset`'s vocabulary."""
    import data

    cub = data.load("cub", cfg.cub, cfg.features, cfg.device)
    if cub.grid != dataset.grid:
        raise ValueError(f"features of {cub.root} are of shape {cub.grid}, those of {dataset.root} {dataset.grid}")
    cub.vocab = data.Vocab(dataset.vocab.words, cub.vocab.tokenizer, cub.vocab.max_words)
    return cub


class Birds:
    """Section 2.4, fine-grained classification: a pair for each of NABirds' 48,562 images."""

    def __init__(self, cfg: Config):
        import data

        dataset = data.load("nabirds", cfg.nabirds, cfg.features, cfg.device)
        images = [p for split in dataset.scenes for p in dataset.pairs(split)]
        self.names, self.features = [p.before for p in images], dataset.features
        self.classes = np.array([dataset.vocab.index[p.captions[0]] - len(data.SPECIAL) for p in images])
        self.partners, self.size, self.seed = partners(self.classes, cfg.seed), cfg.pretrain_batch, cfg.seed

    def batch(self, step: int):
        """Random pairs that depend on (seed, step) alone. The classes (B, 2) take the place of captions."""
        import data

        first = np.random.default_rng([self.seed, step, 1]).integers(len(self.names), size=self.size)
        pair = np.stack([first, self.partners[first]])  # (2, B)
        before, after = (self.features.rows([self.names[i] for i in images]) for images in pair)
        return data.Batch(before, after, torch.from_numpy(self.classes[pair.T]), [], [])


def partners(classes: np.ndarray, seed: int) -> np.ndarray:
    """For every image the index of another: for half of them one of the same class (if there is one), for the rest one
    of another class."""
    rng, places = np.random.default_rng(seed), np.arange(len(classes))
    alike, partner = rng.permutation(len(classes)) < len(classes) // 2, []
    for i, c in enumerate(classes):
        same = (classes == c) & (places != i)
        fit = same if alike[i] and same.any() else classes != c
        partner.append(rng.choice(places[fit]))
    return np.array(partner)


if __name__ == "__main__":
    run_main(main)
