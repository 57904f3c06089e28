"""Change files at random and read them: does any reader fail in another way than with a UserError?

python bench/fuzz.py --executions=10000000 [--max_minutes=5] [--only=manifest,shard] [--seed=1]

Each target is a format, good files of it, and the function that reads it. A file is changed in its structure (JSON) or in its
bytes, written, and read in a process of its own, so that a crash of a library is found too. An input that fails is kept in
tests/corpus/TARGET/, and the tests read it from then on. The first input for each answer of a reader is kept in
STATE/TARGET/corpus/, and is changed further.

The same command goes on where it was stopped, and several may run side by side on different targets. A target that is read by
another version of a library is counted from 0 again.
"""

import base64
import contextlib
import copy
import functools
import gc
import gzip
import hashlib
import importlib.metadata
import json
import lzma
import mmap
import operator
import os
import platform
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from safetensors.torch import save_file

import settings
from checkpoints import checkpoint, huggingface, retention
from common import cli, errors, files
from common.errors import UserError
from dataset import shards, sources, tokenizer
from dataset.tokens import open_dataset, open_shard, write_shard
from model import GPT
from reports import curves

CORPUS = machine.ROOT / "tests" / "corpus"
STATE = machine.ROOT / "runs" / "fuzz"
PARSERS = ("msgspec", "numpy", "pyarrow", "safetensors", "tiktoken", "tokenizers", "tyro")
SECONDS, MEMORY = 10, 1 << 32  # of computing, for one file; bytes that the process may take
PIECE = 5000  # files after which the state is saved
KEPT_FILES, KEPT_BYTES = 400, 1 << 16  # of each target's corpus, and of a file in it
NUMBERS = [0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63, -(2**63), 2**64, 10**30, 10**400, 0.5, -0.0, 1e308]
TEXTS = ["", "x", "\0", "../x", "/dev/zero", "\ud800", "a" * 5000]
VALUES = [*NUMBERS, *TEXTS, None, True, False, [], {}, [[]], {"": {}}, ["x", 1]]
RAW = ["NaN", "-Infinity", "1e999", "[" * 5000, '{"a":' * 5000, '"\\ud800"', "01", "1" * 5000, "//", "'x'", "\ufeff"]
BYTES = [
    b"",
    b"\0",
    b"\xff",
    b"\xff\xfe",
    b"\n",
    b'"',
    b"[",
    b"{",
    b"}",
    b"\0" * 64,
    b"\xff" * 64,
    b"A" * 4096,
    b"\xed\xa0\x80",
]


@dataclass(frozen=True)
class Target:
    """A format: the name of its file, what is in it, and who reads it."""

    name: str
    file: str  # in a folder
    seeds: list[bytes]
    read: Callable[[Path], object]  # the folder
    others: dict[str, bytes]  # other files of the folder
    is_json: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# Changing


def nodes(value, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value inside a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from nodes(child, (*path, key))


def change_json(rng: random.Random, content: bytes) -> bytes:
    """Replace, remove, repeat or rename a few values of a JSON document."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return change_bytes(rng, content)
    raw = ""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        paths = list(nodes(value))
        if not paths or rng.random() < 0.02:
            value = copy.deepcopy(rng.choice(VALUES))
            break
        *parents, key = rng.choice(paths)
        parent = functools.reduce(operator.getitem, parents, value)
        match rng.randrange(6):
            case 0:
                del parent[key]
            case 1:
                parent[key] = copy.deepcopy(functools.reduce(operator.getitem, rng.choice(paths), value))
            case 2 if isinstance(parent, dict):
                parent[str(rng.choice(VALUES))[:100]] = parent[key]
            case 2:
                parent.append(parent[key])
            case 3:
                parent[key], raw = "<raw>", rng.choice(RAW)
            case _:
                parent[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(value).replace('"<raw>"', raw).encode("utf-8", "surrogatepass")


def change_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flip, overwrite, insert, remove or repeat bytes at a few places."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(7):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = rng.randrange(256)
            case 2:
                changed[at:at] = rng.choice(BYTES)
            case 3:
                del changed[at : at + rng.choice((1, 4, 64, 4096))]
            case 4:
                changed[at:at] = changed[at : at + rng.choice((1, 8, 128))]
            case 5:
                number = rng.choice([n for n in NUMBERS if isinstance(n, int) and -(2**63) <= n < 2**63])
                packed = struct.pack("<q", number)[: rng.choice((1, 2, 4, 8))]
                changed[at : at + len(packed)] = packed
            case 6:
                changed[at:at] = str(rng.choice(NUMBERS)).encode()
    return bytes(changed)


def change(rng: random.Random, target: Target, corpus: list[bytes]) -> bytes:
    """A changed file of a target: a good one, or one of its corpus."""
    content = rng.choice(corpus if corpus and rng.random() < 0.5 else target.seeds)
    return change_json(rng, content) if target.is_json and rng.random() < 0.8 else change_bytes(rng, content)


# ---------------------------------------------------------------------------------------------------------------------
# Targets


def read_text_file(name: str) -> Callable[[Path], object]:
    """Reads a source of text to its end."""
    form = sources.TextFormat(max_document_bytes=1 << 22)
    return lambda folder: [list(sources.parse(unit)) for _, unit in sources.read_units([folder / name], form)]


def encode_with(read: Callable[[Path], tokenizer.Tokenizer]) -> Callable[[Path], object]:
    """Reads a tokenizer, and encodes and decodes with it."""

    def run(folder: Path):
        found = read(folder)
        return found.decode(found.encode("Hello, wörld 123\n\n  def"))

    return run


def targets() -> dict[str, Target]:
    """All targets by name."""
    torch.set_num_threads(1)  # they run in forks
    folder = Path(tempfile.mkdtemp())
    try:
        return {target.name: target for target in make_targets(folder)}
    finally:
        shutil.rmtree(folder)


def make_targets(folder: Path) -> Iterator[Target]:
    """Make good files in `folder`, and the targets of them."""
    tokens = np.arange(400) % 257
    digest = {split: write_shard(folder / f"{split}_000000.bin", tokens, 257) for split in shards.SPLITS}
    bins = {f"{split}_000000.bin": (folder / f"{split}_000000.bin").read_bytes() for split in shards.SPLITS}
    records = [
        {"file": f"{s}_000000.bin", "split": s, "tokens": 400, "bytes_of_text": 399, "documents": 2, "sha256": digest[s]}
        for s in shards.SPLITS
    ]
    metadata = {"format": "lockstep-tokens", "version": 1, "tokenizer": {"name": "bytes", "sha256": "0" * 64}}
    metadata |= {"vocab_size": 257, "eot_token": 256, "dtype": "uint16", "source": [{"path": "a", "files": 1, "bytes": 9}]}
    metadata |= {"val_fraction": 0.1, "options": {"column": "x", "part": "1/2", "shard_tokens": 9}, "shards": records}
    yield Target("dataset", "dataset.json", [json.dumps(metadata).encode()], open_dataset, bins, is_json=True)
    np.save(folder / "a.npy", tokens.astype(np.uint16))
    yield Target("shard", "a.bin", [bins["train_000000.bin"]], lambda f: open_shard(f / "a.bin"), {})
    yield Target("npy", "a.npy", [(folder / "a.npy").read_bytes()], lambda f: open_shard(f / "a.npy"), {})
    split = {"finished": records[:1], "saved": 3}
    progress = {"request": {"source": metadata["source"]}, "val_fraction": 0.1, "by_tail": True, "position": [0, -1]}
    progress |= {"splits": {"train": split, "val": split}}
    request = progress["request"]
    content = json.dumps(progress).encode()
    yield Target("progress", "progress.json", [content], lambda f: shards.read_progress(f, request, ""), bins, True)

    bpe = tokenizer.train(["the cat sat on the mat and the dog sat on the log " * 20], 300, "x")
    load = encode_with(lambda f: tokenizer.load(f / "tokenizer.json"))
    replace = {"type": "Replace", "pattern": {"Regex": "[ab]|x(?=y)"}, "content": "ab"}
    other = json.loads(bpe.json) | {"normalizer": {"type": "Sequence", "normalizers": [replace, {"type": "NFC"}]}}
    jsons = [bpe.json.encode(), tokenizer.resolve("bytes").json.encode(), json.dumps(other).encode()]
    yield Target("tokenizer", "tokenizer.json", jsons, load, {}, True)
    ranks = b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256))
    ranks += b"".join(base64.b64encode(pair) + b" %d\n" % i for i, pair in enumerate((b"he", b"ll", b"hell"), 256))
    yield Target("tiktoken", "x.tiktoken", [ranks], encode_with(lambda f: tokenizer.load_ranks(f / "x.tiktoken")), {})

    lines = b'{"text": "one"}\n{"text": "two \\u00e9", "id": [1, {"a": null}]}\n\n{"text": ""}\n' * 5
    yield Target("jsonl", "a.jsonl", [lines], read_text_file("a.jsonl"), {})
    packed = {"gz": gzip.compress(lines, mtime=0), "xz": lzma.compress(lines)}
    packed["zst"] = bytes(pyarrow.compress(lines, "zstd", asbytes=True))
    for suffix, content in packed.items():
        yield Target(suffix, f"a.jsonl.{suffix}", [content], read_text_file(f"a.jsonl.{suffix}"), {})
    texts = pyarrow.table({"text": ["one", "two", None, "three" * 50], "id": [1, 2, 3, 4]})
    for name in ("snappy", "zstd"):
        pyarrow.parquet.write_table(texts, folder / f"{name}.parquet", compression=name)
    nested = pyarrow.table({"text": ["one", "two"], "tags": [["a"], []], "more": [{"x": 1}, None]})
    pyarrow.parquet.write_table(nested, folder / "nested.parquet", compression="none")
    parquets = [(folder / f"{name}.parquet").read_bytes() for name in ("snappy", "zstd", "nested")]
    yield Target("parquet", "a.parquet", parquets, read_text_file("a.parquet"), {})

    presets = [path.read_bytes() for path in sorted((machine.ROOT / "config").glob("*.toml"))]
    yield Target("preset", "a.toml", presets, lambda f: list(settings.problems(settings.read_preset(f / "a.toml"))), {})
    metrics = [{"step": 1, "tokens": 9, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "mfu": 0.5}, {"step": 2, "val_loss": 2.0}]
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in metrics * 3)
    yield Target("metrics", "metrics.jsonl", [lines], curves.read, {})
    yield from model_targets(folder / "model", bpe)


def model_targets(folder: Path, bpe: tokenizer.Tokenizer) -> Iterator[Target]:
    """The targets of a checkpoint, made in `folder`."""
    folder.mkdir()
    config = settings.ModelConfig("llama", vocab_size=300, n_layer=1, n_head=2, n_embd=16, seq_len=8)
    config = settings.resolve_model(config, 300)
    model = GPT(config)
    bpe.save(folder / "tokenizer.json")
    state = {name: p.detach() for name, p in model.named_parameters()}
    huggingface.write_model(folder, state, config, folder, bpe.eot_token)
    keys = {"step": lambda p: torch.zeros(()), "exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like}
    save_file({f"{n}.{k}": make(p) for n, p in state.items() for k, make in keys.items()}, folder / "optimizer.safetensors")
    recorded = cli.flat_values(settings.Config())
    era = {"step": 0, "world_size": 1, "settings": recorded, "versions": {"torch": "2"}}
    trainer = {"step": 4, "tokens": 9, "best": [[2.5, 4]], "settings": recorded, "history": [era], "best_val_loss": 2.5}
    (folder / "trainer_state.json").write_text(json.dumps(trainer))
    retention.write_manifest(folder)
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    def target(name, file, read, seeds=(), is_json=True):
        others = {other: content for other, content in contents.items() if other != file}
        return Target(name, file, [*seeds] or [contents[file]], read, others, is_json)

    gpt2 = settings.resolve_model(settings.ModelConfig("gpt2", vocab_size=300, n_layer=1, n_head=2, n_embd=16, seq_len=8), 300)
    configs = [json.dumps(huggingface.config_json(c, 0)).encode() for c in (config, gpt2)]
    weight_map = dict.fromkeys(huggingface.to_hf(state, config), "model.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    parameters = dict(model.named_parameters())
    yield target("manifest", "manifest.json", retention.fault)
    yield target("trainer_state", "trainer_state.json", checkpoint.load_state)
    yield target("config", "config.json", huggingface.read_config, configs)
    yield target("index", "model.safetensors.index.json", huggingface.read_model, [index])
    yield target("weights", "model.safetensors", huggingface.read_model, is_json=False)
    state = checkpoint.TrainState(step=4)
    read = lambda f: checkpoint.open_optimizer(f, parameters, state, "adamw")  # noqa: E731
    yield target("optimizer", "optimizer.safetensors", read, is_json=False)


# ---------------------------------------------------------------------------------------------------------------------
# Running


def attempt(target: Target, folder: Path, content: bytes) -> tuple[str | None, str]:
    """Read one file. Returns where and how its reader failed, or None; and its answer, without what differs between files."""
    (folder / target.file).write_bytes(content)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        target.read(folder)
        return None, "read"
    except UserError as error:
        message = str(error).encode("utf-8", "replace").decode()
        return None, " ".join(re.findall(r"[a-z]{3,}", re.sub(r"(['\"`]).*?\1", "", message)))[:100]
    except OSError as error:
        return None if error.filename else describe(error), describe(error)
    except BaseException as error:
        return describe(error), describe(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def describe(error: BaseException) -> str:
    """The type of an error and the last line of our own that it passed."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if machine.ROOT in Path(f.filename).parents and ".venv" not in f.filename
    ]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}"


def fuzz(target: Target, numbers: range, seed: int, corpus: Path) -> tuple[dict[str, bytes], float]:
    """Read changed files in processes of their own: another one where one has ended before all files were read.

    corpus: the folder of the target's corpus. Returns an input for each distinct failure, and the seconds of computing.
    """
    failures: dict[str, bytes] = {}
    done, seconds = mmap.mmap(-1, 8), 0.0  # the number of the next file, shared with the processes
    done[:] = struct.pack("<q", numbers.start)
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        for other, content in target.others.items():
            (folder / other).write_bytes(content)
        (folder / target.file).write_bytes(target.seeds[0])
        target.read(folder)  # imports what it needs, once
        while (first := struct.unpack("<q", done)[0]) < numbers.stop:
            pid = os.fork()
            if pid == 0:
                machine.exit_with(lambda first=first: work(target, folder, range(first, numbers.stop), seed, corpus, done))
            _, status, usage = os.wait4(pid, 0)
            seconds += usage.ru_utime + usage.ru_stime
            if (folder / "failures.json").exists():
                found = json.loads((folder / "failures.json").read_text())
                failures |= {reason: base64.b64decode(text) for reason, text in found.items()}
            if status:
                failures[f"the process ended with status {status}"] = (folder / target.file).read_bytes()
    return failures, seconds


def work(target: Target, folder: Path, numbers: range, seed: int, corpus: Path, done: mmap.mmap) -> int:
    """In a new process: read files with these numbers, write down what failed, and keep what is answered as nothing before."""
    gc.freeze()  # what was imported need not be collected
    signal.signal(signal.SIGPROF, give_up)
    in_use = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()  # data and stack
    resource.setrlimit(resource.RLIMIT_DATA, (in_use + MEMORY,) * 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # tiktoken and tokenizers print when they panic
    rng, failures = random.Random(f"{target.name}{seed}{numbers.start}"), {}
    kept = {path.name: path.read_bytes() for path in sorted(corpus.iterdir())}
    contents = list(kept.values())
    for number in numbers:
        done[:] = struct.pack("<q", number + 1)
        content = change(rng, target, contents)
        reason, answer = attempt(target, folder, content)
        name = hashlib.sha256(answer.encode()).hexdigest()[:16]
        if name not in kept and len(kept) < KEPT_FILES and len(content) <= KEPT_BYTES:
            kept[name] = content
            contents.append(content)
            with files.publish(corpus / name) as file:
                file.write(content)
        if reason and reason not in failures:
            failures[reason] = base64.b64encode(content).decode()
            (folder / "failures.json").write_text(json.dumps(failures))
    return 0


def give_up(number: int, frame) -> None:
    """End a reader that takes too long."""
    raise TimeoutError(f"more than {SECONDS} s")


def keep(target: Target, content: bytes) -> Path:
    """Keep an input that failed for the tests."""
    path = CORPUS / target.name / hashlib.sha256(content).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def parsers() -> dict[str, str]:
    """The versions of what reads the files."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PARSERS}


def load_state(path: Path) -> dict:
    """What was done of a target by these versions of the parsers."""
    state = json.loads(path.read_text()) if path.exists() else {}
    fresh = {"parsers": parsers(), "executions": 0, "cpu_seconds": 0.0, "failures": []}
    return state if state.get("parsers") == fresh["parsers"] else fresh


def go_on(target: Target, folder: Path, executions: int, seed: int) -> dict:
    """Read a PIECE more files of a target, at most until there are `executions`. Returns the state that is saved then."""
    state = load_state(folder / "state.json")
    first = state["executions"]
    numbers = range(first, min(first + PIECE, executions))
    if not numbers:
        return state
    failures, seconds = fuzz(target, numbers, seed, folder / "corpus")
    for reason, content in failures.items():
        print(f"{target.name:>14}  {reason}: {keep(target, content)}", flush=True)
    state |= {"executions": numbers.stop, "cpu_seconds": round(state["cpu_seconds"] + seconds, 1)}
    state["failures"] = sorted({*state["failures"], *failures})
    files.publish_text(folder / "state.json", json.dumps(state))
    return state


@dataclass(frozen=True)
class FuzzConfig:
    executions: int = 10_000_000
    """Files to read, of all targets together, with those of earlier commands."""
    only: str = ""
    """Targets, such as manifest,shard (empty: all)."""
    seed: int = 1
    max_minutes: float = 0.0
    """Stop after so many minutes (0: never)."""
    state: str = str(STATE)
    """The folder of what was done, and of the corpus."""
    out: str = str(machine.RESULTS)
    """Directory of fuzz.json."""


def main(config: FuzzConfig) -> None:
    """Fuzz, and write bench/results/fuzz.json. Ends with 1 if a reader failed."""
    known = targets()
    chosen = [target for target in known.values() if not config.only or target.name in config.only.split(",")]
    each, began, rows = -(-config.executions // len(known)), time.monotonic(), {}
    while True:
        for target in chosen:
            rows[target.name] = go_on(target, Path(config.state) / target.name, each, config.seed)
        is_late = 0 < 60 * config.max_minutes < time.monotonic() - began
        if is_late or all(row["executions"] >= each for row in rows.values()):
            break
    for name, row in rows.items():
        speed = row["executions"] / max(1e-9, row["cpu_seconds"])
        print(f"{name:>14}  {row['executions']:,} files, {speed:,.0f} a second, {len(row['failures'])} failures", flush=True)
    print(f"{sum(row['executions'] for row in rows.values()):,} files in all")
    if not config.only:
        total = sum(row["executions"] for row in rows.values())
        rows = {name: {key: value for key, value in row.items() if key != "parsers"} for name, row in rows.items()}
        machine.write("fuzz", {"executions": total, "parsers": parsers(), "targets": rows}, Path(config.out))
    raise SystemExit(int(any(row["failures"] for row in rows.values())))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError), errors.user_errors():
        main(cli.parse(FuzzConfig, sys.argv[1:], __doc__))
