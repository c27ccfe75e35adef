"""Speed and memory of the methods against their plain formulations, on this machine. Not a test.

    python tests/bench.py step [--method dirl_ccr] [--batch 128] [--device cuda]    one training step at the papers' size
    python tests/bench.py step --method idc_pretrain --task mvcl                    one of pre-training (default: fine-tuning)
    python tests/bench.py decode [--method dirl_ccr] [--batch 64]                   greedy captions, cached and not
    python tests/bench.py match [--batch 128]                                       token-wise matching, forward and backward
    python tests/bench.py retrieve [--pairs 80000] [--batch 256] [--runs 1]         CHEERS's entities of every pair (Eq. 1)

The plain formulation is the one of tests/test_common.py (every matching score at once; attention's probabilities
written out), in float32 without torch.compile, and a decoder that starts over at each word; of retrieval, a loop over
pairs, measured on some of them. RDD+ACR's phrases and CHEERS's entities are drawn: CLIP takes no part. Each row runs in a
process of its own, so that its peak memory is its own.
"""

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import cheers
import common
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
from common import decode, preset, token_match

import torch
import torch.nn.functional as F
from test_common import dense_match

METHODS = {"scorer_cbr": (scorer_cbr, scorer_cbr.SCORER), "dirl_ccr": (dirl_ccr, dirl_ccr.DIRL),
           "rdd_acr": (rdd_acr, rdd_acr.RDD), "cheers": (cheers, cheers.CHEERS),
           "idc_pretrain": (idc_pretrain, idc_pretrain.IDC)}  # fmt: skip
SCENES, WORDS, LENGTH = 128, 76, 24  # CLEVR-Change in the papers
GRIDS = {"idc_pretrain": (2048, 7, 7)}  # the others: (1024, 14, 14)
ENTITIES, CLIP = 500, 768  # candidates of CHEERS's step, and ViT-L-14's width
PLAIN_PAIRS = 100  # how many the loop over pairs is measured on


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


def plain_retrieve(x_bef, x_aft, entities, k):
    """cheers.retrieve, a pair at a time, all candidates sorted."""
    found = []
    for pair in zip(x_bef, x_aft, strict=True):
        s_bef, s_aft = (F.cosine_similarity(x[None], entities) for x in pair)
        relevant = (s_bef > s_bef.mean()) | (s_aft > s_aft.mean())
        score = (s_bef - s_aft).abs() + 4 * relevant  # a difference is 2 at most
        found.append(score.argsort(descending=True, stable=True)[:k])
    return torch.stack(found)


def retrieval(args):
    """What cheers.Entities does after CLIP: images (P, 2, E) in RAM, their entities on the device. -> work, its share."""
    table = torch.randn(args.entities, CLIP).to(args.device)
    images, k = torch.randn(args.pairs, 2, CLIP), cheers.Config.k
    count = min(PLAIN_PAIRS, args.pairs) if args.plain else args.pairs
    find = plain_retrieve if args.plain else cheers.retrieve

    def work():
        blocks = (x.to(args.device).unbind(1) for x in images[:count].split(args.batch))
        return torch.cat([find(*pair, table, k).cpu() for pair in blocks])

    return torch.no_grad()(work), count / args.pairs


def work_of(args):
    """The function to time, and which share of the whole it does."""
    torch.manual_seed(0)
    cuda = args.device == "cuda"
    torch.set_float32_matmul_precision("high" if cuda and not args.plain and args.what != "retrieve" else "highest")
    if args.what == "retrieve":
        return retrieval(args)
    grid = tuple(args.grid or GRIDS.get(args.method, (1024, 14, 14)))
    if args.what == "match":
        cells = args.batch, grid[1] * grid[2], args.dim
        q, k = (torch.randn(cells, device=args.device, requires_grad=True) for _ in range(2))
        match = dense_match if args.plain else token_match
        return lambda: match(q, k).sum().backward(), 1
    method, model = METHODS[args.method]
    cfg = preset(method.Config, method.PRESETS, {}, "clevr_change")
    cfg = dataclasses.replace(cfg, dim=args.dim, device=args.device, amp=cfg.amp and not args.plain)
    if args.plain:
        heads_of = lambda q, k, heads: zip(q.chunk(heads, -1), k.chunk(heads, -1), strict=True)
        dense = lambda q, k, heads=1: sum(dense_match(*pair) for pair in heads_of(q, k, heads)) / heads
        scorer_cbr.token_match = cheers.token_match = dense
        common.Attention.attend = plain_attend
    table = (torch.randn(ENTITIES, CLIP),) if method is cheers else ()
    model = model(cfg, WORDS, grid, args.length, *table).to(args.device)
    before, after = torch.rand(2, args.batch, *grid, device=args.device)
    entities = (torch.randint(ENTITIES, (args.batch, cfg.k), device=args.device),) if method is cheers else ()
    if args.what == "decode":
        model.eval()
        getattr(model, "decoder", model).head.bias.data[[data.NULL, data.END]] = -1e9  # every caption takes every step
        write = model.generate
        if args.plain and method is idc_pretrain:
            raise SystemExit("idc_pretrain has no plain decoding")
        elif args.plain:
            write = lambda *pair: plain_decode(model, *pair)
        return torch.no_grad()(lambda: write(before, after, *entities)), 1
    caption = torch.randint(4, WORDS, (args.batch, args.length), device=args.device)
    streams = tuple(data.Batch(before, after, caption, [""] * args.batch, [""] * args.batch) for _ in range(2))
    rows = torch.randint(40, (2 * args.batch,), device=args.device)  # of few phrases
    text = torch.randn(40, CLIP, device=args.device)[rows]
    found = rdd_acr.Attributes(text, torch.ones_like(rows, dtype=torch.bool), rows[:, None] == rows)
    phrases = SimpleNamespace(nouns=lambda *_: found, verbs=lambda *_: found)
    rewritten = torch.randint(4, WORDS, (args.batch, 6, args.length))
    more = {rdd_acr: (phrases,), cheers: (lambda _: entities[0],),
            idc_pretrain: (args.task or "finetune", lambda ids: rewritten[: len(ids)])}.get(method, ())  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=not args.plain)
    if cuda and args.compile and not args.plain:
        model.compile()

    def step():
        optimizer.zero_grad()
        method.losses_of(model, streams, cfg, *more)["total"].backward()
        optimizer.step()

    return step, 1


def measure(args) -> dict:
    """Median seconds over `--runs` after a warm-up, and peak memory in GB (of the GPU, or of the whole process)."""
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    (work, share), times = work_of(args), []
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
    return {"seconds": sorted(times[args.warmup :])[args.runs // 2] / share, "peak_gb": peak / 1e9, "share": share}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["step", "match", "decode", "retrieve"])
    parser.add_argument("--method", choices=METHODS, default="scorer_cbr")
    parser.add_argument("--task", choices=["finetune", "mlm", "mvcl", "fda"], help="idc_pretrain's step")
    parser.add_argument("--batch", type=int, default=SCENES, help="scenes a step, or pairs")
    parser.add_argument("--dim", type=int, default=512, help="width D")
    parser.add_argument("--grid", type=int, nargs=3, metavar=("C", "H", "W"), help="features (default: the paper's)")
    parser.add_argument("--length", type=int, default=LENGTH, help="ids of a caption")
    parser.add_argument("--pairs", type=int, default=80000, help="retrieve: image pairs")
    parser.add_argument("--entities", type=int, default=20000, help="retrieve: candidates")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--row", choices=["plain", "ours"], help="measure only this, print JSON")
    args = parser.parse_args()
    if args.task and (args.what, args.method) != ("step", "idc_pretrain"):
        parser.error("--task goes with step --method idc_pretrain")
    if args.row:
        args.plain = args.row == "plain"
        print(json.dumps(measure(args)))
        return
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    about = f"{args.method} {args.task or ''}".strip()
    about = f"{args.pairs} pairs, {args.entities} entities" if args.what == "retrieve" else about
    print(f"{args.what}, {about}, batch {args.batch}, {name}, torch {torch.__version__}")
    rows = {}
    for row in ("plain", "ours"):
        done = subprocess.run([sys.executable, *sys.argv, "--row", row], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{row:6} did not finish (exit code {done.returncode})")
            continue
        rows[row] = json.loads(done.stdout.splitlines()[-1])
        share = rows[row]["share"]
        part = f" (measured on {share * args.pairs:.0f} pairs and scaled up)" if share < 1 else ""
        print(f"{row:6} {rows[row]['seconds']:9.3f} s   peak {rows[row]['peak_gb']:6.2f} GB{part}")
    if len(rows) == 2:
        print(f"ratio  {rows['plain']['seconds'] / rows['ours']['seconds']:9.2f} x")


if __name__ == "__main__":
    main()
