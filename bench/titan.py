"""Does torchtitan read a checkpoint of ours, and compute the same logits? `python bench/titan.py runs/NAME`

Builds torchtitan's Llama 3 in the shape that the checkpoint's config.json states, and fills it by torchtitan's own reader and
adapter for Hugging Face directories. `checkpoint.initial_load_in_hf` does the same in torchtitan, whose tensor, pipeline and
context parallelism then take over. The checkpoint is one of `--architecture=llama --tie_embeddings=false`.

Tried with torchtitan 0.3.0 on a CPU: pip install torchtitan triton
"""

import json
import os
import sys
from pathlib import Path

import machine  # noqa: F401  puts the project's folder on the path

# isort: split
from checkpoints import huggingface, lookup
from common import errors
from common.errors import UserError
from model import GPT


def main(run: str) -> int:
    """Load, compare, print. Returns 1 if a logit differs by more than float32's rounding explains."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchtitan's attention would be compiled
    try:
        import torchtitan.models.llama3  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error}; pip install torchtitan triton")
        return 0
    import torch

    directory, _ = lookup.find_model(run)
    facts = json.loads((directory / "config.json").read_text())
    if facts["architectures"] != ["LlamaForCausalLM"] or facts["tie_word_embeddings"]:
        raise UserError(f"{directory} holds no Llama with an output layer of its own")
    config, weights = huggingface.read_model(directory, 64)
    ours = GPT(config)
    ours.load_state_dict(weights)
    theirs = load(directory, facts)
    tokens = torch.randint(config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(64).expand(2, 64)
    with torch.no_grad():
        expected, found = ours(tokens), theirs(tokens, positions, theirs.get_attention_masks(positions))
    difference, largest = (expected - found).abs().max().item(), expected.abs().max().item()
    print(f"{directory}: all {len(weights)} tensors loaded; logits differ by at most {difference:.1e} of {largest:.3g}")
    return int(difference > 1e-4)


def load(directory: Path, facts: dict):
    """torchtitan's Llama 3 with the weights in `directory`."""
    import torch.distributed.checkpoint as dcp
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm

    vocabulary, width, heads = (facts[key] for key in ("vocab_size", "hidden_size", "num_attention_heads"))
    eps = facts["rms_norm_eps"]
    theta = facts["rope_theta"] if "rope_theta" in facts else facts["rope_parameters"]["rope_theta"]
    layers = llama3._build_llama3_layers(
        n_layers=facts["num_hidden_layers"],
        dim=width,
        n_heads=heads,
        n_kv_heads=facts["num_key_value_heads"],
        hidden_dim=facts["intermediate_size"],
        rope=ComplexRoPE.Config(dim=width // heads, max_seq_len=facts["max_position_embeddings"], theta=theta),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = eps
    embedding, output = llama3._EMBEDDING_INIT, llama3._output_linear_init(width)
    config = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=embedding),
        norm=RMSNorm.Config(normalized_shape=width, eps=eps, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=output),
        layers=layers,
    )
    model = config.build()
    model.init_states(buffer_device=None)
    adapter = llama3.Llama3StateDictAdapter(config, str(directory))
    state = adapter.to_hf(model.state_dict())
    dcp.load(state, storage_reader=adapter.get_hf_storage_reader(str(directory)), no_dist=True)
    model.load_state_dict(adapter.from_hf(state), strict=True)
    return model


if __name__ == "__main__":
    with errors.user_errors():
        if len(sys.argv) != 2:
            raise UserError("name the run: python bench/titan.py runs/NAME")
        raise SystemExit(main(sys.argv[1]))
