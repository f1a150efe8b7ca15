"""Faults that are planted by patches, and what finds each of them on emulated devices."""
