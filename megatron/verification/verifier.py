"""Compare a layout with one process: losses, gradient norms, every gradient, and the parameters after a few steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.config import resolve_arguments
from megatron.core.errors import ConfigurationError, TrainingError
from megatron.training import ForwardStep, ModelProvider
from megatron.verification.cells import Cell
from megatron.verification.rounding import NUM_SEEDS, Errors, ErrorsOfOneProcess, Reference, RoundedStart
from megatron.verification.run_cell import CellResult, compare, gradient_floor, run_cell
from megatron.verification.worker_pool import Job, WorkerPool


@dataclass(frozen=True)
class Tolerance:
    """Relative tolerances of a layout: losses and norms of every step, gradients, and the final parameters."""

    loss: float
    norm: float
    gradient: float
    parameter: float

    @classmethod
    def of_all(cls, value: float) -> Tolerance:
        return cls(value, value, value, value)


NOT_HELD = 1e30
"""Tolerance that accepts any finite difference."""

TOLERANCES: dict[str, Tolerance] = {
    "float64": Tolerance.of_all(1e-9),
    # The maxima over the matrix were 7.8e-8, 2.7e-6 and 2.4e-6.
    "float32": Tolerance(loss=1e-6, norm=3e-5, gradient=3e-5, parameter=NOT_HELD),
    # The maxima over the matrix of dense models were 2.7e-3, 4.7e-2 and 6.1e-2.
    "bfloat16": Tolerance(loss=1e-2, norm=0.1, gradient=0.2, parameter=NOT_HELD),
}
"""Tolerances by dtype; the reference process computes in the same dtype.

The length of Adam's first steps is the learning rate, however small the gradient is. If a gradient is only rounding
error (the bias of a key), the direction of its parameter is random. So low precisions check parameters only through the
losses and norms of the later steps.
"""
MEASURED_DTYPES = ("bfloat16",)
"""Dtypes in which no tolerance fits every model. By default errors are compared with those of one process."""


@dataclass(frozen=True)
class CellReport:
    """Outcome of a test case: ``passed``, ``failed`` or ``refused``, the worst differences, and the reasons.

    Without a tolerance, differences are multiples of the largest error of one process.
    """

    cell: Cell
    outcome: str
    loss_difference: float = 0.0
    norm_difference: float = 0.0
    gradient_difference: float = 0.0
    parameter_difference: float = 0.0
    reasons: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[float, float, float, float]:
        """Return the worst differences of losses, norms, gradients and parameters."""
        return self.loss_difference, self.norm_difference, self.gradient_difference, self.parameter_difference

    def describe(self) -> str:
        """Format one line, and one more line per reason."""
        line = f"{self.outcome:8}{self.cell.name}"
        if self.outcome != "refused":
            line += (
                f" | loss {self.loss_difference:.1e} norm {self.norm_difference:.1e} "
                f"gradients {self.gradient_difference:.1e} parameters {self.parameter_difference:.1e}"
            )
        return "\n".join((line, *(f"        {reason}" for reason in self.reasons)))


class Verifier:
    """Runner of test cases on a pool of processes, compared with one process, which runs once per set of flags.

    ``job`` is the function that a rank runs: `run_cell`, or a function that calls it with another device.
    ``reference_job`` returns the job of the reference process for a test case, by default ``job``.
    """

    def __init__(
        self,
        pool: WorkerPool,
        model_provider: ModelProvider,
        forward_step: ForwardStep,
        dtype: str = "float64",
        tolerance: Tolerance | None = None,
        job: Job = run_cell,
        reference_job: Callable[[Cell], Job] | None = None,
    ) -> None:
        self.pool = pool
        self.model_provider = model_provider
        self.forward_step = forward_step
        self.dtype = dtype
        by_default = None if dtype in MEASURED_DTYPES else TOLERANCES[dtype]
        self.tolerance = by_default if tolerance is None else tolerance
        self.job = job
        self.reference_job = reference_job or (lambda _: job)
        self._references: dict[tuple[Job, tuple[str, ...]], Reference] = {}
        self._measured: dict[tuple[Job, tuple[str, ...]], tuple[Reference, ErrorsOfOneProcess]] = {}

    def check(self, cell: Cell) -> CellReport:
        """Run and compare a test case; a configuration that the command line rejects is reported with its reasons."""
        try:
            resolve_arguments(cell.flags, cell.world_size)
        except ConfigurationError as error:
            return CellReport(cell, "refused", reasons=error.problems)
        try:
            if self.tolerance is None:
                exact, of_one_process = self._measure(cell)
            else:
                reference = self.reference(cell)
            results = self._run(self.job, cell.flags, cell.data, cell.world_size)
        except TrainingError as error:
            return CellReport(cell, "failed", reasons=tuple(str(error).splitlines()))
        if self.tolerance is not None:
            return self._compare(cell, results, reference, self.tolerance)
        found = of_one_process.compare(Errors.of(results, exact))
        return CellReport(cell, "failed" if found.reasons else "passed", *found.multiples, found.reasons)

    def _measure(self, cell: Cell) -> tuple[Reference, ErrorsOfOneProcess]:
        """Return the results of a test case in float64, and the errors of one process, which are measured once.

        Both are computed on the CPU. If the reference process has another device, its errors count too.
        """
        key = job, flags = self.reference_job(cell), cell.reference_flags
        if key not in self._measured:
            exact: list[Reference] = []
            errors = []
            provider = RoundedStart(self.model_provider, self.dtype)
            for seed in range(NUM_SEEDS):
                # The first seed is that of the test case.
                of_seed = (*flags, "--seed", str(seed)) if seed else flags
                (result,) = self._run(run_cell, of_seed, cell.data, 1, "float64", provider)
                exact.append(Reference.of(result))
                errors.append(Errors.of(self._run(run_cell, of_seed, cell.data, 1), exact[-1]))
            if job is not run_cell:
                errors.append(Errors.of(self._run(job, flags, cell.data, 1), exact[0]))
            self._measured[key] = exact[0], ErrorsOfOneProcess(tuple(errors))
        return self._measured[key]

    def _compare(
        self, cell: Cell, results: Sequence[CellResult], reference: Reference, allowed: Tolerance
    ) -> CellReport:
        floor = gradient_floor(reference.gradients)
        gradients = [fragment for result in results for fragment in result.gradients]
        parameters = [fragment for result in results for fragment in result.parameters]
        wrong_gradients, gradient_worst = compare(gradients, reference.gradients, allowed.gradient, floor)
        wrong_parameters, parameter_worst = compare(parameters, reference.parameters, allowed.parameter)
        loss_worst = max(_scalar_difference(result.losses, reference.losses) for result in results)
        norm_worst = max(_scalar_difference(result.grad_norms, reference.grad_norms) for result in results)
        reasons = []
        if not loss_worst <= allowed.loss:
            reasons.append(f"losses {results[0].losses} instead of {reference.losses}")
        if not norm_worst <= allowed.norm:
            reasons.append(f"gradient norms {results[0].grad_norms} instead of {reference.grad_norms}")
        reasons += [f"gradient of {mismatch.describe()}" for mismatch in wrong_gradients]
        reasons += [f"after the steps {mismatch.describe()}" for mismatch in wrong_parameters]
        return CellReport(
            cell,
            "failed" if reasons else "passed",
            loss_worst,
            norm_worst,
            gradient_worst,
            parameter_worst,
            tuple(reasons),
        )

    def reference(self, cell: Cell) -> Reference:
        """Return the reference of a test case, which runs only once."""
        key = job, flags = self.reference_job(cell), cell.reference_flags
        if key not in self._references:
            (result,) = self._run(job, flags, cell.data, 1)
            self._references[key] = Reference.of(result)
        return self._references[key]

    def _run(
        self,
        job: Job,
        flags: Sequence[str],
        data: str,
        world_size: int,
        dtype: str | None = None,
        model_provider: ModelProvider | None = None,
    ) -> list[CellResult]:
        provider = model_provider or self.model_provider
        arguments = tuple(flags), world_size, data, dtype or self.dtype, provider, self.forward_step
        return self.pool.run(job, world_size, *arguments)


def _scalar_difference(actual: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))
