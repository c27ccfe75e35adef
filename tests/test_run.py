"""A method's command line, and the folder of its run."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn as nn

import idc_pretrain
import scorer_cbr
from common import InputError, RunConfig, learning_rate
from support.files import kept, load_tensors, read_log
from support.run import Run, code_version, load_model, make_parser, parse_args, usable_device

# ---- command line --------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """A method's config."""

    MAY_CHANGE = RunConfig.MAY_CHANGE | {"clip"}

    clip: str = ""  # a path
    width: int = 4  # width in cells
    rate: float = 0.5  # a number
    dim: int = 8  # width D


PRESETS = {"mini": {"lr": 0.5, "width": 7}}
RELEASED = {"all": {"width": 1}, "other": {"lr": 3.0}}


def make_run_folder(folder, **config):
    """A folder as a run leaves it, with last.pt and best.pt of this config."""
    folder.mkdir()
    for name in ("last.pt", "best.pt"):
        state = {"config": dataclasses.asdict(Config(**config)), "step": 4, "code": "1234567"}
        torch.save(state, folder / name)
    return folder


def parse(*argv):
    """(cfg, args) of a method's command line on a CPU."""
    argv = [*map(str, argv), "--device", "cpu"]
    return parse_args(Config, PRESETS, RELEASED, argv)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Default folders are relative."""
    monkeypatch.chdir(tmp_path)


def test_flags_over_preset_over_defaults():
    cfg, _ = parse("--steps", "3", "--no-amp")
    assert (cfg.lr, cfg.width, cfg.steps, cfg.amp, cfg.seed) == (0.5, 7, 3, False, 1111)
    assert (cfg.data_dir, cfg.out_dir) == ("data/mini", "runs/test_run-mini")
    unknown, _ = parse("--dataset", "else")  # runs on the defaults
    assert (unknown.lr, unknown.width, unknown.data_dir) == (Config.lr, 4, "data/else")


def test_a_variant_sets_the_released_details(tmp_path, capsys):
    released, _ = parse("--variant", "released")
    assert (released.width, released.lr) == (1, 0.5)
    assert "no code was released for mini" in capsys.readouterr().out
    other, _ = parse("--dataset", "other", "--variant", "released")
    assert (other.width, other.lr) == (1, 3.0)
    assert "no code" not in capsys.readouterr().out
    paper = make_run_folder(tmp_path / "paper", width=4)
    with pytest.raises(InputError, match="--width 1"):
        parse("--resume", "--out_dir", paper, "--variant", "released")


@pytest.mark.parametrize(
    "field, value, works",
    [
        ("schedule", "linear", False),
        ("batch_size", 0, False),
        ("log_every", 0, False),
        ("steps", -5, False),
        ("seed", -1, False),
        ("seed", 0, True),
        ("patience", 0, True),
        ("width", -1, False),
        ("rate", math.nan, False),
        ("grad_clip", -1.0, True),
    ],
)
def test_values_that_cannot_work_are_refused(field, value, works, tmp_path):
    if works:
        parse(f"--{field}", value)
    else:
        with pytest.raises(InputError, match=f"--{field} {value}"):
            Config(**{field: value})
    assert not list(tmp_path.iterdir())


def test_what_a_parser_is_made_of(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "__doc__", None)  # as with python -OO
    assert "width in cells" in make_parser(Config, PRESETS, False).format_help()


@pytest.mark.parametrize("name", ["", "cuda"])
def test_a_gpu_that_cannot_compute_is_refused(name, monkeypatch):
    """Such a GPU still gives memory, as torch.empty asks for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", Mock())
    monkeypatch.setattr(torch, "ones", Mock(side_effect=RuntimeError("no kernel\nmore lines")))
    with pytest.raises(InputError, match=r"--device cuda .*no kernel.*; try --device cpu"):
        usable_device(name)


def test_a_checkpoint_brings_its_config(tmp_path):
    folder = make_run_folder(tmp_path / "run", width=1, clip="old")
    cfg, _ = parse("--eval", folder / "best.pt", "--eval_batch", "2", "--clip", "new")
    assert (cfg.eval_batch, cfg.clip, cfg.width) == (2, "new", 1)
    parse("--eval", folder / "last.pt", "--width", "1")  # its own value may be given
    resumed, _ = parse("--resume", "--out_dir", folder, "--steps", "7")
    assert (resumed.width, resumed.steps) == (1, 7)
    with pytest.raises(InputError, match="--width"):  # weights of another shape
        parse("--eval", folder / "best.pt", "--width", "4")
    with pytest.raises(InputError, match="--lr"):  # a run that would belong to no single command
        parse("--resume", "--out_dir", folder, "--lr", "2")
    cosine = make_run_folder(tmp_path / "cosine", schedule="cosine")
    with pytest.raises(InputError, match="--steps.*cosine.*--out_dir"):
        parse("--resume", "--out_dir", cosine, "--steps", "7")


def test_a_checkpoint_finds_its_files_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = {"data_dir": "D", "extractor": "timm/vit:w.pt"}
    train(Path("run"), **paths)
    config = saved(Path("run"), "best.pt")["config"]
    assert (config["data_dir"], config["out_dir"]) == (f"{tmp_path}/D", f"{tmp_path}/run")
    assert config["extractor"] == f"timm/vit:{tmp_path}/w.pt"


def test_a_checkpoint_is_evaluated_on_other_data(tmp_path):
    """Each checkpoint and data set has a folder of its own, which is never the run's."""
    folder = make_run_folder(tmp_path / "run", data_dir="data/mini", width=1)
    cfg, _ = parse("--eval", folder / "best.pt")
    assert cfg.out_dir == str(folder / "best-mini")
    cfg, _ = parse("--eval", folder / "last.pt", "--dataset", "other")
    assert (cfg.dataset, cfg.data_dir, cfg.width) == ("other", "data/other", 1)
    assert cfg.out_dir == str(folder / "last-other")
    cfg, _ = parse("--eval", folder / "best.pt", "--data_dir", tmp_path / "mine")
    assert (cfg.dataset, cfg.out_dir) == ("mini", str(folder / "best-mine"))
    cfg, _ = parse("--eval", folder / "best.pt", "--data_dir", ".", "--out_dir", "elsewhere")
    assert cfg.out_dir == f"elsewhere/best-{tmp_path.name}"
    # Its scores are never replaced by those of another folder of this name.
    scores = folder / "best-mine" / "scores_test.json"
    scores.parent.mkdir()
    scores.write_text(json.dumps({"data": str(tmp_path / "mine")}))
    parse("--eval", folder / "best.pt", "--data_dir", "mine")
    with pytest.raises(InputError, match="best-mine.*--out_dir"):
        parse("--eval", folder / "best.pt", "--data_dir", tmp_path / "other" / "mine")
    parse("--eval", folder / "best.pt", "--data_dir", "other/mine", "--out_dir", "elsewhere")
    with pytest.raises(InputError, match="--dataset"):
        parse("--resume", "--out_dir", folder, "--dataset", "other")


def test_a_used_folder_is_refused(tmp_path):
    folder = make_run_folder(tmp_path / "run")
    cfg = config_of(folder)
    with pytest.raises(InputError, match="run is not empty"):
        parse("--out_dir", folder)
    with pytest.raises(InputError, match="run is not empty"):
        Run(cfg, Linear(cfg), [Words()])


def test_a_run_is_not_begun_anew_but_resumed_before_its_first_step(tmp_path):
    """A second training would take its folder, while it compiles its first step."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", stop=1)
    with pytest.raises(InputError, match="run is not empty"):
        train(tmp_path / "run")
    train(tmp_path / "run", resume=True)
    assert [row["step"] for row in log_of(tmp_path / "run", "train")] == [1, 2, 3, 4]


# ---- running -------------------------------------------------------------------------------------


class Words:
    """As much of a data set as a run's checkpoints need."""

    def __init__(self, words=("a", "b")):
        self.words = list(words)

    def state(self):
        return {"vocab": self.words, "grid": (2,), "max_len": 3}

    def check_state(self, state):
        if state["vocab"] != self.words:
            raise InputError("other words")


class Average:
    """An average of the weights, as a state of one's own in a run's checkpoints."""

    value = torch.zeros(8, 2)

    def update(self, model):
        self.value = 0.5 * self.value + 0.5 * model.layer.weight.detach()

    def state(self):
        return {"average": self.value}

    def check_state(self, state):
        self.value = state["average"]


class Linear(nn.Module):
    """A model of one layer."""

    def __init__(self, cfg, *sizes):
        super().__init__()
        self.layer = nn.Linear(2, cfg.dim)


def config_of(folder, **fields):
    few = {"out_dir": str(folder), "device": "cpu", "eval_every": 2, "log_every": 1, "steps": 4}
    return Config(**few | fields)


def train(folder, resume=False, scores=(1.0, 2.0), words=("a", "b"), stop=-1, **fields):
    """Trains as the method files do -> the run, and the steps that it took.

    `scores` are the CIDEr of its validations, whose ROUGE-L is its negative. KeyboardInterrupt in
    the step `stop`, when its weights are new."""
    cfg = config_of(folder, **fields)
    coming = iter(scores)
    seen = []
    torch.manual_seed(0)
    model = Linear(cfg)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    average = Average()
    run = Run(cfg, model, [Words(words), average], resume)
    run.start(optimizer)
    for step in range(run.step, cfg.steps):
        if run.is_over():
            break
        optimizer.param_groups[0]["lr"] = learning_rate(cfg, run.step)
        loss = model.layer(torch.ones(2) + torch.rand(2)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        seen.append(step)
        if step == stop:
            raise KeyboardInterrupt
        run.step += 1
        run.log({"total": loss})
        if run.step % cfg.eval_every == 0 or run.step == cfg.steps:
            score = next(coming)
            run.checkpoint({"CIDEr": score, "ROUGE-L": -score} if score else {})
    return run, seen


def log_of(folder, event):
    """A log's lines for one event, without times."""
    rows = []
    for row in read_log(folder / "log.jsonl"):
        if row["event"] == event:
            row.pop("seconds", None)
            rows.append(row)
    return rows


def saved(folder, name):
    return load_tensors(folder / name)


@pytest.mark.parametrize("stop", range(4))
@pytest.mark.parametrize("minutes_pass", [False, True])
def test_a_stopped_run_continues_as_if_it_had_never_stopped(
    tmp_path, stop, minutes_pass, monkeypatch
):
    """From its last validation or, before the first one, from its first step. If five minutes pass
    with every step, from the last step."""
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    scores = [2.0, 1.0]
    train(whole, scores=scores, log_every=3)
    if minutes_pass:
        monkeypatch.setattr("support.run.SAVE_EVERY", -1)
    goes_on_from = stop if minutes_pass else stop // 2 * 2
    with pytest.raises(KeyboardInterrupt):
        train(parts, scores=scores, log_every=3, stop=stop)
    assert saved(parts, "last.pt")["step"] == goes_on_from
    assert kept == [f"--resume goes on from step {goes_on_from}"]

    with open(parts / "log.jsonl", "a") as f:
        f.write('{"step": 4, "event": ""}\n{"step": 4, "ev')  # killed while writing
    with pytest.raises(InputError, match="other words"):
        train(parts, resume=True, words="a")
    _, seen = train(parts, resume=True, scores=scores[goes_on_from // 2 :], log_every=3)
    assert seen == list(range(goes_on_from, 4))
    a = saved(whole, "last.pt")
    b = saved(parts, "last.pt")
    assert torch.equal(a["model"]["layer.weight"], b["model"]["layer.weight"])
    assert torch.equal(a["random"]["cpu"], b["random"]["cpu"])
    assert torch.equal(a["average"], b["average"])
    for name in ("step", "best", "evals_since_best"):
        assert a[name] == b[name]
    assert (b["step"], b["best"]) == (4, 2.0)
    assert log_of(whole, "train") == log_of(parts, "train")
    assert log_of(whole, "eval") == log_of(parts, "eval")
    assert [row["CIDEr"] for row in log_of(parts, "eval")] == [2.0, 1.0]


def test_a_run_that_stops_in_a_validation_does_not_leave_it_out(tmp_path, monkeypatch):
    monkeypatch.setattr("support.run.SAVE_EVERY", -1)
    with pytest.raises(StopIteration):
        train(tmp_path, scores=[])
    assert saved(tmp_path, "last.pt")["step"] == 1
    train(tmp_path, resume=True, scores=[2.0, 1.0])
    assert [row["CIDEr"] for row in log_of(tmp_path, "eval")] == [2.0, 1.0]


@pytest.mark.parametrize("steps", [4, 6])
def test_a_run_goes_on_from_last_alone(steps, tmp_path, capsys):
    """The others were not brought along. If no validation comes, the last weights are the best."""
    train(tmp_path, scores=[9.0, 8.0])
    (tmp_path / "best.pt").unlink()
    (tmp_path / "log.jsonl").unlink()
    run, seen = train(tmp_path, resume=True, steps=steps, scores=[1.0])
    assert seen == list(range(4, steps))
    assert "no best.pt" in capsys.readouterr().out
    run.best_model()
    assert saved(tmp_path, "best.pt")["step"] == steps
    assert [row["CIDEr"] for row in log_of(tmp_path, "eval")] == [1.0] * len(seen[::2])


@pytest.mark.parametrize("method, stop", [(scorer_cbr, 3), (idc_pretrain, 3), (idc_pretrain, 5)])
def test_a_method_continues_between_two_validations(
    method, stop, prepared, tiny, tmp_path, monkeypatch
):
    """IDC in both of its stages, of three and four steps, bit for bit."""
    flags = [*tiny, "--data_dir", prepared, "--extractor", "resnet101-layer3"]
    flags += "--split none --log_every 3 --dropout 0.1".split()
    if method is idc_pretrain:
        flags += "--steps 4 --pretrain_steps 3 --mlm 1 --mvcl 1 --fda 1 --layers 1".split()
    losses = method.compute_losses
    steps = []

    def compute_losses(*args):
        steps.append(len(steps) + 1)
        if steps[-1] == stop:
            raise KeyboardInterrupt
        return losses(*args)

    def run(*more):
        method.main([str(flag) for flag in (*flags, "--out_dir", *more)])

    run(tmp_path / "whole")
    monkeypatch.setattr("support.run.SAVE_EVERY", -1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(method, "compute_losses", compute_losses)
        run(tmp_path / "parts")
    assert saved(tmp_path / "parts", "last.pt")["step"] == stop - 1
    run(tmp_path / "parts", "--resume")
    whole = saved(tmp_path / "whole", "last.pt")
    parts = saved(tmp_path / "parts", "last.pt")
    torch.testing.assert_close(parts["model"], whole["model"], rtol=0, atol=0)
    torch.testing.assert_close(parts["optimizer"], whole["optimizer"], rtol=0, atol=0)
    assert log_of(tmp_path / "parts", "train") == log_of(tmp_path / "whole", "train")
    assert log_of(tmp_path / "parts", "eval") == log_of(tmp_path / "whole", "eval")


def test_the_best_validation_is_kept(tmp_path, capsys):
    run, _ = train(tmp_path, scores=[2.0, 1.0])
    best = saved(tmp_path, "best.pt")
    last = saved(tmp_path, "last.pt")
    assert (best["step"], best["best"]) == (2, 2.0)
    assert "optimizer" not in best  # Adam's state has twice the size of the weights
    assert (last["step"], last["best"], last["evals_since_best"]) == (4, 2.0, 1)
    loaded, _ = load_model(Linear, run.cfg, tmp_path / "best.pt")
    again, _ = run.best_model()
    for model in (again, loaded):
        assert torch.equal(model.layer.weight, best["model"]["layer.weight"])
        assert not model.training  # no dropout
    assert re.search(r"best\.pt.*step 2", capsys.readouterr().out)


def test_select_by_names_the_metric_that_chooses(tmp_path):
    train(tmp_path, select_by="ROUGE-L", scores=[1.0, 2.0])
    assert saved(tmp_path, "best.pt")["best"] == -1.0


def test_a_log_line_has_the_means_since_the_line_before(tmp_path):
    train(tmp_path / "each")
    train(tmp_path / "pairs", log_every=2)
    a, b, c, d = [row["total"] for row in log_of(tmp_path / "each", "train")]
    means = [row["total"] for row in log_of(tmp_path / "pairs", "train")]
    assert means == pytest.approx([(a + b) / 2, (c + d) / 2], abs=2e-6)


def test_without_validation_pairs_the_last_weights_are_the_best(tmp_path):
    _, seen = train(tmp_path, steps=10, patience=2, scores=[None] * 5)
    assert len(seen) == 10  # patience ends nothing
    assert saved(tmp_path, "best.pt")["step"] == 10
    assert log_of(tmp_path, "eval") == []


def test_patience_ends_a_run_and_its_resumption(tmp_path, capsys):
    _, seen = train(tmp_path, steps=20, patience=3, scores=[2.0, 1.0, 2.0, 1.5, 9.0])
    assert len(seen) == 8  # a tie is no new best
    assert saved(tmp_path, "best.pt")["step"] == 6  # of equal scores, the later one is the best
    capsys.readouterr()
    _, seen = train(tmp_path, resume=True, steps=20, patience=3)
    assert seen == []
    assert "patience" in capsys.readouterr().out.splitlines()[-1]


def test_what_is_not_finite_replaces_no_checkpoint(tmp_path):
    run, _ = train(tmp_path)
    run.losses = {"caption": [torch.tensor(1.0), torch.tensor(math.nan)]}
    with pytest.raises(FloatingPointError, match="caption nan"):
        run.log_losses()
    run.model.layer.weight.data[0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="weights"):
        run.save("last.pt")
    assert saved(tmp_path, "last.pt")["model"]["layer.weight"].isfinite().all()


def test_no_loss_is_called_like_a_field_of_the_log(tmp_path):
    run, _ = train(tmp_path)
    for name in ("step", "event", "lr"):
        with pytest.raises(TypeError, match=name):
            run.log({name: torch.tensor(1.0)})
        run.losses = {}


def test_a_commit_does_not_stand_for_files_that_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr("support.run.__file__", str(tmp_path / "common.py"))
    (tmp_path / "common.py").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]
    for command in ("init -q", "add .", "commit -qm first"):
        subprocess.run([*git, *command.split()], check=True)
    commit = code_version()
    assert re.fullmatch("[0-9a-f]+", commit)
    (tmp_path / "new_method.py").touch()
    assert code_version() == f"{commit}-dirty"
