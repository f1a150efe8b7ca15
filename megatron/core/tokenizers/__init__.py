"""Tokenizers: one small protocol, one file a kind."""
