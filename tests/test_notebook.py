"""The cells of docs/notebook.md, one after another in a real kernel."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

import machine
from conftest import PATIENCE, ROOT, environment, wait_for

STEPS = 10**6
# Each cell as it can run here: without a network, a Drive and a GPU, on a model of a few hundred weights.
SMALL = machine.arguments(
    **dict(n_layer=1, n_head=1, n_embd=16, d_ff=32, seq_len=32, tokens_per_update=256, steps=STEPS, eval_every=0, threads=1),
)[1:]
INSTEAD = {
    r"!git clone .*\n": "",
    r"!pip install .*\n": "",
    r"!wget .*\n": "",
    r"from google.*\s+drive\.mount.*\n": "",
    "/content/drive/MyDrive": "../drive",
    ", copies]": f", copies, *{SMALL}]",
}


@pytest.fixture
def project(tmp_path):
    """What the first two cells would download."""
    project = tmp_path / "lockstep"
    for name in ("lockstep", "extras", "config"):
        shutil.copytree(ROOT / name, project / name)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, project)
    shutil.copy(ROOT / "README.md", project / "input.txt")
    return project


def cells():
    for cell in re.findall(r"```python\n(.*?)```", (ROOT / "docs/notebook.md").read_text(), re.S):
        for pattern, other in INSTEAD.items():
            cell = re.sub(pattern, other, cell)
        yield cell


def test_the_cells_train_stop_continue_sample_and_show_curves(project):
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=PATIENCE, resources={"metadata": {"path": project.parent}})
    run = project / "runs/shakespeare"

    def execute(source):
        """Run a cell. Returns what it wrote, and the kinds of its outputs."""
        cell = nbformat.v4.new_code_cell(source)
        client.nb.cells.append(cell)
        client.execute_cell(cell, len(client.nb.cells) - 1)
        return "".join(output.get("text", "") for output in cell.outputs), [*cell.outputs]

    def logged(*words):
        path = run / "train.log"
        return path.exists() and all(word in path.read_text() for word in words)

    def status():
        return json.loads((run / "status.json").read_text())

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    setup, text, drive, command, start, look, stop, curves, sample, two = cells()
    with client.setup_kernel(env=environment(PATH=path, IPYTHONDIR=str(project))):
        execute(setup)
        prepared, _ = execute(text)
        assert prepared.count("\n") < 12 and prepared.count("\r") < 40
        for cell in (drive, command, start):
            execute(cell)
        wait_for(lambda: logged(f"step     10/{STEPS}"))
        run_sync(client.km.interrupt_kernel)()  # the stop button
        said, _ = execute(look)
        assert "tok/s" in said and said.splitlines()[-1] == "None" and "stopping" not in (project / "train.out").read_text()
        assert execute(stop)[0] == "75\n" and logged("(SIGINT), saved; run the same command to continue")
        shutil.rmtree(project / "runs")  # the disk goes away with the machine
        execute(two)
        execute(start)
        wait_for(lambda: logged("2 ranks, ddp", "continuing from", "tok/s"))
        _, outputs = execute(curves)
        assert "image/png" in outputs[-1]["data"]
        assert execute(sample)[0].startswith("ROMEO:")
        assert execute(stop)[0] == "1\n"  # torchrun's
        stopped = status()
        assert (stopped["state"], stopped["status"]) == ("stopped", 75)
        steps = stopped["step"] + 20
        execute(command.replace(f"--steps={STEPS}", f"--steps={steps}"))
        execute(start + "assert run.wait() == 0")
        assert logged(f"done: {steps:,} steps") and not logged("curves.png failed")
        assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")  # in spite of the kernel's MPLBACKEND
        said, _ = execute("!" + status()["next"])  # without a prompt
        assert said.rstrip().endswith("-----") and not said.startswith("Type text")
