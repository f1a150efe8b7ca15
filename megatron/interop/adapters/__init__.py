"""Low-rank adapters in checkpoints: merged into their model, and exchanged with the peft package."""
