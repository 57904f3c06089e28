"""The benchmarks that are also proofs give the right verdict, through the front door; and the wrong one is noticed."""

import importlib
import json
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, environment

import checkpoint

RESULTS = ROOT / "bench" / "results"


@pytest.fixture
def bench(monkeypatch):
    """Imports a script of bench/ as a module; its results of before are put back."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = {path: path.read_bytes() for path in RESULTS.glob("*.*")}
    yield importlib.import_module
    for path in RESULTS.glob("*.*"):
        path.unlink()
    for path, content in before.items():
        path.write_bytes(content)
