"""The fast paths on a CUDA GPU against the plain ones. Tests of the CUDA path that need no GPU are
in test_fake_cuda.py."""

import json

import pytest
import torch
from PIL import Image
from test_common import dense_match
from test_features import without_training
from test_methods import MODELS, flags_of

import cheers
import common
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
    """The lines of a run's log that hold losses."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").open()]
    return [row for row in rows if row["event"] == "train"]


@pytest.mark.parametrize("slice_of", [common.MATCH_ON_CUDA.scores, 200_000])
def test_token_match_on_the_gpu_equals_dense_on_the_cpu(slice_of, monkeypatch):
    speed = common.MATCH_ON_CUDA._replace(scores=slice_of)
    monkeypatch.setattr(common, "MATCH_ON_CUDA", speed)
    q = torch.randn(20, 50, 32, dtype=torch.float64)
    k = torch.randn(20, 50, 32, dtype=torch.float64)
    q[:, 7] *= 10  # wins about half of the keys, so that its bag has several parts
    q.requires_grad_()
    k.requires_grad_()
    weight = torch.randn(20, 20, dtype=torch.float64)
    expected = dense_match(q, k)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), (q, k))
    ours = token_match(q.cuda(), k.cuda())
    gradients = torch.autograd.grad((ours * weight.cuda()).sum(), (q, k))
    torch.testing.assert_close(ours.cpu(), expected)
    torch.testing.assert_close(gradients, expected_gradients)


def test_maxima_on_the_gpu_agree_on_ties():
    scores = torch.randint(0, 3, (7, 196, 200)).float()
    maxima, rows = common.max_over_rows(scores, pooling=True)
    gpu_maxima, gpu_rows = common.max_over_rows(scores.cuda(), pooling=False)
    assert torch.equal(gpu_maxima.cpu(), maxima)
    assert torch.equal(gpu_rows.cpu(), rows)


@pytest.mark.parametrize(
    "flags", [["--no-amp", "--no-compile"], [], ["--features", "gpu"], ["--features", "file"]]
)
def test_a_run_on_the_gpu_follows_one_on_the_cpu(method, prepared, tiny, tmp_path, flags):
    if method is idc_pretrain:
        pytest.skip("masks are drawn on the device, so they differ")
    shared = [*tiny, "--data_dir", str(prepared), "--dropout", "0", "--steps", "4"]
    method.main([*shared, "--out_dir", str(tmp_path / "cpu")])
    method.main([*shared, "--out_dir", str(tmp_path / "gpu"), "--device", "cuda", *flags])
    for cpu, gpu in zip(losses(tmp_path / "cpu"), losses(tmp_path / "gpu"), strict=True):
        # bfloat16 has two to three digits.
        assert gpu["caption"] == pytest.approx(cpu["caption"], rel=0.02)


@pytest.mark.parametrize("flags", [[], ["--no-compile"]])
def test_resume_on_the_gpu(method, prepared, tiny, tmp_path, flags):
    out = ["--out_dir", str(tmp_path / "run"), "--device", "cuda"]
    method.main([*tiny, "--data_dir", str(prepared), *out, *flags, "--steps", "4"])
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
    flags = "--scenes 60 --dim 32 --steps 4 --log_every 1 --eval_every 4".split()
    flags += ["--data_dir", str(tmp_path / "mini")]
    if method is idc_pretrain:
        flags += "--mlm 1 --mvcl 1 --fda 1 --pretrain_steps 12".split()
    method.main([*flags, "--out_dir", str(tmp_path / "gpu"), "--device", "cuda"])
    on_gpu = losses(tmp_path / "gpu")
    names = {name for row in on_gpu for name in row}
    assert own <= names
    if method is not idc_pretrain:  # its masks are drawn on the device, so they differ
        method.main([*flags, "--out_dir", str(tmp_path / "cpu"), "--device", "cpu"])
        for cpu, gpu in zip(losses(tmp_path / "cpu"), on_gpu, strict=True):
            for name in own | {"caption", "total"}:
                assert gpu[name] == pytest.approx(cpu[name], rel=0.02, abs=0.01)

    picture = str(min((tmp_path / "mini" / "images").iterdir()))
    checkpoint = str(tmp_path / "gpu" / "best.pt")
    out = tmp_path / "out.png"
    call = ["--caption", picture, picture, "--checkpoint", checkpoint, "--out", str(out)]
    method.main([*call, "--device", "cuda"])
    assert out.stat().st_size > 1000


def test_features_from_the_file_are_page_locked_for_a_gpu(prepared):
    dataset = data.load("clevr_change", prepared, "file", "cuda")
    (batch, *_) = next(dataset.train_batches(3, seed=0, epoch=0))
    assert batch.before.is_pinned() and batch.after.is_pinned()
    dataset = data.load("clevr_change", prepared, "gpu", "cuda")
    (same, *_) = next(dataset.train_batches(3, seed=0, epoch=0))
    assert torch.equal(batch.before, same.before.cpu())


def test_features_made_on_the_gpu_are_those_of_the_cpu(tmp_path, monkeypatch):
    without_training(monkeypatch)
    for i in range(5):
        Image.effect_noise((60, 40), 50).convert("RGB").save(tmp_path / f"{i}.png")
    paths = [tmp_path / f"{i}.png" for i in range(5)]
    plain = data.Extractor("resnet101-layer3")(paths).float()
    blocks = data.Extractor("resnet101-layer3", "cuda").blocks(paths, 2)
    fast = torch.cat(list(blocks)).float()
    assert (fast - plain).norm() < 0.01 * plain.norm()  # float16 has three digits
