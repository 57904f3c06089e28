"""Store tensors in one or more safetensors files, and read them by rows.

A set of tensors called STEM is stored in STEM.safetensors. Above a size limit, the set is split into files named
STEM-00001-of-0000N.safetensors and so on, and STEM.safetensors.index.json lists them. Hugging Face's libraries use these names.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lockstep.common import files
from lockstep.common.errors import RunError, UserError
from lockstep.common.records import FileName

Layout = dict[str, dict[str, int]]  # for each file of a stem, the size in bytes of each tensor in it
INDEX = ".safetensors.index.json"
# The part of an index that we read: the file of each tensor.
Index = TypedDict("Index", {"weight_map": Annotated[dict[str, FileName], Meta(min_length=1)]})


@dataclass(frozen=True)
class LazyTensor:
    """The tensor `name` of a safetensors file, or its rows from `first` on. Slicing it reads only the selected rows."""

    path: Path
    name: str
    dtype: str  # as safetensors names it, such as F32
    shape: tuple[int, ...]
    transposed: bool = False  # whether its rows are columns in the file
    first: int = 0

    def __getitem__(self, rows: slice) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            if not self.shape:
                return file.get_tensor(self.name)
            start, stop, _ = rows.indices(self.shape[0])
            rows, stored = slice(self.first + start, self.first + stop), file.get_slice(self.name)
            return stored[:, rows].t() if self.transposed else stored[rows]


def lay_out(stem: str, sizes: dict[str, int], limit: float) -> Layout:
    """Divide tensors of `sizes` [bytes] among files of at most `limit` bytes. A larger tensor gets its own file."""
    groups = [{}]
    for name in sorted(sizes):
        if groups[-1] and sum(groups[-1].values()) + sizes[name] > limit:
            groups.append({})
        groups[-1][name] = sizes[name]
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def write(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write `tensors` to a file as `dtype`. Equal input gives equal bytes. Raises RunError."""
    path.touch()
    mode = path.stat().st_mode  # follows the umask; save_file would make the file readable only by its owner
    metadata = {"format": "pt"} if path.name.startswith("model") else None  # transformers requires `format`
    try:
        save_file({name: tensor.detach().to(dtype).contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:  # such as a full disk
        raise RunError(f"{path}: {error}") from None
    path.chmod(mode)


def write_index(directory: Path, stem: str, layout: Layout) -> None:
    """Write the index of the files in `layout` if there is more than one."""
    if len(layout) > 1:
        size = sum(sum(sizes.values()) for sizes in layout.values())
        weight_map = {name: file for file, sizes in layout.items() for name in sizes}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / f"{stem}{INDEX}", index)


def files_of(directory: Path, stem: str) -> list[Path]:
    """Return the files of the tensors called `stem`. Raises UserError if there are none."""
    index, single = directory / f"{stem}{INDEX}", directory / f"{stem}.safetensors"
    if single.exists():  # first, as in transformers, which may leave an old index beside it
        return [single]
    if index.exists():
        return [directory / name for name in sorted(set(files.read_json(index, Index)["weight_map"].values()))]
    there = files.shortened(sorted(path.name for path in directory.iterdir()))
    raise UserError(f"{directory} has no {single.name}, only {there}")


def open_tensors(directory: Path, stem: str) -> dict[str, LazyTensor]:
    """Return the tensors called `stem`, by name. Reads only headers. Raises UserError."""
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


def write_json(path: Path, value: dict) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
