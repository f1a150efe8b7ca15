"""Train with a learning-rate schedule of your own: ``megatron train --script FILE --lr-decay-style hold``.

``hold`` keeps the learning rate for half of the decay, which then falls linearly. The name also works with
``--lr-wsd-decay-style``.
"""

from megatron.training import pretrain, register_lr_schedule


def hold(elapsed: float) -> float:
    """Return the remaining fraction of the decay, from 1 to 0."""
    return min(1.0, 2.0 * (1.0 - elapsed))


register_lr_schedule("hold", hold)

if __name__ == "__main__":
    pretrain()
