"""Token files: `.bin` and `.idx`, read, written and checked."""
