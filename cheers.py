"""CHEERS: Change Entity-guided Heterogeneous Representation Disentangling for Change Captioning
(Li et al., 2025).

The flow of one pair, with CLEVR-Change's sizes:
    before, after (1024, 14, 14) each                     CLIP: pictures (768), M names (M, 768)
       v  embed                                              v  retrieve, Eq. 1
    F_bef, F_aft (196, 512) each                          entities of the pair (3, 768)
    HRD, twice; layer 2 reads LN(F + shared):                v  project
       v  CRE, Eq. 2-4, 6 . . . . . . . . . L_C, Eq. 7 .  E (3, 512)
    common_bef, common_aft (196, 512) each                   |
       v  attention, Eq. 8, with L_I, Eq. 9                  |
    shared_bef, shared_aft (196, 512) each                   |
       v  F - shared; DRE, Eq. 2, 4-5, 10 . L_D, Eq. 11 . .  |
    difference_bef, difference_aft (196, 512) each           |
       v  join, Eq. 12, of layer 2's differences             |
    F_diff (196, 512) and caption (24 ids) --------+---------+
                                                   v  decoder, Eq. 13-17
                                               next word, L_S, Eq. 18
Gradients: nothing is detached. L_C and L_D train the maps P^ and what makes their inputs, L_I what
makes `shared`, and its own scale. L_S trains all but this scale and the maps that only L_C and L_D
read: entity_dre, entity_cre and, before the last layer, dre.

Idea. (1) A moved camera changes how an object looks, but not its name. So CLIP looks for names that
fit one image better than the other. These entities often name what changed. (2) Cross-attention
rebuilds in each image what both share, and subtracting that leaves the difference of each image.
Both are enhanced, and losses make images and entities agree on where they are. (3) For each word,
the decoder weighs the entities, which name the subject, and the difference, which shows the change.

Terms. A changed pair shows a change. In a distractor pair, only camera and light differ.
Read first: ProbabilityMap, HRD, DecoderLayer, contrastive_loss, CHEERS.encode and .forward, and
retrieve. Skip at first: Decoder, attention_map, and section "entities" apart from retrieve.

CRE and DRE (Commonality, Difference Representation Enhancement) enhance in a target what it shares
with a source, or does not. i is an image, j the other one; n is a cell of the target, t a cell or
an entity of the source. C, C~, D are common, shared, difference in code; H, H', H^T, H^V, H^F are
hidden, words, text, visual, fused. [ours] marks what the paper leaves open, and our additions.
Equation  where             as printed                                           [ours]
Sec. 3.1  find_candidates   names: the subjects of training captions             of min_count
Eq. 1     retrieve          argmax of S_bef - S_aft, S_i = cos(CLIP of i, name)  |S_bef - S_aft|
Eq. 2     max_probability   P(n, t) = e^cos(n, t) / sum_n' e^cos(t, n')          e^(scale cos)
Eq. 3     ProbabilityMap    CRE: P^ = Linear(m), m(n) = max_t P(n, t)
Eq. 4     HRD               F' = LN(sigmoid(P^) F + F)
Eq. 5     ProbabilityMap    DRE: P^ = Linear(1 - m)
Eq. 6     HRD               C_i = CRE(F_j, F_i), C'_i = DRE(E, F_i)              next F: LN(F + C~)
Eq. 7     CHEERS.forward    L_C = MSE(P^ of C_i, P^ of C'_i)
Eq. 8     HRD               C~_i = MHCA(C_i, C_j): attention from C_i to C_j
Eq. 9     contrastive_loss  L_I = -log softmax(sim(query, key) / tau)            of C~, both ways
Eq. 10    HRD               D_i = DRE(F_i, F_i - C~_i), D'_i = CRE(E, F_i - C~_i)
Eq. 11    CHEERS.forward    L_D = MSE(P^ of D_i, P^ of D'_i)
Eq. 12    CHEERS.encode     F_diff = Linear [D_bef ; D_aft]
Eq. 13    DecoderLayer      H^T = MHCA(H', E), H^V = MHCA(H', F_diff)            H' = LN(H + MHSA)
Eq. 14-15 DecoderLayer      alpha = Linear [H' ; H^T], beta = Linear [H' ; H^V]
Eq. 16-17 DecoderLayer      H^F = alpha H^T + beta H^V, H = LN(H^F + H')
Eq. 18    caption_loss      L_S = -sum over words of log P(word)                 mean over words
Eq. 19    total_loss        L = L_S + lambda_v (L_C + L_D) + lambda_m L_I
Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, L ids of a caption (START,
words, END, padding), V of the vocabulary, K entities of a pair, M names, T sources, d CLIP's width.
To copy: this file, matching.py and common.py; to train, also data.py, scores.py and support/.
Licence: MIT. Written from the paper, whose repository (yili-19/CHEER) is not public.
"""

import functools
import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    upcast,
)
from matching import token_match

# ---- config --------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """CHEERS. The settings of a run (data, steps, device) are in common.RunConfig. Values without
    [ours] are the paper's or CLIP's. PRESETS, below, has what differs between data sets."""

    MAY_CHANGE = RunConfig.MAY_CHANGE | {"clip"}  # CLIP's weights may have moved

    dim: int = 512  # width D of images, words and decoder
    word_dim: int = 300  # width of word embeddings [ours]
    heads: int = 8  # heads of every attention [ours]
    layers: int = 2  # HRD layers, Eq. 6-11 [ours]; 0: only subtract one image from the other
    decoder_layers: int = 2  # decoder layers [ours]
    dropout: float = 0.1  # dropout probability [ours]
    k: int = 3  # K, entities of a pair (Fig. 5; Eq. 1 has one); 0: none
    min_count: int = 2  # a candidate is the subject of at least this many training captions [ours]
    retrieval: Literal["absolute", "signed"] = "absolute"  # [ours] |S_bef - S_aft|; signed: Eq. 1
    clip: str = "ViT-L-14:openai"  # open_clip's MODEL:WEIGHTS (name or file), or mini
    clip_dim: int = 768  # d, width of CLIP's common space
    cre: bool = True  # enhance what is common, Eq. 6-7
    dre: bool = True  # enhance what differs, Eq. 10-11
    temperature: Literal["learned", "one"] = "learned"  # of Eq. 2 [ours]; one: as printed
    gate: Literal["channels", "scalar", "none"] = "channels"  # per word: D numbers, 1, none [ours]
    w_consistency: float = 0.75  # lambda_v, weight of L_C + L_D in Eq. 19; 0 leaves them out
    w_match: float = 0.5  # lambda_m, weight of L_I in Eq. 19; 0 leaves it out


# ---- modules -------------------------------------------------------------------------------------


class ImageEmbedding(nn.Module):
    """F = conv_1x1(features) + position. (B, C, H, W) -> (B, N, D), cell n = row * W + column.

    [ours] The paper names neither the convolution nor positions. As in SCORER, a cell's position is
    the vector of its column followed by the vector of its row."""

    def __init__(self, cfg: Config, channels: int, height: int, width: int):
        super().__init__()
        self.grid = (channels, height, width)
        self.conv = nn.Conv2d(channels, cfg.dim, 1)
        self.position = GridPosition(cfg.dim, height, width)

    def forward(self, features: Tensor) -> Tensor:
        # Without this check, broadcasting would silently accept some wrong shapes.
        assert features.shape[1:] == self.grid, f"{self.grid} expected, {features.shape} found"
        x = self.conv(features) + self.position()
        return x.flatten(2).transpose(1, 2)  # (B, D, H, W) -> (B, N, D)


def max_probability(source: Tensor, target: Tensor, scale: Tensor | float) -> Tensor:
    """Eq. 2 and the maximum of Eq. 3: m(n) = max_t P(n, t). Each source position t shares 1 out
    among the target's cells, P(., t) = softmax of scale * cos(., t), and m(n) is the largest share
    that cell n gets. source (B, T, D), target (B, N, D) -> m (B, N).

    The maximum is taken because it is enough that a cell is like one position of the source. (A
    mean would ask for a cell that is like all of them.)

    By hand: the target's cells are (1, 0) and (0, 1), and scale is ln 3. For one entity (1, 0),
    the exponentials are 3 and 1, so m = 3/4, 1/4. With (0, 1) as a second one, m = 3/4, 3/4."""
    cells = F.normalize(upcast(target), dim=-1)
    sources = F.normalize(upcast(source), dim=-1)
    cosines = cells @ sources.transpose(1, 2)  # (B, N, T)
    # [ours] The softmax is over the target. Over the source, one entity would have m = 1 at each n.
    p = (cosines * scale).softmax(1)  # Eq. 2
    return p.amax(2)  # Eq. 3, (B, N)


class ProbabilityMap(nn.Module):
    """P^, which says where a CRE or DRE enhances its target: Linear_{1->D}(m) in a CRE (Eq. 3), and
    Linear_{1->D}(1 - m) in a DRE (Eq. 5). The enhancement itself, Eq. 4, is in HRD, because two of
    the four maps of a layer enhance nothing: they are there for L_C and L_D alone.

    The paper calls P^ the probability matrix, though nothing confines it to (0, 1). m hardly varies
    over cells. With bare cosines, it is about 1/N, as N cells share 1. [ours] Each map learns a
    temperature, as CLIP does. Then m is still about 1/N from an entity, but about 1 from an image:
    both have the same positions, so each cell finds a cell like it. Either way, Eq. 4 enhances all
    cells nearly alike (measured in docs/tour.md)."""

    def __init__(self, cfg: Config, kind: Literal["CRE", "DRE"]):
        super().__init__()
        self.kind = kind
        self.expand = nn.Linear(1, cfg.dim)
        if cfg.temperature == "learned":  # clamp_scales finds log_scale by its name
            self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        elif cfg.temperature == "one":
            self.register_buffer("log_scale", torch.zeros(()), persistent=False)  # a scale of 1

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source (B, T, D), target (B, N, D) -> P^ (B, N, D)."""
        # P^ varies so little over cells that rounding to bfloat16 would hide it.
        with torch.autocast(source.device.type, enabled=False):
            m = max_probability(source, target, self.log_scale.exp())  # Eq. 2
            if self.kind == "DRE":
                m = 1 - m  # Eq. 5
            return self.expand(m[..., None])  # Eq. 3


# Both images of each pair are one batch of 2B, all "before" first: F_i in the paper. (Two separate
# tensors are as fast, but recorded runs would then differ in their last digits.)


def other_image(x: Tensor) -> Tensor:
    """x (2B, ...), all "before" images first -> the other image of each pair (2B, ...)."""
    before, after = x.chunk(2)
    return torch.cat([after, before])


class Disentangled(NamedTuple):
    """What an HRD layer returns. maps: "common", which L_C compares, and "different", for L_D, each
    (P^ from images, P^ from entities); none if w_consistency is 0."""

    next_x: Tensor | None  # (2B, N, D), LN(x + shared), which the next layer reads, if there is one
    shared: Tensor  # (2B, N, D), Eq. 8
    difference: Tensor  # (2B, N, D), Eq. 10; before the last layer, F - shared
    maps: dict[str, tuple[Tensor, Tensor]]  # (2B, N, D) each


class HRD(nn.Module):
    """Heterogeneous Representation Disentangling, one layer of Fig. 2: Eq. 4, 6, 8 and 10. It has
    four maps P^, for i = bef, aft and the other image j:

                        common parts, target F_i        different parts, target F_i - shared_i
        from images     of CRE(F_j, F_i) = common_i     of DRE(F_i, F_i - shared_i) = difference_i
        from entities   of DRE(E, F_i)                  of CRE(E, F_i - shared_i)
        compared by     L_C                             L_D

    Entities name what changed. L_C: a cell should match the other image where it does not match the
    entities. L_D: F - shared should match the entities where it does not match its own image F.
    Nothing reads C'_i and D'_i but their maps. Before the last layer, this is so for D_i as well.

    [ours] L_C and L_D are means over both images. `raw` is F of the first layer in every layer: Eq.
    10 reads "the original raw features". The paper does not say what the next layer reads: here
    LN(x + shared), because `shared` alone hardly varies over cells in layer two at the start."""

    def __init__(self, cfg: Config, last: bool):
        super().__init__()
        self.last = last
        self.compare = cfg.w_consistency > 0  # with L_C and L_D, which read the maps of entities
        self.use_cre = cfg.cre
        self.use_dre = cfg.dre and (last or self.compare)  # otherwise, nothing would read its map
        if self.use_cre:
            self.cre = ProbabilityMap(cfg, "CRE")
            self.norm_common = nn.LayerNorm(cfg.dim)
            if self.compare:
                self.entity_dre = ProbabilityMap(cfg, "DRE")
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        if self.use_dre:
            self.dre = ProbabilityMap(cfg, "DRE")
            if last:
                self.norm_difference = nn.LayerNorm(cfg.dim)
            if self.compare:
                self.entity_cre = ProbabilityMap(cfg, "CRE")
        if not last:
            self.norm = nn.LayerNorm(cfg.dim)

    def forward(self, x: Tensor, raw: Tensor, e: Tensor | None = None) -> Disentangled:
        """x (F of Eq. 6) and raw (F of Eq. 10), both (2B, N, D) and equal in the first layer;
        entities E (2B, K, D), which only the maps of L_C and L_D read."""
        maps = {}
        common = x
        if self.use_cre:
            p = self.cre(other_image(x), x)  # Eq. 6, P^ of C_i = CRE(F_j, F_i)
            common = self.norm_common(p.sigmoid() * x + x)  # Eq. 4
            if self.compare:
                maps["common"] = (p, self.entity_dre(e, x))  # Eq. 6, P^ of C'_i = DRE(E, F_i)
        shared = self.attention(common, other_image(common))  # Eq. 8, C~_i = MHCA(C_i, C_j)
        rest = raw - shared
        difference = rest
        if self.use_dre:
            p = self.dre(raw, rest)  # Eq. 10, P^ of D_i = DRE(F_i, F_i - C~_i)
            if self.last:
                difference = self.norm_difference(p.sigmoid() * rest + rest)  # Eq. 4
            if self.compare:
                maps["different"] = (p, self.entity_cre(e, rest))  # P^ of D'_i = CRE(E, F_i - C~_i)
        next_x = None if self.last else self.norm(x + shared)
        return Disentangled(next_x, shared, difference, maps)


class DecoderLayer(nn.Module):
    """Eq. 13-17: words attend to earlier words, then to entities (text) and to F_diff (visual), and
    become LN(alpha text + beta visual + words). As in the paper, no feed-forward layer follows, and
    nothing confines alpha and beta to (0, 1).

    [ours] `words` has a residual and a LayerNorm. For each word, alpha and beta have D numbers
    each; with --gate scalar they are single numbers, the text's "two parameters". With --gate none,
    the decoder does not read the entities, and `fused` is `visual`."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.norm1 = nn.LayerNorm(cfg.dim)
        self.norm2 = nn.LayerNorm(cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.text_attention = None
        if cfg.gate != "none":
            self.text_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
            width = {"channels": cfg.dim, "scalar": 1}[cfg.gate]
            self.alpha = nn.Linear(2 * cfg.dim, width)
            self.beta = nn.Linear(2 * cfg.dim, width)
            # [ours] Both gates start at 1 on average, not at 0. Decoder's initialise leaves biases.
            nn.init.ones_(self.alpha.bias)
            nn.init.ones_(self.beta.bias)

    def forward(self, x: Tensor, f_diff: Tensor, e: Tensor | None) -> tuple[Tensor, Tensor]:
        """x (B, L, D), F_diff (B, N, D) and, unless --gate none, E (B, K, D) -> the new x, and the
        words as they attend to F_diff, both (B, L, D)."""
        words = self.norm1(x + self.dropout(self.self_attention(x, x, causal=True)))
        visual = self.cross_attention(words, f_diff)  # Eq. 13
        fused = visual
        if self.text_attention:
            text = self.text_attention(words, e)  # Eq. 13
            alpha = self.alpha(torch.cat([words, text], -1))  # Eq. 14
            beta = self.beta(torch.cat([words, visual], -1))  # Eq. 15
            fused = alpha * text + beta * visual  # Eq. 16
        return self.norm2(words + self.dropout(fused)), words  # Eq. 17


class Decoder(nn.Module):
    """Words, F_diff and entities -> hidden states, from which `head` predicts the next words.

    A word sees only itself and earlier words, so padding at the end of a caption needs no mask.
    [ours] Positions are learned, and a LayerNorm follows them, as in RDD+ACR. Matrices start
    Xavier-uniform, as in DIRL+CCR."""

    def __init__(self, cfg: Config, vocab_size: int, max_len: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, cfg.word_dim)
        self.project = nn.Linear(cfg.word_dim, cfg.dim)
        self.position = nn.Embedding(max_len, cfg.dim)
        self.norm = nn.LayerNorm(cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.head = nn.Linear(cfg.dim, vocab_size)  # of section 3.3, without its softmax
        initialise(self, xavier=True)

    def forward(self, ids: Tensor, f_diff: Tensor, e: Tensor | None) -> tuple[Tensor, Tensor]:
        """ids (B, L), F_diff (B, N, D), entities E (B, K, D) or None -> hidden states, and the
        words as they attend to F_diff in the last layer, both (B, L, D)."""
        x = self.project(self.embed(ids)) + self.position.weight[: ids.shape[1]]
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x, words = layer(x, f_diff, e)  # Eq. 13-17
        return x, words


# ---- losses --------------------------------------------------------------------------------------


def contrastive_loss(shared_bef: Tensor, shared_aft: Tensor, scale: Tensor) -> Tensor:
    """Eq. 9, of pairs a and b: L_I = -1/B sum_a log(exp sim_aa / sum_b exp sim_ab), averaged with
    the same loss of sim's transpose. Negatives are the other pairs of the batch. `shared` of each
    image (B, N, D), scale = 1 / tau -> a scalar.

    sim_ab = scale / 2 [mean_n max_n' cos(bef_an, aft_bn') + mean_n' max_n cos(bef_an, aft_bn')],
    with bef_an cell n of shared_bef in pair a, and aft_bn' cell n' of shared_aft in pair b.

    By hand: shared_bef = (2, 0), (0, 3), shared_aft = (1, 0), (0, 1), two pairs of one cell, scale
    ln 3. Then exp sim has 3 on its diagonal and 1 elsewhere, and L_I = -ln(3/4) = 0.288.

    [ours] The paper does not define query and key. We take `shared`, because the loss is meant to
    help Eq. 8, and both directions, while Eq. 9 has one. As in SCORER, which the paper follows
    here, sim averages best matches, and scale is learned; but vectors have length 1 here."""
    with torch.autocast(shared_bef.device.type, enabled=False):
        # Lengths need float32. Under autocast, matching is faster in the bfloat16 of `shared`.
        query = F.normalize(upcast(shared_bef), dim=-1).to(shared_bef.dtype)
        key = F.normalize(upcast(shared_aft), dim=-1).to(shared_aft.dtype)
        sim = scale * token_match(query, key)  # (B, B)
        return (info_nce(sim) + info_nce(sim.T)) / 2  # Eq. 9


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 18, L_S: cross-entropy of the next word. logits (B, L, V) at words 0 ... L-1,
    caption (B, L) padded with NULL."""
    scores = logits[:, :-1].flatten(0, 1)
    target = caption[:, 1:].flatten()
    # [ours] The mean over all words of the batch. Next to the sum of Eq. 18, L_C, L_D and L_I would
    # weigh several times less.
    return F.cross_entropy(scores, target, ignore_index=NULL)  # Eq. 18


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Eq. 19: L = L_S + lambda_v (L_C + L_D) + lambda_m L_I, with 0 for a loss that is left out."""
    l_s = losses["caption"]
    l_c = losses.get("common", 0.0)
    l_d = losses.get("different", 0.0)
    l_i = losses.get("match", 0.0)
    return l_s + cfg.w_consistency * (l_c + l_d) + cfg.w_match * l_i  # Eq. 19


# ---- method --------------------------------------------------------------------------------------


class CHEERS(nn.Module):
    """CHEERS with all its parameters. grid: (C, H, W) of the features; max_len: tokens of the
    longest caption, with START and END."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg = cfg
        self.grid = grid
        self.max_len = max_len
        if cfg.w_match and not cfg.layers:
            raise InputError("--layers 0 has no common features for --w_match; set --w_match 0")
        if cfg.w_consistency and not (cfg.layers and (cfg.cre or cfg.dre)):
            raise InputError("--w_consistency needs the maps of CRE or DRE; set --w_consistency 0")
        reads_entities = cfg.gate != "none" or cfg.w_consistency > 0
        if reads_entities and not cfg.k:
            raise InputError("--k 0 has no entities; set --gate none --w_consistency 0")
        self.embed = ImageEmbedding(cfg, *grid)
        # [ours] The paper does not say how entities get from width d to width D.
        self.project = nn.Linear(cfg.clip_dim, cfg.dim) if reads_entities else None
        self.hrd = nn.ModuleList(HRD(cfg, last=(i == cfg.layers - 1)) for i in range(cfg.layers))
        self.join = nn.Linear(2 * cfg.dim, cfg.dim) if cfg.layers else None
        self.decoder = Decoder(cfg, vocab_size, max_len)
        if cfg.w_match:
            self.log_scale = nn.Parameter(torch.ones(()))  # [ours] scale starts at e, as SCORER's

    def encode(
        self, before: Tensor, after: Tensor, entities: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, list[Disentangled]]:
        """Features (B, C, H, W) of both images and entities (B, K, d) -> what the decoder reads,
        F_diff (B, N, D) and E (B, K, D) or None; what each HRD layer returns."""
        # Otherwise, other_image would silently pair the wrong images.
        assert before.shape == after.shape, f"{before.shape} before, {after.shape} after"
        e = None
        e_of_both = None
        if self.project is not None:
            e = self.project(entities)
            e_of_both = torch.cat([e, e])
        raw = self.embed(torch.cat([before, after]))  # (2B, N, D), all "before" images first
        if not self.hrd:  # the baseline of Table 4
            f_bef, f_aft = raw.chunk(2)
            return f_bef - f_aft, e, []
        x = raw
        layers = []
        for hrd in self.hrd:
            layer = hrd(x, raw, e_of_both)  # Eq. 4, 6, 8, 10
            x = layer.next_x
            layers.append(layer)
        difference_bef, difference_aft = layers[-1].difference.chunk(2)
        f_diff = self.join(torch.cat([difference_bef, difference_aft], -1))  # Eq. 12
        return f_diff, e, layers

    def forward(
        self, before: Tensor, after: Tensor, caption: Tensor, entities: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Features (B, C, H, W) of both images, caption (B, L), CLIP's embeddings of the entities
        (B, K, d) -> the terms of Eq. 19 that the config asks for. [ours] L_C, L_D and L_I are means
        over the layers.

        At the start, "caption" is about 5 (a guess among 76 ids has ln 76 = 4.3), "match" is ln B,
        "common" 1.3 and "different" 0.7. If "match" stays at ln B, `shared` does not tell a pair's
        partner from other images. Constant maps, too, make "common" and "different" low."""
        f_diff, e, layers = self.encode(before, after, entities)  # Eq. 2-8, 10-12
        hidden, _ = self.decoder(caption, f_diff, e)  # Eq. 13-17
        losses = {"caption": caption_loss(self.decoder.head(hidden), caption)}  # Eq. 18
        for layer in layers:
            terms = {}
            for name, (p_images, p_entities) in layer.maps.items():
                terms[name] = F.mse_loss(p_images, p_entities)  # Eq. 7 (common), Eq. 11 (different)
            if self.cfg.w_match:
                shared_bef, shared_aft = layer.shared.chunk(2)
                scale = self.log_scale.exp()
                terms["match"] = contrastive_loss(shared_bef, shared_aft, scale)  # Eq. 9
            for name, loss in terms.items():
                losses[name] = losses.get(name, 0.0) + loss / len(layers)
        return losses

    @torch.no_grad()
    def clamp_scales(self) -> None:
        """Cap every scale, 1 / temperature, at 100, as in CLIP. Call it after each step."""
        for name, p in self.named_parameters():
            if name.endswith("log_scale"):
                p.clamp_(max=math.log(100))

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor, entities: Tensor | None = None) -> Tensor:
        """Features (B, C, H, W) of both images and entities (B, K, d) -> ids of greedy captions
        (B, max_len)."""
        f_diff, e, _ = self.encode(before, after, entities)

        def next_word(ids: Tensor) -> Tensor:
            hidden, _ = self.decoder(ids, f_diff, e)
            return self.decoder.head(hidden[:, -1])

        return decode(next_word, before.shape[0], self.max_len, before.device)

    @torch.no_grad()
    def attention_map(
        self, before: Tensor, after: Tensor, ids: Tensor, entities: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The last decoder layer's attention over cells, averaged over heads and over the words of
        ids (B, L) -> "attention" (B, H, W)."""
        f_diff, e, _ = self.encode(before, after, entities)
        _, words = self.decoder(ids, f_diff, e)
        attention = self.decoder.layers[-1].cross_attention
        query, key, _ = attention.project(words, f_diff)
        weight = attention.scores(query, key).softmax(-1).mean(1)  # (B, L, N)
        # Row t is the state that predicts word t + 1.
        over_cells = masked_mean(weight[:, :-1], is_word(ids[:, 1:]))  # (B, N)
        return {"attention": over_cells.unflatten(1, self.grid[1:])}


# ---- entities ------------------------------------------------------------------------------------


def retrieve(x_bef: Tensor, x_aft: Tensor, table: Tensor, k: int, retrieval: str) -> Tensor:
    """Eq. 1: the candidates whose cosines with the two images differ most. x (B, d) of each image,
    table (M, d) -> rows (B, k), best first, or (B, M) if there are fewer candidates than k.

    A candidate passes if its cosine with at least one of the images is above the mean over all
    candidates. [ours] If fewer than k candidates pass, the best of the others fill the list. Eq. 1
    has the "signed" difference. But the text asks for the largest one, and an added object is
    closer to "after", so the default is "absolute" [ours]."""
    names = F.normalize(table, dim=-1)
    s_bef = F.normalize(x_bef, dim=-1) @ names.T  # (B, M)
    s_aft = F.normalize(x_aft, dim=-1) @ names.T
    if retrieval == "absolute":
        score = (s_bef - s_aft).abs()
    elif retrieval == "signed":
        score = s_bef - s_aft
    above_bef = s_bef > s_bef.mean(1, keepdim=True)
    above_aft = s_aft > s_aft.mean(1, keepdim=True)
    # Cosines differ by at most 2, so - 4 moves the candidates that fail behind all that pass.
    score = torch.where(above_bef | above_aft, score, score - 4)
    return score.argsort(dim=1, descending=True, stable=True)[:, :k]  # Eq. 1


@torch.no_grad()
def embed_texts(clip, tokenizer, texts: list[str]) -> Tensor:
    """CLIP's embeddings of texts (n, d), each of length 1."""
    device = next(clip.parameters()).device
    blocks = []
    for ids in tokenizer(texts).split(256):
        blocks.append(clip.encode_text(ids.to(device), normalize=True).cpu())
    return torch.cat(blocks)


@torch.no_grad()
def embed_images(clip, preprocess, pictures: list) -> Tensor:
    """CLIP's embeddings of pictures (n, d), each of length 1. preprocess: one picture -> CLIP's
    input (3, height, width)."""
    from support.files import progress

    device = next(clip.parameters()).device
    starts = range(0, len(pictures), 64)
    bar = progress(starts, desc="CLIP", unit="image", unit_scale=64, delay=1)
    blocks = []
    with ThreadPoolExecutor(8) as pool:  # at most 8 large pictures are in memory at once
        for start in bar:
            x = torch.stack(list(pool.map(preprocess, pictures[start : start + 64])))
            blocks.append(clip.encode_image(x.to(device), normalize=True).cpu())
    return torch.cat(blocks)


def find_candidates(subjects: dict[str, list[str]], min_count: int, k: int) -> list[str]:
    """Section 3.1.1: caption -> its subjects, for all captions -> the candidates, sorted. [ours]
    Subjects of fewer than min_count different captions are left out, because most of them are
    errors of the parser. If fewer than k candidates would remain, all are kept."""
    counts: dict[str, int] = {}
    for phrases in subjects.values():
        for phrase in set(phrases):
            counts[phrase] = counts.get(phrase, 0) + 1
    frequent = [phrase for phrase in counts if counts[phrase] >= min_count]
    if len(frequent) < k:
        return sorted(counts)
    return sorted(frequent)


class Entities:
    """The K entities of each pair of a data set. phrases: M candidates; table: CLIP's embeddings of
    these (M, d); rows: names of a pair (before, after) -> its rows of the table (K,). With `blind`,
    zeros stand in for the embeddings."""

    def __init__(
        self, phrases: list[str], table: Tensor, rows: dict[tuple, Tensor], blind: bool = False
    ):
        self.phrases = phrases
        self.table = table
        self.rows = rows
        self.blind = blind

    def __call__(self, pairs: list[tuple]) -> Tensor:
        """Names (before, after) of B pairs -> CLIP's embeddings of their entities (B, K, d)."""
        rows = torch.stack([self.rows[pair] for pair in pairs])
        entities = self.table[rows.to(self.table.device, non_blocking=True)]
        return torch.zeros_like(entities) if self.blind else entities

    def note(self, pair: tuple) -> str:
        """Name a pair's entities in a line, which is printed below its pictures."""
        return "entities: " + ", ".join(self.phrases[m] for m in self.rows[pair])

    def state(self) -> dict:
        """Return what a checkpoint needs, besides the model, to find any two pictures' entities."""
        return {"entities": {"phrases": self.phrases, "table": self.table}}

    def check_state(self, state: dict) -> None:
        """InputError if a checkpoint was trained with other candidates or another CLIP."""
        trained = state["entities"]
        if trained["phrases"] != self.phrases:
            raise InputError(
                f"the checkpoint was trained with {len(trained['phrases'])} candidate entities, "
                f"not with these {len(self.phrases)}; give its --data_dir"
            )
        check_clip(self.table, trained["table"])


def find_entities(
    cfg: Config, phrases: list[str], table: Tensor, images: dict, pairs: list[tuple]
) -> Entities:
    """Retrieve the entities of each pair (section 3.1.2). CLIP embeds a whole image, so it can find
    an object that appeared, vanished or looks different, but not one that only moved.

    phrases: M candidates; table: their embeddings (M, d); images: name -> embedding (d,); pairs:
    names (before, after). In a loop of your own, you need an open_clip.CLIP, its tokenizer and its
    preprocessing, which must not crop, or changes at the border are lost:

        cfg = Config(device="cpu")  # or "cuda"
        phrases = find_candidates({"the red cube is gone": ["red cube"]}, cfg.min_count, cfg.k)
        table = embed_texts(clip, tokenizer, phrases)
        x = embed_images(clip, preprocess, [picture_a, picture_b])  # PIL images
        images = {"a": x[0], "b": x[1]}
        entities = find_entities(cfg, phrases, table, images, [("a", "b")])
        model = CHEERS(cfg, vocab_size, grid, max_len)
        losses = model(before, after, ids, entities([("a", "b")]))"""
    table = table.to(cfg.device)
    rows = {}
    pairs = list(dict.fromkeys(pairs))
    for start in range(0, len(pairs), 256):
        block = pairs[start : start + 256]
        x_bef = torch.stack([images[before] for before, _ in block]).to(cfg.device)
        x_aft = torch.stack([images[after] for _, after in block]).to(cfg.device)
        best = retrieve(x_bef, x_aft, table, cfg.k, cfg.retrieval)
        rows |= zip(block, best.cpu(), strict=True)
    return Entities(phrases, table, rows, cfg.blind)


def check_clip(table: Tensor, trained: Tensor) -> None:
    """InputError if embeddings of candidates (M, d) differ from those in the checkpoint."""
    trained = trained.to(table.device)
    if table.shape != trained.shape or not table.allclose(trained, atol=1e-3):
        raise InputError("the checkpoint was trained with another CLIP; give --clip as in training")


def candidates_of(dataset, cfg: Config) -> list[str]:
    """Find the candidates in a data set (data.Dataset). InputError if no training caption has a
    subject.

    The paper "utilize[s] SpaCy [...] to extract the subjects" (section 3.1.1). [ours] Rules read
    captions from templates (mini, CLEVR-Change, CLEVR-DC), on which spaCy often errs."""
    from support.text import read_captions, subjects

    captions = sorted(set(dataset.captions(["train"])))
    readings = read_captions(subjects, captions, dataset.settings.templates)
    phrases = find_candidates(readings, cfg.min_count, cfg.k)
    if not phrases:
        remedy = "set --k 0 --gate none --w_consistency 0"
        raise InputError(f"no training caption has a subject; {remedy}")
    return phrases


def embeddings(
    cfg: Config, phrases: list[str], table: Tensor | None
) -> tuple[Tensor, Callable[[list], Tensor]]:
    """Load --clip -> embeddings of the candidates (M, d), and a function that embeds pictures
    (files or PIL images). table: the embeddings in a checkpoint, which are then returned, or None.
    InputError if --clip does not fit."""
    from support.features import load_clip, read_image

    clip, tokenizer, preprocess = load_clip(cfg.clip, cfg.device)
    if table is None:
        table = embed_texts(clip, tokenizer, phrases)
        if table.shape[1] != cfg.clip_dim:
            raise InputError(f"--clip {cfg.clip} needs --clip_dim {table.shape[1]}")
    else:
        # The first candidate is enough to tell another CLIP.
        check_clip(embed_texts(clip, tokenizer, phrases[:1]), table[:1])

    def open_picture(picture) -> Tensor:
        return preprocess(read_image(picture))

    return table, functools.partial(embed_images, clip, open_picture)


def entities_of(dataset, cfg: Config, state: dict | None = None) -> Entities | None:
    """Find the entities of all pairs of a data set (data.Dataset); None if K is 0. state: the
    content of a checkpoint, whose candidates then replace the data set's.

    CLIP's embeddings of the pictures are kept in clip-*.pt in the data set's folder, and made anew
    if pictures were replaced. Remove that file after overwriting the weights that --clip names."""
    from support.files import load_tensors, save_tensors

    if not cfg.k:
        return None
    if state:
        candidates = state["entities"]
    else:
        candidates = {"phrases": candidates_of(dataset, cfg), "table": None}
    table, embed = embeddings(cfg, **candidates)
    pairs = []
    for scenes in dataset.scenes.values():
        for scene in scenes:
            for pair in (*scene.pairs, *(scene.swapped or ())):
                pairs.append((pair.before, pair.after))
    names = sorted(dataset.paths)
    contents = [f"{name} {dataset.features.content(name)}" for name in names]
    key = "\n".join([cfg.clip, *contents])
    file = dataset.root / f"clip-{hashlib.sha256(key.encode()).hexdigest()[:12]}.pt"
    if not file.exists():
        save_tensors(file, {"images": embed([dataset.paths[name] for name in names])})
    images = load_tensors(file, "remove it, and it will be made again")["images"]
    images = dict(zip(names, images, strict=True))
    return find_entities(cfg, candidates["phrases"], table, images, pairs)


def entities_of_files(model: CHEERS, state: dict, files: list) -> Tensor | None:
    """Find the entities of pictures in the order before, after, before, after, ..., and print
    their names -> CLIP's embeddings of them (pairs, K, d), or None if K is 0. state: the content of
    the model's file."""
    if not model.cfg.k:
        return None
    table, embed = embeddings(model.cfg, **state["entities"])
    images = dict(enumerate(embed(files)))  # a picture's name is its place in the list
    pairs = [(n, n + 1) for n in range(0, len(files), 2)]
    entities = find_entities(model.cfg, state["entities"]["phrases"], table, images, pairs)
    for n, pair in enumerate(pairs, 1):
        print(f"pair {n}, {entities.note(pair)}")
    return entities(pairs)


# ---- presets -------------------------------------------------------------------------------------

# The paper has no number of steps, and its text no number of layers (Fig. 6 plots some). A batch of
# 128 is 128 scenes, which on CLEVR-Change are 256 pairs [ours]. The paper chose lambda_v and
# lambda_m on CLEVR-Change (Table 5); other data sets keep them [ours].
PRESETS = {
    "clevr_change": dict(batch_size=128, lr=1e-3,  # section 4.3
                         steps=10000, layers=2),  # [ours], SCORER's
    "clevr_dc": dict(batch_size=128, lr=1e-3,  # section 4.3
                     steps=10000, layers=1),  # [ours]
    "spot_the_diff": dict(batch_size=96, lr=5e-4,  # section 4.3
                          steps=10000, layers=2),  # [ours]
    # [ours] Own pairs are usually few, and their captions repeat words: half the width, one layer,
    # and every subject is a candidate. Validation chose lr. SCORER's presets explain the schedule.
    "pairs": dict(layers=1, dim=256, min_count=1, batch_size=16, lr=1e-3, schedule="cosine",
                  warmup=50, grad_clip=1.0, steps=2000, eval_every=1000, select_by="ROUGE-L"),
    # [ours] A small model for small pictures.
    "mini": dict(dim=128, word_dim=128, heads=2, layers=1, dropout=0.0, clip="mini", clip_dim=128,
                 w_consistency=0.1, w_match=0.05, batch_size=16, lr=2e-3, schedule="cosine",
                 warmup=50, grad_clip=1.0, steps=1700, eval_every=300, eval_batch=250),
}  # fmt: skip

# CHEERS in the paper's tables, which a run prints below its scores
PUBLISHED = {
    "clevr_change": {  # Table 1
        "total": {"BLEU-4": 57.1, "METEOR": 42.2, "ROUGE-L": 75.8, "CIDEr": 130.0, "SPICE": 33.9},
        "semantic change":
            {"BLEU-4": 54.1, "METEOR": 39.0, "ROUGE-L": 73.6, "CIDEr": 127.4, "SPICE": 33.2}},
    "clevr_dc": {  # Table 2
        "total": {"BLEU-4": 51.6, "METEOR": 32.7, "ROUGE-L": 66.8, "CIDEr": 86.9, "SPICE": 17.0}},
    "spot_the_diff": {  # Table 3
        "total": {"BLEU-4": 10.5, "METEOR": 12.9, "ROUGE-L": 33.1, "CIDEr": 41.0, "SPICE": 19.6}},
}  # fmt: skip

# ---- training ------------------------------------------------------------------------------------


def compute_losses(
    model: CHEERS, batches: tuple, cfg: Config, entities: Entities | None = None
) -> dict[str, Tensor]:
    """Eq. 19 and its terms, each a mean over a step's batches. In CLEVR-Change and mini, these are
    changed pairs, and the same scenes' distractor pairs, in which only camera and light differ.

    The two batches stay separate because they share their "before" images. In a joint contrastive
    loss, an "after" image would have a copy of its partner among its negatives."""
    losses: dict[str, Tensor] = {}
    for batch in batches:
        batch = batch.to(cfg.device)
        e = entities(batch.images) if entities else None
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.on_cuda):
            terms = model(batch.before, batch.after, batch.caption, e)
        for name, term in terms.items():
            losses[name] = losses.get(name, 0) + term / len(batches)
    losses["total"] = total_loss(losses, cfg)  # Eq. 19
    return losses


def train(cfg: Config, dataset, entities: Entities | None = None, resume: bool = False) -> CHEERS:
    """Train on a data set (data.Dataset) into cfg.out_dir -> the best model by validation.
    entities: the entities of its pairs, unless k is 0.

    `resume` continues from last.pt (see Run) as if training had never stopped.
    FloatingPointError if a loss is not finite."""
    from support.run import Run

    torch.manual_seed(cfg.seed)
    sources = [dataset, entities] if entities else [dataset]
    model = CHEERS(cfg, len(dataset.vocab), dataset.grid, dataset.max_len).to(cfg.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, fused=True)
    if cfg.compile and cfg.on_cuda:
        model.compile(fullgraph=True, dynamic=False)
    run = Run(cfg, model, sources, resume)
    run.start(optimizer)
    for batches in dataset.train_batches(cfg.batch_size, cfg.seed, run.step, cfg.steps):
        if run.is_over():
            break
        optimizer.param_groups[0]["lr"] = learning_rate(cfg, run.step)
        losses = compute_losses(model, batches, cfg, entities)
        optimizer.zero_grad()
        losses["total"].backward()
        if cfg.grad_clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        model.clamp_scales()
        run.step += 1
        run.log(losses)
        if run.step % cfg.eval_every == 0 or run.step == cfg.steps:
            run.checkpoint(evaluate(model, dataset, "val", cfg, entities=entities))
            model.train()
    return run.best_model()


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(
    model: CHEERS,
    dataset,
    split: str,
    cfg: Config,
    out_dir: Path | None = None,
    entities: Entities | None = None,
) -> dict[str, float]:
    """Caption a split of a data set (data.Dataset) -> the scores of all its pairs together.
    entities: the entities of its pairs, unless k is 0.

    Without out_dir, for validation during training, these are the quick metrics. With out_dir,
    every metric of every group of pairs is printed and written, with captions and pictures."""
    model.eval()
    captions = {}  # by pair id
    maps = {}
    notes = {}
    for batch in dataset.eval_batches(split, cfg.eval_batch):
        batch = batch.to(cfg.device)
        e = entities(batch.images) if entities else None
        ids = model.generate(batch.before, batch.after, e)
        captions |= zip(batch.pair_ids, dataset.vocab.decode(ids), strict=True)
        if out_dir:
            batch_maps = model.attention_map(batch.before, batch.after, ids, e)
            for b, pair_id in enumerate(batch.pair_ids):
                maps[pair_id] = {name: m[b] for name, m in batch_maps.items()}
                if entities:
                    notes[pair_id] = [entities.note(batch.images[b])]
    return dataset.results(split, captions, maps, out_dir, notes, PUBLISHED)


def load(checkpoint: str | Path, device: str = "", extractor: str = "", clip: str = ""):
    """A trained model that captions any two pictures (files or PIL images):
    caption, maps = load("best.pt")(before, after). extractor: see load_captioner. clip: where
    the model's CLIP is, if it has moved since training. Each call loads CLIP, so give many pairs at
    once: .pairs([(before, after), ...]) yields a caption and maps for each."""
    from support.captioner import load_captioner

    captioner = load_captioner(CHEERS, Config, checkpoint, device, extractor, entities_of_files)
    if clip:
        captioner.model.cfg.clip = clip
    return captioner


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption pictures."""
    import data
    from support.captioner import caption_files
    from support.releases import all_presets
    from support.run import load_model, parse_args

    cfg, args = parse_args(Config, all_presets(PRESETS), {}, argv)
    if args.caption:
        captioner = load(args.checkpoint, cfg.device, cfg.extractor, cfg.clip)
        caption_files(captioner, args.caption, args.out)
        return
    dataset = data.open_dataset(cfg, make=args.eval is None)
    if args.eval is not None:
        model, state = load_model(CHEERS, cfg, args.eval)
        dataset.adopt(state)
        entities = entities_of(dataset, cfg, state)
    else:
        data.note_on_negatives(dataset, cfg, "w_match")  # L_I contrasts images with images
        entities = entities_of(dataset, cfg)
        model = train(cfg, dataset, entities, args.resume)
    if args.split != "none":
        evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir), entities)


if __name__ == "__main__":
    from support.files import run_main

    run_main(main)
