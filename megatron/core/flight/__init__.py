"""What a rank communicates, and where in a run it is, kept for the case that it hangs."""
