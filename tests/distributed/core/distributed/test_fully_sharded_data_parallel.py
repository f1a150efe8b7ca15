"""Sharded weights: how much of them is whole at any moment, and weights that are gathered in fp8."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_parameters import Float8FlatParameters, send_in_float8
from megatron.core.distributed.param_layout import plan_layout
from megatron.core.models.model import wrap_model
from megatron.core.parallel_config import ParallelSizes
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
    held = sum(part.values.nbytes for part in chunk.shards)
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
            torch.equal(values[shard.local_box.slices], whole[spec.name][shard.global_box.slices])
            for parameter in chunk.parameters()
            for spec, values in held_of(parameter)
            for shard in spec.shards
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


SHAPES = ((6, 5), (3, 7, 11), (3, 13, 2), (9, 4))
NUM_SCALES = (1, 3, 3, 1)
LARGEST, SMALLEST_EXPONENT, MANTISSA_BITS = 448.0, -6, 3


def parameters() -> list[torch.nn.Parameter]:
    """Return weights whose parts, experts', are of very different sizes; those of one of them are zero."""
    generator = torch.Generator().manual_seed(9)
    result = []
    for shape, number in zip(SHAPES, NUM_SCALES):
        values = torch.randn(shape, generator=generator)
        for index, part in enumerate(values.chunk(number)):
            part.mul_(0.0 if number > 1 and index == 1 else 37.0 ** (3 * index - 2))
        result.append(torch.nn.Parameter(values.to(torch.bfloat16)))
        send_in_float8(result[-1], number)
    return result


def rounded(part: torch.Tensor) -> torch.Tensor:
    """Return a part in E4M3 by the power of two that its largest number asks for, computed in float64."""
    numbers = part.detach().double()
    largest = float(numbers.abs().max())
    if largest == 0.0:
        return numbers
    scale = 2.0 ** math.ceil(math.log2(largest / LARGEST))
    scaled = numbers / scale
    exponents = torch.frexp(scaled).exponent - 1
    steps = torch.pow(2.0, (exponents.clamp(min=SMALLEST_EXPONENT) - MANTISSA_BITS).double())
    return torch.round(scaled / steps) * steps * scale


def gathered(bucket_size: int | None, by_bucket: bool) -> list[torch.Tensor]:
    """Return what a rank holds after a gather; before it, a rank has only its own shards right."""
    state = create_parallel_state(ParallelSizes())
    weights = parameters()
    layout = plan_layout([weight.numel() for weight in weights], bucket_size, num_shards=state.dp_cp.size)
    flat = Float8FlatParameters(weights, layout, state.dp_cp)
    for bucket in layout.buckets:
        start, end = bucket.shard(state.rank, state.dp_cp.size)
        flat.data[bucket.start : start] = 1.0e4
        flat.data[end : bucket.end] = 1.0e4
    if by_bucket:
        for index in reversed(range(len(layout.buckets))):
            flat.start_gather_of(index, async_op=True)
    else:
        flat.start_gather(async_op=True)
    flat.wait_for_all()
    return [weight.detach().double() for weight in weights]


@pytest.mark.parametrize(("num_ranks", "bucket_size", "by_bucket"), [(1, None, False), (2, 40, True), (3, None, False)])
def test_every_rank_has_what_rounding_in_float64_gives(
    num_ranks: int, bucket_size: int | None, by_bucket: bool
) -> None:
    expected = [
        torch.cat([rounded(part) for part in weight.chunk(number)]) for weight, number in zip(parameters(), NUM_SCALES)
    ]
    for of_rank in run_distributed(num_ranks, gathered, bucket_size, by_bucket):
        for found, right in zip(of_rank, expected, strict=True):
            assert torch.equal(found, right)


def test_one_scale_for_all_experts_would_round_small_ones_away() -> None:
    weight = parameters()[1]
    whole = rounded(weight)
    by_expert = torch.cat([rounded(part) for part in weight.chunk(3)])
    assert not whole[0].any()
    assert by_expert[0].all()
