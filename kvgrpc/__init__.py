# SPDX-License-Identifier: Apache-2.0
"""kvgrpc: a node-level gRPC service that keeps the KV cache of LLM inference engines."""

__version__ = "0.1.0"
