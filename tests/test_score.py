"""data.py's caption scores: tokens, metrics, what happens without Java, files."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import data

SHARED = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
needs_java = pytest.mark.skipif(data.find_java() is None, reason="java is not on the PATH")
REFERENCES = {"1": ["the red car is gone", "the car left"], "2": ["no change was made"], "3": ["a man's hat", "hat added"]}
PREDICTIONS = {"1": "The left red car.", "2": "no change was made", "3": ""}
SENTENCES = """The man's (red) T-shirt isn't here -- it's gone... | Mr. Smith, etc., left at 3.5 p.m. | I cannot say "no" !!
|they're 1,000 cars, $5.50, 50% off: 10-15 | the boys’ “ball” – gonna move | b&w photo & AT&T sign no. 5; no. | a.b.c. here.The
|e.g. x/y || don't can't won't [x] {y} | rock 'n' roll o'clock 'tis | 12:30 1/2 +5 -5 half_way _x #tag #1"""
SENTENCES = SENTENCES.replace("\n", "").split("|")


@needs_java
def test_tokens_equal_stanford_ptb_and_odd_line_breaks_shift_nothing():
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    package = PTBTokenizer().tokenize({0: [{"caption": s} for s in SENTENCES]})[0]
    assert [data.ptb_tokenize(s) for s in SENTENCES] == package
    odd = ["", "a\u2028b", "c\n\nd", "e\x85f\r", "", "g ||| h", ""]
    assert data.tokenize_all(odd, data.find_java()) == (["", "a b", "c d", "e f", "", "g | | | h", ""], "PTB (Java)")


@needs_java
@pytest.mark.skipif(not SHARED.exists(), reason="no shared data")
def test_tokens_equal_stanford_ptb_on_real_captions():
    files = [*SHARED.glob("spot_the_diff/annotations/*.json"), *SHARED.glob("image_editing_request/*.json")]
    texts = [s for file in files for row in json.loads(file.read_text()) for s in row.get("sentences", row.get("sents"))]
    assert texts and data.tokenize_all(texts, None)[0] == data.tokenize_all(texts, data.find_java())[0]


def ngrams(text: str, n: int) -> Counter:
    words = text.split()
    return Counter(tuple(words[k : k + n]) for k in range(len(words) - n + 1))


def naive_cider(hyps: dict[str, str], refs: dict[str, list[str]]) -> float:
    """CIDEr-D: 10 x the mean over images, n = 1..4 and references of the clipped tf-idf cosine x exp(-(length gap)^2 / 72)."""
    total = 0.0
    for n in range(1, 5):
        df = Counter(gram for texts in refs.values() for gram in set().union(*(ngrams(t, n) for t in texts)))
        vectors = [[{g: c * math.log(len(refs) / max(1, df[g])) for g, c in ngrams(t, n).items()} for t in (hyps[i], *refs[i])]
                   for i in hyps]  # fmt: skip
        for i, (h, *others) in zip(hyps, vectors, strict=True):
            for text, r in zip(refs[i], others, strict=True):
                norm = math.sqrt(sum(v * v for v in h.values()) * sum(v * v for v in r.values()))
                gap = max(len(hyps[i].split()) - 1, 0) - (len(text.split()) - 1)
                dot = sum(min(h[g], r[g]) * r[g] for g in h.keys() & r.keys())
                total += math.exp(-(gap**2) / 72) * (dot / norm if norm else 0) / len(refs[i])
    return 10 * total / 4 / len(hyps)


def test_without_java_bleu_cider_and_reasons(monkeypatch):
    monkeypatch.setattr(data.shutil, "which", lambda name: None)
    groups = {"pair": iter(["1", "2", "not predicted"]), "single": {"3"}, "nobody": ["9"]}
    result = data.score(PREDICTIONS, REFERENCES, groups)
    scores = result["scores"]
    assert list(scores) == ["total", "pair", "single"] and result["tokenizer"] == "Python"
    # pair: all 8 words and 1 + 3 of 6 word pairs hit; closest references 3 (as close as 5) + 4 words: no brevity penalty
    assert scores["pair"]["BLEU-1"] == 100 and scores["pair"]["BLEU-2"] == pytest.approx(100 * (4 / 6) ** 0.5, abs=0.01)
    assert scores["total"]["BLEU-1"] == pytest.approx(100 * math.exp(1 - 9 / 8), abs=0.01)  # + 2 unsaid words
    tokens = {i: [data.ptb_tokenize(t) for t in texts] for i, texts in REFERENCES.items()}
    hyps = {i: data.ptb_tokenize(t) for i, t in PREDICTIONS.items()}
    for name, ids in (("total", "123"), ("pair", "12"), ("single", "3")):  # document frequencies are the group's own
        expected = naive_cider({i: hyps[i] for i in ids}, {i: tokens[i] for i in ids})
        assert scores[name]["CIDEr"] == pytest.approx(100 * expected, abs=0.01)
    assert all(scores["single"][m] == 0 for m in ("BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr"))
    for metric in ("METEOR", "SPICE"):
        assert scores["total"][metric] is None and "Java" in result["missing"][metric]
    table = data.format_scores(result)
    assert f"{scores['total']['CIDEr']:.2f}" in table and " - " in table and "METEOR: needs Java" in table


@needs_java
def test_java_adds_meteor_and_changes_nothing_else(monkeypatch, tmp_path):
    full = data.score(PREDICTIONS, REFERENCES, {"same": ["2"], "empty": ["3"]})
    assert full["scores"]["same"]["METEOR"] == 100 and full["scores"]["empty"]["METEOR"] == 0
    assert 0 < full["scores"]["total"]["METEOR"] < 100 and full["tokenizer"] == "PTB (Java)"
    broken = tmp_path / "java"  # a Java that tokenizes but dies as METEOR
    broken.write_text(f'#!/bin/sh\ncase "$*" in *meteor*) exit 1;; esac\nexec {data.find_java()} "$@"\n')
    broken.chmod(0o755)
    monkeypatch.setattr(data.shutil, "which", lambda name: str(broken))
    dies = data.score(PREDICTIONS, REFERENCES)
    assert dies["scores"]["total"]["METEOR"] is None and dies["missing"]["METEOR"]
    monkeypatch.setattr(data.shutil, "which", lambda name: None)
    plain = data.score(PREDICTIONS, REFERENCES)["scores"]["total"]
    assert {m: v for m, v in plain.items() if v is not None}.items() <= full["scores"]["total"].items()


def test_spice_runs_once_for_all_groups_and_never_downloads(monkeypatch, tmp_path):
    from pycocoevalcap.spice import spice

    monkeypatch.setattr(spice, "get_stanford_models", lambda: None)
    monkeypatch.setattr(data, "coco_folder", lambda: tmp_path)
    refs, hyps, groups = {"b": ["x"], "a": ["y"]}, {"b": "x", "a": "y"}, {"total": ["b", "a"], "one": ["b"]}
    with pytest.raises(OSError, match="get_stanford_models"):
        data.spice(refs, hyps, groups, "java")
    (tmp_path / "spice" / "lib").mkdir(parents=True)
    for jar in data.SPICE_MODELS:
        (tmp_path / "spice" / "lib" / jar).touch()
    rows = [{"All": {"f": 0.2}}, {"All": {"f": 0.6}}]  # the package answers in the order of the sorted ids
    monkeypatch.setattr(spice.Spice, "compute_score", lambda self, gts, res: (0.4, rows))
    assert data.spice(refs, hyps, groups, "java") == {"total": 0.4, "one": 0.6}

    monkeypatch.setattr(spice.Spice, "compute_score", lambda *_: subprocess.run([sys.executable, "-c", "exit(1)"], check=True))
    with pytest.raises(OSError, match="Java 8"):
        data.spice(refs, hyps, groups, "java")


def test_files_and_errors(tmp_path):
    path = tmp_path / "p.json"
    data.write_predictions(path, PREDICTIONS)
    assert data.read_predictions(path) == PREDICTIONS
    path.write_text(json.dumps({"annotations": [{"image_id": 7, "caption": "a"}, {"image_id": 7, "caption": "b"}]}))
    assert data.read_references(path) == {"7": ["a", "b"]}
    twice = '[{"image_id": 1, "caption": "a"}, {"image_id": 1, "caption": "b"}]'
    wrong = {"[{": "not valid JSON", "{}": "expected a JSON list", '[{"image_id": 1}]': "item 0", twice: "'1' has two"}
    for text, message in wrong.items():
        path.write_text(text)
        with pytest.raises(ValueError, match="p.json.*" + message):
            data.read_predictions(path)
    with pytest.raises(ValueError, match="expected a JSON dict"):
        data.read_references(path)
    with pytest.raises(FileNotFoundError, match="none.json"):
        data.read_predictions(tmp_path / "none.json")
    with pytest.raises(ValueError, match="'x'.*no reference"):
        data.score({"x": "a"}, {"y": ["b"]})
    with pytest.raises(ValueError, match="no predictions"):
        data.score({}, {})
