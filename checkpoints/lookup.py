"""Which checkpoint or model a command starts from, and which settings a run that goes on may change."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import settings
from checkpoints import huggingface
from checkpoints.checkpoint import Origin, TrainState, load_state
from checkpoints.retention import MANIFEST, fault, newest, published, strangers
from common import cli, files
from common.errors import UserError
from data import Mixture
from model import GPT
from parallel.world import World
from settings import Config, ModelConfig

# Settings that a run keeps for life: they decide what the weights mean and which tokens a step sees.
FIXED = [*cli.flat_fields(ModelConfig), "order", "attend", "seed", "tokens_per_update", "optimizer"]


def find(name: str) -> tuple[Path, list[str]]:
    """The checkpoint that a user means by the path of a checkpoint or of a run (its newest intact one), and warnings.

    Raises UserError where there is none.
    """
    path = Path(name)
    if (path / MANIFEST).exists():
        if reason := fault(path):
            raise UserError(f"{path} is damaged: {reason}")
        return path, []
    found, damaged = newest(path / "checkpoints")
    if found is None:
        if (path / "metrics.jsonl").exists() and not damaged:
            raise UserError(f"{path} has no checkpoint yet; the first one comes at step --save_every, or when the run stops")
        what = f"{path} is neither a run with an intact checkpoint nor a checkpoint{cli.similar_runs(name)}"
        raise UserError("\n       ".join([what, *damaged]))
    return found, damaged


@dataclass(frozen=True)
class Start:
    """Where a run begins: at a checkpoint, with the weights of a model, or from scratch."""

    state: TrainState
    checkpoint: Path | None = None  # weights, optimizer state and step
    pretrained: Path | None = None  # a model directory, for its weights alone
    continues: bool = False  # the checkpoint is one of this very run
    notes: list[str] = field(default_factory=list)  # what the user should know of the choice

    @property
    def weights(self) -> Path | None:
        """The directory that the weights come from, if they are not made from scratch."""
        return self.checkpoint or self.pretrained

    def shape(self, config: Config) -> Path | None:
        """The directory that gives the shape of the model, where the settings do not; also when a run continues."""
        return self.weights if config.model.init_from != "scratch" else None

    def settle(self, config: Config) -> Config:
        """`config` with what the start decides: the very checkpoint that the run began from, for config.toml.

        A complete run keeps its checkpoints, whatever the settings say now.
        """
        if self.checkpoint is None:
            return config
        before = self.state.config
        began_from = before.run.resume if self.continues else str(self.checkpoint)
        if began_from not in ("auto", "off"):
            config = settings.replace(config, resume=began_from)
        if self.continues and self.state.step >= config.train.steps:
            config = settings.replace(config, keep_last=before.checkpoint.keep_last, keep_best=before.checkpoint.keep_best)
        return config


def find_start(run: Path, config: Config, dataset: Mixture, world: World) -> Start:
    """Where a run begins. The master looks for it, and all ranks open the same. Raises UserError."""
    checkpoint, pretrained, notes = world.from_master(search(run, config, dataset) if world.is_master else None)
    continues = checkpoint is not None and checkpoint.parent.parent == run
    state = load_state(checkpoint) if checkpoint else TrainState()
    if continues:
        check_origin(state, config, dataset)
    return Start(state, checkpoint, pretrained, continues, notes)


def search(run: Path, config: Config, dataset: Mixture) -> tuple[Path | None, Path | None, list[str]]:
    """The checkpoint that a run starts from, or else the model directory that gives its weights, or neither: from scratch.

    Also returns what the user should know about the choice. Raises UserError.
    """
    if dataset.tokenizer:  # a save needs it, and the first one may be hours away
        huggingface.token_text(dataset.tokenizer, dataset.eot_token)
    dataset.document_token(config.data.attend)  # refuses tokens without documents
    checkpoints, resume, start, pretrained = run / "checkpoints", config.run.resume, None, None
    if os.path.lexists(checkpoints) and not checkpoints.is_dir():
        raise UserError(f"{checkpoints} is not a directory; move it elsewhere")
    existing, others = published(checkpoints), strangers(checkpoints)
    notes = [f"left alone in {checkpoints}: {files.shortened(others)}"] if others else []
    if resume == "off" and existing:
        raise UserError(f"--resume=off: {run} has checkpoints; choose another --name, or delete the directory")
    if existing:
        start, damaged = newest(checkpoints)
        if start is None:
            raise UserError("\n       ".join([f"no checkpoint in {run} is intact; delete it to start over", *damaged]))
        notes += [f"--resume={resume} is for a new run and is not read"] if resume != "auto" else []
        return start, None, [*notes, *damaged, f"continuing from {start}"]
    if resume not in ("auto", "off"):
        start, damaged = find(resume)
        notes += [*damaged, f"starting from {start}"]
    elif config.model.init_from != "scratch":
        pretrained, damaged = find_model(config.model.init_from)
        notes += [*damaged, f"starting with the weights of {pretrained}, whose shape overrides settings and flags"]
    if start or pretrained:
        notes += huggingface.check_tokenizer(start or pretrained, dataset.tokenizer)
    return start, pretrained, notes


def check_origin(state: TrainState, config: Config, dataset: Mixture) -> None:
    """Raise UserError if a run that continues has other tokens, or other first weights, than it began with."""
    refused, before = [], state.config.model.init_from
    if config.model.init_from != before:
        refused.append(f"--init_from={config.model.init_from}, and the run began with {before}")
    if state.dataset != dataset.identity:
        tokens = state.config.data.tokens
        refused.append(f"--tokens={config.data.tokens} is not the same tokens in the same shares as {tokens} was")
    if refused:
        raise UserError("\n       ".join([*refused, f"restore these settings, {another_run(config)}"]))


def another_run(config: Config) -> str:
    """How to start another run than the one that `config` means."""
    return f"or start another run than {Path(config.run.out_dir, config.run.name)} with --name=..."


def check_changes(start: Start, config: Config, dataset: Mixture) -> list[str]:
    """A line for each setting that differs from the checkpoint's. Raises UserError for one that may not.

    The model and the data of a run that continues are fixed. A new run from its checkpoint may change the data.
    """
    state, own = start.state, start.continues
    now, before = cli.flat_values(config), state.settings
    changed = [name for name in now if name in before and now[name] != before[name]]
    fixed = FIXED if own else [*cli.flat_fields(ModelConfig), "optimizer"]
    refused = [f"--{name}={now[name]}, and the checkpoint has {before[name]}" for name in changed if name in fixed]
    seen_otherwise = seen_by(state.step, state.config.skipped_batches) != seen_by(state.step, config.skipped_batches)
    skip = f"--skip_steps={config.data.skip_steps} changes what one of the {state.step} steps that are done saw"
    if own and seen_otherwise:
        refused.append(f"{skip}; an earlier checkpoint may begin a run without it: --name=... --resume=PATH")
    least = state.step if own else state.step + 1  # a complete run may be started again, a new one trains
    if config.train.steps < least:
        refused.append(f"--steps={config.train.steps}, and {state.step} steps are done; --steps must be at least {least}")
    if refused:
        way_out = "take only the weights with --init_from=PATH, or leave --resume out"
        raise UserError("\n       ".join([*refused, f"restore these settings, {another_run(config) if own else way_out}"]))
    if state.step >= config.train.steps:
        return []
    silent = {"name", "out_dir", "resume", "tokens", "prepare_command"}
    if config.parallel.strategy == "exact":  # whose bits do not depend on it
        silent.add("threads")
    lines = [
        f"changed: {name} {str(before[name]) or 'none'} -> {str(now[name]) or 'none'}" for name in changed if name not in silent
    ]
    if seen_otherwise and state.dataset == dataset.identity:
        lines.append(f"warning: {skip}, which is in these weights; an earlier checkpoint begins without it")
    if state.dataset not in ("", dataset.identity):
        lines.append(f"changed: tokens {state.config.data.tokens} -> {config.data.tokens}")
    return lines


def seen_by(steps: int, skipped: tuple[int, ...]) -> list[int]:
    """The skipped batches among those that the first `steps` steps have passed."""
    passed = []
    for batch in skipped:
        if batch < steps + len(passed):
            passed.append(batch)
    return passed


def find_origin(run: Path, origin: Origin) -> Path:
    """The directory whose weights a run began with; of a run that was moved, also beside it.

    Raises UserError where it is not there any more as it was.
    """
    places = [Path(origin["directory"]), Path(origin["source"])]
    places.append(run.absolute().parent.joinpath(*places[0].parts[-3:]))  # NAME/checkpoints/step-...
    for path in places:
        whole = not (path / MANIFEST).exists() or fault(path) is None
        if whole and all((path / n).is_file() and files.sha256(path / n) == sha for n, sha in origin["sha256"].items()):
            return path
    there = " or at ".join(map(str, dict.fromkeys([places[0], places[-1]])))
    raise UserError(
        f"{run} began with weights that are gone or have changed since; put them back at {there}, or take a later step, which "
        "a checkpoint of this run's own comes before"
    )


def find_model(name: str, *patterns) -> tuple[Path, list[str]]:
    """The model directory that a user means, and warnings: a run, a checkpoint, any Hugging Face directory or hub id.

    See `huggingface.find_model` for `patterns`. Raises UserError.
    """
    path = Path(name)
    if (path / MANIFEST).exists() or (path / "checkpoints").is_dir() or (path / "metrics.jsonl").exists():
        return find(name)
    return huggingface.find_model(name, *patterns), []


def load_model(name: str) -> tuple[Path, GPT]:
    """Open a model for inference: its directory, and the model on the CPU, without dropout. See `find_model`."""
    directory, warnings = find_model(name)
    for warning in warnings:
        print(f"warning: {warning}", flush=True)
    config, weights = huggingface.read_model(directory)
    model = GPT(config).eval()
    model.load_state_dict(weights)
    return directory, model
