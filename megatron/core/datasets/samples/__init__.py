"""Samples and batches: GPT data sets, blends, and reading ahead."""
