"""GPT pretraining over tensor, pipeline, data and context parallelism."""

from __future__ import annotations

from megatron.moved_modules import find_moved_modules

find_moved_modules()
