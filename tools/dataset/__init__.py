"""What tools/inspect_dataset.py is made of: statistics of a data set, and the search for damage."""
