"""What the settings leave open, chosen once the data, the ranks and their hardware are known. All ranks choose the same."""

import dataclasses
from pathlib import Path

import torch

import device
import footprint
import hf
import settings
from settings import Config, ModelConfig, UserError
from world import World


def resolve(config: Config, vocab_size: int, world: World, pretrained: Path | None, previous: dict) -> Config:
    """`config` with every choice made that it left open.

    pretrained: the model directory that gives the architecture, if the settings do not. previous: the settings of the run so
    far, which keeps its precision and micro-batches. All ranks must call it. Raises UserError where something does not fit.
    """
    model, train = config.model, config.train
    if pretrained:
        found = hf.read_config(pretrained)
        if found.seq_len < model.seq_len:
            raise UserError(f"--seq_len={model.seq_len}: {pretrained} has a context of {found.seq_len}")
        model = dataclasses.replace(found, seq_len=model.seq_len, dropout=model.dropout, init_from=model.init_from)
    model = settings.resolve_model(model, vocab_size)
    check_memory(model)
    dtype = train.dtype
    if dtype == "auto" and previous.get("device") == world.device.type:
        dtype = previous.get("dtype", dtype)
    dtypes = world.all_gather(device.choose_dtype(dtype, world.device))
    run_flops = footprint.flops_per_token(model) * train.steps * train.tokens_per_update
    compiles = world.all_gather(device.choose_compile(train.compile, world.device, run_flops))
    train = dataclasses.replace(
        train,
        device=world.device.type,
        dtype=min(dtypes, key=list(device.DTYPES).index),
        compile="off" if "off" in compiles else "on",
    )
    config = dataclasses.replace(config, model=model, train=train)
    config = settings.replace(config, micro_batch_size=fit_micro_batch(config, previous.get("micro_batch_size"), world))
    settings.check(config, world.size)
    return config


def check_memory(model: ModelConfig) -> None:
    """Raise UserError if the weights alone are larger than this machine's memory, before anything is built."""
    parameters, memory = sum(footprint.parameters(model).values()), settings.memory_bytes()
    if 4 * parameters > memory:
        raise UserError(
            f"--n_layer={model.n_layer} --n_embd={model.n_embd} --vocab_size={model.vocab_size} make {parameters:,} "
            f"parameters: {4 * parameters / 1e9:,.0f} GB of weights, and this machine has {memory / 1e9:,.0f} GB of memory"
        )


def fit_micro_batch(config: Config, previous: int | None, world: World) -> int:
    """Sequences of a micro-batch: as set, or for auto the largest equal share of an update that fits (see `footprint`).

    All else in `config` is resolved. A run keeps its `previous` choice where the ranks can share it, because bits depend on it.
    All ranks must call it: the rank with the least memory decides. Under `exact` what else uses the memory now must not count:
    it takes the total memory, rounded down.
    """
    if config.train.micro_batch_size != "auto":
        return int(config.train.micro_batch_size)
    sequences, exact = config.sequences_per_update, config.parallel.strategy == "exact"
    if isinstance(previous, int) and sequences % (previous * (1 if exact else world.size)) == 0:
        return previous
    budget = footprint.CPU_BYTES
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        budget = footprint.USABLE * min(world.all_gather(total >> 32 << 32 if exact else free))
    return footprint.largest_micro_batch(config, world.size, world.device.type, budget)
