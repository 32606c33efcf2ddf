# SPDX-License-Identifier: Apache-2.0
"""Connectors of inference engines, each thin over ``kvgrpc.client``."""
