"""Variants for Ascend NPUs (Atlas A2 and A3) by torch_npu's operators. Whoever opens the device imports torch_npu; nothing here does."""
