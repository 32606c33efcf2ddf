# SPDX-License-Identifier: Apache-2.0
"""The driver: it owns the bookkeeper on the event loop, reads the clock and carries out the outbox."""
