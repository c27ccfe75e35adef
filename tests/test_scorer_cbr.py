"""SCORER+CBR against its equations, the released behaviour, and itself."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import data
import scorer_cbr
from scorer_cbr import RELEASED, SCORER, Config

# ---- parity with the released code (reading "released"), recorded from it in float64 ------------------------------------


def hashed(n: int, j: int) -> np.ndarray:
    """The n first values of hash stream j in [-1, 1): inputs and weights that any language can repeat."""
    with np.errstate(over="ignore"):
        h = np.arange(n, dtype=np.uint64) * 2654435761 + np.uint64(j) * 40503
        h = (h % 2**32).astype(np.uint32)
        h ^= h >> 16
        h = h * np.uint32(2246822519)
        h ^= h >> 13
    return h / 2**31 - 1


ATTENTION = ("query", "key", "value")


def released_names() -> list[dict[str, tuple]]:
    """Released parameter names -> (our name or names, shape), for encoder, decoder and CBR."""

    def linear(theirs, ours, *shape):
        return {f"{theirs}.weight": (ours + ".weight", shape), f"{theirs}.bias": (ours + ".bias", shape[:1])}

    encoder = linear("img.0", "embed.conv", 512, 1026, 1, 1) | linear("embed_fc.0", "fuse.0", 512, 1024)
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
    cbr |= {"mh_att.in_proj_weight": ([f"cbr.attention.{n}.weight" for n in ATTENTION], (1536, 512)),
            "mh_att.out_proj.weight": ("cbr.attention.out.weight", (512, 512)), "contra.logit_scale": (None, ())}  # fmt: skip
    cbr |= linear("contra.query", "cbr.query", 512, 512) | linear("contra.key", "cbr.key", 512, 512)
    return [encoder, decoder, cbr]


def fixture_model() -> SCORER:
    cfg = Config(**scorer_cbr.PRESETS["clevr_change"], **RELEASED | {"train_cbr": True})
    model = SCORER(cfg, 76, (1024, 14, 14), 24).double().eval()
    ours = dict(model.named_parameters())
    untouched = set(ours)
    for base, names in zip((100, 300, 500), released_names(), strict=True):
        for j, theirs in enumerate(sorted(names)):
            target, shape = names[theirs]
            if target is None or "norm" in str(target):  # temperatures and LayerNorms keep their first values
                continue
            n = math.prod(shape)
            scale = (n / shape[0]) ** -0.5 if len(shape) > 1 else 0.02
            value = torch.from_numpy((hashed(n, base + j) * scale).astype(np.float32)).double().reshape(shape)
            targets = target if isinstance(target, list) else [target]
            for name, part in zip(targets, value.chunk(len(targets)), strict=True):
                ours[name].data.copy_(part.reshape(ours[name].shape))
                untouched.discard(name)
    assert all("norm" in name or "log_scale" in name for name in untouched), untouched
    return model


@pytest.fixture(scope="module")
def fixture():
    before, after = (
        torch.from_numpy(np.maximum(0, hashed(3 * 1024 * 196, j)).astype(np.float32)).double().view(3, 1024, 14, 14)
        for j in (1, 2)
    )
    caption = torch.zeros(3, 24, dtype=torch.long)
    for b in range(3):
        n = 8 + 3 * b
        words = 4 + np.floor((hashed(n - 2, 10 + b) + 1) / 2 * 72).astype(int)
        caption[b, :n] = torch.tensor([2, *words, 3])
    return fixture_model(), before, after, caption


def test_hash_stream():
    np.testing.assert_allclose(hashed(4, 1), [-0.401380, 0.460570, 0.421702, 0.790581], atol=1e-6)


def close(ours, recorded, atol=1e-5):
    torch.testing.assert_close(ours.detach(), torch.tensor(recorded, dtype=torch.float64), atol=atol, rtol=0)


def test_released_reading_meets_recorded_values(fixture):
    model, before, after, caption = fixture
    difference, x_bef, _, (q, k) = model.encode(before, after)
    close(x_bef.abs().sum(), 59178.566, atol=1e-3), close(difference.abs().sum(), 76022.024, atol=1e-3)
    losses = model(before, after, caption)
    close(losses["caption"], 4.620655), close(losses["match"], 1.764648), close(losses["cbr"], 1.101593)
    (q_bef, q_aft), (k_aft, k_bef) = q.chunk(2), k.chunk(2)
    close(model.similarity(q_bef, k_aft, model.log_scale)[0], [54.499477, 56.707699, 53.308426])
    close(model.similarity(q_aft, k_bef, model.log_scale)[0], [52.554564, 55.211010, 55.018642])
    _, query, key = model.decoder(caption, difference)
    scores = model.decoder.layers[-1].cross_attention.scores(query, key)
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


MATCHINGS = [("mtm", "summed"), ("mtm", "per_head"), ("tm", "summed"), ("mean", "summed"), ("max", "summed")]


@pytest.mark.parametrize("matching, match_heads", MATCHINGS)
def test_match_loss_against_loops(matching, match_heads):
    model, (before, after) = small(matching=matching, match_heads=match_heads), pictures()
    layer, x_bef, x_aft = model.cross_view[0].attention, model.embed(before), model.embed(after)

    def plain(q, k):
        if matching in ("mean", "max"):
            pool = (lambda x: x.mean(1)) if matching == "mean" else (lambda x: x.max(1).values)
            return math.e * pool(q) @ pool(k).T
        return math.e * naive_match(q, k, 2 if match_heads == "per_head" else 1)

    expected = naive_nce(plain(layer.query(x_bef), layer.key(x_aft))) + naive_nce(plain(layer.query(x_aft), layer.key(x_bef)))
    assert model(before, after, CAPTION)["match"].item() == pytest.approx(expected / 2)


@pytest.mark.parametrize("sentence_mean", ["words", "padded"])
def test_cbr_loss_against_loops(sentence_mean):
    model, (before, after) = small(sentence_mean=sentence_mean).eval(), pictures()
    x_bef, x_aft, cbr = model.embed(before), model.embed(after), model.cbr
    hidden, _, _ = model.decoder(CAPTION, model.encode(before, after)[0])
    hat = torch.zeros(B, N, 8, dtype=torch.float64)
    for b in range(B):
        words = int((CAPTION[b] > 0).sum())
        s = hidden[b, :words].sum(0) / (words if sentence_mean == "words" else V)
        joined = torch.stack([cbr.join(torch.cat([x_bef[b, n], s])) for n in range(N)])[None]
        hat[b] = cbr.output(cbr.attention(joined, joined))[0]
    r = math.e * naive_match(cbr.query(hat), cbr.key(x_aft))
    assert model(before, after, CAPTION)["cbr"].item() == pytest.approx((naive_nce(r) + naive_nce(r.T)) / 2)


def test_caption_loss_against_loop():
    model, (before, after) = small().eval(), pictures()
    logits = model.decoder.head(model.decoder(CAPTION, model.encode(before, after)[0])[0])
    losses = [
        -float(logits[b, t].log_softmax(-1)[CAPTION[b, t + 1]]) for b in range(B) for t in range(V - 1) if CAPTION[b, t + 1]
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
    new, _, _ = layer(torch.cat([x_bef, x_aft]))
    for ours, (x, partner) in zip(new.chunk(2), ((x_bef, x_aft), (x_aft, x_bef)), strict=True):
        torch.testing.assert_close(ours, layer.norm(x + layer.attention(x, partner)))


@pytest.mark.parametrize("fusion", ["cat", "sum", "hadamard"])
def test_fusion(fusion):
    model, (before, after) = small(fusion=fusion, layers=1).eval(), pictures()
    a, b = model.cross_view[0](torch.cat([model.embed(before), model.embed(after)]))[0].chunk(2)
    joined = {"cat": torch.cat([a, b], -1), "sum": a + b, "hadamard": a * b}[fusion]
    torch.testing.assert_close(model.encode(before, after)[0], model.fuse[0](joined).relu())


def test_subtraction_sees_the_bare_difference_only():
    model, (before, after) = small(difference="subtract", w_match=0.0), pictures()
    d = model.eval().encode(before, after)[0]
    torch.testing.assert_close(d, model.fuse[0](model.embed(before) - model.embed(after)).relu())
    torch.testing.assert_close(d, model.encode(before + 0.3, after + 0.3)[0])
    with pytest.raises(ValueError, match="--w_match 0"):
        small(difference="subtract")


def test_blind_model_sees_nothing():
    model, (before, after) = small(blind=True).eval(), pictures()
    torch.testing.assert_close(model.encode(before, after)[0], model.encode(after * 2, before)[0])


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
            q, k = model.encode(before, after)[3]
            scores = model.similarity(q[:12], k[:12], model.log_scale)
            back = model.similarity(q[12:], k[12:], model.log_scale)
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


# ---- decoding --------------------------------------------------------------------------------------------------------


def test_a_later_word_changes_no_earlier_output():
    model, (before, after) = small().eval(), pictures()
    difference, other = model.encode(before, after)[0], CAPTION.clone()
    other[:, 4:] = 1
    torch.testing.assert_close(model.decoder(CAPTION, difference)[0][:, :4], model.decoder(other, difference)[0][:, :4])


def test_cached_decoding_equals_full_decoding():
    model, (before, after) = small().eval(), pictures()
    for p in (p for p in model.parameters() if p.ndim > 1):  # large enough for captions of different words and lengths
        torch.nn.init.normal_(p)
    difference = model.encode(before, after)[0]
    step, full = model.decoder.stepper(difference), torch.full((B, 1), 2)
    for t in range(V - 1):
        logits = model.decoder.head(model.decoder(full, difference)[0][:, -1])
        torch.testing.assert_close(step(full[:, -1], t), logits)
        logits[:, 1] = -math.inf
        full = torch.cat([full, logits.argmax(-1, keepdim=True)], 1)
    ids = model.generate(before, after)
    for ours, plain in zip(ids.tolist(), full.tolist(), strict=True):
        stop = next((i for i, w in enumerate(plain) if w in (0, 3)), V)
        assert ours == plain[:stop] + [0] * (V - stop)
    assert len({tuple(row) for row in ids.tolist()}) > 1, ids


def test_attention_map_is_a_mean_over_the_words():
    model, (before, after) = small().eval(), pictures()
    _, query, key = model.decoder(CAPTION, model.encode(before, after)[0])
    scores = model.decoder.layers[-1].cross_attention.scores(query, key)
    maps = model.attention_map(before, after, CAPTION)
    assert maps.shape == (B, H, W)
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(B, dtype=torch.float64))
    rows = scores[1].softmax(-1).mean(0)[:1]  # "START w1 END": the row of START predicted the only word
    torch.testing.assert_close(maps[1].flatten(), rows.mean(0))


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"match_layer": "last", "layers": 3}, {"fusion": "hadamard", "matching": "max"}])
def test_every_parameter_learns(fields):
    model = small(**fields).float()
    model.decoder.position.zero_()
    optimizer, start = torch.optim.Adam(model.parameters(), lr=1e-2), {n: p.clone() for n, p in model.named_parameters()}
    before, after = pictures().float()
    sum(model(before, after, CAPTION).values()).backward()
    optimizer.step()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any() or torch.equal(p, start[n])]
    key_bias = [n for n in dead if n.endswith("attention.key.bias")]  # a softmax does not see what shifts all its scores
    assert set(dead) <= set(key_bias), f"no gradient reaches {dead}"


def test_released_cbr_stays_as_drawn_but_teaches():
    model, (before, after) = small(train_cbr=False), pictures()
    model(before, after, CAPTION)["cbr"].backward()
    assert all(p.grad is None for p in model.cbr.parameters())
    assert model.decoder.embed.weight.grad.any() and model.embed.conv.weight.grad.any()


def test_temperature_is_clamped():
    model = small()
    model.log_scale.data.fill_(9.0), model.cbr.log_scale.data.fill_(-3.0)
    model.clamp_scales()
    assert model.log_scale.item() == pytest.approx(math.log(100)) and model.cbr.log_scale.item() == -3.0


def test_overfits_eight_pairs(prepared, tiny):
    flags = ["--data_dir", str(prepared), "--dim", "32", "--heads", "4", "--dropout", "0", "--lr", "3e-3"]
    cfg, _ = scorer_cbr.parse_args(Config, scorer_cbr.PRESETS, RELEASED, "scorer_cbr", "doc", tiny + flags)
    dataset = data.open_dataset(cfg)
    torch.manual_seed(0)
    model = SCORER(cfg, len(dataset.vocab), dataset.grid, dataset.max_len)
    pairs = [p for scene in dataset.scenes["train"][:4] for p in scene.pairs]  # four changed, four distractor pairs
    batch, adam = dataset.batch(pairs).to("cpu"), torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for _ in range(300):
        adam.zero_grad()
        scorer_cbr.losses_of(model, (batch,), cfg)["total"].backward()
        adam.step()
    told = dataset.vocab.decode(model.eval().generate(batch.before, batch.after))
    assert told == [" ".join(data.tokenize(p.captions[0])) for p in pairs]


# ---- running ---------------------------------------------------------------------------------------------------------


def run(*argv):
    scorer_cbr.main([str(a) for a in argv])


def losses(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {x["step"]: {k: v for k, v in x.items() if k != "seconds"} for x in lines if x["event"] == "train"}


def test_a_run_leaves_what_it_should(prepared, tiny, tmp_path, capsys):
    run(*tiny, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    files = {p.name for p in (tmp_path / "run").iterdir()}
    assert files == {"config.json", "log.jsonl", "last.pt", "best.pt", "captions_test.json", "scores_test.json", "samples.png"}
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [x["event"] for x in log].count("train") == 4 and [x["event"] for x in log].count("eval") == 2
    assert all(math.isfinite(x["total"]) for x in log if x["event"] == "train")
    weighted = log[1]["caption"] + 0.1 * log[1]["match"] + 0.001 * log[1]["cbr"]
    assert log[1]["total"] == pytest.approx(weighted, abs=1e-4)  # Eq. 13
    captions = json.loads((tmp_path / "run" / "captions_test.json").read_text())
    assert len(captions) == 10 and {"image_id", "caption"} == set(captions[0])
    groups = json.loads((tmp_path / "run" / "scores_test.json").read_text())["scores"]
    assert {"total", "semantic change", "only distractor", "move"} <= set(groups)
    assert "CIDEr" in capsys.readouterr().out
    run("--eval", tmp_path / "run" / "best.pt", "--split", "val", "--device", "cpu")
    assert (tmp_path / "run" / "scores_val.json").exists()


def test_resume_equals_no_interruption(prepared, tiny, tmp_path, monkeypatch):
    run(*tiny, "--data_dir", prepared, "--out_dir", tmp_path / "whole")
    original = scorer_cbr.losses_of

    def interrupted(model, streams, cfg):
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return original(model, streams, cfg)

    calls = []
    monkeypatch.setattr(scorer_cbr, "losses_of", interrupted)
    with pytest.raises(SystemExit) as e:
        run(*tiny, "--data_dir", prepared, "--out_dir", tmp_path / "parts")
    assert e.value.code == 130
    assert torch.load(tmp_path / "parts" / "last.pt", weights_only=True)["step"] == 5
    monkeypatch.setattr(scorer_cbr, "losses_of", original)
    run("--resume", "--out_dir", tmp_path / "parts", "--device", "cpu")
    a, b = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "parts"))
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"]) and a["best"] == b["best"]
    assert torch.equal(a["random"]["cpu"], b["random"]["cpu"])
    assert losses(tmp_path / "whole")[8] == losses(tmp_path / "parts")[8]


def test_a_loss_that_is_not_finite_stops_the_run(prepared, tiny, tmp_path, monkeypatch, capsys):
    original = scorer_cbr.losses_of

    def broken(model, streams, cfg):
        calls.append(1)
        parts = original(model, streams, cfg)
        return parts | {"total": parts["total"] * float("nan")} if len(calls) == 7 else parts

    calls = []
    monkeypatch.setattr(scorer_cbr, "losses_of", broken)
    with pytest.raises(FloatingPointError, match="step 7.*caption"):
        run(*tiny, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert state["step"] == 4 and all(v.isfinite().all() for v in state["model"].values())


def test_a_second_run_does_not_overwrite_the_first(prepared, tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.pt").write_bytes(b"a week of work")
    with pytest.raises(ValueError, match="--overwrite"):
        run(*tiny, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    assert (tmp_path / "run" / "last.pt").read_bytes() == b"a week of work"


def test_a_checkpoint_of_other_features_is_refused(prepared, tiny, tmp_path):
    run(*tiny, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    words = json.loads((prepared / "vocab.json").read_text())
    (prepared / "vocab.json").write_text(json.dumps(words | {"zebra": len(words)}))
    with pytest.raises(ValueError, match="--data_dir"):
        run("--eval", tmp_path / "run" / "best.pt", "--device", "cpu")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The embedded data set, rendered and learned for a moment."""
    root = tmp_path_factory.mktemp("smoke")
    flags = ["--scenes", "60", "--steps", "20", "--log_every", "5", "--dim", "32", "--device", "cpu"]
    run(*flags, "--data_dir", root / "mini", "--out_dir", root / "run")
    return root


def test_embedded_data_set_from_nothing(smoke):
    log = losses(smoke / "run")
    assert log[20]["caption"] < log[5]["caption"] and math.isfinite(log[20]["total"])
    result = json.loads((smoke / "run" / "scores_test.json").read_text())
    assert set(result["accuracy"]) >= {"change type", "distractors", "all four"}
    assert "view: hardest quarter" in result["scores"]
    with Image.open(smoke / "run" / "samples.png") as sheet:
        assert sheet.width > 1000
    with pytest.raises(ValueError, match="--data_dir"):  # other settings than those it was made with
        run("--scenes", "70", "--data_dir", smoke / "mini", "--out_dir", smoke / "other", "--device", "cpu")


def test_any_two_files_are_captioned_with_the_checkpoint_alone(smoke, tmp_path, capsys):
    checkpoint, pair = tmp_path / "moved.pt", []
    checkpoint.write_bytes((smoke / "run" / "best.pt").read_bytes())
    for name, mode, size in (("a.jpg", "L", (31, 57)), ("b.gif", "P", (200, 90))):
        Image.new(mode, size, 3).save(tmp_path / name)
        pair.append(tmp_path / name)
    run("--caption", *pair, "--checkpoint", checkpoint, "--device", "cpu", "--out", tmp_path / "out.png")
    caption = capsys.readouterr().out.strip()
    words = json.loads((smoke / "mini" / "vocab.json").read_text())
    assert caption and set(caption.split()) <= set(words) and (tmp_path / "out.png").stat().st_size > 1000
    (tmp_path / "c.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="c.png is not a readable image"):
        run("--caption", pair[0], tmp_path / "c.png", "--checkpoint", checkpoint, "--device", "cpu")
    with pytest.raises(ValueError, match="--caption needs --checkpoint"):
        run("--caption", *pair)


PAIRS = Path(__file__).resolve().parents[2] / "shared" / "data" / "pairs"


@pytest.mark.skipif(not PAIRS.exists(), reason="the photographs are not here")
@pytest.mark.parametrize("names", [("levir_before.png", "levir_after.png"), ("bird_1.jpg", "bird_2.jpg")])
def test_real_photographs_are_captioned(smoke, names, capsys):
    run("--caption", *(PAIRS / n for n in names), "--checkpoint", smoke / "run" / "best.pt", "--device", "cpu")
    assert capsys.readouterr().out.strip()


def test_the_script_starts_and_bad_input_is_one_line(tmp_path):
    script = Path(scorer_cbr.__file__)
    call = [sys.executable, str(script), "--dataset", "clevr_change", "--data_dir", str(tmp_path / "none")]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "splits.json is missing" in done.stderr
    assert not list(tmp_path.iterdir())
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "weight of L_cv in Eq. 13" in " ".join(done.stdout.split())


# ---- presets and readings --------------------------------------------------------------------------------------------


def test_released_reading_sets_every_disputed_field():
    parse = lambda *argv: scorer_cbr.parse_args(Config, scorer_cbr.PRESETS, RELEASED, "s", "d", [*argv, "--device", "cpu"])[0]
    paper, released = parse("--dataset", "clevr_change"), parse("--dataset", "clevr_change", "--reading", "released")
    changed = {k for k in vars(paper) if getattr(paper, k) != getattr(released, k)}
    assert changed == set(RELEASED) - {"match_heads"} | {"reading"}  # both readings sum the heads
    assert parse("--dataset", "clevr_dc").layers == 1 and parse("--dataset", "spot_the_diff").w_cbr == 0.5
    assert parse("--dataset", "image_editing_request").lr == 1e-4
