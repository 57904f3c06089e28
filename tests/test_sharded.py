"""Sharded training: the same run as one process, a share of the memory, and checkpoints that fit every strategy."""

import json

import pytest
import torch

import machine
from conftest import TINY, largest_difference
from lockstep import settings
from lockstep.checkpoints import retention
from lockstep.common.errors import UserError
from lockstep.planning import rules
from test_same_run import POISONED
from test_train import GENTLE

ADAMW = dict(GENTLE, optimizer="adamw")
MUON = dict(GENTLE, optimizer="muon")
DROPOUT = dict(dropout=0.1, optimizer="adamw", ranks=2)


@pytest.fixture(scope="module")
def one(shared):
    """Runs of one process at a learning rate that does not magnify rounding."""
    shared("one_adamw", **ADAMW, steps=10)
    shared("one_muon", **MUON, steps=10)
    return shared


def assert_same_losses(records, wanted):
    """Losses, norms and evaluations agree."""
    for record, other in zip(records, wanted, strict=True):
        assert record == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize(
    "optimizer, ranks, flags",
    [
        ("muon", 3, dict(strategy="ddp", check_replicas_every=5)),
        ("muon", 3, dict(strategy="fsdp")),  # 32 rows are 11, 11 and 10
        pytest.param("adamw", 2, dict(strategy="fsdp", compile="on"), marks=pytest.mark.slow),
        ("adamw", 3, dict(strategy="fsdp", shard_gradients="on")),
        ("muon", 4, dict(strategy="fsdp", shard_gradients="on", replicate=2, micro_batch_size=2)),
    ],
)
def test_sharded_ranks_equal_one_process(train, one, optimizer, ranks, flags):
    train("ranks", ranks=ranks, **dict(GENTLE, optimizer=optimizer, steps=10, **flags))
    assert largest_difference(train.weights("ranks"), one.weights(f"one_{optimizer}")) < 2e-5
    assert_same_losses(train.metrics("ranks"), one.metrics(f"one_{optimizer}"))


# Every rank writes how many matrices it has orthogonalized, and the bytes of Muon's state that it holds.
COUNTED = """
from lockstep.numerics import optim
counts = []
def counted(matrices, dtype, *ops, original=optim.orthogonalize):
    counts.append(len(matrices))
    return original(matrices, dtype, *ops)
optim.orthogonalize = counted
def written(run, original=train.train):
    status = original(run)
    held = sum(optim.local(state["momentum_buffer"]).numel() for state in run.engine.optimizers.parts[1].state.values())
    with open("{folder}/" + os.environ.get("RANK", "0"), "w") as file:
        file.write(f"{{sum(counts)}} {{held}}")
    return status
train.train = written
"""


@pytest.mark.parametrize(
    "ranks, flags, copies",
    [
        (3, dict(strategy="ddp"), 3),
        (2, dict(strategy="exact"), 1),
        (3, dict(strategy="fsdp"), 1),
        (4, dict(strategy="fsdp", replicate=2, micro_batch_size=2), 2),
    ],
)
def test_every_matrix_is_orthogonalized_once_in_the_world(train, tmp_path, ranks, flags, copies):
    # 14 matrices of three shapes: twice query, key, value and output, gate and up, down
    train.changed(COUNTED.format(folder=tmp_path), "counted", ranks, **dict(MUON, steps=2, **flags))
    counts, held = zip(*(map(int, (tmp_path / str(rank)).read_text().split()) for rank in range(ranks)), strict=True)
    assert sum(counts) == 2 * 14 and max(counts) <= 2 * (14 // ranks + 3)
    matrices = sum(value.numel() for name, value in train.weights("counted").items() if "proj" in name)
    assert sum(held) == copies * matrices and max(held) <= 1.2 * copies * matrices / ranks


def test_a_run_goes_from_strategy_to_strategy(train, shared):
    flags = dict(ADAMW, schedule="constant")
    shared("constant", **flags)
    legs = [("fsdp", 2, 5), ("exact", 3, 10), ("ddp", 1, 15), ("fsdp", 3, 20)]
    for strategy, ranks, steps in legs:
        train("legs", ranks, strategy=strategy, steps=steps, **flags)
    assert_same_losses(train.metrics("legs"), shared.metrics("constant"))
    assert largest_difference(train.weights("legs"), shared.weights("constant")) < 1e-5


# Every rank writes how many bytes of tensors it held at the most while model and optimizers were made, and what they have now.
STARTED = """
import json
from pathlib import Path
sys.path.append("bench")
from watch import Watch
def measured(*args, original=train.build):
    with Watch("cpu") as watch:
        run = original(*args)
        sizes = [4 * parameter.numel() for parameter in run.engine.parameters.values()]
        record = {{"peak": watch.peak, "after": watch.alive, "weights": sum(sizes), "largest": max(sizes)}}
    Path("{folder}", os.environ.get("RANK", "0")).write_text(json.dumps(record))
    return run
train.build = measured
"""


def test_a_rank_holds_its_share_and_one_tensor_from_the_first_byte(train, tmp_path):
    flags = dict(ADAMW, strategy="fsdp", n_layer=6, n_embd=64, schedule="constant", eval_every=0)
    flags |= dict(micro_batch_size=2)
    for steps, copies in ((1, 1), (2, 3)):  # weights from the seed; weights and two states of AdamW from a checkpoint
        train.changed(STARTED.format(folder=tmp_path), "run", 4, **dict(flags, steps=steps))
        for rank in range(4):
            held = json.loads((tmp_path / str(rank)).read_text())
            assert held["weights"] > 10 * held["largest"]
            assert held["after"] == pytest.approx(copies * held["weights"] / 4, rel=0.1)
            assert held["peak"] < held["after"] + 2 * held["largest"]  # a tensor, and the copy of some of its rows


# Every rank writes the bytes of its tensors when it has the gradients of its third update, and when the next one begins.
HELD = """
import json
from pathlib import Path
from lockstep.parallel.engine import Engine
sys.path.append("bench")
from watch import Watch
watch, held = Watch("cpu"), []
def build(*args, original=train.build):
    watch.__enter__()
    return original(*args)
def clip(engine, limit, original=Engine.clip):
    norm = original(engine, limit)
    held.append(watch.alive)
    return norm
def update(run, *args, original=train.update):
    if run.state.step == 3:
        weights = sum(4 * parameter.numel() for parameter in run.engine.module.parameters())
        Path("{folder}", os.environ["RANK"]).write_text(json.dumps([watch.alive / weights, held[-1] / weights]))
    return original(run, *args)
train.build, Engine.clip, train.update = build, clip, update
"""


def test_a_rank_of_exact_holds_the_weights_and_its_share_of_the_rest(train, tmp_path):
    flags = dict(ADAMW, strategy="exact", n_layer=6, n_embd=64, steps=4, eval_every=0)
    train.changed(HELD.format(folder=tmp_path), "run", 4, **flags)
    for rank in range(4):
        between, with_gradients = json.loads((tmp_path / str(rank)).read_text())
        assert 4 * between == pytest.approx(4 + 8 + 8 / 4, rel=0.05)  # bytes a parameter: weights, integers, moments
        assert 4 * with_gradients == pytest.approx(4 + 8 + 12 / 4, rel=0.05)


def test_a_killed_run_of_several_copies_continues_bit_identically(train):
    flags = DROPOUT | dict(strategy="fsdp", replicate=2, ranks=4, micro_batch_size=2, shard_gradients="on", steps=8)
    train("whole", **flags)
    train.kill("killed", 6, **flags)
    train("killed", **flags)
    train.assert_same("killed", "whole")


@pytest.mark.parametrize("name, flags", [("plain", {}), ("dropout_fsdp", dict(DROPOUT, strategy="fsdp", steps=6))])
def test_activation_checkpointing_changes_no_bit(train, shared, name, flags):
    shared(name, **flags)
    train(name, activation_checkpointing="true", **flags)
    assert train.files(name) == shared.files(name)
    assert train.metrics(name) == shared.metrics(name)


# Ends the run if the gradients have only the digits of bfloat16.
FINE = """
from lockstep.parallel.engine import Engine
def clip(self, *args, original=Engine.clip):
    gradients = [parameter.grad.to_local() for parameter in self.parameters.values()]
    assert not all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)
    return original(self, *args)
Engine.clip = clip
"""


def test_fsdp_in_bfloat16_averages_in_float32_stays_near_it_and_saves_it(train, one):
    train.changed(FINE, "mixed", ranks=2, strategy="fsdp", dtype="bfloat16", steps=10, **ADAMW)
    assert train.metrics("mixed")[-1]["val_loss"] == pytest.approx(one.metrics("one_adamw")[-1]["val_loss"], abs=5e-3)
    assert {tensor.dtype for tensor in train.weights("mixed").values()} == {torch.float32}


def test_a_gradient_that_is_not_finite_halves_the_scale_and_skips_the_update_on_all_ranks(train):
    third = POISONED.format(bad="os.environ['RANK'] == '0' and len(calls) == 3 * 3")
    done = train.changed(third, "nan", 2, strategy="fsdp", steps=6, dtype="float16", **ADAMW)
    assert "step 3: skipped the update, because its gradient is not finite (1 in a row, 1 in all)" in done.stdout
    assert all(tensor.isfinite().all() for tensor in train.weights("nan").values())
    assert train.state("nan")["skipped"] == 1
    train("nan", ranks=2, strategy="fsdp", steps=8, dtype="float16", **ADAMW)
    assert train.state("nan")["grad_scaler"]["scale"] == 2**15  # kept by the run that continues


@pytest.mark.parametrize(
    "flags, said",
    [
        (dict(strategy="fsdp", optimizer="adamw", replicate=2), "--replicate=2 does not divide the number of ranks, 3"),
        (dict(strategy="ddp", replicate=3), "--replicate=3 needs --strategy=fsdp"),
        (dict(strategy="fsdp", optimizer="adamw", check_replicas_every=1), "--check_replicas_every"),
        (dict(replicate=0), "--replicate must be greater than 0"),
        (dict(strategy="ddp", shard_gradients="on"), "--shard_gradients=on has no effect without --strategy=fsdp"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, said):
    with pytest.raises(UserError) as refused:
        rules.check(settings.load(machine.arguments("", **TINY | flags)[1:], ""), 3, flags)
    assert said in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_ranks_that_write_no_checkpoint_have_no_part_in_the_writers_group(train):
    """With NCCL a rank that joins in making a group of others waits for them for ever."""
    members_only = (
        "import torch.distributed as dist\nmake = dist.new_group\n"
        "def new_group(ranks=None, *args, **options):\n"
        "    assert ranks is None or dist.get_rank() in ranks, 'an outsider makes the group'\n"
        "    assert ranks is None or len(ranks) == dist.get_world_size() or options['use_local_synchronization']\n"
        "    return make(ranks, *args, **options)\n"
        "dist.new_group = new_group"
    )
    flags = dict(strategy="fsdp", replicate=2, optimizer="adamw", eval_every=0, steps=6, save_every=3, micro_batch_size=2)
    train.changed(members_only, "hybrid", 4, **flags)
    assert retention.find_damage(train.latest("hybrid")) is None
