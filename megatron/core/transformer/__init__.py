"""The transformer: configuration, attention, MLP, norms, layers and the block of them."""
