"""DIRL+CCR against its equations, the released behaviour, and itself."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import CAPTION, WORDS, B, C, H, L, N, W, mean, pictures
from released import SIZES, close, close_gradients, dirl_names, fill, inputs, recorded, total
from torch._functorch import config as functorch_config

import common
from common import InputError
from dirl_ccr import (
    DIRL,
    PRESETS,
    RELEASED,
    Config,
    caption_loss,
    ccr_loss,
    channel_correlation,
    dirl_loss,
)
from support.run import preset

# ---- parity with the released code (its variant), recorded from it in float64 --------------------


@pytest.mark.parametrize("dataset", SIZES)
def test_released_variant_meets_recorded_values(dataset):
    expected = recorded("DIRL", dataset)
    words, length, channels = SIZES[dataset]
    cfg = preset(Config, PRESETS, RELEASED, dataset, "released")
    names = dirl_names(words, channels, cfg.input_norm)
    model = fill(DIRL(cfg, words, (1024, 14, 14), length), names)
    before, after, caption = inputs(words, length)
    fused = []
    model.fuse.register_forward_pre_hook(lambda _, args: fused.extend(args))
    difference, _, _ = model.encode(before, after)
    before_part, after_part = fused
    close(before_part.abs().sum(), expected["before"], atol=1e-3)
    close(after_part.abs().sum(), expected["after"], atol=1e-3)
    losses = model(before, after, caption)
    for name, loss in losses.items():
        close(loss, expected["losses"][name])
    *_, x1 = model.decoder(caption, difference)
    attention = model.decoder.layers[-1].cross_attention
    q, k, _ = attention.project(x1, difference)
    close(attention.scores(q, k).softmax(-1).mean(1)[0, 0, :3], expected["map"])
    total(losses).backward()
    close_gradients(model, names, expected["gradients"])
    assert model.generate(before, after)[0, :8].tolist() == expected["ids"]


# ---- equations -----------------------------------------------------------------------------------

CAPTION = CAPTION[[0, 1, 2, 1], :8]  # two sentences are the same


def naive_nce(s):
    """-mean_a log softmax_b(s)_aa."""
    total = 0.0
    for a in range(len(s)):
        total -= float(s[a, a]) - math.log(sum(math.exp(float(v)) for v in s[a]))
    return total / len(s)


def small(**fields) -> DIRL:
    torch.manual_seed(0)
    fields = {"dim": 8, "word_dim": 6, "heads": 2, "w_dirl": 0.1, "w_ccr": 0.1} | fields
    return DIRL(Config(**fields), WORDS, (C, H, W), L).double()


@pytest.mark.parametrize("xavier, std", [(True, math.sqrt(2 / 192)), (False, math.sqrt(1 / 384))])
def test_initial_weights(xavier, std):
    """Without `xavier`, linear layers of fusion and decoder keep PyTorch's."""
    model = small(dim=64, xavier=xavier)
    assert model.fuse.project.weight.std().item() == pytest.approx(std, rel=0.1)
    std = math.sqrt(2 / (64 + C + 2))  # of C + 2 channels, with the coordinates
    assert model.embed.conv.weight.std().item() == pytest.approx(std, rel=0.1)


def test_the_examples_of_the_docstrings():
    y = torch.tensor([[[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]])
    torch.testing.assert_close(channel_correlation(y, y, 0.0), 0.75 * torch.eye(2))
    c = torch.tensor([[0.5, 0.2], [0.0, 1.0]])
    assert dirl_loss(c, 0.1).item() == pytest.approx(0.254)
    own = torch.eye(2)[:, None]  # (B, L, D) of one word each
    loss = ccr_loss(own, own, torch.tensor([[4], [5]]), 0.5)
    assert loss.item() == pytest.approx(0.127, abs=5e-4)
    assert ccr_loss(own, own, torch.tensor([[4], [4]]), 0.5).item() == 0
    likely = torch.tensor([[[1 / 6, 1 / 6, 1 / 6, 1 / 2], [1 / 4] * 4, [1 / 4] * 4]])
    caption = torch.tensor([[2, 3, 1]])
    assert caption_loss(likely.log(), caption).item() == pytest.approx(1.04, abs=5e-4)


def test_without_a_layer_there_is_no_difference():
    with pytest.raises(InputError, match="--layers 0"):
        small(layers=0)


@pytest.mark.parametrize("alpha, correlate", [(0.3, True), (0.0, True), (0.3, False)])
def test_dirl_loss_against_loops(alpha, correlate):
    model = small(alpha=alpha, correlate=correlate).eval()
    before, after = pictures()
    y_bef = model.mlp(model.embed(before)).reshape(B * N, 8).tolist()
    y_aft = model.mlp(model.embed(after)).reshape(B * N, 8).tolist()

    def standardised(y, channel):
        values = [row[channel] for row in y]
        variance = sum((v - mean(values)) ** 2 for v in values) / (B * N - 1)
        return [(v - mean(values)) / math.sqrt(variance + 1e-5) for v in values]

    loss = 0.0
    for i in range(8):
        for j in range(8):
            z_bef = standardised(y_bef, i)
            z_aft = standardised(y_aft, j)
            c = mean([a * b for a, b in zip(z_bef, z_aft, strict=True)])
            if i != j:
                loss += alpha * c**2
            elif correlate:
                loss += (1 - c) ** 2
    assert model(before, after, CAPTION)["dirl"].item() == pytest.approx(loss)


def test_the_compiled_correlation_has_gradients_in_float32():
    """Under autocast (here the CPU's), as it is compiled on CUDA."""

    def gradient(function):
        y = torch.rand(2, B, N, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            c = function(y[0], y[1], 1e-5)
        return torch.autograd.grad(c.diagonal().sum(), y)

    with functorch_config.patch(backward_pass_autocast="same_as_forward"):
        common.set_up_device("cuda")
        compiled = torch.compile(channel_correlation, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(gradient(compiled), gradient(channel_correlation))
    common.set_up_device("cpu")


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("difference", ["attention", "residual", "subtract"])
def test_difference(difference, layers):
    """With one layer, "attention" is Eq. 5-7 as printed."""
    model = small(difference=difference, layers=layers).eval()
    before, after = pictures()
    x_bef = model.embed(before)
    x_aft = model.embed(after)
    if difference == "subtract":
        joined = x_bef - x_aft
    else:
        shared_bef = x_bef
        shared_aft = x_aft
        for i, layer in enumerate(model.cross_view):
            attended_bef = layer.attention(shared_bef, shared_aft)  # both of the old pair
            attended_aft = layer.attention(shared_aft, shared_bef)
            if difference == "residual" or i < layers - 1:
                attended_bef = layer.norm(shared_bef + attended_bef)
                attended_aft = layer.norm(shared_aft + attended_aft)
            shared_bef = attended_bef
            shared_aft = attended_aft
        joined = torch.cat([x_bef - shared_bef, x_aft - shared_aft], -1)
    expected = model.fuse.norm(model.fuse.project(joined)).relu()
    torch.testing.assert_close(model.encode(before, after)[0], expected)


def pooled_states(model, before, after, caption):
    """Eq. 12 of each pair: means over its real words of Eq. 8 and 9 of the last layer, word by
    word. -> two lists of (D,)"""
    difference, _, _ = model.encode(before, after)
    pooled_words = []
    pooled_visual = []
    for b in range(B):
        length = int((caption[b] > 0).sum())
        decoder = model.decoder
        h = decoder.embed(caption[b : b + 1, :length]) + decoder.position[:length]
        h = decoder.norm(decoder.project(h))
        for layer in model.decoder.layers:
            words = []
            for t in range(length):  # each word sees itself and earlier ones
                words.append(layer.self_attention(h[:, t : t + 1], h[:, : t + 1]))
            words = torch.cat(words, 1)  # Eq. 8
            x1 = layer.norm1(h + words)
            visual = layer.cross_attention(x1, difference[b : b + 1])  # Eq. 9
            x2 = layer.norm2(x1 + visual)
            h = layer.norm3(x2 + layer.output(layer.widen(x2).relu()))
        pooled_words.append(mean(words[0]))
        pooled_visual.append(mean(visual[0]))
    return pooled_words, pooled_visual


@pytest.mark.parametrize("equal_captions", ["ignored", "negatives"])
def test_ccr_loss_against_loops(equal_captions):
    """The released one is tested by recorded values, above."""
    model = small(ccr_equal_captions=equal_captions).eval()
    before, after = pictures()
    caption = F.pad(CAPTION, (0, 1))  # to max_len
    words, visual = pooled_states(model, before, after, caption)
    s = torch.zeros(B, B, dtype=torch.float64)  # Eq. 13
    for a in range(B):
        for b in range(B):
            s[a, b] = (words[a] @ visual[b]).item() / 0.5
    if equal_captions == "ignored":
        s[1, 3] = s[3, 1] = -math.inf  # the two have the same sentence
    expected = (naive_nce(s) + naive_nce(s.T)) / 2
    assert model(before, after, caption)["ccr"].item() == pytest.approx(expected)


def test_a_batch_of_one_sentence_has_no_negatives():
    model = small()
    before, after = pictures()
    losses = model(before, after, CAPTION[1:2].expand(B, -1))
    assert losses["ccr"].item() == 0
    losses["ccr"].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_the_released_means_run_over_padding():
    """Up to the longest caption of the data set, so captions of a batch must be that long. Padding
    itself is not seen."""
    model = small(ccr_form="released").eval()
    before, after = pictures()
    with pytest.raises(AssertionError, match="pad captions to max_len"):
        model(before, after, CAPTION)
    padded = F.pad(CAPTION, (0, 1))
    difference, _, _ = model.encode(before, after)
    hidden, words, visual, _ = model.decoder(padded, difference)
    s = (words.mean(1) @ visual.mean(1).T / 0.5).detach()
    expected = naive_nce((s + s.T) / 2)
    assert model(before, after, padded)["ccr"].item() == pytest.approx(expected)
    with torch.no_grad():
        model.decoder.embed.weight[0] += 1  # the word of padding
        moved, *_ = model.decoder(padded, difference)
    changes = (moved - hidden).abs().amax(-1) > 0
    assert torch.equal(changes, padded == 0)


def test_both_decoders_agree_on_words():
    """The one of the paper has no mask for padding, and needs none."""
    plain = small().eval()
    released = small(ccr_form="released").eval()
    before, after = pictures()
    padded = F.pad(CAPTION, (0, 1))
    difference, _, _ = plain.encode(before, after)
    hidden, _, _, x1 = plain.decoder(padded, difference)
    same, states, _, _ = released.decoder(padded, difference)
    real = padded > 0
    torch.testing.assert_close(same[real], hidden[real])
    torch.testing.assert_close(states[real], x1[real])
    assert torch.equal(plain.generate(before, after), released.generate(before, after))
