# SPDX-License-Identifier: Apache-2.0
"""Malformed and hostile messages at every RPC of a real server."""
