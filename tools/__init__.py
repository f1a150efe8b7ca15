"""Commands around training; each is a script."""
