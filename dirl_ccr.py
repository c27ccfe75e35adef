"""DIRL+CCR: Distractors-Immune Representation Learning with Cross-modal Contrastive Regularization
for Change Captioning (Tu et al., ECCV 2024).

A pair shows a scene before and after a change or, if it is a distractor, only another camera and
light; then its caption says that nothing changed. The method has three ideas:
1.  Under another camera or light, each channel of the features should keep its values, and
    different channels should stand for different things. So a loss correlates each channel of
    "before" with the same channel of "after", and decorrelates it from all others.
2.  Cross-attention is to find in the other image what both share, though no loss asks for it.
    Subtracting it leaves the change.
3.  The changed object is often small, so the decoder easily attends to the wrong cells. A
    contrastive loss ties the words of a caption to the differences that they attended to.

The flow of one pair, with CLEVR-Change's sizes (captions of 24 ids, a vocabulary of 76):
    before, after (1024, 14, 14) each               In training only:
       v  embed, Eq. 1
    x_bef, x_aft (196, 512) each . . . . . . . . . > y_bef, y_aft (196, 512) each, by mlp, Eq. 2
       v  cross_view, the first, LN(x + shared)        v  channel_correlation, Eq. 3
    new_bef, new_aft (196, 512) each                c (512, 512), over all cells of the batch
       v  cross_view, the second, Eq. 5                v  dirl_loss, Eq. 4
    shared_bef, shared_aft (196, 512) each          L_dirl
       v  x - shared of each image, fuse, Eq. 6-7
    difference (196, 512) and caption (24 ids)
       v  decoder, Eq. 8-10
    hidden (24, 512) . . . . . . . . . . . . . . . > words, visual (24, 512) each, of Eq. 8 and 9
       v  decoder.head, Eq. 11                         v  ccr_loss, Eq. 12-14, in a batch of B pairs
    logits (24, 76)                                 L_ccr
       v  caption_loss, Eq. 15
    L_cap

Read first: CrossView, DecoderLayer, channel_correlation, dirl_loss, ccr_loss, DIRL.encode and
.forward, compute_losses. Skip at first: Decoder, attention_map, and what else follows DIRL, such as
"other forms" at the end: parts of ablations and of the released code.
Defaults follow the paper, unless a comment says "as released" (the authors' code) or [ours].
RELEASED, below, lists what --variant released changes.
Equation  where                in the code              as printed, for each image of a pair
Eq. 1     ImageEmbedding       x                        F~ = conv(F) + pos
Eq. 2     DIRL.mlp             y                        Y~ = MLP(F~)
Eq. 3     channel_correlation  c                        C_ij = cosine of Y~_bef's i and Y~_aft's j
Eq. 4     dirl_loss            L_dirl                   sum_i (1 - C_ii)^2 + alpha sum_{i!=j} C_ij^2
Eq. 5     CrossView            shared                   F~^s = MHCA(F~, the other image's F~)
Eq. 6     DIRL.encode          difference_bef, ..._aft  F~^d = F~ - F~^s
Eq. 7     Fusion               difference               F~_d = ReLU([F~^d_bef ; F~^d_aft] W + b)
Eq. 8     DecoderLayer         words                    E^[W] = MHSA(E[W])
Eq. 9     DecoderLayer         visual                   V^ = MHCA(E^[W], F~_d)
Eq. 10    DecoderLayer         hidden                   V^' = LN(V^ + FFN(V^))
Eq. 11    Decoder.head         softmax(logits)          W = softmax(V^' W_h + b_h)
Eq. 12    ccr_loss             mean_words, mean_visual  E~[W] = 1/m E^[W], V~ = 1/HW V^
Eq. 13    ccr_loss             s                        sim = E~[W] . V~
Eq. 14    ccr_loss             L_ccr                    1/2 (nce(sim / tau) + nce(sim^T / tau))
Eq. 15    caption_loss         L_cap                    -sum of log p(next word)
Eq. 16    total_loss           w_dirl, w_ccr            L_cap + lambda_d L_dirl + lambda_c L_ccr
nce(S) = -mean_a log softmax_b(S)_aa (info_nce). MHCA, MHSA: multi-head cross-, self-attention.
Axis letters: B pairs, C channels of the features (of Eq. 3-4: D), H x W grid, N = H*W cells, D
width, h heads, L ids of a caption (START, words, END, padding), V ids of the vocabulary.
To copy: this file and common.py; to train, also data.py, scores.py and support/.
Licence: MIT. It contains no code from the authors' repository.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common import (
    NULL,
    Attention,
    GridPosition,
    InputError,
    RunConfig,
    decode,
    info_nce,
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
    """DIRL+CCR. The settings of a run (data, steps, device) are in common.RunConfig."""

    dim: int = 512  # width D of images, words and decoder (section 4.2)
    word_dim: int = 300  # width of word embeddings (section 4.2)
    heads: int = 8  # heads of every attention (as released)
    layers: int = 2  # cross-attention layers (as released); Eq. 5 is the last one [ours]
    decoder_layers: int = 2  # number of decoder layers (as released)
    dropout: float = 0.1  # dropout probability (as released)
    use_coords: bool = True  # append the cell's x and y to the features (released for CLEVR-Change)
    w_dirl: float = 0.5  # weight of L_dirl in Eq. 16 (section 4.6); 0 leaves it and its MLP out
    alpha: float = 0.003  # weight of decorrelation in Eq. 4 (as released); 0: correlation only
    w_ccr: float = 0.3  # weight of L_ccr in Eq. 16 (section 4.6); 0 leaves it out
    tau: float = 0.5  # temperature of Eq. 14 (section 4.2)
    channel_eps: float = 1e-5  # keeps constant channels finite in Eq. 3 [ours]
    # Other forms; skip at first. The default comes first. RELEASED, below, says what is released.
    # "residual": LN(X + attention). "subtract", the baseline Subtraction: Eq. 7 of X_bef - X_aft.
    difference: Literal["attention", "residual", "subtract"] = "attention"  # what Eq. 6 subtracts
    correlate: bool = True  # Eq. 4's first term; without it decorrelation only (Table 7)
    ccr_form: Literal["paper", "released"] = "paper"  # Eq. 12-14, or released_ccr
    ccr_equal_captions: Literal["ignored", "negatives"] = "ignored"  # equal captions [ours]
    input_norm: bool = True  # LayerNorm on the decoder's inputs (released for CLEVR-DC)
    xavier: bool = True  # Xavier-uniform fusion and decoder (released for CLEVR-DC); else PyTorch's


# ---- modules -------------------------------------------------------------------------------------


class ImageEmbedding(nn.Module):
    """Eq. 1: X = conv_1x1(features) + position. (B, C, H, W) -> (B, N, D), n = row * W + column.

    use_coords appends the x and the y of each cell, both in [-1, 1) (released for CLEVR-Change)."""

    def __init__(self, channels: int, height: int, width: int, dim: int, use_coords: bool):
        super().__init__()
        self.grid = (channels, height, width)
        self.use_coords = use_coords
        x = torch.arange(width) * 2 / width - 1
        y = torch.arange(height) * 2 / height - 1
        coords = torch.stack(torch.meshgrid(x, y, indexing="xy"))  # (2, H, W)
        self.register_buffer("coords", coords, persistent=False)
        self.conv = nn.Conv2d(channels + 2 * use_coords, dim, 1)
        self.position = GridPosition(dim, height, width)

    def forward(self, features: Tensor) -> Tensor:
        # Without this check, broadcasting would silently accept some wrong shapes.
        assert features.shape[1:] == self.grid, f"{self.grid} expected, {features.shape} found"
        if self.use_coords:
            coords = self.coords.to(features.dtype).expand(features.shape[0], -1, -1, -1)
            features = torch.cat([features, coords], 1)
        x = self.conv(features) + self.position()  # Eq. 1, (B, D, H, W)
        return x.flatten(2).transpose(1, 2)  # (B, N, D)


class CrossView(nn.Module):
    """Eq. 5: what each image of a pair shares with the other, shared_bef = MHCA(X_bef, X_aft) and
    shared_aft = MHCA(X_aft, X_bef). X_bef, X_aft (B, N, D) -> two tensors of the same shape.

    Eq. 6 subtracts this, so that the decoder need not find the change among unchanged objects. In
    SCORER, the same authors add it, because a caption may name these ("left of the cube"). The
    attention can learn to flip the sign. [ours] Here X comes from earlier layers, if there are any,
    and in Eq. 6 from Eq. 1."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)

    def forward(self, x_bef: Tensor, x_aft: Tensor) -> tuple[Tensor, Tensor]:
        shared_bef = self.attention(x_bef, x_aft)  # Eq. 5
        shared_aft = self.attention(x_aft, x_bef)  # Eq. 5
        return shared_bef, shared_aft


class ResidualCrossView(CrossView):
    """A layer before that of Eq. 5 (as released), in which each image already sees the other. It
    returns the new X = LN(X + shared) of both, which only the next layer reads. In the released
    form, the last layer is of this kind, too, and Eq. 6 subtracts what it returns."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.norm = nn.LayerNorm(cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x_bef: Tensor, x_aft: Tensor) -> tuple[Tensor, Tensor]:
        shared_bef, shared_aft = super().forward(x_bef, x_aft)
        new_bef = self.norm(x_bef + self.dropout(shared_bef))
        new_aft = self.norm(x_aft + self.dropout(shared_aft))
        return new_bef, new_aft


class Fusion(nn.Module):
    """Eq. 7: ReLU(W [difference_bef ; difference_aft] + b). Its dropout is as released; so is its
    LayerNorm for CLEVR-DC, but not for CLEVR-Change. Both differences (B, N, D) -> (B, N, D)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.project = nn.Linear(2 * cfg.dim, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim) if cfg.input_norm else nn.Identity()

    def forward(self, difference_bef: Tensor, difference_aft: Tensor) -> Tensor:
        joined = torch.cat([difference_bef, difference_aft], -1)  # (B, N, 2D)
        return F.relu(self.dropout(self.norm(self.project(joined))))  # Eq. 7


class DecoderLayer(nn.Module):
    """Eq. 8-10, a post-norm layer of the decoder: words attend to earlier words and then to the
    difference, and a feed-forward network follows. x (B, L, D), difference (B, N, D) -> `hidden`,
    the new x, and `words`, `visual` and x1, all (B, L, D).

    The printed equations leave out most residuals, LayerNorms and dropouts of the standard layer,
    which the paper cites. This layer has them (as released). So E^[W] and V^ are `words` and
    `visual` for Eq. 12, but x1 and x2, behind residual and norm, for Eq. 9 and 10."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.widen = nn.Linear(cfg.dim, 4 * cfg.dim)
        self.output = nn.Linear(4 * cfg.dim, cfg.dim)
        self.norm1 = nn.LayerNorm(cfg.dim)
        self.norm2 = nn.LayerNorm(cfg.dim)
        self.norm3 = nn.LayerNorm(cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, difference: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        words = self.self_attention(x, x, causal=True)  # Eq. 8
        x1 = self.norm1(x + self.dropout(words))
        visual = self.cross_attention(x1, difference)  # Eq. 9
        x2 = self.norm2(x1 + self.dropout(visual))
        inner = self.dropout(F.relu(self.widen(x2)))
        hidden = self.norm3(x2 + self.dropout(self.output(inner)))  # Eq. 10
        return hidden, words, visual, x1


class Decoder(nn.Module):
    """Words and difference -> hidden states, from which `head`, Eq. 11, predicts the next words.

    A word sees only itself and earlier words, so padding at the end of a caption needs no mask."""

    def __init__(self, cfg: Config, vocab_size: int, max_len: int):
        super().__init__()
        # padding_idx: the row of NULL gets no gradient. With `xavier`, it is drawn like all others.
        self.embed = nn.Embedding(vocab_size, cfg.word_dim, padding_idx=NULL)
        self.register_buffer("position", sinusoid(max_len, cfg.word_dim), persistent=False)
        self.project = nn.Linear(cfg.word_dim, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim) if cfg.input_norm else nn.Identity()
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.head = nn.Linear(cfg.dim, vocab_size)  # Eq. 11, without its softmax

    def forward(self, ids: Tensor, difference: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids (B, L), difference (B, N, D) -> hidden states and, from the last layer, `words` and
        `visual`, which L_ccr reads (as released; the paper does not say which layer), and x1, the
        words as they attend to the difference, for attention maps. All (B, L, D)."""
        x = self.embed(ids) + self.position[: ids.shape[1]]  # before `project`, as released
        x = self.dropout(self.norm(self.project(x)))
        for layer in self.layers:
            x, words, visual, x1 = layer(x, difference)  # Eq. 8-10
        return x, words, visual, x1


# ---- losses --------------------------------------------------------------------------------------


def channel_correlation(y_bef: Tensor, y_aft: Tensor, eps: float) -> Tensor:
    """Eq. 3: correlation of every channel of "before" with every channel of "after".
    y_bef, y_aft (B, N, D) -> C (D, D).

    As released, and unlike the printed equation, the sum runs over all cells of all samples (cell n
    of "before" meets cell n of "after", even if the camera has moved), and channels are centred, as
    in Barlow Twins. The standard deviation is unbiased, so C_ii <= (BN - 1) / BN.

    Both images have the same positions in X (Eq. 1), so a channel of Y that depends on the cell
    alone agrees perfectly with itself, even between images of different pairs. So L_dirl can fall
    while channels learn nothing about objects. On mini, it does (docs/tour.md, "DIRL+CCR").

    By hand, for four cells and two channels, equal in both images: (1, 1), (1, -1), (-1, 1),
    (-1, -1). All means are 0, variances 4/3, so C = ((3/4, 0), (0, 3/4)), if eps is 0."""
    # The sums run over thousands of rows, too many for bfloat16.
    with torch.autocast(y_bef.device.type, enabled=False):
        y_bef = upcast(y_bef).flatten(0, 1)  # (BN, D)
        y_aft = upcast(y_aft).flatten(0, 1)
        z_bef = (y_bef - y_bef.mean(0)) / (y_bef.var(0) + eps).sqrt()
        z_aft = (y_aft - y_aft.mean(0)) / (y_aft.var(0) + eps).sqrt()
        return z_bef.T @ z_aft / z_bef.shape[0]  # Eq. 3


def dirl_loss(c: Tensor, alpha: float, correlate: bool = True) -> Tensor:
    """Eq. 4: L_dirl = sum_i (1 - C_ii)^2 + alpha sum_i sum_{j != i} C_ij^2, of C (D, D).

    By hand: C = ((0.5, 0.2), (0, 1)), alpha = 0.1: (1 - 0.5)^2 + 0 + 0.1 * 0.2^2 = 0.254."""
    diagonal = c.diagonal()
    others = c - diagonal.diag()
    correlation = (1 - diagonal).square().sum()
    decorrelation = alpha * others.square().sum()
    if not correlate:
        return decorrelation  # ablation
    return correlation + decorrelation  # Eq. 4


def ccr_loss(
    words: Tensor, visual: Tensor, caption: Tensor, tau: float, ignore_equal: bool = True
) -> Tensor:
    """Eq. 12-14, L_ccr: InfoNCE between the words of a caption and the differences that they attend
    to, in both directions. words, visual (B, L, D) of Eq. 8-9, caption (B, L).

    The words are those of the reference caption (section 3.4). If there are earlier layers,
    `words` has already seen the difference in these. The paper divides V^ by HW, but V^ of Eq. 9
    has one row for each word, so both means run over words. They are not normalised.

    By hand: two captions of one word, words and visual both (1, 0), (0, 1), tau = 0.5. S / tau =
    ((2, 0), (0, 2)), and each row and column has -log(e^2 / (e^2 + 1)) = 0.127. If both captions
    are equal, the loss is 0."""
    valid = caption != NULL  # START and END are included
    mean_words = masked_mean(words, valid)  # Eq. 12, (B, D)
    mean_visual = masked_mean(visual, valid)  # Eq. 12, (B, D)
    # Scores may be in the hundreds, where bfloat16 has no decimals.
    with torch.autocast(mean_words.device.type, enabled=False):
        s = upcast(mean_words) @ upcast(mean_visual).T / tau  # Eq. 13, and tau of Eq. 14, (B, B)
        # [ours] Pairs with equal captions are not negatives. In the paper, they are (section 3.5).
        # Then equal words, which fit both pairs, give a floor, and push unchanged pairs apart.
        if ignore_equal:
            same = (caption[:, None] == caption).all(-1)  # (B, 1, L) == (B, L) -> (B, B)
            own = torch.eye(s.shape[0], dtype=torch.bool, device=s.device)
            s = s.masked_fill(same & ~own, float("-inf"))
        return (info_nce(s) + info_nce(s.T)) / 2  # Eq. 14


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 15, L_cap: cross-entropy of each next word. logits (B, L, V) at words 0 ... L-1,
    caption (B, L) padded with NULL.

    By hand: two words with probabilities 1/2 and 1/4 -> (ln 2 + ln 4) / 2 = 1.04."""
    # As released, this is a mean over all real words of the batch. The paper sums over a sentence.
    predicted = logits[:, :-1].flatten(0, 1)
    target = caption[:, 1:].flatten()
    return F.cross_entropy(predicted, target, ignore_index=NULL)  # Eq. 15


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Eq. 16: L = L_cap + w_dirl L_dirl + w_ccr L_ccr, from the terms that DIRL.forward returns.

    Nothing is detached. L_cap trains encoder and decoder, L_ccr what makes `words` and `visual`,
    L_dirl embed and mlp."""
    dirl = losses.get("dirl", 0)
    ccr = losses.get("ccr", 0)
    return losses["caption"] + cfg.w_dirl * dirl + cfg.w_ccr * ccr  # Eq. 16


# ---- method --------------------------------------------------------------------------------------


class DIRL(nn.Module):
    """DIRL+CCR with all its parameters. grid: (C, H, W) of the features; max_len: the length of
    the longest caption in tokens, START and END included."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg = cfg
        self.grid = grid
        self.max_len = max_len
        self.embed = ImageEmbedding(*grid, cfg.dim, cfg.use_coords)
        self.cross_view = nn.ModuleList()
        if cfg.difference != "subtract":  # the baseline Subtraction has no cross-view layer
            if cfg.layers == 0:
                raise InputError("--layers 0 leaves no difference, X - X = 0; use 1 or more layers")
            self.cross_view.extend(ResidualCrossView(cfg) for _ in range(cfg.layers - 1))
            Last = CrossView if cfg.difference == "attention" else ResidualCrossView
            self.cross_view.append(Last(cfg))
        self.fuse = Subtraction(cfg) if cfg.difference == "subtract" else Fusion(cfg)
        Kind = Decoder if cfg.ccr_form == "paper" else ReleasedDecoder
        self.decoder = Kind(cfg, vocab_size, max_len)
        if cfg.w_dirl:
            self.mlp = nn.Sequential(
                nn.Linear(cfg.dim, 4 * cfg.dim),  # 4D and dropout as released
                nn.ReLU(),
                nn.Dropout(cfg.dropout),
                nn.Linear(4 * cfg.dim, cfg.dim),
            )
        # As released. The paper does not say how weights are initialised.
        initialise(self.embed, xavier=True)
        initialise(self.cross_view, xavier=True)
        initialise(self.fuse, cfg.xavier)
        initialise(self.decoder, cfg.xavier)
        if cfg.w_dirl:
            initialise(self.mlp, xavier=True)

    def encode(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """before, after (B, C, H, W) -> the difference of Eq. 7, X_bef and X_aft of Eq. 1, all
        (B, N, D)."""
        # Two batches of different sizes could silently be broadcast.
        assert before.shape == after.shape, f"{before.shape} and {after.shape} are not pairs"
        x_bef = self.embed(before)  # Eq. 1
        x_aft = self.embed(after)  # Eq. 1
        if self.cfg.difference == "subtract":
            return self.fuse(x_bef, x_aft), x_bef, x_aft  # ablation
        new_bef = x_bef
        new_aft = x_aft
        *earlier, last = self.cross_view
        for layer in earlier:
            new_bef, new_aft = layer(new_bef, new_aft)
        shared_bef, shared_aft = last(new_bef, new_aft)  # Eq. 5; released: LN(X + shared)
        difference_bef = x_bef - shared_bef  # Eq. 6, with X of Eq. 1
        difference_aft = x_aft - shared_aft  # Eq. 6
        return self.fuse(difference_bef, difference_aft), x_bef, x_aft  # Eq. 7

    def forward(self, before: Tensor, after: Tensor, caption: Tensor) -> dict[str, Tensor]:
        """before, after (B, C, H, W), caption (B, L) -> the terms of Eq. 16, by name.

        At the start, with CLEVR-Change's sizes, random features and B = 16, "caption" is about 5,
        and a guess among all words has ln 76 = 4.3. "dirl", a sum over 512 channels, is about 500
        for unrelated images, and 12 to 60 for equal ones, mostly by the MLP's dropout (2 or 3
        without). "ccr" is above ln 16 = 2.8, a guess among a batch, because S is not normalised."""
        cfg = self.cfg
        losses = {}
        difference, x_bef, x_aft = self.encode(before, after)  # Eq. 1, 5-7
        hidden, words, visual, _ = self.decoder(caption, difference)  # Eq. 8-10
        logits = self.decoder.head(hidden)  # Eq. 11
        losses["caption"] = caption_loss(logits, caption)  # Eq. 15
        if cfg.w_dirl:
            y_bef = self.mlp(x_bef)  # Eq. 2
            y_aft = self.mlp(x_aft)  # Eq. 2
            c = channel_correlation(y_bef, y_aft, cfg.channel_eps)  # Eq. 3
            losses["dirl"] = dirl_loss(c, cfg.alpha, cfg.correlate)  # Eq. 4
        if cfg.w_ccr:
            if cfg.ccr_form == "released":
                losses["ccr"] = released_ccr(words, visual, cfg.tau, self.max_len)
            else:
                ignore_equal = cfg.ccr_equal_captions == "ignored"
                losses["ccr"] = ccr_loss(words, visual, caption, cfg.tau, ignore_equal)  # Eq. 12-14
        return losses

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor) -> Tensor:
        """before, after (B, C, H, W) -> ids of greedy captions (B, max_len)."""
        difference, *_ = self.encode(before, after)

        def next_word(ids: Tensor) -> Tensor:
            hidden, *_ = self.decoder(ids, difference)
            return self.decoder.head(hidden[:, -1])

        return decode(next_word, before.shape[0], self.max_len, before.device)

    @torch.no_grad()
    def attention_map(self, before: Tensor, after: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Where the decoder looked: the last layer's attention over cells, averaged over heads and
        over the words of ids (B, L) -> "attention" (B, H, W)."""
        difference, *_ = self.encode(before, after)
        *_, x1 = self.decoder(ids, difference)
        attention = self.decoder.layers[-1].cross_attention
        q, k, _ = attention.project(x1, difference)
        weight = attention.scores(q, k).softmax(-1).mean(1)  # (B, L, N)
        # Row t of the weights is from the state that predicts word t + 1.
        over_cells = masked_mean(weight[:, :-1], is_word(ids[:, 1:]))  # (B, N)
        return {"attention": over_cells.unflatten(1, self.grid[1:])}


# ---- presets -------------------------------------------------------------------------------------

# Steps are from section 4.2, loss weights from section 4.6. The paper has no batch sizes and rates.
# Those of CLEVR-Change and CLEVR-DC are as released, with drops every 15 epochs.
PRESETS = {
    "clevr_change": dict(lr_drop=3975),  # 265 batches an epoch; the rest are Config's defaults
    "clevr_dc": dict(w_dirl=0.03, w_ccr=0.05, lr_drop=4785, use_coords=False),  # 319 batches
    # [ours]: SCORER's batches, rates and drops, and no coordinates.
    "spot_the_diff": dict(w_ccr=0.004, batch_size=32, lr_drop=4020, use_coords=False),
    "image_editing_request": dict(w_dirl=0.001, w_ccr=0.05, batch_size=16, lr=1e-4, lr_drop=2880,
                                  use_coords=False),
    # [ours] Your own pairs are usually few: half the width, SCORER's schedule. Mini's loss weights
    # are no better than these of Image Editing Request.
    "pairs": dict(w_dirl=0.001, w_ccr=0.05, use_coords=False, dim=256, batch_size=16, lr=5e-4,
                  schedule="cosine", warmup=50, grad_clip=1.0, steps=2000, eval_every=1000,
                  select_by="ROUGE-L"),
    # [ours]. The loss weights were chosen on mini's validation scenes.
    "mini": dict(dim=128, word_dim=128, heads=4, layers=1, dropout=0.0, w_dirl=0.03, w_ccr=0.005,
                 batch_size=16, lr=1e-3, schedule="cosine", warmup=50, grad_clip=1.0, steps=2300,
                 eval_every=300, eval_batch=250),
}  # fmt: skip

# --variant released: where the released code differs from our default, with the places in
# github.com/tuyunbin/DIRL at c2955e6. docs/released.md explains them, and what is not switched.
RELEASED = {
    "all": dict(  # for every data set
        difference="residual",  # Eq. 6 subtracts LN(X + attention): models/DIRL.py:110-114
        channel_eps=0.0,  # a constant channel gives NaN: models/DIRL.py:92-93
        ccr_form="released",  # released_ccr: models/CCR.py:88-107
    ),
    # models/CCR_no_init.py:120-127, 201; configs/dynamic/transformer_clevr_change.yaml:39
    "clevr_change": dict(input_norm=False, xavier=False, steps=15000),
    "clevr_dc": dict(steps=13000),  # configs/dynamic/transformer_dc.yaml:37
}

# DIRL+CCR in the paper's tables, which a run prints below its scores
PUBLISHED = {
    "clevr_change": {  # Table 2. That it has semantic changes is inferred from SCORER's row there
        "semantic change":
            {"BLEU-4": 54.6, "METEOR": 38.1, "ROUGE-L": 71.9, "CIDEr": 123.6, "SPICE": 31.8}},
    "clevr_dc": {  # Table 4
        "total": {"BLEU-4": 51.4, "METEOR": 32.3, "ROUGE-L": 66.3, "CIDEr": 84.1, "SPICE": 16.8}},
    "image_editing_request": {  # Table 5
        "total": {"BLEU-4": 10.9, "METEOR": 15.0, "ROUGE-L": 41.0, "CIDEr": 34.1}},
    "spot_the_diff": {  # Table 1
        "total": {"BLEU-4": 10.3, "METEOR": 13.8, "ROUGE-L": 32.8, "CIDEr": 40.9, "SPICE": 19.9}},
}  # fmt: skip

# ---- training ------------------------------------------------------------------------------------


def compute_losses(model: DIRL, batches: tuple, cfg: Config) -> dict[str, Tensor]:
    """Eq. 16 and its terms, each a mean over the batches of a step: changed pairs and, in some data
    sets, distractor pairs.

    In CLEVR-Change and mini, a scene has one pair of each kind: (before, after) and (before,
    distractor) or, in half of the scenes of an epoch, (distractor, after) and (distractor, before)
    (as in SCORER's released code). The two batches stay separate, as released, so that Eq. 3 and 14
    compare pairs of one kind."""
    losses: dict[str, Tensor] = {}
    for batch in batches:
        batch = batch.to(cfg.device)
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.on_cuda):
            terms = model(batch.before, batch.after, batch.caption)
        for name, term in terms.items():
            losses[name] = losses.get(name, 0) + term / len(batches)
    losses["total"] = total_loss(losses, cfg)  # Eq. 16
    return losses


def train(cfg: Config, dataset, resume: bool = False) -> tuple[DIRL, dict]:
    """Train on a data set (data.Dataset) into cfg.out_dir -> the best model by validation, and its
    checkpoint. `resume` continues from last.pt (see Run) as if training had never stopped.
    FloatingPointError if a loss is not finite."""
    from support.run import Run

    torch.manual_seed(cfg.seed)
    model = DIRL(cfg, len(dataset.vocab), dataset.grid, dataset.max_len).to(cfg.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, fused=True)
    if cfg.compile and cfg.on_cuda:
        model.compile(fullgraph=True, dynamic=False)
    run = Run(cfg, model, [dataset], resume)
    run.start(optimizer)
    for batches in dataset.train_batches(cfg.batch_size, cfg.seed, run.step, cfg.steps):
        if run.is_over():
            break
        optimizer.param_groups[0]["lr"] = learning_rate(cfg, run.step)
        losses = compute_losses(model, batches, cfg)
        optimizer.zero_grad()
        losses["total"].backward()
        if cfg.grad_clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        run.step += 1
        run.log(losses)
        if run.step % cfg.eval_every == 0 or run.step == cfg.steps:
            run.checkpoint(evaluate(model, dataset, "val", cfg))
            model.train()
    return run.best_model()


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(
    model: DIRL, dataset, split: str, cfg: Config, out_dir: Path | None = None, state=None
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

    return load_captioner(DIRL, Config, checkpoint, device, extractor)


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption pictures."""
    import data
    from support.captioner import caption_files
    from support.releases import all_presets
    from support.run import load_model, parse_args

    cfg, args = parse_args(Config, all_presets(PRESETS), RELEASED, argv)
    if args.caption:
        captioner = load(args.checkpoint, cfg.device, cfg.extractor)
        caption_files(captioner, args.caption, args.out)
        return
    dataset = data.open_dataset(cfg, make=args.eval is None)
    if args.eval is not None:
        model, state = load_model(DIRL, cfg, args.eval)
        dataset.adopt(state)
    else:
        model, state = train(cfg, dataset, args.resume)
    if args.split != "none":
        evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir), state)


# ---- other forms ---------------------------------------------------------------------------------


class Subtraction(nn.Module):
    """The baseline Subtraction: Eq. 7 of X_bef - X_aft of Eq. 1, in which the positions cancel.
    X_bef, X_aft (B, N, D) -> (B, N, D)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.project = nn.Linear(cfg.dim, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim) if cfg.input_norm else nn.Identity()

    def forward(self, x_bef: Tensor, x_aft: Tensor) -> Tensor:
        return F.relu(self.dropout(self.norm(self.project(x_bef - x_aft))))  # Eq. 7


class ReleasedDecoder(Decoder):
    """The decoder for released_ccr, whose means run over padding. So, as released, the rows of
    padding see only real words. `words` and `visual` are the states after the residuals, so
    `visual` contains the words."""

    def forward(self, ids: Tensor, difference: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        x = self.dropout(self.norm(self.project(x)))
        not_padding = (ids != NULL)[:, None, None, :]  # (B, 1, 1, L)
        mask = not_padding.expand(-1, -1, ids.shape[1], -1).tril()  # (B, 1, L, L)
        for layer in self.layers:
            x1 = layer.norm1(x + layer.dropout(layer.self_attention(x, x, mask=mask)))
            x2 = layer.norm2(x1 + layer.dropout(layer.cross_attention(x1, difference)))
            inner = layer.dropout(F.relu(layer.widen(x2)))
            x = layer.norm3(x2 + layer.dropout(layer.output(inner)))
        return x, x1, x2, x1


def released_ccr(words: Tensor, visual: Tensor, tau: float, max_len: int) -> Tensor:
    """L_ccr of ReleasedDecoder's states: means over all ids, padding too, up to the longest caption
    of the data set, and InfoNCE over the rows of (S + S^T) / 2. Pairs with equal captions are
    negatives, as in the paper."""
    assert words.shape[1] == max_len, "pad captions to max_len"
    with torch.autocast(words.device.type, enabled=False):
        s = upcast(words.mean(1)) @ upcast(visual.mean(1)).T / tau
        return info_nce((s + s.T) / 2)


if __name__ == "__main__":
    from support.files import run_main

    run_main(main)
