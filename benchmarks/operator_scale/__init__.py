"""The operator at scale: fake nodes and pods on a real control plane, and a pretend gateway that reports for them."""
