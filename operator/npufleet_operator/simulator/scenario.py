"""What is simulated: a pool and its models, as they would be applied, and the traffic that they get.

Annotations say what a resource does not. On an AscendModel:

- `simulate.npufleet.dev/shape`: name of a known shape (default: looked for in the URI, the served name and the resource's name)
- `simulate.npufleet.dev/config`: the model's config.json instead
- `simulate.npufleet.dev/share`: share of the closed loop's requests, any positive number (default 1)
- `simulate.npufleet.dev/input-tokens`, `output-tokens`: means of the log-normal lengths (default 512 and 256)
- `simulate.npufleet.dev/length-sigma`: their spread

On the InferencePool: `simulate.npufleet.dev/nodes` (default 1) and `npus-per-node` (default 8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npufleet_api import API_VERSION, MODEL_KIND, POOL_KIND
from npufleet_api.model import AscendModelSpec
from npufleet_api.pool import InferencePoolSpec
from npufleet_api.profiles import PROFILES, step_limits
from npufleet_operator.core.acceptance import contradiction
from npufleet_operator.core.observed import ModelKey
from npufleet_operator.errors import InputError
from npufleet_operator.simulator.constants import CHIP_LABEL, DEFAULT_DEVICE, DEVICES, LENGTH_SIGMA, Device
from npufleet_operator.simulator.replica import ReplicaLimits
from npufleet_operator.simulator.roofline import Roofline
from npufleet_operator.simulator.shapes import SHAPES, Shape, shape_from_config
from npufleet_operator.simulator.traces import TraceRequest

T = TypeVar("T", bound=BaseModel)
PREFIX = "simulate.npufleet.dev/"
DEFAULT_QUEUE = 256
MAX_FILE_BYTES = 4 * 1024 * 1024


class _ModelHints(BaseModel):
    model_config = ConfigDict(extra="forbid")

    shape: str | None = None
    config: str | None = None
    share: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    input_tokens: Annotated[float, Field(ge=1, le=1e7, allow_inf_nan=False, alias="input-tokens")] = 512
    output_tokens: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False, alias="output-tokens")] = 256
    length_sigma: Annotated[float, Field(ge=0, le=3, allow_inf_nan=False, alias="length-sigma")] = LENGTH_SIGMA


class _PoolHints(BaseModel):
    model_config = ConfigDict(extra="forbid")

    nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    npus_per_node: Annotated[int, Field(ge=1, le=64, alias="npus-per-node")] = 8


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """One AscendModel and what its replicas are."""

    namespace: str
    name: str
    spec: AscendModelSpec
    roofline: Roofline
    limits: ReplicaLimits
    share: float
    input_tokens: float
    output_tokens: float
    length_sigma: float

    @property
    def key(self) -> ModelKey:
        """Namespace and name."""
        return (self.namespace, self.name)

    @property
    def npus(self) -> int:
        """NPUs of one replica."""
        return self.spec.parallelism.npus

    @property
    def concurrency(self) -> int:
        """Requests in flight that one replica holds within its TPOT target, by the roofline."""
        tpot = self.spec.slo.tpot_milliseconds if self.spec.slo else None
        limit = self.limits.max_sequences
        return self.roofline.sequences_within(tpot / 1000 if tpot else None, self.input_tokens, self.output_tokens, limit)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A pool, its nodes and its models, by namespace and name."""

    pool_name: str
    pool: InferencePoolSpec
    nodes: int
    npus_per_node: int
    models: tuple[SimulatedModel, ...]

    @property
    def npus(self) -> int:
        """NPUs of all nodes."""
        return self.nodes * self.npus_per_node

    def with_lengths(self, traces: Mapping[ModelKey, Sequence[TraceRequest]]) -> Scenario:
        """The same with the mean lengths of each model's trace in the place of what its annotations say."""
        means = {
            key: (fmean(r.input_tokens for r in requests), fmean(r.output_tokens for r in requests))
            for key, requests in traces.items()
            if requests
        }
        models = (replace(m, input_tokens=means[m.key][0], output_tokens=means[m.key][1]) if m.key in means else m for m in self.models)
        return replace(self, models=tuple(models))

    def find(self, name: str) -> SimulatedModel:
        """The model called `name` or `namespace/name`. Raises InputError."""
        found = [m for m in self.models if name in (m.name, f"{m.namespace}/{m.name}")]
        if len(found) != 1:
            known = ", ".join(f"{m.namespace}/{m.name}" for m in self.models)
            raise InputError(f"model {name!r} is {'ambiguous' if found else 'unknown'}: choose one of {known}")
        return found[0]


def load_scenario(pool_file: Path, models_file: Path, device: Device | None = None) -> Scenario:
    """The pool of one file and its models of another; both may be the same. Raises InputError."""
    pools = [d for d in _documents(pool_file) if d.get("kind") == POOL_KIND]
    if len(pools) != 1:
        raise InputError(f"{pool_file}: {len(pools)} documents of kind {POOL_KIND}: give a file with exactly one")
    where = str(pool_file)
    pool_name = _name(pools[0], where)
    pool = _parse(InferencePoolSpec, pools[0].get("spec") or {}, f"{where}: spec")
    if problem := contradiction(pool):
        raise InputError(f"{where}: {problem}")
    hints = _parse(_PoolHints, _hints(pools[0], where), f"{where}: metadata.annotations.{PREFIX}")
    chip = pool.npus.node_selector.get(CHIP_LABEL, DEFAULT_DEVICE)
    if device is None and chip not in DEVICES:
        raise InputError(
            f"{where}: spec.npus.nodeSelector: {CHIP_LABEL} {chip!r} has no figures: choose one of {', '.join(sorted(DEVICES))}"
        )
    documents = [d for d in _documents(models_file) if d.get("kind") == MODEL_KIND]
    if not documents:
        raise InputError(f"{models_file}: no document of kind {MODEL_KIND}: give a file with at least one")
    models = [_model(d, str(models_file), pool_name, pool, device or DEVICES[chip], hints.npus_per_node) for d in documents]
    keys = [m.key for m in models]
    doubled = {"/".join(key) for key in keys if keys.count(key) > 1}
    if doubled:
        raise InputError(f"{models_file}: {', '.join(sorted(doubled))} is there more than once: give each model its own name")
    return Scenario(pool_name, pool, hints.nodes, hints.npus_per_node, tuple(sorted(models, key=lambda m: m.key)))


def _model(raw: Mapping[str, Any], where: str, pool_name: str, pool: InferencePoolSpec, device: Device, largest: int) -> SimulatedModel:
    name = _name(raw, where)
    where = f"{where}: {name}"
    spec = _parse(AscendModelSpec, raw.get("spec") or {}, f"{where}: spec")
    if spec.pool_ref.name != pool_name:
        raise InputError(f"{where}: spec.poolRef.name: {spec.pool_ref.name!r} is not the pool {pool_name!r}: give the models of one pool")
    if pool.workload_class(spec.workload_class) is None:
        known = ", ".join(c.name for c in pool.classes)
        raise InputError(f"{where}: spec.workloadClass: the pool has no class {spec.workload_class!r}: choose one of {known}")
    hints = _parse(_ModelHints, _hints(raw, where), f"{where}: metadata.annotations.{PREFIX}")
    roofline = Roofline(device, _shape(hints, spec, name, where), spec.parallelism.npus)
    if roofline.npus > largest:
        raise InputError(f"{where}: spec.parallelism: a replica takes {roofline.npus} NPUs, a node has {largest}: lower it")
    if roofline.npus % pool.npus.unit:
        raise InputError(
            f"{where}: spec.parallelism: a replica takes {roofline.npus} NPU(s), the pool's npus.unit is {pool.npus.unit}: take whole units"
        )
    if roofline.kv_tokens < 1:
        raise InputError(
            f"{where}: spec.parallelism: {roofline.shape.weight_bytes / 1e9:.0f} GB of weights do not fit {roofline.npus} NPU(s) "
            f"of type {device.name}: raise tensor"
        )
    engine = spec.engine
    sequences, tokens = step_limits(engine)
    return SimulatedModel(
        namespace=str((raw.get("metadata") or {}).get("namespace") or "default"),
        name=name,
        spec=spec,
        roofline=roofline,
        limits=ReplicaLimits(
            max_sequences=sequences,
            max_batched_tokens=tokens,
            max_queued=engine.max_queued_requests or DEFAULT_QUEUE,
            chunked_prefill=PROFILES[engine.profile].chunked_prefill if engine.chunked_prefill is None else engine.chunked_prefill,
        ),
        share=hints.share,
        input_tokens=hints.input_tokens,
        output_tokens=hints.output_tokens,
        length_sigma=hints.length_sigma,
    )


def _shape(hints: _ModelHints, spec: AscendModelSpec, name: str, where: str) -> Shape:
    if hints.config is not None:
        return shape_from_config(hints.config, f"{where}: metadata.annotations.{PREFIX}config")
    known = ", ".join(sorted(SHAPES))
    if hints.shape is not None:
        if hints.shape not in SHAPES:
            raise InputError(f"{where}: metadata.annotations.{PREFIX}shape: {hints.shape!r} is unknown: choose one of {known}")
        return SHAPES[hints.shape]
    texts = [text.lower() for text in (spec.model.uri, spec.model.served_name or "", name)]
    for text in texts:
        found = max((shape for shape in SHAPES if shape in text), key=len, default=None)
        if found:
            return SHAPES[found]
    raise InputError(
        f"{where}: the model's shape is not known by its name: set the annotation {PREFIX}shape (one of {known}) or {PREFIX}config "
        "(the model's config.json)"
    )


def _documents(path: Path) -> Sequence[dict[str, Any]]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: larger than {MAX_FILE_BYTES} bytes: give a file of resources")
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())[:300]}: give a YAML file of resources") from error
    found = []
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict):
            raise InputError(f"{path}: a document is no mapping: give a YAML file of resources")
        version = document.get("apiVersion")
        if document.get("kind") in (POOL_KIND, MODEL_KIND) and version != API_VERSION:
            raise InputError(f"{path}: apiVersion: {version!r} is not {API_VERSION}: write that")
        found.append(document)
    return found


def _name(raw: Mapping[str, Any], where: str) -> str:
    metadata = raw.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: metadata.name: missing: name the resource")
    return name


def _hints(raw: Mapping[str, Any], where: str) -> dict[str, str]:
    annotations = (raw.get("metadata") or {}).get("annotations") or {}
    if not isinstance(annotations, dict):
        raise InputError(f"{where}: metadata.annotations: no mapping: write name: value")
    return {str(k).removeprefix(PREFIX): str(v) for k, v in annotations.items() if str(k).startswith(PREFIX)}


def _parse(kind: type[T], raw: object, where: str) -> T:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        join = "" if where.endswith("/") or not field else "."
        raise InputError(f"{where}{join}{field}: {first['msg']} (found {str(first['input'])[:100]!r})") from error
