"""Pretrain a GPT: `python train.py [config/NAME.toml] [--flag=value ...]`, or the same under torchrun.

One update, the loop around it, and what is made once before. The same command again continues the run. Exit status: 0
complete, 2 bad input, 1 the run cannot go on, 75 stopped with the state saved (run the same command again).
"""

import sys

import settings

if __name__ == "__main__":  # --help and bad flags are answered before torch, which takes seconds, is imported
    with settings.user_errors():
        CONFIG = settings.load(sys.argv[1:], __doc__)

import dataclasses
import functools
import itertools
import math
import os
import platform
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import checkpoint
import data
import hf
import optim
import parallel
import plot
from checkpoint import TrainState
from evaluate import evaluate
from log import Log, Meter, duration, memory_gb, peak_flops
from model import GPT, flops_per_token, initialize
from parallel import Engine
from settings import Config, RunError, UserError
from world import Stop, World, connect

EX_TEMPFAIL = 75
DRAW_SECONDS = 20  # drawing takes half a second, in which training stands still
# Settings that a run keeps for life: they decide what the weights mean and which tokens a step sees.
FIXED = [*settings.flat_fields(settings.ModelConfig), "order", "seed", "tokens_per_update", "optimizer"]


@dataclass
class Run:
    """What the loop works with."""

    config: Config  # as resolved
    world: World
    dataset: data.Dataset
    batches: data.Batches
    engine: Engine
    optimizers: optim.Optimizers
    state: TrainState
    saver: checkpoint.Saver
    log: Log
    drawn_at: float = field(default_factory=time.monotonic)  # when curves.png was last drawn

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints are."""
        return self.log.directory / "checkpoints"

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one update, over all ranks."""
        return self.batches.sequences_per_update // self.batches.micro_batch_size


def update(run: Run, prefetcher: data.Prefetcher) -> tuple[torch.Tensor, float]:
    """One optimizer step over the whole global batch. Returns the losses [micro-batches of the update], of which each rank
    knows its own and leaves the others 0, and the gradient norm.
    """
    config, engine, model, state = run.config, run.engine, run.engine.model, run.state
    run.optimizers.set_learning_rate(optim.learning_rate(state.step, config.train.steps, config.optim))
    losses = run.world.zeros(run.micro_batches)
    mine = run.world.share(run.micro_batches)
    for micro_step, micro_batch in enumerate(mine):
        # Read in the forward: only the last backward of the update needs to reduce the gradients.
        model.require_backward_grad_sync = micro_step == len(mine) - 1
        inputs, targets = prefetcher.next()
        if config.model.dropout:
            torch.manual_seed(dropout_seed(config.run.seed, state.step, micro_batch))
        with engine.autocast():
            loss = model(inputs, targets)
        engine.backward(loss, len(mine))
        losses[micro_batch] = loss.detach()
    grad_norm = engine.update(run.optimizers, config.optim.grad_clip)
    state.skipped += not math.isfinite(grad_norm)
    state.step += 1
    state.tokens += config.train.tokens_per_update
    return losses, grad_norm


def train(run: Run) -> int:
    """Update from the state's step to the last, evaluating, saving and logging on the way. Returns the exit status."""
    config, world, state, log = run.config, run.world, run.state, run.log
    steps, saved_at, evaluated_at, skipped_in_a_row = config.train.steps, state.step, restore_evaluation(run), 0
    if state.step == steps and evaluated_at == steps:
        log.say(f"{log.directory} is complete at step {steps}; --steps=N goes further")
        return 0
    places = itertools.product(range(state.step, steps), world.share(run.micro_batches))
    prefetcher = data.Prefetcher(run.batches, places, world.device)
    meter = Meter(
        flops_per_token(config.model),
        peak_flops(world.device, run.engine.dtype) * world.size,
        config.train.tokens_per_update,
    )
    stop = Stop(world, config.run.max_minutes)
    log.start_bar(steps, state.step)
    while True:
        last, stopping = state.step >= steps, stop.agreed()
        if state.step != saved_at and (last or stopping or due(config.checkpoint.save_every, state.step)):
            save(run)
        if due(config.parallel.check_replicas_every, state.step):
            run.engine.check_replicas()
        if state.step != evaluated_at and (last or due(config.eval.eval_every, state.step)):
            validate(run)
        if last or stopping:
            break
        stop.ask()
        began, waited = time.perf_counter(), prefetcher.wait_seconds
        losses, grad_norm = update(run, prefetcher)
        meter.add(time.perf_counter() - began, prefetcher.wait_seconds - waited)
        log.progress(state.step)
        skipped_in_a_row = 0 if math.isfinite(grad_norm) else skipped_in_a_row + 1
        if skipped_in_a_row:
            note_skipped(run, skipped_in_a_row)
        if due(config.log.log_every, state.step) or state.step == steps:
            report(run, world.sum_(losses).mean().item(), grad_norm, meter.report())
    prefetcher.close()
    finish_save(run, final=True)
    if not last:
        log.say(f"stopped at step {state.step} ({stop.reason}), saved; the same command goes on")
        return EX_TEMPFAIL
    best = f", lowest validation loss {state.best_val_loss:.4f} at step {state.best[0][1]}" if state.best else ""
    log.say(f"done: {steps} steps, {state.tokens:,} tokens{best}; {log.directory}")
    return 0


def validate(run: Run) -> None:
    """Evaluate on all ranks; log it, remember the best checkpoint and redraw the curves."""
    config, state, engine = run.config, run.state, run.engine
    began = time.monotonic()
    batches = dataclasses.replace(run.batches, stream=run.dataset.splits["val"])
    engine.module.eval()
    val_loss = evaluate(engine.eval_model, batches, config.eval.eval_tokens, run.world, engine.autocast)
    engine.module.train()
    if run.world.is_master:
        bits = run.dataset.bits_per_byte(val_loss)
        run.log.metrics({"step": state.step, "tokens": state.tokens, "val_loss": val_loss, "val_bpb": bits})
        told = f"step {state.step:>6}/{config.train.steps}  validation loss {val_loss:.4f}"
        told += f"  {bits:.4f} bits per byte" if bits else ""
        run.log.say(f"{told}  ({duration(time.monotonic() - began)})")
        note_best(run, val_loss)
        if state.step >= config.train.steps or time.monotonic() - run.drawn_at > DRAW_SECONDS:
            plot.draw([run.log.directory], run.log.directory / "curves.png")
            run.drawn_at = time.monotonic()


def note_best(run: Run, val_loss: float) -> None:
    """Count the evaluation towards the best if the weights it is of are saved."""
    if run.saver.step == run.state.step:
        run.state.add_evaluation(val_loss, run.state.step, run.config.checkpoint.keep_best)
        prune(run)


def restore_evaluation(run: Run) -> int:
    """Rewind the metrics to the state's step. Returns that step if it has been evaluated already, else -1."""
    val_loss = None
    if run.world.is_master and (evaluation := run.log.rewind(run.state.step)):
        val_loss = evaluation["val_loss"]
        note_best(run, val_loss)
    return run.state.step if run.world.from_master(val_loss) is not None else -1


def note_skipped(run: Run, in_a_row: int) -> None:
    """Say that an update was left out; raise RunError if too many were."""
    step, limit = run.state.step, run.config.train.max_skipped_steps
    run.log.warn(f"step {step}: the gradient is not finite, update left out ({in_a_row} in a row, {run.state.skipped} in all)")
    if in_a_row > limit:
        finish_save(run, final=False)
        raise RunError(
            f"{in_a_row} updates in a row had no finite gradient (--max_skipped_steps={limit}); the checkpoint of step "
            f"{run.saver.step} is the newest; lower --lr, or try --dtype=float32"
        )


def save(run: Run) -> None:
    """Publish a checkpoint: gathered from all ranks, written by the master, in the background if asked."""
    began = time.perf_counter()
    finish_save(run, final=False)  # frees what it holds before as much is gathered again
    model, optimizer = run.engine.gather(run.optimizers)
    if not run.world.is_master:
        return
    run.state.grad_scaler = run.engine.scaler.state_dict()
    state = dataclasses.replace(run.state, best=list(run.state.best))
    write = functools.partial(checkpoint.save, run.checkpoints, state, model, run.config.model, optimizer, run.dataset)
    run.saver.start(state.step, write)
    run.log.say(f"step {state.step:>6}  checkpoint; training waited {time.perf_counter() - began:.3f} s")


def finish_save(run: Run, final: bool) -> None:
    """Wait for the save under way, if any. Its error is a warning as long as there is a later save, else a RunError."""
    if not run.world.is_master:
        return
    if error := run.saver.wait():
        whole, _ = checkpoint.newest(run.checkpoints)
        said = f"the checkpoint of step {run.saver.step} could not be written: {error}; the newest whole one is {whole}"
        if final:
            raise RunError(f"{said}; make room there and run the same command again")
        run.log.warn(f"{said}; training goes on to the next save")
    prune(run)


def prune(run: Run) -> None:
    """Keep the checkpoints that the settings ask for."""
    checkpoint.prune(run.checkpoints, run.state, run.config.checkpoint.keep_last, run.config.checkpoint.keep_best)


def report(run: Run, loss: float, grad_norm: float, speed: dict) -> None:
    """Log the last update and the speed since the last report."""
    config, state, step = run.config, run.state, run.state.step
    lr = optim.learning_rate(step - 1, config.train.steps, config.optim)
    told = {"step": step, "tokens": state.tokens, "loss": loss, "lr": lr, "grad_norm": grad_norm}
    run.log.metrics(told | speed | {"memory_gb": round(memory_gb(run.world.device), 3), "skipped": state.skipped or None})
    run.log.say(
        f"step {step:>6}/{config.train.steps}  loss {loss:.4f}  lr {lr:.2e}  norm {grad_norm:.2f}  "
        f"{speed['tokens_per_second']:,.0f} tok/s  mfu {speed['mfu']:.0%}  "
        f"eta {duration((config.train.steps - step) * speed['step_ms'] / 1000)}"
    )


def due(every: int, step: int) -> bool:
    """Whether what is done every `every` steps (0: never) is due after `step` updates."""
    return every > 0 and step > 0 and step % every == 0


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """The random state of a micro-batch, the same whichever rank computes it."""
    return int(np.random.SeedSequence([seed, step, micro_batch]).generate_state(1, np.uint64)[0] >> np.uint64(1))


# ---------------------------------------------------------------------------------------------------------------------
# What is made once


def prepare(config: Config, world: World) -> Run:
    """Open the dataset and the run directory; build the model and its optimizer, or restore them. Raises UserError."""
    dataset = data.open_dataset(config.data.tokens, config.model.vocab_size)
    directory = Path(config.run.out_dir) / config.run.name
    log = Log(directory, world.is_master)
    source, notes = world.from_master(find_source(config, directory) if world.is_master else None)
    state = checkpoint.load_state(source) if source else TrainState()
    pretrained = hf.find_model(config.model.init_from) if config.model.init_from != "scratch" and not source else None
    config = resolve(config, dataset, world, pretrained, state)
    notes += check_changes(state, config, dataset, own=source and source.parent.parent == directory)

    module = GPT(config.model)
    if source or pretrained:
        module.load_state_dict(hf.read_model(source or pretrained, config.model.seq_len)[1])
    else:
        initialize(module, config.run.seed)
    micro_batches = config.train.tokens_per_update // config.model.seq_len // config.train.micro_batch_size
    engine = Engine(module, config, world, micro_batches)
    optimizers = engine.build_optimizers(config.optim)
    if source:
        engine.scatter(optimizers, checkpoint.load_optimizer(source))
        engine.scaler.load_state_dict(state.grad_scaler)
    batches = data.Batches(
        dataset.splits["train"],
        config.model.seq_len,
        config.train.tokens_per_update // config.model.seq_len,
        config.train.micro_batch_size,
        config.run.seed,
        shuffled=config.data.order == "shuffled",
    )
    state.dataset, state.settings = dataset.identity, settings.flat_values(config)
    state.versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    saver = checkpoint.Saver(config.checkpoint.async_save, state.step)
    run = Run(config, world, dataset, batches, engine, optimizers, state, saver, log)
    introduce(run, source, notes)
    return run


def find_source(config: Config, directory: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to start from (None: from scratch) and what the user should know about the choice."""
    checkpoints, resume = directory / "checkpoints", config.run.resume
    checkpoint.sweep(checkpoints)
    existing = checkpoint.steps(checkpoints)
    if resume == "off" and existing:
        raise UserError(f"--resume=off: {directory} has checkpoints; choose another --name, or delete the directory")
    if existing:
        source, passed = checkpoint.newest(checkpoints)
        if source is None:
            raise UserError("\n       ".join([f"no checkpoint in {directory} is whole; delete it to start over", *passed]))
        return source, [*passed, f"continuing from {source}"]
    if resume in ("auto", "off"):
        return None, []
    source = checkpoint.find(resume)
    return source, [f"starting from {source}"]


def resolve(config: Config, dataset: data.Dataset, world: World, pretrained: Path | None, state: TrainState) -> Config:
    """`config` with every choice made that it left to us. Raises UserError where it does not fit dataset or ranks."""
    model = config.model
    if pretrained:
        keep = {"seq_len": model.seq_len, "dropout": model.dropout, "init_from": model.init_from}
        found = hf.read_config(pretrained)
        if found.seq_len < model.seq_len:
            raise UserError(f"--seq_len={model.seq_len}: {pretrained} has a context of {found.seq_len}")
        model = dataclasses.replace(found, **keep)
    model = settings.resolve_model(model, dataset.vocab_size)
    sequences = config.train.tokens_per_update // model.seq_len
    before = state.settings.get("micro_batch_size")
    micro_batch_size = parallel.fit_micro_batch(
        config.train.micro_batch_size, before, model, sequences, config.parallel.strategy, world
    )
    parallel.check_share(sequences // micro_batch_size, config.parallel.strategy, world)
    run_flops = flops_per_token(model) * config.train.steps * config.train.tokens_per_update
    train = dataclasses.replace(
        config.train,
        micro_batch_size=micro_batch_size,
        device=world.device.type,
        dtype=parallel.choose_dtype(config.train.dtype, world.device),
        compile=parallel.choose_compile(config.train.compile, world.device, run_flops),
    )
    return dataclasses.replace(config, model=model, train=train)


def check_changes(state: TrainState, config: Config, dataset: data.Dataset, own: bool) -> list[str]:
    """Notes on settings that differ from the checkpoint's; UserError where they may not.

    own: the checkpoint is of this very run, whose model and data are fixed. A new run from it may change the data.
    """
    now, then = settings.flat_values(config), state.settings
    changed = [name for name in now if name in then and now[name] != then[name]]
    fixed = FIXED if own else [*settings.flat_fields(settings.ModelConfig), "optimizer"]
    refused = [f"--{name}={now[name]}, and the checkpoint has {then[name]}" for name in changed if name in fixed]
    if own and state.dataset and state.dataset != dataset.identity:
        refused.append(f"--tokens={config.data.tokens} holds other tokens than the run was trained on")
    if refused:
        refused.append("restore these settings, or start another run with --name=...")
        raise UserError("\n       ".join(refused))
    silent = {"name", "out_dir", "resume", "tokens", "threads"}
    return [f"changed: {name} {then[name]} -> {now[name]}" for name in changed if name not in silent]


def introduce(run: Run, source: Path | None, notes: list[str]) -> None:
    """Write config.toml, start wandb and say what is about to run."""
    config, world, log, module = run.config, run.world, run.log, run.engine.module
    if not world.is_master:
        return
    (log.directory / "config.toml").write_text(settings.dumps(config))
    same_run = source is not None and source.parent.parent == log.directory
    run.state.wandb_run_id = log.start_wandb(config, run.state.wandb_run_id if same_run else "")
    train, model = config.train, config.model
    log.say(
        f"{config.run.name}: {model.architecture}, {module.parameter_count():,} parameters, "
        f"{model.n_layer} layers, {model.n_embd} wide, vocabulary {model.vocab_size}, context {model.seq_len}"
    )
    log.say(
        f"{train.steps} steps of {train.tokens_per_update:,} tokens = {run.micro_batches} micro-batches of "
        f"{train.micro_batch_size} x {model.seq_len} on {world.size} rank(s), {config.parallel.strategy}, "
        f"{world.device.type}, {train.dtype}, compile {train.compile}, {torch.get_num_threads()} thread(s) a rank"
    )
    epochs = train.steps * run.batches.sequences_per_update / run.batches.stream.windows(model.seq_len)
    log.say(f"{len(run.batches.stream):,} train tokens in {config.data.tokens}; the run reads them {epochs:.2f} times")
    for note in notes:
        log.say(note)


def main(config: Config) -> int:
    """Train as `config` says; returns the exit status."""
    threads = config.train.threads or (1 if config.parallel.strategy == "exact" else 0)  # bits depend on the threads
    world = connect(config.train.device, threads, config.parallel.timeout_minutes)
    if config.train.deterministic or config.parallel.strategy == "exact":
        parallel.make_deterministic(world)
    run = prepare(config, world)
    status = 1
    try:
        with world.naming_missing_ranks():
            status = train(run)
    finally:
        run.saver.wait()  # what is half written when training fails is still worth finishing
        run.log.close(status)
    world.barrier()  # a rank that leaves while another still reads from it would fail that one
    return status


if __name__ == "__main__":
    status = 1
    try:
        with settings.user_errors():
            status = main(CONFIG)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    # All is on disk. Neither a finished run nor a failed one, for whose end others wait, may hang in the tear-down of the
    # interpreter, where the threads of torch's libraries and the process group wait for one another.
    os._exit(status)
