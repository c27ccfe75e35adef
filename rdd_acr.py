"""RDD+ACR: Region-aware Difference Distilling with Attribute-guided Contrastive Regularization for Change Captioning
(Li et al., AAAI 2025).

Idea. (1) The bare difference of the two images, looked at from each of them by cross-attention, is the global difference.
(2) A few learned vectors distil from it what happened to objects and, from those, which action it was: the concrete
first, then the abstract. The decoder reads all three. (3) While training, the object vectors must resemble the caption's
noun phrases, and the action vectors its verb phrases, in the space of CLIP's text encoder.

Eq. 1      ImageEmbedding      F_x = conv(features) + PE(x)
Eq. 2      RDD.encode          F_diff = F_bef - F_aft
Eq. 3-5    GlobalDifference    F_c = W [MHCA(F_bef, F_diff) ; MHCA(F_aft, F_diff)]
Eq. 6-8    DistillingBlock     F_c^i = MHSA(F_c^{i-1}),  F_o^ = MHCA(F_o^{i-1}, F_c^i),  F_o^i = FFN(F_o^) + F_o^
Eq. 9      Fusion              MF(F_c ; F_object ; F_action), tokens beside tokens
Eq. 10-13  contrast_loss       L_N2O, L_V2A  InfoNCE of cosines, mean of the vectors <-> phrases
Eq. 14     Decoder.head        next word
Eq. 15     caption_loss        L_XE
Eq. 16     losses_of           L = L_XE + w_n2o L_N2O + w_v2a L_V2A

Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, V words of a caption (START, words, END, padding),
K object or action vectors, U different phrases, E width of CLIP's text space.

The authors released no code, and the supplement is not at hand. Where the paper is silent or leaves two readings, the
choice is marked [ours] where it is made.
To copy: this file, common.py and data.py (the model takes the special ids and CLIP's widths from
data.py; its losses also the phrases and the text encoder there).
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:  # read when torch loads: idle threads sleep, after a moment, on a busy laptop
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import data
from common import (
    Attention,
    GridPosition,
    LossLog,
    Run,
    RunConfig,
    can_compile,
    decode,
    initialise,
    learning_rate,
    load_checkpoint,
    load_model,
    pair_picture,
    parse_args,
    run_main,
    sample_sheet,
    training_batches,
)

# ---- config ----------------------------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """RDD+ACR. The fields of a run (data, steps, device) are common.RunConfig's."""

    dim: int = 512  # width D of images, words and decoder
    word_dim: int = 300  # word embedding
    heads: int = 8  # heads of every attention
    decoder_layers: int = 2  # decoder layers
    dropout: float = 0.1  # dropout probability
    gde: bool = True  # Eq. 3-5; without it the bare difference is the global difference (direct-sub)
    order: Literal["none", "n", "v", "n+v", "v+n", "v&n"] = "n+v"  # objects (n), actions (v), one from the other, or apart
    distil_steps: int = 3  # N, distilling blocks for objects, and again for actions
    share_blocks: bool = True  # the N blocks are one and the same, "with the same parameters"
    object_vectors: int = 32  # K_o
    action_vectors: int = 5  # K_a
    position: Literal["shared", "own"] = "shared"  # PE(x) of Eq. 1: one table, which cancels in Eq. 2, or one for each image
    centre: bool = False  # subtract from a pair's features their mean over its cells (mini; not the paper's)
    near_identity: bool = False  # start Eq. 4 as a copy of the cells, Eq. 6 and 9 as a comparison (mini; not the paper's)
    decoder_init: Literal["pytorch", "xavier"] = "pytorch"  # the decoder's first weights: PyTorch's, or as in DIRL+CCR (mini)
    w_n2o: float = 0.1  # weight of L_N2O in Eq. 16; 0 leaves it out (not given in the paper, as the next two)
    w_v2a: float = 0.1  # weight of L_V2A in Eq. 16; 0 leaves it out
    tau: float = 0.1  # temperature of Eq. 11-12
    equal_phrases: Literal["ignored", "negatives"] = "ignored"  # another pair with the very same phrase
    prompt: Literal["none", "fixed", "learnable"] = "learnable"  # what stands before the phrases
    prompt_tokens: int = 4  # learned vectors of a learnable prompt
    clip: str = "ViT-L-14:openai"  # text encoder, open_clip's MODEL:WEIGHTS (a name or a file), or mini's own: mini
    val_decode: Literal["greedy", "sample"] = "greedy"  # how validation captions, which choose best.pt, are written
    blind: bool = False  # zero the features: what words alone can score


# K_a from section "Effect of Learnable Vectors Number"; batch, rate and drops are SCORER's: the supplement is not at hand.
PRESETS = {
    "clevr_change": dict(lr_drop=3975),
    "levir_cc": dict(action_vectors=10, batch_size=32),
    "spot_the_diff": dict(action_vectors=10, batch_size=32, lr_drop=4020),
    "mini": dict(dim=128, word_dim=128, heads=8, dropout=0.0, distil_steps=1, object_vectors=8, position="own", centre=True,
                 near_identity=True, decoder_init="xavier", clip="mini", batch_size=16, lr=1e-3, schedule="cosine", warmup=50,
                 grad_clip=1.0, steps=1500, eval_every=750, eval_batch=250),
    "mini@cuda": dict(data_dir="data/mini_large", scenes=10000, objects="3,6", steps=15000, eval_every=2500),
}  # fmt: skip
PRESETS["mini_dc"] = PRESETS["mini"] | dict(batch_size=32)  # a scene is one pair here, not two

RELEASED: dict = {}  # no code was released

PROMPTS = ("the objects that changed: ", "what happened: ")  # prompt="fixed", for nouns and verbs [ours]

# ---- modules ---------------------------------------------------------------------------------------------------------


class ImageEmbedding(nn.Module):
    """Eq. 1: F_x = conv_1x1(features) + PE(x). (B, C, H, W) of "before", of "after" -> (B, N, D) of each, cell
    n = row * W + column."""

    def __init__(self, cfg: Config, channels: int, height: int, width: int):
        super().__init__()
        self.conv, self.centre = nn.Conv2d(channels, cfg.dim, 1), cfg.centre
        tables = 1 if cfg.position == "shared" else 2  # of "before", of "after"
        self.positions = nn.ModuleList(GridPosition(cfg.dim, height, width) for _ in range(tables))

    def forward(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Features of both images -> their cells; with `centre`, less each channel's mean over a pair."""
        pair = torch.stack([before, after])  # (2, B, C, H, W)
        if self.centre:
            pair = pair - pair.mean((0, 3, 4), keepdim=True)
        images = self.conv(pair.flatten(0, 1)).chunk(2)
        f_bef, f_aft = (x + table() for x, table in zip(images, [self.positions[0], self.positions[-1]], strict=True))
        return f_bef.flatten(2).transpose(1, 2), f_aft.flatten(2).transpose(1, 2)


class GlobalDifference(nn.Module):
    """Eq. 3-5: F_c = W [MHCA(F_bef, F_diff) ; MHCA(F_aft, F_diff)]. (B, N, D) three times -> (B, N, D).

    [ours] Eq. 5 joins channels and a linear layer brings 2D back to D, so that there are N tokens as section "Caption
    Decoder" has them; one attention serves both images; no residual, Eq. 4 has none."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention, self.join = Attention(cfg.dim, cfg.heads, cfg.dropout), nn.Linear(2 * cfg.dim, cfg.dim)

    def forward(self, f_bef: Tensor, f_aft: Tensor, f_diff: Tensor) -> Tensor:
        """F_bef, F_aft and F_diff (B, N, D) -> F_c (B, N, D)."""
        q, k, v = self.attention.project(torch.cat([f_bef, f_aft]), f_diff)
        seen = self.attention.attend(q, k.repeat(2, 1, 1), v.repeat(2, 1, 1))
        return self.join(torch.cat(seen.chunk(2), -1))


class DistillingBlock(nn.Module):
    """Eq. 6-8: the source looks at itself, the vectors look at the source. source (B, M, D), vectors (B, K, D) -> both
    anew, and the query and key of the look. [ours] Pre-norm: N blocks without it do not train."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention, self.cross_attention = (Attention(cfg.dim, cfg.heads, cfg.dropout) for _ in range(2))
        self.feed_forward = nn.Linear(cfg.dim, cfg.dim)
        self.norm_source, self.norm_seen, self.norm_vectors, self.norm_out = (nn.LayerNorm(cfg.dim) for _ in range(4))

    def forward(self, source: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """-> source F_c^i (B, M, D), vectors F_o^i (B, K, D), and the look."""
        x = self.norm_source(source)
        source = self.self_attention(x, x)
        q, k, v = self.cross_attention.project(self.norm_vectors(vectors), self.norm_seen(source))
        vectors = self.cross_attention.attend(q, k, v)
        return source, self.feed_forward(self.norm_out(vectors)) + vectors, (q, k)


class Distilling(nn.Module):
    """K vectors, drawn from a Gaussian and learned, through N blocks: source (B, M, D) -> vectors (B, K, D), and query and
    key (B, K, D), (B, M, D) of the last look."""

    def __init__(self, cfg: Config, count: int):
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(count, cfg.dim))
        blocks = [DistillingBlock(cfg) for _ in range(1 if cfg.share_blocks else cfg.distil_steps)]
        self.blocks, self.steps = nn.ModuleList(blocks), cfg.distil_steps

    def forward(self, source: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Source F_c (B, M, D), or what precedes these vectors -> vectors (B, K, D), and the last look."""
        vectors = self.vectors.expand(len(source), -1, -1)
        for i in range(self.steps):
            source, vectors, look = self.blocks[i % len(self.blocks)](source, vectors)
        return vectors, look


class Fusion(nn.Module):
    """Eq. 9: self-attention and a fully connected layer, each with a residual, over all tokens (B, M, D) -> (B, M, D).
    [ours] Pre-norm, as in the distilling blocks, and a ReLU, without which the layer would be linear."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention, self.feed_forward = Attention(cfg.dim, cfg.heads, cfg.dropout), nn.Linear(cfg.dim, cfg.dim)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim), nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of all kinds side by side (B, M, D) -> the same, mixed."""
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y))
        return x + self.dropout(F.relu(self.feed_forward(self.norm2(x))))


class DecoderLayer(nn.Module):
    """Post-norm decoder layer: words attend to earlier words, then to the differences, then a feed-forward of width 4 D.

    x (B, V, D) -> (B, V, D). `cross`: key and value (B, M, D) of the differences; `past`: key and value of the words
    before x (decoding a word at a time), None when x starts with START. Also returns the new `past` and the query that
    met the differences. [ours] Widths and number of layers, as in DIRL+CCR."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.hidden, self.output = nn.Linear(cfg.dim, 4 * cfg.dim), nn.Linear(4 * cfg.dim, cfg.dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(cfg.dim) for _ in range(3))
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, cross: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None = None):
        """-> words (B, V, D), `past` with these words, query (B, V, D)."""
        q, k, v = self.self_attention.project(x, x)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        a = self.norm1(x + self.dropout(self.self_attention.attend(q, k, v, causal=past is None)))
        query = self.cross_attention.query(a)
        c = self.norm2(a + self.dropout(self.cross_attention.attend(query, *cross)))
        y = self.output(self.dropout(F.relu(self.hidden(c))))
        return self.norm3(c + self.dropout(y)), (k, v), query


class Decoder(nn.Module):
    """Words and differences -> hidden states; `head` gives the distribution of the next word (Eq. 14).

    Every word sees itself and earlier words only, so padding at the end of a caption needs no mask."""

    def __init__(self, cfg: Config, vocab_size: int, max_len: int):
        super().__init__()
        self.embed, self.project = nn.Embedding(vocab_size, cfg.word_dim), nn.Linear(cfg.word_dim, cfg.dim)
        self.position = nn.Embedding(max_len, cfg.dim)
        self.norm, self.dropout = nn.LayerNorm(cfg.dim), nn.Dropout(cfg.dropout)
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.head = nn.Linear(cfg.dim, vocab_size)
        if cfg.decoder_init == "xavier":
            initialise(self, xavier=True)

    def words(self, ids: Tensor, start: int = 0) -> Tensor:
        """(B, V) ids at positions start, start + 1, ... -> (B, V, D)."""
        x = self.project(self.embed(ids)) + self.position.weight[start : start + ids.shape[1]]
        return self.dropout(self.norm(x))

    def memory(self, difference: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Key and value of the differences (B, M, D) for each layer: once a caption, not once a word."""
        return [(l.cross_attention.key(difference), l.cross_attention.value(difference)) for l in self.layers]

    def forward(self, ids: Tensor, difference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All words at once: (B, V) -> hidden states (B, V, D), and the query (B, V, D) and key (B, M, D) with which the
        last layer looked at the differences."""
        x, memory = self.words(ids), self.memory(difference)
        for layer, cross in zip(self.layers, memory, strict=True):
            x, _, query = layer(x, cross)
        return x, query, memory[-1][0]

    def stepper(self, difference: Tensor):
        """-> step(words (B,), position) -> logits of the next word; keys and values of earlier words are kept."""
        memory, past = self.memory(difference), [None] * len(self.layers)

        def step(words: Tensor, t: int) -> Tensor:
            x = self.words(words[:, None], t)
            for i, layer in enumerate(self.layers):
                x, past[i], _ = layer(x, memory[i], past[i])
            return self.head(x[:, 0])

        return step


class Phrases:
    """Section "Attribute-guided Tokens Generating", before the adapter: noun and verb phrases of every training caption,
    each kind joined by "and", through CLIP's frozen text encoder. Training only; no part of the model or its checkpoint.

    Without a learnable prompt every different phrase is encoded once, here; with one, once in each batch that has it."""

    def __init__(self, cfg: Config, dataset: data.Dataset):
        captions = sorted({c for s in dataset.scenes["train"] for p in [*s.pairs, *(s.swapped or ())] for c in p.captions})
        segments = data.caption_segments(dataset.name, dataset.root, captions)
        self.clip, tokenizer, _ = data.load_clip(cfg.clip, dataset.root, cfg.device)
        prefix = PROMPTS if cfg.prompt == "fixed" else ("", "")
        texts = {c: [p + " and ".join(s) if s else "" for p, s in zip(prefix, segments[c], strict=True)] for c in captions}
        different = sorted({t for both in texts.values() for t in both if t})
        row = {text: i for i, text in enumerate(different)} | {"": -1}  # -1: no such phrase
        self.rows = {c: [row[t] for t in both] for c, both in texts.items()}
        tokens = tokenizer(different)  # (U, context)
        self.tokens = tokens[:, : 1 + int(tokens.argmax(1).max())].to(cfg.device)  # the end token has the highest id
        self.encoded = None
        if cfg.prompt != "learnable":
            self.encoded = torch.cat([data.encode_prompted(self.clip, t, None) for t in self.tokens.split(256)]).detach()

    def __call__(self, captions: list[str], kind: int, prompt: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """B captions, kind 0 (nouns) or 1 (verbs), prompt (P, width) -> phrases (B, E); valid (B,): is there one?; same
        (B, B): which are equal?"""
        rows = torch.tensor([self.rows[c][kind] for c in captions], device=self.tokens.device)
        different, place = rows.clamp(min=0).unique(return_inverse=True)
        if self.encoded is not None:
            encoded = self.encoded[different]
        else:
            encoded = data.encode_prompted(self.clip, self.tokens[different], prompt)
        return encoded[place], rows >= 0, rows[:, None] == rows


# ---- losses ----------------------------------------------------------------------------------------------------------


def contrast_loss(vectors: Tensor, phrases: Tensor, valid: Tensor, same: Tensor, tau: float) -> Tensor:
    """Eq. 10-13, L_N2O or L_V2A: InfoNCE of cosines between the mean of each pair's vectors and its phrase, both ways.

    vectors (B, K, D), phrases (B, D); valid (B,) bool: pairs without a phrase take no part, and the mean is over the
    others; same (B, B) bool: pairs whose phrases are equal. Sentences from templates make many of these in a batch, and as
    negatives they would push apart what says the same."""
    l, c = F.normalize(phrases, dim=-1), F.normalize(vectors.mean(1), dim=-1)  # Eq. 10
    s = l @ c.T / tau  # (B, B)
    partner = torch.eye(len(s), dtype=torch.bool, device=s.device)
    s = s.masked_fill((same | ~valid[:, None] | ~valid) & ~partner, float("-inf"))
    both = s.log_softmax(1).diagonal() + s.log_softmax(0).diagonal()  # Eq. 11, 12
    return -(both / 2 * valid).sum() / valid.sum().clamp(min=1)


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 15, L_XE: cross-entropy of each next word, a mean over the words of each caption, then over captions.
    logits (B, V, vocabulary) at words 0 ... V-1, caption (B, V) padded with 0."""
    target = caption[:, 1:]
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), target, ignore_index=0, reduction="none")  # (B, V - 1)
    return (loss.sum(1) / (target != 0).sum(1)).mean()


# ---- method ----------------------------------------------------------------------------------------------------------


class RDD(nn.Module):
    """RDD+ACR and every parameter of it. grid: (C, H, W) of the features; max_len: ids of the longest caption."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg, self.grid, self.max_len = cfg, grid, max_len
        order = cfg.order.replace("none", "")
        for weight, loss, kind in ((cfg.w_n2o, "w_n2o", "n"), (cfg.w_v2a, "w_v2a", "v")):
            if weight and kind not in order:
                raise ValueError(f"--order {cfg.order} has no vectors for --{loss}; set --{loss} 0")
        self.embed = ImageEmbedding(cfg, *grid)
        self.difference = GlobalDifference(cfg) if cfg.gde else None
        self.objects = Distilling(cfg, cfg.object_vectors) if "n" in order else None
        self.actions = Distilling(cfg, cfg.action_vectors) if "v" in order else None
        self.fuse = Fusion(cfg) if self.objects or self.actions else nn.Identity()  # [ours] nothing to fuse in row GDE
        self.decoder = Decoder(cfg, vocab_size, max_len)
        if cfg.w_n2o or cfg.w_v2a:
            embed_dim, width = data.clip_sizes(cfg.clip)
            layers = nn.Linear(embed_dim, cfg.dim), nn.ReLU(), nn.Linear(cfg.dim, cfg.dim), nn.ReLU()
            self.adapter = nn.Sequential(*layers, nn.Linear(cfg.dim, cfg.dim))  # [ours] one for nouns and verbs
            if cfg.prompt == "learnable":  # [ours] nouns have theirs, verbs theirs; drawn as in CoOp
                self.prompts = nn.Parameter(0.02 * torch.randn(2, cfg.prompt_tokens, width))
        if cfg.near_identity and cfg.gde:
            start_near_identity(self)

    def encode(self, before: Tensor, after: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, tuple[Tensor, Tensor]]]]:
        """(B, C, H, W) twice -> what the decoder reads (B, N + K_o + K_a, D) of Eq. 9, and for "objects" and "actions" the
        vectors (B, K, D) with query and key of their last look."""
        if self.cfg.blind:
            before, after = torch.zeros_like(before), torch.zeros_like(after)
        f_bef, f_aft = self.embed(before, after)
        f_diff = f_bef - f_aft  # Eq. 2
        f_c = self.difference(f_bef, f_aft, f_diff) if self.difference else f_diff
        found, source = {}, f_c
        for name in ("actions", "objects") if self.cfg.order == "v+n" else ("objects", "actions"):
            if distilling := getattr(self, name):
                found[name] = distilling(source)
                if "+" in self.cfg.order:  # the second kind is distilled from the first
                    source = found[name][0]
        return self.fuse(torch.cat([f_c, *(vectors for vectors, _ in found.values())], 1)), found

    def forward(self, before: Tensor, after: Tensor, caption: Tensor, phrases: tuple = (None, None)) -> dict[str, Tensor]:
        """The parts of Eq. 16 for one batch of pairs: features (B, C, H, W) twice, caption (B, V), and for nouns and verbs
        what Phrases gives, None where its loss is not wanted."""
        tokens, found = self.encode(before, after)
        hidden, _, _ = self.decoder(caption, tokens)
        losses = {"caption": caption_loss(self.decoder.head(hidden), caption)}
        kinds = ("n2o", "objects"), ("v2a", "actions")
        for (loss, name), of_kind in zip(kinds, phrases, strict=True):
            if of_kind:
                encoded, valid, same = of_kind
                with torch.autocast(caption.device.type, enabled=False):
                    same = same & (self.cfg.equal_phrases == "ignored")
                    text = self.adapter(encoded.to(self.adapter[0].weight.dtype))
                    losses[loss] = contrast_loss(found[name][0].to(text.dtype), text, valid, same, self.cfg.tau)
        return losses

    def prompt(self, kind: int) -> Tensor | None:
        """What stands before nouns (0) or verbs (1): (P, width), or None."""
        return self.prompts[kind] if self.cfg.prompt == "learnable" else None

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor, sample: bool = False) -> Tensor:
        """Captions of pairs of features (B, C, H, W): greedy (or sampled) ids (B, max_len)."""
        step = self.decoder.stepper(self.encode(before, after)[0])
        start = torch.full((len(before),), data.START, device=before.device)
        return decode(step, start, self.max_len, data.END, data.UNK, sample)

    @torch.no_grad()
    def decoder_map(self, before: Tensor, after: Tensor, ids: Tensor) -> Tensor:
        """Where the decoder looked: last layer's attention over cells, the vectors left aside, mean over heads and over the
        words of ids (B, V) -> (B, H, W). Row t of the scores is the state that predicts word t + 1."""
        _, query, key = self.decoder(ids, self.encode(before, after)[0])
        cells = key[:, : self.grid[1] * self.grid[2]]
        scores = self.decoder.layers[-1].cross_attention.scores(query, cells)  # (B, heads, V, N)
        weight = scores.softmax(-1).mean(1)[:, :-1]  # (B, V - 1, N)
        valid = (ids[:, 1:] > data.END).to(weight.dtype)[..., None]
        return ((weight * valid).sum(1) / valid.sum(1).clamp(min=1)).unflatten(1, self.grid[1:])

    @torch.no_grad()
    def vector_maps(self, before: Tensor, after: Tensor) -> dict[str, Tensor]:
        """Where object and action vectors looked in their last step, mean over heads and vectors: name -> (B, H, W). Vectors
        that looked at other vectors look through them."""
        found, maps, through = self.encode(before, after)[1], {}, None
        for name, (_, look) in found.items():
            weight = getattr(self, name).blocks[-1].cross_attention.scores(*look).softmax(-1).mean(1)  # (B, K, M)
            weight = weight if through is None else weight @ through  # (B, K, N)
            through = weight if "+" in self.cfg.order else None
            maps[name] = weight.mean(1).unflatten(1, self.grid[1:])
        return maps

    def attention_map(self, before: Tensor, after: Tensor, ids: Tensor) -> list[dict[str, Tensor]]:
        """What the pictures show of each pair: the maps (H, W) of decoder, object and action vectors."""
        maps = {"decoder": self.decoder_map(before, after, ids)} | self.vector_maps(before, after)
        return [{name: of_batch[b] for name, of_batch in maps.items()} for b in range(len(before))]


@torch.no_grad()
def start_near_identity(model: RDD) -> None:
    """Not the paper's. F_diff mixes two cells that show different places once the camera has moved; only the queries of Eq. 4
    hold an image by itself. So Eq. 3-5 start by bringing both images through, and what follows compares them.

    Channels of F: content, and codes of column and row, some for the table of "before" and others for that of "after". F_diff
    has both codes, untouched by content. In heads 0-1 of Eq. 4 a "before" cell looks, by its code, for its own cell of F_diff
    and fetches content and code. In heads 2-4 the query is content and meets codes alone: with small scores, softmax is
    almost linear, and what these heads fetch, codes again, is almost the query. Heads 5-7 start near zero. F_c of a cell is
    thus [difference ; code ; "before" ; "after"]. Eq. 6-7 start as a look for like tokens: without it all cells and then all
    vectors come out alike, as there is no residual. Eq. 9 starts as a comparison: from "before" of each token it takes away
    "after" of the tokens most like it, and the other way round."""
    cfg = model.cfg
    if cfg.heads != 8 or cfg.dim % 16 or cfg.position != "own":
        raise ValueError(f"near_identity needs --heads 8, --position own and a --dim that 16 divides, not {cfg.heads}, "
                         f"{cfg.position} and {cfg.dim}; or give --no-near_identity")  # fmt: skip
    dim, half, head, w = cfg.dim, cfg.dim // 2, cfg.dim // 8, cfg.dim // 16  # GridPosition: columns, rows half of the channels
    content = torch.cat([torch.arange(half - 2 * w), torch.arange(half, dim - 2 * w)])
    code = torch.cat([torch.arange(half - 2 * w, half - w), torch.arange(dim - 2 * w, dim - w)])  # of "before"

    def fresh(attention: Attention, noise: float = 0.02) -> None:
        for linear in (attention.query, attention.key, attention.value, attention.out):
            linear.weight.normal_(std=noise)
            linear.bias.zero_()

    def rows(first: int, count: int = 1) -> Tensor:
        return torch.arange(first * head, (first + count) * head)

    conv, a, join = model.embed.conv, model.difference.attention, model.difference.join
    conv.weight.normal_(std=conv.in_channels**-0.5)
    for linear in (conv, join):
        linear.bias.zero_()
    for table, at in zip(model.embed.positions, (code, code + w), strict=True):
        conv.weight[at] = 0
        for part, channels in ((table.col, at[:w]), (table.row, at[w:] - half)):
            codes = nn.init.orthogonal_(torch.empty(len(part.weight), w))
            part.weight.zero_()
            part.weight[:, channels] = 2 * (codes - codes.mean(0))
    fresh(a)
    a.out.weight.copy_(torch.eye(dim))
    for own in (rows(0), rows(1)):
        for linear in (a.query, a.key):
            linear.weight[own, code] += 2.9
    a.value.weight[rows(0), content[:head]] += 1
    a.value.weight[rows(1), code] += 0.5
    for i in (2, 3, 4):
        a.query.weight[rows(i), content[rows(i - 2)]] += 1
        a.key.weight[rows(i), code] += 1
        a.value.weight[rows(i), code] += 8
    join.weight.normal_(std=0.02)
    join.weight[rows(0, 5), rows(0, 5)] += 1
    join.weight[rows(5, 3), dim + rows(2, 3)] += 1
    for kind in (model.objects, model.actions):
        for block in kind.blocks if kind else ():
            for attention, gain in ((block.self_attention, 1.0), (block.cross_attention, 1.5)):
                fresh(attention)
                for linear, g in ((attention.query, gain), (attention.key, gain), (attention.value, 1), (attention.out, 1)):
                    linear.weight.diagonal().add_(g)
    if model.objects or model.actions:
        f = model.fuse.attention
        fresh(f)
        for found, own, other in ((rows(0, 3), rows(2, 3), rows(5, 3)), (rows(3, 3), rows(5, 3), rows(2, 3))):
            f.query.weight[found, own] += 1.5
            f.key.weight[found, other] += 1.5
            f.value.weight[found, other] += 1
            f.out.weight[own, found] -= 0.7


# ---- training --------------------------------------------------------------------------------------------------------


def losses_of(model: RDD, streams: tuple[data.Batch, ...], cfg: Config, phrases: Phrases | None = None):
    """Eq. 16 and its parts, each a mean over the streams (changed pairs, distractor pairs). The streams stay apart: a
    scene's default image is "before" in both, which a contrastive loss over all pairs would take for a negative."""
    losses: dict[str, Tensor] = {}
    for batch in (b.to(cfg.device) for b in streams):
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.device.startswith("cuda")):
            wanted = (0, cfg.w_n2o), (1, cfg.w_v2a)
            found = [phrases(batch.texts, kind, model.prompt(kind)) if weight else None for kind, weight in wanted]
            parts = model(batch.before, batch.after, batch.caption, found)
        losses = {name: losses.get(name, 0) + part / len(streams) for name, part in parts.items()}
    weights = {"caption": 1.0, "n2o": cfg.w_n2o, "v2a": cfg.w_v2a}
    losses["total"] = sum(weights[name] * part for name, part in losses.items())  # L = L_XE + w_n2o L_N2O + w_v2a L_V2A
    return losses


def train(cfg: Config, resume: bool = False) -> tuple[RDD, data.Dataset]:
    """Train into cfg.out_dir -> the best model by validation, and the data set.

    Told to stop (Ctrl-C, SIGTERM) it saves last.pt and exits 130 or 143; `resume` goes on from there as if nothing had
    happened. FloatingPointError where a loss is not finite."""
    run, dataset, cuda = Run(cfg, resume), data.open_dataset(cfg), cfg.device.startswith("cuda")
    phrases = Phrases(cfg, dataset) if cfg.w_n2o or cfg.w_v2a else None
    torch.manual_seed(cfg.seed)
    torch.set_float32_matmul_precision("high" if cuda else "highest")  # TF32 where bf16 autocast leaves float32
    model = RDD(cfg, len(dataset.vocab), dataset.grid, dataset.max_len).to(cfg.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=cfg.lr, fused=True)
    step, best, stop, recent = 0, float("-inf"), 0, LossLog()

    def save(name: str) -> None:
        run.save(name, model, optimizer, dataset, step=step, best=best)

    if resume:
        state = run.restore(model, dataset)
        optimizer.load_state_dict(state["optimizer"])
        step, best = state["step"], state["best"]
    run.begin(model, step)
    if not resume:
        save("last.pt")
    if cfg.compile and cuda and can_compile():
        model.compile()
    bar = tqdm(total=cfg.steps, initial=step, desc="train", unit="step", disable=None)
    with run, bar:
        for streams in training_batches(dataset, cfg.batch_size, cfg.seed, step, cfg.steps):
            optimizer.param_groups[0]["lr"] = lr = learning_rate(cfg, step)
            losses = losses_of(model, streams, cfg, phrases)
            optimizer.zero_grad()
            losses["total"].backward()
            if cfg.grad_clip:
                nn.utils.clip_grad_norm_(parameters, cfg.grad_clip)
            optimizer.step()
            step, stop = step + 1, run.stop  # read once a step: a signal may come at any line
            recent.add(losses)
            bar.update()
            validate = step % cfg.eval_every == 0 or step == cfg.steps
            if step % cfg.log_every == 0 or validate or stop:
                run.log_losses(recent, bar, step, lr=lr)
            if validate:
                scores = evaluate(model, dataset, "val", cfg)
                run.log(step=step, event="eval", decode=cfg.val_decode, select_by=cfg.select_by, **scores)
                tqdm.write(f"step {step}: validation " + ", ".join(f"{k} {v:.2f}" for k, v in scores.items()))
                if scores[cfg.select_by] > best:
                    best = scores[cfg.select_by]
                    save("best.pt")
            if validate or stop:
                save("last.pt")
            if stop:
                break
    if stop:
        raise SystemExit(stop)
    model.load_state_dict(load_checkpoint(run.dir / "best.pt", cfg.device)["model"])
    return model, dataset


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(model: RDD, dataset: data.Dataset, split: str, cfg: Config, out_dir: Path | None = None) -> dict:
    """Captions of a split, their scores; -> the scores of all pairs together.

    Without out_dir (validation while training) the quick metrics only; with it every metric and every group of pairs,
    printed and written with captions and sample pictures."""
    model.eval()
    captions: dict[str, str] = {}
    maps: dict = {}  # pair id -> attention
    batches = -(-len(dataset.pairs(split)) // cfg.eval_batch)
    for batch in tqdm(dataset.eval_batches(split, cfg.eval_batch), split, batches, disable=None, leave=False):
        batch = batch.to(cfg.device)
        ids = model.generate(batch.before, batch.after, sample=cfg.val_decode == "sample" and out_dir is None)
        captions |= zip(batch.ids, dataset.vocab.decode(ids), strict=True)
        if out_dir:
            maps |= zip(batch.ids, model.attention_map(batch.before, batch.after, ids), strict=True)
    if out_dir is None:
        model.train()
        return dataset.score(split, captions, quick=True)["scores"]["total"]
    data.write_predictions(out_dir / f"captions_{split}.json", captions)
    result = dataset.score(split, captions) | dataset.report(split, captions, maps)
    data.write_scores(out_dir / f"scores_{split}.json", result)
    picture = "samples.png" if split == "test" else f"samples_{split}.png"
    sample_sheet(dataset, split, captions, maps).save(out_dir / picture)
    return result["scores"]["total"]


def caption_files(cfg: Config, checkpoint: str, files: list[str], out: str | None) -> str:
    """The caption of any two image files by a checkpoint, and its attention picture where `out` names one."""
    model, state = load_model(RDD, cfg, checkpoint)
    extractor = data.Extractor(**state["extractor"], device=cfg.device)
    before, after = (extractor([f]).to(cfg.device).float() for f in files)
    ids = model.generate(before, after)
    caption = data.Vocab(state["vocab"]).decode(ids)[0]
    if out:
        heat = model.attention_map(before, after, ids)[0]
        pair_picture(*map(data.read_image, files), heat, [caption], side=224).save(out)
    return caption


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption two image files."""
    cfg, do = parse_args(Config, PRESETS, RELEASED, Path(__file__).stem, __doc__, argv)
    if do.caption:
        print(caption_files(cfg, do.checkpoint, do.caption, do.out))
        return
    if do.eval:
        (model, state), dataset = load_model(RDD, cfg, do.eval), data.open_dataset(cfg)
        dataset.check_state(state)
    else:
        model, dataset = train(cfg, do.resume)
    evaluate(model, dataset, do.split, cfg, Path(cfg.out_dir))


if __name__ == "__main__":
    run_main(main)
