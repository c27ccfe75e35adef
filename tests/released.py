"""How the fixtures recorded from the released code were made: numbers that any language can
repeat."""

import math

import numpy as np
import torch


def hashed(n: int, j: int) -> np.ndarray:
    """The n first values of hash stream j in [-1, 1)."""
    with np.errstate(over="ignore"):
        h = np.arange(n, dtype=np.uint64) * 2654435761 + np.uint64(j) * 40503
        h = (h % 2**32).astype(np.uint32)
        h ^= h >> 16
        h = h * np.uint32(2246822519)
        h ^= h >> 13
    return h / 2**31 - 1


def linear(theirs: str, ours: str, *shape: int) -> dict[str, tuple]:
    """Map of a layer's weight and bias: released name -> (our name, shape)."""
    return {
        f"{theirs}.weight": (ours + ".weight", shape),
        f"{theirs}.bias": (ours + ".bias", shape[:1]),
    }


def fill(model: torch.nn.Module, maps: dict[int, dict[str, tuple]]) -> torch.nn.Module:
    """Weights of the fixture into the model, in float64. maps: base stream -> {released name: (our
    name, or names of what the release keeps as one tensor, or None; shape)}. LayerNorms and
    temperatures keep their first values."""
    model = model.double().eval()
    ours = dict(model.named_parameters())
    untouched = set(ours)
    for base, names in maps.items():
        for j, theirs in enumerate(sorted(names)):
            target, shape = names[theirs]
            if target is None or "norm" in str(target):
                continue
            n = math.prod(shape)
            scale = (n / shape[0]) ** -0.5 if len(shape) > 1 else 0.02
            value = (
                torch.from_numpy((hashed(n, base + j) * scale).astype(np.float32))
                .double()
                .reshape(shape)
            )
            targets = target if isinstance(target, list) else [target]
            for name, part in zip(targets, value.chunk(len(targets)), strict=True):
                ours[name].data.copy_(part.reshape(ours[name].shape))
                untouched.discard(name)
    assert all("norm" in name or "log_scale" in name for name in untouched), untouched
    return model


def inputs(words: int, length: int):
    """-> features before and after (3, 1024, 14, 14), captions (3, length) of a vocabulary of
    `words`."""
    before, after = (
        torch.from_numpy(np.maximum(0, hashed(3 * 1024 * 196, j)).astype(np.float32))
        .double()
        .view(3, 1024, 14, 14)
        for j in (1, 2)
    )
    caption = torch.zeros(3, length, dtype=torch.long)
    for b in range(3):
        n = 8 + 3 * b
        chosen = 4 + np.floor((hashed(n - 2, 10 + b) + 1) / 2 * (words - 4)).astype(int)
        caption[b, :n] = torch.tensor([2, *chosen, 3])
    return before, after, caption


def close(ours: torch.Tensor, recorded, atol: float = 1e-5) -> None:
    torch.testing.assert_close(
        ours.detach(), torch.tensor(recorded, dtype=torch.float64), atol=atol, rtol=0
    )
