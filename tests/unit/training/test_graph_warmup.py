"""How many steps run before layers are captured as CUDA graphs."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from tests.unit.training.config.command_lines import MINIMAL

RAISED = "--cuda-graph-warmup-steps 1 is too small for --fp8-recipe delayed: the run uses 2"


@pytest.mark.parametrize(
    ("flags", "steps", "notes"),
    [
        ("", 3, []),
        ("--cuda-graph-warmup-steps 1", 1, []),
        ("--cuda-graph-warmup-steps 1 --fp8-format hybrid --fp8-recipe tensorwise", 1, []),
        # Its first step has other scales than the later ones.
        ("--cuda-graph-warmup-steps 1 --fp8-format hybrid --fp8-recipe delayed", 2, [RAISED]),
        ("--cuda-graph-warmup-steps 5 --fp8-format hybrid --fp8-recipe delayed", 5, []),
    ],
)
def test_delayed_scaling_needs_two_steps_before_a_capture(flags: str, steps: int, notes: list[str]) -> None:
    words = [*MINIMAL, "--cuda-graph-impl", "local", "--attention-dropout", "0", "--bf16", *flags.split()]
    resolved = resolve_arguments(words, 1)
    assert resolved.config.training.cuda_graph_warmup_steps == steps
    assert [note for note in resolved.notes if "warmup-steps" in note] == notes


def test_without_graphs_no_step_is_added() -> None:
    flags = "--bf16 --cuda-graph-warmup-steps 1 --fp8-format hybrid --fp8-recipe delayed"
    assert resolve_arguments([*MINIMAL, *flags.split()], 1).config.training.cuda_graph_warmup_steps == 1
