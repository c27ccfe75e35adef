"""What the code computes, whatever it looks like: hashes of ten steps of every method. Not a test.

    python tests/fingerprint.py --data_dir data/mini-200     of 200 scenes: prints hashes
    python tests/fingerprint.py ... --out before.json        and keeps them
    python tests/fingerprint.py ... --compare before.json    and says what differs from kept ones

A case is a method and its flags. Its weights after ten steps, its logged losses and its captions of
the test split are hashed one by one. Equal hashes before and after a change show that it moved
nothing, as far as the same machine, torch and data are used.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
STEPS = [
    "--scenes",
    "200",
    "--steps",
    "10",
    "--log_every",
    "1",
    "--eval_every",
    "5",
    "--device",
    "cpu",
]
ALL_TASKS = ["--pretrain_steps", "10", "--mlm", "1", "--mvcl", "1", "--fda", "1"]
CASES = {
    "SCORER+CBR": ["scorer_cbr.py"],
    "SCORER+CBR, released": ["scorer_cbr.py", "--variant", "released"],
    "DIRL+CCR": ["dirl_ccr.py"],
    "DIRL+CCR, released": ["dirl_ccr.py", "--variant", "released"],
    "RDD+ACR": ["rdd_acr.py"],
    "CHEERS": ["cheers.py"],
    "IDC": ["idc_pretrain.py", *ALL_TASKS],
    "IDC, released": ["idc_pretrain.py", "--variant", "released", *ALL_TASKS],
}


def run(command: list[str], data_dir: Path, out: Path) -> None:
    """Ten steps of a method on one thread, into the folder `out`."""
    script, *flags = command
    call = [sys.executable, str(ROOT / script), *flags, *STEPS]
    call += ["--data_dir", str(data_dir), "--out_dir", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(call)} failed:\n{done.stdout}{done.stderr}")


def hashes(out: Path) -> dict[str, str]:
    """Of a finished run: {"weights", "losses", "captions"}."""
    weights = hashlib.sha256()
    model = torch.load(out / "last.pt", weights_only=True)["model"]
    for name in sorted(model):
        weights.update(model[name].contiguous().numpy().tobytes())
    losses = hashlib.sha256()
    for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["event"] == "train":
            del row["seconds"]
            losses.update(json.dumps(row, sort_keys=True).encode())
    captions = json.loads((out / "captions_test.json").read_bytes())
    text = json.dumps(captions, sort_keys=True)
    return {
        "weights": weights.hexdigest()[:12],
        "losses": losses.hexdigest()[:12],
        "captions": hashlib.sha256(text.encode()).hexdigest()[:12],
    }


def measure(data_dir: Path) -> dict[str, dict[str, str]]:
    """The hashes of every case."""
    found = {}
    for case, command in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "run")
            run(command, data_dir, out)
            found[case] = hashes(out)
        print(case, found[case], flush=True)
    return found


def fingerprint(found: dict[str, dict[str, str]]) -> str:
    """One hash of all hashes."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", type=Path, required=True, help="a small, prepared mini")
    parser.add_argument("--out", type=Path, help="where to keep the hashes")
    parser.add_argument("--compare", type=Path, help="kept hashes")
    args = parser.parse_args()
    found = measure(args.data_dir)
    print("fingerprint:", fingerprint(found))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.compare:
        kept = json.loads(args.compare.read_text(encoding="utf-8"))
        changed = [case for case in CASES if found[case] != kept.get(case)]
        print("differs: " + ", ".join(changed) if changed else "all equal")
        sys.exit(bool(changed))


if __name__ == "__main__":
    main()
