"""Checks of a configuration: what cannot run is rejected before anything starts."""
