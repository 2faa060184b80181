"""Analyses of a plan over its step: sharding propagation, reshardings, costs and reasons."""
