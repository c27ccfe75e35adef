"""Time and memory of a training step on this machine, at the papers' size. Not a test.

    python tests/bench.py --method dirl_ccr
    python tests/bench.py --method idc_pretrain --task mvcl    of pre-training
    python tests/bench.py --row released          SCORER's step with the released code's settings
    python tests/bench.py --row plain             the plain formulation

The plain formulation computes every matching score at once (match_by_definition of scorer_cbr.py),
in float32 and without torch.compile. "released" and "plain-released" have the settings of RELEASED.
RDD+ACR's phrases (for ViT-L-14's text encoder, with random weights) and CHEERS's entities are
random. To compare commits, run each one's script on an idle machine.
"""

import argparse
import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from open_clip.transformer import TextTransformer

import cheers
import common
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
from scorer_cbr import match_by_definition

METHODS = {
    "scorer_cbr": scorer_cbr.SCORER,
    "dirl_ccr": dirl_ccr.DIRL,
    "rdd_acr": rdd_acr.RDD,
    "cheers": cheers.CHEERS,
    "idc_pretrain": idc_pretrain.IDC,
}
ROWS = ["ours", "plain", "released", "plain-released"]
WORDS = 76  # CLEVR-Change's
LENGTH = 24  # ids of a caption
CLIP = 768  # ViT-L-14's width
PHRASE = 16  # ids of a noun phrase
REPEATED = 10  # phrases that the distractors share


def plain_match(q, k, heads=1):
    """matching.token_match, but with every matching score of a head at once."""
    total = 0
    for q_of_head, k_of_head in zip(q.chunk(heads, -1), k.chunk(heads, -1), strict=True):
        total = total + match_by_definition(q_of_head, k_of_head, 1)
    return total / heads


def config_of(args):
    """The paper's or the release's Config on CLEVR-Change, with the size given by the flags."""
    method = sys.modules[args.method]
    released = getattr(method, "RELEASED", None)
    variant = "paper"
    if args.row.endswith("released"):
        assert released, f"{args.method} has no released settings"
        variant = "released"
    cfg = common.preset(method.Config, method.PRESETS, released, "clevr_change", variant)
    sizes = {"dim": args.dim, "batch_size": args.batch}
    return dataclasses.replace(cfg, **sizes, device=args.device, amp=not is_plain(args))


def is_plain(args) -> bool:
    return args.row.startswith("plain")


def phrases_of(cfg, texts):
    """rdd_acr.Phrases of two batches of captions: each changed pair has its own phrase; the other
    pairs share a few."""
    half = len(texts) // 2
    count = REPEATED + half  # of phrases of a kind
    nouns = {}
    for i, text in enumerate(texts):
        nouns[text] = REPEATED + i if i < half else i % REPEATED
    clip = TextTransformer(77, 49408, CLIP, heads=12, layers=12, output_dim=CLIP).to(cfg.device)
    clip.requires_grad_(False).eval()
    phrases = object.__new__(rdd_acr.Phrases)
    phrases.rows = {"nouns": nouns, "verbs": {text: count + row for text, row in nouns.items()}}
    phrases.clip = clip
    phrases.ignore_equal = True
    phrases.tokens = torch.randint(49408, (2 * count, PHRASE), device=cfg.device)
    phrases.valid = torch.ones(2 * count, dtype=torch.bool, device=cfg.device)
    return phrases


def step_of(args) -> Callable:
    """A function that makes a training step: changed pairs and distractor pairs of the same
    scenes."""
    cfg = config_of(args)
    method = sys.modules[args.method]
    model = METHODS[args.method](cfg, WORDS, args.grid, LENGTH).to(args.device)
    before, after = torch.rand(2, args.batch, *args.grid).half()
    if cfg.on_cuda:
        before = before.pin_memory()
        after = after.pin_memory()
    caption = torch.randint(4, WORDS, (args.batch, LENGTH))
    texts = [str(i) for i in range(2 * args.batch)]
    batches = []
    for some in (texts[: args.batch], texts[args.batch :]):
        batches.append(data.Batch(before, after, caption, some, some))

    more = []  # further arguments of the method's compute_losses
    if args.method == "rdd_acr":
        more.append(phrases_of(cfg, texts))
    elif args.method == "cheers":
        entities = torch.randn(args.batch, cfg.k, cfg.clip_dim, device=args.device)
        more.append(lambda images: entities)
    elif args.method == "idc_pretrain":
        rewritten = torch.randint(4, WORDS, (args.batch, 6, LENGTH))
        more += [getattr(idc_pretrain.IDC, args.task), lambda ids: rewritten[: len(ids)]]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=not is_plain(args))
    if cfg.on_cuda and cfg.compile and not is_plain(args):
        model.compile(fullgraph=True, dynamic=False)

    def step():
        optimizer.zero_grad()
        losses = method.compute_losses(model, batches, cfg, *more)
        losses["total"].backward()
        optimizer.step()

    return step


def measure(args) -> tuple[float, float]:
    """-> seconds of a step, and peak memory in bytes, of the GPU or of the whole process. On CUDA,
    seconds are the median of eight steps; on a CPU, there is one."""
    cuda = args.device.startswith("cuda")
    if is_plain(args):
        torch.set_float32_matmul_precision("highest")
        scorer_cbr.token_match = plain_match
        cheers.token_match = plain_match
    else:
        common.set_up_device(args.device)
    torch.manual_seed(0)
    step = step_of(args)
    if not cuda:
        step()  # allocates memory
        began = time.perf_counter()
        step()
        taken = time.perf_counter() - began
        return taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for _ in range(3):  # the first compiles
        step()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times), torch.cuda.max_memory_allocated()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=METHODS, default="scorer_cbr")
    parser.add_argument("--row", choices=ROWS, default="ours", help="formulation")
    tasks = ["finetune", "mlm", "mvcl", "fda"]
    parser.add_argument("--task", choices=tasks, default="finetune", help="idc_pretrain's step")
    parser.add_argument("--batch", type=int, default=128, help="scenes per step")
    parser.add_argument("--dim", type=int, default=512, help="width D")
    text = "shape of the features (default: the paper's)"
    parser.add_argument("--grid", type=int, nargs=3, metavar=("C", "H", "W"), help=text)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.grid is None:
        args.grid = (2048, 7, 7) if args.method == "idc_pretrain" else (1024, 14, 14)
    taken, peak = measure(args)
    print(f"{args.method}, {args.row}: {taken:.3f} s, peak {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
