"""Images over HTTP: systems of experts and elastic services, next to the language models. Start at `endpoints.py`.

`experts.py` and `elastic.py` have the bodies and answers of their endpoints, `images.py` decodes what clients send.
"""
