"""Speed and memory of the methods against their plain formulations, on this machine. Not a test.

    python tests/bench.py step [--method dirl_ccr] [--batch 128]    one training step, papers' size
    python tests/bench.py step --method idc_pretrain --task mvcl    one of pre-training
    python tests/bench.py decode [--method dirl_ccr] [--batch 64]   greedy captions, cached and not
    python tests/bench.py match [--batch 128]                       token-wise matching, both passes

The plain formulation computes every matching score at once (as in tests/test_match.py), writes out
attention's probabilities, uses float32 without torch.compile, and starts decoding over at each
word. The two formulations take turns. Each turn is a separate process, so that its peak memory can
be measured. Operations are those of dense matrix products. They are also given as a share of the
rate of one large matrix product in the same process, in bfloat16 if the step uses it. RDD+ACR's
phrases (for ViT-L-14's text encoder, with random weights) and CHEERS's entities are random.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
from open_clip.transformer import TextTransformer
from test_match import dense_match
from torch import Tensor
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
CLIP = 768  # ViT-L-14's width
PHRASE = 16  # ids of a noun phrase
REPEATED = 10  # phrases that the distractors share

# Operations that PyTorch does not count by itself.
for kernel, count in (("", sdpa_flop), ("_backward", sdpa_backward_flop)):
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{kernel}")
    if operator not in flop_registry:  # newer versions of PyTorch count it
        register_flop_formula(operator, True)(count)
register_flop_formula(torch.ops.common.token_match)(
    lambda q, k, **_: 2 * q[0] * q[1] * q[2] * k[0] * k[1]
)


def plain_decode(model, before, after, *entities):
    """Greedy decoding that, for every word, runs the whole decoder on all words so far."""
    seen = model.encode(before, after, *entities)[0]
    so_far = []

    def step(words, t):
        so_far.append(words)
        hidden = model.decoder(torch.stack(so_far, 1), seen)[0]
        return model.decoder.head(hidden[:, -1])

    return decode(step, len(before), model.max_len, before.device)


def plain_attend(self, q, k, v, causal=False, mask=None):
    """common.Attention.attend, but with every probability written out."""
    scores = self.scores(q, k)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.dropout(scores.softmax(-1), self.dropout, self.training)
    return self.out((weights @ self._split(v)).transpose(1, 2).flatten(2))


def plain_match(q, k, heads=1):
    """common.token_match, but with every matching score of a head at once."""
    total = 0
    for q_of_head, k_of_head in zip(q.chunk(heads, -1), k.chunk(heads, -1), strict=True):
        total = total + dense_match(q_of_head, k_of_head)
    return total / heads


def phrases_of(cfg, texts):
    """rdd_acr.Phrases of two batches of captions: each changed pair has its own phrase; the other
    pairs share a few."""
    half = len(texts) // 2
    row_of = {}
    for i, text in enumerate(texts):
        row_of[text] = REPEATED + i if i < half else i % REPEATED
    clip = TextTransformer(77, 49408, CLIP, heads=12, layers=12, output_dim=CLIP).to(cfg.device)
    clip.requires_grad_(False).eval()
    phrases = object.__new__(rdd_acr.Phrases)
    phrases.rows = {"nouns": row_of, "verbs": row_of}
    phrases.clip = clip
    phrases.ignore_equal = True
    phrases.tokens = torch.randint(49408, (REPEATED + half, PHRASE), device=cfg.device)
    return phrases


# ---- what is timed -------------------------------------------------------------------------------


def nothing():
    pass


@dataclass
class Work:
    run: Callable  # the function to time
    compile: Callable = nothing  # compiles the function after its first run
    moved: int = 0  # bytes of features copied to the device


def config_of(args):
    """The paper's Config on CLEVR-Change, with the size given by the flags."""
    method = sys.modules[args.method]
    cfg = preset(method.Config, method.PRESETS, {}, "clevr_change")
    return dataclasses.replace(
        cfg, dim=args.dim, device=args.device, batch_size=args.batch, amp=not args.plain
    )


def match_work(args) -> Work:
    """Token-wise matching, forward and backward."""
    _, height, width = args.grid
    shape = (args.batch, height * width, args.dim)
    q = torch.randn(shape, device=args.device, requires_grad=True)
    k = torch.randn(shape, device=args.device, requires_grad=True)
    match = plain_match if args.plain else token_match
    heads = config_of(args).heads
    return Work(lambda: match(q, k, heads).sum().backward())


def model_of(args, cfg):
    """A model with random weights."""
    return METHODS[args.method](cfg, WORDS, args.grid, args.length).to(args.device)


def entities_of(args, cfg) -> list[Tensor]:
    """CHEERS's entities of each pair (B, K, d); nothing for the other methods."""
    if args.method != "cheers":
        return []
    return [torch.randn(args.batch, cfg.k, cfg.clip_dim, device=args.device)]


def decode_work(args) -> Work:
    """Greedy decoding; no caption ends early."""
    cfg = config_of(args)
    model = model_of(args, cfg).eval()
    decoder = getattr(model, "decoder", model)
    decoder.head.bias.data[[NULL, END]] = -1e9
    entities = entities_of(args, cfg)
    images = torch.rand(2, args.batch, *args.grid).half()
    before, after = images.to(args.device).float()

    @torch.no_grad()
    def run():
        if args.plain:
            plain_decode(model, before, after, *entities)
        else:
            model.generate(before, after, *entities)

    return Work(run, moved=images.nbytes)


def step_work(args) -> Work:
    """A training step: changed pairs and distractor pairs of the same scenes."""
    cfg = config_of(args)
    method = sys.modules[args.method]
    model = model_of(args, cfg)
    entities = entities_of(args, cfg)
    before, after = torch.rand(2, args.batch, *args.grid).half()
    if args.device.startswith("cuda"):
        before = before.pin_memory()
        after = after.pin_memory()
    caption = torch.randint(4, WORDS, (args.batch, args.length))
    texts = [str(i) for i in range(2 * args.batch)]
    batches = []
    for some in (texts[: args.batch], texts[args.batch :]):
        batches.append(data.Batch(before, after, caption, some, some))

    more = []  # further arguments of the method's compute_losses
    if args.method == "rdd_acr":
        more.append(phrases_of(cfg, texts))
    elif args.method == "cheers":
        more.append(lambda images: entities[0])
    elif args.method == "idc_pretrain":
        rewritten = torch.randint(4, WORDS, (args.batch, 6, args.length))
        more += [args.task, lambda ids: rewritten[: len(ids)]]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=not args.plain)

    def run():
        optimizer.zero_grad()
        method.compute_losses(model, tuple(batches), cfg, *more)["total"].backward()
        optimizer.step()

    def compile_it():
        if args.plain or not cfg.compile or not args.device.startswith("cuda"):
            return
        model.compile(fullgraph=True, dynamic=False)
        run()

    images_of_a_batch = before.nbytes + after.nbytes
    return Work(run, compile_it, 2 * images_of_a_batch)


WORKS = {"step": step_work, "match": match_work, "decode": decode_work}

# ---- measuring -----------------------------------------------------------------------------------


def measure(args) -> dict:
    """Measures one run, after a first run that counts its operations: seconds, operations, bytes of
    features copied, peak memory (of the GPU, or of the whole process), and the machine's rate, in
    operations per second of a matrix product."""
    cuda = args.device.startswith("cuda")
    if args.plain:
        torch.set_float32_matmul_precision("highest")
        scorer_cbr.token_match = plain_match
        cheers.token_match = plain_match
        common.Attention.attend = plain_attend
    else:
        common.set_up_device(args.device)
    torch.manual_seed(0)
    work = WORKS[args.what](args)
    with FlopCounterMode(display=False) as counter:
        work.run()
    work.compile()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    taken = seconds(work.run, cuda)
    if cuda:
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": taken,
        "operations": counter.get_total_flops(),
        "moved": work.moved,
        "peak": peak,
        "rate": product_rate(args.device, cuda and not args.plain and args.what == "step"),
    }


def seconds(run: Callable, cuda: bool) -> float:
    """The time of one call, in seconds."""
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def product_rate(device: str, bfloat16: bool) -> float:
    """Operations per second in a product of two large matrices, the best of four."""
    cuda = device.startswith("cuda")
    n = 8192 if cuda else 2048
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    x = torch.randn(n, n, device=device, dtype=dtype)
    times = [seconds(lambda: x @ x, cuda) for _ in range(4)]
    return 2 * n**3 / min(times)


def take_turns(count: int) -> dict[str, list[dict]]:
    """Runs both formulations in turn, each time in a separate process -> their measurements."""
    turns = {"plain": [], "ours": []}
    for _ in range(count):
        for row, results in turns.items():
            call = [sys.executable, *sys.argv, "--row", row]
            done = subprocess.run(call, stdout=subprocess.PIPE, text=True)
            if done.returncode == 0:
                results.append(json.loads(done.stdout.splitlines()[-1]))
    return turns


def print_row(row: str, results: list[dict]) -> float:
    """Prints the medians of a formulation -> its median time in seconds."""
    taken = statistics.median(x["seconds"] for x in results)
    rate = statistics.median(x["rate"] for x in results)
    peak = statistics.median(x["peak"] for x in results)
    operations = results[0]["operations"]
    moved = results[0]["moved"]
    print(
        f"{row:5} {taken:8.3f} s, {operations / 1e12:.3f} T operations "
        f"({operations / taken / rate:.1%} of {rate / 1e12:.3f} T per second), "
        f"peak {peak / 1e9:.2f} GB, features {moved / 1e6:.0f} MB"
    )
    return taken


def parse_command():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=WORKS)
    parser.add_argument("--method", choices=METHODS, default="scorer_cbr")
    tasks = ["finetune", "mlm", "mvcl", "fda"]
    parser.add_argument("--task", choices=tasks, default="finetune", help="idc_pretrain's step")
    parser.add_argument("--batch", type=int, default=128, help="scenes per step, or pairs")
    parser.add_argument("--dim", type=int, default=512, help="width D")
    text = "shape of the features (default: the paper's)"
    parser.add_argument("--grid", type=int, nargs=3, metavar=("C", "H", "W"), help=text)
    parser.add_argument("--length", type=int, default=24, help="ids in a caption")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=3, help="turns of each formulation")
    text = "measure only this formulation, once, and print JSON"
    parser.add_argument("--row", choices=["plain", "ours"], help=text)
    args = parser.parse_args()
    if args.what == "decode" and args.method == "idc_pretrain":
        parser.error("idc_pretrain has no plain decoding")
    if args.grid is None:
        args.grid = (2048, 7, 7) if args.method == "idc_pretrain" else (1024, 14, 14)
    args.plain = args.row == "plain"
    return args


def main():
    args = parse_command()
    if args.row:
        print(json.dumps(measure(args)))
        return
    name = f"CPU, {torch.get_num_threads()} threads"
    if args.device.startswith("cuda"):
        name = torch.cuda.get_device_name()
    about = args.method
    if args.method == "idc_pretrain":
        about += f" {args.task}"
    print(f"{args.what}, {about}, batch {args.batch}, {name}, torch {torch.__version__}")
    taken = {}
    for row, results in take_turns(args.runs).items():
        if results:
            taken[row] = print_row(row, results)
        else:
            print(f"{row:5} did not finish")
    if len(taken) == 2:
        print(f"ratio {taken['plain'] / taken['ours']:9.2f} x")


if __name__ == "__main__":
    main()
