"""Errors of the kernels."""

from __future__ import annotations


class KernelError(Exception):
    """Base of every error that npufleet_kernels raises on its own."""


class VariantMissingError(KernelError):
    """An operation has no variant for the device, or not the one that was asked for."""


class BuildError(KernelError):
    """The CPU kernels could not be compiled. The message says what is missing, or what the compiler said first."""


class UnsupportedCallError(KernelError):
    """A device's operator is documented not to take such arguments: it was not called."""
