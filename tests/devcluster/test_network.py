"""Address plans: apart from each other, apart from the host's routes."""

from __future__ import annotations

from ipaddress import IPv4Network
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devcluster.errors import AddressInUseError
from devcluster.network import ALL_CLUSTERS, MAX_CLUSTERS, Network, check_free, choose, parse_routes

ROUTES = (
    '[{"dst":"default","gateway":"192.0.2.1","dev":"eth0"},{"dst":"10.128.0.0/16","dev":"docker0"},'
    '{"type":"local","dst":"10.131.7.9","dev":"lo"},{"type":"blackhole","dst":"10.132.0.0/15"}]'
)


def test_no_two_clusters_share_an_address() -> None:
    ranges = [part for index in range(MAX_CLUSTERS) for part in (Network(index).pods, Network(index).services)]
    assert all(part.subnet_of(ALL_CLUSTERS) for part in ranges)
    assert not [pair for pair in combinations(ranges, 2) if pair[0].overlaps(pair[1])]


@given(st.integers(0, MAX_CLUSTERS - 1))
def test_the_parts_of_a_plan_do_not_overlap(index: int) -> None:
    plan = Network(index)
    link = IPv4Network(f"{plan.node}/{plan.link_prefix}", strict=False)
    assert {plan.host, plan.node} == set(link.hosts())
    assert plan.bridge in plan.node_pods
    for part in (link, plan.node_pods, plan.fake_pods):
        assert part.subnet_of(plan.pods)
    assert not any(a.overlaps(b) for a, b in combinations((link, plan.node_pods, plan.fake_pods), 2))
    assert plan.kubernetes_service != plan.dns_service
    assert all(address in plan.services for address in (plan.kubernetes_service, plan.dns_service))
    assert len(plan.host_link) <= 15  # IFNAMSIZ


def test_routes_are_read_and_default_routes_left_out() -> None:
    assert parse_routes(ROUTES) == (
        (IPv4Network("10.128.0.0/16"), "docker0"),
        (IPv4Network("10.131.7.9/32"), "lo"),
        (IPv4Network("10.132.0.0/15"), "?"),
    )
    assert parse_routes("") == ()


def test_a_new_cluster_passes_over_what_others_have_and_the_host_routes() -> None:
    assert choose((), ()).index == 0
    assert choose((0, 1), ()).index == 2
    assert choose((), parse_routes(ROUTES)).index == 3
    assert choose((), [(Network(0).pods, Network(0).host_link)]).index == 1, "a link without a known cluster is someone's"


def test_without_a_free_range_the_obstacle_is_named() -> None:
    with pytest.raises(AddressInUseError, match=r"10\.0\.0\.0/8 is routed through vpn0; bring another cluster down"):
        choose((), [(IPv4Network("10.0.0.0/8"), "vpn0")])
    with pytest.raises(AddressInUseError, match="belong to other clusters"):
        choose(range(MAX_CLUSTERS), ())


def test_an_existing_cluster_keeps_its_range_or_names_who_has_it() -> None:
    own = Network(4)
    check_free(own, [(own.pods, own.host_link), (IPv4Network("192.168.0.0/16"), "wlan0")])
    with pytest.raises(AddressInUseError, match=r"the host routes 10\.0\.0\.0/8 through vpn0; remove that route, or run `devcluster down`"):
        check_free(own, [(IPv4Network("10.0.0.0/8"), "vpn0")])
