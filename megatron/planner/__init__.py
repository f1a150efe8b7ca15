"""Memory, time and communication of a run before it starts: explanations, layout search, and simulated steps."""
