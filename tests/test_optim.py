"""The optimizers against torch's."""

import math

import pytest
import torch
from torch import nn

from lockstep import settings
from lockstep.numerics import optim
from model import GPT


@pytest.mark.parametrize(
    "schedule, rates",  # of updates 0, 1, 2, 6, 9 of 10, after 2 of warmup: peak 1, end 0.2
    [
        ("constant", [0.5, 1, 1, 1, 1]),
        ("cosine", [0.5, 1, 1, 0.6, 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 7 / 8))]),
        ("wsd", [0.5, 1, 1, 0.2 + 0.8 * 4 / 5, 0.2 + 0.8 * 1 / 5]),
    ],
)
def test_the_learning_rate_is_the_schedules(schedule, rates):
    config = settings.OptimConfig(lr=1.0, min_lr=0.2, warmup_steps=2, schedule=schedule, cooldown_fraction=0.5)
    assert [optim.learning_rate(step, 10, config) for step in (0, 1, 2, 6, 9)] == pytest.approx(rates)


def test_a_warmup_without_room_and_a_rate_that_jumps_are_told_in_one_line():
    def schedule(name, warmup=2, **more):
        return settings.resolve_schedule(settings.OptimConfig(lr=1.0, warmup_steps=warmup, schedule=name, **more), 100)

    for name in ("cosine", "wsd", "constant"):
        assert optim.warn_of_warmup(100, schedule(name, 80 if name == "wsd" else 99)) == []
        (said,) = optim.warn_of_warmup(100, schedule(name, 1000))
        assert said == "warning: --warmup_steps=1000 takes up all of the 100 steps; the learning rate ends at 0.1"
    (said,) = optim.warn_of_warmup(10, schedule("wsd", 9, cooldown_fraction=0.5))
    told = "warning: --warmup_steps=9 ends after the decay begins, at step 6; the learning rate falls from 1 to 0.2 at once"
    assert said == told

    def told_of_jump(done, before, now, old="cosine", new="cosine", **more):
        return optim.warn_of_jump(done, (before, schedule(old)), (now, schedule(new, **more)))

    (said,) = told_of_jump(20, 20, 40)
    assert said.startswith("warning: the learning rate jumps from 0.11 to 0.59 at step 21: the steps so far followed the")
    assert told_of_jump(100, 100, 200, "wsd", "wsd") and told_of_jump(90, 200, 100, "wsd", "wsd")
    assert told_of_jump(5, 10, 10) == told_of_jump(1, 10, 100) == told_of_jump(50, 100, 200, "constant", "constant") == []
    assert told_of_jump(50, 100, 60, "constant", "wsd", decay_steps=10) == told_of_jump(70, 100, 110, "wsd", "wsd") == []


def follow(ours, theirs, mine: list[nn.Parameter], others: list[nn.Parameter], atol: float) -> None:
    """Both make the same steps, and keep the same state, from the same gradients."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for p, q in zip(mine, others, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        for optimizer in (ours, theirs):
            optimizer.step()
    for p, q in zip(mine, others, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=atol)
        assert ours.state[p].keys() == theirs.state[q].keys()
        for key, value in ours.state[p].items():
            torch.testing.assert_close(value, theirs.state[q][key])


def parameters(shapes: list[tuple[int, ...]]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    mine = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return mine, [nn.Parameter(p.detach().clone()) for p in mine]


@pytest.mark.parametrize("shapes", [[(16, 16)] * 3 + [(48, 16)] * 2 + [(16, 48)], [(8, 24)]])
def test_muon_in_batches_is_torchs_muon(shapes):
    mine, others = parameters(shapes)
    theirs = torch.optim.Muon(others, lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    ours = optim.Muon([{"params": mine, "lr": 0.02, "weight_decay": 0.1}], momentum=0.9, dtype=torch.bfloat16)
    follow(ours, theirs, mine, others, atol=1e-4)  # an update is 0.016, and orthogonal in bfloat16


@pytest.mark.parametrize("dtype, error", [(torch.float64, 0), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_muons_iteration_is_as_near_to_the_same_matrix_as_its_precision_allows(dtype, error):
    matrices = list(torch.randn(5, 24, 40, generator=torch.Generator().manual_seed(0)))
    exact = optim.orthogonalize(matrices, torch.float64)()
    found = optim.orthogonalize(matrices, dtype)()
    assert found.dtype is dtype and (found - exact).abs().max() <= error
    singular = torch.linalg.svdvals(exact)
    assert singular.min() > 0.5 and singular.max() < 1.3  # its polynomial ends near 1, not at it


def test_adamw_is_torchs_adamw_bit_for_bit():
    mine, others = parameters([(16, 16), (7,), (300, 40)])
    theirs = torch.optim.AdamW(others, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1, fused=True)
    ours = optim.AdamW([{"params": mine, "lr": 0.02, "weight_decay": 0.1}], betas=(0.8, 0.95))
    follow(ours, theirs, mine, others, atol=0)


def test_a_parameter_without_gradient_stays():
    mine, _ = parameters([(4, 4), (4, 4)])
    before = mine[1].detach().clone()
    mine[0].grad = torch.ones(4, 4)
    optimizer = optim.AdamW([{"params": mine, "lr": 0.02, "weight_decay": 0.1}], betas=(0.8, 0.95))
    optimizer.step()
    assert torch.equal(mine[1], before) and mine[1] not in optimizer.state


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3"])
def test_weights_decay_but_norms_and_biases_do_not(architecture, optimizer):
    """Without a gradient, an update only decays."""
    config = settings.ModelConfig(architecture=architecture, n_layer=1, n_head=2, n_embd=32, seq_len=16)
    model = GPT(settings.resolve_model(config, 257))
    found = dict(model.named_parameters())
    for parameter in found.values():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    optim.build(found, settings.OptimConfig(optimizer=optimizer, lr=0.5, weight_decay=0.25, muon_dtype="float32")).step()
    assert {parameter.ndim for parameter in found.values()} == {1, 2}
    for name, parameter in found.items():
        assert (parameter == (1.0 if parameter.ndim == 1 else 0.875)).all(), name


def test_ranks_compute_the_matrices_of_a_shape_while_they_send_those_of_the_one_before(monkeypatch):
    """The products of a shape begin before the exchange of the one before is waited for, and no weight changes until then."""
    did = []

    def orthogonalize(matrices, dtype):
        shape = tuple(matrices[0].shape)
        did.append(("send", *shape))
        done = torch.stack([torch.ones_like(matrix) for matrix in matrices])
        return lambda: did.append(("received", *shape)) or done

    shapes = [(4, 4), (4, 8), (4, 4), (8, 4)]
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    group = {"params": weights, "lr": 0.1, "weight_decay": 0.0}
    optim.Muon([group], 0.9, torch.float32, orthogonalize).step()
    sent, received = ([(kind, *shape) for shape in ((4, 4), (4, 8), (8, 4))] for kind in ("send", "received"))
    assert did == [sent[0], sent[1], received[0], sent[2], received[1], received[2]]
    for weight in weights:
        torch.testing.assert_close(weight.data, torch.full_like(weight, -0.2 * 0.1 * max(weight.shape) ** 0.5))


def test_each_setting_reaches_its_optimizer():
    config = settings.OptimConfig(optimizer="muon", beta1=0.7, beta2=0.8, momentum=0.6, muon_dtype="float32")
    adamw, muon = optim.build({"blocks.0": nn.Parameter(torch.ones(2, 2)), "norm": nn.Parameter(torch.ones(2))}, config).parts
    assert (adamw.betas, muon.momentum, muon.dtype) == ((0.7, 0.8), 0.6, torch.float32)
