"""What the linear layers of a transformer layer keep of their inputs for the backward pass, in bytes.

An input is kept for the gradient of the weight alone. A weight that is frozen beside low-rank adapters keeps none; in
fp8 it is kept in 8 bits, with its scales. An adapter keeps its layer's input, and the narrow product of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.parallel_config import ELEMENT_BYTES
from tests.closed_forms.float8_traffic import fills_blocks, scale_length
from tests.closed_forms.layer_widths import is_whole_on_ranks

if TYPE_CHECKING:
    from megatron.core.transformer.decoder_config import DecoderConfig


@dataclass(frozen=True)
class KeptInput:
    """Hold what is kept because of one linear layer: whether its input as it came, and the bytes of what is beside.

    ``rounded`` are numbers in fp8, ``scales`` theirs and the weight's, and ``adapters`` what adapters keep.
    """

    is_whole: bool
    rounded: int = 0
    scales: int = 0
    adapters: int = 0


def kept_input(
    config: DecoderConfig, name: str, rows: int, widths: tuple[int, int], *, in_float8: bool, is_recomputed: bool
) -> KeptInput:
    """Return what a linear layer of this name keeps of ``rows`` tokens.

    ``widths`` are those of the weight on a rank, out and in. ``is_recomputed`` says that the input is computed again.
    """
    out_width, in_width = widths
    is_trained = not config.lora_rank
    has_adapters = name in config.adapted_parts
    drops = config.lora_dropout > 0.0
    rounds = in_float8 and is_rounded(config, name, rows)
    adapters = _adapter_bytes(config, name, rows, in_width) if has_adapters else 0
    length = scale_length(config)
    scales = _weight_scales(config, out_width, in_width) if in_float8 else 0
    if not rounds:
        return KeptInput(is_trained or (has_adapters and not drops), scales=scales, adapters=adapters)
    if is_recomputed:
        return KeptInput(is_whole=True, scales=scales)
    if config.fp8.fp4_format is not None:
        return KeptInput(is_whole=False, rounded=rows * in_width // 2, scales=in_width * math.ceil(rows / 16))
    if config.fp8.fp8_recipe not in ("delayed", "tensorwise"):
        scales += 4 * in_width * (math.ceil(rows / length) if length else 1)
    return KeptInput(is_whole=False, rounded=rows * in_width, scales=scales)


def is_in_float8(config: DecoderConfig, layer_number: int | None) -> bool:
    """Return whether a layer's products are in fp8; without a number, whether any layer's are."""
    if layer_number is None:
        return config.fp8.fp8_format is not None or config.fp8.fp4_format is not None
    return config.fp8.is_in_float8(layer_number, config.num_layers)


def is_rounded(config: DecoderConfig, name: str, rows: int) -> bool:
    """Return whether a linear layer in fp8 keeps its input in 8 bits, if it keeps any."""
    # What does not fill the blocks is gathered before it is rounded.
    is_gathered = config.sequence_parallel and not (name in ("linear_proj", "linear_fc2") or is_whole_on_ranks(name))
    return not config.lora_rank and config.fp8.fp8_wgrad and (not is_gathered or fills_blocks(config, rows))


def _weight_scales(config: DecoderConfig, out_width: int, in_width: int) -> int:
    """Return the bytes of scales that serve the weight's transpose too, but for a single one."""
    return 4 * math.ceil(out_width / 128) * math.ceil(in_width / 128) if config.fp8.fp8_recipe == "blockwise" else 0


def _adapter_bytes(config: DecoderConfig, name: str, rows: int, in_width: int) -> int:
    """Return what a layer's adapters keep beside the layer's own input: narrow products, and inputs with dropout."""
    element, tp = ELEMENT_BYTES[config.params_dtype], config.tensor_model_parallel_size
    is_row = name in ("linear_proj", "linear_fc2")
    narrow_rows = rows // tp if is_row and config.sequence_parallel else rows
    dropped = rows * in_width if config.lora_dropout > 0.0 else 0
    return len(config.adapted_parts[name]) * element * (narrow_rows * config.lora_rank + dropped)
