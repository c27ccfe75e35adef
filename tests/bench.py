"""Speed and memory of the methods against their plain formulations, on this machine. Not a test.

    python tests/bench.py step [--method dirl_ccr] [--batch 128] [--device cuda]    one training step at the papers' size
    python tests/bench.py decode [--method dirl_ccr] [--batch 64]                   greedy captions, cached and not
    python tests/bench.py match [--batch 128]                                       token-wise matching, forward and backward

The plain formulation is the one of tests/test_common.py (every matching score at once; attention's probabilities
written out), in float32 without torch.compile, and a decoder that starts over at each word. Each row runs in a process of
its own, so that its peak memory is its own.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
from test_common import dense_match

import common
import data
import dirl_ccr
import scorer_cbr
from common import decode, preset, token_match

METHODS = {"scorer_cbr": (scorer_cbr, scorer_cbr.SCORER), "dirl_ccr": (dirl_ccr, dirl_ccr.DIRL)}
SCENES, GRID, WORDS, LENGTH = 128, (1024, 14, 14), 76, 24  # CLEVR-Change in the papers


def plain_decode(model, before, after):
    """Greedy decoding that runs the whole decoder on all words so far, at every word."""
    difference, so_far = model.encode(before, after)[0], []

    def step(words, t):
        so_far.append(words)
        return model.decoder.head(model.decoder(torch.stack(so_far, 1), difference)[0][:, -1])

    start = torch.full((len(before),), data.START, device=before.device)
    return decode(step, start, LENGTH, data.END, data.UNK)


def plain_attend(self, q, k, v, causal=False, mask=None):
    """common.Attention.attend with every probability written out."""
    scores = self.scores(q, k)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    weights = torch.dropout(scores.softmax(-1), self.dropout, self.training)
    return self.out((weights @ self._split(v)).transpose(1, 2).flatten(2))


def work_of(args):
    """The function to time."""
    torch.manual_seed(0)
    cuda = args.device == "cuda"
    if args.what == "match":
        q, k = (torch.randn(args.batch, 196, 512, device=args.device, requires_grad=True) for _ in range(2))
        match = dense_match if args.plain else token_match
        return lambda: match(q, k).sum().backward()
    method, model = METHODS[args.method]
    cfg = preset(method.Config, method.PRESETS, {}, "clevr_change", "paper", cuda)
    cfg.device, cfg.amp = args.device, cfg.amp and not args.plain
    torch.set_float32_matmul_precision("high" if cuda and not args.plain else "highest")
    if args.plain:
        scorer_cbr.token_match = lambda q, k, heads: dense_match(q, k)
        common.Attention.attend = plain_attend
    model = model(cfg, WORDS, GRID, LENGTH).to(args.device)
    before, after = torch.rand(2, args.batch, *GRID, device=args.device)
    if args.what == "decode":
        model.eval()
        model.decoder.head.bias.data[[data.NULL, data.END]] = -1e9  # every caption takes every step
        run = (lambda: plain_decode(model, before, after)) if args.plain else (lambda: model.generate(before, after))
        return torch.no_grad()(run)
    caption = torch.randint(4, WORDS, (args.batch, LENGTH), device=args.device)
    streams = tuple(data.Batch(before, after, caption, [], []) for _ in range(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=not args.plain)
    if cuda and args.compile and not args.plain:
        model.compile()

    def step():
        optimizer.zero_grad()
        method.losses_of(model, streams, cfg)["total"].backward()
        optimizer.step()

    return step


def measure(args) -> dict:
    """Median seconds over `--runs` after a warm-up, and peak memory in GB (of the GPU, or of the whole process)."""
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    work, times = work_of(args), []
    for _ in range(args.warmup + args.runs):
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    peak = (
        torch.cuda.max_memory_allocated()
        if args.device == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return {"seconds": sorted(times[args.warmup :])[args.runs // 2], "peak_gb": peak / 1e9}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["step", "match", "decode"])
    parser.add_argument("--method", choices=METHODS, default="scorer_cbr")
    parser.add_argument("--batch", type=int, default=SCENES, help="scenes a step, or pairs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--row", choices=["plain", "ours"], help="measure only this, print JSON")
    args = parser.parse_args()
    if args.row:
        args.plain = args.row == "plain"
        print(json.dumps(measure(args)))
        return
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{args.what}, {args.method}, batch {args.batch}, {name}, torch {torch.__version__}")
    rows = {}
    for row in ("plain", "ours"):
        done = subprocess.run([sys.executable, *sys.argv, "--row", row], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{row:6} did not finish (exit code {done.returncode})")
            continue
        rows[row] = json.loads(done.stdout.splitlines()[-1])
        print(f"{row:6} {rows[row]['seconds']:9.3f} s   peak {rows[row]['peak_gb']:6.2f} GB")
    if len(rows) == 2:
        print(f"ratio  {rows['plain']['seconds'] / rows['ours']['seconds']:9.2f} x")


if __name__ == "__main__":
    main()
