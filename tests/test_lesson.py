"""lesson.py runs by itself and under torchrun, checks what it shows, and fails if a mechanism is broken."""

import sys

import pytest

from conftest import execute

RUN = """
import sys; sys.path.insert(0, ".")
from unittest import mock
import torch.distributed as dist
import lesson
from lockstep.parallel import from_scratch
"""


def lesson(*flags, launcher=(), status=0):
    """Run lesson.py. Returns what it prints."""
    done = execute([sys.executable, *launcher, "lesson.py", *flags], status, fork=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_the_lesson_shows_every_step(ranks):
    printed = lesson("-w", str(ranks))
    for number in range(1, 9):
        assert f"\n{number}. " in f"\n{printed}"
    assert "ValueError: the replicas are not identical" in printed and "(max diff " in printed
    assert f"{ranks} ranks with their shares find the same gradient" in printed and "takes 42 all-reduces" in printed
    assert printed.count(" ms, weights within ") == 4 and f"{ranks}.00 times as large" in printed


@pytest.mark.slow
def test_the_lesson_runs_under_torchrun():
    printed = lesson(launcher=["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"])
    assert "3 ranks with their shares find the same gradient" in printed


def test_ranks_that_do_not_divide_the_batch_are_refused():
    assert "invalid choice" in lesson("-w", "5", status=2)


# Each breaks one mechanism of from_scratch.py, in every rank.
BROKEN = {
    "no division": "from_scratch.Tensor.div_ = lambda self, other: self",
    "nothing is sent": "from_scratch.dist.all_reduce = lambda tensor, **options: mock.Mock()",
    "no copy at the start": "from_scratch.broadcast_module = lambda *args: None",
    "different replicas are accepted": "from_scratch.check_replicas = lambda *args: None",
    "a switch that does nothing": "from_scratch.ScratchAllReduce.__setattr__ = lambda self, name, value: "
    "object.__setattr__(self, name, value or name == 'require_backward_grad_sync')",
}


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in BROKEN.items()])
@pytest.mark.slow
def test_a_broken_mechanism_fails_the_lesson(change, tmp_path):
    (tmp_path / "broken.py").write_text(f"{RUN}{change}\ndist.init_process_group('gloo')\nlesson.lesson()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", tmp_path / "broken.py"]
    assert "Error" in execute(command, status=1, fork=False).stderr
