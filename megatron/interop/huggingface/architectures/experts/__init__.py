"""The families with experts, one a file."""
