"""A GPU type's figures as a file: written where a machine was measured, read wherever a type is named."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigurationError
from megatron.core.safe_io import parse_json, read_plain_text
from megatron.planner.gpu import AttentionRate, Gpu

_MOST_BYTES = 1 << 20
_HEAD_SIZES = (64, 128)
_MAY_BE_ZERO = ("float8_flops", "float8_share", "num_sms")
_NUMBERS = (
    "memory_bytes",
    "num_sms",
    "half_flops",
    "single_flops",
    "float8_flops",
    "memory_bandwidth",
    "link_bandwidth",
    "network_bandwidth",
    "host_bandwidth",
    "product_share",
    "float8_share",
)


def gpu_to_json(gpu: Gpu) -> dict[str, Any]:
    """Return the figures as JSON-ready values."""
    return dataclasses.asdict(gpu)


def read_gpu(path: Path) -> Gpu:
    """Return the figures that a file of `gpu_to_json` holds.

    Raises:
        ConfigurationError: the file is not there or not of this form; what is wrong and what is expected.
    """
    try:
        values = parse_json(read_plain_text(path, _MOST_BYTES))
    except OSError as error:
        raise ConfigurationError(
            f"--gpu {path} cannot be read: {error.strerror}; give a file that tools/calibrate.py wrote"
        ) from error
    except ValueError as error:
        raise _wrong(path, "no JSON") from error
    if not isinstance(values, dict):
        raise _wrong(path, "no object")
    # Files of earlier versions have one share for all matmuls.
    values = {"float8_share": values.get("product_share"), **values}
    numbers = {name: _number(path, values, name) for name in _NUMBERS}
    if numbers["float8_flops"] > 0 and numbers["float8_share"] == 0:
        raise _wrong(path, f"float8_share 0 beside float8_flops {numbers['float8_flops']:g}")
    capability = values.get("capability")
    if not (isinstance(capability, list) and len(capability) == 2 and all(type(each) is int for each in capability)):
        raise _wrong(path, f"capability {capability!r}, where two whole numbers are expected")
    sources = values.get("sources")
    if not (isinstance(sources, list) and all(isinstance(each, str) for each in sources)):
        raise _wrong(path, "no list of sources")
    memory_bytes, num_sms = int(numbers.pop("memory_bytes")), int(numbers.pop("num_sms"))
    return Gpu(
        name=str(values.get("name", path.stem)),
        capability=(capability[0], capability[1]),
        flash=_rates(path, values, "flash"),
        cudnn=_rates(path, values, "cudnn"),
        sources=tuple(sources),
        memory_bytes=memory_bytes,
        num_sms=num_sms,
        **numbers,
    )


def _rates(path: Path, values: Mapping[str, Any], name: str) -> Mapping[int, AttentionRate]:
    part, rates = values.get(name), {}
    for size in _HEAD_SIZES:
        rate = part.get(str(size)) if isinstance(part, dict) else None
        if not isinstance(rate, dict):
            raise _wrong(path, f"no {name} rates for heads of {size}")
        rates[size] = AttentionRate(_number(path, rate, "forward"), _number(path, rate, "backward"))
    return rates


def _number(path: Path, values: Mapping[str, Any], name: str) -> float:
    value: Any = values.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and (0 < value < math.inf or (value == 0 and name in _MAY_BE_ZERO)):
        return float(value)
    raise _wrong(path, f"{name} {value!r}, where a number above 0 is expected")


def _wrong(path: Path, found: str) -> ConfigurationError:
    return ConfigurationError(f"--gpu {path} holds {found}; write it again by tools/calibrate.py --output {path}")
