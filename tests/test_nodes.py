"""Runs on two hosts, network namespaces with a cable between them, that is pulled, or one host dies. Needs Linux and root."""

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import machine
from conftest import PATIENCE, ROOT, TINY, environment, wait_for

HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2"}  # host a holds the rendezvous
# Six micro-batches an update, which one rank can hold as well as two.
EXACT = dict(
    n_embd=64, seq_len=128, tokens_per_update=1536, micro_batch_size=2, strategy="exact", steps=60, save_every=10, eval_every=0
)
EXACT |= dict(timeout_minutes=0.2)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def namespace(host):
    """The network namespace of a host. Each process has its own namespaces."""
    return f"lockstep-{os.getpid()}-{host}"


def plug(host, connected):
    """Plug the cable of a host in or pull it."""
    ip("-n", namespace(host), "link", "set", f"cable-{host}", "up" if connected else "down")


def on(host):
    """The beginning of a command on a host, which has its own name."""
    return ["ip", "netns", "exec", namespace(host), "unshare", "--uts", "sh", "-c", f'hostname host-{host}; exec "$@"', "-"]


@contextlib.contextmanager
def two_hosts():
    """Two namespaces with a cable between them. As on Debian, a host's own name is that of its loopback device.

    As in many clusters, each host also has another interface, which has the default route and leads to no other host. Its
    address is the lower one: of two ranks, gloo lets the one with the higher address connect to the other.
    """
    with contextlib.ExitStack() as cleanup:
        for host in HOSTS:
            ip("netns", "add", namespace(host))
            cleanup.callback(ip, "netns", "delete", namespace(host))
            folder = Path("/etc/netns") / namespace(host)  # `ip netns exec` lays its files over those in /etc
            folder.mkdir(parents=True, exist_ok=True)
            cleanup.callback(shutil.rmtree, folder)
            others = [f"{address} host-{name}" for name, address in HOSTS.items() if name != host]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 host-{host}", *others, ""]))
            (folder / "resolv.conf").write_text("")  # nobody answers for the names of addresses
        ends = {host: ["name", f"cable-{host}", "netns", namespace(host)] for host in HOSTS}
        ip("link", "add", *ends["a"], "type", "veth", "peer", *ends["b"])
        for host, address in HOSTS.items():
            ip("-n", namespace(host), "addr", "add", f"{address}/24", "dev", f"cable-{host}")
            ip("-n", namespace(host), "link", "set", "lo", "up")
            plug(host, True)
            ip("-n", namespace(host), "link", "add", "public", "type", "veth", "peer", "name", "modem")
            ip("-n", namespace(host), "addr", "add", f"10.1.0.{ord(host)}/32", "dev", "public")
            for end in ("public", "modem"):
                ip("-n", namespace(host), "link", "set", end, "up")
            ip("-n", namespace(host), "route", "add", "default", "dev", "public")
        yield


@functools.cache
def unavailable():
    """Why this machine cannot play two hosts, or nothing. It lays the cable once, because no permission says it beforehand."""
    try:
        with two_hosts():
            for host in HOSTS:
                subprocess.run([*on(host), "true"], check=True, capture_output=True)
    except (subprocess.CalledProcessError, OSError) as error:
        return f"this system makes no namespaces: {error}"
    return ""


pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


@pytest.fixture(autouse=True)
def network():
    with two_hosts():
        yield


def start_on(host, command, output, **variables):
    """Start a command on a host. What it prints goes to the file `output`."""
    with output.open("w") as stream:
        return subprocess.Popen([*on(host), *command], cwd=ROOT, env=environment(**variables), stdout=stream, stderr=stream)


def torchruns(train, name, nodes="2", restarts=3, before=(), **flags):
    """Start torchrun with one rank on both hosts. nodes: how many the run needs, such as 2, or 1:2 for at least one.

    before: the beginning of the command. Returns the processes and the files with their output, by host.
    """
    options = {"nnodes": nodes, "nproc_per_node": 1, "max-restarts": restarts, "rdzv-backend": "c10d"}
    options |= {"rdzv-endpoint": "host-a:29500", "rdzv-id": name}
    options |= {"rdzv-conf": "last_call_timeout=3"}  # seconds to wait for more than the fewest nodes
    torchrun = [sys.executable, "-m", *machine.arguments("torch.distributed.run", **options)]
    outputs = {host: train.runs.parent / f"{host}.out" for host in HOSTS}
    command = [*before, *torchrun, *train.arguments(name, **EXACT | flags)]
    return {host: start_on(host, command, output) for host, output in outputs.items()}, outputs


def two_ranks(train, tokens, folder, **variables):
    """Start a long run with one rank on each host, without torchrun. Returns the processes and the files with their output."""
    flags = TINY | dict(tokens=tokens, out_dir=train.runs, name="cut", steps=10**6, save_every=0, eval_every=0)
    command = [sys.executable, *machine.arguments(**flags, timeout_minutes=0.2)]
    processes, outputs = [], [folder / host for host in HOSTS]
    for rank, (host, output) in enumerate(zip(HOSTS, outputs, strict=True)):
        world = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "host-a", "MASTER_PORT": 29500} | variables
        processes.append(start_on(host, command, output, **{name: str(value) for name, value in world.items()}))
    return processes, outputs


def test_ranks_that_cannot_reach_each_other_name_the_interface_that_is_set(train, tokens, tmp_path):
    processes, outputs = two_ranks(train, tokens, tmp_path, GLOO_SOCKET_IFNAME="public")
    assert [process.wait(timeout=PATIENCE) for process in processes] == [1, 1]
    for output in outputs:
        said = output.read_text()
        assert "if rank 0 is up, set GLOO_SOCKET_IFNAME (here public) to the interface" in said and "Traceback" not in said


def test_both_sides_of_a_cut_end_in_time_and_say_what_to_do(train, tokens, tmp_path):
    processes, outputs = two_ranks(train, tokens, tmp_path)
    wait_for(lambda: "step      9/" in outputs[0].read_text())
    plug("b", False)
    assert [process.wait(timeout=PATIENCE) for process in processes] == [1, 1]
    for rank, output in enumerate(outputs):
        assert output.read_text().count(f"error: rank {rank} lost the other ranks: ") == 1
        assert "; run the same command again on all nodes" in output.read_text() and "Traceback" not in output.read_text()


def cut_until_both_sides_give_up(processes, outputs):
    """Both sides find each other again."""
    plug("b", False)
    wait_for(lambda: all("lost the other ranks" in output.read_text() for output in outputs.values()))
    time.sleep(5)
    plug("b", True)


def lose_a_host(processes, outputs):
    """The run continues with half of the ranks."""
    machine.kill(processes.pop("b"))


@pytest.fixture(scope="module")
def whole(shared):
    """The run on one host, which nothing disturbs."""
    shared("on one host", **EXACT)
    return shared


@pytest.mark.slow
@pytest.mark.parametrize(
    "happens, nodes, ranks",
    [(cut_until_both_sides_give_up, "2", [2, 2]), (lose_a_host, "1:2", [2, 1])],
)
def test_a_run_goes_on_and_ends_with_the_same_bits(train, whole, happens, nodes, ranks):
    processes, outputs = torchruns(train, "nodes", nodes)
    wait_for(lambda: machine.last_step(train.runs / "nodes") >= EXACT["steps"] / 3)
    happens(processes, outputs)
    for host, process in processes.items():
        assert process.wait(timeout=2 * PATIENCE) == 0, outputs[host].read_text()
    assert [int(number) for number in re.findall(r"^  ranks +(\d+)", train.log("nodes"), re.M)] == ranks
    train.assert_same("nodes", "on one host", of=whole)


@pytest.mark.slow
def test_a_host_that_returns_joins_a_run_whose_hosts_repeat_the_command(train, whole):
    repeat = ["sh", "-c", 'until "$@"; do sleep 2; done', "-"]
    processes, outputs = torchruns(train, "nodes", restarts=0, before=repeat)
    wait_for(lambda: machine.last_step(train.runs / "nodes") >= EXACT["steps"] / 3)
    machine.kill(processes["b"])
    wait_for(lambda: "lost the other ranks" in outputs["a"].read_text())
    processes["b"] = start_on("b", processes["b"].args[len(on("b")) :], outputs["b"])
    for host, process in processes.items():
        assert process.wait(timeout=2 * PATIENCE) == 0, outputs[host].read_text()
    assert [int(number) for number in re.findall(r"^  ranks +(\d+)", train.log("nodes"), re.M)] == [2, 2]
    train.assert_same("nodes", "on one host", of=whole)
