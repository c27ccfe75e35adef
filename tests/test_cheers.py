"""CHEERS against its equations, and itself."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    CAPTION,
    WORDS,
    B,
    C,
    H,
    L,
    N,
    W,
    attention_by_heads,
    cosine,
    mean,
    pictures,
    random_clip,
)

import cheers
import data
from cheers import CHEERS, HRD, Config, ProbabilityMap, contrastive_loss, max_probability
from common import InputError
from support import report
from support.entities import embed_texts, find_candidates, subjects_of

D = 8  # width
K = 3  # entities of a pair
M = 7  # entities in all
CLIP_DIM = 5


def small(**fields) -> CHEERS:
    torch.manual_seed(0)
    cfg = Config(**{"dim": D, "word_dim": 6, "heads": 2, "clip_dim": CLIP_DIM} | fields)
    return CHEERS(cfg, WORDS, (C, H, W), L).double()


def entities(pairs: int = B):
    """CLIP's embeddings of the entities of each pair (B, K, d)."""
    torch.manual_seed(3)
    return torch.randn(pairs, K, CLIP_DIM).double()


# ---- retrieval -----------------------------------------------------------------------------------


@pytest.mark.parametrize("retrieval", ["absolute", "signed"])
def test_retrieval_against_loops(retrieval):
    torch.manual_seed(0)
    x_bef, x_aft = torch.randn(2, 6, CLIP_DIM, dtype=torch.float64)
    table = torch.randn(M, CLIP_DIM, dtype=torch.float64)
    for k in (1, 3, M):
        best = cheers.retrieve(x_bef, x_aft, table, k, retrieval)
        for b in range(6):
            s_bef = [cosine(x_bef[b], e) for e in table]
            s_aft = [cosine(x_aft[b], e) for e in table]
            difference = [p - q for p, q in zip(s_bef, s_aft, strict=True)]
            if retrieval == "absolute":
                difference = [abs(d) for d in difference]
            passing = [m for m in range(M) if s_bef[m] > mean(s_bef) or s_aft[m] > mean(s_aft)]
            rest = [m for m in range(M) if m not in passing]
            assert rest or b, "the constraint must matter somewhere"
            passing.sort(key=lambda m: -difference[m])
            rest.sort(key=lambda m: -difference[m])
            assert best[b].tolist() == [*passing, *rest][:k]


# ---- enhancement ---------------------------------------------------------------------------------


def naive_max_probability(source, target, scale):
    """Eq. 2 and the maximum in Eq. 3, for one pair: source (S, D), target (N, D) -> N numbers."""
    largest = [0.0] * len(target)
    for j in range(len(source)):
        exps = [math.exp(scale * cosine(x, source[j])) for x in target]
        for i, exp in enumerate(exps):
            largest[i] = max(largest[i], exp / sum(exps))
    return largest


@pytest.mark.parametrize("temperature", ["learned", "one"])
@pytest.mark.parametrize("kind", ["CRE", "DRE"])
@pytest.mark.parametrize("sources", [K, N])
def test_probability_maps_against_loops(temperature, kind, sources):
    torch.manual_seed(0)
    module = ProbabilityMap(Config(dim=D, temperature=temperature), kind).double()
    source = torch.randn(B, sources, D).double()
    target = torch.randn(B, N, D).double()
    p = module(source, target)
    scale = 1.0 if temperature == "one" else module.log_scale.exp().item()
    weight = module.expand.weight[:, 0]
    bias = module.expand.bias
    for b in range(B):
        for i, m in enumerate(naive_max_probability(source[b], target[b], scale)):
            expected = weight * ((1 - m) if kind == "DRE" else m) + bias
            torch.testing.assert_close(p[b, i], expected)


def test_the_worked_example_of_the_maximum_probability():
    target = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    log_3 = math.log(3)
    one = max_probability(target[:, :1], target, log_3)
    two = max_probability(target, target, log_3)
    torch.testing.assert_close(one, torch.tensor([[0.75, 0.25]]))
    torch.testing.assert_close(two, torch.tensor([[0.75, 0.75]]))


def test_the_learned_scales_start_as_clips_and_stay_below_100():
    model = small()
    scale = model.hrd[-1].dre.log_scale
    assert scale.exp().item() == pytest.approx(1 / 0.07)
    scale.data.fill_(9.0)
    model.clamp_scales()
    assert scale.exp().item() == pytest.approx(100)


@pytest.mark.parametrize("last", [True, False])
def test_each_map_of_hrd_is_the_papers(last):
    """The test below takes the maps as they are."""
    layer = HRD(Config(dim=D, heads=2), last)
    maps = [layer.cre, layer.entity_dre, layer.dre, layer.entity_cre]
    assert [part.kind for part in maps] == ["CRE", "DRE", "DRE", "CRE"]


def square(a, b):
    """Eq. 7 and 11: the mean squared difference of two maps."""
    return mean([d**2 for d in (a - b).flatten().tolist()])


def enhance(p, x):
    """Eq. 4 in a loop over cells, with the LayerNorm's initial weights."""
    enhanced = torch.empty_like(x)
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            y = x[b, i] / (1 + torch.exp(-p[b, i])) + x[b, i]
            enhanced[b, i] = (y - y.mean()) / (((y - y.mean()) ** 2).mean() + 1e-5).sqrt()
    return enhanced


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cre": False},
        {"dre": False},
        {"layers": 1},
        {"layers": 3},
        {"w_consistency": 0.0},
    ],
)
def test_encoder_and_losses_against_equations(fields):
    model = small(**fields).eval()
    before, after = pictures()
    f = {"bef": model.embed(before), "aft": model.embed(after)}
    e = model.project(entities())
    x = dict(f)
    other = {"bef": "aft", "aft": "bef"}
    l_c = []
    l_d = []
    l_i = []
    for layer in model.hrd:
        c = dict(x)
        if model.cfg.cre:
            own = {i: layer.cre(x[other[i]], x[i]) for i in x}  # Eq. 6
            c = {i: enhance(own[i], x[i]) for i in x}
            if model.cfg.w_consistency:
                maps = {i: layer.entity_dre(e, x[i]) for i in x}
                l_c.append(mean([square(own[i], maps[i]) for i in x]))  # Eq. 7
        shared = {i: attention_by_heads(layer.attention, c[i], c[other[i]]) for i in x}  # Eq. 8
        l_i.append(contrastive_loss(shared["bef"], shared["aft"], model.log_scale.exp()))
        last = layer is model.hrd[-1]
        if not last:
            x = {i: layer.norm(x[i] + shared[i]) for i in x}
        rest = {i: f[i] - shared[i] for i in x}
        d = dict(rest)  # the last layer's counts
        if model.cfg.dre and (last or model.cfg.w_consistency):
            own = {i: layer.dre(f[i], rest[i]) for i in x}  # Eq. 10
            d = {i: enhance(own[i], rest[i]) for i in x}
            if model.cfg.w_consistency:
                maps = {i: layer.entity_cre(e, rest[i]) for i in x}
                l_d.append(mean([square(own[i], maps[i]) for i in x]))  # Eq. 11
    both = torch.cat([d["bef"], d["aft"]], -1)
    f_diff = F.linear(both, model.join.weight, model.join.bias)  # Eq. 12
    found, e_found, _ = model.encode(before, after, entities())
    torch.testing.assert_close((found, e_found), (f_diff, e))
    losses = model(before, after, CAPTION, entities())
    layers = len(model.hrd)
    assert layers == model.cfg.layers
    expected = {"match": mean(l_i).item()}
    if l_c:
        expected["common"] = mean(l_c)
    if l_d:
        expected["different"] = mean(l_d)
    del losses["caption"]
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(expected)


def best_matches(x, y):
    """The mean over the cells of x of each one's largest cosine with a cell of y."""
    return mean([max(cosine(cell, other) for other in y) for cell in x])


def test_contrastive_loss_against_loops():
    """Eq. 9 from each image to its partner, with the cells of both."""
    torch.manual_seed(0)
    bef, aft = torch.randn(2, B, N, D).double()
    sim = torch.zeros(B, B)
    for a in range(B):
        for b in range(B):
            sim[a, b] = 2.5 * (best_matches(bef[a], aft[b]) + best_matches(aft[b], bef[a])) / 2
    losses = []
    for a in range(B):
        losses.append(-math.log(math.exp(sim[a, a]) / sum(math.exp(s) for s in sim[a])))
        losses.append(-math.log(math.exp(sim[a, a]) / sum(math.exp(s) for s in sim[:, a])))
    assert contrastive_loss(bef, aft, torch.tensor(2.5)).item() == pytest.approx(mean(losses))


def test_the_worked_example_of_the_contrastive_loss():
    c_bef = torch.tensor([[[2.0, 0.0]], [[0.0, 3.0]]])
    c_aft = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    loss = contrastive_loss(c_bef, c_aft, torch.tensor(math.log(3)))
    assert loss.item() == pytest.approx(-math.log(3 / 4))
    assert loss.item() == pytest.approx(0.288, abs=5e-4)


# ---- decoder -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["channels", "scalar", "none"])
def test_decoder_layer_against_equations(gate):
    layer = small(gate=gate).decoder.layers[0].eval()
    torch.manual_seed(2)
    x = torch.randn(B, L, D).double()
    f_diff = torch.randn(B, N, D).double()
    e = torch.randn(B, K, D).double()
    out, attending = layer(x, f_diff, e)
    h = []
    for t in range(L):  # Eq. 13: every word sees itself and earlier ones
        words = attention_by_heads(layer.self_attention, x[:, t : t + 1], x[:, : t + 1])[:, 0]
        h.append(layer.norm1(x[:, t] + words))
    h = torch.stack(h, 1)
    torch.testing.assert_close(attending, h)
    fused = h_v = attention_by_heads(layer.cross_attention, h, f_diff)
    if gate != "none":
        h_t = attention_by_heads(layer.text_attention, h, e)
        alpha = layer.alpha(torch.cat([h, h_t], -1))  # Eq. 14
        beta = layer.beta(torch.cat([h, h_v], -1))  # Eq. 15
        assert alpha.shape == beta.shape == (B, L, D if gate == "channels" else 1)
        fused = alpha * h_t + beta * h_v  # Eq. 16
    torch.testing.assert_close(out, layer.norm2(fused + h))  # Eq. 17


# ---- half precision ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_captions(kind):
    model = small().to(kind).eval()
    before, after = pictures().to(kind)
    e = entities().to(kind)
    ids = model.generate(before, after, e)
    assert ids.shape == (B, L)
    assert model.attention_map(before, after, ids, e)["attention"].isfinite().all()


# ---- CLIP ----------------------------------------------------------------------------------------

TEXTS = ["cube", "small red cube and large ball", "gone"]


def test_texts_are_embedded_in_blocks():
    clip, tokenizer = random_clip()
    for texts in (TEXTS, TEXTS * 100):
        expected = clip.encode_text(tokenizer(texts), normalize=True)
        torch.testing.assert_close(embed_texts(clip, tokenizer, texts), expected)


# ---- entities from lists -------------------------------------------------------------------------

SUBJECTS = {
    "the cube and the ball are gone": ["cube", "ball"],
    "the cube is gone": ["cube"],
    "the red cube moved": ["red cube"],
    "the ball moved": ["ball", "ball"],
    "the van left": ["van"],
    "nothing has changed": [],
}


def test_candidates_are_what_enough_captions_name():
    everything = ["ball", "cube", "red cube", "van"]
    assert find_candidates(SUBJECTS, 1, 3) == everything
    assert find_candidates(SUBJECTS, 2, 2) == ["ball", "cube"]
    assert find_candidates(SUBJECTS, 2, 3) == everything  # fewer than k would remain
    # "ball" twice in one caption counts once.
    assert find_candidates(SUBJECTS, 3, 1) == everything


def test_only_training_captions_name_candidates(prepared):
    dataset = data.load("clevr_change", prepared)
    dataset.pairs("train")[0].captions[:] = ["the purple ball is gone"]
    dataset.pairs("val")[0].captions[:] = ["the green ball is gone"]
    candidates = find_candidates(subjects_of(dataset), 1, 3)
    assert [phrase for phrase in candidates if "ball" in phrase] == ["purple ball"]


PHRASES = ["ball", "cube", "red cube", "van"]
PAIRS = [("a", "b"), ("c", "b"), ("b", "a"), ("a", "b")]


@pytest.mark.parametrize("retrieval", ["absolute", "signed"])
def test_entities_of_pairs(retrieval):
    torch.manual_seed(0)
    table = torch.randn(len(PHRASES), CLIP_DIM)
    images = dict(zip("abc", torch.randn(3, CLIP_DIM), strict=True))
    cfg = Config(device="cpu", k=2, retrieval=retrieval)
    source = cheers.find_entities(cfg, PHRASES, table, images, PAIRS)
    for (before, after), embeddings in zip(PAIRS, source(PAIRS), strict=True):
        x_bef = images[before][None]
        x_aft = images[after][None]
        (rows,) = cheers.retrieve(x_bef, x_aft, table, 2, retrieval)
        assert torch.equal(embeddings, table[rows])
        names = [PHRASES[m] for m in rows]
        assert source.note((before, after)) == "entities: " + ", ".join(names)
    source.check_state({"entities": {"phrases": PHRASES, "table": table}})
    # A checkpoint of another CLIP or of other candidates would be silently wrong.
    for phrases, trained in ((PHRASES, table.flip(0)), (PHRASES[::-1], table)):
        with pytest.raises(InputError):
            source.check_state({"entities": {"phrases": phrases, "table": trained}})


def test_embeddings_are_kept_until_features_are_made_again(prepared, monkeypatch):
    """Pictures may have been replaced before that."""
    clip, tokenizer = random_clip()

    def preprocess(image):
        return torch.from_numpy(np.array(image.resize((32, 32)))).permute(2, 0, 1) / 255

    monkeypatch.setattr("support.entities.load_clip", lambda *_: (clip, tokenizer, preprocess))
    cfg = Config(device="cpu", k=2, clip_dim=8)
    dataset = data.load("clevr_change", prepared)
    cheers.entities_of(dataset, cfg)
    (file,) = prepared.glob("clip-*.pt")
    time = file.stat().st_mtime_ns
    cheers.entities_of(dataset, cfg)
    assert file.stat().st_mtime_ns == time  # it was read
    name, (size, _, checksum) = next(iter(dataset.features.stamps.items()))
    dataset.features.stamps[name] = [size, 0, checksum + 1]
    cheers.entities_of(dataset, cfg)
    assert len(list(prepared.glob("clip-*.pt"))) == 2


def test_a_checkpoint_brings_its_candidates(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "one_caption", lambda *_: "nothing")  # choosing it takes long
    mini = tmp_path / "mini"
    best = tmp_path / "run" / "best.pt"
    data.main(["mini", "--data_dir", str(mini), "--scenes", "20", "--device", "cpu"])
    flags = "--batch_size 4 --dim 16 --steps 1 --device cpu".split()
    cheers.main([*flags, "--data_dir", str(mini), "--out_dir", str(best.parent)])
    # To another data set:
    other = tmp_path / "other.pt"
    state = torch.load(best, weights_only=True)
    few = {name: value[:3] for name, value in state["entities"].items()}
    torch.save(state | {"entities": few}, other)
    cheers.main(["--eval", str(other), "--device", "cpu"])
    flipped = {"phrases": few["phrases"], "table": few["table"].flip(0)}
    torch.save(state | {"entities": flipped}, other)
    with pytest.raises(InputError, match="--clip"):
        cheers.main(["--eval", str(other), "--device", "cpu"])

    # To any two pictures, which get the entities that they have in their data set:
    dataset = data.load("mini", mini)
    source = cheers.entities_of(dataset, Config(clip="mini", clip_dim=128, device="cpu"))
    pair = dataset.pairs("test")[0]
    files = [str(dataset.paths[name]) for name in (pair.before, pair.after)]
    capsys.readouterr()
    cheers.main(["--caption", *files, "--checkpoint", str(best), "--device", "cpu"])
    line = capsys.readouterr().out.splitlines()[0]
    assert line.split(": ")[1] == source.note((pair.before, pair.after)).split(": ")[1]
