"""The transformer: one decoder-only `GPT` with the arithmetic of GPT-2, Llama or Qwen3, its initialization and sampling.

The three are exactly transformers' GPT2LMHeadModel, LlamaForCausalLM and Qwen3ForCausalLM. Nothing here knows of devices,
processes or files. Shapes: B sequences, T tokens, C = n_embd, H heads, D = C / H, V = vocab_size.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import gelu, linear, linear_cross_entropy, norm_and_rotate, rms_norm, rotate
from settings import ModelConfig

SHORT = 512  # up to so long a context attention on a CPU holds the whole matrix of weights


class GPT(nn.Module):
    """Decoder-only language model. `config` is resolved (`settings.resolve_model`); `initialize` sets the weights.

    Parameters: embed, positions (gpt2), blocks.{i}.norm1, .attn.{q,k,v,o}, .attn.{q,k}_norm (qwen3), .norm2,
    .mlp.{up,down}, .mlp.gate (llama, qwen3), norm, head (untied).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        gpt2 = config.architecture == "gpt2"
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.seq_len, config.n_embd) if gpt2 else None
        head_dim = config.n_embd // config.n_head
        self.rope = None if gpt2 else Table(partial(rope_table, config.seq_len, head_dim, config.rope_theta))
        self.future = Table(partial(causal_mask, config.seq_len)) if config.seq_len <= SHORT else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = norm_layer(config)
        self.head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: "list[KVCache] | None" = None) -> Tensor:
        """`tokens` [B, T] int64. With `targets` [B, T] the mean cross-entropy, a float32 scalar; else logits [B, T, V].

        With `cache` (`new_cache`) the tokens continue those it holds; it must have room for T more.
        """
        start, length = cache[0].length if cache else 0, tokens.shape[1]
        x = self.embed(tokens)
        rope = None
        if self.positions is not None:
            x = x + self.positions.weight[start : start + length]
        else:
            rope = self.rope.table[:, start : start + length]
        future = None if self.future is None else self.future.table[:length, :length]
        x = dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, future, cache[i] if cache else None)
        x = self.norm(x)
        weight = self.embed.weight if self.head is None else self.head.weight
        if targets is None:
            return F.linear(x, weight)
        return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten())

    def parameter_count(self) -> int:
        """Number of weights; tied embeddings count once."""
        return sum(p.numel() for p in self.parameters())


class Block(nn.Module):
    """Pre-norm transformer block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm1 = norm_layer(config)
        self.attn = Attention(config)
        self.norm2 = norm_layer(config)
        self.mlp = MLP(config)
        self.dropout = config.dropout

    def forward(self, x: Tensor, rope: Tensor | None, future: Tensor | None, cache: "KVCache | None") -> Tensor:
        """`x` [B, T, C] to [B, T, C]; `rope` [2, T, 1, D / 2] and `future` [T, T] are tables."""
        x = x + dropout(self.attn(self.norm1(x), rope, future, cache), self.dropout, self.training)
        return x + dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (Ainslie et al. 2023, GQA)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        bias = config.architecture == "gpt2"
        self.head_dim = config.n_embd // config.n_head
        self.gqa = config.n_kv_head != config.n_head
        self.dropout = config.dropout
        self.q = Linear(config.n_embd, config.n_embd, bias=bias)
        self.k = Linear(config.n_embd, config.n_kv_head * self.head_dim, bias=bias)
        self.v = Linear(config.n_embd, config.n_kv_head * self.head_dim, bias=bias)
        self.o = Linear(config.n_embd, config.n_embd, bias=bias)
        qwen3 = config.architecture == "qwen3"
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps) if qwen3 else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps) if qwen3 else None

    def forward(self, x: Tensor, rope: Tensor | None, future: Tensor | None, cache: "KVCache | None") -> Tensor:
        """`x` [B, T, C] to [B, T, C]."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = self.q(x).view(heads), self.k(x).view(heads), self.v(x).view(heads)
        if self.q_norm is not None:
            q = norm_and_rotate(q, self.q_norm.weight, self.q_norm.eps, rope)
            k = norm_and_rotate(k, self.k_norm.weight, self.k_norm.eps, rope)
        elif rope is not None:
            q, k = rotate(q, rope).to(v.dtype), rotate(k, rope).to(v.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, D]
        p = self.dropout if self.training else 0.0
        if cache is not None:
            mask = cache.mask(q)
            y = F.scaled_dot_product_attention(q, *cache.append(k, v), mask, enable_gqa=self.gqa)
        elif q.device.type == "cpu" and q.dtype is torch.bfloat16 and future is not None:
            y = short_attention(q, k, v, future, p)
        else:
            y = F.scaled_dot_product_attention(q, k, v, None, p, is_causal=True, enable_gqa=self.gqa)
        return self.o(y.transpose(1, 2).flatten(2))


def short_attention(q: Tensor, k: Tensor, v: Tensor, future: Tensor, dropout_p: float) -> Tensor:
    """Causal attention of q [B, H, T, D] over k, v [B, n_kv_head, T, D] with the whole [T, T] matrix in memory.

    On a CPU in bfloat16 torch's flash kernel, whose backward does not use the matrix unit, takes two to four times as long
    for T up to SHORT. `future` is a table, for the compiler would compute the mask anew, slowly, wherever it is read.
    """
    B, H, T, D = q.shape
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) if x.shape[1] != H else x for x in (k, v))
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    future = future.to(q.dtype)
    if torch.compiler.is_compiling():  # which makes one pass of scale, mask and softmax
        weights = (torch.bmm(q, k.transpose(1, 2)) * D**-0.5 + future).softmax(dim=-1)
    else:
        weights = torch.baddbmm(future.expand(B * H, T, T), q, k.transpose(1, 2), alpha=D**-0.5).softmax(dim=-1)
    return torch.bmm(F.dropout(weights, dropout_p), v).view(B, H, T, D)


class MLP(nn.Module):
    """GELU (tanh form) with biases for gpt2; SwiGLU (Shazeer 2020) without for llama and qwen3."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        gpt2 = config.architecture == "gpt2"
        self.gate = None if gpt2 else Linear(config.n_embd, config.d_ff, bias=False)
        self.up = Linear(config.n_embd, config.d_ff, bias=gpt2)
        self.down = Linear(config.d_ff, config.n_embd, bias=gpt2)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [B, T, C] to [B, T, C]."""
        if self.gate is None:
            return self.down(gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Table(nn.Module):
    """A tensor that `compute(device=...)` gives: no weight, not saved, never rounded to another dtype."""

    def __init__(self, compute: partial):
        super().__init__()
        self.compute = compute
        self.register_buffer("table", compute(), persistent=False)

    def _apply(self, fn, recurse=True):
        """Compute the table anew after `to`, `cuda`, `to_empty`...: never rounded, and right on leaving the meta device."""
        super()._apply(fn, recurse)
        self.table = self.compute(device=self.table.device)
        return self


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """What to add to attention scores [T, T]: 0, and -inf where a query would see a later key."""
    return torch.full((length, length), float("-inf"), device=device).triu(1)


def rope_table(seq_len: int, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Cosines and sines [2, T, 1, D / 2] of position x frequency for rotary positions (Su et al. 2021), in float32."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.outer(torch.arange(seq_len, device=device).float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()))[:, :, None]


class Linear(nn.Linear):
    """torch's, by way of `kernels.linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [B, T, in] to [B, T, out]."""
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.RMSNorm):
    """torch's, by way of `kernels.rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [B, T, C] to the same shape."""
        return rms_norm(x, self.weight, self.eps)


def flops_per_token(config: ModelConfig) -> int:
    """Floating-point operations of forward and backward for one token of a full context, as model FLOPs are counted
    for MFU (PaLM, appendix B): 6 for each weight of a matrix product, the output layer's included and the embedding
    lookups not, and 12 C T a layer for the attention scores and values. Attention is counted in full: the half that
    the causal mask leaves out is not subtracted, nor is anything recomputed added.
    """
    C, kv_width = config.n_embd, config.n_embd // config.n_head * config.n_kv_head
    layer = 2 * C * (C + kv_width) + (2 if config.architecture == "gpt2" else 3) * C * config.d_ff
    return 6 * (config.n_layer * layer + config.vocab_size * C) + 12 * config.n_layer * C * config.seq_len


def norm_layer(config: ModelConfig) -> nn.Module:
    """LayerNorm for gpt2, RMSNorm for the others."""
    return (nn.LayerNorm if config.architecture == "gpt2" else RMSNorm)(config.n_embd, eps=config.norm_eps)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """F.dropout, skipped where it does nothing."""
    return F.dropout(x, p) if training and p > 0 else x


@torch.no_grad()
def initialize(model: GPT, seed: int) -> None:
    """GPT-2's initialization: normal(0, 0.02), projections into the residual stream scaled by 1 / sqrt(2 n_layer),
    norms 1, biases 0. Drawn on the CPU in the order of the names: it depends on nothing but the shapes and `seed`.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_std = 0.02 / (2 * model.config.n_layer) ** 0.5
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = residual_std if name.endswith(("attn.o.weight", "mlp.down.weight")) else 0.02
        parameter.copy_(torch.empty(parameter.shape, device="cpu").normal_(0.0, std, generator=generator))


class KVCache:
    """Keys and values of one layer, [B, n_kv_head, capacity, D], filled from the left."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.keys = self.values = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add `k` and `v` [B, n_kv_head, T, D]; return all so far."""
        if self.keys is None:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        start, self.length = self.length, self.length + k.shape[2]
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def mask(self, q: Tensor) -> Tensor | None:
        """Which keys the queries `q` [B, H, T, D], about to be appended, see: bool [T, length + T]; None: all."""
        T = q.shape[2]
        if T == 1:
            return None
        return torch.ones(T, self.length + T, dtype=torch.bool, device=q.device).tril(self.length)


def new_cache(config: ModelConfig) -> list[KVCache]:
    """An empty cache for `GPT.forward`, one layer each, with room for `seq_len` tokens."""
    return [KVCache(config.seq_len) for _ in range(config.n_layer)]


@torch.no_grad()
def generate(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    vocab_limit: int | None = None,
    eot: int | None = None,
) -> Iterator[Tensor]:
    """Yield up to `max_new_tokens` tokens [B] (int64, CPU) that continue `tokens` [B, T], one at a time.

    Temperature 0 takes the likeliest token; else one is drawn on the CPU in float32 by `generator` (a CPU one), from the
    `top_k` likeliest (0: all) of the first `vocab_limit` rows of the vocabulary. Stops when every sequence has ended with
    `eot`. When the context is full, it goes on from its last half.
    """
    device, seq_len = model.embed.weight.device, model.config.seq_len
    context = tokens[:, -seq_len:].cpu()
    cache, new = new_cache(model.config), context
    ended = torch.zeros(len(tokens), dtype=torch.bool)
    for _ in range(max_new_tokens):
        if cache[0].length == seq_len:
            cache, new = new_cache(model.config), context[:, -max(1, seq_len // 2) :]
        logits = model(new.to(device), cache=cache)[:, -1, :vocab_limit].float().cpu()
        chosen = choose(logits, temperature, top_k, generator)
        if eot is not None:
            chosen = chosen.masked_fill(ended, eot)
            ended |= chosen == eot
        yield chosen
        if ended.all():
            return
        new = chosen[:, None]
        context = torch.cat((context, new), dim=1)[:, -seq_len:]


def choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> Tensor:
    """One token id for each row of `logits` [B, V]."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
