"""One corpus prepared by many machines: which files each one takes, and how their parts become one dataset.

A part is a contiguous range of the files, so the tokens of all parts, one after another, are those that one machine makes.
Joining copies them into new shards, because one machine's shards begin and end anywhere in a part. That takes seconds for a
gigabyte, and the dataset does not depend on the number of parts.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common import files
from common.errors import UserError, say
from dataset.encode import FEW_DOCUMENTS
from dataset.sources import Position, SourceFile
from dataset.tokenizer import load
from dataset.tokens import Metadata, open_shard, read_metadata
from dataset.writer import SPLITS, DatasetWriter, is_finished, read_progress

COPIED_TOKENS = 1 << 22  # at a time


def part_directory(directory: Path, number: int, count: int) -> Path:
    """Where part `number` of `count` is made."""
    return directory / f"part-{number:04d}-of-{count:04d}"


def part_files(source_files: list[SourceFile], number: int, count: int) -> range:
    """Which of the files belong to part `number` of `count`: a contiguous range, about as many bytes as any other part."""
    ends = np.cumsum([file.size for file in source_files], dtype=np.float64)
    middles = ends - np.array([file.size for file in source_files]) / 2
    owners = np.minimum(middles * count / max(1.0, ends[-1]), count - 1).astype(int)
    return range(int(np.searchsorted(owners, number - 1)), int(np.searchsorted(owners, number)))


def join(directory: Path) -> None:
    """Make one dataset of the parts in `directory`, and remove them. Raises UserError."""
    with files.held(directory):
        join_held(directory)


def join_held(directory: Path) -> None:
    """`join` in a directory that no other process writes to."""
    files.remove_unfinished(directory)
    if (directory / "dataset.json").exists() and not list(directory.glob("part-*")):
        say(f"{directory} already holds this dataset")
        return
    began, parts = time.perf_counter(), read_parts(directory)
    metadata = parts[0][1]
    options = {key: value for key, value in metadata["options"].items() if key not in ("part", "shard_tokens")}
    request = {
        "source": metadata["source"],
        "tokenizer": metadata["tokenizer"]["name"],
        "val_fraction": metadata["val_fraction"],
        "shard_tokens": metadata["options"]["shard_tokens"],
        "options": options,
    }
    if is_finished(directory, request):
        say(f"{directory} already holds this dataset")
    else:
        request["parts"] = [record["sha256"] for _, part in parts for record in part["shards"]]
        tokenizer = load(parts[0][0] / "tokenizer.json", name=request["tokenizer"])
        writer = DatasetWriter(directory, request, tokenizer, metadata["val_fraction"], by_tail=False)
        writer.begin(read_progress(directory, request, ignore="part-*"))
        for position, tokens in read_tokens(parts, writer.position):
            for record in writer.add(tokens, position):
                say(f"{record['file']}: {record['tokens']:,} tokens")
        writer.finish()
        say(f"{writer.summary()}, {time.perf_counter() - began:.1f} s")
    for part, _ in parts:
        files.retire(part)


def read_parts(directory: Path) -> list[tuple[Path, Metadata]]:
    """The directory and dataset.json of each part, in order. If the joined dataset is there, some parts may be removed already.

    Raises UserError if a part is missing or there twice, or if the parts are not of one dataset.
    """
    paths = sorted(directory.glob("part-*"))
    if not paths:
        raise UserError(f"{directory} has no parts; make them with --part=1/N ... --part=N/N, and put them all there")
    parts = []
    for path in paths:
        if not (path / "dataset.json").exists():
            raise UserError(f"{path} is not finished; run its command again, or remove it")
        parts.append((path, read_metadata(path)))
        if not {"part", "shard_tokens"} <= parts[-1][1].get("options", {}).keys():
            raise UserError(f"{path} is not a part; move it elsewhere")
    first_path, first = parts[0]
    for path, metadata in parts:
        for key in ("source", "listing", "tokenizer", "val_fraction", "options"):
            values = [without_names(m.get(key)) for m in (first, metadata)]
            if values[0] != values[1]:
                raise UserError(f"{path} does not belong to {first_path}: {key} {values[1]}, not {values[0]}")
    if (directory / "dataset.json").exists():
        return parts
    found = [metadata["options"]["part"] for _, metadata in parts]
    count = int(found[0].partition("/")[2])
    wanted = [f"{number}/{count}" for number in range(1, count + 1)]
    if found != wanted:
        missing = files.shortened(part for part in wanted if part not in found)
        twice = files.shortened(sorted({part for part in found if found.count(part) > 1}))
        raise UserError(f"{directory} wants each of {count} parts once; missing: {missing}; there twice: {twice}")
    documents = sum(record["documents"] for _, metadata in parts for record in metadata["shards"])
    if documents < FEW_DOCUMENTS:
        raise UserError(f"{directory}: there are only {documents} documents; prepare fewer than {FEW_DOCUMENTS} without --part")
    return parts


def without_names(value):
    """A value of dataset.json without what may differ between parts: their number, and a tokenizer's path."""
    return {k: v for k, v in value.items() if k not in ("part", "name")} if isinstance(value, dict) else value


def read_tokens(parts: list[tuple[Path, Metadata]], start: Position) -> Iterator[tuple[Position, dict[str, np.ndarray]]]:
    """The tokens of all parts by split, in order, each with its position; those after position `start`. Raises UserError."""
    shards = [
        (path / record["file"], record)
        for split in SPLITS
        for path, metadata in parts
        for record in metadata["shards"]
        if record["split"] == split
    ]
    for number, (path, record) in enumerate(shards):
        if number < start[0]:
            continue
        tokens = open_shard(path)
        if files.sha256(path) != record["sha256"]:
            raise UserError(f"{path} does not match its sha256; copy it again, or make its part again")
        for chunk, first in enumerate(range(0, len(tokens), COPIED_TOKENS)):
            if (number, chunk) > start:
                nothing = dict.fromkeys(SPLITS, tokens[:0])
                yield (number, chunk), nothing | {record["split"]: tokens[first : first + COPIED_TOKENS]}
