"""Do two updates of config/llama_1.3b.toml fit into 24 GB on a CPU? `python bench/llama.py`

Trains the preset's model, every weight of it, in bfloat16 with activation checkpointing for two updates, with a short context
and one small micro-batch an update. Says the losses, the time and the most memory that was resident, beside the prediction of
footprint.py. One minute on two cores. It saves nothing: a checkpoint is first copied in memory, which would take 16 GB more.
"""

import itertools
import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from common import cli, errors
from common.errors import RunError
from measure import in_fresh_process

LIMIT = 24e9


@dataclass(frozen=True)
class LlamaConfig:
    preset: str = "config/llama_1.3b.toml"
    seq_len: int = 128
    tokens: str = "tokens/python"
    """Dataset; the embedded corpus is prepared if it is not there. The model keeps the preset's vocabulary, GPT-2's."""
    out: str = str(machine.RESULTS)
    """Directory for llama.json."""


def main(config: LlamaConfig) -> int:
    """Train, print, write. Returns 1 if it took more than the limit or the loss did not fall."""
    if (free := available()) < LIMIT - 2e9:
        print(f"skipped: {free / 1e9:.1f} GB of memory are available, and it takes about {LIMIT / 1e9 - 2:.0f}")
        return 0
    machine.prepare_tokens(config.tokens)
    with machine.workspace() as folder:
        result = in_fresh_process(two_updates, config, folder)
    print(f"{result['parameters']:,} parameters; losses {result['losses']}, gradient norms {result['norms']}")
    print(f"{result['start s']:.1f} s to start, then updates of {', '.join(f'{s:.1f} s' for s in result['update s'])}")
    print(f"resident at the peak {result['resident'] / 1e9:.2f} GB; predicted {result['predicted'] / 1e9:.2f} GB", end=" ")
    print(json.dumps({name: f"{size / 1e9:.2f}" for name, size in result["parts"].items() if size}))
    print(machine.write("llama", result, Path(config.out)))
    return int(result["resident"] > LIMIT or result["losses"][1] >= result["losses"][0])


def available() -> float:
    """Bytes of memory that new processes can take (Linux)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def two_updates(config: LlamaConfig, folder: Path) -> dict:
    """Train for two updates. Both see the same batch, so the second loss must be lower."""
    import data
    import train
    from hardware import footprint

    # Running out of address space ends this process with an error. Running out of memory might end another one.
    resource.setrlimit(resource.RLIMIT_DATA, (int(available()), resource.RLIM_INFINITY))
    flags = dict(
        tokens=config.tokens,
        vocab_size=50304,
        out_dir=folder,
        name="run",
        device="cpu",
        dtype="bfloat16",
        compile="off",
        activation_checkpointing="true",
        seq_len=config.seq_len,
        micro_batch_size=1,
        tokens_per_update=config.seq_len,
        warmup_steps=0,
        steps=2,
    )
    began = time.perf_counter()
    training = settings.load(machine.arguments(config.preset, **flags), "")
    world = train.join(training)
    run = train.prepare(training, world)
    schedule = itertools.product([0, 0], [0])  # the first update's tokens, twice
    prefetcher = data.Prefetcher(run.batches, schedule, world.device)
    train.warm_up(run)
    times, updates = [time.perf_counter() - began], []
    for _ in range(2):
        began = time.perf_counter()
        updates.append(train.update(run, prefetcher))
        times.append(time.perf_counter() - began)
    prefetcher.close()
    parts = footprint.of_rank(run.config, 1, "cpu")
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parameters = run.engine.module.parameter_count()
    run.log.close(0)
    if not all(updates):
        raise RunError(f"an update was left out: {updates}")
    return {
        "flags": {name: str(value) for name, value in flags.items() if name != "out_dir"},
        "parameters": parameters,
        "losses": [loss for loss, _ in updates],
        "norms": [norm for _, norm in updates],
        "start s": times[0],
        "update s": times[1:],
        "resident": resident,
        "predicted": sum(parts.values()),
        "parts": parts,
    }


if __name__ == "__main__":
    with errors.user_errors():
        raise SystemExit(main(cli.parse(LlamaConfig, sys.argv[1:], __doc__)))
