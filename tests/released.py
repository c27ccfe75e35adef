"""What tests and tools/authors.py know of the authors' code: how its parameters are called, and the
weights and inputs for which released.json has what it computes. These weights and inputs are
numbers that any language can repeat. `python tools/authors.py record CLONE` makes released.json.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

import idc_pretrain

# Data set -> words of the vocabulary, longest caption, channels with coordinates
SIZES = {"clevr_change": (76, 24, 1026), "clevr_dc": (87, 40, 1024)}
RECORDED = Path(__file__).with_name("released.json")
IDS = 8  # of a greedy caption are recorded
# Method and data set or stage -> their parameters of whose gradients the norms are recorded
GRADIENTS = {
    ("SCORER", "clevr_change"): [
        "img.0.weight",
        "core.embed.weight",
        "scorer.1.attention.query.weight",
        "scorer.1.attention.logit_scale",
    ],
    ("DIRL", "clevr_change"): [
        "img.0.weight",
        "core.embed.weight",
        "mlp.0.weight",
        "transformer.0.attention.in_proj_weight",
    ],
    ("IDC", "pretrain"): [
        "img_project.0.weight",
        "word_embedding.weight",
        "position_encoding.type_pe.weight",
        "double_img_encoder.layers.0.attn.q_linear.weight",
        "encoder.layers.2.attn.v_linear.weight",
    ],
    ("IDC", "finetune"): [
        "img_project.0.weight",
        "word_embedding.weight",
        "single_img_encoder.layers.0.attn.k_linear.weight",
        "pooler.0.weight",
    ],
}
GRADIENTS["DIRL", "clevr_dc"] = GRADIENTS["DIRL", "clevr_change"]
NAMES = dict[str, tuple]  # their parameter -> (our name, or names of its parts, or None; shape)


def recorded(method: str, title: str = "clevr_change") -> dict:
    """What the authors' code computed, rounded. title: a data set or, for IDC, a stage."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))[method][title]


# ---- names of parameters -------------------------------------------------------------------------


def linear(theirs: str, ours: str, *shape: int) -> NAMES:
    """Map of a layer's weight and bias: released name -> (our name, shape)."""
    return {
        f"{theirs}.weight": (ours + ".weight", shape),
        f"{theirs}.bias": (ours + ".bias", shape[:1]),
    }


def parts_of(theirs: str, names: NAMES) -> list[str]:
    """Our names of what the authors keep as one tensor."""
    target, _ = names[theirs]
    if target is None:
        return []
    return target if isinstance(target, list) else [target]


def merged(maps: dict[int, NAMES]) -> NAMES:
    """The names of all base streams."""
    result = {}
    for names in maps.values():
        result |= names
    return result


def scorer_names(layers: int = 2) -> dict[int, NAMES]:
    """Base stream -> names of SCORER's encoder, decoder and CBR. Only the scale of the last of the
    encoder's layers is used."""
    encoder = linear("img.0", "embed.conv", 512, 1026, 1, 1)
    encoder |= linear("embed_fc.0", "fuse.project", 512, 1024)
    encoder["w_embedding.weight"] = ("embed.position.col.weight", (14, 256))
    encoder["h_embedding.weight"] = ("embed.position.row.weight", (14, 256))
    for i in range(2):
        theirs = f"scorer.{i}.attention"
        for name in ("query", "key", "value"):
            encoder |= linear(f"{theirs}.{name}", f"cross_view.{i}.attention.{name}", 512, 512)
        encoder |= linear(f"{theirs}.layer_norm", f"cross_view.{i}.norm", 512)
        encoder[f"{theirs}.logit_scale"] = ("match.log_scale" if i == layers - 1 else None, ())
    decoder = linear("core.fc.0", "decoder.project", 512, 300)
    decoder |= linear("core.fc.2", "decoder.norm", 512)
    decoder |= linear("logit", "decoder.head", 76, 512)
    decoder["core.embed.weight"] = ("decoder.embed.weight", (76, 300))
    for i in range(2):
        theirs = f"core.layer.{i}"
        ours = f"decoder.layers.{i}"
        for name in ("query", "key", "value"):
            self_attention = f"{ours}.self_attention.{name}"
            cross_attention = f"{ours}.cross_attention.{name}"
            decoder |= linear(f"{theirs}.self_attention.{name}", self_attention, 512, 512)
            decoder |= linear(f"{theirs}.dec_enc_attention.{name}", cross_attention, 512, 512)
        decoder |= linear(f"{theirs}.norm1", f"{ours}.norm1", 512)
        decoder |= linear(f"{theirs}.norm2", f"{ours}.norm2", 512)
        decoder |= linear(f"{theirs}.output.LayerNorm", f"{ours}.norm3", 512)
        decoder |= linear(f"{theirs}.hidden_intermediate.dense", f"{ours}.widen", 512, 512)
        decoder |= linear(f"{theirs}.output.dense", f"{ours}.output", 512, 512)
    cbr = linear("conv1", "reasoning.join", 512, 1024, 1, 1)
    cbr |= linear("conv2.0", "reasoning.output", 512, 512, 1, 1)
    cbr["mh_att.in_proj_weight"] = ("reasoning.attention.in_proj_weight", (1536, 512))
    cbr["mh_att.out_proj.weight"] = ("reasoning.attention.out_proj.weight", (512, 512))
    cbr["contra.logit_scale"] = ("reasoning.match.log_scale", ())
    cbr |= linear("contra.query", "reasoning.query", 512, 512)
    cbr |= linear("contra.key", "reasoning.key", 512, 512)
    return {100: encoder, 300: decoder, 500: cbr}


def attention(theirs: str, ours: str) -> NAMES:
    """The names of a torch.nn.MultiheadAttention."""
    parts = ("query", "key", "value")
    weights = [f"{ours}.{name}.weight" for name in parts]
    biases = [f"{ours}.{name}.bias" for name in parts]
    names = linear(f"{theirs}.out_proj", f"{ours}.out", 512, 512)
    names[f"{theirs}.in_proj_weight"] = (weights, (1536, 512))
    names[f"{theirs}.in_proj_bias"] = (biases, (1536,))
    return names


def dirl_names(words: int, channels: int, normed: bool) -> dict[int, NAMES]:
    """Base stream -> names of DIRL's encoder and decoder. normed: with LayerNorms on the decoder's
    inputs."""
    encoder = linear("img.0", "embed.conv", 512, channels, 1, 1)
    encoder |= linear("mlp.0", "mlp.0", 2048, 512)
    encoder |= linear("mlp.3", "mlp.3", 512, 2048)
    encoder["w_embedding.weight"] = ("embed.position.col.weight", (14, 256))
    encoder["h_embedding.weight"] = ("embed.position.row.weight", (14, 256))
    for i in range(2):
        encoder |= attention(f"transformer.{i}.attention", f"cross_view.{i}.attention")
        encoder |= linear(f"transformer.{i}.norm1", f"cross_view.{i}.norm", 512)
    decoder = linear("core.fc.0", "decoder.project", 512, 300)
    decoder |= linear("core.embed_fc.0", "fuse.project", 512, 1024)
    decoder |= linear("logit", "decoder.head", words, 512)
    decoder["core.embed.weight"] = ("decoder.embed.weight", (words, 300))
    if normed:
        decoder |= linear("core.fc.1", "decoder.norm", 512)
        decoder |= linear("core.embed_fc.1", "fuse.norm", 512)
    for i in range(2):
        theirs = f"core.layer.{i}"
        ours = f"decoder.layers.{i}"
        decoder |= attention(f"{theirs}.self_att", f"{ours}.self_attention")
        decoder |= attention(f"{theirs}.cross_att", f"{ours}.cross_attention")
        for norm in ("norm1", "norm2", "norm3"):
            decoder |= linear(f"{theirs}.{norm}", f"{ours}.{norm}", 512)
        decoder |= linear(f"{theirs}.linear1", f"{ours}.widen", 2048, 512)
        decoder |= linear(f"{theirs}.linear2", f"{ours}.output", 512, 2048)
    return {100: encoder, 300: decoder}


IDC_ENCODERS = {"single_img_encoder": "single", "double_img_encoder": "pair", "encoder": "cross"}


def idc_names() -> dict[int, NAMES]:
    """Base stream -> names of IDC's pre-training and fine-tuning. Rows are in our order, without
    those that we do not have."""
    names = linear("img_project.0", "embed.project", 512, 2048)
    names["word_embedding.weight"] = ("embed.table.weight", (78, 512))
    names["position_encoding.type_pe.weight"] = ("embed.types.weight", (6, 512))
    names |= linear("output_layer", "head", 76, 512)
    names |= linear("pooler.0", "judge", 2, 1024)
    names |= linear("feat_regress.net.0", "cell_head.0", 512, 512)
    names["feat_regress.net.2.a_2"] = ("cell_head.2.weight", (512,))
    names["feat_regress.net.2.b_2"] = ("cell_head.2.bias", (512,))
    names["feat_regress.bias"] = ("cell_bias", (2048,))
    for encoder, name in IDC_ENCODERS.items():
        for i in range(3 if name == "cross" else 1):
            theirs = f"{encoder}.layers.{i}"
            ours = f"{name}.blocks.{i}"
            names |= linear(f"{theirs}.attn.q_linear", f"{ours}.attention.query", 512, 512)
            names |= linear(f"{theirs}.attn.k_linear", f"{ours}.attention.key", 512, 512)
            names |= linear(f"{theirs}.attn.v_linear", f"{ours}.attention.value", 512, 512)
            names |= linear(f"{theirs}.attn.out", f"{ours}.attention.out", 512, 512)
            names |= linear(f"{theirs}.feed_forward.w_1", f"{ours}.widen", 2048, 512)
            names |= linear(f"{theirs}.feed_forward.w_2", f"{ours}.output", 512, 2048)
    return {100: names, 0: idc_norms()}


def idc_norms() -> NAMES:
    """LayerNorms of IDC. They are not among its streams."""
    norms = {"position_encoding.layernorm": "embed.norm"}
    for encoder, name in IDC_ENCODERS.items():
        norms[f"{encoder}.norm"] = f"{name}.norm"
        for i in range(3 if name == "cross" else 1):
            for n in (0, 1):
                theirs = f"{encoder}.layers.{i}.sublayer.{n}.norm"
                norms[theirs] = f"{name}.blocks.{i}.norm{n + 1}"
    names = {}
    for theirs, ours in norms.items():
        names[f"{theirs}.a_2"] = (f"{ours}.weight", (512,))
        names[f"{theirs}.b_2"] = (f"{ours}.bias", (512,))
    return names


class ReleasedNorm(torch.nn.LayerNorm):
    """IDC's released LayerNorm: the variance divides by n - 1, epsilon is added to its root."""

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        eps = min(self.eps, 1e-6)
        return self.weight * x / (x.std(-1, keepdim=True) + eps) + self.bias


# ---- weights and inputs --------------------------------------------------------------------------


def hashed(n: int, j: int) -> np.ndarray:
    """The n first values of hash stream j in [-1, 1)."""
    with np.errstate(over="ignore"):
        h = np.arange(n, dtype=np.uint64) * 2654435761 + np.uint64(j) * 40503
        h = (h % 2**32).astype(np.uint32)
        h ^= h >> 16
        h = h * np.uint32(2246822519)
        h ^= h >> 13
    return h / 2**31 - 1


def streams(maps: dict[int, NAMES]) -> Iterator[tuple[str, torch.Tensor]]:
    """Their parameters, by name, and the weights that they get. maps: base stream -> names.
    LayerNorms and temperatures keep their first values."""
    for base, names in maps.items():
        for j, theirs in enumerate(sorted(names)):
            target, shape = names[theirs]
            if target is None or "norm" in str(target) or "log_scale" in str(target):
                continue
            n = math.prod(shape)
            scale = (n / shape[0]) ** -0.5 if len(shape) > 1 else 0.02
            value = torch.from_numpy((hashed(n, base + j) * scale).astype(np.float32))
            if theirs == "logit.bias":
                value[:4] = -1  # otherwise, greedy captions may have no word
            yield theirs, value.double().reshape(shape)


def fill(model: torch.nn.Module, maps: dict[int, NAMES]) -> torch.nn.Module:
    """These weights into our model, in float64."""
    model = model.double().eval()
    ours = dict(model.named_parameters())
    untouched = set(ours)
    all_names = merged(maps)
    for theirs, value in streams(maps):
        targets = parts_of(theirs, all_names)
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


def idc_inputs() -> dict[str, torch.Tensor]:
    """What IDC's losses are recorded for: features before and after (3, 2048, 7, 7), captions
    (3, 24) and, in the place of what chance would choose, words and cells that are masked by a
    fixed rule, rewritten captions, and which pairs changed."""
    before, after, caption = inputs(76, 24)
    before = before.flatten(1)[:, : 2048 * 49].view(3, 2048, 7, 7)
    after = after.flatten(1)[:, : 2048 * 49].view(3, 2048, 7, 7)
    chosen = caption > 2  # words and END
    chosen[:, ::3] = False
    cells = torch.zeros(3, 2, 49, dtype=torch.bool)
    cells[0, 0, ::5] = True
    cells[1, 1, ::7] = True
    cells[2, 0, ::6] = True
    other_words = 4 + (caption[:, None] - 4 + 7 * torch.arange(1, 7)[:, None]) % 72
    return {
        "before": before,
        "after": after,
        "caption": caption,
        "ids": caption.masked_fill(chosen, 76),  # [MASK]
        "target": caption.masked_fill(~chosen, 0),
        "places": cells.flatten().nonzero().flatten(),
        "rewritten": torch.where(caption[:, None] > 3, other_words, caption[:, None]),
        "changed": torch.tensor([True, False, True]),
    }


def idc_losses(model, x: dict[str, torch.Tensor], stage: str) -> dict[str, torch.Tensor]:
    """Our losses of a stage, "pretrain" or "finetune", with the masks of idc_inputs."""
    masked = (x["ids"], x["target"])
    masks_of_words = patch.object(idc_pretrain, "released_mask_words", lambda *_: masked)
    masks_of_cells = patch.object(idc_pretrain, "mask_cells", lambda *_: x["places"])
    pairs = (x["before"], x["after"], x["caption"])
    with masks_of_words, masks_of_cells:
        if stage == "finetune":
            return model(*pairs, x["changed"])
        losses = model(*pairs, task="mlm") | model(*pairs, task="mvcl")
        return losses | model(*pairs, x["rewritten"], task="fda")


def total(losses: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum whose gradients are recorded."""
    weights = {"match": 0.1, "cbr": 0.001, "dirl": 0.03, "ccr": 0.05}
    return sum(weights.get(name, 1) * loss for name, loss in losses.items())


# ---- comparison ----------------------------------------------------------------------------------


def close(ours: torch.Tensor, recorded, atol: float = 1e-5) -> None:
    torch.testing.assert_close(
        ours.detach(), torch.tensor(recorded, dtype=torch.float64), atol=atol, rtol=0
    )


def close_gradients(
    model: torch.nn.Module, maps: dict[int, NAMES], norms: dict[str, float]
) -> None:
    """Are these the norms of our gradients? norms: their parameter -> norm."""
    ours = dict(model.named_parameters())
    for theirs, norm in norms.items():
        parts = [ours[name].grad.flatten() for name in parts_of(theirs, merged(maps))]
        close(torch.cat(parts).norm(), norm, atol=max(1e-5, 1e-6 * norm))
