"""Wrong and hostile input, through the front door: what every command says to it, how fast, in how much memory.

Each case is a command in a folder with a dataset and a run, in which one thing is wrong. It must end with its exit status and
with words that help, without a traceback, within SECONDS and MEGABYTES, and leave every file as it was. The cases differ in
kind: what all readers share (`common/files.py`, msgspec's types) is tried on one file. `tests/test_damaged.py` damages a
file of each format.
"""

import concurrent.futures
import functools
import hashlib
import json
import os
import shutil
import struct
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
from checkpoints import retention
from conftest import ROOT, TINY, environment
from dataset import tokenizer
from hardware import host

SECONDS, MEGABYTES = 30, 400  # a case; the memory is what the command takes besides its imports
OWN_FILES = {".lock", "train.log"}  # of a run: they may appear before what is wrong is found
CHECKPOINT = Path("runs/run/checkpoints/step-00000002")
TRAIN = machine.arguments(tokens="tokens", out_dir="runs", name="new", **TINY | dict(steps=2))
RESUME = machine.arguments(tokens="tokens", out_dir="runs", name="run", **TINY | dict(steps=4))
SAMPLE = ["sample.py", "runs/run", "--max_new_tokens=2", "--device=cpu"]
SAMPLE_MODEL = ["sample.py", "model", *SAMPLE[2:]]
PREPARE = ["prepare_data.py", "--out=out", "--tokenizer=bytes"]
PREPARE_WITH = ["prepare_data.py", "a.txt", "--out=out", "--tokenizer=t.json"]


@dataclass
class Case:
    """A command in a folder in which something is wrong."""

    name: str
    command: list[str]  # a script and its arguments
    words: tuple[str, ...]  # all of them must be in what it writes
    damage: Callable[[Path], object] = lambda folder: None  # what is done to the folder first
    status: int = 2
    env: dict = field(default_factory=dict)
    changes: tuple[str, ...] = ()  # files that may change


def cases(title, command, *rows, **more):
    """A case for each row: its name, what is done to the folder first, and the words of its error."""
    return [Case(f"{title}: {name}", command, words, damage, **more) for name, damage, *words in rows]


# ---------------------------------------------------------------------------------------------------------------------
# What can be wrong with a file


def write(path, content):
    """Write bytes, text, or anything else as JSON."""
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def put(name, content):
    """A damage: the file `name` has this content."""
    return lambda folder: write(folder / name, content)


def change(name, edit):
    """A damage: load the JSON file `name`, change it in place, or take what `edit` returns."""

    def damage(folder):
        content = json.loads((folder / name).read_text())
        changed = edit(content)
        write(folder / name, content if changed is None else changed)

    return damage


def update(**values):
    """An edit: other values of these keys."""
    return lambda content: content.update(values)


def drop(*keys):
    """An edit: without the key that `keys` lead to."""

    def edit(content):
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return edit


def special(name, make=os.mkfifo):
    """A damage: `name` is a FIFO, or what `make` makes of it."""

    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def zeros(path):
    """A link to a file without an end."""
    path.symlink_to("/dev/zero")


def both(*damages):
    """Several damages, one after the other."""
    return lambda folder: [damage(folder) for damage in damages]


SHARD = "tokens/train_000000.bin"
DEEP = "[" * 100000 + "]" * 100000
FEW_WORDS = put("a.txt", "some words for a small corpus. " * 40)

# ---------------------------------------------------------------------------------------------------------------------
# Flags, presets and the environment


def flags(script, *rows):
    """A case for each row: a command's arguments, and the words of its error."""
    return [Case(f"{script} {args}"[:60], [script, *args.split(" ")], (words,)) for args, words in rows]


FLAGS = [
    *flags(
        "train.py",
        ("--steps=1" + "0" * 400, "--steps must be"),
        ("--steps=" + "9" * 5000, "--steps must be INTEGER"),
        ("--lr=nan", "--lr must be greater than 0 and at most 1,000, not 'nan'"),
        ("--min_lr=1", "at most --lr"),
        ("--tokens_per_update=4294967296 --seq_len=1 --micro_batch_size=1", "micro-batches; at most"),
        ("--steps=20 --skip_steps=812", "has 812, which no step of this run would see; the last is 20"),
        ("--name=\udcff", "must be text in UTF-8"),
        ("--tokens=a:1,b:1e999999999", "weight greater than 0"),
        ("--tokens=a:1,b:" + "9" * 5000, "weight greater than 0"),
    ),
    *flags("evaluate.py", ("runs/run --seq_len=17", "context is 16"), ("runs/run --tokens=nothing", "nothing does not exist")),
    *flags(
        "replay.py",
        ("runs/run --step=99", "has steps 1 to 2"),
        ("runs/run --steps=1" + "0" * 30, "--steps must be less than 2^63"),
        ("runs/run --verify --step=1", "--verify looks at all kept checkpoints"),
        ("runs/nothing", "neither a run"),
    ),
    *flags("plot.py", ("nothing", "no nothing/metrics.jsonl"), ("runs/run --out=a.exe", "cannot write a.exe")),
    *flags(
        "prepare_data.py",
        ("--tokenizer=train:1000000000", "257 (bytes and end-of-text) to 1,000,000"),
        ("--val_fraction=nan", "--val_fraction"),
        ("--workers=1000000000", "--workers"),
        ("--max_document_bytes=0", "--max_document_bytes"),
        ("--max_tokens=" + "9" * 40, "--max_tokens"),
        ("--part=0/0", "--part"),
        ("nothing.txt", "no such file"),
        ("hf://datasets/x", "wanted hf://datasets/OWNER/NAME"),
        ("--check=nothing", "--check=nothing: no such directory"),
        ("--join --out=nothing", "no parts"),
    ),
    Case("--debug", ["train.py", "--seed=x", "--debug"], ("Traceback", "error: --seed must be INTEGER")),
    Case("--out_dir is a file", [*TRAIN, "--out_dir=mine"], ("error: --out_dir=mine ",), put("mine", "")),
    Case("--init_from=nowhere", [*TRAIN, "--init_from=/nowhere"], ("/nowhere is neither a run nor a model directory",)),
    Case("--resume=off where checkpoints are", [*RESUME, "--resume=off"], ("--resume=off",)),
    Case("another dataset in the same place", [*PREPARE, "--out=tokens"], ("tokens holds another dataset: source",)),
    Case(
        "more weights than memory",
        [*TRAIN, "--n_layer=4096", "--n_embd=16384", "--n_head=64"],
        ("--n_layer=4096", "an update takes about", "this machine has"),
    ),
    Case(
        "more of an update than memory",
        [*TRAIN, "--vocab_size=16777216", "--n_embd=64"],
        ("--vocab_size=16777216", "an update takes about", "GB of memory"),
    ),
]
PRESETS = cases(
    "a preset",
    ["train.py", "mine.toml"],
    ("nested arrays", put("mine.toml", "x = " + "[" * 100000), "mine.toml is not a preset in TOML"),
    ("other bytes", put("mine.toml", b"\xff\xfe"), "utf-8"),
    ("a megabyte and more", put("mine.toml", "#" * (1 << 20) + "\n" * 9), "at most 1,048,576"),
    ("a date", put("mine.toml", "[optim]\nlr = 2020-01-01"), "lr must be NUMBER"),
    ("a FIFO", special("mine.toml"), "mine.toml is not a regular file"),
)
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
ENVIRONMENT = [
    Case(f"the environment {env}", TRAIN, (words,), env=env)
    for env, words in [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "the environment has RANK=5 WORLD_SIZE=2; torchrun"),
        ({"WORLD_SIZE": "2"}, "the environment has WORLD_SIZE=2;"),
        ({"RANK": "0"}, "the environment has RANK=0;"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE=two; torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 30}, "the environment has"),
        ({"LOCAL_RANK": "3"}, "the environment has LOCAL_RANK=3; torchrun"),
        (ALONE | {"MASTER_PORT": "http"}, "MASTER_ADDR and MASTER_PORT"),
    ]
]

# ---------------------------------------------------------------------------------------------------------------------
# Datasets


def dataset(edit):
    return change("tokens/dataset.json", edit)


def shard(**values):
    """A damage: other values of the first shard in dataset.json."""
    return dataset(lambda metadata: metadata["shards"][0].update(values))


def header(place, value):
    """A damage: another integer in the header of the first shard."""

    def damage(folder):
        with open(folder / SHARD, "r+b") as file:
            file.seek(4 * place)
            file.write(struct.pack("<i", value))

    return damage


def foreign(train, name="train.bin"):
    """A damage: the tokens are another tool's, and `train` is the content of its train file, or makes it."""

    def damage(folder):
        shutil.rmtree(folder / "tokens")
        (folder / "tokens").mkdir()
        path, val = folder / "tokens" / name, folder / "tokens" / name.replace("train", "val")
        np.ones(2000, np.uint16).tofile(val) if val.suffix == ".bin" else np.save(val, np.ones(2000, np.uint16))
        train(path) if callable(train) else path.write_bytes(train)

    return damage


def npy(make):
    """A damage: a .npy of another tool, an array or the text of its header."""

    def damage(path):
        if isinstance(make, str):
            text = make.encode().ljust(118) + b"\n"
            path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 4000)
        else:
            np.save(path, make, allow_pickle=True)

    return foreign(damage, "x_train_0.npy")


DATASETS = [
    *cases(
        "tokens/dataset.json",
        TRAIN,
        # What every JSON file is read by.
        ("empty", put("tokens/dataset.json", b""), "dataset.json", "truncated"),
        ("a list", put("tokens/dataset.json", []), "dataset.json", "Expected `object`"),
        ("nested", put("tokens/dataset.json", DEEP), "dataset.json", "object"),
        ("nested in a key", put("tokens/dataset.json", '{"x": ' + DEEP + "}"), "nested too deeply"),
        ("not UTF-8", put("tokens/dataset.json", b'{"version": "\xff"}'), "dataset.json", "version"),
        ("a FIFO", special("tokens/dataset.json"), "dataset.json is not a regular file"),
        ("a link to a device", special("tokens/dataset.json", zeros), "dataset.json is not a regular file"),
        ("a directory", special("tokens/dataset.json", os.mkdir), "dataset.json is not a regular file"),
        ("too large", special("tokens/dataset.json", lambda path: (path.touch(), os.truncate(path, 1 << 30))), "at most"),
        # What this one has to hold.
        ("no shards", dataset(drop("shards")), "dataset.json", "`shards`"),
        ("another version", dataset(update(version=2)), "$.version"),
        ("vocab_size is enormous", dataset(update(vocab_size=10**30)), "$.vocab_size"),
        ("eot_token outside the vocabulary", dataset(update(eot_token=257)), "eot_token 257 is outside"),
        ("a shard is a text", dataset(update(shards=["x"])), "$.shards[0]"),
        ("a path out of it", shard(file="../x.bin"), "$.shards[0].file"),
        ("a path with a line end", shard(file="train_000000.bin\n"), "$.shards[0].file"),
        ("the same shard twice", dataset(lambda m: m["shards"].append(m["shards"][0])), "listed twice"),
        ("a negative number of tokens", shard(tokens=-1), "$.shards[0].tokens"),
    ),
    *cases(
        "a shard",
        TRAIN,
        ("cut", lambda f: os.truncate(f / SHARD, 5000), "promises", "5000"),
        ("a negative count", header(2, -1), "promises"),
        ("and a header that is cut off", foreign(struct.pack("<3i", 20240520, 1, -1).ljust(1022, b"\0")), "promises"),
        ("another magic", header(0, 1), "magic 1 and version", "wanted 20240520 and 1"),
        ("a FIFO", special(SHARD), "train_000000.bin is not a regular file"),
        ("missing", lambda f: (f / SHARD).unlink(), "has no train_000000.bin"),
        ("another tool's odd bytes", foreign(b"abc"), "3 bytes are not whole uint16 tokens"),
        ("another tool's ids", foreign(b"\xff\xff" * 2000), "token 65535 is outside the vocabulary of 50257"),
        ("a .npy of negative ids", npy(np.full(3000, -5, np.int16)), "token -5 is outside"),
        ("a .npy of numbers", npy(np.ones(3000)), "wanted one row of integer tokens"),
        ("a .npy of rows", npy(np.ones((9, 9), int)), "wanted one row of integer tokens"),
        ("a .npy of objects", npy(np.array([{}])), "x_train_0.npy"),
        (
            "a .npy larger than its file",
            npy("{'descr': '<u2', 'fortran_order': False, 'shape': (9000000000,)}"),
            "x_train_0.npy",
        ),
        ("a .npy with a program in its header", npy("__import__('os').mkdir('harm')"), "x_train_0.npy"),
        ("a .npy with brackets in its header", npy("(" * 110), "x_train_0.npy"),
    ),
    *cases(
        "tokens/tokenizer.json",
        TRAIN,
        ("one that no save could use", put("tokens/tokenizer.json", "{}"), "tokens/tokenizer.json"),
        (
            "without the end of text",
            change("tokens/tokenizer.json", lambda t: json.dumps(t).replace(": 256", ": 300")),
            "tokenizer.json has no token 256, which is the dataset's end of text",
        ),
        (
            "beside another tool's tokens",
            both(foreign(b"\1\0" * 2000), put("tokens/tokenizer.json", {"added_tokens": [{"id": 1}]})),
            "tokenizer.json",
            "`content`",
        ),
    ),
]

# ---------------------------------------------------------------------------------------------------------------------
# Text and tokenizers


def source(name, content, *words):
    """A case of preparing the file `name`, whose content is given in bytes or as a column of a parquet file."""

    def damage(folder):
        if isinstance(content, bytes):
            write(folder / name, content)
        else:
            pyarrow.parquet.write_table(pyarrow.table({"text": content}), folder / name, compression="zstd")

    return Case(f"text: {name} {words[0]}"[:60], [*PREPARE, name], (name, *words), damage)


def progress(edit):
    """A damage: an unfinished preparation whose progress.json was changed."""
    empty = {"finished": [], "saved": 0}
    content = {"request": {"source": []}, "val_fraction": 0.1, "by_tail": True, "position": [0, 0]}
    content |= {"splits": {"train": empty, "val": empty}}
    unfinished = both(FEW_WORDS, lambda f: (f / "out").mkdir(), put("out/progress.json", content))
    return both(unfinished, change("out/progress.json", edit))


@functools.cache
def bytes_tokenizer():
    """The definition of the tokenizer of bytes."""
    return tokenizer.resolve("bytes").json


def definition(edit):
    """A damage: t.json is a tokenizer of bytes, changed, and a.txt has text."""
    return both(FEW_WORDS, lambda f: write(f / "t.json", bytes_tokenizer()), change("t.json", edit))


def model(**values):
    """A damage: as `definition`, with other values of the model."""
    return definition(lambda t: t["model"].update(values))


def vocabulary(**tokens):
    """A damage: as `definition`, with more tokens in the vocabulary."""
    return definition(lambda t: t["model"]["vocab"].update(tokens))


TEXTS = [
    source("a.jsonl", b'{"text": 1}\n', "line 1 is not a JSON object with a string"),
    source("a.jsonl", b'{"text": ' + DEEP.encode() + b"}\n", "line 1 is not a JSON object"),
    source("a.jsonl", b'{"text": 1' + b"9" * 5000 + b"}\n", "line 1 is not"),
    source("a.jsonl", b'{"text": "' + b"a" * (40 << 20) + b'"}\n', "longer than --max_document_bytes=33554432"),
    source("a.txt.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\3" + b"\xff" * 99, "a.txt.gz"),
    source("a.txt.xz", b"\xfd7zXZ\0" + b"\xff" * 99, "a.txt.xz"),
    source("a.parquet", b"PAR1" + b"\xff" * 400 + b"PAR1", "a.parquet"),
    source("a.parquet", [1, 2], 'wanted a column "text" of strings'),
    source("a.parquet", ["\0" * (200 << 20)], "a row is longer than --max_document_bytes"),
    source("a.exe", b"x", "wanted .txt"),
    *cases(
        "text",
        [*PREPARE, "a.txt"],
        ("a FIFO", special("a.txt"), "a.txt: wanted .txt"),
        ("nothing", put("a.txt", b""), "there is no text"),
        (
            "another's files in --out",
            both(FEW_WORDS, lambda f: (f / "out").mkdir(), put("out/x", b"")),
            "out holds other files",
        ),
    ),
    *cases(
        "progress.json",
        [*PREPARE, "a.txt"],
        ("empty", progress(lambda p: {}), "out/progress.json", "request"),
        ("a negative position", progress(update(position=[-1, 0])), "$.position"),
        ("a file elsewhere", progress(lambda p: p["splits"]["val"].update(finished=[{"file": "/dev/zero"}])), "finished"),
    ),
]
TOKENIZERS = [
    *cases(
        "tokenizer.json",
        PREPARE_WITH,
        ("empty", definition(lambda t: b""), "t.json is not a tokenizer.json"),
        ("another type", model(type="WordPiece"), "$.model.type"),
        ("a negative id", vocabulary(ab=-1), "$.model.vocab"),
        ("the same id twice", vocabulary(ab=97), "two tokens have the same id"),
        ("another id in the vocabulary", vocabulary(**{"<|endoftext|>": 400}), "the vocabulary means 400"),
        ("a token of other characters", vocabulary(中=400), "all 256 bytes"),
        ("a missing byte", definition(drop("model", "vocab", "a")), "all 256 bytes"),
        ("a merge of nothing known", model(merges=[["a", "xyz"]]), "t.json"),
        ("a continuing_subword_prefix", model(continuing_subword_prefix="##"), "continuing_subword_prefix"),
        ("an end_of_word_suffix", model(end_of_word_suffix="</w>"), "end_of_word_suffix"),
        ("dropout", model(dropout=0.5), "dropout"),
        ("no end of text", definition(update(added_tokens=[])), "t.json"),
        ("an unknown pre-tokenizer", definition(update(pre_tokenizer={"type": "Magic"})), "t.json"),
        ("a FIFO", both(FEW_WORDS, special("t.json")), "t.json is not a regular file"),
    ),
    *cases(
        "t.tiktoken",
        [*PREPARE_WITH, "--tokenizer=t.tiktoken"],
        ("no ranks", both(FEW_WORDS, put("t.tiktoken", b"QQ== x\n")), "t.tiktoken"),
    ),
]

# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and models


def sealed(damage):
    """The same damage of the checkpoint, with a manifest that matches it."""

    def seal(folder):
        (folder / CHECKPOINT / "manifest.json").unlink()
        retention.write_manifest(folder / CHECKPOINT)

    return both(damage, seal)


def manifest(edit):
    return change(CHECKPOINT / "manifest.json", edit)


def record(**changed):
    """A damage: other values in the record of the model in the manifest."""
    return manifest(lambda m: m["model.safetensors"].update(changed))


def state(edit):
    return sealed(change(CHECKPOINT / "trainer_state.json", edit))


def setting(**values):
    """A damage: other settings in trainer_state.json."""
    return state(lambda s: s["settings"].update(values))


def optimizer(edit):
    """A damage: other tensors in the optimizer's state."""

    def damage(folder):
        path = folder / CHECKPOINT / "optimizer.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)

    return sealed(damage)


def in_model(damage):
    """A damage of a model directory, `model`: the checkpoint's files without those of training."""

    def copy(folder):
        training = shutil.ignore_patterns("manifest.json", "trainer_state.json", "optimizer.safetensors")
        shutil.copytree(folder / CHECKPOINT, folder / "model", ignore=training)

    return both(copy, damage)


def config(edit):
    return in_model(change("model/config.json", edit))


def weights(content):
    return in_model(put("model/model.safetensors", content))


def index(weight_map):
    """A damage of the model directory: an index of shards."""
    return in_model(put("model/model.safetensors.index.json", {"weight_map": weight_map}))


NORM = "norm.weight.exp_avg"
CHECKPOINTS = [
    *cases(
        "neither a run with an intact checkpoint",
        SAMPLE,
        ("an empty manifest.json", put(CHECKPOINT / "manifest.json", b""), "manifest.json"),
        ("no files", manifest(lambda m: {}), "manifest.json does not list", "config.json"),
        ("no optimizer", manifest(drop("optimizer.safetensors")), "does not list optimizer.safetensors"),
        ("no tokenizer", manifest(drop("tokenizer.json")), "does not list tokenizer.json"),
        ("a size of a text", record(size="3"), "size"),
        ("another sha256", record(sha256="0" * 64), "does not match its sha256"),
        ("another size", record(size=3), "instead of 3"),
        ("a name above", manifest(lambda m: m.update({"../x": m["config.json"]})), "manifest.json", "Expected"),
        ("a file that is not there", manifest(lambda m: m.update(other=m["config.json"])), "other is missing"),
        ("a device", both(record(size=0), special(CHECKPOINT / "model.safetensors", zeros)), "is not a regular file"),
    ),
    *cases(
        "trainer_state.json",
        RESUME,
        ("empty", state(lambda s: b""), "trainer_state.json", "truncated"),
        ("a negative step", state(update(step=-1)), "$.step"),
        ("best of three", state(update(best=[[1.0, 2, 3]])), "$.best"),
        ("no history", state(update(history=[])), "history is empty"),
        ("a grad_scaler of other keys", state(update(grad_scaler={"x": 1.0})), "grad_scaler"),
        ("a setting of another type", setting(lr="fast"), "settings.lr must be NUMBER"),
        ("a setting out of its range", setting(n_layer=10**9), "settings.n_layer must be"),
        ("a history of a negative world", state(lambda s: s["history"][0].update(world_size=-1)), "world_size"),
    ),
    *cases(
        "optimizer.safetensors",
        RESUME,
        ("text", sealed(put(CHECKPOINT / "optimizer.safetensors", b"x" * 1000)), "optimizer.safetensors"),
        ("a state too few", optimizer(drop(NORM)), "norm.weight.exp_avg", "is missing"),
        ("an unknown name", optimizer(lambda t: t.update({"x.exp_avg": t[NORM] + 0})), "x.exp_avg"),
        ("an unknown key", optimizer(lambda t: t.update({"norm.weight.x": t[NORM] + 0})), "norm.weight.x"),
        ("a name without a key", optimizer(lambda t: t.update(x=t[NORM] + 0)), ": x of the optimizer's state", "wants none"),
        ("another shape", optimizer(lambda t: t.update({NORM: t[NORM][:3].clone()})), NORM, "--optimizer="),
        ("another dtype", optimizer(lambda t: t.update({NORM: t[NORM].double()})), NORM, "is F64 ["),
    ),
    *cases(
        "config.json",
        SAMPLE_MODEL,
        ("a model_type of a list", config(update(model_type=["gpt2"])), "model_type"),
        ("hidden_size of a text", config(update(hidden_size="32")), "$.hidden_size"),
        ("a billion layers", config(update(num_hidden_layers=10**9)), "$.num_hidden_layers"),
        ("heads that do not divide", config(update(num_key_value_heads=3)), "config.json"),
        ("rope_parameters of a list", config(update(rope_parameters=[1])), "$.rope_parameters"),
        ("a rope_theta of 0", config(update(rope_parameters={"rope_theta": 0})), "rope_theta"),
    ),
    *cases(
        "weights",
        SAMPLE_MODEL,
        ("an enormous header", weights(struct.pack("<Q", 1 << 62) + b"{}"), "model"),
        ("a nested header", weights(struct.pack("<Q", 200000) + b"[" * 200000), "model"),
        ("a FIFO", in_model(special("model/model.safetensors")), "is not a regular file"),
        ("an empty index", index({}), "weight_map"),
        ("an index above", index({"x": "../x.safetensors"}), "weight_map"),
        ("an index of a missing file", index({"x": "a.safetensors"}), "has no a.safetensors"),
        ("no tokenizer", in_model(lambda f: (f / "model/tokenizer.json").unlink()), "has no tokenizer.json"),
    ),
    *cases(
        "export",
        ["export.py", "runs/run", "--out=out"],
        ("no end of text", sealed(change(CHECKPOINT / "generation_config.json", drop("eos_token_id"))), "`eos_token_id`"),
        ("a dataset without sources", dataset(drop("source")), "tokens/dataset.json", "`source`"),
    ),
]

# ---------------------------------------------------------------------------------------------------------------------
# Runs

METRICS = "runs/run/metrics.jsonl"
GONE_ON = (METRICS, f"{METRICS}.unreadable", "runs/run/config.toml", "runs/run/curves.png")


def metrics(*lines):
    """A damage: more lines in metrics.jsonl."""
    return lambda folder: write(folder / METRICS, (folder / METRICS).read_bytes() + b"".join(lines))


def unfinite(folder):
    """A damage: the validation loss is NaN."""
    write(folder / METRICS, (folder / METRICS).read_text().replace('"val_loss": ', '"val_loss": NaN, "x": '))


COMPLETE = (" unreadable line", "now in metrics.jsonl.unreadable", "is complete at step 2")
RUNS = [
    *cases(
        "metrics.jsonl",
        [*RESUME, "--steps=2"],
        ("a torn line", metrics(b'{"step": 2, "lo'), *COMPLETE),
        ("not UTF-8", metrics(b'{"step": 1, "x": "\xff"}\n'), *COMPLETE),
        ("nested", metrics(DEEP.encode() + b"\n"), *COMPLETE),
        ("a step of a text", metrics(b'{"step": "2"}\n'), *COMPLETE),
        ("a line of two megabytes", metrics(b"x" * (2 << 20) + b"\n"), *COMPLETE),
        ("an enormous number", metrics(b'{"step": 1, "loss": 1' + b"0" * 5000 + b"}\n"), *COMPLETE),
        status=0,
        changes=GONE_ON,
    ),
    Case("a validation loss of NaN", [*RESUME, "--steps=2"], ("a loss that is not finite",), unfinite, 1, changes=GONE_ON),
    *cases(
        "metrics.jsonl to draw",
        ["plot.py", "runs/run"],
        ("a FIFO", special(METRICS), "is not a regular file"),
        ("empty", put(METRICS, ""), "nothing was logged yet"),
        ("foreign", metrics(b"x\n", b'{"step": 3}\n'), "not a JSON object with a step"),
    ),
    # What somebody else may have put into a run directory under a name that train.py writes.
    *cases(
        "in the place of ours",
        RESUME,
        ("a FIFO for .lock", special("runs/run/.lock"), ".lock is a symbolic link or not a regular file"),
        ("a FIFO for train.log", special("runs/run/train.log"), "train.log is a symbolic link or not"),
        ("a directory for train.log", special("runs/run/train.log", os.mkdir), "train.log"),
        (
            "a link for train.log",
            both(put("outside", "mine"), special("runs/run/train.log", lambda path: path.symlink_to("../../outside"))),
            "train.log is a symbolic link or not",
        ),
        (
            "a link for metrics.jsonl",
            both(put("outside", "mine"), special(METRICS, lambda path: path.symlink_to("../../outside"))),
            "metrics.jsonl is a symbolic link;",
        ),
    ),
]

CASES = [*FLAGS, *PRESETS, *ENVIRONMENT, *DATASETS, *TEXTS, *TOKENIZERS, *CHECKPOINTS, *RUNS]

# ---------------------------------------------------------------------------------------------------------------------
# Running them


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
    """Run a case in `folder`, which does not exist yet, and look at what it has done."""
    work, streams = folder / "work", folder / "streams"
    streams.mkdir(parents=True)
    shutil.copytree(originals, work, symlinks=True)
    case.damage(work)
    before = listed(work)
    began, memory = time.monotonic(), streams / "memory"
    process = warm.Process([ROOT / case.command[0], *case.command[1:]], 1, environment(**case.env), work, streams, memory)
    output = "".join(process.communicate(SECONDS))
    assert process.returncode == case.status, output[-3000:]
    assert all(word in output for word in case.words), output[-3000:]
    assert "error: " in output or not case.status
    assert "Traceback" not in output or "Traceback" in case.words
    assert time.monotonic() - began < SECONDS and int(memory.read_text()) / 1024 < MEGABYTES
    after = listed(work)
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} <= set(case.changes)
    shutil.rmtree(work)


@pytest.fixture(scope="module")
def attempts(request, originals, tmp_path_factory):
    """The futures of the cases that were selected, all done. As many ran at a time as there are cores."""
    mine = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    root = tmp_path_factory.mktemp("foreign")
    with concurrent.futures.ThreadPoolExecutor(host.cores()) as pool:
        chosen = enumerate(item.callspec.params["case"] for item in mine)
        return {id(case): pool.submit(attempt, case, root / str(number), originals) for number, case in chosen}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_wrong_is_said_and_nothing_happens(case, attempts):
    attempts[id(case)].result()
