"""Pools, models and pods of the cluster that KUBECONFIG names, read with the caller's own rights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import click
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration

from npufleet_api.contract import MANAGED_BY, MANAGED_BY_LABEL
from npufleet_operator.core.observed import ModelView, PodView, PoolView
from npufleet_operator.errors import InputError, NotFoundError
from npufleet_operator.shell.client import KubeClient
from npufleet_operator.shell.kinds import MODEL, POD, POOL
from npufleet_operator.shell.parse import model_view, pod_view, pool_view

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Access:
    """Which cluster, as whom; None where kubectl would choose."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """Pools and models as their status shows them, by name."""

    pools: tuple[PoolView, ...]
    models: tuple[ModelView, ...]


def cluster_options(command: F) -> F:
    """--kubeconfig and --context, as kubectl has them."""
    command = click.option("--context", default=None, help="Context of the kubeconfig.")(command)
    return click.option("--kubeconfig", default=None, help="Kubeconfig file; the default is that of kubectl.")(command)


def run(access: Access, work: Callable[[KubeClient], Coroutine[Any, Any, T]]) -> T:
    """Do `work` with a client. Raises OperatorError."""
    return asyncio.run(_run(access, work))


async def _run(access: Access, work: Callable[[KubeClient], Coroutine[Any, Any, T]]) -> T:
    configuration = Configuration()
    load = partial(kube_config.load_kube_config, config_file=access.kubeconfig, context=access.context, client_configuration=configuration)
    try:
        await load()
    except (kube_config.ConfigException, OSError) as error:
        if access.kubeconfig or access.context:
            raise InputError(f"kubeconfig: {error}: name a file and a context that exist") from error
        try:
            kube_config.load_incluster_config(client_configuration=configuration)
        except kube_config.ConfigException:
            raise InputError(f"kubeconfig: {error}: set KUBECONFIG or --kubeconfig") from error
    async with KubeClient(ApiClient(configuration)) as client:
        return await work(client)


def default_namespace(access: Access) -> str:
    """The namespace that was asked for, else the context's, else default."""
    if access.namespace:
        return access.namespace
    try:
        contexts, active = kube_config.list_kube_config_contexts(access.kubeconfig)
    except (kube_config.ConfigException, OSError, TypeError):
        return "default"
    chosen = next((c for c in contexts if c["name"] == access.context), active) if access.context else active
    return str((chosen.get("context") or {}).get("namespace") or "default")


async def read_fleet(client: KubeClient, namespace: str = "") -> Fleet:
    """All pools, and the models of one namespace or of all. Raises ApiError."""
    pools, _ = await client.list(POOL)
    models, _ = await client.list(MODEL, namespace)
    return Fleet(
        tuple(sorted((pool_view(raw) for raw in pools), key=lambda p: p.name)),
        tuple(sorted((model_view(raw) for raw in models), key=lambda m: m.key)),
    )


async def read_model(client: KubeClient, namespace: str, name: str) -> tuple[ModelView, PoolView | None, tuple[PodView, ...]]:
    """A model, its pool if there is one, and its pods. Raises ApiError, InputError."""
    try:
        model = model_view(await client.get(MODEL, namespace, name))
    except NotFoundError as error:
        raise InputError(f"there is no AscendModel {name!r} in namespace {namespace!r}: see kubectl get amodel -A") from error
    pool = None
    if model.pool_name:
        try:
            pool = pool_view(await client.get(POOL, "", model.pool_name))
        except NotFoundError:
            pool = None
    raw, _ = await client.list(POD, namespace, f"{MANAGED_BY_LABEL}={MANAGED_BY}")
    pods = (pod_view(item) for item in raw)
    return model, pool, tuple(sorted((pod for pod in pods if pod.owner_uid == model.uid), key=lambda p: p.name))


async def read_pool(client: KubeClient, name: str) -> tuple[PoolView, tuple[ModelView, ...]]:
    """A pool and its models. Raises ApiError, InputError."""
    try:
        pool = pool_view(await client.get(POOL, "", name))
    except NotFoundError as error:
        raise InputError(f"there is no InferencePool {name!r}: see kubectl get npool") from error
    raw, _ = await client.list(MODEL)
    models = (model_view(item) for item in raw)
    return pool, tuple(sorted((model for model in models if model.pool_name == name), key=lambda m: m.key))
