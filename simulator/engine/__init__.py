"""Simulation of programs: the event engine, its fast forms, timelines and predictions."""
