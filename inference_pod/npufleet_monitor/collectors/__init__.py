"""Where figures come from: the engine, and npu-exporter."""
