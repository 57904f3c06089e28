"""What launches a run elsewhere, checked without a cloud: names of files, flags, and the rules of the others."""

import re
import shlex
import shutil
import subprocess

import pytest

import settings
from conftest import ROOT

SKYPILOT, DOCKERFILE = ROOT / "launch/skypilot.yaml", ROOT / "launch/Dockerfile"


def test_skypilot_accepts_the_task():
    pytest.importorskip("sky")  # pip install skypilot
    import yaml
    from sky.utils import common_utils, schemas

    task = yaml.safe_load(SKYPILOT.read_text())
    common_utils.validate_schema(task, schemas.get_task_schema(), "")
    common_utils.validate_schema(task["resources"], schemas.get_resources_schema(), "")


def test_the_command_of_the_task_is_one_of_ours():
    command = re.search(r"train\.py (.*)", SKYPILOT.read_text())[1].replace("$PRESET", "config/llama_1.3b.toml")
    command = command.replace("$MIRROR", "s3://bucket/run").replace("$FLAGS", "")
    assert settings.load(shlex.split(command), "").checkpoint.mirror == "s3://bucket/run"


def test_the_image_copies_files_that_are_there_and_starts_a_run():
    text = DOCKERFILE.read_text()
    for source in re.findall(r"^COPY (\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists(), source
    assert 'ENTRYPOINT ["torchrun"]' in text and '"train.py"]' in text
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        subprocess.run(["docker", "build", f"--file={DOCKERFILE}", ROOT], check=True, timeout=1800)
