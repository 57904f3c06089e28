"""Turn text into a dataset directory: `python prepare_data.py [SOURCE ...] [--out=tokens/NAME] [--tokenizer=...]`.

Sources are files and folders of .txt .md .py .jsonl .parquet (also .gz .zst .xz), here or where fsspec reads: hf://, s3://, gs://
and https://. Without one, the source is the Python standard library. Text is read in units of about a megabyte. Worker threads
split and encode them (the tokenizers release the interpreter's lock), and their tokens are written into shards in the order of
the text, so the number of workers changes nothing. The same command again after a kill continues behind the finished shards.
"""

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro
from msgspec import Meta

import command
from common import cli


@dataclass(frozen=True)
class PrepareConfig:
    sources: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[SOURCE ...]")]] = ()
    """Files or folders of .txt .md .py .jsonl .parquet, also .gz .zst .xz, or URLs of such: hf://datasets/OWNER/NAME[@REVISION],
    also with /FOLDER or /PATTERN after it, s3://, gs:// or https:// (none: the Python standard library's sources)."""
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
    check: str = ""
    """Make nothing. Read this whole dataset directory, ours or another tool's, and report what it holds, or its first fault.
    --tokenizer decodes another tool's tokens."""


if __name__ == "__main__":
    command.run("prepare_data", lambda args: cli.parse(PrepareConfig, args, __doc__))

import io
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from common import errors, files
from common.errors import UserError, say
from dataset.check import check
from dataset.encode import Split, choose_split, encode_all
from dataset.sources import HUB, SourceFile, TextFormat, embedded_corpus, list_files, on_hub, read_pieces, read_units
from dataset.tokenizer import load, resolve
from dataset.tokens import digest, read_metadata
from dataset.writer import DatasetWriter, is_finished, read_progress
from hardware.host import cores

EMBEDDED = f"the standard library of Python {sys.version.split()[0]}"
SAMPLE_CHARACTERS = 1 << 24  # how much text train:N learns from
HELD_OUT = re.compile(r"(^|[/_.-])(val|valid|validation|dev|test|eval)[/_.-]", re.IGNORECASE)  # in the names of such files
MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}  # of --max_tokens


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def find_files(sources: Iterable[str], directory: Path) -> tuple[list[SourceFile], list[dict]]:
    """The files of all sources in order, each once, and the record of each source for dataset.json. Raises UserError.

    A source on the hub stays at the commit that it had on the first start. If the dataset is finished, no server is asked.
    """
    by_path, records, known = {}, [], []  # known: what an earlier run has recorded
    if finished := (directory / "dataset.json").exists():
        known = read_metadata(directory)["source"]
    elif (directory / "progress.json").exists():
        known = files.read_json(directory / "progress.json")["request"]["source"]
    earlier = {record["path"]: record for record in known}
    for source in sources:
        record, url = {"path": source}, source
        if "://" in source and finished:
            records.append(earlier.get(source, record))
            continue
        if source.startswith("hf://"):
            url, record["revision"] = on_hub(source, earlier.get(source, {}).get("revision", ""))
        found, others = (embedded_corpus(), 0) if source == EMBEDDED else list_files(source, url)
        if "://" in source:
            describe(source, found)
        if others:
            say(f"{source}: skipped {errors.plural(others, 'file')} of other types")
        records.append(record | {"files": len(found), "bytes": sum(file.size for file in found)})
        for file in found:
            by_path.setdefault(os.path.abspath(str(file)), file)
    return list(by_path.values()), records


def describe(source: str, found: list[SourceFile]) -> None:
    """Say which files a URL stands for, and whether some of them seem to be for validation."""
    span = " to ".join(dict.fromkeys([found[0].name, found[-1].name]))
    say(f"{source}: {errors.plural(len(found), 'file')}, {sum(file.size for file in found) / 1e6:,.1f} MB: {span}")
    held_out = [file.name for file in found if HELD_OUT.search(file.name)]
    if 0 < len(held_out) < len(found):
        say(
            f"warning: {len(held_out)} of these files seem to be for validation or tests, such as {held_out[0]}; to "
            "take only the others, give a pattern, as in hf://datasets/OWNER/NAME/data/train-*"
        )


def sample(source_files: list[SourceFile], text: TextFormat) -> Iterator[str]:
    """At most SAMPLE_CHARACTERS of text, in equal parts from the beginnings of at most 1000 of the files.

    Of files on servers, only the first one is used: every further one is a request.
    """
    chosen = [file for file in source_files if file.is_local] + [file for file in source_files if not file.is_local][:1]
    chosen = chosen[:: -(-len(chosen) // 1000)]
    left = SAMPLE_CHARACTERS
    for number, file in enumerate(chosen):
        share = left // (len(chosen) - number)
        for piece in read_pieces(file, text):
            part = piece.text[:share]
            yield part
            share, left = share - len(part), left - len(part)
            if not share:
                break


# ---------------------------------------------------------------------------------------------------------------------
# The command


def prepare(config: PrepareConfig) -> None:
    """Make the dataset directory that `config` describes, finish it, or find it finished. Raises UserError."""
    began, text = time.perf_counter(), TextFormat(config.column, config.max_document_bytes)
    options, directory = read_options(config), out_directory(config)
    with files.held(directory):
        source_files, records = find_files(sorted(set(config.sources)) or [EMBEDDED], directory)
        request = {
            "source": records,
            "tokenizer": config.tokenizer or ("gpt2" if config.sources else "train:4096"),
            "val_fraction": config.val_fraction,
            "shard_tokens": config.shard_tokens,
            "options": options,
            "units": 3,  # the version of what progress.json holds
        }
        if is_finished(directory, request):
            say(f"{directory} already holds this dataset")
            return
        request["listing"] = digest([(file.name, file.size) for file in source_files])
        progress = read_progress(directory, request)
        split = choose_split(source_files, text, config.val_fraction)
        if progress:
            tokenizer = load(directory / "tokenizer.json", name=request["tokenizer"])
        else:
            tokenizer = resolve(request["tokenizer"], lambda: sample(source_files, text))
            if request["tokenizer"].startswith("train:") and tokenizer.vocab_size < int(request["tokenizer"][6:]):
                say(f"there is too little text for more than {tokenizer.vocab_size} tokens")
        writer = DatasetWriter(directory, request, tokenizer, split.val_fraction, progress)
        if progress:
            say(f"{directory}: going on after {errors.plural(len(writer.records), 'finished shard')}")
        encode_files(writer, split, source_files, text, config.workers or cores())
        writer.finish()
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


def out_directory(config: PrepareConfig) -> Path:
    """Where the dataset is made. Raises UserError where neither --out nor a source says it."""
    if "://" in config.out:
        raise UserError(f"--out={config.out} must be a directory of this machine; copy the finished dataset where you need it")
    if config.out:
        return Path(config.out)
    if not config.sources:
        return Path("tokens/python")
    name = Path(config.sources[0]).resolve().name.lstrip(".").partition(".")[0]
    if config.sources[0].startswith(HUB):
        _, slash, path = config.sources[0].removeprefix(HUB).partition("/")
        if not slash:
            raise UserError(f"{config.sources[0]}: wanted {HUB}OWNER/NAME")
        name = re.split("[/@]", path)[0]
    if not name or "*" in name:
        raise UserError(f"{config.sources[0]} gives a dataset no name; add --out=tokens/NAME")
    return Path("tokens") / name


def encode_files(writer: DatasetWriter, split: Split, source_files: list[SourceFile], text: TextFormat, workers: int) -> None:
    """Encode the text that is not in finished shards yet, and write its tokens."""
    starts = writer.unfinished
    first = min((file for file, _ in starts.values()), default=len(source_files))
    sizes, style = [file.size for file in source_files], {}
    if not sys.stderr.isatty():  # no bar moves: its text follows the name of each finished shard
        style = {"file": io.StringIO(), "mininterval": 60, "bar_format": ", {percentage:.0f} %, {remaining} left"}
    bar = tqdm(total=sum(sizes), initial=sum(sizes[:first]), unit="B", unit_scale=True, **style)
    not_utf8: dict[str, None] = {}
    without_text = 0

    def units():
        nonlocal without_text
        for position, unit in read_units(source_files[first:], text, first):
            if not writer.unfinished:
                return
            not_utf8.update(dict.fromkeys(piece.not_utf8 for piece in unit if piece.not_utf8))
            without_text += sum(not piece.data for piece in unit)
            yield position, unit, [name for name, start in starts.items() if position >= start]

    for position, size, tokens in encode_all(writer.tokenizer, split, units(), workers):
        bar.update(size)
        for record in writer.add(tokens, position):
            tqdm.write(f"{record['file']}: {record['tokens']:,} tokens{bar if style else ''}")
    bar.close()
    if without_text:
        say(f"left out {errors.plural(without_text, 'row')} without a text")
    if not_utf8:
        count = errors.plural(len(not_utf8), "file")
        say(f"warning: {count} with bytes that are not UTF-8, which became U+FFFD: {files.shortened(not_utf8)}")


def main(config: PrepareConfig) -> int:
    """Prepare or check. Returns the exit status: 75 after Ctrl-C. Raises UserError."""
    try:
        if config.check:
            check(Path(config.check), config.tokenizer)
        else:
            prepare(config)
    except KeyboardInterrupt:
        print("stopped; the same command goes on after the last finished shard", file=sys.stderr)
        return errors.EX_TEMPFAIL
    return 0
