"""What tools/clean_dataset.py is made of: sources, filters, the index of duplicates, and the pass over all of it."""
