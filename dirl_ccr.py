"""DIRL+CCR: Distractors-Immune Representation Learning with Cross-modal Contrastive Regularization
for Change Captioning (Tu et al., ECCV 2024).

The flow of one pair, with CLEVR-Change's sizes (captions of 24 ids, a vocabulary of 76):
    before, after (1024, 14, 14) each               In training only:
       v  embed, Eq. 1
    x_bef, x_aft (196, 512) each . . . . . . . . . > y_bef, y_aft (196, 512) each, by mlp, Eq. 2
       v  cross_view, Eq. 5                            v  channel_correlation, Eq. 3
    shared_bef, shared_aft (196, 512) each          c (512, 512), over all cells of the batch
       v  x - shared of each image, Eq. 6              v  dirl_loss, Eq. 4
    difference_bef, difference_aft (196, 512) each  L_dirl
       v  fuse, Eq. 7
    difference (196, 512) and caption (24 ids)
       v  decoder, Eq. 8-10
    words, visual, hidden (24, 512) each . . . . . > mean_words, mean_visual (512) each, Eq. 12
       v  decoder.head, Eq. 11                         v  ccr_loss, Eq. 13-14, in a batch of B pairs
    logits (24, 76), L_cap by Eq. 15                L_ccr
Gradients: nothing is detached. L_cap trains encoder and decoder; L_ccr the encoder and what makes
`words` and `visual`; L_dirl embed and mlp.

Idea. (1) Under another camera or light, each channel of the features should keep its values, and
different channels should stand for different things. So a loss correlates each channel of "before"
with the same channel of "after", and decorrelates it from all others. (2) Cross-attention finds in
the other image what both images share. Subtracting it leaves the change. (3) The changed object is
often small, so the decoder easily attends to the wrong cells. A contrastive loss ties the words of
a caption to the differences that the decoder saw at these words.

Terms. A changed pair shows a scene before and after a change. In a distractor pair, only camera and
light differ. A step of CLEVR-Change or mini has a batch of each kind, of the same scenes. In half
of the scenes, "before" and the distractor picture change places (as released).

Read first: channel_correlation, dirl_loss, CrossView, DecoderLayer, ccr_loss, and DIRL's encode,
forward and ccr. Skip at first: Decoder, attention_map, and all that follows the class DIRL.

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
Eq. 12    DIRL.ccr             mean_words, mean_visual  E~[W] = 1/m E^[W], V~ = 1/HW V^
Eq. 13    ccr_loss             s                        sim = E~[W] . V~
Eq. 14    ccr_loss             L_ccr                    1/2 (nce(sim / tau) + nce(sim^T / tau))
Eq. 15    caption_loss         L_cap                    -sum of log p(next word)
Eq. 16    total_loss           w_dirl, w_ccr            L_cap + lambda_d L_dirl + lambda_c L_ccr
nce(S) = -mean_a log softmax_b(S)_aa (common.info_nce). Many of our functions add
details to the printed equations and mark them: "as released" where the authors' code does the same,
[ours] where neither does. RELEASED, after the class, lists where their code differs from this.
Axis letters: B pairs, C channels of the features (of Eq. 3-4: D), H x W grid, N = H*W cells, D
width, h heads, L ids of a caption (START, words, END, padding), V ids of the vocabulary.

To copy: this file and common.py; to train, also data.py, scores.py and support/.
Licence: MIT. Written from the paper; it contains no code from the authors' repository.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

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
    layers: int = 2  # cross-attention layers (as released); the last gives Eq. 5's result
    decoder_layers: int = 2  # number of decoder layers (as released)
    dropout: float = 0.1  # dropout probability (as released)
    use_coords: bool = True  # append the cell's x and y to the features (released for CLEVR-Change)
    w_dirl: float = 0.5  # weight of L_dirl in Eq. 16 (section 4.6); 0 leaves it and its MLP out
    alpha: float = 0.003  # weight of decorrelation in Eq. 4 (as released); 0: correlation only
    correlate: bool = True  # Eq. 4's first term; without it decorrelation only
    w_ccr: float = 0.3  # weight of L_ccr in Eq. 16 (section 4.6); 0 leaves it out
    tau: float = 0.5  # temperature of Eq. 14 (section 4.2)
    # The attention of Eq. 5, LN(X' + attention) as released, or (a baseline) X_aft from X_bef.
    difference: Literal["attention", "residual", "subtract"] = "attention"  # what Eq. 6 subtracts
    channel_eps: float = 1e-5  # keeps constant channels finite in Eq. 3 [ours]
    input_norm: bool = True  # LayerNorm on the decoder's inputs (released for CLEVR-DC)
    xavier: bool = True  # Xavier-uniform fusion and decoder (released for CLEVR-DC); else PyTorch's
    ccr_form: Literal["paper", "released"] = "paper"  # Eq. 12-14, or released_ccr at the end
    ccr_equal_captions: Literal["ignored", "negatives"] = "ignored"  # pairs with equal captions


# ---- modules -------------------------------------------------------------------------------------


class ImageEmbedding(nn.Module):
    """Eq. 1: X = conv_1x1(features) + position. (B, C, H, W) -> (B, N, D), n = row * W + column.

    use_coords appends two channels to the features, the x and the y of each cell, both in [-1, 1).
    The released code does so for CLEVR-Change. The paper does not mention it."""

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
    """Eq. 5, one layer: what each image of a pair shares with the other, shared_bef = MHCA(X_bef,
    X_aft) and shared_aft = MHCA(X_aft, X_bef).

    Eq. 5 is the last layer. As released, others come before it. These have a residual: they return
    X' = LN(X + shared), which only the next layer reads. Eq. 6 subtracts from X of Eq. 1.

    Eq. 6 subtracts what is shared, so that the decoder need not find the change among unchanged
    objects. SCORER adds it, because a caption may name these ("left of the cube"). The attention
    can learn to flip the sign of its output, so both are the same model, but for initial weights.

    X_bef, X_aft (B, N, D) -> two tensors of the same shape."""

    def __init__(self, cfg: Config, residual: bool):
        super().__init__()
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim) if residual else None
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x_bef: Tensor, x_aft: Tensor) -> tuple[Tensor, Tensor]:
        shared_bef = self.attention(x_bef, x_aft)  # Eq. 5
        shared_aft = self.attention(x_aft, x_bef)  # Eq. 5
        if self.norm is None:
            return shared_bef, shared_aft
        new_bef = self.norm(x_bef + self.dropout(shared_bef))
        new_aft = self.norm(x_aft + self.dropout(shared_aft))
        return new_bef, new_aft


class Fusion(nn.Module):
    """Eq. 7: ReLU(W [difference_bef ; difference_aft] + b). The dropout is as released; so is the
    LayerNorm for CLEVR-DC, while the code released for CLEVR-Change has none (input_norm).

    joined: both differences (B, N, 2D) or, for "subtract", a single one -> (B, N, D)."""

    def __init__(self, cfg: Config):
        super().__init__()
        width = cfg.dim if cfg.difference == "subtract" else 2 * cfg.dim
        self.project = nn.Linear(width, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim) if cfg.input_norm else nn.Identity()

    def forward(self, joined: Tensor) -> Tensor:
        return F.relu(self.dropout(self.norm(self.project(joined))))  # Eq. 7


class Attended(NamedTuple):
    """Results of the two attentions of a decoder layer, each (B, L, D)."""

    words: Tensor  # Eq. 8, attention to this and earlier words
    x1: Tensor  # LN(x + words), which attends to the difference; for attention_map, released_ccr
    visual: Tensor  # Eq. 9, attention to the difference
    x2: Tensor  # LN(x1 + visual); for released_ccr


class DecoderLayer(nn.Module):
    """Eq. 8-10, a post-norm layer of the decoder: words attend to earlier words and then to the
    difference, and a feed-forward network follows.

    x (B, L, D), difference (B, N, D), mask (B, 1, L, L): which words each word may see -> `hidden`,
    the new x (B, L, D), and Attended. The printed equations leave out most residuals, LayerNorms
    and dropouts of the standard layer, which the paper cites. This layer has them."""

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

    def forward(self, x: Tensor, difference: Tensor, mask: Tensor) -> tuple[Tensor, Attended]:
        words = self.self_attention(x, x, mask=mask)  # Eq. 8
        x1 = self.norm1(x + self.dropout(words))
        visual = self.cross_attention(x1, difference)  # Eq. 9
        x2 = self.norm2(x1 + self.dropout(visual))
        inner = self.dropout(F.relu(self.widen(x2)))
        hidden = self.norm3(x2 + self.dropout(self.output(inner)))  # Eq. 10
        return hidden, Attended(words, x1, visual, x2)


class Decoder(nn.Module):
    """Words and difference -> hidden states, from which `head` predicts the next words.

    No position attends to later ones or to padding. Since padding comes last, the latter matters
    only for the states at padding, over which released_ccr averages."""

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

    def forward(self, ids: Tensor, difference: Tensor) -> tuple[Tensor, Attended]:
        """ids (B, L), difference (B, N, D) -> hidden states (B, L, D), and Attended of the last
        layer, which L_ccr reads (as released; the paper does not say which layer)."""
        x = self.embed(ids) + self.position[: ids.shape[1]]
        x = self.dropout(self.norm(self.project(x)))
        not_padding = (ids != NULL)[:, None, None, :]  # (B, 1, 1, L)
        mask = not_padding.expand(-1, -1, ids.shape[1], -1).tril()  # (B, 1, L, L)
        for layer in self.layers:
            x, attended = layer(x, difference, mask)  # Eq. 8-10
        return x, attended


# ---- losses --------------------------------------------------------------------------------------


def channel_correlation(y_bef: Tensor, y_aft: Tensor, eps: float) -> Tensor:
    """Eq. 3: correlation of every channel of "before" with every channel of "after".
    y_bef, y_aft (B, N, D) -> C (D, D).

    As printed, the sum runs over the samples of a batch, and channels are not centred. Here, as in
    the released code, it runs over all cells of the samples: cell n of "before" meets cell n of
    "after", even if the camera has moved. Channels are centred, as in Barlow Twins, whose notation
    the paper uses. The standard deviation is unbiased, so C_ii <= (BN - 1) / BN.

    Both images have the same positions in X (Eq. 1), so a channel of Y that depends on the cell
    alone agrees perfectly with itself, even between images of different pairs. So L_dirl can fall
    while channels learn nothing about objects. On mini, this happens (docs/tour.md, "Positions").

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
    decorrelation = alpha * others.square().sum()
    if not correlate:
        return decorrelation
    return (1 - diagonal).square().sum() + decorrelation  # Eq. 4


def ccr_loss(mean_words: Tensor, mean_visual: Tensor, same: Tensor, tau: float) -> Tensor:
    """Eq. 13-14, L_ccr: InfoNCE between the words of a caption and the differences that they attend
    to, in both directions. The vectors are not normalised.

    mean_words, mean_visual (B, D) of Eq. 12. same (B, B) bool: pairs that are not negatives of each
    other, because their captions are equal (DIRL.ccr says why).

    By hand: words and visual both (1, 0), (0, 1), tau = 0.5. S / tau = ((2, 0), (0, 2)), and each
    row and column has -log(e^2 / (e^2 + 1)) = 0.127. If both pairs are the same, the loss is 0."""
    # Scores may be in the hundreds, where bfloat16 has no decimals.
    with torch.autocast(mean_words.device.type, enabled=False):
        s = upcast(mean_words) @ upcast(mean_visual).T / tau  # Eq. 13, and tau of Eq. 14, (B, B)
        own = torch.eye(s.shape[0], dtype=torch.bool, device=s.device)
        s = s.masked_fill(same & ~own, float("-inf"))
        return (info_nce(s) + info_nce(s.T)) / 2  # Eq. 14


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 15, L_cap: cross-entropy of each next word.

    logits (B, L, V) at words 0 ... L-1, caption (B, L) padded with NULL.

    By hand: two words with probabilities 1/2 and 1/4 -> (ln 2 + ln 4) / 2 = 1.04."""
    # As released, this is a mean over all real words of the batch. The paper sums over a sentence.
    predicted = logits[:, :-1].flatten(0, 1)
    target = caption[:, 1:].flatten()
    return F.cross_entropy(predicted, target, ignore_index=NULL)  # Eq. 15


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Eq. 16: L = L_cap + w_dirl L_dirl + w_ccr L_ccr, from the terms that DIRL.forward returns."""
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
        if cfg.difference != "subtract":
            if cfg.layers == 0:
                raise InputError("--layers 0 leaves no difference, X - X = 0; use 1 or more layers")
            for _ in range(cfg.layers - 1):
                self.cross_view.append(CrossView(cfg, residual=True))
            self.cross_view.append(CrossView(cfg, residual=cfg.difference == "residual"))
        self.fuse = Fusion(cfg)
        self.decoder = Decoder(cfg, vocab_size, max_len)
        if cfg.w_dirl:
            self.mlp = nn.Sequential(
                nn.Linear(cfg.dim, 4 * cfg.dim),  # 4D and dropout as released
                nn.ReLU(),
                nn.Dropout(cfg.dropout),
                nn.Linear(4 * cfg.dim, cfg.dim),
            )
        # As released. The paper does not say how weights are initialised.
        for module in (self.embed, self.cross_view):
            initialise(module, xavier=True)
        for module in (self.fuse, self.decoder):
            initialise(module, xavier=cfg.xavier)
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
            return self.fuse(x_bef - x_aft), x_bef, x_aft
        *earlier, last = self.cross_view
        enriched_bef = x_bef
        enriched_aft = x_aft
        for layer in earlier:
            enriched_bef, enriched_aft = layer(enriched_bef, enriched_aft)  # X'
        shared_bef, shared_aft = last(enriched_bef, enriched_aft)  # Eq. 5
        difference_bef = x_bef - shared_bef  # Eq. 6
        difference_aft = x_aft - shared_aft  # Eq. 6
        joined = torch.cat([difference_bef, difference_aft], -1)  # (B, N, 2D)
        return self.fuse(joined), x_bef, x_aft  # Eq. 7

    def forward(self, before: Tensor, after: Tensor, caption: Tensor) -> dict[str, Tensor]:
        """before, after (B, C, H, W), caption (B, L) -> the terms of Eq. 16, by name.

        At the start, with CLEVR-Change's sizes, random features and B = 16, "caption" is about 5
        (ln 76 = 4.3 is a guess among all words). "dirl", a sum over 512 channels, is 10 to 70 for
        pairs of equal images and 350 to 510 for unrelated ones. "ccr" is above ln 16 = 2.8, a guess
        among the batch, because S is not normalised, or it is 0 if all captions are equal."""
        cfg = self.cfg
        losses = {}
        difference, x_bef, x_aft = self.encode(before, after)  # Eq. 1, 5-7
        hidden, attended = self.decoder(caption, difference)  # Eq. 8-10
        logits = self.decoder.head(hidden)  # Eq. 11
        losses["caption"] = caption_loss(logits, caption)  # Eq. 15
        if cfg.w_dirl:
            y_bef = self.mlp(x_bef)  # Eq. 2
            y_aft = self.mlp(x_aft)  # Eq. 2
            c = channel_correlation(y_bef, y_aft, cfg.channel_eps)  # Eq. 3
            losses["dirl"] = dirl_loss(c, cfg.alpha, cfg.correlate)  # Eq. 4
        if cfg.w_ccr:
            losses["ccr"] = self.ccr(attended, caption)  # Eq. 12-14
        return losses

    def ccr(self, attended: Attended, caption: Tensor) -> Tensor:
        """Eq. 12-14, L_ccr, of what the last decoder layer attended to; caption (B, L).

        The words are those of the reference caption (section 3.4). If there are earlier layers,
        `words` has already seen the difference in these. The paper divides V^ by HW, but V^ of Eq.
        9 has one row for each word, so both means run over words."""
        if self.cfg.ccr_form == "released":
            assert caption.shape[1] == self.max_len, "pad captions to max_len"
            return released_ccr(attended, self.cfg.tau)
        valid = caption != NULL
        mean_words = masked_mean(attended.words, valid)  # Eq. 12, (B, D)
        mean_visual = masked_mean(attended.visual, valid)  # Eq. 12, (B, D)
        # [ours] Pairs with equal captions are not negatives. In the paper, they are (section 3.5).
        # Then the loss has a floor, because equal words fit both pairs, and unchanged pairs are
        # pushed apart. (Sentences that differ and mean the same are still negatives.)
        same = (caption[:, None] == caption).all(-1)  # (B, 1, L) == (B, L) -> (B, B)
        if self.cfg.ccr_equal_captions == "negatives":
            same = torch.zeros_like(same)
        return ccr_loss(mean_words, mean_visual, same, self.cfg.tau)

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor) -> Tensor:
        """before, after (B, C, H, W) -> ids of greedy captions (B, max_len)."""
        difference, *_ = self.encode(before, after)

        def next_word(ids: Tensor) -> Tensor:
            hidden, _ = self.decoder(ids, difference)
            return self.decoder.head(hidden[:, -1])

        return decode(next_word, before.shape[0], self.max_len, before.device)

    @torch.no_grad()
    def attention_map(self, before: Tensor, after: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Where the decoder looked: the last layer's attention over cells, averaged over heads and
        over the words of ids (B, L) -> "attention" (B, H, W)."""
        difference, *_ = self.encode(before, after)
        _, attended = self.decoder(ids, difference)
        look = self.decoder.layers[-1].cross_attention
        q, k, _ = look.project(attended.x1, difference)
        weight = look.scores(q, k).softmax(-1).mean(1)  # (B, L, N)
        # Row t of the weights is from the state that predicts word t + 1.
        over_cells = masked_mean(weight[:, :-1], is_word(ids[:, 1:]))  # (B, N)
        return {"attention": over_cells.unflatten(1, self.grid[1:])}


# ---- presets -------------------------------------------------------------------------------------

# Loss weights are from section 4.6. The paper gives no batch sizes or learning rates.
PRESETS = {
    # The defaults: 10000 steps (section 4.2). As released: batches of 128 scenes (256 pairs; in
    # CLEVR-DC 128 pairs), lr 2e-4, a tenth of the rate every 15 epochs (of 265 batches, in CLEVR-DC
    # of 319), and no coordinates in CLEVR-DC. The paper describes one decoder, the released code
    # has two. Our presets all take CLEVR-DC's (input_norm, xavier), so on CLEVR-Change we have
    # neither the paper's decoder nor that of its code.
    "clevr_change": dict(lr_drop=3975),
    "clevr_dc": dict(w_dirl=0.03, w_ccr=0.05, lr_drop=4785, use_coords=False),
    # [ours]: SCORER's batches, rates and steps between drops (4020, 2880), and no coordinates. The
    # authors offer their code for Spot-the-Diff on a drive; we have not seen it.
    "spot_the_diff": dict(w_ccr=0.004, batch_size=32, lr_drop=4020, use_coords=False),
    "image_editing_request": dict(w_dirl=0.001, w_ccr=0.05, batch_size=16, lr=1e-4, lr_drop=2880,
                                  use_coords=False),
    # [ours] Your own pairs are usually few: half the width. The schedule is explained in SCORER's
    # presets. The loss weights are Image Editing Request's; mini's are no better here.
    "pairs": dict(w_dirl=0.001, w_ccr=0.05, use_coords=False, dim=256, batch_size=16, lr=5e-4,
                  schedule="cosine", warmup=50, grad_clip=1.0, steps=2000, eval_every=1000,
                  select_by="ROUGE-L"),
    # [ours]. The loss weights were chosen on mini's validation scenes.
    "mini": dict(dim=128, word_dim=128, heads=4, layers=1, dropout=0.0, w_dirl=0.03, w_ccr=0.005,
                 batch_size=16, lr=1e-3, schedule="cosine", warmup=50, grad_clip=1.0, steps=2300,
                 eval_every=300, eval_batch=250),
}  # fmt: skip

# --variant released: where the released code differs from our default, with the places in
# github.com/tuyunbin/DIRL at c2955e6
RELEASED = {
    # for every data set, also those whose code was not released
    "all": dict(
        # Eq. 5-6 subtract the attention's output. The released code subtracts LN(X' + attention).
        difference="residual",  # models/DIRL.py:110-114
        # The released code divides by the bare standard deviation. A constant channel gives NaN.
        channel_eps=0.0,  # models/DIRL.py:92-93
        # See released_ccr. Eq. 12 pools the results of Eq. 8-9; Eq. 14 has InfoNCE both ways.
        ccr_form="released",  # models/CCR.py:88-107
        # Not switched: the authors keep the best snapshot of each metric, on validation captions
        # that are sampled (train.py:257). We decode greedily, as in section 4.2, and select by one.
    ),
    # For CLEVR-Change, the released decoder has no LayerNorm on its inputs and PyTorch's initial
    # weights (models/CCR_no_init.py:120-127 and 201). Both data sets have more steps than in the
    # paper (configs/dynamic/transformer_clevr_change.yaml:39, transformer_dc.yaml:37).
    "clevr_change": dict(input_norm=False, xavier=False, steps=15000),
    "clevr_dc": dict(steps=13000),
}

# DIRL+CCR in the paper's tables, which a run prints below its scores
PUBLISHED = {
    "clevr_change": {  # Table 2; the paper has no total
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
    """Eq. 16 and its terms, each a mean over a step's batches (changed pairs, distractor pairs).

    The two batches stay separate, as in the released code, so that the correlations of Eq. 3 and
    the negatives of Eq. 14 come from one kind of pair."""
    losses: dict[str, Tensor] = {}
    for batch in batches:
        batch = batch.to(cfg.device)
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.on_cuda):
            terms = model(batch.before, batch.after, batch.caption)
        for name, term in terms.items():
            losses[name] = losses.get(name, 0) + term / len(batches)
    losses["total"] = total_loss(losses, cfg)  # Eq. 16
    return losses


def train(cfg: Config, dataset, resume: bool = False) -> DIRL:
    """Train on a data set (data.Dataset) and write cfg.out_dir -> the best model by validation.

    `resume` continues from last.pt (see Run) as if training had never stopped.
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
    model: DIRL, dataset, split: str, cfg: Config, out_dir: Path | None = None
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
        model = train(cfg, dataset, args.resume)
    if args.split != "none":
        evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir))


# ---- as released ---------------------------------------------------------------------------------


def released_ccr(attended: Attended, tau: float) -> Tensor:
    """L_ccr of the released code, which differs in three things. The means are of states after the
    residuals, so those for `visual` contain the words. They run over padding as well, up to the
    longest caption of the data set. The loss is InfoNCE over the rows of (S + S^T) / 2. Pairs with
    equal captions are negatives, as in the paper."""
    mean_words = attended.x1.mean(1)
    mean_visual = attended.x2.mean(1)
    with torch.autocast(mean_words.device.type, enabled=False):
        s = upcast(mean_words) @ upcast(mean_visual).T / tau
        return info_nce((s + s.T) / 2)


if __name__ == "__main__":
    from support.files import run_main

    run_main(main)
