"""The house rules: imports point only downward, importing does nothing, nothing is executed or unpickled."""

import ast
import sys

import pytest

from conftest import ROOT, execute

# Folders, and files of the root, from the ground up. What is in one may import what is in those before it, and its neighbours.
ORDER = [
    *(
        "common",
        "settings",
        "hardware",
        "command",
        "dataset",
        "data",
        "attention",
        "native",
        "portable",
        "model",
        "optim",
        "reports",
        "parallel",
    ),
    *("checkpoints", "planning", "tasks", "evaluate", "sample", "export", "plot", "prepare_data", "train", "replay", "ladder"),
]
PATHS = [path.relative_to(ROOT) for place in ORDER for path in [*ROOT.glob(f"{place}.py"), *sorted(ROOT.glob(f"{place}/*.py"))]]
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in PATHS}


def tree(module):
    return ast.parse((ROOT / MODULES[module]).read_text())


def imported(module):
    """The project's own modules that `module` imports, anywhere in it."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)


def place(module):
    return module.partition(".")[0]


def test_every_file_has_its_place():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders | {path.stem for path in ROOT.glob("*.py")} == set(ORDER)


def test_no_file_is_longer_than_400_lines():
    files = [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/*.py")]
    longer = {"settings.py": 470, "data.py": 440, "sources.py": 500, "tokens.py": 420}
    lines = {path: len(path.read_text().splitlines()) for path in files if path.parent.name != "tests"}
    assert not [path for path, count in lines.items() if count > longer.get(path.name, 400)]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module):
    assert {place(name) for name in imported(module)} <= set(ORDER[: ORDER.index(place(module)) + 1])


def test_no_modules_import_each_other():
    below = {module: set(imported(module)) for module in MODULES}
    while free := [module for module, needs in below.items() if not needs]:
        below = {module: needs - set(free) for module, needs in below.items() if needs}
    assert not below


@pytest.mark.parametrize("folder", [path.parent.name for path in sorted(ROOT.glob("*/__init__.py"))])
def test_a_folder_says_what_it_promises_and_does_nothing(folder):
    (docstring,) = tree(folder).body
    assert 4 <= len(docstring.value.value.splitlines()) <= 9


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
    done = execute([sys.executable, "-c", "import " + ", ".join(MODULES)])
    assert done.stdout == done.stderr == ""
