"""`Applier`: carries a plan out. Whatever the API server answers, the next observation decides what comes next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from npufleet_api import API_VERSION, MODEL_KIND, POOL_KIND
from npufleet_api.contract import DRAIN_REASON_ANNOTATION, DRAIN_STARTED_ANNOTATION, FIELD_MANAGER
from npufleet_api.model import AscendModelStatus
from npufleet_api.pool import InferencePoolStatus
from npufleet_operator.core.actions import CancelDrain, CreatePod, DeletePod, DrainPod, Manifest, ObjectId, Plan, object_id
from npufleet_operator.core.conditions import timestamp
from npufleet_operator.core.observed import ModelKey, PodView
from npufleet_operator.errors import AdminError, ConflictError, NotFoundError, RefusedError
from npufleet_operator.shell.client import Json, KubeClient
from npufleet_operator.shell.compare import satisfies
from npufleet_operator.shell.engine_admin import EngineAdmin
from npufleet_operator.shell.kinds import MODEL, POD, POOL, Kind, kind_of
from npufleet_operator.shell.metrics import APPLIES
from npufleet_operator.shell.mirror import Child, Mirror, version_of

logger = logging.getLogger(__name__)

STATUS_FIELD_MANAGER = f"{FIELD_MANAGER}-status"
FIGURES_SECONDS = 30.0
"""Measured figures alone are written no more often than this."""
FIGURES: Json = {"slo": None, "scaling": None, "source": None}
"""What elastic scaling must remember of a move goes with the number of replicas, which is no figure."""
Status = AscendModelStatus | InferencePoolStatus
CONCURRENCY = 16
UNPROCESSABLE = 422


class Applier:
    """One per pool task. Unchanged objects are skipped; patches and deletes carry the UID."""

    def __init__(self, client: KubeClient, mirror: Mirror, admin: EngineAdmin, clock: Callable[[], float]) -> None:
        self._client = client
        self._mirror = mirror
        self._admin = admin
        self._clock = clock
        self._agreed: dict[ObjectId, tuple[Manifest, Child]] = {}
        """Manifests and live objects that agree: they were found to, or the API server answered an apply of the one with the other."""
        self._figures_written: dict[ObjectId, float] = {}
        self._gate = asyncio.Semaphore(CONCURRENCY)
        self.refused: dict[ModelKey, str] = {}
        """Last words of the API server where it refused an object of a model, until one is taken."""
        self.refused_jobs: set[ObjectId] = set()
        """Preload jobs that it refused, until one is taken."""

    async def carry_out(self, pool: str, plan: Plan) -> bool:
        """Do everything the plan says. True when something was met that another observation has to settle."""
        refused: dict[ModelKey, str] = {}
        refused_jobs = set(self.refused_jobs)
        settled = await self._all(self._object(manifest, refused) for manifest in plan.objects if not self._as_wanted(manifest))
        settled &= await self._all(self._cancel(step) for step in plan.cancels)
        settled &= await self._all(self._drain(step) for step in plan.drains)
        settled &= await self._all(self._delete(step) for step in plan.deletes)
        settled &= await self._all(self._create(step, refused) for step in plan.creates if step.model not in refused)
        settled &= await self._all(self._prune(pool, plan))
        newly_refused = refused != self.refused or refused_jobs != self.refused_jobs
        self.refused = refused
        settled &= await self._all(self._statuses(pool, plan))
        return not settled or newly_refused

    async def _all(self, steps: Any) -> bool:
        async def one(step: Coroutine[Any, Any, None]) -> bool:
            async with self._gate:
                try:
                    await step
                except (ConflictError, NotFoundError) as error:
                    logger.info("observing again", extra={"error": str(error)})
                    return False
                except RefusedError as error:
                    logger.warning("refused", extra={"error": str(error)})
                    return False
            return True

        results = await asyncio.gather(*(one(step) for step in steps), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return all(results)

    def _as_wanted(self, manifest: Manifest) -> bool:
        """Whether the object is there as the manifest wants it. What was compared once is not compared again while it is the same."""
        identity = object_id(manifest)
        child = self._mirror.children.get(identity)
        if child is None:
            return False
        known = self._agreed.get(identity)
        if known and known[1] is child and (known[0] is manifest or known[0] == manifest):
            return True
        if not satisfies(child.body, manifest):
            return False
        self._agreed[identity] = (manifest, child)
        return True

    async def _object(self, manifest: Manifest, refused: dict[ModelKey, str]) -> None:
        identity, kind = object_id(manifest), kind_of(manifest)
        child = self._mirror.children.get(identity)
        owner = _owner(manifest)
        foreign = child.owner_uid != _owner_uid(manifest) if child else await self._belongs_to_another(kind, manifest)
        refusal = f"{manifest['kind']} {identity[2]} exists and is not npufleet's: delete or rename it" if foreign else ""
        if not refusal:
            try:
                answer = await self._write(kind, manifest, child.uid if child and owner else "")
            except RefusedError as error:
                refusal = str(error)
        if refusal and kind.kind == "Job":
            # Loading ahead is a favour: without it a replica fetches for itself.
            logger.warning("preload job refused", extra={"error": refusal})
            self.refused_jobs.add(identity)
            return
        self.refused_jobs.discard(identity)
        if refusal:
            self._refuse(refused, owner, refusal)
            return
        APPLIES.labels(kind.kind, "applied").inc()
        self._mirror.upsert(kind, answer)
        if self._mirror.version(identity) == version_of(answer):
            # Also where it holds other than the manifest says: the API server writes some fields its own way.
            self._agreed[identity] = (manifest, self._mirror.children[identity])

    async def _write(self, kind: Kind, manifest: Manifest, uid: str) -> Json:
        """Apply. Where someone's edit excludes ours (a budget of the other form, a port of the same name), the API server calls the sum
        of both invalid: the model's object of this UID is then made anew, once."""
        try:
            return await self._client.apply(kind, manifest, FIELD_MANAGER)
        except RefusedError as error:
            if error.status != UNPROCESSABLE or not uid:
                raise
            logger.warning("made anew, since an edit stands in the way", extra={"error": str(error)})
        _, namespace, name = object_id(manifest)
        await self._client.delete(kind, namespace, name, uid)
        APPLIES.labels(kind.kind, "replaced").inc()
        return await self._client.apply(kind, manifest, FIELD_MANAGER)

    async def _belongs_to_another(self, kind: Kind, manifest: Manifest) -> bool:
        """Whether an object of that name exists that is not ours: it is left alone."""
        _, namespace, name = object_id(manifest)
        try:
            live = await self._client.get(kind, namespace, name)
        except NotFoundError:
            return False
        wanted, have = manifest["metadata"], live["metadata"]
        if wanted.get("ownerReferences"):
            return [o["uid"] for o in have.get("ownerReferences") or []] != [_owner_uid(manifest)]
        return not satisfies(have.get("labels") or {}, wanted["labels"])

    def _refuse(self, refused: dict[ModelKey, str], owner: ModelKey | None, message: str) -> None:
        logger.warning("object refused", extra={"error": message})
        if owner:
            refused[owner] = message

    async def _create(self, step: CreatePod, refused: dict[ModelKey, str]) -> None:
        try:
            answer = await self._client.create(POD, step.model[0], step.manifest, FIELD_MANAGER)
        except RefusedError as error:
            self._refuse(refused, step.model, str(error))
            return
        APPLIES.labels("Pod", "created").inc()
        self._mirror.upsert(POD, answer)

    async def _drain(self, step: DrainPod) -> None:
        """The annotation first: it takes the pod out of routing, and survives this process."""
        if step.pod.drain_started is None:
            await self._annotate(step.pod, timestamp(step.since), step.reason.value)
            APPLIES.labels("Pod", "drained").inc()
        try:
            await self._admin.drain(step.pod, step.deadline_seconds, step.reason.value)
        except AdminError as error:
            logger.warning("drain was not heard", extra={"pod": step.pod.name, "error": str(error)})

    async def _cancel(self, step: CancelDrain) -> None:
        """The engine first: only one that accepts work again is routed to."""
        try:
            await self._admin.cancel(step.pod)
        except AdminError as error:
            raise ConflictError(str(error), 0) from error
        await self._annotate(step.pod, None, None)
        APPLIES.labels("Pod", "drain-cancelled").inc()

    async def _annotate(self, pod: PodView, started: str | None, reason: str | None) -> None:
        annotations = {DRAIN_STARTED_ANNOTATION: started, DRAIN_REASON_ANNOTATION: reason}
        patch = {"metadata": {"uid": pod.uid, "annotations": annotations}}
        self._mirror.upsert(POD, await self._client.merge(POD, pod.namespace, pod.name, patch, FIELD_MANAGER))

    async def _delete(self, step: DeletePod) -> None:
        answer = await self._client.delete(POD, step.pod.namespace, step.pod.name, step.pod.uid, step.grace_seconds)
        APPLIES.labels("Pod", "deleted").inc()
        if answer.get("kind") == "Pod":
            self._mirror.upsert(POD, answer)

    def _prune(self, pool: str, plan: Plan) -> list[Coroutine[Any, Any, None]]:
        named = {object_id(manifest) for manifest in plan.objects} | plan.keep
        self.refused_jobs &= named
        for identity in [identity for identity in self._agreed if identity not in self._mirror.children]:
            del self._agreed[identity]
        return [
            self._delete_child(identity, child.uid)
            for identity, child in list(self._mirror.children.items())
            if identity not in named and (child.owner_uid in plan.prune_owners or (plan.prune_gateway and child.pool == pool))
        ]

    async def _delete_child(self, identity: ObjectId, uid: str) -> None:
        kind = kind_of({"kind": identity[0]})
        await self._client.delete(kind, identity[1], identity[2], uid)
        APPLIES.labels(kind.kind, "pruned").inc()

    def _statuses(self, pool: str, plan: Plan) -> list[Coroutine[Any, Any, None]]:
        steps = []
        for key, status in plan.model_status.items():
            model = self._mirror.models.get(key)
            if model and self._is_news((MODEL_KIND, *key), model.status, status):
                steps.append(self._status(MODEL, MODEL_KIND, key[0], key[1], model.uid, _dump(status)))
        view = self._mirror.pools.get(pool)
        if view and plan.pool_status and self._is_news((POOL_KIND, "", pool), view.status, plan.pool_status):
            steps.append(self._status(POOL, POOL_KIND, "", pool, view.uid, _dump(plan.pool_status)))
        return steps

    def _is_news(self, identity: ObjectId, before: Status, wanted: Status) -> bool:
        """Whether the status is to be written: what differs is not figures alone, or those have waited for long enough."""
        if before is wanted or before == wanted:
            return False
        waited = self._clock() - self._figures_written.get(identity, float("-inf"))
        return waited >= FIGURES_SECONDS or _without_figures(before) != _without_figures(wanted)

    async def _status(self, kind: Kind, name_of_kind: str, namespace: str, name: str, uid: str, wanted: Json) -> None:
        metadata = {"name": name, "uid": uid, **({"namespace": namespace} if namespace else {})}
        manifest = {"apiVersion": API_VERSION, "kind": name_of_kind, "metadata": metadata, "status": wanted}
        try:
            answer = await self._client.apply(kind, manifest, STATUS_FIELD_MANAGER, "status")
        except NotFoundError:
            # Its deletion may have fallen into a gap of the watch. Planned for any longer, it would be given pods that are deleted at once.
            known = self._mirror.version((kind.kind, namespace, name))
            if known and known.uid == uid:
                self._mirror.forget(kind, (kind.kind, namespace, name))
            raise
        self._mirror.upsert(kind, answer)
        self._figures_written[name_of_kind, namespace, name] = self._clock()
        APPLIES.labels(name_of_kind, "status").inc()


def _owner_uid(manifest: Mapping[str, Any]) -> str:
    owners = manifest["metadata"].get("ownerReferences")
    return str(owners[0]["uid"]) if owners else ""


def _owner(manifest: Mapping[str, Any]) -> ModelKey | None:
    owners = manifest["metadata"].get("ownerReferences")
    return (manifest["metadata"]["namespace"], owners[0]["name"]) if owners else None


def _without_figures(status: Status) -> Status:
    return status.model_copy(update=FIGURES) if isinstance(status, AscendModelStatus) else status


def _dump(status: Status) -> Json:
    dumped: Json = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped
