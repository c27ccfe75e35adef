"""Words and phrases of captions: tokenizers, the vocabulary, segments, subjects. Licence: MIT."""

import functools
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable

from torch import Tensor

from common import END, NULL, START, UNK, InputError
from support.files import file_errors, progress

# ---- vocabulary ----------------------------------------------------------------------------------

SPECIAL = ["<NULL>", "<UNK>", "<START>", "<END>"]


def tokenize(caption: str) -> list[str]:
    """The rule behind most published vocabularies: a space before ';' and ',', no '?' and '.', the
    case is kept. Double, leading or trailing spaces give empty words, which papers count."""
    caption = caption.replace(";", " ;").replace(",", " ,").replace("?", "").replace(".", "")
    return caption.split(" ")


def tokenize_lower(caption: str) -> list[str]:
    """Image Editing Request's rule: lower-case words, runs of dots, other marks on their own."""
    return re.findall(r"\w+|\.+|[^\w\s]", caption.lower())


# Invisible characters are removed: soft hyphens, byte order marks, word joiners, direction marks.
# Khmer's zero-width space becomes a space, and typed variants of ' and - become these.
DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
TYPED = str.maketrans(dict.fromkeys(f"\u00ad\ufeff\u2060{DIRECTIONS}"))
TYPED |= str.maketrans("\u200b\u2018\u2019\u00b4\u2010\u2011", " '''--")


def normalised(text: str) -> str:
    """A text that spells each character in one way (see TYPED; NFC joins letters and accents)."""
    return unicodedata.normalize("NFC", text.translate(TYPED))


# Chinese and Japanese characters and punctuation, between which no spaces are written.
NO_SPACES = "[\u3001-\u30ff\u3400-\u9fff\uff01-\uffef]"


def tokenize_pairs(caption: str) -> list[str]:
    """The rule for your own pairs: lower-case words, split at whitespace. Spellings with the same
    capitals are one ("straße": "strasse"). Marks and symbols at either end of a word become words;
    those inside stay: "isn't", "3.5". In Chinese and Japanese, each character is a word."""
    caption = normalised(caption.lower().upper().lower()).replace("i\u0307", "i")
    words = []
    for text in re.sub(f"({NO_SPACES})", r" \1 ", caption).split():
        # The Unicode categories of punctuation begin with P, and those of symbols with S.
        marks = [character for character in text if unicodedata.category(character)[0] in "PS"]
        word = text.strip("".join(marks))
        start = text.index(word)
        words += [*text[:start], word, *text[start + len(word) :]]
    return [word for word in words if word]


def frequent_words(
    captions: Iterable[str], tokenizer: Callable = tokenize, min_count: int = 1
) -> list[str]:
    """The special words, then those that occur at least `min_count` times, in codepoint order."""
    counts = Counter()
    for caption in captions:
        counts.update(tokenizer(caption))
    words = {word for word, count in counts.items() if count >= min_count}
    return SPECIAL + sorted(words - set(SPECIAL))


class Vocab:
    """Words <-> ids, which are places in the list `words`, as made by frequent_words. A special
    word inside a caption, such as a release's own "<UNK>", is an unknown word."""

    def __init__(
        self, words: list[str], tokenizer: Callable = tokenize, max_words: int | None = None
    ):
        self.words = words
        self.index = {word: i for i, word in enumerate(words) if word not in SPECIAL}
        self.tokenizer = tokenizer
        self.max_words = max_words

    def __len__(self) -> int:
        return len(self.words)

    def split(self, caption: str) -> list[str]:
        """A caption's words, up to the first `max_words`."""
        return self.tokenizer(caption)[: self.max_words]

    def encode(self, caption: str, length: int) -> list[int]:
        """START, words or UNK, END, then NULL up to `length`. Longer captions are cut."""
        words = [self.index.get(word, UNK) for word in self.split(caption)]
        ids = [START, *words[: length - 2], END]
        return ids + [NULL] * (length - len(ids))

    def decode(self, ids: Tensor) -> list[str]:
        """(B, L) ids that begin with START -> B captions, each up to its first NULL or END."""
        captions = []
        for row in ids[:, 1:].tolist():
            words = itertools.takewhile(lambda i: i not in (NULL, END), row)
            captions.append(" ".join(self.words[i] for i in words))
        return captions

    @staticmethod
    def sentence(words: str) -> str:
        """A caption of `decode` as people write it: "it is gone ." -> "it is gone."."""
        text = re.sub(f"(?<={NO_SPACES}) (?={NO_SPACES})", "", words)
        text = re.sub("(?<=[-<=>]) (?=[-<=>])", "", text)  # an arrow's marks
        text = re.sub(r" +(?=[.,:;!?%)\]}\u2026\u060c\u061b\u061f\u0964])", "", text)
        return re.sub(r"(?<=[(\[{\u00a1\u00bf]) +", "", text)


# ---- phrases of captions -------------------------------------------------------------------------

# spaCy's model often misreads the templates of mini, CLEVR-Change and CLEVR-DC, so rules read their
# captions: a pattern of an object, and patterns of two kinds of sentences without an object.
OBJECT = re.compile(
    r"\b(?:(?:small|tiny|large|big"
    r"|gray|red|blue|green|brown|purple|cyan|yellow"
    r"|rubber|matte|metal|metallic|shiny) )*"
    r"(?:sphere|ball|cube|block|cylinder|thing|object)\b"
)
# "there is no change", "no change was made", "nothing has changed"
NOTHING_CHANGED = re.compile(r"(there (?:is|are))? ?\b(no (?!longer)\w+|nothing)\b ?(.*)")
# "the scene is the same as before", "the two pictures show the same scene", "everything is ..."
ALL_SAME = re.compile(
    r"(?:the |all )*((?:two )?(?:scenes?|pictures?|images?|objects)|everything)\W+"
    r"(.*?)(?: as before)?"
)
# A phrase that begins or ends with one of these names no entity.
NO_ENTITY_ENDS = {
    *"scene scenes image images picture pictures pic pics photo photos".split(),
    *"change changes difference differences".split(),
}
NO_ENTITY_STARTS = {"no", "none", "nothing", "everything"}
# A clause with one of these relations is part of its governing clause, or coordinated with it.
INNER_CLAUSES = {*"conj aux auxpass nsubj nsubjpass csubj csubjpass ccomp xcomp".split()}
QUANTITIES = {"NUM", "ADJ", "DET", "PRON"}  # "one of the cars", "most of the cars", "some of ..."

# Patterns of verb segments for spaCy's Matcher, which RDD's paper does not give. THERE_VERB: "there
# is", "is not walking anymore". VERB_TO_VERB: "seem to have been built". VERB_ADJECTIVE: "changed
# to gray", "is now large". VERB_SAME_NOUN: "is in the same place".
AUXILIARIES = {"POS": {"IN": ["AUX", "ADV", "PART"]}, "TAG": {"NOT_IN": ["TO"]}, "OP": "*"}
ADVERBS = {"TAG": {"IN": ["RB", "RBR", "RP"]}, "OP": "*"}
VERB = [AUXILIARIES, {"POS": {"IN": ["VERB", "AUX"]}}, ADVERBS]
THERE_VERB = [{"TAG": "EX", "OP": "?"}, *VERB]
VERB_TO_VERB = [*THERE_VERB, {"TAG": "TO"}, *VERB]
VERB_ADJECTIVE = [*THERE_VERB, {"POS": {"IN": ["ADP", "DET"]}, "OP": "?"}, {"POS": "ADJ"}]
VERB_SAME_NOUN = [
    *THERE_VERB,
    {"POS": {"IN": ["ADP", "DET"]}, "OP": "*"},
    {"LOWER": {"IN": ["same", "different"]}},
    {"POS": "NOUN"},
]


def analysed(captions: list[str], templates: bool) -> Iterable:
    """Each caption as spaCy analyses it (a Doc) or, if they are made from templates, which rules
    read, as it is. InputError if spaCy or its English model is missing or broken."""
    if templates:
        return captions
    install = "pip install -U spacy && python -m spacy download en_core_web_sm"
    with file_errors("spaCy's English model, which these captions need,", f"run: {install}"):
        import spacy

        nlp = spacy.load("en_core_web_sm", exclude=["ner", "lemmatizer"])
    print(f"captions are analysed by {nlp.meta['lang']}_{nlp.meta['name']} {nlp.meta['version']}")
    return nlp.pipe(captions, batch_size=1000)


def template_segments(caption: str) -> tuple[list[str], list[str]]:
    """Noun segments and verb segments of a template caption, in lower case: its objects, and the
    text after the last object, or before the first one if nothing follows."""
    text = " ".join(caption.lower().split()).rstrip(" .")
    no_change = NOTHING_CHANGED.fullmatch(text)
    all_same = ALL_SAME.fullmatch(text)
    objects = list(OBJECT.finditer(text))
    if no_change:
        opening, noun, action = no_change.groups()
        nouns = [noun]
        action = opening or action
    elif all_same:
        noun, action = all_same.groups()
        nouns = [noun, *re.findall(r"same (?!as\b)\w+", action)]
    elif objects:
        nouns = [match[0] for match in objects]
        action = text[objects[-1].end() :].strip(" ,")
        action = re.sub(r"^in the (?:before|after) image ", "", action)  # in CLEVR-DC
        if not action:  # "someone added a red cube", "there is a new red cube"
            action = text[: objects[0].start()].removeprefix("someone ")
            action = re.sub(r"(?:\b(?:a|an|the|new|other) )*$", "", action).strip()
    else:
        remedy = "correct the caption, or add its words to OBJECT in support/text.py"
        raise InputError(f"{caption!r} names neither an object nor that nothing changed; {remedy}")
    verbs = [action] if action else []
    return nouns, verbs


def noun_phrase(chunk) -> str:
    """A noun chunk of spaCy in lower case, without leading articles and pronouns."""
    while chunk and chunk[0].pos_ in ("DET", "PRON") and chunk[0].lower_ not in NO_ENTITY_STARTS:
        chunk = chunk[1:]
    return " ".join(chunk.text.lower().split())


@functools.cache
def verb_matcher(vocab):
    """Make spaCy's Matcher of verb segments for the vocabulary of a pipeline."""
    from spacy.matcher import Matcher

    matcher = Matcher(vocab)
    matcher.add("verb", [THERE_VERB, VERB_TO_VERB, VERB_ADJECTIVE])
    matcher.add("verb and noun", [VERB_SAME_NOUN])
    return matcher


def segments(doc) -> tuple[list[str], list[str]]:
    """A caption's (see `analysed`) noun segments and verb segments, in reading order and lower
    case. Nouns lose their articles but keep "no" ("no change"). A copula without a complement
    ("is") counts only if the caption has no other verb segment."""
    if isinstance(doc, str):  # a caption from a template, which needs no spaCy
        return template_segments(doc)
    from spacy.util import filter_spans

    chunks = list(doc.noun_chunks)
    nouns = [noun_phrase(chunk) for chunk in chunks]
    in_chunks = set()  # places of words
    for chunk in chunks:
        in_chunks.update(token.i for token in chunk)
    matches = []
    for match in verb_matcher(doc.vocab)(doc, as_spans=True):
        overlaps = any(token.i in in_chunks for token in match)
        if match.label_ == "verb and noun" or not overlaps:
            matches.append(match)
    verbs = filter_spans(matches)  # the longest of those that overlap
    fuller = []
    for verb in verbs:
        if any(token.pos_ != "AUX" for token in verb):
            fuller.append(verb)
    verbs = [verb.text.lower() for verb in fuller or verbs]
    return [noun for noun in nouns if noun], verbs


def subjects(doc) -> list[str]:
    """What has changed according to a caption (see `analysed`), in lower case, without articles or
    a leading "new". For a template caption, this is its first object. For others, these are the
    subjects of the main clause and of clauses coordinated with it or, if there are none ("there is
    a car", "remove the car"), their objects. "No change" or words for pictures do not count."""
    if isinstance(doc, str):  # a template's caption
        nouns, _ = template_segments(doc)
        return [noun for noun in nouns if OBJECT.fullmatch(noun)][:1]
    subject_phrases = []
    object_phrases = []
    for chunk in doc.noun_chunks:
        phrase = noun_phrase(chunk).removeprefix("new ")
        if not phrase or phrase.split()[-1] in NO_ENTITY_ENDS:
            continue
        noun = chunk.root
        while noun.dep_ == "conj":  # in "the car and the van", the van has the role of the car
            noun = noun.head
        if noun.dep_ == "pobj" and noun.head.lower_ == "of" and noun.head.head.pos_ in QUANTITIES:
            noun = noun.head.head
        clause = noun if noun.dep_ == "ROOT" else noun.head
        while clause.dep_ in INNER_CLAUSES:
            clause = clause.head
        if clause.dep_ != "ROOT":
            continue
        if noun.dep_ in ("nsubj", "nsubjpass"):
            subject_phrases.append(phrase)
        elif noun.dep_ in ("attr", "dobj", "ROOT"):
            object_phrases.append(phrase)
    phrases = dict.fromkeys(subject_phrases or object_phrases)
    return [phrase for phrase in phrases if phrase.split()[0] not in NO_ENTITY_STARTS]


def read_captions(read: Callable, captions: list[str], templates: bool) -> dict[str, list]:
    """Each caption -> what `read` makes of it: `segments` (for RDD) or `subjects` (for CHEERS)."""
    docs = analysed(captions, templates)
    bar = progress(docs, desc=read.__name__, total=len(captions), unit="caption")
    return {caption: read(doc) for caption, doc in zip(captions, bar, strict=True)}
