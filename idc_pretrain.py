"""IDC: Image Difference Captioning with Pre-training and Contrastive Learning
(Yao, Wang and Jin, AAAI 2022).

The flow of one pair, with CLEVR-Change's sizes (captions of 24 ids):
    before (2048, 7, 7)     after (2048, 7, 7)      caption (24)
       |  embed, Eq. 2         |  embed, Eq. 3         |  embed, Eq. 1
    v_1 (50, 512)           v_2 (50, 512)              |         v_i: [IMGi], then 49 cells
       |  single (E_s)         |  single (E_s)         |
       +-----------+-----------+                       |
                   |  pair (E_p), Eq. 4                |
    visual (100, 512)                       text (25, 512)       [CLS], START, 22 words, END
                   +-----------------+-----------------+
                                     |  cross (E), Eq. 5
    Pre-training. Every token sees all tokens but padding. A step has one task:
        some words are [MASK]            head: these words                   L_MLM, Eq. 6
        some cells are zeros             cell_head: their features           L_MVCL, Eq. 7-8
        the caption or a rewrite         cosine of [IMG1], [IMG2] to [CLS]   L_FDA, Eq. 9
    Fine-tuning. Images see only images. A word sees them, [CLS], earlier words and itself.
        a [MASK] for each word [ours]    head: that word                     L_MLM, Eq. 6
        [IMG1] and [IMG2]                judge: did anything change?         L_judge, Sec. 3.1
Gradients: nothing is detached. Each loss trains embed, E_s, E_p, E and, if it has one, its head.
The paper's fine-tuning masks 15 % of the words, as its pre-training does, and predicts only these.
On mini, pre-training is MVCL alone [ours].

Idea. (1) Captioned pairs are few and differences are small, so the model first learns which words
belong to which details: it predicts masked words (MLM), recognises masked cells (MVCL), and tells a
caption from six similar ones (FDA). (2) Like a person, it looks at each image alone (E_s) and
compares the two (E_p) before it thinks of words (E). (3) Fine-tuning is MLM in which a word sees
only earlier words, so that captions can be written word by word.

Terms. A changed pair shows a scene before and after a change. In a distractor pair, only camera and
light differ, and its caption says that nothing changed. In CLEVR-Change and mini, a scene has one
of each, with the same "before", and a step has a batch of each. In half of the scenes, "before" and
the distractor picture change places [ours].

Read first: Embedding, Block, mask_words, causal_mask, cell_loss, align_loss, and of IDC encode,
joint, mlm, predict_cells, fda, causal and finetune. Skip the last three sections at first.

Our copy of the paper has lost its formulas, so these are reconstructed from its text and the code
that the authors released. "As released" marks what only that code says, [ours] what neither says.
Equation  where            formula                                            as released or [ours]
Eq. 1     Embedding.text   w = [CLS] START w_1 ... END (paper: [BOS], [EOS])  words times sqrt(D)
Eq. 2-3   Embedding.image  v_i = [IMGi] v_i1 ... v_iN                         LN (also in Eq. 1)
Eq. 4     IDC.encode       v = E_p([E_s(v_1) ; E_s(v_2)])                     pre-norm (and Eq. 5)
Eq. 5     joint, causal    E([v ; w])                                         padding unseen [ours]
Eq. 6     word_loss        L_MLM = mean_m -log P(w_m | other words, v)        END is masked [ours]
Eq. 7-8   cell_loss        L_MVCL = mean_m -log e(f_m) / [e(f_m) + sum e(u)]  p_m by tied weights
Eq. 9     align_loss       L_FDA = -log e_0 / [e_0 + ... + e_6]               a seventh of a batch
Sec. 2.2  draw_task, mask_words, mask_cells; Negatives rewrites captions
Sec. 2.3  causal_mask, IDC.finetune, IDC.generate
Sec. 2.4  IDC.birds, contrast_loss, same_class_loss
Sec. 3.1  judge_loss       L = L_MLM + w_judge L_judge                        w_judge 1
m is a masked word or cell, f_m the cell's feature, p_m predicts f_m, u is an unmasked feature.

Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, h heads, L ids of a caption
(START, words, END, padding), V ids of the vocabulary, K ids that fine-tuning reads (L or L - 1), T
tokens, S = 2 (N + 1) visual tokens, M cells of a batch, n of them masked.
To copy: this file and common.py; to train, also data.py, scores.py and support/.
Licence: MIT. Written from the paper; it contains no code from the authors' repository.
"""

import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
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

    init: str = ""  # checkpoint to start from; with --pretrain_steps 0, it is only fine-tuned
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
    # In the following fields, the released code differs from our defaults. RELEASED, below, says
    # for each whether the default is the paper's or [ours].
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


# The parts of a sequence. They begin with [IMG1], [IMG2] and [CLS], and each has a type.
IMAGE_1, IMAGE_2, TEXT = range(3)


class Embedding(nn.Module):
    """Eq. 1-3: y = Dropout(LN(x + type + position)) for words, cells and special tokens, which
    share one LayerNorm and one table of types.

    As released, words are multiplied by sqrt(D), and special tokens have no position. In the paper,
    every token has a position (section 2.1)."""

    def __init__(
        self,
        cfg: Config,
        vocab_size: int,
        channels: int,
        positions: int,
        special_tokens: int = 3,
        types: int = 3,
    ):
        super().__init__()
        self.mask_id = vocab_size  # the id of [MASK]; those of the special tokens follow
        self.table = nn.Embedding(vocab_size + 1 + special_tokens, cfg.dim)
        self.types = nn.Embedding(types, cfg.dim)
        self.project = nn.Linear(channels, cfg.dim)
        self.norm = nn.LayerNorm(cfg.dim, eps=1e-12)
        self.dropout = nn.Dropout(cfg.dropout)
        self.register_buffer("position", sinusoid(positions, cfg.dim), persistent=False)
        self.scale = cfg.dim**0.5

    def image(self, features: Tensor, part: int) -> Tensor:
        """Features (B, C, H, W) -> [IMG1] or [IMG2], then the cells (B, 1 + N, D)."""
        cells = self.finish(self.cells(features), part)  # Eq. 2-3
        return torch.cat([self.special(part, cells.shape[0]), cells], 1)

    def text(self, ids: Tensor) -> Tensor:
        """(B, L) -> [CLS], then the words (B, 1 + L, D)."""
        return torch.cat([self.special(TEXT, ids.shape[0]), self.words(ids)], 1)  # Eq. 1

    def words(self, ids: Tensor, first: int = 0) -> Tensor:
        """(B, L) ids at positions first, first + 1, ... -> (B, L, D)."""
        assert first + ids.shape[1] <= len(self.position), "a caption has too many words"
        return self.finish(self.scale * self.table(ids), TEXT, first)  # Eq. 1

    def finish(self, x: Tensor, part: int, first: int = 0) -> Tensor:
        """Words or cells (B, T, D) -> the same, with type and position (B, T, D)."""
        x = x + self.type_of(part) + self.position[first : first + x.shape[1]]
        return self.dropout(self.norm(x))

    def special(self, part: int, count: int) -> Tensor:
        """The part's [IMG1], [IMG2] or [CLS], `count` times -> (count, 1, D)."""
        x = self.table.weight[self.special_id(part)] + self.types.weight[part]
        y = self.norm(x).expand(count, 1, -1)
        return self.dropout(y)  # Eq. 1-3

    def cells(self, features: Tensor) -> Tensor:  # ReleasedEmbedding differs from here on
        """(B, C, H, W) -> (B, N, D), n = row * W + column."""
        return self.project(features.flatten(2).transpose(1, 2))

    def type_of(self, part: int) -> Tensor:
        return self.types.weight[part]

    def special_id(self, part: int) -> int:
        return self.mask_id + 1 + part


class Block(nn.Module):
    """Pre-norm layer (as released): x + MHA(LN x), then x + W2 ReLU(W1 LN x)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.widen = nn.Linear(cfg.dim, cfg.ffn)  # W1
        self.output = nn.Linear(cfg.ffn, cfg.dim)  # W2
        self.norm1 = nn.LayerNorm(cfg.dim)
        self.norm2 = nn.LayerNorm(cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, T, D) -> the new x (B, T, D). mask: bool (B or 1, 1, T or 1, T), True where the
        row's token sees the column's. Without a mask, every token sees all tokens."""
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, mask=mask))
        wide = F.relu(self.widen(self.norm2(x)))  # (B, T, ffn)
        return x + self.dropout(self.output(self.dropout(wide)))


class Transformer(nn.Module):
    """As released, a LayerNorm stands before the blocks and none after them, so the heads read the
    residual stream. The LayerNorms are PyTorch's. The released ones divide by the unbiased standard
    deviation plus an epsilon."""

    def __init__(self, cfg: Config, layers: int):
        super().__init__()
        self.norm = nn.LayerNorm(cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, T, D) -> the new x (B, T, D). Block describes the mask."""
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, mask)
        return x

    def last_scores(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, D) -> what the last block's attention computes before its mask and softmax
        (B, h, T, T)."""
        x = self.norm(x)
        *earlier, last = self.blocks
        for block in earlier:
            x = block(x, mask)
        y = last.norm1(x)
        query, key, _ = last.attention.project(y, y)
        return last.attention.scores(query, key)


# ---- masks ---------------------------------------------------------------------------------------


def mask_words(caption: Tensor, vocab_size: int, rate: float) -> tuple[Tensor, Tensor]:
    """Section "MLM": each word is a target with probability `rate`. Of the targets, 80 % become
    [MASK], 10 % a random word, and 10 % stay. caption (B, L) -> ids with masks; targets, NULL
    elsewhere (B, L).

    [ours] END is masked like any word, because the model has to learn where a caption ends, and UNK
    is never masked. The paper mentions neither."""
    device = caption.device
    mask_id = vocab_size  # the first id after all words; the special tokens follow
    chosen = (caption >= END) & (torch.rand(caption.shape, device=device) < rate)
    kind = torch.rand(caption.shape, device=device)
    random = torch.randint(END + 1, vocab_size, caption.shape, device=device)
    to_mask = chosen & (kind < 0.8)
    to_random = chosen & (kind >= 0.8) & (kind < 0.9)
    ids = torch.where(to_random, random, caption).masked_fill(to_mask, mask_id)
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


def marked(places: Tensor, count: int) -> Tensor:
    """-> bool (count,), True at these places (n,)."""
    return torch.zeros(count, dtype=torch.bool, device=places.device).index_fill(0, places, True)


def causal_mask(visual: int, length: int, asked: int, device) -> Tensor:
    """Section 2.3: which token sees which in fine-tuning. The sequence begins with `visual` tokens
    of both images (v), which see only each other. Each of `length` tokens, [CLS] and words, sees
    the images, the tokens before it and itself. Then come `asked` [MASK]s, one for each of the last
    words. The [MASK] that predicts word t + 1 sees what word t sees, and itself, as in decoding.
    -> bool (T, T), T = visual + length + asked, True where the row's token sees the column's.

    With length = 3 and asked = 2, where w0 is START and m1, after w0, predicts w1:

                v | [CLS]  w0  w1 | m1  m2
        v       x |               |
        [CLS]   x |   x           |
        w0      x |   x    x      |
        w1      x |   x    x   x  |
        m1      x |   x    x      | x
        m2      x |   x    x   x  |     x

    As released, images do not see the text. In the paper, "the attention on the visual side does
    not change". But then words would see later words, and the judge the caption, through images."""
    text = torch.arange(length, device=device)
    before_text = torch.full((visual,), -1, device=device)
    place = torch.cat([before_text, text, text[length - asked :]])
    seen = place[:, None] >= place
    seen[:, visual + length :] = False  # no token sees a [MASK], ...
    return seen | torch.eye(len(place), dtype=torch.bool, device=device)  # ... but each sees itself


# ---- losses --------------------------------------------------------------------------------------


def word_loss(logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Eq. 6, L_MLM: the cross-entropy of masked words. logits (..., V), target (...), NULL where a
    position has no loss."""
    logits = logits.flatten(0, -2)
    total = F.cross_entropy(logits, target.flatten(), ignore_index=NULL, reduction="sum")  # Eq. 6
    if reduction == "sum":
        return total
    return total / (target != NULL).sum().clamp(min=1)


def cell_loss(predicted: Tensor, features: Tensor, masked: Tensor, tau: float) -> Tensor:
    """Eq. 7-8, L_MVCL: InfoNCE over cosines, the mean over masked cells m of

        -log e(f_m) / [e(f_m) + sum of e(f_u) over unmasked cells u], e(f) = exp(cos(p_m, f) / tau).

    predicted (p) and features (f) (M, C) are of all cells of the batch; masked (n,) holds the
    places of the masked ones.

    Example, tau = 1: features (1, 0), (0, 2), (3, 0); the first is masked and predicted as (2, 0).
    Its cosines are 1, 0 and 1, so the loss is -ln e / (e + 1 + e) = 0.862. The third cell looks the
    same, so at no temperature can the loss fall below ln 2 = 0.693."""
    with torch.autocast(features.device.type, enabled=False):  # bfloat16 is not precise enough
        s = cell_cosines(predicted, features, masked) / tau
        return F.cross_entropy(s, masked)  # Eq. 7-8: a cell's own feature is in its own column


def cell_cosines(predicted: Tensor, features: Tensor, masked: Tensor) -> Tensor:
    """For cell_loss: the cosine of each masked cell's prediction to its own feature and to those of
    all unmasked cells; -inf for the other masked cells. -> (n, M)"""
    p = F.normalize(upcast(predicted), dim=-1)
    f = F.normalize(features, dim=-1)
    is_masked = marked(masked, f.shape[0])
    own = masked[:, None] == torch.arange(f.shape[0], device=f.device)
    return (p[masked] @ f.T).masked_fill(is_masked & ~own, float("-inf"))


def align_loss(image: Tensor, text: Tensor, tau: float) -> Tensor:
    """Eq. 9, L_FDA: InfoNCE over cosines, the caption (j = 0) against its six rewrites,

        -log e_0 / [e_0 + ... + e_6], e_j = exp(cos(g_j, c_j) / tau).

    Each of the seven is read together with the images, in a sequence of its own. What E makes of
    it: image (g, the mean of [IMG1] and [IMG2]) and text (c, [CLS]), both (B, 7, D).

    Example, tau = 1: images (1, 0), caption (1, 0), six rewrites (0, 1). The cosines are 1 and six
    times 0, so the loss is -ln e / (e + 6) = 1.165. At tau = 0.1 it would be 0.0003."""
    s = F.cosine_similarity(image, text, dim=-1) / tau  # (B, 7)
    first = torch.zeros(s.shape[0], dtype=torch.long, device=s.device)
    return F.cross_entropy(s, first)  # Eq. 9


def judge_loss(logits: Tensor, changed: Tensor, reduction: str = "mean") -> Tensor:
    """Section 3.1, L_judge: is a pair changed or a distractor? logits (B, 2), changed (B,) bool."""
    return F.cross_entropy(logits, changed.long(), reduction=reduction)


def contrast_loss(x: Tensor, classes: Tensor, margin: float = 0.4) -> Tensor:
    """Section 2.4, TransFG's loss (He et al. 2021): it pulls cosines to 1 within a class and pushes
    them below the margin between classes. It is the mean over all ordered pairs of images, and each
    image also pairs with itself. x (2B, D), classes (2B,)."""
    with torch.autocast(x.device.type, enabled=False):
        x = F.normalize(upcast(x), dim=-1)
        cos = x @ x.T
        same = classes[:, None] == classes
        pull = 1 - cos
        push = (cos - margin).clamp(min=0)
        return torch.where(same, pull, push).mean()


def same_class_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Section 2.4: do both images show the same class? logits (B, 2), classes (B, 2)."""
    same = classes[:, 0] == classes[:, 1]
    return F.cross_entropy(logits, same.long())


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Fine-tuning: L_MLM + w_judge L_judge (section 3.1). Pre-training: the sum of the losses of a
    step's task (as released).

    The paper trains L_judge "jointly" and gives no weight. w_judge is 1 because the released code
    adds the two, but it adds sums over words and pairs. With means, the balance is not theirs."""
    weights = {"judge": cfg.w_judge}
    return sum(weights.get(name, 1.0) * loss for name, loss in losses.items())


# ---- method --------------------------------------------------------------------------------------

# The tasks of pre-training on captioned pairs: methods of IDC, and fields of Config (their shares).
TASKS = ("mlm", "mvcl", "fda")
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
        self.n_cells = height * width  # N
        Embed = {"plain": Embedding, "released": ReleasedEmbedding}[cfg.embedding]
        self.embed = Embed(cfg, vocab_size, channels, max(self.n_cells, max_len))
        self.single = Transformer(cfg, 1) if cfg.difference_encoder else nn.Identity()  # E_s
        self.pair = Transformer(cfg, 1) if cfg.difference_encoder else nn.Identity()  # E_p
        self.cross = Transformer(cfg, cfg.layers)  # E
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

    def forward(self, *inputs: Tensor | None, task: str = "finetune") -> dict[str, Tensor]:
        """The losses of a task: "finetune", "mlm", "mvcl", "fda" or "birds", each computed by the
        method of this name, which gets the inputs. torch.compile makes a graph for each task.

        Values at the start, with the paper's sizes, 16 pairs and V = 76, and what it means if a
        loss does not fall. Some start above that of a guess, as no LayerNorm precedes the heads.
            caption, mlm  6 to 9; they fall even if images are ignored, so look at the scores
            judge         0.6 to 5; at ln 2 = 0.69 it guesses: the images are not compared
            mvcl          7.3 = ln 1457, the cells to choose from; if it stays, tau_mvcl is too
                          high: at 1 it can fall by 2 at most, as cosines are between -1 and 1
            fda           1.95 = ln 7: there, the cosine does not depend on the caption; at tau_fda
                          1 it cannot fall below ln(1 + 6 / e^2) = 0.59
            class         about 7.2; ln 555 = 6.3 would be a guess"""
        return getattr(self, task)(*inputs)

    # -- the sequence; before and after: features (B, C, H, W)

    def encode(self, before: Tensor, after: Tensor | None = None) -> Tensor:
        """Eq. 4: both images, or a single one -> visual tokens v (B, S, D): [IMG1], its cells,
        [IMG2], its cells, if there is a second image."""
        x_1, x_2 = self.encode_each(before, after)  # E_s
        return self.pair(torch.cat([x_1, x_2], 1))  # E_p

    def encode_each(self, before: Tensor, after: Tensor | None) -> tuple[Tensor, Tensor]:
        """E_s of Eq. 4 -> [IMG1] and its cells, [IMG2] and its cells, both (B, 1 + N, D).

        Without a second image, only [IMG2] remains of it, (B, 1, D). (The paper pads that image
        with zeros which no token sees. The released code passes [IMG2] directly to E_p.)"""
        assert before.shape[1:] == self.grid, f"{self.grid} expected, {before.shape} found"
        v_1 = self.embed.image(before, IMAGE_1)  # Eq. 2
        if after is None:
            v_2 = self.embed.special(IMAGE_2, before.shape[0])
        else:
            assert after.shape == before.shape, f"{before.shape} expected, {after.shape} found"
            v_2 = self.embed.image(after, IMAGE_2)  # Eq. 3
        return self.single(v_1), self.single(v_2)

    def image_tokens(self, visual: Tensor) -> Tensor:
        """(B, S, D) -> [IMG1] and [IMG2] (B, 2, D)."""
        return visual[:, :: 1 + self.n_cells]

    def joint(self, visual: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Eq. 5 in pre-training, where every token sees all tokens except padding. visual (B, S, D)
        of Eq. 4, ids (B, L) -> visual (B, S, D); text (B, 1 + L, D), [CLS] first."""
        start = visual.shape[1]  # of the text
        seen = (ids != NULL) | self.cfg.see_padding
        seen = F.pad(seen, (start + 1, 0), value=True)  # images and [CLS] are seen, too
        x = torch.cat([visual, self.embed.text(ids)], 1)
        x = self.cross(x, seen[:, None, None])  # Eq. 5
        return x[:, :start], x[:, start:]

    def causal(self, visual: Tensor, ids: Tensor, asked: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 5 in fine-tuning and decoding, on causal_sequence. visual (B, S, D) of Eq. 4, ids
        (B, K) -> visual (B, S, D), words (B, K, D) and [MASK]s (B, asked, D)."""
        x, mask = self.causal_sequence(visual, ids, asked)
        x = self.cross(x, mask)  # Eq. 5
        end = x.shape[1] - asked  # of the words
        words = x[:, end - ids.shape[1] : end]
        return x[:, : visual.shape[1]], words, x[:, end:]

    def causal_sequence(self, visual: Tensor, ids: Tensor, asked: int) -> tuple[Tensor, Tensor]:
        """-> the tokens (B, T, D) of images, [CLS] (if finetune_cls), words, and a [MASK] for each
        of the last `asked` words; their causal_mask (1, 1, T, T).

        A [MASK] has the position of the word that follows (in causal_mask's picture: m1 that of
        w1)."""
        text = self.embed.text(ids) if self.cfg.finetune_cls else self.embed.words(ids)
        mask = causal_mask(visual.shape[1], text.shape[1], asked, ids.device)
        if asked:
            masks = torch.full_like(ids[:, :asked], self.embed.mask_id)
            following = self.embed.words(masks, first=ids.shape[1] - asked + 1)
            text = torch.cat([text, following], 1)
        return torch.cat([visual, text], 1), mask[None, None]

    def mask(self, caption: Tensor) -> tuple[Tensor, Tensor]:
        """mask_words, or the released rules."""
        rules = {"plain": mask_words, "released": released_mask_words}
        return rules[self.cfg.mask_rules](caption, self.vocab_size, self.cfg.mask_rate)

    # -- pre-training; after is None for single images

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
        predicted, features, masked = self.predict_cells(before, after, caption)
        losses = {"features": cell_loss, "predictions": released_cell_loss}
        loss = losses[self.cfg.mvcl_negatives]
        return {"mvcl": loss(predicted, features, masked, self.cfg.tau_mvcl)}  # Eq. 7-8

    def predict_cells(
        self, before: Tensor, after: Tensor | None, caption: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mask cells, and predict all -> predictions and features (M, C) of all cells of the batch,
        in the order (B, images, N), and the places of the masked ones among them (n,)."""
        images = before[:, None] if after is None else torch.stack([before, after], 1)
        pairs, count, _, height, width = images.shape  # count: images of a pair
        masked = mask_cells(pairs, count, self.n_cells, self.cfg.cell_mask_rate, images.device)
        is_masked = marked(masked, pairs * count * self.n_cells)
        is_masked = is_masked.view(pairs, count, 1, height, width)
        shown = images.masked_fill(is_masked, 0)
        visual = self.encode(*shown.unbind(1))  # Eq. 4
        visual, _ = self.joint(visual, caption)  # Eq. 5
        # Each part is [IMG1] or [IMG2] and the image's cells. Beside a single image, it is [IMG2].
        cells = torch.cat([part[:, 1:] for part in visual.split(1 + self.n_cells, 1)], 1)
        # As released, the projection's weights, transposed, map back to features.
        predicted = self.cell_head(cells) @ self.embed.project.weight + self.cell_bias
        features = images.flatten(3).transpose(2, 3)  # (B, count, N, C)
        return predicted.flatten(0, 1), features.flatten(0, 2), masked

    def fda(
        self, before: Tensor, after: Tensor | None, caption: Tensor, rewritten: Tensor
    ) -> dict[str, Tensor]:
        """Eq. 9: tell captions (B, L) from six rewrites of each, so that details have to be
        compared. Only the first B' pairs are used, as many as there are in rewritten (B', 6, L)."""
        count = rewritten.shape[0]
        after = None if after is None else after[:count]
        visual = self.encode(before[:count], after)  # Eq. 4
        ids = torch.cat([caption[:count, None], rewritten], 1)  # (B', 7, L)
        visual = visual.repeat_interleave(ids.shape[1], 0)  # (7B', S, D)
        visual, text = self.joint(visual, ids.flatten(0, 1))  # Eq. 5
        image = self.image_tokens(visual).mean(1).view(*ids.shape[:2], -1)  # (B', 7, D)
        text = text[:, 0].view(*ids.shape[:2], -1)  # [CLS], (B', 7, D)
        return {"fda": align_loss(image, text, self.cfg.tau_fda)}  # Eq. 9

    def birds(self, before: Tensor, after: Tensor, classes: Tensor) -> dict[str, Tensor]:
        """Section 2.4: images without captions. Their classes (B, 2) train E_s and E_p."""
        x_1, x_2 = self.encode_each(before, after)  # E_s of Eq. 4
        visual = self.pair(torch.cat([x_1, x_2], 1))  # E_p of Eq. 4
        alone = torch.cat([x_1[:, 0], x_2[:, 0]])  # [IMG1] and then [IMG2] of all pairs, (2B, D)
        pair = self.image_tokens(visual).flatten(1)  # (B, 2D)
        class_of = classes.T.flatten()  # (2B,)
        return {
            "class": F.cross_entropy(self.classify(alone), class_of),
            "contrast": contrast_loss(alone, class_of),
            "same_class": same_class_loss(self.same_class(pair), classes),
        }

    # -- fine-tuning

    def finetune(
        self, before: Tensor, after: Tensor, caption: Tensor, changed: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Captions (B, L) -> L_MLM, in which a word sees only earlier words. Given `changed`, bool
        (B,), False for distractors, also L_judge.

        [ours] Each word is predicted from a [MASK] in its place, as decoding does. The paper and
        the released code (finetune_targets="masked") mask 15 % of the words, and predict these."""
        cfg = self.cfg
        visual = self.encode(before, after)  # Eq. 4
        if cfg.finetune_targets == "every":
            ids = caption[:, :-1]
            target = caption[:, 1:]
            visual, _, text = self.causal(visual, ids, asked=ids.shape[1])
        elif cfg.finetune_targets == "masked":
            ids, target = self.mask(caption)
            visual, text, _ = self.causal(visual, ids)
        losses = {"caption": word_loss(self.head(text), target, cfg.reduction)}  # Eq. 6
        if changed is not None:
            logits = self.judge(self.image_tokens(visual).flatten(1))  # section 3.1
            losses["judge"] = judge_loss(logits, changed, cfg.reduction)
        return losses

    # -- captions

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor) -> Tensor:
        """-> ids of greedy captions (B, max_len). Unlike the released code, it never writes UNK."""
        visual = self.encode(before, after)

        def next_word(ids: Tensor) -> Tensor:
            _, _, masks = self.causal(visual, ids, asked=1)
            return self.head(masks[:, 0])

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
        x, mask = self.causal_sequence(visual, ids[:, :-1], asked=count)
        scores = self.cross.last_scores(x, mask)[:, :, -count:, : visual.shape[1]]
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
    # [ours] Your own pairs are usually few, so the model has half the width. It is not pre-trained:
    # with pre-training, it recognised fewer unchanged validation pairs (docs/results.md). SCORER's
    # presets explain the schedule.
    "pairs": dict(pretrain_steps=0, dim=256, ffn=1024, layers=2, batch_size=16, lr=5e-4,
                  schedule="cosine", warmup=50, grad_clip=1.0, steps=2000, eval_every=1000,
                  select_by="ROUGE-L"),
    # [ours] Pre-training is MVCL alone, because MLM can be learned without the images. The
    # temperature is low because many cells look alike: half of all cosines between their features
    # are above 0.79. Most cells are masked, so that neighbours do not reveal a cell. Validation
    # chose layers, lr and w_judge.
    "mini": dict(dim=128, ffn=256, heads=4, layers=3, dropout=0.0, pretrain_steps=1200,
                 pretrain_batch=8, pretrain_lr=1e-3, pretrain_warmup=50, mlm=0, fda=0,
                 cell_mask_rate=0.7, tau_mvcl=0.02, tau_fda=0.1, w_judge=0.2, batch_size=16,
                 lr=1e-3, schedule="cosine", warmup=100, grad_clip=1.0, steps=3000, eval_every=300,
                 eval_batch=250),
}  # fmt: skip

# --variant released sets these fields as the released code has them. The default follows the paper,
# unless a comment says [ours] or "as released". CLEVR-Change keeps the paper's steps and learning
# rates. Places are in github.com/yaolinli/IDC at 6f3aabf.
#
# A test compares the variant with values recorded from the released modules. It leaves out their
# outputs for [MASK] and [CLS], and their LayerNorms (see Transformer): with PyTorch's, losses
# differ by up to 3e-4 of their value, and gradients by up to 3e-3.
RELEASED = {
    "all": dict(
        swap=False,  # clver/data/dataset_pretrain_clver.py:45-46; the default is [ours]
        # Section 2.3 "adapts" MLM, which predicts 15 % of the words. The default is [ours].
        finetune_targets="masked",  # clver/data/dataset_finetune_clver.py:144-160
        init_weights="pytorch",  # clver/modules_pretrain.py:31-42; the default is [ours]
        embedding="released",  # clver/modules_pretrain.py:32, 50-58, 378-420
        mvcl_negatives="predictions",  # clver/modules_pretrain.py:146-149, 154-166
        see_padding=True,  # clver/modules_pretrain.py:117, 133, 184; the default is [ours]
        finetune_cls=False,  # clver/modules_finetune.py:52-61; section 2.3 has it in inference
        mask_rules="released",  # clver/data/dataset_pretrain_clver.py:156-200; see mask_words
        # The paper speaks of warm-up alone. That fine-tuning's rate stays constant is [ours].
        rates="released",  # clver/utils.py:149-153, 162-169
        # The default is the mean, which the released code takes in pre-training, too.
        reduction="sum",  # clver/finetune.py:156-162
        # Not switched: samples are captions, FDA draws pairs of its own, and captions are padded
        # to 40 ids (Birds-to-Words: 80), as in Table 6. On birds, no weights before step 2000 are
        # chosen, although the validations before it count against patience.
    ),
    "clevr_change": {},  # nothing but the above
    # bird/config/pretrain_bird_nabirds.json:13-14 and pretrain_cub.json:14. Table 6 has 50000 steps
    # of 200 pairs, and the paper gives no batch for CUB. Fine-tuning keeps Table 6's 32 pairs, as
    # in the README's command (bird/config/finetune_bird.json:12 has 128).
    "birds_to_words": dict(pretrain_steps=60000, pretrain_batch=150, cub_batch=350),
}

# What the paper reports for IDC with pre-training; a run prints it below its scores.
PUBLISHED = {
    "clevr_change": {  # Table 2
        "total": {"BLEU-4": 51.2, "METEOR": 36.2, "ROUGE-L": 71.7, "CIDEr": 128.9}},
    "birds_to_words": {  # Table 1; with --cub and --nabirds 31.0, 23.4, 49.1, 25.3
        "total": {"BLEU-4": 28.0, "METEOR": 23.1, "ROUGE-L": 48.4, "CIDEr": 18.6}},
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------


def task_pool(cfg: Config, stage: str) -> list[str]:
    """The tasks of a stage of pre-training, each as often as its share says."""
    pool = []
    for task in TASKS:
        pool += [task] * getattr(cfg, task)
    if cfg.nabirds and stage == "pretrain":
        pool += ["birds"] * 3  # a fifth of 9 + 1 + 2 + 3, as in appendix A.3
    return pool


def draw_task(cfg: Config, stage: str, step: int) -> str:
    """The task of a step, drawn according to the shares. It depends only on seed and step."""
    if stage == "finetune":
        return "finetune"
    pool = task_pool(cfg, stage)
    rng = np.random.default_rng([cfg.seed, step])
    return pool[rng.integers(len(pool))]


def compute_losses(
    model: IDC, batches: tuple, cfg: Config, task: str = "finetune", rewrites=None
) -> dict[str, Tensor]:
    """The losses of a task, except birds, on the data.Batches of a step: (changed pairs, distractor
    pairs) or (all pairs,). rewrites, for fda, is like Negatives: pair ids -> (B, 6, L)."""
    inputs = []
    for n, batch in enumerate(batches):
        batch = batch.to(cfg.device)
        after = None if batch.single else batch.after
        x = [batch.before, after, batch.caption]
        if task == "fda":  # a seventh of the pairs (as released), because each has seven captions
            count = max(1, len(batch.pair_ids) // (1 + REWRITES))
            x.append(rewrites(batch.pair_ids[:count]).to(cfg.device, non_blocking=True))
        elif task == "finetune" and len(batches) == 2:  # otherwise there is nothing to judge
            is_changed = n == 0
            x.append(torch.full(batch.caption.shape[:1], is_changed, device=cfg.device))
        inputs.append(x)
    return mean_losses(model, cfg, task, inputs)


def mean_losses(model: IDC, cfg: Config, task: str, inputs: list) -> dict[str, Tensor]:
    """A step's losses, means over its batches, and their total. inputs: what the task gets of each.

    [ours] Changed and distractor pairs stay separate because they share their "before" images. A
    joint contrastive loss would treat an image as its own negative. (The released code has one
    mixed batch. So with reduction="sum", the mean over the two is half of the released sum.)"""
    losses: dict[str, Tensor] = {}
    for of_batch in inputs:
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.on_cuda):
            terms = model(*of_batch, task=task)
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


def plain_rate(cfg: Config, stage: str, step: int) -> float:
    """The learning rate of a step of a stage, in which steps count from 0. Pre-training only warms
    up; fine-tuning has RunConfig's schedule."""
    if stage == "finetune":
        return learning_rate(cfg, step)
    return cfg.pretrain_lr * min((step + 1) / max(1, cfg.pretrain_warmup), 1.0)


def train(cfg: Config, dataset, resume: bool = False) -> IDC:
    """Pre-train, then fine-tune on a data set (data.Dataset) into cfg.out_dir -> the best model by
    validation. pretrained.pt keeps the weights after pre-training, for --init.

    `resume` continues from last.pt (see Run) as if training had never stopped.
    FloatingPointError if a loss is not finite."""
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
    rate = {"plain": plain_rate, "released": released_rate}[cfg.rates]
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
            if run.is_over():
                break
            optimizer.param_groups[0]["lr"] = rate(cfg, stage, run.step - first)
            task = draw_task(cfg, stage, run.step)
            if task == "birds":  # the step's captioned pairs are not used
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
# [ours] A word of KINDS is replaced only by a word of the same kind that is no synonym. A string
# lists synonyms.
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
    """Section "FDA": six rewritten captions of every training pair, made by `rewrite` and kept in a
    file. Its name has a hash of all captions, because rewrites that were made from other captions
    could be true of a pair. (We have not seen those that the authors offer on a drive.)"""

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
        """-> the pairs' rewritten captions (B, 6, L), padded like the data set's captions."""
        ids = []
        for pair_id in pair_ids:
            ids.append([self.vocab.encode(c, self.max_len) for c in self.texts[pair_id]])
        return torch.tensor(ids)


def rewrite(dataset) -> dict[str, list[str]]:
    """Each training pair's id -> its six negatives, which all of its captions share (as released):
    two each from Retrieve, Replace and Confuse (section "Implementation Details":
    "retrieve:replace:confuse=2:2:2"). Single images (CUB) have none from Confuse (appendix A.3).

    [ours] Theirs are three from Retrieve and three from Replace. If a strategy finds too few, the
    next one fills the gap; after Confuse, Retrieve and then Replace do. On CLEVR-Change and mini, a
    scene's changed pair and its distractor pair share five rewrites of the change: one from
    Retrieve, two from Replace and two from Confuse. The sixth is a caption of the other pair, so
    that the text alone does not reveal to which of the two pairs the six belong."""
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
    be after this turn).

    [ours] Any text counts as false that is no caption of the scene. If captions come from templates
    and name an object, it must also say something about its first object that no caption of the
    pair says."""
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
    """What a caption says in words of KINDS about the first object that it names (if any)."""
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
    """[ours] The smoothed idf of every word of n different captions: ln((1 + n) / (1 + df)) + 1."""
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
    """-> for each text its tokens, each with the space after it; its words of KINDS, nouns and
    adjectives, each as (index of the token, word, kind or tag); its subjects.

    [ours] spaCy finds nouns and adjectives, where the paper has "Stanford CoreNLP tool" (section
    "Replace"). It does not read template captions, so only their words of KINDS are replaced."""
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
    """Section "Replace": replace the important `words` by different ones with the same tag (or of
    the same kind), if there are any."""
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
    subject (the first of `own` in the text) by another one of as many words, if there is one."""
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
    """The data set of a run, from data.open_dataset. With --cub, it has CUB's words, too."""
    import data
    from support.releases import read_release, vocab_of
    from support.text import SPECIAL, Vocab

    for stage, _, _ in stages(cfg):
        if stage != "finetune" and not task_pool(cfg, stage):
            flags = " ".join(f"--{task} 0" for task in TASKS)
            raise InputError(f"{flags} leave no task; give --pretrain_steps 0")
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
    """Start from the weights of --init. InputError if they do not fit this model."""
    from support.files import load_tensors, load_weights

    state = load_tensors(cfg.init, device=cfg.device)
    dataset.check_fit(state)
    load_weights(model, state["model"], cfg.init)
    heads = state["config"]["heads"]  # the shapes of the weights do not show it
    if cfg.heads != heads:
        raise InputError(f"--init {cfg.init} was trained with --heads {heads}; give the same")


def open_cub(cfg: Config, dataset):
    """Section 2.4, general image captioning: CUB's single images, in the words of `dataset`."""
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
        """-> before and after (B, C, H, W) and the classes (B, 2) of random pairs."""
        first = torch.randint(len(self.names), (self.size,)).numpy()
        second = self.partners[first]
        before = self.features.rows([self.names[i] for i in first])
        after = self.features.rows([self.names[i] for i in second])
        before = before.to(device, non_blocking=True).float()
        after = after.to(device, non_blocking=True).float()
        classes = torch.from_numpy(np.stack([self.classes[first], self.classes[second]], 1))
        return before, after, classes.to(device, non_blocking=True)


def partners(classes: np.ndarray, seed: int) -> np.ndarray:
    """The index of a partner for every image. Half of the images get one of the same class, if
    there is one, and the others one of another class (section 2.4)."""
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


class ReleasedEmbedding(Embedding):
    """Eq. 1-3, but [IMG1], [IMG2] and [CLS] share a vector, and have types of their own. A sigmoid
    follows the linear layer. Positions are doubled_sinusoid's. (Section 2.1 has three special
    tokens, three types, and the positions of Vaswani et al.)"""

    def __init__(self, cfg: Config, vocab_size: int, channels: int, positions: int):
        super().__init__(cfg, vocab_size, channels, positions, special_tokens=1, types=6)
        self.position = doubled_sinusoid(positions, cfg.dim)

    def cells(self, features: Tensor) -> Tensor:
        return super().cells(features).sigmoid()

    def type_of(self, part: int) -> Tensor:
        return self.types.weight[3 + part]  # the first three are those of the special tokens

    def special_id(self, part: int) -> int:
        return self.mask_id + 1


def doubled_sinusoid(length: int, dim: int) -> Tensor:
    """Positions (length, dim). Channel i has frequency 10000^(-2i/D), so the sine and the cosine of
    a pair differ in frequency, and most channels hardly vary."""
    channel = torch.arange(dim)
    angle = torch.arange(length)[:, None] / 10000 ** (2 * channel / dim)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos())


def released_mask_words(caption: Tensor, vocab_size: int, rate: float) -> tuple[Tensor, Tensor]:
    """Like mask_words, but UNK is masked, too, END only ever becomes [MASK], the first word becomes
    [MASK] if no word was drawn, and random words are drawn from all ids."""
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
    """Like cell_loss, but the negatives are the predictions of unmasked cells and the features of
    the other masked cells. (Eq. 8 has the features of unmasked cells.)"""
    is_masked = marked(masked, features.shape[0])
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
        return 1e-8  # these rates are one step behind those of plain_rate
    warmup = max(1, cfg.pretrain_warmup)
    return cfg.pretrain_lr * min(step / warmup, (warmup / step) ** 0.5)


if __name__ == "__main__":
    from support.files import run_main

    run_main(main)
