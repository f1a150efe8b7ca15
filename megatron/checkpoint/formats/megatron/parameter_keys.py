"""Parameter names in all versions of Megatron-LM's checkpoints and in ``torch_dist``, and their native names.

Megatron-LM names the experts of a layer in three ways: one module per expert (``local_experts.0.linear_fc1.weight``),
grouped as in Transformer Engine (``linear_fc1.weight0``), and fused in one tensor (``weight1``, ``weight2``).

A layer of ``--hybrid-override-pattern`` has one norm, ``input_layernorm``. Megatron-LM's MambaModel calls it ``norm``
in a Mamba-2 layer and ``pre_mlp_layernorm`` in an MLP or MoE layer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.checkpoint.formats.megatron.torch_file_reader import LazyTensor
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt import GPTConfig
from megatron.core.sharding import Box, ParamSpec, Shard
from megatron.core.transformer import GATED_DELTA_NET, MAMBA, LayerParts

_SEQUENTIAL = re.compile(r"(.+\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")
_GROUPED = re.compile(r"(.+\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
_FUSED = re.compile(r"(.+\.mlp\.experts)\.weight([12])")


CHOOSING_BIAS = ".router.expert_bias"
"""Name suffix of the router bias that affects only expert selection: float32, without gradient or optimizer state."""


def is_expert_key(key: str) -> bool:
    return _SEQUENTIAL.fullmatch(key) is not None


def expert_number(key: str) -> int | None:
    """Return the expert number within the file that a parameter belongs to, or None if it belongs to no expert."""
    match = _SEQUENTIAL.fullmatch(key)
    return None if match is None else int(match[2])


def is_fused_key(key: str) -> bool:
    """Return whether a key names a tensor that fuses one linear layer of all experts."""
    return _FUSED.fullmatch(key) is not None


def grouped_key(key: str) -> str:
    """Return a parameter's key with grouped experts, or ``key`` itself if the parameter belongs to no expert."""
    match = _SEQUENTIAL.fullmatch(key)
    return key if match is None else f"{match[1]}.{match[3]}.{match[4]}{match[2]}"


def expert_tensors(key: str, tensor: LazyTensor, num_experts: int | None) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the expert parameters in a tensor, each with a leading dimension of 1; nothing if it holds no expert.

    ``num_experts`` is the number of experts in the file, or None if it is unknown.

    Raises:
        CheckpointError: the tensor is not divisible into that number of experts.
    """
    found = _SEQUENTIAL.fullmatch(key)
    if found is not None:
        yield key, stacked(tensor)
        return
    found = _GROUPED.fullmatch(key)
    if found is not None:
        yield f"{found[1]}.local_experts.{found[4]}.{found[2]}.{found[3]}", stacked(tensor)
        return
    found = _FUSED.fullmatch(key)
    if found is None:
        return
    # Both are stored as [experts, in, out].
    width_dim = 0 if found[2] == "1" else 1
    if num_experts is None or len(tensor.shape) != 2 or tensor.num_elements % (tensor.shape[width_dim] * num_experts):
        raise CheckpointError(f"{key} with shape {list(tensor.shape)} is not divisible into {num_experts} experts")
    per_expert = tensor.num_elements // num_experts
    inputs = tensor.shape[0] if width_dim == 0 else per_expert // tensor.shape[1]
    outputs = per_expert // inputs
    for number in range(num_experts):
        values = replace(
            tensor, offset=tensor.offset + number * per_expert, shape=(1, outputs, inputs), strides=(1, 1, outputs)
        )
        yield f"{found[1]}.local_experts.{number}.linear_fc{found[2]}.weight", values


def stacked(tensor: LazyTensor) -> LazyTensor:
    """Return an expert's tensor with a leading dimension of 1."""
    return replace(tensor, shape=(1, *tensor.shape), strides=(tensor.num_elements, *tensor.strides))


def expert_shards(spec: ParamSpec) -> Iterator[tuple[int, tuple[Shard, ...]]]:
    """Yield each local expert's number with the shards of its own tensor."""
    first = spec.shards[0].global_box
    for number in range(first.shape[0]):
        yield (
            number,
            tuple(
                Shard(
                    Box((box.offset[0] + number, *box.offset[1:]), (1, *box.shape[1:])),
                    (0, *shard.local_offset[1:]),
                )
                for shard in spec.shards
                for box in (shard.global_box,)
            ),
        )


_LAYER = re.compile(r"(?:language_model\.)?(?:decoder|encoder|transformer)\.layers\.(\d+)\.(.+)")
_FINAL_NORM = re.compile(
    r"(?:language_model\.)?(?:decoder|encoder|transformer)\.(?:final_layernorm|final_norm)\.(weight|bias)"
)
_FURTHER = re.compile(r"mtp\.layers\.(\d+)\.transformer_layer\.(.+)")
_BESIDE_FURTHER = re.compile(r"mtp\.layers\.\d+\.(?:enorm|hnorm|eh_proj|final_layernorm)\.(?:weight|bias)")
_NORM_IN_LINEAR = re.compile(r"(.+)\.layer_norm_(weight|bias)")

_LAYER_MODULES: dict[str, str] = {
    # Megatron Core
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
    "mlp.fc1_latent_proj": "mlp.fc1_latent_proj",
    "mlp.fc2_latent_proj": "mlp.fc2_latent_proj",
    "mlp.shared_experts.linear_fc1": "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2": "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1": "mlp.linear_fc1",
    "mlp.linear_fc2": "mlp.linear_fc2",
    "mlp.experts.linear_fc1": "mlp.experts.linear_fc1",
    "mlp.experts.linear_fc2": "mlp.experts.linear_fc2",
    # Mamba-2 and gated delta-net
    "norm": "norm",
    "mixer.in_proj": "mixer.in_proj",
    "mixer.conv1d": "mixer.conv1d",
    "mixer.norm": "mixer.norm",
    "mixer.out_proj": "mixer.out_proj",
    "self_attention.in_proj": "self_attention.in_proj",
    "self_attention.conv1d": "self_attention.conv1d",
    "self_attention.out_norm": "self_attention.out_norm",
    "self_attention.out_proj": "self_attention.out_proj",
    # names before Megatron Core, oldest first
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
    *("mixer.A_log", "mixer.D", "mixer.dt_bias", "self_attention.A_log", "self_attention.dt_bias"),
)
# Transformer Engine keeps a norm in the linear layer that follows it.
_FUSED_NORMS: dict[str, str] = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.query_key_value": "input_layernorm",
    "self_attention.in_proj": "input_layernorm",
    "mixer.in_proj": "norm",
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
# Buffers that are computed from the configuration, and the state of low-precision recipes.
_NO_PARAMETER = re.compile(
    r"(.*\._extra_state|.*\.inv_freq|.*\.local_tokens_per_expert|.*\.(?:self_)?attention\.(?:masked_)?bias)"
)


def local_key(key: str) -> str | None:
    """Return the native name of a key with its layer number in the file, or None if the key is not a parameter.

    Raises:
        KeyError: no GPT model has a parameter with this name.
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
    """Yield (key, value) of a model's state dict; older files nest its parts in dictionaries."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from flatten_keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def named_tensors(state: Mapping[str, Any], where: str, num_experts: int | None = None) -> dict[str, LazyTensor]:
    """Return the parameters of a model chunk by native name, in file order.

    ``num_experts`` is the number of experts per layer in the file. Each expert has its own name.

    Raises:
        CheckpointError: the state has tensors that no GPT model has; the message lists all of them.
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
        raise CheckpointError(f"{where} contains tensors of an unsupported kind of model: {', '.join(sorted(unknown))}")
    return found


def has_fused_norms(state: Mapping[str, Any]) -> bool:
    """Return whether a model's state has its norms in the linear layers, as Transformer Engine's layers do."""
    return any(key.endswith(".layer_norm_weight") for key, _ in flatten_keys(state))


_IN_LAYER = re.compile(r"(decoder\.layers\.\d+\.|mtp\.layers\.\d+\.transformer_layer\.)(.+)")


def fused_key(key: str, modules: Collection[str]) -> str:
    """Return a parameter's key in Transformer Engine's layers, which may equal ``key``.

    A norm is fused if ``modules``, the keys of the modules around it, include the linear layer that it precedes.
    """
    layer = _IN_LAYER.fullmatch(key)
    if layer is not None:
        module, _, kind = layer[2].rpartition(".")
        for linear, norm in _FUSED_NORMS.items():
            if norm == module and layer[1] + linear in modules:
                return f"{layer[1]}{linear}.layer_norm_{kind}"
    return key


def module_of(key: str) -> str:
    """Return the key of the module that has a parameter, also for the key of a fused norm."""
    return key.rpartition(".")[0]


_BRANCH_NORM = re.compile(r"(.*decoder\.layers\.\d+\.)(?:norm|pre_mlp_layernorm)\.(weight|bias)")
_FINAL = "decoder.final_layernorm."


def branch_key(name: str, parts: LayerParts) -> str:
    """Return the key of a parameter in a layer with one branch, whose ``parts`` decide the name of its norm."""
    norm = "norm" if parts.mixer == MAMBA else "pre_mlp_layernorm" if parts.mixer is None else "input_layernorm"
    return name.replace(".input_layernorm.", f".{norm}.", 1)


def native_branch_key(key: str) -> str:
    """Return the native name of a parameter in a layer with one branch; inverse of `branch_key`."""
    return _BRANCH_NORM.sub(r"\1input_layernorm.\2", key)


def mamba_model_key(key: str) -> str:
    """Return a parameter's key in Megatron-LM's MambaModel, which calls the last norm ``final_norm``."""
    return f"decoder.final_norm.{key.removeprefix(_FINAL)}" if key.startswith(_FINAL) else key


_STACKED_ROWS = re.compile(r".+\.(mixer|self_attention)\.(in_proj|conv1d)\.(?:weight|bias)")
_PARTS = {
    "mixer": (MAMBA, ("z", "x", "B", "C", "dt"), slice(1, 4)),
    "self_attention": (GATED_DELTA_NET, ("query", "key", "value", "z", "beta", "alpha"), slice(3)),
}
"""Tensors that the rows of an input projection stack, and those of them that pass through the convolution."""


def stored_parts(key: str) -> tuple[str, ...]:
    """Return the names of the tensors in which ``torch_dist`` stores the rows of a parameter; usually none.

    Each name follows the key of the parameter, as in ``mixer.in_proj.weight.z``.
    """
    found = _STACKED_ROWS.fullmatch(key)
    if found is None:
        return ()
    _, parts, of_convolution = _PARTS[found[1]]
    return parts[of_convolution] if found[2] == "conv1d" else parts


def rows_of_parts(key: str, model: GPTConfig) -> tuple[int, ...]:
    """Return the rows of each of a parameter's `stored_parts`."""
    found = _STACKED_ROWS.fullmatch(key)
    if found is None:
        return ()
    mixer, _, of_convolution = _PARTS[found[1]]
    rows = model.hybrid.projection_rows(mixer, model.hidden_size)
    return rows[of_convolution] if found[2] == "conv1d" else rows


_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>[a-z0-9_]+?)\.(?P<key>(?:embedding|decoder|output_layer|mtp)\..+)"
)
_STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)(.+)")
_GATED_HALF = re.compile(r"(.+\.mlp\..*linear_fc1\.(?:weight|bias))_([wv])")
_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.experts\.(?:(\d+)\.)?(linear_fc[12]\..+)")
"""Experts of a layer: stacked along the axis after the layer axis, or one tensor per expert."""
_PART = re.compile(r"(.+\.(?:in_proj|conv1d)\.(?:weight|bias))\.([A-Za-z]+)")
_MAIN_PARAMS = ("param", "fp32_param")


@dataclass(frozen=True)
class ParameterKey:
    """Parsed key of a stored tensor.

    ``kind`` is ``model`` or a kind of optimizer state. ``is_stacked`` marks a tensor whose first axis is the layer, and
    ``key`` is then the key of layer 0. ``part`` is the number of this tensor among the separate tensors of a parameter:
    the two halves of a gated layer, or its `stored_parts`. ``expert`` is the expert number if each expert has its own
    tensor.
    """

    kind: str
    key: str
    is_stacked: bool
    part: int | None = None
    expert: int | None = None

    def name(self, layer: int) -> str:
        """Return the native name of one layer's tensor; ``layer`` is used only for a stacked tensor."""
        key = self.key.replace("layers.0.", f"layers.{layer}.", 1) if self.is_stacked else self.key
        parameter = local_key(key)
        assert parameter is not None, key
        return f"model.{parameter}" if self.kind == "model" else f"optimizer.{self.kind}.{parameter}"


def parse_key(stored: str) -> ParameterKey | None:
    """Parse the key of a stored tensor; return None if it is neither a parameter nor its optimizer state.

    Raises:
        KeyError: no GPT model has a parameter with this name.
    """
    state = _STATE.fullmatch(stored)
    kind, key = ("model", stored) if state is None else (state["kind"], state["key"])
    plain, number = key, None
    if half := _GATED_HALF.fullmatch(key):
        plain, number = half[1], "wv".index(half[2])
    elif part := _PART.fullmatch(key):
        plain = part[1]
        if part[2] not in stored_parts(plain):
            raise KeyError(stored)
        number = stored_parts(plain).index(part[2])
    stacked = _STACKED.fullmatch(plain)
    if stacked is not None:
        plain = f"decoder.layers.0.{stacked[1]}"
    experts = _EXPERTS.fullmatch(plain)
    if experts is not None:
        plain = f"{experts[1]}.{experts[3]}"
    if local_key(plain) is None:
        return None
    return ParameterKey(
        "main_param" if kind in _MAIN_PARAMS else kind,
        plain,
        stacked is not None,
        number,
        None if experts is None or experts[2] is None else int(experts[2]),
    )


def stored_key(
    name: str, modules: Collection[str], *, branch: LayerParts | None = None, stacks: bool = True
) -> tuple[str, int | None]:
    """Return the key under which Megatron-LM stores a parameter, and its layer if layers are stacked in one tensor.

    ``modules`` are the keys of the linear layers of the parameter's layer. ``branch`` are the parts of the layer if it
    has one branch. ``stacks`` states that all layers are alike and therefore stacked. Norms have Transformer Engine's
    names in every run.
    """
    key = name.replace(".mlp.experts.", ".mlp.experts.experts.")
    if branch is not None:
        key = branch_key(key, branch)
    key = fused_key(key, modules)
    words = key.split(".")
    if words[:2] != ["decoder", "layers"] or not stacks:
        return key, None
    return ".".join([*words[:2], *words[3:]]), int(words[2])
