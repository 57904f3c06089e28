"""Tokens prepared by datatrove on two workers: the same as prepare_data.py's, but end-of-text comes after a document."""

import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from conftest import execute
from lockstep.dataset.tokens import open_dataset


def all_of(stream):
    """The tokens of a split."""
    return np.concatenate([shard[:] for shard in stream.shards])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The same text in two datasets: ours, and datatrove's."""
    folder = tmp_path_factory.mktemp("datatrove")
    documents = [f"Document {i}: {i} squared is {i * i}." + " More of it." * (i % 7) for i in range(400)]
    documents[7] += " A text may spell <|endoftext|> out."
    (folder / "text").mkdir()
    for i in range(4):
        table = pyarrow.table({"text": documents[100 * i : 100 * (i + 1)]})
        pyarrow.parquet.write_table(table, folder / "text" / f"{i}.parquet")
    execute([sys.executable, "prepare_data.py", folder / "text", f"--out={folder}/ours", "--tokenizer=train:400"])
    command = [sys.executable, "extras/datatrove_tokens.py", folder / "text", f"--tokenizer={folder}/ours/tokenizer.json"]
    command += ["--format=parquet", "--workers=2"]
    execute([*command, f"--out={folder}/theirs", "--tasks=5"], fork=False)  # one more than there are files: it has no tokens
    return folder


def test_both_streams_are_the_same_but_for_the_places_of_end_of_text(prepared):
    ours, theirs = open_dataset(prepared / "ours"), open_dataset(prepared / "theirs")
    assert (theirs.vocab_size, theirs.eot_token, len(theirs.splits["train"].shards)) == (400, 0, 5)
    for split in ("train", "val"):
        before, after = all_of(ours.splits[split]), all_of(theirs.splits[split])
        assert before[0] == after[-1] == 0 and len(before) > 500
        assert np.array_equal(before[1:], after[:-1])


def test_a_model_trains_on_them_within_documents_and_speaks(prepared, train):
    said = train("run", ranks=2, tokens=prepared / "theirs", attend="document", steps=3).stdout
    assert f"vocabulary 400 (from {prepared}/theirs/tokenizer.json)" in said and "token 0 separates documents" in said
    sample = execute([sys.executable, "sample.py", train.runs / "run", "--max_new_tokens=5", "--device=cpu"])
    assert sample.stdout.strip()


def test_jsonl_without_orjson_names_the_package(tmp_path):
    without = "import sys, runpy; sys.modules['orjson'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-c", without, "extras/datatrove_tokens.py", tmp_path, f"--out={tmp_path}/out"]
    refused = execute(command, 2, fork=False).stderr.splitlines()[-1]
    assert refused.endswith('--format=jsonl needs the package orjson: pip install orjson, or pip install "datatrove[io]"')
    assert not (tmp_path / "out").exists()
