"""SCORER+CBR: Self-supervised Cross-view Representation Reconstruction for Change Captioning
(Tu et al., ICCV 2023).

A pair shows a scene before and after a change or, if it is a distractor, only another camera and
light; then its caption says that nothing changed. The method has three ideas:
1.  When the camera moves, all features change, so subtracting one image from the other shows much
    more than the change. A contrastive loss teaches each image to find its partner in the batch by
    features that ignore the camera.
2.  Cross-attention, whose queries and keys this loss compares, adds to each image what it shares
    with the other one: "reconstruction", though no loss asks for it.
3.  "Before" and a good sentence should suffice to imagine "after": a second contrastive loss.

The flow of one pair, with CLEVR-Change's sizes (captions of 24 ids, a vocabulary of 76):
    before, after (1024, 14, 14) each               In training only:
       v  embed, Eq. 1
    x_bef, x_aft (196, 512) each
       v  cross_view, twice, Eq. 5-6  . . . . . . > q_bef, k_aft, q_aft, k_bef of the first
    new_bef, new_aft (196, 512) each                   v  match, Eq. 2-3, in a batch of B pairs
       v  fuse, Eq. 7                               bef_to_aft, aft_to_bef (B, B)
    difference (196, 512) and caption (24 ids)         v  match_loss, Eq. 4
       v  decoder, section 3.3                      L_cv
    hidden (24, 512) . . . . . . . . . . . . . . . > sentence (512), the mean from START to END
       v  decoder.head, Eq. 8                          v  reasoning, with x_bef, Eq. 9-10
    logits (24, 76)                                 x_hat (196, 512)
       v  caption_loss, Eq. 12                         v  its similarity to x_aft, cbr_loss, Eq. 11
    L_cap                                           L_cm

Read first: CrossView, Match, BackwardReasoning, match_loss, cbr_loss, SCORER.encode, .forward and
.cbr, compute_losses. Skip at first: DecoderLayer, Decoder, attention_map, and what else follows
SCORER, such as "other forms" at the end: parts of ablations and of the released code.

Our copy of the paper lacks the formulas. These are reconstructed from its text and the released
code, and were not compared with the printed ones. Defaults follow the text, else the code ("as
released"), else neither ([ours]). RELEASED, below, lists where the code contradicts the text.
Equation  where              from the text                                  as released, or [ours]
InfoNCE   common.info_nce    nce(S) = -1/B sum_a log(exp S_aa / sum_b exp S_ab)
Eq. 1     ImageEmbedding     X = conv(features) + position
Eq. 2     Match              TM_ab = (mean_n max_m q_an.k_bm                tokens not normalised
                                     + mean_m max_n q_an.k_bm) / 2
Eq. 3     Match              MTM = TM in several subspaces                  mean over heads [ours]
Eq. 4     match_loss         L_cv = (nce(S / tau) + nce(S' / tau)) / 2,     q, k of Eq. 5 for X;
                             S = MTM(X_bef, X_aft), S' = MTM(X_aft, X_bef)  1 / tau = e^log_scale
Eq. 5     CrossView          unchanged = MHCA(X, partner)                   no output projection
Eq. 6     CrossView          new X = LN(X + unchanged)
Eq. 7     Fusion             difference = ReLU(W [new X_bef ; new X_aft])   dropout
Eq. 8     Decoder.head       p(next word) = softmax(W hidden)
Eq. 9     BackwardReasoning  x = W_1 [X_bef ; sentence at every cell]
Eq. 10    BackwardReasoning  X_hat = MHSA(x), the "hallucination"           W_2 MHSA(x)
Eq. 11    cbr_loss           L_cm: as Eq. 4, of X_hat to X_aft              nce(R) and nce(R^T)
Eq. 12    caption_loss       L_cap = -mean of log p(next word)
Eq. 13    total_loss         L = L_cap + lambda_v L_cv + lambda_m L_cm      (w_match, w_cbr)
TM, MTM: (multi-head) token-wise matching. MHCA, MHSA: multi-head cross- and self-attention.
Axis letters: A, B pairs, C channels, H x W grid, N, M = H*W cells, D width, h heads, L ids of a
caption (START, words, END, padding), V ids of the vocabulary. q_an is the query of cell n of a.
To copy: this file, matching.py and common.py; to train, also data.py, scores.py and support/.
Licence: MIT. It contains no code from the authors' repository.
"""

import math
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
    is_word,
    learning_rate,
    masked_mean,
    sinusoid,
    upcast,
)
from matching import token_match

# ---- config --------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """SCORER+CBR. The settings of a run (data, steps, device) are in common.RunConfig."""

    dim: int = 512  # width D of images, words and decoder (section 4.3)
    word_dim: int = 300  # width of word embeddings (section 4.3)
    heads: int = 8  # heads of every attention and of the matching "mtm" (section 4.5)
    layers: int = 2  # number of cross-view layers, Eq. 5-6 (section 4.5)
    decoder_layers: int = 2  # number of decoder layers (section 4.3)
    dropout: float = 0.1  # dropout probability (as released)
    use_coords: bool = True  # append the cell's x and y to the features (released for CLEVR-Change)
    w_match: float = 0.1  # weight of L_cv in Eq. 13 (section 6.2); 0 leaves it out
    w_cbr: float = 0.001  # weight of L_cm in Eq. 13 (as released); 0 leaves CBR out
    # Other forms; skip at first. The default comes first. RELEASED, below, says what is released.
    difference: Literal["reconstruct", "subtract"] = "reconstruct"  # or Eq. 7 on X_bef - X_aft
    fusion: Literal["cat", "sum", "hadamard"] = "cat"  # how Eq. 7 joins two images
    matching: Literal["mtm", "tm", "mean", "max"] = "mtm"  # Eq. 3, Eq. 2, or pooled images
    match_layer: Literal["first", "last"] = "first"  # layer of the q, k that Eq. 4 matches [ours]
    xavier: bool = True  # Xavier-uniform weights for the decoder [ours]; released code: N(0, .02)
    train_cbr: bool = True  # train CBR; the released code leaves its weights as initialised
    sentence_mean: Literal["words", "max_len"] = "words"  # CBR's mean, or sum / longest caption
    ffn_residual: Literal["input", "activation"] = "input"  # residual of the feed-forward layer


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
    """Eq. 5-6, one layer: X <- LN(X + MHCA(X, partner)) for both images of a pair.

    X_bef, X_aft (B, N, D) -> the new X_bef and X_aft, and the queries and keys q_bef, k_aft, q_aft,
    k_bef (B, N, D) of Eq. 5. Eq. 4 compares these (as released; the paper names no projections).

    In Eq. 6 the paper adds where others subtract, to keep what a caption may name beside the change
    ("left of the cube"). The attention can learn to flip the sign of its output, by negating
    `value`. So adding and subtracting are the same model, but for its initial weights."""

    def __init__(self, cfg: Config):
        super().__init__()
        # As released. The standard attention, which the paper cites, has an output projection.
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout, out_proj=False)
        self.norm = nn.LayerNorm(cfg.dim, eps=1e-6)

    def forward(self, x_bef: Tensor, x_aft: Tensor) -> tuple[Tensor, Tensor, tuple]:
        q_bef, k_aft, v_aft = self.attention.project(x_bef, x_aft)
        q_aft, k_bef, v_bef = self.attention.project(x_aft, x_bef)
        unchanged_bef = self.attention.attend(q_bef, k_aft, v_aft)  # Eq. 5
        new_bef = self.norm(x_bef + unchanged_bef)  # Eq. 6
        unchanged_aft = self.attention.attend(q_aft, k_bef, v_bef)  # Eq. 5
        new_aft = self.norm(x_aft + unchanged_aft)  # Eq. 6
        return new_bef, new_aft, (q_bef, k_aft, q_aft, k_bef)


class Match(nn.Module):
    """Eq. 2-3, divided by tau: the similarity of every image a to every image b.
    q (A, N, D), k (B, M, D) -> (A, B). match_by_definition of matching.py is Eq. 2-3 as they are
    written, and token_match computes the same, fast. As released, cells are not normalised, and
    1 / tau is a learned scale, which starts at e."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.heads = cfg.heads
        self.log_scale = nn.Parameter(torch.ones(()))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        # Scores are large and differ by little, so rounding to bfloat16 would make them equal.
        with torch.autocast(q.device.type, enabled=False):
            return self.log_scale.exp() * self.score(q, k)

    def score(self, q: Tensor, k: Tensor) -> Tensor:  # OtherMatch differs here
        # With q and k split into heads, token_match computes, though never all products at once,
        #     s = einsum("anhc,bmhc->abhnm", q, k)
        #     tm = (s.amax(-1).mean(-1) + s.amax(-2).mean(-1)) / 2    Eq. 2, (A, B, h)
        # and the mean of tm over heads [ours]. matching.match_by_definition has an example.
        return token_match(q, k, self.heads)  # Eq. 3, (A, B)


class Fusion(nn.Module):
    """Eq. 7: difference = ReLU(W [new X_bef ; new X_aft] + b). Its dropout is as released. W has to
    tell cells that attention could reconstruct from those that it could not.
    Both images after Eq. 6 (B, N, D) -> (B, N, D)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.project = nn.Linear(2 * cfg.dim, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, new_bef: Tensor, new_aft: Tensor) -> Tensor:
        joined = torch.cat([new_bef, new_aft], -1)  # (B, N, 2D)
        return F.relu(self.dropout(self.project(joined)))  # Eq. 7


class DecoderLayer(nn.Module):
    """A post-norm layer of the decoder: words attend to earlier words and then to the difference,
    and a feed-forward network follows. x (B, L, D), difference (B, N, D) -> the new x and, for
    attention maps, the words as they attend to the difference, both (B, L, D).

    As released, and unlike in the standard layer, attention has no output projection and no dropout
    after it, the feed-forward network has width D and GELU, and LayerNorms have eps 1e-6."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout, out_proj=False)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout, out_proj=False)
        self.widen = nn.Linear(cfg.dim, cfg.dim)  # the standard layer has 4D here
        self.output = nn.Linear(cfg.dim, cfg.dim)
        self.norm1 = nn.LayerNorm(cfg.dim, eps=1e-6)
        self.norm2 = nn.LayerNorm(cfg.dim, eps=1e-6)
        self.norm3 = nn.LayerNorm(cfg.dim, eps=1e-6)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:
        words = self.norm1(x + self.self_attention(x, x, causal=True))
        seen = self.norm2(words + self.cross_attention(words, difference))
        return self.feed_forward(seen), words

    def feed_forward(self, seen: Tensor) -> Tensor:  # ReleasedDecoderLayer differs here
        inner = F.gelu(self.widen(seen))
        return self.norm3(seen + self.dropout(self.output(inner)))


class Decoder(nn.Module):
    """Section 3.3: words and difference -> hidden states, from which `head`, Eq. 8, predicts the
    next words.

    A word sees only itself and earlier words, so padding at the end of a caption needs no mask."""

    def __init__(self, cfg: Config, vocab_size: int, max_len: int):
        super().__init__()
        # padding_idx: the row of NULL gets no gradient. `initialise` draws it like all others.
        self.embed = nn.Embedding(vocab_size, cfg.word_dim, padding_idx=NULL)
        self.register_buffer("position", sinusoid(max_len, cfg.word_dim), persistent=False)
        self.project = nn.Linear(cfg.word_dim, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim, eps=1e-6)
        Layer = DecoderLayer if cfg.ffn_residual == "input" else ReleasedDecoderLayer
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.decoder_layers))
        self.head = nn.Linear(cfg.dim, vocab_size)  # Eq. 8, without its softmax

    def initialise(self, xavier: bool) -> None:
        """Draw the decoder's weights: Xavier-uniform or, as released, N(0, 0.02). Biases are 0.
        (common.initialise would give queries, keys and values a smaller gain.)"""
        for p in self.parameters():
            if p.ndim > 1 and xavier:
                nn.init.xavier_uniform_(p)
            elif p.ndim > 1:  # released
                nn.init.normal_(p, std=0.02)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.zeros_(m.bias)

    def forward(self, ids: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:
        """ids (B, L), difference (B, N, D) -> hidden states, and the words as they attend to the
        difference in the last layer, both (B, L, D)."""
        x = self.embed(ids) + self.position[: ids.shape[1]]
        x = self.norm(self.dropout(self.project(x)))  # as released
        for layer in self.layers:
            x, words = layer(x, difference)
        return x, words


class BackwardReasoning(nn.Module):
    """Eq. 9-10: X_hat = W_2 MHSA(W_1 [X_bef ; s]), the "hallucination", is what "after" should look
    like, given "before" and a sentence s (at every cell). X_bef (B, N, D), s (B, D) -> X_hat.

    W_2, the projections in `similarity` and the attention are as released. The attention has an
    output projection, but no biases, dropout, residual and LayerNorm. It is PyTorch's module, not
    common.Attention, because of its initial weights."""

    def __init__(self, cfg: Config):
        super().__init__()
        # For Eq. 11, with a scale of its own. SCORER.match is for Eq. 4.
        self.match = Match(cfg) if cfg.matching == "mtm" else OtherMatch(cfg)
        self.join = nn.Linear(2 * cfg.dim, cfg.dim)  # W_1
        self.output = nn.Linear(cfg.dim, cfg.dim)  # W_2
        self.attention = nn.MultiheadAttention(cfg.dim, cfg.heads, bias=False, batch_first=True)
        self.query = nn.Linear(cfg.dim, cfg.dim)
        self.key = nn.Linear(cfg.dim, cfg.dim)

    def forward(self, x_bef: Tensor, sentence: Tensor) -> Tensor:
        at_every_cell = sentence[:, None].expand(-1, x_bef.shape[1], -1)  # (B, N, D)
        x = self.join(torch.cat([x_bef, at_every_cell], -1))  # Eq. 9
        attended, _ = self.attention(x, x, x, need_weights=False)  # Eq. 10
        return self.output(attended)

    def similarity(self, x_hat: Tensor, x_aft: Tensor) -> Tensor:
        """(B, N, D) each -> R of Eq. 11 (B, B), the similarity of each X_hat to each X_aft."""
        return self.match(self.query(x_hat), self.key(x_aft))


# ---- losses --------------------------------------------------------------------------------------


def match_loss(bef_to_aft: Tensor, aft_to_bef: Tensor) -> Tensor:
    """Eq. 4, L_cv: InfoNCE over the rows of both similarity matrices (B, B).

    By hand: ((ln 3, 0), (0, ln 3)) gives each partner 3/4, and ((0, 0), (0, 0)) gives it 1/2. The
    loss is (ln 4/3 + ln 2) / 2 = 0.490."""
    # aft_to_bef is not bef_to_aft.T, because queries and keys have different projections.
    return (info_nce(bef_to_aft) + info_nce(aft_to_bef)) / 2  # Eq. 4


def cbr_loss(hat_to_aft: Tensor) -> Tensor:
    """Eq. 11, L_cm: InfoNCE over rows and columns (as released; Eq. 4 has two matrices) of the
    similarity (B, B) of hallucinations to "after" images.

    By hand: ((ln 3, 0), (ln 3, 0)). In the rows, partners have 3/4 and 1/4, in the columns 1/2. The
    loss is ((ln 4/3 + ln 4) / 2 + ln 2) / 2 = 0.765."""
    return (info_nce(hat_to_aft) + info_nce(hat_to_aft.T)) / 2  # Eq. 11


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 12, L_cap: cross-entropy of each next word. logits (B, L, V) at words 0 ... L-1,
    caption (B, L) padded with NULL.

    By hand: two words with probabilities 1/2 and 1/4 -> (ln 2 + ln 4) / 2 = 1.04."""
    # As released, this is a mean over all tokens of the batch that are not padding.
    predicted = logits[:, :-1].flatten(0, 1)
    target = caption[:, 1:].flatten()
    return F.cross_entropy(predicted, target, ignore_index=NULL)  # Eq. 12


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Eq. 13: L = L_cap + w_match L_cv + w_cbr L_cm, from the terms that SCORER.forward returns.

    Nothing is detached. L_cap trains encoder and decoder. L_cm trains CBR and, through X_bef, X_aft
    and hidden, both again. L_cv trains embed, and queries and keys of the first layer. Both learn
    their scales."""
    match = losses.get("match", 0)
    cbr = losses.get("cbr", 0)
    return losses["caption"] + cfg.w_match * match + cfg.w_cbr * cbr  # Eq. 13


# ---- method --------------------------------------------------------------------------------------


class SCORER(nn.Module):
    """SCORER+CBR with all its parameters. grid: (C, H, W) of the features; max_len: the length of
    the longest caption in tokens, START and END included."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg = cfg
        self.grid = grid
        self.max_len = max_len
        if cfg.w_match:
            self.match = Match(cfg) if cfg.matching == "mtm" else OtherMatch(cfg)
        self.embed = ImageEmbedding(*grid, cfg.dim, cfg.use_coords)
        self.cross_view = nn.ModuleList()
        if cfg.difference == "reconstruct":  # the baseline Subtraction has no cross-view layer
            self.cross_view.extend(CrossView(cfg) for _ in range(cfg.layers))
        if cfg.w_match and not self.cross_view:
            raise InputError("without a cross-view layer nothing is matched; set --w_match 0")
        plain = cfg.fusion == "cat" and cfg.difference == "reconstruct"
        self.fuse = Fusion(cfg) if plain else OtherFusion(cfg)
        self.decoder = Decoder(cfg, vocab_size, max_len)
        if cfg.w_cbr:
            self.reasoning = BackwardReasoning(cfg).requires_grad_(cfg.train_cbr)
        self.decoder.initialise(cfg.xavier)  # other modules keep PyTorch's weights, as released

    def encode(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor, list[tuple]]:
        """before, after (B, C, H, W) -> the difference of Eq. 7, X_bef and X_aft of Eq. 1, all
        (B, N, D), and the queries and keys of each cross-view layer."""
        # Two batches of different sizes would silently be mixed up.
        assert before.shape == after.shape, f"{before.shape} and {after.shape} are not pairs"
        x = self.embed(torch.cat([before, after]))  # Eq. 1 of both, (2B, N, D)
        x_bef, x_aft = x.unflatten(0, (2, -1))  # (2, B, N, D)
        new_bef = x_bef
        new_aft = x_aft
        queries_and_keys = []
        for layer in self.cross_view:
            new_bef, new_aft, of_layer = layer(new_bef, new_aft)  # Eq. 5-6
            queries_and_keys.append(of_layer)
        difference = self.fuse(new_bef, new_aft)  # Eq. 7
        return difference, x_bef, x_aft, queries_and_keys

    def forward(self, before: Tensor, after: Tensor, caption: Tensor) -> dict[str, Tensor]:
        """before, after (B, C, H, W), caption (B, L) -> the terms of Eq. 13, by name.

        At the start, with CLEVR-Change's sizes, "caption" is about 5 (--variant released: 4.4), and
        a guess among all words has ln 76 = 4.3. "match" and "cbr" are about ln B, a guess among the
        images of a batch, whose scores hardly differ yet; "match" falls first."""
        cfg = self.cfg
        losses = {}
        difference, x_bef, x_aft, queries_and_keys = self.encode(before, after)  # Eq. 1, 5-7
        hidden, _ = self.decoder(caption, difference)  # section 3.3
        logits = self.decoder.head(hidden)  # Eq. 8
        losses["caption"] = caption_loss(logits, caption)  # Eq. 12
        if cfg.w_match:
            layer = 0
            if cfg.match_layer == "last":  # released
                layer = -1
            q_bef, k_aft, q_aft, k_bef = queries_and_keys[layer]
            bef_to_aft = self.match(q_bef, k_aft)  # S of Eq. 4, by Eq. 2-3
            aft_to_bef = self.match(q_aft, k_bef)  # S'
            losses["match"] = match_loss(bef_to_aft, aft_to_bef)  # Eq. 4
        if cfg.w_cbr:
            losses["cbr"] = self.cbr(x_bef, x_aft, hidden, caption)  # Eq. 9-11
        return losses

    def cbr(self, x_bef: Tensor, x_aft: Tensor, hidden: Tensor, caption: Tensor) -> Tensor:
        """Eq. 9-11, L_cm: is "after", imagined from "before" and the sentence, closest to the real
        one? X_bef, X_aft (B, N, D), hidden states (B, L, D) of caption (B, L).

        The caption is the reference, and its hidden states have attended to the difference. So
        X_hat knows more about "after" than the words say."""
        valid = caption != NULL  # START and END are included
        sentence = masked_mean(hidden, valid)  # (B, D), section 3.4
        if self.cfg.sentence_mean == "max_len":  # released
            sentence = sentence * valid.sum(1, keepdim=True) / self.max_len
        x_hat = self.reasoning(x_bef, sentence)  # Eq. 9-10
        hat_to_aft = self.reasoning.similarity(x_hat, x_aft)  # R
        return cbr_loss(hat_to_aft)  # Eq. 11

    @torch.no_grad()
    def clamp_scales(self) -> None:
        """Cap the learned scales at 100, as the released code does after each step."""
        for module in self.modules():
            if isinstance(module, Match):
                module.log_scale.clamp_(max=math.log(100))

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
        _, words = self.decoder(ids, difference)
        attention = self.decoder.layers[-1].cross_attention
        q, k, _ = attention.project(words, difference)
        weight = attention.scores(q, k).softmax(-1).mean(1)  # (B, L, N)
        # Row t of the weights is from the state that predicts word t + 1.
        over_cells = masked_mean(weight[:, :-1], is_word(ids[:, 1:]))  # (B, N)
        return {"attention": over_cells.unflatten(1, self.grid[1:])}


# ---- presets -------------------------------------------------------------------------------------

# Layers are from section 4.5, loss weights from section 6.2, batch sizes and rates from Table 8 (as
# we read them: docs/released.md). The rate drops every 15 epochs (as released).
PRESETS = {
    "clevr_change": dict(lr_drop=3975),  # 265 batches an epoch; the rest are Config's defaults
    # [ours], as no code is released: 319, 268 and 192 batches an epoch, and no coordinates.
    "clevr_dc": dict(layers=1, w_match=0.01, w_cbr=0.004, lr_drop=4785, use_coords=False),
    "spot_the_diff": dict(layers=3, w_match=0.3, w_cbr=0.5, batch_size=32, lr_drop=4020,
                          use_coords=False),
    "image_editing_request": dict(w_match=0.003, w_cbr=0.06, batch_size=16, lr=1e-4, lr_drop=2880,
                                  use_coords=False),
    # [ours] Your own pairs are usually few: half the width, and a rate that falls to 0. Validation
    # chose w_match and lr. A few validation pairs cannot rank many checkpoints, and early ones
    # never say "nothing changed", so best.pt is the better one of steps 1,000 and 2,000.
    "pairs": dict(w_match=0.3, w_cbr=0.06, use_coords=False, dim=256, batch_size=16, lr=5e-4,
                  schedule="cosine", warmup=50, grad_clip=1.0, steps=2000, eval_every=1000,
                  select_by="ROUGE-L"),
    # [ours], for minutes on a CPU.
    "mini": dict(dim=128, word_dim=128, heads=2, layers=1, dropout=0.0, w_match=0.3, batch_size=16,
                 lr=1e-3, schedule="cosine", warmup=50, grad_clip=1.0, steps=1800, eval_every=300,
                 eval_batch=250),
}  # fmt: skip

# --variant released: where the released code differs from our default, with the places in
# github.com/tuyunbin/SCORER at 2525039. docs/released.md explains them, and what is not switched.
RELEASED = {
    "all": dict(  # for every data set
        xavier=False,  # N(0, .02): models/transformer_decoder.py:444-456
        matching="tm",  # one subspace, of all heads: models/SCORER.py:62, models/CBR.py:65
        match_layer="last",  # the images have seen each other there: models/SCORER.py:176-185
        train_cbr=False,  # the optimiser does not update CBR: train.py:114-115
        sentence_mean="max_len",  # the sum / the longest caption: models/CBR.py:94-98
        ffn_residual="activation",  # ReleasedDecoderLayer: models/transformer_decoder.py:299-300
    ),
    "clevr_change": {},  # the data set that the released code reads
}

# SCORER+CBR in the paper's tables, which a run prints below its scores
PUBLISHED = {
    "clevr_change": {
        "total":  # Table 1
            {"BLEU-4": 56.3, "METEOR": 41.2, "ROUGE-L": 74.5, "CIDEr": 126.8, "SPICE": 33.3},
        "semantic change":  # Table 1
            {"BLEU-4": 54.4, "METEOR": 37.6, "ROUGE-L": 71.7, "CIDEr": 122.4, "SPICE": 31.6},
        "only distractor":  # Table 7
            {"BLEU-4": 62.0, "METEOR": 51.7, "ROUGE-L": 77.4, "CIDEr": 117.9, "SPICE": 35.0}},
    "clevr_dc": {  # Tables 3 and 10
        "total": {"BLEU-4": 49.4, "METEOR": 33.4, "ROUGE-L": 66.1, "CIDEr": 83.7, "SPICE": 16.2}},
    "image_editing_request": {  # Tables 4 and 11
        "total": {"BLEU-4": 10.0, "METEOR": 15.0, "ROUGE-L": 39.6, "CIDEr": 33.4, "SPICE": 12.6}},
    "spot_the_diff": {  # Tables 5 and 12
        "total": {"BLEU-4": 10.2, "METEOR": 12.2, "ROUGE-L": 31.9, "CIDEr": 38.9, "SPICE": 18.4}},
}  # fmt: skip

# ---- training ------------------------------------------------------------------------------------


def compute_losses(model: SCORER, batches: tuple, cfg: Config) -> dict[str, Tensor]:
    """Eq. 13 and its terms, each a mean over the batches of a step: changed pairs and, in some data
    sets, distractor pairs.

    In CLEVR-Change and mini, a scene has one pair of each kind: (before, after) and (before,
    distractor) or, in half of the scenes of an epoch, (distractor, after) and (distractor, before)
    (as released). The two batches stay separate because they share their first images. In a joint
    contrastive loss, an "after" image would have a copy of its partner among its negatives."""
    losses: dict[str, Tensor] = {}
    for batch in batches:
        batch = batch.to(cfg.device)
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.on_cuda):
            terms = model(batch.before, batch.after, batch.caption)
        for name, term in terms.items():
            losses[name] = losses.get(name, 0) + term / len(batches)
    losses["total"] = total_loss(losses, cfg)  # Eq. 13
    return losses


def train(cfg: Config, dataset, resume: bool = False) -> tuple[SCORER, dict]:
    """Train on a data set (data.Dataset) into cfg.out_dir -> the best model by validation, and its
    checkpoint. `resume` continues from last.pt (see Run) as if training had never stopped.
    FloatingPointError if a loss is not finite."""
    from support.run import Run

    torch.manual_seed(cfg.seed)
    model = SCORER(cfg, len(dataset.vocab), dataset.grid, dataset.max_len).to(cfg.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=cfg.lr, fused=True)
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
            nn.utils.clip_grad_norm_(parameters, cfg.grad_clip)
        optimizer.step()
        model.clamp_scales()
        run.step += 1
        run.log(losses)
        if run.step % cfg.eval_every == 0 or run.step == cfg.steps:
            run.checkpoint(evaluate(model, dataset, "val", cfg))
            model.train()
    return run.best_model()


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(
    model: SCORER, dataset, split: str, cfg: Config, out_dir: Path | None = None, state=None
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

    return load_captioner(SCORER, Config, checkpoint, device, extractor)


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption pictures."""
    import data
    from support.captioner import caption_files
    from support.checks import note_on_negatives
    from support.releases import all_presets
    from support.run import load_model, parse_args

    cfg, args = parse_args(Config, all_presets(PRESETS), RELEASED, argv)
    if args.caption:
        captioner = load(args.checkpoint, cfg.device, cfg.extractor)
        caption_files(captioner, args.caption, args.out)
        return
    dataset = data.open_dataset(cfg, make=args.eval is None)
    if args.eval is not None:
        model, state = load_model(SCORER, cfg, args.eval)
        dataset.adopt(state)
    else:
        note_on_negatives(dataset, cfg, "w_match", "w_cbr")
        model, state = train(cfg, dataset, args.resume)
    if args.split != "none":
        evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir), state)


# ---- other forms ---------------------------------------------------------------------------------


class OtherMatch(Match):
    """Match without subspaces: as released, Eq. 2 alone ("tm"), or products of pooled images
    (Fig. 3), [ours] of the means or maxima of q and k over cells."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.matching = cfg.matching

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if self.matching == "tm":
            return token_match(q, k, heads=1)  # Eq. 2
        if self.matching == "mean":
            return upcast(q).mean(1) @ upcast(k).mean(1).T
        return upcast(q).amax(1) @ upcast(k).amax(1).T


class OtherFusion(nn.Module):
    """Eq. 7 of the sum or the product of both images (section 6.3) or, in the baseline Subtraction,
    of X_bef - X_aft of Eq. 1, in which the positions cancel (docs/tour.md, "Positions").
    Both images (B, N, D) -> (B, N, D)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.mode = "subtract" if cfg.difference == "subtract" else cfg.fusion
        self.project = nn.Linear(cfg.dim, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, bef: Tensor, aft: Tensor) -> Tensor:
        if self.mode == "sum":
            x = bef + aft
        elif self.mode == "hadamard":
            x = bef * aft
        elif self.mode == "subtract":
            x = bef - aft
        return F.relu(self.dropout(self.project(x)))  # Eq. 7


class ReleasedDecoderLayer(DecoderLayer):
    """A standard decoder adds the feed-forward's input, the released code its activation."""

    def feed_forward(self, seen: Tensor) -> Tensor:
        inner = F.gelu(self.widen(seen))
        return self.norm3(inner + self.dropout(self.output(inner)))


if __name__ == "__main__":
    from support.files import run_main

    run_main(main)
