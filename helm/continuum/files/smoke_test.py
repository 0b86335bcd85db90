"""Wait until the platform is ready, run one program, and fail unless it ends as completed or at its turn limit."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

BASE = os.environ["BASE_URL"]
DEADLINE_S = time.monotonic() + float(os.environ["TIMEOUT_S"]) - 10


def call(method, path, body=None):
    headers = {"content-type": "application/json"}
    if os.environ.get("API_KEY"):
        headers["authorization"] = "Bearer " + os.environ["API_KEY"]
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data=data, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read() or b"null")


def wait(what, poll):
    while time.monotonic() < DEADLINE_S:
        try:
            found = poll()
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):
                sys.exit(f"{what}: {error.code} {error.read()[:2000]!r}")
            found = None
        except (urllib.error.URLError, OSError) as error:
            print(f"{what}: {error}", flush=True)
            found = None
        if found:
            return found
        time.sleep(2)
    sys.exit(f"{what}: not within the time allowed")


def ended():
    program = call("GET", "/v1/programs/" + submitted["id"])
    return program if program["finished_at"] else None


wait("ready", lambda: call("GET", "/readyz") or True)
models = call("GET", "/v1/models")["data"]
print("models:", ", ".join(model["id"] for model in models), flush=True)
submitted = wait(
    "submit",
    lambda: call(
        "POST", "/v1/programs", {"input": "Say hello.", "limits": {"max_turns": 1, "max_tokens_per_turn": 16}}
    ),
)
program = wait("program", ended)
print(json.dumps({key: program.get(key) for key in ("id", "state", "end_reason", "turns", "usage")}))
if program["turns"] < 1 or program["state"] == "failed":
    sys.exit("the program did not run: " + json.dumps(program.get("error")))
