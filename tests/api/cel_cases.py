"""What the API server accepts and refuses: for every CEL rule and every bound of both specs, what just passes and what just does not.

Each case is (name, object, part of the message, or None when the object is accepted). Names read `PLURAL PATH RULE accepted|refused`; `[]`
in a path stands for an item of a list, `{}` for a value of a map. `test_cel_cases.py` holds that no rule of the CRDs is left out; the
end-to-end tests send every case to a real API server with `dryRun: All`.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from npufleet_api import API_VERSION, MODEL_KIND, MODEL_PLURAL, POOL_KIND, POOL_PLURAL

Object = dict[str, Any]


class Case(NamedTuple):
    """One object and what the API server says to it."""

    name: str
    object: Object
    message: str | None


class Field(NamedTuple):
    """Bounds of one field. `at` is where the value goes, `field` how the rule is named; `wrap` puts the value into what holds it."""

    field: str
    at: str
    value: Any
    """A value within every bound."""
    low: int | None = None
    high: int | None = None
    wrong: Any = None
    """A value of the right type that the pattern or the enum refuses."""
    wrap: Any = None
    """A list or map in which `VALUE` stands for the value."""


VALUE = object()

POOL: Object = {
    "apiVersion": API_VERSION,
    "kind": POOL_KIND,
    "metadata": {"name": "case"},
    "spec": {
        "npus": {"resourceName": "huawei.com/Ascend910"},
        "classes": [{"name": "chat", "priority": 1, "minPercent": 0, "maxPercent": 100}],
    },
}
MODEL: Object = {
    "apiVersion": API_VERSION,
    "kind": MODEL_KIND,
    "metadata": {"name": "case", "namespace": "default"},
    "spec": {
        "poolRef": {"name": "prod"},
        "workloadClass": "chat",
        "model": {"uri": "pvc://weights/case"},
    },
}

_DNS_WRONG = "Upper_Case"
LABEL_WRONG = "-leading-dash"


def _names(prefix: str, count: int) -> list[Object]:
    return [{"name": f"{prefix}{index}"} for index in range(count)]


_MIRROR = {"scheme": "hf", "url": "https://hub.example.com"}
_PARENT = {"parentRefs": [{"name": "public"}]}

POOL_FIELDS: tuple[Field, ...] = (
    Field("spec.mode", "spec.mode", "Advisory", wrong="Passive"),
    Field("spec.npus.resourceName", "spec.npus.resourceName", "example.com/npu", 1, 253, wrong="not a name"),
    Field("spec.npus.nodeSelector", "spec.npus.nodeSelector", {"a": "b"}, high=32),
    Field("spec.npus.nodeSelector{}", "spec.npus.nodeSelector", "910B3", wrap={"chip": VALUE}, high=63, wrong=LABEL_WRONG),
    Field("spec.npus.unit", "spec.npus.unit", 2, 1, 16),
    Field("spec.classes", "spec.classes", _names("class", 2), 1, 16),
    Field("spec.classes[].name", "spec.classes.0.name", "chat", 1, 63, wrong=_DNS_WRONG),
    Field("spec.classes[].priority", "spec.classes.0.priority", 3, 0, 1000),
    Field("spec.classes[].minPercent", "spec.classes.0.minPercent", 20, 0, 100),
    Field("spec.classes[].maxPercent", "spec.classes.0.maxPercent", 50, 0, 100),
    Field(
        "spec.classes[].namespaceSelector.matchLabels", "spec.classes.0.namespaceSelector", {"a": "b"}, high=32, wrap={"matchLabels": VALUE}
    ),
    Field(
        "spec.classes[].namespaceSelector.matchLabels{}",
        "spec.classes.0.namespaceSelector",
        "chat",
        wrap={"matchLabels": {"team": VALUE}},
        high=63,
        wrong=LABEL_WRONG,
    ),
    Field(
        "spec.classes[].namespaceSelector.matchExpressions",
        "spec.classes.0.namespaceSelector",
        [{"key": "team", "operator": "Exists"}],
        high=16,
        wrap={"matchExpressions": VALUE},
    ),
    Field("spec.classes[].claimable", "spec.classes.0.claimable", True),
    Field(
        "spec.classes[].namespaceSelector.matchExpressions[].key",
        "spec.classes.0.namespaceSelector",
        "example.com/team",
        1,
        317,
        wrong="not a key",
        wrap={"matchExpressions": [{"key": VALUE, "operator": "Exists"}]},
    ),
    Field(
        "spec.classes[].namespaceSelector.matchExpressions[].operator",
        "spec.classes.0.namespaceSelector",
        "NotIn",
        wrong="Near",
        wrap={"matchExpressions": [{"key": "team", "operator": VALUE}]},
    ),
    Field(
        "spec.classes[].namespaceSelector.matchExpressions[].values",
        "spec.classes.0.namespaceSelector",
        ["a"],
        high=64,
        wrap={"matchExpressions": [{"key": "team", "operator": "In", "values": VALUE}]},
    ),
    Field(
        "spec.classes[].namespaceSelector.matchExpressions[].values[]",
        "spec.classes.0.namespaceSelector",
        "a",
        wrap={"matchExpressions": [{"key": "team", "operator": "In", "values": [VALUE]}]},
        high=63,
        wrong=LABEL_WRONG,
    ),
    Field("spec.rebalancing.intervalSeconds", "spec.rebalancing.intervalSeconds", 15, 1, 3600),
    Field("spec.rebalancing.cooldownSeconds", "spec.rebalancing.cooldownSeconds", 120, 0, 86400),
    Field("spec.rebalancing.drainSeconds", "spec.rebalancing.drainSeconds", 120, 1, 3600),
    Field("spec.rebalancing.reclaim", "spec.rebalancing.reclaim", "Never", wrong="Always"),
    Field("spec.rebalancing.borrowing", "spec.rebalancing.borrowing", "ByPriority", wrong="ByLot"),
    Field("spec.podTemplate.device", "spec.podTemplate.device", "CPU", wrong="GPU"),
    Field("spec.podTemplate.images.engine", "spec.podTemplate.images.engine", "engine:1", 1, 512, wrong="two words"),
    Field("spec.podTemplate.images.monitor", "spec.podTemplate.images.monitor", "monitor:1", 1, 512, wrong="two words"),
    Field("spec.podTemplate.allowedImages", "spec.podTemplate.allowedImages", ["registry.example.com/vllm:1"], high=32),
    Field("spec.podTemplate.allowedImages[]", "spec.podTemplate.allowedImages", "vllm:1", 1, 512, wrong="two words", wrap=[VALUE]),
    Field("spec.podTemplate.runtimeClassName", "spec.podTemplate.runtimeClassName", "ascend", 1, 253, wrong=_DNS_WRONG),
    Field("spec.podTemplate.tolerations", "spec.podTemplate.tolerations", [{"operator": "Exists"}], high=16),
    Field("spec.podTemplate.tolerations[].key", "spec.podTemplate.tolerations", "npu", 1, 317, wrong="not a key", wrap=[{"key": VALUE}]),
    Field("spec.podTemplate.tolerations[].operator", "spec.podTemplate.tolerations", "Exists", wrong="Near", wrap=[{"operator": VALUE}]),
    Field(
        "spec.podTemplate.tolerations[].value",
        "spec.podTemplate.tolerations",
        "yes",
        wrap=[{"key": "npu", "value": VALUE}],
        high=63,
        wrong=LABEL_WRONG,
    ),
    Field(
        "spec.podTemplate.tolerations[].effect",
        "spec.podTemplate.tolerations",
        "NoExecute",
        wrong="NoService",
        wrap=[{"key": "npu", "effect": VALUE}],
    ),
    Field(
        "spec.podTemplate.tolerations[].tolerationSeconds",
        "spec.podTemplate.tolerations",
        60,
        0,
        86400,
        wrap=[{"key": "npu", "tolerationSeconds": VALUE}],
    ),
    Field("spec.podTemplate.nodeSelector", "spec.podTemplate.nodeSelector", {"a": "b"}, high=32),
    Field("spec.podTemplate.nodeSelector{}", "spec.podTemplate.nodeSelector", "b", wrap={"a": VALUE}, high=63, wrong=LABEL_WRONG),
    Field("spec.podTemplate.schedulerName", "spec.podTemplate.schedulerName", "volcano", 1, 253, wrong=_DNS_WRONG),
    Field("spec.podTemplate.priorityClassName", "spec.podTemplate.priorityClassName", "serving", 1, 253, wrong=_DNS_WRONG),
    Field("spec.podTemplate.supplementalGroups", "spec.podTemplate.supplementalGroups", [1000], high=16),
    Field("spec.podTemplate.supplementalGroups[]", "spec.podTemplate.supplementalGroups", 1000, 1, 2147483647, wrap=[VALUE]),
    Field("spec.podTemplate.shmSizeMi", "spec.podTemplate.shmSizeMi", 1024, 16, 1048576),
    Field("spec.podTemplate.env", "spec.podTemplate.env", [{"name": "A"}], high=64),
    Field("spec.podTemplate.env[].name", "spec.podTemplate.env", "HCCL_BUFFSIZE", 1, 253, wrong="1ST", wrap=[{"name": VALUE}]),
    Field("spec.podTemplate.env[].value", "spec.podTemplate.env", "200", high=1024, wrap=[{"name": "A", "value": VALUE}]),
    Field(
        "spec.podTemplate.driverVolumes",
        "spec.podTemplate.driverVolumes",
        [{"name": "dcmi", "hostPath": "/usr/local/dcmi", "mountPath": "/usr/local/dcmi"}],
        high=16,
    ),
    Field(
        "spec.podTemplate.driverVolumes[].name",
        "spec.podTemplate.driverVolumes",
        "dcmi",
        1,
        63,
        wrong=_DNS_WRONG,
        wrap=[{"name": VALUE, "hostPath": "/usr/local/dcmi", "mountPath": "/usr/local/dcmi"}],
    ),
    Field(
        "spec.podTemplate.driverVolumes[].hostPath",
        "spec.podTemplate.driverVolumes",
        "/usr/local/dcmi",
        2,
        512,
        wrong="usr/local/dcmi",
        wrap=[{"name": "dcmi", "hostPath": VALUE, "mountPath": "/usr/local/dcmi"}],
    ),
    Field(
        "spec.podTemplate.driverVolumes[].mountPath",
        "spec.podTemplate.driverVolumes",
        "/usr/local/dcmi",
        2,
        512,
        wrong="/usr/local:ro",
        wrap=[{"name": "dcmi", "hostPath": "/usr/local/dcmi", "mountPath": VALUE}],
    ),
    Field("spec.podTemplate.imagePullSecrets", "spec.podTemplate.imagePullSecrets", ["pull"], high=8),
    Field("spec.podTemplate.imagePullSecrets[]", "spec.podTemplate.imagePullSecrets", "pull", 1, 253, wrong=_DNS_WRONG, wrap=[VALUE]),
    Field("spec.gateway.mode", "spec.gateway.mode", "External", wrong="Both"),
    Field("spec.gateway.inferenceGatewayNamespaces", "spec.gateway.inferenceGatewayNamespaces", ["istio"], high=8),
    Field(
        "spec.gateway.inferenceGatewayNamespaces[]",
        "spec.gateway.inferenceGatewayNamespaces",
        "istio",
        1,
        63,
        wrong=_DNS_WRONG,
        wrap=[VALUE],
    ),
    Field("spec.gateway.httpRoute.parentRefs", "spec.gateway.httpRoute.parentRefs", [{"name": "public"}], 1, 8),
    Field("spec.gateway.httpRoute.parentRefs[].name", "spec.gateway.httpRoute.parentRefs", "public", 1, 253, _DNS_WRONG, [{"name": VALUE}]),
    Field(
        "spec.gateway.httpRoute.parentRefs[].namespace",
        "spec.gateway.httpRoute.parentRefs",
        "ingress",
        1,
        63,
        _DNS_WRONG,
        [{"name": "public", "namespace": VALUE}],
    ),
    Field(
        "spec.gateway.httpRoute.parentRefs[].sectionName",
        "spec.gateway.httpRoute.parentRefs",
        "https",
        1,
        253,
        _DNS_WRONG,
        [{"name": "public", "sectionName": VALUE}],
    ),
    Field("spec.gateway.httpRoute.hostnames", "spec.gateway.httpRoute", ["a.example"], high=16, wrap={**_PARENT, "hostnames": VALUE}),
    Field(
        "spec.gateway.httpRoute.hostnames[]", "spec.gateway.httpRoute", "a.example", 1, 253, _DNS_WRONG, {**_PARENT, "hostnames": [VALUE]}
    ),
    Field("spec.models.allowedSources", "spec.models.allowedSources", ["hf://Qwen/*"], high=64),
    Field("spec.models.allowedSources[]", "spec.models.allowedSources", "hf://Qwen/*", 6, 512, wrong="https://example.com", wrap=[VALUE]),
    Field("spec.models.requirePinned", "spec.models.requirePinned", True),
    Field("spec.models.allowPickle", "spec.models.allowPickle", True),
    Field("spec.models.endpoints", "spec.models.endpoints", [_MIRROR], high=4),
    Field("spec.models.endpoints[].scheme", "spec.models.endpoints", "hf", wrong="oci", wrap=[{"scheme": VALUE, "url": "https://a.bc"}]),
    Field(
        "spec.models.endpoints[].url", "spec.models.endpoints", "https://a.bc", 8, 253, "ftp://a.bc", wrap=[{"scheme": "hf", "url": VALUE}]
    ),
    Field("spec.models.endpoints[].region", "spec.models.endpoints", "cn-1", 1, 63, "CN 1", wrap=[{**_MIRROR, "region": VALUE}]),
    Field("spec.models.cache.hostPath", "spec.models.cache.hostPath", "/var/lib/models", 2, 512, wrong="relative"),
    Field("spec.models.cache.claimName", "spec.models.cache.claimName", "models", 1, 253, wrong=_DNS_WRONG),
    Field("spec.models.cache.sizeLimitGi", "spec.models.cache", 500, 1, 1048576, wrap={"claimName": "models", "sizeLimitGi": VALUE}),
    Field("spec.models.preload.mode", "spec.models.preload.mode", "Off", wrong="Always"),
    Field("spec.models.preload.priorityClassName", "spec.models.preload.priorityClassName", "low", 1, 253, wrong=_DNS_WRONG),
    Field("spec.models.preload.timeoutSeconds", "spec.models.preload.timeoutSeconds", 600, 60, 604800),
    Field("spec.gateway.replicas", "spec.gateway.replicas", 2, 1, 64),
    Field("spec.gateway.queueSeconds", "spec.gateway.queueSeconds", 5, 1, 3600),
    Field("spec.gateway.holdSeconds", "spec.gateway.holdSeconds", 5, 0, 3600),
    Field("spec.gateway.replicaConcurrency", "spec.gateway.replicaConcurrency", 5, 1, 65536),
    Field("spec.gateway.apiKeysSecretName", "spec.gateway.apiKeysSecretName", "gateway-keys", 1, 253, "Upper_Case"),
    Field("spec.gateway.tlsSecretName", "spec.gateway.tlsSecretName", "gateway-tls", 1, 253, "Upper_Case"),
    Field("spec.gateway.tlsOnly", "spec.gateway", {"tlsSecretName": "gateway-tls", "tlsOnly": True}),
    Field("spec.gateway.hedging.budgetPercent", "spec.gateway.hedging.budgetPercent", 5, 1, 50),
    Field("spec.gateway.hedging.delayPercentile", "spec.gateway.hedging.delayPercentile", 95, 50, 99),
    Field("spec.alerts.memoryPercent", "spec.alerts.memoryPercent", 85, 0, 100),
    Field("spec.alerts.computePercent", "spec.alerts.computePercent", 90, 0, 100),
    Field("spec.alerts.pipelineStallPercent", "spec.alerts.pipelineStallPercent", 15, 0, 100),
    Field("spec.alerts.timeoutPercent", "spec.alerts.timeoutPercent", 5, 0, 100),
)

_VLLM = {"name": "VLLMAscend"}

MODEL_FIELDS: tuple[Field, ...] = (
    Field("spec.poolRef.name", "spec.poolRef.name", "prod", 1, 253, wrong=_DNS_WRONG),
    Field("spec.workloadClass", "spec.workloadClass", "chat", 1, 63, wrong=_DNS_WRONG),
    Field("spec.model.uri", "spec.model.uri", "hf://org/name", 7, 512),
    Field("spec.model.revision", "spec.model.revision", "main", 1, 128),
    Field("spec.model.servedName", "spec.model.servedName", "Qwen/Qwen2.5-72B-Instruct", 1, 128, wrong="two words"),
    Field("spec.model.secretRef.name", "spec.model.secretRef.name", "hub-token", 1, 253, wrong=_DNS_WRONG),
    Field("spec.model.endpoint", "spec.model.endpoint", "https://hub.example.com/hf", 8, 253, wrong="https://user:word@hub.example.com"),
    Field("spec.model.region", "spec.model.region", "cn-north-4", 1, 63, wrong="CN North"),
    Field("spec.model.files", "spec.model.files", ["*Q4_K_M.gguf"], high=16),
    Field("spec.model.files[]", "spec.model.files", "*Q4_K_M.gguf", 1, 255, wrong="/absolute", wrap=[VALUE]),
    Field("spec.model.digest", "spec.model.digest", "sha256:" + "0" * 64, 71, 71, wrong="sha512:" + "0" * 64),
    Field("spec.runtime.name", "spec.runtime.name", "VLLMAscend", wrong="Triton"),
    Field("spec.runtime.image", "spec.runtime", "vllm:1", 1, 512, wrong="two words", wrap={**_VLLM, "image": VALUE}),
    Field("spec.runtime.args", "spec.runtime", ["--seed=1"], high=32, wrap={**_VLLM, "args": VALUE}),
    Field("spec.runtime.args[]", "spec.runtime", "--seed=1", high=256, wrap={**_VLLM, "args": [VALUE]}),
    Field("spec.engine.profile", "spec.engine.profile", "HighConcurrencyChat", wrong="Fast"),
    Field("spec.engine.dtype", "spec.engine.dtype", "BFloat16", wrong="bf16"),
    Field("spec.engine.precision.attention", "spec.engine.precision.attention", "BFloat16", wrong="bf16"),
    Field("spec.engine.precision.feedForward", "spec.engine.precision.feedForward", "Int8", wrong="int4"),
    Field("spec.engine.precision.output", "spec.engine.precision.output", "Float32", wrong="fp8"),
    Field("spec.engine.precision.kvCache", "spec.engine.precision.kvCache", "Int8", wrong="Int4"),
    Field("spec.engine.precision.layers", "spec.engine.precision.layers", [{"first": 0, "last": 1}], high=64),
    Field("spec.engine.precision.layers[].first", "spec.engine.precision", 2, 0, 1023, wrap={"layers": [{"first": VALUE, "last": 1023}]}),
    Field("spec.engine.precision.layers[].last", "spec.engine.precision", 2, 0, 1023, wrap={"layers": [{"first": 0, "last": VALUE}]}),
    Field(
        "spec.engine.precision.layers[].attention",
        "spec.engine.precision",
        "Int8",
        wrong="int4",
        wrap={"layers": [{"first": 0, "last": 1, "attention": VALUE}]},
    ),
    Field(
        "spec.engine.precision.layers[].feedForward",
        "spec.engine.precision",
        "Float32",
        wrong="fp8",
        wrap={"layers": [{"first": 0, "last": 1, "feedForward": VALUE}]},
    ),
    Field("spec.engine.calibrationRef.name", "spec.engine.calibrationRef.name", "tiny-calibration", 1, 253, wrong=_DNS_WRONG),
    Field("spec.engine.maxModelLength", "spec.engine.maxModelLength", 4096, 16, 10485760),
    Field("spec.engine.maxNumSequences", "spec.engine.maxNumSequences", 64, 1, 4096),
    Field("spec.engine.maxNumBatchedTokens", "spec.engine.maxNumBatchedTokens", 4096, 16, 1048576),
    Field("spec.engine.maxQueuedRequests", "spec.engine.maxQueuedRequests", 256, 1, 100000),
    Field("spec.engine.blockSize", "spec.engine.blockSize", 64, wrong=48),
    Field("spec.engine.chunkedPrefill", "spec.engine.chunkedPrefill", False),
    Field("spec.engine.preemption", "spec.engine.preemption", "Conservative", wrong="Never"),
    Field("spec.engine.schedulingPolicy", "spec.engine.schedulingPolicy", "ThroughputOptimised", wrong="Fair"),
    Field("spec.engine.toolFormat", "spec.engine.toolFormat", "Llama", wrong="Xml"),
    Field("spec.engine.starvationSteps", "spec.engine.starvationSteps", 64, 1, 1000000),
    Field("spec.engine.pipelineDepth", "spec.engine.pipelineDepth", 2, 1, 4),
    Field("spec.engine.asynchronousExecution", "spec.engine.asynchronousExecution", False),
    Field("spec.engine.continuousMemory", "spec.engine.continuousMemory", False),
    Field("spec.engine.fusionLevel", "spec.engine.fusionLevel", 2, 1, 3),
    Field("spec.engine.prefixCache", "spec.engine.prefixCache", False),
    Field("spec.engine.hostCacheMi", "spec.engine.hostCacheMi", 512, 0, 4194304),
    Field("spec.engine.diskCacheMi", "spec.engine", 512, 0, 67108864, wrap={"hostCacheMi": 64, "diskCacheMi": VALUE}),
    Field("spec.parallelism.tensor", "spec.parallelism.tensor", 4, 1, 64),
    Field("spec.parallelism.pipeline", "spec.parallelism.pipeline", 2, 1, 64),
    Field("spec.resources.cpu", "spec.resources.cpu", "500m", 1, 32, wrong="much"),
    Field("spec.resources.memory", "spec.resources.memory", "3Gi", 1, 32, wrong="3GB"),
    Field("spec.slo.ttftMilliseconds", "spec.slo.ttftMilliseconds", 800, 1, 3600000),
    Field("spec.slo.tpotMilliseconds", "spec.slo.tpotMilliseconds", 60, 1, 3600000),
    Field("spec.slo.attainmentPercent", "spec.slo.attainmentPercent", 95, 1, 100),
    Field("spec.scaling.minReplicas", "spec.scaling.minReplicas", 2, 0, 1024),
    Field("spec.scaling.idleSeconds", "spec.scaling.idleSeconds", 300, 1, 604800),
    Field("spec.scaling.maxReplicas", "spec.scaling.maxReplicas", 8, 1, 1024),
    Field("spec.replicas", "spec.replicas", 3, 0, 1024),
    Field("spec.rollout", "spec.rollout", "Recreate", wrong="BlueGreen"),
)

POOL_REQUIRED = ("spec", "spec.npus", "spec.npus.resourceName", "spec.classes", "spec.classes.0.name")
MODEL_REQUIRED = ("spec", "spec.poolRef", "spec.poolRef.name", "spec.workloadClass", "spec.model", "spec.model.uri")


def with_value(base: Object, at: str, value: Any) -> Object:
    """A copy of `base` with `value` at the dotted path `at`; digits are indices of lists."""
    made = copy.deepcopy(base)
    *parents, last = at.split(".")
    here: Any = made
    for part in parents:
        here = here[int(part)] if part.isdigit() else here.setdefault(part, {})
    if last.isdigit():
        here[int(last)] = value
    else:
        here[last] = value
    return made


def without(base: Object, at: str) -> Object:
    """A copy of `base` without what is at the dotted path `at`."""
    made = copy.deepcopy(base)
    *parents, last = at.split(".")
    here: Any = made
    for part in parents:
        here = here[int(part)] if part.isdigit() else here[part]
    del here[last]
    return made


def _put(base: Object, field: Field, value: Any) -> Object:
    def fill(node: Any) -> Any:
        if node is VALUE:
            return value
        if isinstance(node, list):
            return [fill(item) for item in node]
        if isinstance(node, dict):
            return {key: fill(item) for key, item in node.items()}
        return node

    return with_value(base, field.at, value if field.wrap is None else fill(field.wrap))


def _sized(field: Field, size: int) -> Any:
    """A value of the given size: the number itself, or a text, list or map of that length that is fine otherwise."""
    if isinstance(field.value, int):
        return size
    if isinstance(field.value, dict):
        return {f"key{index}": "b" for index in range(size)}
    if field.field == "spec.models.endpoints":
        return [{**_MIRROR, "scheme": scheme} for scheme in ("hf", "ms", "s3", "obs", "hf")[:size]]
    if isinstance(field.value, list):
        return [_numbered(field.value[0], index) for index in range(size)]
    text = str(field.value)
    if field.field.endswith("Path"):
        return "/" + "a" * (size - 1)
    if field.field.endswith(("[].url", ".endpoint")):
        return "http://" + "a" * (size - 7)
    if field.field == "spec.model.digest":
        return "sha256:" + "0" * (size - 7)
    if field.field == "spec.models.allowedSources[]":
        return "hf://" + "a" * (size - 5)
    if field.field == "spec.model.uri":
        return "hf://o" + "a" * (size - 6)
    if field.field.startswith("spec.resources"):
        return "1" * size
    if size == 317 or size == 318:
        return "a" * (size - 64) + "/" + "b" * 63
    return "a" * size if text else ""


def _numbered(item: Any, index: int) -> Any:
    """The item, made different from its neighbours: lists of names and sets refuse duplicates."""
    if isinstance(item, dict):
        return {**item, "name": f"{item['name']}{index}"} if "name" in item else item
    return item + index if isinstance(item, int) else f"{item}{index}"


def _bound(field: Field, *, low: bool) -> tuple[str, str]:
    """Name of the rule in the schema, and what the API server says when it is broken."""
    if isinstance(field.value, int):
        return ("minimum", "should be greater than or equal to") if low else ("maximum", "should be less than or equal to")
    if isinstance(field.value, str):
        return ("minLength", "should be at least") if low else ("maxLength", "Too long")
    kind = "Items" if isinstance(field.value, list) else "Properties"
    return (f"min{kind}", "should have at least") if low else (f"max{kind}", "Too many")


def _field_cases(plural: str, base: Object, fields: tuple[Field, ...]) -> list[Case]:
    cases: list[Case] = []
    for field in fields:
        name = f"{plural} {field.field}"
        cases.append(Case(f"{name} value accepted", _put(base, field, field.value), None))
        for limit, low in ((field.low, True), (field.high, False)):
            if limit is None:
                continue
            rule, message = _bound(field, low=low)
            cases.append(Case(f"{name} {rule} accepted", _put(base, field, _sized(field, limit)), None))
            cases.append(Case(f"{name} {rule} refused", _put(base, field, _sized(field, limit - 1 if low else limit + 1)), message))
        if field.wrong is not None:
            cases.append(Case(f"{name} form refused", _put(base, field, field.wrong), _form_message(field)))
        wrong_type = "text" if isinstance(field.value, int) else 7
        cases.append(Case(f"{name} type refused", _put(base, field, wrong_type), "Invalid value"))
    return cases


def _form_message(field: Field) -> str:
    return "Unsupported value" if field.field in ENUMS else "should match"


ENUMS = {
    "spec.mode",
    "spec.gateway.mode",
    "spec.rebalancing.reclaim",
    "spec.rebalancing.borrowing",
    "spec.podTemplate.device",
    "spec.runtime.name",
    "spec.engine.profile",
    "spec.engine.dtype",
    "spec.engine.precision.attention",
    "spec.engine.precision.feedForward",
    "spec.engine.precision.output",
    "spec.engine.precision.kvCache",
    "spec.engine.precision.layers[].attention",
    "spec.engine.precision.layers[].feedForward",
    "spec.engine.blockSize",
    "spec.engine.preemption",
    "spec.engine.schedulingPolicy",
    "spec.engine.toolFormat",
    "spec.models.endpoints[].scheme",
    "spec.models.preload.mode",
    "spec.rollout",
}


def _required_cases(plural: str, base: Object, paths: tuple[str, ...]) -> list[Case]:
    return [Case(f"{plural} {at.replace('.0', '[]')} required refused", without(base, at), "Required value") for at in paths]


def _classes(*bounds: dict[str, int]) -> Object:
    return with_value(POOL, "spec.classes", [{"name": f"class{index}", **bound} for index, bound in enumerate(bounds)])


def _model(at: str, value: Any) -> Object:
    return with_value(MODEL, at, value)


MIN_ABOVE_MAX = "minPercent is above maxPercent in a class: lower minPercent or raise maxPercent"
SUM_ABOVE_100 = "the classes' minPercent add up to more than 100: lower some, a pool cannot guarantee more than it has"
SCHEME = "model.uri has an unknown scheme: write hf://ORG/NAME, ms://ORG/NAME, s3://BUCKET/PATH, obs://BUCKET/PATH, oci://IMAGE or pvc://CLAIM/PATH"
HUB = "model.uri is not a repository of a hub: write hf://ORG/NAME or ms://ORG/NAME"
BUCKET = "model.uri is not a path in a bucket: write s3://BUCKET/PATH or obs://BUCKET/PATH"
OCI_IMAGE = "model.uri is not an image: write oci://REGISTRY/NAME:TAG or oci://REGISTRY/NAME@sha256:DIGEST"
ONE_CACHE = "models.cache needs either hostPath or claimName: set one of them"
VOLUME = "model.uri is not a volume path: write pvc://CLAIM or pvc://CLAIM/PATH, with a claim of the model's namespace"
DOTS = "model.uri has a .. in its path: write the path from the volume's root without it"
IMAGE = "runtime.image is only for VLLMAscend: remove it, or set runtime.name to VLLMAscend"
ARGS = "runtime.args is only for VLLMAscend: remove it and use the fields of engine, or set runtime.name to VLLMAscend"
REPLICAS = "scaling.minReplicas is above scaling.maxReplicas: lower minReplicas or raise maxReplicas"
HEADS = "engine.precision.kvCache Int8Heads needs engine.calibrationRef, which names the heads: set it, or choose Int8 or Auto"
LAYERS = "engine.precision.layers has a first above its last: swap them"
DISK = "engine.diskCacheMi needs engine.hostCacheMi, since KV reaches the disk through host memory: set both or neither"

TLS_ONLY = "gateway.tlsOnly needs a certificate: set gateway.tlsSecretName, or remove tlsOnly"

CEL_CASES: list[Case] = [
    Case("npupools spec.gateway tlsOnly without a certificate refused", with_value(POOL, "spec.gateway", {"tlsOnly": True}), TLS_ONLY),
    Case("npupools spec.gateway tlsOnly false accepted", with_value(POOL, "spec.gateway", {"tlsOnly": False}), None),
    Case("npupools spec.classes equal bounds accepted", _classes({"minPercent": 40, "maxPercent": 40}), None),
    Case("npupools spec.classes bounds of zero accepted", _classes({"minPercent": 0, "maxPercent": 0}), None),
    Case("npupools spec.classes minPercent without maxPercent accepted", _classes({"minPercent": 100}), None),
    Case("npupools spec.classes min above max refused", _classes({"minPercent": 41, "maxPercent": 40}), MIN_ABOVE_MAX),
    Case("npupools spec.classes min above max in the second refused", _classes({}, {"minPercent": 2, "maxPercent": 1}), MIN_ABOVE_MAX),
    Case("npupools spec.classes sum of 100 accepted", _classes({"minPercent": 60}, {"minPercent": 40}, {}), None),
    Case("npupools spec.classes sum of 101 refused", _classes({"minPercent": 60}, {"minPercent": 41}, {}), SUM_ABOVE_100),
    Case(
        "npupools spec.classes same name twice refused", with_value(POOL, "spec.classes", [{"name": "a"}, {"name": "a"}]), "Duplicate value"
    ),
    Case(
        "npupools spec.podTemplate.env same name twice refused",
        with_value(POOL, "spec.podTemplate.env", [{"name": "A"}, {"name": "A"}]),
        "Duplicate value",
    ),
    *(
        Case(f"ascendmodels spec.model.uri {uri} accepted", _model("spec.model.uri", uri), None)
        for uri in (
            "hf://Qwen/Qwen2.5-72B-Instruct",
            "ms://qwen/Qwen2-7B",
            "hf://gpt2",
            "s3://bucket/path/to/model",
            "s3://bucket",
            "obs://bucket.a/path/",
            "oci://registry.example.com:5000/models/qwen:7b",
            "oci://registry.example.com/qwen@sha256:" + "a" * 64,
            "pvc://claim",
            "pvc://claim/",
            "pvc://claim.a/deep/path",
            "pvc://claim/a..b",
        )
    ),
    *(
        Case(f"ascendmodels spec.model.uri {uri} refused", _model("spec.model.uri", uri), SCHEME)
        for uri in ("https://example.com/model", "file:///models", "Qwen/Qwen2.5-72B", "HF://org/name", " hf://org/name", "hf:/org/name")
    ),
    *(
        Case(f"ascendmodels spec.model.uri {uri!r} refused", _model("spec.model.uri", uri), HUB)
        for uri in ("hf://org/name/file", "hf:///name", "hf://org/na me", "ms://name", "hf://org/", "ms://-org/name")
    ),
    *(
        Case(f"ascendmodels spec.model.uri {uri!r} refused", _model("spec.model.uri", uri), BUCKET)
        for uri in ("s3:///path", "s3://Bucket/path", "obs://bucket//path", "obs://bucket/two words")
    ),
    *(
        Case(f"ascendmodels spec.model.uri {uri!r} refused", _model("spec.model.uri", uri), OCI_IMAGE)
        for uri in ("oci://image", "oci://host/Name", "oci://host/name@sha256:12", "oci:///name")
    ),
    Case("npupools spec.models.cache neither refused", with_value(POOL, "spec.models.cache", {"sizeLimitGi": 1}), ONE_CACHE),
    Case(
        "npupools spec.models.cache both refused",
        with_value(POOL, "spec.models.cache", {"hostPath": "/models", "claimName": "models"}),
        ONE_CACHE,
    ),
    Case("npupools spec.models.cache a directory accepted", with_value(POOL, "spec.models.cache", {"hostPath": "/models"}), None),
    *(
        Case(f"ascendmodels spec.model.uri {uri!r} refused", _model("spec.model.uri", uri), VOLUME)
        for uri in ("pvc:///path", "pvc://Claim", "pvc://-claim", "pvc://claim//path", "pvc://claim/two words", "pvc://claim/line\nbreak")
    ),
    *(
        Case(f"ascendmodels spec.model.uri {uri} refused", _model("spec.model.uri", uri), DOTS)
        for uri in ("pvc://claim/../other", "pvc://claim/path/..", "s3://bucket/../x")
    ),
    Case("ascendmodels spec.runtime image accepted", _model("spec.runtime", {**_VLLM, "image": "vllm:1"}), None),
    Case("ascendmodels spec.runtime image refused", _model("spec.runtime", {"image": "vllm:1"}), IMAGE),
    Case("ascendmodels spec.runtime args accepted", _model("spec.runtime", {**_VLLM, "args": ["--seed=1"]}), None),
    Case("ascendmodels spec.runtime no args accepted", _model("spec.runtime", {"name": "Native", "args": []}), None),
    Case("ascendmodels spec.runtime args refused", _model("spec.runtime", {"name": "Native", "args": ["--seed=1"]}), ARGS),
    Case(
        "ascendmodels spec.engine disk cache behind host cache accepted", _model("spec.engine", {"hostCacheMi": 1, "diskCacheMi": 1}), None
    ),
    Case("ascendmodels spec.engine no disk cache accepted", _model("spec.engine", {"hostCacheMi": 0, "diskCacheMi": 0}), None),
    Case("ascendmodels spec.engine disk cache alone refused", _model("spec.engine", {"diskCacheMi": 1}), DISK),
    Case("ascendmodels spec.engine disk cache behind none refused", _model("spec.engine", {"hostCacheMi": 0, "diskCacheMi": 1}), DISK),
    Case("ascendmodels spec.engine chosen heads refused", _model("spec.engine", {"precision": {"kvCache": "Int8Heads"}}), HEADS),
    Case(
        "ascendmodels spec.engine.precision.layers one layer accepted",
        _model("spec.engine.precision.layers", [{"first": 3, "last": 3}]),
        None,
    ),
    Case(
        "ascendmodels spec.engine.precision.layers first above last refused",
        _model("spec.engine.precision.layers", [{"first": 4, "last": 3}]),
        LAYERS,
    ),
    Case("ascendmodels spec.engine all heads accepted", _model("spec.engine", {"precision": {"kvCache": "Int8"}}), None),
    Case(
        "ascendmodels spec.engine chosen heads of a calibration accepted",
        _model("spec.engine", {"precision": {"kvCache": "Int8Heads"}, "calibrationRef": {"name": "tiny-calibration"}}),
        None,
    ),
    Case("ascendmodels spec.scaling equal bounds accepted", _model("spec.scaling", {"minReplicas": 3, "maxReplicas": 3}), None),
    Case("ascendmodels spec.scaling min alone accepted", _model("spec.scaling", {"minReplicas": 3}), None),
    Case("ascendmodels spec.scaling zero accepted", _model("spec.scaling", {"minReplicas": 0, "maxReplicas": 1}), None),
    Case("ascendmodels spec.scaling min above max refused", _model("spec.scaling", {"minReplicas": 4, "maxReplicas": 3}), REPLICAS),
]

CASES: list[Case] = [
    *_field_cases(POOL_PLURAL, POOL, POOL_FIELDS),
    *_required_cases(POOL_PLURAL, POOL, POOL_REQUIRED),
    *_field_cases(MODEL_PLURAL, MODEL, MODEL_FIELDS),
    *_required_cases(MODEL_PLURAL, MODEL, MODEL_REQUIRED),
    *CEL_CASES,
]
