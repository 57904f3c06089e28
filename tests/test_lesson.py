"""lesson.py runs by itself and under torchrun, checks what it shows, and fails if a mechanism is broken."""

import sys

import pytest

import warm
from conftest import PATIENCE, ROOT, environment, execute

RUN = """
import sys; sys.path.insert(0, ".")
from unittest import mock
import torch
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
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    printed = lesson("-w", "2") if ranks == 2 else lesson(launcher=torchrun)
    for number in range(1, 9):
        assert f"\n{number}. " in f"\n{printed}"
    assert "ValueError: the replicas are not identical" in printed and "(max diff " in printed
    assert f"{ranks} ranks with their shares find the same gradient" in printed and "takes 42 all-reduces" in printed
    assert printed.count(" ms, weights within ") == 4 and f"{ranks}.00 times as large" in printed


def test_ranks_that_do_not_divide_the_batch_are_refused():
    assert "invalid choice" in lesson("-w", "5", status=2)


# Each breaks one mechanism of from_scratch.py, in every rank.
BROKEN = {
    "no division": "from_scratch.Tensor.div_ = lambda self, other: self",
    "nothing is sent": "from_scratch.dist.all_reduce = lambda tensor, **options: mock.Mock()",
    "no copy at the start": "from_scratch.broadcast_module = lambda *args: None",
    "different replicas are accepted": "from_scratch.check_replicas = lambda *args: None",
    "a switch that does nothing": "from_scratch.ScratchAllReduce.__setattr__ = lambda self, name, value: "
    "torch.nn.Module.__setattr__(self, name, value or name == 'require_backward_grad_sync')",
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_broken_mechanism_fails_the_lesson(change, tmp_path):
    (tmp_path / "broken.py").write_text(f"{RUN}{change}\ndist.init_process_group('gloo')\nlesson.lesson()\n")
    process = warm.Process([tmp_path / "broken.py"], 2, environment(), ROOT, tmp_path)
    assert "Error" in process.communicate(PATIENCE)[1] and process.returncode == 1
