"""Text parts: noun and verb segments of captions, CLIP with learned prompts, the embedded data set's own small CLIP."""

import warnings

import numpy as np
import pytest
import torch

import data

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    open_clip = pytest.importorskip("open_clip")
    spacy = pytest.importorskip("spacy")
VOCAB = spacy.blank("en").vocab

# ---- segments ----

# Sentences in the manner of Spot-the-Diff, LEVIR-CC and Image Editing Request, parts of speech as en_core_web_sm has
# them.
TAGGED = {
    "a/DET person/NOUN in/ADP a/DET red/ADJ coat/NOUN is/AUX now/ADV near/ADP the/DET two/NUM parked/VERB cars/NOUN":
        (["person", "red coat", "two parked cars"], ["is now"]),
    "the/DET van/NOUN that/PRON was/AUX there/ADV before/ADV is/AUX gone/VERB":
        (["van"], ["was there before", "is gone"]),
    "The/DET man/NOUN who/PRON is/AUX behind/ADP the/DET bus/NOUN has/AUX moved/VERB slightly/ADV ./PUNCT":
        (["man", "bus"], ["has moved slightly"]),
    "the/DET man/NOUN is/AUX not/PART walking/VERB anymore/ADV": (["man"], ["is not walking anymore"]),
    "there/PRON is/AUX now/ADV a/DET very/ADV large/ADJ umbrella/NOUN": (["very large umbrella"], ["there is now"]),
    "there/PRON are/AUX now/ADV white/ADJ cars/NOUN": (["white cars"], ["there are now"]),
    "there/PRON are/AUX no/ADV longer/ADV any/DET people/NOUN walking/VERB":
        (["people"], ["there are no longer", "walking"]),
    "people/NOUN are/AUX in/ADP slightly/ADV different/ADJ positions/NOUN":
        (["people", "slightly different positions"], ["are"]),
    "the/DET lamp/NOUN looks/VERB very/ADV bright/ADJ and/CCONJ its/PRON/PRP$ shade/NOUN is/AUX red/ADJ":
        (["lamp", "shade"], ["looks very bright", "is red"]),
    "a/DET new/ADJ hall/NOUN shows/VERB up/ADP/RP beside/ADP the/DET lane/NOUN": (["new hall", "lane"], ["shows up"]),
    "many/ADJ houses/NOUN seem/VERB to/PART have/AUX been/AUX built/VERB on/ADP bare/ADJ land/NOUN":
        (["many houses", "bare land"], ["seem to have been built"]),
    "Brighten/VERB the/DET whole/ADJ sky/NOUN": (["whole sky"], ["brighten"]),
    "no/DET change/NOUN has/AUX occurred/VERB": (["no change"], ["has occurred"]),
    "nothing/PRON is/AUX different/ADJ": (["nothing"], ["is different"]),
    "both/DET look/VERB the/DET same/ADJ": ([], ["look the same"]),
    "less/ADJ street/NOUN traffic/NOUN": (["less street traffic"], []),
    "it/PRON has/AUX disappeared/VERB": ([], ["has disappeared"]),
}  # fmt: skip


def tagged(text, **parse):
    words, pos, tags = zip(*((*item.split("/"), "")[:3] for item in text.split()), strict=True)
    return spacy.tokens.Doc(VOCAB, words=list(words), pos=list(pos), tags=list(tags), **parse)


@pytest.mark.parametrize("text", TAGGED)
def test_segments_of_tagged_sentences(text):
    assert data.segments(tagged(text)) == TAGGED[text]


def test_a_dependency_parse_changes_nothing():
    text = "the/DET red/ADJ car/NOUN has/AUX moved/VERB"
    parse = {"heads": [2, 2, 4, 4, 4], "deps": ["det", "amod", "nsubj", "aux", "ROOT"]}
    assert data.segments(tagged(text, **parse)) == data.segments(tagged(text)) == (["red car"], ["has moved"])
    assert data.segments(spacy.tokens.Doc(VOCAB, words=[" "])) == ([], [])


# Sentences as en_core_web_sm parses them: word/part of speech/head (counted from 1, 0: the root)/relation -> entities.
PARSED = {
    "the/DET/3/det small/ADJ/3/amod ball/NOUN/6/nsubjpass has/AUX/6/aux been/AUX/6/auxpass moved/VERB/0/ROOT "
    "by/ADP/6/agent a/DET/9/det man/NOUN/7/pobj": ["small ball"],
    "there/PRON/2/expl is/VERB/0/ROOT a/DET/6/det new/ADJ/6/amod red/ADJ/6/amod car/NOUN/2/attr near/ADP/6/prep "
    "the/DET/9/det gate/NOUN/7/pobj": ["red car"],
    "the/DET/3/det tall/ADJ/3/amod man/NOUN/7/nsubj and/CCONJ/3/cc the/DET/6/det dog/NOUN/3/conj left/VERB/0/ROOT":
        ["tall man", "dog"],
    "two/NUM/2/nummod vans/NOUN/6/nsubj that/PRON/4/nsubj moved/VERB/2/relcl are/AUX/6/aux gone/VERB/0/ROOT":
        ["two vans"],
    "someone/PRON/2/nsubj added/VERB/0/ROOT a/DET/5/det dark/ADJ/5/amod bench/NOUN/2/dobj and/CCONJ/5/cc "
    "trees/NOUN/5/conj":
        ["dark bench", "trees"],
    "both/CCONJ/3/preconj parked/VERB/3/amod cars/NOUN/7/nsubj and/CCONJ/3/cc its/PRON/6/poss lamp/NOUN/3/conj "
    "vanished/VERB/0/ROOT": ["parked cars", "lamp"],
    "the/DET/2/det lamp/NOUN/4/nsubj is/AUX/4/aux on/ADJ/0/ROOT and/CCONJ/4/cc there/PRON/7/expl is/VERB/4/conj "
    "a/DET/9/det chair/NOUN/7/attr": ["lamp", "chair"],
    "the/DET/2/det man/NOUN/3/nsubj took/VERB/0/ROOT off/ADP/3/prt and/CCONJ/3/cc left/VERB/3/conj "
    "a/DET/8/det bag/NOUN/6/dobj": ["man"],
    "there/PRON/2/expl seem/VERB/0/ROOT to/PART/4/aux be/AUX/2/xcomp more/ADJ/6/amod people/NOUN/4/attr":
        ["more people"],
    "there/PRON/2/expl is/VERB/0/ROOT no/DET/4/det difference/NOUN/2/attr or/CCONJ/4/cc change/NOUN/4/conj": [],
    "no/DET/2/det change/NOUN/4/nsubj has/AUX/4/aux occurred/VERB/0/ROOT": [],
    "nothing/PRON/3/nsubj has/AUX/3/aux left/VERB/0/ROOT the/DET/5/det scene/NOUN/3/dobj": [],
    "it/PRON/3/nsubj has/AUX/3/aux disappeared/VERB/0/ROOT": [],
    "Brighten/VERB/0/ROOT the/DET/4/det whole/ADJ/4/amod Sky/NOUN/1/dobj": ["whole sky"],
    "less/ADJ/3/amod street/NOUN/3/compound traffic/NOUN/0/ROOT and/CCONJ/3/cc a/DET/6/det dog/NOUN/3/conj":
        ["less street traffic", "dog"],
    "walking/VERB/0/ROOT away/ADV/1/advmod": [],
}  # fmt: skip


@pytest.mark.parametrize("text", PARSED)
def test_subjects_of_parsed_sentences(text):
    words, pos, heads, deps = zip(*(item.split("/") for item in text.split()), strict=True)
    heads = [int(head) - 1 if head != "0" else n for n, head in enumerate(heads)]
    doc = spacy.tokens.Doc(VOCAB, words=list(words), pos=list(pos), heads=heads, deps=list(deps))
    assert data.subjects(doc) == PARSED[text]


def test_subjects_by_rule():
    nlp = data.language("clevr_change")
    subjects = {
        "the tiny metallic block behind the big ball is no longer there": ["tiny metallic block"],
        "someone added a small red cube that is left of the ball": ["small red cube"],
        "there is a new cyan metal sphere": ["cyan metal sphere"], "the other cube turned purple": ["other cube"],
        "there is no change": [], "nothing was modified": [], "everything is in the same place": [],
        "the two scenes seem identical": [], "the scene is the same as before": [], "all objects are the same": [],
        "the two pictures show the same scene": [], "there is no difference in the color of the cube": [],
        "someone changed the location of the small red cube": ["small red cube"],
        "The position of the big ball has changed": ["big ball"],
    }  # fmt: skip
    assert {text: data.subjects(nlp(text)) for text in subjects} == subjects
    for text in (t.format("small red cube", "gray") for templates in data.TEMPLATES.values() for t in templates):
        assert data.subjects(nlp(text)) == ["small red cube"], text
    assert not any(data.subjects(nlp(text)) for text in data.NO_CHANGE)


# The verb segment that each of mini's sentences has; {} is the new value.
VERBS = {
    "the {} changed to {}": "changed to {}", "the {} became {}": "became {}", "the {} is now {}": "is now {}",
    "a {} has been added": "has been added", "someone added a {}": "added", "there is a new {}": "there is",
    "the {} is missing": "is missing", "the {} has been removed": "has been removed", "the {} is gone": "is gone",
    "the {} has been moved": "has been moved", "the {} changed its location": "changed",
    "someone moved the {}": "moved",
}  # fmt: skip
NO_CHANGE = {
    "there is no change": (["no change"], ["there is"]),
    "no difference can be seen": (["no difference"], ["can be seen"]),
    "nothing has been moved": (["nothing"], ["has been moved"]),
    "the scene is the same as before": (["scene"], ["is the same"]),
    "the two pictures show the same scene": (["two pictures", "same scene"], ["show the same scene"]),
    "everything is in the same place": (["everything", "same place"], ["is in the same place"]),
}
# CLEVR-Change's words in sentences of its kind.
CLEVR_CHANGE = {
    "the tiny metallic block behind the big ball is no longer there": (["tiny metallic block", "big ball"],
                                                                     ["is no longer there"]),
    "The cyan thing on the left side of the matte sphere has been newly placed.": (["cyan thing", "matte sphere"],
                                                                                  ["has been newly placed"]),
    "the other cube that is the same size as the shiny object turned purple": (["other cube", "shiny object"],
                                                                               ["turned purple"]),
    "the rubber cylinder in front of the block is in a different location": (
        ["rubber cylinder", "block", "different location"], ["is in a different location"]),
    "the two scenes seem identical": (["two scenes"], ["seem identical"]),
    "nothing was modified": (["nothing"], ["was modified"]),
}  # fmt: skip


def test_every_sentence_of_mini_has_its_segments():
    assert set(VERBS) == {template for templates in data.TEMPLATES.values() for template in templates}
    nlp, rng, made = data.language("mini"), np.random.default_rng(5), 0
    while made < 40:
        kind = data.KINDS[made % 5]
        before, after, changed = data._sample_scene(rng, kind, (2, 4))
        scene, made = after if kind == "add" else before, made + 1
        value = after[changed][kind] if kind in data.ATTRIBUTES else ""
        names = {data._phrase(scene[changed]), data._short_phrase(scene[changed], scene)}
        texts = data._captions(kind, before, after, changed, data._sample_cameras(rng, 1, 1)[0]["right"])
        for n, doc in enumerate(nlp.pipe(texts)):
            nouns, verbs = data.segments(doc)
            assert nouns[0].removeprefix("new ") in names, doc.text
            assert verbs == [VERBS[data.TEMPLATES[kind][n // 2]].format(value)], doc.text
    assert {text: data.segments(nlp(text)) for text in NO_CHANGE} == NO_CHANGE
    assert all(all(data.segments(nlp(text))) for text in data.NO_CHANGE)


def test_sentences_of_clevr_change():
    nlp = data.language("clevr_change")
    assert {text: data.segments(nlp(text)) for text in CLEVR_CHANGE} == CLEVR_CHANGE


def test_every_distinct_caption_is_read_once(capsys):
    captions, read = ["the cube is gone", "nothing has changed", "the cube is gone"], []
    found = data.read_captions(data.segments, "mini", captions)
    assert found == {"the cube is gone": (["cube"], ["is gone"]), "nothing has changed": (["nothing"], ["has changed"])}
    assert "segments of 2 captions by en_closed_captions" in capsys.readouterr().out
    data.read_captions(lambda doc: read.append(doc.text), "mini", captions)
    assert read == captions[:2]


def test_errors_of_segments(monkeypatch):
    with pytest.raises(ValueError, match="mini: 'sofa' in 'the sofa is gone'.*CLOSED_WORDS"):
        data.read_captions(data.segments, "mini", ["the sofa is gone", "the cube became wombat."])

    def absent(*_, **__):
        raise OSError("no such model")

    monkeypatch.setattr(spacy, "load", absent)
    with pytest.raises(ValueError, match="spot_the_diff.*python -m spacy download en_core_web_sm"):
        data.language("spot_the_diff")


# ---- CLIP ----

CLIP_16 = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 16},
    "text_cfg": {"context_length": 12, "width": 16, "heads": 2, "layers": 2},
}

@pytest.fixture(scope="module")
def clip():
    """open_clip's class with random weights, and ids of texts of 1 to 6 words in a context of 12."""
    torch.manual_seed(0)
    model = open_clip.CLIP(**CLIP_16)
    for name, p in model.named_parameters():
        if "bias" in name or "positional" in name:
            torch.nn.init.normal_(p, std=0.3)
    tokens = open_clip.SimpleTokenizer(context_length=12)(["cube", "small red cube and large ball", "is gone"])
    return model.eval().requires_grad_(False), tokens


def prompt_of(clip, words):
    """Embeddings of words, as a prompt."""
    ids = open_clip.SimpleTokenizer(context_length=77)(words)[0]
    return clip.token_embedding(ids[1 : ids.argmax()])


def test_without_a_prompt_it_is_clips_encoder(clip):
    model, tokens = clip
    expected = model.encode_text(tokens)
    assert expected.shape == (3, 8) and torch.equal(data.encode_prompted(model, tokens), expected)
    torch.testing.assert_close(data.encode_prompted(model, tokens[:, :8]), expected)  # padding changes nothing


def test_a_prompt_of_words_equals_these_words_in_front(clip):
    model, tokens = clip
    tokenizer = open_clip.SimpleTokenizer(context_length=12)
    for words, texts in (("the", ["cube", "red ball"]), ("a picture of", ["cube", "small red cube and ball"])):
        expected = model.encode_text(tokenizer([f"{words} {text}" for text in texts]))
        for length in (12, 7):
            x = tokenizer(texts)[:, :length]
            torch.testing.assert_close(data.encode_prompted(model, x, prompt_of(model, words)), expected)
    assert not torch.allclose(data.encode_prompted(model, tokens, prompt_of(model, "the")), model.encode_text(tokens))


def test_what_does_not_fit_is_cut_as_the_tokenizer_cuts(clip):
    model, _ = clip
    tokenizer = open_clip.SimpleTokenizer(context_length=12)
    long, words = "one two three four five six seven eight nine ten", "a picture of the"
    short = " ".join(long.split()[:6])  # start, 4 of the prompt, 6 words, end
    expected = model.encode_text(tokenizer([f"{words} {long}", f"{words} {short}"]))
    torch.testing.assert_close(expected[0], expected[1])
    prompted = data.encode_prompted(model, tokenizer([long, short]), prompt_of(model, words))
    torch.testing.assert_close(prompted, expected)
    with pytest.raises(ValueError, match="no room"):
        data.encode_prompted(model, tokenizer([long]), torch.zeros(10, 16))


def test_gradients_reach_the_prompt_alone(clip):
    model, tokens = clip
    prompt = torch.zeros(4, 16, requires_grad=True)
    data.encode_prompted(model, tokens, prompt).sum().backward()
    assert prompt.grad.abs().sum(1).all() and all(p.grad is None for p in model.parameters())
    biased = open_clip.CLIP(**CLIP_16 | {"text_cfg": CLIP_16["text_cfg"] | {"proj_bias": True}})
    assert torch.equal(data.encode_prompted(biased, tokens), biased.encode_text(tokens))


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    root = tmp_path_factory.mktemp("mini")
    data.render_mini(root, {"train": 20, "val": 5, "test": 5})
    return root


def test_the_small_clip_is_made_once_and_repeats_itself(mini, capsys):
    first, tokenizer, preprocess = data.load_clip("mini", mini)
    assert (mini / "clip.pt").exists() and "training a small CLIP" in capsys.readouterr().out
    second = data.load_clip("mini", mini)[0]
    assert not capsys.readouterr().out and not first.training
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in first.parameters())
    trained = [data.train_mini_clip(mini, steps=3, seed=seed).state_dict() for seed in (1, 1)]
    assert all(torch.equal(a, trained[1][name]) for name, a in trained[0].items())
    assert not torch.equal(trained[0]["text_projection"], first.text_projection)
    x = torch.stack([preprocess(data.read_image(data._picture(mini, "default", i))) for i in range(2)])
    assert first.encode_image(x).shape == (2, 128) and torch.equal(first.encode_image(x), second.encode_image(x))
    tokens = tokenizer(["small red metal cube and large yellow rubber cylinder", "has been removed"])
    assert tokens.shape == (2, 48) and torch.equal(first.encode_text(tokens), data.encode_prompted(second, tokens))


def test_weights_in_a_file_tell_clips_apart(tmp_path):
    assert data.clip_id("ViT-L-14:openai", tmp_path) == "ViT-L-14:openai"
    (tmp_path / "clip.pt").write_bytes(b"a")
    names = {data.clip_id("mini", tmp_path), data.clip_id(f"ViT-L-14:{tmp_path / 'clip.pt'}", tmp_path)}
    (tmp_path / "clip.pt").write_bytes(b"b")
    assert data.clip_id("mini", tmp_path) not in names and len(names) == 2


def test_errors_of_clip(tmp_path, monkeypatch):
    for name in ("ViT-L-14", "ViT-L-14:nonsense", "NoSuch:openai", f"ViT-B-32:{tmp_path / 'absent.pt'}"):
        message = "MODEL:PRETRAINED .known of (ViT-L-14|ViT-B-32): .*openai|known of NoSuch: none"
        with pytest.raises(ValueError, match=message):
            data.load_clip(name, tmp_path)

    def offline(model, weights, force_quick_gelu):
        assert force_quick_gelu == (weights == "openai")
        raise RuntimeError("Failed to download\nweights")

    monkeypatch.setattr(open_clip, "create_model_and_transforms", offline)
    with pytest.raises(ValueError, match=r"Failed to download weights.*--clip ViT-L-14-quickgelu:/path/to/file"):
        data.load_clip("ViT-L-14:openai", tmp_path)
    with pytest.raises(ValueError, match="--clip ViT-B-32:/path/to/file"):
        data.load_clip("ViT-B-32:laion2b_s34b_b79k", tmp_path)


def test_other_models_are_loaded_frozen(tmp_path, monkeypatch):
    model, other = open_clip.CLIP(**CLIP_16), object()
    monkeypatch.setattr(open_clip, "create_model_and_transforms", lambda *_, **__: (model.train(), other, "preprocess"))
    loaded, tokenizer, preprocess = data.load_clip("ViT-L-14:openai", tmp_path)
    assert loaded is model and not model.training and not any(p.requires_grad for p in model.parameters())
    assert tokenizer(["cube"]).shape == (1, 77) and preprocess == "preprocess"
    monkeypatch.setattr(model, "text_pool_type", "last")
    with pytest.raises(ValueError, match="learned prompts"):
        data.load_clip("ViT-L-14:openai", tmp_path)
