"""Pretrain a GPT: `python train.py [config/NAME.toml] [--flag=value ...]`, or the same under torchrun.

    python train.py                                                          # the preset config/laptop.toml
    python train.py config/gpt2_124m.toml --lr=3e-4                          # a preset, and a flag that wins over it
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.toml  # on eight GPUs
    python train.py config/gpt2_124m.toml --plan                             # what it will need; trains nothing

The same command again continues the run. Exit status: 0 complete, 75 stopped and saved, 2 bad input, 1 cannot go on.
"""

# Read from top to bottom: what is made, the loop, one update, and then the rest in the order of its use.

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # which python -I and PYTHONSAFEPATH=1 leave out

import settings
from common import errors
from hardware import host
from planning import dial

if __name__ == "__main__":  # --help, --plan and bad flags are answered before torch, which takes seconds, is imported
    with errors.user_errors():
        COMMAND = dial.load_command(sys.argv[1:], __doc__)
        if COMMAND.plan.plan:
            from planning import plan

            plan.main(COMMAND, sys.argv[1:])
            raise SystemExit(0)
    host.prepare_torch()

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import data
import optim
from checkpoints import checkpoint, huggingface, lookup
from checkpoints.checkpoint import Checkpoints, TrainState
from checkpoints.lookup import Start
from common import cli, files
from common.errors import EX_TEMPFAIL, RunError
from evaluate import evaluate
from hardware.footprint import flops_per_token
from model import initial_weights, without_values
from parallel.engine import Engine
from parallel.world import Stop, World, connect, launch_note
from planning import choices
from reports.log import Log, duration
from reports.progress import Progress, due
from sample import Sampler
from settings import Config


@dataclass
class Run:
    """What an update and the loop work with. `build` makes it, and takes weights and state from a checkpoint."""

    config: Config  # as resolved
    world: World
    dataset: data.Mixture
    batches: data.Batches
    engine: Engine
    optimizers: optim.Optimizers
    state: TrainState
    # The loop's. A replay has none of them.
    log: Log | None = None
    progress: Progress | None = None
    checkpoints: Checkpoints | None = None
    sampler: Sampler | None = None
    evaluated_at: int = -1  # step of the last evaluation; -1: none yet
    val_loss: float = math.nan  # of the last evaluation


def main(config: Config) -> int:
    """Train as `config` says. Returns the exit status."""
    world = join(config)
    with world.naming_missing_ranks():
        run = prepare(config, world)
    status = 1  # until train returns
    try:
        with world.naming_missing_ranks():
            status = train(run)
    finally:
        run.checkpoints.wait(failed=status == 1)  # a save that is half written when training fails is still worth finishing
        run.log.close(status)
        world.leave(failed=status not in (0, EX_TEMPFAIL))
    return status


def join(config: Config) -> World:
    """Join the other ranks as RANK, WORLD_SIZE and LOCAL_RANK say, on the device and with the threads of `config`."""
    exact = config.parallel.strategy == "exact"
    return connect(
        config.train.device,
        threads=config.train.threads or (1 if exact else 0),  # sums inside a rank depend on its threads
        timeout_minutes=config.parallel.timeout_minutes,
        deterministic=config.train.deterministic or exact,
        integers_only=exact,
    )


def prepare(config: Config, world: World) -> Run:
    """Make everything that training needs. Nothing is written before everything is checked. Raises UserError."""
    dataset = data.open_mixture(config.data.tokens, config.model.vocab_size, config.data.prepare_command)
    flags = {f"--{name}": value for name, value in cli.flat_values(config).items()}
    world.require_same(flags | {"the sha256 of --tokens": dataset.identity, "torch's version": torch.__version__})

    # Which run is this? A new one, or one that goes on.
    log = Log(Path(config.run.out_dir, config.run.name), world.is_master)
    start = lookup.find_start(log.directory, config, dataset, world)

    # What will it need? Every `auto` becomes a value.
    notes = [*start.notes, *launch_note()]
    config = choices.resolve(start.settle(config), dataset.vocab_size, world, start.shape(config), start.state.settings)
    notes += lookup.check_changes(start, config, dataset)
    sampler = Sampler(config, dataset, start.state.step)
    peak_flops = choices.peak_flops(world, config.train.dtype)
    if start.state.step < config.train.steps:
        log.say(choices.introduce(config, dataset, world, start.state.step, peak_flops))
    for note in notes:
        log.say(note)

    # Make it.
    began = time.monotonic()
    run = build(config, world, dataset, start)
    if start.weights and run.state.step < config.train.steps:
        which = "weights and optimizer state" if start.checkpoint else "weights"
        log.say(f"loaded the {which} of {start.weights} in {duration(time.monotonic() - began)}")
    run.log, run.sampler, run.progress = log, sampler, Progress(log, config, flops_per_token(config.model), peak_flops)
    run.state.begin(config, dataset, world, start.continues, start.weights)
    open_files(run, start.continues)
    return run


def build(config: Config, world: World, dataset: data.Mixture, start: Start) -> Run:
    """Make what an update needs, with the weights and the state that it starts from."""
    module, state = without_values(config.model), start.state  # without memory, too, until each rank takes its part
    module.document_token = dataset.document_token(config.data.attend)
    if start.weights:  # of a checkpoint, which is a Hugging Face directory, too, or of another model
        weights = huggingface.open_model(start.weights, config.model.seq_len)[1].items()
    else:
        weights = initial_weights(module, config.run.seed)
    engine = Engine(module, config, world, weights)
    optimizers = engine.build_optimizers(config.optim)
    if start.checkpoint:
        saved = checkpoint.open_optimizer(start.checkpoint, engine.parameters, state, config.optim.optimizer)
        engine.load_optimizers(optimizers, saved)
        if state.grad_scaler:  # empty after another dtype than float16
            engine.scaler.load_state_dict(state.grad_scaler)
    return Run(config, world, dataset, data.make_batches(config, dataset), engine, optimizers, state)


def open_files(run: Run, continues: bool) -> None:
    """Open the run's directory: metrics.jsonl, checkpoints, config.toml and wandb's run."""
    config, world, state, log = run.config, run.world, run.state, run.log
    run.checkpoints = Checkpoints(log.directory / "checkpoints", config, run.dataset, world, log, start_step=state.step)
    log.check_wandb(config)
    evaluation = world.from_master(log.begin(state.step))
    run.checkpoints.begin()
    if evaluation:
        run.evaluated_at, run.val_loss = state.step, evaluation["val_loss"]
        run.checkpoints.evaluated(state, run.val_loss)
    if world.is_master and state.step < config.train.steps:  # a complete run keeps the settings that it was trained with
        files.publish_text(log.directory / "config.toml", settings.dumps(config))
    facts = {"world_size": world.size, "parameters": run.engine.module.parameter_count()}
    state.wandb_run_id = log.start_trackers(config, state.step, state.wandb_run_id if continues else "", facts)


def train(run: Run) -> int:
    """Update until the last step; save, evaluate and report on the way. Returns the exit status."""
    config, world, engine, state, log = run.config, run.world, run.engine, run.state, run.log
    steps, loss = config.train.steps, 0.0
    if state.step == steps and run.evaluated_at == steps:
        run.progress.check_finite(state, run.val_loss)
        log.say(f"{log.directory} is complete at step {steps}; --steps=N goes further")
        run.progress.tell_next(run.dataset)
        return 0
    mine = world.share(config.micro_batches)
    # The tokens depend on (step, micro-batch) alone, so there is no position in the data to save.
    upcoming = ((step, micro_batch) for step in range(state.step, steps) for micro_batch in mine)
    prefetcher = data.Prefetcher(run.batches, upcoming, world.device)
    stop = Stop(world, config.run.max_minutes)
    warm_up(run)
    log.start_bar(steps, state.step)
    while True:
        last, stopping = state.step >= steps, stop.agreed()  # what was asked before the last update
        if due(config.parallel.check_replicas_every, state.step):
            engine.check_replicas()  # before a save: weights that went wrong must not be kept
        run.checkpoints.save(state, engine, run.optimizers, now=last or stopping)
        if state.step != run.evaluated_at and (last or due(config.eval.eval_every, state.step)):
            validate(run)
        run.sampler.show(engine, state.step, log)
        if last or stopping:
            break
        stop.ask()
        began, waited = time.perf_counter(), prefetcher.wait_seconds
        loss, grad_norm = update(run, prefetcher)
        run.progress.updated(state, loss, grad_norm, time.perf_counter() - began, prefetcher.wait_seconds - waited)
        if run.progress.skipped_in_a_row > config.train.max_skipped_steps:
            give_up(run)
    prefetcher.close()
    run.checkpoints.finish(state, final=True)
    if not last:
        log.say(f"stopped at step {state.step} ({stop.reason}), saved; the same command goes on")
        return EX_TEMPFAIL
    run.progress.check_finite(state, run.val_loss, loss)
    run.progress.done(state, run.dataset)
    return 0


def update(run: Run, prefetcher: data.Prefetcher, inspect: Callable[[], None] | None = None) -> tuple[float, float]:
    """One optimizer step over the global batch. Returns the mean loss of its micro-batches and the gradient norm.

    inspect: what to call when the gradients are complete, before they are clipped; float16's are still scaled.
    """
    config, engine, model, optimizers, state = run.config, run.engine, run.engine.model, run.optimizers, run.state
    optimizers.set_learning_rate(optim.learning_rate(state.step, config.train.steps, config.optim))
    # Each rank fills in its own micro-batches. The sum over the ranks then has every loss, and their mean is added up in the
    # same order on any number of ranks.
    losses = run.world.zeros(config.micro_batches)
    mine = run.world.share(config.micro_batches)  # their numbers in the global batch, such as range(4, 8)
    for micro_step, micro_batch in enumerate(mine):
        # The forward reads this: only the last backward of the update reduces the gradients over the ranks.
        model.require_backward_grad_sync = micro_step == len(mine) - 1
        inputs, targets = prefetcher.next()  # [micro_batch_size, seq_len] each
        if config.model.dropout:
            torch.manual_seed(data.dropout_seed(config.run.seed, state.step, micro_batch))
        with engine.autocast():
            loss = model(inputs, targets)
        # Backward adds to the gradients, and we want the mean over this rank's micro-batches. The last backward then averages
        # over the ranks: parallel/from_scratch.py shows how. (--strategy=exact divides once, at its end.)
        engine.scaler.scale(loss / engine.loss_divisor).backward()
        losses[micro_batch] = loss.detach()
    # Start copying the mean loss to the host. `clip` waits for the GPU anyway, so `.item()` below does not wait again.
    mean_loss = run.world.sum_over_ranks(losses).mean().to("cpu", non_blocking=True)
    if inspect:
        inspect()
    grad_norm = engine.clip(config.optim.grad_clip)
    if math.isfinite(grad_norm):  # all ranks see the same norm, so all step or none does
        optimizers.step()
    engine.scaler.update()
    engine.drop_gradients()
    state.skipped += not math.isfinite(grad_norm)
    state.step += 1
    state.tokens += config.train.tokens_per_update
    return mean_loss.item(), grad_norm


# ---------------------------------------------------------------------------------------------------------------------
# Helpers, in the order of their use


def warm_up(run: Run) -> None:
    """Compile, and settle how the ranks communicate: the first update is then like any other, also after a resume."""
    began = time.monotonic()
    if run.engine.compiled:
        run.log.say("compiling ...")
    run.engine.warm_up(run.config.train.micro_batch_size, run.config.model.seq_len)
    if run.engine.compiled:
        run.log.say(f"compiled in {duration(time.monotonic() - began)}")


def validate(run: Run) -> None:
    """Evaluate on all ranks, report it, and remember the best checkpoint."""
    config, state, engine, began = run.config, run.state, run.engine, time.monotonic()
    streams, size = run.dataset.streams("val"), (config.model.seq_len, config.train.micro_batch_size)
    tokens = -(-config.eval.eval_tokens // len(streams))  # of each dataset; the mixture weighs their losses
    engine.module.eval()
    losses = [evaluate(engine.eval_model, stream, *size, tokens, run.world, engine.autocast) for stream in streams]
    engine.module.train()
    validation = run.dataset.validation(losses)
    run.evaluated_at, run.val_loss = state.step, validation["val_loss"]
    run.checkpoints.evaluated(state, run.val_loss)
    run.progress.evaluated(state, validation, time.monotonic() - began)


def give_up(run: Run) -> None:
    """Raise RunError, because too many updates were left out in a row."""
    limit, count = run.config.train.max_skipped_steps, run.progress.skipped_in_a_row
    run.checkpoints.finish(run.state)
    newest = run.world.from_master(run.checkpoints.retention.newest)  # the others do not know which saves went well
    kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
    found = f"{count} updates in a row had no finite gradient (--max_skipped_steps={limit})"
    raise RunError(f"{found}; {kept}; lower --lr, or try --dtype=float32")


if __name__ == "__main__":
    errors.end_with(lambda: main(COMMAND.config))
