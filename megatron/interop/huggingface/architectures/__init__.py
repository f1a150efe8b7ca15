"""The architectures of Hugging Face models that are read and written, one file each."""
