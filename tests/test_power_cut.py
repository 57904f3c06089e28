"""Files that cannot be written, power that fails, and everything that may happen to checkpoints, in any order."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import disk
from conftest import damage
from lockstep.checkpoints import retention
from lockstep.checkpoints.retention import write_manifest
from lockstep.common import files
from power_cut import MEMORY, SCENARIOS, Cases, Miniature, Saves


@pytest.fixture
def memory():
    """A directory in memory, where flushing takes no time."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        yield Path(directory)


@pytest.mark.parametrize("every", [pytest.param(1, id="complete", marks=pytest.mark.slow), pytest.param(17, id="sample")])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
def test_nothing_is_lost_whatever_fails_and_whenever_the_power_does(memory, scenario, every):
    cases = Cases(scenario, memory / "root")
    cases.fail_each(every)
    cases.cut_each(every)
    print(scenario.name, dict(cases.count))  # pytest -rP shows it
    assert not cases.broken and min(cases.count["faults"], cases.count["crash states"]) > 1


def early(directory, known=None):
    """Give a checkpoint its name before it is flushed."""
    write_manifest(directory, known)
    os.rename(directory, directory.with_name(directory.name[1:-4]))
    directory.mkdir()


@pytest.mark.parametrize(
    ("target", "mutant"),
    [
        ("lockstep.common.files.sync", lambda path: None),
        ("lockstep.checkpoints.checkpoint.write_manifest", early),
        (
            "lockstep.checkpoints.retention.prune",
            lambda checkpoints, *_: [files.retire(path) for path in retention.published(checkpoints)[-1:]],
        ),
    ],
)
def test_the_driver_notices_what_would_lose_a_checkpoint(memory, monkeypatch, target, mutant):
    cases = Cases(Saves("one save", intact=(80,), saves=(82,)), memory / "root")
    monkeypatch.setattr(target, mutant)
    cases.cut_each()
    assert any("was saved, and the newest intact checkpoint is of step" in problem for problem in cases.broken)


DAMAGES = [
    lambda path: damage(path / "model.safetensors"),
    lambda path: os.truncate(path / "optimizer.safetensors", 10),
    lambda path: (path / "manifest.json").unlink(),
    shutil.rmtree,
]


class Checkpoints(RuleBasedStateMachine):
    """Saves, losses of power, damage, other people's files and resumes with other settings, in any order.

    `owed` is the step that a resume must reach: of the last checkpoint announced as saved, or less where the damage that was
    done from outside leaves no such one. Nothing that the program itself does may break this.
    """

    @initialize()
    def begin(self):
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.root = Path(self.folder.name)
        self.checkpoints, self.run, self.step, self.owed, self.foreign = self.root / "checkpoints", None, 0, 0, set()

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def newest(self):
        """The step of the newest intact checkpoint."""
        found, _ = retention.newest(self.checkpoints)
        return retention.step_of(found) if found else 0

    @rule(keep_last=st.integers(0, 3), keep_best=st.integers(0, 2))
    def resume(self, keep_last=2, keep_best=1):
        if not self.newest():  # it is refused; somebody removes what is left and starts over
            for path in retention.published(self.checkpoints):
                shutil.rmtree(path)
        self.run = Miniature(self.checkpoints, keep_last=keep_last, keep_best=keep_best)
        self.keep_last, self.keep_best = keep_last, keep_best

    @rule(more=st.integers(1, 3), val_loss=st.sampled_from([1.0, 2.0, 3.0, float("nan")]), full=st.booleans())
    def save(self, more, val_loss, full):
        self.run or self.resume()
        step = self.run.state.step + more
        last = [path for path in retention.published(self.checkpoints) if retention.find_damage(path) is None]
        best = [retention.step_directory(self.checkpoints, step) for _, step in self.run.state.best]
        best_is_owed = self.keep_best and [retention.find_damage(path) for path in best if path.exists()][:1] == [None]
        with (
            mock.patch("lockstep.checkpoints.checkpoint.write_together", side_effect=OSError)
            if full
            else contextlib.nullcontext()
        ):
            assert self.run.save(step, val_loss) != full
        assert not best_is_owed or retention.find_damage(self.checkpoints / "best") is None, "the best one is gone"
        self.owed = self.owed if full else step
        last += [retention.step_directory(self.checkpoints, step)] * (not full)
        if self.keep_last:
            last = last[-self.keep_last :]
        assert all(map(Path.exists, last)), "one of the last intact ones is gone"

    @rule(more=st.integers(1, 3), data=st.data())
    def lose_power_in_a_save(self, more, data):
        self.run or self.resume()
        with disk.Disk(self.root) as record:
            record.promise(self.owed)
            step = self.run.state.step + more
            self.run.save(step)
            record.promise(step)
        states = list(disk.crash_states(record))
        _, _, tree, promised = states[data.draw(st.integers(0, len(states) - 1))]
        shutil.rmtree(self.checkpoints)
        disk.plant(tree, self.root)
        self.run, self.owed = None, self.owed if promised is None else promised

    def one(self, which):
        """One of the published checkpoints, if there is one."""
        there = retention.published(self.checkpoints)
        return there[which % len(there)] if there else None

    @rule(which=st.integers(0, 5), how=st.sampled_from(DAMAGES))
    def damage(self, which, how):
        if path := self.one(which):
            with contextlib.suppress(FileNotFoundError):  # it is damaged already
                how(path)
            self.owed = min(self.owed, self.newest())
            self.run = None  # found by the next start

    @rule(which=st.integers(0, 5), name=st.sampled_from(["step-good", "step-00000001.bak", "step-9"]))
    def somebody_puts_something_there(self, which, name):
        if (path := self.one(which)) and name not in self.foreign:
            shutil.copytree(path, self.checkpoints / name)
            self.foreign.add(name)

    @invariant()
    def one_is_intact_and_as_new_as_what_was_announced(self):
        assert self.newest() >= self.owed

    @invariant()
    def what_is_not_ours_is_left_alone(self):
        assert all((self.checkpoints / name).exists() for name in self.foreign)


Checkpoints.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCheckpoints = Checkpoints.TestCase
