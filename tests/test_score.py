"""data.py's caption scores: tokens, metrics, what happens without Java, files."""

import functools
import json
import math
import os
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import data
import mini

REFERENCES = {
    "1": ["the red car is gone", "the car left"],
    "2": ["no change was made"],
    "3": ["a man's hat", "hat added"],
}
PREDICTIONS = {"1": "The left red car.", "2": "no change was made", "3": ""}
SENTENCES = [
    "The man's (red) T-shirt isn't here -- it's gone...",
    "Mr. Smith, etc., left at 3.5 p.m.",
    "the boys’ “ball” – gonna move",
    '[x] {y} b&w photo & AT&T sign no. 5; no. I cannot say "no" !!',
    "1 1/2 cars",
]
ASKED = data.java_works.__wrapped__


@pytest.fixture(scope="module")
def java():
    return data.java_works() or pytest.skip("java does not run")


@pytest.fixture
def fake_java(monkeypatch, tmp_path):
    """Content of a shell script that from then on is `java`."""
    monkeypatch.setattr(data, "java_works", functools.cache(ASKED))
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(script: str):
        (tmp_path / "java").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "java").chmod(0o755)

    return write


def test_stanford_tokens_are_the_packages_and_odd_line_breaks_shift_nothing(java):
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    expected = PTBTokenizer().tokenize({0: [{"caption": s} for s in SENTENCES]})[0]
    assert expected[1] == "mr. smith etc. left at 3.5 p.m."
    odd = {
        "": "",
        "a\u2028b": "a b",
        "c\n\nd": "c d",
        "e\x85f\r": "e f",
        " ": "",
        "g ||| h": "g | | | h",
        "\t": "",
    }
    assert data.scored_words([*SENTENCES, *odd], "ptb", None) == (
        [*expected, *odd.values()],
        "PTB (Java)",
    )


def test_plain_words_equal_stanfords_in_closed_vocabularies(java):
    templates = [
        t.format("small red cube", "gray")
        for templates in mini.TEMPLATES.values()
        for t in templates
    ]
    texts = [
        *templates,
        *mini.NO_CHANGE,
        "The cyan thing on the left side has been newly placed.",
        "no, it - moved",
    ]
    assert [data.plain_tokenize(text) for text in texts] == data.ptb_tokenize(texts)
    assert data.plain_tokenize('A dog\'s  T-shirt -- "gone".') == "a dog s t-shirt gone"


def ngrams(text: str, n: int) -> Counter:
    words = text.split()
    return Counter(tuple(words[k : k + n]) for k in range(len(words) - n + 1))


def naive_cider(
    hyps: dict[str, str], refs: dict[str, list[str]], pool: dict[str, list[str]] | None = None
) -> float:
    """CIDEr-D: 10 x the mean over images, n = 1..4 and references of the clipped tf-idf cosine x
    exp(-(length gap)^2 /
    72). Document frequencies are the pool's (default: the same images')."""
    total, pool = 0.0, pool or refs
    for n in range(1, 5):
        df = Counter(
            gram for texts in pool.values() for gram in set().union(*(ngrams(t, n) for t in texts))
        )
        vectors = []
        for i in hyps:
            counts = [ngrams(text, n) for text in (hyps[i], *refs[i])]
            vectors.append(
                [
                    {g: c * math.log(len(pool) / max(1, df[g])) for g, c in grams.items()}
                    for grams in counts
                ]
            )
        for i, (h, *others) in zip(hyps, vectors, strict=True):
            for text, r in zip(refs[i], others, strict=True):
                norm = math.sqrt(sum(v * v for v in h.values()) * sum(v * v for v in r.values()))
                gap = max(len(hyps[i].split()) - 1, 0) - (len(text.split()) - 1)
                dot = sum(min(h[g], r[g]) * r[g] for g in h.keys() & r.keys())
                total += math.exp(-(gap**2) / 72) * (dot / norm if norm else 0) / len(refs[i])
    return 10 * total / 4 / len(hyps)


def test_without_java_bleu_cider_and_reasons():
    groups = {"pair": {"1", "2", "not predicted"}, "single": {"3"}, "nobody": {"9"}}
    result = data.score(PREDICTIONS, REFERENCES, groups)
    scores = result["scores"]
    assert list(scores) == ["total", "pair", "single"] and "approximate" in result["tokenizer"]
    # pair: all 8 words and 1 + 3 of 6 word pairs hit; closest references 3 (as close as 5) + 4
    # words: no penalty
    assert scores["pair"]["BLEU-1"] == 100 and scores["pair"]["BLEU-2"] == pytest.approx(
        100 * (4 / 6) ** 0.5, abs=0.01
    )
    assert scores["total"]["BLEU-1"] == pytest.approx(
        100 * math.exp(1 - 9 / 8), abs=0.01
    )  # + 2 unsaid words
    tokens = {i: [data.plain_tokenize(t) for t in texts] for i, texts in REFERENCES.items()}
    hyps = {i: data.plain_tokenize(t) for i, t in PREDICTIONS.items()}
    for name, ids in (
        ("total", "123"),
        ("pair", "12"),
        ("single", "3"),
    ):  # document frequencies are the group's own
        h, r = {i: hyps[i] for i in ids}, {i: tokens[i] for i in ids}
        assert scores[name]["CIDEr"] == pytest.approx(100 * naive_cider(h, r), abs=0.01)
        assert scores[name]["CIDEr (one pool)"] == pytest.approx(
            100 * naive_cider(h, r, tokens), abs=0.01
        )
    assert all(scores["single"][m] == 0 for m in ("BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr"))
    for metric in ("METEOR", "SPICE"):
        assert scores["total"][metric] is None and "Java" in result["missing"][metric]
    table = data.format_scores(result)
    assert (
        f"{scores['total']['CIDEr']:.2f}" in table
        and " - " in table
        and "METEOR: needs Java" in table
    )


def test_one_pool_has_the_document_frequencies_of_all_pairs():
    refs = {
        "1": ["the car is gone", "the car left"],
        "2": ["the car is red"],
        "3": ["no change"],
        "4": ["the van is gone"],
    }
    hyps = {"1": "the car is red", "2": "the car is gone", "3": "no change", "4": "the van is red"}
    scores = data.score(hyps, refs, {"cars": {"1", "2"}, "rest": {"3", "4"}})["scores"]
    for name, ids in (("total", "1234"), ("cars", "12"), ("rest", "34")):
        h, r = {i: hyps[i] for i in ids}, {i: refs[i] for i in ids}
        assert scores[name]["CIDEr (one pool)"] == pytest.approx(
            100 * naive_cider(h, r, refs), abs=0.01
        )
    assert scores["cars"]["CIDEr (one pool)"] != scores["cars"]["CIDEr"]
    halves = scores["cars"]["CIDEr (one pool)"] + scores["rest"]["CIDEr (one pool)"]
    assert scores["total"]["CIDEr"] == pytest.approx(
        halves / 2, abs=0.01
    )  # of equal groups, total is the mean


def test_java_adds_meteor_and_changes_nothing_else(java, monkeypatch):
    groups = {"same": {"2"}, "empty": {"3"}}
    with_java = data.score(PREDICTIONS, REFERENCES, groups)
    assert (
        with_java["scores"]["same"]["METEOR"] == 100 and with_java["scores"]["empty"]["METEOR"] == 0
    )
    assert (
        0 < with_java["scores"]["total"]["METEOR"] < 100 and with_java["tokenizer"] == "PTB (Java)"
    )
    monkeypatch.setattr(data, "java_works", lambda: False)
    without = data.score(PREDICTIONS, REFERENCES, groups)["scores"]
    for name, values in without.items():
        assert {m: v for m, v in values.items() if v is not None}.items() <= with_java["scores"][
            name
        ].items()


def test_meteor_reads_its_numbers_where_people_write_a_comma(java, monkeypatch):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Duser.language=de -Duser.country=DE")
    monkeypatch.setattr(data, "java_works", functools.cache(ASKED))
    assert data.score(PREDICTIONS, REFERENCES)["scores"]["total"]["METEOR"] > 0


@pytest.mark.parametrize(
    "script", ["sleep 60", "exec sleep 60", "exit 1"]
)  # a shell that waits, Java, none
def test_a_java_that_does_not_run_is_found_out_in_time(fake_java, monkeypatch, script):
    fake_java(script)
    monkeypatch.setattr(data, "JAVA_TIMEOUT", 1)
    began = time.perf_counter()
    assert not data.java_works() and time.perf_counter() - began < 20
    assert "needs Java" in data.score({"1": "a car"}, {"1": ["a car"]})["missing"]["METEOR"]


@pytest.mark.parametrize(
    "words", [1, 20_000]
)  # METEOR reads a short line, of a long one not even all
def test_programs_that_fail_are_named_and_do_not_hang(fake_java, monkeypatch, words):
    fake_java('case "$*" in *version) exit 0;; *) exit 1;; esac')
    monkeypatch.setattr(data, "ptb_tokenize", lambda texts: texts)
    result = data.score({"1": "a red car " * words}, {"1": ["a car"]})
    assert (
        result["scores"]["total"]["METEOR"] is None
        and result["scores"]["total"]["ROUGE-L"] is not None
    )
    assert "its Java program failed" in result["missing"]["METEOR"]


def test_a_tokenizer_that_fails_later_is_tried_once_more(fake_java, tmp_path):
    """Other words would choose another checkpoint, so there is no other tokenizer then."""
    count = f"echo x >> {tmp_path}/calls"
    fake_java(f'case "$*" in *version) exit 0;; *) {count}; exit 1;; esac')
    with pytest.raises(OSError, match="tokenizer's Java program failed twice .exit code 1"):
        data.score({"1": "a car"}, {"1": ["a car"]}, quick=True)
    assert (tmp_path / "calls").read_text().count("x") == 2
    once = f"if [ -e {tmp_path}/again ]; then cat; else touch {tmp_path}/again; exit 1; fi"
    fake_java(f'case "$*" in *version) exit 0;; *) {once};; esac')
    assert data.score({"1": "a car"}, {"1": ["a car"]}, quick=True)["tokenizer"] == "PTB (Java)"


def test_ctrl_c_in_a_terminal_does_not_reach_the_tokenizer(fake_java, tmp_path):
    """A terminal sends it to the process group, which the tokenizer must not be in."""
    fake_java(
        'case "$*" in *version) exit 0;; '
        f'*) cut -d" " -f5 /proc/$$/stat > {tmp_path}/group; cat;; esac'
    )
    data.score({"1": "a car"}, {"1": ["a car"]}, quick=True)
    assert int((tmp_path / "group").read_text()) != os.getpgrp()


def test_spice_runs_once_for_all_rows_and_never_downloads(monkeypatch):
    runs = []

    class Spice:
        def compute_score(self, gts, res):
            runs.append(gts)
            return 0, [{"All": {"f": {"x": 0.2, "y": 0.6}[res[i][0]]}} for i in sorted(gts)]

    monkeypatch.setattr("pycocoevalcap.spice.spice.Spice", Spice)
    monkeypatch.setattr(data, "java_works", lambda: True)
    refs, rows = {"b": ["r"], "a": ["s"]}, {"total": {"b": "x", "a": "y"}, "one": {"b": "x"}}
    monkeypatch.setattr(data, "SPICE_MODELS", ("absent.jar",))
    values, reason = data.java_metric("SPICE", "ptb", refs, rows)
    assert not values and "get_stanford_models" in reason and not runs
    monkeypatch.setattr(data, "SPICE_MODELS", ())
    assert (
        data.java_metric("SPICE", "ptb", refs, rows) == ({"total": 0.4, "one": 0.2}, "")
        and len(runs) == 1
    )


def test_words_as_they_are_and_as_ids(monkeypatch):
    references, said = {"1": ["a barn, by zoe", "no  change"]}, {"1": "a barn, by ann "}
    plain = data.score(said, references, tokens="split")  # nothing is dropped: "barn," is a word
    assert plain["scores"]["total"]["BLEU-1"] == 75 and "as they are" in plain["tokenizer"]
    monkeypatch.setattr(data, "java_works", lambda: True)
    seen, known = [], {"<UNK>": data.UNK, "a": 4, "barn,": 5, "by": 6}
    monkeypatch.setattr(data, "meteor", lambda *inputs: seen.append(inputs) or {"total": 0.5})
    result = data.score(
        said, references, tokens="ids", index=known
    )  # zoe and ann are the same unknown word
    assert result["scores"]["total"]["BLEU-4"] == 100 and "ids" in result["tokenizer"]
    assert seen == [
        ({"1": ["4 5 6 1", "1 1"]}, {"total": {"1": "4 5 6 1"}})
    ]  # METEOR knows no stems of ids
    assert result["scores"]["total"]["METEOR"] == 50 and "ids" in result["missing"]["SPICE"]


def naive_resize(heat: torch.Tensor, height: int, width: int) -> list[list[float]]:
    """Bilinear, pixel centres as in image programs; cells at the border reach beyond it."""
    h, w = heat.shape
    out = []
    for row in range(height):
        y = min(max((row + 0.5) * h / height - 0.5, 0), h - 1)
        line = []
        for column in range(width):
            x = min(max((column + 0.5) * w / width - 0.5, 0), w - 1)
            top, left = int(y), int(x)
            line.append(
                sum(
                    float(heat[min(i, h - 1), min(j, w - 1)]) * (1 - abs(y - i)) * (1 - abs(x - j))
                    for i in (top, top + 1)
                    for j in (left, left + 1)
                    if abs(y - i) < 1 and abs(x - j) < 1
                )
            )
        out.append(line)
    return out


def test_pointing_game_equals_a_loop_over_pixels():
    g = torch.Generator().manual_seed(0)
    maps, boxes, sizes = torch.rand(40, 5, 6, generator=g), [], []
    # Beyond the middle of a border cell all pixels are equally bright: rounding would choose.
    maps[:, [0, -1]] *= 0.1
    maps[:, :, [0, -1]] *= 0.1
    for left, top, width, height in torch.randint(9, 20, (40, 4), generator=g).tolist():
        boxes.append(
            [left % 2 * width // 3, top % 2 * height // 3, 2 * width // 3, 2 * height // 3]
        )
        sizes.append((width, height))
    expected = []
    for heat, (x, y, w, h), (width, height) in zip(maps, boxes, sizes, strict=True):
        big = naive_resize(heat, height, width)
        row, column = max(
            ((r, c) for r in range(height) for c in range(width)), key=lambda at: big[at[0]][at[1]]
        )
        mask = [[x <= c < x + w and y <= r < y + h for c in range(width)] for r in range(height)]
        expected.append(mask[row][column])
    assert [*map(data.pointing_hit, maps, boxes, sizes)] == expected
    assert 5 < sum(expected) < 35


def test_pointing_scores_count_boxes_not_pairs(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    heat = {i: torch.zeros(2, 3) for i in "123"}
    heat["1"][0, 0] = heat["2"][1, 2] = heat["3"][0, 2] = (
        1  # brightest: left top, right bottom, right top
    )
    boxed = [
        (i, side, box, tmp_path / "a.png")
        for i, side, box in (
            ("1", "before", [0, 0, 10, 10]),
            ("1", "after", [20, 10, 10, 10]),
            ("2", "after", [20, 10, 10, 10]),
            ("3", "before", [0, 0, 30, 20]),
        )
    ]
    maps = {i: {"attention": m} for i, m in heat.items()}
    scores = data.pointing_scores(maps, boxed, {"color": {"1", "9"}, "nobody": {"9"}})
    assert scores == {
        "attention": {"total": 75, "color": 50},
        "chance": {"total": 37.5, "color": 16.67},
        "boxes": {"total": 4, "color": 2},
    }
    named = {i: {"decoder": m, "objects": -m} for i, m in heat.items()}
    scores = data.pointing_scores(named, boxed, {})
    assert scores["decoder"]["total"] == 75 and scores["objects"]["total"] < 75
    # Pair 1: each map finds its own side's box.
    own = {i: {"before": m, "after": m.roll(2, 1).roll(1, 0)} for i, m in heat.items()}
    assert data.pointing_scores(own, boxed[:2], {})["attention"] == {"total": 100}
    result = data.score(PREDICTIONS, REFERENCES, quick=True) | {"pointing": scores}
    assert "pointing game, decoder, in %: total 75.0" in data.format_scores(result)


def test_outer_quarters_of_difficulty_hold_a_quarter_rounded_down():
    pairs = [data.Pair(str(i), "a", "b", []) for i in range(3985)]
    overlap = {str(i): 1 - i / 4000 for i in range(3985)}
    release = SimpleNamespace(overlap=overlap, groups={})
    dataset = SimpleNamespace(release=release, pairs=lambda split: pairs, scenes=["test"])
    groups = data.groups_of(dataset, "test")
    assert groups["view: hardest quarter"] == {str(i) for i in range(3985 - 996, 3985)}
    assert groups["view: easiest quarter"] == {str(i) for i in range(996)}
    assert sum(map(len, groups.values())) == 3985 and len(set().union(*groups.values())) == 3985


def test_pairs_of_another_split_are_also_left_out():
    pairs = {
        "train": [data.Pair("1", "a", "b", [])],
        "test": [data.Pair("2", "a", "b", []), data.Pair("3", "b", "a", [])],
    }
    dataset = SimpleNamespace(
        release=SimpleNamespace(overlap={}, groups={}), pairs=pairs.get, scenes=pairs
    )
    assert data.groups_of(dataset, "test") == {"without leaked pairs": {"3"}}


def test_a_data_set_is_scored_by_its_protocol(prepared, monkeypatch):
    dataset = data.load("clevr_change", prepared)
    captions = {
        p.id: dataset.vocab.decode(dataset.batch([p]).caption)[0] for p in dataset.pairs("test")
    }
    quick = data.score_split(dataset, "test", captions, quick=True)
    assert quick["scores"].keys() == {"total"}
    assert data.score_split(dataset, "test", captions)["scores"]["total"]["CIDEr (one pool)"] > 0
    assert data.report(dataset, "test", captions, {})["accuracy"] == {
        "change recognised": 100,
        "no change recognised": 100,
    }
    same = next(i for i in captions if i.endswith("_n"))
    captions[same], captions[same[:-2]] = (
        "a red thing became blue",
        "the scene , it seems , is the same",
    )
    assert data.report(dataset, "test", captions, {})["accuracy"] == {
        "change recognised": 80,
        "no change recognised": 80,
    }
    # LEVIR-CC's authors have a list of sentences for it.
    row = replace(data.DATASETS["clevr_change"], same=("a red thing became blue",))
    monkeypatch.setitem(data.DATASETS, "clevr_change", row)
    assert data.report(dataset, "test", captions, {})["accuracy"] == {
        "change recognised": 100,
        "no change recognised": 20,
    }
    # Without the PTB tokenizer, references have the words of the vocabulary's rule, as captions do.
    monkeypatch.setitem(
        data.DATASETS, "clevr_change", replace(data.DATASETS["clevr_change"], tokens="ids")
    )
    captions = {p.id: " ".join(data.tokenize(p.captions[1])) for p in dataset.pairs("test")}
    result = data.score_split(dataset, "test", captions)
    assert "ids" in result["tokenizer"] and result["scores"]["total"]["BLEU-4"] == 100


def best_by_hand(dataset, pairs):
    """Of the training captions, the one with the best CIDEr, every one scored on its own."""
    references = {p.id: p.captions for p in pairs}
    cider = {}
    for caption in {c for p in dataset.pairs("train") for c in p.captions}:
        result = data.score(dict.fromkeys(references, caption), references, quick=True)
        cider[caption] = result["scores"]["total"]["CIDEr"]
    return {caption for caption, value in cider.items() if value == max(cider.values())}


def test_one_caption_is_the_best_frequent_one(prepared):
    dataset = data.load("clevr_change", prepared)
    counts = Counter(c for p in dataset.pairs("train") for c in p.captions)
    assert len(counts) <= 20 and len(dataset.pairs("val")) <= 250  # none is left out
    assert data.one_caption(dataset) in best_by_hand(dataset, dataset.pairs("val"))
    dataset.scenes["val"] = []
    assert data.one_caption(dataset) in best_by_hand(dataset, dataset.pairs("train"))


def test_one_caption_is_a_frequent_one(prepared):
    dataset = data.load("clevr_change", prepared)
    train, val = dataset.pairs("train"), dataset.pairs("val")
    frequent = [f"a {n}" for n in range(20)]
    train[0].captions[:] = ["rare as gold", *frequent * 2]
    for pair in train[1:]:
        pair.captions[:] = frequent * 2
    for pair in val:
        pair.captions[:] = ["rare as gold"]
    val[0].captions[:] = ["a 7"]
    assert data.one_caption(dataset) == "a 7"
    for pair in val:
        pair.captions[:] = [""]
    assert data.one_caption(dataset) == "a 0"  # the most frequent, as nothing can be scored


def test_every_table_has_the_row_of_one_caption_and_counts_captions(prepared, tmp_path, capsys):
    dataset = data.load("clevr_change", prepared)
    captions = {p.id: p.captions[0] for p in dataset.pairs("test")}
    for i in captions:
        if "_n" in i:
            captions[i] = "the gray cube turned red"
    maps = {i: {"attention": torch.eye(2) / 2} for i in captions}
    total = dataset.results("test", captions, maps, tmp_path)
    table = capsys.readouterr().out
    scores = json.loads((tmp_path / "scores_test.json").read_text())
    one = data.one_caption(dataset)
    alone = data.score_split(dataset, "test", dict.fromkeys(captions, one))["scores"]["total"]
    rows = scores["scores"]
    assert rows["one caption for all"] == alone and rows["total"] == total
    assert f"one caption for all: {one}" in table
    different = len({*captions.values()})
    assert different > 1
    assert scores["captions"] == {"all": 10, "different": different, "verbatim": 50}
    counted = f"{different} different captions for 10 pairs; 50.0 % are a reference of their pair"
    assert counted in table


def test_what_a_tick_means(prepared):
    """A reference word for word; of others, that nothing changed, said of an unchanged pair."""
    dataset = data.load("clevr_change", prepared)
    changed, same = dataset.scenes["train"][0].pairs
    reference = " ".join(dataset.vocab.split(changed.captions[1]))
    assert data.is_right(dataset, changed, reference) is True
    assert data.is_right(dataset, changed, "nothing changed") is False
    assert data.is_right(dataset, changed, "a red thing") is None  # nobody can tell
    same.captions[:] = ["the scene, it seems, is the same"]
    assert data.is_right(dataset, same, "nothing changed") is True
    assert data.is_right(dataset, same, reference) is False


def test_files_and_errors(tmp_path):
    path = tmp_path / "p.json"
    data.write_predictions(path, PREDICTIONS)
    assert data.read_predictions(path) == PREDICTIONS
    path.write_text(
        json.dumps(
            {"annotations": [{"image_id": 7, "caption": "a"}, {"image_id": 7, "caption": "b"}]}
        )
    )
    assert data.read_references(path) == {"7": ["a", "b"]}
    twice = '[{"image_id": 1, "caption": "a"}, {"image_id": 1, "caption": "b"}]'
    wrong = {
        "[{": "correct it",
        '["a"]': "expected a list of",
        '[{"image_id": 1}]': "caption is missing",
        '[{"image_id": 1, "caption": 5}]': "expected a list of strings",
        twice: "'1' has two",
    }
    for text, message in wrong.items():
        path.write_text(text)
        with pytest.raises(ValueError, match="p.json.*" + message):
            data.read_predictions(path)
    with pytest.raises(ValueError, match="expected {annotations"):
        data.read_references(path)
    with pytest.raises(FileNotFoundError, match="none.json"):
        data.read_predictions(tmp_path / "none.json")
    with pytest.raises(ValueError, match="'x'.*no reference"):
        data.score({"x": "a"}, {"y": ["b"]})
    with pytest.raises(ValueError, match="no predictions"):
        data.score({}, {})
    groups = {"total": {"1"}, data.ONE_CAPTION: {"1"}}  # cannot replace the rows of these names
    scores = data.score(PREDICTIONS, REFERENCES, groups, constant="no change")["scores"]
    assert scores["total"] == data.score(PREDICTIONS, REFERENCES)["scores"]["total"]
    same = data.score(dict.fromkeys(PREDICTIONS, "no change"), REFERENCES)["scores"]["total"]
    assert scores[data.ONE_CAPTION] == same


def test_command_line_scores_groups_and_ids(tmp_path, capsys):
    data.write_predictions(tmp_path / "p.json", {"1": "a barn", "2": "a road"})
    rows = [
        {"image_id": i, "caption": caption} for i, caption in (("1", "a barn"), ("2", "a house"))
    ]
    for name, content in (
        ("r", {"annotations": rows}),
        ("g", {"farms": ["1"]}),
        ("v", {"a": 4, "barn": 5}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    call = [
        "score",
        "--predictions",
        str(tmp_path / "p.json"),
        "--references",
        str(tmp_path / "r.json"),
    ]
    data.main(
        [
            *call,
            "--groups",
            str(tmp_path / "g.json"),
            "--tokens",
            "ids",
            "--vocab",
            str(tmp_path / "v.json"),
        ]
    )
    total, farms = (line.split() for line in capsys.readouterr().out.splitlines()[1:3])
    assert total[:2] == ["total", "100.00"] and farms[:2] == [
        "farms",
        "100.00",
    ]  # road, house: both unknown
    data.main([*call, "--tokens", "split"])
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["total", "75.00"]
    with pytest.raises(ValueError, match="--vocab"):
        data.main([*call, "--tokens", "ids"])
    with pytest.raises(ValueError, match="v.json.*expected {group"):
        data.main([*call, "--groups", str(tmp_path / "v.json")])
    (tmp_path / "g.json").write_text('{"farms": ["7"]}')
    with pytest.raises(ValueError, match="g.json: no image_id of the predictions"):
        data.main([*call, "--groups", str(tmp_path / "g.json")])
