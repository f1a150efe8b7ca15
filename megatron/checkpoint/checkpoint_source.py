"""Reader interface of all checkpoint formats, with global tensors under native names, and views of a source."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from megatron.core.config_base import config_to_dict
from megatron.core.dist_checkpointing import AVERAGE_PREFIX, MODEL_PREFIX, OPTIMIZER_PREFIX, dtype_of
from megatron.core.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
from megatron.core.models.gpt import GPTConfig
from megatron.core.ops import BLOCK_SIZE, GROUP_SIZE, dequantize_blocks, dequantize_scales, make_tables
from megatron.core.parallel_config import ONE_RANK
from megatron.core.sharding import Box
from megatron.core.tensor_parallel import CODES, LARGEST, MEAN, SCALES, STORED_PARTS

_MISFITS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class HasFolder(Protocol):
    """Reader of a folder's files."""

    folder: Path


Source = TypeVar("Source", bound=HasFolder)


def refuse_misfits(
    reader: Callable[Concatenate[Source, Arguments], Result],
) -> Callable[Concatenate[Source, Arguments], Result]:
    """Convert errors of a method that interprets a folder's values to DamagedCheckpointError.

    The values are untrusted: each may have any type, while the method assumes the expected type.
    """

    def read(self: Source, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return reader(self, *args, **kwargs)
        except _MISFITS as error:
            reason = f"{type(error).__name__}: {reprlib.repr(str(error)[:200])}"
            raise DamagedCheckpointError(f"{self.folder}: its values do not match its format ({reason})") from error

    functools.update_wrapper(read, reader)
    return read


@dataclass(frozen=True)
class TensorInfo:
    """Unpadded shape of a tensor in the whole model, and its stored dtype."""

    global_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return self.whole.num_elements

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def whole(self) -> Box:
        return Box((0,) * len(self.global_shape), self.global_shape)


class CheckpointSource(Protocol):
    """Native view of a checkpoint on disk in any format.

    Values are read on demand. A source keeps no tensor after the call that returns it, so that a checkpoint of any size
    can be converted in the memory of its largest stored tensor.
    """

    @property
    def folder(self) -> Path:
        """Return the folder of one iteration or of a Hugging Face model."""

    @property
    def common(self) -> Mapping[str, Any]:
        """Return the ``common`` of a native index: progress, config, layout, optimizer, scheduler and tokenizer.

        ``config`` is complete, as returned by `RunConfig.to_dict`. ``optimizer`` and ``scheduler`` are None if the
        checkpoint has no optimizer state.
        """

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor by its native name.

        The names are ``model.<parameter>`` and ``optimizer.{exp_avg,exp_avg_sq,main_param}.<parameter>``. Layers are
        numbered over the whole model, the vocabulary has no padding, the rows of fused weights have the native order,
        and a tied weight appears once. Random number streams are left out, since they belong to a layout.
        """

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Read a box of a tensor, or all of it, as a contiguous CPU tensor; only the needed bytes are read.

        Raises:
            KeyError: there is no tensor with this name.
            CheckpointError: the file that holds the tensor is missing or damaged.
        """

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""


def untrained_common(config: GPTConfig, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Build the ``common`` section of a model at iteration 0; ``tokenizer`` are the settings of its tokenizer."""
    length = config.max_position_embeddings
    return {
        "progress": {
            "iteration": 0,
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
            "skipped_iterations": 0,
            "floating_point_operations_so_far": 0,
        },
        "config": {
            "model": config_to_dict(config),
            "training": {"micro_batch_size": 1},
            "optimizer": {},
            "scheduler": {},
            "ddp": {},
            "data": {"seq_length": length},
            "tokenizer": dict(tokenizer),
            "validation": {},
            "checkpoint": {},
            "logging": {},
            "initialization": {},
            "world_size": 1,
        },
        "layout": ONE_RANK.record(),
        "optimizer": None,
        "scheduler": None,
        "tokenizer": None,
    }


class SourceView:
    """View of a source with a different ``common`` section; implements `CheckpointSource`.

    Without ``keeps_optimizer`` the optimizer's tensors are left out. Weights are converted to ``weights_dtype`` if it
    is given. ``on_read`` is called with the number of bytes of every read.
    """

    def __init__(
        self,
        source: CheckpointSource,
        common: Mapping[str, Any],
        *,
        keeps_optimizer: bool = True,
        weights_dtype: torch.dtype | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        self.common = common
        self._source = source
        self._on_read = on_read
        self.tensors: Mapping[str, TensorInfo] = {
            name: _converted(info, weights_dtype) if _is_weight(name) else info
            for name, info in source.tensors.items()
            if keeps_optimizer or not name.startswith(OPTIMIZER_PREFIX)
        }

    @property
    def folder(self) -> Path:
        return self._source.folder

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it.

        Raises:
            KeyError: the view has no tensor with this name.
            CheckpointError: the file that holds the tensor is missing or damaged.
        """
        dtype = self.tensors[name].dtype
        values = self._source.read(name, box).to(dtype)
        if self._on_read is not None:
            self._on_read(values.nbytes)
        return values

    def close(self) -> None:
        self._source.close()


def _is_weight(name: str) -> bool:
    """Return whether a tensor is a weight in the model's dtype; codes and scales of quantized weights are not."""
    return name.startswith(MODEL_PREFIX) and name.rpartition(".")[2] not in STORED_PARTS


def _converted(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    return info if dtype is None else TensorInfo(info.global_shape, dtype)


class AveragedSource:
    """View of a source with EMA weights instead of the weights that have an average; implements `CheckpointSource`.

    Averages are rounded to the weights' dtype. The optimizer state, which belongs to the original weights, is left out.

    Raises:
        ConfigurationError: the source has no averages.
    """

    def __init__(self, source: CheckpointSource) -> None:
        if not any(name.startswith(AVERAGE_PREFIX) for name in source.tensors):
            raise ConfigurationError(
                f"{source.folder} contains no averaged (EMA) weights; omit --ema, or use a native checkpoint of a run "
                "with --ema-decay"
            )
        self._source = source
        self.common: Mapping[str, Any] = {**source.common, "optimizer": None, "scheduler": None}
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for name, info in source.tensors.items() if not name.startswith(OPTIMIZER_PREFIX)
        }

    @property
    def folder(self) -> Path:
        return self._source.folder

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it.

        Raises:
            KeyError: the view has no tensor with this name.
            CheckpointError: the file that holds the tensor is missing or damaged.
        """
        dtype = self.tensors[name].dtype
        average = AVERAGE_PREFIX + name.removeprefix(MODEL_PREFIX)
        is_averaged = name.startswith(MODEL_PREFIX) and average in self._source.tensors
        return self._source.read(average if is_averaged else name, box).to(dtype)

    def close(self) -> None:
        self._source.close()


class DequantizedSource:
    """View of a source with 4-bit weights in the model's dtype; implements `CheckpointSource`.

    ``original`` is a checkpoint of the base model, whose weights replace the quantized ones; without it they are
    dequantized, which are the values that the run computed with.

    Raises:
        CheckpointError: ``original`` lacks a weight, or it has another shape.
    """

    def __init__(self, source: CheckpointSource, original: CheckpointSource | None = None) -> None:
        self.base, self._original = source, original
        values = source.common["config"]
        model = values["model"]
        self._tables = make_tables(model["lora_base_quantization"], torch.device("cpu"))
        dtype = dtype_of(model["params_dtype"])
        self.common: Mapping[str, Any] = {
            **source.common,
            "config": {**values, "model": {**model, "lora_base_quantization": None, "lora_double_quantization": True}},
        }
        self._weights = {
            name.removesuffix(f".{CODES}"): TensorInfo((*info.global_shape[:-1], 2 * info.global_shape[-1]), dtype)
            for name, info in source.tensors.items()
            if name.endswith(f".{CODES}")
        }
        others = {
            name: info
            for name, info in source.tensors.items()
            if not (name.rpartition(".")[2] in STORED_PARTS and name.rpartition(".")[0] in self._weights)
        }
        self.tensors: Mapping[str, TensorInfo] = {**others, **self._weights}
        if original is not None:
            self._check_original(original)

    def _check_original(self, original: CheckpointSource) -> None:
        for name, info in self._weights.items():
            found = original.tensors.get(name)
            if found is None or found.global_shape != info.global_shape:
                shape = "none" if found is None else str(list(found.global_shape))
                raise CheckpointError(
                    f"{original.folder} is not the base model of {self.folder}: {name} has shape "
                    f"{list(info.global_shape)}, but the base model has {shape}"
                )

    @property
    def folder(self) -> Path:
        return self.base.folder

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it.

        Raises:
            KeyError: the view has no tensor with this name.
            CheckpointError: a file that holds a part of the tensor is missing or damaged.
        """
        info = self._weights.get(name)
        if info is None:
            return self.base.read(name, box)
        if self._original is not None:
            return self._original.read(name, box).to(info.dtype)
        box = info.whole if box is None else box
        (*rows, start), (*counts, length) = box.offset, box.shape
        first, end = start // BLOCK_SIZE, -(-(start + length) // BLOCK_SIZE)
        half = BLOCK_SIZE // 2
        codes = self.base.read(f"{name}.{CODES}", Box((*rows, first * half), (*counts, (end - first) * half)))
        scales = self._scales(name, Box((*rows, first), (*counts, end - first)))
        values = dequantize_blocks(codes, scales, self._tables, info.dtype)
        return values[..., start - first * BLOCK_SIZE :][..., :length].contiguous()

    def _scales(self, name: str, box: Box) -> torch.Tensor:
        scales, largest = f"{name}.{SCALES}", f"{name}.{LARGEST}"
        stored = self.base.read(scales, box)
        if largest not in self.base.tensors:
            return stored
        # The shape shows along which dim the groups are.
        *_, num_rows, num_blocks = self.base.tensors[scales].global_shape
        along_rows = self.base.tensors[largest].global_shape[-2:] == (num_rows, -(-num_blocks // GROUP_SIZE))
        dim = -1 if along_rows else -2
        offset, shape = [*box.offset], [*box.shape]
        offset[dim] = box.offset[dim] // GROUP_SIZE
        shape[dim] = -(-(box.offset[dim] + box.shape[dim]) // GROUP_SIZE) - offset[dim]
        groups = Box(tuple(offset), tuple(shape))
        found, mean = (self.base.read(f"{name}.{part}", groups) for part in (LARGEST, MEAN))
        return dequantize_scales(stored, found, mean, self._tables, dim, box.offset[dim])

    def close(self) -> None:
        self.base.close()
        if self._original is not None:
            self._original.close()
