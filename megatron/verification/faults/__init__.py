"""Do harm to a training run on purpose, again and again, and see that nothing is lost by it."""
