"""A model measured: the tasks of lm-evaluation-harness, and the perplexity of texts."""
