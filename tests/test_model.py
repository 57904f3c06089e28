"""model.py against transformers: logits, loss, generation; the cache, initialization and what is counted."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.utils.checkpoint
import transformers
from torch.utils.flop_counter import FlopCounterMode

from conftest import randomized
from lockstep.checkpoints import huggingface
from lockstep.hardware.footprint import flops_per_token
from lockstep.numerics import native
from lockstep.settings import ModelConfig, resolve_model
from model import GPT, generate, initial_weights, new_cache

SHAPES = {
    "gpt2": ModelConfig(architecture="gpt2", n_layer=2, n_head=4, n_embd=32, seq_len=24),
    "llama": ModelConfig(architecture="llama", n_layer=2, n_head=4, n_embd=32, seq_len=24, rope_theta=5000.0),
    "llama_gqa": ModelConfig(architecture="llama", n_layer=2, n_head=4, n_kv_head=2, n_embd=32, seq_len=24),
    "qwen2": ModelConfig(architecture="qwen2", n_layer=2, n_head=4, n_kv_head=2, n_embd=32, seq_len=24),
    "qwen3": ModelConfig(architecture="qwen3", n_layer=2, n_head=4, n_kv_head=1, n_embd=64, seq_len=24, tie_embeddings=False),
}


def build(shape, **changes):
    return randomized(GPT(resolve_model(dataclasses.replace(SHAPES[shape], **changes), 90)).eval(), 0.15)


def reference(model):
    """The same model in transformers."""
    config = transformers.AutoConfig.for_model(**huggingface.config_json(model.config, eot_token=0))
    other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    loaded = other.load_state_dict(huggingface.to_hf(model.state_dict(), model.config), strict=False)
    assert not loaded.unexpected_keys and set(loaded.missing_keys) <= {"lm_head.weight"}
    return other


def tokens_of(batch=2, length=24, seed=2):
    return torch.randint(90, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_loss_gradients_and_size_are_those_of_transformers(shape):
    model = build(shape)
    tokens, other = tokens_of(), reference(model)
    assert model.parameter_count() == other.num_parameters()  # tied weights once
    expected = other(tokens).logits
    assert expected.std() > 0.3
    assert (model(tokens) - expected).abs().max() < 1e-5 * max(1, expected.abs().max())
    loss, other_loss = model(tokens[:, :-1], tokens[:, 1:]), other(tokens, labels=tokens).loss
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(other_loss.item(), rel=1e-6)
    loss.backward()
    other_loss.backward()
    ours = huggingface.to_hf({name: p.grad for name, p in model.named_parameters()}, model.config)
    theirs = dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_cache_gives_the_last_logits_of_the_full_forward_for_every_split(shape):
    model, tokens = build(shape), tokens_of(length=9)
    expected = model(tokens)
    for split in range(1, 9):
        cache = new_cache(model.config, model.config.seq_len)
        parts = [model(part, cache=cache) for part in (tokens[:, :split], tokens[:, split:])]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected[:, [split - 1, 8]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_generation_is_that_of_transformers(shape):
    model, prompt = build(shape), tokens_of(length=5)
    ours = torch.stack(list(generate(model, prompt, 18, temperature=0)), dim=1)
    ignore_end = transformers.GenerationConfig(do_sample=False, max_new_tokens=18, eos_token_id=None, pad_token_id=0)
    theirs = reference(model).generate(prompt, generation_config=ignore_end, attention_mask=torch.ones_like(prompt))
    assert torch.equal(ours, theirs[:, 5:])


def test_generation_slides_past_the_context_from_its_last_half():
    model, prompt = build("llama", seq_len=8), tokens_of(batch=1, length=30)
    drawn = torch.cat(list(generate(model, prompt, 20, temperature=0)))
    with torch.no_grad():
        first = model(prompt[:, -8:])[0, -1].argmax()
        second = model(torch.cat((prompt[:, -3:], first[None, None]), dim=1))[0, -1].argmax()
    assert len(drawn) == 20 and drawn[:2].tolist() == [first.item(), second.item()]


def test_generation_is_repeated_by_its_seed_keeps_to_top_k_and_the_vocabulary_and_ends_with_end_of_text():
    model, prompt = build("gpt2"), tokens_of(batch=2, length=4)

    def draw(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        return torch.stack(list(generate(model, prompt, 40, generator=generator, **options)), dim=1)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(draw(1, top_k=1), draw(2, temperature=0))
    assert draw(1, temperature=50.0).max() >= 90  # a padded row of the vocabulary, which is 128 long
    assert draw(1, temperature=50.0, vocab_limit=3).max() < 3
    free = torch.cat(list(generate(model, prompt[:1], 12, temperature=0))).tolist()
    eot = free[5]
    assert torch.cat(list(generate(model, prompt[:1], 12, temperature=0, eot=eot))).tolist() == free[: free.index(eot) + 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_autocast_is_close_to_float32_and_its_loss_is_float32(shape, dtype):
    model, tokens = build(shape), tokens_of()
    expected = model(tokens[:, :-1], tokens[:, 1:])
    with torch.autocast("cpu", dtype):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=2e-2)
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.fixture
def quick_compiler(monkeypatch):
    """torch.compile that traces, guards and differentiates as always but generates no code, which takes long."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_blocks_share_one_compilation_and_are_eager_up_to_rounding(quick_compiler, shape, dtype):
    eager, compiled = build(shape, n_layer=4), build(shape, n_layer=4)
    compiled.compile_blocks()
    autocast = torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16)
    for seed in (2, 3):
        tokens = tokens_of(batch=256 // 23 + 1, seed=seed)  # the loss takes them in two parts
        losses = []
        for model in (eager, compiled):
            with autocast:
                losses.append(model(tokens[:, :-1], tokens[:, 1:]))
            losses[-1].backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5 if dtype is torch.float32 else 1e-2)
    tolerance = dict(rtol=1e-4, atol=1e-6) if dtype is torch.float32 else dict(rtol=0.1, atol=0.02)
    for ours, plain in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, **tolerance)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]  # a block, a part of the loss
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert compiled(tokens, tokens) == eager(tokens, tokens)
    assert counters["stats"]["unique_graphs"] == 2


def test_recomputed_activations_of_compiled_blocks_give_the_same_gradients(quick_compiler):
    """With dropout too: a block draws the same numbers when it is computed again, on another thread as with a GPU."""
    gradients = []
    for again in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = build("gpt2", n_layer=4, dropout=0.3).train()
        model.compile_blocks()
        if again:
            model.checkpoint_activations()
        tokens = tokens_of()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, tokens)
        ThreadPoolExecutor(1).submit(loss.backward).result()
        gradients.append([p.grad for p in model.parameters()])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # a block, a part of the loss
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_dropout_acts_in_training_only_and_zero_is_deterministic():
    tokens = tokens_of()
    for shape in SHAPES:
        model = build(shape, dropout=0.5)
        assert torch.equal(model(tokens), model(tokens))
        model.train()
        assert not torch.equal(model(tokens), model(tokens))
        model = build(shape).train()
        assert torch.equal(model(tokens), model(tokens))


def test_initialization_is_that_of_gpt2_and_depends_on_the_seed_alone():
    config, drawn = resolve_model(SHAPES["gpt2"], 90), []
    for device, state, seed in (("cpu", 1, 7), ("meta", 2, 7), ("cpu", 1, 8)):
        torch.manual_seed(state)
        with torch.device(device):
            drawn.append(dict(initial_weights(GPT(config), seed)))
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    assert not torch.equal(drawn[0]["embed.weight"], drawn[2]["embed.weight"])
    model = GPT(resolve_model(ModelConfig(architecture="gpt2", n_layer=8, n_head=4, n_embd=128, seq_len=128), 1000))
    for name, value in initial_weights(model, seed=0):
        if value.ndim == 1:
            assert value.unique().tolist() == [0.0 if name.endswith("bias") else 1.0]
        else:
            expected = 0.02 / 4 if name.endswith(("attn.o.weight", "mlp.down.weight")) else 0.02
            assert value.std().item() == pytest.approx(expected, rel=0.03), name


def test_rotary_table_survives_meta_and_is_never_rounded():
    config = resolve_model(SHAPES["llama"], 90)
    expected = GPT(config).rope.table
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu").to(torch.bfloat16)
    assert model.embed.weight.dtype == torch.bfloat16
    assert torch.equal(model.rope.table, expected)
    assert not any("rope" in name for name in model.state_dict())


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_those_that_torch_counts(shape, monkeypatch):
    monkeypatch.setattr(native, "ONEDNN_IS_FASTER", False)  # torch does not count oneDNN's
    model, tokens, counter = build(shape), tokens_of(), FlopCounterMode(display=False)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens, tokens).backward()
    assert counter.get_total_flops() == flops_per_token(model.config) * tokens.numel()
