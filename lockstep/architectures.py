"""One record per architecture: what a model computes, and what Hugging Face calls it. Another architecture is another record.

`model.py` computes what a record says, `lockstep/hardware/footprint.py` counts it, and `lockstep/checkpoints/huggingface.py`
writes and reads its names. This module does not import torch, so that `--help` and `--plan` answer at once.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class HuggingFace:
    """One of transformers' model classes: facts about transformers, whatever our own models compute."""

    model_type: str
    model_class: str
    computes: tuple  # what this class computes, as `Architecture.structure`
    keys: dict[str, str]  # our settings, and their names in config.json
    defaults: dict[str, Any]  # of keys that config.json may omit (None: derived from other keys). All other keys are required.
    only: dict[str, Any]  # keys that config.json may omit or set to this value; any other value means different arithmetic
    activation: str  # the key of the activation function
    copies: dict[str, str]  # further keys that we write, and the setting that each repeats
    fixed: dict[str, Any]  # further keys that we write, and their values
    names: dict[str, str]  # our modules, and their names. Empty: tensors keep our names.
    logits: tuple[float, ...] = ()  # what it computes for the model of `huggingface.trial`
    note: str = ""  # what a user should know before training


@dataclass(frozen=True)
class Architecture:
    """What a model computes. Attention and an MLP, each after a norm, are added to the residual stream.

    A change here also changes the checkpoints: they claim to be of transformers' class only while that computes the same.
    Otherwise config.json has a `model_type` of our own, which transformers refuses, and the tensors have our names.
    """

    norm: Literal["layer", "rms"]  # LayerNorm with a bias, or RMSNorm
    positions: Literal["learned", "rotary"]
    biases: tuple[str, ...]  # the linear layers that have one, among q, k, v, o, gate, up and down
    gated: bool  # whether the MLP is down(activation(gate(x)) * up(x)), instead of down(activation(up(x)))
    qk_norm: bool  # whether an RMSNorm over each head's width follows q and k
    activation: (
        str  # a function in numerics/native.py, by the name that transformers has for it (gelu: the setting `gelu` says which)
    )
    hugging_face: HuggingFace | None = None  # transformers' class for this architecture

    @property
    def structure(self) -> tuple:
        """What transformers' classes have built in. The activation is not, because config.json names it."""
        return self.norm, self.positions, self.biases, self.gated, self.qk_norm

    @property
    def form(self) -> HuggingFace:
        """How checkpoints describe this model: as transformers' class, if that computes the same, else as our own."""
        same = self.hugging_face and self.hugging_face.computes == self.structure
        return self.hugging_face if same else OWN


EVERY = ("q", "k", "v", "o", "up", "down")

GPT2 = HuggingFace(
    model_type="gpt2",
    model_class="GPT2LMHeadModel",
    computes=("layer", "learned", EVERY, False, False),
    keys=dict(vocab_size="vocab_size", n_layer="n_layer", n_head="n_head", n_embd="n_embd", d_ff="n_inner")
    | dict(seq_len="n_positions", tie_embeddings="tie_word_embeddings", norm_eps="layer_norm_epsilon"),
    defaults=dict(n_inner=None, tie_word_embeddings=True, layer_norm_epsilon=1e-5, activation_function="gelu_new"),
    only=dict(
        quantization_config=None, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    ),
    activation="activation_function",
    copies=dict(n_ctx="seq_len", attn_pdrop="dropout", embd_pdrop="dropout", resid_pdrop="dropout"),
    fixed={},
    names={"embed": "transformer.wte", "positions": "transformer.wpe", "blocks": "transformer.h", "norm": "transformer.ln_f"}
    | {"head": "lm_head", "norm1": "ln_1", "norm2": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    | {"attn.q": "attn.c_attn", "attn.k": "attn.c_attn", "attn.v": "attn.c_attn", "attn.o": "attn.c_proj"},
    logits=(-1.65162, 1.04851, 0.50614, -1.60146),
)
LLAMA = HuggingFace(
    model_type="llama",
    model_class="LlamaForCausalLM",
    computes=("rms", "rotary", (), True, False),
    keys=dict(vocab_size="vocab_size", n_layer="num_hidden_layers", n_head="num_attention_heads")
    | dict(n_kv_head="num_key_value_heads", head_dim="head_dim", n_embd="hidden_size", d_ff="intermediate_size")
    | dict(seq_len="max_position_embeddings", tie_embeddings="tie_word_embeddings", norm_eps="rms_norm_eps")
    | dict(rope_theta="rope_theta"),
    defaults=dict(num_key_value_heads=None, tie_word_embeddings=False, rms_norm_eps=1e-6, rope_theta=1e4, head_dim=None)
    | dict(hidden_act="silu"),
    only=dict(
        quantization_config=None, partial_rotary_factor=1.0, use_sliding_window=False, attention_bias=False, mlp_bias=False
    ),
    activation="hidden_act",
    copies=dict(attention_dropout="dropout"),
    fixed=dict(attention_bias=False, mlp_bias=False),
    names={"embed": "model.embed_tokens", "blocks": "model.layers", "norm": "model.norm", "head": "lm_head"}
    | {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    | {f"attn.{part}": f"self_attn.{part}_proj" for part in "qkvo"}
    | {f"attn.{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
    | {f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    logits=(0.57153, 0.15577, -0.74170, 0.65453),
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    model_class="Qwen2ForCausalLM",
    computes=("rms", "rotary", ("q", "k", "v"), True, False),
    only=dict(quantization_config=None, partial_rotary_factor=1.0, use_sliding_window=False),
    copies=dict(attention_dropout="dropout", max_window_layers="n_layer"),
    fixed=dict(use_sliding_window=False, sliding_window=None),
    logits=(0.83528, 0.05363, -0.89387, 0.92290),
    note="AutoTokenizer of transformers 5 splits text by Qwen2's own pattern; open tokenizer.json with PreTrainedTokenizerFast",
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    model_class="Qwen3ForCausalLM",
    computes=("rms", "rotary", (), True, True),
    defaults=LLAMA.defaults | dict(head_dim=128),
    only=LLAMA.only,
    fixed=QWEN2.fixed | dict(attention_bias=False),
    logits=(0.43134, -0.74983, 0.38783, 0.32613),
    note="",
)
# For a model that no class of transformers computes.
OWN = replace(
    LLAMA,
    model_type="lockstep",
    model_class="LockstepForCausalLM",
    only={},
    fixed={},
    names={},
    logits=(),
    note="transformers has no class for this model, so only Lockstep can open its checkpoints",
)

ARCHITECTURES = {
    "gpt2": Architecture(
        norm="layer", positions="learned", biases=EVERY, gated=False, qk_norm=False, activation="gelu", hugging_face=GPT2
    ),
    "llama": Architecture(
        norm="rms", positions="rotary", biases=(), gated=True, qk_norm=False, activation="silu", hugging_face=LLAMA
    ),
    "qwen2": Architecture(
        norm="rms", positions="rotary", biases=("q", "k", "v"), gated=True, qk_norm=False, activation="silu", hugging_face=QWEN2
    ),
    "qwen3": Architecture(
        norm="rms", positions="rotary", biases=(), gated=True, qk_norm=True, activation="silu", hugging_face=QWEN3
    ),
}


def model_type(name: str, form: HuggingFace) -> str:
    """Return the `model_type` in config.json for the architecture called `name` here, described as `form`."""
    return f"{form.model_type}_{name}" if form is OWN else form.model_type
