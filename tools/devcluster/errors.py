"""What devcluster raises: one small hierarchy, every message naming the thing, its value and the remedy."""


class DevclusterError(Exception):
    """Base of everything this package raises on purpose."""


class UnsupportedMachineError(DevclusterError):
    """This machine cannot host the cluster: not Linux, not root, a tool or kernel feature is missing."""


class ConfigError(DevclusterError):
    """A name, a setting or a stored file is not acceptable."""


class BuildError(DevclusterError):
    """A binary could not be found or built."""


class AddressInUseError(DevclusterError):
    """The cluster's address range overlaps one that the host already routes."""


class NotRunningError(DevclusterError):
    """The command needs a running cluster and there is none of that name."""


class ComponentError(DevclusterError):
    """A process of the cluster is unknown, did not start, or did not become healthy in time."""


class CommandError(DevclusterError):
    """A program that devcluster runs (ip, kubectl, ctr, …) failed; the message ends with its output."""
