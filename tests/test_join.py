"""Many machines, one corpus: parts made apart and joined are the dataset that one machine makes, byte for byte."""

import json
import os
import random
import shutil
import signal
import time

import pytest

from common import errors
from conftest import content
from dataset import join, sources, tokenizer
from dataset.sources import SourceFile
from prepare_data import PrepareConfig, main, prepare
from test_prepare_data import ROOT, command, run, write_lines

FLAGS = dict(out="out", tokenizer="bytes", shard_tokens=3000, val_fraction=0.1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of texts of very different sizes, and one of lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "UNIT_BYTES", 1000)
    chance = random.Random(0)
    for i in range(150):
        path = tmp_path / "corpus" / f"{chance.randrange(10)}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {i} " * chance.choice((3, 10, 40, 400)))
    lines = [json.dumps({"text": f"line {i} " * chance.randrange(30)}) for i in range(300)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    return tmp_path


def make(*names, **flags):
    prepare(PrepareConfig(sources=names, **FLAGS | flags))


def put_together(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["prepare_data.py", *arguments])
    main()


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("more", [{}, {"max_tokens": "100K"}])
def test_parts_joined_are_what_one_machine_makes(here, monkeypatch, capsys, count, more):
    make("corpus", "lines.jsonl", out="one", **more)
    for number in random.Random(1).sample(range(1, count + 1), count):  # in any order, the sources too
        make("lines.jsonl", "corpus", part=f"{number}/{count}", **more)
    put_together(monkeypatch, "corpus", "lines.jsonl", "--out=out", "--join=true")
    assert content("out") == content("one") and len(content("out")) > 10
    put_together(monkeypatch, "--out=out", "--join")
    assert "already holds" in capsys.readouterr().out


def test_the_order_in_which_a_system_lists_files_does_not_matter(here, monkeypatch):
    make("corpus", out="one")
    rglob = sources.Path.rglob
    for number in (1, 2, 3):
        chance = random.Random(number)
        monkeypatch.setattr(sources.Path, "rglob", lambda *a, c=chance: sorted(rglob(*a), key=lambda _: c.random()))
        make("corpus", part=f"{number}/3")
    put_together(monkeypatch, "--out=out", "--join")
    assert content("out") == content("one")


def test_more_machines_than_files(here, monkeypatch):
    make("lines.jsonl", out="one")
    for number in range(1, 5):
        make("lines.jsonl", part=f"{number}/4")
    put_together(monkeypatch, "--out=out", "--join")
    assert content("out") == content("one")


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 200])
def test_every_file_is_in_one_part_and_parts_are_about_equal(count):
    chance = random.Random(count)
    files = [SourceFile(None, str(i), chance.choice((0, 1, 50, 900))) for i in range(500)]
    ranges = [join.part_files(files, number, count) for number in range(1, count + 1)]
    assert [i for part in ranges for i in part] == list(range(500))
    sizes = [sum(files[i].size for i in part) for part in ranges]
    assert max(sizes) - min(sizes) <= 2 * 900


def test_a_join_that_is_killed_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = (ROOT / "dataset/sources.py").read_text()
    for name, first in (("a.jsonl", 0), ("b.jsonl", 800)):
        write_lines(tmp_path / name, [f"{i} {source}" for i in range(first, first + 800)])
    make("a.jsonl", "b.jsonl", shard_tokens=300_000, out="one")
    for number in (1, 2):
        make("a.jsonl", "b.jsonl", shard_tokens=300_000, part=f"{number}/2")
    for shards in (3, 12):
        process = command("--out=out", "--join")
        while len(list((tmp_path / "out").glob("*.bin"))) < shards:
            assert process.poll() is None, process.communicate()
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        assert not (tmp_path / "out" / "dataset.json").exists()
    run("--out=out", "--join")
    assert content("out") == content("one")


def damage(here, what):
    """Two parts of three, or three with something wrong."""
    for number in (1, 2) if what == "missing" else (1, 2, 3):
        other = number == 2 and what
        more = {"val_fraction": 0.2} if other == "val_fraction" else {}
        if other == "source":
            (here / "corpus" / "extra.txt").write_text("more")
        if other == "renamed":
            (here / "corpus" / "0").rename(here / "corpus" / "zero")
        if other == "tokenizer":
            tokenizer.resolve("train:300", lambda: ["some text"]).save(here / "other.json")
            more = {"tokenizer": "other.json"}
        make("corpus", part=f"{number}/3", **more)
    part = here / "out" / "part-0002-of-0003"
    if what == "double":
        shutil.copytree(part, here / "out" / "part-copy")
    if what == "unfinished":
        (part / "dataset.json").unlink()
    if what in ("damaged", "truncated"):
        path = part / "train_000000.bin"
        path.write_bytes(path.read_bytes()[:-2] + b"\1\0" * (what == "damaged"))
    if what == "foreign":
        shutil.copytree(here / "corpus", here / "out" / "part-of-mine")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "out wants each of 3 parts once; missing: 3/3; there twice: nothing"),
        ("double", "out wants each of 3 parts once; missing: nothing; there twice: 2/3"),
        ("unfinished", "part-0002-of-0003 is not finished"),
        ("damaged", "train_000000.bin does not match its sha256"),
        ("truncated", "train_000000.bin: its header promises"),
        ("val_fraction", "part-0002-of-0003 does not belong to out/part-0001-of-0003: val_fraction 0.2, not 0.1"),
        ("source", "part-0002-of-0003 does not belong to out/part-0001-of-0003: source"),
        ("renamed", "part-0002-of-0003 does not belong to out/part-0001-of-0003: listing"),
        ("tokenizer", "part-0002-of-0003 does not belong to out/part-0001-of-0003: tokenizer"),
        ("foreign", "part-of-mine is not finished"),
    ],
)
def test_parts_that_do_not_make_one_dataset_are_refused(here, what, message):
    damage(here, what)
    with pytest.raises(errors.UserError) as error:
        join.join(here.joinpath("out").relative_to(here))
    assert message in str(error.value)
    assert not (here / "out" / "dataset.json").exists() and (here / "out" / "part-0001-of-0003" / "dataset.json").exists()


def test_a_part_of_what_is_there_whole_is_refused(here):
    make("corpus", "lines.jsonl")
    with pytest.raises(errors.UserError, match="already holds a whole dataset"):
        make("corpus", "lines.jsonl", part="1/2")
    assert not list((here / "out").glob("part-*"))


def test_a_folder_without_parts_and_few_documents_are_refused(here):
    with pytest.raises(errors.UserError, match="nowhere has no parts; make them with --part=1/N"):
        join.join(here / "nowhere")
    (here / "few.txt").write_text("one document " * 1000)
    make("few.txt", part="1/1")
    with pytest.raises(errors.UserError, match="only 1 documents; prepare fewer than 100 without --part"):
        join.join(here / "out")


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b", "-1/3", "1/0"])
def test_a_bad_part_is_refused(here, part):
    with pytest.raises(errors.UserError, match=f"--part={part} is not NUMBER/COUNT"):
        make("corpus", part=part)


@pytest.mark.parametrize("spec", ["", "train:300"])
def test_a_part_needs_a_given_tokenizer(here, spec):
    with pytest.raises(errors.UserError, match="--part needs a --tokenizer"):
        make("corpus", part="1/3", tokenizer=spec)
