"""Elastic scaling: how many replicas a model wants, and why. Pure."""
