"""The commands of the project, one file each; the scripts in tools/ call them."""
