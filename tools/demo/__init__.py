"""The demo: a real Kubernetes on this machine, npufleet installed on it, and one served model."""
