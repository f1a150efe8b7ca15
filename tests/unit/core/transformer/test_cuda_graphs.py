"""What a graph records has run before in the same form: CUDA compiles nothing while it records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.core.errors import ConfigurationError
from megatron.core.main_grad import MainGrad, attach_main_grad
from megatron.core.ops import triton_support
from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.cuda_graphs import GraphedLayers
from tests.harness.graph_stand_in import RerunBackend
from tests.harness.toy_model import make_model
from tests.unit.core.ops.interpreted import needs_triton

pytestmark = needs_triton
Specialization = tuple[object, ...]
NUM_WARMUP_STEPS = 2


class Launches(RerunBackend):
    """Keep the specializations of programs that are launched, those within a graph apart; nothing is computed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outside: set[Specialization] = set()
        self.inside: set[Specialization] = set()
        self.now = self.outside

    def capture(self, work: Callable[[], Any]) -> Any:
        def recorded() -> Any:
            self.now = self.inside
            try:
                return work()
            finally:
                self.now = self.outside

        return super().capture(recorded)

    def apart(self) -> Launches:
        # One slot is enough: a micro-batch ends before the next begins.
        return self

    def launch(self, program: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        def kind_of(argument: Any) -> tuple[object, ...]:
            if isinstance(argument, torch.Tensor):
                return argument.dtype, argument.data_ptr() % 16 == 0
            return type(argument), argument == 1, isinstance(argument, int) and argument % 16 == 0

        named = ((name, kind_of(each) if isinstance(each, torch.Tensor) else each) for name, each in options.items())
        kinds = tuple(map(kind_of, arguments))
        self.now.add((program.__module__, program.__name__, kinds, tuple(sorted(named))))


def test_compiled_layers_keep_the_saved_tensors_that_a_captured_backward_pass_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's compiled backward pass frees donated buffers, and raises if the graph of autograd is retained."""
    monkeypatch.setattr("torch._functorch.config.donated_buffer", True)
    GraphedLayers(Launches(), NUM_WARMUP_STEPS)
    assert torch._functorch.config.donated_buffer is False


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"openai_gelu": True},
        {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": True},
        {"openai_gelu": True, "recompute_granularity": "full", "recompute_method": "uniform"},
        {
            "hybrid_override_pattern": "MGKP",
            "mamba_state_dim": 4,
            "mamba_head_dim": 7,
            "mamba_num_groups": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 4,
        },
    ],
    ids=["gpt2", "gated", "recompute", "recurrent"],
)
def test_programs_are_recorded_as_they_have_run(settings: dict[str, Any], num_microbatches: int) -> None:
    from triton.runtime.jit import JITFunction

    num_layers = len(settings.get("hybrid_override_pattern", "MG"))
    model = make_model(single_rank_group(), num_layers=num_layers, **settings)
    main_grads = []
    for parameter in model.parameters():
        main_grads.append(MainGrad(torch.zeros_like(parameter)))
        attach_main_grad(parameter, main_grads[-1])
    backend, block = Launches(), model.decoder
    block.graphs = GraphedLayers(backend, NUM_WARMUP_STEPS)
    with (
        patch.object(JITFunction, "run", lambda *args, **options: backend.launch(*args, **options)),
        patch.object(triton_support, "_DEVICE", "cpu"),
        patch.object(triton_support, "triton_works", lambda: True),
    ):
        for _ in range(NUM_WARMUP_STEPS + 1):
            for main_grad in main_grads:
                main_grad.reset()
            block.graphs.begin_step()
            for _ in range(num_microbatches):
                x = torch.randn(8, 3, 28, requires_grad=True)
                block(x, CAUSAL, None).hidden.sum().backward()
    assert len(backend.graphs) == 2 * num_layers
    assert any("column_sums" in str(specialization) for specialization in backend.inside)
    assert backend.inside <= backend.outside


@pytest.mark.parametrize(
    "pattern",
    [AttentionPattern(document_ids=torch.zeros(3, 8)), AttentionPattern(mask=torch.ones(3, 1, 8, 8, dtype=torch.bool))],
    ids=["documents", "mask"],
)
def test_attention_that_changes_from_one_micro_batch_to_the_next_is_rejected(pattern: AttentionPattern) -> None:
    block = make_model(single_rank_group(), num_layers=2).decoder
    block.graphs = GraphedLayers(Launches(), 0)
    block.graphs.begin_step()
    with pytest.raises(ConfigurationError, match="attention depends on document boundaries or a mask"):
        block(torch.randn(8, 3, 28, requires_grad=True), pattern, None)
