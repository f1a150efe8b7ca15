"""Three accounts of what a rank sends in a step: recorded without a network, by formulas, and the planner's."""

from __future__ import annotations

import pretrain_gpt
from megatron.config.run_config import RunConfig
from megatron.planner import communication
from megatron.planner.simulation.fake_cuda import find_compiler
from megatron.verification.collective_recorder import record_step
from megatron.verification.traffic import Traffic
from tests.closed_forms.step_traffic import step_traffic

_HOPPER = (9, 0)


def assert_same_traffic(config: RunConfig, rank: int, data: str = "plain") -> Traffic:
    """Assert that the three accounts agree byte for byte, and return what is sent.

    The planner's account needs a C++ compiler, and is left out without one.
    """
    recorded = record_step(config, rank, pretrain_gpt.provide_model, pretrain_gpt.forward_step, data)
    assert recorded == step_traffic(config, rank), f"rank {rank}: recorded, and by the closed form"
    if find_compiler() is not None:
        planned = communication.step_traffic(config, rank, _HOPPER)
        assert planned == recorded, f"rank {rank}: planned, and recorded"
    return recorded
