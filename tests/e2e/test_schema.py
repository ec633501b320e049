"""The real API server accepts and refuses what the table of cases says, with the messages that users get to read."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from kubernetes import config
from kubernetes.client import ApiClient, ApiException, CustomObjectsApi

from api.cel_cases import CASES, Case
from devcluster import Cluster
from npufleet_api import GROUP, MODEL_PLURAL, POOL_PLURAL, VERSION

CONNECTIONS = 4


def _answer(api: CustomObjectsApi, case: Case) -> str | None:
    """What the API server says to the object in a dry run; None once it accepts it."""
    metadata = case.object["metadata"]
    try:
        if "namespace" in metadata:
            api.create_namespaced_custom_object(GROUP, VERSION, metadata["namespace"], MODEL_PLURAL, case.object, dry_run="All")
        else:
            api.create_cluster_custom_object(GROUP, VERSION, POOL_PLURAL, case.object, dry_run="All")
    except ApiException as error:
        if error.status != 422:
            raise
        return str(json.loads(error.body or "{}")["message"])
    return None


@pytest.fixture
def answers(installed: Cluster) -> dict[str, str | None]:
    """Answers by name of the case."""
    client: ApiClient = config.new_client_from_config(str(installed.kubeconfig))
    with client, ThreadPoolExecutor(CONNECTIONS) as threads:
        said = threads.map(lambda case: _answer(CustomObjectsApi(client), case), CASES)
        return dict(zip((case.name for case in CASES), said, strict=True))


def test_every_case_is_accepted_or_refused_with_its_message(answers: dict[str, str | None]) -> None:
    wrong = []
    for case in CASES:
        answer = answers[case.name]
        if case.message is None and answer is not None:
            wrong.append(f"{case.name}: should be accepted, but: {answer}")
        elif case.message is not None and (answer is None or case.message not in answer):
            wrong.append(f"{case.name}: should be refused with {case.message!r}, but: {answer}")
    assert not wrong, "\n".join(wrong)
