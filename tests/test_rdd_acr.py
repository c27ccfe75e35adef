"""RDD+ACR against its equations, and itself."""

import itertools
import math

import open_clip
import pytest
import torch
from helpers import (
    CAPTION,
    WORDS,
    B,
    C,
    H,
    L,
    W,
    attention_by_heads,
    cosine,
    mean,
    pictures,
    random_clip,
)

import data
import rdd_acr
from rdd_acr import RDD, Attributes, Config, encode_prompted
from support.pairs import SPLITS

CAPTION = CAPTION[[0, 1, 2, 1], :8]
CLIP_DIM = 7  # width of a phrase's embedding


def small(**fields) -> RDD:
    torch.manual_seed(0)
    sizes = dict(dim=8, word_dim=6, heads=2, object_vectors=3, action_vectors=2)
    sizes |= dict(clip_dim=CLIP_DIM, clip_width=6)
    return RDD(Config(**sizes | fields), WORDS, (C, H, W), L).double()


def attributes(rows=(0, 1, 2, 1), ignore_equal=True, seed=2) -> Attributes:
    """What Phrases returns for captions whose phrases are `rows`; -1 is a caption without one."""
    torch.manual_seed(seed)
    rows = torch.tensor(rows)
    same = rows[:, None] == rows if ignore_equal else torch.eye(len(rows), dtype=torch.bool)
    text = torch.randn(9, CLIP_DIM, dtype=torch.float64)[rows]
    return Attributes(text, rows >= 0, same)


def read_both(phrases, texts, model):
    """What RDD.forward takes of these captions."""
    nouns = phrases.read("nouns", texts, model.noun_prompt)
    return nouns, phrases.read("verbs", texts, model.verb_prompt)


def naive_alignment(vectors, texts, rows, tau, ignore_equal):
    """Eq. 10-13 to the letter, among the pairs that have a phrase; the mean is over all pairs."""
    have = [k for k in range(len(rows)) if rows[k] >= 0]
    pooled = [mean(list(vectors[k])) for k in range(len(rows))]

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
    model = small(tau=0.3).eval()
    before, after = pictures()
    nouns = attributes(rows, ignore_equal)
    verbs = attributes(rows, ignore_equal, seed=3)
    losses = model(before, after, CAPTION, nouns, verbs)
    _, objects, actions = model.encode(before, after)
    for loss, distilled, phrases in (("n2o", objects, nouns), ("v2a", actions, verbs)):
        texts = model.adapter(phrases.text).detach()
        expected = naive_alignment(distilled.vectors.detach(), texts, rows, 0.3, ignore_equal)
        assert losses[loss].item() == pytest.approx(expected)
    (losses["n2o"] + losses["v2a"]).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_worked_example_of_the_alignment_loss():
    """The numbers in its docstring."""
    vectors = torch.tensor([[[1.0, 1.0], [1.0, -1.0]], [[1.0, 1.0], [-1.0, 1.0]]])
    different = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    equal = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    every = torch.ones(2, dtype=torch.bool)
    alone = torch.eye(2, dtype=torch.bool)
    together = torch.ones(2, 2, dtype=torch.bool)
    for phrases, same, expected in (
        (different, alone, 0.313),
        (equal, alone, 0.753),
        (equal, together, 0.0),
    ):
        loss = rdd_acr.alignment_loss(vectors, phrases, every, same, tau=1.0)
        assert loss.item() == pytest.approx(expected, abs=5e-4)


def test_alignment_loss_is_exact_under_autocast():
    torch.manual_seed(0)
    vectors = torch.randn(B, 3, 8)
    texts = torch.randn(B, 8)
    every = torch.ones(B, dtype=torch.bool)
    exact = rdd_acr.alignment_loss(vectors, texts, every, torch.diag(every), 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        ours = rdd_acr.alignment_loss(vectors, texts, every, torch.diag(every), 0.1)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, exact)


# ---- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("share_blocks", [True, False])
@pytest.mark.parametrize("order", ["none", "n", "v", "n+v", "v+n", "v&n"])
def test_encoder_against_equations(order, share_blocks, residual):
    """residual=False: Eq. 2-8 as printed, without any LayerNorm."""
    weights = {"w_n2o": 0.1 * (order not in ("none", "v")), "w_v2a": 0.1 * ("v" in order)}
    model = small(order=order, share_blocks=share_blocks, residual=residual, **weights).eval()
    before, after = pictures()
    for p in model.parameters():
        torch.nn.init.normal_(p)  # LayerNorm's, too, so that an extra LayerNorm would be noticed
    norm = (lambda block, name, x: getattr(block, name)(x)) if residual else (lambda b, n, x: x)
    f_bef = model.embed(before)
    f_aft = model.embed(after)
    g = model.difference
    enriched = [
        attention_by_heads(g.attention, f, f_bef - f_aft) for f in (f_bef, f_aft)
    ]  # Eq. 2-4
    if residual:
        enriched = [g.norm(f + x) for f, x in zip((f_bef, f_aft), enriched, strict=True)]
    f_c = g.join(torch.cat(enriched, -1))  # Eq. 5

    def distil(module, source):
        vectors = module.vectors.expand(B, -1, -1)
        for i in range(3):
            block = module.blocks[0 if share_blocks else i]
            x = norm(block, "norm_source", source)
            source = attention_by_heads(block.self_attention, x, x) + residual * source  # Eq. 6
            x = norm(block, "norm_seen", source)
            query = norm(block, "norm_vectors", vectors)
            attended = attention_by_heads(block.cross_attention, query, x)
            hat = attended + residual * vectors  # Eq. 7
            vectors = block.feed_forward(norm(block, "norm_ffn", hat)) + hat  # Eq. 8
        return vectors

    objects = None
    actions = None
    if order in ("n", "n+v", "v&n"):
        objects = distil(model.objects, f_c)
    if order in ("v", "v+n", "v&n"):
        actions = distil(model.actions, f_c)
    if order == "n+v":
        actions = distil(model.actions, objects)
    if order == "v+n":
        objects = distil(model.objects, actions)
    tokens, *found = model.encode(before, after)
    for distilled, vectors in zip(found, (objects, actions), strict=True):
        assert (distilled is None) == (vectors is None)
        if vectors is not None:
            torch.testing.assert_close(distilled.vectors, vectors)
    x = torch.cat([x for x in (f_c, objects, actions) if x is not None], 1)
    if order != "none":  # Eq. 9
        f = model.fuse
        x = x + attention_by_heads(f.attention, f.norm1(x), f.norm1(x))
        x = x + f.feed_forward(f.norm2(x)).relu()
    torch.testing.assert_close(tokens, x)


def test_without_gde_the_bare_difference_goes_on():
    model = small(gde=False, order="none", w_n2o=0.0, w_v2a=0.0).eval()
    before, after = pictures()
    tokens, *_ = model.encode(before, after)
    torch.testing.assert_close(tokens, model.embed(before) - model.embed(after))


def test_embedding_against_loops():
    embed = small().embed
    before, _ = pictures()
    cells = embed(before)
    for b, i, j in itertools.product(range(B), range(H), range(W)):
        place = torch.cat([embed.position.col.weight[j], embed.position.row.weight[i]])
        cell = embed.conv.weight[:, :, 0, 0] @ before[b, :, i, j] + embed.conv.bias + place
        torch.testing.assert_close(cells[b, i * W + j], cell)


@pytest.mark.parametrize("order", ["n+v", "v+n", "v&n"])
def test_vector_maps(order):
    model = small(order=order).eval()
    before, after = pictures()
    maps = model.attention_map(before, after, CAPTION)
    assert set(maps) == {"decoder", "objects", "actions"}
    weights = []
    _, *distilled = model.encode(before, after)
    for module, (_, q, k) in zip((model.objects, model.actions), distilled, strict=True):
        attention = module.blocks[-1].cross_attention
        weights.append(attention.scores(q, k).softmax(-1).mean(1))
    objects, actions = weights
    if order == "n+v":
        actions = actions @ objects
    if order == "v+n":
        objects = objects @ actions
    torch.testing.assert_close(maps["objects"].flatten(1), objects.mean(1))
    torch.testing.assert_close(maps["actions"].flatten(1), actions.mean(1))


# ---- CLIP with learned prompts -------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip():
    """A random CLIP, its tokenizer, and ids of texts of 1 to 6 words in a context of 12."""
    model, tokenizer = random_clip()
    return model, tokenizer, tokenizer(["cube", "small red cube and large ball", "is gone"])


def prompt_of(clip, words):
    """Embeddings of words, as a prompt."""
    ids = open_clip.SimpleTokenizer(context_length=77)(words)[0]
    return clip.token_embedding(ids[1 : ids.argmax()])


def test_without_a_prompt_it_is_clips_encoder(clip):
    model, _, tokens = clip
    for x in (tokens, tokens[:, :8]):  # padding has no effect
        torch.testing.assert_close(encode_prompted(model, x), model.encode_text(tokens))


@pytest.mark.parametrize("words", ["the", "a picture of"])
def test_a_prompt_of_words_equals_these_words_in_front(clip, words):
    model, tokenizer, _ = clip
    texts = ["cube", "small red cube and ball"]
    expected = model.encode_text(tokenizer([f"{words} {text}" for text in texts]))
    prompts = prompt_of(model, words).expand(2, -1, -1)
    torch.testing.assert_close(encode_prompted(model, tokenizer(texts)[:, :9], prompts), expected)


# ---- phrases -------------------------------------------------------------------------------------

# Captions, and their noun and verb phrases.
CUBE = "small red cube"
SPHERE = "large cyan sphere"
SEGMENTS = {
    "the small red cube is missing": ([CUBE], ["is missing"]),
    "a large cyan sphere has been added": ([SPHERE], ["has been added"]),
    "there is no change": (["no change"], ["there is"]),
    "the small red cube has been moved": ([CUBE], ["has been moved"]),
    "the small red cube has been removed": ([CUBE], ["has been removed"]),
}
TEXTS = list(SEGMENTS)


def phrases_of(clip, segments=SEGMENTS, **fields) -> rdd_acr.Phrases:
    model, tokenizer, _ = clip
    cfg = Config(clip_dim=8, clip_width=16, device="cpu", **fields)
    return rdd_acr.Phrases(cfg, model, tokenizer, segments)


def test_only_training_captions_are_read(clip, prepared, monkeypatch):
    monkeypatch.setattr("support.extractors.load_clip", lambda name, device: clip)
    dataset = data.load("clevr_change", prepared)
    phrases = rdd_acr.phrases_of(dataset, Config(clip_dim=8, clip_width=16, device="cpu"))
    assert set(phrases.rows["nouns"]) == set(dataset.captions(["train"]))
    assert set(phrases.rows["nouns"]) < set(dataset.captions(SPLITS))


@pytest.mark.parametrize("prompt", ["none", "fixed"])
def test_phrases_of_a_batch(clip, prompt):
    model, tokenizer, _ = clip
    phrases = phrases_of(clip, SEGMENTS | {"a": (["cube", "ball"], ["is gone"])}, prompt=prompt)
    batch = [TEXTS[0], TEXTS[3], TEXTS[1], TEXTS[4], "a"]
    verbs = ["is missing", "has been moved", "has been added", "has been removed", "is gone"]
    for kind, words, fixed, equal in (
        ("nouns", [CUBE, CUBE, SPHERE, CUBE, "cube and ball"], rdd_acr.NOUN_PROMPT, 11),
        ("verbs", verbs, rdd_acr.VERB_PROMPT, 5),
    ):
        text, valid, same = phrases.read(kind, batch, None)
        assert valid.all() and same.sum() == equal
        prefix = fixed if prompt == "fixed" else ""
        expected = model.encode_text(tokenizer([prefix + w for w in words]))
        torch.testing.assert_close(text, expected)


def test_a_learned_prompt_precedes_each_phrase(clip):
    model, tokenizer, _ = clip
    phrases = phrases_of(clip)
    nouns = phrases.read("nouns", TEXTS[:2], prompt_of(model, "a"))
    verbs = phrases.read("verbs", TEXTS[:2], prompt_of(model, "it"))
    expected = model.encode_text(tokenizer([f"a {CUBE}", f"a {SPHERE}"]))
    torch.testing.assert_close(nouns.text, expected)
    expected = model.encode_text(tokenizer(["it is missing", "it has been added"]))
    torch.testing.assert_close(verbs.text, expected)


def test_equal_phrases_can_be_negatives(clip):
    phrases = phrases_of(clip, prompt="none", equal_phrases="negatives")
    same = phrases.read("nouns", TEXTS, None).same
    assert torch.equal(same, torch.eye(5, dtype=torch.bool))


@pytest.mark.parametrize("prompt", ["none", "fixed"])
def test_captions_without_a_segment(clip, prompt):
    none = {text: ([], []) for text in TEXTS} | {TEXTS[1]: ([SPHERE, "scene"], [])}
    phrases = phrases_of(clip, none, prompt=prompt)
    valid = phrases.read("nouns", TEXTS, None).valid
    assert valid.tolist() == [False, True, False, False, False]
    assert not phrases.read("verbs", TEXTS, None).valid.any()


def test_a_batch_of_two_kinds_of_pairs_is_one_batch(clip):
    """The total is Eq. 16, pairs of both batches serve as each other's negatives, and the prompts
    learn."""
    clip_model, _, _ = clip
    sizes = dict(clip_dim=8, clip_width=16, device="cpu")
    model = small(w_n2o=0.3, w_v2a=0.2, **sizes).float().eval()
    before, after = pictures().float()
    phrases = phrases_of(clip)
    changed = data.Batch(before[:2], after[:2], CAPTION[:2], [], TEXTS[:2])
    unchanged = data.Batch(before[2:], after[2:], CAPTION[[1, 3]], [], TEXTS[2:4])
    losses = rdd_acr.compute_losses(model, (changed, unchanged), model.cfg, phrases)
    caption = torch.cat([CAPTION[:2], CAPTION[[1, 3]]])
    parts = model(before, after, caption, *read_both(phrases, TEXTS[:4], model))
    assert all(loss.shape == () for loss in losses.values())
    expected = (parts["caption"] + 0.3 * parts["n2o"] + 0.2 * parts["v2a"]).item()
    assert losses["total"].item() == pytest.approx(expected, rel=1e-5)
    losses["total"].backward()
    for prompt in (model.noun_prompt, model.verb_prompt):
        assert prompt.grad.abs().sum(1).all()
    assert not torch.equal(model.noun_prompt.grad, model.verb_prompt.grad)
    assert all(p.grad is None for p in clip_model.parameters())


def test_phrases_are_read_outside_of_the_one_graph(clip):
    """However many phrases differ: else each step on a GPU would compile anew."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    model = small(clip_dim=8, clip_width=16).float()
    phrases = phrases_of(clip)
    before, after = pictures().float()
    expected = model.eval()(before, after, CAPTION, *read_both(phrases, TEXTS[:4], model))
    model.compile(fullgraph=True, dynamic=False, backend=backend)
    for texts in (TEXTS[:4], TEXTS[1:], [TEXTS[0], TEXTS[0], TEXTS[3], TEXTS[4]]):
        losses = model(before, after, CAPTION, *read_both(phrases, texts, model))
        if texts == TEXTS[:4]:
            torch.testing.assert_close(losses, expected)
    assert len(graphs) == 1
