"""The optimizer of a run: main parameters, loss scale, clipping, the update, and its state for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.collectives import all_gather_objects, all_reduce
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.flat_parameters import ParamPart
from megatron.core.errors import TrainingError
from megatron.core.optimizer.clip_grads import (
    GradMeter,
    GradStatistics,
    clip_coefficient,
    counting_group,
    is_counted,
    sum_of_squares,
)
from megatron.core.optimizer.grad_scaler import make_grad_scaler
from megatron.core.optimizer.inner_optimizer import InnerOptimizer, build_param_groups
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.precision import arithmetic_dtype
from megatron.core.sharding import ParamSpec
from megatron.core.timers import Timers


@dataclass(frozen=True)
class StepOutcome:
    """Say whether the parameters were updated, and the gradient norm and number of zeros where they were."""

    success: bool
    grad_norm: float | None
    num_zeros: int | None


@dataclass(frozen=True, eq=False)
class _OptimizedPart:
    """Pair the part of a parameter that this rank updates with its main parameter: itself, or its float32 copy."""

    part: ParamPart
    main_param: torch.Tensor

    @property
    def has_main_copy(self) -> bool:
        return self.main_param is not self.part.values


class MegatronOptimizer:
    """Update the parameters of model chunks from their reduced gradients.

    A step passes over the gradients twice: once for the norm, which is not finite exactly where some gradient is not,
    and once for the update, which applies the loss scale and the clipping as one factor. Half-precision parameters have
    float32 main parameters that are updated and then rounded into the model. No update is made from a gradient that is
    not finite: the device decides that, so that the host reads the norm when it reads the loss. ``fused_adam`` (apex's
    class, see ``core.kernels.apex``) is used on CUDA.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[DistributedDataParallel],
        state: ParallelState,
        fused_adam: type[torch.optim.Optimizer] | None = None,
    ) -> None:
        self.config = config
        self._chunks = tuple(model_chunks)
        self._state = state
        self._timers = Timers()
        self._scaler = make_grad_scaler(config)
        self._meter = GradMeter(model_chunks, state)
        parts_of: dict[int, list[_OptimizedPart]] = {}
        for chunk in model_chunks:
            for part in chunk.parts:
                parts_of.setdefault(id(part.parameter), []).append(_optimized(part))
        trained = [p for chunk in model_chunks for p in chunk.parameters() if p.requires_grad]
        groups = [
            ([part for p in group.parameters for part in parts_of.get(id(p), [])], group.weight_decay_multiplier)
            for group in build_param_groups(trained)
        ]
        self._parts = [part for parts, _ in groups for part in parts]
        self._inner = InnerOptimizer(
            config, [([part.main_param for part in parts], multiplier) for parts, multiplier in groups], fused_adam
        )
        self._main_params = [part.main_param for part in self._parts]
        self._with_copy = [part for part in self._parts if part.has_main_copy]
        self.learning_rate = 0.0
        self.set_learning_rate(config.lr, config.weight_decay)

    @property
    def loss_scale(self) -> float:
        """Return the factor by which the loss must be multiplied before the backward pass."""
        return self._scaler.scale

    @property
    def num_steps(self) -> int:
        """Return how many updates have been made."""
        return self._inner.num_steps

    def set_learning_rate(self, learning_rate: float, weight_decay: float) -> None:
        """Set what the next step uses."""
        self.learning_rate = learning_rate
        self._inner.set_learning_rate(learning_rate, weight_decay)

    def step(self) -> StepOutcome:
        """Update the parameters, or skip the update where a float16 gradient has overflowed.

        Raises:
            TrainingError: as `finish_step` does.
        """
        return self.finish_step(self.begin_step().tolist())

    @torch.no_grad()
    def begin_step(self, timers: Timers | None = None) -> torch.Tensor:
        """Update the parameters unless a gradient is not finite, and return what `finish_step` has to be told.

        On CUDA nothing waits for the device but ``timers``, which time the parts of the step.

        Shapes: ``-> [1 or 2]`` float64.
        """
        self._timers = timers or Timers()
        with self._timers("optimizer-unscale-and-check-inf", log_level=1):
            totals = self._meter.measure(self.config.log_num_zeros_in_grad, self._timers)
        with self._timers("optimizer-clip-main-grad", log_level=1):
            norm = totals[0].sqrt()
            scale = self._scaler.scale
            multiplier = clip_coefficient(norm / scale, self.config.clip_grad) / scale
        self._update(norm.isfinite(), multiplier)
        return totals

    @torch.no_grad()
    def finish_step(self, totals: Sequence[float]) -> StepOutcome:
        """Adapt the loss scale and the count of steps to a step that was begun, and say what has become of it.

        Raises:
            TrainingError: a gradient is not finite, nothing is float16, and the check for it is on; the message names
                the parameters and the ranks. All ranks raise.
        """
        statistics = GradStatistics.from_totals(totals)
        scale = self._scaler.scale
        self._scaler.update(found_inf=not statistics.is_finite)
        if not statistics.is_finite:
            if self.config.params_dtype != "float16" and self._checks_for_nan:
                self._raise_not_finite()
            return StepOutcome(success=False, grad_norm=None, num_zeros=None)
        self._inner.num_steps += 1
        return StepOutcome(success=True, grad_norm=statistics.norm / scale, num_zeros=statistics.num_zeros)

    @torch.no_grad()
    def params_norm(self) -> float:
        """Return the norm of the whole model's main parameters; every rank that holds a part of it must call."""
        total = torch.zeros((), dtype=torch.float64, device=self._chunks[0].grad_buffers[0].grad_data.device)
        for part in self._parts:
            if is_counted(part.part.spec, self._state):
                total += sum_of_squares(part.main_param)
        all_reduce(total, counting_group(self._chunks, self._state))
        return math.sqrt(total.item())

    @torch.no_grad()
    def reload_main_params(self) -> None:
        """Take the main parameters from the model's, after weights were loaded without optimizer state."""
        for part in self._with_copy:
            part.main_param.copy_(part.part.values)

    def sharded_state(self) -> dict[str, tuple[ParamSpec, torch.Tensor]]:
        """Return the tensors that a checkpoint holds, each with its description, under names that are unique here.

        The description carries the global name, ``optimizer.<state>.<parameter>``; several local tensors can be parts
        of one global tensor, and then the later names end in the offset of their part. Tensors are the live ones:
        filling them in place loads them. Main parameters are present where they are not the model's own.
        """
        result: dict[str, tuple[ParamSpec, torch.Tensor]] = {}
        for part in self._parts:
            tensors = {name: self._inner.state_of(part.main_param, name) for name in self._inner.state_names}
            if part.has_main_copy:
                tensors["main_param"] = part.main_param
            for kind, tensor in tensors.items():
                for part_spec, view in part.part.described(tensor):
                    spec = part_spec.with_prefix(f"optimizer.{kind}.")
                    name = spec.name
                    if name in result:
                        name += "@" + ",".join(str(offset) for offset in spec.pieces[0].global_box.offset)
                    assert name not in result
                    result[name] = (spec, view)
        return result

    def scalar_state(self) -> dict[str, Any]:
        """Return the rest of the state as JSON-ready values."""
        return {"num_steps": self._inner.num_steps, "grad_scaler": self._scaler.state_dict()}

    def load_scalar_state(self, state: Mapping[str, Any]) -> None:
        """Set what ``scalar_state`` returned.

        Raises:
            CheckpointError: the state does not fit this optimizer.
        """
        self._scaler.load_state_dict(state["grad_scaler"])
        self._inner.set_num_steps(int(state["num_steps"]))

    @property
    def _checks_for_nan(self) -> bool:
        return any(chunk.config.check_for_nan_in_loss_and_grad for chunk in self._chunks)

    def _update(self, is_finite: torch.Tensor, grad_multiplier: torch.Tensor) -> None:
        """Update the model from the gradients times a factor, if they are finite."""
        with self._timers("optimizer-copy-to-main-grad", log_level=1):
            for part in self._parts:
                # A view of where the gradient was reduced, except where gradients are kept in bf16.
                part.main_param.grad = part.part.gradient.to(part.main_param.dtype)
        with self._timers("optimizer-inner-step", log_level=1):
            self._inner.step_if(is_finite, self._main_params, grad_multiplier)
        for main_param in self._main_params:
            main_param.grad = None
        if not self._with_copy:
            return
        with self._timers("optimizer-copy-main-to-model-params", log_level=1):
            torch._foreach_copy_([p.part.values for p in self._with_copy], [p.main_param for p in self._with_copy])

    def _raise_not_finite(self) -> None:
        local = [name for chunk in self._chunks for name in chunk.names_of_bad_local_gradients()]
        # The norm is not finite on any rank, so every rank comes here.
        reports = all_gather_objects(local, self._state.world)
        ranks = [
            f"rank {rank}: {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            for rank, names in zip(self._state.world.ranks, reports)
            if names
        ]
        raise TrainingError(
            "a gradient is not finite before the optimizer step; no parameter was changed; "
            + ("; ".join(ranks[:8]) or "each gradient is finite but their norm is not")
            + "; --no-check-for-nan-in-loss-and-grad skips such iterations instead of stopping"
        )


def _optimized(part: ParamPart) -> _OptimizedPart:
    main_dtype = arithmetic_dtype(part.values.dtype)
    return _OptimizedPart(part, part.values if main_dtype is part.values.dtype else part.values.to(main_dtype))
