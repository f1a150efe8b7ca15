"""Find out that a run hangs and who holds it up, say so, and end it."""
