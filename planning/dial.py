"""One dial for the size of a model: `--depth=N` sets its shape, its batch, its steps and its learning rate.

`turn` applies it to a command line: it fills the settings that were not given. docs/dial.md has the formulas and their sources.
It imports no torch.
"""

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import NamedTuple

import settings
from common import files
from common.cli import flat_values, replace
from common.errors import UserError
from common.records import Auto
from hardware.footprint import flops_per_token
from planning import rules
from settings import Command, Config, DataConfig, ModelConfig


class Tuned(NamedTuple):
    """What bench/dial.py has found for an optimizer: the rate at WIDTH and RATE_BATCH, the batch for a run of TOKENS."""

    lr: float
    width_power: float  # how the best rate changes with the width
    batch_power: float
    batch: int  # tokens of an update


TUNED = {"adamw": Tuned(4.0e-3, -1.1, 0.5, 2048), "muon": Tuned(1.45e-2, -0.9, 0.2, 4096)}
WIDTH, RATE_BATCH, TOKENS = 96, 2048, 1 << 19
GROWTH = 0.383  # the power of a run's tokens with which its batch grows (arXiv 2505.13738)
HEAD_DIM = 64  # width of a head; a model has as many heads as layers
TOKENS_PER_WEIGHT = 12  # of nanochat; Chinchilla's 20 counts other weights
EPOCHS = 4  # repeated tokens are worth nearly as much as fresh ones up to here (Muennighoff et al. 2023, arXiv 2305.16264)
FEWEST_STEPS = 100
WARMUP_STEPS = 200
GPT2_VOCABULARY = 50257  # what a plan assumes of tokens that are not there
SHAPE = ("n_layer", "n_embd", "n_head", "n_kv_head", "head_dim", "d_ff")
LENGTH = ("steps", "tokens_per_update")
RATE = ("lr", "min_lr", "warmup_steps", "schedule", "cooldown_fraction", "weight_decay")


def load_command(args: list[str], description: str) -> Command:
    """The checked training command: defaults < preset < --depth < flags. Raises UserError."""
    command = turn(settings.load_command(args, description), args)
    rules.check_command(command)
    return command


def turn(command: Command, args: list[str]) -> Command:
    """`command` with the settings that --depth gives, but for those that were given: by `args`, or beside depth in the preset.

    A run that goes on keeps its own. Raises UserError.
    """
    config, depth = command.config, command.config.run.depth
    if depth == "off":
        return command
    if config.model.init_from != "scratch":
        raise UserError(f"--depth={depth} is for a model from scratch; leave out --init_from={config.model.init_from}")
    preset, flags = settings.divide(args)
    given = settings.given(flags)
    if "depth" not in given:
        content = tomllib.loads(files.read_text(preset))  # its tables are headings
        given |= {name for key, keys in content.items() for name in (keys if isinstance(keys, dict) else [key])}
    values = previous(config)
    if not values:
        once, vocab_size, _ = dataset(config.data, config.model.vocab_size)
        values = dial(config, given, vocab_size, min(once.values(), default=math.inf))
    return replace(command, **{name: value for name, value in values.items() if name not in given})


def previous(config: Config) -> dict:
    """What the dial sets, as a run with checkpoints has it that was trained at this depth; empty if there is none."""
    run = Path(config.run.out_dir, config.run.name)
    if not any(run.glob("checkpoints/step-*")) or not (run / "config.toml").exists():
        return {}
    before = settings.read_preset(run / "config.toml")
    values = flat_values(before)
    return {name: values[name] for name in SHAPE + LENGTH + RATE} if before.run.depth == config.run.depth else {}


def dataset(config: DataConfig, vocab_size: int | Auto) -> tuple[dict[str, float], int, str]:
    """After how many tokens of a run each dataset is read once, the size of the vocabulary, and where the size is from.

    vocab_size: what --vocab_size says. Of tokens that are not there, the first is empty and the second assumed.
    """
    import data  # here, because it imports numpy, and --help does without

    if all(Path(directory).is_dir() for directory, _ in data.parse_mixture(config.tokens)):
        mixture = data.open_mixture(config.tokens, vocab_size)
        return mixture.once, mixture.vocab_size, f"of {mixture}"
    if vocab_size != "auto":
        return {}, vocab_size, "by --vocab_size"
    return {}, GPT2_VOCABULARY, f"of GPT-2: {config.tokens} is not there; --vocab_size=N plans another"


def dial(config: Config, given: set[str], vocab_size: int, available: float) -> dict:
    """What --depth sets in `config`, for a text of `available` tokens. What is `given` stays, and the rest follows it."""
    shape = shape_of(config, given)
    model = settings.resolve_model(dataclasses.replace(config.model, **shape), vocab_size)
    length, optimizer = {name: getattr(config.train, name) for name in LENGTH if name in given}, config.optim.optimizer
    length = length_of(min(TOKENS_PER_WEIGHT * weights(model), EPOCHS * available), model.seq_len, optimizer, **length)
    return shape | length | {"micro_batch_size": "auto"} | rate_of(model, optimizer, **length)


def shape_of(config: Config, given: set[str]) -> dict:
    """The shape of the model at --depth of `config`. What is `given` stays, and the rest is as without a preset."""
    width = config.model.n_embd if "n_embd" in given else HEAD_DIM * config.run.depth
    shape = dict.fromkeys(SHAPE, "auto")
    shape |= dict(n_layer=config.run.depth, n_embd=width, n_head=max(1, round(width / HEAD_DIM)))
    return shape | {name: getattr(config.model, name) for name in SHAPE if name in given}


def weights(model: ModelConfig) -> int:
    """The weights of a resolved `model` that a token is multiplied with: those of the blocks and of the output layer."""
    return flops_per_token(dataclasses.replace(model, seq_len=0)) // 6


def batch_of(tokens: float, optimizer: str) -> float:
    """The tokens of an update that are right for a run of `tokens`."""
    return TUNED[optimizer].batch * (tokens / TOKENS) ** GROWTH


def length_of(tokens: float, seq_len: int, optimizer: str, steps: int = 0, tokens_per_update: int = 0) -> dict:
    """The steps and the batch of a run of `tokens`, each as given or chosen (0). Raises UserError for too few tokens.

    The batch is a number of sequences that 2, 4 and 8 ranks can share, if there are so many.
    """
    least = FEWEST_STEPS * max(seq_len, tokens_per_update)
    if not steps and tokens < least:
        raise UserError(
            f"--depth: a run of {tokens:,.0f} tokens (at most {EPOCHS} times those of --tokens) is less than {FEWEST_STEPS} "
            f"updates of {least // FEWEST_STEPS:,} tokens; prepare more text, lower --tokens_per_update, or set --steps"
        )
    if steps:  # batch_of(steps batch) = batch, solved for batch
        batch = batch_of(steps, optimizer) ** (1 / (1 - GROWTH))
    else:
        batch = min(batch_of(tokens, optimizer), tokens / FEWEST_STEPS)
    sequences = max(1, int(batch / seq_len))
    digits = sequences.bit_length()
    # One binary digit below 8, and then as many as leave a multiple of 8, but three at most.
    unit = 2 ** max(digits - 3, min(3, digits - 1))
    rounded = round(sequences / unit) * unit
    if not steps and rounded * seq_len > tokens / FEWEST_STEPS:
        rounded = sequences // unit * unit
    batch = tokens_per_update or rounded * seq_len
    return dict(steps=steps or int(tokens / batch), tokens_per_update=batch)


def rate_of(model: ModelConfig, optimizer: str, steps: int, tokens_per_update: int) -> dict:
    """The learning rate, its schedule and the weight decay of a run.

    An update of a matrix should change the activations equally at every width: AdamW's rate falls with it (muP, arXiv
    2203.03466), Muon's with its root, for its updates have a norm of 0.2 lr sqrt(width) (arXiv 2310.17813). Both fall faster
    where the depth grows with the width: the powers are measured. AdamW's grows with the root of the batch (arXiv 2205.10287),
    Muon's by less, as measured.
    """
    # A larger batch than the dial's is not known to bear a larger rate.
    batch, best = min(tokens_per_update, batch_of(steps * tokens_per_update, optimizer)), TUNED[optimizer]
    lr = best.lr * (model.n_embd / WIDTH) ** best.width_power * (batch / RATE_BATCH) ** best.batch_power
    lr = float(f"{lr:.3g}")
    # Weights forget their past within 1 / (lr weight_decay) steps: 1.084 (tokens / weights)^-0.527 of all (arXiv 2505.13738).
    forgotten = 1.084 * (steps * tokens_per_update / weights(model)) ** -0.527
    weight_decay = min(1.0, 1 / (lr * steps * forgotten))
    # AdamW at the best rate needs time to settle: a short run does worse with a warmup of only 2 %.
    warmup_steps = round(min(0.3 * steps, max(0.02 * steps, WARMUP_STEPS)))
    schedule = dict(schedule="wsd", cooldown_fraction=0.4, min_lr=0.0, warmup_steps=warmup_steps)
    return dict(lr=lr, weight_decay=float(f"{weight_decay:.3g}"), **schedule)
