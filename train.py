"""Pretrain a GPT: `python train.py [config/NAME.toml] [--flag=value ...]`, or the same under torchrun.

    python train.py                                                          # the preset config/laptop.toml
    python train.py config/gpt2_124m.toml --lr=3e-4                          # a preset, and a flag that wins over it
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.toml  # on eight GPUs
    python train.py config/gpt2_124m.toml --plan                             # what it will need; trains nothing

The same command again continues the run. Exit status: 0 complete, 2 bad input, 1 the run cannot go on, 75 stopped with the
state saved.
"""

# Read from top to bottom: what is made, the loop, one update, then the helpers in the order of their use.

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # which python -I and PYTHONSAFEPATH=1 leave out

import settings
from common import cli, errors
from hardware import host

if __name__ == "__main__":  # --help and bad flags are answered before torch, which takes seconds, is imported
    with errors.user_errors():
        COMMAND = settings.load_command(sys.argv[1:], __doc__)
        CONFIG = COMMAND.config
        if COMMAND.plan.plan:
            from planning import plan

            plan.main(CONFIG, COMMAND.plan)
            raise SystemExit(0)
    # Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", str(host.spin_count()))

import math
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import data
import optim
import plot
from checkpoints import checkpoint, huggingface, lookup
from checkpoints.checkpoint import Checkpoints, TrainState
from common import files
from common.errors import RunError, plural
from evaluate import evaluate
from hardware import device
from hardware.footprint import flops_per_token
from model import initial_weights, without_values
from parallel.engine import Engine
from parallel.world import Stop, World, connect, unheard
from planning import choices
from reports.log import Log, Meter, duration
from settings import Config

EX_TEMPFAIL = 75
WORTH_TELLING = 10  # seconds that are left; of fewer a run need not tell
DRAW_SECONDS = 20  # drawing takes half a second, in which training stands still


@dataclass
class Run:
    """What an update and the loop work with. Only `state` resumes; the rest is made anew."""

    config: Config  # as resolved
    world: World
    dataset: data.Mixture
    batches: data.Batches
    engine: Engine
    optimizers: optim.Optimizers
    state: TrainState
    # The loop's. A replay has none of them.
    log: Log | None = None
    checkpoints: Checkpoints | None = None
    meter: Meter | None = None
    evaluated_at: int = -1  # step of the last evaluation; -1: none yet
    val_loss: float = math.nan  # of the last evaluation
    drawn_at: float = field(default_factory=time.monotonic)  # when curves.png was last drawn


def main(config: Config) -> int:
    """Train as `config` says. Returns the exit status."""
    began = time.monotonic()
    world = join(config)
    with world.naming_missing_ranks():
        run = prepare(config, world)
    status = 1
    try:
        with world.naming_missing_ranks():
            status = train(run)
        if not status:
            command = f"{'sample.py' if run.dataset.tokenizer else 'evaluate.py'} {run.log.directory}"
            if run.dataset.tokenizer and run.dataset.eot_token >= run.config.model.vocab_size:  # no start of a document
                command += ' --prompt="..."'
            run.log.say(f"this took {duration(time.monotonic() - began)}; next: python {command}")
    finally:
        run.checkpoints.wait(failed=status == 1)  # a save that is half written when training fails is still worth finishing
        run.log.close(status)
        world.leave(failed=status not in (0, EX_TEMPFAIL))
    return status


def join(config: Config) -> World:
    """Join the other ranks, on the device and with the threads that `config` says."""
    exact = config.parallel.strategy == "exact"
    return connect(
        config.train.device,
        threads=config.train.threads or (1 if exact else 0),  # sums inside a rank depend on its threads
        timeout_minutes=config.parallel.timeout_minutes,
        deterministic=config.train.deterministic or exact,
        integers_only=exact,
    )


def prepare(config: Config, world: World) -> Run:
    """Make everything that training needs, from scratch or from a checkpoint. Raises UserError."""
    dataset = data.open_mixture(config.data.tokens, config.model.vocab_size, config.data.prepare_command)
    flags = {f"--{name}": value for name, value in cli.flat_values(config).items()}
    world.require_same(flags | {"the sha256 of --tokens": dataset.identity, "torch's version": torch.__version__})
    directory = Path(config.run.out_dir) / config.run.name
    log = Log(directory, world.is_master)
    found = lookup.find_start(directory, config, dataset) if world.is_master else None
    start, pretrained, notes = world.from_master(found)
    continues = start is not None and start.parent.parent == directory
    state = checkpoint.load_state(start) if start else TrainState()
    if continues:
        lookup.check_origin(state, config, dataset)
    shape = start or pretrained if config.model.init_from != "scratch" else None  # also when the run continues
    threads, began_from = config.train.threads, state.config.run.resume if continues else str(start)
    if start and began_from not in ("auto", "off"):
        config = settings.replace(config, resume=began_from)  # config.toml names the very checkpoint
    config = choices.resolve(config, dataset.vocab_size, world, shape, state.settings)
    notes += unheard(threads)
    changed = lookup.check_changes(state, config, dataset, continues)
    peak_flops = peak_flops_of_all(world, config.train.dtype)
    trains = state.step < config.train.steps
    kept = config.checkpoint if trains or not continues else state.config.checkpoint  # a complete run loses no checkpoint
    retention = settings.replace(config, keep_last=kept.keep_last, keep_best=kept.keep_best)
    if world.is_master:
        introduction = [choices.introduce(config, dataset, world, state.step, peak_flops)] if trains else []
        for line in [*introduction, *notes, *(changed if trains else [])]:
            log.say(line)
    began = time.monotonic()
    run = build(config, world, dataset, state, start, pretrained)
    if trains and (start or pretrained):
        which = "weights and optimizer state" if start else "weights"
        log.say(f"loaded the {which} of {start or pretrained} in {duration(time.monotonic() - began)}")
    state.begin(config, dataset, world, continues, start or pretrained)

    run.log = log
    run.meter = Meter(flops_per_token(config.model), peak_flops, config.train.tokens_per_update)
    run.checkpoints = Checkpoints(directory / "checkpoints", retention, dataset, world, log, start_step=state.step)
    log.check_wandb(config)
    evaluation = world.from_master(log.begin(state.step))  # all is checked: from here on there are files
    run.checkpoints.begin()
    if evaluation:
        run.evaluated_at, run.val_loss = state.step, evaluation["val_loss"]
        run.checkpoints.evaluated(state, run.val_loss)
    if world.is_master:
        if trains:  # a complete run keeps the settings that it was trained with
            files.publish_text(directory / "config.toml", settings.dumps(config))
        facts = {"world_size": world.size, "parameters": run.engine.module.parameter_count()}
        state.wandb_run_id = log.start_wandb(config, state.wandb_run_id if continues else "", facts)
    return run


def build(
    config: Config, world: World, dataset: data.Mixture, state: TrainState, start: Path | None, pretrained: Path | None = None
) -> Run:
    """Make what an update needs. start: the checkpoint of `state`. pretrained: a model to start with. Neither: from scratch."""
    module = without_values(config.model)  # and without memory, until each rank takes its part
    if start or pretrained:
        weights = huggingface.open_model(start or pretrained, config.model.seq_len)[1].items()
    else:
        weights = initial_weights(module, config.run.seed)
    engine = Engine(module, config, world, weights)
    optimizers = engine.build_optimizers(config.optim)
    if start:
        engine.scatter(optimizers, checkpoint.open_optimizer(start, engine.parameters, state, config.optim.optimizer))
        if state.grad_scaler:  # empty after another dtype than float16
            engine.scaler.load_state_dict(state.grad_scaler)
    return Run(config, world, dataset, data.make_batches(config, dataset), engine, optimizers, state)


def train(run: Run) -> int:
    """Update until the last step; save, evaluate and log on the way. Returns the exit status."""
    config, world, engine, state, log = run.config, run.world, run.engine, run.state, run.log
    steps, skipped_in_a_row, loss = config.train.steps, 0, 0.0
    if state.step == steps and run.evaluated_at == steps:
        check_finite(run, run.val_loss)
        log.say(f"{log.directory} is complete at step {steps}; --steps=N goes further")
        return 0
    mine = world.share(config.micro_batches)
    upcoming = ((step, micro_batch) for step in range(state.step, steps) for micro_batch in mine)
    prefetcher = data.Prefetcher(run.batches, upcoming, world.device)
    stop = Stop(world, config.run.max_minutes)
    warm_up(run)
    log.start_bar(steps, state.step)
    while True:
        last, stopping = state.step >= steps, stop.agreed()
        if due(config.parallel.check_replicas_every, state.step):
            engine.check_replicas()  # before a save: weights that went wrong must not be kept
        run.checkpoints.save(state, engine, run.optimizers, now=last or stopping)
        if state.step != run.evaluated_at and (last or due(config.eval.eval_every, state.step)):
            validate(run)
        if last or stopping:
            break
        stop.ask()
        began, waited = time.perf_counter(), prefetcher.wait_seconds
        loss, grad_norm = update(run, prefetcher)
        run.meter.add(time.perf_counter() - began, prefetcher.wait_seconds - waited)
        if (seconds := run.meter.first_estimate(steps - state.step)) > WORTH_TELLING:
            log.say(f"about {duration(seconds)} for {plural(steps - state.step, 'more step')}; evaluations come on top")
        log.progress(state.step)
        skipped_in_a_row = 0 if math.isfinite(grad_norm) else skipped_in_a_row + 1
        if skipped_in_a_row:
            note_skipped(run, skipped_in_a_row)
        if due(config.log.log_every, state.step) or state.step in (1, steps):
            report(run, loss, grad_norm)
    prefetcher.close()
    run.checkpoints.finish(state, final=True)
    if not last:
        log.say(f"stopped at step {state.step} ({stop.reason}), saved; the same command goes on")
        return EX_TEMPFAIL
    if config.log.wandb_artifact:
        log.save_artifact(
            run.checkpoints.directory / "latest",
            {"step": steps, "tokens": state.tokens, "best_val_loss": state.best_val_loss},
        )
    check_finite(run, run.val_loss, loss)
    best = f", lowest validation loss {state.best_val_loss:.4f} at step {state.best[0][1]}" if state.best else ""
    log.say(f"done: {plural(steps, 'step')}, {state.tokens:,} tokens{best}; {log.directory}")
    return 0


def update(run: Run, prefetcher: data.Prefetcher) -> tuple[float, float]:
    """One optimizer step over the global batch. Returns the mean loss of its micro-batches and the gradient norm."""
    config, engine, model, optimizers, state = run.config, run.engine, run.engine.model, run.optimizers, run.state
    optimizers.set_learning_rate(optim.learning_rate(state.step, config.train.steps, config.optim))
    # Each rank fills in its own micro-batches. The sum over the ranks then has every loss, and their mean is added up in the
    # same order on any number of ranks.
    losses = run.world.zeros(config.micro_batches)
    mine = run.world.share(config.micro_batches)
    for micro_step, micro_batch in enumerate(mine):
        # The forward reads this: only the last backward of the update reduces the gradients over the ranks.
        model.require_backward_grad_sync = micro_step == len(mine) - 1
        inputs, targets = prefetcher.next()  # [micro_batch_size, seq_len] each
        if config.model.dropout:
            torch.manual_seed(dropout_seed(config.run.seed, state.step, micro_batch))
        with engine.autocast():
            loss = model(inputs, targets)
        # Backward adds to the gradients, and we want their mean. (exact adds integers and divides them at the end.)
        engine.scaler.scale(loss / engine.loss_divisor).backward()
        losses[micro_batch] = loss.detach()
    # It travels to the host while the gradients are computed. `clip` waits for them, and for nothing after them.
    loss = run.world.sum_over_ranks(losses).mean().to("cpu", non_blocking=True)
    grad_norm = engine.clip(config.optim.grad_clip)
    if math.isfinite(grad_norm):  # all ranks see the same norm, so all step or none does
        optimizers.step()
    engine.scaler.update()
    engine.drop_gradients()
    state.skipped += not math.isfinite(grad_norm)
    state.step += 1
    state.tokens += config.train.tokens_per_update
    return loss.item(), grad_norm


# ---------------------------------------------------------------------------------------------------------------------
# Helpers, in the order of their use


def peak_flops_of_all(world: World, dtype: str) -> float:
    """Peak FLOP/s of all ranks. Each is measured by itself: more threads than cores would count cores twice."""
    used = 1.0 if world.device.type != "cpu" else min(1.0, host.cores() / (world.local_size * torch.get_num_threads()))
    return device.peak_flops(world.device, dtype) * world.size * used


def warm_up(run: Run) -> None:
    """Compile, and settle how the ranks communicate: the first update is then like any other, also after a resume."""
    began = time.monotonic()
    if run.engine.compiled:
        run.log.say("compiling ...")
    run.engine.warm_up(run.config.train.micro_batch_size, run.config.model.seq_len)
    if run.engine.compiled:
        run.log.say(f"compiled in {duration(time.monotonic() - began)}")


def due(every: int, step: int) -> bool:
    """Whether something done every `every` steps (0: never) is due after `step` updates."""
    return every > 0 and step > 0 and step % every == 0


def validate(run: Run) -> None:
    """Evaluate on all ranks, log it, remember the best checkpoint and redraw the curves."""
    config, state, engine, log = run.config, run.state, run.engine, run.log
    began = time.monotonic()
    streams, size = run.dataset.streams("val"), (config.model.seq_len, config.train.micro_batch_size)
    tokens = -(-config.eval.eval_tokens // len(streams))  # of each dataset; the mixture weighs their losses
    engine.module.eval()
    losses = [evaluate(engine.eval_model, stream, *size, tokens, run.world, engine.autocast) for stream in streams]
    engine.module.train()
    validation = run.dataset.validation(losses)
    val_loss, bits = validation["val_loss"], validation["val_bpb"]
    run.evaluated_at, run.val_loss = state.step, val_loss
    run.checkpoints.evaluated(state, val_loss)
    if not run.world.is_master:
        return
    log.metrics({"step": state.step, "tokens": state.tokens, **validation})
    line = f"step {state.step:>6}/{config.train.steps}  validation loss {val_loss:.4f}"
    line += f"  {bits:.4f} bits per byte" if bits else ""
    log.say(f"{line}  evaluated in {duration(time.monotonic() - began)}")
    if state.step >= config.train.steps or time.monotonic() - run.drawn_at > DRAW_SECONDS:
        with log.surviving("drawing curves.png"):
            plot.draw([log.directory], log.directory / "curves.png")
        run.drawn_at = time.monotonic()


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """The random state of a micro-batch, the same whichever rank computes it."""
    return int(np.random.SeedSequence([seed, step, micro_batch]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def note_skipped(run: Run, in_a_row: int) -> None:
    """Say that an update was left out. Raises RunError if too many were."""
    state, limit = run.state, run.config.train.max_skipped_steps
    run.log.warn(
        f"step {state.step}: the gradient is not finite, update left out ({in_a_row} in a row, {state.skipped} in all)"
    )
    if in_a_row > limit:
        run.checkpoints.finish(state)
        newest = f"the checkpoint of step {run.checkpoints.saved_at} is the newest"
        raise RunError(
            f"{in_a_row} updates in a row had no finite gradient (--max_skipped_steps={limit}); "
            f"{newest if run.checkpoints.saved_at else 'there is no checkpoint yet'}; lower --lr, or try --dtype=float32"
        )


def check_finite(run: Run, *losses: float) -> None:
    """Raise RunError unless the last losses of a complete run are finite."""
    if not all(map(math.isfinite, losses)):
        raise RunError(
            f"{run.log.directory} ended at step {run.state.step} with a loss that is not finite: the weights are of no use; "
            "start another run with a lower --lr, or from an earlier checkpoint with --resume=PATH"
        )


def report(run: Run, loss: float, grad_norm: float) -> None:
    """Log the last update, and the speed since the last report."""
    config, state, step, speed = run.config, run.state, run.state.step, run.meter.report()
    lr = optim.learning_rate(step - 1, config.train.steps, config.optim)
    memory = round(device.peak_memory_gb(run.world.device), 3)
    record = {"step": step, "tokens": state.tokens, "loss": loss, "lr": lr, "grad_norm": grad_norm, **speed}
    run.log.metrics(record | {"memory_gb": memory, "skipped": state.skipped or None})
    line = f"step {step:>6}/{config.train.steps}  loss {loss:.4f}  lr {lr:.2e}  norm {grad_norm:.2f}"
    if speed:
        eta = duration((config.train.steps - step) * speed["step_ms"] / 1000)
        line += f"  {speed['tokens_per_second']:,.0f} tok/s  mfu {speed['mfu']:.0%}  eta {eta}"
    run.log.say(line)


if __name__ == "__main__":
    status = 1
    try:
        with errors.user_errors():
            status = main(CONFIG)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    # Everything is on disk. The tear-down of the interpreter may hang: threads of torch's libraries and the process group
    # wait for one another, and other ranks wait for this process to end.
    os._exit(status)
