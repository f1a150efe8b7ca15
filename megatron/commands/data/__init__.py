"""Commands that make data sets of text and look into them."""
