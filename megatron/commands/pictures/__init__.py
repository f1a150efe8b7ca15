"""Commands that show runs: pictures of them, and a page that is live."""
