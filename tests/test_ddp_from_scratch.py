"""The from-scratch strategies on real ranks (gloo), against one process with the whole batch and torch's DDP."""

import contextlib
import datetime
import functools
from concurrent import futures

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import warm
from lockstep.parallel.exact import Exact
from lockstep.parallel.from_scratch import ScratchAllReduce, ScratchOverlap, ScratchReduceScatter

SMALL_BUCKETS = functools.partial(ScratchOverlap, bucket_mb=64 / 2**20)  # nearly a bucket a parameter
STRATEGIES = [
    pytest.param(ScratchAllReduce, id="allreduce"),
    pytest.param(ScratchReduceScatter, id="reduce_scatter"),
    pytest.param(ScratchOverlap, id="overlap"),
    pytest.param(SMALL_BUCKETS, id="overlap_small_buckets"),
]
SEQUENCES, ACCUMULATION, STEPS, LENGTH, VOCABULARY = 12, 2, 20, 6, 19
TIMEOUT = 150  # seconds for one collective


# Ranks: processes that stay for the whole file and run the functions they are sent ------------------------------------


def join(rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)


class Ranks:
    def __init__(self, world_size: int, store: str):
        self.pools = [
            futures.ProcessPoolExecutor(1, warm.SERVER, join, (rank, world_size, store)) for rank in range(world_size)
        ]

    def run(self, function, *args) -> list:
        """What `function(*args)` returned on each rank. Raises what it raised on one."""
        answers = [pool.submit(function, *args) for pool in self.pools]
        futures.wait(answers, 2 * TIMEOUT)
        return [answer.result(0) for answer in answers]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    started = {}

    def ranks(world_size: int) -> Ranks:
        if world_size not in started:
            started[world_size] = Ranks(world_size, str(tmp_path_factory.mktemp("store") / str(world_size)))
        return started[world_size]

    yield ranks
    for wait in (False, True):  # all end at once
        for each in started.values():
            for pool in each.pools:
                pool.shutdown(wait)


# Training, and what is compared ---------------------------------------------------------------------------------------


class Model(nn.Module):
    """Tied embeddings (one parameter used twice), a buffer, a frozen parameter and one that is never used."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.frozen = nn.Parameter(torch.full((width,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.down(nn.functional.gelu(self.norm(self.up(x * self.frozen))))
        return x @ self.embedding.weight.T / self.scale


def new_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def batch(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model, tokens) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def accumulate(model, tokens: torch.Tensor, accumulation: int = ACCUMULATION) -> float:
    """Forward and backward of one update; the mean loss."""
    total = 0.0
    for i, micro_batch in enumerate(tokens.chunk(accumulation)):
        model.require_backward_grad_sync = i == accumulation - 1
        loss = loss_of(model, micro_batch) / accumulation
        loss.backward()
        total += loss.item()
    return total


def train(model: nn.Module, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Losses (this rank's), gradients before clipping and final weights of 20 updates."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    losses, gradients = [], []
    for step in range(STEPS):
        losses.append(accumulate(model, batch(step).chunk(world_size)[rank]))
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)  # both ways
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": torch.tensor(losses), "gradients": torch.stack(gradients), "weights": weights}


def check_lockstep(strategy) -> None:
    """Training with `strategy` gives the losses, gradients and weights of one process, and of torch's DDP."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = train(new_model(), 0, 1)
    torchs = train(DistributedDataParallel(new_model(), find_unused_parameters=True), rank, world_size)
    ours = train(strategy(new_model()), rank, world_size)
    for result in (torchs, ours):
        dist.all_reduce(result["losses"].div_(world_size))
        replica = result["weights"].clone()
        dist.broadcast(replica, 0)
        assert torch.equal(replica, result["weights"]), "the replicas are no longer equal"
    tolerance = {"losses": 1e-5, "gradients": 1e-5, "weights": 1e-4}
    for expected in (whole, torchs):
        for name, atol in tolerance.items():
            message = f"{name}: {{}}".format
            torch.testing.assert_close(ours[name], expected[name], atol=atol, rtol=1e-4, msg=message)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_one_process_and_as_torch_ddp(start, strategy):
    start(3).run(check_lockstep, strategy)


class ForgetsToDivide(ScratchAllReduce):
    def average_gradients(self):
        for parameter in self.trainable:
            dist.all_reduce(parameter.grad)


class ForgetsToSend(ScratchAllReduce):
    def average_gradients(self):
        pass


@pytest.mark.parametrize("broken", [ForgetsToDivide, ForgetsToSend])
def test_the_same_check_fails_a_broken_strategy(start, broken):
    with pytest.raises(AssertionError, match=r"gradients|weights|losses|replicas"):
        start(2).run(check_lockstep, broken)


# When it communicates -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded_collectives():
    """A list that gets the name of every collective in the block."""
    events = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all_single"):
            original = getattr(dist, name)

            def collective(*args, name=name, original=original, **kwargs):
                events.append(name)
                return original(*args, **kwargs)

            patch.setattr(dist, name, collective)
        yield events


def collectives_of_an_update(strategy, accumulation: int) -> list[str]:
    model = strategy(new_model())
    with recorded_collectives() as events:
        accumulate(model, batch(0).chunk(dist.get_world_size())[dist.get_rank()], accumulation)
    return events


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (ScratchAllReduce, ["all_reduce"] * 7),  # 7 trainable parameters
        (ScratchReduceScatter, ["reduce_scatter", "all_gather"]),
        (ScratchOverlap, ["all_reduce"]),
    ],
)
def test_accumulation_communicates_once(start, strategy, expected):
    census = ["all_reduce"]  # which parameters have a gradient anywhere
    for accumulation in (1, 3):
        for events in start(2).run(collectives_of_an_update, strategy, accumulation):
            assert events == expected + census


def local_and_synced_gradients(strategy) -> tuple:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = batch(0).chunk(world_size)[rank]
    plain = new_model()
    loss_of(plain, mine).backward()
    model = strategy(new_model())
    with model.no_sync():
        loss_of(model, mine).backward()
    assert model.require_backward_grad_sync
    torch.testing.assert_close(model.module.up.weight.grad, plain.up.weight.grad)  # this rank's own
    model.sync_gradients()
    synced = model.module.up.weight.grad.clone()
    model.disable_grad_sync()
    model.module.zero_grad()
    loss_of(model, mine).backward()
    torch.testing.assert_close(model.module.up.weight.grad, plain.up.weight.grad)
    model.module.zero_grad()
    loss = loss_of(model, mine)  # the switch is read by the forward, as in DDP
    model.enable_grad_sync()
    with torch.no_grad():
        loss_of(model, mine)  # an evaluation decides nothing
    loss.backward()
    torch.testing.assert_close(model.module.up.weight.grad, plain.up.weight.grad)
    model.module.zero_grad()
    loss_of(model, mine).backward()
    return plain.up.weight.grad, synced, model.module.up.weight.grad


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_sync_keeps_gradients_local_until_they_are_synced(start, strategy):
    answers = start(2).run(local_and_synced_gradients, strategy)
    mean = (answers[0][0] + answers[1][0]) / 2
    assert not torch.allclose(answers[0][0], answers[1][0])
    for _, by_hand, by_backward in answers:
        torch.testing.assert_close(by_hand, mean)
        torch.testing.assert_close(by_backward, mean)


def events_of_a_backward(strategy) -> list[str]:
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    with recorded_collectives() as events:
        for i, layer in enumerate(layers):
            layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: events.append(f"gradient {i}"))
        model = strategy(layers)
        events.clear()  # those of the construction
        model(torch.randn(4, 8)).sum().backward()
    return events


def exact_in_small_buckets(module):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.parallel.exact.BUCKET_MB", 288 / 2**20)
        return Exact(module, micro_batches=2)


def test_overlap_sends_while_backward_is_running(start):
    for events in start(2).run(events_of_a_backward, functools.partial(ScratchOverlap, bucket_mb=288 / 2**20)):
        assert events.index("all_reduce") < events.index("gradient 4")  # layer 5 is under way
        assert events.count("all_reduce") == 6 + 1  # a bucket a layer, and the census
    for events in start(2).run(events_of_a_backward, exact_in_small_buckets):
        assert events.index("all_to_all_single") < events.index("gradient 4")
        assert events.count("all_to_all_single") == 6 and events.count("all_reduce") == 1  # of the largest gradients
    for events in start(2).run(events_of_a_backward, ScratchAllReduce):
        assert events.index("all_reduce") > events.index("gradient 0")


def ready_at_send(strategy, width: int) -> list[int]:
    model = strategy(nn.Sequential(*[nn.Linear(width, width) for _ in range(6)]))
    for _ in range(2):  # of the last update
        model(torch.ones(1, width)).sum().backward()
    return model.ready_at_send


def test_the_gradients_ready_at_each_send_can_be_asked_and_a_small_model_has_two_buckets(start):
    a_layer_each = functools.partial(ScratchOverlap, bucket_mb=288 / 2**20)
    assert start(2).run(ready_at_send, a_layer_each, 8) == [[2, 4, 6, 8, 10, 12]] * 2
    assert start(2).run(ready_at_send, ScratchOverlap, 512) == [[2, 12]] * 2  # 1 MB a layer


# How replicas start ---------------------------------------------------------------------------------------------------


def construction_error(seeds: list[int], width: list[int], spoil: str) -> str:
    rank = dist.get_rank()
    torch.manual_seed(seeds[rank])
    model = Model(width[rank])
    if spoil:
        model.get_buffer(spoil).add_(rank == dist.get_world_size() - 1)
    try:
        ScratchAllReduce(model)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("seeds", "width", "spoil", "message"),
    [
        ([0, 1, 1], [24, 24, 24], "", "embedding.weight differs between ranks [0] and the other 2"),
        ([0, 0, 0], [24, 24, 8], "", "frozen differs between ranks [2] and the other 2"),
        ([0, 0, 0], [24, 24, 24], "scale", "scale differs between ranks [2] and the other 2"),
        ([0, 1, 2], [24, 24, 24], "", "embedding.weight differs between ranks [0], [1] and the other 1"),
        ([0, 1], [24, 24], "", "embedding.weight differs between ranks [0] and the other 1"),
    ],
    ids=["rank_0", "shape", "buffer", "all", "two_ranks"],
)
def test_unequal_replicas_are_refused_on_all_ranks(start, seeds, width, spoil, message):
    errors = start(len(seeds)).run(construction_error, seeds, width, spoil)
    assert len(set(errors)) == 1
    assert message in errors[0]


def state_after_construction(strategy) -> dict:
    model = new_model(seed=dist.get_rank())
    model.scale.add_(dist.get_rank())
    return strategy(model).state_dict()


@pytest.mark.parametrize("strategy", STRATEGIES[1:])  # the first refuses unequal replicas
def test_other_strategies_start_from_rank_0(start, strategy):
    first, second = start(2).run(state_after_construction, strategy)
    assert list(first) == [f"module.{name}" for name in new_model().state_dict()]  # as DDP's
    for name, tensor in new_model(seed=0).state_dict().items():
        assert torch.equal(first[f"module.{name}"], tensor) and torch.equal(second[f"module.{name}"], tensor)


# Parameters of all kinds ----------------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """Rank r uses only expert r, and none the last. Three dtypes; one without dimensions, one not contiguous, some frozen."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.brain = nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(4, 3).T)
        self.wide = nn.Parameter(torch.randn((), dtype=torch.float64))

    def forward(self, x, expert):
        x = self.frozen(self.experts[expert](x))
        return (x @ self.brain.float() @ (self.turned * self.wide.float())).square().sum()


def gradients_of_all_kinds(strategy) -> tuple:
    """This rank's own gradients, and the averaged ones."""
    gradients = []
    for wrap in (lambda module: module, strategy):
        torch.manual_seed(0)
        model = wrap(kinds := Kinds())
        for _ in range(2):  # a bucket keeps nothing of the update before
            kinds.zero_grad()
            model(torch.ones(2, 4), dist.get_rank()).backward()
        gradients.append([p.grad for p in kinds.parameters()])
    return tuple(gradients)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_of_all_kinds_have_the_mean_and_unused_ones_count_as_zero_or_keep_none(start, strategy):
    answers = start(3).run(gradients_of_all_kinds, strategy)
    for i in range(len(answers[0][0])):
        own = [plain[i] for plain, _ in answers if plain[i] is not None]
        for _, ours in answers:
            assert (ours[i] is None) == (not own)
            if own:
                assert ours[i].dtype == own[0].dtype
                torch.testing.assert_close(ours[i], sum(own) / 3)


# Together with the rest of torch --------------------------------------------------------------------------------------


def check_compiled(strategy, where: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = batch(0).chunk(world_size)[rank]
    eager = strategy(new_model())
    accumulate(eager, mine)
    if where == "inside":
        model = outer = strategy(torch.compile(new_model(), backend="aot_eager", fullgraph=True))
    else:
        outer = strategy(new_model())
        model = torch.compile(outer, backend="aot_eager", fullgraph=True)
    accumulate(model, mine)  # torch.compile passes require_backward_grad_sync on to what it wraps
    for p, expected in zip(outer.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "where, strategy", [("inside", ScratchOverlap), ("outside", SMALL_BUCKETS), ("outside", ScratchReduceScatter)]
)
def test_compiled(start, strategy, where):
    start(2).run(check_compiled, strategy, where)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_process_group_nothing_changes(strategy):
    assert not dist.is_initialized()
    plain, model = train(new_model(), 0, 1), train(strategy(new_model()), 0, 1)
    for name in plain:
        assert torch.equal(plain[name], model[name])
    strategy(new_model()).sync_gradients()
