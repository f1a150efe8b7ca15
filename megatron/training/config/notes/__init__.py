"""What is said of flags that do nothing, and of those that are refused."""
