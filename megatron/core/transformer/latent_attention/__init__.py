"""Attention whose keys and values are made of a narrow latent vector."""
