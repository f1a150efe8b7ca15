"""How long the experts of a layer take for one micro-batch on one rank, where tokens spread evenly over them.

The products of a rank's experts are as fast as one large product, unless the host is slower where each is launched for
itself; each of their weights is read from memory and its gradient added there, however few rows it has. The host waits
for how many tokens each expert has, in each layer's forward pass: what it launches there for experts is not hidden by
the rest of the layer, nor by another layer. Nothing here is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.planner.expert_layer import ExpertLayer
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.links import Links
from megatron.planner.piece_time import LAUNCH_S
from megatron.planner.plan import Plan

FORWARD_LAUNCHES = 1 / 3
"""The part of a layer's kernels that its forward pass launches: one product of three."""
_LAUNCHES = 60
"""Kernels of a router, a dispatch and experts beside those of a dense layer, forward and backward. Assumed."""
_LOOP_LAUNCHES, _CASTS = 6, 10
"""Kernels of one expert whose products are its own, and operands of them that are rounded to fp8: counted."""
_CAST_LAUNCHES = {"delayed": 2, "tensorwise": 3}
"""Kernels that round an operand."""
_MEMORY_SHARE = 0.85
_SCORE_PASSES = 14
"""How often a score of the router is read or written: softmax, the best, their weights, losses; and back. Counted."""
_FUSED_MOVES = 8
"""How often rows of tokens are read or written each way where a permutation is one kernel."""
_WEIGHT_BYTES = 12
"""Bytes read and written of a weight: twice its 16 bits, and the sum of float32 gradients."""


@dataclass(frozen=True)
class ExpertTime:
    """Hold the seconds of a layer's experts by part, and those of the forward pass's products and of its activation,
    which is among the passes; and how long the host takes to launch them all, forward and backward.
    """

    products: float
    passes: float
    exchanges: float
    forward_products: float
    activation: float
    floor: float

    @property
    def total(self) -> float:
        """Return all parts together, forward and backward, whatever the host takes."""
        return self.products + self.passes + self.exchanges

    @property
    def forward(self) -> float:
        """Return the time of the forward pass."""
        return self.forward_products + self.passes / 3 + self.exchanges / 2


NO_EXPERTS = ExpertTime(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def expert_layer(plan: Plan) -> ExpertLayer:
    """Return what a layer of experts has to do for one micro-batch on one rank."""
    element = ELEMENT_BYTES[plan.model.params_dtype]
    return ExpertLayer(plan.model, plan.num_tokens, plan.micro_batch_size, element)


def expert_time(plan: Plan, gpu: Gpu, implementation: Implementation, peak: float, *, in_float8: bool) -> ExpertTime:
    """Return the time of one layer's experts, whose products have this peak; the shared expert is left out."""
    layer, h = expert_layer(plan), plan.model.hidden_size
    bandwidth = gpu.memory_bandwidth * _MEMORY_SHARE
    once = 0.0
    for inner, columns in ((h, layer.gates * layer.width), (layer.width, h)):
        moved = layer.element * layer.given * (inner + columns) + _WEIGHT_BYTES * layer.num_local * inner * columns
        once += 2.0 * layer.given * inner * columns / (peak * gpu.product_share) + moved / 3 / bandwidth
    is_single = layer.router_element > layer.element
    router_peak = gpu.single_flops if is_single else gpu.half_flops
    once += 2.0 * layer.rows * h * layer.num_experts / (router_peak * gpu.product_share)
    moves = 2 * _FUSED_MOVES if implementation.fuses_permutation else sum(layer.moved_rows)
    passed: float = layer.choices * h * layer.element * moves
    passed += layer.given * layer.width * layer.element * (3 * layer.gates + 2)
    passed += layer.rows * layer.num_experts * layer.wide * _SCORE_PASSES
    if in_float8:
        # Inputs and gradients are read in 16 bits and written in 8, as they are and transposed.
        passed += layer.given * (5 * (h + layer.width) + 4 * (layer.gates * layer.width + h))
    passing = gpu.memory_bandwidth * implementation.times.pass_share
    links = Links(gpu, plan.parallel_sizes)
    if plan.model.moe_token_dispatcher_type == "alltoall":
        exchanges = 4 * links.expert_exchange_seconds(layer.choices * h * layer.element)
    else:
        exchanges = 4 * links.expert_gather_seconds(layer.rows * layer.num_ranks * h * layer.element)
    return ExpertTime(
        products=(2 if plan.model.lora_rank else 3) * once,
        passes=passed / passing,
        exchanges=exchanges,
        forward_products=once,
        activation=layer.given * layer.width * layer.element * (layer.gates + 1) / passing,
        floor=(_LAUNCHES + layer.num_local * _of_an_expert(plan, implementation, in_float8=in_float8)) * LAUNCH_S,
    )


def _of_an_expert(plan: Plan, implementation: Implementation, *, in_float8: bool) -> int:
    """Return the kernels of each expert, which there are where products are not grouped into one."""
    if not (in_float8 or implementation.loops_over_experts):
        return 0
    # transformer-engine has a kernel of its own for each recipe.
    most = max(_CAST_LAUNCHES.values())
    return _LOOP_LAUNCHES + in_float8 * _CASTS * _CAST_LAUNCHES.get(plan.model.fp8_recipe, most)
