"""Write a dataset directory in shards. If the process is killed, at most one unfinished shard per split is lost.

progress.json is published whenever a shard is finished. For each split, it lists the finished shards and where in the text the
last one ends. dataset.json is published last. Only files that one of the two lists are ours, and may be removed or replaced.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import numpy as np
from tqdm import tqdm

from lockstep.common import files
from lockstep.common.errors import UserError, plural, say
from lockstep.common.records import Count
from lockstep.dataset.encode import Position
from lockstep.dataset.tokenizer import Tokenizer, resolve
from lockstep.dataset.tokens import ShardRecord, Source, open_dataset, open_shard, read_metadata, token_dtype, write_shard

START: Position = (0, -1)  # before the first unit
END: Position = (sys.maxsize, 0)  # after the last unit


class SplitProgress(TypedDict):
    """The progress of one split."""

    finished: list[ShardRecord]
    position: tuple[int, int]  # the unit in which the last shard ends
    taken: Count  # how many of that unit's tokens are already in shards


# The parts of progress.json that every version has.
Request = TypedDict("Request", {"source": list[Source], "tokenizer": str, "shard_tokens": Count})
Splits = TypedDict("Splits", {"train": SplitProgress, "val": SplitProgress})
Progress = TypedDict("Progress", {"request": Request, "splits": Splits})


def shard_name(split: str, number: int) -> str:
    """Return the file name of a shard."""
    return f"{split}_{number:06d}.bin"


def read_progress(directory: Path) -> dict | None:
    """Return the progress.json of an unfinished dataset, or None if there is none. Raises UserError if it is not ours."""
    path = directory / "progress.json"
    if not path.exists():
        return None
    try:
        found = files.read_json(path)
        for split, part in files.decode(found, Progress, str(path))["splits"].items():
            names = [record["file"] for record in part["finished"]]
            if names != [shard_name(split, number) for number in range(len(names))]:
                raise UserError(f"{path}: unexpected names of shards: {files.shortened(names)}")
    except UserError as error:
        raise UserError(f"{error}; prepare_data.py did not write this file, so choose another --out") from None
    return found


class ShardWriter:
    """Cuts the tokens of one split into shards. The split ends after `max_tokens`. earlier: its `SplitProgress` so far."""

    def __init__(self, directory: Path, split: str, tokenizer: Tokenizer, shard_tokens: int, max_tokens: int, earlier: dict):
        self.directory, self.split, self.tokenizer, self.max_tokens = directory, split, tokenizer, max_tokens
        self.finished, self.position, self.taken = earlier["finished"], tuple(earlier["position"]), earlier["taken"]
        self.total = sum(record["tokens"] for record in self.finished)  # tokens of the split so far
        self.buffer = np.empty(shard_tokens, token_dtype(tokenizer.vocab_size))  # uses memory only as it fills
        self.filled = self.bytes_of_text = self.documents = 0  # what the buffer holds

    def add(self, tokens: np.ndarray, position: Position) -> Iterator[None]:
        """Append the tokens of the unit at `position`, and publish each full shard. Yields after each one.

        Skips tokens that are already in an earlier run's finished shards.
        """
        start = self.taken if position == self.position else 0
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
                yield

    def publish(self) -> None:
        """Publish the buffer as a shard."""
        name = shard_name(self.split, len(self.finished))
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
        earlier = {split: {"finished": [], "position": START, "taken": 0} for split in limits}
        if found := read_progress(directory):
            if found["request"] != request:
                problem = "the unfinished dataset there has different sources or settings"
            else:
                problem = find_damage(directory, found["splits"])
            if problem:
                say(f"starting {directory} over: {problem}")
                remove_shards(directory, found["splits"])
            else:
                finished = sum(len(part["finished"]) for part in found["splits"].values())
                say(f"{directory}: continuing after {plural(finished, 'finished shard')}")
                earlier = found["splits"]
        shape = tokenizer, request["shard_tokens"]
        self.splits = {s: ShardWriter(directory, s, *shape, limit, earlier[s]) for s, limit in limits.items()}
        self.save()

    @property
    def wanted(self) -> dict[str, Position]:
        """For each split, the first unit that may contain its next tokens, or END if the split is full."""
        return {s: w.position if w.total < w.max_tokens else END for s, w in self.splits.items()}

    def add(self, tokens: dict[str, np.ndarray], position: Position) -> None:
        """Append the tokens of the unit at `position`, by split."""
        for split, part in tokens.items():
            for _ in self.splits[split].add(part, position):
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


def find_damage(directory: Path, splits: dict[str, dict]) -> str:
    """Say which of the finished shards in progress.json is missing or has the wrong size; empty if none is."""
    for record in (record for part in splits.values() for record in part["finished"]):
        try:
            found = len(open_shard(directory / record["file"]))
        except UserError as error:
            return str(error)
        if found != record["tokens"]:
            return f"{directory / record['file']} has {found} tokens instead of {record['tokens']}"
    return ""


def remove_shards(directory: Path, splits: dict[str, dict]) -> None:
    """Remove the shards that progress.json lists, and the next one of each split: a kill may have come before it was listed."""
    for split, part in splits.items():
        for number in range(len(part["finished"]) + 1):
            path = directory / shard_name(split, number)
            files.remove(path)
            files.remove(files.hidden(path))


def is_finished(directory: Path, request: dict) -> bool:
    """Return whether the directory contains the requested dataset. Raises UserError if it contains anything else."""
    if not (directory / "dataset.json").exists():
        names = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
        if names and not read_progress(directory):
            raise UserError(f"{directory} contains other files; choose another --out, or remove the directory")
        return False
    metadata, options, changed = read_metadata(directory), request["options"], []
    recorded = {source["path"]: source for source in metadata["source"]}
    for source in request["source"]:
        known = recorded.pop(source["path"], {})
        if {**source, "listing": known.get("listing")} != {**known, "listing": known.get("listing")}:
            changed.append(f"source {source['path']}")
        elif "listing" in known and source.get("listing") != known["listing"]:
            changed.append(f"source {source['path']}: names or modification times of its files")
    changed += [f"source {path}" for path in recorded]
    if metadata["tokenizer"]["name"] != request["tokenizer"]:
        changed.append("--tokenizer")
    # auto gives one of two values, and which one depends on the number of documents.
    fractions = (0.05, 0.1) if request["val_fraction"] == "auto" else (request["val_fraction"],)
    if metadata["val_fraction"] not in fractions:
        changed.append("--val_fraction")
    recorded = metadata.get("options", {})
    changed += [f"--{key}" for key in ("column", "separator", "max_tokens") if recorded.get(key) != options.get(key)]
    if not cut_into(metadata["shards"], request["shard_tokens"]):
        changed.append("--shard_tokens")
    if changed:
        said = f"{directory} is a different dataset (changed: {', '.join(changed)})"
        raise UserError(f"{said}; choose another --out, or remove it")
    spec = request["tokenizer"]
    if Path(spec).suffix and Path(spec).is_file() and resolve(spec).sha256 != metadata["tokenizer"]["sha256"]:
        raise UserError(f"{directory} was made before {spec} changed; choose another --out, or remove it")
    open_dataset(directory)  # raises UserError if a shard is missing or has the wrong size
    files.require_file(directory / "tokenizer.json")
    with contextlib.suppress(UserError):  # another program's
        if read_progress(directory):  # a kill may have left it behind
            (directory / "progress.json").unlink()
    return True


def cut_into(shards: list[ShardRecord], shard_tokens: int) -> bool:
    """Return whether `shards` are those that --shard_tokens would give: all full but the last of each split."""
    for split in ("train", "val"):
        *full, last = [record["tokens"] for record in shards if record["split"] == split] or [0]
        if last > shard_tokens or any(tokens != shard_tokens for tokens in full):
            return False
    return True
