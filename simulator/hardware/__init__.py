"""Descriptions of hardware: clusters, devices and measured profiles, read from YAML files and validated."""
