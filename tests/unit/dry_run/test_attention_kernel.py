"""Torch's choice of an attention kernel on CUDA."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.planner.simulation.operators import AttentionCall, choose_attention_kernel

AMPERE, ADA, HOPPER, BLACKWELL, TURING = (8, 0), (8, 9), (9, 0), (10, 0), (7, 5)
CALL = AttentionCall("bfloat16", head_size=64, num_queries=1024, num_keys=1024, is_causal=True)


@pytest.mark.parametrize(
    ("changes", "ampere", "hopper"),
    [
        ({}, "flash", "cudnn"),
        ({"dtype": "float16"}, "flash", "cudnn"),
        ({"head_size": 256}, "flash", "flash"),
        ({"head_size": 264}, "efficient", "efficient"),
        ({"head_size": 100}, "flash", "flash"),
        ({"dropout": 0.1}, "flash", "flash"),
        ({"dropout": 0.125}, "flash", "cudnn"),
        ({"dropout": 0.0625, "is_deterministic": True}, "flash", "flash"),
        ({"is_causal": False, "num_queries": 1, "dropout": 0.125}, "flash", "flash"),
        ({"is_causal": False, "has_mask": True}, "efficient", "cudnn"),
        ({"is_causal": False, "has_mask": True, "has_groups": True}, "math", "cudnn"),
        ({"is_causal": False, "has_mask": True, "head_size": 100}, "math", "math"),
        ({"has_groups": True}, "flash", "cudnn"),
        ({"num_queries": 512}, "efficient", "cudnn"),
        ({"dtype": "float32"}, "efficient", "efficient"),
        ({"dtype": "float32", "head_size": 6}, "math", "math"),
        ({"dtype": "float32", "has_groups": True}, "math", "math"),
        ({"dtype": "float64"}, "math", "math"),
    ],
)
def test_kernel_on_ampere_and_hopper(changes: dict[str, object], ampere: str, hopper: str) -> None:
    call = replace(CALL, **changes)
    assert choose_attention_kernel(call, AMPERE) == ampere
    assert choose_attention_kernel(call, HOPPER) == choose_attention_kernel(call, BLACKWELL) == hopper


def test_older_and_smaller_gpus() -> None:
    assert choose_attention_kernel(CALL, TURING) == "math"
    assert choose_attention_kernel(replace(CALL, dtype="float16"), TURING) == "efficient"
    assert choose_attention_kernel(replace(CALL, head_size=200), ADA) == "efficient"
    assert choose_attention_kernel(replace(CALL, head_size=256), ADA) == "flash"
    assert choose_attention_kernel(replace(CALL, head_size=256, dropout=0.1), ADA) == "efficient"
