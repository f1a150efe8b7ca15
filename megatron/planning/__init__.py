"""What a configuration costs, in closed forms, before anything runs."""
