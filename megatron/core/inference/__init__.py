"""Text generation with a trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.inference.beam_search import BeamConfig, Hypothesis
    from megatron.core.inference.cached_forward import CachedForward
    from megatron.core.inference.continuous_engine import ContinuousEngine
    from megatron.core.inference.engine import InferenceEngine
    from megatron.core.inference.inference_request import (
        Continuation,
        GatheredAnswer,
        GenerationCancelled,
        GenerationRequest,
        NewToken,
        Progress,
        PromptEnded,
        PromptFailed,
        PromptSearched,
        PromptSeen,
        StopRule,
        TokenPairs,
        TokenValue,
        check_request,
        context_length,
        new_tokens_that_fit,
    )
    from megatron.core.inference.prompt_batch import Score, ScoredRow, batches_of_like_length
    from megatron.core.inference.running_batch import News
    from megatron.core.inference.sampling_config import (
        MAX_PENALTY,
        MAX_REPETITION_PENALTY,
        MIN_TEMPERATURE,
        SamplingConfig,
    )
    from megatron.core.inference.staged_model import share_model

__getattr__ = lazy_exports(
    __name__,
    {
        "beam_search": "BeamConfig Hypothesis",
        "cached_forward": "CachedForward",
        "continuous_engine": "ContinuousEngine",
        "engine": "InferenceEngine",
        "inference_request": (
            "Continuation GatheredAnswer GenerationCancelled GenerationRequest NewToken Progress PromptEnded "
            "PromptFailed PromptSearched PromptSeen StopRule TokenPairs TokenValue check_request context_length "
            "new_tokens_that_fit"
        ),
        "prompt_batch": "Score ScoredRow batches_of_like_length",
        "running_batch": "News",
        "sampling_config": "MAX_PENALTY MAX_REPETITION_PENALTY MIN_TEMPERATURE SamplingConfig",
        "staged_model": "share_model",
    },
)
