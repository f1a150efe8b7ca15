"""The names of parameters in Megatron's files, of any age, and the native ones that they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.errors import CheckpointError
from megatron.interop.megatron_torch.experts.expert_keys import expert_tensors
from megatron.interop.megatron_torch.stored_values import LazyTensor

_LAYER = re.compile(r"(?:language_model\.)?(?:decoder|encoder|transformer)\.layers\.(\d+)\.(.+)")
_FINAL_NORM = re.compile(
    r"(?:language_model\.)?(?:decoder|encoder|transformer)\.(?:final_layernorm|final_norm)\.(weight|bias)"
)
_FURTHER = re.compile(r"mtp\.layers\.(\d+)\.transformer_layer\.(.+)")
_BESIDE_FURTHER = re.compile(r"mtp\.layers\.\d+\.(?:enorm|hnorm|eh_proj|final_layernorm)\.(?:weight|bias)")
_NORM_IN_LINEAR = re.compile(r"(.+)\.layer_norm_(weight|bias)")

_LAYER_MODULES: dict[str, str] = {
    # megatron-core
    "input_layernorm": "input_layernorm",
    "self_attention.linear_proj": "self_attention.linear_proj",
    "self_attention.linear_qkv": "self_attention.linear_qkv",
    "self_attention.q_layernorm": "self_attention.q_layernorm",
    "self_attention.k_layernorm": "self_attention.k_layernorm",
    "self_attention.kv_layernorm": "self_attention.kv_layernorm",
    "self_attention.linear_q_proj": "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj": "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj": "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj": "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj": "self_attention.linear_kv_up_proj",
    "pre_mlp_layernorm": "pre_mlp_layernorm",
    "mlp.router": "mlp.router",
    "mlp.shared_experts.linear_fc1": "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2": "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1": "mlp.linear_fc1",
    "mlp.linear_fc2": "mlp.linear_fc2",
    "mlp.experts.linear_fc1": "mlp.experts.linear_fc1",
    "mlp.experts.linear_fc2": "mlp.experts.linear_fc2",
    # before it, in the order of their age
    "attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
    "input_norm": "input_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
}
_SINGLE = (
    "mlp.router.expert_bias",
    "mlp.shared_experts.gate_weight",
    "self_attention.core_attention.softmax_offset",
)
# transformer-engine keeps a norm in the linear layer that follows it.
_FUSED_NORMS: dict[str, str] = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.query_key_value": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "mlp": "pre_mlp_layernorm",
}
_WHOLE_MODEL: dict[str, str] = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "output_layer.weight": "output_layer.weight",
    "language_model.embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "language_model.embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "language_model.output_layer.weight": "output_layer.weight",
    "word_embeddings_for_head.weight": "output_layer.weight",
    "word_embeddings.weight": "output_layer.weight",
}
# Buffers that follow from the configuration, and the state of low-precision recipes.
_NO_PARAMETER = re.compile(
    r"(.*\._extra_state|.*\.inv_freq|.*\.local_tokens_per_expert|.*\.(?:self_)?attention\.(?:masked_)?bias)"
)


def local_key(key: str) -> str | None:
    """Return the native name of a key, with the layer's number that it has in the file; None where it is no parameter.

    Raises:
        KeyError: no GPT has a parameter of this name.
    """
    if _NO_PARAMETER.fullmatch(key):
        return None
    if key in _WHOLE_MODEL:
        return _WHOLE_MODEL[key]
    final = _FINAL_NORM.fullmatch(key)
    if final:
        return f"decoder.final_layernorm.{final.group(1)}"
    if _BESIDE_FURTHER.fullmatch(key):
        return key
    further = _FURTHER.fullmatch(key)
    if further is not None:
        name = local_key(f"decoder.layers.{further[1]}.{further[2]}")
        return (
            None
            if name is None
            else name.replace("decoder.layers.", "mtp.layers.", 1).replace(
                f".{further[1]}.", f".{further[1]}.transformer_layer.", 1
            )
        )
    layer = _LAYER.fullmatch(key)
    if layer is None:
        raise KeyError(key)
    number, rest = layer.groups()
    fused = _NORM_IN_LINEAR.fullmatch(rest)
    if fused:
        return f"decoder.layers.{number}.{_FUSED_NORMS[fused.group(1)]}.{fused.group(2)}"
    if rest in _SINGLE:
        return f"decoder.layers.{number}.{rest}"
    module, _, kind = rest.rpartition(".")
    if kind not in ("weight", "bias"):
        raise KeyError(key)
    return f"decoder.layers.{number}.{_LAYER_MODULES[module]}.{kind}"


def flatten_keys(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of a model's state; older files nest the parts of a model in dictionaries."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from flatten_keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def named_tensors(state: Mapping[str, Any], where: str, num_experts: int | None = None) -> dict[str, LazyTensor]:
    """Return the parameters of a model chunk under native names, in the file's order.

    ``num_experts`` is the number of a layer's experts in the file; each has a name of its own.

    Raises:
        CheckpointError: it holds tensors that no GPT has; all of them are listed.
    """
    found: dict[str, LazyTensor] = {}
    unknown = []
    for key, value in flatten_keys(state):
        if not isinstance(value, LazyTensor):
            continue
        of_experts = dict(expert_tensors(key.removeprefix("language_model."), value, num_experts))
        if of_experts:
            found |= of_experts
            continue
        try:
            name = local_key(key)
        except KeyError:
            unknown.append(key)
            continue
        if name is not None:
            found[name] = value
    if unknown:
        raise CheckpointError(f"{where} holds tensors of another kind of model: {', '.join(sorted(unknown))}")
    return found


def has_fused_norms(state: Mapping[str, Any]) -> bool:
    """Return whether a model's state has its norms in the linear layers, as transformer-engine's layers do."""
    return any(key.endswith(".layer_norm_weight") for key, _ in flatten_keys(state))


def fused_key(key: str, is_latent: bool = False) -> str:
    """Return the key that a parameter has in transformer-engine's layers; ``key`` itself where it is the same.

    ``is_latent`` says that the layer has latent attention, which norms its narrow vectors there.
    """
    layer = re.fullmatch(r"((?:decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)\.)(.+)", key)
    if layer is not None:
        module, _, kind = layer.group(2).rpartition(".")
        attention = ("linear_q_up_proj", "linear_kv_up_proj") if is_latent else ("linear_qkv",)
        for linear in (*(f"self_attention.{name}" for name in attention), "mlp.linear_fc1"):
            if _FUSED_NORMS[linear] == module:
                return f"{layer.group(1)}{linear}.layer_norm_{kind}"
    return key
