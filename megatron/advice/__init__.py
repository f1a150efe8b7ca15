"""What a configuration does, needs and costs, which layout is best, and what to change."""
