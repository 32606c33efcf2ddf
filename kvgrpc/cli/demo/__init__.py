# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc demo``: a real transformer's KV cache goes into the service in one process and comes back in another."""
