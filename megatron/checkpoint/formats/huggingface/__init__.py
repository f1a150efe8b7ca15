"""Hugging Face models: architectures, settings, weights and tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.checkpoint.formats.huggingface.explanation import explain_family
    from megatron.checkpoint.formats.huggingface.families import describe_missing_family, recorded_hugging_face_config
    from megatron.checkpoint.formats.huggingface.family import Family, TensorLink, query_key_value_rows, shapes_of
    from megatron.checkpoint.formats.huggingface.hub import HubModel, fetch_model, fetch_on_every_node, find_hub_model
    from megatron.checkpoint.formats.huggingface.linked_tensors import LinkTable
    from megatron.checkpoint.formats.huggingface.llama import LlamaFamily
    from megatron.checkpoint.formats.huggingface.model_export import (
        ExportedView,
        choose_family,
        publish_folder,
        write_hugging_face,
    )
    from megatron.checkpoint.formats.huggingface.model_record import HUB, MODEL_RECORD, decode_record
    from megatron.checkpoint.formats.huggingface.settings import read_settings
    from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
    from megatron.checkpoint.formats.huggingface.weight_files import WeightInfo, write_weights

__getattr__ = lazy_exports(
    __name__,
    {
        "explanation": "explain_family",
        "families": "describe_missing_family recorded_hugging_face_config",
        "family": "Family TensorLink query_key_value_rows shapes_of",
        "hub": "HubModel fetch_model fetch_on_every_node find_hub_model",
        "linked_tensors": "LinkTable",
        "llama": "LlamaFamily",
        "model_export": "ExportedView choose_family publish_folder write_hugging_face",
        "model_record": "HUB MODEL_RECORD decode_record",
        "settings": "read_settings",
        "source": "HuggingFaceSource",
        "weight_files": "WeightInfo write_weights",
    },
)
