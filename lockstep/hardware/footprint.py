"""The footprint of a model: parameters, operations, and the memory of one rank by part, calculated from the settings alone.

`--micro_batch_size=auto` and `--plan` use it, and bench/fake_gpu.py checks it. This module does not import torch.

Shapes in comments: C = n_embd, F = d_ff, Q and K = widths of queries and keys, V = vocab_size, N = tokens per micro-batch.
"""

import math

from lockstep.common.cli import replace
from lockstep.settings import CheckpointConfig, Config, ModelConfig, OptimConfig, TrainConfig

FLEX_BLOCK = 128  # queries, and keys, per block of FlexAttention's mask (attention.document_blocks)
# Tensors may use this share of a GPU's memory. CUDA and NCCL need 1 to 2 GB, the caching allocator cannot reuse about 5 %, and
# the estimate may be 5 % low (bench/fake_gpu.py). Running out of memory costs more than a smaller micro-batch.
USABLE = 0.9
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes per number in matmuls
EXACT_BLOCK = 1 << 26  # elements that exact converts at a time on a GPU
CPU_BYTES = 1 << 28  # bytes of activations on a CPU: few enough to fit in the caches, but enough to hide Python's overhead


def widths(model: ModelConfig) -> tuple[int, int, int, int]:
    """Return C, F, Q and K of the resolved `model`."""
    return model.n_embd, model.d_ff, model.head_dim * model.n_head, model.head_dim * model.n_kv_head


def parameters(model: ModelConfig) -> dict[str, int]:
    """Return the number of parameters of the resolved `model`, by part. Tied embeddings count once."""
    C, F, Q, K = widths(model)
    record, layers = model.record, model.n_layer
    outputs = {"q": Q, "k": K, "v": K, "o": C, "gate": F, "up": F, "down": C}
    biases = {part: width if part in record.biases else 0 for part, width in outputs.items()}
    head_norms = 2 * model.head_dim if record.qk_norm else 0
    return {
        "token embedding": model.vocab_size * C,
        "position embedding": model.seq_len * C if record.positions == "learned" else 0,
        "attention": layers * (2 * C * Q + 2 * C * K + sum(biases[part] for part in "qkvo") + head_norms),
        "MLP": layers * (mlp_matrices(model) * C * F + biases["gate"] + biases["up"] + biases["down"]),
        "norms": (2 * layers + 1) * C * {"layer": 2, "rms": 1}[record.norm],  # LayerNorm has a bias
        "output layer": 0 if model.tie_embeddings else model.vocab_size * C,
    }


def mlp_matrices(model: ModelConfig) -> int:
    """Return the number of matrices in the MLP of a block."""
    return 3 if model.record.gated else 2


def parameter_count(model: ModelConfig) -> int:
    """Return the total number of parameters of the resolved `model`."""
    return sum(parameters(model).values())


def block_parameters(model: ModelConfig) -> int:
    """Return the number of parameters in the attention and MLP of all blocks, nearly all of them in matrices."""
    sizes = parameters(model)
    return sizes["attention"] + sizes["MLP"]


def flops_per_token(model: ModelConfig) -> int:
    """Return the FLOPs per token of a forward and a backward pass over a full context, as counted for MFU (PaLM, appendix B).

    That is 6 per weight in matmuls, plus 12 Q T per layer for attention (T = seq_len). The output layer counts, but not the
    embeddings, which are looked up. The half of attention that the causal mask removes counts too, but recomputation does not.
    """
    C, F, Q, K = widths(model)
    layer = 2 * C * (Q + K) + mlp_matrices(model) * C * F
    return 6 * (model.n_layer * layer + model.vocab_size * C) + 12 * model.n_layer * Q * model.seq_len


def rows_at_a_time(vocab_size: int, device: str) -> int:
    """Return the maximum number of rows of logits to compute at a time: a multiple of 128, which suits matrix units.

    Four megabytes of float32 logits fit in a CPU's cache, but fewer than 256 rows would read the weights too often. A GPU needs
    more rows to stay busy: the same batch took 48.7 ms in 32 parts and 40.4 ms in 8 (pytorch/pytorch#124480). More than 2^30
    logits would take 4 GB.
    """
    rows = (1 << (20 if device == "cpu" else 30)) // vocab_size // 128 * 128
    return max(256, rows if device == "cpu" else min(rows, 1 << 14))


def largest_micro_batch(config: Config, world_size: int, device: str, budget: float) -> int:
    """Return the largest micro-batch, in sequences, that divides the ranks' shares equally and fits in `budget` bytes, or 1.

    Under `exact` the choice must not depend on the number of ranks. So this leaves work for eight ranks, and counts the memory
    of a run on one rank, which needs the most. On a CPU, `budget` covers only activations (roughly 14 widths and 3 MLP widths)
    and logits.
    """
    model, sequences = config.model, config.sequences_per_update
    exact = config.parallel.strategy == "exact"
    share, most = (sequences, sequences // min(8, sequences)) if exact else (sequences // world_size, sequences)
    rows = rows_at_a_time(model.vocab_size, device)
    per_sequence = 2 * model.seq_len * model.n_layer * (14 * model.n_embd + 3 * model.d_ff) + document_mask(config, device)

    def size(micro_batch: int) -> float:
        if device == "cpu":
            return micro_batch * per_sequence + 10 * model.vocab_size * min(rows, micro_batch * model.seq_len)
        return sum(of_rank(replace(config, micro_batch_size=micro_batch), 1 if exact else world_size, device).values())

    small = [n for n in range(1, math.isqrt(share) + 1) if share % n == 0]
    return max((n for n in {*small, *(share // n for n in small)} if n <= most and size(n) <= budget), default=1)


def of_rank(config: Config, world_size: int, device: str) -> dict[str, float]:
    """Return the bytes of each part of one rank's memory at the peak of an update.

    The memory that CUDA and NCCL themselves use is not counted. config: resolved. device: a device type, such as cuda.
    """
    model, train, strategy = config.model, config.train, config.parallel.strategy
    if world_size == 1 and strategy != "exact":
        strategy = "none"
    P, s, blocks = parameter_count(model), BYTES[train.dtype], block_parameters(model)
    fsdp, exact = strategy == "fsdp", strategy == "exact"
    sharded = fsdp and config.parallel.shard_gradients == "on"
    copies = config.parallel.replicate if fsdp else 1 if exact else world_size
    shards = world_size // copies  # shards of the optimizer's state, and of fsdp's weights
    activation, recomputed = activations(model, train, strategy)
    activation += train.micro_batch_size * document_mask(config, device)
    loss, loss_backward = loss_buffers(model, train, device)
    accumulating = config.micro_batches > world_size  # some rank holds gradients from an earlier micro-batch
    # exact and scratch_overlap move each gradient elsewhere as soon as it is complete.
    between = 4.0 * P / (shards if sharded else 1) if accumulating and not exact and strategy != "scratch_overlap" else 0.0
    buckets = 4.0 * P if strategy in ("ddp", "scratch_overlap") else 0.0
    casts, again = weight_casts(model, train, fsdp)
    always = {
        "weights": 4.0 * P / (shards if fsdp else 1),
        "optimizer state": optimizer_state(model, config.optim.optimizer) / shards,
        "gradient buckets": buckets,
        "exact's integers": 8.0 * P if exact else 0.0,
        "portable's copies": portable_copies(config),
    }
    # After the reduction, DDP's gradients are views of its buckets; with fsdp and exact, gradients are shards.
    reduced = 0.0 if buckets else 4.0 * P / shards
    embedding = 4.0 * model.vocab_size * model.n_embd  # the largest tensor
    # Backward adds the tied embedding's two gradients, from the lookup and the matmul, before it accumulates them.
    tied = embedding * (1 + (accumulating and not exact)) if model.tie_embeddings else 0.0
    # exact sends and receives one tensor at a time (a gradient's integers, later the weights) and converts in pieces.
    travels = 4.0 * embedding * (exact and world_size > 1)
    piece = min(embedding, 4.0 * EXACT_BLOCK) * (exact and device != "cpu")
    temporary = {
        "scratch_reduce_scatter": 8.0 * P,
        "fsdp": (4.0 + s) * (P - blocks),  # reduces everything outside the blocks as one unit
        "exact": max(travels, embedding + tied + 3 * piece),
    }.get(strategy, tied)
    complete = 0.0 if exact else reduced if buckets or fsdp else 4.0 * P
    muon = muon_buffers(model, config.optim, shards if fsdp or exact else 0, world_size)
    returns = max(2 * piece, embedding * (1 + 1 / shards) * (exact and world_size > 1))
    moments = [
        # In order: the last micro-batch's forward ends, its backward begins, the ranks add gradients, the weights are updated.
        {"gradients": between, "weights for backward": casts, "activations": activation, "logits": loss},
        {"gradients": between, "weights for backward": again, "activations": activation + recomputed, "logits": loss_backward},
        {"gradients": max(between, complete), "temporary": temporary},
        {"gradients": reduced, "temporary": max(muon, returns)},
    ]
    if exact and not model.tie_embeddings:  # the output layer's gradient is sent first
        moments[1]["temporary"] = travels
    return max((always | moment for moment in moments), key=lambda parts: sum(parts.values()))


def portable_copies(config: Config) -> float:
    """Return the bytes of what `portable` keeps and `native` does not.

    That is two float64 copies of each matrix in a matmul, for the forward and for the backward pass (`portable.stacked`), and
    all attention weights, of which the causal mask removes a quarter by halves.
    """
    model = config.model
    if config.numerics.numerics == "native":
        return 0.0
    weights = config.train.micro_batch_size * model.n_layer * model.n_head * model.seq_len**2 * 3 / 4
    return 16.0 * (block_parameters(model) + model.vocab_size * model.n_embd) + 4.0 * weights


def weight_casts(model: ModelConfig, train: TrainConfig, fsdp: bool) -> tuple[float, float]:
    """Return the bytes of the weights cast to the matmuls' dtype, at the end of the forward pass and during the backward pass.

    Autocast keeps its copies of all blocks until backward, and a recomputed block makes new ones. fsdp gathers two blocks at a
    time, and the embeddings for the whole update.
    """
    s, blocks, recomputed = BYTES[train.dtype], block_parameters(model), train.activation_checkpointing
    if fsdp:
        gathered = s * (parameter_count(model) - blocks + 2 * blocks / model.n_layer)
        return gathered, gathered
    casts = 2.0 * blocks if s == 2 else 0.0
    return casts, casts / model.n_layer if recomputed else casts


def activations(model: ModelConfig, train: TrainConfig, strategy: str) -> tuple[float, float]:
    """Return the bytes that a micro-batch's forward keeps for backward, and the bytes of one recomputed block.

    Per token, a block keeps the inputs of its norms, a copy of their outputs for each matmul that reads them, queries, keys,
    values, the output of attention, and what the MLP computes. Kernels differ in what else they keep, by up to 15 %.
    """
    C, F, Q, K = widths(model)
    s, N = BYTES[train.dtype], train.micro_batch_size * model.seq_len
    residual = s if strategy == "fsdp" else 4  # bytes per element of the residual stream
    norms = 2 * C * (4 if model.record.norm == "layer" else residual)  # LayerNorm converts its input to float32
    if model.record.qk_norm:
        norms += residual * (Q + K)
    if model.dropout:
        norms += 2 * C  # its masks
    # The matmuls that read a norm's output, and the tensors as wide as the MLP.
    reads, wide = 2 + mlp_matrices(model), 4 if model.record.gated else 2
    if train.compile == "on":  # it fuses the copies, and the MLP's gate
        reads, wide = 2, min(wide, 3)
    block = N * (norms + s * (reads * C + 2 * Q + 2 * K + wide * F))
    if train.activation_checkpointing:
        return N * (model.n_layer + 1) * C * residual, block
    return N * C * residual + model.n_layer * block, 0.0


def uses_flex(config: Config, device: str) -> bool:
    """Return whether `attention.document_mask` makes a mask for FlexAttention. device: from `device.kind`."""
    repeats = config.train.deterministic or config.parallel.strategy == "exact"
    fit = device == "cuda" or (device == "rocm" and not repeats)
    return fit and not config.model.dropout and config.numerics.numerics == "native"


def document_mask(config: Config, device: str) -> int:
    """Return the bytes of `attention.document_mask` per sequence."""
    if config.data.attend == "window":
        return 0
    if uses_flex(config, device):  # block numbers, by queries and by keys, of blocks seen in part and in full
        return 4 * 4 * math.ceil(config.model.seq_len / FLEX_BLOCK) ** 2
    return BYTES[config.train.dtype] * config.model.seq_len**2


def loss_buffers(model: ModelConfig, train: TrainConfig, device: str) -> tuple[float, float]:
    """Return the bytes that the loss needs while it is computed, and when its backward begins.

    It holds the gradients of the output layer and of its input and, while it is computed, logits of some rows, with their
    gradient. Eager code also stores their probabilities, and all three in float32.
    """
    s, N = BYTES[train.dtype], train.micro_batch_size * model.seq_len
    weight, x = model.vocab_size * model.n_embd, s * N * model.n_embd
    logits = min(rows_at_a_time(model.vocab_size, device), N) * model.vocab_size
    rows = logits * (2 * s if train.compile == "on" else 12)
    return (4 + 2 * s) * weight + 2 * x + rows, 8 * weight + 2 * x


def optimizer_state(model: ModelConfig, optimizer: str) -> float:
    """Return the bytes of the optimizer's state: two float32 numbers per parameter for AdamW, one for Muon's matrices."""
    fewer = {"adamw": 0.0, "muon": 4.0 * block_parameters(model)}[optimizer]
    return 8.0 * parameter_count(model) - fewer


def muon_buffers(model: ModelConfig, optim: OptimConfig, shards: int, ranks: int) -> float:
    """Return the bytes that Muon needs for the matrices of one shape: iterates and updates, and the updates in float32.

    shards: the number of shards under fsdp and exact, which also send and receive them; else 0. With several `ranks`, the
    updates of the previous shape are still in flight.
    """
    if optim.optimizer != "muon":
        return 0.0
    C, F, Q, K = widths(model)
    s = BYTES[optim.muon_dtype]
    shapes = [(Q, C), (C, Q)] + [(K, C)] * 2 + [(F, C)] * (mlp_matrices(model) - 1) + [(C, F)]
    wide = 4 if s == 2 else 0  # a float32 copy of the updates
    kept = ((3 * s + wide) / shards if shards else s + wide) * model.n_layer  # bytes per element, over all layers
    # Four matrices are iterated at a time.
    numbers = {(a, b): a * b * shapes.count((a, b)) for a, b in shapes}  # elements per shape and layer
    before = [0.0] * len(numbers)
    if ranks > 1:
        before[1:] = [(2 * s / shards if shards else s) * model.n_layer * n for n in numbers.values()][:-1]
    own = [8 * s * (a * b + min(a, b) ** 2) + kept * n for (a, b), n in numbers.items()]
    return max(map(sum, zip(own, before, strict=True)))


def checkpoint_bytes(config: Config) -> float:
    """Return the bytes of a checkpoint: the weights and the optimizer's state."""
    return 4.0 * parameter_count(config.model) + optimizer_state(config.model, config.optim.optimizer)


def checkpoints_at_once(checkpoint: CheckpointConfig, steps: int) -> int:
    """Return the maximum number of a run's checkpoints on disk at once: the ones kept, and the one being written."""
    saves = -(-steps // (checkpoint.save_every or steps))  # the last step is always saved
    most = min(saves, checkpoint.keep_last + checkpoint.keep_best + 1) if checkpoint.keep_last else saves
    return min(steps, most + 1) if checkpoint.save_minutes else most  # one of --save_minutes, until the next save
