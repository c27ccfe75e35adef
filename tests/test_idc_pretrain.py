"""IDC against its equations, and itself."""

import json
import math
import random
import signal
from types import SimpleNamespace

import data
import idc_pretrain
from idc_pretrain import (
    IDC,
    PRESETS,
    RELEASED,
    Config,
    Negatives,
    align_loss,
    cell_loss,
    class_loss,
    confuse,
    contrast_loss,
    doubled_sinusoid,
    important,
    judge_loss,
    mask_cells,
    mask_words,
    match_loss,
    open_single_images,
    parts,
    plan,
    pools,
    rate,
    replace_words,
    retrieve,
    task_of,
    tfidf,
    word_loss,
)

import numpy as np
import pytest
import torch
from conftest import write_features, write_picture
from test_readers import BIRD_COLUMNS, bird_row, write, write_cub, write_nabirds, write_repack

B, C, H, W, V, WORDS = 4, 5, 2, 3, 9, 12
N, S = H * W, 2 * (H * W + 1)
MASK = WORDS
CAPTION = torch.tensor([[2, 4, 5, 6, 3, 0, 0, 0, 0], [2, 7, 3, 0, 0, 0, 0, 0, 0], [2, 8, 9, 10, 11, 4, 5, 3, 0],
                        [2, 5, 5, 3, 0, 0, 0, 0, 0]])  # fmt: skip
READINGS = {"paper": {}, "released": RELEASED, "images see words": {"visual_sees_text": True},
            "every word": {"finetune_targets": "every"}, "no encoder": {"difference_encoder": False}}  # fmt: skip


def small(**fields) -> IDC:
    torch.manual_seed(0)
    cfg = Config(**{"dim": 8, "ffn": 12, "heads": 2, "layers": 2, "dropout": 0.0} | fields)
    return IDC(cfg, WORDS, (C, H, W), V).double().eval()


def pictures():
    torch.manual_seed(1)
    return torch.rand(2, B, C, H, W, dtype=torch.float64)


def shake(model):
    """Weights large enough that outputs differ."""
    for p in (p for p in model.parameters() if p.ndim > 1):
        torch.nn.init.normal_(p)
    return model


def cosine(a, b):
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


@pytest.fixture
def tiny(tiny):
    place = tiny.index("--word_dim")
    own = ["--extractor", "resnet101-layer3", "--ffn", "24", "--layers", "1", "--pretrain_steps", "8", "--pretrain_batch", "3"]
    return tiny[:place] + tiny[place + 2 :] + own


def run(*argv):
    idc_pretrain.main([str(a) for a in argv])


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_word_loss_against_loop():
    torch.manual_seed(0)
    logits, target = torch.randn(2, 3, 5).double(), torch.tensor([[1, -1, 4], [-1, -1, 0]])
    parts = [-logits[b, t].log_softmax(0)[target[b, t]] for b in range(2) for t in range(3) if target[b, t] >= 0]
    torch.testing.assert_close(word_loss(logits, target), sum(parts) / 3)
    torch.testing.assert_close(word_loss(logits, target, "sum"), sum(parts))
    assert word_loss(logits, torch.full((2, 3), -1)) == 0  # nothing was masked: no loss, and no division by zero


@pytest.mark.parametrize("among_targets", [False, True])
def test_cell_loss_against_loop(among_targets):
    torch.manual_seed(0)
    p, t, u = torch.randn(3, 4).double(), torch.randn(3, 4).double(), torch.randn(5, 4).double()
    total = 0.0
    for i in range(3):
        own = math.exp(cosine(p[i], t[i]) / 0.5)
        others = [math.exp(cosine(p[i], x) / 0.5) for x in u]
        others += [math.exp(cosine(p[i], t[j]) / 0.5) for j in range(3) if j != i and among_targets]
        total -= math.log(own / (own + sum(others))) / 3
    assert cell_loss(p, t, u, 0.5, among_targets).item() == pytest.approx(total)


def test_align_loss_against_loop():
    torch.manual_seed(0)
    g, c = torch.randn(2, 3, 7, 4).double().unbind(0)
    total, right = 0.0, 0
    for b in range(3):
        e = [math.exp(cosine(g[b, j], c[b, j]) / 0.7) for j in range(7)]
        total -= math.log(e[0] / sum(e)) / 3
        right += (e[0] == max(e)) / 3
    loss, share = align_loss(g, c, 0.7)
    assert loss.item() == pytest.approx(total) and share.item() == pytest.approx(right)


def test_known_values_of_the_losses():
    """At temperature 1 cosines of -1 to 1 leave FDA between log 7 where it starts and log(1 + 6 e^-2); MVCL with 19,600
    candidates between log(19600) and log(1 + 19599 e^-2)."""
    same = torch.ones(5, 7, 4)
    assert align_loss(same, same, 1.0)[0].item() == pytest.approx(math.log(7), abs=1e-4)
    best = same.clone()
    best[:, 1:] *= -1
    assert align_loss(best, same, 1.0)[0].item() == pytest.approx(0.594, abs=1e-3)
    p, others = torch.ones(2, 3), torch.ones(19599, 3)
    assert cell_loss(p, p, others, 1.0, False).item() == pytest.approx(math.log(19600), abs=1e-3)
    assert cell_loss(p, p, -others, 1.0, False).item() == pytest.approx(math.log(1 + 19599 * math.exp(-2)), abs=1e-3)
    assert judge_loss(torch.zeros(3, 2), True).item() == pytest.approx(math.log(2), abs=1e-4)


def test_judge_loss_against_loop():
    logits = torch.tensor([[0.3, -1.0], [2.0, 0.5]]).double()
    for changed in (True, False):
        expected = sum(-float(row.log_softmax(0)[int(changed)]) for row in logits)
        assert judge_loss(logits, changed, "sum").item() == pytest.approx(expected)
        assert judge_loss(logits, changed).item() == pytest.approx(expected / 2)


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", ["plain", "released"])
def test_masks_of_words(rules):
    torch.manual_seed(0)
    caption = CAPTION[:1].repeat(20000, 1)  # START 4 5 6 END
    ids, target = mask_words(caption, WORDS, MASK, 0.15, rules)
    chosen = target >= 0
    assert torch.equal(target[chosen], caption[chosen]) and torch.equal(ids[~chosen], caption[~chosen])
    assert not chosen[:, 0].any() and not chosen[:, 5:].any()  # START and padding are never asked for
    share = chosen.double().mean(0)
    assert share[4].item() == pytest.approx(0.15, abs=0.01) and share[2].item() == pytest.approx(0.15, abs=0.01)
    first = 0.15 + (0.85**3 if rules == "released" else 0)
    assert share[1].item() == pytest.approx(first, abs=0.015)
    words = ids[:, 2][chosen[:, 2]]
    assert (words == MASK).double().mean().item() == pytest.approx(0.8, abs=0.03)
    others = words[(words != MASK) & (words != 5)]
    assert set(others.tolist()) == set(range(0 if rules == "released" else 3 + 1, WORDS)) - {5}
    ends = ids[:, 4][chosen[:, 4]]
    assert (ends == MASK).double().mean().item() == pytest.approx(1.0 if rules == "released" else 0.8, abs=0.03)


def test_masks_of_cells():
    torch.manual_seed(0)
    masked = mask_cells(4000, 2, 6, 0.15, "cpu")
    images = masked.any(2)
    assert (images.sum(1) == 1).all()  # one image of each pair
    assert images[:, 0].double().mean().item() == pytest.approx(0.5, abs=0.03)
    assert masked.sum((1, 2)).double().mean().item() == pytest.approx(6 * 0.15 + 0.85**6 * 0.85, abs=0.15)
    assert mask_cells(100, 1, 6, 0.15, "cpu").any(2).all()  # a single image is the one


# ---- the sequence ----------------------------------------------------------------------------------------------------


def test_sinusoid_of_the_release():
    table = doubled_sinusoid(5, 6)
    for pos in range(5):
        for i in range(0, 6, 2):
            assert table[pos, i].item() == pytest.approx(math.sin(pos / 10000 ** (2 * i / 6)), abs=1e-6)
            assert table[pos, i + 1].item() == pytest.approx(math.cos(pos / 10000 ** (2 * (i + 1) / 6)), abs=1e-6)
    still = (doubled_sinusoid(49, 512).amax(0) - doubled_sinusoid(49, 512).amin(0) < 0.02).sum()
    assert still == 327  # "positions" that hardly tell cells apart


@pytest.mark.parametrize("reading", READINGS)
def test_every_parameter_learns(reading):
    model, (before, after) = small(**READINGS[reading]).train(), pictures()
    losses = {}
    others = CAPTION[:, None].roll(1, 0).repeat(1, 6, 1)
    for task, more in (("mlm", None), ("mvcl", None), ("fda", others), ("finetune", True)):
        losses |= model(before, after, CAPTION, task, more)
    sum(losses.values()).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_padding_is_not_seen_unless_asked_for():
    before, after = (x.flatten(2).transpose(1, 2) for x in pictures())
    for fields, differs in (({}, False), ({"see_padding": True}, True)):
        model = small(**fields)
        visual = model.visual(before, after)[:2]
        a, b = (model.joint(*visual, ids)[1][1, :4] for ids in (CAPTION, CAPTION[:, :5]))
        assert torch.allclose(a, b) != differs


def test_a_second_image_that_is_not_there_is_not_seen():
    before, model = pictures()[0].flatten(2).transpose(1, 2), small()
    visual, there, _ = model.visual(before, None)
    assert there.tolist() == [[True] * (N + 2) + [False] * N]
    kept = model.joint(visual, there, CAPTION)
    visual[:, N + 2 :] += 1  # what stands in the place of its cells reaches nobody
    other = model.joint(visual, there, CAPTION)
    torch.testing.assert_close(kept[0][:, : N + 2], other[0][:, : N + 2])
    torch.testing.assert_close(kept[1], other[1])
    for task, more in (("mlm", None), ("mvcl", None), ("fda", CAPTION[:, None])):
        assert all(x.isfinite() for x in model(pictures()[0], None, CAPTION, task, more).values())


@pytest.mark.parametrize("reading", ["paper", "released", "no encoder"])
def test_fine_tuning_is_the_joint_sequence_with_a_mask(reading):
    """Images apart and words on top of their keys and values: the same as one sequence with one mask (S + T, S + T)."""
    model, (before, after) = shake(small(**READINGS[reading])), pictures()
    visual = model.encode(before, after)[0]
    text, order = model.after_cls(model.embed.words(CAPTION))
    mask = torch.zeros(S + text.shape[1], S + text.shape[1], dtype=torch.bool)
    mask[:, :S] = True
    mask[S:, S:] = order
    whole = model.cross(torch.cat([visual, text], 1), mask[None, None])[0]
    seen, told = model.tell(visual, text, order)
    torch.testing.assert_close(seen, whole[:, [0, N + 1]])  # [IMG1], [IMG2]
    torch.testing.assert_close(told, whole[:, S:])


def test_a_later_word_changes_no_earlier_output():
    model, (before, after) = shake(small()), pictures()
    visual = model.encode(before, after)[0]
    other = CAPTION.clone()
    other[:, 4:] = 1
    a, b = (model.tell(visual, *model.after_cls(model.embed.words(ids)))[1][:, :5] for ids in (CAPTION, other))
    torch.testing.assert_close(a, b)
    leaky = shake(small(visual_sees_text=True))  # what this reading means
    a, b = (leaky.tell(visual, *leaky.after_cls(leaky.embed.words(ids)))[1][:, :5] for ids in (CAPTION, other))
    assert not torch.allclose(a, b)


def test_every_target_is_what_decoding_asks():
    """Position t of the all-at-once layout equals a forward pass of words 0 ... t-1 and one [MASK]."""
    model, (before, after) = shake(small(finetune_targets="every")), pictures()
    visual = model.encode(before, after)[0]
    told = model.tell(visual, *model.every(CAPTION))[1][:, -(V - 1) :]
    for t in range(1, V):
        ids = torch.cat([CAPTION[:, :t], torch.full((B, 1), MASK)], 1)
        torch.testing.assert_close(told[:, t - 1], model.tell(visual, *model.after_cls(model.embed.words(ids)))[1][:, -1])


@pytest.mark.parametrize("reading", READINGS)
def test_cached_decoding_equals_full_decoding(reading):
    model, (before, after) = shake(small(**READINGS[reading])), 10 * (pictures() - 0.5)
    model.head.bias.data.zero_()
    model.head.weight.data[[0, 3]] /= 4  # captions of different words and lengths
    visual, so_far = model.encode(before, after)[0], torch.full((B, 1), 2)
    step = (model.full_stepper if model.cfg.visual_sees_text else model.stepper)(visual)
    for t in range(V - 1):
        text, order = model.after_cls(model.embed.words(torch.cat([so_far, torch.full((B, 1), MASK)], 1)))
        logits = model.head(model.tell(visual, text, order)[1][:, -1])
        torch.testing.assert_close(step(so_far[:, -1], t), logits)
        logits[:, 1] = -math.inf
        so_far = torch.cat([so_far, logits.argmax(-1, keepdim=True)], 1)
    ids = model.generate(before, after)
    for ours, plain in zip(ids.tolist(), so_far.tolist(), strict=True):
        stop = next((i for i, w in enumerate(plain) if w in (0, 3)), V)
        assert ours == plain[:stop] + [0] * (V - stop)
    assert not torch.allclose(logits[0], logits[1])  # the images are seen


def test_attention_maps_are_of_both_images():
    model, (before, after) = shake(small()), pictures()
    maps = model.attention_map(before, after, CAPTION)
    assert len(maps) == B and maps[0]["before"].shape == maps[0]["after"].shape == (H, W)
    torch.testing.assert_close(torch.stack([m["before"].sum() + m["after"].sum() for m in maps]), torch.ones(B).double())


def test_blind_model_sees_nothing():
    model, (before, after) = small(blind=True), pictures()
    torch.testing.assert_close(model.encode(before, after)[0], model.encode(after * 2, before)[0])


def test_near_identity_start_tells_changed_cells():
    """One cell of two like images is exchanged: after E_p the halves that take the likeness away stand out there, and there
    half of the heads of a [MASK] look, the others at the word before it."""
    torch.manual_seed(0)
    cfg = Config(dim=128, ffn=64, heads=4, layers=1, dropout=0.0, near_identity=True)
    model = IDC(cfg, WORDS, (16, H, W), 20).eval()
    before, caption = torch.randn(8, 16, H, W), torch.randint(4, WORDS, (8, 20))
    after = before.clone()
    after[:, :, 1, 2] = torch.randn(8, 16)
    visual = model.encode(before, after)[0]
    cells = visual.unflatten(1, (2, -1))[:, 1, 1:]  # of "after" (B, N, D)
    other = (torch.arange(128) % 32) >= 16
    size = cells[..., other].norm(dim=-1)
    assert (size.argmax(1) == N - 1).double().mean() > 0.8
    block, text = model.cross.blocks[0], model.cross.norm(model.every(caption)[0])
    x = block.norm1(torch.cat([model.cross.norm(visual), text], 1))
    weights = block.attention.scores(*block.attention.project(x, x)[:2]).softmax(-1)[:, :, -19:]  # of the [MASK]s
    assert weights[:, 2:, :, [N, S - 1]].sum(-1).mean() > 0.6
    words = weights[:, :2, :, S + 1 : -19]  # 0 ... 18, before the [MASK]s of 1 ... 19
    assert (words.argmax(-1) == torch.arange(19)).double().mean() > 0.5


# ---- cross-task data -------------------------------------------------------------------------------------------------


def test_losses_of_birds_against_loops():
    torch.manual_seed(0)
    x, classes = torch.randn(6, 4).double(), torch.tensor([0, 1, 0, 2, 1, 1])
    total = 0.0
    for i in range(6):
        for j in range(6):
            cos = cosine(x[i], x[j])
            total += 1 - cos if classes[i] == classes[j] else max(0.0, cos - 0.4)
    assert contrast_loss(x, classes).item() == pytest.approx(total / 36)
    logits = torch.randn(2, 2).double()
    expected = -(logits[0].log_softmax(0)[0] + logits[1].log_softmax(0)[1]) / 2
    torch.testing.assert_close(match_loss(logits, torch.tensor([[0, 1], [4, 4]])), expected)
    assert class_loss(torch.zeros(4, 555), torch.arange(4)).item() == pytest.approx(math.log(555), abs=1e-5)
    x = torch.randn(4, 7).double()
    plain = sum(math.log(sum(math.exp(v) for v in row)) - float(row[c]) for row, c in zip(x, (3, 0, 3, 6), strict=True)) / 4
    assert class_loss(x, torch.tensor([3, 0, 3, 6])).item() == pytest.approx(plain)


def test_birds_train_the_difference_encoder_alone():
    torch.manual_seed(0)
    model, (before, after) = small(nabirds="somewhere").train(), pictures()
    sum(model(before, after, torch.tensor([[3, 3], [0, 7], [5, 5], [1, 2]]), "birds").values()).backward()
    learned = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert learned == {"embed", "single", "pair", "classify", "match"}


@pytest.fixture
def birds(tmp_path):
    """Three tiny data sets of birds in their release layouts, with features: birds, cub, nabirds."""
    splits = ["train"] * 8 + ["val"] * 2 + ["test"] * 2
    rows = [bird_row(2 * n, 2 * n + 1, split, f"animal1 has a {'red long'.split()[n % 2]} tail")
            for n, split in enumerate(splits)]  # fmt: skip
    for photo in range(24):
        write_picture(tmp_path / "birds" / "images" / f"{photo}.jpg")
    write(tmp_path / "birds" / "birds-to-words-v1.0.tsv", "\n".join([BIRD_COLUMNS, *rows]))
    write_cub(tmp_path / "cub")
    write_nabirds(tmp_path / "nabirds")
    for name, folder in (("birds_to_words", "birds"), ("cub", "cub"), ("nabirds", "nabirds")):
        write_features(name, tmp_path / folder)
    return tmp_path


def test_cross_task_data_comes_first(birds, tiny, capsys):
    place = tiny.index("clevr_change")
    flags = [*tiny[:place], "birds_to_words", *tiny[place + 1 :], "--fda", "0", "--log_every", "1", "--extractor", ""]
    run(*flags, "--data_dir", birds / "birds", "--single_images", birds / "cub", "--nabirds", birds / "nabirds",
        "--out_dir", birds / "run")  # fmt: skip
    lines = [json.loads(line) for line in (birds / "run" / "log.jsonl").read_text().splitlines()]
    told = {stage: {name for line in lines if line.get("stage") == stage for name in line}
            for stage in ("single", "pretrain", "finetune")}  # fmt: skip
    assert [line["stage"] for line in lines if "stage" in line] == ["single"] * 8 + ["pretrain"] * 8 + ["finetune"] * 8
    assert "mlm" in told["single"] and "class" not in told["single"]
    assert {"mlm", "class", "contrast", "match"} <= told["pretrain"] and "caption" in told["finetune"]
    words = torch.load(birds / "run" / "best.pt", weights_only=True)["vocab"]
    assert {"animal1", "bill"} <= set(words)  # words of both data sets
    run("--eval", birds / "run" / "best.pt", "--device", "cpu")


def test_pictures_and_their_objects_stand_in_for_single_images(tmp_path):
    root = tmp_path / "mini"
    data.render_mini(root, {"train": 3, "val": 1, "test": 1})
    dataset = SimpleNamespace(name="mini", root=root, vocab=data.Vocab(data.SPECIAL), **vars(data.DATASETS["mini"].read(root)))
    dataset.features = SimpleNamespace(data=np.zeros((1, C, H, W)), cover=lambda names: None)
    single = open_single_images(Config(single_images="mini"), dataset)
    (pair,) = single.scenes["train"][0].pairs
    assert pair.before == "CLEVR_nonsemantic_000000.png" and pair.after is None
    truth = data.read_json(root / "scenes.json")
    objects = next(iter(truth.values()))["objects"]["nonsemantic"]
    assert pair.captions[0] == "there is a {size} {color} {material} {shape}".format(**objects[0])
    assert len(pair.captions) == len(objects)


# ---- rewritten captions ----------------------------------------------------------------------------------------------


def test_tfidf_against_loop():
    texts = [t.split() for t in ("a red cube", "a blue cube", "a a ball")]
    vectors, idf = tfidf(texts)
    assert idf["a"] == pytest.approx(1.0) and idf["red"] == pytest.approx(math.log(4 / 2) + 1)
    for row, words in zip(vectors.to_dense(), texts, strict=True):
        plain = {w: words.count(w) * idf[w] for w in words}
        norm = math.sqrt(sum(x * x for x in plain.values()))
        assert sorted(x for x in row.tolist() if x) == pytest.approx(sorted(x / norm for x in plain.values()))


def test_retrieval_against_loop():
    rng = random.Random(0)
    texts = [[rng.choice("abcdefgh") for _ in range(5)] for _ in range(40)]
    vectors, _ = tfidf(texts)
    dense, among = vectors.to_dense().double(), sorted(rng.sample(range(40), 25))
    queries = [[i, (i * 7 + 3) % 40] for i in range(40)]
    found = retrieve(vectors, queries, among, 4, block=7)
    for query, rows in zip(queries, found, strict=True):
        scores = {i: float(dense[i] @ dense[query].mean(0)) for i in among}
        best = sorted(scores.values(), reverse=True)[:4]
        assert [scores[i] for i in rows] == pytest.approx(best, abs=1e-6)


@pytest.fixture
def dataset(prepared):
    return data.load("clevr_change", prepared)


def of(dataset, *texts):
    return list(parts(dataset, list(texts)))


def test_parts_of_a_caption(dataset):
    (caption,) = of(dataset, "the small red cube is behind the ball")
    assert "".join(caption.tokens) == "the small red cube is behind the ball"
    assert caption.words == [(1, "small", "ADJ"), (2, "red", "ADJ"), (3, "cube", "NOUN"), (7, "ball", "NOUN")]
    assert caption.subjects == ["small red cube"]


def test_replace_takes_the_important_half(dataset):
    (caption,) = of(dataset, "the small red cube is behind the ball")
    idf = {"small": 1.0, "red": 4.0, "cube": 1.5, "ball": 3.0}
    assert [word for _, word, _ in important(caption.words, idf)] == ["red", "ball"]
    words = {"ADJ": ["red", "blue"], "NOUN": ["ball", "cylinder"]}
    text = replace_words(caption, words, idf, np.random.default_rng(0))
    assert text == "the small blue cube is behind the cylinder"
    assert replace_words(caption, {"ADJ": ["red"]}, idf, np.random.default_rng(0)) is None  # nothing else to put there


def test_pools_hold_frequent_important_words(dataset):
    captions = of(dataset, *["the red cube moved"] * 10, *["the blue cube moved"] * 9)
    found = pools([c.words for c in captions], {"red": 2.0, "blue": 2.0, "cube": 1.0})
    assert found == {"ADJ": ["red"]}  # blue: nine captions; cube: never in the upper half


def test_confuse_exchanges_subjects(dataset):
    rng = np.random.default_rng(0)
    caption, nothing = of(dataset, "the red cube moved behind the ball", "nothing changed")
    assert confuse(caption, ["blue ball", "red cube"], rng) == "the blue ball moved behind the ball"
    assert confuse(nothing, ["blue ball"], rng) is None and confuse(caption, ["red cube"], rng) is None
    birds = idc_pretrain.Parts(["animal1 ", "has a longer tail than ", "animal2"], [], ["animal1"])
    assert confuse(birds, [], rng) == "animal2 has a longer tail than animal1"


def test_six_negatives_none_of_which_is_true(dataset, capsys):
    negatives = Negatives(dataset)
    lines = [json.loads(line) for line in (dataset.root / "train_neg_tfidf6.json").read_text().splitlines()]
    assert len(lines) == len(dataset.pairs("train")) == len(negatives.of)
    swapped = {p.id: p.captions for s in dataset.scenes["train"] for p in s.swapped}
    for pair, line in zip(dataset.pairs("train"), lines, strict=True):
        assert (line["img1"], line["img2"], line["sentences"]) == (pair.before, pair.after, pair.captions)
        assert len(set(line["neg_samples"])) == 6
        assert not set(line["neg_samples"]) & {*pair.captions, *swapped[pair.id]}
    ids = [p.id for p in dataset.pairs("train")][:3]
    assert negatives(ids).shape == (3, 6, dataset.max_len) and (negatives(ids)[:, :, 0] == data.START).all()
    first = (dataset.root / "train_neg_tfidf6.json").read_bytes()
    (dataset.root / "train_neg_tfidf6.json").unlink()
    Negatives(dataset)
    assert (dataset.root / "train_neg_tfidf6.json").read_bytes() == first  # nothing but the captions decides


def test_a_file_of_the_released_layout_is_read(dataset):
    path = dataset.root / "train_neg_tfidf6.json"
    rows = [{"img1": p.before.removesuffix(".png"), "img2": p.after.removesuffix(".png"), "sentences": p.captions,
             "neg_samples": ["the red cube moved"] * 6} for p in dataset.pairs("train")]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert set(map(len, Negatives(dataset).of.values())) == {6}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    with pytest.raises(ValueError, match="no neg_samples for CLEVR_default_000000"):
        Negatives(dataset)
    path.write_text('{"img1": "a"}\n')
    with pytest.raises(ValueError, match="line 1 is not an object with img1"):
        Negatives(dataset)


# ---- stages ----------------------------------------------------------------------------------------------------------


def test_plan_and_tasks():
    cfg = Config(pretrain_steps=5, steps=3)
    assert plan(cfg) == [("pretrain", 0, 5), ("finetune", 5, 8)]
    assert plan(Config(stage="finetune", pretrain_steps=5, steps=3)) == [("finetune", 0, 3)]
    drawn = [task_of(cfg, "pretrain", step) for step in range(2000)]
    for task, share in (("mlm", 8), ("mvcl", 1), ("fda", 2)):
        assert drawn.count(task) / 2000 == pytest.approx(share / 11, abs=0.03)
    assert task_of(cfg, "finetune", 3) == "finetune"
    with pytest.raises(ValueError, match="nothing to pre-train"):
        task_of(Config(mlm=0, mvcl=0, fda=0), "pretrain", 0)


def test_rates():
    cfg = Config(lr=1.0, pretrain_lr=1.0, pretrain_warmup=10)
    assert rate(cfg, "pretrain", 4) == 0.5 and rate(cfg, "pretrain", 99) == 1.0
    cfg.pretrain_decay, cfg.finetune_decay = "inverse_sqrt", "halves"
    assert rate(cfg, "pretrain", 39) == pytest.approx((10 / 40) ** 0.5)
    assert [rate(cfg, "finetune", s) for s in (0, 9999, 10000, 19999, 20000, 90000)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_pretraining_starts_another_run(prepared, tiny, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        run(*tiny, "--data_dir", prepared, "--stage", "pretrain", "--out_dir", tmp_path / "first")
    assert e.value.code == 0 and "--init" in capsys.readouterr().out
    files = {p.name for p in (tmp_path / "first").iterdir()}
    assert files == {"config.json", "log.jsonl", "last.pt", "pretrained.pt"}
    lines = [json.loads(line) for line in (tmp_path / "first" / "log.jsonl").read_text().splitlines()]
    told = {name for line in lines if line["event"] == "train" for name in line}
    assert {"mlm", "total"} <= told and "caption" not in told
    run(*tiny, "--data_dir", prepared, "--stage", "finetune", "--init", tmp_path / "first" / "pretrained.pt", "--steps", 1,
        "--lr", 0, "--out_dir", tmp_path / "second")  # fmt: skip
    a, b = (torch.load(tmp_path / name, weights_only=True)["model"] for name in ("first/pretrained.pt", "second/last.pt"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    words = json.loads((prepared / "vocab.json").read_text())
    (prepared / "vocab.json").write_text(json.dumps(words | {"zebra": len(words)}))
    with pytest.raises(ValueError, match="--init .* was trained with"):
        run(*tiny, "--data_dir", prepared, "--stage", "finetune", "--init", tmp_path / "first" / "pretrained.pt",
            "--out_dir", tmp_path / "third")  # fmt: skip


def test_images_can_be_left_out_of_pretraining(prepared, tiny, tmp_path):
    """Frozen: E_s, E_p and their embedding are after pre-training as they started, and learn in fine-tuning."""
    run(*tiny, "--data_dir", prepared, "--pretrain_images", "frozen", "--out_dir", tmp_path / "run")
    run(*tiny, "--data_dir", prepared, "--stage", "finetune", "--steps", 1, "--lr", 0, "--out_dir", tmp_path / "start")
    start, pretrained, end = (torch.load(tmp_path / name, weights_only=True)["model"] for name in (
        "start/last.pt", "run/pretrained.pt", "run/last.pt"))  # fmt: skip
    still = {name for name in start if torch.equal(start[name], pretrained[name])}
    images = {name for name in start if name.startswith(("single.", "pair.", "embed.project.", "embed.types.", "embed.norm."))}
    assert images <= still and not any(name.startswith(("cross.", "head.", "embed.table")) for name in still)
    assert all(not torch.equal(end[name], start[name]) for name in images)
    with pytest.raises(ValueError, match="--pretrain_images frozen"):
        small(nabirds="somewhere", pretrain_images="frozen")


@pytest.mark.parametrize("at", [3, 8, 11])
def test_resume_in_either_stage_equals_no_interruption(at, prepared, tiny, tmp_path, monkeypatch):
    run(*tiny, "--data_dir", prepared, "--out_dir", tmp_path / "whole")
    original, calls = idc_pretrain.losses_of, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(idc_pretrain, "losses_of", interrupted)
    with pytest.raises(SystemExit) as e:
        run(*tiny, "--data_dir", prepared, "--out_dir", tmp_path / "parts")
    assert e.value.code == 130
    assert torch.load(tmp_path / "parts" / "last.pt", weights_only=True)["step"] == at
    run("--resume", "--out_dir", tmp_path / "parts", "--device", "cpu")
    a, b = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "parts"))
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"]) and a["best"] == b["best"]
    assert (tmp_path / "parts" / "pretrained.pt").exists()


@pytest.mark.parametrize("theirs", [False, True])
def test_idcs_repack_from_pickles_to_captions(theirs, release, tiny, tmp_path, capsys):
    root = tmp_path / "repack"
    write_repack("clevr_change", release, root)
    if theirs:
        pairs = [json.loads(line) for split in ("train", "val") for line in (root / f"{split}.json").read_text().splitlines()]
        rows = [pair | {"neg_samples": ["the red cube turned blue"] * 6} for pair in pairs]
        write(root / "train_neg_tfidf6.json", "".join(json.dumps(row) + "\n" for row in rows))
    data.main(["clevr_change", "--data_dir", str(root), "--extractor", "resnet101-layer4"])
    own = [*tiny, "--extractor", "resnet101-layer4", "--fda", "9", "--data_dir", root, "--out_dir", tmp_path / "run"]
    run(*own, "--eval_every", 8)
    out = capsys.readouterr().out
    assert out.count("samples on grey: their pictures are not all there, such as") == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert {name for line in lines for name in line} >= {"fda", "mlm", "caption", "judge"}
    scores = json.loads((tmp_path / "run" / "scores_test.json").read_text())["scores"]
    assert set(scores) == {"total", "semantic change", "only distractor"}
    captions = json.loads((tmp_path / "run" / "captions_test.json").read_text())
    assert sorted(row["image_id"] for row in captions) == sorted(f"{i:06d}.png{n}" for i in range(10, 15) for n in ("", "_n"))
    assert (tmp_path / "run" / "samples.png").exists()


def test_patience_ends_fine_tuning(prepared, tiny, tmp_path):
    run(*tiny, "--data_dir", prepared, "--stage", "finetune", "--out_dir", tmp_path / "run", "--lr", 0, "--steps", 40,
        "--eval_every", 2, "--patience", 3)  # fmt: skip
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"] == 8  # the first is the best
    run("--resume", "--out_dir", tmp_path / "run", "--device", "cpu")
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"] == 8


def test_released_reading_sets_every_difference():
    fields = {f.name: f.default for f in Config.__dataclass_fields__.values()}
    assert all(value != fields[name] for name, value in RELEASED.items())
    assert {"clevr_change", "birds_to_words", "mini"} <= set(PRESETS)
