"""Tests of results.py: rows are valid commands, claims are told by their errors, and no table
mixes records of code that computes different things."""

import dataclasses
import importlib
import re

import fingerprint
import pytest
import results
import rows as rows_file


def record(row, seed, cider, commit="a"):
    scores = {"semantic CIDEr": cider, "change type": 50.0, "place": None}
    known = {"row": row, "seed": seed, "commit": commit, "machine": "a machine"}
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


def test_tables_of_flags_have_every_row_and_only_flags_of_its_method():
    """But for rows that have more steps or fewer pairs, of which the page has a sentence."""
    page = results.RESULTS.read_text(encoding="utf-8")
    listed = set()
    for script in results.SCRIPTS:
        method = importlib.import_module(script.removesuffix(".py"))
        fields = {f.name for f in dataclasses.fields(method.Config)} | {"variant"}
        begin = f"<!-- flags of {script}, by tools/results.py -->"
        table = page.split(begin)[1].split("<!-- end -->")[0]
        for line in table.splitlines()[3:]:
            cell = line.split("|")[2]
            assert set(re.findall(r"--(?:no-)?(\w+)", cell)) <= fields, line
            listed.update(results.commands_of(script, cell))
    rows = results.ROWS.keys() - {*results.TWICE, *results.FEWER}
    assert {results.ROWS[row] for row in rows} <= listed


@pytest.mark.parametrize(
    "better, worse, answer",
    [
        # A variance of 100: 3 sqrt(100 / 3 + 100 / 3) = 24.5
        ([460, 470, 480], [420, 430, 440], ("+40 ± 8.2", "confirmed")),
        ([420, 430, 440], [460, 470, 480], ("-40 ± 8.2", "contradicted")),
        ([440, 450, 460], [420, 430, 440], ("+20 ± 8.2", "mini cannot tell")),
        ([441], [432, 432.1], ("", "not run")),
    ],
)
def test_verdict(better, worse, answer):
    assert results.verdict(better, worse, variance=100.0) == answer


def test_pages_are_filled_in_from_records_of_the_same_code(tmp_path, monkeypatch):
    for name in ("README", "RESULTS", "SCORES_PAGE", "DEVIATIONS_PAGE", "RELEASED_PAGE", "GUIDE"):
        file = getattr(results, name)
        (tmp_path / file.name).write_bytes(file.read_bytes())
        monkeypatch.setattr(results, name, tmp_path / file.name)
    monkeypatch.setattr(results, "RECORDS", tmp_path / "results.json")
    records = [record("RR", seed, 390.0 + n) for n, seed in enumerate(results.SEEDS)]
    for row in ("Subtraction", "SCORER, twice the steps", "SCORER+CBR, twice the steps"):
        records += [record(row, seed, 310.0 + len(row)) for seed in results.SEEDS]
    records.append(record("SCORER's own code", 1, 250.0))
    small = next(iter(results.FEWER))
    records.append(record(small, 1111, 100.0, commit="c"))
    # Variances of 1 and three times 0, with two degrees of freedom each
    assert results.pooled_variance(records, results.ROWS) == 0.25
    assert results.standard_error(0.25, 3, 1) == pytest.approx((0.25 / 3 + 0.25) ** 0.5)
    same = {"scorer_cbr.py": ["b", "c"], "rdd_acr.py": ["a", "b"]}
    results.write_results({"same": same, "records": records})
    with pytest.raises(results.InputError, match="scorer_cbr.py are of a and c"):
        results.write_tables()
    fingerprint.note_same(same, "scorer_cbr.py", "a", "b")
    results.write_results({"same": same, "records": records})
    results.write_tables()
    page = results.RESULTS.read_text(encoding="utf-8")
    assert "| RR | 3 | 391.0 (2.0) | 50.0 (0.0) |" in page and "| GDE | 0 | - |" in page
    # Of the variances 1 and 0, the mean is 1/2: sqrt(1/2 / 3 + 1/2 / 3)
    assert "| RR > Subtraction | 123.8 > 119.7 | +70 ± 0.6 | confirmed |  |  |" in page
    assert "| 126.8 > 126.0 |  | not run | +4 ± 0.0 | confirmed |" in page
    assert "| RR | `--w_match 0 --w_cbr 0` | 391.0 (2.0) |" in page
    assert "| RR+CBR | `--w_match 0` |  |" in page
    released = results.RELEASED_PAGE.read_text(encoding="utf-8")
    assert "| SCORER's own code | - | 250.0 | - | - | - | 250.0 |" in released
    readme = results.README.read_text(encoding="utf-8")
    assert "| Subtraction | 3 | 321.0 (0.0) |" in readme and "Computed on: a machine." in readme
    guide = results.GUIDE.read_text(encoding="utf-8")
    assert "| type of change named right, in % | 50.0 | - |" in guide


def test_only_runs_of_other_code_are_missing_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RECORDS", tmp_path / "results.json")
    records = [record("RR", 1, 300.0), record("GDE", 1, 400.0)]
    results.write_results({"same": {"scorer_cbr.py": ["a", "b"]}, "records": records})
    assert results.missing_runs(["RR"], "b") == [("RR", 1111, "b"), ("RR", 2, "b")]
    assert len(results.missing_runs(["RR"], "c")) == 3
    results.add_record(record("RR", 2, 310.0, commit="b"))
    assert len(results.read_results()["records"]) == 3
    new = record("RR", 1, 320.0, commit="c")
    results.add_record(new)
    assert results.read_results()["records"] == [records[1], new]
    assert len(results.missing_runs(list(rows_file.NINE_SEEDS), "c")) == 18


def test_commits_that_compute_something_else_are_forgotten():
    same = {}
    fingerprint.note_same(same, "cheers.py", "a", "b")
    fingerprint.note_same(same, "cheers.py", "b", "c")
    fingerprint.note_same(same, "cheers.py", "a", "c")
    fingerprint.note_same(same, "rdd_acr.py", "a", "b")
    assert same == {"cheers.py": ["a", "b", "c"], "rdd_acr.py": ["a", "b"]}
    fingerprint.note_same(same, "cheers.py", "d", "e")
    assert results.same_code("d", "CHEERS", same) == ["d", "e"]
    assert results.same_code("c", "CHEERS", same) == ["c"]
