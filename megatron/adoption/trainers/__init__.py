"""Settings files of other trainers."""
