"""A Hugging Face model folder as a checkpoint: weights under our names, and what it takes to write the folder again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.sharding import Box
from megatron.interop.checkpoint_source import TensorInfo
from megatron.interop.huggingface.families import read_model
from megatron.interop.huggingface.linked_tensors import LinkedTensors, StoredWeights
from megatron.interop.huggingface.model_record import MODEL_RECORD, FileRecord, record_model
from megatron.interop.huggingface.settings import read_settings
from megatron.interop.huggingface.stored.block_float4 import BlockFloat4Weights
from megatron.interop.huggingface.stored.quantization import BlockFloat4, BlockFloat8, read_quantization
from megatron.interop.huggingface.stored.quantized_weights import BlockFloat8Weights
from megatron.interop.huggingface.tokenizer_files import copy_into_checkpoint, tokenizer_settings
from megatron.interop.huggingface.weight_files import WeightFiles
from megatron.interop.untrained_model import untrained_common


def _plain_weights(files: WeightFiles, quantization: BlockFloat8 | BlockFloat4 | None) -> StoredWeights:
    """Return the weights of files as the values that they stand for."""
    match quantization:
        case BlockFloat8():
            return BlockFloat8Weights(files, quantization)
        case BlockFloat4():
            return BlockFloat4Weights(files, quantization)
    return files


class HuggingFaceSource:
    """Read a Hugging Face model as the native format sees it (see `CheckpointSource`).

    Nothing but headers is read before a box is asked for.

    Raises:
        CheckpointError: the folder lacks files, or its tensors are not those of the model that config.json describes.
        ConfigurationError: config.json describes a model that is not supported.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        settings = read_settings(self.folder)
        self.family, self.config = read_model(settings)
        self.files = WeightFiles(self.folder)
        quantization = read_quantization(settings)
        self._linked = LinkedTensors(self.family, self.config, _plain_weights(self.files, quantization))
        self.tensors: Mapping[str, TensorInfo] = self._linked.tensors
        tokenizer = tokenizer_settings(self.folder, self.config.vocab_size)
        self.common: Mapping[str, Any] = untrained_common(self.config, tokenizer)
        if quantization is None:  # What was quantised is not written so again.
            files = {name: FileRecord(self.files.names_in(name), texts) for name, texts in self.files.metadata.items()}
            record = record_model(self.folder, self.files.index_text, files, self.family.is_buffer)
            self.common |= {MODEL_RECORD: record.encode()}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it, contiguous on the CPU.

        Raises:
            KeyError: there is no tensor of this name.
            CheckpointError: the file that holds it is missing or damaged.
        """
        return self._linked.read(name, box)

    def write_tokenizer(self, checkpoint: Path) -> bool:
        """Leave the tokenizer's record and files in ``checkpoint/tokenizer``; return whether the model has one.

        Raises:
            TokenizerError: it cannot be built.
        """
        return copy_into_checkpoint(self.folder, self.common["config"]["tokenizer"], checkpoint)

    def close(self) -> None:
        """Close the files."""
        self.files.close()
