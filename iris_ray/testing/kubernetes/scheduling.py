"""Which pod fits on which node: Kubernetes' scheduler, as far as pods of Ray and TPU nodes need it.

Source: https://kubernetes.io/docs/concepts/scheduling-eviction/ (selectors, affinity, taints, extended resources). A
term of a pod's affinity that no pod at all matches is no hindrance if it matches the pod itself (satisfyPodAffinity in
pkg/scheduler/framework/plugins/interpodaffinity/filtering.go): else the first pod of a slice could never start.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from iris_ray.testing.kubernetes.objects import TPU_RESOURCE, Manifest, amount, requests, requirement_holds

Placed = Sequence[tuple[Manifest, Manifest]]
"""Pods, each with the node that it is on or meant for."""

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def hindrance(pod: Manifest, node: Manifest, placed: Placed) -> str | None:
    """Return why a pod can't be on a node, in the scheduler's words; None if it can.

    Args:
        pod: a pod that is on no node.
        node: a node, or what one would be like.
        placed: the pods that are on nodes.
    """
    if not _selects(pod, node):
        return "node(s) didn't match Pod's node affinity/selector"
    if (taint := _untolerated(pod, node)) is not None:
        return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    if (resource := _lacking(pod, node, placed)) is not None:
        return f"Insufficient {resource}"
    if not _likes_neighbours(pod, node, placed):
        return "node(s) didn't match pod affinity rules"
    if _dislikes_neighbours(pod, node, placed) or any(
        _dislikes_neighbours(other, node, [(pod, node)], at=where) for other, where in placed
    ):
        return "node(s) didn't match pod anti-affinity rules"
    return None


def unschedulable(hindrances: Iterable[str], nodes: int) -> str:
    """Return the scheduler's message about a pod that fits on no node."""
    counted = Counter(hindrances)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counted.items()))
    return f"0/{nodes} nodes are available{': ' + reasons if reasons else ''}."


def _selects(pod: Manifest, node: Manifest) -> bool:
    labels = node["metadata"]["labels"]
    if any(labels.get(name) != value for name, value in (pod["spec"].get("nodeSelector") or {}).items()):
        return False
    affinity = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(_REQUIRED)
    if affinity is None:
        return True
    return any(
        all(
            requirement_holds(labels, part["key"], part["operator"], part.get("values") or ())
            for part in term.get("matchExpressions") or []
        )
        for term in affinity["nodeSelectorTerms"]
    )


def _untolerated(pod: Manifest, node: Manifest) -> Mapping[str, str] | None:
    tolerations = list(pod["spec"].get("tolerations") or [])
    if TPU_RESOURCE in requests(pod["spec"]):  # GKE's admission adds it: ExtendedResourceToleration
        tolerations.append({"key": TPU_RESOURCE, "operator": "Exists"})
    for taint in node["spec"].get("taints") or []:
        if not any(_tolerates(toleration, taint) for toleration in tolerations):
            found: Mapping[str, str] = taint
            return found
    return None


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")


def _lacking(pod: Manifest, node: Manifest, placed: Placed) -> str | None:
    free = {name: amount(quantity) for name, quantity in node["status"]["allocatable"].items()}
    name = node["metadata"]["name"]
    for other, where in placed:
        if where["metadata"]["name"] == name:
            for resource, taken in requests(other["spec"]).items():
                free[resource] = free.get(resource, Decimal(0)) - taken
    return next((item for item, wanted in requests(pod["spec"]).items() if wanted > free.get(item, 0)), None)


def _likes_neighbours(pod: Manifest, node: Manifest, placed: Placed) -> bool:
    for term in _terms(pod, "podAffinity"):
        matching = [where for other, where in placed if _matches(term, other)]
        if not any(_same_domain(term, node, where) for where in matching) and (matching or not _matches(term, pod)):
            return False
    return True


def _dislikes_neighbours(pod: Manifest, node: Manifest, placed: Placed, *, at: Manifest | None = None) -> bool:
    """Say whether a pod's anti-affinity forbids those others next to it; it is on ``node``, or on ``at``."""
    return any(
        _matches(term, other) and _same_domain(term, at or node, where)
        for term in _terms(pod, "podAntiAffinity")
        for other, where in placed
    )


def _terms(pod: Manifest, kind: str) -> list[Mapping[str, Any]]:
    return list(((pod["spec"].get("affinity") or {}).get(kind) or {}).get(_REQUIRED) or [])


def _matches(term: Mapping[str, Any], pod: Manifest) -> bool:
    labels = pod["metadata"]["labels"]
    selector = term.get("labelSelector") or {}
    return all(labels.get(name) == value for name, value in (selector.get("matchLabels") or {}).items()) and all(
        requirement_holds(labels, part["key"], part["operator"], part.get("values") or ())
        for part in selector.get("matchExpressions") or []
    )


def _same_domain(term: Mapping[str, Any], node: Manifest, other: Manifest) -> bool:
    key = term["topologyKey"]
    value = node["metadata"]["labels"].get(key)
    return value is not None and value == other["metadata"]["labels"].get(key)
