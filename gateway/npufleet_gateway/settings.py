"""Settings of the gateway process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from npufleet_api.contract import ENGINE_PORT, GATEWAY_TLS_PORT, MONITOR_PORT
from npufleet_gateway.hedging import HedgePolicy


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """What `npufleet-gateway serve` is told; the rest are defaults that tests shorten."""

    pool: str
    name: str
    """Name of this gateway in its reports: its pod's name."""
    engine_port: int = ENGINE_PORT
    monitor_port: int = MONITOR_PORT
    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout_seconds: float = 60
    """A body that is not there by then is answered 408: also one that comes byte by byte."""
    connect_timeout_seconds: float = 2
    upstream_idle_seconds: float = 600
    """A replica that sends nothing for so long has failed: the longest prefill or unstreamed answer must fit."""
    client_stall_seconds: float = 120
    """A client that reads nothing of its stream for so long is cut off, so that it does not hold a replica."""
    max_attempts: int = 3
    replica_concurrency: int = 256
    """Requests that a replica runs at once, until its reports show better: vLLM's default of max_num_seqs."""
    queue_seconds: float = 30
    """Longest wait for a slot; a request may ask for less."""
    max_queued: int = 1024
    """Requests of one class that wait for one model."""
    hold_seconds: float = 300
    """Longest wait for a model's first replica; 0 refuses at once."""
    heartbeat_seconds: float = 10
    """A held stream hears from the gateway this often."""
    max_held: int = 1024
    """Requests that are held for one model."""
    head_timeout_seconds: float = 10
    """A client that connects and sends no whole head within this is cut off."""
    max_head_bytes: int = 64 * 1024
    keys_dir: Path | None = None
    """Folder of API keys; None asks for none."""
    tls_dir: Path | None = None
    """Folder with tls.crt and tls.key; None serves no TLS."""
    tls_port: int = GATEWAY_TLS_PORT
    tls_only: bool = False
    """Clients are served on the TLS port alone; the plain one has the pages of the cluster's own."""
    access_log: bool = True
    hedging: HedgePolicy | None = None
    """None sends no stream twice."""
    retry_after_seconds: int = 5
    window_seconds: float = 300
    collect_interval_seconds: float = 5
    collect_timeout_seconds: float = 2
    collect_concurrency: int = 64
    leave_seconds: float = 5
    """After SIGTERM the gateway serves on for so long, unready, while endpoints change."""
    grace_seconds: float = 120
    """Then running requests have so long to finish."""
