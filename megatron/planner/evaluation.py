"""Predictions of measured runs, and how far they are from what was measured, by model and overall."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.errors import ConfigurationError, DataError
from megatron.planner.gpu import Gpu, gpu_in_text
from megatron.planner.implementations import Implementation
from megatron.planner.measured_runs import MeasuredRun, leaving_out
from megatron.planner.prediction import HOPPER_MACHINES, Platform, Prediction, predict
from megatron.planner.recorded_plan import recorded_implementation, recorded_plan

_MIB = 2**20
_OUTCOMES = ("ok", "oom", "error")


@dataclass(frozen=True)
class EvaluatedRun:
    """Hold a measured run beside its prediction; memory is of the kind that was measured."""

    run: MeasuredRun
    prediction: Prediction
    padded_vocab_size: int | None = None

    @property
    def memory_mib(self) -> float | None:
        """Return the predicted memory of the fullest GPU."""
        prediction = self.prediction
        size = prediction.tensor_bytes if self.run.shows_allocator else prediction.used_bytes
        return None if size is None else size / _MIB

    @property
    def ms_per_iter(self) -> float | None:
        """Return the predicted milliseconds of a step."""
        return None if self.prediction.time is None else 1e3 * self.prediction.time.total

    @property
    def memory_error(self) -> float | None:
        """Return the relative error of memory, where it is scored."""
        measured = self.run.measured
        return _error(self.memory_mib, measured.memory_mib if measured.scores_memory else None)

    @property
    def time_error(self) -> float | None:
        """Return the relative error of time, where it is scored."""
        measured = self.run.measured
        return _error(self.ms_per_iter, measured.ms_per_iter if measured.scores_time else None)

    @property
    def is_outcome_right(self) -> bool | None:
        """Return whether the run came to what is predicted, where that is scored."""
        measured = self.run.measured
        if not measured.scores_outcome or measured.outcome not in _OUTCOMES:
            return None
        return self.prediction.outcome == measured.outcome

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as it is written to a file."""
        prediction, stages = self.prediction, self.prediction.stages
        return {
            "id": self.run.id,
            "outcome": prediction.outcome,
            "memory_mib": _rounded(self.memory_mib, 1),
            "ms_per_iter": _rounded(self.ms_per_iter, 2),
            "tflops_per_gpu": _rounded(prediction.tflops, 2),
            "reason": prediction.reason,
            "parameters_by_stage": [stage.parameters for stage in stages],
            "padded_vocab_size": self.padded_vocab_size,
            "tensor_mib_by_stage": [round(stage.total / _MIB, 1) for stage in stages],
        }


def evaluate(
    runs: Iterable[MeasuredRun],
    implementation: Implementation | None = None,
    gpu: Gpu | None = None,
    platform: Platform = HOPPER_MACHINES,
    left_out: list[DataError] | None = None,
) -> Sequence[EvaluatedRun]:
    """Predict every run, under the implementation and the GPU that are given or that its record names.

    With a list ``left_out`` records that are not of a training run are left out, and their errors added.

    Raises:
        DataError: without ``left_out``: a record's field is missing or of another kind.
    """
    evaluated = []
    for run in runs:
        with leaving_out(left_out):
            evaluated.append(_evaluate(run, implementation or recorded_implementation(run.fields), gpu, platform))
    return evaluated


def describe_errors(evaluated: Sequence[EvaluatedRun]) -> Sequence[str]:
    """Return a table of errors by model and overall, and a line for each model whose fastest layout is known."""
    models = list(dict.fromkeys(each.run.model_name for each in evaluated))
    by_model = {name: [each for each in evaluated if each.run.model_name == name] for name in models}
    width = max(len(name) for name in (*models, "overall"))
    lines = [f"{'model':{width}}  runs   memory: mean    worst     time: mean    worst   outcomes right"]
    lines += [_line(f"{name:{width}}", group) for name, group in by_model.items()]
    lines.append(_line(f"{'overall':{width}}", evaluated))
    return [*lines, *_fastest(by_model)]


def _evaluate(run: MeasuredRun, implementation: Implementation, gpu: Gpu | None, platform: Platform) -> EvaluatedRun:
    hardware = run.fields.part("hardware")
    described = hardware.text("gpu")
    usable_mib = hardware.optional("mem_total_mib")
    gpu_type = gpu or gpu_in_text(described)
    try:
        plan = recorded_plan(run.fields)
    except ConfigurationError as error:
        return EvaluatedRun(run, Prediction("error", "; ".join(error.problems)))
    usable = usable_mib * _MIB if usable_mib and gpu is None else None
    prediction = predict(plan, implementation, gpu_type, usable, platform)
    if gpu_type is None and prediction.reason is None:
        reason = f"no figures are known of the GPU {described[:80]!r}: no time is predicted; name one with --gpu"
        prediction = Prediction("ok", reason, prediction.stages, prediction.used_bytes)
    return EvaluatedRun(run, prediction, plan.model.padded_vocab_size)


def _line(name: str, group: Sequence[EvaluatedRun]) -> str:
    memory = _mean_and_worst(each.memory_error for each in group)
    time = _mean_and_worst(each.time_error for each in group)
    outcomes = [each.is_outcome_right for each in group if each.is_outcome_right is not None]
    right = f"{sum(outcomes)} of {len(outcomes)}" if outcomes else "-"
    return f"{name}  {len(group):4}   {memory}        {time}   {right}"


def _mean_and_worst(errors: Iterable[float | None]) -> str:
    sizes = [abs(error) for error in errors if error is not None]
    if not sizes:
        return f"{'-':>12} {'-':>8}"
    return f"{100 * sum(sizes) / len(sizes):11.2f}% {100 * max(sizes):7.2f}%"


def _fastest(by_model: Mapping[str, Sequence[EvaluatedRun]]) -> Iterable[str]:
    """Yield which run of a model is the fastest, by tokens a second and GPU, and which is predicted to be."""
    for name, group in by_model.items():
        times = {each.run.id: each for each in group if each.time_error is not None}
        if len(times) > 1:
            measured = min(times, key=lambda key: _gpu_time(times[key], times[key].run.measured.ms_per_iter))
            predicted = min(times, key=lambda key: _gpu_time(times[key], times[key].ms_per_iter))
            said = "as predicted" if measured == predicted else f"predicted was {predicted}"
            yield f"fastest of {name}: {measured}, {said}"


def _gpu_time(each: EvaluatedRun, milliseconds: float | None) -> float:
    """Return GPU-seconds a sample."""
    fields = each.run.fields
    assert milliseconds is not None, "only runs with a time are compared"
    return milliseconds * fields.integer("world_size", 1) / fields.integer("global_batch", 1)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1.0


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
