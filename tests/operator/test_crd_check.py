"""CRDs that are older than the operator are told apart from those that fit."""

from __future__ import annotations

import copy

from npufleet_api.crd import ascend_model_crd, inference_pool_crd
from npufleet_operator.shell.crd_check import check_crds, missing_fields
from support.kube_server import kube_server

PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def test_a_field_that_the_installed_crd_lacks_is_named() -> None:
    old = copy.deepcopy(ascend_model_crd())
    schema = old["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del schema["status"]["properties"]["slo"]["properties"]["requests"]
    assert missing_fields(ascend_model_crd(), old) == ["status.slo.requests"]
    assert missing_fields(ascend_model_crd(), ascend_model_crd()) == []
    assert missing_fields(old, ascend_model_crd()) == [], "a newer CRD does no harm"


async def test_what_fits_and_what_is_absent() -> None:
    async with kube_server() as (server, client):
        for crd in (inference_pool_crd(), ascend_model_crd()):
            server.put(f"{PATH}/{crd['metadata']['name']}", crd)
        assert await check_crds(client) == []
        del server.objects[f"{PATH}/ascendmodels.npufleet.dev"]
        assert await check_crds(client) == ["ascendmodels.npufleet.dev: everything"]
