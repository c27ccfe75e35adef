"""Scores of captions: words and metrics."""

import math
import subprocess
from types import SimpleNamespace

import pytest

import scores
from common import InputError
from support import report
from support.mini.sentences import NO_CHANGE, TEMPLATES
from support.releases import DATASETS
from support.text import SPECIAL, Vocab

REFERENCES = {
    "1": ["the red car is gone", "the car left"],
    "2": ["no change was made"],
    "3": ["a man's hat", "hat added"],
}


PREDICTIONS = {"1": "The left red car.", "2": "no change was made", "3": ""}


SENTENCES = [
    "The man's (red) T-shirt isn't here -- it's gone...",
    "Mr. Smith, etc., left at 3.5 p.m.",
    "Die Größe ist 1 1/2 m — „naïve“ cafés, 50% of $5",
    '[x] {y} b&w photo & AT&T sign no. 5; no. I cannot say "no" !!',
]


@pytest.fixture(scope="module")
def java():
    return scores.java_works() or pytest.skip("java does not run")


# ---- words ---------------------------------------------------------------------------------------


def test_odd_line_breaks_shift_no_caption(java):
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    expected = PTBTokenizer().tokenize({0: [{"caption": s} for s in SENTENCES]})[0]
    odd = {"": "", "a\u2028b": "a b", "c\n\nd": "c d", "e\x85f\r": "e f", "\t": ""}
    words = scores.scored_words([*SENTENCES, *odd], "ptb", None, quick=False)
    assert words == [*expected, *odd.values()]


@pytest.mark.parametrize("output", [b"", b"a b\n", b"a\nb", b"a\nb\n\n"])
def test_a_tokenizer_that_loses_lines_gives_no_scores(output, monkeypatch):
    done = SimpleNamespace(stdout=output)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(OSError):
        scores.ptb_tokenize(["a", "b"])


def test_plain_words_equal_stanfords_on_minis_templates(java):
    texts = [*NO_CHANGE]
    for templates in TEMPLATES.values():
        for template in templates:
            texts.append(template.format("small red cube", "gray"))
    texts.append("The cyan thing on the left side has been newly placed.")
    texts.append("no, it - moved")
    assert [scores.plain_tokenize(text) for text in texts] == scores.ptb_tokenize(texts)


def test_words_as_they_are_and_as_ids():
    references = {"1": ["a barn, by zoe", "no  change"]}
    said = {"1": "a barn, by ann "}
    # No punctuation is dropped: "barn," is a word.
    assert scores.score(said, references, tokens="split")["total"]["BLEU-1"] == 75
    # In LEVIR-CC, "zoe" and "ann" are both UNK.
    vocab = Vocab([*SPECIAL, "a", "barn,", "by"], str.split)
    levir_cc = SimpleNamespace(settings=DATASETS["levir_cc"], vocab=vocab)
    assert report.protocol_scores(levir_cc, said, references)["total"]["BLEU-4"] == 100


# ---- metrics -------------------------------------------------------------------------------------


def test_bleu_and_cider_of_groups():
    from pycocoevalcap.cider.cider import Cider

    groups = {"pair": {"1", "2", "not predicted"}, "single": {"3"}, "nobody": {"9"}}
    table = scores.score(PREDICTIONS, REFERENCES, groups)
    assert list(table) == ["total", "pair", "single"]
    assert [row["pairs"] for row in table.values()] == [3, 2, 1]
    # pair: all 8 words and 1 + 3 of the 6 word pairs match. The closest references have 3 words (as
    # close as 5) and 4 words, so there is no brevity penalty.
    assert table["pair"]["BLEU-1"] == 100
    assert table["pair"]["BLEU-2"] == pytest.approx(100 * (4 / 6) ** 0.5, abs=0.01)
    # total: the third reference adds two words, so there are 9 against 8 in the predictions.
    assert table["total"]["BLEU-1"] == pytest.approx(100 * math.exp(1 - 9 / 8), abs=0.01)
    for name, ids in (("total", "123"), ("pair", "12")):
        hyps = {i: [scores.plain_tokenize(PREDICTIONS[i])] for i in ids}
        refs = {}
        for i in ids:  # document frequencies are the group's own
            refs[i] = [scores.plain_tokenize(text) for text in REFERENCES[i]]
        cider, _ = Cider().compute_score(refs, hyps)
        assert table[name]["CIDEr"] == pytest.approx(100 * cider, abs=0.01) and cider > 0
    for metric in ("BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr"):
        assert table["single"][metric] == 0


def test_a_reference_that_is_no_list_is_refused():
    with pytest.raises(InputError, match="list of texts"):
        scores.score({"a": "it is open"}, {"a": "it is open"}, quick=True)
