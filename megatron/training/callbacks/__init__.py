"""Callbacks of the training loop: what else happens at its moments. See `megatron.training.callbacks.callback`."""
