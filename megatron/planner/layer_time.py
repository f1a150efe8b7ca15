"""How long one micro-batch takes in a layer and in the output layer on one rank of a GPU type.

A product takes its operations at the rate that large products reach, and beside them the writing of its result. Links
and memory have the shares of their bandwidth that are published for simple kernels and large messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.planner.expert_time import FORWARD_LAUNCHES, NO_EXPERTS, ExpertTime, expert_time
from megatron.planner.gpu import AttentionRate, Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.layer_kinds import LayerKind
from megatron.planner.layer_widths import key_value_width
from megatron.planner.layer_work import (
    Product,
    adapter_products,
    attention_flops,
    fused_cast_bytes,
    join_bytes,
    join_product,
    layer_products,
    loss_bytes,
    num_attention_products,
    passed_bytes,
)
from megatron.planner.links import Links
from megatron.planner.piece_time import LAUNCH_S, MEMORY_SHARE, PieceTime
from megatron.planner.plan import Plan
from megatron.planner.traces import PieceMemory
from megatron.planner.traffic.adapter_traffic import IN_ORDER, add_adapters
from megatron.planner.traffic.further_traffic import add_further
from megatron.planner.traffic.latent_traffic import add_latent

_ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward pass beside those of its forward pass: five products for two."""
_LAUNCHES = 70
"""Kernels of a layer, forward and backward, those of experts left out. Assumed."""
_HALF, _WIDE_SUM = 2, 8
"""Bytes of a product's element that is written, and of one that is added to float32 gradients."""


@dataclass(frozen=True)
class LayerTime:
    """Hold the seconds of a layer and a micro-batch by part; ``again`` is what is computed a second time.

    ``expert_parallel`` is tokens' way to their experts and back. ``forward`` and ``weight_gradients`` are the forward
    pass and the products of weights' gradients that can be put off, within the parts. ``experts`` are all parts of the
    experts, and ``expert_forward`` those of the forward pass; ``floor`` and ``expert_floor`` are what the host takes to
    launch what is not theirs, and what is. ``forward_floor`` is what it takes to launch the forward pass of a layer in
    which it waits.
    """

    products: float
    attention: float
    passes: float
    tensor_parallel: float
    context_parallel: float
    again: float
    offload: float
    floor: float = 0.0
    forward: float = 0.0
    expert_parallel: float = 0.0
    weight_gradients: float = 0.0
    experts: float = 0.0
    expert_forward: float = 0.0
    expert_floor: float = 0.0
    forward_floor: float = 0.0

    @property
    def total(self) -> float:
        """Return all parts together, at least what the host takes to launch them.

        It waits for experts in the forward pass, so that what it launches for them there, and for the rest, is hidden
        by nothing else; in the backward pass it runs ahead.
        """
        busy = self.products + self.attention + self.passes + self.again
        sent = self.tensor_parallel + self.context_parallel
        whole = busy + sent + self.expert_parallel + self.offload
        if self.forward_floor:
            rest = max(self.floor - self.forward_floor, whole - self.forward)
            return max(self.forward_floor, self.forward) + rest
        if not self.experts:
            return max(self.floor, whole)
        share = FORWARD_LAUNCHES
        forward = max(share * self.floor, self.forward - self.expert_forward)
        forward += max(share * self.expert_floor, self.expert_forward)
        return forward + max((1 - share) * (self.floor + self.expert_floor), whole - self.forward)


def layer_time(
    plan: Plan,
    gpu: Gpu,
    implementation: Implementation,
    kept: PieceMemory,
    kind: LayerKind,
) -> LayerTime:
    """Return the time of one layer, forward and backward, with the recompute that is configured.

    ``kept`` is the layer's memory.
    """
    in_float8, has_experts = kind.in_float8, kind.has_experts
    products = layer_products(plan.model, has_experts=has_experts)
    half = _peak(plan.model, gpu)
    peak = gpu.float8_flops if in_float8 else half
    forward, backward = _attention(plan, gpu, implementation, kind.window)
    passed = passed_bytes(
        plan,
        implementation.is_rotation_fused,
        implementation.has_flash_attention,
        has_experts=has_experts,
        has_rotary=kind.has_rotary,
    )
    if in_float8:
        passed += fused_cast_bytes(plan, has_experts=has_experts, has_join=kind.is_further)
    rates = [(each, (peak, peak)) for each in products]
    rates += [(each, (half, half)) for each in adapter_products(plan.model, has_experts=has_experts)]
    if kind.is_further:
        rates.append((join_product(plan.model), (peak, peak)))
        passed += join_bytes(plan)
    parts = [(_product(product, plan.num_tokens, rate, gpu), product.passes) for product, rate in rates]
    computed = sum(seconds for seconds, _ in parts)
    once = sum(seconds / passes for seconds, passes in parts)
    # The last two products are those of the feed-forward, or of the experts' shared one.
    num_attention = num_attention_products(plan.model)
    feed_forward = sum(seconds / passes for seconds, passes in parts[num_attention : len(products)])
    passes = passed / (gpu.memory_bandwidth * implementation.times.pass_share)
    # Experts without a shared one have no tensor-parallel region of their own: exchanges are those of attention.
    has_feed_forward = len(products) > num_attention
    exchanged = _tensor_parallel(plan, gpu, implementation, in_float8=in_float8, has_feed_forward=has_feed_forward)
    exchanged += _join_exchanges(plan, gpu) if kind.is_further else 0.0
    ring = _ring(plan, gpu)
    experts = expert_time(plan, gpu, implementation, peak, in_float8=in_float8) if has_experts else NO_EXPERTS
    return LayerTime(
        products=computed + experts.products,
        attention=forward + backward,
        passes=passes + experts.passes,
        tensor_parallel=exchanged,
        context_parallel=max(0.0, ring - forward - backward),
        expert_parallel=experts.exchanges,
        again=_again(plan, once + (passes + exchanged) / 3 + forward, forward, feed_forward, experts)
        + sum(seconds / passes for seconds, passes in parts[: num_attention - 1]) * _widens_again(plan.model),
        offload=_offload(plan, gpu, kept, once + passes / 3 + forward),
        floor=_LAUNCHES * LAUNCH_S,
        forward=once + (passes + exchanged) / 3 + forward + experts.forward,
        weight_gradients=0.0 if plan.model.lora_rank else once,
        experts=experts.total,
        expert_forward=experts.forward,
        expert_floor=experts.floor,
    )


def traced_layer_time(plan: Plan, gpu: Gpu, kept: PieceMemory, time: PieceTime, *, has_experts: bool) -> LayerTime:
    """Return the time of one layer that was traced, forward and backward, with the recompute that is configured.

    The host waits in the forward pass of a layer of experts, for how many tokens each has.
    """
    forward, host = time.forward.total, time.part("host")
    return LayerTime(
        products=time.part("products"),
        attention=time.part("attention"),
        passes=time.part("passes"),
        tensor_parallel=time.part("tensor_parallel"),
        context_parallel=time.part("context_parallel"),
        expert_parallel=time.part("expert_parallel"),
        again=forward if plan.model.recompute_granularity == "full" else 0.0,
        offload=_offload(plan, gpu, kept, forward),
        floor=host,
        forward=forward,
        weight_gradients=time.weights.total,
        forward_floor=time.forward.host if has_experts else 0.0,
    )


def output_layer_time(plan: Plan, gpu: Gpu) -> float:
    """Return the time of the output layer and the loss, which are in the model's own precision also beside fp8."""
    model, t = plan.model, plan.parallel_sizes.tp
    output = Product(model.hidden_size, model.padded_vocab_size // t, is_trained=not model.lora_rank)
    seconds = _product(output, plan.num_predictions, (_peak(model, gpu),) * 2, gpu)
    seconds += loss_bytes(plan) / (gpu.memory_bandwidth * MEMORY_SHARE)
    message = plan.num_predictions * model.hidden_size * _HALF
    # Its input is gathered for each product of its weight or of that's gradient, and its gradient scattered.
    return seconds + output.passes * Links(gpu, plan.parallel_sizes).tensor_parallel_seconds(message)


def _peak(model: GPTConfig, gpu: Gpu) -> float:
    return gpu.half_flops if model.params_dtype in ("bfloat16", "float16") else gpu.single_flops


def _product(product: Product, tokens: float, peaks: tuple[float, float], gpu: Gpu) -> float:
    """Return the time of a linear layer's product and of its gradients, the weight's at the second rate."""
    tokens *= product.share
    flops, (peak, of_weights) = 2.0 * tokens * product.size, peaks
    written = _HALF * tokens * (product.columns + product.inner) + _WIDE_SUM * product.size * product.is_trained
    computed = product.passes * flops / (peak * gpu.product_share)
    computed += product.is_trained * flops * (1 / of_weights - 1 / peak) / gpu.product_share
    return computed + written / (gpu.memory_bandwidth * MEMORY_SHARE)


def _attention(plan: Plan, gpu: Gpu, implementation: Implementation, window: int) -> tuple[float, float]:
    """Return the time of attention forward and backward, where a query looks back to so many keys at most."""
    on_hopper = gpu.capability >= (9, 0)
    takes_cudnn = implementation.attention_on_hopper == "cudnn" and not plan.model.attention_dropout
    rates = gpu.cudnn if on_hopper and takes_cudnn else gpu.flash
    rate: AttentionRate = rates[128 if plan.model.head_width > 64 else 64]
    share = implementation.times.backward_share if on_hopper else 1.0
    ring = implementation.times.ring_share if plan.parallel_sizes.cp > 1 else 1.0
    flops = attention_flops(plan, window)
    forward = flops / (rate.forward * gpu.half_flops * ring)
    backward = _ATTENTION_BACKWARD * flops / (rate.backward * share * gpu.half_flops * ring)
    return forward, backward


def _widens_again(model: GPTConfig) -> bool:
    """Return whether latent attention makes its heads again, but for the products of its narrow vectors."""
    return model.multi_latent_attention and "mla_up_proj" in model.recomputed_modules


def _tensor_parallel(
    plan: Plan, gpu: Gpu, implementation: Implementation, *, in_float8: bool, has_feed_forward: bool
) -> float:
    """Return the time of a layer's ten exchanges, and of those of its adapters: in fp8, the six that gather carry 8
    bits, or what the recipe sends here.

    Two of the six are for weights' gradients, which frozen weights do not have.
    """
    links, model = Links(gpu, plan.parallel_sizes), plan.model
    size = plan.num_tokens * model.hidden_size
    sent, regions = [0.0], 0.5 + 0.5 * has_feed_forward

    def add(operation: str, num_bytes: int, count: int) -> None:
        rounds = 2 if operation == "all_reduce" else 1
        sent.append(count * rounds * links.tensor_parallel_seconds(num_bytes))

    if model.multi_latent_attention:
        again = int("mla_up_proj" in model.recomputed_modules)
        add_latent(add, model, plan.num_tokens * _HALF, 1, 1, 1, again)
        of_region = 5 if model.sequence_parallel else 4
        return sum(sent) + has_feed_forward * of_region * links.tensor_parallel_seconds(size * _HALF)
    if model.lora_rank:
        names = IN_ORDER if has_feed_forward else IN_ORDER[:2]
        add_adapters(add, model, plan.num_tokens * model.lora_rank * _HALF, 1, 1, names)
    if not model.sequence_parallel:
        return regions * (sum(sent) + 8 * links.tensor_parallel_seconds(size * _HALF))
    gathered = 1 if in_float8 else _HALF
    gathers = 4 if model.lora_rank else 6
    sent.append(gathers * links.tensor_parallel_seconds(size * gathered))
    return regions * (sum(sent) + 4 * links.tensor_parallel_seconds(size * _HALF))


def _join_exchanges(plan: Plan, gpu: Gpu) -> float:
    """Return the time of what is sent around one layer that predicts a further token, forward and backward."""
    model, links, seconds = plan.model, Links(gpu, plan.parallel_sizes), [0.0]

    def add(operation: str, num_bytes: int, count: int) -> None:
        rounds = 2 if operation == "all_reduce" else 1
        seconds.append(count * rounds * links.tensor_parallel_seconds(num_bytes))

    tokens = plan.num_tokens
    add_further(add, model, tokens, tokens * model.hidden_size * _HALF, 1, runs_again=False)
    return sum(seconds) / model.num_further_tokens


def _ring(plan: Plan, gpu: Gpu) -> float:
    """Return how long keys and values, and their gradients, travel around the context-parallel ranks."""
    message = 2 * plan.num_tokens * key_value_width(plan.model) * _HALF
    return 3 * Links(gpu, plan.parallel_sizes).context_parallel_seconds(message)


def _again(plan: Plan, forward: float, attention: float, feed_forward: float, experts: ExpertTime) -> float:
    """Return what is computed a second time, as if all layers of a chunk were the first ones.

    ``feed_forward`` are the products of a dense feed-forward, or of the shared expert.
    """
    if plan.model.recompute_granularity == "full":
        return forward + experts.forward
    modules = plan.model.recomputed_modules
    again = attention * ("core_attn" in modules)
    if experts is NO_EXPERTS:
        return again + feed_forward * ("mlp" in modules)
    if "moe" in modules:
        return again + experts.forward + feed_forward
    return again + feed_forward * ("shared_experts" in modules) + experts.activation * ("moe_act" in modules)


def _offload(plan: Plan, gpu: Gpu, kept: PieceMemory, forward: float) -> float:
    """Return what a layer waits for its activations' way to the machine's memory and back."""
    if not (plan.model.cpu_offloading and plan.model.cpu_offloading_activations):
        return 0.0
    copy = kept.kept / (gpu.host_bandwidth * MEMORY_SHARE)
    return max(0.0, copy - forward) + max(0.0, copy - 2 * forward)
