"""The public models: a module per library, and a function per model that returns its step."""
