"""The npufleet operator: observes, plans, applies."""
