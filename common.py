"""Small parts that every method file builds on. Nothing here belongs to one paper, and nothing here reads data.

Layers:   Attention, initialise, GridPosition, sinusoid    Losses:  info_nce, token_match
Decoding: decode                                           Running: RunConfig, parse_args, Run, checkpoints, curves
A data set is passed as an argument: any object with the methods of data.Dataset that are called on it.
Axis letters: A, B images or pairs; N, M grid cells; D width; K heads; L tokens; V words; C channels.
To use a method elsewhere, take its file and this one. Training on a data set of data.py needs that file too.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import math
import os
import pickle
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageDraw, ImageFont  # torchvision's own image library
from torch import Tensor
from tqdm import tqdm

# ---- layers ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention softmax(q k^T / sqrt(D/K)) v on PyTorch's fused kernel (Vaswani et al. 2017, section 3.2).

    forward: x (B, L, D), memory (B, M, D) -> (B, L, D). `project` and `attend` are its two halves, separate
    because matching losses read the projections and decoding keeps keys and values between steps.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0, bias: bool = True, out_proj: bool = True):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias) for _ in range(3))
        self.out = nn.Linear(dim, dim, bias) if out_proj else nn.Identity()

    def forward(self, x: Tensor, memory: Tensor, causal: bool = False) -> Tensor:
        return self.attend(*self.project(x, memory), causal)

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> query (B, L, D) of x, key and value (B, M, D) of memory; heads still side by side in D."""
        return self.query(x), self.key(memory), self.value(memory)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, L, D) -> (B, K, L, D/K)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None) -> Tensor:
        """mask: bool (B, 1, L or 1, M), True = may be attended to. Give a mask or causal=True, not both."""
        q, k, v = self._split(q), self._split(k), self._split(v)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores before the softmax, which the fused kernel does not return: (B, L, D), (B, M, D) -> (B, K, L, M)."""
        q, k = self._split(q), self._split(k)
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def initialise(module: nn.Module, xavier: bool) -> None:
    """Initialise attention like nn.MultiheadAttention and, with `xavier`, every matrix of the module Xavier-uniform."""
    for p in module.parameters() if xavier else ():
        if p.ndim > 1:
            nn.init.xavier_uniform_(p)
    for m in module.modules():
        if isinstance(m, Attention):
            for linear in (m.query, m.key, m.value):  # as if they were one matrix (3D, D)
                nn.init.xavier_uniform_(linear.weight, gain=0.5**0.5)
            for linear in (m.query, m.key, m.value, m.out):
                nn.init.zeros_(linear.bias)


class GridPosition(nn.Module):
    """Learned 2-D position: pos[row, col] = [column embedding ; row embedding]. -> (D, H, W), to be added to images."""

    def __init__(self, dim: int, height: int, width: int):
        super().__init__()
        self.col = nn.Embedding(width, dim // 2)
        self.row = nn.Embedding(height, dim - dim // 2)

    def forward(self) -> Tensor:
        h, w = self.row.num_embeddings, self.col.num_embeddings
        col = self.col.weight[None].expand(h, -1, -1)  # (H, W, D/2)
        row = self.row.weight[:, None].expand(-1, w, -1)  # (H, W, D/2)
        return torch.cat([col, row], -1).permute(2, 0, 1)


def sinusoid(length: int, dim: int) -> Tensor:
    """Fixed positions, sines in even and cosines in odd channels (Vaswani et al. 2017, section 3.5). -> (length,
    dim)."""
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    table = torch.zeros(length, dim)
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle.cos()[:, : dim // 2]
    return table


def mean_of(x: Tensor, valid: Tensor) -> Tensor:
    """Mean over the words of a sentence. x (B, V, D), valid (B, V) bool -> (B, D)."""
    weight = valid.to(x.dtype)[..., None]
    return (x * weight).sum(1) / weight.sum(1).clamp(min=1)


# ---- losses ----------------------------------------------------------------------------------------------------------


def upcast(x: Tensor) -> Tensor:
    """bfloat16 -> float32, for sums and scores that need more than its three digits; other types stay unchanged."""
    return x.float() if x.dtype == torch.bfloat16 else x


def info_nce(scores: Tensor) -> Tensor:
    """InfoNCE over rows, -mean_a log softmax_b(scores)_aa (van den Oord et al. 2018). scores (B, B), partners on the
    diagonal -> a scalar."""
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


MATCH_SLICE = 2**25  # scores that token_match keeps at once


def best_of_rows(s: Tensor) -> tuple[Tensor, Tensor]:
    """s.max(1) of s (X, N, Y) -> maxima and their rows, each (X, Y). It is computed as channels-last max pooling, whose
    CPU loop is vectorised and takes a fifth of Tensor.max's time."""
    maxima, rows = F.max_pool2d(s.unsqueeze(2).permute(0, 3, 1, 2), (s.shape[1], 1), return_indices=True)
    return maxima.flatten(1), rows.flatten(1)


@torch.library.custom_op("common::token_match", mutates_args=())
def _token_match(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """token_match for one head. q (A, N, C), k (B, M, C) -> (A, B), winning keys (A, N, B), winning queries (A, B, M).

    A dense version needs A*B*N*M scores (2.5 GB at 128 pairs of 196 cells) four times over in the backward pass. This
    one holds a slice of them at a time and keeps only its winners for the backward pass. To torch.compile it is a
    single operator."""
    (_A, N, C), (B, M, _) = q.shape, k.shape
    keys = k.transpose(0, 1).reshape(M * B, C).T  # images innermost, so that neither maximum runs along adjacent scores
    total, best_key, best_query = [], [], []
    for part in q.split(max(1, MATCH_SLICE // (N * B * M))):
        s = part.reshape(-1, C) @ keys
        over_keys, j = (x.view(-1, N, B) for x in best_of_rows(s.view(-1, M, B)))
        over_queries, i = (x.view(-1, M, B).transpose(1, 2).contiguous() for x in best_of_rows(s.view(-1, N, M * B)))
        total.append((over_keys.mean(1, dtype=q.dtype) + over_queries.mean(2, dtype=q.dtype)) / 2)
        best_key.append(j.to(torch.int16))
        best_query.append(i.to(torch.int16))
    return torch.cat(total), torch.cat(best_key), torch.cat(best_query)


@_token_match.register_fake
def _(q: Tensor, k: Tensor):
    (A, N, _), (B, M, _) = q.shape, k.shape
    return q.new_empty(A, B), q.new_empty(A, N, B, dtype=torch.int16), q.new_empty(A, B, M, dtype=torch.int16)


def _token_match_backward(ctx, grad: Tensor, *_) -> tuple[Tensor, Tensor]:
    """grad (A, B) -> gradients of q and k. The gradient of the scores is grad / 2N or grad / 2M at the winners and zero
    elsewhere, so q and k get weighted sums over winners. An embedding bag makes these without a (winners, C) tensor."""
    q, k, best_key, best_query = ctx.saved_tensors
    (A, N, C), (B, M, _) = q.shape, k.shape
    queries, keys = q.reshape(-1, C), k.reshape(-1, C)
    key_of = (best_key.long() + torch.arange(B, device=q.device) * M).view(A * N, B)
    query_of = (
        (best_query.long() + torch.arange(A, device=q.device)[:, None, None] * N).permute(1, 2, 0).reshape(B * M, A)
    )
    by_key = (grad[:, None] / (2 * N)).expand(A, N, B).reshape(A * N, B)
    by_query = (grad.T[:, None] / (2 * M)).expand(B, M, A).reshape(B * M, A)
    grad_q = F.embedding_bag(key_of, keys, mode="sum", per_sample_weights=by_key)
    grad_k = F.embedding_bag(query_of, queries, mode="sum", per_sample_weights=by_query)
    grad_q += spread_rows(keys, query_of, by_query, A * N)
    grad_k += spread_rows(queries, key_of, by_key, B * M)
    return grad_q.view_as(q), grad_k.view_as(k)


def spread_rows(x: Tensor, index: Tensor, weight: Tensor, count: int) -> Tensor:
    """Sums of rows: row index[r, w] of the result gets weight[r, w] x[r]. x (R, C), index and weight (R, W) -> (count,
    C)."""
    target, order = index.flatten().int().sort()
    rows = torch.arange(count, dtype=torch.int32, device=x.device)
    first = torch.searchsorted(target, rows)  # where each row's share of `order` begins
    return F.embedding_bag(order // index.shape[1], x, first, mode="sum", per_sample_weights=weight.flatten()[order])


_token_match.register_autograd(
    _token_match_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output[1:])
)


def token_match(q: Tensor, k: Tensor, heads: int = 1) -> Tensor:
    """Similarity of every image a to every image b by their best matching tokens (FILIP, ICLR 2022):
    1/2 [ mean_l max_m <q_al, k_bm> + mean_m max_l <q_al, k_bm> ], for heads > 1 the mean over heads, each a
    slice of the channels. q (A, N, C), k (B, M, C) -> (A, B). Memory does not grow with A*B*N*M; ties go to one winner.
    ValueError if heads do not divide C, a size is 0, or an image has more than 32,768 tokens."""
    (A, N, C), (B, M, D) = q.shape, k.shape
    if C != D or C % heads or not (A and B and C and 0 < N <= 2**15 and 0 < M <= 2**15):  # winners are 16-bit numbers
        raise ValueError(f"token_match of {tuple(q.shape)}, {tuple(k.shape)} in {heads} heads: expected (A, N, C), "
                         "(B, M, C), none of them 0, N and M at most 32768, and heads that divide C")  # fmt: skip
    pairs = zip(q.chunk(heads, -1), k.chunk(heads, -1), strict=True)
    return sum(_token_match(a, b)[0] for a, b in pairs) / heads


# ---- decoding --------------------------------------------------------------------------------------------------------

NULL, UNK, START, END = range(
    4
)  # padding, unknown word, and the two ends of a caption: the first ids of every vocabulary


@torch.no_grad()
def decode(step: Callable[[Tensor, int], Tensor], count: int, max_len: int, device, sample: bool = False) -> Tensor:
    """Write `count` captions word by word: the likeliest word or, with `sample`, a random draw; never UNK.

    step(words (B,), position) -> logits (B, vocabulary). -> (B, max_len) ids: START, at most max_len - 1 words, then
    NULL. Decoding stops once all captions have ended; it checks every eighth word, as each check waits for the GPU."""
    ids = torch.full((count, max_len), NULL, device=device)
    ids[:, 0] = START
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    for t in range(max_len - 1):
        logits = step(ids[:, t], t)
        logits[:, UNK] = float("-inf")
        word = logits.softmax(-1).multinomial(1)[:, 0] if sample else logits.argmax(-1)
        ended |= (word == END) | (word == NULL)
        ids[:, t + 1] = word.masked_fill(ended, NULL)
        if t % 8 == 7 and ended.all():
            break
    return ids


# ---- configuration ---------------------------------------------------------------------------------------------------


@dataclass
class RunConfig:
    """The settings that all methods share; a method's Config adds its own. A field's comment is its --help text.

    ValueError if a number is outside its RANGES entry (default: 1 to 10^8 if whole, else 0 to 10^8)."""

    RANGES = {name: (0, 10**8) for name in ("seed", "data_seed", "lr_drop", "warmup", "patience")}

    dataset: str = "mini"  # data set; chooses the preset
    extractor: str = ""  # network that made the features, such as resnet101-layer4 (default: the data set's own)
    data_dir: str = ""  # folder of the data set (default: data/<dataset>)
    out_dir: str = ""  # folder of the run (default: runs/<method>-<dataset>)
    overwrite: bool = False  # replace a run that out_dir already holds
    scenes: int = 5000  # mini: rendered training scenes (5 % as many for validation, 10 % for test)
    objects: str = "2,4"  # mini: fewest and most objects in a scene
    data_seed: int = 0  # mini: seed of the scenes and of the feature network
    seed: int = 1111  # seed of weights, dropout and data order
    steps: int = 10000  # training steps
    batch_size: int = 128  # scenes per step (each scene of CLEVR-Change and mini has a changed and a distractor pair)
    lr: float = 2e-4  # Adam's learning rate
    schedule: Literal["step", "cosine"] = "step"  # x0.1 every lr_drop steps, or cosine down to zero at the last step
    lr_drop: int = 0  # steps between drops of --schedule step; 0: no drops
    warmup: int = 0  # steps of linear warm-up
    grad_clip: float = 0.0  # largest gradient norm; 0: no clipping
    log_every: int = 50  # steps between lines of log.jsonl
    eval_every: int = 1000  # steps between validations; last.pt is saved as often
    patience: int = 0  # stop after this many validations in a row without a new best; 0: never
    select_by: Literal["CIDEr", "BLEU-4", "ROUGE-L"] = "CIDEr"  # validation metric (all pairs) that chooses best.pt
    eval_batch: int = 64  # pairs decoded at once
    device: str = ""  # cuda, cpu, ... (default: cuda if there is one)
    amp: bool = True  # bfloat16 autocast; CUDA only
    compile: bool = True  # torch.compile of the training step; CUDA only
    features: Literal["auto", "gpu", "file"] = "auto"  # where features are kept; auto: on the GPU if there is room

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value, (low, high) = getattr(self, f.name), self.RANGES.get(f.name, (int(f.type is int), 10**8))
            if get_origin(f.type) is Literal:
                fits, expected = value in get_args(f.type), " or ".join(get_args(f.type))
            elif f.type in (int, float):
                fits = type(value) in (int, f.type) and low <= value <= high  # not so for NaN
                expected = f"{'a whole number' if f.type is int else 'a number'} from {low} to {high}"
            else:
                fits, expected = type(value) is f.type, f.type.__name__
            if not fits:
                raise ValueError(f"--{f.name} {value}: expected {expected}")
        if getattr(self, "dim", 0) % getattr(self, "heads", 1):
            raise ValueError(f"--dim {self.dim} is not a multiple of --heads {self.heads}")


def preset(Config: type, presets: dict[str, dict], released: dict[str, dict], dataset: str, reading: str = "paper"):
    """A data set's Config: defaults < presets[dataset]; if released, then < released["all"] < released[dataset]."""
    values = {"dataset": dataset, "data_dir": f"data/{dataset}"} | presets.get(dataset, {})
    if reading == "released":
        values |= {"reading": reading} | released["all"] | released.get(dataset, {})
    return Config(**values)


def saved_config(Config: type, checkpoint: str | Path):
    """The Config that a checkpoint was trained with; missing fields get their defaults. ValueError if the checkpoint
    has a field that Config does not."""
    saved = load_checkpoint(checkpoint)["config"]
    if unknown := sorted(saved.keys() - {f.name for f in dataclasses.fields(Config)}):
        raise ValueError(f"{checkpoint} is of another method or version: no field {', '.join(unknown)} here")
    with file_errors(checkpoint, TRAIN_FIRST):
        return Config(**saved)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line (run_main prints it and exits 2)."""

    def error(self, message: str):
        raise ValueError(f"{message}; --help shows every flag")


def parse_args(
    Config: type, presets: dict, script: str, doc: str, argv: list[str] | None, released: dict | None = None
):
    """-> (config, command). Every config field is a flag. Flags that are not given take the checkpoint's value (--eval,
    --caption, --resume) or else the preset's. With a checkpoint, out_dir is by default the checkpoint's folder, and
    the device is the checkpoint's only for --resume."""
    parser = Parser(description=doc.splitlines()[0], allow_abbrev=False)
    group = parser.add_argument_group("what to do (default: train, then evaluate on test)")
    command = group.add_mutually_exclusive_group()
    command.add_argument("--resume", action="store_true", help="continue out_dir's last.pt")
    command.add_argument("--eval", metavar="CHECKPOINT", help="only evaluate this checkpoint")
    caption = "caption two images, BEFORE AFTER, or every pair of a CSV file with the columns before, after"
    command.add_argument("--caption", nargs="+", metavar="FILE", help=caption)
    group.add_argument("--split", choices=["val", "test"], default="test", help="split for --eval (default: test)")
    group.add_argument("--checkpoint", help="checkpoint for --caption")
    group.add_argument("--out", metavar="FILE", help="with --caption: the attention picture, or captions.json of a CSV")
    group = parser.add_argument_group(f"config (presets change it for {', '.join(presets)})")
    comments = {}  # field -> its trailing comment in the class or a base of it
    for base in reversed(Config.__mro__[:-1]):
        comments |= re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(base), flags=re.M)
    for f in dataclasses.fields(Config):
        kind = {"choices": get_args(f.type)} if get_origin(f.type) is Literal else {"type": f.type}
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else kind
        text = f"{comments.get(f.name, '')} (default: {f.default})".replace("%", "%%")
        group.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=text, **kind)
    args = parser.parse_args(argv)
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if f.name in args}
    if bool(args.caption) != bool(args.checkpoint):
        raise ValueError("--caption and --checkpoint go together, for example --checkpoint runs/<run>/best.pt")
    many = args.caption and len(args.caption) == 1
    if args.caption and not (args.caption[0].lower().endswith(".csv") if many else len(args.caption) == 2):
        raise ValueError(f"--caption {' '.join(args.caption)}: expected two images, or a .csv file")
    endings = (".json",) if many else (".png", ".jpg", ".jpeg", ".pdf")
    if args.out is not None and not (args.caption and args.out.lower().endswith(endings)):
        raise ValueError(f"--out {args.out}: expected --caption, and a name that ends in {', '.join(endings)}")
    if args.split != "test" and args.eval is None:
        raise ValueError("--split goes with --eval")

    dataset = given.get("dataset", Config.dataset)
    out_dir = given.get("out_dir") or f"runs/{script}-{dataset}"
    checkpoint = f"{out_dir}/last.pt" if args.resume else args.checkpoint or args.eval
    if checkpoint:
        base = saved_config(Config, checkpoint)
        for name in {"dataset", "reading"} & given.keys():
            if given[name] != getattr(base, name):
                raise ValueError(f"--{name} {given[name]}: {checkpoint} was trained with {getattr(base, name)}")
        out_dir = given.get("out_dir") or str(Path(checkpoint).parent)
    else:
        base = preset(Config, presets, released or {}, dataset, given.get("reading", "paper"))
        if dataset not in presets:
            print(f"no preset for {dataset}: running on the defaults; presets: {', '.join(presets)}")
    device = usable_device(given.get("device") or (base.device if args.resume else ""))
    cfg = dataclasses.replace(base, **given | {"out_dir": out_dir, "device": device})
    if not args.caption:
        check_folder(Path(out_dir), new=not checkpoint, overwrite=cfg.overwrite)
    return cfg, args


def usable_device(name: str) -> str:
    """The named device; for an empty name, CUDA if there is one, else the CPU. ValueError if it cannot be used."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    with file_errors(f"--device {name}", "leave it out, or give cpu"):
        torch.zeros(1, device=name).item()
    return name


def learning_rate(cfg: RunConfig, step: int) -> float:
    """Learning rate of a step (counted from 0)."""
    lr = cfg.lr * min(1.0, (step + 1) / max(1, cfg.warmup))
    if cfg.schedule == "cosine":
        done = max(0, step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
        return lr * (1 + math.cos(math.pi * done)) / 2
    return lr * 0.1 ** (step // cfg.lr_drop if cfg.lr_drop else 0)


# ---- running ---------------------------------------------------------------------------------------------------------

RUN_FILES = [
    *("config.json", "log.jsonl", "last.pt", "best.pt", "pretrained.pt", "curves.png", "samples.png"),
    *("samples_val.png", "captions_val.json", "captions_test.json", "scores_val.json", "scores_test.json"),
]


def check_folder(folder: Path, new: bool, overwrite: bool) -> None:
    """ValueError if the folder holds files but no run, or if a new run would replace a run without `overwrite`."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    config = folder / "config.json"
    with file_errors(config, f"{folder} holds files that are not of a run; choose another --out_dir"):
        if not {"dataset", "out_dir", "batch_size", "select_by"} <= json.loads(config.read_text()).keys():
            raise ValueError("not the config of a run")
    if new and not overwrite:
        raise ValueError(f"{folder} holds a run already; --resume continues it, --overwrite replaces it")


class Run:
    """Everything around a training step: the run's folder, checkpoints, log, learning rate, validation, resuming.

        with Run(cfg, resume, model, optimizer, dataset) as run:
            for batches in run.steps(dataset):
                ...                                     # one step of training
                run.end_step(losses, validate)

    sources: what captions depend on besides the model, the data set first; each has state() and check_state(state),
    like data.Dataset. Inside `with`, the first Ctrl-C or SIGTERM only sets `stop` (to 130 or 143), so that the current
    step is finished and saved; a second one stops at once. With `resume` the run continues from last.pt as if it had
    never stopped."""

    def __init__(self, cfg: RunConfig, resume: bool, model: nn.Module, optimizer: torch.optim.Optimizer, *sources):
        self.cfg, self.dir, self.model, self.optimizer, self.sources = cfg, Path(cfg.out_dir), model, optimizer, sources
        self.step, self.best, self.worse, self.stop = 0, float("-inf"), 0, 0  # worse: validations since the best one
        self.losses: list[dict[str, Tensor]] = []  # since the last line of the log; they stay on the device
        self.resume, self.resumed, self.handlers = resume, None, {}
        self.on_cuda = cfg.device.startswith("cuda")

    def __enter__(self):
        self.dir.mkdir(parents=True, exist_ok=True)
        if self.resume:
            self.resumed = self.restore()
        self.begin()
        torch.set_float32_matmul_precision("high" if self.on_cuda else "highest")  # TF32 where autocast leaves float32
        if self.cfg.compile and self.on_cuda:
            self.model.compile(fullgraph=True, dynamic=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self.handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number, _frame):
        self.stop = 128 + number
        self.__exit__()  # puts the earlier handlers back
        print("stopping after this step; once more to stop at once", file=sys.stderr)

    def steps(
        self, dataset, batch_size: int = 0, first: int = 0, last: int = 0, rate=None, name: str = "train"
    ) -> Iterator:
        """Yield the batches of steps first ... last - 1 (default: the whole run), starting at the current step. Each
        time the learning rate is set to rate(cfg, step - first); the default rate is `learning_rate`."""
        self.first, self.last, self.name = first, last or self.cfg.steps, name
        if self.resumed and self.resumed["step"] > first:
            with file_errors(self.dir / "last.pt", TRAIN_FIRST):
                self.optimizer.load_state_dict(self.resumed["optimizer"])
                if any(x.ndim and x.shape != p.shape for p, m in self.optimizer.state.items() for x in m.values()):
                    raise ValueError("Adam's moments have other shapes")  # fused Adam would write past their end
        if self.step == 0:
            self.save("last.pt")
        self.began, self.begun_at = time.perf_counter(), self.step
        self.bar = tqdm(total=self.last - first, initial=self.step - first, desc=name, unit="step", disable=None)
        batch_size = batch_size or self.cfg.batch_size
        rate = rate or learning_rate
        while self.step < self.last and not self.out_of_patience():
            epoch, start = divmod(self.step - first, dataset.steps(batch_size))
            for batches in dataset.train_batches(batch_size, self.cfg.seed, epoch, start):
                self.lr = self.optimizer.param_groups[0]["lr"] = rate(self.cfg, self.step - first)
                yield batches
                if self.step == self.last or self.out_of_patience():
                    break
        self.bar.close()
        if self.step < self.last:
            print(f"no better validation in {self.worse}: training ends at step {self.step}")

    def out_of_patience(self) -> bool:
        """Have cfg.patience validations passed without a better one?"""
        return 0 < self.cfg.patience <= self.worse

    def end_step(self, losses: dict[str, Tensor], validate: Callable[[], dict[str, float]] | None) -> None:
        """After each step: log, validate every eval_every steps and at the last one, keep best.pt and last.pt.

        validate() -> scores; the one that cfg.select_by names chooses best.pt. Without validation pairs it returns {},
        and the last weights count as the best. SystemExit if the user asked the run to stop; FloatingPointError if a
        loss or a weight is not finite."""
        self.step += 1
        self.losses.append({name: loss.detach() for name, loss in losses.items()})
        self.bar.update()
        due = (self.step - self.first) % self.cfg.eval_every == 0 or self.step == self.last
        if self.step % self.cfg.log_every == 0 or due or self.stop:
            means, seconds = self.mean_losses(), time.perf_counter() - self.began
            self.log(step=self.step, event="train", stage=self.name, seconds=round(seconds, 2), lr=self.lr, **means)
            self.bar.set_postfix(line := {name: f"{value:.3f}" for name, value in means.items()})
            if self.bar.disable:  # no terminal
                left = seconds / (self.step - self.begun_at) * (self.last - self.step) / 60
                losses_now = ", ".join(f"{name} {value}" for name, value in line.items())
                print(f"{self.name} {self.step}/{self.last}: {losses_now}; {left:.0f} minutes left", flush=True)
        if due and validate:
            scores = validate()
            self.worse += 1
            if scores:
                self.log(step=self.step, event="eval", select_by=self.cfg.select_by, **scores)
                scored = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
                tqdm.write(f"step {self.step}: validation {scored}")
            if not scores or scores[self.cfg.select_by] > self.best:
                self.best, self.worse = scores.get(self.cfg.select_by, self.best), 0
                self.save("best.pt")
        stop = self.stop  # read once, after validation: a signal may come at any line
        if due or stop:
            self.save("last.pt")
            with atomic_write(self.dir / "curves.png") as path:
                curves(self.dir / "log.jsonl").save(path, "PNG")
        if stop:
            raise SystemExit(stop)

    def mean_losses(self) -> dict[str, float]:
        """Mean of each loss since the last line of the log, over the steps that computed it. FloatingPointError naming
        the first step with a loss that is not finite, and all losses of that step."""
        values_of: dict[str, list[float]] = {}
        for step, losses in enumerate(self.losses, self.step - len(self.losses) + 1):
            values = {name: loss.item() for name, loss in losses.items()}
            if not all(map(math.isfinite, values.values())):
                terms = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
                raise FloatingPointError(
                    f"loss is not finite at step {step}: {terms}; the last checkpoint is untouched; "
                    "try a lower --lr or --grad_clip 1"
                )
            for name, value in values.items():
                values_of.setdefault(name, []).append(value)
        self.losses = []
        return {name: round(sum(values) / len(values), 6) for name, values in values_of.items()}

    def log(self, **values) -> None:
        """Append one JSON line to log.jsonl."""
        with open(self.dir / "log.jsonl", "a") as f:
            f.write(json.dumps(values) + "\n")

    def begin(self) -> None:
        """Remove the files of an older run, unless this one resumes it. Log and print what this run's results depend
        on: code, versions, device and config (printed: only fields that differ from their defaults)."""
        for name in RUN_FILES:
            if not self.resumed:
                (self.dir / name).unlink(missing_ok=True)
            for path in self.dir.glob(f"{name}.*.partial"):  # left by a process that was killed
                path.unlink()
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        code = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
        device = torch.cuda.get_device_name() if self.on_cuda else f"cpu, {torch.get_num_threads()} threads"
        about = {"code": code, "torch": torch.__version__, "torchvision": torchvision.__version__, "device": device}
        about["parameters"] = sum(p.numel() for p in self.model.parameters())
        config = dataclasses.asdict(self.cfg)
        (self.dir / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        self.log(step=self.step, event="resume" if self.resumed else "start", **about, config=config)
        changed = {f.name: config[f.name] for f in dataclasses.fields(self.cfg) if config[f.name] != f.default}
        print(*(f"{name}: {value}" for name, value in [*about.items(), *changed.items()]), sep="\n", flush=True)

    def save(self, name: str) -> None:
        """Save a checkpoint under this name. If a weight is not finite: FloatingPointError, and the old file stays."""
        if not all(p.isfinite().all() for p in self.model.parameters()):
            raise FloatingPointError(f"weights are not finite after step {self.step}; {name} is untouched; lower --lr")
        state = {key: value for source in self.sources for key, value in source.state().items()}
        random = {"cpu": torch.get_rng_state()}  # for dropout and masks; the data order follows from seed and epoch
        if self.on_cuda:
            random["cuda"] = torch.cuda.get_rng_state(self.cfg.device)
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "random": random}
        state |= {"step": self.step, "best": self.best, "worse": self.worse, "config": dataclasses.asdict(self.cfg)}
        save_tensors(self.dir / name, state)

    def restore(self) -> dict:
        """Restore weights, counters, random state from last.pt if every source accepts it; cut the log at its step."""
        path, log = self.dir / "last.pt", self.dir / "log.jsonl"
        state = load_checkpoint(path, self.cfg.device)
        for source in self.sources:
            source.check_state(state)
        load_weights(self.model, state["model"], path)
        torch.set_rng_state(state["random"]["cpu"].cpu())
        if self.on_cuda and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"].cpu(), self.cfg.device)
        self.step, self.best, self.worse = state["step"], state["best"], state["worse"]
        kept = [row for row in read_log(log) if row["step"] <= self.step]  # the resumed run repeats later steps
        with atomic_write(log) as partial:
            partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        return state

    def best_model(self) -> nn.Module:
        """The model with the weights of best.pt."""
        path = self.dir / "best.pt"
        return load_weights(self.model, load_checkpoint(path, self.cfg.device)["model"], path)


class Lines:
    """Standard output for tqdm without a terminal: every update of the bar becomes a line."""

    def write(self, text: str) -> None:
        sys.stdout.write(text.replace("\r", "\n"))

    def flush(self) -> None:
        sys.stdout.flush()


def progress(items=None, **options) -> tqdm:
    """tqdm for work that takes minutes: a bar on a terminal, elsewhere a line a minute."""
    if not sys.stderr.isatty():
        options |= {"file": Lines(), "mininterval": 60, "maxinterval": 60, "ncols": 80, "ascii": True}
    return tqdm(items, **options)


def read_log(path: Path) -> list[dict]:
    """The lines of a log.jsonl; none if it is missing; a line that a killed process left unfinished is skipped."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]


# ---- files -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary name to write to, and rename that file to `path` at the end: whenever the process dies, `path`
    is either the old or the new file. OSError naming the file if it cannot be written."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as e:
        raise OSError(f"{path} could not be written ({e})") from e
    finally:
        partial.unlink(missing_ok=True)


def save_tensors(path: Path, state: dict) -> None:
    """Write plain dicts and tensors to a file, completely or not at all."""
    with atomic_write(path) as partial, open(partial, "wb") as f:  # open(), so that a full disk is an OSError
        torch.save(state, f)


@contextlib.contextmanager
def file_errors(path: str | Path, remedy: str) -> Iterator[None]:
    """Turn any exception inside the `with` into a ValueError that names the file and what to do about it."""
    try:
        yield
    except Exception as e:  # a broken pickle raises whatever it likes
        reason = f"{e}" if isinstance(e, ValueError) else f"{type(e).__name__} {e}"
        if isinstance(e, pickle.UnpicklingError):  # its text is long and advises executing the file
            reason = "no plain tensors"
        raise ValueError(f"{path} cannot be used ({' '.join(reason.split())[:120]}); {remedy}") from e


def load_tensors(path: str | Path, remedy: str, device: str = "cpu") -> dict:
    """The dict that save_tensors wrote. Nothing in the file is executed (weights_only)."""
    with file_errors(path, remedy):
        state = torch.load(path, map_location=device, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(f"expected a dict of tensors, found {type(state).__name__}")
    return state


CHECKPOINT_KEYS = {"model", "optimizer", "random", "step", "best", "worse", "config", "vocab", "grid", "max_len"}
TRAIN_FIRST = "train first, or name another checkpoint"


def load_checkpoint(path: str | Path, device: str = "cpu") -> dict:
    """What Run.save wrote; ValueError if this is no checkpoint."""
    state = load_tensors(path, TRAIN_FIRST, device)
    if missing := CHECKPOINT_KEYS - state.keys():
        raise ValueError(f"{path} is no checkpoint of a run: it has no {min(missing)}; {TRAIN_FIRST}")
    return state


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], path: str | Path, remedy: str = TRAIN_FIRST
) -> nn.Module:
    """The model with the weights that a file holds; ValueError if they do not fit."""
    with file_errors(path, remedy):
        model.load_state_dict(weights)
    return model


def load_model(Model: Callable[..., nn.Module], cfg: RunConfig, path: str | Path) -> tuple[nn.Module, dict]:
    """-> a Model with a checkpoint's weights, in evaluation mode, and the checkpoint's content."""
    state = load_checkpoint(path, cfg.device)
    model = Model(cfg, len(state["vocab"]), state["grid"], state["max_len"]).to(cfg.device)
    return load_weights(model, state["model"], path).eval(), state


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main. Input, data and memory errors print one line and exit 2; SIGINT exits 130, SIGTERM 143."""
    warnings.filterwarnings("ignore", module="PIL")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that partial files are removed
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, FloatingPointError, MemoryError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and "memory" not in str(e):  # a programming error keeps its traceback
            raise
        print(f"error: {' '.join(str(e).split()) or type(e).__name__}", file=sys.stderr)
        sys.exit(2)


# ---- curves ----------------------------------------------------------------------------------------------------------


def curves(log: Path) -> Image.Image:
    """Plot a log.jsonl over steps: losses (logarithmic if positive), below them validation scores. -> PIL image."""
    series: dict[str, list[tuple[int, float]]] = {}
    for event, title in (("train", "loss"), ("eval", "validation")):
        for row in (row for row in read_log(log) if row.get("event") == event):
            for name, value in row.items():
                if isinstance(value, float) and name not in ("seconds", "lr"):
                    series.setdefault(f"{title}: {name}", []).append((row["step"], value))
    losses, last = sum(name.startswith("loss") for name in series), max(points[-1][0] for points in series.values())
    cells = [*range(losses), *range(-(-losses // 4) * 4, -(-losses // 4) * 4 + len(series) - losses)]
    page, font = Image.new("RGB", (920, 150 * (1 + cells[-1] // 4)), "white"), ImageFont.load_default(11)
    draw = ImageDraw.Draw(page)
    for cell, (name, points) in zip(cells, series.items(), strict=True):
        left, top, values = 10 + cell % 4 * 230, 20 + cell // 4 * 150, [value for _, value in points]
        logarithmic = name.startswith("loss") and min(values) > 0
        heights = [math.log(value) for value in values] if logarithmic else values
        low, span = min(heights), max(heights) - min(heights) or 1
        xs, ys = [left + 210 * step / last for step, _ in points], [top + 105 * (1 - (y - low) / span) for y in heights]
        draw.rectangle((left, top, left + 210, top + 105), outline="lightgray")
        draw.line([*zip(xs, ys, strict=True)], fill="black")
        for x, y in zip(xs, ys, strict=True):
            draw.ellipse((x - 1.5, y - 1.5, x + 1.5, y + 1.5), fill="black")
        draw.text((left, top - 15), f"{name}{' (log)' * logarithmic}", fill="black", font=font)
        text = f"steps 0 to {last}; {min(values):.4g} to {max(values):.4g}"
        draw.text((left, top + 107), text, fill="gray", font=font)
    return page
