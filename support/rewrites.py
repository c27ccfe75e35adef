"""IDC's rewritten captions (section "FDA" of its paper): sentences that are false of a pair. [ours]
marks what neither the paper nor the released code says. Licence: MIT."""

import hashlib
import json
import math
import re
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from common import InputError
from support.files import progress, write_text
from support.text import analysed, subjects

ANIMAL = re.compile(r"\b(animal ?)([12])\b", re.IGNORECASE)  # Birds-to-Words' names of both images
# [ours] A word of KINDS is replaced only by one of the same kind in another string of synonyms.
KINDS = {
    "size": ["small tiny", "large big"],
    "color": ["gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow"],
    "material": ["rubber matte", "metal metallic shiny"],
    "shape": ["cube block", "sphere ball", "cylinder"],
}
MEANING = {}  # each word of KINDS -> its kind and its synonyms
for _kind, _entries in KINDS.items():
    for _synonyms in _entries:
        MEANING |= dict.fromkeys(_synonyms.split(), (_kind, _synonyms))


class Negatives:
    """Section "FDA": six rewritten captions of every training pair, made by `rewrite` and kept in a
    file. Its name has a hash of all captions, because rewrites that were made from other captions
    could be true of a pair. (We have not seen those that the authors offer on a drive.)"""

    def __init__(self, dataset, count: int):
        made_from = [[p.id, p.id in dataset.unchanged, p.captions] for p in dataset.pairs("train")]
        digest = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
        path = dataset.root / f"negatives-{digest[:12]}.json"
        if not path.exists():
            write_text(path, json.dumps(rewrite(dataset, count)))
        self.texts = json.loads(path.read_text(encoding="utf-8"))  # by pair id
        self.max_len = dataset.max_len  # longer rewrites are cut
        self.vocab = dataset.vocab

    def __call__(self, pair_ids: list[str]) -> Tensor:
        """-> the pairs' rewritten captions (B, 6, L), padded like the data set's captions."""
        ids = []
        for pair_id in pair_ids:
            ids.append([self.vocab.encode(c, self.max_len) for c in self.texts[pair_id]])
        return torch.tensor(ids)


def rewrite(dataset, rewrites: int = 6) -> dict[str, list[str]]:
    """Each training pair's id -> its six negatives, which all of its captions share (as released):
    two each from Retrieve, Replace and Confuse (section "Implementation Details":
    "retrieve:replace:confuse=2:2:2"). Single images (CUB) have none from Confuse (appendix A.3).

    [ours] Theirs are three from Retrieve and three from Replace. If a strategy finds too few, the
    next one fills the gap; after Confuse, Retrieve and then Replace do. On CLEVR-Change and mini, a
    scene's changed pair and its distractor pair share five rewrites of the change: one from
    Retrieve, two from Replace and two from Confuse. The sixth is a caption of the other pair, so
    that the text alone does not reveal to which of the two pairs the six belong."""
    scenes = dataset.scenes["train"]
    captions, changes = different_captions(dataset)
    idf = inverse_frequency(captions)
    tokens, words, subjects = parse(dataset, captions)
    pool = pools([words[c] for c in changes], idf)
    all_subjects = sorted({s for c in changes for s in subjects[c]})
    queries = [" ".join(scene.pairs[0].captions) for scene in scenes]
    nearest = retrieve(queries, changes, idf)

    negatives = {}
    for number, (scene, near) in enumerate(zip(scenes, nearest, strict=True)):
        rng = np.random.default_rng([len(captions), number])
        pair = scene.pairs[0]
        originals = rng.permutation(pair.captions * rewrites).tolist()
        # The strategies are generators, which make a candidate only when it is needed.
        retrieved = (changes[i] for i in near)
        replaced = (
            replace_words(tokens[c], important(words[c], idf), pool, rng) for c in originals
        )
        confused = (confuse(c, subjects[c], all_subjects, rng) for c in originals)
        count = rewrites + 1 - len(scene.pairs)  # 6, or 5 beside a caption of the other pair
        # Each strategy has its turn, until so many are chosen. The last two turns fill gaps.
        if pair.after is None:
            turns = [(retrieved, 3), (replaced, 6)]
        else:
            turns = [(retrieved, count - 4), (replaced, count - 2), (confused, count)]
        turns += [(retrieved, count), (replaced, count)]
        chosen = choose(turns, scene, dataset.settings.templates)
        if len(chosen) < count:
            made = f"only {len(chosen)} of {count} rewritten captions can be made for {pair.id}"
            raise InputError(f"{made}: {dataset.root} has too few captions; set --fda 0")
        if len(scene.pairs) == 1:
            negatives[pair.id] = chosen
        else:
            _, other = scene.pairs
            negatives[pair.id] = [*chosen, str(rng.choice(other.captions))]
            negatives[other.id] = [*chosen, str(rng.choice(pair.captions))]
    return negatives


def different_captions(dataset) -> tuple[list[str], list[str]]:
    """-> the captions of all training pairs, and those of changed pairs, each only once."""
    captions = []
    changes = []
    for scene in dataset.scenes["train"]:
        for pair in scene.pairs:
            captions += pair.captions
            if pair.id not in dataset.unchanged:
                changes += pair.captions
    return list(dict.fromkeys(captions)), list(dict.fromkeys(changes))


def choose(turns: list[tuple], scene, templates: bool) -> list[str]:
    """Different texts that are false of a scene. turns: (candidates, number of texts after them).

    [ours] Any text counts as false that is no caption of the scene. If captions come from templates
    and name an object, it must also say of its first object what no caption of the pair says."""
    pairs = [*scene.pairs, *(scene.swapped or ())]
    true = {c for p in pairs for c in p.captions}
    mentioned = set()
    if templates:
        for c in scene.pairs[0].captions:
            mentioned |= named(c)
    chosen = []
    for candidates, end in turns:
        while len(chosen) < end:
            text = next(candidates, None)
            if text is None:
                break
            is_new = text not in true and text not in chosen
            if is_new and (not mentioned or named(text) - mentioned):
                chosen.append(text)
    return chosen


def named(text: str) -> set[tuple[str, str]]:
    """What a caption says in words of KINDS about the first object that it names (if any)."""
    properties = set()
    for word in re.findall(r"\w+", text.lower()):
        kind = ""
        if word in MEANING:
            properties.add(MEANING[word])
            kind, _ = MEANING[word]
        if kind == "shape" or word in ("thing", "object"):
            return properties
    return set()


def inverse_frequency(texts: list[str]) -> dict[str, float]:
    """[ours] The smoothed idf of every word of n different captions: ln((1 + n) / (1 + df)) + 1."""
    df = Counter()
    for text in texts:
        df.update(set(text.lower().split()))
    return {word: math.log((1 + len(texts)) / (1 + df[word])) + 1 for word in sorted(df)}


def tfidf(texts: list[str], idf: dict[str, float]) -> Tensor:
    """TF-IDF of n texts -> sparse (n, number of words), each row of length 1."""
    column = {word: j for j, word in enumerate(idf)}
    places = []
    values = []
    for i, text in enumerate(texts):
        counts = Counter(text.lower().split())
        weights = {word: n * idf[word] for word, n in counts.items()}
        length = math.hypot(*weights.values())
        for word, weight in weights.items():
            places.append((i, column[word]))
            values.append(weight / length)
    shape = (len(texts), len(idf))
    return torch.sparse_coo_tensor(torch.tensor(places).T, values, shape, check_invariants=True)


def retrieve(queries: list[str], texts: list[str], idf: dict[str, float], count: int = 1000):
    """Section "Retrieve": for each query, yield the indices of the most similar texts in order."""
    corpus = tfidf(texts, idf)
    count = min(count, len(texts))
    for i in progress(range(0, len(queries), 64), desc="rewriting captions"):
        block = tfidf(queries[i : i + 64], idf).to_dense()
        similarity = (corpus @ block.T).T  # (64, texts)
        yield from similarity.topk(count).indices.tolist()


def parse(dataset, texts: list[str]) -> tuple[dict, dict, dict]:
    """-> for each text its tokens, each with the space after it; its words of KINDS, nouns and
    adjectives, each as (index of the token, word, kind or tag); its subjects.
    [ours] spaCy finds nouns and adjectives, where the paper has "Stanford CoreNLP tool" (section
    "Replace"). It does not read template captions, so only their words of KINDS are replaced."""
    tokens = {}
    words = {}
    subjects_of = {}
    docs = analysed(texts, dataset.settings.templates)
    for text, doc in zip(texts, docs, strict=True):
        if isinstance(doc, str):  # from a template
            tagged = [(token, "", "") for token in re.findall(r"\w+\s*|\W\s*", doc)]
        else:
            tagged = [(token.text_with_ws, token.pos_, token.tag_) for token in doc]
        tokens[text] = [token for token, _, _ in tagged]
        subjects_of[text] = subjects(doc)
        words[text] = []
        for i, (token, pos, tag) in enumerate(tagged):
            word = token.strip().lower()
            if word in MEANING:
                kind, _ = MEANING[word]
                words[text].append((i, word, kind))
            elif pos in ("NOUN", "ADJ"):
                words[text].append((i, word, tag))
    return tokens, words, subjects_of


def important(words: list[tuple[int, str, str]], idf: dict[str, float]) -> list[tuple]:
    """The half (rounded up) of a caption's nouns and adjectives that has the highest TF-IDF."""
    count = Counter(word for _, word, _ in words)

    def weight(entry: tuple[int, str, str]) -> float:
        _, word, _ = entry
        return count[word] * idf.get(word, 1.0)

    ranked = sorted(words, key=weight, reverse=True)
    return ranked[: (len(words) + 1) // 2]


def pools(captions: list[list[tuple]], idf: dict[str, float]) -> dict[str, list[str]]:
    """Appendix A.2: for each kind or tag, the words that are important in at least one caption and
    occur in at least ten. [ours] Equal captions count once."""
    occurs = Counter()
    chosen = set()
    for words in captions:
        occurs.update({(kind, word) for _, word, kind in words})
        chosen |= {(kind, word) for _, word, kind in important(words, idf)}
    pool: dict[str, list[str]] = {}
    for kind, word in sorted(chosen):
        if occurs[kind, word] >= 10:
            pool.setdefault(kind, []).append(word)
    return pool


def replace_words(tokens: list[str], words: list, pool: dict[str, list[str]], rng) -> str:
    """Section "Replace": replace important `words` by others of the same tag or kind, if any."""
    tokens = list(tokens)
    for i, word, kind in words:
        meaning = MEANING.get(word, word)
        choice = [other for other in pool.get(kind, ()) if MEANING.get(other, other) != meaning]
        if choice:
            drawn = choice[rng.integers(len(choice))]
            tokens[i] = tokens[i].replace(tokens[i].strip(), drawn)
    return "".join(tokens)


def confuse(text: str, own: list[str], subjects: list[str], rng) -> str:
    """Section "Confuse": swap "animal 1" and "animal 2". In a caption without both, replace the
    subject (the first of `own` in the text) by another one of as many words, if there is one."""
    numbers = {number for _, number in ANIMAL.findall(text)}
    if len(numbers) == 2:
        return ANIMAL.sub(other_animal, text)
    found = [re.search(rf"\b{re.escape(s)}\b", text, re.IGNORECASE) for s in own]
    found = [match for match in found if match]
    if not found:
        return text
    subject = found[0].group().lower()
    start, end = found[0].span()
    spaces = subject.count(" ")
    choice = [s for s in subjects if s != subject and s.count(" ") == spaces]
    if not choice:
        return text
    return text[:start] + choice[rng.integers(len(choice))] + text[end:]


def other_animal(match: re.Match) -> str:
    """A match of "animal 1" -> "animal 2", and the other way round."""
    name, number = match.groups()
    other = "2" if number == "1" else "1"
    return name + other
