"""Simulation of programs: the event engine, its fast forms, and the timelines and predictions it returns."""
