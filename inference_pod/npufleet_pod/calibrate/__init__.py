"""Measures a model on a device and writes what serving it takes from that."""
