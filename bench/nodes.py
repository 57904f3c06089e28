"""Does a run survive what happens to its nodes? Two hosts on this machine, each a network namespace, joined by a cable.

sudo python bench/nodes.py

Trains one run on both hosts under torchrun with c10d rendezvous, again and again: undisturbed; with the cable pulled for
seconds; pulled until both sides give up, and plugged in again; with a host that dies. The sha256 of the weights must always be
that of the undisturbed run (--strategy=exact). Needs Linux and root. About five minutes on two cores.
"""

import contextlib
import os
import shutil
import signal
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

HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2"}  # host a holds the rendezvous
# Six micro-batches an update, which one rank can hold as well as two. An update takes some 50 ms.
FLAGS = machine.TINY | dict(
    n_embd=64,
    seq_len=128,
    tokens_per_update=1536,
    strategy="exact",
    save_every=20,
    eval_every=0,
    timeout_minutes=0.2,  # after 12 seconds without an answer a rank gives up
)


@dataclass(frozen=True)
class NodesConfig:
    only: str = ""
    """Only the scenarios whose name contains this, and the undisturbed run."""
    steps: int = 150
    tokens: str = "tokens/python"
    """Dataset; the embedded corpus is prepared if it is not there."""
    out: str = str(machine.RESULTS)
    """Directory for nodes.json."""


def main(config: NodesConfig) -> int:
    """Run all scenarios; print, write. Returns 1 if a run did not end with the bits of the undisturbed one."""
    if missing := unavailable():
        print(f"skipped: {missing}")
        return 0
    machine.prepare_tokens(config.tokens)
    scenarios = {name: play for name, play in SCENARIOS.items() if name == "undisturbed" or config.only in name}
    rows: list[dict] = []
    with machine.workspace() as runs, network():
        for name, play in scenarios.items():
            cluster = Cluster(runs / name.replace(" ", "-"), config)
            began = time.monotonic()
            try:
                play(cluster)
                seconds = time.monotonic() - began
            finally:
                cluster.end()
            rows.append({"scenario": name, "seconds": seconds, **cluster.outcome()})
            print(line(rows[-1], rows[0]), flush=True)
    same = all(row["model.safetensors"] == rows[0]["model.safetensors"] for row in rows)
    print(f"{len(rows)} runs, " + ("one sha256" if same else "DIFFERENT sha256"))
    if not config.only:
        print(machine.write("nodes", {"flags": FLAGS, "steps": config.steps, "same": same, "runs": rows}, Path(config.out)))
    return int(not same)


def unavailable() -> str:
    """Why this machine cannot play two hosts, or nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if missing := [tool for tool in ("ip", "unshare") if not shutil.which(tool)]:
        return f"{' and '.join(missing)} not found (Debian: iproute2, util-linux)"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"this system makes no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


# ---------------------------------------------------------------------------------------------------------------------
# Two hosts


def ip(*arguments: str) -> None:
    """Run `ip`. Raises CalledProcessError with its message if it fails."""
    subprocess.run(["ip", *arguments], check=True, stderr=subprocess.PIPE)


def namespace(host: str) -> str:
    """The network namespace of a host."""
    return f"lockstep-{host}"


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Two namespaces with names of their own for each other, and a cable between them."""
    names = "127.0.0.1 localhost\n" + "".join(f"{address} host-{host}\n" for host, address in HOSTS.items())
    try:
        for host in HOSTS:
            ip("netns", "add", namespace(host))
            folder = Path("/etc/netns") / namespace(host)  # `ip netns exec` lays its files over those in /etc
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(names)
        ends = {host: ["name", f"cable-{host}", "netns", namespace(host)] for host in HOSTS}
        ip("link", "add", *ends["a"], "type", "veth", "peer", *ends["b"])
        for host, address in HOSTS.items():
            ip("-n", namespace(host), "addr", "add", f"{address}/24", "dev", f"cable-{host}")
            for device in ("lo", f"cable-{host}"):
                ip("-n", namespace(host), "link", "set", device, "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", namespace(host)], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / namespace(host), ignore_errors=True)


def plug(connected: bool) -> None:
    """Plug the cable in or pull it."""
    ip("-n", namespace("b"), "link", "set", "cable-b", "up" if connected else "down")


class Cluster:
    """A run on both hosts: one torchrun on each, with one rank. `runs` is their common file system."""

    def __init__(self, directory: Path, config: NodesConfig):
        self.directory, self.steps = directory, config.steps
        flags = FLAGS | dict(tokens=config.tokens, out_dir=directory.parent, name=directory.name, steps=config.steps)
        self.train = machine.arguments(**flags)
        self.running: dict[str, subprocess.Popen] = {}

    def start(self, host: str, nodes: str, restarts: int = 3) -> None:
        """Start torchrun on a host. nodes: how many hosts the run needs, such as 2, or 1:2 for at least one."""
        options = {
            "nnodes": nodes,
            "nproc_per_node": 1,
            "max-restarts": restarts,
            "rdzv-backend": "c10d",
            "rdzv-endpoint": "host-a:29500",
            "rdzv-id": self.directory.name,
            "rdzv-conf": "last_call_timeout=3",  # seconds to wait for more than the fewest nodes
        }
        torchrun = ["-m", "torch.distributed.run", *(f"--{name}={value}" for name, value in options.items())]
        named = ["unshare", "--uts", "sh", "-c", f'hostname host-{host}; exec "$@"', "-"]
        with open(self.directory.with_suffix(f".{host}"), "ab") as output:
            self.running[host] = subprocess.Popen(
                ["ip", "netns", "exec", namespace(host), *named, sys.executable, *torchrun, *self.train],
                cwd=machine.ROOT,
                env=machine.environment(OMP_NUM_THREADS="1"),
                stdout=output,
                stderr=output,
            )

    def start_both(self, nodes: str = "2") -> None:
        """Start torchrun on both hosts."""
        for host in HOSTS:
            self.start(host, nodes)

    def kill(self, host: str) -> None:
        """Kill every process of a host, as if its power were cut."""
        listed = subprocess.run(["ip", "netns", "pids", namespace(host)], capture_output=True, text=True, check=True).stdout
        for pid in listed.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if host in self.running:
            self.running.pop(host).wait()

    def end(self) -> None:
        """Kill both hosts and plug the cable in."""
        for host in HOSTS:
            self.kill(host)
        plug(True)

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float = 400) -> None:
        """Wait until `condition` holds. Raises RunError with the last output of both hosts where that takes too long."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                texts = [self.output(host)[-3000:] for host in HOSTS]
                raise RunError(f"{self.directory.name}: {what}: not within {seconds:.0f} s\n" + "\n---\n".join(texts))
            time.sleep(0.05)

    def step(self) -> int:
        """The last step in the metrics (0: none yet)."""
        path = self.directory / "metrics.jsonl"
        return max((record["step"] for record in machine.metrics(self.directory)), default=0) if path.exists() else 0

    def reach(self, share: float) -> None:
        """Wait until that share of the steps is done."""
        self.wait_for(f"{share:.0%} of the steps", lambda: self.step() >= share * self.steps)

    def output(self, host: str) -> str:
        """What torchrun and the rank on a host have printed."""
        return self.directory.with_suffix(f".{host}").read_text()

    def ended(self, host: str) -> bool:
        """Whether torchrun has ended on a host."""
        return self.running[host].poll() is not None

    def complete(self) -> None:
        """Wait for torchrun's end on all hosts that run it. Raises RunError unless each ends with 0."""
        self.wait_for("the end", lambda: all(self.ended(host) for host in self.running))
        if statuses := {host: process.returncode for host, process in self.running.items() if process.returncode}:
            raise RunError(f"{self.directory.name}: torchrun ended with {statuses}")

    def worlds(self) -> list[int]:
        """The number of ranks of each start of the run, in order."""
        lines = (self.directory / "train.log").read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("  ranks ")]

    def outcome(self) -> dict:
        """How often the run was started, on how many ranks, and what it has left."""
        return {"ranks": self.worlds(), "steps": self.step(), **machine.digests(self.directory)}


# ---------------------------------------------------------------------------------------------------------------------
# What happens to them


def undisturbed(cluster: Cluster) -> None:
    """Nothing."""
    cluster.start_both()
    cluster.complete()


def brief_cut(cluster: Cluster) -> None:
    """The cable is out for five seconds. TCP sends again what was lost, and the run waits."""
    cluster.start_both()
    cluster.reach(1 / 3)
    plug(False)
    time.sleep(5)
    plug(True)
    cluster.complete()


def long_cut(cluster: Cluster) -> None:
    """The cable is out until the rank on host a has given up, and ten seconds more. Both sides find each other again."""
    cluster.start_both()
    cluster.reach(1 / 3)
    plug(False)
    cluster.wait_for("an error on host a", lambda: "no longer answer" in cluster.output("a"))
    time.sleep(10)
    plug(True)
    cluster.complete()


def leave(cluster: Cluster) -> None:
    """Host b dies for good. The run goes on with half of the ranks."""
    cluster.start_both("1:2")
    cluster.reach(1 / 3)
    cluster.kill("b")
    cluster.complete()


SCENARIOS = {
    "undisturbed": undisturbed,
    "a cut of five seconds": brief_cut,
    "a long cut": long_cut,
    "a host leaves": leave,
}


def line(row: dict, first: dict) -> str:
    """A row of the table."""
    digest = row["model.safetensors"]
    verdict = "the same" if digest == first["model.safetensors"] else "DIFFERENT"
    ranks = ", ".join(map(str, row["ranks"]))
    return f"{row['scenario']:<26} {row['seconds']:6.1f} s  ranks of each start: {ranks:<8} sha256 {digest[:16]}  {verdict}"


if __name__ == "__main__":
    with errors.user_errors():
        raise SystemExit(main(cli.parse(NodesConfig, sys.argv[1:], __doc__)))
