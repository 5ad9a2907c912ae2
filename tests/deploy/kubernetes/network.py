"""Who may connect to whom by a set of NetworkPolicies, as a cluster's network is to understand them."""

from dataclasses import dataclass

from tests.deploy.kubernetes.manifests import Manifest


@dataclass(frozen=True, slots=True)
class Peer:
    """A pod, or something that is none: then it has no labels and lies in a namespace of nobody's."""

    namespace: str
    labels: dict[str, str]


def may_connect(
    policies: list[Manifest], source: Peer, destination: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Whether ``source`` may leave for it and ``destination`` lets it in. A pod that no policy of a direction
    selects may do everything in that direction."""
    return all(
        _is_allowed(policies, here, there, port, protocol, direction)
        for here, there, direction in ((source, destination, "egress"), (destination, source, "ingress"))
    )


def _is_allowed(
    policies: list[Manifest], here: Peer, there: Peer, port: int, protocol: str, direction: str
) -> bool:
    about_here = [
        each
        for each in policies
        if each["metadata"]["namespace"] == here.namespace
        and direction.capitalize() in each["spec"]["policyTypes"]
        and _selects(each["spec"]["podSelector"], here.labels)
    ]
    if not about_here:
        return True
    return any(
        _names_peer(rule.get("to" if direction == "egress" else "from"), here.namespace, there)
        and any(_names_port(each, port, protocol) for each in rule["ports"])
        for policy in about_here
        for rule in policy["spec"].get(direction, ())
    )


def _selects(selector: Manifest, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}, f"not understood here: {selector}"
    wanted: dict[str, str] = selector.get("matchLabels", {})
    expressions: list[Manifest] = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions), f"not understood here: {selector}"
    is_in = all(labels.get(each["key"]) in each["values"] for each in expressions)
    return is_in and wanted.items() <= labels.items()


def _names_peer(peers: list[Manifest] | None, namespace: str, peer: Peer) -> bool:
    """A rule without peers is about everybody; one without a namespace about its policy's own."""
    if peers is None:
        return True
    for each in peers:
        assert set(each) <= {"podSelector", "namespaceSelector"}, f"not understood here: {each}"
        if "namespaceSelector" in each:
            is_there = _selects(each["namespaceSelector"], {"kubernetes.io/metadata.name": peer.namespace})
        else:
            is_there = peer.namespace == namespace
        if is_there and _selects(each.get("podSelector", {}), peer.labels):
            return True
    return False


def _names_port(rule: Manifest, port: int, protocol: str) -> bool:
    first: int = rule["port"]
    last: int = rule.get("endPort", first)
    return first <= port <= last and rule.get("protocol", "TCP") == protocol
