"""Keeps schemathesis from waiting and from ending the session that it uses."""

import schemathesis

WAITS = ("acquire_timeout_s", "acquire_timeout_ms", "timeout_s", "timeout_ms")


@schemathesis.hook
def before_call(context, case, kwargs):
    if case.operation.path == "/v1/admin/sessions/{id}/end":
        number = str(case.path_parameters.get("id", ""))
        # The session of this run has a small number.
        if number.isdigit():
            case.path_parameters["id"] = str(int(number) % 10**6 + 10**6)
    body = case.body
    if not isinstance(body, dict):
        return
    for name in WAITS:
        value = body.get(name)
        # What is out of bounds must stay so: it has to be refused.
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 9223372036:
            body[name] = 0
