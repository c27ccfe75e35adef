"""Token matching, which SCORER+CBR (Eq. 2-3) and CHEERS (Eq. 9) share, fast and in little memory.

match_by_definition says what matching is. All that follows is about speed: token_match computes the
same in slices of the scores and embedding bags (match_in_slices, gradients_in_bags) or, on NVIDIA
GPUs, by two Triton kernels. custom_op makes both forms one operator of PyTorch.

Axis letters: A, B images; N, M tokens; D width; h heads; C = D/h channels. Licence: MIT.
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


def match_by_definition(q: Tensor, k: Tensor, heads: int = 1) -> Tensor:
    """The similarity of every image a to every image b by their best-matching tokens (FILIP, 2022):

        1/2 [ mean_n max_m <q_an, k_bm> + mean_m max_n <q_an, k_bm> ].

    q (A, N, D), k (B, M, D) -> (A, B). With several heads, each has a slice of the width, and the
    result is their mean. For cosines, pass tokens of length 1.

    By hand, with one head: the queries (1, 0), (0, 1) and the keys (1, 0), (1, 0) have the products
    ((1, 1), (0, 0)). Row maxima 1, 0; column maxima 1, 1; similarity (0.5 + 1) / 2 = 0.75."""
    q = q.unflatten(-1, (heads, -1))  # (A, N, h, D/h)
    k = k.unflatten(-1, (heads, -1))  # (B, M, h, D/h)
    s = torch.einsum("anhc,bmhc->abhnm", q, k)
    similarity = (s.amax(-1).mean(-1) + s.amax(-2).mean(-1)) / 2  # (A, B, h)
    return similarity.mean(-1)


def token_match(q: Tensor, k: Tensor, heads: int = 1) -> Tensor:
    """Compute match_by_definition fast: q (A, N, D), k (B, M, D) -> (A, B), float32 or float64.

    In a tie, one winner gets the whole gradient. On CUDA, the kernels multiply float32 tokens in
    TF32, whatever PyTorch's own setting is; where kernels are not used, that setting counts.
    Products of bfloat16 tokens are exact; only the gradient's shares are rounded.

    The definition needs A*B*N*M scores (2.5 GB at 128 pairs of 196 cells) four times over in the
    backward pass. Only winners have a gradient, so this version keeps these:

        grad_q[a, n] = sum over b and m of share[n, m] k[b, m],
        share[n, m] = grad[a, b] ([m is n's best key] / 2N + [n is m's best query] / 2M),

    and grad_k is q times the same shares."""
    width = q.shape[-1]
    assert width % heads == 0, f"a width of {width} is not a multiple of {heads} heads"
    with torch.autocast(q.device.type, enabled=False):
        similarity, _, _ = _token_match(q, k, heads)
    return similarity


# A winner is an int32 whose lowest bits are the number of the token that has won. The bits above
# them are the score's if match_kernel wrote it, and zeros if match_in_slices did. Outside the
# kernels, only numbers_of reads winners.


def number_limit(tokens: int) -> int:
    """The least power of 2 above every token's number."""
    return 1 << (tokens - 1).bit_length()


def numbers_of(winners: Tensor, tokens: int) -> Tensor:
    """The numbers of the tokens that have won, of so many tokens."""
    return winners & (number_limit(tokens) - 1)


# On a CPU, heads take turns. Scores are made in slices, and embedding bags sum the winners.
SCORES_OF_A_SLICE = 2**25  # scores that are held at a time (a single image may have more)


def match_each_head(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute token_match and what its backward pass needs: q (A, N, D), k (B, M, D) -> (A, B),
    winners of each query (heads, B, A, N), which are keys, and of each key (heads, A, B, M)."""
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
    """grad (A, B) and the winners of match_each_head -> the gradients of q and k."""
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
    """Match one head: q (A, N, C), k (B, M, C)
    -> (A, B), winners of each query (A, B, N), which are keys, and of each key (A, B, M)."""
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
    """scores (X, N, Y) -> maxima over N and their rows, both (X, Y). In a tie, the first row wins.
    On a CPU, channels-last max pooling takes a fifth of the time that Tensor.max takes."""
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
    key = (numbers_of(best_key, M) + first_key).transpose(1, 2).reshape(A * N, B)
    query = (numbers_of(best_query, N) + first_query).permute(1, 2, 0).reshape(B * M, A)
    by_key = (grad[:, None] / (2 * N)).expand(A, N, B).reshape(A * N, B)
    by_query = (grad.T[:, None] / (2 * M)).expand(B, M, A).reshape(B * M, A)
    # Each token gets the channels of the token that it has chosen.
    grad_q = F.embedding_bag(key, keys, mode="sum", per_sample_weights=by_key)
    grad_k = F.embedding_bag(query, queries, mode="sum", per_sample_weights=by_query)
    # It also gets the channels of those that have chosen it. One sort is faster than two, so
    # `chosen` counts queries, then keys; `choosing` keys, then queries.
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


# On CUDA, there are two Triton kernels. Blocks of scores and of shares never leave the registers.
if triton:

    @triton.jit
    def match_kernel(
        x, y, best, one, R, B, M, D, C: tl.constexpr,
        LIMIT_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        """Write to best (heads, B, R) the winner of each row of x (R, D), the tokens of all images,
        in each image of y (B, M, D).

        A program has a block of rows, a block of images, and one head of C channels. It multiplies
        the rows by the first tokens of its images, then by the second tokens, and so on. Each time
        there is one score for a row and an image, so maxima need no reduction, and no image is
        padded.

        The number of a token replaces the lowest bits of its score, so that one maximum finds both.
        LIMIT_M is number_limit(M). Scores that differ by less than 3e-5 of their
        size (for 256 tokens) then count as equal. A tie goes to the last token, or to the first one
        if the score is negative. tl.maximum ignores NaN, but where a token has NaN, the similarity
        is -inf or NaN."""
        r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
        b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
        head = tl.program_id(2)
        c = tl.arange(0, BLOCK_C)
        x_at = x + tl.minimum(r, R - 1)[:, None] * D + head * C + c[None, :]
        y_at = y + tl.minimum(b, B - 1)[None, :] * M * D + head * C + c[:, None]
        if C <= BLOCK_C:  # the rows fit, so they are read once, not for each token
            x_block = tl.load(x_at, mask=(c < C)[None, :], other=0.0)
        highest = tl.full([BLOCK_R, BLOCK_B], float("-inf"), tl.float32)
        for m in range(M):
            if C <= BLOCK_C:
                y_block = tl.load(y_at + m * D, mask=(c < C)[:, None], other=0.0)
                scores = tl.dot(x_block, y_block)
            else:
                scores = tl.zeros([BLOCK_R, BLOCK_B], tl.float32)
                for c0 in range(0, C, BLOCK_C):
                    real = c0 + c < C
                    x_block = tl.load(x_at + c0, mask=real[None, :], other=0.0)
                    y_block = tl.load(y_at + m * D + c0, mask=real[:, None], other=0.0)
                    scores = tl.dot(x_block, y_block, scores)
                # Without this sum, ptxas 12.8 and 12.9 lose the products for an H100: they keep 16
                # of 64, which write into no register, so the scores are zero. ptxas 13.1 and later
                # keep all. No compiler may leave the sum out, because -0.0 + 0.0 is 0.0.
                scores += 0.0
            # Multiplying by `one`, which is 1, saves an instruction for each score: ptxas before
            # 13.3 then replaces the low bits in one instead of two.
            bits = (scores * one).to(tl.int32, bitcast=True) & -LIMIT_M | m
            highest = tl.maximum(highest, bits.to(tl.float32, bitcast=True))
        at = best + (head * B + b[None, :]) * R + r[:, None]
        tl.store(at, highest, mask=(r < R)[:, None] & (b < B)[None, :])

    @triton.jit
    def shares_of(number, n, weight, PACKED: tl.constexpr):
        """-> (N, J): weight (1, J) where number (1, J) equals n (N, 1), otherwise 0."""
        if PACKED:  # two at once; 0x4300 to 0x43ff are 256 different bfloat16 numbers
            number = (number | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
            n = (n | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
            share = tl.inline_asm_elementwise(
                "{.reg .b32 t; set.eq.bf16x2.bf16x2 t, $1, $2; mul.bf16x2 $0, t, $3;}", "=r,r,r,r",
                [number, n, weight.to(tl.bfloat16)], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:  # these sums take less time than tl.where
            other = tl.minimum(tl.abs(number.to(tl.float32) - n.to(tl.float32)), 1.0)
            share = weight - weight * other
        return share

    @triton.jit
    def gradient_kernel(
        numbers, y, weights, chosen, choosers, grad, N, M, J, D, C: tl.constexpr,
        LIMIT_N: tl.constexpr, LIMIT_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
        BLOCK_C: tl.constexpr, PACKED: tl.constexpr,
    ):  # fmt: skip
        """A program has some queries and channels of one image a. It adds up share @ y over the J
        tokens of all images b, one image after the other. weights (A, J) has each one's grad / 2M.

        First, each query gets the keys that it has chosen (heads, B, A, N). Then each key goes to
        its best query, which choosers (heads, A, J) names. Most of these shares are zero, but
        tensor cores multiply them in a fixed order and time. If programs added each key to its
        query instead, they would wait where many keys choose the same query."""
        a = tl.program_id(0)
        A = tl.num_programs(0)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
        head = tl.program_id(2) // blocks
        c = tl.program_id(2) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
        real_c = (c < C)[None, :]
        y_at = y + head * C + c[None, :]
        total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
        B = J // M
        chosen_at = chosen + (head * B * A + a) * N + tl.minimum(n, N - 1)
        key = tl.load(chosen_at)
        for b in range(B):
            next_key = tl.load(chosen_at + tl.minimum(b + 1, B - 1) * A * N)  # it arrives meanwhile
            j = b * M + (key & (LIMIT_M - 1))
            y_block = tl.load(y_at + j[:, None] * D, mask=real_c, other=0.0)
            total += tl.load(weights + a * J + b * M) * y_block
            key = next_key
        total *= M / N
        # If n were not loaded, Triton would move all shares through shared memory.
        loaded_n = tl.load(numbers + n)[:, None]
        for j0 in range(0, J, BLOCK_J):
            j = j0 + tl.arange(0, BLOCK_J)
            query = tl.load(choosers + (head * A + a) * J + j, mask=j < J, other=0) & (LIMIT_N - 1)
            weight = tl.load(weights + a * J + j, mask=j < J, other=0.0)
            y_block = tl.load(y_at + j[:, None] * D, mask=(j < J)[:, None] & real_c, other=0.0)
            share = shares_of(query[None, :], loaded_n, weight[None, :], PACKED)
            # This line changes no value. Without it, the next round begins while an H100 computes
            # this product, and ptxas before 13.3 lets its shares overwrite those that the product
            # still reads (triton-lang/triton issue 9433). The gradient would be wrong now and then.
            total = tl.where(a >= 0, total, 0.0)
            total = tl.dot(share.to(y_block.dtype), y_block, total)
        at = grad + (a * N + n[:, None]) * D + head * C + c[None, :]
        tl.store(at, total.to(grad.dtype.element_ty), mask=(n < N)[:, None] & real_c)


def kernels_fit(q: Tensor, k: Tensor, heads: int) -> bool:
    """Say whether the kernels can match these tokens."""
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
    """Say whether both kernels can be compiled and agree with the slower form, on random tokens. If
    not, print why. Compilers have lost sums of these kernels in silence. The trial waits for the
    GPU, so it must be over before a CUDA graph is captured."""
    random = torch.Generator(device).manual_seed(0)
    q = torch.randn(16, N, C, generator=random, device=device, dtype=dtype)
    k = torch.randn(16, M, C, generator=random, device=device, dtype=dtype)
    slow_similarity, *slow_winners = match_each_head(q, k, 1)
    slow_gradients = gradients_each_head(slow_similarity, q, k, *slow_winners)
    try:
        similarity, *winners = match_by_kernel(q, k, 1)
        gradients = gradients_by_kernel(slow_similarity, q, k, *slow_winners)
    except Exception as e:  # an old GPU, no C compiler or Python.h, no folder to write to, ...
        reason, _, _ = str(e).partition("\n")
        print(f"token_match on {device}: no Triton kernels ({reason}), so the slower form is used")
        return False
    winners = [numbers_of(best, size) for best, size in zip(winners, (M, N), strict=True)]
    ours = (similarity, *gradients)
    slow = (slow_similarity, *slow_gradients)
    errors = [(x - y).norm() / y.norm() for x, y in zip(ours, slow, strict=True)]
    # Of two scores that are almost equal, either may win.
    errors += [(x != y).float().mean() for x, y in zip(winners, slow_winners, strict=True)]
    works = all(error <= 0.02 for error in errors)  # false for NaN
    if not works:
        text = "Triton's kernels differ from the slower form by more than 2 %, so that form is used"
        print(f"token_match on {device}: {text}")
    return works


def block_of(size: int, most: int) -> int:
    """The size of a block: a power of 2, and at least 16, as tl.dot requires."""
    return max(16, min(most, triton.next_power_of_2(size)))


def match_on_cuda(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Do what match_each_head does, by match_kernel where it fits."""
    if kernels_fit(q, k, heads):
        return match_by_kernel(q, k, heads)
    return match_each_head(q, k, heads)


def match_by_kernel(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Run match_kernel for queries and, with all roles swapped, for keys."""
    A, N, D = q.shape
    B, M, _ = k.shape
    C = D // heads
    q, k = q.contiguous(), k.contiguous()
    best_key = q.new_empty(heads, B, A, N, dtype=torch.float32)
    best_query = q.new_empty(heads, A, B, M, dtype=torch.float32)
    # These are the fastest on an H100. They also fit into the 99 KB of shared memory of small GPUs.
    if C <= 64:
        block_b, block_c, warps = 64, 64, 4
    else:
        block_b, block_c, warps = 128, 128 // q.element_size(), 8
    for x, y, best in ((q, k, best_key), (k, q, best_query)):
        rows = x.shape[0] * x.shape[1]
        images, tokens, _ = y.shape
        with torch.cuda.device_of(q):  # Triton launches on the current GPU
            match_kernel[(triton.cdiv(rows, 128), triton.cdiv(images, block_b), heads)](
                x=x, y=y, best=best, one=1.0, R=rows, B=images, M=tokens, D=D, C=C,
                LIMIT_M=number_limit(tokens),
                BLOCK_R=128, BLOCK_B=block_b, BLOCK_C=block_of(C, block_c),
                num_warps=warps, num_stages=3,
            )  # fmt: skip
    similarity = (best_query.mean(3).mean(0) + best_key.mean(3).mean(0).T) / 2
    return similarity, best_key.view(torch.int32), best_query.view(torch.int32)


def gradients_on_cuda(
    grad: Tensor, q: Tensor, k: Tensor, best_key: Tensor, best_query: Tensor
) -> tuple[Tensor, Tensor]:
    """Do what gradients_each_head does, by gradient_kernel where it fits."""
    if kernels_fit(q, k, len(best_key)):
        return gradients_by_kernel(grad, q, k, best_key, best_query)
    return gradients_each_head(grad, q, k, best_key, best_query)


def can_pack(q: Tensor) -> bool:
    """Say whether two shares fit into one instruction, as in bfloat16 from Hopper on."""
    if not q.is_cuda or q.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(q.device) >= (9, 0)


def gradients_by_kernel(
    grad: Tensor, q: Tensor, k: Tensor, best_key: Tensor, best_query: Tensor
) -> tuple[Tensor, Tensor]:
    """Run gradient_kernel for q and, with all roles swapped, for k."""
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
        block_n = max(64, block_of(N, 128))
        block_j = 128 // y.element_size()
        block_c = block_of(C, 64 if C <= 64 else 128)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        with torch.cuda.device_of(q):
            gradient_kernel[(images, triton.cdiv(N, block_n), heads * triton.cdiv(C, block_c))](
                numbers=numbers, y=y.contiguous(), weights=weights, chosen=chosen,
                choosers=choosers, grad=grad_x, N=N, M=M, J=others * M, D=D, C=C,
                LIMIT_N=number_limit(N), LIMIT_M=number_limit(M),
                BLOCK_N=block_n, BLOCK_J=block_j, BLOCK_C=block_c, PACKED=packed,
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
    """Give torch.compile the shapes of the results."""
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
    # torch.compile keeps compiled graphs on disk and finds them by their forward pass. If you edit
    # this function, set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1, so that it uses no old ones.
    return *_gradients(grad, *ctx.saved_tensors), None


_token_match.register_autograd(_backward, setup_context=_keep_for_backward)
