"""Where saves appear: in a folder by a rename, in an object store by their index."""
