"""CHEERS: Change Entity-guided Heterogeneous Representation Disentangling for Change Captioning
(Li et al., 2025).

A pair shows a scene before and after a change or, if it is a distractor, only another camera and
light. The method has three ideas:
1.  A moved camera changes how an object looks, but not its name. So CLIP looks for names that fit
    one image better than the other. These entities often name what changed.
2.  A map over cells enhances what both images have in common. Cross-attention then rebuilds each
    image from cells of the other. Subtracting that leaves its difference, which another map
    enhances. Losses make both agree with maps of the entities (nearly flat on mini: docs/tour.md).
3.  For each word, the decoder weighs the entities, which name the subject, and the difference,
    which shows the change.

The flow of one pair, with CLEVR-Change's sizes:
    ResNet-101: before, after (1024, 14, 14) each         CLIP: pictures (768), M names (M, 768)
       v  embed                                              v  retrieve, Eq. 1
    F_bef, F_aft (196, 512) each                          entities of the pair (3, 768)
    HRD, twice; f is F, in layer 2 LN(F + shared):           v  project
       v  CRE of f, Eq. 2-4, 6  . . . . . . L_C, Eq. 7 .  E (3, 512)
    common_bef, common_aft (196, 512) each                   |
       v  attention, Eq. 8, with L_I, Eq. 9                  |
    shared_bef, shared_aft (196, 512) each                   |
       v  F - shared; DRE, Eq. 2, 4-5, 10 . . . . L_D, Eq. 11|
    difference_bef, difference_aft (196, 512) each           |
       v  join, Eq. 12, of layer 2's differences             |
    F_diff (196, 512) and caption (24 ids) --------+---------+
                                                   v  decoder, Eq. 13-17
                                               next word, L_S, Eq. 18

Read first: retrieve, max_probability, ProbabilityMap, HRD, DecoderLayer, contrastive_loss,
CHEERS.encode and .forward. Skip at first: Decoder, attention_map, all that follows CHEERS.

CRE(source, target) and DRE(source, target) (Commonality, Difference Representation Enhancement)
enhance in a target what it shares with a source, or does not. i is an image, j the other one; n is
a cell of the target, t a cell or an entity of the source (in the paper's Eq. 2-5, i and j). In
code, C, C~, P^ are common, shared, p_..., D is the last output, and H, H', H^T, H^V, H^F are x,
words, text, visual, fused. [ours] marks what the paper leaves open, and our additions.
Equation  where             as printed                                           [ours]; "in logs"
Sec. 3.1  support.entities  names: the subjects of training captions             >= min_count times
Eq. 1     retrieve          argmax of S_bef - S_aft, S_i = cos(CLIP of i, name)  |S_bef - S_aft|
Eq. 2     max_probability   P(n, t) = e^cos(n, t) / sum_k e^cos(t, k)            e^(scale cos); k: n
Eq. 3     ProbabilityMap    CRE: P^ = Linear(m), m(n) = max_t P(n, t)
Eq. 4     HRD               F' = LN(sigmoid(P^) F + F)
Eq. 5     ProbabilityMap    DRE: P^ = Linear(I - m), I "denotes the unit vector" I: ones
Eq. 6     HRD               C_i = CRE(F_j, F_i), C'_i = DRE(E, F_i)              next f: LN(f + C~)
Eq. 7     CHEERS.forward    L_C = MSE(P^ of C_i, P^ of C'_i)                     "common"
Eq. 8     HRD               C~_i = MHCA(C_i, C_j): attention from C_i to C_j
Eq. 9     contrastive_loss  L_I = -log softmax(sim(query, key) / tau)            "match"; of C~
Eq. 10    HRD               D_i = DRE(F_i, F_i - C~_i), D'_i = CRE(E, F_i - C~_i) F in both layers
Eq. 11    CHEERS.forward    L_D = MSE(P^ of D_i, P^ of D'_i)                     "different"
Eq. 12    CHEERS.encode     F_diff = Linear [D_bef ; D_aft]
Eq. 13    DecoderLayer      H^T = MHCA(H', E), H^V = MHCA(H', F_diff)            H' = LN(H + MHSA)
Eq. 14-15 DecoderLayer      alpha = Linear [H' ; H^T], beta = Linear [H' ; H^V]
Eq. 16-17 DecoderLayer      H^F = alpha H^T + beta H^V, H = LN(H^F + H')
Eq. 18    caption_loss      L_S = -sum over words of log P(word)                 "caption"; a mean
Eq. 19    total_loss        L = L_S + lambda_v (L_C + L_D) + lambda_m L_I
Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, L ids of a caption (START,
words, END, padding), V of the vocabulary, K entities of a pair, M names, T sources, d CLIP's width.
To copy: this file, matching.py and common.py; to train, also data.py, scores.py and support/.
Licence: MIT. The paper's repository (yili-19/CHEER) is not public.
"""

import math
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
    clip: str = "ViT-L-14:openai"  # open_clip's MODEL:WEIGHTS (name or file), or mini
    clip_dim: int = 768  # d, width of CLIP's common space
    w_consistency: float = 0.75  # lambda_v, weight of L_C + L_D in Eq. 19; 0 leaves them out
    w_match: float = 0.5  # lambda_m, weight of L_I in Eq. 19; 0 leaves it out
    # Other forms; skip at first.
    cre: bool = True  # enhance what is common, Eq. 6-7
    dre: bool = True  # enhance what differs, Eq. 10-11
    retrieval: Literal["absolute", "signed"] = "absolute"  # [ours] |S_bef - S_aft|; signed: Eq. 1
    temperature: Literal["learned", "one"] = "learned"  # of Eq. 2 [ours]; one: as printed
    gate: Literal["channels", "scalar", "none"] = "channels"  # per word: D numbers, 1, none [ours]


# ---- retrieval -----------------------------------------------------------------------------------


def retrieve(x_bef: Tensor, x_aft: Tensor, table: Tensor, k: int, retrieval: str) -> Tensor:
    """Eq. 1: the candidates whose cosines with the two images differ most. x (B, d) of each image,
    table (M, d) -> its row numbers (B, k), best first, or (B, M) if M is less than k.
    A candidate passes if its cosine with at least one of the images is above the mean over all
    candidates. [ours] If fewer than k pass, the best of the others fill the list. Eq. 1 has the
    "signed" difference. But the text asks for the largest one, and an added object is closer to
    "after", so the default is "absolute" [ours]."""
    candidates = F.normalize(table, dim=-1)
    s_bef = F.normalize(x_bef, dim=-1) @ candidates.T  # (B, M)
    s_aft = F.normalize(x_aft, dim=-1) @ candidates.T
    score = s_bef - s_aft  # Eq. 1
    if retrieval == "absolute":
        score = score.abs()  # [ours]
    above_bef = s_bef > s_bef.mean(1, keepdim=True)
    above_aft = s_aft > s_aft.mean(1, keepdim=True)
    # A score is between -2 and 2, so - 4 moves the candidates that fail behind all that pass.
    score = torch.where(above_bef | above_aft, score, score - 4)
    return score.argsort(dim=1, descending=True, stable=True)[:, :k]  # Eq. 1 has k = 1


# ---- modules -------------------------------------------------------------------------------------


class ImageEmbedding(nn.Module):
    """F = conv_1x1(features) + position. (B, C, H, W) -> (B, N, D), cell n = row * W + column.
    [ours] The paper names neither the convolution nor positions. Both are as in SCORER."""

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
    """Eq. 2 and m of Eq. 3: how well each cell of a target, an image, matches some position of a
    source, an image or entities. source (B, T, D), target (B, N, D) -> m (B, N).
    Each position t of the source divides 1 among the target's cells: P(., t) = softmax over n of
    scale * cos(., t). m(n) = max_t P(n, t), because it is enough that a cell is like one position.

    By hand: the target's cells are (1, 0) and (0, 1), and scale is ln 3. For one entity (1, 0),
    the exponentials are 3 and 1, so m = 3/4, 1/4. With (0, 1) as a second one, m = 3/4, 3/4."""
    cells = F.normalize(upcast(target), dim=-1)
    sources = F.normalize(upcast(source), dim=-1)
    cosines = cells @ sources.transpose(1, 2)  # (B, N, T)
    # Over the target, as we read k of Eq. 2. Over the source, one entity has m = 1 at each n.
    probability = (cosines * scale).softmax(1)  # Eq. 2
    return probability.amax(2)  # Eq. 3, (B, N)


class ProbabilityMap(nn.Module):
    """P^, which says where a CRE or a DRE enhances its target (by Eq. 4, in HRD): Linear_{1->D}(m)
    in a CRE (Eq. 3), Linear_{1->D}(1 - m) in a DRE (Eq. 5). The paper's name is probability matrix,
    though nothing confines it to (0, 1). source (B, T, D), target (B, N, D) -> P^ (B, N, D).

    With bare cosines, m is about 1/N at all cells, as they divide 1. [ours] So a temperature is
    learned, as in CLIP. Even so, m is at first about .007 from entities (1/N is .005), and .98 from
    an image, where each cell finds one like it, as both have the same positions. So Eq. 4 enhances
    all cells nearly alike (docs/tour.md)."""

    def __init__(self, cfg: Config, kind: Literal["CRE", "DRE"]):
        super().__init__()
        self.kind = kind
        self.expand = nn.Linear(1, cfg.dim)
        if cfg.temperature == "learned":
            self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # CLIP's
        else:  # a scale of 1, Eq. 2 as printed
            self.register_buffer("log_scale", torch.zeros(()), persistent=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        # P^ varies so little over cells that rounding to bfloat16 would hide it.
        with torch.autocast(source.device.type, enabled=False):
            m = max_probability(source, target, self.log_scale.exp())  # Eq. 2, (B, N)
            if self.kind == "DRE":
                m = 1 - m  # Eq. 5; [ours] 1 is the "unit vector", a vector of ones
            m = m.to(self.expand.weight.dtype)  # float32, unless the model was cast
            return self.expand(m[..., None])  # Eq. 3, 5


def other_image(x: Tensor) -> Tensor:
    """F_i -> F_j. x (2B, N, D) has both images of B pairs, all "before" images first."""
    before, after = x.chunk(2)
    return torch.cat([after, before])


class Disentangled(NamedTuple):
    """What an HRD layer returns, tensors of (2B, N, D)."""

    output: Tensor  # F of the next layer or, from the last layer, D_i of Eq. 10
    shared: Tensor  # C~_i of Eq. 8, for L_I (Eq. 9)
    common_maps: tuple[Tensor, Tensor] | None  # P^ of C_i and of C'_i, for L_C (Eq. 7)
    different_maps: tuple[Tensor, Tensor] | None  # P^ of D_i and of D'_i, for L_D (Eq. 11)


class HRD(nn.Module):
    """Heterogeneous Representation Disentangling, one layer of Fig. 2. Two layers in a row, for an
    image i with its partner j. In both, `raw` is F_i of the embedding:

        layer 1                                     layer 2, the last
        f = raw                                +--> f = LN(f + shared) of layer 1
         v  CRE with f of j: map 1             |     v  CRE with f of j: map 1
        common                                 |    common
         v  attention to common of j, Eq. 8    |     v  attention to common of j, Eq. 8
        shared --------------------------------+    shared
         v                                           v
        rest = raw - shared, for L_D alone          rest = raw - shared
                                                     v  DRE with raw: map 3
                                                    difference, D_i

        map P^          target   source       of            compared by
        1  cre          f        f of j       C_i, Eq. 6    L_C, Eq. 7
        2  entity_dre   f        entities E   C'_i, Eq. 6   L_C
        3  dre          rest     raw          D_i, Eq. 10   L_D, Eq. 11
        4  entity_cre   rest     entities E   D'_i, Eq. 10  L_D

    Entities name what changed. L_C: a cell should match the other image where it does not match the
    entities. L_D: `rest` should match the entities where it does not match its own image. (That is
    the intent. Each map has a linear layer of its own, so flipped signs or constant maps make both
    losses small, too.) Of C'_i, as the paper says, and D'_i [ours] only the maps are used.

    [ours] The paper does not say what layer 2 reads: here LN(f + shared), because `shared` alone
    hardly varies over its cells at the start. Eq. 10 reads "the original raw features", so `raw`
    stays. Only the last layer's D_i is read (Eq. 12), so no other is computed."""

    def __init__(self, cfg: Config, last: bool):
        super().__init__()
        self.last = last
        # These make the map P^ alone, not all of a CRE or DRE. Eq. 4 stands in forward.
        self.cre = ProbabilityMap(cfg, "CRE")  # map 1
        self.norm_common = nn.LayerNorm(cfg.dim)
        self.entity_dre = ProbabilityMap(cfg, "DRE")  # map 2
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.dre = ProbabilityMap(cfg, "DRE")  # map 3
        if last:
            self.norm_difference = nn.LayerNorm(cfg.dim)
        self.entity_cre = ProbabilityMap(cfg, "CRE")  # map 4
        if not last:
            self.norm = nn.LayerNorm(cfg.dim)

    def forward(self, f: Tensor, raw: Tensor, e: Tensor) -> Disentangled:
        """f and raw (2B, N, D), which are F_i of Eq. 6 and of Eq. 10; entities E (2B, K, D)."""
        p_common = self.cre(other_image(f), f)  # Eq. 6, P^ of C_i = CRE(F_j, F_i)
        common = self.norm_common(p_common.sigmoid() * f + f)  # Eq. 4, C_i
        common_maps = (p_common, self.entity_dre(e, f))  # Eq. 6, P^ of C'_i = DRE(E, F_i)
        shared = self.attention(common, other_image(common))  # Eq. 8, C~_i = MHCA(C_i, C_j)
        rest = raw - shared  # F_i - C~_i
        p_different = self.dre(raw, rest)  # Eq. 10, P^ of D_i = DRE(F_i, F_i - C~_i)
        if self.last:
            output = self.norm_difference(p_different.sigmoid() * rest + rest)  # Eq. 4, D_i
        else:
            output = self.norm(f + shared)  # [ours] f of the next layer; no layer reads D_i
        different_maps = (p_different, self.entity_cre(e, rest))  # P^ of D'_i = CRE(E, F_i - C~_i)
        return Disentangled(output, shared, common_maps, different_maps)


class DecoderLayer(nn.Module):
    """Eq. 13-17: words attend to earlier words, then to entities (text) and to F_diff (visual), and
    become LN(alpha text + beta visual + words). As in the paper, no feed-forward layer follows, and
    nothing confines alpha and beta to (0, 1).

    The softmax of H^T is over the K entities alone. So every word must attend to some entity, even
    if it needs none, and only alpha can set the result aside.
    [ours] `words` has a residual and a LayerNorm. Alpha and beta have D numbers for each word."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)  # to F_diff
        self.norm1 = nn.LayerNorm(cfg.dim)
        self.norm2 = nn.LayerNorm(cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.text_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)  # to E
        width = 1 if cfg.gate == "scalar" else cfg.dim  # scalar: the text's "two parameters"
        self.alpha = nn.Linear(2 * cfg.dim, width)
        self.beta = nn.Linear(2 * cfg.dim, width)
        # [ours] Both gates start at 1 on average, not at 0. Decoder's initialise leaves biases.
        nn.init.ones_(self.alpha.bias)
        nn.init.ones_(self.beta.bias)

    def forward(self, x: Tensor, f_diff: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, L, D), F_diff (B, N, D), entities E (B, K, D) -> the new x and, for attention maps,
        the words as they attend to F_diff, both (B, L, D)."""
        words = self.norm1(x + self.dropout(self.self_attention(x, x, causal=True)))  # H'
        visual = self.cross_attention(words, f_diff)  # Eq. 13, H^V
        text = self.text_attention(words, e)  # Eq. 13, H^T
        alpha = self.alpha(torch.cat([words, text], -1))  # Eq. 14
        beta = self.beta(torch.cat([words, visual], -1))  # Eq. 15
        fused = alpha * text + beta * visual  # Eq. 16, H^F
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
        Layer = DecoderLayer
        if cfg.gate == "none":
            Layer = UngatedLayer  # ablation
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.decoder_layers))
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
    """Eq. 9, L_I: does `shared` of an image find its partner in the batch of B pairs? InfoNCE over
    rows and columns of s = sim / tau (B, B). `shared` of each image (B, N, D), scale = 1 / tau.
    s_ab = scale / 2 [mean_n max_n' cos(bef_an, aft_bn') + mean_n' max_n cos(bef_an, aft_bn')] for
    pairs a, b and cells n, n'.

    By hand: shared_bef = (2, 0), (0, 3), shared_aft = (1, 0), (0, 1), two pairs of one cell, scale
    ln 3. Then exp s has 3 on its diagonal and 1 elsewhere, and L_I = -ln(3/4) = 0.288.

    [ours] The paper does not define query and key. We take `shared`, because L_I is meant to help
    Eq. 8, and both directions. As in SCORER, which the paper cites here, sim averages best matches,
    and scale is learned; but cells have length 1."""
    with torch.autocast(shared_bef.device.type, enabled=False):
        # Lengths need float32. If `shared` is bfloat16, matching stays so, which is faster.
        bef = F.normalize(upcast(shared_bef), dim=-1).to(shared_bef.dtype)
        aft = F.normalize(upcast(shared_aft), dim=-1).to(shared_aft.dtype)
        s = scale * token_match(bef, aft)  # sim / tau of Eq. 9, (B, B)
        return (info_nce(s) + info_nce(s.T)) / 2  # Eq. 9


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 18, L_S: cross-entropy of each next word. logits (B, L, V) at words 0 ... L-1, caption
    (B, L) padded with NULL."""
    # [ours] The mean over all words of the batch. Next to the sum of Eq. 18, L_C, L_D and L_I would
    # weigh several times less.
    predicted = logits[:, :-1].flatten(0, 1)
    target = caption[:, 1:].flatten()
    return F.cross_entropy(predicted, target, ignore_index=NULL)  # Eq. 18


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Eq. 19: L = L_S + lambda_v (L_C + L_D) + lambda_m L_I. A loss that is left out counts 0.

    Nothing is detached. L_C and L_D train the maps P^ and what makes their inputs. L_I trains what
    makes `shared`, and CHEERS.log_scale. L_S trains all but CHEERS.log_scale and the maps that only
    L_C and L_D read: entity_dre, entity_cre and, before the last layer, dre."""
    l_s = losses["caption"]
    l_c = losses.get("common", 0)
    l_d = losses.get("different", 0)
    l_i = losses.get("match", 0)
    return l_s + cfg.w_consistency * (l_c + l_d) + cfg.w_match * l_i  # Eq. 19


# ---- method --------------------------------------------------------------------------------------


class CHEERS(nn.Module):
    """CHEERS with all its parameters. grid: (C, H, W) of the features; max_len: the length of the
    longest caption in tokens, START and END included."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg = cfg
        self.grid = grid
        self.max_len = max_len
        check_ablations(cfg)
        self.embed = ImageEmbedding(cfg, *grid)
        self.reads_entities = cfg.gate != "none" or cfg.w_consistency > 0
        if self.reads_entities:
            self.project = nn.Linear(cfg.clip_dim, cfg.dim)  # from width d to D [ours]
        Layer = HRD
        if not (cfg.cre and cfg.dre and cfg.w_consistency):
            Layer = PartialHRD  # ablation, or without L_C and L_D
        self.hrd = nn.ModuleList(Layer(cfg, last=(i == cfg.layers - 1)) for i in range(cfg.layers))
        if cfg.layers:
            self.join = nn.Linear(2 * cfg.dim, cfg.dim)
        self.decoder = Decoder(cfg, vocab_size, max_len)
        if cfg.w_match:
            self.log_scale = nn.Parameter(torch.ones(()))  # [ours] scale starts at e, as SCORER's

    def encode(self, before: Tensor, after: Tensor, entities: Tensor | None = None) -> tuple:
        """Features before, after (B, C, H, W), CLIP's embeddings of the entities (B, K, d) ->
        F_diff (B, N, D), E (B, K, D) or None if not read, and what each HRD layer returns."""
        # Two batches of different sizes would silently be mixed up.
        assert before.shape == after.shape, f"{before.shape} and {after.shape} are not pairs"
        e = None
        e_of_both = None
        if self.reads_entities:
            e = self.project(entities)
            e_of_both = torch.cat([e, e])  # (2B, K, D)
        raw = self.embed(torch.cat([before, after]))  # F_i (2B, N, D), all "before" images first
        if not self.hrd:  # ablation: our guess at the baseline of Table 4
            f_bef, f_aft = raw.chunk(2)
            return f_bef - f_aft, e, []
        f = raw
        layers = []
        for hrd in self.hrd:
            layer = hrd(f, raw, e_of_both)  # Eq. 4, 6, 8, 10
            f = layer.output  # the next layer's input or, in the end, D_i
            layers.append(layer)
        difference_bef, difference_aft = layers[-1].output.chunk(2)  # D_i
        f_diff = self.join(torch.cat([difference_bef, difference_aft], -1))  # Eq. 12
        return f_diff, e, layers

    def forward(
        self, before: Tensor, after: Tensor, caption: Tensor, entities: Tensor | None = None
    ) -> dict[str, Tensor]:
        """before, after (B, C, H, W), caption (B, L), entities (B, K, d) -> the terms of Eq. 19, by
        name. [ours] L_C, L_D and L_I are means over the layers, L_C and L_D also over both images.

        At the start, "caption" is about 5 (an even guess among 76 ids has ln 76 = 4.3),
        "match" about ln B, "common" 1.3, "different" 0.7. If "match" stays at ln B, `shared` does
        not tell partners from others. Constant maps make "common" and "different" low, too."""
        f_diff, e, layers = self.encode(before, after, entities)  # Eq. 2-6, 8, 10, 12
        hidden, _ = self.decoder(caption, f_diff, e)  # Eq. 13-17
        losses = {"caption": caption_loss(self.decoder.head(hidden), caption)}  # Eq. 18
        for layer in layers:
            terms = {}
            if layer.common_maps:  # None in some ablations
                terms["common"] = F.mse_loss(*layer.common_maps)  # Eq. 7, L_C
            if layer.different_maps:  # None in some ablations
                terms["different"] = F.mse_loss(*layer.different_maps)  # Eq. 11, L_D
            if self.cfg.w_match:
                shared_bef, shared_aft = layer.shared.chunk(2)
                scale = self.log_scale.exp()
                terms["match"] = contrastive_loss(shared_bef, shared_aft, scale)  # Eq. 9, L_I
            for name, loss in terms.items():
                losses[name] = losses.get(name, 0.0) + loss / len(layers)
        return losses

    @torch.no_grad()
    def clamp_scales(self) -> None:
        """Cap every learned scale, 1 / temperature, at 100, as in CLIP. Call it after each step."""
        for name, p in self.named_parameters():
            if name.endswith("log_scale"):  # of each ProbabilityMap, and of L_I
                p.clamp_(max=math.log(100))

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor, entities: Tensor | None = None) -> Tensor:
        """before, after (B, C, H, W), entities (B, K, d) -> ids of greedy captions (B, max_len)."""
        f_diff, e, _ = self.encode(before, after, entities)

        def next_word(ids: Tensor) -> Tensor:
            hidden, _ = self.decoder(ids, f_diff, e)
            return self.decoder.head(hidden[:, -1])

        return decode(next_word, before.shape[0], self.max_len, before.device)

    @torch.no_grad()
    def attention_map(
        self, before: Tensor, after: Tensor, ids: Tensor, entities: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Where the decoder looked: the last layer's attention over cells, averaged over heads and
        over the words of ids (B, L) -> "attention" (B, H, W)."""
        f_diff, e, _ = self.encode(before, after, entities)
        _, words = self.decoder(ids, f_diff, e)
        attention = self.decoder.layers[-1].cross_attention
        q, k, _ = attention.project(words, f_diff)
        weight = attention.scores(q, k).softmax(-1).mean(1)  # (B, L, N)
        # Row t of the weights is from the state that predicts word t + 1.
        over_cells = masked_mean(weight[:, :-1], is_word(ids[:, 1:]))  # (B, N)
        return {"attention": over_cells.unflatten(1, self.grid[1:])}


# ---- presets -------------------------------------------------------------------------------------

# Batch sizes (of scenes [ours]) and rates are from section 4.3. We keep lambda_v and lambda_m of
# CLEVR-Change (Table 5) [ours]. The text gives no steps and no layers (Fig. 6 plots some).
PRESETS = {
    "clevr_change": dict(lr=1e-3),  # the defaults: a batch of 128; [ours] 2 layers, 10000 steps
    "clevr_dc": dict(lr=1e-3, layers=1),  # [ours] layers
    "spot_the_diff": dict(batch_size=96, lr=5e-4),
    # [ours] Your own pairs are usually few: half the width, one layer, SCORER's schedule, and every
    # subject is a candidate. Validation chose lr.
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


def compute_losses(model: CHEERS, batches: tuple, cfg: Config, entities=None) -> dict[str, Tensor]:
    """Eq. 19 and its terms, each a mean over the batches of a step: changed pairs and, in some data
    sets, distractor pairs.

    In CLEVR-Change and mini, a scene has three pictures: before, after, and the distractor, which
    is "before" in another view. Its pairs are (before, after) and (before, distractor). In half
    of the scenes of an epoch, before and distractor are exchanged [ours, as in SCORER]. The two
    batches stay separate because they share their first images. In a joint contrastive loss, an
    "after" image would have a copy of its partner among its negatives."""
    losses: dict[str, Tensor] = {}
    for batch in batches:
        batch = batch.to(cfg.device)
        e = entities(batch.images) if entities else None  # CLIP's (B, K, d)
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.on_cuda):
            terms = model(batch.before, batch.after, batch.caption, e)
        for name, term in terms.items():
            losses[name] = losses.get(name, 0) + term / len(batches)
    losses["total"] = total_loss(losses, cfg)  # Eq. 19
    return losses


def train(cfg: Config, dataset, resume: bool = False, entities=None) -> tuple[CHEERS, dict]:
    """Train on a data set (data.Dataset) into cfg.out_dir -> the best model by validation, and its
    checkpoint. entities: those of its pairs (see entities_of), unless k is 0.
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
    state: dict | None = None,
    entities=None,
) -> dict[str, float]:
    """Caption a split of a data set (data.Dataset) -> the scores of all its pairs together.
    entities: the entities of its pairs, unless k is 0.

    Without out_dir, as in training, these are quick metrics. With it, all metrics of all groups are
    printed and written, with captions, pictures, and how the checkpoint `state` was trained."""
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
    return dataset.results(split, captions, maps, out_dir, notes, PUBLISHED, state)


def load(checkpoint: str | Path, device: str = "", extractor: str = "", clip: str = ""):
    """A trained model that captions any two pictures (files or PIL images):
    caption, maps = load("best.pt")(before, after). extractor: see load_captioner. clip: where CLIP
    is, if it has moved. Each call loads it; .pairs([(before, after), ...]) does so once for all."""
    from support.captioner import load_captioner

    captioner = load_captioner(CHEERS, Config, checkpoint, device, extractor, entities_of_files)
    if clip:
        captioner.model.cfg.clip = clip
    return captioner


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption pictures."""
    import data
    from support.captioner import caption_files
    from support.checks import note_on_negatives
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
        note_on_negatives(dataset, cfg, "w_match")  # L_I contrasts images with images
        entities = entities_of(dataset, cfg)
        model, state = train(cfg, dataset, args.resume, entities)
    if args.split != "none":
        evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir), state, entities)


# ---- entities of a data set ----------------------------------------------------------------------


def find_entities(cfg: Config, phrases: list[str], table: Tensor, images: dict, pairs: list[tuple]):
    """Section 3.1.2 -> Entities (support/entities.py has an example). phrases: M candidates; table:
    CLIP's embeddings of them (M, d); images: name of a picture -> its embedding (d,); pairs: names
    (before, after). CLIP embeds whole pictures, so it cannot find an object that only moved."""
    from support.entities import Entities, blocks_of

    table = table.to(cfg.device)
    rows = {}
    for block, x_bef, x_aft in blocks_of(pairs, images, cfg.device):
        best = retrieve(x_bef, x_aft, table, cfg.k, cfg.retrieval)
        rows |= zip(block, best.cpu(), strict=True)
    return Entities(phrases, table, rows, cfg.blind)


def entities_of(dataset, cfg: Config, state: dict | None = None):
    """The entities of all pairs of a data set (data.Dataset); None if K is 0. state: the content of
    a checkpoint, whose candidates then replace the data set's. InputError if there are none."""
    from support import entities

    if not cfg.k:
        return None
    if state:
        phrases = state["entities"]["phrases"]
        table = state["entities"]["table"]
    else:
        phrases = entities.find_candidates(entities.subjects_of(dataset), cfg.min_count, cfg.k)
        table = None  # load_embedder makes it
    table, embed = entities.load_embedder(cfg, phrases, table)
    images = entities.picture_embeddings(dataset, cfg.clip, embed)
    return find_entities(cfg, phrases, table, images, entities.pairs_of(dataset))


def entities_of_files(model: CHEERS, state: dict, files: list) -> Tensor | None:
    """CLIP's embeddings of the entities of pictures before, after, before, after, ... -> (B, K, d),
    or None if K is 0. Their names are printed. state: the content of the model's file."""
    from support.entities import load_embedder

    if not model.cfg.k:
        return None
    table, embed = load_embedder(model.cfg, **state["entities"])
    images = dict(enumerate(embed(files)))  # a picture's name is its place in the list
    pairs = [(n, n + 1) for n in range(0, len(files), 2)]
    entities = find_entities(model.cfg, state["entities"]["phrases"], table, images, pairs)
    for n, pair in enumerate(pairs, 1):
        print(f"pair {n}, {entities.note(pair)}")
    return entities(pairs)


# ---- other forms ---------------------------------------------------------------------------------


def check_ablations(cfg: Config) -> None:
    """InputError if a loss or the decoder needs what other flags leave out."""
    if cfg.w_match and not cfg.layers:
        raise InputError("--layers 0 has no common features for --w_match; set --w_match 0")
    if cfg.w_consistency and not (cfg.layers and (cfg.cre or cfg.dre)):
        raise InputError("--w_consistency needs the maps of CRE or DRE; set --w_consistency 0")
    if not cfg.k and (cfg.gate != "none" or cfg.w_consistency):
        raise InputError("--k 0 has no entities; set --gate none --w_consistency 0")


class PartialHRD(nn.Module):
    """HRD without CRE (C_i is F_i), without DRE (D_i is F_i - shared_i), or without L_C and L_D,
    which alone read the maps of entities. It has only what is read. Shapes are HRD's."""

    def __init__(self, cfg: Config, last: bool):
        super().__init__()
        self.last = last
        self.compare = cfg.w_consistency > 0  # L_C, L_D
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

    def forward(self, f: Tensor, raw: Tensor, e: Tensor | None) -> Disentangled:
        common = f
        common_maps = None
        if self.use_cre:
            p_common = self.cre(other_image(f), f)  # Eq. 6
            common = self.norm_common(p_common.sigmoid() * f + f)  # Eq. 4
            if self.compare:
                common_maps = (p_common, self.entity_dre(e, f))  # Eq. 6
        shared = self.attention(common, other_image(common))  # Eq. 8
        rest = raw - shared
        output = rest
        different_maps = None
        if self.use_dre:
            p_different = self.dre(raw, rest)  # Eq. 10
            if self.last:
                output = self.norm_difference(p_different.sigmoid() * rest + rest)  # Eq. 4
            if self.compare:
                different_maps = (p_different, self.entity_cre(e, rest))  # Eq. 10
        if not self.last:
            output = self.norm(f + shared)
        return Disentangled(output, shared, common_maps, different_maps)


class UngatedLayer(nn.Module):
    """A DecoderLayer whose words attend to F_diff alone, and not to entities: Eq. 13 and 17."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.norm1 = nn.LayerNorm(cfg.dim)
        self.norm2 = nn.LayerNorm(cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, f_diff: Tensor, e: Tensor | None) -> tuple[Tensor, Tensor]:
        words = self.norm1(x + self.dropout(self.self_attention(x, x, causal=True)))
        visual = self.cross_attention(words, f_diff)  # Eq. 13
        return self.norm2(words + self.dropout(visual)), words  # Eq. 17


if __name__ == "__main__":
    from support.files import run_main

    run_main(main)
