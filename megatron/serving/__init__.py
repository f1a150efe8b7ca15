"""Text generation as a library and over HTTP."""
