"""`/v1/responses`, OpenAI's Responses API, on the chats that all APIs share. Start at `reply.py`.

`bodies.py` has the fields of a request, `conversation.py` makes messages of its items, `output.py` makes items and
events of the answer's parts, and `store.py` keeps responses for later requests.
"""
