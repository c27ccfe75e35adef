"""Feature files: grid features of a data set's pictures, read by image name. Licence: MIT."""

import hashlib
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor

from common import InputError
from support.files import atomic_write, file_errors, progress
from support.threads import in_threads

AUTHORS_FILES = "the authors' .npy files"  # the attribute `preprocessing` of such feature files


def authors_features(picture: Path) -> Path:
    """The authors' features of a picture: sc_images/x.png -> sc_features/x.png.npy"""
    folder = picture.parent.name.replace("images", "features")
    return picture.parent.with_name(folder) / f"{picture.name}.npy"


def read_npy(path: Path) -> np.ndarray:
    """A feature map (C, H, W) published by the authors."""
    with file_errors(path, "fetch it again"):
        return np.load(path)  # refuses pickles, which could run arbitrary code


def write_features(
    path: Path, files: dict[str, Path], blocks: Iterable, extractor: str, preprocessing: str
) -> None:
    """Write a feature file: `features` (n, C, H, W) float16, not chunked; `image_ids` (n,);
    `stamps` (n, 3). files: image name -> the file that its features are made from. `blocks` yields
    arrays (b, C, H, W) in this order. InputError if a feature is NaN or too large for float16."""
    names = list(files)
    done = 0
    stamps = []
    bar = progress(total=len(names), desc="features", unit="image")
    with bar, atomic_write(path) as temporary, h5py.File(temporary, "w") as f:
        f.attrs.update(extractor=extractor, preprocessing=preprocessing)
        f["image_ids"] = names
        for block in blocks:
            if not done:
                shape = (len(names), *block.shape[1:])
                table = f.create_dataset("features", shape, "float16", fill_time="never")
            if not np.abs(block).max() <= np.finfo(np.float16).max:  # phrased to refuse NaN, too
                raise InputError(f"features of {names[done]!r} or soon after are NaN or too large")
            table[done : done + len(block)] = block.astype(np.float16)
            stamps += [stamp(files[name]) for name in names[done : done + len(block)]]
            done += len(block)
            bar.update(len(block))
        assert done == len(names), f"{done} feature maps for {len(names)} images"
        f["stamps"] = np.array(stamps, np.int64)


def stamp(file: Path) -> tuple[int, int, int]:
    """A file's size in bytes, its modification time in ns and a checksum of its content."""
    status = file.stat()
    # Not CRC-32: a PNG holds CRCs of its own.
    checksum = hashlib.blake2b(file.read_bytes(), digest_size=7).digest()  # fits int64
    return status.st_size, status.st_mtime_ns, int.from_bytes(checksum, "big")


READ_AHEAD = 128 * 1024  # bytes; Linux may fetch no more of what one call announces


class Features:
    """A feature file whose rows are read by image name, for use on `device`. Rows come from the
    memory-mapped file, which the system caches as far as memory allows. On CUDA, they come from the
    GPU if place is "gpu", or if it is "auto" and all rows fill less than 60 % of its free memory.
    command: what makes the file, for errors. blind: rows are zeros, so a model sees no images."""

    def __init__(
        self, path: Path, command: str, extractor: str, device="cpu", place="file", blind=False
    ):
        if not path.exists():
            found = ""
            for other in sorted(path.parent.glob("features*.h5")):
                with file_errors(other, "delete it"), h5py.File(other) as f:
                    model, colon, _ = f.attrs["extractor"].partition(":")
                found += f"; or, for {other.name}, add --extractor {model}{colon and ':FILE'}"
            raise FileNotFoundError(f"no features at {path}; run: {command}{found}")
        self.path = path
        self.remedy = f"delete {path.name} and run: {command}"
        with file_errors(path, self.remedy), h5py.File(path) as f:
            table = f["features"]
            names = f["image_ids"].asstr()[:]
            self.stamps = dict(zip(names, f["stamps"][:].tolist(), strict=True))
            self.extractor = f.attrs["extractor"]
            self.preprocessing = f.attrs["preprocessing"]
            self.row_of = {name: i for i, name in enumerate(names)}
            shape = table.shape
            self.offset = table.id.get_offset()
        if self.extractor != extractor:
            raise InputError(f"{path} was made by {self.extractor}, not {extractor}; {self.remedy}")
        self.file = open(path, "rb")  # stays open, for `announce`
        # h5py reads rows in sorted order only. Nothing writes to the map, of which PyTorch warns.
        # One that could be written to would need as much memory as the file is large.
        table = np.memmap(self.file, np.float16, "r", self.offset, shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.data = torch.from_numpy(table)
        self.device = device
        self.blind = blind
        if device.startswith("cuda"):
            # This call also initialises CUDA on this GPU. Otherwise its first use could be to pin
            # memory in the thread of `prefetch`, which would pick GPU 0.
            free, _ = torch.cuda.mem_get_info(device)
            if place == "gpu" or (place == "auto" and self.data.nbytes < 0.6 * free):
                self.data = self.data.to(device)

    def announce(self, index: list[int]) -> None:
        """Tells the system which rows of the file are read next, so that it fetches many at once.
        Without that, the map's page faults wait for the disk one by one."""
        if not hasattr(os, "posix_fadvise"):  # macOS, Windows
            return
        size = self.data[0].nbytes
        for i in index:
            end = self.offset + (i + 1) * size
            for start in range(end - size, end, READ_AHEAD):
                length = min(READ_AHEAD, end - start)
                # Unlike mmap's madvise, this lets other threads run while it waits.
                os.posix_fadvise(self.file.fileno(), start, length, os.POSIX_FADV_WILLNEED)

    def rows(self, names: list[str]) -> Tensor:
        """Features of the named images (n, C, H, W) float16, in RAM or on their way to the GPU."""
        index = torch.tensor([self.row_of[name] for name in names])
        shape = (len(index), *self.data.shape[1:])
        if self.blind:
            return torch.zeros(shape, dtype=torch.float16)
        if self.data.is_cuda:
            # Indexing by the list itself would wait for what the GPU has to do before.
            return self.data[index.to(self.data.device, non_blocking=True)]
        self.announce(index.tolist())
        if not self.device.startswith("cuda"):
            # PyTorch would copy in threads of its own. With more OpenMP threads than cores, threads
            # sleep between operations, and training would run half as fast.
            return torch.from_numpy(self.data.numpy()[index.numpy()])
        rows = torch.empty(shape, dtype=torch.float16, pin_memory=True)
        torch.index_select(self.data, 0, index, out=rows)  # in several threads, unlike NumPy
        return rows.to(self.device, non_blocking=True)

    def content(self, name: str) -> int:
        """The checksum of the file that a row was made from: equal for copies of a picture."""
        _, _, checksum = self.stamps[name]
        return checksum

    def require(self, paths: dict[str, Path]) -> None:
        """InputError if an image has no features, or its file has been replaced since then."""
        touched = {}  # files of another time, by image name
        for name, picture in progress(paths.items(), desc="files", unit="file", delay=1):
            if name not in self.row_of:
                raise InputError(f"{self.path} has no features of {name}; {self.remedy}")
            file = authors_features(picture) if self.preprocessing == AUTHORS_FILES else picture
            if file.exists():  # features may be shared without the files they were made from
                size, time, _ = self.stamps[name]
                status = file.stat()
                if (status.st_size, status.st_mtime_ns) != (size, time):
                    touched[name] = file
        # A copied file may have a new time, so its content decides.
        stamps = in_threads(stamp, list(touched.values()))
        bar = progress(stamps, desc="copied files", total=len(touched), unit="file", delay=1)
        for name, (_, _, checksum) in zip(touched, bar, strict=True):
            if checksum != self.content(name):
                replaced = f"{self.path} was made before {touched[name]} was replaced"
                raise InputError(f"{replaced}; {self.remedy}")
