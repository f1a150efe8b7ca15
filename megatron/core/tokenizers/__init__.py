"""One small protocol, one file for each kind of tokenizer."""
