"""The operator's hands: Kubernetes, HTTP, clocks and tasks."""
