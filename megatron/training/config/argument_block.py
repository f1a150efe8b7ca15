"""The resolved configuration in Megatron's dotted form."""

from __future__ import annotations

from typing import Any

from megatron.training.config.run_config import RunConfig

_DOTS_END = 48


def format_arguments(config: RunConfig) -> str:
    """Return the block that opens every run's log: one line an argument, sorted by name.

    Dots fill each line up to column 51, where the value follows.
    """
    lines = ["------------------------ arguments ------------------------"]
    values = argument_values(config)
    for name in sorted(values, key=str.lower):
        lines.append(f"  {name} {'.' * (_DOTS_END - len(name))} {values[name]}")
    lines.append("-------------------- end of arguments ---------------------")
    return "\n".join(lines)


def summarize(config: RunConfig) -> str:
    """Return the lines that stand for the block on a terminal."""
    model, training, checkpoint = config.model, config.training, config.checkpoint
    saved = "nowhere" if checkpoint.save is None else checkpoint.save
    if checkpoint.save is not None and checkpoint.save_interval is not None:
        saved += f", every {checkpoint.save_interval:,} iterations"
    return "\n".join(
        [
            f" > model: {model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads, "
            f"sequences of {config.data.seq_length:,} tokens",
            f" > run: {config.train_iters:,} iterations of {training.global_batch_size:,} samples in micro-batches of "
            f"{training.micro_batch_size}, learning rate {config.optimizer.lr:g} ({config.scheduler.lr_decay_style})",
            f" > checkpoints: {saved}",
            f" > {len(argument_values(config))} arguments; --log-arguments prints them all",
        ]
    )


def argument_values(config: RunConfig) -> dict[str, Any]:
    """Return every argument of a run by Megatron's name, with those that follow from others."""
    values = {spec.name: list(value) if isinstance(value, tuple) else value for spec, value in config.flags()}
    values["world_size"] = config.world_size
    values["data_parallel_size"] = config.data_parallel_size
    values["params_dtype"] = config.model.params_dtype
    return values
