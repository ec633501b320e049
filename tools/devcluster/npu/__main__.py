"""The process that plays the NPUs of the node: `python -m devcluster.npu DATA_DIR`."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from devcluster.files import KUBELET_ROOT
from devcluster.npu import exporter, plugin
from devcluster.npu.owners import Kubelet
from devcluster.paths import Layout
from devcluster.settings import load


async def _forever() -> None:
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    layout = Layout(Path(sys.argv[1]))
    settings = load(layout)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    kubelet = Kubelet(Path(KUBELET_ROOT) / "pod-resources" / "kubelet.sock", settings.npu.resource_name)
    exporter.serve(str(settings.network.node), layout.npu_state, settings.npu, kubelet)
    folder = Path(KUBELET_ROOT) / "device-plugins"
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(plugin.serve(folder, settings.npu, layout.npu_state) if settings.npu.count else _forever())


if __name__ == "__main__":
    main()
