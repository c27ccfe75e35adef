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
    with torch.autocast(q.device.type, enabled=False):
        similarity, _, _ = _token_match(q, k, heads)
    return similarity


# On a CPU, head by head: slices of the scores, then embedding bags that sum the winners.
SCORES_OF_A_SLICE = 2**25  # held at a time (one image's may be more)


def match_each_head(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """token_match, and what its backward pass needs: q (A, N, D), k (B, M, D) -> (A, B), each
    query's best key (heads, B, A, N) and each key's best query (heads, A, B, M), int32."""
    total = 0
    best_key = []
    best_query = []
    for q_head, k_head in zip(q.chunk(heads, -1), k.chunk(heads, -1), strict=True):
        similarity, key, query = match_in_slices(q_head, k_head)
        total = total + similarity
        best_key.append(key.transpose(0, 1))
        best_query.append(query)
    return total / heads, torch.stack(best_key), torch.stack(best_query)


def gradients_each_head(
    grad: Tensor, q: Tensor, k: Tensor, best_key: Tensor, best_query: Tensor
) -> tuple[Tensor, Tensor]:
    """grad (A, B) and the winners of match_each_head -> gradients of q and k."""
    heads = len(best_key)
    grad_q = []
    grad_k = []
    for head, key in enumerate(best_key.transpose(1, 2)):  # key: (A, B, N)
        q_head = q.chunk(heads, -1)[head]
        k_head = k.chunk(heads, -1)[head]
        of_q, of_k = gradients_in_bags(grad / heads, q_head, k_head, key, best_query[head])
        grad_q.append(of_q)
        grad_k.append(of_k)
    return torch.cat(grad_q, -1), torch.cat(grad_k, -1)


def match_in_slices(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One head of match_each_head: q (A, N, C), k (B, M, C)
    -> (A, B), each query's best key (A, B, N) and each key's best query (A, B, M), int32."""
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
        best_key.append(key.view(-1, N, B).transpose(1, 2).to(torch.int32))
        best_query.append(query.view(-1, M, B).transpose(1, 2).to(torch.int32))
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
        x, y, best, one, R, B, M, D, C: tl.constexpr,
        ALL_M: tl.constexpr, SOME_R: tl.constexpr, SOME_B: tl.constexpr, SOME_C: tl.constexpr,
    ):  # fmt: skip
        """The highest score of each row of x (R, D), the tokens of all images, in each image of y
        (B, M, D): best (heads, B, R).

        A program has a block of rows, of images and one head, C channels. It multiplies the rows by
        the first tokens of its images, then by the second ones, and so on. Each score is then the
        only one of its row and image, so maxima need no reduction, and no image is padded.

        The number of a token replaces the lowest bits of its score, so that one maximum finds both.
        Scores that differ by less than 3e-5 of their size (for 256 tokens) then count as equal. Of
        equals the last wins or, if their score is negative, the first. tl.maximum ignores NaN, but
        where a token has NaN, the similarity is -inf or NaN."""
        r = tl.program_id(0) * SOME_R + tl.arange(0, SOME_R)
        b = tl.program_id(1) * SOME_B + tl.arange(0, SOME_B)
        head = tl.program_id(2)
        c = tl.arange(0, SOME_C)
        x_at = x + tl.minimum(r, R - 1)[:, None] * D + head * C + c[None, :]
        y_at = y + tl.minimum(b, B - 1)[None, :] * M * D + head * C + c[:, None]
        if C <= SOME_C:  # the rows fit, so they are read once, not for each token
            some_x = tl.load(x_at, mask=(c < C)[None, :], other=0.0)
        highest = tl.full([SOME_R, SOME_B], float("-inf"), tl.float32)
        for m in range(M):
            if C <= SOME_C:
                some_y = tl.load(y_at + m * D, mask=(c < C)[:, None], other=0.0)
                scores = tl.dot(some_x, some_y)
            else:
                scores = tl.zeros([SOME_R, SOME_B], tl.float32)
                for c0 in range(0, C, SOME_C):
                    real = c0 + c < C
                    some_x = tl.load(x_at + c0, mask=real[None, :], other=0.0)
                    some_y = tl.load(y_at + m * D + c0, mask=real[:, None], other=0.0)
                    scores = tl.dot(some_x, some_y, scores)
                # Without this sum, ptxas 12.8 and 12.9 lose the products for an H100: of 64, they
                # keep 16, which write into no register, and scores are zero. 13.1 and later lose
                # none. No compiler may leave the sum out, because -0.0 + 0.0 is 0.0.
                scores += 0.0
            # `one` is 1. After a multiplication, ptxas before 13.3 replaces bits in one step; right
            # after a product, in two. These steps take much of the time.
            bits = (scores * one).to(tl.int32, bitcast=True) & -ALL_M | m
            highest = tl.maximum(highest, bits.to(tl.float32, bitcast=True))
        at = best + (head * B + b[None, :]) * R + r[:, None]
        tl.store(at, highest, mask=(r < R)[:, None] & (b < B)[None, :])

    @triton.jit
    def shares_of(number, n, weight, PACKED: tl.constexpr):
        """weight (1, J) where number (1, J) is n (N, 1), otherwise 0."""
        if PACKED:  # two shares an instruction; 0x4300 to 0x43ff are 256 different bfloat16 numbers
            number = (number | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
            n = (n | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
            share = tl.inline_asm_elementwise(
                "{.reg .b32 t; set.eq.bf16x2.bf16x2 t, $1, $2; mul.bf16x2 $0, t, $3;}", "=r,r,r,r",
                [number, n, weight.to(tl.bfloat16)], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:  # sums take less time than tl.where
            other = tl.minimum(tl.abs(number.to(tl.float32) - n.to(tl.float32)), 1.0)
            share = weight - weight * other
        return share

    @triton.jit
    def gradient_kernel(
        numbers, y, weights, chosen, choosers, grad, N, M, J, D, C: tl.constexpr,
        ALL_N: tl.constexpr, ALL_M: tl.constexpr, SOME_N: tl.constexpr, SOME_J: tl.constexpr,
        SOME_C: tl.constexpr, PACKED: tl.constexpr,
    ):  # fmt: skip
        """A program for some queries and channels of an image a adds up share @ y over the J tokens
        of all images b, one after the other: weights (A, J), grad / 2M of each token's image.

        First, each query gets the keys that it has chosen (heads, B, A, N). Then each key goes to
        its best query, of choosers (heads, A, J). Most of these shares are zero, but tensor cores
        multiply them in a fixed order and time. Programs that add each key to its query would wait
        where many keys choose the same one."""
        a = tl.program_id(0)
        A = tl.num_programs(0)
        n = tl.program_id(1) * SOME_N + tl.arange(0, SOME_N)
        blocks: tl.constexpr = (C + SOME_C - 1) // SOME_C
        head = tl.program_id(2) // blocks
        c = tl.program_id(2) % blocks * SOME_C + tl.arange(0, SOME_C)
        real_c = (c < C)[None, :]
        y_at = y + head * C + c[None, :]
        total = tl.zeros([SOME_N, SOME_C], tl.float32)
        B = J // M
        chosen_at = chosen + (head * B * A + a) * N + tl.minimum(n, N - 1)
        key = tl.load(chosen_at)
        for b in range(B):
            next_key = tl.load(chosen_at + tl.minimum(b + 1, B - 1) * A * N)  # on its way meanwhile
            j = b * M + (key & (ALL_M - 1))
            some_y = tl.load(y_at + j[:, None] * D, mask=real_c, other=0.0)
            total += tl.load(weights + a * J + b * M) * some_y
            key = next_key
        total *= M / N
        # Were n not loaded, Triton would move all shares through shared memory.
        loaded_n = tl.load(numbers + n)[:, None]
        for j0 in range(0, J, SOME_J):
            j = j0 + tl.arange(0, SOME_J)
            query = tl.load(choosers + (head * A + a) * J + j, mask=j < J, other=0) & (ALL_N - 1)
            weight = tl.load(weights + a * J + j, mask=j < J, other=0.0)
            some_y = tl.load(y_at + j[:, None] * D, mask=(j < J)[:, None] & real_c, other=0.0)
            share = shares_of(query[None, :], loaded_n, weight[None, :], PACKED)
            # Without this line, which changes nothing, the next round begins while an H100 computes
            # this product, and ptxas before 13.3 lets its shares overwrite those that the product
            # still reads (triton-lang/triton issue 9433). The gradient would be wrong now and then.
            total = tl.where(a >= 0, total, 0.0)
            total = tl.dot(share.to(some_y.dtype), some_y, total)
        at = grad + (a * N + n[:, None]) * D + head * C + c[None, :]
        tl.store(at, total.to(grad.dtype.element_ty), mask=(n < N)[:, None] & real_c)


def kernels_fit(q: Tensor, k: Tensor, heads: int) -> bool:
    """Whether the kernels can match these tokens."""
    A, N, D = q.shape
    B, M, _ = k.shape
    if not triton:  # missing on Windows
        return False
    if max(N, M) > 256:  # their numbers replace 8 bits of a score, and bfloat16 has no more
        return False
    # tl.dot sums in float32, too few digits for float64. In float16, shares of 1e-8 would be zero.
    if q.dtype not in (torch.float32, torch.bfloat16):
        return False
    if max(heads * A * B * max(N, M), q.numel(), k.numel()) >= 2**31:  # offsets have 32 bits
        return False
    if not q.is_cuda:  # Triton's interpreter
        return True
    # Before Ampere, Triton uses no tensor cores, and blocks do not fit into shared memory.
    ampere = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return ampere and kernels_work(q.device, q.dtype, N, M, D // heads)


@functools.cache
def kernels_work(device: torch.device, dtype: torch.dtype, N: int, M: int, C: int) -> bool:
    """Whether both kernels can be compiled and agree with the slower form, tried once on random
    tokens of 16 images. If not, prints why the slower form is used.

    Compilers have lost sums of these kernels in silence. The trial waits for the GPU, so it must
    have been made before a CUDA graph is captured."""
    random = torch.Generator(device).manual_seed(0)
    q = torch.randn(16, N, C, generator=random, device=device, dtype=dtype)
    k = torch.randn(16, M, C, generator=random, device=device, dtype=dtype)
    slow_similarity, *slow_winners = match_each_head(q, k, 1)
    slow_gradients = gradients_each_head(slow_similarity, q, k, *slow_winners)
    try:
        similarity, *winners = match_by_kernel(q, k, 1)
        gradients = gradients_by_kernel(slow_similarity, q, k, *slow_winners)
    except (triton.TritonError, RuntimeError) as e:  # for this GPU, or without a C compiler
        reason, _, _ = str(e).partition("\n")
        print(f"token_match on {device}: no Triton kernels ({reason}), so the slower form is used")
        return False
    winners = [best & (number_limit(size) - 1) for best, size in zip(winners, (M, N), strict=True)]
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


def number_limit(tokens: int) -> int:
    """A power of 2 above every token's number."""
    return triton.next_power_of_2(tokens)


def match_on_cuda(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """match_each_head, by match_kernel where it fits. A winner's number is then in the lowest bits
    of its score."""
    if kernels_fit(q, k, heads):
        return match_by_kernel(q, k, heads)
    return match_each_head(q, k, heads)


def match_by_kernel(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """match_each_head by match_kernel: for queries and, with all roles swapped, for keys."""
    A, N, D = q.shape
    B, M, _ = k.shape
    C = D // heads
    q, k = q.contiguous(), k.contiguous()
    best_key = q.new_empty(heads, B, A, N, dtype=torch.float32)
    best_query = q.new_empty(heads, A, B, M, dtype=torch.float32)
    # Chosen by time on an H100; they also fit into the 99 KB of shared memory of smaller GPUs.
    if C <= 64:
        some_b, some_c, warps = 64, 64, 4
    else:
        some_b, some_c, warps = 128, 128 // q.element_size(), 8
    for x, y, best in ((q, k, best_key), (k, q, best_query)):
        rows = x.shape[0] * x.shape[1]
        images, tokens, _ = y.shape
        with torch.cuda.device_of(q):  # Triton launches on the current GPU
            match_kernel[(triton.cdiv(rows, 128), triton.cdiv(images, some_b), heads)](
                x, y, best, 1.0, rows, images, tokens, D, C, number_limit(tokens),
                128, some_b, block_of(C, some_c), num_warps=warps, num_stages=3,
            )  # fmt: skip
    similarity = (best_query.mean(3).mean(0) + best_key.mean(3).mean(0).T) / 2
    return similarity, best_key.view(torch.int32), best_query.view(torch.int32)


def gradients_on_cuda(
    grad: Tensor, q: Tensor, k: Tensor, best_key: Tensor, best_query: Tensor
) -> tuple[Tensor, Tensor]:
    """gradients_each_head, by gradient_kernel where it fits."""
    if kernels_fit(q, k, len(best_key)):
        return gradients_by_kernel(grad, q, k, best_key, best_query)
    return gradients_each_head(grad, q, k, best_key, best_query)


def can_pack(q: Tensor) -> bool:
    """Whether two shares fit into one instruction: in bfloat16, from Hopper on."""
    if not q.is_cuda or q.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(q.device) >= (9, 0)


def gradients_by_kernel(
    grad: Tensor, q: Tensor, k: Tensor, best_key: Tensor, best_query: Tensor
) -> tuple[Tensor, Tensor]:
    """gradients_each_head by gradient_kernel: for q and, with all roles swapped, for k."""
    heads = len(best_key)
    C = q.shape[2] // heads
    packed = can_pack(q)
    numbers = torch.arange(256, dtype=torch.int32, device=q.device)
    gradients = []
    for x, y, chosen, choosers, grad_xy in (
        (q, k, best_key, best_query, grad),
        (k, q, best_query, best_key, grad.T),
    ):
        images, N, D = x.shape
        others, M, _ = y.shape
        weights = (grad_xy / (2 * heads * M)).repeat_interleave(M, 1)
        some_n = max(64, block_of(N, 128))
        some_j = 128 // y.element_size()
        some_c = block_of(C, 64 if C <= 64 else 128)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        with torch.cuda.device_of(q):
            gradient_kernel[(images, triton.cdiv(N, some_n), heads * triton.cdiv(C, some_c))](
                numbers, y.contiguous(), weights, chosen, choosers, grad_x, N, M, others * M, D, C,
                number_limit(N), number_limit(M), some_n, some_j, some_c, packed,
                num_warps=4, num_stages=3,
                maxnreg=128 if packed and C <= 64 else None,  # four programs at a time
            )  # fmt: skip
        gradients.append(grad_x)
    return gradients[0], gradients[1]


# The operators are named after this module, so that a copy in another package keeps its own.
OPERATOR = __name__.replace(".", "_") + "::token_match"
_token_match = torch.library.custom_op(
    OPERATOR, match_each_head, mutates_args=(), device_types="cpu"
)
_gradients = torch.library.custom_op(
    f"{OPERATOR}_backward", gradients_each_head, mutates_args=(), device_types="cpu"
)
_token_match.register_kernel("cuda", match_on_cuda)
_gradients.register_kernel("cuda", gradients_on_cuda)


@_token_match.register_fake
def _(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes alone, for torch.compile."""
    A, N, _ = q.shape
    B, M, _ = k.shape
    best_key = q.new_empty(heads, B, A, N, dtype=torch.int32)
    best_query = q.new_empty(heads, A, B, M, dtype=torch.int32)
    return upcast(q).new_empty(A, B), best_key, best_query


@_gradients.register_fake
def _(grad, q, k, best_key, best_query) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _keep_for_backward(ctx, inputs, output) -> None:
    q, k, _ = inputs
    _, best_key, best_query = output
    ctx.save_for_backward(q, k, best_key, best_query)


def _backward(ctx, grad: Tensor, *_) -> tuple[Tensor, Tensor]:
    # torch.compile keeps compiled graphs on disk and finds them by their forward pass. After an
    # edit of this function, TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 keeps it from using old ones.
    return *_gradients(grad, *ctx.saved_tensors), None


_token_match.register_autograd(_backward, setup_context=_keep_for_backward)
