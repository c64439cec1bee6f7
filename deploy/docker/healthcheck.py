#!/usr/bin/env -S python3 -I
"""Exit with 0 if the service in this container answers a path with 200: a check without curl.

healthcheck [PATH], where PATH is /health/live by default.
"""

import http.client
import os
import ssl
import sys
import urllib.request

environ = os.environ
port = environ.get("SERVICE_STREAMER_PORT", "8000")
scheme = "https" if environ.get("SERVICE_STREAMER_SSL_CERTFILE") else "http"
path = sys.argv[1] if len(sys.argv) > 1 else "/health/live"
# The certificate is for the name by which clients know the service, which is not 127.0.0.1.
context = ssl._create_unverified_context()
opener = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
)
try:
    opener.open(f"{scheme}://127.0.0.1:{port}{path}", timeout=5).close()
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"{path}: {error}")
