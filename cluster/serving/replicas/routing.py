"""Ray Serve's router of the replicas' handle, by :mod:`cluster.serving.replicas.prefixes`.

Ray Serve sends this module to other processes by value, so what the process has once is elsewhere.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster.serving.replicas import prefixes


class PrefixRouter(RequestRouter):
    """Of a call's arguments the first one has the requests, the third one the replicas that are to
    be avoided."""

    def initialize_state(self, **settings: Any) -> None:
        """Ray Serve calls it with the router's settings: a replica's `slots`."""
        self._prefixes = prefixes.Prefixes(settings["slots"])
        self._reasons: dict[
            str, prefixes.Reason
        ] = {}  # of requests that no replica has accepted yet

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        known = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None or not pending_request.args:
            return [[*known.values()]]
        pending_request.routing_context.should_backoff = True  # where none has room
        requests, begun, avoid = pending_request.args
        choice = self._prefixes.choose(requests[0].text, [*known])
        wanted = [name for name in choice.replicas if name not in avoid] or choice.replicas
        key = pending_request.metadata.internal_request_id
        self._prefixes.reserve(key, wanted[0], len(requests))
        if not begun:  # else it was counted when it was
            self._reasons[key] = choice.reason if wanted[0] == choice.replicas[0] else "busy"
        return [[known[name]] for name in wanted]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        if not pending_request.args:
            return
        requests, key = pending_request.args[0], pending_request.metadata.internal_request_id
        self._prefixes.accepted(key, replica_id.unique_id, len(requests), requests[0].text)
        if (reason := self._reasons.pop(key, None)) is not None:
            prefixes.ROUTED[reason] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._prefixes.ended(internal_request_id)
        self._reasons.pop(internal_request_id, None)
