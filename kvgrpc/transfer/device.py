# SPDX-License-Identifier: Apache-2.0
"""Cards as the driver shows them to this process: what engines and tools use of the extension."""

from kvgrpc.transfer._native import Card, IpcEvent, cards, current_context, export_memory, use_context

__all__ = ["Card", "IpcEvent", "cards", "current_context", "export_memory", "use_context"]
