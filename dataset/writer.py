"""Writing a dataset directory: tokens are cut into shards, and a kill at any instant loses at most the last one of each split.

progress.json is published whenever a shard is finished. It says for each split which shards are finished, and where in the text
the last of them ends. dataset.json is published last.
"""

import json
import sys
from pathlib import Path

import numpy as np

from common import files
from common.errors import UserError, plural, say
from dataset.sources import Position
from dataset.tokenizer import Tokenizer
from dataset.tokens import read_metadata, token_dtype, write_shard

SPLITS = ("train", "val")


class ShardWriter:
    """Cuts the tokens of one split into shards. The split ends after `max_tokens`."""

    def __init__(self, directory: Path, split: str, tokenizer: Tokenizer, shard_tokens: int, max_tokens: int):
        self.directory, self.split, self.tokenizer, self.max_tokens = directory, split, tokenizer, max_tokens
        self.finished = []  # records of the finished shards
        self.position: Position = (0, -1)  # of the unit in which the last of them ends; before all units
        self.taken = 0  # how many of that unit's tokens are in them
        self.total = 0  # tokens of the split so far
        self.buffer = np.empty(shard_tokens, token_dtype(tokenizer.vocab_size))  # takes up memory only as it fills
        self.filled = self.bytes_of_text = self.documents = 0  # of the buffer

    @property
    def is_full(self) -> bool:
        """Whether no more tokens fit into the split."""
        return self.total == self.max_tokens

    def add(self, tokens: np.ndarray, position: Position) -> list[dict]:
        """Append the tokens of the unit at `position`, and publish each shard that they complete. Returns the records of these.

        Tokens that a run before this one has put into finished shards are passed over.
        """
        done, start = len(self.finished), 0
        if position <= self.position:
            start = self.taken if position == self.position else len(tokens)
        end = min(len(tokens), start + self.max_tokens - self.total)
        while start < end:
            part = tokens[start : min(end, start + len(self.buffer) - self.filled)]
            self.buffer[self.filled : self.filled + len(part)] = part
            start += len(part)
            self.filled += len(part)
            self.total += len(part)
            self.bytes_of_text += int(self.tokenizer.bytes_per_token.take(part).sum())
            self.documents += int(np.count_nonzero(part == self.tokenizer.eot_token))
            if self.filled == len(self.buffer) or self.is_full:
                self.publish()
                self.position, self.taken = position, start
        return self.finished[done:]

    def publish(self) -> None:
        """Publish the buffer as a shard."""
        tokens = self.buffer[: self.filled]
        name = f"{self.split}_{len(self.finished):06d}.bin"
        digest = write_shard(self.directory / name, tokens, self.tokenizer.vocab_size)
        record = {"file": name, "split": self.split, "tokens": len(tokens), "bytes_of_text": self.bytes_of_text}
        self.finished.append(record | {"documents": self.documents, "sha256": digest})
        self.filled = self.bytes_of_text = self.documents = 0


class DatasetWriter:
    """Writes both splits of a dataset, each of which goes on behind the shards that an earlier run has finished.

    request: what the dataset is to be, as JSON. progress: what an earlier run of the same request has published. If there is
    none, what another request left in the directory is removed.
    """

    def __init__(self, directory: Path, request: dict, tokenizer: Tokenizer, val_fraction: float, progress: dict | None):
        self.directory, self.request, self.tokenizer, self.val_fraction = directory, request, tokenizer, val_fraction
        limits = dict.fromkeys(SPLITS, sys.maxsize)
        if total := request["options"].get("max_tokens"):
            limits["val"] = max(1, int(total * val_fraction))
            limits["train"] = total - limits["val"]
        self.splits = {s: ShardWriter(directory, s, tokenizer, request["shard_tokens"], limits[s]) for s in SPLITS}
        if progress:
            for split, writer in self.splits.items():
                saved = progress["splits"][split]
                writer.finished, writer.position, writer.taken = saved["finished"], tuple(saved["position"]), saved["taken"]
                writer.total = sum(record["tokens"] for record in writer.finished)
            return
        if (directory / "progress.json").exists():
            say(f"restarting {directory}: the unfinished dataset there was made from other sources or settings")
        for pattern in ("*_*.bin", "tokenizer.json", ".*.tmp"):
            for path in directory.glob(pattern):
                files.remove(path)
        self.save()
        tokenizer.save(directory / "tokenizer.json")

    @property
    def records(self) -> list[dict]:
        """The records of all finished shards."""
        return [record for writer in self.splits.values() for record in writer.finished]

    @property
    def unfinished(self) -> dict[str, Position]:
        """The splits that take more tokens, and the position of the unit that each one's next tokens are of or come after."""
        return {split: writer.position for split, writer in self.splits.items() if not writer.is_full}

    def add(self, tokens: dict[str, np.ndarray], position: Position) -> list[dict]:
        """Append the tokens of the unit at `position`, by split. Returns the records of the shards that they completed."""
        completed = [record for split in tokens for record in self.splits[split].add(tokens[split], position)]
        if completed:
            self.save()
        return completed

    def save(self) -> None:
        """Publish progress.json: what a restart needs."""
        splits = {s: {"finished": w.finished, "position": w.position, "taken": w.taken} for s, w in self.splits.items()}
        files.publish_text(self.directory / "progress.json", json.dumps({"request": self.request, "splits": splits}))

    def finish(self) -> None:
        """Publish the last shards, then dataset.json. Raises UserError if a split has no tokens."""
        for writer in self.splits.values():
            if writer.filled:
                writer.publish()
            if not writer.finished:
                raise UserError(f"--val_fraction={self.val_fraction} leaves no document for {writer.split}; try another")
        metadata = {
            "format": "lockstep-tokens",
            "version": 1,
            "tokenizer": {"name": self.tokenizer.name, "sha256": self.tokenizer.sha256},
            "vocab_size": self.tokenizer.vocab_size,
            "eot_token": self.tokenizer.eot_token,
            "dtype": token_dtype(self.tokenizer.vocab_size).name,
            "source": self.request["source"],
            "val_fraction": self.val_fraction,
        }
        if self.request["options"]:
            metadata["options"] = self.request["options"]
        metadata["shards"] = self.records
        files.publish_text(self.directory / "dataset.json", json.dumps(metadata, indent=1) + "\n")
        (self.directory / "progress.json").unlink()

    def summary(self) -> str:
        """What has been written, a line for each split and one for both."""
        lines = []
        for split, writer in self.splits.items():
            documents = sum(record["documents"] for record in writer.finished)
            lines.append(f"{split}: {writer.total:,} tokens in {plural(documents, 'document')}")
        tokens, size = (sum(record[key] for record in self.records) for key in ("tokens", "bytes_of_text"))
        return "\n".join(lines) + (
            f"\n{self.directory}: {tokens:,} tokens of {size:,} bytes of text, {size / max(1, tokens):.2f} bytes per token, "
            f"vocabulary {self.tokenizer.vocab_size:,}"
        )


def is_finished(directory: Path, request: dict) -> bool:
    """Whether the directory holds the requested dataset. Raises UserError if it holds another one."""
    if not (directory / "dataset.json").exists():
        return False
    metadata = read_metadata(directory)
    train = [record["tokens"] for record in metadata["shards"] if record["split"] == "train"]
    found = {
        "source": metadata["source"],
        "--tokenizer": metadata["tokenizer"]["name"],
        "--val_fraction": metadata["val_fraction"],
        "--shard_tokens": max(train, default=0),
        **{f"--{option}": value for option, value in metadata.get("options", {}).items()},
    }
    wanted = {
        "source": request["source"],
        "--tokenizer": request["tokenizer"],
        "--val_fraction": found["--val_fraction"] if request["val_fraction"] < 0 else request["val_fraction"],
        "--shard_tokens": min(request["shard_tokens"], sum(train)),
        **{f"--{option}": value for option, value in request["options"].items()},
    }
    keys = [key for key in found | wanted if found.get(key) != wanted.get(key)]
    if keys:
        raise UserError(f"{directory} holds another dataset: {', '.join(keys)} differ; choose another --out, or remove it")
    (directory / "progress.json").unlink(missing_ok=True)  # in case a kill has left it
    return True


def read_progress(directory: Path, request: dict) -> dict | None:
    """What an earlier run of this request has published, if there was one. Raises UserError if other files are there."""
    path = directory / "progress.json"
    if path.exists():
        progress = files.read_json(path)
        return progress if progress.get("request") == request and (directory / "tokenizer.json").exists() else None
    if any(not path.name.startswith(".") for path in directory.iterdir()):
        raise UserError(f"{directory} holds other files; choose another --out, or remove it")
    return None
