"""How fast is prepare_data.py? `python bench/prepare.py [--build_nanogpt=PATH]`

Measures the time from the command to the finished dataset. Compares it with tiktoken alone, on all cores with the text already
in memory, and with build-nanogpt's process pool (fineweb.py). All take turns, use one tokenizer and read one parquet file: the
embedded corpus, shuffled and repeated. Also measures CPU time, which other programs disturb less, in total and for each part of
the work. Writes prepare.json.
"""

import contextlib
import functools
import itertools
import os
import random
import resource
import runpy
import sys
import tempfile
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path
from common.errors import UserError
from forks import in_fresh_process
from hardware.host import cores


@dataclass(frozen=True)
class PrepareConfig(machine.Out):
    build_nanogpt: str = ""
    """A checkout of build-nanogpt (empty: leave build-nanogpt out)."""
    megabytes: int = 200
    """Size of the text to encode."""
    rounds: int = 3


def main(config: PrepareConfig) -> None:
    """Measure all in turns. Print and write MB of text per second."""
    script = Path(config.build_nanogpt).resolve() / "fineweb.py"
    if config.build_nanogpt and not script.exists():
        raise UserError(f"--build_nanogpt={config.build_nanogpt} is not a checkout of build-nanogpt")
    processor = {}  # CPU seconds of each contender

    def taking(name: str, measure: Callable[[], tuple[float, float]]) -> Callable[[], float]:
        def measured() -> float:
            seconds, of_processor = measure()
            processor.setdefault(name, []).append(of_processor)
            return seconds

        return measured

    with machine.workspace() as folder:
        text, tokenizer, outs = folder / "text.parquet", folder / "small" / "tokenizer.json", itertools.count()
        size = make_text(text, config.megabytes)
        machine.timed(["prepare_data.py", f"--out={tokenizer.parent}", "--tokenizer=train:4096"])

        def ours(*sources: Path) -> tuple[float, float]:
            before = of_children()
            seconds = machine.timed(["prepare_data.py", *sources, f"--out={folder}/{next(outs)}", f"--tokenizer={tokenizer}"])
            return seconds, of_children() - before

        contenders = {"ours": taking("ours", lambda: ours(text))}
        for method in ("encode_ordinary_batch", "encode_to_numpy"):  # the first in its own threads, the second in ours
            measure = functools.partial(in_fresh_process, tiktoken_seconds, method, text, tokenizer)
            contenders[f"tiktoken {method}"] = taking(f"tiktoken {method}", measure)
        if config.build_nanogpt:
            measure = functools.partial(in_fresh_process, build_nanogpt_seconds, script, text, tokenizer)
            contenders["build-nanogpt"] = taking("build-nanogpt", measure)
        seconds = machine.in_turns(config.rounds, contenders)
        small = folder / "small.txt"
        small.write_text("Almost no text. " * 100)
        parts = {"start and end": ours(small)[1]} | in_fresh_process(parts_of_the_work, text, tokenizer)
    ratios = {
        f"ours / {name}{unit}": machine.ratio(measured[name], measured["ours"])
        for unit, measured in (("", seconds), (", processor time", processor))
        for name in list(contenders)[1:]
    }
    spreads = {f"{name}, MB/s": machine.spread([size / value / 1e6 for value in values]) for name, values in seconds.items()}
    spreads |= {f"{name}, s of processor time": machine.spread(values) for name, values in processor.items()}
    print(machine.write("prepare", spreads | ratios | {"parts, s of processor time": parts, "bytes": size}, config.out))
    print(*(f"{name}: {value:.2f}" for name, value in (ratios | parts).items()), sep="\n")


def of_children() -> float:
    """CPU seconds of this process's children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def make_text(path: Path, megabytes: int) -> int:
    """Write a column of texts: the embedded corpus, repeated in different orders. Returns its size in bytes."""
    import pyarrow
    import pyarrow.parquet

    from dataset.sources import embedded_corpus

    files = [text for file in embedded_corpus() if (text := Path(file.path).read_text(encoding="utf-8", errors="replace"))]
    chance, size, schema = random.Random(0), 0, pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while size < megabytes * 1e6:
            chance.shuffle(files)
            writer.write_table(pyarrow.table({"text": files}, schema))
            size += sum(len(text.encode()) for text in files)
    return size


def read(path: Path, tokenizer: Path) -> tuple[list[str], object]:
    """The column of texts, and tiktoken's encoding."""
    import pyarrow.parquet

    from dataset.tokenizer import resolve

    return pyarrow.parquet.read_table(path)["text"].to_pylist(), resolve(str(tokenizer)).tiktoken


def tiktoken_seconds(method: str, path: Path, tokenizer: Path) -> tuple[float, float]:
    """Seconds and CPU seconds that tiktoken takes to encode the texts, already in memory, on all cores."""
    documents, encoding = read(path, tokenizer)
    began, began_processor = time.perf_counter(), time.process_time()
    if method == "encode_ordinary_batch":
        encoding.encode_ordinary_batch(documents, num_threads=cores())
    else:
        with ThreadPoolExecutor(cores()) as pool:
            for _ in pool.map(lambda text: encoding.encode_to_numpy(text, disallowed_special=()), documents):
                pass
    return time.perf_counter() - began, time.process_time() - began_processor


def parts_of_the_work(path: Path, tokenizer: Path) -> dict[str, float]:
    """CPU seconds of each part of prepare_data.py's work, done one after the other on one thread."""
    import numpy as np

    from dataset.encode import split_hash
    from dataset.sources import list_files, read_pieces
    from dataset.tokenizer import resolve
    from dataset.tokens import token_dtype, write_shard

    parts, tokenizer, [file] = {}, resolve(str(tokenizer)), list_files(str(path))[0]

    def take(part: str, work: Callable):
        began = time.process_time()
        result = work()
        parts[part] = time.process_time() - began
        return result

    list(read_pieces(file))  # imports, and warms the file
    pieces = take("read parquet", lambda: list(read_pieces(file)))
    texts = take("decode", lambda: [piece.text for piece in pieces])
    take("hash", lambda: [split_hash(piece.data) for piece in pieces])
    encoded, dtype = (
        take("encode (tiktoken)", lambda: [tokenizer.encode(text) for text in texts]),
        token_dtype(tokenizer.vocab_size),
    )
    units = [encoded[first : first + 64] for first in range(0, len(encoded), 64)]
    arrays = take("cast and join", lambda: [np.concatenate(unit, dtype=dtype, casting="unsafe") for unit in units])
    take("count bytes", lambda: sum(int(tokenizer.bytes_per_token.take(array).sum()) for array in arrays))
    tokens = take("fill a shard", lambda: np.concatenate(arrays))
    take("write and hash a shard", lambda: write_shard(path.with_suffix(".bin"), tokens, tokenizer.vocab_size))
    return parts


def build_nanogpt_seconds(script: Path, path: Path, tokenizer: Path) -> tuple[float, float]:
    """Seconds and CPU seconds of build-nanogpt's unchanged fineweb.py, with our texts and tokenizer in place of its own."""
    import multiprocessing

    import tiktoken

    multiprocessing.set_start_method("fork", force=True)  # its workers need the global variables of its main process
    texts, encoding = read(path, tokenizer)
    documents = [{"text": text} for text in texts]
    sys.modules["datasets"] = types.ModuleType("datasets")
    sys.modules["datasets"].load_dataset = lambda *_, **__: documents
    tiktoken.get_encoding = lambda _: encoding
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        here = Path(folder) / script.name
        here.symlink_to(script)  # it writes to its own directory
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            began, before = time.perf_counter(), time.process_time() + of_children()
            runpy.run_path(str(here), run_name="__main__")
            return time.perf_counter() - began, time.process_time() + of_children() - before


if __name__ == "__main__":
    machine.command_line(__doc__, PrepareConfig, main)
