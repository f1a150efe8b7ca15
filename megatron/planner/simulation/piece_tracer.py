"""Take traces: build a piece of a model, and run it forward and backward on fake tensors."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import get_gradient_edge

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.layer_output import AuxiliaryLoss
from megatron.core.main_grad import WeightGradQueue, main_grad_of
from megatron.core.models import compute_in_float8, wrap_model
from megatron.core.models.gpt import GPTModel
from megatron.core.ops import CAUSAL, AttentionPattern, SelectedKeys
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ExpertGroups, ParallelState, create_parallel_state
from megatron.core.pipeline_parallel import StageInput
from megatron.core.precision import dtype_from_name
from megatron.core.tensor_parallel import RngStreams
from megatron.core.transformer import SharedTensors
from megatron.planner import ATTENTION, GEMM, GPUS, MEMORY, PHASES, Gpu, TraceRequest
from megatron.planner.simulation.fake_device import FakeDevice, simulated_gpu
from megatron.planner.simulation.recorder import Operation, Recorder, StepRecord
from megatron.planner.simulation.roofline import is_attention

_FORWARD, _BACKWARD, _WEIGHTS = range(len(PHASES))


def take_traces(requests: Mapping[str, TraceRequest]) -> dict[str, dict[str, Any]]:
    """Return the trace of each request, as JSON-ready values."""
    taken: dict[str, dict[str, Any]] = {}
    for key, request in requests.items():
        _warm_up(request)
        # Each request has its own recorder, which does not see garbage of an earlier piece.
        with _simulated(request) as tracer, _garbage_collection_disabled():
            taken[key] = tracer.trace(request.micro_batch_size)
    return taken


_warmed: set[tuple[Any, ...]] = set()


def _warm_up(request: TraceRequest) -> None:
    """Take a trace once to run one-time initialization, such as testing which FP8 matmuls are available."""
    model = request.model
    # A layer in the model's own dtype does not test the matmuls of the FP8 layers.
    in_float8 = any(model.fp8.is_in_float8(number, model.num_layers) for number in request.contents.layer_numbers)
    recipe = (model.fp8.fp8_recipe, model.fp8.fp4_format) if in_float8 else None
    kind = request.capability, model.fp8.fp8_format, recipe, model.moe.num_experts is None, request.contents.has_loss
    if kind not in _warmed:
        with _simulated(request) as tracer:
            tracer.trace(1)
        _warmed.add(kind)


@contextmanager
def _garbage_collection_disabled() -> Iterator[None]:
    """Disable garbage collection, which would take a tenth of the tracing time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _applied_functions() -> Iterator[list[str]]:
    """Yield a list to which the name of each autograd function is added when the function is applied."""
    applied: list[str] = []
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    @functools.wraps(apply)
    def counted(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        applied.append(cls.__name__)
        return apply(cls, *arguments, **keywords)

    with patch.object(torch.autograd.Function, "apply", classmethod(counted)):
        yield applied


@contextmanager
def _simulated(request: TraceRequest) -> Iterator[_Tracer]:
    """Yield a tracer in the smallest simulated world that has the process groups of a piece."""
    model, recorder = request.model, Recorder()
    sizes, gpu = model.parallel_sizes, _gpu_of(request.capability)
    alone = ParallelSizes(tp=sizes.tp, cp=sizes.cp, ep=sizes.ep, etp=sizes.etp)
    ranks = math.lcm(sizes.tp * sizes.cp, sizes.ep * sizes.expert_tp)
    with (
        simulated_gpu(recorder, gpu, model, 0, ranks, request.seq_length // 2) as device,
        _applied_functions() as functions,
    ):
        state = create_parallel_state(alone, observer=recorder.communicate, cp_inner_size=model.cp_inner_size)
        yield _Tracer(request, recorder, device, state, functions)


@dataclass
class _Tracer:
    """Tracer of a piece in a simulated world; ``functions`` has the names of the applied autograd functions."""

    request: TraceRequest
    recorder: Recorder
    device: FakeDevice
    state: ParallelState
    functions: list[str]

    def trace(self, batch: int) -> dict[str, Any]:
        """Return operations, communications, memory and launches for a micro-batch of ``batch`` samples."""
        request, recorder, memory, functions = self.request, self.recorder, self.recorder.memory, self.functions
        model, contents = request.model, request.contents
        width = model.padded_vocab_size // model.tensor_model_parallel_size
        memory.logits_widths = range(width - (model.padded_vocab_size - model.vocab_size), width + 1)
        chunk, queue = self._build()
        given_shared, entrances = self._shared(batch)
        base = memory.num_bytes
        hidden, ids = self._inputs(batch)
        # The input of the first layer needs no gradient if the embedding is frozen.
        is_after_frozen = bool(model.lora_rank) and contents.layer_numbers[:1] == (0,)
        entrance = None if hidden is None or is_after_frozen else StageInput()
        at_entry: list[tuple[int, int, int]] = []
        chunk.decoder.register_forward_pre_hook(
            lambda *_: at_entry.append((memory.num_bytes, len(recorder.record.operations), len(functions)))
        )
        recorder.phase = "forward"
        recorder.start()
        shared = memory.num_bytes
        losses: list[AuxiliaryLoss] = []
        given = hidden if entrance is None or hidden is None else entrance.enter(hidden)
        hidden = None
        functions.clear()
        output = chunk(
            ids,
            ids,
            hidden=given,
            labels=ids if contents.has_loss else None,
            pattern=self._pattern(batch),
            loss_mask=torch.ones(ids.shape, device="cuda") if contents.has_loss else None,
            losses=losses,
            shared=given_shared,
        )
        given = None
        if contents.has_loss:
            output = output.sum()
        roots = [output, *(each.loss_sum for each in losses if each.loss_sum.requires_grad)]
        edges = [get_gradient_edge(root) for root in roots if root.requires_grad]
        incoming = None if contents.has_loss else output.shape
        forward, forward_peak, forward_logits = recorder.record, recorder.record.peak_bytes, self._logits_at_peak()
        del output, roots, losses
        # Rotary angles and dropout keys are created before the first layer and shared by all layers of a chunk.
        made_before, num_before, functions_before = at_entry[0] if contents.layer_numbers else (shared, 0, 0)
        made_before -= shared
        del forward.operations[:num_before]
        num_applied = len(functions)
        applied = [num_applied - functions_before, 0, 0]
        kept = memory.num_bytes - base - made_before - ids.nbytes
        recorder.phase = "backward"
        recorder.start()
        gradient = None
        if incoming is not None:
            gradient = torch.empty(incoming, dtype=dtype_from_name(model.params_dtype), device="cuda")
        runs_backward = bool(edges)
        if runs_backward:
            with queue.collecting(0) if queue is not None else nullcontext():
                torch.autograd.backward(edges, [gradient, *[None] * (len(edges) - 1)])
        backward, backward_peak, backward_logits = recorder.record, recorder.record.peak_bytes, self._logits_at_peak()
        edges, gradient = [], None
        for each in entrances:
            each.grad = None
        outgoing = 0 if entrance is None or entrance.grad is None else entrance.grad.nbytes
        deferred = memory.num_bytes - base - ids.nbytes - outgoing
        recorder.start()
        if queue is not None and runs_backward:
            recorder.phase = "weights"
            queue.run(0)
        weights = recorder.record
        applied[_BACKWARD] = len(functions) - num_applied
        phases = ((_FORWARD, forward), (_BACKWARD, backward), (_WEIGHTS, weights))
        return {
            "operations": [row for phase, record in phases for row in _rows(phase, record)],
            "launches": [_launches(record, applied[phase]) for phase, record in phases],
            "sent": [
                [phase, each.call.operation, list(each.call.axes), each.call.group_size, each.call.num_bytes]
                for phase, record in phases
                for each in record.communications
                if each.call.operation != "receive"
            ],
            "memory": [
                max(kept, 0),
                forward_peak - base - made_before - ids.nbytes,
                backward_peak - base - made_before - ids.nbytes,
                max(deferred, 0) if queue is not None else 0,
                max(forward_logits, backward_logits),
            ],
        }

    def _build(self) -> tuple[GPTModel, WeightGradQueue | None]:
        request, model = self.request, self.request.model
        chunk = GPTModel(
            model,
            self.state.tp,
            RngStreams(self.device, 0, self.state.place),
            seed=None,
            device="cuda",
            layer_numbers=request.contents.layer_numbers,
            pre_process=request.contents.has_embedding,
            post_process=request.contents.has_loss,
            cp=self.state.cp,
            experts=ExpertGroups.of(self.state),
        )
        float8 = compute_in_float8((chunk,), model, self.device.torch_device)
        if float8 is not None:
            # After the first step, every step has the scales of earlier steps.
            float8.has_history = True
        ddp = DistributedDataParallelConfig(
            gradient_accumulation_fusion=request.fuses_accumulation,
            grad_reduce_in_bf16=not request.reduces_in_float32,
        )
        wrap_model(chunk, ddp, self.state, calculate_per_token_loss=True)
        for parameter in chunk.parameters():
            if (main_grad := main_grad_of(parameter)) is not None:
                # After the first micro-batch of a step, every micro-batch adds to the gradients.
                main_grad.is_empty = False
        return chunk, WeightGradQueue(chunk.parameters()) if request.splits_backward else None

    def _pattern(self, batch: int) -> AttentionPattern:
        """Return the causal pattern, with the keys that an earlier indexer selected for a layer without one."""
        model, length, numbers = self.request.model, self.request.seq_length, self.request.contents.layer_numbers
        if not model.has_sparse_attention or not numbers or model.has_indexer(numbers[0]):
            return CAUSAL
        has_choice = length > (model.mla.dsa_indexer_topk or 0)
        mask = torch.empty(batch, 1, length, length, dtype=torch.bool, device="cuda") if has_choice else None
        return replace(CAUSAL, selected=SelectedKeys(mask, is_known=True))

    def _inputs(self, batch: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return hidden states (None for a piece with the embedding), and integers for tokens and positions."""
        model, length = self.request.model, self.request.seq_length
        ids = torch.zeros(batch, length // model.context_parallel_size, dtype=torch.int64, device="cuda")
        if self.request.contents.has_embedding:
            return None, ids
        shape = model.hidden_shape(length, batch)
        return torch.empty(shape, dtype=dtype_from_name(model.params_dtype), device="cuda"), ids

    def _shared(self, batch: int) -> tuple[SharedTensors | None, list[StageInput]]:
        """Return tensors that a layer shares with others; the embedding computes its own.

        The memory of a chunk counts them once.
        """
        model, contents = self.request.model, self.request.contents
        if contents.has_embedding or not model.shares_tensors:
            return None, []
        rows, batch, _ = model.hidden_shape(self.request.seq_length, batch)
        entrances: list[StageInput] = []

        def enter(*shape: int) -> torch.Tensor:
            entrances.append(StageInput())
            return entrances[-1].enter(torch.empty(shape, dtype=dtype_from_name(model.params_dtype), device="cuda"))

        numbers, width = contents.layer_numbers, model.hidden_size_per_layer_input
        shared = SharedTensors(tuple(enter(rows, batch, width) for _ in range(model.num_layers) if numbers and width))
        for source in {model.key_value_sources[number] for number in numbers} - {None}:
            assert source is not None
            own = model.of_layer(source)
            groups = max(own.num_query_groups // model.tensor_model_parallel_size, 1)
            shape = rows * model.positions_per_message_row, batch, groups, own.kv_channels
            shared.new[source] = shared.all[source] = enter(*shape), enter(*shape)
        return shared, entrances

    def _logits_at_peak(self) -> int:
        return self.recorder.record.peak_holders.get("logits", 0)


def _rows(phase: int, record: StepRecord) -> Iterator[list[float]]:
    """Yield an operation's fields in the order of `OPERATION_FIELDS`."""
    for each in record.operations:
        kind, gemm = _kind(each), each.gemm
        sizes = (gemm.batch, gemm.rows, gemm.inner, gemm.columns) if kind == GEMM and gemm is not None else (0, 0, 0, 0)
        flags = int(each.is_recomputed), int(each.is_expert)
        yield [phase, kind, each.itemsize, *sizes, each.num_bytes, each.flops, *flags]


def _launches(record: StepRecord, num_functions: int) -> list[int]:
    """Return the numbers of `LAUNCH_KINDS` in a pass; names of Triton kernels contain a dot, after the module name."""
    num_kernels = sum("." in each.name for each in record.operations)
    return [len(record.operations) - num_kernels, num_kernels, num_functions]


def _kind(operation: Operation) -> int:
    if is_attention(operation) and operation.flops:
        return ATTENTION
    return GEMM if operation.gemm is not None else MEMORY


def _gpu_of(capability: tuple[int, int]) -> Gpu:
    """Return a GPU type with a compute capability, on which alone the choice of kernels depends."""
    known = next((gpu for gpu in GPUS.values() if gpu.capability == capability), None)
    return known or replace(next(iter(GPUS.values())), capability=capability)
