"""Which checkpoint or model a command starts from, and which settings may change when a run continues."""

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from lockstep import settings
from lockstep.checkpoints import huggingface
from lockstep.checkpoints.checkpoint import TrainState, load_state, while_others_wait
from lockstep.checkpoints.retention import MANIFEST, find_damage, hold, newest, published, step_of
from lockstep.common import cli
from lockstep.common.errors import UserError, refuse, say
from lockstep.common.steps import mixtures_seen, read_phases, step_of_phase
from lockstep.numerics.optim import learning_rate, warn_of_jump
from lockstep.parallel.world import World
from lockstep.reports.log import read_records
from lockstep.settings import Config, ModelConfig

# Settings that a run can never change, because they determine what the weights mean and which tokens a step sees. A new run
# that starts from a checkpoint with optimizer state need only keep OF_WEIGHTS.
OF_WEIGHTS = [name for name in [*cli.flat_fields(ModelConfig), "optimizer"] if name != "dropout"]
FIXED = [*OF_WEIGHTS, "order", "mixture_order", "attend", "seed", "tokens_per_update"]
SILENT = {"name", "out_dir", "resume", "tokens", "phase", "prepare_command"}  # may change without a note
LINKS = ("best", "latest")  # in a run's checkpoints/
NO_URL = "for a model on the Hub, use OWNER/NAME; train.py --mirror=URL continues a run from a store"


def find(name: str) -> tuple[Path, list[str]]:
    """Return the checkpoint at a path, or the newest intact one of the run at that path, with warnings. Raises UserError.

    The run may go on meanwhile. It keeps this checkpoint until this process ends.
    """
    cli.require_local("", name, NO_URL)
    while (path := behind(Path(name))) and ((path / MANIFEST).exists() or path != behind(Path(name))):
        if hold(path):
            if reason := find_damage(path):
                raise UserError(f"{path} is damaged: {reason}")
            return path, []
        time.sleep(0.01)  # a link may point to another checkpoint now
    found, damaged = newest(path / "checkpoints", reserve=True)
    if found is None:
        if (path / "metrics.jsonl").exists() and not damaged:
            first = "the first one is saved after --save_every or --save_minutes, or when the run stops"
            raise UserError(f"{path} has no checkpoint yet; {first}")
        problem = f"is neither a run with an intact checkpoint nor a checkpoint{nanogpt_hint(path)}{cli.similar_runs(name)}"
        refuse([f"{path} {problem}", *damaged])
    return found, [f"warning: {line}" for line in damaged]


def behind(path: Path) -> Path:
    """Return the checkpoint that a run's link `best` or `latest` points to now, because the link moves; else `path`."""
    return path.parent / path.readlink() if path.name in LINKS and path.is_symlink() else path


def find_model(name: str, patterns: tuple[str, ...] = ("*.safetensors", "*.json")) -> tuple[Path, list[str]]:
    """Return the model directory of a run, a checkpoint, a Hugging Face directory or a Hub id, with warnings. Raises UserError.

    patterns: files to download from the Hub.
    """
    cli.require_local("", name, NO_URL)
    path = Path(name)
    if any((path / file).exists() for file in (MANIFEST, "checkpoints", "metrics.jsonl")):
        return find(name)
    if (path / "config.json").exists():
        return path, []
    if path.exists() or name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1:
        problem = f"is neither a run nor a model directory with a config.json{nanogpt_hint(path)}"
        raise UserError(f"{name} {problem}{cli.similar_runs(name)}")
    try:
        from huggingface_hub import snapshot_download  # reads HF_ENDPOINT, which may be invalid

        return Path(snapshot_download(name, allow_patterns=list(patterns))), []
    except Exception as error:  # a malformed name, no such model, no network, no disk: the fix is the same
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = f"is not a local directory and could not be fetched from the Hub: {reason}"
        raise UserError(f"{name} {problem}{cli.similar_runs(name)}") from None


def nanogpt_hint(path: Path) -> str:
    """Say how to convert a nanoGPT checkpoint, if `path` is one or a folder that holds one; else empty."""
    found = [path] if path.suffix in (".pt", ".pth") else sorted(path.glob("*.pt"))
    if not found:
        return ""
    command = shlex.join(["python", "extras/convert_nanogpt.py", str(found[-1]), "--out=models/NAME"])
    return f"; to convert nanoGPT's, use {command}, then --init_from=models/NAME"


def load_model(
    name: str, build: Callable[..., nn.Module], numerics: str = "auto", dtype: str = "auto"
) -> tuple[Path, nn.Module]:
    """Load a model for inference, on the CPU and without dropout. Returns its directory and the model. See `find_model`.

    build: makes a model of a config, on the meta device (`model.on_meta`). numerics: native or portable; auto: as in
    training, if known. dtype: the requested precision of matmuls.
    """
    while True:
        directory, warnings = find_model(name)
        try:
            config, weights = huggingface.read_model(directory, build)
            break
        except (UserError, OSError):
            if directory.exists():
                raise  # otherwise its run has removed it on a disk without locks, so take the next one
    for warning in warnings:
        say(warning)
    if numerics == "auto":
        numerics = "native"
        with contextlib.suppress(UserError):  # a model of another tool may have another kind of config.toml
            numerics = settings_of(directory).numerics.numerics
    if numerics == "portable" and dtype not in ("auto", "float32"):
        raise UserError(f"--numerics=portable computes in float32; leave out --dtype={dtype}, or use --numerics=native")
    model = build(config, numerics=numerics).eval()
    model.load_state_dict(weights, assign=True)
    return directory, model


def settings_of(directory: Path) -> Config:
    """Return the settings that a checkpoint or an export was trained with. For any other model, `tokens` is empty.

    Raises UserError.
    """
    if (directory / "config.toml").exists():
        return settings.read_preset(directory / "config.toml")
    if (directory / "trainer_state.json").exists():
        return load_state(directory).config
    return settings.replace(Config(), tokens="")


# ---------------------------------------------------------------------------------------------------------------------
# Where training starts


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

    def settle(self, config: Config) -> Config:
        """Fill in what the start determines: the model's shape, the run's origin, and the settings it keeps."""
        if config.model.init_from != "scratch":
            config = dataclasses.replace(config, model=huggingface.shape_of(self.weights, config.model))
        config = self.settle_decay(config)
        if self.checkpoint:
            init_from = origin(config.model.init_from, self.state.config.model.init_from)
            config = settings.replace(config, init_from=init_from)
        if self.continues:
            before = self.state.config
            if before.run.resume not in ("auto", "off"):
                config = settings.replace(config, resume=before.run.resume)
            if self.state.step >= config.train.steps:  # a complete run keeps its checkpoints
                config = settings.replace(config, keep_last=before.checkpoint.keep_last, keep_best=before.checkpoint.keep_best)
        elif self.checkpoint:  # name the checkpoint, because its run may train on
            config = settings.replace(config, resume=str(self.checkpoint))
        elif self.pretrained and (self.pretrained / MANIFEST).exists() and Path(config.model.init_from).exists():
            config = settings.replace(config, init_from=str(self.pretrained))
        return config

    def settle_decay(self, config: Config) -> Config:
        """Return `config` with the schedule and steps that follow from --decay_steps, if it is set. Raises UserError."""
        if not (decay := config.optim.decay_steps):
            return config
        done, before = self.state.step, self.state.config
        steps = before.train.steps  # if the run is already in this decay
        if not self.continues or before.optim.decay_steps != decay:
            if not self.checkpoint:
                problem = "finishes a run from one of its checkpoints, so it needs --resume=PATH"
                raise UserError(f"--decay_steps={decay} {problem}; for a new run, use --schedule=wsd and --cooldown_fraction")
            peak = settings.resolve_schedule(before.optim, before.train.steps)
            if (rate := learning_rate(done, before.train.steps, peak)) < peak.lr:
                problem = f"at {self.checkpoint}, the learning rate is {rate:.3g}, already below its peak of {peak.lr:.3g}"
                raise UserError(f"--decay_steps={decay}: {problem}; use a checkpoint from the stable part of the schedule")
            steps = done + decay
            late = [step for step, _ in read_phases(config.data.phase) if step >= steps]
            refuse(f"--phase={step}:... begins after the last step, {steps}" for step in late)
        return settings.replace(config, schedule="wsd", steps=steps)


def origin(given: str, recorded: str) -> str:
    """Return where a checkpoint's first weights came from: the `recorded` --init_from, unless the `given` one differs."""
    path = Path(given).absolute()
    parent = path.parent if path.name in LINKS else path
    return recorded if given == "scratch" or Path(recorded).absolute().is_relative_to(parent) else given


def find_start(run: Path, resume: str, init_from: str, dataset, world: World, mirror) -> Start:
    """Return where a run starts. The master decides for all ranks. Raises UserError.

    dataset: the run's `data.Mixture`. mirror: its `extras.mirror.Mirror`, or None.
    """
    if mirror:
        restore(run / "checkpoints", world, mirror)
    start = while_others_wait(world, lambda: search(run, resume, init_from, dataset))
    if start.pretrained and world.size > world.local_size:  # each node downloads a model from the Hub
        while_others_wait(world, lambda: find_model(init_from), mine=world.rank % world.local_size == 0)
    return start


def restore(checkpoints: Path, world: World, mirror) -> None:
    """Download the newest checkpoint from the `mirror` to every node that lacks it. All ranks must call this."""
    several_nodes = world.size > world.local_size

    def find_newest() -> tuple[str, bytes]:
        here, _ = newest(checkpoints)
        mirror.identity = load_state(here).identity if here else None
        name = mirror.fetch(step_of(here) if here else -1) or (here.name if here else "")
        if name and several_nodes:  # other nodes may need it
            mirror.retried(lambda: mirror.copy([checkpoints / name], 0, []))
        return name, (checkpoints / name / MANIFEST).read_bytes() if name else b""

    def fetch() -> None:
        own = checkpoints / name  # a damaged or different one may have this name if the nodes share no disk
        if find_damage(own) or (own / MANIFEST).read_bytes() != manifest:
            mirror.fetch(-1, name)

    name, manifest = while_others_wait(world, find_newest)
    if name and several_nodes:
        while_others_wait(world, fetch, mine=world.rank > 0 and world.rank % world.local_size == 0)


def search(run: Path, resume: str, init_from: str, dataset) -> Start:
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
        kept = " with the run's own settings, except for your flags" * (run / "config.toml").exists()
        notes = [f"--resume={resume} is ignored: this run already has checkpoints"] if resume != "auto" else []
        notes += [f"warning: {line}" for line in damaged]
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


def check_vocabulary(directory: Path, dataset) -> list[str]:
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
    state, own, done = start.state, start.continues, start.state.step
    now, before, was = cli.flat_values(config), state.settings, state.config
    fixed = FIXED if own else OF_WEIGHTS
    changed = [name for name in now if name in before and now[name] != before[name]]
    refused = [f"--{name}={now[name]}, but the checkpoint used {before[name]}" for name in changed if name in fixed]
    saw, sees = (mixtures_seen(identity, done) for identity in (state.dataset or dataset, dataset))
    other_tokens = saw[0] != sees[0]
    if own and other_tokens:
        refused.append(f"--tokens={now['tokens']} must hold the tokens that {was.data.tokens} held, in the same shares")
    elif own and saw != sees:
        first = min(map(step_of_phase, set(saw[1:]) ^ set(sees[1:])))
        changes = f"--phase={now['phase']} changes the mixture of step {first + 1}, but {done} steps are done"
        refused.append(f"{changes}; a new phase can begin after step {done} at the earliest")
    skips_otherwise = seen_by(done, was.skipped_batches) != seen_by(done, config.skipped_batches)
    skip = f"--skip_steps={config.data.skip_steps} changes the data of one of the {done} finished steps"
    if own and skips_otherwise:
        refused.append(f"{skip}; to leave that batch out, start a new run from an earlier checkpoint: --name=... --resume=PATH")
    least = done if own else done + 1  # a complete run may be started again; a new run must train
    if config.train.steps < least:
        refused.append(f"--steps={config.train.steps}, but {done} steps are done; --steps must be at least {least}")
    if refused:
        other_run = f"leave {Path(config.run.out_dir, config.run.name)} as it is and start a new run with --name=..."
        way_out = other_run if own else "use only the weights with --init_from=PATH, or leave out --resume"
        refuse([*refused, f"restore these settings, or {way_out}"])
    if done >= config.train.steps:
        return []
    silent = SILENT | ({"shard_gradients"} if config.parallel.strategy == "exact" else set())  # does not affect its bits
    silent |= {"threads"} if config.numerics.numerics == "portable" else set()
    lines = [f"changed: {n} {str(before[n]) or 'none'} -> {str(now[n]) or 'none'}" for n in changed if n not in silent]
    if config.parallel.strategy == "exact" and before.get("shard_gradients") == "on":
        lines.append("note: --shard_gradients is for fsdp alone now; exact has the same bits without it, but needs more memory")
    if config.numerics.numerics == "native":  # bits depend on versions
        known = state.versions
        lines += [f"changed: {n} {known[n]} -> {new}" for n, new in versions.items() if n in known and known[n] != new]
    if skips_otherwise and not other_tokens:
        lines.append(f"warning: {skip}, and these weights have already seen it; start from an earlier checkpoint")
    if other_tokens:
        lines.append(f"changed: tokens {was.data.tokens} -> {now['tokens']}")
    if (state.dataset or dataset).split()[1:] != dataset.split()[1:]:
        lines.append(f"changed: phase {was.data.phase or 'none'} -> {now['phase'] or 'none'}")
    if done:
        schedule = settings.resolve_schedule(was.optim, was.train.steps)
        lines += warn_of_jump(done, (was.train.steps, schedule), (config.train.steps, config.optim))
    return lines


def seen_by(steps: int, skipped: tuple[int, ...]) -> list[int]:
    """Return the skipped batches (in ascending order) that affect the first `steps` steps."""
    return [batch for i, batch in enumerate(skipped) if batch < steps + i]
