# SPDX-License-Identifier: Apache-2.0
"""The gRPC server: listeners, checks of every call, and thin servicers over the cache interface."""
