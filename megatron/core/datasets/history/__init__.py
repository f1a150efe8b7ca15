"""What a run has read of its data, and how it goes on from there."""
