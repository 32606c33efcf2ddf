# SPDX-License-Identifier: Apache-2.0
"""Keeps objects below the arena."""
