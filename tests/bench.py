"""Speed and memory of the methods against their plain formulations, on this machine. Not a test.

    python tests/bench.py step [--method dirl_ccr] [--batch 128]    one training step, papers' size
    python tests/bench.py step --method idc_pretrain --task mvcl    one of pre-training
    python tests/bench.py decode [--method dirl_ccr] [--batch 64]   greedy captions, cached and not
    python tests/bench.py match [--batch 128]                       token-wise matching, both passes

The plain formulation is the one of tests/test_common.py (every matching score at once; attention's
probabilities written out), in float32 without torch.compile, and a decoder that starts over at each
word. The two take turns; each turn is a process of its own, so that its peak memory is its own. The
share is that of the rate of one large matrix product in the same process, in bfloat16 where the
step has it; operations are those of matrix products, of sparse ones none. RDD+ACR's phrases, in
ViT-L-14's text encoder of random weights, and CHEERS's entities are drawn.
"""

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
from open_clip.transformer import TextTransformer
from test_common import dense_match
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop,
    sdpa_flop,
)

import cheers
import common
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
from common import END, NULL, decode, preset, token_match

METHODS = {
    "scorer_cbr": scorer_cbr.SCORER,
    "dirl_ccr": dirl_ccr.DIRL,
    "rdd_acr": rdd_acr.RDD,
    "cheers": cheers.CHEERS,
    "idc_pretrain": idc_pretrain.IDC,
}
WORDS = 76  # CLEVR-Change's
ENTITIES, CLIP = 500, 768  # candidates of CHEERS, and ViT-L-14's width
PHRASE, REPEATED = 16, 10  # ids of a noun phrase, and how many phrases the distractors share

# What PyTorch does not count by itself.
for kernel, count in (("", sdpa_flop), ("_backward", sdpa_backward_flop)):
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{kernel}")
    if operator not in flop_registry:  # newer versions of PyTorch count it
        register_flop_formula(operator, True)(count)
register_flop_formula(torch.ops.common.token_match)(
    lambda q, k, **_: 2 * q[0] * q[1] * q[2] * k[0] * k[1]
)


def plain_decode(model, before, after, *entities):
    """Greedy decoding that runs the whole decoder on all words so far, at every word."""
    seen, so_far = model.encode(before, after, *entities)[0], []

    def step(words, t):
        so_far.append(words)
        return model.decoder.head(model.decoder(torch.stack(so_far, 1), seen)[0][:, -1])

    return decode(step, len(before), model.max_len, before.device)


def plain_attend(self, q, k, v, causal=False, mask=None):
    """common.Attention.attend with every probability written out."""
    scores = self.scores(q, k)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    weights = torch.dropout(scores.softmax(-1), self.dropout, self.training)
    return self.out((weights @ self._split(v)).transpose(1, 2).flatten(2))


def phrases_of(cfg, texts):
    """rdd_acr.Phrases of two batches of captions: of the changed pairs' every one another, of the
    others' a few."""
    clip = TextTransformer(77, 49408, CLIP, heads=12, layers=12, output_dim=CLIP).to(cfg.device)
    clip.requires_grad_(False).eval()
    rows = [i % REPEATED if i >= len(texts) // 2 else REPEATED + i for i in range(len(texts))]
    phrases = object.__new__(rdd_acr.Phrases)
    row_of = dict(zip(texts, rows, strict=True))
    phrases.rows = {"nouns": row_of, "verbs": row_of}
    phrases.clip = clip
    phrases.ignore_equal = True
    phrases.tokens = torch.randint(49408, (REPEATED + len(texts) // 2, PHRASE), device=cfg.device)
    phrases.encode_prompted = rdd_acr.encode_prompted
    return phrases


def work_of(args):
    """-> the function to time, what compiles it once it has run, and the bytes of features that it
    moves."""
    torch.manual_seed(0)
    method, model = sys.modules[args.method], METHODS[args.method]
    grid = tuple(args.grid or ((2048, 7, 7) if method is idc_pretrain else (1024, 14, 14)))
    cfg = preset(method.Config, method.PRESETS, {}, "clevr_change")
    cfg = dataclasses.replace(
        cfg, dim=args.dim, device=args.device, batch_size=args.batch, amp=not args.plain
    )
    heads_of = lambda q, k, heads: zip(q.chunk(heads, -1), k.chunk(heads, -1), strict=True)
    dense = lambda q, k, heads=1: sum(dense_match(*pair) for pair in heads_of(q, k, heads)) / heads
    if args.what == "match":
        cells = args.batch, grid[1] * grid[2], args.dim
        q, k = (torch.randn(cells, device=args.device, requires_grad=True) for _ in range(2))
        match = dense if args.plain else token_match
        return lambda: match(q, k, cfg.heads).sum().backward(), lambda: None, 0
    if args.plain:
        scorer_cbr.token_match = cheers.token_match = dense
        common.Attention.attend = plain_attend
    table = (torch.randn(ENTITIES, CLIP),) if method is cheers else ()
    model = model(cfg, WORDS, grid, args.length, *table).to(args.device)
    entities = (
        (torch.randint(ENTITIES, (args.batch, cfg.k), device=args.device),)
        if method is cheers
        else ()
    )
    images = torch.rand(2, args.batch, *grid).half()
    if args.what == "decode":
        model.eval()
        getattr(model, "decoder", model).head.bias.data[
            [NULL, END]
        ] = -1e9  # every caption takes every step
        pair = images.to(args.device).float()
        write = (lambda *seen: plain_decode(model, *seen)) if args.plain else model.generate
        return torch.no_grad()(lambda: write(*pair, *entities)), lambda: None, images.nbytes
    images = images.pin_memory() if cfg.device.startswith("cuda") else images
    texts, caption = (
        [str(i) for i in range(2 * args.batch)],
        torch.randint(4, WORDS, (args.batch, args.length)),
    )
    batches = tuple(
        data.Batch(*images, caption, some, some)
        for some in (texts[: args.batch], texts[args.batch :])
    )
    rewritten, more = torch.randint(4, WORDS, (args.batch, 6, args.length)), ()
    if method is rdd_acr:
        more = (phrases_of(cfg, texts),)
    elif method is cheers:
        more = (lambda _: entities[0],)
    elif method is idc_pretrain:
        more = (args.task, lambda ids: rewritten[: len(ids)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=not args.plain)

    def step():
        optimizer.zero_grad()
        method.compute_losses(model, batches, cfg, *more)["total"].backward()
        optimizer.step()

    def compile_it():
        if not args.plain and cfg.compile and cfg.device.startswith("cuda"):
            model.compile(fullgraph=True, dynamic=False)
            if method is rdd_acr:
                more[0].encode_prompted = torch.compile(
                    rdd_acr.encode_prompted, fullgraph=True, dynamic=True
                )
            step()

    return step, compile_it, 2 * images.nbytes


def measure(args) -> dict:
    """Seconds of one run after a first one that counts its operations, bytes of features, peak
    memory (of the GPU, or of the whole process), and the machine's operations a second in a
    product of two matrices."""
    cuda = args.device.startswith("cuda")
    torch.set_float32_matmul_precision("high" if cuda and not args.plain else "highest")
    wait = torch.cuda.synchronize if cuda else lambda: None

    def seconds(work) -> float:
        wait()
        began = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - began

    work, compile_it, moved = work_of(args)
    with FlopCounterMode(display=False) as counter:
        work()
    compile_it()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    taken = seconds(work)
    peak = (
        torch.cuda.max_memory_allocated()
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    n = 8192 if cuda else 2048
    x = torch.randn(
        n, n, device=args.device, dtype=torch.bfloat16 if cuda and not args.plain else torch.float32
    )
    rate = 2 * n**3 / min(seconds(lambda: x @ x) for _ in range(4))
    return {
        "seconds": taken,
        "operations": counter.get_total_flops(),
        "moved": moved,
        "peak": peak,
        "rate": rate,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["step", "match", "decode"])
    parser.add_argument("--method", choices=METHODS, default="scorer_cbr")
    parser.add_argument(
        "--task",
        choices=["finetune", "mlm", "mvcl", "fda"],
        default="finetune",
        help="idc_pretrain's step",
    )
    parser.add_argument("--batch", type=int, default=128, help="scenes a step, or pairs")
    parser.add_argument("--dim", type=int, default=512, help="width D")
    parser.add_argument(
        "--grid", type=int, nargs=3, metavar=("C", "H", "W"), help="features (default: the paper's)"
    )
    parser.add_argument("--length", type=int, default=24, help="ids of a caption")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=3, help="turns of each formulation")
    parser.add_argument(
        "--row", choices=["plain", "ours"], help="measure only this, once, print JSON"
    )
    args = parser.parse_args()
    if args.what == "decode" and args.method == "idc_pretrain":
        parser.error("idc_pretrain has no plain decoding")
    args.plain = args.row == "plain"
    if args.row:
        print(json.dumps(measure(args)))
        return
    name = (
        torch.cuda.get_device_name()
        if args.device.startswith("cuda")
        else f"CPU, {torch.get_num_threads()} threads"
    )
    about = args.method + (f" {args.task}" if args.method == "idc_pretrain" else "")
    print(f"{args.what}, {about}, batch {args.batch}, {name}, torch {torch.__version__}")
    turns = {"plain": [], "ours": []}
    for _ in range(args.runs):
        for row, results in turns.items():
            done = subprocess.run(
                [sys.executable, *sys.argv, "--row", row], stdout=subprocess.PIPE, text=True
            )
            if not done.returncode:
                results.append(json.loads(done.stdout.splitlines()[-1]))
    for row, results in turns.items():
        if not results:
            print(f"{row:5} did not finish")
            continue
        turns[row], rate, peak = (
            statistics.median(x[name] for x in results) for name in ("seconds", "rate", "peak")
        )
        operations, moved = results[0]["operations"] / 1e12, results[0]["moved"]
        share = f"{operations * 1e12 / turns[row] / rate:.1%} of {rate / 1e12:.3f} T a second"
        print(
            f"{row:5} {turns[row]:8.3f} s, {operations:.3f} T operations ({share}), "
            f"peak {peak / 1e9:.2f} GB, features {moved / 1e6:.0f} MB"
        )
    if all(turns.values()):
        print(f"ratio {turns['plain'] / turns['ours']:9.2f} x")


if __name__ == "__main__":
    main()
