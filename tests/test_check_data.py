"""prepare_data.py --check: what a directory holds, and the first fault with exit status 2."""

import json
import sys

import numpy as np
import pytest

from common import errors
from conftest import ROOT, execute, foreign_tokens
from dataset import tokenizer
from dataset.tokens import open_dataset, open_shard, write_shard
from prepare_data import main
from test_prepare_data import DOCUMENTS, write_lines


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments):
    """The command in this process: its exit status and output."""
    sys.argv = ["prepare_data.py", *map(str, arguments)]
    status = 0
    try:
        main()
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


@pytest.fixture
def made(here, capsys):
    """A dataset of five shards."""
    write_lines(here / "a.jsonl")
    assert run(capsys, "a.jsonl", "--out=out", "--tokenizer=train:400", "--shard_tokens=2000", "--val_fraction=0.2")[0] == 0
    return here / "out"


def test_a_dataset_is_described(made):
    metadata = json.loads((made / "dataset.json").read_text())
    out = execute([sys.executable, "prepare_data.py", "--check", made], cwd=ROOT).stdout
    for split in ("train", "val"):
        rows = [row for row in metadata["shards"] if row["split"] == split]
        tokens, documents, size = (sum(row[key] for row in rows) for key in ("tokens", "documents", "bytes_of_text"))
        shards = errors.plural(len(rows), "shard")
        assert f"{split}: {shards}, {tokens:,} tokens, {documents:,} documents, {size:,} bytes of text" in out
    assert out.count("'<|endoftext|>Document ") == 2 and "vocabulary 400, end-of-text is token 0" in out
    assert "every shard is whole and matches its sha256\n" in out


def test_a_description_cannot_command_the_terminal_and_needs_no_other_tokenizer(made, capsys, monkeypatch):
    monkeypatch.setattr(tokenizer, "download", lambda name: 1 / 0)
    change(made, lambda metadata: metadata["source"][0].update(path="\x1b[2J"))
    assert r"\x1b[2J; vocabulary 400" in run(capsys, "--check", made, "--tokenizer=gpt2")[1]


def change(made, edit):
    """Change dataset.json: `edit` gets its content."""
    metadata = json.loads((made / "dataset.json").read_text())
    edit(metadata)
    (made / "dataset.json").write_text(json.dumps(metadata))


def change_shard(made, name, **values):
    change(made, lambda metadata: [row.update(values) for row in metadata["shards"] if row["file"] == name])


def flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def rewrite(made, name, edit):
    """Change the tokens of a shard, and its sha256 in dataset.json."""
    tokens = open_shard(made / name)[:].copy()
    edit(tokens)
    change_shard(made, name, sha256=write_shard(made / name, tokens, 400))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: flip(d / "train_000001.bin", 1500), "train_000001.bin: "),
        (lambda d: flip(d / "train_000001.bin", 4 * 255), "train_000001.bin: sha256 is"),
        (lambda d: (d / "train_000001.bin").unlink(), "has no train_000001.bin"),
        (lambda d: (d / "val_000000.bin").write_bytes(b""), "val_000000.bin: 0 bytes"),
        (lambda d: rewrite(d, "train_000001.bin", lambda t: t.__setitem__(700, 400)), "token 400 is outside the vocabulary"),
        (lambda d: rewrite(d, "train_000000.bin", lambda t: t.__setitem__(0, 5)), "train_000000.bin: documents is"),
        (lambda d: change_shard(d, "train_000001.bin", documents=3), "train_000001.bin: documents is"),
        (lambda d: change_shard(d, "train_000001.bin", bytes_of_text=3), "train_000001.bin: bytes_of_text is"),
        (
            lambda d: change_shard(d, "train_000001.bin", bytes_of_text=-3),
            "Expected `int` >= 0 - at `$.shards[1].bytes_of_text`",
        ),
        (lambda d: change_shard(d, "train_000001.bin", file="train_000000.bin"), "dataset.json: a shard is listed twice"),
        (lambda d: change_shard(d, "train_000001.bin", file="/etc/passwd"), "at `$.shards[1].file`"),
        (
            lambda d: change(d, lambda m: m.update(dtype="uint32")),
            "train_000000.bin: dtype is uint16, dataset.json says uint32",
        ),
        (lambda d: change(d, lambda m: m.update(eot_token=1)), "tokenizer.json: eot_token is 0, dataset.json says 1"),
        (lambda d: change(d, lambda m: m.update(source=3)), "dataset.json: Expected `array`, got `int` - at `$.source`"),
        (
            lambda d: change(d, lambda m: [row.pop("documents") for row in m["shards"]]),
            "dataset.json: Object missing required field `documents` - at `$.shards[0]`",
        ),
        (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda d: tokenizer.resolve("bytes").save(d / "tokenizer.json"), "tokenizer.json: sha256 is"),
    ],
)
def test_the_first_fault_is_named(made, capsys, damage, message):
    damage(made)
    status, out, errors = run(capsys, "--check", made)
    assert status == 2 and not out and errors.startswith("error: ") and message in errors
    assert len(errors.splitlines()) == 1


def reheader(path, magic, version):
    """Change the first two numbers of llm.c's header."""
    path.write_bytes(np.array([magic, version], "<i4").tobytes() + path.read_bytes()[8:])


KINDS = ["llm.c", "nanoGPT", "build-nanogpt"]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_another_tool_are_described(here, capsys, kind):
    tokens = np.random.default_rng(1).integers(0, 50256, 3000).astype(np.uint16)
    tokens[[0, 700, 2000, 2500, 2600]] = 50256
    status, out, _ = run(capsys, "--check", foreign_tokens(here / "other", kind, tokens))
    assert status == 0
    assert "train: 1 shard, 2,000 tokens, 2 documents\n  [50256, " in out
    assert "val: 1 shard, 1,000 tokens, 3 documents\n" in out and "every shard is whole\n" in out


def test_tokens_of_another_tool_are_decoded_by_a_tokenizer_that_is_named(here, capsys):
    ours = tokenizer.resolve("bytes")
    text = "".join(DOCUMENTS)[:2500] + "x" * 500
    folder = foreign_tokens(here / "other", "nanoGPT", ours.encode(text)[:3000])
    status, out, _ = run(capsys, "--check", folder, "--tokenizer=bytes")
    assert status == 0 and "'Document 0: the na" in out and "2,000 bytes of text, 1.00 per token" in out
    ours.save(folder / "tokenizer.json")
    assert run(capsys, "--check", folder)[1] == out  # also where it lies beside them
    definition = json.loads(ours.json)
    definition["added_tokens"].append(definition["added_tokens"][0] | {"id": 70_000, "content": "<|high|>"})
    definition["model"]["vocab"]["<|high|>"] = 70_000
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "train.bin").write_bytes(np.full(100, 60_000, np.uint16).tobytes())
    assert "vocabulary 70,001" in run(capsys, "--check", folder)[1]  # also one that is larger than GPT-2's
    (folder / "train.bin").write_bytes(ours.encode(text)[:100].astype(np.uint16).tobytes())
    (here / "other" / "val.bin").write_bytes(np.array([256, 257], np.uint16).tobytes())
    status, _, errors = run(capsys, "--check", folder, "--tokenizer=bytes")
    assert status == 2 and "val.bin: token 257 is outside the vocabulary of 257" in errors


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("llm.c", lambda d: (d / "fineweb_val_000001.bin").write_bytes(b"\xff" * 2000), "outside the vocabulary"),
        (
            "llm.c",
            lambda d: reheader(d / "fineweb_train_000001.bin", 5, 1),
            "with magic 5 and version 1; wanted 20240520 and 1 or",
        ),
        ("llm.c", lambda d: reheader(d / "fineweb_train_000001.bin", 20240520, 2), "with magic 20240520 and version 2; wanted"),
        ("nanoGPT", lambda d: (d / "val.bin").unlink(), "has neither dataset.json nor"),
        ("build-nanogpt", lambda d: np.save(d / "edufineweb_val_000001.npy", np.zeros(3)), "holds float64"),
    ],
)
def test_faults_of_another_tools_tokens(here, capsys, kind, damage, message):
    folder = foreign_tokens(here / "other", kind, np.zeros(3000, np.uint16))
    damage(folder)
    status, _, errors = run(capsys, "--check", folder)
    assert status == 2 and message in errors and len(errors.splitlines()) == 1


def test_a_bad_token_anywhere_in_a_large_shard_is_found(here, capsys):
    tokens = np.zeros(6_000_000, np.uint16)
    tokens[5_123_457] = 60_000
    folder = here / "other"
    folder.mkdir()
    tokens.tofile(folder / "train.bin")
    tokens[:10].tofile(folder / "val.bin")
    open_dataset(folder)  # opening only looks at a sample
    status, _, errors = run(capsys, "--check", folder)
    assert status == 2 and "token 60000 is outside the vocabulary of 50257" in errors
