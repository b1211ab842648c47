"""Waits until a server is ready, opens a session and prints its id.

    session.py URL TOKEN
"""

import json
import sys
import time
import urllib.request

url, token = sys.argv[1:3]
for attempt in range(200):
    try:
        urllib.request.urlopen(f"{url}/ready", timeout=1).close()
        break
    except OSError:
        time.sleep(0.1)
request = urllib.request.Request(f"{url}/v1/sessions", method="POST", data=b"")
request.add_header("Authorization", f"Bearer {token}")
with urllib.request.urlopen(request, timeout=10) as answer:
    print(json.load(answer)["session_id"])
