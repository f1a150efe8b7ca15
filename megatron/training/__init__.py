"""The application: arguments, the loop, logs and run folders."""
