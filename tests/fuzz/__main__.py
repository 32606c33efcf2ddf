# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.fuzz --seconds 600 [--seed N]``: spoiled messages until the time is over."""

from __future__ import annotations

import argparse
import asyncio
import random
import time

from tests.fuzz.run import fuzz
from tests.security.guarded import guarded

ROUNDS_A_SERVER = 50


async def main(seconds: float, seed: int) -> None:
    end_s, total = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        async with guarded() as server:
            codes = await fuzz(server, seed, ROUNDS_A_SERVER, end_s)
            assert "call failed" not in server.served.log, server.served.log
        total += sum(codes.values())
        print(f"seed {seed}: {dict(sorted(codes.items()))}", flush=True)
        seed += 1
    print(f"{total} messages", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    given = parser.parse_args()
    asyncio.run(main(given.seconds, given.seed))
