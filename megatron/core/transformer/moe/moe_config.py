"""Which layers have experts, how tokens are routed to them, and what balances their load."""

from __future__ import annotations

import dataclasses
import functools

from megatron.core.config_base import NOT_NEGATIVE, POSITIVE, Config, flag
from megatron.core.transformer.layer_pattern import parse_layer_pattern

_BIASED = ("moe_router_enable_expert_bias", True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(Config, in_args=False):
    """Hold the choices of a mixture of experts; without ``num_experts`` every feed-forward is dense."""

    num_experts: int | None = flag(None, role="shape", bounds=POSITIVE)
    """Number of experts of a layer; by default every feed-forward is dense."""
    moe_layer_freq: str = flag("1", metavar="N", role="shape", needs="num_experts", seen_as="moe_layers")
    """Which layers have experts: every Nth from the first on, or a list with a 1 or 0 for each: ([0]+[1]*3)*4."""
    moe_ffn_hidden_size: int = flag(0, role="shape", bounds=NOT_NEGATIVE, needs="num_experts")
    """Width of one expert; by default that of a dense feed-forward layer."""
    moe_shared_expert_intermediate_size: int | None = flag(None, role="shape", bounds=POSITIVE, needs="num_experts")
    """Width of the shared expert, through which every token goes; by default there is none."""
    moe_shared_expert_gate: bool = flag(False, role="shape", needs="moe_shared_expert_intermediate_size")
    """Multiply the shared expert's output by a gate, one number a token."""
    moe_shared_expert_overlap: bool = flag(False, role="run", needs="moe_shared_expert_intermediate_size")
    """Compute the shared expert while tokens travel to their experts."""

    moe_router_topk: int = flag(2, role="meaning", bounds=POSITIVE, needs="num_experts")
    """Number of experts that each token goes to."""
    moe_router_pre_softmax: bool = flag(False, role="meaning", needs="num_experts")
    """Take the softmax over all experts, before the top ones are chosen, in place of over the chosen ones."""
    moe_router_score_function: str = flag(
        "softmax", choices=("softmax", "sigmoid"), not_built=("sqrtsoftplus",), role="meaning", needs="num_experts"
    )
    """What makes an expert's score of its logit; scores by sigmoid are divided by their sum over the chosen experts."""
    moe_router_num_groups: int | None = flag(None, role="meaning", bounds=POSITIVE, needs="moe_router_group_topk")
    """Number of equal groups of experts, of which each token goes to a few only."""
    moe_router_group_topk: int | None = flag(None, role="meaning", bounds=POSITIVE, needs="moe_router_num_groups")
    """Number of groups that each token goes to: those whose best experts have the largest sum of scores."""
    moe_router_topk_scaling_factor: float | None = flag(None, role="meaning", bounds=POSITIVE, needs="num_experts")
    """Multiply the chosen experts' weights by this factor."""
    moe_router_dtype: str | None = flag(None, choices=("fp32", "fp64"), role="meaning", needs="num_experts")
    """Type in which the router multiplies, and that the weights of the experts' outputs keep until these are summed; by
    default the model's own. Scores are computed in float32 at least."""
    moe_router_enable_expert_bias: bool = flag(False, role="shape", needs="num_experts")
    """Choose experts by their scores plus a bias, which moves after each step towards an even load."""
    moe_router_bias_update_rate: float = flag(1e-3, role="recipe", bounds=NOT_NEGATIVE, where=_BIASED)
    """How far the experts' bias moves in a step."""

    moe_router_force_load_balancing: bool = flag(False, role="recipe", needs="num_experts")
    """Choose experts in training by random numbers in place of logits, for measurements under an even load: the same
    numbers at any layout. Evaluation and generation choose by logits."""
    moe_router_load_balancing_type: tuple[str, ...] = flag(
        ("aux_loss",),
        nargs="+",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        not_built=("sinkhorn",),
        role="recipe",
        needs="num_experts",
    )
    """What evens the load of experts: an auxiliary loss of each micro-batch, of each sequence or of the global batch so
    far, or several of these; or none."""
    moe_aux_loss_coeff: tuple[float, ...] = flag(
        (0.0,), nargs="+", role="recipe", bounds=None, needs="num_experts", metavar="X"
    )
    """Weight of the auxiliary loss; one for each of --moe-router-load-balancing-type."""
    moe_z_loss_coeff: float | None = flag(None, role="recipe", bounds=NOT_NEGATIVE, needs="num_experts")
    """Weight of the router's z-loss, the squared logarithm of the sum of its exponentials; by default there is none."""

    moe_expert_capacity_factor: float | None = flag(None, role="meaning", bounds=POSITIVE, needs="num_experts")
    """Drop what an expert is given beyond this factor x its even share of a micro-batch; by default nothing is
    dropped."""
    moe_token_drop_policy: str = flag(
        "probs", choices=("probs", "position"), role="meaning", needs="moe_expert_capacity_factor"
    )
    """Which tokens a full expert keeps: those with the largest weights, or the first."""
    moe_pad_expert_input_to_capacity: bool = flag(False, role="run", needs="moe_expert_capacity_factor", in_args=False)
    """Give every expert as many rows as its capacity, some of them empty."""
    moe_token_dispatcher_type: str = flag(
        "allgather",
        choices=("allgather", "alltoall", "flex"),
        role="run",
        needs="num_experts",
    )
    """How tokens reach experts on other ranks: all tokens are gathered, or each goes to its experts' ranks only.
    flex is alltoall: DeepEP's and HybridEP's kernels are not used."""

    @property
    def moe_aux_losses(self) -> dict[str, float]:
        """Return the coefficient of each auxiliary loss that evens the load."""
        names = [name for name in self.moe_router_load_balancing_type if name != "none"]
        coefficients = self.moe_aux_loss_coeff * (len(names) if len(self.moe_aux_loss_coeff) == 1 else 1)
        return {name: coefficient for name, coefficient in zip(names, coefficients) if coefficient}


def moe_layers(config: MoEConfig, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether its feed-forward is one of experts.

    Raises:
        ValueError: --moe-layer-freq is none; the message says why.
    """
    if config.num_experts is None:
        return (False,) * num_layers
    return _layers_with_experts(config.moe_layer_freq.strip(), num_layers)


# A search for the fastest layout asks for the same ones thousands of times.
@functools.lru_cache(maxsize=64)
def _layers_with_experts(text: str, num_layers: int) -> tuple[bool, ...]:
    if text.isdecimal() and int(text) > 0:
        return tuple(layer % int(text) == 0 for layer in range(num_layers))
    return parse_layer_pattern(text, num_layers)
