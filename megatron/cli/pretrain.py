"""Pretrain a GPT: the command line of pretrain_gpt.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.config import RunConfig
from megatron.core.console import waiting
from megatron.core.errors import InputError
from megatron.training import (
    LaunchEnvironment,
    forward_step,
    keep_arguments,
    launch_environment_or_exit,
    parse_arguments_or_exit,
    provide_datasets,
    provide_model,
    reasons_of,
    refuse_in_run,
)

if TYPE_CHECKING:
    from megatron.training import DatasetsProvider, ForwardStep, ModelProvider
    from megatron.training.callbacks import Callback


def main(
    argv: Sequence[str],
    *,
    is_train_command: bool = False,
    model_provider: ModelProvider = provide_model,
    datasets_provider: DatasetsProvider = provide_datasets,
    forward_step: ForwardStep = forward_step,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Run the command with ``argv`` and return its exit status; ``megatron train`` sets ``is_train_command``.

    A script of the user's own passes its parts of the run, see `megatron.training.extending.pretrain`.
    """
    launch = launch_environment_or_exit()
    if "--explain" in argv:
        from megatron.cli import explain

        return explain.main(argv, launch.world_size) if launch.rank == 0 else 0
    config = parse_arguments_or_exit(argv, launch.world_size, launch.rank, is_train_command=is_train_command)
    keep_arguments(config)
    # Imported late, so that --help and a wrong command line do not wait for the import of torch.
    if config.data.train_data:
        config = _with_tokenized_text_or_exit(config, launch)
    from megatron.training import prepare_data_or_exit
    from megatron.training.fault_tolerance import keep_rank

    kept = keep_rank(config, launch)
    with waiting("preparing the data and loading torch", is_on=launch.rank == 0, prints=config.logging.brief_log):
        tokenizer = prepare_data_or_exit(config, launch, datasets_provider)
        from megatron.training import pretrain_from_config

    parts = (model_provider, datasets_provider, forward_step)
    return pretrain_from_config(config, launch, tokenizer, *parts, kept, callbacks)


def _with_tokenized_text_or_exit(config: RunConfig, launch: LaunchEnvironment) -> RunConfig:
    """Tokenize the text of the run; end the program with status 2 if that is impossible."""
    from megatron.cli.text_data import with_tokenized_text

    try:
        return with_tokenized_text(config, is_reporter=launch.rank == 0)
    except InputError as error:
        sys.exit(refuse_in_run(reasons_of(error), launch))
