"""RDD+ACR against its equations, and itself."""

import json
import math
from types import SimpleNamespace

import open_clip
import pytest
import torch

import data
import rdd_acr
from rdd_acr import PRESETS, RDD, RELEASED, Config, contrast_loss

B, C, H, W, V, WORDS = 4, 5, 2, 3, 9, 12
N, E = H * W, 7
CAPTION = torch.tensor([[2, 4, 5, 6, 3, 0, 0, 0], [2, 7, 3, 0, 0, 0, 0, 0], [2, 8, 9, 10, 11, 4, 5, 3],
                        [2, 7, 3, 0, 0, 0, 0, 0]])  # fmt: skip


@pytest.fixture(autouse=True)
def clip_sizes(monkeypatch):
    monkeypatch.setattr(data, "clip_sizes", lambda name: (E, 6))


def small(**fields) -> RDD:
    torch.manual_seed(0)
    return RDD(Config(**{"dim": 8, "word_dim": 6, "heads": 2, "object_vectors": 3, "action_vectors": 2} | fields),
               WORDS, (C, H, W), V).double()  # fmt: skip


def pictures():
    torch.manual_seed(1)
    return torch.rand(2, B, C, H, W, dtype=torch.float64)


def phrases(rows=(0, 1, 2, 1)):
    """What Phrases gives for nouns and verbs: -1 is a caption without."""
    torch.manual_seed(2)
    rows = torch.tensor(rows)
    return [(torch.randn(9, E, dtype=torch.float64)[rows], rows >= 0, rows[:, None] == rows) for _ in range(2)]


def mean(x):
    return sum(x) / len(x)


def naive_contrast(vectors, texts, rows, tau, ignore_equal):
    """Eq. 10-13 word for word, over the pairs that have a phrase."""
    have = [k for k in range(len(rows)) if rows[k] >= 0]
    pooled = [mean(list(vectors[k])) for k in range(len(rows))]

    def cosine(a, b):
        return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))

    total = 0.0
    for k in have:
        others = [r for r in have if r == k or not ignore_equal or rows[r] != rows[k]]
        there = [math.exp(cosine(texts[k], pooled[r]) / tau) for r in others]
        back = [math.exp(cosine(pooled[k], texts[r]) / tau) for r in others]
        own = math.exp(cosine(texts[k], pooled[k]) / tau)
        total -= (math.log(own / sum(there)) + math.log(own / sum(back))) / 2
    return total / len(have) if have else 0.0


@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (0, 1, 2, 1), (0, -1, 2, 2), (-1, -1, -1, -1)])
@pytest.mark.parametrize("equal_phrases", ["ignored", "negatives"])
def test_contrast_losses_against_loops(rows, equal_phrases):
    model, (before, after) = small(equal_phrases=equal_phrases, tau=0.3).eval(), pictures()
    losses, (_, found) = model(before, after, CAPTION, phrases(rows)), model.encode(before, after)
    for (loss, name), (encoded, _, _) in zip((("n2o", "objects"), ("v2a", "actions")), phrases(rows), strict=True):
        vectors, texts = found[name][0].detach(), model.adapter(encoded).detach()
        expected = naive_contrast(vectors, texts, rows, 0.3, equal_phrases == "ignored")
        assert losses[loss].item() == pytest.approx(expected)


def test_a_pair_without_a_phrase_leaves_the_loss_unchanged():
    torch.manual_seed(0)
    vectors, texts = torch.randn(4, 3, 8), torch.randn(4, 8)
    valid, same = torch.tensor([True, True, True, False]), torch.eye(4, dtype=torch.bool)
    vectors.requires_grad_()
    loss = contrast_loss(vectors, texts, valid, same, 0.2)
    torch.testing.assert_close(loss, contrast_loss(vectors[:3], texts[:3], valid[:3], same[:3, :3], 0.2))
    loss.backward()
    assert not vectors.grad[3].any() and vectors.grad.isfinite().all()


def test_caption_loss_against_loop():
    model, (before, after) = small().eval(), pictures()
    logits = model.decoder.head(model.decoder(CAPTION, model.encode(before, after)[0])[0])
    rows = [[-logits[b, t].log_softmax(-1)[CAPTION[b, t + 1]].item() for t in range(7) if CAPTION[b, t + 1]] for b in range(B)]
    assert model(before, after, CAPTION)["caption"].item() == pytest.approx(mean([mean(row) for row in rows]))


# ---- layers ----------------------------------------------------------------------------------------------------------


def attention(module, query, memory):
    """Eq. 3 in loops over heads."""
    q, k, v = module.project(query, memory)
    heads = []
    for h in range(2):
        part = slice(4 * h, 4 * h + 4)
        heads.append((q[..., part] @ k[..., part].transpose(1, 2) / 2).softmax(-1) @ v[..., part])
    return module.out(torch.cat(heads, -1))


@pytest.mark.parametrize("share_blocks", [True, False])
@pytest.mark.parametrize("order", ["none", "n", "v", "n+v", "v+n", "v&n"])
def test_encoder_against_equations(order, share_blocks):
    weights = {"w_n2o": 0.1 * ("n" in order.replace("none", "")), "w_v2a": 0.1 * ("v" in order)}
    model, (before, after) = small(order=order, share_blocks=share_blocks, **weights).eval(), pictures()
    f_bef, f_aft = model.embed(before, after)
    g = model.difference
    seen = [attention(g.attention, f, f_bef - f_aft) for f in (f_bef, f_aft)]  # Eq. 2-4
    f_c = g.join(torch.cat(seen, -1))  # Eq. 5

    def distil(module, source):
        vectors = module.vectors.expand(B, -1, -1)
        for i in range(3):
            block = module.blocks[0 if share_blocks else i]
            x = block.norm_source(source)
            source = attention(block.self_attention, x, x)  # Eq. 6
            hat = attention(block.cross_attention, block.norm_vectors(vectors), block.norm_seen(source))  # Eq. 7
            vectors = block.feed_forward(block.norm_out(hat)) + hat  # Eq. 8
        return vectors

    found = {}
    if order in ("n", "n+v", "v&n"):
        found["objects"] = distil(model.objects, f_c)
    if order in ("v", "v+n", "v&n"):
        found["actions"] = distil(model.actions, f_c)
    if order == "n+v":
        found["actions"] = distil(model.actions, found["objects"])
    if order == "v+n":
        found["objects"] = distil(model.objects, found["actions"])
    tokens, ours = model.encode(before, after)
    assert set(ours) == set(found)
    for name in found:
        torch.testing.assert_close(ours[name][0], found[name])
    x = torch.cat([f_c, *(found[name] for name in ours)], 1)
    if found:  # Eq. 9
        f = model.fuse
        x = x + attention(f.attention, f.norm1(x), f.norm1(x))
        x = x + f.feed_forward(f.norm2(x)).relu()
    torch.testing.assert_close(tokens, x)


def test_without_gde_the_bare_difference_goes_on():
    model, (before, after) = small(gde=False, order="none", w_n2o=0.0, w_v2a=0.0).eval(), pictures()
    torch.testing.assert_close(model.encode(before, after)[0], torch.sub(*model.embed(before, after)))


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("position", ["shared", "own"])
def test_embedding_against_loops(position, centre):
    model, (before, after) = small(position=position, centre=centre), pictures()
    conv, tables = model.embed.conv, model.embed.positions
    for f, image, table in zip(model.embed(before, after), (before, after), (tables[0], tables[-1]), strict=True):
        for b in range(B):
            mean = sum(x[b, :, i, j] for x in (before, after) for i in range(H) for j in range(W)) / (2 * N) * centre
            for i in range(H):
                for j in range(W):
                    at = torch.cat([table.col.weight[j], table.row.weight[i]])
                    cell = conv.weight[:, :, 0, 0] @ (image[b, :, i, j] - mean) + conv.bias + at
                    torch.testing.assert_close(f[b, i * W + j], cell)
    places = torch.sub(*model.embed(before, before))  # what F_diff knows of places where nothing differs
    assert places.any() == (position == "own")


def test_decoder_initialisation():
    spread = {init: small(decoder_init=init, dim=64).decoder.layers[0].cross_attention.out.weight.std().item()
              for init in ("pytorch", "xavier")}  # fmt: skip
    assert spread["xavier"] == pytest.approx(64**-0.5, rel=0.05)  # uniform in +- sqrt(6 / 2D)
    assert spread["pytorch"] == pytest.approx((3 * 64) ** -0.5, rel=0.05)  # uniform in +- 1 / sqrt(D)


def test_a_loss_without_its_vectors_is_refused():
    with pytest.raises(ValueError, match="--w_v2a 0"):
        small(order="n")
    with pytest.raises(ValueError, match="--w_n2o 0"):
        small(order="none")


@pytest.mark.parametrize("order", ["n+v", "v+n", "v&n"])
def test_vector_maps(order):
    model, (before, after) = small(order=order).eval(), pictures()
    maps = model.vector_maps(before, after)
    assert set(maps) == {"objects", "actions"}
    for name in maps:
        assert maps[name].shape == (B, H, W)
        torch.testing.assert_close(maps[name].sum((1, 2)), torch.ones(B, dtype=torch.float64))
    found = model.encode(before, after)[1]
    first, second = found
    look = {n: getattr(model, n).blocks[-1].cross_attention.scores(*found[n][1]).softmax(-1).mean(1) for n in found}
    through = look[second] @ look[first] if "+" in order else look[second]
    torch.testing.assert_close(maps[second].flatten(1), through.mean(1))


# ---- learning, presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"share_blocks": False, "order": "v+n"},
                                    {"order": "v&n", "prompt": "fixed", "position": "own"}])  # fmt: skip
def test_every_parameter_learns(fields):
    model = small(**fields)
    optimizer, start = torch.optim.Adam(model.parameters(), lr=1e-2), {n: p.clone() for n, p in model.named_parameters()}
    before, after = pictures()
    found = phrases()
    if model.cfg.prompt == "learnable":  # its gradient comes through CLIP (test_total_is_equation_16_and_the_prompts_learn)
        found = [(x + model.prompt(kind).sum(), valid, same) for kind, (x, valid, same) in enumerate(found)]
    caption = torch.nn.functional.pad(CAPTION, (0, 1))  # up to the last position
    caption[2] = torch.tensor([2, 8, 9, 10, 11, 4, 5, 6, 3])
    sum(model(before, after, caption, found).values()).backward()
    optimizer.step()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any() or torch.equal(p, start[n])]
    key_bias = [n for n in dead if n.endswith("attention.key.bias")]  # a softmax does not see what shifts all its scores
    assert set(dead) <= set(key_bias), f"no gradient reaches {dead}"


def near_identity(**fields) -> RDD:
    torch.manual_seed(0)
    cfg = Config(**{"dim": 128, "heads": 8, "position": "own", "centre": True, "near_identity": True, "decoder_init": "xavier",
                    "w_n2o": 0.0, "w_v2a": 0.0} | fields)  # fmt: skip
    return RDD(cfg, WORDS, (64, 8, 7), V).eval()  # its codes tell 8 rows and columns apart


def test_near_identity_brings_the_images_through():
    model = near_identity(order="none")
    before, after = torch.randn(2, 4, 64, 8, 7) / 2
    f_bef, f_aft = model.embed(before, after)
    f_c = model.encode(before, after)[0]
    content = torch.cat([torch.arange(48), torch.arange(64, 112)])
    for f, copy in ((f_bef, f_c[..., 32:80]), (f_aft, f_c[..., 80:])):
        alike = torch.cosine_similarity(f[..., content[:48]].flatten(), copy.flatten(), 0)
        assert alike > 0.8, alike
    own = torch.cosine_similarity((f_bef - f_aft)[..., content[:16]].flatten(), f_c[..., :16].flatten(), 0)
    assert own > 0.9, own


def test_near_identity_cancels_what_did_not_change():
    model = near_identity(order="n")
    before = torch.zeros(1, 64, 8, 7)
    after = before.clone()
    before[..., 0, 0], before[..., 1, 1] = torch.randn(2, 64)
    after[..., 0, 2] = before[..., 0, 0]  # one object elsewhere, the other gone
    tokens, seen = [], model.fuse.register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    f = model.fuse
    model.encode(before, after)
    seen.remove()
    compared = tokens[0] + f.attention(f.norm1(tokens[0]), f.norm1(tokens[0]))
    left = compared[0, :9, 32:80].norm(dim=1) / tokens[0][0, :9, 32:80].norm(dim=1)  # of "before", cell by cell
    assert left[0] < 0.7 * left[8], left


@pytest.mark.parametrize("fields", [{"heads": 4}, {"position": "shared"}, {"dim": 24}])
def test_near_identity_refuses_what_it_is_not_laid_out_for(fields):
    with pytest.raises(ValueError, match="--no-near_identity"):
        near_identity(**fields)


def test_near_identity_tells_vectors_apart():
    """Attention without a residual (Eq. 6) makes all cells alike where its scores are small, and then all vectors too."""
    before, after = torch.randn(2, 5, 64, 8, 7)
    apart = {}
    for start in (True, False):
        found = near_identity(order="n", near_identity=start).encode(before, after)[1]["objects"][0]
        apart[start] = (found.std(1).norm(dim=-1) / found.norm(dim=-1).mean(1)).mean()
    assert apart[True] > 5 * apart[False], apart


def test_presets():
    parse = lambda *argv: rdd_acr.parse_args(Config, PRESETS, RELEASED, "s", "d", [*argv, "--device", "cpu"])[0]
    vectors = {name: parse("--dataset", name).action_vectors for name in ("clevr_change", "levir_cc", "spot_the_diff")}
    assert vectors == {"clevr_change": 5, "levir_cc": 10, "spot_the_diff": 10}
    with pytest.raises(ValueError, match="released no code"):
        parse("--reading", "released")


# ---- phrases ---------------------------------------------------------------------------------------------------------

TEXTS = ["the small red cube is missing", "a large cyan metal sphere has been added", "there is no change",
         "the small red cube has been moved", "the small red cube has been removed"]  # fmt: skip


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A data set of five captions, and a small CLIP with random weights."""
    torch.manual_seed(0)
    clip = open_clip.CLIP(**data.MINI_CLIP).eval().requires_grad_(False)
    tokenizer = open_clip.SimpleTokenizer(context_length=clip.context_length)
    monkeypatch.setattr(data, "load_clip", lambda name, root, device: (clip, tokenizer, None))
    pairs = [data.Pair(str(i), "a", "b", [text]) for i, text in enumerate(TEXTS)]
    scene = SimpleNamespace(pairs=pairs, swapped=None)
    return SimpleNamespace(name="mini", root=tmp_path, scenes={"train": [scene]}), clip, tokenizer


@pytest.mark.parametrize("prompt", ["none", "fixed", "learnable"])
def test_phrases_go_through_clip_once(corpus, prompt, monkeypatch):
    dataset, clip, tokenizer = corpus
    encoded, original = [], data.encode_prompted
    monkeypatch.setattr(data, "encode_prompted", lambda c, t, p: encoded.append(len(t)) or original(c, t, p))
    found = rdd_acr.Phrases(Config(prompt=prompt, clip="mini", device="cpu"), dataset)
    learned = torch.zeros(4, 64, requires_grad=True)
    batch = [TEXTS[0], TEXTS[3], TEXTS[1], TEXTS[4]]
    for kind, words in enumerate((["small red cube"] * 2 + ["large cyan metal sphere", "small red cube"],
                                  ["is missing", "has been moved", "has been added", "has been removed"])):  # fmt: skip
        encoded.clear()
        vectors, valid, same = found(batch, kind, learned if prompt == "learnable" else None)
        assert valid.all() and same.sum() == (10 if kind == 0 else 4)
        assert encoded == ([len(set(words))] if prompt == "learnable" else [])
        if prompt == "learnable":
            vectors.sum().backward()
            assert learned.grad.any() and all(p.grad is None for p in clip.parameters())
            learned.grad = None
        else:
            prefix = rdd_acr.PROMPTS[kind] if prompt == "fixed" else ""
            torch.testing.assert_close(vectors, clip.encode_text(tokenizer([prefix + w for w in words])))


def test_captions_without_a_segment(corpus, monkeypatch):
    dataset, _, _ = corpus
    none = {text: ([], []) for text in TEXTS} | {TEXTS[1]: (["large cyan metal sphere", "scene"], [])}
    monkeypatch.setattr(data, "caption_segments", lambda *_: none)
    found = rdd_acr.Phrases(Config(prompt="none", clip="mini", device="cpu"), dataset)
    assert found(TEXTS, 0, None)[1].tolist() == [False, True, False, False, False]
    assert not found(TEXTS, 1, None)[1].any()


def test_total_is_equation_16_and_the_prompts_learn(corpus, monkeypatch):
    dataset, clip, _ = corpus
    monkeypatch.setattr(data, "clip_sizes", lambda name: (128, 64))
    model, (before, after) = small(w_n2o=0.3, w_v2a=0.2, clip="mini").float().eval(), pictures().float()
    cfg = model.cfg
    cfg.device = "cpu"
    found = rdd_acr.Phrases(cfg, dataset)
    streams = tuple(data.Batch(*pair, CAPTION, [], TEXTS[:4]) for pair in ((before, after), (after, before)))
    losses = rdd_acr.losses_of(model, streams, cfg, found)
    both = [found(TEXTS[:4], kind, model.prompt(kind)) for kind in (0, 1)]
    parts = [model(b.before, b.after, b.caption, both) for b in streams]
    weights = {"caption": 1, "n2o": 0.3, "v2a": 0.2}
    expected = sum(weights[name] * (parts[0][name] + parts[1][name]).item() / 2 for name in parts[0])
    assert losses["total"].item() == pytest.approx(expected, rel=1e-5)
    losses["total"].backward()
    assert model.prompts.grad[0].any() and model.prompts.grad[1].any()
    assert all(p.grad is None for p in clip.parameters())


def test_resume_equals_no_interruption_with_phrases(tmp_path, monkeypatch):
    """As in test_methods.py, but with ACR: its prompts, its adapter and CLIP's file."""
    flags = ["--scenes", "60", "--dim", "16", "--log_every", "2", "--eval_every", "6", "--device", "cpu",
             "--data_dir", str(tmp_path / "mini")]  # fmt: skip
    monkeypatch.setattr(data, "clip_sizes", lambda name: (128, 64))
    rdd_acr.main([*flags, "--steps", "6", "--schedule", "step", "--out_dir", str(tmp_path / "whole")])
    rdd_acr.main([*flags, "--steps", "3", "--schedule", "step", "--out_dir", str(tmp_path / "parts")])
    rdd_acr.main(["--resume", "--steps", "6", "--out_dir", str(tmp_path / "parts"), "--device", "cpu"])
    a, b = (torch.load(tmp_path / name / "last.pt", weights_only=True)["model"] for name in ("whole", "parts"))
    assert all(torch.equal(a[k], b[k]) for k in a) and not any(k.startswith("clip") for k in a)
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert all(math.isfinite(x["n2o"]) and math.isfinite(x["v2a"]) for x in log if x["event"] == "train")
