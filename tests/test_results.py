"""results.py: its rows are commands, its verdicts and rank correlations follow their definitions."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import results

import common


def config_of(row):
    script, *flags = results.ROWS[row].split()
    method = importlib.import_module(script.removesuffix(".py"))
    released = [method.RELEASED] if hasattr(method, "RELEASED") else []
    cfg, _ = common.parse_args(method.Config, method.PRESETS, method.__name__, method.__doc__, flags, *released)
    return script, dataclasses.asdict(cfg) | {"out_dir": ""}


def test_every_row_is_a_command_and_has_a_folder_of_its_own():
    assert len({str(config_of(row)) for row in results.ROWS}) == len(results.ROWS)
    assert len({results.folder_of(Path(), row, 1) for row in results.ROWS}) == len(results.ROWS)


def test_tables_claims_and_deviations_name_rows():
    named = {row for published in results.TABLES.values() for row in published} | set(results.IN_README)
    named |= {row for here, *_, other in results.DEVIATIONS for row in (here, other)}
    assert named <= set(results.ROWS)
    for title, pairs in results.CLAIMS.items():
        for better, worse in pairs:  # published figures say what is claimed
            assert results.TABLES[title][better] > results.TABLES[title][worse]


def test_idc_has_as_many_steps_in_all_with_pre_training_as_without():
    rows = results.TABLES["IDC, Table 4 (CLEVR-Change)"]
    assert len({cfg["steps"] + cfg["pretrain_steps"] for _, cfg in map(config_of, rows)}) == 1


@pytest.mark.parametrize(
    "better, worse, answer",
    [
        ([460, 470, 480], [420, 430, 440], "confirmed (+40, 3 standard errors 24)"),  # 3 sqrt(100/3 + 100/3) = 24.5
        ([420, 430, 440], [460, 470, 480], "contradicted (-40, 3 standard errors 24)"),
        ([440, 450, 460], [420, 430, 440], "cannot tell (+20, 3 standard errors 24)"),
        ([441, 441.1, 441.2], [432, 432.1, 432.2], "no difference of 25 (+9, 3 standard errors 0)"),  # below 10
        ([441], [432, 432.1], "not run"),
    ],
)
def test_verdict(better, worse, answer):
    values = {"a": {"semantic CIDEr": better}, "b": {"semantic CIDEr": worse}}
    assert results.verdict(values, "a", "b") == answer


def test_kendall_is_the_share_of_pairs_in_order_less_the_share_out_of_it():
    published = {"a": 1.0, "b": 2.0, "c": 3.0}
    values = {row: {"semantic CIDEr": [mean - 1, mean + 1]} for row, mean in {"a": 10, "b": 30, "c": 20}.items()}
    assert results.kendall(values, published) == pytest.approx((2 - 1) / 3)
    assert results.kendall(values, published | {"not run": 4.0}) is None


def test_collect_names_every_machine_and_adds_up_the_minutes_of_a_resumed_run(tmp_path):
    for seed, cider, output in [
        (1111, 450.0, "machine: a\nminutes: 1.5\nmachine: b\nminutes: 2\n"),
        (1, 460.0, "machine: a\nminutes: 3\n"),
    ]:
        folder = results.folder_of(tmp_path, "CHEERS", seed)
        folder.mkdir()
        (folder / "scores_test.json").write_text(json.dumps({"scores": {"semantic change": {"CIDEr": cider}}}))
        (folder / "log.jsonl").write_text(json.dumps({"code": "c", "torch": "t", "device": "cpu"}) + "\n")
        Path(f"{folder}.txt").write_text(output)
    values, codes, machines = results.collect(tmp_path)
    assert values["CHEERS"]["semantic CIDEr"] == [450, 460] and values["CHEERS"]["minutes"] == [3.5, 3]
    assert values["CHEERS"]["METEOR"] == [None, None] and results.cell(values["CHEERS"]["METEOR"]) == "-"
    assert codes == {"c, torch t, cpu"} and machines == {"a", "b"}
