"""Training from one command: its ranks are started, watched and ended here."""
