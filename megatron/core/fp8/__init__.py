"""Training in 8-bit floating point: recipes, the quantisers of a linear layer, and what delayed scaling remembers."""
