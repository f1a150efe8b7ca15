"""Flags of overlap and sharding: what goes in chunks, and where a flag cannot have an effect."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron.config.arguments import ParsedArguments, resolve_arguments
from megatron.config.checks import parallelism
from megatron.core.errors import ConfigurationError
from megatron.core.tensor_parallel.comm_overlap_config import WHOLE, LinearName, LinearOverlap, linear_overlap
from tests.unit.config.command_lines import MINIMAL

SEQUENCE_PARALLEL = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
LAYERS: tuple[LinearName, ...] = ("qkv", "proj", "fc1", "fc2", "output")


def parse(*flags: str) -> ParsedArguments:
    return resolve_arguments([*MINIMAL, *SEQUENCE_PARALLEL, "--tp-comm-overlap", *flags], 2)


def overlaps(*flags: str) -> dict[str, LinearOverlap]:
    return {name: linear_overlap(parse(*flags).config.model, name) for name in LAYERS}


def chunked(*flags: str) -> dict[str, tuple[bool, bool]]:
    return {name: (overlap.forward, overlap.backward) for name, overlap in overlaps(*flags).items()}


def test_each_switch_changes_what_its_name_says() -> None:
    column, row = dict.fromkeys(("qkv", "fc1", "output")), dict.fromkeys(("proj", "fc2"))
    assert chunked() == dict.fromkeys(column, (True, False)) | dict.fromkeys(row, (True, True))
    without_gathers = dict.fromkeys(column, (False, False)) | dict.fromkeys(row, (True, False))
    for name in ("overlap", "split"):
        assert chunked(f"--disable-tp-comm-{name}-ag") == without_gathers
        assert chunked(f"--disable-tp-comm-{name}-rs")["fc2"] == (False, True)
    assert chunked("--tp-comm-overlap-rs-dgrad")["qkv"] == (True, True)
    assert chunked("--tp-comm-overlap-impl", "whole") == dict.fromkeys(LAYERS, (False, False))
    assert overlaps("--tp-comm-overlap-impl", "symmetric-memory")["proj"].uses_symmetric_memory
    assert not overlaps("--disable-tp-comm-bulk-dgrad")["qkv"].bulk_gather
    assert not overlaps("--disable-tp-comm-bulk-wgrad")["qkv"].bulk_scatter


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (("--tensor-model-parallel-size", "1"), "--tensor-model-parallel-size 1"),
        (("--tensor-model-parallel-size", "2"), "--tensor-model-parallel-size 2 without --sequence-parallel"),
    ],
)
def test_without_sequence_parallelism_a_line_says_that_it_has_no_effect(layout: tuple[str, ...], line: str) -> None:
    parsed = resolve_arguments([*MINIMAL, *layout, "--tp-comm-overlap", "--disable-tp-comm-overlap-rs"], 2)
    assert parsed.notes == (
        f"--tp-comm-overlap has no effect with {line}: turned off",
        "--disable-tp-comm-overlap-rs has no effect without --tp-comm-overlap",
    )
    assert linear_overlap(parsed.config.model, "qkv") == WHOLE


def test_a_file_chooses_layer_by_layer(tmp_path: Path) -> None:
    path = tmp_path / "overlap.yaml"
    path.write_text(
        "---\nqkv_fprop:  # as a whole\n  method: bulk\n  num_sm: 4\n\nproj_fprop:\n  method: 'pipeline'\n"
        "fc1_dgrad:\n  num_splits: 4\n  method: ring_exchange\nfc2_dgrad:\n  method: bulk\nfc1_wgrad:\n  method: bulk\n"
    )
    parsed = parse("--tp-comm-overlap-cfg", str(path))
    assert parsed.notes == (
        f"--tp-comm-overlap-cfg {path}: num_sm, num_splits have no effect: there are as many chunks as ranks, and "
        "transformer-engine's kernels are not used",
    )
    assert chunked("--tp-comm-overlap-cfg", str(path)) == {
        "qkv": (False, False),
        "proj": (True, True),
        "fc1": (True, True),
        "fc2": (True, False),
        "output": (True, False),
    }
    assert chunked("--tp-comm-overlap-cfg", str(path), "--disable-tp-comm-overlap-rs")["proj"] == (False, True)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("qkv:\n  method: bulk\n", "line 1: qkv is not a GEMM; possible names: qkv_fprop, qkv_dgrad, proj_fprop,"),
        (
            "fc1_fprop:\n  method: ring\n",
            "line 2: method ring of fc1_fprop is not known; possible methods: ring_exchange, pipeline, bulk",
        ),
        (
            "fc1_wgrad:\n  method: pipeline\n",
            "line 2: method pipeline of fc1_wgrad is not known; possible methods: bulk",
        ),
        ("  method: bulk\n", "line 1: 'method: bulk' is neither 'PRODUCT:' nor an indented 'SETTING: VALUE'"),
        ("fc1_fprop: {method: bulk}\n", "line 1: 'fc1_fprop: {method: bulk}' is neither"),
        ("fc1_fprop:\n  - 3\n", "line 2: '- 3' is neither"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_its_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "overlap.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        parse("--tp-comm-overlap-cfg", str(path))
    [problem] = caught.value.problems
    assert problem.startswith(f"--tp-comm-overlap-cfg {path}, {line}")


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--tp-comm-overlap-cfg no\.yaml: the file cannot be read"):
        parse("--tp-comm-overlap-cfg", "no.yaml")


PIPELINE = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "8")
ZERO_BUBBLE = (*PIPELINE, "--pipeline-schedule", "zero-bubble")
SHARDED = (*PIPELINE, "--data-parallel-sharding-strategy", "optim_grads")
ALONE = "with --pipeline-model-parallel-size 1"
DEFER, DELAY = "--defer-embedding-wgrad-compute", "--delay-wgrad-compute"


@pytest.mark.parametrize(
    ("flags", "world_size", "lines"),
    [
        (
            ("--no-overlap-p2p-communication", DELAY, DEFER),
            1,
            [f"{flag} has no effect {ALONE}" for flag in ("--no-overlap-p2p-communication", DELAY, DEFER)],
        ),
        (
            (*ZERO_BUBBLE, DELAY, DEFER),
            2,
            [
                f"{flag} has no effect with --pipeline-schedule zero-bubble, which defers weight gradients itself"
                for flag in (DELAY, DEFER)
            ],
        ),
        (
            (*PIPELINE, DELAY, DEFER, "--wgrad-deferral-limit", "3"),
            2,
            [
                f"{DEFER} has no effect with {DELAY}, which computes them with the others",
                f"--wgrad-deferral-limit 3 has no effect with {DELAY}, which computes them with the others",
            ],
        ),
        (
            (*SHARDED, DEFER),
            4,
            [
                f"{DEFER} has no effect with --data-parallel-sharding-strategy optim_grads: gradients are reduced "
                "after each micro-batch"
            ],
        ),
    ],
)
def test_what_cannot_have_an_effect_is_said_and_turned_off(
    flags: tuple[str, ...], world_size: int, lines: list[str]
) -> None:
    parsed = resolve_arguments([*MINIMAL, *flags], world_size)
    assert list(parsed.notes) == lines
    model = parsed.config.model
    assert not model.defer_embedding_wgrad_compute
    assert model.overlap_p2p_communication


def test_a_limit_that_cannot_be_is_refused_where_it_would_not_count_too() -> None:
    with pytest.raises(ConfigurationError, match=r"--wgrad-deferral-limit -1: a value of 0 or more is expected"):
        resolve_arguments([*MINIMAL, DEFER, "--wgrad-deferral-limit", "-1"], 1)


def test_a_pipeline_takes_each_of_them() -> None:
    for flag in ("--no-overlap-p2p-communication", DELAY, DEFER):
        parsed = resolve_arguments([*MINIMAL, *PIPELINE, flag], 2)
        assert parsed.notes == ()
    assert parsed.config.model.defer_embedding_wgrad_compute


WEIGHTS = "--data-parallel-sharding-strategy optim_grads_params"


@pytest.mark.parametrize("text", [WEIGHTS, "--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp"])
def test_each_spelling_shards_weights(text: str) -> None:
    resolved = resolve_arguments([*MINIMAL, *text.split()], 2)
    assert resolved.notes == ()
    ddp = resolved.config.ddp
    assert ddp.shards_weights
    assert ddp.shards_gradients
    assert ddp.use_distributed_optimizer
    assert not resolve_arguments([*MINIMAL, *text.split()], 1).config.ddp.shards_weights


def test_megatron_fsdp_shards_what_the_strategy_says() -> None:
    text = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"
    ddp = resolve_arguments([*MINIMAL, *text.split()], 2).config.ddp
    assert ddp.shards_gradients
    assert not ddp.shards_weights


def test_gathering_ahead_is_always_on() -> None:
    resolved = resolve_arguments([*MINIMAL, *WEIGHTS.split(), "--overlap-param-gather"], 2)
    (note,) = resolved.notes
    assert note.startswith("--overlap-param-gather has no effect with --data-parallel-sharding-strategy optim_grads_p")
    assert not resolved.config.ddp.overlap_param_gather


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--use-torch-fsdp2 --data-parallel-sharding-strategy optim", "omit one of them"),
        ("--num-distributed-optimizer-instances 2", "add --use-distributed-optimizer, or omit it"),
        (
            f"{WEIGHTS} --num-distributed-optimizer-instances 3",
            "3 does not divide the 2 ranks with the same weights; use 1",
        ),
        (f"{WEIGHTS} --num-distributed-optimizer-instances 0", "a value greater than 0 is expected"),
        (
            f"{WEIGHTS} --num-distributed-optimizer-instances 2",
            "with as many instances as ranks with the same weights (2)",
        ),
        (f"{WEIGHTS} --lora-rank 4", "--lora-rank 4 with --data-parallel-sharding-strategy optim_grads_params"),
        (f"{WEIGHTS} --bf16 --fp8-format hybrid --fp8-param-gather", "--fp8-param-gather with"),
        (
            f"{WEIGHTS} --overlap-param-gather --overlap-param-gather-with-optimizer-step",
            "--overlap-param-gather-with-optimizer-step with",
        ),
        (
            f"{WEIGHTS} --cuda-graph-impl local --attention-dropout 0",
            "do not support --data-parallel-sharding-strategy",
        ),
        (f"{WEIGHTS} --cpu-offloading --cpu-offloading-num-layers 1 --cpu-offloading-weights", "--cpu-offloading-weig"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_line(text: str, named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *text.split()], 2)
    (problem,) = caught.value.problems
    assert named in problem


def test_a_model_is_taken_out_of_a_run_with_instances() -> None:
    text = "--use-distributed-optimizer --num-distributed-optimizer-instances 2"
    config = resolve_arguments([*MINIMAL, *text.split()], 4).config
    alone = dataclasses.replace(config, world_size=1)
    assert [problem for check in parallelism.LAYOUT_CHECKS for problem in check.find(alone)] == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((*PIPELINE, DELAY), DELAY),
        ((*PIPELINE, DEFER), DEFER),
        (ZERO_BUBBLE, "--pipeline-schedule zero-bubble"),
        (("--tensor-model-parallel-size", "2", "--sequence-parallel", "--tp-comm-overlap"), "--tp-comm-overlap"),
    ],
)
def test_logits_in_chunks_exclude_what_defers_or_overlaps_the_output_layer(flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *flags, "--cross-entropy-fusion-impl", "linear"], 2)
    (problem,) = caught.value.problems
    assert problem.startswith(f"--cross-entropy-fusion-impl linear: {named} ")
    assert problem.endswith("omit one of them")
