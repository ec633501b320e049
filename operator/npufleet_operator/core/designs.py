"""What every replica of a model looks like, and the model's other objects: built once per spec, since a pool is planned every few seconds.

A memo of pure functions, keyed by the very objects that they were given: those are frozen, and a changed spec is another object.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from npufleet_api.model import AscendModelSpec
from npufleet_api.pool import InferencePoolSpec
from npufleet_operator.core.actions import Manifest
from npufleet_operator.core.objects.config_map import build_engine_settings, build_monitor_settings
from npufleet_operator.core.objects.network_policy import build_network_policy
from npufleet_operator.core.objects.pod import Blueprint, blueprint
from npufleet_operator.core.objects.service import build_service
from npufleet_operator.core.observed import ModelKey, ModelView, OperatorConfig

REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Design:
    """A model's revision and the objects that do not depend on its number of replicas."""

    blueprint: Blueprint
    objects: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class _Given:
    uid: str
    spec: AscendModelSpec
    pool: InferencePoolSpec
    config: OperatorConfig

    def same(self, other: _Given) -> bool:
        return (
            self.uid == other.uid
            and self.spec is other.spec
            and self.pool is other.pool
            and (self.config is other.config or self.config == other.config)
        )


_memo: OrderedDict[tuple[ModelKey, str], tuple[_Given, Design]] = OrderedDict()


def design(model: ModelView, spec: AscendModelSpec, pool_name: str, pool: InferencePoolSpec, config: OperatorConfig) -> Design:
    """The model's design."""
    key, given = (model.key, pool_name), _Given(model.uid, spec, pool, config)
    found = _memo.get(key)
    if found and found[0].same(given):
        _memo.move_to_end(key)
        return found[1]
    plan = blueprint(model, spec, pool, config)
    made = Design(
        plan,
        (
            build_engine_settings(model, plan),
            build_monitor_settings(model, pool),
            build_service(model),
            build_network_policy(model, config.namespace, pool.gateway.inference_gateway_namespaces),
        ),
    )
    _memo[key] = (given, made)
    _memo.move_to_end(key)
    if len(_memo) > REMEMBERED:
        _memo.popitem(last=False)
    return made
