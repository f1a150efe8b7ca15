"""GPT pretraining over tensor, pipeline, data and context parallelism."""
