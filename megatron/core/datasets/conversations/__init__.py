"""Conversations to be learnt: read from jsonl, rendered by a chat template, encoded with the mask of their answers."""
