# SPDX-License-Identifier: Apache-2.0
"""The bookkeeper: what is cached where, who may read it, what has to be copied. Pure: no I/O, no clock."""
