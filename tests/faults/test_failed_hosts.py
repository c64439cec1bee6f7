"""A bug in the engine of a worker host or a service: its open calls fail, and it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_redis_faults import Site, server, site  # noqa: F401  # fixtures

from serve_process import ROOT, Serving
from service_streamer import InternalError

BUG = "which is a bug in it, and goes on"


def test_a_host_whose_engine_fails_goes_on(site: Site) -> None:  # noqa: F811
    site.host(breaks=True)
    streamer = site.streamer()
    with pytest.raises(InternalError, match=f"{BUG}: RuntimeError: a bug"):
        streamer.predict([1])
    assert streamer.predict([2]) == [4]


#: As a bug in the engine would, with the next batch that comes back once the file is there.
BREAKS = """
import os
from service_streamer.batching.batcher import Batcher

batch_returned = Batcher.batch_returned

def breaks(self, report, now):
    if os.path.exists({switch!r}):
        os.remove({switch!r})
        raise RuntimeError("a bug")
    return batch_returned(self, report, now)

Batcher.batch_returned = breaks
"""


def test_a_service_whose_engine_fails_goes_on(tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    (tmp_path / "sitecustomize.py").write_text(BREAKS.format(switch=str(switch)))
    path = f"{tmp_path}:{ROOT}:{ROOT / 'tests'}"
    with Serving("models:double", PYTHONPATH=path) as service:
        switch.touch()
        failed = service.predict(2)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
        assert service.predict(2).status_code == 200
        assert f"{BUG}: RuntimeError: a bug; 1 call failed" in service.log()
        assert service.ready() == 200
