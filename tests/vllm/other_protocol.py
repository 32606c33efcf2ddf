# SPDX-License-Identifier: Apache-2.0
"""`kvgrpc` of a future that speaks the next major version of the protocol: ``python -m tests.vllm.other_protocol``."""

from __future__ import annotations

from kvgrpc import api

api.PROTOCOL_MAJOR += 1

if __name__ == "__main__":
    from kvgrpc.cli.root import main

    main()
