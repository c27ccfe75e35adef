"""Shared layers against plain float64 versions; decoding; learning rates."""

import math

import pytest
import torch
import torch.nn as nn

import common
from common import Attention, RunConfig, decode, learning_rate

# ---- layers and losses ---------------------------------------------------------------------------


def test_attention_against_loop():
    attention = Attention(6, heads=2, dropout=0.5, out_proj=False).double().eval()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    memory = torch.randn(2, 4, 6, dtype=torch.float64)
    q, k, v = attention.project(x, memory)
    plain = torch.zeros(2, 3, 6, dtype=torch.float64)
    for b in range(2):
        for h in (slice(0, 3), slice(3, 6)):
            for i in range(3):
                score = torch.stack([q[b, i, h] @ k[b, j, h] for j in range(4)]) / math.sqrt(3)
                plain[b, i, h] = (score.softmax(0)[:, None] * v[b, :, h]).sum(0)
    torch.testing.assert_close(attention(x, memory), plain)
    attention.train()  # with dropout
    assert not torch.allclose(attention(x, memory), plain)


@pytest.mark.parametrize("out_proj", [True, False])
def test_attention_starts_as_multihead_attention(out_proj):
    torch.manual_seed(0)
    ours = Attention(64, heads=2, out_proj=out_proj)
    theirs = nn.MultiheadAttention(64, 2)
    common.initialise(ours, xavier=False)
    weights = [*theirs.in_proj_weight.chunk(3), theirs.out_proj.weight]
    layers = (ours.query, ours.key, ours.value, ours.out)
    for linear, weight in zip(layers[: 3 + out_proj], weights[: 3 + out_proj], strict=True):
        assert linear.weight.std().item() == pytest.approx(weight.std().item(), rel=0.05)
        assert not linear.bias.any()


@pytest.mark.parametrize("dim", [6, 7])
def test_sinusoid_against_formula(dim):
    table = common.sinusoid(5, dim)
    for p in range(5):
        for c in range(dim):
            angle = p / 10000 ** ((c - c % 2) / dim)
            expected = math.cos(angle) if c % 2 else math.sin(angle)
            assert table[p, c].item() == pytest.approx(expected, abs=1e-6)


# ---- decoding ------------------------------------------------------------------------------------


def test_decode_stops_at_end_and_never_says_unk():
    # The likeliest word at each step; 3 ends a caption, and so does 0.
    script = torch.tensor([[4, 3, *[5] * 10], [5, 4, 3, *[4] * 9], [4, 0, *[5] * 10]])
    seen = []

    def next_word(ids):
        logits = nn.functional.one_hot(script[:, ids.shape[1] - 1], 6).float()
        logits[:, 1] = 9.0  # UNK looks best
        seen.append(ids.tolist())
        return logits

    ids = decode(next_word, 3, 12, "cpu")
    assert ids.tolist() == [[2, 4, *[0] * 10], [2, 5, 4, *[0] * 9], [2, 4, *[0] * 10]]
    assert len(seen) == 8  # and not eleven
    assert decode(next_word, 3, 3, "cpu").tolist() == [[2, 4, 0], [2, 5, 4], [2, 4, 0]]


# ---- learning rates ------------------------------------------------------------------------------


def test_learning_rate_traces():
    step = RunConfig(lr=2e-4, lr_drop=3975, warmup=2)
    rates = [learning_rate(step, s) for s in (0, 1, 3974, 3975, 7949, 7950)]
    assert rates == pytest.approx([1e-4, 2e-4, 2e-4, 2e-5, 2e-5, 2e-6])
    cosine = RunConfig(lr=1.0, schedule="cosine", warmup=10, steps=110)
    rates = [learning_rate(cosine, s) for s in (0, 9, 10, 60)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.5])
    assert learning_rate(cosine, 109) < 1e-3
