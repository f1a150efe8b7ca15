"""Memory and time of a plan, by part, under the implementation that runs it."""
