"""How a model is sharded over processes, and the precision of its parameters."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import POSITIVE, Config, flag
from megatron.core.parallel_sizes import ParallelSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParallelConfig(Config, in_args=True):
    """Hold the parallel layout that every layer may need to know.

    ``params_dtype`` is a torch dtype by name; ``fp16`` and ``bf16`` decide it where one of them is set.
    """

    tensor_model_parallel_size: int = flag(1, role="layout", bounds=POSITIVE)
    """Number of processes over which each layer's matrices are sharded."""
    pipeline_model_parallel_size: int = flag(1, role="layout", bounds=POSITIVE)
    """Number of pipeline stages over which the layers are spread."""
    context_parallel_size: int = flag(1, role="layout", bounds=POSITIVE)
    """Number of processes over which each sequence is split."""
    sequence_parallel: bool = flag(False, role="layout")
    """Shard the activations outside the matrix products along the sequence over the tensor-parallel ranks."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, role="layout")
    """Number of layers in one virtual pipeline stage; turns the interleaved schedule on."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, role="layout")
    """Number of virtual stages that each pipeline rank holds; turns the interleaved schedule on."""
    decoder_first_pipeline_num_layers: int | None = flag(None, role="layout")
    """Number of layers on the first pipeline stage, where the split is uneven."""
    decoder_last_pipeline_num_layers: int | None = flag(None, role="layout")
    """Number of layers on the last pipeline stage, where the split is uneven."""
    account_for_embedding_in_pipeline_split: bool = flag(False, role="layout")
    """Count the embedding as one layer when the layers are spread over the pipeline stages."""
    account_for_loss_in_pipeline_split: bool = flag(False, role="layout")
    """Count the output layer and the loss as one layer when the layers are spread over the pipeline
    stages."""
    pipeline_model_parallel_layout: str | None = flag(None, metavar="LAYOUT", role="layout")
    """Which layers are on which pipeline stage: E embedding, t layer, L loss, | between stages: Et*3|(tt|)*2tL."""
    pipeline_schedule: str | None = flag(
        None, choices=("1f1b", "interleaved", "zero-bubble"), role="layout", in_args=False
    )
    """Order of forward and backward passes: 1F1B, interleaved with virtual stages, or zero-bubble (ZB-H1), which
    splits the backward pass; by default what fits the stages."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(None, role="layout", in_args=False)
    """With virtual stages: how many micro-batches one virtual stage takes before the next one's turn."""
    cp_comm_type: tuple[str, ...] = flag(("p2p",), nargs="+", role="layout", in_args=False)
    """How context-parallel ranks exchange keys and values: p2p, all_gather or a2a; one for all layers, or
    one a layer."""
    fp16: bool = flag(False, role="run", excludes=("bf16",))
    """Train in float16 with float32 main parameters and dynamic loss scaling."""
    bf16: bool = flag(False, role="run")
    """Train in bfloat16 with float32 main parameters."""
    cpu_matmul: str = flag("auto", choices=("auto", "onednn", "mkl"), role="run")
    """Library of the linear layers' matrix products on CPU: oneDNN, or mkl for what torch itself calls (MKL in
    float32). auto measures both at the start of a run and keeps the choice with its checkpoints."""
    params_dtype: str = flag("", cli=False, role="run", in_args=False)
    """Type of the model's parameters: float32, bfloat16, float16 or float64."""

    def __post_init__(self) -> None:
        """Fill in the values that follow from others."""
        half = "float16" if self.fp16 else "bfloat16" if self.bf16 else None
        object.__setattr__(self, "params_dtype", half or self.params_dtype or "float32")

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """Return the sizes of the grid of ranks that holds one copy of the model."""
        return ParallelSizes(
            tp=self.tensor_model_parallel_size, pp=self.pipeline_model_parallel_size, cp=self.context_parallel_size
        )

    def cp_exchange(self, layer_number: int) -> str:
        """Return a layer's choice among ``cp_comm_type``: one for all layers, or one a layer."""
        return self.cp_comm_type[0 if len(self.cp_comm_type) == 1 else layer_number]
