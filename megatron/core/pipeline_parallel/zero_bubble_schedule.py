"""ZB-H1: the gradients of the weights, which nobody waits for, fill most of 1F1B's bubble at the same memory.

Qi et al. 2023, https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

from megatron.core.pipeline_parallel.action import Action, Pass


def zero_bubble(
    pp: int, rank: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[Action, ...]:
    """Return 1F1B with the backward pass split, where rank ``r`` puts the weights' part off by ``r`` micro-batches.

    So at most ``pp`` micro-batches are alive on every rank, as many as on the first one under 1F1B, and gradients
    reach the earlier ranks sooner. With F, B and W equally long the bubble is a third of 1F1B's.
    """
    assert num_chunks == 1, "several chunks need the interleaved schedule"
    warmup = min(num_microbatches, pp - rank - 1)
    actions = [Action(Pass.FORWARD, microbatch) for microbatch in range(warmup)]
    for microbatch in range(num_microbatches):
        if warmup + microbatch < num_microbatches:
            actions.append(Action(Pass.FORWARD, warmup + microbatch))
        actions.append(Action(Pass.BACKWARD_INPUT, microbatch))
        if microbatch >= rank:
            actions.append(Action(Pass.BACKWARD_WEIGHT, microbatch - rank))
    first_left = max(0, num_microbatches - rank)
    actions += [Action(Pass.BACKWARD_WEIGHT, microbatch) for microbatch in range(first_left, num_microbatches)]
    return tuple(actions)
