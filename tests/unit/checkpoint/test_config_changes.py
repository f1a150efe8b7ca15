"""Differences between a checkpoint's configuration and the run's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.checkpoint.config_changes import ConfigChanges, compare_configs, refuse_other_adapters
from megatron.core.config_base import config_to_dict, field_specs, from_fields
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt.gpt_config import GPTConfig

SHAPE = """
    hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size vocab_size
    position_embedding_type max_position_embeddings position_embedding_offset normalization apply_layernorm_1p swiglu
    norm_placement qk_layernorm_across_heads qk_layernorm_per_head geglu quick_geglu
    num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_router_enable_expert_bias moe_latent_size
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_layer_freq
    softmax_type attention activation_func attention_output_gate
    num_kv_shared_layers use_double_wide_mlp hidden_size_per_layer_input
    global_kv_channels global_num_query_groups attention_k_eq_v
    hybrid_override_pattern experimental_attention_variant linear_attention_freq linear_conv_kernel_dim
    linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
    mamba_num_heads mamba_head_dim mamba_state_dim mamba_num_groups mamba_conv_kernel_dim mamba_norm
"""
WEIGHTS = """
    num_layers qk_layernorm add_bias_linear add_qkv_bias disable_qkv_bias untie_embeddings_and_output_weights
    mtp_num_layers shared_parallel_norm norm_parameters add_output_bias add_embedding_norm disable_proj_bias
    mamba_conv_bias mamba_proj_bias xielu add_proj_bias layer_scalar
    moe_expert_norms moe_router_norm moe_router_expert_scale
"""


def config(**model: object) -> dict[str, object]:
    values = {
        "num_layers": 4,
        "hidden_size": 64,
        "max_position_embeddings": 128,
        "position_embedding_type": "learned_absolute",
        "tensor_model_parallel_size": 1,
    }
    return {
        "model": values | model,
        "optimizer": {"lr": 1e-4, "betas": [0.9, 0.95]},
        "checkpoint": {"save": "a"},
        "logging": {"log_interval": 1},
        "world_size": 1,
    }


def test_equal_configurations_differ_in_nothing() -> None:
    changes = compare_configs(config(), config())
    assert changes.shape == ()
    assert changes.other == ()


def test_shape_is_told_from_the_rest_and_shown_old_to_new() -> None:
    new = config(num_layers=6, tensor_model_parallel_size=2) | {
        "optimizer": {"lr": 3e-4, "betas": (0.9, 0.95)},
        "checkpoint": {"save": "b"},
        "logging": {"log_interval": 7},
        "world_size": 2,
    }
    changes = compare_configs(config(), new)
    assert changes.shape == ()
    assert [str(change) for change in changes.weights] == ["model.num_layers: 4 -> 6"]
    assert [str(change) for change in changes.other] == [
        "model.tensor_model_parallel_size: 1 -> 2",
        "optimizer.lr: 0.0001 -> 0.0003",
        "world_size: 1 -> 2",
    ]


def test_the_end_of_a_session_is_no_change() -> None:
    limits = {"exit_interval": 5, "exit_duration_in_mins": 30}
    old, new = ({"training": {"train_iters": 10, **ends}} for ends in (limits, dict.fromkeys(limits)))
    assert compare_configs(old, new) == ConfigChanges((), (), ())
    changes = compare_configs(old, {"training": {**limits, "train_iters": 20}})
    assert [str(change) for change in changes.other] == ["training.train_iters: 10 -> 20"]


def test_another_way_to_write_which_layers_have_experts_is_no_change() -> None:
    old = config(num_experts=4, moe_layer_freq="[0, 1, 1, 1]")
    assert compare_configs(old, config(num_experts=4, moe_layer_freq="([0]+[1]*3)")).shape == ()
    for other in ("2", "[1]*4", "nonsense"):
        changes = compare_configs(old, config(num_experts=4, moe_layer_freq=other))
        assert [change.field for change in changes.shape] == ["model.moe_layer_freq"]


def test_widths_that_no_layer_has_are_free() -> None:
    for field, others in (
        ("ffn_hidden_size", {"num_experts": 4, "moe_layer_freq": "1"}),
        ("kv_channels", {"multi_latent_attention": True}),
    ):
        changes = compare_configs(config(**{field: 16}, **others), config(**{field: 88}, **others))
        assert changes.shape == ()
        assert [change.field for change in changes.other] == [f"model.{field}"]
    mixed = {"num_experts": 4, "moe_layer_freq": "[0,1,1,1]"}
    changes = compare_configs(config(ffn_hidden_size=16, **mixed), config(ffn_hidden_size=88, **mixed))
    assert [change.field for change in changes.shape] == ["model.ffn_hidden_size"]


def test_number_of_positions_is_free_where_they_are_not_learned() -> None:
    rope = {"position_embedding_type": "rope"}
    changes = compare_configs(config(**rope), config(**rope, max_position_embeddings=256))
    assert changes.shape == ()
    assert [change.field for change in changes.other] == ["model.max_position_embeddings"]
    learned = compare_configs(config(), config(max_position_embeddings=256))
    assert [change.field for change in learned.shape] == ["model.max_position_embeddings"]


def test_a_field_that_an_older_release_did_not_know_is_no_change() -> None:
    changes = compare_configs(config(), config(swiglu=True))
    assert changes.shape == ()
    assert changes.other == ()


def test_adapters_of_recurrent_layers_are_compared_as_stored() -> None:
    """Stored configurations are JSON, whose lists are tuples in the configuration."""
    own = from_fields(
        GPTConfig, num_layers=2, hybrid_override_pattern="PM", lora_rank=2, hidden_size=8, num_attention_heads=2
    )
    stored = {"model": json.loads(json.dumps(config_to_dict(own)))}
    refuse_other_adapters(Path("run"), stored, stored)
    changed = {"model": stored["model"] | {"lora_rank": 3}}
    expected = (
        r"contains LoRA adapters \(--lora-rank 2 .* --lora-target-modules linear_qkv linear_proj in_proj out_proj\)"
    )
    with pytest.raises(CheckpointError, match=expected):
        refuse_other_adapters(Path("run"), stored, changed)


def test_the_fields_of_the_shape_are_the_frozen_ones() -> None:
    for role, names in (("shape", SHAPE), ("weights", WEIGHTS)):
        assert {spec.name for spec in field_specs(GPTConfig) if spec.options.role == role} == set(names.split())
