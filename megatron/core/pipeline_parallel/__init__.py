"""Which layers a stage holds, in which order its work runs, and what travels between stages."""
