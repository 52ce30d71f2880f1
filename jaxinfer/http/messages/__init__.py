"""The Messages API of Anthropic, on the chats that all APIs share. Start at `reply.py`."""
