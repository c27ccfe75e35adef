"""token_match against its formula with every score at once: the CPU's formulation and, in Triton's
interpreter, which needs no GPU, the kernels for CUDA.

    TRITON_INTERPRET=1 python tests/test_match.py    checks the kernels
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch

import common
from common import token_match
from scorer_cbr import match_by_definition


def dense_gradients(q, k, weight, heads=1):
    """match_by_definition in float64 and, of its weighted sum, the gradients of q and k."""
    q = q.detach().double().requires_grad_()
    k = k.detach().double().requires_grad_()
    result = match_by_definition(q, k, heads)
    return result.detach(), *torch.autograd.grad((result * weight).sum(), (q, k))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("slice_of", [100, common.SCORES_OF_A_SLICE])
def test_token_match_is_the_definition(heads, slice_of, monkeypatch):
    monkeypatch.setattr(common, "SCORES_OF_A_SLICE", slice_of)
    q = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64)
    ours = token_match(q, k, heads)
    gradients = torch.autograd.grad((ours * weight).sum(), (q, k))
    torch.testing.assert_close((ours, *gradients), dense_gradients(q, k, weight, heads))


def test_the_operators_are_what_torch_compile_expects():
    q = torch.randn(4, 5, 6, requires_grad=True)
    k = torch.randn(3, 7, 6, requires_grad=True)
    checks = torch.library.opcheck(common._token_match, (q, k))
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


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus(capability):
    """The interpreter accepts code that Triton's compiler refuses. At 196 tokens of 64 channels."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types = {name: "i32" for name in ("B", "N", "M", "step_a", "step_b")}
    types |= {name: "*bf16" for name in ("q", "k", "grad_q")}
    types |= {"similarity": "*fp32", "grad": "*fp32", "best_key": "*i16", "best_query": "*i16"}
    for kernel, sizes in (
        (common.match_kernel, {"C": 64, "ALL_N": 256, "SOME_M": 32, "SOME_C": 64}),
        (common.match_kernel, {"C": 128, "ALL_N": 256, "SOME_M": 128, "SOME_C": 32}),
        (common.gradient_kernel, {"C": 64, "SOME_N": 128, "SOME_M": 32, "SOME_C": 64}),
    ):
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, sizes)
        assert compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


# ---- the process with the interpreter ------------------------------------------------------------

# A, B, N, M, C
SHAPES = [
    (2, 3, 20, 37, 16),
    (3, 2, 37, 20, 5),
    (1, 1, 49, 200, 64),
    (1, 2, 130, 33, 100),  # the channels are read in several blocks
    (1, 1, 30, 300, 8),  # too many keys for the kernels
]


def check_kernels(A, B, N, M, C, dtype, tolerance):
    torch.manual_seed(0)
    q = torch.randn(A, N, C).to(dtype)
    k = torch.randn(B, M, C).to(dtype)
    q[:, 3] *= 5  # so that many keys choose one query
    weight = torch.randn(A, B)
    similarity, best_key, best_query = common.match_on_cuda(q, k)
    gradients = common.gradients_on_cuda(weight, q, k, best_key, best_query)
    assert similarity.dtype == torch.float32
    expected = dense_gradients(q, k, weight)
    for ours, dense in zip((similarity, *gradients), expected, strict=True):
        error = (ours.double() - dense).norm() / dense.norm()
        assert error < tolerance, (A, B, N, M, C, dtype, error)


def check_ties():
    """Whoever wins, the gradient is a whole one: all tokens of an image are equal."""
    q = torch.ones(1, 20, 16)
    k = torch.ones(2, 37, 16)
    similarity, best_key, best_query = common.match_on_cuda(q, k)
    grad_q, grad_k = common.gradients_on_cuda(torch.ones(1, 2), q, k, best_key, best_query)
    assert torch.allclose(similarity, torch.tensor(16.0), rtol=1e-4)
    assert torch.allclose(grad_q.sum(1), torch.tensor(2.0))
    assert torch.allclose(grad_k.sum(1), torch.tensor(1.0))


if __name__ == "__main__":
    check_ties()
    for shape in SHAPES:
        check_kernels(*shape, torch.float32, 1e-5)
        print(*shape)
    check_kernels(*SHAPES[0], torch.float16, 1e-3)  # the interpreter has no products in bfloat16
