"""SCORER+CBR: Self-supervised Cross-view Representation Reconstruction for Change Captioning (Tu et al., ICCV 2023).

Idea. (1) A contrastive loss over token-wise matches makes the two images of a pair alike under camera and light, and
unlike other pairs. (2) Each image then reconstructs what did not change out of the other by cross-attention; image plus
reconstruction, fused, is what the decoder describes. (3) Backward reasoning: "before" plus the sentence must give
back "after", so the sentence has to tell the difference.

Eq. 1      ImageEmbedding     X = conv(features) + position
Eq. 2-3    similarity         mean over tokens of the best match, both ways (MTM, TM, pooled)
Eq. 4      match_loss         L_cv  InfoNCE, before -> after and after -> before
Eq. 5-6    CrossView          X <- LN(X + MHCA(X, partner))
Eq. 7      SCORER.fuse        C = ReLU(W [X_bef ; X_aft])
Eq. 8      Decoder            transformer decoder over C
Eq. 9-10   BackwardReasoning  hallucination = MHSA(W [X_bef ; sentence])
Eq. 11     cbr_loss           L_cm  InfoNCE, hallucination <-> after
Eq. 12     caption_loss       L_cap
Eq. 13     train              L = L_cap + w_match L_cv + w_cbr L_cm

Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, V words of a caption (START, words, END, padding).

Where paper and released code differ, the default is the paper and RELEASED below names each difference; both readings
share what only the code tells: matching with a learned, clamped temperature and tokens neither scaled nor normalised,
attention without output projection, a feed-forward of width D, initialisation, and the learning rate's two drops.
To copy: this file, common.py and data.py (the model takes only the special ids START, END and UNK from data.py).
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:  # read when torch loads: idle threads sleep, after a moment, on a busy laptop
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}

import math
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
    full,
    info_nce,
    learning_rate,
    load_checkpoint,
    load_model,
    pair_picture,
    parse_args,
    run_main,
    sample_sheet,
    sinusoid,
    token_match,
    training_batches,
)

# ---- config ----------------------------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """SCORER+CBR. The fields of a run (data, steps, device) are common.RunConfig's."""

    dim: int = 512  # width D of images, words and decoder
    word_dim: int = 300  # word embedding
    heads: int = 8  # heads of every attention, and of the matching in "mtm"
    layers: int = 2  # cross-view layers (Eq. 5-6)
    decoder_layers: int = 2  # decoder layers
    dropout: float = 0.1  # dropout probability
    use_coords: bool = True  # append the cell's x and y to the features (the field's 1026 channels)
    near_identity: bool = False  # start cross-view attention as a comparison of like cells (mini; not the paper's)
    decoder_init: Literal["bert", "pytorch"] = "bert"  # weights N(0, .02) as released, or PyTorch's (mini)
    w_match: float = 0.1  # weight of L_cv in Eq. 13; 0 leaves plain reconstruction (RR)
    w_cbr: float = 0.001  # weight of L_cm in Eq. 13; 0 leaves CBR out
    difference: Literal["reconstruct", "subtract"] = "reconstruct"  # Eq. 5-7, or the bare difference of the two images
    fusion: Literal["cat", "sum", "hadamard"] = "cat"  # how Eq. 7 joins the two images
    matching: Literal["mtm", "tm", "mean", "max"] = "mtm"  # similarity: Eq. 3, Eq. 2, or dot product of pooled images
    match_heads: Literal["summed", "per_head"] = "summed"  # mtm: add heads, then find the best match (= tm); or each apart
    match_layer: Literal["first", "last"] = "first"  # match before images attend to each other, or in the last layer
    train_cbr: bool = True  # the released code leaves CBR's parameters as they were drawn
    sentence_mean: Literal["words", "padded"] = "words"  # CBR's sentence: mean over real words, or sum / longest caption
    ffn_residual: Literal["input", "activation"] = "input"  # what a decoder feed-forward's output is added to
    val_decode: Literal["greedy", "sample"] = "greedy"  # how validation captions, which choose best.pt, are written
    blind: bool = False  # zero the features: what words alone can score


# Papers' settings; layers, weights, batch and rate from sections 4.1, 4.5 and 6.1-6.2; drops after 15 and 30 epochs.
PRESETS = {
    "clevr_change": dict(lr_drop=3975),
    "clevr_dc": dict(layers=1, w_match=0.01, w_cbr=0.004, lr_drop=4785, use_coords=False),
    "spot_the_diff": dict(layers=3, w_match=0.3, w_cbr=0.5, batch_size=32, lr_drop=4020, use_coords=False),
    "image_editing_request": dict(w_match=0.003, w_cbr=0.06, batch_size=16, lr=1e-4, lr_drop=2880, use_coords=False),
    "mini": dict(dim=128, word_dim=128, heads=4, layers=1, dropout=0.0, near_identity=True, decoder_init="pytorch",
                 batch_size=16, lr=2e-3, schedule="cosine", warmup=50, grad_clip=1.0, steps=2400, eval_every=800,
                 eval_batch=250),
    "mini@cuda": dict(data_dir="data/mini_large", scenes=10000, objects="3,6", steps=15000, eval_every=2500),
}  # fmt: skip
PRESETS["mini_dc"] = PRESETS["mini"] | dict(batch_size=32)  # a scene is one pair here, not two

RELEASED = dict(  # the released code's side of every disputed detail: --reading released
    match_heads="summed",  # Eq. 3 asks for a match in each head; the release contracts heads and channels together
    match_layer="last",  # section 3.2.2 matches encoded images; the last layer's have seen their partner already
    train_cbr=False,  # section 3.5 trains end to end; CBR is missing from the release's optimiser
    sentence_mean="padded",  # section 3.4 says mean; the release divides by the longest caption's length
    ffn_residual="activation",  # a standard decoder adds the sub-layer's input; the release adds its hidden activation
    val_decode="sample",  # section 4.3 decodes greedily; the release samples during validation
)

# ---- modules ---------------------------------------------------------------------------------------------------------


class ImageEmbedding(nn.Module):
    """Eq. 1: X = conv_1x1(features) + position. (B, C, H, W) -> (B, N, D), cell n = row * W + column."""

    def __init__(self, channels: int, height: int, width: int, dim: int, use_coords: bool):
        super().__init__()
        self.conv = nn.Conv2d(channels + 2 * use_coords, dim, 1)
        self.position = GridPosition(dim, height, width)
        x, y = torch.arange(width) * 2 / width - 1, torch.arange(height) * 2 / height - 1  # -1 up to, not including, 1
        coords = torch.stack([x.expand(height, -1), y[:, None].expand(-1, width)]) if use_coords else None
        self.register_buffer("coords", coords, persistent=False)  # (2, H, W): x, then y

    def forward(self, features: Tensor) -> Tensor:
        """Features of either image -> its cells."""
        if self.coords is not None:
            features = torch.cat([features, self.coords.to(features.dtype).expand(len(features), -1, -1, -1)], 1)
        return (self.conv(features) + self.position()).flatten(2).transpose(1, 2)


class CrossView(nn.Module):
    """Eq. 5-6, one layer for both directions: X_bef <- LN(X_bef + MHCA(X_bef, X_aft)), X_aft likewise, from the old pair.

    pair (2B, N, D), the "before" images first -> the new pair, and query, key (2B, N, D) for matching (Eq. 2)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout, out_proj=False)
        self.norm = nn.LayerNorm(cfg.dim, eps=1e-6)

    def forward(self, pair: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each image attends to its partner, half the batch away."""
        partner = pair.roll(len(pair) // 2, 0)
        q, k, v = self.attention.project(pair, partner)
        return self.norm(pair + self.attention.attend(q, k, v)), q, k


class DecoderLayer(nn.Module):
    """Post-norm decoder layer: words attend to earlier words, then to the difference, then a feed-forward.

    x (B, V, D) -> (B, V, D). `cross`: key and value (B, N, D) of the difference; `past`: key and value of the words
    before x (decoding a word at a time), None when x starts with START. Also returns the new `past` and the query that
    met the difference."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout, out_proj=False)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout, out_proj=False)
        self.hidden, self.output = nn.Linear(cfg.dim, cfg.dim), nn.Linear(cfg.dim, cfg.dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(cfg.dim, eps=1e-6) for _ in range(3))
        self.dropout, self.add_input = nn.Dropout(cfg.dropout), cfg.ffn_residual == "input"

    def forward(self, x: Tensor, cross: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None = None):
        """-> words (B, V, D), `past` with these words, query (B, V, D)."""
        q, k, v = self.self_attention.project(x, x)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        a = self.norm1(x + self.self_attention.attend(q, k, v, causal=past is None))
        query = self.cross_attention.query(a)
        c = self.norm2(a + self.cross_attention.attend(query, *cross))
        g = F.gelu(self.hidden(c))
        y = self.norm3(self.dropout(self.output(g)) + (c if self.add_input else g))
        return y, (k, v), query


class Decoder(nn.Module):
    """Eq. 8: words and difference -> hidden states; `head` gives the distribution of the next word.

    Every word sees itself and earlier words only, so padding at the end of a caption needs no mask."""

    def __init__(self, cfg: Config, vocab_size: int, max_len: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, cfg.word_dim)
        self.register_buffer("position", sinusoid(max_len, cfg.word_dim), persistent=False)
        self.project, self.norm = nn.Linear(cfg.word_dim, cfg.dim), nn.LayerNorm(cfg.dim, eps=1e-6)
        self.dropout = nn.Dropout(cfg.dropout)
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.head = nn.Linear(cfg.dim, vocab_size)
        for m in self.modules() if cfg.decoder_init == "bert" else ():  # as released; the encoder keeps PyTorch's
            if isinstance(m, nn.Linear | nn.Embedding):
                nn.init.normal_(m.weight, std=0.02)
            if isinstance(m, nn.Linear):
                nn.init.zeros_(m.bias)

    def words(self, ids: Tensor, start: int = 0) -> Tensor:
        """(B, V) ids at positions start, start + 1, ... -> (B, V, D)."""
        x = self.embed(ids) + self.position[start : start + ids.shape[1]]
        return self.norm(self.dropout(self.project(x)))

    def memory(self, difference: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Key and value of the difference (B, N, D) for each layer: once a caption, not once a word."""
        return [(l.cross_attention.key(difference), l.cross_attention.value(difference)) for l in self.layers]

    def forward(self, ids: Tensor, difference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All words at once: (B, V) -> hidden states (B, V, D), and the query (B, V, D) and key (B, N, D) with which the
        last layer looked at the difference."""
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


class BackwardReasoning(nn.Module):
    """Eq. 9-10: what "after" should look like, from "before" and the sentence:
    X_hat = W_2 MHSA(W_1 [X_bef ; s]) with the sentence s set beside every cell. (B, N, D), (B, D) -> (B, N, D)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.join, self.output = nn.Linear(2 * cfg.dim, cfg.dim), nn.Linear(cfg.dim, cfg.dim)
        self.attention = Attention(cfg.dim, cfg.heads, bias=False)
        for m in (self.attention.query, self.attention.key, self.attention.value):
            nn.init.xavier_uniform_(m.weight, gain=0.5**0.5)  # as of one matrix (3D, D), like nn.MultiheadAttention
        self.query, self.key = nn.Linear(cfg.dim, cfg.dim), nn.Linear(cfg.dim, cfg.dim)
        self.log_scale = nn.Parameter(torch.ones(()))

    def forward(self, x_bef: Tensor, sentence: Tensor) -> Tensor:
        """X_bef (B, N, D) and the sentence (B, D) -> X_hat (B, N, D)."""
        of_image, of_sentence = self.join.weight.chunk(2, 1)  # W [x ; s] = W_x x + W_s s: s is multiplied once, not N times
        x = F.linear(x_bef, of_image, self.join.bias) + F.linear(sentence, of_sentence)[:, None]
        return self.output(self.attention(x, x))


# ---- losses ----------------------------------------------------------------------------------------------------------


def similarity(q: Tensor, k: Tensor, matching: str, heads: int) -> Tensor:
    """Eq. 2-3, image a to image b: q (A, N, D), k (B, M, D) -> (A, B). With "mean" or "max" (Fig. 3) the tokens are
    pooled first and the images compared by one dot product. Not in bfloat16: scores near 50 differ by tenths."""
    with torch.autocast(q.device.type, enabled=False):
        q, k = full(q), full(k)
        if matching in ("mtm", "tm"):
            return token_match(q, k, heads)
        pooled = [x.mean(1) if matching == "mean" else x.amax(1) for x in (q, k)]
        return pooled[0] @ pooled[1].T


def match_loss(bef_to_aft: Tensor, aft_to_bef: Tensor) -> Tensor:
    """Eq. 4, L_cv: InfoNCE over the rows of both similarity matrices (B, B). They are two matrices and not one and its
    transpose: queries and keys are projected differently."""
    return (info_nce(bef_to_aft) + info_nce(aft_to_bef)) / 2


def cbr_loss(hat_to_aft: Tensor) -> Tensor:
    """Eq. 11, L_cm: InfoNCE over rows and columns of the similarity (B, B) of hallucinations to "after" images."""
    return (info_nce(hat_to_aft) + info_nce(hat_to_aft.T)) / 2


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 12, L_cap: cross-entropy of each next word, a mean over all real words of the batch.
    logits (B, V, vocabulary) at words 0 ... V-1, caption (B, V) padded with 0."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), caption[:, 1:].flatten(), ignore_index=0)


# ---- method ----------------------------------------------------------------------------------------------------------


class SCORER(nn.Module):
    """SCORER+CBR and every parameter of it. grid: (C, H, W) of the features; max_len: ids of the longest caption."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg, self.grid, self.max_len = cfg, grid, max_len
        self.embed = ImageEmbedding(*grid, cfg.dim, cfg.use_coords)
        layers = cfg.layers if cfg.difference == "reconstruct" else 0
        self.cross_view = nn.ModuleList(CrossView(cfg) for _ in range(layers))
        both = 2 if cfg.fusion == "cat" and layers else 1
        self.fuse = nn.Sequential(nn.Linear(both * cfg.dim, cfg.dim), nn.Dropout(cfg.dropout), nn.ReLU())
        self.decoder = Decoder(cfg, vocab_size, max_len)
        if cfg.w_match and not layers:
            raise ValueError("--difference subtract has no matching layer for --w_match; set --w_match 0")
        self.match_heads = cfg.heads if cfg.matching == "mtm" and cfg.match_heads == "per_head" else 1
        if cfg.w_match:
            self.log_scale = nn.Parameter(torch.ones(()))
        if cfg.w_cbr:
            self.cbr = BackwardReasoning(cfg).requires_grad_(cfg.train_cbr)
        if cfg.near_identity and layers:
            start_near_identity(self)

    def encode(self, before: Tensor, after: Tensor):
        """(B, C, H, W) twice -> difference (B, N, D) of Eq. 7, X_bef and X_aft (B, N, D) of Eq. 1, and the query and
        key (2B, N, D) of the layer that L_cv reads (None where there is no layer)."""
        pair = torch.cat([before, after])
        x = embedded = self.embed(torch.zeros_like(pair) if self.cfg.blind else pair)
        matched = None
        for i, layer in enumerate(self.cross_view):
            x, q, k = layer(x)
            if i == (0 if self.cfg.match_layer == "first" else len(self.cross_view) - 1):
                matched = q, k
        x_bef, x_aft = x.chunk(2)
        if not self.cross_view:
            joined = x_bef - x_aft
        elif self.cfg.fusion == "cat":
            joined = torch.cat([x_bef, x_aft], -1)
        else:
            joined = x_bef + x_aft if self.cfg.fusion == "sum" else x_bef * x_aft
        return self.fuse(joined), *embedded.chunk(2), matched

    def similarity(self, q: Tensor, k: Tensor, log_scale: Tensor) -> Tensor:
        """Scores of L_cv and L_cm: the chosen similarity of tokens (B, N, D), times a learned scale -> (B, B)."""
        return log_scale.exp() * similarity(q, k, self.cfg.matching, self.match_heads)

    def forward(self, before: Tensor, after: Tensor, caption: Tensor) -> dict[str, Tensor]:
        """The parts of Eq. 13 for one batch of pairs: features (B, C, H, W) twice, caption (B, V)."""
        difference, x_bef, x_aft, matched = self.encode(before, after)
        hidden, _, _ = self.decoder(caption, difference)
        losses = {"caption": caption_loss(self.decoder.head(hidden), caption)}
        if self.cfg.w_match:
            (q_bef, q_aft), (k_aft, k_bef) = (x.chunk(2) for x in matched)
            losses["match"] = match_loss(
                self.similarity(q_bef, k_aft, self.log_scale), self.similarity(q_aft, k_bef, self.log_scale)
            )
        if self.cfg.w_cbr:
            valid = (caption != 0).to(hidden.dtype)[..., None]  # (B, V, 1)
            words = valid.sum(1) if self.cfg.sentence_mean == "words" else self.max_len
            hat = self.cbr(x_bef, (hidden * valid).sum(1) / words)
            losses["cbr"] = cbr_loss(self.similarity(self.cbr.query(hat), self.cbr.key(x_aft), self.cbr.log_scale))
        return losses

    @torch.no_grad()
    def clamp_scales(self) -> None:
        """After each step: temperatures stay below 100, as released."""
        for name, p in self.named_parameters():
            if name.endswith("log_scale"):
                p.clamp_(max=math.log(100))

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor, sample: bool = False) -> Tensor:
        """Captions of pairs of features (B, C, H, W): greedy (or sampled) ids (B, max_len)."""
        step = self.decoder.stepper(self.encode(before, after)[0])
        start = torch.full((len(before),), data.START, device=before.device)
        return decode(step, start, self.max_len, data.END, data.UNK, sample)

    @torch.no_grad()
    def attention_map(self, before: Tensor, after: Tensor, ids: Tensor) -> Tensor:
        """Where the decoder looked: last layer's attention over cells, mean over heads and over the words of ids
        (B, V) -> (B, H, W). Row t of the scores is the state that predicts word t + 1."""
        _, query, key = self.decoder(ids, self.encode(before, after)[0])
        scores = self.decoder.layers[-1].cross_attention.scores(query, key)  # (B, K, V, N)
        weight = scores.softmax(-1).mean(1)[:, :-1]  # (B, V - 1, N)
        valid = (ids[:, 1:] > data.END).to(weight.dtype)[..., None]
        return ((weight * valid).sum(1) / valid.sum(1).clamp(min=1)).unflatten(1, self.grid[1:])


@torch.no_grad()
def start_near_identity(model: SCORER) -> None:
    """Not the paper's: every layer starts as a comparison of the two images, so that unchanged cells cancel at once.

    In each head one half of the channels holds the cell; queries and keys find its likeness there, values bring that
    into the other half, negated, and the fusion adds the halves up. Positions start small where cells are compared: they
    would tell cells of the two images apart that show the same thing."""
    head = torch.arange(model.cfg.dim).unflatten(0, (model.cfg.heads, -1))
    cell, other = (half.flatten() for half in head.chunk(2, 1))
    model.embed.conv.weight.normal_(std=model.embed.conv.in_channels**-0.5)
    model.embed.conv.weight[other] *= 0.05
    scale = torch.full((model.cfg.dim,), 0.5).index_fill(0, cell, 0.1)
    for table, part in zip((model.embed.position.col, model.embed.position.row), scale.chunk(2), strict=True):
        table.weight.mul_(part)
    for layer in model.cross_view:
        a = layer.attention
        for m, to, gain in ((a.query, cell, 1.8), (a.key, cell, 1.8), (a.value, other, -1.0)):
            m.weight.normal_(std=0.02)
            m.weight[to, cell] += gain
            m.bias.zero_()
    for weight in model.fuse[0].weight.split(model.cfg.dim, 1):  # of "before", of "after"
        weight[:, other] = weight[:, cell]


# ---- training --------------------------------------------------------------------------------------------------------


def losses_of(model: SCORER, streams: tuple[data.Batch, ...], cfg: Config) -> dict[str, Tensor]:
    """Eq. 13 and its parts, each a mean over the streams (changed pairs, distractor pairs). The streams stay apart: a
    scene's default image is "before" in both, which a contrastive loss over all pairs would take for a negative."""
    losses: dict[str, Tensor] = {}
    for batch in (b.to(cfg.device) for b in streams):
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.device.startswith("cuda")):
            parts = model(batch.before, batch.after, batch.caption)
        losses = {name: losses.get(name, 0) + part / len(streams) for name, part in parts.items()}
    weights = {"caption": 1.0, "match": cfg.w_match, "cbr": cfg.w_cbr}
    losses["total"] = sum(weights[name] * part for name, part in losses.items())  # L = L_cap + w_match L_cv + w_cbr L_cm
    return losses


def train(cfg: Config, resume: bool = False) -> tuple[SCORER, data.Dataset]:
    """Train into cfg.out_dir -> the best model by validation, and the data set.

    Told to stop (Ctrl-C, SIGTERM) it saves last.pt and exits 130 or 143; `resume` goes on from there as if nothing had
    happened. FloatingPointError where a loss is not finite."""
    run, dataset, cuda = Run(cfg, resume), data.open_dataset(cfg), cfg.device.startswith("cuda")
    torch.manual_seed(cfg.seed)
    torch.set_float32_matmul_precision("high" if cuda else "highest")  # TF32 where bf16 autocast leaves float32
    model = SCORER(cfg, len(dataset.vocab), dataset.grid, dataset.max_len).to(cfg.device)
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
            losses = losses_of(model, streams, cfg)
            optimizer.zero_grad()
            losses["total"].backward()
            if cfg.grad_clip:
                nn.utils.clip_grad_norm_(parameters, cfg.grad_clip)
            optimizer.step()
            model.clamp_scales()
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


def evaluate(model: SCORER, dataset: data.Dataset, split: str, cfg: Config, out_dir: Path | None = None) -> dict:
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
    model, state = load_model(SCORER, cfg, checkpoint)
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
        (model, state), dataset = load_model(SCORER, cfg, do.eval), data.open_dataset(cfg)
        dataset.check_state(state)
    else:
        model, dataset = train(cfg, do.resume)
    evaluate(model, dataset, do.split, cfg, Path(cfg.out_dir))


if __name__ == "__main__":
    run_main(main)
