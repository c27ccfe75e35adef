"""Tests of results.py: rows are valid commands, a table never mixes versions of the code, and
interrupted runs are continued."""

import argparse
import dataclasses
import json
import re
import time

import fingerprint
import pytest
import results
import torch

HERE = {"processor": "here", "cores": 2, "torch": "2", "threads": 1}
TODAY = {row: f"{n:012x}" for n, row in enumerate(results.ROWS)}

# A script that behaves like a method but learns nothing. It waits while there is a file "wait".
FAKE_METHOD = """
import json, signal, sys, time
from pathlib import Path

here = Path(__file__).parent
folder = Path(sys.argv[sys.argv.index("--out_dir") + 1])
seed = int(sys.argv[sys.argv.index("--seed") + 1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
folder.mkdir(exist_ok=True)
(folder / "last.pt").touch()
print(" ".join(sys.argv[1:]), flush=True)
while (here / "wait").exists():
    time.sleep(0.01)
if (here / "fail").exists():
    sys.exit(2)
scores = {"semantic change": {"CIDEr": 400.0 + seed % 10}}
(folder / "scores_test.json").write_text(json.dumps({"scores": scores}))
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with fake methods, and with pages and records as results.py writes them."""
    for command in results.ROWS.values():
        (tmp_path / command.split()[0]).write_text(FAKE_METHOD)
    for name in ("README", "RESULTS", "BOUNDS"):
        file = getattr(results, name)
        (tmp_path / file.name).write_bytes(file.read_bytes())
        monkeypatch.setattr(results, name, tmp_path / file.name)
    monkeypatch.setattr(results, "RECORDS", tmp_path / "results.json")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "machine", lambda: HERE)
    results.write_records([])
    return tmp_path


def record(row, seed, cider):
    scores = {"semantic CIDEr": cider, "place": None}
    return results.new_record(row, seed, TODAY) | {"minutes": 2.0, "scores": scores}


def run(project, row, seeds=results.SEEDS, today=TODAY):
    args = argparse.Namespace(jobs=2, runs=project / "runs", data_dir="data/mini")
    missing = [results.new_record(row, seed, today) for seed in seeds]
    return results.run_all(missing, today, args)


def test_every_row_is_a_command_of_its_own_and_has_flags_of_its_method():
    assert len(set(results.ROWS.values())) == len(results.ROWS)
    for command in results.ROWS.values():
        fields = {f.name for f in dataclasses.fields(fingerprint.method_of(command).Config)}
        flags = re.findall(r"--(?:no-)?(\w+)", command)
        assert set(flags) <= fields, command


@pytest.mark.parametrize(
    "better, worse, answer",
    [
        # 3 sqrt(100 / 3 + 100 / 3) = 24.5
        ([460, 470, 480], [420, 430, 440], ("+40 ± 8.2", "confirmed")),
        ([420, 430, 440], [460, 470, 480], ("-40 ± 8.2", "contradicted")),
        ([440, 450, 460], [420, 430, 440], ("+20 ± 8.2", "cannot tell")),
        ([441, 441.1, 441.2], [432, 432.1, 432.2], ("+9 ± 0.1", "no difference of 25")),
        ([441], [432, 432.1], ("", "not run")),
    ],
)
def test_verdict(better, worse, answer):
    assert results.verdict(better, worse) == answer


def test_pages_are_filled_in_from_records_and_bounds(project):
    records = [record("RR", seed, 390.0 + n) for n, seed in enumerate(results.SEEDS)]
    records += [record("Subtraction", seed, 310.0) for seed in results.SEEDS]
    results.write_records(records)
    bound = {"BLEU-4": 1.23, "CIDEr": 45.67}
    bounds = {"levir_cc": {"scores": {f"{results.BOUND_NAMES[0]}: total": bound}}}
    results.BOUNDS.write_text(json.dumps(bounds))
    # Variances of 1 and 0, each with two degrees of freedom: 3 sqrt(0.5 / 3 + 0.5 / 3)
    assert results.noise(records) == pytest.approx(1.7321, abs=1e-4)
    results.write_tables()
    page = results.RESULTS.read_text(encoding="utf-8")
    assert "| RR | 3 | 391.0 (2.0) | - |" in page and "| GDE | 0 | - |" in page
    assert "| RR > Subtraction | 123.8 > 119.7 | +81 ± 0.6 | confirmed |" in page
    assert "| 128.9 > 89.8 |  | not run |" in page
    assert "| levir_cc: total |  |  | 65.6 / 138.3 |  |  | 1.2 / 45.7 |  |  |" in page
    assert "| mini: total |  |  |  |  |  | - | - | - |" in page
    readme = results.README.read_text(encoding="utf-8")
    assert "| Subtraction | 3 | 310.0 (0.0) |" in readme and "Computed on: here, " in readme
    results.write_tables()
    assert results.RESULTS.read_text(encoding="utf-8") == page
    assert results.README.read_text(encoding="utf-8") == readme


def test_runs_are_recorded_and_what_counts_no_more_leaves_the_records(project):
    other_code = record("RR", 1, 300.0) | {"fingerprint": "another"}
    old_row = record("RR", 2, 300.0) | {"row": "of long ago"}
    results.write_records([record("GDE", 1, 410.0), other_code, old_row])
    assert run(project, "RR")
    records = results.read_records()
    assert sorted((r["row"], r["seed"]) for r in records) == [
        ("GDE", 1),
        *[("RR", seed) for seed in sorted(results.SEEDS)],
    ]
    last = next(r for r in records if r["seed"] == 2)
    assert last["command"] == "python scorer_cbr.py --w_match 0 --w_cbr 0 --seed 2"
    assert last["machine"] == HERE and 0 <= last["minutes"] < 1
    assert last["scores"]["semantic CIDEr"] == 402 and last["scores"]["METEOR"] is None
    assert "| RR | 3 | 401.3 (1.0) |" in results.RESULTS.read_text(encoding="utf-8")


def test_an_interrupted_run_is_continued_if_its_fingerprint_is_the_same(project, monkeypatch):
    def interrupt_when_both_run(_):
        outputs = list((project / "runs").glob("*.txt"))
        if len(outputs) == 2 and all(file.read_text() for file in outputs):
            raise KeyboardInterrupt

    (project / "wait").touch()
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", interrupt_when_both_run)
        with pytest.raises(KeyboardInterrupt):
            run(project, "CHEERS")
    assert results.read_records() == []
    (project / "wait").unlink()
    assert run(project, "CHEERS", seeds=[1111])
    assert [r["minutes"] for r in results.read_records()] == [None]  # unknown for a resumed run
    assert run(project, "CHEERS", seeds=[1], today=TODAY | {"CHEERS": "another"})
    (made,) = results.read_records()
    assert made["seed"] == 1 and made["minutes"] is not None
    folder = results.folder_of(record("CHEERS", 1111, 0.0), project / "runs")
    assert "--resume" in folder.with_name(f"{folder.name}.txt").read_text()


def test_float16_weights_keep_what_a_captioner_needs(tmp_path):
    model = {"w": torch.ones(2), "n": torch.tensor(3)}
    state = {
        "model": model,
        "optimizer": {},
        "random": {},
        "vocab": ["x"],
        "grid": [1],
        "max_len": 2,
    }
    torch.save(state | {"config": {"out_dir": "runs/x", "dim": 8}}, tmp_path / "best.pt")
    results.write_weights(tmp_path / "best.pt", tmp_path / "small.pt")
    small = torch.load(tmp_path / "small.pt", weights_only=True)
    assert small["model"]["w"].dtype == torch.float16 and small["model"]["n"].dtype == torch.int64
    assert small["vocab"] == ["x"] and small["config"] == {"out_dir": "", "dim": 8}
    assert "optimizer" not in small and "random" not in small
