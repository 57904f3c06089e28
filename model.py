"""The transformer (`GPT`), its initialization, and sampling.

`ARCHITECTURES` in lockstep/architectures.py says what differs between a GPT-2, Llama, Qwen2 and Qwen3. Logits match those of
transformers' classes. Edit what you like: checkpoints of a model that computes something else say so in config.json.
Shapes in comments: B sequences, T tokens, C = n_embd, H heads, D = head_dim, V = vocab_size.
"""

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.numerics import native, portable
from lockstep.numerics.attention import BlockMask
from lockstep.numerics.native import compute_dtype
from lockstep.settings import ModelConfig

OPS = {"native": native, "portable": portable}  # the model's operations, by --numerics


class GPT(nn.Module):
    """A decoder-only language model. `config` must be resolved (`settings.resolve_model`); `initial_weights` draws its weights.

    Parameters: embed, positions (learned), blocks.{i}.norm1, .attn.{q,k,v,o}, .attn.{q,k}_norm (QK-norm), .norm2,
    .mlp.{up,down}, .mlp.gate (gated), norm, head (untied).
    document_token: the token that starts a document, to keep attention within documents (None: attend to all earlier tokens).
    numerics: the module with the operations, `native` or `portable`.
    """

    def __init__(self, config: ModelConfig, document_token: int | None = None, numerics: str = "native"):
        super().__init__()
        self.config, self.document_token, self.numerics, self.ops = config, document_token, numerics, (ops := OPS[numerics])
        positions = config.record.positions
        self.embed = embedding(config.vocab_size, config.n_embd)
        self.positions = embedding(config.seq_len, config.n_embd) if positions == "learned" else None
        self.rope = RotaryTable(config, ops) if positions == "rotary" else None
        self.blocks = nn.ModuleList(Block(config, ops) for _ in range(config.n_layer))
        self.norm = norm_layer(config, ops)
        self.head = None if config.tie_embeddings else ops.Linear(config.n_embd, config.vocab_size, bias=False)
        self.cross_entropy_part = ops.cross_entropy_part

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: "list[KVCache] | None" = None) -> Tensor:
        """Map `tokens` [B, T] int64 to logits [B, T, V], or with `targets` [B, T] to the mean cross-entropy, a float32 scalar.

        With a `cache` (from `new_cache`), the tokens continue the cached ones, and only the last one's logits [B, 1, V] are
        returned. The cache must have room for T more.
        """
        x = self.hidden(tokens, cache)
        if targets is not None:
            return self.loss(x, targets)
        return self.ops.logits(x if cache is None else x[:, -1:], self.output_weight)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, a float32 scalar, of `targets` [B, T] int64 given the hidden states `x` [B, T, C]."""
        return self.ops.linear_cross_entropy(x.flatten(0, 1), self.output_weight, targets.flatten(), self.cross_entropy_part)

    @property
    def output_weight(self) -> Tensor:
        """The weight [V, C] that turns hidden states into logits."""
        return self.embed.weight if self.head is None else self.head.weight

    def hidden(self, tokens: Tensor, cache: "list[KVCache] | None" = None) -> Tensor:
        """Return the normalized hidden states [B, T, C] after the last block. With a `cache`, all tokens are one document."""
        start = cache[0].length if cache else 0  # position of the first token
        end = start + tokens.shape[1]
        x = self.ops.embed(tokens, self.embed.weight)  # [B, T, C]
        positions, mask = slice(start, end), None
        if self.document_token is not None and cache is None:
            positions, mask = self.find_documents(tokens, compute_dtype(x))
        if self.positions is not None:
            # On a CPU, the backward of weight[positions] adds from several threads in no fixed order; nn.Embedding's uses one.
            x = x + (self.positions.weight[positions] if mask is None else self.ops.embed(positions, self.positions.weight))
        rope = self.rope.table[:, start:end] if self.rope is not None else None  # [2, T, 1, D / 2]
        x = self.ops.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, cache[i] if cache else None, mask)
        return self.norm(x)

    def compile_blocks(self) -> None:
        """Compile the repeated parts once: the block, and the cross-entropy of a few rows of logits.

        Compiling the whole model as one graph would unroll the blocks, which takes three times as long and gains a few percent
        at most. Call this before wrapping the model, so that a wrapper's hooks between the blocks are not compiled.
        """
        torch._dynamo.config.optimize_ddp = False  # do not split a block at the end of a DDP bucket
        for block in self.blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
        self.cross_entropy_part = torch.compile(self.cross_entropy_part, dynamic=False)

    def find_documents(self, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, "Tensor | BlockMask"]:
        """Return the position [B, T] of each of the `tokens` [B, T] in its document, and a mask that keeps attention inside it.

        Rotary positions need not restart with each document, because attention depends only on the distance between two tokens.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        document_starts = torch.where(tokens == self.document_token, positions, 0).cummax(1).values
        mask = self.ops.document_mask(document_starts, dtype, self.config.dropout if self.training else 0.0)
        return positions - document_starts, mask

    def checkpoint_activations(self) -> None:
        """Keep only each block's input for the backward pass, which recomputes the rest."""
        for block in self.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def parameter_count(self) -> int:
        """Return the number of weights. Tied embeddings count once."""
        return sum(p.numel() for p in self.parameters())


def embedding(rows: int, width: int) -> nn.Embedding:
    """Return an nn.Embedding without values. Drawing them on the meta device imports torch's compiler, which takes a second."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def on_meta(config: ModelConfig, document_token: int | None = None, numerics: str = "native") -> GPT:
    """Return a GPT on the meta device: its parameters have shapes, but no values and no memory."""
    with torch.device("meta"):
        return GPT(config, document_token, numerics)


class Block(nn.Module):
    """Pre-norm transformer block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, ops):
        super().__init__()
        self.norm1 = norm_layer(config, ops)
        self.attn = Attention(config, ops)
        self.norm2 = norm_layer(config, ops)
        self.mlp = MLP(config, ops)
        self.ops, self.dropout = ops, config.dropout

    def forward(self, x: Tensor, rope: Tensor | None, cache: "KVCache | None", mask: "Tensor | BlockMask | None") -> Tensor:
        """Map `x` [B, T, C] to [B, T, C]. `rope` [2, T, 1, D / 2] holds the cosines and sines of the positions.

        mask: see `attention.attention`.
        """
        x = x + self.ops.dropout(self.attn(self.norm1(x), rope, cache, mask), self.dropout, self.training)
        return x + self.ops.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Attention(nn.Module):
    """Causal self-attention. Several query heads may share a key/value head (GQA, Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, ops):
        super().__init__()
        self.head_dim, self.dropout, self.ops = config.head_dim, config.dropout, ops
        record, width, kv_width = config.record, config.n_head * self.head_dim, config.n_kv_head * self.head_dim
        self.q = ops.Linear(config.n_embd, width, bias="q" in record.biases)
        self.k = ops.Linear(config.n_embd, kv_width, bias="k" in record.biases)
        self.v = ops.Linear(config.n_embd, kv_width, bias="v" in record.biases)
        self.o = ops.Linear(width, config.n_embd, bias="o" in record.biases)
        self.q_norm = ops.RMSNorm(self.head_dim, eps=config.norm_eps) if record.qk_norm else None
        self.k_norm = ops.RMSNorm(self.head_dim, eps=config.norm_eps) if record.qk_norm else None

    def forward(self, x: Tensor, rope: Tensor | None, cache: "KVCache | None", mask: "Tensor | BlockMask | None") -> Tensor:
        """Map `x` [B, T, C] to [B, T, C]."""
        ops, heads = self.ops, (*x.shape[:2], -1, self.head_dim)
        q, k, v = (y.unflatten(2, heads[2:]) for y in ops.linears(x, [self.q, self.k, self.v]))  # [B, T, H or n_kv_head, D]
        q, k = norm_and_rotate(q, self.q_norm, rope, ops), norm_and_rotate(k, self.k_norm, rope, ops)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or n_kv_head, T, D]
        if cache is not None:
            k, v = cache.append(k, v)  # now for all tokens so far
        y = ops.attention(q, k, v, self.dropout if self.training else 0.0, mask)  # [B, H, T, D]
        return self.o(y.transpose(1, 2).flatten(2))


def norm_and_rotate(x: Tensor, norm: nn.RMSNorm | None, rope: Tensor | None, ops) -> Tensor:
    """Normalize queries or keys `x` [B, T, H, D], then rotate them by their positions, as far as the model does either."""
    if norm is not None and rope is not None:
        return ops.norm_and_rotate(x, norm.weight, norm.eps, rope)  # in fewer passes over memory
    if rope is not None:
        return ops.rotate(x, rope).to(x.dtype)
    return x if norm is None else norm(x)


class MLP(nn.Module):
    """An MLP: down(activation(up(x))), or gated, such as SwiGLU (Shazeer 2020): down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, ops):
        super().__init__()
        self.ops, record = ops, config.record
        function = {"tanh": "gelu", "erf": "gelu_erf"}[config.gelu] if record.activation == "gelu" else record.activation
        self.activation = getattr(ops, function)
        self.gate = ops.Linear(config.n_embd, config.d_ff, bias="gate" in record.biases) if record.gated else None
        self.up = ops.Linear(config.n_embd, config.d_ff, bias="up" in record.biases)
        self.down = ops.Linear(config.d_ff, config.n_embd, bias="down" in record.biases)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [B, T, C] to [B, T, C]."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        gate, up = self.ops.linears(x, [self.gate, self.up])
        return self.down(self.activation(gate) * up)


class RotaryTable(nn.Module):
    """Cosines and sines [2, T, 1, D / 2] of position times frequency, for rotary positions (Su et al. 2021).

    The table is a buffer that is neither trained nor saved, and always float32.
    """

    def __init__(self, config: ModelConfig, ops):
        super().__init__()
        self.config, self.ops = config, ops
        self.register_buffer("table", self.compute(), persistent=False)

    def compute(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the table on `device`. It is computed on the CPU, because a GPU rounds its quotients differently."""
        width, theta = self.config.head_dim, self.config.rope_theta
        frequencies = 1.0 / self.ops.power(theta, torch.arange(0, width, 2, device="cpu").float() / width)
        if self.config.rope_factors:
            frequencies = scale_rope(frequencies, *self.config.rope_factors)
        angles = torch.outer(torch.arange(self.config.seq_len, device="cpu").float(), frequencies)
        return torch.stack((self.ops.cos(angles), self.ops.sin(angles))).float()[:, :, None].to(device)

    def _apply(self, fn, recurse=True):
        """Recompute the table after `to`, `cuda` or `to_empty`: a cast rounds it, and a meta tensor has no values."""
        super()._apply(fn, recurse)
        self.table = self.compute(self.table.device)
        return self


def scale_rope(frequencies: Tensor, factor: float, low: float, high: float, context: float) -> Tensor:
    """Scale rotary frequencies for a context longer than the original `context`, as Llama 3.1 and its successors do.

    A frequency that makes more than `high` turns in the original context stays as it is. One that makes fewer than `low` is
    divided by `factor`, and the ones in between are interpolated (the `llama3` rope type of transformers).
    """
    turns = context * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def norm_layer(config: ModelConfig, ops) -> nn.Module:
    """Return the norm before attention, before the MLP and after the last block."""
    kinds = {"layer": ops.LayerNorm, "rms": ops.RMSNorm}
    return kinds[config.record.norm](config.n_embd, eps=config.norm_eps)


def initial_weights(model: GPT, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield initial weights as in GPT-2, by name, one at a time, on the CPU. They depend only on the shapes and `seed`.

    Matrices are drawn from normal(0, 0.02), in the order of their names. The ones that write to the residual stream are divided
    by sqrt(2 n_layer). Norms start at 1, biases at 0. `model` may be on the meta device.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_std = 0.02 / (2 * model.config.n_layer) ** 0.5
    for name, shape in sorted((name, parameter.shape) for name, parameter in model.named_parameters()):
        value = torch.empty(shape, device="cpu")
        if len(shape) == 1:
            yield name, value.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = residual_std if name.endswith(("attn.o.weight", "mlp.down.weight")) else 0.02
        yield name, model.ops.normal_(value, 0.0, std, generator=generator)


class KVCache:
    """Keys and values of one layer, [B, n_kv_head, capacity, D], filled from the left."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.keys = self.values = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append `k` and `v` [B, n_kv_head, T, D]. Returns the keys and values so far, [B, n_kv_head, length, D]."""
        if self.keys is None:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        start, self.length = self.length, self.length + k.shape[2]
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


def new_cache(config: ModelConfig, room: int) -> list[KVCache]:
    """Return an empty cache for `GPT.forward`: one KVCache per layer, with room for `room` tokens."""
    return [KVCache(room) for _ in range(config.n_layer)]


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
    """Continue `tokens` [B, T]. Yields the next token of each sequence, [B] int64 on the CPU, up to `max_new_tokens` times.

    Temperature 0 picks the most likely token. Any other temperature samples in float32 from the `top_k` most likely (0: all),
    with a `generator` on the CPU. Ids from `vocab_limit` up are never picked. Generation stops once every sequence has produced
    `eot`. When the context is full, its second half becomes the new context.
    """
    device, seq_len = model.embed.weight.device, model.config.seq_len
    context = tokens[:, -seq_len:].cpu()
    room = min(seq_len, context.shape[1] + max_new_tokens)
    cache, new = new_cache(model.config, room), context
    ended = torch.zeros(len(tokens), dtype=torch.bool)
    for _ in range(max_new_tokens):
        if cache[0].length == seq_len:
            cache, new = new_cache(model.config, seq_len), context[:, -max(1, seq_len // 2) :]
        logits = model(new.to(device), cache=cache)[:, 0, :vocab_limit].float().cpu()
        token = sample_token(logits, temperature, top_k, generator, model.ops)
        if eot is not None:
            token = token.masked_fill(ended, eot)
            ended |= token == eot
        yield token
        if ended.all():
            return
        new = token[:, None]
        context = torch.cat((context, new), dim=1)[:, -seq_len:]


def sample_token(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None, ops=native) -> Tensor:
    """Sample one token id from each row of `logits` [B, V]."""
    if temperature < 1e-20:  # the most likely token has all of the probability; dividing could overflow
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k:
        smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    return ops.multinomial(ops.softmax(logits), 1, generator=generator)[:, 0]
