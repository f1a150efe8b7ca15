"""Communication of linear layers that goes in chunks beside their products."""
