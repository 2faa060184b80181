"""The flat jaxpr of a step: its equations, what they are in the step, and how they are run."""
