"""IDC: Image Difference Captioning with Pre-training and Contrastive Learning (AAAI 2022).
The paper is by Yao, Wang and Jin. [ours] marks what neither the paper nor the released code does,
"as released" what the default takes from that code. --variant released takes all of RELEASED, too.

The two images of a pair, in both stages of training, with CLEVR-Change's sizes (IDC.encode):

    before (2048, 7, 7)      after (2048, 7, 7)
       |  embed.image, Eq. 2    |  embed.image, Eq. 3
    v_1 (50, 512)            v_2 (50, 512)      [IMG1] or [IMG2], then the cells
       |  single: E_s           |  single: E_s
       +-----------+------------+
                   |  pair: E_p, Eq. 4
    v: S = 2 (49 + 1) = 100 visual tokens (100, 512)

Pre-training (IDC.joint): 100 visual and 1 + L text tokens, 25 with captions of L = 24 ids. All
tokens see all but padding. A step has one of three tasks:

    v   [CLS] START w_1 w_2 ... w_22 END
       |  cross: E, Eq. 5
    some w_i are [MASK]             -> head: these words             L_MLM, Eq. 6
    some cells are zeros            -> cell_head: their features     L_MVCL, Eq. 7-8
    seven captions, a sequence each -> cosine of images and [CLS]    L_FDA, Eq. 9

Fine-tuning (IDC.finetune): 100 visual and 1 + 2 (L - 1) text tokens [ours], 47 with L = 24. Images
see images only (as released). A word, and the [MASK]_i that stands for it as in decoding, see the
images, [CLS], earlier words and themselves.

    v   [CLS] START w_1 ... w_22   [MASK]_1 [MASK]_2 ... [MASK]_23
       |  cross: E, Eq. 5
    [MASK]_i                        -> head: w_i, at last END        L_MLM, Eq. 6
    [IMG1], [IMG2]                  -> judge: changed or not         L_judge, section 3.1

Idea. (1) Captioned pairs are few and differences are small, so the model first learns which words
belong to which details, by predicting masked words (MLM), recognising masked image cells (MVCL) and
telling the caption from six similar ones (FDA). (2) Like a person, it looks at each image alone
(E_s) and compares the two (E_p) before it thinks of words (E). (3) Fine-tuning is MLM in which a
word sees only earlier words, so captions can be written word by word.

Read first: Embedding, mask_words, causal_mask, cell_loss, align_loss, and of IDC encode, joint,
mlm, mvcl, fda, causal_text and finetune. Skip at first: the last three sections (rewritten
captions, cross-task data, as released; 450 lines), attention_map, and RELEASED.

Formulas, reconstructed from the paper's text and released code, not compared with the printed ones:
Eq. 1      IDC.joint and     w = [CLS] START w_1 w_2 ... END; the paper's [BOS] and [EOS] are START
           IDC.causal_text   and END
Eq. 2-3    Embedding.image   v_i = [IMGi] v_i1 ... v_iN, i = 1, 2. A token x of w and v_i enters as
                             y = Dropout(LN(x + type + position)). As released: LN and Dropout;
                             words are multiplied by sqrt(D), special tokens have no position
Eq. 4      IDC.encode        v = E_p([E_s(v_1) ; E_s(v_2)]), the image difference encoder
Eq. 5      IDC.cross         E([v ; w]), the cross-modal transformer
Eq. 6      word_loss         L_MLM = mean of -log P(w_m | other words, v_1, v_2), masked words w_m
Eq. 7-8    cell_loss         L_MVCL = mean over masked cells m of L_m = -log e(f_m) / [e(f_m) + sum
                             of e(n) over negatives n]. f_m is the cell's feature, p_m its
                             prediction, e(n) = exp(cos(p_m, n) / tau_mvcl). Negatives: the unmasked
                             cells of the batch (of changed pairs or of distractors [ours])
Eq. 9      align_loss        L_FDA = -log e_0 / [e_0 + ... + e_6], where e_j = exp(cos(g_j, c_j) /
                             tau_fda), g = ([IMG1] + [IMG2]) / 2 and c = [CLS] of Eq. 5, read with
                             the caption (j = 0) or one of its rewrites (j = 1 ... 6); only for a
                             seventh of the pairs (as released)
Sec. 2.2   draw_task         each step has one task, drawn according to shares
           mask_words, mask_cells; Negatives rewrites captions: Retrieve, Replace, Confuse
Sec. 2.3   causal_mask       of fine-tuning; generate: a [MASK] after the words so far
Sec. 2.4   class_loss, contrast_loss, same_class_loss: bird classes train the difference encoder
Sec. 3.1   judge_loss        is the pair a distractor? Fine-tuning: L = L_MLM + w_judge L_judge

Terms: a changed pair shows a scene before and after a change. In a distractor pair only the camera
and the light differ, and its caption says that nothing changed. On CLEVR-Change and mini, a step
has a batch of each, of the same scenes. In half of the scenes, "before" and the distractor
picture change places [ours].
Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, h heads, L ids of a caption
(START, words, END, padding; as many as the longest has [ours], not Table 6's 40 or 80), V ids of
the vocabulary, K of a caption's ids that fine-tuning reads (L or L - 1), T tokens, S = 2 (N + 1)
visual tokens, M cells of a batch.

Flags for the rows of the paper's tables, each with an --out_dir of its own. The paper's fine-tuning
has --no-swap --finetune_targets masked, too. The last column was measured without these two flags
and on mini instead of CLEVR-Change: the CIDEr of changed pairs, a mean of three seeds
(docs/results.md). Two such means differ by up to 49 by chance, one run and a mean by 70, two runs
by 85, two means at twice the steps by 21.
Row of the paper's tables            flags, with --dataset clevr_change        CIDEr on mini
IDC (Tables 2, 3 and 4)                                                        504
no pre-training (Table 4, line 1)    --pretrain_steps 0                        253, --steps 4200
MLM (line 2)                         --mvcl 0 --fda 0
MLM + MVCL (line 3)                  --fda 0
no difference encoder (line 5)       --no-difference_encoder
no distractor judging (line 6)       --w_judge 0
Row of the paper's tables            flags, with --dataset birds_to_words
Birds-to-Words (Tables 1 and 5)      [--cub FOLDER] [--nabirds FOLDER]

To copy: this file and common.py; to train, also data.py, scores.py and support/.
Licence: MIT. Written from the paper; it contains no code from the authors' repository.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

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
    InputError,
    RunConfig,
    decode,
    initialise,
    is_word,
    learning_rate,
    masked_mean,
    sinusoid,
    upcast,
)

# ---- config --------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """IDC. RunConfig's steps, batch_size, lr, schedule, lr_drop, warmup and patience belong to
    fine-tuning, eval_every and grad_clip to both stages."""

    MAY_CHANGE = RunConfig.MAY_CHANGE | {"init", "cub", "nabirds"}
    RANGES = RunConfig.RANGES | {"pretrain_batch": (1, math.inf)}

    init: str = ""  # checkpoint to start from (--nabirds as there); --pretrain_steps 0 only tunes
    dim: int = 512  # width D
    ffn: int = 2048  # width of the feed-forward layers
    heads: int = 8  # heads of every attention
    layers: int = 3  # layers of the cross-modal transformer
    dropout: float = 0.2  # dropout probability
    difference_encoder: bool = True  # E_s and E_p of Eq. 4, before the cross-modal transformer
    pretrain_steps: int = 250000  # steps of pre-training (--steps: of fine-tuning); 0: none
    pretrain_batch: int = 100  # scenes per step of pre-training
    pretrain_lr: float = 1e-4  # learning rate of pre-training (--lr: of fine-tuning)
    pretrain_warmup: int = 8000  # steps of linear warm-up in pre-training
    mlm: int = 8  # share of masked language modelling in the steps of pre-training; 0: none
    mvcl: int = 1  # share of masked visual contrastive learning
    fda: int = 2  # share of fine-grained difference aligning
    cub: str = ""  # CUB's folder; if given, pre-train on it first, for as many steps (as released)
    cub_batch: int = 0  # single images per step of pre-training on CUB; 0: pretrain_batch
    nabirds: str = ""  # NABirds' folder; if given, its classes are a pre-training task of share 3
    mask_rate: float = 0.15  # share of words masked in MLM and by --finetune_targets masked
    cell_mask_rate: float = 0.15  # share of one image's cells that MVCL masks
    tau_mvcl: float = 1.0  # temperature of MVCL
    tau_fda: float = 1.0  # temperature of FDA
    weight_decay: float = 0.0  # weight decay of fine-tuning
    w_judge: float = 1.0  # weight of L_judge; unused on data sets without distractor pairs
    # The released code does otherwise in what follows. RELEASED, below, says for each field whether
    # the default is the paper's or [ours].
    swap: bool = True  # in half of the scenes, swap "before" and the distractor's "after"
    finetune_targets: Literal["every", "masked"] = "every"  # which words fine-tuning predicts
    init_weights: Literal["xavier", "pytorch"] = "xavier"  # how weights are initialised
    embedding: Literal["plain", "released"] = "plain"  # Embedding, or ReleasedEmbedding at the end
    mask_rules: Literal["plain", "released"] = "plain"  # mask_words, or released_mask_words
    mvcl_negatives: Literal["features", "predictions"] = "features"  # cell_loss, or the released
    see_padding: bool = False  # in pre-training, tokens also see padding
    finetune_cls: bool = True  # put [CLS] before the text in fine-tuning, too
    rates: Literal["plain", "released"] = "plain"  # learning_rate and warm-up, or released_rate
    reduction: Literal["mean", "sum"] = "mean"  # of fine-tuning's losses, over words and pairs


# ---- modules -------------------------------------------------------------------------------------


class Embedding(nn.Module):
    """Eq. 1-3: y = Dropout(LN(x + type + position)) for words, cells and special tokens, which
    share one LayerNorm and one table of types.

    As in the released code, words are multiplied by sqrt(D), and special tokens have no position,
    although the paper adds a position to every token (section 2.1)."""

    # The parts of the sequence, which begin with [IMG1], [IMG2] and [CLS]. Each part has a type.
    IMAGE_1 = 0
    IMAGE_2 = 1
    TEXT = 2
    # Three special tokens and three types; ReleasedEmbedding has other numbers.
    SPECIAL_TOKENS = 3
    TYPES = 3
    FIRST_TYPE = 0  # of the cells of image 1

    def __init__(self, cfg: Config, vocab_size: int, channels: int, positions: int):
        super().__init__()
        self.mask_id = vocab_size  # the id of [MASK]; those of [IMG1], [IMG2] and [CLS] follow
        self.table = nn.Embedding(vocab_size + 1 + self.SPECIAL_TOKENS, cfg.dim)
        self.types = nn.Embedding(self.TYPES, cfg.dim)
        self.project = nn.Linear(channels, cfg.dim)
        self.norm = nn.LayerNorm(cfg.dim, eps=1e-12)
        self.dropout = nn.Dropout(cfg.dropout)
        self.register_buffer("position", sinusoid(positions, cfg.dim), persistent=False)
        self.scale = cfg.dim**0.5

    def special(self, part: int, count: int) -> Tensor:
        """The part's [IMG1], [IMG2] or [CLS], `count` times -> (count, 1, D)."""
        x = self.table.weight[self.mask_id + 1 + part] + self.types.weight[part]
        y = self.norm(x).expand(count, 1, -1)
        return self.dropout(y)  # Eq. 1-3

    def words(self, ids: Tensor, first: int = 0) -> Tensor:
        """(B, L) ids at positions first, first + 1, ... -> (B, L, D)."""
        end = first + ids.shape[1]
        assert end <= self.position.shape[0], "a caption is longer than the table of positions"
        x = self.scale * self.table(ids) + self.types.weight[self.FIRST_TYPE + self.TEXT]
        x = x + self.position[first:end]
        return self.dropout(self.norm(x))  # Eq. 1

    def cells(self, features: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, D), n = row * W + column."""
        return self.project(features.flatten(2).transpose(1, 2))

    def image(self, features: Tensor, part: int) -> Tensor:
        """(B, C, H, W) -> [IMG1] or [IMG2], then the cells (B, 1 + N, D)."""
        x = self.cells(features)
        x = x + self.types.weight[self.FIRST_TYPE + part] + self.position[: x.shape[1]]
        y = self.dropout(self.norm(x))  # Eq. 2-3
        return torch.cat([self.special(part, y.shape[0]), y], 1)


class State(NamedTuple):
    """What a block's attention computes of its tokens, each (B, T, D)."""

    query: Tensor
    key: Tensor
    value: Tensor


class Block(nn.Module):
    """Pre-norm layer (as released): x + MHA(LN x), then x + W2 ReLU(W1 LN x)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.hidden = nn.Linear(cfg.dim, cfg.ffn)
        self.output = nn.Linear(cfg.ffn, cfg.dim)
        self.norm1 = nn.LayerNorm(cfg.dim)
        self.norm2 = nn.LayerNorm(cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, mask: Tensor | None, images: State | None) -> tuple[Tensor, State]:
        """x (B, T, D) -> the new x (B, T, D), and its State. mask: bool (B or 1, 1, T or 1, T),
        True where a token may be seen. images: the State of the images' S tokens, if x sees them,
        too (but they do not see x); the mask then has S + T columns."""
        y = self.norm1(x)
        state = State(*self.attention.project(y, y))
        key = state.key
        value = state.value
        if images is not None:
            key = torch.cat([images.key, key], 1)  # (B, S + T, D)
            value = torch.cat([images.value, value], 1)
        x = x + self.dropout(self.attention.attend(state.query, key, value, mask=mask))
        hidden = F.relu(self.hidden(self.norm2(x)))
        x = x + self.dropout(self.output(self.dropout(hidden)))
        return x, state


class Transformer(nn.Module):
    """As released: a LayerNorm, then blocks, and none after them, so the heads read the residual
    stream. The LayerNorms are PyTorch's, while the released code divides by the unbiased standard
    deviation plus an epsilon."""

    def __init__(self, cfg: Config, layers: int):
        super().__init__()
        self.norm = nn.LayerNorm(cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(layers))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, images: list[State] | None = None
    ) -> tuple[Tensor, list[State]]:
        """x (B, T, D) -> the new x (B, T, D), and its State in each block. images: those of the
        images, if x sees these, too. See Block, also for the mask."""
        if images is None:
            images = [None] * len(self.blocks)
        x = self.norm(x)
        states = []
        for block, images_of_block in zip(self.blocks, images, strict=True):
            x, state = block(x, mask, images_of_block)
            states.append(state)
        return x, states


# ---- masks ---------------------------------------------------------------------------------------


def mask_words(caption: Tensor, vocab_size: int, rate: float) -> tuple[Tensor, Tensor]:
    """Section "MLM": each word is a target with probability `rate`. Of the targets, 80 % become
    [MASK], 10 % a random word, and 10 % stay. caption (B, L) -> ids with masks; targets, NULL
    elsewhere (B, L).

    END is masked like any word, because the model has to learn where a caption ends. UNK is not
    masked [ours]."""
    device = caption.device
    mask_id = vocab_size  # the first id after all words; the special tokens follow
    chosen = (caption >= END) & (torch.rand(caption.shape, device=device) < rate)
    kind = torch.rand(caption.shape, device=device)
    random = torch.randint(END + 1, vocab_size, caption.shape, device=device)
    ids = torch.where(chosen & (kind < 0.9), random, caption)  # 10 % stay
    ids = ids.masked_fill(chosen & (kind < 0.8), mask_id)  # overwrites 80 of the 90 % above
    return ids, caption.masked_fill(~chosen, NULL)


def mask_cells(pairs: int, images: int, cells: int, rate: float, device) -> Tensor:
    """Section "MVCL": choose round(rate N) cells, at least one, of one image of each pair, so that
    the other image and the caption can tell what was there. -> their places among all cells of the
    batch: indices into (B, images, N), flattened.

    [ours] The number is fixed, because torch.compile needs fixed shapes. The released code draws
    each cell with probability `rate`."""
    count = max(1, round(rate * cells))
    cell = torch.rand(pairs, cells, device=device).topk(count).indices  # (B, count)
    image = torch.randint(images, (pairs, 1), device=device)
    pair = torch.arange(pairs, device=device)[:, None]
    return ((pair * images + image) * cells + cell).flatten()


def causal_mask(length: int, asked: int, device) -> Tensor:
    """Section 2.3: each of `length` tokens ([CLS] and words) sees those before it and itself. Then
    come `asked` [MASK]s, one after each of the last tokens: it sees what that token sees, and
    itself, as in decoding. -> bool (length + asked, length + asked), True where the row's token
    sees the column's.

    With length = 3 and asked = 2, where w0 is START and m1, after w0, predicts w1:

                [CLS]  w0  w1 | m1  m2
        [CLS]     x           |
        w0        x    x      |
        w1        x    x   x  |
        m1        x    x      | x
        m2        x    x   x  |     x
    """
    earlier = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    itself = torch.eye(asked, dtype=torch.bool, device=device)
    seen_by_tokens = F.pad(earlier, (0, asked))  # no [MASK]
    seen_by_masks = torch.cat([earlier[length - asked :], itself], 1)
    return torch.cat([seen_by_tokens, seen_by_masks])


# ---- losses --------------------------------------------------------------------------------------


def word_loss(logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Eq. 6, L_MLM: cross-entropy of masked words. logits (..., V), target (...), which is
    NULL at all other words."""
    logits = logits.flatten(0, -2)
    total = F.cross_entropy(logits, target.flatten(), ignore_index=NULL, reduction="sum")  # Eq. 6
    if reduction == "sum":
        return total
    return total / (target != NULL).sum().clamp(min=1)


def cell_loss(predicted: Tensor, features: Tensor, masked: Tensor, tau: float) -> Tensor:
    """Eq. 7-8, L_MVCL: InfoNCE over cosines. predicted, features (M, C) of all cells of the batch;
    masked (n,), the places of the masked ones. Negatives are the features of all unmasked cells.

    Example, tau = 1: features (1, 0), (0, 2), (3, 0); the first is masked and predicted as (2, 0).
    Its cosines are 1, 0 and 1, so the loss is -ln e / (e + 1 + e) = 0.862. The third cell looks the
    same, so at no temperature can the loss fall below ln 2 = 0.693."""
    with torch.autocast(features.device.type, enabled=False):  # bfloat16 has too few digits
        s = cell_cosines(predicted, features, masked) / tau
        return F.cross_entropy(s, masked)  # Eq. 7-8


def cell_cosines(predicted: Tensor, features: Tensor, masked: Tensor) -> Tensor:
    """Of cell_loss: the cosine of each masked cell's prediction to every candidate, its own feature
    and those of all unmasked cells; -inf for the other masked cells. -> (n, M)"""
    is_masked = torch.zeros_like(features[:, 0], dtype=torch.bool).index_fill(0, masked, True)
    p = F.normalize(upcast(predicted), dim=-1)
    f = F.normalize(features, dim=-1)
    own = masked[:, None] == torch.arange(f.shape[0], device=f.device)
    return (p[masked] @ f.T).masked_fill(is_masked & ~own, float("-inf"))


def align_loss(image: Tensor, text: Tensor, tau: float) -> Tensor:
    """Eq. 9, L_FDA: InfoNCE over cosines, the caption (first) against its six rewrites. Each of the
    seven is read together with the images, in a sequence of its own. From this sequence come image
    (the mean of [IMG1] and [IMG2]) and text ([CLS]), both (B, 7, D).

    Example, tau = 1: images (1, 0), caption (1, 0), six rewrites (0, 1). The cosines are 1 and six
    times 0, so the loss is -ln e / (e + 6) = 1.165. At tau = 0.1 it would be 0.0003."""
    s = F.cosine_similarity(image, text, dim=-1) / tau  # (B, 7)
    first = torch.zeros(s.shape[0], dtype=torch.long, device=s.device)
    return F.cross_entropy(s, first)  # Eq. 9


def judge_loss(logits: Tensor, changed: Tensor, reduction: str = "mean") -> Tensor:
    """Section 3.1, L_judge: is a pair changed or a distractor? logits (B, 2), changed (B,) bool."""
    return F.cross_entropy(logits, changed.long(), reduction=reduction)


def class_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Section 2.4: which class is each single image? logits (2B, classes), classes (2B,)."""
    return F.cross_entropy(logits, classes)


def contrast_loss(x: Tensor, classes: Tensor, margin: float = 0.4) -> Tensor:
    """Section 2.4, TransFG's loss (He et al. 2021): it pulls cosines to 1 within a class and pushes
    them below the margin between classes. It is the mean over all ordered pairs of images, and each
    image also pairs with itself. x (2B, D), classes (2B,)."""
    with torch.autocast(x.device.type, enabled=False):
        x = F.normalize(upcast(x), dim=-1)
        cos = x @ x.T
        alike = classes[:, None] == classes
        pull = 1 - cos
        push = (cos - margin).clamp(min=0)
        return torch.where(alike, pull, push).mean()


def same_class_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Section 2.4: do both images show the same class? logits (B, 2), classes (B, 2)."""
    target = classes[:, 0] == classes[:, 1]
    return F.cross_entropy(logits, target.long())


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Fine-tuning: L_MLM + w_judge L_judge (section 3.1). Pre-training: the sum of the losses of a
    step's task (as released)."""
    weights = {"judge": cfg.w_judge}
    return sum(weights.get(name, 1.0) * loss for name, loss in losses.items())


# ---- method --------------------------------------------------------------------------------------

BIRD_CLASSES = 555  # of NABirds
REWRITES = 6  # rewritten captions of a pair


class IDC(nn.Module):
    """IDC with all its parameters. grid: (C, H, W) of the features; max_len: tokens of the longest
    caption, with START and END."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg = cfg
        self.vocab_size = vocab_size
        self.grid = tuple(grid)
        self.max_len = max_len
        channels, height, width = grid
        Embed = ReleasedEmbedding if cfg.embedding == "released" else Embedding
        self.embed = Embed(cfg, vocab_size, channels, max(height * width, max_len))
        if cfg.difference_encoder:
            self.single = Transformer(cfg, 1)
            self.pair = Transformer(cfg, 1)
        self.cross = Transformer(cfg, cfg.layers)
        self.head = nn.Linear(cfg.dim, vocab_size)  # the released one also has [MASK] and [CLS]
        self.cell_head = nn.Sequential(  # as released
            nn.Linear(cfg.dim, cfg.dim), nn.GELU(), nn.LayerNorm(cfg.dim, eps=1e-12)
        )
        self.cell_bias = nn.Parameter(torch.zeros(channels))
        self.judge = nn.Linear(2 * cfg.dim, 2)
        if cfg.nabirds:
            if not cfg.difference_encoder:
                raise InputError("--nabirds needs --difference_encoder, which it trains")
            self.classify = nn.Linear(cfg.dim, BIRD_CLASSES)
            self.same_class = nn.Linear(2 * cfg.dim, 2)
        if cfg.init_weights == "xavier":
            initialise(self, xavier=True)

    def forward(self, *inputs: Tensor | None, task: Callable | None = None) -> dict[str, Tensor]:
        """The losses of a task: a method of this class, IDC.finetune unless given, or for
        pre-training IDC.mlm, IDC.mvcl, IDC.fda or IDC.birds. The inputs are the method's.
        torch.compile compiles this, into a graph for each task.

        Values at the start, with the paper's sizes, 16 pairs and 76 ids, and what it means if a
        loss does not fall. Some start above a guess, as no LayerNorm precedes the heads.
            caption, mlm  6 to 8; they fall even if images are ignored, so look at the scores
            judge         0.6 to 5; at ln 2 = 0.69 it guesses: the images are not compared
            mvcl          7.3 = ln 1457, the cells to choose from; if it stays, tau_mvcl is too
                          high: at 1 it can fall by 2 at most, as cosines are between -1 and 1
            fda           1.95 = ln 7: there, the cosine does not depend on the caption; at tau_fda
                          1 it cannot fall below ln(1 + 6 / e^2) = 0.59
            class         about 7.2; ln 555 = 6.3 would be a guess"""
        if task is None:
            task = IDC.finetune
        return task(self, *inputs)

    # -- the sequence

    def encode(self, before: Tensor, after: Tensor | None = None) -> Tensor:
        """Eq. 4. Features (B, C, H, W) of both images, or of a single one -> visual tokens v
        (B, S, D): [IMG1], its cells, [IMG2], its cells, if there is a second image."""
        return self.encode_pair(*self.encode_each(before, after))

    def encode_each(self, before: Tensor, after: Tensor | None) -> tuple[Tensor, Tensor]:
        """E_s of Eq. 4 -> [IMG1] and its cells, [IMG2] and its cells, both (B, 1 + N, D).

        Without a second image, only [IMG2] remains of it, (B, 1, D). (The paper pads that image
        with zeros which no token sees. The released code passes [IMG2] directly to E_p.)"""
        assert before.shape[1:] == self.grid, f"{self.grid} expected, {before.shape} found"
        x_1 = self.embed.image(before, Embedding.IMAGE_1)
        if after is None:
            x_2 = self.embed.special(Embedding.IMAGE_2, before.shape[0])
            if self.cfg.difference_encoder:
                x_1, _ = self.single(x_1)
                x_2, _ = self.single(x_2)
            return x_1, x_2
        # Otherwise, unflatten below would split the images at the wrong place.
        assert after.shape == before.shape, f"{before.shape} expected, {after.shape} found"
        x_2 = self.embed.image(after, Embedding.IMAGE_2)
        x = torch.cat([x_1, x_2])  # (2B, 1 + N, D)
        if self.cfg.difference_encoder:
            x, _ = self.single(x)
        x_1, x_2 = x.unflatten(0, (2, -1))
        return x_1, x_2

    def encode_pair(self, x_1: Tensor, x_2: Tensor) -> Tensor:
        """E_p of Eq. 4, on what encode_each returns -> v (B, S, D)."""
        x = torch.cat([x_1, x_2], 1)
        if self.cfg.difference_encoder:
            x, _ = self.pair(x)
        return x

    def image_tokens(self, visual: Tensor) -> Tensor:
        """(B, S, D) -> [IMG1] and [IMG2] (B, 2, D)."""
        _, height, width = self.grid
        return visual[:, :: 1 + height * width]

    def joint(self, visual: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Eq. 5 in pre-training, where every token sees all tokens except padding. visual (B, S, D)
        of Eq. 4, ids (B, L) -> visual (B, S, D); text (B, 1 + L, D), [CLS] first."""
        count = visual.shape[1]
        cls = self.embed.special(Embedding.TEXT, ids.shape[0])
        text = torch.cat([cls, self.embed.words(ids)], 1)  # Eq. 1
        seen = (ids != NULL) | self.cfg.see_padding
        seen = F.pad(seen, (count + 1, 0), value=True)  # all see images and [CLS]
        x, _ = self.cross(torch.cat([visual, text], 1), seen[:, None, None])  # Eq. 5
        return x[:, :count], x[:, count:]

    def causal_text(self, ids: Tensor, asked: int = 0) -> tuple[Tensor, Tensor]:
        """Fine-tuning's text (B, T, D) of ids (B, K): [CLS] (if finetune_cls), words, and a [MASK]
        for each of the last `asked` words. It has the position embedding of the word that follows
        (in causal_mask's picture: m1 that of w1). Also what the text sees, bool (1, 1, T, S + T):
        all images, and what causal_mask allows."""
        text = self.embed.words(ids)
        if self.cfg.finetune_cls:
            cls = self.embed.special(Embedding.TEXT, ids.shape[0])
            text = torch.cat([cls, text], 1)  # Eq. 1
        seen = causal_mask(text.shape[1], asked, ids.device)
        if asked:
            masks = torch.full_like(ids[:, :asked], self.embed.mask_id)
            following = ids.shape[1] - asked + 1
            text = torch.cat([text, self.embed.words(masks, following)], 1)
        _, height, width = self.grid
        seen = F.pad(seen, (2 * (1 + height * width), 0), value=True)  # all see the images
        return text, seen[None, None]

    def mask(self, caption: Tensor) -> tuple[Tensor, Tensor]:
        """mask_words, or the released rules."""
        if self.cfg.mask_rules == "released":
            return released_mask_words(caption, self.vocab_size, self.cfg.mask_rate)
        return mask_words(caption, self.vocab_size, self.cfg.mask_rate)

    # -- pre-training; before and after: features (B, C, H, W); after is None for single images

    def mlm(self, before: Tensor, after: Tensor | None, caption: Tensor) -> dict[str, Tensor]:
        """Eq. 6: predict masked words of captions (B, L) from the other words and the images."""
        ids, target = self.mask(caption)
        visual = self.encode(before, after)  # Eq. 4
        _, text = self.joint(visual, ids)  # Eq. 5
        logits = self.head(text[:, 1:])  # without [CLS]
        return {"mlm": word_loss(logits, target)}  # Eq. 6

    def mvcl(self, before: Tensor, after: Tensor | None, caption: Tensor) -> dict[str, Tensor]:
        """Eq. 7-8: recognise masked cells of one image of each pair from the pair's other cells and
        its caption (B, L)."""
        cfg = self.cfg
        predicted, features, masked = self.predict_cells(before, after, caption)
        loss = cell_loss if cfg.mvcl_negatives == "features" else released_cell_loss
        return {"mvcl": loss(predicted, features, masked, cfg.tau_mvcl)}  # Eq. 7-8

    def predict_cells(
        self, before: Tensor, after: Tensor | None, caption: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mask cells, and predict all -> predictions and features (M, C) of all cells of the batch,
        in the order (B, images, N), and the places of the masked ones among them (n,)."""
        images = before[:, None] if after is None else torch.stack([before, after], 1)
        cells = images.flatten(3).transpose(2, 3)  # (B, 1 or 2, N, C)
        features = cells.flatten(0, 2)  # (M, C), of all cells of the batch
        masked = mask_cells(*cells.shape[:3], self.cfg.cell_mask_rate, cells.device)
        shown = features.index_fill(0, masked, 0).view_as(cells)
        shown = shown.transpose(2, 3).view_as(images)
        visual = self.encode(*shown.unbind(1))  # Eq. 4
        visual, _ = self.joint(visual, caption)  # Eq. 5
        _, count, n, _ = cells.shape
        visual = visual[:, : count * (1 + n)].unflatten(1, (count, 1 + n))  # (B, 1 or 2, 1 + N, D)
        hidden = self.cell_head(visual[:, :, 1:])  # without [IMG1] and [IMG2]
        # As released, the projection's weights, transposed, map back to features.
        predicted = hidden @ self.embed.project.weight + self.cell_bias
        return predicted.flatten(0, 2), features, masked

    def fda(
        self, before: Tensor, after: Tensor | None, caption: Tensor, rewritten: Tensor
    ) -> dict[str, Tensor]:
        """Eq. 9: tell captions (B, L) from six rewrites of each (B, 6, L), so that details have to
        be compared."""
        visual = self.encode(before, after)  # Eq. 4
        ids = torch.cat([caption[:, None], rewritten], 1)  # (B, 7, L)
        visual = visual.repeat_interleave(ids.shape[1], 0)  # (7B, S, D)
        visual, text = self.joint(visual, ids.flatten(0, 1))  # Eq. 5
        image = self.image_tokens(visual).mean(1).view(*ids.shape[:2], -1)  # (B, 7, D)
        text = text[:, 0].view(*ids.shape[:2], -1)  # [CLS], (B, 7, D)
        return {"fda": align_loss(image, text, self.cfg.tau_fda)}  # Eq. 9

    def birds(self, before: Tensor, after: Tensor, classes: Tensor) -> dict[str, Tensor]:
        """Section 2.4. classes (B, 2) of both images, which have no caption."""
        x_1, x_2 = self.encode_each(before, after)  # E_s of Eq. 4
        visual = self.encode_pair(x_1, x_2)  # E_p of Eq. 4
        alone = torch.cat([x_1[:, 0], x_2[:, 0]])  # [IMG1] and then [IMG2] of all pairs, (2B, D)
        pair = self.image_tokens(visual).flatten(1)  # (B, 2D)
        class_of = classes.T.flatten()  # (2B,)
        return {
            "class": class_loss(self.classify(alone), class_of),
            "contrast": contrast_loss(alone, class_of),
            "same_class": same_class_loss(self.same_class(pair), classes),
        }

    # -- fine-tuning

    def finetune(
        self, before: Tensor, after: Tensor, caption: Tensor, changed: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Features (B, C, H, W) and captions (B, L) -> L_MLM, in which a word sees only earlier
        words. Given `changed`, bool (B,), False for distractors, also L_judge.

        In the paper and the released code (finetune_targets="masked"), 15 % of the words are masked
        and predicted. [ours] With "every", each word is predicted from a [MASK] in its place, as
        decoding does. docs/results.md compares the two."""
        cfg = self.cfg
        visual = self.encode(before, after)  # Eq. 4
        if cfg.finetune_targets == "every":
            ids = caption[:, :-1]
            target = caption[:, 1:]
            text, seen = self.causal_text(ids, asked=ids.shape[1])
        else:
            ids, target = self.mask(caption)
            text, seen = self.causal_text(ids)
        # As released, images see only images. In the paper, "the attention on the visual side does
        # not change", so they seem to see the text, too, but then a word would learn about later
        # words through the images.
        visual, images = self.cross(visual)  # Eq. 5
        text, _ = self.cross(text, seen, images)  # Eq. 5
        asked = text[:, -target.shape[1] :]  # the [MASK]s that follow the words, or all words
        losses = {"caption": word_loss(self.head(asked), target, cfg.reduction)}  # Eq. 6
        if changed is not None:
            logits = self.judge(self.image_tokens(visual).flatten(1))  # section 3.1
            losses["judge"] = judge_loss(logits, changed, cfg.reduction)
        return losses

    # -- captions

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor) -> Tensor:
        """Features (B, C, H, W) of both images -> ids of greedy captions (B, max_len). Unlike the
        released code, it does not write UNK."""
        visual = self.encode(before, after)
        _, images = self.cross(visual)

        def next_word(ids: Tensor) -> Tensor:
            text, seen = self.causal_text(ids, asked=1)
            text, _ = self.cross(text, seen, images)
            return self.head(text[:, -1])

        return decode(next_word, before.shape[0], self.max_len, before.device)

    @torch.no_grad()
    def attention_map(self, before: Tensor, after: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """word_attention, averaged over the words of ids (B, L) -> "before" and "after" (B, H, W),
        which together sum to 1, or to 0 for a caption without words."""
        weight = self.word_attention(before, after, ids).flatten(2)  # (B, L - 1, 2N)
        weight = masked_mean(weight, is_word(ids[:, 1:]))  # (B, 2N)
        _, height, width = self.grid
        map_before, map_after = weight.unflatten(1, (2, height, width)).unbind(1)
        return {"before": map_before, "after": map_after}

    @torch.no_grad()
    def word_attention(self, before: Tensor, after: Tensor, ids: Tensor) -> Tensor:
        """The last layer's attention from the [MASK] of each word of ids (B, L), without START, to
        the cells of both images, averaged over heads -> (B, L - 1, 2, H, W)."""
        _, height, width = self.grid
        visual = self.encode(before, after)
        count = ids.shape[1] - 1
        text, seen = self.causal_text(ids[:, :-1], asked=count)
        _, images = self.cross(visual)
        _, states = self.cross(text, seen, images)
        query = states[-1].query[:, -count:]  # of the [MASK]s, (B, L - 1, D)
        key = images[-1].key  # (B, S, D)
        scores = self.cross.blocks[-1].attention.scores(query, key)  # (B, h, L - 1, S)
        scores = scores.unflatten(-1, (2, -1))[..., 1:]  # without [IMG1] and [IMG2]
        weight = scores.flatten(-2).softmax(-1).mean(1)  # (B, L - 1, 2N)
        return weight.unflatten(2, (2, height, width))


# ---- presets -------------------------------------------------------------------------------------

# The paper counts the pairs of a batch, but we count its scenes, which on CLEVR-Change have two
# pairs each. So Table 6's 200 pairs are 100 scenes.
PRESETS = {
    # Config's defaults are those of this data set, from Table 6 and section 3.1.
    "clevr_change": dict(seed=1234, extractor="resnet101-layer4",  # appendix A.1; section 3.1
                         lr=3e-5, batch_size=100,  # Table 6
                         steps=100000, eval_every=400, patience=50),  # released
    "birds_to_words": dict(seed=1234, layers=2, mlm=9,  # section 3.1
                           pretrain_steps=50000, pretrain_warmup=4000, pretrain_batch=200,  # T. 6
                           lr=3e-5, weight_decay=1e-4, batch_size=32,  # Table 6
                           steps=20000, eval_every=85, patience=80,  # released
                           select_by="ROUGE-L"),  # section 3.1
    # [ours] Your own pairs are usually few: half the width, and no pre-training; with it, fewer
    # unchanged validation pairs were said to be unchanged (docs/results.md). SCORER's presets
    # explain the schedule.
    "pairs": dict(pretrain_steps=0, dim=256, ffn=1024, layers=2, batch_size=16, lr=5e-4,
                  schedule="cosine", warmup=50, grad_clip=1.0, steps=2000, eval_every=1000,
                  select_by="ROUGE-L"),
    # [ours] Pre-training is MVCL alone, because MLM can be learned without the images. The
    # temperature is low because features of any two cells have cosines near 1. Most cells are
    # masked, so that neighbours do not reveal a cell. Validation chose layers, lr and w_judge.
    "mini": dict(dim=128, ffn=256, heads=4, layers=3, dropout=0.0, pretrain_steps=1200,
                 pretrain_batch=8, pretrain_lr=1e-3, pretrain_warmup=50, mlm=0, fda=0,
                 cell_mask_rate=0.7, tau_mvcl=0.02, tau_fda=0.1, w_judge=0.2, batch_size=16,
                 lr=1e-3, schedule="cosine", warmup=100, grad_clip=1.0, steps=3000, eval_every=300,
                 eval_batch=250),
}  # fmt: skip

# --variant released: where the released code differs from the defaults. A default follows the
# paper, unless a comment says [ours] or "as released". CLEVR-Change keeps the paper's steps and
# learning rates. A comment describes the default, and gives the place in github.com/yaolinli/IDC at
# 6f3aabf.
#
# A test compares the variant with values recorded from the released modules. It leaves out their
# outputs for [MASK] and [CLS], and their LayerNorms (see Transformer): with PyTorch's, losses
# differ by up to 3e-4 of their value, and gradients by up to 3e-3.
RELEASED = {
    "all": dict(
        # default: [ours] swaps, see the field. clver/data/dataset_pretrain_clver.py:45-46
        swap=False,
        # default: every word, from a [MASK] [ours]. Section 2.3 predicts MLM's 15 % of the words.
        finetune_targets="masked",  # clver/data/dataset_finetune_clver.py:144-160
        # default: Xavier-uniform [ours]. clver/modules_pretrain.py:31-42
        init_weights="pytorch",
        # default: section 2.1's; see ReleasedEmbedding
        embedding="released",  # clver/modules_pretrain.py:32, 50-58, 378-420
        # default: Eq. 8's features of unmasked cells. clver/modules_pretrain.py:146-149, 154-166
        mvcl_negatives="predictions",
        # default: no [ours]; the paper is silent on it in pre-training
        see_padding=True,  # clver/modules_pretrain.py:117, 133, 184
        # default: yes; section 2.3 feeds [CLS] in inference. clver/modules_finetune.py:52-61
        finetune_cls=False,
        # default: section 2.2's, any word but UNK; see mask_words.
        mask_rules="released",  # clver/data/dataset_pretrain_clver.py:156-200
        # default: the paper's warm-up alone; in fine-tuning, no decay [ours]
        rates="released",  # clver/utils.py:149-153, 162-169
        # default: the mean, which the released code, too, takes in pre-training
        reduction="sum",  # clver/finetune.py:156-162
        # Not switched: its samples are captions, its FDA draws pairs of its own, captions are
        # padded to 40 or 80 ids, and on birds no weights before step 2000 are chosen.
    ),
    "clevr_change": {},
    # Table 6: 50000 steps and 200 pairs. The released files instead have 60000 and 150
    # (bird/config/pretrain_bird_nabirds.json:13-14). The paper does not give CUB's batch
    # (bird/config/pretrain_cub.json:14). Fine-tuning stays at Table 6's 32 pairs:
    # bird/config/finetune_bird.json:12 has 128, but the README's command overrides it by 32.
    "birds_to_words": dict(pretrain_steps=60000, pretrain_batch=150, cub_batch=350),
}

# IDC with pre-training in the paper's tables, which a run prints below its scores
PUBLISHED = {
    "clevr_change": {  # Table 2
        "total": {"BLEU-4": 51.2, "METEOR": 36.2, "ROUGE-L": 71.7, "CIDEr": 128.9}},
    "birds_to_words": {  # Table 1; with --cub and --nabirds 31.0, 23.4, 49.1, 25.3
        "total": {"BLEU-4": 28.0, "METEOR": 23.1, "ROUGE-L": 48.4, "CIDEr": 18.6}},
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------


def tasks(cfg: Config, stage: str) -> list[Callable]:
    """The tasks of a stage, methods of IDC that return losses, each as often as its share says."""
    if stage == "finetune":
        return [IDC.finetune]
    choice = [IDC.mlm] * cfg.mlm + [IDC.mvcl] * cfg.mvcl + [IDC.fda] * cfg.fda
    if cfg.nabirds and stage == "pretrain":
        choice += [IDC.birds] * 3  # a fifth of 9 + 1 + 2 + 3, as in appendix A.3
    return choice


def draw_task(cfg: Config, stage: str, step: int) -> Callable:
    """The task of a step, drawn according to the shares. It depends only on seed and step."""
    choice = tasks(cfg, stage)
    rng = np.random.default_rng([cfg.seed, step])
    return choice[rng.integers(len(choice))]


def compute_losses(
    model: IDC, batches: tuple, cfg: Config, task: Callable = IDC.finetune, rewrites=None
) -> dict[str, Tensor]:
    """The losses of a task, except birds, on the data.Batches of a step: (changed pairs, distractor
    pairs) or (all pairs,). rewrites, for fda: pair ids -> (B, 6, L), such as Negatives."""
    inputs = []
    for n, batch in enumerate(batches):
        batch = batch.to(cfg.device)
        after = None if batch.single else batch.after
        x = (batch.before, after, batch.caption)
        if task is IDC.fda:
            x = with_rewrites(*x, batch.pair_ids, rewrites)
        elif task is IDC.finetune and len(batches) == 2:  # otherwise there is nothing to judge
            is_changed = n == 0
            changed = torch.full(batch.caption.shape[:1], is_changed, device=cfg.device)
            x = (*x, changed)
        inputs.append(x)
    return mean_losses(model, cfg, task, inputs)


def with_rewrites(
    before: Tensor, after: Tensor | None, caption: Tensor, pair_ids: list[str], rewrites: Callable
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The inputs of IDC.fda: a seventh of the pairs (as released), because each has 7 captions."""
    count = max(1, len(pair_ids) // (1 + REWRITES))
    if after is not None:
        after = after[:count]
    rewritten = rewrites(pair_ids[:count]).to(before.device, non_blocking=True)
    return before[:count], after, caption[:count], rewritten


def mean_losses(model: IDC, cfg: Config, task: Callable, inputs: list) -> dict[str, Tensor]:
    """The losses of one step, each a mean over the batches, and their total. task: a method of IDC;
    inputs: its arguments for each batch.

    [ours] Changed and distractor pairs stay separate because they share their "before" images. A
    joint contrastive loss would treat an image as its own negative. (The released code has one
    mixed batch. So with reduction="sum", the mean over the two is half of the released sum.)"""
    losses: dict[str, Tensor] = {}
    for batch in inputs:
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.on_cuda):
            terms = model(*batch, task=task)
        for name, term in terms.items():
            losses[name] = losses.get(name, 0) + term / len(inputs)
    losses["total"] = total_loss(losses, cfg)
    return losses


# ---- training ------------------------------------------------------------------------------------


def stages(cfg: Config) -> list[tuple[str, int, int]]:
    """The stages of a run, each with its first step and the step after its last."""
    counts = {"pretrain": cfg.pretrain_steps, "finetune": cfg.steps}
    if cfg.cub:
        counts = {"cub": cfg.pretrain_steps} | counts
    result = []
    first = 0
    for stage, count in counts.items():
        if count:
            result.append((stage, first, first + count))
        first += count
    return result


def stage_rate(cfg: Config, stage: str, step: int) -> float:
    """The learning rate of a step of a stage. Steps count from 0 in each stage."""
    if cfg.rates == "released":
        return released_rate(cfg, stage, step)
    if stage == "finetune":
        return learning_rate(cfg, step)
    return cfg.pretrain_lr * min((step + 1) / max(1, cfg.pretrain_warmup), 1.0)


def train(cfg: Config, dataset, resume: bool = False) -> IDC:
    """Pre-train, then fine-tune on a data set (data.Dataset) into cfg.out_dir -> the best model by
    validation. The weights after pre-training stay in pretrained.pt, for --init.

    `resume` continues from last.pt, which is saved every eval_every steps, as if training had never
    stopped. FloatingPointError if a loss is not finite."""
    from support.run import Run

    datasets = dict.fromkeys([stage for stage, _, _ in stages(cfg)], dataset)
    if "cub" in datasets:
        datasets["cub"] = open_cub(cfg, dataset)
        dataset.max_len = max(dataset.max_len, datasets["cub"].max_len)  # the model is for both
    rewrites = {}
    for stage, stage_data in datasets.items():
        if cfg.fda and stage != "finetune":
            rewrites[stage] = Negatives(stage_data)
    birds = Birds(cfg) if cfg.nabirds and cfg.pretrain_steps else None
    sizes = {"pretrain": cfg.pretrain_batch, "finetune": cfg.batch_size}
    sizes["cub"] = cfg.cub_batch or cfg.pretrain_batch
    torch.manual_seed(cfg.seed)
    model = IDC(cfg, len(dataset.vocab), dataset.grid, dataset.max_len).to(cfg.device)
    if cfg.init and not resume:
        load_init(model, cfg, dataset)
    parameters = list(model.parameters())
    if cfg.compile and cfg.on_cuda:
        model.compile(fullgraph=True, dynamic=False)
    run = Run(cfg, model, [dataset], resume)
    for stage, first, last in stages(cfg):
        if run.step >= last:  # done before the run was resumed
            continue
        decay = cfg.weight_decay if stage == "finetune" else 0.0
        optimizer = torch.optim.Adam(parameters, weight_decay=decay, fused=True)
        run.start(optimizer, stage, last)
        pairs = datasets[stage]
        done = run.step - first  # more than 0 if the run was resumed in this stage
        for batches in pairs.train_batches(sizes[stage], cfg.seed, done, last - first):
            if run.patience_is_over():
                break
            optimizer.param_groups[0]["lr"] = stage_rate(cfg, stage, run.step - first)
            task = draw_task(cfg, stage, run.step)
            if task is IDC.birds:  # which leaves the step's pairs unused
                losses = mean_losses(model, cfg, task, [birds.batch(cfg.device)])
            else:
                losses = compute_losses(model, batches, cfg, task, rewrites.get(stage))
            optimizer.zero_grad()
            losses["total"].backward()
            if cfg.grad_clip > 0:
                nn.utils.clip_grad_norm_(parameters, cfg.grad_clip)
            optimizer.step()
            run.step += 1
            run.log(losses)
            if (run.step - first) % cfg.eval_every == 0 or run.step == last:
                if stage == "finetune":
                    run.checkpoint(evaluate(model, dataset, "val", cfg))
                    model.train()
                else:
                    run.log_losses()
                    run.save("pretrained.pt")  # the latest weights of pre-training
                    run.save("last.pt")
    return run.best_model()


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(
    model: IDC, dataset, split: str, cfg: Config, out_dir: Path | None = None
) -> dict[str, float]:
    """Caption a split of a data set (data.Dataset) -> the scores of all its pairs together.

    Without out_dir, for validation during training, these are the quick metrics. With out_dir,
    every metric of every group of pairs is printed and written, with captions and pictures."""
    model.eval()
    captions = {}  # by pair id
    maps = {}
    for batch in dataset.eval_batches(split, cfg.eval_batch):
        batch = batch.to(cfg.device)
        ids = model.generate(batch.before, batch.after)
        captions |= zip(batch.pair_ids, dataset.vocab.decode(ids), strict=True)
        if out_dir:
            batch_maps = model.attention_map(batch.before, batch.after, ids)
            for b, pair_id in enumerate(batch.pair_ids):
                maps[pair_id] = {name: m[b] for name, m in batch_maps.items()}
    return dataset.results(split, captions, maps, out_dir, published=PUBLISHED)


def load(checkpoint: str | Path, device: str = "", extractor: str = ""):
    """A trained model that captions any two pictures (files or PIL images):
    caption, maps = load("best.pt")(before, after). extractor: see load_captioner."""
    from support.captioner import load_captioner

    return load_captioner(IDC, Config, checkpoint, device, extractor)


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption pictures."""
    from support.captioner import caption_files
    from support.releases import all_presets
    from support.run import load_model, parse_args

    cfg, args = parse_args(Config, all_presets(PRESETS), RELEASED, argv)
    if args.caption:
        captioner = load(args.checkpoint, cfg.device, cfg.extractor)
        caption_files(captioner, args.caption, args.out)
        return
    dataset = open_dataset(cfg, make=args.eval is None)
    if args.eval is not None:
        model, state = load_model(IDC, cfg, args.eval)
        dataset.adopt(state)
    else:
        model = train(cfg, dataset, args.resume)
    if args.split != "none":
        evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir))


# ---- rewritten captions --------------------------------------------------------------------------

ANIMAL = re.compile(r"\b(animal ?)([12])\b", re.IGNORECASE)  # Birds-to-Words' names of both images
# [ours] A word of KINDS is replaced only by words of the same kind, any other word only by words
# with the same tag. A string lists synonyms.
KINDS = {
    "size": ["small tiny", "large big"],
    "color": ["gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow"],
    "material": ["rubber matte", "metal metallic shiny"],
    "shape": ["cube block", "sphere ball", "cylinder"],
}
MEANING = {}  # each word of KINDS -> its kind and its synonyms
for _kind, _entries in KINDS.items():
    for _synonyms in _entries:
        MEANING |= dict.fromkeys(_synonyms.split(), (_kind, _synonyms))


class Negatives:
    """Section "FDA": six rewritten captions of every training pair. Their file is named after a
    hash of all captions: rewrites made from other captions could be true of a pair."""

    def __init__(self, dataset):
        from support.files import write_text

        unchanged = dataset.kinds.get("no change", set())
        made_from = [[p.id, p.id in unchanged, p.captions] for p in dataset.pairs("train")]
        content = json.dumps(made_from).encode()
        digest = hashlib.sha256(content).hexdigest()
        path = dataset.root / f"negatives-{digest[:12]}.json"
        if not path.exists():
            write_text(path, json.dumps(rewrite(dataset)))
        self.texts = json.loads(path.read_text(encoding="utf-8"))  # by pair id
        self.max_len = dataset.max_len  # longer rewrites are cut
        self.vocab = dataset.vocab

    def __call__(self, pair_ids: list[str]) -> Tensor:
        """-> the pairs' rewritten captions (B, 6, L), padded to the data set's longest caption."""
        ids = []
        for pair_id in pair_ids:
            ids.append([self.vocab.encode(c, self.max_len) for c in self.texts[pair_id]])
        return torch.tensor(ids)


def rewrite(dataset) -> dict[str, list[str]]:
    """Each training pair's id -> its six negatives, two each from Retrieve, Replace and Confuse
    (section "Implementation Details": "retrieve:replace:confuse=2:2:2").

    [ours] All captions of a pair share its negatives. Single images (CUB) have no subjects to
    confuse, so they have three negatives from Retrieve and three from Replace. If a strategy finds
    too few, the next one fills the gap; after Confuse, Retrieve and then Replace do. On
    CLEVR-Change and mini, a scene's changed pair and its distractor pair share five rewrites of the
    change, one from Retrieve, two from Replace and two from Confuse. The sixth is a caption of the
    other pair, so that the text alone does not reveal to which of the two pairs the six belong."""
    templates = dataset.settings.templates
    scenes = dataset.scenes["train"]
    unchanged = dataset.kinds.get("no change", set())
    captions = []
    changes = []
    for scene in scenes:
        for p in scene.pairs:
            captions += p.captions
            if p.id not in unchanged:
                changes += p.captions
    captions = list(dict.fromkeys(captions))
    changes = list(dict.fromkeys(changes))
    idf = inverse_frequency(captions)
    tokens, words, subjects = parse(dataset, captions)
    pool = pools([words[c] for c in changes], idf)
    all_subjects = sorted({s for c in changes for s in subjects[c]})
    queries = [" ".join(scene.pairs[0].captions) for scene in scenes]
    nearest = retrieve(queries, changes, idf)

    negatives = {}
    for number, (scene, near) in enumerate(zip(scenes, nearest, strict=True)):
        rng = np.random.default_rng([len(captions), number])
        pair = scene.pairs[0]
        originals = rng.permutation(pair.captions * REWRITES).tolist()
        # The strategies are generators, which make a candidate only when it is needed.
        retrieved = (changes[i] for i in near)
        replaced = (
            replace_words(tokens[c], important(words[c], idf), pool, rng) for c in originals
        )
        confused = (confuse(c, subjects[c], all_subjects, rng) for c in originals)
        count = REWRITES + 1 - len(scene.pairs)  # 6, or 5 beside a caption of the other pair
        if pair.after is None:
            turns = [(retrieved, 3), (replaced, 6)]
        else:
            turns = [(retrieved, count - 4), (replaced, count - 2), (confused, count)]
        turns += [(retrieved, count), (replaced, count)]
        chosen = choose(turns, scene, templates)
        if len(chosen) < count:
            raise InputError(
                f"only {len(chosen)} rewritten captions can be made for {pair.id}, expected "
                f"{count}: {dataset.root} has too few different captions; set --fda 0"
            )
        if len(scene.pairs) == 1:
            negatives[pair.id] = chosen
        else:
            _, other = scene.pairs
            negatives[pair.id] = [*chosen, str(rng.choice(other.captions))]
            negatives[other.id] = [*chosen, str(rng.choice(pair.captions))]
    return negatives


def choose(turns: list[tuple], scene, templates: bool) -> list[str]:
    """Different candidates that are false of a scene. turns: (candidates, how many texts there may
    be after this turn). [ours] If captions come from templates, a candidate counts as false if,
    about the first object that it names, it says something that no caption of the pair says.
    Otherwise, or if the pair's captions name no object, any text but the scene's captions counts as
    false."""
    pairs = [*scene.pairs, *(scene.swapped or ())]
    true = {c for p in pairs for c in p.captions}
    mentioned = set()
    if templates:
        for c in scene.pairs[0].captions:
            mentioned |= named(c)
    chosen = []
    for candidates, end in turns:
        while len(chosen) < end:
            text = next(candidates, None)
            if text is None:
                break
            is_new = text not in true and text not in chosen
            if is_new and (not mentioned or named(text) - mentioned):
                chosen.append(text)
    return chosen


def named(text: str) -> set[tuple[str, str]]:
    """What a caption says in words of KINDS about the first object that it names, if any."""
    properties = set()
    for word in re.findall(r"\w+", text.lower()):
        kind = ""
        if word in MEANING:
            properties.add(MEANING[word])
            kind, _ = MEANING[word]
        if kind == "shape" or word in ("thing", "object"):
            return properties
    return set()


def inverse_frequency(texts: list[str]) -> dict[str, float]:
    """[ours] Smoothed idf of every word of n different captions: ln((1 + n) / (1 + df)) + 1."""
    df = Counter()
    for text in texts:
        df.update(set(text.lower().split()))
    return {word: math.log((1 + len(texts)) / (1 + df[word])) + 1 for word in sorted(df)}


def tfidf(texts: list[str], idf: dict[str, float]) -> Tensor:
    """TF-IDF of n texts -> sparse (n, number of words), each row of length 1."""
    column = {word: j for j, word in enumerate(idf)}
    places = []
    values = []
    for i, text in enumerate(texts):
        counts = Counter(text.lower().split())
        weights = {word: n * idf[word] for word, n in counts.items()}
        length = math.hypot(*weights.values())
        for word, weight in weights.items():
            places.append((i, column[word]))
            values.append(weight / length)
    shape = (len(texts), len(idf))
    return torch.sparse_coo_tensor(torch.tensor(places).T, values, shape, check_invariants=True)


def retrieve(queries: list[str], texts: list[str], idf: dict[str, float], count: int = 1000):
    """Section "Retrieve": for each query, yield the indices of the `count` texts that are most
    similar to it, best first."""
    from support.files import progress

    corpus = tfidf(texts, idf)
    count = min(count, len(texts))
    for i in progress(range(0, len(queries), 64), desc="rewriting captions"):
        block = tfidf(queries[i : i + 64], idf).to_dense()
        similarity = (corpus @ block.T).T  # (64, texts)
        yield from similarity.topk(count).indices.tolist()


def parse(dataset, texts: list[str]) -> tuple[dict, dict, dict]:
    """For each text: its tokens, each with the space after it; its words of KINDS, nouns and
    adjectives, each as (index of the token, word, kind or tag); its subjects. [ours] spaCy finds
    nouns and adjectives, but the paper uses "Stanford CoreNLP tool" (section "Replace"). spaCy does
    not read captions from templates, so only words of KINDS are replaced in these."""
    from support.text import analysed, subjects

    tokens = {}
    words = {}
    subjects_of = {}
    docs = analysed(texts, dataset.settings.templates)
    for text, doc in zip(texts, docs, strict=True):
        if isinstance(doc, str):  # from a template
            tagged = [(token, "", "") for token in re.findall(r"\w+\s*|\W\s*", doc)]
        else:
            tagged = [(token.text_with_ws, token.pos_, token.tag_) for token in doc]
        tokens[text] = [token for token, _, _ in tagged]
        subjects_of[text] = subjects(doc)
        words[text] = []
        for i, (token, pos, tag) in enumerate(tagged):
            word = token.strip().lower()
            if word in MEANING:
                kind, _ = MEANING[word]
                words[text].append((i, word, kind))
            elif pos in ("NOUN", "ADJ"):
                words[text].append((i, word, tag))
    return tokens, words, subjects_of


def important(words: list[tuple[int, str, str]], idf: dict[str, float]) -> list[tuple]:
    """The half (rounded up) of a caption's nouns and adjectives that has the highest TF-IDF."""
    count = Counter(word for _, word, _ in words)

    def weight(entry: tuple[int, str, str]) -> float:
        _, word, _ = entry
        return count[word] * idf.get(word, 1.0)

    ranked = sorted(words, key=weight, reverse=True)
    return ranked[: (len(words) + 1) // 2]


def pools(captions: list[list[tuple]], idf: dict[str, float]) -> dict[str, list[str]]:
    """Appendix A.2: for each kind or tag, the words that are important in at least one caption and
    occur in at least ten. [ours] Equal captions count once."""
    occurs = Counter()
    chosen = set()
    for words in captions:
        occurs.update({(kind, word) for _, word, kind in words})
        chosen |= {(kind, word) for _, word, kind in important(words, idf)}
    pool: dict[str, list[str]] = {}
    for kind, word in sorted(chosen):
        if occurs[kind, word] >= 10:
            pool.setdefault(kind, []).append(word)
    return pool


def replace_words(tokens: list[str], words: list, pool: dict[str, list[str]], rng) -> str:
    """Section "Replace": replace the important `words` by different ones of the same kind or tag,
    if there are any."""
    tokens = list(tokens)
    for i, word, kind in words:
        meaning = MEANING.get(word, word)
        choice = [other for other in pool.get(kind, ()) if MEANING.get(other, other) != meaning]
        if choice:
            drawn = choice[rng.integers(len(choice))]
            tokens[i] = tokens[i].replace(tokens[i].strip(), drawn)
    return "".join(tokens)


def confuse(text: str, own: list[str], subjects: list[str], rng) -> str:
    """Section "Confuse": swap "animal 1" and "animal 2". In a caption without both, replace the
    subject (the first of `own`) by another one of as many words, if there is one."""
    numbers = {number for _, number in ANIMAL.findall(text)}
    if len(numbers) == 2:
        return ANIMAL.sub(other_animal, text)
    found = [re.search(rf"\b{re.escape(s)}\b", text, re.IGNORECASE) for s in own]
    found = [match for match in found if match]
    if not found:
        return text
    subject = found[0].group().lower()
    start, end = found[0].span()
    spaces = subject.count(" ")
    choice = [s for s in subjects if s != subject and s.count(" ") == spaces]
    if not choice:
        return text
    return text[:start] + choice[rng.integers(len(choice))] + text[end:]


def other_animal(match: re.Match) -> str:
    """A match of "animal 1" -> "animal 2", and the other way round."""
    name, number = match.groups()
    other = "2" if number == "1" else "1"
    return name + other


# ---- cross-task data -----------------------------------------------------------------------------


def open_dataset(cfg: Config, make: bool = True):
    """The data set of a run, as in data.open_dataset. With --cub, its words are those of both."""
    import data
    from support.releases import read_release, vocab_of
    from support.text import SPECIAL, Vocab

    for stage, _, _ in stages(cfg):
        if stage != "finetune" and not tasks(cfg, stage):
            raise InputError("--mlm 0 --mvcl 0 --fda 0 leave no task; give --pretrain_steps 0")
    dataset = data.open_dataset(cfg, make)
    if cfg.cub:
        cub = vocab_of("cub", read_release("cub", Path(cfg.cub)))
        vocab = dataset.vocab
        words = set(cub.words).union(vocab.words) - set(SPECIAL)
        dataset.vocab = Vocab(SPECIAL + sorted(words), vocab.tokenizer, vocab.max_words)
    if not cfg.swap:
        scenes = dataset.scenes["train"]
        dataset.scenes["train"] = [replace(scene, swapped=None) for scene in scenes]
    return dataset


def load_init(model: IDC, cfg: Config, dataset) -> None:
    """Start from the weights of --init. InputError if they would work differently in this model."""
    from support.files import load_tensors, load_weights

    state = load_tensors(cfg.init, device=cfg.device)
    dataset.check_fit(state)
    load_weights(model, state["model"], cfg.init)
    heads = state["config"]["heads"]  # the shapes of the weights do not show it
    if cfg.heads != heads:
        raise InputError(f"--init {cfg.init} was trained with --heads {heads}; give the same")


def open_cub(cfg: Config, dataset):
    """Section 2.4, general image captioning: captioned single images, in `dataset`'s vocabulary."""
    import data
    from support.text import Vocab

    cub = data.load("cub", cfg.cub, cfg)
    if cub.grid != dataset.grid:
        raise InputError(f"features of {cub.root}: {dataset.grid} expected, {cub.grid} found")
    cub.vocab = Vocab(dataset.vocab.words, cub.vocab.tokenizer, cub.vocab.max_words)
    return cub


class Birds:
    """Section 2.4, fine-grained classification: one pair for each of NABirds' 48,562 images."""

    def __init__(self, cfg: Config):
        import data
        from support.text import SPECIAL

        dataset = data.load("nabirds", cfg.nabirds, cfg)
        self.features = dataset.features
        self.names = []
        classes = []
        for split in dataset.scenes:
            for image in dataset.pairs(split):
                self.names.append(image.before)
                classes.append(dataset.vocab.index[image.captions[0]] - len(SPECIAL))
        self.classes = np.array(classes)
        self.partners = partners(self.classes, cfg.seed)
        self.size = cfg.pretrain_batch

    def batch(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Random pairs, by torch's generator -> before and after (B, C, H, W), classes (B, 2)."""
        first = torch.randint(len(self.names), (self.size,)).numpy()
        second = self.partners[first]
        before = self.features.rows([self.names[i] for i in first])
        after = self.features.rows([self.names[i] for i in second])
        before = before.to(device, non_blocking=True).float()
        after = after.to(device, non_blocking=True).float()
        classes = torch.from_numpy(np.stack([self.classes[first], self.classes[second]], 1))
        return before, after, classes.to(device, non_blocking=True)


def partners(classes: np.ndarray, seed: int) -> np.ndarray:
    """The index of a partner for every image. Half of the images have one of the same class, if
    there is one, and the rest have one of another class."""
    rng = np.random.default_rng(seed)
    places = np.arange(len(classes))
    alike = rng.permutation(len(classes)) < len(classes) // 2
    partner = []
    for i, c in enumerate(classes):
        same = (classes == c) & (places != i)
        fits = classes != c
        if alike[i] and same.any():
            fits = same
        partner.append(rng.choice(places[fits]))
    return np.array(partner)


# ---- as released ---------------------------------------------------------------------------------

# What embedding, mask_rules, mvcl_negatives and rates choose with --variant released.


class ReleasedEmbedding(Embedding):
    """Eq. 1-3, but [IMG1], [IMG2] and [CLS] share a vector, and have types of their own. A sigmoid
    follows the linear layer. Positions are doubled_sinusoid's. (Section 2.1 has three special
    tokens, three types, and the positions of Vaswani et al.)"""

    SPECIAL_TOKENS = 1
    TYPES = 6
    FIRST_TYPE = 3  # after those of [IMG1], [IMG2] and [CLS]

    def __init__(self, cfg: Config, vocab_size: int, channels: int, positions: int):
        super().__init__(cfg, vocab_size, channels, positions)
        self.position = doubled_sinusoid(positions, cfg.dim)

    def special(self, part: int, count: int) -> Tensor:
        x = self.table.weight[self.mask_id + 1] + self.types.weight[part]
        y = self.norm(x).expand(count, 1, -1)
        return self.dropout(y)

    def cells(self, features: Tensor) -> Tensor:
        return super().cells(features).sigmoid()


def doubled_sinusoid(length: int, dim: int) -> Tensor:
    """Positions (length, dim). Channel i has frequency 10000^(-2i/D), so the sine and the cosine of
    a pair differ in frequency, and most channels hardly vary."""
    channel = torch.arange(dim)
    angle = torch.arange(length)[:, None] / 10000 ** (2 * channel / dim)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos())


def released_mask_words(caption: Tensor, vocab_size: int, rate: float) -> tuple[Tensor, Tensor]:
    """As mask_words, but UNK is masked, too, END becomes [MASK] only, the first word becomes [MASK]
    if no word was drawn, and random words are drawn from all ids."""
    device = caption.device
    mask_id = vocab_size
    may_be_masked = (caption > END) | (caption == UNK)
    chosen = may_be_masked & (torch.rand(caption.shape, device=device) < rate)
    kind = torch.rand(caption.shape, device=device)
    none = ~chosen.any(1)
    chosen[:, 1] |= none
    kind[:, 1] = kind[:, 1].masked_fill(none, 0)
    # Also [MASK] and the first special token.
    random = torch.randint(NULL, vocab_size + 2, caption.shape, device=device)
    ids = torch.where(chosen & (kind < 0.9), random, caption)
    ids = ids.masked_fill(chosen & (kind < 0.8), mask_id)
    end = (caption == END) & (torch.rand(caption.shape, device=device) < rate)
    ids = ids.masked_fill(end, mask_id)
    return ids, caption.masked_fill(~(chosen | end), NULL)


def released_cell_loss(predicted: Tensor, features: Tensor, masked: Tensor, tau: float) -> Tensor:
    """As cell_loss, but the negatives are the predictions of unmasked cells and the features of the
    other masked cells. (Eq. 8 has the features of unmasked cells.)"""
    is_masked = torch.zeros_like(features[:, 0], dtype=torch.bool).index_fill(0, masked, True)
    with torch.autocast(features.device.type, enabled=False):
        p = F.normalize(upcast(predicted), dim=-1)
        f = F.normalize(features, dim=-1)
        candidates = torch.where(is_masked[:, None], f, p)
        s = p[masked] @ candidates.T / tau  # (n, M)
        return F.cross_entropy(s, masked)


def released_rate(cfg: Config, stage: str, step: int) -> float:
    """After the warm-up of pre-training, the rate falls as 1 / sqrt(step). In fine-tuning, it is
    halved at steps 10000 and 20000."""
    if stage == "finetune":
        return learning_rate(cfg, step) / 2 ** min(step // 10000, 2)
    if step == 0:
        return 1e-8  # the rates are one step behind those of stage_rate
    warmup = max(1, cfg.pretrain_warmup)
    return cfg.pretrain_lr * min(step / warmup, (warmup / step) ** 0.5)


if __name__ == "__main__":
    from support.files import run_main

    run_main(main)
