"""A run on two hosts, network namespaces with a cable between them, that is pulled: both sides end in time and say why."""

import subprocess
import sys
import time

import pytest

import hosts
import machine
from conftest import TINY, environment
from test_train import wait_for

pytestmark = pytest.mark.skipif(bool(hosts.unavailable()), reason=hosts.unavailable())
SECONDS = 6  # --timeout_minutes
ENDS = 45  # seconds until both sides have ended, with all that they try first
CUT_OFF = "rank 1 no longer hears from the others: "


@pytest.fixture(scope="module", autouse=True)
def network():
    with hosts.network():
        yield


@pytest.fixture(autouse=True)
def cable(network):
    """Plugged in at the beginning and at the end."""
    hosts.plug(True)
    yield
    hosts.plug(True)


def test_both_sides_of_a_cut_end_in_time_and_say_what_is_missing(train, tokens, tmp_path):
    flags = TINY | dict(tokens=tokens, out_dir=train.runs, name="cut", steps=10**6, save_every=0, eval_every=0)
    command = [sys.executable, *machine.arguments(**flags, timeout_minutes=SECONDS / 60)]
    processes, outputs = [], [tmp_path / host for host in hosts.HOSTS]
    for rank, (host, output) in enumerate(zip(hosts.HOSTS, outputs, strict=True)):
        world = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29500}
        world |= {"MASTER_ADDR": hosts.HOSTS["a"], "GLOO_SOCKET_IFNAME": f"cable-{host}"}
        with output.open("w") as stream:
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", hosts.namespace(host), *command],
                    cwd=machine.ROOT,
                    env=environment(**{name: str(value) for name, value in world.items()}),
                    stdout=stream,
                    stderr=stream,
                )
            )
    wait_for(lambda: "step      9/" in outputs[0].read_text())
    hosts.plug(False)
    deadline = time.monotonic() + ENDS
    assert [process.wait(timeout=deadline - time.monotonic()) for process in processes] == [1, 1]
    texts = [path.read_text() for path in outputs]
    assert "error: rank 1 no longer answers: " in texts[0] and "Traceback" not in texts[0]
    assert CUT_OFF in texts[1] and f"the store of the ranks at {hosts.HOSTS['a']}:29500 cannot be reached" in texts[1]
    assert "Traceback" not in texts[1]


def test_the_ranks_of_both_torchruns_end_after_a_cut(tokens, tmp_path):
    errors = {"a": "rank 1 no longer answers: ", "b": CUT_OFF}
    with hosts.Cluster(tmp_path / "run", hosts.NodesConfig(steps=10**6, tokens=str(tokens))) as cluster:
        cluster.start(restarts=0)
        wait_for(lambda: machine.last_step(cluster.directory) > 3)
        hosts.plug(False)
        wait_for(lambda: all(text in cluster.output(host).read_text() for host, text in errors.items()), ENDS)
        # On host b torchrun itself waits until the kernel gives the connection up.
        wait_for(lambda: cluster.running["a"].poll() is not None, ENDS)
