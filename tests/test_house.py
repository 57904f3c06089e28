"""The house rules: imports point only downward, importing does nothing, nothing is executed or unpickled."""

import ast
import json
import re
import shutil
import sys

import pytest

from conftest import ROOT, execute

# Where modules are, from the ground up. What is in one place may import what is in those before it, and its neighbours.
ORDER = [
    *("lockstep.common", "lockstep.architectures", "lockstep.strategies", "lockstep.settings"),
    *("lockstep.hardware", "lockstep.command"),
    *("lockstep.dataset", "lockstep.numerics"),
    *("lockstep.reports", "lockstep.parallel", "lockstep.checkpoints", "lockstep.planning", "lockstep"),
    *("data", "model", "lesson", "evaluate", "sample", "export", "plot", "prepare_data", "train", "replay", "extras"),
]
SCRIPTS = ("char_tokenizer", "convert_nanogpt", "to_gguf", "datatrove_tokens")  # of extras; nothing imports them
PATHS = [path.relative_to(ROOT) for path in [*ROOT.glob("*.py"), *ROOT.glob("lockstep/**/*.py"), *ROOT.glob("extras/**/*.py")]]
PATHS = [path for path in sorted(PATHS) if "tests" not in path.parts and path.stem not in SCRIPTS]
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in PATHS}
FOLDERS = [module for module, path in MODULES.items() if path.name == "__init__.py"]


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
    """The longest entry of ORDER that a module is in."""
    return max((place for place in ORDER if f"{module}.".startswith(f"{place}.")), key=len)


def test_every_file_has_its_place():
    roots = {name for name in MODULES if "." not in name}
    assert roots | {"extras"} == {name for name in ORDER if "." not in name}
    assert {name for name in MODULES if name.count(".") == 1 and name.startswith("lockstep.")} <= set(ORDER)


def test_imports_point_downward():
    pairs = {(module, name) for module in MODULES for name in imported(module)}
    pairs = {(module, name) for module, name in pairs if "." in module or not name.startswith("extras.")}  # see below
    assert not [pair for pair in pairs if ORDER.index(place(pair[0])) < ORDER.index(place(pair[1]))]


def test_only_extras_import_extras_at_once():
    """Others import them in the branch of a flag."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("lockstep/**/*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("bench/**/*.py")]
    for path in paths:
        found = [line for line in path.read_text().splitlines() if re.match(r"(from|import) extras\b", line)]
        assert not found, path


# One process imports what the commands need, and runs each in a fork. Prints their statuses, stdouts and stderrs.
EACH = """
import json, os, runpy, sys, evaluate, export, sample, train
ended = []
for number, words in enumerate(json.loads(sys.argv[1])):
    if not (pid := os.fork()):
        for stream in (1, 2):
            os.dup2(os.open(f"{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ended.append([status, *(open(f"{number}.{stream}").read() for stream in (1, 2))])
print(json.dumps(ended))
"""


def test_without_extras_everything_else_works_and_their_flags_say_what_is_missing(tokens, tmp_path):
    for name in ("lockstep", "config"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in [*ROOT.glob("*.py"), ROOT / "CITATION.cff"]:
        shutil.copy(path, tmp_path)
    small = [f"--tokens={tokens}", "--n_layer=1", "--n_embd=16", "--n_head=1", "--seq_len=16", "--tokens_per_update=64"]
    train = ["train.py", "--name=run", *small, "--steps=2", "--eval_tokens=64", "--device=cpu", "--compile=off"]
    lacking = {
        "--tasks needs extras/tasks": [*train, "--tasks=hellaswag"],
        "--mirror needs extras/mirror": [*train, f"--mirror={tmp_path / 'store'}"],
        " --tasks needs extras/tasks": ["evaluate.py", "runs/run", "--tasks=hellaswag"],
        "--push needs extras/publishing": ["export.py", "runs/run", "--push=me/model"],
    }
    working = {
        "fits": [*train, "--plan", "--plan_world_size=1"],
        "done: 2 steps": train,
        "loss ": ["evaluate.py", "runs/run"],
        "a": ["sample.py", "runs/run", "--max_new_tokens=4", "--prompt=a"],
        "note: without a model card": ["export.py", "runs/run", "--out=model"],
    }
    commands = json.dumps([*working.values(), *lacking.values()])
    answers = json.loads(execute([sys.executable, "-c", EACH, commands], cwd=tmp_path).stdout)
    for said, (status, out, errors) in zip(working, answers, strict=False):
        assert (status, errors) == (0, "") and said in out
    for said, (status, _, errors) in zip(lacking, answers[len(working) :], strict=True):
        assert errors.startswith(f"error: {said.strip()}, which this copy lacks; ") and len(errors.splitlines()) == 1
        assert status == 2
    assert (tmp_path / "model/config.toml").exists() and not (tmp_path / "model/README.md").exists()


def test_no_modules_import_each_other():
    below = {module: set(imported(module)) for module in MODULES}
    while free := [module for module, needs in below.items() if not needs]:
        below = {module: needs - set(free) for module, needs in below.items() if needs}
    assert not below


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_it_promises_and_does_nothing(folder):
    (docstring,) = tree(folder).body
    assert 4 <= len(docstring.value.value.splitlines()) <= 9


@pytest.mark.parametrize("module", MODULES)
def test_importing_does_nothing(module):
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in tree(module).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        place = ast.unparse(node) == "sys.path.insert(0, str(Path(__file__).parent.parent))"
        fallback = isinstance(node, ast.Try) and isinstance(node.body[0], ast.Import)
        assert isinstance(node, allowed) or docstring or main or place or fallback, ast.unparse(node)


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
