"""Optional accelerated packages, one file each, imported only when asked for."""
