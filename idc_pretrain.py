"""IDC: Image Difference Captioning with Pre-training and Contrastive Learning
(Yao, Wang and Jin, AAAI 2022).

A pair shows a scene before and after a change or, if it is a distractor, only another camera and
light; then its caption says that nothing changed. The method has three ideas:
1.  Captioned pairs are few and differences are small, so the model first learns which words belong
    to which details: it predicts masked words (MLM), recognises masked cells (MVCL), and tells a
    caption from six similar ones (FDA). On mini, toy scenes, it has MVCL alone.
2.  Like a person, it looks at each image alone (E_s) and compares the two (E_p) before it thinks of
    words (E). All are transformers.
3.  Fine-tuning is MLM in which a word sees only earlier words, so that captions can be written word
    by word.

The flow of one pair, with CLEVR-Change's sizes (24 ids are its longest caption):
    before (2048, 7, 7)     after (2048, 7, 7)      caption (24 ids)
       |  embed, Eq. 2         |  embed, Eq. 3         |  embed, Eq. 1
    v_1 (50, 512)           v_2 (50, 512)              |       v_i is [IMGi] and 49 cells
       |  single (E_s)         |  single (E_s)         |
       +-----------+-----------+                       |
                   |  pair (E_p), Eq. 4                |
    visual (100, 512)                       text (25 or 47, 512)
                   +-----------------+-----------------+
                                     |  cross (E), Eq. 5
    Pre-training. Text (25, 512): [CLS], 24 ids. All see all but padding. A step has one task:
        some words are [MASK]            head: these words                   L_MLM, Eq. 6
        some cells are zeros             cell_head: their features           L_MVCL, Eq. 7-8
        the caption or a rewrite         cosine of [IMG1], [IMG2] to [CLS]   L_FDA, Eq. 9
    Fine-tuning. Text (47, 512): [CLS], 23 ids, 23 [MASK]s. Images see only images. A word sees
    them, [CLS], earlier words and itself. The [MASK] for word t sees what word t - 1 sees, and
    itself. All [MASK]s stand at the end (the table of causal_mask shows it):
        a [MASK] for each word [ours]    head: that word                     L_MLM, Eq. 6
        [IMG1] and [IMG2]                judge: did anything change?         L_judge, Sec. 3.1

Read first: Embedding, Block, mask_words, causal_mask, the losses, and of IDC encode, joint, mlm,
mvcl, predict_cells, fda, causal, causal_sequence and captioning; then draw_task, compute_losses and
train. Skip the rest at first, also "other forms" at the end, which are of the released code.

Our copy of the paper lacks the formulas. These are reconstructed from its text and the released
code. "As released" marks our defaults that only that code has, [ours] those that neither has.
Equation  where            formula                                            as released, or [ours]
Eq. 1     Embedding.text   w = [CLS] START w_1 ... END (paper: [BOS], [EOS])  words times sqrt(D)
Eq. 2-3   Embedding.image  v_i = [IMGi] v_i1 ... v_iN                         LayerNorm, also Eq. 1
Eq. 4     IDC.encode       v = E_p([E_s(v_1) ; E_s(v_2)])                     pre-norm, also Eq. 5
Eq. 5     joint, causal    z = E([v ; w])                                     padding unseen [ours]
Eq. 6     word_loss        L_MLM = mean_m -log P(w_m | other words, v)        END is masked, too
Eq. 7-8   cell_loss        L_MVCL = mean_m -log(e(f_m) / [e(f_m) + sum e(u)]) p_m by tied weights
Eq. 9     align_loss       L_FDA = -log(e_0 / [e_0 + ... + e_6])              of 1/7 of the pairs
Sec. 2.2  draw_task, mask_words, mask_cells; support/rewrites.py rewrites captions
Sec. 2.3  causal_mask, IDC.captioning (predicts every word, not 15 % [ours]), IDC.generate
Sec. 2.4  support/birds.py: bird_losses, contrast_loss, of images without captions
Sec. 3.1  judge_loss       L = L_MLM + w_judge L_judge                        w_judge 1
m is a masked word or cell, f_m the cell's feature, and u the feature of an unmasked cell. E makes
z_m of the cell, and p_m = cell_head(z_m) W + b predicts f_m, with W (D, C) of Embedding.project.
cell_loss defines e(f), and align_loss e_j.
Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, h heads, L ids of a caption
(START, words, END, padding), V ids of the vocabulary, K ids that fine-tuning reads (L or L - 1), T
tokens, S = 2 (N + 1) visual tokens, M cells of a batch, n of them masked.

To copy: this file and common.py; to train, also data.py, scores.py and support/.
Licence: MIT. It contains no code from the authors' repository.
"""

import math
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
    """IDC; values are CLEVR-Change's. RunConfig's steps, batch_size, lr, schedule, lr_drop, warmup
    and patience belong to fine-tuning, eval_every and grad_clip to both stages."""

    MAY_CHANGE = RunConfig.MAY_CHANGE | {"init", "cub", "nabirds"}
    RANGES = RunConfig.RANGES | {"pretrain_batch": (1, math.inf)}

    init: str = ""  # checkpoint to start from; with --pretrain_steps 0, it is only fine-tuned
    dim: int = 512  # width D
    ffn: int = 2048  # width of the feed-forward layers
    heads: int = 8  # heads of every attention
    layers: int = 3  # layers of the cross-modal transformer
    dropout: float = 0.2  # dropout probability
    pretrain_steps: int = 250000  # steps of pre-training (--steps: of fine-tuning); 0: none
    pretrain_batch: int = 100  # scenes per step of pre-training, of one or two pairs
    pretrain_lr: float = 1e-4  # learning rate of pre-training (--lr: of fine-tuning)
    pretrain_warmup: int = 8000  # steps of linear warm-up in pre-training
    mlm: int = 8  # share of masked language modelling in the steps of pre-training; 0: none
    mvcl: int = 1  # share of masked visual contrastive learning
    fda: int = 2  # share of fine-grained difference aligning
    mask_rate: float = 0.15  # share of words masked in MLM and by --finetune_targets masked
    cell_mask_rate: float = 0.15  # share of one image's cells that MVCL masks
    tau_mvcl: float = 1.0  # temperature of MVCL
    tau_fda: float = 1.0  # temperature of FDA
    weight_decay: float = 0.0  # Adam's weight decay (L2) in fine-tuning
    w_judge: float = 1.0  # weight of L_judge; unused on data sets without distractor pairs
    swap: bool = True  # in half of the scenes, swap "before" and the distractor's "after" [ours]
    # Other forms; skip at first. RELEASED, below, says which defaults are the paper's.
    difference_encoder: bool = True  # E_s and E_p of Eq. 4, before the cross-modal transformer
    cub: str = ""  # CUB's folder; if given, pre-train on it first, for as many steps (as released)
    cub_batch: int = 0  # single images per step of pre-training on CUB; 0: pretrain_batch
    nabirds: str = ""  # NABirds' folder; if given, its classes are a pre-training task of share 3
    finetune_targets: Literal["every", "masked"] = "every"  # predicted words; "every" is [ours]
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
    """Eq. 1-3: y = Dropout(LN(x + type + position)) for words and cells, and without a position for
    special tokens. All share one LayerNorm and one table of types.

    As released, words are multiplied by sqrt(D), and special tokens have no position. In the paper,
    every token has a position (section 2.1)."""

    # ReleasedEmbedding has other numbers. An entry for each part: IMAGE_1, IMAGE_2, TEXT.
    n_special = 3
    n_types = 3
    special_rows = (0, 1, 2)  # of [IMG1], [IMG2], [CLS] in the table, counted after [MASK]
    type_rows = (0, 1, 2)  # of the types of both images' cells and of words

    def __init__(self, cfg: Config, vocab_size: int, channels: int, positions: int):
        super().__init__()
        self.mask_id = vocab_size  # the id of [MASK]; those of the special tokens follow
        self.table = nn.Embedding(vocab_size + 1 + self.n_special, cfg.dim)
        self.types = nn.Embedding(self.n_types, cfg.dim)
        self.project = nn.Linear(channels, cfg.dim)
        self.norm = nn.LayerNorm(cfg.dim, eps=1e-12)
        self.dropout = nn.Dropout(cfg.dropout)
        self.register_buffer("position", sinusoid(positions, cfg.dim), persistent=False)
        self.scale = cfg.dim**0.5

    def image(self, features: Tensor, part: int) -> Tensor:
        """Features (B, C, H, W) -> [IMG1] or [IMG2], then the cells (B, 1 + N, D)."""
        cells = self.finish(self.cells_of(features), part)  # Eq. 2-3
        return torch.cat([self.special(part, cells.shape[0]), cells], 1)

    def text(self, ids: Tensor) -> Tensor:
        """(B, L) -> [CLS], then the words (B, 1 + L, D)."""
        return torch.cat([self.special(TEXT, ids.shape[0]), self.words(ids)], 1)  # Eq. 1

    def words(self, ids: Tensor, first: int = 0) -> Tensor:
        """(B, L) ids at positions first, first + 1, ... -> (B, L, D)."""
        assert first + ids.shape[1] <= len(self.position), "a caption has too many words"
        return self.finish(self.scale * self.table(ids), TEXT, first)  # Eq. 1

    def cells_of(self, features: Tensor) -> Tensor:  # ReleasedEmbedding differs here
        """(B, C, H, W) -> (B, N, D), n = row * W + column."""
        return self.project(features.flatten(2).transpose(1, 2))

    def finish(self, x: Tensor, part: int, first: int = 0) -> Tensor:
        """Words or cells (B, T, D) -> the same, with type and position (B, T, D)."""
        x = x + self.types.weight[self.type_rows[part]] + self.position[first : first + x.shape[1]]
        return self.dropout(self.norm(x))

    def special(self, part: int, count: int) -> Tensor:
        """The part's [IMG1], [IMG2] or [CLS], `count` times -> (count, 1, D)."""
        special_id = self.mask_id + 1 + self.special_rows[part]
        x = self.table.weight[special_id] + self.types.weight[part]
        return self.dropout(self.norm(x).expand(count, 1, -1))  # Eq. 1-3


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
    residual stream. (The released one differs from PyTorch's: docs/released.md.)"""

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
        q, k, _ = last.attention.project(y, y)
        return last.attention.scores(q, k)


def mask_words(caption: Tensor, vocab_size: int, rate: float) -> tuple[Tensor, Tensor]:
    """Section "MLM": each word is a target with probability `rate`. Of the targets, 80 % become
    [MASK], 10 % a random word, and 10 % stay. caption (B, L) -> ids with masks; targets, NULL
    elsewhere (B, L).

    As released, END is masked, too, because the model has to learn where a caption ends. [ours] END
    is treated like any word, and UNK is never masked."""
    device = caption.device
    mask_id = vocab_size  # the first id after all words; the special tokens follow
    # The ids below END are NULL, UNK and START.
    chosen = (caption >= END) & (torch.rand(caption.shape, device=device) < rate)
    kind = torch.rand(caption.shape, device=device)
    random = torch.randint(END + 1, vocab_size, caption.shape, device=device)
    to_mask = chosen & (kind < 0.8)
    to_random = chosen & (kind >= 0.8) & (kind < 0.9)
    ids = torch.where(to_random, random, caption).masked_fill(to_mask, mask_id)
    return ids, caption.masked_fill(~chosen, NULL)


def mask_cells(pairs: int, images: int, n_cells: int, rate: float, device) -> Tensor:
    """Section "MVCL": for each of B = `pairs` pairs, choose one of its `images` (2; of CUB 1), and
    round(rate N) of its n_cells = N cells, at least one, so that the other image and the caption
    can tell what was there. -> their places among all cells of the batch: indices into (B, images,
    N), flattened. With N = 49 and two images, cell 5 of image 1 of pair 3 (all counted from 0) has
    the place (3 * 2 + 1) * 49 + 5 = 348.

    [ours] The number is fixed, because torch.compile needs fixed shapes."""
    count = max(1, round(rate * n_cells))
    cell = torch.rand(pairs, n_cells, device=device).topk(count).indices  # (B, count)
    image = torch.randint(images, (pairs, 1), device=device)
    b = torch.arange(pairs, device=device)[:, None]
    return ((b * images + image) * n_cells + cell).flatten()


def marked(places: Tensor, count: int) -> Tensor:
    """-> bool (count,), True at these places (n,)."""
    return torch.zeros(count, dtype=torch.bool, device=places.device).index_fill(0, places, True)


def causal_mask(visual: int, length: int, asked: int, device) -> Tensor:
    """Section 2.3: which token sees which in fine-tuning. First come `visual` tokens of both images
    (v), which see only each other. Each of `length` tokens, [CLS] and words, sees the images, the
    tokens before it and itself. Then come `asked` [MASK]s, one for each of the last `asked` words,
    to predict the word after it. The one for word t sees what word t - 1 sees, and itself. -> bool
    (T, T), T = visual + length + asked, True where the row's token sees the column's.

    With length = 3 and asked = 2, where w0 is START, m1 predicts w1, and m2 predicts w2. A row sees
    the columns of images and text whose rank is not above its own:

                v | [CLS]  w0  w1 | m1  m2      rank
        v       x |               |              -1
        [CLS]   x |   x           |               0
        w0      x |   x    x      |               1
        w1      x |   x    x   x  |               2
        m1      x |   x    x      | x             1
        m2      x |   x    x   x  |     x         2

    As released, images do not see the text. In the paper, "the attention on the visual side does
    not change". But then words would see later words, and the judge the caption, through images."""
    text = torch.arange(length, device=device)
    before_text = torch.full((visual,), -1, device=device)
    rank = torch.cat([before_text, text, text[length - asked :]])
    seen = rank[:, None] >= rank
    seen[:, visual + length :] = False  # no token sees a [MASK], ...
    return seen | torch.eye(len(rank), dtype=torch.bool, device=device)  # ... but each sees itself


# ---- losses --------------------------------------------------------------------------------------


def word_loss(logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Eq. 6, L_MLM: the cross-entropy of masked words. logits (..., V), target (...), NULL where a
    position has no loss."""
    logits = logits.flatten(0, -2)
    total = F.cross_entropy(logits, target.flatten(), ignore_index=NULL, reduction="sum")  # Eq. 6
    if reduction == "sum":  # --variant released, in fine-tuning
        return total
    return total / (target != NULL).sum().clamp(min=1)


def cell_loss(predicted: Tensor, features: Tensor, places: Tensor, tau: float) -> Tensor:
    """Eq. 7-8, L_MVCL: InfoNCE over cosines, the mean over masked cells m of

        -log(e(f_m) / [e(f_m) + sum over unmasked cells of e(u)]), e(f) = exp(cos(p_m, f) / tau).

    predicted (p) and features (f) (M, C) are of all cells of the batch; places (n,) are those of
    the masked ones.

    Example, tau = 1: features (1, 0), (0, 2), (3, 0); the first is masked and predicted as (2, 0).
    Its cosines are 1, 0 and 1, so the loss is -ln(2.7 / (2.7 + 1 + 2.7)) = 0.862. The third cell
    looks the same, so at no temperature can the loss fall below ln 2 = 0.693."""
    with torch.autocast(features.device.type, enabled=False):  # bfloat16 is not precise enough
        s = cell_cosines(predicted, features, places) / tau
        return F.cross_entropy(s, places)  # Eq. 7-8; the right column of a cell is its own


def cell_cosines(predicted: Tensor, features: Tensor, places: Tensor) -> Tensor:
    """For cell_loss: the cosine of each masked cell's prediction to its own feature and to those of
    all unmasked cells; -inf for the other masked cells. -> (n, M)"""
    p = F.normalize(upcast(predicted), dim=-1)
    f = F.normalize(features, dim=-1)
    is_masked = marked(places, f.shape[0])
    own = places[:, None] == torch.arange(f.shape[0], device=f.device)
    return (p[places] @ f.T).masked_fill(is_masked & ~own, float("-inf"))


def align_loss(g: Tensor, c: Tensor, tau: float) -> Tensor:
    """Eq. 9, L_FDA: InfoNCE over cosines, the caption (j = 0) against its six rewrites,

        -log(e_0 / [e_0 + ... + e_6]), e_j = exp(cos(g_j, c_j) / tau).

    Each of the seven is read together with the images, in a sequence of its own. Of E's outputs, g
    is the mean of [IMG1] and [IMG2], and c is [CLS], both (B, 7, D).

    Example, tau = 1: images (1, 0), caption (1, 0), six rewrites (0, 1). The cosines are 1 and six
    times 0, so the loss is -ln(2.7 / (2.7 + 6)) = 1.165. At tau = 0.1 it would be 0.0003."""
    s = F.cosine_similarity(g, c, dim=-1) / tau  # (B, 7)
    right = torch.zeros(s.shape[0], dtype=torch.long, device=s.device)  # the caption, j = 0
    return F.cross_entropy(s, right)  # Eq. 9


def judge_loss(logits: Tensor, changed: Tensor, reduction: str = "mean") -> Tensor:
    """Section 3.1, L_judge: is a pair changed or a distractor? logits (B, 2), changed (B,) bool."""
    return F.cross_entropy(logits, changed.long(), reduction=reduction)


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Fine-tuning: L = L_MLM + w_judge L_judge (section 3.1). Pre-training: the sum of the losses
    of a step's task (as released).

    The paper trains L_judge "jointly" and gives no weight. w_judge is 1 because the released code
    adds the two, but it adds sums over words and pairs. With means, the balance is not theirs."""
    if "caption" in losses:
        return losses["caption"] + cfg.w_judge * losses.get("judge", 0)  # "caption": L_MLM
    return sum(losses.values())


# ---- method --------------------------------------------------------------------------------------

# The tasks of pre-training on captioned pairs: methods of IDC, and fields of Config (their shares).
TASKS = ("mlm", "mvcl", "fda")
REWRITES = 6  # rewritten captions of a pair
BIRD_CLASSES = 555  # of NABirds


class IDC(nn.Module):
    """IDC with all its parameters. grid: (C, H, W) of the features; max_len: the length of the
    longest caption in tokens, START and END included."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg = cfg
        self.vocab_size = vocab_size
        self.grid = tuple(grid)
        self.max_len = max_len
        channels, height, width = grid
        self.n_cells = height * width  # N
        Embed = ReleasedEmbedding if cfg.embedding == "released" else Embedding
        self.embed = Embed(cfg, vocab_size, channels, max(self.n_cells, max_len))
        if cfg.difference_encoder:
            self.single = Transformer(cfg, 1)  # E_s
            self.pair = Transformer(cfg, 1)  # E_p
        else:  # ablation
            self.single = nn.Identity()
            self.pair = nn.Identity()
        self.cross = Transformer(cfg, cfg.layers)  # E
        self.head = nn.Linear(cfg.dim, vocab_size)  # the released one also has [MASK] and [CLS]
        self.cell_head = nn.Sequential(  # as released
            nn.Linear(cfg.dim, cfg.dim), nn.GELU(), nn.LayerNorm(cfg.dim, eps=1e-12)
        )
        self.cell_bias = nn.Parameter(torch.zeros(channels))
        self.judge = nn.Linear(2 * cfg.dim, 2)
        if cfg.nabirds:  # for support.birds.bird_losses
            self.classify = nn.Linear(cfg.dim, BIRD_CLASSES)
            self.same_class = nn.Linear(2 * cfg.dim, 2)
        if cfg.init_weights == "xavier":
            initialise(self, xavier=True)

    def forward(self, *inputs: Tensor, task: str = "caption") -> dict[str, Tensor]:
        """The losses of a task, by name. torch.compile makes a graph for each task.

            task     inputs                                         losses
            mlm      before, after, caption (B, L)                  mlm
            mvcl     before, after, caption                         mvcl
            fda      before, after, caption, rewritten (B', 6, L)   fda
            caption  before, after, caption[, changed (B,)]         caption[, judge]
            birds    before, after, classes (B, 2)                  class, contrast, same_class

        Losses at the start, with the paper's sizes, 16 pairs and V = 76, and what it means if one
        stays there. Some are above that of a guess, as no LayerNorm precedes the heads:
            caption, mlm  6 to 9; they fall even if images are ignored, so look at the scores
            judge         0.6 to 5; at ln 2 = 0.69 it guesses: the images are not compared
            mvcl          7.3 = ln 1457, the cells to choose from: tau_mvcl is too high; as cosines
                          are between -1 and 1, it can fall by 2 at most at tau_mvcl 1
            fda           1.95 = ln 7: the cosine does not depend on the caption; at tau_fda 1, it
                          cannot fall below ln(1 + 6 / e^2) = 0.59
            class         about 7.2; ln 555 = 6.3 would be a guess"""
        if task == "mlm":
            return self.mlm(*inputs)
        if task == "mvcl":
            return self.mvcl(*inputs)
        if task == "fda":
            return self.fda(*inputs)
        if task == "birds":
            from support.birds import bird_losses

            return bird_losses(self, *inputs)
        assert task == "caption", task
        return self.captioning(*inputs)

    # -- the sequence of tokens, with CLEVR-Change's sizes (N = 49, captions of L = 24 ids)
    #
    #   number        0       1 ... 49  50      51 ... 99  100    101 ... 124
    #   pre-training  [IMG1]  cells     [IMG2]  cells      [CLS]  24 ids
    #   position              0 ... 48          0 ... 48          0 ... 23
    #
    #   number                                             100    101 ... 123  124 ... 146
    #   fine-tuning   (as above)                           [CLS]  23 ids       23 [MASK]s
    #   position                                                  0 ... 22     1 ... 23
    # Decoding has a single [MASK], at position t after t ids.

    def encode(self, before: Tensor, after: Tensor) -> Tensor:
        """Eq. 4: both images -> visual tokens v (B, S, D), tokens 0 to 99 of the sequence."""
        x_1, x_2 = self.encode_each(before, after)  # E_s
        return self.pair(torch.cat([x_1, x_2], 1))  # E_p

    def encode_each(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """E_s of Eq. 4 -> [IMG1] and its cells, [IMG2] and its cells, both (B, 1 + N, D).

        CUB has single images: `after` is (B, C, 0, W), and of it E_s reads only [IMG2] [ours]."""
        assert before.shape[1:] == self.grid, f"{self.grid} expected, {before.shape} found"
        fits = after.shape == before.shape or after.shape[2] == 0
        assert fits, f"{before.shape} expected, {after.shape} found"
        v_1 = self.embed.image(before, IMAGE_1)  # Eq. 2
        v_2 = self.embed.image(after, IMAGE_2)  # Eq. 3
        return self.single(v_1), self.single(v_2)

    def image_tokens(self, visual: Tensor) -> Tensor:
        """(B, S, D) -> [IMG1] and [IMG2] (B, 2, D)."""
        return visual[:, :: 1 + self.n_cells]  # every 50th: tokens 0 and 50

    def joint(self, visual: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Eq. 5 in pre-training, where every token sees all tokens except padding. visual (B, S, D)
        of Eq. 4, ids (B, L) -> visual (B, S, D); text (B, 1 + L, D), [CLS] first."""
        start = visual.shape[1]  # of the text: 100
        seen = ids != NULL
        if self.cfg.see_padding:  # --variant released
            seen = torch.ones_like(seen)
        seen = F.pad(seen, (start + 1, 0), value=True)  # images and [CLS] are seen, too
        x = torch.cat([visual, self.embed.text(ids)], 1)
        x = self.cross(x, seen[:, None, None])  # Eq. 5
        return x[:, :start], x[:, start:]

    def causal(self, visual: Tensor, ids: Tensor, asked: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 5 in fine-tuning and decoding, on causal_sequence. visual (B, S, D) of Eq. 4, ids
        (B, K) -> visual (B, S, D), words (B, K, D) and [MASK]s (B, asked, D)."""
        x, mask = self.causal_sequence(visual, ids, asked)
        x = self.cross(x, mask)  # Eq. 5
        end = x.shape[1] - asked  # of the words: 124
        start = end - ids.shape[1]  # of the words: 101
        return x[:, : visual.shape[1]], x[:, start:end], x[:, end:]

    def causal_sequence(self, visual: Tensor, ids: Tensor, asked: int) -> tuple[Tensor, Tensor]:
        """-> the tokens (B, T, D) of images, [CLS] (if finetune_cls), words, and a [MASK] for the
        word after each of the last `asked` words; their causal_mask (1, 1, T, T).

        The [MASK] for word t sees what word t - 1 sees, and has the position of word t."""
        text = self.embed.text(ids) if self.cfg.finetune_cls else self.embed.words(ids)
        mask = causal_mask(visual.shape[1], text.shape[1], asked, ids.device)
        if asked:
            mask_ids = torch.full_like(ids[:, :asked], self.embed.mask_id)
            first = ids.shape[1] - asked + 1  # position; fine-tuning: 23 - 23 + 1 = 1
            text = torch.cat([text, self.embed.words(mask_ids, first)], 1)
        return torch.cat([visual, text], 1), mask[None, None]

    # -- pre-training

    def masked_caption(self, caption: Tensor) -> tuple[Tensor, Tensor]:
        """mask_words, or its released form."""
        if self.cfg.mask_rules == "released":
            return released_mask_words(caption, self.vocab_size, self.cfg.mask_rate)
        return mask_words(caption, self.vocab_size, self.cfg.mask_rate)

    def mlm(self, before: Tensor, after: Tensor, caption: Tensor) -> dict[str, Tensor]:
        """Eq. 6: predict masked words of captions (B, L) from the other words and the images."""
        ids, target = self.masked_caption(caption)
        visual = self.encode(before, after)  # Eq. 4
        _, text = self.joint(visual, ids)  # Eq. 5
        logits = self.head(text[:, 1:])  # without [CLS]
        return {"mlm": word_loss(logits, target)}  # Eq. 6

    def mvcl(self, before: Tensor, after: Tensor, caption: Tensor) -> dict[str, Tensor]:
        """Eq. 7-8: recognise masked cells of one image of each pair from the pair's other cells and
        its caption (B, L)."""
        predicted, features, places = self.predict_cells(before, after, caption)
        loss = cell_loss
        if self.cfg.mvcl_negatives == "predictions":
            loss = released_cell_loss
        return {"mvcl": loss(predicted, features, places, self.cfg.tau_mvcl)}  # Eq. 7-8

    def predict_cells(
        self, before: Tensor, after: Tensor, caption: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mask cells, and predict all (mvcl_negatives="predictions" needs all) -> predictions and
        features (M, C) of all cells of the batch, in the order (B, images, N), and the places of
        the masked ones among them (n,). With 16 pairs of 2 * 49 cells, M = 1568, n = 16 * 7."""
        pairs, _, height, width = before.shape
        N = self.n_cells
        features = before.flatten(2).mT  # (B, 49, C)
        if after.shape[2]:  # CUB has no second image
            features = torch.cat([features, after.flatten(2).mT], 1)  # (B, 98, C)
        images = features.shape[1] // N  # 2
        places = mask_cells(pairs, images, N, self.cfg.cell_mask_rate, before.device)  # (n,)
        # One image below the other: 7 rows of the first, then 7 of the second
        is_masked = marked(places, pairs * images * N).view(pairs, 1, -1, width)  # (B, 1, 14, 7)
        shown_before = before.masked_fill(is_masked[:, :, :height], 0)
        shown_after = after.masked_fill(is_masked[:, :, height:], 0)
        visual = self.encode(shown_before, shown_after)  # Eq. 4, (B, 100, D)
        z, _ = self.joint(visual, caption)  # Eq. 5
        cells_1 = z[:, 1 : 1 + N]  # tokens 1 to 49
        cells_2 = z[:, 2 + N :]  # tokens 51 to 99
        hidden = self.cell_head(torch.cat([cells_1, cells_2], 1))  # (B, 98, D)
        # As released, the weights of the projection (D, C) map back to features.
        predicted = hidden @ self.embed.project.weight + self.cell_bias  # (B, 98, C)
        return predicted.flatten(0, 1), features.flatten(0, 1), places

    def fda(
        self, before: Tensor, after: Tensor, caption: Tensor, rewritten: Tensor
    ) -> dict[str, Tensor]:
        """Eq. 9: tell captions (B, L) from six rewrites of each, so that details have to be
        compared. Only the first B' pairs are used, as many as there are in rewritten (B', 6, L)."""
        count = rewritten.shape[0]
        visual = self.encode(before[:count], after[:count])  # Eq. 4
        ids = torch.cat([caption[:count, None], rewritten], 1)  # (B', 7, L)
        visual = visual.repeat_interleave(ids.shape[1], 0)  # (7B', S, D)
        z, text = self.joint(visual, ids.flatten(0, 1))  # Eq. 5
        g = self.image_tokens(z).mean(1).view(*ids.shape[:2], -1)  # (B', 7, D)
        c = text[:, 0].view(*ids.shape[:2], -1)  # [CLS], (B', 7, D)
        return {"fda": align_loss(g, c, self.cfg.tau_fda)}  # Eq. 9

    # -- fine-tuning

    def captioning(
        self, before: Tensor, after: Tensor, caption: Tensor, changed: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Captions (B, L) -> L_MLM, in which a word sees only earlier words. Given `changed`, bool
        (B,), False for distractors, also L_judge.

        [ours] Each word is predicted from a [MASK] in its place, as decoding does. The paper
        "adapts" MLM, and the released code masks 15 % of the words and predicts these."""
        cfg = self.cfg
        visual = self.encode(before, after)  # Eq. 4
        if cfg.finetune_targets == "every":
            ids = caption[:, :-1]  # (B, 23), from START
            target = caption[:, 1:]  # (B, 23), each the word after the id
            z, _, hidden = self.causal(visual, ids, asked=ids.shape[1])  # Eq. 5, of [MASK]s
        else:  # --variant released
            ids, target = self.masked_caption(caption)
            z, hidden, _ = self.causal(visual, ids, asked=0)  # Eq. 5, of the words
        losses = {"caption": word_loss(self.head(hidden), target, cfg.reduction)}  # Eq. 6
        if changed is not None:
            logits = self.judge(self.image_tokens(z).flatten(1))  # section 3.1
            losses["judge"] = judge_loss(logits, changed, cfg.reduction)
        return losses

    # -- captions

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor) -> Tensor:
        """before, after (B, C, H, W) -> ids of greedy captions (B, max_len)."""
        visual = self.encode(before, after)

        def next_word(ids: Tensor) -> Tensor:
            _, _, hidden = self.causal(visual, ids, asked=1)
            return self.head(hidden[:, 0])

        return decode(next_word, before.shape[0], self.max_len, before.device)

    @torch.no_grad()
    def attention_map(self, before: Tensor, after: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """word_attention, averaged over the words of ids (B, L) -> "before" and "after" (B, H, W),
        which together sum to 1, or to 0 for a caption without words."""
        weight = self.word_attention(before, after, ids).flatten(2)  # (B, L - 1, 2N)
        # Row t of the weights is from the [MASK] that predicts word t + 1.
        over_cells = masked_mean(weight, is_word(ids[:, 1:]))  # (B, 2N)
        map_before, map_after = over_cells.unflatten(1, (2, *self.grid[1:])).unbind(1)
        return {"before": map_before, "after": map_after}

    @torch.no_grad()
    def word_attention(self, before: Tensor, after: Tensor, ids: Tensor) -> Tensor:
        """Where the last layer looked for each word of ids (B, L), without START: the attention
        from its [MASK] to the cells of both images, averaged over heads -> (B, L - 1, 2, H, W).

        The softmax is over the cells alone, so it shows how the layer divides its attention among
        them, and not how much it pays to special tokens and words."""
        visual = self.encode(before, after)
        count = ids.shape[1] - 1
        x, mask = self.causal_sequence(visual, ids[:, :-1], asked=count)
        first = x.shape[1] - count  # of the [MASK]s: token 124
        scores = self.cross.last_scores(x, mask)[:, :, first:, : visual.shape[1]]
        scores = scores.unflatten(-1, (2, -1))[..., 1:]  # without [IMG1] and [IMG2]
        weight = scores.flatten(-2).softmax(-1).mean(1)  # (B, L - 1, 2N)
        return weight.unflatten(2, (2, *self.grid[1:]))


# ---- presets -------------------------------------------------------------------------------------

# Table 6 has batches of 200. We count scenes: on CLEVR-Change, 100 scenes have 200 pairs.
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
    # [ours] Your own pairs are usually few: half the width, SCORER's schedule, and no pre-training,
    # with which the model recognised fewer unchanged validation pairs (docs/results.md).
    "pairs": dict(pretrain_steps=0, dim=256, ffn=1024, layers=2, batch_size=16, lr=5e-4,
                  schedule="cosine", warmup=50, grad_clip=1.0, steps=2000, eval_every=1000,
                  select_by="ROUGE-L"),
    # [ours] Pre-training is MVCL alone, because MLM can be learned without the images. tau_mvcl is
    # low because many cells look alike (half of all cosines are above 0.79). Most cells are masked,
    # so that neighbours do not reveal a cell. Validation chose layers, lr and w_judge.
    "mini": dict(dim=128, ffn=256, heads=4, layers=3, dropout=0.0, pretrain_steps=1200,
                 pretrain_batch=8, pretrain_lr=1e-3, pretrain_warmup=50, mlm=0, fda=0,
                 cell_mask_rate=0.7, tau_mvcl=0.02, tau_fda=0.1, w_judge=0.2, batch_size=16,
                 lr=1e-3, schedule="cosine", warmup=100, grad_clip=1.0, steps=3000, eval_every=300,
                 eval_batch=250),
}  # fmt: skip

# --variant released: where the released code differs from our default, with the places in
# github.com/yaolinli/IDC at 6f3aabf. docs/released.md explains them, and what is not switched. A
# default is the paper's, unless a comment here or where it is used says [ours] or "as released".
RELEASED = {
    "all": dict(  # for every data set
        swap=False,  # the default is [ours]: clver/data/dataset_pretrain_clver.py:45-46
        finetune_targets="masked",  # default [ours]: clver/data/dataset_finetune_clver.py:144-160
        init_weights="pytorch",  # the default is [ours]: clver/modules_pretrain.py:31-42
        embedding="released",  # clver/modules_pretrain.py:32, 50-58, 378-420
        mvcl_negatives="predictions",  # clver/modules_pretrain.py:146-149, 154-166
        see_padding=True,  # the default is [ours]: clver/modules_pretrain.py:117, 133, 184
        finetune_cls=False,  # section 2.3 has it in inference: clver/modules_finetune.py:52-61
        mask_rules="released",  # clver/data/dataset_pretrain_clver.py:156-200
        rates="released",  # the default's constant rate is [ours]: clver/utils.py:149-153, 162-169
        reduction="sum",  # in pre-training, both take the mean: clver/finetune.py:156-162
    ),
    "clevr_change": {},  # nothing but the above; steps and learning rates stay the paper's
    # bird/config/pretrain_bird_nabirds.json:13-14 and pretrain_cub.json:14
    "birds_to_words": dict(pretrain_steps=60000, pretrain_batch=150, cub_batch=350),
}

# What the paper reports for IDC with pre-training; a run prints it below its scores.
PUBLISHED = {
    "clevr_change": {  # Table 2
        "total": {"BLEU-4": 51.2, "METEOR": 36.2, "ROUGE-L": 71.7, "CIDEr": 128.9}},
    "birds_to_words": {  # Table 1; with --cub and --nabirds 31.0, 23.4, 49.1, 25.3
        "total": {"BLEU-4": 28.0, "METEOR": 23.1, "ROUGE-L": 48.4, "CIDEr": 18.6}},
}  # fmt: skip

# ---- training ------------------------------------------------------------------------------------


def pretraining_stages(cfg: Config) -> list[str]:
    """The stages before "finetune". Each has cfg.pretrain_steps steps."""
    if cfg.pretrain_steps == 0:
        return []
    return ["cub", "pretrain"] if cfg.cub else ["pretrain"]


def task_pool(cfg: Config, stage: str) -> list[str]:
    """The tasks of a stage of pre-training, each as often as its share says."""
    pool = []
    for task in TASKS:
        pool += [task] * getattr(cfg, task)
    if cfg.nabirds and stage == "pretrain":
        pool += ["birds"] * 3  # a fifth of 9 + 1 + 2 + 3, as in appendix A.3
    return pool


def draw_task(cfg: Config, stage: str, step: int) -> str:
    """The task of a step of pre-training, drawn by the shares. It depends only on seed and step."""
    pool = task_pool(cfg, stage)
    rng = np.random.default_rng([cfg.seed, step])
    return pool[rng.integers(len(pool))]


def compute_losses(
    model: IDC, batches: tuple, cfg: Config, task: str = "caption", rewrites=None
) -> dict[str, Tensor]:
    """The losses of a task and their total, each a mean over the batches of a step: changed pairs
    and, in some data sets, distractor pairs. (A batch of "birds" is what Birds.batch returns.)
    rewrites, for "fda": pair ids -> (B, 6, L), as by support.rewrites.Negatives.

    In CLEVR-Change and mini, a scene has three pictures: before, after, and the distractor, which
    is "before" in another view. Its pairs are (before, after) and (before, distractor). In half
    of the scenes of an epoch, before and distractor are exchanged [ours, as in SCORER]. The two
    batches stay separate [ours]: in a joint contrastive loss, an image would be its own negative.
    (The released code has one mixed batch. With reduction="sum", its loss is twice ours.)"""
    losses: dict[str, Tensor] = {}
    for n, batch in enumerate(batches):
        if task == "birds":
            inputs = batch
        else:
            batch = batch.to(cfg.device)
            after = batch.after
            if batch.single:  # of CUB: a second image without rows
                after = after[:, :, :0]
            inputs = [batch.before, after, batch.caption]
        if task == "fda":  # a seventh of the pairs (as released), because each has seven captions
            count = max(1, len(batch.pair_ids) // (1 + REWRITES))
            inputs.append(rewrites(batch.pair_ids[:count]).to(cfg.device, non_blocking=True))
        if task == "caption" and len(batches) == 2:  # with one, there are no distractors to judge
            is_changed = n == 0
            inputs.append(torch.full(batch.caption.shape[:1], is_changed, device=cfg.device))
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.on_cuda):
            terms = model(*inputs, task=task)
        for name, term in terms.items():
            losses[name] = losses.get(name, 0) + term / len(batches)
    losses["total"] = total_loss(losses, cfg)
    return losses


def train(cfg: Config, dataset, resume: bool = False) -> tuple[IDC, dict]:
    """Pre-train, then fine-tune on a data set (data.Dataset) into cfg.out_dir -> the best model by
    validation, and its checkpoint. pretrained.pt keeps the weights after pre-training, for --init.
    `resume` continues from last.pt (see Run) as if training had never stopped.
    FloatingPointError if a loss is not finite."""
    from support.run import Run

    sources = pretraining_data(cfg, dataset) if cfg.pretrain_steps else {}
    torch.manual_seed(cfg.seed)
    model = IDC(cfg, len(dataset.vocab), dataset.grid, dataset.max_len).to(cfg.device)
    if cfg.init and not resume:
        load_init(model, cfg, dataset)
    if cfg.compile and cfg.on_cuda:
        model.compile(fullgraph=True, dynamic=False)
    run = Run(cfg, model, [dataset], resume)
    first = 0  # steps of the run before a stage
    for stage in pretraining_stages(cfg):
        if run.step < first + cfg.pretrain_steps:  # otherwise, it was done before a resumed run
            pretrain(run, stage, first, sources[stage])
        first += cfg.pretrain_steps
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=cfg.weight_decay, fused=True)
    run.start(optimizer, "finetune", first, first + cfg.steps)  # take_step sets the rate
    for batches in dataset.train_batches(cfg.batch_size, cfg.seed, run.step - first, cfg.steps):
        if run.is_over():
            break
        take_step(run, first, compute_losses(model, batches, cfg))
        done = run.step - first
        if done % cfg.eval_every == 0 or done == cfg.steps:
            run.checkpoint(evaluate(model, dataset, "val", cfg))
            model.train()
    return run.best_model()


def pretrain(run, stage: str, first: int, source: tuple) -> None:
    """A stage of pre-training, which follows the run's step `first`. Each of its steps has one
    task. source: see pretraining_data."""
    cfg = run.cfg
    pairs, rewrites, birds = source
    size = cfg.pretrain_batch
    if stage == "cub" and cfg.cub_batch:
        size = cfg.cub_batch
    optimizer = torch.optim.Adam(run.model.parameters(), fused=True)
    run.start(optimizer, stage, first, first + cfg.pretrain_steps)
    for batches in pairs.train_batches(size, cfg.seed, run.step - first, cfg.pretrain_steps):
        if run.is_over():
            break
        task = draw_task(cfg, stage, run.step)
        if task == "birds":  # in place of the step's captioned pairs
            batches = (birds.batch(cfg.device),)
        take_step(run, first, compute_losses(run.model, batches, cfg, task, rewrites))
        done = run.step - first
        if done % cfg.eval_every == 0 or done == cfg.pretrain_steps:
            run.log_losses()
            run.save("pretrained.pt")  # the latest weights of pre-training
            run.save("last.pt")


def take_step(run, first: int, losses: dict[str, Tensor]) -> None:
    """One step of Adam on the losses' total, in the stage that follows the run's step `first`."""
    cfg = run.cfg
    run.optimizer.param_groups[0]["lr"] = rate_of(cfg, run.stage, run.step - first)
    run.optimizer.zero_grad()
    losses["total"].backward()
    if cfg.grad_clip > 0:
        nn.utils.clip_grad_norm_(run.model.parameters(), cfg.grad_clip)
    run.optimizer.step()
    run.step += 1
    run.log(losses)


def rate_of(cfg: Config, stage: str, step: int) -> float:
    """The learning rate of a step of a stage, in which steps count from 0. Pre-training only warms
    up; fine-tuning has RunConfig's schedule."""
    if cfg.rates == "released":
        return released_rate(cfg, stage, step)
    if stage == "finetune":
        return learning_rate(cfg, step)
    return cfg.pretrain_lr * min((step + 1) / max(1, cfg.pretrain_warmup), 1.0)


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(
    model: IDC, dataset, split: str, cfg: Config, out_dir: Path | None = None, state=None
) -> dict[str, float]:
    """Caption a split of a data set (data.Dataset) -> the scores of all its pairs together.

    Without out_dir, as in training, these are quick metrics. With it, all metrics of all groups are
    printed and written, with captions, pictures, and how the checkpoint `state` was trained."""
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
    return dataset.results(split, captions, maps, out_dir, published=PUBLISHED, state=state)


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
        model, state = train(cfg, dataset, args.resume)
    if args.split != "none":
        evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir), state)


# ---- data ----------------------------------------------------------------------------------------


def open_dataset(cfg: Config, make: bool = True):
    """The data set of a run, from data.open_dataset. With --cub, it has CUB's words, too."""
    import data
    from support.birds import add_words_of_cub

    for stage in pretraining_stages(cfg):
        if not task_pool(cfg, stage):
            flags = " ".join(f"--{task} 0" for task in TASKS)
            raise InputError(f"{flags} leave no task; give --pretrain_steps 0")
    if cfg.nabirds and not cfg.difference_encoder:
        raise InputError("--nabirds needs --difference_encoder, which it trains")
    dataset = data.open_dataset(cfg, make)
    if cfg.cub:
        add_words_of_cub(dataset, cfg.cub)
    if not cfg.swap:
        scenes = dataset.scenes["train"]
        dataset.scenes["train"] = [replace(scene, swapped=None) for scene in scenes]
    return dataset


def pretraining_data(cfg: Config, dataset) -> dict[str, tuple]:
    """Stage -> what `pretrain` reads in it: captioned pairs, their rewrites, and birds. The latter
    two may be None."""
    import data
    from support.birds import Birds, match_cub
    from support.rewrites import Negatives

    captioned = {"pretrain": dataset}
    if cfg.cub:
        captioned["cub"] = data.load("cub", cfg.cub, cfg)
        match_cub(captioned["cub"], dataset)
    birds = None
    if cfg.nabirds:
        birds = Birds(data.load("nabirds", cfg.nabirds, cfg), cfg.pretrain_batch, cfg.seed)
    result = {}
    for stage, pairs in captioned.items():
        rewrites = Negatives(pairs, REWRITES) if cfg.fda else None
        result[stage] = (pairs, rewrites, birds)
    return result


def load_init(model: IDC, cfg: Config, dataset) -> None:
    """Start from the weights of --init. InputError if they do not fit this model."""
    from support.checks import check_fit
    from support.files import load_tensors, load_weights

    state = load_tensors(cfg.init, device=cfg.device)
    check_fit(dataset, state)
    load_weights(model, state["model"], cfg.init)
    heads = state["config"]["heads"]  # the shapes of the weights do not show it
    if cfg.heads != heads:
        raise InputError(f"--init {cfg.init} was trained with --heads {heads}; give the same")


# ---- other forms ---------------------------------------------------------------------------------


class ReleasedEmbedding(Embedding):
    """Eq. 1-3, but [IMG1], [IMG2] and [CLS] share a vector, and have types of their own. A sigmoid
    follows the linear layer. Positions are doubled_sinusoid's. (Section 2.1 has three special
    tokens, three types, and the positions of Vaswani et al.)"""

    n_special = 1
    n_types = 6
    special_rows = (0, 0, 0)
    type_rows = (3, 4, 5)  # the first three are those of the special tokens

    def __init__(self, cfg: Config, vocab_size: int, channels: int, positions: int):
        super().__init__(cfg, vocab_size, channels, positions)
        self.position = doubled_sinusoid(positions, cfg.dim)

    def cells_of(self, features: Tensor) -> Tensor:
        return super().cells_of(features).sigmoid()


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


def released_cell_loss(predicted: Tensor, features: Tensor, places: Tensor, tau: float) -> Tensor:
    """Like cell_loss, but the negatives are the predictions of unmasked cells and the features of
    the other masked cells. (Eq. 8 has the features of unmasked cells.)"""
    is_masked = marked(places, features.shape[0])
    with torch.autocast(features.device.type, enabled=False):
        p = F.normalize(upcast(predicted), dim=-1)
        f = F.normalize(features, dim=-1)
        candidates = torch.where(is_masked[:, None], f, p)
        s = p[places] @ candidates.T / tau  # (n, M)
        return F.cross_entropy(s, places)


def released_rate(cfg: Config, stage: str, step: int) -> float:
    """After the warm-up of pre-training, the rate falls as 1 / sqrt(step). In fine-tuning, it is
    halved at steps 10000 and 20000."""
    if stage == "finetune":
        return learning_rate(cfg, step) / 2 ** min(step // 10000, 2)
    if step == 0:
        return 1e-8  # these rates are one step behind ours
    warmup = max(1, cfg.pretrain_warmup)
    return cfg.pretrain_lr * min(step / warmup, (warmup / step) ** 0.5)


if __name__ == "__main__":
    from support.files import run_main

    run_main(main)
