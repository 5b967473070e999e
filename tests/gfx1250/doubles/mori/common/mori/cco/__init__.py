"""What mori.cco exports."""

from .communicator import Communicator, UniqueId, get_unique_id

__all__ = ["Communicator", "UniqueId", "get_unique_id"]
