"""Test of tour.py: a picture of each mechanism, of models that are not trained."""

import sys

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
    "scorer-cbr-100-steps": (scorer_cbr, scorer_cbr.SCORER, {}),
    "dirl-ccr": (dirl_ccr, dirl_ccr.DIRL, {}),
    "dirl-ccr-no-l-dirl": (dirl_ccr, dirl_ccr.DIRL, {"w_dirl": 0.0}),
    "rdd-acr": (rdd_acr, rdd_acr.RDD, {}),
    "rdd-acr-no-residuals": (rdd_acr, rdd_acr.RDD, {"residual": False}),
    "cheers": (cheers, cheers.CHEERS, {}),
    "idc": (idc_pretrain, idc_pretrain.IDC, {}),
}


def test_every_picture_shows_something(tmp_path, monkeypatch, capsys):
    root = tmp_path / "mini"
    data.main(["mini", "--data_dir", str(root), "--scenes", "10", "--device", "cpu"])
    dataset = data.load("mini", root)
    for name, (method, Model, fields) in RUNS.items():
        cfg = preset(method.Config, method.PRESETS, {}, "mini")
        vars(cfg).update(data_dir=str(root), device="cpu", **fields)
        torch.manual_seed(0)
        model = Model(cfg, len(dataset.vocab), dataset.grid, dataset.max_len)
        state = {"model": model.state_dict(), "config": vars(cfg), "step": len(name)}
        state |= dataset.state()
        if method is cheers:
            state |= cheers.entities_of(dataset, cfg).state()
        folder = tmp_path / f"{name}-1-abc"
        folder.mkdir()
        (folder / "scores_test.json").touch()
        for file in ("best.pt", "pretrained.pt"):
            torch.save(state, folder / file)
    monkeypatch.setattr(sys, "argv", ["tour.py", str(tmp_path), str(tmp_path)])
    tour.main()
    printed = capsys.readouterr().out
    assert "SCORER, seed 1111, step 0: share_of_the_partner 0." in printed
    assert "CHEERS, seed 1111, m over F: most " in printed
    pictures = sorted(tmp_path.glob("tour_*"))
    assert len(pictures) == 6
    for picture in pictures:
        with Image.open(picture) as image:
            assert image.width > 500
            assert len(image.convert("RGB").getcolors(10**6)) > 100
