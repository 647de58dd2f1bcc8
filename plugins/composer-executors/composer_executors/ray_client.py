"""Requests to a Ray cluster's dashboard, over the documented REST interface of Ray Jobs, and what its refusals mean.

Not by Ray's own client: that takes seconds to import, keeps the token of a process for ever, waits without end, and
turns a token on by what it finds in the home directory. So no Ray is needed here, and one of another release will do.
Not here: what is asked (`ray.py`).
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_core.errors import ComposerError, MissingError, RunFailed, UsageError

AT = "executor ray"
PATIENCE_S = 60.0
"""How long one answer may take; a head that is just coming up keeps a submission waiting for ten seconds."""
_OFF = "disabled"
_UNAUTHORISED = (401, 403)
_NOT_FOUND, _BAD_REQUEST = 404, 400


class NotThere(RunFailed):
    """The cluster knows nothing of that name."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Else the token would follow to wherever an answer points."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Dashboard:
    """One cluster's."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._opener = urllib.request.build_opener(_NoRedirects)

    def get(self, path: str) -> Any:
        """What it answers.

        Raises:
            NotThere: 404.
            MissingError: nobody answers there, it is no Ray, or it does not let us in.
            RunFailed: it could not, in its own words.
        """
        return self._ask("GET", path)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The same with something to do.

        Raises:
            UsageError: it finds something wrong with what it got.
        """
        return self._ask("POST", path, body or {})

    def delete(self, path: str) -> None:
        """Forget a job that is over."""
        self._ask("DELETE", path)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **_authorization(os.environ)}
        request = urllib.request.Request(self._address + path, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=PATIENCE_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code, error.read().decode("utf-8", "replace")) from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise self._nobody(f"no Ray dashboard answers at {self._address}: {why}") from None
        except ValueError:
            raise self._nobody(f"what answers at {self._address} is no Ray dashboard") from None

    def _refused(self, code: int, text: str) -> ComposerError:
        said = last_line(text) or f"status {code}"
        if code in _UNAUTHORISED:
            fix = "export RAY_AUTH_TOKEN=..., or RAY_AUTH_TOKEN_PATH=FILE, with the cluster's token"
            if os.environ.get("RAY_AUTH_MODE") == _OFF:
                fix = f"unset RAY_AUTH_MODE, which is {_OFF}; {fix}"
            return MissingError(f"Ray does not let us in: {said}", at=AT, fix=fix)
        if code == _NOT_FOUND:
            return NotThere(said, at=AT)
        if code == _BAD_REQUEST:
            return UsageError(f"Ray refuses: {said}", at=AT)
        return RunFailed(f"Ray says: {said}", at=AT)

    @staticmethod
    def _nobody(problem: str) -> MissingError:
        return MissingError(
            problem, at="executor.address", fix="the URL that `ray start --head` shows: http://HOST:8265"
        )


def last_line(text: str) -> str:
    """Of a traceback it says what happened."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" .")]
    return lines[-1] if lines else ""


def _authorization(environ: Mapping[str, str]) -> dict[str, str]:
    """The token, looked for where Ray looks for it.

    Raises:
        MissingError: RAY_AUTH_TOKEN_PATH names a file that cannot be read, or a token is wanted and there is none.
    """
    mode = environ.get("RAY_AUTH_MODE", "").lower()
    if mode == _OFF:
        return {}
    token = environ.get("RAY_AUTH_TOKEN", "").strip() or _from_file(environ)
    if mode == "token" and not token:
        raise MissingError("RAY_AUTH_MODE is token, and there is none", at=AT, fix="export RAY_AUTH_TOKEN=...")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _from_file(environ: Mapping[str, str]) -> str:
    named = environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        if named is None:
            return ""
        raise MissingError("no such file", at=f"RAY_AUTH_TOKEN_PATH {named}") from None
    except (OSError, ValueError) as error:
        raise MissingError(f"the token cannot be read: {error}", at=str(path)) from None
