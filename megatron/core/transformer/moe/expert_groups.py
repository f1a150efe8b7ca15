"""Process groups of a layer of experts: the ranks that hold the experts and exchange their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.parallel_state import ParallelState
from megatron.core.process_group import Group, single_rank_group


@dataclass(frozen=True, eq=False)
class ExpertGroups:
    """Hold the groups that a layer of experts communicates over.

    ``model`` are the ranks that hold one copy of all experts: ``tensor_size`` neighbors cut the same experts among
    them. ``tp`` and ``cp`` hold parts of the same micro-batch, ``dp`` other micro-batches.
    """

    model: Group
    tensor_size: int
    tp: Group
    cp: Group
    dp: Group

    @property
    def size(self) -> int:
        """Return over how many ranks, or groups of ranks that cut experts, the experts are spread."""
        return self.model.size // self.tensor_size

    @property
    def rank(self) -> int:
        return self.model.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        return self.model.rank % self.tensor_size

    @classmethod
    def of(cls, state: ParallelState) -> ExpertGroups:
        """Return the groups of a rank of a training."""
        return cls(state.expert_model, state.sizes.expert_tp, state.tp, state.cp, state.dp)

    @classmethod
    def like_dense(cls, tp: Group, cp: Group | None) -> ExpertGroups:
        """Return the groups of a model whose experts are all on every rank, cut as dense layers are."""
        return cls(tp, tp.size, tp, cp or single_rank_group(("cp",)), single_rank_group(("dp",)))
