"""The shards of all ranks cover each parameter, and replicas are numbered."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from megatron.core.config_base import from_fields
from megatron.core.device import Device
from megatron.core.main_grad import gradient_uses_of
from megatron.core.models.gpt.chunk_parameters import chunk_parameters
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ExpertGroups, describe_parallel_state
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import ParamSpec, spec_of
from megatron.core.tensor_parallel.lora import LowRankAdapter
from megatron.core.tensor_parallel.random import RngStreams

WHOLE_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = {"lora_rank": 3, "lora_alpha": 6.0}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}
LATENT = {"multi_latent_attention": True, "position_embedding_type": "rope", "q_lora_rank": 6, "kv_lora_rank": 5}
SPARSE = LATENT | {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 70,
    "dsa_indexer_topk": 4,
    "dsa_indexer_layer_freq": "3",
}
SINGLE: dict[str, Any] = {"tensor_model_parallel_size": 1, "sequence_parallel": False}
MODELS: dict[str, tuple[dict[str, Any], ParallelSizes]] = {
    "groups": ({}, ParallelSizes(tp=2)),
    "shared groups": ({"add_bias_linear": True}, ParallelSizes(tp=4)),
    "sequence parallel": ({"sequence_parallel": True, "mtp_num_layers": 1}, ParallelSizes(tp=4)),
    "norm across heads": ({"qk_layernorm": True, "qk_layernorm_across_heads": True}, ParallelSizes(tp=4)),
    "latent": (LATENT, ParallelSizes(tp=4)),
    "sparse": (SPARSE | {"mtp_num_layers": 1}, ParallelSizes(tp=2)),
    "adapters": (ADAPTERS | {"lora_target_modules": WHOLE_LAYERS}, ParallelSizes(tp=2)),
    "adapters of parts": (ADAPTERS | {"lora_target_modules": PARTS}, ParallelSizes(tp=2)),
    "adapters of shared groups": (ADAPTERS | {"lora_target_modules": WHOLE_LAYERS}, ParallelSizes(tp=4)),
    "adapters of parts of shared groups": (ADAPTERS | {"lora_target_modules": PARTS}, ParallelSizes(tp=4)),
    "experts": (EXPERTS | {"moe_router_enable_expert_bias": True}, ParallelSizes(tp=2, ep=2, etp=2)),
    "whole experts": (EXPERTS | {"moe_router_score_function": "sigmoid"}, ParallelSizes(tp=2, ep=4, etp=1)),
    "adapters of experts": (
        EXPERTS | ADAPTERS | {"lora_target_modules": WHOLE_LAYERS},
        ParallelSizes(tp=2, ep=2, etp=2),
    ),
    "adapters of parts of experts": (
        EXPERTS | ADAPTERS | {"lora_target_modules": PARTS},
        ParallelSizes(tp=2, ep=2, etp=2),
    ),
}


def model_of(rank: int, fields: dict[str, Any], sizes: ParallelSizes) -> GPTModel:
    state = describe_parallel_state(rank, 4, sizes)
    config = from_fields(
        GPTConfig,
        **{
            "num_layers": 1,
            "hidden_size": 24,
            "num_attention_heads": 8,
            "num_query_groups": 2,
            "ffn_hidden_size": 40,
            "vocab_size": 52,
            "make_vocab_size_divisible_by": 1,
            "max_position_embeddings": 16,
            "swiglu": True,
            "add_bias_linear": "num_experts" not in fields,
            "tensor_model_parallel_size": sizes.tp,
        }
        | fields,
    )
    experts = ExpertGroups.of(state) if config.moe.num_experts else None
    rng = RngStreams(Device("cpu"), 0, state.place)
    return GPTModel(config, state.tp, rng, seed=None, device="meta", cp=state.cp, experts=experts)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_cover_every_parameter_and_number_its_copies(name: str) -> None:
    fields, sizes = MODELS[name]
    held: dict[str, list[ParamSpec]] = defaultdict(list)
    for rank in range(4):
        for parameter in model_of(rank, fields, sizes).parameters():
            spec = spec_of(parameter)
            for shard in spec.shards:
                box = zip(shard.local_box.offset, shard.local_box.shape, parameter.shape, strict=True)
                assert all(offset + length <= size for offset, length, size in box)
            assert sum(shard.global_box.num_elements for shard in spec.shards) == parameter.numel()
            held[spec.name].append(spec)
    whole = {spec_of(p).name: tuple(p.shape) for p in model_of(0, fields | SINGLE, ParallelSizes()).parameters()}
    assert held.keys() == whole.keys()
    for parameter_name, specs in held.items():
        owners, shares = np.zeros(whole[parameter_name]), np.zeros(whole[parameter_name])
        for spec in specs:
            assert spec.global_shape == whole[parameter_name]
            assert (spec.num_replicas > 1) or not (spec.replicated_axes or spec.gradient_sum_axes)
            for shard in spec.shards:
                owners[shard.global_box.slices] += spec.is_owner
                shares[shard.global_box.slices] += 1 / spec.num_replicas
        # Data-parallel ranks hold the same again.
        assert owners.min() == owners.max() > 0, parameter_name
        assert np.array_equal(owners, shares), parameter_name


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rows_of_a_fused_projection_are_those_of_its_parts(tp: int) -> None:
    attention = model_of(0, {}, ParallelSizes(tp=tp)).decoder.layers["0"].self_attention
    weights = [parameter for parameter in attention.linear_qkv.parameters() if parameter.dim() == 2]
    assert {spec_of(weight).global_shape for weight in weights} == {(36, 24)}
    assert {spec_of(weight).fused_rows for weight in weights} == {(12, 3, 3)}


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_has_the_query_heads_of_its_group_and_a_copy_of_the_key_and_value(rank: int) -> None:
    """Of eight heads of width 3 in two groups each of four ranks has two; rows are four heads, a key and a value."""
    projection = model_of(rank, {}, ParallelSizes(tp=4)).decoder.layers["0"].self_attention.linear_qkv
    boxes = {name: spec_of(parameter).shards[0].global_box for name, parameter in projection.named_parameters()}
    group, member = divmod(rank, 2)
    assert (boxes["query_weight"].offset, boxes["query_weight"].shape) == ((18 * group + 6 * member, 0), (6, 24))
    assert (boxes["key_value_weight"].offset, boxes["key_value_weight"].shape) == ((18 * group + 12, 0), (6, 24))
    assert (boxes["query_bias"].offset, boxes["query_bias"].shape) == ((18 * group + 6 * member,), (6,))
    assert (boxes["key_value_bias"].offset, boxes["key_value_bias"].shape) == ((18 * group + 12,), (6,))
    for name, parameter in projection.named_parameters():
        spec = spec_of(parameter)
        is_shared = name.startswith("key_value")
        assert (spec.replica_index, spec.num_replicas) == ((member, 2) if is_shared else (0, 1))
        assert spec.gradient_sum_axes == (("tp",) if is_shared else ())
        assert (spec.init_std > 0.0) is name.endswith("weight")


@pytest.mark.parametrize(
    ("fields", "pre_process", "post_process", "uses"),
    [
        ({}, True, True, 2),
        ({}, True, False, 1),
        ({"untie_embeddings_and_output_weights": True}, True, True, 1),
        ({"mtp_num_layers": 1}, True, True, 3),
        ({"mtp_num_layers": 1}, False, True, 2),
        ({"mtp_num_layers": 1, "untie_embeddings_and_output_weights": True}, False, True, 1),
        ({"mtp_num_layers": 2, "untie_embeddings_and_output_weights": True}, True, True, 2),
    ],
)
def test_a_word_embedding_has_a_gradient_of_each_of_its_uses(
    fields: dict[str, Any], pre_process: bool, post_process: bool, uses: int
) -> None:
    """The model, each MTP module and a tied output layer use the embedding."""
    config = model_of(0, fields, ParallelSizes()).config
    group = single_rank_group()
    rng = RngStreams(Device("cpu"), 0, ParallelSizes().place())
    stage = {"pre_process": pre_process, "post_process": post_process}
    model = GPTModel(config, group, rng, seed=None, device="meta", **stage)
    assert model.embedding is not None
    assert gradient_uses_of(model.embedding.word_embeddings.weight) == uses
    assert model.first_alone is (model.embedding if pre_process and uses == 1 else None)


def test_the_bias_of_experts_is_not_trained() -> None:
    model = model_of(0, EXPERTS | {"moe_router_enable_expert_bias": True}, ParallelSizes())
    router = model.decoder.layers["0"].mlp.router
    assert not router.expert_bias.requires_grad
    assert router.weight.requires_grad
    assert spec_of(router.expert_bias).replicated_axes == ()
    sharded = model_of(1, EXPERTS | {"moe_router_enable_expert_bias": True}, ParallelSizes(tp=2, etp=2))
    spec = spec_of(sharded.decoder.layers["0"].mlp.router.expert_bias)
    assert (spec.replicated_axes, spec.replica_index, spec.num_replicas) == (("tp",), 1, 2)


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_of_experts_have_the_widths_of_their_parts(tp: int) -> None:
    """One for all rows of the first product is as wide as gate and up together; the shared expert has its own."""
    sizes = ParallelSizes(tp=tp, etp=tp)
    expected = {
        "experts.linear_fc1.adapters": ((4, 3, 24), (4, 48 // tp, 3)),
        "experts.linear_fc2.adapters": ((4, 3, 24 // tp), (4, 24, 3)),
        "shared_experts.linear_fc1.adapters": ((3, 24), (32 // tp, 3)),
        "shared_experts.linear_fc2.adapters": ((3, 16 // tp), (24, 3)),
    }
    for is_whole in (True, False):
        targets = WHOLE_LAYERS if is_whole else PARTS
        mlp = model_of(0, EXPERTS | ADAPTERS | {"lora_target_modules": targets}, sizes).decoder.layers["0"].mlp
        for name, (down, up) in expected.items():
            rows = -2 if "fc1" in name else None
            adapters = dict(mlp.get_submodule(name).named_children())
            assert list(adapters) == (["all"] if is_whole or rows is None else ["gate", "up"])
            for adapter in adapters.values():
                width = list(up)
                if rows is not None:
                    width[rows] //= len(adapters)
                assert (tuple(adapter.lora_A.shape), tuple(adapter.lora_B.shape)) == (down, tuple(width))


def test_adapters_of_a_layer_are_told_apart() -> None:
    """What one drops does not follow from what another drops."""
    for targets in (WHOLE_LAYERS, PARTS):
        layer = model_of(0, ADAPTERS | {"lora_target_modules": targets}, ParallelSizes()).decoder.layers["0"]
        sites = [adapter.site for adapter in layer.modules() if isinstance(adapter, LowRankAdapter)]
        assert len(sites) == len(set(sites)) == len(targets)


@pytest.mark.parametrize(("tp", "num_groups", "width"), [(1, 2, 12), (2, 1, 12), (4, 1, 6)])
def test_adapters_of_queries_keys_and_values_are_as_wide_as_their_heads(tp: int, num_groups: int, width: int) -> None:
    model = model_of(0, ADAPTERS | {"lora_target_modules": PARTS}, ParallelSizes(tp=tp))
    adapters = model.decoder.layers["0"].self_attention.linear_qkv.adapters
    assert adapters.num_groups == num_groups
    assert adapters.widths == {"q": width, "k": 3, "v": 3}


@pytest.mark.parametrize(("sequence_parallel", "reads", "writes"), [(False, 24, 40), (True, 12, 40)])
def test_a_matrix_reads_its_inputs_and_writes_its_outputs(sequence_parallel: bool, reads: int, writes: int) -> None:
    """Under sequence parallelism a rank reads its own part of what all ranks multiply."""
    config = model_of(0, {"sequence_parallel": sequence_parallel}, ParallelSizes(tp=2)).config
    found = {
        each.name: each for each in chunk_parameters(config, StageContents((0,), has_embedding=True, has_loss=True))
    }
    # Gate and up have 80 rows, of which this rank has half.
    weight = found["mlp.linear_fc1.weight"]
    assert (weight.size, weight.reads, weight.writes) == (40 * 24, reads, writes)
    assert (found["mlp.linear_fc1.bias"].reads, found["mlp.linear_fc1.bias"].writes) == (0, 0)
    assert {each.name: each.is_matrix for each in found.values() if each.name.startswith("mlp.")} == {
        "mlp.linear_fc1.weight": True,
        "mlp.linear_fc1.bias": False,
        "mlp.linear_fc2.weight": True,
        "mlp.linear_fc2.bias": False,
    }
