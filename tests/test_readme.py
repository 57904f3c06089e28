"""Every command of the README runs, in its order, in a copy of the project. Training is shortened."""

import gzip
import json
import re
import shlex
import shutil
import sys

import pytest

import machine
import warm
from conftest import PATIENCE, ROOT, environment, execute

FOLDERS = ["lockstep", "extras"]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("launch/*.md")]
LOG = ROOT / "bench/LOG.md"
OF_OTHERS = {"fineweb.py", "NAME.json"}  # of build-nanogpt; any
SBATCH = ("--nodes", "--gpus-per-node")  # flags of sbatch itself
SHORT = machine.arguments(
    **dict(steps=2, n_layer=1, n_head=2, n_embd=32, seq_len=32, tokens_per_update=384, micro_batch_size=2, eval_tokens=512),
    **dict(threads=1, compile="off", device="cpu", init_from="scratch"),
)[1:]


def commands():
    """The command lines of all sh blocks, without comments."""
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        for line in block.splitlines():
            if command := line.split("#")[0].strip():
                yield command


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project, with the files that the README's commands name."""
    folder = tmp_path_factory.mktemp("copy")
    for path in [
        *ROOT.glob("*.py"),
        *(ROOT / folder for folder in FOLDERS),
        ROOT / "Makefile",
        ROOT / "config",
        ROOT / "requirements.txt",
        ROOT / "requirements-dev.txt",
    ]:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    text = "".join(f"Line {i}: to be or not to be, that is the question number {i * i}.\n" for i in range(3000))
    (folder / "input.txt").write_text(text)
    (folder / "corpus").mkdir()
    for i in range(120):  # parts need 100 documents
        (folder / "corpus" / f"{i}.md").write_text(f"{i}\n" + (ROOT / "README.md").read_text())
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(b'{"text": "hello"}\n' * 50))
    run("python prepare_data.py", folder)
    run("python prepare_data.py input.txt --out=tokens/fineweb10B --tokenizer=train:300", folder)
    run("python train.py " + " ".join(SHORT), folder)  # stands for `make train`, which installs packages
    return folder


def run(command, folder):
    """Run a command line. Returns what it printed. Of the commands with torchrun, only the first starts it: it is slow."""
    words = shlex.split(command)
    if words[0] == "python":
        return execute([sys.executable, *words[1:]], cwd=folder).stdout
    if words[0] != "torchrun":
        return execute(["sh", "-c", command], cwd=folder).stdout
    if "--strategy" not in command:
        return execute([sys.executable, "-m", "torch.distributed.run", *words[1:]], cwd=folder).stdout
    standalone, ranks, *script = words[1:]
    streams = folder / f"streams{len(list(folder.glob('streams*')))}"
    streams.mkdir()
    process = warm.Process(script, int(ranks.partition("--nproc_per_node=")[2]), environment(), folder, streams)
    out, errors = process.communicate(PATIENCE)
    assert standalone == "--standalone" and process.returncode == 0, errors
    return out


def shortened(command, flags=SHORT):
    """A command of train.py with a tenth of its --steps, at most 3 ranks, and those `flags` that it does not set."""
    command = command.replace("--nproc_per_node=8", "--nproc_per_node=2")
    if steps := re.search(r"--steps=(\d+)", command):
        command = command.replace(steps[0], f"--steps={int(steps[1]) // 10}")
    return " ".join([command, *(flag for flag in flags if flag.partition("=")[0] + "=" not in command)])


def test_the_readme_begins_with_its_two_commands():
    assert list(commands())[:2] == ["make train", "make test"]


def test_the_readme_is_read_in_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_runs_of_the_picture_have_the_same_weights():
    runs = json.loads((ROOT / "bench/results/same_run.json").read_text())["runs"]
    exact = {run["run"]: run["model.safetensors"] for run in runs if run["strategy"] == "exact"}
    assert len(exact) == 5 and len(set(exact.values())) == 1


def test_every_link_of_the_documents_leads_to_a_file():
    for page in [*DOCUMENTS, ROOT / "CHANGELOG.md"]:
        for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_file_that_the_documents_name_is_there():
    folders = "|".join([*FOLDERS, "bench", "results", "tests", "launch"])
    named = re.compile(rf"(?<![\w./-])(?:{folders})/[\w/]+\.(?:py|md|json|png|sbatch)\b")
    for page in [*DOCUMENTS, LOG]:
        paths = set(named.findall(page.read_text())) - {"bench/results/NAME.json"}
        assert all((ROOT / path).exists() or (LOG.parent / path).exists() for path in paths), page.name
    # The notebook also names files without their folder.
    known = {path.name for folder in (".", "*", "*/*") for path in ROOT.glob(f"{folder}/*.*")}
    assert not set(re.findall(r"(?<![\w./])\w+\.(?:py|json|png)\b", LOG.read_text())) - known - OF_OTHERS


def test_every_test_that_the_documents_name_is_there():
    defined = set(re.findall(r"def (test_\w+)", "".join(path.read_text() for path in ROOT.glob("**/tests/test_*.py"))))
    for page in DOCUMENTS:
        for name, cut in re.findall(r"\b(test_\w+)(?![\w.]*\.py)(\.\.\.)?", page.read_text()):
            assert name in defined or (cut and any(test.startswith(name) for test in defined)), f"{page.name}: {name}"


def test_every_result_has_its_row_among_the_figures():
    rows = (ROOT / "docs/figures.md").read_text()
    assert set(re.findall(r"\b\w+\.json\b", rows)) == {path.name for path in ROOT.glob("bench/results/*.json")}


def test_the_commands_that_the_documents_name_have_these_flags():
    known = {}
    for page in [*DOCUMENTS, LOG]:
        text = page.read_text().replace("\\\n", " ")
        for script, rest in re.findall(r"(?:python|torchrun [^`\n]*?) ((?:bench/|extras/)?\w+\.py)([^`|#;&\n]*)", text):
            case = re.match(r" (\w+)(?= |$)", rest)
            words = [script, *(case.groups() if case and script.startswith("bench/") else ())]
            if (key := " ".join(words)) not in known:
                known[key] = execute([sys.executable, *words, "--help"]).stdout
            unknown = [flag for flag in re.findall(r" (--\w+)", rest) if not re.search(rf"{flag}\b", known[key])]
            assert not unknown, f"{page.name}: {key} {unknown}"


# These take long, and have tests of their own.
ELSEWHERE = ("python extras/ladder.py", "python lesson.py")


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith(ELSEWHERE)], ids=lambda command: command[:90])
def test_command_of_the_readme(copy, command):
    if command.startswith(("python3 -m venv", ". .venv", "pip install -r requirements.txt")):
        assert command.split()[-1] in ("requirements.txt", ".venv", ".venv/bin/activate")  # as the Makefile does
    elif command.startswith("make"):
        run(command.replace("make", "make -n", 1), copy)
    elif "--plan" in command:
        assert "fits" in run(command, copy)
    elif command.startswith("sbatch"):  # there is no SLURM here, but train.py knows what it is given
        script, *arguments = (word for word in command.split()[1:] if word.partition("=")[0] not in SBATCH)
        assert (ROOT / script).exists()
        assert "fits" in run(" ".join(["python train.py", *arguments, "--plan", "--plan_world_size=32"]), copy)
    elif "train.py" in command:
        name = re.search(r".*--name=(\w+)|.*config/(\w+)\.toml|$", command)
        begun = (copy / "runs" / (name[1] or name[2] or "laptop")).exists()
        out = run(shortened(command, [] if begun else SHORT), copy)  # a run that continues keeps its settings
        assert "done:" in out or (begun and "is complete at step" in out)
        assert ("continuing from" in out) == begun  # the same command again
    elif command.startswith("sha256sum"):
        first, second = (line.split()[0] for line in run(command, copy).splitlines())
        assert first == second
    else:
        assert run(command, copy).strip()
