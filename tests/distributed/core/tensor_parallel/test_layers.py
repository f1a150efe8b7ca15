"""megatron-core's layers, regions, losses and RNG states over ranks, against one process and plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core import parallel_state, tensor_parallel
from megatron.core.errors import ConfigurationError
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer import TransformerConfig
from tests.harness.distributed import run_distributed


def config(tp: int, **fields: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        **{"use_cpu_initialization": True, "params_dtype": torch.float64, **fields},
    )


def begin(tp: int, seed: int = 3) -> int:
    """Initialize the groups and all RNG states; return the tensor-parallel rank."""
    parallel_state.initialize_model_parallel(tp)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.manual_seed(seed)
    return parallel_state.get_tensor_model_parallel_rank()


def whole(part: torch.Tensor | None, dim: int) -> torch.Tensor | None:
    """Return the tensor-parallel ranks' parts joined along a dim."""
    if part is None:
        return None
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def two_layers(tp: int, sequence_parallel: bool, **fields: Any) -> dict[str, torch.Tensor | None]:
    """Return the output and all gradients of a column-parallel and a row-parallel layer, joined over the ranks."""
    rank = begin(tp)
    settings = config(tp, sequence_parallel=sequence_parallel, **fields)
    init_method = settings.init_method
    fc1 = tensor_parallel.ColumnParallelLinear(8, 16, config=settings, init_method=init_method)
    fc2 = tensor_parallel.RowParallelLinear(
        16, 8, config=settings, init_method=init_method, bias=True, input_is_parallel=True, skip_bias_add=True
    )
    torch.manual_seed(17)
    for bias in (fc1.bias, fc2.bias):
        assert not bias.any()
    full = torch.randn(4, 3, 8, dtype=torch.float64)
    x = (full.chunk(tp)[rank] if sequence_parallel else full).clone().requires_grad_()
    hidden, no_bias = fc1(x)
    output, bias = fc2(F.gelu(hidden))
    assert no_bias is None
    assert bias is fc2.bias
    (output + bias).pow(2).sum().backward()
    if sequence_parallel:
        # The bias saw this rank's part of the sequence, which its attribute says.
        assert bias.sequence_parallel
        dist.all_reduce(bias.grad, group=parallel_state.get_tensor_model_parallel_group())
        output, x_grad = whole(output, 0), whole(x.grad, 0)
    else:
        x_grad = x.grad
    found = {
        "output": output.detach(),
        "x": x_grad,
        "fc1": whole(fc1.weight, 0),
        "fc1 grad": whole(fc1.weight.grad, 0),
        "fc1 bias": whole(fc1.bias.grad, 0),
        "fc2": whole(fc2.weight, 1),
        "fc2 grad": whole(fc2.weight.grad, 1),
        "fc2 bias": bias.grad,
    }
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.default(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_two_layers_are_those_of_one_rank(tp: int, sequence_parallel: bool) -> None:
    (alone,) = run_distributed(1, two_layers, 1, False)
    for found in run_distributed(tp, two_layers, tp, sequence_parallel):
        assert found.keys() == alone.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-12, atol=1e-14)


def initial_weights(tp: int, on_cpu: bool, stride: int) -> dict[str, Any]:
    begin(tp)
    settings = config(tp, use_cpu_initialization=on_cpu, params_dtype=torch.float32)
    layer = tensor_parallel.ColumnParallelLinear(
        6, 8, config=settings, init_method=settings.init_method, stride=stride, keep_master_weight_for_test=True
    )
    found = {
        "weight": layer.weight.detach(),
        "master": layer.master_weight,
        "attributes": [
            (each.tensor_model_parallel, each.partition_dim, each.partition_stride, each.allreduce)
            for each in layer.parameters()
        ],
        "keys": sorted(layer.state_dict()),
        "next": torch.rand(()).item(),
    }
    state = {name: value for name, value in layer.state_dict().items() if name != "_extra_state"}
    layer.load_state_dict(state)
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("stride", [1, 2])
def test_initial_values_on_the_cpu_are_shards_of_one_weight(stride: int) -> None:
    torch.manual_seed(3)
    expected = torch.empty(8, 6).normal_(0.0, 0.02)
    parts = expected.view(stride, 2, 8 // (2 * stride), 6)
    for rank, found in enumerate(run_distributed(2, initial_weights, 2, True, stride)):
        assert torch.equal(found["master"], expected)
        assert torch.equal(found["weight"], parts[:, rank].reshape(4, 6))
        assert found["attributes"] == [(True, 0, stride, True)] * 2
        assert found["keys"] == ["_extra_state", "bias", "weight"]


def test_initial_values_on_the_device_differ_by_rank_and_leave_the_default_generator() -> None:
    first, second = run_distributed(2, initial_weights, 2, False, 1)
    for rank, found in enumerate((first, second)):
        generator = torch.Generator().manual_seed(3 + 2718 + rank)
        assert torch.equal(found["weight"], torch.empty(4, 6).normal_(0.0, 0.02, generator=generator))
        assert found["master"] is None
    torch.manual_seed(3)
    assert first["next"] == second["next"] == torch.rand(()).item()


def layer_options() -> None:
    """Check arguments of the layers and of forward on two ranks."""
    rank = begin(2)
    settings = config(2)
    build = {"config": settings, "init_method": settings.init_method}
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    gathering = tensor_parallel.ColumnParallelLinear(8, 16, gather_output=True, skip_bias_add=True, **build)
    output, bias = gathering(x)
    assert (output.shape, bias.shape) == ((4, 3, 16), (8,))
    part, _ = gathering(x, runtime_gather_output=False)
    assert torch.equal(part, output[..., 8 * rank : 8 * rank + 8])

    without = tensor_parallel.ColumnParallelLinear(8, 16, bias=False, skip_weight_param_allocation=True, **build)
    assert list(without.parameters()) == []
    weight = gathering.weight.detach().clone().requires_grad_()
    assert torch.equal(without(x, weight=weight)[0], part)
    with pytest.raises(RuntimeError, match="weight was not supplied"):
        without(x)
    with pytest.raises(RuntimeError, match=r"shape is \(16, 8\), not \(8, 8\)"):
        without(x, weight=torch.empty(16, 8, dtype=torch.float64))

    row = {"bias": False, "skip_bias_add": False}
    whole_input = tensor_parallel.RowParallelLinear(16, 8, input_is_parallel=False, **row, **build)
    torch.manual_seed(5)
    wide = torch.randn(4, 16, dtype=torch.float64)
    expected = wide @ whole(whole_input.weight, 1).t()
    torch.testing.assert_close(whole_input(wide)[0], expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="`input_is_parallel` must be `True`"):
        tensor_parallel.RowParallelLinear(
            16, 8, input_is_parallel=False, **row, **{**build, "config": config(2, sequence_parallel=True)}
        )
    with pytest.raises(AssertionError, match="not divisible by 2"):
        tensor_parallel.ColumnParallelLinear(8, 7, **build)
    with pytest.raises(ConfigurationError, match="gradient_accumulation_fusion=True is unsupported"):
        tensor_parallel.ColumnParallelLinear(8, 8, **{**build, "config": config(2, gradient_accumulation_fusion=True)})

    # The token dispatcher sums what an expert layer leaves in parts, and the gradient of its input.
    expert = tensor_parallel.ColumnParallelLinear(8, 8, is_expert=True, bias=False, **build)
    entered = x.clone().requires_grad_()
    expert(entered)[0].sum().backward()
    torch.testing.assert_close(entered.grad, expert.weight.detach().sum(dim=0).expand_as(x))
    alone = tensor_parallel.ColumnParallelLinear(8, 8, bias=False, disable_grad_reduce=True, **build)
    entered = x.clone().requires_grad_()
    alone(entered)[0].sum().backward()
    torch.testing.assert_close(entered.grad, alone.weight.detach().sum(dim=0).expand_as(x))


def test_arguments_of_the_layers() -> None:
    run_distributed(2, layer_options)


def linear_functions() -> None:
    rank = begin(2)
    weight = torch.ones(4, 8)
    for frozen in (True, False):
        x = torch.eye(8).requires_grad_()
        own = weight.clone().requires_grad_(not frozen)
        if frozen:
            part = tensor_parallel.linear_with_frozen_weight(x, own, torch.zeros(4), False, True, False, None)
        else:
            part = tensor_parallel.linear_with_grad_accumulation_and_async_allreduce(x, own, None, False, True, False)
        output = mappings.gather_from_tensor_model_parallel_region(part)
        output.sum().backward()
        assert torch.equal(output, torch.ones(8, 8))
        assert torch.equal(x.grad, 8 * torch.ones(8, 8))
        assert (own.grad is None) == frozen
    with pytest.raises(ConfigurationError, match="grad_output_buffer"):
        tensor_parallel.linear_with_grad_accumulation_and_async_allreduce(x, own, None, False, True, False, [])

    parameter = torch.nn.Parameter(torch.zeros(2))
    assert tensor_parallel.param_is_not_tensor_parallel_duplicate(parameter) == (rank == 0)
    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 1, 2)
    assert tensor_parallel.param_is_not_tensor_parallel_duplicate(parameter)
    with pytest.raises(AssertionError, match="already has the attributes"):
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 1, 2)
    copied, fresh = torch.zeros(2), torch.zeros(2)
    tensor_parallel.copy_tensor_model_parallel_attributes(copied, parameter)
    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(fresh)
    assert (copied.partition_dim, copied.partition_stride) == (1, 2)
    assert (fresh.tensor_model_parallel, fresh.partition_dim, fresh.partition_stride) == (False, -1, 1)


def test_linear_functions_and_attributes() -> None:
    run_distributed(2, linear_functions)


def embeddings() -> None:
    begin(2)
    settings = config(2)
    tokens = torch.tensor([[0, 5, 7, 2], [3, 3, 1, 6]])
    for scatters in (False, True):
        torch.manual_seed(4)
        table = tensor_parallel.VocabParallelEmbedding(
            8, 6, init_method=settings.init_method, config=settings, reduce_scatter_embeddings=scatters
        )
        rank = parallel_state.get_tensor_model_parallel_rank()
        assert (table.vocab_start_index, table.vocab_end_index) == (4 * rank, 4 * rank + 4)
        rows = F.embedding(tokens, whole(table.weight, 0))
        expected = rows.transpose(0, 1).chunk(2)[rank] if scatters else rows
        assert torch.equal(table(tokens), expected)
    with pytest.raises(AssertionError, match="7 is not divisible by 2"):
        tensor_parallel.VocabParallelEmbedding(7, 6, init_method=settings.init_method, config=settings)


def test_embeddings_keep_the_order_of_tokens_or_scatter_the_sequence() -> None:
    run_distributed(2, embeddings)


def losses_and_gradients(tp: int, smoothing: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    rank = begin(tp)
    torch.manual_seed(6)
    full, target = torch.randn(5, 3, 8, dtype=torch.float64).to(dtype), torch.arange(15).view(5, 3) % 8
    logits = full.chunk(tp, dim=-1)[rank].clone().requires_grad_()
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits, target, smoothing)
    losses.backward(torch.linspace(0.5, 2.0, 15, dtype=losses.dtype).view(5, 3))
    assert torch.equal(logits, full.chunk(tp, dim=-1)[rank])
    gradient = whole(logits.grad, -1)
    parallel_state.destroy_model_parallel()
    return losses.detach(), gradient


@pytest.mark.parametrize(("smoothing", "dtype"), [(0.0, torch.float64), (0.2, torch.float64), (0.0, torch.bfloat16)])
def test_cross_entropy_is_torchs(smoothing: float, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    logits = torch.randn(5, 3, 8, dtype=torch.float64).to(dtype).requires_grad_()
    # torch smooths over all labels, the target included; here only the other labels share the probability.
    expected = F.cross_entropy(
        logits.to(torch.promote_types(dtype, torch.float32)).permute(0, 2, 1),
        torch.arange(15).view(5, 3) % 8,
        label_smoothing=smoothing * 8 / 7,
        reduction="none",
    )
    expected.backward(torch.linspace(0.5, 2.0, 15, dtype=expected.dtype).view(5, 3))
    tolerances = {"rtol": 1e-12, "atol": 1e-13} if dtype is torch.float64 else {"rtol": 1e-2, "atol": 1e-2}
    for losses, gradient in run_distributed(2, losses_and_gradients, 2, smoothing, dtype):
        assert losses.dtype == expected.dtype
        torch.testing.assert_close(losses, expected.detach(), **tolerances)
        torch.testing.assert_close(gradient, logits.grad, **tolerances)


def more_regions() -> None:
    """Check the regions that only megatron-core's code uses, on two ranks with different values."""
    rank = begin(2)
    group = parallel_state.get_tensor_model_parallel_group()
    own, both = torch.full((4, 6), 1.0 + rank), torch.full((4, 6), 3.0)
    for given in (None, group):
        assert torch.equal(mappings.reduce_from_tensor_model_parallel_region(own.clone(), given), both)
    columns = mappings.all_gather_last_dim_from_tensor_parallel_region(own)
    assert torch.equal(columns, torch.cat([torch.ones(4, 6), 2 * torch.ones(4, 6)], dim=1))
    assert torch.equal(mappings.reduce_scatter_last_dim_to_tensor_parallel_region(own), both[:, :3])

    x = own.clone().requires_grad_()
    mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 6))
    sizes = [1, 3]
    rows = mappings.gather_from_sequence_parallel_region(own[: sizes[rank]], output_split_sizes=sizes)
    assert rows[:, 0].tolist() == [1.0, 2.0, 2.0, 2.0]
    parts = mappings.reduce_scatter_to_sequence_parallel_region(own, input_split_sizes=sizes)
    assert torch.equal(parts, both[: sizes[rank]])

    sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    x = (own + 10 * torch.arange(4)[:, None]).requires_grad_()
    exchanged = mappings.all_to_all(group, x, received, sent)
    assert exchanged[:, 0].tolist() == ([1.0, 2.0, 12.0] if rank == 0 else [11.0, 21.0, 31.0, 22.0, 32.0])
    exchanged.pow(2).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())

    tokens = torch.arange(4.0)[:, None] + 100 * torch.arange(6) + 4 * rank  # token number + 100 x column
    by_hidden = mappings.all_to_all_sp2hp(tokens)
    assert torch.equal(by_hidden, torch.arange(8.0)[:, None] + 100 * torch.arange(3 * rank, 3 * rank + 3))
    assert torch.equal(mappings.all_to_all_hp2sp(by_hidden), tokens)

    class Context:
        group = parallel_state.get_tensor_model_parallel_group()

    gradient, nothing = mappings._CopyToModelParallelRegion.backward(Context(), own)
    assert torch.equal(gradient, both)
    assert nothing is None
    assert torch.equal(mappings._ScatterToModelParallelRegion.symbolic(None, own, group), own[:, :3])
    with pytest.raises(ConfigurationError, match="not divisible by tensor-parallel size 2"):
        mappings.reduce_scatter_to_sequence_parallel_region(own[:3])


def test_regions_of_megatron_core() -> None:
    run_distributed(2, more_regions)


def splits_and_broadcasts() -> None:
    rank = begin(2)
    x = torch.arange(12.0).view(3, 4)
    halves = tensor_parallel.split_tensor_along_last_dim(x, 2, contiguous_split_chunks=True)
    assert [half.tolist() for half in halves] == [x[:, :2].tolist(), x[:, 2:].tolist()]
    assert all(half.is_contiguous() for half in halves)
    view, copy = (tensor_parallel.split_tensor_into_1d_equal_chunks(x, new) for new in (False, True))
    assert view.tolist() == copy.tolist() == list(range(6 * rank, 6 * rank + 6))
    assert view.data_ptr() == x.data_ptr() + 24 * rank != copy.data_ptr()
    assert torch.equal(tensor_parallel.gather_split_1d_tensor(view.view(2, 3)), x.view(-1))
    assert tensor_parallel.VocabUtility.vocab_range_from_global_vocab_size(10, rank, 2) == (5 * rank, 5 * rank + 5)
    with pytest.raises(AssertionError, match="4 is not divisible by 3"):
        tensor_parallel.split_tensor_along_last_dim(x, 3)

    data = {"text": torch.arange(6).view(2, 3), 1: torch.arange(2)} if rank == 0 else None
    found = tensor_parallel.broadcast_data(["text", 1], data, torch.int64)
    assert {key: value.tolist() for key, value in found.items()} == {"text": [[0, 1, 2], [3, 4, 5]], 1: [0, 1]}


def test_splits_and_broadcasts() -> None:
    run_distributed(2, splits_and_broadcasts)


def random_states() -> dict[str, list[float]]:
    begin(2, seed=40)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    drawn = {"default": torch.rand(2).tolist()}
    for name in ("model-parallel-rng", "data-parallel-rng", "expert-parallel-rng"):
        with tracker.fork(name):
            drawn[name] = torch.rand(2).tolist()
    drawn["default again"] = torch.rand(2).tolist()
    with tracker.fork():
        drawn["model-parallel-rng again"] = torch.rand(2).tolist()
    return drawn


def test_states_of_ranks_are_equal_or_different_as_their_names_say() -> None:
    first, second = run_distributed(2, random_states)
    torch.manual_seed(40)
    expected = torch.rand(4).tolist()
    for found in (first, second):
        assert found["default"] + found["default again"] == expected
        assert found["data-parallel-rng"] == expected[:2]
    for name, seed in (("model-parallel-rng", 40 + 2718), ("expert-parallel-rng", 40 + 1024)):
        for rank, found in enumerate((first, second)):
            generator = torch.Generator().manual_seed(seed + rank)
            assert found[name] == torch.rand(2, generator=generator).tolist()
    assert first["model-parallel-rng again"] != first["model-parallel-rng"]


def recomputed(recomputes: bool) -> dict[str, Any]:
    """Return what a function with dropout from two RNG states gives, and its gradients."""
    begin(2, seed=12)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    weight = torch.randn(4, 4, requires_grad=True)

    def function(x: torch.Tensor, factor: float, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with tracker.fork():
            kept = F.dropout(x @ weight, 0.5)
        return kept * factor, F.dropout(y, 0.5)

    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    entered = x * 1
    outputs = tensor_parallel.checkpoint(function, True, entered, 2.0, y) if recomputes else function(entered, 2.0, y)
    if recomputes:
        # Each rank keeps its half of the first argument.
        assert entered.shape == (8,)
    outputs[0].pow(2).sum().backward()
    return {"outputs": outputs[0].detach(), "x": x.grad, "weight": weight.grad, "next": torch.rand(2)}


def test_recomputation_restores_the_random_numbers() -> None:
    plain, again = (run_distributed(2, recomputed, recomputes) for recomputes in (False, True))
    for expected, found in zip(plain, again, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(plain[0]["outputs"], plain[1]["outputs"])


def test_layers_name_the_group_that_is_missing() -> None:
    assert layers.VocabUtility is tensor_parallel.VocabUtility
    for message in run_distributed(2, message_without_groups):
        assert message.startswith("tensor model parallel group is not initialized")


def message_without_groups() -> str:
    settings = config(2)
    with pytest.raises(AssertionError) as caught:
        tensor_parallel.ColumnParallelLinear(8, 8, config=settings, init_method=settings.init_method)
    return str(caught.value)


def attributes_without_initialization() -> list[tuple[bool, int, int]]:
    """Return the attributes of the weights of uninitialized layers on two ranks."""
    begin(2)
    settings = config(2, perform_initialization=False)
    init_method = settings.init_method
    embedding = tensor_parallel.VocabParallelEmbedding(16, 8, init_method=init_method, config=settings)
    fc1 = tensor_parallel.ColumnParallelLinear(8, 16, config=settings, init_method=init_method)
    fc2 = tensor_parallel.RowParallelLinear(
        16, 8, config=settings, init_method=init_method, bias=True, input_is_parallel=True, skip_bias_add=True
    )
    weights = [layer.weight for layer in (embedding, fc1, fc2)]
    return [(w.tensor_model_parallel, w.partition_dim, w.partition_stride) for w in weights]


def test_uninitialized_layers_have_the_attributes_of_their_shards() -> None:
    for found in run_distributed(2, attributes_without_initialization):
        assert found == [(True, 0, 1), (True, 0, 1), (True, 1, 1)]
