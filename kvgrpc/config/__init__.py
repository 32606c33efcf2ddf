# SPDX-License-Identifier: Apache-2.0
"""Settings: the only reader of the environment and of the machine's facts. Only the composition root makes them."""

from kvgrpc.config.values import is_loopback, split_address

__all__ = ["is_loopback", "split_address"]
