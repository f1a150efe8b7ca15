"""megatron-core's functions of MoE layers: routing as dense maps, permutation, auxiliary losses and their reports.

A routing map says for each token and expert whether the token goes to the expert: ``[n, experts]`` bool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.collectives import all_reduce
from megatron.core.device import current_device
from megatron.core.layer_output import MoEAuxLossAutoScaler as MoEAuxLossAutoScaler
from megatron.core.process_group import Group
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.process_state import resolve_group
from megatron.core.transformer import INDEPENDENT_SCORES
from megatron.core.transformer.moe.load_balancing import counted_scores, mean_product
from megatron.core.transformer.moe.routing import best_experts, topk_experts
from megatron.core.transformer.moe.routing import sinkhorn as sinkhorn


def get_default_pg_collection() -> ProcessGroupCollection:
    """Return the process-wide groups that MoE layers use."""
    return ProcessGroupCollection.use_mpu_process_groups(
        ["tp", "cp", "ep", "expt_tp", "tp_ep", "tp_cp", "tp_dp_cp", "expt_dp"]
    )


def switch_load_balancing_loss_func(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    fused: bool = False,
    padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the load-balancing loss of this rank's tokens: ``moe_aux_loss_coeff`` for balanced load on one rank.

    ``tokens_per_expert`` and ``total_num_tokens`` count the tokens of all ranks, so that the sum over ranks is the loss
    of all tokens. ``fused`` has no effect. Padding, where ``padding_mask`` is True, has no probabilities.

    Shapes: ``probs: [n, experts]``, ``tokens_per_expert: [experts]``, ``padding_mask: [n] -> []``.
    """
    if padding_mask is not None:
        probs = probs.masked_fill(padding_mask.unsqueeze(-1), 0.0)
    sums = probs.sum(dim=0)
    return mean_product(sums, tokens_per_expert, total_num_tokens, total_num_tokens, topk, num_experts) * (
        moe_aux_loss_coeff
    )


def z_loss_func(logits: torch.Tensor, z_loss_coeff: float, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``z_loss_coeff`` times the mean square of the log-sum-exp of the logits, over tokens that are not padding.

    Shapes: ``logits: [n, experts]``, ``padding_mask: [n] -> []``.
    """
    squares = logits.logsumexp(dim=-1).square()
    if padding_mask is None:
        return squares.mean() * z_loss_coeff
    squares = squares.masked_fill(padding_mask, 0.0)
    return squares.sum() / (~padding_mask).sum().clamp(min=1) * z_loss_coeff


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """Return the maximum number of tokens per expert: ``capacity_factor`` times the balanced load, rounded up."""
    return max(math.ceil(num_tokens / num_experts * capacity_factor), min_capacity or 0)


def get_tokens_per_expert_and_token_count(
    routing_map: torch.Tensor,
    reduce_group: Any,
    topk: int | None = None,
    with_padding_mask: bool = False,
) -> tuple[torch.Tensor, int | torch.Tensor, int | torch.Tensor]:
    """Return each expert's number of tokens over the group, and the number of tokens of this rank and of the group.

    With padding the numbers of tokens follow from the choices, of which each token has ``topk``.
    """
    group = resolve_group(reduce_group)
    local = routing_map.sum(dim=0)
    total = local.clone()
    all_reduce(total, group)
    if not with_padding_mask:
        return total, routing_map.shape[0], routing_map.shape[0] * group.size
    assert topk is not None, "with padding, topk is needed to count tokens"
    return total, local.sum() / topk, total.sum() / topk


def permute(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return each expert's tokens, the probabilities of these choices, and the token of each row.

    Rows are sorted by expert, then by token. With ``drop_and_pad`` each expert has exactly ``num_out_tokens`` / experts
    rows: other tokens follow if the expert has fewer. ``fused`` has no effect.

    Shapes: ``tokens: [n, h]``, ``routing_map, probs: [n, experts] -> [m, h], [m], [m]``.
    """
    num_tokens, num_experts = routing_map.shape
    by_expert = routing_map.bool().t()
    if drop_and_pad:
        assert num_out_tokens is not None, "drop_and_pad needs num_out_tokens, the capacity times the experts"
        order = by_expert.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        rows = order[:, : num_out_tokens // num_experts].contiguous()
        choices = (rows + num_tokens * torch.arange(num_experts, device=rows.device).unsqueeze(1)).view(-1)
    else:
        choices = by_expert.reshape(-1).nonzero().squeeze(1)
    sources = choices % num_tokens
    of_choices = None if probs is None else probs.t().reshape(-1).index_select(0, choices)
    return tokens.index_select(0, sources), of_choices, sources


def unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: Sequence[int],
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> torch.Tensor:
    """Return the sum of each token's rows, weighted by ``probs`` if they are given: the inverse of `permute`.

    The sum has the wider dtype of the rows and the probabilities, and the result has the dtype of the rows. ``fused``
    has no effect.

    Shapes: ``permuted_tokens: [m, h]``, ``sorted_indices: [m]``, ``probs, routing_map: [n, experts] -> restore_shape``.
    """
    rows = permuted_tokens
    if probs is not None:
        assert routing_map is not None, "probs need the routing_map"
        if drop_and_pad:
            experts = torch.arange(probs.shape[1], device=probs.device).repeat_interleave(len(rows) // probs.shape[1])
            weights = probs[sorted_indices, experts]
        else:
            weights = probs.t().masked_select(routing_map.bool().t())
        rows = rows * weights.unsqueeze(-1)
    total = rows.new_zeros(tuple(restore_shape)).index_add(0, sorted_indices, rows)
    return total.to(permuted_tokens.dtype)


def sort_chunks_by_idxs(
    input: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_idxs: torch.Tensor,
    probs: torch.Tensor | None = None,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the chunks of rows of ``input``, and of ``probs``, in the order ``sorted_idxs``; ``fused`` has no effect.

    Shapes: ``input: [m, h]``, ``split_sizes, sorted_idxs: [chunks]``, ``probs: [m]``.
    """
    sizes, order = split_sizes.tolist(), sorted_idxs.tolist()

    def sort(rows: torch.Tensor) -> torch.Tensor:
        chunks = rows.split_with_sizes(sizes)
        return torch.cat([chunks[index] for index in order])

    return sort(input), None if probs is None else sort(probs)


def group_limited_topk(
    scores: torch.Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores and numbers of the best experts of the best ``group_topk`` groups of experts.

    Shapes: ``scores: [num_tokens, num_experts] -> [num_tokens, topk]``, twice.
    """
    indices = best_experts(scores.view(num_tokens, num_experts), topk, num_groups, group_topk)
    return scores.gather(1, indices), indices


def topk_routing_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: torch.Tensor | None = None,
    fused: bool = False,
    router_replay: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's weight for each expert, 0 if it is not among the best ``topk``, and the routing map.

    Scores are computed in float32 at least, and the weights have the dtype of the logits. ``fused`` has no effect.

    Shapes: ``logits: [n, experts]``, ``expert_bias: [experts] -> [n, experts]``, twice.

    Raises:
        ValueError: ``score_function`` is unknown.
        RuntimeError: ``router_replay`` is given.
    """
    assert logits.dim() == 2, f"logits have {logits.dim()} dims; they must be [tokens, experts]"
    if score_function not in ("softmax", *INDEPENDENT_SCORES):
        raise ValueError(f"Invalid score_function: {score_function}; use softmax, sigmoid or sqrtsoftplus")
    if router_replay is not None:
        raise RuntimeError("replay of routing decisions is not supported; pass router_replay=None")
    indices, weights = topk_experts(
        logits.to(torch.promote_types(logits.dtype, torch.float32)),
        topk,
        use_pre_softmax=use_pre_softmax,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        score_function=score_function,
        expert_bias=expert_bias if score_function in INDEPENDENT_SCORES else None,
    )
    return _dense(indices, weights.to(logits.dtype), logits)


def _dense(indices: torch.Tensor, weights: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights per expert and the routing map, given each token's choices."""
    routing_map = torch.zeros_like(like, dtype=torch.bool).scatter(1, indices, True)
    return torch.zeros_like(like, dtype=weights.dtype).scatter(1, indices, weights), routing_map


def compute_routing_scores_for_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    fused: bool = False,
    padding_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the routing map and the scores that a load-balancing loss counts, before expert bias and capacity.

    Padding, where ``padding_mask`` is True, has neither scores nor choices. ``fused`` has no effect.

    Shapes: ``logits: [n, experts]``, ``padding_mask: [n] -> [n, experts]``, twice.

    Raises:
        ValueError: ``score_function`` is unknown.
    """
    if score_function not in ("softmax", *INDEPENDENT_SCORES):
        raise ValueError(f"Invalid score_function: {score_function}; use softmax, sigmoid or sqrtsoftplus")
    if score_function == "softmax":
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores, chosen = counted_scores(logits, topk, score_function)
    if padding_mask is not None:
        scores, chosen = (each.masked_fill(padding_mask.unsqueeze(-1), 0.0) for each in (scores, chosen))
    return chosen.bool(), scores


def apply_router_token_dropping(
    routing_probs: torch.Tensor,
    routing_map: torch.Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the routing map without the choices beyond each expert's capacity.

    An expert keeps the largest weights (``probs``) or the first tokens (``position``). With ``pad_to_capacity`` experts
    with fewer tokens also get tokens that did not choose them, with a weight of 0.

    Shapes: ``routing_probs, routing_map: [n, experts] -> [n, experts]``, twice.

    Raises:
        ValueError: ``drop_policy`` is unknown.
    """
    if drop_policy not in ("probs", "position"):
        raise ValueError(f"Invalid drop_policy: {drop_policy}; use probs or position")
    num_tokens, num_experts = routing_map.shape
    capacity = get_capacity(num_tokens * router_topk, num_experts, capacity_factor)
    if drop_policy == "probs":
        # Choices come before tokens that did not choose the expert, even if their weight is 0.
        worth = routing_probs.detach().masked_fill(~routing_map, -1.0)
        best = worth.topk(min(capacity, num_tokens), dim=0, sorted=False).indices
    else:
        best = routing_map.to(torch.uint8).sort(dim=0, descending=True, stable=True).indices[:capacity]
    has_room = torch.zeros_like(routing_map).scatter(0, best, True)
    kept = has_room if pad_to_capacity else routing_map & has_room
    return routing_probs * kept, kept


def pad_routing_map(routing_map: torch.Tensor, pad_multiple: int) -> torch.Tensor:
    """Add choices so that each expert has a multiple of ``pad_multiple`` tokens; the first other tokens are added.

    Shapes: ``[n, experts] -> [n, experts]``.
    """
    chosen = routing_map.bool()
    missing = -chosen.sum(dim=0) % pad_multiple
    return (chosen | (~chosen & ((~chosen).cumsum(dim=0) <= missing))).to(routing_map.dtype)


_TRACKER: dict[str, dict[str, Any]] = {}
"""Auxiliary losses per layer, by name, since the last report."""


def get_moe_layer_wise_logging_tracker() -> dict[str, dict[str, Any]]:
    """Return the auxiliary losses by name; ``values`` are the sums per layer since the last report."""
    return _TRACKER


def _tracked(name: str, num_layers: int, device: torch.device | str) -> dict[str, Any]:
    if name not in _TRACKER:
        _TRACKER[name] = {
            "values": torch.zeros(num_layers, device=device),
            "reduce_group": None,
            "avg_group": None,
            "reduce_group_has_dp": False,
        }
    return _TRACKER[name]


def save_to_aux_losses_tracker(
    name: str,
    loss: torch.Tensor,
    layer_number: int | None,
    num_layers: int,
    reduce_group: Any = None,
    avg_group: Any = None,
    reduce_group_has_dp: bool = False,
) -> None:
    """Add a layer's auxiliary loss to the tracked losses; ``layer_number`` is from 1, and None tracks nothing.

    The report sums the losses over ``reduce_group`` and averages them over ``avg_group``, and over the data-parallel
    ranks unless ``reduce_group_has_dp``.
    """
    if layer_number is None:
        return
    tracked = _tracked(name, num_layers, loss.device)
    tracked["values"][layer_number - 1] += loss.detach()
    tracked |= {"reduce_group": reduce_group, "avg_group": avg_group, "reduce_group_has_dp": reduce_group_has_dp}


def clear_aux_losses_tracker() -> None:
    """Set all tracked losses to zero and forget their groups."""
    for tracked in _TRACKER.values():
        tracked["values"].zero_()
        tracked |= {"reduce_group": None, "avg_group": None}


def reduce_aux_losses_tracker_across_ranks(
    track_names: Sequence[str] | None = None, pg_collection: ProcessGroupCollection | None = None
) -> None:
    """Sum the tracked losses over pipeline stages and their groups, and average them over data parallelism."""
    pp, dp = (
        resolve_group(None if pg_collection is None else getattr(pg_collection, each), each) for each in ("pp", "dp")
    )
    for name in list(_TRACKER) if track_names is None else track_names:
        tracked = _TRACKER[name]
        values = tracked["values"]
        all_reduce(values, pp)
        if tracked["reduce_group"] is not None:
            all_reduce(values, resolve_group(tracked["reduce_group"]))
            if not tracked["reduce_group_has_dp"]:
                _average(values, dp)
        if tracked["avg_group"] is not None:
            _average(values, resolve_group(tracked["avg_group"]))


def _average(values: torch.Tensor, group: Group) -> None:
    # gloo has no average.
    all_reduce(values, group)
    values /= group.size


def track_moe_metrics(
    loss_scale: float,
    iteration: int,
    writer: Any = None,
    wandb_writer: Any = None,
    total_loss_dict: dict[str, torch.Tensor] | None = None,
    per_layer_logging: bool = False,
    force_initialize: bool = False,
    track_names: Sequence[str] | None = None,
    num_layers: int | None = None,
    moe_layer_freq: int | Sequence[int] | None = None,
    mtp_num_layers: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Reduce the tracked losses, add their means over MoE layers to ``total_loss_dict``, report and clear them.

    ``loss_scale`` multiplies the losses, for example 1 / micro-batches. ``force_initialize`` creates ``track_names`` on
    ranks without MoE layers, because the reduction is collective. ``writer`` is of TensorBoard and ``wandb_writer`` of
    Weights & Biases. With ``per_layer_logging`` both also get values per layer.

    Raises:
        ValueError: the number of MoE layers does not follow from ``num_layers`` and ``moe_layer_freq``.
    """
    if force_initialize and track_names is not None:
        if num_layers is None:
            raise ValueError("force_initialize needs num_layers, the number of layers of the model")
        device = next((each["values"].device for each in _TRACKER.values()), current_device().torch_device)
        for name in track_names:
            _tracked(name, num_layers, device)
    reduce_aux_losses_tracker_across_ranks(track_names, pg_collection)
    if isinstance(moe_layer_freq, Sequence):
        num_moe_layers = sum(moe_layer_freq)
    elif num_layers is not None and (moe_layer_freq is None or isinstance(moe_layer_freq, int)):
        num_moe_layers = -(-num_layers // (moe_layer_freq or 1))
    else:
        raise ValueError(f"Invalid moe_layer_freq: {moe_layer_freq} with num_layers {num_layers}")
    num_moe_layers += mtp_num_layers or 0
    for name, tracked in _TRACKER.items():
        values = tracked["values"].float() * loss_scale
        mean = values.sum() / num_moe_layers
        if total_loss_dict is not None:
            total_loss_dict[name] = total_loss_dict[name] + mean if name in total_loss_dict else mean
        by_layer = values.tolist() if per_layer_logging and (writer or wandb_writer) else []
        scalars = {name: mean, **{f"moe/{name}_layer_{layer}": value for layer, value in enumerate(by_layer)}}
        if writer:
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, iteration)
        if wandb_writer:
            wandb_writer.log(scalars, iteration)
    clear_aux_losses_tracker()


def get_updated_expert_bias(
    tokens_per_expert: torch.Tensor, expert_bias: torch.Tensor, expert_bias_update_rate: float
) -> torch.Tensor:
    """Return the bias after a step: larger for experts below the mean load of all ranks, smaller for those above.

    Collective over the tensor, data and context parallel ranks; ``tokens_per_expert`` becomes their sum.

    Shapes: ``[..., experts] -> [..., experts]``.
    """
    with torch.no_grad():
        all_reduce(tokens_per_expert, resolve_group(None, "tp_dp_cp"))
        mean = tokens_per_expert.sum(dim=-1, keepdim=True) / tokens_per_expert.shape[-1]
        return expert_bias + (mean - tokens_per_expert).sign() * expert_bias_update_rate


class RandomSTE(torch.autograd.Function):
    """Return random logits of the shape of the input, and pass their gradient to the input (straight-through)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        """Draw random logits."""
        return torch.randn_like(logits)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        """Return the gradient unchanged."""
        return grad_output


def apply_random_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return random logits, for balanced load in benchmarks."""
    result: torch.Tensor = RandomSTE.apply(logits)  # type: ignore[no-untyped-call]
    return result


def router_gating_linear(
    inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, router_dtype: torch.dtype
) -> torch.Tensor:
    """Return the router's logits, computed in ``router_dtype``. Gradients have the dtypes of their tensors.

    Shapes: ``inp: [..., h]``, ``weight: [experts, h]``, ``bias: [experts] -> [..., experts]``.
    """
    return F.linear(inp.to(router_dtype), weight.to(router_dtype), None if bias is None else bias.to(router_dtype))
