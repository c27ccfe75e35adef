"""CHEERS: Change Entity-guided Heterogeneous Representation Disentangling for Change Captioning
(Li et al., 2025).

Idea. (1) The subjects of all training captions are candidate entities; those whose CLIP similarity
to the two images of a pair differs most are probably what changed. (2) What the images share is
enhanced and matched by cross-attention; what remains is the difference. Images and entities must
agree on where the shared and the different parts are. (3) The decoder weighs entities against
visual differences word by word: the entities name the subject, the images show what happened to it.

Sec. 3.1   find_candidates   the subjects of training captions; Entities: those of each pair
Eq. 1      retrieve          top K of |S_bef - S_aft|, S_i the cosines of an image and candidates
Eq. 2-4    Enhancement       CRE: F' = LN(sigmoid(P^) F + F), P^ = Linear(m), m the largest
                             probability
Eq. 5      Enhancement       DRE (`difference`): the same with P^ = Linear(1 - m)
Eq. 6, 8   HRD               C_i = CRE(F_j, F_i),  C~_i = MHCA(C_i, C_j)
Eq. 7, 11  HRD               L_C, L_D  MSE of the maps P^ of images and of entities
Eq. 9      contrastive_loss  L_I  InfoNCE, "before" <-> "after"
Eq. 10     HRD               D_i = DRE(F_i, F_i - C~_i)
Eq. 12     CHEERS.encode     F_diff = Linear [D_bef ; D_aft]
Eq. 13-17  DecoderLayer      H = LN(alpha H_T + beta H_V + H')
Eq. 18     caption_loss      L_S
Eq. 19     total_loss        L = L_S + w_consistency (L_C + L_D) + w_match L_I

The abstract names a repository, github.com/yili-19/CHEER, which is not public: the paper is the
only source. Where it is silent or leaves two readings, our choice is marked [ours]. In every
attention, biases and the output projection are [ours].

Symbols: x and images are the paper's F in Eq. 6 and 10, entities its E, common C, shared C~, rest
F - C~, difference D, p P^; w_match is lambda_m, w_consistency is lambda_v.
Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, h heads, V words of a caption
(START, words, END, padding), K entities of a pair, M candidates, S cells or entities of a source,
d width of CLIP's common space.

Flags for each row of the paper's tables. Each row needs an --out_dir of its own.
Row of the paper              flags (on mini, unless --dataset is given)
Baseline (Table 4) [ours]     --layers 0 --k 0 --gate none --w_consistency 0 --w_match 0
CRE, DRE, HDR (here HRD)      --gate none [ours], and for CRE --no-dre, for DRE --no-cre
GATE [ours]                   --layers 0 --w_consistency 0 --w_match 0
lambda_m, lambda_v (Table 5)  --w_match 0.5, --w_consistency 0.75
ResNet-101 (Table 6)          no flag; for the table's ViTs --extractor timm/NAME, untested
entities (Fig. 5)             --k 3
layers (Fig. 6)               --layers 2

To copy: this file and common.py. Training on a data set of data.py needs that file too.
Licence: MIT. Written from the paper, whose authors have published no code.
"""

import hashlib
import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
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
    Run,
    RunConfig,
    decode,
    info_nce,
    initialise,
    is_word,
    learning_rate,
    load_model,
    load_tensors,
    masked_mean,
    parse_args,
    progress,
    run_main,
    save_tensors,
    token_match,
    upcast,
)

# ---- config --------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """CHEERS. The settings of a run (data, steps, device) are in common.RunConfig."""

    MAY_CHANGE = RunConfig.MAY_CHANGE | {"clip"}

    dim: int = 512  # width D of images, words and decoder
    word_dim: int = 300  # width of word embeddings
    heads: int = 8  # heads of every attention
    layers: int = 2  # HRD layers, Eq. 6-11; 0: the bare difference of the two images
    layer_input: Literal["residual", "attended"] = "residual"  # next layer reads LN(x + C~), or C~
    decoder_layers: int = 2  # decoder layers
    dropout: float = 0.1  # dropout probability
    k: int = 3  # K, entities of a pair; 0: none
    min_count: int = 2  # a candidate is the subject of at least this many training captions [ours]
    retrieval: Literal["absolute", "signed"] = "absolute"  # |S_bef - S_aft|, or Eq. 1 as printed
    clip: str = "ViT-L-14:openai"  # open_clip's MODEL:WEIGHTS (name or file), or mini
    clip_dim: int = 768  # d, width of CLIP's common space
    cre: bool = True  # enhance what is common, Eq. 6-7
    dre: bool = True  # enhance what differs, Eq. 10-11
    temperature: Literal["learned", "one"] = "learned"  # of Eq. 2's softmax; one: as printed
    gate: Literal["channels", "scalar", "none"] = "channels"  # alpha, beta: D numbers, 1, or none
    w_consistency: float = 0.75  # lambda_v, weight of L_C + L_D in Eq. 19; 0 leaves them out
    w_match: float = 0.5  # lambda_m, weight of L_I in Eq. 19; 0 leaves it out
    blind: bool = False  # zero the image features and the entities (language-only baseline)


# ---- modules -------------------------------------------------------------------------------------


class ImageEmbedding(nn.Module):
    """F = conv_1x1(features) + position. (B, C, H, W) -> (B, N, D), cell n = row * W + column.

    [ours] As in SCORER: a cell's position is the vector of its column followed by the vector of its
    row."""

    def __init__(self, cfg: Config, channels: int, height: int, width: int):
        super().__init__()
        self.grid = (channels, height, width)
        self.conv = nn.Conv2d(channels, cfg.dim, 1)
        self.position = GridPosition(cfg.dim, height, width)

    def forward(self, features: Tensor) -> Tensor:
        # Broadcasting would accept some other shapes in silence.
        assert features.shape[1:] == self.grid, f"{self.grid} expected, {features.shape} found"
        x = self.conv(features) + self.position()
        return x.flatten(2).transpose(1, 2)  # (B, D, H, W) -> (B, N, D)


def max_probability(source: Tensor, target: Tensor, scale: Tensor | float) -> Tensor:
    """Eq. 2 and the maximum of Eq. 3: m(i) = max_j P(i, j), over source positions j. For each j,
    P(., j) is the softmax of scale * cos(., j) over all target positions.
    source (B, S, D), target (B, N, D) -> m (B, N).

    [ours] The softmax is over target positions, as Eq. 2's denominator, which keeps j, suggests.
    Over source positions (there is no flag for that) a single entity would make m = 1 everywhere.
    """
    x = F.normalize(upcast(target), dim=-1)
    y = F.normalize(upcast(source), dim=-1)
    cosines = x @ y.transpose(1, 2)  # (B, N, S), Sim(i, j)
    p = (cosines * scale).softmax(1)  # Eq. 2
    return p.amax(2)  # Eq. 3, (B, N)


class StrengthMap(nn.Module):
    """P^ = Linear_{1->D}(m) of Eq. 3 or, with `difference`, P^ = Linear_{1->D}(1 - m) of Eq. 5.

    [ours] Each map learns a temperature, as in CLIP: with bare cosines, m would be nearly the same
    everywhere."""

    def __init__(self, cfg: Config, difference: bool = False):
        super().__init__()
        self.difference = difference
        self.expand = nn.Linear(1, cfg.dim)
        self.log_scale = None
        if cfg.temperature == "learned":
            self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source (B, S, D), target (B, N, D) -> P^ (B, N, D)."""
        scale = 1.0 if self.log_scale is None else self.log_scale.exp()
        # Rounding to bfloat16 would hide how P^ varies over cells.
        with torch.autocast(source.device.type, enabled=False):
            m = max_probability(source, target, scale)
            if self.difference:
                m = 1 - m
            return self.expand(m[..., None])  # Eq. 3 or 5


class Enhancement(StrengthMap):
    """Eq. 2-5: Commonality Representation Enhancement (CRE) or, with `difference`, Difference
    Representation Enhancement (DRE)."""

    def __init__(self, cfg: Config, difference: bool = False):
        super().__init__(cfg, difference)
        self.norm = nn.LayerNorm(cfg.dim)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """source (B, S, D), target F (B, N, D) -> F' and P^, both (B, N, D)."""
        p = super().forward(source, target)
        return self.norm(p.sigmoid() * target + target), p  # Eq. 4


def other_image(x: Tensor) -> Tensor:
    """The other image of each pair: (2B, ...), "before" first -> (2B, ...), "after" first."""
    return x.roll(x.shape[0] // 2, 0)


class HRD(nn.Module):
    """Eq. 6-8, 10-11, Heterogeneous Representation Disentangling: one layer of Fig. 2, with two CRE
    and two DRE, for both directions. Of the two that read the entities, only the maps P^ are used.

    [ours] L_C and L_D are means over both images. Eq. 10 reads the images in every layer, "the
    original raw features". Only the last layer's D is read, by Eq. 12; in earlier layers, DRE gives
    its map, for L_D. The paper does not say what the next layer's x is: here LN(x + C~), by `norm`,
    or C~ alone (--layer_input attended), which at first hardly varies over cells in layer two."""

    def __init__(self, cfg: Config, last: bool):
        super().__init__()
        self.last = last
        maps = cfg.w_consistency > 0  # the entities' maps P^
        self.cre = Enhancement(cfg) if cfg.cre else None
        self.entity_dre = StrengthMap(cfg, difference=True) if cfg.cre and maps else None
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.norm = None
        if cfg.layer_input == "residual" and not last:
            self.norm = nn.LayerNorm(cfg.dim)
        self.dre = None
        if cfg.dre and last:
            self.dre = Enhancement(cfg, difference=True)
        elif cfg.dre and maps:
            self.dre = StrengthMap(cfg, difference=True)
        self.entity_cre = StrengthMap(cfg) if cfg.dre and maps else None

    def forward(self, x: Tensor, images: Tensor, entities: Tensor | None):
        """x: F of Eq. 6, images: F of Eq. 10, both (2B, N, D), "before" first; entities (2B, K, D)
        -> C~ and D (2B, N, D), L_C and L_D."""
        l_c = x.new_zeros(())
        l_d = x.new_zeros(())
        common = x
        if self.cre:
            common, p_c = self.cre(other_image(x), x)  # Eq. 6, C_i = CRE(F_j, F_i)
            if self.entity_dre:
                p_entity = self.entity_dre(entities, x)  # Eq. 6, C'_i = DRE(E, F_i)
                l_c = F.mse_loss(p_c, p_entity)  # Eq. 7
        shared = self.attention(common, other_image(common))  # Eq. 8, C~_i = MHCA(C_i, C_j)
        difference = images - shared
        if self.dre:
            rest = difference
            if self.last:
                difference, p_d = self.dre(images, rest)  # Eq. 10, D_i = DRE(F_i, F_i - C~_i)
            else:
                p_d = self.dre(images, rest)  # its map alone
            if self.entity_cre:
                p_entity = self.entity_cre(entities, rest)  # Eq. 10, D'_i = CRE(E, F_i - C~_i)
                l_d = F.mse_loss(p_d, p_entity)  # Eq. 11
        return shared, difference, l_c, l_d


class DecoderLayer(nn.Module):
    """Eq. 13-17: words attend to earlier words (H'), then to entities (H_T) and to differences
    (H_V), H = LN(alpha H_T + beta H_V + H'). As in the paper, no feed-forward layer follows.
    [ours] H' has a residual and a LayerNorm; alpha and beta have D numbers each, for every word,
    where the text speaks of "two parameters" (--gate scalar). --gate none: the decoder reads no
    entities, H = LN(H_V + H')."""

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
            width = 1 if cfg.gate == "scalar" else cfg.dim
            self.alpha = nn.Linear(2 * cfg.dim, width)
            self.beta = nn.Linear(2 * cfg.dim, width)
            nn.init.ones_(self.alpha.bias)  # [ours] both gates start near 1, not near 0
            nn.init.ones_(self.beta.bias)

    def forward(self, x: Tensor, differences: tuple, entities: tuple | None, past=None):
        """Words x (B, V, D), key and value of the differences (B, N, D) and, unless --gate none, of
        the entities (B, K, D) -> words H (B, V, D), `past` (see attend_to_words), and the query
        (B, V, D) of the differences."""
        attended, past = self.attend_to_words(x, past)
        hidden = self.norm1(x + self.dropout(attended))  # H'
        query = self.cross_attention.query(hidden)
        h_v = self.cross_attention.attend(query, *differences)  # Eq. 13
        if self.text_attention:
            text_query = self.text_attention.query(hidden)
            h_t = self.text_attention.attend(text_query, *entities)  # Eq. 13
            alpha = self.alpha(torch.cat([hidden, h_t], -1))  # Eq. 14
            beta = self.beta(torch.cat([hidden, h_v], -1))  # Eq. 15
            h_f = alpha * h_t + beta * h_v  # Eq. 16
        else:
            h_f = h_v
        return self.norm2(hidden + self.dropout(h_f)), past, query  # Eq. 17

    def attend_to_words(self, x: Tensor, past: tuple[Tensor, Tensor] | None):
        """-> attended words (B, V, D), and keys and values of all words so far: the next `past`.

        Without `past`, x holds all words from START on. With `past`, x is the single word after
        those of `past`; a Cache decodes this way."""
        q, k, v = self.self_attention.project(x, x)
        if past is None:
            return self.self_attention.attend(q, k, v, causal=True), (k, v)
        past_k, past_v = past
        k = torch.cat([past_k, k], 1)
        v = torch.cat([past_v, v], 1)
        return self.self_attention.attend(q, k, v), (k, v)


class Decoder(nn.Module):
    """Words, differences and entities -> hidden states; `head` gives the distribution of the next
    word. `context`: F_diff (B, N, D), and the entities (B, K, D) or None.

    Every word sees itself and earlier words only, so padding at the end of a caption needs no mask.
    [ours] Positions are learned and followed by a LayerNorm, as in RDD+ACR; matrices are
    initialised Xavier-uniform, as in DIRL+CCR."""

    def __init__(self, cfg: Config, vocab_size: int, max_len: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, cfg.word_dim)
        self.project = nn.Linear(cfg.word_dim, cfg.dim)
        self.position = nn.Embedding(max_len, cfg.dim)
        self.norm = nn.LayerNorm(cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.head = nn.Linear(cfg.dim, vocab_size)
        initialise(self, xavier=True)

    def forward(self, ids: Tensor, context: tuple[Tensor, Tensor | None]):
        """All words at once: (B, V) -> hidden states (B, V, D), and the last layer's query
        (B, V, D) and key (B, N, D) of the differences."""
        x = self.embed_words(ids)
        for layer, (differences, entities) in zip(self.layers, self.memory(context), strict=True):
            x, _, query = layer(x, differences, entities)  # Eq. 13-17
        key, _ = differences
        return x, query, key

    def embed_words(self, ids: Tensor, start: int = 0) -> Tensor:
        """(B, V) ids at positions start, start + 1, ... -> (B, V, D)."""
        end = start + ids.shape[1]
        assert end <= self.position.num_embeddings, "a caption is longer than max_len"
        position = self.position.weight[start:end]
        return self.dropout(self.norm(self.project(self.embed(ids)) + position))

    def memory(self, context: tuple[Tensor, Tensor | None]) -> list[tuple]:
        """For each layer, key and value of the differences, and of the entities if it reads them:
        computed once per caption."""
        f_diff, e = context
        memory = []
        for layer in self.layers:
            attention = layer.cross_attention
            differences = (attention.key(f_diff), attention.value(f_diff))
            entities = None
            if layer.text_attention:
                entities = (layer.text_attention.key(e), layer.text_attention.value(e))
            memory.append((differences, entities))
        return memory


class Cache:
    """Writes captions word by word, see common.decode. `memory` and `past` hold the keys and values
    of differences and entities and of the words so far, for each layer."""

    def __init__(self, decoder: Decoder, context: tuple[Tensor, Tensor | None]):
        self.decoder = decoder
        self.memory = decoder.memory(context)
        self.past = [None] * len(decoder.layers)

    def step(self, ids: Tensor, t: int) -> Tensor:
        """ids (B,) at position t -> logits of the next word (B, vocabulary)."""
        x = self.decoder.embed_words(ids[:, None], t)  # (B, 1, D)
        for i, layer in enumerate(self.decoder.layers):
            differences, entities = self.memory[i]
            x, self.past[i], _ = layer(x, differences, entities, self.past[i])
        return self.decoder.head(x[:, 0])

    def reorder(self, rows: Tensor) -> None:
        """After a step: caption i goes on from what caption rows[i] has so far. rows: any number
        of row numbers of the batch."""
        memory = []
        for (key, value), entities in self.memory:
            if entities:
                entities = (entities[0][rows], entities[1][rows])
            memory.append(((key[rows], value[rows]), entities))
        self.memory = memory
        self.past = [(key[rows], value[rows]) for key, value in self.past]


# ---- losses --------------------------------------------------------------------------------------


def contrastive_loss(c_bef: Tensor, c_aft: Tensor, scale: Tensor) -> Tensor:
    """Eq. 9, L_I: InfoNCE of the two images' C~ (B, N, D) against the other pairs of the batch,
    both ways.

    [ours] The paper does not define q and k: we take C~, because the loss is meant to help Eq. 8.
    Eq. 9 has one direction, we use both. As in SCORER, sim is the mean over tokens of the best
    match, and scale = 1 / tau is learned; unlike in SCORER, tokens are scaled to length 1.

    Lengths and sums are in float32 even under autocast. The tokens themselves stay in the type they
    come in: rounding them to bfloat16 moves a cosine by up to 5e-4 and the mean over tokens by
    2e-5, and halves what the matching reads."""
    with torch.autocast(c_bef.device.type, enabled=False):
        q = F.normalize(upcast(c_bef), dim=-1).to(c_bef.dtype)
        k = F.normalize(upcast(c_aft), dim=-1).to(c_aft.dtype)
        s = scale * token_match(q, k)  # (B, B)
        return (info_nce(s) + info_nce(s.T)) / 2  # Eq. 9


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 18, L_S: cross-entropy of each next word. [ours] Averaged over all real words of the
    batch; with the sum of Eq. 18, L_C, L_D and L_I would weigh several times less.
    logits (B, V, vocabulary) at words 0 ... V-1, caption (B, V) padded with NULL."""
    scores = logits[:, :-1].flatten(0, 1)
    target = caption[:, 1:].flatten()
    return F.cross_entropy(scores, target, ignore_index=NULL)  # Eq. 18


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Eq. 19: L = L_S + lambda_v (L_C + L_D) + lambda_m L_I."""
    l_v = losses["common"] + losses["different"]
    l_m = losses["match"]
    return losses["caption"] + cfg.w_consistency * l_v + cfg.w_match * l_m  # Eq. 19


# ---- method --------------------------------------------------------------------------------------


class CHEERS(nn.Module):
    """CHEERS with all its parameters. grid: (C, H, W) of the features; max_len: longest caption in
    tokens, START and END included. [ours] A linear layer maps CLIP's embeddings of entities to
    width D."""

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
        self.project = nn.Linear(cfg.clip_dim, cfg.dim) if reads_entities else None
        self.hrd = nn.ModuleList(HRD(cfg, last=i == cfg.layers - 1) for i in range(cfg.layers))
        self.join = nn.Linear(2 * cfg.dim, cfg.dim) if cfg.layers else None
        self.decoder = Decoder(cfg, vocab_size, max_len)
        if cfg.w_match:
            self.log_scale = nn.Parameter(torch.ones(()))

    def embed_entities(self, entities: Tensor | None) -> Tensor | None:
        """CLIP's embeddings (B, K, d) -> (B, K, D); None if nothing reads them."""
        if self.project is None:
            return None
        assert entities is not None, "gate and consistency need entities, (B, K, d)"
        if self.cfg.blind:
            entities = torch.zeros_like(entities)
        return self.project(entities)

    def encode(self, before: Tensor, after: Tensor, entities: Tensor | None = None):
        """Features (B, C, H, W) twice and entities (B, K, d) -> what the decoder reads, F_diff
        (B, N, D) and the entities (B, K, D) or None; and for each layer C~ (2B, N, D), L_C, L_D."""
        e = self.embed_entities(entities)
        features = torch.cat([before, after])
        if self.cfg.blind:
            features = torch.zeros_like(features)
        images = self.embed(features)  # (2B, N, D), "before" first
        layers = []
        if not self.join:
            f_bef, f_aft = images.unflatten(0, (2, -1))
            return (f_bef - f_aft, e), layers
        e_of_both = None if e is None else torch.cat([e, e])
        x = images
        for layer in self.hrd:
            shared, difference, l_c, l_d = layer(x, images, e_of_both)  # Eq. 6-8, 10-11
            layers.append((shared, l_c, l_d))
            x = layer.norm(x + shared) if layer.norm else shared
        d_bef, d_aft = difference.unflatten(0, (2, -1))
        f_diff = self.join(torch.cat([d_bef, d_aft], -1))  # Eq. 12
        return (f_diff, e), layers

    def forward(
        self, before: Tensor, after: Tensor, caption: Tensor, entities: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The terms of Eq. 19 for one batch of pairs: features (B, C, H, W) twice, caption (B, V),
        CLIP's embeddings of the entities (B, K, d). A term that the config leaves out is 0. [ours]
        L_C, L_D and L_I are means over the layers."""
        context, layers = self.encode(before, after, entities)  # Eq. 2-8, 10-12
        hidden, _, _ = self.decoder(caption, context)  # Eq. 13-17
        l_s = caption_loss(self.decoder.head(hidden), caption)  # Eq. 18
        l_c = l_s.new_zeros(())
        l_d = l_s.new_zeros(())
        l_i = l_s.new_zeros(())
        for shared, layer_c, layer_d in layers:
            l_c = l_c + layer_c / len(layers)  # Eq. 7
            l_d = l_d + layer_d / len(layers)  # Eq. 11
            if self.cfg.w_match:
                c_bef, c_aft = shared.unflatten(0, (2, -1))
                layer_i = contrastive_loss(c_bef, c_aft, self.log_scale.exp())  # Eq. 9
                l_i = l_i + layer_i / len(layers)
        return {"caption": l_s, "common": l_c, "different": l_d, "match": l_i}

    @torch.no_grad()
    def clamp_scales(self) -> None:
        """After each step: cap the learned scales, 1 / temperature, at 100, as in CLIP."""
        for name, p in self.named_parameters():
            if name.endswith("log_scale"):
                p.clamp_(max=math.log(100))

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor, entities: Tensor | None = None) -> Tensor:
        """Captions of pairs of features (B, C, H, W) and entities (B, K, d): greedy ids
        (B, max_len)."""
        context, _ = self.encode(before, after, entities)
        cache = Cache(self.decoder, context)
        return decode(cache.step, before.shape[0], self.max_len, before.device)

    @torch.no_grad()
    def attention_map(
        self, before: Tensor, after: Tensor, ids: Tensor, entities: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The last decoder layer's attention over cells, averaged over heads and over the words of
        ids (B, V) -> "attention" (B, H, W)."""
        context, _ = self.encode(before, after, entities)
        _, query, key = self.decoder(ids, context)
        scores = self.decoder.layers[-1].cross_attention.scores(query, key)  # (B, h, V, N)
        weight = scores.softmax(-1).mean(1)  # (B, V, N)
        # Row t is the state that predicts word t + 1.
        attention = masked_mean(weight[:, :-1], is_word(ids[:, 1:]))  # (B, N)
        return {"attention": attention.unflatten(1, self.grid[1:])}


# ---- entities ------------------------------------------------------------------------------------


def retrieve(x_bef: Tensor, x_aft: Tensor, table: Tensor, k: int, signed: bool = False) -> Tensor:
    """Eq. 1: the candidates whose cosines with the two images differ most. x (B, d) twice, table
    (M, d) -> rows (B, k), best first; fewer if there are fewer than k candidates.

    A candidate passes if its cosine with at least one of the images is above the mean over all
    candidates. [ours] If fewer than k candidates pass, the best remaining ones fill the list. In a
    tie the lower row comes first. The difference is absolute unless `signed`: the text asks for the
    largest difference, and an added object is closer to "after"."""
    e = F.normalize(table, dim=-1)
    s_bef = F.normalize(x_bef, dim=-1) @ e.T  # (B, M)
    s_aft = F.normalize(x_aft, dim=-1) @ e.T
    score = s_bef - s_aft
    if not signed:
        score = score.abs()
    above_bef = s_bef > s_bef.mean(1, keepdim=True)
    above_aft = s_aft > s_aft.mean(1, keepdim=True)
    # Cosines differ by at most 2, so - 4 moves the candidates that fail behind all that pass.
    score = torch.where(above_bef | above_aft, score, score - 4)
    return score.argsort(dim=1, descending=True, stable=True)[:, :k]  # Eq. 1


@torch.no_grad()
def embed_texts(clip, tokenizer, texts: list[str]) -> Tensor:
    """CLIP's embeddings of texts (n, d), each of length 1. Like clip.encode_text, but the padding
    after the longest text is cut off, which is six times as fast on a CPU."""
    tokens = tokenizer(texts).to(clip.positional_embedding.device)  # (n, context)
    longest = 1 + int(tokens.argmax(1).max())  # the end token has the highest id
    position = clip.positional_embedding[:longest]
    mask = clip.attn_mask[:longest, :longest]
    blocks = []
    for ids in tokens[:, :longest].split(256):
        x = clip.token_embedding(ids) + position  # (256, longest, width)
        x = clip.ln_final(clip.transformer(x, attn_mask=mask))
        x = x[torch.arange(ids.shape[0], device=ids.device), ids.argmax(1)]  # (256, width)
        blocks.append(F.normalize(x @ clip.text_projection, dim=-1).cpu())
    return torch.cat(blocks)


@torch.no_grad()
def embed_images(clip, preprocess, pictures: list) -> Tensor:
    """CLIP's embeddings of pictures (n, d), each of length 1. preprocess: one of them -> CLIP's
    input (3, height, width)."""
    device = clip.positional_embedding.device
    starts = range(0, len(pictures), 64)
    bar = {"desc": "CLIP", "unit": "image", "unit_scale": 64, "disable": len(pictures) <= 64}
    blocks = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in progress(starts, **bar):
            x = torch.stack(list(pool.map(preprocess, pictures[start : start + 64])))
            blocks.append(clip.encode_image(x.to(device), normalize=True).cpu())
    return torch.cat(blocks)


def find_candidates(subjects: dict[str, list[str]], min_count: int, k: int) -> list[str]:
    """Section 3.1.1: the subjects of each caption -> the candidates, sorted. [ours] Subjects of
    fewer than min_count captions are left out, because most of them are errors of the parser; if
    fewer than k candidates would remain, all are kept."""
    counts: dict[str, int] = {}
    for phrases in subjects.values():
        for phrase in set(phrases):
            counts[phrase] = counts.get(phrase, 0) + 1
    frequent = [phrase for phrase in counts if counts[phrase] >= min_count]
    if len(frequent) < k:
        return sorted(counts)
    return sorted(frequent)


class Entities:
    """Section 3.1, done once for a data set: the K entities of each pair. CLIP embeds a whole
    image, so it can find an object that appeared, vanished or looks different, but not one that
    only moved.

    phrases: M candidates, and table (M, d), their embeddings; images: name -> embedding (d,);
    pairs: names (before, after). In a loop of your own, with an open_clip.CLIP, its tokenizer and
    its preprocessing (which must not crop, or changes at the border are lost):

        phrases = find_candidates({"the red cube is gone": ["red cube"]}, cfg.min_count, cfg.k)
        table = embed_texts(clip, tokenizer, phrases)
        x = embed_images(clip, preprocess, [picture_a, picture_b])  # PIL images
        images = {"a": x[0], "b": x[1]}
        entities = Entities(cfg, phrases, table, images, [("a", "b")])
        model = CHEERS(cfg, vocab_size, grid, max_len)
        losses = model(before, after, ids, entities([("a", "b")]))"""

    def __init__(
        self,
        cfg: Config,
        phrases: list[str],
        table: Tensor,
        images: dict[str, Tensor],
        pairs: list[tuple[str, str]],
    ):
        self.phrases = phrases
        self.table = table.to(cfg.device)
        self.rows = {}  # names of a pair -> its rows of the table (K,)
        pairs = list(dict.fromkeys(pairs))
        for start in range(0, len(pairs), 256):
            block = pairs[start : start + 256]
            x_bef = torch.stack([images[before] for before, _ in block]).to(cfg.device)
            x_aft = torch.stack([images[after] for _, after in block]).to(cfg.device)
            best = retrieve(x_bef, x_aft, self.table, cfg.k, cfg.retrieval == "signed")
            self.rows |= zip(block, best.cpu(), strict=True)

    def __call__(self, pairs: list[tuple[str, str]]) -> Tensor:
        """Names (before, after) of B pairs -> CLIP's embeddings of their entities (B, K, d)."""
        rows = torch.stack([self.rows[pair] for pair in pairs])
        return self.table[rows.to(self.table.device, non_blocking=True)]

    def note(self, pair: tuple[str, str]) -> str:
        """The line to print below a pair's pictures."""
        return "entities: " + ", ".join(self.phrases[m] for m in self.rows[pair])

    def state(self) -> dict:
        """What a checkpoint needs, besides the model, to find the entities of any two pictures."""
        return {"entities": {"phrases": self.phrases, "table": self.table}}

    def check_state(self, state: dict) -> None:
        """InputError if a checkpoint was trained with other candidates or another CLIP."""
        trained = state["entities"]
        if trained["phrases"] != self.phrases:
            raise InputError(
                f"the checkpoint was trained with {len(trained['phrases'])} candidate entities, "
                f"not with these {len(self.phrases)}; give its --data_dir"
            )
        check_table(self.table, trained["table"])


def check_table(table: Tensor, trained: Tensor) -> None:
    """InputError if a CLIP's embeddings of candidates (M, d) are not those of a checkpoint."""
    trained = trained.to(table.device)
    if table.shape != trained.shape or not table.allclose(trained, atol=1e-3):
        raise InputError(
            "the checkpoint's entities were embedded by another CLIP; give --clip as in training"
        )


def candidates_of(dataset, cfg: Config) -> list[str]:
    """The candidates of a data set (data.Dataset). InputError if no training caption has a subject.

    [ours] Captions from templates (mini, CLEVR-Change, CLEVR-DC) are read by rules, because spaCy
    often errs on them. The paper: "we utilize SpaCy [...] to extract the subjects" (section 3.1.1).
    """
    import data

    captions = set()
    for scene in dataset.scenes["train"]:
        for pair in (*scene.pairs, *(scene.swapped or ())):
            captions.update(pair.captions)
    subjects = data.read_captions(data.subjects, dataset.name, sorted(captions))
    phrases = find_candidates(subjects, cfg.min_count, cfg.k)
    if not phrases:
        remedy = "set --k 0 --gate none --w_consistency 0"
        raise InputError(f"no training caption has a subject; {remedy}")
    return phrases


def entities_of(dataset, cfg: Config, trained: dict | None = None) -> Entities | None:
    """The entities of a data set (data.Dataset); None if K is 0. trained: the content of a
    checkpoint, whose candidates then replace the data set's. InputError if --clip does not fit."""
    import data

    if not cfg.k:
        return None
    phrases = trained["entities"]["phrases"] if trained else candidates_of(dataset, cfg)
    clip, tokenizer, preprocess = data.load_clip(cfg.clip, cfg.device)
    table = embed_texts(clip, tokenizer, phrases)
    if trained:
        check_table(table, trained["entities"]["table"])
    if table.shape[1] != cfg.clip_dim:
        raise InputError(f"--clip {cfg.clip} needs --clip_dim {table.shape[1]}")
    pairs = []
    for scenes in dataset.scenes.values():
        for scene in scenes:
            for pair in (*scene.pairs, *(scene.swapped or ())):
                pairs.append((pair.before, pair.after))

    def open_picture(name: str) -> Tensor:
        return preprocess(data.read_image(dataset.paths[name]))

    names = sorted(set(itertools.chain(*pairs)))
    digest = hashlib.sha256("\n".join([cfg.clip, *names]).encode()).hexdigest()[:12]
    file = dataset.root / f"clip-{digest}.pt"
    # If pictures were replaced, the features are newer.
    if not file.exists() or file.stat().st_mtime < dataset.features.path.stat().st_mtime:
        save_tensors(file, {"images": embed_images(clip, open_picture, names)})
    images = load_tensors(file, "remove it, and it will be made again")["images"]
    return Entities(cfg, phrases, table, dict(zip(names, images, strict=True)), pairs)


def entities_of_files(model: CHEERS, state: dict, files: list) -> Tensor | None:
    """Section 3.1.2 for pictures in the order before, after, before, after, ... -> CLIP's
    embeddings of their entities (pairs, K, d), or None if K is 0. Also prints the entities.
    InputError if the checkpoint was trained with another CLIP."""
    import data

    cfg = model.cfg
    if not cfg.k:
        return None
    phrases = state["entities"]["phrases"]
    table = state["entities"]["table"].to(cfg.device)
    clip, tokenizer, preprocess = data.load_clip(cfg.clip, cfg.device)
    check_table(embed_texts(clip, tokenizer, phrases[:1]), table[:1])

    def open_picture(file) -> Tensor:
        return preprocess(data.read_image(file))

    x = embed_images(clip, open_picture, files).to(cfg.device)
    rows = retrieve(x[::2], x[1::2], table, cfg.k, cfg.retrieval == "signed")
    for row in rows:
        print("entities: " + ", ".join(phrases[m] for m in row))
    return table[rows]


# ---- presets -------------------------------------------------------------------------------------

# Batch sizes and learning rates are from section 4.3. [ours] 10,000 steps, SCORER's decoder size,
# and a batch of 128 scenes, which are 256 pairs on CLEVR-Change. [ours] The number of layers:
# Fig. 6 shows the best one for each data set, but our copy of it has no numbers. For your own
# pairs (usually few): half of Spot-the-Diff's width, one layer, and early stopping on validation
# [ours].
PRESETS = {
    "clevr_change": dict(lr=1e-3),
    "clevr_dc": dict(lr=1e-3, layers=1),
    "spot_the_diff": dict(lr=5e-4, batch_size=96),
    "pairs": dict(layers=1, dim=256, batch_size=16, lr=5e-4, warmup=50, steps=2000, eval_every=100,
                  patience=10),
    "mini": dict(dim=128, word_dim=128, heads=2, layers=1, dropout=0.0, clip="mini", clip_dim=128,
                 w_consistency=0.1, w_match=0.05, batch_size=16, lr=2e-3, schedule="cosine",
                 warmup=50, grad_clip=1.0, steps=1700, eval_every=300, eval_batch=250),
}  # fmt: skip

# ---- training ------------------------------------------------------------------------------------


def compute_losses(
    model: CHEERS, batches: tuple, cfg: Config, entities: Entities | None = None
) -> dict[str, Tensor]:
    """Eq. 19 and its terms, each a mean over a step's batches (changed pairs, distractor pairs).

    Keep the two batches separate: they share their before images, so in a joint contrastive
    loss, the partner of an "after" would be among its negatives."""
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
    entities: those of its pairs, unless k is 0.

    Ctrl-C and SIGTERM save last.pt and exit 130 or 143; `resume` continues from there as if
    training had never stopped. FloatingPointError if a loss is not finite."""
    torch.manual_seed(cfg.seed)
    sources = [dataset, entities] if entities else [dataset]
    model = CHEERS(cfg, len(dataset.vocab), dataset.grid, dataset.max_len).to(cfg.device)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=cfg.lr, fused=True)
    if cfg.compile and cfg.on_cuda:
        model.compile(fullgraph=True, dynamic=False)
    run = Run(cfg, model, sources, resume)
    for batches in run.steps(dataset, cfg.batch_size, optimizer, cfg.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(cfg, run.step)
        losses = compute_losses(model, batches, cfg, entities)
        optimizer.zero_grad()
        losses["total"].backward()
        if cfg.grad_clip:
            nn.utils.clip_grad_norm_(parameters, cfg.grad_clip)
        optimizer.step()
        model.clamp_scales()
        run.record(losses)  # also counts the step
        if run.due():
            run.checkpoint(evaluate(model, dataset, entities, "val", cfg))
    return run.best_model()


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(
    model: CHEERS,
    dataset,
    entities: Entities | None,
    split: str,
    cfg: Config,
    out_dir: Path | None = None,
    suffix: str = "",
) -> dict[str, float]:
    """Caption a split of a data set (data.Dataset) -> the scores of all its pairs together.

    Without out_dir (validation during training): the quick metrics only. With it: every metric for
    every group of pairs, printed and written, along with captions and sample pictures."""
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
    model.train()
    return dataset.results(split, captions, maps, out_dir, notes, suffix=suffix)


def load(checkpoint: str | Path, device: str = "", clip: str = ""):
    """A trained model that captions any two pictures (files or PIL images):
    caption, maps = load("best.pt")(before, after). clip: its CLIP, if that has moved since
    training."""
    import data

    captioner = data.load_captioner(CHEERS, Config, checkpoint, device, entities_of_files)
    if clip:
        captioner.model.cfg.clip = clip
    return captioner


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption pictures."""
    import data

    cfg, args = parse_args(
        Config, PRESETS, Path(__file__).stem, __doc__, argv, datasets=data.DATASETS
    )
    if args.caption:
        data.caption_files(load(args.checkpoint, cfg.device, cfg.clip), args.caption, args.out)
        return
    dataset = data.open_dataset(cfg, make=args.eval is None)
    if args.eval is not None:
        model, state = load_model(CHEERS, cfg, args.eval)
        dataset.adopt(state)
        entities = entities_of(dataset, cfg, state)
    else:
        entities = entities_of(dataset, cfg)
        model = train(cfg, dataset, entities, args.resume)
    evaluate(model, dataset, entities, args.split, cfg, Path(cfg.out_dir), args.suffix)


if __name__ == "__main__":
    run_main(main)
