"""The drills of several hosts on one machine: python bench/drill.py nodes, python bench/drill.py slurm"""

import contextlib
import functools
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path
from common.errors import RunError
from hardware.host import cores

HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2"}  # host a holds the rendezvous
# Six micro-batches an update, which one rank can hold as well as two. An update takes some 50 ms. After 12 seconds without an
# answer a rank gives up.
NODES = machine.TINY | dict(n_embd=64, seq_len=128, tokens_per_update=1536, strategy="exact")
NODES |= dict(save_every=20, eval_every=0, timeout_minutes=0.2)
SLURM = machine.TINY | dict(n_embd=64, seq_len=32, tokens_per_update=768, strategy="ddp", save_every=50, eval_every=0)
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
RANKS = 2
CONFIGURATION = """\
ClusterName=lockstep
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
NodeName={host} CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def lacking(tools: tuple[str, ...], packages: str) -> str:
    """Why this machine cannot play several hosts, or nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "this drill needs Linux and root"
    missing = [tool for tool in tools if not shutil.which(tool)]
    return f"{', '.join(missing)} not found (Debian: {packages})" if missing else ""


def call(*command: str) -> str:
    """What a command prints. Raises RunError with its error output if it fails."""
    done = subprocess.run(command, cwd=machine.ROOT, env=machine.environment(), capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


def wait_for(what: str, condition: Callable[[], object], folder: Path, seconds: float = 400) -> None:
    """Wait until `condition` holds. Raises RunError, with the end of each *.out in `folder`, where that takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            texts = [path.read_text()[-2000:] for path in sorted(folder.glob("*.out"))]
            raise RunError("\n---\n".join([f"{what}: not within {seconds:.0f} s", *texts]))
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------------------------------
# Two hosts, each a network namespace, joined by a cable


@dataclass(frozen=True)
class NodesConfig(machine.Options):
    steps: int = 150


def nodes(config: NodesConfig) -> int:
    """Does a run survive what happens to its nodes? Two hosts on this machine, each a network namespace, joined by a cable.

    sudo python bench/drill.py nodes

    Trains one run on both hosts under torchrun with c10d rendezvous, again and again: undisturbed; with the cable pulled for
    seconds; pulled until both sides give up, and plugged in again; with a host that dies. The sha256 of the weights must always
    be that of the undisturbed run (--strategy=exact). Writes nodes.json. Needs Linux and root. About five minutes on two cores.
    """
    if missing := unavailable():
        print(f"skipped: {missing}")
        return 0
    machine.prepare_tokens(config.tokens)
    rows: list[dict] = []
    with machine.workspace() as runs, network():
        for name, (fewest, happen) in SCENARIOS.items():
            began = time.monotonic()
            with Cluster(runs / name.replace(" ", "-"), config) as cluster:
                cluster.start(fewest)
                if happen:
                    cluster.wait_for("a third of the steps", lambda: 3 * machine.last_step(cluster.directory) >= config.steps)
                    happen(cluster)
                cluster.wait_for("the end", lambda: all(process.poll() == 0 for process in cluster.running.values()))
            rows.append({"scenario": name, "seconds": time.monotonic() - began, **cluster.outcome()})
            print(rows[-1], flush=True)
    same = all(row["model.safetensors"] == rows[0]["model.safetensors"] for row in rows)
    print(f"{len(rows)} runs, " + ("one sha256" if same else "DIFFERENT sha256"))
    print(machine.write("nodes", {"flags": NODES, "steps": config.steps, "same": same, "runs": rows}, Path(config.out)))
    return int(not same)


@functools.cache
def unavailable() -> str:
    """Why this machine cannot play two hosts, or nothing. It lays the cable once, because no permission says it beforehand."""
    if missing := lacking(("ip", "unshare"), "iproute2, util-linux"):
        return missing
    try:
        with network():
            for host in HOSTS:
                call("ip", "netns", "exec", namespace(host), "unshare", "--uts", "true")
    except (RunError, OSError) as error:
        return f"this system makes no namespaces: {error}"
    return ""


def namespace(host: str) -> str:
    """The network namespace of a host. Each process has namespaces of its own."""
    return f"lockstep-{os.getpid()}-{host}"


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Two namespaces with names of their own for each other, and a cable between them."""
    names = "127.0.0.1 localhost\n" + "".join(f"{address} host-{host}\n" for host, address in HOSTS.items())
    try:
        for host in HOSTS:
            call("ip", "netns", "add", namespace(host))
            folder = Path("/etc/netns") / namespace(host)  # `ip netns exec` lays its files over those in /etc
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(names)
        ends = {host: ["name", f"cable-{host}", "netns", namespace(host)] for host in HOSTS}
        call("ip", "link", "add", *ends["a"], "type", "veth", "peer", *ends["b"])
        for host, address in HOSTS.items():
            call("ip", "-n", namespace(host), "addr", "add", f"{address}/24", "dev", f"cable-{host}")
            for device in ("lo", f"cable-{host}"):
                call("ip", "-n", namespace(host), "link", "set", device, "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", namespace(host)], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / namespace(host), ignore_errors=True)


def plug(connected: bool) -> None:
    """Plug the cable in or pull it."""
    call("ip", "-n", namespace("b"), "link", "set", "cable-b", "up" if connected else "down")


class Cluster(contextlib.ExitStack):
    """A run on both hosts: one torchrun on each, with one rank. The parent of `directory` is their common file system.

    At the end of the block the hosts are killed and the cable is plugged in.
    """

    def __init__(self, directory: Path, config: NodesConfig):
        super().__init__()
        self.directory = directory
        flags = NODES | dict(tokens=config.tokens, out_dir=directory.parent, name=directory.name, steps=config.steps)
        self.train = machine.arguments(**flags)
        self.running: dict[str, subprocess.Popen] = {}
        self.callback(plug, True)
        for host in HOSTS:
            self.callback(self.kill, host)

    def start(self, fewest: str = "2", restarts: int = 3) -> None:
        """Start torchrun on both hosts. fewest: how many hosts the run needs, such as 2, or 1:2 for at least one."""
        options = {"nnodes": fewest, "nproc_per_node": 1, "max-restarts": restarts, "rdzv-backend": "c10d"}
        options |= {"rdzv-endpoint": "host-a:29500", "rdzv-id": self.directory.name}
        options |= {"rdzv-conf": "last_call_timeout=3"}  # seconds to wait for more than the fewest nodes
        torchrun = ["-m", "torch.distributed.run", *(f"--{name}={value}" for name, value in options.items())]
        for host in HOSTS:
            named = ["unshare", "--uts", "sh", "-c", f'hostname host-{host}; exec "$@"', "-"]
            command = ["ip", "netns", "exec", namespace(host), *named, sys.executable, *torchrun, *self.train]
            with open(self.output(host), "ab") as output:
                one_thread = machine.environment(OMP_NUM_THREADS="1")
                self.running[host] = subprocess.Popen(command, cwd=machine.ROOT, env=one_thread, stdout=output, stderr=output)

    def kill(self, host: str) -> None:
        """Kill every process of a host, as if its power were cut."""
        for pid in call("ip", "netns", "pids", namespace(host)).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if host in self.running:
            self.running.pop(host).wait()

    def output(self, host: str) -> Path:
        """What torchrun and the rank on a host have printed."""
        return self.directory.with_suffix(f".{host}.out")

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds. Raises RunError where that takes too long, and where torchrun fails on a host."""
        wait_for(what, lambda: condition() or any(p.poll() for p in self.running.values()), self.directory.parent)
        if statuses := {host: process.poll() for host, process in self.running.items() if process.poll()}:
            raise RunError(f"{what}: torchrun ended with {statuses}: {self.output('a').read_text()[-3000:]}")

    def outcome(self) -> dict:
        """How often the run was started, on how many ranks, and what it has left."""
        lines = (self.directory / "train.log").read_text().splitlines()
        ranks = [int(line.split()[1]) for line in lines if line.startswith("  ranks ")]
        return {"ranks": ranks, "steps": machine.last_step(self.directory), **machine.digests(self.directory)}


def brief_cut(cluster: Cluster) -> None:
    """The cable is out for five seconds. TCP sends again what was lost, and the run waits."""
    plug(False)
    time.sleep(5)
    plug(True)


def long_cut(cluster: Cluster) -> None:
    """The cable is out until the rank on host a has given up, and ten seconds more. Both sides find each other again."""
    plug(False)
    cluster.wait_for("an error on host a", lambda: "no longer answer" in cluster.output("a").read_text())
    time.sleep(10)
    plug(True)


def leave(cluster: Cluster) -> None:
    """Host b dies for good. The run goes on with half of the ranks."""
    cluster.kill("b")


# How many hosts are needed, and what happens after a third of the steps.
SCENARIOS = {"undisturbed": ("2", None), "a cut of five seconds": ("2", brief_cut), "a long cut": ("2", long_cut)}
SCENARIOS |= {"a host leaves": ("1:2", leave)}

# ---------------------------------------------------------------------------------------------------------------------
# A SLURM cluster


@dataclass(frozen=True)
class SlurmConfig(machine.Options):
    steps: int = 1500


def slurm(config: SlurmConfig) -> int:
    """Does launch/slurm.sbatch put a run back into the queue, and does the run end with the right bits?

    sudo python bench/drill.py slurm

    Starts munged, slurmctld and slurmd for this machine alone, out of a temporary directory. Submits launch/slurm.sbatch and
    cancels the job, which must then stay cancelled. Submits it again, and after a third of the steps sends it SIGUSR1 through
    SLURM, as before a time limit. The job must come back and complete, with the sha256 of an undisturbed run. Writes
    slurm.json. Needs root and Debian's slurmctld, slurmd, slurm-client and munge. About five minutes on two cores.
    """
    if missing := lacking(TOOLS, "slurmctld, slurmd, slurm-client, munge"):
        print(f"skipped: {missing}")
        return 0
    machine.prepare_tokens(config.tokens)
    with machine.workspace() as folder, daemons(folder):
        flags, run = SLURM | dict(tokens=config.tokens, steps=config.steps, out_dir=folder), folder / "job"
        machine.run(RANKS, **flags, name="undisturbed")
        cancelled = submit(folder, flags)
        wait_for("step 1", lambda: machine.last_step(run), folder)
        call("scancel", cancelled)
        wait_for("the end of the cancelled job", lambda: job(cancelled)["JobState"] not in ("RUNNING", "COMPLETING"), folder)
        state = job(cancelled)["JobState"]  # SLURM forgets a job after some minutes
        requeued = submit(folder, flags)
        wait_for("a third of the steps", lambda: machine.last_step(run) > config.steps / 3, folder)
        call("scancel", "--signal=USR1", requeued)
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        wait_for("the end", lambda: job(requeued)["JobState"] in ends, folder, 1200)
        result = {"slurm": call("slurmctld", "-V").strip(), "flags": SLURM, "steps": config.steps, "cancelled": state}
        result |= {"state": job(requeued)["JobState"], "restarts": int(job(requeued)["Restarts"])}
        result |= {"stops": re.findall(r"stopped at step .*", (run / "train.log").read_text())}
        result |= {"undisturbed": machine.digests(folder / "undisturbed"), "requeued": machine.digests(run)}
    result["same"] = result["undisturbed"] == result["requeued"]
    print(*(f"{name}: {value}" for name, value in result.items()), machine.write("slurm", result, Path(config.out)), sep="\n")
    states = [result["cancelled"], result["state"]]
    return int(not result["same"] or states != ["CANCELLED", "COMPLETED"] or not result["restarts"])


@contextlib.contextmanager
def daemons(folder: Path) -> Iterator[None]:
    """A SLURM cluster of this machine, with all its files in `folder`."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    text = CONFIGURATION.format(host=platform.node().split(".")[0], folder=folder, cores=cores())
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
        wait_for("an idle node", lambda: call("sinfo", "--noheader", "--format=%T").strip() == "idle", folder)
        yield
    finally:
        subprocess.run(["scancel", "--user=root"], stderr=subprocess.DEVNULL)
        for daemon in reversed(running):
            daemon.terminate()
            daemon.wait()


def submit(folder: Path, flags: dict) -> str:
    """Submit the run. Returns the number of the job."""
    options = ["--parsable", "--time=60", "--signal=USR1@30", f"--output={folder}/job.out"]
    return call("sbatch", *options, *machine.arguments("launch/slurm.sbatch", **flags, name="job")).strip()


def job(number: str) -> dict[str, str]:
    """What SLURM says about a job."""
    return dict(field.split("=", 1) for field in call("scontrol", "show", "job", number).split() if "=" in field)
