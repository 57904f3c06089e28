"""Changed files of every format: a few hundred now, and every one that ever made a reader fail."""

import os

import pyarrow
import pytest

import fuzz
from common.errors import UserError

TARGETS = fuzz.targets()
CASES = sorted(fuzz.CORPUS.glob("*/*"))


@pytest.mark.parametrize("name", TARGETS)
def test_a_changed_file_is_read_or_refused(name, tmp_path):
    assert fuzz.fuzz(TARGETS[name], range(200), 0, tmp_path)[0].keys() == set()


def test_a_campaign_goes_on_where_it_was_stopped_and_counts_for_the_versions_of_its_parsers(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "PIECE", 60)
    target = TARGETS["metrics"]
    assert [fuzz.go_on(target, tmp_path, 100, 1)["executions"] for _ in range(3)] == [60, 100, 100]
    answers = {path.name: path.read_bytes() for path in (tmp_path / "corpus").iterdir()}
    assert answers and fuzz.load_state(tmp_path / "state.json")["parsers"]["msgspec"]
    monkeypatch.setattr(fuzz, "parsers", lambda: {"msgspec": "another"})
    assert fuzz.go_on(target, tmp_path, 100, 1)["executions"] == 60  # from 0 again, with the corpus
    assert answers.items() <= {path.name: path.read_bytes() for path in (tmp_path / "corpus").iterdir()}.items()


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_once_failed_is_read_or_refused(path, tmp_path):
    target = TARGETS[path.parent.name]
    for name, content in target.others.items():
        (tmp_path / name).write_bytes(content)
    assert fuzz.attempt(target, tmp_path, path.read_bytes())[0] is None


def resident():
    """Bytes of memory that this process has (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("suffix, codec", [("gz", "gzip"), ("zst", "zstd")])
def test_reading_a_torn_stream_again_and_again_takes_no_more_memory(suffix, codec, tmp_path):
    packed = pyarrow.compress(os.urandom(1 << 18).hex().encode(), codec, asbytes=True)
    (tmp_path / f"a.txt.{suffix}").write_bytes(packed[: len(packed) * 3 // 4])
    read, sizes = fuzz.read_text_file(f"a.txt.{suffix}"), []
    for _ in range(3):
        for _ in range(50):
            with pytest.raises(UserError):
                read(tmp_path)
        sizes.append(resident())
    assert sizes[-1] - sizes[0] < 8e6, sizes  # pyarrow's read() loses a buffer each time: 40 MB
