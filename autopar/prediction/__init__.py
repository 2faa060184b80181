"""Analytic and compiled programs of plans, and their simulation on clusters."""
