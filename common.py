"""Small parts that every method file builds on: no equation of a single paper, no reader of data.

First half, what a copied method needs:
    layers         Attention, initialise, GridPosition, sinusoid, masked_mean
    losses         upcast, info_nce
    decoding       NULL, UNK, START, END, is_word, decode
    configuration  InputError, RunConfig, learning_rate
Second half, what a run needs:
    command line   parse_args, preset, saved_config, usable_device, set_up_device
    running        Run, draw_curves
    files          progress, print_notes, atomic_write, file_errors, read_json, checkpoints
    main           run_main

Axis letters: A, B images or pairs; N, M grid cells; D width; h heads; L ids of a caption, padding
included, or other tokens; V ids of the vocabulary; C channels; H, W rows and columns of the grid.
Licence: MIT.
"""

import argparse
import contextlib
import dataclasses
import inspect
import io
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import textwrap
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

# ==================================================================================================
# First half: what a copied method needs.
# ==================================================================================================

# ---- layers --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention softmax(q k^T / sqrt(D/h)) v (Vaswani et al. 2017, section 3.2).

    forward: x (B, L, D), source (B, M, D) -> (B, L, D). It has two halves, `project` and `attend`,
    because matching losses read the projections."""

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
        """-> query of x (B, L, D), key and value of source (B, M, D). Each head has D/h numbers,
        which stand one after the other."""
        return self.query(x), self.key(source), self.value(source)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """q (B, L, D), k and v (B, M, D) -> (B, L, D).

        mask: bool (B or 1, 1, L or 1, M), True = may be attended to; only without causal=True."""
        q = self._split(q)
        k = self._split(k)
        v = self._split(v)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q (B, L, D), k (B, M, D) -> scores before the softmax (B, h, L, M)."""
        q = self._split(q)
        k = self._split(k)
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, L, D) -> (B, h, L, D/h)


def initialise(module: nn.Module, xavier: bool) -> None:
    """Initialise each Attention as nn.MultiheadAttention does. With `xavier`, all other tensors of
    two or more dimensions become Xavier-uniform, also those of convolutions and embeddings."""
    if xavier:
        for p in module.parameters():
            if p.ndim > 1:
                nn.init.xavier_uniform_(p)
    for m in module.modules():
        if isinstance(m, Attention):
            for linear in (m.query, m.key, m.value):  # as parts of one matrix (3D, D)
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
        height = self.row.num_embeddings
        width = self.col.num_embeddings
        col = self.col.weight[None].expand(height, -1, -1)  # (H, W, D/2)
        row = self.row.weight[:, None].expand(-1, width, -1)  # (H, W, D/2)
        return torch.cat([col, row], -1).permute(2, 0, 1)


def sinusoid(length: int, dim: int) -> Tensor:
    """-> (length, D), fixed positions: sines in even channels, cosines in odd ones (Vaswani et al.
    2017, section 3.5)."""
    position = torch.arange(length)[:, None]
    frequency = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angle = position * frequency
    table = torch.zeros(length, dim)
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle.cos()[:, : dim // 2]
    return table


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean over the words of a sentence. x (B, L, D), valid (B, L) bool -> (B, D)."""
    weight = valid.to(x.dtype)[..., None]
    return (x * weight).sum(1) / weight.sum(1).clamp(min=1)


# ---- losses --------------------------------------------------------------------------------------


def upcast(x: Tensor) -> Tensor:
    """bfloat16 or float16 -> float32, for sums and scores that need more than two or three digits.
    Other types stay unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def info_nce(scores: Tensor) -> Tensor:
    """InfoNCE over rows: -mean_a log softmax_b(scores)_aa (van den Oord et al. 2018).

    scores (B, B), partners on the diagonal -> a scalar."""
    partner = torch.arange(scores.shape[0], device=scores.device)
    return F.cross_entropy(scores, partner)


# ---- decoding ------------------------------------------------------------------------------------

# The first ids of every vocabulary: padding, unknown word, and the two ends of a caption.
NULL = 0
UNK = 1
START = 2
END = 3


def is_word(ids: Tensor) -> Tensor:
    """True for the ids that are none of the four special ids. Any shape -> the same shape."""
    return (ids != NULL) & (ids != UNK) & (ids != START) & (ids != END)


def decode(next_word: Callable[[Tensor], Tensor], count: int, max_len: int, device) -> Tensor:
    """Write `count` captions word by word, each time the likeliest word. -> ids (B, max_len),
    B = count: START, at most max_len - 1 words, then NULL, without END.

    next_word(ids (B, t)) -> logits (B, V) of word t. It reads all words anew each time. (To keep
    their keys and values would be faster, but each decoder would need code for it.)
    `generate` turns gradients off. If `decode` did so, too, torch.export.save would fail."""
    ids = torch.full((count, max_len), NULL, device=device)
    ids[:, 0] = START
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    for t in range(1, max_len):
        logits = next_word(ids[:, :t])
        logits[:, UNK] = float("-inf")  # never chosen
        word = logits.argmax(-1)
        # SCORER's and DIRL's code stops at END alone, and cuts its text at NULL: the same text.
        ended |= (word == END) | (word == NULL)
        ids[:, t] = word.masked_fill(ended, NULL)
        # This check waits for the GPU, so not after every word. An exported loop cannot make it.
        if t % 8 == 0 and not torch.compiler.is_compiling() and ended.all():
            break
    return ids


# ---- configuration -------------------------------------------------------------------------------


class InputError(ValueError):
    """A user's flags, files or data are at fault. run_main prints this error in one line."""


@dataclass
class RunConfig:
    """The settings that all methods share. A method's Config adds its own. The comment on a field's
    line is its --help text.

    parse_args fills in data_dir, out_dir and device, `preset` only data_dir: from Python, set the
    others before `train`, and call set_up_device. InputError for a value that cannot work."""

    # Flags may change these fields of a checkpoint's Config: paths, because files may have moved,
    # and what does not affect the steps already done (refuse_changes has an exception).
    MAY_CHANGE = {
        "extractor",
        "data_dir",
        "out_dir",
        "device",
        "compile",
        "features",
        "steps",
        "log_every",
        "eval_every",
        "eval_batch",
        "patience",
    }
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
    schedule: Literal["step", "cosine"] = "step"  # x0.1 every lr_drop steps, or cosine to zero
    lr_drop: int = 0  # steps between drops of --schedule step; 0: no drops
    warmup: int = 0  # steps of linear warm-up
    grad_clip: float = 0.0  # maximum gradient norm; 0 or less: no clipping
    log_every: int = 50  # steps between lines of log.jsonl
    eval_every: int = 1000  # steps between validations; last.pt is saved as often
    patience: int = 0  # stop after this many validations without a new best; 0: never
    select_by: Literal["CIDEr", "BLEU-4", "ROUGE-L"] = "CIDEr"  # metric that chooses best.pt
    eval_batch: int = 64  # pairs decoded at once
    device: str = ""  # cuda, cpu, ... (default: cuda if there is one)
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
                    expected = ", ".join(map(str, choices))
                    raise InputError(f"--{name} {value}: expected one of {expected}")
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


# ==================================================================================================
# Second half: what a run needs. A training loop of your own needs set_up_device alone.
# ==================================================================================================

# ---- command line --------------------------------------------------------------------------------


def parse_args(Config: type, PRESETS: dict, RELEASED: dict, argv: list[str] | None) -> tuple:
    """-> (cfg, args). Every field of Config is a flag, and if RELEASED is not empty, there is
    --variant. The file that defines Config names the script.

    A new run starts from the preset of its data set and variant. --resume, --eval and --caption
    start from their checkpoint's Config, in which flags may change only the fields in
    Config.MAY_CHANGE and, for --eval, the data set."""
    args = make_parser(Config, PRESETS, bool(RELEASED)).parse_args(argv)
    flags = {f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if f.name in args}
    if bool(args.caption) != bool(args.checkpoint):
        raise InputError("--caption and --checkpoint go together; --eval has its own checkpoint")
    dataset = flags.get("dataset", Config.dataset)
    method = Path(sys.modules[Config.__module__].__file__).stem
    out_dir = Path(flags.get("out_dir") or f"runs/{method}-{dataset}")
    checkpoint = out_dir / "last.pt" if args.resume else args.eval or args.checkpoint
    if not checkpoint:
        cfg = preset(Config, PRESETS, RELEASED, dataset, args.variant)
        if dataset not in PRESETS:
            print(f"no preset for {dataset}: using the defaults")
        refuse_used_folder(out_dir)
    else:
        cfg = saved_config(Config, checkpoint)
        if args.eval:
            if flags.get("dataset", cfg.dataset) != cfg.dataset:
                cfg.dataset = dataset
                cfg.data_dir = f"data/{dataset}"
            folder = Path(flags.get("out_dir") or Path(args.eval).parent)
            data = Path(flags.get("data_dir", cfg.data_dir)).resolve().name
            out_dir = folder / f"{Path(args.eval).stem}-{data}"  # never the run's own files
        released = RELEASED["all"] if args.variant == "released" else {}
        refuse_changes(cfg, released | flags, checkpoint)
    flags["out_dir"] = str(out_dir)
    flags["device"] = usable_device(flags.get("device", ""))
    cfg = dataclasses.replace(cfg, **flags)
    set_up_device(cfg.device)
    if cfg.on_cuda:
        fit_to_gpu(cfg, training=not args.eval and not args.caption)
    return cfg, args


def make_parser(Config: type, PRESETS: dict[str, dict], variants: bool) -> argparse.ArgumentParser:
    """The parser of a method's command line: what to do, then a flag for each field of Config."""
    doc = sys.modules[Config.__module__].__doc__ or ""  # python -OO leaves it out
    summary, _, _ = doc.partition("\n")
    usage = "%(prog)s [flags]; --help shows every flag"
    parser = argparse.ArgumentParser(description=summary, usage=usage, allow_abbrev=False)
    group = parser.add_argument_group("what to do (default: train, then evaluate on test)")
    command = group.add_mutually_exclusive_group()
    command.add_argument("--resume", action="store_true", help="continue from last.pt in out_dir")
    text = "only evaluate this checkpoint, into a folder CHECKPOINT-DATA beside it or in out_dir"
    command.add_argument("--eval", metavar="CHECKPOINT", help=text)
    text = "caption two images, BEFORE AFTER, or every pair of a CSV file (columns before, after)"
    command.add_argument("--caption", nargs="+", metavar="FILE", help=text)
    text = "split to evaluate in the end (default: test)"
    group.add_argument("--split", choices=["val", "test", "none"], default="test", help=text)
    group.add_argument("--checkpoint", help="checkpoint for --caption")
    text = "with --caption: file for the attention picture or, of a CSV, its rows with captions"
    group.add_argument("--out", metavar="FILE", help=text)

    group = parser.add_argument_group(f"config (defaults differ for {', '.join(PRESETS)}: PRESETS)")
    parser.set_defaults(variant="paper")
    if variants:
        text = "whose version of the details in RELEASED (default: paper)"
        group.add_argument("--variant", choices=["paper", "released"], help=text)
    comments = {}  # field -> the comment on its line, in Config or a base of it
    for base in reversed(Config.__mro__[:-1]):
        source = inspect.getsource(base)
        comments |= re.findall(r"^ +(\w+): .*? # (.*)$", source, flags=re.MULTILINE)
    types = typing.get_type_hints(Config)
    for f in dataclasses.fields(Config):
        kind = types[f.name]
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif kind is str:
            options = {"type": home_expanded}
        elif kind in (int, float):
            options = {"type": kind}
        elif typing.get_origin(kind) is Literal:
            options = {"choices": typing.get_args(kind)}
        else:
            raise TypeError(f"{f.name}: a field is a str, int, float, bool or Literal, not {kind}")
        text = comments.get(f.name, "")
        if f.default != "":
            text = f"{text} (default: {f.default})"
        text = text.replace("%", "%%")
        group.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=text, **options)
    return parser


def home_expanded(value: str) -> str:
    """A flag's value, with ~ and NAME:~ expanded as the shell does it elsewhere in a command."""
    name, colon, path = value.rpartition(":")
    return name + colon + os.path.expanduser(path)


def preset(Config: type, presets: dict, released: dict, dataset: str, variant: str = "paper"):
    """The Config of a data set: the defaults, then presets[dataset] and, for the variant
    "released", released["all"] and released[dataset]. What comes later overrides the earlier."""
    values = {"dataset": dataset, "data_dir": f"data/{dataset}"}
    values |= presets.get(dataset, {})
    if variant == "released":
        values |= released["all"]
        values |= released.get(dataset, {})
    return Config(**values)


def saved_config(Config: type, checkpoint: str | Path):
    """The Config that a checkpoint was trained with. InputError if it is not this method's."""
    state = load_tensors(checkpoint, mmap=True)
    with file_errors(checkpoint, "it comes from another method or version"):
        return Config(**state["config"])


def refuse_changes(base: RunConfig, given: dict, checkpoint: Path) -> None:
    """InputError if a flag that may not change differs from the checkpoint's Config."""
    for name, value in given.items():
        saved = getattr(base, name)
        trained = f"{checkpoint} was trained with {saved}"
        if name == "steps" and base.schedule == "cosine":
            trained += ", where its learning rates reach 0 (--schedule cosine)"
        elif name in base.MAY_CHANGE:
            continue
        if value != saved:
            remedy = f"leave --{name} out, or train anew, with another --out_dir"
            raise InputError(f"--{name} {value}: {trained}; {remedy}")


def refuse_used_folder(folder: Path) -> None:
    """InputError if the folder has files, because a run never replaces files of another one. But a
    run that ended before its first validation may be begun anew."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    begin_anew = (folder / "log.jsonl").exists() and not (folder / "best.pt").exists()
    last = folder / "last.pt"
    if last.exists():
        begin_anew = begin_anew and load_tensors(last, mmap=True)["step"] == 0
    if not begin_anew:
        raise InputError(
            f"{folder} is not empty; continue its run with --resume, or give another --out_dir"
        )


def usable_device(name: str) -> str:
    """The device of this name; an empty name stands for CUDA or, without CUDA, for the CPU."""
    if not name:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, ImportError) as e:  # whatever PyTorch lacks for it
        reason, _, _ = str(e).partition("\n")
        raise InputError(f"--device {name} cannot be used ({reason}); try --device cpu") from e
    return name


def fit_to_gpu(cfg: RunConfig, training: bool) -> None:
    """Turn off what this GPU cannot do, and say so."""
    if cfg.amp and not torch.cuda.is_bf16_supported(including_emulation=False):
        print("this GPU does not support bfloat16: amp is off")
        cfg.amp = False
    if cfg.compile and training:
        x = torch.ones(1, device=cfg.device)
        try:
            torch.compile(lambda x: x + 1)(x)
        except RuntimeError as e:  # the GPU is too old, say, or there is no C compiler
            reason, _, _ = str(e).strip().partition("\n")
            print(f"torch.compile does not work here ({reason}): compile is off")
            cfg.compile = False


def set_up_device(device: str) -> None:
    """Set PyTorch up for the device, so that training and a later --eval compute in the same way.
    This affects the whole process."""
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


# ---- running -------------------------------------------------------------------------------------


class Run:
    """The folder of a run: log.jsonl, last.pt, best.pt, curves.png. The loop is in each method's
    `train`: `start`; then in each step `count`, which advances `step`, and now and then
    `checkpoint`; at the end `best_model`.

    sources: the data set, and whatever else the captions depend on besides the model. Checkpoints
    store the state() of each, a dict. With `resume`, the run continues from last.pt as if it had
    never stopped: check_state(state) of each source gets what last.pt holds, takes back what
    training has changed, and raises InputError if it comes from other data. InputError if, without
    `resume`, out_dir has files of another run."""

    # What else a line of log.jsonl holds. No loss may have such a name.
    RESERVED = {"step", "event", "stage", "seconds", "lr"}

    def __init__(self, cfg: RunConfig, model: nn.Module, sources: list, resume: bool = False):
        self.cfg = cfg
        self.config = with_absolute_paths(cfg)
        self.dir = Path(cfg.out_dir)
        self.model = model
        self.sources = sources
        self.resumed: dict | None = None  # what last.pt held
        self.step = 0  # steps done
        self.best = float("-inf")  # best validation score
        self.evals_since_best = 0
        self.losses: dict[str, list[Tensor]] = {}  # since the last line of the log, on the device
        if resume:
            self.restore()
        else:
            refuse_used_folder(self.dir)
            write_text(self.dir / "log.jsonl", "")
        self.begin_log()

    def start(self, optimizer: torch.optim.Optimizer, stage: str = "train", last: int = 0) -> None:
        """Begin a stage, or go on with the one in which last.pt was saved. last: the steps of the
        run when the stage ends, for the log's "time left" (default: cfg.steps)."""
        self.optimizer = optimizer
        self.stage = stage
        self.last = last or self.cfg.steps
        self.began = time.perf_counter()
        self.began_at = self.step
        if self.resumed and self.resumed["stage"] == stage:
            optimizer.load_state_dict(self.resumed["optimizer"])
        else:
            self.save("last.pt")  # so that the stage can be resumed before its first validation

    def patience_is_over(self) -> bool:
        """Whether the last cfg.patience validations gave no new best. If so, print it, because a
        resumed run may end in this way before its first step."""
        over = 0 < self.cfg.patience <= self.evals_since_best
        if over:
            text = f"{self.evals_since_best} validations without a new best (--patience)"
            tqdm.write(f"the run ends after step {self.step}: {text}")
        return over

    def count(self, losses: dict[str, Tensor]) -> None:
        """Count a step. Its losses stay on the device until they are logged."""
        assert not losses.keys() & self.RESERVED, f"none of {self.RESERVED} may name a loss"
        self.step += 1
        for name, loss in losses.items():
            self.losses.setdefault(name, []).append(loss.detach())
        if self.step % self.cfg.log_every == 0:
            self.log_losses()

    def log_losses(self) -> None:
        """Log and print the mean of each loss since the last line, over the steps that computed it.
        FloatingPointError if a loss is not finite."""
        if not self.losses:
            return
        means = {}
        for name, losses in self.losses.items():
            means[name] = round(sum(loss.item() for loss in losses) / len(losses), 6)
        self.losses = {}
        text = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        if not all(map(math.isfinite, means.values())):
            raise FloatingPointError(
                f"a loss is not finite: step {self.step}, {text}; try --grad_clip 1 or a lower --lr"
            )
        seconds = round(time.perf_counter() - self.began, 2)
        lr = self.optimizer.param_groups[0]["lr"]
        self.log("train", stage=self.stage, seconds=seconds, lr=lr, **means)
        left = seconds / (self.step - self.began_at) * (self.last - self.step)
        time_left = f"{tqdm.format_interval(left)} left"
        tqdm.write(f"{self.stage} {self.step}/{self.last}: {text} ({time_left})")

    def checkpoint(self, scores: dict[str, float]) -> None:
        """After a validation: log its scores, and save last.pt and, if they are the best so far,
        best.pt. In a tie the later weights win, because early scores may all be 0, but patience
        does not begin anew. Without scores (no validation pairs), the last weights are the best."""
        self.log_losses()
        self.evals_since_best += 1
        score = self.best
        if scores:
            score = scores[self.cfg.select_by]
            self.log("eval", select_by=self.cfg.select_by, **scores)
            text = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
            tqdm.write(f"step {self.step}: validation {text}")
        if score > self.best or not scores:
            self.evals_since_best = 0
        if score >= self.best:
            self.best = score
            self.save("best.pt")
        self.save("last.pt")
        draw_curves(self.dir / "log.jsonl", self.dir / "curves.png", self.cfg.select_by)

    def save(self, name: str) -> None:
        """Save a checkpoint. Only last.pt has what a run needs to continue. FloatingPointError if a
        weight is not finite; the old file stays."""
        if not all(p.isfinite().all() for p in self.model.parameters()):
            raise FloatingPointError(f"weights are not finite after step {self.step}; lower --lr")
        state = {}
        for source in self.sources:
            state |= source.state()
        state |= {
            "model": self.model.state_dict(),
            "step": self.step,
            "best": self.best,
            "config": self.config,
        }
        if name == "last.pt":
            # For dropout and random masks. The order of the data depends on seed and step alone.
            random = {"cpu": torch.get_rng_state()}
            if self.cfg.on_cuda:
                random["cuda"] = torch.cuda.get_rng_state(self.cfg.device)
            state |= {
                "optimizer": self.optimizer.state_dict(),
                "stage": self.stage,
                "random": random,
                "evals_since_best": self.evals_since_best,
            }
        save_tensors(self.dir / name, state)

    def restore(self) -> None:
        """Load last.pt, if every source accepts it. Later lines of the log are dropped, because the
        run repeats their steps."""
        path = self.dir / "last.pt"
        state = load_tensors(path, device=self.cfg.device)
        for source in self.sources:
            source.check_state(state)
        load_weights(self.model, state["model"], path)
        random = state["random"]
        torch.set_rng_state(random["cpu"].cpu())
        if self.cfg.on_cuda and "cuda" in random:  # else the run began on a CPU
            torch.cuda.set_rng_state(random["cuda"].cpu(), self.cfg.device)
        self.step = state["step"]
        self.best = state["best"]
        self.evals_since_best = state["evals_since_best"]
        self.resumed = state
        log = self.dir / "log.jsonl"
        kept = [json.dumps(row) + "\n" for row in read_log(log) if row["step"] <= self.step]
        write_text(log, "".join(kept))

    def begin_log(self) -> None:
        """Log and print what the results depend on."""
        device = f"cpu, {torch.get_num_threads()} threads"
        if self.cfg.on_cuda:
            device = torch.cuda.get_device_name(self.cfg.device)
        about = {
            "code": code_version(),
            "torch": torch.__version__,
            "device": device,
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }
        event = "resume" if self.resumed else "start"
        self.log(event, **about, config=self.config)
        for f in dataclasses.fields(self.cfg):
            value = getattr(self.cfg, f.name)
            if value != f.default and f.name not in about:
                about[f.name] = value
        for name, value in about.items():
            print(f"{name}: {value}", flush=True)

    def log(self, event: str, **values) -> None:
        row = {"step": self.step, "event": event} | values
        with open(self.dir / "log.jsonl", "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")

    def best_model(self) -> nn.Module:
        """The model with the weights of best.pt, in evaluation mode. Prints where they are from."""
        path = self.dir / "best.pt"
        state = load_tensors(path, device=self.cfg.device)
        print(f"{path} has the weights after step {state['step']}")
        print(f"{self.dir} also has last.pt, log.jsonl and curves.png", flush=True)
        return load_weights(self.model, state["model"], path).eval()


def with_absolute_paths(cfg: RunConfig) -> dict[str, Any]:
    """The fields of a config for a checkpoint. data_dir, out_dir and the FILE of extractor become
    absolute, because from another folder they could lead to other data."""
    config = dataclasses.asdict(cfg)
    for name in ("data_dir", "out_dir"):
        config[name] = str(Path(config[name]).resolve())
    network, colon, file = cfg.extractor.partition(":")
    if colon:  # timm/MODEL:FILE
        config["extractor"] = f"{network}:{Path(file).resolve()}"
    return config


def code_version() -> str:
    """The git commit of this code, or "" outside a repository. It ends in "-dirty" if there are
    files that it does not contain."""

    def git(*arguments: str) -> str:
        call = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(call, capture_output=True, text=True).stdout.strip()

    try:
        return git("describe", "--always") + ("-dirty" if git("status", "--porcelain") else "")
    except OSError:  # there is no git
        return ""


def read_log(path: Path) -> list[dict]:
    """The rows of a log.jsonl."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # A killed process may leave half a line.
            rows.append(json.loads(line))
    return rows


def draw_curves(log: Path, picture: Path, metric: str) -> None:
    """Plot a log.jsonl over steps: losses, and the validation metric that chooses best.pt."""
    from matplotlib.figure import Figure

    rows = read_log(log)
    steps = [row for row in rows if row["event"] == "train"]
    validations = [row for row in rows if row["event"] == "eval"]
    figure = Figure(figsize=(10, 4), layout="constrained")  # no pyplot: it has global state
    left, right = figure.subplots(1, 2, sharex=True)
    for name in sorted(set().union(*steps) - Run.RESERVED):
        of_name = [row for row in steps if name in row]
        x = [row["step"] for row in of_name]
        left.plot(x, [row[name] for row in of_name], marker=".", label=name)
    scale = "log" if left.dataLim.y0 >= 0 else "linear"  # the smallest loss
    left.set(xlabel="training step", ylabel="training loss", yscale=scale)
    left.legend()
    x = [row["step"] for row in validations]
    right.plot(x, [row[metric] for row in validations], marker=".")
    right.set(xlabel="training step", ylabel=f"validation {metric}")
    with atomic_write(picture) as partial:
        figure.savefig(partial, format="png", dpi=100)


# ---- files ---------------------------------------------------------------------------------------

TRAIN_FIRST = "train first, or name another checkpoint"


def progress(items=None, **options) -> tqdm:
    """tqdm for work that takes minutes. Without a terminal, it prints once a minute."""
    pause = 0.1 if sys.stderr.isatty() else 60
    return tqdm(items, mininterval=pause, maxinterval=max(pause, 10), **options)


def print_notes(*notes: str) -> None:
    for note in notes:
        print(f"note: {note}", flush=True)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename that file to `path` at the end. So `path` is
    the old file or a new one, and whole, whenever the process dies or another one writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the process id, which may be 1 in two containers that share a folder.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, completely or not at all."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def save_tensors(path: Path, state: dict) -> None:
    """Write plain dicts and tensors to a file, completely or not at all."""
    # torch.save would hide that the disk is full behind an error of its own.
    content = io.BytesIO()
    torch.save(state, content)
    with atomic_write(path) as partial:
        partial.write_bytes(content.getbuffer())


@contextlib.contextmanager
def file_errors(path: str | Path, remedy: str) -> Iterator[None]:
    """Turn any exception inside the `with` into an InputError with the file's path and a remedy."""
    try:
        yield
    except Exception as e:  # A broken file can raise anything.
        reason = textwrap.shorten(f"{type(e).__name__}: {e}", 120, placeholder=" ...")
        raise InputError(f"{path} cannot be used ({reason}); {remedy}") from e


def read_json(path: Path):
    """The parsed JSON of a file. InputError names a broken file."""
    content = path.read_bytes()
    with file_errors(path, "correct it, or fetch it again"):
        return json.loads(content)


def load_tensors(
    path: str | Path, remedy: str = TRAIN_FIRST, device: str = "cpu", mmap: bool = False
) -> dict:
    """What save_tensors wrote, such as a checkpoint. With mmap, tensors that are not used are not
    read. InputError with the remedy if the file is missing or broken."""
    with file_errors(path, remedy):  # weights_only: nothing in the file is executed
        return torch.load(path, map_location=device, weights_only=True, mmap=mmap)


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], path: str | Path, remedy: str = TRAIN_FIRST
) -> nn.Module:
    """The model with these weights of the file `path`. InputError if they do not fit."""
    with file_errors(path, remedy):
        model.load_state_dict(weights)
    return model


def load_model(Model: type, cfg: RunConfig, path: str | Path) -> tuple[nn.Module, dict]:
    """-> Model(cfg, vocabulary size, grid, max_len) with the weights of a checkpoint, in evaluation
    mode, and the checkpoint. InputError if the file is missing or does not fit."""
    state = load_tensors(path, device=cfg.device)
    model = Model(cfg, len(state["vocab"]), state["grid"], state["max_len"]).to(cfg.device)
    return load_weights(model, state["model"], path).eval(), state


# ---- main ----------------------------------------------------------------------------------------


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main. A user's mistakes, files that cannot be read or written, and losses that
    are not finite print one line and exit with code 2, Ctrl-C and SIGTERM with code 130."""
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="replace")  # A terminal may lack characters of a caption.
    # Like Ctrl-C, SIGTERM raises KeyboardInterrupt, so that partial files are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted; --resume continues a run from its last validation", file=sys.stderr)
        sys.exit(130)
    except (InputError, OSError, FloatingPointError) as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
