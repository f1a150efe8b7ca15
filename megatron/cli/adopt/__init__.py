"""Translation of other trainers' launch scripts and configuration files to commands of this project."""
