"""Report a run's progress: updates, speed, remaining time, evaluations and curves."""

import math
import shlex
import time
from collections import deque
from collections.abc import Callable
from statistics import median

import torch

from lockstep.common.errors import RunError, plural
from lockstep.dataset.tokenizer import load_if_readable
from lockstep.hardware import device
from lockstep.hardware.footprint import flops_per_token
from lockstep.reports import curves
from lockstep.reports.log import Log, duration
from lockstep.settings import Config

MOST_IN_A_ROW = 30  # a run ends if more updates in a row are skipped
DRAW_SECONDS, DRAW_SHARE = 20, 0.02  # seconds between redraws, which hold up training, and their largest share of the time


class Progress:
    """Reports the updates and evaluations of a run on so many `ranks`.

    epochs: from a number of steps to how many epochs of each dataset they read, by name.
    """

    def __init__(self, log: Log, config: Config, own: torch.device, ranks: int, epochs: Callable[[int], dict[str, float]]):
        self.log, self.train, self.log_every, self.epochs = log, config.train, config.log.log_every, epochs
        peak_flops = ranks * device.peak_flops(own, self.train.dtype)
        self.peak_speed = peak_flops / flops_per_token(config.model)  # tokens/s with all ranks at their peak: MFU 1
        self.is_peak_measured = not device.known_peak_flops(own, self.train.dtype)
        # Totals since the last report, excluding the first update, which allocates memory, warms caches and may compile.
        self.updates, self.seconds, self.waited = -1, 0.0, 0.0
        self.skipped_in_a_row = 0
        self.losses, self.lowest, self.is_high = deque(maxlen=10), math.inf, False
        self.drawn_at, self.draw_seconds = time.monotonic(), 0.0

    def updated(self, state, loss: float, grad_norm: float, lr: float, seconds: float, waited: float) -> None:
        """Count an update that took `seconds`, `waited` of them for data, and report it if due. Raises RunError."""
        self.updates += 1
        if self.updates:
            self.seconds += seconds
            self.waited += waited
        self.skipped_in_a_row = 0 if math.isfinite(grad_norm) else self.skipped_in_a_row + 1
        if self.skipped_in_a_row:
            count = f"{self.skipped_in_a_row} in a row, {state.skipped} in all"
            self.log.warn(f"step {state.step}: skipped the update, because its gradient is not finite ({count})")
        if self.skipped_in_a_row > MOST_IN_A_ROW:
            found = f"skipped {self.skipped_in_a_row} updates in a row with non-finite gradients"
            way_out = "lower --lr, or try --dtype=float32; if the newest checkpoint fails, too, start from an earlier one with"
            raise RunError(f"{found}; {way_out} --name=NEW --resume=PATH; checkpoints are in {self.log.directory}/checkpoints")
        self.watch(state, loss)
        if due(self.log_every, state.step) or state.step in (1, self.train.steps):
            self.report(state, loss, grad_norm, lr)

    def watch(self, state, loss: float) -> None:
        """Warn when losses rise far above the run's lowest, because the exit status will not show this."""
        self.losses.append(loss if math.isfinite(loss) else math.inf)
        recent, was_high = median(self.losses), self.is_high  # the median ignores a single spike
        self.lowest = min(self.lowest, recent, state.best_val_loss or math.inf)
        self.is_high = recent > max(2 * self.lowest, self.lowest + 1)
        if self.is_high and not was_high:
            remedy = "if it stays high, start a new run from an earlier checkpoint (--resume=PATH) with a lower --lr"
            self.log.warn(f"step {state.step}: the loss rose from {self.lowest:.4g} to {recent:.4g}; {remedy}")

    def report(self, state, loss: float, grad_norm: float, lr: float) -> None:
        """Log the last update, and the speed since the last report."""
        step, steps, speed = state.step, self.train.steps, self.speed()
        total, count = state.unlogged_losses
        state.unlogged_losses = (0.0, 0)
        record = {"step": step, "tokens": state.tokens, "loss": loss, "mean_loss": total / count if count else None, "lr": lr}
        record |= {"grad_norm": grad_norm, **speed}
        memory = round(device.peak_memory_gb(torch.device(self.train.device)), 3)
        record |= {f"epochs/{name}": float(f"{read:.6g}") for name, read in self.epochs(step).items()}
        self.log.metrics(record | {"memory_gb": memory, "skipped": state.skipped or None})
        line = f"step {step:>6}/{steps}  loss {loss:.4f}  lr {lr:.2e}  norm {grad_norm:.2f}"
        if speed:
            eta = duration((steps - step) * speed["step_ms"] / 1000)
            line += f"  {speed['tokens_per_second']:,.0f} tok/s  mfu {speed['mfu']:.0%}  eta {eta}"
        self.log.say(line)

    def speed(self) -> dict:
        """Return averages since the last report: tokens/s over all ranks, MFU, ms per update, and ms of waiting for data.

        Empty if there were no updates.
        """
        if self.updates < 1:
            return {}
        speed = self.updates * self.train.tokens_per_update / self.seconds
        if self.is_peak_measured:  # the measurement is too low if the machine was busy
            self.peak_speed = max(self.peak_speed, speed)
        report = {
            "tokens_per_second": round(speed, 1),
            "mfu": round(speed / self.peak_speed, 4),
            "step_ms": round(1000 * self.seconds / self.updates, 2),
            "data_wait_ms": round(1000 * self.waited / self.updates, 3),
        }
        self.updates, self.seconds, self.waited = 0, 0.0, 0.0
        return report

    def evaluated(self, state, validation: dict, seconds: float) -> None:
        """Log an evaluation that took `seconds`, and redraw the curves. validation: see `Mixture.validation`."""
        self.log.metrics({"step": state.step, "tokens": state.tokens, **validation})
        bits = f"  {validation['val_bpb']:.4f} bits per byte" if validation["val_bpb"] else ""
        line = f"step {state.step:>6}/{self.train.steps}  validation loss {validation['val_loss']:.4f}{bits}"
        self.log.say(f"{line}  evaluated in {duration(seconds)}")
        self.draw(state)

    def scored(self, state, scores: dict, seconds: float) -> None:
        """Log the scores on tasks, computed in `seconds`. scores: by task and metric."""
        flat = {f"tasks/{task}/{metric}": value for task, values in scores.items() for metric, value in values.items()}
        self.log.metrics({"step": state.step, **flat})
        for line in [*score_lines(scores), f"tasks in {duration(seconds)}"]:
            self.log.say(f"step {state.step:>6}/{self.train.steps}  {line}")
        self.draw(state)

    def draw(self, state) -> None:
        """Redraw the curves if due."""
        began, pause = time.monotonic(), max(DRAW_SECONDS, self.draw_seconds / DRAW_SHARE)
        if self.log.is_master and (state.step >= self.train.steps or began - self.drawn_at > pause):
            with self.log.surviving("drawing curves.png"):
                curves.draw([curves.single(self.log.directory)], self.log.directory / "curves.png")
            self.drawn_at = time.monotonic()
            self.draw_seconds = self.drawn_at - began

    def done(self, state, dataset, *losses: float) -> None:
        """Print the result of a complete run, and what to do next. Raises RunError if one of the `losses` is not finite."""
        run = self.log.directory
        if not all(map(math.isfinite, losses)):
            way_out = "start a new run with a lower --lr, or from an earlier checkpoint with --resume=PATH"
            raise RunError(f"{run} ended at step {state.step} with a non-finite loss; {way_out}")
        best = f", best checkpoint: validation loss {state.best_val_loss:.4f} at step {state.best[0][1]}" if state.best else ""
        if self.updates < 0:
            longer = "; use a larger --steps to continue it" * (not state.config.optim.decay_steps)
            self.log.say(f"{run} is complete at step {state.step}{longer}")
        else:
            self.log.say(f"done: {plural(state.step, 'step')}, {state.tokens:,} tokens{best}; {run}")
        if self.is_high:
            self.log.warn(f"the last losses, around {median(self.losses):.4g}, are far above the lowest, {self.lowest:.4g}")
        readable = load_if_readable(dataset.tokenizer)
        command = shlex.join(["python", "sample.py" if readable else "evaluate.py", str(run)])
        if readable and dataset.eot_token is None:  # the model cannot start a document
            command += ' --prompt="..."'
        self.log.set_status(step=state.step, next=command)
        self.log.say(f"this took {duration(time.monotonic() - self.log.began)}; next: {command}")


def due(every: int, step: int) -> bool:
    """Return whether something done every `every` steps (0: never) is due after `step` updates."""
    return every > 0 and step > 0 and step % every == 0


def score_lines(scores: dict[str, dict[str, float]]) -> list[str]:
    """Return one line per task, with its scores by metric."""
    return [
        f"{task}  " + "  ".join(f"{metric} {value:.4f}" for metric, value in found.items()) for task, found in scores.items()
    ]
