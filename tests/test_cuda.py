"""The fast paths on a CUDA GPU against the plain ones."""

import json

import pytest
import torch
from PIL import Image
from test_common import dense_match
from test_features import random_resnet
from test_methods import MODELS, flags_of

import cheers
import data
import idc_pretrain
import rdd_acr
from common import token_match

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


@pytest.fixture(params=MODELS, ids=lambda method: method.__name__)
def method(request):
    return request.param


@pytest.fixture
def tiny(method, tiny):
    return flags_of(method, tiny)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()  # models of earlier tests count against its limits


def losses(folder):
    return [x for x in map(json.loads, (folder / "log.jsonl").open()) if x["event"] == "train"]


def test_token_match_on_the_gpu_equals_dense_on_the_cpu():
    q, k = (torch.randn(20, 50, 32, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(20, 20, dtype=torch.float64)
    expected = torch.autograd.grad((dense_match(q, k) * weight).sum(), (q, k))
    ours = token_match(q.cuda(), k.cuda())
    torch.testing.assert_close(ours.cpu(), dense_match(q, k))
    for a, b in zip(
        torch.autograd.grad((ours * weight.cuda()).sum(), (q, k)), expected, strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "flags", [["--no-amp", "--no-compile"], [], ["--features", "gpu"], ["--features", "file"]]
)
def test_a_run_on_the_gpu_follows_one_on_the_cpu(method, prepared, tiny, tmp_path, flags):
    common = [*tiny, "--data_dir", str(prepared), "--dropout", "0", "--steps", "4"]
    if method is idc_pretrain:
        pytest.skip("masks are drawn by the device")
    method.main([*common, "--out_dir", str(tmp_path / "cpu")])
    method.main([*common, "--device", "cuda", "--out_dir", str(tmp_path / "gpu"), *flags])
    for a, b in zip(losses(tmp_path / "cpu"), losses(tmp_path / "gpu"), strict=True):
        assert b["caption"] == pytest.approx(a["caption"], rel=0.02)  # bfloat16 has three digits


@pytest.mark.parametrize("flags", [[], ["--no-compile"]])
def test_resume_on_the_gpu(method, prepared, tiny, tmp_path, flags):
    run = [
        *tiny,
        "--data_dir",
        str(prepared),
        "--device",
        "cuda",
        "--out_dir",
        str(tmp_path / "run"),
        *flags,
    ]
    method.main([*run, "--steps", "4"])
    method.main(
        ["--resume", "--out_dir", str(tmp_path / "run"), "--device", "cuda", "--steps", "8"]
    )
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"] == 8


@pytest.mark.parametrize(
    "method, own",
    [
        (rdd_acr, {"n2o", "v2a"}),
        (cheers, {"common", "different", "match"}),
        (idc_pretrain, {"mlm", "mvcl", "fda"}),
    ],
)
def test_phrases_entities_and_pretraining_on_the_gpu(method, own, tmp_path):
    """What the runs above leave out, on the embedded data set, which the GPU prepares; and a pair
    captioned there."""
    flags = "--scenes 60 --objects 2,4 --dim 32 --steps 4 --log_every 1 --eval_every 4".split()
    flags += (
        ["--mlm", "1", "--mvcl", "1", "--fda", "1", "--pretrain_steps", "12"]
        if method is idc_pretrain
        else []
    )
    devices = ("cuda",) if method is idc_pretrain else ("cuda", "cpu")
    for device in devices:
        out = ["--data_dir", str(tmp_path / "mini"), "--out_dir", str(tmp_path / device)]
        method.main([*flags, *out, "--device", device])
    gpu, cpu = (losses(tmp_path / device) for device in (devices[0], devices[-1]))
    assert own <= {name for x in gpu for name in x}
    for a, b in zip(cpu, gpu, strict=True):
        for name in a.keys() & (own | {"caption", "total"}):
            assert b[name] == pytest.approx(a[name], rel=0.02, abs=0.01)
    picture, run = sorted((tmp_path / "mini" / "images").iterdir())[0], tmp_path / "cuda"
    method.main(
        [
            "--caption",
            str(picture),
            str(picture),
            "--checkpoint",
            str(run / "best.pt"),
            "--device",
            "cuda",
            "--out",
            str(tmp_path / "out.png"),
        ]
    )
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_features_made_on_the_gpu_are_those_of_the_cpu(tmp_path):
    state = random_resnet()
    for i in range(5):
        Image.effect_noise((60, 40), 50).convert("RGB").save(tmp_path / f"{i}.png")
    paths = [tmp_path / f"{i}.png" for i in range(5)]
    plain = data.Extractor("resnet101-layer3", state)(paths).float()
    fast = torch.cat(
        list(data.Extractor("resnet101-layer3", state, "cuda").blocks(paths, 2))
    ).float()
    assert (fast - plain).norm() < 0.01 * plain.norm()  # float16 has three digits
