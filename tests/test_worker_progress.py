"""What the parent of a worker process knows of its batches."""

from __future__ import annotations

import resource

from service_streamer.workers.progress import StageProgress


def test_progress_of_a_worker_is_not_known_without_a_free_descriptor() -> None:
    progress = StageProgress()
    progress.for_worker()[0] = 5
    assert progress.begun() == {4}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        begun = progress.begun()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert begun == frozenset()
