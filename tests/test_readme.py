"""Every command of the README runs, in its order, in a copy of the project. Training is shortened."""

import gzip
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, environment

SHORT = [
    "--steps=2",
    "--n_layer=1",
    "--n_head=2",
    "--n_embd=32",
    "--seq_len=32",
    "--tokens_per_update=384",
    "--micro_batch_size=2",
    "--eval_tokens=512",
    "--threads=1",
    "--compile=off",
    "--device=cpu",
    "--init_from=scratch",
]


def commands():
    """The command lines of all sh blocks, without comments."""
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        for line in block.splitlines():
            if command := line.split("#")[0].strip():
                yield command


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project in a folder of its own, with the files that the README's commands name."""
    folder = tmp_path_factory.mktemp("copy")
    for path in [
        *ROOT.glob("*.py"),
        ROOT / "Makefile",
        ROOT / "config",
        ROOT / "requirements.txt",
        ROOT / "requirements-dev.txt",
    ]:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    text = "".join(f"Line {i}: to be or not to be, that is the question number {i * i}.\n" for i in range(3000))
    (folder / "input.txt").write_text(text)
    (folder / "corpus").mkdir()
    shutil.copy(ROOT / "README.md", folder / "corpus")
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(b'{"text": "hello"}\n' * 50))
    run("python prepare_data.py", folder)
    run("python prepare_data.py input.txt --out=tokens/fineweb10B --tokenizer=train:300", folder)
    run("python train.py " + " ".join(SHORT), folder)  # stands for `make train`, which installs packages
    return folder


def run(command, folder):
    """Run a command line; python and torchrun are this environment's. Returns what it printed."""
    words = command.split()
    if words[0] == "python":
        words[0] = sys.executable
    elif words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    done = subprocess.run(
        " ".join(words), cwd=folder, shell=True, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def shortened(command):
    """A command of train.py with a tiny model, a tenth of its --steps or two, and at most 3 ranks."""
    command = command.replace("--nproc_per_node=8", "--nproc_per_node=2")
    if steps := re.search(r"--steps=(\d+)", command):
        command = command.replace(steps[0], f"--steps={int(steps[1]) // 10}")
    return " ".join([command, *(flag for flag in SHORT if not (steps and flag.startswith("--steps")))])


def test_the_readme_begins_with_its_two_commands():
    assert list(commands())[:2] == ["make train", "make test"]


@pytest.mark.parametrize("command", list(commands()), ids=lambda command: command[:90])
def test_command_of_the_readme(copy, command):
    if command.startswith("make"):
        run(command.replace("make", "make -n", 1), copy)
    elif "train.py" in command:
        begun = (copy / "runs" / "small").exists()
        out = run(shortened(command), copy)
        assert "done:" in out
        assert ("continuing from" in out) == (begun and "--name=small" in command)  # the same command again
    elif command.startswith("sha256sum"):
        first, second = (line.split()[0] for line in run(command, copy).splitlines())
        assert first == second
    else:
        assert run(command, copy).strip()
