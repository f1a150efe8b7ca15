"""Tensor and sequence parallelism: sharded layers, loss, initialization, RNG streams, recomputation, offload.

The names of megatron-core's package, such as `ColumnParallelLinear`, are available with its signatures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.chunked_cross_entropy import linear_cross_entropy
    from megatron.core.tensor_parallel.comm_overlap_config import (
        WHOLE,
        LinearOverlap,
        linear_overlap,
        read_overlap_methods,
        unchunked_gemms,
    )
    from megatron.core.tensor_parallel.cpu_offload import (
        ActivationOffload,
        WeightOffload,
    )
    from megatron.core.tensor_parallel.cross_entropy import (
        LossInputs,
        vocab_parallel_cross_entropy,
        vocab_parallel_losses_and_normalizers,
        vocab_sharded_cross_entropy,
    )
    from megatron.core.tensor_parallel.data import (
        broadcast_data,
    )
    from megatron.core.tensor_parallel.float8_linear import (
        QuantizedActivation,
    )
    from megatron.core.tensor_parallel.initialization import (
        draw_box,
        initialize_divided,
        initialize_parameter,
    )
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        copy_tensor_model_parallel_attributes,
        linear_with_frozen_weight,
        linear_with_grad_accumulation_and_async_allreduce,
        param_is_not_tensor_parallel_duplicate,
        set_defaults_if_not_set_tensor_model_parallel_attributes,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.tensor_parallel.lora import (
        AdapterOptions,
        ColumnAdapter,
        LinearAdapters,
        LowRankAdapter,
        RowAdapter,
        RowBlock,
        adapt,
    )
    from megatron.core.tensor_parallel.loss_chunks import chunk_rows
    from megatron.core.tensor_parallel.mappings import (
        InputRegion,
        all_gather_last_dim_from_tensor_parallel_region,
        all_to_all,
        all_to_all_hp2sp,
        all_to_all_sp2hp,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_last_dim_to_tensor_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
        scatter_to_tensor_model_parallel_region,
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
    from megatron.core.tensor_parallel.random import (
        DEFAULT,
        STREAM_AXES,
        CheckpointWithoutOutput,
        CudaRNGStatesTracker,
        RngStreams,
        checkpoint,
        convert_cuda_rng_state,
        get_all_rng_states,
        get_cuda_rng_tracker,
        get_data_parallel_rng_tracker_name,
        get_expert_parallel_rng_tracker_name,
        initialize_rng_tracker,
        is_graph_safe_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
        stream_seed,
    )
    from megatron.core.tensor_parallel.recompute import (
        saved_as_inputs,
        saved_in_parts,
        several_saved_as_inputs,
    )
    from megatron.core.tensor_parallel.sharded_layers import (
        ColumnShardedLinear,
        RowShardedLinear,
        VocabShardedEmbedding,
        embedding_lookup,
        make_parameter,
        replicated_spec,
        tensor_parallel_linear,
    )
    from megatron.core.tensor_parallel.symmetric_memory import (
        why_no_symmetric_memory,
    )
    from megatron.core.tensor_parallel.utils import (
        VocabUtility,
        gather_split_1d_tensor,
        split_tensor_along_last_dim,
        split_tensor_into_1d_equal_chunks,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        "comm_overlap_config": "LinearOverlap WHOLE linear_overlap read_overlap_methods unchunked_gemms",
        "cpu_offload": "ActivationOffload WeightOffload",
        "chunked_cross_entropy": "linear_cross_entropy",
        "loss_chunks": "chunk_rows",
        "cross_entropy": (
            "LossInputs vocab_parallel_cross_entropy vocab_parallel_losses_and_normalizers vocab_sharded_cross_entropy"
        ),
        "data": "broadcast_data",
        "float8_linear": "QuantizedActivation",
        "initialization": "draw_box initialize_divided initialize_parameter",
        "layers": (
            "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding "
            "copy_tensor_model_parallel_attributes linear_with_frozen_weight "
            "linear_with_grad_accumulation_and_async_allreduce param_is_not_tensor_parallel_duplicate "
            "set_defaults_if_not_set_tensor_model_parallel_attributes "
            "set_tensor_model_parallel_attributes"
        ),
        "lora": "AdapterOptions ColumnAdapter LinearAdapters LowRankAdapter RowAdapter RowBlock adapt",
        "mappings": (
            "InputRegion all_gather_last_dim_from_tensor_parallel_region all_to_all all_to_all_hp2sp "
            "all_to_all_sp2hp copy_to_tensor_model_parallel_region "
            "gather_from_sequence_parallel_region gather_from_tensor_model_parallel_region "
            "reduce_from_tensor_model_parallel_region "
            "reduce_scatter_last_dim_to_tensor_parallel_region "
            "reduce_scatter_to_sequence_parallel_region scatter_to_sequence_parallel_region "
            "scatter_to_tensor_model_parallel_region sum_over_tensor_model_parallel_region"
        ),
        "random": (
            "CheckpointWithoutOutput CudaRNGStatesTracker DEFAULT RngStreams STREAM_AXES checkpoint "
            "convert_cuda_rng_state get_all_rng_states get_cuda_rng_tracker get_data_parallel_rng_tracker_name "
            "get_expert_parallel_rng_tracker_name initialize_rng_tracker "
            "is_graph_safe_cuda_rng_tracker model_parallel_cuda_manual_seed stream_seed"
        ),
        "quantized_weight": "CODES LARGEST MEAN QuantizedWeight SCALES STORED_PARTS stacked_weights",
        "recompute": "saved_as_inputs saved_in_parts several_saved_as_inputs",
        "sharded_layers": (
            "ColumnShardedLinear RowShardedLinear VocabShardedEmbedding embedding_lookup "
            "make_parameter replicated_spec tensor_parallel_linear"
        ),
        "symmetric_memory": "why_no_symmetric_memory",
        "utils": ("VocabUtility gather_split_1d_tensor split_tensor_along_last_dim split_tensor_into_1d_equal_chunks"),
    },
)
