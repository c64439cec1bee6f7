"""Runs test files with everything patched by gevent: ``python run_under_gevent.py FILE ...``"""

from __future__ import annotations

from gevent import monkey

if __name__ == "__main__":  # and not in the workers, which import this file again
    monkey.patch_all()

    import os
    import sys

    import gevent
    import pytest

    gevent.sleep(0.001)  # so that the loop has its descriptors before the leak guard counts
    fork, listen = os.fork, gevent.get_hub().loop.install_sigchld
    # Its own listens after the fork: for ever, if the first child has ended by then.
    os.fork = lambda: listen() or fork()

    def is_for_gevent(item: pytest.Function) -> bool:
        # A gate blocks in the operating system, and with it every greenlet of the process.
        if {"gate", "no_gevent"} & {*item.fixturenames, *item.keywords}:
            return False
        # Each would start a pool. test_gevent.py has a test of those.
        return not (hasattr(item, "callspec") and "shared" in [*item.callspec.params.values()])

    class Suited:
        def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
            items[:] = filter(is_for_gevent, items)

    sys.exit(pytest.main(["-q", *sys.argv[1:]], plugins=[Suited()]))
