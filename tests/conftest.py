"""A tiny dataset and the front door: real processes, real torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent

# A model of 30 thousand parameters that still has every part, trained for 20 updates of 12 micro-batches of 2 x 16 tokens.
TINY = dict(
    architecture="qwen3",
    n_layer=2,
    n_head=2,
    n_embd=32,
    seq_len=16,
    steps=20,
    tokens_per_update=384,
    micro_batch_size=2,
    lr=1e-2,
    warmup_steps=2,
    eval_every=5,
    eval_tokens=640,
    save_every=5,
    log_every=1,
    dtype="float32",
    compile="off",
    device="cpu",
)


def environment(**more):
    """This process's, without what another torchrun or a test's rank may have left in it."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return kept | {"OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", **more}


class Trainer:
    """Runs train.py on the tiny dataset with its runs in one folder."""

    def __init__(self, tokens: Path, runs: Path):
        self.tokens, self.runs = tokens, runs

    def command(self, name, ranks=0, launcher=(), **flags):
        """The command line; ranks=0 runs without torchrun."""
        python = [sys.executable]
        if ranks:
            python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *launcher]
        flags = {"tokens": self.tokens, "out_dir": self.runs, "name": name, **TINY, **flags}
        return [*python, "train.py", *(f"--{key}={value}" for key, value in flags.items())]

    def __call__(self, name, ranks=0, status=0, env=None, **flags):
        """Run to the end and return the finished process; the exit status must be `status`."""
        done = subprocess.run(
            self.command(name, ranks, **flags),
            cwd=ROOT,
            env=environment(**(env or {})),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == status, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, name, ranks=0, env=None, **flags):
        """Start in the background, in a process group of its own."""
        return subprocess.Popen(
            self.command(name, ranks, **flags),
            cwd=ROOT,
            env=environment(**(env or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def latest(self, name):
        """The directory of a run's newest checkpoint."""
        return self.runs / name / "checkpoints" / "latest"

    def weights(self, name):
        """Model tensors of the newest checkpoint."""
        return load_file(self.latest(name) / "model.safetensors")

    def files(self, name):
        """The bytes of what must be bit-identical."""
        return [(self.latest(name) / file).read_bytes() for file in ("model.safetensors", "optimizer.safetensors")]

    def metrics(self, name):
        """The records of metrics.jsonl without those that measure time and memory."""
        measured = {"tokens_per_second", "mfu", "step_ms", "data_wait_ms", "memory_gb"}
        lines = (self.runs / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in measured} for line in lines]


def largest_difference(a, b):
    """Over all tensors of two state dictionaries with the same names."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A dataset of bytes with something to learn: our own sources, prepared through the front door."""
    out = tmp_path_factory.mktemp("tokens") / "tiny"
    sources = [str(ROOT / name) for name in ("train.py", "data.py", "model.py", "settings.py")]
    command = [sys.executable, "prepare_data.py", *sources, f"--out={out}", "--tokenizer=bytes", "--shard_tokens=20000"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(out.glob("train_*.bin"))) > 1  # so that runs cross a shard boundary
    return out


@pytest.fixture
def train(tokens, tmp_path):
    """A Trainer with its own folder of runs."""
    return Trainer(tokens, tmp_path / "runs")


@pytest.fixture(scope="session")
def shared(tokens, tmp_path_factory):
    """A Trainer whose runs the tests of a session share, and only read: `plain` is one process, undisturbed."""
    trainer = Trainer(tokens, tmp_path_factory.mktemp("shared") / "runs")
    trainer("plain")
    return trainer


@pytest.fixture
def rng():
    """numpy's generator with a fixed seed."""
    return np.random.default_rng(0)
