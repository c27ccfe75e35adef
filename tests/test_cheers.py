"""CHEERS against its equations, and itself."""

import json
import math
import os

import pytest
import torch
from conftest import (
    CAPTION,
    WORDS,
    B,
    C,
    H,
    N,
    V,
    W,
    attention_by_heads,
    cosine,
    mean,
    pictures,
    preprocess,
    random_clip,
    train_lines,
)
from PIL import Image

import cheers
import common
import data
from cheers import (
    CHEERS,
    CRE,
    DRE,
    Config,
    contrastive_loss,
    embed_images,
    embed_texts,
    find_candidates,
    retrieve,
)

D = 8  # width
K = 3  # entities of a pair
M = 7  # entities in all
CLIP_DIM = 5
INDICES = torch.tensor([[0, 3, 6], [1, 2, 4], [5, 0, 2], [3, 4, 1]])


def small(**fields) -> CHEERS:
    torch.manual_seed(0)
    cfg = Config(**{"dim": D, "word_dim": 6, "heads": 2} | fields)
    table = torch.randn(M, CLIP_DIM) if cfg.k else None
    return CHEERS(cfg, WORDS, (C, H, W), V, table).double()


# ---- retrieval -----------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True])
def test_retrieval_against_loops(signed):
    torch.manual_seed(0)
    x_bef, x_aft = torch.randn(2, 6, CLIP_DIM, dtype=torch.float64)
    table = torch.randn(M, CLIP_DIM, dtype=torch.float64)
    for k in (1, 3, M):
        best = retrieve(x_bef, x_aft, table, k, signed)
        for b in range(6):
            s_bef = [cosine(x_bef[b], e) for e in table]
            s_aft = [cosine(x_aft[b], e) for e in table]
            difference = [p - q for p, q in zip(s_bef, s_aft, strict=True)]
            if not signed:
                difference = [abs(d) for d in difference]
            passing = [m for m in range(M) if s_bef[m] > mean(s_bef) or s_aft[m] > mean(s_aft)]
            rest = [m for m in range(M) if m not in passing]
            assert rest or b, "the constraint must matter somewhere"
            passing.sort(key=lambda m: -difference[m])
            rest.sort(key=lambda m: -difference[m])
            assert best[b].tolist() == [*passing, *rest][:k]


def test_ties_go_to_the_lower_index():
    entities = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    x_bef = torch.tensor([[1.0, 0.0]])
    x_aft = torch.tensor([[1.0, 1.0]])
    assert retrieve(x_bef, x_aft, entities, 3).tolist() == [[1, 2, 3]]
    same = torch.ones(1, 2)
    none_passes = retrieve(same, same, torch.ones(50, 2), 60)  # k larger than M
    assert none_passes[0].tolist() == list(range(50))


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
@pytest.mark.parametrize("Enhance", [CRE, DRE])
@pytest.mark.parametrize("sources", [1, K, N])
def test_cre_and_dre_against_loops(temperature, Enhance, sources):
    torch.manual_seed(0)
    module = Enhance(Config(dim=D, temperature=temperature)).double()
    source = torch.randn(B, sources, D).double()
    target = torch.randn(B, N, D).double()
    enhanced, p = module(source, target)
    scale = 1.0 if temperature == "one" else module.log_scale.exp().item()
    weight = module.expand.weight[:, 0]
    bias = module.expand.bias
    for b in range(B):
        for i, m in enumerate(naive_max_probability(source[b], target[b], scale)):
            own = weight * ((1 - m) if Enhance is DRE else m) + bias
            torch.testing.assert_close(p[b, i], own)
            x = target[b, i] / (1 + torch.exp(-own)) + target[b, i]
            x = (x - x.mean()) / (((x - x.mean()) ** 2).mean() + 1e-5).sqrt()
            torch.testing.assert_close(enhanced[b, i], x)


def square(a, b):
    """Eq. 7 and 11: the mean squared difference of two maps."""
    return mean([d**2 for d in (a - b).flatten().tolist()])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cre": False},
        {"dre": False},
        {"layers": 1},
        {"w_consistency": 0.0},
        {"layer_input": "attended"},
    ],
)
def test_encoder_and_losses_against_equations(fields):
    model = small(**fields).eval()
    before, after = pictures()
    f = {"bef": model.embed(before), "aft": model.embed(after)}
    e = model.project(model.table[INDICES])
    x = dict(f)
    other = {"bef": "aft", "aft": "bef"}
    l_c = [0]
    l_d = [0]
    l_i = []
    for layer in model.hrd:
        c = dict(x)
        if model.cfg.cre:
            enhanced = {i: layer.cre(x[other[i]], x[i]) for i in x}  # Eq. 6
            c = {i: enhanced[i][0] for i in x}
            if model.cfg.w_consistency:
                maps = {i: layer.entity_dre(e, x[i])[1] for i in x}
                l_c.append(mean([square(enhanced[i][1], maps[i]) for i in x]))  # Eq. 7
        shared = {i: attention_by_heads(layer.attention, c[i], c[other[i]]) for i in x}  # Eq. 8
        l_i.append(contrastive_loss(shared["bef"], shared["aft"], model.log_scale.exp()))
        x = {i: layer.norm(x[i] + shared[i]) if layer.norm else shared[i] for i in x}
        d = {i: f[i] - shared[i] for i in x}
        if layer.dre:
            enhanced = {i: layer.dre(f[i], d[i]) for i in x}  # Eq. 10
            if model.cfg.w_consistency:
                maps = {i: layer.entity_cre(e, d[i])[1] for i in x}
                l_d.append(mean([square(enhanced[i][1], maps[i]) for i in x]))  # Eq. 11
            d = {i: enhanced[i][0] for i in x}
    f_diff = model.join(torch.cat([d["bef"], d["aft"]], -1))  # Eq. 12
    context, _ = model.encode(before, after, INDICES)
    torch.testing.assert_close(context, (f_diff, e))
    losses = model(before, after, CAPTION, INDICES)
    layers = len(model.hrd)
    residual = model.cfg.layer_input == "residual"
    assert [bool(layer.norm) for layer in model.hrd] == [residual] * (layers - 1) + [False]
    assert layers == model.cfg.layers and set(losses) == {"caption", "common", "different", "match"}
    assert len(l_c) == 1 + layers * (model.cfg.cre and model.cfg.w_consistency > 0)
    assert len(l_d) == 1 + layers * (model.cfg.dre and model.cfg.w_consistency > 0)
    expected = {"common": sum(l_c) / layers, "different": sum(l_d) / layers}
    expected["match"] = mean(l_i).item()
    assert {name: losses[name].item() for name in expected} == pytest.approx(expected)


def deviation(x):
    """x (2B, N, D) minus its mean over the cells of each image."""
    return x - x.mean(1, keepdim=True)


def test_maps_survive_bfloat16():
    """P^ varies over cells by less than bfloat16 can resolve. At the paper's size, its deviations
    must still equal those of float64."""
    torch.manual_seed(0)
    maps = []
    model = CHEERS(Config(), WORDS, (32, 14, 14), V, torch.randn(M, CLIP_DIM)).eval()
    for module in model.modules():
        if isinstance(module, CRE):
            module.register_forward_hook(lambda _module, _args, out: maps.append(out[1].double()))
    before, after = torch.randn(2, 2, 32, 14, 14)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.encode(before, after, INDICES[:2])
    with torch.no_grad():
        model.double().encode(before.double(), after.double(), INDICES[:2])
    rough = [deviation(p) for p in maps[:8]]  # four maps a layer
    exact = [deviation(p) for p in maps[8:]]
    errors = [((p - q).norm() / q.norm()).item() for p, q in zip(rough, exact, strict=True)]
    assert max(errors) < 0.01, errors


def test_the_next_layer_reads_cells_that_differ():
    """If layers passed on C~ alone ("attended"), the next layer's C~ would, at the paper's size, be
    the same in all cells."""
    spread = {}
    for layer_input in ("residual", "attended"):
        torch.manual_seed(0)
        cfg = Config(layer_input=layer_input)
        model = CHEERS(cfg, WORDS, (32, 14, 14), V, torch.randn(M, CLIP_DIM)).eval()
        _, layers = model.encode(*torch.randn(2, 2, 32, 14, 14), INDICES[:2])
        ratios = [deviation(shared).norm() / shared.norm() for shared, _, _ in layers]
        spread[layer_input] = [ratio.item() for ratio in ratios]
    assert spread["residual"][0] == spread["attended"][0] > 0.1
    assert spread["residual"][1] > 0.1 and spread["attended"][1] < 0.002, spread


def test_contrastive_loss_against_loops():
    torch.manual_seed(0)
    a, b = torch.randn(2, B, N, D).double()

    def sim(x, y):
        best_of_x = []
        best_of_y = []
        for p in x:
            best_of_x.append(max(cosine(p, q) for q in y))
        for q in y:
            best_of_y.append(max(cosine(p, q) for p in x))
        return (mean(best_of_x) + mean(best_of_y)) / 2

    total = 0.0
    for i in range(B):
        for ours, others in ((a, b), (b, a)):
            rows = [math.exp(2.5 * sim(ours[i], others[j])) for j in range(B)]
            total -= math.log(rows[i] / sum(rows)) / 2
    assert contrastive_loss(a, b, torch.tensor(2.5)).item() == pytest.approx(total / B)


# ---- decoder -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["channels", "scalar", "none"])
def test_decoder_layer_against_equations(gate):
    layer = small(gate=gate).decoder.layers[0].eval()
    torch.manual_seed(2)
    x = torch.randn(B, V, D).double()
    f_diff = torch.randn(B, N, D).double()
    e = torch.randn(B, K, D).double()
    differences = (layer.cross_attention.key(f_diff), layer.cross_attention.value(f_diff))
    entities = None
    if gate != "none":
        entities = (layer.text_attention.key(e), layer.text_attention.value(e))
    out, _, query = layer(x, differences, entities)
    h = []
    for t in range(V):  # Eq. 13: every word sees itself and earlier ones
        words = attention_by_heads(layer.self_attention, x[:, t : t + 1], x[:, : t + 1])[:, 0]
        h.append(layer.norm1(x[:, t] + words))
    h = torch.stack(h, 1)
    torch.testing.assert_close(query, layer.cross_attention.query(h))
    fused = h_v = attention_by_heads(layer.cross_attention, h, f_diff)
    if gate != "none":
        h_t = attention_by_heads(layer.text_attention, h, e)
        alpha = layer.alpha(torch.cat([h, h_t], -1))  # Eq. 14
        beta = layer.beta(torch.cat([h, h_v], -1))  # Eq. 15
        assert alpha.shape == beta.shape == (B, V, D if gate == "channels" else 1)
        fused = alpha * h_t + beta * h_v  # Eq. 16
    torch.testing.assert_close(out, layer.norm2(fused + h))  # Eq. 17


def test_what_does_not_go_together_is_refused():
    for fields, message in (
        ({"layers": 0}, "--w_match 0"),
        ({"layers": 0, "w_match": 0.0}, "--w_consistency 0"),
        ({"cre": False, "dre": False}, "--w_consistency 0"),
        ({"k": 0}, "--gate none"),
        ({"k": 0, "gate": "none"}, "--w_consistency 0"),
    ):
        with pytest.raises(ValueError, match=message):
            small(**fields)


def test_a_model_asks_for_the_entities_that_it_needs():
    before, after = pictures()
    with pytest.raises(ValueError, match="table="):
        CHEERS(Config(dim=D, heads=2), WORDS, (C, H, W), V)
    with pytest.raises(ValueError, match="entities=, indices"):
        small()(before, after, CAPTION)
    with pytest.raises(ValueError, match="entities=, indices"):
        small().generate(before, after)


# ---- CLIP ----------------------------------------------------------------------------------------

TEXTS = ["cube", "small red cube and large ball", "gone"]


@pytest.mark.parametrize("proj_bias", [False, True])
def test_cropped_texts_are_embedded_as_clip_does(proj_bias):
    clip, tokenizer = random_clip(proj_bias=proj_bias)
    for texts in (TEXTS, TEXTS[:1], TEXTS * 100):
        expected = clip.encode_text(tokenizer(texts), normalize=True)
        torch.testing.assert_close(embed_texts(clip, tokenizer, texts), expected, atol=1e-6, rtol=0)
    long = "one two three four five six seven eight nine ten eleven"  # is cut
    expected = clip.encode_text(tokenizer([long]), normalize=True)
    torch.testing.assert_close(embed_texts(clip, tokenizer, [long]), expected, atol=1e-6, rtol=0)


def noise(count: int) -> dict[str, Image.Image]:
    random = torch.Generator().manual_seed(0)
    images = {}
    for i in range(count):
        pixels = torch.randint(256, (20, 30, 3), generator=random, dtype=torch.uint8)
        images[f"{i:03d}"] = Image.fromarray(pixels.numpy())
    return images


def test_files_and_pil_images_are_embedded_alike(tmp_path):
    clip, _ = random_clip()
    images = noise(70)  # more than a block
    images["gray"] = images["000"].convert("L")
    names = list(images)
    embedded = embed_images(clip, preprocess, images, names)
    x = torch.stack([preprocess(image.convert("RGB")) for image in images.values()])
    expected = clip.encode_image(x, normalize=True)
    torch.testing.assert_close(embedded, expected)
    files = {}
    for name, image in images.items():
        files[name] = tmp_path / f"{name}.png"
        image.save(files[name])
    torch.testing.assert_close(embed_images(clip, preprocess, files, names), expected)


def test_alpha_lies_on_white_and_wide_pixels_are_refused(tmp_path):
    """When the file is copied without data.py."""
    clip, _ = random_clip()
    erased = Image.new("RGBA", (30, 20), (9, 9, 9, 0))
    erased.save(tmp_path / "a.png")
    pictures = {"file": tmp_path / "a.png", "picture": erased, "white": Image.new("L", (9, 9), 255)}
    x = embed_images(clip, preprocess, pictures, ["file", "picture", "white"])
    torch.testing.assert_close(x[:2], x[2:].expand(2, -1))
    Image.new("RGBA", (30, 20), (9, 99, 199, 50)).save(tmp_path / "c.tif")  # with near infrared
    Image.new("RGB", (30, 20), (9, 99, 199)).save(tmp_path / "c.png")
    same = embed_images(clip, preprocess, [tmp_path / "c.tif", tmp_path / "c.png"], [0, 1])
    torch.testing.assert_close(same[0], same[1])
    Image.new("I", (30, 20)).save(tmp_path / "b.tif")
    with pytest.raises(common.InputError, match="b.tif"):
        embed_images(clip, preprocess, [tmp_path / "b.tif"], [0])


# ---- entities from lists -------------------------------------------------------------------------

SUBJECTS = {
    "the cube and the ball are gone": ["cube", "ball"],
    "the cube is gone": ["cube"],
    "the red cube moved": ["red cube"],
    "the ball moved": ["ball", "ball"],
    "the van left": ["van"],
    "nothing has changed": [],
}
PAIRS = [("000", "001"), ("002", "001"), ("001", "000"), ("000", "001")]


def test_candidates_are_what_enough_captions_name():
    everything = ["ball", "cube", "red cube", "van"]
    assert find_candidates(SUBJECTS, 1, 3) == everything
    assert find_candidates(SUBJECTS, 2, 2) == ["ball", "cube"]
    assert find_candidates(SUBJECTS, 2, 3) == everything  # fewer than k would remain
    assert find_candidates(SUBJECTS, 3, 1) == everything  # "ball" twice in one caption counts once
    assert find_candidates({"nothing has changed": []}, 1, 1) == []


def entities_from_lists(clip=None, tokenizer=None, file=None, **fields) -> cheers.Entities:
    if clip is None:
        clip, tokenizer = random_clip()
    cfg = Config(**{"device": "cpu", "k": 2, "min_count": 1} | fields)
    return cheers.Entities(cfg, clip, tokenizer, preprocess, SUBJECTS, noise(3), PAIRS, file)


@pytest.mark.parametrize("retrieval", ["absolute", "signed"])
def test_entities_of_pairs(retrieval):
    clip, tokenizer = random_clip()
    entities = entities_from_lists(clip, tokenizer, retrieval=retrieval)
    assert entities.phrases == ["ball", "cube", "red cube", "van"]
    table = clip.encode_text(tokenizer(entities.phrases), normalize=True)
    torch.testing.assert_close(entities.table, table, atol=1e-6, rtol=0)
    assert list(entities.indices) == [("000", "001"), ("002", "001"), ("001", "000")]
    found = entities(PAIRS)
    assert found.shape == (4, 2)
    for (before, after), rows in zip(PAIRS, found, strict=True):
        x = torch.stack([preprocess(noise(3)[name]) for name in (before, after)])
        x_bef, x_aft = clip.encode_image(x, normalize=True).split(1)
        expected = retrieve(x_bef, x_aft, entities.table, 2, retrieval == "signed")
        assert torch.equal(rows, expected[0])


def test_notes_name_the_entities():
    entities = entities_from_lists()
    notes = entities.notes(torch.tensor([[0, 1], [3, 3]]))
    assert notes == [["entities: ball, cube"], ["entities: van, van"]]


def test_a_checkpoint_of_other_entities_is_refused():
    entities = entities_from_lists()
    state = entities.state() | {"model": {"table": entities.table}}
    entities.check_state(state)
    for table in (entities.table.flip(0), entities.table[:, :3]):
        with pytest.raises(ValueError, match="another CLIP"):
            entities.check_state(state | {"model": {"table": table}})
    state["entities"]["phrases"] = ["wombat"]
    with pytest.raises(ValueError, match="1 candidate entities, not with these 4.*--data_dir"):
        entities.check_state(state)


def test_embeddings_of_pictures_are_kept(tmp_path, monkeypatch):
    file = tmp_path / "embeddings.pt"
    clip, tokenizer = random_clip()
    encoded = []

    def count(x, normalize, original=clip.encode_image):
        encoded.append(len(x))
        return original(x, normalize=normalize)

    monkeypatch.setattr(clip, "encode_image", count)
    first = entities_from_lists(clip, tokenizer, file)
    assert encoded == [3]
    second = entities_from_lists(clip, tokenizer, file)
    assert encoded == [3, 1]  # the first picture again, to check that the CLIP is the same
    fewer = entities_from_lists(clip, tokenizer, file, min_count=2)
    assert fewer.phrases == ["ball", "cube"] and encoded == [3, 1, 1]
    for pair, rows in first.indices.items():
        assert torch.equal(rows, second.indices[pair])

    for p in clip.visual.parameters():  # another CLIP
        torch.nn.init.normal_(p, std=0.1)
    encoded.clear()
    other = entities_from_lists(clip, tokenizer, file)
    assert encoded == [1, 3]
    assert any(not torch.equal(rows, first.indices[pair]) for pair, rows in other.indices.items())
    torch.save({"key": {}, "texts": None, "images": torch.zeros(3, 8)}, file)  # an older version's
    encoded.clear()
    entities_from_lists(clip, tokenizer, file)
    assert encoded == [3]
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="embeddings.pt cannot be used.*remove it"):
        entities_from_lists(clip, tokenizer, file)


# ---- entities of a data set ----------------------------------------------------------------------


@pytest.fixture
def corpus(prepared, monkeypatch):
    """A small data set, and a CLIP with random weights in place of its own."""
    clip, tokenizer = random_clip()
    monkeypatch.setattr(data, "load_clip", lambda *_: (clip, tokenizer, preprocess))
    return data.load("clevr_change", prepared)


def test_entities_of_a_data_set(corpus, monkeypatch):
    def read_captions(read, name, captions):
        assert read is data.subjects and name == "clevr_change"
        return {caption: [" ".join(caption.split()[1:3])] for caption in captions}

    monkeypatch.setattr(data, "read_captions", read_captions)
    dataset = corpus
    entities = cheers.entities_of(dataset, Config(min_count=1, device="cpu"))
    assert (dataset.root / "embeddings.pt").exists()
    assert entities.phrases == sorted(set(entities.phrases)) and "red cube" in entities.phrases
    pairs = set()
    for scenes in dataset.scenes.values():
        for scene in scenes:
            pairs |= {(p.before, p.after) for p in (*scene.pairs, *scene.swapped)}
    assert set(entities.indices) == pairs


def test_embeddings_older_than_features_are_made_again(corpus, monkeypatch):
    """This happens if pictures were replaced and features.h5 was made again."""

    def read_captions(read, name, captions):
        return {caption: [caption.split()[1]] for caption in captions}

    monkeypatch.setattr(data, "read_captions", read_captions)
    dataset = corpus
    cfg = Config(min_count=1, device="cpu")
    cheers.entities_of(dataset, cfg)
    file = dataset.root / "embeddings.pt"
    first = torch.load(file)
    last = first["names"][-1]
    Image.new("RGB", (16, 12), "red").save(dataset.paths[last])
    cheers.entities_of(dataset, cfg)
    assert torch.equal(torch.load(file)["images"], first["images"])  # not checked
    later = file.stat().st_mtime + 1
    os.utime(dataset.features.path, (later, later))
    cheers.entities_of(dataset, cfg)
    images = torch.load(file)["images"]
    assert not torch.equal(images[-1], first["images"][-1])
    torch.testing.assert_close(images[:-1], first["images"][:-1])


def test_without_entities_a_config_needs_no_clip(corpus, monkeypatch):
    monkeypatch.setattr(data, "load_clip", lambda *_: pytest.fail("CLIP was loaded"))
    monkeypatch.setattr(data, "read_captions", lambda *_: pytest.fail("captions were read"))
    assert cheers.entities_of(corpus, Config(k=0)) is None


def test_resume_and_caption_with_entities(tmp_path, capsys, monkeypatch):
    """As in test_methods.py, but with entities."""
    mini = tmp_path / "mini"
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    flags = "--scenes 60 --dim 16 --dropout 0.1 --schedule step --device cpu".split()
    flags += ["--log_every", "2", "--eval_every", "6", "--data_dir", str(mini)]
    cheers.main([*flags, "--steps", "6", "--out_dir", str(whole)])
    cheers.main([*flags, "--steps", "3", "--out_dir", str(parts)])
    cheers.main(["--resume", "--steps", "6", "--out_dir", str(parts), "--device", "cpu"])
    a = torch.load(whole / "last.pt", weights_only=True)["model"]
    b = torch.load(parts / "last.pt", weights_only=True)["model"]
    assert all(torch.equal(a[k], b[k]) for k in a) and "table" in a
    rows = train_lines(whole)
    terms = ("common", "different", "match")
    assert rows and all(math.isfinite(row[name]) for row in rows for name in terms)
    assert "accuracy" in json.loads((whole / "scores_test.json").read_text())

    # --eval checks the data before CLIP embeds anything.
    other = tmp_path / "other.pt"
    state = torch.load(whole / "best.pt", weights_only=True)
    torch.save(state | {"vocab": [*state["vocab"][:-1], "zebra"]}, other)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="--data_dir"):
        patch.setattr(cheers, "entities_of", lambda *_: pytest.fail("entities were asked for"))
        cheers.main(["--eval", str(other), "--device", "cpu"])

    # A checkpoint captions pictures without its data set.
    checkpoint = tmp_path / "alone.pt"
    dataset = data.load("mini", mini)
    entities = cheers.entities_of(dataset, Config(clip="mini", device="cpu"))
    (whole / "best.pt").rename(checkpoint)
    capsys.readouterr()
    pair = dataset.pairs("test")[0]
    files = [dataset.paths[name].rename(tmp_path / name) for name in (pair.before, pair.after)]
    mini.rename(tmp_path / "elsewhere")
    files = [str(file) for file in files]
    cheers.main(["--caption", *files, "--checkpoint", str(checkpoint), "--device", "cpu"])
    printed, caption = capsys.readouterr().out.splitlines()
    assert [[printed]] == entities.notes(entities([(pair.before, pair.after)]))
    assert set(caption.split()) <= set(dataset.vocab.words)

    # The checkpoint's CLIP may be a file that has moved; another CLIP is refused.
    asked = []

    def load_clip(name, device, original=data.load_clip):
        asked.append(name)
        clip, *rest = original("mini", device)
        if name == "other":
            clip.text_projection.data.neg_()
        return clip, *rest

    monkeypatch.setattr(data, "load_clip", load_clip)
    assert cheers.load(checkpoint, "cpu", clip="moved")(*files)[0] == caption
    call = ["--caption", *files, "--checkpoint", str(checkpoint), "--device", "cpu"]
    cheers.main([*call, "--clip", "moved"])
    cheers.main(call)
    assert asked == ["moved", "moved", "mini"]
    with pytest.raises(ValueError, match="--clip"):
        cheers.main([*call, "--clip", "other"])
