"""Anomaly detector: find faulty training steps, replay them and apply the policy; also fault injection for tests."""

from __future__ import annotations

import hashlib
import math
import platform
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from megatron.config import FaultConfig, RunConfig
from megatron.core.datasets import LeftOut, SkippedSamples
from megatron.core.distributed import BadWeightsError
from megatron.core.errors import TrainingError
from megatron.core.layer_output import LayerOutput
from megatron.core.optimizer import StepOutcome
from megatron.core.pipeline_parallel import ChunkResult, MicrobatchLoss
from megatron.training import (
    BatchSource,
    BegunStep,
    ForwardStep,
    ModelAndOptimizer,
    Runtime,
    StepReduction,
    TrainingStep,
    agree,
)
from megatron.training.callbacks import Callback, TrainingRun
from megatron.training.fault_tolerance.step_replay import (
    FaultAttribution,
    Observed,
    OpenSource,
    Rewind,
    StepReplay,
    StepTrace,
)
from megatron.training.loggers import IntervalAverage, StepReport

_NUM_LARGEST = 100
_TIMES_LARGEST = 10.0
_LEAST_LOSS_SPREAD = 0.01
"""Minimum standard deviation of the losses, relative to their mean, because few steps may be close at random."""
_LEAST_NORM_SPREAD = 0.05
"""Minimum standard deviation of the logarithm of the gradient norms."""


class ResultWatch:
    """Statistics of the losses and gradient norms of accepted steps, which determine the limits for the next ones.

    A loss is a spike if it is more than the threshold of standard deviations above the mean of the window. For gradient
    norms, the logarithm is used. Megatron's checks use the maximum of the first hundred accepted steps.
    """

    def __init__(self, config: FaultConfig) -> None:
        self._config = config
        self._is_active = config.watches
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._norms: deque[float] = deque(maxlen=config.spike_window)
        self.num_seen = 0
        """Number of accepted steps."""
        self._largest_loss = 0.0
        self._largest_norm = 0.0

    @property
    def limits(self) -> tuple[float, float] | None:
        """Return the largest loss and gradient norm that are not a spike, or None if no check is enabled."""
        config = self._config
        if not self._is_active:
            return None
        loss = norm = math.inf
        if config.spike_policy is not None and 2 * len(self._losses) >= config.spike_window:
            least = _LEAST_LOSS_SPREAD * abs(statistics.fmean(self._losses))
            loss = _limit(self._losses, config.spike_threshold, least)
            norm = math.exp(min(_limit(self._norms, config.spike_threshold, _LEAST_NORM_SPREAD), 700.0))
        if self.num_seen >= _NUM_LARGEST:
            if config.check_for_spiky_loss:
                loss = min(loss, _TIMES_LARGEST * self._largest_loss)
            if config.check_for_large_grads:
                norm = min(norm, _TIMES_LARGEST * self._largest_norm)
        return loss, norm

    def add(self, loss: float, norm: float) -> None:
        """Add an accepted step; values that are not finite are ignored."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return
        self._losses.append(loss)
        self._norms.append(math.log(max(norm, 1.0e-30)))
        if self.num_seen < _NUM_LARGEST:
            self._largest_loss = max(self._largest_loss, loss)
            self._largest_norm = max(self._largest_norm, norm)
        self.num_seen += 1

    def describe(self, loss: float, norm: float) -> str:
        """Describe what is wrong with a step, or return an empty string."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"the loss is {loss:g} and the gradient norm {norm:g}"
        largest_loss, largest_norm = self.limits or (math.inf, math.inf)
        found = []
        if loss > largest_loss:
            found.append(f"the loss {loss:.6g} is a spike: the limit from the previous losses is {largest_loss:.6g}")
        if norm > largest_norm:
            found.append(
                f"the gradient norm {norm:.6g} is a spike: the limit from the previous norms is {largest_norm:.6g}"
            )
        return "; ".join(found)


def _limit(values: deque[float], threshold: float, least_spread: float) -> float:
    mean = statistics.fmean(values)
    spread = math.hypot(*(value - mean for value in values)) / math.sqrt(len(values))
    return mean + threshold * max(spread, least_spread)


class FaultInjection:
    """Corruption of the results of one rank's model chunks, in iterations and on a rank that the seed determines.

    Every rank knows the time and place of a fault, but the replay of a step does not use this knowledge.
    """

    def __init__(self, config: FaultConfig, seed: int, rank: int, world_size: int) -> None:
        self._config = config
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._is_due = False
        self._is_broken = False

    def begin(self, iteration: int) -> None:
        """Draw whether a fault occurs in an iteration."""
        rate = self._config.error_injection_rate
        self._is_due = rate > 0 and _draw(self._seed, iteration, "when") % rate == 0

    def end(self) -> None:
        """End the first computation of a step: a transient fault does not recur in the replay."""
        self._is_due = False

    @property
    def suspects_a_right_result(self) -> bool:
        return self._is_due and self._config.error_injection_type == "correct_result"

    def is_here(self, iteration: int) -> bool:
        """Return whether this rank has a fault in the current iteration."""
        return self._is_due and _draw(self._seed, iteration, "where") % self._world_size == self._rank

    def spoil(self, result: ChunkResult, iteration: int) -> ChunkResult:
        """Return a chunk's result, or NaN if this rank's device is to fail."""
        kind = self._config.error_injection_type
        is_here = self.is_here(iteration)
        if is_here and kind == "persistent_error":
            self._is_broken = True
        if not (self._is_broken or (is_here and kind == "transient_error")):
            return result
        if isinstance(result, MicrobatchLoss):
            return replace(result, loss_sum=result.loss_sum * float("nan"))
        if isinstance(result, LayerOutput):
            return result._replace(hidden=result.hidden * float("nan"))
        return result * float("nan")


def _draw(seed: int, iteration: int, purpose: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{iteration}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


AS_ASKED = "--iterations-to-skip"
"""Reason for samples that are skipped at the user's request."""


class AnomalyDetector(Callback):
    """Detector of anomalous results before they reach the weights; every rank has one, and all decide in the same way.

    ``left_out`` are the samples that the run has skipped, and skips again after a rollback. ``newest_known`` returns
    the newest validated checkpoint that the run can roll back to.
    """

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        parts: ModelAndOptimizer,
        forward_step: ForwardStep,
        open_source: OpenSource,
        left_out: SkippedSamples,
        newest_known: Callable[[], int | None],
        log: Callable[[str], None],
    ) -> None:
        self._config = config
        self._faults = config.faults
        self._runtime = runtime
        self._parts = parts
        self.left_out = left_out
        self._newest_known = newest_known
        self._log = log
        self._watch = ResultWatch(config.faults)
        self._trace = StepTrace()
        seed, state = config.initialization.seed, runtime.state
        self._injection = FaultInjection(config.faults, seed, state.rank, state.world_size)
        self._examination = StepReplay(
            config,
            runtime,
            parts,
            forward_step,
            open_source,
            self._trace,
            describe=self._watch.describe,
            prepare=self._prepare,
            was_ever_fine=lambda: self._watch.num_seen > 0,
        )
        self._open_source = open_source
        self._iteration = 0
        self._begun: BegunStep | None = None
        self._updated: BegunStep | None = None
        self._float8_before = None if parts.float8 is None else parts.float8.snapshot()
        self._variation = (0.0, 0.0, 0)

    @classmethod
    def without_run(
        cls,
        config: RunConfig,
        runtime: Runtime,
        parts: ModelAndOptimizer,
        forward_step: ForwardStep,
        open_source: Callable[[], BatchSource],
    ) -> AnomalyDetector:
        """Create the detector for steps outside of a run: there is no checkpoint to roll back to."""
        return cls(
            *(config, runtime, parts, forward_step, lambda consumed_samples, shift: open_source()),
            left_out=SkippedSamples(),
            newest_known=lambda: None,
            log=lambda line: None,
        )

    @property
    def limits(self) -> tuple[float, float] | None:
        """Return the largest accepted loss and gradient norm, or None without limits."""
        if self._injection.suspects_a_right_result:
            return -math.inf, -math.inf
        return self._watch.limits

    @property
    def repeats_all(self) -> bool:
        """Return whether every step is computed twice, to compare the results."""
        return self._faults.rerun_mode == "report_stats"

    def begin(self, begun: BegunStep) -> None:
        """Record the start of a step."""
        self._iteration = begun.iteration
        self._begun = begun
        self._injection.begin(begun.iteration)
        self._trace.clear()
        if self._parts.float8 is not None and self._faults.rerun_mode != "disabled":
            self._float8_before = self._parts.float8.snapshot()

    def see(self, chunk: int, microbatch: int, result: ChunkResult) -> ChunkResult:
        """Record and return a model chunk's result for a micro-batch, corrupted if a fault is injected."""
        result = self._injection.spoil(result, self._iteration)
        if self._faults.rerun_mode != "disabled":
            self._trace.note(chunk, microbatch, result)
        return result

    def reason_to_skip(self, run: TrainingRun, batch_size: int) -> str | None:
        return self.passes_over(run.train_state.iteration, run.train_state.consumed_train_samples, batch_size)

    def after_step(self, run: TrainingRun, report: StepReport) -> None:
        if not report.is_skipped:
            self.accepted(report)

    def on_log(self, run: TrainingRun, report: StepReport, average: IntervalAverage) -> None:
        self.log_variation()

    def accepted(self, report: StepReport) -> None:
        """Record that the latest step was accepted and its update applied."""
        self._updated = self._begun
        self._watch.add(report.lm_loss, report.grad_norm or 0.0)

    def passes_over(self, iteration: int, consumed_samples: int, count: int) -> str | None:
        """Return why the samples of a step must be skipped, or None to train on them."""
        known = self.left_out.meeting(consumed_samples, consumed_samples + count)
        if known is not None:
            return known.reason
        if iteration not in self._faults.iterations_to_skip:
            return None
        self.left_out = self.left_out.with_step(
            LeftOut(start=consumed_samples, end=consumed_samples + count, iteration=iteration + 1, reason=AS_ASKED)
        )
        return AS_ASKED

    def resolve(
        self, step: TrainingStep, begun: BegunStep, trouble: TrainingError | None, agreement: StepReduction
    ) -> tuple[StepReduction, StepOutcome]:
        """Replay a step whose update was not applied, and apply the policy.

        Raises:
            Rewind: the run must roll back to an older checkpoint.
            TrainingError: the run cannot continue.
        """
        if self._faults.rerun_mode == "disabled":
            self._injection.end()
            verdict = FaultAttribution("weights", str(trouble)) if isinstance(trouble, BadWeightsError) else None
            looked = self._watch.describe(agreement.lm_loss, math.inf if trouble else _norm_of(agreement, self._parts))
        else:
            first = self._examination.first(agreement)
            looked = self._watch.describe(first.loss, first.grad_norm)
            self._injection.end()
            verdict = self._examine(step, begun, trouble, first)
            self._record(begun, verdict)
        found = f"iteration {begun.iteration + 1}: {trouble or looked or 'a fault was injected'}"
        if verdict is not None:
            found += f"; {verdict.cause}: {verdict.text}"
        policy = self._faults.spike_policy
        if self._is_to_be_repeated(verdict, trouble, policy):
            self._log(f"WARNING: {found}; the step is computed again, and the new result is used")
            self._prepare()
            with closing(self._open_source(begun.consumed_samples, 0)) as source:
                return step.repeat(source, begun)
        can_be_passed_over = verdict is None or verdict.cause in ("data", "right")
        if policy in (None, "stop") or (verdict is not None and verdict.cause in ("persistent device", "overflow")):
            raise self._ending(found, trouble)
        if policy == "skip" and not can_be_passed_over:
            raise self._ending(found, trouble)
        return self._leave_out_or_rewind(begun, found, verdict, can_be_passed_over, agreement, trouble)

    def compare(self, step: TrainingStep, begun: BegunStep, agreement: StepReduction) -> None:
        """Recompute a step and compare it with its first results; the new gradients are used."""
        norm = self._parts.optimizer.measure()
        self._prepare()
        with closing(self._open_source(begun.consumed_samples, 0)) as source:
            again = agree(step.compute(source, begun), None, self._runtime)
        if self._parts.float8 is not None:
            self._parts.float8.update(self._runtime.state.world, begun.iteration)
        loss, grad_norm, count = self._variation
        loss = max(loss, _difference(agreement.lm_loss, again.lm_loss))
        grad_norm = max(grad_norm, _difference(norm, self._parts.optimizer.measure()))
        self._variation = (loss, grad_norm, count + 1)

    def log_variation(self) -> None:
        """Log how much results varied since the last call, if every step is computed twice."""
        loss, grad_norm, count = self._variation
        if count:
            self._log(
                f" {count} steps computed twice | largest relative difference of the loss: {loss:.3E} | of the "
                f"gradient norm: {grad_norm:.3E} |"
            )
        self._variation = (0.0, 0.0, 0)

    def _examine(
        self, step: TrainingStep, begun: BegunStep, trouble: TrainingError | None, first: Observed
    ) -> FaultAttribution:
        """Replay a step, and restore the state that the computations changed."""
        after = None if self._parts.float8 is None else self._parts.float8.snapshot()
        rng = self._runtime.rng.state_dict()
        verdict = self._examination.examine(step, begun, trouble, first)
        self._runtime.rng.resume(rng, begun.iteration)
        if self._parts.float8 is not None and after is not None:
            self._parts.float8.restore(after)
        return verdict

    def _prepare(self) -> None:
        """Restore the state that a step changes in addition to the weights, and clear the trace."""
        self._trace.clear()
        if self._parts.float8 is not None and self._float8_before is not None:
            self._parts.float8.restore(self._float8_before)

    def _is_to_be_repeated(
        self, verdict: FaultAttribution | None, trouble: TrainingError | None, policy: str | None
    ) -> bool:
        """Return whether to accept the result of a recomputed step."""
        if verdict is not None and verdict.cause == "right":
            return trouble is None
        if verdict is not None and verdict.cause == "transient device":
            return policy in ("skip", "rewind") or (policy is None and trouble is None)
        # As in Megatron, findings of --check-for-spiky-loss and --check-for-large-grads are only reported.
        is_weight_or_device = verdict is not None and verdict.cause in ("weights", "persistent device")
        return policy is None and trouble is None and not is_weight_or_device

    def _leave_out_or_rewind(
        self,
        begun: BegunStep,
        found: str,
        verdict: FaultAttribution | None,
        can_be_passed_over: bool,
        agreement: StepReduction,
        trouble: TrainingError | None,
    ) -> tuple[StepReduction, StepOutcome]:
        is_of_training = verdict is not None and verdict.cause == "training"
        steps = [begun] if can_be_passed_over or is_of_training else []
        if is_of_training and self._updated is not None:
            # The same samples would produce the same weights again, so the previous update must not be repeated either.
            steps.insert(0, self._updated)
        self._check_budget(max(len(steps), 1), found, trouble)
        known = self._newest_known() if self._faults.spike_policy == "rewind" else None
        if not can_be_passed_over and known is None:
            raise self._ending(f"{found}; there is no validated checkpoint to roll back to", trouble)
        if steps:
            self._leave_out(steps, found, verdict)
        else:
            self.left_out = self.left_out.with_rewind()
            self._log(f"WARNING: {found}")
        if known is not None:
            raise Rewind(found)
        return agreement, StepOutcome(success=False, grad_norm=None, num_zeros=None)

    def _check_budget(self, number: int, found: str, trouble: TrainingError | None) -> None:
        """Raise an error if ``number`` more skipped steps or rollbacks exceed the budget."""
        budget = self._faults.max_spikes
        left = budget - self.left_out.num_rewound - sum(each.reason != AS_ASKED for each in self.left_out.steps)
        if left <= 0:
            raise self._ending(f"{found}; --max-spikes {budget} is reached", trouble)
        if number > left:
            room = f"{number} more steps would be skipped, but --max-spikes {budget} allows {left}"
            raise self._ending(f"{found}; {room}", trouble)

    def _leave_out(self, steps: Sequence[BegunStep], found: str, verdict: FaultAttribution | None) -> None:
        """Record that the last step is skipped because of the finding, and a step before it because of its update."""
        reason, samples = (found, ()) if verdict is None else (verdict.text, verdict.samples)
        places = []
        for step in steps:
            start, end = step.consumed_samples, step.consumed_samples + step.global_batch_size
            places.append(f"{start} to {end}")
            what = LeftOut(start=start, end=end, iteration=step.iteration + 1, reason=reason, samples=samples)
            if step is not steps[-1]:
                caused = f"its update preceded iteration {steps[-1].iteration + 1}, for which the finding is: {reason}"
                what = replace(what, reason=caused, samples=())
            self.left_out = self.left_out.with_step(what)
        self._log(f"WARNING: {found}; consumed samples {' and '.join(places)} are skipped")

    def _ending(self, found: str, trouble: TrainingError | None) -> TrainingError:
        known = self._newest_known()
        hint = "" if known is None else f"; --ckpt-step {known} is the newest validated checkpoint of --save"
        return (type(trouble) if trouble is not None else TrainingError)(found + hint)

    def _record(self, begun: BegunStep, verdict: FaultAttribution) -> None:
        """Append a line to the file of rejected results."""
        path = self._faults.result_rejected_tracker_filename
        if path is None or not self._runtime.is_reporter:
            return
        ranks = ",".join(map(str, verdict.ranks)) or "-"
        samples = ",".join(map(str, verdict.samples)) or "-"
        line = (
            f"ts={datetime.now():%Y-%m-%dT%H:%M:%S} node={platform.node()} iteration={begun.iteration + 1} "
            f"cause={verdict.cause.replace(' ', '_')} ranks={ranks} samples={samples} message={verdict.text!r}\n"
        )
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            self._log(f"WARNING: cannot write --result-rejected-tracker-filename {path}: {error.strerror}")


def _norm_of(agreement: StepReduction, parts: ModelAndOptimizer) -> float:
    return math.sqrt(agreement.read_along[0]) / parts.optimizer.loss_scale


def _difference(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1.0e-30)
