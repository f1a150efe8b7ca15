"""A plan of a run's flags: its action list may be cut, and its parts are those of the run."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.pipeline_parallel.schedule_actions import SCHEDULES, Action, Pass, build_schedule
from megatron.core.pipeline_parallel.simulator import Durations, simulate
from megatron.planner.gpu import B200, H100
from megatron.planner.implementations import IMPLEMENTATIONS, MEGATRON_TE, NATIVE
from megatron.planner.memory import stage_state
from megatron.planner.plan import Plan
from megatron.planner.prediction import predict
from megatron.planner.step_time import end_times
from tests.unit.config.command_lines import MINIMAL

FLAGS = "--num-layers 8 --pipeline-model-parallel-size 4 --micro-batch-size 1 --bf16"


def plan_of(flags: str) -> Plan:
    return Plan.of(config_of(flags))


def config_of(flags: str) -> RunConfig:
    config = resolve_arguments([*MINIMAL, *FLAGS.split(), *flags.split()], 4).config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=100))


def most_in_flight(actions: tuple[Action, ...]) -> int:
    live = most = 0
    for kind, _, chunk in actions:
        live += {Pass.FORWARD: 1, Pass.BACKWARD_WEIGHT: 0}.get(kind, -1) * (chunk + 7)
        most = max(most, live)
    return most


@pytest.mark.parametrize(
    ("flags", "num_chunks"),
    [
        ("", 1),
        ("--pipeline-schedule zero-bubble", 1),
        ("--num-layers-per-virtual-pipeline-stage 1", 2),
    ],
)
def test_the_first_rounds_of_a_schedule_are_as_full_as_all(flags: str, num_chunks: int) -> None:
    plan = plan_of(f"{flags} --global-batch-size 80")
    for stage in range(4):
        whole = SCHEDULES[plan.pipeline_schedule](4, stage, 80, num_chunks, None)
        cut = tuple(plan.warm_up_actions(stage))
        assert len(cut) < len(whole)
        assert most_in_flight(cut) == most_in_flight(whole)


def test_a_plan_of_flags_is_predicted_under_every_implementation() -> None:
    plan = plan_of("--global-batch-size 8")
    for implementation in IMPLEMENTATIONS.values():
        prediction = predict(plan, implementation, H100)
        assert prediction.outcome == "ok"
        assert prediction.time is not None
        assert prediction.time.total > prediction.time.busy > 0
        assert len(prediction.stages) == 4
    stages = predict(plan, NATIVE, H100).stages
    # Fewer micro-batches wait for their backward passes on later stages.
    kept = [stage.activations for stage in stages[:-1]]
    assert kept[1:] == pytest.approx([kept[0] * in_flight / 4 for in_flight in (3, 2)], rel=0.05)
    assert sum(stage.parameters for stage in stages[1:-1]) == 2 * stages[1].parameters


def test_exchanges_beside_interleaved_chunks_show_less_than_those_that_are_waited_for() -> None:
    waited, hidden = (
        predict(plan_of(f"--global-batch-size 8 {flags}"), MEGATRON_TE, H100).time
        for flags in ("", "--num-layers-per-virtual-pipeline-stage 1")
    )
    assert waited is not None
    assert hidden is not None
    assert 0 < hidden.neighbors < waited.neighbors
    assert hidden.bubble < waited.bubble


def test_offload_beside_recompute_is_refused_but_of_our_own() -> None:
    plan = plan_of("--global-batch-size 8 --recompute-activations --cpu-offloading --cpu-offloading-num-layers 1")
    outcomes = {each.name: predict(plan, each, H100).outcome for each in (NATIVE, MEGATRON_TE)}
    assert outcomes == {"native": "ok", "megatron-te": "error"}


def test_the_first_and_the_last_layers_in_bf16_take_their_own_time_and_no_copies_in_fp8() -> None:
    shape = (
        "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 4 --sequence-parallel --hidden-size 4096 "
        "--num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --global-batch-size 8 "
    )
    all_in_float8 = shape + "--fp8-format hybrid"
    mixed = all_in_float8 + " --first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 1"
    half, mixed_time, float8 = (
        predict(plan_of(flags), MEGATRON_TE, H100).time for flags in (shape, mixed, all_in_float8)
    )
    assert half is not None
    assert mixed_time is not None
    assert float8 is not None
    of_layers = 5 * float8.layer.total + 3 * half.layer.total
    assert half.layer.total > float8.layer.total
    ends = half.busy - 8 * 8 * half.layer.total
    assert mixed_time.busy == pytest.approx(8 * of_layers + ends)
    copies = [
        stage_state(plan_of(flags), 0, MEGATRON_TE).weights - stage_state(plan_of(shape), 0, MEGATRON_TE).weights
        for flags in (mixed, all_in_float8)
    ]
    assert copies[0] * 8 == copies[1] * 5


def test_weights_kept_in_fp8_are_counted_without_cuda_graphs() -> None:
    shape = (
        "--pipeline-model-parallel-size 1 --hidden-size 256 --num-attention-heads 4 --seq-length 64 "
        "--max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 --global-batch-size 8 "
        "--fp8-format hybrid"
    )
    kept, cast_again = (
        predict(plan_of(f"{shape} {more}"), NATIVE, H100).stages[0].weights for more in ("", "--cuda-graph-impl local")
    )
    # Two bytes for each weight of eight layers with 12 x 256 x 256 weights.
    assert kept - cast_again == 2 * 8 * 12 * 256**2


def test_weights_kept_in_nvfp4_are_counted_with_their_scales() -> None:
    shape = (
        "--pipeline-model-parallel-size 1 --hidden-size 256 --num-attention-heads 4 --seq-length 64 "
        "--max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 --global-batch-size 8 --fp4-format e2m1"
    )
    flags = ("", "--disable-parameter-transpose-cache")
    kept, cast_again = (predict(plan_of(f"{shape} {more}"), NATIVE, B200).stages[0].weights for more in flags)
    assert kept - cast_again == (0.5 + 1 / 16) * 2 * 8 * 12 * 256**2


def test_nvfp4_is_rejected_where_nothing_predicts_it() -> None:
    sizes = "--hidden-size 64 --kv-channels 16 --seq-length 64 --max-position-embeddings 64"
    plan = plan_of(f"--global-batch-size 8 --fp4-format e2m1 {sizes}")
    refused = predict(plan, NATIVE, H100)
    assert refused.outcome == "error"
    assert refused.reason == "h100-80gb does not support NVFP4 GEMMs; use one of b200, b300, or bf16"
    other = predict(plan, MEGATRON_TE, B200)
    assert other.outcome == "error"
    assert other.reason == "--fp4-format is not predicted for megatron-te; use the implementation native"


def test_frozen_weights_have_two_products_and_no_gradients_to_reduce_or_weights_to_gather() -> None:
    shape = (
        "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel --hidden-size 4096 "
        "--num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --global-batch-size 8 "
        "--use-distributed-optimizer"
    )
    plain = predict(plan_of(shape), NATIVE, H100)
    adapted = predict(plan_of(f"{shape} --lora-rank 8 --load somewhere --finetune"), NATIVE, H100)
    assert plain.time is not None
    assert adapted.time is not None
    assert 0.6 < adapted.time.layer.products / plain.time.layer.products < 0.81
    # Two of ten exchanges are left out, and the adapters' narrow ones come to them.
    assert 0.8 < adapted.time.layer.tensor_parallel / plain.time.layer.tensor_parallel < 1.3
    assert adapted.time.layer.attention == plain.time.layer.attention
    assert adapted.time.exposed_data_parallel < 0.02 * plain.time.exposed_data_parallel
    assert adapted.time.update < 0.01 * plain.time.update
    assert adapted.stages[0].optimizer < 0.01 * plain.stages[0].optimizer < plain.stages[0].weights


LONG = (
    "--num-layers 16 --pipeline-model-parallel-size 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 "
    "--max-position-embeddings 2048 --use-distributed-optimizer"
)


@pytest.mark.parametrize("flags", ["", "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 3"])
def test_the_bubble_of_stages_of_unlike_lengths_is_that_of_their_action_lists(flags: str) -> None:
    plan = plan_of(f"{LONG} {flags} --global-batch-size 32")
    time = predict(plan, NATIVE, H100).time
    assert time is not None
    numbers = [len(plan.stage_layout.contents(stage).layer_numbers) for stage in range(4)]
    ends = [end_times(plan, H100, NATIVE)[0], 0.0, 0.0, time.output_layer]
    seconds = [time.layer.total * number + end for number, end in zip(numbers, ends)]
    durations = [Durations(forward=total / 3, backward=2 * total / 3) for total in seconds]
    timeline = simulate(build_schedule("1f1b", 4, 32), 1, durations)
    assert time.busy + time.bubble == pytest.approx(timeline.makespan, rel=0.015)


def test_a_zero_bubble_is_that_of_its_action_lists_and_less_with_more_to_put_off() -> None:
    def bubble(flags: str) -> float:
        time = predict(plan_of(f"{LONG} {flags}"), NATIVE, H100).time
        assert time is not None
        return time.bubble

    whole = bubble("--global-batch-size 48")
    filled = bubble("--pipeline-schedule zero-bubble --global-batch-size 48")
    assert 0 < filled < 0.6 * whole
    assert filled == pytest.approx(bubble("--pipeline-schedule zero-bubble --global-batch-size 12"))
    frozen = "--lora-rank 8 --load somewhere --finetune --global-batch-size 48"
    # Frozen weights leave nothing to put off.
    assert bubble(f"{frozen} --pipeline-schedule zero-bubble") == pytest.approx(bubble(frozen), rel=0.25)


def test_megatron_has_no_zero_bubble_schedule() -> None:
    plan = plan_of("--pipeline-schedule zero-bubble --global-batch-size 8")
    prediction = predict(plan, MEGATRON_TE, H100)
    assert prediction.outcome == "error"
    assert "megatron-te has no zero-bubble schedule; use 1f1b or interleaved" in (prediction.reason or "")
    assert predict(plan, NATIVE, H100).outcome == "ok"


def test_keys_and_values_that_are_gathered_are_kept_whole() -> None:
    def kept(flags: str) -> int:
        shape = "--pipeline-model-parallel-size 1 --context-parallel-size 4 --seq-length 64 --global-batch-size 8"
        return predict(plan_of(f"{shape} --max-position-embeddings 64 {flags}"), NATIVE, H100).stages[0].activations

    every, one, none = (kept(f"--cp-comm-type {names}") for names in ("all_gather", f"{'p2p ' * 7}all_gather", "p2p"))
    assert every > one > none
    # What is computed again is not kept, wherever it comes from.
    again = "--recompute-granularity selective --cp-comm-type"
    assert kept(f"{again} all_gather") == pytest.approx(kept(f"{again} p2p"), rel=0.05)
