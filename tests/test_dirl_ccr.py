"""DIRL+CCR against its equations, the released behaviour, and itself."""

import math

import numpy as np
import pytest
import torch
from released import close, fill, inputs, linear

import data
import dirl_ccr
from common import preset
from dirl_ccr import DIRL, PRESETS, RELEASED, Config, ccr_loss, channel_correlation, dirl_loss, mean_of

# ---- parity with the released code (reading "released"), recorded from it in float64 ---------------------------------


def attention(theirs: str, ours: str) -> dict[str, tuple]:
    parts = ("query", "key", "value")
    return {f"{theirs}.in_proj_weight": ([f"{ours}.{n}.weight" for n in parts], (1536, 512)),
            f"{theirs}.in_proj_bias": ([f"{ours}.{n}.bias" for n in parts], (1536,)),
            **linear(f"{theirs}.out_proj", f"{ours}.out", 512, 512)}  # fmt: skip


def released_names(words: int, channels: int, normed: bool) -> dict[int, dict[str, tuple]]:
    """Base stream -> released parameter names -> (our name or names, shape), for encoder and decoder."""
    encoder = linear("img.0", "embed.conv", 512, channels, 1, 1)
    encoder |= linear("mlp.0", "mlp.0", 2048, 512) | linear("mlp.3", "mlp.3", 512, 2048)
    encoder |= {"w_embedding.weight": ("embed.position.col.weight", (14, 256)),
                "h_embedding.weight": ("embed.position.row.weight", (14, 256))}  # fmt: skip
    for i in range(2):
        encoder |= attention(f"transformer.{i}.attention", f"cross_view.{i}.attention")
        encoder |= linear(f"transformer.{i}.norm1", f"cross_view.{i}.norm", 512)
    decoder = linear("core.fc.0", "decoder.project", 512, 300) | linear("core.embed_fc.0", "fuse.project", 512, 1024)
    decoder |= linear("logit", "decoder.head", words, 512) | {
        "core.embed.weight": ("decoder.embed.weight", (words, 300))
    }
    if normed:
        decoder |= linear("core.fc.1", "decoder.norm", 512) | linear("core.embed_fc.1", "fuse.norm", 512)
    for i in range(2):
        theirs, ours = f"core.layer.{i}", f"decoder.layers.{i}"
        decoder |= attention(f"{theirs}.self_att", f"{ours}.self_attention")
        decoder |= attention(f"{theirs}.cross_att", f"{ours}.cross_attention")
        for norm in ("norm1", "norm2", "norm3"):
            decoder |= linear(f"{theirs}.{norm}", f"{ours}.{norm}", 512)
        decoder |= linear(f"{theirs}.linear1", f"{ours}.hidden", 2048, 512)
        decoder |= linear(f"{theirs}.linear2", f"{ours}.output", 512, 2048)
    return {100: encoder, 300: decoder}


RECORDED = {
    "clevr_change": dict(
        words=76, length=24, channels=1026, D=(184141.199, 183876.504), caption=4.416183, dirl=477.988424, ccr=0.923401,
        map=(0.005184, 0.005164, 0.005054), conv=7.351671, embed=0.162486, mlp=4.690704, in_proj=0.146826,
        ids=[2, 9, 9, 9, 47, 47, 11, 9],
    ),
    "clevr_dc": dict(
        words=87, length=40, channels=1024, D=(184056.945, 183944.308), caption=4.514420, dirl=487.147995, ccr=0.668019,
        map=(0.004935, 0.005004, 0.005250), conv=7.252904, embed=0.140550, mlp=4.639959, in_proj=0.299620,
        ids=[2, 0, 0, 0, 0, 0, 0, 0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dataset", RECORDED)
def test_released_reading_meets_recorded_values(dataset):
    x = RECORDED[dataset]
    cfg = preset(Config, PRESETS, RELEASED, dataset, "released")
    model = DIRL(cfg, x["words"], (1024, 14, 14), x["length"])
    fill(model, released_names(x["words"], x["channels"], cfg.input_norm))
    before, after, caption = inputs(x["words"], x["length"])
    differences = []
    model.fuse.register_forward_pre_hook(lambda _, args: differences.append(args[0]))
    difference = model.encode(before, after)[0]
    for d, recorded in zip(differences[0].chunk(2, -1), x["D"], strict=True):
        close(d.abs().sum(), recorded, atol=1e-3)
    losses = model(before, after, caption[:, :14])  # as a batch comes: no longer than its longest caption
    for name in ("caption", "dirl", "ccr"):
        close(losses[name], x[name])
    look = model.decoder.layers[-1].cross_attention
    scores = look.scores(model.decoder(caption, difference)[1], look.key(difference))
    close(scores.softmax(-1).mean(1)[0, 0, :3], x["map"])
    (losses["caption"] + 0.03 * losses["dirl"] + 0.05 * losses["ccr"]).backward()
    close(model.embed.conv.weight.grad.norm(), x["conv"]), close(model.decoder.embed.weight.grad.norm(), x["embed"])
    close(model.mlp[0].weight.grad.norm(), x["mlp"])
    a = model.cross_view[0].attention
    close(torch.cat([m.weight.grad for m in (a.query, a.key, a.value)]).norm(), x["in_proj"])
    assert model.generate(before, after)[0, :8].tolist() == x["ids"]


# ---- equations -------------------------------------------------------------------------------------------------------

B, C, H, W, V, WORDS = 4, 5, 2, 3, 9, 12
N = H * W
CAPTION = torch.tensor([[2, 4, 5, 6, 3, 0, 0, 0], [2, 7, 3, 0, 0, 0, 0, 0], [2, 8, 9, 10, 11, 4, 5, 3],
                        [2, 7, 3, 0, 0, 0, 0, 0]])  # fmt: skip


def small(**fields) -> DIRL:
    torch.manual_seed(0)
    fields = {"dim": 8, "word_dim": 6, "heads": 2, "w_dirl": 0.1, "w_ccr": 0.1} | fields
    return DIRL(Config(**fields), WORDS, (C, H, W), V).double()


def pictures():
    torch.manual_seed(1)
    return torch.rand(2, B, C, H, W, dtype=torch.float64)


def mean(x):
    return sum(x) / len(x)


@pytest.mark.parametrize("alpha, correlate", [(0.3, True), (0.0, True), (0.3, False)])
def test_dirl_loss_against_loops(alpha, correlate):
    model, (before, after) = small(alpha=alpha, correlate=correlate).eval(), pictures()
    y_bef, y_aft = (model.mlp(model.embed(x)).reshape(B * N, 8).tolist() for x in (before, after))
    rows = range(B * N)

    def channel(y, i):
        y = [y[r][i] for r in rows]
        variance = sum((v - mean(y)) ** 2 for v in y) / (len(y) - 1)
        return [(v - mean(y)) / math.sqrt(variance + 1e-5) / math.sqrt(len(y)) for v in y]

    loss = 0.0
    for i in range(8):
        for j in range(8):
            c = sum(a * b for a, b in zip(channel(y_bef, i), channel(y_aft, j), strict=True))
            loss += (correlate * (1 - c) ** 2) if i == j else alpha * c**2
    assert model(before, after, CAPTION)["dirl"].item() == pytest.approx(loss)


def test_correlation_of_a_view_with_itself():
    y = torch.randn(10, 5, 4, dtype=torch.float64)
    standard = channel_correlation(y, 3 * y + 7, 0.0)  # scale and shift do not matter
    torch.testing.assert_close(standard, torch.from_numpy(np.corrcoef(y.reshape(50, 4).numpy().T)) * 49 / 50)


def test_a_constant_channel():
    y = torch.randn(10, 5, 4, dtype=torch.float64)
    y[..., 2] = 0.3
    y.requires_grad_()
    loss = dirl_loss(channel_correlation(y, y, 1e-5), 0.003)
    loss.backward()
    assert loss.isfinite() and y.grad.isfinite().all()
    assert dirl_loss(channel_correlation(y, y, 0.0), 0.003).isnan()  # as released


@pytest.mark.parametrize("difference", ["attention", "stream", "subtract"])
def test_difference(difference):
    model, (before, after) = small(difference=difference).eval(), pictures()
    x_bef, x_aft = model.embed(before), model.embed(after)
    if difference == "subtract":
        joined = x_bef - x_aft
    else:
        first, last = model.cross_view
        bef = first.norm(x_bef + first.attention(x_bef, x_aft))
        aft = first.norm(x_aft + first.attention(x_aft, x_bef))  # of the old pair
        s_bef, s_aft = last.attention(bef, aft), last.attention(aft, bef)
        if difference == "stream":
            s_bef, s_aft = last.norm(bef + s_bef), last.norm(aft + s_aft)
        joined = torch.cat([x_bef - s_bef, x_aft - s_aft], -1)
    expected = model.fuse.norm(model.fuse.project(joined)).relu()
    torch.testing.assert_close(model.encode(before, after)[0], expected)


def test_one_layer_is_equation_5_and_6():
    model, (before, after) = small(layers=1).eval(), pictures()
    assert model.cross_view[0].norm is None
    x_bef, x_aft = model.embed(before), model.embed(after)
    a = model.cross_view[0].attention
    joined = torch.cat([x_bef - a(x_bef, x_aft), x_aft - a(x_aft, x_bef)], -1)
    torch.testing.assert_close(model.encode(before, after)[0], model.fuse(joined))


def decoded(model, before, after, caption):
    """Eq. 8 and Eq. 9, then both after residual and norm, of the last layer, word by word: each sees the real words up
    to itself, so padding sees them all."""
    difference, x, last = model.encode(before, after)[0], model.decoder.words(caption), []
    for b in range(B):
        n, h = int((caption[b] > 0).sum()), x[b : b + 1]
        for layer in model.decoder.layers:
            rows = [
                layer_output(layer, h[:, t : t + 1], h[:, : min(n, t + 1)], difference[b : b + 1]) for t in range(V)
            ]
            h, *read = (torch.cat(column, 1) for column in zip(*rows, strict=True))
        last.append(read)
    return [torch.cat(column) for column in zip(*last, strict=True)]


def layer_output(layer, query, keys, difference):
    """A decoder layer at one word, by its equations."""
    words = layer.self_attention(query, keys)
    x1 = layer.norm1(query + words)
    visual = layer.cross_attention(x1, difference)
    x2 = layer.norm2(x1 + visual)
    return layer.norm3(x2 + layer.output(layer.hidden(x2).relu())), words, visual, x1, x2


@pytest.mark.parametrize("fields", [
    {}, {"ccr_pool": "padded"}, {"ccr_states": "normed"}, {"ccr_logits": "summed"}, {"ccr_equal_captions": "negatives"},
    RELEASED["all"] | {"channel_eps": 1e-5},
])  # fmt: skip
def test_ccr_loss_against_loops(fields):
    model, (before, after) = small(**fields).eval(), pictures()
    cfg = model.cfg
    caption = torch.nn.functional.pad(CAPTION, (0, 1))  # max_len
    states = decoded(model, before, after, caption)
    pooled = []
    for x in states[:2] if cfg.ccr_states == "attention" else states[2:]:
        counts = [V if cfg.ccr_pool == "padded" else int((caption[b] > 0).sum()) for b in range(B)]
        pooled.append([mean([x[b, t] for t in range(counts[b])]) for b in range(B)])
    s = [[(w @ v).item() / 0.5 for v in pooled[1]] for w in pooled[0]]
    if cfg.ccr_logits == "summed":
        s = [[(s[a][b] + s[b][a]) / 2 for b in range(B)] for a in range(B)]

    def nce(s):
        total = 0.0
        for a in range(B):
            others = [b for b in range(B) if b == a or cfg.ccr_equal_captions == "negatives" or {a, b} != {1, 3}]
            total -= s[a][a] - math.log(sum(math.exp(s[a][b]) for b in others))
        return total / B

    expected = nce(s) if cfg.ccr_logits == "summed" else (nce(s) + nce([list(row) for row in zip(*s, strict=True)])) / 2
    assert model(before, after, CAPTION)["ccr"].item() == pytest.approx(expected)


def test_ccr_cannot_be_met_by_the_words_alone():
    """Without differences every attended vector is the same, and L_ccr cannot fall below log B; the release's can, for
    its visual vector holds the words."""

    def lowest(**fields):
        model = small(dim=32, heads=4, dropout=0.0, **fields).float()
        caption = torch.randint(4, WORDS, (B, 6), generator=torch.Generator().manual_seed(0))
        adam = torch.optim.Adam(model.decoder.parameters(), lr=1e-2)
        for _ in range(60):
            _, _, *states = model.decoder(caption, torch.zeros(B, N, 32))
            words, visual = (mean_of(x, caption > 0) for x in states)
            loss = ccr_loss(words, visual, torch.zeros(B, B, dtype=torch.bool), 0.5, model.cfg.ccr_logits)
            adam.zero_grad(), loss.backward(), adam.step()
        return loss.item()

    for logits in ("two_way", "summed"):
        assert lowest(ccr_logits=logits) > math.log(B) - 1e-4
        assert lowest(ccr_logits=logits, ccr_states="normed") < 0.1


def test_a_batch_of_one_sentence_has_no_negatives():
    model, (before, after) = small(), pictures()
    losses = model(before, after, CAPTION[1:2].expand(B, -1))
    assert losses["ccr"].item() == 0
    losses["ccr"].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_caption_loss_against_loop():
    model, (before, after) = small().eval(), pictures()
    logits = model.decoder.head(model.decoder(CAPTION, model.encode(before, after)[0])[0])
    chosen = [(b, t) for b in range(B) for t in range(7) if CAPTION[b, t + 1]]
    losses = [-logits[b, t].log_softmax(-1)[CAPTION[b, t + 1]].item() for b, t in chosen]
    assert model(before, after, CAPTION)["caption"].item() == pytest.approx(mean(losses))


def test_padded_pooling_does_not_depend_on_how_a_batch_is_cut():
    model, (before, after) = small(ccr_pool="padded").eval(), pictures()
    whole = model(before, after, torch.nn.functional.pad(CAPTION, (0, 1)))
    for name, loss in model(before, after, CAPTION).items():
        torch.testing.assert_close(loss, whole[name])


@pytest.mark.parametrize("fields", [{}, {"w_dirl": 0.0}, {"w_ccr": 0.0}])
def test_total_is_equation_16(fields):
    model, (before, after) = small(**{"w_dirl": 0.03, "w_ccr": 0.2} | fields).float().eval(), pictures().float()
    cfg = model.cfg
    cfg.device = "cpu"
    batches = tuple(data.Batch(*pair, CAPTION, [], []) for pair in ((before, after), (after, before)))
    losses = dirl_ccr.losses_of(model, batches, cfg)
    assert set(losses) == {"caption", "total"} | {n for n in ("dirl", "ccr") if getattr(cfg, f"w_{n}")}
    parts = [model(b.before, b.after, b.caption) for b in batches]
    weights = {"caption": 1, "dirl": cfg.w_dirl, "ccr": cfg.w_ccr}
    expected = sum(weights[name] * (parts[0][name] + parts[1][name]).item() / 2 for name in parts[0])
    assert losses["total"].item() == pytest.approx(expected)


# ---- learning, presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"difference": "stream", "layers": 3}, {"input_norm": False, "ccr_states": "normed"}]
)
def test_every_parameter_learns(fields):
    model = small(**fields).float()
    optimizer, start = (
        torch.optim.Adam(model.parameters(), lr=1e-2),
        {n: p.clone() for n, p in model.named_parameters()},
    )
    before, after = pictures().float()
    sum(model(before, after, CAPTION).values()).backward()
    optimizer.step()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any() or torch.equal(p, start[n])]
    key_bias = [
        n for n in dead if n.endswith("attention.key.bias")
    ]  # a softmax does not see what shifts all its scores
    assert set(dead) <= set(key_bias), f"no gradient reaches {dead}"


def test_attention_and_matrices_start_as_released():
    model = DIRL(Config(dim=64), WORDS, (C, H, W), V)
    for module in (model.cross_view[0].attention, model.decoder.layers[0].self_attention):
        stacked = torch.cat([module.query.weight, module.key.weight, module.value.weight])
        bound = math.sqrt(6 / (64 + 3 * 64))  # Xavier of one matrix (3D, D)
        assert 0.9 * bound < stacked.abs().max() <= bound and not module.query.bias.any() and not module.out.bias.any()
    bound = math.sqrt(6 / (WORDS + 300))
    assert 0.9 * bound < model.decoder.embed.weight.abs().max() <= bound
    plain = DIRL(Config(dim=64, xavier=False), WORDS, (C, H, W), V).decoder.embed.weight
    assert 0.9 < plain[1:].std() < 1.1 and not plain[0].any()


def test_presets_and_readings():
    parse = lambda *argv: dirl_ccr.parse_args(Config, PRESETS, "s", "d", [*argv, "--device", "cpu"], RELEASED)[0]
    for dataset, own in (("clevr_change", {"input_norm", "xavier", "steps"}), ("clevr_dc", {"steps"}), ("mini", set())):
        paper, released = parse("--dataset", dataset), parse("--dataset", dataset, "--reading", "released")
        changed = {k for k in vars(paper) if getattr(paper, k) != getattr(released, k)}
        assert changed == set(RELEASED["all"]) | {"reading"} | own
    weights = (0.5, 0.3), (0.03, 0.05), (0.5, 0.004), (0.001, 0.05)  # section 4.6
    for dataset, both in zip(
        ("clevr_change", "clevr_dc", "spot_the_diff", "image_editing_request"), weights, strict=True
    ):
        cfg = parse("--dataset", dataset)
        assert (cfg.w_dirl, cfg.w_ccr) == both
