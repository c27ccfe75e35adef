"""Tests of results.py: rows are valid commands, claims are told by their errors, and no table
mixes commits unasked."""

import dataclasses
import importlib
import re

import pytest
import results

# A script that behaves like a method but learns nothing.
FAKE_METHOD = """
import json, sys
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--out_dir") + 1])
seed = int(sys.argv[sys.argv.index("--seed") + 1])
folder.mkdir(exist_ok=True)
print(" ".join(sys.argv[1:]))
scores = {"semantic change": {"CIDEr": 400.0 + seed % 10}}
(folder / "scores_test.json").write_text(json.dumps({"scores": scores}))
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a fake method, and with pages and records as results.py writes them."""
    (tmp_path / "scorer_cbr.py").write_text(FAKE_METHOD)
    for name in ("README", "RESULTS"):
        file = getattr(results, name)
        (tmp_path / file.name).write_bytes(file.read_bytes())
        monkeypatch.setattr(results, name, tmp_path / file.name)
    monkeypatch.setattr(results, "RECORDS", tmp_path / "results.json")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RUNS", tmp_path / "runs")
    results.write_records([])
    return tmp_path


def record(row, seed, cider):
    scores = {"semantic CIDEr": cider, "place": None}
    known = {"row": row, "seed": seed, "commit": "a", "machine": "a machine"}
    return known | {"minutes": 2.0, "scores": scores}


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
    # Variances of 1 and three times 0: 3 sqrt(1/4 / 3 + 1/4 / 3)
    assert results.noise(records) == pytest.approx(1.2247, abs=1e-4)
    results.write_tables(mixed=False)
    page = results.RESULTS.read_text(encoding="utf-8")
    assert "| RR | 3 | 391.0 (2.0) | - |" in page and "| GDE | 0 | - |" in page
    assert "| RR > Subtraction | 123.8 > 119.7 | +70 ± 0.6 | confirmed |  |  |" in page
    assert "| 126.8 >= 126.0 |  | not run | +4 ± 0.0 | confirmed |" in page
    readme = results.README.read_text(encoding="utf-8")
    assert "| Subtraction | 3 | 321.0 (0.0) |" in readme and "Commit: a. " in readme


def test_runs_are_recorded_and_no_table_mixes_commits_unasked(project):
    results.write_records([record("GDE", 1, 410.0), record("RR", 1, 300.0)])
    (results.RUNS / "rr-2-b").mkdir(parents=True)
    (results.RUNS / "rr-2-b" / "last.pt").touch()  # an interrupted run
    missing = results.missing_runs(["RR"], results.SEEDS, "b")
    assert results.run_all(missing, "data/mini")
    _, *made = sorted(results.read_records(), key=lambda r: (r["row"], r["seed"]))
    assert [(r["row"], r["seed"], r["commit"]) for r in made] == [
        ("RR", 1, "b"),
        ("RR", 2, "b"),
        ("RR", 1111, "b"),
    ]
    first, resumed, _ = made
    assert first["scores"]["semantic CIDEr"] == 401 and first["scores"]["METEOR"] is None
    assert first["minutes"] < 1 and resumed["minutes"] is None
    output = (results.RUNS / "rr-2-b.txt").read_text()
    assert output.startswith("--w_match 0 --w_cbr 0 --seed 2 ") and "--resume" in output
    assert results.missing_runs(["RR"], results.SEEDS, "b") == []
    with pytest.raises(results.InputError, match="--mixed"):
        results.write_tables(mixed=False)
    results.write_tables(mixed=True)
    page = results.RESULTS.read_text(encoding="utf-8")
    assert "| RR | 3 | 401.3 (1.0) |" in page and "Commit: a, b. " in page
