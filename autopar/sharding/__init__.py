"""Intra-operator planning: the sharding of every value of a step on a logical mesh."""
