"""Tests of results.py: rows are valid commands, no table mixes commits unasked, and an interrupted
run is continued."""

import argparse
import dataclasses
import importlib
import re
import time

import pytest
import results
import torch

MACHINE = {"processor": "a processor", "cores": 2, "torch": "2", "threads": 1}

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
scores = {"semantic change": {"CIDEr": 400.0 + seed % 10}}
(folder / "scores_test.json").write_text(json.dumps({"scores": scores}))
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with fake methods, and with pages and records as results.py writes them."""
    for command in results.ROWS.values():
        (tmp_path / command.split()[0]).write_text(FAKE_METHOD)
    for name in ("README", "RESULTS"):
        file = getattr(results, name)
        (tmp_path / file.name).write_bytes(file.read_bytes())
        monkeypatch.setattr(results, name, tmp_path / file.name)
    monkeypatch.setattr(results, "RECORDS", tmp_path / "results.json")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "machine", lambda: MACHINE)
    results.write_records([])
    return tmp_path


def record(row, seed, cider, commit="a"):
    scores = {"semantic CIDEr": cider, "place": None}
    return results.new_record(row, seed, commit) | {"minutes": 2.0, "scores": scores}


def run(project, row, seeds=results.SEEDS, commit="b"):
    args = argparse.Namespace(jobs=2, runs=project / "runs", data_dir="data/mini")
    return results.run_all(results.missing_runs([row], seeds, commit), args)


def test_every_row_is_a_command_of_its_own_and_has_flags_of_its_method():
    assert len(set(results.ROWS.values())) == len(results.ROWS)
    for row, command in results.ROWS.items():
        script = command.split()[0]
        method = importlib.import_module(script.removesuffix(".py"))
        fields = {f.name for f in dataclasses.fields(method.Config)} | {"variant"}
        flags = re.findall(r"--(?:no-)?(\w+)", command)
        assert set(flags) <= fields, command
        if "twice the steps" in row:
            base = results.ROWS[row.removesuffix(", twice the steps")]
            assert command == f"{base} --steps {2 * method.PRESETS['mini']['steps']}"


@pytest.mark.parametrize(
    "better, worse, answer",
    [
        # 3 sqrt(100 / 3 + 100 / 3) = 24.5
        ([460, 470, 480], [420, 430, 440], ("+40 ± 8.2", "confirmed")),
        ([420, 430, 440], [460, 470, 480], ("-40 ± 8.2", "contradicted")),
        ([440, 450, 460], [420, 430, 440], ("+20 ± 8.2", "mini cannot tell")),
        ([441], [432, 432.1], ("", "not run")),
    ],
)
def test_verdict(better, worse, answer):
    assert results.verdict(better, worse) == answer


def test_pages_are_filled_in_from_records(project):
    records = [record("RR", seed, 390.0 + n) for n, seed in enumerate(results.SEEDS)]
    for row in ("Subtraction", "SCORER, twice the steps", "SCORER+CBR, twice the steps"):
        records += [record(row, seed, 310.0 + len(row)) for seed in results.SEEDS]
    results.write_records(records)
    # Variances of 1 and three times 0, each with two degrees of freedom: 3 sqrt(1/4 / 3 + 1/4 / 3)
    assert results.noise(records) == pytest.approx(1.2247, abs=1e-4)
    results.write_tables(mixed=False)
    page = results.RESULTS.read_text(encoding="utf-8")
    assert "| RR | 3 | 391.0 (2.0) | - |" in page and "| GDE | 0 | - |" in page
    assert "| RR > Subtraction | 123.8 > 119.7 | +70 ± 0.6 | confirmed |  |  |" in page
    assert "| 126.8 >= 126.0 |  | not run | +4 ± 0.0 | confirmed |" in page
    readme = results.README.read_text(encoding="utf-8")
    assert "| Subtraction | 3 | 321.0 (0.0) |" in readme and "Computed at commit a." in readme
    results.write_tables(mixed=False)
    assert results.RESULTS.read_text(encoding="utf-8") == page
    assert results.README.read_text(encoding="utf-8") == readme


def test_runs_are_recorded_and_no_table_mixes_commits_unasked(project):
    results.write_records([record("GDE", 1, 410.0), record("RR", 1, 300.0), record("RR", 5, 300.0)])
    assert run(project, "RR", seeds=[1111])
    assert run(project, "RR")
    records = results.read_records()
    made = [(r["row"], r["seed"], r["commit"]) for r in records]
    assert made == [("GDE", 1, "a"), ("RR", 1111, "b"), ("RR", 1, "b"), ("RR", 2, "b")]
    last = records[-1]
    assert last["machine"] == MACHINE and 0 <= last["minutes"] < 1
    assert last["scores"]["semantic CIDEr"] == 402 and last["scores"]["METEOR"] is None
    output = results.folder_of(last, project / "runs").with_suffix(".txt").read_text()
    assert output.startswith("--w_match 0 --w_cbr 0 --seed 2 ")
    with pytest.raises(results.InputError, match="--mixed"):
        results.write_tables(mixed=False)
    results.write_tables(mixed=True)
    page = results.RESULTS.read_text(encoding="utf-8")
    assert "| RR | 3 | 401.3 (1.0) |" in page and "Computed at commit a, b." in page


def test_an_interrupted_run_is_continued_at_the_same_commit(project, monkeypatch):
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
    assert run(project, "CHEERS", seeds=[1], commit="c")
    (made,) = results.read_records()
    assert made["seed"] == 1 and made["minutes"] is not None
    folder = results.folder_of(record("CHEERS", 1111, 0.0, "b"), project / "runs")
    assert "--resume" in folder.with_suffix(".txt").read_text()


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
