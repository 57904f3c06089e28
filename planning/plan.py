"""What a run will need, before anything is made or rented: `python train.py [config/NAME.toml] --plan [--flag=value ...]`

Memory of a rank, time, money, traffic and checkpoints, all calculated from the settings. It needs no GPU, no data and no other
rank, and imports no torch. The speed is an assumption: --plan_mfu, or a usual one. Sources stand beside the numbers.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import settings
from common import cli
from common.errors import UserError, plural, survive_lost_console
from hardware import footprint, gpus
from hardware.gpus import Hardware
from planning import dial, law, rules
from reports.log import duration
from settings import Command, Config, PlanConfig

CHINCHILLA = 20  # tokens a parameter (Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models")
# bench/results/save_stall.json: 0.74 GB were copied in 0.11 to 0.25 s, and written and flushed in 0.5 to 0.9 s.
COPY_RATE, WRITE_RATE = 3e9, 1e9
SMALL, SMALL_MFU = 300e6, 0.8  # below so many parameters the kernels are short and keep a GPU less busy


@dataclass(frozen=True)
class Plan:
    """What a run needs, in bytes, seconds and dollars."""

    config: Config  # resolved
    options: PlanConfig
    hardware: Hardware
    vocabulary: str  # where its size is from
    epochs: dict[str, float]  # how often the run reads each dataset; empty where one is not there
    memory: dict[str, float]  # a rank's, by part
    other_memory: dict[str, float]  # the same, with activation checkpointing the other way
    mfu: float
    speed: dict[str, float]  # of an update: see `gpus.speed`
    scaling: dict[int, float]  # efficiency by number of ranks: the speed of a rank, times that of one alone

    @property
    def usable(self) -> float:
        """The bytes of a GPU's memory that tensors may take."""
        return footprint.USABLE * self.hardware.memory

    @property
    def fits(self) -> bool:
        """Whether a rank has the memory."""
        return sum(self.memory.values()) <= self.usable

    @property
    def seconds(self) -> float:
        """The time of the whole run."""
        return self.config.train.steps * self.speed["step_s"]

    @property
    def dollars(self) -> float:
        """The price of the run. This machine costs nothing."""
        rank_hours = self.seconds / 3600 * self.options.plan_world_size
        return 0.0 if self.options.plan_gpu == "cpu" else rank_hours * self.options.dollars_per_gpu_hour


def main(command: Command, args: list[str]) -> None:
    """Print the plan of the run that `command` (the command line `args`) describes, or the plans of --plan_depths, a row each.

    Raises UserError.
    """
    if cli.read_ranks()[0] == 0:
        said = depths(command, args) if command.plan.plan_depths else text(make(command.config, command.plan))
        with survive_lost_console():
            print(said, flush=True)


def depths(command: Command, args: list[str]) -> str:
    """The plans of several depths of the dial, as a table."""
    words = command.plan.plan_depths.split(",")
    if not all(word.isdecimal() and 0 < int(word) <= 256 for word in words):
        raise UserError(
            f"--plan_depths={command.plan.plan_depths} must be numbers of layers with a comma between, as in 12,16,20,24"
        )
    titles = ["depth", "width", "parameters", "batch", "steps", "tokens", "epochs", "lr", "GB a rank", "time", "dollars"]
    path = Path(command.config.run.out_dir, f"ladder-{Path(command.config.data.tokens).name}", "ladder.json")
    climbed = law.read(path) if path.exists() else {}
    found = law.of_rungs(climbed["rungs"], climbed["available"]) if "rungs" in climbed else None
    rows = [titles + ["loss"] * bool(found)]
    for word in words:
        turned = dial.turn(cli.replace(command, depth=int(word)), [*args, f"--depth={word}"])
        try:
            plan = make(turned.config, command.plan)
        except UserError as error:
            raise UserError(f"depth {word}: {error}") from None
        model, train = plan.config.model, plan.config.train
        numbers = (model.n_embd, sum(footprint.parameters(model).values()), train.tokens_per_update, train.steps)
        tokens = train.steps * train.tokens_per_update
        row = [
            word,
            *(f"{number:,}" for number in (*numbers, tokens)),
            f"{max(plan.epochs.values()):.2f}" if plan.epochs else "",
            f"{plan.config.optim.lr:.2e}",
            gb(sum(plan.memory.values())) + " !" * (not plan.fits),
            duration(plan.seconds),
            f"{plan.dollars:,.0f}",
        ]
        if found:
            loss, margin = found.predict(dial.weights(model), law.effective_tokens(tokens, climbed["available"]))
            row.append(f"{loss:.3f} ± {margin:.3f}")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    lines += ["!: does not fit in a rank's memory"] * any(" !" in line for line in lines)
    lines += [f"loss: as {path.parent} predicts it, within 90 %"] * bool(found)
    return "\n".join(lines)


def make(config: Config, options: PlanConfig) -> Plan:
    """The plan of the run that `config` describes. Raises UserError."""
    world_size, device = options.plan_world_size, "cpu" if options.plan_gpu == "cpu" else "cuda"
    core_flops, dtype = this_processor() if device == "cpu" else (0.0, "bfloat16")

    def machine(ranks: int) -> Hardware:
        return gpus.this_cpu(ranks, core_flops) if device == "cpu" else gpus.GPUS[options.plan_gpu]

    hardware = machine(world_size)
    config, once, source = resolve(config, options, hardware, dtype)
    memory, other_memory = (
        footprint.of_rank(settings.replace(config, activation_checkpointing=again), world_size, device)
        for again in (config.train.activation_checkpointing, not config.train.activation_checkpointing)
    )
    small = sum(footprint.parameters(config.model).values()) < SMALL and device == "cuda"
    mfu = options.plan_mfu or hardware.mfu * (SMALL_MFU if small else 1)
    speeds = {world: gpus.speed(config, world, machine(world), mfu) for world in worlds(config, world_size)}
    alone, tokens = gpus.speed(config, 1, machine(1), mfu)["step_s"], config.train.steps * config.train.tokens_per_update
    return Plan(
        config,
        options,
        hardware,
        vocabulary=source,
        epochs={name: tokens / size for name, size in once.items()},
        memory=memory,
        other_memory=other_memory,
        mfu=mfu,
        speed=speeds[world_size],
        scaling={world: alone / (world * speed["step_s"]) for world, speed in speeds.items()},
    )


def resolve(config: Config, options: PlanConfig, hardware: Hardware, dtype: str) -> tuple[Config, dict[str, float], str]:
    """`config` with every choice made that it leaves open, and after how many tokens a run has read each dataset once.

    There are none where a dataset is not there. The third value says where the size of the vocabulary is from.
    """
    model = config.model
    if model.init_from != "scratch":
        from checkpoints import huggingface, lookup  # import torch

        model = huggingface.shape_of(lookup.find_model(model.init_from, ["config.json"])[0], model)
    once, vocab_size, source = dial.dataset(config.data, model.vocab_size)
    if model.vocab_size:
        source = "by --vocab_size" if model.init_from == "scratch" else f"of {model.init_from}"
    device = "cpu" if options.plan_gpu == "cpu" else "cuda"
    chosen = {"dtype": dtype, "muon_dtype": dtype, "compile": "on" if device == "cuda" else "off"}
    chosen = {name: value for name, value in chosen.items() if cli.flat_values(config)[name] == "auto"}
    config = dataclasses.replace(config, model=settings.resolve_model(model, vocab_size))
    config = settings.replace(config, device=device, **chosen)
    if config.train.micro_batch_size == "auto":
        budget = footprint.CPU_BYTES if device == "cpu" else footprint.USABLE * hardware.memory
        size = footprint.largest_micro_batch(config, options.plan_world_size, device, budget)
        config = settings.replace(config, micro_batch_size=size)
    rules.check(config, options.plan_world_size)
    return config, once, source


def this_processor() -> tuple[float, str]:
    """The FLOP/s of a core of this machine, and the dtype that --dtype=auto takes here. It imports torch."""
    import torch

    from hardware import device

    return max(device.product_rates().values()), device.choose_dtype("auto", torch.device("cpu"))


def remedies(plan: Plan) -> dict[str, float]:
    """For each strategy the gentlest flags with which a rank's memory fits, and the bytes that it then takes.

    For fsdp these may be more GPUs: each of them then holds less.
    """
    config, world_size, own = plan.config, plan.options.plan_world_size, plan.config.parallel.strategy
    gentle = [{}, {"micro_batch_size": 1}, {"activation_checkpointing": True}]
    gentle.append(gentle[1] | gentle[2])
    found = {}
    for strategy, doublings in {own: 1, "zero1": 1, "fsdp": 8}.items():
        for world, flags in ((world_size * 2**i, flags) for i in range(doublings) for flags in gentle):
            changed = settings.replace(config, strategy=strategy, **flags)
            size = sum(footprint.of_rank(changed, world, config.train.device).values())
            if size <= plan.usable and works(changed, world):
                flags = flags if strategy == own else {"strategy": strategy} | flags
                words = " ".join(f"--{name}={str(value).lower()}" for name, value in flags.items())
                found[words + (f" on {world} GPUs" if world > world_size else "")] = size
                break
    return found


def works(config: Config, world_size: int) -> bool:
    """Whether `config` works on `world_size` ranks."""
    try:
        rules.check(config, world_size)
    except UserError:
        return False
    return True


def worlds(config: Config, world_size: int) -> list[int]:
    """The numbers of ranks to compare: powers of two that can share the batch, and `world_size`."""
    return sorted({2**i for i in range(world_size.bit_length()) if works(config, 2**i)} | {world_size})


def text(plan: Plan) -> str:
    """The plan as a table, the verdict first."""
    config, options, time, memory, other = plan.config, plan.options, plan.speed, plan.memory, plan.other_memory
    train, world, sizes = config.train, options.plan_world_size, footprint.parameters(config.model)
    tokens, count = train.steps * train.tokens_per_update, sum(sizes.values())
    flops, checkpoint = footprint.flops_per_token(config.model) * tokens, footprint.checkpoint_bytes(config)
    saves = -(-train.steps // (config.checkpoint.save_every or train.steps))  # the last step always is one
    stall = checkpoint / COPY_RATE + (0 if config.checkpoint.async_save else checkpoint / WRITE_RATE)
    price = f" at ${options.dollars_per_gpu_hour:g}" if plan.dollars else ""
    activations = ["kept", "checkpointed"][:: -1 if train.activation_checkpointing else 1]
    rows = [
        f"{config.run.name} on {world} x {options.plan_gpu.upper()}, {config.parallel.strategy}, {train.dtype}: "
        f"{'fits' if plan.fits else 'DOES NOT FIT'}, {duration(plan.seconds)}" + f", ${plan.dollars:,.0f}" * bool(plan.dollars),
        ("Parameters", config.model.architecture),
        *((f"  {name}", f"{size:,}") for name, size in (sizes | {"total": count}).items() if size),
        ("Memory of a rank, GB", *(f"activations {word}" for word in activations)),
        *((f"  {name}", gb(memory.get(name, 0)), gb(other.get(name, 0)))
          for name in memory | other if memory.get(name) or other.get(name)),
        ("  total at the peak of an update", gb(sum(memory.values())), gb(sum(other.values()))),
        ("  usable", gb(plan.usable), f"of {gb(plan.hardware.memory)}"),
        ("  host memory of rank 0 while it saves", gb(footprint.host_bytes(config, world))),
        *(() if plan.fits else (("What would fit, GB",), *(("", gb(size), words) for words, size in remedies(plan).items()),
                                ("  a GPU with more memory, or a smaller model",))),
        ("Batch and tokens",),
        ("  tokens an update", f"{train.tokens_per_update:,}"),
        ("  micro-batch", f"{train.micro_batch_size} x {config.model.seq_len:,}"),
        ("  micro-steps an update", f"{-(-config.micro_batches // world):,}"),
        ("  updates", f"{train.steps:,}"),
        ("  tokens", f"{tokens:,}"),
        *((f"  epochs of {name}", f"{epochs:.2f}") for name, epochs in plan.epochs.items()),
        *(() if plan.epochs else (("  epochs of the dataset", "it is not there"),)),
        ("  vocabulary, padded", f"{config.model.vocab_size:,}", plan.vocabulary),
        ("  tokens a parameter", f"{tokens / count:.1f}", f"Chinchilla's {CHINCHILLA} would be {CHINCHILLA * count:,} tokens"),
        ("Time and money",),
        ("  FLOPs", f"{flops:.2e}"),
        ("  MFU", f"{plan.mfu:.0%}", ("--plan_mfu" if options.plan_mfu else "assumed")
          + f", of a peak of {plan.hardware.peak_flops * world / 1e12:,.3g} TFLOP/s"),
        ("  an update", f"{time['step_s']:.3f} s", f"{time['waited_s']:.3f} s of it waiting for the network"),
        ("  tokens/s", f"{train.tokens_per_update / time['step_s']:,.0f}"),
        ("  the run", duration(plan.seconds), f"{plan.seconds / 3600 * world:,.1f} hours of all ranks{price}"),
        ("Checkpoints",),
        ("  size", f"{gb(checkpoint)} GB", f"saved {plural(saves, 'time')}"),
        ("  training waits", f"{stall:.1f} s", f"for a save, which takes {checkpoint / WRITE_RATE:.1f} s to write"),
        ("Network, by an alpha-beta model without stragglers",),
        ("  each rank sends in an update", f"{gb(time['sent_bytes'])} GB"),
        *((f"  efficiency of {plural(ranks, 'rank')}", f"{share:.1%}", f"{ranks * share:.2f} times one")
          for ranks, share in plan.scaling.items()),
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows[1:] if len(row) > i) for i in range(2)]
    lines = [rows[0]]
    for label, *cells in rows[1:]:
        lines += [""] * (label[:1] not in ("", " "))
        lines.append("  ".join([label.ljust(widths[0]), *(c.rjust(widths[1]) if i == 0 else c for i, c in enumerate(cells))]))
    return "\n".join(line.rstrip() for line in lines)


def gb(size: float) -> str:
    """Bytes as gigabytes."""
    return f"{size / 1e9:,.2f}" if size >= 1e7 else f"{size / 1e9:.4f}"
