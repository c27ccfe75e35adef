"""Token matching, which SCORER+CBR (Eq. 2-3) and CHEERS (Eq. 9) share, fast and in little memory.

token_match computes what match_by_definition of scorer_cbr.py defines. Read that one to learn what
matching is; this file is about speed. It has two forms: slices of the scores and embedding bags
(match_in_slices, gradients_in_bags), and for NVIDIA GPUs two Triton kernels. custom_op makes either
of them an operator of PyTorch, with a backward pass and for torch.compile.

Axis letters: A, B images; N, M tokens; C channels. Licence: MIT.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from common import upcast

try:  # Triton comes with PyTorch for CUDA on Linux
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def token_match(q: Tensor, k: Tensor, heads: int = 1) -> Tensor:
    """Similarity of every image a to every image b by their best-matching tokens (FILIP, 2022):

        1/2 [ mean_n max_m <q_an, k_bm> + mean_m max_n <q_an, k_bm> ].

    q (A, N, C), k (B, M, C) -> (A, B), float32 (float64 for float64). With several heads, each has
    a slice of the channels, and the result is their mean. For cosines, pass tokens of length 1. In
    a tie, one winner gets the whole gradient. On CUDA, the kernels multiply float32 tokens in TF32,
    whatever PyTorch's own setting is; where kernels are not used, that setting counts. Products of
    bfloat16 tokens are exact, so there is no need to cast these; only the gradient's shares are
    rounded.

    A dense version needs A*B*N*M scores (2.5 GB at 128 pairs of 196 cells) four times over in the
    backward pass. Only winners have a gradient, so this one holds few scores at a time and keeps
    the winners:

        grad_q[a, n] = sum over b and m of share[n, m] k[b, m],
        share[n, m] = grad[a, b] ([m is n's best key] / 2N + [n is m's best query] / 2M),

    and grad_k is q times the same shares."""
    channels = q.shape[-1]
    assert channels % heads == 0, f"{channels} channels are not a multiple of {heads} heads"
    assert max(q.shape[1], k.shape[1]) <= 2**15, "winners are kept as int16"
    total = 0
    with torch.autocast(q.device.type, enabled=False):
        for q_head, k_head in zip(q.chunk(heads, -1), k.chunk(heads, -1), strict=True):
            similarity, _, _ = _token_match(q_head, k_head)
            total = total + similarity
    return total / heads


# On a CPU: slices of the scores, then embedding bags that sum the winners.
SCORES_OF_A_SLICE = 2**25  # held at a time (one image's may be more)


def match_in_slices(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """token_match for one head, and what its backward pass needs: q (A, N, C), k (B, M, C)
    -> (A, B), each query's best key (A, B, N) and each key's best query (A, B, M), int16."""
    _, N, C = q.shape
    B, M, _ = k.shape
    # Image b is the last axis of the scores, because max_over_rows reduces the one before it.
    keys = upcast(k).transpose(0, 1).reshape(M * B, C).T  # (C, M*B)
    images = max(1, SCORES_OF_A_SLICE // (N * B * M))  # in a slice
    similarity = []
    best_key = []
    best_query = []
    for part in upcast(q).split(images):  # A' images
        scores = part.reshape(-1, C) @ keys  # (A'*N, M*B)
        over_keys, key = max_over_rows(scores.view(-1, M, B))
        over_queries, query = max_over_rows(scores.view(-1, N, M * B))
        over_keys = over_keys.view(-1, N, B)
        over_queries = over_queries.view(-1, M, B).transpose(1, 2).contiguous()  # (A', B, M)
        similarity.append((over_keys.mean(1) + over_queries.mean(2)) / 2)
        best_key.append(key.view(-1, N, B).transpose(1, 2).to(torch.int16))
        best_query.append(query.view(-1, M, B).transpose(1, 2).to(torch.int16))
    return torch.cat(similarity), torch.cat(best_key), torch.cat(best_query)


def max_over_rows(scores: Tensor) -> tuple[Tensor, Tensor]:
    """scores (X, N, Y) -> maxima over N and their rows, each (X, Y). In a tie, the first row wins.

    On a CPU, channels-last max pooling takes a fifth of the time of Tensor.max."""
    images = scores.unsqueeze(2).permute(0, 3, 1, 2)  # (X, Y, N, 1)
    maxima, rows = F.max_pool2d(images, (scores.shape[1], 1), return_indices=True)
    return maxima.flatten(1), rows.flatten(1)


def gradients_in_bags(
    grad: Tensor, q: Tensor, k: Tensor, best_key: Tensor, best_query: Tensor
) -> tuple[Tensor, Tensor]:
    """grad (A, B) and the winners of match_in_slices -> gradients of q (A, N, C) and k (B, M, C).

    An embedding bag sums the channels of the winners without copying them first."""
    A, N, C = q.shape
    B, M, _ = k.shape
    queries = upcast(q).reshape(-1, C)
    keys = upcast(k).reshape(-1, C)
    # The winners' rows in `keys` and `queries`. int32 halves what has to be read.
    first_key = torch.arange(B, dtype=torch.int32, device=q.device)[:, None] * M
    first_query = torch.arange(A, dtype=torch.int32, device=q.device)[:, None, None] * N
    key = (best_key + first_key).transpose(1, 2).reshape(A * N, B)
    query = (best_query + first_query).permute(1, 2, 0).reshape(B * M, A)
    by_key = (grad[:, None] / (2 * N)).expand(A, N, B).reshape(A * N, B)
    by_query = (grad.T[:, None] / (2 * M)).expand(B, M, A).reshape(B * M, A)
    # Each token gets the channels of the token that it has chosen.
    grad_q = F.embedding_bag(key, keys, mode="sum", per_sample_weights=by_key)
    grad_k = F.embedding_bag(query, queries, mode="sum", per_sample_weights=by_query)
    # It also gets the channels of those that have chosen it. Queries and keys are sorted together,
    # because one sort is faster than two: `chosen` counts queries, then keys; `choosing` keys, then
    # queries.
    chosen, order = torch.cat([query.flatten(), key.flatten() + A * N]).sort()
    rows = torch.arange(A * N + B * M, dtype=torch.int32, device=q.device)
    first = torch.searchsorted(chosen, rows, out_int32=True)  # where each token's entries begin
    choosing = torch.cat([rows[: B * M].repeat_interleave(A), rows[B * M :].repeat_interleave(B)])
    weights = torch.cat([by_query.flatten(), by_key.flatten()])[order]
    tokens = torch.cat([keys, queries])
    sums = F.embedding_bag(choosing[order], tokens, first, mode="sum", per_sample_weights=weights)
    grad_q += sums[: A * N]
    grad_k += sums[A * N :]
    return grad_q.view_as(q).to(q.dtype), grad_k.view_as(k).to(k.dtype)


# On CUDA: two Triton kernels. Blocks of scores and of shares never leave the registers.
if triton:

    @triton.jit
    def match_kernel(
        q, k, similarity, best_key, best_query, B, N, M, C: tl.constexpr,
        ALL_N: tl.constexpr, SOME_M: tl.constexpr, SOME_C: tl.constexpr,
    ):  # fmt: skip
        """Each pair of images (a, b) has a program. It multiplies all queries by one block of keys
        after the other, and takes both maxima of each block.

        The number of a token replaces the lowest bits of its score, so that one maximum finds both.
        Scores that differ by less than 3e-5 of their size (for 256 tokens) then count as equal. Of
        equals in a block the last wins or, if their score is negative, the first. Tokens past the
        end repeat the last one, which changes no maximum. tl.max ignores NaN, but where a token has
        NaN, the similarity is -inf or NaN."""
        b = tl.program_id(0)
        a = tl.program_id(1)
        pair = a * B + b
        n = tl.arange(0, ALL_N)
        in_block = tl.arange(0, SOME_M)
        c = tl.arange(0, SOME_C)
        query_at = q + (a * N + tl.minimum(n, N - 1)[:, None]) * C + c[None, :]
        if C <= SOME_C:  # the queries fit, so they are read once, not for each block of keys
            x = tl.load(query_at, mask=(c < C)[None, :], other=0.0)
        highest = tl.full([ALL_N], float("-inf"), tl.float32)  # each query's best score so far
        block = tl.zeros([ALL_N], tl.int32)  # and where its block begins
        total = 0.0
        for m0 in range(0, M, SOME_M):
            m = m0 + in_block
            key_at = k + (b * M + tl.minimum(m, M - 1)[None, :]) * C + c[:, None]
            if C <= SOME_C:
                scores = tl.dot(x, tl.load(key_at, mask=(c < C)[:, None], other=0.0))
            else:
                scores = tl.zeros([ALL_N, SOME_M], tl.float32)
                for c0 in range(0, C, SOME_C):
                    real = c0 + c < C
                    x = tl.load(query_at + c0, mask=real[None, :], other=0.0)
                    y = tl.load(key_at + c0, mask=real[:, None], other=0.0)
                    scores = tl.dot(x, y, scores)
                # Without this sum, ptxas 12.8 and 12.9 lose the products for an H100: of 64, they
                # keep 16, which write into no register, and scores are zero. 13.1 and later lose
                # none. No compiler may leave the sum out, because -0.0 + 0.0 is 0.0.
                scores += 0.0
            bits = scores.to(tl.int32, bitcast=True)
            best = tl.max((bits & -SOME_M | in_block[None, :]).to(tl.float32, bitcast=True), 1)
            block = tl.where(best > highest, m0, block)
            highest = tl.maximum(best, highest)
            best = tl.max((bits & -ALL_N | n[:, None]).to(tl.float32, bitcast=True), 0)
            query = tl.minimum(best.to(tl.int32, bitcast=True) & (ALL_N - 1), N - 1)
            tl.store(best_query + pair * M + m, query.to(tl.int16), mask=m < M)
            total += tl.sum(tl.where(m < M, best, 0.0)) / M
        key = tl.minimum(block + (highest.to(tl.int32, bitcast=True) & (SOME_M - 1)), M - 1)
        tl.store(best_key + pair * N + n, key.to(tl.int16), mask=n < N)
        total += tl.sum(tl.where(n < N, highest, 0.0)) / N
        tl.store(similarity + pair, total / 2)

    @triton.jit
    def gradient_kernel(
        k, grad, best_key, best_query, grad_q, B, N, M, step_a, step_b, C: tl.constexpr,
        SOME_N: tl.constexpr, SOME_M: tl.constexpr, SOME_C: tl.constexpr,
    ):  # fmt: skip
        """A program for some queries and channels of an image a adds up share @ k over all images
        b. The next a is step_a pairs further, the next b step_b.

        Most shares are zero, but tensor cores multiply them in a fixed order and time. Programs
        that add each winner's channels would wait where many tokens choose the same one."""
        a = tl.program_id(0)
        n = tl.program_id(1) * SOME_N + tl.arange(0, SOME_N)
        c = tl.program_id(2) * SOME_C + tl.arange(0, SOME_C)
        total = tl.zeros([SOME_N, SOME_C], tl.float32)
        for b in range(B):
            pair = a * step_a + b * step_b
            weight = tl.load(grad + pair)
            key = tl.load(best_key + pair * N + n, mask=n < N, other=-1).to(tl.int32)
            for m0 in range(0, M, SOME_M):
                m = m0 + tl.arange(0, SOME_M)
                query = tl.load(best_query + pair * M + m, mask=m < M, other=-1).to(tl.int32)
                key_at = k + (b * M + m[:, None]) * C + c[None, :]
                y = tl.load(key_at, mask=(m < M)[:, None] & (c < C)[None, :], other=0.0)
                share = tl.where(key[:, None] == m[None, :], weight / (2 * N), 0.0)
                share += tl.where(query[None, :] == n[:, None], weight / (2 * M), 0.0)
                total = tl.dot(share.to(y.dtype), y, total)
                # Without this sum, the next round begins while an H100 computes this product, and
                # ptxas before 13.3 lets its shares overwrite those that the product still reads
                # (triton-lang/triton issue 9433). The gradient would be wrong now and then.
                total += 0.0
        at = grad_q + (a * N + n[:, None]) * C + c[None, :]
        tl.store(at, total.to(grad_q.dtype.element_ty), mask=(n < N)[:, None] & (c < C)[None, :])


def kernels_fit(q: Tensor, k: Tensor) -> bool:
    """Whether the kernels can match these tokens."""
    A, N, C = q.shape
    B, M, _ = k.shape
    if not triton:  # missing on Windows
        return False
    if max(N, M) > 256:  # a block holds all queries of an image
        return False
    # tl.dot sums in float32, too few digits for float64. In float16, shares of 1e-8 would be zero.
    if q.dtype not in (torch.float32, torch.bfloat16):
        return False
    if max(A * B * max(N, M), q.numel(), k.numel()) >= 2**31:  # offsets have 32 bits
        return False
    if not q.is_cuda:  # Triton's interpreter
        return True
    # Before Ampere, Triton uses no tensor cores, and blocks do not fit into shared memory.
    ampere = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return ampere and kernels_work(q.device, q.dtype, N, M, C)


@functools.cache
def kernels_work(device: torch.device, dtype: torch.dtype, N: int, M: int, C: int) -> bool:
    """Whether both kernels agree with the slower form, tried once on random tokens of 16 images.

    Compilers have lost sums of these kernels in silence. The trial waits for the GPU, so it must
    have been made before a CUDA graph is captured."""
    random = torch.Generator(device).manual_seed(0)
    q = torch.randn(16, N, C, generator=random, device=device, dtype=dtype)
    k = torch.randn(16, M, C, generator=random, device=device, dtype=dtype)
    similarity, *winners = match_by_kernel(q, k)
    slow_similarity, *slow_winners = match_in_slices(q, k)
    gradients = gradients_by_kernel(slow_similarity, q, k, *slow_winners)
    slow_gradients = gradients_in_bags(slow_similarity, q, k, *slow_winners)
    ours = (similarity, *gradients)
    slow = (slow_similarity, *slow_gradients)
    errors = [(x - y).norm() / y.norm() for x, y in zip(ours, slow, strict=True)]
    # Of two scores that are almost equal, either may win.
    errors += [(x != y).float().mean() for x, y in zip(winners, slow_winners, strict=True)]
    works = all(error <= 0.02 for error in errors)  # not so for NaN
    if not works:
        text = "Triton's kernels differ from the slower form by more than 2 %, so that form is used"
        print(f"token_match on {device}: {text}")
    return works


def block_of(size: int, most: int) -> int:
    """The size of a block: a power of 2, and at least 16, as tl.dot requires."""
    return max(16, min(most, triton.next_power_of_2(size)))


def match_on_cuda(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """match_in_slices, by match_kernel where it fits."""
    if kernels_fit(q, k):
        return match_by_kernel(q, k)
    return match_in_slices(q, k)


def match_by_kernel(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """match_in_slices by match_kernel."""
    A, N, C = q.shape
    B, M, _ = k.shape
    similarity = q.new_empty(A, B, dtype=torch.float32)
    best_key = q.new_empty(A, B, N, dtype=torch.int16)
    best_query = q.new_empty(A, B, M, dtype=torch.int16)
    # Chosen by time on an H100; they also fit into the 99 KB of shared memory of smaller GPUs.
    some_m, some_c, warps, stages = (32, 64, 4, 2) if C <= 64 else (128, 32, 8, 3)
    with torch.cuda.device_of(q):  # Triton launches on the current GPU
        match_kernel[(B, A)](
            q.contiguous(), k.contiguous(), similarity, best_key, best_query, B, N, M, C,
            block_of(N, 256), some_m, block_of(C, some_c), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return similarity, best_key, best_query


def gradients_on_cuda(
    grad: Tensor, q: Tensor, k: Tensor, best_key: Tensor, best_query: Tensor
) -> tuple[Tensor, Tensor]:
    """gradients_in_bags, by gradient_kernel where it fits."""
    if kernels_fit(q, k):
        return gradients_by_kernel(grad, q, k, best_key, best_query)
    return gradients_in_bags(grad, q, k, best_key, best_query)


def gradients_by_kernel(
    grad: Tensor, q: Tensor, k: Tensor, best_key: Tensor, best_query: Tensor
) -> tuple[Tensor, Tensor]:
    """gradients_in_bags by gradient_kernel: for q and, with all roles swapped, for k."""
    B = grad.shape[1]
    grad = grad.contiguous()
    gradients = []
    for x, y, best_y, best_x, step_x, step_y in (
        (q, k, best_key, best_query, B, 1),
        (k, q, best_query, best_key, 1, B),
    ):
        images, N, C = x.shape
        others, M, _ = y.shape
        some_n = block_of(N, 128 if C <= 64 else 64)
        some_c = block_of(C, 256)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        with torch.cuda.device_of(q):
            gradient_kernel[(images, triton.cdiv(N, some_n), triton.cdiv(C, some_c))](
                y.contiguous(), grad, best_y, best_x, grad_x, others, N, M, step_x, step_y, C,
                some_n, 32, some_c, num_warps=4, num_stages=3,
            )  # fmt: skip
        gradients.append(grad_x)
    return gradients[0], gradients[1]


# The operators are named after this module, so that a copy in another package keeps its own.
OPERATOR = __name__.replace(".", "_") + "::token_match"
_token_match = torch.library.custom_op(
    OPERATOR, match_in_slices, mutates_args=(), device_types="cpu"
)
_gradients = torch.library.custom_op(
    f"{OPERATOR}_backward", gradients_in_bags, mutates_args=(), device_types="cpu"
)
_token_match.register_kernel("cuda", match_on_cuda)
_gradients.register_kernel("cuda", gradients_on_cuda)


@_token_match.register_fake
def _(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes alone, for torch.compile."""
    A, N, _ = q.shape
    B, M, _ = k.shape
    best_key = q.new_empty(A, B, N, dtype=torch.int16)
    best_query = q.new_empty(A, B, M, dtype=torch.int16)
    return upcast(q).new_empty(A, B), best_key, best_query


@_gradients.register_fake
def _(grad, q, k, best_key, best_query) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _keep_for_backward(ctx, inputs, output) -> None:
    _, best_key, best_query = output
    ctx.save_for_backward(*inputs, best_key, best_query)


def _backward(ctx, grad: Tensor, *_) -> tuple[Tensor, Tensor]:
    # torch.compile keeps compiled graphs on disk and finds them by their forward pass. After an
    # edit of this function, TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 keeps it from using old ones.
    return _gradients(grad, *ctx.saved_tensors)


_token_match.register_autograd(_backward, setup_context=_keep_for_backward)
