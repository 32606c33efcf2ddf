# SPDX-License-Identifier: Apache-2.0
"""Protobuf messages <-> plain types. Decoding checks what can be checked without state and refuses by field name."""
