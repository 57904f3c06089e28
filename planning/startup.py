"""The machines at hand: what their hardware can do, whether it suffices for a run, and the banner of what is about to run."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import torch

import data
from common.errors import UserError, plural
from hardware import device, footprint, host
from hardware.host import cores
from kernels import activate_attention_kernel
from parallel.world import World
from planning.choices import Machines
from settings import Config

# Which settings make a part of the memory large.
BLAME = {
    "activations": ("micro_batch_size", "seq_len", "n_embd", "n_layer"),
    "logits": ("vocab_size", "micro_batch_size", "seq_len", "n_embd"),
    "token embedding": ("vocab_size", "n_embd"),
    "position embedding": ("seq_len", "n_embd"),
    "attention": ("n_embd", "n_layer"),
    "MLP": ("n_embd", "n_layer"),
    "output layer": ("vocab_size", "n_embd"),
}


def survey(world: World) -> Machines:
    """What all ranks' hardware can do. All ranks must call it."""
    dtype, fast = device.choose_dtype("auto", world.device), device.fast_at_bfloat16(world.device)
    dtypes, fasts, memories = zip(*world.all_gather((dtype, fast, device.memory(world.device))), strict=True)
    free, total = map(min, zip(*memories, strict=True))

    def choose_compile(wanted: str, dtype: str, run_flops: float) -> str:
        return min(world.all_gather(device.choose_compile(wanted, world.device, dtype, run_flops)))  # off before on

    slowest, muon_dtype = min(dtypes, key=list(device.DTYPES).index), "bfloat16" if all(fasts) else "float32"
    return Machines(world.size, world.device.type, slowest, muon_dtype, free, total, torch.get_num_threads(), choose_compile)


def check(config: Config, world: World) -> list[str]:
    """Raise UserError where this machine lacks what a run needs: memory, packages or disk. Returns warnings."""
    check_memory(config, world)
    wanted = {"wandb": config.log.wandb != "off", "tensorboard": config.log.tensorboard}
    purposes = {"matplotlib": "curves.png", "wandb": f"--wandb={config.log.wandb}", "tensorboard": "--tensorboard=true"}
    for package, purpose in purposes.items():
        if wanted.get(package, True) and find_spec(package) is None:
            raise UserError(f"{purpose} needs {package}, which is not installed; try: pip install {package}")
    return check_disk(config)


def check_memory(config: Config, world: World) -> None:
    """Raise UserError if what the ranks here hold at the peak of an update, and a save's copy, exceed this machine's memory.

    On a CPU the kernel would end the run without a word. A GPU says itself that it has no more.
    """
    if world.device.type != "cpu":
        return
    parts = footprint.of_rank(config, world.size, "cpu")
    needed = world.local_size * sum(parts.values()) + footprint.checkpoint_bytes(config.model, config.optim.optimizer)
    if needed <= host.memory_bytes():
        return
    weights, others = footprint.parameters(config.model), {part: parts.get(part, 0) for part in ("activations", "logits")}
    largest = max(others, key=others.get)
    what = largest
    if others[largest] < sum(parts.values()) / 2:
        largest, what = max(weights, key=weights.get), f"the {max(weights, key=weights.get)}, its gradients and optimizer state"
    flags = " ".join(f"--{name}={getattr(config.train if 'micro' in name else config.model, name)}" for name in BLAME[largest])
    raise UserError(
        f"an update takes about {needed / 1e9:,.1f} GB here, and this machine has {host.memory_bytes() / 1e9:,.1f} GB of "
        f"memory; the largest part is {what}: make one of {flags} smaller"
    )


def check_disk(config: Config) -> list[str]:
    """Raise UserError if no checkpoint could be written, and warn if there is no room for all that are kept at once."""
    directory = Path(config.run.out_dir, config.run.name).absolute()
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"--out_dir={config.run.out_dir} --name={config.run.name}: {there} is a file; choose a directory")
    size, free = footprint.checkpoint_bytes(config.model, config.optim.optimizer), shutil.disk_usage(there).free
    if size > free:
        needed = f"a checkpoint takes {size / 1e6:,.1f} MB, and the disk has {free / 1e6:,.0f} MB left"
        raise UserError(f"--out_dir={config.run.out_dir}: {needed}")
    more = footprint.checkpoints_at_once(config.checkpoint, config.train.steps) - len([*directory.glob("checkpoints/step-*")])
    if more * size <= free:
        return []
    needed = f"{plural(more, 'more checkpoint')} of {size / 1e6:,.1f} MB, and the disk has {free / 1e6:,.0f} MB left"
    return [f"warning: --out_dir={config.run.out_dir}: the run will write and keep {needed}; lower --keep_last or --keep_best"]


def peak_flops(world: World, dtype: str) -> float:
    """Peak FLOP/s of all ranks. Each is measured by itself: more threads than cores would count cores twice."""
    used = 1.0 if world.device.type != "cpu" else min(1.0, cores() / (world.local_size * torch.get_num_threads()))
    return device.peak_flops(world.device, dtype) * world.size * used


def banner(config: Config, mixture: data.Mixture, world: World, step: int) -> str:
    """What is about to run, as aligned lines. config: resolved. step: where it begins."""
    model, train, ranks = config.model, config.train, plural(world.size, "rank")
    batches = data.make_batches(config, mixture)
    each, more = divmod(config.micro_batches, world.size)
    shared = f", {each}{f' or {each + 1}' if more else ''} on each of {ranks}" if world.size > 1 else ""
    cuda = world.device.type == "cuda"
    hardware = torch.cuda.get_device_name(world.device) if cuda else f"{world.device.type} ({plural(cores(), 'core')})"
    kernel = activate_attention_kernel(model, device.DTYPES[train.dtype], world.device)
    if config.data.attend == "document":  # as `kernels.document_mask` chooses
        flex = "a mask" if model.dropout else "FlexAttention"
        kernel = f"{flex if cuda else kernel}, within documents"
    memory, total = sum(footprint.of_rank(config, world.size, world.device.type).values()), device.memory(world.device)[1]
    source = "by its datasheet" if device.known_peak_flops(world.device, train.dtype) else "measured here by matrix products"
    parts = zip(mixture.datasets, mixture.shares, batches.streams, batches.epochs(train.steps), strict=True)
    rows = [
        f"model   {model.architecture}, {sum(footprint.parameters(model).values()):,} parameters: "
        f"{plural(model.n_layer, 'layer')}, {model.n_embd} wide, vocabulary {model.vocab_size}, context {model.seq_len}",
        *(
            f"tokens  {len(stream):,} to train on in {dataset.directory}; the run reads them {epochs:.2f} times"
            + f", for {100 * share / data.BLOCK:.3g} % of its sequences" * (len(mixture.datasets) > 1)
            for dataset, share, stream, epochs in parts
        ),
        f"batch   {train.tokens_per_update:,} tokens = {plural(config.micro_batches, 'micro-batch')} of "
        f"{train.micro_batch_size} x {model.seq_len}{shared}; {plural(train.steps, 'step')}",
        f"ranks   {ranks}, {config.parallel.strategy}, {plural(train.threads, 'thread')} each",
        f"device  {hardware}, {train.dtype}, {'' if train.compile == 'on' else 'not '}compiled, attention by {kernel}",
        f"memory  about {memory / 1e6:,.0f} MB of {total / 1e6:,.0f} MB for the tensors of a rank",
        f"peak    {peak_flops(world, train.dtype) / 1e12:.3g} TFLOP/s of all ranks, {source}",
        *precision_remark(config, world.device),
        *(remark if remark.startswith("warning:") else f"note    {remark}" for remark in mixture.remarks),
    ]
    begins = f"from step {step}" if step else "from its beginning"
    return "\n  ".join([f"{Path(config.run.out_dir, config.run.name)}, {begins}", *rows])


def precision_remark(config: Config, own: torch.device) -> list[str]:
    """A warning of bfloat16 on a CPU that is not fast in it: it was set, or the run began with it elsewhere."""
    flags = ["--dtype=float32"] * (config.train.dtype == "bfloat16")
    flags += ["--muon_dtype=float32"] * (config.optim.optimizer == "muon" and config.optim.muon_dtype == "bfloat16")
    if own.type != "cpu" or not flags or device.fast_at_bfloat16(own):
        return []
    return [
        f"warning: this processor is not known to be fast in bfloat16; {' '.join(flags)} may be faster, but changes the bits"
    ]
