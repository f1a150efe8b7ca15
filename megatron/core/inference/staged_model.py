"""Run a model for inference: one forward pass over pipeline stages, with its own or a training run's parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from megatron.core.collectives import broadcast
from megatron.core.config_base import with_fields
from megatron.core.distributed import DistributedDataParallel
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt import GPTModel
from megatron.core.ops import AttentionPattern
from megatron.core.parallel_state import ExpertGroups, ParallelState
from megatron.core.pipeline_parallel import PipelineLinks, ReceiveQueue, SendQueue
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group, single_rank_group
from megatron.core.transformer import KeyValueCache


def share_model(chunk: GPTModel, wrapped: DistributedDataParallel, state: ParallelState) -> GPTModel:
    """Return an inference model chunk in eval mode that shares the parameters of a chunk in training.

    Every rank processes whole sequences: sequence and context parallelism are off, and context-parallel ranks compute
    the same values. GEMMs use the parameters' precision, without FP8 or CUDA graphs. ``wrapped`` is the chunk's
    data-parallel wrapper. If the optimizer shards the parameters, the caller must have gathered them. FSDP weights are
    gathered and released in each pass. The training chunk is not modified.
    """
    config = with_fields(
        chunk.config,
        sequence_parallel=False,
        context_parallel_size=1,
        tp_comm_overlap=False,
        fp8_format=None,
        fp4_format=None,
    )
    device = next(chunk.parameters()).device
    cp = single_rank_group(("cp",), state.rank)
    shared = GPTModel(
        config,
        chunk.tp,
        chunk.rng,
        seed=None,
        device=device,
        layer_numbers=chunk.layer_numbers,
        pre_process=chunk.pre_process,
        post_process=chunk.post_process,
        cp=cp,
        experts=dataclasses.replace(ExpertGroups.of(state), cp=cp),
        fills_later=True,
    )
    for name, module in chunk.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            setattr(shared.get_submodule(name), parameter_name, parameter)
    assert {id(each) for each in shared.parameters()} == {id(each) for each in chunk.parameters()}, "all are shared"
    if wrapped.weights is not None:
        layers = [layer for block in shared.blocks for layer in block.layers.values()]
        wrapped.weights.follow_chunk(shared, layers, shared.embedding if chunk.first_alone is not None else None)
        for block in shared.blocks:
            block.weights = wrapped.weights
    return shared.eval()


class StagedModel:
    """This rank's pipeline stage for inference, or the whole model if there is no pipeline.

    Every rank of the pipeline must make the same calls. ``links`` come from `create_pipeline_links`. With virtual
    pipeline stages, ``further_chunks`` holds the rank's other model chunks in order, and the links form a ring.
    ``twins`` is a group of ranks that make the same calls with the same parameters: the first rank decides for all.

    Raises:
        ConfigurationError: the model was built for training over several processes, or the links are missing.
    """

    def __init__(
        self,
        model: GPTModel,
        state: ParallelState,
        links: PipelineLinks | None = None,
        further_chunks: Sequence[GPTModel] = (),
        twins: Group | None = None,
    ) -> None:
        self.chunks = (model, *further_chunks)
        if problems := _problems(self.chunks, state, links):
            raise ConfigurationError(problems)
        self.model = model
        self.state = state
        self._twins = twins
        self.device = next(model.parameters()).device
        self._dtype = dtype_from_name(model.config.params_dtype)
        self._in = None if links is None else links.activations_in
        out = None if links is None else links.activations_out
        self._out = None if out is None else SendQueue(out, max_unfinished=1)

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        pattern: AttentionPattern,
        cache: KeyValueCache,
        last_position_only: bool,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run the forward pass; return the logits on the last stage and None on the others.

        Shapes: ``tokens, position_ids: [b, s]``, ``sequence_lengths: [b] -> [s or 1, b, v/tp]``.
        """
        output: torch.Tensor | None = None
        for chunk in self.chunks:
            if not chunk.pre_process and self._in is not None:
                shape = chunk.config.message_shape(tokens.shape[1], tokens.shape[0])
                output = ReceiveQueue(self._in, [shape], self._dtype, self.device).take()
            output = chunk(
                tokens,
                position_ids,
                pattern=pattern,
                hidden=None if chunk.pre_process else output,
                cache=cache,
                last_position_only=last_position_only,
                sequence_lengths=sequence_lengths,
            )
            if not chunk.post_process and self._out is not None:
                self._out.send(output.contiguous())
        return output if self.chunks[-1].post_process else None

    def share(self, values: torch.Tensor, logits: torch.Tensor | None) -> None:
        """Broadcast ``values`` from the first rank of the last stage, whose ``logits`` are not None, to every rank."""
        if logits is not None:
            # All ranks have the same logits, but reductions on GPUs may differ in the last bit between ranks.
            broadcast(values, self.state.tp)
        broadcast(values, self.state.pp, source=self.state.pp.size - 1)
        if self._twins is not None:
            broadcast(values, self._twins)

    def finish(self) -> None:
        """Wait until all sends have completed."""
        if self._out is not None:
            self._out.finish()


def _problems(chunks: Sequence[GPTModel], state: ParallelState, links: PipelineLinks | None) -> list[str]:
    problems = []
    if chunks[0].config.sequence_parallel:
        problems.append("sequence parallelism cannot shard single tokens; build the model with sequence_parallel=False")
    if state.cp.size > 1 or state.dp.size > 1:
        problems.append(
            f"generation supports only tensor and pipeline parallelism, but context({state.cp.size}) x "
            f"data({state.dp.size}) is above 1; change the number of processes"
        )
    if (chunks[0].pre_process, chunks[-1].post_process) != (state.pp.is_first, state.pp.is_last):
        problems.append(
            f"stage {state.pp.rank} of pipeline({state.pp.size}) does not match the model's modules; build it with "
            "pre_process on the first stage and post_process on the last"
        )
    if state.pp.size > 1 and links is None:
        problems.append(f"pipeline({state.pp.size}) has no links between its stages; create them once for the model")
    return problems
