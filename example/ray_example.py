"""Run ``python example/ray_example.py``: workers that Ray places, on this machine or on a cluster.

Without --address it is the cluster that this machine is a node of, or a new one on this machine.
Workers on other nodes get the modules of this folder from here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bert_model import ManagedBertModel
from service_streamer import RayStreamer


def main() -> None:
    parser = argparse.ArgumentParser(description="A BERT whose workers Ray places.")
    parser.add_argument("--address", help="host:port of a cluster, auto or local")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0, help="of each worker, such as 1 or 0.5")
    parser.add_argument("sentences", nargs="*", default=["Happy birthday to [MASK]."])
    args = parser.parse_args()
    with RayStreamer(
        ManagedBertModel,
        worker_num=args.workers,
        num_gpus=args.gpus,
        address=args.address,
        runtime_env={"working_dir": str(Path(__file__).parent)},
    ) as streamer:
        print(*streamer.predict(args.sentences, timeout=600), sep="\n")
        for worker in streamer.workers():
            print(f"worker {worker.number} on {worker.device or 'the CPU'}: {worker.state}")


if __name__ == "__main__":
    main()
