"""The former name of `megatron.cli`, for `python -m megatron.commands` in scripts."""
