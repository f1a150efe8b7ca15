"""A reader of shell scripts that runs nothing."""
