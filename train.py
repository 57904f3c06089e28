"""Pretrain a GPT: `python train.py [config/NAME.toml] [--flag=value ...]`, or the same under torchrun.

    python train.py                                                          # the preset config/laptop.toml
    python train.py config/gpt2_124m.toml --lr=3e-4                          # a preset, and a flag that overrides it
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.toml  # on eight GPUs
    python train.py config/gpt2_124m.toml --plan                             # print what it will cost; do not train

Run the same command again to continue a run. `--name=NAME` is enough, because a run keeps its settings (runs/NAME/config.toml)
until a flag changes them, whatever the preset says. Exit status: 0 complete, 75 stopped and saved, 2 bad input, 1 failed.
"""

# Read this file from top to bottom: setup, the training loop, one update, and the loop's helpers.

from lockstep import command

if __name__ == "__main__":
    command.require_packages()

from lockstep.planning import plan
from lockstep.settings import Config


def read_command(args: list[str]) -> Config:
    """Read the command line. With --plan, print the plan and exit. Raises UserError."""
    config, options = plan.read_command(args, __doc__)
    if options.plan:
        import data  # only here, because --help does not need numpy

        plan.show(config, options, data.planned)
        raise SystemExit(0)
    return config


if __name__ == "__main__":  # answer --help, --plan and bad flags before importing torch, which takes seconds
    command.run("train", read_command)

import gc
import math
import os
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import data
from evaluate import evaluate
from lockstep import settings
from lockstep.checkpoints import checkpoint, huggingface, lookup
from lockstep.checkpoints.checkpoint import Checkpoints, TrainState
from lockstep.checkpoints.lookup import Start
from lockstep.common import cli, errors, files
from lockstep.common.errors import EX_TEMPFAIL, RunError
from lockstep.hardware.device import DTYPES, keep_freed_memory, peak_flops, prepare_compiler, prepare_device
from lockstep.hardware.footprint import flops_per_token
from lockstep.numerics import optim
from lockstep.numerics.attention import activate_attention_kernel
from lockstep.parallel.engine import Engine, load_weights
from lockstep.parallel.exact import ExactSums
from lockstep.parallel.from_scratch import ScratchAllReduce, ScratchOverlap, ScratchReduceScatter
from lockstep.parallel.strategy import Strategy
from lockstep.parallel.world import Stop, World, connect
from lockstep.planning import choices, startup
from lockstep.reports.log import Log, duration, require_wandb_key
from lockstep.reports.progress import Progress, due
from lockstep.reports.trace import Trace
from model import GPT, initial_weights, on_meta
from sample import require_tokenizer, write_sample

HOPELESS = 10  # times the loss of guessing; NaN and infinity are above any limit
COLLECT_EVERY = 100  # steps between collections of Python's garbage, on all ranks at once


@dataclass
class Run:
    """Everything that an update and the loop need, built by `build` from initial weights or from a checkpoint."""

    config: Config  # resolved
    world: World
    dataset: data.Mixture
    batches: data.Batches
    engine: Engine
    state: TrainState
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
    is_master = int(os.environ.get("RANK", 0)) == 0
    run = None
    with Log(Path(config.run.out_dir, config.run.name), is_master) as log:

        def end(error: RunError) -> None:  # in a thread, because this one is stuck
            log.end(error)
            if run:
                run.checkpoints.wait(failed=True)

        world = join(config)
        with world.reporting_lost_ranks(end):
            asked, config, *settled = settle(config, world, log)
            with startup.explaining_out_of_memory(config, world):
                run = prepare(asked, config, *settled)
                try:
                    log.status = train(run)
                    run.checkpoints.finish_copying()  # last, because a scheduler may not wait for it
                finally:  # if training fails during a save, finish the save
                    run.checkpoints.wait(failed=log.status == 1)
            world.leave()
    return log.status


def join(config: Config) -> World:
    """Join the other ranks, each on its own device."""
    # torchrun sets these. Without it, this process is the only rank.
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))  # rank within this machine, and the index of its GPU

    exact, portable = config.parallel.strategy == "exact", config.numerics.numerics == "portable"
    threads = config.train.threads
    if exact and threads == "auto" and not portable:
        threads = 1  # sums within a rank depend on its number of threads
    # FSDP allocates and frees memory in blocks of many sizes. If the C library held on to all of them, an fsdp rank would need
    # twice the memory, nearly as much as a ddp rank.
    if config.parallel.strategy != "fsdp":
        keep_freed_memory()
    integers_only = exact or portable  # portable always uses exact
    deterministic = config.train.deterministic or integers_only
    device = prepare_device(config.train.device, local_rank, threads, deterministic, integers_only)
    return connect(rank, world_size, device, config.parallel.timeout_minutes)  # NCCL between GPUs, gloo between CPUs


def settle(asked: Config, world: World, log: Log) -> tuple[Config, Config, World, data.Mixture, Start, Any, Log]:
    """Open the data, find where the run starts, resolve every `auto`, and print what will run. Raises UserError."""
    config = asked
    dataset = data.open_mixture(config.data, config.model.vocab_size)
    flags = {f"--{name}": value for name, value in cli.flat_values(config).items()}
    world.require_same(flags | {"the sha256 of --tokens": dataset.identity, "torch's version": torch.__version__})
    if config.eval.sample_every:
        require_tokenizer(dataset)
    mirror = None
    if config.checkpoint.mirror:
        with errors.extra("--mirror", "extras/mirror.py"):
            from extras.mirror import Mirror
        mirror = Mirror(config.checkpoint.mirror, log)
    start = lookup.find_start(log.directory, config.run.resume, config.model.init_from, dataset, world, mirror)
    previous = start.state.settings
    if not start.continues:
        previous = previous | world.broadcast(settings.first_choices(asked))
    previous = previous | {"world_size": start.state.history[-1]["world_size"] if start.state.history else 0}
    kept = startup.keep_threads(config, previous, world)
    config = choices.resolve(start.settle(config), dataset.vocab_size, startup.survey(world), previous)
    versions = checkpoint.versions(config, world.device)
    lost = lookup.describe_loss(log.directory, start.state.step, config) if world.is_master and not start.continues else []
    notes = [*start.notes, *lost, *kept, *lookup.check_changes(start, config, dataset.identity, versions)]
    notes += startup.compare(config, world, versions)
    if start.state.step < config.train.steps:
        notes += startup.check(config, world)
        reads = data.describe(dataset, open_batches(config, dataset, start.state), config.train.steps)
        log.say(startup.banner(config, world, start.state.step, reads, dataset.remarks))
    for note in notes:
        log.say(note)
    return asked, config, world, dataset, start, mirror, log


def prepare(asked: Config, config: Config, world: World, dataset: data.Mixture, start: Start, mirror: Any, log: Log) -> Run:
    """Build everything that training needs, then open the run's directory. Writes nothing until every check has passed."""
    names, loaded = config.eval.tasks, None
    if names:
        with errors.extra("--tasks", "extras/tasks.py"):
            from extras import tasks
        log.say(f"loading the tasks {names}")
        loaded = tasks.load(names, dataset.tokenizer, dataset.eot_token, config.model.seq_len, world)
    began, state = time.monotonic(), start.state
    run = build(config, world, dataset, start)
    huggingface.check_description(config.model, {name: tuple(tensor.shape) for name, tensor in run.engine.parameters.items()})
    if start.weights and state.step < config.train.steps:
        which = "weights and optimizer state" if start.checkpoint else "weights"
        log.say(f"loaded the {which} of {start.weights} in {duration(time.monotonic() - began)}")
    run.log, run.tasks = log, loaded
    peak_speed = world.size * peak_flops(world.device, config.train.dtype) / flops_per_token(config.model)
    run.progress = Progress(
        log, config.train, config.log.log_every, peak_speed, lambda step: dataset.by_name(run.batches.epochs(step))
    )
    state.batch_sizes = list(run.batches.sizes)
    state.begin(config, dataset.identity, world, start.continues)
    if mirror:
        mirror.identity = state.identity
    directory = log.directory / "checkpoints"
    run.checkpoints = Checkpoints(directory, config.checkpoint, run.engine, dataset, log, mirror, start.weights)
    if world.is_master and config.log.wandb == "online":
        require_wandb_key()
    recorded = world.broadcast(log.begin(state.step))
    log.set_status(state="running", step=state.step, steps=config.train.steps, next=command.again(world.size, world.local_size))
    run.checkpoints.begin(state.step)
    if "val_loss" in recorded:
        run.evaluated_at, run.val_loss = state.step, recorded["val_loss"]
        run.checkpoints.evaluated(state, run.val_loss)
    if not names or any(name.startswith("tasks/") for name in recorded):
        run.scored_at = state.step
    if world.is_master and state.step < config.train.steps:  # a complete run keeps the settings it was trained with
        files.publish_text(log.directory / "config.toml", settings.dumps(config, asked))
    facts = cli.flat_values(config) | {"world_size": world.size, "parameters": run.engine.module.parameter_count()}
    state.wandb_run_id = log.start_trackers(config.log, facts, state.step, state.wandb_run_id if start.continues else "")
    return run


def build(config: Config, world: World, dataset: data.Mixture, start: Start) -> Run:
    """Build what an update needs: model, optimizers and data, with the weights and state to start from."""
    state = start.state
    module = on_meta(config.model, dataset.document_token(config.data.attend), config.numerics.numerics)
    if start.weights:  # a checkpoint, which is also a Hugging Face directory, or another model
        weights = huggingface.open_model(start.weights, on_meta, config.model.seq_len)[1].items()
    else:
        weights = initial_weights(module, config.run.seed)
    engine = build_engine(module, weights, config, world)
    if start.checkpoint:
        saved = checkpoint.open_optimizer(start.checkpoint, engine.parameters, state, config.optim.optimizer)
        engine.load_optimizer_state(saved)
        if state.grad_scaler:  # empty unless the dtype was float16
            engine.scaler.load_state_dict(state.grad_scaler)
    return Run(config, world, dataset, open_batches(config, dataset, state), engine, state)


def open_batches(config: Config, dataset: data.Mixture, state: TrainState) -> data.Batches:
    """Return the batches of a run that goes on from `state` as `config`, which may change their size."""
    before = state.config if state.settings else config
    return data.make_batches(config, dataset, data.sizes_from(state.step, state.batch_sizes, before, config))


def build_engine(module: GPT, weights: Iterable[tuple[str, Any]], config: Config, world: World) -> Engine:
    """Compile the model, wrap it so that the ranks train it together, and build its optimizers.

    module: on the meta device, where it takes no memory until each rank loads its part of the `weights`.
    """
    train, strategy, device = config.train, config.parallel.strategy, world.device
    activate_attention_kernel(config.model, train.micro_batch_size, DTYPES[train.dtype], device)
    if train.compile == "on":
        prepare_compiler(device)
        module.compile_blocks()
    if train.activation_checkpointing:
        module.checkpoint_activations()

    # Every strategy's model averages the gradients over the ranks during the last backward of an update.
    if strategy == "fsdp" and world.size > 1:
        from lockstep.parallel.sharded import Fsdp  # imported here because importing FSDP2 takes a second

        together = Fsdp(module, DTYPES[train.dtype], world, config.parallel, config.micro_batches)
        load_weights(module, weights, device)
    else:
        load_weights(module, weights, device)
        together = replicate(module, config, world)

    optimizers = optim.build(together.parameters, config.optim, module.ops, together.orthogonalize, together.after_step)
    return Engine(module, together, optimizers, world, train.dtype, train.compile == "on")


def replicate(module: GPT, config: Config, world: World) -> Strategy:
    """Wrap `module` in a strategy under which every rank holds all weights."""
    model: nn.Module = module
    match config.parallel.strategy:
        case "ddp" | "fsdp" if world.size == 1:
            pass
        case "ddp":
            # The only buffers are tables that each rank computes. (torch 2.13 renames this option; 2.11 has only the old name.)
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            # torch's default buckets: 25 MB, and 1 MB for the first
            model = DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)
        case "exact":
            return ExactSums(module, world, config.micro_batches, config.train.compile == "on")
        case "scratch_allreduce":
            model = ScratchAllReduce(module)
        case "scratch_reduce_scatter":
            model = ScratchReduceScatter(module)
        case "scratch_overlap":
            model = ScratchOverlap(module)
        case other:
            raise AssertionError(f"--strategy={other} has no class")
    return Strategy(module, model, world, config.micro_batches)


def train(run: Run) -> int:
    """Update until the last step, saving, evaluating and reporting along the way. Returns the exit status."""
    config, world, engine, state, log = run.config, run.world, run.engine, run.state, run.log
    steps, loss = config.train.steps, 0.0
    if state.step == steps == run.evaluated_at == run.scored_at:
        run.checkpoints.finish(state, final=True)  # tells the mirror, which may lack a checkpoint
        run.progress.done(state, run.dataset, run.val_loss)
        return 0
    mine = world.share(config.micro_batches)
    # The tokens depend only on (step, micro-batch), so the checkpoint needs no position in the data.
    upcoming = ((step, micro_batch) for step in range(state.step, steps) for micro_batch in mine)
    prefetcher = data.Prefetcher(run.batches, upcoming, world.device)
    stop, trace = Stop(world, config.run.max_minutes, log.began), Trace(log, config.log.profile, world.device)
    warm_up(run)
    # Left alone, Python would collect garbage at a different moment on each rank, and all ranks would wait every time.
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        if due(COLLECT_EVERY, state.step):
            gc.collect()
        last, (stopping, overdue) = state.step >= steps, stop.agreed()  # the answer to `ask` from before the last update
        if due(config.parallel.check_replicas_every, state.step):
            engine.check_replicas()  # before a save, so that wrong weights are never saved
        run.checkpoints.save(state, last or stopping, overdue)
        if stopping:  # a scheduler leaves little time, so a due evaluation waits until the run continues
            break
        if state.step != run.evaluated_at and (last or due(config.eval.eval_every, state.step)):
            validate(run)
        if run.tasks and state.step != run.scored_at and (last or due(config.eval.tasks_every, state.step)):
            score(run)
        if last:
            break
        stop.ask(save=run.checkpoints.overdue())
        with trace.around(state.step + 1):
            began, waited = time.perf_counter(), prefetcher.wait_seconds
            loss, grad_norm = update(run, prefetcher)
            seconds, waited = time.perf_counter() - began, prefetcher.wait_seconds - waited
        run.progress.updated(state, loss, grad_norm, engine.optimizers.lr, seconds, waited)
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
    mine = run.world.share(config.micro_batches)  # this rank's indices in the global batch, such as range(4, 8)
    for micro_step, micro_batch in enumerate(mine):
        # DDP reads this flag in the forward pass. Only the update's last backward averages gradients over the ranks.
        model.require_backward_grad_sync = micro_step == len(mine) - 1
        inputs, targets = prefetcher.next()  # [micro_batch_size, seq_len] each
        if config.model.dropout:
            torch.manual_seed(data.dropout_seed(config.run.seed, state.step, micro_batch))
        with engine.autocast():
            loss = model(inputs, targets)
        # Backward adds gradients up, so we divide each loss to get their mean over this rank's micro-batches. The last backward
        # then averages these means over the ranks; lockstep/parallel/from_scratch.py shows how.
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
    state.skipped += not math.isfinite(grad_norm)
    state.unsound = not (math.isfinite(grad_norm) and is_sound(loss, config))
    state.step += 1
    state.tokens += config.train.tokens_per_update
    return loss, grad_norm


def is_sound(loss: float, config: Config) -> bool:
    """Return whether `loss` may come from a model worth keeping. One that guesses has log(vocab_size)."""
    return loss < HOPELESS * math.log(max(2, config.model.vocab_size))


def warm_up(run: Run) -> None:
    """Compile, and fix the order of communication, so that the first update is like every other, even after a resume."""
    began = time.monotonic()
    if run.engine.compiled:
        run.log.say("compiling ...")
    run.engine.warm_up(run.config.train.micro_batch_size, run.config.model.seq_len)
    if run.engine.compiled:
        run.log.say(f"compiled in {duration(time.monotonic() - began)}")


def validate(run: Run) -> None:
    """Evaluate on all ranks, report the result, and remember the best checkpoint."""
    config, state, engine, began = run.config, run.state, run.engine, time.monotonic()
    streams, size = run.dataset.streams("val"), (config.model.seq_len, config.train.micro_batch_size)
    tokens = -(-config.eval.eval_tokens // run.dataset.evaluated)  # tokens per dataset
    with engine.evaluating() as model:
        losses = [evaluate(model, stream, *size, tokens, run.world, engine.autocast) for stream in streams]
    validation = run.dataset.validation(losses)
    run.evaluated_at, run.val_loss = state.step, validation["val_loss"]
    state.unsound |= not is_sound(run.val_loss, config)
    run.checkpoints.evaluated(state, run.val_loss)
    run.progress.evaluated(state, validation, time.monotonic() - began)


def score(run: Run) -> None:
    """Score the model on tasks, on all ranks, and report the scores. If lm-eval fails, the run continues."""
    began, run.scored_at = time.monotonic(), run.state.step
    try:
        with run.engine.inference():
            scores = run.tasks.measure(run.engine.module, run.config.eval.tasks_limit)
        run.progress.scored(run.state, scores, time.monotonic() - began)
    except RunError as error:
        run.log.warn(f"step {run.state.step}: no scores on tasks: {error}")
