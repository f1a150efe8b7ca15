"""Index arrays: which documents make up a sample, and which data set a blend reads next."""
