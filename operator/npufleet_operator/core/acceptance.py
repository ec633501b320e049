"""Whether a model can be served as it asks: an ordered chain of checks, the first refusal wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from npufleet_api.conditions import Reason
from npufleet_api.model import AscendModelSpec, RuntimeName, SourceStatus
from npufleet_api.pool import InferencePoolSpec, NamespaceSelector, SelectorRequirement, WorkloadClass
from npufleet_api.precision import KvCacheDtype
from npufleet_api.sources import BUCKETS, COMMIT, FETCHED, HUBS, ModelUri, Scheme, is_allowed, is_pinned, parse_uri
from npufleet_operator.core.capacity import selects
from npufleet_operator.core.observed import ModelView, OperatorConfig, PoolView
from npufleet_operator.core.vllm_arguments import fields_without_effect, vllm_refusal


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a model is not served as it asks, and what to write instead."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Application:
    """A model that could be parsed, beside the pool that it asks for."""

    model: ModelView
    spec: AscendModelSpec
    pool_name: str
    pool: InferencePoolSpec
    namespaces: Mapping[str, Mapping[str, str]]
    config: OperatorConfig


Check = Callable[[Application], Refusal | None]


def judge(model: ModelView, pool: PoolView | None, namespaces: Mapping[str, Mapping[str, str]], config: OperatorConfig) -> Refusal | None:
    """None if the model is accepted."""
    if model.spec is None:
        return Refusal(Reason.SPEC_REFUSED, model.spec_error)
    if pool is None:
        return Refusal(
            Reason.POOL_NOT_FOUND,
            f"spec.poolRef.name: there is no InferencePool {model.pool_name!r}; create it or name another (kubectl get npool). "
            "What runs is kept as it is",
        )
    if pool.spec is None:
        return Refusal(Reason.POOL_REFUSED, f"InferencePool {pool.name!r} has a spec that cannot be used: {pool.spec_error}")
    application = Application(model, model.spec, pool.name, pool.spec, namespaces, config)
    return next((refusal for check in CHECKS if (refusal := check(application))), None)


def _class_exists(a: Application) -> Refusal | None:
    if a.pool.workload_class(a.spec.workload_class):
        return None
    names = ", ".join(sorted(c.name for c in a.pool.classes))
    return Refusal(
        Reason.CLASS_NOT_FOUND,
        f"spec.workloadClass: pool {a.pool_name!r} has no class {a.spec.workload_class!r}; choose one of: {names}",
    )


def _namespace_allowed(a: Application) -> Refusal | None:
    workload_class = a.pool.workload_class(a.spec.workload_class)
    if workload_class is None or _matches(workload_class.namespace_selector, a.namespaces.get(a.model.namespace, {})):
        return None
    return Refusal(
        Reason.NAMESPACE_NOT_ALLOWED,
        f"spec.workloadClass: namespace {a.model.namespace!r} may not claim class {workload_class.name!r} of pool {a.pool_name!r}; "
        "choose another class, or ask the pool's owner to widen its namespaceSelector",
    )


def _runtime_image(a: Application) -> Refusal | None:
    if a.spec.runtime.name is RuntimeName.NATIVE:
        return None
    image, allowed = a.spec.runtime.image, a.pool.pod_template.allowed_images
    if (image is None and len(allowed) == 1) or image in allowed:
        return None
    if not allowed:
        return Refusal(
            Reason.IMAGE_NOT_ALLOWED,
            f"spec.runtime.name: VLLMAscend needs an image of vllm-ascend, and pool {a.pool_name!r} allows none; ask its owner to add one "
            "to spec.podTemplate.allowedImages, or set it to Native",
        )
    what = f"{image} is none of the images" if image else "there are several images"
    return Refusal(
        Reason.IMAGE_NOT_ALLOWED,
        f"spec.runtime.image: {what} that pool {a.pool_name!r} allows; set it to one of: {', '.join(allowed[:5])}",
    )


def _runtime_able(a: Application) -> Refusal | None:
    if a.spec.runtime.name is RuntimeName.NATIVE:
        return None
    refused = vllm_refusal(a.spec, a.pool.pod_template.device)
    return Refusal(Reason.RUNTIME_UNABLE, refused) if refused else None


def _parallelism_implemented(a: Application) -> Refusal | None:
    if a.spec.parallelism.pipeline == 1 or a.spec.runtime.name is RuntimeName.VLLM_ASCEND:
        return None
    return Refusal(
        Reason.NOT_IMPLEMENTED,
        f"spec.parallelism.pipeline: {a.spec.parallelism.pipeline} is not implemented yet; set it to 1, and raise tensor instead",
    )


def _whole_units(a: Application) -> Refusal | None:
    npus, unit = a.spec.parallelism.npus, a.pool.npus.unit
    if npus % unit == 0:
        return None
    more = npus + unit - npus % unit
    fewer = f"{npus - npus % unit} or " if npus > unit else ""
    return Refusal(
        Reason.PART_OF_UNIT,
        f"spec.parallelism: one replica takes {npus} NPU(s), and pool {a.pool_name!r} hands out whole units of {unit} (npus.unit): "
        f"choose a tensor by which it takes {fewer}{more}",
    )


def _source_understood(a: Application) -> Refusal | None:
    # The CRD's rules say it first; an address that the pod could not use must not reach it from an older CRD either.
    try:
        uri = parse_uri(a.spec.model.uri)
    except ValueError as error:
        return Refusal(Reason.SPEC_REFUSED, f"spec.model.uri: {error}")
    default = a.pool.models.endpoint(uri.scheme)
    region = a.spec.model.region or (default.region if default else None)
    if uri.scheme is Scheme.OBS and not (region or a.spec.model.endpoint or default):
        return Refusal(
            Reason.SPEC_REFUSED, "spec.model.region: obs:// needs a region, or an endpoint: set spec.model.region or spec.model.endpoint"
        )
    return None


def _source_allowed(a: Application) -> Refusal | None:
    policy, model = a.pool.models, a.spec.model
    uri = parse_uri(model.uri)
    if not is_allowed(uri, policy.allowed_sources):
        return Refusal(
            Reason.SOURCE_NOT_ALLOWED,
            f"spec.model.uri: {uri} is none of the sources that pool {a.pool_name!r} allows ({', '.join(policy.allowed_sources[:5])}); "
            "choose one of them, or ask the pool's owner to add it to spec.models.allowedSources",
        )
    if policy.allowed_sources and model.endpoint and model.endpoint not in {e.url for e in policy.endpoints}:
        return Refusal(
            Reason.SOURCE_NOT_ALLOWED,
            f"spec.model.endpoint: {model.endpoint} is no endpoint of pool {a.pool_name!r}, which allows certain sources only; remove it",
        )
    if policy.require_pinned and uri.scheme is not Scheme.VOLUME and not is_pinned(uri, model.revision, model.digest):
        return Refusal(
            Reason.SOURCE_NOT_ALLOWED,
            f"spec.model.revision: pool {a.pool_name!r} serves pinned models only; {pin_advice(uri, a.model.status.source)}",
        )
    return None


def pin_advice(uri: ModelUri, source: SourceStatus | None) -> str:
    """How to pin what is served now."""
    if uri.scheme is Scheme.OCI:
        return "name the image by its digest: oci://REGISTRY/NAME@sha256:DIGEST"
    if source is not None and COMMIT.fullmatch(source.revision):
        return f"set spec.model.revision to {source.revision}"
    if source is not None and source.digest:
        return f"set spec.model.digest to {source.digest}"
    return "set spec.model.revision to a commit" if uri.scheme in HUBS else "set spec.model.digest"


def _disk_cache_behind_memory(a: Application) -> Refusal | None:
    # The CRD's rule says it first; settings that the engine would refuse must not reach it from an older CRD either.
    engine = a.spec.engine
    if not engine.disk_cache_mi or engine.host_cache_mi:
        return None
    return Refusal(
        Reason.SPEC_REFUSED,
        f"spec.engine.diskCacheMi: {engine.disk_cache_mi} needs spec.engine.hostCacheMi, through which KV reaches the disk; "
        "set both or neither",
    )


def _int8_heads_are_named(a: Application) -> Refusal | None:
    engine = a.spec.engine
    if engine.precision is None or engine.precision.kv_cache is not KvCacheDtype.INT8_HEADS or engine.calibration_ref is not None:
        return None
    return Refusal(
        Reason.SPEC_REFUSED,
        "spec.engine.precision.kvCache: Int8Heads needs spec.engine.calibrationRef, which names the heads; set it, or choose Int8 or Auto",
    )


def _engine_image(a: Application) -> Refusal | None:
    fetched = a.spec.runtime.name is RuntimeName.NATIVE or parse_uri(a.spec.model.uri).fetched
    if not fetched or a.pool.pod_template.images.engine or a.config.engine_image:
        return None
    return Refusal(
        Reason.ENGINE_IMAGE_MISSING,
        f"pool {a.pool_name!r} has no engine image: set spec.podTemplate.images.engine there, or image.engine in the chart's values",
    )


CHECKS: tuple[Check, ...] = (
    _class_exists,
    _namespace_allowed,
    _runtime_image,
    _runtime_able,
    _parallelism_implemented,
    _whole_units,
    _source_understood,
    _source_allowed,
    _disk_cache_behind_memory,
    _int8_heads_are_named,
    _engine_image,
)


def _matches(selector: NamespaceSelector, labels: Mapping[str, str]) -> bool:
    return selects(selector.match_labels, labels) and all(_meets(r, labels) for r in selector.match_expressions)


def _meets(requirement: SelectorRequirement, labels: Mapping[str, str]) -> bool:
    present = requirement.key in labels
    value = labels.get(requirement.key)
    match requirement.operator:
        case "In":
            return present and value in requirement.values
        case "NotIn":
            return not present or value not in requirement.values
        case "Exists":
            return present
        case _:
            return not present


def names_taken(models: Sequence[ModelView]) -> dict[str, ModelView]:
    """Who keeps each served name: the oldest model, then the first by namespace and name."""
    keepers: dict[str, ModelView] = {}
    for model in sorted(models, key=lambda m: (m.created, m.key)):
        keepers.setdefault(model.served_name, model)
    return keepers


def model_fields_without_effect(spec: AscendModelSpec) -> list[str]:
    """Fields that are set and that this release stores, but does not act on."""
    scheme, model = spec.model.uri.partition("://")[0], spec.model
    fields = []
    if model.revision is not None and scheme not in HUBS:
        fields.append(f"model.revision ({scheme}:// has no revisions)")
    if model.secret_ref is not None and scheme == Scheme.VOLUME:
        fields.append("model.secretRef (a volume needs no credentials)")
    if scheme not in FETCHED:
        given = {"endpoint": model.endpoint, "files": model.files, "digest": model.digest}
        fields += [f"model.{name} ({scheme}:// is mounted as it is)" for name, value in given.items() if value]
    if model.region is not None and scheme not in BUCKETS:
        fields.append(f"model.region ({scheme}:// has no regions)")
    if spec.runtime.name is RuntimeName.VLLM_ASCEND:
        fields += fields_without_effect(spec)
    return fields


def contradiction(spec: InferencePoolSpec) -> str:
    """What in a pool's spec excludes itself, with field and remedy; empty where nothing does. The CRD's rules say it first: this is for
    pools that were stored under a CRD without them."""
    names = [c.name for c in spec.classes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return f"spec.classes: class {twice[0]!r} is there {names.count(twice[0])} times; keep one of them"
    for c in spec.classes:
        if c.min_percent > c.max_percent:
            below = f"minPercent {c.min_percent} of class {c.name!r} is above its maxPercent {c.max_percent}"
            return f"spec.classes: {below}; lower or raise one"
    total = sum(c.min_percent for c in spec.classes)
    if total > 100:
        return f"spec.classes: minPercent of all classes add up to {total}; lower some, a pool cannot guarantee more than it has"
    return ""


def class_bounds(workload_class: WorkloadClass, nominal: int) -> tuple[int, int]:
    """Guarantee and ceiling of a class in NPUs; both round down."""
    return nominal * workload_class.min_percent // 100, nominal * workload_class.max_percent // 100
