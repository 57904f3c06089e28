"""What a run tells: console, train.log, metrics.jsonl and wandb. Only the master's `Log` does anything."""

import json
import os
import re
import sys
import time
from pathlib import Path

import torch

from settings import Config, UserError, flat_values

try:
    import fcntl
except ImportError:  # not on Windows, where two runs in one directory are not noticed
    fcntl = None

# Dense bfloat16 tensor-core peaks in FLOP/s, from the vendors' datasheets.
GPU_PEAK_FLOPS = {
    "B200": 2250e12,
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


class Log:
    """The run directory's text: opened once it is sure that no other process uses the directory."""

    def __init__(self, directory: Path, active: bool):
        self.directory, self.active = directory, active
        self.bar = self.wandb = self._lock = None
        if active:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = lock(directory)
            self._text = open(directory / "train.log", "a", buffering=1)  # noqa: SIM115 (open as long as the run)

    def say(self, message: str) -> None:
        """A line on the console and in train.log."""
        if self.active:
            self._text.write(message + "\n")
            if self.bar is None:
                print(message, flush=True)
            else:
                self.bar.write(message)

    def warn(self, message: str) -> None:
        """A line that asks for attention."""
        self.say(f"warning: {message}")

    def rewind(self, step: int) -> dict | None:
        """Cut metrics.jsonl back to `step`, so that no step is told twice; returns the evaluation already made at it."""
        path = self.directory / "metrics.jsonl"
        if not self.active:
            return None
        kept, evaluation = [], None
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:  # torn by a kill
                continue
            if record["step"] <= step:
                kept.append(line + "\n")
                if record["step"] == step and "val_loss" in record:
                    evaluation = record
        temporary = path.with_name(".metrics.jsonl.tmp")
        temporary.write_text("".join(kept))
        os.replace(temporary, path)
        self._metrics = open(path, "a", buffering=1)  # noqa: SIM115
        return evaluation

    def start_wandb(self, config: Config, run_id: str) -> str:
        """Start wandb if it is on, continuing run `run_id` if there is one. Returns the run id to remember."""
        if not self.active or config.log.wandb == "off":
            return run_id
        import wandb

        self.wandb = wandb.init(
            project=config.log.wandb_project,
            name=config.run.name,
            dir=self.directory,
            config=flat_values(config),
            mode=config.log.wandb,
            id=run_id or None,
            resume="allow",
            settings=wandb.Settings(console="off", quiet=True),
        )
        self.wandb.define_metric("*", step_metric="step")
        return self.wandb.id

    def start_bar(self, steps: int, step: int) -> None:
        """Show a progress bar if the console is a terminal."""
        if self.active and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=steps, initial=step, unit="step", dynamic_ncols=True)

    def progress(self, step: int) -> None:
        """Move the bar to `step`."""
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def metrics(self, record: dict) -> None:
        """Write one record to metrics.jsonl and wandb; None values are left out."""
        if self.active:
            record = {key: value for key, value in record.items() if value is not None}
            self._metrics.write(json.dumps(record) + "\n")
            if self.wandb is not None:
                self.wandb.log(record)

    def close(self, status: int) -> None:
        """End the bar and wandb, which is told the exit status."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self.wandb is not None:
            self.wandb.finish(exit_code=status)


class Meter:
    """Adds up the time of updates between two reports."""

    def __init__(self, flops_per_token: float, peak_flops: float, tokens_per_update: int):
        self.flops_per_token, self.peak_flops, self.tokens_per_update = flops_per_token, peak_flops, tokens_per_update
        self.updates, self.seconds, self.waited = 0, 0.0, 0.0

    def add(self, seconds: float, waited: float) -> None:
        """Count one update and the time in it that was spent waiting for data."""
        self.updates += 1
        self.seconds += seconds
        self.waited += waited

    def report(self) -> dict:
        """Means since the last report: tokens/s over all ranks, MFU (0 to 1), milliseconds an update and of data wait."""
        speed = self.updates * self.tokens_per_update / self.seconds
        told = {
            "tokens_per_second": round(speed, 1),
            "mfu": round(speed * self.flops_per_token / self.peak_flops, 4),
            "step_ms": round(1000 * self.seconds / self.updates, 2),
            "data_wait_ms": round(1000 * self.waited / self.updates, 3),
        }
        self.updates, self.seconds, self.waited = 0, 0.0, 0.0
        return told


def lock(directory: Path):
    """Hold the directory until this process ends. Raises UserError if another live process holds it."""
    file = open(directory / ".lock", "w")  # noqa: SIM115 (the lock lasts as long as the file is open)
    if fcntl is not None:
        for _ in range(20):  # a killed run's process may take a moment to be gone
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except OSError:
                time.sleep(0.1)
        raise UserError(f"{directory} is in use by another training process; choose another --name or wait for it")
    return file


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of this rank's device: the datasheet's for known GPUs, elsewhere what a short matrix product reaches."""
    if device.type == "cuda" and dtype is not torch.float32:
        name = torch.cuda.get_device_name(device)
        for known, peak in GPU_PEAK_FLOPS.items():
            if all(re.search(rf"\b{word}", name) for word in known.split()):
                return peak
    size = 1024 if device.type == "cpu" else 4096
    a = torch.randn(size, size, device=device).to(dtype)
    best, deadline = float("inf"), time.perf_counter() + 0.15
    while time.perf_counter() < deadline:
        began = time.perf_counter()
        product = a @ a
        if device.type != "cpu":
            product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def memory_gb(device: torch.device) -> float:
    """Peak memory of this process in GB: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
