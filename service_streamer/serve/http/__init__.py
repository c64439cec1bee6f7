"""The web service over HTTP."""
