"""Prometheus exposition text, reduced to the samples that are asked for. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from npufleet_monitor.errors import ScrapeError

MAX_SAMPLES = 100_000


@dataclass(frozen=True, slots=True)
class Sample:
    """One finite value and its labels."""

    labels: dict[str, str]
    value: float


Samples = dict[str, list[Sample]]


def parse(raw: bytes, prefixes: tuple[str, ...]) -> Samples:
    """Samples whose names begin with a prefix, by name. Values that are not finite are left out. Raises ScrapeError.

    Lines of other metrics are dropped before parsing: an engine or an exporter shows hundreds that nobody reads here.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ScrapeError(f"metrics are not UTF-8: {error}") from error
    found: Samples = {}
    wanted = "".join(f"{line}\n" for line in text.split("\n") if line.startswith(prefixes))
    for number, (name, labels, value) in enumerate(_read(wanted), start=1):
        if number > MAX_SAMPLES:
            raise ScrapeError(f"metrics have more than {MAX_SAMPLES} samples")
        if math.isfinite(value):
            found.setdefault(name, []).append(Sample(labels, value))
    return found


def _read(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, dict(sample.labels), float(sample.value)
    except (ValueError, KeyError, IndexError, OverflowError, TypeError, AttributeError) as error:
        raise ScrapeError(f"metrics cannot be parsed: {str(error)[:200]}") from error
