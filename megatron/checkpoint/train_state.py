"""Training progress: values of a run, other than tensors, that change with its iterations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainProgress:
    """Training progress as stored in a checkpoint; the data position is ``consumed_train_samples``.

    ``train_data`` records the position in each data set (see `DataHistory`), or is None if it is unknown.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    floating_point_operations_so_far: float = 0
    train_data: Mapping[str, Any] | None = None


@dataclass
class TrainState:
    """Progress counters of a run, saved in every checkpoint.

    ``iteration`` includes skipped iterations. The floating-point operations are summed over all ranks.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    floating_point_operations_so_far: float = 0.0
    train_data: Mapping[str, Any] | None = None

    def freeze(self) -> TrainProgress:
        return TrainProgress(**dataclasses.asdict(self))

    @classmethod
    def from_progress(cls, progress: TrainProgress) -> TrainState:
        return cls(**dataclasses.asdict(progress))
