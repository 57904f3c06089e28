"""The pieces with a backward of their own against autograd's."""

import pytest
import torch
import torch.nn.functional as F

import kernels
from model import Linear


def check(ours, reference, *inputs: torch.Tensor, atol: float = 1e-5) -> None:
    """Both give the same values, and the same gradients of a random projection of them."""
    results = []
    for function in (ours, reference):
        leaves = [x.clone().requires_grad_() for x in inputs]
        value = function(*leaves)
        weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        (value.float() * weights).sum().backward()
        results.append([value, *(leaf.grad for leaf in leaves)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, atol=atol, rtol=atol)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 16)])
def test_rms_norm(shape):
    weight = 1 + random(shape[-1], scale=0.3)
    check(
        lambda x, w: kernels.rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), random(*shape, scale=3), weight
    )


def test_rms_norm_of_zeros_is_finite():
    x = torch.zeros(2, 8, requires_grad=True)
    kernels.rms_norm(x, torch.ones(8), 1e-6).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_norm_and_rotate():
    angles = random(8, 8)
    rope = torch.stack((angles.cos(), angles.sin()))[:, :, None]
    check(
        lambda x, w: kernels.norm_and_rotate(x, w, 1e-6, rope),
        lambda x, w: kernels.rotate(F.rms_norm(x, w.shape, w, 1e-6), rope),
        random(3, 8, 4, 16, scale=3),
        1 + random(16, scale=0.3),
    )


@pytest.mark.parametrize("rows", [1, 7, 30, 100])
def test_cross_entropy_in_parts(rows):
    targets = torch.randint(0, 50, (30,), generator=torch.Generator().manual_seed(0))
    check(
        lambda x, w: kernels.LinearCrossEntropy.apply(x, w, targets, rows, True),
        lambda x, w: F.cross_entropy(x @ w.T, targets),
        random(30, 16),
        random(50, 16),
    )


def test_cross_entropy_in_bfloat16_has_float32_gradients_of_the_weights():
    x, weight, targets = random(40, 32).requires_grad_(), random(300, 32, scale=0.2).requires_grad_(), torch.arange(40)
    with torch.autocast("cpu", torch.bfloat16):
        loss = kernels.linear_cross_entropy(x, weight, targets)
    loss.backward()
    mine, weight.grad = weight.grad, None
    F.cross_entropy(x @ weight.T, targets).backward()
    assert loss.dtype == mine.dtype == torch.float32
    torch.testing.assert_close(mine, weight.grad, atol=2e-3, rtol=0.02)


def test_cross_entropy_without_gradients_keeps_none():
    with torch.no_grad():
        loss = kernels.linear_cross_entropy(random(4, 8).requires_grad_(), random(9, 8), torch.arange(4))
    assert not loss.requires_grad


def test_the_logits_are_never_whole():
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    x, weight = random(4096, 4, scale=0.1).requires_grad_(), random(2048, 4).requires_grad_()
    with Watch():
        kernels.linear_cross_entropy(x, weight, torch.zeros(4096, dtype=torch.int64)).backward()
    assert largest <= 1 << 20 < 4096 * 2048


def test_gelu():
    check(kernels.Gelu.apply, lambda x: F.gelu(x, approximate="tanh"), torch.linspace(-12, 12, 501))


def test_add_bias():
    check(kernels.AddBias.apply, torch.add, random(30, 12), random(12))


def test_a_compiled_linear_layer_has_the_gradients_of_torchs():
    ours, torchs = Linear(12, 7), torch.nn.Linear(12, 7)
    torchs.load_state_dict(ours.state_dict())
    check(torch.compile(ours, backend="aot_eager"), torchs, random(3, 5, 12))
    torch.testing.assert_close(ours.bias.grad, torchs.bias.grad)
    torch.testing.assert_close(ours.weight.grad, torchs.weight.grad)
