"""Shared layers and losses against plain float64 versions; command line; runs; files."""

import dataclasses
import importlib
import json
import math
import os
import re
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
import torch.nn as nn

import common
import scorer_cbr
from common import (
    Attention,
    GridPosition,
    Run,
    RunConfig,
    decode,
    info_nce,
    learning_rate,
    sinusoid,
    token_match,
)

# ---- layers and losses ---------------------------------------------------------------------------


def dense_match(q, k):
    """The formula of token_match, every score at once."""
    s = torch.einsum("anc,bmc->abnm", q, k)
    return (s.amax(3).mean(2) + s.amax(2).mean(2)) / 2


@pytest.mark.parametrize("heads", [1, 2])
def test_token_match_equals_dense_autograd(heads, monkeypatch):
    monkeypatch.setattr(common, "MATCH_SLICE", 100)  # several slices
    q = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64)
    ours = token_match(q, k, heads)
    plain = 0
    for q_head, k_head in zip(q.chunk(heads, 2), k.chunk(heads, 2), strict=True):
        plain = plain + dense_match(q_head, k_head) / heads
    torch.testing.assert_close(ours, plain)
    our_gradients = torch.autograd.grad((ours * weight).sum(), (q, k))
    plain_gradients = torch.autograd.grad((plain * weight).sum(), (q, k))
    torch.testing.assert_close(our_gradients, plain_gradients)


def test_token_match_of_one_head_ignores_how_channels_are_split():
    q = torch.randn(2, 3, 8)
    k = torch.randn(4, 5, 8)
    order = torch.arange(8).view(2, 4).T.flatten()  # mixes the heads
    mixed_q = q[..., order]
    mixed_k = k[..., order]
    torch.testing.assert_close(token_match(q, k), token_match(mixed_q, mixed_k))
    assert not torch.allclose(token_match(q, k, 2), token_match(mixed_q, mixed_k, 2))


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="6 channels are not a multiple of 4 heads"):
        token_match(torch.zeros(2, 3, 6), torch.zeros(2, 3, 6), 4)
    with pytest.raises(ValueError, match="width of 6 is not a multiple of 4 heads"):
        Attention(6, heads=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_raised_for_sums(dtype):
    x = torch.full((2,), 300.0, dtype=dtype)
    assert common.upcast(x).dtype == torch.float32
    assert (common.upcast(x) ** 2).tolist() == [90000.0, 90000.0]  # more than float16 can hold
    assert common.upcast(x.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_token_match_in_half_precision(dtype):
    q = torch.randn(4, 5, 64)
    k = torch.randn(3, 7, 64)
    expected = dense_match(q, k)
    with torch.autocast("cpu", dtype):
        ours = token_match(q, k)
    assert (ours - expected).norm() < 0.01 * expected.norm()


def test_info_nce_against_loop():
    s = torch.randn(5, 5, dtype=torch.float64) * 3
    loop = 0.0
    for a in range(5):
        others = sum(math.exp(s[a, b]) for b in range(5))
        loop -= math.log(math.exp(s[a, a]) / others) / 5
    assert info_nce(s).item() == pytest.approx(loop)


def test_attention_against_loop():
    attention = Attention(6, heads=2, out_proj=False).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    memory = torch.randn(2, 4, 6, dtype=torch.float64)
    q, k, v = attention.project(x, memory)
    plain = torch.zeros(2, 3, 6, dtype=torch.float64)
    for b in range(2):
        for h in (slice(0, 3), slice(3, 6)):
            for i in range(3):
                score = torch.stack([q[b, i, h] @ k[b, j, h] for j in range(4)]) / math.sqrt(3)
                plain[b, i, h] = (score.softmax(0)[:, None] * v[b, :, h]).sum(0)
    torch.testing.assert_close(attention(x, memory), plain)
    weights = attention.scores(q, k).softmax(-1)  # (B, h, L, M)
    values = v.view(2, 4, 2, 3).transpose(1, 2)
    torch.testing.assert_close((weights @ values).transpose(1, 2).flatten(2), plain)


def test_causal_attention_sees_no_later_word():
    attention = Attention(8, heads=2)
    x = torch.randn(1, 5, 8)
    changed = x.clone()
    changed[:, 3:] += 1
    expected = attention(x, x, causal=True)[:, :3]
    torch.testing.assert_close(attention(changed, changed, causal=True)[:, :3], expected)


def test_masked_mean_leaves_padding_out():
    x = torch.tensor([[[1.0], [3.0], [100.0]], [[7.0], [7.0], [7.0]]])
    valid = torch.tensor([[True, True, False], [False, False, False]])
    assert common.masked_mean(x, valid).tolist() == [[2.0], [0.0]]


def test_grid_position_halves():
    position = GridPosition(6, height=2, width=3)
    table = position()
    assert table.shape == (6, 2, 3)
    torch.testing.assert_close(table[:3, 1, 2], position.col.weight[2])
    torch.testing.assert_close(table[3:, 1, 2], position.row.weight[1])


@pytest.mark.parametrize("dim", [6, 7])
def test_sinusoid_against_formula(dim):
    table = sinusoid(5, dim)
    for p in range(5):
        for c in range(dim):
            angle = p / 10000 ** ((c - c % 2) / dim)
            expected = math.cos(angle) if c % 2 else math.sin(angle)
            assert table[p, c].item() == pytest.approx(expected, abs=1e-6)


# ---- decoding ------------------------------------------------------------------------------------


def test_decode_stops_at_end_and_never_says_unk():
    # The likeliest word at each step; 3 ends a caption.
    script = torch.tensor([[4, 3, *[5] * 10], [5, 4, 3, *[4] * 9]])
    seen = []

    def step(words, t):
        logits = nn.functional.one_hot(script[:, t], 6).float()
        logits[:, 1] = 9.0  # UNK looks best
        seen.append(words.tolist())
        return logits

    ids = decode(step, 2, 12, "cpu")
    assert ids.tolist() == [[2, 4, *[0] * 10], [2, 5, 4, *[0] * 9]]
    assert len(seen) == 8  # and not eleven
    assert decode(step, 2, 3, "cpu").tolist() == [[2, 4, 0], [2, 5, 4]]


def test_decode_ends_a_caption_at_null():
    script = torch.tensor([[4, 0, 5, 5]])

    def step(words, t):
        return nn.functional.one_hot(script[:, t], 6).float()

    assert decode(step, 1, 5, "cpu").tolist() == [[2, 4, 0, 0, 0]]


def test_decode_samples_in_proportion():
    torch.manual_seed(0)
    logits = torch.tensor([-30.0, -30.0, -30.0, -30.0, math.log(3.0), 0.0])

    def step(words, t):
        return logits.repeat(len(words), 1)

    ids = decode(step, 4000, 2, "cpu", sample=True)
    assert (ids[:, 1] == 4).float().mean().item() == pytest.approx(0.75, abs=0.03)


# ---- configuration and command line --------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """A method's config."""

    variant: Literal["paper", "released"] = "paper"  # disputed details
    width: int = 4  # width in cells
    plain: int = 3
    dim: int = 8  # width D
    heads: int = 2  # heads


PRESETS = {"mini": {"lr": 0.5, "width": 7}}
RELEASED = {"all": {"width": 1}, "other": {"lr": 3.0}}


def checkpoint(**parts):
    """What a checkpoint holds."""
    whole = {
        "model": {},
        "optimizer": {"state": {}},
        "random": {"cpu": torch.get_rng_state()},
        "step": 0,
        "best": 0.0,
        "evals_since_best": 0,
        "config": dataclasses.asdict(Config()),
        "vocab": ["a", "b"],
        "grid": (8, 2, 3),
        "max_len": 9,
    }
    return whole | parts


def make_run_folder(folder, **config):
    """A folder as a run leaves it, with last.pt and best.pt of this config."""
    folder.mkdir()
    config = dataclasses.asdict(Config(**config))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("last.pt", "best.pt"):
        torch.save(checkpoint(config=config), folder / name)
    return folder


def parse(*argv, RELEASED=RELEASED):
    """(cfg, args) of a method's command line on a CPU."""
    argv = [str(arg) for arg in argv]
    if not any(arg.startswith("--device") for arg in argv):
        argv += ["--device", "cpu"]
    return common.parse_args(Config, PRESETS, "method", "What it is.", argv, RELEASED)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Default folders are relative."""
    monkeypatch.chdir(tmp_path)


def test_flags_over_preset_over_defaults(capsys):
    cfg, args = parse("--steps", "3", "--no-amp")
    assert (cfg.lr, cfg.width, cfg.steps, cfg.amp, cfg.seed) == (0.5, 7, 3, False, 1111)
    assert (cfg.data_dir, cfg.out_dir) == ("data/mini", "runs/method-mini")
    assert (args.resume, args.split, args.suffix) == (False, "test", "")
    released, _ = parse("--variant", "released")
    assert (released.variant, released.width, released.lr) == ("released", 1, 0.5)
    other, _ = parse("--dataset", "other", "--variant", "released")
    assert other.lr == 3.0
    capsys.readouterr()
    unknown, _ = parse("--dataset", "else")  # runs on the defaults, and says so
    assert (unknown.lr, unknown.width, unknown.data_dir) == (Config.lr, 4, "data/else")
    assert "no preset for else" in capsys.readouterr().out
    without, _ = parse(RELEASED=None)
    assert without.variant == "paper"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--stepz=3", "--stepz"),
        ("--steps=x", "invalid int"),
        ("--schedule=x", "invalid choice"),
        ("--device=no", "--device no cannot be used"),
        ("--steps=0", "--steps 0: expected 1 or more"),
        ("--batch_size=-1", "--batch_size -1: expected 1 or more"),
        ("--seed=-1", "--seed -1: expected 0 or more"),
        ("--plain=-1", "--plain -1: expected 0 or more"),
        ("--heads=3", "--dim 8 is not a multiple of --heads 3"),
        ("--resume --eval x.pt", "not allowed with"),
        ("--checkpoint x.pt", "--caption and --checkpoint go together"),
        ("--caption a b", "--caption and --checkpoint go together"),
        ("--caption a.png --checkpoint x.pt", "expected two images, or a .csv file"),
        ("--out x.png", "--out goes with --caption"),
        ("--split val", "--split goes with --eval"),
        ("--eval none.pt", "none.pt cannot be used .*train first"),
    ],
)
def test_wrong_flags_are_named(flags, message):
    with pytest.raises(ValueError, match=message):
        parse(*flags.split())


def test_help_is_read_from_the_comments(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "What it is." in text
    assert "width in cells (default: 4)" in text
    assert "training steps (default: 10000)" in text
    assert "5 % as many" in text
    assert "--amp, --no-amp" in text


CONFIG_OF_A_FILE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
from common import RunConfig

@dataclass
class Config(RunConfig):
    width: int = 4  # width in cells
    shape: Literal["round", "square"] = "round"  # of a cell
    bold: bool = False  # thick lines
"""


def test_a_config_may_postpone_its_annotations(tmp_path, monkeypatch, capsys):
    (tmp_path / "postponed.py").write_text(CONFIG_OF_A_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    Config = importlib.import_module("postponed").Config
    flags = ["--width", "5", "--shape", "square", "--bold", "--device", "cpu"]
    cfg, _ = common.parse_args(Config, {}, "method", "Doc.", flags)
    assert (cfg.width, cfg.shape, cfg.bold) == (5, "square", True)
    with pytest.raises(ValueError, match="invalid choice: 'flat'"):
        common.parse_args(Config, {}, "method", "Doc.", ["--shape", "flat"])
    with pytest.raises(SystemExit):
        common.parse_args(Config, {}, "method", "Doc.", ["--help"])
    assert "width in cells (default: 4)" in " ".join(capsys.readouterr().out.split())


def test_a_config_may_have_no_source(capsys):
    space = {"__name__": "of_no_file"}
    exec(CONFIG_OF_A_FILE.replace("from __future__ import annotations", ""), space)
    Config = space["Config"]
    cfg, _ = common.parse_args(Config, {}, "m", "Doc.", ["--width", "5", "--device", "cpu"])
    assert cfg.width == 5
    with pytest.raises(SystemExit):
        common.parse_args(Config, {}, "m", "Doc.", ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "training steps (default: 10000)" in text  # RunConfig has a source
    assert "--width WIDTH (default: 4)" in text


def test_a_checkpoint_brings_its_config(tmp_path):
    folder = make_run_folder(tmp_path / "run", variant="released", width=1)
    cfg, args = parse("--eval", folder / "best.pt", "--lr", "2")
    assert (cfg.lr, cfg.width, cfg.out_dir) == (2.0, 1, str(folder))
    assert args.suffix == ""
    with pytest.raises(ValueError, match="--variant paper: .* was trained with released"):
        parse("--eval", folder / "best.pt", "--variant", "paper")
    resumed, _ = parse("--resume", "--out_dir", folder, "--steps", "7")
    assert (resumed.width, resumed.steps) == (1, 7)


def test_results_of_other_checkpoints_get_a_suffix(tmp_path):
    folder = make_run_folder(tmp_path / "run")
    _, args = parse("--eval", folder / "last.pt")
    assert args.suffix == "-last"
    written = {f"scores_test{args.suffix}.json", f"captions_val{args.suffix}.json"}
    assert written <= set(common.run_files())


def test_configs_of_other_versions(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(checkpoint(config={"lr": 0.5}), path)
    older, _ = parse("--caption", "a", "b", "--checkpoint", path)
    assert (older.plain, older.lr) == (3, 0.5)
    torch.save(checkpoint(config={"lr": 0.5, "colour": "red"}), path)
    with pytest.raises(ValueError, match="another method or version: .*colour"):
        parse("--caption", "a", "b", "--checkpoint", path)


def test_a_gpu_without_bfloat16_gets_no_autocast(monkeypatch, capsys):
    monkeypatch.setattr(common, "usable_device", lambda name: "cuda")
    monkeypatch.setattr(common, "has_bfloat16", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    cfg, _ = parse("--device", "cuda")
    assert not cfg.amp
    assert "Tesla T4 has no bfloat16: amp is off" in capsys.readouterr().out


def test_learning_rate_traces():
    step = RunConfig(lr=2e-4, lr_drop=3975)
    rates = [learning_rate(step, s) for s in (0, 3974, 3975, 7949, 7950)]
    assert rates == pytest.approx([2e-4, 2e-4, 2e-5, 2e-5, 2e-6])
    cosine = RunConfig(lr=1.0, schedule="cosine", warmup=10, steps=110)
    rates = [learning_rate(cosine, s) for s in (0, 9, 10, 60)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.5])
    assert learning_rate(cosine, 109) < 1e-3


# ---- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, "[]", "{", '{"dataset": "of another program"}'])
def test_a_folder_of_something_else_is_refused(config, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "important.pt").touch()
    if config is not None:
        (folder / "config.json").write_text(config)
    message = "mine is not empty and is not a run's folder; choose another --out_dir"
    with pytest.raises(ValueError, match=message):
        parse("--out_dir", folder, "--overwrite")
    torch.save(checkpoint(), folder / "best.pt")
    with pytest.raises(ValueError, match=message):  # results would be written here
        parse("--eval", folder / "best.pt")


def test_a_run_is_replaced_only_with_overwrite(tmp_path):
    folder = make_run_folder(tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run already; .*--overwrite"):
        parse("--out_dir", folder)
    parse("--out_dir", folder, "--overwrite")
    parse("--out_dir", tmp_path / "new")


def test_an_evaluation_writes_into_no_other_run(tmp_path, monkeypatch):
    folder = make_run_folder(tmp_path / "a")
    other = make_run_folder(tmp_path / "b")
    for more in ([], ["--overwrite"]):
        with pytest.raises(ValueError, match="b holds another run than .*a; leave out --out_dir"):
            parse("--eval", folder / "best.pt", "--out_dir", other, *more)
    cfg, _ = parse("--eval", folder / "best.pt", "--out_dir", tmp_path / "new")
    assert cfg.out_dir == str(tmp_path / "new")
    monkeypatch.chdir(folder)
    parse("--eval", "best.pt", "--out_dir", folder)  # the same folder in other words


# ---- running -------------------------------------------------------------------------------------


class Words:
    """As much of a data set as a run's checkpoints need: three batches an epoch."""

    def __init__(self, words=("a", "b")):
        self.words = list(words)

    def steps(self, batch_size):
        return 3

    def train_batches(self, batch_size, seed, epoch, first=0):
        return [(epoch, number) for number in range(first, 3)]

    def state(self):
        return {"vocab": self.words}

    def check_state(self, state):
        if state["vocab"] != self.words:
            raise ValueError("other words")


class Linear(nn.Module):
    """A model of one layer."""

    def __init__(self, cfg):
        super().__init__()
        self.layer = nn.Linear(2, cfg.dim)


def config_of(folder, **fields):
    few = {"out_dir": str(folder), "device": "cpu", "eval_every": 2, "log_every": 1, "steps": 4}
    return Config(**few | fields)


def train(folder, resume=False, scores=(1.0, 2.0), words=("a", "b"), validate=None, **fields):
    """A run as in the method files -> the run, and the batches that it saw.

    validate() gives the scores of a validation, by default `scores` in turn."""
    cfg = config_of(folder, **fields)
    coming = iter(scores)
    dataset = Words(words)
    seen = []
    torch.manual_seed(0)
    model = Linear(cfg)
    optimizer = torch.optim.Adam(model.parameters())
    with Run(cfg, model, [dataset], resume) as run:
        run.start(optimizer, cfg.steps)
        while not run.finished():
            epoch, first = divmod(run.step, dataset.steps(cfg.batch_size))
            for batch in dataset.train_batches(cfg.batch_size, cfg.seed, epoch, first):
                optimizer.param_groups[0]["lr"] = learning_rate(cfg, run.step)
                loss = model.layer(torch.ones(2) + torch.rand(2)).square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append(batch)
                run.record({"total": loss})
                due = run.step % cfg.eval_every == 0 or run.step == cfg.steps
                if due or run.step % cfg.log_every == 0:
                    run.log_losses()
                if due:
                    found = validate() if validate else {"CIDEr": next(coming)}
                    if run.is_best(found):
                        run.save("best.pt")
                    run.save("last.pt")
                if run.stop:
                    run.save_and_exit()
                if run.finished():
                    break
    return run, seen


def log_of(folder, event):
    """The lines of a log of one event, without times."""
    rows = []
    for row in common.read_log(folder / "log.jsonl"):
        if row["event"] == event:
            row.pop("seconds", None)
            rows.append(row)
    return rows


def test_a_stopped_run_continues_as_if_it_had_never_stopped(tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    _, seen = train(whole)
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0)]

    record = Run.record

    def interrupted(run, losses):
        record(run, losses)
        if run.step == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "record", interrupted)
    with pytest.raises(SystemExit) as e:
        train(parts)
    monkeypatch.undo()
    assert e.value.code == 130
    assert common.load_checkpoint(parts / "last.pt")["step"] == 3

    with open(parts / "log.jsonl", "a") as f:
        f.write('{"step": 4}\n{"no step": 1}\n{"step": 4, "ev')  # killed in the middle of a line
    with pytest.raises(ValueError, match="other words"):
        train(parts, resume=True, words="a")
    _, seen = train(parts, resume=True, scores=[2.0])
    assert seen == [(1, 0)]
    a = common.load_checkpoint(whole / "last.pt")
    b = common.load_checkpoint(parts / "last.pt")
    assert torch.equal(a["model"]["layer.weight"], b["model"]["layer.weight"])
    assert torch.equal(a["random"]["cpu"], b["random"]["cpu"])
    for name in ("step", "best", "evals_since_best"):
        assert a[name] == b[name]
    assert (b["step"], b["best"]) == (4, 2.0)
    assert log_of(whole, "train") == log_of(parts, "train")
    assert log_of(whole, "eval") == log_of(parts, "eval")
    assert [row["CIDEr"] for row in log_of(parts, "eval")] == [1.0, 2.0]


def test_lines_of_the_log_keep_their_keys(tmp_path):
    train(tmp_path)
    start, *_, last = common.read_log(tmp_path / "log.jsonl")
    assert set(start) == {"step", "event", "code", "torch", "device", "parameters", "config"}
    assert last == {"step": 4, "event": "eval", "select_by": "CIDEr", "CIDEr": 2.0}
    line = log_of(tmp_path, "train")[0]
    assert list(line) == ["step", "event", "stage", "lr", "total"]  # and seconds
    assert (line["stage"], line["lr"]) == ("train", Config.lr)


def test_the_best_validation_is_kept(tmp_path):
    run, _ = train(tmp_path, scores=[2.0, 1.0])
    best = common.load_checkpoint(tmp_path / "best.pt")
    last = common.load_checkpoint(tmp_path / "last.pt")
    assert (best["step"], best["best"], best["evals_since_best"]) == (2, 2.0, 0)
    assert (last["step"], last["best"], last["evals_since_best"]) == (4, 2.0, 1)
    assert torch.equal(run.best_model().layer.weight, best["model"]["layer.weight"])


def test_an_interrupt_while_validating_ends_the_run_afterwards(tmp_path):
    def validate():
        signal.raise_signal(signal.SIGTERM)
        return {"CIDEr": 1.0}

    with pytest.raises(SystemExit) as e:
        train(tmp_path, validate=validate)
    assert e.value.code == 143
    last = common.load_checkpoint(tmp_path / "last.pt")
    assert (last["step"], last["best"]) == (2, 1.0)
    assert [row["step"] for row in log_of(tmp_path, "train")] == [1, 2]


def test_a_second_signal_stops_at_once(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    cfg = config_of(tmp_path)
    with Run(cfg, Linear(cfg), [Words()]) as run:
        signal.raise_signal(signal.SIGTERM)
        assert run.stop == 143
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_a_scorer_that_dies_costs_no_steps(tmp_path):
    def validate():
        raise OSError("the tokenizer has died")

    with pytest.raises(OSError, match="tokenizer"):
        train(tmp_path, validate=validate)
    assert common.load_checkpoint(tmp_path / "last.pt")["step"] == 2
    _, seen = train(tmp_path, resume=True)
    assert seen == [(0, 2), (1, 0)]


def test_stages_each_have_an_optimizer(tmp_path):
    """A stage takes over the optimizer's state only if last.pt was saved within it."""
    cfg = config_of(tmp_path)
    model = Linear(cfg)

    def step(run, optimizer):
        optimizer.zero_grad()
        model.layer(torch.ones(2)).sum().backward()
        optimizer.step()
        run.record({"total": torch.tensor(1.0)})

    with Run(cfg, model, [Words()]) as run:
        optimizer = torch.optim.Adam(model.parameters())
        run.start(optimizer, last=2, stage="pretrain")
        while not run.finished():
            step(run, optimizer)
        run.log_losses()
        run.save("last.pt")
    assert log_of(tmp_path, "train")[0]["stage"] == "pretrain"
    for first, taken_over in ((2, 0), (1, 2)):
        with Run(cfg, model, [Words()], resume=True) as run:
            optimizer = torch.optim.Adam(model.parameters())
            run.start(optimizer, last=4, first=first, stage="finetune")
            assert len(optimizer.state) == taken_over


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path):
    run, _ = train(tmp_path)
    run.model.layer.weight.data[0, 0] = math.inf
    with pytest.raises(FloatingPointError, match=r"after step 4; last.pt is untouched"):
        run.save("last.pt")
    saved = common.load_checkpoint(tmp_path / "last.pt")
    assert saved["model"]["layer.weight"].isfinite().all()


def test_a_loss_that_is_not_finite_is_named_with_its_step(tmp_path):
    def losses_of(*values):
        return [{"caption": torch.tensor(x), "cbr": torch.tensor(0.5)} for x in values]

    run, _ = train(tmp_path)
    run.step = 2
    run.losses = losses_of(1.0, 3.0)
    assert run.mean_losses() == {"caption": 2.0, "cbr": 0.5}
    assert run.mean_losses() == {}
    run.step = 5
    run.losses = losses_of(1.0, math.nan, 2.0)
    with pytest.raises(FloatingPointError, match=r"step 4: caption nan, cbr 0.5"):
        run.log_losses()


def test_losses_stay_on_the_device_between_lines(tmp_path, monkeypatch):
    read = []
    item = torch.Tensor.item

    def counted(tensor):
        read.append(tensor)
        return item(tensor)

    cfg = config_of(tmp_path)
    model = Linear(cfg)
    with Run(cfg, model, [Words()]) as run:
        run.start(torch.optim.Adam(model.parameters()), cfg.steps)
        monkeypatch.setattr(torch.Tensor, "item", counted)
        run.record({"total": torch.tensor(1.0)})
        run.record({"total": torch.tensor(2.0)})
        assert not read
        run.log_losses()
        assert len(read) == 2


def test_patience_ends_a_run_and_its_resumption(tmp_path, capsys):
    run, seen = train(tmp_path, steps=20, patience=2, scores=[2.0, 1.0, 1.5, 9.0])
    assert len(seen) == 6
    assert run.evals_since_best == 2
    said = "no better validation in 2: training ends at step 6"
    assert capsys.readouterr().out.count(said) == 1
    _, seen = train(tmp_path, resume=True, steps=20, patience=2)
    assert seen == []
    assert capsys.readouterr().out.count(said) == 1


def test_without_validation_pairs_the_last_weights_are_the_best(tmp_path):
    run, _ = train(tmp_path, validate=dict)  # no scores
    best = common.load_checkpoint(tmp_path / "best.pt")
    assert best["step"] == 4
    assert torch.equal(best["model"]["layer.weight"], run.model.layer.weight)
    assert log_of(tmp_path, "eval") == []


@pytest.mark.parametrize("log", [None, "", "[1, 2]\n3\nx\n"])
def test_a_missing_or_broken_log_blocks_no_run(tmp_path, log):
    train(tmp_path)
    path = tmp_path / "log.jsonl"
    if log is None:
        path.unlink()
    else:
        path.write_text(log)
    train(tmp_path, resume=True, steps=6)
    assert [row["step"] for row in log_of(tmp_path, "train")] == [5, 6]


def test_a_new_run_removes_only_what_runs_write(tmp_path):
    kept = {"notes.json", "mine.pt", "mine.partial", "scores_mine.json"}
    replaced = {"last.pt", "last.pt.partial", "captions_test.json", "scores_test-last.json"}
    for name in kept | replaced:
        (tmp_path / name).write_text("old")
    cfg = config_of(tmp_path)
    cfg.overwrite = True
    config = json.dumps(dataclasses.asdict(cfg))
    (tmp_path / "config.json").write_text(config)  # so that it is a run's folder
    with Run(cfg, Linear(cfg), [Words()]):
        found = {path.name for path in tmp_path.iterdir()}
    assert found == {"config.json", "log.jsonl"} | kept


def test_a_run_from_python_replaces_no_other_unasked(tmp_path):
    """The command line looks before; train() may be called without it."""
    train(tmp_path)
    with pytest.raises(ValueError, match="holds a run already"):
        train(tmp_path)
    with pytest.raises(ValueError, match="no folder for the run; give out_dir"):
        train("")


def test_a_flag_that_makes_weights_not_fit_is_named(tmp_path):
    train(tmp_path)
    message = r"last.pt cannot be used .*; --dim 6: the run has 8$"
    with pytest.raises(ValueError, match=message):
        train(tmp_path, resume=True, dim=6, steps=9)
    with pytest.raises(ValueError, match="is missing"):
        common.load_model(Linear, config_of(tmp_path), tmp_path / "last.pt")


def test_a_terminal_gets_a_bar_and_a_file_lines(tmp_path, capsys, monkeypatch):
    train(tmp_path / "file")
    out, err = capsys.readouterr()
    assert "eval_every: 2" in out and "batch_size" not in out  # what is not the default
    assert re.search(r"train 3/4: total \S+; 0 minutes left", out)
    assert "step/s" not in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    train(tmp_path / "terminal")
    out, err = capsys.readouterr()
    assert "minutes left" not in out
    assert "step/s" in err
    assert "step 2: validation CIDEr 1.00" in out


def test_progress_prints_lines_off_a_terminal(capsys, monkeypatch):
    assert list(common.progress(range(3), desc="drawing", unit="scene")) == [0, 1, 2]
    out, err = capsys.readouterr()
    assert [line[:13] for line in out.splitlines()] == ["drawing:   0%", "drawing: 100%"]
    assert not err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with common.progress(total=3, desc="drawing") as bar:
        bar.update(3)
    out, err = capsys.readouterr()
    assert not out
    assert "drawing: 100%" in err


# ---- curves --------------------------------------------------------------------------------------


@pytest.fixture
def drawn(drawings, monkeypatch):
    """Figures that draw_curves has saved."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig

    def kept(figure, *args, **options):
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    return figures


def test_curves_show_losses_and_the_best_validation(tmp_path, drawn):
    rows = [{"event": "start", "step": 0}]
    for step, loss in ((10, 3.0), (20, 2.0), (40, 0.5)):
        rows.append({"event": "train", "step": step, "seconds": 1.0, "lr": 0.1, "total": loss})
    for step, score in ((20, 30.0), (40, 90.0), (60, 80.0)):
        rows.append({"event": "eval", "step": step, "select_by": "CIDEr", "CIDEr": score})
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps(row) for row in rows))
    common.draw_curves(log, tmp_path / "curves.png", "CIDEr")
    losses, validation = drawn[0].axes

    (line,) = losses.get_lines()
    assert line.get_label() == "total"
    assert line.get_xydata().tolist() == [[10, 3.0], [20, 2.0], [40, 0.5]]
    assert losses.get_yscale() == "log"
    numbers = [label.get_text() for label in losses.get_yticklabels()]
    assert {"0.5", "1", "2", "3"} <= set(numbers)
    assert (losses.get_xlabel(), losses.get_ylabel()) == ("training step", "training loss")

    line, best = validation.get_lines()
    assert line.get_xydata().tolist() == [[20, 30.0], [40, 90.0], [60, 80.0]]
    assert best.get_xydata().tolist() == [[40, 90.0]]
    assert validation.get_title() == "best: 90.00 at step 40"
    assert validation.get_ylabel() == "validation CIDEr"

    from PIL import Image

    picture = Image.open(tmp_path / "curves.png").convert("RGB")
    assert picture.size == (1000, 400)
    x, y = validation.transData.transform((40, 90.0))  # from the lower left corner
    assert picture.getpixel((int(x), int(400 - y))) == (214, 39, 40)  # tab:red
    assert not list(tmp_path.glob("*.partial"))


def test_curves_without_validation_or_lines(tmp_path, drawn):
    log = tmp_path / "log.jsonl"
    log.write_text('{"event": "start", "step": 0}')
    common.draw_curves(log, tmp_path / "curves.png", "CIDEr")
    assert not (tmp_path / "curves.png").exists()
    log.write_text('{"event": "train", "step": 1, "caption": 1.0, "total": 0.0}')
    common.draw_curves(log, tmp_path / "curves.png", "CIDEr")
    assert drawn[0].axes[1].get_title() == "no validation yet"


def test_a_run_draws_its_curves(tmp_path, drawings):
    train(tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_without_matplotlib_there_is_a_line_and_no_picture(tmp_path, drawings, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it fails
    common.figure_class.cache_clear()
    train(tmp_path)
    common.figure_class.cache_clear()
    assert capsys.readouterr().out.count("pip install matplotlib") == 1
    assert not (tmp_path / "curves.png").exists()
    assert common.load_checkpoint(tmp_path / "last.pt")["step"] == 4


# ---- files ---------------------------------------------------------------------------------------


def test_a_file_is_whole_when_writing_dies(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "last.pt"
    common.save_tensors(path, {"step": 1})  # makes the folder

    def dies(state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        common.save_tensors(path, {"step": 2})
    assert torch.load(path) == {"step": 1}
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


def test_what_a_killed_process_left_is_overwritten(tmp_path):
    (tmp_path / "a.txt.partial").write_text("half a long text")
    common.write_text(tmp_path / "a.txt", "é")
    assert (tmp_path / "a.txt").read_bytes() == "é".encode()
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_full_disk_is_an_oserror_and_keeps_the_old_file(tmp_path, share):
    """Where torch's writer stops, it raises a RuntimeError or an OSError."""
    path = tmp_path / "last.pt"
    state = {"model": torch.rand(300, 300), "more": torch.rand(1000)}
    common.save_tensors(path, state)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(len(before) * share), hard))
    try:
        with pytest.raises(OSError, match=r"last.pt could not be written .*File too large"):
            common.save_tensors(path, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_an_error_of_torch_that_is_no_full_disk_stays_what_it_is(tmp_path, monkeypatch):
    def fails(state, file):
        raise RuntimeError("a programming error")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(RuntimeError, match="a programming error"):
        common.save_tensors(tmp_path / "last.pt", {})


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("content", [b"", b"text", [7], Payload(), {"config": Payload()}])
def test_files_that_are_no_checkpoints(content, tmp_path):
    path = tmp_path / "last.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=r"last.pt cannot be used .*; train first"):
        common.load_checkpoint(path)
    assert not Path("executed").exists()


def test_a_checkpoint_names_what_it_lacks(tmp_path):
    path = tmp_path / "last.pt"
    torch.save({"model": {}}, path)
    with pytest.raises(ValueError, match=r"last.pt is not a checkpoint \(config is missing\)"):
        parse("--eval", path)


def test_errors_of_a_file_name_it_and_the_remedy():
    def message_of(error):
        with pytest.raises(ValueError) as e, common.file_errors("a.json", "fetch it again"):
            raise error
        return str(e.value)

    assert message_of(KeyError("train")) == (
        "a.json cannot be used (train is missing); fetch it again"
    )
    assert message_of(ValueError("two\nlines")) == (
        "a.json cannot be used (two lines); fetch it again"
    )
    assert "(TypeError not a list)" in message_of(TypeError("not a list"))


# ---- main ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, code",
    [
        (ValueError("a\nb"), 2),
        (OSError("x"), 2),
        (FloatingPointError("x"), 2),
        (MemoryError(), 2),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 2),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes(error, code, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as e:
        common.run_main(main)
    assert e.value.code == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if code == 130 else 1)


def test_sigterm_outside_training_exits_143():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as e:
        common.run_main(lambda: signal.raise_signal(signal.SIGTERM))
    signal.signal(signal.SIGTERM, before)
    assert e.value.code == 143


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes differ"), RuntimeError("an illegal memory access"), KeyError("x")],
)
def test_programming_errors_keep_their_traceback(error):
    def main():
        raise error

    with pytest.raises(type(error)):
        common.run_main(main)


# ---- a data set of one's own ---------------------------------------------------------------------


class OwnVocab(list):
    """Words by id."""

    def decode(self, ids):
        return [" ".join(self[i] for i in row if i > common.END) for row in ids.tolist()]


@dataclass
class OwnBatch:
    """As common.PairBatch."""

    before: torch.Tensor
    after: torch.Tensor
    caption: torch.Tensor
    pair_ids: list[str]

    def to(self, device):
        return self


class OwnData:
    """What common.TrainingData asks for, and nothing else: which image is brighter?"""

    vocab = OwnVocab(["", "", "", "", "brighter", "darker"])
    grid = (5, 2, 3)
    max_len = 3

    def steps(self, batch_size):
        return 10

    def train_batches(self, batch_size, seed, epoch, first=0):
        for number in range(first, 10):
            yield (self.batch(1000 * epoch + number),)

    def eval_batches(self, split, batch_size):
        yield self.batch(10**6)

    def batch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        before = torch.rand(8, *self.grid, generator=generator)
        brighter = torch.rand(8, generator=generator) < 0.5
        after = before + torch.where(brighter, 1, -1)[:, None, None, None]
        caption = torch.tensor([[common.START, 4 if x else 5, common.END] for x in brighter])
        pair_ids = [f"{i} {self.vocab[row[1]]}" for i, row in enumerate(caption.tolist())]
        return OwnBatch(before, after, caption, pair_ids)

    def results(self, split, captions, maps, out_dir, notes=None, suffix=""):
        right = [caption == pair_id.split()[1] for pair_id, caption in captions.items()]
        return {"CIDEr": 100 * sum(right) / len(right)}

    def state(self):
        return {"vocab": list(self.vocab), "grid": self.grid, "max_len": self.max_len}

    def check_state(self, state):
        assert state["vocab"] == self.vocab


def test_a_method_trains_on_any_object_with_these_methods(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "data", None)  # importing it fails
    small = {"dim": 16, "word_dim": 8, "heads": 2, "layers": 1, "decoder_layers": 1, "dropout": 0.0}
    run = {"steps": 60, "eval_every": 30, "batch_size": 8, "lr": 3e-3, "seed": 1}
    cfg = scorer_cbr.Config(**small, **run, out_dir=str(tmp_path / "run"), device="cpu")
    dataset = OwnData()
    model = scorer_cbr.train(cfg, dataset)
    scores = scorer_cbr.evaluate(model, dataset, "test", cfg, tmp_path / "run")
    assert scores == {"CIDEr": 100.0}
    cfg.steps = 70
    scorer_cbr.train(cfg, dataset, resume=True)
    assert common.load_checkpoint(tmp_path / "run" / "last.pt")["step"] == 70


@pytest.mark.parametrize("what", ["match", "step", "decode"])
def test_the_benchmarks_run(what):
    import bench  # which registers with PyTorch what its counter of operations lacks

    flags = {"method": "scorer_cbr", "batch": 2, "dim": 16, "grid": (4, 2, 3), "length": 5}
    result = bench.measure(SimpleNamespace(what=what, plain=False, device="cpu", **flags))
    assert result["seconds"] > 0
    assert result["operations"] > 0
