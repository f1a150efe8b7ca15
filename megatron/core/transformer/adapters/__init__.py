"""Low-rank adapters: the linear layers that have them, by name, and how they are put there."""
