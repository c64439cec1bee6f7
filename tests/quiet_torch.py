"""Importing this keeps torch to one thread, and progress bars from leaving a thread behind.

Two threads that wait for each other are many times slower on a busy machine. Each kind of progress
bar has a thread that never ends.
"""

from __future__ import annotations

import torch
from tqdm import tqdm

torch.set_num_threads(1)
tqdm.monitor_interval = 0
