"""How each trainer's user starts a tiny run, continues it and finds its weights. audit.py examines these trainers."""

import json
import pickle
import subprocess
from pathlib import Path

import machine  # puts the project's folder on the path

STEPS, SAVE = 32, 8  # updates per run, and per checkpoint
LENGTH, MICRO, BATCH = 32, 2, 12  # tokens of a sequence, sequences of a micro-batch and of an update


class Trainer:
    """A trainer on this machine. Subclasses say what differs."""

    title = repository = proof = ""
    interpreter = False  # whether it needs its own interpreter, but no checkout
    packages, variables = (), {}
    on_cpu, on_cpu_note, always_on_cpu = "", "", False  # what bench/probe changes: on several ranks, or always
    pattern = ""  # glob of the checkpoints in a run; their names sort by age
    weights = "model"  # the key of the weights in a checkpoint's file

    def __init__(self, path: Path, python: str, work: Path, text: str):
        self.path, self.python, self.work, self.text, self.folder = path, python, work, text, path
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
        flags = machine.TINY | dict(
            tokens=self.work / "tokens", out_dir=run, name="run", strategy=self.strategy, vocab_size=256
        )
        flags |= dict(steps=STEPS, save_every=SAVE, eval_every=SAVE, eval_tokens=640, lr=1e-3, warmup_steps=2)
        flags |= dict(seq_len=LENGTH, micro_batch_size=MICRO, tokens_per_update=BATCH * LENGTH, dropout=0.1)
        return [*self.launcher(ranks), *machine.arguments(**flags)]

    def weights_file(self, checkpoint: Path) -> Path:
        return checkpoint / "model.safetensors"


class Exact(Lockstep):
    title, strategy = "Lockstep, `--strategy=exact`", "exact"


class NanoGPT(Trainer):
    title = repository = "karpathy/nanoGPT"
    proof, pattern, on_cpu = "configurator.py", "ckpt.pt", "cuda"
    on_cpu_note = "For these runs, bench/probe maps CUDA and nccl to the CPU and gloo."

    def prepare(self) -> None:
        import numpy as np

        (self.work / "data").mkdir()
        for split in ("train", "val"):
            np.frombuffer(self.text.encode(), np.uint8).astype(np.uint16).tofile(self.work / "data" / f"{split}.bin")
        (self.work / "data" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))

    def command(self, run: Path, ranks: int, resume: bool) -> list:
        flags = dict(dataset=self.work / "data", out_dir=run, device="cpu", dtype="float32", compile=False)
        flags |= dict(n_layer=2, n_head=2, n_embd=32, block_size=LENGTH, batch_size=MICRO, dropout=0.1)
        flags |= dict(gradient_accumulation_steps=BATCH // MICRO, max_iters=STEPS, lr_decay_iters=STEPS, warmup_iters=2)
        flags |= dict(eval_interval=SAVE, eval_iters=2, init_from="resume" if resume else "scratch")
        return [*self.launcher(ranks), *machine.arguments(**flags)]


class HuggingFace(Trainer):
    title, pattern, weights = "transformers' Trainer", "checkpoint-*", ""
    interpreter = True

    def prepare(self) -> None:
        (self.work / "text.txt").write_text(self.text)

    def command(self, run: Path, ranks: int, resume: bool) -> list:
        flags = dict(train_file=self.work / "text.txt", block_size=LENGTH, output_dir=run, use_cpu=True, report_to="none")
        flags |= dict(max_steps=STEPS, save_steps=SAVE, per_device_train_batch_size=MICRO)
        flags |= dict(gradient_accumulation_steps=BATCH // MICRO // ranks) | (
            {"resume_from_checkpoint": True} if resume else {}
        )
        return [*self.launcher(ranks), *machine.arguments(machine.ROOT / "bench" / "probe" / "clm.py", **flags)]

    def checkpoints(self, run: Path) -> list[Path]:
        return sorted(run.glob(self.pattern), key=lambda path: int(path.name.rpartition("-")[2]))

    def weights_file(self, checkpoint: Path) -> Path:
        return checkpoint / "model.safetensors"


class LitGPT(Trainer):
    title = repository = "Lightning-AI/litgpt"
    proof, pattern, variables = "litgpt/pretrain.py", "step-*", {"TORCHDYNAMO_DISABLE": "1"}
    on_cpu, on_cpu_note = (
        "fsdp",
        "For these runs, bench/probe replaces FSDP with DDP on the CPU; the data loading is litgpt's own. litgpt counts the "
        "iterations of one rank, so a run half done on one rank looks complete on two.",
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
        model = dict(name="tiny", block_size=LENGTH, n_layer=2, n_head=2, n_embd=32, padded_vocab_size=256)
        data = dict(class_path="TextFiles", init_args=dict(train_data_path=str(self.work / "data"), num_workers=1))
        config = dict(
            model_name="tiny", model_config=model, data=data, precision="32-true", tokenizer_dir=str(self.work / "tokenizer")
        )
        config["train"] = dict(
            save_interval=SAVE, log_interval=1, global_batch_size=BATCH, micro_batch_size=MICRO, max_norm=1.0
        )
        config["train"] |= dict(max_tokens=STEPS * BATCH * LENGTH, lr_warmup_steps=2)
        config |= dict(eval=dict(interval=SAVE, max_iters=2), logger_name="csv")
        (self.work / "config.yaml").write_text(json.dumps(config))

    def command(self, run: Path, ranks: int, resume: bool) -> list:
        flags = dict(config=self.work / "config.yaml", out_dir=run, devices=ranks, resume=str(resume).lower())
        return [self.python, "-m", "litgpt", *machine.arguments("pretrain", "tiny", **flags)]

    def weights_file(self, checkpoint: Path) -> Path:
        return checkpoint / "lit_model.pth"


class TorchTitan(Trainer):
    title = repository = "pytorch/torchtitan"
    proof, pattern = "torchtitan/train.py", "checkpoint/step-*"
    variables, always_on_cpu = {"TORCHDYNAMO_DISABLE": "1"}, True
    on_cpu, on_cpu_note = (
        "accelerator",
        "For these runs, bench/probe makes the CPU its accelerator, with another attention of the same mask. "
        "Several ranks need more than gloo.",
    )

    def prepare(self) -> None:
        assets = self.work / "tests" / "assets"
        (assets / "c4_test").mkdir(parents=True)
        (assets / "tokenizer").symlink_to(self.path / "tests" / "assets" / "tokenizer")
        documents = [
            json.dumps({"text": part, "timestamp": "", "url": ""}) for part in self.text.split("\n\n") if len(part) > 100
        ]
        (assets / "c4_test" / "data.json").write_text("\n".join(documents))
        self.packages, self.folder = [str(self.path)], self.work

    def command(self, run: Path, ranks: int, resume: bool) -> list:
        flags = {
            "dump_folder": run,
            "training.steps": STEPS,
            "training.max_context_length": LENGTH,
            "validator.no-enable": "",
            "debug.seed": 1,
        }
        flags |= {
            "training.num_tokens_per_microbatch_per_dp_rank": MICRO * LENGTH,
            "checkpoint.enable": "",
            "checkpoint.interval": SAVE,
        }
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
    on_cpu, on_cpu_note = "gloo", "For these runs, bench/probe maps nccl to gloo."
    variables, always_on_cpu = {"TORCHDYNAMO_DISABLE": "1"}, True

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
        flags |= {
            "trainer.callbacks.checkpointer.save_interval": SAVE,
            "trainer.callbacks.checkpointer.ephemeral_save_interval": "null",
        }
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


class NanoChat(Trainer):
    title = repository = "karpathy/nanochat"
    proof, pattern, weights = "scripts/base_train.py", "model_*.pt", ""
    on_cpu, on_cpu_note = "cuda", "For these runs, bench/probe maps CUDA and nccl to the CPU and gloo."

    def prepare(self) -> None:
        """Make its tables of documents, and its tokenizer by its own script."""
        script = """import os, pyarrow, pyarrow.parquet
text = open("text.txt").read().split("\\n\\n")
os.mkdir("base_data_climbmix")
for number in range(2):
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), f"base_data_climbmix/{number}.parquet", row_group_size=50)"""
        (self.work / "text.txt").write_text(self.text)
        self.variables = {"NANOCHAT_BASE_DIR": str(self.work), "TORCHDYNAMO_DISABLE": "1"}
        tokenizer = ["-m", "scripts.tok_train", "--vocab-size=384", "--max-chars=100000"]
        quiet = dict(check=True, capture_output=True, env=machine.environment(**self.variables))
        subprocess.run([self.python, "-c", script], cwd=self.work, **quiet)
        subprocess.run([self.python, *tokenizer], cwd=self.path, **quiet)

    def command(self, run: Path, ranks: int, resume: bool) -> list:
        flags = {"depth": 2, "aspect-ratio": 16, "head-dim": 16, "max-seq-len": LENGTH, "window-pattern": "L", "model-tag": run}
        flags |= {"device-batch-size": MICRO, "total-batch-size": BATCH * LENGTH, "num-iterations": STEPS, "save-every": SAVE}
        flags |= {"eval-every": -1, "core-metric-every": -1, "sample-every": -1, "device-type": "cpu" if ranks == 1 else "cuda"}
        if resume:  # it continues from a step that its user names: the newest that has a model
            saved = self.checkpoints(run)
            flags["resume-from-step"] = int(saved[-1].stem.removeprefix("model_")) if saved else STEPS // 2
        return [*self.launcher(ranks), *machine.arguments("-m", "scripts.base_train", **flags)]


TRAINERS = {"lockstep": Lockstep, "exact": Exact, "nanogpt": NanoGPT, "trainer": HuggingFace, "litgpt": LitGPT}
TRAINERS |= {"torchtitan": TorchTitan, "olmo_core": OLMoCore, "nanochat": NanoChat}
