"""Wrong and hostile input, through the front door: what every command says to it, how fast, in how much memory.

Each case is a command in a folder with a dataset and a run, in which one thing is wrong. It must end with its exit status and
with words that help, without a traceback, within SECONDS and MEGABYTES, and leave every file as it was. The cases differ in
kind: what all readers share is tried on one file. `tests/test_damaged.py` damages a file of each format.
"""

import json
import os
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.torch import load_file, save_file

import machine
import warm
from conftest import PATIENCE, ROOT, TINY, content, environment, reseal
from lockstep.dataset import tokenizer

SECONDS, MEGABYTES = 120, 400  # a case; the memory is what the command takes besides its imports
OWN_FILES = {".lock", "train.log", "status.json"}  # of a run: they may appear before what is wrong is found, or tell it
CHECKPOINT = Path("runs/run/checkpoints/step-00000002")
TRAIN = machine.arguments(tokens="tokens", out_dir="runs", name="new", **TINY | dict(steps=2))
RESUME = machine.arguments(tokens="tokens", out_dir="runs", name="run", **TINY | dict(steps=4))
SAMPLE = ["sample.py", "runs/run", "--max_new_tokens=2", "--device=cpu"]
SAMPLE_MODEL = ["sample.py", "model", *SAMPLE[2:]]
SHARD, METRICS, NORM = "tokens/train_000000.bin", "runs/run/metrics.jsonl", "norm.weight.exp_avg"
DEEP = "[" * 100000 + "]" * 100000


def case(command, damage, *words, status=2, env=None, changes=()):
    """A command, as a text or a list, in a folder that is damaged first.

    words: all of them must be in what it writes. changes: files that may change.
    """
    command = command.split(" ") if isinstance(command, str) else command
    damage = damage or (lambda folder: None)
    return pytest.param(command, damage, words, status, env or {}, changes, id=f"{command[0]} {words[0]}"[:70])


# What can be wrong with a file ----------------------------------------------------------------------------------------


def put(name, content):
    """A damage: the file `name` has this content, bytes, text, or anything else as JSON."""
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    return lambda folder: (folder / name).write_bytes(content)


def change(name, edit):
    """A damage: `edit` changes the content of the JSON file `name` in place."""

    def damage(folder):
        content = json.loads((folder / name).read_text())
        edit(content)
        put(name, content)(folder)

    return damage


def rewrite(name, edit):
    """A damage: the bytes of the file `name` are what `edit` makes of them."""
    return lambda folder: (folder / name).write_bytes(edit((folder / name).read_bytes()))


def unfinite(metrics):
    return metrics.replace(b'"val_loss": ', b'"val_loss": NaN, "x": ')


def directory(name):
    """A damage: `name` is a directory."""
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


def both(*damages):
    """Several damages, one after the other."""
    return lambda folder: [damage(folder) for damage in damages]


def dataset(edit):
    return change("tokens/dataset.json", edit)


def foreign(name, write):
    """A damage: the tokens are another tool's, and `write` makes the file of training tokens."""

    def damage(folder):
        shutil.rmtree(folder / "tokens")
        (folder / "tokens").mkdir()
        val = folder / "tokens" / name.replace("train", "val")
        np.ones(2000, np.uint16).tofile(val) if val.suffix == ".bin" else np.save(val, np.ones(2000, np.uint16))
        write(folder / "tokens" / name)

    return damage


def text(name, content, *words):
    """A case of preparing a file of this content, which for parquet may be a column."""

    def column(folder):
        pyarrow.parquet.write_table(pyarrow.table({"text": content}), folder / name, compression="zstd")

    damage = column if isinstance(content, list) else put(name, content)
    return case(f"prepare_data.py {name} --out=out --tokenizer=bytes", damage, *words)


def bpe(edit, *words):
    """A case of a changed tokenizer of bytes."""
    damage = both(lambda folder: tokenizer.resolve("bytes").save(folder / "t.json"), change("t.json", edit))
    return case(f"prepare_data.py {ROOT}/model.py --out=out --tokenizer=t.json", damage, *words)


def sealed(damage):
    """The same damage of the checkpoint, with a manifest that matches it."""
    return both(damage, lambda folder: reseal(folder / CHECKPOINT))


def manifest(edit):
    return change(CHECKPOINT / "manifest.json", edit)


def state(edit):
    return sealed(change(CHECKPOINT / "trainer_state.json", edit))


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
    training = shutil.ignore_patterns("manifest.json", "trainer_state.json", "optimizer.safetensors")
    return both(lambda folder: shutil.copytree(folder / CHECKPOINT, folder / "model", ignore=training), damage)


def only_index(folder):
    (folder / "model/model.safetensors").unlink()
    put("model/model.safetensors.index.json", {"weight_map": {"x": "../x"}})(folder)


def config(**values):
    return in_model(change("model/config.json", lambda config: config.update(values)))


# The cases ------------------------------------------------------------------------------------------------------------

END = [*RESUME, "--steps=2"]
GONE_ON = dict(changes=(METRICS, "runs/run/config.toml", "runs/run/curves.png"))
HUGE = [*TRAIN, "--n_layer=4096", "--n_embd=16384", "--n_head=64"]
CASES = [
    # Flags and the environment
    case("train.py --steps=" + "9" * 5000, None, "--steps must be INTEGER"),
    case("train.py --lr=nan", None, "--lr must be greater than 0 and at most 1,000, not 'nan'"),
    case("train.py --steps=20 --skip_steps=812", None, "includes 812, but the last step of this run is 20"),
    case("train.py --tokens=a:1,b:1e999999999", None, "weight greater than 0"),
    case("train.py --seed=x --debug", None, "Traceback", "error: --seed must be INTEGER"),
    case([*TRAIN, "--out_dir=~/runs"], None, "--out_dir=~/runs: the shell does not replace ~ there; write $HOME/runs"),
    case([*TRAIN, "--name=caf\udce9"], None, "is not UTF-8; rename it"),
    case("replay.py --verify runs/run", None, "--verify must be true|false, not 'runs/run'"),
    case("sample.py runs/run --tokenizer=train:300", None, "--tokenizer=train:300 learns from text"),
    case("prepare_data.py corpus --out=tokens --push=me/x", None, "unknown flag --push; hf upload sends a directory"),
    case([*RESUME, "--resume=off"], None, "--resume=off: runs/run already has checkpoints; leave out --resume=off"),
    case("evaluate.py runs/run --seq_len=17", None, "exceeds the model's context of 16"),
    case("replay.py runs/run --step=99", None, "has only steps 1 to 2"),
    case("replay.py runs/nothing", None, "neither a run"),
    case("plot.py nothing", None, "nothing/metrics.jsonl does not exist"),
    case("prepare_data.py --part=1/2", None, "unknown flag --part (--help lists all flags)"),
    case("prepare_data.py --out=s3://mine/tokens", None, "must be a local path; `hf upload` sends"),
    case("prepare_data.py nothing.txt", None, "no such file"),
    case("prepare_data.py hf://datasets/x", None, "error: hf://datasets/x"),
    case("prepare_data.py --out=tokens --tokenizer=bytes", None, "tokens is a different dataset (changed: source"),
    case([*TRAIN, "--out_dir=mine"], put("mine", ""), "error: --out_dir=mine "),
    case([*TRAIN, "--init_from=/nowhere"], None, "/nowhere is neither a run nor a model directory"),
    case(HUGE, None, "an update needs about", "this machine has"),
    case(TRAIN, None, "found RANK=5 WORLD_SIZE=2; start with torchrun", env={"RANK": "5", "WORLD_SIZE": "2"}),
    case(TRAIN, None, "found RANK=0;", env={"RANK": "0"}),
    # Presets
    case("train.py mine.toml", put("mine.toml", "x = " + "[" * 100000), "mine.toml is not a valid TOML preset"),
    case("train.py mine.toml", put("mine.toml", "#" * (1 << 20) + "\n" * 9), "the limit is 1,048,576"),
    case("train.py mine.toml", put("mine.toml", "[optim]\nlr = 2020-01-01"), "lr must be NUMBER"),
    # What every JSON file is read by
    case(TRAIN, put("tokens/dataset.json", b""), "truncated", "dataset.json"),
    case(TRAIN, put("tokens/dataset.json", []), "Expected `object`", "dataset.json"),
    case(TRAIN, put("tokens/dataset.json", '{"x": ' + DEEP + "}"), "recursion depth"),
    case(TRAIN, put("tokens/dataset.json", b'{"version": "\xff"}'), "dataset.json", "version"),
    case(TRAIN, directory("tokens/dataset.json"), "dataset.json is a directory"),
    case(TRAIN, lambda folder: os.truncate(folder / "tokens/dataset.json", 100 << 20), "the limit is"),
    case(TRAIN, dataset(lambda d: d.pop("shards")), "`shards`", "dataset.json"),
    case(TRAIN, dataset(lambda d: d.update(vocab_size=10**30)), "$.vocab_size"),
    case(TRAIN, dataset(lambda d: d["shards"][0].update(file="../x.bin")), "$.shards[0].file"),
    # Shards
    case(TRAIN, lambda folder: os.truncate(folder / SHARD, 5000), "implies", "5000"),
    case(TRAIN, rewrite(SHARD, lambda old: b"\1\0\0\0" + old[4:]), "magic 1 and version", "expected llm.c's 20240520 and 1"),
    case(TRAIN, lambda folder: (folder / SHARD).unlink(), "has no train_000000.bin"),
    case(TRAIN, foreign("train.bin", lambda p: p.write_bytes(b"abc")), "a row of uint16 implies 4 bytes, but the file has 3"),
    case(TRAIN, foreign("train.bin", lambda p: p.write_bytes(b"\xff" * 4000)), "token 65535 is outside the vocabulary"),
    case(TRAIN, foreign("x_train_0.npy", lambda p: np.save(p, np.array([{}]), allow_pickle=True)), "x_train_0.npy"),
    # Text and tokenizers
    text("a.jsonl", '{"text": 1}\n', "line 1 has a number under"),
    text("a.jsonl", '{"text": "' + "a" * (40 << 20) + '"}\n', "longer than --max_document_bytes="),
    text("a.txt.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\3" + b"\xff" * 99, "a.txt.gz"),
    text("a.parquet", b"PAR1" + b"\xff" * 400 + b"PAR1", "a.parquet"),
    text("a.parquet", ["\0" * (200 << 20)], "are larger than --max_document_bytes"),
    text("a.txt", "", "the source contains no text"),
    bpe(lambda t: t.clear(), "t.json is not a tokenizer.json"),
    bpe(lambda t: t["model"].update(type="WordPiece"), "t.json is not a tokenizer.json"),
    bpe(lambda t: t["model"]["vocab"].pop("a"), "all 256 bytes"),
    # Checkpoints
    case(SAMPLE, put(CHECKPOINT / "manifest.json", ""), "neither a run with an intact checkpoint", "manifest.json"),
    case(SAMPLE, manifest(lambda m: m["model.safetensors"].update(sha256="0" * 64)), "does not match its sha256"),
    case(SAMPLE, manifest(lambda m: m.update({"../x": m["config.json"]})), "Expected", "manifest.json"),
    case(RESUME, state(lambda s: s.update(step=-1)), "$.step"),
    case(RESUME, state(lambda s: s["settings"].update(n_layer=10**9)), "trainer_state.json: n_layer must be"),
    case(RESUME, sealed(put(CHECKPOINT / "optimizer.safetensors", "x" * 1000)), "optimizer.safetensors"),
    case(RESUME, optimizer(lambda t: t.pop(NORM)), "is missing", NORM),
    case(RESUME, optimizer(lambda t: t.update({NORM: t[NORM][:3].clone()})), NORM, "--optimizer="),
    case(RESUME, optimizer(lambda t: t.update({NORM: t[NORM].double()})), "is F64 [", NORM),
    # Models
    case(SAMPLE_MODEL, config(hidden_size="32"), "hidden_size must be INTEGER"),
    case(SAMPLE_MODEL, config(num_hidden_layers=10**9), "num_hidden_layers must be"),
    case(SAMPLE_MODEL, in_model(put("model/model.safetensors", struct.pack("<Q", 1 << 62) + b"{}")), "model"),
    case(SAMPLE_MODEL, in_model(only_index), "weight_map"),
    case(SAMPLE_MODEL, in_model(lambda folder: (folder / "model/tokenizer.json").unlink()), "has no tokenizer.json"),
    # Runs
    case(END, rewrite(METRICS, lambda old: old + b'{"step": 2, "lo'), "dropped 1 unreadable line from ", status=0, **GONE_ON),
    case(END, rewrite(METRICS, unfinite), "a non-finite loss", status=1, **GONE_ON),
    case("plot.py runs/run", put(METRICS, ""), "metrics.jsonl is empty; train.py logs a line every"),
    case(RESUME, directory("runs/run/train.log"), "train.log: Is a directory"),
]


# Running them ---------------------------------------------------------------------------------------------------------


def each_once(words):
    """The words of a command in which a flag that is set again replaces the earlier one."""
    return {word.partition("=")[0]: word for word in words}.values()


@pytest.fixture(scope="module")
def originals(tokens, tmp_path_factory):
    """A folder with a dataset and a run of two steps."""
    folder = tmp_path_factory.mktemp("originals")
    shutil.copytree(tokens, folder / "tokens")
    streams = tmp_path_factory.mktemp("streams")
    run = warm.Process([ROOT / TRAIN[0], *each_once([*TRAIN[1:], "--name=run"])], 1, environment(), folder, streams)
    run.communicate(PATIENCE)
    assert run.returncode == 0
    return folder


@pytest.mark.parametrize("command, damage, words, status, env, changes", CASES)
def test_what_is_wrong_is_said_and_nothing_happens(originals, tmp_path, command, damage, words, status, env, changes):
    work, memory = tmp_path / "work", tmp_path / "memory"
    shutil.copytree(originals, work, symlinks=True)
    damage(work)
    before, began = content(work), time.monotonic()
    process = warm.Process([ROOT / command[0], *each_once(command[1:])], 1, environment(**env), work, tmp_path, memory)
    output = "".join(process.communicate(SECONDS))
    assert process.returncode == status, output[-3000:]
    assert all(word in output for word in words), output[-3000:]
    assert "error: " in output or not status
    assert "Traceback" not in output or "Traceback" in words
    assert time.monotonic() - began < SECONDS and int(memory.read_text()) / 1024 < MEGABYTES
    after = content(work)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert {name for name in changed if Path(name).name not in OWN_FILES} <= set(changes)
    shutil.rmtree(work)
