"""Where a run starts, and which settings may change when it continues."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from lockstep import settings
from lockstep.checkpoints import huggingface
from lockstep.checkpoints.checkpoint import TrainState, load_state, while_others_wait
from lockstep.checkpoints.lookup import LINKS, find, find_model
from lockstep.checkpoints.retention import MANIFEST, newest, published
from lockstep.checkpoints.tensor_files import LazyTensor
from lockstep.common import cli
from lockstep.common.errors import UserError, refuse
from lockstep.common.steps import mixtures_seen, step_of_phase
from lockstep.dataset.mixture import Mixture
from lockstep.numerics.optim import learning_rate, warn_of_jump
from lockstep.parallel.world import World
from lockstep.reports.log import read_records
from lockstep.settings import Config, ModelConfig, OptimConfig

# Settings that a run can never change, because they determine what the weights mean and which tokens a step sees. A new run
# that starts from a checkpoint with optimizer state need only keep OF_WEIGHTS.
OF_WEIGHTS = [name for name in [*cli.flat_fields(ModelConfig), "optimizer"] if name not in ("dropout", "own_code")]
FIXED = [*OF_WEIGHTS, "order", "attend", "seed", "tokens_per_update"]
SILENT = {"name", "out_dir", "resume", "tokens", "phase"}  # may change without a note


@dataclass(frozen=True)
class Start:
    """Where a run starts: at a checkpoint, with the weights of a model, or from scratch."""

    state: TrainState
    checkpoint: Path | None = None  # weights, optimizer state and step
    pretrained: Path | None = None  # a model directory; only its weights are used
    continues: bool = False  # whether the checkpoint belongs to this run
    notes: list[str] = field(default_factory=list)  # what to tell the user about this choice

    @property
    def weights(self) -> Path | None:
        """The directory that the weights come from, or None if the run starts from scratch."""
        return self.checkpoint or self.pretrained

    @property
    def pretrained_by_us(self) -> bool:
        """Whether the weights are from a checkpoint of a run, which may train on."""
        return self.pretrained is not None and (self.pretrained / MANIFEST).exists()

    def shape(self, model: ModelConfig) -> ModelConfig:
        """Return `model` with the shape of the weights. Raises UserError."""
        return huggingface.shape_of(self.weights, model)

    def open_weights(self, build: Callable[[ModelConfig], nn.Module], seq_len: int) -> dict[str, LazyTensor]:
        """Return the weights under our names, to be read row by row. See `huggingface.open_model`."""
        return huggingface.open_model(self.weights, build, seq_len)[1]

    def origin(self, init_from: str) -> str:
        """Return where a checkpoint's first weights came from: its own --init_from, unless the given one differs."""
        recorded, path = self.state.config.model.init_from, Path(init_from).absolute()
        parent = path.parent if path.name in LINKS else path
        return recorded if init_from == "scratch" or Path(recorded).absolute().is_relative_to(parent) else init_from

    def learning_rate(self, optim: OptimConfig) -> float:
        """Return the learning rate that the checkpoint's run had reached with the resolved `optim`."""
        return learning_rate(self.state.step, self.state.config.train.steps, optim)


def find_start(run: Path, resume: str, init_from: str, dataset: Mixture, world: World, mirror) -> Start:
    """Return where a run starts. The master decides for all ranks. Raises UserError.

    mirror: the run's `extras.mirror.Mirror`, or None.
    """
    if mirror:
        mirror.restore(run / "checkpoints", world)
    start = while_others_wait(world, lambda: search(run, resume, init_from, dataset))
    if start.pretrained and world.size > world.local_size:  # each node downloads a model from the Hub
        while_others_wait(world, lambda: find_model(init_from), mine=world.rank % world.local_size == 0)
    return start


def search(run: Path, resume: str, init_from: str, dataset: Mixture) -> Start:
    """Return where a run starts, with notes. Raises UserError."""
    if dataset.tokenizer and dataset.eot_token is not None:  # fail now, not at the first save hours later
        huggingface.token_text(dataset.tokenizer, dataset.eot_token)
    if published(run / "checkpoints"):
        if resume == "off":
            way_out = "leave out --resume=off to continue it, or choose another --name"
            raise UserError(f"--resume=off: {run} already has checkpoints; {way_out}")
        path, damaged = newest(run / "checkpoints")
        if path is None:
            refuse([f"{run} has no intact checkpoint; delete the directory to start over", *damaged])
        notes = [f"--resume={resume} is ignored: this run already has checkpoints"] if resume != "auto" else []
        notes += [f"warning: {line}" for line in damaged]
        kept = " with the run's own settings, except for your flags" if (run / "config.toml").exists() else ""
        return Start(load_state(path, dataset), path, continues=True, notes=[*notes, f"continuing from {path}{kept}"])
    if resume not in ("auto", "off"):
        path, notes = find(resume)
        unchecked = check_vocabulary(path, dataset)
        return Start(load_state(path, dataset), path, notes=[*notes, f"starting from {path}", *unchecked])
    if init_from != "scratch":
        path, notes = find_model(init_from)
        shape = f"starting from the weights of {path}; its shape overrides settings and flags"
        unchecked = check_vocabulary(path, dataset)
        return Start(TrainState(), pretrained=path, notes=[*notes, shape, *unchecked])
    return Start(TrainState())


def describe_loss(run: Path, done: int, config: Config) -> list[str]:
    """Say if an earlier start of this run ended without a checkpoint, and when the first one will be.

    done: steps before this start.
    """
    path, options, steps = run / "metrics.jsonl", config.checkpoint, config.train.steps
    records = read_records(path) if path.exists() else []
    reached = max((record["step"] for _, record in records if record), default=0)
    if reached <= done:
        return []
    first = min(steps, (done // options.save_every + 1) * options.save_every) if options.save_every else steps
    when = f"at step {first}" + (f" or after {options.save_minutes:g} minutes" if options.save_minutes else "")
    ended = f"an earlier start of {run} reached step {reached}, but ended before its first checkpoint"
    return [f"{ended}, so the run begins again; the first checkpoint will be {when} (--save_every, --save_minutes)"]


def check_vocabulary(directory: Path, dataset: Mixture) -> list[str]:
    """Raise UserError unless the model in `directory` knows the dataset's tokens. Returns a warning if that is uncertain."""
    unchecked = huggingface.check_tokenizer(directory, dataset.tokenizer, dataset.eot_token)
    if (size := huggingface.read_config(directory).vocab_size) < dataset.vocab_size:
        found = f"the model in {directory} has {size} tokens, but {dataset} has {dataset.vocab_size}"
        raise UserError(f"{found}; prepare the text again with the model's own tokenizer (prepare_data.py --tokenizer=FILE)")
    return unchecked


def check_changes(start: Start, config: Config, dataset: str, versions: dict[str, str]) -> list[str]:
    """List the settings and versions that differ from the checkpoint's, one per line. Raises UserError if any must not change.

    A run keeps its model and its data, but a new run that starts from a checkpoint may change the data.

    dataset: the identity of the data. versions: of the software on this machine.
    """
    if refused := forbidden_changes(start, config, dataset):
        other_run = f"leave {Path(config.run.out_dir, config.run.name)} as it is and start a new run with --name=..."
        way_out = other_run if start.continues else "use only the weights with --init_from=PATH, or leave out --resume"
        refuse([*refused, f"restore these settings, or {way_out}"])
    if start.state.step >= config.train.steps:
        return []
    return allowed_changes(start, config, dataset, versions)


def changed_settings(start: Start, config: Config) -> list[str]:
    """Return the names of the settings that differ from the checkpoint's."""
    now, before = cli.flat_values(config), start.state.settings
    return [name for name in now if name in before and now[name] != before[name]]


def forbidden_changes(start: Start, config: Config, dataset: str) -> list[str]:
    """Return a message for each setting that must be as it was."""
    state, own, done = start.state, start.continues, start.state.step
    now, before, was = cli.flat_values(config), state.settings, state.config
    fields, fixed = cli.flat_fields(Config), FIXED if own else OF_WEIGHTS
    refused = []
    for name in changed_settings(start, config):
        if name in fixed:
            refused.append(f"{cli.as_written(fields[name], now[name])}, but the checkpoint used {before[name]}")
    if own:
        saw, sees = (mixtures_seen(identity, done) for identity in (state.dataset or dataset, dataset))
        if saw[0] != sees[0]:
            refused.append(f"--tokens={now['tokens']} must hold the tokens that {was.data.tokens} held, in the same shares")
        elif saw != sees:
            first = min(map(step_of_phase, set(saw[1:]) ^ set(sees[1:])))
            changes = f"--phase={now['phase']} changes the mixture of step {first + 1}, but {done} steps are done"
            refused.append(f"{changes}; a new phase can begin after step {done} at the earliest")
        if skips_otherwise(start, config):
            way_out = "to leave that batch out, start a new run from an earlier checkpoint: --name=... --resume=PATH"
            refused.append(f"{skips_a_done_step(start, config)}; {way_out}")
    least = done if own else done + 1  # a complete run may be started again; a new run must train
    if config.train.steps < least:
        refused.append(f"--steps={config.train.steps}, but {done} steps are done; --steps must be at least {least}")
    return refused


def allowed_changes(start: Start, config: Config, dataset: str, versions: dict[str, str]) -> list[str]:
    """Return a line for each change that a user should know of, because the run goes on otherwise than it began."""
    state, done = start.state, start.state.step
    now, before, was = cli.flat_values(config), state.settings, state.config
    exact = config.parallel.strategy == "exact"
    silent = set(SILENT)
    if exact:
        silent.add("shard_gradients")  # does not affect its bits
    if config.numerics.numerics == "portable":
        silent.add("threads")
    lines = []
    for name in changed_settings(start, config):
        if name not in silent:
            lines.append(f"changed: {name} {str(before[name]) or 'none'} -> {str(now[name]) or 'none'}")
    if exact and before.get("shard_gradients") == "on":
        lines.append("note: --shard_gradients is for fsdp alone now; exact has the same bits without it, but needs more memory")
    if config.numerics.numerics == "native":  # bits depend on versions
        known = state.versions
        lines += [f"changed: {n} {known[n]} -> {new}" for n, new in versions.items() if n in known and known[n] != new]
    held, holds = (state.dataset or dataset).split(), dataset.split()  # the tokens, then the mixture of each phase
    if held[0] != holds[0]:
        lines.append(f"changed: tokens {was.data.tokens} -> {now['tokens']}")
    elif skips_otherwise(start, config):
        seen = "these weights have already seen it; start from an earlier checkpoint"
        lines.append(f"warning: {skips_a_done_step(start, config)}, and {seen}")
    if held[1:] != holds[1:]:
        lines.append(f"changed: phase {was.data.phase or 'none'} -> {now['phase'] or 'none'}")
    if done:
        schedule = settings.resolve_schedule(was.optim, was.train.steps)
        lines += warn_of_jump(done, (was.train.steps, schedule), (config.train.steps, config.optim))
    return lines


def skips_otherwise(start: Start, config: Config) -> bool:
    """Return whether --skip_steps leaves out other batches of the steps that are done."""
    done = start.state.step
    return seen_by(done, start.state.config.skipped_batches) != seen_by(done, config.skipped_batches)


def skips_a_done_step(start: Start, config: Config) -> str:
    """Return the beginning of a message about such a change."""
    return f"--skip_steps={config.data.skip_steps} changes the data of one of the {start.state.step} finished steps"


def seen_by(steps: int, skipped: tuple[int, ...]) -> list[int]:
    """Return the skipped batches (in ascending order) that affect the first `steps` steps."""
    return [batch for i, batch in enumerate(skipped) if batch < steps + i]
