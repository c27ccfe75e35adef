"""Speed and memory of the methods on this machine, of steps against plain ones. Not a test.

    python tools/bench.py step [--method dirl_ccr] [--batch 128]    one training step, papers' size
    python tools/bench.py step --method idc_pretrain --task mvcl    one of pre-training
    python tools/bench.py step --row released   SCORER's step with the released code's settings
    python tools/bench.py decode [--method dirl_ccr] [--batch 64]   greedy captions
    python tools/bench.py match [--batch 128]                       token-wise matching, both passes
    python tools/bench.py match --row slices                        the same without our kernels
    python tools/bench.py load [--scenes 5000] [--batch 128]        batches from a feature file
    python tools/bench.py all --out FOLDER [--dry]                  everything on one GPU machine

The plain formulation of a step computes every matching score at once (match_by_definition of
matching.py), in float32 and without torch.compile. The two formulations take turns. Each turn is
a separate process, so that its peak memory can be measured. With --row, there is one turn of one
formulation; "released" and "plain-released" have the settings of RELEASED. RDD+ACR's phrases (for
ViT-L-14's text encoder, with random weights) and CHEERS's entities are random.

`load` makes a file of CLEVR-Change's rows, 1.2 MB a scene, in the folder for temporary files, which
must be on a disk (TMPDIR names another). Cold: the file is not in the system's cache. Warm: the
same batches again.

`all` runs tests/test_cuda.py (in parallel, by pytest-xdist), then every method's step and decoding,
each with a profile. It takes at most seven minutes. --dry: tiny, one after the other, on the CPU.
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
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import numpy as np
import torch
from open_clip.transformer import TextTransformer
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import cheers
import common
import data
import dirl_ccr
import idc_pretrain
import matching
import rdd_acr
import scorer_cbr
from common import END, NULL
from support.features import Features, write_features
from support.pairs import Pair, Release, Scene
from support.run import preset
from support.text import Vocab, frequent_words
from support.threads import prefetch

METHODS = {
    "scorer_cbr": scorer_cbr.SCORER,
    "dirl_ccr": dirl_ccr.DIRL,
    "rdd_acr": rdd_acr.RDD,
    "cheers": cheers.CHEERS,
    "idc_pretrain": idc_pretrain.IDC,
}
ROWS = ["plain", "ours", "plain-released", "released", "slices"]
WORDS = 76  # CLEVR-Change's
CLIP = 768  # ViT-L-14's width
PHRASE = 16  # ids of a noun phrase
REPEATED = 10  # phrases that the distractors share


# ---- what is timed -------------------------------------------------------------------------------


def plain_match(q, k, heads=1):
    """matching.token_match, but with every matching score of a head at once."""
    total = 0
    for q_of_head, k_of_head in zip(q.chunk(heads, -1), k.chunk(heads, -1), strict=True):
        total = total + matching.match_by_definition(q_of_head, k_of_head, 1)
    return total / heads


def config_of(args):
    """The paper's or the release's Config on CLEVR-Change, with the size given by the flags."""
    method = sys.modules[args.method]
    released = getattr(method, "RELEASED", None)
    variant = "paper"
    if args.row.endswith("released"):
        assert released, f"{args.method} has no released settings"
        variant = "released"
    cfg = preset(method.Config, method.PRESETS, released, "clevr_change", variant)
    size = {"dim": args.dim, "batch_size": args.batch}
    return dataclasses.replace(cfg, device=args.device, amp=not is_plain(args), **size)


def is_plain(args) -> bool:
    return args.row.startswith("plain")


def match_work(args) -> Callable:
    """Token-wise matching, forward and backward."""
    _, height, width = args.grid
    shape = (args.batch, height * width, args.dim)
    kind = torch.float32 if is_plain(args) or args.device == "cpu" else torch.bfloat16
    q = torch.randn(shape, device=args.device, dtype=kind, requires_grad=True)
    k = torch.randn(shape, device=args.device, dtype=kind, requires_grad=True)
    match = plain_match if is_plain(args) else matching.token_match
    cfg = config_of(args)
    heads = 1 if getattr(cfg, "matching", "") == "tm" else cfg.heads  # SCORER's, as released: one
    return lambda: match(q, k, heads).sum().backward()


def model_of(args, cfg):
    """A model with random weights."""
    return METHODS[args.method](cfg, WORDS, args.grid, args.length).to(args.device)


def entities_of(args, cfg) -> list[Tensor]:
    """CHEERS's entities of each pair (B, K, d); nothing for the other methods."""
    if args.method != "cheers":
        return []
    return [torch.randn(args.batch, cfg.k, cfg.clip_dim, device=args.device)]


def phrases_of(cfg, texts):
    """rdd_acr.Phrases of two batches of captions: each changed pair has its own phrases; the other
    pairs share a few."""
    half = len(texts) // 2
    readings = {}
    for i, text in enumerate(texts):
        phrase = str(i) if i < half else f"distractor {i % REPEATED}"
        readings[text] = ([f"noun {phrase}"], [f"verb {phrase}"])
    clip = TextTransformer(77, 49408, CLIP, heads=12, layers=12, output_dim=CLIP).to(cfg.device)
    clip.requires_grad_(False).eval()

    def tokenizer(texts):
        return torch.randint(49408, (len(texts), PHRASE))

    return rdd_acr.Phrases(cfg, clip, tokenizer, readings)


def decode_work(args) -> Callable:
    """Greedy captions of the longest length: each next word is predicted from all words so far,
    read anew, so the decoder runs --length - 1 times."""
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
    elif args.method == "idc_pretrain":
        rewritten = torch.randint(4, WORDS, (args.batch, 6, args.length))
        more += [args.task, lambda ids: rewritten[: len(ids)]]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=not is_plain(args))
    if cfg.on_cuda and cfg.compile and not is_plain(args):
        model.compile(fullgraph=True, dynamic=False)  # as in training

    def run():
        optimizer.zero_grad()
        losses = method.compute_losses(model, batches, cfg, *more)
        losses["total"].backward()
        optimizer.step()

    return run


WORKS = {"step": step_work, "match": match_work, "decode": decode_work}

# ---- batches from a feature file -----------------------------------------------------------------

LOADED = 10  # batches that are timed together


def write_scenes(path: Path, count: int, grid: tuple[int, int, int]) -> Release:
    """Writes a feature file of random numbers -> a release of `count` scenes of two pairs."""
    scenes = []
    for i in range(count):
        changed = Pair(f"{i}", f"default {i}", f"semantic {i}", ["something changed"])
        same = Pair(f"{i}_n", f"default {i}", f"nonsemantic {i}", ["nothing changed"])
        scenes.append(Scene((changed, same)))
    names = sorted({name for s in scenes for p in s.pairs for name in (p.before, p.after)})
    files = dict.fromkeys(names, Path(__file__))  # that the features are said to be made from
    rng = np.random.default_rng(0)
    blocks = (rng.random((1, *grid), np.float32) for _ in names)
    write_features(path, files, blocks, "random", "none")
    return Release(scenes={"train": scenes, "val": [], "test": []})


def plain_batches(dataset: data.Dataset, size: int, seed: int):
    """The four reads of a step at commit b9ad509: both images of both pairs."""
    scenes = dataset.scenes["train"]
    features = dataset.features
    order = np.random.default_rng(seed).permutation(len(scenes))
    for start in range(0, len(scenes), size):
        tensors = []
        for n in (0, 1):
            pairs = [scenes[i].pairs[n] for i in order[start : start + size]]
            for names in ([pair.before for pair in pairs], [pair.after for pair in pairs]):
                index = [features.row_of[name] for name in names]
                tensors.append(torch.from_numpy(features.data.numpy()[index]))
        yield tensors


def load_times(path: Path, release: Release, row: str, args, seed: int) -> dict[str, float]:
    """Seconds a batch in one formulation, of the same batches twice."""
    with open(path, "rb") as f:
        os.fsync(f.fileno())  # only what is on the disk can be dropped from the cache
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    vocab = Vocab(frequent_words(release.captions(["train"])))
    # The file is opened for each formulation anew, because mapped pages stay in the cache.
    features = Features(path, "", "random", args.device)
    dataset = data.Dataset("clevr_change", path.parent, release, vocab, features)
    times = {}
    for state in ("cold", "warm"):
        if row == "plain":
            steps = prefetch(plain_batches(dataset, args.batch, seed))
        else:
            steps = dataset.train_batches(args.batch, seed, 0, LOADED)
        began = time.perf_counter()
        count = sum(1 for _ in itertools.islice(steps, LOADED))
        times[state] = (time.perf_counter() - began) / count
    return times


def compare_loading(args) -> None:
    """Both formulations in turn; prints each turn, and the medians."""
    turns = {"plain": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "features.h5")
        release = write_scenes(path, args.scenes, args.grid)
        print(f"load, {path.stat().st_size / 1e9:.1f} GB, batch {args.batch}, {args.device}")
        for seed in range(args.runs):
            for row, times in turns.items():
                times.append(load_times(path, release, row, args, seed))
                print(f"{row:5} cold {times[-1]['cold']:.3f} s, warm {times[-1]['warm']:.3f} s")
    for state in ("cold", "warm"):
        plain = statistics.median(times[state] for times in turns["plain"])
        ours = statistics.median(times[state] for times in turns["ours"])
        print(f"{state}: plain {plain:.3f} s, ours {ours:.3f} s, ratio {plain / ours:.2f} x")


# ---- measuring -----------------------------------------------------------------------------------


def measure(args) -> dict[str, float]:
    """Measures one formulation -> seconds of a run, and peak memory in bytes, of the GPU or of the
    whole process. On CUDA, seconds are the median of eight runs; on a CPU, there is one."""
    cuda = args.device.startswith("cuda")
    if is_plain(args):
        torch.set_float32_matmul_precision("highest")
        scorer_cbr.token_match = plain_match
        cheers.token_match = plain_match
    else:
        common.set_up_device(args.device)
    if args.row == "slices":
        matching.kernels_fit = lambda *_: False
    torch.manual_seed(0)
    run = WORKS[args.what](args)
    for _ in range(3 if cuda else 1):  # the first compiles
        run()
    if args.wait:
        sys.stdin.readline()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        taken = statistics.median(seconds(run, torch.cuda.synchronize) for _ in range(8))
        peak = torch.cuda.max_memory_allocated()
    else:
        taken = seconds(run)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"seconds": taken, "peak": peak}
    if args.profile:
        print(json.dumps(result), flush=True)  # in case the profile fails
        print_profile(run, cuda)
    return result


def seconds(run: Callable, wait: Callable = lambda: None) -> float:
    """The time of one call, in seconds. wait() returns when all work is done."""
    wait()
    began = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - began


def take_turns(args) -> dict[str, list[dict]]:
    """Runs the formulations in turn, each time in a separate process -> their measurements."""
    turns = {"ours": []}
    if args.what != "decode":
        turns["plain"] = []
    for _ in range(args.runs):
        for row, results in turns.items():
            call = [sys.executable, *sys.argv, "--row", row]
            done = subprocess.run(call, stdout=subprocess.PIPE, text=True)
            if done.returncode == 0:
                results.append(json.loads(done.stdout.splitlines()[-1]))
    return turns


# ---- profiles ------------------------------------------------------------------------------------


def print_profile(run: Callable, cuda: bool) -> None:
    """Prints tables of one run: the GPU's kernels, those of matching apart; what the host did; and
    the lines of Python where it waited for the GPU."""
    activities = [ProfilerActivity.CPU]
    if cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        run()
        if cuda:
            torch.cuda.synchronize()
    of_matching = []  # rows of a table: milliseconds, calls, name
    others = []
    host = []
    for event in recorded.key_averages():
        gpu = event.self_device_time_total / 1000
        if event.device_type == DeviceType.CPU:
            name = f"{event.device_time_total / 1000:9.3f} {event.key}"
            host.append((event.self_cpu_time_total / 1000, event.count, name))
        elif event.key.startswith(("match_kernel", "gradient_kernel")):
            of_matching.append((gpu, event.count, event.key))
        elif not event.is_user_annotation:  # an annotation covers kernels that are counted
            others.append((gpu, event.count, event.key))
    print_table("kernels of matching", of_matching)
    print_table("other kernels (with a few small ones of matching)", others)
    print_table("the host, and before each name the GPU's ms for it and what it calls", host)
    if cuda:
        print_waits(run)


def print_table(title: str, rows: list[tuple[float, int, str]]) -> None:
    total = sum(row[0] for row in rows)
    calls = sum(row[1] for row in rows)
    print(f"\n{title}: {total:.3f} ms, {calls} calls")
    for milliseconds, count, name in sorted(rows, reverse=True):
        print(f"{milliseconds:9.3f} {count:6} {name[:150]}")


def print_waits(run: Callable) -> None:
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    torch.cuda.set_sync_debug_mode("default")
    print("\nwhere the host waits for the GPU (and other warnings): times")
    for place, count in Counter(f"{w.filename}:{w.lineno} {w.message}" for w in caught).items():
        print(f"{count:6} {place}")


# ---- everything on one GPU machine ---------------------------------------------------------------

CASES = {  # name -> flags
    "step_released": "step --row released",
    "step_mvcl": "step --method idc_pretrain --task mvcl --row ours",
    "match_kernels": "match --row ours",
    "match_slices": "match --row slices",
}
for name in METHODS:
    CASES[f"step_{name}"] = f"step --method {name} --row ours"
    CASES[f"decode_{name}"] = f"decode --method {name} --row ours --batch 64"
DRY = "--batch 2 --dim 16 --grid 4 2 3 --length 5"
TESTS = "-m pytest -p no:cacheprovider -vv tests/test_cuda.py"
TESTS_S = 170  # until then, the tests must have ended, and the cases should have compiled
CASE_S = 20  # for timing and profiling a case


def start(command: str, log: Path, dry: bool) -> subprocess.Popen:
    """Starts Python in the repository's folder. What it prints goes to the log."""
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"} | os.environ
    if dry:
        env["CUDA_VISIBLE_DEVICES"] = ""
    streams = {"stdin": subprocess.PIPE, "stdout": log.open("w"), "stderr": subprocess.STDOUT}
    call = [sys.executable, *command.split()]
    return subprocess.Popen(call, cwd=Path(__file__).parents[1], env=env, text=True, **streams)


def finish(process: subprocess.Popen, log: Path, limit: float) -> None:
    """Lets a waiting process go on, ends it after `limit` seconds, and prints its last line."""
    try:
        process.communicate("your turn\n", timeout=limit)
        end = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        end = "out of time"
    *_, last = ["", *log.read_text().splitlines()]
    print(f"{log.stem}: {end}: {last}", flush=True)


def run_all(out: Path, dry: bool) -> None:
    """Runs the CUDA tests and all CASES. Each is a process with a log and a time limit, so that one
    that fails does not cost the others.

    They start together, and the cases compile while the tests run. Then each case is timed in turn,
    while the others wait. In the dry form, a case starts at its turn, which needs less memory."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + TESTS_S
    more = f" --wait --profile {DRY if dry else ''}"
    processes = {}
    if not dry:
        for name, flags in CASES.items():
            processes[name] = start("tools/bench.py " + flags + more, out / f"{name}.log", dry)
    workers = "" if dry else " -n 12"  # which needs pytest-xdist
    tests = start(TESTS + workers, out / "tests.log", dry)
    finish(tests, out / "tests.log", TESTS_S)
    for name, flags in CASES.items():
        limit = max(0, deadline - time.monotonic()) + CASE_S
        if dry:
            processes[name] = start("tools/bench.py " + flags + more, out / f"{name}.log", dry)
            limit = TESTS_S
        finish(processes[name], out / f"{name}.log", limit)


def parse_command():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*WORKS, "load", "all"])
    parser.add_argument("--method", choices=METHODS, default="scorer_cbr")
    tasks = ["caption", *idc_pretrain.TASKS]
    parser.add_argument("--task", choices=tasks, default="caption", help="idc_pretrain's step")
    parser.add_argument("--batch", type=int, default=128, help="scenes per step, or pairs")
    parser.add_argument("--dim", type=int, default=512, help="width D")
    parser.add_argument("--grid", type=int, nargs=3, help="C, H, W of the features")
    parser.add_argument("--length", type=int, default=24, help="ids of a caption")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=3, help="turns of each formulation")
    parser.add_argument("--scenes", type=int, default=5000, help="scenes in the file of load")
    parser.add_argument("--row", choices=ROWS, help="measure only this formulation; print JSON")
    parser.add_argument("--profile", action="store_true", help="with --row: also print a profile")
    parser.add_argument("--wait", action="store_true", help="with --row: wait for a line first")
    parser.add_argument("--out", default="runs/gpu", help="all's folder for logs and profiles")
    parser.add_argument("--dry", action="store_true", help="all in tiny sizes on the CPU")
    args = parser.parse_args()
    if args.grid is None:
        args.grid = (2048, 7, 7) if args.method == "idc_pretrain" else (1024, 14, 14)
    return args


def main():
    args = parse_command()
    if args.what == "load":
        compare_loading(args)
        return
    if args.row:
        print(json.dumps(measure(args)))
        return
    machine = f"CPU, {torch.get_num_threads()} threads"
    if args.device.startswith("cuda"):
        machine = torch.cuda.get_device_name()
    if args.what == "all":
        print(f"{machine}, torch {torch.__version__}")
        run_all(Path(args.out).resolve(), args.dry)
        return
    print(f"{args.what}, {args.method}, batch {args.batch}, {machine}, torch {torch.__version__}")
    taken = {}
    for row, results in take_turns(args).items():
        if not results:  # its process ran out of memory, say
            continue
        taken[row] = statistics.median(x["seconds"] for x in results)
        peak = statistics.median(x["peak"] for x in results)
        print(f"{row:5} {taken[row]:8.3f} s, peak {peak / 1e9:.2f} GB")
    if len(taken) == 2:
        print(f"ratio {taken['plain'] / taken['ours']:9.2f} x")


if __name__ == "__main__":
    main()
