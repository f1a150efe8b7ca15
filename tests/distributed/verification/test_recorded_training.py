"""Whole trainings that were recorded while they ran: loaded, evaluated, compared and saved, all as NCCL allows."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.p2p_communication import PipelineLinks
from megatron.verification.collective_recorder import CollectiveRecorder, recording
from megatron.verification.communication_replay import INDEPENDENT_PROGRESS, Operation, communication_problems
from tests.e2e.toy_run import exact_figures, toy_args
from tests.harness.faults import Faults, run_with_faults
from tests.harness.forked_training import ForkedRun, fork_training

RANKS = 4
STEPS = """
    --num-layers 4 --eval-interval 1 --save-interval 1 --check-weight-hash-across-dp-replicas-interval 1
    --log-params-norm --log-num-zeros-in-grad --calculate-per-token-loss --timing-log-level 2 --train-iters 3
    --lr-decay-iters 9
"""


def record(argv: Sequence[str], faults: Faults) -> int:
    """Train as ``pretrain_gpt.py`` does and leave the recording beside the checkpoints."""
    recorder = CollectiveRecorder()
    with recording(recorder):
        status = run_with_faults(argv, faults)
    folder = Path(argv[argv.index("--save") + 1]).parent
    (folder / f"calls-{os.environ['RANK']}").write_bytes(pickle.dumps(recorder.operations))
    return status


def record_in_one_order(argv: Sequence[str], faults: Faults) -> int:
    """Record with the path of backends other than gloo; the process is a fork that ends with the run."""
    PipelineLinks.post_receives_ahead = property(lambda links: False)  # type: ignore[method-assign]
    return record(argv, faults)


def recorded(folder: Path) -> list[list[Operation]]:
    return [pickle.loads((folder / f"calls-{rank}").read_bytes()) for rank in range(RANKS)]


def figures(run: ForkedRun) -> list[tuple[object, ...]]:
    return exact_figures(run.check().metrics)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            """--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble --use-distributed-optimizer
            --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce --overlap-param-gather --async-save""",
            id="zero-bubble",
        ),
        pytest.param(
            """--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --tensor-model-parallel-size 2
            --sequence-parallel --ckpt-format torch""",
            id="interleaved",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_run_that_saves_and_goes_on_keeps_the_rules(tmp_path: Path, layout: str) -> None:
    args = toy_args(tmp_path, STEPS, layout)
    first = fork_training([*args, "--exit-interval", "2"], RANKS, program=record_in_one_order)
    expected = fork_training(toy_args(tmp_path / "ahead", STEPS, layout, "--exit-interval 2"), RANKS, program=record)
    assert figures(first) == figures(expected)
    assert communication_problems(recorded(tmp_path)) == []
    (problem,) = communication_problems(recorded(tmp_path / "ahead"))
    assert problem.startswith(INDEPENDENT_PROGRESS)
    fork_training(args, RANKS, program=record_in_one_order).check()
    assert communication_problems(recorded(tmp_path)) == []
    kinds = {call.kind for log in recorded(tmp_path) for operation in log for call in operation}
    assert {"new_group", "send", "recv", "allgather", "broadcast", "allreduce"} <= kinds
