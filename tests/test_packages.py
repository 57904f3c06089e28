"""Commands on a machine that lacks a package, or that is Windows."""

import sys

import pytest

from conftest import execute

# Python imports this module at its start.
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
TORCH = ["train.py --steps=1", "sample.py x", "evaluate.py x", "replay.py x", "export.py x --out=y"]
PIP = f"run {sys.executable} -m pip install -r requirements.txt, or `make setup` and then .venv/bin/python"


def without(module, command, folder):
    """What a command says where `module` is missing."""
    (folder / "sitecustomize.py").write_text(WITHOUT.format(module=module))
    # -B, because a cached sitecustomize of the same second and size would be taken for the new one
    return execute([sys.executable, "-B", *command.split()], status=2, env={"PYTHONPATH": str(folder)}, fork=False).stderr


@pytest.mark.parametrize("command", [*TORCH, "extras/ladder.py --minutes=1", "plot.py x", "prepare_data.py --out=x"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(command, tmp_path):
    for module in ("tyro", "msgspec", "torch" if command in TORCH else "numpy"):
        assert without(module, command, tmp_path) == f"error: No module named '{module}'; {PIP}\n"
    said = without("fcntl", command, tmp_path)
    assert said.startswith("error: No module named 'fcntl'; Windows has no such module, so use WSL") and said.count("\n") == 1


def test_a_package_that_does_not_load_and_an_old_python_are_named(tmp_path):
    (tmp_path / "tyro.py").write_text("raise ImportError('libtyro.so: cannot open shared object file\\nmore')")
    said = without("", "sample.py x", tmp_path)
    assert said == f"error: libtyro.so: cannot open shared object file; {PIP}\n"
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.version_info = (3, 10, 1)\n")
    old = execute([sys.executable, "plot.py", "x"], status=2, env={"PYTHONPATH": str(tmp_path)}, fork=False).stderr
    assert old.startswith("error: Lockstep needs Python 3.11 or newer, but ")
