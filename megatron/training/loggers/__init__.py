"""Loggers: log lines, TensorBoard, metrics files, profiles and statistics."""
