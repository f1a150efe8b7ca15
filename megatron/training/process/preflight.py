"""Preflight: check the tokenizer, the data and free memory after the command line and before the import of torch."""

from __future__ import annotations

import dataclasses
import sys

from megatron.core.available_host_memory import HostRoom, available_bytes
from megatron.core.datasets.indexed_dataset import report_lost_pages
from megatron.core.errors import InputError
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.training.config.run_config import RunConfig
from megatron.training.data.data_plan import DatasetsProvider, sample_targets
from megatron.training.process.host_memory import check_least_host_memory
from megatron.training.process.initialize import LaunchEnvironment
from megatron.training.process.refusal import reasons_of, refuse_in_run


def prepare_data_or_exit(
    config: RunConfig, launch: LaunchEnvironment, datasets_provider: DatasetsProvider
) -> Tokenizer:
    """Return the run's tokenizer; end the program with status 2 where it, the data or the memory will not do.

    Every rank looks, and only rank 0 prints. No index is built and nothing communicates. Host memory is compared with
    the least that an offload needs; `pretrain` compares it with all, which it reads from the model.
    """

    def report(line: str) -> None:
        if launch.rank == 0:
            print(line, flush=True)

    report_lost_pages(launch.rank)
    try:
        tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer))
        model, available = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size), available_bytes()
        room = None if available is None else HostRoom(available, launch.local_world_size)
        check_least_host_memory(dataclasses.replace(config, model=model), room)
        datasets_provider(config, tokenizer, sample_targets(config), report).check()
    except InputError as error:
        sys.exit(refuse_in_run(reasons_of(error), launch))
    return tokenizer
