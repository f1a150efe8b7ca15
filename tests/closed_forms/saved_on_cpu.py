"""What a layer keeps for its backward pass on a CPU, where kernels are torch's own operations, in bytes."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.parallel_config import ELEMENT_BYTES
from megatron.planner.implementations import key_value_width
from tests.closed_forms.expert_traffic import SendingExpertLayer
from tests.closed_forms.further_memory import kept_by_join
from tests.closed_forms.kept_inputs import is_in_float8
from tests.closed_forms.latent_memory import kept_by_latent_attention
from tests.closed_forms.norm_memory import before_weight, kept_behind, kept_by_head_norms, reads_frozen
from tests.closed_forms.saved_activations import saved_bytes

_WIDE = 4


def saved_on_cpu(
    model: GPTConfig, seq_length: int, micro_batch_size: int, layer_number: int | None = None
) -> Mapping[str, int]:
    """Return by part what one layer keeps of one micro-batch.

    To what fused kernels keep come: the input of each RMSNorm in float32, and what it is before its weight (unless that
    is frozen), in place of the stream unless the norm's output is computed again from that; the gate behind its
    activation; and queries and keys before their rotation, as the values lie between them, unless an exchange copies
    all three.
    """
    parts = dict(saved_bytes(model, seq_length, micro_batch_size, layer_number))
    model = model.of_layer(layer_number or 0)
    if model.recompute_granularity == "full":
        return parts
    t, element = model.tensor_model_parallel_size, ELEMENT_BYTES[model.params_dtype]
    tokens = seq_length // model.context_parallel_size * micro_batch_size
    rows = tokens // t if model.sequence_parallel else tokens
    modules = model.recomputed_modules
    exchange = model.cp_exchange(model.kind_of(layer_number or 0)) if model.context_parallel_size > 1 else "p2p"
    latent = model.mla.multi_latent_attention
    is_plain, has_experts = model.normalization == "RMSNorm", model.moe_layers[model.kind_of(layer_number or 0)]
    parts |= kept_by_join(model, layer_number, rows, element, is_plain=is_plain)
    if is_plain and model.norm_placement != "post":
        kept_of_weight = before_weight(model, element)
        of_each = _WIDE + (kept_of_weight if "layernorm" in modules else 0)
        hidden = rows * model.hidden_size
        parts["norms in float32"] = (2 - reads_frozen(model, layer_number)) * hidden * of_each
        if "layernorm" not in modules:
            parts["stream"] = 2 * hidden * kept_of_weight
        elif has_experts and not SendingExpertLayer(model, tokens, micro_batch_size, element).keeps_input():
            # What nothing keeps is not computed again either.
            parts["stream"] -= hidden * element
    parts["norms behind"] = kept_behind(model, rows, element, is_plain=is_plain)
    heads, groups = model.num_attention_heads // t, key_value_width(model) // model.head_width
    of_heads = kept_by_head_norms(model, heads, groups, element, is_plain=is_plain, is_copied=exchange != "p2p")
    parts["norms of queries and keys"] = tokens * of_heads
    parts["values in float32"] = tokens * key_value_width(model) * _WIDE * model.v_layernorm
    if latent:
        shared = "" if exchange == "p2p" else exchange
        in_float8 = is_in_float8(model, layer_number)
        parts |= kept_by_latent_attention(
            *(model, tokens, rows, element, shared), is_plain=is_plain, in_float8=in_float8
        )
    # A gate with a limit, an offset or a quick GELU is one operation on a CPU too, which keeps its input alone.
    is_one = model.quick_geglu or model.activation_func_clamp_value is not None or model.glu_linear_offset != 0.0
    if is_one:
        parts["gate"] = 0
    elif model.is_gated and has_experts:
        experts = SendingExpertLayer(model, tokens, micro_batch_size, element)
        gates = experts.given * experts.width + tokens * experts.shared_width * ("shared_experts" not in modules)
        parts["gate"] = gates * element * ("moe" not in modules)
    elif model.is_gated and "mlp" not in modules:
        parts["gate"] = tokens * (model.ffn_hidden_size // t) * element
    kind = model.kind_of(layer_number or 0)
    window, has_rotary = model.layer_windows[kind], model.position_embedding_type == "rope"
    has_rotary = has_rotary and not model.layers_without_rotary[kind]
    # With sinks the mask of a block says what is seen, in whole numbers.
    mask_element = 0 if model.has_sinks else element
    if model.context_parallel_size == 1 and window is not None and window < seq_length:
        parts["mask"] = seq_length**2 * mask_element * ("core_attn" not in modules)
    if exchange == "all_gather" and "core_attn" not in modules:
        # Of the first rank's two chunks the second has a mask: it may look at all keys.
        parts["mask"] = seq_length // model.context_parallel_size // 2 * seq_length * mask_element
        if not (has_rotary or model.qk_layernorm):
            # Queries lie between keys and values, which were copied.
            parts["own keys and values"] = 2 * tokens * key_value_width(model) * element
    if has_rotary and exchange == "p2p" and not (model.qk_layernorm or latent):
        parts["before rotation"] = tokens * (model.query_projection_size // t + key_value_width(model)) * element
    return parts
