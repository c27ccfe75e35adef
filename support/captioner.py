"""Captions of any two pictures, or of a table of pairs, by a trained model. Licence: MIT."""

import csv
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch.nn as nn
from PIL import Image
from torch import Tensor

from common import InputError
from support.extractors import Extractor, check_pictures, extractor_name, read_image
from support.files import file_errors
from support.own_pairs import read_table
from support.pictures import caption_picture
from support.run import load_model, saved_config, usable_device
from support.text import Vocab

# ---- captions of any two pictures ----------------------------------------------------------------


class Captioner:
    """A trained model that captions any two pictures (see read_image): caption, maps =
    captioner(before, after). maps: name -> attention map (H, W). model, state: from load_model.
    inputs(model, state, pictures) -> a further input of the model's generate and attention_map, one
    row per pair, or None; pictures are in the order before, after, before, after, ..."""

    def __init__(self, model: nn.Module, state: dict, inputs: Callable | None = None):
        self.model = model
        self.state = state
        self.inputs = inputs
        self.device = model.cfg.device
        self.vocab = Vocab(state["vocab"])
        self.extractor = Extractor(state["extractor"], self.device)

    def __call__(self, before, after) -> tuple[str, dict[str, Tensor]]:
        return next(self.pairs([(before, after)]))

    def pairs(self, pairs: list[tuple], batch: int = 16) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yields the caption and the maps of every pair in a list."""
        pictures = [picture for pair in pairs for picture in pair]
        # PIL images are read here, as two threads must not read the same one.
        pictures = [read_image(p) if isinstance(p, Image.Image) else p for p in pictures]
        rows = self.inputs(self.model, self.state, pictures) if self.inputs else None
        starts = range(0, len(pairs), batch)
        blocks = self.extractor.blocks(pictures, 2 * batch)
        for i, x in zip(starts, blocks, strict=True):
            x = x.to(self.device).float().unflatten(0, (-1, 2))  # (B, 2, C, H, W)
            before, after = x.unbind(1)
            inputs = [] if rows is None else [rows[i : i + batch]]
            ids = self.model.generate(before, after, *inputs)
            maps = self.model.attention_map(before, after, ids, *inputs)
            for n, caption in enumerate(self.vocab.decode(ids)):
                yield Vocab.sentence(caption), {name: heat[n] for name, heat in maps.items()}


def load_captioner(
    Model: Callable[..., nn.Module],
    Config: type,
    checkpoint: str | Path,
    device: str = "",
    extractor: str = "",
    inputs: Callable | None = None,
) -> Captioner:
    """A trained model for any two pictures. extractor: timm/MODEL:FILE says where FILE is now.
    InputError if it is another network or FILE than in training."""
    cfg = saved_config(Config, checkpoint)
    cfg.device = usable_device(device)
    model, state = load_model(Model, cfg, checkpoint)
    trained = state["extractor"]  # for timm/MODEL:FILE, it has a digest of FILE
    extractor = extractor or cfg.extractor or trained
    if extractor_name(extractor) != trained:
        remedy = f"{checkpoint} was trained on {trained}, so give that one"
        raise InputError(f"--extractor {extractor} is another network or FILE; {remedy}")
    state["extractor"] = extractor
    return Captioner(model, state, inputs)


# ---- files and tables ----------------------------------------------------------------------------


def check_out(out: str, endings: tuple[str, ...], files: Iterable[str | Path]) -> None:
    """InputError if `out` has none of the endings, is one of `files`, or is an old table."""
    path = Path(out)
    if path.suffix.lower() not in endings:
        raise InputError(f"--out {out}: expected a name that ends in {' or '.join(endings)}")
    if path.resolve() in {Path(file).resolve() for file in files}:
        raise InputError(f"--out {out} is one of the files to read; choose another name")
    if path.suffix.lower() == ".csv" and path.exists():  # interrupted, it has captions already
        raise InputError(f"--out {out} exists; choose another name, or move it away")
    path.parent.mkdir(parents=True, exist_ok=True)


def caption_files(captioner: Captioner, files: list[str], out: str | None) -> None:
    """Prints the caption of two image files, or of every pair of a CSV file with the columns before
    and after, whose paths are relative to it. `out` gets the attention picture or the table."""
    if len(files) == 1 and Path(files[0]).suffix.lower() == ".csv":
        caption_table(captioner, Path(files[0]), out)
        return
    if len(files) != 2:
        raise InputError(f"--caption {files}: expected two pictures or a .csv")
    if out:
        check_out(out, (".png", ".jpg", ".pdf"), files)
    caption, maps = captioner(*files)
    print(caption)
    if out:
        with file_errors(out, "choose another name, or leave out --out"):
            caption_picture(*map(read_image, files), maps, caption, Path(out))


def caption_table(captioner: Captioner, file: Path, out: str | None) -> None:
    """Captions every pair of a CSV file. `out` gets the same table with one more column."""
    table = read_table(file, ("before", "after"))
    pairs = [(file.parent / row["before"], file.parent / row["after"]) for row in table.rows]
    lines = {}  # picture -> the last line that names it
    for pair, number in zip(pairs, table.numbers, strict=True):
        lines |= dict.fromkeys(pair, number)
    pictures = list(lines)
    if out:
        check_out(out, (".csv",), [file, *pictures])
        if any("caption" in row for row in table.rows):
            raise InputError(f"{file} has a column caption, which --out would add; rename it")
    check_pictures(pictures, lines)  # so that none stops the work halfway
    captions = captioner.pairs(pairs)
    heads, *lines = table.lines
    # With a buffer of one line, each row is in the file as soon as it is made.
    with open(out or os.devnull, "w", buffering=1, encoding="utf-8", newline="") as f:
        f.write(table.mark)
        writer = csv.writer(f, delimiter=table.separator, lineterminator="\n")
        writer.writerow([*heads, "caption"])
        for row, cells, (caption, _) in zip(table.rows, lines, captions, strict=True):
            print(f"{row['before']} {row['after']}: {caption}", flush=True)
            writer.writerow([*cells, caption])
