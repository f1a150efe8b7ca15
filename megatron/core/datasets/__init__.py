"""Token files, their indices, blends and samplers."""
