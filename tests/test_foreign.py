"""Wrong and hostile input, through the front door: what every command says to it, how fast, in how much memory.

Each case is a command in a folder of its own, in which one thing is wrong. It must end with its exit status and with words that
help, without a traceback, within SECONDS and MEGABYTES, and leave every file as it was.
"""

import concurrent.futures
import functools
import hashlib
import json
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.torch import load_file, save_file

import machine
import warm
from checkpoints import huggingface, retention
from conftest import ROOT, TINY, environment
from hardware import host

SECONDS, MEGABYTES = 30, 400  # a case; the memory is what the command takes besides its imports
OWN_FILES = {".lock", "train.log"}  # of a run: they may appear before what is wrong is found
CHECKPOINT = Path("runs/run/checkpoints/step-00000002")
TRAIN = machine.arguments(tokens="tokens", out_dir="runs", name="new", **TINY | dict(steps=2))
RESUME = machine.arguments(tokens="tokens", out_dir="runs", name="run", **TINY | dict(steps=4))
SAMPLE = ["sample.py", "runs/run", "--max_new_tokens=2", "--device=cpu"]
PREPARE = ["prepare_data.py", "--out=out", "--tokenizer=bytes"]


@dataclass
class Case:
    """A command in a folder in which something is wrong."""

    name: str
    command: list[str]  # a script and its arguments
    words: tuple[str, ...]  # all of them must be in what it writes
    damage: Callable[[Path], object] = lambda folder: None  # what is done to the folder first
    status: int = 2
    env: dict = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # what the folder has: tokens, runs
    changes: tuple[str, ...] = ()  # files that may change


# ---------------------------------------------------------------------------------------------------------------------
# Flags, presets and the environment


def flags(script, pairs, *before, needs=()):
    """A case for each flag, or flags, of a command and the words of its error."""
    return [Case(f"{script} {args}"[:60], [script, *before, *args.split(" ")], (words,), needs=needs) for args, words in pairs]


FLAGS = [
    *flags(
        "train.py",
        [
            ("--steps=0", "--steps must be greater than 0"),
            ("--steps=1.5", "--steps must be INTEGER"),
            ("--steps=1" + "0" * 400, "--steps must be"),
            ("--steps=" + "9" * 5000, "--steps must be INTEGER"),
            ("--log_every=" + "9" * 4000, "--log_every must be"),
            ("--steps=20 --skip_steps=812", "has 812, which no step of this run would see; the last is 20"),
            ("--seed=x", "--seed must be INTEGER, not 'x'"),
            ("--seed=-1", "--seed must be at least 0"),
            ("--seed=9223372036854775808", "--seed must be at least 0 and at most"),
            ("--lr=nan", "--lr must be greater than 0 and at most 1,000, not 'nan'"),
            ("--lr=0", "--lr must be greater than 0"),
            ("--min_lr=nan", "--min_lr must be at least -1,000 and at most 1,000"),
            ("--min_lr=1", "at most --lr"),
            ("--norm_eps=nan", "--norm_eps must be"),
            ("--rope_theta=-1", "--rope_theta must be greater than 0"),
            ("--max_minutes=nan", "--max_minutes must be"),
            ("--timeout_minutes=inf", "--timeout_minutes must be"),
            ("--timeout_minutes=0", "--timeout_minutes must be"),
            ("--dropout=1", "--dropout must be"),
            ("--beta2=1", "--beta2 must be"),
            ("--weight_decay=-1", "--weight_decay must be"),
            ("--grad_clip=nan", "--grad_clip must be"),
            ("--cooldown_fraction=0", "--cooldown_fraction must be"),
            ("--warmup_steps=9223372036854775808", "--warmup_steps must be"),
            ("--n_layer=1000000000", "at most 4,096"),
            ("--n_head=1000000000", "at most 65,536"),
            ("--seq_len=1000000000000", "at most 16,777,216"),
            ("--replicate=1000000000", "at most 1,048,576"),
            ("--tokens_per_update=160000000000", "at most 4,294,967,296"),
            ("--tokens_per_update=4294967296 --seq_len=1 --micro_batch_size=1", "micro-batches; at most"),
            ("--micro_batch_size=0", "--micro_batch_size must be greater than 0"),
            ("--micro_batch_size=1.5", "--micro_batch_size must be INTEGER|auto"),
            ("--skip_steps=0-99999999999", "--skip_steps"),
            ("--skip_steps=1-2-x,-", "--skip_steps"),
            ("--name=a/b", "--name"),
            ("--name=\udcff", "must be text in UTF-8"),
            ("--tokens=nothing", "--tokens=nothing does not exist; make it with"),
            ("--tokens=a:1,b", "weight greater than 0"),
            ("--tokens=a:1,b:nan", "weight greater than 0"),
            ("--tokens=a:1,b:1e999999999", "weight greater than 0"),
            ("--strategy=magic", "must be ddp|zero1"),
            ("--lrr=1", "perhaps you meant --lr"),
            ("--lr", "--lr needs a value"),
            ("nothing.toml", "no preset nothing.toml"),
            ("--plan --plan_world_size=0", "--plan_world_size must be greater than 0"),
            ("--plan --plan_mfu=nan", "--plan_mfu must be"),
            ("--plan --dollars_per_gpu_hour=-1", "--dollars_per_gpu_hour must be"),
        ],
    ),
    Case(
        "more weights than memory",
        [*TRAIN, "--n_layer=4096", "--n_embd=16384", "--n_head=64"],
        ("parameters", "GB of weights", "this machine has"),
        needs=("tokens",),
    ),
    Case(
        "more of an update than memory",
        [*TRAIN, "--vocab_size=16777216", "--n_embd=64"],
        ("--vocab_size=16777216", "an update takes about", "GB of memory"),
        needs=("tokens",),
    ),
    Case("--resume=nowhere", [*TRAIN, "--resume=/nowhere"], ("/nowhere is neither a run",), needs=("tokens",)),
    Case("--init_from=nowhere", [*TRAIN, "--init_from=/nowhere"], ("/nowhere is not a directory",), needs=("tokens",)),
    Case("a batch without end", [*TRAIN, "--tokens_per_update=4294967280"], ("--tokens_per_update",), needs=("tokens",)),
    *flags(
        "sample.py",
        [
            ("runs/run --temperature=nan", "--temperature must be at least 0"),
            ("runs/run --top_k=-1", "--top_k must be"),
            ("runs/run --num_samples=0", "--num_samples must be"),
            ("runs/run --seed=-1", "--seed must be"),
            ("runs/run --max_new_tokens=99999999999", "--max_new_tokens must be"),
            ("runs/run --prompt=FILE:nothing", "has no nothing"),
            ("runs/nothing", "runs/nothing is not a directory"),
            ("", "name a run"),
        ],
        needs=("runs",),
    ),
    *flags(
        "evaluate.py",
        [
            ("runs/run --seq_len=-1", "--seq_len must be"),
            ("runs/run --seq_len=17", "context is 16"),
            ("runs/run --micro_batch_size=-1", "--micro_batch_size must be"),
            ("runs/run --tokens=nothing", "does not exist"),
        ],
        needs=("runs", "tokens"),
    ),
    *flags(
        "replay.py",
        [
            ("runs/run --step=99", "has steps 1 to 2"),
            ("runs/run --steps=1" + "0" * 30, "--steps must be less than 2^63"),
            ("runs/nothing", "neither a run"),
        ],
        needs=("runs",),
    ),
    *flags(
        "plot.py",
        [("nothing", "no nothing/metrics.jsonl"), ("runs/run --out=a.exe", "cannot write a.exe"), ("", "at least one run")],
        needs=("runs",),
    ),
    *flags(
        "prepare_data.py",
        [
            ("--tokenizer=train:1000000000", "257 (bytes and end-of-text) to 1,000,000"),
            ("--tokenizer=nothing", "is none of train:N"),
            ("--tokenizer=nothing.json", "has no nothing.json"),
            ("--val_fraction=nan", "--val_fraction"),
            ("--shard_tokens=0", "--shard_tokens"),
            ("--workers=1000000000", "--workers"),
            ("--max_document_bytes=0", "--max_document_bytes"),
            ("--max_tokens=-1", "--max_tokens"),
            ("--max_tokens=" + "9" * 40, "--max_tokens"),
            ("--part=0/0", "--part"),
            ("nothing.txt", "no such file"),
            ("hf://datasets/x", "wanted hf://datasets/OWNER/NAME"),
            ("--check=nothing", "--check=nothing: no such directory"),
            ("--join --out=nothing", "no parts"),
        ],
    ),
]


def write(path, content):
    """Write bytes, text, or anything else as JSON."""
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def put(name, content):
    """A damage: the file `name` has this content."""
    return lambda folder: write(folder / name, content)


PRESETS = [
    Case(f"a preset of {name}", ["train.py", "mine.toml"], (words,), put("mine.toml", content))
    for name, content, words in [
        ("nested arrays", "x = " + "[" * 100000, "nested too deeply"),
        ("other bytes", b"\xff\xfe", "utf-8"),
        ("a megabyte and more", "#" * (1 << 20) + "\n" * 9, "at most 1,048,576"),
        ("a list for a number", "[optim]\nlr = [1]", "lr in [optim] must be NUMBER"),
        ("a date for a number", "[optim]\nlr = 2020-01-01", "lr in [optim] must be NUMBER"),
        ("nan", "[optim]\nlr = nan", "lr in [optim] must be greater than 0 and at most 1,000, not nan"),
        ("a table for a text", "[data]\ntokens = {a = 1}", "tokens in [data] must be TEXT"),
        ("text with NUL", '[run]\nname = "a\\u0000b"', "without NUL"),
        ("an unknown table", "[modl]\nn_layer = 1", "[modl] is not one of"),
        ("an unknown key", "[optim]\nlrr = 1", "perhaps you meant --lr"),
        ("twice the same key", "[optim]\nlr = 1\nlr = 2", "overwrite"),
        (
            "a huge number",
            "[train]\nsteps = 1" + "0" * 100,
            "steps in [train] must be greater than 0 and at most 1,000,000,000,000",
        ),
    ]
]
PRESETS += [
    Case("a preset that is a FIFO", ["train.py", "mine.toml"], ("mine.toml is a FIFO",), lambda f: os.mkfifo(f / "mine.toml")),
    Case("a preset that is a device", ["train.py", "/dev/zero"], ("/dev/zero is a device, not a regular file",)),
]

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ENVIRONMENT = [
    Case(f"the environment {env}", [*TRAIN], (words,), env=env, needs=("tokens",))
    for env, words in [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 must be less than WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE but no RANK"),
        ({"RANK": "0"}, "has RANK but no WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE=two must be an integer"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK=first must be an integer"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 must be less than WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "-1"}, "WORLD_SIZE=-1 must be an integer"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 30}, "must be an integer"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK=3 must be less than LOCAL_WORLD_SIZE=1"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK= must be an integer"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}, "MASTER_ADDR and MASTER_PORT"),
        (ALONE | {"GLOO_SOCKET_IFNAME": "junk0"}, "GLOO_SOCKET_IFNAME=junk0, and this machine has only lo"),
    ]
]

# ---------------------------------------------------------------------------------------------------------------------
# Datasets


def drop(*keys):
    """An edit: without the key that `keys` lead to."""

    def edit(content):
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return edit


def change(name, edit):
    """A damage: load the JSON file `name`, change it in place, or take what `edit` returns."""

    def damage(folder):
        content = json.loads((folder / name).read_text())
        changed = edit(content)
        write(folder / name, content if changed is None else changed)

    return damage


def special(name, make=os.mkfifo):
    """A damage: `name` is a FIFO, or what `make` makes of it."""

    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def zeros(path):
    """A link to a file without an end."""
    path.symlink_to("/dev/zero")


DEEP = "[" * 100000 + "]" * 100000
DATASET = [
    Case(f"dataset.json: {name}", TRAIN, ("tokens/dataset.json", words), change("tokens/dataset.json", edit), needs=("tokens",))
    for name, edit, words in [
        ("no version", drop("version"), "`version`"),
        ("another version", lambda m: m.update(version=2), "$.version"),
        ("no shards", drop("shards"), "`shards`"),
        ("shards are a number", lambda m: m.update(shards=3), "$.shards"),
        ("shards are null", lambda m: m.update(shards=None), "$.shards"),
        ("a shard is a text", lambda m: m.update(shards=["x"]), "$.shards[0]"),
        ("vocab_size is a text", lambda m: m.update(vocab_size="257"), "$.vocab_size"),
        ("vocab_size is 0", lambda m: m.update(vocab_size=0), "$.vocab_size"),
        ("vocab_size is negative", lambda m: m.update(vocab_size=-5), "$.vocab_size"),
        ("vocab_size is a fraction", lambda m: m.update(vocab_size=257.5), "$.vocab_size"),
        ("vocab_size is enormous", lambda m: m.update(vocab_size=10**30), "$.vocab_size"),
        ("vocab_size is true", lambda m: m.update(vocab_size=True), "$.vocab_size"),
        ("eot_token outside the vocabulary", lambda m: m.update(eot_token=257), "eot_token 257 is outside"),
        ("eot_token is negative", lambda m: m.update(eot_token=-1), "$.eot_token"),
        ("dtype is another", lambda m: m.update(dtype="float64"), "$.dtype"),
        ("an absolute path", lambda m: m["shards"][0].update(file="/etc/passwd"), "$.shards[0].file"),
        ("a path out of it", lambda m: m["shards"][0].update(file="../x.bin"), "$.shards[0].file"),
        ("a path with a line end", lambda m: m["shards"][0].update(file="train_000000.bin\n"), "$.shards[0].file"),
        ("the same shard twice", lambda m: m["shards"].append(m["shards"][0]), "listed twice"),
        ("a negative number of tokens", lambda m: m["shards"][0].update(tokens=-1), "$.shards[0].tokens"),
        ("negative bytes of text", lambda m: m["shards"][0].update(bytes_of_text=-1), "$.shards[0].bytes_of_text"),
        ("no sha256", drop("shards", 0, "sha256"), "`sha256`"),
        ("a sha256 of letters", lambda m: m["shards"][0].update(sha256="x" * 64), "$.shards[0].sha256"),
        ("another split", lambda m: m["shards"][0].update(split="test"), "$.shards[0].split"),
        ("val_fraction is 7", lambda m: m.update(val_fraction=7), "$.val_fraction"),
    ]
]
DATASET += [
    Case(f"dataset.json is {name}", TRAIN, ("tokens/dataset.json", words), damage, needs=("tokens",))
    for name, damage, words in [
        ("empty", put("tokens/dataset.json", b""), "truncated"),
        ("a list", put("tokens/dataset.json", []), "Expected `object`"),
        ("nested", put("tokens/dataset.json", DEEP), "object"),
        ("nested in a key", put("tokens/dataset.json", '{"x": ' + DEEP + "}"), "nested too deeply"),
        ("not UTF-8", put("tokens/dataset.json", b'{"version": "\xff"}'), "version"),
        ("NaN", put("tokens/dataset.json", '{"version": NaN}'), "malformed"),
        ("a FIFO", special("tokens/dataset.json"), "is a FIFO"),
        ("a link to a device", special("tokens/dataset.json", zeros), "is a device"),
        ("a directory", special("tokens/dataset.json", os.mkdir), "is a directory"),
        ("too large", special("tokens/dataset.json", lambda path: (path.touch(), os.truncate(path, 1 << 30))), "at most"),
    ]
]


def header(**values):
    """A damage: other integers in the header of the first shard."""

    def damage(folder):
        path = folder / "tokens" / "train_000000.bin"
        content = bytearray(path.read_bytes())
        for place, value in values.items():
            struct.pack_into("<i", content, 4 * int(place[1:]), value)
        write(path, bytes(content))

    return damage


def foreign(train, name="train.bin"):
    """A damage: the tokens are another tool's, and `train` is the content of its train file, or makes it."""

    def damage(folder):
        shutil.rmtree(folder / "tokens")
        (folder / "tokens").mkdir()
        path = folder / "tokens" / name
        (folder / "tokens" / name.replace("train", "val")).write_bytes(b"\1\0" * 2000)
        if name.endswith(".npy"):
            np.save(folder / "tokens" / name.replace("train", "val"), np.ones(2000, np.uint16))
        train(path) if callable(train) else path.write_bytes(train)

    return damage


def npy_header(text):
    """A .npy with this header."""
    text = text.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 4000


NPY = "x_train_0.npy"
SHARDS = [
    Case(f"a shard: {name}", TRAIN, words, damage, needs=("tokens",))
    for name, damage, words in [
        ("empty", put("tokens/train_000000.bin", b""), ("train_000000.bin",)),
        ("cut", lambda f: os.truncate(f / "tokens" / "train_000000.bin", 5000), ("promises", "5000")),
        ("a negative count", header(_2=-1), ("promises",)),
        ("an enormous count", header(_2=2**31 - 1), ("promises",)),
        ("another magic", header(_0=1), ("magic 1 and version", "wanted 20240520 and 1")),
        ("a FIFO", special("tokens/train_000000.bin"), ("train_000000.bin is a FIFO",)),
        ("a device", special("tokens/train_000000.bin", zeros), ("train_000000.bin is a device",)),
        ("missing", lambda f: (f / "tokens" / "train_000000.bin").unlink(), ("has no train_000000.bin",)),
        ("a directory", special("tokens/train_000000.bin", os.mkdir), ("is a directory",)),
        ("another tool's odd bytes", foreign(b"abc"), ("3 bytes are not whole uint16 tokens",)),
        ("another tool's FIFO", foreign(os.mkfifo), ("train.bin is a FIFO",)),
        ("another tool's ids", foreign(b"\xff\xff" * 2000), ("token 65535 is outside the vocabulary of 50257",)),
        (
            "another tool's tokenizer.json",
            foreign(
                lambda p: (p.write_bytes(b"\1\0" * 2000), write(p.parent / "tokenizer.json", {"added_tokens": [{"id": 1}]}))
            ),
            ("tokenizer.json", "`content`"),
        ),
        ("a .npy of negative ids", foreign(lambda p: np.save(p, np.full(3000, -5, np.int16)), NPY), ("token -5 is outside",)),
        ("a .npy of numbers", foreign(lambda p: np.save(p, np.ones(3000)), NPY), ("wanted one row of integer tokens",)),
        ("a .npy of rows", foreign(lambda p: np.save(p, np.ones((9, 9), int)), NPY), ("wanted one row of integer tokens",)),
        ("a .npy of objects", foreign(lambda p: np.save(p, np.array([{}]), allow_pickle=True), NPY), ("x_train_0.npy",)),
        ("a .npy that is none", foreign(b"PK\3\4" * 999, NPY), ("x_train_0.npy", "magic")),
        ("a .npy of zip", foreign(lambda p: np.savez(open(p, "wb"), a=[1]), NPY), ("x_train_0.npy",)),  # noqa: SIM115
        (
            "a .npy larger than its file",
            foreign(npy_header("{'descr': '<u2', 'fortran_order': False, 'shape': (9000000000,)}"), NPY),
            ("x_train_0.npy",),
        ),
        ("a .npy with a program in its header", foreign(npy_header("__import__('os').mkdir('harm')"), NPY), ("x_train_0.npy",)),
        ("a .npy with brackets in its header", foreign(npy_header("(" * 110), NPY), ("x_train_0.npy",)),
    ]
]
CHECK = [
    Case(
        "a tokenizer.json that no save could use",
        TRAIN,
        ("tokens/tokenizer.json",),
        put("tokens/tokenizer.json", "{}"),
        needs=("tokens",),
    ),
    Case(
        "a tokenizer.json that is a FIFO",
        TRAIN,
        ("tokenizer.json is a FIFO",),
        special("tokens/tokenizer.json"),
        needs=("tokens",),
    ),
    Case(
        "a tokenizer.json without the end of text",
        TRAIN,
        ("tokenizer.json has no token 256, which is the dataset's end of text",),
        change("tokens/tokenizer.json", lambda t: json.dumps(t).replace(": 256", ": 300")),
        needs=("tokens",),
    ),
    Case(
        "another dataset in the same place",
        ["prepare_data.py", "--out=tokens", "--tokenizer=bytes"],
        ("tokens holds another dataset: source",),
        needs=("tokens",),
    ),
]

# ---------------------------------------------------------------------------------------------------------------------
# Text and tokenizers


def parquet(path, rows, column="text", **options):
    """A parquet file with one column."""
    pyarrow.parquet.write_table(pyarrow.table({column: rows}), path, **options)


def sources(name, content, *words, flags=(), status=2):
    """A case of preparing the file `name`."""
    damage = content if callable(content) else put(name, content)
    return Case(f"text: {name} {words[0]}"[:60], [*PREPARE, name, *flags], (name, *words), damage, status)


TEXT = [
    sources("a.jsonl", b'{"text": 1}\n', "line 1 is not a JSON object with a string"),
    sources("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', 'under "text"'),
    sources("a.jsonl", b'{"text": ' + DEEP.encode() + b"}\n", "line 1 is not a JSON object"),
    sources("a.jsonl", b'{"text": "' + b"a" * (40 << 20) + b'"}\n', "longer than --max_document_bytes=33554432"),
    sources("a.jsonl", b'{"text": "' + b"a" * 3000000 + b'"}\n', "longer than", flags=["--max_document_bytes=2000000"]),
    sources("a.jsonl", b'{"text": 1' + b"9" * 5000 + b"}\n", "line 1 is not"),
    sources("a.jsonl.gz", b"not compressed", "a.jsonl.gz"),
    sources("a.txt.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\3" + b"\xff" * 99, "a.txt.gz"),
    sources("a.txt.xz", b"\xfd7zXZ\0" + b"\xff" * 99, "a.txt.xz"),
    sources("c.parquet", b"PAR1" + b"\xff" * 400 + b"PAR1", "c.parquet"),
    sources("a.parquet", lambda f: parquet(f / "a.parquet", [1, 2]), 'wanted a column "text" of strings'),
    sources("a.parquet", lambda f: parquet(f / "a.parquet", ["x"], "body"), "its columns are body"),
    sources(
        "a.parquet",
        lambda f: parquet(f / "a.parquet", ["\0" * (200 << 20)], compression="zstd"),
        "a row is longer than --max_document_bytes",
    ),
    Case("text: a FIFO", [*PREPARE, "a.txt"], ("a.txt: it is no regular file; wanted",), special("a.txt")),
    Case("text: nothing", [*PREPARE, "a.txt"], ("there is no text",), put("a.txt", b"")),
    Case("text: an unknown suffix", [*PREPARE, "a.exe"], ("a.exe: wanted .txt",), put("a.exe", b"x")),
    Case(
        "text: another's files in --out",
        [*PREPARE, "a.txt"],
        ("out holds other files",),
        lambda f: (put("a.txt", b"x" * 99)(f), (f / "out").mkdir(), put("out/x", b"")(f)),
    ),
]


def progress(edit):
    """A damage: an unfinished preparation whose progress.json was changed."""

    def damage(folder):
        write(folder / "a.txt", "some words for a small corpus. " * 40)
        (folder / "out").mkdir()
        empty = {"finished": [], "saved": 0}
        content = {"request": {"source": []}, "val_fraction": 0.1, "by_tail": True, "position": [0, 0]}
        content |= {"splits": {"train": dict(empty), "val": dict(empty)}}
        changed = edit(content)
        write(folder / "out" / "progress.json", content if changed is None else changed)

    return damage


TEXT += [
    Case(f"progress.json: {name}", [*PREPARE, "a.txt"], ("out/progress.json", words), progress(edit))
    for name, edit, words in [
        ("empty", lambda p: {}, "request"),
        ("a list", lambda p: [1], "Expected `object`"),
        ("a source without a path", lambda p: p.update(request={"source": [{}]}), "path"),
        ("a position of words", lambda p: p.update(position=["a", "b"]), "$.position"),
        ("a negative position", lambda p: p.update(position=[-1, 0]), "$.position"),
        ("a missing split", drop("splits", "val"), "`val`"),
        ("saved is negative", lambda p: p["splits"]["val"].update(saved=-1), "saved"),
        ("a file elsewhere", lambda p: p["splits"]["val"].update(finished=[{"file": "/dev/zero"}]), "finished"),
    ]
]


@functools.cache
def bytes_tokenizer():
    """The definition of the tokenizer of bytes."""
    from dataset import tokenizer

    return tokenizer.resolve("bytes").json


def definition(edit):
    """A damage: t.json is a tokenizer of bytes, changed, and a.txt has text."""

    def damage(folder):
        write(folder / "a.txt", "some words for a small corpus. " * 40)
        content = json.loads(bytes_tokenizer())
        changed = edit(content)
        write(folder / "t.json", content if changed is None else changed)

    return damage


def more_tokens(**tokens):
    """More tokens in a vocabulary."""
    return lambda t: t["model"]["vocab"].update(tokens)


TOKENIZERS = [
    Case(
        f"tokenizer.json: {name}",
        ["prepare_data.py", "a.txt", "--out=out", "--tokenizer=t.json"],
        ("t.json", words),
        definition(edit),
    )
    for name, edit, words in [
        ("empty", lambda t: b"", "not a tokenizer.json"),
        ("nested", lambda t: '{"x": ' + DEEP + "}", "nested too deeply"),
        ("no model", lambda t: {"added_tokens": []}, "`model`"),
        ("another type", lambda t: t["model"].update(type="WordPiece"), "$.model.type"),
        ("a vocabulary of a list", lambda t: t["model"].update(vocab=[["a", 1]]), "$.model.vocab"),
        ("a negative id", more_tokens(ab=-1), "$.model.vocab"),
        ("an enormous id", more_tokens(ab=10**12), "$.model.vocab"),
        ("the same id twice", more_tokens(ab=97), "two tokens have the same id"),
        ("the id of an added token twice", lambda t: t["added_tokens"][0].update(id=97), "two tokens have the same id"),
        (
            "another id in the vocabulary",
            lambda t: t["model"]["vocab"].update({"<|endoftext|>": 400}),
            "the vocabulary means 400",
        ),
        ("a token of other characters", more_tokens(中=400), "all 256 bytes"),
        ("a missing byte", drop("model", "vocab", "a"), "all 256 bytes"),
        ("a merge of one", lambda t: t["model"].update(merges=[["a"]]), "$.model.merges"),
        ("a merge of nothing known", lambda t: t["model"].update(merges=[["a", "xyz"]]), "t.json"),
        (
            "a continuing_subword_prefix",
            lambda t: t["model"].update(continuing_subword_prefix="##"),
            "continuing_subword_prefix",
        ),
        ("an end_of_word_suffix", lambda t: t["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix"),
        ("dropout", lambda t: t["model"].update(dropout=0.5), "dropout"),
        ("no end of text", lambda t: t.update(added_tokens=[]), "t.json"),
        ("an unknown pre-tokenizer", lambda t: t.update(pre_tokenizer={"type": "Magic"}), "t.json"),
        ("a regex that is none", lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "("}), "t.json"),
    ]
]
TOKENIZERS += [
    Case(
        "tokenizer.json: a FIFO",
        [*PREPARE[:2], "--tokenizer=t.json", "a.txt"],
        ("t.json is a FIFO",),
        lambda f: (put("a.txt", "x y")(f), os.mkfifo(f / "t.json")),
    ),
    Case(
        ".tiktoken: no ranks",
        [*PREPARE[:2], "--tokenizer=t.tiktoken", "a.txt"],
        ("t.tiktoken",),
        lambda f: (put("a.txt", "x y")(f), put("t.tiktoken", b"QQ== x\n")(f)),
    ),
]

# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and runs


def sealed(damage):
    """The same damage of the checkpoint, with a manifest that matches it."""

    def again(folder):
        damage(folder)
        (folder / CHECKPOINT / "manifest.json").unlink()
        retention.write_manifest(folder / CHECKPOINT)

    return again


def manifest(edit):
    return change(CHECKPOINT / "manifest.json", edit)


def record(**changed):
    """A damage: other values in the record of the model in the manifest."""
    return manifest(lambda m: m["model.safetensors"].update(changed))


MANIFESTS = [
    Case(f"manifest.json: {name}", SAMPLE, ("neither a run with an intact checkpoint", *words), damage, needs=("runs",))
    for name, damage, words in [
        ("empty", put(CHECKPOINT / "manifest.json", b""), ("manifest.json",)),
        ("no files", manifest(lambda m: {}), ("manifest.json does not list", "config.json")),
        ("not all files", manifest(drop("optimizer.safetensors")), ("does not list optimizer.safetensors",)),
        ("no tokenizer", manifest(drop("tokenizer.json")), ("does not list tokenizer.json",)),
        ("a list", manifest(lambda m: [m]), ("Expected `object`",)),
        ("a record of a number", manifest(lambda m: m.update({"config.json": 3})), ("manifest.json",)),
        ("no sha256", manifest(drop("config.json", "sha256")), ("sha256",)),
        ("a sha256 that is null", record(sha256=None), ("sha256",)),
        ("another sha256", record(sha256="0" * 64), ("does not match its sha256",)),
        ("another size", record(size=3), ("instead of 3",)),
        ("a size of a text", record(size="3"), ("size",)),
        ("a name elsewhere", manifest(lambda m: m.update({"/dev/zero": m["config.json"]})), ("manifest.json", "Expected")),
        ("a name above", manifest(lambda m: m.update({"../x": m["config.json"]})), ("manifest.json", "Expected")),
        ("a file that is not there", manifest(lambda m: m.update(other=m["config.json"])), ("other is missing",)),
        ("a FIFO", special(CHECKPOINT / "manifest.json"), ("is a FIFO",)),
        ("nested", put(CHECKPOINT / "manifest.json", '{"x":' * 100000), ("manifest.json",)),
        (
            "a device behind a name",
            lambda f: (record(size=0)(f), special(CHECKPOINT / "model.safetensors", zeros)(f)),
            ("is a device",),
        ),
        ("a FIFO behind a name", lambda f: (record(size=0)(f), special(CHECKPOINT / "model.safetensors")(f)), ("is a FIFO",)),
    ]
]


def state(edit):
    return sealed(change(CHECKPOINT / "trainer_state.json", edit))


STATES = [
    Case(f"trainer_state.json: {name}", RESUME, ("trainer_state.json", words), state(edit), needs=("tokens", "runs"))
    for name, edit, words in [
        ("empty", lambda s: b"", "truncated"),
        ("a list", lambda s: [s], "Expected"),
        ("nested", lambda s: '{"x": ' + DEEP + "}", "nested too deeply"),
        ("a step of a text", lambda s: s.update(step="2"), "$.step"),
        ("a negative step", lambda s: s.update(step=-1), "$.step"),
        ("a step that is NaN", lambda s: json.dumps(s).replace('"step": 2', '"step": NaN'), "malformed"),
        ("tokens of a fraction", lambda s: s.update(tokens=0.5), "$.tokens"),
        ("best of texts", lambda s: s.update(best=["x"]), "$.best"),
        ("no history", lambda s: s.update(history=[]), "history is empty"),
        ("best of three", lambda s: s.update(best=[[1.0, 2, 3]]), "$.best"),
        ("a grad_scaler of a list", lambda s: s.update(grad_scaler=[]), "$.grad_scaler"),
        ("a grad_scaler of other keys", lambda s: s.update(grad_scaler={"x": 1.0}), "grad_scaler"),
        ("settings of a list", lambda s: s.update(settings=[]), "$.settings"),
        ("a setting of another type", lambda s: s["settings"].update(lr="fast"), "settings.lr must be NUMBER"),
        ("a setting out of its range", lambda s: s["settings"].update(n_layer=10**9), "settings.n_layer must be"),
        ("a setting that is null", lambda s: s["settings"].update(seed=None), "settings.seed must be INTEGER"),
        ("a history of texts", lambda s: s.update(history=["x"]), "$.history"),
        ("a history of a negative world", lambda s: s["history"][0].update(world_size=-1), "world_size"),
        ("versions of numbers", lambda s: s["history"][0].update(versions={"torch": 3}), "versions"),
    ]
]


def config(edit, model="model"):
    """A damage: the model directory `model` is the checkpoint's, with a changed config.json."""

    def damage(folder):
        shutil.copytree(folder / CHECKPOINT, folder / model)
        for name in ("manifest.json", "trainer_state.json", "optimizer.safetensors"):
            (folder / model / name).unlink()
        change(f"{model}/config.json", edit)(folder)

    return damage


def weights(edit):
    """A damage: as `config`, with changed weights."""

    def damage(folder):
        config(lambda c: None)(folder)
        path = folder / "model" / "model.safetensors"
        tensors = load_file(path)
        changed = edit(tensors)
        path.write_bytes(changed) if isinstance(changed, bytes) else save_file(tensors, path, metadata={"format": "pt"})

    return damage


def in_model(make):
    """A damage: as `config`, and what `make` does to the model directory."""
    return lambda folder: (config(lambda c: None)(folder), make(folder / "model"))


def index(content):
    """A damage of the model directory: an index of shards."""
    return in_model(lambda model: write(model / "model.safetensors.index.json", content))


SAMPLE_MODEL = ["sample.py", "model", "--max_new_tokens=2", "--device=cpu"]
MODELS = [
    Case(f"config.json: {name}", SAMPLE_MODEL, ("config.json", words), config(edit), needs=("runs",))
    for name, edit, words in [
        ("empty", lambda c: b"", "truncated"),
        ("a list", lambda c: [], "Expected `object`"),
        ("nested", lambda c: DEEP, "object"),
        ("no model_type", drop("model_type"), "model_type"),
        ("a model_type of a list", lambda c: c.update(model_type=["gpt2"]), "model_type"),
        ("another model_type", lambda c: c.update(model_type="mamba"), f"is not one of {', '.join(huggingface.ARCHITECTURES)}"),
        ("another activation", lambda c: c.update(hidden_act="relu"), "hidden_act"),
        ("no hidden_size", drop("hidden_size"), "hidden_size"),
        ("hidden_size of a text", lambda c: c.update(hidden_size="32"), "$.hidden_size"),
        ("hidden_size is 0", lambda c: c.update(hidden_size=0), "$.hidden_size"),
        ("hidden_size is negative", lambda c: c.update(hidden_size=-32), "$.hidden_size"),
        ("no heads", lambda c: c.update(num_attention_heads=0), "$.num_attention_heads"),
        ("a billion layers", lambda c: c.update(num_hidden_layers=10**9), "$.num_hidden_layers"),
        ("an enormous vocabulary", lambda c: c.update(vocab_size=10**15), "$.vocab_size"),
        ("an enormous context", lambda c: c.update(max_position_embeddings=10**15), "$.max_position_embeddings"),
        ("heads that do not divide", lambda c: c.update(num_key_value_heads=3), "config.json"),
        ("an epsilon of a text", lambda c: c.update(rms_norm_eps="tiny"), "$.rms_norm_eps"),
        ("rope_parameters of a list", lambda c: c.update(rope_parameters=[1]), "$.rope_parameters"),
        ("a rope_theta of 0", lambda c: c.update(rope_parameters={"rope_theta": 0}), "rope_theta"),
        ("layer_types of numbers", lambda c: c.update(layer_types=[1, 2]), "$.layer_types"),
        ("layers that slide", lambda c: c.update(layer_types=["sliding_attention"]), "only full_attention is supported"),
        ("tied to a text", lambda c: c.update(tie_word_embeddings="yes"), "$.tie_word_embeddings"),
    ]
]
MODELS += [
    Case(f"weights: {name}", SAMPLE_MODEL, ("model", *words), damage, needs=("runs",))
    for name, damage, words in [
        ("empty", weights(lambda t: b""), ("model",)),
        ("text", weights(lambda t: b"x" * 1000), ("model",)),
        ("an enormous header", weights(lambda t: struct.pack("<Q", 1 << 62) + b"{}"), ("model",)),
        ("nested", weights(lambda t: struct.pack("<Q", 200000) + b"[" * 200000), ("model",)),
        ("no tensors", weights(lambda t: t.clear()), ("the weights are not those of config.json",)),
        ("a tensor too few", weights(drop("model.norm.weight")), ("no model.norm.weight",)),
        ("a tensor too many", weights(lambda t: t.update(x=t["model.norm.weight"] + 0)), ("unknown",)),
        ("another shape", weights(lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:3].clone()})), ("shape",)),
        ("a FIFO", in_model(lambda m: special("model.safetensors")(m)), ("is a FIFO",)),
        ("a device", in_model(lambda m: special("model.safetensors", zeros)(m)), ("is a device",)),
        ("an index without a map", index({}), ("weight_map",)),
        ("an index of a list", index({"weight_map": [1]}), ("weight_map",)),
        ("an empty index", index({"weight_map": {}}), ("weight_map",)),
        ("an index of numbers", index({"weight_map": {"x": 1}}), ("weight_map",)),
        ("an index elsewhere", index({"weight_map": {"x": "/dev/zero"}}), ("weight_map",)),
        ("an index above", index({"weight_map": {"x": "../x.safetensors"}}), ("weight_map",)),
        ("an index of a missing file", index({"weight_map": {"x": "a.safetensors"}}), ("has no a.safetensors",)),
        ("no tokenizer", in_model(lambda m: (m / "tokenizer.json").unlink()), ("has no tokenizer.json",)),
    ]
]


def optimizer(edit):
    """A damage: the optimizer's state is another, and the manifest matches it."""

    def damage(folder):
        path = folder / CHECKPOINT / "optimizer.safetensors"
        tensors = load_file(path)
        changed = edit(tensors)
        path.write_bytes(changed) if isinstance(changed, bytes) else save_file(tensors, path)

    return sealed(damage)


EXPORTS = [
    Case(f"export: {name}", ["export.py", "runs/run", "--out=out"], words, damage, needs=("tokens", "runs"))
    for name, damage, words in [
        ("no end of text", sealed(change(CHECKPOINT / "generation_config.json", drop("eos_token_id"))), ("`eos_token_id`",)),
        (
            "an end of text of a text",
            sealed(change(CHECKPOINT / "generation_config.json", lambda c: c.update(eos_token_id="x"))),
            ("generation_config.json", "$.eos_token_id"),
        ),
        ("a dataset without sources", change("tokens/dataset.json", drop("source")), ("tokens/dataset.json", "`source`")),
    ]
]
NORM = "norm.weight.exp_avg"
OPTIMIZERS = [
    Case(f"optimizer.safetensors: {name}", RESUME, ("optimizer.safetensors", *words), optimizer(edit), needs=("tokens", "runs"))
    for name, edit, words in [
        ("empty", lambda t: t.clear(), ("does not have the whole state of",)),
        ("text", lambda t: b"x" * 1000, ()),
        ("nothing", lambda t: b"", ()),
        ("an unknown name", lambda t: t.update({"x.exp_avg": t[NORM] + 0}), ("x.exp_avg",)),
        ("an unknown key", lambda t: t.update({"norm.weight.x": t[NORM] + 0}), ("norm.weight",)),
        ("a name without a key", lambda t: t.update(x=t[NORM] + 0), ("x",)),
        ("a state too few", drop(NORM), ("does not have the whole state of norm.weight",)),
        ("another shape", lambda t: t.update({NORM: t[NORM][:3].clone()}), (NORM, "is not the state of")),
        ("another dtype", lambda t: t.update({NORM: t[NORM].double()}), (NORM, "is not the state of")),
    ]
]


def metrics(*lines):
    """A damage: more lines in metrics.jsonl."""

    def damage(folder):
        with open(folder / "runs" / "run" / "metrics.jsonl", "ab") as file:
            file.writelines(lines)

    return damage


GONE_ON = ("runs/run/metrics.jsonl", "runs/run/metrics.jsonl.unreadable", "runs/run/config.toml", "runs/run/curves.png")
RUNS = [
    Case(
        f"metrics.jsonl: {name}",
        [*RESUME, "--steps=2"],
        (" unreadable line", "now in metrics.jsonl.unreadable", "is complete at step 2"),
        metrics(*lines),
        status=0,
        needs=("tokens", "runs"),
        changes=GONE_ON,
    )
    for name, lines in [
        ("a torn line", [b'{"step": 2, "lo']),
        ("a foreign record", [b'{"a": 1}\n']),
        ("a list", [b"[1]\n"]),
        ("not UTF-8", [b'{"step": 1, "x": "\xff"}\n']),
        ("nested", [DEEP.encode() + b"\n"]),
        ("a step of a text", [b'{"step": "2"}\n']),
        ("a negative step", [b'{"step": -2}\n']),
        ("a line of two megabytes", [b"x" * (2 << 20) + b"\n"]),
        ("a loss of a text", [b'{"step": 1, "loss": "low"}\n']),
        ("an enormous number", [b'{"step": 1, "loss": 1' + b"0" * 5000 + b"}\n"]),
    ]
]
RUNS += [
    Case("metrics.jsonl: a FIFO", ["plot.py", "runs/run"], ("is a FIFO",), special("runs/run/metrics.jsonl"), needs=("runs",)),
    Case(
        "metrics.jsonl: foreign",
        ["plot.py", "runs/run"],
        ("not a JSON object with a step",),
        metrics(b"x\n", b'{"step": 3}\n'),
        needs=("runs",),
    ),
    Case("--resume=off where checkpoints are", [*RESUME, "--resume=off"], ("--resume=off",), needs=("tokens", "runs")),
    Case("another model", [*RESUME, "--n_layer=3"], ("--n_layer=3", "the checkpoint has 2"), needs=("tokens", "runs")),
    Case("--debug", ["train.py", "--seed=x", "--debug"], ("Traceback", "error: --seed must be INTEGER"), status=2),
    Case(
        "a validation loss of NaN at the end",
        [*RESUME, "--steps=2"],
        ("a loss that is not finite",),
        lambda f: write(
            f / "runs/run/metrics.jsonl",
            (f / "runs/run/metrics.jsonl").read_text().replace('"val_loss": ', '"val_loss": NaN, "x": '),
        ),
        status=1,
        needs=("tokens", "runs"),
        changes=GONE_ON,
    ),
]

# What somebody else may have put into a run directory under a name that train.py writes, and what becomes of it.
PLACED = [
    Case(
        f"in the place of {name}: {what}",
        RESUME,
        (*words, name),
        lambda f, name=name, make=make: (write(f / "outside", "mine"), special(f"runs/run/{name}", make)(f)),
        needs=("tokens", "runs"),
    )
    for name in (".lock", "train.log", "metrics.jsonl")
    for what, make, words in [
        ("a FIFO", os.mkfifo, ("is a FIFO, not a regular file",)),
        ("a link", lambda path: path.symlink_to(path.parents[2] / "outside"), ("is a symbolic link, not a regular file",)),
        ("a directory", os.mkdir, ()),
    ]
]

CASES = [
    *FLAGS,
    *PRESETS,
    *ENVIRONMENT,
    *DATASET,
    *SHARDS,
    *CHECK,
    *TEXT,
    *TOKENIZERS,
    *MANIFESTS,
    *STATES,
    *MODELS,
    *OPTIMIZERS,
    *EXPORTS,
]
CASES += [*RUNS, *PLACED]

# ---------------------------------------------------------------------------------------------------------------------
# Running them


@dataclass
class Outcome:
    status: int
    output: str
    seconds: float
    megabytes: float
    changed: set[str]


@pytest.fixture(scope="module")
def originals(tokens, tmp_path_factory):
    """A folder with a dataset and a run of two steps."""
    folder = tmp_path_factory.mktemp("originals")
    shutil.copytree(tokens, folder / "tokens")
    streams = tmp_path_factory.mktemp("streams")
    warm.Process([ROOT / TRAIN[0], *TRAIN[1:], "--name=run"], 1, environment(), folder, streams).communicate(120)
    return folder


def listed(folder):
    """What every file in a folder is: the digest of a regular file, else its kind."""
    files = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.name not in OWN_FILES and not path.is_dir():
            files[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else path.lstat().st_mode
    return files


def attempt(case, folder, originals):
    """Run a case in `folder`, which does not exist yet."""
    work, streams = folder / "work", folder / "streams"
    work.mkdir(parents=True)
    streams.mkdir()
    for name in case.needs:
        shutil.copytree(originals / name, work / name, symlinks=True)
    case.damage(work)
    before = listed(work)
    command = [ROOT / case.command[0], *filter(None, case.command[1:])]
    env = environment(**case.env)
    began = time.monotonic()
    process = warm.Process(command, 1, env, work, streams, memory=streams / "memory")
    try:
        output = "".join(process.communicate(SECONDS))
    except subprocess.TimeoutExpired:
        output = f"more than {SECONDS} s"
    seconds = time.monotonic() - began
    after = listed(work)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    memory = streams / "memory"
    megabytes = int(memory.read_text()) / 1024 if memory.exists() else float("inf")
    shutil.rmtree(work)
    return Outcome(process.returncode, output, seconds, megabytes, changed)


@pytest.fixture(scope="module")
def outcomes(request, originals, tmp_path_factory):
    """The outcome of each case that was selected, two at a time."""
    mine = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    chosen = [item.callspec.params["case"] for item in mine]
    root = tmp_path_factory.mktemp("foreign")
    with concurrent.futures.ThreadPoolExecutor(host.cores()) as pool:
        futures = [pool.submit(attempt, case, root / str(number), originals) for number, case in enumerate(chosen)]
        return {case.name: future.result() for case, future in zip(chosen, futures, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_wrong_is_said_and_nothing_happens(case, outcomes):
    outcome = outcomes[case.name]
    assert outcome.status == case.status, outcome.output[-3000:]
    assert all(word in outcome.output for word in case.words), outcome.output[-3000:]
    if case.status:
        assert "error: " in outcome.output
    assert "Traceback" not in outcome.output or "Traceback" in case.words
    assert outcome.seconds < SECONDS and outcome.megabytes < MEGABYTES, outcome
    assert outcome.changed <= set(case.changes), outcome.changed


def test_the_table_has_its_size_and_no_case_twice():
    assert len(CASES) >= 200 and len({case.name for case in CASES}) == len(CASES)
