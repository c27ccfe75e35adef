"""RDD+ACR: Region-aware Difference Distilling with Attribute-guided Contrastive Regularization for Change Captioning
(Li et al., AAAI 2025).

Idea. (1) Each image attends to the bare difference of the two, which gives the global difference. (2) From it, a set of
learned vectors distils what concerns objects; from these, a second set distils the action: first the concrete, then the
abstract. The decoder reads all three, fused. (3) During training, the object vectors must resemble the caption's noun
phrases, and the action vectors its verb phrases, both encoded by CLIP and an adapter.

Eq. 1      ImageEmbedding      F_x = conv(features) + PE
Eq. 2      RDD.encode          F_diff = F_bef - F_aft
Eq. 3-5    GlobalDifference    F_c = W [F^_bef ; F^_aft], F^_x = LN(F_x + MHCA(F_x, F_diff))
Eq. 6-8    DistillingBlock     F_c^i = F_c^{i-1} + MHSA(F_c^{i-1}),  F_o^ = F_o^{i-1} + MHCA(F_o^{i-1}, F_c^i),
                               F_o^i = F_o^ + FFN(F_o^)
Eq. 9      Fusion              MF(F_c ; F_object ; F_action), joined along the tokens
Eq. 10-13  alignment_loss      L_N2O, L_V2A  InfoNCE of cosines, mean of the vectors <-> phrases
Eq. 14     Decoder.head        next word
Eq. 15     caption_loss        L_XE
Eq. 16     total_loss          L = L_XE + w_n2o L_N2O + w_v2a L_V2A

Table 4    direct-sub          --no-gde --order none --w_n2o 0 --w_v2a 0
           GDE                 --order none --w_n2o 0 --w_v2a 0
           GDE+N, GDE+V        --order n --w_v2a 0, --order v --w_n2o 0
           GDE+V&N, GDE+V+N    --order "v&n", --order v+n
           GDE+N+V             (none), the whole method
Table 5    losses              --w_n2o 0, --w_v2a 0, both, (none)
Table 6    prompts             --prompt none, fixed, learnable
Fig. 4     vectors             --object_vectors 32, --action_vectors 5

Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, V words of a caption (START, words, END,
padding), K object or action vectors, U distinct phrases, E width of CLIP's text space, P vectors of a prompt.

The authors' repository, github.com/guishiron/ACR, holds no code, and we do not have the supplement. If the paper is
silent or leaves two readings, the choice is marked [ours] where it is made. The main choice: the paper prints only
one residual, around the fully connected layer in Eq. 8, and no LayerNorm. With that alone every vector becomes a mean
of the same cells, and all K vectors start and stay alike. So Eq. 6 and 7 have residuals here, Eq. 6-8 are pre-norm, and
Eq. 4 has a residual and a LayerNorm, as DIRL+CCR's released code has, although the DIRL+CCR paper prints none either.
--no-residual takes Eq. 4 and Eq. 6-8 as printed.
To copy: this file and common.py. Training on a data set of data.py needs that file too, as do phrases and CLIP.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common import (
    END,
    NULL,
    Attention,
    GridPosition,
    Run,
    RunConfig,
    decode,
    initialise,
    load_model,
    mean_of,
    parse_args,
    run_main,
    saved_config,
    upcast,
    usable_device,
)

# ---- config ----------------------------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """RDD+ACR. The fields of a run (data, steps, device) are common.RunConfig's."""

    RANGES = RunConfig.RANGES | {"dropout": (0, 0.99), "tau": (0.001, 1000)}

    dim: int = 512  # width D of images, words and decoder
    word_dim: int = 300  # word embedding
    heads: int = 8  # heads of every attention
    decoder_layers: int = 2  # decoder layers
    dropout: float = 0.1  # dropout probability
    gde: bool = True  # Eq. 3-5; without it the bare difference is the global difference (direct-sub)
    order: Literal["none", "n", "v", "n+v", "v+n", "v&n"] = "n+v"  # n objects, v actions; +: chained, &: both from F_c
    distil_steps: int = 3  # N, distilling blocks for objects, and as many for actions (not in the paper)
    share_blocks: bool = True  # the N blocks are one block, applied N times ("with the same parameters")
    residual: bool = True  # residuals in Eq. 4, 6, 7 and LayerNorms in Eq. 4, 6-8; without: as printed
    object_vectors: int = 32  # K_o, number of object vectors
    action_vectors: int = 5  # K_a, number of action vectors
    w_n2o: float = 0.1  # weight of L_N2O in Eq. 16; 0 leaves it out (the paper gives neither weight nor tau)
    w_v2a: float = 0.1  # weight of L_V2A in Eq. 16; 0 leaves it out
    tau: float = 0.1  # temperature of Eq. 11-12
    equal_phrases: Literal["ignored", "negatives"] = "ignored"  # how the losses treat other pairs with the same phrase
    prompt: Literal["none", "fixed", "learnable"] = "learnable"  # what precedes each phrase
    prompt_tokens: int = 4  # P, vectors of a learnable prompt
    clip: str = "ViT-L-14:openai"  # text encoder: open_clip's MODEL:WEIGHTS (name or file), or mini (mini's own)
    clip_dim: int = 768  # E, width of CLIP's text space
    clip_width: int = 768  # width of CLIP's token embeddings, and of a learnable prompt
    blind: bool = False  # zero the features: what words alone can score


# K_a from section "Effect of Learnable Vectors Number". Batch, rate and drops are in the supplement; we take SCORER's
# [ours]. SCORER was not trained on LEVIR-CC, which takes Spot-the-Diff's batch and no drop.
PRESETS = {
    "clevr_change": dict(lr_drop=3975),
    "levir_cc": dict(action_vectors=10, batch_size=32),
    "spot_the_diff": dict(action_vectors=10, batch_size=32, lr_drop=4020),
    # Your own pairs are few: Spot-the-Diff's vectors, half its width; validation says when to stop [ours].
    "pairs": dict(action_vectors=10, dim=256, batch_size=16, lr=5e-4, warmup=50, steps=2000, eval_every=100,
                  patience=10),
    "mini": dict(dim=128, word_dim=128, heads=2, dropout=0.0, distil_steps=1, object_vectors=8, clip="mini",
                 clip_dim=128, clip_width=64, batch_size=16, lr=1e-3, schedule="cosine", warmup=50, grad_clip=1.0,
                 steps=1900, eval_every=950, eval_batch=250),
}  # fmt: skip

NOUN_PROMPT, VERB_PROMPT = "the objects that changed: ", "what happened: "  # prompt="fixed" [ours]

# ---- modules ---------------------------------------------------------------------------------------------------------


class ImageEmbedding(nn.Module):
    """Eq. 1: F_x = conv_1x1(features) + PE. (B, C, H, W) -> (B, N, D), cell n = row * W + column.

    [ours] Both images have the same positions, so Eq. 2 cancels them: F_bef and F_aft hold them, F_diff does not."""

    def __init__(self, cfg: Config, channels: int, height: int, width: int):
        super().__init__()
        self.conv, self.position = nn.Conv2d(channels, cfg.dim, 1), GridPosition(cfg.dim, height, width)

    def forward(self, features: Tensor) -> Tensor:
        return (self.conv(features) + self.position()).flatten(2).transpose(1, 2)


class GlobalDifference(nn.Module):
    """Eq. 3-5: F^_x = LN(F_x + MHCA(F_x, F_diff)), F_c = W [F^_bef ; F^_aft]. (B, N, D) three times -> (B, N, D).

    [ours] Eq. 5 joins channels, and a linear layer brings 2D back to D; one attention serves both images. Eq. 4 as
    printed (residual=False) is MHCA alone."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention, self.dropout = Attention(cfg.dim, cfg.heads, cfg.dropout), nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim) if cfg.residual else None
        self.join = nn.Linear(2 * cfg.dim, cfg.dim)

    def enrich(self, f_x: Tensor, f_diff: Tensor) -> Tensor:
        """Eq. 4: cells of one image and the difference (B, N, D) -> F^_x (B, N, D)."""
        attended = self.attention(f_x, f_diff)
        return self.norm(f_x + self.dropout(attended)) if self.norm else attended

    def forward(self, f_bef: Tensor, f_aft: Tensor, f_diff: Tensor) -> Tensor:
        return self.join(torch.cat([self.enrich(f_bef, f_diff), self.enrich(f_aft, f_diff)], -1))


class DistillingBlock(nn.Module):
    """Eq. 6-8: the source attends to itself, the vectors attend to the source, a fully connected layer.

    [ours] Pre-norm, and residuals in Eq. 6 and 7; as printed (residual=False) there is neither. The "FFN" is what the
    text calls it, one fully connected layer, without an activation."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention, self.cross_attention = (Attention(cfg.dim, cfg.heads, cfg.dropout) for _ in range(2))
        self.feed_forward, self.dropout = nn.Linear(cfg.dim, cfg.dim), nn.Dropout(cfg.dropout)
        norms = [nn.LayerNorm(cfg.dim) if cfg.residual else nn.Identity() for _ in range(4)]
        self.norm_source, self.norm_seen, self.norm_vectors, self.norm_out = norms
        self.residual = cfg.residual

    def forward(self, source: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Source (B, M, D), vectors (B, K, D) -> F_c^i (B, M, D), F_o^i (B, K, D), query (B, K, D) and key (B, M, D) of
        the cross-attention."""
        x = self.norm_source(source)
        x = self.dropout(self.self_attention(x, x))
        source = source + x if self.residual else x  # Eq. 6
        query, key, value = self.cross_attention.project(self.norm_vectors(vectors), self.norm_seen(source))
        x = self.dropout(self.cross_attention.attend(query, key, value))
        vectors = vectors + x if self.residual else x  # Eq. 7
        return source, vectors + self.dropout(self.feed_forward(self.norm_out(vectors))), (query, key)  # Eq. 8


class Distilled(NamedTuple):
    """K vectors, and the query and key of the last block's attention to the source (M tokens)."""

    vectors: Tensor  # (B, K, D)
    query: Tensor  # (B, K, D)
    key: Tensor  # (B, M, D)


class Distilling(nn.Module):
    """N blocks for K learned vectors, which are initialised from a Gaussian. source (B, M, D) -> Distilled; the source
    is F_c, or the vectors of another Distilling."""

    def __init__(self, cfg: Config, count: int):
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(count, cfg.dim))
        blocks = [DistillingBlock(cfg) for _ in range(1 if cfg.share_blocks else cfg.distil_steps)]
        self.blocks, self.steps = nn.ModuleList(blocks), cfg.distil_steps

    def forward(self, source: Tensor) -> Distilled:
        vectors = self.vectors.expand(len(source), -1, -1)
        for i in range(self.steps):
            source, vectors, (query, key) = self.blocks[i % len(self.blocks)](source, vectors)
        return Distilled(vectors, query, key)


class Fusion(nn.Module):
    """Eq. 9: self-attention and a fully connected layer, each with a residual, over all tokens (B, M, D) -> (B, M, D).
    [ours] Pre-norm, as in the distilling blocks, and a ReLU, without which the layer would be linear."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention, self.feed_forward = Attention(cfg.dim, cfg.heads, cfg.dropout), nn.Linear(cfg.dim, cfg.dim)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim), nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y))
        return x + self.dropout(F.relu(self.feed_forward(self.norm2(x))))


class DecoderLayer(nn.Module):
    """Post-norm decoder layer: words attend to earlier words, then to the differences, then a feed-forward of width 4D.

    x (B, V, D) -> (B, V, D). `cross`: key and value (B, M, D) of the differences; `past`: key and value of the words
    before x (decoding a word at a time), None when x starts with START. Also returns the new `past` and the query
    (B, V, D) that met the differences. [ours] Widths and number of layers, as in DIRL+CCR."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.hidden, self.output = nn.Linear(cfg.dim, 4 * cfg.dim), nn.Linear(4 * cfg.dim, cfg.dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(cfg.dim) for _ in range(3))
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, cross: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None = None):
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

    Every word sees itself and earlier words only, so padding at the end of a caption needs no mask. [ours] A LayerNorm
    follows words and positions, and matrices start Xavier-uniform, as in DIRL+CCR."""

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

    def memory(self, difference: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Key and value of the differences (B, M, D) for each layer: once a caption, not once a word."""
        return [(l.cross_attention.key(difference), l.cross_attention.value(difference)) for l in self.layers]

    def forward(self, ids: Tensor, difference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All words at once: (B, V) -> hidden states (B, V, D), and the last layer's query (B, V, D) and key (B, M, D)
        of the differences."""
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


class Attributes(NamedTuple):
    """The noun or verb phrases of B captions, before the adapter."""

    text: Tensor  # (B, E) by CLIP's text encoder
    valid: Tensor  # (B,) bool: the caption has such a phrase
    same: Tensor  # (B, B) bool: not negatives (equal phrases; if these count as negatives, a pair and itself)


class Phrases:
    """Section "Attribute-guided Tokens Generating", before the adapter: CLIP's text encoder reads the noun phrases of
    each training caption, joined by "and", and likewise its verb phrases. Used in training only: not part of the model
    or its checkpoint. [ours] CLIP is ViT-L/14, and frozen."""

    def __init__(self, cfg: Config, dataset):
        import data

        pairs = [p for scene in dataset.scenes["train"] for p in (*scene.pairs, *(scene.swapped or ()))]
        captions = sorted({c for p in pairs for c in p.captions})
        segments = data.read_captions(data.segments, dataset.name, captions)
        self.clip, tokenizer, _ = data.load_clip(cfg.clip, dataset.root, cfg.device)
        dim = self.clip.encode_text(tokenizer(["a cube"]).to(cfg.device)).shape[1]
        width = self.clip.token_embedding.embedding_dim
        if (cfg.clip_dim, cfg.clip_width) != (dim, width):
            raise ValueError(f"--clip {cfg.clip} needs --clip_dim {dim} --clip_width {width}")
        self.ignore_equal = cfg.equal_phrases == "ignored"
        noun_prompt, verb_prompt = (NOUN_PROMPT, VERB_PROMPT) if cfg.prompt == "fixed" else ("", "")
        self.phrase = {"nouns": {}, "verbs": {}}  # by caption; "" if it has none
        for caption, (nouns, verbs) in segments.items():
            self.phrase["nouns"][caption] = noun_prompt + " and ".join(nouns) if nouns else ""
            self.phrase["verbs"][caption] = verb_prompt + " and ".join(verbs) if verbs else ""
        unique = sorted({text for texts in self.phrase.values() for text in texts.values()} - {""})
        self.row = {text: i for i, text in enumerate(unique)} | {"": -1}
        tokens = tokenizer(unique)  # (U, context)
        self.tokens = tokens[:, : 1 + int(tokens.argmax(1).max())].to(cfg.device)  # the end token has the highest id
        self.encode_prompted = data.encode_prompted
        if cfg.compile and cfg.device.startswith("cuda"):  # dynamic: each batch has its own number of phrases
            self.encode_prompted = torch.compile(data.encode_prompted, fullgraph=True, dynamic=True)

    def encode(self, captions: list[str], prompts: dict[str, Tensor | None]) -> dict[str, Attributes]:
        """Attributes of the "nouns", the "verbs" or both of B captions. prompts: by kind, the learned prompt (P, width)
        to put in front, or None. CLIP runs once and encodes repeated phrases once."""
        rows = [torch.tensor([self.row[self.phrase[kind][c]] for c in captions]) for kind in prompts]
        unique = [r.clamp(min=0).unique(return_inverse=True) for r in rows]  # on the CPU: on a GPU this would stall
        sizes = [len(values) for values, _ in unique]
        learned = [p.expand(size, -1, -1) for p, size in zip(prompts.values(), sizes, strict=True) if p is not None]
        tokens = self.tokens[torch.cat([values for values, _ in unique]).to(self.tokens.device, non_blocking=True)]
        texts = self.encode_prompted(self.clip, tokens, torch.cat(learned) if learned else None).split(sizes)
        attributes = {}
        for kind, text, row, (_, place) in zip(prompts, texts, rows, unique, strict=True):
            row, place = (x.to(text.device, non_blocking=True) for x in (row, place))
            same = row[:, None] == row if self.ignore_equal else torch.eye(len(row), device=row.device) > 0
            attributes[kind] = Attributes(text[place], row >= 0, same)
        return attributes


# ---- losses ----------------------------------------------------------------------------------------------------------


def alignment_loss(vectors: Tensor, phrases: Tensor, valid: Tensor, same: Tensor, tau: float) -> Tensor:
    """Eq. 10-13, L_N2O or L_V2A: InfoNCE of cosines between the mean of a pair's vectors and its phrase, both ways.

    vectors (B, K, D), phrases (B, D) -> a scalar. [ours] Pairs without a phrase (valid (B,) is False) are not
    negatives, and count as 0 in the mean over all B pairs. [ours] Pairs with equal phrases (same (B, B)) are not
    negatives of each other: templates make many of them, and the loss would push apart what says the same. Synonyms
    ("is gone", "is missing") stay negatives: in a batch of 16 changed pairs of mini, 72 % of the pairs have one. All
    pairs without a change have one, so among these the loss stays at chance."""
    l, c = F.normalize(phrases, dim=-1), F.normalize(vectors.mean(1), dim=-1)  # Eq. 10
    s = l @ c.T / tau  # (B, B)
    partner = torch.eye(len(s), dtype=torch.bool, device=s.device)
    s = s.masked_fill((same | ~valid[:, None] | ~valid) & ~partner, float("-inf"))
    return (-(s.log_softmax(1).diagonal() + s.log_softmax(0).diagonal()) / 2 * valid).mean()  # Eq. 11-13


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 15, L_XE: cross-entropy of the next word, a mean over the words of each caption, then over the batch.
    logits (B, V, vocabulary) at words 0 ... V-1, caption (B, V) padded with NULL."""
    target = caption[:, 1:]
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), target, ignore_index=NULL, reduction="none")  # (B, V - 1)
    return (loss.sum(1) / (target != NULL).sum(1)).mean()


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Eq. 16: L = L_XE + lambda_1 L_N2O + lambda_2 L_V2A."""
    return losses["caption"] + cfg.w_n2o * losses.get("n2o", 0) + cfg.w_v2a * losses.get("v2a", 0)


# ---- method ----------------------------------------------------------------------------------------------------------


class RDD(nn.Module):
    """RDD+ACR and every parameter of it. grid: (C, H, W) of the features; max_len: ids of the longest caption."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg, self.grid, self.max_len = cfg, grid, max_len
        order = cfg.order.replace("none", "")
        if cfg.w_n2o and "n" not in order:
            raise ValueError(f"--order {cfg.order} has no object vectors for L_N2O; set --w_n2o 0")
        if cfg.w_v2a and "v" not in order:
            raise ValueError(f"--order {cfg.order} has no action vectors for L_V2A; set --w_v2a 0")
        self.embed = ImageEmbedding(cfg, *grid)
        self.difference = GlobalDifference(cfg) if cfg.gde else None
        self.objects = Distilling(cfg, cfg.object_vectors) if "n" in order else None
        self.actions = Distilling(cfg, cfg.action_vectors) if "v" in order else None
        self.fuse = Fusion(cfg) if order else nn.Identity()  # [ours] nothing to fuse in row GDE
        self.decoder = Decoder(cfg, vocab_size, max_len)
        if cfg.w_n2o or cfg.w_v2a:
            layers = nn.Linear(cfg.clip_dim, cfg.dim), nn.ReLU(), nn.Linear(cfg.dim, cfg.dim), nn.ReLU()
            self.adapter = nn.Sequential(*layers, nn.Linear(cfg.dim, cfg.dim))  # [ours] one for both nouns and verbs
        self.noun_prompt = self.verb_prompt = None
        if cfg.prompt == "learnable":  # [ours] CoOp's: one for all nouns, one for all verbs (CoCoOp: one per input)
            size = cfg.prompt_tokens, cfg.clip_width
            self.noun_prompt = nn.Parameter(0.02 * torch.randn(size)) if cfg.w_n2o else None
            self.verb_prompt = nn.Parameter(0.02 * torch.randn(size)) if cfg.w_v2a else None

    def encode(self, before: Tensor, after: Tensor) -> tuple[Tensor, dict[str, Distilled]]:
        """(B, C, H, W) twice -> what the decoder reads, and "objects" and "actions", if `order` has them. [ours] The
        decoder reads all N + K_o + K_a tokens of Eq. 9; in section "Caption Decoder" it reads HW tokens."""
        if self.cfg.blind:
            before, after = torch.zeros_like(before), torch.zeros_like(after)
        f_bef, f_aft = self.embed(before), self.embed(after)
        f_diff = f_bef - f_aft  # Eq. 2 [ours] as printed; the text above it subtracts "before" from "after"
        f_c = self.difference(f_bef, f_aft, f_diff) if self.difference else f_diff
        distilled = {}
        if self.cfg.order == "v+n":
            distilled["actions"] = self.actions(f_c)
            distilled["objects"] = self.objects(distilled["actions"].vectors)
        else:
            if self.objects:
                distilled["objects"] = self.objects(f_c)
            if self.actions:
                distilled["actions"] = self.actions(distilled["objects"].vectors if self.cfg.order == "n+v" else f_c)
        return self.fuse(torch.cat([f_c, *(x.vectors for x in distilled.values())], 1)), distilled

    def forward(self, before: Tensor, after: Tensor, caption: Tensor, nouns: Attributes | None = None,
                verbs: Attributes | None = None) -> dict[str, Tensor]:  # fmt: skip
        """The terms of Eq. 16 for one batch of pairs: features (B, C, H, W) twice, caption (B, V), its phrases."""
        if (self.cfg.w_n2o and nouns is None) or (self.cfg.w_v2a and verbs is None):
            raise ValueError("L_N2O needs nouns=, L_V2A verbs=, the captions' Attributes; or set w_n2o, w_v2a to 0")
        tokens, distilled = self.encode(before, after)
        hidden, _, _ = self.decoder(caption, tokens)
        losses = {"caption": caption_loss(self.decoder.head(hidden), caption)}
        with torch.autocast(caption.device.type, enabled=False):  # cosines over a small temperature want float32
            if self.cfg.w_n2o:
                objects, text = upcast(distilled["objects"].vectors), self.adapter(upcast(nouns.text))
                losses["n2o"] = alignment_loss(objects, text, nouns.valid, nouns.same, self.cfg.tau)
            if self.cfg.w_v2a:
                actions, text = upcast(distilled["actions"].vectors), self.adapter(upcast(verbs.text))
                losses["v2a"] = alignment_loss(actions, text, verbs.valid, verbs.same, self.cfg.tau)
        return losses

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor) -> Tensor:
        """Captions of pairs of features (B, C, H, W): greedy ids (B, max_len)."""
        step = self.decoder.stepper(self.encode(before, after)[0])
        return decode(step, len(before), self.max_len, before.device)

    @torch.no_grad()
    def attention_map(self, before: Tensor, after: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Maps (B, H, W) by name. "decoder": last layer's attention over cells, mean over heads and over the words of
        ids (B, V); row t is the state that predicts word t + 1. "objects" and "actions": attention of the last block,
        mean over heads and vectors; if it reads other vectors, its weights are multiplied by theirs to reach cells."""
        tokens, distilled = self.encode(before, after)
        _, query, key = self.decoder(ids, tokens)
        cells = key[:, : self.grid[1] * self.grid[2]]
        scores = self.decoder.layers[-1].cross_attention.scores(query, cells)  # (B, heads, V, N)
        weight = scores.softmax(-1).mean(1)[:, :-1]  # (B, V - 1, N)
        maps, through = {"decoder": mean_of(weight, ids[:, 1:] > END)}, None
        for name, (_, query, key) in distilled.items():
            attention = getattr(self, name).blocks[-1].cross_attention
            weight = attention.scores(query, key).softmax(-1).mean(1)  # (B, K, M)
            weight = weight if through is None else weight @ through  # (B, K, N)
            through = weight if "+" in self.cfg.order else None
            maps[name] = weight.mean(1)
        return {name: x.unflatten(1, self.grid[1:]) for name, x in maps.items()}


# ---- training --------------------------------------------------------------------------------------------------------


def losses_of(model: RDD, batches: tuple, cfg: Config, phrases: Phrases | None = None) -> dict[str, Tensor]:
    """Eq. 16 and its terms. The batches (changed pairs, distractor pairs of the same scenes) are one batch here: the
    negatives of Eq. 11-12 are "all other tokens in the batch"."""
    batches = [batch.to(cfg.device) for batch in batches]
    longest = max(batch.caption.shape[1] for batch in batches)
    caption = torch.cat([F.pad(batch.caption, (0, longest - batch.caption.shape[1])) for batch in batches])
    before, after = torch.cat([batch.before for batch in batches]), torch.cat([batch.after for batch in batches])
    texts = [text for batch in batches for text in batch.texts]
    with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.device.startswith("cuda")):
        prompts = {"nouns": model.noun_prompt} if cfg.w_n2o else {}
        prompts |= {"verbs": model.verb_prompt} if cfg.w_v2a else {}
        losses = model(before, after, caption, **(phrases.encode(texts, prompts) if prompts else {}))
    return losses | {"total": total_loss(losses, cfg)}


def train(cfg: Config, dataset, resume: bool = False) -> RDD:
    """Train on a data set (data.Dataset) into cfg.out_dir -> the best model by validation.

    Ctrl-C and SIGTERM save last.pt and exit 130 or 143; `resume` continues from there as if training had never
    stopped. FloatingPointError if a loss is not finite."""
    phrases = Phrases(cfg, dataset) if cfg.w_n2o or cfg.w_v2a else None
    torch.manual_seed(cfg.seed)
    model = RDD(cfg, len(dataset.vocab), dataset.grid, dataset.max_len).to(cfg.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=cfg.lr, fused=True)
    with Run(cfg, resume, model, optimizer, dataset) as run:
        for batches in run.steps(dataset):
            losses = losses_of(model, batches, cfg, phrases)
            optimizer.zero_grad()
            losses["total"].backward()
            if cfg.grad_clip:
                nn.utils.clip_grad_norm_(parameters, cfg.grad_clip)
            optimizer.step()
            run.end_step(losses, lambda: evaluate(model, dataset, "val", cfg))
    return run.best_model()


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(model: RDD, dataset, split: str, cfg: Config, out_dir: Path | None = None) -> dict[str, float]:
    """Caption a split of a data set (data.Dataset) -> the scores of all its pairs together.

    Without out_dir (validation while training) only the quick metrics; with it every metric and every group of pairs,
    printed and written with captions and sample pictures."""
    model.eval()
    captions, maps = {}, {}  # by pair id
    for batch in dataset.eval_batches(split, cfg.eval_batch):
        batch = batch.to(cfg.device)
        ids = model.generate(batch.before, batch.after)
        captions |= zip(batch.pair_ids, dataset.vocab.decode(ids), strict=True)
        if out_dir:
            batch_maps = model.attention_map(batch.before, batch.after, ids)
            maps |= {i: {name: m[b] for name, m in batch_maps.items()} for b, i in enumerate(batch.pair_ids)}
    model.train()
    return dataset.results(split, captions, maps, out_dir)


def load(checkpoint: str | Path, device: str = ""):
    """A trained model for any two pictures, files or PIL images: caption, maps = load("best.pt")(before, after)."""
    import data

    cfg = dataclasses.replace(saved_config(Config, checkpoint), device=usable_device(device))
    return data.Captioner(*load_model(RDD, cfg, checkpoint))


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption pictures."""
    import data

    cfg, args = parse_args(Config, PRESETS, Path(__file__).stem, __doc__, argv)
    if args.caption:
        return data.caption_files(data.Captioner(*load_model(RDD, cfg, args.checkpoint)), args.caption, args.out)
    dataset = data.open_dataset(cfg)
    if args.eval is None:
        model = train(cfg, dataset, args.resume)
    else:
        model, state = load_model(RDD, cfg, args.eval)
        dataset.check_state(state)
    evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir))


if __name__ == "__main__":
    run_main(main)
