"""Weights and optimizer state as they are saved: copied to host memory, in files that several ranks write.

The files are dealt to the ranks that share the first copy of the weights. Under fsdp these are all ranks, or with `--replicate`
the first group of them; otherwise only the master. What a file holds depends on names and sizes, not on who writes it.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoints import huggingface, tensor_files
from checkpoints.retention import FileRecord, record
from common import files
from settings import ModelConfig


@dataclass(frozen=True)
class Snapshot:
    """What this rank writes of a checkpoint, in host memory, and which files hold all tensors of the checkpoint."""

    config: ModelConfig
    layouts: list[tensor_files.Layout]
    files: list[str]  # that this rank writes
    model: dict[str, Tensor]  # by our names
    optimizer: dict[str, Tensor]

    def write(self, directory: Path) -> dict[str, FileRecord]:
        """Write this rank's files and flush them to disk. Returns their records. The same tensors give the same bytes."""
        tensors, records = huggingface.to_hf(self.model, self.config) | self.optimizer, {}
        for layout in self.layouts:
            for path in layout.write(directory, tensors, torch.float32, only=self.files):
                files.sync(path)
                records[path.name] = record(path)
        return records


def count_writers(engine) -> int:
    """How many ranks, from the first on, write checkpoints: those that share the first copy of the weights."""
    return engine.model.mesh.get_group("shard").size() if engine.sharded else 1


def take_snapshot(engine, limit: int) -> Snapshot:
    """Copy what this rank will write, in files of at most `limit` bytes dealt one by one. All ranks must call it."""
    config, weights, state = engine.module.config, engine.parameters, engine.optimizer_state()
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    layouts = [
        huggingface.layout(shapes, config, limit),
        tensor_files.lay_out("optimizer", {name: 4 * math.prod(tensor.shape) for name, tensor in state.items()}, limit),
    ]
    by_file, ranks = layouts[0].tensors | layouts[1].tensors, count_writers(engine)
    dealt = {file: number % ranks for number, file in enumerate(by_file)}
    writer = {name: dealt[file] for file, names in by_file.items() for name in names}
    writer |= {ours: writer[theirs] for ours, theirs in huggingface.tensor_names(shapes, config).items()}
    own = [file for file, rank in dealt.items() if rank == engine.world.rank]
    return Snapshot(config, layouts, own, engine.gather(weights, writer), engine.gather(state, writer))


def write_together(directory: Path, snapshot: Snapshot, group: dist.ProcessGroup | None) -> dict[str, FileRecord]:
    """Write this rank's files, wait for the other writers in `group` (None: alone), and return the records of all.

    Raises OSError where a rank could not write: whatever fails, it tells the others, so that nobody waits in vain.
    """
    records, problem = {}, ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        records = snapshot.write(directory)
    except Exception as error:
        problem = str(error) or type(error).__name__
    reports = [(records, problem)]
    if group:
        reports *= group.size()
        dist.all_gather_object(reports, (records, problem), group=group)
    if problems := [problem + f" (rank {rank})" * bool(group) for rank, (_, problem) in enumerate(reports) if problem]:
        raise OSError("; ".join(problems))
    return {name: record for records, _ in reports for name, record in records.items()}
