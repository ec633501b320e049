"""Names that a model may have and a Service may not."""

from __future__ import annotations

import re
import socket

from npufleet_operator.core.naming import model_child
from support.team import Team

NAME = "qwen2.5-0.1b"


def test_a_model_with_dots_in_its_name_is_served(team: Team) -> None:
    team.apply_model(NAME)
    team.wait_ready(NAME)
    team.wait_routed(NAME)
    assert team.chat(NAME) == "4 tokens"
    (pod,) = team.pods(NAME)
    assert re.fullmatch(r"qwen2-5-0-1b-[0-9a-f]{6}-[0-9a-f]{8}-0", pod["metadata"]["name"])
    service = team.kubectl.get("service", model_child(NAME))
    (ready,) = team.kubectl.list("endpointslices", f"kubernetes.io/service-name={service['metadata']['name']}")
    assert ready["endpoints"][0]["addresses"] == [pod["status"]["podIP"]]
    socket.create_connection((pod["status"]["podIP"], ready["ports"][0]["port"]), 10).close()
