"""The gateway: one OpenAI-compatible door per pool. Routes by load, measures what clients get, collects the monitors' reports."""
