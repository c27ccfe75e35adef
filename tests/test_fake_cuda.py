"""Tests of the CUDA path without a GPU: every method's steps, captions and maps on PyTorch's fake
tensors, which have a shape and a device (cuda:0), but no content.

An operation that mixes devices, that makes the host wait for the GPU, or that reads the content of
a tensor is an error. Autocast works as on a GPU: most matrix products must be in bfloat16, and all
losses in float32. Speed, memory and results cannot be tested this way.

Everything runs in a separate process, because it patches PyTorch:
    python tests/test_fake_cuda.py
"""

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cheers
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
from common import preset

GPU = torch.device("cuda:0")
B = 8  # pairs
WORDS = 76  # in the vocabulary
LENGTH = 24  # ids of a caption
CLIP = 768  # ViT-L-14's width

MODELS = {
    scorer_cbr: scorer_cbr.SCORER,
    dirl_ccr: dirl_ccr.DIRL,
    rdd_acr: rdd_acr.RDD,
    cheers: cheers.CHEERS,
    idc_pretrain: idc_pretrain.IDC,
}
# Changes to each method's config. {} is the paper's.
CASES = {
    scorer_cbr: [
        {},
        {"variant": "released"},
        {"amp": False},
        {"difference": "subtract", "w_match": 0, "w_cbr": 0},
        {"matching": "mean"},
        {"matching": "max"},
    ],
    dirl_ccr: [{}, {"variant": "released"}, {"correlate": False}],
    rdd_acr: [
        {},
        {"gde": False, "order": "none", "w_n2o": 0, "w_v2a": 0},
        {"order": "v+n"},
        {"residual": False},
    ],
    cheers: [
        {},
        {"layers": 0, "k": 0, "gate": "none", "w_consistency": 0, "w_match": 0},
        {"gate": "scalar"},
    ],
    idc_pretrain: [{}, {"variant": "released"}, {"difference_encoder": False}],
}


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 14),
    reason="in older versions of PyTorch (2.6) fake CUDA tensors end the process",
)
def test_no_method_mixes_devices_waits_or_leaves_bfloat16():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= sum(len(cases) for cases in CASES.values())


# ---- the process ---------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Counts matrix products by dtype. AssertionError if an operation mixes devices, or if a copy
    makes the host wait."""

    def __init__(self):
        super().__init__()
        self.products = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # A number on the CPU may meet tensors on the GPU.
        devices = {x.device for x in given if x.ndim or x.device == GPU}
        if func is torch.ops.aten._to_copy.default and devices != {out.device}:
            assert out.device == GPU and kwargs.get("non_blocking"), f"{func} of {given} waits"
        assert len(devices) < 2, f"{func} mixes devices"
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "convolution", "token_match"):
            self.products[given[-1].dtype] += 1
        return out


def pretend_to_have_a_gpu():
    """Patches the two functions by which autocast checks for a GPU."""
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False


def move_to_gpu(model):
    """model.to(GPU), which PyTorch refuses for tensors without content."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                moved = nn.Parameter(p.detach().to(GPU), p.requires_grad)
                module._parameters[name] = moved
        for name, x in module._buffers.items():
            if x is not None:
                module._buffers[name] = x.to(GPU)


def nodes_behind(loss):
    """The nodes of a loss's autograd graph, each before all nodes that it passes gradients to."""
    nodes = {loss.grad_fn: None}  # a dict keeps their order
    waiting = [loss.grad_fn]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in nodes:
                nodes[following] = None
                waiting.append(following)
    leaves = []  # nodes that accumulate a parameter's gradient
    inner = []
    for node in nodes:
        if hasattr(node, "variable"):
            leaves.append(node)
        else:
            inner.append(node)
    inner.sort(key=lambda node: node._sequence_nr(), reverse=True)  # in reverse order of creation
    return inner + leaves


@torch.no_grad()
def backward(loss):
    """loss.backward(), node by node, because PyTorch's own loop would need a GPU driver."""
    gradients = {loss.grad_fn: {0: torch.ones_like(loss)}}  # node -> output's number -> gradient
    for node in nodes_behind(loss):
        known = gradients.pop(node, {})
        if not known:
            continue
        arguments = [known.get(i) for i in range(len(node._input_metadata))]
        call = getattr(node, "apply", node)  # operators written in Python have `apply`
        results = call(*arguments)
        if not isinstance(results, tuple):
            results = (results,)
        for (following, number), gradient in zip(node.next_functions, results, strict=False):
            if following is not None and gradient is not None:
                wanted = following._input_metadata[number]
                assert gradient.device == wanted.device, f"{node}: gradient on {gradient.device}"
                gradient = gradient.sum_to_size(wanted.shape).to(wanted.dtype)  # as PyTorch does
                slots = gradients.setdefault(following, {})
                if number in slots:
                    gradient = slots[number] + gradient
                slots[number] = gradient


def config_of(method, changes):
    """The paper's or the release's Config on CLEVR-Change, with some changes."""
    released = getattr(method, "RELEASED", {})
    fields = dict(changes)
    variant = fields.pop("variant", "paper")
    cfg = preset(method.Config, method.PRESETS, released, "clevr_change", variant)
    cfg = dataclasses.replace(cfg, device=str(GPU), **fields)
    if method is idc_pretrain and cfg.difference_encoder:
        cfg.nabirds = "a folder"
    return cfg


def kinds_of(method, cfg):
    """The kinds of a method's steps."""
    if method is not idc_pretrain:
        return ["step"]
    kinds = ["finetune", "mlm", "mvcl", "fda", "mlm of single images"]
    if cfg.nabirds:
        kinds.append("birds")
    return kinds


def batches_of(kind, grid):
    """The batches of a step, on the CPU."""
    features = torch.rand(B, *grid).half()
    caption = torch.ones(B, LENGTH, dtype=torch.long)
    names = [("a", "b")] * B
    batch = data.Batch(features, features, caption, ["1"] * B, ["a"] * B, names)
    if kind == "birds":
        return (dataclasses.replace(batch, caption=caption[:, :2]),)
    if kind == "mlm of single images":
        return (dataclasses.replace(batch, single=True),)
    return (batch, batch)


def entities_of(cfg):
    """cheers.Entities with one pair of pictures."""
    entities = object.__new__(cheers.Entities)
    entities.table = torch.rand(500, cfg.clip_dim, device=GPU)
    entities.rows = {("a", "b"): torch.zeros(cfg.k, dtype=torch.long)}
    return entities


def phrases_of():
    """Stands in for rdd_acr.Phrases, which reads the content of tensors on the CPU."""
    text = torch.rand(2 * B, CLIP, device=GPU)
    valid = text[:, 0] > 0
    same = text @ text.T > 0
    attributes = rdd_acr.Attributes(text, valid, same)
    return SimpleNamespace(encode=lambda _, prompts: dict.fromkeys(prompts, attributes))


def rewrites(pair_ids):
    """Stands in for idc_pretrain.Negatives."""
    return torch.ones(len(pair_ids), idc_pretrain.REWRITES, LENGTH, dtype=torch.long)


def take_step(model, batches, optimizer, *more):
    """A step of training -> its losses."""
    method = sys.modules[type(model).__module__]
    losses = method.compute_losses(model, batches, model.cfg, *more)
    optimizer.zero_grad()
    backward(losses["total"])
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if hasattr(model, "clamp_scales"):
        model.clamp_scales()
    return losses


def run_case(method, changes):
    """Runs a step of each kind, then captions and maps, of a method with a changed config."""
    cfg = config_of(method, changes)
    grid = (2048, 7, 7) if method is idc_pretrain else (1024, 14, 14)
    more = []  # further arguments of compute_losses
    if method is cheers and cfg.k:
        more.append(entities_of(cfg))
    if method is rdd_acr and (cfg.w_n2o or cfg.w_v2a):
        more.append(phrases_of())
    model = MODELS[method](cfg, WORDS, grid, LENGTH)
    move_to_gpu(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-4, fused=True)

    for kind in kinds_of(method, cfg):
        if method is idc_pretrain:
            more = [kind.split()[0], rewrites]
        with Watch() as watch:
            losses = take_step(model, batches_of(kind, grid), optimizer, *more)
        about = f"{method.__name__} {changes}, {kind}"
        print(about, dict(watch.products), flush=True)
        for name, loss in losses.items():
            assert loss.dtype == torch.float32, f"{about}: loss {name} in {loss.dtype}"
        if cfg.amp:  # float32 where the code leaves autocast on purpose
            assert watch.products[torch.float32] < 0.2 * watch.products.total(), about
        else:
            assert set(watch.products) == {torch.float32}, about

    model.eval()
    model.max_len = 4  # at the eighth word, `decode` would wait to see if all captions have ended
    with Watch():
        batch = batches_of("step", grid)[0].to(cfg.device)
        rows = []
        if method is cheers and cfg.k:
            rows.append(more[0](batch.images))
        ids = model.generate(batch.before, batch.after, *rows)
        maps = model.attention_map(batch.before, batch.after, ids, *rows)
    for x in (ids, *maps.values()):
        assert x.device == GPU


def main():
    pretend_to_have_a_gpu()
    for method, cases in CASES.items():
        for changes in cases:
            with FakeTensorMode():
                run_case(method, changes)


if __name__ == "__main__":
    main()
