"""Run measured steps of this project: the training step of `pretrain_gpt.py` on the workload's samples."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from stopwatch import Stopwatch
from workload import Workload, add_workload_arguments, workload_of

if TYPE_CHECKING:
    from megatron.config.run_config import RunConfig

_DTYPE_FLAGS: dict[str, list[str]] = {"float32": [], "bfloat16": ["--bf16"]}


@dataclass(frozen=True)
class WorkloadDataset:
    """Give the workload's samples as the data set of a run."""

    workload: Workload
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        tokens = self.workload.sample(index)
        length = self.workload.seq_length
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": np.ones(length, dtype=np.float32),
            "position_ids": np.arange(length, dtype=np.int64),
        }

    def source_of(self, index: int) -> str:
        """Name the sample in messages."""
        return f"benchmark sample {index}"


def training_flags(workload: Workload, num_steps: int) -> list[str]:
    """Return the command line of the training that is measured."""
    tp = workload.tensor_model_parallel_size
    assert workload.padded_vocab_size % tp == 0
    # The tokenizer adds one id to the number given; one multiple is the whole padded vocabulary.
    return [
        *("--num-layers", str(workload.num_layers), "--hidden-size", str(workload.hidden_size)),
        *("--num-attention-heads", str(workload.num_attention_heads), "--seq-length", str(workload.seq_length)),
        *("--max-position-embeddings", str(workload.seq_length), "--micro-batch-size", str(workload.micro_batch_size)),
        *("--global-batch-size", str(workload.micro_batch_size), "--train-iters", str(num_steps)),
        *("--lr", str(workload.learning_rate), "--lr-decay-style", "constant"),
        *("--adam-beta1", str(workload.adam_beta1), "--adam-beta2", str(workload.adam_beta2)),
        *("--adam-eps", str(workload.adam_eps), "--weight-decay", str(workload.weight_decay)),
        *("--clip-grad", str(workload.clip_grad), "--init-method-std", str(workload.init_method_std)),
        *("--hidden-dropout", "0", "--attention-dropout", "0", "--seed", str(workload.seed)),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(workload.vocab_size - 1), "--mock-data"),
        *("--make-vocab-size-divisible-by", str(workload.padded_vocab_size // tp)),
        *("--tensor-model-parallel-size", str(tp), "--distributed-backend", "gloo", "--timing-log-level", "2"),
        *(["--sequence-parallel"] if workload.sequence_parallel else []),
        *("--ffn-hidden-size", str(workload.active_width)),
        *(["--swiglu", "--disable-bias-linear"] if workload.is_gated else []),
        *(["--position-embedding-type", "rope", "--normalization", "RMSNorm"] if workload.is_rotary else []),
        *(["--compile"] if workload.is_compiled else []),
        *(_expert_flags(workload) if workload.num_experts else []),
        *_DTYPE_FLAGS[workload.dtype],
    ]


def _expert_flags(workload: Workload) -> list[str]:
    return [
        *("--num-experts", str(workload.num_experts), "--moe-router-topk", str(workload.router_topk)),
        *("--moe-ffn-hidden-size", str(workload.expert_width), "--moe-aux-loss-coeff", "1e-2"),
        *("--moe-token-dispatcher-type", "alltoall"),
    ]


def configure(workload: Workload, num_steps: int, world_size: int, rank: int) -> RunConfig:
    """Return the configuration that the command line gives."""
    from megatron.core.tokenizers.build_tokenizer import build_tokenizer
    from megatron.training.exit_reason import parse_arguments_or_exit
    from megatron.training.pretraining import with_vocabulary

    config = parse_arguments_or_exit(training_flags(workload, num_steps), world_size, rank)
    tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=workload.vocab_size - 1)
    return with_vocabulary(config, tokenizer, lambda line: None)


def run(workload: Workload, num_warmup: int, num_steps: int, output: Path) -> None:
    """Train and write what was measured; every rank writes its own file."""
    from megatron.training.initialize import initialize_runtime, read_launch_environment, shut_down

    launch = read_launch_environment()
    config = configure(workload, num_warmup + num_steps, launch.world_size, launch.rank)
    runtime = initialize_runtime(config, launch)

    import torch

    from megatron.checkpoint.train_state import TrainState
    from megatron.core.timers import Timers
    from megatron.training.autotune import choose_library
    from megatron.training.batch_source import BatchSource
    from megatron.training.model_setup import build_model_and_optimizer
    from megatron.training.training_step import TrainingStep
    from pretrain_gpt import forward_step, provide_model

    config = choose_library(config, runtime, print)
    timers = Timers(config.logging.timing_log_level, synchronize=runtime.device.synchronize)
    parts = build_model_and_optimizer(config, runtime, provide_model, lambda line: None)
    dataset = WorkloadDataset(workload, (num_warmup + num_steps) * workload.micro_batch_size)
    source = BatchSource(dataset, config, runtime, workload.vocab_size, 0)
    step = TrainingStep(config, runtime, parts, forward_step, timers)
    state, stopwatch, losses = TrainState(), Stopwatch(), []
    for _ in range(num_warmup + num_steps):
        with stopwatch.step():
            report, _ = step.run(state, source, workload.micro_batch_size, None)
            forward = timers("forward-compute", log_level=2).elapsed_s()
            stopwatch.add("forward", forward)
            stopwatch.add("backward", timers("forward-backward", log_level=1).elapsed_s() - forward)
            stopwatch.add("reduction", timers("all-grads-sync", log_level=1).elapsed_s())
            stopwatch.add("optimizer", timers("optimizer", log_level=1).elapsed_s())
        losses.append(report.lm_loss)
    versions = {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    stopwatch.write(output.with_suffix(f".{launch.rank}.json"), num_warmup, losses, versions)
    shut_down()


def write_initial_weights(workload: Workload, path: Path) -> None:
    """Save the weights that every layout starts from, padded rows included, for a contestant to load."""
    from megatron.training.initialize import LaunchEnvironment, initialize_runtime
    from megatron.training.model_setup import build_model_and_optimizer
    from pretrain_gpt import provide_model

    config = configure(workload, 1, 1, 0)
    runtime = initialize_runtime(config, LaunchEnvironment())
    (model,) = build_model_and_optimizer(config, runtime, provide_model, lambda line: None).chunks
    weights: dict[str, Any] = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    with path.open("wb") as file:
        np.savez(file, **weights)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--num-warmup", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--output", type=Path, help="where each rank puts its JSON: PATH with .RANK.json at its end")
    parser.add_argument("--write-initial-weights", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    workload = workload_of(arguments)
    if arguments.write_initial_weights is not None:
        write_initial_weights(workload, arguments.write_initial_weights)
    else:
        run(workload, arguments.num_warmup, arguments.num_steps, arguments.output)


if __name__ == "__main__":
    main()
