"""Writing a dataset directory: tokens are cut into shards, and a kill at any instant loses at most the last of them.

progress.json is published whenever a shard is finished. It says which shards are finished, how many tokens of the next ones
are saved, and which unit of text these tokens end with. dataset.json is published last.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np
from msgspec import Meta

from common import files
from common.errors import UserError, plural, say
from common.records import Count, Share
from dataset.sources import Position
from dataset.tokenizer import Tokenizer
from dataset.tokens import ShardRecord, Source, read_metadata, token_dtype, write_shard

SPLITS = ("train", "val")
START = (0, -1)  # the position before all units


SplitProgress = TypedDict("SplitProgress", {"finished": list[ShardRecord], "saved": Count})
SplitsProgress = TypedDict("SplitsProgress", dict.fromkeys(SPLITS, SplitProgress))
# The part of progress.json that is read before the whole request is compared.
Unfinished = TypedDict("Unfinished", {"request": TypedDict("Request", {"source": list[Source]})})


class Progress(TypedDict):
    """The content of progress.json."""

    request: dict
    val_fraction: Share
    by_tail: bool
    position: tuple[Count, Annotated[int, Meta(ge=-1, le=1 << 62)]]
    splits: SplitsProgress


class ShardWriter:
    """Cuts the tokens of one split into shards. The split ends after `max_tokens`."""

    def __init__(self, directory: Path, split: str, tokenizer: Tokenizer, shard_tokens: int, max_tokens: int):
        self.directory, self.split, self.tokenizer, self.max_tokens = directory, split, tokenizer, max_tokens
        self.finished = []  # records of the finished shards
        self.total = 0  # tokens of the split so far
        self.buffer = np.empty(shard_tokens, token_dtype(tokenizer.vocab_size))  # takes up memory only as it fills
        self.filled = self.bytes_of_text = self.documents = 0  # of the buffer
        self.saved = 0  # tokens of the buffer that are on disk

    @property
    def partial(self) -> Path:
        """The file for the tokens of the unfinished shard."""
        return self.directory / f"{self.split}_{len(self.finished):06d}.partial"

    def add(self, tokens: np.ndarray) -> list[dict]:
        """Append tokens, and publish each shard that they complete. Returns the records of these."""
        done, tokens = len(self.finished), tokens[: self.max_tokens - self.total]
        while len(tokens):
            part, tokens = np.split(tokens, [len(self.buffer) - self.filled])
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            self.total += len(part)
            self.bytes_of_text += int(self.tokenizer.bytes_per_token.take(part).sum())
            self.documents += int(np.count_nonzero(part == self.tokenizer.eot_token))
            if self.filled == len(self.buffer):
                self.publish()
        return self.finished[done:]

    def publish(self) -> None:
        """Publish the buffer as a shard."""
        tokens = self.buffer[: self.filled]
        name = f"{self.split}_{len(self.finished):06d}.bin"
        digest = write_shard(self.directory / name, tokens, self.tokenizer.vocab_size)
        record = {"file": name, "split": self.split, "tokens": len(tokens), "bytes_of_text": self.bytes_of_text}
        self.finished.append(record | {"documents": self.documents, "sha256": digest})
        self.filled = self.saved = self.bytes_of_text = self.documents = 0

    def save(self) -> dict:
        """Write the tokens of the unfinished shard that are not on disk yet. Returns what `restore` needs."""
        with files.open_own(self.partial) as file:
            file.truncate(self.saved * self.buffer.itemsize)
            file.seek(0, os.SEEK_END)
            left = memoryview(self.buffer[self.saved : self.filled]).cast("B")
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        self.saved = self.filled
        return {"finished": self.finished, "saved": self.saved}

    def restore(self, finished: list[dict], saved: int) -> None:
        """Go on where `save` was called."""
        self.finished, self.total = finished, sum(record["tokens"] for record in finished)
        tokens = np.fromfile(files.require_regular(self.partial), self.buffer.dtype, min(saved, len(self.buffer)))
        if not saved == len(tokens) < len(self.buffer) or tokens.max(initial=0) >= self.tokenizer.vocab_size:
            raise UserError(f"{self.partial} does not hold {saved} tokens; remove {self.directory}, or choose another --out")
        self.add(tokens)
        self.saved = saved


class DatasetWriter:
    """Writes both splits of a dataset, and remembers up to which position the text is on disk.

    request: what the dataset is to be, as JSON. An earlier run of the same request in the same directory is continued.
    by_tail: whether the last `val_fraction` of the text is for validation, or that share of the documents.
    """

    def __init__(self, directory: Path, request: dict, tokenizer: Tokenizer, val_fraction: float, by_tail: bool):
        self.directory, self.request, self.tokenizer = directory, request, tokenizer
        self.val_fraction, self.by_tail = val_fraction, by_tail
        self.position: Position = START
        limits = dict.fromkeys(SPLITS, sys.maxsize)
        if total := request["options"].get("max_tokens"):
            limits["val"] = max(1, int(total * val_fraction))
            limits["train"] = total - limits["val"]
        self.splits = {s: ShardWriter(directory, s, tokenizer, request["shard_tokens"], limits[s]) for s in SPLITS}

    @property
    def records(self) -> list[dict]:
        """The records of all finished shards."""
        return [record for writer in self.splits.values() for record in writer.finished]

    @property
    def is_full(self) -> bool:
        """Whether no more tokens fit into either split."""
        return all(writer.total == writer.max_tokens for writer in self.splits.values())

    def begin(self, progress: Progress | None) -> None:
        """Go on where an earlier run ended, or start afresh: remove what a run of another request left in the directory."""
        if progress:
            self.position = tuple(progress["position"])
            for split, writer in self.splits.items():
                writer.restore(**progress["splits"][split])
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        if (self.directory / "progress.json").exists():
            say(f"{self.directory}: the unfinished dataset there is of other sources or settings, or damaged; it is made anew")
        for pattern in ("*_*.bin", "*.partial", "tokenizer.json"):
            for path in self.directory.glob(pattern):
                path.unlink()
        files.remove_unfinished(self.directory)
        self.save()
        self.tokenizer.save(self.directory / "tokenizer.json")

    def add(self, tokens: dict[str, np.ndarray], position: Position) -> list[dict]:
        """Append the tokens of the unit at `position`, by split. Returns the records of the shards that they completed."""
        completed = [record for split, writer in self.splits.items() for record in writer.add(tokens[split])]
        if completed:
            self.position = position
            self.save()
        return completed

    def save(self) -> None:
        """Publish progress.json: what a restart needs."""
        splits = {split: writer.save() for split, writer in self.splits.items()}
        progress = {"request": self.request, "val_fraction": self.val_fraction, "by_tail": self.by_tail}
        progress |= {"position": self.position, "splits": splits}
        files.publish_text(self.directory / "progress.json", json.dumps(progress))
        for path in set(self.directory.glob("*.partial")) - {writer.partial for writer in self.splits.values()}:
            path.unlink()

    def finish(self) -> None:
        """Publish the last shards, then dataset.json. Raises UserError if a split has no tokens."""
        options = self.request["options"]
        for writer in self.splits.values():
            if writer.filled:
                writer.publish()
            if not writer.finished and "part" not in options:
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
        if options:
            metadata["options"] = options
        if "part" in options:
            metadata["listing"] = self.request["listing"]  # all parts must have seen the same files
        metadata["shards"] = self.records
        files.publish_text(self.directory / "dataset.json", json.dumps(metadata, indent=1) + "\n")
        remove_progress(self.directory)

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
    remove_progress(directory)  # in case a kill has left it
    return True


def remove_progress(directory: Path) -> None:
    """Remove what a finished dataset does not need."""
    for path in [directory / "progress.json", *directory.glob("*.partial")]:
        path.unlink(missing_ok=True)


def read_progress(directory: Path, request: dict, ignore: str) -> Progress | None:
    """What an earlier run of this request has saved. None if there was no such run, or if its files are gone.

    Raises UserError if the directory holds something else, apart from names like `ignore`.
    """
    path = directory / "progress.json"
    if not path.exists():
        ours = (".*", "*.partial", ignore)  # a kill at the very beginning leaves a .partial alone
        if directory.exists() and any(not any(map(p.match, ours)) for p in directory.iterdir()):
            raise UserError(f"{directory} holds other files; choose another --out, or remove it")
        return None
    progress = files.read_json(path, Progress)
    names = ["tokenizer.json"]
    for split in SPLITS:
        records = progress["splits"][split]["finished"]
        names += [record["file"] for record in records] + [f"{split}_{len(records):06d}.partial"]
    is_whole = all((directory / name).is_file() for name in names)
    return progress if is_whole and progress["request"] == request else None
