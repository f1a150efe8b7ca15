"""What tools/preprocess_data.py is made of: input, chunks, workers, and the folder that holds unfinished work."""
