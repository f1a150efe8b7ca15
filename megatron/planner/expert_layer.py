"""A layer of experts on one rank, where tokens spread evenly over the experts: its rows, and what it keeps and sends.

A rank routes a part of its tensor-parallel group's tokens. Each of them has a choice for each of its experts, and for
each rank that cuts one: as many choices go out as come in. Names are those of docs/mixture_of_experts.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.parallel_sizes import ParallelSizes

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_INDEX = 8
_ROUTER_BYTES = {None: 0, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class ExpertLayer:
    """Hold what a layer of experts has to do for one micro-batch on one rank.

    ``tokens`` are those of the tensor-parallel group, of so many ``sequences``, and ``element`` the bytes of a number
    of the model's type.
    """

    model: TransformerConfig
    tokens: int
    sequences: int
    element: int

    @functools.cached_property
    def sizes(self) -> ParallelSizes:
        """Return the grid, of which only what a model copy spans counts."""
        return self.model.parallel_sizes

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that hold one copy of all experts."""
        return self.sizes.ep * self.sizes.expert_tp

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes along which these ranks lie."""
        return ("ep", "etp") if self.sizes.has_expert_grid else ("tp",)

    @property
    def rows(self) -> int:
        """Return the rows that a rank routes, empty ones among them."""
        return -(-self.tokens // self.sizes.tp)

    @property
    def choices(self) -> int:
        """Return the rows that a rank sends, and is given in turn."""
        factor = min(self.model.moe_expert_capacity_factor or 1.0, 1.0)
        return round(self.rows * self.model.moe_router_topk * self.sizes.expert_tp * factor)

    @property
    def given(self) -> int:
        """Return the rows that the experts of a rank compute, padding included."""
        model, factor = self.model, self.model.moe_expert_capacity_factor
        if factor is None or not model.moe_pad_expert_input_to_capacity:
            return self.choices
        whole = self.tokens * self.sizes.cp
        capacity = min(math.ceil(whole * model.moe_router_topk / self.num_experts * factor), whole)
        return self.num_ranks * min(capacity, self.rows) * self.num_local

    @property
    def num_experts(self) -> int:
        """Return the number of experts of the layer."""
        assert self.model.num_experts is not None, "a dense layer was asked for its experts"
        return self.model.num_experts

    @property
    def num_local(self) -> int:
        """Return how many of the experts are on this rank, whole or cut."""
        return self.num_experts // self.sizes.ep

    @property
    def width(self) -> int:
        """Return the width of what this rank has of an expert."""
        return self.model.moe_ffn_hidden_size // self.sizes.expert_tp

    @property
    def shared_width(self) -> int:
        """Return the width of this rank's part of the shared expert, 0 for none."""
        return (self.model.moe_shared_expert_intermediate_size or 0) // self.sizes.tp

    @property
    def gates(self) -> int:
        """Return how many times its width an expert's first product gives."""
        return 2 if self.model.is_gated else 1

    @property
    def wide(self) -> int:
        """Return the bytes of a score."""
        return max(self.router_element, 4)

    @property
    def router_element(self) -> int:
        """Return the bytes of an element of the router's product."""
        return max(self.element, _ROUTER_BYTES[self.model.moe_router_dtype])

    @property
    def weight_element(self) -> int:
        """Return the bytes of the weight of an expert's output."""
        return self.element if self.model.moe_router_dtype is None else self.wide

    @property
    def at_work(self) -> int:
        """Return the numbers at work in the backward pass beside what the layer still keeps."""
        h, width = self.model.hidden_size, self.width
        # Gradients of what came back, three times while they are sorted, when that itself has gone; then of products.
        copies = 2 if self._is_sent and self.num_ranks > 1 else 1
        experts = max(copies * self.choices * h, self.given * width, self.given * (self.gates * width - h))
        return max(experts, self.tokens * self.shared_width * (self.gates + 1))

    def kept(self, *, shared_keeps: bool = True) -> Mapping[str, int]:
        """Return by part what the layer keeps beside its input.

        ``shared_keeps`` says that the shared expert's second product keeps its input as it came.
        """
        h, e, modules = self.model.hidden_size, self.element, self.model.recomputed_modules
        shared = self.tokens * self.shared_width * (self.gates + shared_keeps) * e
        if "shared_experts" in modules:
            shared = 0
        elif self.model.moe_shared_expert_gate:
            rows = self.rows if self.model.sequence_parallel else self.tokens
            shared += rows * (h + 1) * e
        return {
            "router": self._router(),
            "experts' inputs": self.given * h * self._keeps("linear_fc1") * e,
            "experts": self.given
            * self.width
            * (self.gates + ("moe_act" not in modules) * self._keeps("linear_fc2"))
            * e,
            "experts' adapters": self.given * self._adapter_width * e,
            "experts' outputs": self.choices * h * e,
            "shared expert": shared,
            "places of tokens": self._places(),
        }

    def _keeps(self, name: str) -> bool:
        """Return whether the experts' product of this name keeps its input: for a gradient of weights or adapters."""
        return not self.model.lora_rank or name in self.model.adapted_parts

    @property
    def _adapter_width(self) -> int:
        """Return the width of what the experts' adapters keep beside their inputs: their narrow products."""
        if not self.model.lora_rank:
            return 0
        parts = (self.model.adapted_parts.get(name, ()) for name in ("linear_fc1", "linear_fc2"))
        return self.model.lora_rank * sum(map(len, parts))

    def _router(self) -> int:
        """Return what scores, weights and losses keep."""
        model, rows, k = self.model, self.rows, self.model.moe_router_topk
        of_scores, of_weights = rows * self.num_experts * self.wide, rows * k * self.wide
        kept = 0
        if self.router_element != self.element:
            kept += (rows + self.num_experts) * model.hidden_size * self.router_element
        is_softmax = model.moe_router_score_function == "softmax"
        if is_softmax and not model.moe_router_pre_softmax:
            kept += of_weights
        else:
            kept += of_scores
            kept += 0 if is_softmax or k == 1 else of_weights + rows * self.wide
        kept += (rows * k * self.sizes.expert_tp if self._is_sent else self._gathered * k) * self.weight_element
        if model.moe_aux_losses:
            kept += of_scores + (0 if is_softmax else rows * self.wide)
        if model.moe_z_loss_coeff:
            kept += of_scores + rows * self.wide
        return kept

    def _places(self) -> int:
        """Return what says where rows go: whole numbers."""
        choices = self.rows * self.model.moe_router_topk
        places = choices + (self.rows if self.model.moe_aux_losses else 0)
        if not self._is_sent:
            return _INDEX * (places + self._gathered * self.model.moe_router_topk + self.choices)
        places += choices * self.sizes.expert_tp + self.choices
        return _INDEX * (places + (2 * self.choices if self.num_ranks > 1 else 0))

    @property
    def _is_sent(self) -> bool:
        return self.model.moe_token_dispatcher_type == "alltoall"

    @property
    def _gathered(self) -> int:
        return self.rows * self.num_ranks

    @property
    def moved_rows(self) -> tuple[int, int]:
        """Return how many times the choices are read or written between products and exchanges, forward and back."""
        return (9, 18) if self._is_sent and self.num_ranks > 1 else (5, 10)
