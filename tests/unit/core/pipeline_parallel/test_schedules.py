"""megatron-core's helpers of schedules: freed outputs, shapes between stages, numbers of warmup passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.process_group import Group


def test_a_freed_output_still_starts_a_backward_pass() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    output = weight * 2.0
    schedules.deallocate_output_tensor(output, deallocate_pipeline_outputs=False)
    assert output.nelement() == 12
    schedules.deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
    assert output.nelement() == 1
    gradient = torch.randn(3, 4)
    schedules.custom_backward(output, gradient)
    assert torch.equal(weight.grad, 2.0 * gradient)  # type: ignore[arg-type]
    schedules.custom_backward((weight.detach().requires_grad_() * 3.0).sum(), None)
    schedules.deallocate_output_tensor(None, deallocate_pipeline_outputs=True)


def test_outputs_that_cannot_be_freed_or_differentiated_are_rejected() -> None:
    with pytest.raises(AssertionError, match="view"):
        schedules.deallocate_output_tensor(torch.ones(4)[1:], True)
    with pytest.raises(AssertionError, match="found list"):
        schedules.deallocate_output_tensor([torch.ones(4)], True)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="4 elements"):
        schedules.custom_backward(torch.ones(4, requires_grad=True) * 2, torch.ones(4))


@pytest.mark.parametrize(
    ("pp", "virtual", "name"),
    [
        (1, None, "forward_backward_no_pipelining"),
        (1, 2, "forward_backward_no_pipelining"),
        (2, None, "forward_backward_pipelining_without_interleaving"),
        (4, 2, "forward_backward_pipelining_with_interleaving"),
    ],
)
def test_the_function_follows_from_the_sizes(pp: int, virtual: int | None, name: str) -> None:
    assert get_forward_backward_func(pp, virtual) is getattr(schedules, name)


@pytest.mark.parametrize(
    ("sequence_parallel", "decoder_seq_length", "variable", "expected"),
    [
        (False, None, False, [(16, 3, 8)]),
        (True, None, False, [(4, 3, 8)]),
        (True, 48, False, [(6, 3, 8)]),
        (True, None, True, [()]),
    ],
)
def test_shapes_are_of_this_ranks_part_of_the_sequence(
    sequence_parallel: bool, decoder_seq_length: int | None, variable: bool, expected: list[tuple[int, ...]]
) -> None:
    config = SimpleNamespace(sequence_parallel=sequence_parallel, variable_seq_lengths=variable, hidden_size=8)
    shapes = schedules.get_tensor_shapes(
        seq_length=32,
        micro_batch_size=3,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_group=SimpleNamespace(size=lambda: 4),
        cp_group=SimpleNamespace(size=lambda: 2),
    )
    assert shapes == expected


def make_model(**fields: Any) -> nn.Linear:
    model = nn.Linear(4, 4)
    model.config = ModelParallelConfig(**fields)  # type: ignore[assignment]
    model.set_input_tensor = lambda input_tensor: None  # type: ignore[assignment]
    return model


def test_autocast_is_of_the_device_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    model = make_model(enable_autocast=True, autocast_dtype=torch.bfloat16)
    output, _ = schedules.forward_step(
        lambda iterator, stage: (stage(torch.ones(2, 4)), None), None, model, 1, None, [], model.config, 1
    )
    assert output.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["defer_embedding_wgrad_compute", "hybrid_context_parallel"])
def test_fields_that_would_have_no_effect_are_rejected(name: str) -> None:
    model = make_model()
    setattr(model.config, name, True)
    with pytest.raises(RuntimeError, match=f"do not support {name}=True"):
        schedules.forward_backward_no_pipelining(
            forward_step_func=lambda iterator, stage: (stage(torch.ones(2, 4)), None),
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=4,
            micro_batch_size=2,
        )


# From get_pp_rank_microbatches of megatron-core 0.16.1 with its groups' sizes and ranks replaced by these numbers.
WARMUP = {
    (1, 0, 4, 1, None): (4, False, 0, 4),
    (4, 0, 8, 1, None): (8, False, 3, 5),
    (4, 3, 8, 1, None): (8, False, 0, 8),
    (4, 0, 2, 1, None): (2, True, 2, 0),
    (4, 1, 8, 2, 4): (16, False, 8, 8),
    (4, 0, 8, 2, 5): (16, False, 11, 5),
    (2, 0, 4, 3, 2): (12, False, 6, 6),
    (4, 0, 4, 2, 4): (8, True, 8, 0),
}


@pytest.mark.parametrize("case", WARMUP)
def test_warmup_passes_are_counted(case: tuple[int, int, int, int, int | None]) -> None:
    pp, rank, num_microbatches, chunks, group_size = case
    communicator = SimpleNamespace(pp=Group(("pp",), tuple(range(pp)), rank))
    counted = schedules.get_pp_rank_microbatches(
        num_microbatches,
        chunks,
        group_size,
        p2p_communicator=communicator,  # type: ignore[arg-type]
    )
    assert counted == WARMUP[case]


def test_the_schedule_table_lists_chunks_by_groups_of_micro_batches() -> None:
    assert schedules.get_schedule_table(5, 2, 3) == [
        *((microbatch, chunk) for chunk in (0, 1) for microbatch in (0, 1, 2)),
        *((microbatch, chunk) for chunk in (0, 1) for microbatch in (3, 4)),
    ]
