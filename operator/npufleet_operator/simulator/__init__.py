"""Discrete-event simulation of a pool: the operator's own planner, on simulated nodes, pods, gateways and replicas."""
