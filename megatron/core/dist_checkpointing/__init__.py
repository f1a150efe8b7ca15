"""The native checkpoint format: description of tensors, planning, reading and writing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.async_save import BackgroundTask, StagingArea
    from megatron.core.dist_checkpointing.disk import (
        CheckpointWriteError,
        SequentialFile,
        checksum,
        read_error,
        replace_text,
        sync_folder,
        write_error,
        write_text,
    )
    from megatron.core.dist_checkpointing.index import (
        INDEX_FILE,
        RNG_PREFIX,
        CheckpointIndex,
        StoredFile,
        StoredShard,
        StoredTensor,
        check_run_state,
        encode_common,
        index_text,
        read_index,
        read_index_file,
        write_index,
    )
    from megatron.core.dist_checkpointing.load import LoadedTensors, Progress, ignore_progress, load_index, load_tensors
    from megatron.core.dist_checkpointing.planner import (
        AVERAGE_PREFIX,
        FLOAT8_PREFIX,
        MAX_SHARD_BYTES,
        MODEL_PREFIX,
        OPTIMIZER_PREFIX,
        CheckpointState,
        Float8Scaling,
        SavePlan,
        SavePlanner,
        ShardedTensor,
        average_choice,
        dtype_name,
        dtype_of,
        float8_tensors,
        from_spec,
        model_tensors,
        optimizer_tensors,
        rng_name,
        rng_tensors,
        shard_key,
        whole_tensor,
    )
    from megatron.core.dist_checkpointing.shard_file import (
        RankShare,
        ShardEntry,
        WrittenShare,
        build_index,
        check_file,
        shard_header,
        take_share,
    )
    from megatron.core.dist_checkpointing.validation import STRICT, STRICTNESS, Strictness, check_geometry, find_misfits

__getattr__ = lazy_exports(
    __name__,
    {
        "async_save": "BackgroundTask StagingArea",
        "disk": (
            "CheckpointWriteError SequentialFile checksum read_error replace_text sync_folder write_error write_text"
        ),
        "index": (
            "CheckpointIndex INDEX_FILE RNG_PREFIX StoredFile StoredShard StoredTensor check_run_state encode_common "
            "index_text read_index read_index_file write_index"
        ),
        "load": "LoadedTensors Progress load_index load_tensors ignore_progress",
        "planner": (
            "AVERAGE_PREFIX CheckpointState FLOAT8_PREFIX Float8Scaling MAX_SHARD_BYTES MODEL_PREFIX "
            "OPTIMIZER_PREFIX SavePlan SavePlanner ShardedTensor average_choice dtype_name dtype_of "
            "float8_tensors from_spec model_tensors optimizer_tensors shard_key rng_name rng_tensors whole_tensor"
        ),
        "shard_file": "RankShare ShardEntry WrittenShare build_index check_file shard_header take_share",
        "validation": "STRICT STRICTNESS Strictness check_geometry find_misfits",
    },
)
