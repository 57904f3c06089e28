"""Write a dataset directory in shards. If the process is killed, at most one unfinished shard per split is lost.

progress.json is published whenever a shard is finished. For each split, it lists the finished shards and where in the text the
last one ends. dataset.json is published last.
"""

import json
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import files
from common.errors import UserError, plural, say
from dataset.encode import Position
from dataset.tokenizer import Tokenizer, resolve
from dataset.tokens import read_metadata, token_dtype, write_shard

START: Position = (0, -1)  # before the first unit
END: Position = (sys.maxsize, 0)  # after the last unit


class ShardWriter:
    """Cuts the tokens of one split into shards. The split ends after `max_tokens`.

    earlier: this split's entry in an earlier run's progress.json. Its `finished` lists the records of the shards, `position` is
    the unit in which the last shard ends, and `taken` is how many of that unit's tokens are already in shards.
    """

    def __init__(self, directory: Path, split: str, tokenizer: Tokenizer, shard_tokens: int, max_tokens: int, earlier: dict):
        self.directory, self.split, self.tokenizer, self.max_tokens = directory, split, tokenizer, max_tokens
        self.finished, self.position, self.taken = earlier["finished"], tuple(earlier["position"]), earlier["taken"]
        self.total = sum(record["tokens"] for record in self.finished)  # tokens of the split so far
        self.buffer = np.empty(shard_tokens, token_dtype(tokenizer.vocab_size))  # uses memory only as it fills
        self.filled = self.bytes_of_text = self.documents = 0  # what the buffer holds

    def add(self, tokens: np.ndarray, position: Position) -> bool:
        """Append the tokens of the unit at `position`, and publish each full shard. Returns whether any was published.

        Skips tokens that are already in an earlier run's finished shards.
        """
        finished, start = len(self.finished), self.taken if position == self.position else 0
        end = min(len(tokens), start + self.max_tokens - self.total)
        while start < end:
            part = tokens[start : min(end, start + len(self.buffer) - self.filled)]
            self.buffer[self.filled : self.filled + len(part)] = part
            start += len(part)
            self.filled += len(part)
            self.total += len(part)
            self.bytes_of_text += int(self.tokenizer.bytes_per_token.take(part).sum())
            self.documents += int(np.count_nonzero(part == self.tokenizer.eot_token))
            if self.filled == len(self.buffer) or self.total == self.max_tokens:
                self.publish()
                self.position, self.taken = position, start
        return len(self.finished) > finished

    def publish(self) -> None:
        """Publish the buffer as a shard."""
        name = f"{self.split}_{len(self.finished):06d}.bin"
        digest = write_shard(self.directory / name, self.buffer[: self.filled], self.tokenizer.vocab_size)
        record = {"file": name, "split": self.split, "tokens": self.filled, "bytes_of_text": self.bytes_of_text}
        self.finished.append(record | {"documents": self.documents, "sha256": digest})
        tqdm.write(f"{name}: {self.filled:,} tokens")
        self.filled = self.bytes_of_text = self.documents = 0


class DatasetWriter:
    """Writes both splits of a dataset. Continues after the finished shards of an earlier run with the same request.

    request: a description of the dataset, as JSON. Shards from a different request are removed.
    """

    def __init__(self, directory: Path, request: dict, tokenizer: Tokenizer, val_fraction: float):
        self.directory, self.request, self.tokenizer, self.val_fraction = directory, request, tokenizer, val_fraction
        limits = dict.fromkeys(("train", "val"), sys.maxsize)
        if total := request["options"].get("max_tokens"):
            limits["val"] = max(1, int(total * val_fraction))
            limits["train"] = total - limits["val"]
        found = files.read_json(directory / "progress.json") if (directory / "progress.json").exists() else {}
        if found.get("request") == request:
            finished = sum(len(earlier["finished"]) for earlier in found["splits"].values())
            say(f"{directory}: continuing after {plural(finished, 'finished shard')}")
        else:
            if found:
                say(f"starting {directory} over: the unfinished dataset there has different sources or settings")
            for old in (*directory.glob("*_*.bin"), *directory.glob(".*.tmp")):
                files.remove(old)
            found["splits"] = {split: {"finished": [], "position": START, "taken": 0} for split in limits}
        shape, earlier = (tokenizer, request["shard_tokens"]), found["splits"]
        self.splits = {s: ShardWriter(directory, s, *shape, limit, earlier[s]) for s, limit in limits.items()}
        self.save()

    @property
    def wanted(self) -> dict[str, Position]:
        """For each split, the first unit that may contain its next tokens, or END if the split is full."""
        return {s: w.position if w.total < w.max_tokens else END for s, w in self.splits.items()}

    def add(self, tokens: dict[str, np.ndarray], position: Position) -> None:
        """Append the tokens of the unit at `position`, by split."""
        if any([self.splits[split].add(part, position) for split, part in tokens.items()]):
            self.save()

    def save(self) -> None:
        """Publish progress.json, which contains what a restart needs."""
        splits = {s: {"finished": w.finished, "position": w.position, "taken": w.taken} for s, w in self.splits.items()}
        files.publish_text(self.directory / "progress.json", json.dumps({"request": self.request, "splits": splits}))

    def finish(self) -> None:
        """Publish the last shards, then dataset.json. Raises UserError if a split has no tokens."""
        for split, writer in self.splits.items():
            if writer.filled:
                writer.publish()
            if not writer.finished:
                problem = f"--val_fraction={self.val_fraction} leaves no documents for {split}, as a hash of their text decides"
                change = "larger" if split == "val" else "smaller"
                raise UserError(f"{problem}; if the documents are copies of one text, remove copies, or try a {change} value")
        self.tokenizer.save(self.directory / "tokenizer.json")
        metadata = {
            "format": "lockstep-tokens",
            "version": 1,
            "tokenizer": {"name": self.tokenizer.name, "sha256": self.tokenizer.sha256},
            "vocab_size": self.tokenizer.vocab_size,
            "eot_token": self.tokenizer.eot_token,
            "dtype": token_dtype(self.tokenizer.vocab_size).name,
            "source": self.request["source"],
            "val_fraction": self.val_fraction,
            **({"options": self.request["options"]} if self.request["options"] else {}),
            "shards": [record for writer in self.splits.values() for record in writer.finished],
        }
        files.publish_text(self.directory / "dataset.json", json.dumps(metadata, indent=1) + "\n")
        (self.directory / "progress.json").unlink()


def is_finished(directory: Path, request: dict) -> bool:
    """Return whether the directory contains the requested dataset. Raises UserError if it contains anything else."""
    if not (directory / "dataset.json").exists():
        names = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
        if names and "progress.json" not in names:
            raise UserError(f"{directory} contains other files; choose another --out, or remove the directory")
        return False
    metadata = read_metadata(directory)
    found = metadata | metadata.get("options", {}) | {"tokenizer": metadata["tokenizer"]["name"]}
    wanted = request | request["options"]
    if request["val_fraction"] == "auto":
        wanted["val_fraction"] = metadata["val_fraction"]
    keys = ("source", "tokenizer", "val_fraction", "column", "separator", "max_tokens")
    if names := [f"--{key}".replace("--source", "source") for key in keys if found.get(key) != wanted.get(key)]:
        raise UserError(f"{directory} is a different dataset (changed: {', '.join(names)}); choose another --out, or remove it")
    spec = request["tokenizer"]
    if Path(spec).suffix and Path(spec).is_file() and resolve(spec).sha256 != metadata["tokenizer"]["sha256"]:
        raise UserError(f"{directory} was made before {spec} changed; choose another --out, or remove it")
    (directory / "progress.json").unlink(missing_ok=True)  # a kill may have left it behind
    return True
