"""Simulate training steps of any rank of any layout on a simulated GPU, and check the FLOPs of its kernels.

Hardware FLOPs are the FLOPs of all kernels of a step. Model FLOPs leave out three parts of them: recomputation,
attention scores that the model does not use or that are computed twice (masked scores, and scores that the backward
pass of FlashAttention recomputes), and the optimizer's GEMMs. Model FLOPs are compared with the closed form of the
model.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from megatron.checkpoint import TrainState
from megatron.config import RunConfig
from megatron.core.datasets import GPTSample
from megatron.core.models import Model
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel import StageContents
from megatron.core.process_group import Group
from megatron.core.timers import Timer, Timers
from megatron.planner import ExpertLayer, Gpu
from megatron.planner.simulation.fake_device import simulated_gpu
from megatron.planner.simulation.recorder import Operation, Recorder, StepRecord
from megatron.planner.simulation.roofline import is_attention
from megatron.training import (
    BatchSource,
    ForwardStep,
    ModelAndOptimizer,
    ModelProvider,
    Runtime,
    TrainingStep,
    build_model_and_optimizer,
    make_runtime,
)
from megatron.training.fault_tolerance import AnomalyDetector

_BACKWARD = 2
"""Ratio of backward to forward FLOPs: both operands have gradients."""
_KERNELS = "megatron/core/ops/"
"""Path of the batched matmuls of unfused attention."""
_TOLERANCE = 0.01


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs per step, forward and backward, that a rank's layers need: for GEMMs and for attention."""

    gemms: float
    attention: float

    @property
    def total(self) -> float:
        return self.gemms + self.attention


NO_FLOPS = ModelFlops(0.0, 0.0)


@dataclass(frozen=True)
class CountedFlops:
    """FLOPs that a step's kernels compute, by part.

    ``gemms`` and ``attention`` are FLOPs of the forward and backward passes without recomputation, ``recomputed`` those
    of recomputation, and ``optimizer`` those of the update. ``uncounted`` counts the operators whose FLOPs are unknown.
    """

    gemms: float
    attention: float
    recomputed: float
    optimizer: float
    uncounted: Mapping[str, int]

    @property
    def hardware(self) -> float:
        return self.gemms + self.attention + self.recomputed + self.optimizer

    def of_model(self, needed: ModelFlops) -> float:
        """Return the FLOPs of the passes, limited to the attention FLOPs that the model needs."""
        return self.gemms + min(self.attention, needed.attention)


def count_flops(operations: Iterable[Operation]) -> CountedFlops:
    """Return the FLOPs of a step by part."""
    parts, uncounted = defaultdict[str, float](float), Counter[str]()
    for each in operations:
        parts[_part(each)] += each.flops
        uncounted[each.name] += each.is_uncounted
    return CountedFlops(
        gemms=parts["gemms"],
        attention=parts["attention"],
        recomputed=parts["recomputed"],
        optimizer=parts["optimizer"],
        uncounted=+uncounted,
    )


def _part(operation: Operation) -> str:
    if operation.is_recomputed:
        return "recomputed"
    if operation.phase in ("optimizer", "end"):
        return "optimizer"
    # Names of Triton kernels contain a dot, after the module name. Those that are one GEMM belong to linear layers.
    is_product = operation.name in ("bmm", "baddbmm") or ("." in operation.name and operation.gemm is None)
    is_score = is_product and _KERNELS in operation.where and not operation.is_expert
    return "attention" if is_score or is_attention(operation) else "gemms"


def needed_flops(config: RunConfig, pipeline_rank: int) -> ModelFlops:
    """Return the FLOPs per step that the layers of a rank need with a balanced load of ranks and experts.

    A packed sample has two documents of equal length, as in a dry run, and attention within each document is counted.
    Experts with limited capacity compute up to their capacity, including padding. With low-rank adapters (LoRA) weights
    have no gradients, and the first layer of the model is counted without a backward pass, since it may need none.
    """
    model, length = config.model, config.data.seq_length
    gemms = attention = 0.0
    backward = 1 if model.lora_rank else _BACKWARD
    documents = 2 if config.data.reset_attention_mask else 1
    for chunk in config.stage_layout.chunks(pipeline_rank):
        further = range(model.num_layers, model.num_layers + model.mtp.mtp_depth) if chunk.has_loss else ()
        for number in (*chunk.layer_numbers, *further):
            is_forward_only = model.lora_rank and number == 0
            of_gemms, _ = model.layer_forward_flops(number, length)
            of_attention = documents * model.layer_forward_flops(number, length // documents)[1]
            of_gemms += _beyond_choices(config, number)
            if model.has_indexer(number):
                # An indexer's linear layers have no input gradients, and without its loss no weight gradients.
                is_trained = bool(model.mla.dsa_indexer_loss_coeff) and not model.lora_rank
                of_indexer = 2.0 * length * model.mla.indexer_multiply_adds(model.hidden_size, length)[0]
                gemms -= of_indexer * (backward - is_trained)
            gemms += of_gemms * (1 if is_forward_only else 1 + backward)
            attention += of_attention * (1 if is_forward_only else 1 + _BACKWARD)
        if chunk.has_loss:
            gemms += model.output_forward_flops(length) * (1 + backward)
    sequences = config.training.global_batch_size / config.data_parallel_size
    share = sequences / (model.tensor_model_parallel_size * model.context_parallel_size)
    return ModelFlops(gemms * share, attention * share)


def _beyond_choices(config: RunConfig, layer_number: int) -> float:
    """Return the change of a layer's forward FLOPs by expert capacity: padding adds, dropped tokens subtract."""
    model, length = config.model, config.data.seq_length
    if model.moe.moe_expert_capacity_factor is None or not model.has_experts(layer_number):
        return 0.0
    sequences = config.training.micro_batch_size
    layer = ExpertLayer(model, length * sequences // model.context_parallel_size, sequences, element=1)
    chosen = layer.rows * model.moe.moe_router_topk * layer.sizes.expert_tp
    width = model.moe.moe_router_topk * model.moe.moe_ffn_hidden_size
    of_experts = model.expert_input_size * width * (3 if model.is_gated else 2)
    return 2.0 * length * of_experts * (layer.given / chosen - 1)


def check_flops(counted: CountedFlops, needed: ModelFlops) -> None:
    """Check that the kernels compute at least the FLOPs that the model needs.

    Attention FLOPs beyond those of the model do not count, since they would hide a missing GEMM.

    Raises:
        RuntimeError: the kernels compute less, so the FLOPs of some kernel are not counted and the step time would be
            too short.
    """
    of_model = counted.of_model(needed)
    if of_model >= (1 - _TOLERANCE) * needed.total:
        return
    unknown = ", ".join(counted.uncounted) or "none"
    raise RuntimeError(
        f"the dry run counted {of_model:.4g} FLOPs in this rank's forward and backward passes, but its layers need "
        f"{needed.total:.4g} by DecoderConfig.layer_forward_flops; correct that if the "
        "model has changed, add a missing GEMM to megatron/planner/simulation/recorder.py, or register the FLOPs of a "
        f"custom operator with torch.utils.flop_counter.register_flop_formula; operators with unknown FLOPs: {unknown}"
    )


_GPUS_A_MACHINE = 8
_PHASE_OF_TIMER: Mapping[str, str] = {
    "forward-backward": "backward",
    "batch-generator": "batch",
    "forward-compute": "forward",
    "all-grads-sync": "reduction",
    "optimizer": "optimizer",
}
"""Phases by timer name; the rest of the schedule is the backward pass."""


@dataclass(frozen=True)
class DryRun:
    """Record of a simulated rank, and properties of the rank.

    ``model_flops`` are the FLOPs per step of the full model divided by the number of ranks, without recomputation.
    ``num_microbatches`` is the number of micro-batches per step. ``start_peak_bytes`` is the peak memory before the
    first step. ``needed_flops`` are the FLOPs that this rank's own layers need.
    """

    record: StepRecord
    rank: int
    world_size: int
    pipeline_rank: int
    pipeline_size: int
    is_half: bool
    num_parameters: int
    num_layers: int
    num_microbatches: int
    num_chunks: int
    model_flops: float
    start_peak_bytes: int = 0
    needed_flops: ModelFlops = NO_FLOPS


def dry_run(
    config: RunConfig,
    rank: int,
    gpu: Gpu,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    *,
    num_steps: int = 2,
    has_triton: bool = True,
) -> DryRun:
    """Run steps of one rank on a simulated GPU and return the record of the last step.

    The vocabulary size is that of the configuration's model. No other process, device memory or data is needed:
    communication completes at once, and the samples are empty. An operation on tensors of different devices raises an
    error. ``has_triton`` says whether the simulated node has Triton and therefore FlexAttention.

    Raises:
        ConfigurationError: ``has_triton`` is set, and this node has no Triton.
        RuntimeError: the kernels compute less than the closed form of the model.
    """
    recorder = Recorder()
    # The samples are read in this thread, since a fake tensor mode is local to its thread.
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, num_workers=0))
    if config.model.tp_comm_overlap_impl == "symmetric-memory":
        # Its operators pipeline as the ring does, which works with fake tensors.
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, tp_comm_overlap_impl="ring"))
    second_document = _second_document(config.data.seq_length) if has_triton else None
    with simulated_gpu(recorder, gpu, config.model, rank, config.world_size, second_document) as device:
        runtime = make_runtime(config, device, observer=recorder.communicate)
        recorder.is_crossing_machines = _machine_crossings(runtime.state)
        recorder.axes_of_ranks = {group.ranks: group.axes for group in _groups(runtime.state)}
        parts = build_model_and_optimizer(config, runtime, _without_values(model_provider), log=lambda line: None)
        _name_memory(recorder, config, parts)
        start_peak_bytes = recorder.record.peak_bytes
        open_source = partial(_source, config, runtime)
        guard = AnomalyDetector.without_run(config, runtime, parts, forward_step, open_source)
        step = TrainingStep(config, runtime, parts, forward_step, _PhaseTimers(recorder), guard=guard)
        source = open_source()
        batch_size, train_state = config.training.global_batch_size, TrainState()
        with closing(source):
            for _ in range(num_steps):
                recorder.phase = "begin"
                recorder.start()
                step.run(train_state, source, batch_size, None)
    model = parts.chunks[0].config
    needed = needed_flops(config, runtime.state.pp.rank)
    check_flops(count_flops(recorder.record.operations), needed)
    return DryRun(
        record=recorder.record,
        rank=rank,
        world_size=config.world_size,
        pipeline_rank=runtime.state.pp.rank,
        pipeline_size=runtime.state.pp.size,
        is_half=config.model.params_dtype in ("float16", "bfloat16"),
        num_parameters=sum(parameter.numel() for chunk in parts.chunks for parameter in chunk.parameters()),
        num_layers=sum(len(chunk.layer_numbers) for chunk in config.stage_layout.chunks(runtime.state.pp.rank)),
        num_microbatches=batch_size // (config.training.micro_batch_size * config.data_parallel_size),
        num_chunks=len(parts.chunks),
        model_flops=3.0 * model.forward_flops_per_sequence(config.data.seq_length) * batch_size / config.world_size,
        start_peak_bytes=start_peak_bytes,
        needed_flops=needed,
    )


def _source(config: RunConfig, runtime: Runtime) -> BatchSource:
    return BatchSource(_EmptySamples(config), config, runtime, config.model.vocab_size, 0)


def _without_values(model_provider: ModelProvider) -> ModelProvider:
    """Return a model provider whose parameters are not initialized, since drawing initial values takes minutes."""

    def provide(config: RunConfig, runtime: Runtime, contents: StageContents) -> Model:
        seedless = dataclasses.replace(config.initialization, seed=cast(int, None))
        return model_provider(dataclasses.replace(config, initialization=seedless), runtime, contents)

    return provide


def _second_document(length: int) -> int:
    """Return the position at which the second document of an empty sample begins."""
    return length // 2


def _machine_crossings(state: ParallelState) -> dict[tuple[str, ...], bool]:
    """Return by axes whether this rank's group spans several nodes of eight GPUs."""
    return {group.axes: len({rank // _GPUS_A_MACHINE for rank in group.ranks}) > 1 for group in _groups(state)}


def _groups(state: ParallelState) -> tuple[Group, ...]:
    """Return a rank's groups, smaller groups last."""
    cut = {id(group): group for group in (state.expert_dp, state.dp_cp)}.values()
    instances = [level for group in cut for level in group.levels or ()]
    levels = state.cp.levels or ()
    slices = state.world, state.model_parallel, state.dp_cp, state.embedding, state.tp, state.cp, state.dp, state.pp
    return *instances, state.expert_model, state.expert_dp, *slices, *levels


def _name_memory(recorder: Recorder, config: RunConfig, parts: ModelAndOptimizer) -> None:
    """Tell the recorder the holder of the memory that persists between steps."""
    width = config.model.padded_vocab_size // config.model.tensor_model_parallel_size
    num_dummies = config.model.padded_vocab_size - config.model.vocab_size
    recorder.memory.logits_widths = range(width - num_dummies, width + 1)
    recorder.memory.assign(parts.optimizer.held_tensors(), "optimizer")
    recorder.memory.assign((shard.values for chunk in parts.ddp_chunks for shard in chunk.shards), "weights")
    recorder.memory.assign((parameter for chunk in parts.chunks for parameter in chunk.parameters()), "weights")


class _PhaseTimers(Timers):
    """Timers that set the recorder's phase and measure nothing."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        """Return a timer that sets the phase while the timed part runs."""
        phase = _PHASE_OF_TIMER.get(name)
        return super().__call__(name, log_level) if phase is None else _PhaseTimer(name, phase, self._recorder)


class _PhaseTimer(Timer):
    def __init__(self, name: str, phase: str, recorder: Recorder) -> None:
        super().__init__(name, lambda: None, lambda: None, lambda: 0.0, is_active=False)
        self._phase = phase
        self._recorder = recorder
        self._outer = ""

    def start(self, barrier: bool = False) -> None:
        self._outer = self._recorder.phase
        self._recorder.phase = self._phase

    def stop(self, barrier: bool = False) -> None:
        self._recorder.phase = "end" if self._phase == "optimizer" else self._outer


class _EmptySamples:
    """Samples of token 0; packed samples have two documents each."""

    def __init__(self, config: RunConfig) -> None:
        length = config.data.seq_length
        zeros, positions = np.zeros(length, dtype=np.int64), np.arange(length)
        second = _second_document(length)
        is_second = positions >= second
        self._sample: GPTSample = {"tokens": zeros, "labels": zeros, "loss_mask": np.ones(length, dtype=np.float32)}
        if config.data.reset_position_ids:
            self._sample["position_ids"] = np.where(is_second, positions - second, positions)
        if config.data.reset_attention_mask:
            self._sample["document_ids"] = is_second.astype(np.int64)

    def read_microbatches(
        self, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
    ) -> Iterator[Sequence[GPTSample]]:
        """Yield micro-batches endlessly."""
        while True:
            yield [self._sample] * micro_batch_size
