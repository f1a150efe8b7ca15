"""A layer of experts on one rank, where tokens spread evenly over the experts: its rows, and what it keeps and sends.

A rank routes a part of its tensor-parallel group's tokens. Each of them has a choice for each of its experts, and for
each rank that cuts one: as many choices go out as come in. Names are those of docs/mixture_of_experts.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.parallel_sizes import ParallelSizes

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

Add = Callable[[str, tuple[str, ...], int, int], None]
"""Add so many communications: operation, axes, bytes, count."""

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
    def num_weights(self) -> int:
        """Return the weights of this rank's experts."""
        return self.num_local * self.model.hidden_size * self.width * (self.gates + 1)

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

    def keeps_input(self, *, shared_keeps: bool = True) -> bool:
        """Return whether the layer's input is kept as it came: by the router, or by the shared expert.

        ``shared_keeps`` says that the shared expert's first product would keep it.
        """
        model = self.model
        of_shared = shared_keeps or model.moe_shared_expert_gate or "shared_experts" in model.recomputed_modules
        of_router = self.router_element == self.element and not model.lora_rank
        return of_router or (self.shared_width > 0 and of_shared)

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

    def add_traffic(self, add: Add, forward: int, ended: int, backward: int) -> None:
        """Add what so many forward and backward passes send, the shared expert's products left out.

        Of the forward passes only ``ended`` go on to where every rank has all tokens again.
        """
        self._add_losses(add, forward)
        model, sizes = self.model, self.sizes
        hidden = self.rows * model.hidden_size * self.element
        if sizes.tp > 1 and not model.sequence_parallel:
            # What every rank routed is gathered; back go the gradients of what was cut.
            add("all_gather", ("tp",), hidden * sizes.tp, ended + backward)
        if model.moe_expert_capacity_factor is not None:
            self._add_kept_choices(add, forward)
        if self.num_ranks == 1:
            return
        if self._is_sent:
            sent = self.choices * model.hidden_size * self.element
            add("all_to_all", self.axes, self.num_ranks * self.num_local * _INDEX, forward)
            add("all_to_all", self.axes, sent, 2 * (forward + backward))
            return
        gathered, k = hidden * self.num_ranks, model.moe_router_topk
        weights = self._gathered * k * self.weight_element
        add("all_gather", self.axes, gathered, forward + backward)
        add("all_gather", self.axes, weights, forward)
        add("all_gather", self.axes, self._gathered * k * _INDEX, forward)
        # The reduce-scatter sums in the dtype of the combine weights.
        add("reduce_scatter", self.axes, gathered // self.element * self.weight_element, forward)
        add("reduce_scatter", self.axes, gathered, backward)
        add("reduce_scatter", self.axes, weights, backward)

    def add_traffic_of_input(self, add: Add, backward: int) -> None:
        """Add what so many backward passes send for the gradient of the layer's input, the shared expert's left out."""
        model, sizes = self.model, self.sizes
        hidden = self.rows * model.hidden_size * self.element
        if sizes.tp > 1 and not model.sequence_parallel:
            add("all_gather", ("tp",), hidden * sizes.tp, backward)
        if self.num_ranks == 1:
            return
        if self._is_sent:
            add("all_to_all", self.axes, self.choices * model.hidden_size * self.element, backward)
            return
        gathered = self._gathered
        add("reduce_scatter", self.axes, gathered * model.hidden_size * self.element, backward)
        add("reduce_scatter", self.axes, gathered * model.moe_router_topk * self.weight_element, backward)

    def _add_losses(self, add: Add, forward: int) -> None:
        model = self.model
        if model.moe_aux_losses:
            counts = self.sequences * self.num_experts * self.wide
            add("all_reduce", ("tp",), counts, 2 * forward)
            add("all_reduce", ("cp",), counts, forward)
            if "global_aux_loss" in model.moe_aux_losses:
                add("all_reduce", ("dp",), self.num_experts * self.wide, forward)
        if model.moe_z_loss_coeff:
            add("all_reduce", ("tp",), self.wide, forward)

    def _add_kept_choices(self, add: Add, forward: int) -> None:
        rows, k = self.rows, self.model.moe_router_topk
        for axes, size in ((("tp",), self.sizes.tp), (("cp",), self.sizes.cp)):
            rows *= size
            for num_bytes in (rows * k * _INDEX, rows * k * self.wide, rows * _INDEX):
                add("all_gather", axes, num_bytes, forward)


def auxiliary_losses(model: TransformerConfig) -> list[str]:
    """Return the kinds of losses that layers of experts leave."""
    if model.num_experts is None:
        return []
    return [*model.moe_aux_losses, *(["z_loss"] if model.moe_z_loss_coeff else [])]
