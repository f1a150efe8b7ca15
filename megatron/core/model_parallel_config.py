"""How a model is sharded over processes, and the precision of its parameters."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import NOT_NEGATIVE, POSITIVE, Config, flag
from megatron.core.parallel_sizes import ParallelSizes

ELEMENT_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element by the name of its dtype."""


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
    expert_model_parallel_size: int = flag(1, role="layout", bounds=POSITIVE, needs="num_experts", in_args=False)
    """Number of processes over which the experts of a layer are spread; they may be data-, context- and tensor-parallel
    ranks of one another."""
    expert_tensor_parallel_size: int | None = flag(
        None, role="layout", bounds=POSITIVE, needs="num_experts", in_args=False
    )
    """Number of processes over which each expert's matrices are sharded; by default the tensor-parallel size."""
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
    overlap_p2p_communication: bool = flag(True, negative="--no-overlap-p2p-communication", role="run", in_args=False)
    """Let messages between pipeline stages travel while passes are computed. Off: wait until each message between
    pipeline stages has gone before the next pass."""
    delay_wgrad_compute: bool = flag(False, role="run", in_args=False)
    """Compute each micro-batch's weight gradients after its input gradient has left for the stage before."""
    defer_embedding_wgrad_compute: bool = flag(False, role="run", in_args=False)
    """Compute the output layer's weight gradients after the last stage's passes, while the other stages run theirs."""
    wgrad_deferral_limit: int = flag(
        0, role="run", in_args=False, bounds=NOT_NEGATIVE, where=("defer_embedding_wgrad_compute", True)
    )
    """How many micro-batches' weight gradients of the output layer are deferred, the last ones; 0: all."""
    cp_comm_type: tuple[str, ...] = flag(("p2p",), nargs="+", role="layout", in_args=False)
    """How context-parallel ranks exchange keys and values: p2p, all_gather, a2a or a2a+p2p; one for all layers, or
    one a layer."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = flag((), nargs="+", role="layout", in_args=False)
    """For --cp-comm-type a2a+p2p: how many neighboring ranks share heads by all-to-all, and how many such groups
    form a ring."""
    tp_comm_overlap: bool = flag(False, role="run", in_args=False)
    """Under sequence parallelism, send what enters and leaves the layers' matrix products in chunks, one under way
    while another is multiplied."""
    tp_comm_overlap_ag: bool = flag(
        True,
        negative="--disable-tp-comm-overlap-ag",
        aliases=("--disable-tp-comm-split-ag",),
        role="run",
        in_args=False,
        where=("tp_comm_overlap", True),
    )
    """Gather the inputs of column-parallel layers, and the output gradients of row-parallel ones, in chunks. Off:
    gather the inputs of column-parallel layers, and the output gradients of row-parallel ones, before the product."""
    tp_comm_overlap_rs: bool = flag(
        True,
        negative="--disable-tp-comm-overlap-rs",
        aliases=("--disable-tp-comm-split-rs",),
        role="run",
        in_args=False,
        where=("tp_comm_overlap", True),
    )
    """Reduce-scatter the outputs of row-parallel layers in chunks. Off: reduce-scatter the outputs of row-parallel
    layers after the product."""
    tp_comm_overlap_rs_dgrad: bool = flag(False, role="run", in_args=False, where=("tp_comm_overlap", True))
    """Reduce-scatter the input gradients of column-parallel layers in chunks beside their own product, in place of the
    whole beside the weight gradient's."""
    tp_comm_bulk_dgrad: bool = flag(
        True, negative="--disable-tp-comm-bulk-dgrad", role="run", in_args=False, where=("tp_comm_overlap", True)
    )
    """Gather the inputs of column-parallel layers once more beside the input gradient's product. Off: gather the inputs
    of column-parallel layers before the backward pass's products."""
    tp_comm_bulk_wgrad: bool = flag(
        True, negative="--disable-tp-comm-bulk-wgrad", role="run", in_args=False, where=("tp_comm_overlap", True)
    )
    """Reduce-scatter the input gradients of column-parallel layers beside the weight gradient's product. Off:
    reduce-scatter the input gradients of column-parallel layers before the weight gradient's product."""
    tp_comm_overlap_cfg: str | None = flag(
        None, metavar="FILE", role="run", in_args=False, where=("tp_comm_overlap", True)
    )
    """YAML file that gives the products of layers (qkv_fprop, fc2_dgrad, ...) a method: ring_exchange and pipeline are
    chunks, bulk is the whole."""
    tp_comm_overlap_methods: tuple[str, ...] = flag((), cli=False, role="run", in_args=False)
    """What the file of --tp-comm-overlap-cfg says, as PRODUCT=METHOD."""
    tp_comm_overlap_impl: str = flag(
        "auto",
        choices=("auto", "ring", "symmetric-memory", "whole"),
        role="run",
        where=("tp_comm_overlap", True),
    )
    """How chunks travel: round a ring of sends and receives, or by torch's symmetric memory on CUDA; or whole, in none.
    auto takes symmetric memory where devices have it; on CPU it measures, and takes the whole unless chunks gain."""
    fp16: bool = flag(False, role="run", excludes=("bf16",))
    """Train in float16 with float32 main parameters and dynamic loss scaling."""
    bf16: bool = flag(False, role="run")
    """Train in bfloat16 with float32 main parameters."""
    cpu_matmul: str = flag("auto", choices=("auto", "onednn", "mkl", "mixed"), role="run")
    """Library of the linear layers' matrix products on CPU: oneDNN, mkl for what torch itself calls (MKL in float32),
    or mixed: oneDNN, and mkl for weight gradients. auto measures them at the start of a run and keeps the choice with
    its checkpoints."""
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
            tp=self.tensor_model_parallel_size,
            pp=self.pipeline_model_parallel_size,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size,
        )

    @property
    def cp_inner_size(self) -> int | None:
        """Return the ranks of a2a+p2p that share heads; None where no layer asks for it."""
        if self.context_parallel_size == 1 or "a2a+p2p" not in self.cp_comm_type:
            return None
        return self.hierarchical_context_parallel_sizes[0]

    def cp_exchange(self, layer_number: int) -> str:
        """Return a layer's choice among ``cp_comm_type``: one for all layers, or one a layer."""
        return self.cp_comm_type[0 if len(self.cp_comm_type) == 1 else layer_number]
