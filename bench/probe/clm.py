"""Pretrain with transformers' Trainer as run_clm.py does: blocks of one length, the Trainer's own flags and its resume."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class DataArguments:
    train_file: str
    block_size: int


if __name__ == "__main__":
    data, training = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    text = Path(data.train_file).read_bytes()
    blocks = torch.tensor(list(text)).split(data.block_size)[:-1]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=data.block_size, n_embd=32, n_layer=2, n_head=2))
    rows = [{"input_ids": block, "labels": block} for block in blocks]
    trainer = Trainer(model=model, args=training, train_dataset=rows, data_collator=default_data_collator)
    trainer.train(resume_from_checkpoint=bool(training.resume_from_checkpoint))  # true: the newest of output_dir
    trainer.save_model()
