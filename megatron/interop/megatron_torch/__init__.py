"""Megatron-LM's own checkpoints: mp_rank_XX folders with a file of torch's format for each model-parallel rank."""
