"""The monitoring sidecar of an inference pod: reads its engine and NPUs, raises alerts, reports. Imports neither torch nor Kubernetes."""
