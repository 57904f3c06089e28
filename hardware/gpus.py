"""GPUs, what connects them, and how long an update takes on them: an alpha-beta model of the collectives.

A collective takes a latency (alpha) and a time for each byte (1 / beta). Sources stand beside the numbers. No torch is needed.
"""

import math
from dataclasses import dataclass

from hardware import footprint, host
from settings import Config

NODE = 8  # GPUs that share NVLink
SHAPES = 4  # a model's matrices have about so many different shapes, and Muon gathers its updates shape by shape
BUCKET_BYTES = 25 * 2**20  # DDP sends so many bytes of gradients together
GATHERED_BYTES = 2**27  # zero1 receives so many bytes of weights together
# Seconds of a ring's start and of a hop between nodes, as NCCL counts them (src/graph/tuning.cc).
START, NETWORK_HOP = 8.4e-6, 14.0e-6
# Dense bfloat16 tensor-core peaks in FLOP/s, from the vendors' datasheets. A name fits if it has all the words of an entry.
GPU_PEAK_FLOPS = {
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


@dataclass(frozen=True)
class Hardware:
    """A GPU, or the CPU of this machine for one rank, and what connects it."""

    peak_flops: float  # dense bfloat16, FLOP/s
    memory: float  # bytes
    link: float  # bytes/s that leave a GPU in a ring within a node
    hop: float  # seconds of a ring's step within a node
    network: float  # bytes/s of the network for each GPU, between nodes
    mfu: float  # usual for a model that keeps it busy


# peak_flops, memory, network: NVIDIA's datasheets of the SXM parts and of the DGX systems (HDR InfiniBand for A100, NDR for the
# others, one adapter a GPU). link: NVLinks times what NCCL counts on for each (src/graph/topo.h: 20.0, 20.6 and 40.1 GB/s;
# nccl-tests#212 measures 370 GB/s on eight H100); 4090: PCIe 4.0 through host memory, where NCCL counts on 10 GB/s between
# sockets (nccl-tests#307), and 10 Gb Ethernet. hop: src/graph/tuning.cc. mfu: torchtitan's docs/performance.md has 0.56 for
# Llama 8B on A100 and 0.33 to 0.39 on H100; a 4090 reaches 0.29 of an A100's peak (nanoGPT#182); B200's is a guess.
GPUS = {
    "a100": Hardware(GPU_PEAK_FLOPS["A100"], 80e9, 12 * 20.0e9, 3.4e-6, 25e9, 0.5),
    "h100": Hardware(GPU_PEAK_FLOPS["H100"], 80e9, 18 * 20.6e9, 3.4e-6, 50e9, 0.4),
    "h200": Hardware(GPU_PEAK_FLOPS["H200"], 141e9, 18 * 20.6e9, 3.4e-6, 50e9, 0.4),
    "b200": Hardware(GPU_PEAK_FLOPS["B200"], 180e9, 18 * 40.1e9, 3.4e-6, 50e9, 0.35),
    "4090": Hardware(GPU_PEAK_FLOPS["RTX 4090"], 24e9, 10e9, 5.7e-6, 1.25e9, 0.5),
}


def this_cpu(world_size: int, core_flops: float) -> Hardware:
    """A rank's share of this machine, of whose cores each multiplies at `core_flops`. gloo sends about 1 GB/s."""
    return Hardware(host.cores() * core_flops / world_size, host.memory_bytes() / world_size, 1e9, 50e-6, 1e9, 0.35)


def speed(config: Config, world_size: int, hardware: Hardware, mfu: float) -> dict:
    """An update's seconds of computing and of waiting for the network, and the bytes that each rank sends."""
    flops = footprint.flops_per_token(config.model) * config.train.tokens_per_update
    again = 4 / 3 if config.train.activation_checkpointing else 1  # the forward twice; MFU does not count it
    micro_steps = len(range(0, config.micro_batches, world_size))
    compute = flops * again * micro_steps / config.micro_batches / hardware.peak_flops / mfu
    last_backward = compute / micro_steps * 2 / 3
    sent = waited = 0.0
    for size, messages, ranks, hidden in traffic(config, world_size, micro_steps):
        seconds = size / bandwidth(hardware, ranks) + messages * latency(hardware, ranks)
        window = {"": 0.0, "backward": last_backward, "update": compute}[hidden]
        sent += size
        waited += max(seconds - window, seconds / messages) if hidden else seconds
    return {"compute_s": compute, "waited_s": waited, "step_s": compute + waited, "sent_bytes": sent}


def traffic(config: Config, world_size: int, micro_steps: int) -> list[tuple[float, int, int, str]]:
    """What a rank sends in an update, as (bytes, number of collectives, ranks in each of them, what computes meanwhile).

    The last is "backward" (the last one of the update), "update" (all of it) or "" (nothing: the ranks wait).
    """
    strategy, P = config.parallel.strategy, sum(footprint.parameters(config.model).values())
    layers = config.model.n_layer
    buckets = math.ceil(4 * P / BUCKET_BYTES)
    if world_size == 1:
        return []
    all_reduce = 2 * (world_size - 1) / world_size * 4.0 * P
    # Muon's updates: gathered once for each shape, or for fsdp's rows sent and sent back.
    matrices = float(footprint.muon_element(config)) * footprint.blocks_size(config.model)
    updates = [((world_size - 1) / world_size * matrices, SHAPES, world_size, "")] if matrices else []
    match strategy:
        case "exact":
            return [(2 * all_reduce, math.ceil(8 * P / BUCKET_BYTES), world_size, "backward"), *updates]  # integers of 8 bytes
        case "scratch_allreduce" | "scratch_reduce_scatter":  # at least: the former has one for each tensor
            return [(all_reduce, 2, world_size, ""), *updates]
        case "zero1":
            return [
                (all_reduce, buckets, world_size, "backward"),
                (all_reduce / 2, math.ceil(4 * P / GATHERED_BYTES), world_size, ""),
            ]
        case "fsdp":
            copies = config.parallel.replicate
            shards = world_size // copies
            part, element = (shards - 1) / shards, footprint.element_bytes(config)
            gathers = 2 * micro_steps  # the blocks' weights, for forward and for backward
            shared = [(part * P * element * gathers, gathers * (layers + 1), shards, "update")] if shards > 1 else []
            shared += [(part * 4.0 * P, layers + 1, shards, "backward")] if shards > 1 else []
            between = 2 * (copies - 1) / copies * 4.0 * P / shards
            exchanged = [(2 * part * matrices / world_size, 2 * SHAPES, shards, "")] if matrices and shards > 1 else []
            return shared + exchanged + ([(between, layers + 1, world_size, "backward")] if copies > 1 else [])
    return [(all_reduce / (2 if config.parallel.grad_compression == "bf16" else 1), buckets, world_size, "backward"), *updates]


def bandwidth(hardware: Hardware, ranks: int) -> float:
    """Bytes/s that leave each rank in a collective. Between nodes, rings use all adapters of a node at once."""
    return hardware.link if ranks <= NODE else min(hardware.link, NODE * hardware.network)


def latency(hardware: Hardware, ranks: int) -> float:
    """Seconds that a collective takes however small: the hops of a ring or, where that is less, of a tree over the nodes."""
    nodes = math.ceil(ranks / NODE)
    if nodes == 1:
        return START + 2 * (ranks - 1) * hardware.hop
    ring = 2 * (ranks - nodes) * hardware.hop + 2 * nodes * NETWORK_HOP
    tree = 2 * (NODE - 1) * hardware.hop + 2 * math.log2(nodes) * NETWORK_HOP
    return START + min(ring, tree)
