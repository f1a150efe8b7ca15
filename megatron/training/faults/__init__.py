"""Results that look wrong: how a run finds them, tells their causes apart, and goes on."""
