# SPDX-License-Identifier: Apache-2.0
"""Moves bytes between engines' memory and the arena; the only place that touches memory."""
