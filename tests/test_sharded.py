"""Sharded training: the same run as one process, a share of the memory, and checkpoints that fit every strategy."""

import json
from types import SimpleNamespace

import pytest
import torch

import machine
import settings
from common.errors import UserError
from conftest import TINY, largest_difference
from model import GPT, initial_weights
from parallel import engine, sharded
from parallel.engine import Engine
from parallel.world import connect
from planning import rules
from test_same_run import POISONED
from test_train import GENTLE

ADAMW = dict(GENTLE, optimizer="adamw")
MUON = dict(GENTLE, optimizer="muon")
DROPOUT = dict(dropout=0.1, optimizer="adamw", ranks=2)


@pytest.fixture(scope="module")
def one(shared):
    """Runs of one process at a learning rate that does not magnify rounding."""
    shared("one_adamw", **ADAMW)
    shared("one_muon", **MUON)
    return shared


def assert_same_losses(records, wanted):
    """Losses, norms and evaluations agree."""
    for record, other in zip(records, wanted, strict=True):
        assert record == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize(
    "optimizer, ranks, flags",
    [
        ("adamw", 2, dict(strategy="zero1")),
        ("muon", 3, dict(strategy="ddp", check_replicas_every=5)),
        ("muon", 3, dict(strategy="zero1", check_replicas_every=5)),
        ("muon", 3, dict(strategy="fsdp")),  # 32 rows are 11, 11 and 10
        ("muon", 4, dict(strategy="fsdp", replicate=2)),
        ("adamw", 2, dict(strategy="fsdp", compile="on")),
        ("adamw", 3, dict(strategy="fsdp")),
        ("adamw", 4, dict(strategy="fsdp", replicate=2)),
    ],
)
def test_sharded_ranks_equal_one_process(train, one, optimizer, ranks, flags):
    train("ranks", ranks=ranks, **dict(GENTLE, optimizer=optimizer, **flags))
    assert largest_difference(train.weights("ranks"), one.weights(f"one_{optimizer}")) < 1e-5
    assert_same_losses(train.metrics("ranks"), one.metrics(f"one_{optimizer}"))


# Every rank writes how many matrices it has orthogonalized, and the bytes of Muon's state that it holds.
COUNTED = """
import optim
counts = []
def counted(matrices, dtype, original=optim.orthogonalize):
    counts.append(len(matrices))
    return original(matrices, dtype)
optim.orthogonalize = counted
def written(run, original=train.train):
    status = original(run)
    held = sum(optim.local(state["momentum_buffer"]).numel() for state in run.optimizers.parts[1].state.values())
    with open("{folder}/" + os.environ.get("RANK", "0"), "w") as file:
        file.write(f"{{sum(counts)}} {{held}}")
    return status
train.train = written
"""


@pytest.mark.parametrize(
    "ranks, flags, copies",
    [
        (3, dict(strategy="ddp"), 3),
        (2, dict(strategy="exact"), 2),
        (3, dict(strategy="zero1"), 1),
        (3, dict(strategy="fsdp"), 1),
        (4, dict(strategy="fsdp", replicate=2), 2),
    ],
)
def test_every_matrix_is_orthogonalized_once_in_the_world(train, tmp_path, ranks, flags, copies):
    # 14 matrices of three shapes: twice query, key, value and output, gate and up, down
    train.changed(COUNTED.format(folder=tmp_path), "counted", ranks, **dict(MUON, steps=2, **flags))
    counts, held = zip(*(map(int, (tmp_path / str(rank)).read_text().split()) for rank in range(ranks)), strict=True)
    assert sum(counts) == 2 * 14 and max(counts) <= 2 * (14 // ranks + 3)
    matrices = sum(value.numel() for name, value in train.weights("counted").items() if "proj" in name)
    assert sum(held) == copies * matrices and max(held) <= 1.2 * copies * matrices / ranks


# Rank 0 writes how many elements it has sent in each exchange of updated weights.
SENT = """
from parallel import sharded
import torch.distributed as dist
sharded.GATHERED, sent = {gathered}, []
def counted(received, mine, group=None, original=dist.all_gather):
    sent.append(mine.numel())
    return original(received, mine, group)
dist.all_gather = counted
def written(run, original=train.train):
    status = original(run)
    if run.world.is_master:
        with open("{folder}/sent", "w") as file:
            file.write(" ".join(map(str, sent)))
    return status
train.train = written
"""


def test_zero1_sends_little_more_than_the_weights_whatever_it_gathers_at_once(train, tmp_path):
    exchanges = []
    for gathered in (sharded.GATHERED, 6000):
        train.changed(
            SENT.format(folder=tmp_path, gathered=gathered), f"at_{gathered}", 3, **dict(MUON, steps=2, strategy="zero1")
        )
        sent = [int(number) for number in (tmp_path / "sent").read_text().split()]
        exchanges.append(len(sent))
        parameters = sum(value.numel() for value in train.weights(f"at_{gathered}").values())
        assert parameters <= 3 / 2 * sum(sent) <= 1.2 * parameters  # in two steps, a third by each rank
    assert exchanges[0] == 2 and exchanges[1] > 10
    assert train.files("at_6000") == train.files(f"at_{sharded.GATHERED}")


# After the last step every rank writes how many bytes it holds.
MEASURED = """
import json
def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().nbytes()
def measured(run, original=train.train):
    status = original(run)
    states = [value for part in run.optimizers.parts for state in part.state.values() for value in state.values()]
    held = {{"state": sum(map(local, states)), "weights": sum(map(local, run.engine.parameters.values()))}}
    with open("{folder}/" + os.environ.get("RANK", "0"), "w") as file:
        json.dump(held, file)
    return status
train.train = measured
"""


def test_a_run_goes_from_strategy_to_strategy_and_each_rank_holds_its_share(train, shared):
    flags = dict(ADAMW, schedule="constant")
    shared("constant", **flags)
    legs = [("fsdp", 2, 5), ("zero1", 3, 10), ("ddp", 1, 15), ("fsdp", 2, 20)]
    held = {}
    for strategy, ranks, steps in legs:
        folder = train.runs.parent / f"{strategy}{ranks}{steps}"
        folder.mkdir()
        train.changed(MEASURED.format(folder=folder), "legs", ranks, strategy=strategy, steps=steps, **flags)
        held[strategy, steps] = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    assert_same_losses(train.metrics("legs"), shared.metrics("constant"))
    assert largest_difference(train.weights("legs"), shared.weights("constant")) < 1e-5
    whole = held["ddp", 15][0]
    assert whole["state"] == pytest.approx(2 * whole["weights"], rel=0.01)
    for rank in held["fsdp", 5] + held["fsdp", 20]:  # as built, and as restored
        assert rank["weights"] == pytest.approx(whole["weights"] / 2, rel=0.1)
        assert rank["state"] == pytest.approx(whole["state"] / 2, rel=0.1)
    for rank in held["zero1", 10]:
        assert rank["weights"] == whole["weights"]
        assert rank["state"] == pytest.approx(whole["state"] / 3, rel=0.1)


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


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_a_rank_holds_its_share_and_one_tensor_from_the_first_byte(train, tmp_path, architecture):
    flags = dict(ADAMW, architecture=architecture, strategy="fsdp", n_layer=6, n_embd=64, schedule="constant", eval_every=0)
    for steps, copies in ((5, 1), (10, 3)):  # weights from the seed; weights and two states of AdamW from a checkpoint
        train.changed(STARTED.format(folder=tmp_path), "run", 4, **dict(flags, steps=steps))
        for rank in range(4):
            held = json.loads((tmp_path / str(rank)).read_text())
            assert held["weights"] > 10 * held["largest"]
            assert held["after"] == pytest.approx(copies * held["weights"] / 4, rel=0.1)
            assert held["peak"] < held["after"] + 2 * held["largest"]  # a tensor, and the copy of some of its rows


@pytest.mark.slow
def test_muon_continues_on_other_strategies_and_ranks(train, shared):
    # 60 micro-batches for any of the ranks; the last of five has none of a key's 16 rows.
    flags = dict(MUON, schedule="constant", n_kv_head=1, tokens_per_update=960, micro_batch_size=1)
    shared("muon_constant", **flags)
    legs = [("fsdp", 4, 5), ("exact", 1, 8), ("fsdp", 5, 12), ("zero1", 3, 16), ("scratch_overlap", 2, 18), ("fsdp", 2, 20)]
    for strategy, ranks, steps in legs:
        train("legs", ranks, strategy=strategy, **dict(flags, steps=steps))
    updates, expected = (
        [r for r in runs.metrics(name) if "loss" in r] for runs, name in ((train, "legs"), (shared, "muon_constant"))
    )
    assert_same_losses(updates, expected)
    assert largest_difference(train.weights("legs"), shared.weights("muon_constant")) < 1e-4


@pytest.mark.parametrize(
    "name, flags",
    [
        ("dropout_2x2", dict(strategy="fsdp", replicate=2, ranks=4)),
        ("dropout_2x3", dict(strategy="fsdp", replicate=2, ranks=6)),
    ],
)
def test_a_killed_run_of_several_copies_continues_bit_identically(train, shared, name, flags):
    flags = DROPOUT | flags
    shared(name, **flags)
    train.kill("killed", (train.runs / "killed" / "checkpoints" / "step-00000010").exists, **flags)
    train("killed", **flags)
    train.assert_same("killed", name, of=shared)


# The C library is not asked to keep the memory that is freed.
NOT_KEPT = """
from hardware import device
def keep():
    raise AssertionError("freed memory is kept")
device.keep_freed_memory = keep
"""


def test_fsdp_does_not_keep_freed_memory(train):
    """Its ranks freed pieces of so many sizes that keeping them doubled their memory."""
    train.changed(NOT_KEPT, "sharded", 2, strategy="fsdp", steps=1)
    assert "freed memory is kept" in train.changed(NOT_KEPT, "replicas", 2, strategy="ddp", steps=1, status=1).stderr


@pytest.mark.parametrize("name, flags", [("plain", {}), ("dropout_fsdp", dict(DROPOUT, strategy="fsdp"))])
def test_activation_checkpointing_changes_no_bit(train, shared, name, flags):
    shared(name, **flags)
    train(name, activation_checkpointing="true", **flags)
    assert train.files(name) == shared.files(name)
    assert train.metrics(name) == shared.metrics(name)


def test_activation_checkpointing_keeps_less_for_backward():
    def kept(checkpointing):
        config = settings.Config(
            model=settings.ModelConfig(n_layer=4, n_head=2, n_embd=32, seq_len=16, vocab_size=64, d_ff=128, head_dim=16)
        )
        config = settings.replace(config, activation_checkpointing=checkpointing, dtype="float32", n_kv_head=2, compile="off")
        config = settings.replace(config, tokens_per_update=32, micro_batch_size=2)
        engine = Engine(GPT(config.model), config, connect("cpu", 1))
        engine.module.load_state_dict(dict(initial_weights(engine.module, seed=0)))
        inputs, sizes = torch.arange(32).view(2, 16), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            engine.model(inputs, inputs)
        return sum(sizes)

    assert kept(True) < kept(False) / 4


def test_compressed_gradients_train_nearly_as_well(train, one):
    train("compressed", ranks=2, grad_compression="bf16", **ADAMW)
    difference = largest_difference(train.weights("compressed"), one.weights("one_adamw"))
    assert 1e-6 < difference < 1e-3  # compressed indeed, and hardly worse
    assert train.metrics("compressed")[-1]["val_loss"] == pytest.approx(one.metrics("one_adamw")[-1]["val_loss"], abs=1e-3)


def test_fsdp_in_bfloat16_stays_near_float32_and_saves_float32(train, one):
    train("mixed", ranks=2, strategy="fsdp", dtype="bfloat16", **ADAMW)
    assert train.metrics("mixed")[-1]["val_loss"] == pytest.approx(one.metrics("one_adamw")[-1]["val_loss"], abs=5e-3)
    assert {tensor.dtype for tensor in train.weights("mixed").values()} == {torch.float32}


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_gradient_that_is_not_finite_halves_the_scale_and_skips_the_update_on_all_ranks(train, strategy):
    third = POISONED.format(bad="os.environ['RANK'] == '0' and len(calls) == 3 * 6")
    done = train.changed(third, "nan", 2, strategy=strategy, steps=6, dtype="float16", **ADAMW)
    assert "step 3: the gradient is not finite, update skipped (1 in a row, 1 in all)" in done.stdout
    assert all(tensor.isfinite().all() for tensor in train.weights("nan").values())
    state = json.loads((train.latest("nan") / "trainer_state.json").read_text())
    assert state["skipped"] == 1 and state["grad_scaler"]["scale"] == 2**15


# The third gradient of one rank is not finite although the sum over the ranks was.
POISONED_RANK = """
from parallel.engine import Engine
seen = []
def poisoned(self, limit, clip=Engine.clip):
    seen.append(1)
    if os.environ["RANK"] == "1" and len(seen) == 3:
        next(p for p in self.parameters.values() if p.grad is not None).grad.view(-1)[0] = float("nan")
    return clip(self, limit)
Engine.clip = poisoned
"""


@pytest.mark.parametrize(
    "flags", [dict(strategy="zero1"), dict(strategy="ddp", optimizer="muon"), dict(strategy="zero1", dtype="float16")], ids=str
)
def test_one_rank_whose_gradient_is_not_finite_does_not_leave_the_others_waiting(train, flags):
    done = train.changed(POISONED_RANK, "alone", 2, steps=6, timeout_minutes=0.2, **flags)
    assert "step 3: the gradient is not finite, update skipped (1 in a row, 1 in all)" in done.stdout
    assert train.state("alone")["grad_scaler"].get("scale", 2**15) == 2**15  # float16's is halved on rank 0, too


def test_float8_is_refused_where_there_is_none():
    with pytest.raises(UserError, match="--fp8=true: this cpu device has no float8 products"):
        engine.use_float8(torch.nn.Module(), SimpleNamespace(device=torch.device("cpu")))


def test_float8_is_refused_without_the_compiler():
    config = settings.load(["--fp8=true"], "")  # which may still turn out to be compiled
    with pytest.raises(UserError, match="--fp8=true needs --compile=on.*ao#685"):
        rules.check(settings.replace(config, compile="off"), 1)


@pytest.mark.parametrize(
    "flags, said",
    [
        (dict(strategy="zero1", grad_compression="bf16"), "--grad_compression=bf16 is for --strategy=ddp, not zero1"),
        (dict(strategy="fsdp", optimizer="adamw", replicate=2), "--replicate=2 does not divide the number of ranks, 3"),
        (dict(strategy="ddp", replicate=3), "--replicate=3 is for --strategy=fsdp"),
        (dict(strategy="fsdp", optimizer="adamw", check_replicas_every=1), "--check_replicas_every"),
        (dict(replicate=0), "--replicate must be greater than 0"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, said):
    with pytest.raises(UserError) as refused:
        rules.check(settings.load(machine.arguments("", **TINY | flags)[1:], ""), 3)
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
    flags = dict(strategy="fsdp", replicate=2, optimizer="adamw", eval_every=0, steps=6, save_every=3)
    train.changed(members_only, "hybrid", 4, **flags)
    train("undisturbed", ranks=4, **flags)
    assert train.files("hybrid") == train.files("undisturbed")
