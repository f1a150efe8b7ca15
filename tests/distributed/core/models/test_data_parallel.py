"""Weights that are sharded over the data-parallel ranks: how much of them is whole at any moment of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.model import wrap_model
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import CollectiveCall, single_rank_group
from megatron.core.sharding import held_of, spec_of
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import make_model

LENGTH, BATCH, LAYERS = 8, 3, 5


def whole_bytes(module: nn.Module) -> int:
    """Return the bytes behind the parameters, views counted once."""
    storages = [parameter.untyped_storage() for parameter in module.parameters()]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def passes(chunk: DistributedDataParallel, *, trains: bool) -> None:
    tokens = torch.arange(BATCH * (LENGTH + 1)).view(BATCH, LENGTH + 1) % 7
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    with torch.set_grad_enabled(trains):
        loss = chunk(tokens[:, :-1], positions, labels=tokens[:, 1:]).mean()
    if trains:
        loss.backward()
        chunk.finish_grad_sync()


def whole_over_time() -> tuple[list[int], list[int], dict[str, int], int]:
    """Return whole bytes as each bucket comes, in training and without, those of each kind of bucket, and of shards."""
    seen: list[int] = []

    def observe(call: CollectiveCall) -> None:
        if call.operation == "all_gather":
            seen.append(whole_bytes(chunk))

    state = create_parallel_state()
    state = replace(state, dp_cp=replace(state.dp_cp, observer=observe))
    model = make_model(
        single_rank_group(), num_layers=LAYERS, max_position_embeddings=LENGTH, untie_embeddings_and_output_weights=True
    )
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    chunk = wrap_model(model, config, state)
    assert whole_bytes(chunk) == 0
    passes(chunk, trains=True)
    assert whole_bytes(chunk) == 0
    training = list(seen)
    seen.clear()
    passes(chunk, trains=False)
    assert whole_bytes(chunk) == 0
    (buffer,) = chunk.grad_buffers
    rest, *layers, first = (bucket.layout.num_elements * 4 for bucket in buffer.buckets)
    assert len(layers) == LAYERS
    (layer,) = set(layers)
    held = sum(part.values.nbytes for part in chunk.parts)
    return training, seen, {"rest": rest, "layer": layer, "first": first}, held


MADE = {
    "tied-heads-of-queries": {"num_query_groups": 2, "qk_layernorm": True},
    "experts-latent-further": {
        "num_experts": 3,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 12,
        "swiglu": True,
        "multi_latent_attention": True,
        "q_lora_rank": 9,
        "kv_lora_rank": 11,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 5,
        "position_embedding_type": "rope",
        "mtp_num_layers": 2,
    },
}


def first_values(settings: dict[str, object], strategy: str) -> tuple[int, int, bool]:
    """Return whole bytes of a model made without memory and of it wrapped, and whether its values are right."""
    whole = {spec_of(p).name: p.detach() for p in make_model(single_rank_group(), **settings).parameters()}
    model = make_model(single_rank_group(), fills_later=True, **settings)
    made = whole_bytes(model)
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
    chunk = wrap_model(model, config, create_parallel_state())
    return (
        made,
        whole_bytes(chunk),
        all(
            torch.equal(values[piece.local_box.slices], whole[spec.name][piece.global_box.slices])
            for parameter in chunk.parameters()
            for spec, values in held_of(parameter)
            for piece in spec.pieces
        ),
    )


@pytest.mark.parametrize("name", MADE)
def test_first_values_are_drawn_in_shards(name: str) -> None:
    """A model is made without memory, and its shards are cut from the values that a whole one has."""
    for made, wrapped, is_right in run_distributed(3, first_values, MADE[name], "optim_grads_params"):
        assert (made, wrapped, is_right) == (0, 0, True)
    assert run_distributed(1, first_values, MADE[name], "optim_grads_params")[0][2]


def test_two_layers_and_the_rest_are_whole_at_once() -> None:
    ranks = run_distributed(2, whole_over_time)
    for training, evaluating, sizes, _ in ranks:
        rest, layer, first = sizes["rest"], sizes["layer"], sizes["first"]
        forward = [rest, rest + first, rest + first + layer, *[rest + 2 * layer] * (LAYERS - 1)]
        assert evaluating == forward
        # The last layer's weights come alone, each other one's while the layer behind it runs.
        assert training == [*forward, rest + layer, *[rest + 2 * layer] * (LAYERS - 1)]
    assert sum(held for _, _, _, held in ranks) == 4 * sum(
        p.numel()
        for p in make_model(
            single_rank_group(),
            num_layers=LAYERS,
            max_position_embeddings=LENGTH,
            untie_embeddings_and_output_weights=True,
        ).parameters()
    )
