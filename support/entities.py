"""CLIP's embeddings of names, pictures and pairs, for CHEERS's entities. Licence: MIT."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from common import InputError, RunConfig
from support.extractors import load_clip, read_image
from support.files import load_tensors, progress, save_tensors
from support.text import read_captions, subjects
from support.threads import in_threads


@dataclass
class Entities:
    """The K entities of each pair, from cheers.find_entities. A loop of your own needs an
    open_clip.CLIP, its tokenizer and its preprocessing, which must not crop the border:

        cfg = Config(device="cpu")  # or "cuda"
        phrases = find_candidates({"the red cube is gone": ["red cube"]}, cfg.min_count, cfg.k)
        table = embed_texts(clip, tokenizer, phrases)
        x = embed_images(clip, preprocess, [picture_a, picture_b])  # PIL images
        images = {"a": x[0], "b": x[1]}
        entities = find_entities(cfg, phrases, table, images, [("a", "b")])
        model = CHEERS(cfg, vocab_size, grid, max_len)
        losses = model(before, after, ids, entities([("a", "b")]))"""

    phrases: list[str]  # M candidates
    table: Tensor  # CLIP's embeddings of these (M, d)
    rows: dict[tuple, Tensor]  # names of a pair (before, after) -> its rows of the table (K,)
    blind: bool = False  # zeros stand in for the embeddings

    def __call__(self, pairs: list[tuple]) -> Tensor:
        """Names (before, after) of B pairs -> CLIP's embeddings of their entities (B, K, d)."""
        rows = torch.stack([self.rows[pair] for pair in pairs])
        entities = self.table[rows.to(self.table.device, non_blocking=True)]
        return torch.zeros_like(entities) if self.blind else entities

    def note(self, pair: tuple) -> str:
        """Name a pair's entities in a line, which is printed below its pictures."""
        return "entities: " + ", ".join(self.phrases[m] for m in self.rows[pair])

    def state(self) -> dict:
        """Return what a checkpoint needs, besides the model, to find any two pictures' entities."""
        return {"entities": {"phrases": self.phrases, "table": self.table}}

    def check_state(self, state: dict) -> None:
        """InputError if a checkpoint was trained with other candidates or another CLIP."""
        trained = state["entities"]
        if trained["phrases"] != self.phrases:
            counts = f"{len(trained['phrases'])} candidate entities, not these {len(self.phrases)}"
            raise InputError(f"the checkpoint was trained with {counts}; give its --data_dir")
        check_clip(self.table, trained["table"])


@torch.no_grad()
def embed_texts(clip, tokenizer, texts: list[str]) -> Tensor:
    """CLIP's embeddings of texts (n, d), each of length 1."""
    device = next(clip.parameters()).device
    blocks = []
    for ids in tokenizer(texts).split(256):
        blocks.append(clip.encode_text(ids.to(device), normalize=True).cpu())
    return torch.cat(blocks)


@torch.no_grad()
def embed_images(clip, preprocess, pictures: list) -> Tensor:
    """CLIP's embeddings of pictures (n, d), each of length 1. preprocess: picture -> (3, H, W)."""
    device = next(clip.parameters()).device
    starts = range(0, len(pictures), 64)
    blocks = []
    for start in progress(starts, desc="CLIP", unit="image", unit_scale=64, delay=1):
        x = torch.stack(list(in_threads(preprocess, pictures[start : start + 64])))
        blocks.append(clip.encode_image(x.to(device), normalize=True).cpu())
    return torch.cat(blocks)


def check_clip(table: Tensor, trained: Tensor) -> None:
    """InputError if embeddings of candidates (M, d) differ from those in the checkpoint."""
    trained = trained.to(table.device)
    if table.shape != trained.shape or not table.allclose(trained, atol=1e-3):
        raise InputError("the checkpoint was trained with another CLIP; give --clip as in training")


def load_embedder(cfg: RunConfig, phrases: list[str], table: Tensor | None) -> tuple:
    """Load --clip -> embeddings of the candidates (M, d), and a function that embeds pictures.
    table: None, or the embeddings in a checkpoint, which --clip must fit and which are returned."""
    clip, tokenizer, preprocess = load_clip(cfg.clip, cfg.device)
    if table is None:
        table = embed_texts(clip, tokenizer, phrases)
        if table.shape[1] != cfg.clip_dim:
            raise InputError(f"--clip {cfg.clip} needs --clip_dim {table.shape[1]}")
    else:
        # The first candidate is enough to tell another CLIP.
        check_clip(embed_texts(clip, tokenizer, phrases[:1]), table[:1])

    def embed(files: list) -> Tensor:
        return embed_images(clip, lambda file: preprocess(read_image(file)), files)

    return table, embed


def subjects_of(dataset) -> dict[str, list[str]]:
    """Each training caption -> its subjects, such as "red cube". InputError if there are none.

    CHEERS's paper "utilize[s] SpaCy [...] to extract the subjects" (section 3.1.1). [ours] Rules
    read captions from templates (mini, CLEVR-Change, CLEVR-DC), on which spaCy often errs."""
    captions = sorted(set(dataset.captions(["train"])))
    readings = read_captions(subjects, captions, dataset.settings.templates)
    if not any(readings.values()):
        remedy = "set --k 0 --gate none --w_consistency 0"
        raise InputError(f"no training caption has a subject; {remedy}")
    return readings


def find_candidates(subjects: dict[str, list[str]], min_count: int, k: int) -> list[str]:
    """Caption -> its subjects, for all captions -> the candidates, sorted. [ours] Subjects of fewer
    than min_count captions, mostly the parser's errors, are left out, if at least k remain."""
    counts = Counter()  # subject -> number of captions
    for phrases in subjects.values():
        counts.update(set(phrases))
    frequent = [phrase for phrase in counts if counts[phrase] >= min_count]
    if len(frequent) < k:
        return sorted(counts)
    return sorted(frequent)


def pairs_of(dataset) -> list[tuple]:
    """The names (before, after) of all pairs of a data set, swapped ones included, each once."""
    pairs = {}
    for scenes in dataset.scenes.values():
        for scene in scenes:
            for pair in (*scene.pairs, *(scene.swapped or ())):
                pairs[pair.before, pair.after] = None
    return list(pairs)


def blocks_of(pairs: list[tuple], images: dict[str, Tensor], device: str) -> Iterator[tuple]:
    """256 pairs at a time: their names, and the embeddings (256, d) of their two pictures."""
    for start in range(0, len(pairs), 256):
        block = pairs[start : start + 256]
        x_bef = torch.stack([images[before] for before, _ in block]).to(device)
        x_aft = torch.stack([images[after] for _, after in block]).to(device)
        yield block, x_bef, x_aft


def picture_embeddings(dataset, clip: str, embed: Callable) -> dict[str, Tensor]:
    """Each picture's embedding (d,) by its name. They are kept in clip-*.pt, and made anew if
    pictures were replaced. Remove that file after overwriting the weights that --clip names."""
    names = sorted(dataset.paths)
    contents = [f"{name} {dataset.features.content(name)}" for name in names]
    key = "\n".join([clip, *contents])
    file = dataset.root / f"clip-{hashlib.sha256(key.encode()).hexdigest()[:12]}.pt"
    if not file.exists():
        save_tensors(file, {"images": embed([dataset.paths[name] for name in names])})
    images = load_tensors(file, "remove it, and it will be made again")["images"]
    return dict(zip(names, images, strict=True))
