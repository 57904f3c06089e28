"""The same run: bit for bit under `exact` whatever the number of ranks, and for every strategy however often it is killed."""

import contextlib
import functools
import os
import random
import re
import signal
import subprocess

import pytest
import torch

from conftest import PATIENCE, before_update, damage, wait_for
from lockstep.checkpoints import retention
from lockstep.common.errors import RunError
from lockstep.parallel.exact import LIMIT, SCALE, Exact, add_fixed_point, mean_from_fixed_point, raise_largest
from lockstep.strategies import STRATEGIES

EXACT = dict(strategy="exact", dropout=0.1, optimizer="muon")


def test_fixed_point_sums_do_not_depend_on_order_and_are_close_to_float64():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(200_000, generator=generator) * 10.0 ** random.Random(i).randint(-6, 1) for i in range(12)]

    def total(order):
        sums, largest = torch.zeros(200_000, dtype=torch.int64), torch.zeros(())
        for i in order:
            add_fixed_point(sums, gradients[i])
            raise_largest(largest, gradients[i])
        return sums, largest

    forward, backward = total(range(12)), total(reversed(range(12)))
    assert torch.equal(forward[0], backward[0]) and forward[1] == max(g.abs().max() for g in gradients)
    mean = torch.empty(200_000)
    mean_from_fixed_point(12, forward[0], mean)
    wanted = torch.stack(gradients).double().mean(0)
    assert (mean - wanted).abs().max() <= wanted.abs().max() * 2**-24 + 1 / SCALE
    assert (mean - wanted.float()).abs().max() <= 2**-22


def test_compiled_conversion_gives_the_same_integers_in_any_order():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(70_001, generator=generator) * 10.0 ** -(i % 9) for i in range(5)]
    gradients[2][:3] = torch.tensor([float("nan"), 1e-45, -1e-15])

    def convert(add, mean, order):
        total, largest, out = torch.zeros(70_001, dtype=torch.int64), torch.zeros(3), torch.empty(70_001)
        for i in order:
            add(total, gradients[i])
            raise_largest(largest[1], gradients[i])
        sums = total.clone()
        mean(5, total, out)
        assert not total.any()
        return sums[1:], largest.isnan(), out[1:]

    wanted = convert(add_fixed_point, mean_from_fixed_point, range(5))
    assert wanted[0].any() and wanted[1].tolist() == [False, True, False]
    compiled = [torch.compile(function, dynamic=True) for function in (add_fixed_point, mean_from_fixed_point)]
    for functions in ((add_fixed_point, mean_from_fixed_point), compiled):
        for order in (range(5), (4, 0, 3, 1, 2)):
            assert all(map(torch.equal, convert(*functions, order), wanted))


# several; tensors of no width that a vector has
BUCKETS = "import lockstep.parallel.exact; lockstep.parallel.exact.BUCKET_MB = 0.005"
ODD = dict(EXACT, n_embd=44, head_dim=22, n_head=2)


@pytest.mark.parametrize(
    "dtype, compile, optimizer, others",
    [
        ("float32", "off", "adamw", (4,)),
        ("bfloat16", "off", "muon", (5,)),
        pytest.param("bfloat16", "on", "muon", (3,), marks=pytest.mark.slow),
    ],
)
def test_exact_gives_the_same_bits_on_any_number_of_ranks(train, dtype, compile, optimizer, others):
    flags = dict(ODD, dtype=dtype, compile=compile, optimizer=optimizer, steps=6, eval_every=3, save_every=3)
    train("w1", **flags)
    for ranks in others:  # 6 micro-batches: 4 and 5 ranks take unequal shares
        train.changed(BUCKETS, f"w{ranks}", ranks, **flags)
        train.assert_same(f"w{ranks}", "w1")


def test_exact_is_the_same_run_when_killed_and_continued_on_other_numbers_of_ranks(train):
    flags = dict(EXACT, save_every=1, eval_every=5, steps=15)
    train("whole", **flags)
    for ranks, step in ((3, 4), (1, 9)):
        train.kill("parts", step, ranks, **flags)
    train("parts", ranks=5, **flags)
    train.assert_same("parts", "whole")


# exact on any number of ranks: see above
BEFORE = """
from lockstep.planning import choices, rules
choices.shard_gradients = lambda config, *_: config
del rules.EFFECTS["shard_gradients"]
"""


def test_a_run_of_exact_from_when_it_could_shard_gradients_continues_with_a_note(train):
    train.changed(BEFORE, "old", steps=2, shard_gradients="on", **EXACT)
    note = "note: --shard_gradients is for fsdp alone now; exact has the same bits without it"
    assert note in train("old", steps=3, shard_gradients="on", **EXACT).stdout  # the same command
    assert "shard_gradients" not in train("old", steps=4, **EXACT).stdout


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if not STRATEGIES[name].any_ranks])
def test_resume_on_the_same_ranks_is_bit_identical_for_every_strategy(train, strategy):
    flags = dict(strategy=strategy, dropout=0.1, ranks=3, optimizer="muon", steps=9)  # Muon, and AdamW for what is no matrix
    train("whole", **flags)
    train.kill("parts", 6, **flags)  # after the evaluation of step 5, of which the checkpoint of step 5 does not know
    train("parts", **flags)
    train.assert_same("parts", "whole")
    assert train.state("parts")["best"] == train.state("whole")["best"]


HUGE = """
import model
class Huge(model.GPT):
    def loss(self, *args):
        return super().loss(*args) * 1e7
model.GPT = Huge
"""


def test_exact_reports_an_overflow_with_the_name_of_the_parameter(train):
    # 12 micro-batches: a gradient of LIMIT / 12 is the first that is refused
    for gradient, refused in ((LIMIT / 12 - 1, False), (-LIMIT / 12, True)):
        model = Exact(torch.nn.Linear(1, 1, bias=False), micro_batches=12)
        with pytest.raises(RunError) if refused else contextlib.nullcontext():
            model(torch.tensor([[gradient]])).backward()
        assert refused or model.module.weight.grad == pytest.approx(gradient / 12)
    done = train.changed(HUGE, "huge", 2, status=1, **dict(EXACT, steps=2))
    assert re.search(r"error: a gradient of [a-z0-9_.]+weight has reached .* --strategy=exact", done.stderr), done.stderr


def test_a_damaged_checkpoint_is_passed_over_with_the_reason(train, shared):
    train("damaged", steps=10)
    damage(train.latest("damaged") / "model.safetensors")
    done = train("damaged", steps=20)
    assert "skipped" in done.stdout and "model.safetensors does not match its sha256" in done.stdout
    assert "continuing from" in done.stdout and "step-00000005" in done.stdout
    train.assert_same("damaged", "plain", of=shared)
    for path in retention.published(train.runs / "damaged" / "checkpoints"):
        (path / "manifest.json").unlink()
    refused = train("damaged", steps=30, status=2)
    assert "has no manifest.json" in refused.stderr


def test_a_full_disk_leaves_the_older_checkpoints_and_the_run_goes_on(train):
    flags = dict(steps=15, save_every=4, keep_last=0, schedule="constant", warmup_steps=0)
    train("whole", **flags)
    train("full", **dict(flags, steps=4))
    size = (train.latest("full") / "optimizer.safetensors").stat().st_size
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2},) * 2)"
    done = train.changed(limited, "full", status=1, **flags)
    assert done.stdout.count("could not be written") >= 2 and "training continues" in done.stdout
    assert done.stderr.startswith("error: the checkpoint at step 15 could not be written")
    assert [path.name for path in retention.published(train.runs / "full" / "checkpoints")] == ["step-00000004"]
    assert retention.find_damage(train.latest("full")) is None
    train("full", **flags)
    assert train.files("full") == train.files("whole")


def test_a_signal_saves_and_exits_75(train):  # SIGUSR1: tests/test_slurm.py
    flags = dict(dropout=0.1, optimizer="muon", dtype="bfloat16", architecture="gpt2", save_every=0, eval_every=0)
    flags |= dict(schedule="constant")  # its steps do not depend on how many there are
    for number in (signal.SIGTERM, signal.SIGHUP):
        process = train.start("asked", steps=10**6, **flags)
        before = train.state("asked")["step"] if train.log("asked") else 0
        wait_for(lambda before=before: f"step {before + 3:>6}/" in train.log("asked"))
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 75 and number.name in train.log("asked")
    steps = train.state("asked")["step"] + 5
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as nohup does
    train.changed(ignored + before_update(steps - 3, f"os.kill(os.getpid(), {signal.SIGHUP:d})"), "asked", steps=steps, **flags)
    train("whole", steps=steps, **flags)
    train.assert_same("asked", "whole")


def test_time_saves_too_on_all_ranks_at_the_same_step_and_changes_no_bit(train):
    flags = dict(ranks=2, strategy="fsdp", eval_every=0, save_every=7)
    slow = "import time\n" + before_update("run.state.step", "time.sleep(0.02)")
    train.changed(slow, "timed", **flags, save_minutes=0.05 / 60, keep_last=1)
    saved = [int(step) for step in re.findall(r"step +(\d+)  checkpoint", train.log("timed"))]
    assert {7, 14, 20} < {*saved}, saved
    assert [path.name for path in retention.published(train.runs / "timed" / "checkpoints")] == ["step-00000020"]
    train("plain", **flags)
    assert re.findall(r"step +(\d+)  checkpoint", train.log("plain")) == ["7", "14", "20"]
    train.assert_same("timed", "plain")


def test_a_start_that_lost_everything_is_told_before_it_is_repeated(train):
    train.changed(before_update(3, "os.kill(os.getpid(), 9)"), "lost", status=-signal.SIGKILL, save_every=0)
    done = train("lost", save_every=8, steps=9)
    assert re.search(r"reached step \d+, but ended before its first checkpoint, so the run begins again", done.stdout)
    assert "the first checkpoint will be at step 8 or after 10 minutes (--save_every, --save_minutes)" in done.stdout
    assert "begins again" not in train("lost", save_every=8, steps=10).stdout


def test_a_second_sigint_ends_at_once(train):
    train.changed(before_update(0, "os.kill(os.getpid(), 2), os.kill(os.getpid(), 2)"), "impatient", status=-signal.SIGINT)


def workers(process):
    """The process ids of torchrun's ranks."""
    return list(map(int, subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()))


def end_well(*processes):
    """Wait for the ends of torchruns, whose statuses must be 0."""
    for process in processes:
        out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, out


@pytest.mark.slow
def test_a_worker_killed_under_max_restarts_ends_bit_identical(train):
    flags = dict(ranks=2, steps=14, save_every=1, eval_every=10)
    train("whole", **flags)
    process = train.torchrun("restarted", launcher=["--max-restarts=2"], **flags)
    wait_for(lambda: "step      4/14" in train.log("restarted"))
    os.kill(workers(process)[-1], signal.SIGKILL)
    end_well(process)
    assert train.log("restarted").count("continuing from") == 1
    train.assert_same("restarted", "whole")


@pytest.mark.slow
def test_workers_killed_on_three_nodes_restart_though_each_node_counts_its_own_restarts(train):
    flags = dict(steps=60, save_every=1, eval_every=0, timeout_minutes=0.5)
    train("three", ranks=3, **flags)
    each = [train.node("nodes", ["--nnodes=3", "--max-restarts=3"], **flags) for _ in range(3)]
    for reached in (8, 20):
        wait_for(lambda reached=reached: f"step     {reached:2}/60" in train.log("nodes"))
        os.kill(workers(each[reached % 3])[-1], signal.SIGKILL)
    end_well(*each)
    assert train.log("nodes").count("continuing from") == 2
    train.assert_same("nodes", "three")


@pytest.mark.slow
def test_a_node_that_joins_an_elastic_run_changes_no_bit(train):
    flags = dict(strategy="exact", steps=60, save_every=1, eval_every=0, timeout_minutes=0.5)
    train("one", **flags)
    options = ["--nnodes=2:3", "--max-restarts=3", "--rdzv-conf=last_call_timeout=1"]  # seconds to wait for a third node
    node = functools.partial(train.node, "nodes", options, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, **flags)
    each = [node(), node()]
    wait_for(lambda: "step      5/60" in train.log("nodes"))
    end_well(*each, node())
    assert re.findall(r"^  ranks +(\d+)", train.log("nodes"), re.M) == ["2", "3"]
    train.assert_same("nodes", "one")


MOST_IN_A_ROW = """
from lockstep.reports import progress
progress.MOST_IN_A_ROW = {}
"""
POISONED = """
calls = []
def poisoned(loss, *args, backward=torch.Tensor.backward, **more):
    calls.append(loss)
    backward(loss * float("nan") if {bad} else loss, *args, **more)
torch.Tensor.backward = poisoned
"""


@pytest.mark.parametrize("strategy, ranks", [("ddp", 2), ("exact", 2), ("exact", 3)])
def test_a_gradient_that_is_not_finite_skips_the_update_on_all_ranks(train, strategy, ranks):
    third = f"os.environ.get('RANK', '0') == '0' and len(calls) == 3 * {6 // ranks}"  # only rank 0's
    flags = dict(strategy=strategy, steps=6)
    done = train.changed(POISONED.format(bad=third), "nan", ranks, **flags)
    assert "step 3: skipped the update, because its gradient is not finite (1 in a row, 1 in all)" in done.stdout
    assert train.state("nan")["skipped"] == 1
    assert all(tensor.isfinite().all() for tensor in train.weights("nan").values())


INFINITE = """
from lockstep.parallel import exact
calls = []
def raise_largest(largest, gradient, original=exact.raise_largest):
    calls.append(1)
    if os.environ.get("RANK", "0") == "0" and len(calls) == 50:
        gradient.view(-1)[0] = float("inf")
    original(largest, gradient)
exact.raise_largest = raise_largest
"""


def test_an_infinite_gradient_skips_the_update_of_exact_on_all_ranks(train):
    done = train.changed(INFINITE, "infinite", 3, strategy="exact", steps=6)
    assert "skipped the update, because its gradient is not finite (1 in a row, 1 in all)" in done.stdout


def test_too_many_in_a_row_end_the_run_with_the_last_good_checkpoint_kept(train):
    done = train.changed(MOST_IN_A_ROW.format(3) + POISONED.format(bad="len(calls) > 7 * 6"), "nan", steps=20, status=1)
    assert "skipped 4 updates in a row with non-finite gradients" in done.stderr and "Traceback" not in done.stderr
    newest = train.latest("nan").resolve()
    assert retention.find_damage(newest) is None and f"checkpoints are in {newest.parent}" in done.stderr
    assert all(tensor.isfinite().all() for tensor in train.weights("nan").values())


@pytest.mark.parametrize("save_every, lr, bad", [(5, 1e3, "False"), (1, 1e-2, "len(calls) > 6")])
def test_weights_that_no_update_improves_push_out_no_good_checkpoint(train, save_every, lr, bad):
    flags = dict(architecture="gpt2", keep_last=1, keep_best=0, eval_every=0, save_every=save_every, warmup_steps=0)
    train("run", steps=6, **flags)
    checkpoints = train.runs / "run" / "checkpoints"
    train.changed(MOST_IN_A_ROW.format(9) + POISONED.format(bad=bad), "run", status=1, steps=60, lr=lr, **flags)
    assert (checkpoints / "step-00000006").exists() and len(retention.published(checkpoints)) < 4
    stopped = before_update("run.state.step", "len(calls) == 18 and os.kill(os.getpid(), 15)")  # saves what is bad
    train.changed(POISONED.format(bad="True") + stopped, "run", status=75, steps=60, lr=lr, **flags)
    assert (checkpoints / "step-00000006").exists() and train.state("run")["unsound"]
    train("new", resume=checkpoints / "step-00000006", steps=8, **flags)
    assert all(tensor.isfinite().all() for tensor in train.weights("new").values())


def test_replicas_that_drift_apart_end_the_run_with_the_tensors_name(train):
    weight = "run.engine.module.blocks[1].mlp.down.weight.data.view(-1)[5]"
    drift = before_update(3, f"os.environ['RANK'] == '2' and {weight}.add_(1e-7)")
    done = train.changed(drift, "drift", 3, status=1, check_replicas_every=2, save_every=2)
    assert train.state("drift")["step"] == 2  # wrong weights are not saved
    assert "blocks.1.mlp.down.weight differs between ranks [2] and the other 2" in done.stderr
    assert "step      5/20" not in done.stdout
