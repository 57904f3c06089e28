"""The footprint of a model: parameters, operations, and the memory of one rank by part, calculated from the settings alone.

`--micro_batch_size=auto` and `--plan` use it, and bench/fake_gpu.py checks it. This module does not import torch.

Shapes in comments: C = n_embd, F = d_ff, Q and K = widths of queries and keys, V = vocab_size, N = tokens per micro-batch.
"""

import math

from lockstep.common.cli import replace
from lockstep.settings import OPTIMIZERS, CheckpointConfig, Config, ModelConfig, OptimConfig, TrainConfig
from lockstep.strategies import ALONE, Update

FLEX_BLOCK = 128  # queries, and keys, per block of FlexAttention's mask (attention.document_blocks)
# Tensors may use this share of a GPU's memory. CUDA and NCCL need 1 to 2 GB, the caching allocator cannot reuse about 5 %, and
# the estimate may be 5 % low (bench/fake_gpu.py). Running out of memory costs more than a smaller micro-batch.
USABLE = 0.9
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes per number in matmuls
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

    Where the bits must not depend on the number of ranks (exact), nor may the choice. So this leaves work for eight ranks, and
    counts the memory of a run on one rank, which needs the most. On a CPU, `budget` covers only activations (roughly 14 widths
    and 3 MLP widths) and logits.
    """
    model, share = config.model, config.sequences_per_update
    most = share
    if config.parallel.record.any_ranks:
        world_size, most = 1, share // min(8, share)
    share //= world_size
    rows = rows_at_a_time(model.vocab_size, device)
    per_sequence = 2 * model.seq_len * model.n_layer * (14 * model.n_embd + 3 * model.d_ff) + document_mask(config, device)

    def size(micro_batch: int) -> float:
        if device == "cpu":
            return micro_batch * per_sequence + 10 * model.vocab_size * min(rows, micro_batch * model.seq_len)
        return sum(of_rank(replace(config, micro_batch_size=micro_batch), world_size, device).values())

    small = [n for n in range(1, math.isqrt(share) + 1) if share % n == 0]
    large = [share // n for n in small]
    return max((n for n in {*small, *large} if n <= most and size(n) <= budget), default=1)


def of_rank(config: Config, world_size: int, device: str) -> dict[str, float]:
    """Return the bytes of each part of one rank's memory at the peak of an update.

    The memory that CUDA and NCCL themselves use is not counted. config: resolved. device: a device type, such as cuda.
    """
    model, train, record = config.model, config.train, config.parallel.record
    if world_size == 1 and not record.any_ranks:  # exact rounds on one rank as on several
        record = ALONE
    update = update_of(config, world_size, device)
    shares = update.shards if record.shards_update else 1
    gradient = 4.0 * update.parameters
    own_gradient = gradient / shares  # of what this rank updates
    always = {
        "weights": gradient / update.shards if record.shards_weights else gradient,
        "optimizer state": optimizer_state(model, config.optim.optimizer) / shares,
        **{part: size * update.parameters for part, size in record.holds.items()},
        "portable's copies": portable_copies(config),
    }

    # Gradients of earlier micro-batches, of all micro-batches before the ranks add them, and their mean.
    if record.moves_gradients or update.micro_steps == 1:
        earlier = 0.0
    elif record.shards_weights and update.shard_gradients:
        earlier = own_gradient
    else:
        earlier = gradient
    mean = 0.0 if record.reduces_in_place else own_gradient
    complete = 0.0 if record.moves_gradients else max(earlier, mean)

    activation, recomputed = activations(model, train, record.shards_weights)
    activation += train.micro_batch_size * document_mask(config, device)
    loss, loss_backward = loss_buffers(model, train, device)
    casts, casts_again = weight_casts(model, train, record.shards_weights)
    temporary = record.temporary(update)
    muon = muon_buffers(model, config.optim, update.shards if record.shards_update else 0, world_size)
    moments = [
        # In order: the last micro-batch's forward ends, its backward begins, the ranks add gradients, the weights are updated.
        {"gradients": earlier, "weights for backward": casts, "activations": activation, "logits": loss},
        {"gradients": earlier, "weights for backward": casts_again, "activations": activation + recomputed}
        | {"logits": loss_backward, "temporary": temporary.backward},
        {"gradients": complete, "temporary": temporary.sync},
        {"gradients": mean, "temporary": max(muon, temporary.step)},
    ]
    return max((always | moment for moment in moments), key=lambda parts: sum(parts.values()))


def update_of(config: Config, world_size: int, device: str) -> Update:
    """Return what a strategy's memory depends on. config: resolved."""
    model, parallel, P = config.model, config.parallel, parameter_count(config.model)
    return Update(
        ranks=world_size,
        replicate=parallel.replicate,
        micro_steps=-(-config.micro_batches // world_size),
        shard_gradients=parallel.shard_gradients == "on",
        number_bytes=BYTES[config.train.dtype],
        parameters=P,
        unblocked=P - block_parameters(model),
        embedding=model.vocab_size * model.n_embd,
        tied=model.tie_embeddings,
        on_cpu=device == "cpu",
    )


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


def weight_casts(model: ModelConfig, train: TrainConfig, gathered: bool) -> tuple[float, float]:
    """Return the bytes of the weights cast to the matmuls' dtype, at the end of the forward pass and during the backward pass.

    Autocast keeps its copies of all blocks until backward, and a recomputed block makes new ones. With `gathered` weights, two
    blocks at a time are whole, and the embeddings for the whole update.
    """
    s, blocks = BYTES[train.dtype], block_parameters(model)
    if gathered:
        whole = s * (parameter_count(model) - blocks + 2 * blocks / model.n_layer)
        return whole, whole
    casts = 2.0 * blocks if s == 2 else 0.0
    return casts, casts / model.n_layer if train.activation_checkpointing else casts


def activations(model: ModelConfig, train: TrainConfig, gathered: bool) -> tuple[float, float]:
    """Return the bytes that a micro-batch's forward keeps for backward, and the bytes of one recomputed block.

    Per token, a block keeps the inputs of its norms, a copy of their outputs for each matmul that reads them, queries, keys,
    values, the output of attention, and what the MLP computes. Kernels differ in what else they keep, by up to 15 %. gathered:
    whether weights, and so the residual stream, are in the matmuls' dtype.
    """
    C, F, Q, K = widths(model)
    s, N = BYTES[train.dtype], train.micro_batch_size * model.seq_len
    residual = s if gathered else 4  # bytes per element of the residual stream
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
    repeats = config.train.deterministic or config.parallel.record.any_ranks
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
    """Return the bytes of the optimizer's state."""
    in_blocks, elsewhere = OPTIMIZERS[optimizer]
    blocks = block_parameters(model)
    return in_blocks * blocks + elsewhere * (parameter_count(model) - blocks)


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
    # Bytes per element of a layer's matrices: what their own updates take, and what they still take during the next shape's.
    kept, in_flight = s + wide, s
    if shards:
        kept, in_flight = (3 * s + wide) / shards, 2 * s / shards
    most = before = 0.0
    for a, b in dict.fromkeys(shapes):
        elements = model.n_layer * shapes.count((a, b)) * a * b
        iterated = 8 * s * (a * b + min(a, b) ** 2)  # four matrices at a time
        most = max(most, iterated + kept * elements + before)
        if ranks > 1:
            before = in_flight * elements
    return most


def checkpoint_bytes(config: Config) -> float:
    """Return the bytes of a checkpoint: the weights and the optimizer's state."""
    return 4.0 * parameter_count(config.model) + optimizer_state(config.model, config.optim.optimizer)


def checkpoints_at_once(checkpoint: CheckpointConfig, steps: int) -> int:
    """Return the maximum number of a run's checkpoints on disk at once: the ones kept, and the one being written."""
    saves = -(-steps // (checkpoint.save_every or steps))  # the last step is always saved
    most = min(saves, checkpoint.keep_last + checkpoint.keep_best + 1) if checkpoint.keep_last else saves
    return min(steps, most + 1) if checkpoint.save_minutes else most  # one of --save_minutes, until the next save
