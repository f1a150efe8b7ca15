"""Tensor and sequence parallelism: sharded layers, loss, initialization, RNG streams, recomputation, offload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.comm_overlap_config import (
        WHOLE,
        LinearOverlap,
        linear_overlap,
        read_overlap_methods,
    )
    from megatron.core.tensor_parallel.cpu_offload import ActivationOffload, WeightOffload
    from megatron.core.tensor_parallel.cross_entropy import (
        LossInputs,
        vocab_parallel_losses_and_normalizers,
        vocab_sharded_cross_entropy,
    )
    from megatron.core.tensor_parallel.initialization import initialize_divided, initialize_parameter
    from megatron.core.tensor_parallel.lora import (
        AdapterOptions,
        ColumnAdapter,
        LinearAdapters,
        LowRankAdapter,
        RowAdapter,
        RowBlock,
        adapt,
    )
    from megatron.core.tensor_parallel.mappings import (
        InputRegion,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
        scatter_to_sequence_parallel_region,
        sum_over_tensor_model_parallel_region,
    )
    from megatron.core.tensor_parallel.quantized_weight import (
        CODES,
        LARGEST,
        MEAN,
        SCALES,
        STORED_PARTS,
        QuantizedWeight,
        stacked_weights,
    )
    from megatron.core.tensor_parallel.random import DEFAULT, STREAM_AXES, RngStreams, stream_seed
    from megatron.core.tensor_parallel.recompute import saved_as_inputs, saved_in_parts, several_saved_as_inputs
    from megatron.core.tensor_parallel.sharded_layers import (
        ColumnShardedLinear,
        RowShardedLinear,
        VocabShardedEmbedding,
        embedding_lookup,
        make_parameter,
        replicated_spec,
        tensor_parallel_linear,
    )
    from megatron.core.tensor_parallel.symmetric_memory import why_no_symmetric_memory

__getattr__ = lazy_exports(
    __name__,
    {
        "comm_overlap_config": "LinearOverlap WHOLE linear_overlap read_overlap_methods",
        "cpu_offload": "ActivationOffload WeightOffload",
        "cross_entropy": "LossInputs vocab_sharded_cross_entropy vocab_parallel_losses_and_normalizers",
        "initialization": "initialize_divided initialize_parameter",
        "sharded_layers": (
            "ColumnShardedLinear RowShardedLinear VocabShardedEmbedding embedding_lookup make_parameter "
            "replicated_spec tensor_parallel_linear"
        ),
        "lora": "AdapterOptions ColumnAdapter LinearAdapters LowRankAdapter RowAdapter RowBlock adapt",
        "mappings": (
            "InputRegion copy_to_tensor_model_parallel_region gather_from_sequence_parallel_region "
            "gather_from_tensor_model_parallel_region reduce_from_tensor_model_parallel_region "
            "scatter_to_sequence_parallel_region sum_over_tensor_model_parallel_region"
        ),
        "quantized_weight": "CODES LARGEST MEAN QuantizedWeight SCALES STORED_PARTS stacked_weights",
        "random": "DEFAULT RngStreams STREAM_AXES stream_seed",
        "recompute": "saved_as_inputs saved_in_parts several_saved_as_inputs",
        "symmetric_memory": "why_no_symmetric_memory",
    },
)
