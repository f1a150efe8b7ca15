"""Former name of `megatron.cli`, for scripts that run `python -m megatron.commands`."""
