"""RDD+ACR against its equations, and itself."""

import json
import math
from types import SimpleNamespace

import open_clip
import pytest
import torch

import data
import rdd_acr
from rdd_acr import PRESETS, RDD, Attributes, Config, alignment_loss, total_loss

B, C, H, W, V, WORDS = 4, 5, 2, 3, 9, 12
N, E = H * W, 7
CAPTION = torch.tensor([[2, 4, 5, 6, 3, 0, 0, 0], [2, 7, 3, 0, 0, 0, 0, 0], [2, 8, 9, 10, 11, 4, 5, 3],
                        [2, 7, 3, 0, 0, 0, 0, 0]])  # fmt: skip


def small(**fields) -> RDD:
    torch.manual_seed(0)
    sizes = dict(dim=8, word_dim=6, heads=2, object_vectors=3, action_vectors=2, clip_dim=E, clip_width=6)
    return RDD(Config(**sizes | fields), WORDS, (C, H, W), V).double()


def pictures():
    torch.manual_seed(1)
    return torch.rand(2, B, C, H, W, dtype=torch.float64)


def attributes(rows=(0, 1, 2, 1), ignore_equal=True, seed=2) -> Attributes:
    """What Phrases gives for captions whose phrases are `rows`; -1 is a caption without."""
    torch.manual_seed(seed)
    rows = torch.tensor(rows)
    same = rows[:, None] == rows if ignore_equal else torch.eye(len(rows), dtype=torch.bool)
    return Attributes(torch.randn(9, E, dtype=torch.float64)[rows], rows >= 0, same)


def mean(x):
    return sum(x) / len(x)


def naive_alignment(vectors, texts, rows, tau, ignore_equal):
    """Eq. 10-13 word for word, among the pairs that have a phrase; the mean is over all."""
    have = [k for k in range(len(rows)) if rows[k] >= 0]
    pooled = [mean(list(vectors[k])) for k in range(len(rows))]

    def cosine(a, b):
        return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))

    losses = [0.0] * len(rows)
    for k in have:
        others = [r for r in have if r == k or not ignore_equal or rows[r] != rows[k]]
        there = [math.exp(cosine(texts[k], pooled[r]) / tau) for r in others]
        back = [math.exp(cosine(pooled[k], texts[r]) / tau) for r in others]
        own = math.exp(cosine(texts[k], pooled[k]) / tau)
        losses[k] = -(math.log(own / sum(there)) + math.log(own / sum(back))) / 2
    return mean(losses)


@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (0, 1, 2, 1), (0, -1, 2, 2), (-1, -1, -1, -1)])
@pytest.mark.parametrize("ignore_equal", [True, False])
def test_alignment_losses_against_loops(rows, ignore_equal):
    model, (before, after) = small(tau=0.3).eval(), pictures()
    nouns, verbs = attributes(rows, ignore_equal), attributes(rows, ignore_equal, seed=3)
    losses, (_, distilled) = model(before, after, CAPTION, nouns, verbs), model.encode(before, after)
    for loss, name, phrases in (("n2o", "objects", nouns), ("v2a", "actions", verbs)):
        texts = model.adapter(phrases.text).detach()
        expected = naive_alignment(distilled[name].vectors.detach(), texts, rows, 0.3, ignore_equal)
        assert losses[loss].item() == pytest.approx(expected)


def test_a_pair_without_a_phrase_takes_no_part():
    torch.manual_seed(0)
    vectors, texts = torch.randn(4, 3, 8), torch.randn(4, 8)
    valid, same = torch.tensor([True, True, True, False]), torch.eye(4, dtype=torch.bool)
    vectors.requires_grad_()
    loss = alignment_loss(vectors, texts, valid, same, 0.2)
    alone = alignment_loss(vectors[:3], texts[:3], valid[:3], same[:3, :3], 0.2)
    torch.testing.assert_close(loss, alone * 3 / 4)  # the mean is over all four pairs
    loss.backward()
    assert not vectors.grad[3].any() and vectors.grad[:3].any() and vectors.grad.isfinite().all()


def test_caption_loss_against_loop():
    model, (before, after) = small().eval(), pictures()
    logits = model.decoder.head(model.decoder(CAPTION, model.encode(before, after)[0])[0])
    word = lambda b, t: -logits[b, t].log_softmax(-1)[CAPTION[b, t + 1]].item()
    rows = [[word(b, t) for t in range(7) if CAPTION[b, t + 1]] for b in range(B)]
    loss = model(before, after, CAPTION, attributes(), attributes())["caption"]
    assert loss.item() == pytest.approx(mean([mean(row) for row in rows]))


def test_a_loss_asks_for_the_phrases_that_it_needs():
    (before, after), phrases = pictures(), attributes()
    for fields, given in (({}, {}), ({}, {"nouns": phrases}), ({"w_v2a": 0.0}, {"verbs": phrases})):
        with pytest.raises(ValueError, match="L_N2O needs nouns=, L_V2A verbs="):
            small(**fields)(before, after, CAPTION, **given)
    assert set(small(w_n2o=0.0, w_v2a=0.0)(before, after, CAPTION)) == {"caption"}


# ---- layers ----------------------------------------------------------------------------------------------------------


def attention(module, query, memory):
    """Eq. 3 in loops over heads."""
    q, k, v = module.project(query, memory)
    heads = []
    for h in range(2):
        part = slice(4 * h, 4 * h + 4)
        heads.append((q[..., part] @ k[..., part].transpose(1, 2) / 2).softmax(-1) @ v[..., part])
    return module.out(torch.cat(heads, -1))


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("share_blocks", [True, False])
@pytest.mark.parametrize("order", ["none", "n", "v", "n+v", "v+n", "v&n"])
def test_encoder_against_equations(order, share_blocks, residual):
    """residual=False: Eq. 2-8 as printed, without any LayerNorm."""
    weights = {"w_n2o": 0.1 * ("n" in order.replace("none", "")), "w_v2a": 0.1 * ("v" in order)}
    model = small(order=order, share_blocks=share_blocks, residual=residual, **weights).eval()
    before, after = pictures()
    for p in model.parameters():
        torch.nn.init.normal_(p)  # also LayerNorm's: one that is not printed would show
    norm = (lambda module, x: module(x)) if residual else (lambda module, x: x)
    f_bef, f_aft = model.embed(before), model.embed(after)
    g = model.difference
    enriched = [attention(g.attention, f, f_bef - f_aft) for f in (f_bef, f_aft)]  # Eq. 2-4
    if residual:
        enriched = [g.norm(f + x) for f, x in zip((f_bef, f_aft), enriched, strict=True)]
    f_c = g.join(torch.cat(enriched, -1))  # Eq. 5

    def distil(module, source):
        vectors = module.vectors.expand(B, -1, -1)
        for i in range(3):
            block = module.blocks[0 if share_blocks else i]
            x = norm(block.norm_source, source)
            source = attention(block.self_attention, x, x) + residual * source  # Eq. 6
            x = norm(block.norm_seen, source)
            hat = attention(block.cross_attention, norm(block.norm_vectors, vectors), x) + residual * vectors  # Eq. 7
            vectors = block.feed_forward(norm(block.norm_out, hat)) + hat  # Eq. 8
        return vectors

    expected = {}
    if order in ("n", "n+v", "v&n"):
        expected["objects"] = distil(model.objects, f_c)
    if order in ("v", "v+n", "v&n"):
        expected["actions"] = distil(model.actions, f_c)
    if order == "n+v":
        expected["actions"] = distil(model.actions, expected["objects"])
    if order == "v+n":
        expected["objects"] = distil(model.objects, expected["actions"])
    tokens, distilled = model.encode(before, after)
    assert set(distilled) == set(expected)
    for name in expected:
        torch.testing.assert_close(distilled[name].vectors, expected[name])
    x = torch.cat([f_c, *(expected[name] for name in distilled)], 1)
    if expected:  # Eq. 9
        f = model.fuse
        x = x + attention(f.attention, f.norm1(x), f.norm1(x))
        x = x + f.feed_forward(f.norm2(x)).relu()
    torch.testing.assert_close(tokens, x)


def test_residuals_keep_object_vectors_apart():
    """Eq. 4 and 6-8 as printed: every vector is a mean of nearly the same cells, so all start alike."""
    spread = {}
    for residual in (True, False):
        torch.manual_seed(0)
        cfg = Config(residual=residual, w_n2o=0.0, w_v2a=0.0)  # the paper's D, N, K_o
        vectors = RDD(cfg, WORDS, (64, 7, 6), V).eval().encode(*torch.rand(2, 2, 64, 7, 6))[1]["objects"].vectors
        spread[residual] = (vectors.std(1).norm(dim=-1) / vectors.norm(dim=-1).mean(1)).mean().item()  # (2, K, D)
    assert spread[True] > 0.8 and spread[False] < 0.01, spread


def test_without_gde_the_bare_difference_goes_on():
    model, (before, after) = small(gde=False, order="none", w_n2o=0.0, w_v2a=0.0).eval(), pictures()
    torch.testing.assert_close(model.encode(before, after)[0], torch.sub(model.embed(before), model.embed(after)))


def test_embedding_against_loops():
    model, (before, _) = small(), pictures()
    conv, table, cells = model.embed.conv, model.embed.position, model.embed(before)
    for b in range(B):
        for i in range(H):
            for j in range(W):
                place = torch.cat([table.col.weight[j], table.row.weight[i]])
                cell = conv.weight[:, :, 0, 0] @ before[b, :, i, j] + conv.bias + place
                torch.testing.assert_close(cells[b, i * W + j], cell)


def test_decoder_starts_xavier_uniform():
    out = small(dim=64).decoder.layers[0].cross_attention.out.weight
    assert out.std().item() == pytest.approx(64**-0.5, rel=0.05)  # uniform in +- sqrt(6 / 2D)


def test_a_loss_without_its_vectors_is_refused():
    with pytest.raises(ValueError, match="--w_v2a 0"):
        small(order="n")
    with pytest.raises(ValueError, match="--w_n2o 0"):
        small(order="none")


@pytest.mark.parametrize("order", ["n+v", "v+n", "v&n"])
def test_vector_maps(order):
    model, (before, after) = small(order=order).eval(), pictures()
    maps = model.attention_map(before, after, CAPTION)
    assert set(maps) == {"decoder", "objects", "actions"}
    for name in maps:
        assert maps[name].shape == (B, H, W)
        torch.testing.assert_close(maps[name].sum((1, 2)), torch.ones(B, dtype=torch.float64))
    weights = {}
    for name, (_, query, key) in model.encode(before, after)[1].items():
        weights[name] = getattr(model, name).blocks[-1].cross_attention.scores(query, key).softmax(-1).mean(1)
    first, second = weights
    through = weights[second] @ weights[first] if "+" in order else weights[second]
    torch.testing.assert_close(maps[second].flatten(1), through.mean(1))


# ---- learning, presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"share_blocks": False, "order": "v+n"}, {"residual": False},
                                    {"order": "v&n", "prompt": "fixed"}])  # fmt: skip
def test_every_parameter_learns(fields):
    model = small(**fields)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    start = {n: p.clone() for n, p in model.named_parameters()}
    before, after = pictures()
    nouns, verbs = attributes(), attributes(seed=3)
    if model.cfg.prompt == "learnable":  # its gradient comes through CLIP: test_total_is_equation_16_and_...
        nouns = nouns._replace(text=nouns.text + model.noun_prompt.sum())
        verbs = verbs._replace(text=verbs.text + model.verb_prompt.sum())
    caption = torch.nn.functional.pad(CAPTION, (0, 1))  # up to the last position
    caption[2] = torch.tensor([2, 8, 9, 10, 11, 4, 5, 6, 3])
    total_loss(model(before, after, caption, nouns, verbs), model.cfg).backward()
    optimizer.step()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any() or torch.equal(p, start[n])]
    key_bias = [n for n in dead if n.endswith("attention.key.bias")]  # a softmax ignores what shifts all its scores
    assert set(dead) <= set(key_bias), f"no gradient reaches {dead}"


def test_presets():
    parse = lambda *argv: rdd_acr.parse_args(Config, PRESETS, "s", "d", [*argv, "--device", "cpu"])[0]
    vectors = {name: parse("--dataset", name).action_vectors for name in ("clevr_change", "levir_cc", "spot_the_diff")}
    assert vectors == {"clevr_change": 5, "levir_cc": 10, "spot_the_diff": 10}
    with pytest.raises(ValueError, match="unrecognized arguments: --reading"):  # no code was released
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


def phrases_of(dataset, **fields) -> rdd_acr.Phrases:
    return rdd_acr.Phrases(Config(clip="mini", clip_dim=128, clip_width=64, device="cpu", **fields), dataset)


@pytest.mark.parametrize("prompt", ["none", "fixed", "learnable"])
def test_phrases_go_through_clip_once(corpus, prompt, monkeypatch):
    dataset, clip, tokenizer = corpus
    encoded, original = [], data.encode_prompted
    monkeypatch.setattr(data, "encode_prompted", lambda c, t, p: encoded.append(len(t)) or original(c, t, p))
    phrases = phrases_of(dataset, prompt=prompt)
    learned = torch.zeros(4, 64, requires_grad=True) if prompt == "learnable" else None
    batch = [TEXTS[0], TEXTS[3], TEXTS[1], TEXTS[4]]
    cube, verbs = "small red cube", ["is missing", "has been moved", "has been added", "has been removed"]
    both = phrases.encode(batch, {"nouns": learned, "verbs": learned})
    assert list(both) == ["nouns", "verbs"] and encoded == [2 + 4]
    for kind, words, fixed, equal in (
        ("nouns", [cube, cube, "large cyan metal sphere", cube], rdd_acr.NOUN_PROMPT, 10),
        ("verbs", verbs, rdd_acr.VERB_PROMPT, 4),
    ):
        text, valid, same = both[kind]
        assert valid.all() and same.sum() == equal
        torch.testing.assert_close(both[kind], phrases.encode(batch, {kind: learned})[kind])  # one kind alone
        if prompt == "learnable":
            assert torch.autograd.grad(text.sum(), learned, retain_graph=True)[0].any()
            assert not any(p.requires_grad for p in clip.parameters())
        else:
            prefix = fixed if prompt == "fixed" else ""
            torch.testing.assert_close(text, clip.encode_text(tokenizer([prefix + w for w in words])))


def learned_prompts():
    return {kind: torch.randn(4, 64, requires_grad=True) for kind in ("nouns", "verbs")}


def test_each_kind_has_its_own_prompt(corpus):
    phrases, prompts = phrases_of(corpus[0]), learned_prompts()
    both = phrases.encode(TEXTS, prompts)
    for kind, prompt in prompts.items():
        torch.testing.assert_close(both[kind], phrases.encode(TEXTS, {kind: prompt})[kind])
        theirs = torch.autograd.grad(both[kind].text.square().sum(), list(prompts.values()), retain_graph=True)
        assert [bool(x.any()) for x in theirs] == [other == kind for other in prompts]


def test_phrases_compile_as_one_graph(corpus):
    """Whatever number of phrases a batch has."""
    torch._dynamo.reset()
    plain, compiled, prompts, graphs = phrases_of(corpus[0]), phrases_of(corpus[0]), learned_prompts(), []
    flags = {"backend": lambda graph, _: graphs.append(1) or graph, "fullgraph": True, "dynamic": True}
    compiled.encode_prompted = torch.compile(data.encode_prompted, **flags)
    for texts in (TEXTS, TEXTS[1:], TEXTS[:2]):
        ours, expected = (x.encode(texts, prompts) for x in (compiled, plain))
        torch.testing.assert_close(ours, expected)
        total = lambda both: sum(x.text.square().sum() for x in both.values())
        gradients = (torch.autograd.grad(total(x), list(prompts.values())) for x in (ours, expected))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    assert len(graphs) == 1


def test_the_captions_are_read_before_clip_is_fetched(corpus, monkeypatch):
    def without_model(*_):
        raise ValueError("run: python -m spacy download en_core_web_sm")

    monkeypatch.setattr(data, "language", without_model)
    monkeypatch.setattr(data, "load_clip", lambda *_: pytest.fail("a minute of retries without a network"))
    with pytest.raises(ValueError, match="spacy download"):
        phrases_of(corpus[0])


def test_equal_phrases_can_be_negatives(corpus):
    phrases = phrases_of(corpus[0], prompt="none", equal_phrases="negatives")
    assert torch.equal(phrases.encode(TEXTS, {"nouns": None})["nouns"].same, torch.eye(5, dtype=torch.bool))


def test_captions_without_a_segment(corpus, monkeypatch):
    none = {text: ([], []) for text in TEXTS} | {TEXTS[1]: (["large cyan metal sphere", "scene"], [])}
    monkeypatch.setattr(data, "read_captions", lambda *_: none)
    both = phrases_of(corpus[0], prompt="none").encode(TEXTS, {"nouns": None, "verbs": None})
    assert both["nouns"].valid.tolist() == [False, True, False, False, False] and not both["verbs"].valid.any()


def test_other_widths_than_clip_has_are_refused(corpus):
    with pytest.raises(ValueError, match="--clip mini needs --clip_dim 128 --clip_width 64"):
        rdd_acr.Phrases(Config(clip="mini", device="cpu"), corpus[0])


def test_total_is_equation_16_and_the_prompts_learn(corpus):
    """Pairs of both batches are one batch, so they are negatives of each other."""
    dataset, clip, _ = corpus
    model = small(w_n2o=0.3, w_v2a=0.2, clip="mini", clip_dim=128, clip_width=64, device="cpu").float().eval()
    (before, after), phrases = pictures().float(), phrases_of(dataset)
    short = CAPTION[[1, 3], :3]  # batches are padded each to its own longest caption
    changed = data.Batch(before[:2], after[:2], CAPTION[:2], [], TEXTS[:2])
    batches = changed, data.Batch(before[2:], after[2:], short, [], TEXTS[2:4])
    losses = rdd_acr.losses_of(model, batches, model.cfg, phrases)
    texts = phrases.encode(TEXTS[:4], {"nouns": model.noun_prompt, "verbs": model.verb_prompt})
    parts = model(before, after, torch.cat([CAPTION[:2], CAPTION[[1, 3]]]), **texts)
    assert all(loss.shape == () for loss in losses.values())
    expected = (parts["caption"] + 0.3 * parts["n2o"] + 0.2 * parts["v2a"]).item()
    assert losses["total"].item() == pytest.approx(expected, rel=1e-5)
    losses["total"].backward()
    assert model.noun_prompt.grad.any() and model.verb_prompt.grad.any()
    assert all(p.grad is None for p in clip.parameters())


def test_resume_equals_no_interruption_with_phrases(tmp_path):
    """As in test_methods.py, but with ACR: its prompts, its adapter and CLIP's file."""
    flags = ["--scenes", "60", "--dim", "16", "--log_every", "2", "--eval_every", "6", "--device", "cpu",
             "--data_dir", str(tmp_path / "mini")]  # fmt: skip
    rdd_acr.main([*flags, "--steps", "6", "--schedule", "step", "--out_dir", str(tmp_path / "whole")])
    rdd_acr.main([*flags, "--steps", "3", "--schedule", "step", "--out_dir", str(tmp_path / "parts")])
    rdd_acr.main(["--resume", "--steps", "6", "--out_dir", str(tmp_path / "parts"), "--device", "cpu"])
    a, b = (torch.load(tmp_path / name / "last.pt", weights_only=True)["model"] for name in ("whole", "parts"))
    assert all(torch.equal(a[k], b[k]) for k in a) and not any(k.startswith("clip") for k in a)
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert all(math.isfinite(x["n2o"]) and math.isfinite(x["v2a"]) for x in log if x["event"] == "train")
