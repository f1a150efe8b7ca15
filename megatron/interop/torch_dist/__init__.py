"""Megatron's ``torch_dist`` format: what torch.distributed.checkpoint writes of sharded tensors, read and written."""
