# SPDX-License-Identifier: Apache-2.0
"""Settings: the only reader of the environment and of the machine's facts. Only the composition root uses it."""
