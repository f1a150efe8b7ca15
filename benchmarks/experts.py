"""Compare training steps of a model of 8 experts, top 2, with those of a dense one of the same active parameters.

    python benchmarks/experts.py [--batch 4] [--steps 5] [--cpu-gemm-backend mkl]

Both take the same tokens in turn, in one process. Times are of the processor, so that other work on the machine counts
for less; what is printed are medians and the quickest step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from benchmarks.small_model import LENGTH, SHAPE, VOCABULARY
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.layer_output import AuxiliaryLoss
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from tests.harness.toy_model import make_model

_WIDTH = 512
_SHAPE = {**SHAPE, "num_layers": 2, "ffn_hidden_size": 2 * _WIDTH}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": _WIDTH,
    "moe_aux_loss_coeff": (1e-2,),
    "moe_token_dispatcher_type": "alltoall",
}


class Trained:
    """Hold a model and its optimizer, and train them step by step."""

    def __init__(self, **settings: Any) -> None:
        state = describe_parallel_state(0, 1)
        model = make_model(single_rank_group(), **(_SHAPE | settings))
        self.chunk = DistributedDataParallel(model, DistributedDataParallelConfig(), state)
        self.optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3, min_lr=1e-4), [self.chunk], state)
        self.times: list[float] = []
        self.loss = 0.0

    def step(self, tokens: torch.Tensor) -> None:
        """Train one step, and note its loss and its time."""
        start = time.process_time()
        self.chunk.zero_grad_buffer()
        found: list[AuxiliaryLoss] = []
        positions = torch.arange(LENGTH).expand(len(tokens), -1)
        loss = self.chunk(tokens[:, :-1], positions, labels=tokens[:, 1:], losses=found).mean()
        weighted = [each.coefficient * each.loss_sum / each.num_tokens for each in found]
        torch.autograd.backward([torch.stack([loss, *weighted]).sum()])
        self.chunk.finish_grad_sync()
        self.optimizer.step()
        self.times.append(time.process_time() - start)
        self.loss = loss.item()


def main() -> None:
    """Measure, and print a line for each model and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="sequences of 512 tokens a step (4)")
    parser.add_argument(
        "--cpu-gemm-backend",
        default="auto",
        metavar="LIBRARY",
        help="onednn or mkl; a run measures which is quicker (auto)",
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps that count (5)")
    arguments = parser.parse_args()
    library = arguments.cpu_gemm_backend
    models = {"dense": Trained(cpu_gemm_backend=library), "experts": Trained(**_EXPERTS, cpu_gemm_backend=library)}
    generator = torch.Generator().manual_seed(1)
    for _ in range(arguments.steps + 1):
        tokens = torch.randint(0, VOCABULARY, (arguments.batch, LENGTH + 1), generator=generator)
        for model in models.values():
            model.step(tokens)
    print(f"{describe_machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {_SHAPE}, {_EXPERTS}")
    medians = {}
    for name, model in models.items():
        times = model.times[1:]  # The first step allocates.
        medians[name] = statistics.median(times)
        print(
            f"{name}: {medians[name]:.3f} s of processor a step (quickest {min(times):.3f}, slowest {max(times):.3f}), "
            f"{arguments.batch * LENGTH / medians[name]:.0f} tokens/s, last loss {model.loss:.4f}"
        )
    print(f"experts / dense: {medians['dense'] / medians['experts']:.2f} of the tokens/s")


if __name__ == "__main__":
    main()
