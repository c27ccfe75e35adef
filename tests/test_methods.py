"""What all method files have in common: decoding, learning, running, captioning."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import (
    CAPTION,
    WORDS,
    B,
    C,
    H,
    L,
    N,
    W,
    add_word,
    colours,
    mean,
    pictures,
    train_lines,
)
from PIL import Image

import cheers
import common
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
import scores

MODELS = {
    scorer_cbr: scorer_cbr.SCORER,
    dirl_ccr: dirl_ccr.DIRL,
    rdd_acr: rdd_acr.RDD,
    cheers: cheers.CHEERS,
    idc_pretrain: idc_pretrain.IDC,
}
# IDC has no separate decoder: its decoding and its two stages are tested in test_idc_pretrain.py.
DECODERS = pytest.mark.parametrize("method", [scorer_cbr, dirl_ccr, rdd_acr, cheers])
# Flags that avoid CLIP and spaCy, which are tested in test_rdd_acr.py and test_cheers.py.
ALONE = {
    rdd_acr: {"w_n2o": 0.0, "w_v2a": 0.0},
    cheers: {"k": 0, "gate": "none", "w_consistency": 0.0},
}
SIZES = {
    cheers: {"word_dim": 6, "clip_dim": 5},
    rdd_acr: {"word_dim": 6, "clip_dim": 7, "clip_width": 6, "object_vectors": 3},
    idc_pretrain: {"ffn": 12, "nabirds": "some folder"},
}


@pytest.fixture(params=MODELS, ids=lambda method: method.__name__)
def method(request):
    return request.param


def small(method, max_len=L, **fields):
    """A small model in training mode, without dropout, with all of its trainable parts."""
    torch.manual_seed(0)
    sizes = {"dim": 8, "heads": 2, "dropout": 0.0} | SIZES.get(method, {"word_dim": 6})
    cfg = method.Config(**sizes | fields)
    return MODELS[method](cfg, WORDS, (C, H, W), max_len)


def one_layer(method):
    """Fields of a model's Config that make it as shallow as can be."""
    names = ("layers", "decoder_layers", "distil_steps")
    return {name: 1 for name in names if hasattr(method.Config, name)}


def entities_of(model):
    """A model's input besides the images: CHEERS's entities of each pair."""
    if isinstance(model, cheers.CHEERS) and model.cfg.k:
        torch.manual_seed(2)
        return (torch.rand(B, 3, 5).to(next(model.parameters()).dtype),)
    return ()


def steps_of(model, dtype=torch.float32):
    """{kind of step: the arguments of the model's forward besides before, after and caption}. IDC's
    kinds are its tasks."""
    if isinstance(model, rdd_acr.RDD):
        valid = torch.ones(B, dtype=torch.bool)
        same = torch.eye(B, dtype=torch.bool)
        found = rdd_acr.Attributes(torch.rand(B, 7, dtype=dtype), valid, same)
        return {"step": (found, found)}
    if isinstance(model, idc_pretrain.IDC):
        rewritten = torch.randint(4, WORDS, (B, 6, L))
        kinds = {
            "finetune": (torch.arange(B) % 2 == 0,),
            "mlm": (),
            "mvcl": (),
            "fda": (rewritten,),
        }
        if model.cfg.nabirds:
            kinds["birds"] = ()
        return kinds
    return {"step": entities_of(model)}


def hidden_states(model, ids, context):
    """The decoder's states (B, L, D), from which it predicts words."""
    hidden, *_ = model.decoder(ids, context)
    return hidden


def task_of(kind):
    """The keywords of the model's forward."""
    return {} if kind == "step" else {"task": getattr(idc_pretrain.IDC, kind)}


def caption_of(kind):
    """The captions or, for photographs of birds, their classes in place of captions."""
    return torch.arange(2 * B).view(B, 2) % 3 if kind == "birds" else CAPTION


def flags_of(method, tiny):
    """conftest's tiny for one method, ALONE."""
    flags = list(tiny)
    if method is idc_pretrain:
        place = flags.index("--word_dim")
        del flags[place : place + 2]
        flags += ["--pretrain_steps", "0", "--ffn", "24", "--extractor", "resnet101-layer3"]
    for name, value in ALONE.get(method, {}).items():
        flags += [f"--{name}", str(value)]
    return flags


@pytest.fixture
def tiny(method, tiny):
    return flags_of(method, tiny)


# ---- the files -----------------------------------------------------------------------------------

README = Path(common.__file__).with_name("README.md").read_text(encoding="utf-8")
ASSETS = Path(common.__file__).with_name("assets")
PACKAGES = ("data", "mini", "h5py", "spacy", "open_clip", "pycocoevalcap")
# In a loop without CLIP; the docstrings of rdd_acr.Phrases and cheers.Entities say so.
WITHOUT_CLIP = {
    rdd_acr: "w_n2o=0, w_v2a=0",
    cheers: 'k=0, gate="none", w_consistency=0',
}


def test_a_method_and_common_are_enough_to_use_its_model(method, tmp_path, monkeypatch):
    """README's loop, with README's changes for the other methods. The method's file is imported
    anew from a folder without the other files, except those that its docstring says to copy."""
    name = method.__name__
    model = MODELS[method].__name__
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    loop = next(block for block in blocks if "as Model" in block)
    loop = loop.replace("scorer_cbr", name)
    loop = loop.replace("SCORER", model)
    loop = loop.replace("1024, 14, 14", "8, 2, 3")
    without_clip = WITHOUT_CLIP.get(method, "")
    loop = loop.replace("device=device)", f"device=device, {without_clip})")
    if not hasattr(MODELS[method], "clamp_scales"):
        loop = re.sub(r"    model.clamp_scales\(\).*\n", "", loop)
    assert f"import {model} as" in loop

    (tmp_path / f"{name}.py").write_bytes(Path(method.__file__).read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    others = [other.__name__ for other in MODELS if other is not method]
    to_copy, _, _ = method.__doc__.partition("To copy: ")[2].partition(". ")
    if "matching.py" not in to_copy:
        others.append("matching")
    for missing in (*PACKAGES, *others):
        monkeypatch.setitem(sys.modules, missing, None)  # importing it fails
    monkeypatch.delitem(sys.modules, name)
    names = {}
    exec(loop, names)
    assert sys.modules[name].__file__ == str(tmp_path / f"{name}.py")
    assert names["ids"].shape == (4, 24)
    assert names["losses"]["caption"].isfinite()


@pytest.mark.parametrize("method", [scorer_cbr])
def test_the_script_starts_and_bad_input_is_one_line(method, tmp_path):
    script = [sys.executable, str(Path(method.__file__))]
    flags = ["--dataset", "clevr_change", "--data_dir", str(tmp_path / "none")]
    done = subprocess.run([*script, *flags], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "splits.json" in done.stderr
    assert not list(tmp_path.iterdir())


# ---- decoding ------------------------------------------------------------------------------------


@DECODERS
def test_a_later_word_changes_no_earlier_output(method):
    model = small(method).double()
    before, after = pictures()
    context = model.encode(before, after, *entities_of(model))[0]
    other = CAPTION.clone()
    other[:, 4:] = 1
    hidden = hidden_states(model, CAPTION, context)
    changed = hidden_states(model, other, context)
    torch.testing.assert_close(hidden[:, :4], changed[:, :4])


@DECODERS
def test_padding_changes_no_loss(method):
    model = small(method).double()
    pair = pictures()
    caption = CAPTION[[0, 1, 3, 1]]
    more = steps_of(model, torch.float64)["step"]
    torch.testing.assert_close(model(*pair, caption[:, :5], *more), model(*pair, caption, *more))


@pytest.mark.parametrize(
    "method, fields",
    [(scorer_cbr, {}), (dirl_ccr, {}), (rdd_acr, {}), (cheers, {}), (cheers, {"gate": "scalar"})],
)
def test_captions_are_the_likeliest_words_one_by_one(method, fields):
    model = small(method, **fields).double().eval()
    before, after = pictures()
    for p in model.parameters():
        if p.ndim > 1:  # large enough for captions of different words and lengths
            torch.nn.init.normal_(p)
    model.decoder.head.bias.data[[0, 3]] -= 3
    entities = entities_of(model)
    context = model.encode(before, after, *entities)[0]
    full = torch.full((B, 1), 2)
    for _ in range(L - 1):
        hidden = hidden_states(model, full, context)
        logits = model.decoder.head(hidden[:, -1])
        logits[:, 1] = -math.inf
        full = torch.cat([full, logits.argmax(-1, keepdim=True)], 1)
    ids = model.generate(before, after, *entities).tolist()
    for ours, plain in zip(ids, full.tolist(), strict=True):
        length = 0
        while length < L and plain[length] not in (0, 3):
            length += 1
        assert ours == plain[:length] + [0] * (L - length)
    assert len({tuple(row) for row in ids}) > 1, ids


@DECODERS
def test_attention_map_is_a_mean_over_the_words(method):
    model = small(method).double()
    before, after = pictures()
    entities = entities_of(model)
    look = model.decoder.layers[-1].cross_attention
    seen = {}
    look.query.register_forward_hook(lambda module, args, out: seen.update(query=out))
    look.key.register_forward_hook(lambda module, args, out: seen.update(key=out))
    maps = model.attention_map(before, after, CAPTION, *entities)
    scores = look.scores(seen["query"], seen["key"][:, : H * W])
    # In "START w1 ... w6 END", the rows of START to w5 predict the words.
    expected = scores[2].softmax(-1).mean(0)[:6].mean(0).view(H, W)
    torch.testing.assert_close(next(iter(maps.values()))[2], expected)


def test_nothing_is_broadcast_to_the_grid_or_to_another_number_of_images(method):
    model = small(method).double()
    before, after = pictures()
    for size in ((C, 1, W), (1, H, W), (C, W, H)):
        features = torch.rand(B, *size).double()
        with pytest.raises(AssertionError, match="expected"):
            model.generate(features, features, *entities_of(model))
    for one, other in ((before[:1], after), (before, after[:2])):
        with pytest.raises(AssertionError):
            model.encode(one, other, *entities_of(model))


# ---- losses and learning -------------------------------------------------------------------------


@DECODERS
def test_caption_loss_against_loop(method):
    """A mean over all words; RDD+ACR's over the words of each caption, then over the captions."""
    model = small(method).double()
    before, after = pictures()
    context = model.encode(before, after, *entities_of(model))[0]
    hidden = hidden_states(model, CAPTION, context)
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
    expected = mean(sentences) if method is rdd_acr else mean(words)
    more = steps_of(model, torch.float64)["step"]
    assert model(before, after, CAPTION, *more)["caption"].item() == pytest.approx(expected)


WEIGHTS = {
    scorer_cbr: {"match": "w_match", "cbr": "w_cbr"},  # Eq. 13
    dirl_ccr: {"dirl": "w_dirl", "ccr": "w_ccr"},  # Eq. 16
    cheers: {"common": "w_consistency", "different": "w_consistency", "match": "w_match"},  # Eq. 19
}


@pytest.mark.parametrize(
    "method, fields",
    [
        (scorer_cbr, {"w_match": 0.3, "w_cbr": 0.07}),
        (scorer_cbr, {"w_match": 0.0, "w_cbr": 0.07}),
        (dirl_ccr, {"w_dirl": 0.03, "w_ccr": 0.2}),
        (dirl_ccr, {"w_dirl": 0.03, "w_ccr": 0.0}),
        (cheers, {"w_consistency": 0.7, "w_match": 0.4}),
    ],
)
def test_total_is_the_papers_sum_and_a_mean_over_both_kinds_of_pairs(method, fields):
    """RDD+ACR merges both kinds into one batch, and IDC has losses for one kind alone: see their
    own tests."""
    model = small(method, device="cpu", **fields)
    before, after = pictures().float()
    entities = entities_of(model)
    changed = data.Batch(before, after, CAPTION, [], [], [])
    distractors = data.Batch(after, before, CAPTION, [], [], [])
    more = [lambda images: entities[0]] if entities else []
    losses = method.compute_losses(model, (changed, distractors), model.cfg, *more)
    first = model(before, after, CAPTION, *entities)
    second = model(after, before, CAPTION, *entities)
    expected = 0.0
    for name in first:
        weight = 1 if name == "caption" else fields[WEIGHTS[method][name]]
        assert weight > 0  # a loss that does not count is not computed
        expected += weight * (first[name] + second[name]).item() / 2
    assert losses["total"].item() == pytest.approx(expected, rel=1e-5)


LEARNING = [
    (scorer_cbr, {"w_match": 0.1, "w_cbr": 0.1}),
    (scorer_cbr, {"w_cbr": 0.1, "match_layer": "last", "fusion": "hadamard", "matching": "max"}),
    (dirl_ccr, {"w_dirl": 0.1, "w_ccr": 0.1}),
    (dirl_ccr, {"w_dirl": 0.1, "w_ccr": 0.1, "difference": "residual", "layers": 3}),
    (rdd_acr, {}),
    (rdd_acr, {"share_blocks": False, "order": "v+n"}),
    (rdd_acr, {"residual": False, "order": "v&n", "prompt": "fixed"}),
    (cheers, {}),
    (cheers, {"gate": "scalar", "temperature": "one", "cre": False}),
    (cheers, {"dre": False, "gate": "none"}),
    (cheers, {"layers": 0, "w_consistency": 0.0, "w_match": 0.0}),
    (cheers, ALONE[cheers]),
    (idc_pretrain, {}),
    (idc_pretrain, idc_pretrain.RELEASED["all"]),
    (idc_pretrain, {"difference_encoder": False, "nabirds": ""}),
]
# A parameter that shifts all scores of a softmax has no gradient; that of RDD+ACR's prompts comes
# through CLIP, see test_rdd_acr.py.
WITHOUT_GRADIENT = ("attention.key.bias", "noun_prompt", "verb_prompt")


@pytest.mark.parametrize("method, fields", LEARNING)
def test_every_parameter_learns(method, fields):
    model = small(method, dropout=0.1, **fields).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    start = {name: p.clone() for name, p in model.named_parameters()}
    before, after = pictures()
    total = 0.0
    for kind, more in steps_of(model, torch.float64).items():
        total = total + sum(model(before, after, caption_of(kind), *more, **task_of(kind)).values())
    total.backward()
    optimizer.step()
    for name, p in model.named_parameters():
        if not name.endswith(WITHOUT_GRADIENT):
            assert p.grad is not None and p.grad.any(), f"no gradient reaches {name}"
            assert not torch.equal(p, start[name]), f"{name} does not move"


def test_overfits_eight_pairs(method, prepared, tiny):
    flags = "--dim 32 --heads 4 --dropout 0 --lr 3e-3".split()
    argv = [*tiny, *flags, "--data_dir", str(prepared)]
    cfg, _ = common.parse_args(method.Config, method.PRESETS, {}, argv)
    dataset = data.open_dataset(cfg)
    torch.manual_seed(0)
    model = MODELS[method](cfg, len(dataset.vocab), dataset.grid, dataset.max_len)
    pairs = []  # four changed, four distractor pairs
    for scene in dataset.release.scenes["train"][:4]:
        pairs += scene.pairs
    batch = dataset.batch(pairs).to("cpu")
    expected = [" ".join(data.tokenize(p.captions[0])) for p in pairs]
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


# ---- compiled ------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()  # models of earlier tests count against its limits


def learned(call, model, kind, more):
    """Losses of one kind of step, and their gradients."""
    before, after = pictures().float()
    torch.manual_seed(0)  # of masks
    losses = call(before, after, caption_of(kind), *more, **task_of(kind))
    total = sum(loss.mean() for loss in losses.values())
    parameters = [p for p in model.parameters() if p.requires_grad]
    return losses, torch.autograd.grad(total, parameters, allow_unused=True)


def test_the_model_compiles_as_one_graph(method, fresh_compiler):
    """Losses and gradients of every kind of step equal those without torch.compile."""
    model = small(method, **one_layer(method))
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    for kind, more in steps_of(model).items():
        expected = learned(model, model, kind, more)
        torch.testing.assert_close(learned(compiled, model, kind, more), expected)


def test_compiled_losses_have_gradients_in_float32(fresh_compiler):
    """DIRL's Eq. 3 under autocast (here the CPU's), as it is compiled on CUDA."""

    def gradient(function):
        y = torch.rand(2, B, N, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            c = function(y[0], y[1], 1e-5)
        return torch.autograd.grad(c.diagonal().sum(), y)

    plain = dirl_ccr.channel_correlation
    with torch._functorch.config.patch(backward_pass_autocast="same_as_forward"):
        common.set_up_device("cuda")
        compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(gradient(compiled), gradient(plain))
    common.set_up_device("cpu")


def test_a_run_compiles_one_graph(method, prepared, tiny, tmp_path, monkeypatch, fresh_compiler):
    """Several epochs, with validation: both kinds of pairs and all batches share a graph. IDC has a
    graph for each task and stage."""
    of_every_step = "mean_losses" if method is idc_pretrain else "compute_losses"
    original = getattr(method, of_every_step)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def compiled(model, *args):
        if not graphs:
            model.compile(fullgraph=True, dynamic=False, backend=backend)
        return original(model, *args)

    monkeypatch.setattr(method, of_every_step, compiled)
    flags = [f"--{name}=1" for name in one_layer(method)]
    if method is idc_pretrain:
        flags += "--mlm 1 --mvcl 0 --fda 0 --pretrain_steps 8 --pretrain_batch 3".split()
    run(method, *tiny, *flags, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    assert len(graphs) == (2 if method is idc_pretrain else 1)


# ---- running -------------------------------------------------------------------------------------

# What follows is common.py's and data.py's.
SCORER = pytest.mark.parametrize("method", [scorer_cbr])


def run(method, *argv):
    method.main([str(a) for a in argv])


def load_tensors(path):
    return torch.load(path, weights_only=True)


@SCORER
def test_a_run_leaves_what_it_should(method, prepared, tiny, tmp_path):
    out = tmp_path / "run"
    run(method, *tiny, "--data_dir", prepared, "--out_dir", out)
    files = {path.name for path in out.iterdir()}
    checkpoints = {"last.pt", "best.pt"}
    results = {"captions_test.json", "references_test.json", "scores_test.json", "samples_test.png"}
    assert files == {"log.jsonl", "curves.png"} | checkpoints | results
    events = [row["event"] for row in common.read_log(out / "log.jsonl")]
    assert events.count("train") == 4
    assert events.count("eval") == 2
    # Another checkpoint's files have a folder of their own.
    run(method, "--eval", out / "last.pt", "--split", "val", "--device", "cpu")
    assert (out / f"last-{prepared.name}" / "scores_val.json").exists()
    # So have those on other data, whose captions may have words that the model cannot say.
    other = tmp_path / "other"
    shutil.copytree(prepared, other)
    add_word(other, "zebra")
    run(method, "--eval", out / "best.pt", "--data_dir", other, "--device", "cpu")
    assert (out / "best-other" / "scores_test.json").exists()


@pytest.fixture(scope="module")
def minis(tmp_path_factory):
    """A small mini, drawn once."""
    folder = tmp_path_factory.mktemp("mini")
    data.main(["mini", "--data_dir", str(folder), "--scenes", "60", "--device", "cpu"])
    return folder


def interrupted(compute_losses, at):
    """Like compute_losses, but its call number `at` ends as if by Ctrl-C."""
    calls = []

    def wrapped(*args):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return compute_losses(*args)

    return wrapped


@DECODERS
def test_resume_equals_no_interruption(method, minis, tmp_path, monkeypatch):
    """On mini, with RDD+ACR's phrases and CHEERS's entities. The command is the same but for
    --resume. Without scores in the end."""
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    flags = "--batch_size 16 --dim 16 --dropout 0.1 --steps 8 --device cpu"
    flags = [*flags.split(), "--eval_every", 4, "--log_every", 2, "--data_dir", minis]
    flags += ["--split", "none"]
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

    vocab = data.Vocab([*data.SPECIAL, "brighter", "darker"])
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

    def results(self, split, captions, maps, out_dir, notes=None, published=None):
        self.maps = maps
        right = [caption == pair_id.split()[1] for pair_id, caption in captions.items()]
        return {"CIDEr": 100 * sum(right) / len(right)}

    def state(self):
        return {"vocab": self.vocab.words, "grid": self.grid, "max_len": self.max_len}

    def check_state(self, state):
        assert state["vocab"] == self.vocab.words


def train_on(dataset, method, folder, **fields):
    """-> the config of a small model, and the model after training."""
    more = {"ffn": 32, "pretrain_steps": 0} if method is idc_pretrain else {"word_dim": 8}
    sizes = {"dim": 16, "heads": 2, "dropout": 0.0} | more | ALONE.get(method, {})
    cfg = method.Config(**sizes, **fields, batch_size=8, out_dir=str(folder), device="cpu")
    alone = [None] if method in (rdd_acr, cheers) else []  # no phrases, no entities
    return cfg, method.train(cfg, dataset, *alone)


def test_a_method_trains_on_any_object_with_these_methods(method, tmp_path, monkeypatch):
    """Evaluation hands each pair's own maps to `results`."""
    monkeypatch.setitem(sys.modules, "data", None)  # importing it fails
    dataset = OwnData()
    cfg, model = train_on(dataset, method, tmp_path, steps=60, eval_every=30, lr=3e-3, seed=1)
    entities = [None] if method is cheers else []
    assert method.evaluate(model, dataset, *entities, "test", cfg, tmp_path) == {"CIDEr": 100.0}
    assert not model.training  # no dropout in the captions that follow
    (batch,) = dataset.eval_batches("test", 8)
    ids = model.generate(batch.before, batch.after)
    for name, maps in model.attention_map(batch.before, batch.after, ids).items():
        of_pairs = [dataset.maps[pair_id][name] for pair_id in batch.pair_ids]
        torch.testing.assert_close(torch.stack(of_pairs), maps)
        assert not torch.allclose(maps[0], maps[1])  # else any pair's maps would do


@DECODERS
def test_tokens_beside_the_difference_run_to_the_end(method, tmp_path, monkeypatch):
    """Another input of the decoder, concatenated as README says. Maps stay over the cells."""
    encode = MODELS[method].encode

    def with_tokens(model, before, after, *more):
        context, *others = encode(model, before, after, *more)
        tokens = torch.ones(len(before), 4, model.cfg.dim)
        if method is cheers:
            difference, entities = context
            return (torch.cat([difference, tokens], 1), entities), *others
        return torch.cat([context, tokens], 1), *others

    monkeypatch.setattr(MODELS[method], "encode", with_tokens)
    dataset = OwnData()
    cfg, model = train_on(dataset, method, tmp_path, steps=2, eval_every=2)
    entities = [None] if method is cheers else []
    method.evaluate(model, dataset, *entities, "test", cfg, tmp_path)
    (batch,) = dataset.eval_batches("test", 8)
    maps = model.attention_map(batch.before, batch.after, batch.caption)
    heat = next(iter(maps.values()))
    assert heat.shape == (8, *dataset.grid[1:])
    torch.testing.assert_close(heat.sum((1, 2)), torch.ones(8))


def test_every_step_has_its_rate_clips_gradients_and_caps_scales(method, tmp_path, monkeypatch):
    Model = MODELS[method]
    clamp_scales = Mock()
    monkeypatch.setattr(Model, "clamp_scales", clamp_scales, raising=False)
    dataset = OwnData()
    # Adam divides by |gradient| + 1e-8, so gradients clipped to 1e-12 move the weights by 1e-4 lr.
    schedule = {"steps": 4, "log_every": 1, "warmup": 4, "lr": 1e-3, "grad_clip": 1e-12}
    cfg, model = train_on(dataset, method, tmp_path, **schedule)
    rates = [row["lr"] for row in train_lines(tmp_path)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    assert clamp_scales.call_count == (4 if method in (scorer_cbr, cheers) else 0)
    torch.manual_seed(cfg.seed)
    untrained = Model(cfg, len(dataset.vocab), dataset.grid, dataset.max_len)
    for name, weight in untrained.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), weight, atol=1e-6, rtol=0)


# ---- the embedded data set, pictures -------------------------------------------------------------


def test_mini_from_nothing_to_a_caption(
    method, minis, without_spacy, tmp_path, monkeypatch, capsys
):
    """A short run on mini; then its checkpoint alone captions two files."""
    monkeypatch.setattr(scores, "one_caption", lambda _: "nothing")  # choosing it takes long
    out = tmp_path / "run"
    flags = "--steps 40 --batch_size 8 --log_every 5 --dim 32 --warmup 5 --device cpu".split()
    if method is idc_pretrain:
        flags += "--lr 8e-3 --pretrain_steps 0 --layers 1".split()
    else:
        flags += ["--lr", "2e-3"]
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
    caption = capsys.readouterr().out.strip().split("\n")[-1]  # after CHEERS's entities
    text, maps = method.load(checkpoint, "cpu")(before, Image.open(after))  # files or pictures
    assert text == caption != ""
    assert all(m.shape == (8, 8) for m in maps.values())


def code_of(page: str) -> list[str]:
    """The blocks of Python code of a page in docs/."""
    text = Path(common.__file__).with_name("docs").joinpath(page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.S)


def test_the_guides_lines_caption_pairs_from_python(tmp_path, monkeypatch):
    run = tmp_path / "runs/scorer_cbr-pairs"
    run.mkdir(parents=True)
    shutil.copyfile(ASSETS / "scorer_cbr-mini.pt", run / "best.pt")
    for name in ("before", "after"):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{name}.png")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "guide"}
    for code in code_of("own_pictures.md"):
        exec(code, names)
    assert names["caption"]
    heat = names["maps"]["attention"]
    assert heat.shape == (8, 8)
    assert heat.sum().item() == pytest.approx(1)
    pairs = names["captioner"].pairs([("before.png", "after.png")] * 2)
    assert [caption for caption, _ in pairs] == [names["caption"]] * 2
    assert colours("attention.png") > 100


def test_the_pages_lines_export_and_pretrain():
    (export,) = [code for code in code_of("extending.md") if "torch.export" in code]
    model = small(scorer_cbr, 3).eval()
    before, after = pictures().float()
    names = {"torch": torch, "model": model, "before": before, "after": after}
    exec(export, names)
    program = names["program"].module()
    assert torch.equal(program(before[:3], after[:3]), model.generate(before[:3], after[:3]))

    names |= {"IDC": idc_pretrain.IDC, "model": small(idc_pretrain), "caption": CAPTION}
    (task,) = re.findall(r"`(model\(before, after, caption, task=.*?)`", README)
    assert eval(task, names)["mlm"].isfinite()
