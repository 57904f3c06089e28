"""status.json: what a run is doing, or how it ended, for whoever starts runs without reading their text."""

import json
import os
import shlex
import signal
import socket
import sys
from pathlib import Path

import pytest

from conftest import PATIENCE, before_update, execute, wait_for
from lockstep.common.errors import UserError
from lockstep.reports.log import Log


def status(run):
    """The content of status.json, without the time."""
    found = json.loads((run / "status.json").read_text())
    assert found.pop("time") > 1.7e9 and found.pop("host") == socket.gethostname()
    return found


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_complete_run_says_so_and_what_is_next(shared):
    run = shared.runs / "plain"
    found = status(run)
    assert found.pop("pid") != os.getpid()
    assert found == {"state": "complete", "step": 20, "steps": 20, "status": 0, "next": f"python sample.py {run}"}


def test_a_printed_command_means_the_same_files_to_a_shell(train, tmp_path):
    """Whatever their names. Here `python` prints its arguments."""
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)

    def words(line):
        path = f"{tmp_path}:{os.environ['PATH']}"
        return execute(["bash", "-c", line], env={"PATH": path}, cwd=tmp_path).stdout.splitlines()

    name = "r&d (1) it's $HOME; `id` *"
    said = train(name, steps=1).stdout
    for line in (said.rpartition("next: ")[2], status(train.runs / name)["next"]):
        assert words(line) == ["sample.py", str(train.runs / name)]
    tokens = tmp_path / name
    made = words(train("lost", tokens=tokens, status=2).stderr.rpartition("make it with: ")[2])
    assert made == ["prepare_data.py", "[SOURCE", "...]", f"--out={tokens}"]

    tokens.mkdir()
    for split in ("train", "val"):  # nanoGPT's characters
        (tokens / f"{split}.bin").write_bytes(bytes(4000))
    (tokens / "meta.pkl").write_bytes(b"\x8c\nvocab_size\x94KA")
    said = train("characters", tokens=tokens, steps=1).stdout
    line = next(line for line in said.splitlines() if "char_tokenizer.py" in line)
    assert words(line.rpartition("these tokens: ")[2]) == ["extras/char_tokenizer.py", f"{tokens}/input.txt"]
    assert words(said.rpartition("next: ")[2]) == ["evaluate.py", f"{train.runs}/characters"]


def test_a_stopped_run_gives_the_command_that_continues_it(train):
    process = train.torchrun("asked", ranks=2, steps=10**6, save_every=0, eval_every=0)
    wait_for(lambda: "step      3/" in train.log("asked"))
    while "step     40/" not in train.log("asked"):  # whenever one looks, the file is whole
        assert status(train.runs / "asked")["state"] == "running"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 1  # torchrun makes 1 of 75
    assert "saved; run the same command to continue" in train.log("asked")
    found = status(train.runs / "asked")
    assert (found["state"], found["status"], found["reason"]) == ("stopped", 75, "SIGTERM")
    assert 3 <= found["step"] == train.state("asked")["step"] < 10**6 == found["steps"]
    command, last = found["next"], found["step"] + 3
    assert command.startswith("torchrun --standalone --nproc_per_node=2 train.py --")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = [word for word in shlex.split(command) if not word.startswith("--steps=")]
    execute([*words, f"--steps={last}"], env={"PATH": path}, fork=False)
    found = status(train.runs / "asked")
    assert (found["state"], found["step"]) == ("complete", last) and "reason" not in found


def test_a_refused_start_of_a_run_says_why(train, shared):
    train("mine", steps=2)
    for flags in (dict(seed=7), dict(tokens_per_update=385)):
        said = train("mine", steps=4, status=2, **flags).stderr
        found = status(train.runs / "mine")
        assert (found["state"], found["status"]) == ("refused", 2) and said == f"error: {found['reason']}\n"
    train("mine", steps=4, plan=True, tokens_per_update=385, status=2)  # no start
    train("never", n_embd=33, status=2)
    assert not (train.runs / "never").exists()
    train("mine", steps=2)
    assert status(train.runs / "mine")["state"] == "complete"


def test_a_run_that_fails_says_why(train):
    train.changed(before_update(3, "raise ZeroDivisionError('in the model')"), "crashed", status=1)
    found = status(train.runs / "crashed")
    assert (found["state"], found["status"], found["reason"]) == ("failed", 1, "ZeroDivisionError: in the model")
    assert found["step"] == 3 and found["next"].startswith("python ")
    train.changed("train.validate = lambda run: 1 / 0", "unevaluated", status=1)
    assert train.state("unevaluated")["step"] == 5  # which was saved before it was evaluated
    change = before_update(2, "run.state.step = 20; train.validate = lambda run: setattr(run, 'val_loss', float('nan'))")
    train.changed(change, "useless", status=1)
    assert "ended at step 21 with a non-finite loss" in status(train.runs / "useless")["reason"]


def test_a_killed_run_is_running_by_a_process_that_is_gone_and_a_second_start_changes_nothing(train):
    process = train.start("killed", steps=100000, save_every=0, eval_every=0)
    wait_for(lambda: "step      5/" in train.log("killed"))
    assert is_alive(status(train.runs / "killed")["pid"])
    assert "in use by another training process" in train("killed", status=2).stderr
    assert status(train.runs / "killed")["state"] == "running"
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    found = status(train.runs / "killed")
    assert found["state"] == "running" and found["step"] >= 5 and "status" not in found
    wait_for(lambda: not is_alive(found["pid"]))


def test_a_start_that_others_overtook_is_refused(tmp_path):
    first, second, third = (Log(tmp_path / "run", is_master=True) for _ in range(3))
    first.begin(0)
    first.metrics({"step": 1})
    with pytest.raises(UserError, match="in the meantime; run the same command again to continue it"):
        second.begin(0)
    first.close(0)
    with pytest.raises(UserError, match="in the meantime"):
        third.claim()
    assert '"step": 1' in (tmp_path / "run" / "metrics.jsonl").read_text()
    again = Log(tmp_path / "run", is_master=True)
    again.begin(1)
    again.close(0)
