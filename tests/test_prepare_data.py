"""Datasets made from real files, through the command where it matters: splits, formats, workers, kills."""

import contextlib
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from conftest import PATIENCE, ROOT, content, execute, sentencepiece
from lockstep.common import cli, errors, files
from lockstep.common.errors import UserError
from lockstep.dataset import encode, sources, tokenizer
from lockstep.dataset.tokens import open_dataset, open_shard
from lockstep.dataset.writer import DatasetWriter
from prepare_data import PrepareConfig, out_directory, prepare

DOCUMENTS = [
    f"Document {i}: the naïve quick brown fox 🙂 jumps {i * i} times.\r\n\n" + "    lazy dog\n" * (i % 7) for i in range(150)
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(*sources, out="out", tokenizer="bytes", workers=1, **more):
    prepare(PrepareConfig(sources=tuple(map(str, sources)), out=str(out), tokenizer=tokenizer, workers=workers, **more))
    return Made(Path(out))


class Made:
    """A dataset directory as its readers see it."""

    def __init__(self, directory):
        self.directory = directory
        self.metadata = json.loads((directory / "dataset.json").read_text())
        self.tokenizer = tokenizer.load(directory / "tokenizer.json")

    def rows(self, split):
        return [row for row in self.metadata["shards"] if row["split"] == split]

    def tokens(self, split):
        return np.concatenate([open_shard(self.directory / row["file"])[:] for row in self.rows(split)])

    def documents(self, split):
        tokens = self.tokens(split)
        assert tokens[0] == self.metadata["eot_token"]
        starts = np.flatnonzero(tokens == self.metadata["eot_token"])
        return [self.tokenizer.decode(part[1:]) for part in np.split(tokens, starts)[1:]]


@pytest.fixture
def small_units(monkeypatch):
    """Read and encode text in units of so many bytes."""

    def cut(size):
        monkeypatch.setattr(sources, "CHUNK_BYTES", size)
        monkeypatch.setattr(encode, "UNIT_BYTES", size)

    return cut


def write_lines(path, documents=DOCUMENTS):
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in documents))
    return path


def command(*arguments):
    arguments = [sys.executable, str(ROOT / "prepare_data.py"), *map(str, arguments)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*arguments, status=0):
    """The command from its start to its end, here."""
    return execute([sys.executable, ROOT / "prepare_data.py", *arguments], status, cwd=Path.cwd())


def test_the_command_makes_the_embedded_corpus(here):
    output = run().stdout
    assert "tokens/python" in output and "bytes per token" in output
    made = Made(here / "tokens/python")
    assert " ".join(made.metadata) == "format version tokenizer vocab_size eot_token dtype source val_fraction shards"
    assert list(made.metadata["shards"][0]) == ["file", "split", "tokens", "bytes_of_text", "documents", "sha256"]
    assert (made.metadata["format"], made.metadata["version"], made.metadata["dtype"]) == ("lockstep-tokens", 1, "uint16")
    assert made.metadata["tokenizer"] == {"name": "train:4096", "sha256": made.tokenizer.sha256}
    assert (made.metadata["vocab_size"], made.metadata["eot_token"]) == (4096, 0)
    for row in made.metadata["shards"]:
        assert hashlib.sha256((made.directory / row["file"]).read_bytes()).hexdigest() == row["sha256"]

    texts = [Path(file.path).read_bytes().decode("utf-8", "replace") for file in sources.embedded_corpus()]
    assert not any("/test/" in file.path or "site-packages" in file.path for file in sources.embedded_corpus())
    assert set(made.documents("val")) < set(texts)
    assert sum(row["documents"] for row in made.metadata["shards"]) == len([text for text in texts if text])
    assert sum(row["bytes_of_text"] for row in made.metadata["shards"]) == sum(len(text.encode()) for text in texts)
    assert 0.01 < len(made.documents("val")) / len(texts) < 0.1

    dataset = open_dataset(made.directory)
    tokens, size = sum(map(len, dataset.splits.values())), sum(dataset.bytes_of_text.values())
    assert size / tokens > 3.5  # bytes per token: the prototype had 3.4

    assert "already" in run().stdout


@pytest.mark.parametrize("compression", ["", ".gz", ".zst", ".xz"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_every_format_gives_the_same_documents(here, suffix, compression):
    folder = here / "source" / "deep"
    folder.mkdir(parents=True)
    if suffix == ".txt":
        for i, text in enumerate(DOCUMENTS):
            (folder / f"{i:04d}.txt").write_bytes(text.encode())
        (folder / "9999.txt").write_bytes(b"")
    elif suffix == ".jsonl":
        write_lines(folder / "a.jsonl", [*DOCUMENTS[:70], ""])
        write_lines(folder / "b.JSONL", DOCUMENTS[70:])
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS}), folder / "a.parquet", row_group_size=40)
    (folder / "notes.rst").write_text("not read")
    for path in list(folder.glob(f"*{suffix}")) if compression else []:
        packed = {
            ".gz": gzip.compress,
            ".zst": lambda data: pyarrow.Codec("zstd").compress(data, asbytes=True),
            ".xz": lzma.compress,
        }[compression](path.read_bytes())
        path.with_name(path.name + compression.upper()).write_bytes(packed)
        path.unlink()
    if suffix == ".parquet" and compression:
        with pytest.raises(errors.UserError, match="parquet"):
            make("source")
        return
    made = make("source")
    train, val = made.documents("train"), made.documents("val")
    in_val = [text for text in DOCUMENTS if encode.split_hash(text.encode()) < 0.05]
    assert 0 < len(in_val) < 25
    assert val == in_val
    assert train == [text for text in DOCUMENTS if text not in in_val]


def test_the_split_does_not_depend_on_the_order(here):
    one = make(write_lines(here / "a.jsonl"), out="one", val_fraction=0.2)
    two = make(write_lines(here / "b.jsonl", DOCUMENTS[::-1]), out="two", val_fraction=0.2)
    assert one.documents("val") == two.documents("val")[::-1]
    assert one.documents("train") == two.documents("train")[::-1]
    assert 15 < len(one.documents("val")) < 45


def test_one_text_is_split_by_its_tail_as_nanogpt_does(here):
    text = "".join(DOCUMENTS)
    (here / "input.txt").write_bytes(text.encode())
    made = make("input.txt")
    cut = int(len(text) * 0.9)
    assert made.documents("train") == [text[:cut]] and made.documents("val") == [text[cut:]]
    assert made.metadata["val_fraction"] == 0.1
    assert make("input.txt", out="half", val_fraction=0.5).documents("val") == [text[len(text) // 2 :]]


@pytest.mark.parametrize("unit", [100, 1 << 20])
def test_few_documents_are_split_by_the_tail_of_all_text(here, small_units, unit):
    small_units(unit)
    few, text = DOCUMENTS[:20], "".join(DOCUMENTS[:20])
    made = make(write_lines(here / "few.jsonl", few), val_fraction=0.25)
    cut = int(len(text) * 0.75)
    assert "".join(made.documents("train")) == text[:cut] and "".join(made.documents("val")) == text[cut:]
    assert len(made.documents("train")) + len(made.documents("val")) in (20, 21)


def test_a_tail_that_begins_with_a_piece_begins_with_end_of_text(here, small_units):
    small_units(64)
    text = "".join(DOCUMENTS[:50])
    (here / "a.txt").write_bytes(text.encode())
    piece = next(sources.read_pieces(sources.list_files("a.txt")[0][0])).data.decode()
    made = make("a.txt", val_fraction=1 - (len(piece) + 0.5) / len(text))
    assert made.documents("train") == [piece] and made.documents("val") == [text[len(piece) :]]


def test_the_number_of_workers_and_the_order_of_the_sources_change_nothing(here, small_units):
    small_units(500)
    (here / "in").mkdir()
    write_lines(here / "in" / "a.jsonl", DOCUMENTS[:80])
    write_lines(here / "b.jsonl", DOCUMENTS[80:])
    flags = dict(tokenizer="train:300", shard_tokens=997)
    made = make("in/a.jsonl", "b.jsonl", out="one", **flags)
    for workers, given in enumerate((["b.jsonl", "in/a.jsonl", "b.jsonl"], ["in/a.jsonl", "b.jsonl"]), 2):
        make(*given, out=f"w{workers}", workers=workers, **flags)
        assert content(f"w{workers}") == content("one")
    assert len(made.rows("train")) > 3
    assert sorted(content("one")) == sorted(["dataset.json", "tokenizer.json", *(r["file"] for r in made.metadata["shards"])])
    often = make("in", "in/", here / "b.jsonl", "in/a.jsonl", here / "in" / ".." / "b.jsonl", out="often", **flags)
    assert often.documents("train") == made.documents("train")


def test_shards_are_one_stream_cut_anywhere(here):
    write_lines(here / "a.jsonl")
    whole, cut = make("a.jsonl", out="whole"), make("a.jsonl", out="cut", shard_tokens=1000)
    for split in ("train", "val"):
        assert whole.tokens(split).tolist() == cut.tokens(split).tolist()
        assert all(row["tokens"] == 1000 for row in cut.rows(split)[:-1])
        for key in ("tokens", "bytes_of_text", "documents"):
            assert sum(row[key] for row in whole.rows(split)) == sum(row[key] for row in cut.rows(split))
    for row in cut.metadata["shards"]:
        tokens = open_shard(cut.directory / row["file"])[:]
        assert row["bytes_of_text"] == np.count_nonzero(tokens != 256) and row["documents"] == np.count_nonzero(tokens == 256)


def test_a_killed_run_goes_on_behind_its_finished_shards(here):
    text = "".join(DOCUMENTS)
    write_lines(here / "a.jsonl", [f"{i} {text}" for i in range(300)])
    flags = ["a.jsonl", "--tokenizer=train:300", "--shard_tokens=150000", "--workers=2"]
    run(*flags, "--out=whole")
    shards = len(list((here / "whole").glob("*.bin")))
    assert shards > 10

    kept = {}
    for target in (2, 5, shards // 2):  # far enough from the end to be killed before it
        process = command(*flags, "--out=killed")
        while len(list((here / "killed").glob("train_*.bin"))) < target:
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE)
        assert all(path.stat().st_mtime_ns == when for path, when in kept.items())  # shards of the last life, untouched
        progress = json.loads((here / "killed" / "progress.json").read_text())
        finished = [here / "killed" / record["file"] for record in progress["splits"]["train"]["finished"]]
        kept = {path: path.stat().st_mtime_ns for path in finished}
        assert not (here / "killed" / "dataset.json").exists()
    run(*flags, "--out=killed")
    assert kept and all(path.stat().st_mtime_ns == when for path, when in kept.items())
    assert content("killed") == content("whole")


@pytest.mark.parametrize("flags", [{}, {"max_tokens": "9K"}, {"val_fraction": 0.4}], ids=["hash", "max_tokens", "tail"])
def test_a_run_stopped_after_every_few_units_makes_the_same_dataset(here, small_units, monkeypatch, flags):
    small_units(300)
    write_lines(here / "a.jsonl", DOCUMENTS[:90])
    sources = ["a.jsonl"]
    if "val_fraction" not in flags:
        write_lines(here / "b.jsonl", DOCUMENTS[90:])
        sources.append("b.jsonl")
    make(*sources, out="whole", shard_tokens=500, **flags)
    add, added = DatasetWriter.add, []

    def add_and_stop(self, *unit):
        add(self, *unit)
        added.append(unit)
        if len(added) == limit:
            raise KeyboardInterrupt

    monkeypatch.setattr(DatasetWriter, "add", add_and_stop)
    limit = 1
    while not (here / "stopped" / "dataset.json").exists():
        added.clear()
        with contextlib.suppress(KeyboardInterrupt):
            make(*sources, out="stopped", shard_tokens=500, **flags)
        limit += 15
    assert limit > 40 and content("stopped") == content("whole")


@pytest.mark.parametrize("total", ["100", "3K", "0.005M"])
def test_max_tokens_is_the_beginning_of_both_splits(here, total):
    write_lines(here / "a.jsonl")
    whole, cut = make("a.jsonl", out="whole", val_fraction=0.2), make("a.jsonl", out="cut", val_fraction=0.2, max_tokens=total)
    count = {"100": 100, "3K": 3000, "0.005M": 5000}[total]
    assert cut.metadata["options"] == {"max_tokens": count} and "options" not in whole.metadata
    for split, share in (("train", count * 4 // 5), ("val", count // 5)):
        assert cut.tokens(split).tolist() == whole.tokens(split)[:share].tolist()
        assert sum(row["tokens"] for row in cut.rows(split)) == share


def test_another_column_is_read(here):
    (here / "a.jsonl").write_text("".join(json.dumps({"text": "no", "body": text}) + "\n" for text in DOCUMENTS))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["no"] * 150, "body": DOCUMENTS}), here / "b.parquet")
    one, two = make("a.jsonl", out="one", column="body"), make("b.parquet", out="two", column="body")
    assert one.documents("train") == two.documents("train") and len(one.documents("train")) > 100
    assert one.metadata["options"] == {"column": "body"}
    with pytest.raises(errors.UserError, match=r"a different dataset \(changed: --column\)"):
        make("a.jsonl", out="one")


def test_a_finished_dataset_is_kept_and_one_of_another_tokenizer_is_refused(here, capsys):
    write_lines(here / "a.jsonl")
    make("a.jsonl")
    before = content("out")
    capsys.readouterr()
    with pytest.raises(errors.UserError, match="val_fraction"):
        make("a.jsonl", out="unfinished", val_fraction=1e-9)
    shutil.copy(here / "unfinished" / "progress.json", here / "out")  # as a kill at the very end leaves it
    make("a.jsonl")
    assert "already" in capsys.readouterr().out and content("out") == before
    tokenizer.resolve("bytes").save("t.json")
    make("a.jsonl", out="own", tokenizer="t.json")
    shutil.copy(make("a.jsonl", out="learned", tokenizer="train:300").directory / "tokenizer.json", "t.json")
    with pytest.raises(errors.UserError, match=r"own was made before t.json changed; choose another --out"):
        make("a.jsonl", out="own", tokenizer="t.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: edit("src/a.txt", "colour", "valour"), "source src: names or modification times"),
        (lambda: os.rename("src/a.txt", "src/z.txt"), "source src: names or modification times"),
        (lambda: edit("src/a.txt", "colour", "a colour"), "source src)"),
        (lambda: {"shard_tokens": 1000}, "--shard_tokens)"),
        (lambda: {"shard_tokens": 4000}, "--shard_tokens)"),
        (lambda: {"val_fraction": "auto"}, "--val_fraction)"),
        (lambda: {"tokenizer": "train:300"}, "--tokenizer)"),
        (lambda: {"max_tokens": "100"}, "--max_tokens)"),
        (lambda: os.remove("out/train_000001.bin"), "out has no train_000001.bin"),
        (lambda: os.truncate("out/train_000001.bin", 2000), "out/train_000001.bin: its header implies"),
        (lambda: os.remove("out/tokenizer.json"), "out has no tokenizer.json"),
        (dict, ""),
        (lambda: os.chmod("src/a.txt", 0o600), ""),
    ],
)
def test_a_finished_dataset_is_this_one_only_if_the_command_would_make_it_again(here, capsys, change, message):
    (here / "src").mkdir()
    for name, word in (("a", "colour "), ("b", "harbour ")):
        (here / "src" / f"{name}.txt").write_text(word * 500)
    flags = dict(shard_tokens=2000, val_fraction=0.3)
    make("src", **flags)
    before = content("out")
    flags |= change() or {}
    with pytest.raises(UserError, match=re.escape(message)) if message else contextlib.nullcontext():
        make("src", **flags)
    assert ("already holds" in capsys.readouterr().out) == (message == "")
    assert message.startswith("out") or content("out") == before
    # A dataset of an earlier version does not say which files it was made from.
    metadata = json.loads((here / "out" / "dataset.json").read_text())
    del metadata["source"][0]["listing"]
    (here / "out" / "dataset.json").write_text(json.dumps(metadata))
    if message in ("", "source src: names or modification times"):
        make("src", **flags)
        assert "already holds" in capsys.readouterr().out


def edit(path, old, new):
    """Change a file, as an editor does."""
    Path(path).write_text(Path(path).read_text().replace(old, new))


def test_text_that_changes_under_an_unfinished_dataset_begins_it_again(here, capsys):
    write_lines(here / "a.jsonl")
    with pytest.raises(UserError, match="val_fraction"):
        make("a.jsonl", val_fraction=1e-9)
    edit("a.jsonl", "quick", "thick")
    made = make("a.jsonl")
    assert "starting out over: the unfinished dataset there has different sources" in capsys.readouterr().out
    assert "thick" in "".join(made.documents("train")) and "quick" not in "".join(made.documents("train"))


def stopped(monkeypatch, *sources, shards, **flags):
    """Leave an unfinished dataset with so many shards, the last of which progress.json does not list."""
    publish = files.publish_text

    def stop(path, text):
        if len(list(path.parent.glob("*_*.bin"))) >= shards:
            raise KeyboardInterrupt
        publish(path, text)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(files, "publish_text", stop)
        make(*sources, **flags)


def test_only_files_that_progress_json_lists_are_removed(here, monkeypatch, capsys):
    write_lines(here / "a.jsonl")
    stopped(monkeypatch, "a.jsonl", shards=4, shard_tokens=1000)
    assert len(list((here / "out").glob("train_*.bin"))) > 2
    others = {"pytorch_model.bin": "weights", "fineweb_train_000001.bin": "tokens", "train_000099.bin": "x", ".theirs.tmp": "y"}
    for name, text in others.items():
        (here / "out" / name).write_text(text)
    made = make("a.jsonl", shard_tokens=50_000)
    assert "starting out over" in capsys.readouterr().out
    ours = {"dataset.json", "tokenizer.json", *(row["file"] for row in made.metadata["shards"])}
    assert set(content("out")) == ours | set(others) and len(ours) == 4
    assert all((here / "out" / name).read_text() == text for name, text in others.items())
    stopped(monkeypatch, "a.jsonl", out="lost", shards=4, shard_tokens=1000)
    (here / "lost" / "train_000001.bin").unlink()
    make("a.jsonl", out="lost", shard_tokens=1000)
    assert "starting lost over: lost has no train_000001.bin" in capsys.readouterr().out


@pytest.mark.parametrize(
    "progress",
    [
        *('{"downloaded": 3, "total": 9}', '{"request": "abc"}', '{"source": "x"}', "[]", "null", "", "{}", '{"request": {}}'),
        '{"request": {"source": [], "tokenizer": "bytes", "shard_tokens": 9}, "splits": {}}',
        "their shards",
    ],
)
def test_another_programs_progress_json_does_not_make_a_folder_ours(here, monkeypatch, progress):
    write_lines(here / "a.jsonl")
    (here / "out").mkdir()
    if progress == "their shards":
        stopped(monkeypatch, "a.jsonl", out="unfinished", shards=3, shard_tokens=1000)
        progress = (here / "unfinished" / "progress.json").read_text().replace("train_000000", "pytorch_model")
    for name, text in {"progress.json": progress, "pytorch_model.bin": "weights", "fineweb_train_000001.bin": "tokens"}.items():
        (here / "out" / name).write_text(text)
    before = content("out")
    with pytest.raises(
        UserError, match=r"out/progress.json: .*; prepare_data.py did not write this file, so choose another --out"
    ):
        make("a.jsonl")
    assert content("out") == before
    (here / "out" / "dataset.json").write_text('{"source": "x"}')
    with pytest.raises(UserError, match=r"out/dataset.json: "):
        make("a.jsonl")


def test_a_folder_is_taken_without_what_is_not_text_to_train_on(here, capsys):
    rows = {"data/train-0.jsonl": "train", "data/test-0.jsonl": "held out", "test/a.txt": "held out", "notes.md": "train"}
    rows |= {"README.md": "card", "deep/readme.txt": "card", "LICENSE.txt": "card", "tests_of/test_x.py": "train"}
    rows |= {"._notes.md": "hidden", ".ipynb_checkpoints/notes.md": "hidden", "deep/.cache/x.jsonl": "hidden"}
    for name, text in rows.items():
        (here / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        line = f"{text} {name} " * 9
        (here / "src" / name).write_text(json.dumps({"text": line}) + "\n" if name.endswith("jsonl") else line)
    (here / "src" / "picture.png").write_bytes(b"x")

    def words(*sources, out):
        made = make(*sources, out=out, val_fraction=0.2)
        text = "".join(made.documents("train") + made.documents("val"))
        return {word for word in ("train", "held out", "card", "hidden") if f"{word} " in text}

    assert words("src", out="folder") == {"train"}
    said = capsys.readouterr().out.splitlines()[0]
    assert said == (
        "src: skipped 3 files named README or LICENSE, 1 file of other types, 2 files of validation or test data, "
        "3 files with hidden names; to take any of them, name the files"
    )
    names = [f"src/{name}" for name in rows]
    assert words(*names, out="named") == {"train", "held out", "card", "hidden"}
    assert words("src/*.md", out="pattern") == {"train", "card"} and words("src/.*.md", out="dot") == {"hidden"}
    capsys.readouterr()
    assert words("src/*/*.jsonl", out="splits") == {"train", "held out"}
    assert "warning: 1 of these files look like validation or test data, such as test-0.jsonl" in capsys.readouterr().out
    assert words("src/test", "src/data/t*", out="only") == {"train", "held out"}  # no text would be left
    os.rename("src/README.md", "only/README.md")
    os.mkdir("docs")
    os.rename("only/README.md", "docs/README.md")
    assert words("docs", out="card") == {"card"}
    assert words(f"file://{here}/src", out="url") == {"train"}


@pytest.mark.skipif(os.getuid() == 0 and not shutil.which("setpriv"), reason="root can read everything")
@pytest.mark.parametrize("source", ["src", "src/*/*.txt"])
@pytest.mark.parametrize("closed", ["src/closed", "src/open/b.txt"])
def test_what_cannot_be_read_is_named_before_any_work(here, source, closed):
    for name in ("open/a", "open/b", "closed/c"):
        (here / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "src" / f"{name}.txt").write_text("some text " * 30)
    os.chmod(closed, 0)
    drop = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-dac_override,-dac_read_search"]
    command = [sys.executable, ROOT / "prepare_data.py", source, "--out=out", "--tokenizer=bytes"]
    try:
        done = execute([*(drop if os.getuid() == 0 else []), *command], 2, cwd=here, fork=False)
    finally:
        os.chmod(closed, 0o755)
    assert re.fullmatch(rf"error: .*{closed}.*\n", done.stderr) and not (here / "out").exists()


def test_a_pipe_or_a_link_to_nothing_is_named(here):
    write_lines(here / "a.jsonl")
    for number, create in enumerate((os.mkfifo, lambda path: os.symlink("nothing", path))):
        os.mkdir(f"src{number}")
        shutil.copy("a.jsonl", f"src{number}")
        create(f"src{number}/b.txt")
        with pytest.raises(UserError, match=f"src{number}/b.txt cannot be read"):
            make(f"src{number}")


def test_the_command_says_what_it_left_out_and_what_each_split_got(here, capsys):
    (here / "text" / "sub").mkdir(parents=True)
    write_lines(here / "text" / "sub" / "a.jsonl", [*DOCUMENTS, ""])
    with open(here / "text" / "sub" / "a.jsonl", "a", encoding="utf-8") as file:
        file.write('{"text": null}\n' * 3 + "\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": [*DOCUMENTS, None, ""]}), here / "text" / "b.parquet")
    for name, data in (
        ("a", b"one\n"),
        ("b", b"na\xc3\xafve na\xc3\xafve caf\xe9\n"),
        ("c", "na\xefve\n".encode()),
        ("d", b""),
    ):
        (here / "text" / f"{name}.txt").write_bytes(data * 50)
    for name in ("1.png", "sub/3.png", "b.zip", "c.csv.gz", "LICENSE", ".hidden"):
        (here / "text" / name).write_bytes(b"no text")
    made = make("text")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "text: skipped 6 files of other types" and "skipped 6 rows without text" in lines
    replaced = "warning: 1 file contained invalid UTF-8, which was replaced by U+FFFD: text/b.txt (50); if a file has another"
    assert [line for line in lines if line.startswith(replaced) and "iconv" in line]
    for line, split in ((lines[-3], "train"), (lines[-2], "val")):
        documents = sum(row["documents"] for row in made.rows(split))
        assert line.startswith(f"{split}: 1 shard, {len(made.tokens(split)):,} tokens, {documents} documents, ")


def test_the_first_source_names_the_dataset(here):
    named = [
        (".notes", "notes"),
        ("a.b.txt", "a"),
        ("hf://datasets/owner/na.me@main/data", "na.me"),
        ("s3://bucket/mine", "mine"),
    ]
    for source, name in named:
        assert out_directory(PrepareConfig((source,))) == Path("tokens", name)
    for source in ("/", "s3://bucket/*.txt"):
        with pytest.raises(UserError, match=r"cannot name a dataset after .*; add --out=tokens/NAME"):
            out_directory(PrepareConfig((source,)))
    with pytest.raises(UserError, match="--out=hf://me/model must be a local path; `hf upload` sends"):
        out_directory(PrepareConfig(("a.txt",), out="hf://me/model"))


def test_sources_may_stand_before_between_and_behind_flags():
    config = cli.parse(PrepareConfig, ["a.txt", "--tokenizer=bytes", "b.txt", "--out", "c", "d.txt"], "")
    assert config == PrepareConfig(("a.txt", "b.txt", "d.txt"), out="c", tokenizer="bytes")


def test_two_processes_do_not_write_one_dataset(here):
    write_lines(here / "a.jsonl")
    with files.held(here / "out"):
        for _ in range(2):  # a start that is refused leaves the folder alone, also while it is empty
            with pytest.raises(UserError, match="out is in use by another process"):
                make("a.jsonl")
        assert (here / "out").is_dir()
    assert not (here / "out").exists()
    real = files.lock

    def lock(descriptor):  # the process that held the folder removes it at the last moment
        if (here / "out").exists() and not removed:
            (here / "out").rmdir()
            removed.append(True)
        return real(descriptor)

    removed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "lock", lock)
        with files.held(here / "out"), pytest.raises(UserError, match="in use"):
            make("a.jsonl")
    make("a.jsonl")


@pytest.mark.parametrize("older", [False, True])
def test_an_unfinished_dataset_of_another_request_or_version_is_begun_again(here, capsys, older):
    write_lines(here / "a.jsonl")
    with pytest.raises(errors.UserError, match="val_fraction"):
        make("a.jsonl", val_fraction=1e-9, tokenizer="train:300")
    if older:
        progress = json.loads((here / "out" / "progress.json").read_text())
        progress["request"]["units"] = 3
        (here / "out" / "progress.json").write_text(json.dumps(progress))
    assert "restarting" not in capsys.readouterr().out
    made = make("a.jsonl", shard_tokens=1000)
    said = "starting out over: the unfinished dataset there has different sources or settings\n"
    assert said in capsys.readouterr().out
    os.mkdir("folder")
    write_lines(here / "folder" / "a.jsonl")
    one, two, both = (make(*sources, out="slash").metadata for sources in (["folder/"], ["folder"], ["folder/", "folder"]))
    assert one == two == both and one["source"][0]["path"] == "folder/"
    make("a.jsonl", out="clean", shard_tokens=1000)
    assert content(made.directory) == content("clean")


def test_a_large_vocabulary_is_written_as_uint32(here):
    definition = json.loads(tokenizer.resolve("train:300", lambda: DOCUMENTS).json)
    definition["added_tokens"].append({**definition["added_tokens"][0], "id": 70000, "content": "<|high|>"})
    definition["model"]["vocab"]["<|high|>"] = 70000
    (here / "big.json").write_text(json.dumps(definition))
    write_lines(here / "a.jsonl")
    made = make("a.jsonl", tokenizer="big.json")
    header = np.fromfile(made.directory / "train_000000.bin", dtype="<i4", count=256)
    assert header[:3].tolist() == [20240801, 7, made.rows("train")[0]["tokens"]] and not header[3:].any()
    assert made.metadata["dtype"] == "uint32" and made.documents("val")


def test_hostile_text_survives(here):
    """Literal end-of-text, lone surrogates, bytes that are not UTF-8."""
    lines = [json.dumps({"text": text}) for text in ("a<|endoftext|>b", "lone \ud800 surrogate", "nul \0")]
    (here / "a.jsonl").write_text("\n".join(lines) + "\r\n\n")
    (here / "b.txt").write_bytes(b"latin \xe9 text\xff" * 3 + b"\xf0\x9f")
    made = make("a.jsonl", "b.txt", val_fraction=0.01)
    text = "".join(made.documents("train") + made.documents("val"))
    assert text == "a<|endoftext|>blone \ufffd surrogatenul \0" + "latin \ufffd text\ufffd" * 3 + "\ufffd"
    assert sum(row["bytes_of_text"] for row in made.metadata["shards"]) == len(text.encode())


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("empty", None, "expected .txt"),
        ("line.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "line 2"),
        ("json.jsonl", b'{"text": "a"}\n\n{"text": \n', "line 3"),
        ("column.parquet", None, 'column "text"'),
        ("cut.txt.gz", gzip.compress(b"hello " * 1000, mtime=0)[:-10], "cut.txt.gz"),
        ("cut.txt.xz", lzma.compress(b"hello " * 1000)[:-10], "cut.txt.xz"),
        ("not.txt.zst", b"hello", "not.txt.zst"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_source_is_refused(here, source, content, message):
    (here / "empty").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), here / "column.parquet")
    if content is not None:
        (here / source).write_bytes(content)
    with pytest.raises(errors.UserError) as error:
        make(source)
    assert source in str(error.value) and message in str(error.value)
    assert not (here / "out").exists()


NOVEL = "Größe und Güte: Käthe zählte zwölf Boote. The lantern went out at nine.\n" * 20


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1251"])
@pytest.mark.parametrize("bom", [True, False], ids=["bom", "no bom"])
def test_text_in_another_encoding_is_read_by_its_mark_or_refused(here, small_units, encoding, bom):
    small_units(101)
    mark = "\ufeff".encode(encoding) if bom and encoding in ("utf-16-le", "utf-16-be") else b""
    text = NOVEL if encoding != "cp1251" else "Маяк погас в девять, и Мара считала лодки.\n" * 20
    (here / "in").mkdir()
    (here / "in" / "a.txt").write_bytes(mark + text.encode(encoding))
    (here / "in" / "b.txt").write_text("plain\n")
    if encoding in ("latin-1", "cp1251") or (encoding in ("utf-16-le", "utf-16-be") and not bom):
        with pytest.raises(UserError, match=r"1 file not in UTF-8: in/a.txt \(.*iconv -f ENCODING"):
            make("in")
        assert not (here / "out").exists()
    else:
        made = make("in")
        assert "".join(made.documents("train") + made.documents("val")) == text + "plain\n"


def test_a_vocabulary_that_is_not_filled_is_explained(here, capsys):
    (here / "a.txt").write_text("The lantern on the pier went out at nine.\n" * 5000)
    make("a.txt", tokenizer="train:5000")
    assert "tokens because the text has too few different words" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["一二三四五六七八九十，" * 9 + "灯\n", "ACGT" * 60, "größe " * 40], ids=["Chinese", "DNA", "German"]
)
@pytest.mark.parametrize("kind", ["trained", "no words", "llama2"])
def test_text_in_pieces_has_the_tokens_of_the_whole_in_every_language(here, small_units, capsys, kind, text):
    (here / "long.txt").write_text(text * 20 + "end")
    if kind == "trained":
        tokenizer.resolve("train:400", lambda: [text]).save("t.json")
    elif kind == "no words":
        definition = json.loads(tokenizer.train([text], 400, "", r"[\s\S]+").json)
        definition["pre_tokenizer"] = definition["pre_tokenizer"]["pretokenizers"][1]
        (here / "t.json").write_text(json.dumps(definition))
    else:
        sentencepiece(here / "t.json", text)
    small_units(37)
    made = make("long.txt", tokenizer="t.json", val_fraction=0.1)
    given = "".join(made.documents("train") + made.documents("val"))
    assert given == text * 20 + "end" and sum(row["bytes_of_text"] for row in made.metadata["shards"]) == len(given.encode())
    for split in ("train", "val"):
        tokens = made.tokens(split).tolist()
        assert tokens == [made.tokenizer.eot_token, *made.tokenizer.encode(made.documents(split)[0])]
    if kind == "llama2":
        assert "begins texts with <s>, but documents here begin with </s>" in capsys.readouterr().out
        with pytest.raises(UserError, match=r"long.txt: a document that cannot be cut is longer than --max_document_bytes=99"):
            make("long.txt", out="short", tokenizer="t.json", max_document_bytes=99)


def test_what_was_replaced_is_counted_by_file(here, capsys):
    rows = [{"text": f"row {i} half \ud83d end, whole 🚢"} for i in range(9)]
    (here / "half.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (here / "half.txt").write_bytes(b"\xff\xfe" + "half \ud83d end".encode("utf-16-le", "surrogatepass"))
    made = make("half.jsonl", "half.txt")
    assert "".join(made.documents("train")).startswith("row 0 half \ufffd end, whole 🚢row 1 half \ufffd end")
    assert "replaced by U+FFFD: half.jsonl (9), half.txt (1); if" in capsys.readouterr().out


def test_spelled_out_ends_of_text_are_counted_and_may_separate_documents(here, small_units, capsys):
    stories = [f"Story {i}. The lantern went out.\n\nMara counted {'again ' * (i % 9)}." for i in range(150)]
    (here / "a.txt").write_text("\n<|endoftext|>\n".join(stories) + "\n<|endoftext|>\n")
    small_units(200)
    make("a.txt", out="one")
    told = "note: the text spells out <|endoftext|> 150 times, which was encoded as ordinary text; --separator='<|endoftext|>'"
    assert told in capsys.readouterr().out
    made = make("a.txt", separator="<|endoftext|>")
    assert "note:" not in capsys.readouterr().out and made.metadata["options"] == {"separator": "<|endoftext|>"}
    assert sorted(made.documents("train") + made.documents("val")) == sorted(stories)


LINES = {  # a broken line, what the error says of it, and what would work
    '[{"text": "one"}, {"text": "two"}]': r"is a JSON list, not an object; .*jq -c '\.\[\]'",
    '{"text": "one"},': r"ends with a comma; .*sed",
    '{"text": "two harb': "ends before its JSON value does",
    "{": "ends before its JSON value does",
    '{"text": 7}': 'has a number under "text", not a string',
    '{"text": ["one", "two"]}': 'has a list under "text", not a string',
    '{"text": true}': 'has true or false under "text"',
    b'{"text": "K\xe4the"}': r"is not UTF-8 \(byte 12 is 0xe4\); convert the file: iconv",
    '{"text": "one"}'.encode("utf-16-le"): "contains NUL bytes, as UTF-16 does; .*iconv",
    '{"meta": {"text": "one"}}': r"""has "text" only inside "meta"; .*jq -c '\.\["meta"\]'""",
    '{"id": 1, "content": "one"}': 'has no "text"; its keys are id, content; .*--column=content',
    '{"id": 1}': 'has no "text"; its keys are id; none of them has a string',
    "{'text': 'one'}": "is a Python dict, not JSON; .*json.dumps",
    '{"text": "one"}{"text": "two"}': r'has more after its first JSON value: {"text": "two"}; .*jq -c \.',
    '{"text": one}': r"is not valid JSON \(Expecting value at character 10\)",
    "The lantern went out.": "is not JSON, but plain text; .*name the file .txt",
    '"one"': 'is a string, not a JSON object with a string under "text"',
    "[" * 99_999: "is nested too deeply",
    '{"text": "one", "id": ' + "9" * 5000 + "}": "has an integer of thousands of digits; write it as a string",
}


@pytest.mark.parametrize("line", LINES)
def test_a_broken_line_is_described_with_what_would_work(here, line):
    (here / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(UserError, match=rf"^a\.jsonl: line 2 {LINES[line]}") as refused:
        make("a.jsonl")
    assert len(str(refused.value)) < 400 and not (here / "out").exists()


def test_unusual_lines_are_read(here):
    lines = [
        '\ufeff{"text": "one"}',
        ' {"text": "two", "id": ' + "9" * 4000 + "}\r",
        '\ufeff{"text": "three"}',
        '{"text": null}',
    ]
    (here / "a.jsonl").write_text("\n".join(lines))
    made = make("a.jsonl")
    assert "".join(made.documents("train") + made.documents("val")) == "onetwothree"


@pytest.mark.parametrize(
    "column, said",
    [
        (pyarrow.array([b"one"]), r'contains binary, not strings; .*column\.cast\("string"\).*--column: caption'),
        (pyarrow.array(["one"]).dictionary_encode(), r'contains dictionary<.*, not strings; .*column\.cast\("string"\)'),
        (pyarrow.array([7]), "contains int64, not strings; text is expected"),
        (pyarrow.array([["one"]]), "contains list<.*, not strings; write one string per row"),
    ],
    ids=["binary", "dictionary", "int", "list"],
)
def test_a_column_of_another_type_is_described(here, column, said):
    pyarrow.parquet.write_table(pyarrow.table({"text": column, "caption": ["x"]}), "a.parquet")
    with pytest.raises(UserError, match=rf'^a\.parquet: column "text" {said}'):
        make("a.parquet")


def test_large_rows_beside_the_text_are_named(here):
    video = pyarrow.array([os.urandom(5000) for _ in range(3)], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a short caption"] * 3, "video": video}), "a.parquet")
    with pytest.raises(UserError, match="its rows, with all columns, are larger than .*=3000; raise it, or write the column"):
        make("a.parquet", max_document_bytes=3000)
    assert make("a.parquet", max_document_bytes=6000).documents("train")


def test_advice_about_the_split_can_work(here):
    (here / "one.txt").write_text("a")
    with pytest.raises(UserError, match="has only one character, which cannot be split"):
        make("one.txt")
    (here / "two.txt").write_text("ab")
    with pytest.raises(UserError, match=r"--val_fraction=0\.99 of 2 characters leaves one split empty; try 0\.1"):
        make("two.txt", val_fraction=0.99)
    assert make("two.txt", val_fraction=0.1).documents("val") == ["b"]
    write_lines(here / "same.jsonl", ["the same row"] * 120)
    for fraction, split, more in ((0.05, "val", "larger"), (0.9, "train", "smaller")):
        alike = f"--val_fraction={fraction} leaves no documents for {split}.*copies of one text.*or try a {more} value"
        with pytest.raises(UserError, match=alike):
            make("same.jsonl", out="same", val_fraction=fraction)


@pytest.mark.parametrize(
    "flag", ["val_fraction=0.0", "val_fraction=1.0", "tokenizer=nonsense", "max_tokens=10X", "max_tokens=1"]
)
def test_a_bad_flag_is_refused(here, flag):
    write_lines(here / "a.jsonl")
    assert flag.partition("=")[0] in run("a.jsonl", "--tokenizer=bytes", "--out=out", f"--{flag}", status=2).stderr
    assert not (here / "out").exists()


def test_an_error_shows_a_few_of_many_and_long_names(here):
    names = [f"column {i}" for i in range(20_000)]
    pyarrow.parquet.write_table(pyarrow.table({name: ["x"] for name in [*names[:2], "y" * 100_000, *names]}), "a.parquet")
    with pytest.raises(UserError, match=r"column 0, column 1, .*, \.\.\.$") as refused:
        make("a.parquet")
    assert len(str(refused.value)) < 400


def test_a_link_to_a_folder_inside_a_source_is_refused_not_left_out(here):
    write_lines(here / "text.jsonl", DOCUMENTS)
    (here / "corpus").mkdir()
    shutil.copy(here / "text.jsonl", here / "corpus" / "a.jsonl")
    (here / "elsewhere").mkdir()
    shutil.copy(here / "text.jsonl", here / "elsewhere" / "b.jsonl")
    (here / "corpus" / "code").symlink_to(here / "elsewhere")
    with pytest.raises(UserError, match="corpus/code is a link to a folder, which is not followed; pass that"):
        make("corpus")
    (here / "corpus" / "again").symlink_to(here / "corpus")
    assert make("corpus", "elsewhere").rows("train")
    (here / "whole").symlink_to(here / "elsewhere")
    assert make("whole", out="whole-out").rows("train")
