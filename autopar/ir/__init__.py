"""Intermediate representation of a step: one flat jaxpr, its evaluation, and sharding specs."""
