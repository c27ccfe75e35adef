"""tools/authors.py: what it refuses and, given clones of the authors' repositories, `compare`:

AUTHORS=FOLDER python -m pytest tests/test_authors.py    FOLDER has SCORER, DIRL and IDC
"""

import os
import subprocess
from pathlib import Path

import authors
import pytest
import released
import torch

import scorer_cbr
from common import END, NULL, START, InputError


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
        assert (words > END).all()
        assert not caption[len(words) + 2 :].any()


def test_idc_has_the_numbers_of_all_words():
    numbers = authors.TheirIDC.numbers
    assert sorted(numbers.tolist()) == list(range(78))
    assert (numbers[START], numbers[76]) == (1, 5)  # BOS and MASK of clver/modules_finetune.py


@pytest.fixture
def clones(monkeypatch) -> Path:
    """The folder with clones. Tensors are float64, and what `compare` changes is restored."""
    folder = os.environ.get("AUTHORS")
    if not folder:
        pytest.skip("AUTHORS names no folder with clones of the authors' repositories")
    monkeypatch.setattr(torch.Tensor, "cuda", None)
    monkeypatch.setattr(torch.nn.Module, "cuda", None)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield Path(folder)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("method", authors.REPOSITORIES)
def test_theirs_and_ours_compute_the_same(method, clones):
    clone = clones / method
    assert authors.method_of(clone) == method
    for cases in (authors.released_cases, authors.mini_cases):
        for _, theirs in cases(method, clone):
            for what, value in authors.compare(theirs):
                assert value < authors.ROUNDING, what
    torch.set_default_dtype(torch.float32)
    recorded = released.RECORDED.read_text(encoding="utf-8")
    authors.record(method, clone)
    assert released.RECORDED.read_text(encoding="utf-8") == recorded


def flipped(*matches):
    return -SCORER_MATCH_LOSS(*matches)


def of_changed_pairs(model, batches, cfg):
    return SCORER_LOSSES(model, batches[:1], cfg)


SCORER_MATCH_LOSS = scorer_cbr.match_loss
SCORER_LOSSES = scorer_cbr.compute_losses
FAULTS = {
    "match_loss": flipped,
    "compute_losses": of_changed_pairs,
    "learning_rate": lambda cfg, step: 2 * cfg.lr,
    "decode": lambda next_word, count, max_len, device: torch.ones(count, max_len).long(),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_ours_are_found(name, clones, monkeypatch):
    monkeypatch.setattr(scorer_cbr, name, FAULTS[name])
    for _, theirs in authors.mini_cases("SCORER", clones / "SCORER"):
        deviations = [value for _, value in authors.compare(theirs)]
        assert max(deviations) > 1e-3
