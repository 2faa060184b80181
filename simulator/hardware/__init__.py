"""Descriptions of hardware: clusters, devices and measured profiles, validated YAML files."""
