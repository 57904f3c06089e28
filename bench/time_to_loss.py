"""How fast does training reach a loss, compared with nanoGPT? `python bench/time_to_loss.py --nanogpt=PATH --text=input.txt`

Times nanoGPT's README run for a CPU and our config/shakespeare_char.toml in turns, on the same text, from the command to the
end. Then compares their losses in nats a character on the whole validation split, which is the last tenth of the text.
"""

import math
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
from common import cli, errors
from measure import copy_of_nanogpt, in_fresh_process, in_turns, nanogpt_train, ratio, spread, timed

README_RUN = shlex.split(
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)


@dataclass(frozen=True)
class TimeToLossConfig:
    nanogpt: str
    """A checkout of nanoGPT."""
    text: str
    """tiny Shakespeare's input.txt, or another ASCII text."""
    pairs: int = 3
    processor: machine.Processor = "native"
    """Hold the processor to the instructions of a lesser one."""
    target_loss: float = 1.8857
    """The loss that our run must reach, in nats a character."""


def main(config: TimeToLossConfig) -> None:
    """Run both in turns. Print and write the times, losses, sizes and the ratio of the times."""
    machine.act_as(config.processor)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        peer = copy_of_nanogpt(config.nanogpt, folder / "nanogpt", Path(config.text).read_text())
        tokens, runs = folder / "tokens", iter(range(10**6))
        timed([machine.ROOT / "prepare_data.py", config.text, f"--out={tokens}", "--tokenizer=bytes"], machine.ROOT)

        def ours() -> float:
            flags = [f"--tokens={tokens}", f"--out_dir={folder}", f"--name=run{next(runs)}"]
            return timed([machine.ROOT / "train.py", machine.ROOT / "config/shakespeare_char.toml", *flags], machine.ROOT)

        def nanogpt() -> float:
            return timed(["train.py", *README_RUN], peer)

        seconds = in_turns(config.pairs, {"ours, s": ours, "nanoGPT, s": nanogpt})
        results = {"ours": our_result(folder / "run0"), "nanoGPT": in_fresh_process(nanogpt_result, peer)}
    faster = ratio(seconds["nanoGPT, s"], seconds["ours, s"])
    reached = results["ours"]["loss"] <= config.target_loss
    result = {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "at_the_end": results,
        "target_loss": config.target_loss,
        "reached": reached,
        "times_faster": faster,
    }
    print(machine.write("time_to_loss", result))
    for name, row in results.items():
        print(f"{name}: loss {row['loss']:.4f} a character, {row['parameters']:,} parameters")
    print(f"target {config.target_loss} {'reached' if reached else 'MISSED'}, {faster:.2f} times faster than nanoGPT")


def our_result(run: Path) -> dict:
    """The last validation loss of our run and its number of weights. A character is a byte here."""
    from safetensors import safe_open

    records = machine.metrics(run)
    with safe_open(run / "checkpoints/latest/model.safetensors", "pt") as weights:
        parameters = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return {"loss": records[-1]["val_bpb"] * math.log(2), "parameters": parameters}


def nanogpt_result(checkout: Path) -> dict:
    """The loss of nanoGPT's checkpoint over all windows of 64 characters of val.bin. nanoGPT itself loads it."""
    import numpy as np
    import torch

    nanogpt = nanogpt_train(checkout, *README_RUN, "--init_from=resume", "--eval_only=True", "--eval_iters=1")
    model, val = nanogpt["raw_model"].eval(), np.fromfile("data/shakespeare_char/val.bin", dtype=np.uint16)
    starts = np.arange(0, len(val) - 64, 64)
    windows = torch.from_numpy(val[starts[:, None] + np.arange(65)].astype(np.int64))
    with torch.no_grad():
        total = sum(model(part[:, :-1], part[:, 1:].contiguous())[1].item() * len(part) for part in windows.split(64))
    return {"loss": total / len(windows), "parameters": sum(p.numel() for p in model.parameters())}


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(TimeToLossConfig, sys.argv[1:], __doc__))
