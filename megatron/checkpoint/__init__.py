"""Save, find, load and convert checkpoints in every format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.checkpoint.checkpoint_folder import (
        BACKEND_FILE,
        COMMON_FILE,
        FORMAT_NAMES,
        FORMATS,
        METADATA_FILE,
        TRACKER_FILE,
        ValidationWindow,
        candidate_folders,
        complete_iterations,
        detect_format,
        is_torch_dist,
        iteration_folder,
        iteration_of_folder,
        mark_known,
        new_iteration,
        newest_known,
        point_tracker,
        saved_iterations,
    )
    from megatron.checkpoint.checkpoint_source import CheckpointSource, TensorInfo, refuse_misfits, untrained_common
    from megatron.checkpoint.comparison import MAX_BOX_BYTES, diff_checkpoints
    from megatron.checkpoint.conversion import convert
    from megatron.checkpoint.conversion_request import ConversionRequest, Target, Upcycling
    from megatron.checkpoint.inference_model import (
        build_inference_model,
        inference_config,
        inference_stage,
        load_model_from,
    )
    from megatron.checkpoint.inspection import inspect_checkpoint
    from megatron.checkpoint.load import load_checkpoint, load_model_weights, read_common
    from megatron.checkpoint.local_copies import FoundCopies, LocalCopies
    from megatron.checkpoint.save import (
        CommonState,
        SaveContext,
        SaveFolders,
        apply_retention,
        prepare_save_directory,
        save_in_steps,
    )
    from megatron.checkpoint.stored_checkpoint import is_release, open_checkpoint
    from megatron.checkpoint.train_state import TrainProgress, TrainState

__getattr__ = lazy_exports(
    __name__,
    {
        "checkpoint_folder": (
            "BACKEND_FILE COMMON_FILE FORMATS FORMAT_NAMES METADATA_FILE TRACKER_FILE ValidationWindow "
            "candidate_folders complete_iterations detect_format is_torch_dist iteration_folder iteration_of_folder "
            "mark_known new_iteration newest_known point_tracker saved_iterations"
        ),
        "checkpoint_source": "CheckpointSource TensorInfo refuse_misfits untrained_common",
        "comparison": "MAX_BOX_BYTES diff_checkpoints",
        "conversion": "convert",
        "conversion_request": "ConversionRequest Target Upcycling",
        "inference_model": "build_inference_model inference_config inference_stage load_model_from",
        "inspection": "inspect_checkpoint",
        "load": "load_checkpoint load_model_weights read_common",
        "local_copies": "FoundCopies LocalCopies",
        "save": "CommonState SaveContext SaveFolders apply_retention prepare_save_directory save_in_steps",
        "stored_checkpoint": "is_release open_checkpoint",
        "train_state": "TrainProgress TrainState",
    },
)
