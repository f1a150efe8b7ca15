"""What a training step sends, as formulas of the configuration: docs/verification.md in code.

The planner records the messages of a micro-batch, and these formulas are an independent account of them. The messages
between stages and at the end of the step are the planner's. A rank's communications are counted as
`process_group.CollectiveCall` counts them: by operation and axes, with the bytes of the whole tensor that the operation
is about. Names are those of the document: t, c and p are the tensor-, context- and pipeline-parallel sizes, d the
number of gradient replicas (dp × cp), m the micro-batches of a rank, A the bytes of the hidden states of a rank's
tokens before sequence parallelism shards them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.tensor_parallel.comm_overlap_config import ROW_PARALLEL, linear_overlap
from megatron.planner.communication import CP, TP, StepRank, add_gradients, add_scalars, add_sends
from megatron.planner.plan import layer_numbers
from megatron.verification.traffic import Traffic, TrafficSum
from tests.closed_forms.adapter_traffic import IN_ORDER, add_adapters, idle_in_first_layer
from tests.closed_forms.exchange_traffic import ExchangeTraffic
from tests.closed_forms.expert_traffic import SendingExpertLayer
from tests.closed_forms.float8_traffic import Float8LayerEnds
from tests.closed_forms.further_traffic import add_further
from tests.closed_forms.latent_traffic import add_latent
from tests.closed_forms.recomputed_layers import recomputed_layers
from tests.closed_forms.sample_traffic import sample_bytes

if TYPE_CHECKING:
    from megatron.config.run_config import RunConfig


class _Rank(StepRank):
    """A rank, with the bytes of one head of its tokens."""

    @property
    def head_bytes(self) -> int:
        """Return s/c · b · k · e."""
        return self.tokens * self.config.model.head_width * self.element


def step_traffic(config: RunConfig, rank: int) -> Traffic:
    """Return what a rank sends in one training step."""
    here = _Rank(config, rank)
    total = TrafficSum(here.group_sizes())
    num_bytes = sample_bytes(config, here.tokens, here.chunks)
    total.add("broadcast", TP, num_bytes, here.num_microbatches * (num_bytes > 0))
    for chunk in here.chunks:
        _add_microbatch(total, here, chunk)
        if chunk.has_loss and config.model.z_loss_coeff:
            # How many tokens count.
            total.add("all_reduce", CP, 8 if here.element == 8 else 4, here.num_microbatches)
    add_sends(total, here)
    add_gradients(total, here)
    add_scalars(total, here)
    return {key: volume for key, volume in total.traffic.items() if volume.num_calls}


def _add_microbatch(total: TrafficSum, here: _Rank, chunk: StageContents) -> None:
    """Add what the layers, the embedding and the output layer send for all micro-batches."""
    m = here.num_microbatches
    model = here.config.model
    numbers, num_own = layer_numbers(model, chunk), len(chunk.layer_numbers)
    full, early = recomputed_layers(model, num_own)
    again = {*range(full), *(range(num_own, len(numbers)) if model.recompute_granularity == "full" else ())}
    has_experts = model.moe_layers
    of_experts = {place for place, number in enumerate(numbers) if has_experts[model.kind_of(number)]}
    of_float8 = {place for place, number in enumerate(numbers) if model.fp8.is_in_float8(number, model.num_layers)}
    for in_float8 in (False, True):
        own = of_float8 if in_float8 else set(range(len(numbers))) - of_float8
        if own & of_experts:
            _add_experts(total, here, own & of_experts, again, early, in_float8=in_float8)
        own = own - of_experts
        num_again = len(again.intersection(own))
        _add_layer_ends(total, here, in_float8, m * len(own), m * len(own), m * len(own))
        # What is recomputed runs forward again, up to the last thing that the backward pass needs.
        num_early = 0 if "linear_fc2" in model.adapted_parts else len(early.intersection(own))
        _add_layer_ends(total, here, in_float8, m * num_again, m * (num_again - num_early), 0)
        if model.sequence_parallel and "mlp" in model.recomputed_modules:
            # Run again, a feed-forward gathers its input, and ends before its output is scattered.
            if in_float8:
                _float8_ends(here).add_feed_forwards(partial(_add_over_tp, total), m * len(own))
            else:
                total.add("all_gather", TP, here.hidden_bytes, m * len(own))
    if model.lora_rank:
        _add_low_rank(total, here, chunk, again, of_experts)
    predictions = 1 + len(numbers) - num_own
    if predictions > 1:
        is_again = model.recompute_granularity == "full"
        add_further(partial(_add_over_tp, total), model, here.tokens, here.hidden_bytes, m, runs_again=is_again)
        # Labels and which of them count, in whole sequences.
        total.add("all_gather", CP, here.tokens * here.sizes.cp * 2 * 8, m)
    if here.config.model.qk_layernorm_across_heads:
        # A number a token for all queries, one for all keys, and their gradients.
        total.add("all_reduce", TP, here.tokens * max(here.element, 4), 2 * m * (2 * len(numbers) + len(again)))
    if model.distribute_saved_activations:
        length = 1 if model.recompute_method == "block" else model.recompute_num_layers or 1
        total.add("all_gather", TP, here.hidden_bytes, m * math.ceil(full / length))
    for position, number in enumerate(numbers):
        if here.sizes.cp > 1:
            is_recomputed = "core_attn" in model.recomputed_modules or position in again
            exchange = ExchangeTraffic(model, here.sizes, here.head_bytes, here.element)
            exchange.add(total.add, model.cp_exchange(model.kind_of(number)), m * (1 + is_recomputed), m)
    A = here.hidden_bytes
    # The table of per-layer inputs has the rows of the vocabulary, like the word embeddings.
    inputs = m * (chunk.has_embedding and model.hidden_size_per_layer_input > 0)
    input_bytes = here.tokens * model.num_layers * model.hidden_size_per_layer_input * here.element
    total.add("reduce_scatter" if model.sequence_parallel else "all_reduce", TP, input_bytes, inputs)
    total.add("all_gather", TP, input_bytes, inputs * model.sequence_parallel)
    if here.config.model.sequence_parallel:
        total.add("reduce_scatter", TP, A, m * chunk.has_embedding)
        is_trained = not model.lora_rank
        total.add("all_gather", TP, A, m * (chunk.has_embedding and is_trained))
        output = linear_overlap(here.config.model, "output")
        _add_beside_product(total, here, "all_gather", output.forward, m * chunk.has_loss, predictions)
        total.add("all_gather", TP, predictions * A, m * (chunk.has_loss and is_trained))
        _add_beside_product(total, here, "reduce_scatter", output.backward, m * chunk.has_loss, predictions)
    else:
        total.add("all_reduce", TP, A, m * chunk.has_embedding)
        total.add("all_reduce", TP, predictions * A, m * chunk.has_loss)
    # The cross-entropy: the largest normalizer, then the sum of exponentials and the label's logit.
    numbers_bytes = predictions * here.tokens * max(here.element, 4)
    total.add("all_reduce", TP, numbers_bytes, m * chunk.has_loss)
    total.add("all_reduce", TP, 2 * numbers_bytes, m * chunk.has_loss)


def _add_low_rank(total: TrafficSum, here: _Rank, chunk: StageContents, again: set[int], of_experts: set[int]) -> None:
    """Add what low-rank adapters send for all micro-batches, and take away what a frozen embedding wants nothing of.

    The layers at the places ``of_experts`` have adapters of a feed-forward's ends where they have a shared expert.
    """
    model, m = here.config.model, here.num_microbatches
    add, narrow_bytes = partial(_add_over_tp, total), here.tokens * model.lora_rank * here.element
    layers = set(range(len(chunk.layer_numbers)))
    shared = of_experts if model.moe.moe_shared_expert_intermediate_size else set[int]()
    fed = layers - of_experts | shared
    for reached, names in ((layers, IN_ORDER[:2]), (fed, IN_ORDER[2:])):
        add_adapters(add, model, narrow_bytes, m * len(reached) + m * len(again & reached), m * len(reached), names)
    if {"moe", "shared_experts"}.intersection(model.recomputed_modules):
        add_adapters(add, model, narrow_bytes, m * len(shared), 0, IN_ORDER[2:])
    if "mlp" in model.recomputed_modules:
        dense = m * len(layers - of_experts)
        add_adapters(add, model, narrow_bytes, dense, 0, IN_ORDER[2:])
        if "linear_fc2" in model.adapted_parts:
            # Run again, a feed-forward goes on to its adapter.
            is_in_product = linear_overlap(model, "fc2").forward
            operation = "reduce_scatter" if model.sequence_parallel else "all_reduce"
            _add_beside_product(total, here, operation, is_in_product, dense)
    if 0 not in chunk.layer_numbers:
        return
    first, idle = chunk.layer_numbers.index(0), idle_in_first_layer(model)
    if first in of_experts and "fc1" in idle:
        # Nothing of the experts' input is wanted either, nor of the router's.
        _expert_layer(here).add_traffic_of_input(total.add, -m)
        idle = idle if first in shared else idle[:2]
    for name in idle:
        is_column = name not in ROW_PARALLEL
        if not model.sequence_parallel:
            add("all_reduce", here.hidden_bytes, -m if is_column else 0)
        elif model.fp8.is_in_float8(0, model.num_layers):
            _float8_ends(here).add_gradient(add, -m, is_column=is_column)
        else:
            is_chunked = linear_overlap(model, name).backward
            _add_beside_product(total, here, "reduce_scatter" if is_column else "all_gather", is_chunked, -m)


def _expert_layer(here: _Rank) -> SendingExpertLayer:
    return SendingExpertLayer(here.config.model, here.tokens, here.config.training.micro_batch_size, here.element)


def _float8_ends(here: _Rank) -> Float8LayerEnds:
    return Float8LayerEnds(here.config.model, here.tokens, here.hidden_bytes)


def _add_over_tp(total: TrafficSum, operation: str, num_bytes: int, count: int) -> None:
    total.add(operation, TP, num_bytes, count)


def _add_experts(
    total: TrafficSum, here: _Rank, places: set[int], again: set[int], early: set[int], *, in_float8: bool = False
) -> None:
    """Add what layers of experts send for all micro-batches; those at the places of ``again`` run forward again.

    Those at ``early`` places, and feed-forwards that alone run again, stop when all that they save is there.
    """
    model, m, num_layers = here.config.model, here.num_microbatches, len(places)
    entered, backward = m * (num_layers + len(again & places)), m * num_layers
    fed_again = backward if "moe" in model.recomputed_modules else 0
    stopped = m * len(early & places) + fed_again
    layer = _expert_layer(here)
    layer.add_traffic(total.add, entered + fed_again, entered + fed_again - stopped, backward)
    _add_layer_ends(total, here, in_float8, entered, entered, backward, ("attention",))
    if layer.shared_width:
        goes_on = model.moe.moe_shared_expert_gate or "linear_fc2" in model.adapted_parts
        stopped = 0 if goes_on or model.moe.moe_shared_expert_overlap else stopped
        times = entered + fed_again
        left = times - stopped
        if "shared_experts" in model.recomputed_modules and not fed_again:
            # Run again, it ends where all that is saved is there, which with a gate is behind its last sum.
            times, left = times + backward, left + (backward if goes_on else 0)
        _add_layer_ends(total, here, in_float8, times, left, backward, ("feed-forward",))


def _add_layer_ends(
    total: TrafficSum,
    here: _Rank,
    in_float8: bool,
    entered: int,
    left: int,
    backward: int,
    regions: tuple[str, ...] = ("attention", "feed-forward"),
) -> None:
    """Add what a number of layers send where they enter and leave these tensor-parallel regions."""
    A = here.hidden_bytes
    model = here.config.model
    if model.mla.multi_latent_attention and "attention" in regions:
        again = backward if "mla_up_proj" in model.recomputed_modules else 0
        tokens, times = here.tokens * here.element, left if regions == ("attention",) else entered
        if in_float8 and model.sequence_parallel:
            _float8_ends(here).add_latent(partial(_add_over_tp, total), entered, times, backward, again)
        else:
            add_latent(partial(_add_over_tp, total), model, tokens, entered, times, backward, again)
        regions = tuple(region for region in regions if region != "attention")
    if here.config.model.sequence_parallel and in_float8:
        for region in regions:
            times = entered if region == "attention" else left
            _float8_ends(here).add(partial(_add_over_tp, total), entered, times, backward)
    elif here.config.model.sequence_parallel:
        qkv, proj, fc1, fc2 = (linear_overlap(here.config.model, name) for name in ("qkv", "proj", "fc1", "fc2"))
        if fc2.forward or fc2.backward:
            left = entered  # The product and its sum over the ranks are one operation, which runs to its end.
        ends = {"attention": (qkv, proj, entered), "feed-forward": (fc1, fc2, left)}
        for column, row, times in (ends[region] for region in regions):
            _add_beside_product(total, here, "all_gather", column.forward, entered)
            _add_beside_product(total, here, "reduce_scatter", row.forward, times)
            # Backward: the gradient of the output, and the input once more for the gradient of a weight that has one.
            _add_beside_product(total, here, "all_gather", row.backward, backward)
            total.add("all_gather", TP, A, 0 if here.config.model.lora_rank else backward)
            _add_beside_product(total, here, "reduce_scatter", column.backward, backward)
    else:
        total.add("all_reduce", TP, A, sum({"attention": entered, "feed-forward": left}[region] for region in regions))
        total.add("all_reduce", TP, A, len(regions) * backward)


def _add_beside_product(
    total: TrafficSum, here: _Rank, operation: str, is_chunked: bool, count: int, times: int = 1
) -> None:
    """Add a collective of A, so many times as large, or the t - 1 sends of its parts round a ring beside a product."""
    t = here.sizes.tp
    if is_chunked:
        total.add("send", TP, times * here.hidden_bytes // t, count * (t - 1))
    else:
        total.add(operation, TP, times * here.hidden_bytes, count)
