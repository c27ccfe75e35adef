"""What every method file does alike: decoding, learning, running, saving, captioning."""

import dataclasses
import inspect
import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import add_word, write_features
from PIL import Image
from released import hashed
from test_readers import write_clevr_dc

import cheers
import common
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr

MODELS = {
    scorer_cbr: scorer_cbr.SCORER,
    dirl_ccr: dirl_ccr.DIRL,
    rdd_acr: rdd_acr.RDD,
    cheers: cheers.CHEERS,
    idc_pretrain: idc_pretrain.IDC,
}
# IDC has no separate decoder: how it writes, and its two stages, are in test_idc_pretrain.py.
DECODERS = pytest.mark.parametrize("method", [scorer_cbr, dirl_ccr, rdd_acr, cheers])
# What leaves CLIP and spaCy out: their own tests are in test_rdd_acr.py and test_cheers.py.
ALONE = {
    rdd_acr: {"w_n2o": 0.0, "w_v2a": 0.0},
    cheers: {"k": 0, "gate": "none", "w_consistency": 0.0},
}

B, C, H, W, V, WORDS = 4, 5, 2, 3, 9, 12
CAPTION = torch.tensor(
    [
        [2, 4, 5, 6, 3, 0, 0, 0, 0],
        [2, 7, 3, 0, 0, 0, 0, 0, 0],
        [2, 8, 9, 10, 11, 4, 5, 3, 0],
        [2, 5, 5, 3, 0, 0, 0, 0, 0],
    ]
)


@pytest.fixture(params=MODELS, ids=lambda method: method.__name__)
def method(request):
    return request.param


def small(method, **fields):
    torch.manual_seed(0)
    config = {"dim": 8, "heads": 2} | ALONE.get(method, {})
    if method is not idc_pretrain:
        config["word_dim"] = 6
    cfg = method.Config(**config | fields)
    return MODELS[method](cfg, WORDS, (C, H, W), V).double().eval()


def whole(method, **fields):
    """A small float32 model in training mode, with all that it can learn; and {kind of step: what
    its forward takes beside before, after and caption}."""
    torch.manual_seed(0)
    config = {"dim": 8, "heads": 2, "dropout": 0.0}
    if method is not rdd_acr:
        config["layers"] = 1
    if method is not idc_pretrain:
        config["decoder_layers"] = 1
    if method is rdd_acr:
        config |= {"clip_dim": 7, "clip_width": 6, "distil_steps": 1}
    if method is idc_pretrain:
        config |= {"ffn": 12, "nabirds": "some folder"}
    cfg = method.Config(**config | fields)
    if method is cheers:
        model = cheers.CHEERS(cfg, WORDS, (C, H, W), V, torch.rand(7, 5))
        return model, {"step": (torch.tensor([[0, 1, 6]] * B),)}
    model = MODELS[method](cfg, WORDS, (C, H, W), V)
    if method is rdd_acr:
        valid = torch.ones(B, dtype=torch.bool)
        same = torch.eye(B, dtype=torch.bool)
        found = rdd_acr.Attributes(torch.rand(B, 7), valid, same)
        return model, {"step": (found, found)}
    if method is idc_pretrain:
        rewritten = torch.randint(4, WORDS, (B, 6, V))
        return model, {
            "finetune": ("finetune", torch.arange(B) % 2 == 0),
            "mlm": ("mlm",),
            "mvcl": ("mvcl",),
            "fda": ("fda", None, rewritten),
            "birds": ("birds",),
        }
    return model, {"step": ()}


def pictures():
    torch.manual_seed(1)
    return torch.rand(2, B, C, H, W, dtype=torch.float64)


def test_hash_stream():
    first = [-0.401380, 0.460570, 0.421702, 0.790581]
    assert hashed(4, 1).tolist() == pytest.approx(first, abs=1e-6)


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

# A method's own arguments, and the lines that are its own.
OWN_ARGUMENTS = [
    ", RELEASED",
    ", sample",
    ", phrases: Phrases | None = None",
    ", phrases",
    ", entities: Entities | None = None",
    ", entities",
    ", table",
]
OWN_LINES = r"^ +(model.clamp_scales|sample = |phrases = |phrases: |entities: |table = |sources = )"


def source_lines(method, name):
    """A function's lines, without what belongs to its method alone."""
    source = inspect.getsource(getattr(method, name))
    source = source.replace(MODELS[method].__name__, "MODEL")
    for argument in OWN_ARGUMENTS:
        source = source.replace(argument, "")
    source = source.replace("Run(cfg, model, sources", "Run(cfg, model, [dataset]")  # CHEERS
    source = source.replace("data.open_dataset", "open_dataset")  # IDC's adds the words of CUB
    return [line for line in source.splitlines() if not re.search(OWN_LINES, line)]


@pytest.mark.parametrize("name", ["train", "evaluate", "main"])
def test_a_diff_of_two_files_shows_the_science(method, name):
    """Training, evaluation and command line read the same, apart from a method's own lines and
    arguments."""
    if (method, name) in ((cheers, "evaluate"), (cheers, "main"), (idc_pretrain, "train")):
        pytest.skip("every pair has entities; two stages")
    assert source_lines(method, name) == source_lines(scorer_cbr, name)


def readme_blocks():
    return re.findall(r"```python\n(.*?)```", README, re.S)


README = Path(common.__file__).with_name("README.md").read_text(encoding="utf-8")
WITHOUT_PACKAGES = """
import sys
for name in ("data", "h5py", "spacy", "open_clip", "pycocoevalcap"):
    sys.modules[name] = None  # importing them fails
"""


def test_a_method_and_common_are_enough_to_use_its_model(method, tmp_path):
    """README's loop, with what README says of the other methods, in a folder of these two files;
    then its backbone in front."""
    model = MODELS[method].__name__
    example = next(block for block in readme_blocks() if "as Model" in block)
    example = example.replace("scorer_cbr", method.__name__)
    example = example.replace("SCORER", model)
    example = example.replace("1024, 14, 14", "8, 2, 3")
    config = re.search(rf"`{method.__name__}.py` by\s`(Config\(.*?\))`", README, re.S)
    if config:
        example = example.replace("Config()", config[1])
    for file in (Path(method.__file__), Path(common.__file__)):
        (tmp_path / file.name).write_text(file.read_text())
    if not hasattr(MODELS[method], "clamp_scales"):
        example = re.sub(r"    model.clamp_scales\(\).*\n", "", example)
    backbone = next(block for block in readme_blocks() if "resnet18" in block)
    shown = "print(list(ids.shape), sorted(losses))"
    script = "\n".join([WITHOUT_PACKAGES, example, backbone, shown])
    call = [sys.executable, "-c", script]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path)
    assert f"import {model} as" in script
    assert done.stdout.startswith("[4, 24] ['caption'"), done.stderr
    assert (tmp_path / "model.pt").exists()


# ---- decoding ------------------------------------------------------------------------------------


@DECODERS
def test_a_later_word_changes_no_earlier_output(method):
    model = small(method)
    before, after = pictures()
    difference = model.encode(before, after)[0]
    other = CAPTION.clone()
    other[:, 4:] = 1
    hidden = model.decoder(CAPTION, difference)[0]
    changed = model.decoder(other, difference)[0]
    torch.testing.assert_close(hidden[:, :4], changed[:, :4])


@DECODERS
def test_padding_changes_no_loss(method):
    model = small(method)
    before, after = pictures()
    expected = model(before, after, CAPTION)
    for name, loss in model(before, after, CAPTION[:, :8]).items():
        torch.testing.assert_close(loss, expected[name])


@DECODERS
def test_cached_decoding_equals_full_decoding(method):
    model = small(method)
    before, after = pictures()
    for p in model.parameters():
        if p.ndim > 1:  # large enough for captions of different words and lengths
            torch.nn.init.normal_(p)
    model.decoder.head.bias.data[[0, 3]] -= 3
    difference = model.encode(before, after)[0]
    step = model.decoder.stepper(difference)
    full = torch.full((B, 1), 2)
    for t in range(V - 1):
        hidden = model.decoder(full, difference)[0]
        logits = model.decoder.head(hidden[:, -1])
        torch.testing.assert_close(step(full[:, -1], t), logits)
        logits[:, 1] = -math.inf
        full = torch.cat([full, logits.argmax(-1, keepdim=True)], 1)
    ids = model.generate(before, after).tolist()
    for ours, plain in zip(ids, full.tolist(), strict=True):
        length = 0
        while length < V and plain[length] not in (0, 3):
            length += 1
        assert ours == plain[:length] + [0] * (V - length)
    assert len({tuple(row) for row in ids}) > 1, ids


@DECODERS
def test_attention_map_is_a_mean_over_the_words(method):
    model = small(method)
    before, after = pictures()
    look = model.decoder.layers[-1].cross_attention
    seen = {}
    look.query.register_forward_hook(lambda module, args, out: seen.update(query=out))
    look.key.register_forward_hook(lambda module, args, out: seen.update(key=out))
    model.decoder(CAPTION, model.encode(before, after)[0])
    scores = look.scores(seen["query"], seen["key"][:, : H * W])
    maps = next(iter(model.attention_map(before, after, CAPTION).values()))  # the decoder's
    assert maps.shape == (B, H, W)
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(B, dtype=torch.float64))
    # Of "START w1 END" the row of START has predicted the only word.
    expected = scores[1].softmax(-1).mean(0)[0]
    torch.testing.assert_close(maps[1].flatten(), expected)


@DECODERS
def test_blind_model_sees_nothing(method):
    model = small(method, blind=True)
    before, after = pictures()
    seen = model.encode(before, after)[0]
    torch.testing.assert_close(seen, model.encode(after * 2, before)[0])


@pytest.mark.parametrize("use_coords", [True, False])
@pytest.mark.parametrize("size", [(C, 1, W), (C, H, 1), (1, H, W), (C, W, H)])
def test_features_of_another_shape_are_refused(method, use_coords, size):
    """None of them may broadcast to the grid."""
    has_coords = "use_coords" in {f.name for f in dataclasses.fields(method.Config)}
    fields = {"use_coords": use_coords} if has_coords else {}
    model = small(method, **fields)
    features = torch.rand(B, *size, dtype=torch.float64)
    text = re.escape(f"(C, H, W) = {(C, H, W)} expected, {size} found")
    with pytest.raises(ValueError, match=text):
        model.generate(features, features)


# ---- learning ------------------------------------------------------------------------------------


def test_overfits_eight_pairs(method, prepared, tiny):
    flags = "--dim 32 --heads 4 --dropout 0 --lr 3e-3".split()
    argv = [*tiny, *flags, "--data_dir", str(prepared)]
    cfg, _ = common.parse_args(method.Config, method.PRESETS, "method", "doc", argv)
    dataset = data.open_dataset(cfg)
    torch.manual_seed(0)
    model = MODELS[method](cfg, len(dataset.vocab), dataset.grid, dataset.max_len)
    pairs = []  # four changed, four distractor pairs
    for scene in dataset.scenes["train"][:4]:
        pairs += scene.pairs
    batch = dataset.batch(pairs).to("cpu")
    more = ["finetune"] if method is idc_pretrain else []
    adam = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for _ in range(300):
        losses = method.compute_losses(model, (batch,), cfg, *more)
        adam.zero_grad()
        losses["total"].backward()
        adam.step()
    captions = dataset.vocab.decode(model.eval().generate(batch.before, batch.after))
    assert captions == [" ".join(data.tokenize(p.captions[0])) for p in pairs]


def test_a_caption_longer_than_max_len_is_named(method):
    fields = {}
    if method is dirl_ccr:
        fields = {"ccr_pool": "padded"}  # to max_len: must not cut what is longer
    model, kinds = whole(method, **fields)
    before, after = pictures().float()
    caption = torch.full((B, V + 1), 4)
    for kind, more in kinds.items():
        if kind != "birds":  # which have no captions
            with pytest.raises(ValueError, match=f"{V + 1} ids.*max_len, {V}"):
                model(before, after, caption, *more)
    rows = kinds["step"] if method is cheers else ()
    with pytest.raises(ValueError, match="max_len"):
        model.attention_map(before, after, torch.full((B, V + 2), 4), *rows)


# ---- compiled, in half precision -----------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()  # models of earlier tests count against its limits


def learned(call, model, kind, more):
    """Losses of one kind of step, and their gradients."""
    before, after = pictures().float()
    caption = CAPTION
    if kind == "birds":
        caption = torch.arange(2 * B).view(B, 2) % 3
    torch.manual_seed(0)  # of masks
    losses = call(before, after, caption, *more)
    total = sum(loss.mean() for loss in losses.values())
    parameters = [p for p in model.parameters() if p.requires_grad]
    return losses, torch.autograd.grad(total, parameters, allow_unused=True)


def test_the_model_compiles_as_one_graph(method, fresh_compiler):
    """Losses and gradients of every kind of step are those without torch.compile."""
    model, kinds = whole(method)
    # One backward graph suffices; it takes most of the time.
    backend = "aot_eager" if method is scorer_cbr else "eager"
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    for kind, more in kinds.items():
        expected = learned(model, model, kind, more)
        torch.testing.assert_close(learned(compiled, model, kind, more), expected)


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_follows_float32(method, dtype, variant):
    """Losses to a hundredth, gradients to the three digits of bfloat16 through all layers."""
    fields = {"dim": 32, "heads": 4}
    if variant == "released":
        if not hasattr(method, "RELEASED"):
            pytest.skip("no code was released")
        fields |= method.RELEASED["all"]
    model, kinds = whole(method, **fields)
    for kind, more in kinds.items():
        expected, exact = learned(model, model, kind, more)
        with torch.autocast("cpu", dtype):
            losses, rough = learned(model, model, kind, more)
        for name, loss in losses.items():
            value = expected[name].mean().item()
            assert loss.mean().item() == pytest.approx(value, rel=0.01, abs=0.01), (kind, name)
        exact = torch.cat([x.flatten() for x in exact if x is not None])
        rough = torch.cat([x.flatten() for x in rough if x is not None])
        assert (rough - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_sums_over_a_full_batch_do_not_overflow(dtype):
    """400 images of 196 cells: sums and products are beyond float16's 65504."""
    torch.manual_seed(0)
    y_bef = (30 * torch.randn(400, 196, 16)).to(dtype)
    y_aft = y_bef + 3 * torch.randn(400, 196, 16).to(dtype)
    with torch.autocast("cpu", dtype):
        c = dirl_ccr.channel_correlation(y_bef, y_aft, 1e-5)
    expected = dirl_ccr.channel_correlation(y_bef.double(), y_aft.double(), 1e-5)
    torch.testing.assert_close(c.double(), expected, atol=1e-5, rtol=0)
    q = 8 * y_bef
    k = 8 * y_aft[:4]  # images; 400 would take a minute
    log_scale = torch.ones(())
    for matching in ("mtm", "tm", "max"):
        with torch.autocast("cpu", dtype):
            scores = scorer_cbr.similarity(q, k, log_scale, matching, 2)
        expected = scorer_cbr.similarity(q.double(), k.double(), log_scale, matching, 2)
        assert expected.max() > 65504
        torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", [scorer_cbr, cheers, rdd_acr])
def test_training_in_bfloat16_follows_float32(method):
    """Autocast on the CPU in place of CUDA's: thirty steps of training have the same mean losses,
    within 10 %."""
    means = []
    for bfloat16 in (False, True):
        model, kinds = whole(method, dim=32, heads=4)
        before, after = pictures().float()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        mean = {}
        for _ in range(30):
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                losses = model(before, after, CAPTION, *kinds["step"])
            losses = {name: loss.mean() for name, loss in losses.items()}
            total = method.total_loss(losses, model.cfg)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            for name, loss in losses.items():
                mean[name] = mean.get(name, 0) + loss.item() / 30
        means.append(mean)
        assert losses["caption"] < 0.7
    assert means[1] == pytest.approx(means[0], rel=0.1, abs=0.03)


@pytest.mark.parametrize("method", [scorer_cbr, idc_pretrain])
def test_nothing_is_compiled_twice(method, prepared, tiny, tmp_path, monkeypatch, fresh_compiler):
    """Over epochs whose last batch is smaller: one graph for each kind of pairs, size and task."""
    original = method.compute_losses
    graphs = []
    sizes = set()
    tasks = set()

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def compiled(model, batches, cfg, task="", *more):
        if not graphs:
            model.compile(fullgraph=True, dynamic=False, backend=backend)
        sizes.add(len(batches[0].pair_ids))
        tasks.add(task)
        if method is idc_pretrain:
            more = (task, *more)
        return original(model, batches, cfg, *more)

    monkeypatch.setattr(method, "compute_losses", compiled)
    stages = []
    if method is idc_pretrain:
        stages = "--mlm 0 --fda 0 --pretrain_steps 4 --pretrain_batch 3".split()
    run(method, *tiny, *stages, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    assert sizes == {2, 3}
    assert len(tasks) == (2 if method is idc_pretrain else 1)
    assert len(graphs) == 2 * len(sizes) * len(tasks)


# ---- running -------------------------------------------------------------------------------------


def run(method, *argv):
    method.main([str(a) for a in argv])


def read_log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    """Step -> that line of the log, without the seconds."""
    found = {}
    for row in read_log(folder):
        if row["event"] == "train":
            del row["seconds"]
            found[row["step"]] = row
    return found


def load_tensors(path):
    return torch.load(path, weights_only=True)


def test_a_run_leaves_what_it_should(method, prepared, tiny, tmp_path, capsys):
    out = tmp_path / "run"
    run(method, *tiny, "--data_dir", prepared, "--out_dir", out)
    files = {path.name for path in out.iterdir()}
    checkpoints = {"last.pt", "best.pt"}
    results = {"captions_test.json", "scores_test.json", "samples.png"}
    assert files == {"config.json", "log.jsonl", "curves.png"} | checkpoints | results
    events = [row["event"] for row in read_log(out)]
    assert events.count("train") == 4
    assert events.count("eval") == 2
    assert all(math.isfinite(row["total"]) for row in losses(out).values())
    captions = json.loads((out / "captions_test.json").read_text())
    assert len(captions) == 10
    assert set(captions[0]) == {"image_id", "caption"}
    groups = json.loads((out / "scores_test.json").read_text())["scores"]
    assert {"total", "semantic change", "only distractor", "move"} <= set(groups)
    assert "CIDEr" in capsys.readouterr().out
    run(method, "--eval", out / "best.pt", "--split", "val", "--device", "cpu")
    assert (out / "scores_val.json").exists()


@pytest.mark.parametrize("method", [scorer_cbr])
def test_another_checkpoint_writes_files_of_its_own(method, prepared, tiny, tmp_path):
    out = tmp_path / "run"
    run(method, *tiny, "--data_dir", prepared, "--out_dir", out)
    kept = (out / "scores_test.json").read_bytes()
    run(method, "--eval", out / "last.pt", "--device", "cpu")
    assert (out / "captions_test-last.json").exists()
    assert (out / "scores_test-last.json").exists()
    assert (out / "scores_test.json").read_bytes() == kept


def test_a_data_set_of_one_pair_a_scene(method, tiny, tmp_path):
    root = tmp_path / "dc"
    out = tmp_path / "run"
    write_clevr_dc(root)
    write_features("clevr_dc", root)
    flags = ["--dataset", "clevr_dc", "--steps", "4"]
    run(method, *tiny, *flags, "--data_dir", root, "--out_dir", out)
    captions = json.loads((out / "captions_test.json").read_text())
    assert [c["image_id"] for c in captions] == ["000010.png", "000011.png"]
    scores = json.loads((out / "scores_test.json").read_text())["scores"]
    assert set(scores) == {"total", data.ONE_CAPTION, "no change"}
    assert (out / "samples.png").exists()
    assert math.isfinite(losses(out)[4]["total"])


def at_call(count, original, action):
    """compute_losses that hands its result number `count` to `action`."""
    calls = []

    def changed(*args):
        calls.append(1)
        result = original(*args)
        if len(calls) == count:
            return action(result)
        return result

    return changed


def test_resume_equals_no_interruption(method, prepared, tiny, tmp_path, monkeypatch):
    run(method, *tiny, "--data_dir", prepared, "--out_dir", tmp_path / "whole")

    def interrupt(result):
        signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(method, "compute_losses", at_call(5, method.compute_losses, interrupt))
        with pytest.raises(SystemExit) as e:
            run(method, *tiny, "--data_dir", prepared, "--out_dir", tmp_path / "parts")
    assert e.value.code == 130
    assert load_tensors(tmp_path / "parts" / "last.pt")["step"] == 5
    run(method, "--resume", "--out_dir", tmp_path / "parts", "--device", "cpu")
    expected = load_tensors(tmp_path / "whole" / "last.pt")
    resumed = load_tensors(tmp_path / "parts" / "last.pt")
    for name, weight in expected["model"].items():
        assert torch.equal(resumed["model"][name], weight), name
    assert resumed["best"] == expected["best"]
    assert torch.equal(resumed["random"]["cpu"], expected["random"]["cpu"])
    assert losses(tmp_path / "parts")[8] == losses(tmp_path / "whole")[8]


@pytest.mark.parametrize("method", [scorer_cbr])
def test_a_checkpoint_of_other_features_is_refused(method, prepared, tiny, tmp_path):
    run(method, *tiny, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    add_word(prepared, "zebra")
    with pytest.raises(ValueError, match="--data_dir"):
        run(method, "--eval", tmp_path / "run" / "best.pt", "--device", "cpu")


@pytest.mark.parametrize("method", [scorer_cbr])
def test_eval_of_pairs_that_were_trained_on_gets_a_note(method, tmp_path, tiny, capsys):
    """pairs.csv edited after training: two training pairs are test pairs now."""
    splits = ["train"] * 6 + ["val", "test"]
    rows = [f"{n}a.png,{n}b.png,{split},it opened" for n, split in enumerate(splits)]
    table = tmp_path / "pairs.csv"
    table.write_text("\n".join(["before,after,split,captions", *rows]))
    write_features("pairs", tmp_path)
    folders = ["--data_dir", tmp_path, "--out_dir", tmp_path / "run"]
    run(method, *tiny, "--dataset", "pairs", *folders, "--steps", 1)
    command = ["--eval", tmp_path / "run" / "best.pt", "--device", "cpu"]
    capsys.readouterr()
    run(method, *command)
    assert "was trained on" not in capsys.readouterr().out
    text = table.read_text()
    for n in (0, 3):
        text = text.replace(f"{n}b.png,train", f"{n}b.png,test")
    table.write_text(text)
    run(method, *command)
    assert "trained on 2 of the 3 test pairs" in capsys.readouterr().out


@pytest.mark.parametrize("method", [scorer_cbr])
def test_eval_draws_no_mini(method, tmp_path, tiny, prepared):
    run(method, *tiny, "--data_dir", prepared, "--out_dir", tmp_path / "run")
    file = tmp_path / "run" / "best.pt"
    state = load_tensors(file)
    torch.save(state | {"config": state["config"] | {"dataset": "mini"}}, file)
    command = ["--eval", file, "--data_dir", tmp_path / "mini", "--device", "cpu"]
    with pytest.raises(FileNotFoundError, match="data.py mini"):
        run(method, *command)
    assert not (tmp_path / "mini").exists()


# ---- the embedded data set, pictures -------------------------------------------------------------


@pytest.fixture(scope="module")
def minis(tmp_path_factory):
    return tmp_path_factory.mktemp("smoke")


@pytest.fixture
def smoke(method, minis):
    """The embedded data set, rendered once, and learned from for a moment by each method: folder of
    data, of the run."""
    out = minis / method.__name__
    if not out.exists():
        flags = "--scenes 60 --steps 40 --log_every 5 --dim 32 --warmup 5 --device cpu".split()
        if method is idc_pretrain:
            flags += ["--lr", "8e-3", "--pretrain_steps", "0"]
        else:
            flags += ["--lr", "2e-3"]
        run(method, *flags, "--data_dir", minis / "mini", "--out_dir", out)
    return minis / "mini", out


def test_embedded_data_set_from_nothing(method, smoke):
    root, out = smoke
    log = losses(out)
    assert log[40]["caption"] < log[5]["caption"]
    assert math.isfinite(log[40]["total"])
    result = json.loads((out / "scores_test.json").read_text())
    assert set(result["accuracy"]) >= {"change type", "distractors", "all four"}
    assert "view: hardest quarter" in result["scores"]
    maps = set(result["pointing"]) - {"chance", "boxes"}
    expected = {"attention"}
    if method is rdd_acr:
        expected = {"decoder", "objects", "actions"}
    assert maps == expected
    assert {"total", "add", "drop"} <= set(result["pointing"]["chance"])
    assert result["pointing"]["boxes"]["drop"] == 2
    assert (out / "samples.png").exists()
    other = ["--scenes", "70", "--data_dir", root, "--out_dir", out / "other"]
    with pytest.raises(ValueError, match="--data_dir"):  # it was made with other settings
        run(method, *other, "--device", "cpu")


def test_any_two_files_are_captioned_with_the_checkpoint_alone(method, smoke, tmp_path, capsys):
    _, out = smoke
    checkpoint = tmp_path / "moved.pt"
    checkpoint.write_bytes((out / "best.pt").read_bytes())
    before = tmp_path / "a.jpg"
    after = tmp_path / "b.gif"
    Image.new("L", (31, 57), 3).save(before)
    Image.new("P", (200, 90), 3).save(after)
    with_model = ["--checkpoint", checkpoint, "--device", "cpu"]
    run(method, "--caption", before, after, *with_model, "--out", tmp_path / "out.png")
    caption = capsys.readouterr().out.strip().split("\n")[-1]  # after CHEERS's entities
    words = torch.load(checkpoint, weights_only=True)["vocab"]
    assert caption
    assert set(caption.split()) <= set(words)
    assert (tmp_path / "out.png").stat().st_size > 1000
    captioner = method.load(checkpoint, "cpu")
    text, maps = captioner(before, Image.open(after))  # files or pictures
    assert text == caption
    assert all(m.shape == (8, 8) for m in maps.values())
    broken = tmp_path / "c.png"
    broken.write_bytes(b"no picture")
    with pytest.raises(ValueError, match="c.png"):
        run(method, "--caption", before, broken, *with_model)


@pytest.mark.parametrize("method", [scorer_cbr])
def test_the_readmes_line_captions_a_pair_from_python(smoke, tmp_path, monkeypatch):
    line = re.search(r"`(caption, maps = [^`]*)`", README)[1]
    (tmp_path / "best.pt").write_bytes((smoke[1] / "best.pt").read_bytes())
    for name in ("before", "after"):
        Image.new("RGB", (30, 20)).save(tmp_path / f"{name}.png")
    monkeypatch.chdir(tmp_path)
    names = {"scorer_cbr": scorer_cbr}
    exec(line, names)
    assert names["caption"]
    assert names["maps"]["attention"].shape == (8, 8)


PAIRS = Path(__file__).resolve().parents[2] / "shared" / "data" / "pairs"


@pytest.mark.skipif(not PAIRS.exists(), reason="the photographs are not here")
@pytest.mark.parametrize(
    "names", [("levir_before.png", "levir_after.png"), ("bird_1.jpg", "bird_2.jpg")]
)
def test_real_photographs_are_captioned(method, smoke, names, capsys):
    pair = [PAIRS / name for name in names]
    run(method, "--caption", *pair, "--checkpoint", smoke[1] / "best.pt", "--device", "cpu")
    assert capsys.readouterr().out.strip()


def test_the_script_starts_and_bad_input_is_one_line(method, tmp_path):
    script = [sys.executable, str(Path(method.__file__))]
    flags = ["--dataset", "clevr_change", "--data_dir", str(tmp_path / "none")]
    done = subprocess.run([*script, *flags], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "splits.json" in done.stderr
    assert not list(tmp_path.iterdir())


def test_help_has_the_losses_weights(method, capsys):
    with pytest.raises(SystemExit):
        run(method, "--help")
    assert "weight of L_" in " ".join(capsys.readouterr().out.split())
