"""The fast paths on a CUDA GPU against the plain ones. Tests of the CUDA path that need no GPU are
in test_fake_cuda.py. It also has helpers.py's comparisons of runs find what is wrong on purpose."""

import pytest
import torch
from helpers import (
    dense_gradients,
    differing_terms,
    flags_of,
    resume_and_compare,
    run,
    train_lines,
    without_training,
    write_birds,
    write_cub,
    write_features,
    write_nabirds,
)
from PIL import Image
from torch import Tensor

import cheers
import data
import idc_pretrain
import matching
import rdd_acr
import scorer_cbr
from matching import token_match
from support.extractors import Extractor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


@pytest.fixture
def tiny(method, tiny):
    return flags_of(method, tiny)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()  # models of earlier tests count against its limits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, channels", [(49, 64), (196, 512), (300, 16)])
def test_token_match_on_the_gpu_equals_dense_on_the_cpu(dtype, tokens, channels):
    # In this draw, no token has two best scores so close (3e-5) that kernels may choose either one.
    # In others, the gradient may be 3 % off.
    torch.manual_seed(1)
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


# ---- runs ----------------------------------------------------------------------------------------


# What a GPU draws, the CPU never does, so IDC's masks are drawn on the CPU and moved. torch.compile
# does not look into operators, in which it would draw in its own way.
draw_words = idc_pretrain.mask_words
draw_cells = idc_pretrain.mask_cells


@torch.library.custom_op("tests::mask_words", mutates_args=())
def masked_words(caption: Tensor, vocab_size: int, rate: float) -> tuple[Tensor, Tensor]:
    ids, target = draw_words(caption.cpu(), vocab_size, rate)
    return ids.to(caption.device), target.to(caption.device)


@masked_words.register_fake
def _(caption, vocab_size, rate):
    return torch.empty_like(caption), torch.empty_like(caption)


@torch.library.custom_op("tests::mask_cells", mutates_args=())
def masked_cells(like: Tensor, pairs: int, images: int, cells: int, rate: float) -> Tensor:
    return draw_cells(pairs, images, cells, rate, "cpu").to(like.device)


@masked_cells.register_fake
def _(like, pairs, images, cells, rate):
    return like.new_empty(pairs * max(1, round(rate * cells)), dtype=torch.long)


@pytest.fixture
def masks_of_the_cpu(monkeypatch):
    """IDC masks the same words and cells on every device."""

    def mask_cells(pairs, images, cells, rate, device):
        return masked_cells(torch.empty(0, device=device), pairs, images, cells, rate)

    monkeypatch.setattr(idc_pretrain, "mask_words", masked_words)
    monkeypatch.setattr(idc_pretrain, "mask_cells", mask_cells)


@pytest.mark.parametrize(
    "flags", [["--no-amp", "--no-compile"], [], ["--features", "file", "--no-compile"]]
)
def test_a_run_on_the_gpu_follows_one_on_the_cpu(method, prepared, tiny, tmp_path, flags, capsys):
    shared = [*tiny, "--data_dir", prepared, "--dropout", 0]
    shared += "--lr 1e-3 --steps 4 --log_every 1".split()
    run(method, *shared, "--out_dir", tmp_path / "cpu")
    run(method, *shared, "--out_dir", tmp_path / "gpu", "--device", "cuda", *flags)
    assert "compile is off" not in capsys.readouterr().out
    # bfloat16 has two to three digits.
    assert not differing_terms(tmp_path / "cpu", tmp_path / "gpu", rel=0.02)


@pytest.mark.parametrize(
    "method, own, flags, rel",
    [
        # At first, these losses hardly depend on the images, so steps are many or rel is small.
        (rdd_acr, {"n2o", "v2a"}, "--steps 24 --lr 3e-3 --warmup 0", 0.005),
        (cheers, {"common", "different"}, "--steps 24 --lr 3e-3 --warmup 0", 0.005),
        (
            idc_pretrain,
            {"mlm", "mvcl", "fda", "judge"},
            "--steps 4 --mlm 1 --mvcl 1 --fda 1 --pretrain_steps 12 --layers 1",  # four graphs
            0.01,
        ),
    ],
)
def test_phrases_entities_and_pretraining_on_the_gpu(
    method, own, flags, rel, tmp_path, masks_of_the_cpu
):
    """What the runs above leave out, on mini, whose features are made on the GPU; then a pair is
    captioned there."""
    mini = tmp_path / "mini"
    data.main(["mini", "--data_dir", str(mini), "--scenes", "60", "--device", "cuda"])
    shared = [*flags.split(), "--data_dir", mini, "--dim", 32, "--log_every", 1]
    run(method, *shared, "--out_dir", tmp_path / "cpu", "--device", "cpu")
    run(method, *shared, "--out_dir", tmp_path / "gpu", "--device", "cuda")
    assert own <= set().union(*train_lines(tmp_path / "gpu"))
    assert not differing_terms(tmp_path / "cpu", tmp_path / "gpu", rel)

    picture = min((mini / "images").iterdir())
    out = tmp_path / "out.png"
    checkpoint = tmp_path / "gpu" / "best.pt"
    call = ["--caption", picture, picture, "--checkpoint", checkpoint, "--out", out]
    run(method, *call, "--device", "cuda")
    assert out.stat().st_size > 1000


PRETRAINING = "--pretrain_steps 8 --pretrain_batch 3 --mlm 1 --mvcl 1 --fda 0".split()
PRETRAINING += "--pretrain_lr 1e-3 --pretrain_warmup 0".split()


@pytest.mark.parametrize("method", [idc_pretrain])
def test_birds_on_the_gpu(method, tiny, tmp_path, masks_of_the_cpu):
    """Single images and classes, which IDC may be pre-trained on first."""
    shared = [*tiny, *PRETRAINING, "--cub_batch", 1, "--mask_rate", 0.5, "--extractor", ""]
    shared += ["--dropout", 0, "--log_every", 1]
    shared[shared.index("clevr_change")] = "birds_to_words"
    for name, flag, write_files in (
        ("birds_to_words", "--data_dir", write_birds),
        ("cub", "--cub", write_cub),
        ("nabirds", "--nabirds", write_nabirds),
    ):
        write_files(tmp_path / name)
        write_features(name, tmp_path / name)
        shared += [flag, tmp_path / name]
    run(method, *shared, "--out_dir", tmp_path / "cpu")
    run(method, *shared, "--out_dir", tmp_path / "gpu", "--device", "cuda", "--no-compile")
    names = set().union(*train_lines(tmp_path / "gpu"))
    assert {"mlm", "mvcl", "class", "contrast", "same_class"} <= names
    assert not differing_terms(tmp_path / "cpu", tmp_path / "gpu", rel=0.02)


def test_resume_on_the_gpu_equals_no_interruption(method, prepared, tiny, tmp_path, monkeypatch):
    """With dropout and, for IDC, masks."""
    flags = [*tiny, "--data_dir", prepared, "--device", "cuda", "--dropout", 0.1, "--lr", 1e-3]
    if method is idc_pretrain:
        flags += PRETRAINING
    if method is not scorer_cbr:
        flags += ["--no-compile"]  # three compilations take a minute
    resume_and_compare(method, flags, tmp_path, monkeypatch)


# ---- features ------------------------------------------------------------------------------------


def test_features_made_on_the_gpu_are_those_of_the_cpu(tmp_path, monkeypatch):
    without_training(monkeypatch)
    for i in range(5):
        Image.effect_noise((60, 40), 50).convert("RGB").save(tmp_path / f"{i}.png")
    paths = [tmp_path / f"{i}.png" for i in range(5)]
    plain = next(Extractor("resnet101-layer3").blocks(paths, 5)).float()
    blocks = Extractor("resnet101-layer3", "cuda").blocks(paths, 2)
    fast = torch.cat(list(blocks)).float()
    assert (fast - plain).norm() < 0.01 * plain.norm()  # float16 has three digits
