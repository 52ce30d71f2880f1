"""How requests are served: what all services share."""
