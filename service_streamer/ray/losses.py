"""What Ray's errors mean for a worker, in words. Pure: errors come as the name of their class."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """What an error of a call to an actor means.

    Attributes:
        is_gone: whether the worker is to be given up. Its calls are computed again elsewhere, also
            one that it has completed: what an actor that cannot be reached has done is not known.
        is_refused: whether this one call was not even sent, and the worker could go on.
        end: what has happened to the worker, in words.
        is_final: whether the next one would fail in the same way, if this one never was ready.
        is_outage: whether it was lost for a reason that has nothing to do with what it computed.
    """

    is_gone: bool
    is_refused: bool
    end: str
    is_final: bool = False
    is_outage: bool = False


#: What Ray raises for lack of room: when a call is sent, or for one that was sent.
FULL = {
    "ObjectStoreFullError": "Ray's object store is full",
    "OutOfDiskError": "the disk is full to which Ray's object store spills",
}

_ENDS = {
    **FULL,
    "ActorUnschedulableError": "no node can take it",
    "ActorPlacementGroupRemoved": "its placement group was removed",
    "RuntimeEnvSetupError": "its runtime_env could not be set up",
    "OutOfMemoryError": "Ray killed it, since its node ran out of memory",
    "NodeDiedError": "its node died",
    "LocalRayletDiedError": "the raylet of its node died",
    "ActorUnavailableError": "it cannot be reached",
    "ObjectLostError": "an object of the call was lost",
    "ObjectFetchTimedOutError": "an object of the call could not be fetched",
    "ObjectReconstructionFailedError": "an object of the call was lost",
    "OwnerDiedError": "an object of the call was lost",
    "TaskCancelledError": "a call of it was cancelled",
    "LeftCluster": "this process has left its Ray cluster",
}

#: Of these what the worker computed is not the reason.
_OUTAGES = (
    "ActorPlacementGroupRemoved",
    "NodeDiedError",
    "LocalRayletDiedError",
    "OwnerDiedError",
    "LeftCluster",
)

#: What Ray 2.60 writes in the text of ActorDiedError, and what that says; the first that is found.
#: Of all these what the worker computed is not the reason.
#: Of a process that has died for whatever reason it writes "OOM killer" and "ray stop", too.
_TEXTS = (
    ("node was preempted", "its node was preempted"),
    ("node was terminated expectedly", "its node was removed"),
    ("its node has died", "its node died"),
    ("killed by `ray.kill`", "it was killed by ray.kill"),
    ("placement group was removed", "its placement group was removed"),
    ("owner has died", "the process that had started it died"),
)

_FINAL = ("ActorUnschedulableError", "RuntimeEnvSetupError")


def judge(
    kind: str, text: str, *, failed_to_start: bool = False, preempted: bool = False
) -> Verdict:
    """What an error means.

    Args:
        kind: the name of its class.
        text: its own.
        failed_to_start: whether the actor's constructor raised.
        preempted: whether Ray says that its node was preempted.
    """
    if kind == "NotSent":
        return Verdict(False, True, text)
    if failed_to_start:
        return Verdict(True, False, f"it could not be started: {_last_line(text)}", True)
    if preempted:
        return Verdict(True, False, "its node was preempted", is_outage=True)
    if kind in _ENDS:
        return Verdict(True, False, _ENDS[kind], kind in _FINAL, kind in _OUTAGES)
    if kind.startswith("RayTaskError"):
        return Verdict(True, False, f"a call to it failed: {_last_line(text)}")
    if kind in ("ActorDiedError", "RayActorError"):
        for found, end in _TEXTS:
            if found in text:
                return Verdict(True, False, end, is_outage=True)
        return Verdict(True, False, "its process died")
    return Verdict(True, False, f"{kind}: {_last_line(text)}")


def _last_line(text: str) -> str:
    """Where a traceback says what was raised."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
