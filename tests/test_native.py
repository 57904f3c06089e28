"""The operations of native.py against plain PyTorch: values and gradients."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

import machine  # noqa: F401  puts bench on the path
from lockstep import settings
from lockstep.hardware import device, footprint
from lockstep.numerics import attention, native
from watch import Watch


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("queries", [1, 5, 12])
def test_attention_is_causal_from_the_end(queries, heads, dtype):
    """The last queries of a longer context see what the formula with an explicit mask sees; in bfloat16 roughly."""

    def plain(q, k, v):
        k, v = (x.repeat_interleave(4 // heads, dim=1) for x in (k, v))
        later = torch.ones(queries, 12, dtype=torch.bool).triu(12 - queries + 1)
        return (q @ k.mT * 8**-0.5).masked_fill(later, float("-inf")).softmax(-1) @ v

    def ours(*inputs):
        return attention.attention(*(x.to(dtype) for x in inputs)).float()

    inputs = random(2, 4, queries, 8), random(2, heads, 12, 8), random(2, heads, 12, 8, scale=2)
    check(ours, plain, *inputs, atol=1e-5 if dtype is torch.float32 else 0.05)


def test_gelu_is_tanh_s_and_dropout_of_attention_drops_weights():
    check(native.Gelu.apply, lambda x: F.gelu(x, approximate="tanh"), torch.linspace(-12, 12, 501))
    ones = torch.ones(1, 1, 256, 16, dtype=torch.bfloat16)
    torch.manual_seed(0)
    dropped = attention.attention(ones, ones, ones, dropout_p=0.5)
    assert not torch.equal(dropped, ones)
    assert dropped[:, :, 128:].float().mean().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_on_a_cpu_is_random_and_repeats(compiled):
    """Elements are kept independently of their neighbors, of the same elements in other calls, and in exact repetition."""
    function = torch.compile(native.dropout) if compiled else native.dropout
    x = torch.ones(7, 28_561, requires_grad=True)  # no multiple of a vector's length
    torch.manual_seed(0)
    first, second = function(x, 0.2), function(x, 0.2)
    torch.manual_seed(0)
    assert torch.equal(function(x, 0.2), first)
    assert set(first.unique().tolist()) == {0.0, 1.25}
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(gradient, first)
    kept, other = ((y.detach().flatten() > 0).float() - 0.8 for y in (first, second))
    sigma = 0.16 * len(kept) ** -0.5  # of a mean of products; 0.4 instead of 0.16 for a mean
    assert abs(kept.mean()) < 4 * 0.4 / 0.16 * sigma
    assert abs((kept * other).mean()) < 4 * sigma
    for lag in (1, 2, 16, 256, 28_561, 65_536):
        assert abs((kept[lag:] * kept[:-lag]).mean()) < 5 * sigma
    assert native.dropout(x, 0.2, training=False) is x
    assert not native.dropout(x, 1 - 1e-12).any()  # the threshold still fits in 32 bits


def test_rms_norm_alone_and_with_rotation_and_of_zeros():
    def plain(x, weight):
        return F.rms_norm(x, weight.shape, weight, 1e-6)

    for shape in ((5, 48), (2, 3, 16)):
        weight = 1 + random(shape[-1], scale=0.3)
        check(lambda x, w: native.rms_norm(x, w, 1e-6), plain, random(*shape, scale=3), weight)
    rope = torch.stack((random(8, 8).cos(), random(8, 8).sin()))[:, :, None]
    rotated = random(3, 8, 4, 16, scale=3), 1 + random(16, scale=0.3)
    check(lambda x, w: native.norm_and_rotate(x, w, 1e-6, rope), lambda x, w: native.rotate(plain(x, w), rope), *rotated)
    x = torch.zeros(2, 8, requires_grad=True)
    native.rms_norm(x, torch.ones(8), 1e-6).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_subtracting_a_one_hot_matrix_is_adding_minus_one_at_the_targets(monkeypatch):
    """The two forms give the same bits: eager code touches one number of a row, compiled code compares all."""
    probabilities, targets = random(40, 300).softmax(1), torch.randint(300, (40,), generator=torch.Generator().manual_seed(0))
    scattered = native.subtract_one_hot(probabilities.clone(), targets)
    monkeypatch.setattr(native, "on_eager_cpu", lambda x: False)
    assert torch.equal(native.subtract_one_hot(probabilities.clone(), targets), scattered)
    assert torch.equal(scattered, probabilities - F.one_hot(targets, 300))


@pytest.mark.parametrize("rows", [1, 7, 30, 100])
def test_cross_entropy_in_parts(rows):
    targets = torch.randint(0, 50, (30,), generator=torch.Generator().manual_seed(0))
    check(
        lambda x, w: native.LinearCrossEntropy.apply(x, w, targets, rows, True, native.cross_entropy_part),
        lambda x, w: F.cross_entropy(x @ w.T, targets),
        random(30, 16),
        random(50, 16),
    )


def test_cross_entropy_in_bfloat16_has_float32_gradients_of_the_weights_and_none_where_none_are_wanted():
    x, weight, targets = random(40, 32).requires_grad_(), random(300, 32, scale=0.2).requires_grad_(), torch.arange(40)
    with torch.no_grad():
        assert not native.linear_cross_entropy(x, weight, targets).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        loss = native.linear_cross_entropy(x, weight, targets)
    loss.backward()
    mine, weight.grad = weight.grad, None
    F.cross_entropy(x @ weight.T, targets).backward()
    assert loss.dtype == mine.dtype == torch.float32
    torch.testing.assert_close(mine, weight.grad, atol=2e-3, rtol=0.02)


def test_the_gradient_of_the_weights_in_float16_is_finite_where_a_sum_over_the_rows_passes_65504():
    x, weight = torch.full((2048, 4), 64.0, requires_grad=True), torch.zeros(2, 4, requires_grad=True)
    targets = torch.zeros(2048, dtype=torch.int64)
    with torch.autocast("cpu", torch.float16):
        native.linear_cross_entropy(x, weight, targets).backward()
    assert torch.equal(weight.grad, torch.tensor([[-32.0], [32.0]]).expand(2, 4))  # each row adds 64 x (1/2 - is_target)


def test_the_logits_are_never_whole():
    x, weight = random(4096, 4, scale=0.1).requires_grad_(), random(2048, 4).requires_grad_()
    with Watch("cpu") as watch:
        native.linear_cross_entropy(x, weight, torch.zeros(4096, dtype=torch.int64)).backward()
    assert 4 << 20 <= watch.peak < 4 * 4096 * 2048 / 2  # bytes of a part, and of half the logits


@pytest.mark.parametrize("deterministic, order", [(False, attention.CUDNN_FIRST), (True, None)])
def test_the_fastest_attention_goes_first_where_bits_may_differ(monkeypatch, deterministic, order):
    orders, usual = [], torch._C._get_sdp_priority_order()

    def attend(q, *more, **options):
        orders.append(torch._C._get_sdp_priority_order())
        return torch.empty_like(q)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 16, device="cuda")
        attention.attention(q, q, q)
    assert orders[0][:3] == [int(kind) for kind in order][:3] if order else orders == [usual]
    assert torch._C._get_sdp_priority_order() == usual


@pytest.mark.parametrize("length", [1, 77, 256, 300, 1000])
@pytest.mark.parametrize("density", [0.5, 0.02, 0.004, 0])
def test_blocks_from_the_starts_of_documents_are_those_that_a_whole_mask_gives(length, density):
    starts = torch.rand(3, length, generator=torch.Generator().manual_seed(length)) < density
    starts = torch.where(starts, torch.arange(length), 0).cummax(1).values

    def seen(b, h, query, key):
        return (key <= query) & (key >= starts[b, query])

    ours, whole = attention.document_blocks(starts), create_block_mask(seen, 3, None, length, length, device="cpu")
    assert ours.seq_lengths == whole.seq_lengths and ours.BLOCK_SIZE == whole.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):  # of queries and of keys, seen in part and seen whole
        (count, found), (expected_count, expected) = (
            (getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")) for mask in (ours, whole)
        )
        assert torch.equal(count, expected_count) and count.dtype == expected_count.dtype
        used = torch.arange(found.shape[-1]) < count[..., None]
        assert found.dtype == expected.dtype and torch.equal(found.where(used, -1), expected.where(used, -1))


def test_blocks_of_a_long_context_take_the_memory_that_is_planned():
    """131,072 tokens: a mask of them would take 17 GB."""
    config = settings.replace(settings.Config(), attend="document", seq_len=1 << 17)
    starts = torch.zeros(1, 1 << 17, dtype=torch.int64)
    with Watch("cpu") as watch:
        mask = attention.document_blocks(starts)
    held = sum(tensor.nbytes for tensor in mask.as_tuple() if isinstance(tensor, torch.Tensor))
    assert held == pytest.approx(footprint.document_mask(config, "cuda"), rel=0.01) and watch.peak < 10 * held


@pytest.mark.parametrize(
    "hip, capability, deterministic, flexible",
    [
        (None, (8, 0), True, True),
        ("7.2", (9, 4), True, False),
        ("7.2", (9, 4), False, True),
        (None, (7, 5), False, False),
    ],
)
def test_gpus_take_a_mask_where_flexattention_does_not_work_or_repeat(monkeypatch, hip, capability, deterministic, flexible):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    blocks = []
    monkeypatch.setattr(attention, "document_blocks", blocks.append)
    with FakeTensorMode(), contextlib.suppress(RuntimeError):  # where torch has no CUDA it makes no mask there
        attention.document_mask(torch.zeros(2, 256, dtype=torch.int64, device="cuda"), torch.bfloat16, 0.0)
    assert bool(blocks) == flexible
    config = settings.replace(settings.Config(), attend="document", deterministic=deterministic, dtype="float16")
    assert footprint.uses_flex(config, device.kind(torch.device("cuda"))) == flexible
    assert (footprint.document_mask(config, device.kind(torch.device("cuda"))) < config.model.seq_len**2) == flexible


@pytest.mark.parametrize("compiled, wide", [(False, True), (True, True), (False, False)])
def test_onednn_multiplies_as_pytorch_does(monkeypatch, compiled, wide):
    monkeypatch.setattr(native, "ONEDNN_IS_FASTER", torch.backends.mkldnn.is_available())
    monkeypatch.setattr(native, "ONEDNN_IS_WIDE", wide)
    layer, x, grad = native.Linear(24, 40), torch.randn(4, 16, 24, requires_grad=True), torch.randn(4, 16, 40)
    call = torch.compile(layer, dynamic=False) if compiled else layer
    (y := call(x)).backward(grad)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, layer.weight, layer.bias)]
    (expected := F.linear(*wide)).backward(grad.double())
    for found, wanted in zip((y, x.grad, layer.weight.grad, layer.bias.grad), (expected, *(w.grad for w in wide)), strict=True):
        assert found.dtype == torch.float32 and (found - wanted).abs().max() < 2e-5
    assert native.uses_onednn(x) == native.ONEDNN_IS_FASTER and not native.uses_onednn(x[:1, :4])
    with torch.autocast("cpu", torch.bfloat16):
        assert not native.uses_onednn(x)
