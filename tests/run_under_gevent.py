"""Runs test files with everything patched by gevent: ``python run_under_gevent.py FILE ...``"""

from __future__ import annotations

from gevent import monkey

if __name__ == "__main__":  # and not in the workers, which import this file again
    monkey.patch_all()

    import sys

    import gevent
    import pytest

    gevent.sleep(0.001)  # so that the loop has its descriptors before the leak guard counts

    class WithoutGates:
        """A gate blocks in the operating system, and with it every greenlet of the process."""

        def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
            items[:] = [
                item
                for item in items
                if not {"gate", "no_gevent"} & {*item.fixturenames, *item.keywords}
            ]

    sys.exit(pytest.main(["-q", *sys.argv[1:]], plugins=[WithoutGates()]))
