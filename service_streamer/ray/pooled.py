"""Workers on Ray for a pool that the processes of a host share: its process is the one driver."""

from __future__ import annotations

from typing import Any

from ..options.table import RayStreamerOptions
from ..pool.pool_memory import PoolMemory, in_message
from .cluster import Cluster
from .known_actor import KnownActor
from .ray_transport import RayTransport


def pool_transport(
    spec: bytes,
    options: RayStreamerOptions,
    memory: PoolMemory,  # noqa: ARG001 - workers elsewhere have none of this host
    otherwise: str | None = None,
) -> PooledRayTransport:
    """What the pool reaches its workers by.

    Args:
        otherwise: the address of the cluster, if the options name none.
    """
    address = otherwise if options.address is None else options.address
    cluster = Cluster(address, options.runtime_env)
    return PooledRayTransport(cluster, spec, options)


class PooledRayTransport(RayTransport):
    """Items and results travel between the pool and Ray; clients pickle and unpickle them."""

    def _send_batch(
        self, worker: KnownActor, batch_id: int, payloads: list[Any], calls: int | list[int]
    ) -> None:
        super()._send_batch(worker, batch_id, [in_message(each) for each in payloads], calls)
