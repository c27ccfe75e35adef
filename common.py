"""Layers, losses, greedy decoding and settings that all five methods share. Nothing here belongs to
a single paper, and nothing reads or writes a file.

Axis letters: A, B images or pairs; N, M grid cells; D width; h heads; L ids of a caption, padding
included, or other tokens; V ids of the vocabulary; C channels; H, W rows and columns of the grid.
Licence: MIT.
"""

import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# ---- layers --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention softmax(q k^T / sqrt(D/h)) v (Vaswani et al. 2017, section 3.2).
    x (B, L, D), source (B, M, D) -> (B, L, D). Losses and attention maps call `project` alone."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0, out_proj: bool = True):
        super().__init__()
        if dim % heads:
            raise InputError(f"{heads} heads cannot share a width of {dim} (--heads, --dim)")
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim) if out_proj else nn.Identity()

    def forward(
        self, x: Tensor, source: Tensor, causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        q, k, v = self.project(x, source)
        return self.attend(q, k, v, causal, mask)

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> the query of x (B, L, D), the key and the value of source (B, M, D)."""
        return self.query(x), self.key(source), self.value(source)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """q (B, L, D), k and v (B, M, D) -> (B, L, D). mask: bool (B or 1, 1, L or 1, M), True
        where x may attend; only without causal=True."""
        q = self._split(q)
        k = self._split(k)
        v = self._split(v)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q (B, L, D), k (B, M, D) -> the scores before the softmax (B, h, L, M)."""
        q = self._split(q)
        k = self._split(k)
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, L, D) -> (B, h, L, D/h)


def initialise(module: nn.Module, xavier: bool) -> None:
    """Initialise each Attention as nn.MultiheadAttention does. With `xavier`, all other tensors of
    two or more dimensions become Xavier-uniform, including those of convolutions and embeddings."""
    if xavier:
        for p in module.parameters():
            if p.ndim > 1:
                nn.init.xavier_uniform_(p)
    for m in module.modules():
        if isinstance(m, Attention):
            # nn.MultiheadAttention draws all three as one matrix (3D, D). Its bound, sqrt(6/4D), is
            # sqrt(1/2) times that of a matrix (D, D).
            for linear in (m.query, m.key, m.value):
                nn.init.xavier_uniform_(linear.weight, gain=0.5**0.5)
                nn.init.zeros_(linear.bias)
            if isinstance(m.out, nn.Linear):
                nn.init.zeros_(m.out.bias)


class GridPosition(nn.Module):
    """Learned 2-D positions (D, H, W): [:, row, col] is [column embedding ; row embedding]."""

    def __init__(self, dim: int, height: int, width: int):
        super().__init__()
        self.col = nn.Embedding(width, dim // 2)
        self.row = nn.Embedding(height, dim - dim // 2)

    def forward(self) -> Tensor:
        col = self.col.weight[None].expand(self.row.num_embeddings, -1, -1)  # (H, W, D/2)
        row = self.row.weight[:, None].expand(-1, self.col.num_embeddings, -1)  # (H, W, D/2)
        return torch.cat([col, row], -1).permute(2, 0, 1)


def sinusoid(length: int, dim: int) -> Tensor:
    """-> fixed positions (length, D) of sines and cosines (Vaswani et al. 2017, section 3.5)."""
    position = torch.arange(length)[:, None]
    frequency = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angle = position * frequency
    table = torch.zeros(length, dim)
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle.cos()[:, : dim // 2]
    return table


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """The mean over the words of a sentence. x (B, L, D), valid (B, L) bool -> (B, D)."""
    weight = valid.to(x.dtype)[..., None]
    return (x * weight).sum(1) / weight.sum(1).clamp(min=1)


# ---- losses --------------------------------------------------------------------------------------


def upcast(x: Tensor) -> Tensor:
    """Turn bfloat16 or float16, which have two or three digits, into float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def info_nce(scores: Tensor) -> Tensor:
    """InfoNCE over rows: -mean_a log softmax_b(scores)_aa (van den Oord et al. 2018).
    scores (B, B), partners on the diagonal -> a scalar."""
    partner = torch.arange(scores.shape[0], device=scores.device)
    return F.cross_entropy(scores, partner)


# ---- decoding ------------------------------------------------------------------------------------

# The first ids of every vocabulary are padding, the unknown word, and the two ends of a caption.
NULL = 0
UNK = 1
START = 2
END = 3


def is_word(ids: Tensor) -> Tensor:
    """True where an id is none of the four special ids. Any shape -> the same shape."""
    return (ids != NULL) & (ids != UNK) & (ids != START) & (ids != END)


def decode(next_word: Callable[[Tensor], Tensor], count: int, max_len: int, device) -> Tensor:
    """Write `count` captions word by word, each time the likeliest word. -> ids (B, max_len),
    B = count: START, at most max_len - 1 words, then NULL, without END.

    next_word(ids (B, t)) -> logits (B, V) of word t, from all words anew. (Keeping their keys and
    values would be faster, but each decoder would need code for it.) `generate` turns gradients
    off; if `decode` did, torch.export.save would fail."""
    ids = torch.full((count, max_len), NULL, device=device)
    ids[:, 0] = START
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    for t in range(1, max_len):
        logits = next_word(ids[:, :t])
        logits[:, UNK] = float("-inf")  # never chosen
        word = logits.argmax(-1)
        # SCORER's and DIRL's code stops at END alone, but cuts its text at NULL: same text.
        ended |= (word == END) | (word == NULL)
        ids[:, t] = word.masked_fill(ended, NULL)
        # This check waits for the GPU, so it does not follow every word. An exported loop has none.
        if t % 8 == 0 and not torch.compiler.is_compiling() and ended.all():
            break
    return ids


# ---- configuration -------------------------------------------------------------------------------


class InputError(ValueError):
    """A user's flags, files or data are at fault. run_main prints this error in one line."""


@dataclass
class RunConfig:
    """The settings that all methods share. A field's comment is its --help text.

    parse_args fills in data_dir, out_dir and device, `preset` only data_dir: from Python, set the
    others before `train`, and call set_up_device. InputError for a value that cannot work."""

    # With --resume, --eval and --caption, flags may change only these fields: paths, because files
    # may have moved, and settings that do not alter the steps already done (but `steps` may not
    # change with --schedule cosine: see refuse_changes).
    MAY_CHANGE = {
        "extractor", "data_dir", "out_dir", "device", "compile", "features", "steps",
        "log_every", "eval_every", "eval_batch", "patience",
    }  # fmt: skip
    # The least and the largest value of a number, if not 0 and infinity.
    RANGES = {
        "steps": (1, math.inf),
        "batch_size": (1, math.inf),
        "log_every": (1, math.inf),
        "eval_every": (1, math.inf),
        "eval_batch": (1, math.inf),
        "heads": (1, math.inf),
        "dropout": (0, 1),
        "grad_clip": (-math.inf, math.inf),  # elsewhere, -1 is a word for "off"
    }

    # The defaults of seed, steps, batch_size and lr are usual on CLEVR-Change (SCORER's code).
    dataset: str = "mini"  # data set; chooses the preset
    extractor: str = ""  # resnet101-layer4, timm/NAME, ... (default: the data set's own)
    data_dir: str = ""  # folder of the data set (default: data/<dataset>)
    out_dir: str = ""  # folder of the run (default: runs/<method>-<dataset>)
    seed: int = 1111  # random seed for weights, dropout and data order
    steps: int = 10000  # training steps
    batch_size: int = 128  # scenes per step (each may have a changed and a distractor pair)
    lr: float = 2e-4  # Adam's learning rate
    schedule: Literal["step", "cosine"] = "step"  # a tenth every lr_drop steps, or cosine to 0
    lr_drop: int = 0  # steps between drops of --schedule step; 0: no drops
    warmup: int = 0  # steps of linear warm-up
    grad_clip: float = 0.0  # maximum gradient norm; 0 or less: no clipping
    log_every: int = 50  # steps between lines of log.jsonl
    eval_every: int = 1000  # steps between validations
    patience: int = 0  # stop after this many validations without a new best; 0: never
    select_by: Literal["CIDEr", "BLEU-4", "ROUGE-L"] = "CIDEr"  # metric that chooses best.pt
    eval_batch: int = 64  # pairs decoded at once
    device: str = ""  # cuda, cpu, ... (default: cuda if there is a GPU)
    amp: bool = True  # bfloat16 autocast; CUDA only
    compile: bool = True  # torch.compile of the training step; CUDA only
    features: Literal["auto", "gpu", "file"] = "auto"  # where features are; auto: GPU if they fit
    blind: bool = False  # zero the image features (language-only baseline)

    def __post_init__(self):
        for name, kind in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            if typing.get_origin(kind) is Literal:
                # From Python, a wrong word would choose one of several branches in silence.
                choices = typing.get_args(kind)
                if value not in choices:
                    raise InputError(f"--{name} {value}: expected one of {', '.join(choices)}")
            elif kind in (int, float):
                least, largest = self.RANGES.get(name, (0, math.inf))
                if not least <= value <= largest:
                    raise InputError(f"--{name} {value}: expected {least} to {largest}")

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")


def learning_rate(cfg: RunConfig, step: int) -> float:
    """Learning rate of a step, counted from 0."""
    lr = cfg.lr * min(1.0, (step + 1) / max(1, cfg.warmup))
    if cfg.schedule == "cosine":
        done = max(0, step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
        return lr * (1 + math.cos(math.pi * done)) / 2
    drops = step // cfg.lr_drop if cfg.lr_drop else 0
    return lr * 0.1**drops


def set_up_device(device: str) -> None:
    """Set this process up for the device, so that training and a later --eval compute alike."""
    on_cuda = device.startswith("cuda")
    # "high" is TF32. It applies to matrix products outside autocast's bfloat16.
    torch.set_float32_matmul_precision("high" if on_cuda else "highest")
    if on_cuda:
        from torch._functorch import config as functorch_config

        if ":" in device:  # some calls, such as is_bf16_supported, look at the current GPU only
            torch.cuda.set_device(device)
        # cuDNN's attention plans every new shape for up to a second, and the number of phrases that
        # CLIP reads varies between steps (github.com/pytorch/pytorch/pull/155958).
        torch.backends.cuda.enable_cudnn_sdp(False)
        # What a loss computes in float32 keeps its backward pass in float32. By default, a compiled
        # one repeats the autocast of the forward pass (github.com/pytorch/pytorch/issues/179804).
        functorch_config.backward_pass_autocast = "off"
        # By default, fullgraph=True fails after eight graphs. Each task of each model has its own.
        torch._dynamo.config.recompile_limit = 64
