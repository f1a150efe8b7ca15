"""The links between GPUs that are not there: when a communication begins, and when the device waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

from megatron.core.process_group import CollectiveCall
from megatron.planner.simulation.recorder import Recorder

_STARTERS = (
    *("allreduce", "all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base"),
    *("all_to_all_single", "alltoall_base", "broadcast", "send"),
)
"""Methods of a process group that begin what the groups' observer has just been told of."""


@contextmanager
def observed_links(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder of the beginning and the end of every communication, and of what is received."""
    wait = FakeWork.wait

    def observed_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.end_transfer(work)
        return wait(work, *args, **kwargs)

    with ExitStack() as stack:
        for name in _STARTERS:
            if hasattr(dist.ProcessGroup, name):
                start = _observed(getattr(dist.ProcessGroup, name), recorder)
                stack.enter_context(patch.object(dist.ProcessGroup, name, start))
        stack.enter_context(patch.object(dist.ProcessGroup, "recv", _observed_receive(recorder)))
        # What is decided by the backend is decided as on GPUs.
        stack.enter_context(patch.object(dist, "get_backend", lambda group=None: "nccl"))
        stack.enter_context(patch.object(FakeWork, "wait", observed_wait))
        yield


def _observed(start: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def observed(group: Any, *args: Any, **kwargs: Any) -> Any:
        work = start(group, *args, **kwargs)
        recorder.begin_transfer(work)
        return work

    return observed


def _observed_receive(recorder: Recorder) -> Callable[..., Any]:
    receive = dist.ProcessGroup.recv

    def observed(group: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        axes = recorder.axes_of_ranks.get(tuple(dist.get_process_group_ranks(group)), ("pp",))
        recorder.communicate(CollectiveCall("receive", axes, group.size(), sum(each.nbytes for each in tensors)))
        work = receive(group, tensors, *args, **kwargs)
        recorder.begin_transfer(work)
        return work

    return observed
