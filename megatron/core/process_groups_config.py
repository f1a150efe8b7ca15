"""ProcessGroupCollection: the process groups of a model and of its gradient reductions under megatron-core's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from megatron.core import process_state

if TYPE_CHECKING:
    import torch.distributed as dist

_GETTERS: Mapping[str, tuple[str, Mapping[str, bool]]] = {
    "tp": ("get_tensor_model_parallel_group", {"check_initialized": False}),
    "pp": ("get_pipeline_model_parallel_group", {"check_initialized": False}),
    "mp": ("get_model_parallel_group", {"check_initialized": False}),
    "embd": ("get_embedding_group", {"check_initialized": False}),
    "pos_embd": ("get_position_embedding_group", {"check_initialized": False}),
    "cp": ("get_context_parallel_group", {"check_initialized": False}),
    "tp_cp": ("get_tensor_and_context_parallel_group", {"check_initialized": False}),
    "hcp": ("get_hierarchical_context_parallel_groups", {"check_initialized": False}),
    "ep": ("get_expert_model_parallel_group", {"check_initialized": False}),
    "expt_tp": ("get_expert_tensor_parallel_group", {"check_initialized": False}),
    "tp_ep": ("get_expert_tensor_and_model_parallel_group", {"check_initialized": False}),
    "tp_ep_pp": ("get_expert_tensor_model_pipeline_parallel_group", {"check_initialized": False}),
    "tp_dp_cp": (
        "get_tensor_and_data_parallel_group",
        {"check_initialized": False, "with_context_parallel": True},
    ),
    "dp": ("get_data_parallel_group", {}),
    "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}),
    "expt_dp": ("get_expert_data_parallel_group", {"check_initialized": False}),
    "intra_dp_cp": ("get_data_parallel_group", {"with_context_parallel": True, "partial_data_parallel": True}),
    "intra_expt_dp": (
        "get_expert_data_parallel_group",
        {"check_initialized": False, "partial_expert_data_parallel": True},
    ),
    "inter_dist_opt": ("get_inter_distributed_optimizer_instance_group", {"check_initialized": False}),
    "intra_dist_opt": ("get_intra_distributed_optimizer_instance_group", {"check_initialized": False}),
}
"""The function of the process-wide groups that returns each group, and its arguments."""


@dataclass(init=False, repr=False)
class ProcessGroupCollection:
    """Process groups by name; a group that was not passed is missing and may be assigned later.

    ``mp`` is tensor x pipeline, ``embd`` and ``pos_embd`` are the stages with the word and position embeddings, ``hcp``
    the levels of context parallelism. ``expt_tp``, ``tp_ep``, ``tp_ep_pp`` and ``expt_dp`` belong to experts. The
    ``intra_*`` and ``inter_*`` groups are within and between instances of the distributed optimizer.

    Raises:
        ValueError: a keyword is not a group's name.
    """

    tp: dist.ProcessGroup = field(init=False)
    pp: dist.ProcessGroup = field(init=False)
    mp: dist.ProcessGroup = field(init=False)
    embd: dist.ProcessGroup = field(init=False)
    pos_embd: dist.ProcessGroup = field(init=False)
    cp: dist.ProcessGroup = field(init=False)
    tp_cp: dist.ProcessGroup = field(init=False)
    hcp: list[dist.ProcessGroup] = field(init=False)
    ep: dist.ProcessGroup = field(init=False)
    expt_tp: dist.ProcessGroup = field(init=False)
    tp_ep: dist.ProcessGroup = field(init=False)
    tp_ep_pp: dist.ProcessGroup = field(init=False)
    tp_dp_cp: dist.ProcessGroup = field(init=False)
    dp: dist.ProcessGroup = field(init=False)
    dp_cp: dist.ProcessGroup = field(init=False)
    expt_dp: dist.ProcessGroup = field(init=False)
    intra_dp_cp: dist.ProcessGroup = field(init=False)
    intra_expt_dp: dist.ProcessGroup = field(init=False)
    inter_dist_opt: dist.ProcessGroup = field(init=False)
    intra_dist_opt: dist.ProcessGroup = field(init=False)

    def __init__(self, **groups: Any) -> None:
        for name, group in groups.items():
            if name not in _GETTERS:
                raise ValueError(f"Unknown attribute: {name}")
            setattr(self, name, group)

    def __repr__(self) -> str:
        present = {each.name: getattr(self, each.name) for each in fields(self) if hasattr(self, each.name)}
        sizes = [f"{name}({_size(group)})" for name, group in present.items()]
        return f"ProcessGroupCollection({', '.join(sizes) or 'empty'})"

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Sequence[str] | None = None) -> ProcessGroupCollection:
        """Return the process-wide groups, or those among them that ``required_pgs`` names.

        Raises:
            ValueError: a name is unknown.
            AssertionError: the process-wide groups are not initialized.
        """
        names = list(_GETTERS) if required_pgs is None else required_pgs
        if unknown := [name for name in names if name not in _GETTERS]:
            raise ValueError(f"Invalid process groups requested: {unknown}")
        calls = {name: _GETTERS[name] for name in names}
        return cls(**{name: getattr(process_state, getter)(**given) for name, (getter, given) in calls.items()})


def _size(group: Any) -> Any:
    """Return a group's size, or the number of levels of a list of groups."""
    return group if group is None else len(group) if isinstance(group, list) else group.size()
