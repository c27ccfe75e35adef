"""Your own pairs of pictures, in a table that people edit. Licence: MIT."""

import csv
import hashlib
import io
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common import InputError
from support.files import file_errors
from support.pairs import Pair, Release, release_from_pairs
from support.text import normalised


@dataclass
class Table:
    """A table that people edit, without empty rows."""

    mark: str  # a byte order mark, by which spreadsheets know UTF-8, or nothing
    separator: str
    lines: list[list[str]]  # names of the columns and cells of the rows, as they were written
    rows: list[dict[str, str]]  # the same rows: {column in lower case: cell without outer blanks}
    numbers: list[int]  # of each row's first line in the file


def read_table(path: Path, columns: Iterable[str], quoting: int = csv.QUOTE_MINIMAL) -> Table:
    """Reads a table in UTF-8. Its first line names the columns. Each of `columns` must be there,
    with a text in every row. InputError names the lines with a fault."""
    with open(path, encoding="utf-8") as f, file_errors(path, "save it as UTF-8, as a CSV"):
        text = f.read()  # CR, LF or both end a line
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    text = text.removeprefix(mark)
    separator = max(",;\t", key=text.partition("\n")[0].count)
    syntax = {"delimiter": separator, "quoting": quoting, "skipinitialspace": True}
    reader = csv.reader(io.StringIO(text), strict=True, **syntax)
    found = {}  # the number of a row's first line -> its cells
    number = 1
    try:
        for cells in reader:
            found[number] = cells
            number = reader.line_num + 1
    except csv.Error as e:
        remedy = "close every quote, and write a quote inside quotes twice"
        raise InputError(f"{path}, line {number}: {e}; {remedy}") from e
    heads = found.pop(1, [])
    names = [normalised(head).strip().lower() for head in heads]
    for column in columns:
        if names.count(column) != 1:
            place = f"{path}, line 1: found the columns {', '.join(names)!r:.60}"
            raise InputError(f"{place}, expected one that is named {column}")
    table = Table(mark, separator, [heads], [], [])
    empty = []  # cells
    for number, cells in found.items():
        place = f"{path}, line {number}"
        if any(cell.strip() for cell in cells[len(heads) :]):
            counts = f"expected {len(heads)} cells, found {len(cells)}"
            raise InputError(f"{place}: {counts}; put double quotes around one with {separator!r}")
        if any("\n" in cell.strip() for cell in cells):  # a quote that another row's closes?
            raise InputError(f"{place}: a cell has a line break; remove it, or close its quote")
        if any("\0" in cell for cell in cells):
            raise InputError(f"{place}: there is a NUL character; remove it, or save as UTF-8")
        cells = (cells + [""] * len(heads))[: len(heads)]
        row = {name: cell.strip() for name, cell in zip(names, cells, strict=True) if name}
        if not any(row.values()):
            continue
        empty += [f"line {number}: {column}" for column in columns if not row[column]]
        for column in {"before", "after"} & row.keys():
            row[column] = row[column].replace("\\", "/")  # as Windows writes paths
        table.lines.append(cells)
        table.rows.append(row)
        table.numbers.append(number)
    if empty:
        these = f"{path}: empty cells: {', '.join(empty[:10])} ({len(empty)} in all)"
        raise InputError(f"{these}; fill them, or delete their rows")
    return table


def own_pair(row: dict[str, str]) -> Pair:
    """The pair in a row of your own table. Its id is made of its two paths."""
    before = posixpath.normpath(row["before"])  # "./a.png" is "a.png"
    after = posixpath.normpath(row["after"])
    texts = row["captions"].replace("\uff5c", "|").split("|")  # Chinese keyboards have ｜
    captions = [" ".join(text.split()) for text in texts if re.search(r"\w", text)]
    return Pair(f"{before} {after}", before, after, captions)


def hashed_split(pair: Pair) -> str:
    """A split for a pair: 80 % train, 10 % val, 10 % test, by a hash of the path that is first in
    the alphabet. So a pair and its reverse share a split, and so do all pairs with that path."""
    first = min(pair.before, pair.after)
    tenth = int(hashlib.sha256(first.encode()).hexdigest(), 16) % 10
    return {8: "val", 9: "test"}.get(tenth, "train")


# What programs write into cells without a text: pandas, R, MySQL, spreadsheets.
EMPTY_CELLS = {*r"nan none null na \n <na> n/a #n/a #name? #ref! #value!".split()}
PRINTED_LIST = re.compile(r"""[\[({]["'{\]]""")  # how a list begins that a program has printed


def kind_name(text: str) -> str:
    """A kind of change in normal characters. All spellings of "no change" ("No_change") are one."""
    text = " ".join(normalised(text).split())
    if re.fullmatch(r"[\W_]*no[\W_]*change[\W_]*", text, re.IGNORECASE):
        return "no change"
    return text


def read_pairs(root: Path) -> Release:
    """Your own pairs: pairs.csv with the columns before, after and, as the last one, captions.
    Paths are relative to the folder. A | separates captions; a pair may also have several rows.
    `split` (train, val or test; without it: hashed_split) and `kind` (of change) are optional."""
    file = root / "pairs.csv"
    table = read_table(file, ("before", "after", "captions"))
    columns = list(table.rows[0]) if table.rows else ["split", "captions"]
    if columns[-1] != "captions":  # there, a comma without quotes makes a cell too many
        raise InputError(f"{file}: the last column is {columns[-1]}; it must be captions")
    pairs = defaultdict(list)
    kinds = defaultdict(set)
    kind_of: dict[str, str] = {}
    no_text = []
    lines = {}  # picture -> the last line that names it
    for row, number in zip(table.rows, table.numbers, strict=True):
        pair = own_pair(row)
        lines[root / pair.before] = number
        lines[root / pair.after] = number
        for caption in pair.captions:
            if caption.lower() in EMPTY_CELLS or PRINTED_LIST.match(caption):
                no_text.append(f"{pair.id} has the caption {caption!r:.60}")
        kind = kind_name(row.get("kind", ""))
        if kind_of.setdefault(pair.id, kind) != kind:
            raise InputError(f"{file}: {pair.id} is both {kind_of[pair.id]!r} and {kind!r}")
        if kind:
            kinds[kind].add(pair.id)
        split = row["split"].lower() if "split" in row else hashed_split(pair)
        pairs[split].append(pair)
    if no_text:
        remedy = "write plain text, with | between captions, or leave it out"
        raise InputError(f"{file}: {', '.join(no_text[:10])}; {remedy}")
    unused = {*columns} - {"before", "after", "captions", "split", "kind"}
    notes = [f"{file}: the column {column!r} is not used" for column in sorted(unused)]
    if "split" not in columns:
        chosen = "has no column split, so a hash of the paths chooses about a tenth of the pairs"
        notes.append(f"{file} {chosen} for validation and a tenth for test")
    if "no change" not in kinds:
        counted = "so changes claimed wrongly are not counted (rename kinds such as 'unchanged')"
        notes.append(f"no pair has the kind 'no change', {counted}")
    release = release_from_pairs(pairs, root, kinds, notes)
    release.lines = lines
    return release
