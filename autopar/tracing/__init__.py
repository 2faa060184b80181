"""Tracing: from a Python training step to a `StepGraph`."""
