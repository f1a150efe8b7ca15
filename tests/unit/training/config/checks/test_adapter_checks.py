"""Low-rank adapters at pipeline layouts: every stage trains something, or the layout is refused."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError
from tests.unit.training.config.command_lines import MINIMAL

PIPELINE = "--num-layers 4 --lora-rank 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"


def test_a_stage_without_layers_is_refused() -> None:
    assert resolve_arguments([*MINIMAL, *PIPELINE.split(), "Ettt|tL"], 2).config.model.lora_rank == 2
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *PIPELINE.split(), "Etttt|L"], 2)
    assert caught.value.problems == (
        "--lora-rank trains adapters of layers, and a pipeline stage has none of these (Etttt|L); give each stage "
        "a layer",
    )
