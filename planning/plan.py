"""What a run will need, before anything is made or rented: `python train.py [config/NAME.toml] --plan [--flag=value ...]`

Memory of a rank, time, money, traffic and checkpoints, all calculated from the settings, without a GPU, data or torch. The
speed is an assumption: --plan_mfu, or a usual one.
"""

import contextlib
import dataclasses
from dataclasses import dataclass

import settings
from common.errors import UserError, plural, say
from hardware import footprint, gpus, host
from hardware.gpus import Hardware
from planning import choices, dial, rules
from reports.log import duration
from settings import Config, PlanConfig

CHINCHILLA = 20  # tokens a parameter (Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models")
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
    mfu: float
    compute_s: float  # of an update
    waited_s: float  # for the network
    sent_bytes: float  # by a rank in an update

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
        return self.config.train.steps * (self.compute_s + self.waited_s)

    @property
    def dollars(self) -> float:
        """The price of the run. This machine costs nothing."""
        rank_hours = self.seconds / 3600 * self.options.plan_world_size
        return 0.0 if self.options.plan_gpu == "cpu" else rank_hours * self.options.dollars_per_gpu_hour


def read_command(args: list[str], description: str) -> Config:
    """The settings of a command line of train.py. With --plan it prints the plan and exits. Raises UserError."""
    command = dial.load_command(args, description)
    if not command.plan.plan:
        return command.config
    if host.read_ranks()[0] == 0:
        say(text(make(command.config, command.plan)))
    raise SystemExit(0)


def make(config: Config, options: PlanConfig) -> Plan:
    """The plan of the run that `config` describes. Raises UserError."""
    ranks, model = options.plan_world_size, config.model
    if model.init_from != "scratch":
        from checkpoints import huggingface, lookup  # import torch

        model = huggingface.shape_of(lookup.find_model(model.init_from, ("config.json",))[0], model)
    once, vocab_size, source = dial.dataset(config.data, model.vocab_size)
    if model.vocab_size != "auto":
        source = "by --vocab_size" if model.init_from == "scratch" else f"of {model.init_from}"
    dtype, hardware = this_processor(ranks) if options.plan_gpu == "cpu" else ("bfloat16", gpus.GPUS[options.plan_gpu])
    device, compiled = ("cpu", "off") if options.plan_gpu == "cpu" else ("cuda", "on")

    def choose_compile(wanted: str, *_) -> str:
        return compiled if wanted == "auto" else wanted

    machines = choices.Machines(ranks, device, dtype, dtype, hardware.memory, hardware.memory, 1, choose_compile)
    config = choices.resolve(dataclasses.replace(config, model=model), vocab_size, machines, {})
    small = sum(footprint.parameters(config.model).values()) < SMALL and device == "cuda"
    mfu = hardware.mfu * (SMALL_MFU if small else 1) if options.plan_mfu == "auto" else options.plan_mfu
    tokens = config.train.steps * config.train.tokens_per_update
    memory, epochs = footprint.of_rank(config, ranks, device), {name: tokens / size for name, size in once.items()}
    return Plan(config, options, hardware, source, epochs, memory, mfu, *gpus.speed(config, ranks, hardware, mfu))


def this_processor(ranks: int) -> tuple[str, Hardware]:
    """The dtype that --dtype=auto takes on this machine, and the share of it that each rank has. It imports torch."""
    import torch

    from hardware import device

    dtype = device.choose_dtype("auto", cpu := torch.device("cpu"))
    peak, memory = host.cores() * device.best_product(cpu, dtype), host.memory_bytes()
    return dtype, Hardware(peak / ranks, memory / ranks, link=1e9, network=1e9, mfu=0.35)  # gloo sends about 1 GB/s


def remedies(plan: Plan) -> dict[str, float]:
    """The gentlest flags with which a rank's memory fits, also with fsdp and more GPUs, and the bytes that it then takes."""
    config, world_size, own, found = plan.config, plan.options.plan_world_size, plan.config.parallel.strategy, {}
    gentle = [{}, {"micro_batch_size": 1}, {"activation_checkpointing": True}]
    gentle.append(gentle[1] | gentle[2])
    for strategy, doublings in {own: 1, "fsdp": 8}.items():
        for world, flags in ((world_size * 2**i, flags) for i in range(doublings) for flags in gentle):
            changed = settings.replace(config, strategy=strategy, **flags)
            size = sum(footprint.of_rank(changed, world, config.train.device).values())
            with contextlib.suppress(UserError):  # of flags that do not go together
                rules.check(changed, world)
                if size <= plan.usable:
                    flags = flags if strategy == own else {"strategy": strategy} | flags
                    words = " ".join(f"--{name}={str(value).lower()}" for name, value in flags.items())
                    found[words + (f" on {world} GPUs" if world > world_size else "")] = size
                    break
    return found


def text(plan: Plan) -> str:
    """The plan as a table, the verdict first."""
    config, options, memory, model = plan.config, plan.options, plan.memory, plan.config.model
    train, ranks, sizes = config.train, options.plan_world_size, footprint.parameters(model)
    tokens, count, step_s = train.steps * train.tokens_per_update, sum(sizes.values()), plan.compute_s + plan.waited_s
    checkpoint = footprint.checkpoint_bytes(model, config.optim.optimizer)
    kept = footprint.checkpoints_at_once(config.checkpoint, train.steps)
    ideal = footprint.flops_per_token(model) * train.tokens_per_update / ranks / plan.hardware.peak_flops / plan.mfu
    price = f" at ${options.dollars_per_gpu_hour:g}" if plan.dollars else ""
    rows = [
        f"{config.run.name} on {ranks} x {options.plan_gpu.upper()}, {config.parallel.strategy}, {train.dtype}: "
        f"{'fits' if plan.fits else 'DOES NOT FIT'}, {duration(plan.seconds)}" + f", ${plan.dollars:,.0f}" * bool(plan.dollars),
        ("Parameters", model.architecture),
        *((f"  {name}", f"{size:,}") for name, size in (sizes | {"total": count}).items() if size),
        ("Memory of a rank, GB",),
        *((f"  {name}", gb(size)) for name, size in memory.items() if size),
        ("  total at the peak of an update", gb(sum(memory.values()))),
        ("  usable", gb(plan.usable), f"of {gb(plan.hardware.memory)}"),
        *(() if plan.fits else (("What would fit, GB",), *(("", gb(size), words) for words, size in remedies(plan).items()),
                                ("  a GPU with more memory, or a smaller model",))),
        ("Batch and tokens",),
        ("  tokens an update", f"{train.tokens_per_update:,}"),
        ("  micro-batch", f"{train.micro_batch_size} x {model.seq_len:,}"),
        ("  micro-steps an update", f"{-(-config.micro_batches // ranks):,}"),
        ("  updates", f"{train.steps:,}"),
        ("  tokens", f"{tokens:,}"),
        *((f"  epochs of {name}", f"{epochs:.2f}") for name, epochs in plan.epochs.items()),
        *(() if plan.epochs else (("  epochs of the dataset", "it is not there"),)),
        ("  vocabulary, padded", f"{model.vocab_size:,}", plan.vocabulary),
        ("  tokens a parameter", f"{tokens / count:.1f}", f"Chinchilla's {CHINCHILLA} would be {CHINCHILLA * count:,} tokens"),
        ("Time and money",),
        ("  FLOPs", f"{footprint.flops_per_token(model) * tokens:.2e}"),
        ("  MFU", f"{plan.mfu:.0%}", ("assumed" if options.plan_mfu == "auto" else "--plan_mfu")
          + f", of a peak of {plan.hardware.peak_flops * ranks / 1e12:,.3g} TFLOP/s"),
        ("  an update", f"{step_s:.3f} s", f"{plan.waited_s:.3f} s of it waiting for the network"),
        ("  efficiency", f"{ideal / step_s:.1%}", f"of {plural(ranks, 'rank')}; each sends {gb(plan.sent_bytes)} GB an update"),
        ("  tokens/s", f"{train.tokens_per_update / step_s:,.0f}"),
        ("  the run", duration(plan.seconds), f"{plan.seconds / 3600 * ranks:,.1f} hours of all ranks{price}"),
        ("  checkpoints on disk", f"{gb(kept * checkpoint)} GB", f"{kept} at most, of {gb(checkpoint)} GB"),
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
