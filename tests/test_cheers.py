"""CHEERS against its equations, and itself."""

import json
import math

import open_clip
import pytest
import torch

import cheers
import data
from cheers import CHEERS, CRE, DRE, PRESETS, Config, contrastive_loss, likeness, retrieve, total_loss

B, C, H, W, V, WORDS = 4, 5, 2, 3, 9, 12
N, D, K, M, E = H * W, 8, 3, 7, 5
CAPTION = torch.tensor([[2, 4, 5, 6, 3, 0, 0, 0, 0], [2, 7, 3, 0, 0, 0, 0, 0, 0], [2, 8, 9, 10, 11, 4, 5, 6, 3],
                        [2, 5, 5, 3, 0, 0, 0, 0, 0]])  # fmt: skip
INDICES = torch.tensor([[0, 3, 6], [1, 2, 4], [5, 0, 2], [3, 4, 1]])


def small(**fields) -> CHEERS:
    torch.manual_seed(0)
    cfg = Config(**{"dim": D, "word_dim": 6, "heads": 2} | fields)
    return CHEERS(cfg, WORDS, (C, H, W), V, torch.randn(M, E) if cfg.k else None).double()


def pictures():
    torch.manual_seed(1)
    return torch.rand(2, B, C, H, W, dtype=torch.float64)


def mean(x):
    return sum(x) / len(x)


def cosine(a, b):
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


# ---- retrieval -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True])
def test_retrieval_against_loops(signed):
    torch.manual_seed(0)
    x_bef, x_aft, entities = (torch.randn(n, E, dtype=torch.float64) for n in (6, 6, M))
    for k in (1, 3, M):
        best = retrieve(x_bef, x_aft, entities, k, signed)
        for b in range(6):
            s_bef, s_aft = ([cosine(x[b], e) for e in entities] for x in (x_bef, x_aft))
            difference = [p - q if signed else abs(p - q) for p, q in zip(s_bef, s_aft, strict=True)]
            relevant = [m for m in range(M) if s_bef[m] > mean(s_bef) or s_aft[m] > mean(s_aft)]
            rest = [m for m in range(M) if m not in relevant]
            assert rest or b, "the constraint must matter somewhere"
            order = [m for part in (relevant, rest) for m in sorted(part, key=lambda m: -difference[m])]
            assert best[b].tolist() == order[:k]


def test_an_entity_that_is_like_neither_image_comes_last():
    entities = torch.eye(4)
    x_bef, x_aft = torch.tensor([[0.5, 0.6, -0.9, 0.4]]), torch.tensor([[0.5, 0.1, 0.1, 0.5]])
    assert retrieve(x_bef, x_aft, entities, 1).tolist() == [[3]]  # not 2, whose difference is the largest
    assert retrieve(x_bef, x_aft, entities, 4)[0, -1] == 2
    assert retrieve(x_bef, x_aft, entities, 9).shape == (1, 4)  # k larger than M


def test_ties_go_to_the_lower_index():
    entities = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    assert retrieve(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]), entities, 3).tolist() == [[1, 2, 3]]
    same = torch.ones(1, 2)
    assert retrieve(same, same, torch.ones(50, 2), 50)[0].tolist() == list(range(50))  # none is relevant


def test_signed_retrieval_does_not_find_what_was_added():
    entities = torch.eye(3)
    without, there = torch.tensor([[0.1, 0.5, 0.4]]), torch.tensor([[0.9, 0.5, 0.4]])
    assert retrieve(without, there, entities, 1)[0, 0] == retrieve(there, without, entities, 1)[0, 0] == 0
    assert retrieve(there, without, entities, 1, signed=True)[0, 0] == 0
    assert retrieve(without, there, entities, 1, signed=True)[0, 0] != 0


# ---- enhancement -----------------------------------------------------------------------------------------------------


def naive_likeness(source, target, scale):
    """Eq. 2 and the maximum of Eq. 3 of one pair: source (S, D), target (N, D) -> N numbers."""
    p = {}
    for j in range(len(source)):
        exps = [math.exp(scale * cosine(target[i], source[j])) for i in range(len(target))]
        assert sum(exps) > 0
        p |= {(i, j): exps[i] / sum(exps) for i in range(len(target))}
    return [max(p[i, j] for j in range(len(source))) for i in range(len(target))]


@pytest.mark.parametrize("temperature", ["learned", "one"])
@pytest.mark.parametrize("Enhance", [CRE, DRE])
@pytest.mark.parametrize("sources", [1, K, N])
def test_cre_and_dre_against_loops(temperature, Enhance, sources):
    torch.manual_seed(0)
    module = Enhance(Config(dim=D, temperature=temperature)).double()
    source, target = torch.randn(B, sources, D).double(), torch.randn(B, N, D).double()
    enhanced, p = module(source, target)
    scale = 1.0 if temperature == "one" else module.log_scale.exp().item()
    weight, bias = module.expand.weight[:, 0], module.expand.bias
    for b in range(B):
        for i, m in enumerate(naive_likeness(source[b], target[b], scale)):
            own = weight * ((1 - m) if Enhance is DRE else m) + bias
            torch.testing.assert_close(p[b, i], own)
            x = target[b, i] / (1 + torch.exp(-own)) + target[b, i]
            x = (x - x.mean()) / (((x - x.mean()) ** 2).mean() + 1e-5).sqrt()
            torch.testing.assert_close(enhanced[b, i], x)


def test_one_entity_points_at_the_cells_that_are_like_it():
    """The softmax runs over target positions: it sums to one over them, and one source does not make all cells
    equal."""
    torch.manual_seed(0)
    source, target = torch.randn(B, 1, D).double(), torch.randn(B, N, D).double()
    m = likeness(source, target, 5.0)
    torch.testing.assert_close(m.sum(1), torch.ones(B).double())
    assert (m.amax(1) > 2 * m.amin(1)).all()
    nearest = torch.cosine_similarity(source, target, dim=-1).argmax(1)
    assert torch.equal(m.argmax(1), nearest)
    several = torch.randn(B, K, D).double()
    assert (likeness(several, target, 5.0).sum(1) <= K).all()


def attention(module, query, memory):
    """Multi-head attention in loops over heads."""
    q, k, v = module.project(query, memory)
    parts = [slice(4 * h, 4 * h + 4) for h in range(2)]
    heads = [(q[..., p] @ k[..., p].transpose(1, 2) / 2).softmax(-1) @ v[..., p] for p in parts]
    return module.out(torch.cat(heads, -1))


def square(a, b):
    """Eq. 7 and 11: the mean squared difference of two maps."""
    return mean([(x - y) ** 2 for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)])


@pytest.mark.parametrize("fields", [{}, {"cre": False}, {"dre": False}, {"layers": 1}, {"w_consistency": 0.0},
                                    {"layer_input": "attended"}])  # fmt: skip
def test_encoder_and_losses_against_equations(fields):
    model, (before, after) = small(**fields).eval(), pictures()
    f = {"bef": model.embed(before), "aft": model.embed(after)}
    e, x, other = model.project(model.table[INDICES]), dict(f), {"bef": "aft", "aft": "bef"}
    l_c, l_d, l_i = [0], [0], []
    for layer in model.hrd:
        c = dict(x)
        if model.cfg.cre:
            enhanced = {i: layer.cre(x[other[i]], x[i]) for i in x}  # Eq. 6
            c = {i: enhanced[i][0] for i in x}
            if model.cfg.w_consistency:
                l_c.append(mean([square(enhanced[i][1], layer.entity_dre(e, x[i])[1]) for i in x]))  # Eq. 7
        shared = {i: attention(layer.attention, c[i], c[other[i]]) for i in x}  # Eq. 8
        l_i.append(contrastive_loss(shared["bef"], shared["aft"], model.log_scale.exp()))
        x = {i: layer.norm(x[i] + shared[i]) if layer.norm else shared[i] for i in x}
        d = {i: f[i] - shared[i] for i in x}
        if layer.dre:
            enhanced = {i: layer.dre(f[i], d[i]) for i in x}  # Eq. 10
            if model.cfg.w_consistency:
                l_d.append(mean([square(enhanced[i][1], layer.entity_cre(e, d[i])[1]) for i in x]))  # Eq. 11
            d = {i: enhanced[i][0] for i in x}
    f_diff = model.join(torch.cat([d["bef"], d["aft"]], -1))  # Eq. 12
    torch.testing.assert_close(model.encode(before, after, INDICES)[0], (f_diff, e))
    losses, layers = model(before, after, CAPTION, INDICES), len(model.hrd)
    assert [bool(layer.norm) for layer in model.hrd] == [model.cfg.layer_input == "residual"] * (layers - 1) + [False]
    assert layers == model.cfg.layers and set(losses) == {"caption", "common", "different", "match"}
    assert len(l_c) == 1 + layers * (model.cfg.cre and model.cfg.w_consistency > 0)
    assert len(l_d) == 1 + layers * (model.cfg.dre and model.cfg.w_consistency > 0)
    expected = {"common": sum(l_c) / layers, "different": sum(l_d) / layers, "match": mean(l_i).item()}
    assert {name: losses[name].item() for name in expected} == pytest.approx(expected)


def deviation(x):
    """What differs over the cells of an image, x (2B, N, D)."""
    return x - x.mean(1, keepdim=True)


def test_maps_survive_bfloat16():
    """P^ differs over cells by less than bfloat16's digits: at paper size its deviation stays that of float64."""
    torch.manual_seed(0)
    maps, model = [], CHEERS(Config(), WORDS, (32, 14, 14), V, torch.randn(M, E)).eval()
    for module in (m for m in model.modules() if isinstance(m, CRE)):
        module.register_forward_hook(lambda module, args, output: maps.append(output[1].detach().double()))
    before, after = torch.randn(2, 2, 32, 14, 14)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.encode(before, after, INDICES[:2])
    with torch.no_grad():
        model.double().encode(before.double(), after.double(), INDICES[:2])
    rough, exact = [deviation(p) for p in maps[:8]], [deviation(p) for p in maps[8:]]  # four maps a layer
    errors = [((p - q).norm() / q.norm()).item() for p, q in zip(rough, exact, strict=True)]
    assert max(errors) < 0.01, errors


def test_the_next_layer_reads_cells_that_differ():
    """At paper size C~ alone is nearly the same in all cells, and that of the layer after it the same."""
    spread = {}
    for layer_input in ("residual", "attended"):
        torch.manual_seed(0)
        model = CHEERS(Config(layer_input=layer_input), WORDS, (32, 14, 14), V, torch.randn(M, E)).eval()
        layers = model.encode(*torch.randn(2, 2, 32, 14, 14), INDICES[:2])[1]
        spread[layer_input] = [(deviation(shared).norm() / shared.norm()).item() for shared, _, _ in layers]
    assert spread["residual"][0] == spread["attended"][0] > 0.1
    assert spread["residual"][1] > 0.1 and spread["attended"][1] < 0.002, spread


def test_contrastive_loss_against_loops():
    torch.manual_seed(0)
    a, b = torch.randn(2, B, N, D).double()

    def sim(x, y):
        there = mean([max(cosine(p, q) for q in y) for p in x])
        return (there + mean([max(cosine(p, q) for p in x) for q in y])) / 2

    total = 0.0
    for i in range(B):
        for ours, others in ((a, b), (b, a)):
            rows = [math.exp(2.5 * sim(ours[i], others[j])) for j in range(B)]
            total -= math.log(rows[i] / sum(rows)) / 2
    assert contrastive_loss(a, b, torch.tensor(2.5)).item() == pytest.approx(total / B)


def test_total_is_equation_19():
    model, (before, after) = small(w_consistency=0.7, w_match=0.4).float().eval(), pictures().float()
    model.cfg.device = "cpu"
    batches = tuple(data.Batch(*pair, CAPTION, [], [], []) for pair in ((before, after), (after, before)))
    losses = cheers.losses_of(model, batches, model.cfg, lambda batch: INDICES)
    parts = [model(b.before, b.after, b.caption, INDICES) for b in batches]
    weights = {"caption": 1, "common": 0.7, "different": 0.7, "match": 0.4}
    assert all(part[name] > 0 for part in parts for name in weights)
    expected = sum(weights[name] * (parts[0][name] + parts[1][name]).item() / 2 for name in weights)
    assert losses["total"].item() == pytest.approx(expected, rel=1e-5)


def test_caption_loss_against_loop():
    model, (before, after) = small().eval(), pictures()
    logits = model.decoder.head(model.decoder(CAPTION, model.encode(before, after, INDICES)[0])[0])
    real = [(b, t) for b in range(B) for t in range(V - 1) if CAPTION[b, t + 1]]
    words = [-logits[b, t].log_softmax(-1)[CAPTION[b, t + 1]] for b, t in real]
    torch.testing.assert_close(model(before, after, CAPTION, INDICES)["caption"], mean(words))


# ---- decoder ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["channels", "scalar", "none"])
def test_decoder_layer_against_equations(gate):
    layer = small(gate=gate).decoder.layers[0].eval()
    torch.manual_seed(2)
    x, f_diff, e = torch.randn(B, V, D).double(), torch.randn(B, N, D).double(), torch.randn(B, K, D).double()
    readers = [(layer.cross_attention, f_diff)] + ([(layer.text_attention, e)] if gate != "none" else [])
    out, _, query = layer(x, tuple(y for a, m in readers for y in (a.key(m), a.value(m))))
    h = []
    for t in range(V):  # Eq. 13: every word sees itself and earlier ones
        h.append(layer.norm1(x[:, t] + attention(layer.self_attention, x[:, t : t + 1], x[:, : t + 1])[:, 0]))
    h = torch.stack(h, 1)
    torch.testing.assert_close(query, layer.cross_attention.query(h))
    fused = h_v = attention(layer.cross_attention, h, f_diff)
    if gate != "none":
        h_t = attention(layer.text_attention, h, e)
        alpha, beta = layer.alpha(torch.cat([h, h_t], -1)), layer.beta(torch.cat([h, h_v], -1))  # Eq. 14-15
        assert alpha.shape == beta.shape == (B, V, D if gate == "channels" else 1)
        fused = alpha * h_t + beta * h_v  # Eq. 16
    torch.testing.assert_close(out, layer.norm2(fused + h))  # Eq. 17


@pytest.mark.parametrize("gate", ["channels", "scalar"])
def test_cached_decoding_equals_full_decoding_with_entities(gate):
    model, (before, after) = small(gate=gate).eval(), pictures()
    for p in (p for p in model.parameters() if p.ndim > 1):
        torch.nn.init.normal_(p)
    model.decoder.head.bias.data[[0, 3]] -= 3
    context = model.encode(before, after, INDICES)[0]
    step, ids = model.decoder.stepper(context), torch.full((B, 1), 2)
    for t in range(V - 1):
        logits = model.decoder.head(model.decoder(ids, context)[0][:, -1])
        torch.testing.assert_close(step(ids[:, -1], t), logits)
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    other = CAPTION.clone()
    other[:, 4:] = 1
    torch.testing.assert_close(model.decoder(CAPTION, context)[0][:, :4], model.decoder(other, context)[0][:, :4])
    assert model.generate(before, after, INDICES)[:, 1].tolist() == ids[:, 1].tolist()
    others = model.encode(before, after, (INDICES + 1) % M)[0]
    assert not torch.allclose(model.decoder(CAPTION, context)[0], model.decoder(CAPTION, others)[0])


def test_blind_model_sees_neither_images_nor_entities():
    model, (before, after) = small(blind=True).eval(), pictures()
    torch.testing.assert_close(model.encode(before, after, INDICES)[0], model.encode(after * 2, before, INDICES * 0)[0])


# ---- learning, presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"gate": "scalar", "temperature": "one"}, {"cre": False},
                                    {"dre": False, "gate": "none"}, {"layers": 0, "w_consistency": 0.0, "w_match": 0.0},
                                    {"w_consistency": 0.0}, {"layers": 1},
                                    {"k": 0, "gate": "none", "w_consistency": 0.0}])  # fmt: skip
def test_every_parameter_learns(fields):
    model = small(**fields)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    start = {n: p.clone() for n, p in model.named_parameters()}
    before, after = pictures()
    total_loss(model(before, after, CAPTION, INDICES), model.cfg).backward()
    optimizer.step()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any() or torch.equal(p, start[n])]
    key_bias = [n for n in dead if n.endswith("attention.key.bias")]  # a softmax ignores what shifts all its scores
    assert set(dead) <= set(key_bias), f"no gradient reaches {dead}"


def test_what_does_not_go_together_is_refused():
    for fields, message in (({"layers": 0}, "--w_match 0"), ({"layers": 0, "w_match": 0.0}, "--w_consistency 0"),
                            ({"cre": False, "dre": False}, "--w_consistency 0"), ({"k": 0}, "--gate none"),
                            ({"k": 0, "gate": "none"}, "--w_consistency 0")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            small(**fields)


def test_a_model_asks_for_the_entities_that_it_needs():
    before, after = pictures()
    with pytest.raises(ValueError, match="table="):
        CHEERS(Config(dim=D, heads=2), WORDS, (C, H, W), V)
    for call in (lambda: small()(before, after, CAPTION), lambda: small().generate(before, after)):
        with pytest.raises(ValueError, match="entities=, indices"):
            call()


def test_presets():
    parse = lambda *argv: cheers.parse_args(Config, PRESETS, "s", "d", [*argv, "--device", "cpu"])[0]
    configs = [parse("--dataset", name) for name in ("clevr_change", "clevr_dc", "spot_the_diff")]
    assert [(c.lr, c.batch_size, c.layers) for c in configs] == [(1e-3, 128, 2), (1e-3, 128, 1), (5e-4, 96, 2)]
    assert all((c.k, c.w_consistency, c.w_match) == (3, 0.75, 0.5) for c in configs)


# ---- entities --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    root = tmp_path_factory.mktemp("entities") / "mini"
    data.prepare_mini(root, 20, "2,4", 0, "cpu")
    return root


@pytest.fixture
def corpus(rendered, monkeypatch):
    """A small mini, and a CLIP with random weights in place of its own; what has been encoded so far is counted."""
    torch.manual_seed(0)
    clip, counts = open_clip.CLIP(**data.MINI_CLIP).eval().requires_grad_(False), {"images": 0, "texts": 0}
    tokenizer = open_clip.SimpleTokenizer(context_length=clip.context_length)
    image, text = clip.encode_image, clip.encode_text

    def count(what, f):
        def counted(x, **options):
            counts[what] += len(x)
            return f(x, **options)

        return counted

    monkeypatch.setattr(clip, "encode_image", count("images", image))
    monkeypatch.setattr(clip, "encode_text", count("texts", text))
    monkeypatch.setattr(data, "load_clip", lambda *_: (clip, tokenizer, data.preprocess_mini))
    monkeypatch.setattr(data, "clip_weights", lambda *_: {})
    (rendered / "embeddings.pt").unlink(missing_ok=True)
    return data.load("mini", rendered), counts, clip, tokenizer


def test_entities_are_embedded_once_and_kept(corpus, monkeypatch):
    dataset, counts, clip, tokenizer = corpus
    cfg = Config(clip="mini", device="cpu")
    first = cheers.Entities(cfg, dataset)
    assert counts == {"images": 120, "texts": len(first.phrases)}
    second = cheers.Entities(cfg, dataset)
    assert counts["images"] == 120 and torch.equal(first.table, second.table)
    assert first.phrases == sorted(set(first.phrases)) and first.table.shape == (len(first.phrases), 128)
    pairs = [p for s in dataset.scenes["train"] for p in (*s.pairs, *s.swapped)]
    retrieved = second(dataset.batch(pairs))
    text = clip.encode_text(tokenizer(first.phrases), normalize=True)
    for p, indices in zip(pairs, retrieved, strict=True):
        x = torch.stack([data.preprocess_mini(image) for image in dataset.images(p)])
        x_bef, x_aft = clip.encode_image(x, normalize=True).split(1)
        score = ((x_bef - x_aft) @ text.T)[0].abs()  # other batches, other last digits: two alike may change places
        torch.testing.assert_close(score[indices], score[retrieve(x_bef, x_aft, text, 3)[0]], atol=1e-5, rtol=0)
    assert not torch.equal(*second(dataset.batch([pairs[0], pairs[2]])))  # the same id, another "before"
    monkeypatch.setattr(data, "clip_id", lambda *_: "mini with other weights")
    cheers.Entities(cfg, dataset)
    assert counts["texts"] == 3 * len(first.phrases)
    assert cheers.Entities(Config(k=0), dataset)(dataset.batch(pairs)) is None


def test_the_captions_are_read_before_clip_is_fetched(corpus, monkeypatch):
    def without_model(*_):
        raise ValueError("run: python -m spacy download en_core_web_sm")

    monkeypatch.setattr(data, "language", without_model)
    monkeypatch.setattr(data, "clip_embeddings", lambda *_: pytest.fail("a minute of retries without a network"))
    with pytest.raises(ValueError, match="spacy download"):
        cheers.Entities(Config(clip="mini", device="cpu"), corpus[0])


def test_pictures_name_the_entities(corpus):
    dataset = corpus[0]
    entities = cheers.Entities(Config(clip="mini", device="cpu"), dataset)
    first, second = entities.phrases[:2]
    expected = [[f"entities: {first}, {second}"], [f"entities: {second}, {second}"]]
    assert entities.notes(torch.tensor([[0, 1], [1, 1]])) == expected
    assert entities.notes(None) == []


def test_a_checkpoint_of_other_entities_is_refused(corpus):
    dataset = corpus[0]
    entities = cheers.Entities(Config(clip="mini", device="cpu"), dataset)
    state = entities.state() | {"model": {"table": entities.table}}
    entities.check_state(state)
    with pytest.raises(ValueError, match="another CLIP"):
        entities.check_state(state | {"model": {"table": entities.table.flip(0)}})
    state["entities"]["phrases"] = ["wombat"]
    with pytest.raises(ValueError, match="--data_dir"):
        entities.check_state(state)


def test_resume_and_caption_with_entities(tmp_path, capsys, monkeypatch):
    """As in test_methods.py, but with entities."""
    monkeypatch.setattr(data, "java_works", lambda: False)  # METEOR takes most of an evaluation's time
    flags = ["--scenes", "60", "--dim", "16", "--log_every", "2", "--eval_every", "6", "--device", "cpu",
             "--schedule", "step", "--data_dir", str(tmp_path / "mini")]  # fmt: skip
    cheers.main([*flags, "--steps", "6", "--out_dir", str(tmp_path / "whole")])
    cheers.main([*flags, "--steps", "3", "--out_dir", str(tmp_path / "parts")])
    cheers.main(["--resume", "--steps", "6", "--out_dir", str(tmp_path / "parts"), "--device", "cpu"])
    a, b = (torch.load(tmp_path / name / "last.pt", weights_only=True)["model"] for name in ("whole", "parts"))
    assert all(torch.equal(a[k], b[k]) for k in a) and "table" in a
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    losses = [x for x in log if x["event"] == "train"]
    assert losses and all(math.isfinite(x[name]) for x in losses for name in ("common", "different", "match"))
    scores = json.loads((tmp_path / "whole" / "scores_test.json").read_text())
    assert "accuracy" in scores
    cheers.main(["--eval", str(tmp_path / "whole" / "best.pt"), "--split", "val", "--device", "cpu"])
    assert (tmp_path / "whole" / "scores_val.json").exists()
    checkpoint, dataset = tmp_path / "alone.pt", data.load("mini", tmp_path / "mini")
    entities = cheers.Entities(Config(clip="mini", device="cpu"), dataset)
    (tmp_path / "whole" / "best.pt").rename(checkpoint)
    capsys.readouterr()
    pair = dataset.pairs("test")[0]
    files = [dataset.paths[name].rename(tmp_path / name) for name in (pair.before, pair.after)]
    (tmp_path / "mini").rename(tmp_path / "elsewhere")
    cheers.main(["--caption", *map(str, files), "--checkpoint", str(checkpoint), "--device", "cpu"])
    printed, caption = capsys.readouterr().out.splitlines()
    assert printed == entities.notes(entities.indices[pair.before, pair.after][None])[0][0]
    assert set(caption.split()) <= set(dataset.vocab.words)
