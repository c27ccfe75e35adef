"""results.py: its rows are commands, its means mix nothing, verdicts follow their definition."""

import dataclasses
import importlib
import json
import math
import re
import signal
import statistics
import threading
import time
from pathlib import Path

import pytest
import results
import torch

import common

HERE = {"processor": "here", "cores": 2, "torch": "2", "threads": 1}
THERE = {"processor": "there", "cores": 2, "torch": "2", "threads": 1}
SCRIPTS = sorted({command.split()[0] for command in results.ROWS.values()})

# A method that does as a real one does, without learning. It waits while there is a file `wait`.
FAKE_METHOD = '''
"""A docstring."""
import json, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--out_dir") + 1])
seed = int(sys.argv[sys.argv.index("--seed") + 1])
folder.mkdir(exist_ok=True)


def stop(*_):
    sys.exit(143)


signal.signal(signal.SIGTERM, stop)
(folder / "last.pt").touch()
print(" ".join(sys.argv[1:]), flush=True)
while (Path(__file__).parent / "wait").exists():
    time.sleep(0.01)
if (Path(__file__).parent / "fail").exists():
    sys.exit(2)
scores = {"scores": {"semantic change": {"CIDEr": 400 + seed % 10}}}
(folder / "scores_test.json").write_text(json.dumps(scores))
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with fake methods, in which results.py writes."""
    for name in (*SCRIPTS, "common.py", "data.py", "mini.py"):
        (tmp_path / name).write_text(FAKE_METHOD)
    (tmp_path / "README.md").write_text(
        "# Title\n\n<!-- results, by tests/results.py -->\nold\n<!-- end -->\n\nThe end.\n"
    )
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "README", tmp_path / "README.md")
    monkeypatch.setattr(results, "ASSETS", tmp_path / "assets")
    for name in ("RECORDS", "BOUNDS", "RESULTS"):
        file = getattr(results, name)
        monkeypatch.setattr(results, name, tmp_path / file.name)
    monkeypatch.setattr(results, "machine", lambda: HERE)
    monkeypatch.setattr(results, "assets_are_due", lambda runs: False)
    (tmp_path / "runs").mkdir()
    return tmp_path


def record(row, seed, cider, machine=HERE, **changes):
    """A record as append_record gets it, of today's code unless changed."""
    made = {
        "row": row,
        "command": results.command_of(row, seed),
        "seed": seed,
        "code": results.code_of(results.script_of(row)),
        "commit": "abc",
        "machine": machine,
        "minutes": 2.0,
        "scores": dict.fromkeys(results.COLUMNS, 50.0) | {"semantic CIDEr": cider},
    }
    return made | changes


def config_of(row):
    script, *flags = results.ROWS[row].split()
    method = importlib.import_module(script.removesuffix(".py"))
    released = getattr(method, "RELEASED", None)
    name = method.__name__
    cfg, _ = common.parse_args(method.Config, method.PRESETS, name, method.__doc__, flags, released)
    return script, dataclasses.asdict(cfg) | {"out_dir": ""}


# ---- rows ----------------------------------------------------------------------------------------


def test_every_row_is_a_command_and_has_a_folder_of_its_own():
    assert len(results.ROWS) == 20
    assert len({str(config_of(row)) for row in results.ROWS}) == 20
    assert len({results.folder_of(Path(), row, 1) for row in results.ROWS}) == 20


def test_released_rows_have_twice_the_steps_and_idc_as_many_with_pre_training_as_without():
    for row in ("SCORER+CBR", "DIRL+CCR"):
        _, paper = config_of(row)
        _, released = config_of(f"{row}, released")
        assert released["variant"] == "released"
        assert released["steps"] == 2 * paper["steps"]
    _, whole = config_of("IDC")
    _, without = config_of("IDC, no pre-training")
    assert without["pretrain_steps"] == 0
    assert without["steps"] == whole["pretrain_steps"] + whole["steps"]


def test_claims_and_deviations_name_rows_and_published_figures_agree_with_the_claim():
    named = {d.row for d in results.DEVIATIONS} | {d.other_row for d in results.DEVIATIONS}
    named |= set(results.IN_README)
    for claim in results.CLAIMS:
        named |= {claim.better, claim.worse}
        assert claim.figures[0] > claim.figures[1]
    assert named <= set(results.ROWS)


# ---- code and records ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scorer_cbr.py", "common.py", "data.py", "mini.py"])
def test_the_hash_changes_with_code_and_with_nothing_else(project, name):
    before = results.code_of("scorer_cbr.py")
    other = results.code_of("cheers.py")
    file = project / name
    text = file.read_text()
    file.write_text(text.replace('"""A docstring."""', '"""Another one."""  # a comment\n\n'))
    assert results.code_of("scorer_cbr.py") == before
    file.write_text(text.replace("seed % 10", "seed % 11"))
    assert results.code_of("scorer_cbr.py") != before
    assert (results.code_of("cheers.py") == other) == (name == "scorer_cbr.py")
    file.write_text(text)
    assert results.code_of("scorer_cbr.py") == before


def test_the_hash_sees_flags_and_constants():
    def hash_of(text):
        return results.outline(results.ast.parse(text))

    assert hash_of("x = 1") == hash_of("x  =  1  # one")
    different = ["x = 1", "x = 1.0", "x = '1'", "x = b'1'", "x = True", "x = None", "y = 1", "x: 1"]
    different += ["x = f(1)", "x = f(a=1)", "x = -1", "x = f'{1}'", "x = f'{1!r}'", "x = f'{1:1}'"]
    assert len({hash_of(text) for text in different}) == len(different)
    assert hash_of("def f():\n 'doc'\n return 1") == hash_of("def f():\n return 1")
    assert hash_of("def f():\n 'doc'") != hash_of("def f():\n return 'doc'")


def test_a_mean_mixes_neither_machines_nor_code_nor_commands(project):
    records = [
        record("RR", 1111, 500.0, code="old"),
        record("RR", 1, 500.0, command="python scorer_cbr.py --steps 1 --seed 1"),
        record("RR", 7, 500.0),  # not one of our seeds
        record("RR", 1, 500.0) | {"row": "a row of long ago"},
        record("RR", 1111, 300.0, THERE),
        record("RR", 1111, 390.0),
        record("RR", 1, 410.0),
        record("RR", 1111, 400.0),  # run again: the later one counts
    ]
    of_row = results.results_of_rows(records)["RR"]
    assert of_row.machine == results.describe(HERE)
    assert sorted(of_row.values("semantic CIDEr")) == [400, 410]
    records += [record("RR", 1, 310.0, THERE)]  # as many there, and later
    of_row = results.results_of_rows(records)["RR"]
    assert of_row.machine == results.describe(THERE)
    assert of_row.values("semantic CIDEr") == [300, 310]


def test_a_row_cut_off_by_a_change_of_machine_starts_again(project):
    rows = ["SCORER+CBR", "RR"]
    records = [record("SCORER+CBR", seed, 480.0, THERE) for seed in results.SEEDS]
    records += [record("RR", seed, 400.0, THERE) for seed in results.SEEDS[:2]]
    assert results.missing_runs(records, rows) == [("RR", seed) for seed in results.SEEDS]
    records += [record("RR", 1111, 400.0)]
    assert results.missing_runs(records, rows) == [("RR", 1), ("RR", 2)]
    (project / "data.py").write_text("x = 1")
    assert len(results.missing_runs(records, rows)) == 6


def test_all_seeds_of_a_row_come_one_after_the_other_main_rows_first(project):
    runs = results.missing_runs([], ["RR", "IDC", "SCORER+CBR"])
    assert [row for row, _ in runs] == ["SCORER+CBR"] * 3 + ["IDC"] * 3 + ["RR"] * 3
    assert [seed for _, seed in runs] == [1111, 1, 2] * 3


def test_scores_that_were_not_to_be_had_are_none():
    result = {
        "scores": {"total": {"CIDEr": 300.0}},
        "accuracy": {"change type": 80.0, "place": math.nan},
        "pointing": {"decoder": {"total": 70.0}},
    }
    scores = results.read_scores(result)
    assert scores["total CIDEr"] == 300 and scores["change type"] == 80
    assert scores["pointing"] == 70
    assert scores["place"] is None and scores["METEOR"] is None
    assert results.cell([1.0, None]) == "-"
    assert results.cell([1.0, 4.0]) == "2.5 (3.0)"


# ---- verdicts ------------------------------------------------------------------------------------


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
def test_verdict(project, better, worse, answer):
    records = [record("RR", s, v) for s, v in zip(results.SEEDS, better, strict=False)]
    records += [record("Subtraction", s, v) for s, v in zip(results.SEEDS, worse, strict=False)]
    assert results.judge(results.CLAIMS[0], results.results_of_rows(records)) == answer


def test_verdict_is_its_definition():
    for gap in range(-60, 61):
        for error in (0.1, 1, 3, 5, 8, 20):
            told = abs(gap) >= 3 * error and abs(gap) >= 10
            small = -25 <= gap - 3 * error and gap + 3 * error <= 25
            if told:
                expected = "confirmed" if gap > 0 else "contradicted"
            else:
                expected = "no difference of 25" if small else "cannot tell"
            assert results.verdict(gap, error) == expected


def test_a_claim_whose_rows_differ_in_machine_says_so(project):
    records = []
    for n, seed in enumerate(results.SEEDS):
        records += [record("RR", seed, 460.0 + n), record("Subtraction", seed, 360.0 + n, THERE)]
    _, text = results.judge(results.CLAIMS[0], results.results_of_rows(records))
    assert text == "confirmed (machines B and A)"  # Subtraction stands before RR in the table


# ---- tables --------------------------------------------------------------------------------------


def test_without_records_every_row_is_not_run(project):
    results.write_tables()
    text = results.RESULTS.read_text()
    assert text.count("| 0 | not run |") == 20
    assert text.count("|  | not run |") == len(results.CLAIMS)
    assert "differences of 25 and more" in text and "pooled" not in text


def test_tables_come_from_the_records_and_bounds_alone(project):
    for n, seed in enumerate(results.SEEDS):
        results.append_record(record("SCORER+CBR", seed, 480.0 + 10 * n))
        results.append_record(record("SCORER", seed, 470.0 + 10 * n, THERE))
    results.append_record(record("RR", 1, 390.0))
    assert len(results.read_records()) == 7
    assert len(results.RECORDS.read_text().splitlines()) == 9  # a line each, and the brackets
    row = {"BLEU-4": 1.23, "CIDEr": 45.67}
    scores = {f"{results.ONE_CAPTION}: total": row, f"{results.ONE_PER_KIND}: total": row}
    results.BOUNDS.write_text(json.dumps({"levir_cc": {"scores": scores}}))
    results.write_tables()
    text = results.RESULTS.read_text()
    lines = text.splitlines()
    assert "Machine A: here, 2 cores, torch 2, 1 thread a run." in text
    assert "| SCORER+CBR | `python scorer_cbr.py` | 3 | A | 490.0 (20.0) | 50.0 (0.0) |" in text
    assert "| SCORER | `python scorer_cbr.py --w_cbr 0` | 3 | B | 480.0 (20.0) |" in text
    assert "| 1 | A | 390.0 | 50.0 |" in text
    assert "| +10 ± 8.2 | cannot tell (machines A and B) |" in text
    assert "deviation is 10 (pooled over the rows of these claims; 10 over all rows" in text
    assert "two rows are then 24." in text  # 3 sqrt(2 / 3) 10
    assert next(line for line in lines if line.startswith("| LEVIR-CC |")) == (
        "| LEVIR-CC |  |  | 65.6 / 138.3 |  |  | 1.2 / 45.7 | 1.2 / 45.7 |  |"
    )
    assert "a CIDEr of 46 where 138 is published" in text
    readme = results.README.read_text()
    assert readme.startswith("# Title\n\n<!-- results, by tests/results.py -->\n| row | seeds |")
    assert readme.endswith("a run.\n<!-- end -->\n\nThe end.\n")
    assert (
        "| SCORER+CBR | 3 | A | 490.0 (20.0) |" in readme and "python" not in readme.split("\n")[4]
    )
    results.write_tables()
    assert results.RESULTS.read_text() == text and results.README.read_text() == readme


def test_spread_is_the_pooled_standard_deviation(project):
    values = {"RR": [400.0, 410.0, 430.0], "GDE": [300.0, 350.0, 310.0], "HRD": [0.0, 90.0, 40.0]}
    records = []
    for row, ciders in values.items():
        for seed, cider in zip(results.SEEDS, ciders, strict=True):
            records.append(record(row, seed, cider))
    of_rows = results.results_of_rows(records)
    expected = (statistics.variance(values["RR"]) + statistics.variance(values["GDE"])) / 2
    spread = results.spread(of_rows, ["RR", "GDE", "SCORER"])  # of SCORER there is no record
    assert spread == pytest.approx(math.sqrt(expected))
    assert results.spread(of_rows, ["SCORER"]) is None


# ---- running -------------------------------------------------------------------------------------


def run(project, rows):
    return results.run_missing(rows, 2, project / "runs", "data/mini")


def test_missing_runs_are_made_and_recorded(project, capsys):
    results.append_record(record("RR", 1, 401.0))
    assert run(project, ["RR", "DIRL+CCR"])
    records = results.read_records()
    made = {(r["row"], r["seed"]) for r in records[1:]}
    assert made == {("RR", 1111), ("RR", 2)} | {("DIRL+CCR", seed) for seed in results.SEEDS}
    started = re.findall(r"\d (.*), seed (\d+)", capsys.readouterr().out)
    assert started == [
        ("DIRL+CCR", "1111"),
        ("DIRL+CCR", "1"),
        ("DIRL+CCR", "2"),
        ("RR", "1111"),
        ("RR", "2"),
    ]
    last = next(r for r in records if r["seed"] == 2 and r["row"] == "RR")
    assert last["command"] == "python scorer_cbr.py --w_match 0 --w_cbr 0 --seed 2"
    assert last["machine"] == HERE and last["code"] == results.code_of("scorer_cbr.py")
    assert last["scores"]["semantic CIDEr"] == 402 and last["scores"]["place"] is None
    assert 0 <= last["minutes"] < 1
    said = (project / "runs" / "rr-2.txt").read_text().split()
    assert said[-1] == "--overwrite" and said[said.index("--device") + 1] == "cpu"
    assert "| 3 | A | 401.3 (1.0) |" in results.RESULTS.read_text()
    assert run(project, ["RR", "DIRL+CCR"]) and not capsys.readouterr().out  # nothing to do


def test_a_run_that_fails_leaves_no_record(project, capsys):
    (project / "fail").touch()
    assert not run(project, ["GDE"])
    assert results.read_records() == []
    assert "GDE, seed 1 failed; see" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["none", "code", "machine", "killed"])
def test_an_interrupted_run_is_continued_if_nothing_has_changed(project, monkeypatch, change):
    (project / "wait").touch()
    outputs = [project / "runs" / f"cheers-{seed}.txt" for seed in (1111, 1)]

    def interrupt():
        while not all(file.exists() and file.read_text() for file in outputs):
            time.sleep(0.02)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(project, ["CHEERS"])
    assert results.read_records() == []
    notes = json.loads((project / "runs" / "cheers-1111.json").read_text())
    assert notes["minutes"] >= 0
    (project / "wait").unlink()
    if change == "code":
        (project / "mini.py").write_text("x = 1")
    elif change == "machine":
        monkeypatch.setattr(results, "machine", lambda: THERE)
    else:
        notes["minutes"] = None if change == "killed" else 100.0
        (project / "runs" / "cheers-1111.json").write_text(json.dumps(notes))
    assert run(project, ["CHEERS"])
    how = outputs[0].read_text().split()[-1]
    minutes = {r["seed"]: r["minutes"] for r in results.read_records()}
    assert len(minutes) == 3
    if change in ("code", "machine"):
        assert how == "--overwrite" and minutes[1111] < 1
    else:
        assert how == "--resume"
        assert minutes[1111] is None if change == "killed" else 100 <= minutes[1111] < 101


# ---- assets --------------------------------------------------------------------------------------


def test_the_kind_that_is_most_often_wrong_shows_a_wrong_caption_last():
    @dataclasses.dataclass
    class Pair:
        id: str

    kinds = {kind: [Pair(f"{kind}{n}") for n in range(3)] for kind in ("add", "drop", "move")}
    right = {pair.id: True for pairs in kinds.values() for pair in pairs}
    right |= {"add0": False, "drop1": False, "drop2": False}
    chosen = results.choose_pairs(kinds, right)
    assert [(kind, pair.id) for kind, pair in chosen] == [
        ("add", "add1"),
        ("move", "move0"),
        ("drop", "drop1"),
    ]


def test_halved_keeps_everything_but_the_precision_of_floats():
    state = {"a": {"w": torch.ones(2), "n": torch.tensor(3)}, "vocab": ["x"], "grid": (1, 2, 3)}
    half = results.halved(state)
    assert half["a"]["w"].dtype == torch.float16 and half["a"]["n"].dtype == torch.int64
    assert half["vocab"] == ["x"] and half["grid"] == (1, 2, 3)
