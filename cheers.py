"""CHEERS: Change Entity-guided Heterogeneous Representation Disentangling for Change Captioning (Li et al., 2025).

Idea. (1) The subjects of all training captions are candidate entities; those whose CLIP similarity to the two images of
a pair differs most are probably what changed. (2) What the images share is enhanced and matched by cross-attention;
what is left is the difference. Images and entities must agree on where both are. (3) The decoder weighs entities
against visual differences word by word: the entities name the subject, the images show what happened to it.

Eq. 1      retrieve          top K of |S_bef - S_aft|, S_i the cosines of an image and every candidate
Eq. 2-4    CRE               F' = LN(sigmoid(P^) F + F), P^ = Linear(m), m the likeness to the source
Eq. 5      DRE               the same with P^ = Linear(1 - m)
Eq. 6, 8   HRD               C_i = CRE(F_j, F_i),  C~_i = MHCA(C_i, C_j)
Eq. 7, 11  HRD               L_C, L_D  MSE of the maps P^ of images and of entities
Eq. 9      contrastive_loss  L_I  InfoNCE, "before" <-> "after"
Eq. 10     HRD               D_i = DRE(F_i, F_i - C~_i)
Eq. 12     CHEERS.encode     F_diff = Linear [D_bef ; D_aft]
Eq. 13-17  DecoderLayer      H = LN(alpha H_T + beta H_V + H')
Eq. 18     caption_loss      L_S
Eq. 19     total_loss        L = L_S + w_consistency (L_C + L_D) + w_match L_I

Row of the paper's tables     flags
Table 4  Baseline             --layers 0 --k 0 --gate none --w_consistency 0 --w_match 0
         CRE; DRE; HRD        --no-dre --gate none; --no-cre --gate none; --gate none  [ours] all three without gate
         GATE                 --layers 0 --w_consistency 0 --w_match 0
Table 5  lambda_m, lambda_v   --w_match 0.5, --w_consistency 0.75
Table 6  ResNet-101           (none); its two ViT rows are out of reach: no extractor here makes their features
Fig. 5, Fig. 6                --k 3, --layers 2

Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, V words of a caption (START, words, END,
padding), K entities of a pair, M candidates, E width of CLIP's common space.

The abstract names a repository, github.com/yili-19/CHEER, which is not public: the paper is the only source. If
it is silent or leaves two readings, the choice is marked [ours] where it is made. Two limits:
- CLIP embeds a whole image. It can find an object that came, went or looks different, but not one that only moved.
- The entities' P^ hardly varies over the cells of an image (on mini its standard deviation is 1 % of its size, against
  10 % for the images' P^), and the two are uncorrelated (below .001). So L_C and L_D align little more than constants.

To copy: this file and common.py. Training on a data set of data.py needs that file too.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common import (
    END,
    NULL,
    Attention,
    GridPosition,
    Run,
    RunConfig,
    decode,
    info_nce,
    initialise,
    load_checkpoint,
    load_weights,
    mean_of,
    parse_args,
    run_main,
    saved_config,
    token_match,
    upcast,
    usable_device,
)

# ---- config ----------------------------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """CHEERS. The fields of a run (data, steps, device) are common.RunConfig's."""

    RANGES = RunConfig.RANGES | {"layers": (0, 100), "dropout": (0, 0.99), "k": (0, 1000)}

    dim: int = 512  # width D of images, words and decoder
    word_dim: int = 300  # word embedding
    heads: int = 8  # heads of every attention
    layers: int = 2  # HRD layers, Eq. 6-11; 0: the bare difference of the two images
    layer_input: Literal["residual", "attended"] = "residual"  # what the next layer reads: LN(x + C~), or C~
    decoder_layers: int = 2  # decoder layers
    dropout: float = 0.1  # dropout probability
    k: int = 3  # K, entities of a pair; 0: none
    retrieval: Literal["absolute", "signed"] = "absolute"  # |S_bef - S_aft|, or Eq. 1's difference (blind to "add")
    clip: str = "ViT-L-14:openai"  # for entities and images: open_clip's MODEL:WEIGHTS (name or file), or mini's: mini
    cre: bool = True  # enhance what is common, Eq. 6-7
    dre: bool = True  # enhance what differs, Eq. 10-11
    temperature: Literal["learned", "one"] = "learned"  # of Eq. 2's softmax; one: as printed (m hardly varies)
    gate: Literal["channels", "scalar", "none"] = "channels"  # alpha, beta: D numbers or one; none: no entities
    w_consistency: float = 0.75  # lambda_v, weight of L_C + L_D in Eq. 19; 0 leaves them out
    w_match: float = 0.5  # lambda_m, weight of L_I in Eq. 19; 0 leaves it out
    blind: bool = False  # zero the features and the entities: what words alone can score


# Batch and rate from section 4.3, the best number of layers from Fig. 6. [ours] 10,000 steps, SCORER's decoder size,
# and a batch of 128 scenes, which are 256 pairs on CLEVR-Change.
PRESETS = {
    "clevr_change": dict(lr=1e-3),
    "clevr_dc": dict(lr=1e-3, layers=1),
    "spot_the_diff": dict(lr=5e-4, batch_size=96),
    # Your own pairs are few: half of Spot-the-Diff's width, one layer; validation says when to stop [ours].
    "pairs": dict(layers=1, dim=256, batch_size=16, lr=5e-4, warmup=50, steps=2000, eval_every=100, patience=10),
    "mini": dict(dim=128, word_dim=128, heads=2, layers=1, dropout=0.0, clip="mini", w_consistency=0.1, w_match=0.05,
                 batch_size=16, lr=2e-3, schedule="cosine", warmup=50, grad_clip=1.0, steps=1700, eval_every=850,
                 eval_batch=250),
}  # fmt: skip

# ---- entities --------------------------------------------------------------------------------------------------------


def retrieve(x_bef: Tensor, x_aft: Tensor, entities: Tensor, k: int, signed: bool = False) -> Tensor:
    """Eq. 1: the candidates whose cosines with the two images differ most. x (B, E) twice, entities (M, E) -> indices
    (B, k), best first; fewer if there are fewer than k candidates.

    A candidate is relevant if its cosine with at least one of the images is above the mean over all candidates. The
    others follow only if the relevant ones run out. In a tie the lower index comes first. [ours] The difference is
    absolute unless `signed`: the text asks for the largest difference, and an added object is closer to "after"."""
    entities = F.normalize(entities, dim=-1).T
    s_bef, s_aft = F.normalize(x_bef, dim=-1) @ entities, F.normalize(x_aft, dim=-1) @ entities  # (B, M)
    score = s_bef - s_aft if signed else (s_bef - s_aft).abs()
    relevant = (s_bef > s_bef.mean(1, keepdim=True)) | (s_aft > s_aft.mean(1, keepdim=True))
    score = torch.where(relevant, score, score - 4)  # below every relevant one: cosines differ by 2 at most
    return score.argsort(dim=1, descending=True, stable=True)[:, :k]


class Entities:
    """Section 3.1, done once for a data set. The subjects of all training captions are the candidates; CLIP embeds them
    and all images, and every pair gets its K entities. Not part of the model, which keeps only the candidates'
    embeddings (`table`, (M, E)). All are cached in embeddings.pt. Without entities (k = 0) everything is empty."""

    def __init__(self, cfg: Config, dataset):
        import data

        self.clip, self.root, self.device = cfg.clip, dataset.root, cfg.device
        self.phrases, self.table, self.indices = [], None, {}  # indices (K,) by the names of a pair's images
        if not cfg.k:
            return
        pairs = {}
        for split, scenes in dataset.scenes.items():
            pairs[split] = [p for scene in scenes for p in (*scene.pairs, *(scene.swapped or ()))]
        captions = sorted({c for p in pairs["train"] for c in p.captions})
        subjects = data.read_captions(data.subjects, dataset.name, captions)
        self.phrases = sorted({phrase for phrases in subjects.values() for phrase in phrases})
        if not self.phrases:
            raise ValueError(f"{self.root}: no training caption has a subject; --k 0 --gate none --w_consistency 0")
        self.table, images = data.clip_embeddings(cfg.clip, self.root, self.phrases, dataset.paths, cfg.device)
        row, table = {name: i for i, name in enumerate(sorted(dataset.paths))}, self.table.to(cfg.device)
        names = list(dict.fromkeys((p.before, p.after) for split in pairs.values() for p in split))
        for i in tqdm(range(0, len(names), 256), desc="retrieval", unit_scale=256, disable=None, leave=False):
            some = names[i : i + 256]
            x_bef, x_aft = (images[[row[name] for name in side]].to(cfg.device) for side in zip(*some, strict=True))
            best = retrieve(x_bef, x_aft, table, cfg.k, cfg.retrieval == "signed").cpu()
            self.indices |= zip(some, best, strict=True)

    def __call__(self, batch) -> Tensor | None:
        """Indices (B, K) of a batch's entities, None if there are none."""
        if not self.phrases:
            return None
        return torch.stack([self.indices[pair] for pair in batch.images]).to(self.device, non_blocking=True)

    def notes(self, indices: Tensor | None) -> list[list[str]]:
        """Indices (B, K) of a batch's entities -> for each pair, the lines to print below its pictures."""
        rows = [] if indices is None else indices.tolist()
        return [["entities: " + ", ".join(self.phrases[m] for m in row)] for row in rows]

    def check_state(self, state: dict) -> None:
        """ValueError if a checkpoint was trained with other candidates or another CLIP."""
        trained, table = state["entities"]["phrases"], state["model"].get("table")
        if trained != self.phrases:
            raise ValueError(f"the checkpoint was trained with {len(trained)} candidate entities, not the "
                             f"{len(self.phrases)} of {self.root}; give its --data_dir")  # fmt: skip
        if self.phrases and not (table.shape == self.table.shape and table.cpu().allclose(self.table, atol=1e-3)):
            raise ValueError(f"the checkpoint's entities were embedded by another CLIP than {self.clip} of {self.root}")

    def state(self) -> dict:
        """What a checkpoint needs, besides the model, to retrieve the entities of any two pictures."""
        import data

        saved = data.clip_weights(self.clip, self.root) if self.phrases else None
        return {"entities": {"phrases": self.phrases, "clip": saved}}


# ---- modules ---------------------------------------------------------------------------------------------------------


class ImageEmbedding(nn.Module):
    """F = conv_1x1(features) + position. (B, C, H, W) -> (B, N, D), cell n = row * W + column. [ours] As in SCORER."""

    def __init__(self, channels: int, height: int, width: int, dim: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, dim, 1)
        self.position = GridPosition(dim, height, width)

    def forward(self, features: Tensor) -> Tensor:
        return (self.conv(features) + self.position()).flatten(2).transpose(1, 2)


def likeness(source: Tensor, target: Tensor, scale: Tensor | float) -> Tensor:
    """Eq. 2 and the maximum of Eq. 3: m(i) = max_j P(i, j), with P(., j) the softmax, over target positions i, of
    scale * cos(i, j), and j a source position. source (B, S, D), target (B, N, D) -> (B, N).

    [ours] The softmax is over target positions, as Eq. 2's denominator, which keeps j, suggests. Over source positions
    (there is no flag for that) a single entity would make m = 1 at every cell."""
    x, y = (F.normalize(upcast(x), dim=-1) for x in (target, source))
    return (x @ y.transpose(1, 2) * scale).softmax(1).amax(2)  # (B, N, S) -> (B, N)


def other_image(x: Tensor) -> Tensor:
    """The other image of each pair: (2B, ...), "before" first -> (2B, ...), "after" first."""
    return x.roll(len(x) // 2, 0)


class CRE(nn.Module):
    """Eq. 2-4, Commonality Representation Enhancement: P^ = Linear_{1->D}(m), F' = LN(sigmoid(P^) F + F).

    source (B, S, D), target F (B, N, D) -> F' and P^, both (B, N, D); without `norm` there is no F', only the map.
    [ours] A learned temperature, as in CLIP: bare cosines make m nearly the same everywhere."""

    def __init__(self, cfg: Config, norm: bool = True):
        super().__init__()
        self.expand, self.norm = nn.Linear(1, cfg.dim), nn.LayerNorm(cfg.dim) if norm else None
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07))) if cfg.temperature == "learned" else None

    def strength(self, source: Tensor, target: Tensor) -> Tensor:
        """What Eq. 3 expands to D channels (B, N)."""
        return likeness(source, target, 1.0 if self.log_scale is None else self.log_scale.exp())

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor | None, Tensor]:
        with torch.autocast(source.device.type, enabled=False):  # rounding to bfloat16 hides how P^ varies over cells
            p = self.expand(self.strength(source, target)[..., None])
            gate = p.sigmoid()
        return self.norm(gate * target + target) if self.norm else None, p


class DRE(CRE):
    """Eq. 5, Difference Representation Enhancement: CRE with 1 - m in place of m."""

    def strength(self, source: Tensor, target: Tensor) -> Tensor:
        return 1 - super().strength(source, target)


class HRD(nn.Module):
    """Eq. 6-8, 10-11, Heterogeneous Representation Disentangling: one layer of Fig. 2, with two CRE and two DRE, for
    both directions.

    x: F of Eq. 6, images: F of Eq. 10, both (2B, N, D), "before" first; entities (2B, K, D) -> C~ and D (2B, N, D), L_C
    and L_D. The paper uses only the maps of the two modules that read the entities. [ours] L_C and L_D are means over
    both images. Eq. 10 reads the images in every layer, "the original raw features". F_diff reads the last layer's D;
    earlier layers have only its map, for L_D. The paper does not say what the next layer's x is: LN(x + C~), or bare C~
    (--layer_input attended), which varies over cells at first by .2 of its size in layer one, by .0003 in layer two."""

    def __init__(self, cfg: Config, last: bool):
        super().__init__()
        self.cre = CRE(cfg) if cfg.cre else None
        self.entity_dre = DRE(cfg, norm=False) if cfg.cre and cfg.w_consistency else None
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.norm = None if last or cfg.layer_input == "attended" else nn.LayerNorm(cfg.dim)
        self.dre = DRE(cfg, norm=last) if cfg.dre and (last or cfg.w_consistency) else None
        self.entity_cre = CRE(cfg, norm=False) if cfg.dre and cfg.w_consistency else None

    def forward(self, x: Tensor, images: Tensor, entities: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """-> C~ and D (2B, N, D), L_C and L_D."""
        common, l_c, l_d = x, x.new_zeros(()), x.new_zeros(())
        if self.cre:
            common, p = self.cre(other_image(x), x)  # C_i = CRE(F_j, F_i)
            if self.entity_dre:
                l_c = F.mse_loss(p, self.entity_dre(entities, x)[1])  # C'_i = DRE(E, F_i)
        shared = self.attention(common, other_image(common))  # C~_i = MHCA(C_i, C_j)
        rest = difference = images - shared
        if self.dre:
            difference, p = self.dre(images, rest)  # D_i = DRE(F_i, F_i - C~_i)
            if self.entity_cre:
                l_d = F.mse_loss(p, self.entity_cre(entities, rest)[1])  # D'_i = CRE(E, F_i - C~_i)
        return shared, difference, l_c, l_d


class DecoderLayer(nn.Module):
    """Eq. 13-17: words attend to earlier words, then to entities (H_T) and to differences (H_V), H = LN(alpha H_T +
    beta H_V + H'). As in the paper, no feed-forward layer follows. [ours] H' has a residual and a LayerNorm; alpha and
    beta are D numbers each, for every word, while the text has "two parameters" (--gate scalar).

    x (B, V, D) -> (B, V, D). `cross`: key and value of the differences (B, N, D), and of the entities (B, K, D) if the
    decoder reads them; `past`: key and value of the words before x (decoding a word at a time), None when x starts with
    START. Also returns the new `past`, and the query that met the differences."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim), nn.Dropout(cfg.dropout)
        self.text_attention = None
        if cfg.gate != "none":
            self.text_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
            width = 1 if cfg.gate == "scalar" else cfg.dim
            self.alpha, self.beta = nn.Linear(2 * cfg.dim, width), nn.Linear(2 * cfg.dim, width)
            nn.init.ones_(self.alpha.bias)  # [ours] both gates start near 1, not near 0 with random signs
            nn.init.ones_(self.beta.bias)

    def forward(self, x: Tensor, cross: tuple[Tensor, ...], past: tuple[Tensor, Tensor] | None = None):
        """-> words (B, V, D), `past` with these words, the query (B, V, D)."""
        q, k, v = self.self_attention.project(x, x)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        h = self.norm1(x + self.dropout(self.self_attention.attend(q, k, v, causal=past is None)))
        query = self.cross_attention.query(h)
        fused = h_v = self.cross_attention.attend(query, *cross[:2])
        if self.text_attention:
            h_t = self.text_attention.attend(self.text_attention.query(h), *cross[2:])
            fused = self.alpha(torch.cat([h, h_t], -1)) * h_t + self.beta(torch.cat([h, h_v], -1)) * h_v
        return self.norm2(h + self.dropout(fused)), (k, v), query


class Decoder(nn.Module):
    """Words, differences and entities -> hidden states; `head` gives the distribution of the next word.

    Every word sees itself and earlier words only, so padding at the end of a caption needs no mask. [ours] Matrices
    start Xavier-uniform, as in DIRL+CCR."""

    def __init__(self, cfg: Config, vocab_size: int, max_len: int):
        super().__init__()
        self.embed, self.project = nn.Embedding(vocab_size, cfg.word_dim), nn.Linear(cfg.word_dim, cfg.dim)
        self.position = nn.Embedding(max_len, cfg.dim)
        self.norm, self.dropout = nn.LayerNorm(cfg.dim), nn.Dropout(cfg.dropout)
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.head = nn.Linear(cfg.dim, vocab_size)
        initialise(self, xavier=True)

    def words(self, ids: Tensor, start: int = 0) -> Tensor:
        """(B, V) ids at positions start, start + 1, ... -> (B, V, D)."""
        x = self.project(self.embed(ids)) + self.position.weight[start : start + ids.shape[1]]
        return self.dropout(self.norm(x))

    def memory(self, context: tuple[Tensor, Tensor | None]) -> list[tuple[Tensor, ...]]:
        """Key and value for each layer of the differences (B, N, D), and of the entities (B, K, D) if the layer reads
        them: once a caption, not once a word."""
        memory = []
        for layer in self.layers:
            readers = zip((layer.cross_attention, layer.text_attention), context, strict=True)
            memory.append(tuple(y for a, x in readers if a for y in (a.key(x), a.value(x))))
        return memory

    def forward(self, ids: Tensor, context: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        """All words at once: (B, V) -> hidden states (B, V, D), and the last layer's query (B, V, D) and key (B, N, D)
        of the differences."""
        x, memory = self.words(ids), self.memory(context)
        for layer, cross in zip(self.layers, memory, strict=True):
            x, _, query = layer(x, cross)
        return x, query, memory[-1][0]

    def stepper(self, context: tuple[Tensor, Tensor | None]):
        """-> step(words (B,), position) -> logits of the next word; keys and values of earlier words are kept."""
        memory, past = self.memory(context), [None] * len(self.layers)

        def step(words: Tensor, t: int) -> Tensor:
            x = self.words(words[:, None], t)
            for i, layer in enumerate(self.layers):
                x, past[i], _ = layer(x, memory[i], past[i])
            return self.head(x[:, 0])

        return step


# ---- losses ----------------------------------------------------------------------------------------------------------


def contrastive_loss(c_bef: Tensor, c_aft: Tensor, scale: Tensor) -> Tensor:
    """Eq. 9, L_I: InfoNCE of the two images' C~ (B, N, D) against the other pairs of the batch, both ways.

    [ours] The paper does not define q and k: here C~, as the loss is meant to help Eq. 8. As in SCORER, sim is the mean
    over tokens of the best match, and 1 / tau is learned. Tokens have length 1. Not in bfloat16, which has 3 digits."""
    with torch.autocast(c_bef.device.type, enabled=False):
        q, k = (F.normalize(upcast(x), dim=-1) for x in (c_bef, c_aft))
        s = scale * token_match(q, k)  # (B, B)
        return (info_nce(s) + info_nce(s.T)) / 2


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 18, L_S: cross-entropy of each next word. [ours] A mean over all real words of the batch; with the sum of
    Eq. 18, L_C, L_D and L_I would weigh several times less.
    logits (B, V, vocabulary) at words 0 ... V-1, caption (B, V) padded with NULL."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), caption[:, 1:].flatten(), ignore_index=NULL)


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Eq. 19: L = L_S + lambda_v (L_C + L_D) + lambda_m L_I."""
    l_s, l_c, l_d, l_i = (losses[name] for name in ("caption", "common", "different", "match"))
    return l_s + cfg.w_consistency * (l_c + l_d) + cfg.w_match * l_i


# ---- method ----------------------------------------------------------------------------------------------------------


class CHEERS(nn.Module):
    """CHEERS and every parameter of it. grid: (C, H, W) of the features; max_len: ids of the longest caption; table:
    CLIP's embeddings of the candidate entities (M, E), or None."""

    def __init__(
        self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int, table: Tensor | None = None
    ):
        super().__init__()
        self.cfg, self.grid, self.max_len = cfg, grid, max_len
        if cfg.w_match and not cfg.layers:
            raise ValueError("--layers 0 has no common features for --w_match; set --w_match 0")
        if cfg.w_consistency and not (cfg.layers and (cfg.cre or cfg.dre)):
            raise ValueError("without CRE and DRE there are no maps for --w_consistency; set --w_consistency 0")
        reads_entities = cfg.gate != "none" or cfg.w_consistency > 0
        if reads_entities and (table is None or not cfg.k):
            raise ValueError("gate and consistency need entities: k > 0, and table=, the embeddings (M, E) of the "
                             "candidates; without, set --gate none --w_consistency 0")  # fmt: skip
        self.embed = ImageEmbedding(*grid, cfg.dim)
        self.register_buffer("table", table)
        self.project = nn.Linear(table.shape[1], cfg.dim) if reads_entities else None
        self.hrd = nn.ModuleList(HRD(cfg, last=i == cfg.layers - 1) for i in range(cfg.layers))
        self.join = nn.Linear(2 * cfg.dim, cfg.dim) if cfg.layers else None
        self.decoder = Decoder(cfg, vocab_size, max_len)
        if cfg.w_match:
            self.log_scale = nn.Parameter(torch.ones(()))

    def encode(self, before: Tensor, after: Tensor, entities: Tensor | None = None):
        """(B, C, H, W) twice and indices of entities (B, K) -> what the decoder reads (F_diff (B, N, D) of Eq. 12, E
        (B, K, D)), and for each layer C~ (2B, N, D), L_C and L_D."""
        pair, e, layers = torch.cat([before, after]), None, []
        if self.project:
            if entities is None:
                raise ValueError("gate and consistency need entities=, indices (B, K) of rows of the table")
            e = self.table[entities]
            e = self.project(torch.zeros_like(e) if self.cfg.blind else e)
        x = images = self.embed(torch.zeros_like(pair) if self.cfg.blind else pair)
        if not self.join:
            return (torch.sub(*images.chunk(2)), e), layers
        both = None if e is None else torch.cat([e, e])
        for layer in self.hrd:
            shared, difference, l_c, l_d = layer(x, images, both)
            x = layer.norm(x + shared) if layer.norm else shared
            layers.append((shared, l_c, l_d))
        return (self.join(torch.cat(difference.chunk(2), -1)), e), layers

    def forward(
        self, before: Tensor, after: Tensor, caption: Tensor, entities: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The terms of Eq. 19 for one batch of pairs: features (B, C, H, W) twice, caption (B, V), entities (B, K). A
        term that the config leaves out is 0. [ours] L_C, L_D and L_I are means over the layers."""
        context, layers = self.encode(before, after, entities)
        hidden, _, _ = self.decoder(caption, context)
        l_s = caption_loss(self.decoder.head(hidden), caption)
        l_c = l_d = l_i = l_s.new_zeros(())
        for shared, layer_c, layer_d in layers:
            l_c, l_d = l_c + layer_c / len(layers), l_d + layer_d / len(layers)
            if self.cfg.w_match:
                l_i = l_i + contrastive_loss(*shared.chunk(2), self.log_scale.exp()) / len(layers)
        return {"caption": l_s, "common": l_c, "different": l_d, "match": l_i}

    @torch.no_grad()
    def clamp_scales(self) -> None:
        """After each step: learned scales, 1 / temperature, stay at most 100, as in CLIP."""
        for name, p in self.named_parameters():
            if name.endswith("log_scale"):
                p.clamp_(max=math.log(100))

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor, entities: Tensor | None = None) -> Tensor:
        """Greedy captions of pairs of features (B, C, H, W) and entities (B, K): ids (B, max_len)."""
        step = self.decoder.stepper(self.encode(before, after, entities)[0])
        return decode(step, len(before), self.max_len, before.device)

    @torch.no_grad()
    def attention_map(
        self, before: Tensor, after: Tensor, ids: Tensor, entities: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Last decoder layer's attention over cells, mean over heads and over the words of ids (B, V) -> "attention"
        (B, H, W). Row t of the scores is the state that predicts word t + 1."""
        _, query, key = self.decoder(ids, self.encode(before, after, entities)[0])
        scores = self.decoder.layers[-1].cross_attention.scores(query, key)  # (B, heads, V, N)
        weight = scores.softmax(-1).mean(1)[:, :-1]  # (B, V - 1, N)
        return {"attention": mean_of(weight, ids[:, 1:] > END).unflatten(1, self.grid[1:])}


# ---- training --------------------------------------------------------------------------------------------------------


def losses_of(model: CHEERS, batches: tuple, cfg: Config, entities: Entities | None = None) -> dict[str, Tensor]:
    """Eq. 19 and its terms, each a mean over a step's batches (changed pairs, distractor pairs). These stay separate: a
    scene's default image is "before" in both, which a contrastive loss over all pairs would take for a negative."""
    losses: dict[str, Tensor] = {}
    for batch in (b.to(cfg.device) for b in batches):
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.device.startswith("cuda")):
            terms = model(batch.before, batch.after, batch.caption, entities(batch) if entities else None)
        losses = {name: losses.get(name, 0) + term / len(batches) for name, term in terms.items()}
    return losses | {"total": total_loss(losses, cfg)}


def train(cfg: Config, dataset, resume: bool = False) -> tuple[CHEERS, Entities]:
    """Train on a data set (data.Dataset) into cfg.out_dir -> the best model by validation, and its entities.

    Ctrl-C and SIGTERM save last.pt and exit 130 or 143; `resume` continues from there as if training had never
    stopped. FloatingPointError if a loss is not finite."""
    entities = Entities(cfg, dataset)
    torch.manual_seed(cfg.seed)
    model = CHEERS(cfg, len(dataset.vocab), dataset.grid, dataset.max_len, entities.table).to(cfg.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=cfg.lr, fused=True)
    with Run(cfg, resume, model, optimizer, dataset, entities) as run:
        for batches in run.steps(dataset):
            losses = losses_of(model, batches, cfg, entities)
            optimizer.zero_grad()
            losses["total"].backward()
            if cfg.grad_clip:
                nn.utils.clip_grad_norm_(parameters, cfg.grad_clip)
            optimizer.step()
            model.clamp_scales()
            run.end_step(losses, lambda: evaluate(model, dataset, entities, "val", cfg))
    return run.best_model(), entities


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(
    model: CHEERS, dataset, entities: Entities, split: str, cfg: Config, out_dir: Path | None = None
) -> dict[str, float]:
    """Caption a split of a data set (data.Dataset) -> the scores of all its pairs together.

    Without out_dir (validation while training) only the quick metrics; with it every metric and every group of pairs,
    printed and written with captions and sample pictures."""
    model.eval()
    captions, maps, notes = {}, {}, {}  # by pair id
    for batch in dataset.eval_batches(split, cfg.eval_batch):
        batch, indices = batch.to(cfg.device), entities(batch)
        ids = model.generate(batch.before, batch.after, indices)
        captions |= zip(batch.pair_ids, dataset.vocab.decode(ids), strict=True)
        if out_dir:
            batch_maps = model.attention_map(batch.before, batch.after, ids, indices)
            maps |= {i: {name: m[b] for name, m in batch_maps.items()} for b, i in enumerate(batch.pair_ids)}
            notes |= zip(batch.pair_ids, entities.notes(indices), strict=False)
    model.train()
    return dataset.results(split, captions, maps, out_dir, notes)


def entities_of_files(model: CHEERS, state: dict, files: list[str]) -> Tensor | None:
    """Section 3.1.2 for image files in the order before, after, before, after, ... -> indices (pairs, K); also prints
    the names of the entities."""
    import data

    if not model.cfg.k:
        return None
    clip, _, preprocess = data.load_clip(model.cfg.clip, Path(), model.cfg.device, state["entities"]["clip"])
    blocks = [data.encode_images(clip, preprocess, files[i : i + 32]) for i in range(0, len(files), 32)]
    x = torch.cat(blocks).to(model.table.device)
    indices = retrieve(x[::2], x[1::2], model.table, model.cfg.k, model.cfg.retrieval == "signed")
    for row in indices.tolist():
        print("entities: " + ", ".join(state["entities"]["phrases"][i] for i in row))
    return indices


def load_model(cfg: Config, checkpoint: str | Path) -> tuple[CHEERS, dict]:
    """-> model in evaluation mode, and all that the checkpoint holds."""
    state = load_checkpoint(checkpoint, cfg.device)
    table = state["model"].get("table")
    model = CHEERS(cfg, len(state["vocab"]), state["grid"], state["max_len"], table).to(cfg.device)
    return load_weights(model, state["model"], checkpoint).eval(), state


def load(checkpoint: str | Path, device: str = ""):
    """A trained model for any two pictures, files or PIL images: caption, maps = load("best.pt")(before, after)."""
    import data

    cfg = dataclasses.replace(saved_config(Config, checkpoint), device=usable_device(device))
    return data.Captioner(*load_model(cfg, checkpoint), entities_of_files)


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption pictures."""
    import data

    cfg, args = parse_args(Config, PRESETS, Path(__file__).stem, __doc__, argv)
    if args.caption:
        captioner = data.Captioner(*load_model(cfg, args.checkpoint), entities_of_files)
        return data.caption_files(captioner, args.caption, args.out)
    dataset = data.open_dataset(cfg)
    if args.eval is None:
        model, entities = train(cfg, dataset, args.resume)
    else:
        (model, state), entities = load_model(cfg, args.eval), Entities(cfg, dataset)
        dataset.check_state(state)
        entities.check_state(state)
    evaluate(model, dataset, entities, args.split, cfg, Path(cfg.out_dir))


if __name__ == "__main__":
    run_main(main)
