"""Trainings that were recorded while they ran, all as NCCL demands, and what experts send in closed form."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.checkpoint.train_state import TrainState
from megatron.core.device import Device
from megatron.core.pipeline_parallel.p2p_communication import PipelineLinks
from megatron.core.timers import Timers
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.training.training_step import TrainingStep
from megatron.verification.collective_recorder import CollectiveRecorder, recording
from megatron.verification.communication_replay import INDEPENDENT_PROGRESS, Operation, communication_problems
from megatron.verification.model_cells import ExpertLayout, make_expert_cell
from megatron.verification.run_cell import make_source, resolve_cell
from megatron.verification.traffic import Traffic, Volume
from tests.e2e.toy_run import exact_figures, toy_args
from tests.harness.distributed import run_distributed
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


# The model of the cells, in float64: all its layers have experts.
LAYERS, HIDDEN, LENGTH, BATCH, EXPERTS, WIDTH, TOPK, BYTES = 4, 24, 16, 8, 8, 12, 2, 8
OF_EXPERTS = {("ep", "etp"), ("edp",)}
LAYOUTS = (
    ExpertLayout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, sharding="optim"),
    ExpertLayout(dp=2, ep=2),
    ExpertLayout(dp=4, ep=2),
    ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True),
    ExpertLayout(cp=2, dp=2, ep=4),
    ExpertLayout(pp=2, dp=2, ep=2),
    ExpertLayout(dp=2, ep=2, recompute=("full", "uniform", "1")),
    ExpertLayout(tp=2, dp=2, ep=2, dispatcher="allgather"),
    ExpertLayout(cp=2, dp=2, ep=2, etp=2, dispatcher="allgather", sharding="optim_grads"),
)


def record_expert_traffic(flags: Sequence[str], world_size: int) -> Traffic:
    """Return what this rank sends in one step over groups of experts."""
    recorder = CollectiveRecorder()
    config = resolve_cell(flags, world_size, "float64")
    runtime = make_runtime(config, Device("cpu"), observer=recorder)
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, log=lambda line: None)
    step = TrainingStep(config, runtime, parts, pretrain_gpt.forward_step, Timers())
    recorder.calls.clear()
    with closing(make_source(config, runtime, "plain")) as source:
        step.run(TrainState(), source, config.training.global_batch_size, None)
    for chunk in parts.ddp_chunks:
        chunk.finish_param_gather()
    return {key: volume for key, volume in recorder.traffic().items() if key[1] in OF_EXPERTS}


def expected(layout: ExpertLayout) -> Traffic:
    """Return what all ranks together send in one step; a collective counts once for each of its ranks."""
    etp = layout.tp if layout.etp is None else layout.etp
    group, world = layout.ep * etp, layout.world_size
    # Each rank has a part of each micro-batch that its copy of the model takes, in the layers of its stage.
    passes = world * (BATCH // layout.dp) * (LAYERS // layout.pp)
    # What is computed again is dispatched again, and sent back.
    forward = 2 if layout.recompute else 1
    tokens = LENGTH * BATCH * LAYERS  # of all ranks, layer by layer
    traffic: Traffic = {}
    if layout.dispatcher == "alltoall":
        counts = Volume(forward * passes, forward * passes * EXPERTS * etp * 8)
        rows = Volume(2 * (forward + 1) * passes, 2 * (forward + 1) * tokens * TOPK * etp * HIDDEN * BYTES)
        traffic["all_to_all", ("ep", "etp")] = counts + rows
    else:
        # Every rank is given what all of a group have: hidden states, weights and choices, and gradients of the sum.
        states, choices = group * tokens * HIDDEN * BYTES, group * tokens * TOPK * BYTES
        traffic["all_gather", ("ep", "etp")] = Volume(4 * passes, 2 * states + 2 * choices)
        traffic["reduce_scatter", ("ep", "etp")] = Volume(3 * passes, 2 * states + choices)
    replicas = layout.dp * layout.cp * layout.tp // group
    if replicas > 1:
        of_rank = 3 * WIDTH * HIDDEN * EXPERTS // group * (LAYERS // layout.pp) * BYTES
        volume = Volume(world, world * of_rank)
        if layout.sharding == "no_shard":
            traffic["all_reduce", ("edp",)] = volume
        else:
            traffic["reduce_scatter", ("edp",)] = traffic["all_gather", ("edp",)] = volume
    return traffic


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=pytest.mark.long if number else ()) for number, layout in enumerate(LAYOUTS)],
    ids=lambda layout: layout.name,
)
def test_recorded_bytes_equal_the_closed_form(layout: ExpertLayout) -> None:
    cell = make_expert_cell("mixtral", layout)
    total: Traffic = {}
    for of_rank in run_distributed(
        layout.world_size, record_expert_traffic, cell.flags, layout.world_size, timeout_s=60.0
    ):
        for key, volume in of_rank.items():
            total[key] = total.get(key, Volume(0, 0)) + volume
    assert total == expected(layout)
