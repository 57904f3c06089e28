"""Does launch/slurm.sbatch put a run back into the queue, and does the run end with the right bits?

sudo python bench/slurm.py

Starts munged, slurmctld and slurmd for this machine alone, out of a temporary directory. Submits launch/slurm.sbatch and
cancels the job, which must then stay cancelled. Submits it again with a time limit that ends before the run does. The job must
come back and complete, with the sha256 of an undisturbed run. Needs root and Debian's slurmctld, slurmd, slurm-client and
munge. About five minutes on two cores.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
from common import cli, errors
from common.errors import RunError
from hardware import host

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
RANKS = 2
FLAGS = machine.TINY | dict(
    n_embd=64,
    seq_len=32,
    tokens_per_update=768,
    strategy="ddp",
    save_every=50,
    eval_every=0,
)
CONFIGURATION = """\
ClusterName=lockstep
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
NodeName={host} CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class SlurmConfig:
    steps: int = 4000
    """Updates of the run. They must take longer than the time limit."""
    minutes: int = 2
    """Time limit of the job. SLURM sends SIGUSR1 at most a minute before its last 30 seconds. 0: no limit; the drill sends the
    signal through SLURM after a third of the steps, which a busy machine's slow start does not disturb."""
    tokens: str = "tokens/python"
    """Dataset; the embedded corpus is prepared if it is not there."""
    out: str = str(machine.RESULTS)
    """Directory for slurm.json."""


def main(config: SlurmConfig) -> int:
    """Play it all; print, write. Returns 1 if the job was not queued again or ended with other bits."""
    if missing := unavailable():
        print(f"skipped: {missing}")
        return 0
    machine.prepare_tokens(config.tokens)
    with machine.workspace() as folder, daemons(folder):
        flags = FLAGS | dict(tokens=config.tokens, steps=config.steps, out_dir=folder)
        machine.run(RANKS, **flags, name="undisturbed")
        cancelled = submit(config, folder, flags)
        wait_for("step 1", lambda: (folder / "job" / "metrics.jsonl").exists() and machine.metrics(folder / "job"))
        call("scancel", cancelled)
        wait_for("the end of the cancelled job", lambda: job(cancelled)["JobState"] not in ("RUNNING", "COMPLETING"))
        state = job(cancelled)["JobState"]  # SLURM forgets a job after some minutes
        job_id = submit(config, folder, flags)
        if not config.minutes:
            wait_for("a third of the steps", lambda: machine.metrics(folder / "job")[-1]["step"] > config.steps / 3)
            call("scancel", "--signal=USR1", job_id)
        wait_for("the end", lambda: job(job_id)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), 1200)
        end, log = job(job_id), (folder / "job" / "train.log").read_text()
        result = {
            "slurm": call("slurmctld", "-V").strip(),
            "flags": FLAGS,
            "steps": config.steps,
            "cancelled": state,
            "state": end["JobState"],
            "restarts": int(end["Restarts"]),
            "stops": re.findall(r"stopped at step .*", log),
            "undisturbed": machine.digests(folder / "undisturbed"),
            "requeued": machine.digests(folder / "job"),
        }
    same = result["undisturbed"] == result["requeued"]
    print(f"{result['slurm']}; the first job: {result['cancelled']}")
    print(f"the second job: {end['JobState']}, restarted {end['Restarts']} times")
    print("\n".join(result["stops"]))
    for name in ("undisturbed", "requeued"):
        print(f"{name:<12} model.safetensors {result[name]['model.safetensors']}")
    print(machine.write("slurm", {"same": same, **result}, Path(config.out)))
    states = (result["cancelled"], result["state"], result["restarts"] > 0)
    return int(not same or states != ("CANCELLED", "COMPLETED", True))


def unavailable() -> str:
    """Why this machine cannot play a cluster, or nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "SLURM's daemons need Linux and root"
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    return f"{', '.join(missing)} not found (Debian: slurmctld, slurmd, slurm-client, munge)" if missing else ""


def call(*command: str) -> str:
    """What a command prints. Raises RunError with its error output if it fails."""
    done = subprocess.run(command, cwd=machine.ROOT, env=machine.environment(), capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


@contextlib.contextmanager
def daemons(folder: Path) -> Iterator[None]:
    """A SLURM cluster of this machine, with all its files in `folder`."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    text = CONFIGURATION.format(host=platform.node().split(".")[0], folder=folder, cores=host.cores())
    (folder / "slurm.conf").write_text(text)
    os.environ |= {"SLURM_CONF": str(folder / "slurm.conf"), "RANKS_PER_NODE": str(RANKS)}
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where torchrun is
    munge = {"key": "key-file", "socket": "socket", "pid": "pid-file", "seed": "seed-file", "log": "log-file"}
    munge = [f"--{option}={folder}/munge.{name}" for name, option in munge.items()]
    running = []
    try:
        for command in (["munged", "--foreground", "--force", *munge], ["slurmctld", "-D"], ["slurmd", "-D"]):
            with open(folder / f"{command[0]}.out", "w") as output:
                running.append(subprocess.Popen(command, stdout=output, stderr=output))
            time.sleep(1)
        wait_for("an idle node", lambda: call("sinfo", "--noheader", "--format=%T").strip() == "idle")
        yield
    except RunError as error:
        texts = [path.read_text()[-2000:] for path in sorted(folder.glob("*.out"))]
        raise RunError("\n---\n".join([str(error), *texts])) from None
    finally:
        subprocess.run(["scancel", "--user=root"], stderr=subprocess.DEVNULL)
        for daemon in reversed(running):
            daemon.terminate()
            daemon.wait()


def wait_for(what: str, condition: Callable[[], object], seconds: float = 300) -> None:
    """Wait until `condition` holds. Raises RunError where that takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RunError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.5)


def submit(config: SlurmConfig, folder: Path, flags: dict) -> str:
    """Submit the run. Returns the number of the job."""
    options = ["--parsable", f"--time={config.minutes or 60}", "--signal=USR1@30", f"--output={folder}/job.out"]
    return call("sbatch", *options, *machine.arguments("launch/slurm.sbatch", **flags, name="job")).strip()


def job(number: str) -> dict[str, str]:
    """What SLURM says about a job."""
    return dict(field.split("=", 1) for field in call("scontrol", "show", "job", number).split() if "=" in field)


if __name__ == "__main__":
    with errors.user_errors():
        raise SystemExit(main(cli.parse(SlurmConfig, sys.argv[1:], __doc__)))
