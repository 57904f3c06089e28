"""A tiny dataset, and train.py as users start it: real processes, real ranks, real torchrun."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

# No variable of the shell that the tests start in may change their outcome, whatever program reads it. What remains finds
# programs, libraries, compilers, GPUs and folders, or is pytest's own.
KEPT = r"PATH|HOME|USER|TMPDIR|TEMP|TMP|PYENV_\w+|CONDA_\w+|NIX_\w+|PYTEST_\w+|LD_\w+|DYLD_\w+"
KEPT += r"|CC|CXX|\w*CPATH|\w*INCLUDE_PATH|LIBRARY_PATH|SDKROOT|CUDA_HOME|CUDA_PATH|CUDA_VISIBLE_DEVICES|LLAMA_CPP"
for variable in [name for name in os.environ if not re.fullmatch(KEPT, name)]:
    del os.environ[variable]
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # one test a core, and no thread before a fork
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin while they wait would take the cores of other tests
os.environ["COLUMNS"] = "80"  # of --help
os.environ["LC_ALL"] = "C.UTF-8"
if sys.warnoptions:  # from PYTHONWARNINGS; the processes that tests start would inherit them
    sys.warnoptions.clear()
    warnings.resetwarnings()

import hypothesis
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

import machine
import warm
from forks import free_port
from lockstep.checkpoints import retention
from lockstep.common.files import publish_directory
from lockstep.dataset.tokens import write_shard
from lockstep.hardware.host import cores
from machine import ROOT  # noqa: F401  for tests
from model import initial_weights

PATIENCE = 300  # seconds for what takes a few on an idle machine; a test that reaches them hangs
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and so would what tests start
hypothesis.settings.load_profile("ci")  # the same examples every time, without a deadline
# 20 updates of 6 micro-batches of 4 x 16 tokens. One thread: as many tests as cores run side by side.
TINY = machine.TINY | dict(
    micro_batch_size=4,
    steps=20,
    tokens_per_update=384,
    lr=1e-2,
    warmup_steps=2,
    eval_every=5,
    eval_tokens=640,
    save_every=5,
)

# train.py with a change to its modules before it runs.
CHANGED = """
import os, sys
from lockstep.hardware import host
host.prepare_torch()
import torch, train; from lockstep import settings
from lockstep.common import errors
{change}
with errors.user_errors():
    sys.exit(train.main(settings.load(sys.argv[1:], "")))
"""

BEFORE_UPDATE = """
def update(run, *args, original=train.update):
    if run.state.step == {step}:
        {code}
    return original(run, *args)
train.update = update
"""

KILLED = """
import time
def update(run, *args, original=train.update):
    while run.state.step == {step} and run.world.is_master:
        if (run.checkpoints.directory / "latest").exists():
            os.killpg(0, 9)
        time.sleep(0.01)
    return original(run, *args)
train.update = update
"""


def damage(path):
    """Change the last byte of a file."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def pytest_xdist_auto_num_workers():
    """Two per core, because many tests wait: for a limit, another process, or the disk."""
    return 2 * cores()


def pytest_collection_modifyitems(items):
    """Begin with the files that take minutes: one that began last would keep a single core busy at the end."""
    longest = ["test_gpu_bench", "test_same_run", "test_nodes", "test_fake_gpu", "test_sharded", "test_bench", "test_train"]
    longest += ["test_mixture", "test_replay", "test_tasks", "test_lesson", "test_portable", "test_same", "test_sample"]
    longest += ["test_moves", "test_ladder", "test_documents", "test_mirror", "test_notebook", "test_readme", "test_slurm"]
    longest += ["test_status"]
    items.sort(key=lambda item: longest.index(item.path.stem) if item.path.stem in longest else len(longest))


def pytest_runtest_logreport(report):
    """Name a failure when it happens. The tracebacks come at the end."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})", flush=True)


def before_update(step, code):
    """A change: the statement `code` runs before the update that follows `step`."""
    return BEFORE_UPDATE.format(step=step, code=code)


def environment(**more):
    """This process's environment variables, of which most are gone (see KEPT), and `more`."""
    return machine.environment(WANDB_SILENT="true", WANDB__SERVICE_WAIT=str(PATIENCE), **more)


def execute(command, status=0, env=None, cwd=ROOT, timeout=PATIENCE, fork=True):
    """Run a command to its end, as from a shell. The exit status must be `status`.

    fork: `python SCRIPT` is forked from a process that has imported torch.
    """
    command, env = [*map(str, command)], environment(**(env or {}))
    if fork and command[0] == sys.executable and command[1].endswith(".py"):
        with tempfile.TemporaryDirectory() as streams:
            process = warm.Process(command[1:], 1, env, cwd, Path(streams))
            stdout, stderr = process.communicate(timeout)
        done = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    else:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == status, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def wait_for(condition, seconds=PATIENCE):
    """Poll until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


class Trainer:
    """Runs train.py on the tiny dataset with its runs in one folder."""

    def __init__(self, tokens: Path, runs: Path):
        self.tokens, self.runs, self.started, self.port = tokens, runs, 0, free_port()

    def arguments(self, name, script="train.py", **flags):
        """The script and its flags."""
        return machine.arguments(script, **dict(tokens=self.tokens, out_dir=self.runs, name=name) | TINY | flags)

    def command(self, name, ranks=1, launcher=(), **flags):
        """The command line of a shell: python or, for more than one rank, torchrun with the options `launcher`."""
        return [*machine.launcher(ranks, *launcher), *self.arguments(name, **flags)]

    def start(self, name, ranks=1, env=None, **flags):
        """Start in the background, in a new process group. It is forked from a process that has imported torch."""
        self.started += 1
        streams = self.runs.parent / f"streams{self.started}"
        streams.mkdir()
        return warm.Process(self.arguments(name, **flags), ranks, environment(**(env or {})), ROOT, streams)

    def __call__(self, name, ranks=1, status=0, env=None, **flags):
        """Start, and wait for the end. The exit status must be `status`."""
        process = self.start(name, ranks, env, **flags)
        stdout, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == status, f"exit {process.returncode}\n{stdout}\n{stderr}"
        return subprocess.CompletedProcess(process, status, stdout, stderr)

    def kill(self, name, step, ranks=1, **flags):
        """Train, and kill all processes before the update that follows `step`, once there is a checkpoint to continue from."""
        self.changed(KILLED.format(step=step), name, ranks, status=-signal.SIGKILL, **flags)

    def torchrun(self, name, ranks, launcher=(), **flags):
        """Start in the background under a real torchrun, in a new process group."""
        return self.background(self.command(name, ranks, launcher, **flags))

    def node(self, name, options, env=None, **flags):
        """Start one of several torchruns on this machine, with one rank. options: torchrun's."""
        place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *place, *options]
        return self.background([*torchrun, *self.arguments(name, **flags)], env)

    def background(self, command, env=None):
        """Start a command in a new process group, with all its output in one pipe."""
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(**(env or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def changed(self, change, name, ranks=1, **more):
        """Like a call, but the code `change`, a fault or a measurement, runs in train.py before training."""
        script = self.runs.parent / "changed.py"
        script.write_text(CHANGED.format(change=change))
        return self(name, ranks, script=script, **more)

    def log(self, name):
        """The text of a run's train.log, empty where there is none yet."""
        path = self.runs / name / "train.log"
        return path.read_text() if path.exists() else ""

    def latest(self, name):
        """The directory of a run's newest checkpoint."""
        return self.runs / name / "checkpoints" / "latest"

    def weights(self, name):
        """Model tensors of the newest checkpoint."""
        return load_file(self.latest(name) / "model.safetensors")

    def state(self, name):
        """The trainer_state.json of the newest checkpoint."""
        return json.loads((self.latest(name) / "trainer_state.json").read_text())

    def files(self, name):
        """The digests of what must be bit-identical."""
        return machine.digests(self.runs / name)

    def metrics(self, name, key="step"):
        """The records of metrics.jsonl that have `key`, without times and memory."""
        return [record for record in machine.unmeasured(machine.metrics(self.runs / name)) if key in record]

    def assert_same(self, name, other, of=None):
        """Two runs have the same bits, and the same losses, norms and evaluations. `other` is a run of the Trainer `of`."""
        of = of or self
        assert self.files(name) == of.files(other)
        assert self.metrics(name) == of.metrics(other)


@contextlib.contextmanager
def ending_what_is_left():
    """Kill what was started in the block and still runs at its end, with all its descendants. A failing test leaves it."""
    started = []

    def noting(begin):
        def note(self, *args, **more):
            begin(self, *args, **more)
            started.append(self)

        return note

    with pytest.MonkeyPatch.context() as patch:
        for kind in (subprocess.Popen, warm.Process):
            patch.setattr(kind, "__init__", noting(kind.__init__))
        try:
            yield
        finally:
            patch.undo()
            for process in started:
                if "_inductor" not in str(getattr(process, "args", "")):  # the compiler's workers serve later tests, too
                    machine.kill(process)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No test leaves a process behind, or torch with more threads."""
    threads = torch.get_num_threads()
    with ending_what_is_left():
        yield
    torch.set_num_threads(threads)


def fake_checkpoint(checkpoints, step):
    """Publish a checkpoint of a few bytes that is intact by its manifest."""
    with publish_directory(retention.step_directory(checkpoints, step)) as directory:
        for name in ("trainer_state.json", "model.safetensors", "optimizer.safetensors"):
            (directory / name).write_text(json.dumps({"step": step}))
        retention.write_manifest(directory)
    return retention.step_directory(checkpoints, step)


def reseal(checkpoint):
    """Rewrite the manifest of a changed checkpoint."""
    (checkpoint / retention.MANIFEST).unlink()
    retention.write_manifest(checkpoint)


def content(directory):
    """The bytes of each file below a directory, by its path there."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()}


def sentencepiece(path, text, kind="llama2"):
    """A tokenizer.json as transformers converts it from SentencePiece: of Llama 2, Gemma, or the later Mistrals.

    Or `trained`: as the tokenizers library saves one of Llama 2's kind, with the bytes among its special tokens.
    """
    learned = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    learned.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    special, alphabet = ["<unk>", "<s>", "</s>"], [f"<0x{b:02X}>" for b in range(256)]
    options = dict(vocab_size=500, special_tokens=[*special, *alphabet], initial_alphabet=["▁"], show_progress=False)
    learned.train_from_iterator(text.splitlines(), tokenizers.trainers.BpeTrainer(**options))
    definition = json.loads(learned.to_str())
    if kind != "trained":
        definition["added_tokens"] = [token for token in definition["added_tokens"] if token["content"] in special]
    definition["model"]["fuse_unk"] = True
    made = tokenizers.Tokenizer.from_str(json.dumps(definition | {"pre_tokenizer": None}))
    steps, parts = tokenizers.decoders, tokenizers.normalizers
    spaces = [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse()]
    made.decoder = steps.Sequence(spaces if kind == "gemma" else [*spaces, steps.Strip(" ", 1, 0)])
    if kind == "mistral":
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        before = [] if kind == "gemma" else [parts.Prepend("▁")]
        made.normalizer = parts.Sequence([*before, parts.Replace(" ", "▁")])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(path))


def foreign_tokens(folder, kind, tokens):
    """A dataset of another tool: 2,000 of the tokens to train on, and the rest to validate on."""
    folder.mkdir()
    for split, part in (("train", tokens[:2000]), ("val", tokens[2000:])):
        if kind == "llm.c":
            write_shard(folder / f"fineweb_{split}_000001.bin", part, 50257)
        elif kind == "nanoGPT":
            part.astype(np.uint16).tofile(folder / f"{split}.bin")
        elif kind == "datatrove":
            path = folder / split / "00000_unshuffled.ds"
            path.parent.mkdir()
            part.astype("<u2").tofile(path)
            Path(f"{path}.metadata").write_text(f"gpt2|2\n{len(part)}\n1 kT")
            np.array([500, len(part)], "<u8").tofile(f"{path}.index")
        else:
            np.save(folder / f"edufineweb_{split}_000001.npy", part)
    return folder


def randomized(model, scale):
    """`model` with weights far from their initial ones, so that every part of it shows in the logits."""
    model.load_state_dict(dict(initial_weights(model, seed=0)))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def largest_difference(a, b):
    """The largest absolute difference between two state dictionaries with the same names."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A dataset of bytes with something to learn: our own sources, prepared by prepare_data.py."""
    out = tmp_path_factory.mktemp("tokens") / "tiny"
    sources = [str(ROOT / name) for name in ("train.py", "data.py", "model.py", "lockstep/settings.py")]
    execute([sys.executable, "prepare_data.py", *sources, f"--out={out}", "--tokenizer=bytes", "--shard_tokens=20000"])
    assert len(list(out.glob("train_*.bin"))) > 1  # so that runs cross a shard boundary
    return out


@pytest.fixture
def train(tokens, tmp_path):
    """A Trainer with its own folder of runs."""
    return Trainer(tokens, tmp_path / "runs")


@pytest.fixture(scope="session")
def shared(tokens, tmp_path_factory):
    """A Trainer whose runs all tests share and only read. `plain` is one process, undisturbed."""
    trainer = Trainer(tokens, tmp_path_factory.mktemp("shared") / "runs")
    # As a user does: the curves are drawn, whatever a notebook has set as the backend.
    execute(trainer.command("plain"), fork=False, env={"MPLBACKEND": "nonsense"})
    return trainer


@pytest.fixture(scope="session")
def exported(shared, tmp_path_factory):
    """The export of the run `plain` in small shards, and what the command printed."""
    out = tmp_path_factory.mktemp("export") / "model"
    done = execute([sys.executable, "export.py", shared.runs / "plain", f"--out={out}", "--max_shard_size=20.0KB"])
    return out, done.stdout


@pytest.fixture
def rng():
    """numpy's generator with a fixed seed."""
    return np.random.default_rng(0)
