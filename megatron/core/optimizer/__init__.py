"""Parameter groups, main parameters, loss scaling, gradient clipping and learning-rate schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.optimizer.clip_grads import DedupMask, check_weights, sum_of_squares
    from megatron.core.optimizer.distrib_optimizer import make_optimizer
    from megatron.core.optimizer.inner_optimizer import examine_rule, is_decayed, load_fused_adam, measure_state_bytes
    from megatron.core.optimizer.muon import is_orthogonalized
    from megatron.core.optimizer.optimizer import MegatronOptimizer, StepOutcome
    from megatron.core.optimizer.optimizer_config import (
        OptimizerConfig,
        host_state_bytes,
        parse_optimizer_args,
        parse_override,
        state_bytes,
    )
    from megatron.core.optimizer.optimizer_param_scheduler import (
        OptimizerParamScheduler,
        ScheduleConfig,
        conflicting_fields,
        learning_rate,
        reconcile_schedules,
        styles_unknown_to_megatron,
        weight_decay,
    )
    from megatron.core.optimizer.param_rates import ParamRates

__getattr__ = lazy_exports(
    __name__,
    {
        "clip_grads": "DedupMask check_weights sum_of_squares",
        "distrib_optimizer": "make_optimizer",
        "inner_optimizer": "examine_rule is_decayed load_fused_adam measure_state_bytes",
        "muon": "is_orthogonalized",
        "optimizer": "MegatronOptimizer StepOutcome",
        "optimizer_config": "OptimizerConfig host_state_bytes parse_optimizer_args parse_override state_bytes",
        "optimizer_param_scheduler": (
            "OptimizerParamScheduler ScheduleConfig conflicting_fields learning_rate reconcile_schedules "
            "styles_unknown_to_megatron weight_decay"
        ),
        "param_rates": "ParamRates",
    },
)
