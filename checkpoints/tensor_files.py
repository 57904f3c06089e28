"""Tensors on disk: in one safetensors file or in several, read by rows.

The tensors called STEM are in STEM.safetensors, or from a size on in STEM-00001-of-0000N.safetensors and so on, with
STEM.safetensors.index.json beside them. Hugging Face's libraries name and read them so.
"""

import json
from collections.abc import Iterable
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
class Stored:
    """A tensor of ours in a safetensors file. Indexing it with a slice of rows reads these rows and nothing else.

    It is the tensor `name` of the file. If `transposed`, its rows are the columns there. It begins at row `first`.
    """

    path: Path
    name: str
    dtype: str  # safetensors' name of it, such as F32
    shape: tuple[int, ...]
    transposed: bool = False
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
    """In which files the tensors called `stem` are."""

    stem: str
    sizes: dict[str, int]  # bytes of each tensor
    tensors: dict[str, list[str]]  # names of the tensors in each file

    def write_index(self, directory: Path) -> None:
        """Write the index, if there are several files."""
        if len(self.tensors) > 1:
            weight_map = {name: file for file, names in self.tensors.items() for name in names}
            index = {"metadata": {"total_size": sum(self.sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(directory / index_name(self.stem), index)


def lay_out(stem: str, sizes: dict[str, int], limit: float) -> Layout:
    """Divide tensors of `sizes` [bytes] among files of at most `limit` bytes. A larger tensor has a file of its own.

    The result depends on names and sizes alone, so the same tensors are always in the same files.
    """
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


def write(
    directory: Path,
    layout: Layout,
    tensors: dict[str, Tensor],
    dtype: torch.dtype = torch.float32,
    only: Iterable[str] | None = None,
) -> list[Path]:
    """Write the files of `layout`, or `only` those named so, with `tensors` as `dtype`. The same tensors give the same bytes.

    Returns their paths.
    """
    paths, metadata = [], {"format": "pt"} if layout.stem == "model" else None  # transformers asks a model for it
    for file, names in layout.tensors.items():
        if only is None or file in only:
            paths.append(directory / file)
            paths[-1].touch()
            mode = paths[-1].stat().st_mode  # as the umask says; save_file makes a file of its own that only its owner reads
            save_file({name: tensors[name].detach().to(dtype).contiguous() for name in names}, paths[-1], metadata)
            paths[-1].chmod(mode)
    return paths


def files_of(directory: Path, stem: str) -> list[Path]:
    """The files with the tensors called `stem`, and their index if there is one. Raises UserError where there are none."""
    index, single = directory / index_name(stem), directory / f"{stem}.safetensors"
    if index.exists():
        return [*(directory / name for name in sorted(set(files.read_json(index, Index)["weight_map"].values()))), index]
    if single.exists():
        return [single]
    raise UserError(f"{directory} has no {single.name}, only {files.listing(directory)}")


def open_tensors(directory: Path, stem: str) -> dict[str, Stored]:
    """The tensors called `stem`, by name. Only headers are read. Raises UserError."""
    tensors = {}
    for path in files_of(directory, stem):
        tensors |= open_file(path) if path.suffix == ".safetensors" else {}
    return tensors


def open_file(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name. Only its header is read. Raises UserError."""
    found = {}
    try:
        with safe_open(files.require_regular(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                header = file.get_slice(name)
                found[name] = Stored(path, name, header.get_dtype(), tuple(header.get_shape()))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: {error}") from None
    return found


def index_name(stem: str) -> str:
    """The file that says in which file each tensor is."""
    return f"{stem}.safetensors.index.json"


def write_json(path: Path, value: dict) -> None:
    """Write `value`, indented."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
