"""The table of your own pairs."""

import json
import re
import textwrap
from pathlib import Path

import pytest
from helpers import write_features, write_picture

import data
import scorer_cbr
from common import InputError
from support.own_pairs import read_pairs
from support.pairs import SPLITS, Pair
from support.releases import (
    read_release,
)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def sizes(release):
    return {split: len(scenes) for split, scenes in release.scenes.items()}


OWN_PAIRS = """before,after,split,captions
a.png,b.png,train,The gate opened.| it is open
a.png,b.png,train,open now
c.png,sub/d.jpg,val,"red, then blue"
b.png,d.jpg,test,same
"""


@pytest.mark.parametrize(
    "text",
    [
        OWN_PAIRS,
        "\ufeff" + OWN_PAIRS,  # as spreadsheets do
        OWN_PAIRS.replace("\n", "\r\n,,,\r\n") + "\n , ,,\n",
        OWN_PAIRS.replace("a.png,b.png", "./a.png,sub/../b.png").replace("train", "Train "),
        # As Windows writes them
        OWN_PAIRS.replace("a.png,b.png", ".\\a.png,sub\\..\\b.png").replace("b/d", "b\\d"),
        # Excel writes semicolons in half of Europe. Then commas need no quotes.
        OWN_PAIRS.replace('"', "").replace(", ", "\0").replace(",", ";").replace("\0", ", "),
        OWN_PAIRS.replace("|", "|-|\u200f|"),
    ],
)
def test_your_own_pairs(text, tmp_path):
    (tmp_path / "pairs.csv").write_bytes(text.encode())
    release = read_pairs(tmp_path)
    texts = ["The gate opened.", "it is open", "open now"]
    assert release.pairs("train") == [Pair("a.png b.png", "a.png", "b.png", texts)]
    assert release.captions(["val"]) == ["red, then blue"]
    assert release.paths["sub/d.jpg"] == tmp_path / "sub/d.jpg"
    assert set(release.paths) == {"a.png", "b.png", "c.png", "d.jpg", "sub/d.jpg"}


HEAD = "before,after,split,captions\n"


KINDS = "before,after,kind,captions\n"


@pytest.mark.parametrize(
    "text, named",
    [
        (HEAD + "a,b,train,red left, the van stayed\n", r"pairs\.csv.*line 2.*quote"),
        (HEAD + "a,b,train,c\n\n\na,,train,c\n", "line 5: after"),
        # Two quotes too many would swallow the rows between them.
        (HEAD + 'a,b,train,"c\na,d,train,c\na,e,train,c"\n', "line 2.*line break"),
        (HEAD + 'a,b,train,c\na,b,train,"it is\na,b,train,c\n', "line 3.*quote"),
        (HEAD + "a,b,train,\na,,val,c\n", "line 2: captions, line 3: after"),
        (HEAD + "a,b,train,-|\u200e\nc,d,train,-\n", "no caption: a b, c d"),
        (HEAD + "a,b,,c\nc,d,,c\n", "a b, c d.*''.*train.*val.*test"),
        (HEAD + "a,b,train,c\n./a,b,test,c\n", "a b.*train.*test"),
        (KINDS + "a,b,gone,c\na,b,moved,d\n", "a b.*gone.*moved"),
        ("before,after,text\na,b,c\n", "line 1.*captions"),
        ("before,after,captions,captions\na,b,c,d\n", "line 1.*one.*captions"),
        # An unquoted comma would go unnoticed.
        ("before,after,captions,kind\na,b,red left, the van stayed\n", "last column is kind"),
        (HEAD + "a,b,train,c|nan\nd,b,train,NA\n", "a b has the caption 'nan', d b .*'NA'"),
        (HEAD + "a,b,train,\\N\n", r"a b has the caption '\\\\N'"),
        (HEAD + "a,b,train,it\0is\n", "line 2.*NUL"),
        (HEAD + "a,b,train,\"('it is open', 'open now')\"\n", r"a b has the caption.*\|"),
        # The name of another row of the scores
        (KINDS + "a,b,Without Leaked  Pairs,c\n", "'without leaked pairs'"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(text, named, tmp_path):
    write(tmp_path / "pairs.csv", text)
    with pytest.raises(InputError, match=named):
        read_release("pairs", tmp_path)


def test_only_spellings_of_no_change_are_one_kind(tmp_path):
    spellings = [
        "no change",
        "no_change",
        " NO  CHANGE ",
        "no - change",
        "no\u2013change",
        "NoChange",
    ]
    kinds = ["+1", "-1", "C", "C++", "no change in size", "T\xfcr"]
    rows = [f"{n}.png,b.png,{kind},c\n" for n, kind in enumerate(spellings)]
    rows += [f"{n}.png,a.png,{kind},c\n" for n, kind in enumerate(kinds)]
    # A letter with a mark is one or two characters.
    rows.append("x.png,a.png, Tu\u0308r ,c\n")
    write(tmp_path / "pairs.csv", KINDS + "".join(rows))
    release = read_pairs(tmp_path)
    assert release.kinds["no change"] == {f"{n}.png b.png" for n in range(len(spellings))}
    assert release.kinds["T\xfcr"] == {"5.png a.png", "x.png a.png"}
    assert release.kinds.keys() == {"no change", *kinds}
    assert release.groups == release.kinds


@pytest.mark.parametrize(
    "text, noted",
    [
        (KINDS + "d,e,no change,c\nd,f,no change,c\n", ["no column split"]),
        # That all are for training, or none is, is as it was meant.
        (HEAD.replace("split", "split,set") + "a,b,train,x,c\nd,e,train,,c\n", ["'set'", "kind"]),
    ],
)
def test_what_own_pairs_lack_is_noted(text, noted, tmp_path):
    write(tmp_path / "pairs.csv", text)
    notes = read_pairs(tmp_path).notes
    assert len(notes) == len(noted)
    for note, word in zip(notes, noted, strict=True):
        assert word in note


def test_a_hash_of_the_first_picture_gives_the_split(tmp_path):
    """A pair's split is a function of its names alone. Reversed pairs, and pairs of a fixed
    camera's first picture with later ones, fall into one split."""
    rows = []
    for n in range(300):
        rows += [f"{n}.png,{n}x.png,,c", f"{n}x.png,{n}.png,,c", f"{n}.png,{n}y.png,,c"]
    write(tmp_path / "pairs.csv", "\n".join(["before,after,kind,captions", *rows]))
    release = read_pairs(tmp_path)
    assert sizes(release) == {"train": 720, "val": 78, "test": 102}
    split_of = {}
    for split in SPLITS:
        for pair in release.pairs(split):
            split_of[pair.id] = split
    for n in range(300):
        split = split_of[f"{n}.png {n}x.png"]
        assert split == split_of[f"{n}x.png {n}.png"] == split_of[f"{n}.png {n}y.png"]


def test_your_own_pairs_may_be_all_for_training_or_all_for_test(tmp_path, tiny):
    for split in ("train", "test"):
        folder = tmp_path / split
        write(folder / "pairs.csv", f"{HEAD}a.png,b.png,{split},opened\nc.png,b.png,{split},shut\n")
        for name in ("a", "b", "c"):
            write_picture(folder / f"{name}.png")
        write_features("pairs", folder)
    train = [*tiny, "--dataset", "pairs", "--steps", "1", "--out_dir", str(tmp_path / "run")]
    with pytest.raises(InputError, match="--eval"):
        scorer_cbr.main([*train, "--data_dir", str(tmp_path / "test")])
    scorer_cbr.main([*train, "--data_dir", str(tmp_path / "train")])
    run = str(tmp_path / "run/best.pt")
    scorer_cbr.main(["--eval", run, "--data_dir", str(tmp_path / "test"), "--device", "cpu"])
    result = json.loads((tmp_path / "run/best-test/scores_test.json").read_text())["scores"]
    assert result["total"]["pairs"] == 2
    assert result["one caption for all"]["CIDEr"] is not None  # chosen among those of training
    assert set(result["captions of other pairs"].values()) == {None}  # both pairs have b.png


def test_the_readmes_example_of_your_own_pairs(tmp_path):
    readme = Path(data.__file__).with_name("README.md").read_text(encoding="utf-8")
    example = re.search(r"^ *before,after,.*captions\n(.+\n)+", readme, re.M)[0]
    write(tmp_path / "pairs.csv", textwrap.dedent(example))
    release = read_pairs(tmp_path)
    assert sum(sizes(release).values()) > 1
    assert all(release.captions(SPLITS))
