"""BERT-base on a GPU, behind a Streamer and batched by hand: ``python benchmarks/gpu.py``.

It runs from a clone that is not installed; ``on_gpu/`` is what it consists of.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The repository for the package itself; this script's folder is there already.
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
    from on_gpu.command import main

    sys.exit(main())
