"""The optimizer of a run: main parameters, loss scale, clipping, update, and its state for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.collectives import all_gather_objects, all_reduce, any_rank
from megatron.core.cuda_graph import GraphBackend, Work
from megatron.core.distributed import DistributedDataParallel, ParamShard
from megatron.core.errors import ConfigurationError, TrainingError
from megatron.core.host_memory import HostCopies
from megatron.core.optimizer.clip_grads import (
    ALL_KINDS,
    KINDS,
    DedupMask,
    GradNorm,
    GradStatistics,
    check_weights,
    describe_bad_gradients,
    grad_multipliers,
    kind_of,
    multiplied_kinds,
    sum_of_squares,
)
from megatron.core.optimizer.cpu_offloading import HostOffload, split_groups
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, make_grad_scaler
from megatron.core.optimizer.inner_optimizer import InnerOptimizer, UpdateRule, examine_rule
from megatron.core.optimizer.muon import is_orthogonalized
from megatron.core.optimizer.muon_shard_exchange import MuonShardExchange
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_rates import ParamRates, Rate
from megatron.core.optimizer.quantized_state import QuantizedState
from megatron.core.optimizer.step_graphs import StepGraphs
from megatron.core.optimizer.update_bucket import ShardGroup, UpdateBucket, cut_into_buckets, described_state
from megatron.core.optimizer.weight_average import AVERAGE, WeightAverage
from megatron.core.parallel_state import ParallelState
from megatron.core.sharding import ParamSpec, spec_of
from megatron.core.timers import Timers


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step: whether the parameters were updated, the gradient norm and the number of zeros."""

    success: bool
    grad_norm: float | None
    num_zeros: int | None


class MegatronOptimizer:
    """Optimizer that updates the parameters of model chunks from their reduced gradients.

    A step reads the gradients twice: for the norm, which is not finite if a gradient is not, and for the update, which
    applies the loss scale and the clipping as one factor. Half-precision parameters have float32 main parameters, which
    are updated and then rounded into the model. Non-finite gradients are never applied: the device decides this, so
    that the host can read the norm later, together with the loss. ``fused_adam`` (apex's class, see
    ``core.optimizer.inner_optimizer``) is used on CUDA.

    If the configuration offloads a fraction of the parameters (see `HostOffload`), this fraction, in their order with
    weight-decayed parameters first, is updated on the host, which then waits for the norm. ``host_copies`` creates the
    object for copies that overlap with the device's work.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[DistributedDataParallel],
        state: ParallelState,
        fused_adam: type[torch.optim.Optimizer] | None = None,
        host_copies: Callable[[], HostCopies] = HostCopies,
    ) -> None:
        self.config = config
        self._chunks = tuple(model_chunks)
        self._state = state
        self._timers = Timers()
        self._scaler = make_grad_scaler(config)
        by_kind = config.clips_by_kind
        self._meter = GradNorm(model_chunks, state, *((kind_of, KINDS) if by_kind else ()))
        self._rates = ParamRates(config)
        self.num_steps = 0
        self._num_skipped = 0
        self._num_at_minimum = 0
        if config.use_torch_optimizer_for_cpu_offload:
            fused_adam = None
        rule = examine_rule(config)
        is_elementwise = rule.is_elementwise
        on_host: list[UpdateBucket] = []
        self._on_device: list[UpdateBucket] = []
        several = list(self._shard_groups())
        for rate, groups in several:
            away, here = split_groups(groups, config.offload_fraction)
            on_host += [
                UpdateBucket(config, bucket, on_host=True, rate=rate, is_elementwise=is_elementwise)
                for bucket in cut_into_buckets(away)
            ]
            self._on_device += [
                UpdateBucket(
                    *(config, bucket, fused_adam),
                    rate=rate,
                    is_elementwise=is_elementwise,
                    # Parameters of several rates alternate in the buffers: torch's kernels update them.
                    fuses=len(several) == 1,
                )
                for bucket in self._device_buckets(here)
            ]
        if not is_elementwise:
            self._check_whole(rule, (*on_host, *self._on_device))
        if config.optimizer == "muon":
            self._on_device += self._matrix_buckets()
        self.offload = HostOffload(config, on_host, host_copies()) if on_host else None
        self._buckets = (*on_host, *self._on_device)
        self._average = None if config.ema_decay is None else WeightAverage(self._buckets, config.ema_decay)
        # Float32 copies of quantized state that `sharded_state` returned, to be encoded again after they have been
        # filled.
        self._lent: list[tuple[QuantizedState, torch.Tensor]] = []
        self.row_factors: Callable[[], Iterable[tuple[torch.nn.Parameter, torch.Tensor]]] | None = None
        """Called after each update for factors of the rows of some parameters (see `QueryKeyClip`); collective."""
        self._graphs: StepGraphs | None = None
        # The loss scale of the next step on the device, for graphs, and the number that was written there.
        self._scale: torch.Tensor | None = None
        self._written_scale = 0.0
        self.learning_rate = 0.0
        self.set_learning_rate(config.lr, config.weight_decay, config.decoupled_lr)

    @property
    def loss_scale(self) -> float:
        """Return the factor by which the loss must be multiplied before the backward pass."""
        return self._scaler.scale

    def capture_steps(self, backend: GraphBackend, num_warmup_steps: int) -> None:
        """Run norm, clipping and update as CUDA graphs after ``num_warmup_steps`` steps.

        The learning rate, the weight decay, the number of updates and a dynamic loss scale are then on the device.
        Collective.

        Raises:
            ConfigurationError: the host takes part in the update of some parameters. All ranks raise.
        """
        updated = [bucket.inner for bucket in self._buckets if bucket.shards]
        captured = [inner for inner in updated if isinstance(inner, InnerOptimizer) and inner.can_be_captured]
        if any_rank(len(captured) < len(updated), self._state.world):
            raise ConfigurationError(
                "--optimizer-cuda-graph: only the fused kernel of Adam, with one learning rate and at most two weight "
                "decays, can be captured, and some parameters are updated without it; install Triton, or omit "
                "--optimizer-cuda-graph"
            )
        for inner in captured:
            inner.keep_rates_on_device()
        if isinstance(self._scaler, DynamicGradScaler):
            device = self._chunks[0].grad_buffers[0].grad_data.device
            self._scale = torch.zeros((), dtype=torch.float64, device=device)
        self._graphs = StepGraphs(backend, num_warmup_steps)

    def set_learning_rate(
        self, learning_rate: float, weight_decay: float, decoupled_learning_rate: float | None = None
    ) -> None:
        """Set the next step's values; ``decoupled_learning_rate`` is for the word embedding and the output layer."""
        self.learning_rate = learning_rate
        for bucket in self._buckets:
            own = decoupled_learning_rate if bucket.rate.is_decoupled else None
            common = learning_rate if own is None else own
            bucket.inner.set_learning_rate(common * bucket.rate.multiplier, weight_decay)

    def step(self) -> StepOutcome:
        """Update the parameters, or skip the update if a float16 gradient has overflowed.

        Raises:
            TrainingError: as `finish_step` does.
        """
        return self.finish_step(self.begin_step().tolist())

    @torch.no_grad()
    def begin_step(
        self, timers: Timers | None = None, accept: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Update the parameters unless a gradient is not finite, and return the totals for `finish_step`.

        ``accept`` receives the gradient norm and may veto the update by a flag on the device, which must be the same on
        all ranks. On CUDA nothing waits for the device except ``timers``, which time the parts of the step.

        Shapes: ``-> [1 or 2]`` float64; of ``accept``: ``[] -> [] bool``.
        """
        self._lent.clear()
        for inner in self._inner:
            inner.forget_lent_numbers()
            if self.num_steps == 0:
                inner.drop_made_state()
        self._timers = timers or Timers()
        if self._graphs is not None:
            self._graphs.begin_step()
        with self._timers("optimizer-unscale-and-check-inf", log_level=1):
            totals, of_kinds = self._meter.measure_kinds(
                self.config.log_num_zeros_in_grad, self._inner_timers, self._run
            )
        with self._timers("optimizer-clip-main-grad", log_level=1):
            scale = self._scale_of_step()
            norm, is_wanted, *factors = self._run("clip", lambda: self._clip(totals[0], of_kinds, scale))
            multipliers = dict(zip(multiplied_kinds(self.config), factors, strict=True))
        if accept is not None:
            is_wanted.logical_and_(accept(norm / scale))
        self._update(is_wanted, multipliers)
        if (average := self._average) is not None:

            def follow() -> tuple[torch.Tensor, ...]:
                average.follow(is_wanted)
                return ()

            self._run("average", follow)
        return totals

    def _clip(
        self, square_sum: torch.Tensor, of_kinds: torch.Tensor, scale: float | torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the norm, whether it is finite, and the gradient multipliers of `multiplied_kinds`."""
        norm = square_sum.sqrt()
        multipliers = grad_multipliers(norm, of_kinds, scale, self.config)
        # A norm is not negative: this is one operation on CUDA, ``isfinite`` four.
        return norm, norm < math.inf, *multipliers.values()

    def _scale_of_step(self) -> float | torch.Tensor:
        """Return the loss scale, on the device if graphs read it there."""
        scale = self._scaler.scale
        if self._scale is None:
            return scale
        if scale != self._written_scale:
            self._scale.fill_(scale)
            self._written_scale = scale
        return self._scale

    @property
    def _inner_timers(self) -> Timers:
        """Return the timers of parts of a graph: none, because a graph cannot wait for the device."""
        return self._timers if self._graphs is None else Timers()

    def _run(self, name: str, work: Work) -> tuple[torch.Tensor, ...]:
        """Run a part of the step, as a CUDA graph if steps are captured."""
        return work() if self._graphs is None else self._graphs.run(name, work)

    def _step_buckets(
        self,
        name: str,
        buckets: Sequence[UpdateBucket],
        is_finite: torch.Tensor,
        grad_multipliers: Mapping[str, torch.Tensor],
    ) -> None:
        """Update some buckets, as one part of the step."""
        timers = self._inner_timers

        def step() -> tuple[torch.Tensor, ...]:
            for bucket in buckets:
                bucket.step_if(is_finite, grad_multipliers[bucket.rate.kind], timers)
            return ()

        if self._graphs is None:
            step()
        elif any(bucket.shards for bucket in buckets):
            with self._timers("optimizer-inner-step", log_level=1):
                self._graphs.run(name, step)

    @torch.no_grad()
    def measure(self) -> float:
        """Return the norm of the reduced gradients without the loss scale, without updating anything; collective."""
        return GradStatistics.from_totals(self._meter.measure().tolist()).norm / self._scaler.scale

    def begin_param_gather(self) -> None:
        """Start the all-gathers for the next forward pass, if it waits for any."""

    @torch.no_grad()
    def finish_step(self, totals: Sequence[float], is_accepted: bool = True, *, gathers: bool = True) -> StepOutcome:
        """Update the loss scale and the step count after `begin_step`, and return the outcome of the step.

        ``is_accepted`` is the result of ``accept`` in `begin_step`. A step that was vetoed or that raises does not
        change the loss scale, because it may be computed again. With ``gathers``, `begin_param_gather` follows.

        Raises:
            BadWeightsError: a gradient is not finite because a weight is not.
            TrainingError: a gradient is not finite, or its norm has overflowed, although the model is not float16 and
                the check is enabled; or too many consecutive iterations were skipped. The message names the parameters
                and the ranks. All ranks raise.
        """
        statistics = GradStatistics.from_totals(totals)
        if not statistics.is_finite:
            self._refuse_or_skip()
            self._scaler.update(found_inf=True)
            if gathers:
                self.begin_param_gather()
            return StepOutcome(success=False, grad_norm=None, num_zeros=None)
        self._num_skipped = self._num_at_minimum = 0
        grad_norm = statistics.norm / self._scaler.scale
        if is_accepted:
            self._scaler.update(found_inf=False)
            self.num_steps += 1
        if gathers:
            self.begin_param_gather()
        return StepOutcome(success=is_accepted, grad_norm=grad_norm, num_zeros=statistics.num_zeros)

    @torch.no_grad()
    def params_norm(self) -> float:
        """Return the norm of the whole model's main parameters; all ranks with a part of the model must call it."""
        for chunk in self._chunks:
            # Main parameters in the model's own precision are in the buffers that are all-gathered.
            chunk.finish_param_gather()
        total = torch.zeros((), dtype=torch.float64, device=self._chunks[0].grad_buffers[0].grad_data.device)
        counting = DedupMask(self._chunks, self._state)
        for bucket in self._buckets:
            with bucket.main_params_open():
                for optimized in bucket.shards:
                    if counting.counts(optimized.shard.spec):
                        total += sum_of_squares(optimized.main_param).to(total.device)
        all_reduce(total, counting.group)
        return math.sqrt(total.item())

    @torch.no_grad()
    def reload_main_params(self) -> None:
        """Reset the main parameters to the model's weights, after loading weights without optimizer state."""
        for bucket in self._buckets:
            bucket.reload_main_params()
        self.restart_average()

    def restart_average(self) -> None:
        """Restart the moving average from the current weights, if there is one."""
        if self._average is not None:
            self._average.restart()

    @property
    def has_average(self) -> bool:
        return self._average is not None

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Replace the model's weights by their moving average inside the context; collective."""
        assert self._average is not None
        with torch.no_grad():
            for chunk in self._chunks:
                chunk.finish_param_gather()
            with self._average.in_place_of_weights():
                self._gather_weights()
                with torch.enable_grad():
                    yield
            self._gather_weights()

    def held_tensors(self) -> Iterator[torch.Tensor]:
        """Yield all stored tensors of the state, and all main parameters that are not the model's own weights."""
        for bucket in self._buckets:
            yield from bucket.held()
        if self._average is not None:
            yield from (self._average.of(optimized) for bucket in self._buckets for optimized in bucket.shards)

    def sharded_state(self) -> dict[str, tuple[ParamSpec, torch.Tensor]]:
        """Return the tensors of a checkpoint with their descriptions, under names that are unique on this rank.

        The description has the global name, ``optimizer.<state>.<parameter>``. Several local tensors can be shards of
        one global tensor; the names of all but the first then end in the offset of their shard. The tensors are live:
        filling them in place loads them. Main parameters are included if they are not the model's own weights.
        Quantized state is returned as float32 copies on the host, which `load_scalar_state` encodes again.
        """
        result: dict[str, tuple[ParamSpec, torch.Tensor]] = {}
        for inner in self._inner:
            inner.make_state()
        for bucket in self._buckets:
            for optimized in bucket.shards:
                average = () if self._average is None else ((AVERAGE, self._average.of(optimized)),)
                for kind, tensor in (*bucket.state_of(optimized), *average):
                    for shard_spec, view in described_state(optimized, self._readable(bucket, tensor)):
                        spec = shard_spec.with_prefix(f"optimizer.{kind}.")
                        name = spec.name
                        if name in result:
                            name += "@" + ",".join(str(offset) for offset in spec.shards[0].global_box.offset)
                        if name in result:
                            # A scalar that belongs to several shards of one parameter.
                            name += f"+{optimized.shard.start}"
                        assert name not in result
                        result[name] = (spec, view)
        return result

    def scalar_state(self) -> dict[str, Any]:
        """Return the rest of the state as JSON-ready values."""
        return {"num_steps": self.num_steps, "grad_scaler": self._scaler.state_dict()}

    def load_scalar_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``scalar_state`` returned.

        Raises:
            CheckpointError: the state does not fit this optimizer.
        """
        self._scaler.load_state_dict(state["grad_scaler"])
        self.num_steps = int(state["num_steps"])
        for compact, values in self._lent:
            compact.encode(values.to(compact.tensor.device), self.num_steps)
        self._lent.clear()
        for inner in self._inner:
            inner.restore_numbers()
        for bucket in self._buckets:
            bucket.inner.set_num_steps(self.num_steps)
            bucket.reload_unrounded()

    @property
    def _inner(self) -> Iterator[InnerOptimizer]:
        return (bucket.inner for bucket in self._buckets if isinstance(bucket.inner, InnerOptimizer))

    def _check_whole(self, rule: UpdateRule, buckets: Sequence[UpdateBucket]) -> None:
        """Reject sharded parameters for an update rule that is not elementwise; collective."""
        shards = sorted(
            optimized.shard.spec.name for bucket in buckets for optimized in bucket.shards if not optimized.is_whole
        )
        if any_rank(bool(shards), self._state.world):
            of_ranks = all_gather_objects(shards[0] if shards else None, self._state.world)
            name = next(name for name in of_ranks if name is not None)
            raise ConfigurationError(
                f"--optimizer {self.config.elementwise}: {rule.name} is not elementwise (its update of a shard differs "
                f"from its update of the whole parameter), but a rank has only a shard of {name}; train with "
                "--tensor-model-parallel-size 1 and --expert-model-parallel-size 1, without "
                "--use-distributed-optimizer, FSDP and optimizer offload"
            )
        if self.config.use_precision_aware_optimizer:
            raise ConfigurationError(
                f"--optimizer {self.config.elementwise}: {rule.name} is not elementwise, but "
                "--use-precision-aware-optimizer stores flattened parts of parameters; omit "
                "--use-precision-aware-optimizer"
            )

    def _gather_weights(self) -> None:
        for chunk in self._chunks:
            chunk.start_param_gather()
            chunk.finish_param_gather()

    @property
    def _checks_for_nan(self) -> bool:
        return any(chunk.config.check_for_nan_in_loss_and_grad for chunk in self._chunks)

    def _update(self, is_finite: torch.Tensor, grad_multipliers: Mapping[str, torch.Tensor]) -> None:
        """Update the model from the gradients times the multipliers of their kinds, if they are finite."""
        if self.offload is not None:
            self.offload.begin()
        self._step_buckets("update", self._on_device, is_finite, grad_multipliers)
        if self.offload is not None:
            with self._timers("optimizer-inner-step", log_level=1):
                self.offload.finish(is_finite, grad_multipliers[ALL_KINDS])
        if self.row_factors is not None:
            self._scale_rows(is_finite, self.row_factors())

    def _scale_rows(self, is_updated: torch.Tensor, factors: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Multiply rows of parameters by factors if ``is_updated`` is true; otherwise change nothing."""
        of_parameter = {id(parameter): torch.where(is_updated, rows, 1.0) for parameter, rows in factors}
        for bucket in self._buckets:
            scaled = [each for each in bucket.shards if id(each.shard.parameter) in of_parameter]
            if scaled:
                with bucket.main_params_open():
                    for optimized in scaled:
                        optimized.scale_rows(of_parameter[id(optimized.shard.parameter)])

    def _device_buckets(self, groups: list[ShardGroup]) -> Iterator[list[ShardGroup]]:
        """Yield the groups that are updated together on the device: all ``groups``, unless the state is quantized."""
        if self.config.use_precision_aware_optimizer:
            # Quantized state is decoded one bucket at a time.
            yield from cut_into_buckets(groups)
        elif groups:
            yield groups

    def _shard_groups(self) -> Iterator[tuple[Rate, list[ShardGroup]]]:
        """Yield this rank's shards by learning rate and, within, by weight decay."""
        for rate, parameters in self._rates.by_rate([p for p in self._trained() if not self._is_orthogonalized(p)]):
            yield rate, self._groups_of(parameters)

    def _matrix_buckets(self) -> Iterator[UpdateBucket]:
        """Yield the buckets of matrices, which are owned by ranks of the groups that share them; collective."""
        is_sharded = any(chunk.is_sharded for chunk in self._chunks)
        matrices = [p for p in self._trained() if self._is_orthogonalized(p)]
        for is_expert, model, replicas in (
            (False, self._state.tp, self._state.dp_cp),
            (True, self._state.expert_model, self._state.expert_dp),
        ):
            if is_sharded and replicas.levels is not None:
                replicas = replicas.levels[0]
            several = self._rates.by_rate([p for p in matrices if spec_of(p).is_expert == is_expert])
            for rate, chosen in several:
                groups = self._groups_of(chosen)
                shards = [shard for shards, _ in groups for shard in shards]
                exchange = MuonShardExchange(chosen, shards, model, replicas, is_sharded=is_sharded)
                yield UpdateBucket(self.config, groups, exchange=exchange, rate=rate)

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self._chunks for p in chunk.parameters() if p.requires_grad]

    def _is_orthogonalized(self, parameter: torch.nn.Parameter) -> bool:
        return self.config.optimizer == "muon" and is_orthogonalized(spec_of(parameter))

    def _groups_of(self, parameters: Sequence[torch.nn.Parameter]) -> list[ShardGroup]:
        """Group this rank's shards of some parameters by weight decay."""
        shards_of: dict[int, list[ParamShard]] = {}
        for chunk in self._chunks:
            for shard in chunk.shards:
                shards_of.setdefault(id(shard.parameter), []).append(shard)
        return [
            ([shard for p in chosen for shard in shards_of.get(id(p), [])], multiplier)
            for multiplier, chosen in self._rates.by_decay(parameters)
        ]

    @torch.no_grad()
    def _readable(self, bucket: UpdateBucket, tensor: torch.Tensor) -> torch.Tensor:
        compact = bucket.compact(tensor)
        if compact is None:
            return tensor
        values = compact.decoded().to("cpu")
        self._lent.append((compact, values))
        return values

    def _refuse_or_skip(self) -> None:
        """Raise on all ranks if a non-finite step must not be skipped, or if too many steps were skipped."""
        world = self._state.world
        # The norm is the same on all ranks, so all ranks call this. Skipping cannot help if a weight is not finite.
        check_weights(self._chunks, world)
        is_scaled = self.config.params_dtype == "float16"
        if not is_scaled and self._checks_for_nan:
            raise TrainingError(
                f"{describe_bad_gradients(self._chunks, world, self._scaler.scale)}; no parameter was changed; pass "
                "--no-check-for-nan-in-loss-and-grad to skip such iterations"
            )
        self._num_skipped += 1
        self._num_at_minimum = self._num_at_minimum + 1 if self._scaler.is_at_minimum else 0
        limit, reason = self.config.max_consecutive_skipped_iterations, None
        if self._num_at_minimum >= self.config.hysteresis:
            reason = (
                "float16 gradients overflow even at the smallest loss scale (--min-loss-scale "
                f"{self.config.min_loss_scale:g})"
            )
        elif limit and self._num_skipped >= limit:
            reason = (
                f"{limit} iterations in a row had gradients that are not finite (--max-consecutive-skipped-iterations)"
            )
        if reason is not None:
            remedy = "train with --bf16, or lower --lr or --min-loss-scale" if is_scaled else "lower --lr"
            found = describe_bad_gradients(self._chunks, world, self._scaler.scale)
            raise TrainingError(f"{reason}; {found}; the weights are finite; {remedy}")
