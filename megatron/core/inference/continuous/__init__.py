"""Requests that run together: each joins when it comes and leaves when it has ended."""
