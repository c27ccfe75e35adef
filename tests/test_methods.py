"""What all method files have in common: decoding, learning, running, captioning.

What the tests know of a method is its record in METHODS of helpers.py. A new method is one more."""

import json
import math
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import (
    CAPTION,
    METHODS,
    VARIANTS,
    WORDS,
    B,
    C,
    H,
    L,
    W,
    batch_of,
    flags_of,
    interrupted,
    mean,
    one_layer,
    pictures,
    train_lines,
)
from PIL import Image

import common
import data
from support import report
from support.own_pairs import read_pairs
from support.releases import DATASETS, Settings
from support.run import Run, parse_args
from support.text import SPECIAL, Vocab, tokenize

WEIGHTS = []
for module, record in METHODS.items():
    if record.weights:
        WEIGHTS += [(module, without) for without in ["", *sorted({*record.weights.values()})]]
DECODERS = pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].decoder])


def small(method, max_len=L, **fields):
    """A small model in training mode, without dropout, with all of its trainable parts."""
    torch.manual_seed(0)
    sizes = {"dim": 8, "heads": 2, "dropout": 0.0, "device": "cpu"} | METHODS[method].sizes
    cfg = method.Config(**sizes | fields)
    return METHODS[method].model(cfg, WORDS, (C, H, W), max_len)


def context_of(model, batch):
    """What the decoder reads besides words."""
    method = METHODS[sys.modules[type(model).__module__]]
    inputs = method.inputs(model, batch.images)
    return model.encode(batch.before, batch.after, *inputs)[: method.decoder_inputs]


def both_kinds():
    """The batches of a step: changed pairs, distractor pairs."""
    before, after = pictures().float()
    return batch_of(before, after), batch_of(after, before)


@pytest.fixture
def tiny(method, tiny):
    return flags_of(method, tiny)


def run(method, *argv):
    method.main([str(a) for a in argv])


ROOT = Path(common.__file__).parent


def code_of_the_page(word):
    """The block of docs/extending.md that has this word."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if word in code]
    return code


# ---- decoding ------------------------------------------------------------------------------------


@DECODERS
def test_a_later_word_changes_no_earlier_output(method):
    model = small(method)
    batch = batch_of(*pictures().float())
    context = context_of(model, batch)
    other = CAPTION.clone()
    other[:, 4:] = 1
    hidden = model.decoder(CAPTION, *context)[0]
    changed = model.decoder(other, *context)[0]
    torch.testing.assert_close(hidden[:, :4], changed[:, :4])


@DECODERS
def test_padding_changes_no_loss(method):
    model = small(method)
    losses = []
    for length in (5, L):
        batch = batch_of(*pictures().float(), CAPTION[[0, 1, 3, 1], :length])
        torch.manual_seed(0)
        losses.append(METHODS[method].steps(model, [batch])["step"]())
    torch.testing.assert_close(*losses)


@DECODERS
def test_captions_are_the_likeliest_words_one_by_one(method):
    model = small(method).eval()
    batch = batch_of(*10 * (pictures().float() - 0.5))  # which look different
    for p in model.parameters():
        if p.ndim > 1:  # large enough for captions of different words and lengths
            torch.nn.init.normal_(p)
    model.decoder.head.bias.data[[0, 3]] -= 3
    inputs = METHODS[method].inputs(model, batch.images)
    context = context_of(model, batch)
    full = torch.full((B, 1), 2)
    for _ in range(L - 1):
        hidden = model.decoder(full, *context)[0]
        logits = model.decoder.head(hidden[:, -1])
        logits[:, 1] = -math.inf
        full = torch.cat([full, logits.argmax(-1, keepdim=True)], 1)
    ids = model.generate(batch.before, batch.after, *inputs).tolist()
    for ours, plain in zip(ids, full.tolist(), strict=True):
        length = 0
        while length < L and plain[length] not in (0, 3):
            length += 1
        assert ours == plain[:length] + [0] * (L - length)
    assert len({tuple(row) for row in ids}) > 1, ids


@DECODERS
def test_attention_map_is_a_mean_over_the_words(method):
    model = small(method)
    batch = batch_of(*pictures().float())
    look = model.decoder.layers[-1].cross_attention
    seen = {}
    look.query.register_forward_hook(lambda module, args, out: seen.update(query=out))
    look.key.register_forward_hook(lambda module, args, out: seen.update(key=out))
    maps = model.attention_map(
        batch.before, batch.after, CAPTION, *METHODS[method].inputs(model, batch.images)
    )
    scores = look.scores(seen["query"], seen["key"][:, : H * W])
    # In "START w1 ... w6 END", the rows of START to w5 predict the words.
    expected = scores[2].softmax(-1).mean(0)[:6].mean(0).view(H, W)
    torch.testing.assert_close(next(iter(maps.values()))[2], expected)


def test_nothing_is_broadcast_to_the_grid_or_to_another_number_of_images(method):
    model = small(method)
    batch = batch_of(*pictures().float())
    inputs = METHODS[method].inputs(model, batch.images)
    for size in ((C, 1, W), (1, H, W), (C, W, H)):
        features = torch.rand(B, *size)
        with pytest.raises(AssertionError, match="expected"):
            model.generate(features, features, *inputs)
    for one, other in ((batch.before[:1], batch.after), (batch.before, batch.after[:2])):
        with pytest.raises(AssertionError):
            model.encode(one, other, *inputs)


# ---- losses and learning -------------------------------------------------------------------------


@DECODERS
def test_caption_loss_against_loop(method):
    """A mean over all words, or over the words of each caption and then over the captions."""
    model = small(method)
    batch = batch_of(*pictures().float())
    context = context_of(model, batch)
    hidden = model.decoder(CAPTION, *context)[0]
    log_p = model.decoder.head(hidden).log_softmax(-1)
    sentences = []
    words = []
    for b in range(B):
        terms = []
        for t in range(L - 1):
            following = CAPTION[b, t + 1]
            if following:
                terms.append(-log_p[b, t, following].item())
        words += terms
        sentences.append(mean(terms))
    expected = mean(sentences if METHODS[method].mean_of_captions else words)
    losses = METHODS[method].steps(model, [batch])["step"]()
    assert losses["caption"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method, without", WEIGHTS)
def test_total_is_the_papers_sum_and_a_mean_over_both_kinds_of_pairs(method, without):
    """A loss whose weight is 0 is not computed."""
    weights = METHODS[method].weights
    fields = {field: 0.3 / n for n, field in enumerate(sorted({*weights.values()}), 1)}
    if without:
        fields[without] = 0.0
    model = small(method, **fields)
    losses = METHODS[method].steps(model, both_kinds())["step"]()
    parts = []
    for batch in both_kinds():
        inputs = METHODS[method].inputs(model, batch.images)
        parts.append(model(batch.before, batch.after, CAPTION, *inputs))
    first, second = parts
    counting = {loss: fields[field] for loss, field in weights.items() if fields[field]}
    assert first.keys() == {"caption", *counting}
    expected = 0.0
    for name, weight in ({"caption": 1.0} | counting).items():
        expected += weight * (first[name] + second[name]).item() / 2
    assert losses["total"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method, fields", VARIANTS)
def test_every_parameter_learns(method, fields):
    """Except those that a variant freezes. What shifts all scores of a softmax has no gradient. Nor
    has what both images share, where nothing lies between the embedding and the subtraction."""
    without = ["attention.key.bias"]
    if fields.get("difference") == "subtract" or fields.get("layers") == 0:
        without += ["embed.conv.bias", "position.col.weight", "position.row.weight"]
    model = small(method, dropout=0.1, **fields)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    start = {name: p.clone() for name, p in model.named_parameters()}
    total = 0.0
    for losses in METHODS[method].steps(model, both_kinds()).values():
        total = total + sum(losses().values())
    total.backward()
    optimizer.step()
    for name, p in model.named_parameters():
        if p.requires_grad and not name.endswith(tuple(without)):
            assert p.grad is not None and p.grad.any(), f"no gradient reaches {name}"
            assert not torch.equal(p, start[name]), f"{name} does not move"


def test_overfits_eight_pairs(method, prepared, tiny, tmp_path, monkeypatch):
    """And writes a checkpoint as docs/extending.md says, which --eval reads."""
    argv = [*tiny, "--dim=32", "--heads=4", "--dropout=0", "--lr=3e-3", "--data_dir", str(prepared)]
    cfg, _ = parse_args(method.Config, method.PRESETS, {}, argv)
    dataset = data.open_dataset(cfg)
    torch.manual_seed(0)
    model = METHODS[method].model(cfg, len(dataset.vocab), dataset.grid, dataset.max_len)
    pairs = []  # four changed, four distractor pairs
    for scene in dataset.scenes["train"][:4]:
        pairs += scene.pairs
    batch = dataset.batch(pairs).to("cpu")
    expected = [" ".join(tokenize(p.captions[0])) for p in pairs]
    captions = []
    adam = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for step in range(1, 401):
        losses = method.compute_losses(model, (batch,), cfg)
        adam.zero_grad()
        losses["total"].backward()
        adam.step()
        if step % 25 == 0:
            captions = dataset.vocab.decode(model.generate(batch.before, batch.after))
        if captions == expected:
            break
    assert captions == expected
    monkeypatch.chdir(tmp_path)
    exec(code_of_the_page("torch.save"), globals() | locals())
    run(method, "--eval", "best.pt", "--device", "cpu")
    assert (tmp_path / f"best-{prepared.name}" / "captions_test.json").exists()


# ---- compiled ------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()  # models of earlier tests count against its limits


def learned(method, model):
    """The losses of each kind of step, and their gradients."""
    results = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    for losses in METHODS[method].steps(model, both_kinds()).values():
        torch.manual_seed(0)  # of masks
        terms = losses()
        gradients = torch.autograd.grad(terms["total"], parameters, allow_unused=True)
        results.append((terms, gradients))
    return results


def test_the_model_compiles_as_one_graph(method, fresh_compiler):
    """Losses and gradients of every kind of step equal those without torch.compile."""
    model = small(method, **METHODS[method].variants[0] | one_layer(method))
    expected = learned(method, model)
    model.compile(fullgraph=True, dynamic=False, backend="eager")
    torch.testing.assert_close(learned(method, model), expected)


def test_a_run_compiles_one_graph(method, prepared, tiny, tmp_path, monkeypatch, fresh_compiler):
    """Several epochs, with validation: both kinds of pairs and all batches share a graph."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    class CompiledRun(Run):
        def start(self, *args):
            self.model.compile(fullgraph=True, dynamic=False, backend=backend)
            super().start(*args)

    monkeypatch.setattr("support.run.Run", CompiledRun)
    flags = [f"--{name}=1" for name in one_layer(method)]
    run(method, *tiny, *flags, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    assert len(graphs) == 1


# ---- running -------------------------------------------------------------------------------------


def load_tensors(path):
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def minis(tmp_path_factory):
    """A small mini, drawn once."""
    folder = tmp_path_factory.mktemp("mini")
    data.main(["mini", "--data_dir", str(folder), "--scenes", "60", "--device", "cpu"])
    return folder


def test_resume_equals_no_interruption(method, minis, tmp_path, monkeypatch):
    """On mini, with phrases and entities. The command is the same but for --resume."""
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    flags = [f"--{name}={value}" for name, value in METHODS[method].sizes.items()]
    flags += "--batch_size 16 --dim 16 --dropout 0.1 --steps 8 --device cpu".split()
    flags += ["--eval_every", 4, "--log_every", 2, "--data_dir", minis, "--split", "none"]
    run(method, *flags, "--out_dir", whole)
    assert not (whole / "scores_test.json").exists()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(method, "compute_losses", interrupted(method.compute_losses, 6))
        run(method, *flags, "--out_dir", parts)
    run(method, *flags, "--out_dir", parts, "--resume")
    expected = load_tensors(whole / "last.pt")
    resumed = load_tensors(parts / "last.pt")
    for name, weight in expected["model"].items():
        assert torch.equal(resumed["model"][name], weight), name
    assert torch.equal(resumed["random"]["cpu"], expected["random"]["cpu"])
    last = train_lines(whole)[-1]
    assert train_lines(parts)[-1] | {"seconds": 0} == last | {"seconds": 0}


# ---- a data set of one's own ---------------------------------------------------------------------


class OwnData:
    """What data.Dataset's docstring lists, and no more. The task: which image is brighter?"""

    vocab = Vocab([*SPECIAL, "brighter", "darker"])
    grid = (5, 2, 3)
    max_len = 3

    def train_batches(self, batch_size, seed, first, last):
        for step in range(first, last):
            yield (self.batch(step),)

    def eval_batches(self, split, batch_size):
        yield self.batch(10**6)

    def batch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        dark = torch.rand(8, *self.grid, generator=generator)
        brighter = torch.rand(8, 1, 1, 1, generator=generator) < 0.5
        before = torch.where(brighter, dark, dark + 1)
        after = torch.where(brighter, dark + 1, dark)
        caption = torch.tensor([[common.START, 4 if x else 5, common.END] for x in brighter])
        pair_ids = [f"{i} {self.vocab.words[row[1]]}" for i, row in enumerate(caption.tolist())]
        return data.Batch(before, after, caption, pair_ids, [], [])

    def results(self, split, captions, maps, out_dir, notes=None, published=None, state=None):
        self.maps = maps
        right = [caption == pair_id.split()[1] for pair_id, caption in captions.items()]
        return {"CIDEr": 100 * sum(right) / len(right)}

    def state(self):
        return {"vocab": self.vocab.words, "grid": self.grid, "max_len": self.max_len}

    def check_state(self, state):
        assert state["vocab"] == self.vocab.words


def train_on(dataset, method, folder, **fields):
    """-> the config of a small model, and the model after training, with its checkpoint."""
    sizes = {"dim": 16, "heads": 2, "dropout": 0.0, "batch_size": 8, "device": "cpu"}
    fields = METHODS[method].sizes | METHODS[method].alone | fields
    cfg = method.Config(**sizes | fields, out_dir=str(folder))
    return cfg, *method.train(cfg, dataset)


def test_a_method_trains_on_any_object_with_these_methods(method, tmp_path, monkeypatch):
    """Evaluation hands each pair's own maps to `results`."""
    monkeypatch.setitem(sys.modules, "data", None)  # importing it fails
    dataset = OwnData()
    schedule = {"lr": 3e-3, "steps": 60, "eval_every": 30, "seed": 1}
    cfg, model, state = train_on(dataset, method, tmp_path, **schedule)
    assert method.evaluate(model, dataset, "test", cfg, tmp_path, state) == {"CIDEr": 100.0}
    assert not model.training  # no dropout in the captions that follow
    (batch,) = dataset.eval_batches("test", 8)
    ids = model.generate(batch.before, batch.after)
    for name, maps in model.attention_map(batch.before, batch.after, ids).items():
        of_pairs = [dataset.maps[pair_id][name] for pair_id in batch.pair_ids]
        torch.testing.assert_close(torch.stack(of_pairs), maps)
        assert not torch.allclose(maps[0], maps[1])  # else any pair's maps would do


def test_every_step_has_its_rate_clips_gradients_and_caps_scales(method, tmp_path, monkeypatch):
    Model = METHODS[method].model
    has_scales = hasattr(Model, "clamp_scales")
    clamp_scales = Mock()
    monkeypatch.setattr(Model, "clamp_scales", clamp_scales, raising=False)
    dataset = OwnData()
    # Adam divides by |gradient| + 1e-8, so gradients clipped to 1e-12 move the weights by 1e-4 lr.
    schedule = {"steps": 4, "log_every": 1, "warmup": 4, "lr": 1e-3, "grad_clip": 1e-12}
    cfg, model, _ = train_on(dataset, method, tmp_path, **schedule)
    rates = [row["lr"] for row in train_lines(tmp_path)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    assert clamp_scales.call_count == (4 if has_scales else 0)
    torch.manual_seed(cfg.seed)
    untrained = Model(cfg, len(dataset.vocab), dataset.grid, dataset.max_len)
    for name, weight in untrained.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), weight, atol=1e-6, rtol=0)


def test_a_data_set_may_use_the_presets_of_another(method, tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "mine", Settings(read_pairs, preset="pairs"))
    opened = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(data, "open_dataset", opened)
    with pytest.raises(KeyboardInterrupt):
        run(method, "--dataset", "mine", "--device", "cpu", "--out_dir", tmp_path / "run")
    cfg, *_ = opened.call_args.args
    for name, value in method.PRESETS["pairs"].items():
        assert getattr(cfg, name) == value


# ---- the embedded data set, pictures -------------------------------------------------------------


def test_mini_from_nothing_to_a_caption(
    method, minis, without_spacy, tmp_path, monkeypatch, capsys
):
    """A short run on mini; then its checkpoint alone captions two files."""
    monkeypatch.setattr(report, "one_caption", lambda *_: "nothing")  # choosing it takes long
    out = tmp_path / "run"
    flags = [f"--{name}={value}" for name, value in METHODS[method].sizes.items()]
    flags += "--steps 40 --batch_size 8 --log_every 5 --dim 32 --warmup 5 --device cpu".split()
    run(method, *flags, "--data_dir", minis, "--out_dir", out)
    first, *_, last = train_lines(out)
    assert last["caption"] < first["caption"]
    assert math.isfinite(last["total"])
    result = json.loads((out / "scores_test.json").read_text())
    assert set(result["accuracy"]) >= {"change type", "distractors", "all four"}
    assert "view: hardest quarter" in result["scores"]
    for group in ("total", "add", "drop"):
        assert 0 < result["scores"][group]["chance"] < 20

    checkpoint = (out / "best.pt").rename(tmp_path / "moved.pt")
    before = tmp_path / "a.jpg"
    after = tmp_path / "b.gif"
    Image.new("L", (64, 64), 3).save(before)
    Image.new("P", (64, 64), 3).save(after)
    run(method, "--caption", before, after, "--checkpoint", checkpoint, "--device", "cpu")
    caption = capsys.readouterr().out.splitlines()[-1]  # CHEERS's entities come before it
    text, maps = method.load(checkpoint, "cpu")(before, Image.open(after))  # files or pictures
    assert text == caption
    assert all(m.shape == (8, 8) for m in maps.values())


def test_the_pages_lines_export(method):
    model = small(method, 3, **METHODS[method].alone).eval()
    before, after = pictures().float()
    names = {"torch": torch, "model": model, "before": before, "after": after}
    exec(code_of_the_page("torch.export"), names)
    program = names["program"].module()
    assert torch.equal(program(before[:3], after[:3]), model.generate(before[:3], after[:3]))
