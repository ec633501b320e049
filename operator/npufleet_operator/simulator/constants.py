"""Every constant of the replica model, with its unit and its source. Written down before results were read; not tuned to them.

Sources: MM = Huawei's modelling tool Ascend/msmodeling, `tensor_cast/device.py` at 1e5a50b1 (profile ATLAS_800_A2_313T_64G for the 910B3),
whose efficiencies are its own defaults, "something we need to calibrate". Where no source was found the constant says "assumption".
A calibration file replaces the efficiencies and times of a device (see `calibration.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One NPU, and its links to the others of its node."""

    name: str
    fp16_flops: float
    """Peak, operations per second."""
    hbm_bytes: float
    hbm_bytes_per_second: float
    """Peak."""
    link_bytes_per_second: float = 196e9
    """HCCS, one way (MM, A2_INTERCONNECT)."""
    compute_efficiency: float = 0.7
    """Share of the peak that matrix products reach (MM)."""
    memory_efficiency: float = 0.6
    """Share of the peak that reads of weights and KV reach (MM)."""
    link_efficiency: float = 0.7
    """Share of the peak that collectives reach (MM)."""
    link_latency_seconds: float = 0.5e-6
    """Of one message (MM, A2_INTERCONNECT, full mesh)."""
    matrix_op_seconds: float = 5e-6
    """Start of one matrix product (MM, STATIC_COST.mma_op_cost_s)."""
    vector_op_seconds: float = 2e-6
    """Start of one vector operation (MM, STATIC_COST.gp_op_cost_s)."""
    collective_op_seconds: float = 10e-6
    """Start of one collective (MM, STATIC_COST.comm_op_cost_s)."""
    host_step_seconds: float = 200e-6
    """Gap between two steps, with the next one prepared while this one runs (xLLM's documents: about 200 µs)."""


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("910B2", fp16_flops=376e12, hbm_bytes=64 * 2**30, hbm_bytes_per_second=1.6e12),
        Device("910B3", fp16_flops=313e12, hbm_bytes=64 * 2**30, hbm_bytes_per_second=1.6e12),
        Device("910B4", fp16_flops=280e12, hbm_bytes=32 * 2**30, hbm_bytes_per_second=0.8e12),
    )
}
"""By the value of the node label node.kubernetes.io/npu.chip.name. Peaks and sizes: MM; 1.6 TB/s is read as 10^12, the careful way."""

DEFAULT_DEVICE = "910B3"
CHIP_LABEL = "node.kubernetes.io/npu.chip.name"

BYTES_PER_PARAMETER = 2
"""FP16 and BF16."""
MATRIX_OPS_PER_LAYER = 5
"""Projections to Q, K and V in one, attention, output projection, gate and up in one, down."""
VECTOR_OPS_PER_LAYER = 6
"""Two norms with their residuals, rotary embedding, KV write, activation, and one more for layout."""
COLLECTIVES_PER_LAYER = 2
"""All-reduce after attention and after feed-forward, where tensor parallel."""

HBM_USABLE_SHARE = 0.9
"""Of device memory, for weights and KV (vLLM's gpu_memory_utilization)."""
HBM_RESERVED_BYTES = 3.4e9
"""Taken on an idle 910B: 2.9 to 3.4 GB in samples of npu-smi."""

POD_START_SECONDS = 5.0
"""From creation to a started engine: scheduling, volume, container. Assumption."""
ENGINE_START_SECONDS = 30.0
"""From a started engine to one that is ready, besides reading the weights: imports, device, graphs. Assumption."""
WEIGHT_BYTES_PER_SECOND = 2e9
"""Reading weights from a volume on local NVMe. Assumption."""
POD_STOP_SECONDS = 1.0
"""From the deletion of an idle pod until its NPUs are free. Assumption."""

HOLD_SECONDS = 120.0
"""How long a gateway holds a request that no replica can take. Assumption."""
RETRY_AFTER_SECONDS = 1.0
"""How long a client waits after a refusal for lack of capacity: the Retry-After of engine and gateway."""
REPORT_SECONDS = 5.0
"""Age that a gateway's report may reach before it is fetched again; the operator's own interval."""
MONITOR_WINDOW_SECONDS = 60.0
"""Window of a replica's own figures."""

LENGTH_SIGMA = 0.5
"""Spread of log-normal lengths where a model says none: the logarithm's standard deviation. Assumption."""

AUTOSCALER_TARGET_SHARE = 0.7
"""HPA and KPA scale on requests in flight per replica, towards this share of what a replica can hold within its SLO. 70 % is Knative's
default (container-concurrency-target-percentage); HPA has no default and gets the same."""
