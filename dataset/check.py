"""What a directory of tokens holds, and whether all of it is as it should be: `python prepare_data.py --check tokens/NAME`."""

import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import files
from common.errors import UserError, plural, say
from dataset.tokenizer import load, resolve
from dataset.tokens import Dataset, open_dataset, read_metadata

SCANNED_TOKENS = 1 << 22  # at a time
SHOWN_TOKENS, SHOWN_CHARACTERS = 64, 160  # of the beginning of each split


def check(directory: Path, spec: str = "") -> None:
    """Read everything in a dataset directory, ours or another tool's, and print what it holds.

    spec: the tokenizer of another tool's tokens, as --tokenizer names it. Raises UserError, which names the first fault.
    """
    if not directory.is_dir():
        raise UserError(f"--check={directory}: no such directory")
    beside, hashes, origin = directory / "tokenizer.json", {}, "tokens of another tool"
    own = (directory / "dataset.json").exists()
    tokenizer = resolve(spec) if spec and not own else load(beside) if own or beside.exists() else None
    dataset = open_dataset(directory, tokenizer.vocab_size if tokenizer else 0)
    if own:
        metadata = read_metadata(directory)
        hashes = {record["file"]: record["sha256"] for record in metadata["shards"]}
        hashes["tokenizer.json"] = metadata["tokenizer"]["sha256"]
        check_sha256(beside, hashes)
        origin = ", ".join(source["path"] for source in metadata["source"])
    eot = "" if dataset.eot_token is None else f", end-of-text is token {dataset.eot_token}"
    lines = [f"{directory}: {origin}; vocabulary {dataset.vocab_size:,}{eot}"]
    for split, stream in dataset.splits.items():
        documents = count_documents(dataset, split, hashes)
        line = (
            f"{split}: {plural(len(stream.shards), 'shard')}, {plural(len(stream), 'token')}, {plural(documents, 'document')}"
        )
        if own:
            size = dataset.bytes_of_text[split]
            line += f", {size:,} bytes of text, {size / max(1, len(stream)):.2f} per token"
        beginning = np.empty(min(SHOWN_TOKENS, len(stream)), np.int64)
        stream.read(0, beginning)
        shown = repr(tokenizer.decode(beginning)) if tokenizer else str(beginning.tolist())
        lines += [line, f"  {shown[:SHOWN_CHARACTERS]}"]
    say("\n".join([*lines, "every shard is whole" + " and matches its sha256" * own]))


def count_documents(dataset: Dataset, split: str, hashes: dict[str, str]) -> int:
    """Check each shard of a split: its ids, and its sha256 if it is in `hashes`. Returns the number of end-of-text tokens."""
    stream, documents = dataset.splits[split], 0
    for shard in tqdm(stream.shards, desc=split, unit="shard", disable=not sys.stderr.isatty()):
        check_sha256(shard.path, hashes)
        for start in range(0, len(shard), SCANNED_TOKENS):
            part = shard[start : start + SCANNED_TOKENS]
            stream.check(part, str(shard.path))
            documents += int(np.count_nonzero(part == dataset.eot_token))
    return documents


def check_sha256(path: Path, hashes: dict[str, str]) -> None:
    """Raise UserError if a file is not the one that dataset.json lists."""
    if path.name in hashes and files.sha256(path) != hashes[path.name]:
        raise UserError(f"{path} does not match its sha256 in dataset.json; copy or prepare it again")
