"""Numbers of parameters and memory in closed form: users' own figures, and what a model and its optimizer hold."""

from __future__ import annotations

import dataclasses

import pytest

import pretrain_gpt
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.device import Device
from megatron.core.parallel_state import create_parallel_state
from megatron.core.tensor_parallel.random import RngStreams
from megatron.training.initialize import Runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.training.theoretical_memory_usage import describe_theoretical_memory, model_size, theoretical_memory

GPT2_345M = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 4 --global-batch-size 32 --train-iters 10 --lr 1e-4 --fp16 --mock-data --vocab-file v
    --merge-file m
"""
SMALL = """
    --num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24
    --micro-batch-size 2 --global-batch-size 4 --train-iters 10 --lr 1e-4 --mock-data
"""
LLAMA = """
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention
    --num-query-groups 2 --untie-embeddings-and-output-weights
"""


def configure(flags: str, world_size: int = 1, vocab_size: int = 50257) -> RunConfig:
    config = resolve_arguments(flags.split(), world_size, needs_files=False).config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


@pytest.mark.parametrize(
    ("layout", "world_size", "shards"),
    [
        ("", 1, (354871296,)),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4, (102483968, 101437440)),
        ("--tensor-model-parallel-size 4", 4, (89714688,)),
        ("--pipeline-model-parallel-size 4", 4, (128137216, 75577344, 75577344, 127090688)),
    ],
)
def test_shards_have_the_sizes_that_users_report(layout: str, world_size: int, shards: tuple[int, ...]) -> None:
    size = model_size(configure(f"{GPT2_345M} {layout}", world_size))
    assert size.shards == shards
    padding = {1: 47, 2: 175, 4: 431}[2 if "size 2" in layout else 4 if "tensor" in layout else 1]
    assert size.embedding == (50257 + padding + 1024) * 1024
    assert size.block == 24 * (12 * 1024**2 + 13 * 1024) + 2 * 1024


@pytest.mark.parametrize("flags", ["", "--bf16", f"{LLAMA} --bf16 --grad-reduce-in-bf16", f"{LLAMA} --optimizer sgd"])
def test_weights_and_optimizer_are_what_a_run_holds(flags: str) -> None:
    config = configure(f"{SMALL} {flags} --tokenizer-type NullTokenizer --vocab-size 127", vocab_size=128)
    device, state = Device("cpu"), create_parallel_state()
    runtime = Runtime(device, state, RngStreams(device, 1, state.place))
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, lambda line: None)
    parameters = list(parts.chunks[0].parameters())
    (size,) = model_size(config).shards
    assert size == sum(parameter.numel() for parameter in parameters)
    (buffer,) = parts.ddp_chunks[0].grad_buffers
    gradients = size * buffer.grad_data.element_size()  # padding left out
    optimizer = sum(tensor.nbytes for _, tensor in parts.optimizer.sharded_state().values())
    weights = sum(parameter.nbytes for parameter in parameters)
    assert theoretical_memory(config).weights_and_optimizer == weights + gradients + optimizer


def test_sharding_divides_what_it_shards() -> None:
    per_parameter = [
        theoretical_memory(configure(f"{GPT2_345M} {flags}", 4)).weights_and_optimizer / 354871296
        for flags in (
            "",
            "--use-distributed-optimizer",
            "--data-parallel-sharding-strategy optim_grads",
            "--data-parallel-sharding-strategy optim_grads_params",
        )
    ]
    assert per_parameter == [18, 6 + 12 / 4, 2 + 16 / 4, 18 / 4]


def test_activations_are_those_of_the_published_form() -> None:
    layer = 1024 * 4 * 1024 * 32  # 34 bytes of the table without the two dropout masks of 1 byte
    whole = configure(f"{GPT2_345M} --recompute-granularity selective")
    ends = 4 * 1024 * (2 * 1024 + 4 * 1024 + 4 * 50304)
    assert theoretical_memory(whole).activations == 24 * layer + ends
    flags = f"{GPT2_345M} --recompute-granularity selective --tensor-model-parallel-size 2 --sequence-parallel"
    cut = configure(f"{flags} --pipeline-model-parallel-size 2", 4)
    assert theoretical_memory(cut).activations == (12 * layer + 4 * 1024 * 2 * 1024) * 2 / 2
    lines = describe_theoretical_memory(cut)
    assert lines[0] == "Number of parameters in transformer block in billions:  0.30"
    assert lines[3:] == [
        "Number of parameters in most loaded shard in billions: 0.1025",
        "Number of parameters in other shards in billions: 0.1014",
        "Theoretical memory footprints: weight and optimizer=1759.25 MB, activation=1544.00 MB, total=3303.25 MB",
    ]


def test_activations_are_without_the_modules_that_are_recomputed() -> None:
    """A feed-forward that is recomputed keeps its input alone: no element of the 4h that fc1 writes and fc2 reads."""
    flags = f"{GPT2_345M} --recompute-granularity selective --recompute-modules"
    core, mlp = (theoretical_memory(configure(f"{flags} {modules}")).activations for modules in ("core_attn", "mlp"))
    assert core is not None
    assert mlp is not None
    assert core - mlp == 24 * 4 * 1024 * 2 * 8 * 1024


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --recompute-granularity selective"])
def test_activations_without_a_form_are_left_out(flags: str) -> None:
    config = configure(f"{GPT2_345M} {flags}", 2)
    assert theoretical_memory(config).activations is None
    assert "activation" not in describe_theoretical_memory(config)[-1]
