"""From a Python training step to a `StepGraph`."""
