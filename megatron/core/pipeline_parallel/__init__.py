"""Pipeline parallelism: the layers of each stage, pipeline schedules, and sends and receives between stages."""
