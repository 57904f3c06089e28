"""Which checkpoint or model a command reads: of a run, a directory or the Hugging Face Hub."""

import contextlib
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from torch import nn

from lockstep import settings
from lockstep.checkpoints import huggingface
from lockstep.checkpoints.checkpoint import load_state
from lockstep.checkpoints.retention import MANIFEST, find_damage, hold, newest
from lockstep.common import cli
from lockstep.common.errors import UserError, refuse, say
from lockstep.settings import Config

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
