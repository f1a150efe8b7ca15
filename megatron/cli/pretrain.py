"""Pretrain a GPT: the command line of pretrain_gpt.py."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.training import (
    forward_step,
    launch_environment_or_exit,
    parse_arguments_or_exit,
    provide_datasets,
    provide_model,
)


def main(argv: Sequence[str]) -> int:
    """Run the command with ``argv`` and return its exit status."""
    launch = launch_environment_or_exit()
    if "--explain" in argv:
        from megatron.cli import explain

        return explain.main(argv, launch.world_size) if launch.rank == 0 else 0
    config = parse_arguments_or_exit(argv, launch.world_size, launch.rank)
    # Imported late, so that --help and a wrong command line do not wait for the import of torch.
    from megatron.training import prepare_data_or_exit
    from megatron.training.fault_tolerance import keep_rank

    kept = keep_rank(config, launch)
    tokenizer = prepare_data_or_exit(config, launch, provide_datasets)
    from megatron.training.pretrain import pretrain

    return pretrain(config, launch, tokenizer, provide_model, provide_datasets, forward_step, kept)
