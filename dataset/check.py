"""What a directory of tokens holds, and whether all of it is as it should be: `python prepare_data.py --check tokens/NAME`."""

import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import files
from common.errors import UserError, plural, say
from dataset.tokenizer import Tokenizer, load, resolve
from dataset.tokens import Dataset, Metadata, Stream, open_dataset, read_metadata

SCANNED_TOKENS = 1 << 22  # at a time
SHOWN_TOKENS, SHOWN_CHARACTERS = 64, 160  # of the beginning of each split


def check(directory: Path, spec: str = "") -> None:
    """Read everything in a dataset directory, ours or another tool's, and print what it holds.

    spec: the tokenizer of another tool's tokens, as --tokenizer names it. Raises UserError, which names the first fault.
    """
    if not directory.is_dir():
        raise UserError(f"--check={directory}: no such directory")
    metadata, beside = {}, directory / "tokenizer.json"
    if (directory / "dataset.json").exists():
        dataset, metadata = open_dataset(directory), read_metadata(directory)
        tokenizer = check_tokenizer(dataset, metadata)
        origin = ", ".join(source["path"] for source in metadata["source"])
    else:
        tokenizer = resolve(spec) if spec else load(beside) if beside.exists() else None
        dataset = open_dataset(directory, tokenizer.vocab_size if tokenizer else 0)
        origin = "tokens of another tool"
    has_eot = dataset.eot_token < dataset.vocab_size  # characters have none
    eot = f", end-of-text is token {dataset.eot_token}" if has_eot else ""
    lines = [f"{directory}: {origin}; vocabulary {dataset.vocab_size:,}{eot}"]
    records = {record["file"]: record for record in metadata.get("shards", ())}
    for split in dataset.splits:
        lines += check_split(dataset, split, tokenizer, records, metadata.get("dtype"))
    say("\n".join([*lines, "every shard is whole" + " and matches its sha256" * bool(records)]))


def check_tokenizer(dataset: Dataset, metadata: Metadata) -> Tokenizer:
    """The tokenizer of the directory. Raises UserError if it is not the one that dataset.json names."""
    path = dataset.directory / "tokenizer.json"
    tokenizer = load(path, name=metadata["tokenizer"]["name"])
    wanted = {"sha256": metadata["tokenizer"]["sha256"], "vocab_size": dataset.vocab_size, "eot_token": dataset.eot_token}
    for name, value in wanted.items():
        if getattr(tokenizer, name) != value:
            raise UserError(f"{path}: {name} is {getattr(tokenizer, name)}, dataset.json says {value}")
    return tokenizer


def check_split(dataset: Dataset, split: str, tokenizer: Tokenizer | None, records: dict, dtype: str | None) -> list[str]:
    """Check each shard of a split. Returns lines that describe it. Raises UserError."""
    stream, documents, text_bytes = dataset.splits[split], 0, 0
    shards = zip(stream.paths, stream.shards, strict=True)
    for path, tokens in tqdm(shards, desc=split, unit="shard", total=len(stream.shards), disable=not sys.stderr.isatty()):
        found = scan(dataset, stream, path, tokens, tokenizer)
        documents, text_bytes = documents + found["documents"], text_bytes + found["bytes_of_text"]
        if records:
            found |= {"sha256": files.sha256(path), "dtype": tokens.dtype.name}
            wanted = records[path.name] | {"dtype": dtype}
            for name, value in found.items():
                if value != wanted[name]:
                    raise UserError(f"{path}: {name} is {value}, dataset.json says {wanted[name]}")
    if records and len(stream) and (first := beginning(stream, 1)[0]) != dataset.eot_token:
        raise UserError(f"{stream.paths[0]} begins with token {first}, not with end-of-text, {dataset.eot_token}")
    line = f"{split}: {plural(len(stream.shards), 'shard')}, {plural(len(stream), 'token')}, {plural(documents, 'document')}"
    shown = beginning(stream, SHOWN_TOKENS)
    if tokenizer is None:
        return [line, f"  {str(shown.tolist())[:SHOWN_CHARACTERS]}"]
    line += f", {text_bytes:,} bytes of text, {text_bytes / max(1, len(stream)):.2f} per token"
    return [line, f"  {repr(tokenizer.decode(shown))[:SHOWN_CHARACTERS]}"]


def scan(dataset: Dataset, stream: Stream, path: Path, tokens: np.ndarray, tokenizer: Tokenizer | None) -> dict[str, int]:
    """Check that every token of a shard is in the vocabulary. Returns how many documents and bytes of text it has."""
    found = {"documents": 0, "bytes_of_text": 0}
    for start in range(0, len(tokens), SCANNED_TOKENS):
        part = tokens[start : start + SCANNED_TOKENS]
        stream.check(part, str(path))
        found["documents"] += int(np.count_nonzero(part == dataset.eot_token))
        if tokenizer:
            found["bytes_of_text"] += int(tokenizer.bytes_per_token.take(part).sum())
    return found


def beginning(stream: Stream, count: int) -> np.ndarray:
    """The first tokens of a stream, at most `count`."""
    tokens = np.empty(min(count, len(stream)), np.int64)
    stream.read(0, tokens)
    return tokens
