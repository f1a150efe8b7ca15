"""What a run would leave in the machine's memory is compared with what is free there."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.available_host_memory import HostRoom
from megatron.core.errors import ConfigurationError
from megatron.training.preflight import check_host_memory, check_least_host_memory
from megatron.training.theoretical_memory_usage import (
    kept_layer_bytes,
    least_offloaded_bytes,
    model_size,
    offloaded_bytes,
    tokens_of_rank,
)
from tests.unit.config.command_lines import MINIMAL

PIPELINE = "--num-layers 8 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 6"
FULL = "--recompute-granularity full --recompute-num-layers 2 --recompute-method"


def config_of(flags: str, layers: int = 3) -> RunConfig:
    words = f"{flags} --cpu-offloading --cpu-offloading-num-layers {layers}".split()
    return resolve_arguments([*MINIMAL, *words], 2).config


def bytes_of_layer(config: RunConfig) -> int:
    return kept_layer_bytes(config.model, tokens_of_rank(config), 0, 0)


def test_bytes_are_of_the_microbatches_in_flight() -> None:
    for flags, in_flight in ((PIPELINE, 2), (f"{PIPELINE} --pipeline-schedule zero-bubble", 2)):
        config = config_of(flags)
        assert offloaded_bytes(config) == in_flight * 3 * bytes_of_layer(config)
    # Chunks of two layers each, of which all are offloaded: the first rank has up to five passes in flight.
    config = config_of(f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 2")
    assert offloaded_bytes(config) == 5 * 2 * bytes_of_layer(config)


@pytest.mark.parametrize(
    ("flags", "in_flight"),
    [
        ("--num-layers 8 --global-batch-size 6", 12),
        ("--num-layers 16 --global-batch-size 7", 28),
        ("--num-layers 8 --global-batch-size 16 --microbatch-group-size-per-virtual-pipeline-stage 8", 15),
    ],
)
def test_interleaved_chunks_have_the_passes_in_flight_of_their_schedule(flags: str, in_flight: int) -> None:
    stages = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1"
    words = f"{stages} {flags} --cpu-offloading --cpu-offloading-num-layers 1".split()
    config = resolve_arguments([*MINIMAL, *words], 4).config
    assert offloaded_bytes(config) == in_flight * bytes_of_layer(config)


def test_bytes_of_full_recompute() -> None:
    uniform, block = (config_of(f"{PIPELINE} {FULL} {method}") for method in ("uniform", "block"))
    stream = bytes_of_layer(uniform)
    assert offloaded_bytes(uniform) == 2 * 2 * stream
    assert offloaded_bytes(block) == 2 * (2 * stream + bytes_of_layer(config_of(PIPELINE)))


def test_weights_are_there_once() -> None:
    h, f = 24, 96
    flags = f"{PIPELINE} --hidden-size {h} --ffn-hidden-size {f} --num-attention-heads 6"
    weights, both = (
        config_of(f"{flags} --cpu-offloading-weights {more}") for more in ("--no-cpu-offloading-activations", "")
    )
    # Norms, query, key and value, projection, two products, biases.
    of_layer = 4 * (4 * h + 3 * h * h + 3 * h + h * h + h + 2 * h * f + f + h)
    assert offloaded_bytes(weights) == 3 * of_layer
    assert offloaded_bytes(both) == 3 * of_layer + 2 * 3 * bytes_of_layer(both)


def test_too_little_memory_is_refused_with_the_number_of_layers_that_fits() -> None:
    config = config_of(PIPELINE)
    needed = offloaded_bytes(config)
    check_host_memory(config, None)  # nobody says what is free
    check_host_memory(config, HostRoom(2 * needed, 2))
    with pytest.raises(ConfigurationError, match=r"GiB for 3 processes.* --cpu-offloading-num-layers 2 would fit$"):
        check_host_memory(config, HostRoom(2 * needed, 3))
    with pytest.raises(ConfigurationError, match="omit --cpu-offloading"):
        check_host_memory(config, HostRoom(2 * needed, 12))


def test_frozen_weights_ask_for_no_state() -> None:
    flags = "--optimizer-cpu-offload --lora-rank 2 --load somewhere --finetune"
    config = resolve_arguments([*MINIMAL, *PIPELINE.split(), *flags.split()], 2, needs_files=False).config
    most, trained = max(model_size(config).shards), max(model_size(config).trained)
    assert 10 * trained < most
    check_host_memory(config, HostRoom(2 * 12 * trained, 2))
    with pytest.raises(ConfigurationError, match="offload needs an estimated"):
        check_host_memory(config, HostRoom(2 * 12 * trained - 1, 2))


def test_activations_and_the_optimizer_are_asked_for_together() -> None:
    """Each of them fits alone, and both do not."""
    both = config_of(f"{PIPELINE} --optimizer-cpu-offload")
    optimizer = dataclasses.replace(both.optimizer, optimizer_cpu_offload=False)
    layers = offloaded_bytes(both)
    state = 12 * max(model_size(both).shards)
    room = HostRoom(2 * (layers + state), 2)
    check_host_memory(both, room)
    check_host_memory(dataclasses.replace(both, optimizer=optimizer), HostRoom(2 * layers, 2))
    less = dataclasses.replace(room, available=room.available - 2 * state // 4)
    with pytest.raises(ConfigurationError) as refused:
        check_host_memory(both, less)
    (line,) = refused.value.problems
    assert "of activations and weights and " in line
    assert line.endswith("--optimizer-offload-policy static --optimizer-offload-fraction 0.75 would fit")
    # What auto offloads is not known before the device is.
    auto = dataclasses.replace(both.optimizer, optimizer_offload_policy="auto")
    check_host_memory(dataclasses.replace(both, optimizer=auto), less)


@pytest.mark.parametrize("more", ["", f"{FULL} uniform", f"{FULL} block", "--num-layers-per-virtual-pipeline-stage 2"])
def test_the_least_is_the_inputs_of_layers(more: str) -> None:
    config = config_of(f"{PIPELINE} {more}")
    least = least_offloaded_bytes(config)
    assert 0 < least <= offloaded_bytes(config)
    is_uniform = more.endswith("uniform")
    # With uniform recompute a layer keeps nothing but its input, so that the least is all there is.
    assert (least == offloaded_bytes(config)) == is_uniform
    check_least_host_memory(config, HostRoom(least, 1))
    with pytest.raises(ConfigurationError, match="offload needs at least"):
        check_least_host_memory(config, HostRoom(least - 1, 1))


def test_the_least_names_the_most_layers_that_could_fit() -> None:
    config = config_of(PIPELINE)
    least = least_offloaded_bytes(config)
    check_least_host_memory(config, None)
    with pytest.raises(ConfigurationError, match=r"GiB for 3 processes.*; use --cpu-offloading-num-layers 2 or less$"):
        check_least_host_memory(config, HostRoom(2 * least, 3))
    with pytest.raises(ConfigurationError, match=r"omit --cpu-offloading$"):
        check_least_host_memory(config, HostRoom(least // 4, 1))
    weights = config_of(f"{PIPELINE} --cpu-offloading-weights --no-cpu-offloading-activations")
    assert least_offloaded_bytes(weights) == 0
    check_least_host_memory(weights, HostRoom(0, 1))
