"""The native checkpoint format: described, planned, stored, then published."""
