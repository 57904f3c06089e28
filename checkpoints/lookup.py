"""Which checkpoint or model a command starts from, and which settings a run that goes on may change."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import settings
from checkpoints import huggingface
from checkpoints.checkpoint import Origin, TrainState, load_state, while_others_wait
from checkpoints.retention import MANIFEST, find_damage, newest, published
from common import cli, files
from common.errors import UserError, refuse
from data import Mixture
from model import GPT, on_meta
from parallel.world import World
from settings import Config, ModelConfig

# Settings that a run keeps for life: they decide what the weights mean and which tokens a step sees. Its weights, too, taken
# by a new run with the optimizer's state, keep the first group.
OF_WEIGHTS = [*cli.flat_fields(ModelConfig), "optimizer"]
FIXED = [*OF_WEIGHTS, "order", "attend", "seed", "tokens_per_update"]
SILENT = {"name", "out_dir", "resume", "tokens", "prepare_command"}  # what may change without a note


def find(name: str) -> tuple[Path, list[str]]:
    """The checkpoint at a path, or the newest intact one of the run there, and warnings. Raises UserError."""
    path = Path(name)
    if (path / MANIFEST).exists():
        if reason := find_damage(path):
            raise UserError(f"{path} is damaged: {reason}")
        return path, []
    found, damaged = newest(path / "checkpoints")
    if found is None:
        if (path / "metrics.jsonl").exists() and not damaged:
            raise UserError(f"{path} has no checkpoint yet; the first one comes at step --save_every, or when the run stops")
        refuse([f"{path} is neither a run with an intact checkpoint nor a checkpoint{cli.similar_runs(name)}", *damaged])
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
        """The directory that the weights come from, unless they are made from scratch."""
        return self.checkpoint or self.pretrained

    def settle(self, config: Config) -> Config:
        """`config` with what the start decides: the shape of the model, the checkpoint that it began from, and what stays."""
        if config.model.init_from != "scratch":
            config = dataclasses.replace(config, model=huggingface.shape_of(self.weights, config.model))
        if self.checkpoint is None:
            return config
        before = self.state.config
        began_from = before.run.resume if self.continues else str(self.checkpoint)
        if began_from not in ("auto", "off"):
            config = settings.replace(config, resume=began_from)
        if self.continues and self.state.step >= config.train.steps:  # a complete run keeps its checkpoints
            config = settings.replace(config, keep_last=before.checkpoint.keep_last, keep_best=before.checkpoint.keep_best)
        return config


def find_start(run: Path, resume: str, init_from: str, dataset: Mixture, world: World) -> Start:
    """Where a run begins. The master looks for it, and all ranks open the same. Raises UserError."""
    checkpoint, pretrained, notes = while_others_wait(world, lambda: search(run, resume, init_from, dataset))
    state = load_state(checkpoint) if checkpoint else TrainState()
    return Start(state, checkpoint, pretrained, checkpoint is not None and checkpoint.parent.parent == run, notes)


def search(run: Path, resume: str, init_from: str, dataset: Mixture) -> tuple[Path | None, Path | None, list[str]]:
    """The checkpoint that a run starts from, the model directory that gives its weights alone, and notes. Raises UserError."""
    if dataset.tokenizer and dataset.eot_token is not None:  # a save needs it, and the first one may be hours away
        huggingface.token_text(dataset.tokenizer, dataset.eot_token)
    start, pretrained, notes = None, None, []
    if published(run / "checkpoints"):
        if resume == "off":
            raise UserError(f"--resume=off: {run} has checkpoints; choose another --name, or delete the directory")
        start, damaged = newest(run / "checkpoints")
        if start is None:
            refuse([f"no checkpoint in {run} is intact; delete it to start over", *damaged])
        notes += [f"--resume={resume} is for a new run and is not read"] if resume != "auto" else []
        return start, None, [*notes, *damaged, f"continuing from {start}"]
    if resume not in ("auto", "off"):
        start, damaged = find(resume)
        notes += [*damaged, f"starting from {start}"]
    elif init_from != "scratch":
        pretrained, damaged = find_model(init_from)
        notes += [*damaged, f"starting with the weights of {pretrained}, whose shape overrides settings and flags"]
    if start or pretrained:
        notes += huggingface.check_tokenizer(start or pretrained, dataset.tokenizer)
    return start, pretrained, notes


def check_changes(start: Start, config: Config, dataset: str) -> list[str]:
    """A line for each setting that differs from the checkpoint's. Raises UserError for one that may not.

    dataset: its identity. A run keeps its model and its data; a new run from its checkpoint may change the data.
    """
    state, own, done, run = start.state, start.continues, start.state.step, Path(config.run.out_dir, config.run.name)
    now, before, was = cli.flat_values(config), settings.modernize(state.settings), state.config
    fixed = FIXED if own else OF_WEIGHTS
    changed = [name for name in now if name in before and now[name] != before[name]]
    refused = [f"--{name}={now[name]}, and the checkpoint has {before[name]}" for name in changed if name in fixed]
    other_tokens = state.dataset not in ("", dataset)
    if own and other_tokens:
        refused.append(f"--tokens={now['tokens']} is not the same tokens in the same shares as {was.data.tokens} was")
        if now["tokens"] == was.data.tokens and "," in was.data.tokens:  # shares were 1/2^24 once
            refused.append(f"weights are now rounded to 1/4,096; --name=NEW --resume={run} continues with the rounded ones")
    skips_otherwise = seen_by(done, was.skipped_batches) != seen_by(done, config.skipped_batches)
    skip = f"--skip_steps={config.data.skip_steps} changes what one of the {done} steps that are done saw"
    if own and skips_otherwise:
        refused.append(f"{skip}; an earlier checkpoint may begin a run without it: --name=... --resume=PATH")
    least = done if own else done + 1  # a complete run may be started again, a new one trains
    if config.train.steps < least:
        refused.append(f"--steps={config.train.steps}, and {done} steps are done; --steps must be at least {least}")
    if refused:
        other_run = f"or start another run than {run} with --name=..."
        way_out = other_run if own else "take only the weights with --init_from=PATH, or leave --resume out"
        refuse([*refused, f"restore these settings, {way_out}"])
    if done >= config.train.steps:
        return []
    silent = SILENT | ({"threads"} if config.parallel.strategy == "exact" else set())  # on which exact's bits do not depend
    lines = [f"changed: {n} {str(before[n]) or 'none'} -> {str(now[n]) or 'none'}" for n in changed if n not in silent]
    if skips_otherwise and not other_tokens:
        lines.append(f"warning: {skip}, which is in these weights; an earlier checkpoint begins without it")
    if other_tokens:
        lines.append(f"changed: tokens {was.data.tokens} -> {now['tokens']}")
    return lines


def seen_by(steps: int, skipped: tuple[int, ...]) -> list[int]:
    """The skipped batches among those that the first `steps` steps have passed."""
    passed = []
    for batch in skipped:
        if batch < steps + len(passed):
            passed.append(batch)
    return passed


def find_origin(run: Path, origin: Origin) -> Path:
    """The directory whose weights a run began with, also if both were moved. Raises UserError where it is not there."""
    directory = Path(origin["directory"])
    beside = run.absolute().parent.joinpath(*directory.parts[-3:])  # NAME/checkpoints/step-...
    for path in (directory, Path(origin["source"]), beside):
        intact = not (path / MANIFEST).exists() or find_damage(path) is None
        if intact and all((path / n).is_file() and files.sha256(path / n) == sha for n, sha in origin["sha256"].items()):
            return path
    problem = f"{run} began with weights that are gone or have changed since"
    later = "a later step, which a checkpoint of this run's own comes before"
    raise UserError(f"{problem}; put them back at {directory} or at {beside}, or take {later}")


def find_model(name: str, patterns: tuple[str, ...] = ("*.safetensors", "*.json")) -> tuple[Path, list[str]]:
    """The model directory of a run, a checkpoint, a Hugging Face directory or a hub id, and warnings. Raises UserError.

    patterns: which files to download from the hub.
    """
    path = Path(name)
    if (path / MANIFEST).exists() or (path / "checkpoints").is_dir() or (path / "metrics.jsonl").exists():
        return find(name)
    if (path / "config.json").exists():
        return path, []
    if path.exists() or name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1:
        nanogpt = "; tools/convert_nanogpt.py makes one of nanoGPT's checkpoint" if path.suffix in (".pt", ".pth") else ""
        problem = f"is neither a run nor a model directory, which has a config.json{nanogpt}"
        raise UserError(f"{name} {problem}{cli.similar_runs(name)}")
    try:
        from huggingface_hub import snapshot_download  # reads HF_ENDPOINT, which may be no address

        return Path(snapshot_download(name, allow_patterns=list(patterns))), []
    except Exception as error:  # a malformed name, no such model, no network, no disk: the way out is the same
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = f"is not a local directory and could not be fetched from the Hub: {reason}"
        raise UserError(f"{name} {problem}{cli.similar_runs(name)}") from None


def load_model(name: str) -> tuple[Path, GPT]:
    """Open a model for inference: its directory, and the model on the CPU, without dropout. See `find_model`."""
    directory, warnings = find_model(name)
    for warning in warnings:
        print(f"warning: {warning}", flush=True)
    config, weights = huggingface.read_model(directory)
    model = on_meta(config).eval()
    model.load_state_dict(weights, assign=True)
    return directory, model
