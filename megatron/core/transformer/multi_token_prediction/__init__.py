"""Layers behind a model that predict tokens beyond the next."""
