"""Shared layers and losses against plain float64 versions; configuration; checkpoints."""

import dataclasses
import json
import math
import re
import signal
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, NamedTuple

import pytest
import torch
import torch.nn as nn

import common
from common import Attention, GridPosition, Run, RunConfig, decode, info_nce, learning_rate, sinusoid, token_match


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
    plain = sum(dense_match(a, b) for a, b in zip(q.chunk(heads, 2), k.chunk(heads, 2), strict=True)) / heads
    torch.testing.assert_close(ours, plain)
    for a, b in zip(*(torch.autograd.grad((m * weight).sum(), (q, k)) for m in (ours, plain)), strict=True):
        torch.testing.assert_close(a, b)


def test_token_match_of_one_head_ignores_how_channels_are_split():
    q, k, order = torch.randn(2, 3, 8), torch.randn(4, 5, 8), torch.arange(8).view(2, 4).T.flatten()  # mixes the heads
    torch.testing.assert_close(token_match(q, k), token_match(q[..., order], k[..., order]))
    assert not torch.allclose(token_match(q, k, 2), token_match(q[..., order], k[..., order], 2))


@pytest.mark.parametrize("q, k, heads", [
    ((2, 3, 6), (2, 3, 6), 4), ((0, 3, 6), (2, 3, 6), 1), ((2, 0, 6), (2, 3, 6), 1), ((2, 3, 6), (0, 3, 6), 1),
    ((1, 2**15 + 1, 1), (1, 1, 1), 1), ((2, 3, 6), (2, 3, 4), 1),
])  # fmt: skip
def test_token_match_says_what_it_cannot_match(q, k, heads):
    with pytest.raises(ValueError, match=r"token_match of .*expected"):
        token_match(torch.zeros(q), torch.zeros(k), heads)


def test_info_nce_against_loop():
    s = torch.randn(5, 5, dtype=torch.float64) * 3
    loop = -sum(math.log(math.exp(s[a, a]) / sum(math.exp(s[a, b]) for b in range(5))) for a in range(5)) / 5
    assert info_nce(s).item() == pytest.approx(loop)


def test_attention_against_loop():
    attention = Attention(6, heads=2, out_proj=False).double()
    x, memory = torch.randn(2, 3, 6, dtype=torch.float64), torch.randn(2, 4, 6, dtype=torch.float64)
    q, k, v = attention.project(x, memory)
    plain = torch.zeros(2, 3, 6, dtype=torch.float64)
    for b in range(2):
        for h in (slice(0, 3), slice(3, 6)):
            for i in range(3):
                score = torch.stack([q[b, i, h] @ k[b, j, h] for j in range(4)]) / math.sqrt(3)
                plain[b, i, h] = (score.softmax(0)[:, None] * v[b, :, h]).sum(0)
    torch.testing.assert_close(attention(x, memory), plain)
    weights = attention.scores(q, k).softmax(-1)  # (B, K, L, M)
    values = v.view(2, 4, 2, 3).transpose(1, 2)
    torch.testing.assert_close((weights @ values).transpose(1, 2).flatten(2), plain)


def test_causal_attention_sees_no_later_word():
    attention, x = Attention(8, heads=2), torch.randn(1, 5, 8)
    changed = x.clone()
    changed[:, 3:] += 1
    torch.testing.assert_close(attention(x, x, causal=True)[:, :3], attention(changed, changed, causal=True)[:, :3])


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
            assert table[p, c].item() == pytest.approx(math.cos(angle) if c % 2 else math.sin(angle), abs=1e-6)


def test_decode_stops_at_end_and_never_says_unk():
    script = torch.tensor([[4, 3, *[5] * 10], [5, 4, 3, *[4] * 9]])  # the likeliest word at each step; 3 ends

    def step(words, t):
        logits = nn.functional.one_hot(script[:, t], 6).float()
        logits[:, 1] = 9.0  # UNK looks best
        seen.append(words.tolist())
        return logits

    seen = []
    ids = decode(step, 2, 12, "cpu")
    assert ids.tolist() == [[2, 4, *[0] * 10], [2, 5, 4, *[0] * 9]]
    assert len(seen) == 8  # and not eleven
    assert decode(step, 2, 3, "cpu").tolist() == [[2, 4, 0], [2, 5, 4]]


def test_decode_samples_in_proportion():
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0, math.log(3.0), 0.0]).index_fill(0, torch.tensor([0, 1, 2, 3]), -30.0)
    ids = decode(lambda words, t: logits.repeat(len(words), 1), 4000, 2, "cpu", sample=True)
    assert (ids[:, 1] == 4).float().mean().item() == pytest.approx(0.75, abs=0.03)


@dataclass
class Config(RunConfig):
    """A method's config."""

    reading: Literal["paper", "released"] = "paper"  # disputed details
    width: int = 4  # width in cells


def checkpoint(**parts):
    """What a checkpoint holds."""
    return {"model": {}, "optimizer": {"state": {}}, "step": 0, "best": 0.0, "worse": 0, "config": {}, "max_len": 9,
            "vocab": ["a", "b"], "grid": (8, 2, 3), "random": {"cpu": torch.get_rng_state()}} | parts  # fmt: skip


def test_flags_over_preset_over_defaults(tmp_path, capsys):
    presets, released = {"mini": {"lr": 0.5, "width": 7}}, {"all": {"width": 1}, "other": {"lr": 3.0}}
    out = ["--out_dir", str(tmp_path / "new")]
    parse = lambda *argv: common.parse_args(Config, presets, "method", "What it is.", [*out, *argv], released)
    cfg, args = parse("--device", "cpu", "--steps", "3", "--no-amp")
    assert (cfg.lr, cfg.width, cfg.steps, cfg.amp, cfg.seed) == (0.5, 7, 3, False, 1111)
    assert cfg.data_dir == "data/mini" and not args.resume and args.split == "test"
    cfg = parse("--device", "cpu", "--reading", "released")[0]
    assert (cfg.reading, cfg.width, cfg.lr) == ("released", 1, 0.5)
    assert parse("--device", "cpu", "--dataset", "other", "--reading", "released")[0].lr == 3.0
    other = parse("--dataset", "else", "--device", "cpu")[0]  # runs on the defaults, and says so
    assert (other.lr, other.width, other.data_dir) == (Config.lr, 4, "data/else")
    assert "no preset for else" in capsys.readouterr().out
    for wrong, message in (("--stepz=3", "--stepz"), ("--steps=x", "invalid int"), ("--device=no", "cannot be")):
        with pytest.raises(ValueError, match=message):
            parse(wrong)
    for together in (["--resume", "--eval", "x.pt"], ["--checkpoint", "x.pt"], ["--out", "x.png"], ["--split", "val"]):
        with pytest.raises(ValueError, match="--"):
            parse(*together)
    with pytest.raises(SystemExit):
        parse("--device", "cpu", "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "width in cells (default: 4)" in text and "What it is." in text
    torch.save(checkpoint(config=vars(cfg)), tmp_path / "a.pt")
    (tmp_path / "config.json").write_text(json.dumps(vars(cfg)))  # a run's folder
    out = ["--data_dir", str(tmp_path)]
    again, _ = parse("--eval", str(tmp_path / "a.pt"), "--lr", "2", "--device", "cpu")
    assert (again.lr, again.width, again.out_dir) == (2.0, 1, str(tmp_path))  # the checkpoint's config under the flags
    with pytest.raises(ValueError, match="was trained with released"):
        parse("--eval", str(tmp_path / "a.pt"), "--reading", "paper")
    assert common.parse_args(Config, presets, "method", "doc", ["--device", "cpu"])[0].out_dir == "runs/method-mini"


def test_configs_of_other_versions(tmp_path):
    """A checkpoint without a field takes its default, one with an unknown field is refused by name; a field may lack a
    comment."""
    @dataclass
    class Newer(RunConfig):
        plain: int = 3

    parse = lambda config: common.parse_args(Newer, {}, "m", "Doc.", parse.argv)[0]
    parse.argv = ["--caption", "a", "b", "--checkpoint", str(tmp_path / "a.pt"), "--device", "cpu"]
    torch.save(checkpoint(config={"lr": 0.5}), tmp_path / "a.pt")
    assert (parse(Newer).plain, parse(Newer).lr) == (3, 0.5)
    torch.save(checkpoint(config={"lr": 0.5, "colour": "red"}), tmp_path / "a.pt")
    with pytest.raises(ValueError, match="another method or version: .*colour"):
        parse(Newer)


def test_learning_rate_traces():
    step = RunConfig(lr=2e-4, lr_drop=3975)
    assert [learning_rate(step, s) for s in (0, 3974, 3975, 7949, 7950)] == pytest.approx(
        [2e-4, 2e-4, 2e-5, 2e-5, 2e-6]
    )
    cosine = RunConfig(lr=1.0, schedule="cosine", warmup=10, steps=110)
    assert [learning_rate(cosine, s) for s in (0, 9, 10, 60)] == pytest.approx([0.1, 1.0, 1.0, 0.5])
    assert learning_rate(cosine, 109) < 1e-3


def test_a_file_is_whole_when_writing_dies(tmp_path, monkeypatch):
    common.save_tensors(tmp_path / "last.pt", {"step": 1})

    def dies(state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        common.save_tensors(tmp_path / "last.pt", {"step": 2})
    assert torch.load(tmp_path / "last.pt") == {"step": 1} and len(list(tmp_path.iterdir())) == 1


def test_a_new_run_takes_no_folder_that_holds_something_else(tmp_path):
    common.check_folder(tmp_path / "none", new=True, overwrite=False)
    (tmp_path / "important.pt").touch()
    for content in (None, "[]", '{"dataset": "of another program"}'):
        if content:
            (tmp_path / "config.json").write_text(content)
        for new in (True, False):  # --eval writes here, too
            with pytest.raises(ValueError, match=r"config.json cannot be used .*another --out_dir"):
                common.check_folder(tmp_path, new=new, overwrite=True)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(RunConfig())))
    with pytest.raises(ValueError, match="--overwrite"):
        common.check_folder(tmp_path, new=True, overwrite=False)
    common.check_folder(tmp_path, new=True, overwrite=True)
    common.check_folder(tmp_path, new=False, overwrite=False)


class Place(NamedTuple):
    """A batch that tells its place."""

    epoch: int
    number: int
    pair_ids: tuple = ()


class Words:
    """As much of a data set as a run needs: three batches an epoch."""

    def __init__(self, *words):
        self.words = list(words)

    def steps(self, batch_size):
        return 3

    def train_batches(self, batch_size, seed, epoch, start=0):
        return ((Place(epoch, i),) for i in range(start, 3))

    def state(self):
        return checkpoint(vocab=self.words)

    def check_state(self, state):
        if state["vocab"] != self.words:
            raise ValueError("other words")


def start(folder, resume=False, words=("a", "b"), **fields):
    """A run of one linear layer."""
    torch.manual_seed(0)
    cfg = RunConfig(out_dir=str(folder), device="cpu", **{"eval_every": 2, "log_every": 1, "steps": 4} | fields)
    model = nn.Linear(2, 3)
    return Run(cfg, resume, model, torch.optim.Adam(model.parameters()), Words(*words))


def train(run, scores=(1.0, 2.0), at_step=lambda step: None):
    """Steps of such a run to its end; what they saw."""
    seen, scores = [], iter(scores)
    with run:
        for batch in run.steps(Words()):
            loss = run.model(torch.ones(2) + torch.rand(2)).sum()
            run.optimizer.zero_grad()
            loss.backward()
            run.optimizer.step()
            seen.append(batch[0][:2])
            at_step(run.step + 1)
            run.end_step({"total": loss}, lambda: {"CIDEr": next(scores)})
    return seen


def lines_of(folder, event):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines if line.get("event") == event]


def test_a_run_that_is_stopped_goes_on_as_if_nothing_had_happened(tmp_path):
    assert train(start(tmp_path / "whole")) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    seen = []

    def interrupt(step):
        seen.append(step)
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit) as e:
        train(start(tmp_path / "parts"), at_step=interrupt)
    assert e.value.code == 130 and seen == [1, 2, 3]
    with open(tmp_path / "parts" / "log.jsonl", "a") as f:
        f.write('{"step": 4}\n{"no step": 1}\n{"step": 4, "ev')  # killed after a later step, in the middle of a line
    with pytest.raises(ValueError, match="other words"):
        train(start(tmp_path / "parts", resume=True, words="a"))
    assert train(start(tmp_path / "parts", resume=True), scores=[2.0]) == [(1, 0)]
    a, b = (common.load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "parts"))
    assert torch.equal(a["model"]["weight"], b["model"]["weight"]) and torch.equal(
        a["random"]["cpu"], b["random"]["cpu"]
    )
    assert (a["step"], a["best"], a["worse"]) == (b["step"], b["best"], b["worse"]) == (4, 2.0, 0)
    assert lines_of(tmp_path / "whole", "train") == lines_of(tmp_path / "parts", "train")
    assert [x["CIDEr"] for x in lines_of(tmp_path / "parts", "eval")] == [1.0, 2.0]


def test_the_best_validation_is_kept(tmp_path):
    run = start(tmp_path)
    train(run, scores=[2.0, 1.0])
    best, last = (common.load_checkpoint(tmp_path / name) for name in ("best.pt", "last.pt"))
    assert (best["step"], best["best"], last["step"], last["best"], last["worse"]) == (2, 2.0, 4, 2.0, 1)
    assert torch.equal(run.best_model().weight, best["model"]["weight"])


def test_an_interrupt_while_validating_ends_the_run_afterwards(tmp_path):
    run = start(tmp_path, steps=2)

    def validate():
        signal.raise_signal(signal.SIGTERM)
        return {"CIDEr": 1.0}

    with pytest.raises(SystemExit) as e, run:
        for _ in run.steps(Words()):
            run.end_step({"total": torch.tensor(1.0)}, validate)
    assert e.value.code == 143 and common.load_checkpoint(tmp_path / "last.pt")["step"] == 2


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path):
    run = start(tmp_path)
    train(run)
    run.model.weight.data[0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="after step 4; last.pt is untouched"):
        run.save("last.pt")
    assert common.load_checkpoint(tmp_path / "last.pt")["model"]["weight"].isfinite().all()


def test_a_second_signal_stops_at_once(tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job begins with it ignored
    with start(tmp_path) as run:
        signal.raise_signal(signal.SIGTERM)
        assert run.stop == 143
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_patience_ends_a_run_and_its_resumption(tmp_path, capsys):
    run = start(tmp_path, steps=20, patience=2)
    assert len(train(run, scores=[2.0, 1.0, 1.5, 9.0])) == 6 and run.worse == 2
    assert "no better validation" in capsys.readouterr().out
    assert train(start(tmp_path, resume=True)) == []


def test_without_validation_pairs_the_last_weights_are_the_best(tmp_path):
    run = start(tmp_path)
    with run:
        for _ in run.steps(Words()):
            run.model.weight.data += 1
            run.end_step({"total": torch.tensor(1.0)}, dict)  # no scores
    assert torch.equal(common.load_checkpoint(tmp_path / "best.pt")["model"]["weight"], run.model.weight.data)


@pytest.mark.parametrize("log", [None, "", "[1, 2]\n3\nx\n"])
def test_a_missing_or_broken_log_blocks_no_run(tmp_path, log):
    train(start(tmp_path))
    (tmp_path / "log.jsonl").unlink() if log is None else (tmp_path / "log.jsonl").write_text(log)
    train(start(tmp_path, resume=True, steps=6))
    assert [row["step"] for row in common.read_log(tmp_path / "log.jsonl") if row["event"] == "train"] == [5, 6]


def test_off_a_terminal_each_line_of_the_log_is_printed(tmp_path, capsys):
    train(start(tmp_path))
    out = capsys.readouterr().out
    assert "eval_every: 2" in out and "batch_size" not in out  # the config, as far as it is not the default
    assert re.search(r"train 3/4: total \S+; 0 minutes left", out)


def test_a_new_run_removes_only_what_runs_write(tmp_path):
    kept = {"notes.json", "mine.pt", "mine.partial"}
    for name in ("last.pt", "last.pt.ab12.partial", "best.pt", "captions_test.json", *kept):
        (tmp_path / name).write_text("old")
    with start(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {"config.json", "log.jsonl"} | kept


def test_a_loss_that_is_not_finite_is_named_with_its_step(tmp_path):
    run = start(tmp_path)
    run.step, run.losses = 2, [{"caption": torch.tensor(x), "cbr": torch.tensor(0.0)} for x in (1.0, 3.0)]
    assert run.mean_losses() == {"caption": 2.0, "cbr": 0.0} and run.mean_losses() == {}
    run.step, run.losses = 5, [{"caption": torch.tensor(x), "cbr": torch.tensor(0.5)} for x in (1.0, math.nan, 2.0)]
    with pytest.raises(FloatingPointError, match=r"step 4: caption nan, cbr 0.5"):
        run.mean_losses()


@pytest.mark.parametrize(
    "error, code", [(ValueError("a\nb"), 2), (OSError("x"), 2), (MemoryError(), 2), (KeyboardInterrupt(), 130)]
)
def test_errors_become_exit_codes(error, code, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as e:
        common.run_main(main)
    assert e.value.code == code
    assert code == 130 or capsys.readouterr().err.count("\n") == 1


def test_curves_fall_where_a_loss_falls(tmp_path):
    events = [{"event": "start", "step": 0}, {"event": "eval", "step": 4, "CIDEr": 90.0}]
    for step, loss in ((1, 3.0), (2, 2.0), (4, 1.0)):
        events.append({"event": "train", "step": step, "lr": 0.1, "total": loss})
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(event) for event in events))
    page = common.curves(tmp_path / "log.jsonl").convert("L")
    panel = page.crop((11, 21, 218, 125))  # within the first panel's frame
    dark = [[y for y in range(panel.height) if panel.getpixel((x, y)) < 100] for x in range(panel.width)]
    heights = [min(column) for column in dark if column]
    assert page.height == 300 and len(heights) > 100 and heights == sorted(heights)  # scores are in a row of their own
    assert heights[0] < 10 and heights[-1] > 90


@pytest.mark.parametrize("what", ["match", "step", "decode"])
def test_the_benchmarks_run(what):
    import bench  # which registers with PyTorch what its counter of operations lacks

    flags = {"method": "scorer_cbr", "batch": 2, "dim": 16, "grid": (4, 2, 3), "length": 5, "device": "cpu"}
    result = bench.measure(SimpleNamespace(what=what, plain=False, **flags))
    assert result["seconds"] > 0 and result["operations"] > 0
