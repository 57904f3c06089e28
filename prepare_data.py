"""Turn text into a dataset directory: `python prepare_data.py [SOURCE ...] [--out=tokens/NAME] [--tokenizer=...]`.

Sources are files and folders of .txt .md .py .jsonl .parquet (also .gz .zst .xz), and hf://datasets/OWNER/NAME[/FOLDER] on the
Hugging Face hub, also with * in a name; without one, the Python standard library. Text is read in units of about a megabyte.
Worker threads split and encode them (the tokenizers release the interpreter's lock), and their tokens are written into shards
in the order of the text, so the number of workers changes nothing. The same command again after a kill goes on where the last
finished shard ends.

Many machines share a corpus: each one makes --part=NUMBER/COUNT of it, and --join makes one dataset of the parts in --out.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # which python -I and PYTHONSAFEPATH=1 leave out
    from common import errors

    errors.begin()

import io
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Meta
from tqdm import tqdm

from common import cli, errors, files
from common.errors import UserError, say
from dataset import hub
from dataset.check import check
from dataset.encode import Split, by_hash, choose_split, encode_all
from dataset.join import join, part_directory, part_files
from dataset.sources import (
    SourceFile,
    TextFormat,
    embedded_corpus,
    fetch,
    fetch_ahead,
    hub_files,
    local_files,
    read_pieces,
    read_units,
)
from dataset.tokenizer import load, resolve
from dataset.tokens import digest, read_metadata
from dataset.writer import DatasetWriter, Unfinished, is_finished, read_progress
from hardware.host import cores

EMBEDDED = f"the standard library of Python {sys.version.split()[0]}"
SAMPLE_CHARACTERS = 1 << 24  # how much text train:N learns from
HELD_OUT = re.compile(r"(^|[/_.-])(val|valid|validation|dev|test|eval)[/_.-]", re.IGNORECASE)  # in the names of such files
MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}  # of --max_tokens


@dataclass(frozen=True)
class PrepareConfig:
    sources: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[SOURCE ...]")]] = ()
    """Files or folders of .txt .md .py .jsonl .parquet, also .gz .zst .xz, or hf://datasets/OWNER/NAME[@REVISION][/FOLDER],
    or with a pattern, as in hf://datasets/OWNER/NAME/data/train-* (none: the Python standard library's sources)."""
    out: str = ""
    """Dataset directory (default: tokens/ and the first source's name; tokens/python without a source)."""
    tokenizer: str = ""
    """train:N, gpt2, cl100k_base, o200k_base, bytes, or the path of a tokenizer.json or .tiktoken file.
    By default gpt2, and without a source train:4096."""
    column: str = "text"
    """The column of .parquet files, or the key in .jsonl files, that holds the text."""
    max_document_bytes: Annotated[int, Meta(gt=0, le=1 << 31)] = 1 << 25
    """The longest line of a .jsonl file and the longest row of a .parquet file. Memory grows with it."""
    val_fraction: Annotated[float, Meta(ge=-1, lt=1)] = -1.0
    """Share of the documents for validation (negative: 0.05; with fewer than 100 documents, the last 0.1 of the text)."""
    max_tokens: str = ""
    """Stop after so many tokens of both splits together, such as 500M or 10B (empty: all text)."""
    shard_tokens: Annotated[int, Meta(gt=0, lt=1 << 31)] = 100_000_000
    """Tokens of a shard. The last shard of a split is shorter."""
    workers: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads that encode (0: one per core)."""
    part: str = ""
    """Make only a part of the dataset, such as 3/64, in OUT/part-0003-of-0064. All machines need the same sources and flags."""
    join: bool = False
    """Make one dataset of all parts in OUT: the one that a single machine would have made."""
    check: str = ""
    """Make nothing. Read this whole dataset directory, ours or another tool's, and report what it holds, or its first fault.
    --tokenizer decodes another tool's tokens."""


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def find_files(sources: Iterable[str], directory: Path) -> tuple[list[SourceFile], list[dict]]:
    """The files of all sources in order, each once, and the record of each source for dataset.json. Raises UserError.

    A source on the hub stays at the commit that it had on the first start. If the dataset is finished, the hub is not asked.
    """
    earlier, finished = earlier_sources(directory), (directory / "dataset.json").exists()
    by_path, records = {}, []
    for source in sources:
        record = {"path": source}
        if source.startswith(hub.SCHEME) and finished:
            records.append(earlier.get(source, record))
            continue
        if source.startswith(hub.SCHEME):
            record["revision"] = earlier.get(source, {}).get("revision") or hub.find_commit(source)
            found = hub_files(source, record["revision"], directory / "downloads")
            span = " to ".join(dict.fromkeys([found[0].name, found[-1].name]))
            say(f"{source}: {errors.plural(len(found), 'file')}, {sum(file.size for file in found) / 1e6:,.1f} MB: {span}")
            held_out = [file.name for file in found if HELD_OUT.search(file.name)]
            if 0 < len(held_out) < len(found):
                say(
                    f"warning: {len(held_out)} of these files seem to be for validation or tests, such as {held_out[0]}; to "
                    "take only the others, give a pattern, as in hf://datasets/OWNER/NAME/data/train-*"
                )
        else:
            found, others = (embedded_corpus(), 0) if source == EMBEDDED else local_files(source)
            if others:
                say(f"{source}: skipped {errors.plural(others, 'file')} of other types")
        records.append(record | {"files": len(found), "bytes": sum(file.size for file in found)})
        for file in found:
            by_path.setdefault(os.path.abspath(file.path), file)
    return list(by_path.values()), records


def earlier_sources(directory: Path) -> dict[str, dict]:
    """The records of the sources that an earlier run in this directory has read, by their path."""
    progress, records = directory / "progress.json", []
    if (directory / "dataset.json").exists():
        records = read_metadata(directory)["source"]
    elif progress.exists():
        records = files.read_json(progress, Unfinished)["request"]["source"]
    return {record["path"]: record for record in records}


def sample(source_files: list[SourceFile], text: TextFormat) -> Iterator[str]:
    """At most SAMPLE_CHARACTERS of text, in equal parts from the beginnings of at most 1000 of the files.

    Of files on the hub, only the first one is used: it has to be downloaded.
    """
    chosen = [file for file in source_files if not file.remote] + [file for file in source_files if file.remote][:1]
    chosen = chosen[:: -(-len(chosen) // 1000)]
    left = SAMPLE_CHARACTERS
    for number, file in enumerate(chosen):
        share = left // (len(chosen) - number)
        for piece in read_pieces(fetch(file), text):
            part = piece.text[:share]
            yield part
            share, left = share - len(part), left - len(part)
            if not share:
                break


# ---------------------------------------------------------------------------------------------------------------------
# The command


def prepare(config: PrepareConfig) -> None:
    """Make the dataset directory that `config` describes, finish it, or find it finished. Raises UserError."""
    options, part, directory = read_options(config), read_part(config), out_directory(config)
    if part:
        if (directory / "dataset.json").exists():
            raise UserError(f"--part={config.part}: {directory} already holds a whole dataset; choose another --out")
        directory = part_directory(directory, *part)
        options |= {"part": f"{part[0]}/{part[1]}", "shard_tokens": config.shard_tokens}  # what joining needs
    with files.held(directory):
        fill(directory, config, options, part)


def fill(directory: Path, config: PrepareConfig, options: dict, part: tuple[int, int] | None) -> None:
    """Write the dataset, or a part of it, into a directory that no other process writes to. Raises UserError."""
    began, text = time.perf_counter(), TextFormat(config.column, config.max_document_bytes)
    source_files, records = find_files(sorted(set(config.sources)) or [EMBEDDED], directory)
    request = {
        "source": records,
        "tokenizer": config.tokenizer or ("gpt2" if config.sources else "train:4096"),
        "val_fraction": config.val_fraction,
        "shard_tokens": config.shard_tokens,
        "options": options,
        "units": 2,  # the version of what the position in progress.json counts
    }
    downloads = directory / "downloads"
    if is_finished(directory, request):
        shutil.rmtree(downloads, ignore_errors=True)
        say(f"{directory} already holds this dataset")
        return
    request["listing"] = digest([(file.name, file.size) for file in source_files])
    progress = read_progress(directory, request, ignore="downloads")
    hub.remove_unfinished(downloads)
    if part:
        source_files = [source_files[i] for i in part_files(source_files, *part)]
        split = by_hash(config.val_fraction)
    elif progress and not progress["by_tail"]:
        split = Split(progress["val_fraction"])  # known since the first start; to find it again, text may have to be downloaded
    else:
        split = choose_split(map(fetch, source_files), text, config.val_fraction)
    if progress:
        tokenizer = load(directory / "tokenizer.json", name=request["tokenizer"])
    else:
        tokenizer = resolve(request["tokenizer"], lambda: sample(source_files, text))
        if request["tokenizer"].startswith("train:") and tokenizer.vocab_size < int(request["tokenizer"][6:]):
            say(f"there is too little text for more than {tokenizer.vocab_size} tokens")
    writer = DatasetWriter(directory, request, tokenizer, split.val_fraction, by_tail=split.boundary is not None)
    writer.begin(progress)
    if progress:
        say(f"{directory}: going on after {errors.plural(len(writer.records), 'finished shard')}")
    encode_files(writer, split, source_files, text, config)
    writer.finish()
    shutil.rmtree(downloads, ignore_errors=True)  # the thread that downloads the next file may still write there
    say(f"{writer.summary()}, {time.perf_counter() - began:.1f} s")


def read_options(config: PrepareConfig) -> dict:
    """The settings that dataset.json records where they are given. Raises UserError for settings that cannot work."""
    if config.val_fraction == 0:
        raise UserError("--val_fraction=0 leaves a split empty; more than 0 and less than 1 works, as 0.1")
    options = {}
    if config.column != "text":
        options["column"] = config.column
    if config.max_tokens:
        options["max_tokens"] = cli.read_quantity(config.max_tokens, MULTIPLES)
        if not 2 <= options["max_tokens"] < 1 << 62:
            raise UserError(f"--max_tokens={config.max_tokens} is not a number of tokens such as 500M or 10B")
    return options


def read_part(config: PrepareConfig) -> tuple[int, int] | None:
    """--part as (number, count), counted from 1. None without it. Raises UserError."""
    if not config.part:
        return None
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", config.part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--part={config.part} is not NUMBER/COUNT; of three parts, --part=3/3 is the last")
    if not config.tokenizer or config.tokenizer.startswith("train:"):
        raise UserError(
            "--part needs a --tokenizer that is the same on all machines: one by name, or the path of a tokenizer.json, which "
            "train:N makes from any text on one machine"
        )
    return int(match[1]), int(match[2])


def out_directory(config: PrepareConfig) -> Path:
    """Where the dataset is made. Raises UserError where neither --out nor a source says it."""
    if config.out:
        return Path(config.out)
    if not config.sources:
        return Path("tokens/python")
    if config.sources[0].startswith(hub.SCHEME):
        return Path("tokens") / hub.parse_address(config.sources[0])["repository"].partition("/")[2]
    name = Path(config.sources[0]).resolve().name.lstrip(".").partition(".")[0]
    if not name:
        raise UserError(f"{config.sources[0]} gives a dataset no name; add --out=tokens/NAME")
    return Path("tokens") / name


def encode_files(
    writer: DatasetWriter, split: Split, source_files: list[SourceFile], text: TextFormat, config: PrepareConfig
) -> None:
    """Encode the text that is not on disk yet, and write its tokens."""
    start = writer.position
    first, sizes = start[0], [file.size for file in source_files]
    style = {}
    if not sys.stderr.isatty():  # no bar moves: its text follows the name of each finished shard
        style = {"file": io.StringIO(), "mininterval": 60, "bar_format": ", {percentage:.0f} %, {remaining} left"}
    bar = tqdm(total=sum(sizes), initial=sum(sizes[:first]), unit="B", unit_scale=True, **style)
    not_utf8: dict[Path, None] = {}
    without_text = 0

    def units():
        nonlocal without_text
        for position, unit in read_units(fetch_ahead(source_files[first:]), text, first):
            if writer.is_full:
                return
            not_utf8.update(dict.fromkeys(piece.not_utf8 for piece in unit if piece.not_utf8))
            without_text += sum(not piece.data for piece in unit)
            if position > start:
                yield position, unit
            else:
                bar.update(sum(piece.bytes_on_disk for piece in unit))

    for position, size, tokens in encode_all(writer.tokenizer, split, units(), config.workers or cores()):
        bar.update(size)
        for record in writer.add(tokens, position):
            tqdm.write(f"{record['file']}: {record['tokens']:,} tokens{bar if style else ''}")
    bar.close()
    if without_text:
        say(f"left out {errors.plural(without_text, 'row')} without a text")
    if not_utf8:
        count = errors.plural(len(not_utf8), "file")
        say(f"warning: {count} with bytes that are not UTF-8, which became U+FFFD: {files.shortened(map(str, not_utf8))}")


def main() -> None:
    """The command line."""
    with errors.user_errors():
        config = cli.parse(PrepareConfig, sys.argv[1:], "Turn text into a dataset directory of token shards.")
        try:
            if config.check:
                check(Path(config.check), config.tokenizer)
            elif config.join:
                join(out_directory(config))
            else:
                prepare(config)
        except KeyboardInterrupt:
            print("stopped; the same command goes on after the last finished shard", file=sys.stderr)
            raise SystemExit(75) from None


if __name__ == "__main__":
    main()
