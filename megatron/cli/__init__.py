"""The commands of the project; the scripts in tools/ call them."""
