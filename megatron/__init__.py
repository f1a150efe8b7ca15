"""GPT pretraining over tensor, pipeline, data and context parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports
from megatron.moved_modules import find_moved_modules

if TYPE_CHECKING:
    from megatron.checkpoint.formats.huggingface.parallelize import parallelize
    from megatron.python_api import GPT

find_moved_modules()

__getattr__ = lazy_exports(__name__, {"checkpoint.formats.huggingface.parallelize": "parallelize", "python_api": "GPT"})
