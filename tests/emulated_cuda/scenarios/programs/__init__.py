"""Programs that scenarios run in place of a training."""
