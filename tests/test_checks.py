"""What a data set is checked for: copies of pictures, sentences, checkpoints that fit."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import NoFeatures

import data
from support import checks, report
from support.pairs import Pair, release_from_pairs
from support.text import Vocab, frequent_words, tokenize_pairs


def test_pairs_that_a_checkpoint_was_trained_on_are_told(prepared, capsys):
    """The table's splits may have changed since."""
    dataset = data.load("clevr_change", prepared)
    state = dataset.state()
    dataset.adopt(state)
    assert "trained on" not in capsys.readouterr().out
    val = dataset.pairs("val")
    state["train_pairs"] = torch.tensor([checks.contents(dataset, pair) for pair in val])
    dataset.adopt(state)
    assert f"trained on {len(val)} of the {len(val)} val pairs" in capsys.readouterr().out


class Copies(NoFeatures):
    """Pictures of which some are copies of others, by their names."""

    def content(self, name):
        return hash(re.sub("copy . of ", "", name))


def own_pairs(pairs, kinds=None):
    """A Dataset of pairs by split, whose pictures may be copies."""
    release = release_from_pairs(pairs, Path(), kinds)
    vocab = Vocab(frequent_words(release.captions(["train"]), tokenize_pairs), tokenize_pairs)
    return data.Dataset("pairs", Path(), release, vocab, Copies())


def test_a_picture_is_known_by_its_content():
    """Whatever its name, in another split and in the same pair."""
    pairs = {
        "train": [Pair("1", "a", "b", ["c"]), Pair("2", "c", "copy 1 of c", ["c"])],
        "val": [Pair("3", "d", "e", ["c"])],
        "test": [
            Pair("4", "x", "copy 1 of a", ["c"]),
            Pair("5", "y", "copy 2 of d", ["c"]),
            Pair("6", "y", "x", ["c"]),
            Pair("7", "z", "copy 1 of z", ["c"]),
            Pair("8", "b", "x", ["c"]),
        ],
    }
    dataset = own_pairs(pairs, {"no change": {"2"}})
    assert checks.leaked(dataset, "test") == {"4", "5", "8"}
    assert report.groups_of(dataset, "test")["without leaked pairs"] == {"6", "7"}
    val, test, equal = checks.notes_on_copies(dataset)
    assert "1 of 1 val" in val and "3 of 5 test" in test
    assert "1 changed and 1 unchanged" in equal and "7" in equal
    single = own_pairs({"train": [Pair("1", "a", None, ["c"])], "test": [Pair("2", "b", None, [])]})
    assert checks.notes_on_copies(single) == []


def test_what_unchanged_pairs_say_by_mistake_claims_a_change():
    """The sentences that count are those which unchanged training pairs have more often."""
    texts = ["Nothing changed.", "nothing changed .", "the car left", "all as before"]
    pairs = [Pair(f"same {n}", "a", f"{n}", [text]) for n, text in enumerate(texts)]
    texts = ["The car left", "the car left", "nothing changed."]
    pairs += [Pair(f"{n}", "b", f"{n}", [text]) for n, text in enumerate(texts)]
    dataset = own_pairs({"train": pairs}, {"no change": {f"same {n}" for n in range(4)}})
    assert dataset.no_change == {"nothing changed .", "all as before"}


@pytest.mark.parametrize("shared, noted", [(1, False), (2, True)])
def test_pairs_that_share_a_picture_are_told(shared, noted, capsys):
    """They would be negatives of each other in the contrastive losses. A copy of a picture is the
    same picture."""
    pairs = [Pair(f"{n}", f"b{n}", f"a{n}", ["c"]) for n in range(20 - shared)]
    pairs += [Pair(f"r{n}", f"copy {n} of b0", f"r{n}", ["c"]) for n in range(shared)]
    dataset = own_pairs({"train": pairs})
    cfg = SimpleNamespace(w_match=0.5, w_other=0.0)
    checks.note_on_negatives(dataset, cfg, "w_match", "w_other")
    told = capsys.readouterr().out
    assert told.endswith(" --w_match 0 --out_dir OTHER\n") if noted else told == ""
