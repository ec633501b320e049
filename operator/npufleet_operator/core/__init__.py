"""Pure planning: from what was observed to what shall be, with a reason for each step. No I/O, no clock, no Kubernetes client."""
