"""megatron-core's forward-backward functions: run the micro-batches of one step through a model of its interface.

The functions build a list of actions for the pipeline schedule and run it with the framework's executor. A forward step
is a function ``(data_iterator, model) -> (output, loss_func)``. Of ``loss_func``, the last stage calls
``loss_func(output) -> (loss, report)`` or ``(loss_sum, num_tokens, report)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from megatron.core.device import current_device
from megatron.core.layer_output import MoEAuxLossAutoScaler
from megatron.core.pipeline_parallel.executor import MicrobatchLoss, ModelChunk, PipelineConnection, run_schedule
from megatron.core.pipeline_parallel.p2p_communication import (
    MessageOrders,
    P2PCommunicator,
    message_device,
    shared_links,
)
from megatron.core.pipeline_parallel.schedule_actions import SCHEDULES, Action, StagePlace
from megatron.core.process_group import Group, single_rank_group
from megatron.core.process_state import (
    get_context_parallel_world_size,
    get_pipeline_model_parallel_world_size,
    get_virtual_pipeline_model_parallel_world_size,
    is_pipeline_last_stage,
    resolve_group,
)
from megatron.core.timers import Timers
from megatron.core.utils import get_attr_wrapped_model, get_model_config

Shape = tuple[int, ...]


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., list[Any]]:
    """Return the forward-backward function of a pipeline-parallel size and a number of virtual stages per rank.

    Without ``pp_size`` they default to the sizes of the process-wide groups.
    """
    if pp_size is None:
        pp_size = get_pipeline_model_parallel_world_size()
        vp_size = get_virtual_pipeline_model_parallel_world_size() if vp_size is None else vp_size
    if pp_size == 1:
        return forward_backward_no_pipelining
    if vp_size is None:
        return forward_backward_pipelining_without_interleaving
    return forward_backward_pipelining_with_interleaving


def deallocate_output_tensor(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
    """Free the data of a stage's output, which was sent and is needed only as the root of a backward pass.

    The tensor then has one element. The forward-backward functions keep no outputs and need no call.

    Raises:
        AssertionError: ``out`` is no tensor, or a view, which shares its memory.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    assert isinstance(out, torch.Tensor), f"expected a tensor to deallocate, found {type(out).__name__}"
    assert out._base is None, "a view of another tensor cannot be deallocated: the other tensor keeps the memory"
    out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Run the backward pass of an output whose data was freed by `deallocate_output_tensor`.

    ``torch.autograd.backward`` would reject a gradient of the original shape. Without ``grad_output`` the output is a
    scalar, and its gradient is 1.

    Raises:
        AssertionError: the output has several elements, or an argument has the wrong type.
    """
    assert isinstance(output, torch.Tensor), f"output must be a tensor, not {type(output).__name__}"
    assert output.numel() == 1, f"output has {output.numel()} elements; free it with deallocate_output_tensor first"
    assert isinstance(grad_output, torch.Tensor | None), (
        f"grad_output must be a tensor or None, not {type(grad_output).__name__}"
    )
    torch.autograd.backward(
        [get_gradient_edge(output)], [torch.ones_like(output) if grad_output is None else grad_output]
    )


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: Any,
    tp_group: Any,
    cp_group: Any,
) -> list[Shape]:
    """Return the shapes of the tensors that a stage receives from the previous one: ``(s/cp, b, h)``.

    With sequence parallelism the first dim is also divided by the tensor-parallel size. With
    ``config.variable_seq_lengths`` the shape is ``()``: the sender sends it.
    """
    if config.variable_seq_lengths:
        return [()]
    length = decoder_seq_length if decoder_seq_length is not None else seq_length
    length //= cp_group.size()
    if config.sequence_parallel:
        length //= tp_group.size()
    return [(length, micro_batch_size, config.hidden_size)]


def get_pp_rank_microbatches(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int | None,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
    p2p_communicator: P2PCommunicator | None = None,
) -> tuple[int, bool, int, int]:
    """Return this rank's number of forward passes, whether all are warmup, how many are, and how many are not."""
    pp = resolve_group(None, "pp") if p2p_communicator is None else p2p_communicator.pp
    total = warmup = num_microbatches * num_model_chunks
    if not forward_only:
        warmup = _num_warmup_passes(
            pp, num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage, overlap_moe_expert_parallel_comm
        )
    return total, warmup == total, warmup, total - warmup


def _num_warmup_passes(
    pp: Group, num_microbatches: int, num_chunks: int, group_size: int | None, overlaps_experts: bool = False
) -> int:
    """Return this rank's number of forward passes before the first backward pass, apart from the one just before it."""
    warmup = pp.size - pp.rank - 1
    if num_chunks > 1:
        warmup = 2 * warmup + (num_chunks - 1) * (group_size or pp.size) + overlaps_experts
    return min(num_microbatches * num_chunks, warmup)


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """Return the micro-batch and the model chunk of each forward pass of the interleaved schedule, in order."""
    groups = range(0, num_microbatches, microbatch_group_size_per_vp_stage)
    return [
        (microbatch, chunk)
        for first in groups
        for chunk in range(num_model_chunks)
        for microbatch in range(first, min(first + microbatch_group_size_per_vp_stage, num_microbatches))
    ]


def set_current_microbatch(model: nn.Module, microbatch_id: int) -> None:
    """Set ``current_microbatch`` of each layer of the model's decoder, if it has one."""
    holder: Any = model
    while not hasattr(holder, "decoder") and hasattr(holder, "module"):
        holder = holder.module
    for layer in getattr(getattr(holder, "decoder", None), "layers", ()):
        layer.current_microbatch = microbatch_id


def check_first_val_step(first_val_step: bool | None, forward_only: bool, cond: bool) -> bool:
    """Return whether this is the first micro-batch after an update of the weights, given ``cond`` for training."""
    return bool(first_val_step) and cond if first_val_step is not None and forward_only else cond


def forward_step_calc_loss(
    model: nn.Module,
    output_tensor: Any,
    loss_func: Callable[..., Any] | None,
    config: Any,
    vp_stage: int | None,
    collect_non_loss_data: bool,
    num_microbatches: int,
    forward_data_store: list[Any],
    cp_group_size: int | None = None,
    is_last_stage: bool | None = None,
) -> tuple[Any, torch.Tensor]:
    """Compute a micro-batch's loss on the last stage, and store its report in ``forward_data_store``.

    Return the root of the backward pass and the number of tokens. A loss without a number of tokens is divided by the
    number of micro-batches and multiplied by the context-parallel size. A loss sum is divided by its number of tokens
    and the number of micro-batches, unless ``config.calculate_per_token_loss``. The loss scale of MoE's auxiliary
    losses is set accordingly.
    """
    assert (is_last_stage is None) == (cp_group_size is None), "pass both cp_group_size and is_last_stage, or neither"
    if is_last_stage is None or cp_group_size is None:
        cp_group_size = get_context_parallel_world_size()
        is_last_stage = is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    num_tokens = torch.tensor(0, dtype=torch.int)
    if is_last_stage and loss_func is None:
        forward_data_store.append(output_tensor)
    elif is_last_stage and collect_non_loss_data:
        assert loss_func is not None
        forward_data_store.append(loss_func(output_tensor, non_loss_data=True))
    elif is_last_stage:
        assert loss_func is not None
        output_tensor, *counted, report = loss_func(output_tensor)
        assert len(counted) < 2, f"loss_func returned {2 + len(counted)} values; return (loss[, num_tokens], report)"
        if not counted:
            output_tensor = output_tensor * cp_group_size / num_microbatches
        else:
            (num_tokens,) = counted
            if not _per_token(config):
                output_tensor = output_tensor / torch.clamp(num_tokens, min=1) / num_microbatches
        forward_data_store.append(report)
    if hasattr(config, "num_moe_experts") and config.num_moe_experts is not None:
        scale = torch.ones(1, device=output_tensor.device)
        if config.grad_scale_func is not None:
            scale = config.grad_scale_func(scale)
        if not _per_token(config):
            scale = scale * cp_group_size / num_microbatches
        MoEAuxLossAutoScaler.set_loss_scale(scale)
    return output_tensor, num_tokens


def forward_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: nn.Module,
    num_microbatches: int,
    input_tensor: Any,
    forward_data_store: list[Any],
    config: Any,
    cp_group_size: int,
    collect_non_loss_data: bool = False,
    checkpoint_activations_microbatch: bool | None = None,
    is_first_microbatch: bool = False,
    current_microbatch: int | None = None,
    vp_stage: int | None = None,
    is_last_stage: bool = True,
) -> tuple[Any, torch.Tensor]:
    """Run a micro-batch through a stage; return its output, or the loss on the last stage, and the number of tokens.

    The model gets the previous stage's output (None on the first stage) by ``set_input_tensor``. The output is a list
    if ``input_tensor`` is one.
    """
    if config.timers is not None:
        config.timers("forward-compute", log_level=2).start()
    set_first = getattr(model, "set_is_first_microbatch", None)
    if is_first_microbatch and set_first is not None:
        set_first()
    if current_microbatch is not None:
        set_current_microbatch(model, current_microbatch)
    inputs = input_tensor if isinstance(input_tensor, list) else [input_tensor]
    get_attr_wrapped_model(model, "set_input_tensor")(inputs)
    further = () if checkpoint_activations_microbatch is None else (checkpoint_activations_microbatch,)
    precision: AbstractContextManager[Any] = nullcontext()
    if config.enable_autocast:
        precision = torch.autocast(current_device().torch_device.type, dtype=config.autocast_dtype)
    with precision:
        output, loss_func = forward_step_func(data_iterator, model, *further)
    output, num_tokens = forward_step_calc_loss(
        model,
        output,
        loss_func,
        config,
        vp_stage,
        collect_non_loss_data,
        num_microbatches,
        forward_data_store,
        cp_group_size,
        is_last_stage,
    )
    if config.timers is not None:
        config.timers("forward-compute").stop()
    return [output] if isinstance(input_tensor, list) else output, num_tokens


def forward_backward_no_pipelining(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | list[Iterator[Any]] | None,
    model: nn.Module | list[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run forward and backward of each micro-batch in turn, and return the reports of the loss function.

    Raises:
        AssertionError: there are several models or data iterators, or ``adjust_tensor_shapes_fn`` is given.
    """
    assert adjust_tensor_shapes_fn is None, "adjust_tensor_shapes_fn needs a pipeline; without stages no shapes exist"
    step = _Step.of(
        forward_step_func,
        [_only(model, "model")],
        [_only(data_iterator, "data_iterator")],
        num_microbatches,
        None,
        pg_collection,
        forward_only=forward_only,
        collects=collect_non_loss_data,
        first_val_step=first_val_step,
        force_all_reduce=force_all_reduce,
        pipelines=False,
    )
    return step.run("no-pipelining", (), ())


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | list[Iterator[Any]] | None,
    model: nn.Module | list[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run the 1F1B schedule with one model chunk per rank; collective over the pipeline.

    ``adjust_tensor_shapes_fn`` maps the shapes that this rank receives and sends to those of the model.

    Returns:
        The reports of the loss function on the last stage, and an empty list on the others.

    Raises:
        AssertionError: there are several models or data iterators.
        ValueError: ``config.overlap_p2p_comm`` is set, or only one of ``p2p_communicator`` and ``pg_collection`` is.
    """
    step = _Step.of(
        forward_step_func,
        [_only(model, "model")],
        [_only(data_iterator, "data_iterator")],
        num_microbatches,
        p2p_communicator,
        pg_collection,
        forward_only=forward_only,
        collects=collect_non_loss_data,
        first_val_step=first_val_step,
        force_all_reduce=force_all_reduce,
    )
    if step.config.overlap_p2p_comm:
        raise ValueError("overlap_p2p_comm needs the interleaved schedule; set it to False")
    shapes = step.shapes(seq_length, micro_batch_size, decoder_seq_length)
    received, sent = (shapes, shapes) if adjust_tensor_shapes_fn is None else adjust_tensor_shapes_fn(shapes, shapes)
    return step.run("1f1b", received, sent)


def forward_backward_pipelining_with_interleaving(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | list[Iterator[Any]],
    model: nn.Module | list[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run the interleaved 1F1B schedule with several model chunks per rank; collective over the pipeline.

    Returns:
        The reports of the loss function on the last stage, and an empty list on the others.

    Raises:
        AssertionError: ``model`` or ``data_iterator`` is no list, or ``adjust_tensor_shapes_fn`` is given.
        ValueError: ``config.microbatch_group_size_per_vp_stage`` is below the pipeline-parallel size or above the
            number of micro-batches, or options exclude each other.
        RuntimeError: the last group of micro-batches is smaller than the pipeline-parallel size.
    """
    assert isinstance(model, list), f"the interleaved schedule needs a list of model chunks, not {type(model).__name__}"
    assert all(isinstance(chunk, nn.Module) for chunk in model), "each model chunk must be a torch.nn.Module"
    assert isinstance(data_iterator, list), (
        f"the interleaved schedule needs a data iterator per model chunk, not {type(data_iterator).__name__}"
    )
    assert adjust_tensor_shapes_fn is None, "the interleaved schedule does not support adjust_tensor_shapes_fn"
    step = _Step.of(
        forward_step_func,
        model,
        data_iterator,
        num_microbatches,
        p2p_communicator,
        pg_collection,
        forward_only=forward_only,
        collects=collect_non_loss_data,
        first_val_step=first_val_step,
        force_all_reduce=force_all_reduce,
    )
    if step.config.overlap_p2p_comm and step.config.batch_p2p_comm:
        raise ValueError("overlap_p2p_comm and batch_p2p_comm exclude each other; set one of them to False")
    step.check_groups()
    shapes = step.shapes(seq_length, micro_batch_size, decoder_seq_length)
    return step.run("interleaved", shapes, shapes)


@dataclass
class _Step:
    """One call of a forward-backward function."""

    forward_step_func: Callable[..., Any]
    models: Sequence[nn.Module]
    iterators: Sequence[Any]
    num_microbatches: int
    config: Any
    pp: Group
    tp: Group
    cp: Group
    pg_collection: Any
    forward_only: bool
    collects: bool
    first_val_step: bool | None
    force_all_reduce: bool | None

    @classmethod
    def of(
        cls,
        forward_step_func: Callable[..., Any],
        models: Sequence[nn.Module],
        iterators: Sequence[Any],
        num_microbatches: int,
        p2p_communicator: P2PCommunicator | None,
        pg_collection: Any,
        *,
        forward_only: bool,
        collects: bool,
        first_val_step: bool | None,
        force_all_reduce: bool | None,
        pipelines: bool = True,
    ) -> _Step:
        """Find the configuration and the groups of a step; without a collection they are the process-wide ones."""
        config = get_model_config(models[0])
        if pipelines and (p2p_communicator is None) != (pg_collection is None):
            raise ValueError("pass both p2p_communicator and pg_collection, or neither")
        for name in ("defer_embedding_wgrad_compute", "hybrid_context_parallel"):
            if getattr(config, name):
                raise RuntimeError(f"forward-backward functions do not support {name}=True; set it to False")
        if not pipelines:
            pp = single_rank_group(("pp",))
        else:
            pp = resolve_group(None, "pp") if p2p_communicator is None else p2p_communicator.pp
        tp, cp = (resolve_group(getattr(pg_collection, name, None), name) for name in ("tp", "cp"))
        return cls(
            forward_step_func,
            models,
            iterators,
            num_microbatches,
            config,
            pp,
            tp,
            cp,
            pg_collection,
            forward_only,
            collects,
            first_val_step,
            force_all_reduce,
        )

    @property
    def place(self) -> StagePlace:
        return StagePlace(self.pp.size, self.pp.rank, len(self.models))

    @property
    def device(self) -> torch.device:
        """Return the device of messages and losses: the model's device if there is one stage and no messages."""
        if self.pp.size > 1:
            return message_device(self.pp)
        parameter = next(self.models[0].parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def shapes(self, seq_length: int, micro_batch_size: int, decoder_seq_length: int | None) -> list[Shape]:
        """Return the shapes of the tensors between stages."""
        return get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=self.config,
            tp_group=_Sized(self.tp.size),
            cp_group=_Sized(self.cp.size),
        )

    @property
    def group_size(self) -> int | None:
        size: int | None = self.config.microbatch_group_size_per_vp_stage
        return size

    def check_groups(self) -> None:
        """Raise if the micro-batches cannot be split into the configured groups."""
        pp, size = self.pp.size, self.group_size or self.pp.size
        if not pp <= size <= self.num_microbatches:
            raise ValueError(
                f"microbatch_group_size_per_vp_stage {size} must be at least the pipeline-parallel size {pp} and at "
                f"most the number of micro-batches {self.num_microbatches}"
            )
        if 0 < self.num_microbatches % size < pp:
            raise RuntimeError(
                f"{self.num_microbatches} micro-batches in groups of {size} leave a last group of "
                f"{self.num_microbatches % size}, which must be 0 or at least the pipeline-parallel size {pp}"
            )

    def connection(self, received: Sequence[Shape], sent: Sequence[Shape]) -> PipelineConnection | None:
        """Return the connection to the neighboring stages."""
        if self.pp.size == 1:
            return None
        if self.config.variable_seq_lengths:
            raise RuntimeError(
                "variable_seq_lengths is True, but stages know the shapes of their messages here; set it to False, or "
                "send with P2PCommunicator"
            )
        for shapes in (received, sent):
            if len(shapes) != 1:
                raise RuntimeError(f"a stage exchanges one tensor, but there are {len(shapes)} shapes: {list(shapes)}")
        dtype = self.config.pipeline_dtype
        if dtype is None:
            raise RuntimeError("pipeline_dtype is None; set it to the dtype of the tensors between stages")
        links = shared_links(self.pp, wraps_around=len(self.models) > 1)
        orders = None if links.post_receives_ahead else MessageOrders(self.place)
        incoming, outgoing = tuple(received[0]), tuple(sent[0])
        return PipelineConnection(
            self.place, links, lambda _: incoming, dtype, orders, gradient_shape=lambda _: outgoing
        )

    def run(self, schedule: str, received: Sequence[Shape], sent: Sequence[Shape]) -> list[Any]:
        """Run all passes and the final reductions, and return the reports of the last stage."""
        config, timers = self.config, self.config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        reports: list[Any] = []
        num_tokens: list[torch.Tensor] = []
        connection = self.connection(received, sent)
        name = "forward-only" if self.forward_only else schedule
        place = self.place

        def actions_of(rank: int) -> Sequence[Action]:
            return SCHEDULES[name](place.pp, rank, self.num_microbatches, place.num_chunks, self.group_size)

        with ExitStack() as stack:
            if not self.forward_only:
                self._begin_training(stack)
            run_schedule(
                actions_of(place.rank),
                [self._chunk(index, reports, num_tokens, sent) for index in range(len(self.models))],
                device=self.device,
                connection=connection,
                order=None if connection is None else connection.order_of(actions_of),
                calculate_per_token_loss=True,
                timers=None if timers is None else cast(Timers, _CallerTimers(timers)),
            )
        if not self.forward_only:
            for function, model in zip(self._functions("grad_sync_func"), self.models):
                function(model.parameters())
            if config.finalize_model_grads_func is not None:
                total = sum(num_tokens, torch.zeros([], dtype=torch.int, device=self.device))
                config.finalize_model_grads_func(
                    list(self.models),
                    total if _per_token(config) else None,
                    pg_collection=self.pg_collection,
                    force_all_reduce=self.force_all_reduce,
                )
        if timers is not None:
            timers("forward-backward").stop()
        return reports

    def _begin_training(self, stack: ExitStack) -> None:
        """Gather parameters with the caller's function; with its gradient reduction, suppress that of the hooks."""
        for function, model in zip(self._functions("param_sync_func"), self.models):
            function(model.parameters())
        if self._functions("grad_sync_func"):
            for no_sync in self._functions("no_sync_func"):
                stack.enter_context(no_sync())

    def _functions(self, name: str) -> list[Callable[..., Any]]:
        """Return a function of the configuration for each model chunk; none if it is not set."""
        function = getattr(self.config, name)
        if function is None:
            return []
        return list(function) if isinstance(function, list) else [function] * len(self.models)

    def _chunk(
        self, index: int, reports: list[Any], num_tokens: list[torch.Tensor], sent: Sequence[Shape]
    ) -> ModelChunk:
        """Return a model chunk for the executor."""
        config, place, model = self.config, self.place, self.models[index]
        is_last = place.is_last(index)
        no_sync = (self._functions("no_sync_func") or [nullcontext] * len(self.models))[index]
        iterator = self.iterators[index] if self.iterators else None

        def forward(microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor | MicrobatchLoss:
            ends = self.forward_only or microbatch == self.num_microbatches - 1
            with nullcontext() if ends else no_sync():
                output, counted = forward_step(
                    self.forward_step_func,
                    iterator,
                    model,
                    self.num_microbatches,
                    hidden,
                    reports,
                    config,
                    self.cp.size,
                    self.collects,
                    self._checkpoints(len(num_tokens)),
                    check_first_val_step(self.first_val_step, self.forward_only, microbatch == 0),
                    microbatch,
                    index if place.num_chunks > 1 else None,
                    is_last,
                )
            num_tokens.append(counted)
            if not is_last:
                return self._checked(output, sent)
            if self.forward_only:
                output = torch.zeros((), device=self.device)
            elif config.grad_scale_func is not None:
                output = config.grad_scale_func(output)
            return MicrobatchLoss(output.reshape(()), counted.detach())

        return ModelChunk(forward, lambda ends_microbatch=True: no_sync())

    def _checked(self, output: Any, sent: Sequence[Shape]) -> torch.Tensor:
        """Return a stage's output if the next stage can receive it."""
        if isinstance(output, list) and len(output) == 1:
            (output,) = output
        if not isinstance(output, torch.Tensor):
            raise RuntimeError(f"a stage returned {type(output).__name__}; return one tensor for the next stage")
        expected = [(tuple(shape), self.config.pipeline_dtype) for shape in sent]
        if expected and (tuple(output.shape), output.dtype) not in expected:
            raise RuntimeError(
                f"a stage returned {output.dtype} {tuple(output.shape)}, but the next stage expects "
                f"{expected[0][1]} {expected[0][0]} (pipeline_dtype, seq_length, micro_batch_size, hidden_size)"
            )
        return output

    def _checkpoints(self, num_forwards: int) -> bool | None:
        """Return whether the forward pass that follows ``num_forwards`` others recomputes all its activations.

        The configured number of the passes that are in flight together does not. None if the model decides.
        """
        number = self.config.num_microbatches_with_partial_activation_checkpoints
        if number is None:
            return None
        warmup = _num_warmup_passes(self.pp, self.num_microbatches, len(self.models), self.group_size)
        return bool(num_forwards % (warmup + 1) >= number)


@dataclass(frozen=True)
class _Sized:
    """A group of which only the size is known."""

    number: int

    def size(self) -> int:
        return self.number


class _CallerTimers:
    """Timers of the caller, with ``start`` and ``stop``, as the executor uses timers."""

    def __init__(self, timers: Callable[..., Any]) -> None:
        self._timers = timers

    @contextlib.contextmanager
    def __call__(self, name: str, log_level: int = 0) -> Iterator[None]:
        timer = self._timers(name, log_level=log_level)
        timer.start()
        yield
        timer.stop()


def _per_token(config: Any) -> bool:
    """Return whether the caller divides by the number of tokens of the global batch (`TransformerConfig` only)."""
    return hasattr(config, "calculate_per_token_loss") and bool(config.calculate_per_token_loss)


def _only(value: Any, name: str) -> Any:
    """Return the only element of a list, or the value if it is no list."""
    if not isinstance(value, list):
        return value
    assert len(value) == 1, f"{name} has {len(value)} elements; only the interleaved schedule runs several model chunks"
    return value[0]
