"""prepare_data.py --check: what a directory holds, and the first fault with exit status 2."""

import json
import re
import sys

import numpy as np
import pytest

from conftest import execute, foreign_tokens
from lockstep.common import errors
from lockstep.common.errors import UserError
from lockstep.dataset import tokenizer
from lockstep.dataset.check import check
from lockstep.dataset.tokens import open_dataset, open_shard, write_shard
from test_prepare_data import DOCUMENTS, write_lines


def run(*arguments, status=0):
    """The command's output, and what it said on stderr."""
    done = execute([sys.executable, "prepare_data.py", *arguments], status=status)
    return done.stderr if status else done.stdout


@pytest.fixture
def made(tmp_path):
    """A dataset of five shards."""
    write_lines(tmp_path / "a.jsonl")
    out = tmp_path / "out"
    run(tmp_path / "a.jsonl", f"--out={out}", "--tokenizer=train:400", "--shard_tokens=2000", "--val_fraction=0.2")
    return out


def test_a_dataset_is_described(made):
    metadata = json.loads((made / "dataset.json").read_text())
    metadata["source"][0]["path"] = "\x1b[2J"  # must not command the terminal
    (made / "dataset.json").write_text(json.dumps(metadata))
    out = run("--check", made, "--tokenizer=gpt2")  # its own tokenizer is taken
    for split in ("train", "val"):
        rows = [row for row in metadata["shards"] if row["split"] == split]
        tokens, documents, size = (sum(row[key] for row in rows) for key in ("tokens", "documents", "bytes_of_text"))
        shards = errors.plural(len(rows), "shard")
        assert f"{split}: {shards}, {tokens:,} tokens, {documents:,} documents, {size:,} bytes of text" in out
    assert out.count("'<|endoftext|>Document ") == 2 and r"\x1b[2J; vocabulary 400, end-of-text token 0" in out
    assert "every shard is intact and matches its sha256\n" in out


def flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def rewrite(path):
    """Put a token outside the vocabulary in the place of another."""
    tokens = open_shard(path)[:].copy()
    tokens[700] = 400
    write_shard(path, tokens, 400)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: flip(d / "train_000001.bin", 4 * 255), "train_000001.bin does not match its sha256"),
        (lambda d: rewrite(d / "train_000001.bin"), "token 400 is outside the vocabulary"),
        (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda d: tokenizer.resolve("bytes").save(d / "tokenizer.json"), "tokenizer.json does not match its sha256"),
    ],
)
def test_the_first_fault_is_named(made, damage, message):
    damage(made)
    said = run("--check", made, status=2)
    assert said.startswith("error: ") and message in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("kind", ["llm.c", "nanoGPT", "build-nanogpt", "datatrove"])
def test_tokens_of_another_tool_are_described(tmp_path, kind):
    tokens = np.random.default_rng(1).integers(0, 50256, 3000).astype(np.uint16)
    tokens[[0, 700, 2000, 2500, 2600]] = 50256
    folder = foreign_tokens(tmp_path / "other", kind, tokens)
    if kind == "datatrove":
        ranks = {"<|endoftext|>": 50256}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": ranks, "merges": []}}))
        assert open_dataset(folder).eot_token == 50256
        (folder / "tokenizer.json").unlink()
        with pytest.raises(UserError, match="put its tokenizer there .the tokenizer.json of gpt2., or give train.py --vo"):
            open_dataset(folder)
        return
    out = run("--check", folder)
    assert "train: 1 shard, 2,000 tokens, 2 documents\n  [50256, " in out
    assert "val: 1 shard, 1,000 tokens, 3 documents\n" in out and "every shard is intact\n" in out
    assert "checked sizes and token ids; another tool's tokens have no sha256 to compare with\n" in out


def test_tokens_of_another_tool_are_decoded_by_a_tokenizer_that_is_named(tmp_path):
    ours = tokenizer.resolve("bytes")
    text = "".join(DOCUMENTS)[:2500] + "x" * 500
    folder = foreign_tokens(tmp_path / "other", "nanoGPT", ours.encode(text)[:3000])
    out = run("--check", folder, "--tokenizer=bytes")
    assert "'Document 0: the na" in out and "vocabulary 257, end-of-text" not in out
    ours.save(folder / "tokenizer.json")
    assert "vocabulary 257, end-of-text token 256" in run("--check", folder)  # also where it lies beside them
    np.array([256, 257], np.uint16).tofile(folder / "val.bin")
    with pytest.raises(UserError, match=r"val.bin: token 257 is outside the vocabulary of 257"):
        check(folder)


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("llm.c", lambda d: flip(d / "fineweb_train_000001.bin", 8), "its header implies 5026 bytes, but the file has 5024"),
        ("nanoGPT", lambda d: (d / "val.bin").unlink(), "is not a dataset: expected dataset.json"),
        ("datatrove", lambda d: (d / "val" / "00000_unshuffled.ds").write_bytes(b"abc"), "metadata implies 2000 bytes"),
        ("datatrove", lambda d: (d / "val" / "00000_unshuffled.ds.metadata").write_text("gpt2"), "expected TOKENIZER|2 or"),
        ("datatrove", lambda d: (d / "val" / "00000_unshuffled.ds.metadata").unlink(), "has no 00000_unshuffled.ds.metadata"),
    ],
)
def test_faults_of_another_tools_tokens(tmp_path, kind, damage, message):
    folder = foreign_tokens(tmp_path / "other", kind, np.zeros(3000, np.uint16))
    open_dataset(folder, 50257)
    damage(folder)
    with pytest.raises(UserError, match=re.escape(message)):
        open_dataset(folder, 50257)


def test_a_bad_token_anywhere_in_a_large_shard_is_found(tmp_path):
    tokens = np.zeros(6_000_000, np.uint16)
    tokens[5_123_457] = 60_000
    tokens.tofile(tmp_path / "train.bin")
    tokens[:10].tofile(tmp_path / "val.bin")
    open_dataset(tmp_path)  # opening only looks at a sample
    with pytest.raises(UserError, match="token 60000 is outside the vocabulary of 50257"):
        check(tmp_path)
