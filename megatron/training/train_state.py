"""How far a run has come: the only values of a run that change apart from tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainProgress:
    """Hold how far a run has come, as a checkpoint stores it: the data position is ``consumed_train_samples``."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    floating_point_operations_so_far: float = 0


@dataclass
class TrainState:
    """Count what a run has done; saved in every checkpoint.

    ``iteration`` counts skipped iterations too; the operations are those of all ranks together.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    floating_point_operations_so_far: float = 0.0

    def freeze(self) -> TrainProgress:
        """Return the values as a checkpoint stores them."""
        return TrainProgress(**dataclasses.asdict(self))

    @classmethod
    def from_progress(cls, progress: TrainProgress) -> TrainState:
        """Return the state that a checkpoint stored."""
        return cls(**dataclasses.asdict(progress))
