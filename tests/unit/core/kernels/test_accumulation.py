"""Sums into memory that is there: which operations CUDA would be given, and the same sums on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.arguments import resolve_arguments
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.main_grad import main_grad_of
from megatron.core.ops.gemm import add_rows, adds_wide_products
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.sharding import ParamSpec, attach_spec, full_pieces
from megatron.training.model_setup import describe_rounded_gradients
from tests.unit.training.config.command_lines import MINIMAL

ROWS, WIDTH, LENGTH = 5, 3, 7


class Recorder(TorchDispatchMode):
    """Name the operations; products into wider sums, which a build for CPU cannot even pretend, are left out."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.refuses = refuses
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removeprefix("aten."))
        if self.names[-1].endswith("mm.dtype_out"):
            if self.refuses:
                raise RuntimeError("self and mat2 must have the same dtype")
            total, *_ = args if len(args) == 4 else (kwargs["out"],)
            assert total.dtype is kwargs["out"].dtype is args[-1] is torch.float32
            assert args[-2].dtype is args[-3].dtype is torch.bfloat16
            assert total is kwargs["out"]
            return kwargs["out"]
        assert self.names[-1] != "index_put_.default" or args[3], "equal indices must add up"
        return func(*args, **(kwargs or {}))


@contextmanager
def pretended_cuda(refuses: bool = False) -> Iterator[Recorder]:
    with FakeTensorMode(), Recorder(refuses) as recorder:
        yield recorder


def weight_gradient(fuses: bool) -> list[str]:
    """Return what two contributions to a bf16 weight's float32 gradient run, on meta tensors."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="meta"))
    attach_spec(model.weight, ParamSpec("weight", (ROWS, WIDTH), full_pieces((ROWS, WIDTH))))
    config = DistributedDataParallelConfig(gradient_accumulation_fusion=fuses)
    DistributedDataParallel(model, config, describe_parallel_state(0, 1))
    main_grad = main_grad_of(model.weight)
    assert main_grad is not None
    left = torch.empty(ROWS, LENGTH, dtype=torch.bfloat16, device="meta")
    right = torch.empty(LENGTH, WIDTH, dtype=torch.bfloat16, device="meta")
    with Recorder(refuses=False) as recorder:
        main_grad.add_matmul(left, right)
        main_grad.add_matmul(left, right)
    return [name for name in recorder.names if name != "detach.default"]


def test_a_product_is_added_to_wider_sums_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.dtype, torch.dtype, torch.device]] = []

    def can(*question: Any) -> bool:
        asked.append(question)
        return True

    monkeypatch.setattr("megatron.core.distributed.param_and_grad_buffer.adds_wide_products", can)
    assert weight_gradient(fuses=True) == ["mm.dtype_out", "addmm.dtype_out"]
    assert asked == [(torch.bfloat16, torch.float32, torch.device("meta"))]


def test_it_is_rounded_where_the_device_or_the_user_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = ["mm.default", "copy_.default", "mm.default", "add_.Tensor"]
    assert weight_gradient(fuses=True) == rounded
    monkeypatch.setattr("megatron.core.distributed.param_and_grad_buffer.adds_wide_products", lambda *_: True)
    assert weight_gradient(fuses=False) == rounded


def test_a_release_that_refuses_is_found_out() -> None:
    with pretended_cuda(refuses=True):
        assert not adds_wide_products(torch.bfloat16, torch.float32, torch.device("cuda"))


@pytest.mark.parametrize(
    ("flags", "refuses", "says"),
    [
        ("--bf16", True, True),
        ("--bf16", False, False),
        ("--bf16 --no-gradient-accumulation-fusion", True, False),
        ("--bf16 --grad-reduce-in-bf16", True, False),
        ("", True, False),
    ],
)
def test_a_run_says_that_gradients_are_rounded_against_its_flags(flags: str, refuses: bool, says: bool) -> None:
    config = resolve_arguments([*MINIMAL, *flags.split()], 1).config
    with pretended_cuda(refuses=refuses):
        line = describe_rounded_gradients(config, torch.device("cuda"))
    assert (line is not None) is says
    if line is not None:
        assert line.startswith("WARNING: the gradients of bfloat16 weights are rounded to bfloat16 before ")
    assert describe_rounded_gradients(config, torch.device("cpu")) is None


def test_only_half_precision_on_cuda_is_asked_about() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    with pretended_cuda() as recorder:
        assert adds_wide_products(torch.bfloat16, torch.float32, cuda)
        assert "addmm.dtype_out" in recorder.names, "a release may write wide products and not add them"
        recorder.names.clear()
        assert not adds_wide_products(torch.float32, torch.float32, cuda)
        assert not adds_wide_products(torch.bfloat16, torch.bfloat16, cuda)
        assert not adds_wide_products(torch.bfloat16, torch.float32, cpu)
        assert recorder.names == []


def test_rows_are_added_in_one_order_on_cuda() -> None:
    with pretended_cuda() as recorder:
        total, rows = torch.zeros(ROWS, WIDTH, device="cuda"), torch.zeros(LENGTH, WIDTH, device="cuda")
        add_rows(total, torch.zeros(LENGTH, dtype=torch.int64, device="cuda"), rows)
    assert "index_put_.default" in recorder.names
    assert not any(name.startswith(("index_add", "scatter_add")) for name in recorder.names)


def test_rows_are_added_where_they_belong() -> None:
    indices = torch.tensor([4, 1, 4, 0, 4, 2, 1])
    rows = torch.randn(LENGTH, WIDTH, dtype=torch.bfloat16)
    total = torch.ones(ROWS, WIDTH)
    add_rows(total, indices, rows)
    expected = torch.ones(ROWS, WIDTH)
    for index, row in zip(indices.tolist(), rows.float()):
        expected[index] += row
    torch.testing.assert_close(total, expected)
