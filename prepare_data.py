"""Turn text into a dataset directory: `python prepare_data.py [SOURCE ...] [--out=tokens/NAME] [--tokenizer=...]`.

Sources are files and folders of .txt .md .py .jsonl .parquet (also .gz .zst .xz), on disk or at any URL that fsspec opens, such
as hf://, s3://, gs:// and https://. Without a source, this prepares the Python standard library. Worker threads encode about a
megabyte of text at a time (the tokenizers release the GIL). Tokens are written in the order of the text, so the number of
workers does not affect the result. After a kill, the same command picks up after the last finished shard.
"""

from lockstep import command

if __name__ == "__main__":
    command.require_packages()

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro
from msgspec import Meta

from lockstep.common import cli
from lockstep.common.records import Auto


@dataclass(frozen=True)
class PrepareConfig:
    sources: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[SOURCE ...]", help_behavior_hint="")]] = ()
    """Files, folders or URLs (default: the Python standard library). On the Hugging Face Hub:
    hf://datasets/OWNER/NAME[@REVISION], optionally followed by /FOLDER or /PATTERN."""
    out: str = ""
    """Dataset directory (default: tokens/ plus the first source's name, or tokens/python)."""
    tokenizer: str = ""
    """train:N, train:N:llama3 (for llama.cpp), gpt2, cl100k_base, o200k_base, bytes, or a tokenizer.json or .tiktoken file.
    Default: gpt2, or train:4096 without a source."""
    column: str = "text"
    """Text column of .parquet files, or text key of .jsonl files."""
    separator: str = ""
    """What separates the documents of a text file, such as '<|endoftext|>' (empty: each file is one document)."""
    max_document_bytes: Annotated[int, Meta(gt=0, le=1 << 31)] = 1 << 25
    """Longest line of a .jsonl file, row of a .parquet file, or document between separators. Memory use grows with it."""
    val_fraction: Annotated[float, Meta(gt=0, lt=1)] | Auto = "auto"
    """Fraction of documents for validation (auto: 0.05; with fewer than 100 documents, the last tenth of the text)."""
    max_tokens: str = ""
    """Stop after this many tokens in both splits together, such as 500M or 10B (empty: all text)."""
    shard_tokens: Annotated[int, Meta(gt=0, lt=1 << 31)] = 100_000_000
    """Tokens per shard. The last shard of a split is shorter."""
    workers: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Encoding threads (0: one per core)."""
    check: str = ""
    """Instead of preparing anything, read all of this dataset directory, and report its contents or the first problem.
    Other tools' tokens work too; --tokenizer decodes them."""


if __name__ == "__main__":
    command.run("prepare_data", lambda args: cli.parse(PrepareConfig, args, __doc__))

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from lockstep.common import errors, files
from lockstep.common.errors import UserError, say
from lockstep.dataset.check import check, describe
from lockstep.dataset.encode import Split, choose_split, encode_all, read_units
from lockstep.dataset.sources import (
    HUB,
    ICONV,
    LINKED,
    SourceFile,
    at_commit,
    embedded_corpus,
    is_held_out,
    list_files,
    read_pieces,
    require_utf8,
)
from lockstep.dataset.tokenizer import resolve
from lockstep.dataset.tokens import digest, read_metadata
from lockstep.dataset.writer import END, DatasetWriter, is_finished, read_progress
from lockstep.hardware.host import cores, in_notebook

EMBEDDED = f"the standard library of Python {sys.version.split()[0]}"
SAMPLE_CHARACTERS = 1 << 24  # characters that train:N learns from
MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}  # suffixes of --max_tokens


def find_files(config: PrepareConfig, directory: Path) -> tuple[list[SourceFile], list[dict]]:
    """Find the files of all sources, in order and without duplicates, and each source's record for dataset.json.

    A Hub source stays pinned to the first run's commit. Once the dataset is finished, no server is contacted. Raises UserError.
    """
    by_path, records, finished = {}, [], (directory / "dataset.json").exists()
    if finished:
        earlier = read_metadata(directory)["source"]
    elif progress := read_progress(directory):
        earlier = progress["request"]["source"]
    else:
        earlier = []
    earlier = {record["path"].rstrip("/"): record for record in earlier}
    form = config.column, config.max_document_bytes, config.separator
    roots = [os.path.realpath(source) for source in config.sources if "://" not in source]
    for source in sorted({source.rstrip("/"): source for source in config.sources}.values()) or [EMBEDDED]:
        before = earlier.get(source.rstrip("/"), {})
        record, url = {"path": before.get("path", source)}, source
        if "://" in source and finished:
            records.append(before or record)
            continue
        if source.startswith("hf://"):
            url, record["revision"] = at_commit(source, before.get("revision", ""))
        found, skipped = (embedded_corpus(), {}) if source == EMBEDDED else list_files(source, url, *form)
        size, held_out = sum(file.size for file in found), [file.name for file in found if is_held_out(file.name)]
        for link in skipped.pop(LINKED, []):
            if not any(Path(os.path.realpath(link)).is_relative_to(root) for root in roots):
                problem = f"{os.path.relpath(link)} is a link to a folder, which is not followed"
                raise UserError(f"{source}: {problem}; pass that folder as another source, or remove the link")
        if skipped:
            kinds = [f"{errors.plural(len(places), 'file')} {reason}" for reason, places in sorted(skipped.items())]
            way_in = "; to take any of them, name the files" * (set(skipped) != {"of other types"})
            say(f"{source}: skipped {', '.join(kinds)}{way_in}")
        if "://" in source:
            span = " to ".join(dict.fromkeys([found[0].name, found[-1].name]))
            say(f"{source}: {errors.plural(len(found), 'file')}, {size / 1e6:,.1f} MB ({span})")
        if 0 < len(held_out) < len(found):
            say(f"warning: {len(held_out)} of these files look like validation or test data, such as {held_out[0]}")
        if "://" not in source:
            # Names, sizes and times, as for make or rsync: to hash the text would take as long as reading all of it once more.
            record["listing"] = digest([(file.name, file.size, file.version) for file in found])
        records.append(record | {"files": len(found), "bytes": size})
        for file in found:
            by_path.setdefault(os.path.abspath(str(file)), file)
    return list(by_path.values()), records


def sample(source_files: list[SourceFile]) -> Iterator[str]:
    """Yield at most SAMPLE_CHARACTERS of text, in equal parts from the beginnings of at most 1000 files."""
    local, remote = ([file for file in source_files if ("://" in str(file)) == far] for far in (False, True))
    chosen = local + remote[:1]  # each additional remote file would cost a request
    chosen, left = chosen[:: -(-len(chosen) // 1000)], SAMPLE_CHARACTERS
    for number, file in enumerate(chosen):
        share = left // (len(chosen) - number)
        for piece in read_pieces(file):
            part = piece.text[:share]
            yield part
            share, left = share - len(part), left - len(part)
            if not share:
                break


def prepare(config: PrepareConfig) -> None:
    """Make the dataset that `config` describes, or finish what an earlier run started. Raises UserError."""
    began, directory, options = time.perf_counter(), out_directory(config), {}  # options: recorded in dataset.json
    if config.column != "text":
        options["column"] = config.column
    if config.separator:
        options["separator"] = config.separator
    if config.max_tokens:
        options["max_tokens"] = cli.read_quantity(config.max_tokens, MULTIPLES)
        if not 2 <= options["max_tokens"] < 1 << 62:
            raise UserError(f"--max_tokens={config.max_tokens} must be a number of tokens such as 500M or 10B")
    with files.held(directory):
        source_files, records = find_files(config, directory)
        request = {"source": records, "tokenizer": config.tokenizer or ("gpt2" if config.sources else "train:4096")}
        request |= {"val_fraction": config.val_fraction, "shard_tokens": config.shard_tokens, "options": options}
        if is_finished(directory, request):
            say(f"{directory} already holds this dataset")
            return
        if config.sources and not (directory / "progress.json").exists():
            require_utf8(source_files)
        split = choose_split(source_files, config.val_fraction)
        tokenizer = resolve(request["tokenizer"], lambda: sample(source_files))
        for note in tokenizer.check_text():
            say(f"note: {note}")
        if request["tokenizer"].startswith("train:") and tokenizer.vocab_size < int(request["tokenizer"].split(":")[1]):
            say(f"the vocabulary has only {tokenizer.vocab_size:,} tokens because the text has too few different words")
        # A restart continues only if the files, the tokenizer and the division into units (version `units`) are the same.
        listing = digest([(file.name, file.size, file.version) for file in source_files])
        request |= {"listing": listing, "tokenizer_sha256": tokenizer.sha256, "units": 5}
        writer = DatasetWriter(directory, request, tokenizer, split.val_fraction)
        encode_files(writer, split, source_files, config.workers or cores())
        writer.finish()
        for name, part in writer.splits.items():
            say(describe(name, part.finished))
        say(f"{directory}: a vocabulary of {tokenizer.vocab_size:,} tokens, prepared in {time.perf_counter() - began:.1f} s")


def out_directory(config: PrepareConfig) -> Path:
    """Return the dataset directory. Raises UserError if neither --out nor a source names it."""
    cli.require_local("out", config.out, "`hf upload` sends the finished dataset to the Hugging Face Hub")
    if config.out or not config.sources:
        return Path(config.out or "tokens/python")
    source = config.sources[0]
    on_hub = re.match(rf"{HUB}[^/]+/([^/@]+)", source)
    name = on_hub[1] if on_hub else Path(source).resolve().name.lstrip(".").partition(".")[0]
    if not name or "*" in name:
        raise UserError(f"cannot name a dataset after {source}; add --out=tokens/NAME")
    return Path("tokens") / name


def encode_files(writer: DatasetWriter, split: Split, source_files: list[SourceFile], workers: int) -> None:
    """Encode the text that is not yet in finished shards, and write its tokens."""
    wanted, sizes, tokenizer = writer.wanted, [file.size for file in source_files], writer.tokenizer
    without_text, spelled, replaced = 0, Counter(), Counter()
    units, done = read_units(source_files, split, wanted, not tokenizer.cuttable), sum(sizes[: min(wanted.values())[0]])
    # Seconds between updates of the progress bar. In a log, each is a new line, and a notebook stores them all.
    seconds = (5 if in_notebook() else 0.1) if sys.stderr.isatty() else 60
    with tqdm(total=sum(sizes), initial=done, unit="B", unit_scale=True, mininterval=seconds) as bar:
        for unit, tokens in encode_all(tokenizer, units, workers):
            bar.update(int(unit.bytes_on_disk))  # the rounded sum of fractions may exceed the total
            without_text += unit.without_text
            spelled += unit.spelled
            if unit.replaced:
                replaced[str(source_files[unit.position[0]])] += unit.replaced
            writer.add(tokens, unit.position)
            if min(writer.wanted.values()) == END:
                break
    if without_text:
        say(f"skipped {errors.plural(without_text, 'row')} without text")
    for name, count in spelled.items():
        as_text = f"the text spells out {name} {errors.plural(count, 'time')}, which was encoded as ordinary text"
        say(f"note: {as_text}; --separator='{name}' starts a document at each one in a text file")
    if replaced:
        count, shown = errors.plural(len(replaced), "file"), files.shortened(f"{n} ({c:,})" for n, c in replaced.items())
        problem = f"{count} contained invalid UTF-8, which was replaced by U+FFFD: {shown}"
        say(f"warning: {problem}; if a file has another encoding, convert it with {ICONV}")


def main(config: PrepareConfig) -> int:
    """Prepare or check. Returns the exit status: 75 after Ctrl-C. Raises UserError."""
    try:
        if config.check:
            cli.require_local("check", config.check, "copy the dataset here first")
            errors.refuse(f"--check only reads {config.check}; leave out {source}" for source in config.sources)
            check(Path(config.check), config.tokenizer)
        else:
            prepare(config)
    except KeyboardInterrupt:
        print("stopped; run the same command to continue after the last finished shard", file=sys.stderr)
        return errors.EX_TEMPFAIL
    return 0
