"""tools/bench.py runs."""

from types import SimpleNamespace

import bench
import pytest

import matching


@pytest.mark.parametrize(
    "what, row", [("match", "ours"), ("match", "slices"), ("step", "released"), ("decode", "ours")]
)
def test_the_benchmarks_run(what, row, capsys, monkeypatch):
    monkeypatch.setattr(matching, "kernels_fit", matching.kernels_fit)  # "slices" replaces it
    flags = {"method": "scorer_cbr", "batch": 2, "dim": 16, "grid": (4, 2, 3), "length": 5}
    flags |= {"wait": False, "profile": True}
    result = bench.measure(SimpleNamespace(what=what, row=row, device="cpu", **flags))
    assert result["seconds"] > 0
    assert result["peak"] > 0
    assert "aten::" in capsys.readouterr().out


def test_all_in_its_dry_form(tmp_path, monkeypatch, capsys):
    """Tests, a case, and a process that takes too long."""
    monkeypatch.setattr(bench, "TESTS", "-m pytest --collect-only tests/test_pages.py")
    monkeypatch.setattr(bench, "CASES", {"match": "match --row ours"})
    bench.run_all(tmp_path, dry=True)
    printed = capsys.readouterr().out
    assert "tests: exit code 0: " in printed
    assert 'match: exit code 0: {"seconds": ' in printed
    assert "token_match" in (tmp_path / "match.log").read_text()

    slow = bench.start("-c while(True):pass", tmp_path / "slow.log", dry=True)
    bench.finish(slow, tmp_path / "slow.log", limit=0)
    assert slow.wait() != 0
    assert "slow: out of time" in capsys.readouterr().out
