"""--numerics=portable: the same bits whatever the instructions, ranks, threads and micro-batches, and the right ones."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

from conftest import before_update, execute
from lockstep.numerics import portable
from lockstep.settings import ModelConfig, resolve_model
from model import GPT, RotaryTable, initial_weights

# What holds a processor to the instructions that every x86 has, in torch and in Intel's MKL.
SSE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
# Together all of a model and of its training. 12 sequences an update.
RUNS = {
    "gpt2": dict(architecture="gpt2", gelu="erf", dropout=0.1, attend="document", grad_clip=0.5, order="sequential"),
    "llama": dict(architecture="llama", n_head=4, n_kv_head=2, rope_scaling="8,1,4,8", tie_embeddings=False, seq_len=48),
    "qwen3": dict(n_kv_head=1, optimizer="muon", schedule="wsd", activation_checkpointing=True),
}
FLAGS = dict(numerics="portable", steps=6, eval_every=3, save_every=3, tokens_per_update=192)


def flags(name, tokens):
    sizes = dict(tokens_per_update=12 * RUNS[name].get("seq_len", 16), tokens=f"{tokens}:0.75,{tokens}:0.25")
    return FLAGS | RUNS[name] | sizes | dict(eval_tokens=40 * RUNS[name].get("seq_len", 16))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_same_bits_and_records_at_sse_after_a_kill_and_on_three_ranks(train, tokens, name):
    train("one", **flags(name, tokens))
    execute(train.command("sse", **flags(name, tokens), micro_batch_size=3), env=SSE, fork=False)
    train.assert_same("sse", "one")
    train.kill("killed", 4, **flags(name, tokens), micro_batch_size=4)
    train("killed", ranks=3, strategy="exact", **flags(name, tokens))
    train.assert_same("killed", "one")


def test_two_threads_have_the_bits_of_one(train):
    wide = FLAGS | dict(
        n_embd=96, d_ff=256, seq_len=160, tokens_per_update=320, steps=2, eval_tokens=640
    )  # tensors that torch divides
    for threads in (1, 2):
        # Threads that sleep while they wait: a busy machine has no second core for them.
        env = {"OMP_WAIT_POLICY": "PASSIVE", "MKL_NUM_THREADS": str(threads)}
        execute(train.command(f"threads{threads}", **wide, threads=threads), env=env, fork=False)
    train.assert_same("threads2", "threads1")


def test_samples_evaluations_and_replays_are_the_same_at_sse(train):
    train("run", **FLAGS | RUNS["llama"] | dict(seq_len=16, eval_every=0))
    at = train.latest("run")
    sample = [sys.executable, "sample.py", at, "--prompt=def ", "--max_new_tokens=40", "--temperature=1.5"]
    for command in (sample, [sys.executable, "evaluate.py", at]):
        assert execute(command).stdout == execute(command, env=SSE, fork=False).stdout
    verified = execute([sys.executable, "replay.py", train.runs / "run", "--verify"], env=SSE, fork=False).stdout
    assert verified.endswith("step-00000006 follows from step-00000003\n")


def test_pretrained_weights_are_taken_and_a_loss_that_is_not_finite_is_found(train):
    train("first", **FLAGS | dict(steps=2))
    shape = dict(init_from=train.latest("first"), steps=2)
    train("on", **FLAGS | shape)
    execute(train.command("sse", **FLAGS | shape), env=SSE, fork=False)
    train.assert_same("sse", "on")
    code = "run.engine.module.norm.weight.data[0] = float('nan')"
    few = "from lockstep.reports import progress; progress.MOST_IN_A_ROW = 2"
    train.changed(few + before_update(1, code), "nan", **FLAGS, status=1)
    assert "step 2: skipped the update, because its gradient is not finite" in train.log("nan")


@pytest.mark.parametrize(
    "flag, words",
    [
        (dict(dtype="bfloat16"), "--numerics=portable needs --dtype=float32; leave out --dtype=bfloat16"),
        (dict(muon_dtype="bfloat16"), 'needs muon_dtype = "float32"; leave out muon_dtype = "bfloat16"'),
        (dict(compile="on"), "--numerics=portable needs --compile=off"),
        (dict(strategy="fsdp"), "--numerics=portable needs --strategy=exact"),
        (dict(ranks=2), "--numerics=portable needs --strategy=exact: under ddp"),
    ],
)
def test_what_is_not_portable_is_refused(train, flag, words):
    ranks = flag.get("ranks", 1)
    refused = execute(
        train.command("refused", **FLAGS | {k: v for k, v in flag.items() if k != "ranks"}),
        2,
        env={"RANK": "0", "WORLD_SIZE": str(ranks)},
    )
    assert words in refused.stderr


def test_auto_takes_what_portable_needs(train):
    train("auto", **FLAGS | dict.fromkeys(("dtype", "compile", "muon_dtype", "micro_batch_size"), "auto"))
    config = (train.runs / "auto" / "config.toml").read_text()
    assert all(
        f"\n{line}\n" in config
        for line in ('dtype = "float32"', 'compile = "off"', 'strategy = "exact"', "micro_batch_size = 1")
    )


def dense(limit=math.inf, step=9973):
    """Every `step`-th float32 from the smallest subnormal to `limit`, and their negatives."""
    last = int(torch.tensor(min(limit, 3.4e38)).view(torch.int32))
    x = torch.arange(1, last, step, dtype=torch.int32).view(torch.float32)
    return torch.cat((-x, x))


def probability(x):
    return torch.special.erfc(-x * math.sqrt(0.5)) / 2


@pytest.mark.parametrize(
    "function, exact, limit",
    [
        (portable.exp, torch.exp, math.inf),
        (lambda x: portable.log(x.abs()), lambda x: x.abs().log(), math.inf),
        (lambda x: portable.inverse_root(x.abs()), lambda x: x.abs().sqrt().reciprocal(), math.inf),
        (portable.sin, torch.sin, 2.0**20),
        (portable.cos, torch.cos, 2.0**20),
        (lambda x: portable.gated(x, 1.0, 0.0)[0], lambda x: x / (1 + (-x).exp()), 1e37),
        (lambda x: portable.gated(x, 1.6, 0.07)[0], lambda x: x / (1 + (-1.6 * x - 0.07 * x * x * x).exp()), 1e10),
        (lambda x: portable.normal_gated(x)[0], lambda x: x * probability(x), 1e10),
    ],
    ids=["exp", "log", "inverse_root", "sin", "cos", "silu", "gelu", "gelu_erf"],
)
def test_functions_are_within_one_unit_in_the_last_place(function, exact, limit):
    x = dense(limit).double()
    found, wanted = function(x).float(), exact(x)
    unit = torch.ldexp(torch.ones_like(wanted), torch.frexp(wanted.abs().clamp(min=2.0**-126))[1] - 24)
    finite = wanted.abs() < 3.4e38
    assert ((found.double() - wanted).abs() / unit)[finite].max() < 0.55
    assert torch.isinf(found[~finite]).all()
    assert portable.exp(torch.tensor([-math.inf, 0.0]).double()).float().tolist() == [0.0, pytest.approx(1, abs=1e-10)]


@pytest.mark.parametrize("length, error", [(1024, 3e-6), (1 << 17, 5e-4)])  # float32 angles err by 3e-5 and 4e-3
def test_rotary_tables_are_accurate_far_into_a_context(length, error):
    config = resolve_model(ModelConfig(architecture="llama", n_embd=192, n_head=2, seq_len=length), 256)
    table = RotaryTable(config, portable).table[:, :, 0].double()
    exponents = (torch.arange(0, 96, 2).float() / 96).double()  # rounded to float32, as in transformers
    angles = torch.outer(torch.arange(length).double(), config.rope_theta**-exponents)
    assert (table - torch.stack((angles.cos(), angles.sin()))).abs().max() < error


@pytest.mark.parametrize("k", [1, 5, 192, 1000, portable.TERMS + 3, 50304])
def test_products_are_as_exact_as_said_and_do_not_depend_on_order(k):
    generator = torch.Generator().manual_seed(k)
    a, b = (torch.randn(shape, generator=generator).exp2() * 10.0 ** -torch.arange(3.0)[:, None] for shape in ((3, k), (3, k)))
    a[:, ::2] *= -1
    found, wanted = portable.product(a, b.T), a.double() @ b.double().T
    bound = k * a.abs().amax(1, keepdim=True).double() * b.abs().amax(1) * 2.0**-18
    assert ((found - wanted).abs() <= bound + wanted.abs() * 2.0**-24).all()
    order = torch.randperm(min(k, portable.TERMS), generator=generator)
    shuffled = torch.cat((order, torch.arange(len(order), k)))
    assert torch.equal(portable.product(a[:, shuffled], b[:, shuffled].T), found)
    assert torch.equal(portable.total(a[:, shuffled.flip(0)], 1), portable.total(a, 1))


def compare(ours, reference, *inputs, rtol=3e-6):
    """Values and gradients are those of float64's autograd."""
    results = []
    for function, dtype in ((ours, torch.float32), (reference, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        value = function(*leaves)
        (value * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(dtype)).sum().backward()
        results.append([value, *(leaf.grad for leaf in leaves)])
    for mine, wanted in zip(*results, strict=True):
        assert (mine - wanted).abs().max() <= rtol * wanted.abs().max()


def test_gradients_are_those_of_autograd_in_float64():
    def random(*shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))

    def grouped(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def later(q, k, v):
        mask = torch.ones(5, 300, dtype=torch.bool).tril(295)
        return F.scaled_dot_product_attention(q, k, v, mask)

    targets = torch.arange(48) % 40
    layers = [torch.nn.Linear(24, 8), torch.nn.Linear(24, 16)]

    def linear(x, *weights):
        for layer, weight, bias in zip(layers, weights[::2], weights[1::2], strict=True):
            layer.weight, layer.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
        return torch.cat(portable.linears(x, layers), -1)

    compare(portable.attention, grouped, random(2, 4, 300, 8), random(2, 2, 300, 8), random(2, 2, 300, 8))
    compare(portable.attention, later, random(1, 2, 5, 8), random(1, 2, 300, 8), random(1, 2, 300, 8))
    compare(portable.silu, F.silu, random(4, 500) * 9)
    compare(portable.gelu, lambda x: F.gelu(x, approximate="tanh"), random(4, 500) * 5)
    compare(portable.gelu_erf, F.gelu, random(4, 500) * 5)
    compare(portable.logits, F.linear, random(3, 16, 24), random(40, 24))
    compare(
        lambda x: linear(x, random(8, 24), random(8), random(16, 24), random(16)),
        lambda x: torch.cat(
            (
                F.linear(x, random(8, 24).double(), random(8).double()),
                F.linear(x, random(16, 24).double(), random(16).double()),
            ),
            -1,
        ),
        random(3, 16, 24),
    )
    compare(
        lambda x, w: portable.linear_cross_entropy(x, w, targets, portable.cross_entropy_part),
        lambda x, w: F.cross_entropy(x @ w.T, targets),
        *(random(48, 24), random(40, 24)),
    )
    compare(lambda w: portable.embed(targets.view(4, 12), w), lambda w: F.embedding(targets.view(4, 12), w), random(40, 24))
    norm = portable.LayerNorm(24)

    def layer_norm(x, weight, bias):
        return portable.Normalize.apply(x, norm.eps, True) * portable.repeat(weight, x) + portable.repeat(bias, x)

    compare(layer_norm, lambda x, w, b: F.layer_norm(x, (24,), w, b), random(3, 16, 24), random(24), random(24))


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen2", "qwen3"])
def test_a_model_has_native_s_losses_and_gradients(architecture):
    config = resolve_model(ModelConfig(architecture, n_layer=2, n_head=4, n_embd=64, seq_len=160), 120)
    tokens = torch.arange(2 * 161).view(2, 161) * 7 % 120
    models = [GPT(config, document_token=3, numerics=numerics) for numerics in ("native", "portable")]
    weights, losses = dict(initial_weights(models[1], seed=0)), []
    for model in models:
        model.load_state_dict(weights)
        losses.append(model(tokens[:, :-1], tokens[:, 1:]))
        losses[-1].backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for (name, mine), other in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert (mine.grad - other.grad).abs().max() <= 2e-5 * other.grad.abs().max() + 1e-9, name
    spread = weights["embed.weight"] / 0.02
    assert abs(spread.mean()) < 0.05 and spread.std().item() == pytest.approx(1, abs=0.03)


def test_adamw_and_muon_are_those_of_native_runs(train):
    for optimizer, dtype in (("adamw", {}), ("muon", {"muon_dtype": "float32"})):
        train(f"native-{optimizer}", steps=1, optimizer=optimizer, strategy="exact", save_every=1, **dtype)
        start = dict(resume=train.runs / f"native-{optimizer}", optimizer=optimizer, steps=4, lr=1e-3) | dtype
        for numerics in ("native", "portable"):
            train(f"{numerics}-{optimizer}-on", **start, numerics=numerics, strategy="exact")
        native, own = (train.weights(f"{numerics}-{optimizer}-on") for numerics in ("native", "portable"))
        assert max((native[name] - own[name]).abs().max() for name in native) < 1e-4
