"""RDD+ACR: Region-aware Difference Distilling with Attribute-guided Contrastive Regularization for
Change Captioning (Li et al., AAAI 2025).

A pair shows a scene before and after a change or, if it is a distractor, only another camera and
light. Unless two images are aligned perfectly, their difference is full of things that did not
change. So a few learned vectors distil from it what a caption needs: first the objects that changed
and then, from these, what happened to them, because concrete things are easier to grasp than
abstract ones. In training, a contrastive loss makes the first vectors resemble the caption's noun
phrases, and the second ones its verb phrases: for "the large red cube and the small ball are gone",
the texts "large red cube and small ball" and "are gone", read by CLIP behind a learned prompt.

The flow of one pair, with CLEVR-Change's sizes:
    before, after (1024, 14, 14) each
       v  embed, Eq. 1                       In training only, from the caption:
    f_bef, f_aft (196, 512) each             noun phrases         verb phrases
       v  f_diff = f_bef - f_aft, Eq. 2         v  after a prompt:   v  after a prompt:
       v  difference, Eq. 3-5                   v  CLIP, adapter     v  CLIP, adapter
    f_c (196, 512) -----------------+        f_noun (512)         f_verb (512)
       v  objects, Eq. 6-8          |           :                    :
    object vectors (32, 512) -------+ . . . . . : L_N2O, Eq. 10-13   :
       v  actions, Eq. 6-8          |                                :
    action vectors (5, 512) --------+ . . . . . . . . . . . . . . .  : L_V2A, Eq. 10-13
                                    v  fuse, Eq. 9
    fused (196 + 32 + 5 = 233, 512) and caption (24 ids)
       v  decoder, Eq. 14
    next word, L_XE, Eq. 15

Read first: GlobalDifference, DistillingBlock, Distilling, Fusion, encode_prompted, alignment_loss,
RDD.encode and .forward, compute_losses. Skip at first: Decoder, attention_map, and what else
follows RDD.

MHCA(x, y) is multi-head attention from x to y, MHSA(x) from x to x. R is the paper's number N of
passes. `source` is F_c^i or, for actions, the object vectors; `vectors` are F_object^i or
F_action^i; `fused` is F~_diff. [ours] marks what the paper leaves open, and our additions.
Equation  where             as printed                                   [ours]
Eq. 1     ImageEmbedding    F_x = encoder(I_x) + PE(x), x = bef, aft     encoder = conv(features)
Eq. 2     RDD.encode        F_diff = F_bef - F_aft
Eq. 3     common.Attention  softmax(q k^T / sqrt(d_k))                   times v, in each head
Eq. 4     GlobalDifference  F^_x = MHCA(F_x, F_diff)                     residual, LN
Eq. 5     GlobalDifference  F_c = [F^_bef ; F^_aft]                      W [F^_bef ; F^_aft]
Eq. 6     DistillingBlock   F_c^i = MHSA(F_c^{i-1})                      residual, LN
Eq. 7     DistillingBlock   F^_object^i = MHCA(F_object^{i-1}, F_c^i)    residual, LN
Eq. 8     DistillingBlock   F_object^i = FFN(F^_object^i) + F^_object^i  LN
Eq. 9     Fusion            F~_diff = MF(F_c; F_object^R; F_action^R)    LN, ReLU
Eq. 10    alignment_loss    F_o = mean of F_o^R over vectors             (o = object, action)
Eq. 11    alignment_loss    L_lo = -1/B sum_a log softmax_b(S)_aa,       equal phrases are no
                            S_ab = cos(F_l of a, F_o of b) / tau         negatives
Eq. 12    alignment_loss    L_ol: the same, with S^T in place of S       (l = noun, verb)
Eq. 13    alignment_loss    L_N2O or L_V2A = (L_lo + L_ol) / 2
Eq. 14    Decoder.head      P = softmax(W hidden + b)
Eq. 15    caption_loss      L_XE = -1/B sum over captions of 1/L sum over words of log P
Eq. 16    total_loss        L = L_XE + lambda_1 L_N2O + lambda_2 L_V2A   (w_n2o, w_v2a)
Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, L ids of a caption (START,
words, END, padding), V of the vocabulary, K vectors (K_o, K_a), M tokens attended to, P vectors of
a prompt, U different texts, T tokens of a text, d width of CLIP's text space.
To copy: this file and common.py; to train, also data.py, scores.py and support/.
Licence: MIT. The authors' repository (guishiron/ACR) holds no code.
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
    initialise,
    is_word,
    learning_rate,
    masked_mean,
    upcast,
)

# ---- config --------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """RDD+ACR. The settings of a run (data, steps, device) are in common.RunConfig. Numbers without
    [ours] are the paper's or CLIP's. PRESETS, below, has what differs between data sets."""

    dim: int = 512  # width D of images, words and decoder
    word_dim: int = 300  # width of word embeddings
    heads: int = 8  # heads of every attention [ours]
    decoder_layers: int = 2  # decoder layers [ours]
    dropout: float = 0.1  # dropout probability [ours]
    distil_steps: int = 3  # R, the paper's N: passes through a block in each distilling [ours]
    object_vectors: int = 32  # K_o, number of object vectors
    action_vectors: int = 5  # K_a, number of action vectors
    w_n2o: float = 0.1  # lambda_1, weight of L_N2O in Eq. 16; 0 leaves it out [ours]
    w_v2a: float = 0.1  # lambda_2, weight of L_V2A in Eq. 16; 0 leaves it out [ours]
    tau: float = 0.1  # temperature of Eq. 11-12 [ours]
    prompt_tokens: int = 4  # P, vectors of a learnable prompt
    clip: str = "ViT-L-14:openai"  # open_clip's MODEL:WEIGHTS (name or file) [ours], or mini
    clip_dim: int = 768  # d, width of CLIP's text space
    clip_width: int = 768  # width of CLIP's token embeddings and of a learnable prompt
    # Other forms; skip at first.
    gde: bool = True  # Global Difference Extraction, Eq. 3-5; off: F_c = F_diff (Table 4)
    order: Literal["none", "n", "v", "n+v", "v+n", "v&n"] = "n+v"  # n objects, v actions (Table 4)
    prompt: Literal["none", "fixed", "learnable"] = "learnable"  # what precedes phrases (Table 6)
    residual: bool = True  # add residuals and LayerNorms to Eq. 4 and 6-8 [ours]; off: as printed
    share_blocks: bool = True  # all passes use one block ("with the same parameters")
    equal_phrases: Literal["ignored", "negatives"] = "ignored"  # pairs with equal phrases [ours]


# ---- modules -------------------------------------------------------------------------------------


class ImageEmbedding(nn.Module):
    """Eq. 1: F_x = conv_1x1(features) + PE. (B, C, H, W) -> (B, N, D), cell n = row * W + column.

    [ours] A cell's position is the vector of its column followed by the vector of its row. Both
    images have the same positions, so these cancel in Eq. 2. F_diff does not say where a cell is,
    and Eq. 4 finds its cells by what they contain (docs/tour.md, "Positions")."""

    def __init__(self, cfg: Config, channels: int, height: int, width: int):
        super().__init__()
        self.grid = (channels, height, width)
        self.conv = nn.Conv2d(channels, cfg.dim, 1)
        self.position = GridPosition(cfg.dim, height, width)

    def forward(self, features: Tensor) -> Tensor:
        # Without this check, broadcasting would silently accept some wrong shapes.
        assert features.shape[1:] == self.grid, f"{self.grid} expected, {features.shape} found"
        x = self.conv(features) + self.position()  # Eq. 1
        return x.flatten(2).transpose(1, 2)  # (B, D, H, W) -> (B, N, D)


class GlobalDifference(nn.Module):
    """GDE, Eq. 3-5: F^_x = LN(F_x + MHCA(F_x, F_diff)), F_c = W [F^_bef ; F^_aft].

    A bare difference shows that something differs, but not what. So each cell of both images
    attends to all cells of F_diff. One attention serves both images.
    [ours] As printed, Eq. 4 has no residual. Then F^_x has values of F_diff alone, and the image
    only weighs them. With a residual, its own features go on. Residual and LayerNorm are those of
    DIRL+CCR's released code. Eq. 5 concatenates channels, and W maps 2D channels back to D."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.dropout = nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim)
        self.join = nn.Linear(2 * cfg.dim, cfg.dim)

    def forward(self, f_bef: Tensor, f_aft: Tensor, f_diff: Tensor) -> Tensor:
        """(B, N, D) three times -> F_c (B, N, D)."""
        enriched_bef = self.norm(f_bef + self.dropout(self.attention(f_bef, f_diff)))  # Eq. 3-4
        enriched_aft = self.norm(f_aft + self.dropout(self.attention(f_aft, f_diff)))  # Eq. 3-4
        return self.join(torch.cat([enriched_bef, enriched_aft], -1))  # Eq. 5


class DistillingBlock(nn.Module):
    """Eq. 6-8, one pass: the source attends to itself, the vectors attend to the source, and a
    linear layer follows. Eq. 6 lets a cell gather context from the others, and Eq. 7 lets each
    vector choose the cells that it needs.

    The FFN is "the fully connected layer", without an activation, because the text names none.
    [ours] "With residual connection" may mean one around each layer, so Eq. 6-7 have residuals,
    too, and LayerNorms come first."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.feed_forward = nn.Linear(cfg.dim, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.norm_source = nn.LayerNorm(cfg.dim)  # Eq. 6
        self.norm_seen = nn.LayerNorm(cfg.dim)  # keys and values of Eq. 7
        self.norm_vectors = nn.LayerNorm(cfg.dim)  # queries of Eq. 7
        self.norm_ffn = nn.LayerNorm(cfg.dim)  # Eq. 8

    def forward(self, source: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
        """source (B, M, D), vectors (B, K, D) -> both after Eq. 6-8, and the queries (B, K, D) and
        keys (B, M, D) of Eq. 7, for attention maps."""
        x = self.norm_source(source)
        source = source + self.dropout(self.self_attention(x, x))  # Eq. 6
        q, k, v = self.cross_attention.project(self.norm_vectors(vectors), self.norm_seen(source))
        vectors = vectors + self.dropout(self.cross_attention.attend(q, k, v))  # Eq. 7
        vectors = vectors + self.dropout(self.feed_forward(self.norm_ffn(vectors)))  # Eq. 8
        return source, vectors, q, k


class Distilled(NamedTuple):
    """K vectors, and the queries and keys with which they attended to M tokens in the last pass."""

    vectors: Tensor  # (B, K, D)
    q: Tensor  # (B, K, D)
    k: Tensor  # (B, M, D)


class Distilling(nn.Module):
    """K learned vectors, initially Gaussian with variance 1, distil a source in R passes through
    one shared block, or through R blocks. Here they become object vectors:

                  pass 1             pass 2                    pass R
        F_c ----> source ----------> source ----> ... -------> source            Eq. 6
                     v                  v                         v
        learned -> vectors --------> vectors ---> ... -------> object vectors    Eq. 7-8

    To make action vectors, another Distilling reads these object vectors in place of F_c."""

    def __init__(self, cfg: Config, count: int):
        super().__init__()
        self.steps = cfg.distil_steps
        self.share_blocks = cfg.share_blocks
        self.vectors = nn.Parameter(torch.randn(count, cfg.dim))
        Block = DistillingBlock if cfg.residual else PrintedBlock
        blocks = 1 if cfg.share_blocks else cfg.distil_steps
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(blocks))

    def forward(self, source: Tensor) -> Distilled:
        """source (B, M, D): F_c, or vectors of another Distilling."""
        vectors = self.vectors.expand(source.shape[0], -1, -1)  # (K, D) -> (B, K, D)
        for i in range(self.steps):
            block = self.blocks[0] if self.share_blocks else self.blocks[i]
            source, vectors, q, k = block(source, vectors)  # Eq. 6-8
        return Distilled(vectors, q, k)

    def attention(self, distilled: Distilled) -> Tensor:
        """Return the last pass's attention, averaged over heads (B, K, M)."""
        attention = self.blocks[-1].cross_attention
        return attention.scores(distilled.q, distilled.k).softmax(-1).mean(1)


class Fusion(nn.Module):
    """Eq. 9: self-attention and a fully connected layer, each with a residual, over all tokens
    (B, N + K_o + K_a, D). The cells of F_c stay beside the vectors, because a caption also needs
    what the vectors leave out. [ours] LayerNorms come first, and the layer has a ReLU."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.feed_forward = nn.Linear(cfg.dim, cfg.dim)
        self.norm1 = nn.LayerNorm(cfg.dim)
        self.norm2 = nn.LayerNorm(cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y))
        y = F.relu(self.feed_forward(self.norm2(x)))
        return x + self.dropout(y)  # Eq. 9


class DecoderLayer(nn.Module):
    """A post-norm layer of the decoder: words attend to earlier words and then to the fused tokens,
    and a feed-forward network follows. [ours] Its width and the number of layers are DIRL+CCR's."""

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

    def forward(self, x: Tensor, fused: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, L, D), fused tokens (B, M, D) -> the new x, and the words as they attend to the
        tokens, both (B, L, D)."""
        words = self.norm1(x + self.dropout(self.self_attention(x, x, causal=True)))
        seen = self.norm2(words + self.dropout(self.cross_attention(words, fused)))
        inner = self.dropout(F.relu(self.widen(seen)))
        return self.norm3(seen + self.dropout(self.output(inner))), words


class Decoder(nn.Module):
    """Words and fused tokens -> hidden states, from which `head` predicts the next words.

    A word sees only itself and earlier words, so padding at the end of a caption needs no mask.
    [ours] As in DIRL+CCR, a LayerNorm follows words plus positions, and matrices start
    Xavier-uniform."""

    def __init__(self, cfg: Config, vocab_size: int, max_len: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, cfg.word_dim)
        self.project = nn.Linear(cfg.word_dim, cfg.dim)
        self.position = nn.Embedding(max_len, cfg.dim)
        self.norm = nn.LayerNorm(cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.head = nn.Linear(cfg.dim, vocab_size)  # Eq. 14, without its softmax
        initialise(self, xavier=True)

    def forward(self, ids: Tensor, fused: Tensor) -> tuple[Tensor, Tensor]:
        """ids (B, L), fused tokens (B, M, D) -> hidden states, and the words as they attend to the
        tokens in the last layer, both (B, L, D)."""
        x = self.project(self.embed(ids)) + self.position.weight[: ids.shape[1]]
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x, words = layer(x, fused)
        return x, words


def encode_prompted(clip, tokens: Tensor, prompts: Tensor | None = None) -> Tensor:
    """CLIP's text encoder with P learned vectors between the start token and the words, as in CoOp.
    Without prompts it equals CLIP's encode_text.

    tokens (U, T) ids, prompts (U, P, width) -> (U, d). T may stop at the longest text's end token,
    because no token sees later ones. T + P is at most CLIP's context length (77 tokens)."""
    x = clip.token_embedding(tokens)  # (U, T, width)
    ends = tokens.argmax(1)  # the end token has the highest id
    if prompts is not None:
        x = torch.cat([x[:, :1], prompts, x[:, 1:]], 1)  # (U, T + P, width)
        ends = ends + prompts.shape[1]
    size = x.shape[1]
    x = x + clip.positional_embedding[:size]
    x = clip.transformer(x, attn_mask=clip.attn_mask[:size, :size])
    x = clip.ln_final(x)[torch.arange(x.shape[0], device=x.device), ends]  # (U, width)
    return x @ clip.text_projection


# ---- losses --------------------------------------------------------------------------------------


def alignment_loss(vectors: Tensor, f_l: Tensor, valid: Tensor, same: Tensor, tau: float) -> Tensor:
    """Eq. 10-13, L_N2O or L_V2A: InfoNCE of cosines between the mean of a pair's vectors and its
    phrase, in both directions. vectors (B, K, D), f_l (B, D) -> a scalar. Eq. 10 takes the mean,
    because a caption does not say which vector belongs to which word.

    [ours] A pair without a phrase (valid (B,) is False) is not a negative, and it counts as 0 in
    the mean over B. Pairs with equal phrases (same (B, B)), which templates often make, are not
    negatives of each other. Phrases that differ but mean the same ("is gone", "is missing") are.

    By hand, tau = 1: the vectors (1, 1), (1, -1) of pair a have the mean (1, 0), and (1, 1),
    (-1, 1) of pair b have the mean (0, 1). Phrases (2, 0) and (0, 3) have cosine 1 with their own
    mean and 0 with the other. Each of the four terms is -log(e / (e + 1)) = 0.313, and so is the
    loss. If b's phrase is (2, 0) as well, Eq. 11 has 0.313 for a and 1.313 for b, Eq. 12 has log 2
    = 0.693 for both, and the loss is 0.753, or 0 if equal phrases are not negatives."""
    # Cosines divided by a small temperature need float32.
    with torch.autocast(vectors.device.type, enabled=False):
        f_o = F.normalize(upcast(vectors).mean(1), dim=-1)  # Eq. 10
        f_l = F.normalize(upcast(f_l), dim=-1)
        s = f_l @ f_o.T / tau  # (B, B), phrases in rows
        partner = torch.eye(s.shape[0], dtype=torch.bool, device=s.device)
        no_negative = same | ~valid[:, None] | ~valid
        # Partners stay, so that the loss of a pair without negatives is 0.
        s = s.masked_fill(no_negative & ~partner, float("-inf"))
        # Like common.info_nce in both directions, but pairs without a phrase count as 0.
        l_lo = -s.log_softmax(1).diagonal()  # Eq. 11, (B,)
        l_ol = -s.log_softmax(0).diagonal()  # Eq. 12
        return ((l_lo + l_ol) / 2 * valid).mean()  # Eq. 13


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 15, L_XE: cross-entropy of the next word, averaged over each caption, then over the
    batch. logits (B, L, V) at words 0 ... L-1, caption (B, L) padded with NULL."""
    target = caption[:, 1:]
    scores = logits[:, :-1].transpose(1, 2)  # (B, V, L - 1)
    loss = F.cross_entropy(scores, target, ignore_index=NULL, reduction="none")  # (B, L - 1)
    words = (target != NULL).sum(1).clamp(min=1)  # so that a row of padding has loss 0, not NaN
    return (loss.sum(1) / words).mean()  # Eq. 15


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Eq. 16: L = L_XE + w_n2o L_N2O + w_v2a L_V2A, from the terms that RDD.forward returns.

    L_XE trains all but prompts and adapter. L_N2O and L_V2A each train a prompt, the adapter, and
    what makes their vectors; action vectors are made from object vectors. CLIP is frozen."""
    n2o = losses.get("n2o", 0)
    v2a = losses.get("v2a", 0)
    return losses["caption"] + cfg.w_n2o * n2o + cfg.w_v2a * v2a  # Eq. 16


# ---- method --------------------------------------------------------------------------------------


class Attributes(NamedTuple):
    """The noun phrases of B captions, or their verb phrases, read by CLIP (see Phrases.read),
    before the adapter."""

    text: Tensor  # (B, d) from CLIP's text encoder
    valid: Tensor  # (B,) bool: the caption has such a phrase
    same: Tensor  # (B, B) bool: the two are not negatives of each other


class RDD(nn.Module):
    """RDD+ACR with all its parameters. grid: (C, H, W) of the features; max_len: the length of the
    longest caption in tokens, START and END included."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg = cfg
        self.grid = grid
        self.max_len = max_len
        refuse_losses_without_vectors(cfg)
        self.embed = ImageEmbedding(cfg, *grid)
        if cfg.gde:  # off: an ablation
            self.difference = GlobalDifference(cfg) if cfg.residual else PrintedDifference(cfg)
        # Other orders may lack objects, actions or both. Without both, nothing is fused [ours].
        if cfg.order not in ("none", "v"):
            self.objects = Distilling(cfg, cfg.object_vectors)
        if cfg.order not in ("none", "n"):
            self.actions = Distilling(cfg, cfg.action_vectors)
        if cfg.order != "none":
            self.fuse = Fusion(cfg)
        self.decoder = Decoder(cfg, vocab_size, max_len)
        if cfg.w_n2o or cfg.w_v2a:
            # It has three layers, and serves nouns and verbs. ReLUs and width D are [ours].
            self.adapter = nn.Sequential(
                nn.Linear(cfg.clip_dim, cfg.dim),
                nn.ReLU(),
                nn.Linear(cfg.dim, cfg.dim),
                nn.ReLU(),
                nn.Linear(cfg.dim, cfg.dim),
            )
        # [ours] As in CoOp, one prompt for all noun phrases and one for all verb phrases. The paper
        # wants "different prompts for different segments", and also cites CoCoOp, which makes a
        # prompt for each input. We do not take this literally.
        self.noun_prompt = None
        self.verb_prompt = None
        size = (cfg.prompt_tokens, cfg.clip_width)
        if cfg.prompt == "learnable" and cfg.w_n2o:
            self.noun_prompt = nn.Parameter(0.02 * torch.randn(size))
        if cfg.prompt == "learnable" and cfg.w_v2a:
            self.verb_prompt = nn.Parameter(0.02 * torch.randn(size))

    def encode(
        self, before: Tensor, after: Tensor
    ) -> tuple[Tensor, Distilled | None, Distilled | None]:
        """before, after (B, C, H, W) -> fused tokens (B, N + K_o + K_a, D), first those of the N
        cells; objects; actions. In other orders, objects or actions may be None. [ours] The decoder
        reads all tokens of Eq. 9, although section "Caption Decoder" mentions only the HW cells."""
        # A batch of one would silently be broadcast.
        assert before.shape == after.shape, f"{before.shape} and {after.shape} are not pairs"
        f_bef = self.embed(before)  # Eq. 1
        f_aft = self.embed(after)  # Eq. 1
        # [ours] Eq. 2 as printed; the text above it subtracts "before" from "after".
        f_diff = f_bef - f_aft  # Eq. 2
        f_c = f_diff
        if self.cfg.gde:  # off: an ablation
            f_c = self.difference(f_bef, f_aft, f_diff)  # Eq. 3-5
        if self.cfg.order != "n+v":  # ablations
            return other_order(self, f_c)
        objects = self.objects(f_c)  # Eq. 6-8
        actions = self.actions(objects.vectors)  # Eq. 6-8
        # F_c itself: what Eq. 6 makes of it stays inside of Distilling.
        tokens = torch.cat([f_c, objects.vectors, actions.vectors], 1)
        return self.fuse(tokens), objects, actions  # Eq. 9

    def forward(
        self,
        before: Tensor,
        after: Tensor,
        caption: Tensor,
        nouns: Attributes | None = None,
        verbs: Attributes | None = None,
    ) -> dict[str, Tensor]:
        """before, after (B, C, H, W), caption (B, L) and, for L_N2O and L_V2A, the noun and the
        verb phrases of these captions -> the terms of Eq. 16, by name.

        On mini, with 67 ids and 32 pairs, "caption" starts at about 4.9 (a guess has ln 67 = 4.2),
        and falls to 0.6 in 500 steps; "n2o" and "v2a" start at 3.45 (ln 32 = 3.47), and fall to 2.7
        and 2.9. If these stay where they were, vectors do not tell the pairs of a batch apart. If
        "caption" ends as in a run with --blind, the decoder makes no use of the images."""
        cfg = self.cfg
        losses = {}
        fused, objects, actions = self.encode(before, after)  # Eq. 1-9
        hidden, _ = self.decoder(caption, fused)
        logits = self.decoder.head(hidden)  # Eq. 14
        losses["caption"] = caption_loss(logits, caption)  # Eq. 15
        if cfg.w_n2o:
            f_noun = self.adapter(nouns.text)
            n2o = alignment_loss(objects.vectors, f_noun, nouns.valid, nouns.same, cfg.tau)
            losses["n2o"] = n2o  # Eq. 10-13
        if cfg.w_v2a:
            f_verb = self.adapter(verbs.text)
            v2a = alignment_loss(actions.vectors, f_verb, verbs.valid, verbs.same, cfg.tau)
            losses["v2a"] = v2a  # Eq. 10-13
        return losses

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor) -> Tensor:
        """before, after (B, C, H, W) -> ids of greedy captions (B, max_len)."""
        fused, *_ = self.encode(before, after)

        def next_word(ids: Tensor) -> Tensor:
            hidden, _ = self.decoder(ids, fused)
            return self.decoder.head(hidden[:, -1])

        return decode(next_word, before.shape[0], self.max_len, before.device)

    @torch.no_grad()
    def attention_map(self, before: Tensor, after: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Maps (B, H, W) by name, which sum to 1. "decoder": the last layer's attention, averaged
        over heads and over the words of ids (B, L), with its softmax over the N cells only; without
        words it is 0. "objects", "actions": vector_attention, averaged over vectors."""
        _, height, width = self.grid
        fused, objects, actions = self.encode(before, after)
        cells = fused[:, : height * width]  # (B, N, D)
        _, words = self.decoder(ids, fused)
        attention = self.decoder.layers[-1].cross_attention
        q, k, _ = attention.project(words, cells)
        weight = attention.scores(q, k).softmax(-1).mean(1)  # (B, L, N)
        # Row t of the weights is from the state that predicts word t + 1.
        over_cells = masked_mean(weight[:, :-1], is_word(ids[:, 1:]))  # (B, N)
        maps = {"decoder": over_cells.unflatten(1, (height, width))}
        for name, weight in self.vector_attention(objects, actions).items():
            maps[name] = weight.mean(1).unflatten(1, (height, width))
        return maps

    def vector_attention(
        self, objects: Distilled | None, actions: Distilled | None
    ) -> dict[str, Tensor]:
        """Where the K "objects" and "actions" of `encode` look in their last pass, over cells.
        Each is (B, K, N).

        [ours] An action attends to objects, not to cells. Its map is a mean of the objects' maps,
        weighted by this attention. So by definition, actions look where objects look. The product
        of the two leaves out Eq. 6, by which cells, and then objects, have exchanged content."""
        if self.cfg.order != "n+v":  # ablations
            return other_vector_attention(self, objects, actions)
        over_cells = self.objects.attention(objects)  # (B, K_o, N)
        over_objects = self.actions.attention(actions)  # (B, K_a, K_o)
        return {"objects": over_cells, "actions": over_objects @ over_cells}


# ---- presets -------------------------------------------------------------------------------------

# K_a is from section "Effect of Learnable Vectors Number". The main text has no batch sizes, steps
# and rates, so we take SCORER's [ours]. As in its released code, the rate drops every 15 epochs (of
# 265 batches for CLEVR-Change, and 268 for Spot-the-Diff).
PRESETS = {
    "clevr_change": dict(steps=10000, batch_size=128, lr=2e-4, lr_drop=3975),
    # SCORER's paper does not use it. Steps and batch are Spot-the-Diff's; the rate does not drop.
    "levir_cc": dict(action_vectors=10, steps=10000, batch_size=32, lr=2e-4),
    "spot_the_diff": dict(action_vectors=10, steps=10000, batch_size=32, lr=2e-4, lr_drop=4020),
    # [ours] Your own pairs are usually few: half the width, SCORER's schedule, Spot-the-Diff's K_a.
    "pairs": dict(action_vectors=10, dim=256, batch_size=16, lr=5e-4, schedule="cosine", warmup=50,
                  grad_clip=1.0, steps=2000, eval_every=1000, select_by="ROUGE-L"),
    # [ours] The scenes are simple, so it distils once, and few vectors are enough.
    "mini": dict(dim=128, word_dim=128, heads=2, dropout=0.0, distil_steps=1, object_vectors=8,
                 clip="mini", clip_dim=128, clip_width=64, batch_size=16, lr=1e-3,
                 schedule="cosine", warmup=50, grad_clip=1.0, steps=1900, eval_every=300,
                 eval_batch=250),
}  # fmt: skip

# RDD+ACR in the paper's tables, which a run prints below its scores
PUBLISHED = {
    "clevr_change": {  # Table 1
        "total": {"BLEU-4": 56.1, "METEOR": 41.3, "ROUGE-L": 75.0, "CIDEr": 128.1, "SPICE": 33.5}},
    "levir_cc": {  # Table 2
        "total": {"BLEU-4": 65.6, "METEOR": 40.3, "ROUGE-L": 75.5, "CIDEr": 138.3}},
    "spot_the_diff": {  # Table 3
        "total": {"BLEU-4": 9.2, "METEOR": 13.9, "ROUGE-L": 31.0, "CIDEr": 43.6}},
}  # fmt: skip

# ---- training ------------------------------------------------------------------------------------


def compute_losses(
    model: RDD, batches: tuple, cfg: Config, phrases: "Phrases | None" = None
) -> dict[str, Tensor]:
    """Eq. 16 and its terms. In CLEVR-Change and mini, a step has a batch of changed pairs and one
    of the same scenes' distractor pairs. They become one batch, because the negatives of Eq. 11-12
    are "all other tokens in the batch". A scene's two pairs are (before, after) and (before,
    distractor) or, in half of the scenes of an epoch, (distractor, after) and (distractor, before)
    [ours, as in SCORER]. That they share an image does no harm, because the loss does not compare
    images with images."""
    batches = [batch.to(cfg.device) for batch in batches]
    before = torch.cat([batch.before for batch in batches])
    after = torch.cat([batch.after for batch in batches])
    caption = torch.cat([batch.caption for batch in batches])
    texts = []
    for batch in batches:
        texts += batch.texts
    nouns = None
    verbs = None
    with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.on_cuda):
        if cfg.w_n2o:
            nouns = phrases.read("nouns", texts, model.noun_prompt)
        if cfg.w_v2a:
            verbs = phrases.read("verbs", texts, model.verb_prompt)
        losses = model(before, after, caption, nouns, verbs)
    losses["total"] = total_loss(losses, cfg)  # Eq. 16
    return losses


def train(
    cfg: Config, dataset, resume: bool = False, phrases: "Phrases | None" = None
) -> tuple[RDD, dict]:
    """Train on a data set (data.Dataset) into cfg.out_dir -> the best model by validation, and its
    checkpoint. phrases: the phrases of its training captions, unless w_n2o and w_v2a are 0.
    `resume` continues from last.pt (see Run) as if training had never stopped.
    FloatingPointError if a loss is not finite."""
    from support.run import Run

    torch.manual_seed(cfg.seed)
    model = RDD(cfg, len(dataset.vocab), dataset.grid, dataset.max_len).to(cfg.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, fused=True)
    if cfg.compile and cfg.on_cuda:
        model.compile(fullgraph=True, dynamic=False)
    run = Run(cfg, model, [dataset], resume)
    run.start(optimizer)
    for batches in dataset.train_batches(cfg.batch_size, cfg.seed, run.step, cfg.steps):
        if run.is_over():
            break
        optimizer.param_groups[0]["lr"] = learning_rate(cfg, run.step)
        losses = compute_losses(model, batches, cfg, phrases)
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
    model: RDD, dataset, split: str, cfg: Config, out_dir: Path | None = None, state=None
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

    return load_captioner(RDD, Config, checkpoint, device, extractor)


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption pictures."""
    import data
    from support.captioner import caption_files
    from support.releases import all_presets
    from support.run import load_model, parse_args

    cfg, args = parse_args(Config, all_presets(PRESETS), {}, argv)
    if args.caption:
        captioner = load(args.checkpoint, cfg.device, cfg.extractor)
        caption_files(captioner, args.caption, args.out)
        return
    dataset = data.open_dataset(cfg, make=args.eval is None)
    if args.eval is not None:
        model, state = load_model(RDD, cfg, args.eval)
        dataset.adopt(state)
    else:
        phrases = phrases_of(dataset, cfg)
        model, state = train(cfg, dataset, args.resume, phrases)
    if args.split != "none":
        evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir), state)


# ---- phrases -------------------------------------------------------------------------------------

NOUN_PROMPT = "the objects that changed: "  # prompt="fixed" [ours]
VERB_PROMPT = "what happened: "


class Phrases:
    """The noun and verb phrases of all training captions, and the CLIP that reads them: section
    "Attribute-guided Tokens Generating", up to the adapter. Only training needs this class, and no
    checkpoint contains it. [ours] CLIP is ViT-L/14, and frozen.

    clip: an open_clip.CLIP, frozen, on cfg.device; tokenizer: texts -> ids (U, context);
    readings: caption -> (noun phrases, verb phrases), for every training caption. An example:

        phrases = Phrases(cfg, clip, tokenizer, {"the cube is gone": (["cube"], ["is gone"])})
        nouns = phrases.read("nouns", ["the cube is gone"], model.noun_prompt)
        verbs = phrases.read("verbs", ["the cube is gone"], model.verb_prompt)
        losses = model(before, after, ids, nouns, verbs)"""

    def __init__(self, cfg: Config, clip, tokenizer, readings: dict[str, tuple]):
        self.clip = clip
        self.equal_phrases = cfg.equal_phrases
        noun_prefix = ""
        verb_prefix = ""
        if cfg.prompt == "fixed":
            noun_prefix = NOUN_PROMPT
            verb_prefix = VERB_PROMPT
        nouns = {}  # caption -> the text that CLIP reads
        verbs = {}
        for caption, (noun_phrases, verb_phrases) in readings.items():
            nouns[caption] = noun_prefix + " and ".join(noun_phrases)
            verbs[caption] = verb_prefix + " and ".join(verb_phrases)
        texts = sorted({*nouns.values(), *verbs.values()})
        row_of = {text: row for row, text in enumerate(texts)}
        self.rows = {  # kind -> caption -> row of self.tokens and self.valid
            "nouns": {caption: row_of[text] for caption, text in nouns.items()},
            "verbs": {caption: row_of[text] for caption, text in verbs.items()},
        }
        valid = [text not in (noun_prefix, verb_prefix) for text in texts]
        self.valid = torch.tensor(valid, device=cfg.device)
        tokens = tokenizer(texts)  # (number of texts, context)
        longest = 1 + int(tokens.argmax(1).max())  # the end token has the highest id
        # Padding after it would cost time and leave less room for a learnable prompt.
        self.tokens = tokens[:, :longest].to(cfg.device)

    def read(self, kind: str, captions: list[str], prompt: Tensor | None) -> Attributes:
        """The "nouns" or "verbs" of B captions, after a learned prompt (P, clip_width) or None. It
        stands outside of RDD.forward, whose shapes are fixed, because U differs in each step."""
        rows = torch.tensor([self.rows[kind][caption] for caption in captions])
        distinct, place = rows.unique(return_inverse=True)  # equal phrases are encoded once
        device = self.tokens.device
        # Copies that block would wait for all that the GPU has still to do.
        distinct = distinct.to(device, non_blocking=True)
        place = place.to(device, non_blocking=True)
        rows = rows.to(device, non_blocking=True)
        tokens = self.tokens[distinct]  # (U, T)
        if prompt is not None:
            prompt = prompt.expand(len(tokens), -1, -1)  # (U, P, clip_width)
        text = encode_prompted(self.clip, tokens, prompt)[place]  # (B, d)
        same = rows[:, None] == rows
        if self.equal_phrases == "negatives":
            same = torch.eye(len(rows), dtype=torch.bool, device=device)
        return Attributes(text, self.valid[rows], same)


def phrases_of(dataset, cfg: Config) -> Phrases | None:
    """Make Phrases of a data set's training captions (data.Dataset); None if no loss needs them.
    InputError if --clip does not fit.

    The paper uses "spaCy [...] to extract all noun and verb segments" (section ACR). [ours] Rules
    read captions from templates (mini, CLEVR-Change, CLEVR-DC), on which spaCy often errs."""
    from support.extractors import load_clip
    from support.text import read_captions, segments

    if not (cfg.w_n2o or cfg.w_v2a):
        return None
    captions = sorted(set(dataset.captions(["train"])))
    readings = read_captions(segments, captions, dataset.settings.templates)
    clip, tokenizer, _ = load_clip(cfg.clip, cfg.device)
    # Only some CLIPs have the parts that encode_prompted uses.
    if getattr(clip, "text_pool_type", None) != "argmax":
        raise InputError(f"--clip {cfg.clip} takes no learned prompts; choose one like ViT-L-14")
    width = clip.token_embedding.embedding_dim
    dim = encode_prompted(clip, tokenizer(["a cube"]).to(cfg.device)).shape[1]
    if (cfg.clip_dim, cfg.clip_width) != (dim, width):
        raise InputError(f"--clip {cfg.clip} needs --clip_dim {dim} --clip_width {width}")
    return Phrases(cfg, clip, tokenizer, readings)


# ---- other forms ---------------------------------------------------------------------------------


class PrintedDifference(nn.Module):
    """Eq. 4 as printed, without a residual and a LayerNorm: F^_x = MHCA(F_x, F_diff)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.join = nn.Linear(2 * cfg.dim, cfg.dim)

    def forward(self, f_bef: Tensor, f_aft: Tensor, f_diff: Tensor) -> Tensor:
        enriched_bef = self.attention(f_bef, f_diff)  # Eq. 3-4
        enriched_aft = self.attention(f_aft, f_diff)  # Eq. 3-4
        return self.join(torch.cat([enriched_bef, enriched_aft], -1))  # Eq. 5


class PrintedBlock(nn.Module):
    """Eq. 6-8 as printed: only Eq. 8 has a residual, and there are no LayerNorms. Eq. 7 replaces
    each vector by a weighted mean of cells. At the start attention is nearly uniform, so all K
    vectors become alike, and training on mini hardly changes this (docs/controls.md)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.feed_forward = nn.Linear(cfg.dim, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, source: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
        source = self.dropout(self.self_attention(source, source))  # Eq. 6
        q, k, v = self.cross_attention.project(vectors, source)
        vectors = self.dropout(self.cross_attention.attend(q, k, v))  # Eq. 7
        vectors = vectors + self.dropout(self.feed_forward(vectors))  # Eq. 8
        return source, vectors, q, k


def refuse_losses_without_vectors(cfg: Config) -> None:
    """InputError if a loss needs vectors that the order does not have."""
    if cfg.w_n2o and cfg.order in ("none", "v"):
        raise InputError(f"--order {cfg.order} has no object vectors for L_N2O; set --w_n2o 0")
    if cfg.w_v2a and cfg.order in ("none", "n"):
        raise InputError(f"--order {cfg.order} has no action vectors for L_V2A; set --w_v2a 0")


def other_order(model: RDD, f_c: Tensor) -> tuple[Tensor, Distilled | None, Distilled | None]:
    """The end of RDD.encode in the other orders of Table 4, from F_c (B, N, D): no vectors, objects
    (n) or actions (v) alone, both from F_c (v&n), or objects from actions (v+n)."""
    if model.cfg.order == "none":
        return f_c.contiguous(), None, None  # in memory like the others, which torch.cat makes
    if model.cfg.order == "n":
        objects = model.objects(f_c)
        return model.fuse(torch.cat([f_c, objects.vectors], 1)), objects, None
    if model.cfg.order == "v":
        actions = model.actions(f_c)
        return model.fuse(torch.cat([f_c, actions.vectors], 1)), None, actions
    if model.cfg.order == "v&n":
        objects = model.objects(f_c)
        actions = model.actions(f_c)
    else:
        actions = model.actions(f_c)
        objects = model.objects(actions.vectors)
    return model.fuse(torch.cat([f_c, objects.vectors, actions.vectors], 1)), objects, actions


def other_vector_attention(model: RDD, objects, actions) -> dict[str, Tensor]:
    """RDD.vector_attention in these orders, for what other_order returns."""
    weights = {}
    if objects is not None:
        weights["objects"] = model.objects.attention(objects)
    if actions is not None:
        weights["actions"] = model.actions.attention(actions)
    if model.cfg.order == "v+n":
        weights["objects"] = weights["objects"] @ weights["actions"]
    return weights


if __name__ == "__main__":
    from support.files import run_main

    run_main(main)
