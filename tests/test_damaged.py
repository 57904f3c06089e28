"""A damaged file of any kind is read or refused with a UserError: seeded changes of each, and those that once failed."""

import base64
import contextlib
import gzip
import json
import lzma
import random
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

import prepare_data
from conftest import ROOT
from lockstep import settings
from lockstep.checkpoints import checkpoint, huggingface, retention
from lockstep.common.errors import UserError
from lockstep.dataset import sources, tokenizer
from lockstep.dataset.tokens import open_dataset, open_shard
from lockstep.reports import curves
from model import on_meta
from power_cut import Miniature

# In place of a value of JSON, and in place of some bytes.
VALUES = [0, -1, 0.5, 2**31, 2**64, 10**400, "", "x", "\0", "../x", "\ud800", None, True, [], {}, [[]], ["x", 1]]
BYTES = [b"", b"\0", b"\xff", b"\n", b'"', b"{", b"[" * 5000, b"\0" * 64, b"\xff" * 8, b"\xed\xa0\x80", b"4611686018427387904"]


def damage(content, chance):
    """`content` with one value (JSON) or some bytes replaced, removed or inserted."""
    values = list(re.finditer(rb'"(?:[^"\\]|\\.)*"|[\d.]+|true|null', content)) if content[:1] in b"{[" else []
    if values and chance.random() < 0.8:
        start, end = chance.choice(values).span()
        return content[:start] + json.dumps(chance.choice(VALUES)).encode() + content[end:]
    start, new = chance.randrange(len(content)), chance.choice(BYTES)
    return content[:start] + new + content[start + chance.choice((0, 1, len(new), 4096)) :]


def read_text(path):
    (file,), _ = sources.list_files(str(path), max_document_bytes=1 << 22)
    return list(sources.read_pieces(file))


def use(found):
    return found.decode(found.encode("Hello, wörld 123\n\n  def"))


def read_optimizer(path):
    parameters = dict(huggingface.read_model(path.parent, on_meta)[1])
    return checkpoint.open_optimizer(path.parent, parameters, checkpoint.TrainState(step=4), "adamw")


def read_ranks(path):
    ranks = tokenizer.read_ranks(path)
    use(tokenizer.from_ranks(ranks, tokenizer.NAMED["gpt2"], {"<|endoftext|>": len(ranks)}, str(path)))


READERS = {
    "tokens/dataset.json": lambda path: open_dataset(path.parent),
    "tokens/train_000000.bin": open_shard,
    "tokens/tokenizer.json": lambda path: use(tokenizer.load(path)),
    "a.npy": open_shard,
    "a.tiktoken": read_ranks,
    **dict.fromkeys(["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst", "a.parquet"], read_text),
    "a.toml": lambda path: settings.check(settings.read_preset(path)),
    "metrics.jsonl": lambda path: curves.read(path.parent),
    "run/step-*/manifest.json": lambda path: retention.find_damage(path.parent),
    "run/step-*/trainer_state.json": lambda path: checkpoint.load_state(path.parent),
    "run/step-*/config.json": lambda path: huggingface.read_config(path.parent),
    "run/step-*/model*.index.json": lambda path: huggingface.read_model(path.parent, on_meta),
    "run/step-*/model-00001-*": lambda path: huggingface.read_model(path.parent, on_meta),
    **dict.fromkeys(["run/step-*/optimizer*.index.json", "run/step-*/optimizer-00001-*"], read_optimizer),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with a good file for each reader."""
    folder = tmp_path_factory.mktemp("good")
    lines = b'{"text": "one"}\n{"text": "two \\u00e9", "id": [1, {"a": null}]}\n\n{"text": ""}\n' * 5
    ranks = [*(bytes([b]) for b in range(256)), b"he", b"ll", b"hell"]
    contents = {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.jsonl.xz": lzma.compress(lines),
        "a.jsonl.zst": pyarrow.compress(lines, "zstd", asbytes=True),
        "a.tiktoken": b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)),
        "a.toml": (ROOT / "config" / "laptop.toml").read_bytes(),
        "metrics.jsonl": b'{"step": 1, "tokens": 9, "loss": 2.5, "lr": 1e-3}\n{"step": 2, "val_loss": 2.0}\n',
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    np.save(folder / "a.npy", np.arange(400, dtype=np.uint16))
    table = pyarrow.table({"text": ["one", None, "three" * 50], "tags": [["a"], [], []], "more": [{"x": 1}, None, {"x": 2}]})
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    made = dict(out=str(folder / "tokens"), tokenizer="bytes", workers=1, val_fraction=0.5)
    prepare_data.prepare(prepare_data.PrepareConfig((str(folder / "a.jsonl"),), **made))
    run = Miniature(folder / "run")
    state = {f"{name}.step": torch.zeros(()) for name in run.engine.parameters}
    state |= {f"{name}.{key}": p.clone() for name, p in run.engine.parameters.items() for key in ("exp_avg", "exp_avg_sq")}
    run.engine.optimizer_state = lambda: state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SHARD_BYTES", 64)
        assert run.save(4)
    return folder


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused(name, good):
    path, chance = next(good.glob(name)), random.Random(name)
    content = path.read_bytes()
    READERS[name](path)
    try:
        for _ in range(60):
            path.write_bytes(damage(content, chance))
            with contextlib.suppress(UserError):
                READERS[name](path)
    finally:
        path.write_bytes(content)
