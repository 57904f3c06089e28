"""Tensors on disk: in one safetensors file or in several, read by rows.

The tensors called STEM are in STEM.safetensors. Above a size limit they are in STEM-00001-of-0000N.safetensors and so on, with
STEM.safetensors.index.json beside them, as Hugging Face's libraries name them.
"""

import json
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common import files
from common.errors import UserError
from common.records import FileName

# What is read of STEM.safetensors.index.json: the file of each tensor.
Index = TypedDict("Index", {"weight_map": Annotated[dict[str, FileName], Meta(min_length=1)]})


@dataclass(frozen=True)
class LazyTensor:
    """The tensor `name` of a safetensors file, or its rows from `first` on. Indexing it with a slice reads only those rows."""

    path: Path
    name: str
    dtype: str  # safetensors' name of it, such as F32
    shape: tuple[int, ...]
    transposed: bool = False  # its rows are the columns in the file
    first: int = 0

    def __getitem__(self, rows: slice) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            if not self.shape:
                return file.get_tensor(self.name)
            start, stop, _ = rows.indices(self.shape[0])
            rows, stored = slice(self.first + start, self.first + stop), file.get_slice(self.name)
            return stored[:, rows].t() if self.transposed else stored[rows]


@dataclass(frozen=True)
class Layout:
    """Which files hold the tensors called `stem`."""

    stem: str
    sizes: dict[str, int]  # bytes of each tensor
    tensors: dict[str, list[str]]  # names of the tensors in each file

    def write(
        self, directory: Path, tensors: dict[str, Tensor], dtype: torch.dtype, only: Container[str] | None = None
    ) -> list[Path]:
        """Write the files, or `only` some of them, with `tensors` as `dtype`. The same tensors give the same bytes."""
        paths, metadata = [], {"format": "pt"} if self.stem == "model" else None  # transformers asks a model for it
        for file, names in self.tensors.items():
            if only is None or file in only:
                paths.append(directory / file)
                paths[-1].touch()
                mode = paths[-1].stat().st_mode  # by the umask; only the owner can read a file that save_file makes
                save_file({name: tensors[name].detach().to(dtype).contiguous() for name in names}, paths[-1], metadata)
                paths[-1].chmod(mode)
        return paths

    def write_index(self, directory: Path) -> None:
        """Write the index, if there are several files."""
        if len(self.tensors) > 1:
            weight_map = {name: file for file, names in self.tensors.items() for name in names}
            index = {"metadata": {"total_size": sum(self.sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(directory / index_name(self.stem), index)


def lay_out(stem: str, sizes: dict[str, int], limit: float) -> Layout:
    """Divide tensors of `sizes` [bytes] among files of at most `limit` bytes; a larger tensor gets a file of its own."""
    groups, size = [[]], 0
    for name in sorted(sizes):
        if groups[-1] and size + sizes[name] > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += sizes[name]
    if len(groups) == 1:
        return Layout(stem, sizes, {f"{stem}.safetensors": groups[0]})
    return Layout(stem, sizes, {f"{stem}-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)})


def files_of(directory: Path, stem: str) -> list[Path]:
    """The files with the tensors called `stem`. Raises UserError where there are none."""
    index, single = directory / index_name(stem), directory / f"{stem}.safetensors"
    if index.exists():
        return [directory / name for name in sorted(set(files.read_json(index, Index)["weight_map"].values()))]
    if single.exists():
        return [single]
    there = files.shortened(sorted(path.name for path in directory.iterdir()))
    raise UserError(f"{directory} has no {single.name}, only {there}")


def open_tensors(directory: Path, stem: str) -> dict[str, LazyTensor]:
    """The tensors called `stem`, by name. Only headers are read. Raises UserError."""
    found = {}
    for path in files_of(directory, stem):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is not a dictionary)
                    header = file.get_slice(name)
                    found[name] = LazyTensor(path, name, header.get_dtype(), tuple(header.get_shape()))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: {error}") from None
    return found


def index_name(stem: str) -> str:
    """The file that says which file each tensor is in."""
    return f"{stem}.safetensors.index.json"


def write_json(path: Path, value: dict) -> None:
    """Write `value`, indented."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
