"""Models by name: a folder, or a repository of the Hugging Face hub, which is fetched and converted once.

Start at `resolve`: all that takes a model, in Python and on the command line, finds its folder there. Then `names.py`
(how a repository and its revision are written), `repository.py` (all that is asked of the hub, through
`huggingface_hub`), and `conversions.py` (converted models in the cache folder).
"""

from jaxinfer.hub.conversions import fetch, look_at, resolve
from jaxinfer.hub.errors import HubError
from jaxinfer.hub.names import HubName, model_in_file

__all__ = ["HubError", "HubName", "fetch", "look_at", "model_in_file", "resolve"]
