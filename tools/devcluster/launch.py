"""The step between the host and the cluster: `python -m devcluster.launch DATA_DIR`.

Enters the cluster's cgroups, then becomes `unshare`, whose child is the supervisor in namespaces of its own. The
kernel ends everything in a process-id namespace with its first process, and that one ends with `unshare`: killing
either leaves no process, and with the processes go their mounts, links and iptables rules.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from devcluster import cgroups
from devcluster.paths import Layout
from devcluster.run import run


def start_time(process_id: int) -> int:
    """Start time of a process in clock ticks since boot (field 22 of /proc/PID/stat, proc(5)); OSError if gone."""
    stat = Path(f"/proc/{process_id}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])


def launch(layout: Layout) -> None:
    """Start this module as a daemon; `layout.launcher` appears once it is in the cluster's cgroups."""
    layout.launcher.unlink(missing_ok=True)
    log = layout.log / "supervisor.log"
    script = 'exec "$0" -m devcluster.launch "$1" </dev/null >>"$2" 2>&1'
    # setsid forks and returns: the daemon belongs to the machine's init, not to a test run or a shell.
    run(["setsid", "--fork", "/bin/sh", "-c", script, sys.executable, layout.root, log], cwd=layout.root)


def main() -> None:
    """Replace this process by the cluster's first one."""
    layout = Layout(Path(sys.argv[1]))
    cgroups.enter(layout.group, os.getpid(), cgroups.hierarchies())
    identity = {"pid": os.getpid(), "start_time": start_time(os.getpid())}
    partial = layout.launcher.with_suffix(".new")
    partial.write_text(json.dumps(identity))
    partial.replace(layout.launcher)
    for variable in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[variable]  # the components talk to each other only, and no proxy knows their addresses
    host_network = os.open("/proc/self/ns/net", os.O_RDONLY)
    os.set_inheritable(host_network, True)
    namespaces = ("--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup")
    supervisor = (sys.executable, "-m", "devcluster.supervisor", str(layout.root), str(host_network))
    command = ("unshare", *namespaces, "--fork", "--kill-child", "--mount-proc", *supervisor)
    os.execvp("unshare", command)  # noqa: S606 -- a fixed command, and no shell is wanted


if __name__ == "__main__":
    main()
