"""DIRL+CCR: Distractors-Immune Representation Learning with Cross-modal Contrastive Regularization for Change
Captioning (Tu et al., ECCV 2024).

Idea. (1) A self-supervised loss correlates each channel of the "before" image with the same channel of "after" and
decorrelates it from all others, so that features are robust to camera and light and stay discriminative. (2) By
cross-attention each image finds what it shares with its partner; the image minus that is the difference. (3) Over each
batch, a contrastive loss ties the words of a caption to the differences that the decoder attended to for them.

Eq. 1      ImageEmbedding       X = conv(features) + position
Eq. 2      DIRL.mlp             Y = MLP(X), for the loss alone
Eq. 3      channel_correlation  C_ij between channel i of Y_bef and channel j of Y_aft
Eq. 4      dirl_loss            L_dirl = sum_i (1 - C_ii)^2 + alpha sum_{i != j} C_ij^2
Eq. 5      CrossView            shared = MHCA(X, partner)
Eq. 6      DIRL.encode          difference of each image = X - shared
Eq. 7      Fusion               ReLU(W [difference_bef ; difference_aft])
Eq. 8-10   DecoderLayer         words among themselves, words to differences, feed-forward
Eq. 11     Decoder.head         next word
Eq. 12     mean_of              mean over the words of a sentence
Eq. 13-14  ccr_loss             L_ccr  InfoNCE, words <-> attended differences
Eq. 15     caption_loss         L_cap
Eq. 16     total_loss           L = L_cap + w_dirl L_dirl + w_ccr L_ccr

Row of the paper             flags
Transformer (Tables 6, 7)    --w_dirl 0 --w_ccr 0
DIRL (Table 6)               --w_ccr 0
CCR (Table 6)                --w_dirl 0
non-perturbation (Table 7)   --w_ccr 0 --alpha 0
discrimination (Table 7)     --w_ccr 0 --no-correlate
Subtraction (Fig. 4)         --difference subtract --w_dirl 0 --w_ccr 0
weights (Fig. 5)             --w_dirl 0.03, --w_ccr 0.05

Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, V words of a caption (START, words, END,
padding).

If paper and released code differ, the default is the paper; RELEASED below lists the differences. Both readings keep
- Eq. 3 with centred channels, as released and as in Barlow Twins, whose notation the paper uses; the printed formula
  does not centre;
- Eq. 5-10 inside standard layers, whose residuals, LayerNorms and dropout the equations mostly leave out. By default
  L_ccr nevertheless compares exactly what Eq. 8 and 9 print, the outputs of both attentions;
- L_ccr on the words of the reference caption, as released; the paper says generated words;
- Eq. 12 as two means over the words; the paper divides Eq. 9's V by HW, but that has one row per word;
- two cross-attention layers, alpha, the initialisation of all that precedes the fusion, two coordinate channels next to
  the features (use_coords) and the drops of the learning rate: the release has them, the paper does not give them;
- Eq. 15 as a mean over the words of a batch, as released; the paper has a sum over the words of a sentence.
To copy: this file and common.py. Training on a data set of data.py needs that file too.
"""

import dataclasses
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
    initialise,
    load_model,
    mean_of,
    parse_args,
    run_main,
    saved_config,
    sinusoid,
    upcast,
    usable_device,
)

# ---- config ----------------------------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """DIRL+CCR. The fields of a run (data, steps, device) are common.RunConfig's."""

    RANGES = RunConfig.RANGES | {"dropout": (0, 0.99), "tau": (0.001, 1000)}

    dim: int = 512  # width D of images, words and decoder
    word_dim: int = 300  # width of word embeddings
    heads: int = 8  # heads of every attention
    layers: int = 2  # cross-attention layers; the last one's output is Eq. 5's
    decoder_layers: int = 2  # decoder layers
    dropout: float = 0.1  # dropout probability
    use_coords: bool = True  # append the cell's x and y to the features (CLEVR-Change's 1026 channels)
    w_dirl: float = 0.5  # weight of L_dirl in Eq. 16; 0 leaves it and its MLP out
    alpha: float = 0.003  # weight of decorrelation in Eq. 4; 0 leaves correlation only
    correlate: bool = True  # Eq. 4's first term; without it decorrelation only
    w_ccr: float = 0.3  # weight of L_ccr in Eq. 16; 0 leaves it out
    tau: float = 0.5  # temperature of Eq. 14
    difference: Literal["attention", "stream", "subtract"] = "attention"  # X - MHCA, X - LN(X + MHCA), X - partner
    channel_eps: float = 1e-5  # keeps a channel that is constant over the batch finite; 0 as released (NaN there)
    input_norm: bool = True  # LayerNorm on what the decoder reads; not in the release's CLEVR-Change
    xavier: bool = True  # Xavier-uniform weights for fusion and decoder too; the release's CLEVR-Change has PyTorch's
    ccr_pool: Literal["words", "padded"] = "words"  # Eq. 12: mean from START to END, or over the padding as well
    ccr_states: Literal["attention", "normed"] = "attention"  # Eq. 8-9's outputs, or both after residual and LayerNorm
    ccr_logits: Literal["two_way", "summed"] = "two_way"  # Eq. 14's two losses, or one over the rows of S + S^T
    ccr_equal_captions: Literal["ignored", "negatives"] = "ignored"  # how L_ccr treats pairs with equal captions
    reading: Literal["paper", "released"] = "paper"  # disputed details as the paper says, or as the released code does
    val_decode: Literal["greedy", "sample"] = "greedy"  # how validation captions, which choose best.pt, are written
    blind: bool = False  # zero the features: what words alone can score


# Loss weights are from section 4.6. The learning rate drops every 15 epochs. The paper gives no batch sizes or rates:
# Spot-the-Diff and Image Editing Request take SCORER's.
PRESETS = {
    "clevr_change": dict(lr_drop=3975),
    "clevr_dc": dict(w_dirl=0.03, w_ccr=0.05, lr_drop=4785, use_coords=False),
    "spot_the_diff": dict(w_ccr=0.004, batch_size=32, lr_drop=4020, use_coords=False),
    "image_editing_request": dict(w_dirl=0.001, w_ccr=0.05, batch_size=16, lr=1e-4, lr_drop=2880, use_coords=False),
    # Your own pairs are few: Image Editing Request's weights, half its width; validation says when to stop [ours].
    "pairs": dict(w_dirl=0.001, w_ccr=0.05, use_coords=False, dim=256, batch_size=16, lr=5e-4, warmup=50, steps=2000,
                  eval_every=100, patience=10),
    "mini": dict(dim=128, word_dim=128, heads=4, layers=1, dropout=0.0, w_dirl=0.03, w_ccr=0.005, batch_size=16,
                 lr=1e-3, schedule="cosine", warmup=50, grad_clip=1.0, steps=2300, eval_every=1150, eval_batch=250),
}  # fmt: skip

RELEASED = {  # --reading released: the released code's side of every disputed detail, in general and by data set
    "all": dict(
        difference="stream",  # Eq. 5-6 subtract the attention's output; the release subtracts LN(X + attention)
        channel_eps=0.0,  # the release divides by the bare standard deviation
        ccr_pool="padded",  # Eq. 12 is a mean over the m words; the release averages the padding's states too
        ccr_states="normed",  # Eq. 12 pools Eq. 8-9; the release pools after the residuals, so `visual` contains words
        ccr_logits="summed",  # Eq. 14 is InfoNCE both ways; the release adds S and its transpose and takes rows only
        ccr_equal_captions="negatives",  # many pairs share a caption, above all distractors; released: negatives
        val_decode="sample",  # section 4.2 decodes greedily; the release samples during validation
    ),
    "clevr_change": dict(input_norm=False, xavier=False, steps=15000),
    "clevr_dc": dict(steps=13000),
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
    """Eq. 5, one layer for both directions: shared_bef = MHCA(X_bef, X_aft), shared_aft = MHCA(X_aft, X_bef).

    X_bef, X_aft (B, N, D) -> shared_bef, shared_aft; with `residual` LN(X + shared) of both, for the next layer or
    difference="stream"."""

    def __init__(self, cfg: Config, residual: bool):
        super().__init__()
        self.attention, self.dropout = Attention(cfg.dim, cfg.heads, cfg.dropout), nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim) if residual else None

    def forward(self, x_bef: Tensor, x_aft: Tensor) -> tuple[Tensor, Tensor]:
        shared_bef, shared_aft = self.attention(x_bef, x_aft), self.attention(x_aft, x_bef)
        if self.norm is None:
            return shared_bef, shared_aft
        return self.norm(x_bef + self.dropout(shared_bef)), self.norm(x_aft + self.dropout(shared_aft))


class Fusion(nn.Module):
    """Eq. 7: ReLU(W [difference_bef ; difference_aft] + b). Both (B, N, 2D), or a single one (B, N, D) -> (B, N, D)."""

    def __init__(self, cfg: Config, width: int):
        super().__init__()
        self.project, self.dropout = nn.Linear(width, cfg.dim), nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim) if cfg.input_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.dropout(self.norm(self.project(x))))


class DecoderLayer(nn.Module):
    """Eq. 8-10, post-norm: words attend to earlier words, then to the difference, then a feed-forward of width 4 D.

    x (B, V, D) -> (B, V, D). `cross`: key and value (B, N, D) of the difference; `past`: key and value of the words
    before x (decoding a word at a time), None when x starts with START; `mask` (B, 1, V, V): which words each may see,
    None for all. Also returns the new `past`, the query (B, V, D) of the cross-attention, and `words` and `visual`
    (B, V, D), which L_ccr compares."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.self_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.cross_attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.hidden, self.output = nn.Linear(cfg.dim, 4 * cfg.dim), nn.Linear(4 * cfg.dim, cfg.dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(cfg.dim) for _ in range(3))
        self.dropout, self.ccr_states = nn.Dropout(cfg.dropout), cfg.ccr_states

    def forward(self, x: Tensor, cross: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None = None, mask=None):
        """-> Eq. 10's words (B, V, D), the new `past`, the query, and `words` and `visual` for L_ccr (B, V, D)."""
        q, k, v = self.self_attention.project(x, x)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        words = self.self_attention.attend(q, k, v, mask=mask)  # Eq. 8
        x1 = self.norm1(x + self.dropout(words))
        query = self.cross_attention.query(x1)
        visual = self.cross_attention.attend(query, *cross)  # Eq. 9
        x2 = self.norm2(x1 + self.dropout(visual))
        hidden = self.dropout(F.relu(self.hidden(x2)))
        x3 = self.norm3(x2 + self.dropout(self.output(hidden)))  # Eq. 10
        if self.ccr_states == "normed":
            words, visual = x1, x2
        return x3, (k, v), query, words, visual


class Decoder(nn.Module):
    """Words and difference -> hidden states; `head` gives the distribution of the next word (Eq. 11).

    No position sees later ones or padding; the latter matters to ccr_pool="padded", which reads the states there."""

    def __init__(self, cfg: Config, vocab_size: int, max_len: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, cfg.word_dim, padding_idx=NULL)
        self.register_buffer("position", sinusoid(max_len, cfg.word_dim), persistent=False)
        self.project, self.dropout = nn.Linear(cfg.word_dim, cfg.dim), nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim) if cfg.input_norm else nn.Identity()
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.head = nn.Linear(cfg.dim, vocab_size)

    def words(self, ids: Tensor, start: int = 0) -> Tensor:
        """(B, V) ids at positions start, start + 1, ... -> (B, V, D)."""
        x = self.embed(ids) + self.position[start : start + ids.shape[1]]
        return self.dropout(self.norm(self.project(x)))

    def memory(self, difference: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Key and value of the difference (B, N, D) for each layer, computed once per caption."""
        return [(l.cross_attention.key(difference), l.cross_attention.value(difference)) for l in self.layers]

    def forward(self, ids: Tensor, difference: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All words at once: (B, V) -> hidden states (B, V, D), and the last layer's `query`, `words` and `visual`."""
        x = self.words(ids)
        mask = (ids != NULL)[:, None, None, :].expand(-1, -1, ids.shape[1], -1).tril()  # (B, 1, V, V)
        for layer, cross in zip(self.layers, self.memory(difference), strict=True):
            x, _, query, words, visual = layer(x, cross, mask=mask)
        return x, query, words, visual

    def stepper(self, difference: Tensor):
        """-> step(words (B,), position) -> logits of the next word; keys and values of earlier words are kept."""
        memory, past = self.memory(difference), [None] * len(self.layers)

        def step(words: Tensor, t: int) -> Tensor:
            x = self.words(words[:, None], t)
            for i, layer in enumerate(self.layers):
                x, past[i], *_ = layer(x, memory[i], past[i])
            return self.head(x[:, 0])

        return step


# ---- losses ----------------------------------------------------------------------------------------------------------


def channel_correlation(y_bef: Tensor, y_aft: Tensor, eps: float) -> Tensor:
    """Eq. 3: correlation of every channel of "before" with every channel of "after" over all cells of all images.
    y_bef, y_aft (B, N, D) -> (D, D). The standard deviation is unbiased, as released, so C_ii <= (BN - 1) / BN.
    Not in bfloat16, because the sums run over thousands of rows."""
    with torch.autocast(y_bef.device.type, enabled=False):
        rows = (upcast(y).flatten(0, 1) for y in (y_bef, y_aft))
        z_bef, z_aft = ((y - y.mean(0)) / (y.var(0) + eps).sqrt() for y in rows)
        return z_bef.T @ z_aft / len(z_bef)


def dirl_loss(c: Tensor, alpha: float, correlate: bool = True) -> Tensor:
    """Eq. 4, L_dirl = sum_i (1 - C_ii)^2 + alpha sum_i sum_{j != i} C_ij^2, of correlations C (D, D)."""
    diagonal = c.diagonal()
    decorrelated = alpha * (c - diagonal.diag()).square().sum()
    return (1 - diagonal).square().sum() + decorrelated if correlate else decorrelated


def ccr_loss(words: Tensor, visual: Tensor, same: Tensor, tau: float, logits: str = "two_way") -> Tensor:
    """Eq. 13-14, L_ccr: InfoNCE between the words of a caption and the differences attended to, in both directions.

    words, visual (B, D) of Eq. 12; same (B, B) bool: pairs that are not each other's negatives. "summed": only the
    rows of (S + S^T) / 2, as released. Not in bfloat16, because scores may be in the hundreds."""
    with torch.autocast(words.device.type, enabled=False):
        s = upcast(words) @ upcast(visual).T / tau  # (B, B), Eq. 13
        s = s.masked_fill(same & ~torch.eye(len(s), dtype=torch.bool, device=s.device), float("-inf"))
        return info_nce((s + s.T) / 2) if logits == "summed" else (info_nce(s) + info_nce(s.T)) / 2


def caption_loss(logits: Tensor, caption: Tensor) -> Tensor:
    """Eq. 15, L_cap: cross-entropy of each next word, a mean over all real words of the batch.
    logits (B, V, vocabulary) at words 0 ... V-1, caption (B, V) padded with NULL."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), caption[:, 1:].flatten(), ignore_index=NULL)


def total_loss(losses: dict[str, Tensor], cfg: Config) -> Tensor:
    """Eq. 16: L = L_cap + w_dirl L_dirl + w_ccr L_ccr, from the terms that DIRL.forward returns."""
    return losses["caption"] + cfg.w_dirl * losses.get("dirl", 0) + cfg.w_ccr * losses.get("ccr", 0)


# ---- method ----------------------------------------------------------------------------------------------------------


class DIRL(nn.Module):
    """DIRL+CCR with all its parameters. grid: (C, H, W) of the features; max_len: ids in the longest caption."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        self.cfg, self.grid, self.max_len = cfg, grid, max_len
        subtract, stream = cfg.difference == "subtract", cfg.difference == "stream"
        layers = 0 if subtract else cfg.layers
        self.embed = ImageEmbedding(*grid, cfg.dim, cfg.use_coords)
        self.cross_view = nn.ModuleList(CrossView(cfg, residual=stream or i < layers - 1) for i in range(layers))
        self.fuse = Fusion(cfg, cfg.dim if subtract else 2 * cfg.dim)
        self.decoder = Decoder(cfg, vocab_size, max_len)
        if cfg.w_dirl:
            hidden = nn.Linear(cfg.dim, 4 * cfg.dim), nn.ReLU(), nn.Dropout(cfg.dropout)
            self.mlp = nn.Sequential(*hidden, nn.Linear(4 * cfg.dim, cfg.dim))
        for name, module in self.named_children():
            initialise(module, xavier=cfg.xavier or name not in ("fuse", "decoder"))

    def encode(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, C, H, W) twice -> difference (B, N, D) of Eq. 7, X_bef and X_aft (B, N, D) of Eq. 1."""
        if self.cfg.blind:
            before, after = torch.zeros_like(before), torch.zeros_like(after)
        x_bef, x_aft = self.embed(before), self.embed(after)
        shared_bef, shared_aft = x_bef, x_aft
        for layer in self.cross_view:
            shared_bef, shared_aft = layer(shared_bef, shared_aft)
        if self.cfg.difference == "subtract":
            joined = x_bef - x_aft
        else:
            joined = torch.cat([x_bef - shared_bef, x_aft - shared_aft], -1)  # Eq. 6
        return self.fuse(joined), x_bef, x_aft

    def forward(self, before: Tensor, after: Tensor, caption: Tensor) -> dict[str, Tensor]:
        """The terms of Eq. 16 for one batch of pairs: features (B, C, H, W) twice, caption (B, V)."""
        cfg = self.cfg
        difference, x_bef, x_aft = self.encode(before, after)
        if cfg.ccr_pool == "padded":  # the states at the padding are pooled, too
            caption = F.pad(caption, (0, self.max_len - caption.shape[1]))
        hidden, _, words, visual = self.decoder(caption, difference)
        losses = {"caption": caption_loss(self.decoder.head(hidden), caption)}
        if cfg.w_dirl:
            c = channel_correlation(self.mlp(x_bef), self.mlp(x_aft), cfg.channel_eps)
            losses["dirl"] = dirl_loss(c, cfg.alpha, cfg.correlate)
        if cfg.w_ccr:
            valid = caption != NULL
            if cfg.ccr_pool == "padded":
                valid = torch.ones_like(valid)
            same = (caption[:, None] == caption).all(-1)  # (B, B)
            if cfg.ccr_equal_captions == "negatives":
                same = torch.zeros_like(same)
            losses["ccr"] = ccr_loss(mean_of(words, valid), mean_of(visual, valid), same, cfg.tau, cfg.ccr_logits)
        return losses

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
        _, query, _, _ = self.decoder(ids, difference)
        weight = attention.scores(query, attention.key(difference)).softmax(-1).mean(1)  # (B, V, N)
        return {"attention": mean_of(weight[:, :-1], ids[:, 1:] > END).unflatten(1, self.grid[1:])}


# ---- training --------------------------------------------------------------------------------------------------------


def losses_of(model: DIRL, batches: tuple, cfg: Config) -> dict[str, Tensor]:
    """Eq. 16 and its terms, each a mean over a step's batches (changed pairs, distractor pairs). These stay separate: a
    scene's default image is "before" in both, which a contrastive loss over all pairs would take for a negative."""
    losses: dict[str, Tensor] = {}
    for batch in (b.to(cfg.device) for b in batches):
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.device.startswith("cuda")):
            terms = model(batch.before, batch.after, batch.caption)
        losses = {name: losses.get(name, 0) + term / len(batches) for name, term in terms.items()}
    return losses | {"total": total_loss(losses, cfg)}


def train(cfg: Config, dataset, resume: bool = False) -> DIRL:
    """Train on a data set (data.Dataset) into cfg.out_dir -> the best model by validation.

    Ctrl-C and SIGTERM save last.pt and exit 130 or 143; `resume` continues from there as if training had never
    stopped. FloatingPointError if a loss is not finite."""
    torch.manual_seed(cfg.seed)
    model = DIRL(cfg, len(dataset.vocab), dataset.grid, dataset.max_len).to(cfg.device)
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
            run.end_step(losses, lambda: evaluate(model, dataset, "val", cfg))
    return run.best_model()


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(model: DIRL, dataset, split: str, cfg: Config, out_dir: Path | None = None) -> dict[str, float]:
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
    return data.Captioner(*load_model(DIRL, cfg, checkpoint))


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption pictures."""
    import data

    cfg, args = parse_args(Config, PRESETS, Path(__file__).stem, __doc__, argv, RELEASED)
    if args.caption:
        return data.caption_files(data.Captioner(*load_model(DIRL, cfg, args.checkpoint)), args.caption, args.out)
    dataset = data.open_dataset(cfg)
    if args.eval is None:
        model = train(cfg, dataset, args.resume)
    else:
        model, state = load_model(DIRL, cfg, args.eval)
        dataset.check_state(state)
    evaluate(model, dataset, args.split, cfg, Path(cfg.out_dir))


if __name__ == "__main__":
    run_main(main)
