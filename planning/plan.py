"""What a run will need, before anything is made or rented: `python train.py [config/NAME.toml] --plan [--flag=value ...]`

Memory of a rank, time, money, traffic and checkpoints, all calculated from the settings. It needs no GPU, no data and no other
rank, and imports no torch. The speed is an assumption: --plan_mfu, or a usual one. Sources stand beside the numbers.
"""

import dataclasses
import json
import re
import statistics
from pathlib import Path

import data
import settings
from common import cli
from common.errors import UserError, plural, survive_lost_console
from dataset.tokens import GPT2_VOCAB_SIZE
from hardware import cluster, footprint
from hardware.cluster import Hardware
from reports.log import read_records
from settings import Config, DataConfig, PlanConfig

VOCABULARIES = {"bytes": 257, "gpt2": GPT2_VOCAB_SIZE, "cl100k_base": 100277, "o200k_base": 200019}  # of tokenizers by name
CHINCHILLA = 20  # tokens a parameter (Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models")
# bench/results/save_stall.json: 0.74 GB were copied in 0.11 to 0.25 s, and written and flushed in 0.5 to 0.9 s.
COPY_RATE, WRITE_RATE = 3e9, 1e9
SMALL, SMALL_MFU = 300e6, 0.8  # below so many parameters the kernels are short and keep a GPU less busy


def main(config: Config, options: PlanConfig) -> None:
    """Print the plan of the run that `config` describes. Raises UserError."""
    if cli.read_ranks()[0] == 0:
        facts = make(config, options)
        with survive_lost_console():
            print(json.dumps(facts, indent=2) if options.plan_json else text(facts), flush=True)


def make(config: Config, options: PlanConfig) -> dict:
    """The plan, as nested dictionaries of bytes, seconds and counts."""
    world_size, device = options.plan_world_size, "cpu" if options.plan_gpu == "cpu" else "cuda"

    def machine(ranks: int) -> Hardware:
        return cluster.this_cpu(ranks, max(cpu_rates().values())) if device == "cpu" else cluster.GPUS[options.plan_gpu]

    hardware = machine(world_size)
    config, once, source = resolve(config, options, hardware)
    sizes = footprint.parameters(config.model)
    memory = describe_memory(config, world_size, device, hardware)
    tokens = config.train.steps * config.train.tokens_per_update
    small = sum(sizes.values()) < SMALL and device == "cuda"
    mfu = options.plan_mfu or hardware.mfu * (SMALL_MFU if small else 1)
    speeds = {world: cluster.speed(config, world, machine(world), mfu) for world in worlds(config, world_size)}
    alone = cluster.speed(config, 1, machine(1), mfu)["step_s"]
    flops = footprint.flops_per_token(config.model) * tokens
    seconds = config.train.steps * speeds[world_size]["step_s"]
    dollars = seconds / 3600 * world_size * options.dollars_per_gpu_hour if device == "cuda" else 0.0
    size = footprint.checkpoint_bytes(config)
    return {
        "fits": memory["fits"],
        "seconds": seconds,
        "dollars": dollars,
        "dollars_per_gpu_hour": options.dollars_per_gpu_hour,
        "setting": {
            "name": config.run.name,
            "world_size": world_size,
            "gpu": options.plan_gpu,
            "strategy": config.parallel.strategy,
            "dtype": config.train.dtype,
            "architecture": config.model.architecture,
        },
        "vocab_size": config.model.vocab_size,
        "parameters": {**sizes, "total": sum(sizes.values())},
        "memory": memory,
        "batch": {
            "tokens_per_update": config.train.tokens_per_update,
            "micro_batch_size": config.train.micro_batch_size,
            "seq_len": config.model.seq_len,
            "micro_steps": len(range(0, config.micro_batches, world_size)),  # of the rank with the most
        },
        "tokens": {
            "steps": config.train.steps,
            "total": tokens,
            "epochs": {name: tokens / size for name, size in once.items()},
            "vocabulary_by": source,
            "per_parameter": tokens / sum(sizes.values()),
            "chinchilla": CHINCHILLA * sum(sizes.values()),
        },
        "time": {
            "flops": flops,
            "mfu": mfu,
            "peak_flops": hardware.peak_flops * world_size,
            "mfu_is": "--plan_mfu" if options.plan_mfu else "assumed",
            **speeds[world_size],
            "tokens_per_second": config.train.tokens_per_update / speeds[world_size]["step_s"],
            "gpu_hours": seconds / 3600 * world_size,
            "measured": measured(config, device, flops, world_size * hardware.peak_flops),
        },
        "checkpoint": {
            "bytes": size,
            "saves": config.train.steps // config.checkpoint.save_every if config.checkpoint.save_every else 1,
            "stall_s": size / COPY_RATE + (0 if config.checkpoint.async_save else size / WRITE_RATE),
            "write_s": size / WRITE_RATE,
        },
        "scaling": {world: alone / (world * facts["step_s"]) for world, facts in speeds.items()},
    }


def resolve(config: Config, options: PlanConfig, hardware: Hardware) -> tuple[Config, dict[str, float], str]:
    """`config` with every choice made that it leaves open, and after how many tokens a run has read each dataset once.

    There are none where a dataset is not there. The third value says where the size of the vocabulary is from.
    """
    model, once = config.model, {}
    vocab_size, source = vocabulary(config.data)
    if model.init_from != "scratch":
        from checkpoints import huggingface  # imports torch

        found = huggingface.read_config(huggingface.find_model(model.init_from))
        model = dataclasses.replace(found, seq_len=model.seq_len, dropout=model.dropout, init_from=model.init_from)
    if all(Path(directory).is_dir() for directory, _ in data.parse_mixture(config.data.tokens)):
        mixture = data.open_mixture(config.data.tokens, model.vocab_size)
        parts = zip(mixture.names, mixture.streams("train"), mixture.shares, strict=True)
        once = {name: len(stream) * data.SHARES / share for name, stream, share in parts}
        vocab_size, source = mixture.vocab_size, str(mixture)
    if model.vocab_size:
        source = "--vocab_size" if model.init_from == "scratch" else model.init_from
        vocab_size = vocab_size if once else model.vocab_size
    device = "cpu" if options.plan_gpu == "cpu" else "cuda"
    dtype = "bfloat16" if device == "cuda" else cpu_dtype()
    chosen = {"dtype": dtype, "muon_dtype": dtype, "compile": "on" if device == "cuda" else "off"}
    chosen = {name: value for name, value in chosen.items() if cli.flat_values(config)[name] == "auto"}
    config = dataclasses.replace(config, model=settings.resolve_model(model, vocab_size))
    config = settings.replace(config, device=device, **chosen)
    if config.train.micro_batch_size == "auto":
        budget = footprint.CPU_BYTES if device == "cpu" else footprint.USABLE * hardware.memory
        size = footprint.largest_micro_batch(config, options.plan_world_size, device, budget)
        config = settings.replace(config, micro_batch_size=size)
    settings.check(config, options.plan_world_size)
    return config, once, source


def vocabulary(config: DataConfig) -> tuple[int, str]:
    """The tokens of a tokenizer whose dataset is not there, and who says so: the command that makes the dataset, or nobody."""
    words = config.prepare_command.split()
    name = next((word.removeprefix("--tokenizer=") for word in words if word.startswith("--tokenizer=")), "")
    size = VOCABULARIES.get(name, int(name[6:]) if re.fullmatch(r"train:\d{1,7}", name) else 0)
    if size and f"--out={config.tokens}" in words:
        return size, f"--tokenizer={name}, which makes {config.tokens}"
    return GPT2_VOCAB_SIZE, "nobody, so GPT-2's is taken"


def describe_memory(config: Config, world_size: int, device: str, hardware: Hardware) -> dict:
    """A rank's memory by part, as set and with activation checkpointing the other way, and what would fit if it does not."""

    def rank(world: int = world_size, **flags) -> dict[str, float]:
        return footprint.of_rank(settings.replace(config, **flags), world, device)

    usable, now = footprint.USABLE * hardware.memory, rank()
    return {
        "fits": sum(now.values()) <= usable,
        "gpu_bytes": hardware.memory,
        "usable_bytes": usable,
        "parts": now,
        "total": sum(now.values()),
        "activation_checkpointing": config.train.activation_checkpointing,
        "other_parts": rank(activation_checkpointing=not config.train.activation_checkpointing),
        "remedies": {} if sum(now.values()) <= usable else remedies(config, world_size, device, usable),
        "host_bytes_of_rank_0": footprint.host_bytes(config, world_size),
    }


def remedies(config: Config, world_size: int, device: str, usable: float) -> dict[str, float]:
    """Flags, and numbers of GPUs, with which a rank's memory fits into `usable` bytes, and the bytes that it then takes.

    Nothing is listed that only adds to what fits already.
    """
    gentle = [{"micro_batch_size": 1}, {"activation_checkpointing": True}]
    gentle.append(gentle[0] | gentle[1])
    found: list[tuple[dict, int, float]] = []
    for flags in gentle + [{"strategy": name} | more for name in ("zero1", "fsdp") for more in [{}, *gentle]]:
        changed = settings.replace(config, **flags)
        for world in [world_size * 2**i for i in range(8 if "strategy" in flags else 1)]:
            size = sum(footprint.of_rank(changed, world, device).values())
            if size > usable or changed.micro_batches % world or problems(changed, world):
                continue
            if not any(flags.items() >= fewer.items() and world >= ranks for fewer, ranks, _ in found):
                found.append((flags, world, size))
            break
    return {
        " ".join(f"--{name}={str(value).lower()}" for name, value in flags.items())
        + (f" on {world} GPUs" if world > world_size else ""): size
        for flags, world, size in found
    }


def problems(config: Config, world_size: int) -> bool:
    """Whether `config` is refused on `world_size` ranks."""
    try:
        settings.check(config, world_size)
    except UserError:
        return True
    return False


def cpu_rates() -> dict[str, float]:
    """FLOP/s of a core of this machine by dtype. It imports torch."""
    from hardware import device

    return device.product_rates()


def cpu_dtype() -> str:
    """What --dtype=auto takes on this machine's CPU. It imports torch."""
    import torch

    from hardware import device

    return device.choose_dtype("auto", torch.device("cpu"))


def worlds(config: Config, world_size: int) -> list[int]:
    """The numbers of ranks to compare: powers of two that can share the batch, from one node's on, and `world_size`."""
    powers = [2**i for i in range(world_size.bit_length())]
    replicas = config.parallel.replicate
    fit = {world for world in powers if world <= config.micro_batches and world % replicas == 0 and not problems(config, world)}
    return sorted(fit | {world_size})


def measured(config: Config, device: str, flops: float, peak_flops: float) -> dict | None:
    """The speed in the run's own metrics.jsonl, if it has been started on such a device, and the whole run's time at it."""
    path = Path(config.run.out_dir) / config.run.name / "metrics.jsonl"
    preset = path.with_name("config.toml")
    if not path.exists() or not preset.exists() or settings.read_preset(preset).train.device != device:
        return None
    records = [record for _, record in read_records(path) if record and record.get("mfu") and record.get("tokens_per_second")]
    if not records:
        return None
    mfu = statistics.median(record["mfu"] for record in records)
    speed = statistics.median(record["tokens_per_second"] for record in records)
    tokens = config.train.steps * config.train.tokens_per_update
    seconds = tokens / speed if device == "cpu" else flops / peak_flops / mfu
    return {"file": str(path), "mfu": mfu, "tokens_per_second": speed, "seconds": seconds}


def text(facts: dict) -> str:
    """The plan as a table, the verdict first."""
    setting, memory, time, tokens, batch = (facts[name] for name in ("setting", "memory", "time", "tokens", "batch"))
    gpu, world, found = setting["gpu"].upper(), setting["world_size"], memory["remedies"]
    verdict = "fits" if facts["fits"] else "DOES NOT FIT"
    price = f" at ${facts['dollars_per_gpu_hour']:g}" if facts["dollars"] else ""
    checkpointing = ["kept", "checkpointed"][:: -1 if memory["activation_checkpointing"] else 1]
    rows = [
        f"{setting['name']} on {world} x {gpu}, {setting['strategy']}, {setting['dtype']}: {verdict}, "
        f"{duration(facts['seconds'])}" + (f", ${facts['dollars']:,.0f}" if facts["dollars"] else ""),
        ("Parameters", setting["architecture"]),
        *((f"  {name}", f"{count:,}") for name, count in facts["parameters"].items() if count),
        ("Memory of a rank, GB", *(f"activations {word}" for word in checkpointing)),
        *((f"  {name}", *(gb(parts.get(name, 0)) for parts in (memory["parts"], memory["other_parts"])))
          for name in memory["parts"] | memory["other_parts"] if memory["parts"].get(name) or memory["other_parts"].get(name)),
        ("  total at the peak of an update", gb(memory["total"]), gb(sum(memory["other_parts"].values()))),
        ("  usable", gb(memory["usable_bytes"]), f"of {gb(memory['gpu_bytes'])}"),
        ("  host memory of rank 0 while it saves", gb(memory["host_bytes_of_rank_0"])),
        *(() if facts["fits"] else (("What would fit, GB",), *(("", gb(size), words) for words, size in found.items()))),
        *(() if facts["fits"] or found else (("  only a GPU with more memory, or a smaller model",),)),
        ("Batch and tokens",),
        ("  tokens an update", f"{batch['tokens_per_update']:,}"),
        ("  micro-batch", f"{batch['micro_batch_size']} x {batch['seq_len']:,}"),
        ("  micro-steps an update", f"{batch['micro_steps']:,}"),
        ("  updates", f"{tokens['steps']:,}"),
        ("  tokens", f"{tokens['total']:,}"),
        *((f"  epochs of {name}", f"{epochs:.2f}") for name, epochs in tokens["epochs"].items()),
        *(() if tokens["epochs"] else (("  epochs of the dataset", "it is not there"),)),
        ("  vocabulary, padded", f"{facts['vocab_size']:,}", f"told by {tokens['vocabulary_by']}"),
        ("  tokens a parameter", f"{tokens['per_parameter']:.1f}", f"Chinchilla: {CHINCHILLA}, or {tokens['chinchilla']:,}"),
        ("Time and money",),
        ("  FLOPs", f"{time['flops']:.2e}"),
        ("  MFU", f"{time['mfu']:.0%}", f"{time['mfu_is']}, of a peak of {time['peak_flops'] / 1e12:,.3g} TFLOP/s"),
        ("  an update", f"{time['step_s']:.3f} s", f"{time['waited_s']:.3f} s of it waiting for the network"),
        ("  tokens/s", f"{time['tokens_per_second']:,.0f}"),
        ("  the run", duration(facts["seconds"]), f"{time['gpu_hours']:,.1f} hours of all ranks{price}"),
        *((("  the run, as measured", duration(run["seconds"]), f"MFU {run['mfu']:.0%} in {run['file']}"),)
          if (run := time["measured"]) else ()),
        ("Checkpoints",),
        ("  size", f"{gb(facts['checkpoint']['bytes'])} GB", f"saved {facts['checkpoint']['saves']:,} times"),
        ("  training waits", f"{facts['checkpoint']['stall_s']:.1f} s", f"{facts['checkpoint']['write_s']:.1f} s to write it"),
        ("Network, by an alpha-beta model without stragglers",),
        ("  a rank sends in an update", f"{gb(time['sent_bytes'])} GB"),
        *((f"  efficiency of {plural(ranks, 'rank')}", f"{share:.1%}", f"{ranks * share:.2f} times one")
          for ranks, share in facts["scaling"].items()),
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


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter."""
    for unit, length, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= length:
            whole, rest = divmod(round(seconds / part), length // part)
            return f"{whole} {unit} {rest} {smaller}"
    return f"{seconds:.1f} s"
