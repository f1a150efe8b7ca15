"""Checkpoints of Megatron-LM: the torch and the torch_dist format."""
