"""Weights and optimizer state as they are saved: copied to host memory, in files that several ranks write.

The files are dealt to the ranks that share the first copy of the weights. Under fsdp these are all ranks, or with `--replicate`
the first group of them. Else it is the master alone. What a file holds depends on names and sizes, not on who writes it.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch.distributed as dist
from torch import Tensor

from checkpoints import huggingface, tensor_files
from common import files
from common.records import Count, Sha256
from hardware import footprint
from parallel.world import World
from settings import Config, ModelConfig

FileRecord = TypedDict("FileRecord", {"size": Count, "sha256": Sha256})  # in manifest.json


def record(path: Path) -> FileRecord:
    """The record of a file."""
    return {"size": path.stat().st_size, "sha256": files.sha256(path)}


@dataclass(frozen=True)
class Snapshot:
    """What this rank writes of a checkpoint, in host memory, and in which files all tensors of the checkpoint are."""

    config: ModelConfig
    layouts: list[tensor_files.Layout]
    files: list[str]  # that this rank writes
    model: dict[str, Tensor]  # by our names
    optimizer: dict[str, Tensor]

    def write(self, directory: Path) -> dict[str, FileRecord]:
        """Write this rank's files and flush them to disk. Returns their records. The same tensors give the same bytes."""
        tensors, records = huggingface.to_hf(self.model, self.config) | self.optimizer, {}
        for layout in self.layouts:
            for path in tensor_files.write(directory, layout, tensors, only=self.files):
                files.sync(path)
                records[path.name] = record(path)
        return records


def take_snapshot(engine, optimizers, config: Config, world: World) -> Snapshot:
    """Copy what this rank will write. All ranks must call it. Training waits for it, and for nothing after it.

    The files are dealt one by one, so each writer holds its share and at most one file more.
    """
    limit, ranks = config.checkpoint.max_shard_bytes, footprint.writers(config, world.size)
    tensors = [engine.parameters, engine.state(optimizers)]
    shapes = [{name: tuple(tensor.shape) for name, tensor in some.items()} for some in tensors]
    layouts = [
        huggingface.layout(shapes[0], config.model, limit),
        tensor_files.lay_out("optimizer", {name: 4 * math.prod(shape) for name, shape in shapes[1].items()}, limit),
    ]
    by_file = layouts[0].tensors | layouts[1].tensors
    dealt = {file: number % ranks for number, file in enumerate(by_file)}
    writer = {name: dealt[file] for file, names in by_file.items() for name in names}
    writer |= {ours: writer[theirs] for ours, theirs in huggingface.tensor_names(shapes[0], config.model).items()}
    model, optimizer = (engine.gather(some, writer) for some in tensors)
    return Snapshot(config.model, layouts, [file for file, rank in dealt.items() if rank == world.rank], model, optimizer)


def write_together(directory: Path, snapshot: Snapshot, group: dist.ProcessGroup | None) -> dict[str, FileRecord]:
    """Write this rank's files into `directory`, wait for the other writers in `group` (None: alone), and return all records.

    Raises OSError where a rank could not write. Whatever fails, every writer tells the others: nobody waits in vain.
    """
    records, fault = {}, ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        records = snapshot.write(directory)
    except Exception as error:
        fault = str(error) or type(error).__name__
    reports = [(records, fault)]
    if group:
        reports *= group.size()
        dist.all_gather_object(reports, (records, fault), group=group)
    faults = [f"{fault} (rank {rank})" if group else fault for rank, (_, fault) in enumerate(reports) if fault]
    if faults:
        raise OSError("; ".join(faults))
    return {name: record for records, _ in reports for name, record in records.items()}
