"""Errors of results in a low precision relative to float64, by which layouts are compared where no tolerance fits all.

A model amplifies rounding errors: those of a norm of small vectors by orders of magnitude more than those of a linear
layer. So the errors of one process, at several seeds, measure the error that a model has in a precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.config import RunConfig
from megatron.core.models import Model
from megatron.core.pipeline_parallel import StageContents
from megatron.core.precision import dtype_from_name
from megatron.training import ModelProvider, Runtime
from megatron.verification.run_cell import Array, CellResult, Fragment, assemble, gradient_floor

NUM_SEEDS = 8
"""Number of seeds at which the errors of one process are measured; each has other weights and samples."""
ALLOWED_MULTIPLE = 3.0
"""A layout's error may be this multiple of the largest error of one process.

Both are errors of the same kind, whose size varies: an error of one number is above this in one of some thousand cases.
"""
STABLE_NORM_ERROR = 0.1
"""Gradient norms of later steps are compared if those of one process have at most this error; it is always allowed."""
_LEAST_ERROR = 2.0**-24


@dataclass(frozen=True)
class RoundedStart:
    """Model provider whose parameters start with values that ``dtype`` has, whatever their own dtype is."""

    model_provider: ModelProvider
    dtype: str

    def __call__(self, config: RunConfig, runtime: Runtime, contents: StageContents) -> Model:
        model = self.model_provider(config, runtime, contents)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype_from_name(self.dtype)))
        return model


@dataclass(frozen=True, eq=False)
class Reference:
    """Losses, gradient norms, gradients and parameters of the reference process."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Array]
    parameters: dict[str, Array]

    @staticmethod
    def of(result: CellResult) -> Reference:
        """Assemble the result of one process."""
        return Reference(result.losses, result.grad_norms, assemble(result.gradients), assemble(result.parameters))


@dataclass(frozen=True)
class Errors:
    """Relative errors of losses and gradient norms by step, of gradients, and errors of parameters.

    ``unknown`` are the names of gradients and parameters that the exact process does not have. ``gradients`` are
    Frobenius norms of differences by name, and ``scales`` relative errors of a gradient's projection
    on the exact one. ``parameters`` is the Frobenius norm of the differences of all parameters, which is not relative.

    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    gradients: dict[str, float]
    scales: dict[str, float]
    parameters: float
    unknown: tuple[str, ...] = ()

    @staticmethod
    def of(results: Sequence[CellResult], exact: Reference) -> Errors:
        """Measure the errors of all ranks; an element that several ranks have counts with its largest error."""
        floor = gradient_floor(exact.gradients)
        gradients = _farthest((x for result in results for x in result.gradients), exact.gradients)
        parameters = _farthest((x for result in results for x in result.parameters), exact.parameters)
        errors, scales = {}, {}
        for name, expected in exact.gradients.items():
            size = float(np.linalg.norm(expected))
            error = gradients[name] - expected
            errors[name] = float(np.linalg.norm(error)) / max(size, floor * expected.size**0.5)
            if size > floor * expected.size**0.5:
                scales[name] = float((error * expected).sum()) / size**2
        squares = sum(float(np.square(parameters[name] - each).sum()) for name, each in exact.parameters.items())
        return Errors(
            _worst([result.losses for result in results], exact.losses),
            _worst([result.grad_norms for result in results], exact.grad_norms),
            errors,
            scales,
            squares**0.5,
            _unknown_tensors(results, exact),
        )


def _unknown_tensors(results: Sequence[CellResult], exact: Reference) -> tuple[str, ...]:
    """Return the names of gradients and parameters that only the layout has."""
    gradients = {x.name for result in results for x in result.gradients} - exact.gradients.keys()
    parameters = {x.name for result in results for x in result.parameters} - exact.parameters.keys()
    return tuple(sorted(gradients | parameters))


def _worst(actual: Sequence[Sequence[float]], expected: Sequence[float]) -> tuple[float, ...]:
    differences = np.abs(np.array(actual) / np.array(expected) - 1.0)
    return tuple(float(each) for each in np.where(np.isnan(differences), np.inf, differences).max(axis=0))


def _farthest(fragments: Iterable[Fragment], exact: Mapping[str, Array]) -> dict[str, Array]:
    """Assemble global tensors of the elements that are farthest from the exact ones; NaN if no rank has an element.

    Fragments of tensors that one process does not have are left to `_unknown_tensors`.
    """
    tensors = {name: np.full(tensor.shape, np.nan) for name, tensor in exact.items()}
    for fragment in fragments:
        if fragment.name not in exact:
            continue
        place = fragment.box.slices
        values = np.where(np.isfinite(fragment.values), fragment.values, np.inf)
        known = tensors[fragment.name][place]
        is_nearer = np.abs(values - exact[fragment.name][place]) <= np.abs(known - exact[fragment.name][place])
        tensors[fragment.name][place] = np.where(is_nearer, known, values)
    return tensors


@dataclass(frozen=True)
class Comparison:
    """Reasons why a layout fails, and the largest multiples of one process's errors, in the order of a report."""

    reasons: tuple[str, ...]
    multiples: tuple[float, float, float, float]


@dataclass(frozen=True)
class ErrorsOfOneProcess:
    """Errors of one process at several seeds."""

    seeds: tuple[Errors, ...]

    def compare(self, errors: Errors) -> Comparison:
        """Compare the errors of a layout with `ALLOWED_MULTIPLE` times the largest ones of one process.

        Gradient norms after the first step are compared only in models in which one process has small errors. Adam's
        first steps give each parameter the same length, so rounding errors of small gradients lead to other parameters.
        In a model that divides by norms of small vectors, a single position can then multiply the gradient norm.
        """
        reasons = [f"{name}: one process has no such tensor" for name in errors.unknown]

        def multiple(name: str, error: float, of_seeds: Iterable[float]) -> float:
            # A NaN of one process counts.
            largest = float(np.max([*of_seeds, _LEAST_ERROR]))
            if not np.isfinite(largest):
                reasons.append(f"{name}: one process has no finite error relative to float64, so none can be compared")
            elif not error <= ALLOWED_MULTIPLE * largest:
                reasons.append(
                    f"{name}: error {error:.1e} relative to float64; that of one process is at most {largest:.1e}, and "
                    f"{ALLOWED_MULTIPLE:g} times that is allowed"
                )
            return float(np.nan_to_num(error / largest, nan=np.inf, posinf=np.inf))

        losses = [
            multiple(f"loss of step {step + 1}", error, (seed.losses[step] for seed in self.seeds))
            for step, error in enumerate(errors.losses)
        ]
        norms = []
        for step, error in enumerate(errors.grad_norms):
            of_seeds = [seed.grad_norms[step] for seed in self.seeds]
            if step == 0:
                norms.append(multiple("gradient norm of step 1", error, of_seeds))
            elif max(of_seeds) <= STABLE_NORM_ERROR:
                # At least the error that is always allowed.
                of_seeds.append(STABLE_NORM_ERROR / ALLOWED_MULTIPLE)
                norms.append(multiple(f"gradient norm of step {step + 1}", error, of_seeds))
        gradients = [
            multiple(f"gradient of {name}", error, (seed.gradients[name] for seed in self.seeds))
            for name, error in errors.gradients.items()
        ]
        # Rounding can make all gradients smaller, so the mean error of one process is no fault.
        scales = [self._scale(seed) for seed in self.seeds]
        mean = sum(scales) / len(scales)
        deviation = abs(self._scale(errors) - mean)
        gradients.append(multiple("scale of the gradients", deviation, (abs(scale - mean) for scale in scales)))
        parameters = multiple("parameters after the steps", errors.parameters, (seed.parameters for seed in self.seeds))
        return Comparison(tuple(reasons), (max(losses), max(norms), max(gradients), parameters))

    def _scale(self, errors: Errors) -> float:
        """Return the error of the gradients' common scale: tensors count by the inverse of their squared errors."""
        squares = {name: sum(seed.gradients[name] ** 2 for seed in self.seeds) for name in errors.scales}
        weights = {name: 1.0 / max(square, _LEAST_ERROR**2) for name, square in squares.items()}
        total = sum(weights.values())
        # If no gradient of one process is finite, neither is the error of their scale.
        weighted = (weight * errors.scales[name] for name, weight in weights.items())
        return sum(weighted) / total if total else np.nan
