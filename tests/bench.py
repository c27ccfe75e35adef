"""Speed and memory of the methods on this machine. Not a test.

    python tests/bench.py step [--method dirl_ccr] [--batch 128]    one training step, papers' size
    python tests/bench.py step --method idc_pretrain --task mvcl    one of pre-training
    python tests/bench.py step --row released   SCORER's step with the released code's settings
    python tests/bench.py decode [--method dirl_ccr] [--batch 64]   greedy captions
    python tests/bench.py match [--batch 128]                       token-wise matching, both passes
    python tests/bench.py load [--scenes 5000] [--batch 128]        batches from a feature file

Each run is a separate process, so that its peak memory can be measured. With --row, there is one
run, which prints JSON; "released" has the settings of RELEASED. RDD+ACR's phrases (for ViT-L-14's
text encoder, with random weights) and CHEERS's entities are random. To compare commits, run each
one's script on an idle machine.

`load` makes a file of CLEVR-Change's rows, 1.2 MB a scene, in the folder for temporary files, which
must be on a disk (TMPDIR names another). Cold: the file is not in the system's cache. Warm: the
same batches again.
"""

import argparse
import dataclasses
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import numpy as np
import torch
from open_clip.transformer import TextTransformer
from torch import Tensor

import cheers
import common
import data
import dirl_ccr
import idc_pretrain
import rdd_acr
import scorer_cbr
from common import END, NULL, preset, token_match

METHODS = {
    "scorer_cbr": scorer_cbr.SCORER,
    "dirl_ccr": dirl_ccr.DIRL,
    "rdd_acr": rdd_acr.RDD,
    "cheers": cheers.CHEERS,
    "idc_pretrain": idc_pretrain.IDC,
}
ROWS = ["ours", "released"]
WORDS = 76  # CLEVR-Change's
CLIP = 768  # ViT-L-14's width
PHRASE = 16  # ids of a noun phrase
REPEATED = 10  # phrases that the distractors share


# ---- what is timed -------------------------------------------------------------------------------


def config_of(args):
    """The paper's or the release's Config on CLEVR-Change, with the size given by the flags."""
    method = sys.modules[args.method]
    released = getattr(method, "RELEASED", None)
    variant = "paper"
    if args.row == "released":
        assert released, f"{args.method} has no released settings"
        variant = "released"
    cfg = preset(method.Config, method.PRESETS, released, "clevr_change", variant)
    return dataclasses.replace(cfg, dim=args.dim, device=args.device, batch_size=args.batch)


def match_work(args) -> Callable:
    """Token-wise matching, forward and backward."""
    _, height, width = args.grid
    shape = (args.batch, height * width, args.dim)
    q = torch.randn(shape, device=args.device, requires_grad=True)
    k = torch.randn(shape, device=args.device, requires_grad=True)
    cfg = config_of(args)
    heads = 1 if getattr(cfg, "matching", "") == "tm" else cfg.heads  # SCORER's, as released: one
    return lambda: token_match(q, k, heads).sum().backward()


def model_of(args, cfg):
    """A model with random weights."""
    return METHODS[args.method](cfg, WORDS, args.grid, args.length).to(args.device)


def entities_of(args, cfg) -> list[Tensor]:
    """CHEERS's entities of each pair (B, K, d); nothing for the other methods."""
    if args.method != "cheers":
        return []
    return [torch.randn(args.batch, cfg.k, cfg.clip_dim, device=args.device)]


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


def decode_work(args) -> Callable:
    """Greedy decoding; no caption ends early."""
    cfg = config_of(args)
    model = model_of(args, cfg).eval()
    decoder = getattr(model, "decoder", model)
    decoder.head.bias.data[[NULL, END]] = -1e9
    entities = entities_of(args, cfg)
    before, after = torch.rand(2, args.batch, *args.grid).to(args.device)

    return lambda: model.generate(before, after, *entities)


def step_work(args) -> Callable:
    """A training step: changed pairs and distractor pairs of the same scenes."""
    cfg = config_of(args)
    method = sys.modules[args.method]
    model = model_of(args, cfg)
    entities = entities_of(args, cfg)
    before, after = torch.rand(2, args.batch, *args.grid).half()
    if cfg.on_cuda:
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
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    if cfg.on_cuda and cfg.compile:
        model.compile(fullgraph=True, dynamic=False)

    def run():
        optimizer.zero_grad()
        if args.method == "idc_pretrain":
            rewritten = torch.randint(4, WORDS, (args.batch, 6, args.length))
            source = idc_pretrain.Source(iter([batches]), lambda ids: rewritten[: len(ids)])
            losses = getattr(idc_pretrain, f"{args.task}_task")(model, source, cfg)
        else:
            losses = method.compute_losses(model, batches, cfg, *more)
        losses["total"].backward()
        optimizer.step()

    return run


WORKS = {"step": step_work, "match": match_work, "decode": decode_work}

# ---- batches from a feature file -----------------------------------------------------------------

LOADED = 10  # batches that are timed together


def write_scenes(path: Path, count: int, grid: tuple[int, int, int]) -> data.Release:
    """Writes a feature file of random numbers -> a release of `count` scenes of two pairs."""
    scenes = []
    for i in range(count):
        changed = data.Pair(f"{i}", f"default {i}", f"semantic {i}", ["something changed"])
        same = data.Pair(f"{i}_n", f"default {i}", f"nonsemantic {i}", ["nothing changed"])
        scenes.append(data.Scene((changed, same)))
    names = sorted(set().union(*(scene.images() for scene in scenes)))
    files = [Path(__file__)] * len(names)  # those that the features are said to be made from
    rng = np.random.default_rng(0)
    blocks = (rng.random((1, *grid), np.float32) for _ in names)
    data.write_features(path, names, files, blocks, "random", "none")
    return data.Release(scenes={"train": scenes, "val": [], "test": []})


def load_times(path: Path, release: data.Release, args, seed: int) -> dict[str, float]:
    """Seconds a batch, of the same batches twice."""
    with open(path, "rb") as f:
        os.fsync(f.fileno())  # only what is on the disk can be dropped from the cache
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    vocab = data.Vocab.from_captions(release.captions(["train"]))
    # The file is opened anew each time, because mapped pages stay in the cache.
    features = data.Features(path, "", "random")
    features.device = args.device
    dataset = data.Dataset("clevr_change", path.parent, release, vocab, features)
    times = {}
    for state in ("cold", "warm"):
        steps = dataset.train_batches(args.batch, seed, 0, LOADED)
        began = time.perf_counter()
        count = sum(1 for _ in itertools.islice(steps, LOADED))
        times[state] = (time.perf_counter() - began) / count
    return times


def measure_loading(args) -> None:
    """Prints the times of each run, and their medians."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "features.h5")
        release = write_scenes(path, args.scenes, args.grid)
        print(f"load, {path.stat().st_size / 1e9:.1f} GB, batch {args.batch}, {args.device}")
        for seed in range(args.runs):
            times = load_times(path, release, args, seed)
            runs.append(times)
            print(f"cold {times['cold']:.3f} s, warm {times['warm']:.3f} s", flush=True)
    for state in ("cold", "warm"):
        print(f"{state}: {statistics.median(times[state] for times in runs):.3f} s")


# ---- measuring -----------------------------------------------------------------------------------


def measure(args) -> dict[str, float]:
    """-> seconds of a run, and peak memory in bytes, of the GPU or of the whole process. On CUDA,
    seconds are the median of eight runs; on a CPU, there is one."""
    cuda = args.device.startswith("cuda")
    common.set_up_device(args.device)
    torch.manual_seed(0)
    run = WORKS[args.what](args)
    for _ in range(3 if cuda else 1):  # the first compiles
        run()
    if not cuda:
        taken = seconds(run)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": taken, "peak": peak}
    torch.cuda.reset_peak_memory_stats()
    taken = statistics.median(seconds(run, torch.cuda.synchronize) for _ in range(8))
    return {"seconds": taken, "peak": torch.cuda.max_memory_allocated()}


def seconds(run: Callable, wait: Callable = lambda: None) -> float:
    """The time of one call, in seconds. wait() returns when all work is done."""
    wait()
    began = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - began


def repeated(args) -> list[dict[str, float]]:
    """The measurements of several runs, each in a process of its own."""
    results = []
    for _ in range(args.runs):
        call = [sys.executable, *sys.argv, "--row", "ours"]
        done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def parse_command():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*WORKS, "load"])
    parser.add_argument("--method", choices=METHODS, default="scorer_cbr")
    tasks = ["finetune", "mlm", "mvcl", "fda"]
    parser.add_argument("--task", choices=tasks, default="finetune", help="idc_pretrain's step")
    parser.add_argument("--batch", type=int, default=128, help="scenes per step, or pairs")
    parser.add_argument("--dim", type=int, default=512, help="width D")
    text = "shape of the features (default: the paper's)"
    parser.add_argument("--grid", type=int, nargs=3, metavar=("C", "H", "W"), help=text)
    parser.add_argument("--length", type=int, default=24, help="ids in a caption")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=3, help="each in a process of its own")
    parser.add_argument("--scenes", type=int, default=5000, help="of load's file")
    text = "measure once, with these settings, and print JSON"
    parser.add_argument("--row", choices=ROWS, help=text)
    args = parser.parse_args()
    if args.grid is None:
        args.grid = (2048, 7, 7) if args.method == "idc_pretrain" else (1024, 14, 14)
    return args


def main():
    args = parse_command()
    if args.what == "load":
        measure_loading(args)
        return
    if args.row:
        print(json.dumps(measure(args)))
        return
    machine = f"CPU, {torch.get_num_threads()} threads"
    if args.device.startswith("cuda"):
        machine = torch.cuda.get_device_name()
    print(f"{args.what}, {args.method}, batch {args.batch}, {machine}, torch {torch.__version__}")
    results = repeated(args)
    taken = statistics.median(x["seconds"] for x in results)
    peak = statistics.median(x["peak"] for x in results)
    print(f"{taken:.3f} s, peak {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
