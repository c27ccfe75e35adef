"""IDC pre-training and fine-tuning: Image Difference Captioning with Pre-training and Contrastive Learning
(Yao, Wang, Jin, AAAI 2022).

Idea. (1) Two images and a caption are one sequence of tokens for one transformer; before it, an encoder sees each image
alone and another both together, so that it can compare. (2) Three tasks pre-train it on the very pairs it will caption:
guess masked words (MLM), recognise masked image cells among all others (MVCL), tell the caption from six rewritten ones
(FDA). (3) Fine-tuning keeps the first task, with words that see only earlier ones, so that a caption is written word by
word in the place of a [MASK]; where there are distractor pairs it also learns to judge them.

The paper's equations (1)-(9) in our copy are prose, so their numbers stand for:
Eq. 1-3    Embedding           y = Dropout(LN(x + type + position))
Eq. 4      IDC.visual          E_p([E_s(v_1) ; E_s(v_2)]), the image difference encoder
Eq. 5      IDC.cross           cross-modal transformer over [visual ; text]
Eq. 6      word_loss           MLM, of words masked by mask_words
Eq. 7-8    cell_loss           MVCL, of cells masked by mask_cells
Eq. 9      align_loss          FDA, captions rewritten by Negatives: Retrieve, Replace, Confuse
Sec. 2.3   judge_loss          is the pair a distractor?
Sec. 2.4   class_loss, contrast_loss (TransFG's), match_loss: classes and pairs of birds, for the image difference encoder
           losses_of           one task a step in pre-training; then L = L_MLM + w_judge L_judge

Axis letters: B pairs, C channels, H x W grid, N = H*W cells, D width, K heads, V words of a caption (START, words, END,
padding), T text tokens, S = 2 (N + 1) visual tokens: [IMG1] v_1 ... v_N [IMG2] v_1 ... v_N.

Where the paper is silent the released code is followed; where both are, the choice is marked [ours]. What the two do
differently is a config field each, below; --reading released sets them all.
To copy: this file, common.py and data.py (the model takes only the special ids from it).
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:  # read when torch loads: idle threads sleep, after a moment, on a busy laptop
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import data
from common import (
    Attention,
    LossLog,
    Run,
    RunConfig,
    can_compile,
    decode,
    full,
    learning_rate,
    load_checkpoint,
    load_model,
    pair_picture,
    parse_args,
    run_main,
    sample_sheet,
    sinusoid,
    training_batches,
)

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

# ---- config ----------------------------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    """IDC. The fields of a run (data, steps, device) are common.RunConfig's; there steps, lr, warmup, batch_size are
    fine-tuning's."""

    stage: Literal["both", "pretrain", "finetune"] = "both"  # which stages to run; finetune alone starts from --init
    init: str = ""  # checkpoint of another run whose weights to start from, as far as names and shapes agree
    dim: int = 512  # width D
    ffn: int = 2048  # width of the feed-forward layers
    heads: int = 8  # heads of every attention
    layers: int = 3  # layers of the cross-modal transformer
    dropout: float = 0.2  # dropout probability
    difference_encoder: bool = True  # E_s and E_p of Eq. 4; without them images go straight to the cross-modal transformer
    pretrain_steps: int = 250000  # steps of pre-training
    pretrain_batch: int = 100  # scenes a step of pre-training
    pretrain_lr: float = 1e-4  # learning rate of pre-training
    pretrain_warmup: int = 8000  # steps of its linear warm-up
    mlm: int = 8  # share of masked language modelling in the steps of pre-training; 0 leaves it out
    mvcl: int = 1  # share of masked visual contrastive learning
    fda: int = 2  # share of fine-grained difference aligning
    single_images: str = ""  # first pre-train on single images and captions: CUB's folder; mini: pictures and their objects
    nabirds: str = ""  # NABirds' folder: classes and pairs of birds as a fourth task of pre-training
    nabirds_share: int = 3  # its share in the steps
    mask_rate: float = 0.15  # share of words, and of one image's cells, that are masked
    tau: float = 1.0  # temperature of MVCL and FDA
    weight_decay: float = 0.0  # of fine-tuning
    w_judge: float = 1.0  # weight of L_judge, distractor or not, in fine-tuning; 0 leaves it out
    swap: bool = False  # let default and distractor image change places, as other methods do
    patience: int = 0  # validations without a better one that end fine-tuning; 0: never
    # paper | released code
    project: Literal["linear", "sigmoid"] = "linear"  # features -> width D: linear, or a sigmoid after it
    exponent: Literal["standard", "doubled"] = "standard"  # positions; doubled: sines and cosines of unlike, mostly idle rates
    special_tokens: Literal["own", "shared"] = "own"  # [CLS] [IMG1] [IMG2] and three types, or one vector and six types
    mvcl_negatives: Literal["features", "predictions"] = "features"  # unmasked features, or what is predicted there
    see_padding: bool = False  # pre-training attends to padding
    finetune_cls: bool = True  # [CLS] stands before the text in fine-tuning too
    visual_sees_text: bool = False  # in fine-tuning, too; a word then learns from later ones, through the images
    mask_rules: Literal["plain", "released"] = "plain"  # released: END only by [MASK], word 1 if none, random special ids
    pretrain_decay: Literal["none", "inverse_sqrt"] = "none"  # learning rate after the warm-up of pre-training
    finetune_decay: Literal["none", "halves"] = "none"  # halves: x1/2 at step 10,000, x1/4 at 20,000
    reduction: Literal["mean", "sum"] = "mean"  # of fine-tuning's losses, over words and over pairs
    # ours
    finetune_targets: Literal["masked", "every"] = "masked"  # predict masked words, or every word from a [MASK] in its place
    scale_words: bool = True  # words times sqrt(D), as released; it drowns their positions
    pretrain_images: Literal["trained", "frozen"] = "trained"  # E_s, E_p and their embedding in pre-training (mini: frozen)
    near_identity: bool = False  # start E_p as a comparison, text as its reader (mini; not the paper's)
    val_decode: Literal["greedy", "sample"] = "greedy"  # how validation captions, which choose best.pt, are written
    blind: bool = False  # zero the features: what words alone can score


# Table 6 of the paper and section "Implementation Details". A batch there counts pairs, here scenes (CLEVR-Change: two pairs).
PRESETS = {
    "clevr_change": dict(seed=1234, extractor="resnet101-layer4", lr=3e-5, batch_size=100, steps=100000, eval_every=400,
                         patience=50),
    "birds_to_words": dict(seed=1234, layers=2, mlm=9, pretrain_steps=50000, pretrain_warmup=4000, pretrain_batch=200, lr=3e-5,
                           weight_decay=1e-4, batch_size=32, steps=20000, eval_every=85, patience=80, select_by="ROUGE-L"),
    "birds_to_words@released": dict(pretrain_steps=60000, pretrain_batch=150),
    "mini": dict(dim=128, ffn=256, heads=4, layers=2, dropout=0.0, swap=True, near_identity=True, scale_words=False,
                 finetune_targets="every", mvcl=0, mask_rate=0.3, pretrain_images="frozen", pretrain_steps=2000,
                 pretrain_batch=16, pretrain_lr=1e-3, pretrain_warmup=50, batch_size=16, lr=1e-3, schedule="cosine", warmup=50,
                 grad_clip=1.0, steps=1200, eval_every=600, eval_batch=250),
}  # fmt: skip
PRESETS["mini_dc"] = PRESETS["mini"] | dict(batch_size=32, pretrain_batch=32)  # a scene is one pair here, not two

# What --reading released sets. CLEVR-Change's steps and rates agree with the paper.
RELEASED = dict(project="sigmoid", exponent="doubled", special_tokens="shared", mvcl_negatives="predictions", see_padding=True,
                finetune_cls=False, mask_rules="released", pretrain_decay="inverse_sqrt", finetune_decay="halves",
                reduction="sum")  # fmt: skip

# ---- rewritten captions ----------------------------------------------------------------------------------------------

MIN_DOCUMENTS = 10  # words in fewer captions are not put in others' place (appendix A.2)
ANIMAL = re.compile(r"\b(animal ?)([12])\b", re.IGNORECASE)  # Birds-to-Words names its two images so


class Negatives:
    """Section "FDA": six rewritten captions of every pair of a split, two each by Retrieve, Replace, Confuse.

    Made once, a function of the captions alone, kept as the released code wants it: {split}_neg_tfidf6.json beside the
    features, one JSON object a line with img1, img2, sentences, neg_samples; such a file of theirs is read as well.
    [ours] A pair's captions share their six, none of which is among them; a pair without change gets changes of others; where
    a strategy finds too few, Retrieve and then Replace fill up; single images (CUB) have no subjects to confuse.
    Raises ValueError where a file has no entry for a pair, or where there are too few captions to make six."""

    def __init__(self, dataset: data.Dataset, split: str = "train"):
        self.max_len = dataset.max_len
        self.vocab = data.Vocab(dataset.vocab.words, dataset.vocab.tokenizer, self.max_len - 2)  # longer ones are cut
        single = any(p.after is None for p in dataset.pairs(split))
        self.path = dataset.root / f"{'single_' if single and dataset.name != 'cub' else ''}{split}_neg_tfidf6.json"
        pairs = dataset.pairs(split)
        if not self.path.exists():
            images = [{"img1": p.before, "img2": p.after} if p.after else {"img": p.before} for p in pairs]
            rows = [of | {"sentences": p.captions, "neg_samples": texts}
                    for p, of, texts in zip(pairs, images, rewrite(dataset, split, single), strict=True)]  # fmt: skip
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            os.replace(partial, self.path)
        found = {}
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                images = (row["img"],) if "img" in row else (row["img1"], row["img2"])
                found[tuple(_stem(i) for i in images)] = row["neg_samples"]
            except (json.JSONDecodeError, KeyError, TypeError) as e:
                raise ValueError(f"{self.path}, line {number} is not an object with img1, img2 and neg_samples ({e}); remove "
                                 "the file to make it again") from e  # fmt: skip
        self.of = {}
        for p in pairs:
            key = tuple(_stem(i) for i in (p.before, p.after) if i)
            if not found.get(key):
                raise ValueError(f"{self.path} has no neg_samples for {' and '.join(key)}; remove the file to make it again")
            self.of[p.id] = found[key]

    def __call__(self, ids: list[str]) -> Tensor:
        """B pair ids -> their rewritten captions (B, 6, longest caption)."""
        return torch.tensor([[self.vocab.encode(c, self.max_len) for c in self.of[i]] for i in ids])


def _stem(image: str) -> str:
    return image.rsplit("/", 1)[-1].rsplit(".", 1)[0]


def rewrite(dataset: data.Dataset, split: str, single: bool = False, count: int = 6) -> list[list[str]]:
    """Negatives of every pair of a split, in the order of dataset.pairs(split)."""
    pairs, same = dataset.pairs(split), dataset.kinds.get("no change", set())
    swapped = {p.id: p.captions for s in dataset.scenes[split] for p in s.swapped or ()}
    own = [{*p.captions, *swapped.get(p.id, ())} for p in pairs]
    texts = list(dict.fromkeys(c for p in pairs for c in p.captions))
    row = {c: i for i, c in enumerate(texts)}
    told = sorted({row[c] for p in pairs if p.id not in same for c in p.captions})  # of pairs that have something to tell
    vectors, idf = tfidf([t.lower().split() for t in texts])
    queries = [[row[c] for c in p.captions] for p in pairs]
    retrieved = retrieve(vectors, queries, told, max(map(len, own)) + count)
    read = {text: found for text, found in zip(texts, parts(dataset, texts), strict=True)}
    words = pools([read[t].words for t in texts], idf)
    subjects = sorted({s for i in told for s in read[texts[i]].subjects})
    made = []
    for i, (pair, closest) in enumerate(zip(pairs, retrieved, strict=True)):
        rng = np.random.default_rng([len(texts), i])
        found = list(dict.fromkeys(texts[j] for j in closest if texts[j] not in own[i]))
        replaced = (replace_words(read[c], words, idf, rng) for c in pair.captions * count)
        confused = (confuse(read[c], subjects, rng) for c in ([] if single else pair.captions * 2))
        share, chosen = count // 2 if single else count // 3, []
        sources = (found, share), (replaced, 2 * share), (confused, count), (found, count), (replaced, count)
        for candidates, wanted in sources:
            for text in candidates:
                if len(chosen) >= wanted:
                    break
                if text and text not in own[i] and text not in chosen:
                    chosen.append(text)
        if len(chosen) < count:
            raise ValueError(f"only {len(chosen)} rewritten captions can be made for {pair.id}, expected {count}: "
                             f"{dataset.root} has too few different captions; set --fda 0")  # fmt: skip
        made.append(chosen)
    return made


def tfidf(texts: list[list[str]]) -> tuple[Tensor, dict[str, float]]:
    """[ours] Smoothed TF-IDF of word lists: tf * (ln((1 + n) / (1 + df)) + 1), rows of length 1. -> sparse (n, words) and the
    idf of each word."""
    df: dict[str, int] = {}
    for words in texts:
        for word in set(words):
            df[word] = df.get(word, 0) + 1
    idf = {word: math.log((1 + len(texts)) / (1 + n)) + 1 for word, n in df.items()}
    column = {word: j for j, word in enumerate(df)}
    start, columns, values = [0], [], []
    for words in texts:
        weights = {column[w]: words.count(w) * idf[w] for w in sorted(set(words), key=column.get)}
        norm = math.sqrt(sum(v * v for v in weights.values())) or 1.0
        columns += weights
        values += [v / norm for v in weights.values()]
        start.append(len(columns))
    return sparse(start, columns, torch.tensor(values), (len(texts), len(df))), idf


def sparse(start: list[int], columns: list[int], values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Compressed rows; PyTorch warns that its kind of tensor is young."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")
        return torch.sparse_csr_tensor(start, columns, values, shape)


def retrieve(vectors: Tensor, queries: list[list[int]], among: list[int], count: int, block: int = 64) -> list[list[int]]:
    """Section "Retrieve": for each query, the mean of some rows of `vectors`, the rows of `among` that are most like it, best
    first, at most `count`. A sparse product for a block of queries at a time, so that memory stays bounded."""
    start, columns, values = vectors.crow_indices(), vectors.col_indices(), vectors.values()
    keep = torch.cat([torch.arange(start[i], start[i + 1]) for i in among])
    sizes = (start[1:] - start[:-1])[torch.tensor(among)]
    start_of, shape = F.pad(sizes.cumsum(0), (1, 0)), (len(among), vectors.shape[1])
    corpus, corpus_of, found = sparse(start_of, columns[keep], values[keep], shape), torch.tensor(among), []
    for i in tqdm(range(0, len(queries), block), "rewriting captions", disable=None):
        dense = torch.zeros(vectors.shape[1], len(queries[i : i + block]))
        for q, rows in enumerate(queries[i : i + block]):
            for row in rows:
                dense[columns[start[row] : start[row + 1]], q] += values[start[row] : start[row + 1]] / len(rows)
        best = (corpus @ dense).T.topk(min(count, len(among)), dim=1).indices  # (block, count)
        found += corpus_of[best].tolist()
    return found


@dataclass
class Parts:
    """A caption as it can be rewritten."""

    tokens: list[str]  # with the blanks that follow
    words: list[tuple[int, str, str]]  # its nouns and adjectives: place, word, tag (Penn's where the pipeline has it)
    subjects: list[str]


def parts(dataset: data.Dataset, texts: list[str]) -> Iterator[Parts]:
    """What each text consists of: tokens, nouns and adjectives, subjects, in the order of `texts`."""
    nlp = data.language(dataset.name)
    for doc in tqdm(nlp.pipe(texts, batch_size=1000), "parts of speech", len(texts), unit="caption", disable=None):
        words = [(t.i, t.lower_, t.tag_ or t.pos_) for t in doc if t.pos_ in ("NOUN", "ADJ")]
        yield Parts([t.text_with_ws for t in doc], words, data.subjects(doc))


def important(words: list[tuple[int, str, str]], idf: dict[str, float]) -> list[tuple[int, str, str]]:
    """The upper half (rounded up) of a caption's nouns and adjectives by TF-IDF."""
    told = [word for _, word, _ in words]
    return sorted(words, key=lambda w: -told.count(w[1]) * idf.get(w[1], 1.0))[: (len(words) + 1) // 2]


def pools(captions: list[list[tuple[int, str, str]]], idf: dict[str, float]) -> dict[str, list[str]]:
    """Appendix A.2: for each tag the words that are important in some caption and stand in ten captions at least."""
    count: dict[tuple[str, str], int] = {}
    telling = {(tag, word) for words in captions for _, word, tag in important(words, idf)}
    for words in captions:
        for key in {(tag, word) for _, word, tag in words}:
            count[key] = count.get(key, 0) + 1
    found: dict[str, list[str]] = {}
    for tag, word in sorted(key for key in telling if count[key] >= MIN_DOCUMENTS):
        found.setdefault(tag, []).append(word)
    return found


def replace_words(caption: Parts, words: dict[str, list[str]], idf: dict[str, float], rng: np.random.Generator) -> str | None:
    """Section "Replace": the important nouns and adjectives give way to others of the same tag. None where there are none."""
    tokens, changed = list(caption.tokens), False
    for i, word, tag in important(caption.words, idf):
        others = [w for w in words.get(tag, ()) if w != word]
        if others:
            tokens[i] = tokens[i].replace(tokens[i].strip(), others[rng.integers(len(others))])
            changed = True
    return "".join(tokens) if changed else None


def confuse(caption: Parts, subjects: list[str], rng: np.random.Generator) -> str | None:
    """Section "Confuse": "animal 1" and "animal 2" change places; without these, the subject gives way to another caption's.
    None where there is no subject."""
    text = "".join(caption.tokens)
    if len({number for _, number in ANIMAL.findall(text)}) == 2:
        return ANIMAL.sub(lambda m: m[1] + "21"[int(m[2]) - 1], text)
    own = next((s for s in caption.subjects if s in text.lower()), None)
    others = [s for s in subjects if s != own]
    if own is None or not others:
        return None
    at = text.lower().index(own)
    return text[:at] + others[rng.integers(len(others))] + text[at + len(own) :]


BIRDS = 555  # NABirds' classes

# ---- modules ---------------------------------------------------------------------------------------------------------


def doubled_sinusoid(length: int, dim: int) -> Tensor:
    """The released positions: 10000^(2i/D) for channel i, where Vaswani et al. have 10000^(i/D) for an even i, and another
    rate for the cosine beside it. Most channels hardly change over a caption. -> (length, dim)."""
    angle = torch.arange(length)[:, None] / 10000 ** (2 * torch.arange(dim) / dim)
    return torch.where(torch.arange(dim) % 2 == 0, angle.sin(), angle.cos())


class Embedding(nn.Module):
    """Eq. 1-3: y = Dropout(LN(x + type + position)) of words, of cells, and of the special tokens, which have no position.

    One LayerNorm and one table of types serve all. `words` gives START, words, END, padding and [MASK] (id: mask), `cells`
    a projected image behind its [IMG], `cls` the [CLS] before a text."""

    def __init__(self, cfg: Config, vocab_size: int, channels: int, length: int):
        super().__init__()
        own = cfg.special_tokens == "own"
        self.mask, self.special = vocab_size, vocab_size + 1
        self.table = nn.Embedding(vocab_size + (4 if own else 2), cfg.dim)
        self.types = nn.Embedding(3 if own else 6, cfg.dim)  # image 1, image 2, text; six: special tokens apart from the rest
        self.project = nn.Linear(channels, cfg.dim)
        self.norm, self.dropout = nn.LayerNorm(cfg.dim, eps=1e-12), nn.Dropout(cfg.dropout)
        positions = sinusoid if cfg.exponent == "standard" else doubled_sinusoid
        self.register_buffer("position", positions(length, cfg.dim), persistent=False)
        self.own, self.squash, self.scale = own, cfg.project == "sigmoid", cfg.dim**0.5 if cfg.scale_words else 1.0

    def _special(self, kind: int, count: int) -> Tensor:
        """[IMG1], [IMG2] or [CLS] (kind 0, 1, 2) -> (count, 1, D)."""
        row = self.table.weight[self.special + (kind if self.own else 0)] + self.types.weight[kind]
        return self.dropout(self.norm(row)).expand(count, 1, -1)

    def _type(self, kind: int) -> Tensor:
        return self.types.weight[kind if self.own else 3 + kind]

    def cls(self, count: int) -> Tensor:
        """[CLS] for `count` texts -> (count, 1, D)."""
        return self._special(2, count)

    def words(self, ids: Tensor, start: int = 0) -> Tensor:
        """(B, V) ids at positions start, start + 1, ... -> (B, V, D)."""
        position = self.position[start : start + ids.shape[1]]
        return self.dropout(self.norm(self.scale * self.table(ids) + self._type(2) + position))

    def cells(self, features: Tensor, kind: int) -> Tensor:
        """(B, N, C) of the first or second image (kind 0, 1) -> (B, 1 + N, D). Positions restart in each image."""
        x = self.project(features)
        x = x.sigmoid() if self.squash else x
        x = self.dropout(self.norm(x + self._type(kind) + self.position[: x.shape[1]]))
        return torch.cat([self._special(kind, len(x)), x], 1)


class Block(nn.Module):
    """Pre-norm layer: x + MHA(LN x), then x + W2 ReLU(W1 LN x). x (B, T, D) -> the same and its key and value (B, T, D).

    `past`: key and value of tokens before x, which do not see it. mask: bool (B or 1, 1, T or 1, past + T), True = may be
    seen. rows: which tokens of x are asked for; key and value are of all."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.attention = Attention(cfg.dim, cfg.heads, cfg.dropout)
        self.hidden, self.output = nn.Linear(cfg.dim, cfg.ffn), nn.Linear(cfg.ffn, cfg.dim)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim), nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None, rows: slice):
        """-> tokens `rows` of x after attention and feed-forward, and key and value of all of x."""
        y = self.norm1(x)
        q, k, v = self.attention.project(y[:, rows], y)
        keys, values = (k, v) if past is None else (torch.cat([past[0], k], 1), torch.cat([past[1], v], 1))
        x = x[:, rows] + self.dropout(self.attention.attend(q, keys, values, mask=mask))
        y = self.output(self.dropout(F.relu(self.hidden(self.norm2(x)))))
        return x + self.dropout(y), (k, v)


class Transformer(nn.Module):
    """LayerNorm, then blocks, and no LayerNorm after them: heads read the residual stream, as released.

    (B, T, D) -> the same, of the tokens `rows` alone if given, and for each block key and value of all these tokens; `past` is
    such a list of earlier tokens."""

    def __init__(self, cfg: Config, layers: int):
        super().__init__()
        self.norm, self.blocks = nn.LayerNorm(cfg.dim), nn.ModuleList(Block(cfg) for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor | None = None, past: list | None = None, rows: slice = slice(None)):
        """x (B, T, D), mask as in Block -> tokens, and a list of key and value for each block."""
        x, kept, last = self.norm(x), [], self.blocks[-1]
        for block, before in zip(self.blocks, past or [None] * len(self.blocks), strict=True):
            x, own = block(x, mask, before, rows if block is last else slice(None))
            kept.append(own)
        return x, kept


# ---- masks -----------------------------------------------------------------------------------------------------------


def mask_words(caption: Tensor, words: int, mask: int, rate: float, rules: str) -> tuple[Tensor, Tensor]:
    """Section "MLM": of `rate` of the words 80 % become [MASK], 10 % another word, 10 % stay. caption (B, V), START first,
    padded with 0 -> ids with masks, and targets: the word that was there, -1 elsewhere.

    END is a word like any other: whoever writes a caption must be told where it ends. The released rules replace it by
    [MASK] only, take the first word where none was drawn, and draw other "words" from all ids."""
    released = rules == "released"
    word = (caption > data.END) | ((caption == data.END) & (not released))
    chosen = word & (torch.rand(caption.shape, device=caption.device) < rate)
    if released:
        chosen[:, 1] |= ~chosen.any(1)
    kind = torch.rand(caption.shape, device=caption.device)
    kind = kind.masked_fill(chosen & (chosen.sum(1, keepdim=True) == 0), 0)
    other = torch.randint(0 if released else data.END + 1, words, caption.shape, device=caption.device)
    ids = torch.where(chosen & (kind < 0.8), mask, torch.where(chosen & (kind < 0.9), other, caption))
    if released:
        end = (caption == data.END) & (torch.rand(caption.shape, device=caption.device) < rate)
        ids, chosen = ids.masked_fill(end, mask), chosen | end
    return ids, caption.masked_fill(~chosen, -1)


def mask_cells(pairs: int, images: int, cells: int, rate: float, device: str) -> Tensor:
    """Section "MVCL": `rate` of the cells of one image of each pair, at least one. -> bool (B, images, N)."""
    draw = torch.rand(pairs, cells, device=device)
    chosen = (draw < rate) | (draw == draw.min(1, keepdim=True).values)
    image = torch.randint(images, (pairs, 1), device=device) == torch.arange(images, device=device)  # (B, images)
    return chosen[:, None] & image[..., None]


# ---- losses ----------------------------------------------------------------------------------------------------------


def word_loss(logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Eq. 6: cross-entropy of masked words. logits (..., vocabulary), target (...) with -1 where nothing is asked."""
    total = F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=-1, reduction="sum")
    return total / (target >= 0).sum().clamp(min=1) if reduction == "mean" else total


def cell_loss(predicted: Tensor, target: Tensor, others: Tensor, tau: float, among_targets: bool) -> Tensor:
    """Eq. 8: InfoNCE of masked cells by cosine. predicted, target (P, C) of the masked cells, others (M, C) negatives.

    among_targets: the other masked cells' targets are negatives too, as released."""
    p = F.normalize(predicted, dim=-1)
    s = p @ F.normalize(torch.cat([target, others]), dim=-1).T / tau  # (P, P + M)
    partner = torch.arange(len(p), device=p.device)
    if not among_targets:
        own = torch.eye(len(p), dtype=torch.bool, device=p.device)
        s = torch.cat([s[:, : len(p)].masked_fill(~own, float("-inf")), s[:, len(p) :]], 1)
    return F.cross_entropy(s, partner)


def align_loss(image: Tensor, text: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Eq. 9: InfoNCE of the caption (first) among its rewritten ones by cosine. image, text (B, 1 + negatives, D): mean of
    [IMG1] and [IMG2], and [CLS], both as they are when they have seen that caption. -> loss, and how often it came first."""
    s = F.cosine_similarity(image, text, dim=-1) / tau
    return F.cross_entropy(s, torch.zeros(len(s), dtype=torch.long, device=s.device)), (s.argmax(1) == 0).float().mean()


def judge_loss(logits: Tensor, changed: bool, reduction: str = "mean") -> Tensor:
    """Section 2.3: are these pairs changed (1) or distractors (0)? logits (B, 2)."""
    target = torch.full((len(logits),), int(changed), device=logits.device)
    return F.cross_entropy(logits, target, reduction=reduction)


def class_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Section 2.4: cross-entropy of every single image's class. logits (2B, classes), classes (2B,)."""
    return F.cross_entropy(logits, classes)


def contrast_loss(x: Tensor, classes: Tensor, margin: float = 0.4) -> Tensor:
    """Section 2.4, after He et al. 2021 (TransFG): cosines of like images to 1, of others below the margin, a mean over all
    ordered pairs, an image with itself included. x (2B, D), classes (2B,)."""
    with torch.autocast(x.device.type, enabled=False):  # bfloat16 has three digits
        x = F.normalize(full(x), dim=-1)
        cos, same = x @ x.T, classes[:, None] == classes
        return torch.where(same, 1 - cos, (cos - margin).clamp(min=0)).mean()


def match_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Section 2.4: are both images of one class (1) or not (0)? logits (B, 2), classes (B, 2)."""
    return F.cross_entropy(logits, (classes[:, 0] == classes[:, 1]).long())


# ---- method ----------------------------------------------------------------------------------------------------------


class IDC(nn.Module):
    """The model of both stages and every parameter of it. grid: (C, H, W) of the features; max_len: ids of the longest
    caption."""

    def __init__(self, cfg: Config, vocab_size: int, grid: tuple[int, int, int], max_len: int):
        super().__init__()
        if cfg.visual_sees_text and cfg.finetune_targets == "every":
            raise ValueError("--visual_sees_text shows the images every word; set --finetune_targets masked")
        self.cfg, self.vocab_size, self.grid, self.max_len = cfg, vocab_size, grid, max_len
        channels, cells = grid[0], grid[1] * grid[2]
        self.embed = Embedding(cfg, vocab_size, channels, max(max_len + 1, cells))
        self.single, self.pair = (Transformer(cfg, 1) if cfg.difference_encoder else None for _ in range(2))
        self.cross = Transformer(cfg, cfg.layers)
        self.head = nn.Linear(cfg.dim, vocab_size)
        self.cell_head = nn.Sequential(nn.Linear(cfg.dim, cfg.dim), nn.GELU(), nn.LayerNorm(cfg.dim, eps=1e-12))
        self.cell_bias = nn.Parameter(torch.zeros(channels))
        self.judge = nn.Linear(2 * cfg.dim, 2)
        if cfg.nabirds:
            if not cfg.difference_encoder or cfg.pretrain_images == "frozen":
                raise ValueError("--nabirds trains the difference encoder; leave --no-difference_encoder and "
                                 "--pretrain_images frozen out")  # fmt: skip
            self.classify, self.match = nn.Linear(cfg.dim, BIRDS), nn.Linear(2 * cfg.dim, 2)
        if cfg.near_identity and cfg.difference_encoder:
            start_near_identity(self)

    def train_images(self, on: bool) -> None:
        """Does what sees the images before the cross-modal transformer learn: their embedding, E_s and E_p?"""
        for part in (self.embed.project, self.embed.types, self.embed.norm, self.single, self.pair):
            if part is not None:
                part.requires_grad_(on)

    # -- the sequence

    def visual(self, before: Tensor, after: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 4. Cells (B, N, C) of both images, or of one -> E_p's (B, S, D); which tokens are there, bool (1, S): a second
        image that is not there keeps its [IMG2] alone; and E_s's [IMG1] and [IMG2] (2, B, D)."""
        both = [before, torch.zeros_like(before) if after is None else after]
        both = [torch.zeros_like(x) if self.cfg.blind else x for x in both]
        there = torch.ones(2, 1 + before.shape[1], dtype=torch.bool, device=before.device)
        there[1, 1:] = after is not None
        x = [self.embed.cells(features, kind) for kind, features in enumerate(both)]
        if self.single is not None:
            mask = None if after is not None else there.repeat_interleave(len(before), 0)[:, None, None]
            x = self.single(torch.cat(x), mask)[0].chunk(2)
        alone, x, there = torch.stack([image[:, 0] for image in x]), torch.cat(x, 1), there.view(1, -1)
        if self.pair is not None:
            x = self.pair(x, None if after is not None else there[:, None, None])[0]
        return x, there, alone

    def joint(self, visual: Tensor, there: Tensor, ids: Tensor, cls: bool = True) -> tuple[Tensor, Tensor]:
        """Eq. 5 as in pre-training: everything sees everything but padding. ids (B, V) -> visual (B, S, D), text (B, T, D)
        with [CLS] first."""
        visual = visual if self.embed.project.weight.requires_grad else visual.detach()  # frozen: E_p's backward pass is saved
        text = torch.cat([self.embed.cls(len(ids)), self.embed.words(ids)], 1) if cls else self.embed.words(ids)
        real = torch.ones(text.shape[:2], dtype=torch.bool, device=ids.device)
        real[:, -ids.shape[1] :] = (ids != data.NULL) | self.cfg.see_padding
        mask = torch.cat([there.expand(len(ids), -1), real], 1)
        x = self.cross(torch.cat([visual, text], 1), mask[:, None, None])[0]
        return x[:, : visual.shape[1]], x[:, visual.shape[1] :]

    # -- pre-training

    def mlm(self, pair: tuple, caption: Tensor) -> dict[str, Tensor]:
        """Eq. 6. pair: cells (B, N, C) of both images, the second None where there is none; caption (B, V)."""
        ids, target = mask_words(caption, self.vocab_size, self.embed.mask, self.cfg.mask_rate, self.cfg.mask_rules)
        _, text = self.joint(*self.visual(*pair)[:2], ids)
        return {"mlm": word_loss(self.head(text[:, 1:]), target)}

    def mvcl(self, pair: tuple, caption: Tensor) -> dict[str, Tensor]:
        """Eq. 7-8: the masked cells of one image of each pair, recognised from the rest and the caption. As mlm."""
        images = [x for x in pair if x is not None]
        features = torch.stack(images, 1)  # (B, 1 or 2, N, C)
        masked = mask_cells(*features.shape[:3], self.cfg.mask_rate, features.device)
        shown = features.masked_fill(masked[..., None], 0).unbind(1)
        visual, _ = self.joint(*self.visual(shown[0], shown[1] if len(shown) > 1 else None)[:2], caption)
        cells = visual.unflatten(1, (2, -1))[:, : len(images), 1:]  # (B, 1 or 2, N, D), without [IMG1] and [IMG2]
        # The projection's own weights, transposed, lead back to features.
        predicted = self.cell_head(cells) @ self.embed.project.weight + self.cell_bias
        with torch.autocast(features.device.type, enabled=False):
            predicted, released = predicted.to(features.dtype), self.cfg.mvcl_negatives == "predictions"
            others = (predicted if released else features)[~masked]
            return {"mvcl": cell_loss(predicted[masked], features[masked], others, self.cfg.tau, released)}

    def fda(self, pair: tuple, caption: Tensor, negatives: Tensor) -> dict[str, Tensor]:
        """Eq. 9. negatives (B, 6, V or more): rewritten captions. As mlm."""
        caption = F.pad(caption, (0, negatives.shape[2] - caption.shape[1]))
        visual, there, _ = self.visual(*pair)
        ids = torch.cat([caption[:, None], negatives], 1)  # (B, 7, V)
        seen, text = self.joint(visual.repeat_interleave(ids.shape[1], 0), there, ids.flatten(0, 1))
        image = (seen[:, 0] + seen[:, seen.shape[1] // 2]) / 2
        image, text = (x.unflatten(0, ids.shape[:2]) for x in (image, text[:, 0]))
        loss, right = align_loss(image, text, self.cfg.tau)
        return {"fda": loss, "fda_right": right}

    def birds(self, pair: tuple, classes: Tensor) -> dict[str, Tensor]:
        """classes (B, 2) of the two images, of which there is no caption."""
        visual, _, alone = self.visual(*pair)
        both = torch.cat([visual[:, 0], visual[:, visual.shape[1] // 2]], -1)
        alone, of = alone.flatten(0, 1), classes.T.flatten()
        return {"class": class_loss(self.classify(alone), of), "contrast": contrast_loss(alone, of),
                "match": match_loss(self.match(both), classes)}  # fmt: skip

    # -- fine-tuning

    def finetune(self, pair: tuple, caption: Tensor, changed: bool | None) -> dict[str, Tensor]:
        """L_MLM with words that see earlier words only, and L_judge where `changed` is told."""
        cfg, visual = self.cfg, self.visual(*pair)[0]
        if cfg.finetune_targets == "every":
            text, order = self.every(caption)
            target = caption[:, 1:].masked_fill(caption[:, 1:] == data.NULL, -1)
        else:
            ids, target = mask_words(caption, self.vocab_size, self.embed.mask, cfg.mask_rate, cfg.mask_rules)
            text, order = self.after_cls(self.embed.words(ids))
        seen, told = self.tell(visual, text, order)
        losses = {"caption": word_loss(self.head(told[:, -target.shape[1] :]), target, cfg.reduction)}
        if changed is not None and cfg.w_judge:
            losses["judge"] = judge_loss(self.judge(seen.flatten(1)), changed, cfg.reduction)
        return losses

    def after_cls(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Words (B, V, D) -> text behind its [CLS], if it has one, and its order (T, T): who sees whom, True = seen."""
        text = torch.cat([self.embed.cls(len(text)), text], 1) if self.cfg.finetune_cls else text
        return text, torch.ones(text.shape[1], text.shape[1], dtype=torch.bool, device=text.device).tril()

    def every(self, caption: Tensor) -> tuple[Tensor, Tensor]:
        """What decoding asks at each word, all at once: caption (B, V) -> [CLS], words 0 ... V-2, then [MASK] at 1 ... V-1,
        each of which sees the words before it and itself; and that order."""
        text, earlier = self.after_cls(self.embed.words(caption[:, :-1]))
        masks = self.embed.words(torch.full_like(caption[:, 1:], self.embed.mask), 1)
        count = masks.shape[1]
        own = torch.eye(count, dtype=torch.bool, device=caption.device)
        rows = torch.cat([F.pad(earlier, (0, count)), torch.cat([earlier[-count:], own], 1)])
        return torch.cat([text, masks], 1), rows

    def tell(self, visual: Tensor, text: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Eq. 5 as in fine-tuning: text tokens (B, T, D) see the images and what `order` (T, T) lets them see of the text;
        images see images (and, with visual_sees_text, the text). -> [IMG1] and [IMG2] (B, 2, D), which alone of the images are
        asked for, and text (B, T, D)."""
        s, mask = visual.shape[1], F.pad(order, (visual.shape[1], 0), value=True)  # (T, S + T)
        if self.cfg.visual_sees_text:
            mask = torch.cat([torch.ones(s, mask.shape[1], dtype=torch.bool, device=mask.device), mask])
            x = self.cross(torch.cat([visual, text], 1), mask[None, None])[0]
            return x[:, : s : s // 2], x[:, s:]
        seen, kept = self.cross(visual, rows=slice(None, None, s // 2))  # [IMG1] and [IMG2]
        return seen, self.cross(text, mask[None, None], kept)[0]

    def forward(self, before: Tensor, after: Tensor | None, caption: Tensor, task: str, more=None) -> dict[str, Tensor]:
        """The losses of one task ("mlm", "mvcl", "fda", "birds", "finetune") for pairs of features (B, C, H, W) and caption
        (B, V), for birds classes (B, 2); more: fda's negatives (B, 6, V), or whether finetune's pairs are changed."""
        pair = tuple(None if x is None else x.flatten(2).transpose(1, 2) for x in (before, after))
        return getattr(self, task)(pair, caption, *([more] if task in ("fda", "finetune") else []))

    # -- captions

    def encode(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """visual of features (B, C, H, W)."""
        return self.visual(*(x.flatten(2).transpose(1, 2) for x in (before, after)))

    def stepper(self, visual: Tensor):
        """-> step(words (B,), position) -> logits of the next word, which a [MASK] in its place predicts. Keys and values of
        images and earlier words are kept: nothing that comes later changes them."""
        past = self.cross(visual)[1]
        if self.cfg.finetune_cls:
            past = join(past, self.cross(self.embed.cls(len(visual)), past=past)[1])
        masks = torch.full((len(visual), 1), self.embed.mask, device=visual.device)

        def step(words: Tensor, t: int) -> Tensor:
            nonlocal past
            x = torch.cat([self.embed.words(words[:, None], t), self.embed.words(masks, t + 1)], 1)
            order = torch.ones(2, past[0][0].shape[1] + 2, dtype=torch.bool, device=x.device).tril(past[0][0].shape[1])
            x, kept = self.cross(x, order[None, None], past)
            past = join(past, [(k[:, :1], v[:, :1]) for k, v in kept])  # the word stays, the [MASK] goes
            return self.head(x[:, 1])

        return step

    def full_stepper(self, visual: Tensor):
        """The same where images see the text, so that nothing can be kept."""
        so_far = []

        def step(words: Tensor, t: int) -> Tensor:
            so_far.append(words)
            ids = torch.stack([*so_far, torch.full_like(words, self.embed.mask)], 1)
            text, order = self.after_cls(self.embed.words(ids))
            return self.head(self.tell(visual, text, order)[1][:, -1])

        return step

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor, sample: bool = False) -> Tensor:
        """Captions of pairs of features (B, C, H, W): greedy (or sampled) ids (B, max_len)."""
        stepper = self.full_stepper if self.cfg.visual_sees_text else self.stepper
        start = torch.full((len(before),), data.START, device=before.device)
        return decode(stepper(self.encode(before, after)[0]), start, self.max_len, data.END, data.UNK, sample)


    @torch.no_grad()
    def attention_map(self, before: Tensor, after: Tensor, ids: Tensor) -> list[dict[str, Tensor]]:
        """Where the [MASK]s looked that became the words of ids (B, V): last layer's attention over the cells of both images,
        mean over heads and words -> for each pair its maps (H, W) of "before" and "after", together of sum 1."""
        visual, blocks = self.encode(before, after)[0], self.cross.blocks
        past = self.cross(visual)[1]
        text, order = self.every(ids)
        mask, x = F.pad(order, (visual.shape[1], 0), value=True)[None, None], self.cross.norm(text)
        for block, kept in zip(blocks[:-1], past, strict=False):
            x = block(x, mask, kept, slice(None))[0]
        last, y = blocks[-1], blocks[-1].norm1(x)
        scores = last.attention.scores(last.attention.query(y), past[-1][0])[:, :, -ids.shape[1] + 1 :]  # (B, K, V - 1, S)
        cells = scores.unflatten(-1, (2, -1))[..., 1:]  # without [IMG1] and [IMG2]
        weight = cells.flatten(-2).softmax(-1).mean(1)  # (B, V - 1, 2 N)
        valid = (ids[:, 1:] > data.END).to(weight.dtype)[..., None]
        maps = (weight * valid).sum(1) / valid.sum(1).clamp(min=1)
        return [{"before": m[0], "after": m[1]} for m in maps.unflatten(1, (2, *self.grid[1:]))]


def join(past: list, kept: list) -> list:
    """Keys and values of earlier tokens and of new ones, for every layer."""
    return [tuple(torch.cat(two, 1) for two in zip(a, b, strict=True)) for a, b in zip(past, kept, strict=True)]


@torch.no_grad()
def start_near_identity(model: IDC) -> None:
    """Not the paper's: E_p starts as a comparison of like cells, and text as a reader of what it leaves over.

    E_p: in each head both halves of the channels hold the cell. Queries and keys of one half find its likeness in the other
    image; values take that away from the other half, where what did not change cancels, and the feed-forward tells in one
    direction, `changed`, how much is left. Text: half of the heads look at the word before, the others at changed cells of
    "before" or "after", and all of them hand on what they see; otherwise over a hundred visual tokens drown a few words."""
    d, heads = model.cfg.dim, model.cfg.heads
    cell, other = (half.flatten() for half in torch.arange(d).unflatten(0, (heads, -1)).chunk(2, 1))
    embed, single, pair = model.embed, model.single.blocks[0], model.pair.blocks[0]
    apart, changed = torch.zeros(2, d)  # orthogonal, even in all heads; apart: in what the types of the two images differ
    for direction, run in ((apart, 2), (changed, 4)):  # ++--++-- and ++++----
        direction[cell] = (1 - 2 * (torch.arange(len(cell)) // run % 2)) * len(cell) ** -0.5
    position = embed.position[: model.max_len + 1]
    back = (torch.linalg.pinv(position[1:], rtol=0.05) @ position[:-1]).T  # back @ position[t] = position[t - 1]
    still = (torch.linalg.pinv(position, rtol=0.05) @ position).T  # projects on all positions
    # Words leave the positions' directions alone; cells start large beside positions, which would tell apart what looks the
    # same, and differ by image in one direction alone.
    for table in (embed.table.weight, embed.types.weight):
        table.sub_(table @ still).mul_(0.5)
    embed.project.weight.normal_(std=8 * embed.project.in_features**-0.5)
    embed.project.weight.sub_(torch.outer(apart, apart @ embed.project.weight))
    embed.project.weight[other] = embed.project.weight[cell]
    embed.project.bias.zero_()
    for kind, sign in enumerate((48, -48)):
        embed._type(kind).copy_(sign * apart)
        special = embed.table.weight[embed.special + (kind if embed.own else 0)]  # neither attracts cells nor looks changed
        special.sub_((special + embed.types.weight[kind]) @ apart * apart + 3 * changed)
    for linear in (single.attention.out, single.output):
        linear.weight.mul_(0.1)
        linear.bias.zero_()
    a = pair.attention
    for linear, noise in ((a.query, 0.02), (a.key, 0.02), (a.value, 0.004), (a.out, 0.004)):
        linear.weight.normal_(std=noise)
        linear.bias.zero_()
    for linear in (a.query, a.key):
        linear.weight[cell, cell] += 2.0
        linear.weight[other, cell.roll(d // heads // 2)] += 2.0
    a.key.weight.sub_(2 * torch.outer(a.key.weight @ apart, apart))  # own cells repel, the other image's attract
    a.value.weight[other, cell] -= 1.0
    a.value.weight.sub_(torch.outer(a.value.weight @ apart, apart))
    a.value.weight.add_(0.8 * torch.outer(apart, apart))  # of opposite sign there: little of the types is left
    a.out.weight.diagonal().add_(1.0)
    pair.hidden.weight[:, cell] *= 0.2  # the feed-forward reads the differences first
    pair.hidden.weight[:, other] *= 2
    pair.hidden.bias.sub_(0.5)
    pair.output.weight.mul_(0.5).add_(25 / model.cfg.ffn * changed[:, None])
    for n, block in enumerate(model.cross.blocks):
        a, head = block.attention, torch.arange(d).unflatten(0, (heads, -1))
        for linear, noise in ((a.query, 0.02), (a.key, 0.02), (a.value, 0.02), (a.out, 0.02)):
            linear.weight.normal_(std=noise)
            linear.bias.zero_()
        for linear in (a.value, a.out):
            linear.weight.diagonal().add_(1.0)
        for h, rows in enumerate(head):
            if (h < heads // 2) == (n % 2 == 0):  # the fastest sines and cosines tell neighbours apart
                a.query.weight[rows] = 3 * back[: len(rows)]
                a.key.weight[rows] = 3 * still[: len(rows)]
            else:
                look = 4.2 * F.normalize(torch.randn(len(rows)), dim=0)
                a.query.bias[rows] = look
                a.key.weight[rows] += torch.outer(look, changed + 0.4 * (-1) ** h * apart)


# ---- cross-task data -------------------------------------------------------------------------------------------------


def open_dataset(cfg: Config) -> data.Dataset:
    """The data set of a run; with CUB its words are those of both."""
    dataset = data.open_dataset(cfg)
    if cfg.single_images not in ("", "mini"):
        more = data.read_json(Path(cfg.single_images) / "vocab.json")
        words = sorted({*dataset.vocab.words, *more} - {*data.SPECIAL})
        dataset.vocab = data.Vocab(data.SPECIAL + words, dataset.vocab.tokenizer, dataset.vocab.max_words)
    if not cfg.swap:
        dataset.scenes["train"] = [dataclasses.replace(scene, swapped=None) for scene in dataset.scenes["train"]]
    return dataset


def open_single_images(cfg: Config, dataset: data.Dataset) -> data.Dataset:
    """Section 2.4, general image captioning: single images with captions, in the words of `dataset`. ValueError where their
    features have another shape."""
    if cfg.single_images == "mini" and dataset.name != "mini":
        raise ValueError(f"--single_images mini goes with --dataset mini, not {dataset.name}; give CUB's folder")
    if cfg.single_images == "mini":  # in CUB's place: what is to be seen in the distractor pictures, an object a caption
        scenes, made = data.read_json(dataset.root / "scenes.json"), []
        of = {f"{int(number):06d}.png": truth for number, truth in scenes.items()}
        for scene in dataset.scenes["train"]:
            image, objects = scene.pairs[1].after, of[scene.pairs[0].id]["objects"]["nonsemantic"]
            captions = ["there is a " + " ".join(thing[name] for name in data.ATTRIBUTES) for thing in objects]
            made.append(data.Scene((data.Pair(image, image, None, captions),)))
        release = data.Release({"train": made}, {}, {}, {}, dataset.paths)
        return data.Dataset("mini", dataset.root, release, dataset.vocab, dataset.features)
    cub = data.load("cub", cfg.single_images, cfg.features, cfg.device)
    if cub.grid != dataset.grid:
        raise ValueError(f"{cub.features.path} has features of shape {cub.grid}, {dataset.features.path} of {dataset.grid}; "
                         "both should have those of one extractor")  # fmt: skip
    cub.vocab = data.Vocab(dataset.vocab.words, cub.vocab.tokenizer, cub.vocab.max_words)
    return cub


class Birds:
    """Section 2.4, fine-grained classification: pairs of NABirds' images, half of them of one class."""

    def __init__(self, cfg: Config):
        release, self.features = data.load_classified("nabirds", cfg.nabirds, cfg.features, cfg.device)
        images = [image for split in release.images.values() for image in split]  # 48,562, as many as the paper's pairs
        self.pairs, self.size, self.seed = data.class_pairs(images, cfg.seed), cfg.pretrain_batch, cfg.seed

    def batch(self, step: int) -> data.Batch:
        """Pairs drawn by (seed, step); in the place of captions are the classes (B, 2)."""
        drawn = np.random.default_rng([self.seed, step, 1]).integers(len(self.pairs), size=self.size)
        first, second = zip(*(self.pairs[i] for i in drawn), strict=True)
        features = (self.features.rows([name for name, _ in images]) for images in (first, second))
        classes = torch.tensor([[a[1], b[1]] for a, b in zip(first, second, strict=True)])
        return data.Batch(*features, classes, [], [])


# ---- training --------------------------------------------------------------------------------------------------------


def plan(cfg: Config) -> list[tuple[str, int, int]]:
    """The stages of a run, each with its first step and the one after its last."""
    stages = [("single", cfg.pretrain_steps)] if cfg.single_images and cfg.stage != "finetune" else []
    stages += [("pretrain", cfg.pretrain_steps)] if cfg.stage != "finetune" else []
    stages += [("finetune", cfg.steps)] if cfg.stage != "pretrain" else []
    ends = [sum(steps for _, steps in stages[: i + 1]) for i in range(len(stages))]
    return [(name, end - steps, end) for (name, steps), end in zip(stages, ends, strict=True)]


def task_of(cfg: Config, stage: str, step: int) -> str:
    """The task of a step, in pre-training drawn by the shares of them; a function of (seed, step) alone."""
    if stage == "finetune":
        return stage
    tasks = ["mlm"] * cfg.mlm + ["mvcl"] * cfg.mvcl + ["fda"] * cfg.fda
    tasks += ["birds"] * cfg.nabirds_share if cfg.nabirds and stage == "pretrain" else []
    if not tasks:
        raise ValueError("--mlm 0 --mvcl 0 --fda 0 leave nothing to pre-train; give --stage finetune")
    return tasks[np.random.default_rng([cfg.seed, step]).integers(len(tasks))]


def rate(cfg: Config, stage: str, step: int) -> float:
    """Learning rate of a stage's step (counted from 0)."""
    if stage == "finetune":
        halves = min(step // 10000, 2) if cfg.finetune_decay == "halves" else 0
        return learning_rate(cfg, step) / 2**halves
    warm = max(1, cfg.pretrain_warmup)
    decay = (warm / (step + 1)) ** 0.5 if cfg.pretrain_decay == "inverse_sqrt" else 1.0
    return cfg.pretrain_lr * min((step + 1) / warm, 1.0, decay)


def losses_of(model: IDC, streams: tuple[data.Batch, ...], cfg: Config, task: str, negatives: Negatives | None = None):
    """The losses of one step, each a mean over the streams (changed pairs, distractor pairs), and their total. The streams
    stay apart: a scene's default image is "before" in both, so its cells would be false negatives in MVCL."""
    losses: dict[str, Tensor] = {}
    for n, batch in enumerate(streams):
        if task == "fda":  # a seventh of the pairs, each with its caption and six others
            some = max(1, len(batch.ids) // 7)
            batch = dataclasses.replace(batch, before=batch.before[:some], after=batch.after[:some],
                                        caption=batch.caption[:some], ids=batch.ids[:some])  # fmt: skip
        batch = batch.to(cfg.device)
        changed = n == 0 if len(streams) == 2 else None  # one stream: it is not told which pairs are changed
        more = negatives(batch.ids).to(cfg.device) if task == "fda" else changed
        with torch.autocast("cuda", torch.bfloat16, enabled=cfg.amp and cfg.device.startswith("cuda")):
            parts = model(batch.before, None if batch.single else batch.after, batch.caption, task, more)
        losses = {name: losses.get(name, 0) + part / len(streams) for name, part in parts.items()}
    weights = {"judge": cfg.w_judge, "fda_right": 0.0}  # L_mlm, L_mvcl or L_fda; then L = L_caption + w_judge L_judge
    losses["total"] = sum(weights.get(name, 1.0) * part for name, part in losses.items())
    return losses


def train(cfg: Config, resume: bool = False) -> tuple[IDC, data.Dataset]:
    """Pre-train, then fine-tune, into cfg.out_dir -> the best model by validation, and the data set.

    The weights at the end of pre-training stay in pretrained.pt, for other runs' --init; with --stage pretrain that is all.
    Told to stop (Ctrl-C, SIGTERM) it saves last.pt and exits 130 or 143; `resume` goes on from there as if nothing had
    happened. FloatingPointError where a loss is not finite."""
    run, dataset, cuda = Run(cfg, resume), open_dataset(cfg), cfg.device.startswith("cuda")
    sources = {stage: open_single_images(cfg, dataset) if stage == "single" else dataset for stage, _, _ in plan(cfg)}
    negatives = {stage: Negatives(of) for stage, of in sources.items() if cfg.fda and stage != "finetune"}
    birds = Birds(cfg) if cfg.nabirds and cfg.stage != "finetune" else None
    torch.manual_seed(cfg.seed)
    torch.set_float32_matmul_precision("high" if cuda else "highest")  # TF32 where bf16 autocast leaves float32
    model = IDC(cfg, len(dataset.vocab), dataset.grid, max(of.max_len for of in sources.values())).to(cfg.device)
    model.max_len = dataset.max_len
    if cfg.init:
        start_from(model, cfg.init, dataset)
    parameters = [p for p in model.parameters() if p.requires_grad]
    state, stop, recent = {"step": 0, "best": float("-inf"), "worse": 0}, 0, LossLog()

    def save(name: str) -> None:
        run.save(name, model, optimizer, dataset, step=step, best=best, worse=worse)

    if resume:
        state = run.restore(model, dataset)
    step, best, worse = state["step"], state["best"], state["worse"]
    run.begin(model, step)
    if cfg.compile and cuda and can_compile():
        torch._dynamo.config.cache_size_limit = 64  # a version a task, shape and stream: of 8, none is left to fine-tuning
        model.compile()
    with run:
        for stage, first, last in plan(cfg):
            if step >= last or stop or 0 < cfg.patience <= worse:
                continue
            source, batch_size = sources[stage], cfg.batch_size if stage == "finetune" else cfg.pretrain_batch
            decay = cfg.weight_decay if stage == "finetune" else 0.0
            model.train_images(stage == "finetune" or cfg.pretrain_images == "trained")
            optimizer = torch.optim.Adam(parameters, lr=cfg.lr, weight_decay=decay, fused=True)  # anew in each stage
            if state["step"] > first:
                optimizer.load_state_dict(state["optimizer"])
            if not resume and step == 0:
                save("last.pt")
            bar = tqdm(total=last - first, initial=step - first, desc=stage, unit="step", disable=None)
            for streams in training_batches(source, batch_size, cfg.seed, step - first, last - first):
                optimizer.param_groups[0]["lr"] = lr = rate(cfg, stage, step - first)
                task = task_of(cfg, stage, step)
                streams = (birds.batch(step),) if task == "birds" else streams
                losses = losses_of(model, streams, cfg, task, negatives.get(stage))
                optimizer.zero_grad()
                losses["total"].backward()
                if cfg.grad_clip:
                    nn.utils.clip_grad_norm_(parameters, cfg.grad_clip)
                optimizer.step()
                step, stop = step + 1, run.stop  # read once a step: a signal may come at any line
                recent.add(losses)
                bar.update()
                validate = (step - first) % cfg.eval_every == 0 or step == last
                if step % cfg.log_every == 0 or validate or stop:
                    run.log_losses(recent, bar, step, stage=stage, lr=lr)
                if validate and stage == "finetune":
                    scores = evaluate(model, dataset, "val", cfg)
                    run.log(step=step, event="eval", decode=cfg.val_decode, select_by=cfg.select_by, **scores)
                    tqdm.write(f"step {step}: validation " + ", ".join(f"{k} {v:.2f}" for k, v in scores.items()))
                    worse += 1
                    if scores[cfg.select_by] > best:
                        best, worse = scores[cfg.select_by], 0
                        save("best.pt")
                if step == last and stage == "pretrain":
                    save("pretrained.pt")
                if validate or stop:
                    save("last.pt")
                if stop or 0 < cfg.patience <= worse:
                    break
            bar.close()
    if stop:
        raise SystemExit(stop)
    if cfg.stage == "pretrain":
        print(f"pre-trained; go on with --stage finetune --init {run.dir / 'pretrained.pt'}")
        raise SystemExit(0)
    model.load_state_dict(load_checkpoint(run.dir / "best.pt", cfg.device)["model"])
    return model, dataset


def start_from(model: IDC, path: str, dataset: data.Dataset) -> None:
    """Weights of another run's checkpoint, as far as names and shapes agree; ValueError where its words are others."""
    state, own = load_checkpoint(path), model.state_dict()
    if state["vocab"] != dataset.vocab.words:
        raise ValueError(f"--init {path} was trained with {len(state['vocab'])} other words than the {len(dataset.vocab)} of "
                         f"{dataset.root}; prepare both with one vocabulary")  # fmt: skip
    fit = {name: value for name, value in state["model"].items() if name in own and own[name].shape == value.shape}
    model.load_state_dict(own | fit)
    print(f"{path}: {len(fit)} of {len(own)} weights")


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(model: IDC, dataset: data.Dataset, split: str, cfg: Config, out_dir: Path | None = None) -> dict:
    """Captions of a split, their scores; -> the scores of all pairs together.

    Without out_dir (validation while training) the quick metrics only; with it every metric and every group of pairs,
    printed and written with captions and sample pictures."""
    model.eval()
    captions: dict[str, str] = {}
    maps: dict = {}  # pair id -> attention
    batches = -(-len(dataset.pairs(split)) // cfg.eval_batch)
    for batch in tqdm(dataset.eval_batches(split, cfg.eval_batch), split, batches, disable=None, leave=False):
        batch = batch.to(cfg.device)
        ids = model.generate(batch.before, batch.after, sample=cfg.val_decode == "sample" and out_dir is None)
        captions |= zip(batch.ids, dataset.vocab.decode(ids), strict=True)
        if out_dir:
            maps |= zip(batch.ids, model.attention_map(batch.before, batch.after, ids), strict=True)
    if out_dir is None:
        model.train()
        return dataset.score(split, captions, quick=True)["scores"]["total"]
    data.write_predictions(out_dir / f"captions_{split}.json", captions)
    result = dataset.score(split, captions) | dataset.report(split, captions, maps)
    data.write_scores(out_dir / f"scores_{split}.json", result)
    picture = "samples.png" if split == "test" else f"samples_{split}.png"
    sample_sheet(dataset, split, captions, maps).save(out_dir / picture)
    return result["scores"]["total"]


def caption_files(cfg: Config, checkpoint: str, files: list[str], out: str | None) -> str:
    """The caption of any two image files by a checkpoint, and its attention picture where `out` names one."""
    model, state = load_model(IDC, cfg, checkpoint)
    extractor = data.Extractor(**state["extractor"], device=cfg.device)
    before, after = (extractor([f]).to(cfg.device).float() for f in files)
    ids = model.generate(before, after)
    caption = data.Vocab(state["vocab"]).decode(ids)[0]
    if out:
        heat = model.attention_map(before, after, ids)[0]
        pair_picture(*map(data.read_image, files), heat, [caption], side=224).save(out)
    return caption


def main(argv: list[str] | None = None) -> None:
    """The command line: train and evaluate, only evaluate, or caption two image files."""
    cfg, do = parse_args(Config, PRESETS, RELEASED, Path(__file__).stem, __doc__, argv)
    if do.caption:
        print(caption_files(cfg, do.checkpoint, do.caption, do.out))
        return
    if do.eval:
        (model, state), dataset = load_model(IDC, cfg, do.eval), open_dataset(cfg)
        dataset.check_state(state)
    else:
        model, dataset = train(cfg, do.resume)
    evaluate(model, dataset, do.split, cfg, Path(cfg.out_dir))


if __name__ == "__main__":
    run_main(main)
