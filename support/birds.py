"""IDC's cross-task pre-training (section 2.4 of its paper) on images of birds: CUB's, which have
captions, and NABirds', which have classes and the losses here. Data sets are data.Datasets.
Licence: MIT."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import InputError, upcast
from support.releases import read_release, vocab_of
from support.text import SPECIAL, Vocab

# ---- CUB: captions of single images --------------------------------------------------------------


def add_words_of_cub(dataset, root: str) -> None:
    """Add the words of CUB's captions to a data set's vocabulary. root: CUB's folder."""
    cub = vocab_of("cub", read_release("cub", Path(root)))
    vocab = dataset.vocab
    words = set(cub.words).union(vocab.words) - set(SPECIAL)
    dataset.vocab = Vocab(SPECIAL + sorted(words), vocab.tokenizer, vocab.max_words)


def match_cub(cub, dataset) -> None:
    """Write CUB's captions in the ids of `dataset`, whose max_len then covers both."""
    if cub.grid != dataset.grid:
        raise InputError(f"features of {cub.root}: {dataset.grid} expected, {cub.grid} found")
    cub.vocab = Vocab(dataset.vocab.words, cub.vocab.tokenizer, cub.vocab.max_words)
    dataset.max_len = max(dataset.max_len, cub.max_len)  # the model is for both


# ---- NABirds: classes of images ------------------------------------------------------------------


class Birds:
    """Fine-grained classification: one pair for each of NABirds' 48,562 images, of all splits, as
    in the paper. (The released code has separate lists of pairs for training and validation.)"""

    def __init__(self, nabirds, size: int, seed: int):
        self.features = nabirds.features
        images = nabirds.pairs(*nabirds.scenes)
        self.names = [image.before for image in images]
        ids = [nabirds.vocab.index[image.captions[0]] for image in images]
        self.classes = np.array(ids) - len(SPECIAL)
        self.partners = partners(self.classes, seed)
        self.size = size

    def batch(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """-> before and after (B, C, H, W) and the classes (B, 2) of random pairs."""
        first = torch.randint(len(self.names), (self.size,)).numpy()
        second = self.partners[first]
        classes = np.stack([self.classes[first], self.classes[second]], 1)  # (B, 2)
        classes = torch.from_numpy(classes).to(device, non_blocking=True)
        return self.images(first, device), self.images(second, device), classes

    def images(self, numbers: np.ndarray, device: str) -> Tensor:
        """The features of these images (B, C, H, W)."""
        features = self.features.rows([self.names[i] for i in numbers])
        return features.to(device, non_blocking=True).float()


def partners(classes: np.ndarray, seed: int) -> np.ndarray:
    """The index of a partner for every image. Half of the images get one of the same class, if
    there is one, and the others one of another class (section 2.4)."""
    rng = np.random.default_rng(seed)
    places = np.arange(len(classes))
    alike = rng.permutation(len(classes)) < len(classes) // 2
    partner = []
    for i, c in enumerate(classes):
        same = (classes == c) & (places != i)
        fits = same if alike[i] and same.any() else classes != c
        partner.append(rng.choice(places[fits]))
    return np.array(partner)


def bird_losses(model, before: Tensor, after: Tensor, classes: Tensor) -> dict[str, Tensor]:
    """Section 2.4: images without captions train E_s and E_p of an IDC to tell the class of each,
    and whether both have the same. before, after (B, C, H, W), classes (B, 2)."""
    x_1, x_2 = model.encode_each(before, after)  # E_s of Eq. 4
    visual = model.pair(torch.cat([x_1, x_2], 1))  # E_p of Eq. 4
    alone = torch.cat([x_1[:, 0], x_2[:, 0]])  # [IMG1] and then [IMG2] of all pairs, (2B, D)
    both = model.image_tokens(visual).flatten(1)  # (B, 2D)
    class_of = classes.T.flatten()  # (2B,)
    is_same = (classes[:, 0] == classes[:, 1]).long()  # (B,)
    return {
        "class": F.cross_entropy(model.classify(alone), class_of),
        "contrast": contrast_loss(alone, class_of),
        "same_class": F.cross_entropy(model.same_class(both), is_same),
    }


def contrast_loss(x: Tensor, classes: Tensor, margin: float = 0.4) -> Tensor:
    """Section 2.4, TransFG's loss (He et al. 2021): it pulls cosines to 1 within a class and pushes
    them below the margin between classes. It is the mean over all ordered pairs of images, and each
    image also pairs with itself. x (2B, D), classes (2B,)."""
    with torch.autocast(x.device.type, enabled=False):
        x = F.normalize(upcast(x), dim=-1)
        cos = x @ x.T
        same = classes[:, None] == classes
        pull = 1 - cos
        push = (cos - margin).clamp(min=0)
        return torch.where(same, pull, push).mean()
