"""The fast paths on a CUDA GPU against the plain ones."""

import json

import pytest
import torch
from PIL import Image
from test_common import dense_match
from test_features import random_resnet

import data
import dirl_ccr
import scorer_cbr
from common import token_match

METHODS = pytest.mark.parametrize("method", [scorer_cbr, dirl_ccr], ids=lambda method: method.__name__)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def test_token_match_on_the_gpu_equals_dense_on_the_cpu():
    q, k = (torch.randn(20, 50, 32, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(20, 20, dtype=torch.float64)
    expected = torch.autograd.grad((dense_match(q, k) * weight).sum(), (q, k))
    ours = token_match(q.cuda(), k.cuda())
    torch.testing.assert_close(ours.cpu(), dense_match(q, k))
    for a, b in zip(torch.autograd.grad((ours * weight.cuda()).sum(), (q, k)), expected, strict=True):
        torch.testing.assert_close(a, b)


@METHODS
@pytest.mark.parametrize("flags", [["--no-amp", "--no-compile"], [], ["--features", "gpu"], ["--features", "stream"]])
def test_a_run_on_the_gpu_follows_one_on_the_cpu(method, prepared, tiny, tmp_path, flags):
    common = [*tiny, "--data_dir", str(prepared), "--dropout", "0", "--steps", "4"]
    method.main([*common, "--out_dir", str(tmp_path / "cpu")])
    method.main([*common, "--device", "cuda", "--out_dir", str(tmp_path / "gpu"), *flags])
    cpu, gpu = (
        [x for x in map(json.loads, open(tmp_path / name / "log.jsonl")) if x["event"] == "train"] for name in ("cpu", "gpu")
    )
    for a, b in zip(cpu, gpu, strict=True):
        assert b["caption"] == pytest.approx(a["caption"], rel=0.02)  # bfloat16 has three digits


@METHODS
@pytest.mark.parametrize("flags", [[], ["--no-compile"]])
def test_resume_on_the_gpu(method, prepared, tiny, tmp_path, flags):
    run = [*tiny, "--data_dir", str(prepared), "--device", "cuda", "--out_dir", str(tmp_path / "run"), *flags]
    method.main([*run, "--steps", "4"])
    method.main(["--resume", "--out_dir", str(tmp_path / "run"), "--device", "cuda", "--steps", "8"])
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"] == 8


def test_features_made_on_the_gpu_are_those_of_the_cpu(tmp_path):
    state = random_resnet()
    for i in range(5):
        Image.effect_noise((60, 40), 50).convert("RGB").save(tmp_path / f"{i}.png")
    paths = [tmp_path / f"{i}.png" for i in range(5)]
    plain = data.Extractor("resnet101-layer3", state)(paths).float()
    fast = torch.cat(list(data.Extractor("resnet101-layer3", state, "cuda").blocks(paths, 2))).float()
    assert (fast - plain).norm() < 0.01 * plain.norm()  # float16 has three digits
