# SPDX-License-Identifier: Apache-2.0
"""Runs seeded worlds: ``python -m tests.sim --seeds 2000``; the first failure is printed with its seed, exit code 1."""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback

from tests.sim.loop import PromiseError
from tests.sim.mutants import MUTANTS, mutated
from tests.sim.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many worlds")
    parser.add_argument("--start", type=int, help="the first seed; random when not given")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="take one rule out of the core")
    parser.add_argument("--verbose", type=int, metavar="SEED", help="run this seed alone and print what happens")
    options = parser.parse_args()
    start = options.start if options.start is not None else random.SystemRandom().randrange(1 << 40)
    seeds = range(start, start + options.seeds) if options.verbose is None else [options.verbose]
    print(f"seeds {seeds[0]} to {seeds[-1]}", flush=True)
    began, events = time.monotonic(), 0
    with mutated(options.mutant):
        for seed in seeds:
            try:
                events += World(seed, options.verbose is not None, with_invariants=options.mutant is None).run()
            except Exception as error:  # noqa: BLE001 - whatever a world ends with, its seed has to be told
                print(f"seed {seed}: {type(error).__name__}: {error}")
                if not isinstance(error, PromiseError) or options.verbose is not None:
                    traceback.print_exc()
                mutant = f" --mutant {options.mutant}" if options.mutant else ""
                print(f"again: python -m tests.sim --verbose {seed}{mutant}")
                return 1
    spent = time.monotonic() - began
    print(f"{len(seeds)} seeds passed, {events} events, {1000 * spent / len(seeds):.0f} ms a seed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
