# SPDX-License-Identifier: Apache-2.0
"""Benchmarks. Each prints what it measured on the machine it ran on, and claims nothing beyond that."""
