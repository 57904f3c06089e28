"""Pretrain a GPT: `python train.py [config/NAME.toml] [--flag=value ...]`, or the same under torchrun.

    python train.py                                                          # the preset config/laptop.toml
    python train.py config/gpt2_124m.toml --lr=3e-4                          # a preset, and a flag that overrides it
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.toml  # on eight GPUs
    python train.py config/gpt2_124m.toml --plan                             # print what it will cost; do not train

Run the same command again to continue a run. `--name=NAME` is enough, because a run keeps its settings (runs/NAME/config.toml)
until a flag changes them, whatever the preset says. Exit status: 0 complete, 75 stopped and saved, 2 bad input, 1 failed.
"""

# Read this file from top to bottom: who this process is, the data, the model, DDP, the loop, one update.

from lockstep import command

if __name__ == "__main__":
    command.require_packages()

from lockstep.planning import plan
from lockstep.settings import Config


def read_command(args: list[str]) -> Config:
    """Read the command line. With --plan, print the plan and exit. Raises UserError."""
    config, options = plan.read_command(args, __doc__)
    if options.plan:
        plan.show(config, options)
        raise SystemExit(0)
    return config


# `python train.py` reads its flags here, then imports this file as the module `train` and calls `main`. So it answers --help,
# --plan and bad flags before it imports torch, which takes seconds.
if __name__ == "__main__":
    command.run("train", read_command)

import gc
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import data
import evaluate
from lockstep.checkpoints import checkpoint
from lockstep.checkpoints.checkpoint import Checkpoints, TrainState
from lockstep.common.errors import EX_TEMPFAIL, RunError
from lockstep.dataset.mixture import Mixture, open_mixture
from lockstep.hardware import device as devices
from lockstep.hardware.host import read_ranks
from lockstep.numerics import optim
from lockstep.parallel import wrap
from lockstep.parallel.engine import Engine, Strategy
from lockstep.parallel.world import Stop, World, connect
from lockstep.planning import startup
from lockstep.reports.log import Log
from lockstep.reports.progress import Progress, due
from lockstep.reports.trace import Trace
from model import GPT, initial_weights, on_meta
from sample import require_tokenizer, write_sample

COLLECT_EVERY = 100  # steps between collections of Python's garbage, on all ranks at once


@dataclass
class Run:
    """Everything that an update and the loop need, built by `build` from initial weights or from a checkpoint."""

    config: Config  # resolved
    world: World
    dataset: Mixture
    batches: data.Batches
    engine: Engine  # the model in its wrapper, and the optimizers
    state: TrainState  # what resuming needs, besides tensors
    # Only the loop needs these; replay.py leaves them unset.
    log: Log | None = None
    progress: Progress | None = None
    checkpoints: Checkpoints | None = None
    tasks: Any = None  # extras.tasks.Tasks, with --tasks
    evaluated_at: int = -1  # step of the last evaluation; -1: none yet
    val_loss: float = math.nan  # loss in the last evaluation
    scored_at: int = -1  # step of the last scores on tasks; -1: none yet


def main(config: Config) -> int:
    """Train as `config` says. Returns the exit status."""
    # Who is this process? torchrun starts one per GPU and sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Without
    # torchrun, this process is the only one.
    rank, world_size, local_rank, local_world_size = read_ranks()
    ddp = world_size > 1  # several processes train together
    master_process = rank == 0  # the only one that prints, logs and writes checkpoints
    run = None
    with Log(Path(config.run.out_dir, config.run.name), master_process) as log:

        def end(error: RunError) -> None:  # in a thread, if other ranks are lost and this one is stuck
            log.end(error)
            if run and run.checkpoints:
                run.checkpoints.wait(failed=True)

        device = devices.prepare_training(config, local_rank)  # cuda:LOCAL_RANK, mps or cpu
        world = World(rank, world_size, local_world_size, device, timedelta(minutes=config.parallel.timeout_minutes))
        if ddp:
            connect(world)  # by NCCL between GPUs, by gloo between CPUs
        with world.reporting_lost_ranks(end):
            dataset = open_mixture(config.data, config.model.vocab_size)
            if config.eval.sample_every:
                require_tokenizer(dataset)
            setup = startup.prepare(config, GPT, dataset, world, log)  # from here on, config is resolved: nothing is `auto`
            config, state = setup.config, setup.start.state
            reads = data.describe(dataset, open_batches(config, dataset, state), config.train.steps)
            startup.announce(setup, world, log, reads, dataset.remarks)
            with startup.explaining_out_of_memory(config, world):
                run = build(config, world, dataset, setup.start)
                begin(run, setup, log)
                with run.checkpoints:  # finishes a save, even if training fails
                    log.status = train(run)
            world.leave()
    return log.status


def build(config: Config, world: World, dataset: Mixture, start: startup.Start) -> Run:
    """Build what an update needs: data, model and optimizers, with the weights and state to start from."""
    state = start.state
    module = on_meta(config.model, dataset.document_token(config.data.attend), config.numerics.numerics)
    if start.weights:  # a checkpoint, which is also a Hugging Face directory, or another model
        weights = start.open_weights(on_meta, config.model.seq_len).items()
    else:
        weights = initial_weights(module, config.run.seed)
    engine = build_engine(module, weights, config, world)
    if start.checkpoint:
        saved = checkpoint.open_optimizer(start.checkpoint, engine.parameters, state, config.optim.optimizer)
        engine.load_optimizer_state(saved)
        if state.grad_scaler:  # empty unless the dtype was float16
            engine.scaler.load_state_dict(state.grad_scaler)
    return Run(config, world, dataset, open_batches(config, dataset, state), engine, state)


def open_batches(config: Config, dataset: Mixture, state: TrainState) -> data.Batches:
    """Return the batches of a run that goes on from `state` as `config`, which may change their size."""
    before = state.config if state.settings else config
    sizes = data.sizes_from(state.step, state.batch_sizes, before, config)
    return data.make_batches(config, dataset, sizes, own_orders=state.mixture_order != "shared")


def build_engine(module: GPT, weights: Iterable[tuple[str, Any]], config: Config, world: World) -> Engine:
    """Compile the model, wrap it so that the ranks train it together, and build its optimizers.

    module: on the meta device, where it takes no memory until each rank loads its part of the `weights`.
    """
    train = config.train
    if train.compile == "on":
        devices.prepare_compiler(world.device)
        module.compile_blocks()
    if train.activation_checkpointing:
        module.checkpoint_activations()

    if config.parallel.strategy == "ddp":
        wrap.load_weights(module, weights, world.device)
        model = module
        if world.size > 1:
            # DDP averages the gradients over the ranks during the last backward of an update, a bucket at a time: 25 MB, and
            # 1 MB for the first. The only buffers are tables that each rank computes, so there is nothing to broadcast.
            model = DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)
        strategy = Strategy(module, model, world, config.micro_batches)
    else:  # in DDP's place: fsdp, exact, or a lesson from scratch
        strategy = wrap.wrap(module, weights, config, world)
    optimizers = optim.build(strategy.parameters, config.optim, module.ops, strategy.orthogonalize, strategy.after_step)
    return Engine(module, strategy, optimizers, world, train)


def begin(run: Run, setup: startup.Setup, log: Log) -> None:
    """Open the run's directory. Nothing is written before every check has passed."""
    config, world, state, engine = run.config, run.world, run.state, run.engine
    run.log = log
    if config.eval.tasks:
        log.say(f"loading the tasks {config.eval.tasks}")
        first_token = run.dataset.tokenizer, run.dataset.eot_token
        run.tasks = evaluate.load_tasks(config.eval.tasks, *first_token, config.model.seq_len, world)
    run.progress = Progress(log, config, world.device, world.size, lambda step: run.dataset.by_name(run.batches.epochs(step)))
    state.batch_sizes = list(run.batches.sizes)
    state.begin(config, run.dataset.identity, world, setup.start.continues)
    directory = log.directory / "checkpoints"
    run.checkpoints = Checkpoints(directory, config.checkpoint, engine, run.dataset, log, setup.mirror, setup.start.weights)
    recorded = startup.open_run(setup, world, log, run.checkpoints, engine.module.parameter_count())
    if "val_loss" in recorded:
        run.evaluated_at, run.val_loss = state.step, recorded["val_loss"]
        run.checkpoints.evaluated(state, run.val_loss)
    if not run.tasks or any(name.startswith("tasks/") for name in recorded):
        run.scored_at = state.step


def train(run: Run) -> int:
    """Update until the last step, saving, evaluating and reporting along the way. Returns the exit status."""
    config, world, engine, state, log = run.config, run.world, run.engine, run.state, run.log
    steps, loss = config.train.steps, 0.0
    if state.step == steps and steps == run.evaluated_at == run.scored_at:  # nothing is left to do
        run.checkpoints.finish(state, final=True)  # tells the mirror, which may lack a checkpoint
        run.progress.done(state, run.dataset, run.val_loss)
        return 0
    mine = world.share(config.micro_batches)
    # The tokens depend only on (step, micro-batch), so the checkpoint needs no position in the data.
    upcoming = ((step, micro_batch) for step in range(state.step, steps) for micro_batch in mine)
    prefetcher = data.Prefetcher(run.batches, upcoming, world.device)
    stop, trace = Stop(world, config.run.max_minutes, log.began), Trace(log, config.log.profile)
    engine.warm_up(log.say)
    # Left alone, Python would collect garbage at a different moment on each rank, and all ranks would wait every time.
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        if due(COLLECT_EVERY, state.step):
            gc.collect()
        last = state.step >= steps
        stopping, overdue = stop.agreed()  # what the ranks answered to `ask`, during the last update
        if due(config.parallel.check_replicas_every, state.step):
            engine.check_replicas()  # before a save, so that wrong weights are never saved
        run.checkpoints.save(state, last or stopping, overdue)
        if stopping:  # a scheduler leaves little time, so a due evaluation waits until the run continues
            break
        if state.step != run.evaluated_at and (last or due(config.eval.eval_every, state.step)):
            validate(run)
        if run.tasks and state.step != run.scored_at and (last or due(config.eval.tasks_every, state.step)):
            run.tasks.report(run)
        if last:
            break
        stop.ask(save=run.checkpoints.overdue())
        with trace.around(state.step + 1):
            began, waited = time.perf_counter(), prefetcher.wait_seconds
            loss, grad_norm = update(run, prefetcher)
            seconds, waited = time.perf_counter() - began, prefetcher.wait_seconds - waited
        run.progress.updated(state, loss, grad_norm, engine.optimizers.lr, seconds, waited)  # console, metrics.jsonl, wandb
        if due(config.eval.sample_every, state.step):
            seed = data.dropout_seed(config.run.seed, state.step, config.micro_batches)  # not used by any micro-batch
            log.sample(state.step, write_sample(engine, run.dataset, seed))
    prefetcher.close()
    trace.stop(state.step)
    run.checkpoints.finish(state, final=True)
    if stopping:
        log.say(f"stopped at step {state.step} ({stop.reason}), saved; run the same command to continue")
        log.set_status(state="stopped", status=EX_TEMPFAIL, step=state.step, reason=stop.reason)
        return EX_TEMPFAIL
    run.progress.done(state, run.dataset, run.val_loss, loss)
    return 0


def update(run: Run, prefetcher: data.Prefetcher) -> tuple[float, float]:
    """Take one optimizer step on the global batch. Returns the mean loss of its micro-batches and the gradient norm."""
    config, engine, model, optimizers, state = run.config, run.engine, run.engine.model, run.engine.optimizers, run.state
    optimizers.set_learning_rate(optim.learning_rate(state.step, config.train.steps, config.optim, engine.module.ops.cosine))
    # Each rank fills in the losses of the micro-batches it computes, so the sum over the ranks holds all of them. Their mean is
    # then computed in the same order on any number of ranks.
    losses = run.world.zeros(config.micro_batches)
    micro_steps = len(run.world.share(config.micro_batches))  # this rank's micro-batches
    for micro_step in range(micro_steps):
        # DDP reads this flag in the forward pass. Only the update's last backward averages gradients over the ranks.
        model.require_backward_grad_sync = micro_step == micro_steps - 1
        micro_batch, inputs, targets = prefetcher.next()  # a number in the global batch, [micro_batch_size, seq_len] twice
        if config.model.dropout:
            torch.manual_seed(data.dropout_seed(config.run.seed, state.step, micro_batch))
        with engine.autocast():
            loss = model(inputs, targets)
        # Backward adds gradients up, so we divide each loss to get their mean over this rank's micro-batches. The last backward
        # then averages these means over the ranks; lockstep/parallel/from_scratch.py shows how. Under `exact`, the number is 1:
        # the sum over all ranks is divided once.
        engine.scaler.scale(loss / engine.accumulation_steps).backward()
        losses[micro_batch] = loss.detach()
    # Start copying the losses to the host now: `clip` waits for the GPU anyway, so `.tolist()` below won't wait again.
    losses = run.world.sum_over_ranks(losses).to("cpu", non_blocking=True)
    grad_norm = engine.clip(config.optim.grad_clip)
    if math.isfinite(grad_norm):  # the same on all ranks, so either all of them step or none
        optimizers.step()
    engine.scaler.update()
    engine.zero_grad()
    loss = math.fsum(losses.tolist()) / len(losses)  # fsum rounds once, whatever the order
    state.updated(loss, grad_norm, config)
    return loss, grad_norm


def validate(run: Run) -> None:
    """Evaluate on all ranks, report the result, and remember the best checkpoint."""
    config, state, engine, began = run.config, run.state, run.engine, time.monotonic()
    sizes = (config.model.seq_len, config.train.micro_batch_size)
    tokens = -(-config.eval.eval_tokens // run.dataset.evaluated)  # per dataset
    with engine.evaluating() as model:
        losses = evaluate.losses_on(run.dataset, model, *sizes, tokens, run.world, engine.autocast)
    validation = run.dataset.validation(losses)
    run.evaluated_at, run.val_loss = state.step, validation["val_loss"]
    state.unsound |= not checkpoint.is_sound(run.val_loss, config.model.vocab_size)
    run.checkpoints.evaluated(state, run.val_loss)
    run.progress.evaluated(state, validation, time.monotonic() - began)
