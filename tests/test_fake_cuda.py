"""Tests of the CUDA path without a GPU: every method's losses, captions and maps on PyTorch's fake
tensors, which have a shape and a device (cuda:0), but no content.

An operation that mixes devices, that makes the host wait for the GPU, or that reads the content of
a tensor is an error. Autocast works as on a GPU: most matrix products must be in bfloat16, and all
losses in float32. Gradients, speed, memory and results cannot be tested this way.
"""

import dataclasses
from unittest import mock

import pytest
import torch
from helpers import (
    METHODS,
    VARIANTS,
    batch_of,
    differing_terms,
    flags_of,
    one_layer,
    resume_and_compare,
    run,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
import idc_pretrain
import matching
import scorer_cbr
from support.run import parse_args, preset

pytestmark = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 14),
    reason="in older versions of PyTorch (2.6) fake CUDA tensors end the process",
)

GPU = torch.device("cuda:0")
B = 8  # pairs
GRID = (1024, 14, 14)
WORDS = 76  # in the vocabulary
LENGTH = 24  # ids of a caption


class Watch(TorchDispatchMode):
    """Counts matrix products, and those in float32. AssertionError if an operation mixes devices,
    or if a copy makes the host wait."""

    def __init__(self):
        super().__init__()
        self.products = 0
        self.in_float32 = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # A number on the CPU may meet tensors on the GPU.
        devices = {x.device for x in given if x.ndim or x.device == GPU}
        if func is torch.ops.aten._to_copy.default and devices != {out.device}:
            assert out.device == GPU and kwargs.get("non_blocking"), f"{func} of {given} waits"
        assert len(devices) < 2, f"{func} mixes devices"
        if func.overloadpacket.__name__ in ("mm", "addmm", "convolution", "token_match"):
            self.products += 1
            self.in_float32 += given[-1].dtype == torch.float32
        return out


class AutocastWithoutGPU(torch.autocast):
    """Autocast, which otherwise checks by these two functions for a GPU, and turns itself off."""

    def __init__(self, *args, **options):
        checks = {"is_available": lambda: True, "is_bf16_supported": lambda *_, **__: True}
        with mock.patch.multiple(torch.cuda, **checks):
            super().__init__(*args, **options)


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


@pytest.mark.parametrize("method, fields", VARIANTS)
def test_no_operation_mixes_devices_or_waits(method, fields, monkeypatch):
    """At the size of CLEVR-Change."""
    monkeypatch.setattr(torch, "autocast", AutocastWithoutGPU)
    cfg = preset(method.Config, method.PRESETS, {}, "clevr_change")
    # More layers would only repeat the operations of one.
    cfg = dataclasses.replace(cfg, **one_layer(method) | fields, device=str(GPU))
    with FakeTensorMode():
        model = METHODS[method].model(cfg, WORDS, GRID, LENGTH)
        move_to_gpu(model)
        before, after = torch.rand(2, B, *GRID).half()
        batch = batch_of(before, after, torch.ones(B, LENGTH, dtype=torch.long))
        for kind, compute_losses in METHODS[method].steps(model, (batch, batch)).items():
            with Watch() as watch:
                losses = compute_losses()
                if hasattr(model, "clamp_scales"):
                    model.clamp_scales()
            for name, loss in losses.items():
                assert loss.dtype == torch.float32, f"{kind}: loss {name} in {loss.dtype}"
            # float32 where the code leaves autocast on purpose
            assert watch.in_float32 < 0.2 * watch.products, kind

        model.eval()
        model.max_len = 4  # at the eighth word, `decode` waits to see if all captions have ended
        inputs = METHODS[method].inputs(model, batch.images)
        batch = batch.to(cfg.device)
        with Watch():
            ids = model.generate(batch.before, batch.after, *inputs)
            maps = model.attention_map(batch.before, batch.after, ids, *inputs)
        for x in (ids, *maps.values()):
            assert x.device == GPU


@pytest.mark.parametrize("works", [True, False])
def test_compile_is_off_where_it_cannot_work(works, monkeypatch, tmp_path, capsys):
    def compile(function):
        if not works:
            raise torch._dynamo.exc.TorchDynamoException("no C compiler\nmore lines")
        return function

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(common, "set_up_device", lambda device: None)
    flags = ["--device", "cuda", "--out_dir", str(tmp_path / "run")]
    with FakeTensorMode():
        cfg, _ = parse_args(scorer_cbr.Config, scorer_cbr.PRESETS, scorer_cbr.RELEASED, flags)
    assert cfg.compile == works
    assert ("(no C compiler): compile is off" in capsys.readouterr().out) != works


@pytest.mark.parametrize(
    "capability, work, fit",
    [((8, 0), True, True), ((7, 5), True, False), ((9, 0), False, False)],
)
def test_where_the_kernels_are_used(capability, work, fit, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(matching, "kernels_work", lambda *_: work)
    with FakeTensorMode():
        q = torch.empty(4, 9, 16, device=GPU)
        assert matching.kernels_fit(q, q, 1) == fit


# ---- the comparisons of runs, on the CPU ---------------------------------------------------------


def scaled(function):
    """The function, 5 % off."""
    return lambda *args: 1.05 * function(*args)


def without_gradient(function):
    return lambda *args: function(*args).detach()


@pytest.mark.parametrize(
    "method, name, wrong, found",
    [
        (scorer_cbr, "cbr_loss", scaled, {"cbr"}),
        (scorer_cbr, "token_match", without_gradient, {"match"}),
        (idc_pretrain, "cell_loss", scaled, {"mvcl", "total"}),
    ],
)
def test_a_wrong_term_is_noticed(method, name, wrong, found, prepared, tiny, tmp_path, monkeypatch):
    flags = [*flags_of(method, tiny), "--data_dir", prepared, "--dropout", 0, "--lr", 1e-3]
    flags += "--log_every 1 --steps 4".split()
    if method is idc_pretrain:
        flags += "--pretrain_steps 4 --mlm 1 --mvcl 1 --fda 0".split()
    for folder in ("cpu", "same"):
        run(method, *flags, "--out_dir", tmp_path / folder)
    monkeypatch.setattr(method, name, wrong(getattr(method, name)))
    run(method, *flags, "--out_dir", tmp_path / "wrong")
    assert not differing_terms(tmp_path / "cpu", tmp_path / "same", rel=0.02)
    assert differing_terms(tmp_path / "cpu", tmp_path / "wrong", rel=0.02) >= found


@pytest.mark.parametrize(
    "lost", [None, (torch, "set_rng_state"), (torch.optim.Adam, "load_state_dict")]
)
def test_what_a_resumed_run_loses_is_noticed(lost, prepared, tiny, tmp_path, monkeypatch):
    flags = [*tiny, "--data_dir", prepared, "--dropout", 0.1, "--lr", 1e-3]
    if not lost:
        resume_and_compare(scorer_cbr, flags, tmp_path, monkeypatch)
        return
    monkeypatch.setattr(*lost, lambda *_: None)
    with pytest.raises(AssertionError):
        resume_and_compare(scorer_cbr, flags, tmp_path, monkeypatch)
