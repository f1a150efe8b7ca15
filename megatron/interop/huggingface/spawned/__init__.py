"""A model over processes that a plain Python program starts for itself."""
