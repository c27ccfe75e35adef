"""IDC against its equations, and itself."""

import math
import random
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import (
    CAPTION,
    WORDS,
    B,
    C,
    H,
    L,
    N,
    W,
    cosine,
    interrupted,
    pictures,
    train_lines,
    write_birds,
    write_cub,
    write_features,
    write_nabirds,
)
from released import (
    ReleasedNorm,
    close,
    close_gradients,
    fill,
    idc_inputs,
    idc_losses,
    idc_names,
    recorded,
    total,
)

import data
import idc_pretrain as idc
from common import END, NULL, START, UNK, InputError
from idc_pretrain import IDC, PRESETS, RELEASED, Config
from support import rewrites
from support.birds import Birds, contrast_loss, match_cub, partners
from support.pairs import Pair, Release, Scene
from support.releases import DATASETS
from support.rewrites import Negatives
from support.run import preset
from support.text import SPECIAL, Vocab

S = 2 * (N + 1)  # [IMG1], cells, [IMG2], cells
MASK = WORDS
CLASSES = torch.tensor([[3, 3], [0, 7], [5, 5], [1, 2]])
VARIANTS = {"paper": {}, "released": RELEASED["all"], "no encoder": {"difference_encoder": False}}


def small(**fields) -> IDC:
    torch.manual_seed(0)
    sizes = {"dim": 8, "ffn": 12, "heads": 2, "layers": 2, "dropout": 0.0, "device": "cpu"}
    cfg = Config(**sizes | fields)
    return IDC(cfg, WORDS, (C, H, W), L).double().eval()


def shake(model):
    """Makes weights large enough for outputs to differ."""
    for p in (p for p in model.parameters() if p.ndim > 1):
        torch.nn.init.normal_(p)
    return model


@pytest.fixture
def tiny(tiny):
    own = "--extractor resnet101-layer3 --ffn 24 --layers 1 --pretrain_steps 8 --pretrain_batch 3"
    return tiny + own.split()


def run(*argv):
    idc.main([str(a) for a in argv])


# ---- losses --------------------------------------------------------------------------------------


def test_word_loss_against_loop():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5).double()
    target = torch.tensor([[1, NULL, 4], [NULL, NULL, 2]])
    total = 0.0
    for b in range(2):
        for t in range(3):
            if target[b, t] != NULL:
                total = total - logits[b, t].log_softmax(0)[target[b, t]]
    torch.testing.assert_close(idc.word_loss(logits, target), total / 3)
    torch.testing.assert_close(idc.word_loss(logits, target, "sum"), total)
    nothing = torch.full((2, 3), NULL)  # no word is masked: no loss, no division by zero
    assert idc.word_loss(logits, nothing) == 0


def test_judge_loss_of_mixed_pairs_against_loop():
    logits = torch.randn(3, 2).double()
    changed = torch.tensor([True, False, True])
    total = 0.0
    for b in range(3):
        right = 1 if changed[b] else 0
        total = total - logits[b].log_softmax(0)[right]
    torch.testing.assert_close(idc.judge_loss(logits, changed, "sum"), total)
    torch.testing.assert_close(idc.judge_loss(logits, changed), total / 3)


@pytest.mark.parametrize("cell_loss", [idc.cell_loss, idc.released_cell_loss])
def test_cell_loss_against_loop(cell_loss):
    torch.manual_seed(0)
    predicted, features = torch.randn(2, 8, 4).double().unbind(0)
    hidden = [1, 4, 5]
    shown = [0, 2, 3, 6, 7]
    total = 0.0
    for i in hidden:
        if cell_loss is idc.released_cell_loss:
            others = [predicted[j] for j in shown] + [features[j] for j in hidden if j != i]
        else:
            others = [features[j] for j in shown]
        own = math.exp(cosine(predicted[i], features[i]) / 0.5)
        rest = sum(math.exp(cosine(predicted[i], other) / 0.5) for other in others)
        total -= math.log(own / (own + rest)) / 3
    loss = cell_loss(predicted, features, torch.tensor(hidden), 0.5)
    assert loss.item() == pytest.approx(total)


def test_align_loss_against_loop():
    torch.manual_seed(0)
    g, c = torch.randn(2, 3, 7, 4).double().unbind(0)
    total = 0.0
    for b in range(3):
        e = [math.exp(cosine(g[b, j], c[b, j]) / 0.7) for j in range(7)]
        total -= math.log(e[0] / sum(e)) / 3
    assert idc.align_loss(g, c, 0.7).item() == pytest.approx(total)


def test_the_examples_of_the_docstrings():
    features = torch.tensor([[1.0, 0], [0, 2], [3, 0]])
    predicted = torch.tensor([[2.0, 0], [5, 1], [1, 5]])  # the others' predictions do not matter
    masked = torch.tensor([0])
    loss = idc.cell_loss(predicted, features, masked, 1.0)
    assert loss.item() == pytest.approx(0.862, abs=5e-4)
    loss = idc.cell_loss(predicted, features, masked, 0.001)
    assert loss.item() == pytest.approx(math.log(2), abs=5e-4)
    image = torch.tensor([1.0, 0]).expand(1, 7, 2)
    text = torch.tensor([[[1.0, 0]] + 6 * [[0, 1]]])
    assert idc.align_loss(image, text, 1.0).item() == pytest.approx(1.165, abs=5e-4)
    assert idc.align_loss(image, text, 0.1).item() == pytest.approx(0.0003, abs=5e-5)


def test_contrast_loss_against_loop():
    torch.manual_seed(0)
    x = torch.randn(6, 4).double()
    classes = torch.tensor([0, 1, 0, 2, 1, 1])
    total = 0.0
    for i in range(6):
        for j in range(6):
            cos = cosine(x[i], x[j])
            if classes[i] == classes[j]:
                total += 1 - cos
            else:
                total += max(0.0, cos - 0.4)
    assert contrast_loss(x, classes).item() == pytest.approx(total / 36)


def test_the_total_is_the_papers_sum():
    """Of two batches, the first holds the changed pairs, the second the distractors."""
    batch = data.Batch(*pictures().float(), CAPTION, ["a"] * B, ["b"] * B)
    model = small(finetune_targets="masked", mask_rate=0.9).float()
    cfg = Config(device="cpu", w_judge=0.3)
    losses = idc.compute_losses(model, (batch, batch), cfg)
    torch.testing.assert_close(losses["total"], losses["caption"] + 0.3 * losses["judge"])
    judged = []
    for changed in (True, False):
        every_pair = torch.full((B,), changed)
        parts = model(batch.before, batch.after, CAPTION, every_pair)
        judged.append(parts["judge"])
    torch.testing.assert_close(losses["judge"], (judged[0] + judged[1]) / 2)
    birds = {name: torch.tensor(1.0) for name in ("class", "contrast", "same_class")}
    assert idc.total_loss(birds, cfg) == 3


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_words", [idc.mask_words, idc.released_mask_words])
def test_masks_of_words(mask_words):
    torch.manual_seed(0)
    caption = CAPTION[:1].repeat(20000, 1)
    caption[:, 3] = UNK  # START 4 5 UNK END
    ids, target = mask_words(caption, WORDS, 0.15)
    chosen = target != NULL
    assert torch.equal(target[chosen], caption[chosen])
    assert torch.equal(ids[~chosen], caption[~chosen])
    assert not chosen[:, 0].any() and not chosen[:, 5:].any()  # neither START nor padding
    share = chosen.double().mean(0).tolist()
    assert share[2] == pytest.approx(0.15, abs=0.01) == share[4]
    words = ids[:, 2][chosen[:, 2]]
    assert (words == MASK).double().mean().item() == pytest.approx(0.8, abs=0.03)
    # A random word is at times the word itself.
    assert (words == caption[0, 2]).double().mean().item() == pytest.approx(0.11, abs=0.02)
    assert chosen[:, 3].any() == (mask_words is idc.released_mask_words)  # UNK
    if mask_words is idc.mask_words:
        assert set(words.tolist()) == {MASK, *range(END + 1, WORDS)}
    else:  # captions without a drawn word have their first word masked
        assert set(words.tolist()) == set(range(WORDS + 2))
        assert share[1] == pytest.approx(0.15 + 0.85**3, abs=0.015)
        assert (ids[:, 4][chosen[:, 4]] == MASK).all()  # END is never replaced by another word


def test_masks_of_cells():
    torch.manual_seed(0)
    for images, rate, count in ((2, 0.15, 1), (2, 0.4, 2), (2, 0.01, 1), (1, 0.4, 2)):
        places = idc.mask_cells(2000, images, 6, rate, "cpu")
        masked = torch.zeros(2000 * images * 6, dtype=torch.long)
        masked.index_add_(0, places, torch.ones_like(places))
        assert masked.max() == 1  # no cell twice
        of_images = masked.view(2000, images, 6).sum(2)
        assert (of_images.max(1).values == count).all()  # in one image of each pair
        assert (of_images.sum(1) == count).all()
        assert (of_images[:, 0] > 0).double().mean().item() == pytest.approx(1 / images, abs=0.05)
        share = masked.view(-1, 6).double().mean(0)  # every cell as often
        torch.testing.assert_close(share, share.mean().expand(6), atol=0.03, rtol=0)


@pytest.mark.parametrize("count", [1, 2])
def test_masked_cells_are_recognised_from_the_others(count):
    """The loss of `mvcl` from its parts: features that are masked are not seen, but they are the
    targets."""
    model = shake(small(cell_mask_rate=0.4))
    images = pictures()[:count]
    before = images[0]
    after = images[1] if count == 2 else before[:, :, :0]  # CUB: a second image without rows
    torch.manual_seed(3)
    loss = model(before, after, CAPTION, task="mvcl")["mvcl"]
    torch.manual_seed(3)
    masked = idc.mask_cells(B, count, N, 0.4, "cpu")
    shown = images.clone()
    for place in masked.tolist():
        pair, rest = divmod(place, count * N)
        image, cell = divmod(rest, N)
        row, column = divmod(cell, W)
        shown[image][pair, :, row, column] = 0
    shown_after = shown[1] if count == 2 else after
    visual, _ = model.joint(model.encode(shown[0], shown_after), CAPTION)
    predicted = []
    features = []
    for b in range(B):
        for first, image in zip((1, N + 2), images, strict=False):
            hidden = model.cell_head(visual[b, first : first + N])
            predicted.append(hidden @ model.embed.project.weight + model.cell_bias)
            features.append(torch.stack([image[b, :, n // W, n % W] for n in range(N)]))
    expected = idc.cell_loss(torch.cat(predicted), torch.cat(features), masked, 1.0)
    torch.testing.assert_close(loss, expected)


# ---- the sequence --------------------------------------------------------------------------------


def test_padding_is_not_seen_unless_asked_for():
    for see_padding in (False, True):
        model = small(see_padding=see_padding)
        visual = model.encode(*pictures())
        _, padded = model.joint(visual, CAPTION)
        _, short = model.joint(visual, CAPTION[:, :5])
        assert torch.allclose(padded[1, :4], short[1, :4]) != see_padding


def test_of_a_second_image_that_is_not_there_only_its_special_token_is_seen():
    model = small().float()
    before, _ = pictures().float()
    visual = model.encode(before, before[:, :, :0])
    assert visual.shape == (B, N + 2, 8)
    assert torch.equal(model.image_tokens(visual), visual[:, [0, N + 1]])
    batch = data.Batch(before, torch.zeros_like(before), CAPTION, ["a"] * B, [], single=True)
    torch.manual_seed(0)
    losses = idc.compute_losses(model, (batch,), model.cfg, "mlm")
    torch.manual_seed(0)
    expected = model(before, before[:, :, :0], CAPTION, task="mlm")
    torch.testing.assert_close(losses["mlm"], expected["mlm"])


def text_of(model, ids):
    """The embedded words of ids (B, L), after their [CLS] if there is one."""
    words = model.embed.words(ids)
    if not model.cfg.finetune_cls:
        return words
    return torch.cat([model.embed.special(idc.TEXT, len(ids)), words], 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fine_tuning_is_the_joint_sequence_with_a_mask(variant):
    """Images see images. Words see images, earlier words and themselves."""
    model = shake(small(**VARIANTS[variant]))
    before, after = pictures()
    visual = model.encode(before, after)
    text = text_of(model, CAPTION)
    length = S + text.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[:S] = False
    mask[:, :S] = True
    joint = model.cross(torch.cat([visual, text], 1), mask[None, None])
    image, words, masks = model.causal(visual, CAPTION, asked=0)
    assert masks.shape[1] == 0
    torch.testing.assert_close(image, joint[:, :S])
    torch.testing.assert_close(words, joint[:, -L:])  # without [CLS]


@pytest.mark.parametrize("variant", VARIANTS)
def test_fine_tuning_and_decoding_ask_as_a_full_pass_does(variant):
    """A [MASK] after the words so far predicts the next word. Decoding predicts the same,
    and so does fine-tuning for all words at once."""
    model = shake(small(**VARIANTS[variant]))
    before, after = 10 * (pictures() - 0.5)
    model.head.bias.data.zero_()
    model.head.weight.data[[NULL, END]] /= 4  # captions of different words and lengths
    visual = model.encode(before, after)
    so_far = torch.full((B, 1), START)
    mask = torch.full((B, 1), MASK)
    full = []
    for _ in range(L - 1):
        _, words, _ = model.causal(visual, torch.cat([so_far, mask], 1), asked=0)
        logits = model.head(words[:, -1])
        full.append(logits)
        without_unk = logits.index_fill(1, torch.tensor([UNK]), -math.inf)
        so_far = torch.cat([so_far, without_unk.argmax(-1, keepdim=True)], 1)
    _, _, masks = model.causal(visual, so_far[:, :-1], asked=L - 1)
    asked = model.head(masks)
    torch.testing.assert_close(asked, torch.stack(full, 1))
    assert not torch.allclose(asked[0], asked[1])  # the images are seen
    ids = model.generate(before, after)
    for ours, plain in zip(ids.tolist(), so_far.tolist(), strict=True):
        stop = next((i for i, w in enumerate(plain) if w in (NULL, END)), L)
        assert ours == plain[:stop] + [NULL] * (L - stop)
    model.cfg.finetune_targets = "every"
    terms = []
    for b in range(B):
        for t in range(L - 1):
            if so_far[b, t + 1] != NULL:
                terms.append(-asked[b, t].log_softmax(-1)[so_far[b, t + 1]])
    expected = sum(terms)
    if model.cfg.reduction == "mean":
        expected = expected / len(terms)
    torch.testing.assert_close(model(before, after, so_far)["caption"], expected)


def test_attention_maps_are_of_both_images():
    """For one word: where the [MASK] after START attended, from a full forward pass."""
    model = shake(small(layers=1))
    before, after = pictures()
    maps = model.attention_map(before, after, torch.tensor([[2, 7, 3, 0]]).expand(B, 4))
    assert maps["before"].shape == maps["after"].shape == (B, H, W)
    block = model.cross.blocks[0]
    visual = model.encode(before, after)
    text = text_of(model, torch.tensor([[2, MASK]]).expand(B, 2))
    memory = block.norm1(model.cross.norm(visual))
    mask = block.norm1(model.cross.norm(text[:, -1:]))
    query, key, _ = block.attention.project(mask, memory)
    scores = block.attention.scores(query, key)[:, :, 0]  # (B, h, S)
    cells = [i for i in range(S) if i not in (0, N + 1)]
    expected = scores[..., cells].softmax(-1).mean(1).view(B, 2, H, W)
    torch.testing.assert_close(torch.stack([maps["before"], maps["after"]], 1), expected)


# ---- stages --------------------------------------------------------------------------------------


def test_stages_and_tasks():
    cfg = Config(pretrain_steps=5, steps=3)
    assert idc.pretraining_stages(cfg) == ["pretrain"]
    assert idc.pretraining_stages(Config(pretrain_steps=5, cub="folder")) == ["cub", "pretrain"]
    assert idc.pretraining_stages(Config(pretrain_steps=0, cub="folder")) == []
    drawn = [idc.draw_task(cfg, "pretrain", step) for step in range(2000)]
    for task, share in (("mlm", 8), ("mvcl", 1), ("fda", 2)):
        assert drawn.count(task) / 2000 == pytest.approx(share / 11, abs=0.03)


@pytest.mark.parametrize("swap", [True, False])
def test_without_swap_no_scene_has_swapped_pairs(prepared, swap):
    cfg = Config(dataset="clevr_change", data_dir=str(prepared), extractor="", swap=swap)
    dataset = idc.open_dataset(cfg)
    assert any(scene.swapped for scene in dataset.scenes["train"]) == swap


def test_rates():
    for rates, stage, expected in (
        ("plain", "pretrain", {0: 0.1, 4: 0.5, 9: 1, 99: 1}),
        ("released", "pretrain", {0: 1e-8, 5: 0.5, 10: 1, 40: 0.5}),
        ("plain", "finetune", {0: 0.25, 3: 1, 90000: 1}),
        ("released", "finetune", {0: 0.25, 9999: 1, 10000: 0.5, 20000: 0.25, 90000: 0.25}),
    ):
        cfg = Config(lr=1.0, warmup=4, pretrain_lr=1.0, pretrain_warmup=10, rates=rates)
        for step, value in expected.items():
            assert idc.rate_of(cfg, stage, step) == pytest.approx(value)


def test_a_seventh_of_the_pairs_is_aligned_with_its_own_rewrites():
    model = small().float()
    before, after = pictures().float().repeat(1, 4, 1, 1, 1)
    caption = CAPTION.repeat(4, 1)
    rewritten = CAPTION[2:, None].repeat(1, 6, 1)
    batch = data.Batch(before, after, caption, [*"abcdefghijklmnop"], [])
    negatives = Mock(return_value=rewritten)
    losses = idc.compute_losses(model, (batch,), model.cfg, "fda", negatives)
    negatives.assert_called_once_with(["a", "b"])
    first_two = model(before[:2], after[:2], caption[:2], rewritten, task="fda")
    torch.testing.assert_close(losses["fda"], first_two["fda"])


def test_resume_in_either_stage_equals_no_interruption(prepared, tiny, tmp_path, monkeypatch):
    """Every fourth step is saved, counted from the start of its stage, and so is each start."""
    tiny += ["--pretrain_steps", 7]
    run(*tiny, "--data_dir", prepared, "--out_dir", tmp_path / "straight")
    straight = torch.load(tmp_path / "straight" / "last.pt", weights_only=True)
    stops = [(3, 0, "pretrain"), (6, 4, "pretrain"), (9, 7, "finetune"), (13, 11, "finetune")]
    for at, step, stage in stops:
        folder = tmp_path / f"stopped at {at}"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(idc, "compute_losses", interrupted(idc.compute_losses, at))
            run(*tiny, "--data_dir", prepared, "--out_dir", folder)
        last = torch.load(folder / "last.pt", weights_only=True)
        assert (last["step"], last["stage"]) == (step, stage)
        run("--resume", "--out_dir", folder, "--device", "cpu")
        stopped = torch.load(folder / "last.pt", weights_only=True)
        for name, weight in straight["model"].items():
            assert torch.equal(weight, stopped["model"][name])
        assert straight["best"] == stopped["best"]

    # Another run may start from the weights after pre-training.
    pretrained = tmp_path / "straight" / "pretrained.pt"
    own = ["--data_dir", prepared, "--pretrain_steps", 0, "--init", pretrained]
    run(*tiny, *own, "--steps", 1, "--lr", 0, "--out_dir", tmp_path / "second")
    first = torch.load(pretrained, weights_only=True)
    second = torch.load(tmp_path / "second" / "last.pt", weights_only=True)
    assert first["step"] == 7
    for name, weight in first["model"].items():
        assert torch.equal(weight, second["model"][name])


def test_a_model_refuses_weights_that_it_would_use_differently(tmp_path, monkeypatch):
    """--init takes weights of any run. Their shapes do not show the number of heads."""
    trained = small()
    file = tmp_path / "pretrained.pt"
    torch.save({"model": trained.state_dict(), "config": asdict(trained.cfg)}, file)
    monkeypatch.setattr("support.checks.check_fit", check_fit := Mock())
    model = small(heads=4, init=str(file))
    with pytest.raises(InputError, match="--heads 2"):
        idc.load_init(model, model.cfg, None)
    check_fit.assert_called_once()


# ---- rewritten captions --------------------------------------------------------------------------


def test_retrieval_against_loop():
    rng = random.Random(0)
    texts = [" ".join(rng.choices("abcdefgh", k=5)) for _ in range(40)]
    queries = [" ".join(rng.choices("abcdefgh", k=9)) for _ in range(40)]
    idf = rewrites.inverse_frequency(texts + queries)
    with_a = sum("a" in text for text in texts + queries)
    assert idf["a"] == pytest.approx(math.log(81 / (1 + with_a)) + 1)

    def vector(text):
        counts = Counter(text.split())
        x = torch.tensor([counts[w] * idf[w] for w in "abcdefgh"], dtype=torch.float64)
        return x / x.norm()

    for query, rows in zip(queries, rewrites.retrieve(queries, texts, idf, 4), strict=True):
        scores = [float(vector(text) @ vector(query)) for text in texts]
        best = sorted(scores, reverse=True)[:4]
        assert [scores[i] for i in rows] == pytest.approx(best, abs=1e-6)


@pytest.fixture
def dataset(prepared):
    return data.load("clevr_change", prepared)


def test_what_a_caption_says_of_its_first_object(dataset):
    text = "the tiny red cube changed its location"
    tokens, words, subjects = rewrites.parse(dataset, [text])
    assert "".join(tokens[text]) == text
    assert subjects[text] == ["tiny red cube"]
    # Template captions are not tagged, so a location has no kind.
    assert words[text] == [(1, "tiny", "size"), (2, "red", "color"), (3, "cube", "shape")]
    small = ("size", "small tiny")
    ball = ("shape", "sphere ball")
    assert (
        rewrites.named("the tiny ball behind the red cube moved")
        == rewrites.named("a small sphere")
        == {small, ball}
    )
    assert rewrites.named("the small thing moved behind the ball") == {small}
    assert rewrites.named("no change") == rewrites.named("small and red") == set()


def test_replace_takes_the_important_half(dataset):
    text = "the small red cube is behind the ball"
    tokens, words, _ = rewrites.parse(dataset, [text])
    tokens = tokens[text]
    half = rewrites.important(words[text], {"small": 1.0, "red": 4.0, "cube": 1.5, "ball": 3.0})
    assert [word for _, word, _ in half] == ["red", "ball"]
    pool = {"color": ["red", "blue"], "shape": ["ball", "sphere", "cylinder"], "size": ["large"]}
    rng = np.random.default_rng(0)
    replaced = rewrites.replace_words(tokens, half, pool, rng)
    assert replaced == "the small blue cube is behind the cylinder"  # a sphere is a ball
    unchanged = rewrites.replace_words(tokens, half, {"color": ["red"]}, rng)
    assert unchanged == text  # there is no replacement


def test_pools_hold_frequent_important_words():
    red_cube = [(1, "red", "color"), (2, "cube", "shape")]
    blue_cube = [(1, "blue", "color"), (2, "cube", "shape")]
    captions = [red_cube] * 10 + [blue_cube] * 9
    pool = rewrites.pools(captions, {"red": 2.0, "blue": 2.0, "cube": 1.0})
    assert pool == {"color": ["red"]}  # blue: nine captions; cube: never in the upper half


def test_confuse_exchanges_subjects():
    rng = np.random.default_rng(0)
    text = "the red cube moved behind the ball"
    confused = rewrites.confuse(text, ["red cube"], ["blue ball", "red cube", "ball"], rng)
    assert confused == "the blue ball moved behind the ball"
    for own, subjects in (([], ["blue ball"]), (["red cube"], ["red cube"])):
        assert rewrites.confuse(text, own, subjects, rng) == text  # no subject, or no other
    birds = "animal1 has a longer tail than animal2"
    assert rewrites.confuse(birds, ["animal1"], [], rng) == "animal2 has a longer tail than animal1"


def test_no_rewrite_is_about_the_same_object_or_a_caption_of_the_swapped_pair():
    """Only template captions are about their first object."""
    scene = Scene((Pair("1", "a", "b", ["animal1 is a brown thing"]),))
    for templates, chosen in ((False, ["animal2 sings"]), (True, [])):
        candidates = iter(["animal1 is a brown thing", "animal2 sings"])
        assert rewrites.choose([(candidates, 1)], scene, templates) == chosen
    swapped = Pair("1", "c", "b", ["animal2 sings"])
    scene = Scene((Pair("1", "a", "b", ["animal1 sings"]),), (swapped,))
    candidates = iter(["animal2 sings", "both sing"])
    assert rewrites.choose([(candidates, 1)], scene, templates=False) == ["both sing"]


CHANGES = [
    ["the {0} turned {2}", "the {0} changed to {2}", "the {0} became {2}"],
    ["the {0} is gone", "the {0} is missing", "the {0} behind the {1} has been removed"],
    ["the {0} moved", "someone moved the {0}", "the {0} by the {1} changed its location"],
]
SAME = ["no change was made", "the scene is the same as before", "nothing has changed"]


@pytest.fixture
def scenes(tmp_path):
    """Captions of 200 scenes in the style of CLEVR-Change, without images: three kinds of change,
    each in three wordings."""
    rng = random.Random(0)

    def draw_object():
        return " ".join(rng.choice(words).split()[0] for words in rewrites.KINDS.values())

    made = []
    for n in range(200):
        words = [draw_object(), draw_object(), rng.choice(rewrites.KINDS["color"])]
        change = [text.format(*words) for text in rng.choice(CHANGES)]
        changed = Pair(f"{n}", f"{n}", f"{n}c", change)
        unchanged = Pair(f"{n}_n", f"{n}", f"{n}n", SAME)
        made.append(Scene((changed, unchanged)))
    unchanged = {f"{n}_n" for n in range(200)}
    release = Release(scenes={"train": made}, kinds={"no change": unchanged})
    release.settings = DATASETS["clevr_change"]
    release.root = tmp_path
    release.unchanged = unchanged
    return release


def test_no_negative_is_true_and_text_alone_does_not_tell(scenes):
    """A scene's two pairs share five rewrites; the sixth is a caption of the other."""
    made = rewrites.rewrite(scenes)
    nonsense = ("turned cube", "turned small", "turned metal")
    for scene in scenes.scenes["train"]:
        pair, unchanged = scene.pairs
        true = set()
        for caption in pair.captions:
            true |= rewrites.named(caption)
        assert len(set(made[pair.id])) == 6
        assert made[pair.id][:5] == made[unchanged.id][:5]
        for text in made[pair.id][:5]:
            assert rewrites.named(text) - true  # another object, to which this did not happen
            assert " location " not in text
            assert not text.endswith(nonsense)
        assert made[pair.id][5] in unchanged.captions
        assert made[unchanged.id][5] in pair.captions


def test_six_negatives_of_a_data_set(dataset, monkeypatch):
    negatives = Negatives(dataset, 6)
    pairs = dataset.pairs("train")
    assert negatives.texts.keys() == {p.id for p in pairs}
    ids = negatives([p.id for p in pairs][:3])
    assert ids.shape == (3, 6, dataset.max_len)
    assert (ids[:, :, 0] == START).all()
    monkeypatch.setattr(rewrites, "rewrite", lambda dataset, count: {})
    assert Negatives(dataset, 6).texts == negatives.texts  # from its file
    pairs[0].captions[:] = ["the blue cube turned red"]
    assert Negatives(dataset, 6).texts == {}  # other captions are rewritten anew


# ---- cross-task data -----------------------------------------------------------------------------


def test_partners_are_half_alike_and_a_function_of_the_seed():
    classes = np.array([i % 10 for i in range(200)] + [99])
    made = partners(classes, seed=3)
    assert np.array_equal(made, partners(classes, seed=3))
    assert not np.array_equal(made, partners(classes, seed=4))
    assert not (made == np.arange(201)).any()
    alike = classes[made] == classes
    assert 99 <= alike.sum() <= 100
    assert not alike[-1]


def test_birds_of_both_images_meet_their_classes():
    model = small(nabirds="somewhere")
    losses = model(*pictures(), CLASSES, task="birds")
    x_1, x_2 = model.encode_each(*pictures())
    visual = model.encode(*pictures())
    images = torch.cat([x_1[:, 0], x_2[:, 0]])
    classes = torch.cat([CLASSES[:, 0], CLASSES[:, 1]])
    own = model.classify(images).log_softmax(1)[range(len(classes)), classes]
    torch.testing.assert_close(losses["class"], -own.mean())
    torch.testing.assert_close(losses["contrast"], contrast_loss(images, classes))
    logits = model.same_class(torch.cat([visual[:, 0], visual[:, N + 1]], -1))  # [IMG1], [IMG2]
    own = logits.log_softmax(1)[range(B), [1, 0, 1, 0]]  # CLASSES has two of the same class twice
    torch.testing.assert_close(losses["same_class"], -own.mean())


def test_a_batch_of_birds_has_the_class_of_each_image(tmp_path):
    write_nabirds(tmp_path)
    write_features("nabirds", tmp_path)
    nabirds = data.load("nabirds", tmp_path, Config(device="cpu"))
    birds = Birds(nabirds, size=50, seed=0)
    table = birds.features.rows(birds.names)
    before, after, classes = birds.batch("cpu")
    found = set()
    images = torch.cat([before, after])
    for image, number in zip(images, classes.T.flatten().tolist(), strict=True):
        place = (table == image).flatten(1).all(1).nonzero().item()
        found.add((birds.names[place][:4], number))  # its folder and its class
    assert found == {("0817", 0), ("0295", 1), ("1010", 2)}  # House Finch, Ross's Goose, Verdin


def test_cub_is_encoded_in_the_words_of_the_run(tmp_path):
    write_cub(tmp_path)
    write_features("cub", tmp_path)
    vocab = Vocab([*SPECIAL, "aaa", "bird", "white"])
    dataset = SimpleNamespace(grid=(8, 2, 3), vocab=vocab, max_len=3)
    cub = data.load("cub", tmp_path, Config(device="cpu"))
    match_cub(cub, dataset)
    assert cub.max_len == dataset.max_len == 10
    caption = cub.batch(cub.pairs("val")).caption[0]
    assert caption[:6].tolist() == [START, UNK, 6, 5, UNK, END]  # a white bird .
    dataset.grid = (8, 3, 2)  # the positions of cells would be wrong
    with pytest.raises(InputError, match=r"\(8, 3, 2\) expected, \(8, 2, 3\) found"):
        match_cub(cub, dataset)


def test_cross_task_data_comes_first(tmp_path, tiny, monkeypatch):
    flags = ["--fda", 0, "--log_every", 1, "--extractor", "", "--cub_batch", 1]
    flags += "--lr 8e-4 --warmup 8 --pretrain_lr 8e-4 --pretrain_warmup 8 --weight_decay .5".split()
    tiny[tiny.index("clevr_change")] = "birds_to_words"
    for name, flag, write_files in (
        ("birds_to_words", "--data_dir", write_birds),
        ("cub", "--cub", write_cub),
        ("nabirds", "--nabirds", write_nabirds),
    ):
        write_files(tmp_path / name)
        write_features(name, tmp_path / name)
        flags += [flag, tmp_path / name]
    run(*tiny, *flags, "--out_dir", tmp_path / "run")
    rows = train_lines(tmp_path / "run")
    assert [row["stage"] for row in rows] == ["cub"] * 8 + ["pretrain"] * 8 + ["finetune"] * 8
    assert [row["lr"] for row in rows] == pytest.approx(3 * [n * 1e-4 for n in range(1, 9)])
    names = {}
    for row in rows:
        names.setdefault(row["stage"], set()).update(row)
    assert "mlm" in names["cub"] and "class" not in names["cub"]
    assert {"mlm", "class", "contrast", "same_class"} <= names["pretrain"]
    assert "caption" in names["finetune"]
    best = torch.load(tmp_path / "run" / "best.pt", weights_only=True)
    assert {"beak", "bill"} <= set(best["vocab"])  # words of both data sets
    assert best["max_len"] == 10  # of CUB's longest caption
    run("--eval", tmp_path / "run" / "best.pt", "--device", "cpu")

    # Captions and birds go on where an interrupted run stood.
    flags += ["--eval_every", 3, "--out_dir", tmp_path / "parts"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(idc, "compute_losses", interrupted(idc.compute_losses, 16))
        run(*tiny, *flags)
    finetuned = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    stopped = torch.load(tmp_path / "parts" / "last.pt", weights_only=True)
    assert stopped["step"] == 14
    for state, decay in ((stopped, 0), (finetuned, 0.5)):  # of fine-tuning alone
        assert state["optimizer"]["param_groups"][0]["weight_decay"] == decay
    run("--resume", "--out_dir", tmp_path / "parts", "--device", "cpu")
    resumed = train_lines(tmp_path / "parts")
    assert [row["total"] for row in resumed] == [row["total"] for row in rows]


# ---- parity with the released code (its variant), recorded from it in float64 --------------------


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_released_variant_meets_recorded_values(stage):
    expected = recorded("IDC", stage)
    cfg = preset(Config, PRESETS, RELEASED, "clevr_change", "released")
    cfg.tau_fda = 0.01  # at 1, FDA is log 7 to three digits
    model = fill(IDC(cfg, 76, (2048, 7, 7), 24), idc_names())
    x = idc_inputs()
    for name, loss in idc_losses(model, x, stage).items():
        # with PyTorch's LayerNorm
        assert loss.item() == pytest.approx(expected["losses"][name], rel=5e-4)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.__class__ = ReleasedNorm
    losses = idc_losses(model, x, stage)
    for name, loss in losses.items():
        close(loss, expected["losses"][name])
    total(losses).backward()
    close_gradients(model, idc_names(), expected["gradients"])
    if stage == "finetune":
        assert model.generate(x["before"], x["after"])[0, :8].tolist() == expected["ids"]
