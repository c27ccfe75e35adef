"""SCORER+CBR against its equations, the released behaviour, and itself."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import CAPTION, WORDS, B, C, H, L, N, W, pictures
from released import close, close_gradients, fill, inputs, recorded, scorer_names, total

from matching import match_by_definition
from scorer_cbr import (
    PRESETS,
    RELEASED,
    SCORER,
    Config,
    Match,
    caption_loss,
    cbr_loss,
    match_loss,
)
from support.run import preset

# ---- parity with the released code (its variant), recorded from it in float64 --------------------


def test_released_variant_meets_recorded_values():
    expected = recorded("SCORER")
    cfg = preset(Config, PRESETS, RELEASED, "clevr_change", "released")
    model = fill(SCORER(cfg, 76, (1024, 14, 14), 24), scorer_names())
    before, after, caption = inputs(76, 24)
    difference, x_bef, _, queries_and_keys = model.encode(before, after)
    close(x_bef.abs().sum(), expected["x_bef"], atol=1e-3)
    close(difference.abs().sum(), expected["difference"], atol=1e-3)
    look = model.decoder.layers[-1].cross_attention
    queries = []
    look.query.register_forward_hook(lambda module, args, out: queries.append(out))
    losses = model(before, after, caption)
    for name, loss in losses.items():
        close(loss, expected["losses"][name])
    q_bef, k_aft, q_aft, k_bef = queries_and_keys[-1]
    close(model.match(q_bef, k_aft)[0], expected["bef_to_aft"])
    close(model.match(q_aft, k_bef)[0], expected["aft_to_bef"])
    scores = look.scores(queries[0], look.key(difference))
    close(scores.mean(1)[0, 0, :3], expected["scores"])
    total(losses).backward()
    close_gradients(model, scorer_names(), expected["gradients"])
    assert not any(p.requires_grad for p in model.reasoning.parameters())
    assert model.generate(before, after)[0, :8].tolist() == expected["ids"]


# ---- equations -----------------------------------------------------------------------------------


def small(**fields) -> SCORER:
    torch.manual_seed(0)
    fields = {"dim": 8, "word_dim": 6, "heads": 2, "w_match": 0.1, "w_cbr": 0.1} | fields
    return SCORER(Config(**fields), WORDS, (C, H, W), L).double()


@torch.no_grad()
def naive_match(q, k, heads=1):
    """Eq. 2-3 to the letter."""
    out = torch.zeros(len(q), len(k), dtype=torch.float64)
    width = q.shape[2] // heads
    for a in range(len(q)):
        for b in range(len(k)):
            for h in range(heads):
                part = slice(h * width, (h + 1) * width)
                s = []
                for x in q[a]:
                    s.append([float(x[part] @ y[part]) for y in k[b]])
                columns = zip(*s, strict=True)
                there = sum(max(row) for row in s) / len(q[a])
                back = sum(max(column) for column in columns) / len(k[b])
                out[a, b] += (there + back) / 2 / heads
    return out


@torch.no_grad()
def naive_nce(s):
    """-mean_a log softmax_b(s)_aa."""
    total = 0.0
    for a in range(len(s)):
        total -= float(s[a, a]) - math.log(sum(math.exp(float(v)) for v in s[a]))
    return total / len(s)


def test_the_examples_of_the_docstrings():
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    k = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    assert match_by_definition(q, k, heads=1).item() == 0.75
    assert Match(Config(heads=1))(q, k).item() == pytest.approx(0.75 * math.e)
    ln3 = math.log(3)
    found = torch.tensor([[ln3, 0.0], [0.0, ln3]])
    assert match_loss(found, torch.zeros(2, 2)).item() == pytest.approx(0.490, abs=5e-4)
    one_for_both = torch.tensor([[ln3, 0.0], [ln3, 0.0]])
    assert cbr_loss(one_for_both).item() == pytest.approx(0.765, abs=5e-4)
    likely = torch.tensor([[[1 / 6, 1 / 6, 1 / 6, 1 / 2], [1 / 4] * 4, [1 / 4] * 4]])
    caption = torch.tensor([[2, 3, 1]])
    assert caption_loss(likely.log(), caption).item() == pytest.approx(1.04, abs=5e-4)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_match_by_definition_against_loops(heads):
    """Images have different numbers of tokens. token_match is tested in test_matching.py."""
    torch.manual_seed(0)
    q = torch.randn(3, 5, 6, dtype=torch.float64)
    k = torch.randn(4, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(match_by_definition(q, k, heads), naive_match(q, k, heads))


@pytest.mark.parametrize("matching", ["mtm", "tm", "mean", "max"])
def test_match_loss_against_loops(matching):
    model = small(matching=matching)
    before, after = pictures()
    layer = model.cross_view[0].attention
    x_bef = model.embed(before)
    x_aft = model.embed(after)

    def plain(q, k):
        if matching == "mean":
            return math.e * q.mean(1) @ k.mean(1).T
        if matching == "max":
            return math.e * q.max(1).values @ k.max(1).values.T
        heads = 2 if matching == "mtm" else 1
        return math.e * naive_match(q, k, heads)

    bef_to_aft = naive_nce(plain(layer.query(x_bef), layer.key(x_aft)))
    aft_to_bef = naive_nce(plain(layer.query(x_aft), layer.key(x_bef)))
    loss = model(before, after, CAPTION)["match"].item()
    assert loss == pytest.approx((bef_to_aft + aft_to_bef) / 2)


def test_cbr_loss_against_loops():
    """With the mean over words. The released one is tested by recorded values, above."""
    model = small().eval()
    before, after = pictures()
    cbr = model.reasoning
    difference, x_bef, x_aft, _ = model.encode(before, after)
    hidden, _ = model.decoder(CAPTION, difference)
    hat = torch.zeros(B, N, 8, dtype=torch.float64)
    for b in range(B):
        words = int((CAPTION[b] > 0).sum())
        s = hidden[b, :words].mean(0)
        cells = [cbr.join(torch.cat([x_bef[b, n], s])) for n in range(N)]
        joined = torch.stack(cells)[None]
        attended, _ = cbr.attention(joined, joined, joined)
        hat[b] = cbr.output(attended)[0]
    r = math.e * naive_match(cbr.query(hat), cbr.key(x_aft), heads=2)
    expected = (naive_nce(r) + naive_nce(r.T)) / 2
    assert model(before, after, CAPTION)["cbr"].item() == pytest.approx(expected)


@pytest.mark.parametrize("fusion", ["cat", "sum", "hadamard", "subtract"])
def test_fusion(fusion):
    """With "subtract", only the bare difference is seen."""
    before, after = pictures()
    if fusion == "subtract":
        model = small(difference="subtract", w_match=0.0).eval()
        joined = model.embed(before) - model.embed(after)
    else:
        model = small(fusion=fusion, layers=1).eval()
        a, b, _ = model.cross_view[0](model.embed(before), model.embed(after))
        joined = {"cat": torch.cat([a, b], -1), "sum": a + b, "hadamard": a * b}[fusion]
    expected = model.fuse.project(joined).relu()
    torch.testing.assert_close(model.encode(before, after)[0], expected)


def test_decoder_layer():
    """With the standard residual. The released one is tested by recorded values, above."""
    layer = small().decoder.layers[0].eval()
    cross = layer.cross_attention
    x = torch.randn(B, 1, 8, dtype=torch.float64)
    difference = torch.randn(B, N, 8, dtype=torch.float64)
    a = layer.norm1(x + layer.self_attention(x, x))
    c = layer.norm2(a + cross(a, difference))
    g = F.gelu(layer.widen(c))
    x3, _ = layer(x, difference)
    torch.testing.assert_close(x3, layer.norm3(layer.output(g) + c))


# ---- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("xavier, std", [(True, math.sqrt(2 / (64 + 64))), (False, 0.02)])
def test_initial_weights_of_the_decoder(xavier, std):
    weight = small(dim=64, xavier=xavier).decoder.layers[0].widen.weight
    assert weight.std().item() == pytest.approx(std, rel=0.1)


def test_the_learned_scales_stay_below_100():
    model = SCORER(Config(dim=16, heads=2), WORDS, (C, H, W), L)
    model.match.log_scale.data.fill_(4.0)
    model.reasoning.match.log_scale.data.fill_(9.0)
    model.clamp_scales()
    assert model.match.log_scale.item() == pytest.approx(4)
    assert model.reasoning.match.log_scale.exp().item() == pytest.approx(100)
