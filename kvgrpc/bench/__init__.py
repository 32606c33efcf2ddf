# SPDX-License-Identifier: Apache-2.0
"""What the service costs on this machine: figures, their goals, and the processes that are measured."""
