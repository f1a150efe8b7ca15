"""Hugging Face model folders: read as checkpoints, written from them, loaded for use."""
