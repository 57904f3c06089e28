"""Runs whose checkpoints are also in a store, which may fail: an S3 server on loopback, or another disk."""

import contextlib
import json
import random
import shutil
import time
from pathlib import Path

import fsspec
import pytest
import torch

import machine
from conftest import Trainer, content, damage
from extras import mirror
from extras.mirror import MANIFEST, Mirror
from lockstep.checkpoints import retention
from lockstep.common.errors import RunError
from lockstep.parallel.world import World
from lockstep.reports.log import Log
from power_cut import Miniature
from test_remote import s3  # noqa: F401 (a fixture)

RUN = dict(schedule="constant", save_every=3, keep_last=2, keep_best=0, eval_every=0)


def stored(url):
    """The checkpoints in a store that have a manifest."""
    system, root = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    return sorted(Path(path).parent.name for path in system.glob(f"{root}/*/{MANIFEST}"))


def test_a_run_whose_disk_is_lost_continues_from_its_mirror_with_the_same_bits(train, s3):  # noqa: F811
    train("whole", 3, steps=10, **RUN)
    url = "s3://bucket/runs/spot"
    spot = dict(RUN, mirror=url)
    train("spot", 3, steps=5, **spot)
    assert stored(url) == ["step-00000003", "step-00000005"]
    shutil.rmtree(train.runs / "spot")
    done = train("spot", 3, steps=10, **spot)
    assert f"downloading step-00000005 from {url}" in done.stdout and "continuing from" in done.stdout
    assert train.files("spot") == train.files("whole")
    assert train.metrics("spot", "loss") == train.metrics("whole", "loss")
    assert stored(url) == ["step-00000009", "step-00000010"]


def test_a_store_of_another_run_is_refused(train, tmp_path):
    train("first", steps=2, mirror=tmp_path / "store")
    done = train("second", steps=2, mirror=tmp_path / "store", status=1)
    assert "has checkpoints of the run first, not of second; give each run its own URL" in done.stderr


def test_two_runs_of_one_name_do_not_share_a_store(train, tmp_path):
    (tmp_path / "other").mkdir()
    store, other = tmp_path / "store", Trainer(train.tokens, tmp_path / "other" / "runs")
    train("laptop", steps=2, save_every=1, mirror=store)
    stored = content(store)
    other("laptop", steps=3)
    refused = other("laptop", steps=4, mirror=store, status=1).stderr
    assert f"--mirror={store} has checkpoints of another run that is also called laptop; give each" in refused
    assert content(store) == stored
    train("laptop", steps=4, mirror=store)  # its own, and from an empty disk, too
    shutil.rmtree(train.runs / "laptop")
    assert "downloading step-00000004" in train("laptop", steps=5, mirror=store).stdout


@pytest.mark.parametrize(
    "url, said",
    [
        ("nowhere://x", "--mirror=nowhere://x: Protocol not known: nowhere"),
        ("s3://me:secret@host/run", "--mirror contains a password"),
    ],
)
def test_a_url_that_cannot_be_a_store_is_refused(train, url, said):
    done = train("x", steps=1, mirror=url, status=2)
    assert said in done.stderr and "secret" not in done.stderr and not (train.runs / "x").exists()


def test_a_store_that_does_not_answer_ends_a_start_and_never_a_run(train, tmp_path):
    (tmp_path / "store").write_text("a file where a directory should be")
    done = train("blocked", steps=3, mirror=tmp_path / "store" / "run", status=1)
    assert "cannot be reached" in done.stderr


class Flaky:
    """A file system that fails at a rate of its calls, cuts contents short, or ends the process: what stores and kills do."""

    def __init__(self, system, chance, rate):
        self.system, self.chance, self.rate = system, chance, rate

    def __getattr__(self, name):
        work = getattr(self.system, name)
        if name in ("put_file", "get_file", "pipe_file", "cat_file", "rm", "rm_file", "ls", "info"):
            return lambda *args, **more: self.call(name, work, *args, **more)
        return work

    def call(self, name, work, *args, **more):
        if self.chance.random() < self.rate:
            kind = self.chance.choice(["error", "short", "kill"])
            if kind == "short" and name == "get_file":
                work(*args, **more)
                Path(args[1]).write_bytes(Path(args[1]).read_bytes()[:-1])
                return None
            if kind == "short" and name == "put_file":
                self.system.pipe_file(args[1], Path(args[0]).read_bytes()[:-1])
                return None
            raise KeyboardInterrupt if kind == "kill" else OSError("500 Internal Server Error")
        return work(*args, **more)


def test_nothing_announced_is_lost_whatever_instant_a_copy_ends_at(tmp_path, monkeypatch):
    """100 times: a copy is cut at a random instant, the disk is lost or not, and the run continues from what is left."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    chance, url, disk = random.Random(7), f"file://{tmp_path / 'store'}", tmp_path / "run"
    announced = lost = cut = 0
    for _ in range(100):
        log = Log(disk, True)
        mirror = Mirror(url, log)
        plain, mirror.system = mirror.system, Flaky(mirror.system, chance, 0.05)
        here, _ = retention.newest(disk / "checkpoints")
        with contextlib.suppress(KeyboardInterrupt, RunError):  # the start is repeated
            mirror.fetch(retention.step_of(here) if here else -1)
        here, _ = retention.newest(disk / "checkpoints")
        mirror.system = plain
        if here is None:  # as a start that is repeated until the store answers
            mirror.fetch(-1)
        run = Miniature(disk / "checkpoints", name="run")
        assert run.state.step >= announced
        log.rewind(run.state.step)  # cuts what was logged after it
        assert [record["step"] for record in machine.metrics(disk)] == list(range(1, run.state.step + 1))
        with open(disk / "metrics.jsonl", "a") as file:
            print(json.dumps({"step": run.state.step + 1}), file=file)
        run.save(run.state.step + 1)
        mirror.system = Flaky(plain, chance, 0.03)
        try:
            mirror.copy(sorted(run.checkpoints.intact), 2, [])
            announced = run.state.step
            assert len(list((tmp_path / "store").iterdir())) <= 2
        except (KeyboardInterrupt, OSError):
            cut += 1
        log.close(0)
        if chance.random() < 0.5:
            shutil.rmtree(disk)
            lost += 1
    assert announced > 20 and lost > 30 and cut > 20


def test_a_damaged_checkpoint_of_the_store_is_passed_over(train, tmp_path):
    store = tmp_path / "store"
    train("spot", steps=6, **RUN, mirror=store)
    damage(store / "step-00000006" / "model.safetensors")
    shutil.rmtree(train.runs / "spot")
    done = train("spot", steps=6, **RUN, mirror=store)
    assert "skipped" in done.stdout and "model.safetensors does not match its sha256" in done.stdout
    assert machine.last_step(train.runs / "spot") == 6
    weights = [(folder / "model.safetensors").read_bytes() for folder in (store / "step-00000006", train.latest("spot"))]
    assert weights[0] == weights[1]  # replaced in the store

    for step in (3, 6):
        damage(store / f"step-0000000{step}" / "model.safetensors")
    shutil.rmtree(train.runs / "spot")
    refused = train("spot", steps=6, **RUN, mirror=store, status=1).stderr
    assert "has no intact checkpoint; to start over, use another URL" in refused


SLOW = """
import time
from extras.mirror import Mirror
def copy(self, *args, tries=[]):
    tries.append(1)
    if len(tries) < 3:
        raise OSError("the store says 500")
    original(self, *args)
original, Mirror.copy = Mirror.copy, copy
"""


def test_a_store_that_fails_for_a_while_is_reported_once_and_catches_up(train, tmp_path):
    train("plain", steps=6, **RUN)
    done = train.changed(SLOW, "spot", steps=6, **RUN, mirror=tmp_path / "store")
    assert done.stdout.count("retrying while training continues: the store says 500") == 1
    assert "has caught up" in done.stdout and stored(str(tmp_path / "store")) == ["step-00000003", "step-00000006"]
    assert train.files("spot") == train.files("plain")


def test_a_run_never_removes_what_another_run_stored(train, tmp_path):
    store = tmp_path / "store"
    train("ahead", steps=8, **RUN)
    train("first", steps=5, **RUN, mirror=store)
    done = train("ahead", steps=10, **RUN, mirror=store, status=1)  # it has newer checkpoints here than the store has
    assert "has checkpoints of the run first, not of ahead" in done.stderr
    assert stored(str(store)) == ["step-00000003", "step-00000005"]


LATE = """
import time
from extras.mirror import Mirror
original, Mirror.put = Mirror.put, lambda self, *args: (time.sleep(2), original(self, *args))
"""


def test_the_same_command_again_copies_what_the_store_lacks(train, tmp_path):
    train("late", steps=6, **RUN)
    done = train.changed(LATE, "late", steps=6, **RUN, mirror=tmp_path / "store")
    assert "is complete" in done.stdout and stored(str(tmp_path / "store")) == ["step-00000006"]


def test_a_node_that_shares_no_disk_does_not_trust_its_own_copy_unseen(train, tmp_path, monkeypatch):
    train("spot", steps=3, **RUN, mirror=tmp_path / "store")
    newest = {}

    def on_its_node(world, work, mine=None):  # where the other node has been before
        if world.rank == 0 and mine is None:
            newest["found"] = work()
        return newest["found"] if mine is None else mine and work()

    monkeypatch.setattr(mirror, "while_others_wait", on_its_node)
    for rank in range(2):
        run = shutil.copytree(train.runs / "spot", tmp_path / f"node{rank}" / "spot", symlinks=True)
        if rank == 1:
            damage(run / "checkpoints" / "step-00000003" / "optimizer.safetensors")
        with Log(run, True) as log:
            node = World(rank, 2, 1, torch.device("cpu"))
            Mirror(str(tmp_path / "store"), log).restore(run / "checkpoints", node)
        assert retention.find_damage(run / "checkpoints" / "step-00000003") is None


WAITING = """
import json
from extras.mirror import Mirror
def finish(self, original=Mirror.finish):
    found = json.loads((self.run / "status.json").read_text())
    print("waiting", found["state"], found.get("status"), flush=True)
    original(self)
Mirror.finish = finish
"""


def test_a_stopped_run_says_so_before_it_waits_for_the_store(train, tmp_path):
    flags = dict(steps=100, mirror=tmp_path / "store", max_minutes=0.001)
    done = train.changed(WAITING, "stopped", status=75, **RUN | flags).stdout
    assert done.index("saved; run the same command to continue") < done.index("waiting stopped 75")


MISSING = """
import threading
from extras import mirror
tried = threading.Event()
def put_file(self, *args):
    tried.set()
    raise FileNotFoundError("make sure that the repository exists")
mirror.LAST_COPY_SECONDS = 1.0
def finish(self, original=mirror.Mirror.finish):
    tried.wait()
    original(self)
mirror.Mirror.finish = finish
def __init__(self, *args, original=mirror.Mirror.__init__):
    original(self, *args)
    self.system.put_file = put_file.__get__(self.system)
mirror.Mirror.__init__ = __init__
"""


def test_a_store_that_does_not_exist_is_reported(train, tmp_path):
    done = train.changed(MISSING, "none", steps=6, **RUN, mirror=tmp_path / "store")
    assert "retrying while training continues: make sure that the repository exists" in done.stdout
    assert "does not have the newest checkpoint yet; run the same command again to copy it" in done.stdout
