"""Tests of controls.py, measures.py and tour.py: measures on made-up models, and a page with
pictures of models that are not trained."""

import json
import sys
from types import SimpleNamespace

import controls
import measures
import pytest
import torch
import tour
from PIL import Image

import cheers
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
from support.run import preset

RUNS = {
    "scorer-cbr": (scorer_cbr, scorer_cbr.SCORER, {}),
    "scorer": (scorer_cbr, scorer_cbr.SCORER, {"w_cbr": 0.0}),
    "rr": (scorer_cbr, scorer_cbr.SCORER, {"w_match": 0.0, "w_cbr": 0.0}),
    "dirl-ccr": (dirl_ccr, dirl_ccr.DIRL, {}),
    "ccr": (dirl_ccr, dirl_ccr.DIRL, {"w_dirl": 0.0}),
    "dirl": (dirl_ccr, dirl_ccr.DIRL, {"w_ccr": 0.0}),
    "dirl-ccr-weights": (dirl_ccr, dirl_ccr.DIRL, {}),
    "dirl-ccr-no-positions": (dirl_ccr, dirl_ccr.DIRL, {"use_coords": False}),
    "rdd-acr": (rdd_acr, rdd_acr.RDD, {}),
    "rdd-acr-no-losses": (rdd_acr, rdd_acr.RDD, {"w_n2o": 0.0, "w_v2a": 0.0}),
    "rdd-acr-no-residuals": (rdd_acr, rdd_acr.RDD, {"residual": False}),
    "cheers": (cheers, cheers.CHEERS, {}),
    "idc": (idc_pretrain, idc_pretrain.IDC, {}),
    "idc-fda": (idc_pretrain, idc_pretrain.IDC, {"mvcl": 0, "fda": 1}),
    "idc-fda-blind": (idc_pretrain, idc_pretrain.IDC, {"mvcl": 0, "fda": 1, "blind": True}),
}


def noted(measure, *arguments) -> dict[str, float]:
    """What a measure tells, by name."""
    numbers = {}

    def tell(name, value=None, no_model=None):
        numbers[name] = value if no_model is None else (value, no_model)

    measure(tell, *arguments)
    return numbers


class Pairs:
    """Features of 40 pairs of 4 channels: both images of a pair are alike, and pairs are not."""

    before = torch.randn(40, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    after = before


def test_channels_that_depend_on_the_place_alone_agree_between_strangers():
    place = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    noise = 0.001 * Pairs.before.flatten(2).mT
    told = noted(measures.tell_channels, "Y", lambda x: place + noise * (x.std() > 0), Pairs)
    assert told['C_ii of Y, "after" of another pair'] > 0.99
    assert told["C_ii of Y, features set to 0"] > 0.99
    assert told["variance of Y that a cell's place explains, %"] > 99


def test_channels_that_depend_on_the_pair_agree_with_their_own_image_alone():
    told = noted(measures.tell_channels, "Y", lambda x: x.flatten(2).mT, Pairs)
    assert told["C_ii of Y"] > 0.99
    assert told["C_ii of Y without cells' means"] > 0.99
    assert abs(told['C_ii of Y, "after" of another pair']) < 0.1
    assert told["variance of Y that a cell's place explains, %"] < 10


def test_uniform_attention_is_in_the_box_by_chance():
    """A box of 12 x 8 pixels covers one cell and half of another, 1.5 of 64."""
    inside = measures.covered([[8, 8, 12, 8], None])
    assert inside.sum(1).tolist() == [1.5, 0]
    both = measures.Inside(inside, inside.roll(1, 0))
    told = noted(measures.tell_inside, "x", torch.ones(2, 64), both)
    share, by_chance = told["x in the changed object's box, %"]
    assert share == pytest.approx(100 * 0.75 / 64)
    assert by_chance == pytest.approx(share)


def test_the_first_of_a_row_is_counted():
    assert measures.share_of_first([torch.eye(4), torch.eye(4).roll(1, 0)]) == 50


def test_a_masked_cell_is_found_by_the_other_image_only_if_this_is_like_it():
    strangers = SimpleNamespace(before=Pairs.before, after=Pairs.after.roll(1, 0))
    assert measures.found_by_place(Pairs, 0.7) == 100
    assert measures.found_by_place(strangers, 0.7) < 5


def test_slopes_are_the_squared_norms_of_derivatives():
    """Object k of this model is a linear map of cell k of both images, with known weights."""
    torch.manual_seed(0)
    weights = torch.randn(3, 4, 4)

    class Linear:
        def encode(self, before, after):
            cells = (before + 2 * after).flatten(2).mT[:, :3]  # (B, 3, C)
            objects = SimpleNamespace(vectors=torch.einsum("bkc,kcd->bkd", cells, weights))
            return None, objects, objects

    repeated = Pairs.before[:1].repeat(2000, 1, 1, 1)  # the mean over many random u
    slopes = measures.slopes_of(Linear(), repeated, repeated)["objects"].mean(0)
    expected = torch.zeros(3, 64)
    for k in range(3):
        expected[k, k] = (1 + 2**2) * weights[k].square().sum()
    torch.testing.assert_close(slopes, expected, rtol=0.1, atol=0)


def test_each_word_of_a_caption_is_of_a_kind():
    caption = "the large red cube that is left of the gray sphere became metal"
    name, value, place, other, rest = measures.WORD_KINDS
    kinds = [rest, name, name, name, rest, rest, place, rest, rest, other, other, rest, value]
    assert measures.word_kinds(caption) == kinds


def test_a_cell_of_a_table_is_a_mean_with_its_range():
    rows = {"a, %": {"no model": [6.25], "x": [80.0, 90.0]}, "b": {"x": [0.5]}}
    *_, a, b = controls.table_of(rows).splitlines()
    assert a == "| a, % | 85.0 (10.0) | 6.2 |"
    assert b == "| b | 0.500 |  |"


def test_numbers_tables_and_pictures(tmp_path, monkeypatch):
    root = tmp_path / "mini"
    data.main(["mini", "--data_dir", str(root), "--scenes", "320", "--device", "cpu"])
    dataset = data.load("mini", root)
    log = [
        {"step": 0, "event": "start", "config": {}},
        {"step": 300, "event": "eval", "CIDEr": 100.0},
        {"step": 400, "event": "eval", "CIDEr": 200.0},
    ]
    for name, (method, Model, fields) in RUNS.items():
        cfg = preset(method.Config, method.PRESETS, {}, "mini")
        vars(cfg).update(data_dir=str(root), device="cpu", **fields)
        torch.manual_seed(0)
        model = Model(cfg, len(dataset.vocab), dataset.grid, dataset.max_len)
        state = {"model": model.state_dict(), "config": vars(cfg), "step": 400}
        state |= dataset.state()
        if method is cheers:
            state |= cheers.entities_of(dataset, cfg).state()
        folder = tmp_path / f"{name}-1-abc"
        folder.mkdir()
        (folder / "scores_test.json").touch()
        (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
        for file in ("best.pt", "pretrained.pt"):
            torch.save(state, folder / file)
    page = tmp_path / "tour.md"
    tables = ["learning", "positions", *controls.COLUMNS]
    marks = [f"<!-- {table}, by tools/controls.py -->\n<!-- end -->\n" for table in tables]
    page.write_text("".join(marks))
    monkeypatch.setattr(controls, "PAGE", page)
    monkeypatch.setattr(controls, "NUMBERS", tmp_path / "controls.json")
    monkeypatch.setattr(sys, "argv", ["controls.py", str(tmp_path)])
    controls.main()
    written = page.read_text()
    assert "| RDD+ACR | 100.0 | 200.0 |" in written
    assert '| "after" found among 16, by S of Eq. 3, % |' in written

    monkeypatch.setattr(sys, "argv", ["controls.py"])  # from the numbers alone
    page.write_text("".join(marks))
    controls.main()
    assert page.read_text() == written

    monkeypatch.setattr(tour, "ASSETS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tour.py", str(tmp_path)])
    tour.main()
    pictures = sorted(tmp_path.glob("tour_*"))
    assert len(pictures) == 7
    for picture in pictures:
        with Image.open(picture) as image:
            assert image.width > 500
            assert len(image.convert("RGB").getcolors(10**6)) > 50
