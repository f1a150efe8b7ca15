"""What a layer of experts sends, as formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.planner.plan import ExpertLayer

Add = Callable[[str, tuple[str, ...], int, int], None]
"""Add so many communications: operation, axes, bytes, count."""
_INDEX = 8


@dataclass(frozen=True)
class SendingExpertLayer(ExpertLayer):
    """A layer of experts whose messages are counted."""

    def keeps_input(self, *, shared_keeps: bool = True) -> bool:
        """Return whether the layer's input is kept as it came: by the router, or by the shared expert.

        ``shared_keeps`` says that the shared expert's first product would keep it.
        """
        model = self.model
        of_shared = shared_keeps or model.moe.moe_shared_expert_gate or "shared_experts" in model.recomputed_modules
        of_router = self.router_element == self.element and not model.lora_rank
        return of_router or (self.shared_width > 0 and of_shared)

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
        if model.moe.moe_expert_capacity_factor is not None:
            self._add_kept_choices(add, forward)
        if self.num_ranks == 1:
            return
        if self._is_sent:
            sent = self.choices * model.hidden_size * self.element
            add("all_to_all", self.axes, self.num_ranks * self.num_local * _INDEX, forward)
            add("all_to_all", self.axes, sent, 2 * (forward + backward))
            return
        gathered, k = hidden * self.num_ranks, model.moe.moe_router_topk
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
        add("reduce_scatter", self.axes, gathered * model.moe.moe_router_topk * self.weight_element, backward)

    def _add_losses(self, add: Add, forward: int) -> None:
        model = self.model
        if model.moe.moe_aux_losses:
            counts = self.sequences * self.num_experts * self.wide
            add("all_reduce", ("tp",), counts, 2 * forward)
            add("all_reduce", ("cp",), counts, forward)
            if "global_aux_loss" in model.moe.moe_aux_losses:
                add("all_reduce", ("dp",), self.num_experts * self.wide, forward)
        if model.moe.moe_z_loss_coeff:
            add("all_reduce", ("tp",), self.wide, forward)

    def _add_kept_choices(self, add: Add, forward: int) -> None:
        rows, k = self.rows, self.model.moe.moe_router_topk
        for axes, size in ((("tp",), self.sizes.tp), (("cp",), self.sizes.cp)):
            rows *= size
            for num_bytes in (rows * k * _INDEX, rows * k * self.wide, rows * _INDEX):
                add("all_gather", axes, num_bytes, forward)
