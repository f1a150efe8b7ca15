"""megatron-core's shared expert, an MLP that every token passes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.device import current_device
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MLP, MLPSubmodules, TransformerConfig


class SharedExpertMLP(MLP):
    """MLP of width ``config.moe_shared_expert_intermediate_size`` with an optional gate of one number per token.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        gate: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        assert not config.add_bias_linear, "shared experts have no biases; set add_bias_linear to False"
        config = copy.copy(config)
        config.ffn_hidden_size = config.moe_shared_expert_intermediate_size
        tp: Any = None if pg_collection is None else pg_collection.tp
        super().__init__(config, submodules, tp_group=tp)
        self.use_shared_expert_gate = gate
        self.gate_weight: nn.Parameter | None = None
        if gate:
            self.gate_weight = nn.Parameter(torch.empty((1, config.hidden_size), dtype=torch.float32))
            if config.perform_initialization:
                assert config.init_method is not None
                config.init_method(self.gate_weight)
            self.gate_weight.data = self.gate_weight.data.to(config.params_dtype)
            self.gate_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @property
    def stream(self) -> torch.Stream | None:
        """The stream of the kernels that the dispatcher's communication overlaps; None without overlap."""
        if not self.config.moe_shared_expert_overlap:
            return None
        stream: torch.Stream = torch.get_device_module(current_device().torch_device).current_stream()
        return stream

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the output, with the gate applied."""
        output, _ = super().forward(hidden_states)
        if self.gate_weight is None:
            return output
        if self.gate_weight.device != hidden_states.device:
            self.gate_weight.data = self.gate_weight.data.to(hidden_states.device)
        return output * F.linear(hidden_states, self.gate_weight).sigmoid()
