"""What a run has read of its data, and how a resumed run reads on."""
