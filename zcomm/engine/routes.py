"""Routes: the legs of a job's chunks, each over a channel, and what is done at their end.

| job            | legs |
| -------------- | --- |
| all-reduce     | to the owners, to all |
| reduce-scatter | to the owners |
| all-gather     | to all |

With hosts, what goes to the owners first goes to the ranks of this host, and what goes to all first
goes between hosts. All legs of all jobs are in one order (Transport.channels).
"""

from __future__ import annotations

from zcomm.engine.job import Job, Leg, Route
from zcomm.engine.steps import Steps
from zcomm.transport.channels import Transport


class Routes:
    """The routes of one engine."""

    def __init__(self, steps: Steps, transport: Transport) -> None:
        self._steps, self._transport = steps, transport

    def of(self, job: Job) -> Route:
        two_hops = bool(job.chunks) and job.chunks[0].hops is not None
        legs = self._to_owners(two_hops) if job.reduce else []
        if job.gather:
            legs += self._to_all(two_hops, summed=job.reduce)
        return Route(tuple(legs), self._steps.decode if job.gather else self._steps.total)

    def _to_owners(self, two_hops: bool) -> list[Leg]:
        steps, transport = self._steps, self._transport
        if not two_hops:
            return [Leg("reduce-scatter", transport.flat.reduce, steps.encode)]
        assert transport.local is not None
        assert transport.across is not None
        return [
            Leg("reduce-scatter inside of a host", transport.local.reduce, steps.encode_local),
            Leg("reduce-scatter between hosts", transport.across.reduce, steps.encode_across),
        ]

    def _to_all(self, two_hops: bool, summed: bool) -> list[Leg]:
        steps, transport = self._steps, self._transport
        prepare = steps.encode_sum if summed else steps.encode_owned
        if not two_hops:
            return [Leg("all-gather", transport.flat.gather, prepare)]
        assert transport.local is not None
        assert transport.across is not None
        return [
            Leg("all-gather between hosts", transport.across.gather, prepare),
            Leg("all-gather inside of a host", transport.local.gather, steps.forward),
        ]
