"""Scores of a data set's split: groups, accuracy, the pointing game, files."""

import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import NoFeatures
from PIL import Image
from pycocotools.coco import COCO

import data
import scorer_cbr
import scores
from common import InputError
from support import report
from support.files import read_log
from support.pairs import Pair, release_from_pairs
from support.releases import DATASETS, read_levir_cc, vocab_of
from support.run import code_version
from support.text import Vocab, frequent_words, tokenize_pairs


def test_outer_quarters_of_difficulty_hold_a_quarter_rounded_down():
    pairs = [Pair(str(i), "a", "b", []) for i in range(11)]
    release = release_from_pairs({"test": pairs}, Path())
    release.overlap = {str(i): 1 - i / 20 for i in range(11)}
    release.features = NoFeatures()
    assert report.groups_of(release, "test") == {
        "view: hardest quarter": {"9", "10"},
        "view: easiest quarter": {"0", "1"},
    }


@pytest.fixture
def dataset(prepared):
    return data.load("clevr_change", prepared)


def test_changed_and_unchanged_pairs_are_recognised(tmp_path):
    """Sets in LEVIR-CC's layout may say in their own words that nothing changed."""
    rows = []
    for n, text in enumerate(["a lake was drained", "all remains calm", "houses were torn down"]):
        sentences = [{"tokens": text.split()}]
        row = {"filename": f"{n}.png", "split": "train", "changeflag": int(n != 1)}
        rows.append(row | {"sentences": sentences})
    (tmp_path / "LevirCCcaptions.json").write_text(json.dumps({"images": rows}))
    release = read_levir_cc(tmp_path)
    vocab = vocab_of("levir_cc", release)
    dataset = data.Dataset("levir_cc", tmp_path, release, vocab, NoFeatures())
    captions = {pair.id: pair.captions[0] for pair in dataset.pairs("train")}
    right = {"change claimed": [True, True], "no change claimed": [True]}
    assert report.claims(dataset, captions) == right
    captions["0.png"] = "no change has occurred"  # one of LEVIR-CC's own sentences
    captions["1.png"] = "a lake was drained"
    claims = report.claims(dataset, captions)
    assert sorted(claims["change claimed"]) == [False, True]
    assert claims["no change claimed"] == [False]
    # A model that was trained elsewhere says it in the words of its training.
    captions["1.png"] = "same as ever"
    state = {"extractor": "", "grid": dataset.grid, "vocab": vocab.words, "max_len": 9}
    dataset.adopt(state | {"train_pairs": torch.empty(0, 2), "no_change": ["same as ever"]})
    assert report.claims(dataset, captions)["no change claimed"] == [True]
    del captions["1.png"]  # then any caption at all would be right
    assert report.claims(dataset, captions) == {}


def test_captions_of_other_pairs_are_of_other_pictures(dataset):
    """Each pair gets a caption of a pair with which it shares no picture, such as "before"."""
    pairs = {pair.id: pair for pair in dataset.pairs("test")}
    captions = {pair_id: f"caption of {pair_id}" for pair_id in pairs}
    others = report.captions_of_others(dataset, "test", captions)
    assert others.keys() == captions.keys()
    for pair_id, caption in others.items():
        one = pairs[pair_id]
        other = pairs[caption.removeprefix("caption of ")]
        assert {one.before, one.after}.isdisjoint({other.before, other.after})
    # A model that sees nothing gains nothing by looking at its own pair.
    blind = dict.fromkeys(captions, "the same")
    assert report.captions_of_others(dataset, "test", blind) == blind
    dataset.scenes["test"] = dataset.scenes["test"][:1]  # both pairs share their "before"
    assert report.captions_of_others(dataset, "test", captions) == {}


def test_one_caption_is_the_best_of_the_frequent_ones(dataset, monkeypatch):
    train = dataset.pairs("train")
    frequent = [f"a {n}" for n in range(20)]
    for pair in train:
        pair.captions[:] = ["a 3", *frequent, *frequent]
    train[0].captions.append("rare as gold")
    val = dataset.pairs("val")
    for pair in val:
        pair.captions[:] = ["rare as gold"]
    val[0].captions[:] = ["a 7"]
    monkeypatch.setattr(report, "ENOUGH_PAIRS", len(val))
    assert report.one_caption(dataset) == "a 7"
    monkeypatch.setattr(report, "ENOUGH_PAIRS", len(val) + 1)  # then it is chosen on train
    assert report.one_caption(dataset) == "a 3"
    # Without training pairs, the checkpoint knows the captions, and the pairs at hand choose.
    dataset.scenes["train"] = []
    assert report.one_caption(dataset) is None
    state = {"frequent_captions": ["a 3", "rare as gold"]}
    assert report.one_caption(dataset, state) == "rare as gold"


def read(path):
    """The contents of a JSON file, whose numbers must be finite."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def test_references_are_written_as_they_are_scored(dataset, tmp_path):
    """Otherwise, scores.py would compare "门 开" with a "门开" that it does not split."""
    vocab = Vocab(frequent_words(["门开"], tokenize_pairs), tokenize_pairs)
    dataset.settings = DATASETS["pairs"]
    dataset.vocab = vocab
    for pair in (*dataset.pairs("train"), *dataset.pairs("test")):
        pair.captions[:] = ["门开"]
    captions = {pair.id: "门 开" for pair in dataset.pairs("test")}
    dataset.results("test", captions, {}, tmp_path)
    written = read(tmp_path / "references_test.json")["annotations"]
    assert {row["caption"] for row in written} == {"门 开"}
    assert "门 开" in (tmp_path / "captions_test.json").read_text(encoding="utf-8")


def test_the_files_of_a_split(dataset, tmp_path, capsys):
    captions = {}
    for pair in dataset.pairs("test"):  # as a model would write them
        words = dataset.vocab.split(pair.captions[0])
        captions[pair.id] = "the gray cube turned red" if "_n" in pair.id else " ".join(words)
    paper = {dataset.name: {"only distractor": {"CIDEr": 117.9}}}
    total = dataset.results("test", captions, {}, tmp_path, published=paper)
    output = capsys.readouterr().out
    # Without Java, without boxes. The groups are of ten, of five and of a single pair.
    table = output.partition("pairs\n")[2].splitlines()[:6]
    assert table[0].split() == ["pairs", "BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr"]
    assert [line.split()[0] for line in table[1:5]] == ["total", "one", "captions", "paper:"]
    assert table[4].split()[3:] == [*"----", "117.90"]
    assert "fewer than ten pairs: semantic change" in table[5]
    result = read(tmp_path / "scores_test.json")
    assert result["scores"]["total"] == total
    assert result["scores"]["paper: only distractor"]["CIDEr"] == 117.9
    assert total.keys() == {*scores.COLUMNS}
    assert total["pairs"] == 10 and result["scores"]["only distractor"]["pairs"] == 5
    assert total["METEOR"] is None and total["pointing"] is None  # without Java, without boxes
    assert result["scores"]["only distractor"]["BLEU-1"] < result["scores"]["color"]["BLEU-1"]
    # The floor: one caption for every pair.
    constant = report.one_caption(dataset)
    references = {pair.id: pair.captions for pair in dataset.pairs("test")}
    alone = scores.score(dict.fromkeys(captions, constant), references)["total"]
    assert result["scores"][scores.ONE_CAPTION].items() >= alone.items()
    assert result[scores.ONE_CAPTION] == constant
    assert "no better" not in output
    dataset.results("test", dict.fromkeys(captions, constant), {}, tmp_path / "constant")
    assert "no better than that of one caption" in capsys.readouterr().out
    assert result["accuracy"] == {"change claimed": 100, "no change claimed": 0}
    rows = read(tmp_path / "captions_test.json")
    assert {row["image_id"]: row["caption"] for row in rows} == captions
    # Published scripts read both files by pycocotools.
    coco = COCO(tmp_path / "references_test.json")
    found = coco.loadRes(str(tmp_path / "captions_test.json"))
    for i, texts in references.items():
        assert [row["caption"] for row in coco.imgToAnns[i]] == texts
        assert [row["caption"] for row in found.imgToAnns[i]] == [captions[i]]
    # The command line reads these files.
    predictions = tmp_path / "captions_test.json"
    call = ["--predictions", str(predictions)]
    call += ["--references", str(tmp_path / "references_test.json")]
    capsys.readouterr()
    scores.main(call)
    _, row, absent = capsys.readouterr().out.splitlines()
    assert row == scores.format_scores({"total": total}).splitlines()[1]
    assert absent == "without prediction: 0"
    predictions.write_text(json.dumps([*rows, rows[0]]))
    with pytest.raises(InputError, match="two predictions"):
        scores.main(call)


def test_a_model_of_own_pairs_without_a_mistake_scores_100():
    reference = 'A 3.5 m gate (the "left-hand" one) wasn\'t moved, 50% of it!'
    vocab = Vocab(frequent_words([reference], tokenize_pairs), tokenize_pairs)
    dataset = SimpleNamespace(settings=DATASETS["pairs"], vocab=vocab)
    (said,) = vocab.decode(torch.tensor([vocab.encode(reference, 40)]))
    total = report.protocol_scores(dataset, {"1": said}, {"1": [reference]})["total"]
    for metric in ("BLEU-1", "BLEU-4", "ROUGE-L"):
        assert total[metric] == 100


@pytest.mark.parametrize("caption", ["red -> blue", "a <-> b, 2 --> 3", "x <= 5 => it is gone."])
def test_arrows_come_back_as_they_were_written(caption):
    words = " ".join(tokenize_pairs(caption))
    assert words != caption and Vocab.sentence(words) == caption


# ---- the pointing game ---------------------------------------------------------------------------


def test_pointing_game_equals_a_loop_over_pixels():
    """Pillow resizes bilinearly, with pixel centres."""
    g = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(20):
        heat = torch.rand(4, 5, generator=g)
        # Beyond the centre of a border cell, all pixels are equally bright, so that rounding would
        # decide. Dim border cells avoid this.
        heat[[0, -1]] *= 0.1
        heat[:, [0, -1]] *= 0.1
        big = Image.fromarray(heat.numpy()).resize((12, 9), Image.Resampling.BILINEAR)
        column, row = max(itertools.product(range(12), range(9)), key=big.getpixel)
        inside = column < 6 and row >= 2
        assert report.pointing_hit(heat, [0, 2, 6, 7], (12, 9)) == inside
        hits += inside
    assert 3 < hits < 17


def test_pointing_scores_count_boxes_not_pairs(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    left_top = [0, 0, 10, 10]
    right_bottom = [20, 10, 10, 10]
    boxes = {
        "1": (left_top, right_bottom),
        "2": (None, right_bottom),
        "3": ([0, 0, 30, 20], None),
        "not in this split": (left_top, left_top),
    }
    pairs = [Pair(i, "a.png", "a.png", []) for i in "1234"]
    release = release_from_pairs({"test": pairs}, tmp_path)
    release.boxes = boxes
    brightest = torch.eye(6).unflatten(1, (2, 3))  # cells 0 and 5 are the two corners
    maps = {}
    for i, cell in (("1", 0), ("2", 5), ("3", 2), ("4", 2)):
        maps[i] = {"attention": brightest[cell], "other": -brightest[cell]}  # the first map counts
    groups = {"color": {"1", "9"}, "nobody": {"9"}}
    assert report.pointing_scores(release, "test", maps, groups) == {
        "total": {"pointing": 75, "chance": 37.5},
        "color": {"pointing": 50, "chance": 16.67},
    }
    # Each side's own map finds its box.
    maps = {"1": {"after": brightest[5], "before": brightest[0]}}
    assert report.pointing_scores(release, "test", maps, {})["total"]["pointing"] == 100


# ---- the files of a run --------------------------------------------------------------------------


def test_a_run_leaves_what_it_should(prepared, tiny, tmp_path, monkeypatch, capsys):
    def run(*argv):
        scorer_cbr.main([str(a) for a in argv])

    out = tmp_path / "run"
    run(*tiny, "--data_dir", prepared, "--out_dir", out)
    events = [row["event"] for row in read_log(out / "log.jsonl")]
    assert events.count("train") == 4
    assert events.count("eval") == 2
    result = read(out / "scores_test.json")
    assert result["config"]["out_dir"] == str(out) and result["config"]["dim"] == 16
    assert result["step"] in (4, 8) and result["code"] == code_version()
    # Another checkpoint's files have a folder of their own.
    run("--eval", out / "last.pt", "--split", "val", "--device", "cpu")
    result = read(out / f"last-{prepared.name}" / "scores_val.json")
    assert result["config"]["out_dir"] == str(out)
    assert result["step"] == 8 and result["code"] == code_version()
    # So have those on other data, whose captions may have words that the model cannot say.
    other = tmp_path / "other"
    shutil.copytree(prepared, other)
    captions = other / "change_captions.json"
    captions.write_text(captions.read_text().replace("cube", "zebra"))
    run("--eval", out / "best.pt", "--data_dir", other, "--device", "cpu")
    assert (out / "best-other" / "scores_test.json").exists()
    # docs/extending.md collects a study from such files.
    page = Path(scores.__file__).with_name("docs") / "extending.md"
    (code,) = re.findall(r"```python\n(import json, statistics.*?)```", page.read_text(), re.S)
    for seed in "12":
        shutil.copytree(out, tmp_path / "study" / seed)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(code, {})
    value, commits = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"w_match 0\.\d: \d+\.\d, range 0\.0, 2 seeds", value)
    assert commits == f"commits: {code_version()}"
