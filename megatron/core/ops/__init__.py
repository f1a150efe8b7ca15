"""Operators: what computes one thing quickly, each beside its plain torch twin, and fp8 operands."""
