"""Log lines, the metrics file and TensorBoard."""
