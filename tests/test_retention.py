"""Which checkpoints stay: whatever is damaged, killed or put there, the program never removes the newest intact one."""

import math
import os
import shutil
import signal
import subprocess
import threading

import pytest

from conftest import before_update, damage
from lockstep.checkpoints import retention
from lockstep.common import files
from lockstep.common.errors import UserError
from power_cut import Miniature


def names(checkpoints):
    """The names in a directory, sorted."""
    return sorted(path.name for path in checkpoints.iterdir())


@pytest.mark.parametrize(
    ("number", "status", "least", "keep_best"), [(signal.SIGKILL, -signal.SIGKILL, 12, 1), (signal.SIGTERM, 75, 13, 0)]
)
def test_what_a_run_saves_beside_newer_damaged_checkpoints_stays(train, number, status, least, keep_best):
    train("run", steps=5, schedule="constant")  # is evaluated, so step 5 is the best
    flags = dict(schedule="constant", eval_every=0 if keep_best else 2, keep_best=keep_best, async_save="false")
    train("run", steps=20, keep_last=0, **flags)
    checkpoints = train.runs / "run" / "checkpoints"
    for step in (15, 20):
        damage(checkpoints / f"step-{step:08d}" / "model.safetensors")
    signalled = before_update(12, f"os.kill(os.getpid(), {int(number)})")
    done = train.changed(signalled, "run", status=status, steps=40, save_every=2, keep_last=2, **flags)
    newest, _ = retention.newest(checkpoints)
    assert newest is not None, "the run is lost"
    assert retention.step_of(newest) >= least
    assert os.path.samefile(checkpoints / "latest", newest) or status < 0
    assert "skipped" in done.stdout and "step-00000020: model.safetensors does not match" in done.stdout
    assert (checkpoints / "step-00000005").exists() == bool(keep_best)
    done = train("run", steps=20, **flags)
    assert f"continuing from {newest}" in done.stdout
    assert all(retention.find_damage(checkpoints / f"step-000000{step}") is None for step in (15, 20))  # saved again


def test_only_our_own_names_are_read_or_removed(train):
    train("run", steps=10, schedule="constant", keep_last=0)
    checkpoints = train.runs / "run" / "checkpoints"
    copies = ["step-good", "step-00000099.bak", "step-99", "step-000000099", "old step-00000099"]
    for name in copies:
        shutil.copytree(checkpoints / "step-00000005", checkpoints / name)
    (checkpoints / "step-00000015").write_text("a file, where a checkpoint will be")
    done = train("run", steps=20, schedule="constant", keep_last=1, keep_best=0)
    assert f"continuing from {checkpoints}/step-00000010" in done.stdout
    assert names(checkpoints) == sorted([*copies, "step-00000020", "latest"])
    assert all(retention.find_damage(checkpoints / name) is None for name in copies)


def test_the_best_stays_until_a_better_one_is_there(tmp_path, monkeypatch):
    run = Miniature(tmp_path, keep_last=1, keep_best=1)
    assert run.save(1, 2.0) and run.save(2, 3.0)
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.checkpoints.checkpoint.write_manifest", lambda *_: files.sync(tmp_path / "missing"))
        assert not run.save(3, 1.0)
    assert os.readlink(tmp_path / "best") == "step-00000001" and run.state.best_val_loss == 2.0

    run = Miniature(tmp_path, keep_last=1, keep_best=1, async_save=True)
    writing = threading.Event()
    monkeypatch.setattr(
        "lockstep.checkpoints.checkpoint.write_manifest", lambda *all: writing.wait() and retention.write_manifest(*all)
    )
    run.state.step = 4
    run.checkpoints.save(run.state, now=True)
    run.checkpoints.evaluated(run.state, 1.0)  # while it is written
    assert os.readlink(tmp_path / "best") == "step-00000001"
    writing.set()
    run.checkpoints.finish(run.state)
    assert os.readlink(tmp_path / "best") == "step-00000004" and not (tmp_path / "step-00000001").exists()


def test_of_equal_losses_the_first_is_the_best_and_one_that_is_not_finite_never_is(tmp_path):
    run = Miniature(tmp_path, keep_last=1, keep_best=1)
    for step, loss in ((1, math.nan), (2, 2.0), (3, 2.0), (4, math.inf)):
        assert run.save(step, loss)
    assert os.readlink(tmp_path / "best") == "step-00000002" and run.state.best == [(2.0, 2)]
    run = Miniature(tmp_path / "none", keep_best=0)
    assert run.save(1, 2.0) and run.state.best_val_loss == 2.0 and not (tmp_path / "none" / "best").exists()


def test_older_checkpoints_are_verified_while_training_goes_on(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        Miniature(tmp_path, keep_last=0).save(step)
    run, verified = Miniature(tmp_path, keep_last=3), []
    monkeypatch.setattr(retention, "find_damage", lambda path: verified.append((path.name, threading.current_thread().name)))
    assert run.save(4)  # step 1 has to go, so three others have to count
    assert [name for name, thread in verified if thread != "MainThread"] == ["step-00000002"] == [name for name, _ in verified]
    assert names(tmp_path) == ["latest", *(f"step-0000000{step}" for step in (2, 3, 4))]


def test_a_file_in_place_of_the_checkpoints_is_named(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError, match="move that file away"):
        retention.prepare(tmp_path / "checkpoints", tmp_path)


def test_a_directory_that_becomes_unwritable_is_a_warning_and_training_goes_on(train):
    checkpoints = train.runs / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    if subprocess.run(["chattr", "+i", checkpoints], capture_output=True).returncode:
        pytest.skip("this user or file system has no immutable files")
    try:
        refused = train("run", status=2, steps=20)
        assert f"error: {checkpoints}: cannot save checkpoints here: [Errno 1]" in refused.stderr
    finally:
        subprocess.run(["chattr", "-i", checkpoints], check=True)
    chattr = "import subprocess; subprocess.run(['chattr', '{}', run.checkpoints.directory], check=True)"
    change = before_update(7, chattr.format("+i")) + before_update(17, chattr.format("-i"))
    done = train.changed(change, "run", steps=20, save_every=3, eval_every=3, async_save="false")
    for message in ("the checkpoint at step 9 could not be written", "or set the link `best`", "training continues"):
        assert message in done.stdout, done.stdout
    assert os.readlink(checkpoints / "latest") == "step-00000020" and not list(checkpoints.glob(".*"))
