"""What some trainings add to their optimizer: rates by name, clipping by kind, averages of weights, fewer bytes."""
