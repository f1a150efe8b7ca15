"""Start-up lines that depend on the configuration: the batch size, and how many buckets are listed."""

from __future__ import annotations

import dataclasses

import pretrain_gpt
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.device import Device
from megatron.core.parallel_state import create_parallel_state
from megatron.core.tensor_parallel.random import RngStreams
from megatron.training.initialize import Runtime
from megatron.training.loggers.startup_lines import describe_batch_and_tokenizer, describe_buckets
from megatron.training.model_setup import build_model_and_optimizer

FLAGS = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24
    --micro-batch-size 2 --global-batch-size 12 --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 51
"""


def configure(flags: str = "") -> RunConfig:
    config = resolve_arguments(f"{FLAGS} {flags}".split(), 1, needs_files=False).config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=52))


def test_the_batch_size_is_constant_or_ramped_up_or_has_no_line() -> None:
    tokenizer = "> building NullTokenizer tokenizer ..."
    constant = "setting number of micro-batches to constant 6"
    assert describe_batch_and_tokenizer(configure()).splitlines() == [constant, tokenizer]
    ramped = (
        "will use batch size rampup starting from global batch size 4 to global batch size 12 with batch size "
        "increments 4 over 100 samples."
    )
    assert describe_batch_and_tokenizer(configure("--rampup-batch-size 4 4 100")).splitlines() == [ramped, tokenizer]
    stepped = "--step-batch-size-schedule 0:4,480:12"
    assert describe_batch_and_tokenizer(configure(stepped)).splitlines() == [tokenizer]


def test_many_buckets_are_counted_and_listed_where_everything_is_asked_for() -> None:
    config = configure("--ddp-bucket-size 1000")
    # The flag would be turned off for one replica, and there would be one bucket.
    config = dataclasses.replace(config, ddp=dataclasses.replace(config.ddp, overlap_grad_reduce=True))
    device, state = Device("cpu"), create_parallel_state()
    runtime = Runtime(device, state, RngStreams(device, 1, state.place))
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, lambda line: None)
    (buffer,) = parts.ddp_chunks[0].grad_buffers
    count = len(buffer.buckets)
    assert count > 8
    first = f"Number of buckets for gradient all-reduce / reduce-scatter: {count}"
    assert describe_buckets(parts.ddp_chunks, state, False) == first
    everything = describe_buckets(parts.ddp_chunks, state, True)
    assert everything is not None
    lines = everything.splitlines()
    assert lines[0] == first
    assert [line.split(" (")[0] for line in lines if line.startswith("Params")] == [
        f"Params for bucket {number}" for number in range(1, count + 1)
    ]
    names = {line.removeprefix("\tmodule.") for line in lines if line.startswith("\t")}
    assert names == {name for name, _ in parts.chunks[0].named_parameters()}
