"""Objects are pickled and exchanged within groups: a start, a save and a load exchange none over the whole world."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from megatron.checkpoint.train_state import TrainState
from megatron.config.arguments import resolve_arguments
from megatron.core.device import select_device
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.parallel_state import all_gather_from_world, create_parallel_state
from megatron.core.timers import Timers
from megatron.training.checkpointing import RunCheckpoints, open_saver
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.training.pretrain import with_vocabulary
from pretrain_gpt import provide_model
from tests.e2e.toy_run import toy_args
from tests.harness.distributed import run_distributed


def save_and_load(folder: str, flags: str) -> list[tuple[str, int]]:
    """Build a run, save it and load it; return the objects that were gathered: by what, and over how many ranks."""
    from megatron.core.tokenizers.build_tokenizer import build_tokenizer

    gathered: list[tuple[str, int]] = []

    def counting(name: str) -> Any:
        real = getattr(dist, name)

        def gather(*args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
            gathered.append((name, dist.get_world_size(group)))
            real(*args, group=group, **kwargs)

        return gather

    names = ("all_gather_object", "gather_object")
    with patch.multiple(dist, **{name: counting(name) for name in names}):
        config = resolve_arguments(toy_args(Path(folder), flags), dist.get_world_size()).config
        tokenizer = build_tokenizer(
            tokenizer_type=config.tokenizer.tokenizer_type, vocab_size=config.tokenizer.vocab_size
        )
        config = with_vocabulary(config, tokenizer, lambda line: None)
        runtime = make_runtime(config, select_device(0))
        for iteration in (0, 3):
            parts = build_model_and_optimizer(config, runtime, provide_model, lambda line: None)
            saver = open_saver(config.checkpoint, runtime, lambda line: None)
            checkpoints = RunCheckpoints(config, runtime, parts, tokenizer, saver, lambda line: None)
            train_state = checkpoints.resume()
            assert train_state.iteration == iteration
            checkpoints.save(TrainState(iteration=iteration + 3))
            checkpoints.finish()
            checkpoints.close()
            timers = Timers()
            with timers("load-checkpoint"):
                pass
            assert bool(timers.report(runtime.state)) == (runtime.state.rank == 0)
    return gathered


def test_a_start_a_save_and_a_load_gather_no_objects_over_the_world(tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    flags += " --param-group-overrides *.bias:lr_mult=0.5"
    for gathered in run_distributed(4, save_and_load, str(tmp_path), flags, timeout_s=60):
        assert gathered
        assert {size for _, size in gathered} == {2}


def items_of_the_world() -> list[list[tuple[int, ...]]]:
    state = create_parallel_state(ParallelSizes(tp=2, pp=2))
    return all_gather_from_world([(state.rank,), (state.tp.rank, 7)], state)


def test_items_come_in_the_order_of_the_ranks() -> None:
    results = run_distributed(8, items_of_the_world)
    assert results == [[[(rank,), (rank % 2, 7)] for rank in range(8)]] * 8
