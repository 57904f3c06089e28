"""What a run says while it trains: the time that is left, its updates, its speed, its evaluations and their curves."""

import math
import time

import torch

import optim
from common.errors import RunError, plural
from hardware import device
from reports import curves
from reports.log import Log, duration
from settings import Config

DRAW_SECONDS = 20  # drawing takes half a second, in which training stands still


class Progress:
    """Reports the updates and evaluations of a run to its `log`.

    peak_flops: of all ranks, in FLOP/s. It is raised to whatever is reached.
    """

    def __init__(self, log: Log, config: Config, flops_per_token: float, peak_flops: float):
        self.log, self.config, self.flops_per_token, self.peak_flops = log, config, flops_per_token, peak_flops
        # Since the last report. The first update is left out: it allocates memory, warms caches and may compile.
        self.updates, self.seconds, self.waited = -1, 0.0, 0.0
        self.skipped_in_a_row = 0
        self.drawn_at = time.monotonic()

    def updated(self, state, loss: float, grad_norm: float, seconds: float, waited: float) -> None:
        """Count an update of `seconds`, `waited` of them for data, and report it if it is due. state: after the update."""
        step, steps = state.step, self.config.train.steps
        self.updates += 1
        if self.updates:
            self.seconds += seconds
            self.waited += waited
        self.log.progress(step)
        self.skipped_in_a_row = 0 if math.isfinite(grad_norm) else self.skipped_in_a_row + 1
        if self.skipped_in_a_row:
            count = f"{self.skipped_in_a_row} in a row, {state.skipped} in all"
            self.log.warn(f"step {step}: the gradient is not finite, update skipped ({count})")
        if due(self.config.log.log_every, step) or step in (1, steps):
            self.report(state, loss, grad_norm)

    def report(self, state, loss: float, grad_norm: float) -> None:
        """Log the last update, and the speed since the last report."""
        step, steps, speed = state.step, self.config.train.steps, self.speed()
        lr = optim.learning_rate(step - 1, steps, self.config.optim)
        record = {"step": step, "tokens": state.tokens, "loss": loss, "lr": lr, "grad_norm": grad_norm, **speed}
        memory = round(device.peak_memory_gb(torch.device(self.config.train.device)), 3)
        self.log.metrics(record | {"memory_gb": memory, "skipped": state.skipped or None})
        line = f"step {step:>6}/{steps}  loss {loss:.4f}  lr {lr:.2e}  norm {grad_norm:.2f}"
        if speed:
            eta = duration((steps - step) * speed["step_ms"] / 1000)
            line += f"  {speed['tokens_per_second']:,.0f} tok/s  mfu {speed['mfu']:.0%}  eta {eta}"
        self.log.say(line)

    def speed(self) -> dict:
        """Means since the last report: tokens/s over all ranks, MFU (0 to 1), milliseconds an update and waiting for data.

        Empty where nothing was counted.
        """
        if self.updates < 1:
            return {}
        speed = self.updates * self.config.train.tokens_per_update / self.seconds
        self.peak_flops = max(self.peak_flops, speed * self.flops_per_token)
        report = {
            "tokens_per_second": round(speed, 1),
            "mfu": round(speed * self.flops_per_token / self.peak_flops, 4),
            "step_ms": round(1000 * self.seconds / self.updates, 2),
            "data_wait_ms": round(1000 * self.waited / self.updates, 3),
        }
        self.updates, self.seconds, self.waited = 0, 0.0, 0.0
        return report

    def evaluated(self, state, validation: dict, seconds: float) -> None:
        """Log an evaluation that took `seconds`, and redraw the curves. validation: see `data.Mixture.validation`."""
        if not self.log.is_master:
            return
        self.log.metrics({"step": state.step, "tokens": state.tokens, **validation})
        line = f"step {state.step:>6}/{self.config.train.steps}  validation loss {validation['val_loss']:.4f}"
        line += f"  {validation['val_bpb']:.4f} bits per byte" if validation["val_bpb"] else ""
        self.log.say(f"{line}  evaluated in {duration(seconds)}")
        if state.step >= self.config.train.steps or time.monotonic() - self.drawn_at > DRAW_SECONDS:
            with self.log.surviving("drawing curves.png"):
                curves.draw([self.log.directory], self.log.directory / "curves.png")
            self.drawn_at = time.monotonic()

    def check_finite(self, state, *losses: float) -> None:
        """Raise RunError unless the last `losses` of a complete run are finite."""
        if not all(map(math.isfinite, losses)):
            raise RunError(
                f"{self.log.directory} ended at step {state.step} with a loss that is not finite: the weights are of no use; "
                "start another run with a lower --lr, or from an earlier checkpoint with --resume=PATH"
            )

    def done(self, state, dataset) -> None:
        """Say what a run has reached that is complete now, and what to do next."""
        best = f", best checkpoint: validation loss {state.best_val_loss:.4f} at step {state.best[0][1]}" if state.best else ""
        self.log.say(f"done: {plural(state.step, 'step')}, {state.tokens:,} tokens{best}; {self.log.directory}")
        self.tell_next(dataset)

    def tell_next(self, dataset) -> None:
        """Say what to do with a complete run: sample from it, if its `dataset` has a tokenizer."""
        command = f"sample.py {self.log.directory}" if dataset.tokenizer else f"evaluate.py {self.log.directory}"
        if dataset.tokenizer and dataset.eot_token >= self.config.model.vocab_size:  # no start of a document is known
            command += ' --prompt="..."'
        self.log.say(f"this took {duration(time.monotonic() - self.log.began)}; next: python {command}")


def due(every: int, step: int) -> bool:
    """Whether something done every `every` steps (0: never) is due after `step` updates."""
    return every > 0 and step > 0 and step % every == 0
