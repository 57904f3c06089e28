"""How each trainer's user starts a run, continues it and finds its weights. audit.py examines them, and speed.py times them."""

import json
import pickle
import subprocess
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path

STEPS, SAVE = 32, 8  # updates per run, and per checkpoint
LENGTH, MICRO, BATCH = 32, 2, 12  # tokens of a sequence, sequences of a micro-batch and of an update


@dataclass(frozen=True)
class Job:
    """What is trained, and how. The defaults are those of the examination."""

    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32
    length: int = LENGTH
    micro: int = MICRO
    batch: int = BATCH
    steps: int = STEPS
    save: int = SAVE
    dropout: float = 0.1
    dtype: str = "float32"
    compile: bool = False

    @property
    def model(self) -> dict:
        """The shape of the model."""
        return dict(n_layer=self.n_layer, n_head=self.n_head, n_embd=self.n_embd)


class Trainer:
    """A trainer on this machine. Subclasses say what differs."""

    title = repository = proof = ""
    interpreter = False  # whether it needs its own interpreter, but no checkout
    packages, variables = (), {}
    on_cpu, on_cpu_note, always_on_cpu = "", "", False  # what bench/probe changes: on several ranks, or always
    pattern = ""  # glob of the checkpoints in a run; their names sort by age
    weights = "model"  # the key of the weights in a checkpoint's file
    step_ms = ""  # the regular expression of the milliseconds of an update in its output

    def __init__(self, path: Path, python: str, work: Path, text: str, job: Job | None = None):
        self.path, self.python, self.work, self.text, self.folder = path, python, work, text, path
        self.job = job or Job()
        self.variables = self.variables | ({} if self.job.compile else {"TORCHDYNAMO_DISABLE": "1"})
        self.prepare()

    def prepare(self) -> None:
        """Make the data."""

    def command(self, run: Path, ranks: int, resume: bool) -> list:
        """The command that trains the run in folder `run` to its end."""
        raise NotImplementedError

    def launcher(self, ranks: int, always: bool = False) -> list:
        """How a command starts: the trainer's python, plus torchrun for more than one rank."""
        return [self.python, *machine.launcher(max(ranks, 2))[1:-1], f"--nproc_per_node={ranks}"][
            : None if ranks > 1 or always else 1
        ]

    def checkpoints(self, run: Path) -> list[Path]:
        """The checkpoints of a run, newest last."""
        return sorted(path for path in run.glob(self.pattern) if not path.is_symlink())

    def weights_file(self, checkpoint: Path) -> Path:
        """The file with the weights of a checkpoint."""
        return checkpoint

    def final_weights(self, run: Path) -> dict:
        """The tensors of the newest checkpoint's model by name."""
        return tensors(self.weights_file(self.checkpoints(run)[-1]), self.weights)

    def gathered(self, folder: Path, code: str) -> dict:
        """The tensors of a checkpoint in torch's distributed format. `code` copies them from argv[1] to the file argv[2]."""
        command, target = [self.python, "-c", code, str(folder)], self.work / "gathered.pt"
        environment = machine.environment(PYTHONPATH=":".join(self.packages))
        subprocess.run([*command, str(target)], env=environment, check=True, capture_output=True)
        return tensors(target, "")

    def commit(self) -> str:
        """The commit of the checkout."""
        command = ["git", "-C", str(self.path), "log", "-1", "--format=%h"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    def versions(self) -> dict:
        """The versions of python and of the relevant packages in the trainer's interpreter."""
        names = ("torch", "transformers", "accelerate", "lightning", "litdata", "torchtitan", "ai2-olmo-core")
        code = f"import json, platform, importlib.metadata as m; have = {{d.name: d.version for d in m.distributions()}}; \
print(json.dumps({{'python': platform.python_version()}} | {{n: have[n] for n in {names!r} if n in have}}))"
        return json.loads(subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout)


def tensors(path: Path, key: str) -> dict:
    """The floating-point tensors of a checkpoint's file by name, below `key` if it holds more than a model."""
    import torch
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        return load_file(path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    return {name: value for name, value in (found[key] if key else found).items() if isinstance(value, torch.Tensor)}


class Lockstep(Trainer):
    title, strategy, pattern = "Lockstep", "ddp", "run/checkpoints/step-*"

    def prepare(self) -> None:
        machine.make_tokens(self.work / "tokens", 20_000, 256)

    def command(self, run: Path, ranks: int, resume: bool) -> list:
        flags = machine.TINY | dict(tokens=self.work / "tokens", out_dir=run, name="run", vocab_size=256)
        flags |= dict(strategy=self.strategy, steps=STEPS, save_every=SAVE, eval_every=SAVE, eval_tokens=640)
        flags |= dict(lr=1e-3, warmup_steps=2)
        flags |= dict(seq_len=LENGTH, micro_batch_size=MICRO, tokens_per_update=BATCH * LENGTH, dropout=0.1)
        return [*self.launcher(ranks), *machine.arguments(**flags)]

    def weights_file(self, checkpoint: Path) -> Path:
        return checkpoint / "model.safetensors"


class Exact(Lockstep):
    title, strategy = "Lockstep, `--strategy=exact`", "exact"


class NanoGPT(Trainer):
    title = repository = "karpathy/nanoGPT"
    proof, pattern, on_cpu, step_ms = "configurator.py", "ckpt.pt", "cuda", r"^iter \d+: .* time ([\d.]+)ms"
    on_cpu_note = "For these runs, bench/probe maps CUDA to the CPU and NCCL to gloo."

    def prepare(self) -> None:
        import numpy as np

        (self.work / "data").mkdir()
        for split in ("train", "val"):
            np.frombuffer(self.text.encode(), np.uint8).astype(np.uint16).tofile(self.work / "data" / f"{split}.bin")
        (self.work / "data" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))

    def command(self, run: Path, ranks: int, resume: bool) -> list:
        job = self.job
        flags = dict(dataset=self.work / "data", out_dir=run, device="cpu", dtype=job.dtype, compile=job.compile, **job.model)
        flags |= dict(block_size=job.length, batch_size=job.micro, dropout=job.dropout, log_interval=1, warmup_iters=2)
        flags |= dict(gradient_accumulation_steps=job.batch // job.micro, max_iters=job.steps, lr_decay_iters=job.steps)
        flags |= dict(eval_interval=job.save, eval_iters=2, init_from="resume" if resume else "scratch")
        return [*self.launcher(ranks), *machine.arguments(**flags)]


class HuggingFace(Trainer):
    title, pattern, weights = "transformers' Trainer", "checkpoint-*", ""
    interpreter, step_ms = True, r"^update \d+: ([\d.]+) ms"

    def prepare(self) -> None:
        (self.work / "text.txt").write_text(self.text)

    def command(self, run: Path, ranks: int, resume: bool) -> list:
        job = self.job
        flags = job.model | dict(train_file=self.work / "text.txt", block_size=job.length, dropout=job.dropout, output_dir=run)
        flags |= dict(use_cpu=True, report_to="none", max_steps=job.steps, save_steps=job.save, bf16=job.dtype == "bfloat16")
        flags |= dict(per_device_train_batch_size=job.micro, gradient_accumulation_steps=job.batch // job.micro // ranks)
        flags |= dict(torch_compile=job.compile) | ({"resume_from_checkpoint": True} if resume else {})
        return [*self.launcher(ranks), *machine.arguments(machine.ROOT / "bench" / "probe" / "clm.py", **flags)]

    def checkpoints(self, run: Path) -> list[Path]:
        return sorted(run.glob(self.pattern), key=lambda path: int(path.name.rpartition("-")[2]))

    def weights_file(self, checkpoint: Path) -> Path:
        return checkpoint / "model.safetensors"


class LitGPT(Trainer):
    title = repository = "Lightning-AI/litgpt"
    proof, pattern, step_ms = "litgpt/pretrain.py", "step-*", r"iter time: ([\d.]+) ms"
    on_cpu, on_cpu_note = (
        "fsdp",
        "For these runs, bench/probe replaces FSDP with DDP on the CPU, and litgpt still loads the data itself. litgpt "
        "counts the iterations of each rank, so a run that is half done on one rank looks complete on two.",
    )

    def prepare(self) -> None:
        from tokenizers import Tokenizer, models

        (self.work / "data").mkdir(), (self.work / "tokenizer").mkdir()
        for number in range(2):  # the first file is validated on
            (self.work / "data" / f"{number}.txt").write_text(self.text)
        characters = {character: number for number, character in enumerate(sorted({"<s>", *self.text}))}
        Tokenizer(models.BPE(characters, [], unk_token="<s>")).save(str(self.work / "tokenizer" / "tokenizer.json"))
        config = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="<s>")
        (self.work / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
        job = self.job
        model = dict(name="tiny", block_size=job.length, padded_vocab_size=256, **job.model)
        data = dict(class_path="TextFiles", init_args=dict(train_data_path=str(self.work / "data"), num_workers=1))
        config = dict(model_name="tiny", model_config=model, data=data, tokenizer_dir=str(self.work / "tokenizer"))
        config |= dict(precision="32-true" if job.dtype == "float32" else "bf16-mixed")
        train = dict(save_interval=job.save, log_interval=1, global_batch_size=job.batch, micro_batch_size=job.micro)
        config["train"] = train | dict(max_tokens=job.steps * job.batch * job.length, lr_warmup_steps=2, max_norm=1.0)
        config |= dict(eval=dict(interval=job.save, max_iters=2), logger_name="csv")
        (self.work / "config.yaml").write_text(json.dumps(config))

    def command(self, run: Path, ranks: int, resume: bool) -> list:
        flags = dict(config=self.work / "config.yaml", out_dir=run, devices=ranks, resume=str(resume).lower())
        return [self.python, "-m", "litgpt", *machine.arguments("pretrain", "tiny", **flags)]

    def weights_file(self, checkpoint: Path) -> Path:
        return checkpoint / "lit_model.pth"


class TorchTitan(Trainer):
    title = repository = "pytorch/torchtitan"
    proof, pattern = "torchtitan/train.py", "checkpoint/step-*"
    always_on_cpu = True
    on_cpu, on_cpu_note = (
        "accelerator",
        "For these runs, bench/probe makes the CPU its accelerator, and replaces its attention with one that has the "
        "same mask. Several ranks still do not work, because torchtitan needs more than gloo for them.",
    )

    def prepare(self) -> None:
        assets = self.work / "tests" / "assets"
        (assets / "c4_test").mkdir(parents=True)
        (assets / "tokenizer").symlink_to(self.path / "tests" / "assets" / "tokenizer")
        parts = [part for part in self.text.split("\n\n") if len(part) > 100]
        documents = [json.dumps({"text": part, "timestamp": "", "url": ""}) for part in parts]
        (assets / "c4_test" / "data.json").write_text("\n".join(documents))
        self.packages, self.folder = [str(self.path)], self.work

    def command(self, run: Path, ranks: int, resume: bool) -> list:
        flags = {"dump_folder": run, "training.steps": STEPS, "training.max_context_length": LENGTH, "validator.no-enable": ""}
        flags |= {"debug.seed": 1, "checkpoint.enable": "", "checkpoint.interval": SAVE}
        flags |= {"training.num_tokens_per_microbatch_per_dp_rank": MICRO * LENGTH}
        flags |= {"training.num_tokens_per_train_step": BATCH * LENGTH}
        given = [f"--{name}" + (f"={value}" if value != "" else "") for name, value in flags.items()]
        module = ["-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_debugmodel"]
        return [*self.launcher(ranks, always=True), *module, *given]

    def checkpoints(self, run: Path) -> list[Path]:
        return sorted(run.glob(self.pattern), key=lambda path: int(path.name.rpartition("-")[2]))

    def final_weights(self, run: Path) -> dict:
        code = """import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(*sys.argv[1:])"""
        return self.gathered(self.checkpoints(run)[-1], code)


class OLMoCore(Trainer):
    title = repository = "allenai/OLMo-core"
    proof, pattern = "src/examples/llm/train.py", "step*"
    on_cpu, on_cpu_note = "gloo", "For these runs, bench/probe maps NCCL to gloo."
    always_on_cpu = True

    def prepare(self) -> None:
        import numpy as np

        tokens = np.frombuffer(self.text.encode(), np.uint8).astype(np.uint16)
        for name in ("c4-train.00000-00099", "c4-validation.00000-00008"):
            tokens.tofile(self.work / f"{name}.npy")  # it has no header, whatever its name
        self.packages, self.variables = [str(self.path / "src")], self.variables | {"OLMO_DATA_ROOT": str(self.work)}

    def command(self, run: Path, ranks: int, resume: bool) -> list:
        flags = {"model-factory": "olmo2_1M", "sequence-length": LENGTH, "save-folder": run, "work-dir": self.work / "cache"}
        flags |= {"data_loader.global_batch_size": BATCH * LENGTH, "train_module.rank_microbatch_size": MICRO * LENGTH}
        flags |= {"train_module.compile_model": "false", "trainer.max_duration": f"{{value: {STEPS}, unit: steps}}"}
        saves = "trainer.callbacks.checkpointer"
        flags |= {f"{saves}.save_interval": SAVE, f"{saves}.ephemeral_save_interval": "null"}
        flags |= {f"trainer.callbacks.{name}_evaluator.enabled": "false" for name in ("lm", "downstream")}
        return [*self.launcher(ranks, always=True), *machine.arguments("src/examples/llm/train.py", "tiny", **flags)]

    def checkpoints(self, run: Path) -> list[Path]:
        return sorted(run.glob(self.pattern), key=lambda path: int(path.name.removeprefix("step")))

    def final_weights(self, run: Path) -> dict:
        code = """import shutil, sys, tempfile
from olmo_core.distributed.checkpoint import unshard_checkpoint
with tempfile.TemporaryDirectory() as folder:
    file, _ = unshard_checkpoint(sys.argv[1], folder, optim=False, save_overwrite=True)
    shutil.move(file, sys.argv[2])"""
        return self.gathered(self.checkpoints(run)[-1] / "model_and_optim", code)


TRAINERS = {"lockstep": Lockstep, "exact": Exact, "nanogpt": NanoGPT, "trainer": HuggingFace, "litgpt": LitGPT}
TRAINERS |= {"torchtitan": TorchTitan, "olmo_core": OLMoCore}
