"""A model whose layers are spread over pipeline stages, as one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.collectives import broadcast
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.p2p_communication import PipelineLinks, ReceiveQueue, SendQueue
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.transformer.kv_cache import KeyValueCache


class StagedModel:
    """Run this rank's stage between the stage before and the one after; the whole model where there is no pipeline.

    Every rank of the pipeline must make the same calls. ``links`` are those of `create_pipeline_links`. A rank with
    several chunks has the others, in their order, in ``further_chunks``: then the links go round. Of ranks that make
    the same calls with the same parameters, ``twins``, the first one decides for all.

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
    ) -> torch.Tensor | None:
        """Return the logits on the last stage and None on the others.

        Shapes: ``tokens, position_ids: [b, s] -> [s or 1, b, v/tp]``.
        """
        output: torch.Tensor | None = None
        for chunk in self.chunks:
            if not chunk.pre_process and self._in is not None:
                shape = chunk.config.hidden_shape(tokens.shape[1], tokens.shape[0])
                output = ReceiveQueue(self._in, [shape], self._dtype, self.device).take()
            output = chunk(
                tokens,
                position_ids,
                pattern=pattern,
                hidden=None if chunk.pre_process else output,
                cache=cache,
                last_position_only=last_position_only,
            )
            if not chunk.post_process and self._out is not None:
                self._out.send(output.contiguous())
        return output if self.chunks[-1].post_process else None

    def share(self, values: torch.Tensor, logits: torch.Tensor | None) -> None:
        """Give every rank what the first rank of the last stage, which has ``logits``, wrote into ``values``."""
        if logits is not None:
            # All ranks chose from the same bytes; but a GPU's sums may differ in their last bit from rank to rank.
            broadcast(values, self.state.tp)
        broadcast(values, self.state.pp, source=self.state.pp.size - 1)
        if self._twins is not None:
            broadcast(values, self._twins)

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        if self._out is not None:
            self._out.finish()


def _problems(chunks: Sequence[GPTModel], state: ParallelState, links: PipelineLinks | None) -> list[str]:
    problems = []
    if chunks[0].config.sequence_parallel:
        problems.append("sequence parallelism cannot cut single tokens; build the model with sequence_parallel=False")
    if state.cp.size > 1 or state.dp.size > 1:
        problems.append(
            f"generation runs over tensor- and pipeline-parallel processes, here context({state.cp.size}) x "
            f"data({state.dp.size}); change the number of processes"
        )
    if (chunks[0].pre_process, chunks[-1].post_process) != (state.pp.is_first, state.pp.is_last):
        problems.append(
            f"stage {state.pp.rank} of pipeline({state.pp.size}) is not what the model holds; build it with "
            "pre_process on the first stage and post_process on the last"
        )
    if state.pp.size > 1 and links is None:
        problems.append(f"pipeline({state.pp.size}) has no links between its stages; make them once for the model")
    return problems
