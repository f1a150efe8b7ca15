"""Other trainers' launch scripts and settings, read without running them, as commands of this project."""
