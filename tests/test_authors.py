"""tools/authors.py: what it refuses and, given clones of the authors' repositories, `compare`:

AUTHORS=FOLDER python -m pytest tests/test_authors.py    FOLDER has SCORER, DIRL and IDC
"""

import os
import subprocess
from functools import partial
from pathlib import Path

import authors
import pytest
import released
import torch

from common import END, NULL, START, UNK, InputError


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_a_folder_must_be_a_clone_of_the_right_commit(tmp_path):
    with pytest.raises(InputError, match="git clone https://github.com/yaolinli/IDC"):
        authors.method_of(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "DIRL.py").touch()
    with pytest.raises(InputError, match="tuyunbin/DIRL .* checkout c2955e6"):
        authors.method_of(tmp_path)  # not even a repository
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "another")
    with pytest.raises(InputError, match="checkout c2955e6"):
        authors.method_of(tmp_path)


def test_numbers_are_replaced_as_whole_words(tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text("size = (14, 512)\nother = 145.14e3\nname = 'x14'\n")
    module = authors.load_file(file, {"14": 8, "512": 32})
    assert module.size == (8, 32)
    assert module.name == "x14"
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.py"]


def test_a_text_ends_at_end_or_padding():
    ids = torch.tensor([[START, 7, END, 9], [START, 7, NULL, 9], [START, 7, 8, 9]])
    expected = [[START, 7, NULL, NULL], [START, 7, NULL, NULL], [START, 7, 8, 9]]
    assert authors.cut(ids).tolist() == expected


def test_deviations():
    theirs = torch.tensor([3.0, 4.0])
    assert authors.deviation(torch.tensor([3.0, 9.0]), theirs) == 1.0
    assert authors.deviation(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert authors.deviation(torch.tensor(1e-9), torch.tensor(0.0), least=1.0) < 1e-8
    nan = torch.tensor([3.0, float("nan")])
    assert authors.deviation(nan, theirs) == authors.deviation(theirs, nan) == float("inf")


def test_captions_of_random_inputs():
    torch.manual_seed(0)
    x = authors.random_inputs(9, (2, 3, 3), 8)
    for caption in [*x["caption"], *x["rewritten"].flatten(0, 1)]:
        words = caption[1 : caption.tolist().index(END)]
        assert caption[0] == START
        assert words[1] == UNK and (words[2:] > END).all()
        assert not caption[len(words) + 2 :].any()


def test_idc_has_the_numbers_of_all_words():
    ids = authors.TheirIDC.their_ids
    assert sorted(ids.tolist()) == list(range(78))
    assert (ids[START], ids[76]) == (1, 5)  # BOS and MASK of clver/modules_finetune.py


@pytest.fixture
def clones(monkeypatch) -> Path:
    """The folder with clones, whose code stays on the CPU."""
    folder = os.environ.get("AUTHORS")
    if not folder:
        pytest.skip("AUTHORS names no folder with clones of the authors' repositories")
    monkeypatch.setattr(torch.Tensor, "cuda", None)  # restored afterwards
    monkeypatch.setattr(torch.nn.Module, "cuda", None)
    authors.stay_on_cpu()
    torch.manual_seed(1)
    yield Path(folder)
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def in_float64(monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)  # `clones` restores it


@pytest.mark.parametrize("method", authors.REPOSITORIES)
def test_theirs_and_ours_compute_the_same(method, clones, in_float64):
    clone = clones / method
    assert authors.method_of(clone) == method
    for _, theirs in authors.cases(method, clone):
        for what, value in authors.compare(theirs):
            assert value < authors.ROUNDING, what


@pytest.mark.parametrize("method", authors.REPOSITORIES)
def test_recorded_values_can_be_made_anew(method, clones, tmp_path, monkeypatch):
    recorded = released.RECORDED.read_text(encoding="utf-8")
    monkeypatch.setattr(released, "RECORDED", tmp_path / "released.json")
    released.RECORDED.write_text(recorded, encoding="utf-8")
    authors.record(method, clones / method)
    assert released.RECORDED.read_text(encoding="utf-8") == recorded


# Case, name in our module -> a wrong form of it
FAULTS = {
    ("SCORER", "mini", "match_loss"): lambda original, *matches: -original(*matches),
    ("SCORER", "mini", "cbr_loss"): lambda original, scores: -original(scores),
    ("SCORER", "mini", "compute_losses"): lambda original, model, batches, cfg: original(
        model, batches[:1], cfg
    ),
    ("SCORER", "mini", "learning_rate"): lambda original, cfg, step: original(cfg, step + 1),
    ("SCORER", "mini", "decode"): lambda original, next_word, *sizes: original(
        lambda ids: next_word(ids).index_fill(1, torch.tensor(END), -1e9), *sizes
    ),
    ("DIRL", "mini", "dirl_loss"): lambda original, *inputs: -original(*inputs),
    ("DIRL", "mini", "released_ccr"): lambda original, *inputs: -original(*inputs),
    ("IDC", "pretrain", "align_loss"): lambda original, *inputs: -original(*inputs),
    ("IDC", "finetune", "judge_loss"): lambda original, *inputs: -original(*inputs),
}


@pytest.mark.parametrize("method, title, name", FAULTS)
def test_faults_of_ours_are_found(method, title, name, clones, in_float64, monkeypatch):
    theirs = dict(authors.cases(method, clones / method))[title]
    fault = partial(FAULTS[method, title, name], getattr(theirs.module, name))
    monkeypatch.setattr(theirs.module, name, fault)
    assert any(value > 1e-3 for _, value in authors.compare(theirs))
