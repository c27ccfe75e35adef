"""A method's command line, and the folder of its run. Licence: MIT."""

import argparse
import dataclasses
import inspect
import json
import math
import re
import subprocess
import sys
import time
import typing
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor
from tqdm import tqdm

from common import InputError, RunConfig, set_up_device
from support.files import (
    file_errors,
    kept,
    load_tensors,
    load_weights,
    print_notes,
    read_log,
    save_tensors,
    write_text,
)
from support.pictures import draw_curves

# ---- command line --------------------------------------------------------------------------------


def parse_args(Config: type, PRESETS: dict, RELEASED: dict, argv: list[str] | None) -> tuple:
    """-> (cfg, args). Every field of Config is a flag; --variant is one if RELEASED is not empty.
    A new run starts from the preset of its data set and variant; --resume, --eval and --caption
    start from their checkpoint's Config (see refuse_changes)."""
    args = make_parser(Config, PRESETS, bool(RELEASED)).parse_args(argv)
    flags = {f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if f.name in args}
    if bool(args.caption) != bool(args.checkpoint):
        raise InputError("--caption needs --checkpoint, and --checkpoint needs --caption")
    dataset = flags.get("dataset", Config.dataset)
    method = Path(sys.modules[Config.__module__].__file__).stem
    out_dir = Path(flags.get("out_dir") or f"runs/{method}-{dataset}")
    checkpoint = out_dir / "last.pt" if args.resume else args.eval or args.checkpoint
    if checkpoint:
        cfg = saved_config(Config, checkpoint)
        if args.eval:
            out_dir = evaluated_data(cfg, flags, Path(args.eval))
        released = RELEASED["all"] if args.variant == "released" else {}
        refuse_changes(cfg, released | flags, checkpoint)
    else:
        cfg = new_config(Config, PRESETS, RELEASED, dataset, args.variant)
        refuse_used_folder(out_dir)
    device = usable_device(flags.get("device", ""))
    cfg = dataclasses.replace(cfg, **flags | {"out_dir": str(out_dir), "device": device})
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
    group.add_argument("--checkpoint", help="best.pt or last.pt of a training, for --caption")
    text = "with --caption: where to write the attention picture or the CSV file with captions"
    group.add_argument("--out", metavar="FILE", help=text)

    title = f"config (for {', '.join(PRESETS)}, PRESETS in the file replaces some defaults)"
    group = parser.add_argument_group(title)
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
        elif typing.get_origin(kind) is Literal:
            options = {"choices": typing.get_args(kind)}
        else:
            options = {"type": kind}
        text = comments.get(f.name, "")
        if f.default != "":
            text = f"{text} (default: {f.default})"
        text = text.replace("%", "%%")
        group.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=text, **options)
    return parser


def preset(Config: type, presets: dict, released: dict, dataset: str, variant: str = "paper"):
    """The Config of a data set: the defaults, then presets[dataset] and, for the variant
    "released", released["all"] and released[dataset]. What comes later overrides the earlier."""
    values = {"dataset": dataset, "data_dir": f"data/{dataset}"}
    values |= presets.get(dataset, {})
    if variant == "released":
        values |= released["all"] | released.get(dataset, {})
    return Config(**values)


def new_config(Config: type, presets: dict, released: dict, dataset: str, variant: str):
    """The Config of a new run: `preset`, with notes on a data set that has none."""
    if dataset not in presets:
        print(f"no preset for {dataset}: using the defaults")
    if variant == "released" and dataset not in released:
        used = ", ".join(released["all"])
        print_notes(f"no code was released for {dataset}; other released code gives: {used}")
    return preset(Config, presets, released, dataset, variant)


def saved_config(Config: type, checkpoint: str | Path):
    """The Config that a checkpoint was trained with. InputError if it is not this method's."""
    state = load_tensors(checkpoint)
    with file_errors(checkpoint, other_code(state)):
        return Config(**state["config"])


def other_code(state: dict) -> str:
    """The remedy for a checkpoint that does not fit this code."""
    commit = state.get("code") or "unknown"
    return f"it needs its own method, and the code that trained it (git commit {commit})"


def refuse_changes(base: RunConfig, given: dict, checkpoint: Path) -> None:
    """InputError if a flag that may not change differs from the checkpoint's Config."""
    for name, value in given.items():
        saved = getattr(base, name)
        trained = f"{checkpoint} was trained with {saved}"
        if name == "steps" and base.schedule == "cosine":
            trained += ", and --schedule cosine lets the learning rate end at 0 there"
        elif name in base.MAY_CHANGE:
            continue
        if value != saved:
            remedy = f"leave --{name} out, or train anew, with another --out_dir"
            raise InputError(f"--{name} {value}: {trained}; {remedy}")


def evaluated_data(cfg: RunConfig, flags: dict, checkpoint: Path) -> Path:
    """Give the Config of --eval's checkpoint the data set that the flags name -> the folder for its
    scores. InputError if it has scores of other data."""
    if flags.get("dataset", cfg.dataset) != cfg.dataset:
        cfg.dataset = flags["dataset"]
        cfg.data_dir = f"data/{cfg.dataset}"
    data = Path(flags.get("data_dir", cfg.data_dir)).resolve()
    folder = Path(flags.get("out_dir") or checkpoint.parent)
    folder /= f"{checkpoint.stem}-{data.name}"  # never the run's own files
    for file in folder.glob("scores_*.json"):
        other = json.loads(file.read_bytes())["data"]
        if other != str(data):
            raise InputError(f"{folder} has the scores of {other}; give another --out_dir")
    return folder


def refuse_used_folder(folder: Path) -> None:
    """InputError if the folder has files, because a run never replaces files of another one."""
    if any(folder.glob("*")):
        raise InputError(f"{folder} is not empty; --resume its run, or give another --out_dir")


def usable_device(name: str) -> str:
    """The device of this name; an empty name stands for CUDA or, without CUDA, for the CPU."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    with file_errors(f"--device {name}", "try --device cpu"):
        torch.ones(1, device=name)  # PyTorch may lack the code that computes on this GPU
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
        except Exception as e:  # an old GPU, no C compiler or Python.h, no folder to write to, ...
            reason, _, _ = str(e).strip().partition("\n")
            print(f"torch.compile does not work here ({reason}): compile is off")
            cfg.compile = False


# ---- running -------------------------------------------------------------------------------------

SAVE_EVERY = 300  # seconds between two saves of last.pt


class Run:
    """The folder of a run: log.jsonl, last.pt, best.pt, curves.png. `train` calls `start`; in each
    step `step += 1`, `log` and, now and then, `checkpoint`; at the end `best_model`.

    sources: the data set, and whatever else the captions depend on besides the model. Checkpoints
    store the state() of each, a dict. With `resume`, the run continues from last.pt as if it had
    never stopped: check_state(state) of each source gets what last.pt holds, takes back what
    training has changed, and raises InputError if it comes from other data."""

    def __init__(self, cfg: RunConfig, model: nn.Module, sources: list, resume: bool = False):
        self.cfg = cfg
        self.config = with_absolute_paths(cfg)
        self.code = code_version()
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

    def start(
        self, optimizer: torch.optim.Optimizer, stage: str = "train", first: int = 0, last: int = 0
    ) -> None:
        """Begin a stage, or go on with the one in which last.pt was saved. It has the run's steps
        from `first` to `last` (default: cfg.steps)."""
        self.optimizer = optimizer
        self.stage = stage
        self.first = first
        self.last = last or self.cfg.steps
        self.began = time.perf_counter()
        self.began_at = self.step
        if self.resumed and self.resumed["stage"] == stage:
            optimizer.load_state_dict(self.resumed["optimizer"])
        self.save("last.pt")

    def is_over(self) -> bool:
        """True if the last cfg.patience validations gave no new best, even before a first step."""
        over = 0 < self.cfg.patience <= self.evals_since_best
        if over:
            why = f"--patience {self.cfg.patience} validations gave no new best"
            tqdm.write(f"step {self.step} is the last: {why}")
        return over

    def log(self, losses: dict[str, Tensor]) -> None:
        """Keep a step's losses; log their means after log_every steps; save last.pt in between."""
        for name, loss in losses.items():
            self.losses.setdefault(name, []).append(loss.detach())
        if self.step % self.cfg.log_every == 0:
            self.log_losses()
        # A validation that follows this step saves last.pt itself. Saved before, a run that stops
        # in the validation would go on without it.
        done = self.step - self.first
        validation_follows = done % self.cfg.eval_every == 0 or self.step == self.last
        if time.perf_counter() - self.saved_at > SAVE_EVERY and not validation_follows:
            self.save("last.pt")

    def log_losses(self) -> None:
        """Log and print each loss since the last line: its mean over the steps that computed it."""
        if not self.losses:
            return
        means = {}
        for name, losses in self.losses.items():
            means[name] = round(sum(loss.item() for loss in losses) / len(losses), 6)
        self.losses = {}
        text = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        if not all(map(math.isfinite, means.values())):
            raise FloatingPointError(f"step {self.step}: {text}; try --grad_clip 1 or a lower --lr")
        seconds = round(time.perf_counter() - self.began, 2)
        lr = self.optimizer.param_groups[0]["lr"]
        self.write("train", stage=self.stage, seconds=seconds, lr=lr, **means)
        left = tqdm.format_interval(seconds / (self.step - self.began_at) * (self.last - self.step))
        tqdm.write(f"{self.stage} {self.step}/{self.last}: {text} ({left} left)")

    def checkpoint(self, scores: dict[str, float]) -> None:
        """After a validation: log its scores, and save last.pt and, if they are the best so far,
        best.pt. In a tie, best.pt gets the later weights, because early scores may all be 0, but
        evals_since_best goes on. Without scores (no validation pairs), the last weights count."""
        self.log_losses()
        self.evals_since_best += 1
        score = self.best
        if scores:
            score = scores[self.cfg.select_by]
            self.write("eval", select_by=self.cfg.select_by, **scores)
            text = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
            tqdm.write(f"step {self.step}: validation {text}")
        if score > self.best or not scores:
            self.evals_since_best = 0
        if score >= self.best:
            self.best = score
            self.save("best.pt")
        draw_curves(self.dir / "log.jsonl", self.dir / "curves.png")
        self.save("last.pt")

    def save(self, name: str) -> None:
        """Save a checkpoint. Only last.pt has what a run needs to continue. FloatingPointError if a
        weight is not finite; the old file stays."""
        if not all(p.isfinite().all() for p in self.model.parameters()):
            raise FloatingPointError(f"weights are not finite after step {self.step}; lower --lr")
        state = {}
        for source in self.sources:
            state |= source.state()
        state["model"] = self.model.state_dict()
        state |= {"step": self.step, "best": self.best, "config": self.config, "code": self.code}
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
                "losses": self.losses,
            }
        save_tensors(self.dir / name, state)
        if name == "last.pt":
            self.saved_at = time.perf_counter()
            kept[:] = [f"--resume goes on from step {self.step}"]

    def restore(self) -> None:
        """Load last.pt, if every source accepts it. Later lines of the log are dropped."""
        path = self.dir / "last.pt"
        state = load_tensors(path, device=self.cfg.device)
        for source in self.sources:
            source.check_state(state)
        load_weights(self.model, state["model"], path, other_code(state))
        random = state["random"]
        torch.set_rng_state(random["cpu"].cpu())
        if self.cfg.on_cuda and "cuda" in random:  # else the run began on a CPU
            torch.cuda.set_rng_state(random["cuda"].cpu(), self.cfg.device)
        self.step = state["step"]
        self.best = state["best"]
        self.evals_since_best = state["evals_since_best"]
        self.losses = state["losses"]
        self.resumed = state
        if self.best > float("-inf") and not (self.dir / "best.pt").exists():
            print_notes(f"{self.dir} has no best.pt; last.pt replaces it until the next validation")
            self.best = float("-inf")
            self.save("best.pt")
        log = self.dir / "log.jsonl"
        log.touch()  # last.pt alone may have been brought along
        rows = [json.dumps(row) + "\n" for row in read_log(log) if row["step"] <= self.step]
        write_text(log, "".join(rows))

    def begin_log(self) -> None:
        """Log and print what the results depend on."""
        device = f"cpu, {torch.get_num_threads()} threads"
        if self.cfg.on_cuda:
            device = torch.cuda.get_device_name(self.cfg.device)
        about = {
            "code": self.code,
            "torch": torch.__version__,
            "device": device,
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }
        self.write("resume" if self.resumed else "start", **about, config=self.config)
        defaults = vars(type(self.cfg)())
        for name, value in (self.config | about).items():
            if value != defaults.get(name):
                print(f"{name}: {value}", flush=True)

    def write(self, event: str, **values) -> None:
        """Add a line to log.jsonl."""
        row = dict(step=self.step, event=event, **values)  # no value may be called like another
        with open(self.dir / "log.jsonl", "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")

    def best_model(self) -> tuple[nn.Module, dict]:
        """What load_model returns, for best.pt. Prints after which step it was saved."""
        path = self.dir / "best.pt"
        state = load_tensors(path, device=self.cfg.device)
        print(f"{path} has the weights after step {state['step']}")
        return load_weights(self.model, state["model"], path).eval(), state


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
        # Unless told that it is safe, git refuses a clone of another owner, as in a container.
        call = ["git", "-c", "safe.directory=*", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(call, capture_output=True, text=True).stdout.strip()

    try:
        return git("describe", "--always") + ("-dirty" if git("status", "--porcelain") else "")
    except OSError:  # there is no git
        return ""


def load_model(Model: type, cfg: RunConfig, path: str | Path) -> tuple[nn.Module, dict]:
    """-> the model of a checkpoint, in evaluation mode, and the checkpoint, if it fits."""
    state = load_tensors(path, device=cfg.device)
    model = Model(cfg, len(state["vocab"]), state["grid"], state["max_len"]).to(cfg.device)
    return load_weights(model, state["model"], path, other_code(state)).eval(), state
