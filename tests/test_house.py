"""The house rules: imports point only downward, importing does nothing, nothing is executed or unpickled."""

import ast
import subprocess
import sys

import pytest

from conftest import ROOT

# From the ground up. A module may import those on lower floors, and on its own floor those before it.
FLOORS = [
    "cli files settings footprint cluster device world kernels",
    "dataset data hub sources tokenizer model optim replicas ddp_from_scratch log curves",
    "shards encode join check_data store hf exact sharded",
    "choices parallel snapshot retention checkpoint lookup",
    "evaluate sample export plot prepare_data plan",
    "train",
    "replay",
]
ORDER = [module for floor in FLOORS for module in floor.split()]
MODULES = sorted(path.stem for path in ROOT.glob("*.py"))


def tree(module):
    return ast.parse((ROOT / f"{module}.py").read_text())


def imported(module):
    """The project's own modules that `module` imports, anywhere in it."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield node.module


def test_every_module_has_its_floor():
    assert set(MODULES) <= set(ORDER)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module):
    below = ORDER[: ORDER.index(module)]
    assert set(imported(module)) <= set(below)


@pytest.mark.parametrize("module", MODULES)
def test_importing_does_nothing(module):
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in tree(module).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        fallback = isinstance(node, ast.Try) and isinstance(node.body[0], ast.Import)
        assert isinstance(node, allowed) or docstring or main or fallback, ast.unparse(node)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_executed_or_unpickled(module):
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("exec", "eval", "compile", "__import__", "torch.load", "torch.save"), called
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "pickle" not in ast.unparse(node)


def test_all_modules_import_together_without_output():
    code = "import " + ", ".join(MODULES)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "" and done.stderr == ""
