"""How fast is prepare_data.py? `python bench/prepare.py [--build_nanogpt=PATH]`

Measures prepare_data.py from the command to the finished dataset. Compares it with tiktoken alone, on all cores and with the
text in memory already, and with the process pool of build-nanogpt's fineweb.py. All take turns, use one tokenizer and read one
parquet file: the files of the embedded corpus, shuffled and repeated.
"""

import contextlib
import os
import random
import runpy
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path
from common.errors import RunError, UserError
from hardware.host import cores
from machine import in_fresh_process, ratio, spread


@dataclass(frozen=True)
class PrepareConfig:
    build_nanogpt: str = ""
    """A checkout of build-nanogpt (empty: leave build-nanogpt out)."""
    megabytes: int = 200
    """Size of the text to encode."""
    rounds: int = 3
    out: str = str(machine.RESULTS)
    """Directory of the result."""


@dataclass
class Cost:
    """What a preparation takes, in one or several starts."""

    seconds: float = 0.0
    memory_mb: float = 0.0  # peak of all processes; shared pages count once
    downloads_mb: float = 0.0  # peak
    starts: int = 0


def main(config: PrepareConfig) -> None:
    """Measure all in turns. Print and write MB of text a second and the peak memory."""
    from dataset.sources import TextFormat, embedded_corpus
    from prepare_data import make_tokenizer

    script = Path(config.build_nanogpt).resolve() / "fineweb.py"
    if config.build_nanogpt and not script.exists():
        raise UserError(f"--build_nanogpt={config.build_nanogpt} is no checkout of build-nanogpt")
    with machine.workspace() as folder:
        text, tokenizer, costs = folder / "text.parquet", folder / "tokenizer.json", []
        size = make_text(text, config.megabytes)
        make_tokenizer("train:4096", embedded_corpus(), TextFormat()).save(tokenizer)

        def ours() -> float:
            costs.append(Cost())
            prepare(costs[-1], machine.all_cores(), folder / f"out{len(costs)}", text, f"--tokenizer={tokenizer}")
            return size / costs[-1].seconds / 1e6

        def theirs(seconds: Callable, *arguments) -> Callable[[], float]:
            return lambda: size / in_fresh_process(seconds, *arguments, text, tokenizer) / 1e6

        contenders = {"ours, MB/s": ours}
        for method in ("encode_ordinary_batch", "encode_to_numpy"):  # in its own threads; in ours
            contenders[f"tiktoken {method}, MB/s"] = theirs(tiktoken_seconds, method)
        if config.build_nanogpt:
            contenders["build-nanogpt, MB/s"] = theirs(build_nanogpt_seconds, script)
        measured = machine.in_turns(config.rounds, contenders)
    result = {name: spread(values) for name, values in measured.items()}
    for name in [*contenders][1:]:
        result[f"ours / {name.removesuffix(', MB/s')}"] = ratio(measured["ours, MB/s"], measured[name])
    result |= {"bytes": size, "peak_memory_mb": {"ours": costs[-1].memory_mb}}
    print(machine.write("prepare", result, Path(config.out)))
    print(*(f"{name}: {value:.2f}" for name, value in result.items() if name.startswith("ours /")), sep="\n")


def prepare(cost: Cost, environment: dict, out: Path, *arguments, kill_at: int = 0) -> None:
    """Run prepare_data.py to its end, or kill it when it has `kill_at` shards, and add to `cost`. Raises RunError."""
    began, log = time.perf_counter(), Path(f"{out}.log")
    with open(log, "w") as output:
        command = [sys.executable, "prepare_data.py", *map(str, arguments), f"--out={out}"]
        process = subprocess.Popen(command, cwd=machine.ROOT, env=environment, stdout=output, stderr=output)
        while process.poll() is None:
            cost.memory_mb = max(cost.memory_mb, sum(map(memory_mb, family(process.pid))))
            cost.downloads_mb = max(cost.downloads_mb, downloads_mb(out))
            if kill_at and len(list(out.glob("*.bin"))) >= kill_at:
                machine.kill(process)
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
    cost.seconds += time.perf_counter() - began
    cost.starts += 1
    if bool(process.wait()) != bool(kill_at):
        raise RunError(f"{' '.join(command[1:])} ended with {process.returncode}:\n{log.read_text()[-2000:]}")


def make_text(path: Path, megabytes: int, seed: int = 0) -> int:
    """Write the embedded corpus as a column of texts, repeatedly, each time in another order. Returns the size in bytes."""
    import pyarrow
    import pyarrow.parquet

    from dataset.sources import embedded_corpus

    files = [text for file in embedded_corpus() if (text := file.path.read_text(errors="replace"))]
    chance, size, schema = random.Random(seed), 0, pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while size < megabytes * 1e6:
            chance.shuffle(files)
            writer.write_table(pyarrow.table({"text": files}, schema))
            size += sum(len(text.encode()) for text in files)
    return size


def texts(path: Path) -> list[str]:
    """The column of texts."""
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path)["text"].to_pylist()


def tiktoken_seconds(method: str, path: Path, tokenizer: Path) -> float:
    """Seconds that tiktoken takes to encode the texts on all cores. They are in memory already."""
    from dataset.tokenizer import load

    documents, encoding = texts(path), load(tokenizer).fast
    began = time.perf_counter()
    if method == "encode_ordinary_batch":
        encoding.encode_ordinary_batch(documents, num_threads=cores())
    else:
        with ThreadPoolExecutor(cores()) as pool:
            for _ in pool.map(lambda text: encoding.encode_to_numpy(text, disallowed_special=()), documents):
                pass
    return time.perf_counter() - began


def build_nanogpt_seconds(script: Path, path: Path, tokenizer: Path) -> float:
    """Seconds that build-nanogpt's fineweb.py takes, unchanged, with these texts and this tokenizer in place of its own."""
    import multiprocessing

    import tiktoken

    from dataset.tokenizer import load

    multiprocessing.set_start_method("fork", force=True)  # its workers need the global variables of its main process
    documents, encoding = [{"text": text} for text in texts(path)], load(tokenizer).fast
    sys.modules["datasets"] = types.ModuleType("datasets")
    sys.modules["datasets"].load_dataset = lambda *_, **__: documents
    tiktoken.get_encoding = lambda _: encoding
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        here = Path(folder) / script.name
        here.symlink_to(script)  # it writes into its own directory
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            began = time.perf_counter()
            runpy.run_path(str(here), run_name="__main__")
            return time.perf_counter() - began


def downloads_mb(out: Path) -> float:
    """The size of the files under any `downloads` in a directory where files come and go."""
    total = 0
    for folder, _, names in os.walk(out):
        for path in (Path(folder) / name for name in names if "downloads" in Path(folder).parts):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
    return total / 1e6


def family(pid: int) -> list[int]:
    """The ids of a process and its descendants, on Linux."""
    members = [pid]
    for member in members:
        for path in Path(f"/proc/{member}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                members += map(int, path.read_text().split())
    return members


def memory_mb(pid: int) -> float:
    """The proportional set size of a process in MB: resident memory, where a page shared by n processes counts 1/n."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1000
    return 0.0


if __name__ == "__main__":
    machine.command_line(__doc__, PrepareConfig, main)
