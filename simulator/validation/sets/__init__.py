"""One module per origin of published numbers."""
