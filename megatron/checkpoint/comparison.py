"""Compare checkpoints: tensors by value, logits, and recorded configuration.

At most two boxes of a tensor are in memory at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.checkpoint_folder import find_checkpoint
from megatron.checkpoint.checkpoint_source import CheckpointSource, SourceView, TensorInfo
from megatron.checkpoint.config_changes import compare_configs
from megatron.checkpoint.formats import idle_lines
from megatron.checkpoint.formats.huggingface import read_settings
from megatron.checkpoint.inference_model import sample_tokens, source_config, streamed_logits
from megatron.checkpoint.progress import ByteProgress
from megatron.checkpoint.stored_checkpoint import open_checkpoint
from megatron.config import RunConfig
from megatron.core.dist_checkpointing import MODEL_PREFIX, dtype_name
from megatron.core.errors import InputError, MegatronError
from megatron.core.sharding import split_box
from megatron.core.tensor_parallel import CODES, STORED_PARTS

MAX_BOX_BYTES = 64 * 1024 * 1024
_CHUNK_ELEMENTS = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorComparison:
    """Difference of a tensor between two checkpoints; a side that lacks the tensor is None.

    ``max_difference`` is the largest absolute difference of two elements, ``max_value`` the largest absolute value in
    the second checkpoint. ``num_different`` counts elements whose bits differ.
    """

    name: str
    left: TensorInfo | None
    right: TensorInfo | None
    num_different: int = 0
    max_difference: float = 0.0
    max_value: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Return whether both checkpoints have the tensor with the same shape, dtype and bits."""
        return self.left == self.right and self.num_different == 0

    @property
    def relative_difference(self) -> float:
        """Return the largest difference divided by the largest absolute value in the second checkpoint."""
        if self.max_difference == 0:
            return 0.0
        return self.max_difference / self.max_value if self.max_value else math.inf

    def is_close(self, tolerance: float) -> bool:
        """Return whether the difference is within a tolerance relative to the largest value."""
        return self.is_equal or (self.left == self.right and self.relative_difference <= tolerance)

    def __str__(self) -> str:
        """Format the difference as one line."""
        if self.left is None or self.right is None:
            return f"{self.name}: only in the {'second' if self.left is None else 'first'}"
        parts = []
        if self.left.global_shape != self.right.global_shape:
            return f"{self.name}: shape {list(self.left.global_shape)} and {list(self.right.global_shape)}"
        if self.left.dtype != self.right.dtype:
            parts.append(f"dtype {dtype_name(self.left.dtype)} and {dtype_name(self.right.dtype)}")
        if self.num_different:
            parts.append(
                f"{self.num_different} of {self.left.num_elements} elements differ, by at most "
                f"{self.max_difference:.3e} (relative {self.relative_difference:.3e})"
            )
        return f"{self.name}: {'; '.join(parts) or 'equal'}"


def compare_sources(left: CheckpointSource, right: CheckpointSource) -> Iterator[TensorComparison]:
    """Compare every tensor of either source, in the order of their names.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    for name in sorted({*left.tensors, *right.tensors}):
        infos = left.tensors.get(name), right.tensors.get(name)
        if infos[0] is None or infos[1] is None or infos[0].global_shape != infos[1].global_shape:
            yield TensorComparison(name, *infos)
        else:
            yield _compare_tensor(name, left, right)


def _compare_tensor(name: str, left: CheckpointSource, right: CheckpointSource) -> TensorComparison:
    ours, theirs = left.tensors[name], right.tensors[name]
    itemsize = max(ours.dtype.itemsize, theirs.dtype.itemsize)
    boxes = [box for box in split_box(ours.whole, itemsize, MAX_BOX_BYTES) if box.num_elements]
    if ours.dtype == theirs.dtype and all(
        torch.equal(_bits(left.read(name, box)), _bits(right.read(name, box))) for box in boxes
    ):
        return TensorComparison(name, ours, theirs)
    num_different, max_difference, max_value = 0, 0.0, 0.0
    for box in boxes:
        a, b = left.read(name, box).reshape(-1), right.read(name, box).reshape(-1)
        for start in range(0, a.numel(), _CHUNK_ELEMENTS):
            chunk = slice(start, start + _CHUNK_ELEMENTS)
            count, difference, value = _measure(a[chunk], b[chunk])
            num_different += count
            max_difference = max(max_difference, difference)
            max_value = max(max_value, value)
    return TensorComparison(name, ours, theirs, num_different, max_difference, max_value)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers, for which a NaN equals itself, and +0 and -0 differ."""
    return values.reshape(-1).view(_INTEGERS[values.dtype.itemsize])


def _measure(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float]:
    """Return the number of different elements, their largest difference, and the largest value of ``b``."""
    wide_a, wide_b = a.double(), b.double()
    if a.dtype == b.dtype:
        num_different = int((_bits(a) != _bits(b)).sum())
    else:
        num_different = int((wide_a != wide_b).sum())
    # Equal infinities or two NaNs have difference 0; a NaN and a number have difference infinity.
    same = (wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())
    difference = (wide_a - wide_b).abs().masked_fill_(same, 0.0).nan_to_num_(nan=math.inf)
    value = wide_b.abs().nan_to_num_(nan=0.0)
    return num_different, float(difference.max()), float(value.max())


MOST_NAMED = 8
LOGITS_TOLERANCE = 1e-5
STATE = ("progress", "optimizer", "scheduler")


class ConversionMismatchError(MegatronError):
    """The result of a conversion differs from its source, and was not published."""


def check_result(
    expected: CheckpointSource,
    result: CheckpointSource,
    *,
    keeps_state: bool,
    compares_logits: bool,
    log: Callable[[str], None],
) -> None:
    """Read every tensor of both again and compare the bits; with ``compares_logits`` also run both models.

    ``keeps_state`` requires that progress, optimizer and schedule are also equal; model formats have none.

    Raises:
        ConversionMismatchError: they differ; the message names the tensors.
        CheckpointError: the result cannot be read.
    """
    progress = ByteProgress("checking", sum(info.num_bytes for info in expected.tensors.values()), log)
    original = SourceView(expected, expected.common, on_read=progress.add)
    problems = [str(found) for found in compare_sources(original, result) if not found.is_equal]
    progress.finish()
    if keeps_state:
        problems += [
            f"{key}: {result.common[key]} instead of {expected.common[key]}"
            for key in STATE
            if expected.common[key] != result.common[key]
        ]
    if problems:
        raise mismatch(problems)
    log(f"  checked: all {len(original.tensors)} tensors are equal, bit by bit")
    if compares_logits:
        _compare_logits(expected, result, log)


def _compare_logits(expected: CheckpointSource, result: CheckpointSource, log: Callable[[str], None]) -> None:
    """Compare the logits of the result's configuration and weights with those of the source."""
    tokens = sample_tokens(source_config(expected))
    ours, theirs = streamed_logits(expected, tokens), streamed_logits(result, tokens)
    compare_logits(theirs, ours, "the source checkpoint", LOGITS_TOLERANCE, log)


def compare_logits(
    logits: torch.Tensor, expected: torch.Tensor, origin: str, tolerance: float, log: Callable[[str], None]
) -> None:
    """Log the relative difference of logits from the expected ones.

    Raises:
        ConversionMismatchError: the difference exceeds the tolerance, relative to the largest logit.
    """
    if logits.shape != expected.shape:
        raise mismatch(
            [(f"logits have shape {list(logits.shape)}, but the logits of {origin} have shape {list(expected.shape)}")]
        )
    difference = float((logits - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not difference <= tolerance:
        raise mismatch([f"logits differ from the logits of {origin} by {difference:.1e} relative to the largest logit"])
    num_tokens = expected.shape[0] * expected.shape[1]
    log(f"  checked: logits of {num_tokens} tokens are within {difference:.1e} of the logits of {origin}")


def mismatch(problems: list[str]) -> ConversionMismatchError:
    """Return the error that prevents publishing a result."""
    more = f" and {len(problems) - MOST_NAMED} more" if len(problems) > MOST_NAMED else ""
    return ConversionMismatchError(
        "the converted checkpoint differs from its source and was not published: "
        f"{'; '.join(problems[:MOST_NAMED])}{more}"
    )


def parameters_of(source: CheckpointSource) -> int:
    """Return the number of parameters of the model; a tied weight counts once."""
    elements = dict.fromkeys(STORED_PARTS, 0) | {CODES: 2}  # A byte holds two codes.
    return sum(
        info.num_elements * elements.get(name.rpartition(".")[2], 1)
        for name, info in source.tensors.items()
        if name.startswith(MODEL_PREFIX)
    )


@torch.no_grad()
def transformers_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Compute float32 logits with the transformers package, without downloads or remote code.

    The model's class is the first of ``architectures``, and the ``model_type`` of this class is used: some folders,
    such as Kimi-K2's, have a ``model_type`` that only their own code knows.

    Shapes: ``tokens: [b, s] -> [b, s, v]`` float32.

    Raises:
        InputError: the package is not installed, or has no such class.
    """
    try:
        import transformers
    except (ImportError, OSError) as error:
        raise InputError(
            f"--test-logits needs the transformers package ({error}); install it, or omit the flag"
        ) from error
    (name, *_) = read_settings(folder).values.get("architectures") or ("AutoModelForCausalLM",)
    if not hasattr(transformers, name):
        raise InputError(
            f"--test-logits: transformers {transformers.__version__} has no {name}; install a newer release, or omit "
            "the flag"
        )
    model_class = getattr(transformers, name)
    options: dict[str, Any] = {"local_files_only": True}
    config = getattr(model_class, "config_class", transformers.AutoConfig).from_pretrained(folder, **options)
    config.model_type = type(config).model_type
    model = model_class.from_pretrained(folder, config=config, dtype=torch.float32, **options)
    model.train(False)
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


def diff_checkpoints(
    first: Path,
    second: Path,
    *,
    ckpt_step: int | None = None,
    weights_only: bool = False,
    tolerance: float = 0.0,
    told: Mapping[str, Any] | None = None,
    log: Callable[[str], None] = print,
) -> bool:
    """Log every difference, and return whether the checkpoints are equal.

    They are equal if they hold the same tensors, have the same progress, optimizer state and schedule, and describe the
    same model. Differences in the rest of the configuration, including layout and files, are logged but not counted.
    ``told`` are the settings that a torchtitan folder does not record.

    Raises:
        CheckpointError: a checkpoint is missing or damaged.
    """
    found = [find_checkpoint(path, ckpt_step) for path in (first, second)]
    for line in () if any(each.format == "torchtitan" for each in found) else idle_lines(told or {}):
        log(line)
    folders = [each.folder for each in found]
    left = open_checkpoint(folders[0], told=told)
    try:
        right = open_checkpoint(folders[1], told=told)
        try:
            log(f"first:  {folders[0]}")
            log(f"second: {folders[1]}")
            # Before the tensors, which may take long to read: the model may need the registrations of a script.
            configs = [RunConfig.from_dict(source.common["config"]).to_dict() for source in (left, right)]
            problems = _tensors(left, right, weights_only, tolerance, log)
            problems += _state(left.common, right.common, weights_only, log)
            problems += _configurations(configs[0], configs[1], log)
        finally:
            right.close()
    finally:
        left.close()
    log("equal" if problems == 0 else f"different: {problems} difference{'s' if problems > 1 else ''}")
    return problems == 0


def _tensors(
    left: CheckpointSource,
    right: CheckpointSource,
    weights_only: bool,
    tolerance: float,
    log: Callable[[str], None],
) -> int:
    num_bytes = 0

    def count(more: int) -> None:
        nonlocal num_bytes
        num_bytes += more

    start_time = time.monotonic()
    views = [
        SourceView(source, source.common, keeps_optimizer=not weights_only, on_read=count) for source in (left, right)
    ]
    different, equal, close = 0, 0, 0
    for found in compare_sources(*views):
        if found.is_equal:
            equal += 1
            continue
        is_close = found.is_close(tolerance)
        close += is_close
        different += not is_close
        log(f"  {found}{' (within the tolerance)' if is_close else ''}")
    rate = num_bytes / max(time.monotonic() - start_time, 1e-6) / 1e6
    near = f", {close} within {tolerance:g}" if close else ""
    log(f"tensors: {equal} equal bit by bit{near}, {different} different; {num_bytes / 1e9:.2f} GB at {rate:.0f} MB/s")
    return different


def _state(left: Mapping[str, Any], right: Mapping[str, Any], weights_only: bool, log: Callable[[str], None]) -> int:
    problems = 0
    if not weights_only:
        for line in _different_values({key: left[key] for key in STATE}, {key: right[key] for key in STATE}):
            problems += 1
            log(f"  {line}")
    return problems


def _configurations(left: Mapping[str, Any], right: Mapping[str, Any], log: Callable[[str], None]) -> int:
    problems = 0
    changes = compare_configs(left, right)
    for change in changes.shape:
        problems += 1
        log(f"  model: {change}")
    # Fields that determine only which weights exist were already covered by the comparison of tensors.
    for change in (*changes.weights, *changes.other):
        log(f"  configuration (does not count): {change}")
    return problems


def _different_values(left: Any, right: Any, path: str = "") -> Iterator[str]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in sorted({*left, *right}):
            yield from _different_values(left.get(key), right.get(key), f"{path}.{key}" if path else key)
    elif left != right:
        yield f"{path}: {_short(left)} and {_short(right)}"


def _short(value: Any) -> str:
    return "state" if isinstance(value, Mapping) else str(value)
