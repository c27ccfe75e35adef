"""Small parts that every method file builds on. Nothing here belongs to one paper, and nothing here reads data.

Layers:   Attention, initialise, GridPosition, sinusoid    Losses:  info_nce, token_match
Decoding: decode                                           Running: RunConfig, parse_args, Run, checkpoints, pictures
A data set comes as an argument: any object with the methods of data.Dataset that a function's docstring names.
Axis letters: A, B images or pairs; N, M grid cells; D width; K heads; L, V tokens and words; C channels.
To use a method elsewhere, take its file and this one. Training on a data set of data.py needs that file too.
"""

import argparse
import contextlib
import dataclasses
import inspect
import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
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

    forward: x (B, L, D), memory (B, M, D) -> (B, L, D). `project` and `attend` are its two halves, apart because
    matching losses read the projections and decoding keeps keys and values between steps.
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
        """mask: bool (B, 1, L or 1, M), True = may be seen; in place of causal, not beside it."""
        q, k, v = self._split(q), self._split(k), self._split(v)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores before the softmax, which the fused kernel does not return: (B, L, D), (B, M, D) -> (B, K, L, M)."""
        q, k = self._split(q), self._split(k)
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def initialise(module: nn.Module, xavier: bool) -> None:
    """Starts attention like nn.MultiheadAttention, and with `xavier` every matrix of the module Xavier-uniform."""
    for p in module.parameters() if xavier else ():
        if p.ndim > 1:
            nn.init.xavier_uniform_(p)
    for m in module.modules():
        if isinstance(m, Attention):
            for linear in (m.query, m.key, m.value):  # drawn as one matrix (3D, D)
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
    """bfloat16 -> float32, for sums and scores that three digits are too few for; other types as they are."""
    return x.float() if x.dtype == torch.bfloat16 else x


def info_nce(scores: Tensor) -> Tensor:
    """InfoNCE over rows, -mean_a log softmax_b(scores)_aa (van den Oord et al. 2018). scores (B, B), partners on the
    diagonal -> a scalar."""
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


MATCH_SLICE = 2**25  # scores that token_match keeps at once


def best_of_rows(s: Tensor) -> tuple[Tensor, Tensor]:
    """s.max(1) of s (X, N, Y) -> maxima and their rows, each (X, Y). As a pooling, channels last: its loop is
    vectorised on a CPU, and takes a fifth of Tensor.max's time."""
    maxima, rows = F.max_pool2d(s.unsqueeze(2).permute(0, 3, 1, 2), (s.shape[1], 1), return_indices=True)
    return maxima.flatten(1), rows.flatten(1)


@torch.library.custom_op("common::token_match", mutates_args=())
def _token_match(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """token_match for one head. q (A, N, C), k (B, M, C) -> (A, B), and the winners: key (A, N, B) and query (A, B, M).

    A dense version needs A*B*N*M scores (2.5 GB at 128 pairs of 196 cells) four times over in the backward pass. This
    one keeps a slice of them at a time, and two winners a token for the backward pass. One operator for
    torch.compile."""
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
    """grad (A, B) -> gradients of q and k. That of the scores is 1/(2N) or 1/(2M) at the winners and zero elsewhere, so
    those of q and k are weighted sums over winners, which an embedding bag makes without a tensor of (winners, C)."""
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
    1/2 [ mean_l max_m <q_al, k_bm> + mean_m max_l <q_al, k_bm> ], for heads > 1 in each slice of the channels,
    averaged. q (A, N, C), k (B, M, C) -> (A, B). Memory does not grow with A*B*N*M; ties go to one winner."""
    pairs = zip(q.chunk(heads, -1), k.chunk(heads, -1), strict=True)
    return sum(_token_match(a, b)[0] for a, b in pairs) / heads


# ---- decoding --------------------------------------------------------------------------------------------------------

NULL, UNK, START, END = range(
    4
)  # padding, unknown word, and the two ends of a caption: the first ids of every vocabulary


@torch.no_grad()
def decode(step: Callable[[Tensor, int], Tensor], count: int, max_len: int, device, sample: bool = False) -> Tensor:
    """Write `count` captions word by word: the likeliest word, or one drawn from the distribution, but never UNK.

    step(words (B,), position) -> logits (B, vocabulary). -> (B, max_len) ids: START, at most max_len - 1 words, then
    NULL. Stops when every caption has ended, at which it looks every eighth word: a GPU has to wait for the answer."""
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
    """The settings that every method's run has; a method's Config adds its own. A field's comment is its --help text.

    ValueError where a whole number is not from 1 to 10^8, any other number not from 0 to 10^8, or not as RANGES
    says."""

    RANGES = {"seed": (0, 2**32), "data_seed": (0, 2**32), "lr_drop": (0, 10**8), "warmup": (0, 10**8)}

    dataset: str = "mini"  # data set; chooses the preset
    extractor: str = ""  # whose features, such as resnet101-layer4 (default: the data set's own)
    data_dir: str = ""  # folder of the data set (default: data/<dataset>)
    out_dir: str = ""  # folder of the run (default: runs/<method>-<dataset>)
    overwrite: bool = False  # replace a run that out_dir already holds
    scenes: int = 5000  # mini: rendered training scenes (5 % as many for validation, 10 % for test)
    objects: str = "2,4"  # mini: fewest and most objects in a scene
    data_seed: int = 0  # mini: seed of the scenes and of the feature network
    seed: int = 1111  # of weights, dropout and data order
    steps: int = 10000  # training steps
    batch_size: int = 128  # scenes a step (CLEVR-Change and mini: a changed and a distractor pair for each)
    lr: float = 2e-4  # Adam's learning rate
    schedule: Literal["step", "cosine"] = "step"  # x0.1 every lr_drop steps, or cosine down to zero at the last step
    lr_drop: int = 0  # steps between drops of the step schedule; 0: never
    warmup: int = 0  # steps of linear warm-up
    grad_clip: float = 0.0  # largest gradient norm; 0: no clipping
    log_every: int = 50  # steps between lines of log.jsonl
    eval_every: int = 1000  # steps between validations; last.pt is saved as often
    select_by: Literal["CIDEr", "BLEU-4", "ROUGE-L"] = "CIDEr"  # validation metric (all pairs) that chooses best.pt
    eval_batch: int = 64  # pairs decoded at once
    device: str = ""  # cuda, cpu, ... (default: cuda where there is one)
    amp: bool = True  # bfloat16 autocast; CUDA only
    compile: bool = True  # torch.compile of the training step; CUDA only
    features: Literal["auto", "gpu", "file"] = "auto"  # where features stay; auto: the GPU if they fit well

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


def _comments(cls: type) -> dict[str, str]:
    """Field name -> trailing comment, over a dataclass and its bases."""
    comments = {}
    for base in reversed(cls.__mro__[:-1]):
        comments |= dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(base), flags=re.M))
    return comments


def preset(Config: type, presets: dict[str, dict], released: dict[str, dict], dataset: str, reading: str = "paper"):
    """Config of a data set: defaults < presets[dataset]; in the released reading also < released["all"] and its own."""
    values = {"dataset": dataset, "data_dir": f"data/{dataset}"} | presets.get(dataset, {})
    if reading == "released":
        values |= {"reading": reading} | released["all"] | released.get(dataset, {})
    return Config(**values)


PICTURES = (".png", ".jpg", ".jpeg", ".pdf")  # what --out may be


def parse_args(
    Config: type, presets: dict, script: str, doc: str, argv: list[str] | None, released: dict | None = None
):
    """-> (config, commands). Every config field is a flag. A flag that is not given takes the value of the checkpoint
    that the command names (--eval, --caption, --resume), else of the preset. A run's folder is its checkpoint's. The
    device is chosen anew, except for --resume."""
    parser = Parser(description=doc.splitlines()[0], allow_abbrev=False)
    group = parser.add_argument_group("what to do (default: train, then evaluate on test)")
    command = group.add_mutually_exclusive_group()
    command.add_argument("--resume", action="store_true", help="continue out_dir's last.pt")
    command.add_argument("--eval", metavar="CHECKPOINT", help="only evaluate this checkpoint")
    command.add_argument("--caption", nargs=2, metavar=("BEFORE", "AFTER"), help="print the caption of two image files")
    group.add_argument("--split", choices=["val", "test"], default="test", help="split for --eval (default: test)")
    group.add_argument("--checkpoint", help="checkpoint for --caption")
    group.add_argument("--out", metavar="PICTURE", help="with --caption: write the attention picture here")
    group, comments = (
        parser.add_argument_group(f"config (presets change it for {', '.join(presets)})"),
        _comments(Config),
    )
    for f in dataclasses.fields(Config):
        kind = {"choices": get_args(f.type)} if get_origin(f.type) is Literal else {"type": f.type}
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else kind
        text = f"{comments[f.name]} (default: {f.default})".replace("%", "%%")
        group.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=text, **kind)
    args = parser.parse_args(argv)
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if f.name in args}
    if bool(args.caption) != bool(args.checkpoint):
        raise ValueError(
            "--caption needs --checkpoint, for example runs/<run>/best.pt, and --checkpoint needs --caption"
        )
    if args.out is not None and not (args.caption and Path(args.out).suffix.lower() in PICTURES):
        raise ValueError(f"--out {args.out}: expected --caption, and a name that ends in {', '.join(PICTURES)}")
    if args.split != "test" and args.eval is None:
        raise ValueError("--split goes with --eval")

    dataset = given.get("dataset", Config.dataset)
    out_dir = given.get("out_dir") or f"runs/{script}-{dataset}"
    source = f"{out_dir}/last.pt" if args.resume else args.checkpoint if args.caption else args.eval
    if source is not None:
        state = load_checkpoint(source)
        if odd := sorted({*state["config"]} ^ {f.name for f in dataclasses.fields(Config)}):
            raise ValueError(f"{source} is of another method or version: config fields differ ({', '.join(odd)})")
        with file_errors(source, TRAIN_FIRST):
            base = Config(**state["config"])
        for name in {"dataset", "reading"} & given.keys():
            if given[name] != getattr(base, name):
                raise ValueError(f"--{name} {given[name]}: {source} was trained with {getattr(base, name)}")
        if other := [f"--{name} {value} (there {getattr(base, name)})" for name, value in given.items()
                     if value != getattr(base, name) and name not in ("data_dir", "out_dir", "device", "overwrite")]:
            print(f"other flags than those that {source} was trained with: {', '.join(other)}")  # fmt: skip
        if not (
            args.caption
            or given.get("data_dir")
            or (Path(base.data_dir).is_dir() and any(Path(base.data_dir).iterdir()))
        ):
            raise ValueError(f"{source} was trained on {base.data_dir}, where nothing is now; give its --data_dir")
        out_dir = given.get("out_dir") or str(Path(source).parent)
    else:
        base = preset(Config, presets, released or {}, dataset, given.get("reading", "paper"))
        if dataset not in presets:
            print(f"no preset for {dataset}: running on the defaults; presets: {', '.join(presets)}")
    device = usable_device(given.get("device") or (base.device if args.resume else ""))
    cfg = dataclasses.replace(base, **given | {"out_dir": out_dir, "device": device})
    if not args.caption:
        check_folder(Path(out_dir), new=source is None, overwrite=cfg.overwrite)
    return cfg, args


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line (run_main prints it and exits 2)."""

    def error(self, message: str):
        raise ValueError(f"{message}; --help shows every flag")


def usable_device(name: str) -> str:
    """The named device, or CUDA where there is one, else the CPU; ValueError where it cannot be used."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()  # "meta" has no numbers
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device {name} cannot be used here; leave it out, or give cpu") from e
    if name.startswith("cuda:"):
        torch.cuda.set_device(name)
    return name


def can_compile(cfg: RunConfig) -> bool:
    """Whether a run compiles its step: on CUDA, if it is to, and where there is the C compiler that torch.compile
    needs."""
    if not (cfg.compile and cfg.device.startswith("cuda")):
        return False
    if shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc"):
        return True
    print("no C compiler on the PATH: training without torch.compile")
    return False


def learning_rate(cfg: RunConfig, step: int) -> float:
    """Learning rate of a step (counted from 0)."""
    lr = cfg.lr * min(1.0, (step + 1) / max(1, cfg.warmup))
    if cfg.schedule == "cosine":
        done = max(0, step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
        return lr * (1 + math.cos(math.pi * done)) / 2
    return lr * 0.1 ** (step // cfg.lr_drop if cfg.lr_drop else 0)


# ---- running ---------------------------------------------------------------------------------------------------------

RUN_FILES = ("config.json", "log.jsonl", "last.pt", "best.pt", "pretrained.pt", "curves.png", "samples.png", "samples_val.png",
             *(f"{what}_{split}.json" for what in ("captions", "scores") for split in ("val", "test")))  # fmt: skip


def check_folder(folder: Path, new: bool, overwrite: bool) -> None:
    """ValueError where a run cannot write into this folder, or a new one may not: it holds another, or files of no
    run."""
    try:
        tempfile.TemporaryFile(dir=next(path for path in (folder, *folder.absolute().parents) if path.exists())).close()
    except OSError as e:
        raise ValueError(f"{folder} cannot be written ({e.strerror}); choose another --out_dir") from e
    there = {path.name for path in folder.iterdir()} if new and folder.is_dir() else set()
    if there and not there & {"config.json", "last.pt"}:
        raise ValueError(f"{folder} holds other files, such as {min(there)}; choose another --out_dir")
    if there and not overwrite:
        raise ValueError(f"{folder} holds a run already; continue it with --resume, replace it with --overwrite, "
                         "or choose another --out_dir")  # fmt: skip


def training_batches(dataset, batch_size: int, seed: int, first: int, last: int) -> Iterator:
    """The batches of training steps first ... last - 1, epoch after epoch. A resumed run gets those it would have got.
    dataset: has steps and train_batches, as data.Dataset."""
    while first < last:
        epoch, start = divmod(first, dataset.steps(batch_size))
        for streams in dataset.train_batches(batch_size, seed, epoch, start):
            yield streams
            first += 1
            if first == last:
                break


def sent_ahead(batches: Iterator, device: str) -> Iterator:
    """The same batches on a GPU. Each is sent there on a stream of its own while the step before it runs. A changed and
    a distractor pair send the "before" features that they share once."""
    side, ready = torch.cuda.Stream(), None

    def send(streams: tuple) -> tuple:
        if streams[0].before.is_cuda:  # features that stay there
            return streams
        with torch.cuda.stream(side):
            sent = [streams[0].to(device)]
            for batch in streams[1:]:
                shared = {"before": sent[0].before} if batch.before is streams[0].before else {}
                sent.append(dataclasses.replace(batch, **shared).to(device))
        return tuple(sent)

    for streams in itertools.chain(batches, [None]):
        if ready:
            torch.cuda.current_stream().wait_stream(side)  # before the next copy is queued there, which can wait
        coming = send(streams) if streams else None
        if ready:
            for x in (x for batch in ready for x in (batch.before, batch.after, batch.caption)):
                x.record_stream(torch.cuda.current_stream())  # its memory stays taken until this step is done with it
            yield ready
        ready = coming


class Run:
    """All of training but the training itself: the run's folder, checkpoints, log, learning rate, validation, resuming.

        with Run(cfg, resume, model, optimizer, dataset) as run:
            for streams in run.steps(dataset):
                ...                                     # one step of training
                run.end_step(losses, validate)

    parts: whatever its captions depend on beside the model, the data set first, each with state() and
    check_state(state) as data.Dataset's. Inside `with` no other process gets the folder, and the first Ctrl-C, SIGTERM
    or SIGHUP only sets `stop` (130, 143, 129), so that the step under way ends and is saved; a second one stops at
    once. With `resume` the run goes on from last.pt as if nothing had happened.
    """

    def __init__(self, cfg: RunConfig, resume: bool, model: nn.Module, optimizer: torch.optim.Optimizer, *parts):
        self.cfg, self.dir, self.model, self.optimizer, self.parts = cfg, Path(cfg.out_dir), model, optimizer, parts
        self.step, self.best, self.worse, self.stop = 0, float("-inf"), 0, 0  # worse: validations since the best one
        self.losses: list[
            dict[str, Tensor]
        ] = []  # of the steps since the last line of the log; they stay on the device
        self.began, self.resume, self.resumed = time.perf_counter(), resume, None

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.dir.mkdir(parents=True, exist_ok=True)
            if self.resume:
                self.resumed = self.restore()
            self.begin()
            cuda = self.cfg.device.startswith("cuda")
            torch.set_float32_matmul_precision("high" if cuda else "highest")  # TF32 where bf16 autocast leaves float32
            if can_compile(self.cfg):
                self.model.compile(fullgraph=True, dynamic=False)
            for number in ends():
                stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            self.held = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.held.close()

    def _on_signal(self, number, _frame):
        if self.stop:
            raise SystemExit(self.stop)
        self.stop = 128 + number
        if number not in (
            signal.SIGINT,
            signal.SIGTERM,
        ):  # the terminal is gone, and what is written to it would be an error
            for file in (file for file in (1, 2) if os.isatty(file)):
                os.dup2(os.open(os.devnull, os.O_WRONLY), file)
        print("stopping after this step; once more to stop at once", file=sys.stderr)

    def steps(
        self, dataset, batch_size: int = 0, first: int = 0, last: int = 0, rate=None, name: str = "train"
    ) -> Iterator:
        """The batches of steps first ... last - 1 (default: the whole run) from where the run stands, each with the
        learning rate set: rate(cfg, step - first), by default that of `learning_rate`."""
        self.first, self.last, self.name = first, last or self.cfg.steps, name
        if self.resumed and self.resumed["step"] > first:
            load_moments(self.optimizer, self.resumed["optimizer"], self.dir / "last.pt")
        if self.step == 0:
            self.save("last.pt")
        done, count = self.step - first, self.last - first
        self.bar = tqdm(total=count, initial=done, desc=name, unit="step", disable=None)
        batch_size = batch_size or self.cfg.batch_size
        batches = training_batches(dataset, batch_size, self.cfg.seed, done, count)
        for streams in sent_ahead(batches, self.cfg.device) if self.cfg.device.startswith("cuda") else batches:
            self.lr = (rate or learning_rate)(self.cfg, self.step - first)
            self.optimizer.param_groups[0]["lr"] = self.lr
            smaller = len(streams[0].pair_ids) < batch_size  # an epoch's last batch: no compiled step for it alone
            with torch.compiler.set_stance("force_eager" if smaller else "default"):
                yield streams
        self.bar.close()

    def end_step(self, losses: dict[str, Tensor], validate: Callable[[], dict[str, float]] | None) -> None:
        """After each step: log, validate every eval_every steps and at the last one, keep best.pt and last.pt.

        validate() -> scores, of which cfg.select_by chooses best.pt. SystemExit where the user asked the run to stop;
        FloatingPointError where a loss or a weight is not finite."""
        self.step += 1
        self.losses.append({name: loss.detach() for name, loss in losses.items()})
        self.bar.update()
        due = (self.step - self.first) % self.cfg.eval_every == 0 or self.step == self.last
        if self.step % self.cfg.log_every == 0 or due or self.stop:
            means, seconds = self.mean_losses(), round(time.perf_counter() - self.began, 2)
            self.log(step=self.step, event="train", stage=self.name, seconds=seconds, lr=self.lr, **means)
            self.bar.set_postfix({name: f"{value:.3f}" for name, value in means.items()})
        if due and validate:
            scores = validate()
            self.log(step=self.step, event="eval", select_by=self.cfg.select_by, **scores)
            tqdm.write(f"step {self.step}: validation " + ", ".join(f"{k} {v:.2f}" for k, v in scores.items()))
            self.worse += 1
            if scores[self.cfg.select_by] > self.best:
                self.best, self.worse = scores[self.cfg.select_by], 0
                self.save("best.pt")
        stop = self.stop  # read once, after validation: a signal may come at any line
        if due or stop:
            self.save("last.pt")
            with atomic_write(self.dir / "curves.png") as path:
                curves(self.dir / "log.jsonl").save(path, "PNG")
        if stop:
            raise SystemExit(stop)

    def mean_losses(self) -> dict[str, float]:
        """Mean of each loss over the steps since the last line of the log that had it. FloatingPointError naming the
        first step whose loss is not finite, with every part of it."""
        found: dict[str, list[float]] = {}
        for step, losses in enumerate(self.losses, self.step - len(self.losses) + 1):
            values = {name: loss.item() for name, loss in losses.items()}
            if not all(map(math.isfinite, values.values())):
                parts = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
                raise FloatingPointError(f"loss is not finite at step {step}: {parts}; the last checkpoint is untouched; "
                                         "try a lower --lr or --grad_clip 1")  # fmt: skip
            for name, value in values.items():
                found.setdefault(name, []).append(value)
        self.losses = []
        return {name: round(sum(values) / len(values), 6) for name, values in found.items()}

    def log(self, **values) -> None:
        """Append one JSON line to log.jsonl."""
        with open(self.dir / "log.jsonl", "a") as f:
            f.write(json.dumps(values) + "\n")

    def begin(self) -> None:
        """Clear the folder of an older run's files; print and log what a figure of this run depends on. OSError where
        the disk has no room for last.pt, best.pt and the checkpoint that is being written (to go on, for the last of
        them)."""
        size = 3 * sum(p.nbytes for p in self.model.parameters())  # weights and Adam's two moments
        need, free = size if self.resumed else 3 * size, shutil.disk_usage(self.dir).free
        if free < need:
            raise OSError(f"{self.dir}: checkpoints need {need / 1e6:.0f} MB, the disk has {free / 1e6:.0f} MB left")
        for name in RUN_FILES if not self.resumed else ():
            (self.dir / name).unlink(missing_ok=True)
        for path in self.dir.glob("*.partial"):  # left by a process that was killed
            path.unlink()
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        code = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
        cuda = self.cfg.device.startswith("cuda")
        about = {
            "step": self.step, "event": "resume" if self.resumed else "start", "code": code or "not under git",
            "torch": torch.__version__, "torchvision": torchvision.__version__,
            "device": torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads",
            "parameters": sum(p.numel() for p in self.model.parameters()), "config": dataclasses.asdict(self.cfg),
        }  # fmt: skip
        (self.dir / "config.json").write_text(json.dumps(about["config"], indent=1) + "\n")
        self.log(**about)
        print("\n".join(f"{k}: {json.dumps(v) if isinstance(v, dict) else v}" for k, v in about.items()))

    def save(self, name: str) -> None:
        """A checkpoint of this name. FloatingPointError where a weight is not finite; the older checkpoint then
        stays."""
        if not all(p.isfinite().all() for p in self.model.parameters()):
            raise FloatingPointError(
                f"weights are not finite after step {self.step}; {name} is untouched; try a lower --lr"
            )
        states = {key: value for part in self.parts for key, value in part.state().items()}
        random = {"cpu": torch.get_rng_state()}  # what dropout is drawn from; the order of the data needs none
        if self.cfg.device.startswith("cuda"):
            random["cuda"] = torch.cuda.get_rng_state()
        save_tensors(self.dir / name, states | {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step, "best": self.best,
            "worse": self.worse, "config": dataclasses.asdict(self.cfg), "random": random,
        })  # fmt: skip

    def restore(self) -> dict:
        """Weights, counters, random state and log as last.pt left them, where every part's check_state agrees."""
        path, log = self.dir / "last.pt", self.dir / "log.jsonl"
        state = load_checkpoint(path, self.cfg.device)
        for part in self.parts:
            part.check_state(state)
        load_weights(self.model, state["model"], path)
        with file_errors(path, TRAIN_FIRST):
            torch.set_rng_state(state["random"]["cpu"].cpu())
            if self.cfg.device.startswith("cuda") and "cuda" in state["random"]:
                torch.cuda.set_rng_state(state["random"]["cuda"].cpu())
        self.step, self.best, self.worse = state["step"], state["best"], state["worse"]
        # A run that was killed has logged steps that it will now repeat, the last of them perhaps in half a line.
        kept = [line for line in log.read_text().splitlines() if logged_step(line) <= self.step]
        with atomic_write(log) as partial:
            partial.write_text("".join(line + "\n" for line in kept))
        return state

    def best_model(self) -> nn.Module:
        """The model with the weights of best.pt."""
        path = self.dir / "best.pt"
        return load_weights(self.model, load_checkpoint(path, self.cfg.device)["model"], path)


def logged_step(line: str) -> float:
    """The step of a line of log.jsonl; infinity where it is no such line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")


def ends() -> list[int]:
    """The signals that ask a process to end. Under nohup SIGHUP is ignored, and stays so; Windows has none."""
    hangup = getattr(signal, "SIGHUP", None)
    return [signal.SIGINT, signal.SIGTERM] + [hangup] * (
        hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN
    )


# ---- files -----------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def atomic_write(path: Path, size: int = 0) -> Iterator[Path]:
    """Gives another name to write to, which becomes `path` at the end: whenever the process dies, `path` is whole.
    OSError where the disk is full. size: what is going to be written, in bytes."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except (OSError, RuntimeError) as e:  # torch.save raises RuntimeError
        room = f"it takes {size / 1e6:.1f} MB, the disk has {shutil.disk_usage(path.parent).free / 1e6:.1f} MB left"
        raise OSError(f"{path} could not be written ({e}); {room}") from e
    finally:
        partial.unlink(missing_ok=True)


def save_tensors(path: Path, state: dict) -> None:
    """Plain dicts and tensors into a file, whole or not at all."""
    def size(x) -> int:
        return x.nbytes if isinstance(x, Tensor) else sum(map(size, x.values())) if isinstance(x, dict) else 0

    with atomic_write(path, size(state)) as partial:
        torch.save(state, partial)


@contextlib.contextmanager
def file_errors(path: str | Path, remedy: str) -> Iterator[None]:
    """Whatever the content of a file leads to in here becomes a ValueError that names the file and what to do."""
    try:
        yield
    except Exception as e:  # a broken pickle raises whatever it likes
        reason = f"{e}" if isinstance(e, ValueError) else f"{type(e).__name__} {e}"
        if isinstance(e, pickle.UnpicklingError):  # whose text is long and advises to execute the file
            reason = "no plain tensors"
        raise ValueError(f"{path} cannot be used ({' '.join(reason.split())[:120]}); {remedy}") from e


def load_tensors(path: str | Path, remedy: str, device: str = "cpu") -> dict:
    """The dict that save_tensors wrote. Nothing in the file is executed (weights_only). FileNotFoundError or ValueError
    with what to do (remedy) if the file is missing or of another kind."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}; {remedy}")
    with file_errors(path, remedy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = torch.load(path, map_location=device, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(f"expected a dict of tensors, found {type(state).__name__}")
    return state


CHECKPOINT = {"model", "optimizer", "step", "best", "worse", "config", "vocab", "grid", "max_len", "extractor", "random"}
TRAIN_FIRST = "train first, or name another checkpoint"


def load_checkpoint(path: str | Path, device: str = "cpu") -> dict:
    """What Run.save wrote; FileNotFoundError or ValueError if this is no checkpoint."""
    state = load_tensors(path, TRAIN_FIRST, device)
    if missing := CHECKPOINT - state.keys():
        raise ValueError(f"{path} is no checkpoint of a run: it has no {min(missing)}; {TRAIN_FIRST}")
    return state


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], path: str | Path, remedy: str = TRAIN_FIRST
) -> nn.Module:
    """The model with the weights that a file holds; ValueError where they do not fit, or are not finite."""
    with file_errors(path, remedy):
        model.load_state_dict(weights)
        if bad := [name for name, x in model.state_dict().items() if not x.isfinite().all()]:
            raise ValueError(f"weights are not finite: {bad[0]}")
    return model


def load_moments(optimizer: torch.optim.Optimizer, saved: dict, path: Path) -> None:
    """Adam's moments from a checkpoint. ValueError where one has not its parameter's shape and type: fused Adam would
    write past its end."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with file_errors(path, TRAIN_FIRST):
        for i, moments in saved["state"].items():
            p = parameters[i]
            for name, like in {"step": torch.zeros((), device=p.device), "exp_avg": p, "exp_avg_sq": p}.items():
                x = moments[name]
                if (x.shape, x.dtype, x.layout) != (like.shape, like.dtype, like.layout):
                    raise ValueError(f"Adam's {name} of parameter {i} is {x.dtype} {list(x.shape)}")
                optimizer.state[p][name] = torch.empty_like(like, requires_grad=False).copy_(x)


def load_model(Model: Callable[..., nn.Module], cfg: RunConfig, path: str | Path) -> tuple[nn.Module, dict]:
    """-> Model(cfg, words, grid, longest caption) with a checkpoint's weights, in evaluation mode; and all that it
    holds."""
    state = load_checkpoint(path, cfg.device)
    model = Model(cfg, len(state["vocab"]), state["grid"], state["max_len"]).to(cfg.device)
    return load_weights(model, state["model"], path).eval(), state


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main: an error of input or data becomes one line and exit code 2, a signal that ends it 128 + its
    number. Output that nobody reads on (`| head`) ends it quietly."""
    warnings.filterwarnings("ignore", module="PIL")
    for number in ends()[1:]:  # outside training too, files that are being written are cleaned up
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except (ValueError, OSError, FloatingPointError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and "memory" not in str(e):
            raise
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)


# ---- pictures --------------------------------------------------------------------------------------------------------


def curves(log: Path) -> Image.Image:
    """A panel for every loss (on a logarithmic axis) and every validation score of a log.jsonl, over steps. -> PIL
    image."""
    series: dict[str, list[tuple[int, float]]] = {}
    for line in map(json.loads, log.read_text().splitlines()):
        title = {"train": "loss", "eval": "validation"}.get(line["event"])
        for name, value in line.items() if title else ():
            if isinstance(value, float) and name not in ("seconds", "lr"):
                series.setdefault(f"{title}: {name}", []).append((line["step"], value))
    last, panels, font = max(points[-1][0] for points in series.values()), [], ImageFont.load_default(11)
    for name, points in series.items():
        panels.append(Image.new("RGB", (230, 150), "white"))
        draw, values = ImageDraw.Draw(panels[-1]), [value for _, value in points]
        logarithmic = name.startswith("loss") and min(values) > 0
        heights = [math.log(value) for value in values] if logarithmic else values
        span = max(heights) - min(heights) or 1
        at = [(10 + 210 * step / last, 125 - 105 * (y - min(heights)) / span)
              for (step, _), y in zip(points, heights, strict=True)]  # fmt: skip
        draw.rectangle((10, 20, 220, 125), outline="lightgray")
        draw.line(at, fill="black")
        for point in at:
            draw.circle(point, 1.5, fill="black")
        draw.text((10, 5), f"{name}{' (log)' * logarithmic}", fill="black", font=font)
        draw.text((10, 127), f"{min(values):.4g} to {max(values):.4g}, last {values[-1]:.4g}", fill="gray", font=font)
    page = Image.new("RGB", (4 * 230, -(-len(panels) // 4) * 150), "white")
    for i, panel in enumerate(panels):
        page.paste(panel, (i % 4 * 230, i // 4 * 150))
    return page
