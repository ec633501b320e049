"""Environments in which code for Ascend NPUs is tested without one: torch_npu over stand-ins for CANN, and the Triton-Ascend compiler."""
