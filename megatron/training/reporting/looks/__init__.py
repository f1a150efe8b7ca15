"""What looks at the model at intervals while it is trained."""
