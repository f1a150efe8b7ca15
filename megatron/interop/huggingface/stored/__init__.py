"""What lies in a folder's files: the names of tensors, and weights that are quantised."""
