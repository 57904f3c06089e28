"""Which flags continue a trained model without hurting it? python bench/pretrained.py --text=wikitext2-valid.txt

Trains a small Llama and a small GPT-2 on the embedded corpus, and lets transformers save them. Continues each on another text
for 200 steps: with the flags of the default preset, at lower rates, and by a plain loop over transformers' model and torch's
AdamW, on the same batches at the same rates. Writes pretrained.json: the validation loss on the new text after 0, 20 and 200
steps, and on the old text before and after. Takes up to twenty minutes on two busy cores.
"""

from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import torch
from torch.nn.functional import cross_entropy

import data
import evaluate
from lockstep import settings
from lockstep.dataset.mixture import Mixture, open_mixture
from lockstep.numerics import optim
from lockstep.parallel.world import World
from lockstep.settings import DataConfig

LOOKS = (20, 200)  # evaluations, in steps; the last one ends the run
MODEL = dict(n_layer=4, n_head=4, n_embd=128, seq_len=128, micro_batch_size=8, device="cpu", threads=1, compile="off")
LEARN = MODEL | dict(steps=160, tokens_per_update=4096, eval_every=0, save_every=0)
GO_ON = MODEL | dict(steps=LOOKS[-1], tokens_per_update=1024, eval_every=LOOKS[0], eval_tokens=16384, save_every=0)
WAYS = {"": {}, "--lr=7e-4": dict(lr=7e-4)}  # besides GO_ON; the preset's optimizer is Muon, at 7e-3
WAYS |= {f"--optimizer=adamw --lr={lr}": dict(optimizer="adamw", lr=lr) for lr in ("1e-3", "3e-4", "1e-4")}
PLAIN = "--optimizer=adamw --lr=1e-4"  # the way that transformers and torch repeat


@dataclass(frozen=True)
class PretrainedConfig(machine.Options):
    text: str = "wikitext2-valid.txt"
    """The new text."""


def main(config: PretrainedConfig) -> None:
    """The command."""
    from transformers import AutoModelForCausalLM

    machine.prepare_tokens(config.tokens)
    tokenizer, load, rows = Path(machine.ROOT, config.tokens, "tokenizer.json"), AutoModelForCausalLM.from_pretrained, []
    with machine.workspace() as folder:
        machine.prepare_tokens(folder / "new", Path(config.text).resolve(), tokenizer=tokenizer)
        old, new = (open_mixture(DataConfig(str(path))) for path in (tokenizer.parent, folder / "new"))
        for architecture in ("llama", "gpt2"):
            flags, start = dict(out_dir=folder, architecture=architecture), folder / f"{architecture}-start"
            machine.run(**LEARN, **flags, tokens=config.tokens, name=architecture)
            learned = load(folder / architecture / "checkpoints" / "latest")
            learned.save_pretrained(start)
            (start / "tokenizer.json").write_bytes(tokenizer.read_bytes())
            found = {}
            for way, more in WAYS.items():
                run = folder / f"{architecture} {way}"
                machine.run(**GO_ON | flags | more, tokens=folder / "new", init_from=start, name=run.name)
                losses = {record["step"]: record["val_loss"] for record in machine.metrics(run) if "val_loss" in record}
                found[way] = [*map(losses.get, LOOKS), loss_on(old, load(run / "checkpoints" / "latest"))]
                if way == PLAIN:
                    found["transformers and torch, 1e-4"] = go_on_plainly(load(start), run, new, old)
            head = ["model", "flags", "new text, after 0", *LOOKS, "old text, before", "after"]
            before = loss_on(new, learned), loss_on(old, learned)
            rows += [[architecture, way, before[0], *after[:2], before[1], after[2]] for way, after in found.items()]
            print(machine.table(head, rows), flush=True)
    print(machine.write("pretrained", {"learn": LEARN, "continue": GO_ON, "columns": head, "rows": rows}, config.out))


def loss_on(dataset: Mixture, model) -> float:
    """The validation loss of one of transformers' models, on the windows that train.py chooses."""

    def loss(inputs, targets):
        return cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())

    size, world = (MODEL["seq_len"], MODEL["micro_batch_size"], GO_ON["eval_tokens"]), World(0, 1, 1, torch.device("cpu"))
    return evaluate.losses_on(dataset, loss, *size, world, torch.no_grad)[0]


def go_on_plainly(model, run: Path, new: Mixture, old: Mixture) -> list[float]:
    """Continue by transformers and torch alone, with the settings of `run`. Returns the losses."""
    config = settings.read_preset(run / "config.toml")
    batches, own, losses = data.make_batches(config, new), config.optim, []
    optimizer = torch.optim.AdamW(model.parameters(), betas=(own.beta1, own.beta2), weight_decay=own.weight_decay)
    for step in range(1, config.train.steps + 1):
        tokens = torch.from_numpy(batches.batch(step - 1, 0))  # an update has one micro-batch
        logits = model(input_ids=tokens[:, :-1]).logits
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), own.grad_clip)
        optimizer.param_groups[0]["lr"] = optim.learning_rate(step - 1, config.train.steps, own)
        optimizer.step()
        optimizer.zero_grad()
        if step in LOOKS:
            losses.append(loss_on(new, model))
    return [*losses, loss_on(old, model)]


if __name__ == "__main__":
    machine.command_line(__doc__, PretrainedConfig, main)
