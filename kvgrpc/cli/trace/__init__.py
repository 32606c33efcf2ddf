# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc trace``: recordings of lookups and stores, and what another size of cache would have found."""
