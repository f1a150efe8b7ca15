"""Messages about weights and gradients that are not finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.distributed.weight_checks import BadWeightsError
from megatron.core.optimizer.clip_grads import check_weights, describe_bad_gradients
from megatron.core.process_group import single_rank_group
from tests.unit.core.distributed.toy_model import parameter

WORLD = single_rank_group(("world",))


def chunk_with(bad: list[str], **gradients: list[float]) -> Any:
    parts = [
        SimpleNamespace(spec=SimpleNamespace(name=name), gradient=torch.tensor(values))
        for name, values in gradients.items()
    ]
    return SimpleNamespace(names_of_bad_local_gradients=lambda: bad, parts=parts)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, "rank 0: p0"), (4, "rank 0: p0, p1, p2, p3"), (6, "rank 0: p0, p1, p2, p3 and 2 more")],
)
def test_four_bad_gradients_of_a_rank_are_named(count: int, expected: str) -> None:
    chunk = chunk_with([f"p{number}" for number in range(count)], p0=[float("nan")])
    assert describe_bad_gradients([chunk], WORLD, 1.0).endswith(f"; {expected}")


def test_gradients_that_only_their_sum_makes_infinite_have_no_rank() -> None:
    chunk = chunk_with([], p0=[float("inf")])
    assert describe_bad_gradients([chunk], WORLD, 1.0).endswith("but their sum is not")


def test_the_four_largest_elements_are_reported_without_the_loss_scale() -> None:
    chunk = chunk_with([], a=[8.0, -64.0], b=[128.0], c=[], d=[4.0], e=[2.0], f=[16.0])
    message = describe_bad_gradients([chunk], WORLD, 4.0)
    assert message.endswith("the largest elements are 32 in b, 16 in a, 4 in f, 1 in d")


def test_weights_are_checked_after_their_gather() -> None:
    weight = parameter("fc.weight", (2, 3), 1, torch.float32)

    def finish_param_gather() -> None:
        with torch.no_grad():
            weight[0, 1] = float("nan")

    chunk: Any = SimpleNamespace(finish_param_gather=finish_param_gather, parameters=lambda: [weight])
    with pytest.raises(BadWeightsError, match=r"fc\.weight"):
        check_weights([chunk], WORLD)
