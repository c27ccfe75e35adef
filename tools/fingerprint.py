"""What the code computes, whatever it looks like: hashes of ten steps of every method. Not a test.

    python tools/fingerprint.py                          print hashes: two minutes on one core
    python tools/fingerprint.py --out before.json        and keep them
    python tools/fingerprint.py --against COMMIT         and say what differs from that commit's

A case is a method and its flags. Its weights after ten steps, its logged losses, its captions of
the test split and their scores are hashed separately. Equal hashes before and after a change of the
code show that no number has moved, provided that machine, torch and data are the same. The data are
a mini of 200 scenes, which each run draws.

--against runs this script with that commit's code and with this one. It notes in
tools/results.json which scripts have only equal hashes, so that results.py takes their records of
the older commit for records of the newer one.
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data
from support.files import run_main

SHORT = "--steps 10 --log_every 1 --eval_every 5 --device cpu"
CASES = {
    "SCORER+CBR": "scorer_cbr.py",
    "SCORER+CBR, released": "scorer_cbr.py --variant released",
    "DIRL+CCR": "dirl_ccr.py",
    "DIRL+CCR, released": "dirl_ccr.py --variant released",
    "RDD+ACR": "rdd_acr.py",
    "CHEERS": "cheers.py",
    "IDC": "idc_pretrain.py --mlm 1 --mvcl 1 --fda 1",
    "IDC, released": "idc_pretrain.py --variant released --mlm 1 --mvcl 1 --fda 1",
}


def run(command: str, root: Path, out: Path) -> None:
    """Runs ten steps of a command on one thread, then captions and scores, into the folder `out`.

    root: the folder of the small mini."""
    torch.set_num_threads(1)
    script, *flags = command.split()
    if script == "idc_pretrain.py":
        flags = ["--pretrain_steps", "10", *flags]
    flags += [*SHORT.split(), "--data_dir", str(root), "--out_dir", str(out)]
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        importlib.import_module(script.removesuffix(".py")).main(flags)


def hashes(out: Path) -> dict[str, str]:
    """Of a finished run: {"weights", "losses", "captions", "scores"}."""
    model = torch.load(out / "last.pt", weights_only=True)["model"]
    # Sorted by their content, because a change may rename modules or make them in another order.
    of_each = [hashlib.sha256(w.contiguous().numpy().tobytes()).hexdigest() for w in model.values()]
    weights = hashlib.sha256("".join(sorted(of_each)).encode())
    losses = hashlib.sha256()
    for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["event"] == "train":
            del row["seconds"]
            losses.update(json.dumps(row, sort_keys=True).encode())
    captions = json.loads((out / "captions_test.json").read_bytes())
    text = hashlib.sha256(json.dumps(captions, sort_keys=True).encode())
    written = json.loads((out / "scores_test.json").read_bytes())
    for control in ("one caption for all", "captions of other pairs"):  # which no method writes
        written["scores"].pop(control, None)
    result = [written["scores"], written["accuracy"]]
    scores = hashlib.sha256(json.dumps(result, sort_keys=True).encode())
    parts = {"weights": weights, "losses": losses, "captions": text, "scores": scores}
    return {name: part.hexdigest()[:12] for name, part in parts.items()}


def measured_in(root: Path, out: Path) -> dict:
    """The hashes that the script of a working tree prints and writes to `out`."""
    script = root / "tools" / "fingerprint.py"
    subprocess.run([sys.executable, str(script), "--out", str(out)], check=True)
    return json.loads(out.read_text(encoding="utf-8"))


def compare_commits(commit: str) -> list[str]:
    """Runs the code of a commit and this one -> the cases that differ. Notes in results.json which
    scripts compute the same. InputError if there are uncommitted changes."""
    import results

    old_commit = results.commit_of_the_code(commit)
    new_commit = results.commit_of_the_code()
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "old.zip")
        call = ["git", "-C", str(results.ROOT), "archive", "-o", str(archive), commit]
        subprocess.run(call, check=True)
        shutil.unpack_archive(archive, Path(folder, "old"))
        shutil.copy(__file__, Path(folder, "old", "tools"))  # both are hashed in the same way
        print(f"{commit}:", flush=True)
        old = measured_in(Path(folder, "old"), Path(folder, "old.json"))
        print("this code:", flush=True)
        new = measured_in(results.ROOT, Path(folder, "new.json"))
    differing = [case for case in old if old[case] != new[case]]
    changed = {CASES[case].split()[0] for case in differing}
    content = results.read_results()
    for script in {command.split()[0] for command in CASES.values()} - changed:
        note_same(content["same"], script, old_commit, new_commit)
    results.write_results(content)
    return differing


def note_same(same: dict[str, list[str]], script: str, old_commit: str, new_commit: str) -> None:
    """Notes that two commits compute the same in a script. If the ones noted before compute
    something else, they are forgotten."""
    commits = same.get(script, [])
    if not {old_commit, new_commit} & set(commits):
        commits = []
    same[script] = list(dict.fromkeys([*commits, old_commit, new_commit]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to write the hashes to")
    text = "commit to compare with, and to note in results.json if it computes the same"
    parser.add_argument("--against", metavar="COMMIT", help=text)
    args = parser.parse_args()
    if args.against:
        differing = compare_commits(args.against)
        print("differs: " + ", ".join(differing) if differing else "all equal")
        sys.exit(bool(differing))
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "mini")
        data.main(["mini", "--data_dir", str(root), "--scenes", "200", "--device", "cpu"])
        for n, (case, command) in enumerate(CASES.items()):
            out = Path(folder, str(n))
            run(command, root, out)
            measured[case] = hashes(out)
            print(case, measured[case], flush=True)
    if args.out:
        args.out.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
