"""Models of Hugging Face: families, their settings, weights and tokenizers."""
