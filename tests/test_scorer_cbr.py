"""SCORER+CBR against its equations, the released behaviour, and itself."""

import math

import pytest
import torch
import torch.nn.functional as F
from released import close, fill, inputs, linear

import data
import scorer_cbr
from scorer_cbr import RELEASED, SCORER, Config, similarity

# ---- parity with the released code (reading "released"), recorded from it in float64 ---------------------------------


ATTENTION = ("query", "key", "value")


def released_names() -> dict[int, dict[str, tuple]]:
    """Base stream -> released parameter names -> (our name or names, shape), for encoder, decoder and CBR."""
    encoder = linear("img.0", "embed.conv", 512, 1026, 1, 1) | linear("embed_fc.0", "fuse.project", 512, 1024)
    encoder |= {"w_embedding.weight": ("embed.position.col.weight", (14, 256)),
                "h_embedding.weight": ("embed.position.row.weight", (14, 256))}  # fmt: skip
    for i in range(2):
        for name in ATTENTION:
            encoder |= linear(f"scorer.{i}.attention.{name}", f"cross_view.{i}.attention.{name}", 512, 512)
        encoder |= linear(f"scorer.{i}.attention.layer_norm", f"cross_view.{i}.norm", 512)
        encoder[f"scorer.{i}.attention.logit_scale"] = (None, ())
    decoder = linear("core.fc.0", "decoder.project", 512, 300) | linear("core.fc.2", "decoder.norm", 512)
    decoder |= linear("logit", "decoder.head", 76, 512) | {"core.embed.weight": ("decoder.embed.weight", (76, 300))}
    for i in range(2):
        for theirs, ours in (("self_attention", "self_attention"), ("dec_enc_attention", "cross_attention")):
            for name in ATTENTION:
                decoder |= linear(f"core.layer.{i}.{theirs}.{name}", f"decoder.layers.{i}.{ours}.{name}", 512, 512)
        for theirs, ours in (("norm1", "norm1"), ("norm2", "norm2"), ("output.LayerNorm", "norm3")):
            decoder |= linear(f"core.layer.{i}.{theirs}", f"decoder.layers.{i}.{ours}", 512)
        for theirs, ours in (("hidden_intermediate.dense", "hidden"), ("output.dense", "output")):
            decoder |= linear(f"core.layer.{i}.{theirs}", f"decoder.layers.{i}.{ours}", 512, 512)
    cbr = linear("conv1", "cbr.join", 512, 1024, 1, 1) | linear("conv2.0", "cbr.output", 512, 512, 1, 1)
    cbr |= {"mh_att.in_proj_weight": ("cbr.attention.in_proj_weight", (1536, 512)), "contra.logit_scale": (None, ()),
            "mh_att.out_proj.weight": ("cbr.attention.out_proj.weight", (512, 512))}  # fmt: skip
    cbr |= linear("contra.query", "cbr.query", 512, 512) | linear("contra.key", "cbr.key", 512, 512)
    return {100: encoder, 300: decoder, 500: cbr}


@pytest.fixture(scope="module")
def fixture():
    cfg = Config(**scorer_cbr.PRESETS["clevr_change"], **RELEASED["all"] | {"train_cbr": True})
    return fill(SCORER(cfg, 76, (1024, 14, 14), 24), released_names()), *inputs(76, 24)


def test_released_reading_meets_recorded_values(fixture):
    model, before, after, caption = fixture
    difference, x_bef, _, tokens = model.encode(before, after)
    close(x_bef.abs().sum(), 59178.566, atol=1e-3), close(difference.abs().sum(), 76022.024, atol=1e-3)
    losses = model(before, after, caption)
    close(losses["caption"], 4.620655), close(losses["match"], 1.764648), close(losses["cbr"], 1.101593)
    there, back = (similarity(q, k, model.log_scale, model.cfg.matching, 8) for q, k in tokens[-1])
    close(there[0], [54.499477, 56.707699, 53.308426]), close(back[0], [52.554564, 55.211010, 55.018642])
    look = model.decoder.layers[-1].cross_attention
    scores = look.scores(model.decoder(caption, difference)[1], look.key(difference))
    close(scores.mean(1)[0, 0, :3], [0.113618, 0.108001, 0.178722])
    model.zero_grad()
    (losses["caption"] + 0.1 * losses["match"] + 0.001 * losses["cbr"]).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    close(grads["embed.conv.weight"].norm(), 5.234595), close(grads["decoder.embed.weight"].norm(), 0.145211)
    close(grads["cross_view.1.attention.query.weight"].norm(), 2.688840), close(grads["log_scale"], 0.108741)
    assert model.generate(before, after)[0, :8].tolist() == [2, 43, 43, 43, 69, 69, 43, 48]


# ---- equations -------------------------------------------------------------------------------------------------------

B, C, H, W, V, WORDS = 4, 5, 2, 3, 9, 12
N = H * W
CAPTION = torch.tensor([[2, 4, 5, 6, 3, 0, 0, 0, 0], [2, 7, 3, 0, 0, 0, 0, 0, 0], [2, 8, 9, 10, 11, 4, 5, 3, 0],
                        [2, 5, 5, 3, 0, 0, 0, 0, 0]])  # fmt: skip


def small(**fields) -> SCORER:
    torch.manual_seed(0)
    fields = {"dim": 8, "word_dim": 6, "heads": 2, "w_match": 0.1, "w_cbr": 0.1} | fields
    return SCORER(Config(**fields), WORDS, (C, H, W), V).double()


def pictures():
    torch.manual_seed(1)
    return torch.rand(2, B, C, H, W, dtype=torch.float64)


@torch.no_grad()
def naive_match(q, k, heads=1):
    """Eq. 2-3 word for word."""
    out, d = torch.zeros(len(q), len(k), dtype=torch.float64), q.shape[2] // heads
    for a in range(len(q)):
        for b in range(len(k)):
            for h in range(heads):
                s = [[float(x[h * d : (h + 1) * d] @ y[h * d : (h + 1) * d]) for y in k[b]] for x in q[a]]
                there = sum(max(row) for row in s) / len(s)
                back = sum(max(row[m] for row in s) for m in range(len(s[0]))) / len(s[0])
                out[a, b] += (there + back) / 2 / heads
    return out


@torch.no_grad()
def naive_nce(s):
    return -sum(float(s[a, a]) - math.log(sum(math.exp(float(v)) for v in s[a])) for a in range(len(s))) / len(s)


@pytest.mark.parametrize("matching", ["mtm", "tm", "mean", "max"])
def test_match_loss_against_loops(matching):
    model, (before, after) = small(matching=matching), pictures()
    layer, x_bef, x_aft = model.cross_view[0].attention, model.embed(before), model.embed(after)

    def plain(q, k):
        if matching in ("mean", "max"):
            pool = (lambda x: x.mean(1)) if matching == "mean" else (lambda x: x.max(1).values)
            return math.e * pool(q) @ pool(k).T
        return math.e * naive_match(q, k, heads=2 if matching == "mtm" else 1)

    expected = naive_nce(plain(layer.query(x_bef), layer.key(x_aft))) + naive_nce(
        plain(layer.query(x_aft), layer.key(x_bef))
    )
    assert model(before, after, CAPTION)["match"].item() == pytest.approx(expected / 2)


@pytest.mark.parametrize("sentence_mean", ["words", "padded"])
def test_cbr_loss_against_loops(sentence_mean):
    model, (before, after) = small(sentence_mean=sentence_mean).eval(), pictures()
    x_bef, x_aft, cbr = model.embed(before), model.embed(after), model.cbr
    hidden, _ = model.decoder(CAPTION, model.encode(before, after)[0])
    hat = torch.zeros(B, N, 8, dtype=torch.float64)
    for b in range(B):
        words = int((CAPTION[b] > 0).sum())
        s = hidden[b, :words].sum(0) / (words if sentence_mean == "words" else V)
        joined = torch.stack([cbr.join(torch.cat([x_bef[b, n], s])) for n in range(N)])[None]
        hat[b] = cbr.output(cbr.attention(joined, joined, joined)[0])[0]
    r = math.e * naive_match(cbr.query(hat), cbr.key(x_aft), heads=2)
    assert model(before, after, CAPTION)["cbr"].item() == pytest.approx((naive_nce(r) + naive_nce(r.T)) / 2)


def test_caption_loss_against_loop():
    model, (before, after) = small().eval(), pictures()
    logits = model.decoder.head(model.decoder(CAPTION, model.encode(before, after)[0])[0])
    losses = [
        -float(logits[b, t].log_softmax(-1)[CAPTION[b, t + 1]])
        for b in range(B)
        for t in range(V - 1)
        if CAPTION[b, t + 1]
    ]
    assert model(before, after, CAPTION)["caption"].item() == pytest.approx(sum(losses) / len(losses))


def test_embedding_is_projection_coordinates_and_position():
    model, (before, _) = small(), pictures()
    x = model.embed(before)
    assert x.shape == (B, N, 8)
    row, col = 1, 2
    cell = torch.cat([before[0, :, row, col], torch.tensor([2 * col / W - 1, 2 * row / H - 1])])
    expected = model.embed.conv.weight[:, :, 0, 0] @ cell + model.embed.conv.bias
    expected = expected + torch.cat([model.embed.position.col.weight[col], model.embed.position.row.weight[row]])
    torch.testing.assert_close(x[0, row * W + col], expected)


def test_both_directions_use_the_old_pair():
    layer = small().cross_view[0].eval()
    x_bef, x_aft = torch.randn(2, B, N, 8, dtype=torch.float64)
    *new, tokens = layer(x_bef, x_aft)
    for ours, (q, k), (x, partner) in zip(new, tokens, ((x_bef, x_aft), (x_aft, x_bef)), strict=True):
        torch.testing.assert_close(ours, layer.norm(x + layer.attention(x, partner)))
        (
            torch.testing.assert_close(q, layer.attention.query(x)),
            torch.testing.assert_close(k, layer.attention.key(partner)),
        )


@pytest.mark.parametrize("fusion", ["cat", "sum", "hadamard"])
def test_fusion(fusion):
    model, (before, after) = small(fusion=fusion, layers=1).eval(), pictures()
    a, b, _ = model.cross_view[0](model.embed(before), model.embed(after))
    joined = {"cat": torch.cat([a, b], -1), "sum": a + b, "hadamard": a * b}[fusion]
    torch.testing.assert_close(model.encode(before, after)[0], model.fuse.project(joined).relu())


def test_subtraction_sees_the_bare_difference_only():
    model, (before, after) = small(difference="subtract", w_match=0.0), pictures()
    d = model.eval().encode(before, after)[0]
    torch.testing.assert_close(d, model.fuse.project(model.embed(before) - model.embed(after)).relu())
    torch.testing.assert_close(d, model.encode(before + 0.3, after + 0.3)[0])
    with pytest.raises(ValueError, match="--w_match 0"):
        small(difference="subtract")


def test_first_layer_matching_has_no_leak_and_last_layer_has():
    """Unrelated images: with fresh data each step nothing can be learned, unless a layer has shown each its partner."""

    def top1(match_layer):
        torch.manual_seed(0)
        model = SCORER(
            Config(dim=32, word_dim=6, heads=4, match_layer=match_layer, w_cbr=0.0, dropout=0.0), WORDS, (8, 2, 3), V
        )
        adam = torch.optim.Adam(model.parameters(), lr=3e-3)
        hits = []
        for step in range(130):
            style = torch.randn(2, 12, 8, 1, 1)  # each image its own, no two related
            before, after = style + 0.3 * torch.randn(2, 12, 8, 2, 3)
            tokens = model.encode(before, after)[3][0 if match_layer == "first" else -1]
            scores, back = (similarity(q, k, model.log_scale, "mtm", 4) for q, k in tokens)
            adam.zero_grad(), scorer_cbr.match_loss(scores, back).backward(), adam.step()
            hits += [(scores.argmax(1) == torch.arange(12)).float().mean().item()] if step >= 100 else []
        return sum(hits) / len(hits)

    assert top1("last") > 0.9
    assert top1("first") < 0.3  # chance: 1/12


def test_two_readings_of_the_feed_forward():
    for residual in ("input", "activation"):
        layer = small(ffn_residual=residual).decoder.layers[0].eval()
        x, memory = torch.randn(B, 1, 8, dtype=torch.float64), torch.randn(2, B, N, 8, dtype=torch.float64)
        a = layer.norm1(x + layer.self_attention(x, x))
        c = layer.norm2(a + layer.cross_attention.attend(layer.cross_attention.query(a), *memory))
        g = F.gelu(layer.hidden(c))
        torch.testing.assert_close(
            layer(x, tuple(memory))[0], layer.norm3(layer.output(g) + (c if residual == "input" else g))
        )


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"match_layer": "last", "layers": 3}, {"fusion": "hadamard", "matching": "max"}]
)
def test_every_parameter_learns(fields):
    model = small(**fields).float()
    model.decoder.position.zero_()
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


def test_released_cbr_stays_as_drawn_but_teaches():
    model, (before, after) = small(train_cbr=False), pictures()
    model(before, after, CAPTION)["cbr"].backward()
    assert all(p.grad is None for p in model.cbr.parameters())
    assert model.decoder.embed.weight.grad.any() and model.embed.conv.weight.grad.any()


def test_the_learned_scales_stay_below_100():
    model = SCORER(Config(dim=16, heads=2), WORDS, (C, H, W), V)
    for scale, start in ((model.log_scale, 4.0), (model.cbr.log_scale, 9.0)):
        scale.data.fill_(start)
    model.clamp_scales()
    assert model.log_scale.item() == pytest.approx(4) and model.cbr.log_scale.exp().item() == pytest.approx(100)


def test_decoder_starts_as_released_the_rest_as_pytorch_does():
    paper, model = (
        SCORER(Config(dim=64), WORDS, (C, H, W), V),
        SCORER(Config(dim=64, xavier=False), WORDS, (C, H, W), V),
    )
    bound = math.sqrt(6 / (64 + 64))
    assert 0.9 * bound < paper.decoder.layers[1].hidden.weight.abs().max() <= bound
    for weight in (model.decoder.head.weight, model.decoder.embed.weight, model.decoder.layers[1].hidden.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.decoder.project.bias.any() and model.embed.position.col.weight.std() > 0.5
    stacked, bound = model.cbr.attention.in_proj_weight, math.sqrt(6 / (64 + 3 * 64))  # Xavier of one matrix (3D, D)
    assert 0.9 * bound < stacked.abs().max() <= bound


@pytest.mark.parametrize("fields", [{}, {"w_cbr": 0.0}, {"w_match": 0.0}])
def test_total_is_equation_13(fields):
    model, (before, after) = small(**{"w_match": 0.3, "w_cbr": 0.07} | fields).float(), pictures().float()
    cfg = model.cfg
    cfg.device = "cpu"
    batches = tuple(data.Batch(*pair, CAPTION, [], []) for pair in ((before, after), (after, before)))
    losses = scorer_cbr.losses_of(model.eval(), batches, cfg)
    parts = [model(b.before, b.after, b.caption) for b in batches]
    means = {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}
    assert losses["total"].item() == pytest.approx(
        sum({"caption": 1, "match": cfg.w_match, "cbr": cfg.w_cbr}[name] * loss.item() for name, loss in means.items())
    )


# ---- presets and readings --------------------------------------------------------------------------------------------


def test_released_reading_sets_every_disputed_field():
    parse = lambda *argv: scorer_cbr.parse_args(
        Config, scorer_cbr.PRESETS, "s", "d", [*argv, "--device", "cpu"], RELEASED
    )[0]
    paper, released = parse("--dataset", "clevr_change"), parse("--dataset", "clevr_change", "--reading", "released")
    changed = {k for k in vars(paper) if getattr(paper, k) != getattr(released, k)}
    assert changed == set(RELEASED["all"]) | {"reading"}
    assert parse("--dataset", "clevr_dc").layers == 1 and parse("--dataset", "spot_the_diff").w_cbr == 0.5
    assert parse("--dataset", "image_editing_request").lr == 1e-4
