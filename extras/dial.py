"""One dial for the size of a model: its depth sets its shape, batch, steps and learning rate.

docs/dial.md explains the formulas and their sources. This module does not import torch.
"""

import dataclasses
from typing import NamedTuple

from lockstep import settings
from lockstep.common import cli
from lockstep.common.errors import UserError
from lockstep.dataset.mixture import open_if_there
from lockstep.hardware.footprint import flops_per_token
from lockstep.settings import Config, ModelConfig


class Tuned(NamedTuple):
    """What we found for an optimizer (docs/dial.md): the rate at WIDTH and RATE_BATCH, and the batch for a run of TOKENS."""

    lr: float
    width_power: float  # the best rate is proportional to the width raised to this power
    batch_power: float  # and to the batch raised to this power
    batch: int  # tokens per update


TUNED = {"adamw": Tuned(4.0e-3, -1.1, 0.5, 2048), "muon": Tuned(1.45e-2, -0.9, 0.2, 4096)}
WIDTH, RATE_BATCH, TOKENS = 96, 2048, 1 << 19
GROWTH = 0.383  # the batch is proportional to a run's tokens raised to this power (arXiv 2505.13738)
HEAD_DIM = 64  # width of a head; a model has as many heads as layers
TOKENS_PER_WEIGHT = 12  # as in nanochat; Chinchilla's 20 counts different weights
EPOCHS = 4  # up to this many, repeated tokens are worth nearly as much as fresh ones (Muennighoff et al., arXiv 2305.16264)
FEWEST_STEPS = 100
SHAPE = ("n_layer", "n_embd", "n_head", "n_kv_head", "d_ff")


def turn(config: Config, depth: int, given: set[str]) -> dict:
    """Return the settings that follow from `depth`, by flag name, besides those that are `given`. Raises UserError."""
    if config.model.init_from != "scratch":
        raise UserError(f"--depth={depth} is for models trained from scratch; leave out --init_from={config.model.init_from}")
    mixture, vocab_size = open_if_there(config)
    model, optimizer = model_of(config, depth, vocab_size, given), config.optim.optimizer
    tokens = TOKENS_PER_WEIGHT * weights(model)
    if mixture:
        tokens = min(tokens, EPOCHS * min(mixture.once.values()))
    length = {name: getattr(config.train, name) for name in ("steps", "tokens_per_update") if name in given}
    return settings_of(config, depth, given, model, length_of(tokens, model.seq_len, optimizer, **length))


def settings_of(config: Config, depth: int, given: set[str], model: ModelConfig, length: dict) -> dict:
    """Return what to set besides `config` and the flags that are `given`. model, length: as resolved for `depth`."""
    values = shape_of(config, depth, given) | length | {"micro_batch_size": "auto"}
    values |= rate_of(model, config.optim.optimizer, **length)
    before = cli.flat_values(config)
    return {name: value for name, value in values.items() if name not in given and value != before[name]}


def model_of(config: Config, depth: int, vocab_size: int, given: set[str]) -> ModelConfig:
    """Return the resolved model for a depth."""
    return settings.resolve_model(dataclasses.replace(config.model, **shape_of(config, depth, given)), vocab_size)


def shape_of(config: Config, depth: int, given: set[str]) -> dict:
    """Return the model's shape at a depth. Settings of `config` that are `given` stay; the preset's shape is ignored."""
    width = config.model.n_embd if "n_embd" in given else HEAD_DIM * depth
    shape = dict.fromkeys(SHAPE, "auto")
    shape |= dict(n_layer=depth, n_embd=width, n_head=max(1, round(width / HEAD_DIM)))
    return shape | {name: getattr(config.model, name) for name in SHAPE if name in given}


def weights(model: ModelConfig) -> int:
    """Return the number of weights in the matmuls of a resolved `model`: those of the blocks and the output layer."""
    return flops_per_token(dataclasses.replace(model, seq_len=0)) // 6


def tuned(optimizer: str) -> Tuned:
    """Return the sweep's result for `optimizer`, or AdamW's if it was not swept."""
    return TUNED.get(optimizer, TUNED["adamw"])


def batch_of(tokens: float, optimizer: str) -> float:
    """Return the best number of tokens per update for a run of `tokens`."""
    return tuned(optimizer).batch * (tokens / TOKENS) ** GROWTH


def length_of(tokens: float, seq_len: int, optimizer: str, steps: int = 0, tokens_per_update: int = 0) -> dict:
    """Return the steps and batch size for a run of `tokens`, choosing whichever is 0. Raises UserError for too few tokens.

    If the batch is large enough, 2, 4 and 8 ranks can divide its sequences equally.
    """
    least = FEWEST_STEPS * max(seq_len, tokens_per_update)
    if not steps and tokens < least:
        raise UserError(
            f"--depth: a run of {tokens:,.0f} tokens (at most {EPOCHS} epochs of --tokens) has fewer than {FEWEST_STEPS} "
            f"updates of {least // FEWEST_STEPS:,} tokens; prepare more text, lower --tokens_per_update, or set --steps"
        )
    if steps:  # batch_of(steps batch) = batch, solved for batch
        batch = batch_of(steps, optimizer) ** (1 / (1 - GROWTH))
    else:
        batch = min(batch_of(tokens, optimizer), tokens / FEWEST_STEPS)
    sequences = max(1, int(batch / seq_len))
    digits = sequences.bit_length()
    # Below 8 sequences, keep one binary digit. Above, keep a multiple of 8 with at most three significant binary digits.
    unit = 2 ** max(digits - 3, min(3, digits - 1))
    rounded = round(sequences / unit) * unit
    if not steps and rounded * seq_len > tokens / FEWEST_STEPS:
        rounded = sequences // unit * unit
    batch = tokens_per_update or rounded * seq_len
    return dict(steps=steps or int(tokens / batch), tokens_per_update=batch)


def rate_of(model: ModelConfig, optimizer: str, steps: int, tokens_per_update: int) -> dict:
    """Return the learning rate, its schedule and the weight decay of a run.

    An update should change activations by the same amount at every width. So AdamW's rate falls with the width (muP, arXiv
    2203.03466), and Muon's with its square root (arXiv 2310.17813). Both fall faster if depth grows with width, so the powers
    used here are measured. AdamW's rate grows with the square root of the batch (arXiv 2205.10287), and Muon's more slowly
    (measured).
    """
    # Not measured: whether a batch larger than the dial's allows a larger rate.
    batch, best = min(tokens_per_update, batch_of(steps * tokens_per_update, optimizer)), tuned(optimizer)
    lr = float(f"{best.lr * (model.n_embd / WIDTH) ** best.width_power * (batch / RATE_BATCH) ** best.batch_power:.3g}")
    # Weights forget their past within 1 / (lr weight_decay) steps. The best value of that time, as a fraction of all steps, is
    # 1.084 (tokens / weights)^-0.527 (arXiv 2505.13738).
    forgotten = 1.084 * (steps * tokens_per_update / weights(model)) ** -0.527
    weight_decay = min(1.0, 1 / (lr * steps * forgotten))
    # At the best rate, AdamW needs time to settle: a warmup of only 2 % makes a short run worse.
    warmup_steps = round(min(0.3 * steps, max(0.02 * steps, 200)))
    rate = dict(lr=lr, weight_decay=float(f"{weight_decay:.3g}"), min_lr=0.0)
    return rate | dict(schedule="wsd", cooldown_fraction=0.4, warmup_steps=warmup_steps)
