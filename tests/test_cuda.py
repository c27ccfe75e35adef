"""The fast paths on a CUDA GPU against the plain ones. Tests of the CUDA path that need no GPU are
in test_fake_cuda.py."""

import pytest
import torch
from conftest import train_lines
from PIL import Image
from test_features import without_training
from test_match import dense_gradients
from test_methods import METHODS, flags_of

import cheers
import data
import idc_pretrain
import matching
import rdd_acr
from matching import token_match

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


@pytest.fixture(params=METHODS, ids=lambda method: method.__name__)
def method(request):
    return request.param


@pytest.fixture
def tiny(method, tiny):
    return flags_of(method, tiny)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()  # models of earlier tests count against its limits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, channels", [(49, 64), (196, 512), (300, 16)])
def test_token_match_on_the_gpu_equals_dense_on_the_cpu(dtype, tokens, channels):
    q = torch.randn(3, tokens, 2 * channels).to(dtype)
    k = torch.randn(5, 37, 2 * channels).to(dtype)
    q[:, 7] *= 10  # wins about half of the keys
    weight = torch.randn(3, 5)
    expected = dense_gradients(q, k, weight, 2)
    q = q.cuda().requires_grad_()
    k = k.cuda().requires_grad_()
    ours = token_match(q, k, 2)
    gradients = torch.autograd.grad((ours * weight.cuda()).sum(), (q, k))
    # Products of float32 tokens are in TF32: a few winners differ.
    tolerance = {torch.float64: 1e-10, torch.float32: 0.03, torch.bfloat16: 0.01}[dtype]
    for on_gpu, dense in zip((ours, *gradients), expected, strict=True):
        assert (on_gpu.cpu().double() - dense).norm() < tolerance * dense.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads, channels", [(8, 64), (1, 512)])
def test_the_kernels_give_the_same_bits_each_time(heads, channels, dtype):
    """At the papers' size. A product that reads what the next one overwrites shows now and then."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernels need Ampere")
    q = torch.randn(128, 196, heads * channels, device="cuda").to(dtype)
    k = torch.randn(128, 196, heads * channels, device="cuda").to(dtype)
    weight = torch.randn(128, 128, device="cuda")
    assert matching.kernels_fit(q, k, heads)
    first = None
    for _ in range(30):
        match = matching.match_by_kernel(q, k, heads)
        gradients = matching.gradients_by_kernel(weight, q, k, *match[1:])
        results = (*match, *gradients)
        if first is None:
            first = results
        assert all(map(torch.equal, results, first))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_kernels_run_on_the_gpu_of_their_tensors():
    q = torch.randn(3, 49, 64)
    expected = token_match(q, q)
    q = q.to("cuda:1")  # the current GPU is cuda:0
    assert (token_match(q, q).cpu() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("flags", [["--no-amp", "--no-compile"], [], ["--features", "file"]])
def test_a_run_on_the_gpu_follows_one_on_the_cpu(method, prepared, tiny, tmp_path, flags, capsys):
    if method is idc_pretrain:
        pytest.skip("masks are drawn on the device, so they differ")
    shared = [*tiny, "--data_dir", str(prepared), "--dropout", "0", "--steps", "4"]
    method.main([*shared, "--out_dir", str(tmp_path / "cpu")])
    method.main([*shared, "--out_dir", str(tmp_path / "gpu"), "--device", "cuda", *flags])
    assert "compile is off" not in capsys.readouterr().out
    for cpu, gpu in zip(train_lines(tmp_path / "cpu"), train_lines(tmp_path / "gpu"), strict=True):
        # bfloat16 has two to three digits.
        assert gpu["caption"] == pytest.approx(cpu["caption"], rel=0.02)


def test_resume_on_the_gpu(method, prepared, tiny, tmp_path):
    out = ["--out_dir", str(tmp_path / "run"), "--device", "cuda"]
    method.main([*tiny, "--data_dir", str(prepared), *out, "--steps", "4", "--schedule", "step"])
    method.main(["--resume", *out, "--steps", "8"])
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
    """What the runs above leave out, on mini, whose features are made on the GPU; then a pair is
    captioned there."""
    mini = str(tmp_path / "mini")
    data.main(["mini", "--data_dir", mini, "--scenes", "60", "--device", "cuda"])
    flags = "--dim 32 --steps 4 --log_every 1 --eval_every 4".split()
    flags += ["--data_dir", mini]
    if method is idc_pretrain:
        flags += "--mlm 1 --mvcl 1 --fda 1 --pretrain_steps 12".split()
    method.main([*flags, "--out_dir", str(tmp_path / "gpu"), "--device", "cuda"])
    on_gpu = train_lines(tmp_path / "gpu")
    names = {name for row in on_gpu for name in row}
    assert own <= names
    if method is not idc_pretrain:  # its masks are drawn on the device, so they differ
        method.main([*flags, "--out_dir", str(tmp_path / "cpu"), "--device", "cpu"])
        for cpu, gpu in zip(train_lines(tmp_path / "cpu"), on_gpu, strict=True):
            for name in own | {"caption", "total"}:
                assert gpu[name] == pytest.approx(cpu[name], rel=0.02, abs=0.01)

    picture = str(min((tmp_path / "mini" / "images").iterdir()))
    checkpoint = str(tmp_path / "gpu" / "best.pt")
    out = tmp_path / "out.png"
    call = ["--caption", picture, picture, "--checkpoint", checkpoint, "--out", str(out)]
    method.main([*call, "--device", "cuda"])
    assert out.stat().st_size > 1000


def test_features_made_on_the_gpu_are_those_of_the_cpu(tmp_path, monkeypatch):
    without_training(monkeypatch)
    for i in range(5):
        Image.effect_noise((60, 40), 50).convert("RGB").save(tmp_path / f"{i}.png")
    paths = [tmp_path / f"{i}.png" for i in range(5)]
    plain = next(data.Extractor("resnet101-layer3").blocks(paths, 5)).float()
    blocks = data.Extractor("resnet101-layer3", "cuda").blocks(paths, 2)
    fast = torch.cat(list(blocks)).float()
    assert (fast - plain).norm() < 0.01 * plain.norm()  # float16 has three digits
