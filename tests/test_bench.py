"""tools/bench.py runs."""

from types import SimpleNamespace

import bench
import pytest


@pytest.mark.parametrize("what, row", [("match", "ours"), ("step", "released"), ("decode", "ours")])
def test_the_benchmarks_run(what, row):
    flags = {"method": "scorer_cbr", "batch": 2, "dim": 16, "grid": (4, 2, 3), "length": 5}
    result = bench.measure(SimpleNamespace(what=what, row=row, device="cpu", **flags))
    assert result["seconds"] > 0
    assert result["peak"] > 0
