"""Changed files of every format: a few hundred now, and every one that ever made a reader fail."""

import pytest

import fuzz

TARGETS = fuzz.targets()
CASES = sorted(fuzz.CORPUS.glob("*/*"))


@pytest.mark.parametrize("name", TARGETS)
def test_a_changed_file_is_read_or_refused(name):
    assert fuzz.fuzz(TARGETS[name], executions=200, seed=0)[0].keys() == set()


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_once_failed_is_read_or_refused(path, tmp_path):
    target = TARGETS[path.parent.name]
    for name, content in target.others.items():
        (tmp_path / name).write_bytes(content)
    assert fuzz.attempt(target, tmp_path, path.read_bytes()) is None
