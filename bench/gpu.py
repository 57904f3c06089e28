"""Correctness and speed on one GPU: `python bench/gpu.py`.

A small model's losses in bfloat16 against float32, and --strategy=exact on one process and on two that share the GPU; then
tokens/s, MFU, memory and data wait of the GPU presets on made tokens, a few steps each, saving nothing. Writes
bench/results/gpu.json and gpu.md.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from measure import environment, in_fresh_process, run_until
from settings import RunError, UserError
from tokens_per_second import matmul_peak

SMALL = {"architecture": "qwen3", "n_layer": 4, "n_head": 4, "n_embd": 256, "seq_len": 256, "tokens_per_update": 16384}
# What --tiny makes of every model.
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "seq_len": 32, "vocab_size": 512, "tokens_per_update": 256, "compile": "off"}
COLUMNS = {
    "shape": "{}",
    "parameters": "{:,}",
    "tokens/s": "{:,.0f}",
    "step ms": "{:.1f}",
    "MFU of the datasheet": "{:.1%}",
    "MFU of the measured matmul": "{:.1%}",
    "peak memory GB": "{:.1f}",
    "data wait ms": "{:.3f}",
}


@dataclass(frozen=True)
class GpuConfig:
    shapes: str = "gpt2_124m,qwen3_124m,gpt2_355m,llama_1.3b"
    """Presets to measure."""
    steps: int = 20
    """Steps of each preset."""
    warmup_steps: int = 6
    """Steps of them that are not counted."""
    tokens_per_update: int = 131072
    """Tokens of a step; the presets' own would only repeat the same micro-batches."""
    small_steps: int = 60
    """Steps of the runs for correctness."""
    tiny: bool = False
    """Shrink every model and run on the CPU: tries out this script and measures nothing."""


def main(config: GpuConfig) -> int:
    """Check, measure, print and write; returns 1 if a check failed."""
    device = "cpu" if config.tiny else "cuda"
    gpu = "CPU" if config.tiny else in_fresh_process(gpu_name)
    if not gpu:
        raise UserError("no CUDA device: this benchmark needs one GPU and a torch built for it; --tiny=true tries it on a CPU")
    with machine.workspace() as folder:
        tokens = Path(folder) / "tokens"
        make_tokens(tokens, 20_000_000, 512 if config.tiny else 50257)
        small = SMALL | {"tokens": tokens, "device": device} | (TINY if config.tiny else {})
        checks = {"precision": check_precision(config, small), "exact": check_exact(small, Path(folder))}
        print(json.dumps(checks, indent=1), flush=True)
        peak = in_fresh_process(matmul_peak, "bfloat16", device)
        print(f"{gpu}: {peak / 1e12:.1f} TFLOP/s in the fastest bfloat16 matrix product", flush=True)
        rows = []
        for shape in config.shapes.split(","):
            rows.append(measure(config, shape, tokens, device, peak))
            print(table(rows).splitlines()[-1], flush=True)
    if not config.tiny:
        told = {"gpu": gpu, "matmul_flops_per_second": peak, "checks": checks, "shapes": rows}
        print(machine.write("gpu", told | {"config": dataclasses.asdict(config)}))
        machine.RESULTS.joinpath("gpu.md").write_text(markdown(gpu, peak, checks, rows))
    passed = all(check["passed"] for check in checks.values())
    print(table(rows) + f"\nchecks {'passed' if passed else 'FAILED'}")
    return 0 if passed else 1


def gpu_name() -> str:
    """The first GPU's name; empty where there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def make_tokens(directory: Path, count: int, vocab_size: int) -> None:
    """Shards in llm.c's naming of ids that fall off as 1 / rank, as words do: there is something to learn, but not much."""
    import numpy as np

    from data import write_shard

    directory.mkdir()
    ids = np.exp(np.random.default_rng(0).random(count) * np.log(vocab_size)).astype(np.uint16) - 1
    write_shard(directory / "made_train_000000.bin", ids, vocab_size)
    write_shard(directory / "made_val_000000.bin", ids[:100_000], vocab_size)


# ---------------------------------------------------------------------------------------------------------------------
# Correctness


def check_precision(config: GpuConfig, small: dict) -> dict:
    """Losses of the same run in float32 and bfloat16: at every step within 2 % of each other."""
    losses = {}
    for dtype in ("float32", "bfloat16"):
        flags = small | {"dtype": dtype, "steps": config.small_steps, "optimizer": "adamw", "lr": 1e-3}
        losses[dtype] = [line["loss"] for line in run_until(config.small_steps, "config/laptop.toml", **flags)[1]]
    difference = max(abs(a - b) / a for a, b in zip(losses["float32"], losses["bfloat16"], strict=True))
    learned = losses["float32"][-1] < losses["float32"][0] - 0.1
    ends = {dtype: [values[0], values[-1]] for dtype, values in losses.items()}
    return {"passed": learned and difference < 0.02, "largest_relative_difference": difference, "first_and_last_loss": ends}


def check_exact(small: dict, folder: Path) -> dict:
    """Whether --strategy=exact ends with the same weights on one process and on two."""
    digests = {}
    for ranks in (1, 2):
        name = f"exact{ranks}"
        micro = small["tokens_per_update"] // small["seq_len"] // 4
        flags = small | {"strategy": "exact", "micro_batch_size": micro, "steps": 10, "eval_tokens": 8192, "dtype": "bfloat16"}
        flags |= {"optimizer": "adamw", "lr": 1e-3, "threads": 1, "out_dir": folder, "name": name}
        variables = environment() | {"LOCKSTEP_SHARE_GPU": "1"}  # two ranks on one GPU, through gloo
        done = subprocess.run(
            machine.command(ranks, preset="config/laptop.toml", **flags),
            cwd=machine.ROOT,
            env=variables,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RunError(f"--strategy=exact on {ranks} process(es) ended with {done.returncode}:\n{done.stderr[-2000:]}")
        manifest = json.loads((folder / name / "checkpoints/latest/manifest.json").read_text())
        digests[str(ranks)] = manifest["model.safetensors"]["sha256"]
    return {"passed": digests["1"] == digests["2"], "sha256_of_the_weights_by_processes": digests}


# ---------------------------------------------------------------------------------------------------------------------
# Speed


def measure(config: GpuConfig, shape: str, tokens: Path, device: str, peak: float) -> dict:
    """A row of the table: a preset trained for a few steps by train.py."""
    flags = {"tokens": tokens, "device": device, "tokens_per_update": config.tokens_per_update} | (TINY if config.tiny else {})
    lines = run_until(config.steps, f"config/{shape}.toml", **flags)[1][config.warmup_steps :]
    parameters, flops_per_token = in_fresh_process(model_size, shape, TINY if config.tiny else {})
    speed = flags["tokens_per_update"] * 1000 / statistics.median(line["step_ms"] for line in lines)
    datasheet = statistics.median(line["mfu"] / line["tokens_per_second"] for line in lines) * speed
    values = [shape, parameters, speed, flags["tokens_per_update"] * 1000 / speed, datasheet, speed * flops_per_token / peak]
    values += [lines[-1]["memory_gb"], statistics.median(line["data_wait_ms"] for line in lines)]
    return dict(zip(COLUMNS, values, strict=True))


def model_size(shape: str, changes: dict) -> tuple[int, int]:
    """Parameters of a preset, and FLOPs of forward and backward for one token."""
    import torch

    from footprint import flops_per_token
    from model import GPT

    flags = [f"--{name}={value}" for name, value in changes.items()]
    config = settings.load([str(machine.ROOT / f"config/{shape}.toml"), *flags], "")
    model = settings.resolve_model(config.model, changes.get("vocab_size", 50257))
    with torch.device("meta"):
        return GPT(model).parameter_count(), flops_per_token(model)


def table(rows: list[dict]) -> str:
    """Markdown."""
    cells = [list(COLUMNS), ["---"] + ["---:"] * (len(COLUMNS) - 1)]
    cells += [[form.format(row[name]) for name, form in COLUMNS.items()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def markdown(gpu: str, peak: float, checks: dict, rows: list[dict]) -> str:
    """The page that stands beside the JSON."""
    lines = [f"# {gpu}", "", table(rows), "", f"The fastest bfloat16 matrix product: {peak / 1e12:.1f} TFLOP/s.", ""]
    precision, exact = checks["precision"], checks["exact"]
    lines.append(f"Losses in bfloat16 and float32 differ by at most {precision['largest_relative_difference']:.2%}.")
    lines.append(f"--strategy=exact on 1 and 2 processes: {'one sha256' if exact['passed'] else 'DIFFERENT WEIGHTS'}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with settings.user_errors():
        sys.exit(main(settings.parse(GpuConfig, sys.argv[1:], __doc__)))
