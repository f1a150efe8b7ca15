"""torchtitan's folders of torch.distributed.checkpoint, read as far as their names say what they hold."""
