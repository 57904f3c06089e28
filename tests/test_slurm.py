"""launch/slurm.sbatch, with scripts in place of SLURM's srun and scontrol: which jobs go back into the queue, how they end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import machine
from conftest import PATIENCE, ROOT, environment, wait_for

# One node. A requeue is noted and, as SLURM does, the script that asks for it is ended.
TOOLS = {
    "srun": 'shift; exec "$@"',
    "scontrol": """case $1 in
show) echo localhost ;;
requeue) echo "$2" >> "$REQUEUED"; kill -9 $PPID ;;
esac""",
}
REQUEUED = -signal.SIGKILL  # the status of a script that SLURM has ended
RANKS = 2


@pytest.fixture
def submit(train, tmp_path):
    """Starts launch/slurm.sbatch for a run in the background, in a new process group."""
    for name, script in TOOLS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    variables = dict(SLURM_NNODES="1", SLURM_JOB_ID=str(os.getpid()), SLURM_JOB_NODELIST="localhost", RANKS_PER_NODE=str(RANKS))
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = environment(**variables, PATH=path, REQUEUED=str(tmp_path / "requeued"), OMP_NUM_THREADS="1")

    def start(name, **flags):
        (tmp_path / "requeued").unlink(missing_ok=True)
        command = ["bash", *train.arguments(name, script="launch/slurm.sbatch", **flags)]
        return subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, stdout=subprocess.DEVNULL)

    start.requeued = lambda: (tmp_path / "requeued").exists()
    return start


def torchrun_of(job):
    """The process id of the torchrun that a job has started, to which SLURM sends its signals."""
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,pgid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    return next(int(pid) for pid, group, words in rows if int(group) == job.pid and "bin/torchrun" in words)


@pytest.mark.slow
def test_a_job_that_is_told_its_time_limit_goes_back_into_the_queue_and_ends_with_the_same_bits(train, submit):
    flags = dict(steps=300, tokens_per_update=64, micro_batch_size=2, save_every=0, eval_every=0)
    train("whole", RANKS, **flags)
    job = submit("job", **flags)
    wait_for(lambda: train.log("job"))
    torchrun = torchrun_of(job)  # listing the processes takes as long as many steps
    wait_for(lambda: "step      3/" in train.log("job"))
    os.kill(torchrun, signal.SIGUSR1)
    assert job.wait(timeout=PATIENCE) == REQUEUED and submit.requeued()
    assert "(SIGUSR1), saved; run the same command to continue" in train.log("job")
    assert machine.last_step(train.runs / "job") < 300
    assert submit("job", **flags).wait(timeout=PATIENCE) == 0 and not submit.requeued()
    assert train.log("job").count("continuing from") == 1
    train.assert_same("job", "whole")


def test_a_job_that_was_refused_is_not_queued_again(submit):
    assert submit("job", lr=-1).wait(timeout=PATIENCE) == 1 and not submit.requeued()
