"""SCORER+CBR: Self-supervised Cross-view Representation Reconstruction for Change Captioning (Tu et al., ICCV 2023).

Idea. (1) A contrastive loss over token-wise matches makes the two images of a pair alike despite camera and light, and
unlike those of other pairs. (2) By cross-attention, each image reconstructs from the other what did not change and adds
it to itself; the decoder describes the fusion of the two. (3) Backward reasoning: "before" plus the sentence must give
back "after", so the sentence has to describe the difference.

Eq. 1      ImageEmbedding     X = conv(features) + position
Eq. 2-3    similarity         mean over tokens of the best match, both ways (TM), in each head (MTM)
Eq. 4      match_loss         L_cv  InfoNCE, before -> after and after -> before
Eq. 5-6    CrossView          X <- LN(X + MHCA(X, partner))
Eq. 7      Fusion             C = ReLU(W [X_bef ; X_aft])
Eq. 8      Decoder            transformer decoder over C
Eq. 9-10   BackwardReasoning  hallucination = MHSA(W [X_bef ; sentence])
Eq. 11     cbr_loss           L_cm  InfoNCE, hallucination <-> after
Eq. 12     caption_loss       L_cap
Eq. 13     total_loss         L = L_cap + w_match L_cv + w_cbr L_cm

Row of the paper       flags
Subtraction            --difference subtract --w_match 0 --w_cbr 0
RR                     --w_match 0 --w_cbr 0
RR+CBR                 --w_match 0
SCORER                 --w_cbr 0
matching (Fig. 3)      --matching mtm, tm, mean or max
heads (Fig. 4)         --heads 8 (the figure changes MTM and Eq. 5 only; the flag changes decoder and CBR as well)
layers (Fig. 5)        --layers 2
fusion (section 6.3)   --fusion cat, sum or hadamard
No flag gives RR+ (Fig. 13), whose distance the paper does not name, or section 6.3's fusion in which words attend to
each image before "cat", which needs a decoder with two memories.

Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, V words of a caption (START, words, END,
padding).

If paper and released code differ, the default is the paper; RELEASED below lists the differences. Both readings keep
- attention without output projection, a GELU feed-forward of width D and, in place of Eq. 4's temperature, a learned
  scale: the paper cites standard layers, but its published figures come from the release, which has these;
- two coordinate channels next to the features (use_coords) and the drops of the learning rate: the release has them,
  the paper does not mention them;
- Eq. 12 as a mean over the words of a batch, as released; the paper has a sum over the words of a sentence.
How Eq. 3 joins its heads is lost in our copy of the paper: mtm averages them [ours].
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

from common import (
    END,
    NULL,
    Attention,
    GridPosition,
    Run,
    RunConfig,
    decode,
    info_nce,
    load_model,
    mean_of,
    parse_args,
    run_main,
    saved_config,
    sinusoid,
    token_match,
    upcast,
    usable_device,
)

# ---- config ----------------------------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """SCORER+CBR. The fields of a run (data, steps, device) are common.RunConfig's."""

    RANGES = RunConfig.RANGES | {"layers": (0, 100), "dropout": (0, 0.99)}

    dim: int = 512  # width D of images, words and decoder
    word_dim: int = 300  # width of word embeddings
    heads: int = 8  # heads of every attention, and of the matching in "mtm"
    layers: int = 2  # cross-view layers (Eq. 5-6)
    decoder_layers: int = 2  # decoder layers
    dropout: float = 0.1  # dropout probability
    use_coords: bool = True  # append the cell's x and y to the features (CLEVR-Change's 1026 channels)
    w_match: float = 0.1  # weight of L_cv in Eq. 13; 0 leaves it out
    w_cbr: float = 0.001  # weight of L_cm in Eq. 13; 0 leaves CBR out
    difference: Literal["reconstruct", "subtract"] = "reconstruct"  # Eq. 5-7, or the bare difference of the two images
    fusion: Literal["cat", "sum", "hadamard"] = "cat"  # how Eq. 7 joins the two images
    matching: Literal["mtm", "tm", "mean", "max"] = "mtm"  # Eq. 3, Eq. 2, or dot product of mean- or max-pooled images
    match_layer: Literal["first", "last"] = "first"  # match before images attend to each other, or in the last layer
    xavier: bool = True  # Xavier-uniform weights for the decoder [ours], as in DIRL; the release draws N(0, .02)
    train_cbr: bool = True  # train CBR; the released code leaves its weights as initialised
    sentence_mean: Literal["words", "padded"] = "words"  # CBR's sentence: the words' mean, or sum / longest caption
    ffn_residual: Literal["input", "activation"] = "input"  # what a decoder feed-forward's output is added to
    reading: Literal["paper", "released"] = "paper"  # disputed details as the paper says, or as the released code does
    val_decode: Literal["greedy", "sample"] = "greedy"  # how validation captions, which choose best.pt, are written
    blind: bool = False  # zero the features: what words alone can score


# Layers, loss weights and batch sizes are from sections 4.1, 4.5 and 6.1-6.2. CLEVR-Change's w_cbr and the exponents of
# the learning rates, lost in our copy of the paper, are from the release. The learning rate drops every 15 epochs.
PRESETS = {
    "clevr_change": dict(lr_drop=3975),
    "clevr_dc": dict(layers=1, w_match=0.01, w_cbr=0.004, lr_drop=4785, use_coords=False),
    "spot_the_diff": dict(layers=3, w_match=0.3, w_cbr=0.5, batch_size=32, lr_drop=4020, use_coords=False),
    "image_editing_request": dict(w_match=0.003, w_cbr=0.06, batch_size=16, lr=1e-4, lr_drop=2880, use_coords=False),
    # Your own pairs are few: Image Editing Request's weights, half its width; validation says when to stop [ours].
    "pairs": dict(w_match=0.003, w_cbr=0.06, use_coords=False, dim=256, batch_size=16, lr=5e-4, warmup=50, steps=2000,
                  eval_every=100, patience=10),
    "mini": dict(dim=128, word_dim=128, heads=2, layers=1, dropout=0.0, w_match=0.3, batch_size=16, lr=1e-3,
                 schedule="cosine", warmup=50, grad_clip=1.0, steps=1800, eval_every=900, eval_batch=250),
}  # fmt: skip

RELEASED = {  # --reading released: the released code's side of every disputed detail, on all data sets
    "all": dict(
        xavier=False,  # the paper does not say how weights start; the release draws N(0, .02)
        matching="tm",  # Eq. 3 asks for a match in each head; the release contracts heads and channels together
        match_layer="last",  # section 3.2.2 matches encoded images; in the last layer they have already seen each other
        train_cbr=False,  # section 3.5 trains end to end; CBR is missing from the release's optimiser
        sentence_mean="padded",  # section 3.4 says mean; the release divides by the longest caption's length
        ffn_residual="activation",  # a standard decoder adds the layer's input; the release adds the hidden activation
        val_decode="sample",  # section 4.3 decodes greedily; the release samples during validation
    ),
}

# ---- modules ---------------------------------------------------------------------------------------------------------


class ImageEmbedding(nn.Module):
    """Eq. 1: X = conv_1x1(features) + position. (B, C, H, W) -> (B, N, D), cell n = row * W + column."""

    def __init__(self, channels: int, height: int, width: int, dim: int, use_coords: bool):
        super().__init__()
        self.use_coords = use_coords
        x, y = (torch.arange(n) * 2 / n - 1 for n in (width, height))  # -1 up to, not including, 1
        self.register_buffer("coords", torch.stack(torch.meshgrid(x, y, indexing="xy")), persistent=False)  # (2, H, W)
        self.conv = nn.Conv2d(channels + 2 * use_coords, dim, 1)
        self.position = GridPosition(dim, height, width)

    def forward(self, features: Tensor) -> Tensor:
        if self.use_coords:
            coords = self.coords.to(features.dtype).expand(len(features), -1, -1, -1)
            features = torch.cat([features, coords], 1)
        return (self.conv(features) + self.position()).flatten(2).transpose(1, 2)


class CrossView(nn.Module):
    """Eq. 5-6, one layer: X_bef, X_aft <- LN(X_bef + MHCA(X_bef, X_aft)), LN(X_aft + MHCA(X_aft, X_bef)).

    X_bef, X_aft (B, N, D) -> the new pair, and what Eq. 4 matches: each image's queries with the other's keys."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout, out_proj=False)
        self.norm = nn.LayerNorm(cfg.dim, eps=1e-6)

    def forward(self, x_bef: Tensor, x_aft: Tensor):
        q_bef, k_aft, v_aft = self.attention.project(x_bef, x_aft)
        q_aft, k_bef, v_bef = self.attention.project(x_aft, x_bef)
        new_bef = self.norm(x_bef + self.attention.attend(q_bef, k_aft, v_aft))
        new_aft = self.norm(x_aft + self.attention.attend(q_aft, k_bef, v_bef))
        return new_bef, new_aft, ((q_bef, k_aft), (q_aft, k_bef))


class Fusion(nn.Module):
    """Eq. 7: C = ReLU(W [X_bef ; X_aft] + b). Images concatenated (B, N, 2D), or combined (B, N, D) -> (B, N, D)."""

    def __init__(self, cfg: Config, width: int):
        super().__init__()
        self.project, self.dropout = nn.Linear(width, cfg.dim), nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.dropout(self.project(x)))


class DecoderLayer(nn.Module):
    """Post-norm decoder layer: words attend to earlier words, then to the difference, then a feed-forward of width D.

    x (B, V, D) -> (B, V, D). `cross`: key and value (B, N, D) of the difference; `past`: key and value of the words
    before x (decoding a word at a time), None when x starts with START. Also returns the new `past` and the query
    (B, V, D) of the cross-attention."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout, out_proj=False)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout, out_proj=False)
        self.hidden, self.output = nn.Linear(cfg.dim, cfg.dim), nn.Linear(cfg.dim, cfg.dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(cfg.dim, eps=1e-6) for _ in range(3))
        self.dropout, self.ffn_residual = nn.Dropout(cfg.dropout), cfg.ffn_residual

    def forward(self, x: Tensor, cross: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None = None):
        q, k, v = self.self_attention.project(x, x)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        x1 = self.norm1(x + self.self_attention.attend(q, k, v, causal=past is None))
        query = self.cross_attention.query(x1)
        x2 = self.norm2(x1 + self.cross_attention.attend(query, *cross))
        hidden = F.gelu(self.hidden(x2))
        residual = x2 if self.ffn_residual == "input" else hidden
        x3 = self.norm3(residual + self.dropout(self.output(hidden)))
        return x3, (k, v), query


class Decoder(nn.Module):
    """Eq. 8: words and difference -> hidden states; `head` gives the distribution of the next word.

    Every word sees itself and earlier words only, so padding at the end of a caption needs no mask."""

    def __init__(self, cfg: Config, vocab_size: int, max_len: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, cfg.word_dim, padding_idx=NULL)
        self.register_buffer("position", sinusoid(max_len, cfg.word_dim), persistent=False)
        self.project, self.dropout = nn.Linear(cfg.word_dim, cfg.dim), nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim, eps=1e-6)
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.head = nn.Linear(cfg.dim, vocab_size)

    def words(self, ids: Tensor, start: int = 0) -> Tensor:
        """(B, V) ids at positions start, start + 1, ... -> (B, V, D)."""
        x = self.embed(ids) + self.position[start : start + ids.shape[1]]
        return self.norm(self.dropout(self.project(x)))

    def memory(self, difference: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Key and value of the difference (B, N, D) for each layer, computed once per caption."""
        return [(l.cross_attention.key(difference), l.cross_attention.value(difference)) for l in self.layers]

    def forward(self, ids: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:
        """All words at once: (B, V) -> hidden states (B, V, D), and the last layer's `query` (B, V, D)."""
        x = self.words(ids)
        for layer, cross in zip(self.layers, self.memory(difference), strict=True):
            x, _, query = layer(x, cross)
        return x, query

    def stepper(self, difference: Tensor):
        """-> step(words (B,), position) -> logits of the next word; keys and values of earlier words are kept."""
        memory, past = self.memory(difference), [None] * len(self.layers)

        def step(words: Tensor, t: int) -> Tensor:
            x = self.words(words[:, None], t)
            for i, layer in enumerate(self.layers):
                x, past[i], *_ = layer(x, memory[i], past[i])
            return self.head(x[:, 0])

        return step


class BackwardReasoning(nn.Module):
    """Eq. 9-10: what "after" should look like, from "before" and the sentence:
    X_hat = W_2 MHSA(W_1 [X_bef ; s]) with the sentence s appended to every cell. (B, N, D), (B, D) -> (B, N, D)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.join, self.output = nn.Linear(2 * cfg.dim, cfg.dim), nn.Linear(cfg.dim, cfg.dim)
        self.attention = nn.MultiheadAttention(cfg.dim, cfg.heads, bias=False, batch_first=True)
        self.query, self.key = nn.Linear(cfg.dim, cfg.dim), nn.Linear(cfg.dim, cfg.dim)  # for Eq. 11's similarity
        self.log_scale = nn.Parameter(torch.ones(()))

    def forward(self, x_bef: Tensor, sentence: Tensor) -> Tensor:
        at_every_cell = sentence[:, None].expand(-1, x_bef.shape[1], -1)  # (B, N, D)
        x = self.join(torch.cat([x_bef, at_every_cell], -1))
        return self.output(self.attention(x, x, x, need_weights=False)[0])


# ---- losses ----------------------------------------------------------------------------------------------------------


def similarity(q: Tensor, k: Tensor, log_scale: Tensor, matching: str, heads: int) -> Tensor:
    """Eq. 2-3, image a to image b: q (A, N, D), k (B, M, D) -> (A, B), times a learned scale.

    "mtm" finds each token's best match in each head and averages the heads [ours]; "tm" matches over all channels.
    "mean" and "max" (Fig. 3) pool the tokens first. Not in bfloat16, because scores near 50 differ by tenths."""
    with torch.autocast(q.device.type, enabled=False):
        q, k = upcast(q), upcast(k)
        if matching == "mtm":
            score = token_match(q, k, heads)
        elif matching == "tm":
            score = token_match(q, k)
        elif matching == "mean":
            score = q.mean(1) @ k.mean(1).T
        else:
            score = q.amax(1) @ k.amax(1).T
        return log_scale.exp() * score


def match_loss(bef_to_aft: Tensor, aft_to_bef: Tensor) -> Tensor:
    """Eq. 4, L_cv: InfoNCE over the rows of both similarity matrices (B, B). The matrices are not each
    other's transpose, because queries and keys are projected differently."""
    return (info_nce(bef_to_aft) + info_nce(aft_to_bef)) / 2


def cbr_loss(hat_to_aft: Tensor) -> Tensor:
    """Eq. 11, L_cm: InfoNCE over rows and columns of the similarity (B, B) of hallucinations to "after" images."""
    return (info_nce(hat_to_aft) + info_nce(hat_to_aft.T)) / 2


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 12, L_cap: cross-entropy of each next word, a mean over all real words of the batch.
    logits (B, V, vocabulary) at words 0 ... V-1, caption (B, V) padded with NULL."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), caption[:, 1:].flatten(), ignore_index=NULL)


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Eq. 13: L = L_cap + w_match L_cv + w_cbr L_cm, from the terms that SCORER.forward returns."""
    return losses["caption"] + cfg.w_match * losses.get("match", 0) + cfg.w_cbr * losses.get("cbr", 0)


# ---- method ----------------------------------------------------------------------------------------------------------


class SCORER(nn.Module):
    """SCORER+CBR with all its parameters. grid: (C, H, W) of the features; max_len: ids in the longest caption."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg, self.grid, self.max_len = cfg, grid, max_len
        subtract = cfg.difference == "subtract"
        layers = 0 if subtract else cfg.layers
        if cfg.w_match and not layers:
            raise ValueError("without a cross-view layer nothing can be matched; set --w_match 0")
        self.embed = ImageEmbedding(*grid, cfg.dim, cfg.use_coords)
        self.cross_view = nn.ModuleList(CrossView(cfg) for _ in range(layers))
        self.fuse = Fusion(cfg, cfg.dim if subtract or cfg.fusion != "cat" else 2 * cfg.dim)
        self.decoder = Decoder(cfg, vocab_size, max_len)
        if cfg.w_match:
            self.log_scale = nn.Parameter(torch.ones(()))
        if cfg.w_cbr:
            self.cbr = BackwardReasoning(cfg).requires_grad_(cfg.train_cbr)
        for p in self.decoder.parameters():
            if p.ndim > 1:
                nn.init.xavier_uniform_(p) if cfg.xavier else nn.init.normal_(p, std=0.02)
        for m in self.decoder.modules():
            if isinstance(m, nn.Linear):
                nn.init.zeros_(m.bias)

    def encode(self, before: Tensor, after: Tensor):
        """(B, C, H, W) twice -> difference (B, N, D) of Eq. 7, X_bef and X_aft (B, N, D) of Eq. 1, and each layer's
        queries and keys for Eq. 4."""
        if self.cfg.blind:
            before, after = torch.zeros_like(before), torch.zeros_like(after)
        x_bef, x_aft = self.embed(before), self.embed(after)
        new_bef, new_aft, tokens = x_bef, x_aft, []
        for layer in self.cross_view:
            new_bef, new_aft, matched = layer(new_bef, new_aft)
            tokens.append(matched)
        if self.cfg.difference == "subtract":
            joined = x_bef - x_aft
        elif self.cfg.fusion == "cat":
            joined = torch.cat([new_bef, new_aft], -1)
        elif self.cfg.fusion == "sum":
            joined = new_bef + new_aft
        else:
            joined = new_bef * new_aft
        return self.fuse(joined), x_bef, x_aft, tokens

    def forward(self, before: Tensor, after: Tensor, caption: Tensor) -> dict[str, Tensor]:
        """The terms of Eq. 13 for one batch of pairs: features (B, C, H, W) twice, caption (B, V)."""
        cfg = self.cfg
        difference, x_bef, x_aft, tokens = self.encode(before, after)
        hidden, _ = self.decoder(caption, difference)
        losses = {"caption": caption_loss(self.decoder.head(hidden), caption)}
        if cfg.w_match:
            (q_bef, k_aft), (q_aft, k_bef) = tokens[0] if cfg.match_layer == "first" else tokens[-1]
            bef_to_aft = similarity(q_bef, k_aft, self.log_scale, cfg.matching, cfg.heads)
            aft_to_bef = similarity(q_aft, k_bef, self.log_scale, cfg.matching, cfg.heads)
            losses["match"] = match_loss(bef_to_aft, aft_to_bef)
        if cfg.w_cbr:
            valid = caption != NULL
            sentence = mean_of(hidden, valid)
            if cfg.sentence_mean == "padded":
                sentence = sentence * valid.sum(1, keepdim=True) / self.max_len
            q_hat, k_aft = self.cbr.query(self.cbr(x_bef, sentence)), self.cbr.key(x_aft)
            losses["cbr"] = cbr_loss(similarity(q_hat, k_aft, self.cbr.log_scale, cfg.matching, cfg.heads))
        return losses

    @torch.no_grad()
    def clamp_scales(self) -> None:
        """After each step: cap the learned scales at 100, as released."""
        if self.cfg.w_match:
            self.log_scale.clamp_(max=math.log(100))
        if self.cfg.w_cbr:
            self.cbr.log_scale.clamp_(max=math.log(100))

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor, sample: bool = False) -> Tensor:
        """Captions of pairs of features (B, C, H, W): greedy (or sampled) ids (B, max_len)."""
        step = self.decoder.stepper(self.encode(before, after)[0])
        return decode(step, len(before), self.max_len, before.device, sample)

    @torch.no_grad()
    def attention_map(self, before: Tensor, after: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Where the decoder looked: the last layer's attention over cells, averaged over heads and over the words of
        ids (B, V) -> "attention" (B, H, W). Row t of the scores belongs to the state that predicts word t + 1."""
        difference, attention = self.encode(before, after)[0], self.decoder.layers[-1].cross_attention
        _, query = self.decoder(ids, difference)
        weight = attention.scores(query, attention.key(difference)).softmax(-1).mean(1)  # (B, V, N)
        return {"attention": mean_of(weight[:, :-1], ids[:, 1:] > END).unflatten(1, self.grid[1:])}


# ---- training --------------------------------------------------------------------------------------------------------


def losses_of(model: SCORER, batches: tuple, cfg: Config) -> dict[str, Tensor]:
    """Eq. 13 and its terms, each a mean over a step's batches (changed pairs, distractor pairs). These stay separate: a
    scene's default image is "before" in both, which a contrastive loss over all pairs would take for a negative."""
    losses: dict[str, Tensor] = {}
    for batch in (b.to(cfg.device) for b in batches):
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.device.startswith("cuda")):
            terms = model(batch.before, batch.after, batch.caption)
        losses = {name: losses.get(name, 0) + term / len(batches) for name, term in terms.items()}
    return losses | {"total": total_loss(losses, cfg)}


def train(cfg: Config, dataset, resume: bool = False) -> SCORER:
    """Train on a data set (data.Dataset) into cfg.out_dir -> the best model by validation.

    Ctrl-C and SIGTERM save last.pt and exit 130 or 143; `resume` continues from there as if training had never
    stopped. FloatingPointError if a loss is not finite."""
    torch.manual_seed(cfg.seed)
    model = SCORER(cfg, len(dataset.vocab), dataset.grid, dataset.max_len).to(cfg.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=cfg.lr, fused=True)
    with Run(cfg, resume, model, optimizer, dataset) as run:
        for batches in run.steps(dataset):
            losses = losses_of(model, batches, cfg)
            optimizer.zero_grad()
            losses["total"].backward()
            if cfg.grad_clip:
                nn.utils.clip_grad_norm_(parameters, cfg.grad_clip)
            optimizer.step()
            model.clamp_scales()
            run.end_step(losses, lambda: evaluate(model, dataset, "val", cfg))
    return run.best_model()


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(model: SCORER, dataset, split: str, cfg: Config, out_dir: Path | None = None) -> dict[str, float]:
    """Caption a split of a data set (data.Dataset) -> the scores of all its pairs together.

    Without out_dir (validation while training) only the quick metrics; with it every metric and every group of pairs,
    printed and written with captions and sample pictures."""
    model.eval()
    captions, maps = {}, {}  # by pair id
    for batch in dataset.eval_batches(split, cfg.eval_batch):
        batch = batch.to(cfg.device)
        ids = model.generate(batch.before, batch.after, sample=cfg.val_decode == "sample" and out_dir is None)
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
    return data.Captioner(*load_model(SCORER, cfg, checkpoint))


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption pictures."""
    import data

    cfg, args = parse_args(Config, PRESETS, Path(__file__).stem, __doc__, argv, RELEASED)
    if args.caption:
        return data.caption_files(data.Captioner(*load_model(SCORER, cfg, args.checkpoint)), args.caption, args.out)
    dataset = data.open_dataset(cfg)
    if args.eval is None:
        model = train(cfg, dataset, args.resume)
    else:
        model, state = load_model(SCORER, cfg, args.eval)
        dataset.check_state(state)
    evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir))


if __name__ == "__main__":
    run_main(main)
