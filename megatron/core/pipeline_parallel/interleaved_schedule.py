"""Interleaved 1F1B: each rank holds several model chunks, which divides the bubble by their number.

Narayanan et al. 2021, https://arxiv.org/abs/2104.04473.
"""

from __future__ import annotations

from megatron.core.pipeline_parallel.action import Action, Pass


def microbatch_groups(pp: int, num_microbatches: int, group_size: int | None = None) -> tuple[range, ...]:
    """Cut the micro-batches into the groups that one chunk takes in a row before the next chunk's turn.

    A group smaller than the pipeline would stall it: by the time that the group has come back from the last rank, the
    first one has nothing left to do, and around a short last group 1F1B even comes to wait in a circle. So groups are
    about ``group_size`` (by default ``pp``) and nearly equal, and none is below ``pp`` unless there is only one.
    """
    count = -(-num_microbatches // (group_size or pp))
    if num_microbatches < count * pp:
        count = max(1, num_microbatches // pp)
    base, num_larger = divmod(num_microbatches, count)
    groups, start = [], 0
    for index in range(count):
        end = start + base + (index < num_larger)
        groups.append(range(start, end))
        start = end
    return tuple(groups)


def interleaved(
    pp: int, rank: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[Action, ...]:
    """Return interleaved 1F1B for any number of micro-batches; one chunk is plain 1F1B.

    All ranks take (group, chunk, micro-batch) in the same order; a rank runs ``(v - 1) * group`` forward passes more
    than the last rank needs for its first backward pass, and two more for each rank behind it. The bubble is
    (p - 1) / (v * m) of the busy time where m is at least p.
    """
    groups = microbatch_groups(pp, num_microbatches, microbatch_group_size)
    chunks = range(num_chunks)
    forwards = [Action(Pass.FORWARD, m, chunk) for group in groups for chunk in chunks for m in group]
    backwards = [Action(Pass.BACKWARD, m, chunk) for group in groups for chunk in reversed(chunks) for m in group]
    lead = (pp - rank - 1) * (2 if num_chunks > 1 else 1)
    warmup = min(len(forwards), lead + (num_chunks - 1) * len(groups[0]))
    actions = forwards[:warmup]
    for index, backward in enumerate(backwards):
        actions += forwards[warmup + index : warmup + index + 1]
        actions.append(backward)
    return tuple(actions)
