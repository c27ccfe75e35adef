"""IDC against its equations, and itself."""

import json
import math
import random
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import write_features, write_picture
from test_readers import BIRD_COLUMNS, bird_row, write, write_cub, write_nabirds

import data
import idc_pretrain as idc
from common import END, NULL, START, UNK
from idc_pretrain import IDC, RELEASED, Config, Negatives

B, C, H, W, V, WORDS = 4, 5, 2, 3, 9, 12
N, S = H * W, 2 * (H * W + 1)
MASK = WORDS
CAPTION = torch.tensor([[2, 4, 5, 6, 3, 0, 0, 0, 0], [2, 7, 3, 0, 0, 0, 0, 0, 0], [2, 8, 9, 10, 11, 4, 5, 3, 0],
                        [2, 5, 5, 3, 0, 0, 0, 0, 0]])  # fmt: skip
REWRITTEN = CAPTION[:, None].roll(1, 0).repeat(1, 6, 1)
CLASSES = torch.tensor([[3, 3], [0, 7], [5, 5], [1, 2]])
TASKS = {"mlm": {}, "mvcl": {}, "fda": {"negatives": REWRITTEN}}
READINGS = {"paper": {}, "released": RELEASED["all"], "no encoder": {"difference_encoder": False}}


def small(**fields) -> IDC:
    torch.manual_seed(0)
    cfg = Config(**{"dim": 8, "ffn": 12, "heads": 2, "layers": 2, "dropout": 0.0, "device": "cpu"} | fields)
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


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def tiny(tiny):
    place = tiny.index("--word_dim")
    own = "--extractor resnet101-layer3 --ffn 24 --layers 1 --pretrain_steps 8 --pretrain_batch 3"
    return tiny[:place] + tiny[place + 2 :] + own.split()


def run(*argv):
    idc.main([str(a) for a in argv])


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_word_and_judge_loss_against_loops():
    torch.manual_seed(0)
    logits, target = torch.randn(2, 3, 5).double(), torch.tensor([[1, NULL, 4], [NULL, NULL, 2]])
    terms = [-logits[b, t].log_softmax(0)[target[b, t]] for b in range(2) for t in range(3) if target[b, t]]
    torch.testing.assert_close(idc.word_loss(logits, target), sum(terms) / 3)
    torch.testing.assert_close(idc.word_loss(logits, target, "sum"), sum(terms))
    assert idc.word_loss(logits, torch.full((2, 3), NULL)) == 0  # nothing was masked: no loss, no division by zero
    for changed in (True, False):
        expected = sum(-float(row.log_softmax(0)[int(changed)]) for row in logits[0, :, :2])
        assert idc.judge_loss(logits[0, :, :2], changed, "sum").item() == pytest.approx(expected)
        assert idc.judge_loss(logits[0, :, :2], changed).item() == pytest.approx(expected / 3)


@pytest.mark.parametrize("negatives", ["features", "predictions"])
def test_cell_loss_against_loop(negatives):
    torch.manual_seed(0)
    predicted, features = torch.randn(2, 8, 4).double().unbind(0)
    masked, released = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0]) > 0, negatives == "predictions"
    total, hidden, shown = 0.0, [1, 4, 5], [0, 2, 3, 6, 7]
    for i in hidden:
        own = math.exp(cosine(predicted[i], features[i]) / 0.5)
        rest = [math.exp(cosine(predicted[i], (predicted if released else features)[j]) / 0.5) for j in shown]
        rest += [math.exp(cosine(predicted[i], features[j]) / 0.5) for j in hidden if j != i and released]
        total -= math.log(own / (own + sum(rest))) / 3
    for rows in (3, 6, 8):  # rows beyond the masked cells have no weight
        assert idc.cell_loss(predicted, features, masked, rows, 0.5, negatives).item() == pytest.approx(total)


def test_align_loss_against_loop():
    torch.manual_seed(0)
    g, c = torch.randn(2, 3, 7, 4).double().unbind(0)
    total = 0.0
    for b in range(3):
        e = [math.exp(cosine(g[b, j], c[b, j]) / 0.7) for j in range(7)]
        total -= math.log(e[0] / sum(e)) / 3
    assert idc.align_loss(g, c, 0.7).item() == pytest.approx(total)


def test_known_values_of_the_losses():
    """At temperature 1 cosines of -1 to 1 leave FDA between log 7 where it starts and log(1 + 6 e^-2); MVCL with 19,600
    candidates between log(19600) and log(1 + 19599 e^-2)."""
    same = torch.ones(5, 7, 4)
    assert idc.align_loss(same, same, 1.0).item() == pytest.approx(math.log(7), abs=1e-4)
    best = same.clone()
    best[:, 1:] *= -1
    assert idc.align_loss(best, same, 1.0).item() == pytest.approx(0.594, abs=1e-3)
    cells, masked = torch.ones(19600, 3), torch.arange(19600) == 7
    others = torch.where(masked[:, None], cells, -cells)
    for features, known in ((cells, math.log(19600)), (others, math.log(1 + 19599 * math.exp(-2)))):
        assert idc.cell_loss(cells, features, masked, 2, 1.0, "features").item() == pytest.approx(known, abs=1e-3)


def test_losses_of_birds_against_loops():
    torch.manual_seed(0)
    x, classes = torch.randn(6, 4).double(), torch.tensor([0, 1, 0, 2, 1, 1])
    total = 0.0
    for i in range(6):
        for j in range(6):
            cos = cosine(x[i], x[j])
            total += 1 - cos if classes[i] == classes[j] else max(0.0, cos - 0.4)
    assert idc.contrast_loss(x, classes).item() == pytest.approx(total / 36)
    logits = torch.randn(2, 2).double()
    expected = -(logits[0].log_softmax(0)[0] + logits[1].log_softmax(0)[1]) / 2
    torch.testing.assert_close(idc.same_class_loss(logits, torch.tensor([[0, 1], [4, 4]])), expected)
    x, classes = torch.randn(4, 7).double(), (3, 0, 3, 6)
    plain = [math.log(sum(math.exp(v) for v in row)) - float(row[c]) for row, c in zip(x, classes, strict=True)]
    assert idc.class_loss(x, torch.tensor(classes)).item() == pytest.approx(sum(plain) / 4)


def test_the_total_is_the_papers_sum():
    batch = data.Batch(*pictures(), CAPTION, ["a"] * B, ["b"] * B)
    model, cfg = small(finetune_targets="masked", mask_rate=0.9).float(), Config(device="cpu", w_judge=0.5)
    for batches in ((batch, batch), (batch,)):  # one batch: nothing to judge
        losses = idc.losses_of(model, batches, cfg, "finetune")
        judge = [0.5 * losses["judge"]] if len(batches) == 2 else []
        torch.testing.assert_close(losses["total"], sum(judge, losses["caption"]))
        assert losses.keys() == {"caption", "total"} | ({"judge"} if judge else set())
    assert idc.losses_of(model, (batch,), cfg, "mlm").keys() == {"mlm", "total"}
    birds = {"class": torch.tensor(1.0), "contrast": torch.tensor(2.0), "same_class": torch.tensor(4.0)}
    assert idc.total_loss(birds, cfg) == 7


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", ["plain", "released"])
def test_masks_of_words(rules):
    torch.manual_seed(0)
    released = rules == "released"
    caption = CAPTION[:1].repeat(20000, 1)  # START 4 5 6 END
    caption[:, 3] = UNK
    ids, target = idc.mask_words(caption, WORDS, 0.15, rules)
    chosen = target != NULL
    assert torch.equal(target[chosen], caption[chosen]) and torch.equal(ids[~chosen], caption[~chosen])
    assert not chosen[:, 0].any() and not chosen[:, 5:].any()  # START and padding are never asked for
    share = chosen.double().mean(0).tolist()
    assert share[2] == pytest.approx(0.15, abs=0.01) == share[4]
    assert share[3] == (pytest.approx(0.15, abs=0.01) if released else 0)  # the release masks UNK like any word
    none = 0.85**3 if released else 0.0  # no word was drawn: the first is the only target, and always [MASK]
    assert share[1] == pytest.approx(0.15 + none, abs=0.015)
    masked = (ids[:, 1][chosen[:, 1]] == MASK).double().mean()
    assert masked.item() == pytest.approx((0.15 * 0.8 + none) / (0.15 + none), abs=0.015)
    words = ids[:, 2][chosen[:, 2]]
    assert (words == MASK).double().mean().item() == pytest.approx(0.8, abs=0.03)
    drawn = set(words.tolist()) - {MASK, 5}
    assert drawn == (set(range(WORDS + 2)) if released else set(range(END + 1, WORDS))) - {MASK, 5}
    ends = ids[:, 4][chosen[:, 4]]
    assert (ends == MASK).double().mean().item() == pytest.approx(1.0 if released else 0.8, abs=0.03)


def test_masks_of_cells():
    torch.manual_seed(0)
    masked = idc.mask_cells(4000, 2, 6, 0.15, "cpu")
    images = masked.any(2)
    assert (images.sum(1) == 1).all()  # one image of each pair
    assert images[:, 0].double().mean().item() == pytest.approx(0.5, abs=0.03)
    assert masked.sum((1, 2)).double().mean().item() == pytest.approx(6 * 0.15 + 0.85**6 * 0.85, abs=0.15)
    assert idc.mask_cells(100, 1, 6, 0.15, "cpu").any(2).all()  # a single image is the one


# ---- the sequence ----------------------------------------------------------------------------------------------------


def test_sinusoid_of_the_release():
    table = idc.doubled_sinusoid(5, 6)
    for pos in range(5):
        for i in range(0, 6, 2):
            assert table[pos, i].item() == pytest.approx(math.sin(pos / 10000 ** (2 * i / 6)), abs=1e-6)
            assert table[pos, i + 1].item() == pytest.approx(math.cos(pos / 10000 ** (2 * (i + 1) / 6)), abs=1e-6)
    still = (idc.doubled_sinusoid(49, 512).amax(0) - idc.doubled_sinusoid(49, 512).amin(0) < 0.02).sum()
    assert still == 327  # "positions" that hardly tell cells apart


@pytest.mark.parametrize("reading", READINGS)
def test_every_parameter_learns(reading):
    model, (before, after) = small(**READINGS[reading]).train(), pictures()
    losses = model(before, after, CAPTION, changed=True)  # of fine-tuning
    for task, more in TASKS.items():
        losses |= model(before, after, CAPTION, task, **more)
    assert losses.keys() == {"caption", "judge", *TASKS} and all(loss.ndim == 0 for loss in losses.values())
    sum(losses.values()).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_a_task_without_its_inputs_says_what_it_needs():
    model, (before, after) = small(), pictures()
    assert model(before, after, CAPTION).keys() == {"caption"}
    for task, message in (("fda", r"task fda needs negatives.*\(B, 6, V\)"), ("mml", "task mml: expected .*mlm"),
                          ("birds", "task birds needs .*--nabirds")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            model(before, after, CAPTION, task)


def test_padding_is_not_seen_unless_asked_for():
    before, after = (x.flatten(2).transpose(1, 2) for x in pictures())
    for fields, differs in (({}, False), ({"see_padding": True}, True)):
        model = small(**fields)
        visual = model.visual(before, after)[:2]
        a, b = (model.joint(*visual, ids)[1][1, :4] for ids in (CAPTION, CAPTION[:, :5]))
        assert torch.allclose(a, b) != differs


def test_a_second_image_that_is_not_there_is_not_seen():
    before, model = pictures()[0].flatten(2).transpose(1, 2), small()
    visual, there, _ = model.visual(before)
    assert there.tolist() == [[True] * (N + 2) + [False] * N]
    kept = model.joint(visual, there, CAPTION)
    visual[:, N + 2 :] += 1  # what stands in the place of its cells reaches nobody
    other = model.joint(visual, there, CAPTION)
    torch.testing.assert_close(kept[0][:, : N + 2], other[0][:, : N + 2])
    torch.testing.assert_close(kept[1], other[1])
    for task, more in TASKS.items():
        assert all(x.isfinite() for x in model(pictures()[0], None, CAPTION, task, **more).values())


def text_of(model, ids):
    """Words of ids (B, V) behind their [CLS], if they have one."""
    words = model.embed.words(ids)
    return torch.cat([model.embed.special(2, len(ids)), words], 1) if model.cfg.finetune_cls else words


@pytest.mark.parametrize("reading", READINGS)
def test_fine_tuning_is_the_joint_sequence_with_a_mask(reading):
    """Images first and words on top of their keys and values: the same as one sequence with one mask (S + T, S + T)."""
    model, (before, after) = shake(small(**READINGS[reading])), pictures()
    visual, text = model.encode(before, after)[0], text_of(model, CAPTION)
    mask = torch.ones(S + text.shape[1], S + text.shape[1], dtype=torch.bool).tril()
    mask[:S] = False
    mask[:, :S] = True
    joint = model.cross(torch.cat([visual, text], 1), mask[None, None])[0]
    image, words, _ = model.causal(visual, CAPTION)
    torch.testing.assert_close(image, joint[:, [0, N + 1]])  # [IMG1], [IMG2]
    torch.testing.assert_close(words, joint[:, S:])


@pytest.mark.parametrize("reading", READINGS)
def test_fine_tuning_and_decoding_ask_as_a_full_pass_does(reading):
    """A caption with a [MASK] behind it asks for the next word. Decoding with kept keys and values asks for the same,
    and so does fine-tuning for all words at once."""
    model, (before, after) = shake(small(**READINGS[reading])), 10 * (pictures() - 0.5)
    model.head.bias.data.zero_()
    model.head.weight.data[[NULL, END]] /= 4  # captions of different words and lengths
    visual, so_far = model.encode(before, after)[0], torch.full((B, 1), START)
    step, full = model.stepper(visual), []
    for t in range(V - 1):
        full.append(model.head(model.causal(visual, torch.cat([so_far, torch.full((B, 1), MASK)], 1))[1][:, -1]))
        torch.testing.assert_close(step(so_far[:, -1], t), full[-1])
        without_unk = full[-1].index_fill(1, torch.tensor([UNK]), -math.inf)
        so_far = torch.cat([so_far, without_unk.argmax(-1, keepdim=True)], 1)
    asked = model.head(model.causal(visual, so_far[:, :-1], ask_next=True)[1][:, 1 - V :])
    torch.testing.assert_close(asked, torch.stack(full, 1))
    assert not torch.allclose(asked[0], asked[1])  # the images are seen
    ids = model.generate(before, after)
    for ours, plain in zip(ids.tolist(), so_far.tolist(), strict=True):
        stop = next((i for i, w in enumerate(plain) if w in (NULL, END)), V)
        assert ours == plain[:stop] + [NULL] * (V - stop)
    model.cfg.finetune_targets = "every"
    words = [(b, t) for b in range(B) for t in range(V - 1) if so_far[b, t + 1]]
    total = sum(-asked[b, t].log_softmax(-1)[so_far[b, t + 1]] for b, t in words)
    total = total / (1 if model.cfg.reduction == "sum" else len(words))
    torch.testing.assert_close(model(before, after, so_far)["caption"], total)


def test_attention_maps_are_of_both_images():
    """One word: where the [MASK] behind START looked, from a full forward pass."""
    model, (before, after) = shake(small(layers=1)), pictures()
    maps = model.attention_map(before, after, torch.tensor([[2, 7, 3, 0]]).expand(B, 4))
    assert maps["before"].shape == maps["after"].shape == (B, H, W)
    text, block = text_of(model, torch.tensor([[2, MASK]]).expand(B, 2)), model.cross.blocks[0]
    visual, last = (block.norm1(model.cross.norm(x)) for x in (model.encode(before, after)[0], text[:, -1:]))
    scores = block.attention.scores(*block.attention.project(last, visual)[:2])[:, :, 0]  # (B, K, S)
    cells = [i for i in range(S) if i not in (0, N + 1)]
    expected = scores[..., cells].softmax(-1).mean(1).view(B, 2, H, W)
    torch.testing.assert_close(torch.stack([maps["before"], maps["after"]], 1), expected)


def test_blind_model_sees_nothing():
    model, (before, after) = small(blind=True), pictures()
    torch.testing.assert_close(model.encode(before, after)[0], model.encode(after * 2, before)[0])


# ---- stages ----------------------------------------------------------------------------------------------------------


def test_plan_and_tasks():
    cfg = Config(pretrain_steps=5, steps=3)
    assert idc.plan(cfg) == [("pretrain", 0, 5), ("finetune", 5, 8)]
    assert idc.plan(Config(pretrain_steps=0, steps=3)) == [("finetune", 0, 3)]
    drawn = [idc.task_of(cfg, "pretrain", step) for step in range(2000)]
    for task, share in (("mlm", 8), ("mvcl", 1), ("fda", 2)):
        assert drawn.count(task) / 2000 == pytest.approx(share / 11, abs=0.03)
    assert idc.task_of(cfg, "finetune", 3) == "finetune"
    with pytest.raises(ValueError, match="nothing to pre-train"):
        Config(mlm=0, mvcl=0, fda=0)


def test_rates():
    cfg = Config(lr=1.0, pretrain_lr=1.0, pretrain_warmup=10)
    assert idc.pretrain_rate(cfg, 4) == 0.5 and idc.pretrain_rate(cfg, 99) == 1.0
    cfg.pretrain_decay, cfg.finetune_decay = "inverse_sqrt", "halves"
    assert idc.pretrain_rate(cfg, 39) == pytest.approx((10 / 40) ** 0.5)
    assert [idc.finetune_rate(cfg, s) for s in (0, 9999, 10000, 19999, 20000, 90000)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_released_reading_sets_every_difference():
    fields = {f.name: f.default for f in Config.__dataclass_fields__.values()}
    assert all(value != fields[name] for name, value in RELEASED["all"].items())


def test_pretraining_starts_another_run(prepared, tiny, tmp_path):
    run(*tiny, "--data_dir", prepared, "--out_dir", tmp_path / "first")
    own = [*tiny, "--data_dir", prepared, "--pretrain_steps", 0, "--init", tmp_path / "first" / "pretrained.pt"]
    run(*own, "--steps", 1, "--lr", 0, "--out_dir", tmp_path / "second")
    a, b = (torch.load(tmp_path / f, weights_only=True)["model"] for f in ("first/pretrained.pt", "second/last.pt"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    words = json.loads((prepared / "vocab.json").read_text())
    (prepared / "vocab.json").write_text(json.dumps(words | {"zebra": len(words)}))
    with pytest.raises(ValueError, match="the checkpoint was trained with"):
        run(*own, "--out_dir", tmp_path / "third")


@pytest.mark.parametrize("at", [3, 8, 11])
def test_resume_in_either_stage_equals_no_interruption(at, prepared, tiny, tmp_path, monkeypatch):
    run(*tiny, "--data_dir", prepared, "--out_dir", tmp_path / "straight")
    original, calls = idc.losses_of, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(idc, "losses_of", interrupted)
    with pytest.raises(SystemExit) as e:
        run(*tiny, "--data_dir", prepared, "--out_dir", tmp_path / "stopped")
    assert e.value.code == 130
    assert torch.load(tmp_path / "stopped" / "last.pt", weights_only=True)["step"] == at
    run("--resume", "--out_dir", tmp_path / "stopped", "--device", "cpu")
    a, b = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("straight", "stopped"))
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"]) and a["best"] == b["best"]
    assert (tmp_path / "stopped" / "pretrained.pt").exists()


# ---- rewritten captions ----------------------------------------------------------------------------------------------


def test_retrieval_against_loop():
    rng = random.Random(0)
    texts, queries = ([" ".join(rng.choice("abcdefgh") for _ in range(n)) for _ in range(70)] for n in (5, 9))
    idf = idc.inverse_frequency(texts + queries)
    assert idf["a"] == pytest.approx(math.log(141 / (1 + sum("a" in text for text in texts + queries))) + 1)

    def vector(text):
        x = torch.tensor([text.split().count(w) * idf[w] for w in "abcdefgh"], dtype=torch.float64)
        return x / x.norm()

    for query, rows in zip(queries, idc.retrieve(queries, texts, idf, 4), strict=True):
        scores = [float(vector(text) @ vector(query)) for text in texts]
        assert [scores[i] for i in rows] == pytest.approx(sorted(scores, reverse=True)[:4], abs=1e-6)


@pytest.fixture
def dataset(prepared):
    return data.load("clevr_change", prepared)


def test_what_a_caption_says_of_its_first_object(dataset):
    text = "the tiny red cube changed its location"
    tokens, words, subjects = idc.parse(dataset, [text])
    assert "".join(tokens[text]) == text and subjects[text] == ["tiny red cube"]
    assert words[text] == [(1, "tiny", "size"), (2, "red", "color"), (3, "cube", "shape")]  # a location has no shape
    small, ball = ("size", "small tiny"), ("shape", "sphere ball")
    assert idc.named("the tiny ball behind the red cube moved") == idc.named("a small sphere") == {small, ball}
    assert idc.named("the small thing moved behind the ball") == {small}
    assert idc.named("no change") == idc.named("small and red") == set()


def test_replace_takes_the_important_half(dataset):
    text = "the small red cube is behind the ball"
    tokens, words, _ = (by_text[text] for by_text in idc.parse(dataset, [text]))
    half = idc.important(words, {"small": 1.0, "red": 4.0, "cube": 1.5, "ball": 3.0})
    assert [word for _, word, _ in half] == ["red", "ball"]
    pool = {"color": ["red", "blue"], "shape": ["ball", "sphere", "cylinder"], "size": ["large"]}
    rng = np.random.default_rng(0)
    replaced = idc.replace_words(tokens, half, pool, rng)
    assert replaced == "the small blue cube is behind the cylinder"  # a sphere is a ball
    assert idc.replace_words(tokens, half, {"color": ["red"]}, rng) == text  # nothing else to put there


def test_pools_hold_frequent_important_words():
    captions = [[(1, "red", "color"), (2, "cube", "shape")]] * 10 + [[(1, "blue", "color"), (2, "cube", "shape")]] * 9
    pool = idc.pools(captions, {"red": 2.0, "blue": 2.0, "cube": 1.0})
    assert pool == {"color": ["red"]}  # blue: nine captions; cube: never in the upper half


def test_confuse_exchanges_subjects():
    rng, text = np.random.default_rng(0), "the red cube moved behind the ball"
    confused = idc.confuse(text, ["red cube"], ["blue ball", "red cube", "ball"], rng)
    assert confused == "the blue ball moved behind the ball"
    for own, subjects in (([], ["blue ball"]), (["red cube"], ["red cube"])):
        assert idc.confuse(text, own, subjects, rng) == text  # no subject, or no other
    birds = "animal1 has a longer tail than animal2"
    assert idc.confuse(birds, ["animal1"], [], rng) == "animal2 has a longer tail than animal1"


@pytest.fixture
def scenes(tmp_path):
    """400 scenes of captions as CLEVR-Change has them, without images: three kinds of change in three wordings."""
    rng, made = random.Random(0), []
    same = ["no change was made", "the scene is the same as before", "nothing has changed"]
    for n in range(400):
        thing, other = (" ".join(rng.choice(words).split()[0] for words in idc.KINDS.values()) for _ in range(2))
        value = rng.choice(idc.KINDS["color"])
        change = rng.choice([
            [f"the {thing} turned {value}", f"the {thing} changed to {value}", f"the {thing} became {value}"],
            [f"the {thing} is gone", f"the {thing} is missing", f"the {thing} behind the {other} has been removed"],
            [f"the {thing} moved", f"someone moved the {thing}", f"the {thing} by the {other} changed its location"],
        ])  # fmt: skip
        pairs = data.Pair(f"{n}", f"{n}", f"{n}c", change), data.Pair(f"{n}_n", f"{n}", f"{n}n", same)
        made.append(data.Scene(pairs))
    unchanged = {f"{n}_n" for n in range(400)}
    return SimpleNamespace(name="clevr_change", root=tmp_path, scenes={"train": made}, kinds={"no change": unchanged})


def test_text_alone_does_not_find_the_caption(scenes):
    """An n-gram model of half of the scenes ranks a changed pair's caption among its rewrites by chance in the other
    half. An unchanged pair has the same rewrites, and each pair a caption of the other."""
    made, score = idc.rewrite(scenes), Counter()
    changed, unchanged = zip(*(s.pairs for s in scenes.scenes["train"]), strict=True)

    def grams(text):
        words = ["<", *text.split(), ">"]
        return [tuple(words[i : i + n]) for n in (1, 2, 3) for i in range(len(words) - n + 1)]

    for pair in changed[:200]:
        score.update(gram for caption in pair.captions * 5 for gram in grams(caption))
        score.subtract(gram for caption in made[pair.id][:5] * 3 for gram in grams(caption))
    first = 0
    for n, pair in enumerate(changed[200:]):
        values = [sum(score[g] for g in grams(c)) / len(grams(c)) for c in [pair.captions[n % 3], *made[pair.id][:5]]]
        first += values[0] == max(values)
    assert first / 200 < 0.3  # chance: 0.17
    for a, b in zip(changed, unchanged, strict=True):
        assert made[a.id][:5] == made[b.id][:5] and made[a.id][5] in b.captions and made[b.id][5] in a.captions


def test_no_negative_is_true(scenes):
    made = idc.rewrite(scenes)
    for pair, _ in (s.pairs for s in scenes.scenes["train"]):
        said = set().union(*map(idc.named, pair.captions))
        assert len(set(made[pair.id])) == 6
        assert all(idc.named(c) - said for c in made[pair.id][:5])  # another object, to which this did not happen
    for text in (c for texts in made.values() for c in texts):
        assert " location " not in text and not text.endswith(("turned cube", "turned small", "turned metal"))


def test_single_images_are_rewritten_without_subjects(scenes, monkeypatch):
    """CUB has no Confuse: three negatives come from Retrieve, three from Replace."""
    single = [data.Scene((data.Pair(p.id, p.before, None, p.captions[:1]),))
              for p in (s.pairs[0] for s in scenes.scenes["train"][:100])]  # fmt: skip
    monkeypatch.setattr(idc, "confuse", None)
    made = idc.rewrite(SimpleNamespace(name="clevr_change", root="cub", scenes={"train": single}, kinds={}))
    captions = {c for s in single for c in s.pairs[0].captions}
    assert all(len(set(texts)) == 6 and set(texts[:3]) <= captions for texts in made.values())


def test_six_negatives_are_kept_in_a_file(dataset, monkeypatch):
    path, original = dataset.root / "train_neg_tfidf6.json", Path.write_text

    def full_disk(self, text, **more):
        original(self, text[: len(text) // 2], **more)
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(Path, "write_text", full_disk)
        Negatives(dataset)
    assert not list(dataset.root.glob(path.name + "*"))  # whole or not at all
    negatives, pairs = Negatives(dataset), dataset.pairs("train")
    rows = lines(path)
    assert len(rows) == len(pairs) == len(negatives.texts)
    for pair, row in zip(pairs, rows, strict=True):
        assert (row["img1"], row["img2"], row["sentences"]) == (pair.before, pair.after, pair.captions)
        assert len(set(row["neg_samples"])) == 6 and not set(row["neg_samples"]) & {*pair.captions}
    ids = negatives([p.id for p in pairs][:3])
    assert ids.shape == (3, 6, dataset.max_len) and (ids[:, :, 0] == START).all()
    first = path.read_bytes()
    path.unlink()
    Negatives(dataset)
    assert path.read_bytes() == first  # nothing but the captions decides


def test_a_file_of_the_released_layout_is_read(dataset):
    path = dataset.root / "train_neg_tfidf6.json"
    rows = [{"img1": p.before.removesuffix(".png"), "img2": p.after.removesuffix(".png"), "sentences": p.captions,
             "neg_samples": ["the red cube moved"] * 6} for p in dataset.pairs("train")]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert set(map(len, Negatives(dataset).texts.values())) == {6}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    with pytest.raises(ValueError, match="neg_tfidf6.json cannot be used .*CLEVR_default_000000.*remove the file"):
        Negatives(dataset)
    path.write_text('{"img1": "a"}\n')
    with pytest.raises(ValueError, match="neg_tfidf6.json cannot be used .*neg_samples"):
        Negatives(dataset)


# ---- cross-task data -------------------------------------------------------------------------------------------------


def test_partners_are_half_alike_and_a_function_of_the_seed():
    classes = np.array([i % 10 for i in range(200)] + [99])
    made = idc.partners(classes, seed=3)
    assert np.array_equal(made, idc.partners(classes, seed=3))
    assert not np.array_equal(made, idc.partners(classes, seed=4))
    assert len(made) == 201 and not (made == np.arange(201)).any()
    alike = classes[made] == classes
    assert 99 <= alike.sum() <= 100 and not alike[-1]


def test_birds_train_the_difference_encoder_alone():
    model, (before, after) = small(nabirds="somewhere").train(), pictures()
    sum(model(before, after, CLASSES, "birds").values()).backward()
    learned = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert learned == {"embed", "single", "pair", "classify", "same_class"}


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


def test_cross_task_data_comes_first(birds, tiny, monkeypatch):
    original, sizes = idc.losses_of, {True: set(), False: set()}  # of batches of single images, of pairs

    def watched(model, batches, cfg, task, *more):
        sizes[batches[0].single].add(len(batches[0].before))
        return original(model, batches, cfg, task, *more)

    monkeypatch.setattr(idc, "losses_of", watched)
    place = tiny.index("clevr_change")
    run(*tiny[:place], "birds_to_words", *tiny[place + 1 :], "--fda", 0, "--log_every", 1, "--extractor", "",
        "--data_dir", birds / "birds", "--cub", birds / "cub", "--nabirds", birds / "nabirds", "--cub_batch", 1,
        "--out_dir", birds / "run")  # fmt: skip
    log = lines(birds / "run" / "log.jsonl")
    names = {stage: {name for line in log if line.get("stage") == stage for name in line}
             for stage in ("cub", "pretrain", "finetune")}  # fmt: skip
    assert [line["stage"] for line in log if "stage" in line] == ["cub"] * 8 + ["pretrain"] * 8 + ["finetune"] * 8
    assert "mlm" in names["cub"] and "class" not in names["cub"] and sizes == {True: {1}, False: {2, 3}}
    assert {"mlm", "class", "contrast", "same_class"} <= names["pretrain"] and "caption" in names["finetune"]
    words = torch.load(birds / "run" / "best.pt", weights_only=True)["vocab"]
    assert {"animal1", "bill"} <= set(words)  # words of both data sets
    run("--eval", birds / "run" / "best.pt", "--device", "cpu")
