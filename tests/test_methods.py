"""What every method file does alike: decoding, learning, running, saving, captioning."""

import dataclasses
import inspect
import json
import math
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import write_features
from PIL import Image
from released import hashed
from test_readers import write_clevr_dc
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cheers
import common
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr

MODELS = {scorer_cbr: scorer_cbr.SCORER, dirl_ccr: dirl_ccr.DIRL, rdd_acr: rdd_acr.RDD, cheers: cheers.CHEERS,
          idc_pretrain: idc_pretrain.IDC}  # fmt: skip
# IDC has no separate decoder: how it writes, and its two stages, are in test_idc_pretrain.py.
DECODERS = pytest.mark.parametrize("method", [method for method in MODELS if method is not idc_pretrain])
# What leaves CLIP and spaCy out: their own tests are in test_rdd_acr.py and test_cheers.py.
ALONE = {rdd_acr: {"w_n2o": 0.0, "w_v2a": 0.0}, cheers: {"k": 0, "gate": "none", "w_consistency": 0.0}}

B, C, H, W, V, WORDS = 4, 5, 2, 3, 9, 12
CAPTION = torch.tensor([[2, 4, 5, 6, 3, 0, 0, 0, 0], [2, 7, 3, 0, 0, 0, 0, 0, 0], [2, 8, 9, 10, 11, 4, 5, 3, 0],
                        [2, 5, 5, 3, 0, 0, 0, 0, 0]])  # fmt: skip


@pytest.fixture(params=MODELS, ids=lambda method: method.__name__)
def method(request):
    return request.param


def small(method, **fields):
    torch.manual_seed(0)
    cfg = method.Config(**{"dim": 8, "word_dim": 6, "heads": 2} | ALONE.get(method, {}) | fields)
    return MODELS[method](cfg, WORDS, (C, H, W), V).double().eval()


def whole(method, **fields):
    """A small float32 model with all that it can learn, training; and what its forward takes beside pair and caption,
    by kind of step."""
    torch.manual_seed(0)
    own = {rdd_acr: {"clip_dim": 7, "clip_width": 6, "distil_steps": 1},
           idc_pretrain: {"ffn": 12, "nabirds": "some folder"}}.get(method, {})  # fmt: skip
    own |= {"layers": 1} if method is not rdd_acr else {}
    own |= {"decoder_layers": 1} if method is not idc_pretrain else {}
    cfg = method.Config(**{"dim": 8, "heads": 2, "dropout": 0.0} | own | fields)
    model = MODELS[method](cfg, WORDS, (C, H, W), V, *([torch.rand(7, 5)] if method is cheers else []))
    found = rdd_acr.Attributes(torch.rand(B, 7), torch.ones(B, dtype=torch.bool), torch.eye(B, dtype=torch.bool))
    rewritten = torch.randint(4, WORDS, (B, 6, V))
    return model, {
        rdd_acr: {"step": (found, found)}, cheers: {"step": (torch.tensor([[0, 1, 6]] * B),)},
        idc_pretrain: {"finetune": ("finetune", True), "mlm": ("mlm",), "mvcl": ("mvcl",),
                       "fda": ("fda", None, rewritten), "birds": ("birds",)},
    }.get(method, {"step": ()})  # fmt: skip


def pictures():
    torch.manual_seed(1)
    return torch.rand(2, B, C, H, W, dtype=torch.float64)


def test_hash_stream():
    assert hashed(4, 1).tolist() == pytest.approx([-0.401380, 0.460570, 0.421702, 0.790581], abs=1e-6)


def flags_of(method, tiny):
    """conftest's tiny for one method, ALONE."""
    if method is idc_pretrain:
        place = tiny.index("--word_dim")
        tiny = (
            tiny[:place]
            + tiny[place + 2 :]
            + ["--pretrain_steps", "0", "--ffn", "24", "--extractor", "resnet101-layer3"]
        )
    return tiny + [x for name, value in ALONE.get(method, {}).items() for x in (f"--{name}", str(value))]


@pytest.fixture
def tiny(method, tiny):
    return flags_of(method, tiny)


def test_a_diff_of_two_files_shows_the_science(method):
    """Training, evaluation and command line read the same, apart from a method's own lines and arguments."""

    def lines(module, name):
        source = inspect.getsource(getattr(module, name)).replace(MODELS[module].__name__, "MODEL")
        source = source.replace("data.open_dataset", "open_dataset")  # IDC's adds the words of CUB
        added = r', sample=cfg.val_decode == "sample" and out_dir is None|, RELEASED|, phrases|, entities(.table)?'
        source = re.sub(added, "", source)
        return [line for line in source.splitlines() if not re.search(r"clamp_scales|phrases =|entities =", line)]

    for name in ("train", "evaluate", "main"):
        if (method, name) in ((cheers, "evaluate"), (cheers, "main"), (idc_pretrain, "train")):
            continue  # every pair has entities; two stages
        ours, first = "\n".join(lines(method, name)), "\n".join(lines(scorer_cbr, name))
        if method is cheers:
            ours = ours.replace("tuple[MODEL, Entities]", "MODEL").replace("validation, and its entities", "validation")
        assert ours == first, name


def readme_blocks():
    return re.findall(r"```python\n(.*?)```", README, re.S)


README = Path(common.__file__).with_name("README.md").read_text(encoding="utf-8")
WITHOUT_PACKAGES = """
import sys
for name in ("data", "h5py", "spacy", "open_clip", "pycocoevalcap"):
    sys.modules[name] = None  # importing them fails
"""


def test_a_method_and_common_are_enough_to_use_its_model(method, tmp_path):
    """README's example, with what README says of the other methods, in a folder of these two files."""
    example = next(block for block in readme_blocks() if "as Model" in block)
    example = example.replace("scorer_cbr", method.__name__).replace("SCORER", MODELS[method].__name__)
    if config := re.search(rf"`{method.__name__}.py` by\s`(Config\(.*?\))`", README, re.S):
        example = example.replace("Config()", config[1])
    for file in (Path(method.__file__), Path(common.__file__)):
        (tmp_path / file.name).write_text(file.read_text())
    script = WITHOUT_PACKAGES + example.replace("1024, 14, 14", "8, 2, 3") + "print(list(ids.shape))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert f"import {MODELS[method].__name__} as" in script and done.stdout.strip() == "[4, 24]", done.stderr


# ---- decoding --------------------------------------------------------------------------------------------------------


@DECODERS
def test_a_later_word_changes_no_earlier_output(method):
    model, (before, after) = small(method), pictures()
    difference, other = model.encode(before, after)[0], CAPTION.clone()
    other[:, 4:] = 1
    torch.testing.assert_close(model.decoder(CAPTION, difference)[0][:, :4], model.decoder(other, difference)[0][:, :4])


@DECODERS
def test_padding_changes_no_loss(method):
    model, (before, after) = small(method), pictures()
    for name, loss in model(before, after, CAPTION[:, :8]).items():
        torch.testing.assert_close(loss, model(before, after, CAPTION)[name])


@DECODERS
def test_cached_decoding_equals_full_decoding(method):
    model, (before, after) = small(method), pictures()
    for p in (p for p in model.parameters() if p.ndim > 1):  # large enough for captions of different words and lengths
        torch.nn.init.normal_(p)
    model.decoder.head.bias.data[[0, 3]] -= 3
    difference = model.encode(before, after)[0]
    step, full = model.decoder.stepper(difference), torch.full((B, 1), 2)
    for t in range(V - 1):
        logits = model.decoder.head(model.decoder(full, difference)[0][:, -1])
        torch.testing.assert_close(step(full[:, -1], t), logits)
        logits[:, 1] = -math.inf
        full = torch.cat([full, logits.argmax(-1, keepdim=True)], 1)
    ids = model.generate(before, after)
    for ours, plain in zip(ids.tolist(), full.tolist(), strict=True):
        stop = next((i for i, w in enumerate(plain) if w in (0, 3)), V)
        assert ours == plain[:stop] + [0] * (V - stop)
    assert len({tuple(row) for row in ids.tolist()}) > 1, ids


@DECODERS
def test_attention_map_is_a_mean_over_the_words(method):
    model, (before, after) = small(method), pictures()
    look, seen = model.decoder.layers[-1].cross_attention, {}
    for name in ("query", "key"):
        getattr(look, name).register_forward_hook(lambda module, args, out, name=name: seen.update({name: out}))
    model.decoder(CAPTION, model.encode(before, after)[0])
    scores = look.scores(seen["query"], seen["key"][:, : H * W])
    maps = next(iter(model.attention_map(before, after, CAPTION).values()))  # the decoder's
    assert maps.shape == (B, H, W)
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(B, dtype=torch.float64))
    rows = scores[1].softmax(-1).mean(0)[:1]  # "START w1 END": the row of START predicted the only word
    torch.testing.assert_close(maps[1].flatten(), rows.mean(0))


@DECODERS
def test_blind_model_sees_nothing(method):
    model, (before, after) = small(method, blind=True), pictures()
    torch.testing.assert_close(model.encode(before, after)[0], model.encode(after * 2, before)[0])


# ---- learning --------------------------------------------------------------------------------------------------------


def test_overfits_eight_pairs(method, prepared, tiny):
    flags = ["--data_dir", str(prepared), "--dim", "32", "--heads", "4", "--dropout", "0", "--lr", "3e-3"]
    cfg, _ = method.parse_args(method.Config, method.PRESETS, "method", "doc", tiny + flags)
    dataset = data.open_dataset(cfg)
    torch.manual_seed(0)
    model = MODELS[method](cfg, len(dataset.vocab), dataset.grid, dataset.max_len)
    pairs = [p for scene in dataset.scenes["train"][:4] for p in scene.pairs]  # four changed, four distractor pairs
    batch, adam = dataset.batch(pairs).to("cpu"), torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for _ in range(300):
        adam.zero_grad()
        method.losses_of(model, (batch,), cfg, *(["finetune"] if method is idc_pretrain else []))["total"].backward()
        adam.step()
    told = dataset.vocab.decode(model.eval().generate(batch.before, batch.after))
    assert told == [" ".join(data.tokenize(p.captions[0])) for p in pairs]


class NoWaiting(TorchDispatchMode):
    """Fails where a GPU would wait for the host: a tensor read back, or sent by a copy that blocks."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, given = (
            func(*args, **(kwargs or {})),
            [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)],
        )
        devices = [x.device.type for x in given if x.ndim or x.device.type == "meta"]
        if func is torch.ops.aten._to_copy.default and devices[:1] != [out.device.type]:
            assert devices == ["cpu"] and kwargs.get("non_blocking"), f"{func} of {given} waits"
        else:
            assert len(set(devices)) < 2, f"{func} mixes devices"
        return out


def test_a_step_does_not_wait_for_the_host(method, monkeypatch):
    """Losses, gradients, captions and maps of tensors that have a device, "meta" in the place of a GPU, and a shape,
    but no content: to read one, or a shape that depends on one, is an error."""

    def two_words(step, count, max_len, device, sample=False):
        return [step(torch.full((count,), 2, device=device), t) for t in range(2)][-1]

    def tensor(*args, device="cpu", original=torch.tensor, **more):
        assert device == "cpu", "torch.tensor waits until its content has been sent"
        return original(*args, **more)

    monkeypatch.setattr(method, "decode", two_words)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # not for this device
    monkeypatch.setattr(torch, "tensor", tensor)
    with FakeTensorMode():
        model, kinds = whole(method, device="meta")
        for m in model.modules():  # what model.to("cuda") moves; it cannot move these tensors
            for name, x in m._parameters.items():
                m._parameters[name] = x if x is None else torch.nn.Parameter(x.to("meta"))
            m._buffers.update({name: x if x is None else x.to("meta") for name, x in m._buffers.items()})
        batch = data.Batch(*torch.rand(2, B, C, H, W).half(), torch.ones(B, V, dtype=torch.long), ["a"] * B, ["b"] * B,
                           [("a", "b")] * B)  # fmt: skip
        found = rdd_acr.Attributes(
            *(torch.ones(shape, device="meta") > 0 for shape in ((2 * B, 7), 2 * B, (2 * B, 2 * B)))
        )
        found, entities = found._replace(text=found.text.float()), object.__new__(cheers.Entities)
        entities.__dict__ |= {"phrases": ["cube"], "device": "meta", "indices": {("a", "b"): torch.zeros(3).long()}}
        phrases = SimpleNamespace(encode=lambda *_: {"nouns": found, "verbs": found})
        others = torch.ones(B, 6, V).long()
        classes = dataclasses.replace(batch, caption=torch.ones(B, 2, dtype=torch.long))
        with NoWaiting():
            for kind in kinds:
                more = {rdd_acr: (phrases,), cheers: (entities,),
                        idc_pretrain: (kind, lambda ids: others[: len(ids)])}.get(method, ())  # fmt: skip
                losses = method.losses_of(model, (classes,) if kind == "birds" else (batch, batch), model.cfg, *more)
                losses["total"].backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if hasattr(model, "clamp_scales"):
                model.clamp_scales()
            there, seen = batch.to("meta"), [entities(batch)] if method is cheers else []
            assert model.generate(there.before, there.after, *seen).device.type == "meta"
            model.attention_map(there.before, there.after, there.caption, *seen)


# ---- compiled, in bfloat16 -------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()  # models of earlier tests count against its limits


def learned(call, model, kind, more):
    """Losses of one kind of step, and their gradients."""
    before, after = pictures().float()
    torch.manual_seed(0)  # of masks
    caption = torch.arange(2 * B).view(B, 2) % 3 if kind == "birds" else CAPTION
    losses = call(before, after, caption, *more)
    return losses, torch.autograd.grad(sum(x.mean() for x in losses.values()), model.parameters(), allow_unused=True)


def test_the_model_compiles_as_one_graph(method, fresh_compiler):
    """Losses and gradients of every kind of step are those without torch.compile."""
    model, kinds = whole(method)
    backend = "aot_eager" if method is scorer_cbr else "eager"  # one backward graph suffices; it takes most of the time
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    for step in kinds.items():
        torch.testing.assert_close(learned(compiled, model, *step), learned(model, model, *step))


def test_bfloat16_follows_float32(method):
    """Losses to half a percent (of 1 where they are near 0), gradients to the three digits of bfloat16 through all
    layers."""
    model, kinds = whole(method, dim=32, heads=4)
    for step in kinds.items():
        expected, gradients = learned(model, model, *step)
        with torch.autocast("cpu", torch.bfloat16):
            losses, rough = learned(model, model, *step)
        for name, loss in losses.items():
            assert loss.mean().item() == pytest.approx(expected[name].mean().item(), rel=0.005, abs=0.02), name
        exact, rough = (torch.cat([x.flatten() for x in of if x is not None]) for of in (gradients, rough))
        assert (rough - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("method", [scorer_cbr, cheers, rdd_acr])
def test_training_in_bfloat16_follows_float32(method):
    """Autocast on the CPU in place of CUDA's: thirty steps of training have the same mean losses, within 10 %."""
    means = []
    for bfloat16 in (False, True):
        model, kinds = whole(method, dim=32, heads=4)
        ((_, inputs),) = kinds.items()
        optimizer, (before, after) = torch.optim.Adam(model.parameters(), lr=3e-3), pictures().float()
        sums = {}
        for _ in range(30):
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                losses = model(before, after, CAPTION, *inputs)
            total = method.total_loss({name: loss.mean() for name, loss in losses.items()}, model.cfg)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            sums = {name: sums.get(name, 0) + loss.mean().item() for name, loss in losses.items()}
        means.append({name: x / 30 for name, x in sums.items()})
        assert losses["caption"].mean() < 0.7
    assert means[1] == pytest.approx(means[0], rel=0.1, abs=0.03)


@pytest.mark.parametrize("method", [scorer_cbr, idc_pretrain])
def test_nothing_is_compiled_twice(method, prepared, tiny, tmp_path, monkeypatch, fresh_compiler):
    """Over epochs whose last batch is smaller: one graph for each kind of pairs, size and task."""
    original, graphs, tasks = method.losses_of, [], set()

    def compiled(model, batches, *more):
        if not graphs:
            model.compile(fullgraph=True, dynamic=False, backend=lambda graph, _: graphs.append(1) or graph)
        sizes.add(len(batches[0].pair_ids))
        tasks.add(more[1] if method is idc_pretrain else "")
        return original(model, batches, *more)

    sizes = set()
    monkeypatch.setattr(method, "losses_of", compiled)
    stages = "--mlm 0 --fda 0 --pretrain_steps 4 --pretrain_batch 3".split() if method is idc_pretrain else []
    run(method, *tiny, *stages, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    assert sizes == {2, 3} and len(tasks) == (2 if method is idc_pretrain else 1)
    assert len(graphs) == 2 * len(sizes) * len(tasks)


# ---- running ---------------------------------------------------------------------------------------------------------


def run(method, *argv):
    method.main([str(a) for a in argv])


def losses(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {x["step"]: {k: v for k, v in x.items() if k != "seconds"} for x in lines if x["event"] == "train"}


def test_a_run_leaves_what_it_should(method, prepared, tiny, tmp_path, capsys):
    run(method, *tiny, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    files = {p.name for p in (tmp_path / "run").iterdir()}
    assert files == {"config.json", "log.jsonl", "last.pt", "best.pt", "captions_test.json", "scores_test.json",
                     "samples.png", "curves.png"}  # fmt: skip
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [x["event"] for x in log].count("train") == 4 and [x["event"] for x in log].count("eval") == 2
    assert all(math.isfinite(x["total"]) for x in log if x["event"] == "train")
    captions = json.loads((tmp_path / "run" / "captions_test.json").read_text())
    assert len(captions) == 10 and {"image_id", "caption"} == set(captions[0])
    groups = json.loads((tmp_path / "run" / "scores_test.json").read_text())["scores"]
    assert {"total", "semantic change", "only distractor", "move"} <= set(groups)
    assert "CIDEr" in capsys.readouterr().out
    run(method, "--eval", tmp_path / "run" / "best.pt", "--split", "val", "--device", "cpu")
    assert (tmp_path / "run" / "scores_val.json").exists()


def test_a_data_set_of_one_pair_a_scene(method, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "java_works", lambda: False)  # METEOR takes most of an evaluation's time
    write_clevr_dc(tmp_path / "dc")
    write_features("clevr_dc", tmp_path / "dc")
    flags = ["--dataset", "clevr_dc", "--steps", "4", "--data_dir", tmp_path / "dc", "--out_dir", tmp_path / "run"]
    run(method, *tiny, *flags)
    captions = json.loads((tmp_path / "run" / "captions_test.json").read_text())
    assert [c["image_id"] for c in captions] == ["000010.png", "000011.png"]
    scores = json.loads((tmp_path / "run" / "scores_test.json").read_text())["scores"]
    assert set(scores) == {"total", data.ONE_CAPTION, "no change"}
    assert (tmp_path / "run" / "samples.png").exists() and math.isfinite(losses(tmp_path / "run")[4]["total"])


def test_resume_equals_no_interruption(method, prepared, tiny, tmp_path, monkeypatch):
    run(method, *tiny, "--data_dir", prepared, "--out_dir", tmp_path / "whole")
    original = method.losses_of

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    calls = []
    monkeypatch.setattr(method, "losses_of", interrupted)
    with pytest.raises(SystemExit) as e:
        run(method, *tiny, "--data_dir", prepared, "--out_dir", tmp_path / "parts")
    assert e.value.code == 130
    assert torch.load(tmp_path / "parts" / "last.pt", weights_only=True)["step"] == 5
    monkeypatch.setattr(method, "losses_of", original)
    run(method, "--resume", "--out_dir", tmp_path / "parts", "--device", "cpu")
    a, b = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "parts"))
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"]) and a["best"] == b["best"]
    assert torch.equal(a["random"]["cpu"], b["random"]["cpu"])
    assert losses(tmp_path / "whole")[8] == losses(tmp_path / "parts")[8]


def test_a_loss_that_is_not_finite_stops_the_run(method, prepared, tiny, tmp_path, monkeypatch, capsys):
    original = method.losses_of

    def broken(*args):
        calls.append(1)
        parts = original(*args)
        return parts | {"total": parts["total"] * float("nan")} if len(calls) == 7 else parts

    calls = []
    monkeypatch.setattr(method, "losses_of", broken)
    with pytest.raises(FloatingPointError, match="step 7.*caption"):
        run(method, *tiny, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert state["step"] == 4 and all(v.isfinite().all() for v in state["model"].values())


def test_a_second_run_does_not_overwrite_the_first(method, prepared, tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.pt").write_bytes(b"a week of work")
    (tmp_path / "run" / "config.json").write_text(json.dumps(dataclasses.asdict(method.Config())))
    with pytest.raises(ValueError, match="--overwrite"):
        run(method, *tiny, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    assert (tmp_path / "run" / "last.pt").read_bytes() == b"a week of work"


def test_a_checkpoint_of_other_features_is_refused(method, prepared, tiny, tmp_path):
    run(method, *tiny, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    words = json.loads((prepared / "vocab.json").read_text())
    (prepared / "vocab.json").write_text(json.dumps(words | {"zebra": len(words)}))
    with pytest.raises(ValueError, match="--data_dir"):
        run(method, "--eval", tmp_path / "run" / "best.pt", "--device", "cpu")


@pytest.fixture(scope="module")
def minis(tmp_path_factory):
    return tmp_path_factory.mktemp("smoke")


@pytest.fixture
def smoke(method, minis):
    """The embedded data set, rendered once, and learned from for a moment by each method: folder of data, of the
    run."""
    out = minis / method.__name__
    if not out.exists():
        flags = "--scenes 60 --steps 40 --log_every 5 --dim 32 --lr 2e-3 --warmup 5 --device cpu".split()
        flags += ["--lr", "8e-3", "--pretrain_steps", "0"] if method is idc_pretrain else []
        run(method, *flags, "--data_dir", minis / "mini", "--out_dir", out)
    return minis / "mini", out


def test_embedded_data_set_from_nothing(method, smoke):
    root, out = smoke
    log = losses(out)
    assert log[40]["caption"] < log[5]["caption"] and math.isfinite(log[40]["total"])
    result = json.loads((out / "scores_test.json").read_text())
    assert set(result["accuracy"]) >= {"change type", "distractors", "all four"}
    assert "view: hardest quarter" in result["scores"]
    maps = set(result["pointing"]) - {"chance", "boxes"}
    assert maps == ({"decoder", "objects", "actions"} if method is rdd_acr else {"attention"})
    assert {"total", "add", "drop"} <= set(result["pointing"]["chance"]) and result["pointing"]["boxes"]["drop"] == 2
    with Image.open(out / "samples.png") as sheet:
        assert sheet.width > 1000
    with pytest.raises(ValueError, match="--data_dir"):  # other settings than those it was made with
        run(method, "--scenes", "70", "--data_dir", root, "--out_dir", out / "other", "--device", "cpu")


def test_any_two_files_are_captioned_with_the_checkpoint_alone(method, smoke, tmp_path, capsys):
    checkpoint, pair = tmp_path / "moved.pt", []
    checkpoint.write_bytes((smoke[1] / "best.pt").read_bytes())
    for name, mode, size in (("a.jpg", "L", (31, 57)), ("b.gif", "P", (200, 90))):
        Image.new(mode, size, 3).save(tmp_path / name)
        pair.append(tmp_path / name)
    run(method, "--caption", *pair, "--checkpoint", checkpoint, "--device", "cpu", "--out", tmp_path / "out.png")
    caption = capsys.readouterr().out.strip().split("\n")[-1]  # CHEERS tells the entities first
    words = json.loads((smoke[0] / "vocab.json").read_text())
    assert caption and set(caption.split()) <= set(words) and (tmp_path / "out.png").stat().st_size > 1000
    said, maps = method.load(checkpoint, "cpu")(pair[0], Image.open(pair[1]))  # from Python: files or pictures
    assert said == caption and all(m.shape == (8, 8) for m in maps.values())
    (tmp_path / "c.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="c.png is not a readable image"):
        run(method, "--caption", pair[0], tmp_path / "c.png", "--checkpoint", checkpoint, "--device", "cpu")
    with pytest.raises(ValueError, match="--caption and --checkpoint go together"):
        run(method, "--caption", *pair)


@pytest.mark.parametrize("method", [scorer_cbr])
def test_the_readmes_three_lines_caption_a_pair(smoke, tmp_path, monkeypatch):
    example = next(block for block in readme_blocks() if ".load(" in block)
    (tmp_path / "runs/scorer_cbr-mini").mkdir(parents=True)
    (tmp_path / "runs/scorer_cbr-mini/best.pt").write_bytes((smoke[1] / "best.pt").read_bytes())
    for name in ("before", "after"):
        Image.new("RGB", (30, 20)).save(tmp_path / f"{name}.png")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(example, names)
    assert names["caption"] and names["maps"]["attention"].shape == (8, 8)


PAIRS = Path(__file__).resolve().parents[2] / "shared" / "data" / "pairs"


@pytest.mark.skipif(not PAIRS.exists(), reason="the photographs are not here")
@pytest.mark.parametrize("names", [("levir_before.png", "levir_after.png"), ("bird_1.jpg", "bird_2.jpg")])
def test_real_photographs_are_captioned(method, smoke, names, capsys):
    run(method, "--caption", *(PAIRS / n for n in names), "--checkpoint", smoke[1] / "best.pt", "--device", "cpu")
    assert capsys.readouterr().out.strip()


def test_the_script_starts_and_bad_input_is_one_line(method, tmp_path):
    script = Path(method.__file__)
    call = [sys.executable, str(script), "--dataset", "clevr_change", "--data_dir", str(tmp_path / "none")]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "splits.json" in done.stderr
    assert not list(tmp_path.iterdir())
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "weight of L_" in " ".join(done.stdout.split())


