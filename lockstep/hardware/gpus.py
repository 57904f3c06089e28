"""The peak rates of GPUs, and an estimate of how long an update takes on them. This module does not import torch."""

from dataclasses import dataclass, field

from lockstep.hardware import footprint
from lockstep.settings import Config

# The part of a GPU's speed that is lost to stragglers and latency when it does not train alone. Published throughputs per GPU
# on up to 128 GPUs are at most 9 % lower than on 8 (docs/scale.md). We assume this for any number of GPUs.
LOST_BETWEEN_GPUS = 0.09
SMALL, SMALL_MFU = 300e6, 0.8  # below this many parameters, short kernels lower the MFU by this factor
# Dense bfloat16 tensor-core peaks in FLOP/s, from the vendors' datasheets. A GPU's name matches if it contains all the words.
GPU_PEAK_FLOPS = {
    **{"GB300": 2500e12, "GB200": 2500e12, "B300": 2250e12, "B200": 2250e12, "GH200": 989e12},
    **{"H200 NVL": 836e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12},
    **{"A100": 312e12, "A800": 312e12, "A40": 150e12, "A10": 125e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12},
    **{"RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12, "T4": 65e12},
}


@dataclass(frozen=True)
class GPU:
    """A GPU to plan with."""

    peak_flops: float  # dense bfloat16, FLOP/s
    memory: float  # bytes
    mfu: float  # assumed for a model that keeps it busy
    measured: dict[str, tuple[float, float]] = field(default_factory=dict)  # our presets: parameters, and the MFU on one GPU


# mfu: torchtitan's docs/performance.md lists 0.56 for Llama 8B on A100, and 0.33 to 0.39 on H100. A 4090 reaches 0.29 of an
# A100's peak (nanoGPT#182). B200's is a guess. measured: docs/platforms.md.
GPUS = {
    "a100": GPU(GPU_PEAK_FLOPS["A100"], 80e9, 0.5),
    "h100": GPU(GPU_PEAK_FLOPS["H100"], 80e9, 0.4, {"gpt2_124m": (124e6, 0.416), "llama_1.3b": (1.35e9, 0.509)}),
    "h200": GPU(GPU_PEAK_FLOPS["H200"], 141e9, 0.4),
    "b200": GPU(GPU_PEAK_FLOPS["B200"], 180e9, 0.35),
    "4090": GPU(GPU_PEAK_FLOPS["RTX 4090"], 24e9, 0.5),
}


def typical_mfu(gpu: GPU, parameters: int) -> tuple[float, str]:
    """Return the MFU to plan with, and its source: our own for a model of up to twice or half the size, or an assumption."""
    for preset, (size, mfu) in gpu.measured.items():
        if size / 2 <= parameters <= 2 * size:
            return mfu, f"measured on one GPU with {preset}"
    return gpu.mfu * SMALL_MFU if parameters < SMALL else gpu.mfu, "assumed"


def speed(config: Config, world_size: int, gpu: GPU, mfu: float) -> tuple[float, float]:
    """Return the seconds that an update spends computing, and waiting for other ranks."""
    flops = footprint.flops_per_token(config.model) * config.train.tokens_per_update
    again = 4 / 3 if config.train.activation_checkpointing else 1  # the forward runs twice; MFU counts it once
    micro_steps = footprint.update_of(config, world_size, "cuda").micro_steps
    compute = flops * again * micro_steps / config.micro_batches / gpu.peak_flops / mfu
    waited = compute * LOST_BETWEEN_GPUS / (1 - LOST_BETWEEN_GPUS) if world_size > 1 else 0.0
    return compute, waited
