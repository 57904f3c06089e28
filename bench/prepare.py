"""How fast is prepare_data.py? `python bench/prepare.py [--build_nanogpt=PATH]`

Measures the time from the command to the finished dataset. Compares it with tiktoken alone, on all cores with the text already
in memory, and with build-nanogpt's process pool (fineweb.py). All take turns, use one tokenizer and read one parquet file: the
embedded corpus, shuffled and repeated. Writes prepare.json.
"""

import contextlib
import functools
import itertools
import os
import random
import runpy
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path
from forks import in_fresh_process
from lockstep.common.errors import UserError
from lockstep.hardware.host import cores


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
    with machine.workspace() as folder:
        text, tokenizer, outs = folder / "text.parquet", folder / "small" / "tokenizer.json", itertools.count()
        size = make_text(text, config.megabytes)
        machine.timed(["prepare_data.py", f"--out={tokenizer.parent}", "--tokenizer=train:4096"])

        def ours() -> float:
            return machine.timed(["prepare_data.py", text, f"--out={folder}/{next(outs)}", f"--tokenizer={tokenizer}"])

        contenders = {"ours": ours}
        for method in ("encode_ordinary_batch", "encode_to_numpy"):  # the first in its own threads, the second in ours
            contenders[f"tiktoken {method}"] = functools.partial(in_fresh_process, tiktoken_seconds, method, text, tokenizer)
        if config.build_nanogpt:
            contenders["build-nanogpt"] = functools.partial(in_fresh_process, build_nanogpt_seconds, script, text, tokenizer)
        seconds = machine.in_turns(config.rounds, contenders)
    ratios = {f"ours / {name}": machine.ratio(seconds[name], seconds["ours"]) for name in list(contenders)[1:]}
    spreads = {f"{name}, MB/s": machine.spread([size / value / 1e6 for value in values]) for name, values in seconds.items()}
    print(machine.write("prepare", spreads | ratios | {"bytes": size}, config.out))
    print(*(f"{name}: {value:.2f}" for name, value in ratios.items()), sep="\n")


def make_text(path: Path, megabytes: int) -> int:
    """Write a column of texts: the embedded corpus, repeated in different orders. Returns its size in bytes."""
    import pyarrow
    import pyarrow.parquet

    from lockstep.dataset.sources import embedded_corpus

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

    from lockstep.dataset.tokenizer import resolve

    return pyarrow.parquet.read_table(path)["text"].to_pylist(), resolve(str(tokenizer)).tiktoken


def tiktoken_seconds(method: str, path: Path, tokenizer: Path) -> float:
    """Seconds that tiktoken takes to encode the texts, already in memory, on all cores."""
    documents, encoding = read(path, tokenizer)
    began = time.perf_counter()
    if method == "encode_ordinary_batch":
        encoding.encode_ordinary_batch(documents, num_threads=cores())
    else:
        with ThreadPoolExecutor(cores()) as pool:
            for _ in pool.map(lambda text: encoding.encode_to_numpy(text, disallowed_special=()), documents):
                pass
    return time.perf_counter() - began


def build_nanogpt_seconds(script: Path, path: Path, tokenizer: Path) -> float:
    """Seconds of build-nanogpt's unchanged fineweb.py, with our texts and tokenizer in place of its own."""
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
            began = time.perf_counter()
            runpy.run_path(str(here), run_name="__main__")
            return time.perf_counter() - began


if __name__ == "__main__":
    machine.command_line(__doc__, PrepareConfig, main)
