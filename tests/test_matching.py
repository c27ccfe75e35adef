"""token_match against its formula with every score at once: the CPU's formulation and, in Triton's
interpreter, which needs no GPU, the kernels for CUDA.

    TRITON_INTERPRET=1 python tests/test_matching.py    checks the kernels
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from helpers import dense_gradients

import matching
from matching import token_match


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("slice_of", [100, matching.SCORES_OF_A_SLICE])
def test_token_match_is_the_definition(heads, slice_of, monkeypatch):
    monkeypatch.setattr(matching, "SCORES_OF_A_SLICE", slice_of)
    q = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64)
    ours = token_match(q, k, heads)
    gradients = torch.autograd.grad((ours * weight).sum(), (q, k))
    torch.testing.assert_close((ours, *gradients), dense_gradients(q, k, weight, heads))


def test_the_operators_are_what_torch_compile_expects():
    q = torch.randn(4, 5, 6, requires_grad=True)
    k = torch.randn(3, 7, 6, requires_grad=True)
    checks = torch.library.opcheck(matching._token_match, (q, k, 2))
    assert set(checks.values()) == {"SUCCESS"}


def test_half_precision_tokens_give_float32_under_autocast_too():
    q = torch.randn(4, 5, 64).bfloat16().requires_grad_()
    k = torch.randn(3, 7, 64).bfloat16().requires_grad_()
    weight = torch.randn(4, 3)
    result, *expected = dense_gradients(q, k, weight)
    with torch.autocast("cpu", torch.bfloat16):
        ours = token_match(q, k)
    torch.testing.assert_close(ours, result.float())  # products of such tokens are exact in float32
    gradients = torch.autograd.grad((ours * weight).sum(), (q, k))
    torch.testing.assert_close(gradients, [g.bfloat16() for g in expected])


def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(SHAPES)


@pytest.mark.parametrize("channels, dtype", [(64, torch.bfloat16), (512, torch.float32)])
def test_the_kernels_compile_for_small_gpus(channels, dtype):
    """The interpreter accepts code that Triton's compiler refuses."""
    machine_code = pytest.importorskip("machine_code", reason="needs Triton")
    for kernel in machine_code.compile_kernels(86, channels, dtype):
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= 99 * 1024


# ---- when the kernels are used -------------------------------------------------------------------


@pytest.mark.parametrize(
    "images, tokens, channels, dtype, fit",
    [
        (128, 196, 512, torch.bfloat16, True),
        (128, 256, 512, torch.float32, True),
        (128, 257, 512, torch.float32, False),
        (128, 196, 512, torch.float64, False),
        (128, 196, 512, torch.float16, False),
        (3310, 196, 64, torch.bfloat16, True),  # 2**31 - 9e4 winners
        (3311, 196, 64, torch.bfloat16, False),
    ],
)
def test_what_the_kernels_can_match(images, tokens, channels, dtype, fit):
    pytest.importorskip("triton")
    q = torch.empty(images, tokens, channels, dtype=dtype, device="meta")
    assert matching.kernels_fit(q, q, 1) == fit


def test_offsets_of_channels_have_32_bits_too():
    pytest.importorskip("triton")
    q = torch.empty(21_400, 196, 512, device="meta")
    k = torch.empty(2, 196, 512, device="meta")
    assert matching.kernels_fit(q[:-1], k, 1)
    assert not matching.kernels_fit(q, k, 1)
    assert not matching.kernels_fit(k, q, 1)


RESULTS = ["similarity", "best_key", "best_query", "grad_q", "grad_k"]


@pytest.mark.parametrize("wrong", ["nothing", "the compiler", *RESULTS])
def test_kernels_that_lose_results_are_noticed(wrong, monkeypatch, capsys):
    """The slower form stands in for the kernels. Of one result, they lose an image in sixteen."""

    def lose(names, results):
        for name, x in zip(names, results, strict=True):
            if name == wrong:
                x[0] = 0
        return results

    def match_by_kernel(*args):
        if wrong == "the compiler":
            raise pytest.importorskip("triton").TritonError("it cannot be compiled")
        return lose(RESULTS[:3], matching.match_each_head(*args))

    def gradients_by_kernel(*args):
        return lose(RESULTS[3:], matching.gradients_each_head(*args))

    monkeypatch.setattr(matching, "match_by_kernel", match_by_kernel)
    monkeypatch.setattr(matching, "gradients_by_kernel", gradients_by_kernel)
    try_kernels = matching.kernels_work.__wrapped__  # keeps no result
    assert try_kernels(torch.device("cpu"), torch.float32, 20, 37, 16) == (wrong == "nothing")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (wrong != "nothing")


# ---- the process with the interpreter ------------------------------------------------------------

# A, B, N, M, heads, channels of a head
SHAPES = [
    (2, 3, 20, 37, 1, 16),
    (3, 2, 37, 20, 3, 5),
    (1, 1, 49, 200, 2, 64),
    (1, 2, 130, 33, 1, 100),  # the channels are read in several blocks
]


def check_kernels(A, B, N, M, heads, C, dtype, tolerance):
    torch.manual_seed(0)
    q = torch.randn(A, N, heads * C).to(dtype)
    k = torch.randn(B, M, heads * C).to(dtype)
    q[:, 3] *= 5  # so that many keys choose one query
    weight = torch.randn(A, B)
    similarity, *winners = matching.match_by_kernel(q, k, heads)
    gradients = matching.gradients_by_kernel(weight, q, k, *winners)
    assert similarity.dtype == torch.float32
    expected = dense_gradients(q, k, weight, heads)
    for ours, dense in zip((similarity, *gradients), expected, strict=True):
        error = (ours.double() - dense).norm() / dense.norm()
        assert error < tolerance, (A, B, N, M, heads, C, dtype, error)


def check_ties():
    """Whoever wins, the gradient is a whole one: all tokens of an image are equal."""
    q = torch.ones(1, 20, 16)
    k = torch.ones(2, 37, 16)
    similarity, *winners = matching.match_by_kernel(q, k, 1)
    grad_q, grad_k = matching.gradients_by_kernel(torch.ones(1, 2), q, k, *winners)
    assert torch.allclose(similarity, torch.tensor(16.0), rtol=1e-4)
    assert torch.allclose(grad_q.sum(1), torch.tensor(2.0))
    assert torch.allclose(grad_k.sum(1), torch.tensor(1.0))


if __name__ == "__main__":
    check_ties()
    for shape in SHAPES:
        check_kernels(*shape, torch.float32, 1e-5)
        print(*shape)
    check_kernels(*SHAPES[0], torch.float16, 1e-3)  # the interpreter has no products in bfloat16
