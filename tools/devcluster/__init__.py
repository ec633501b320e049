"""A real Kubernetes on one machine, without Docker or a VM, with pretend NPUs: for developers, demos and tests."""

from devcluster.cluster import Cluster, get
from devcluster.errors import DevclusterError
from devcluster.lifecycle import down, up
from devcluster.settings import DEV_IMAGE, NpuSettings

__all__ = ["DEV_IMAGE", "Cluster", "DevclusterError", "NpuSettings", "down", "get", "up"]
