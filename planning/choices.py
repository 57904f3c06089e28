"""What the settings leave open, chosen once the data, the ranks and their hardware are known. All ranks choose the same.

Also here: whether this machine has what a run will need, and the introduction that says what is about to run.
"""

import dataclasses
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch

import data
import settings
from checkpoints import huggingface
from common.errors import UserError, plural
from hardware import device, footprint, host
from hardware.host import cores
from kernels import activate_attention_kernel
from parallel.world import World
from planning import rules
from settings import Config


def resolve(config: Config, vocab_size: int, world: World, pretrained: Path | None, previous: dict) -> Config:
    """`config` with every choice made that it left open.

    pretrained: the model directory that gives the architecture, if the settings do not. previous: the settings of the run so
    far. The run keeps its precision, its micro-batches, its warmup, and whether it compiles. All ranks must call it. Raises
    UserError where something does not fit.
    """
    model, train = config.model, config.train
    if pretrained:
        model = huggingface.shape_of(pretrained, model)
    model = settings.resolve_model(model, vocab_size)
    optim, precision = config.optim, choose_precision(config, world, previous)
    if optim.warmup_steps < 0 and "warmup_steps" in previous:  # a longer run has no second warmup
        warmup = min(previous["warmup_steps"], settings.resolve_schedule(optim, train.steps).warmup_steps)
        optim = dataclasses.replace(optim, warmup_steps=warmup)
    run_flops = footprint.flops_per_token(model) * train.steps * train.tokens_per_update
    kept = previous.get("compile", "auto") if previous.get("device") == world.device.type else "auto"
    wanted = kept if train.compile == "auto" else train.compile  # a longer run does not begin to compile: bits depend on it
    compiles = world.all_gather(device.choose_compile(wanted, world.device, precision["dtype"], run_flops))
    train = dataclasses.replace(
        train,
        device=world.device.type,
        compile="off" if "off" in compiles else "on",
        threads=torch.get_num_threads(),
    )
    config = dataclasses.replace(config, model=model, train=train, optim=settings.resolve_schedule(optim, train.steps))
    config = settings.replace(config, **precision)
    config = settings.replace(config, micro_batch_size=fit_micro_batch(config, previous.get("micro_batch_size"), world))
    rules.check(config, world.size)
    check_memory(config, world)
    check_saving(config)
    return config


def choose_precision(config: Config, world: World, previous: dict) -> dict[str, str]:
    """dtype and muon_dtype by name: as set, or as `previous` on such a device, or what every rank's hardware is fast at."""
    kept = settings.BEFORE | previous if previous.get("device") == world.device.type else {}
    dtypes = world.all_gather(device.choose_dtype("auto", world.device))
    fast = all(world.all_gather(device.fast_at_bfloat16(world.device)))
    chosen = {"dtype": min(dtypes, key=list(device.DTYPES).index), "muon_dtype": "bfloat16" if fast else "float32"}
    given = {"dtype": config.train.dtype, "muon_dtype": config.optim.muon_dtype}
    return {name: kept.get(name, chosen[name]) if given[name] == "auto" else given[name] for name in given}


def check_memory(config: Config, world: World) -> None:
    """Raise UserError if what the ranks here hold at the peak of an update, during a save, is more than this machine's memory.

    On a CPU the kernel would end the run without a word. A GPU says itself that it has no more.
    """
    if world.device.type != "cpu":
        return
    of_rank = sum(footprint.of_rank(config, world.size, "cpu").values())
    writers = min(world.local_size, footprint.writers(config, world.size))  # together they hold one copy at most
    saving = min(footprint.host_bytes(config, 1), writers * footprint.host_bytes(config, world.size))
    needed = world.local_size * of_rank + saving
    if needed > host.memory_bytes():
        raise UserError(
            f"--vocab_size={config.model.vocab_size} --n_embd={config.model.n_embd} --n_layer={config.model.n_layer} "
            f"--micro_batch_size={config.train.micro_batch_size}: an update takes about {needed / 1e9:,.1f} GB here, and this "
            f"machine has {host.memory_bytes() / 1e9:,.1f} GB of memory; make one of them smaller"
        )


def check_saving(config: Config) -> None:
    """Raise UserError if what a run leaves could not be written: a package is missing, or the disk too small."""
    packages = {"matplotlib": "curves.png"}
    packages |= {"wandb": f"--wandb={config.log.wandb}"} if config.log.wandb != "off" else {}
    packages |= {"tensorboard": "--tensorboard=true"} if config.log.tensorboard else {}
    for package, purpose in packages.items():
        if find_spec(package) is None:
            raise UserError(f"{purpose} needs {package}, which is not installed; try: pip install {package}")
    directory = Path(config.run.out_dir, config.run.name).absolute()
    directory = next(path for path in (directory, *directory.parents) if path.exists())
    if not directory.is_dir():
        raise UserError(f"--out_dir={config.run.out_dir} --name={config.run.name}: {directory} is a file; choose a directory")
    size, free = footprint.checkpoint_bytes(config), shutil.disk_usage(directory).free
    if size > free:
        needed = f"a checkpoint takes {size / 1e6:,.1f} MB, and the disk has {free / 1e6:,.0f} MB left"
        raise UserError(f"--out_dir={config.run.out_dir}: {needed}")


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
    if world.device.type != "cpu":
        free, total = device.memory(world.device)
        budget = footprint.USABLE * min(world.all_gather(total >> 32 << 32 if exact else free))
    return footprint.largest_micro_batch(config, world.size, world.device.type, budget)


def peak_flops(world: World, dtype: str) -> float:
    """Peak FLOP/s of all ranks. Each is measured by itself: more threads than cores would count cores twice."""
    used = 1.0 if world.device.type != "cpu" else min(1.0, cores() / (world.local_size * torch.get_num_threads()))
    return device.peak_flops(world.device, dtype) * world.size * used


def introduce(config: Config, mixture: data.Mixture, world: World, step: int, peak_flops: float) -> str:
    """What is about to run, as aligned lines. config: resolved. step: where it begins. peak_flops: of all ranks, in FLOP/s."""
    model, train, ranks = config.model, config.train, plural(world.size, "rank")
    parameters, layers = sum(footprint.parameters(model).values()), plural(model.n_layer, "layer")
    batches = data.make_batches(config, mixture)
    each, more = divmod(config.micro_batches, world.size)
    shared = f", {each}{f' or {each + 1}' if more else ''} on each of {ranks}" if world.size > 1 else ""
    total, hardware = device.memory(world.device)[1], f"{world.device.type} ({plural(cores(), 'core')})"
    if world.device.type == "cuda":
        hardware = torch.cuda.get_device_name(world.device)
    compiled = "compiled" if train.compile == "on" else "not compiled"
    kernel = activate_attention_kernel(model, device.DTYPES[train.dtype], world.device)
    if config.data.attend == "document":  # as `kernels.document_mask` chooses
        flex = "a mask" if model.dropout else "FlexAttention"
        kernel = f"{flex if world.device.type == 'cuda' else kernel}, within documents"
    memory = sum(footprint.of_rank(config, world.size, world.device.type).values())
    source = "by its datasheet" if device.known_peak_flops(world.device, train.dtype) else "measured here by matrix products"
    parts = zip(mixture.datasets, mixture.shares, batches.streams, batches.epochs(train.steps), strict=True)
    is_mixed = len(mixture.datasets) > 1
    rows = [
        f"model   {model.architecture}, {parameters:,} parameters: {layers}, {model.n_embd} wide, "
        f"vocabulary {model.vocab_size}, context {model.seq_len}",
        *(
            f"tokens  {len(stream):,} to train on in {dataset.directory}; the run reads them {epochs:.2f} times"
            + f", for {100 * share / data.SHARES:.3g} % of its sequences" * is_mixed
            for dataset, share, stream, epochs in parts
        ),
        f"batch   {train.tokens_per_update:,} tokens = {plural(config.micro_batches, 'micro-batch')} of "
        f"{train.micro_batch_size} x {model.seq_len}{shared}; {plural(train.steps, 'step')}",
        f"ranks   {ranks}, {config.parallel.strategy}, {plural(train.threads, 'thread')} each",
        f"device  {hardware}, {train.dtype}, {compiled}, attention by {kernel}",
        f"memory  about {memory / 1e6:,.0f} MB of {total / 1e6:,.0f} MB for the tensors of a rank",
        f"peak    {peak_flops / 1e12:.3g} TFLOP/s of all ranks, {source}",
    ]
    rows += precision_remarks(config, world.device)
    remarks = [dataset.remark for dataset in mixture.datasets if dataset.remark]
    rows += [remark if remark.startswith("warning:") else f"note    {remark}" for remark in remarks]
    begins = f"from step {step}" if step else "from its beginning"
    return "\n  ".join([f"{Path(config.run.out_dir, config.run.name)}, {begins}", *rows])


def precision_remarks(config: Config, own: torch.device) -> list[str]:
    """A warning of bfloat16 on a CPU that is slow in it: it was set, or the run began with it elsewhere."""
    muon_dtype = config.optim.muon_dtype if config.optim.optimizer == "muon" else ""
    flags = {"--dtype=float32": config.train.dtype, "--muon_dtype=float32": muon_dtype}
    slow = [flag for flag, dtype in flags.items() if dtype == "bfloat16"]
    if own.type != "cpu" or not slow or device.fast_at_bfloat16(own):
        return []
    rates = device.product_rates()
    times = f"{rates['float32'] / rates['bfloat16']:.3g} times as fast as bfloat16"
    return [f"warning: on this processor float32 is {times}; {' '.join(slow)} would use it, but changes the bits"]
