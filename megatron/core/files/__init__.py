"""What is read of files that others made: how much, how deep, and what a pickle among them may ask for."""
