"""Restart without relaunch: dead ranks are replaced, and the others meet them in new process groups."""
