"""Pretrain with transformers' Trainer as run_clm.py does: blocks of one length, the Trainer's own flags and its resume."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class DataArguments:
    train_file: str
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float


class Timer(TrainerCallback):
    """Print the milliseconds of each update."""

    began = None

    def on_step_end(self, args, state, control, **_):
        ended = time.perf_counter()
        if self.began is not None:
            print(f"update {state.global_step}: {1000 * (ended - self.began):.2f} ms", flush=True)
        self.began = ended


if __name__ == "__main__":
    data, training = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    text = Path(data.train_file).read_bytes()
    blocks = torch.tensor(list(text)).split(data.block_size)[:-1]
    shape = {name: getattr(data, name) for name in ("n_layer", "n_head", "n_embd")}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), data.dropout)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=data.block_size, **shape, **dropout))
    rows = [{"input_ids": block, "labels": block} for block in blocks]
    trainer = Trainer(model=model, args=training, train_dataset=rows, data_collator=default_data_collator)
    trainer.add_callback(Timer)
    trainer.train(resume_from_checkpoint=bool(training.resume_from_checkpoint))  # true: the newest of output_dir
    trainer.save_model()
