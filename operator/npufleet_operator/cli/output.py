"""What the commands share: tables, and errors as one line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from npufleet_operator.errors import OperatorError

F = TypeVar("F", bound=Callable[..., Any])


def friendly(command: F) -> F:
    """Errors of npufleet end the command with status 1 and one line on stderr."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except OperatorError as error:
            raise click.ClickException(str(error)) from error

    return guarded  # type: ignore[return-value]  # wraps keeps the signature


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest entry, three spaces apart, as kubectl prints them."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    return "\n".join(lines)
