# SPDX-License-Identifier: Apache-2.0
"""Generated from ``proto/kvgrpc/v1`` by ``make proto``; only this file is written by hand."""
