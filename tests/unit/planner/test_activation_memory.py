"""The activations of a rank in closed form: what is recomputed, offloaded or cut over ranks is not there."""

from __future__ import annotations

from megatron.planner.activation_memory import activation_bytes, in_backward_passes, layer_bytes, saved_bytes
from megatron.planner.plan import Plan
from megatron.training.config.arguments import resolve_arguments
from megatron.training.config.run_config import RunConfig
from tests.unit.training.config.command_lines import MINIMAL

PIPELINE = "--num-layers 8 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 6"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"


def config_of(flags: str, world_size: int = 2) -> RunConfig:
    return resolve_arguments([*MINIMAL, *f"{PIPELINE} {flags}".split()], world_size).config


def bytes_of_layer(config: RunConfig) -> int:
    return sum(saved_bytes(config.model, config.data.seq_length, 1).values())


def test_what_is_computed_again_is_there_once() -> None:
    """The first of two stages has four layers and two micro-batches in flight."""
    plain = config_of("")
    layer = bytes_of_layer(plain)
    assert activation_bytes(plain, 0) == 2 * 4 * layer
    modules = config_of("--recompute-granularity selective --recompute-modules layernorm mlp")
    assert activation_bytes(modules, 0) == 2 * 4 * bytes_of_layer(modules) + layer - bytes_of_layer(modules)
    full = config_of(FULL)
    assert activation_bytes(full, 0) == 2 * 2 * bytes_of_layer(full) + 2 * layer


def test_of_unlike_layers_each_group_is_computed_again_as_it_is() -> None:
    """A layer of experts and a dense one behind it are one group: neither is there twice."""
    experts = "--num-experts 2 --moe-layer-freq 2 --moe-ffn-hidden-size 512"
    plan = Plan.of(config_of(f"{experts} {FULL}"))
    layers = layer_bytes(plan)
    assert layers[0].whole > layers[1].whole
    assert in_backward_passes(plan, 0, layers) == {True: layers[0].whole, False: layers[0].whole + layers[1].whole}
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    plan = Plan.of(config_of(f"{experts} {block}"))
    assert in_backward_passes(plan, 0, layer_bytes(plan)) == {True: layers[0].whole, False: 0}


def test_of_offloaded_layers_two_are_there() -> None:
    config = config_of("--cpu-offloading --cpu-offloading-num-layers 3")
    assert activation_bytes(config, 0) == (2 * 1 + 2) * bytes_of_layer(config)


def test_saved_inputs_are_cut_over_the_ranks_that_share_them() -> None:
    whole, cut = (
        config_of(f"--tensor-model-parallel-size 2 {FULL} {more}", 4) for more in ("", "--distribute-saved-activations")
    )
    assert bytes_of_layer(cut) == bytes_of_layer(whole) // 2
    assert activation_bytes(whole, 0) - activation_bytes(cut, 0) == 2 * 2 * bytes_of_layer(cut)


def test_the_last_stage_has_the_logits() -> None:
    config = config_of("")
    model, tokens = config.model, config.data.seq_length
    ends = 2 * tokens * model.hidden_size * 4 + tokens * model.padded_vocab_size * (4 + 8)
    assert activation_bytes(config, 1) == 4 * bytes_of_layer(config) + ends
    # A frozen output layer does not keep its input.
    words = [*MINIMAL, *PIPELINE.split(), *["--lora-rank", "2", "--load", "somewhere", "--finetune"]]
    frozen = resolve_arguments(words, 2, needs_files=False).config
    kept = activation_bytes(frozen, 1) - 4 * bytes_of_layer(frozen)
    assert kept == ends - tokens * model.hidden_size * 4
