"""Pretend Ascend NPUs: a device plugin for the kubelet and an npu-exporter, both driven by one state file."""
