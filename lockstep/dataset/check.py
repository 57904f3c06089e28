"""Describe and verify a directory of tokens: `python prepare_data.py --check tokens/NAME`."""

import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lockstep.common import files
from lockstep.common.errors import UserError, plural, say
from lockstep.dataset.tokenizer import load, load_if_readable, resolve
from lockstep.dataset.tokens import SCAN_TOKENS, open_dataset, read_metadata

SHOWN_TOKENS, SHOWN_CHARACTERS = 64, 160  # how much of the beginning of each split to show


def check(directory: Path, spec: str = "") -> None:
    """Read a whole dataset directory, written by Lockstep or another tool, and print what it contains.

    spec: the tokenizer of another tool's tokens, in the syntax of --tokenizer. Raises a UserError that names the first problem.
    """
    if not directory.is_dir():
        raise UserError(f"--check={directory}: no such directory")
    own, beside = (directory / "dataset.json").exists(), directory / "tokenizer.json"
    tokenizer = load(beside) if own else resolve(spec) if spec else load_if_readable(beside)
    dataset = open_dataset(directory, tokenizer.vocab_size if tokenizer else 0)
    known, origin = {}, "tokens from another tool"
    if own:
        metadata = read_metadata(directory)
        check_sha256(beside, metadata["tokenizer"])
        known = {record["file"]: record for record in metadata["shards"]}
        origin = ", ".join(source["path"] for source in metadata["source"])
    eot = "" if dataset.eot_token is None else f", end-of-text token {dataset.eot_token}"
    lines = [f"{directory}: {origin}; vocabulary {dataset.vocab_size:,}{eot}"]
    for split, stream in dataset.splits.items():
        records = []
        for shard in tqdm(stream.shards, desc=split, unit="shard", disable=not sys.stderr.isatty()):
            records.append(known.get(shard.path.name, {}) | {"tokens": len(shard), "documents": 0})
            if own:
                check_sha256(shard.path, records[-1])
            for start in range(0, len(shard), SCAN_TOKENS):
                part = shard[start : start + SCAN_TOKENS]
                stream.check(part, str(shard.path))
                records[-1]["documents"] += int(np.count_nonzero(part == dataset.eot_token))
        beginning = stream.read(0, SHOWN_TOKENS) if len(stream) else np.empty(0, np.int64)
        shown = repr(tokenizer.decode(beginning)) if tokenizer else str(beginning.tolist())
        lines += [describe(split, records), f"  {shown[:SHOWN_CHARACTERS]}"]
    if not own:
        lines.append("checked sizes and token ids; another tool's tokens have no sha256 to compare with")
    say("\n".join([*lines, "every shard is intact" + " and matches its sha256" * own]))


def describe(split: str, records: list[dict]) -> str:
    """Return one line about all shards of a split. For another tool's shards, the size of the text is unknown."""
    tokens, documents, size = (
        sum(record.get(key, 0) for record in records) for key in ("tokens", "documents", "bytes_of_text")
    )
    line = f"{split}: {plural(len(records), 'shard')}, {plural(tokens, 'token')}, {plural(documents, 'document')}"
    return line + (f", {size:,} bytes of text, {size / tokens:.2f} bytes per token" if size else "")


def check_sha256(path: Path, record: dict) -> None:
    """Raise UserError if a file does not match its record in dataset.json."""
    if files.sha256(path) != record["sha256"]:
        raise UserError(f"{path} does not match its sha256 in dataset.json; copy it again, or prepare the dataset again")
