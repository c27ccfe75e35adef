"""data.py's caption scores: words, metrics, groups, the pointing game, files."""

import json
import math
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
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
    '[x] {y} b&w photo & AT&T sign no. 5; no. I cannot say "no" !!',
]


@pytest.fixture(scope="module")
def java():
    return data.java_works() or pytest.skip("java does not run")


# ---- words ---------------------------------------------------------------------------------------


def test_stanford_tokens_are_the_packages_and_odd_line_breaks_shift_nothing(java):
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    expected = PTBTokenizer().tokenize({0: [{"caption": s} for s in SENTENCES]})[0]
    assert expected[1] == "mr. smith etc. left at 3.5 p.m."
    odd = {"": "", "a\u2028b": "a b", "c\n\nd": "c d", "e\x85f\r": "e f", "\t": ""}
    words = data.scored_words([*SENTENCES, *odd], "ptb", None, quick=False)
    assert words == [*expected, *odd.values()]


@pytest.mark.parametrize("lines", [["a", "last", ""], ["a", ""], [""]])
def test_a_tokenizer_that_loses_lines_gives_no_scores(monkeypatch, lines):
    def tokenize(self, captions):  # as the package pairs captions with the lines that come back
        return {key: [line] for key, line in zip(captions, lines, strict=False)}

    monkeypatch.setattr("pycocoevalcap.tokenizer.ptbtokenizer.PTBTokenizer.tokenize", tokenize)
    with pytest.raises(OSError):
        data.ptb_tokenize(["a", "b"])


def test_plain_words_equal_stanfords_on_minis_templates(java):
    texts = [*mini.NO_CHANGE]
    for templates in mini.TEMPLATES.values():
        for template in templates:
            texts.append(template.format("small red cube", "gray"))
    texts.append("The cyan thing on the left side has been newly placed.")
    texts.append("no, it - moved")
    assert [data.plain_tokenize(text) for text in texts] == data.ptb_tokenize(texts)
    assert data.plain_tokenize('A dog\'s  T-shirt -- "gone".') == "a dog s t-shirt gone"


def test_words_as_they_are_and_as_ids():
    references = {"1": ["a barn, by zoe", "no  change"]}
    said = {"1": "a barn, by ann "}
    # No punctuation is dropped: "barn," is a word.
    assert data.score(said, references, tokens="split")["total"]["BLEU-1"] == 75
    # "zoe" and "ann" are both UNK.
    known = {"<UNK>": data.UNK, "a": 4, "barn,": 5, "by": 6}
    assert data.score(said, references, tokens="ids", index=known)["total"]["BLEU-4"] == 100


# ---- metrics -------------------------------------------------------------------------------------


def ngrams(text: str, n: int) -> Counter:
    words = text.split()
    return Counter(tuple(words[k : k + n]) for k in range(len(words) - n + 1))


def document_frequencies(refs: dict[str, list[str]], n: int) -> Counter:
    """n-gram -> number of images whose references contain it."""
    frequency = Counter()
    for texts in refs.values():
        found = set()
        for text in texts:
            found |= ngrams(text, n).keys()
        frequency.update(found)
    return frequency


def tf_idf(text: str, n: int, frequency: Counter, images: int) -> dict[tuple, float]:
    weights = {}
    for gram, count in ngrams(text, n).items():
        weights[gram] = count * math.log(images / max(1, frequency[gram]))
    return weights


def naive_cider(hyps: dict[str, str], refs: dict[str, list[str]]) -> float:
    """CIDEr-D: 10 times the mean over images, n = 1..4 and references of the clipped tf-idf cosine,
    times exp(-(length gap)^2 / 72)."""
    total = 0.0
    for n in range(1, 5):
        frequency = document_frequencies(refs, n)
        for i, hyp in hyps.items():
            x = tf_idf(hyp, n, frequency, len(refs))
            for ref in refs[i]:
                y = tf_idf(ref, n, frequency, len(refs))
                norm = math.hypot(*x.values()) * math.hypot(*y.values())
                dot = sum(min(x[gram], y[gram]) * y[gram] for gram in x.keys() & y.keys())
                cosine = dot / norm if norm else 0.0
                gap = max(len(hyp.split()) - 1, 0) - (len(ref.split()) - 1)
                total += cosine * math.exp(-(gap**2) / 72) / len(refs[i])
    return 10 * total / 4 / len(hyps)


def test_bleu_and_cider_of_groups_by_hand():
    groups = {"pair": {"1", "2", "not predicted"}, "single": {"3"}, "nobody": {"9"}}
    scores = data.score(PREDICTIONS, REFERENCES, groups)
    assert list(scores) == ["total", "pair", "single"]
    assert [row["pairs"] for row in scores.values()] == [3, 2, 1]
    # pair: all 8 words and 1 + 3 of the 6 word pairs match. The closest references have 3 words (as
    # close as 5) and 4 words, so there is no brevity penalty.
    assert scores["pair"]["BLEU-1"] == 100
    assert scores["pair"]["BLEU-2"] == pytest.approx(100 * (4 / 6) ** 0.5, abs=0.01)
    # total: the third reference adds two words, so there are 9 against 8 in the predictions.
    assert scores["total"]["BLEU-1"] == pytest.approx(100 * math.exp(1 - 9 / 8), abs=0.01)
    hyps = {i: data.plain_tokenize(text) for i, text in PREDICTIONS.items()}
    for name, ids in (("total", "123"), ("pair", "12"), ("single", "3")):
        refs = {}
        for i in ids:  # document frequencies are the group's own
            refs[i] = [data.plain_tokenize(text) for text in REFERENCES[i]]
        expected = 100 * naive_cider({i: hyps[i] for i in ids}, refs)
        assert scores[name]["CIDEr"] == pytest.approx(expected, abs=0.01)
    for metric in ("BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr"):
        assert scores["single"][metric] == 0
    assert data.score({"1": "a"}, {"1": [""]})["total"]["CIDEr"] == 0


def test_java_adds_meteor_and_changes_nothing_else(java, monkeypatch):
    with_java = data.score(PREDICTIONS, REFERENCES, {"same": {"2"}})
    assert with_java["same"]["METEOR"] == 100
    assert 0 < with_java["total"]["METEOR"] < 100
    monkeypatch.setattr(data, "java_works", lambda: False)
    for name, row in data.score(PREDICTIONS, REFERENCES, {"same": {"2"}}).items():
        assert row.items() <= with_java[name].items()


@pytest.mark.parametrize("error", [BrokenPipeError("it died"), KeyboardInterrupt()])
def test_a_java_program_that_fails_costs_its_own_metric_and_leaves_no_lock(error):
    """pycocoevalcap's Meteor fails while it holds its lock, which its destructor waits for."""

    class Failing:
        lock = threading.Lock()

        def compute_score(self, gts, res):
            self.lock.acquire()
            raise error

    program = Failing()
    captions = {"1": ["a b c d"]}
    programs = {"METEOR": program}
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            data.metrics_of(captions, captions, programs)
    else:
        metrics = data.metrics_of(captions, captions, programs)
        assert metrics["BLEU-4"] == 100 and "METEOR" not in metrics
        assert programs == {}
    assert not program.lock.locked()


def test_spice_runs_if_its_models_are_there_and_never_downloads(monkeypatch, tmp_path):
    class Program:
        def compute_score(self, gts, res):
            return 0.25, []

    monkeypatch.setattr("pycocoevalcap.meteor.meteor.Meteor", Program)
    monkeypatch.setattr("pycocoevalcap.spice.spice.Spice", Program)
    monkeypatch.setattr("pycocoevalcap.spice.spice.__file__", str(tmp_path / "spice.py"))
    monkeypatch.setattr(data, "java_works", lambda: True)
    monkeypatch.setattr(data, "ptb_tokenize", lambda texts: texts)
    assert "SPICE" not in data.score(PREDICTIONS, REFERENCES)["total"]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "stanford-corenlp-3.6.0-models.jar").touch()
    assert data.score(PREDICTIONS, REFERENCES)["total"]["SPICE"] == 25


# ---- of a data set's split -----------------------------------------------------------------------


def test_outer_quarters_of_difficulty_hold_a_quarter_rounded_down():
    pairs = [data.Pair(str(i), "a", "b", []) for i in range(3985)]
    overlap = {str(i): 1 - i / 4000 for i in range(3985)}
    release = data.Release(overlap=overlap, scenes={split: [] for split in data.SPLITS})
    dataset = SimpleNamespace(release=release, pairs=lambda split: pairs)
    assert data.groups_of(dataset, "test") == {
        "view: hardest quarter": {str(i) for i in range(3985 - 996, 3985)},
        "view: easiest quarter": {str(i) for i in range(996)},
    }


def test_pairs_with_a_picture_of_another_split_are_also_left_out():
    pairs = {
        "train": [data.Pair("1", "a", "b", [])],
        "val": [data.Pair("2", "c", "d", [])],
        "test": [
            data.Pair("3", "b", "a", []),
            data.Pair("4", "a", "x", []),
            data.Pair("5", "y", "d", []),
            data.Pair("6", "y", "x", []),
        ],
    }
    release = data.release_from_pairs(pairs, Path())
    dataset = SimpleNamespace(release=release, pairs=pairs.get)
    assert data.groups_of(dataset, "test") == {"without leaked pairs": {"6"}}
    pairs = {split: [data.Pair(split, split, None, [])] for split in data.SPLITS}
    assert not data.release_from_pairs(pairs, Path()).leaked("test")  # of single images


@pytest.fixture
def dataset(prepared):
    return data.load("clevr_change", prepared)


def first_references(dataset) -> dict[str, str]:
    """The first reference of each test pair, as a model would write it."""
    captions = {}
    for pair in dataset.pairs("test"):
        captions[pair.id] = " ".join(dataset.vocab.split(pair.captions[0]))
    return captions


def test_changed_and_unchanged_pairs_are_recognised(dataset, monkeypatch):
    captions = first_references(dataset)
    both = {"change recognised": 100, "no change recognised": 100}
    assert data.accuracy_of(dataset, captions) == both
    changed = {i: caption for i, caption in captions.items() if not i.endswith("_n")}
    assert data.accuracy_of(dataset, changed) == {}  # any caption at all would be right
    same = next(i for i in captions if i.endswith("_n"))
    captions[same] = "a red thing became blue"
    captions[same[:-2]] = "the scene , it seems , is the same"
    both = {"change recognised": 80, "no change recognised": 80}
    assert data.accuracy_of(dataset, captions) == both
    # LEVIR-CC's authors list sentences for "no change"; those of unchanged pairs count, too.
    row = replace(data.DATASETS["clevr_change"], no_change=("a red thing became blue",))
    monkeypatch.setitem(data.DATASETS, "clevr_change", row)
    both = {"change recognised": 80, "no change recognised": 100}
    assert data.accuracy_of(dataset, captions) == both


def test_sets_in_levir_ccs_layout_may_say_no_change_in_their_own_words(tmp_path):
    rows = []
    for n, text in enumerate(["a lake was drained", "all remains calm", "houses were torn down"]):
        sentences = [{"tokens": text.split()}]
        row = {"filename": f"{n}.png", "split": "train", "changeflag": int(n != 1)}
        rows.append(row | {"sentences": sentences})
    (tmp_path / "LevirCCcaptions.json").write_text(json.dumps({"images": rows}))
    release = data.read_levir_cc(tmp_path)
    vocab = data.Vocab.from_captions(release.captions(["train"]))
    dataset = data.Dataset("levir_cc", tmp_path, release, vocab)
    captions = {pair.id: pair.captions[0] for pair in dataset.pairs("train")}
    both = {"change recognised": 100, "no change recognised": 100}
    assert data.accuracy_of(dataset, captions) == both
    captions["0.png"] = "all remains calm"
    captions["1.png"] = "a lake was drained"
    both = {"change recognised": 50, "no change recognised": 0}
    assert data.accuracy_of(dataset, captions) == both


def test_one_caption_is_the_best_of_the_frequent_ones(dataset, monkeypatch):
    train = dataset.pairs("train")
    frequent = [f"a {n}" for n in range(20)]
    for pair in train:
        pair.captions[:] = frequent * 2
    train[0].captions.insert(0, "rare as gold")
    val = dataset.pairs("val")
    for pair in val:
        pair.captions[:] = ["rare as gold"]
    val[0].captions[:] = ["a 7"]
    monkeypatch.setattr(data, "ENOUGH_PAIRS", len(val))
    assert data.one_caption(dataset) == "a 7"
    monkeypatch.setattr(data, "ENOUGH_PAIRS", len(val) + 1)  # then it is chosen on train
    for pair in train:
        pair.captions[:] = ["a 3", *frequent]
    assert data.one_caption(dataset) == "a 3"
    for pair in train:
        pair.captions[:] = frequent * 2
    monkeypatch.setattr(data, "ENOUGH_PAIRS", len(val))
    for pair in val:
        pair.captions[:] = [""]
    assert data.one_caption(dataset) == "a 0"  # the most frequent, as nothing can be scored


def read(path):
    """The contents of a JSON file, whose numbers must be finite."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def test_the_files_of_a_split(dataset, tmp_path, capsys):
    captions = first_references(dataset)
    for i in captions:
        if i.endswith("_n"):
            captions[i] = "the gray cube turned red"
    total = dataset.results("test", captions, {}, tmp_path)
    result = read(tmp_path / "scores_test.json")
    assert result["scores"]["total"] == total
    assert total.keys() == {*data.COLUMNS}
    assert total["pairs"] == 10 and result["scores"]["only distractor"]["pairs"] == 5
    assert total["METEOR"] is None and total["pointing"] is None  # without Java, without boxes
    assert result["scores"]["only distractor"]["BLEU-1"] < result["scores"]["color"]["BLEU-1"]
    # The floor: one caption for every pair.
    constant = data.one_caption(dataset)
    references = {pair.id: pair.captions for pair in dataset.pairs("test")}
    alone = data.score(dict.fromkeys(captions, constant), references)["total"]
    assert result["scores"][data.ONE_CAPTION].items() >= alone.items()
    assert result[data.ONE_CAPTION] == constant
    assert result["different captions"] == len({*captions.values()}) > 1
    assert result["accuracy"] == {"change recognised": 100, "no change recognised": 0}
    rows = read(tmp_path / "captions_test.json")
    assert {row["image_id"]: row["caption"] for row in rows} == captions
    assert result["without prediction"] == 0
    # The files are those that `data.py score` reads.
    capsys.readouterr()
    data.score_files(tmp_path / "captions_test.json", tmp_path / "references_test.json")
    _, row, _ = capsys.readouterr().out.splitlines()
    assert row == data.format_scores({"total": total}).splitlines()[1]
    del captions[min(captions)]
    dataset.results("test", captions, {}, tmp_path)
    assert read(tmp_path / "scores_test.json")["without prediction"] == 1


def test_kinds_that_only_training_has_are_named(dataset, tmp_path, capsys):
    train, test = dataset.pairs("train"), dataset.pairs("test")
    kinds = {"gone": {train[0].id}, "moved": {train[1].id, test[0].id}, "new": {test[1].id}}
    dataset.kinds.clear()
    dataset.kinds.update(kinds)
    dataset.results("test", first_references(dataset), {}, tmp_path)
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "of the kind" in line]
    assert "gone" in note


def test_values_that_do_not_exist_are_a_dash_and_null(dataset, tmp_path, capsys, monkeypatch):
    accuracy = {"change type": 50.0, "place": math.nan}
    monkeypatch.setattr(data, "accuracy_of", lambda *_: accuracy)
    dataset.results("test", first_references(dataset), {}, tmp_path)
    assert read(tmp_path / "scores_test.json")["accuracy"] == {"change type": 50, "place": None}
    printed = capsys.readouterr().out
    assert "nan" not in printed and "None" not in printed
    table = data.format_scores({"total": {"pairs": 3, "BLEU-1": 12.5, "SPICE": math.nan}})
    cells = table.splitlines()[1].split()
    assert cells == ["total", "3", "12.50", *["-"] * 7]


def test_validation_asks_for_no_java(dataset, monkeypatch):
    def java_works():
        raise AssertionError("validation asked for Java")

    monkeypatch.setattr(data, "java_works", java_works)
    scores = dataset.results("test", first_references(dataset), {}, None)
    assert scores.keys() == {"BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr"}
    assert scores["BLEU-4"] == 100


OWN_CAPTIONS = [
    'A 3.5 m gate (the "left-hand" one) wasn\'t moved, 50% of it!',
    "ein Tu\u0308r ist geo\u0308ffnet...",
    "the \U0001f469\u200d\U0001f692 has left \U0001f44b\U0001f3fd\U0001f44b\U0001f3fd",
]


def test_a_model_of_own_pairs_without_a_mistake_scores_100():
    vocab = data.Vocab.from_captions(OWN_CAPTIONS, tokenizer=data.tokenize_pairs)
    dataset = SimpleNamespace(name="pairs", vocab=vocab)
    references = {str(n): [caption] for n, caption in enumerate(OWN_CAPTIONS)}
    said = {}
    for i, (caption,) in references.items():
        (said[i],) = vocab.decode(torch.tensor([vocab.encode(caption, 40)]))
    scores = data.protocol_scores(dataset, said, references)["total"]
    for metric in ("BLEU-1", "BLEU-4", "ROUGE-L"):
        assert scores[metric] == 100


# ---- the pointing game ---------------------------------------------------------------------------


def naive_resize(heat: torch.Tensor, height: int, width: int) -> dict[tuple[int, int], float]:
    """Bilinear, with pixel centres as in image programs; border cells extend beyond the border."""
    h, w = heat.shape
    out = {}
    for row in range(height):
        y = min(max((row + 0.5) * h / height - 0.5, 0), h - 1)
        for column in range(width):
            x = min(max((column + 0.5) * w / width - 0.5, 0), w - 1)
            value = 0.0
            for i in range(h):
                for j in range(w):
                    near = max(1 - abs(y - i), 0) * max(1 - abs(x - j), 0)
                    value += near * float(heat[i, j])
            out[row, column] = value
    return out


def test_pointing_game_equals_a_loop_over_pixels():
    g = torch.Generator().manual_seed(0)
    hits = 0
    for left, top, width, height in torch.randint(9, 16, (20, 4), generator=g).tolist():
        heat = torch.rand(4, 5, generator=g)
        # Beyond the centre of a border cell, all pixels are equally bright, so that rounding would
        # decide. Dim border cells avoid this.
        heat[[0, -1]] *= 0.1
        heat[:, [0, -1]] *= 0.1
        x = left % 2 * width // 3
        y = top % 2 * height // 3
        w = 2 * width // 3
        h = 2 * height // 3
        big = naive_resize(heat, height, width)
        row, column = max(big, key=big.get)
        inside = x <= column < x + w and y <= row < y + h
        assert data.pointing_hit(heat, [x, y, w, h], (width, height)) == inside
        hits += inside
    assert 3 < hits < 17


@pytest.fixture
def boxed(tmp_path):
    """Three pairs with boxes of the changed object and one without; all use the same picture."""
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    left_top = [0, 0, 10, 10]
    right_bottom = [20, 10, 10, 10]
    boxes = {
        "1": (left_top, right_bottom),
        "2": (None, right_bottom),
        "3": ([0, 0, 30, 20], None),
        "not in this split": (left_top, left_top),
    }
    return SimpleNamespace(
        release=SimpleNamespace(boxes=boxes),
        pairs=lambda split: [data.Pair(i, "a", "a", []) for i in "1234"],
        paths={"a": tmp_path / "a.png"},
    )


@pytest.fixture
def heat():
    """The brightest cell: left top of pair 1, right bottom of pair 2, right top of the others."""
    left_top = torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    right_bottom = torch.tensor([[0, 0, 0], [0, 0, 1.0]])
    right_top = torch.tensor([[0, 0, 1.0], [0, 0, 0]])
    return {"1": left_top, "2": right_bottom, "3": right_top, "4": right_top}


def test_pointing_scores_count_boxes_not_pairs(boxed, heat):
    maps = {i: {"attention": m, "other": -m} for i, m in heat.items()}  # the first map counts
    groups = {"color": {"1", "9"}, "nobody": {"9"}}
    assert data.pointing_scores(boxed, "test", maps, groups) == {
        "total": {"pointing": 75, "chance": 37.5},
        "color": {"pointing": 50, "chance": 16.67},
    }
    # In pair 1, each side's own map finds its box.
    maps = {"1": {"after": heat["2"], "before": heat["1"]}}
    assert data.pointing_scores(boxed, "test", maps, {})["total"]["pointing"] == 100
    boxed.paths["a"].unlink()
    assert data.pointing_scores(boxed, "test", maps, {}) == {}


# ---- files ---------------------------------------------------------------------------------------


def annotations(rows) -> str:
    return json.dumps({"annotations": [{"image_id": i, "caption": text} for i, text in rows]})


def test_command_line_scores_and_counts_what_has_no_prediction(tmp_path, capsys):
    predictions = tmp_path / "p.json"
    references = tmp_path / "r.json"
    rows = [{"image_id": 1, "caption": "a barn."}, {"image_id": 2, "caption": "a road"}]
    predictions.write_text(json.dumps(rows))
    references.write_text(annotations([(1, "A barn"), (2, "a house"), (3, "a hill"), (3, "hills")]))
    flags = ["score", "--predictions", str(predictions), "--references", str(references)]
    data.main(flags)
    _, total, absent = capsys.readouterr().out.splitlines()
    assert total.split()[:3] == ["total", "2", "75.00"]
    assert absent == "without prediction: 1"
    twice = [{"image_id": 1, "caption": "a"}, {"image_id": 1, "caption": "b"}]
    for rows in (twice, [{"image_id": 9, "caption": "a barn"}], [{"image_id": 1}], []):
        predictions.write_text(json.dumps(rows))
        with pytest.raises(data.InputError):
            data.main(flags)
