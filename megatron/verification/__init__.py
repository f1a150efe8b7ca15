"""Parity tests: check that a parallel layout computes the same results as one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.verification.cells import MAX_WORLD_SIZE, SHAPES, Cell, matrix
    from megatron.verification.collective_recorder import record_cell
    from megatron.verification.communication_replay import communication_problems
    from megatron.verification.hybrid_cells import HYBRID_SHAPES, hybrid_matrix
    from megatron.verification.model_cells import (
        ATTENTION_SHAPES,
        EXPERT_SHAPES,
        LATENT_SHAPES,
        PREDICTION_SHAPES,
        SPARSE_SHAPES,
        attention_matrix,
        expert_matrix,
        latent_matrix,
        prediction_matrix,
    )
    from megatron.verification.random_cells import fuzz
    from megatron.verification.rounding import ALLOWED_MULTIPLE
    from megatron.verification.traffic import Traffic, TrafficSum, Volume
    from megatron.verification.training_cells import odd_matrix, recipe_matrix, sharding_matrix
    from megatron.verification.verifier import NOT_HELD, Tolerance, Verifier
    from megatron.verification.worker_pool import WorkerPool

__getattr__ = lazy_exports(
    __name__,
    {
        "cells": "Cell MAX_WORLD_SIZE SHAPES matrix",
        "collective_recorder": "record_cell",
        "communication_replay": "communication_problems",
        "hybrid_cells": "HYBRID_SHAPES hybrid_matrix",
        "model_cells": (
            "ATTENTION_SHAPES EXPERT_SHAPES LATENT_SHAPES PREDICTION_SHAPES SPARSE_SHAPES attention_matrix "
            "expert_matrix latent_matrix prediction_matrix"
        ),
        "random_cells": "fuzz",
        "rounding": "ALLOWED_MULTIPLE",
        "traffic": "Traffic TrafficSum Volume",
        "training_cells": "odd_matrix recipe_matrix sharding_matrix",
        "verifier": "NOT_HELD Tolerance Verifier",
        "worker_pool": "WorkerPool",
    },
)
