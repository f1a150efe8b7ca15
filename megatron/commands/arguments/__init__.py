"""What command lines share: parsers, exit statuses, and the flags of generation."""
